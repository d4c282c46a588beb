"""How near to the ideal does a fleet of equal devices come? Fake cells on a local cluster, against the sum of
their own times.

The ideal: the seconds that workers lived, summed over all repeats, by the number of nodes. What comes on top
is the fleet: cells that end on one node alone, campaigns that start, records on their way. Cells sleep, so
that nodes which share this machine do not take its CPUs from each other; starting their workers still does.

    .venv/bin/python benchmarks/fleet_balance.py [--cells 200] [--nodes 3] [--seconds 3]

Target: at most 1.15 with 200 cells on 3 nodes. Prints the ratio.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

HARNESS = Path(sys.executable).parent / "harness"
TOKENS = 50


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="mean decode time of a cell")
    arguments = parser.parse_args()
    chance = random.Random(1)
    variants = [
        {
            "stack": "fake",
            "name": f"v{number}",
            "clock": "real",
            "B_ms": round(1e3 * arguments.seconds / TOKENS * chance.uniform(0.5, 1.5), 3),
        }
        for number in range(arguments.cells)
    ]
    protocol = {"new_tokens": TOKENS, "repeats": 1, "measure_bandwidth": False, "retry_disturbed": 0}
    protocol["warmup"] = {"at_least_s": 0, "max_windows": 2, "window_tokens": 2}
    experiment = {"protocol": protocol, "models": [{"shape": "tiny-qwen2"}], "variants": variants}
    with tempfile.TemporaryDirectory(prefix="fleet-balance-") as folder:
        path = Path(folder) / "balance.yaml"
        path.write_text(json.dumps(experiment))
        command = [HARNESS, "run", path, "--on", f"local-cluster:{arguments.nodes}", "--json"]
        subprocess.run([*command, "-o", Path(folder) / "results"], stdout=subprocess.DEVNULL)
        records = [json.loads(each.read_text()) for each in Path(folder).rglob("record.json")]
    starts = [datetime.fromisoformat(record["started_utc"]).timestamp() for record in records]
    ends = [start + record["timing"]["wall_s"] for start, record in zip(starts, records, strict=True)]
    ideal = sum(record["timing"]["wall_s"] for record in records) / arguments.nodes
    took = max(ends) - min(starts)
    campaigns = len({record["campaign"]["id"] for record in records})
    print(
        f"{len(records)} cells on {arguments.nodes} nodes in {campaigns} campaigns: {took:.1f} s, ideal "
        f"{ideal:.1f} s, ratio {took / ideal:.3f} (target: 1.15)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
