"""Steps over nights: how often a quiet series shows one, how well a planted one is dated, what is none."""

from typing import Any

import numpy as np
import pytest

from benchmarks.validity import nights as simulated
from harness.analysis.steps import Level, levels

NIGHTS = 60
Nights = list[float | None]


def quiet(chance: np.random.Generator, nights: int = NIGHTS, rho: float = 0.3) -> Nights:
    """Realistic nights: 1.3% of noise, neighbours alike, 3% slow by a tenth for a night, 5% that failed."""
    noise = chance.normal(size=nights)
    for night in range(1, nights):
        noise[night] = rho * noise[night - 1] + np.sqrt(1 - rho**2) * noise[night]
    values = 20 * np.exp(0.013 * noise) * np.where(chance.random(nights) < 0.03, 1.1, 1.0)
    return [
        None if failed else float(v) for v, failed in zip(values, chance.random(nights) < 0.05, strict=True)
    ]


def slower(values: Nights, share: float) -> Nights:
    return [None if value is None else value * (1 + share) for value in values]


LONG = pytest.param(365, 300, marks=pytest.mark.slow("simulates long histories for 20 s"))


@pytest.mark.parametrize(("nights", "count"), [(NIGHTS, 250), *((n, 200) for n in (6, 8, 12, 25)), LONG])
def test_of_quiet_histories_at_most_one_in_twenty_shows_a_step(nights: int, count: int):
    chance = np.random.default_rng(20261121 if nights == NIGHTS else nights)
    shown = [len(levels(quiet(chance, nights))) > 1 for _ in range(count)]
    assert np.mean(shown) <= 0.05


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.8])
def test_correlated_nights_are_no_steps(rho: float):
    assert simulated.false_steps(60, rho, draws=150) <= 0.06  # 5%, of 150


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.8])
def test_a_step_of_3_percent_is_found_within_five_nights(rho: float):
    assert simulated.found(rho, spread=0.005, draws=100) >= 0.9


@pytest.mark.parametrize("share", [0.05, -0.05])
def test_a_planted_step_of_5_percent_is_found_at_the_right_night(share: float):
    chance = np.random.default_rng(20261122)
    found = 0
    for _ in range(200):
        at = int(chance.integers(10, NIGHTS - 9))
        before, after = quiet(chance, at), quiet(chance, NIGHTS - at)
        values = before + slower(after, share)
        measured = [night for night, value in enumerate(values) if value is not None]
        right = measured.index(next(night for night in measured if night >= at))
        starts = [measured.index(level.first) for level in levels(values)[1:]]
        found += any(abs(start - right) <= 1 for start in starts)
    assert found / 200 >= 0.95


@pytest.mark.parametrize("nights", [1, 2])
@pytest.mark.parametrize("at", [0, 1, 15, 28, 29])
def test_one_bad_night_or_two_are_no_step_however_bad(at: int, nights: int):
    chance = np.random.default_rng(3)
    values = (20 * np.exp(0.01 * chance.normal(size=30))).tolist()
    values[at : at + nights] = [100.0] * len(values[at : at + nights])
    assert len(levels(values)) == 1


@pytest.mark.parametrize("at", [0, 15, 27])
def test_three_nights_at_another_level_are_one(at: int):
    values = (20 * np.exp(0.01 * np.random.default_rng(4).normal(size=30))).tolist()
    values[at : at + 3] = [30.0, 30.1, 30.2]
    found = levels(values)
    assert [(each.first, each.last) for each in found if each.value > 25] == [(at, at + 2)]
    assert len(found) == (3 if at == 15 else 2)


def test_a_failed_night_is_a_gap_and_belongs_to_no_level():
    values: Nights = [10.0] * 8 + [None, None] + [12.0] * 8
    assert levels(values) == [Level(0, 7, pytest.approx(10.0)), Level(10, 17, pytest.approx(12.0))]
    assert levels([None, *values, None])[0].first == 1


def test_the_spread_within_nights_keeps_a_small_step_from_being_one():
    values = [10.0 + 0.001 * (i % 3) for i in range(12)] + [10.2 + 0.001 * (i % 3) for i in range(12)]
    assert len(levels(values)) == 2
    assert len(levels(values, spread=0.02)) == 1


@pytest.mark.parametrize(("values", "expected"), [([], 0), ([None], 0), ([5.0], 1), ([5.0, 9.0] * 2, 1)])
def test_too_few_nights_have_one_level_at_most(values: Any, expected: int):
    assert len(levels(values)) == expected


def test_a_figure_that_never_changes_is_one_level_and_a_byte_more_is_no_step():
    assert levels([1e9] * 40) == [Level(0, 39, pytest.approx(1e9))]
    assert len(levels([1e9] * 20 + [1e9 + 4096] * 20)) == 1
    assert len(levels([1e9] * 20 + [1.02e9] * 20)) == 2
