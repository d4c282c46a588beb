"""`harness env`: list, create and check the environments the stacks run in."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import machine
from harness.cli.exits import NOT_OK, OK, Mistake, say
from harness.cli.inputs import add_json
from harness.cli.progress import Progress
from harness.stacks import build
from harness.stacks.header import Environment, stacks
from harness.worker import launch
from runners.protocol import Request

PROBE_TIMEOUT_S = 120.0


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=["list", "create", "check"], help="check: start each one and probe it"
    )
    parser.add_argument("stack", nargs="*", help="stacks (default: all)")
    parser.add_argument("--device", help="cpu, cuda, metal, vulkan or hip (create: cpu; else all)")
    add_json(parser, "one object per environment")


def run(arguments: argparse.Namespace) -> int:
    """List, create or check environments. `check` fails on a broken one and, with a device, on one that is
    not built."""
    action, names, device, as_json = arguments.action, arguments.stack, arguments.device, arguments.json
    for name in names:
        if name not in stacks():
            raise Mistake(f"unknown stack {name}; there are {', '.join(stacks())}")
    headers = [stacks()[name] for name in names or stacks()]
    known = sorted({e.device for header in headers for e in header.environments.values()})
    if action == "create":
        device = device or "cpu"
    if device is not None and device not in known:
        raise Mistake(f"no environment for device {device}; there are {', '.join(known)}")
    chosen = [e for h in headers for e in h.environments.values() if device in (None, e.device)]
    if action == "create":
        return _create(chosen, as_json)
    lines = [_state(environment, check=action == "check") for environment in chosen]
    if action == "check" and device is not None:
        lines = [line | ({} if line["python"] else {"problem": "not built"}) for line in lines]
    if as_json:
        print(json.dumps(lines, indent=1))
    else:
        print("\n".join(text for line in lines for text in _lines(line)))
    return NOT_OK if any(line.get("problem") for line in lines) else OK


def _create(environments: list[Environment], as_json: bool) -> int:
    progress, lines, code = Progress(), [], OK
    for environment in environments:
        try:
            made = build.create(environment, progress.say)
        except build.EnvironmentFailed as failure:
            say(failure)
            code = NOT_OK
            continue
        lines.append(_state(environment, check=False))
        if not as_json:
            progress.clear()
            print(f"{environment.stack}/{environment.name}: {made.python}")
            for gap in made.gaps():
                print(f"    {gap}")
    if as_json:
        print(json.dumps(lines, indent=1))
    return code


def _state(environment: Environment, check: bool) -> dict[str, Any]:
    found = build.find(environment)
    line: dict[str, Any] = {
        "stack": environment.stack,
        "environment": environment.name,
        "device": environment.device,
        "state": "built" if found else "not built",
        "python": str(found.python) if found else None,
        "lock": list(found.lock) if found else None,
        "imports": dict(found.imports) if found else None,
        "lacking": dict(found.lacking) if found else None,
        "unavailable": None,
        "kernels": None,
    }
    if not check or found is None or not environment.dependencies:
        return line
    try:
        request = Request("probe", environment.stack, machine.device_id(environment.device, None), {})
    except machine.DeviceError as absent:
        return line | {"state": f"built; {absent}", "unavailable": str(absent)}
    with tempfile.TemporaryDirectory(prefix="harness-probe-") as folder:
        try:
            facts = launch.facts_of(launch.run_job(request, found, Path(folder), PROBE_TIMEOUT_S))
        except launch.JobFailed as failure:
            return line | {"state": "built, and does not work", "problem": str(failure)}
    return line | {"state": "works"} | facts


def _lines(line: dict[str, Any]) -> Iterator[str]:
    """An environment as text: its state, and which compiled modules and kernels work here."""
    yield f"{line['stack']}/{line['environment']}: {line['state']} ({stacks()[line['stack']].summary})"
    for key in ("python", "devices", "system_info", "problem"):
        if line.get(key):
            yield f"    {key}: {line[key]}"
    idle = f"; cannot run: {line['unavailable']}" if line["unavailable"] else ""
    for module, why in (line["imports"] or {}).items():
        yield f"    kernel module {module}: {f'does not load: {why}' if why else f'loads{idle}'}"
    for package, why in (line["lacking"] or {}).items():
        yield f"    lacks {package}: {why}"
    for kernel, why in (line["kernels"] or {}).items():
        yield f"    kernel {kernel}: {why or 'works'}"
