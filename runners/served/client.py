"""A client of one server: find out what it is, and stream tokens from it."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import httpx

from runners.protocol import MOST_SHOWN, refusal, unreachable, without_key
from runners.served.apis import (
    APIS,
    CHAT,
    END_OF_TEXT,
    LIMIT,
    Api,
    Counts,
    Json,
    Piece,
    Prompt,
    metric,
    other_form,
)

CONNECT_S = 10.0
SILENT_S = 1200.0  # between two pieces of an answer; a long prompt on a slow machine takes minutes
ASK_S = 60.0  # for an answer that is no stream; a server may load its model first
MOST_BYTES = 1 << 20  # of one event; those of a token have a few hundred
LEAST_WAIT_NS = 200_000  # reading what is there already takes httpx 0.1 ms
PROXIES = {"x-litellm-": "LiteLLM", "x-portkey-": "Portkey"}
"""What stands before a server and may count tokens by a tokenizer of its own, as LiteLLM 1.75 does where the
server sends no usage; by the beginning of the names of its headers."""
REFUSALS = (400, 422, 500, 501)  # of a request's form: others are about the key, the model or the load
clock = time.perf_counter_ns


class ServerError(RuntimeError):
    """The server cannot be measured; the message is one sentence."""


class Stream:
    """The pieces of one answer, as they arrive, to be read in the thread that made it. `client_ns`: CPU time
    of that thread so far. `pieces`: those with tokens; of these `awaited_pieces`, which had not arrived when
    the client began to read. `first_tokens`: of the first piece. After the end: `counts`, the server's as far
    as what came allows them, `counted`, as it sent them, and `ended`, see Piece. `proxy`: what passes the
    answer on and counts in the server's place; None: none that is known."""

    def __init__(self, client: Client, api: Api, response: httpx.Response, requested: int) -> None:
        self._client, self._api, self._response = client, api, response
        self._requested = requested
        self.counts, self.counted = Counts(), Counts()
        self.ended: str | None = None
        self._error_follows = False
        headers = [name.lower() for name in response.headers]
        known = (name for start, name in PROXIES.items() if any(each.startswith(start) for each in headers))
        self.proxy = next(known, None)
        self.pieces = self.awaited_pieces = self.largest_piece = self.first_tokens = self.tokens = 0
        self.text = ""
        self._cpu_ns = time.thread_time_ns()
        self._awaited = False

    @property
    def client_ns(self) -> int:
        return time.thread_time_ns() - self._cpu_ns

    def __iter__(self) -> Iterator[list[int]]:
        """The ids of each piece that has tokens. Raises ServerError."""
        try:
            for line in self._lines():
                if (piece := self._piece(line)) is None:
                    continue
                self.counted, self.ended = piece.counts or self.counted, piece.ended or self.ended
                if piece.ids:
                    self.awaited_pieces, self._awaited = self.awaited_pieces + self._awaited, False
                    self.pieces, self.tokens = self.pieces + 1, self.tokens + len(piece.ids)
                    self.largest_piece = max(self.largest_piece, len(piece.ids))
                    self.first_tokens = self.first_tokens or len(piece.ids)
                    self.text += piece.text
                    yield piece.ids
        except httpx.HTTPError as broken:
            raise self._client.error(
                f"the server's answer broke off after {self.tokens} tokens", broken
            ) from None
        self.counts = replace(self.counted, generated=self._generated())
        if self.proxy or not self.counts.prompt:  # a prompt has tokens
            self.counts = replace(self.counts, prompt=None, cached=None)

    def _generated(self) -> int:
        """Tokens of the answer: those that came, and those without a piece of their own, such as half a
        letter, which waits for the rest. A count is used if it is neither below what came nor above what was
        requested. One token more than came is that which ends a text, where the model ended it."""
        came, counted = self.tokens, None if self.proxy else self.counted.generated
        if counted is not None and came <= counted <= self._requested:
            return came if self.ended == END_OF_TEXT and counted == came + 1 else counted
        return max(came, self._requested) if self.ended == LIMIT and came else came

    def _lines(self) -> Iterator[bytes]:
        chunks, rest = self._response.iter_bytes(), b""
        network = self._response.extensions["network_stream"]
        while True:
            had_arrived, began = network.get_extra_info("is_readable"), clock()
            chunk = next(chunks, None)
            self._awaited = self._awaited or (not had_arrived and clock() - began > LEAST_WAIT_NS)
            if chunk is None:
                break
            *whole, rest = (rest + chunk).split(b"\n")
            if len(rest) > MOST_BYTES:
                raise ServerError(f"the server sent an event of more than {MOST_BYTES} bytes")
            yield from whole
        yield rest

    def _piece(self, line: bytes) -> Piece | None:
        """Server-sent events begin with `data:`, those of Ollama are bare JSON, and llama-server may send
        `error:`; all else, such as pings, is skipped."""
        text = line.removeprefix(b"data:").strip()
        self._error_follows |= text.replace(b" ", b"") == b"event:error"
        if text.startswith(b"error:"):
            raise self._reported(text.removeprefix(b"error:").strip())
        if not text.startswith(b"{"):
            return None
        event = self._client.json(text)
        is_error = self._error_follows or event.get("object") == "error"
        if error := event.get("error") or (event if is_error else None):
            raise self._client.error("the server reports an error", error)
        try:
            return self._api.read(event)
        except (AttributeError, TypeError, ValueError):
            raise self._client.error("the server sent an event of another form", text) from None

    def _reported(self, text: bytes) -> ServerError:
        """The error of a line that need not be JSON."""
        sent: Any = text
        with contextlib.suppress(ValueError, RecursionError):
            sent = json.loads(text)
            sent = sent.get("error", sent) if isinstance(sent, dict) else text
        return self._client.error("the server reports an error", sent)


class Client:
    """`url`: of the server, with or without `/v1` at its end. `key`: its API key, which no message has.

    `forms`: fields that the server refused, and what is sent in place of each (None: nothing)."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.forms: dict[str, str | None] = {}
        self._key = key
        self._query = ""  # of a router: which of its models a page is about
        # A proxy that compresses a stream may hold back its events.
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        # No proxies: a variable of the environment must not send the requests elsewhere.
        self._http = httpx.Client(
            headers=headers,
            trust_env=False,
            verify=ssl.create_default_context(),  # which reads SSL_CERT_FILE
            timeout=httpx.Timeout(SILENT_S, connect=CONNECT_S),
            limits=httpx.Limits(),  # no limit: a connection for every user
        )

    def ask(self, path: str, body: Json | None = None) -> httpx.Response:
        """An answer that is no stream, whatever its status. Raises ServerError if there is none."""
        method = "GET" if body is None else "POST"
        return self._send(method, path, body, stream=False)

    def _send(self, method: str, path: str, body: Json | None, stream: bool) -> httpx.Response:
        """Raises ServerError."""
        timeout = {"timeout": ASK_S} if not stream else {}
        try:
            request = self._http.build_request(method, self.url + path, json=body, **timeout)
            try:
                return self._http.send(request, stream=stream)
            except httpx.RemoteProtocolError:  # it closed the connection since the request before
                return self._http.send(request, stream=stream)
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as failure:
            raise self.error(f"{self.url}: {unreachable(failure, self._key)}") from None

    def found(self, path: str, body: Json | None = None) -> Json | None:
        """A JSON object that the server has at a path, or answers to a body; null if it has none."""
        response = self.ask(path, body)
        if response.status_code != 200 or "json" not in response.headers.get("content-type", ""):
            return None
        try:
            return self._kept(response.content)
        except ServerError:
            return None

    def models(self) -> dict[str, Json]:
        """What it says of each model that it serves, by their names. Raises ServerError if it does not."""
        response = self.ask("/v1/models")
        self._check(response, self.url)
        listed = self._kept(response.content).get("data") or []
        return {str(each["id"]): each for each in listed if isinstance(each, dict) and each.get("id")}

    def total_generated(self, api: Api) -> float | None:
        """All tokens that the server has generated; null where it has no such metric."""
        if api.generated is None:
            return None
        response = self.ask("/metrics" + self._query)
        return metric(response.text, api.generated) if response.status_code == 200 else None

    def stream(self, api: Api, model: str, prompt: Prompt, tokens: int, reuse: bool = False) -> Stream:
        """Send a request, and return its answer once its head is here. `reuse`: what is evaluated of the
        prompt is the server's choice. A field that the server refuses is replaced by what it asks for, in
        later requests too. Raises ServerError."""
        body = api.body(model, prompt, tokens) | (api.reuse if reuse else {})
        while True:
            sent = {name: value for field, value in body.items() if (name := self.forms.get(field, field))}
            response = self._send("POST", api.path, sent, stream=True)
            if response.status_code not in REFUSALS:
                break
            response.read()
            if (form := other_form(sent, response.text)) is None:
                break
            self.forms |= [form]
        self._check(response, self.url + api.path)
        return Stream(self, api, response, tokens)

    def props(self, model: str) -> Json:
        """llama-server's /props, empty without; of a router those of the model, which it may load first."""
        found = self.found("/props") or {}
        if found.get("role") == "router":
            self._query = "?" + urlencode({"model": model})
            found |= self.found("/props" + self._query) or {}
        return found

    def error(self, sentence: str, sent: Any = "") -> ServerError:
        """`sent`: by the server, as its reason. The key is in neither."""
        detail = sent.get("message", sent) if isinstance(sent, dict) else sent
        text = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
        shown = without_key(text, self._key)[:MOST_SHOWN]
        return ServerError(without_key(sentence, self._key) + (f": {shown}" if shown else ""))

    def json(self, text: bytes) -> Json:
        """Raises ServerError."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise self.error("the server sent no JSON", text) from None
        if not isinstance(found, dict):
            raise self.error("the server sent no JSON object", text)
        return found

    def _kept(self, text: bytes) -> Json:
        """An object of which parts are kept. Raises ServerError."""
        found: Json = without_key(self.json(text), self._key)
        return found

    def _check(self, response: httpx.Response, url: str) -> None:
        """Raises ServerError for an answer that is none of the API's."""
        headers = response.headers
        why = refusal(response.status_code, headers.get("content-type", ""), headers.get("location"))
        if why:
            body = None
            if response.status_code >= 400:
                response.read()
                with contextlib.suppress(ValueError, RecursionError):
                    body = json.loads(response.content)
            given = body.get("error", body.get("detail")) if isinstance(body, dict) else None
            raise self.error(f"{url}: {why}", given or "")

    def close(self) -> None:
        self._http.close()


def api_of(client: Client, requested: str, model: str, owner: str, props: Json) -> Api:
    """The API of a server: the requested one, or for `auto` that of what it says it is. `owner`: of the
    model, in the server's list. Raises ServerError."""
    declared = _declared(client, model, owner.lower(), props)
    if "openai" not in (requested, declared) and requested not in ("auto", declared):
        raise ServerError(
            f"api {requested} was requested, but the server's own addresses are those of {declared}"
        )
    api = APIS[declared if requested == "auto" else requested]
    # Some servers have chats alone, which put a template around the prompt.
    return CHAT if api.name == "openai" and client.ask(api.path, {}).status_code in (404, 405) else api


def _declared(client: Client, model: str, owner: str, props: Json) -> str:
    """Which of APIS a server says it is. Its paths say nothing: LocalAI has vLLM's /version, KoboldCpp has
    llama-server's /props and Ollama's /api/version.

    llama-server and vLLM own their models, and the first names its build. Ollama's owner of a model is the
    namespace in its name, `library` without one (its middleware for OpenAI's API)."""
    if "default_generation_settings" in props and (
        owner == "llamacpp"
        or "build_info" in props
        or client.ask("/props").headers.get("server", "") == "llama.cpp"
    ):
        return "llama-server"
    if owner == "vllm":
        return "vllm"
    *_, namespace, _ = ("library", *model.lower().split("/"))
    if "version" in (client.found("/api/version") or {}) and (
        owner in (namespace, "ollama") or client.ask("/").text.strip() == "Ollama is running"
    ):
        return "ollama"
    return "openai"


def key_in(variable: str) -> str | None:
    return os.environ.get(variable, "").strip() or None
