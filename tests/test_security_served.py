"""Servers with bad intentions: answers without end, slow, packed or of wrong types; and what is no key."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import built, write_config
from stand_in_server import Behaviour, head, serving, slowly, without_end, zeros_packed
from test_served import DEPTH as DEPTH_WORKLOAD
from test_served import MODEL_SERVED, QUICK, certificate, conversed  # noqa: F401

from harness import records
from harness.models import served
from runners.answers import (
    ANSWER_BYTES,
    COUNT,
    DEPTH,
    FORMS,
    MORE_TOKENS,
    MOST_SHOWN,
    NAME_CHARACTERS,
    ROWS,
    WrongAnswer,
    api_key,
    json_object,
    unreachable,
)
from runners.served.apis import APIS, CHAT

BY = {"controller": 1, "worker": 3}
"""The request of /v1/models that is the client's first: the controller asks for it when it reads the address,
and when it identifies the server."""
ROOT = Path(__file__).parents[1]
TOO_LARGE = f"/v1/models: the server sends more than {ANSWER_BYTES} bytes in one answer"
EVENTS = head(kind="text/event-stream")


@pytest.fixture(autouse=True)
def http(cache: Path) -> None:
    built("http")


def asked(code: str) -> str:
    """What a worker's client prints; `code` has the class Client, and `module` it is in."""
    begin = "import sys, runners.served.client as module\nfrom runners.served.client import Client\n"
    ran = subprocess.run([built("http").python, "-c", begin + code], capture_output=True, text=True, cwd=ROOT)
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("client", BY)
@pytest.mark.parametrize(
    ("writes", "sentence"),
    [
        (without_end(head(), b" " * (1 << 20)), TOO_LARGE),
        (without_end(head(500), b" " * (1 << 20)), TOO_LARGE),
        (without_end(head(Content_Length="9" * 15), b" " * (1 << 20)), TOO_LARGE),
        (zeros_packed(64 << 20), "/v1/models: the server compresses its answer (gzip), although"),
        (without_end(b"HTTP/1.1 200 x\r\nx: ", b"x" * (1 << 16)), "cannot be reached ("),
        (lambda send: send(head() + b'{"data": 5}'), "/v1/models: `data` is a number, not a list"),
        (lambda send: send(head() + b'{"a":' * 99 + b"1" + b"}" * 99), f"nested more than {DEPTH} deep"),
    ],
    ids=["endless", "endless error", "long", "packed", "endless head", "wrong type", "deep"],
)
def test_an_answer_out_of_bounds_is_not_read_and_one_sentence_says_why(harness, client, writes, sentence):
    with serving(Behaviour(raw={"/v1/models": (BY[client], writes)})) as address:
        ran = harness("run", address, *QUICK)
    assert ran.code == (2 if client == "controller" else 1)
    assert sentence in " ".join((ran.out + ran.err).split()), ran


def test_the_body_of_a_refusal_is_bounded_too(harness):
    refusal = without_end(head(400), b" " * (1 << 20))
    with serving(Behaviour(raw={"/completion": (2, refusal)})) as address:
        ran = harness("run", address, *QUICK)
    assert f"/completion: the server sends more than {ANSWER_BYTES} bytes" in " ".join(ran.out.split())


@pytest.mark.parametrize("after", [0, 17, len(head()) + 5], ids=["status", "head", "body"])
def test_an_answer_that_comes_byte_by_byte_is_waited_for_as_a_whole(monkeypatch, after):
    page = head() + json.dumps({"data": [{"id": "m" * 4000}]}).encode()
    with serving(Behaviour(raw={"/v1/models": (1, slowly(page, after))})) as address:
        monkeypatch.setattr(served._got, "__defaults__", (0.5, None))
        with pytest.raises(served.NotServed, match=r"sent no whole answer within 0\.5 s"):
            served.serving(address, None)
        said = asked(f"Client({address!r}).ask('/v1/models', within_s=0.5)")
    assert "sent no whole answer within 0.5 s" in said


@contextmanager
def speaking(write: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address, by https, of a server that answers each connection so, and never in TLS."""

    def accepting() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                connection.recv(1)
                with contextlib.suppress(OSError):
                    write(connection)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accepting, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def resets(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def drips(connection: socket.socket) -> None:
    """A byte of a handshake now and then."""
    connection.sendall(b"\x16\x03\x03\x40\x00\x02")
    for _ in range(100):
        time.sleep(0.1)
        connection.sendall(b"\0")


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (resets, "cannot be reached (Connection reset by peer): is the server running"),
        (drips, "does not answer in TLS: it may speak http"),
        (lambda connection: connection.sendall(b"\x15\x03\x03\0\x02\x02\x28"), "cannot be reached ("),
    ],
    ids=["reset", "a byte at a time", "alert"],
)
def test_a_handshake_of_tls_that_fails_or_does_not_end_is_one_sentence(monkeypatch, write, sentence):
    monkeypatch.setattr(served._got, "__defaults__", (0.5, None))
    with speaking(write) as address:
        with pytest.raises(served.NotServed) as refused:
            served.serving(address, None)
        said = asked(f"module.CONNECT_S = 0.5\nClient({address!r}).ask('/v1/models')").splitlines()[-1]
    for text in (str(refused.value), said):
        assert f"{address}: {sentence}" in text


def test_an_answer_in_tls_has_a_deadline_as_a_whole(monkeypatch, certificate):  # noqa: F811
    file = certificate()
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    page = head() + json.dumps({"data": [{"id": "m" * 4000}]}).encode()
    with serving(Behaviour(raw={"/v1/models": (1, slowly(page, len(head()) + 5))}), file) as address:
        monkeypatch.setattr(served._got, "__defaults__", (1.0, None))
        with pytest.raises(served.NotServed, match=r"sent no whole answer within 1 s"):
            served.serving(address, None)
        said = asked(f"Client({address!r}).ask('/v1/models', within_s=1.0)")
    assert "sent no whole answer within 1 s" in said


def test_a_stream_has_a_deadline_as_a_whole():
    stream = slowly(EVENTS + b": ping\n" * 900, len(EVENTS))
    with serving(Behaviour(raw={"/completion": (1, stream)})) as address:
        said = asked(
            "from runners.served.apis import APIS\nmodule.stream_s = lambda tokens: 0.5\n"
            f"print(*Client({address!r}).stream(APIS['llama-server'], 'm', [1], 12))"
        )
    assert "the server's answer broke off after 0 tokens: sent no whole answer within 0.5 s" in said


def test_a_stream_of_more_tokens_than_requested_is_cut():
    event = b'data: {"tokens": [7], "content": " a"}\n\n'
    with serving(Behaviour(raw={"/completion": (1, without_end(EVENTS, event))})) as address:
        said = asked(
            "from runners.served.apis import APIS\n"
            f"print(len(list(Client({address!r}).stream(APIS['llama-server'], 'm', [1], 12))))"
        )
    assert said == f"{12 + MORE_TOKENS + 1}\n"


@pytest.mark.parametrize("again", [b": ping\n", b'data: {"choices": []}\n\n', b"x"])
def test_a_stream_without_tokens_has_bounded_bytes(again):
    with serving(Behaviour(raw={"/completion": (1, without_end(EVENTS, again * 4096))})) as address:
        said = asked(
            "from runners.served.apis import APIS\nmodule.stream_bytes = lambda tokens: 2 << 20\n"
            f"print(*Client({address!r}).stream(APIS['llama-server'], 'm', [1], 12))"
        )
    assert "ServerError: the server sent " in said.splitlines()[-1], said
    assert "bytes" in said.splitlines()[-1]


WRONG: dict[type[Any], list[Any]] = {
    list: [5, "x", {"a": 1}, True, [{}] * (ROWS + 1)],
    dict: [5, "x", [1], True],
    str: [5, 0.5, [1], {"a": 1}, False, "x" * (NAME_CHARACTERS + 1)],
    int: ["x", 0.5, [1], {"a": 1}, True, -1, COUNT, float("inf"), float("nan")],
}
PLACES = [(page, place) for page, form in FORMS.items() for place in form]


@pytest.mark.parametrize(("page", "place"), PLACES, ids=lambda value: value.replace("/", "."))
def test_a_field_of_a_wrong_type_is_named_with_its_page(page, place):
    for wrong in WRONG[FORMS[page][place]]:
        content: Any = wrong
        for name in reversed(place.split("/")):
            content = [content] if name == "*" else {name: content}
        with pytest.raises(WrongAnswer) as told:
            json_object(json.dumps(content).encode(), page, None)
        assert str(told.value).startswith(f"{page}: `{place}` "), (wrong, told.value)
    content = None
    for name in reversed(place.split("/")):
        content = [content] if name == "*" else {name: content}
    assert json_object(json.dumps(content).encode(), page, None) == content


EVENT: dict[str, Any] = {
    "content": " a",
    "tokens": [1],
    "stop": True,
    "tokens_predicted": 1,
    "timings": {"prompt_n": 1, "prompt_ms": 1.0, "predicted_ms": 1.0, "draft_n": 1, "draft_n_accepted": 1},
    "response": "a",
    "done": True,
    "eval_duration": 5,
    "choices": [{"text": "a", "delta": {"content": "a"}, "token_ids": [1], "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}, "completion_tokens": 1},
}


def changed(content: Any, wrong: Any) -> list[Any]:
    """Copies of it, each with one part that is `wrong`."""
    found = []
    for name in content if isinstance(content, dict) else range(len(content)):
        (one := copy.copy(content))[name] = wrong
        found.append(one)
        if isinstance(content[name], dict | list):
            for inner in changed(content[name], wrong):
                (one := copy.copy(content))[name] = inner
                found.append(one)
    return found


@pytest.mark.parametrize("wrong", [5, -1, 1e300, float("nan"), "x", [1], [[["x"]]], {"a": {}}, True, None])
@pytest.mark.parametrize("api", [*APIS.values(), CHAT], ids=lambda api: api.path)
def test_an_event_with_a_field_of_a_wrong_type_is_read_or_named(api, wrong):
    for event in changed(EVENT, wrong):
        try:
            piece = api.read(event)
        except WrongAnswer:
            continue
        assert isinstance(piece.text, str)
        assert all(type(each) is int and 0 <= each < COUNT for each in piece.ids)
        numbers = [each for each in vars(piece.counts).values() if each is not None] if piece.counts else []
        assert all(0 <= each < COUNT for each in numbers), piece


@pytest.mark.parametrize("count", [10**9, {"a": [1]}], ids=["1e9", "an object"])
def test_a_count_that_no_answer_has_is_not_used(conversed, count):  # noqa: F811
    """Of a list with so many tokens for the next turn, memory would end."""
    stored, printed = conversed(Behaviour("openai", claims={"completion_tokens": count}), DEPTH_WORKLOAD)
    assert stored.record["outcome"] == "ok", printed
    assert len(records.table(stored)["n"]) == 2 * 4 * 8


@pytest.mark.parametrize("value", ["", " \n"])
def test_an_empty_key_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HARNESS_API_KEY", value)
    assert api_key("HARNESS_API_KEY") is None


NOT_KEYS = (
    "sk-0123456789\nabcdef",
    "sk-0123456789\x1babcdef",
    "sk-0123456789äbcdef",
    "sk-0123456789\u2028a",
    "sk-0123456789'abcdef",
    "sk-0123456789\\abcdef",
    "Bearer sk-0123456789",
)


@pytest.mark.parametrize("value", NOT_KEYS)
@pytest.mark.parametrize("variable", ["HARNESS_API_KEY", "HARNESS_OTHER"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_what_is_no_key_is_one_sentence_that_names_the_variable_alone(
    harness: Callable[..., Any], tmp_path: Path, variable: str, value: str, dry: list[str]
) -> None:
    with serving(Behaviour()) as address:
        row = {"stack": "http", "url": address, "key": variable}
        given = [write_config(tmp_path / "c.yaml", [row], {}, {**MODEL_SERVED})]
        given += [address] if variable == "HARNESS_API_KEY" and not dry else []
        for each in given:
            ran = harness("run", each, *dry, **{variable: value})
            assert (ran.code, len(ran.err.splitlines())) == (2, 1), ran
            assert f"{variable} " in ran.err
            assert "sk-" not in ran.out + ran.err
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and b"sk-0123" in path.read_bytes()]
    assert kept == []


def test_a_key_in_the_text_of_an_exception_is_masked():
    key = "sk-0123456789abcdef"
    failure = ValueError(f"Illegal header value b'Bearer {key}'")
    assert unreachable(failure, key).startswith("cannot be reached (Illegal header value b'Bearer ***')")


KEY = "sk-0123456789abcdef"
CUT = {
    "redirect": (head(307, Location="x" * (MOST_SHOWN - len(KEY) + 1) + KEY), "redirects to xxx"),
    "compressed": (head(Content_Encoding=KEY + "/" + KEY), "compresses its answer (***/***)"),
    "error": (head(400) + json.dumps({"error": "x" * (MOST_SHOWN - 9) + KEY}).encode(), "answers 400"),
}


@pytest.mark.parametrize("name", CUT)
def test_no_part_of_a_key_is_left_where_a_text_of_a_server_is_cut(name):
    sent, sentence = CUT[name]
    with serving(Behaviour(raw={"/v1/models": (1, lambda send: send(sent))})) as address:
        with pytest.raises(served.NotServed, match=re.escape(sentence)) as refused:
            served.serving(address, KEY)
        said = asked(f"Client({address!r}, {KEY!r}).models()")
    assert sentence in said
    assert KEY[:4] not in str(refused.value) + said.splitlines()[-1]


def test_no_part_of_a_key_is_left_of_the_reason_for_an_end():
    event = {"choices": [{"text": "a", "finish_reason": "x" * (MOST_SHOWN - 9) + KEY}]}
    sent = EVENTS + b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"
    with serving(Behaviour(raw={"/v1/completions": (1, lambda send: send(sent))})) as address:
        said = asked(
            "from runners.served.apis import APIS\n"
            f"stream = Client({address!r}, {KEY!r}).stream(APIS['openai'], 'm', 'a', 12)\n"
            "print(*stream, stream.ended)"
        )
    assert said.endswith("x***\n"), said
    assert KEY[:4] not in said
