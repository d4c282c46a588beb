"""What keeping results costs: how fast a finished campaign is seen to be finished, and how small a series is.

1. A campaign of 200 cells of the fake stack is measured; then `harness run` of the same config is timed: the
   whole process, median of 5: import, config, device lock, reading every record, table and page.
   Target: under 2 s.
2. tokens.parquet of 10,000 tokens, written by harness.records itself: random ids of a 152k vocabulary,
   latencies as of a GPU, of a CPU and of one ten times slower. Target: at most 60 KB.

    .venv/bin/python benchmarks/resume.py [--cells 200] [--new-tokens 16]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import records
from harness.base.files import cache_folder

HARNESS = Path(sys.executable).parent / "harness"
ROUNDS = 5
RESUME_TARGET_S = 2.0
TOKENS = 10_000
SERIES_TARGET_BYTES = 60_000
VOCABULARY = 151_936
# name: ms at the first and at the last token, relative noise
LATENCIES = {"GPU": (8.0, 12.0, 0.003), "CPU": (11.0, 63.0, 0.015), "slow CPU": (110.0, 630.0, 0.02)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument(
        "--new-tokens", type=int, default=16, help="tokens of each fake cell; 9975: real ones"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="resume-") as folder:
        resume(Path(folder), arguments.cells, arguments.new_tokens)
        sizes(Path(folder))
    return 0


def resume(folder: Path, cells: int, new_tokens: int) -> None:
    """Measure a campaign, then time its resumption."""
    config = folder / "resume.yaml"
    config.write_text(json.dumps(campaign(cells, new_tokens)))  # JSON is YAML
    begun = time.perf_counter()
    harness_run(config, folder)
    print(f"measured {cells} fake cells of {new_tokens} tokens in {time.perf_counter() - begun:.1f} s")
    records = sorted((folder / "results").rglob("record.json"))
    if len(records) != cells:
        raise SystemExit(f"{len(records)} records of {cells} cells: cannot measure")
    walls = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        harness_run(config, folder)
        walls.append(time.perf_counter() - begun)
    if sorted((folder / "results").rglob("record.json")) != records:
        raise SystemExit("the second run measured again: cannot measure")
    median = statistics.median(walls)
    print(
        f"nothing to do: decided in {median:.2f} s (median of {ROUNDS}, {min(walls):.2f} to {max(walls):.2f})"
    )
    verdict = "reached" if median < RESUME_TARGET_S else "missed"
    print(f"target: under {RESUME_TARGET_S:g} s, ratio {median / RESUME_TARGET_S:.2f}: {verdict}")


def campaign(cells: int, new_tokens: int) -> dict[str, object]:
    protocol = {"new_tokens": new_tokens, "repeats": 1, "measure_bandwidth": False, "retry_disturbed": 0}
    warmup = {
        "window_tokens": 4,
        "max_windows": 2,
        "tolerance": 0.99,
    }  # nothing to settle: it computes nothing
    rows = [
        {"stack": "fake", "name": f"v{i}", "B_ms": 0.01 + i / 1e5, "prefill_ms": 0.01} for i in range(cells)
    ]
    return {"protocol": protocol | {"warmup": warmup}, "models": [{"shape": "tiny-qwen2"}], "variants": rows}


def harness_run(config: Path, folder: Path) -> None:
    """A cache of its own, so that a campaign on this machine does not have to be waited for."""
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    if not (cache / "envs").exists():
        (cache_folder() / "envs").mkdir(parents=True, exist_ok=True)
        (cache / "envs").symlink_to(cache_folder() / "envs")
    ran = subprocess.run(
        [str(HARNESS), "run", str(config), "--out", str(folder / "results")],
        env={**os.environ, "HARNESS_CACHE": str(cache)},
        capture_output=True,
        text=True,
    )
    if ran.returncode not in (0, 1):  # 1: a cell of a busy machine may be invalid, which is a result too
        raise SystemExit(f"harness run ended with {ran.returncode}: {ran.stderr.strip()[-500:]}")


def sizes(folder: Path) -> None:
    """Write series as a campaign would, and print the size of each file."""
    chance = random.Random(0)
    ids = [chance.randrange(VOCABULARY) for _ in range(TOKENS)]
    for name, (first_ms, last_ms, noise) in LATENCIES.items():
        n = list(range(26, 26 + TOKENS))
        series = {"n": n, "token_id": ids, "latency_ns": latencies(chance, first_ms, last_ms, noise)}
        running = records.begin(folder / "sizes" / name, {"cell": "size"})
        stored = running.finish({"workload": {"prompt_tokens": 25}}, records.TokenTimes.of_columns(series))
        if records.series(stored)["latency_ns"] != series["latency_ns"]:
            raise SystemExit("the series does not read as it was written: cannot measure")
        size = (stored.folder / "tokens.parquet").stat().st_size
        verdict = "reached" if size <= SERIES_TARGET_BYTES else "missed"
        against = f"target: at most 60 KB, ratio {size / SERIES_TARGET_BYTES:.2f}: {verdict}"
        print(f"{TOKENS} tokens, {name} latencies: {size} bytes; {against}")


def latencies(chance: random.Random, first_ms: float, last_ms: float, noise: float) -> list[int]:
    """ns: a line in steps of 256 tokens, Gaussian noise, and a spike every few hundred tokens."""
    per_token = (last_ms - first_ms) / TOKENS
    line = [first_ms + per_token * (i // 256 * 256) for i in range(TOKENS)]
    return [
        round(ms * (1 + chance.gauss(0, noise) + (chance.random() < 0.003) * chance.random()) * 1e6)
        for ms in line
    ]


if __name__ == "__main__":
    sys.exit(main())
