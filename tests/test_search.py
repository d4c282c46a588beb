"""The search for the longest context, against exhaustive truth: right, monotone, and few tries."""

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.analysis import depth_speed
from harness.campaign.next_context import Space, Try, corrected, following, longest, predicted

SPACE = Space(256, 256, 262144)
COUNT = SPACE.highest // SPACE.granule
WEIGHTS, TOKEN = 400e6, 98304.0


def true_need(n_ctx: float) -> float:
    return WEIGHTS + TOKEN * n_ctx


def off_by(off_bytes: float) -> Callable[[float], float]:
    return lambda n_ctx: true_need(n_ctx) + off_bytes


def searched(
    limit: float,
    need: Callable[[float], float] | None,
    accounted: bool = True,
    measured: bool = True,
    truth: Callable[[float], float] = true_need,
    doubt: float = 0,
    space: Space = SPACE,
) -> tuple[int | None, list[int]]:
    """The answer, and what was tried for it."""
    tries: list[Try] = []
    while (n_ctx := following(space, tries, need, limit, accounted, doubt)) is not None:
        assert n_ctx % space.granule == 0
        assert space.lowest <= n_ctx <= space.highest
        assert n_ctx not in [each.n_ctx for each in tries]
        fits = truth(n_ctx) <= limit
        tries.append(Try(n_ctx, fits, round(truth(n_ctx)) if fits and measured else None))
        assert len(tries) <= 2 * 18  # bits of the space, twice
    return longest(space, tries), [each.n_ctx for each in tries]


def limit_at(granules: float) -> float:
    """A limit that so many granules of context just meet."""
    return true_need(granules * SPACE.granule)


def between(first: int, last: int) -> st.SearchStrategy[int]:
    """The longest context that fits, in granules: any from the first to the last; both ends come up often."""
    return st.sampled_from([first, last]) | st.integers(first, last)


@given(between(2, COUNT - 3), st.sampled_from([-1, 0, 1]), st.booleans())
def test_an_account_that_is_a_granule_off_at_most_takes_three_tries(
    granules: int, off: int, measured: bool
) -> None:
    def account(n_ctx: float) -> float:
        return true_need(n_ctx + off * SPACE.granule)

    answer, tried = searched(limit_at(granules + 0.5), account, measured=measured)
    assert answer == granules * SPACE.granule
    assert len(tried) <= (3 if measured else 4)


@given(between(1, COUNT - 1))
def test_an_account_that_is_right_takes_two_tries_the_longest_and_the_one_above(granules: int) -> None:
    answer, tried = searched(limit_at(granules), true_need)
    assert answer == granules * SPACE.granule
    assert tried == [answer, answer + SPACE.granule]


@given(between(1, COUNT - 1), st.floats(0.5, 3.0))
def test_without_an_account_a_guess_by_the_shape_takes_five_tries_at_most(
    granules: int, share: float
) -> None:
    def guess(n_ctx: float) -> float:
        return 0.3 * WEIGHTS + share * TOKEN * n_ctx

    answer, tried = searched(limit_at(granules + 0.5), guess, accounted=False)
    assert answer == granules * SPACE.granule
    assert len(tried) <= 5


@given(between(40, COUNT - 41), st.floats(-0.02, 0.02))
def test_an_account_in_doubt_is_tried_below_and_takes_three_tries_at_most(
    granules: int, off_share: float
) -> None:
    """As on a GPU, of whose runtime nobody knows much before the first probe."""
    limit = limit_at(granules + 0.5)
    answer, tried = searched(limit, off_by(-off_share * limit), doubt=0.03 * limit)
    assert answer == granules * SPACE.granule
    assert len(tried) <= 3


@given(between(100, COUNT - 41))
def test_an_account_that_is_off_by_more_than_its_doubt_takes_a_few_tries_more(granules: int) -> None:
    limit = limit_at(granules + 0.5)
    answer, tried = searched(limit, off_by(-0.1 * limit), doubt=0.03 * limit)
    assert answer == granules * SPACE.granule
    assert len(tried) <= 6


@given(between(0, COUNT))
def test_with_nothing_known_the_answer_is_still_exact(granules: int) -> None:
    answer, _ = searched(limit_at(granules + 0.5), None)
    assert answer == (granules * SPACE.granule or None)


@given(between(20, COUNT - 21), st.floats(30e6, 300e6), st.sampled_from([-1, 1]))
def test_an_account_that_is_far_off_is_corrected_by_what_was_really_taken(
    granules: int, off_bytes: float, sign: int
) -> None:
    answer, tried = searched(limit_at(granules + 0.5), off_by(sign * off_bytes))
    assert answer == granules * SPACE.granule
    # Too little was tried: it says by how much. Too much: a try that failed says nothing.
    assert len(tried) <= (3 if sign > 0 else 9)


@given(between(1, COUNT - 1), st.integers(0, SPACE.highest))
@example(100, 9000)
def test_a_curve_that_bends_is_searched_as_well(granules: int, bend: int) -> None:
    """As llama.cpp's compute buffer: flat at first, then growing."""

    def bent(n_ctx: float) -> float:
        return true_need(n_ctx) + max(0.0, 34816.0 * (n_ctx - bend))

    limit = bent((granules + 0.5) * SPACE.granule)
    answer, tried = searched(limit, bent, truth=bent)
    assert answer == granules * SPACE.granule
    assert len(tried) == 2


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    granule = draw(st.sampled_from([1, 32, 256]))
    lowest = granule * draw(st.integers(1, 20))
    return Space(granule, lowest, lowest + granule * draw(st.integers(0, 3000)))


@given(
    space=spaces(),
    share=st.floats(-0.1, 1.2),
    fixed=st.floats(-1e9, 1e9),
    slope=st.floats(0, 10 * TOKEN),
    doubt=st.floats(0, 1e9),
    switches=st.tuples(st.booleans(), st.booleans()),
)
def test_whatever_an_account_is_the_answer_is_the_longest_that_fits(
    space: Space, share: float, fixed: float, slope: float, doubt: float, switches: tuple[bool, bool]
) -> None:
    limit, (accounted, measured) = true_need(space.lowest + share * (space.highest - space.lowest)), switches
    answer, _ = searched(limit, lambda n: fixed + slope * n, accounted, measured, doubt=doubt, space=space)
    fitting = range(space.lowest, space.highest + 1, space.granule)
    assert answer == max((n for n in fitting if true_need(n) <= limit), default=None)


def test_the_longest_there_is_needs_nothing_above_it() -> None:
    assert searched(1e15, true_need) == (SPACE.highest, [SPACE.highest])


def test_where_nothing_fits_only_the_shortest_is_tried() -> None:
    assert searched(1e6, true_need) == (None, [SPACE.lowest])


def test_a_search_goes_on_from_what_was_tried_before() -> None:
    before = [Try(10240, True, round(true_need(10240))), Try(10752, False)]
    assert following(SPACE, before, true_need, limit_at(41), True) == 10496
    assert following(SPACE, [*before, Try(10496, False)], true_need, limit_at(41), True) is None


def test_what_fits_above_a_failure_does_not_count() -> None:
    assert longest(SPACE, [Try(512, True), Try(1024, False), Try(2048, True)]) == 512


def test_a_need_is_moved_by_the_longest_context_that_was_measured() -> None:
    moved = corrected(true_need, [Try(1024, True, round(true_need(1024)) + 7_000_000), Try(4096, False)])
    assert moved(8192) == pytest.approx(true_need(8192) + 7e6)


def test_two_contexts_far_apart_tell_the_slope() -> None:
    tries = [Try(n, True, round(2 * true_need(n))) for n in (1024, 4096)]
    assert corrected(true_need, tries)(65536) == pytest.approx(2 * true_need(65536))


@pytest.mark.parametrize("numbers", [(0, 256, 512), (256, 0, 512), (256, 300, 512), (256, 512, 256)])
def test_a_space_without_contexts_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no contexts"):
        Space(*numbers)


@given(between(0, COUNT))
def test_the_prediction_is_the_last_whose_need_is_within_the_limit(granules: int) -> None:
    expected = granules * SPACE.granule or None
    assert predicted(SPACE, true_need, limit_at(granules + 0.5)) == expected


def test_a_context_that_slows_down_as_shallower_depths_foretell_is_sane() -> None:
    steady = [[1000, 12.0], [2000, 13.0], [4000, 15.1], [6000, 17.0], [8000, 19.0]]
    assert depth_speed.too_slow(steady) is None
    assert depth_speed.speed_ratio(steady) == pytest.approx(1.0, abs=0.02)


def test_a_context_that_spilled_on_the_way_is_too_slow_from_there_on() -> None:
    spilled = [[1000, 12.0], [2000, 13.0], [4000, 150.0], [6000, 170.0], [8000, 190.0]]
    assert "decodes 10.0 times slower at 4000 tokens" in str(depth_speed.too_slow(spilled))


def test_two_depths_foretell_nothing() -> None:
    assert depth_speed.too_slow([[8, 1.0], [16, 9.0]]) is None
    assert depth_speed.speed_ratio([[8, 1.0], [16, 9.0]]) is None


def test_memory_that_nobody_can_tell_so_closely_is_not_crept_up_on() -> None:
    """As of a tiny model, whose granule is below a process's random variation."""
    limit = limit_at(500.5)

    def chance(n_ctx: float) -> float:  # what fits seems to have left next to nothing, each time
        return limit - 1e5

    tries: list[Try] = []
    while (n_ctx := following(SPACE, tries, off_by(2e6), limit, accounted=False)) is not None:
        fits = true_need(n_ctx) <= limit
        tries.append(Try(n_ctx, fits, round(chance(n_ctx)) if fits else None))
    assert longest(SPACE, tries) == 500 * 256
    assert len(tries) <= 7 + 2 * 10  # patience, leaps, and a bisection back
