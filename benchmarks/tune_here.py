"""Does `harness tune` find the best thread count of llama.cpp here, from too few threads and from too many?

Tunes Qwen1.5-0.5B (synthetic weights) twice: the defaults have 1 thread, and twice as many as there are CPUs.
Both searches try the same counts. Prints each table, each verdict, and whether both agree.

    .venv/bin/python benchmarks/tune_here.py [--shape NAME] [--quant q4_0] [--rounds 16] [--busy]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import machine

HARNESS = Path(sys.executable).parent / "harness"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen1.5-0.5b")
    parser.add_argument("--quant", default="q4_0")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--busy", action="store_true", help="use repeats that other processes disturbed")
    given = parser.parse_args()
    logical = machine.facts()["usable_cpus"]
    counts = sorted({1, machine.physical_cores(), logical, 2 * logical})
    best = {start: tuned(given, start, counts) for start in (1, 2 * logical)}
    for start, threads in best.items():
        print(f"from {start} threads: {threads} threads are best")
    agree = len(set(best.values())) == 1
    print("both agree" if agree else "they do not agree")
    return 0 if agree else 1


def tuned(given: argparse.Namespace, start: int, counts: list[int]) -> int:
    """The best thread count of a search that starts from `start`."""
    folder = Path(tempfile.mkdtemp(prefix=f"tune-from-{start}-"))
    config = folder / "tune.yaml"
    variant = {"stack": "llamacpp", "quant": given.quant, "threads": start}
    config.write_text(json.dumps({"models": [{"shape": given.shape}], "variants": [variant]}))
    command = [str(HARNESS), "tune", str(config), "-o", str(folder / "results"), "--json", "--wait"]
    command += ["--option", f"threads={','.join(map(str, counts))}"]
    command += ["--rounds", str(given.rounds), "--tokens", str(given.tokens), *["--busy"] * given.busy]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(ran.stdout)
    for row in rows:
        figure = "no figure" if row["figure"] is None else f"{row['figure']:.1f} {row['unit']}"
        gain = "" if row["gain"] is None else f", {row['gain']:+.1%} ({shown(row['gain_ci95'])})"
        print(
            f"  from {start}: {row['name']:12} {figure}{gain}, {row['rounds']} rounds{' *' * row['winner']}"
        )
    winner = next((row["options"] for row in rows if row["winner"]), {})
    return int(winner.get("threads", start))


def shown(ends: list[float] | None) -> str:
    return "no interval" if ends is None else " to ".join(f"{end:+.1%}" for end in ends)


if __name__ == "__main__":
    sys.exit(main())
