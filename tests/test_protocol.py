"""What crosses the pipe: whole events or none."""

import json
from typing import Any

import pytest
from damage import JSON
from hypothesis import example, given
from hypothesis import strategies as st

from harness.records import events_in
from runners import protocol
from runners.protocol import Done, Failed, Loaded, NonsenseError, Phase, Request, Rows, Tokens, decode, encode

WHOLE = st.integers(0, (1 << 63) - 1)
FINITE = JSON.filter(lambda value: "NaN" not in json.dumps(value) and "Infinity" not in json.dumps(value))
FACTS = st.dictionaries(st.text(), FINITE, max_size=3)
EVENTS = st.one_of(
    st.builds(Phase, st.text(), st.integers()),
    st.builds(Loaded, FACTS),
    st.builds(
        lambda first, pairs: Tokens(first, [t_ns for t_ns, _ in pairs], [token for _, token in pairs]),
        WHOLE,
        st.lists(st.tuples(WHOLE, WHOLE), min_size=1),
    ),
    st.builds(Done, FACTS),
    st.builds(Failed, st.sampled_from(protocol.FAILURES), st.text()),
)


@given(EVENTS)
@example(Phase("load", 12))
@example(Loaded({"versions": {"fake": "1"}}))
@example(Tokens(0, [10, 20, 30], [7, 8, 9]))
@example(Rows("prefill", {"round": [1], "depth": [0], "n": [4], "latency_ns": [5]}))
@example(Done({"counters": {}}))
@example(Failed("oom", "does not fit"))
def test_an_event_survives_the_pipe(event: Any) -> None:
    line = encode(event)
    assert line.index(b"\n") == len(line) - 1
    assert decode(line) == event


@given(st.lists(EVENTS, min_size=1, max_size=3))
def test_a_stream_cut_anywhere_gives_the_whole_events_before_the_cut(events: list[Any]) -> None:
    lines = [encode(event) for event in events]
    stream = b"".join(lines)
    ends = [sum(map(len, lines[:k])) for k in range(len(lines) + 1)]
    for cut in range(len(stream) + 1):
        complete = sum(end <= cut for end in ends) - 1
        assert list(events_in(stream[:cut])) == events[:complete]


@given(st.binary() | st.builds(lambda value: json.dumps(value).encode(), JSON))
@example(b'{"event": "Phase", "name": "load", "t_ns": 1}\n')
def test_a_line_is_an_event_or_nonsense(line: bytes) -> None:
    try:
        event = decode(line)
    except NonsenseError:
        return
    assert decode(encode(event)) == event


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello\n",
        b"\x00\xff\n",
        b"[]\n",
        b"3\n",
        b'{"event": "Bye"}\n',
        b'{"event": "Phase"}\n',
        b'{"event": "Done", "facts": 3}\n',
        b'{"event": "Died", "outcome": "ok", "reason": ""}\n',
        b'{"event": "Failed", "outcome": "ok", "reason": "fine"}\n',
        b'{"event": "Tokens", "first": 0, "t_ns": [1, 2], "ids": [1]}\n',
        b'{"event": "Tokens", "first": 0, "t_ns": [1.5], "ids": [1]}\n',
        b'{"event": "Tokens", "first": 0, "t_ns": [-1], "ids": [1]}\n',
        b'{"event": "Tokens", "first": 0, "t_ns": "12", "ids": "34"}\n',
        b'{"event": "Tokens", "first": 0, "t_ns": [], "ids": []}\n',
        b'{"event": "Done", "facts": {"x": NaN}}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_anything_else_is_nonsense(line):
    with pytest.raises(NonsenseError):
        decode(line)


def test_a_request_of_another_schema_is_refused(tmp_path):
    path = tmp_path / "request.json"
    Request("generate", "fake", "cpu", {}).write(path)
    assert Request.read(path) == Request("generate", "fake", "cpu", {})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    with pytest.raises(ValueError, match="schema 99"):
        Request.read(path)


def columns(**changed: Any) -> dict[str, Any]:
    return {"round": [1, 1], "depth": [0, 0], "n": [1, 2], "latency_ns": [5, 6]} | changed


@pytest.mark.parametrize(
    "event",
    [
        {"table": "other", "columns": columns()},
        {"table": ["prefill"], "columns": columns()},
        {"table": "prefill", "columns": columns(more=[1, 2])},
        {"table": "turns", "columns": columns()},
        {"table": "prefill", "columns": columns(n=[1])},
        {"table": "prefill", "columns": columns(n=5)},
        {"table": "prefill", "columns": columns(n=[1, -2])},
        {"table": "prefill", "columns": columns(latency_ns=[5, 6.5])},
        {"table": "prefill", "columns": columns(latency_ns=[5, True])},
        {"table": "prefill", "columns": columns(latency_ns=[5, 1 << 63])},
        {"table": "prefill", "columns": [1, 2]},
        {"table": "prefill"},
    ],
)
def test_rows_that_are_none_are_a_worker_protocol_error(event: dict[str, Any]) -> None:
    with pytest.raises(NonsenseError):
        decode(json.dumps({"event": "Rows"} | event).encode())
