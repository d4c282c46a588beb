"""`harness env use` and `forget`: run a stack in an interpreter that is already there."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from harness.cli.env.chosen import environments
from harness.cli.exits import OK, Mistake
from harness.stacks import adopted
from harness.stacks.header import project_of
from harness.stacks.interpreter import EnvironmentFailed, Interpreter
from harness.system.wording import plural
from harness.worker import launch
from runners.protocol import Request

LIMIT_S = 60.0


def add(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "run a stack in an interpreter that is already there (conda, a container, a cluster's module)"
    parser = actions.add_parser("use", help=summary, description=summary)
    parser.add_argument("stack")
    parser.add_argument("python", type=Path, help="path of the interpreter; nothing is installed into it")
    _finish(parser, _use)
    summary = "give up an adopted interpreter; the stack is built again when it is next needed"
    parser = actions.add_parser("forget", help=summary, description=summary)
    parser.add_argument("stack")
    _finish(parser, _forget)


def _finish(parser: argparse.ArgumentParser, act: object) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, cuda, metal, vulkan or hip (default: cpu)")
    parser.set_defaults(act=act, parser=parser)


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
            launch.facts_of(launch.run_job(request, interpreter, Path(folder), LIMIT_S))
        except launch.JobFailed as failure:
            return str(failure)
    return None


def _forget(arguments: argparse.Namespace) -> int:
    (environment,) = environments([arguments.stack], arguments.device)
    if (python := adopted.forget(environment)) is None:
        raise Mistake(f"no interpreter is adopted for {environment.title}")
    print(f"{environment.title}: no longer {python}")
    return OK
