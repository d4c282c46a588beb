"""What measuring costs what is measured: the clock, the controller, the memory sampler.

(a) ns a token that stamping and flushing add, as the worker measures it, the real pipe's flushes on top.
    Target: at most 20 us a token.
(b) CPU time of the controller, all its threads, as a share of one core while a fake cell of 10 ms a token
    decodes and live progress is drawn on a terminal. Target: below 2%.
(c) The memory sampler: its CPU time as a share of one core at the default interval (target: at most 0.2%),
    and decoding with a sample every 200 ms against one a minute, as a ratio. In llama.cpp; skipped where
    there is no environment. With 6 pairs the lowest and the highest ratio are a 97% interval of the median.

    .venv/bin/python benchmarks/instrument.py [--only clock controller sampler] [--seconds 30] [--pairs 6]
        [--new-tokens 384]
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import records
from harness.base.files import cache_folder
from harness.records import Stored
from harness.stacks import build
from harness.stacks.header import stacks

HARNESS = Path(sys.executable).parent / "harness"
STAMP_TARGET_NS = 20_000
CPU_TARGET = 0.02
SAMPLER_TARGET = 0.002
TOKEN_MS = 10.0
# (c) is to see the sampler, not a warm-up that gives up on a busy machine.
WARMUP = {"window_tokens": 16, "max_windows": 20, "tolerance": 0.05}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30, help="length of the cell of (b)")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of (c)")
    parser.add_argument("--new-tokens", type=int, default=384, help="tokens of each run of (c)")
    every = ["clock", "controller", "sampler"]
    parser.add_argument("--only", nargs="+", choices=every, default=every, help="parts to run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="instrument-") as folder:
        if "clock" in arguments.only:
            clock(Path(folder))
        if "controller" in arguments.only:
            controller(Path(folder), arguments.seconds)
        if "sampler" not in arguments.only:
            return 0
        if build.find(stacks()["llamacpp"].environments["cpu"]) is None:
            print("sampler: skipped, no environment (harness env create llamacpp)")
        else:
            sampler(Path(folder), arguments.pairs, arguments.new_tokens)
    return 0


def clock(folder: Path) -> None:
    """(a): a quick cell, which flushes every 512 tokens, and slower ones, which flush every 0.25 s."""
    for milliseconds, new_tokens in ((0.1, 9975), (10.0, 1000), (100.0, 100)):
        variant = {"stack": "fake", "B_ms": milliseconds, "name": "clock", "clock": "real"}
        config = experiment(folder, f"clock-{milliseconds:g}", new_tokens, variant)
        done = measured(config, folder / config.stem).record["done"]
        flushes = [ns / 1e3 for _, ns in done["flushes"]]
        own, pipe = done["stamp_ns_per_token"], sum(flushes) * 1e3 / new_tokens
        total = own + pipe
        spread = f"median {statistics.median(flushes):.0f} us, longest {max(flushes):.0f} us"
        print(
            f"clock, {milliseconds:g} ms a token: {own:.0f} ns a token by itself, {pipe:.0f} in "
            f"{len(flushes)} real flushes ({spread})"
        )
        verdict = "reached" if total <= STAMP_TARGET_NS else "missed"
        share = f"ratio {total / STAMP_TARGET_NS:.3f}"
        print(f"  {total:.0f} ns a token in all; target: at most {STAMP_TARGET_NS} ns, {share}: {verdict}")


def controller(folder: Path, seconds: float) -> None:
    """(b): the real command on a terminal; its CPU clock is read as each line of progress is drawn."""
    new_tokens = int(seconds * 1e3 / TOKEN_MS)
    variant = {"stack": "fake", "B_ms": TOKEN_MS, "name": "slow", "clock": "real"}
    config = experiment(folder, "controller", new_tokens, variant)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [str(HARNESS), "run", str(config), "--out", str(folder / "controller")],
        env=variables(folder),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    # clock_getcpuclockid(3): the CPU time of a process, all its threads, those that have ended included.
    cpu_clock = (~process.pid << 3) | 2
    marks: list[tuple[float, float]] = []
    drawn = b""
    try:
        while process.poll() is None:
            if not select.select([ours], [], [], 1.0)[0]:
                continue
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:  # EIO: the command has ended
                break
            drawn += chunk
            if re.search(rb"\d+/\d+ tokens", chunk):
                marks.append((time.monotonic(), time.clock_gettime(cpu_clock)))
    finally:
        process.wait()
        os.close(ours)
    if process.returncode not in (0, 1) or len(marks) < 3:
        raise SystemExit(f"the cell did not run: {drawn.decode(errors='replace')[-500:]}")
    (begun, cpu_begun), (ended, cpu_ended) = marks[0], marks[-1]
    share = (cpu_ended - cpu_begun) / (ended - begun)
    print(
        f"controller: {cpu_ended - cpu_begun:.3f} s of CPU in {ended - begun:.1f} s of a cell of "
        f"{TOKEN_MS:g} ms/token, {len(marks)} lines of progress: {share:.2%} of a core"
    )
    verdict = "reached" if share < CPU_TARGET else "missed"
    print(f"  target: below {CPU_TARGET:.0%}, ratio {share / CPU_TARGET:.2f}: {verdict}")


def sampler(folder: Path, pairs: int, new_tokens: int) -> None:
    """(c): pairs of runs of one cell, their order alternating; ratio of median decode latencies."""
    variant = {"stack": "llamacpp", "quant": "q4_0"}
    config = experiment(folder, "sampler", new_tokens, variant, "qwen1.5-0.5b")
    ratios, samples, cost_s, sampled_s = [], {200: 0, 60_000: 0}, 0.0, 0.0
    for pair in range(pairs):
        median_ms = {}
        for interval_ms in (200, 60_000) if pair % 2 == 0 else (60_000, 200):
            out = folder / f"sampler-{pair}-{interval_ms}"
            stored = measured(config, out, "--set", f"protocol.sample_interval_ms={interval_ms}")
            samples[interval_ms] += stored.record["memory"]["samples"]
            if interval_ms == 200:
                cost_s += stored.record["memory"]["sampling_cost_ns"] / 1e9
                sampled_s += stored.record["timing"]["wall_s"]
            median_ms[interval_ms] = statistics.median(records.series(stored)["latency_ns"][1:]) / 1e6
        ratios.append(median_ms[200] / median_ms[60_000])
        on, off = median_ms[200], median_ms[60_000]
        print(f"  pair {pair + 1}: {on:.3f} ms on, {off:.3f} ms off, ratio {ratios[-1]:.4f}", flush=True)
    share, each_us = cost_s / sampled_s, cost_s * 1e6 / max(1, samples[200])
    print(
        f"sampler: {samples[200]} samples in {sampled_s:.0f} s, {each_us:.0f} us of CPU each: "
        f"{share:.3%} of a core"
    )
    verdict = "reached" if share <= SAMPLER_TARGET else "missed"
    print(f"  target: at most {SAMPLER_TARGET:.1%}, ratio {share / SAMPLER_TARGET:.2f}: {verdict}")
    print(
        f"sampler on against off ({samples[60_000]} samples): ratio {statistics.median(ratios):.4f}, "
        f"interval [{min(ratios):.4f}, {max(ratios):.4f}] of {pairs} pairs"
    )


def measured(config: Path, out: Path, *options: str) -> Stored:
    """Run a config of one cell, and return its record."""
    command = [str(HARNESS), "run", str(config), "--out", str(out), *options]
    env = variables(config.parent)
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    stored = list(records.records(out, lambda damage: print(damage, file=sys.stderr)))
    if len(stored) != 1 or stored[0].record["outcome"] != "ok":
        raise SystemExit(f"the cell did not run, exit code {ran.returncode}: {ran.stderr.strip()[-500:]}")
    return stored[0]


def experiment(
    folder: Path, name: str, new_tokens: int, variant: dict[str, Any], shape: str = "tiny-qwen2"
) -> Path:
    """Write the config of one cell."""
    protocol = {"new_tokens": new_tokens, "repeats": 1, "warmup": WARMUP}
    protocol |= {"measure_bandwidth": False, "retry_disturbed": 0}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"protocol": protocol, "models": [{"shape": shape}], "variants": [variant]}))
    return path


def variables(folder: Path) -> dict[str, str]:
    """A cache of its own, with the environments and weights of the user's."""
    cache = folder / "cache"
    for name in ("envs", "weights"):
        (cache_folder() / name).mkdir(parents=True, exist_ok=True)
        cache.mkdir(exist_ok=True)
        if not (cache / name).exists():
            (cache / name).symlink_to(cache_folder() / name)
    return {**os.environ, "HARNESS_CACHE": str(cache)}


if __name__ == "__main__":
    sys.exit(main())
