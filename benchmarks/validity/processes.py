"""How often do intervals of several processes cover the mean process, in tok/s at a depth and in prefill?

Every process is faster or slower by a factor of its own, whose standard deviation is the spread. Depth: eight
windows at each of three depths, with noise of 1% of a window and of a step. Prefill: 30 lengths in five
rounds, with noise of 1% of a pass; see prefill.py for the curve. A campaign has some cells like this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from benchmarks.validity import prefill
from benchmarks.validity.row import Row
from harness.analysis import cell_intervals, depth
from harness.analysis import prefill as analysis_prefill
from harness.analysis.line_fit import Floats

SPREADS, PROCESSES, CELLS = (0.0, 0.005, 0.01, 0.02), (2, 3, 5, 10), (1, 4)
DEPTHS, WINDOWS, STEPS, NOISE = (0, 4096, 16384), 8, 16, 0.01
B_MS, W = 10.0, 4000
LENGTHS = np.unique(np.append(np.geomspace(1, 4096, 28).round(), (512, 2048)))
ROUNDS = 5


def rates(campaigns: int) -> Iterator[Row]:
    """Of as many cells as `campaigns` in each case, some of them in one campaign."""
    for cells, processes, spread in product(CELLS, PROCESSES, SPREADS):
        case = f"{processes} processes, spread {spread:.1%}, cells of a campaign: {cells}"
        for what, found in (("depth", at_depth), ("prefill", swept)):
            shares = found(cells, processes, spread, -(-campaigns // cells))
            words = ", ".join(f"{name} {_share(hits)}" for name, hits in shares.items())
            yield Row(f"{what}: {case}", words, "93 to 97%, or none")


def _share(hits: list[bool | None]) -> str:
    """Of the intervals that cover the truth; `none` without intervals."""
    known = [hit for hit in hits if hit is not None]
    return f"{np.mean(known):.1%}" if known else "none"


def covers(ends: Any, truth: float) -> bool | None:
    if ends is None:
        return None
    low, high = ends
    return (low or 0) <= truth <= (math.inf if high is None else high)


def factors(chance: np.random.Generator, processes: int, spread: float) -> Floats:
    return np.exp(chance.normal(0, spread, processes))


def at_depth(
    cells: int, processes: int, spread: float, campaigns: int, seed: int = 0
) -> dict[str, list[bool | None]]:
    """Whether the interval covers the truth, at each depth of each cell."""
    chance = np.random.default_rng(seed)
    hits: list[bool | None] = []
    for _ in range(campaigns):
        rows = [
            [_repeat(windows(chance, factor)) for factor in factors(chance, processes, spread)]
            for _ in range(cells)
        ]
        for ends in cell_intervals.rates_at_depths(rows):
            hits += [covers(ends.get(at), 1e3 / (B_MS + at / W)) for at in DEPTHS]
    return {"tok/s": hits}


def _repeat(table: dict[str, list[int]]) -> Any:
    """What the intervals take of a repeat's row."""
    return {"campaign": "a", "started_utc": "", "status": "ok", "depths": depth.depths([table])}


def windows(chance: np.random.Generator, factor: float = 1.0) -> dict[str, list[int]]:
    """The timed rows of one process."""
    table: dict[str, list[int]] = {name: [] for name in ("round", "depth", "n", "latency_ns")}
    for at, number in product(DEPTHS, range(WINDOWS)):
        n = at + int(chance.integers(1, 256)) + np.arange(STEPS)
        ms = (B_MS + (n - 1) / W) * factor * (1 + chance.normal(0, NOISE))
        ms *= 1 + chance.normal(0, NOISE, STEPS)
        for name, values in zip(table, ([number] * STEPS, [at] * STEPS, n, 1e6 * ms), strict=True):
            table[name] += np.asarray(values).astype(int).tolist()
    return table


def swept(
    cells: int, processes: int, spread: float, campaigns: int, seed: int = 0
) -> dict[str, list[bool | None]]:
    """Whether the intervals cover the truth, by figure of each cell."""
    chance = np.random.default_rng(seed)
    ms = np.maximum(prefill.PLATEAU_MS, prefill.SLOPE_MS * LENGTHS)
    hits: dict[str, list[bool | None]] = {}
    for _ in range(campaigns):
        found = []
        for _ in range(cells):
            tables = [
                prefill.table(LENGTHS, ms * factor, ROUNDS, chance, prefill.NOISE)
                for factor in factors(chance, processes, spread)
            ]
            found.append({0: analysis_prefill.analyse(analysis_prefill.by_depth(tables)[0])})
        for cell in analysis_prefill.between_processes(found, [("a", "ok")] * cells):
            of = cell[0]
            ridge = prefill.PLATEAU_MS / prefill.SLOPE_MS
            figures = [
                ("plateau", prefill.PLATEAU_MS, of.plateau),
                ("slope", prefill.SLOPE_MS, of.slope),
                ("ridge", ridge, of.ridge),
            ]
            figures += [
                (f"TTFT {each.how}", prefill.SLOPE_MS * each.n, each.ms)
                for each in of.first_tokens
                if each.how
            ]
            for name, truth, estimate in figures:
                hits.setdefault(name, []).append(covers(estimate and estimate.ends, truth))
    return hits
