"""The worker's clock on a clock of its own: which time a token has, and which none has."""

import resource
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from runners import clock, protocol

MS = 1_000_000


class Clock:
    """A clock that a stream, a flush and the readings themselves move."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def stream(self, latencies: list[int]) -> Iterator[int]:
        for token, latency in enumerate(latencies):
            self.now += latency
            yield token


def stamped(latencies: list[int], flush_ns: int = 7) -> tuple[list[tuple[int, list[int]]], dict]:
    """The events' first token and times, and what `stamp` returns."""
    time, events, counts = Clock(), list[tuple[int, list[int]]](), list[int]()

    def emit(event: protocol.Tokens) -> None:
        time.now += flush_ns
        events.append((event.first, event.t_ns))

    timing = clock.stamp(time.stream(latencies), emit, time, counts.append)
    assert [first for first, _ in events[1:]] == counts[: len(events) - 1]
    return events, timing


def test_a_flush_after_so_many_tokens_is_in_no_latency():
    every = protocol.FLUSH_EVERY
    events, timing = stamped([10] * (every + 2))
    assert events == [(0, [10 * n for n in range(1, every + 1)]), (every, [10 * every + 10, 10 * every + 20])]
    assert timing == {"start_ns": 0, "flushes": [[every, 7]]}


def test_a_second_without_a_flush_makes_one():
    almost = protocol.FLUSH_NS // 2 - 1
    events, timing = stamped([almost, almost, 1, 2, 1])
    assert [first for first, _ in events] == [0, 4]
    assert timing["flushes"] == [[4, 7]]
    events, timing = stamped([2 * almost + 2, almost, almost])  # counted from the flush on
    assert timing["flushes"] == [[1, 7]]


def test_tokens_before_a_failure_are_emitted():
    events = []

    def dies() -> Iterator[int]:
        yield 5
        raise MemoryError

    with pytest.raises(MemoryError):
        clock.stamp(dies(), events.append, lambda: 3)
    assert events == [protocol.Tokens(0, [0], [5])]


def test_the_clock_s_own_cost_is_of_one_token(monkeypatch):
    readings = iter([1000, 51_000])
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter_ns=lambda: next(readings)))
    assert clock.stamping_cost_ns() == 5.0


@pytest.mark.parametrize(("limit", "each"), [(resource.RLIM_INFINITY, 2 << 20), (8 << 20, 8 << 20)])
def test_stacks_of_threads_count_whole_and_two_MiB_without_a_limit(monkeypatch, limit, each):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    found, memory = clock.process_accounting(3), psutil.Process().memory_info()
    assert found["stack_bytes"] == 3 * each
    assert 0 < found["rss_anon_bytes"] <= memory.rss * 1.5
    assert found["data_bytes"] > found["rss_anon_bytes"] / 2
    assert clock.peak_rss_bytes() >= memory.rss / 2


def test_major_faults_are_those_of_what_is_timed():
    seen = iter([3, 5, 9, 10])
    faults = clock.MajorFaults(lambda: (next(seen), 0))
    for _ in range(2):
        with faults:
            pass
    assert faults.counted == 2 + 1


def test_the_time_of_suspends_is_read_again_if_another_process_came_between(monkeypatch):
    readings = iter([0, 70, MS, 100, 190, 99 + MS])
    names = {"CLOCK_MONOTONIC": 1, "CLOCK_BOOTTIME": 2}
    monkeypatch.setattr(
        clock, "time", SimpleNamespace(clock_gettime_ns=lambda which: next(readings), **names)
    )
    assert clock.suspended_ns() == 90
