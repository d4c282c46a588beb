"""A session of a server: tokens as its client gets them, and what the server says of them."""

from __future__ import annotations

import platform
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from runners.protocol import Answer
from runners.served.apis import CHAT, Json, Prompt, metric
from runners.served.client import Client, ServerError, Stream, api_of

clock = time.perf_counter_ns
TEXT = (
    "The harbour was quiet in the morning. Boats lay side by side, and men carried boxes over the wet stones "
    "while gulls waited on the roofs. A woman sold bread from a cart and talked with everyone who came by. "
)
TRIES = 12  # requests to find a text of as many tokens as asked for


class ServedSession:
    """One model of a server; see runners.protocol.Session. It generates, for one user or several."""

    chunk = 1
    elsewhere = True  # the server is another process

    def __init__(self, client: Client, options: Json, prompt_is_here: bool) -> None:
        """`prompt_is_here`: the ids of the request are of the served model's own vocabulary. Raises
        ServerError."""
        self._client, self._options = client, options
        self._api = api_of(client, options["api"])
        self._props = client.found("/props") or {} if self._api.name == "llama-server" else {}
        self._model = _model_of(client.models(), options.get("model"))
        self._speculation = self._speculates()
        self._prompt_is_here = prompt_is_here and self._api.takes_ids
        self._texts: dict[int, str] = {}
        self._stream: Stream | None = None
        self._generated_before: float | None = None
        self._ended_ns = self._began_ns = 0
        self._batches: Counter[str] = Counter()

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """What is asked besides the tokens is asked before, outside TTFT."""
        text = self._prompt(prompt)
        self._generated_before = self._client.total_generated(self._api)
        return self._generate(text, new_tokens)

    def _generate(self, prompt: Prompt, new_tokens: int) -> Iterator[int]:
        self._stream = stream = self._client.stream(self._api, self._model, prompt, new_tokens)
        self._began_ns = clock()  # the head of an answer may come with its first token
        pieces = iter(stream)
        try:
            for ids in pieces:
                yield from ids
            self._ended_ns = clock()
            # Tokens without a piece of their own, by the server's count: half a letter waits for the rest.
            for _ in range((stream.counts.generated or 0) - stream.tokens):
                yield 0
        finally:
            for _ in pieces:  # an answer that was not read to its end would cost the connection
                pass

    def serve_batch(self, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
        """See runners.protocol.Session. A thread and a connection for each user; a text prompt begins with
        digits of its own."""
        texts = [self._prompt(prompt, several=True) for prompt in prompts]
        before = self._client.total_generated(self._api)
        began: list[int] = []
        ready = threading.Barrier(len(prompts), lambda: began.append(clock()))

        def answer(text: Prompt) -> tuple[Answer, Stream]:
            ready.wait()
            stream = self._client.stream(self._api, self._model, text, new_tokens)
            head, t_ns, ids = clock(), [], []
            for piece in stream:
                t_ns += [clock() - began[0]] * len(piece)
                ids += piece
            ended, count = clock(), stream.counts.generated
            if count is not None:  # pieces without ids may have had several tokens
                count = min(count, new_tokens + 1)
                t_ns = (t_ns + [ended - began[0]] * count)[:count]
            if stream.pieces <= 1 < len(t_ns):
                raise ServerError(f"the server sent all {len(t_ns)} tokens at once: it does not stream")
            same = self._prompt_is_here and self._api.sends_ids and not self._api.keeps_prefix
            return Answer(t_ns, ids if same else None, max(0, ended - head - stream.waited_ns)), stream

        with ThreadPoolExecutor(len(prompts)) as pool:
            answers, streams = zip(*pool.map(answer, texts), strict=True)
        total, counted = self._client.total_generated(self._api), self._batches
        own = sum(len(each.t_ns) for each in answers)
        counted["batch_tokens"] += own
        if total is not None and before is not None:
            counted["others_tokens"] += max(0, round(total - before) - own)
        for stream in streams:
            counted["pieces"] += stream.pieces
            counted["largest_piece"] = max(counted["largest_piece"], stream.most)
            for name in ("cached", "drafted", "accepted"):
                counted[f"{name}_tokens"] += getattr(stream.counts, name) or 0
        return list(answers)

    def batch_counters(self) -> dict[str, int]:
        """See runners.protocol.Session."""
        return dict(self._batches)

    def _prompt(self, ids: list[int], several: bool = False) -> Prompt:
        """A prompt of as many tokens as the ids are, by the server's own count where it is a text. Where a
        server keeps prefixes, or where it is one of several, it does not begin as the one before."""
        if self._prompt_is_here:
            return random.sample(ids, len(ids)) if self._api.keeps_prefix else ids
        front = _front() if self._api.keeps_prefix or several else ""
        if self._api.takes_ids:
            found = self._tokenized(front + TEXT * (1 + len(ids) // 20))[: len(ids)]
            return found or random.sample(ids, len(ids))  # small ones, which any vocabulary has
        if len(ids) not in self._texts:
            self._texts[len(ids)] = self._fitting(len(ids))
        return front + self._texts[len(ids)]

    def _tokenized(self, text: str) -> list[int]:
        """Empty for a server that runs without a tokenizer."""
        body = {"content": text} | {"prompt": text, "model": self._model, "add_special_tokens": False}
        return [int(each) for each in (self._client.found("/tokenize", body) or {}).get("tokens") or []]

    def _fitting(self, wanted: int) -> str:
        """A text that is a prompt of `wanted` tokens, or of the nearest number that was found."""
        words = (TEXT * (1 + wanted // 20)).split()
        count, best = max(1, wanted // 2), (wanted, "")
        for _ in range(TRIES):
            text = " ".join(words[:count])
            stream = self._client.stream(self._api, self._model, _front() + text, 1)
            for _ in stream:
                pass
            if (got := stream.counts.prompt) is None:
                return text  # it does not count: see the record's prompt tokens
            best = min(best, (abs(got - wanted), text))
            if got == wanted:
                break
            count = max(1, count + (wanted - got if abs(wanted - got) < 3 else (wanted - got) * 3 // 4))
        return best[1]

    def counters(self) -> dict[str, Any]:
        """The server's counts and clock of the last request, and the client's own part in it. `waited_ms` of
        `elapsed_ms` it waited for the server."""
        stream = self._stream
        assert stream is not None  # after a generation
        counts, total = stream.counts, self._client.total_generated(self._api)
        evaluated = (
            None
            if counts.prompt is None or counts.generated is None
            else counts.prompt - (counts.cached or 0) + counts.generated - 1
        )
        others = None
        if total is not None and self._generated_before is not None:
            others = round(total - self._generated_before) - (counts.generated or stream.tokens)
        found = {
            "evaluated_tokens": evaluated,
            "stack_prefill_ms": counts.prefill_ms,
            "stack_decode_ms": counts.decode_ms,
            "prompt_tokens": counts.prompt,
            "cached_tokens": counts.cached,
            "pieces": stream.pieces,
            "awaited_pieces": stream.awaited,
            "piece_tokens": stream.tokens,
            "largest_piece": stream.most,
            "first_burst_tokens": stream.first,
            "drafted_tokens": counts.drafted,
            "accepted_tokens": counts.accepted,
            "others_tokens": others,
            "waited_ms": stream.waited_ns / 1e6,
            "elapsed_ms": (self._ended_ns - self._began_ns) / 1e6,
        }
        return {name: value for name, value in found.items() if value is not None}

    def facts(self) -> dict[str, Any]:
        options = self._options
        about, guesses = self._about(), self._speculation != "none"
        return {
            "versions": {
                "httpx": httpx.__version__,
                "python": platform.python_version(),
                self._api.name: self._version(),
            },
            "options": {
                **options,
                "api": options["api"] if options["api"] == "auto" else self._api.name,
                "model": self._model,
                "speculation": guesses if guesses or self._api.name == "llama-server" else None,
            },
            "served": {
                "api": self._api.name,
                "path": self._api.path,
                "model": self._model,
                "sends_ids": self._api.sends_ids,
                "template": self._api is CHAT,
                "elsewhere": self.elsewhere,
                "slots": self._props.get("total_slots"),
                "speculation": self._speculation,
            },
            **about,
        }

    def _speculates(self) -> str:
        """What guesses tokens ahead, by llama-server's own name. Its /props has what a request may ask for,
        and only an answer has what it got. vLLM counts drafts if it was started with speculation."""
        if self._api.name == "vllm":
            counted = metric(self._client.ask("/metrics").text, "vllm:spec_decode_num_drafts_total")
            return "none" if counted is None else "spec_decode"
        if self._api.name != "llama-server":
            return "none"
        body = {**self._api.body(self._model, [1], 1), "stream": False}
        settings = (self._client.found(self._api.path, body) or {}).get("generation_settings") or {}
        return str(settings.get("speculative.types") or "none")

    def _about(self) -> dict[str, Any]:
        """Of the model, as llama-server lists it."""
        if self._api.name != "llama-server":
            return {}
        listed = (self._client.found("/v1/models") or {}).get("data") or [{}]
        meta = listed[0].get("meta") or {}
        holds = (self._props.get("default_generation_settings") or {}).get("n_ctx")
        # llama.cpp's names of mixes end in their size: Q4_K - Medium.
        quant = re.sub(
            r" - (small|medium|large)$",
            lambda size: f"_{size[1][0]}",
            str(self._props.get("model_ftype") or "").lower(),
        )
        known = {
            "model_bytes": meta.get("size"),
            "parameters": meta.get("n_params"),
            "vocab_size": meta.get("n_vocab"),
            "trained_context": meta.get("n_ctx_train"),
            "holds_tokens": holds,
            "quant": None if " " in quant else quant,
            "kv_read": "padded256",
        }
        return {name: value for name, value in known.items() if value}

    def _version(self) -> str:
        if self._api.name == "llama-server":
            return str(self._props.get("build_info") or "unknown")
        path = {"ollama": "/api/version", "vllm": "/version"}.get(self._api.name)
        return str((self._client.found(path) or {}).get("version", "unknown")) if path else "unknown"

    def close(self) -> None:
        self._client.close()


def _front() -> str:
    """Digits, of a token each, that keep a prompt from sharing its first tokens with the one before."""
    return " ".join(f"{time.time_ns() // 1000 % 10**6:06}") + " "


def _model_of(served: list[str], requested: str | None) -> str:
    """The model to ask for. Raises ServerError where it is not clear, or not there."""
    names = ", ".join(served[:8]) or "none"
    if requested:
        if served and not {requested, f"{requested}:latest"} & {*served}:  # Ollama's names
            raise ServerError(f"model {requested}: the server has {names}")
        return requested
    if len(served) != 1:
        raise ServerError(f"the server has {len(served)} models ({names}): give one as `model`")
    return served[0]
