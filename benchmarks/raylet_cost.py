"""What does a node of Ray beside it cost a decode? The same llama.cpp cell in turns with and without.

Two pairs at a time, as without, with, with, without, in which what drifts cancels. "With": a head and a node
of Ray on this machine, idle. A fleet's other nodes have no head, so this is at most too high. The ratio is of
tok/s with and without; its 95% interval is that of the mean of the pairs' logarithms (Student's t).

    .venv/bin/python benchmarks/raylet_cost.py [--pairs 12] [--new-tokens 128] [--shape qwen1.5-0.5b]

Target: 1.00 +- 0.005. On a machine that is busy with other work the interval is wide, and says so.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev

from scipy.special import stdtrit

from harness.fleet import local_cluster

HARNESS = Path(sys.executable).parent / "harness"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--shape", default="qwen1.5-0.5b")
    arguments = parser.parse_args()
    protocol = {"new_tokens": arguments.new_tokens, "repeats": 1, "measure_bandwidth": False}
    protocol |= {"retry_disturbed": 0, "warmup": {"tolerance": 0.2}}
    variants = [{"stack": "llamacpp", "quant": "q4_0"}]
    experiment = {"protocol": protocol, "models": [{"shape": arguments.shape}], "variants": variants}
    logarithms: list[float] = []
    with tempfile.TemporaryDirectory(prefix="raylet-cost-") as folder:
        config = Path(folder) / "cost.yaml"
        config.write_text(json.dumps(experiment))
        tokens_per_s(config)  # the weights are made, and their file is in memory
        while len(logarithms) < arguments.pairs:
            first = tokens_per_s(config)
            with local_cluster.started(1):
                beside = [tokens_per_s(config) for _ in range(2)]
            for without, with_ray in ((first, beside[0]), (tokens_per_s(config), beside[1])):
                logarithms.append(math.log(with_ray / without))
                line = f"{without:.2f} tok/s without, {with_ray:.2f} with"
                print(f"pair {len(logarithms)}: {line}; {summary(logarithms)}", flush=True)
    return 0


def summary(logarithms: list[float]) -> str:
    """The ratio so far, with its interval from two pairs on."""
    middle = fmean(logarithms)
    if len(logarithms) < 2:
        return f"ratio {math.exp(middle):.4f}"
    half = stdtrit(len(logarithms) - 1, 0.975) * stdev(logarithms) / math.sqrt(len(logarithms))
    low, high = math.exp(middle - half), math.exp(middle + half)
    return f"ratio {math.exp(middle):.4f}, 95% interval {low:.4f} to {high:.4f}"


def tokens_per_s(config: Path) -> float:
    """Of one repeat, by its median latency."""
    command = [HARNESS, "run", config, "--fresh", "--json", "--wait", "-o", config.parent / "results"]
    ran = subprocess.run(command, capture_output=True, text=True)
    rows = json.loads(ran.stdout)
    return 1e3 / float(rows[-1]["median_ms"])


if __name__ == "__main__":
    sys.exit(main())
