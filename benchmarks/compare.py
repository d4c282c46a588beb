"""Does a comparison of a thing with itself find nothing? A real campaign is split into its odd and its even
repeats, which were interleaved, and the halves are held against each other.

Prints each round's verdicts, and of every figure how far the halves are apart and how wide the interval is.
Target: no SLOWER, FASTER, LARGER or SMALLER.

    .venv/bin/python benchmarks/compare.py [--config configs/quickstart.yaml] [--repeats 8] [--rounds 1]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HARNESS = Path(sys.executable).parent / "harness"
ROOT = Path(__file__).parent.parent
CHANGES = {"SLOWER", "FASTER", "LARGER", "SMALLER", "SHORTER", "LONGER"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--repeats", type=int, default=8, help="of which each half has one in two")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    false = 0
    for number in range(1, arguments.rounds + 1):
        with tempfile.TemporaryDirectory(prefix="compare-") as folder:
            rows = halves(Path(folder), arguments.config.absolute(), arguments.repeats)
        counts = Counter(row["verdict"] for row in rows)
        false += sum(counts[word] for word in CHANGES)
        print(f"round {number}: {', '.join(f'{n} {word}' for word, n in counts.items())}", flush=True)
        for row in rows:
            if row["change_ci90"]:
                low, high = row["change_ci90"]
                within = f"{1 + row['change']:.4f} [{1 + low:.4f}, {1 + high:.4f}]"
                print(f"  {row['name']} {row['metric']}: ratio {within}")
    print(f"changes of what did not change: {false} (target 0)")
    return 0


def halves(folder: Path, config: Path, repeats: int) -> list[dict]:
    """Run the config, part its records by repeat, and return the rows of their comparison."""
    command = [HARNESS, "run", config, "-o", folder / "all", "--fresh", "--set", f"repeats={repeats}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for path in sorted((folder / "all").rglob("record.json")):
        half = ("even", "odd")[json.loads(path.read_text())["repeat"] % 2]
        shutil.copytree(path.parent, folder / half / path.parent.relative_to(folder / "all"))
    command = [HARNESS, "compare", folder / "odd", folder / "even", "--format", "json"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not said.stdout:
        sys.exit(f"nothing was compared: {said.stderr}")
    rows: list[dict] = json.loads(said.stdout)
    return rows


if __name__ == "__main__":
    sys.exit(main())
