"""What to ask each kind of server for greedy tokens, and how to read its answer.

Sources: llama.cpp's tools/server/README.md, Ollama's docs/api.md, vLLM's OpenAI-compatible server.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from runners.answers import COUNT, WrongAnswer, part

Json = dict[str, Any]
Prompt = list[int] | str


END_OF_TEXT, LIMIT = "stop", "length"
ENDS = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn"), END_OF_TEXT),
    **dict.fromkeys(("length", "limit", "max_tokens"), LIMIT),
}
"""Why an answer ended, by the words of the APIs: the model chose to, or it reached a number of tokens."""


@dataclass
class Counts:
    """A server's own counts of one request; None: not reported. `cached`: tokens of the prompt that were not
    evaluated. `decode_ms`: from the first token to the last. `load_ms`: until the model was ready."""

    prompt: int | None = None
    cached: int | None = None
    generated: int | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    load_ms: float | None = None


@dataclass
class Piece:
    """One event of a stream. `ids`: of its tokens, or of its text where the server sends none. `counts`: with
    the last event. `ended`: why the answer ended, END_OF_TEXT, LIMIT or the server's own word."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    counts: Counts | None = None
    ended: str | None = None


@dataclass(frozen=True)
class Api:
    """`takes_ids`: a prompt may be token ids. `sends_ids`: a piece has those of its tokens. `keeps_prefix`:
    it cannot be told to evaluate the whole prompt. `generated`: its metric of all tokens generated so far.
    `reuse`: what its body has besides where a prefix may be reused."""

    name: str
    path: str
    body: Callable[[str, Prompt, int], Json]
    read: Callable[[Json], Piece]
    takes_ids: bool
    sends_ids: bool
    keeps_prefix: bool
    generated: str | None = None
    reuse: Json = field(default_factory=dict)


def text_id(text: str) -> int:
    """Stands for the id of a token that came as text: the same text has the same number."""
    return zlib.crc32(text.encode(errors="surrogatepass"))


def _llama_body(model: str, prompt: Prompt, tokens: int) -> Json:
    return {
        "model": model,  # a router passes the request on by it, other servers ignore it
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "return_tokens": True,
    }


def _llama_piece(event: Json) -> Piece:
    piece = Piece(_ids(event, "tokens"), part(event, "content", str) or "")
    if event.get("stop"):
        timings = part(event, "timings", dict) or {}
        piece.ended = _end(event.get("stop_type"))
        piece.counts = Counts(
            _added(_count(timings.get("prompt_n")), _count(timings.get("cache_n"))),
            _count(timings.get("cache_n")),
            _count(event.get("tokens_predicted")),
            part(timings, "prompt_ms", float),
            part(timings, "predicted_ms", float),
            part(timings, "draft_n", int),
            part(timings, "draft_n_accepted", int),
        )
    return piece


def _ollama_body(model: str, prompt: Prompt, tokens: int, num_ctx: int | None = None) -> Json:
    """`shift`: past its context a server that knows the word ends the answer, and does not discard tokens."""
    options = {"num_predict": tokens, "temperature": 0} | ({"num_ctx": num_ctx} if num_ctx else {})
    return {"model": model, "prompt": prompt, "raw": True, "stream": True, "shift": False, "options": options}


def with_context(api: Api, num_ctx: int) -> Api:
    """Ollama's API with a context of so many tokens, in all requests: another length would load the model
    again."""
    return replace(api, body=partial(_ollama_body, num_ctx=num_ctx))


def _ollama_piece(event: Json) -> Piece:
    text = (part(event, "response", str) or "") + (part(event, "thinking", str) or "")
    piece = Piece([text_id(text)] if text or not event.get("done") else [], text)
    if event.get("done"):
        piece.ended = _end(event.get("done_reason"))
        piece.counts = Counts(
            _count(event.get("prompt_eval_count")),
            None,
            _count(event.get("eval_count")),
            _ms(part(event, "prompt_eval_duration", float)),
            _ms(part(event, "eval_duration", float)),
            load_ms=_ms(part(event, "load_duration", float)),
        )
    return piece


def _openai_body(model: str, prompt: Prompt, tokens: int) -> Json:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _chat_body(model: str, prompt: Prompt, tokens: int) -> Json:
    body = _openai_body(model, prompt, tokens)
    return {**body, "messages": [{"role": "user", "content": body.pop("prompt")}]}


def _vllm_body(model: str, prompt: Prompt, tokens: int) -> Json:
    return {**_openai_body(model, prompt, tokens), "ignore_eos": True, "return_token_ids": True}


def _openai_piece(event: Json) -> Piece:
    piece = Piece()
    for choice in part(event, "choices", list) or []:
        if not isinstance(choice, dict):
            raise WrongAnswer("`choices` has something other than objects")
        delta = part(choice, "delta", dict) or {}
        thought = _text(delta.get("reasoning_content") or delta.get("reasoning"))
        text = _text(choice.get("text")) + thought + _text(delta.get("content"))
        if ids := _ids(choice, "token_ids"):
            piece.ids += ids
        elif text:
            piece.ids.append(text_id(text))
        piece.text += text
        piece.ended = _end(choice.get("finish_reason")) or piece.ended
    if isinstance(usage := event.get("usage"), dict) and usage:
        timings = part(event, "timings", dict) or {}  # llama-server adds them
        piece.counts = Counts(
            _count(usage.get("prompt_tokens")),
            _count((part(usage, "prompt_tokens_details", dict) or {}).get("cached_tokens")),
            _count(usage.get("completion_tokens")),
            part(timings, "prompt_ms", float),
            part(timings, "predicted_ms", float),
        )
    return piece


def _text(content: Any) -> str:
    """The text of a message's content, which may be a part or a list of them. Raises WrongAnswer."""
    if isinstance(content, list):
        return "".join(_text(part) for part in content)
    if isinstance(content, dict):
        return _text(content.get("text") or content.get("thinking"))
    if isinstance(content, str | None):
        return content or ""
    raise WrongAnswer("content is neither a text nor a list of parts")


def _ids(event: Json, name: str) -> list[int]:
    """Ids of tokens. Raises WrongAnswer."""
    found: list[int] = part(event, name, list) or []
    if not all(type(each) is int and 0 <= each < COUNT for each in found):
        raise WrongAnswer(f"`{name}` has something other than whole numbers from 0")
    return found


def _count(value: Any) -> int | None:
    """A number of tokens; None for what is not a whole number of them."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and 0 <= value < COUNT and value == value // 1 else None


def _end(reason: Any) -> str | None:
    return ENDS.get(reason, reason) if isinstance(reason, str) and reason != "none" else None


def _added(a: int | None, b: int | None) -> int | None:
    return None if a is None else a + (b or 0)


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


_OPENAI = Api(
    name="openai",
    path="/v1/completions",
    body=_openai_body,
    read=_openai_piece,
    takes_ids=False,
    sends_ids=False,
    keeps_prefix=True,
)
CHAT = replace(_OPENAI, path="/v1/chat/completions", body=_chat_body)
APIS = {
    "openai": _OPENAI,
    "llama-server": Api(
        name="llama-server",
        path="/completion",
        body=_llama_body,
        read=_llama_piece,
        takes_ids=True,
        sends_ids=True,
        keeps_prefix=False,
        generated="llamacpp:tokens_predicted_total",
        reuse={"cache_prompt": True},
    ),
    "vllm": replace(
        _OPENAI,
        name="vllm",
        body=_vllm_body,
        takes_ids=True,
        sends_ids=True,
        generated="vllm:generation_tokens_total",
    ),
    "ollama": replace(_OPENAI, name="ollama", path="/api/generate", body=_ollama_body, read=_ollama_piece),
}


# What a request can do without, by the words with which servers refuse it.
_OPTIONAL = {
    "stream_options": ("streamoptions", "includeusage"),
    "ignore_eos": ("ignoreeos",),
    "return_token_ids": ("returntokenids",),
    "temperature": ("temperature",),
}
_UNKNOWN = re.compile(r"unsupported|not (supported|permitted|allowed)|deprecated|un(known|expected|recog)")
_TOO_MANY = re.compile(r"too (large|long|many|big)|exceed|maximum|at most")  # the value, and not the field


def other_form(body: Json, answer: str) -> tuple[str, str | None] | None:
    """The field of a request that a refusal names, and the one that it asks for in its place; (field, None):
    the request can do without it. None: the refusal names no such field. `answer`: its content."""
    try:
        text = " ".join(_words(json.loads(answer))).lower()
    except (ValueError, RecursionError):
        text = answer.lower()
    named = re.sub(r"[^a-z0-9]", "", text)
    for name, words in _OPTIONAL.items():
        if name in body and any(word in named for word in words):
            return name, None
    if "max_tokens" in body and "maxtokens" in named and not _TOO_MANY.search(text):
        others = [name for name in re.findall(r"max_[a-z_]*tokens", text) if name != "max_tokens"]
        if others or _UNKNOWN.search(text):
            return "max_tokens", [*others, "max_completion_tokens"][0]
    return None


def _words(answer: Any) -> Iterator[str]:
    """The texts of a refusal, without the part of the request that it repeats (pydantic's `input`)."""
    if isinstance(answer, dict):
        answer = [value for name, value in answer.items() if name != "input"]
    if isinstance(answer, list):
        for each in answer:
            yield from _words(each)
    elif isinstance(answer, str):
        yield answer


def metric(text: str, name: str) -> float | None:
    """The sum of a metric over its labels, in Prometheus's text format; None: there is none."""
    number = r"\d{1,20}(?:\.\d*)?(?:[eE][+-]?\d{1,2})?"
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^\n]*\}})? ({number})(?: \d+)?$", text, re.MULTILINE)
    return total if found and (total := sum(map(float, found))) < COUNT else None
