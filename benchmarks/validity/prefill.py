"""How often do the intervals of a prefill sweep cover plateau, slope and ridge?

Passes of max(20, 0.1 n) ms, whose ridge is 200 tokens: sweeps of 500 lengths with one pass each, as
published, and of 28 lengths up to 4,096 in five rounds; beside noise of 1%, and with matrix tiles of 16 to 64
tokens, drawn for each sweep."""

from __future__ import annotations

import numpy as np

from benchmarks.validity.row import Row
from harness.analysis.line_fit import Floats
from harness.analysis.prefill import analyse, by_depth

Table = dict[str, list[int]]
PLATEAU_MS, SLOPE_MS, NOISE = 20.0, 0.1, 0.01
TILES = 16, 64  # tokens, of which a pass takes the next multiple
LENGTHS: dict[str, tuple[Floats, int]] = {
    "500 lengths, 1 round": (np.arange(1.0, 501.0), 1),
    "28 lengths, 5 rounds": (np.unique(np.geomspace(1, 4096, 32).round()), 5),
}


def rates(campaigns: int) -> list[Row]:
    """Of as many sweeps as `campaigns` in each case."""
    return [
        Row(f"plateau, slope, ridge covered: {name}, {shape}", _shares(name, tiled, campaigns), "90%+")
        for name in LENGTHS
        for shape, tiled in (("smooth", False), ("tiles", True))
    ]


def _shares(name: str, tiled: bool, campaigns: int) -> str:
    return ", ".join(f"{share:.0%}" for share in coverage(name, tiled, campaigns))


def sweep(name: str, tile: int, chance: np.random.Generator) -> Table:
    """The passes of one sweep. Tiles are centred, so that the line through them is the truth."""
    lengths, rounds = LENGTHS[name]
    tiled = np.ceil(lengths / tile) * tile - (tile - 1) / 2
    ms = np.maximum(PLATEAU_MS, SLOPE_MS * np.maximum(tiled, 1))
    return table(lengths, ms, rounds, chance, NOISE)


def table(lengths: Floats, ms: Floats, rounds: int, chance: np.random.Generator, noise: float) -> Table:
    """The columns of a prefill.parquet: passes over `lengths` that take `ms`, with relative noise."""
    took = np.tile(ms, rounds) * (1 + chance.normal(0, noise, rounds * len(lengths)))
    return {
        "round": np.repeat(np.arange(1, rounds + 1), len(lengths)).tolist(),
        "depth": [0] * len(took),
        "n": np.tile(lengths, rounds).tolist(),
        "latency_ns": (1e6 * took).tolist(),
    }


def coverage(name: str, tiled: bool, campaigns: int) -> tuple[float, float, float]:
    """Shares of the intervals of plateau, slope and ridge that hold the truth."""
    chance = np.random.default_rng(0)
    held = []
    for _ in range(campaigns):
        tile = int(chance.integers(*TILES)) if tiled else 1
        found = analyse(by_depth([sweep(name, tile, chance)])[0])
        truths = (PLATEAU_MS, SLOPE_MS, PLATEAU_MS / SLOPE_MS)
        ends = [each and each.ends for each in (found.plateau, found.slope, found.ridge)]
        held.append(
            [
                known is not None and (known[0] or 0) <= truth <= (np.inf if known[1] is None else known[1])
                for known, truth in zip(ends, truths, strict=True)
            ]
        )
    plateau, slope, ridge = map(float, np.mean(held, axis=0))
    return plateau, slope, ridge
