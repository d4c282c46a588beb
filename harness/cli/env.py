"""`harness env`: environments of the stacks: list, build, adopt, pack."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict, cast

from harness import machine
from harness.api.progress import Progress
from harness.base.text import plural, unknown
from harness.campaign import worker
from harness.cli import NOT_OK, OK, Mistake, say, synth
from harness.stacks import adopted, build, pack
from harness.stacks.adopted import EnvironmentFailed, Interpreter
from harness.stacks.header import Environment, project_of, stacks
from runners.protocol import Request


def environments(names: Sequence[str], device: str | None) -> list[Environment]:
    """The environments of these stacks (default: all) for a device family (default: all). Raises Mistake."""
    for name in names:
        if name not in stacks():
            raise Mistake(unknown("stack", name, stacks()))
    of_stacks = [e for name in names or stacks() for e in stacks()[name].environments.values()]
    if device is not None and device not in (known := sorted({e.device for e in of_stacks})):
        raise Mistake(f"no environment for device {device}; there are {', '.join(known)}")
    return [environment for environment in of_stacks if device in (None, environment.device)]


# `harness env use` and `forget`: run a stack in an interpreter that is already there.


LIMIT_S = 60.0


def _use(arguments: argparse.Namespace) -> int:
    """Adopt an interpreter once it has imported the runner; print its versions. Raises Mistake."""
    (environment,) = environments([arguments.stack], arguments.device)
    try:
        # Never resolved: a virtual environment's python is a symlink to one outside.
        found = adopted.look(environment, arguments.python.expanduser().absolute())
    except EnvironmentFailed as failure:
        raise Mistake(str(failure)) from failure
    if why := _import_failure(found):
        raise Mistake(f"{arguments.stack} cannot be imported in {found.python}: {why}")
    adopted.keep(found)
    assert found.adopted
    print(f"{environment.title}: {found.python}, Python {found.adopted.python_version}")
    named = {project_of(each) for each in environment.dependencies}
    versions = [line.replace("==", " ") for line in found.lock if project_of(line) in named]
    others = plural(len(found.lock) - len(versions), "package")
    print(f"    {', '.join(versions)}, and {others} that they need")
    for gap in found.gaps():
        print(f"    {gap}")
    return OK


def _import_failure(interpreter: Interpreter) -> str | None:
    """Why a worker cannot import the runner in it; null if it can. Uses no device."""
    request = Request("import", interpreter.environment.stack, "cpu", {})
    with tempfile.TemporaryDirectory(prefix="harness-import-") as folder:
        try:
            worker.facts_of(worker.run_job(request, interpreter, Path(folder), LIMIT_S))
        except worker.JobFailed as failure:
            return str(failure)
    return None


def _forget(arguments: argparse.Namespace) -> int:
    (environment,) = environments([arguments.stack], arguments.device)
    if (python := adopted.forget(environment)) is None:
        raise Mistake(f"no interpreter is adopted for {environment.title}")
    print(f"{environment.title}: no longer {python}")
    return OK


# `harness env list`, `create` and `check`: the environments of the stacks, built or not.


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
            return line | {"state": f"{state}, and does not work", "problem": str(failure)}
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


# `harness env pack`: one folder with all that a machine without a network needs.


def _pack(arguments: argparse.Namespace) -> int:
    """Make the pack and print how large it is. Raises Mistake, PackError."""
    environments(arguments.stack, None)
    for kind, word, known in (
        ("Python", arguments.python, pack.PYTHONS),
        ("platform", arguments.platform, pack.PLATFORMS),
    ):
        if word not in known:
            raise Mistake(unknown(kind, word, known))
    text, file = "", arguments.have
    try:
        text = file.read_text(encoding="utf-8") if file else ""
    except (OSError, UnicodeDecodeError) as refusal:
        why = getattr(refusal, "strerror", None) or "it is no text"
        raise Mistake(f"--have {file}: cannot be read: {why}") from refusal
    folder, progress = arguments.folder, Progress()
    target = pack.Target(arguments.python, arguments.platform, arguments.device)
    pack.pack(folder, arguments.stack, target, pack.have(text), progress.say)
    progress.clear()
    sizes = [path.stat().st_size for path in (folder / "packages").iterdir()]
    print(f"{folder}: {plural(len(sizes), 'package')}, {sum(sizes) / 1e6:.1f} MB")
    print(f"copy {folder} to the machine; there: sh {folder.name}/install.sh [--python PYTHON] [--to FOLDER]")
    return OK


def run(arguments: argparse.Namespace) -> int:
    """Do one action."""
    actions = {
        "list": _list,
        "create": _create,
        "check": _check,
        "use": _use,
        "forget": _forget,
        "pack": _pack,
        "synth": synth.make,
    }
    return actions[arguments.action](arguments)
