"""Checks of a machine, each one line of a table: passed, failed, or not possible here and why."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ci.gpu.bench import Bench, CheckFailed, NotPossible

PASSED, FAILED, NOT_POSSIBLE = STATES = ("passed", "failed", "not possible")


@dataclass(frozen=True)
class Check:
    """`run` returns what was seen, and raises CheckFailed or NotPossible."""

    name: str
    run: Callable[[Bench], str]
    limit_s: float = 300.0
    needs_gpu: bool = False


def run_all(checks: Sequence[Check], bench: Bench, only: Collection[str] | None) -> int:
    """Do the checks, print the table, return the exit code: 1 if one failed. `only`: names, or null for all.

    What has passed or is not possible is not done again in the same folder, whose checks.json has the table.
    """
    kept = bench.folder / "checks.json"
    seen = json.loads(kept.read_text()) if kept.exists() else {}
    for check in checks:
        if only and check.name not in only:
            continue
        if seen.get(check.name, {}).get("state", FAILED) == FAILED:
            seen[check.name] = _done(check, bench)
            kept.write_text(json.dumps(seen, indent=1))
        print(_line(check.name, seen[check.name]), flush=True)
    states = [found["state"] for found in seen.values()]
    print(", ".join(f"{states.count(state)} {state}" for state in STATES))
    return int(FAILED in states)


def _done(check: Check, bench: Bench) -> dict[str, object]:
    start = time.monotonic()
    bench.begin(check.name, check.limit_s)
    try:
        if check.needs_gpu and bench.device == "cpu":
            raise NotPossible("needs a GPU")
        state, detail = PASSED, check.run(bench)
    except NotPossible as why:
        state, detail = NOT_POSSIBLE, str(why)
    except CheckFailed as why:
        state, detail = FAILED, str(why)
    except Exception as mistake:  # the other checks go on
        state, detail = FAILED, f"{type(mistake).__name__}: {mistake}"
    return {"state": state, "detail": detail, "seconds": round(time.monotonic() - start, 1)}


def _line(name: str, found: dict[str, object]) -> str:
    return f"{found['state']:<13} {name:<22} {found['seconds']:>6} s  {found['detail']}"
