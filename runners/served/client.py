"""A client of one server: find out what it is, and stream tokens from it."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

import httpcore
import httpx

from runners.answers import (
    ANSWER_BYTES,
    ASK_S,
    EVENT_BYTES,
    LOAD_S,
    MORE_TOKENS,
    SILENT_S,
    WrongAnswer,
    encoded,
    json_object,
    refusal,
    shown,
    stream_bytes,
    stream_s,
    too_large,
    too_slow,
    unreachable,
    without_key,
)
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
UNUSED_S = 5.0  # until a connection is closed, as in httpx
LEAST_WAIT_NS = 200_000  # reading what is there already takes httpx 0.1 ms
PROXIES = {"x-litellm-": "LiteLLM", "x-portkey-": "Portkey"}
"""What stands before a server and may count tokens by a tokenizer of its own, as LiteLLM 1.75 does where the
server sends no usage; by the beginning of the names of its headers."""
REFUSALS = (400, 422, 500, 501)  # of a request's form: others are about the key, the model or the load
clock = time.perf_counter_ns


class ServerError(RuntimeError):
    """The server cannot be measured; the message is one sentence."""


class Deadline(threading.local):
    """When the answer that a thread reads must be here as a whole, in seconds of time.monotonic()."""

    def __init__(self) -> None:
        self.at = self.seconds = 0.0

    def set(self, seconds: float) -> None:
        self.at, self.seconds = time.monotonic() + seconds, seconds

    def wait(self, timeout: float | None) -> float:
        """Seconds that one call may take. Raises httpcore.ReadTimeout past the deadline."""
        if (left := self.at - time.monotonic()) <= 0:
            raise httpcore.ReadTimeout(too_slow(self.seconds))
        return left if timeout is None else min(timeout, left)


class Connection(httpcore.NetworkStream):
    """One that ends at a deadline: a timeout of httpx is for each read, also of the bytes of a head."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._stream, self._deadline = stream, deadline
        self.close, self.get_extra_info = stream.close, stream.get_extra_info

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        wait = self._deadline.wait(timeout)
        try:
            return self._stream.read(max_bytes, wait)
        except httpcore.ReadTimeout:
            self._deadline.wait(timeout)
            raise

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.wait(timeout))

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> Connection:
        return Connection(self._stream.start_tls(ssl_context, server_hostname, timeout), self._deadline)


class Network(httpcore.SyncBackend):
    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def connect_tcp(self, *address: Any, **options: Any) -> Connection:
        return Connection(super().connect_tcp(*address, **options), self._deadline)


@dataclass(frozen=True)
class Whole:
    """An answer that is no stream; `content` as it came."""

    status: int
    headers: httpx.Headers
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


class Stream:
    """The pieces of one answer, as they arrive, to be read in the thread that made it. `client_ns`: CPU time
    of that thread so far. `pieces`: those with tokens; of these `awaited_pieces`, which had not arrived when
    the client began to read. `first_tokens`: of the first piece. After the end: `counts`, the server's as far
    as what came allows them, `counted`, as it sent them, and `ended`, see Piece. `proxy`: what passes the
    answer on and counts in the server's place; None: none that is known."""

    def __init__(self, client: Client, api: Api, response: httpx.Response, requested: int) -> None:
        self._client, self._api, self._response = client, api, response
        self._requested, self._bytes_left = requested, stream_bytes(requested)
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
        """The ids of each piece that has tokens. An answer of many more than requested is cut. Raises
        ServerError."""
        try:
            for line in self._lines():
                if (piece := self._piece(line)) is None:
                    continue
                self.counted = piece.counts or self.counted
                self.ended = self._client.masked(piece.ended) or self.ended
                if piece.ids:
                    self.awaited_pieces, self._awaited = self.awaited_pieces + self._awaited, False
                    self.pieces, self.tokens = self.pieces + 1, self.tokens + len(piece.ids)
                    self.largest_piece = max(self.largest_piece, len(piece.ids))
                    self.first_tokens = self.first_tokens or len(piece.ids)
                    self.text += piece.text
                    yield piece.ids
                    if self.tokens > self._requested + MORE_TOKENS:
                        break
        except httpx.HTTPError as broken:
            raise self._client.error(
                f"the server's answer broke off after {self.tokens} tokens", broken
            ) from None
        finally:
            self._response.close()
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
        chunks, rest = self._response.iter_raw(), b""
        network = self._response.extensions["network_stream"]
        while True:
            had_arrived, began = network.get_extra_info("is_readable"), clock()
            chunk = next(chunks, None)
            self._awaited = self._awaited or (not had_arrived and clock() - began > LEAST_WAIT_NS)
            if chunk is None:
                break
            self._bytes_left -= len(chunk)
            if self._bytes_left < 0:
                most = stream_bytes(self._requested)
                raise ServerError(f"the server sent more than {most} bytes for {self._requested} tokens")
            *whole, rest = (rest + chunk).split(b"\n")
            if max(map(len, [*whole, rest])) > EVENT_BYTES:
                raise ServerError(f"the server sent an event of more than {EVENT_BYTES} bytes")
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
        except WrongAnswer as wrong:
            raise self._client.error(f"{self._api.path}: an event's {wrong}", text) from None
        except RecursionError:
            raise self._client.error(f"{self._api.path}: an event is nested too deep", text) from None

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
        tls = ssl.create_default_context()  # which reads SSL_CERT_FILE
        self._deadline = Deadline()
        transport = httpx.HTTPTransport(verify=tls, trust_env=False)
        transport._pool = httpcore.ConnectionPool(  # httpx 0.28.1 passes no network on
            ssl_context=tls,
            max_connections=None,  # one for every user
            keepalive_expiry=UNUSED_S,
            network_backend=Network(self._deadline),
        )
        # No proxies: a variable of the environment must not send the requests elsewhere.
        self._http = httpx.Client(
            headers=headers,
            trust_env=False,
            transport=transport,
            timeout=httpx.Timeout(SILENT_S, connect=CONNECT_S),
        )

    def ask(self, path: str, body: Json | None = None, within_s: float = ASK_S) -> Whole:
        """An answer that is no stream, whatever its status. Raises ServerError if there is none."""
        return self._whole(self._send("GET" if body is None else "POST", path, body, within_s))

    def _send(self, method: str, path: str, body: Json | None, within_s: float) -> httpx.Response:
        """The head of an answer that is here within so many seconds, also as a whole. Raises ServerError."""
        self._deadline.set(within_s)
        try:
            request = self._http.build_request(method, self.url + path, json=body)
            try:
                response = self._http.send(request, stream=True)
            except httpx.RemoteProtocolError:  # it closed the connection since the request before
                response = self._http.send(request, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as failure:
            raise self._broken(path, failure) from None
        if why := encoded(response.headers.get("content-encoding", ""), self._key):
            response.close()
            raise self.error(f"{self.url}{path}: the server {why}")
        return response

    def _whole(self, response: httpx.Response) -> Whole:
        """Raises ServerError for one that is too large or too slow."""
        content, path = bytearray(), response.request.url.path
        try:
            for chunk in response.iter_raw():
                content += chunk
                if len(content) > ANSWER_BYTES:
                    raise self.error(f"{self.url}{path}: the server {too_large(ANSWER_BYTES)}")
        except httpx.HTTPError as failure:
            raise self._broken(path, failure) from None
        finally:
            response.close()
        return Whole(response.status_code, response.headers, bytes(content))

    def _broken(self, path: str, failure: Exception) -> ServerError:
        if str(failure) == (slow := too_slow(self._deadline.seconds)):
            return self.error(f"{self.url}{path}: the server {slow}")
        return self.error(f"{self.url}: {unreachable(failure, self._key)}")

    def found(self, path: str, body: Json | None = None, within_s: float = ASK_S) -> Json | None:
        """A JSON object that the server has at a path, or answers to a body; None if it has none. Raises
        ServerError for one of another form."""
        answer = self.ask(path, body, within_s)
        if answer.status != 200 or "json" not in answer.headers.get("content-type", ""):
            return None
        return self._object(answer.content, path)

    def models(self) -> dict[str, Json]:
        """What it says of each model that it serves, by their names. Raises ServerError if it does not."""
        answer = self.ask("/v1/models")
        self._check(answer, self.url)
        listed = self._object(answer.content, "/v1/models").get("data") or []
        return {each["id"]: each for each in listed if each and each.get("id")}

    def total_generated(self, api: Api) -> float | None:
        """All tokens that the server has generated; None where it has no such metric."""
        if api.generated is None:
            return None
        answer = self.ask("/metrics" + self._query)
        return metric(answer.text, api.generated) if answer.status == 200 else None

    def stream(self, api: Api, model: str, prompt: Prompt, tokens: int, reuse: bool = False) -> Stream:
        """Send a request, and return its answer once its head is here. `reuse`: what is evaluated of the
        prompt is the server's choice. A field that the server refuses is replaced by what it asks for, in
        later requests too. Raises ServerError."""
        body = api.body(model, prompt, tokens) | (api.reuse if reuse else {})
        while True:
            sent = {name: value for field, value in body.items() if (name := self.forms.get(field, field))}
            response = self._send("POST", api.path, sent, stream_s(tokens))
            if response.status_code == 200 and "html" not in response.headers.get("content-type", ""):
                return Stream(self, api, response, tokens)
            self._deadline.set(ASK_S)
            answer = self._whole(response)
            form = other_form(sent, answer.text) if answer.status in REFUSALS else None
            if form is None:
                self._check(answer, self.url + api.path)
                raise self.error(f"{self.url}{api.path}: the server answers {answer.status}")
            self.forms |= [form]

    def props(self, model: str) -> Json:
        """llama-server's /props, empty without; of a router those of the model, which it may load first."""
        found = self.found("/props") or {}
        if found.get("role") == "router":
            self._query = "?" + urlencode({"model": model})
            found |= self.found("/props" + self._query, within_s=LOAD_S) or {}
        return found

    def error(self, sentence: str, sent: Any = "") -> ServerError:
        """`sent`: by the server, as its reason. The key is in neither."""
        detail = sent.get("message", sent) if isinstance(sent, dict) else sent
        text = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
        reason = shown(text, self._key)
        return ServerError(without_key(sentence, self._key) + (f": {reason}" if reason else ""))

    def json(self, text: bytes) -> Json:
        """Raises ServerError."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise self.error("the server sent no JSON", text) from None
        if not isinstance(found, dict):
            raise self.error("the server sent no JSON object", text)
        return found

    def masked(self, text: str | None) -> str | None:
        """What a server sent and is kept."""
        return text and shown(text, self._key)

    def _object(self, content: bytes, page: str) -> Json:
        """Raises ServerError."""
        try:
            return json_object(content, page, self._key)
        except WrongAnswer as wrong:
            raise self.error(f"{self.url}: {wrong}") from None

    def _check(self, answer: Whole, url: str) -> None:
        """Raises ServerError for an answer that is none of the API's."""
        headers = answer.headers
        why = refusal(answer.status, headers.get("content-type", ""), headers.get("location"), self._key)
        if why:
            body = None
            if answer.status >= 400:
                with contextlib.suppress(ValueError, RecursionError):
                    body = json.loads(answer.content)
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
    return CHAT if api.name == "openai" and client.ask(api.path, {}).status in (404, 405) else api


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
