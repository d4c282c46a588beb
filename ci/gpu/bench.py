"""What checks do on the machine: run the command within their time limit, read its records, fill the card."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

Json = dict[str, Any]
FILL = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("filled", flush=True)
sys.stdin.read()
"""


class CheckFailed(Exception):
    """A check's expectation does not hold; the message is what was seen."""


class NotPossible(Exception):
    """A check cannot be done on this machine; the message is why."""


class Bench:
    """The device, the folder of the results (one per check), and the running check's limit."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder = device, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._check, self._until = "", 0.0
        # A CPU only tries the script.
        self.shape = "qwen1.5-0.5b" if device == "cuda" else "tiny-qwen2"
        self.tokens = 600 if device == "cuda" else 20

    def begin(self, check: str, limit_s: float) -> None:
        self._check, self._until = check, time.monotonic() + limit_s

    def harness(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end, or kill it and its workers at the check's limit (CheckFailed)."""
        program = [sys.executable, "-m", "harness"]
        process = subprocess.Popen(
            [*program, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=max(1.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"harness {words[0]} was not done within the limit") from None
        finally:  # also when this script is stopped
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # its workers end with it
                process.communicate()
        (self.folder / f"{self._check}.log").write_text(err)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def json(self, *words: str | Path, **variables: str) -> Any:
        """The command's --json. Raises CheckFailed with its last message where there is none."""
        ran = self.harness(*words, "--json", **variables)
        try:
            return json.loads(ran.stdout)
        except ValueError:
            raise CheckFailed((ran.stderr.strip().splitlines() or ["no output"])[-1]) from None

    def run(self, *variants: Json, variables: Json | None = None, **keys: Any) -> list[Json]:
        """The rows of a run of these variants, one per attempt. `keys`: of the protocol; also
        `shape` and `workloads`."""
        for stack in {str(variant["stack"]) for variant in variants}:
            self.interpreter(stack)
        return list(self.json("run", self.config(*variants, **keys), "-o", self.results, **(variables or {})))

    def config(self, *variants: Json, **keys: Any) -> Path:
        experiment: Json = {
            "device": self.device,
            "models": [{"shape": keys.pop("shape", self.shape)}],
            "variants": list(variants),
        }
        if workloads := keys.pop("workloads", None):
            experiment["workloads"] = workloads
        if check_weights := keys.pop("check_weights", None):
            experiment["check_weights"] = check_weights
        experiment["protocol"] = {"new_tokens": self.tokens, "repeats": 1, "retry_disturbed": 1} | keys
        path = self.folder / f"{self._check}.yaml"
        path.write_text(json.dumps(experiment, indent=1))  # JSON is YAML
        return path

    @property
    def results(self) -> Path:
        return self.folder / self._check

    def records(self) -> list[Json]:
        """The records of the running check, oldest first."""
        paths = sorted(self.results.rglob("record.json"), key=lambda path: path.parent.name)
        return [json.loads(path.read_text()) for path in paths]

    @cached_property
    def _environments(self) -> list[Json]:
        ran = subprocess.run(
            [sys.executable, "-m", "harness", "env", "list", "--json"], stdout=subprocess.PIPE, text=True
        )
        return list(json.loads(ran.stdout))

    def interpreter(self, stack: str) -> str:
        """A stack's python for this device. Raises NotPossible where there is none."""
        for line in self._environments:
            if line["stack"] == stack and line["device"] == self.device:
                if line["python"]:
                    return str(line["python"])
                raise NotPossible(
                    line.get("problem") or f"no environment of {stack} for {self.device} is built"
                )
        raise NotPossible(f"{stack} has no environment for {self.device}")

    @contextmanager
    def filled(self, leave_bytes: float) -> Iterator[None]:
        """All of the card's free memory but this much is taken by another process meanwhile."""
        command = [self.interpreter("hf"), "-I", "-c", FILL, str(int(leave_bytes))]
        filler = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert filler.stdout
        try:
            if filler.stdout.readline().strip() != "filled":
                raise CheckFailed("the card's memory could not be filled")
            yield
        finally:
            filler.kill()
            filler.wait()

    def runners_with(self, name: str, old: str, new: str) -> Path:
        """A copy of the runners in which one line of one of them lies. Raises CheckFailed: no such line."""
        import runners

        folder = self.folder / "lying" / "runners"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(runners.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
        text = (folder / name).read_text()
        if text.count(old) != 1:
            raise CheckFailed(f"{name} has no single {old!r} to replace")
        (folder / name).write_text(text.replace(old, new))
        return folder


def expect(holds: object, seen: str) -> None:
    """Raises CheckFailed with what was seen, unless it holds."""
    if not holds:
        raise CheckFailed(seen)


def expect_ok(attempts: Sequence[Json]) -> None:
    """Raises CheckFailed with the variants whose last attempt is not ok, and why."""
    rows = {row["cell"]: row for row in sorted(attempts, key=lambda row: int(row["attempt"]))}.values()
    bad = [f"{row['variant']}: {row['status']}: {_why(row)}" for row in rows if row["status"] != "ok"]
    expect(rows and not bad, "; ".join(bad) or "no rows")


def _why(row: Json) -> str:
    reasons = row.get("reasons") or []
    return ", ".join(each if isinstance(each, str) else str(each.get("detail")) for each in reasons) or "?"
