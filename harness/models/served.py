"""What a server serves, asked before anything is measured."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.theory import base_shapes

ANSWER_S = 20.0
MOST_BYTES = 1 << 20


class NotServed(ValueError):
    """Nothing can be measured at this address; the message is one sentence with the next step."""


@dataclass(frozen=True)
class Serving:
    """`files`: where the weights of each model are, by the server's names; null: not on this machine, or not
    said. llama-server and vLLM say it."""

    files: Mapping[str, Path | None]

    @property
    def models(self) -> Sequence[str]:
        return [*self.files]


def is_address(text: str) -> bool:
    """Whether it is the address of a server, and none of a model on a site."""
    return base_shapes.without_site(text).startswith(("http://", "https://"))


def serving(address: str, key: str | None) -> Serving:
    """What the server at an address has. Raises NotServed."""
    parts = urlsplit(address)
    if parts.username or parts.password:
        raise NotServed(
            "an address with a password would be kept with the results: give the key in OPENAI_API_KEY"
        )
    base = address.rstrip("/").removesuffix("/v1")
    listed = _asked(base + "/v1/models", key)
    roots = {
        str(each["id"]): each.get("root")
        for each in listed.get("data") or []
        if isinstance(each, dict) and each.get("id")
    }
    if not roots:
        raise NotServed(f"{base}: has no model loaded; load one, then run this again")
    if len(roots) == 1:
        with contextlib.suppress(NotServed):  # it is no llama-server
            roots = dict.fromkeys(roots, _asked(base + "/props", key).get("model_path"))
    is_local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    return Serving({name: _here(path) if is_local else None for name, path in roots.items()})


def _here(path: object) -> Path | None:
    found = Path(path) if isinstance(path, str) else Path()
    return found if found.is_absolute() and found.exists() else None


def _asked(address: str, key: str | None) -> Mapping[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # No proxies: a variable of the environment must not send the request elsewhere.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    try:
        with opener.open(urllib.request.Request(address, headers=headers), timeout=ANSWER_S) as answer:
            content = answer.read(MOST_BYTES)
    except urllib.error.HTTPError as refusal:
        raise NotServed(f"{address}: {_refusal(refusal)}") from refusal
    except (OSError, ValueError) as failure:
        why = getattr(failure, "reason", failure)
        said = getattr(why, "strerror", None) or why
        raise NotServed(
            f"{address}: cannot be reached ({said}): is the server running, and is the port right?"
        ) from failure
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as wrong:
        raise NotServed(
            f"{address}: answers with a web page or a text, not with JSON: check the port"
        ) from wrong
    return found if isinstance(found, dict) else {}


def _refusal(refusal: urllib.error.HTTPError) -> str:
    if refusal.code in (401, 403):
        return "the server refuses the API key; set OPENAI_API_KEY"
    if 300 <= refusal.code < 400:
        return f"redirects to {refusal.headers.get('location')}: give that address"
    return f"the server answers {refusal.code}, so it is no OpenAI-compatible one: check the address"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """None: a key would go to another server."""


def key(variable: str = "OPENAI_API_KEY") -> str | None:
    return os.environ.get(variable) or None
