"""A server of tokens that computes nothing: it speaks the four APIs, and makes mistakes on request.

Its answers have the form of those recorded from vLLM 0.32.0 and llama-server (llama.cpp b11549), and of the
examples in Ollama's docs/api.md and in llama.cpp's tools/server/README.md (router mode).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODEL = "stand-in"
Write = Callable[[bytes], object]
OWNERS = {"llama-server": "llamacpp", "ollama": "library", "vllm": "vllm"}


@dataclass
class Behaviour:
    """What the server does. `requests`: the bodies that it got. `most_open`: streams at once."""

    api: str = "llama-server"
    models: tuple[str, ...] = (MODEL,)
    tokens_at_once: int = 1
    merges: int = 0  # the last so many events but one have two tokens each
    burst: int = 1  # events without a pause between them
    drops_after: int | None = None
    generates: int | None = None  # at most, or more than requested where it ignores the request
    ignores_request: bool = False
    ends: str = ""  # the reason that it gives for the end of an answer
    usage: dict[str, Any] | None = None  # in place of its own counts; null values are left out
    claims: dict[str, Any] = field(default_factory=dict)  # in place of single ones of its counts
    headers: dict[str, str] = field(default_factory=dict)  # of a stream
    error_line: bool = False  # its errors do not begin with data:
    in_parts: bool = False  # content is a list of parts
    prompt_more: int = 0
    cached: int = 0
    reuses: bool = False  # a prefix that it has in common with the prompt and answer before
    says_cached: bool = True
    counts_prompt: bool = True
    drafted: int = 0
    accepted: int | None = None  # null: all
    others: int = 0
    speculates: bool = False
    streams: bool = True
    status: int = 200
    html: bool = False
    redirect: str = ""
    pings: int = 0  # before each event
    zipped: bool = False
    large_event: bool = False
    error_after: int | None = None
    key: str = ""
    echoes_key: bool = False
    chat_only: bool = False
    token_ms: float = 1.0
    at_once_in_the_network: bool = False
    slots: int = 64
    context: int = 4096
    meta: dict[str, int] = field(default_factory=dict)  # of its models, as llama-server lists them
    ftype: str = ""
    root: str = ""  # of its models, as vLLM lists them
    shown: dict[str, Any] = field(default_factory=dict)  # of a model, by Ollama
    owner: str = ""  # of its models; by default that of its API
    build: str = "b1"
    pages: dict[str, Any] = field(default_factory=dict)  # besides those of its API
    refuses: dict[str, tuple[int, Any]] = field(default_factory=dict)  # fields of a request
    router: bool = False
    load_ms: float = 9.0  # as Ollama reports it of each request
    num_ctx: int = 0  # Ollama's longest, whatever is requested; 0: what is requested
    on_gpu: float | None = None  # share of the model's memory; null: Ollama lists no loaded model
    loaded_ctx: int = 0
    raw: dict[str, tuple[int, Callable[[Write], None]]] = field(default_factory=dict)
    """Pages, from which request on they are other bytes, head included, and what writes those."""
    asked: Counter[str] = field(default_factory=Counter)
    requests: list[dict[str, Any]] = field(default_factory=list)
    held: list[int | str] = field(default_factory=list)  # in its cache
    encodings: set[str | None] = field(default_factory=set)  # that clients accept
    generated: int = 0
    open: int = 0
    most_open: int = 0


@contextmanager
def serving(behaviour: Behaviour, certificate: Path | None = None) -> Iterator[str]:
    """Its address. `certificate`: of TLS, in a file with its key."""
    free, counting = threading.Semaphore(behaviour.slots), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or events wait for the client's acknowledgements

        def log_message(self, *_: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            self._answer(behaviour, None)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(behaviour, json.loads(content))

        def _answer(self, of: Behaviour, body: dict[str, Any] | None) -> None:
            if of.key and self.headers.get("Authorization") != f"Bearer {of.key}":
                return self._whole(401, {"error": {"message": "Invalid API Key"}})
            of.asked[self.path] += 1
            first, write = of.raw.get(self.path, (0, None))
            if write and of.asked[self.path] >= first:
                self.close_connection = True
                with contextlib.suppress(OSError):  # the client has closed it
                    write(self.wfile.write)
                return None
            of.encodings.add(self.headers.get("Accept-Encoding"))
            if of.redirect:
                return self._whole(308, {}, {"Location": of.redirect})
            if of.html:
                return self._whole(200, "<html>a router's page</html>")
            if body is None:
                return self._about(of)
            if self.path == "/tokenize":
                return self._whole(
                    200, {"tokens": [len(word) + ord(word[0]) for word in body["content"].split()]}
                )
            if self.path == "/api/show":
                return self._whole(200 if of.api == "ollama" else 404, of.shown)
            if of.router and body.get("model") not in of.models:
                return self._whole(400, {"error": {"message": "model name is missing from the request"}})
            for name, (status, content) in of.refuses.items():
                if name in body:
                    return self._whole(status, content)
            chat = self.path == "/v1/chat/completions"
            if of.chat_only != chat or not body:
                return self._whole(404 if of.chat_only != chat else 400, {"error": "no"})
            if of.status != 200:
                message = f"the queue is full for {of.key}" if of.echoes_key else "the queue is full"
                return self._whole(of.status, {"error": {"message": message}})
            if body.get("stream") is False:
                kind = "draft-simple" if of.speculates else "none"
                return self._whole(200, {"generation_settings": {"speculative.types": kind}})
            of.requests.append(body)
            with free:
                with counting:
                    of.open += 1
                    of.most_open = max(of.most_open, of.open)
                try:
                    self._stream(of, body)
                finally:
                    with counting:
                        of.open -= 1

        def _about(self, of: Behaviour) -> None:
            models = [f"{each}{of.key}" if of.echoes_key else each for each in of.models]
            listed = [
                {"id": each, "object": "model", "created": time.time_ns()}
                | {"owned_by": of.owner or OWNERS.get(of.api, "organization")}
                | ({"meta": {"n_params": 1000 + place} | of.meta} if of.api == "llama-server" else {})
                | ({"root": of.root, "max_model_len": of.context} if of.api == "vllm" else {})
                for place, each in enumerate(models)
            ]
            answers: dict[str, Any] = {"/v1/models": {"object": "list", "data": listed}}
            if of.api == "llama-server":
                settings = {"n_ctx": of.context, "params": {"speculative.types": "none"}}  # whatever it does
                answers["/props"] = {"default_generation_settings": settings, "build_info": of.build}
                answers["/props"] |= {"total_slots": of.slots, "model_ftype": of.ftype}
                answers["/props"] |= {"uptime": time.monotonic(), "model_path": of.root}
                answers["/metrics"] = f"llamacpp:tokens_predicted_total {of.generated}\n"
                if of.router:
                    answers = {
                        f"{page}?model={of.models[0]}": answers[page] for page in ("/props", "/metrics")
                    }
                    answers["/v1/models"] = {"object": "list", "data": listed}
                    nothing = {
                        "default_generation_settings": {"params": None, "n_ctx": 0},
                        "model_path": "none",
                    }
                    answers["/props"] = {"role": "router", "build_info": of.build, **nothing}
            elif of.api == "ollama":
                answers["/api/version"] = {"version": of.build}
                loaded = {
                    "name": of.models[0],
                    "context_length": of.loaded_ctx,
                    "expires_at": str(time.time()),
                }
                loaded |= {"size": 4000, "size_vram": round(4000 * (of.on_gpu or 0.0))}
                answers["/api/ps"] = {"models": [] if of.on_gpu is None else [loaded]}
            elif of.api == "vllm":
                answers["/version"] = {"version": of.build}
                name = "vllm:generation_tokens_total"
                labels = '{engine="0",model_name="tiny"}'
                answers["/metrics"] = f"# TYPE {name} counter\n{name}{labels} {of.generated}.0\n"
                if of.speculates:
                    answers["/metrics"] += f"vllm:spec_decode_num_drafts_total{labels} 0.0\n"
            found = (answers | of.pages).get(self.path)
            if found is not None:
                return self._whole(200, found)
            missing = "404 page not found" if of.api == "ollama" else {"detail": "Not Found"}
            return self._whole(404, missing)

        def _whole(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
            text = content if isinstance(content, str) else json.dumps(content)
            kind = "text/html" if text.startswith("<") else "application/json"
            kind = "text/plain" if isinstance(content, str) and not text.startswith("<") else kind
            self.send_response(status)
            for name, value in {"Content-Type": kind, **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def _stream(self, of: Behaviour, body: dict[str, Any]) -> None:
            named = [body.get(each) for each in ("n_predict", "max_tokens", "max_completion_tokens")]
            options = body.get("options") or {}
            wanted = next(filter(None, [*named, options.get("num_predict")]))
            of.loaded_ctx = min(options.get("num_ctx", 4096), of.num_ctx or 1 << 20)
            count = min(wanted, of.generates or wanted)
            if of.ignores_request:
                count = of.generates or wanted
            prompt = body.get("prompt") or body["messages"][0]["content"]
            items = prompt if isinstance(prompt, list) else prompt.split()
            words = len(items) + of.prompt_more
            with counting:
                of.generated += count + of.others
                cached = of.cached + _reused(of, items, body)
                answer = range(100, 100 + count - 1)
                of.held = [*items, *(answer if isinstance(prompt, list) else [f"w{each}" for each in answer])]
            packed = gzip.zlib.compressobj(wbits=31) if of.zipped else None  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header(
                "Content-Type", "application/x-ndjson" if of.api == "ollama" else "text/event-stream"
            )
            self.send_header("Transfer-Encoding", "chunked")
            for name, value in of.headers.items():
                self.send_header(name, value)
            if of.zipped:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()

            held = bytearray()

            def send(content: bytes, last: bool = False) -> None:
                if packed:
                    content = packed.compress(content) + packed.flush(
                        gzip.zlib.Z_FINISH if last else gzip.zlib.Z_SYNC_FLUSH  # type: ignore[attr-defined]
                    )
                held.extend(f"{len(content):x}\r\n".encode() + content + b"\r\n" if content else b"")
                if not of.at_once_in_the_network or last:
                    self.wfile.write(bytes(held))
                    held.clear()

            def event(fields: dict[str, Any], last: bool = False) -> None:
                line = json.dumps(fields).encode()
                send(line + b"\n" if of.api == "ollama" else b"data: " + line + b"\n\n", last)

            began, step = time.monotonic(), of.tokens_at_once if of.streams else count
            first_at = None
            for first in range(0, count, step):
                if first % (of.burst * step) == 0:
                    time.sleep(of.token_ms / 1e3 * of.burst * min(step, count - first))
                first_at = first_at or time.monotonic()
                if of.drops_after is not None and first >= of.drops_after:
                    self.close_connection = True
                    return
                if of.error_after is not None and first >= of.error_after:
                    if of.error_line:
                        send(b'error: {"code": 500, "message": "the GPU is lost"}\n\n', last=True)
                        return self._close()
                    event({"error": {"message": "the GPU is lost"}})
                    break
                for _ in range(of.pings):
                    send(b": ping\n\n")
                if first % 2 == 0 and count - 2 * of.merges <= first + 1 < count:
                    continue  # with the next one
                began_at = first - (first % 2 == 1 and count - 2 * of.merges <= first)
                ids = [100 + n for n in range(began_at, min(first + step, count))]
                more = {"padding": "x" * (3 << 20)} if of.large_event else {}
                event(_piece(of, ids, self.path) | more)
            ms = (time.monotonic() - (first_at or began)) * 1e3
            ends_so = of.api in ("openai", "vllm")
            if of.ends and ends_so:
                event({**OF_OPENAI, "choices": [{"index": 0, "text": "", "finish_reason": of.ends}]})
            event(_end(of, words, cached, count, ms), last=not ends_so)
            if ends_so:
                send(b"data: [DONE]\n\n", last=True)
            self._close()

        def _close(self) -> None:
            self.wfile.write(b"0\r\n\r\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # of handshakes that were refused
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# What a server with bad intentions writes.


def head(status: int = 200, kind: str = "application/json", **more: str) -> bytes:
    lines = [f"HTTP/1.1 {status} x", f"Content-Type: {kind}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def without_end(begin: bytes, again: bytes) -> Callable[[Write], None]:
    def write(send: Write) -> None:
        send(begin)
        while True:
            send(again)

    return write


def slowly(content: bytes, after: int, each_s: float = 0.1) -> Callable[[Write], None]:
    """A byte at a time, from one place on."""

    def write(send: Write) -> None:
        send(content[:after])
        for place in range(after, len(content)):
            time.sleep(each_s)
            send(content[place : place + 1])

    return write


def zeros_packed(size: int) -> Callable[[Write], None]:
    """So many zero bytes, packed as gzip, unasked."""
    return lambda send: send(head(Content_Encoding="gzip") + gzip.compress(bytes(size)))


# What each event has besides.
OF_OPENAI = {
    "id": "cmpl-9e8e8f40ebe5a1e5",
    "object": "text_completion",
    "created": 1795692577,
    "model": MODEL,
}
OF_OLLAMA = {"model": MODEL, "created_at": "2026-10-29T19:22:45.499127Z"}


def _piece(of: Behaviour, ids: list[int], path: str) -> dict[str, Any]:
    text = "".join(f" w{each}" for each in ids)
    if of.api == "llama-server":
        return {"index": 0, "content": text, "tokens": ids, "stop": False, "id_slot": -1}
    if of.api == "ollama":
        return {**OF_OLLAMA, "response": text, "done": False}
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
    if of.in_parts:
        choice |= {"delta": {"content": [{"type": "text", "text": text}]}}
    elif path.endswith("chat/completions"):
        choice |= {"delta": {"reasoning_content": text}}
    else:
        choice |= {"text": text}
    if of.api == "vllm":
        choice |= {"stop_reason": None, "prompt_token_ids": None, "token_ids": ids}
    return {**OF_OPENAI, "choices": [choice]}


def _reused(of: Behaviour, items: list[int | str], body: dict[str, Any]) -> int:
    """Tokens of a prefix; the last one of a prompt is always evaluated."""
    if not of.reuses or not body.get("cache_prompt", True):
        return 0
    pairs = zip(items[:-1], of.held, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(items) - 1, len(of.held)))


def _end(of: Behaviour, prompt: int, cached: int, count: int, ms: float) -> dict[str, Any]:
    if of.api == "llama-server":
        timings = {"prompt_n": prompt - cached, "cache_n": cached, "prompt_ms": 1.0, "predicted_ms": ms}
        accepted = of.drafted if of.accepted is None else of.accepted
        timings |= {"draft_n": of.drafted, "draft_n_accepted": accepted} if of.drafted else {}
        ended = {"stop": True, "tokens": [], "tokens_predicted": count, "timings": timings}
        return ended | ({"stop_type": of.ends} if of.ends else {})
    if of.api == "ollama":
        counted = {"prompt_eval_count": prompt, "prompt_eval_duration": 10**6} if of.counts_prompt else {}
        took = {"total_duration": int(ms * 1e6), "eval_duration": int(ms * 1e6)}
        took["load_duration"] = int(of.load_ms * 1e6)
        ended = {"response": "", "done": True, "done_reason": of.ends or "length"}
        return {**OF_OLLAMA, **ended, **took, **counted, "eval_count": count}
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "total_tokens": prompt + count,
    }
    usage |= {"prompt_tokens_details": {"cached_tokens": cached}} if of.says_cached else {}
    usage = usage | of.claims if of.usage is None else of.usage
    return {**OF_OPENAI, "choices": [], "usage": usage}
