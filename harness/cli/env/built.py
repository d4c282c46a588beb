"""`harness env list`, `create` and `check`: the environments of the stacks, built or not."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import machine
from harness.cli.env.chosen import environments
from harness.cli.exits import NOT_OK, OK, say
from harness.cli.inputs import add_json
from harness.cli.progress import Progress
from harness.stacks import adopted, build
from harness.stacks.header import Environment, stacks
from harness.stacks.interpreter import EnvironmentFailed
from harness.worker import launch
from runners.protocol import Request

PROBE_TIMEOUT_S = 1800.0  # a stack may compile all its kernels at their first check


def add(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, summary, act, devices in (
        ("list", "list the environments of the stacks, and where they are", _list, "default: all"),
        ("create", "build environments that are missing", _create, "default: cpu"),
        ("check", "start each environment that is there and probe it", _check, "default: all"),
    ):
        parser = actions.add_parser(name, help=summary, description=summary)
        parser.add_argument("stack", nargs="*", help="stacks (default: all)")
        parser.add_argument("--device", help=f"cpu, cuda, metal, vulkan or hip ({devices})")
        add_json(parser, "one object per environment")
        parser.set_defaults(act=act, parser=parser)


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


def _shown(lines: list[dict[str, Any]], as_json: bool) -> int:
    if as_json:
        print(json.dumps(lines, indent=1))
    else:
        print("\n".join(text for line in lines for text in _lines(line)))
    return NOT_OK if any(line.get("problem") for line in lines) else OK


def _state(environment: Environment) -> dict[str, Any]:
    try:
        adopted.find(environment)
        problem = {}
    except EnvironmentFailed as failure:
        problem = {"problem": str(failure)}
    found = build.find(environment)
    return {
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
    } | problem


def _probed(environment: Environment) -> dict[str, Any]:
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
            facts = launch.facts_of(launch.run_job(request, found, Path(folder), PROBE_TIMEOUT_S))
        except launch.JobFailed as failure:
            return line | {"state": f"{state}, and does not work", "problem": str(failure)}
    return line | {"state": "works" if found.adopted is None else f"{state}; works"} | facts


def _lines(line: dict[str, Any]) -> Iterator[str]:
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
