"""Run one step of building an environment: its variables, its output in a log, and why it failed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from pathlib import Path
from threading import Thread
from typing import IO

from harness.stacks.header import Environment
from harness.system.variables import for_builds, redacted

# uv prefixes the output of builds with DEBUG, and repeats a Python error at the end. A line with four more
# spaces is code in a traceback, which may come before the compiler's error. Without uv there is no prefix.
_COMPILER_ERROR = re.compile(
    r"(?i)DEBUG (?! {4}).*(cmake error|\berror: |fatal error)"
    r"|cmake error|nvcc fatal|\S+[:(]\d+\S* (fatal )?error:"
)
_PYTHON_ERROR = re.compile(r"(DEBUG )?[\w.]*(Error|Exception):")


@dataclass(frozen=True)
class Steps:
    """The steps of one build. All output goes to `log`, without the credentials of its URLs; `progress` gets
    the elapsed time of a step now and then."""

    environment: Environment
    log: Path
    progress: Callable[[str], None]

    def run(self, command: list[str], limit_s: float = inf) -> str | None:
        """Why the command failed, as a clause; null if it did not. The limit kills it."""
        start = time.monotonic()
        begun = self.log.stat().st_size
        build = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("guard.py")), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=build_variables(self.environment.variables),
            cwd=self.log.parent,  # packages would read settings in the user's folder
            start_new_session=True,
        )
        assert build.stdout is not None
        copying = Thread(target=_copy, args=(build.stdout, self.log), daemon=True)
        copying.start()
        step = " ".join(Path(word).name if i == 0 else word for i, word in enumerate(command[:3]))
        try:
            while (elapsed := time.monotonic() - start) < limit_s:
                try:
                    code = build.wait(timeout=min(2, limit_s - elapsed))
                    break
                except subprocess.TimeoutExpired:
                    name = self.environment.title
                    self.progress(f"building {name}: {step}, {time.monotonic() - start:.0f} s")
            else:
                _kill(build)
                return f"{step} took longer than {limit_s / 60:g} min"
        except BaseException:
            _kill(build)
            raise
        copying.join(timeout=10)  # a process that it left behind may hold the pipe
        return f"{step} ended with {code}: {_why(self.log, begun)}" if code else None


def build_variables(variables: dict[str, str]) -> dict[str, str]:
    """Variables of uv and of the compilers that it starts: ours without credentials, and the environment's
    own. uv reads no settings but these: a uv.toml above the user's folder may be a stranger's."""
    # Python downloads may be unreachable.
    inherited = {"UV_PYTHON_DOWNLOADS": "never", **for_builds(os.environ), "UV_NO_CONFIG": "1"}
    # uv does not read pip's settings, so pass on a local wheel folder. pip separates folders by spaces, uv by
    # commas.
    folders = os.environ.get("UV_FIND_LINKS", ",".join(os.environ.get("PIP_FIND_LINKS", "").split()))
    if folders:  # uv runs in another folder
        absolute = (each if "://" in each else str(Path(each).absolute()) for each in folders.split(","))
        inherited["UV_FIND_LINKS"] = ",".join(absolute)
    inherited.pop("VIRTUAL_ENV", None)
    given = inherited | variables
    if _has_torch(given.get("UV_FIND_LINKS", ""), given.get("UV_TORCH_BACKEND")):
        del given["UV_TORCH_BACKEND"]  # with it uv looks on PyTorch's own index alone
    return given


def _has_torch(folders: str, backend: str | None) -> bool:
    """Whether one of these folders (separated by commas) has a wheel of torch for this backend."""
    found = [
        wheel.name for folder in folders.split(",") if folder for wheel in Path(folder).glob("torch-*.whl")
    ]
    for_gpu = [name for name in found if "+cpu" not in name]
    return bool({"cpu": found, "auto": for_gpu}.get(backend or ""))


def _copy(lines: IO[bytes], log: Path) -> None:
    """Append lines to the log, redacted. Where it cannot be written, the pipe closes and the build fails."""
    with contextlib.suppress(OSError), lines, log.open("ab") as sink:
        for line in lines:
            sink.write(redacted(line.decode(errors="replace")).encode())
            sink.flush()


def _kill(build: subprocess.Popen[bytes]) -> None:
    os.killpg(build.pid, signal.SIGKILL)
    build.wait()


def _why(log: Path, begun: int) -> str:
    """The error in a log from byte `begun` on: a compiler's first error, else the last Python exception, else
    uv's own error; with the lines that continue it."""
    text = log.read_bytes()[begun:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line not in ("", "DEBUG") and "Warning: " not in line]
    places = [
        next((i for i, line in enumerate(lines) if _COMPILER_ERROR.match(line)), None),
        next((i for i in reversed(range(len(lines))) if _PYTHON_ERROR.match(lines[i])), None),
        next((i for i, line in enumerate(lines) if line.startswith(("error:", "\u00d7"))), len(lines) - 1),
    ]
    first = next(place for place in places if place is not None)
    reason = [line.removeprefix("DEBUG ").strip() for line in lines[max(0, first) :][:4]]
    own = ("hint:", "error:", "Traceback", "During handling")
    more = takewhile(lambda line: not line.startswith(own), reason[1:])
    return " ".join([*reason[:1], *more])[:400] or "no output"
