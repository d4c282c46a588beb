"""One value for the times of tokens."""

from harness.records.token_times import NO_TOKENS, TokenTimes
from runners.protocol import Phase, Tokens

EVENTS = [Phase("generate", 0), Tokens(0, [10, 20], [7, 8]), Tokens(2, [35], [9])]


def test_the_events_of_a_worker_are_latencies_from_the_prompt_on():
    times = TokenTimes.of_events(EVENTS, prompt_tokens=25)
    assert times.columns() == {"n": [26, 27, 28], "token_id": [7, 8, 9], "latency_ns": [10, 10, 15]}
    assert TokenTimes.of_columns(times.columns()).columns() == times.columns()
    assert TokenTimes.of_columns({}).columns() == NO_TOKENS.columns() == {}
    assert not NO_TOKENS


def test_flushes_lie_between_tokens_on_the_samples_clock_and_in_no_latency():
    times = TokenTimes.of_events(EVENTS, 25, device_ns=[9, 509, 14])
    flushes = [[1, 500], [3, 800]]  # the last one after the last token
    assert times.t_ns(1000, flushes).tolist() == [1010, 1520, 1535]
    assert times.latency_ms.tolist() == [10e-6, 10e-6, 15e-6]
    device = times.device_latency_ns(flushes)
    assert device is not None
    assert device.tolist() == [9, 9, 14]


def test_a_device_that_did_not_time_every_token_has_no_times():
    assert TokenTimes.of_events(EVENTS, 25, device_ns=[9, 9]).device_ns is None
    columns = {"n": [1], "latency_ns": [2], "device_ns": [None]}
    assert TokenTimes.of_columns(columns).device_latency_ns([]) is None
