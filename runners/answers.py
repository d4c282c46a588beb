"""What a server may answer, to the controller and to the worker: its bounds, its form, the key that it must
not send back, and the words for what is no answer. Standard library only, Python 3.10.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Bounds, each with its reason.

ANSWER_BYTES = 8 << 20  # of one that is no stream: the ids of a million tokens (/tokenize)
EVENT_BYTES = 1 << 20  # of one event of a stream; those of a token have a few hundred
STREAM_BYTES = 16 << 20  # of a stream, besides its tokens: llama-server's last event has the prompt
TOKEN_BYTES = 16 << 10  # more for each token: some forty events with all of their fields
MORE_TOKENS = 64  # than requested, until a stream is cut: after a few the connection can be used again
ANSWER_S = 20.0  # until an answer about the server is here as a whole
ASK_S = 60.0  # the same in the worker: the server may load its model first
LOAD_S = 600.0  # the same where llama-server's router loads a model
SILENT_S = 1200.0  # between two pieces of a stream; a long prompt on a slow machine takes minutes
TOKEN_S = 60.0  # more for each token of a stream as a whole: weights that are read from a slow disk
DEPTH = 64  # of JSON: llama-server's /props nests 5 deep
ROWS = 10_000  # models of a server; OpenRouter has hundreds
NAME_CHARACTERS = 4096  # of a name, a version or a path: Linux has no longer path
COUNT = 1 << 53  # of bytes, parameters or tokens: beyond, JSON's numbers are not exact
MOST_SHOWN = 200  # characters of what a server sent
SHORTEST_KEY = 8  # shorter ones are words that local servers take, such as ollama


def stream_s(tokens: int) -> float:
    """Seconds that a stream of so many tokens may take as a whole."""
    return SILENT_S + TOKEN_S * tokens


def stream_bytes(tokens: int) -> int:
    return STREAM_BYTES + TOKEN_BYTES * tokens


def too_large(most: int) -> str:
    return f"sends more than {most} bytes in one answer, which is not read"


def too_slow(seconds: float) -> str:
    return f"sent no whole answer within {seconds:g} s"


def encoded(kind: str, key: str | None) -> str | None:
    """Why an answer with this Content-Encoding is not read; None: it is."""
    plain = kind.strip().lower() in ("", "identity")
    return None if plain else f"compresses its answer ({shown(kind, key)}), although it was asked not to"


# Its form. What the harness reads of each page, by its place; `*`: each of a list. Parents come first.

_Form = dict[str, type[Any]]
_MODELS: _Form = {"data": list, "data/*": dict, "data/*/id": str, "data/*/owned_by": str, "data/*/root": str}
_MODELS |= {"data/*/max_model_len": int, "data/*/meta": dict}
_MODELS |= {f"data/*/meta/{name}": int for name in ("size", "n_params", "n_vocab", "n_ctx_train")}
_VERSION: _Form = {"version": str}
FORMS: dict[str, _Form] = {
    "/v1/models": _MODELS,
    "/props": {
        **dict.fromkeys(("role", "model_path", "model_ftype"), str),
        "total_slots": int,
        "default_generation_settings": dict,
        "default_generation_settings/n_ctx": int,
    },
    "/version": _VERSION,
    "/api/version": _VERSION,
    "/api/ps": {
        "models": list,
        "models/*": dict,
        "models/*/name": str,
        **{f"models/*/{name}": int for name in ("context_length", "size", "size_vram")},
    },
    "/api/show": {
        "details": dict,
        **dict.fromkeys(("details/quantization_level", "details/parameter_size"), str),
        "model_info": dict,
        "model_info/general.architecture": str,
        "model_info/general.parameter_count": int,
    },
    "/api/tags": {"models": list, "models/*": dict, "models/*/name": str, "models/*/size": int},
    "/api/v0/models": {
        "data": list,
        "data/*": dict,
        **dict.fromkeys(("data/*/id", "data/*/quantization", "data/*/state"), str),
    },
    "/tokenize": {"tokens": list, "tokens/*": int},
    "/completion": {"generation_settings": dict, "generation_settings/speculative.types": str},
}
_WORDS: dict[type[Any], str] = {
    list: "a list",
    dict: "an object",
    str: "a text",
    bool: "true or false",
    float: "a number",
}
_WORDS[int] = "a whole number from 0"


class WrongAnswer(ValueError):
    """The answer has another form; the message is one sentence, without the address."""


def json_object(content: bytes, page: str, key: str | None) -> dict[str, Any]:
    """The object of a page, checked, without the API key. Raises WrongAnswer."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise WrongAnswer("answers with no JSON: check the address and its port") from None
    if not isinstance(found, dict):
        raise WrongAnswer(f"{page} is {_words_of(found)}, not an object")
    level: list[Any] = [found]
    for _ in range(DEPTH):
        inner = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in inner if isinstance(value, dict | list)]
    if level:
        raise WrongAnswer(f"{page} is nested more than {DEPTH} deep")
    page = page.partition("?")[0]
    for place, kind in FORMS.get(page, {}).items():
        for value in _at(found, place.split("/")):
            if wrong := _mistake(value, kind) or _length(value):
                raise WrongAnswer(f"{page}: `{place}` {wrong}")
    checked: dict[str, Any] = without_key(found, key)
    return checked


def part(content: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """A field of an event; None: it is not there. Raises WrongAnswer."""
    if (value := content.get(name)) is not None and (wrong := _mistake(value, kind)):
        raise WrongAnswer(f"`{name}` {wrong}")
    return value


def _at(content: Any, place: list[str]) -> Iterator[Any]:
    """What is there, but for None."""
    if not place:
        if content is not None:
            yield content
    elif place[0] == "*":
        for each in content or []:
            yield from _at(each, place[1:])
    elif content:
        yield from _at(content.get(place[0]), place[1:])


def _mistake(value: Any, kind: type[Any]) -> str | None:
    is_kind = isinstance(value, (int, float) if kind is float else kind)
    if not is_kind or (isinstance(value, bool) and kind is not bool):
        return f"is {_words_of(value)}, not {_WORDS[kind]}"
    if kind in (int, float) and not 0 <= value < COUNT:  # not-a-number neither
        return f"is not between 0 and 2^{COUNT.bit_length() - 1}"
    return None


def _length(value: Any) -> str | None:
    if isinstance(value, list) and len(value) > ROWS and isinstance(value[0], dict):
        return f"has {len(value)} rows; at most {ROWS} are read"
    if isinstance(value, str) and len(value) > NAME_CHARACTERS:
        return f"has {len(value)} characters; at most {NAME_CHARACTERS} are read"
    return None


def _words_of(value: Any) -> str:
    return "null" if value is None else "a number" if type(value) is int else _WORDS[type(value)]


# The API key.


def api_key(variable: str) -> str | None:
    """The key in a variable of the environment; None: it is not set, or empty, as a secret that CI does not
    have. Raises ValueError for what is no key, such as one that JSON and Python would write in two ways; its
    sentence names the variable, and never the value."""
    if not (key := os.environ.get(variable, "").strip()):
        return None
    if not re.fullmatch(r"[!#-&(-\[\]-~]+", key):
        raise ValueError(
            f"{variable} has characters that no key has, such as a space, a quote or the end of a line: "
            "set it again"
        )
    return key


def without_key(value: Any, key: str | None) -> Any:
    """A value of JSON that a server sent, with *** in place of the API key."""
    if key is None or len(key) < SHORTEST_KEY:
        return value
    text, shown = json.dumps(value), json.dumps(key)[1:-1]
    return json.loads(text.replace(shown, "***")) if shown in text else value


def shown(sent: str, key: str | None) -> str:
    """What a server sent, cut after the key is out of it: of a key that is cut most could be read."""
    return str(without_key(sent, key))[:MOST_SHOWN]


# What a server answers in place of a measurement.


NO_MODEL = "has no model loaded: load one, then run this again"


def unreachable(failure: BaseException, key: str | None) -> str:
    """Why a server gave no answer, as the end of a sentence that begins with its address."""
    chain, reason = [failure], ""
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    for each in chain:  # by attribute: importing ssl takes as long as all of this module
        if refused := str(getattr(each, "verify_message", "")):
            return f"its certificate is not trusted ({refused.rstrip('.')}): set SSL_CERT_FILE to one that is"
        if getattr(each, "reason", "") in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return "speaks no TLS: write http:// in place of https://"
        reason = getattr(each, "strerror", None) or reason
    text = shown(" ".join(str(failure).split()), key)
    if "handshake operation timed out" in text:
        return "does not answer in TLS: it may speak http: write http:// in place of https://"
    reason = reason or text or type(failure).__name__
    return f"cannot be reached ({reason}): is the server running, and is the port right?"


def refusal(status: int, kind: str, location: str | None, key: str | None) -> str | None:
    """Why an answer is none of an API's, likewise; None: it is one. `kind`: its Content-Type."""
    if 300 <= status < 400:
        return f"redirects to {shown(str(location), key)}: give that address"
    if status in (401, 403):
        return "the server refuses the API key: set HARNESS_API_KEY, or the variable that `key` names"
    if status == 503:
        return "the server answers 503: it may still be loading its model"
    if status >= 400:
        return f"the server answers {status}"
    return "answers with a web page, not with JSON: check the port" if "html" in kind else None
