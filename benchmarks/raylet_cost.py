"""What does a node of Ray beside it cost a decode? Steps of one process, in turns with and without.

Processes of one machine differ by more than Ray costs, so nothing is started anew: Ray's processes are
stopped (SIGSTOP) for the windows without it. Two pairs at a time, as without, with, with, without, in which
what drifts cancels. Ray is idle; a head runs on this machine all the time, and is stopped only with --head,
as on a machine that is the head. The ratio is of tok/s with and without; its 95% interval is that of the
mean of the pairs' logarithms. Beside it, the CPU time of the processes that are stopped.

    .venv/bin/python benchmarks/raylet_cost.py [--head] [--pairs 120] [--steps 96] [--cell llamacpp:q4_0]
        [--model qwen1.5-0.5b] [--threads 2]

Target: 1.00 +- 0.005. On a machine that is busy with other work the interval is wide, and says so.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from one_process import PROMPT, SETTLE, run, steps_ms

WAIT_S = 0.3  # until what waited while Ray was stopped is done
NORMAL_975 = 1.96  # with fewer than 30 pairs the interval is up to 6% too narrow


def main() -> int:
    from harness.campaign.fleet import cluster as fleet_cluster

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", action="store_true", help="stop the head too")
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--steps", type=int, default=96, help="of a window; Ray may be stopped for 10 s")
    parser.add_argument("--cell", default="llamacpp:q4_0")
    parser.add_argument("--model", default="qwen1.5-0.5b")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    cluster = fleet_cluster.head()
    try:
        of_head = children()
        fleet_cluster.add_node(cluster, 1)
        stopped = sorted(children() if given.head else children() - of_head)
        print(f"{len(stopped)} processes of Ray are stopped in turns", flush=True)
        room = len(PROMPT) + SETTLE + given.steps + 1
        return run(
            *(given.cell, given.model, room, given.threads, "raylet_cost"),
            rays=stopped,
            pairs=given.pairs,
            steps=given.steps,
        )
    finally:
        cluster.shutdown()


def children() -> set[int]:
    """Processes below this one."""
    import psutil

    return {each.pid for each in psutil.Process().children(recursive=True)}


def measure(session: Any, rays: Sequence[int], pairs: int, steps: int) -> None:
    """Under the stack's interpreter. `rays`: Ray's processes."""
    used_s, with_s = 0.0, 0.0

    def window(is_with: bool) -> float:
        """Mean time of a step, ms."""
        nonlocal used_s, with_s
        for pid in rays:
            os.kill(pid, signal.SIGCONT if is_with else signal.SIGSTOP)
        time.sleep(WAIT_S)
        steps_of = islice(session.generate(PROMPT, SETTLE + steps + 1), SETTLE, None)
        before_s = sum(map(cpu_s, rays))
        found = steps_ms(steps_of)
        if is_with:
            used_s, with_s = used_s + sum(map(cpu_s, rays)) - before_s, with_s + sum(found) / 1e3
        return fmean(found)

    logarithms: list[float] = []
    window(False)
    try:
        while len(logarithms) < pairs:
            turns = [window(each) for each in (False, True, True, False)]
            for without, with_ray in (turns[:2], turns[:1:-1]):
                logarithms.append(math.log(without / with_ray))
            print(
                f"pair {len(logarithms)}: {turns[0]:.2f}, {turns[3]:.2f} ms without, {turns[1]:.2f}, "
                f"{turns[2]:.2f} with; {summary(logarithms)}; Ray used {used_s / with_s:.2%} of a CPU",
                flush=True,
            )
    finally:
        for pid in rays:
            os.kill(pid, signal.SIGCONT)


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def summary(logarithms: Sequence[float]) -> str:
    """The ratio so far, with its interval."""
    middle = fmean(logarithms)
    half = NORMAL_975 * stdev(logarithms) / math.sqrt(len(logarithms))
    low, high = math.exp(middle - half), math.exp(middle + half)
    return f"ratio {math.exp(middle):.4f}, 95% interval {low:.4f} to {high:.4f}"


if __name__ == "__main__":
    sys.exit(main())
