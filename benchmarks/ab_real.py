"""Does `harness ab` find a change where there is none? Real llama.cpp cells, each against itself.

Prints, of every comparison, the rounds, the verdicts and the interval of tok/s. The last third is measured
beside a load that varies: a process on one core that computes and rests for random times. Target: no SLOWER,
FASTER, LARGER or SMALLER.

    .venv/bin/python benchmarks/ab_real.py [--comparisons 30] [--loaded 10] [--max-rounds 30] [--threshold 2%]

Cells of a tiny model in two quantizations, 256 tokens each; one thread, so that a load on another core need
not disturb. A comparison takes about 2 s a repeat: 30 of 30 rounds take two hours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HARNESS = Path(sys.executable).parent / "harness"
CHANGES = {"SLOWER", "FASTER", "LARGER", "SMALLER", "SHORTER", "LONGER"}
CONFIG = {
    "protocol": {"new_tokens": 256, "timeout_s": 120, "threads": 1, "measure_bandwidth": False},
    "models": [{"shape": "tiny-qwen2"}],
    "variants": [{"stack": "llamacpp", "quant": ["q8_0", "q4_0"]}],
}
LOAD = """
import random, time
while True:
    end = time.monotonic() + random.expovariate(1 / 5)
    while time.monotonic() < end:
        sum(range(10000))
    time.sleep(random.expovariate(1 / 5))
"""


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--comparisons", type=int, default=30)
    parser.add_argument("--loaded", type=int, default=10, help="of which so many beside a varying load")
    parser.add_argument("--max-rounds", default="30")
    parser.add_argument("--threshold", default="2%")
    parser.add_argument("--config", type=Path, help="another config; default: a tiny model in q8_0 and q4_0")
    arguments = parser.parse_args()
    false = 0
    for number in range(1, arguments.comparisons + 1):
        loaded = number > arguments.comparisons - arguments.loaded
        with tempfile.TemporaryDirectory(prefix="ab-") as folder, load(loaded):
            rows, lost, ended = compared(Path(folder), arguments)
        counts = Counter(row["verdict"] for row in rows)
        false += sum(counts[word] for word in CHANGES)
        words = ", ".join(f"{n} {word}" for word, n in counts.items()) or "nothing was compared"
        print(f"{number}{' beside a load' if loaded else ''}: {words}; {ended}", flush=True)
        for reason in lost:
            print(f"  not compared: {reason}")
        for row in rows:
            if row["metric"] == "tokens_per_s" or row["verdict"] in CHANGES:
                low, high = row["change_ci90"] or (float("nan"), float("nan"))
                rounds = f"{row['base_repeats']} rounds"
                of = f"{row['name']} {row['metric']}"
                print(f"  {of}: {row['verdict']} {row['change']:+.2%} [{low:+.2%}, {high:+.2%}], {rounds}")
    print(f"changes of what did not change: {false} (target 0)")
    return int(false > 0)


def compared(folder: Path, arguments: argparse.Namespace) -> tuple[list[dict], list[str], str]:
    """The rows of one comparison of a config with itself, why others are none, and why it ended."""
    config = arguments.config
    if config is None:
        config = folder / "self.yaml"
        config.write_text(json.dumps(CONFIG))
    command = [HARNESS, "ab", config, "-o", folder / "results", "--format", "json", "--wait"]
    command += ["--max-rounds", arguments.max_rounds, "--threshold", arguments.threshold]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if not ran.stdout:
        sys.exit(f"nothing was compared: {ran.stderr}")
    ended = next((line for line in reversed(ran.stderr.splitlines()) if "round" in line), "")
    every = json.loads(ran.stdout)
    lost = [f"{row['name']}: {row['reason']}" for row in every if not row["metric"]]
    return [row for row in every if row["metric"]], lost, ended.removeprefix("harness: ")


@contextmanager
def load(wanted: bool) -> Iterator[None]:
    """A process that computes and rests in turns, each for five seconds on average."""
    process = subprocess.Popen([sys.executable, "-c", LOAD]) if wanted else None
    try:
        yield
    finally:
        if process:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
