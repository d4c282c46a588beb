"""Passes and windows on a session at hand, in the process of the test: which, in which order, and where."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

from harness.config.workloads import Windows
from harness.stacks.header import stacks
from runners.protocol import Instruments, Rows
from runners.stacks import fake
from runners.workloads import filling
from runners.workloads.prefill_depth_turns import (
    BISECTIONS,
    FEWEST,
    SETTLE,
    STAIR,
    Means,
    chosen,
    measure_depth,
    measure_prefill,
    order,
)


class Place:
    """A fake session at hand, with the virtual time that it shares with the measurement."""

    def __init__(self, **options: Any) -> None:
        time = fake.VirtualTime()
        defaults = {option.name: option.default for option in stacks()["fake"].options.values()}
        given = defaults | {"n_ctx": 20_000, "threads": 1, "kv_bytes_per_token": 1} | options
        self.session = fake.FakeSession(given, time, 1.0)
        self.instruments = Instruments(time.now_ns, lambda: 0, self._page_faults)
        self.faults = 0
        self.rows: list[dict[str, int]] = []

    def _page_faults(self) -> tuple[int, int]:
        return self.faults, 0

    def measure(self, measured: Any, **workload: Any) -> dict[str, Any]:
        def emit(rows: Rows) -> None:
            columns = rows.columns
            values = zip(*columns.values(), strict=True)
            self.rows += [dict(zip(columns, each, strict=True)) for each in values]

        found = measured(
            self.session, workload | {"prompt": [1, 2, 3, 4, 5]}, emit, self.instruments, lambda phase: None
        )
        return dict(found)


def test_rounds_have_their_own_order() -> None:
    place = Place()
    place.measure(measure_prefill, depth=[0], lengths=[1, 2, 4, 8, 16, 32], passes=4)
    orders = {tuple(row["n"] for row in place.rows[at : at + 6]) for at in range(0, 24, 6)}
    assert len(orders) > 1


def test_a_page_fault_counts_within_a_timed_window_and_not_while_a_context_is_filled(monkeypatch) -> None:
    place = Place()

    def fault(name: str) -> None:
        whole = getattr(place.session, name)

        def faulting(*given: Any) -> Any:
            place.faults += 1
            return whole(*given)

        monkeypatch.setattr(place.session, name, faulting)

    fault("feed")  # while filling, and for the one id before a window
    fault("truncate")
    found = place.measure(measure_depth, depths=[0, 1000], window=8, stop_at=0.5, most_windows=4)
    assert (found["major_faults"], place.faults > 2) == (0, True)
    fault("steps")
    found = place.measure(measure_depth, depths=[0, 1000], window=8, stop_at=0.5, most_windows=4)
    assert found["major_faults"] == 8  # a window each
    found = place.measure(measure_prefill, depth=[0], lengths=[1, 8], passes=3)
    assert found["major_faults"] == 6  # not the round that warms up


def test_lengths_chosen_by_themselves_are_closest_at_the_ridge() -> None:
    for ridge in (40, 100, 300, 700):

        def takes(n: int, ridge: int = ridge) -> int:
            return 200_000 if n == 1 else max(10_000_000, 10_000_000 * n // ridge)

        found = chosen(1000, takes)
        assert {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000} <= set(found)
        assert len(found) == 11 + BISECTIONS
        widest = [b / a for a, b in pairwise(found) if a <= ridge <= b]
        assert max(widest) < 1.5


def test_a_ridge_is_measured_with_lengths_chosen_by_themselves() -> None:
    place = Place(prefill_ms=10.0, prompt_token_ms=0.1)
    place.measure(measure_prefill, depth=[0], lengths=None, up_to=512, passes=2)
    lengths = sorted({row["n"] for row in place.rows})
    assert lengths[-1] == 512
    assert len([n for n in lengths if 64 < n < 128]) >= 2  # the ridge is at 100


def test_the_next_window_is_where_the_interval_is_widest() -> None:
    means: Means = {0: [], 1000: []}
    chance, asked = random.Random(0), []
    for at in order(means, [0, 1000], 0.01, 50):
        asked.append(at)
        means[at].append((0.0, 1e6 * (1 + (0.1 if at else 0.001) * chance.gauss(0, 1))))
    assert set(asked[2 * FEWEST :]) == {1000}


def test_windows_lie_evenly_around_their_depth() -> None:
    place = Place(noise=0.5)
    place.measure(measure_depth, depths=[0, 1000], window=8, stop_at=1e-9, most_windows=32)
    begins: dict[int, dict[int, int]] = {0: {}, 1000: {}}
    for row in place.rows:
        begins[row["depth"]].setdefault(row["round"], row["n"] - SETTLE - 2)
    for asked, middle in ((0, STAIR // 2), (1000, 1000)):
        found = [begin - middle for begin in begins[asked].values()]
        assert -STAIR // 2 <= min(found) <= max(found) < STAIR // 2
        quarters = Counter((begin + STAIR // 2) // (STAIR // 4) for begin in found)
        assert max(quarters.values()) - min(quarters.values()) <= 2
        assert set(quarters) == {0, 1, 2, 3}


def test_no_window_ends_past_the_context_that_its_workload_asks_for() -> None:
    for asked in (0, 100, 127, 128, 1000):
        whole = Windows(depths=[asked], window=8, most_windows=160).holds
        place = Place(n_ctx=whole, noise=0.5)
        place.measure(measure_depth, depths=[asked], window=8, stop_at=1e-9, most_windows=160)
        assert max(row["n"] for row in place.rows) <= whole


def test_a_context_too_large_to_copy_is_measured_the_deepest_first(monkeypatch) -> None:
    found = {}
    for most in (filling.MOST_KEPT_BYTES, 100):
        monkeypatch.setattr(filling, "MOST_KEPT_BYTES", most)
        places = [Place(prefill_ms=2.0, W_tokens_per_ms=1000) for _ in range(2)]
        places[0].measure(measure_depth, depths=[0, 500, 3000], window=8, stop_at=0.5, most_windows=4)
        places[1].measure(measure_prefill, depth=[0, 500], lengths=[1, 8], passes=2)
        orders = [[*dict.fromkeys(row["depth"] for row in place.rows)] for place in places]
        if most == 100:
            assert orders == [[3000, 500, 0], [500, 0]]
        rounded = [
            sorted(
                (row["depth"], row["round"], row["n"], round(row["latency_ns"] / 1e5)) for row in place.rows
            )
            for place in places
        ]
        found[most] = rounded
    assert len(found) == 2
    first, second = found.values()
    assert first == second
