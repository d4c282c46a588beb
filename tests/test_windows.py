"""Windows of decode at depths, simulated with a known truth: the line, its intervals, a curve."""

import random
from collections import Counter
from collections.abc import Callable

from benchmarks.validity import processes
from harness.analysis import depth, windows
from runners import protocol


def simulated(
    rise: Callable[[float], float], seed: int, noise: float = 0.01, depths: tuple[int, ...] = (0, 4096, 16384)
) -> dict[str, list[int]]:
    """Eight windows of 16 steps at each depth; a whole window is `noise` off, and each step again."""
    chance = random.Random(seed)
    table: dict[str, list[int]] = {name: [] for name in protocol.TABLES["windows"]}
    for asked in depths:
        for number in range(1, 9):
            off = 1 + chance.gauss(0, noise)
            begin = asked + chance.randrange(1, 256)
            for n in range(begin, begin + 16):
                ms = rise(n - 1) * off * (1 + chance.gauss(0, noise))
                for name, value in zip(table, (number, asked, n, int(ms * 1e6)), strict=True):
                    table[name].append(value)
    return table


def line(n: float) -> float:
    return 10 + n / 4000


def bent(n: float) -> float:
    return 10 + n / 4000 + (n / 8000) ** 2


def test_the_intervals_of_a_line_cover_the_truth() -> None:
    """Of 300 simulated tables: B in 96%, the slope in 96%, the depths in 96%, 93% and 95%; here 200."""
    covered: Counter[str] = Counter()
    for seed in range(200):
        found = windows.analyse_windows(simulated(line, seed))
        assert found is not None
        assert found.B_ends_ms is not None
        assert found.slope_ends_ms is not None
        covered["B"] += found.B_ends_ms[0] < 10 < found.B_ends_ms[1]
        covered["slope"] += found.slope_ends_ms[0] < 1 / 4000 < found.slope_ends_ms[1]
        for at in found.at:
            assert at.ends_ms is not None
            covered[str(at.depth)] += at.ends_ms[0] < line(at.depth) < at.ends_ms[1]
    assert covered.keys() == {"B", "slope", "0", "4096", "16384"}
    assert all(0.92 < count / 200 < 0.98 for count in covered.values()), covered


def test_the_intervals_of_several_processes_cover_the_mean_one() -> None:
    """With the windows of all as independent values, two thirds do. docs/validation.md has the rates."""
    (hits,) = processes.at_depth(cells=1, processes=3, spread=0.01, campaigns=40).values()
    assert sum(map(bool, hits)) / len(hits) > 0.88


def test_two_processes_alone_have_no_interval_and_share_that_of_their_campaign() -> None:
    (alone,) = processes.at_depth(cells=1, processes=2, spread=0.01, campaigns=2).values()
    assert set(alone) == {None}
    (several,) = processes.at_depth(cells=6, processes=2, spread=0.01, campaigns=2).values()
    assert several.count(None) < len(several) / 4


def test_a_curve_is_found_and_a_line_is_not_called_one() -> None:
    flags: Counter[str] = Counter()
    for seed in range(100):
        for what, rise in (("line", line), ("bent", bent)):
            found = depth.depths([simulated(rise, seed)])
            assert found is not None
            flags[what] += found["curved"]
    assert flags["bent"] == 100
    assert flags["line"] <= 4  # one in a hundred is expected


def test_one_slow_process_with_most_of_the_windows_of_a_depth_is_no_curve() -> None:
    """With the windows of both as one series, 16 of these 40 are."""
    found = 0
    for seed in range(40):
        tables = [simulated(line, seed, noise=0.003)]
        tables += [simulated(lambda n: 1.02 * line(n), seed + 50 * each, noise=0.003) for each in range(1, 5)]
        slow = tables[1] | {"round": [*tables[1]["round"]]}
        for number, more in enumerate(tables[2:], 1):
            for place, depth_of_row in enumerate(more["depth"]):
                if depth_of_row == 4096:
                    for name in slow:
                        slow[name].append(more[name][place] + 8 * number * (name == "round"))
        found += windows.curved([tables[0], slow])
    assert found <= 2


def test_two_depths_give_a_line_and_no_statement_on_its_curve() -> None:
    found = windows.analyse_windows(simulated(line, 0, depths=(0, 4096)))
    assert found is not None
    assert found.line is not None
    assert not windows.curved([simulated(bent, 0, depths=(0, 4096))])


def test_one_depth_gives_its_speed_and_no_line() -> None:
    found = windows.analyse_windows(simulated(line, 0, depths=(4096,)))
    assert found is not None
    assert (found.line, found.at[0].windows) == (None, 8)
    assert windows.analyse_windows({}) is None
