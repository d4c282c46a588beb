"""How often `invalid` is wrong: a cell of the quickstart, quiet, beside a disk writer and beside a compiler.

Each cell is a process of its own, without a second attempt; the conditions take turns, one turn with a
thread on each core, the next with a core left to others, where a load need not disturb. Beside the compiler
one is always left: with none, two of llama.cpp's threads spin on one core, and a token takes 2.5 s in place
of 12 ms. A figure (decode, tokens/s) is equal where it is within noise of the median of the quiet cells of
as many threads: 3 robust standard deviations of those, 2% at least. A cell that is equal and `invalid` is a
false one; a cell that is off and `ok` is missed. Both are counted from the same records by two rules: the
present one, and the one before it, by which a counter of the whole machine (refaults, swap, PSI, quota) was
a reason too.

The writer writes a file, reads it back and begins again, in a cgroup with less memory than that where one
can be made, so that it reads again what was evicted. The compiler compiles one C file over and over.

    .venv/bin/python benchmarks/false_invalid.py [--cells 50] [--out FOLDER]

Records in the folder from an earlier call are counted in; `--cells 0` measures none.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instrument import variables

from harness import machine, records
from harness.analysis.verdicts import (
    PAGE_BYTES,
    REFAULT_FLOOR_BYTES,
    REFAULT_TOLERANCE,
    STALLED_FLOOR_US,
    STALLED_SHARE,
)
from harness.campaign.worker_memory import MemoryLimit
from harness.dataset import table

HARNESS = Path(sys.executable).parent / "harness"
NOISE_FLOOR = 0.02  # from run to run, of a mean of 128 tokens on a shared machine
ROBUST_DEVIATIONS = 3.0
NORMAL_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
SETTLE_S = 1.0  # a load has begun, or its last pages are written
FILE_BYTES, WRITER_BYTES = 512 << 20, 256 << 20
WRITER = """
import os, sys
chunk, parent = os.urandom(1 << 20), os.getppid()
while os.getppid() == parent:
    with open(sys.argv[1], "wb") as file:
        for _ in range(int(sys.argv[2]) >> 20):
            file.write(chunk)
        os.fsync(file.fileno())
    with open(sys.argv[1], "rb") as file:
        while file.read(1 << 20):
            pass
"""
FUNCTION = "double f{0}(double *x, int n) {{ double s = {0}; while (n--) s += x[n] * s; return s; }}\n"
CONFIG = {
    "device": "cpu",
    "protocol": {
        "new_tokens": 128,
        "repeats": 1,
        "retry_disturbed": 0,
        "measure_bandwidth": False,
    },
    "models": [{"shape": "qwen1.5-0.5b", "weights": "synthetic"}],
    "variants": [{"stack": "llamacpp", "quant": "q4_0"}],
}


@dataclass(frozen=True)
class Cell:
    condition: str
    threads: int
    tokens_per_s: float
    before: bool  # invalid by the rule before
    now: bool
    seen: str


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=50, help="to measure, in all conditions together")
    parser.add_argument("--out", type=Path, help="keep the records here")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that loads and folders are gone
    with tempfile.TemporaryDirectory(prefix="false-invalid-") as folder:
        out = arguments.out or Path(folder) / "results"
        measure(Path(folder), out, arguments.cells)
        tell(list(judged(out)))
    return 0


def measure(folder: Path, out: Path, cells: int) -> None:
    """Cells with the conditions in turn, each turn in an order of its own."""
    cores = machine.physical_cores()
    threads = (cores, max(1, cores - 1))
    config = folder / "cell.yaml"
    config.write_text(json.dumps(CONFIG))  # JSON is YAML
    turns = (random.Random(turn).sample(sorted(LOADS), len(LOADS)) for turn in itertools.count())
    order = itertools.islice(itertools.chain.from_iterable(turns), cells)
    for number, condition in enumerate(order):
        count = threads[-1 if condition == "compiler" else number // len(LOADS) % len(threads)]
        into = out / condition / f"{time.time_ns()}"
        began = time.monotonic()
        with LOADS[condition](folder):
            time.sleep(SETTLE_S)
            command = [str(HARNESS), "run", str(config), "--out", str(into)]
            command += ["--set", f"protocol.threads={count}"]
            ran = subprocess.run(command, env=variables(folder), capture_output=True, text=True, timeout=1800)
        time.sleep(SETTLE_S)
        if ran.returncode not in (0, 1):
            raise SystemExit(f"harness run ended with {ran.returncode}: {ran.stderr.strip()[-500:]}")
        print(
            f"{number + 1}/{cells} {condition}, threads {count}: {time.monotonic() - began:.0f} s", flush=True
        )


@contextlib.contextmanager
def quiet(folder: Path) -> Iterator[None]:
    yield


@contextlib.contextmanager
def writer(folder: Path) -> Iterator[None]:
    file = folder / "written"
    with MemoryLimit(WRITER_BYTES) as memory_limit:
        command = [*memory_limit.prefix, sys.executable, "-c", WRITER, str(file), str(FILE_BYTES)]
        with running(command, folder):
            yield
    file.unlink(missing_ok=True)


@contextlib.contextmanager
def compiler(folder: Path) -> Iterator[None]:
    if compile_c := shutil.which("cc") or shutil.which("gcc"):
        source = folder / "load.c"
        source.write_text("".join(map(FUNCTION.format, range(2000))))
        once = f"{compile_c} -O2 -c {source} -o {folder / 'load.o'}"
    else:
        cached, library = folder / "pycache", Path(os.__file__).parent
        once = f"{sys.executable} -X pycache_prefix={cached} -m compileall -q -f {library}"
    with running(["/bin/sh", "-c", f"while kill -0 $PPID; do {once}; done"], folder):
        yield


LOADS: dict[str, Callable[[Path], contextlib.AbstractContextManager[None]]] = {
    "quiet": quiet,
    "writer": writer,
    "compiler": compiler,
}


@contextlib.contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator[None]:
    """A load in a process group of its own, which is gone afterwards."""
    with (folder / "load.log").open("wb") as log:
        load = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
        if load.poll() is not None:
            raise SystemExit(f"the load has ended: {(folder / 'load.log').read_text()[-500:]}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(load.pid, signal.SIGKILL)
        load.wait()


def judged(out: Path) -> Iterator[Cell]:
    """Every record that has figures, by both rules."""
    for condition in LOADS:
        for stored in records.records(out / condition, lambda damage: print(damage, file=sys.stderr)):
            record, times = stored.record, stored.times
            if record["outcome"] != "ok":
                print(f"{condition}: not measured: {record['outcome']}: {record['reason']}", file=sys.stderr)
                continue
            row = table.repeat_row(record, times, None, None)
            unmarked = record | {"memory": record["memory"] | {"marks": []}}
            before = table.repeat_row(unmarked, times, None, None)["reasons"] + of_the_machine(record)
            waited = (
                (record["done"]["cpu_wait_ns"] or 0) / record["timing"]["last_token_ns"] / record["threads"]
            )
            refaults = record["conditions"]["pressure"].get("workingset_refault_file", 0)
            seen = f"waited {waited:.1%}, {refaults} refaults on the machine"
            seen += "".join(f"; now: {reason}" for reason in row["reasons"])
            invalid = bool(before), row["status"] == "invalid"
            yield Cell(condition, record["threads"], row["tokens_per_s"], *invalid, seen)


def of_the_machine(record: dict[str, Any]) -> list[str]:
    """What made a record invalid by the rule before, and no longer does."""
    pressure, timed_us = record["conditions"]["pressure"], record["timing"]["last_token_ns"] / 1e3
    refaulted = pressure.get("workingset_refault_file", 0) * (
        record["machine"].get("page_bytes") or PAGE_BYTES
    )
    allowed = {
        "pswpin": 0.0,
        "memory_stall_us": max(STALLED_SHARE * timed_us, STALLED_FLOOR_US),
        "cgroup_throttled_us": max(STALLED_SHARE * timed_us, STALLED_FLOOR_US),
    }
    found = [name for name, most in allowed.items() if pressure.get(name, 0) > most]
    if refaulted > max(REFAULT_TOLERANCE * record["loaded"]["model_bytes"], REFAULT_FLOOR_BYTES):
        found.append("workingset_refault_file")
    return found


def tell(cells: Sequence[Cell]) -> None:
    equal: list[Cell] = []
    differ: list[Cell] = []
    for threads, of in itertools.groupby(sorted(cells, key=lambda cell: cell.threads), lambda c: c.threads):
        chosen = list(of)
        undisturbed = [math.log(cell.tokens_per_s) for cell in chosen if cell.condition == "quiet"]
        if not undisturbed:
            print(f"threads {threads}: no quiet cell to compare with", file=sys.stderr)
            continue
        middle = statistics.median(undisturbed)
        deviation = NORMAL_MAD * statistics.median(abs(each - middle) for each in undisturbed)
        noise = max(NOISE_FLOOR, ROBUST_DEVIATIONS * deviation)
        within = f"{math.exp(middle):.2f} tokens/s; equal is within {noise:.1%}"
        print(f"threads {threads}: {len(undisturbed)} quiet cells, {within}")
        for cell in chosen:
            off = math.log(cell.tokens_per_s) - middle
            (equal if abs(off) <= noise else differ).append(cell)
            rules = f"before {'invalid' if cell.before else 'ok':7} now {'invalid' if cell.now else 'ok':7}"
            figure = f"{cell.tokens_per_s:7.2f} tokens/s {math.expm1(off):+7.1%}"
            print(f"  {cell.condition:8} {figure}  {rules} {cell.seen}")
    for condition in (*LOADS, "all"):
        alike, off_noise = (
            [cell for cell in some if condition in (cell.condition, "all")] for some in (equal, differ)
        )
        said = f"{condition}: {len(alike)} cells equal and {len(off_noise)} off"
        for rule in ("before", "now"):
            false = sum(getattr(cell, rule) for cell in alike)
            missed = sum(not getattr(cell, rule) for cell in off_noise)
            said += f"; {rule}: false invalid {share(false, alike)}, missed {share(missed, off_noise)}"
        print(said)


def share(count: int, of: Sequence[Cell]) -> str:
    return f"{count} of {len(of)} ({count / len(of):.0%})" if of else "0 of 0"


if __name__ == "__main__":
    sys.exit(main())
