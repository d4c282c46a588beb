"""What crosses the pipe: whole events or none."""

from __future__ import annotations

import json

import pytest

from harness.results import events_in
from runners.protocol import Done, Failed, Loaded, NonsenseError, Phase, Request, Tokens, decode, encode

SAID = [
    Phase("load", 12),
    Loaded({"versions": {"fake": "1"}}),
    Tokens(0, [10, 20, 30], [7, 8, 9]),
    Done({"counters": {}}),
    Failed("oom", "does not fit"),
]


@pytest.mark.parametrize("event", SAID, ids=lambda e: type(e).__name__)
def test_an_event_survives_the_pipe(event):
    assert decode(encode(event)) == event


def test_a_stream_cut_anywhere_gives_the_whole_events_before_the_cut():
    whole = [encode(event) for event in SAID]
    stream = b"".join(whole)
    ends = [sum(map(len, whole[:k])) for k in range(len(whole) + 1)]
    for cut in range(len(stream) + 1):
        complete = sum(end <= cut for end in ends) - 1
        assert list(events_in(stream[:cut])) == SAID[:complete]


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
