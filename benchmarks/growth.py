"""What results cost as they grow: CPU time and memory of every command that reads them, and of
harness.load_results, over 1,000 and 10,000 records.

A night is a campaign of 100 cells (10 models of 10 quantizations), one repeat each: copies of a real record
with other names and times, and latencies of their own. Every command runs as a process of its own; a line
has the user and system time of the process and of those it started, and its peak memory. `first` judges
every record, the others find their rows kept, `a night later` judges what is new. `--machines`: a page of as
many machines of 100 cells, each in a folder of its own, instead; its size is printed too.

    .venv/bin/python benchmarks/growth.py [--sizes 1000 10000 | --machines 100] [--folder DIR] [--keep]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np

from harness.records.files import write_columns

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "record-1.json"  # llama.cpp, tiny-qwen2 q4_k_m
MODELS, TYPES = 10, ("q8_0", "q6_k", "q5_k_m", "q5_0", "q4_k_m", "q4_0", "q3_k_m", "q2_k", "iq4_xs", "f16")
CELLS = MODELS * len(TYPES)
FIRST = datetime(2024, 1, 1, 2, tzinfo=timezone.utc)
TOKENS, FASTEST_MS = 128, 6.0
HARNESS = [sys.executable, "-m", "harness"]
LOAD = "import sys, harness; print(repr(harness.load_results(sys.argv[1])))"


def night(results: Path, number: int, machine: str | None = None) -> None:
    """Write one campaign. `machine`: another than the record's."""
    chance = np.random.default_rng(number)
    template = json.loads(GOLDEN.read_text())
    began = FIRST + timedelta(days=number)
    for place in range(CELLS):
        model, quant = f"model-{1 + place // len(TYPES)}b", TYPES[place % len(TYPES)]
        at = began + timedelta(seconds=20 * place)
        record = json.loads(json.dumps(template))
        record["model"]["name"], record["variant"] = model, quant
        record["machine"]["slug"] = machine or record["machine"]["slug"]
        record["cell"] = f"{model}.llamacpp.{quant}.decode.{place:08x}"
        record["content_key"] = f"{machine or ''}{place:064x}"
        record["campaign"] |= {"id": began.isoformat(), "name": "nightly"}
        record["started_utc"] = at.isoformat()
        ms = FASTEST_MS * (1 + place / CELLS) * np.exp(chance.normal(0, 0.01)) + np.arange(TOKENS) / 4000
        ns = ((ms + np.abs(chance.normal(0, 0.02, TOKENS))) * 1e6).astype(int).tolist()
        record["tokens"] = record["workload"]["new_tokens"] = TOKENS
        record["timing"] |= {"first_token_ns": ns[0], "last_token_ns": sum(ns)}
        evaluated = record["workload"]["prompt_tokens"] + TOKENS - 1
        record["done"]["counters"] |= {
            "evaluated_tokens": evaluated,
            "decode_evaluated": TOKENS - 1,
            "kv_positions": evaluated,
            "stack_prefill_ms": ns[0] / 1e6,
            "stack_decode_ms": sum(ns[1:]) / 1e6,
        }
        folder = results / record["machine"]["slug"] / model / record["cell"] / f"{at:%Y%m%dT%H%M%S.%fZ}"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(record))
        write_columns(folder / "tokens.parquet", {"n": list(range(26, 26 + TOKENS)), "latency_ns": ns})


def grow(results: Path, size: int) -> None:
    """Add nights until there are so many records; one machine's clock, two processes."""
    there = len({path.name for path in results.glob("*/*/*/*")}) // CELLS if results.exists() else 0
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(night, *zip(*((results, n) for n in range(there, size // CELLS)), strict=True)))


def grow_machines(folder: Path, count: int) -> list[Path]:
    """The folder of each machine, with a night of its own."""
    found = [folder / f"machine-{number:03d}" for number in range(count)]
    new = [(each, number) for number, each in enumerate(found) if not each.exists()]
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(night, *zip(*((each, number, each.name) for each, number in new), strict=True)))
    return found


def spent(command: list[str], folder: Path) -> tuple[float, float, float, int]:
    """CPU seconds, wall seconds, peak MB and exit code of a command and of the processes that it starts."""
    began = time.monotonic()
    process = os.posix_spawn(
        command[0],
        command,
        os.environ,
        file_actions=[
            (
                os.POSIX_SPAWN_OPEN,
                fd,
                str(folder / f"printed.{fd}"),
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
                0o644,
            )
            for fd in (1, 2)
        ],
    )
    _, status, usage = os.wait4(process, 0)
    seconds = usage.ru_utime + usage.ru_stime
    return seconds, time.monotonic() - began, usage.ru_maxrss / 1e3, os.waitstatus_to_exitcode(status)


def commands(results: Path, last: str) -> Iterator[tuple[str, list[str]]]:
    folder = str(results)
    page = f"{folder}.html"
    yield "list, first", [*HARNESS, "report", folder, "--list"]
    yield "list", [*HARNESS, "report", folder, "--list"]
    yield "list --json", [*HARNESS, "report", folder, "--list", "--json"]
    yield "page", [*HARNESS, "report", folder, "-o", page]
    yield "history", [*HARNESS, "report", folder, "--history", "-o", page]
    query = "select variant, avg(tokens_per_s) from repeats group by all"
    yield "sql", [*HARNESS, "sql", query, folder]
    yield "load_results", [sys.executable, "-c", LOAD, folder]
    yield "report of a campaign", [*HARNESS, "report", folder, "--campaign", last, "-o", page]
    yield "compare of a campaign", [*HARNESS, "compare", folder, "--baseline", "last:5", "--campaign", last]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--folder", type=Path, help="where the records are written (default: a new one)")
    parser.add_argument("--keep", action="store_true", help="leave the records there")
    parser.add_argument("--machines", type=int, help="as many of 100 cells, instead")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="growth-"))
    results = folder / "results"
    print(f"{'records':>8}  {'command':<22}{'CPU s':>8}{'wall s':>8}{'peak MB':>9}  exit")

    def shown(records: int, name: str, command: list[str]) -> None:
        cpu, wall, peak, code = spent(command, folder)
        print(f"{records:>8,}  {name:<22}{cpu:>8.2f}{wall:>8.2f}{peak:>9.0f}  {code}", flush=True)

    if given.machines:
        page = folder / "machines.html"
        command = [*HARNESS, "report", *map(str, grow_machines(folder, given.machines)), "-o", str(page)]
        for name in ("page, first", "page, warm"):
            shown(given.machines * CELLS, name, command)
        print(f"{page.stat().st_size / 1e6:.1f} MB")
    for size in [] if given.machines else sorted(given.sizes):
        grow(results, size)
        last = (FIRST + timedelta(days=size // CELLS - 1)).isoformat()
        for name, command in commands(results, last):
            shown(size, name, command)
        night(results, size // CELLS)
        shown(size, "list, a night later", [*HARNESS, "report", str(results), "--list"])
    if not given.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
