"""Steps of a history: how often does a quiet one show one, and how often is one of 3% found in time? And
comparisons with the nights before: how often does one fail without a change?

Steps: nights are normal, with a standard deviation of 1.3% (quiet histories) or as stated, and correlate as
an autoregressive process of order one. A step is found if one is dated to its night or one beside it, by the
fifth night after 30 at the old level.

Comparisons: 20 cells of three repeats that differ by 1%, each cell by 0.3% from night to night, and all by
the day of the machine. A bad night is 6% slow, of one cell alone, one night in ten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from benchmarks.validity.comparing import B_MS, judged
from benchmarks.validity.row import Row, correlated
from harness.analysis.line_fit import Floats
from harness.analysis.steps import levels

SPREAD, STEP = 0.013, 0.03
BEFORE_STEP, SINCE_STEP = 30, 5
LENGTHS = (12, 25, 60, 180)
CORRELATIONS = (0.0, 0.3, 0.6, 0.8)  # of neighbours
SPREADS = (0.005, 0.0075, SPREAD)  # standard deviations of the nights


def rates(campaigns: int) -> list[Row]:
    """Of as many histories as `campaigns` in each case, of comparisons a quarter of them."""
    rows = []
    for rho, nights in product(CORRELATIONS, LENGTHS):
        case = f"quiet history of {nights} nights shows a step: rho {rho}, sd {SPREAD:.1%}"
        rows.append(Row(case, f"{false_steps(nights, rho, campaigns):.1%}", "at most 5%"))
    for spread, rho in product(SPREADS, CORRELATIONS):
        case = f"a step of 3% is found within five nights: rho {rho}, sd {spread:.2%}"
        rows.append(Row(case, f"{found(rho, spread, campaigns):.1%}", "at least 90%"))
    draws = math.ceil(campaigns / 4)
    for nights, machine in product((7, 14), MACHINES):
        seen = compared(machine, nights, 0.0, draws)
        words = f"{seen.slower.mean():.1%}, fails {seen.failed.mean():.1%}"
        rows.append(
            Row(f"any cell SLOWER without a change: {machine}, {nights} nights", words, "fails <= 2%")
        )
    for machine, change in product(MACHINES, (0.05, 0.15)):
        seen = compared(machine, MOST_NIGHTS, change, draws)
        by_night = (f"{share:.0%}" for share in np.maximum.accumulate(seen.failed, axis=1).mean(axis=0))
        words = f"SLOWER {seen.slower[:, 0].mean():.0%}, failed by night 1, 2, 3: {', '.join(by_night)}"
        rows.append(Row(f"a cell slower by {change:.0%}: {machine}", words, "90% by night 3"))
    return rows


def false_steps(nights: int, rho: float, draws: int, seed: int = 0) -> float:
    chance = np.random.default_rng(seed)
    quiet = (history(chance, nights, rho, SPREAD).tolist() for _ in range(draws))
    return sum(len(levels(values)) > 1 for values in quiet) / draws


def found(rho: float, spread: float, draws: int, seed: int = 0) -> float:
    chance, hits = np.random.default_rng(seed), 0
    for _ in range(draws):
        values = history(chance, BEFORE_STEP + SINCE_STEP, rho, spread)
        values[BEFORE_STEP:] *= 1 + STEP
        hits += any(abs(level.first - BEFORE_STEP) <= 1 for level in levels(values.tolist())[1:])
    return hits / draws


def history(chance: np.random.Generator, nights: int, rho: float, spread: float) -> Floats:
    return np.asarray(20 * np.exp(spread * correlated(chance, nights, rho)))


CELLS, REPEATS, REPEAT, OWN = 20, 3, 0.01, 0.003
BAD, SLOW = 0.1, 0.06
AFTER, MOST_NIGHTS = 3, 14  # nights that are compared, and of their baseline


@dataclass(frozen=True)
class Machine:
    """`day`: standard deviation of the shift that all cells share; `bad`: cells with bad nights."""

    day: float = 0.0
    bad: int = 0

    def __str__(self) -> str:
        return f"day {self.day:.0%}, {self.bad} cells with bad nights"


MACHINES = (Machine(), Machine(day=0.03), Machine(bad=1), Machine(bad=CELLS))


class Compared(NamedTuple):
    """By draw and night: whether the changed cell, or where none changed any, is SLOWER, and fails."""

    slower: Floats
    failed: Floats


def compared(machine: Machine, nights: int, change: float, draws: int, seed: int = 0) -> Compared:
    """Nights compared with those before, of which there are `nights` at first. `change`: of the first cell
    from then on."""
    chance = np.random.default_rng(seed)
    slower, failed = (np.zeros((draws, AFTER)) for _ in range(2))
    for draw in range(draws):
        cost = chance.normal(0, REPEAT, (nights + AFTER, CELLS, REPEATS))
        cost += chance.normal(0, OWN, (nights + AFTER, CELLS))[:, :, None]
        cost += chance.normal(0, machine.day, nights + AFTER)[:, None, None]
        is_bad = chance.random((nights + AFTER, CELLS)) < BAD
        cost[:, CELLS - machine.bad :] += math.log1p(SLOW) * is_bad[:, CELLS - machine.bad :, None]
        cost[nights:, 0] += math.log1p(change)
        for night in range(AFTER):
            nights_so_far = cost[max(0, nights + night - MOST_NIGHTS) : nights + night + 1]
            rows = list(judged(nights_so_far.tolist()).values())
            of = [row for row in (rows[:1] if change else rows) if row["verdict"] == B_MS.worse]
            slower[draw, night] = bool(of)
            failed[draw, night] = any(row["nights"] >= row["nights_to_fail"] for row in of)
    return Compared(slower, failed)
