"""Can a stranger's file do harm? Reads thousands of hostile ones and looks at what the readers do.

Every format that the harness reads: GGUF, safetensors, index.json, config.json, tokenizer.json, YAML,
record.json, begun.json with its neighbours, parquet, CSV, CSV.gz, JSON logs, and bundles; names of folders,
records with a part that is long, answers of servers, and queries of `harness sql`. Hypothesis damages sound
files as bytes and as values, and puts pipes, links, holes and bombs in their place. A finding: an exception,
5 s of CPU time or 512 MB for one input, a death, a hang, an escape in the output, and a write, a
process or a connection outside the input's folder.

    PYTHONPATH=. .venv/bin/python -m benchmarks.hostile [--count 1000] [--seed 1] [--keep DIR]

Counts of several runs with other seeds add up. Target: no finding in 100,000 inputs. Exits 1 when there is
one. The test suite runs a sample.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.hostile.inputs import formats
from benchmarks.hostile.readers import MOST_S
from benchmarks.hostile.reading import OURS, STATE
from harness.stacks import build
from harness.stacks.header import stacks

ROOT = Path(__file__).parents[2]
CHUNK = 1000
KILL_AFTER_S = 4 * MOST_S  # of CPU time: what takes longer than allowed is still to be measured
HANGS_AFTER = 100  # looks in a row at which it waits, and has used no CPU time
LOOK_EVERY_S = 0.2


@dataclass
class Report:
    """Inputs read and taken, by format, and findings with how often."""

    read: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="inputs in all, shared evenly by the formats")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--formats", nargs="+", choices=[*formats()], default=[*formats()])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the inputs of findings here")
    arguments = parser.parse_args()
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hostile-")))
        report = run(arguments.count, arguments.seed, arguments.formats, folder.absolute())
    for name in arguments.formats:
        print(f"{name}: {report.read[name]} inputs, {report.taken[name]} of them taken")
    for finding, times in report.findings.most_common():
        print(f"finding: {finding}: {times} times")
    total = report.read.total()
    print(f"{total} inputs in {time.monotonic() - begun:.0f} s, {report.cpu_s:.0f} s of CPU time")
    verdict = "missed" if report.findings else "reached"
    print(f"target: no finding in {total} inputs; {len(report.findings)} kinds found: {verdict}")
    return 1 if report.findings else 0


def run(count: int, seed: int, names: Sequence[str], folder: Path) -> Report:
    """Read `count` inputs, in chunks of one format and one process each."""
    report = Report()
    share = -(-count // len(names))
    for done in range(0, share, CHUNK):
        for name in names:
            chunk(name, seed + done, min(CHUNK, share - done), folder, report)
    return report


def chunk(name: str, seed: int, count: int, folder: Path, report: Report) -> None:
    """One process; where an input ends it, that is a finding, and another goes on with a seed of its own."""
    left, death = count, 0
    while left > 0 and death < 20:
        for stale in ("state", "count", "reader"):
            (folder / stale).unlink(missing_ok=True)
        why = process(name, seed + death * 1_000_000, left, folder, report)
        begun, _ = state(folder)
        if why is None:
            counts = json.loads((folder / "count").read_text())
            report.read[name] += counts["read"]
            report.taken[name] += counts["taken"]
            return  # Hypothesis may have run out of different inputs
        if not begun:
            raise SystemExit(f"{name}: {why}")
        reader = (folder / "reader").read_text()
        report.findings[f"{name}, {reader}: {why}"] += 1
        kept = folder / "inputs" / f"{name}-{seed}-death-{death}"
        subprocess.run(["cp", "-a", "--sparse=always", folder / "here", kept], check=False)
        report.read[name] += begun
        left, death = left - begun, death + 1


def process(name: str, seed: int, count: int, folder: Path, report: Report) -> str | None:
    """Run one reading process to its end; return why it ended early, or null."""
    (folder / "inputs").mkdir(parents=True, exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "findings.jsonl").unlink(missing_ok=True)
    client = build.folder_of(stacks()["http"].environments["cpu"])
    places = {"HOSTILE_CLIENT": str(next(client.glob("lib/*/site-packages"), client))}
    places |= {"HARNESS_CACHE": str(folder / "here" / "cache"), "TMPDIR": str(folder / "tmp")}
    variables = {**os.environ, **places, "PYTHONPATH": str(ROOT), "HOME": str(folder / "home")}
    command = [sys.executable, "-m", "benchmarks.hostile.reading", name, str(seed), str(count), str(folder)]
    with (folder / "errors.txt").open("wb") as errors:
        reading = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=variables)
    why = None
    waits = 0
    for used, waiting in looks(reading):
        begun, at = state(folder)
        spent, waits = used - at, waits + 1 if waiting else 0
        if begun and (spent > KILL_AFTER_S or waits > HANGS_AFTER):
            why = f"over {MOST_S:g} s" if spent > KILL_AFTER_S else "waits for ever"
            reading.kill()
        report_cpu = used
    report.cpu_s += report_cpu
    if (folder / "findings.jsonl").exists():
        for line in (folder / "findings.jsonl").read_text().splitlines():
            found = json.loads(line)
            report.findings[f"{found['format']}, {found['reader']}: {found['what']}"] += 1
    if reading.returncode == OURS:
        raise SystemExit((folder / "errors.txt").read_text())
    if reading.returncode and why is None:
        words = (folder / "errors.txt").read_text(errors="replace").strip().splitlines()
        why = f"ended with {reading.returncode}: {words[-1][:200] if words else ''}"
    return why


def looks(reading: subprocess.Popen[Any]) -> Iterator[tuple[float, bool]]:
    """Every now and then until it ends: the CPU time it has used, and whether it waits, and neither it nor a
    process that it has started used any."""
    used, of_all = 0.0, 0.0
    watched = psutil.Process(reading.pid)
    while True:
        before = of_all
        with contextlib.suppress(psutil.Error):
            times = watched.cpu_times()
            used, of_all = times.user + times.system, sum(times[:4])
            for child in watched.children(recursive=True):
                of_all += sum(child.cpu_times()[:2])
            is_waiting = watched.status() in (psutil.STATUS_SLEEPING, psutil.STATUS_DISK_SLEEP)
            yield used, is_waiting and of_all == before
        try:
            reading.wait(LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            continue
        yield used, False
        return


def state(folder: Path) -> tuple[int, float]:
    """Inputs begun by the process, and its CPU time when the latest began."""
    try:
        begun, at = STATE.unpack((folder / "state").read_bytes())
    except (OSError, struct.error):  # not written yet
        return 0, 0.0
    return begun, at


if __name__ == "__main__":
    sys.exit(main())
