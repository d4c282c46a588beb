"""`harness env`: list, build and check the environments of the stacks; other modules adopt and pack."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict, cast

from harness import machine
from harness.api.progress import Progress
from harness.campaign import worker
from harness.cli import NOT_OK, OK, env_pack, env_use, say, synth
from harness.cli.environments import environments
from harness.stacks import adopted, build
from harness.stacks.adopted import EnvironmentFailed
from harness.stacks.header import Environment, stacks
from runners.protocol import NO_JOB, Request

PROBE_TIMEOUT_S = 1800.0  # a stack may compile all its kernels at their first check


def _list(arguments: argparse.Namespace) -> int:
    chosen = environments(arguments.stack, arguments.device)
    return _shown([_state(environment) for environment in chosen], arguments.json)


def _check(arguments: argparse.Namespace) -> int:
    """Fails on a broken environment and, with a device, on one that is not built."""
    lines = [_probed(environment) for environment in environments(arguments.stack, arguments.device)]
    if arguments.device is not None:
        lines = [line | ({} if line["python"] else {"problem": "not built"} | line) for line in lines]
    return _shown(lines, arguments.json)


def _create(arguments: argparse.Namespace) -> int:
    progress, lines, code = Progress(), [], OK
    for environment in environments(arguments.stack, arguments.device or "cpu"):
        try:
            made = build.create(environment, progress.say)
        except EnvironmentFailed as failure:
            say(failure)
            code = NOT_OK
            continue
        lines.append(_state(environment))
        if not arguments.json:
            progress.clear()
            print(f"{environment.title}: {made.python}")
            for gap in made.gaps():
                print(f"    {gap}")
    if arguments.json:
        print(json.dumps(lines, indent=1))
    return code


class Listed(TypedDict, total=False):
    """An environment as `--json` has it, with the facts of the stack's own probe; null: unknown."""

    stack: str
    environment: str
    device: str
    state: str
    python: str | None
    python_version: str | None
    pins_not_met: list[str] | None
    lock: list[str] | None
    imports: dict[str, str | None] | None
    lacking: dict[str, str] | None
    unavailable: str | None
    kernels: dict[str, str | None] | None
    devices: list[str]
    system_info: str
    problem: str


def _shown(lines: list[Listed], as_json: bool) -> int:
    if as_json:
        print(json.dumps(lines, indent=1))
    else:
        print("\n".join(text for line in lines for text in _lines(line)))
    return NOT_OK if any(line.get("problem") for line in lines) else OK


def _state(environment: Environment) -> Listed:
    found = build.find(environment)
    line: Listed = {
        "stack": environment.stack,
        "environment": environment.name,
        "device": environment.device,
        "state": found.words if found else "not built",
        "python": str(found.python) if found else None,
        "python_version": found.adopted.python_version if found and found.adopted else None,
        "pins_not_met": list(found.adopted.pins_not_met) if found and found.adopted else None,
        "lock": list(found.lock) if found else None,
        "imports": dict(found.imports) if found else None,
        "lacking": dict(found.lacking) if found else None,
        "unavailable": None,
        "kernels": None,
    }
    try:
        adopted.find(environment)
    except EnvironmentFailed as failure:
        line["problem"] = str(failure)
    return line


def _probed(environment: Environment) -> Listed:
    """The state of an environment, and what its probe reports."""
    line, found = _state(environment), build.find(environment)
    if found is None or not environment.dependencies:
        return line
    state = line["state"]
    try:
        request = Request("probe", environment.stack, machine.device_id(environment.device, None), {})
    except machine.DeviceError as absent:
        return line | {"state": f"{state}; {absent}", "unavailable": str(absent)}
    with tempfile.TemporaryDirectory(prefix="harness-probe-") as folder:
        try:
            facts = worker.facts_of(worker.run_job(request, found, Path(folder), PROBE_TIMEOUT_S))
        except worker.JobFailed as failure:
            if NO_JOB not in str(failure):
                return line | {"state": f"{state}, and does not work", "problem": str(failure)}
            facts = {}  # it has no kernels of its own to probe, and its runner was imported
    line["state"] = "works" if found.adopted is None else f"{state}; works"
    return line | cast(Listed, facts)


def _lines(line: Listed) -> Iterator[str]:
    """An environment as text: its state, and which compiled modules and kernels work here."""
    yield f"{line['stack']}/{line['environment']}: {line['state']} ({stacks()[line['stack']].summary})"
    for key in ("python", "devices", "system_info", "problem"):
        if line.get(key):
            yield f"    {key}: {line[key]}"
    for pin in line["pins_not_met"] or ():
        yield f"    not pinned: {pin}"
    idle = f"; cannot run: {line['unavailable']}" if line["unavailable"] else ""
    for module, why in (line["imports"] or {}).items():
        yield f"    kernel module {module}: {f'does not load: {why}' if why else f'loads{idle}'}"
    for package, why in (line["lacking"] or {}).items():
        yield f"    lacks {package}: {why}"
    for kernel, why in (line["kernels"] or {}).items():
        yield f"    kernel {kernel}: {why or 'works'}"


def run(arguments: argparse.Namespace) -> int:
    """Do one action."""
    actions = {
        "list": _list,
        "create": _create,
        "check": _check,
        "use": env_use.use,
        "forget": env_use.forget,
        "pack": env_pack.make,
        "synth": synth.make,
    }
    return actions[arguments.action](arguments)
