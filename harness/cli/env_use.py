"""`harness env use` and `forget`: run a stack in an interpreter that is already there."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from harness.base.text import plural
from harness.campaign import worker
from harness.cli import OK, Mistake
from harness.cli.environments import environments
from harness.stacks import adopted
from harness.stacks.adopted import EnvironmentFailed, Interpreter
from harness.stacks.header import project_of
from runners.protocol import Request

LIMIT_S = 60.0


def use(arguments: argparse.Namespace) -> int:
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
    """Why a worker cannot import the runner in it; None if it can. Uses no device."""
    request = Request("import", interpreter.environment.stack, "cpu", {})
    with tempfile.TemporaryDirectory(prefix="harness-import-") as folder:
        try:
            worker.facts_of(worker.run_job(request, interpreter, Path(folder), LIMIT_S))
        except worker.JobFailed as failure:
            return str(failure)
    return None


def forget(arguments: argparse.Namespace) -> int:
    (environment,) = environments([arguments.stack], arguments.device)
    if (python := adopted.forget(environment)) is None:
        raise Mistake(f"no interpreter is adopted for {environment.title}")
    print(f"{environment.title}: no longer {python}")
    return OK
