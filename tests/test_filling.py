"""The longest context, on the worker's side: a context filled to its end, and a generation that grows until
memory ends it."""

import re

import pytest
from conftest import request_for
from hypothesis import example, given
from hypothesis import strategies as st

from runners.protocol import Died, Done, Failed, Instruments, Loaded, Phase, Request, Tokens
from runners.workloads import filling

PROMPT = [1, 2, 3]
WARMUP = {"window_tokens": 4, "max_windows": 5, "tolerance": 0.5}


def fit_of(
    n_ctx: int, tokens: int | None = None, fill: bool = True, most_s: float = 60.0, **options
) -> Request:
    workload = {"kind": "fit", "tokens": tokens or n_ctx, "fill": fill, "most_s": most_s, "prompt": PROMPT}
    given = {"n_ctx": n_ctx, "B_ms": 0.2, "prefill_ms": 0.2}
    return request_for("fake", "fit", workload, **given | options)


def grow_of(new_tokens: int, **options) -> Request:
    workload = {"kind": "grow", "prompt": PROMPT, "new_tokens": new_tokens, "warmup": WARMUP}
    return request_for("fake", "generate", workload, **{"n_ctx": 5000, "B_ms": 0.1} | options)


def phases(events: list) -> list[str]:
    return [e.name for e in events if isinstance(e, Phase)]


@pytest.mark.parametrize("n_ctx", [1, 8, 9, 16, 256, 1000, 5000])
def test_a_context_is_filled_to_its_very_end(worker, fake_interpreter, n_ctx):
    events = worker(fit_of(n_ctx), fake_interpreter)
    done = events[-1]
    assert isinstance(done, Done), done
    assert phases(events) == ["import", "load", "fill", "finish"]
    assert sum(isinstance(e, Loaded) for e in events) == 1
    assert done.facts["held"] == n_ctx
    assert done.facts["decode"][-1][0] == n_ctx
    assert done.facts["left_out"] is None
    assert done.facts["facts_after"]["options"]["n_ctx"] == n_ctx
    assert 0 < done.facts["fill_s"] < 30


def test_one_position_more_than_the_context_has_is_not_held(worker, fake_interpreter):
    last = worker(fit_of(512, tokens=513), fake_interpreter)[-1]
    assert last == Failed("error", "the context of n_ctx 512 is full")


def test_decode_is_timed_on_the_way_and_tells_a_context_that_is_slow_at_its_end(worker, fake_interpreter):
    last = worker(fit_of(4096, B_ms=1.0, slow_above_n=4000), fake_interpreter)[-1]
    decode = dict(last.facts["decode"])
    assert list(decode) == [512, 1024, 2048, 3072, 4096]
    assert all(decode[n] == pytest.approx(1.0, rel=0.2) for n in (512, 1024, 2048, 3072))
    assert decode[4096] == pytest.approx(10.0, rel=0.2)
    assert last.facts["fill_s"] < 2  # the rest in chunks; one by one it would be 4 s


def test_what_threads_wait_for_a_cpu_is_no_part_of_a_decode_at_depth():
    """Both threads of a step of 10 ms wait for 30 of the 40 ms that it takes at the end of the context."""
    now_ns, wait_ns = 0, 0

    class Crowded:
        chunk = 512

        def empty(self, tokens: int) -> None:
            self.at = 0

        def feed(self, ids: list[int], last: int) -> None:
            nonlocal now_ns, wait_ns
            self.at += len(ids)
            waited = 30_000_000 if self.at > 4000 else 0
            now_ns += 10_000_000 + waited
            wait_ns += 2 * waited

    instruments = Instruments(lambda: now_ns, lambda: wait_ns, lambda: (0, 0))
    said = filling.fill(Crowded(), 4096, PROMPT, 60.0, lambda line: None, instruments, threads=2)
    assert [ms for _, ms in said["decode"]] == pytest.approx([10.0] * 5)
    assert said["decode_s"] == pytest.approx(0.01 * 40 + 0.03 * 8)
    assert said["decode_wait_ns"] == 2 * 8 * 30_000_000


@given(st.integers(1, 600) | st.integers(1, 1 << 20))
@example(1)
@example(filling.DECODED)
@example(filling.DECODED + 1)
def test_the_depths_at_which_decode_is_timed_never_overlap_and_end_at_the_end(tokens: int) -> None:
    found = filling.depths(tokens)
    assert found[-1] == tokens
    ends = [0, *found]
    assert all(b - a > filling.DECODED for a, b in zip(ends, found, strict=False)) or len(found) == 1


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ({"oom_above_n_ctx": 1000}, "oom"),
        ({"oom_above_n_ctx": 1000, "fits_by": "abort"}, "crash"),
        ({"oom_above_n_ctx": 1000, "fits_by": "segfault"}, "crash"),
        ({"oom_above_n_ctx": 1000, "fits_by": "kill"}, "crash"),
        ({"oom_above_n_ctx": 1000, "fits_by": "hang"}, "timeout"),
        ({"fills_to": 1000}, "oom"),
        ({"fills_to": 1000, "fits_by": "abort"}, "crash"),
    ],
)
def test_whatever_way_a_context_does_not_fit_it_is_an_event(worker, fake_interpreter, options, outcome):
    limit_s = 2 if outcome == "timeout" else 60
    events = worker(fit_of(1024, **options), fake_interpreter, limit_s)
    assert isinstance(events[-1], Failed | Died)
    assert events[-1].outcome == outcome
    assert ("fill" in phases(events)) == ("fills_to" in options)


def test_what_allocates_and_cannot_be_filled_is_told_apart_without_filling(worker, fake_interpreter):
    events = worker(fit_of(1024, fill=False, fills_to=1000), fake_interpreter)
    done = events[-1]
    assert isinstance(done, Done)
    assert "fill" not in phases(events)
    assert (done.facts["held"], done.facts["fill_s"], done.facts["decode"]) == (0, None, [])
    assert done.facts["left_out"] is None


def test_a_fill_that_would_take_too_long_is_estimated_and_left_out(worker, fake_interpreter):
    done = worker(fit_of(262_144, prefill_ms=100.0, most_s=20), fake_interpreter)[-1]
    assert done.facts["estimate_s"] == pytest.approx(51, rel=0.2)  # 512 chunks of 100 ms
    assert done.facts["held"] == 0
    assert 0 < done.facts["fill_s"] < 1  # virtual time until the fill was given up
    said = r"filling 262144 tokens would take about 5\d s, more than the 20 s allowed"
    assert re.fullmatch(said, done.facts["left_out"])


def test_a_long_fill_says_how_far_it_is_about_once_a_second(worker, fake_interpreter):
    events = worker(fit_of(16_384, prefill_ms=100.0), fake_interpreter)
    said = [name for name in phases(events) if name.startswith("fill: ")]
    assert 2 <= len(said) <= 4
    assert said[0].startswith("fill: ")
    assert "of 16384 tokens, about" in said[0]
    assert events[-1].facts["estimate_s"] == pytest.approx(events[-1].facts["fill_s"], rel=0.2)


def test_the_time_left_follows_a_cost_that_grows_with_depth():
    def cost(first: int, count: int) -> float:
        return sum(1e-4 + 1e-8 * n for n in range(first, first + count))

    chunks = [(at, 512, cost(at, 512)) for at in range(0, 4 * 512, 512)]
    chunks[0] = (0, 512, 5.0)  # the first one warms up
    assert filling.time_left_s(chunks, 2048, 200_000) == pytest.approx(cost(2048, 197_952), rel=1e-3)
    assert filling.time_left_s(chunks[:1], 512, 1024) == pytest.approx(5.0)
    falling = [(at, 512, 1.0 - at / 4096) for at in range(0, 2048, 512)]
    assert filling.time_left_s(falling, 2048, 200_000) > 0


@pytest.mark.parametrize("known", [4, 5, 8, 20])
def test_one_late_chunk_is_no_cost_that_grows(known):
    """Taken for one, a millisecond more in the fourth chunk was a minute more of 262,144 tokens."""
    chunks = [(512 * i, 512, 0.1) for i in range(known - 1)] + [(512 * (known - 1), 512, 0.11)]
    at = 512 * known
    assert filling.time_left_s(chunks, at, 262_144) == pytest.approx(0.1 * (512 - known), rel=0.05)


def test_growth_that_ends_for_want_of_memory_ends_well_and_no_token_is_lost(worker, fake_interpreter):
    request = grow_of(2000, die_at_token=700, die_by="oom", leak_bytes_per_token=1000)
    # The warm-up's generations are of 4 tokens, far from the end.
    events = worker(request, fake_interpreter)
    done = events[-1]
    assert isinstance(done, Done), done
    assert done.facts["stopped"] == "the fake ran out of memory, as asked"
    assert sum(len(e.ids) for e in events if isinstance(e, Tokens)) == 699
    assert done.facts["counters"]["evaluated_tokens"] == len(PROMPT) + 698
    steps = done.facts["memory_steps"]
    assert steps[0][0] == len(PROMPT) + 512
    assert steps[0][1] >= 512_000


def test_growth_that_reaches_its_target_was_stopped_by_nothing(worker, fake_interpreter):
    done = worker(grow_of(100), fake_interpreter)[-1]
    assert done.facts["stopped"] is None
    assert done.facts["memory_steps"] == []  # it keeps nothing


@pytest.mark.parametrize(
    ("kind", "die_by", "end"),
    [
        ("grow", "error", Failed("error", "the fake failed, as asked")),
        ("decode", "oom", Failed("oom", "the fake ran out of memory, as asked")),
    ],
)
def test_only_growth_ends_well_and_only_for_want_of_memory(worker, fake_interpreter, kind, die_by, end):
    request = grow_of(2000, die_at_token=700, die_by=die_by)
    request.workloads[0]["kind"] = kind
    events = worker(request, fake_interpreter)
    assert events[-1] == end
    assert sum(len(e.ids) for e in events if isinstance(e, Tokens)) == 699
