"""What a server serves, asked before anything is measured."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import urlsplit

from harness.theory import base_shapes
from runners.protocol import NO_MODEL, refusal, unreachable, without_key

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
    """What the server at an address has, which text.server_address gave. Raises NotServed."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise NotServed("HARNESS_API_KEY has characters that no key has: set it again")
    listed = _got(address + "/v1/models", key)
    rows = listed.get("data")
    roots = {
        str(each["id"]): each.get("root")
        for each in (rows if isinstance(rows, list) else [])
        if isinstance(each, dict) and each.get("id")
    }
    if not roots:
        raise NotServed(f"{address}: {NO_MODEL}")
    if len(roots) == 1:
        with contextlib.suppress(NotServed):  # it is no llama-server
            roots = dict.fromkeys(roots, _got(address + "/props", key).get("model_path"))
    is_local = urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")
    return Serving({name: _here(path) if is_local else None for name, path in roots.items()})


def name_of(model: str) -> str:
    """A model's name without its folder and the end of a GGUF, where the server names it by its path, as
    `python -m llama_cpp.server` does."""
    path = PureWindowsPath(model) if re.match(r"[A-Za-z]:[\\/]", model) else PurePosixPath(model)
    is_file = path.suffix.lower() == ".gguf" and len(path.parts) > 1
    return path.stem if is_file else path.name if path.is_absolute() else model


def _here(path: object) -> Path | None:
    found = Path(path) if isinstance(path, str) else Path()
    with contextlib.suppress(OSError, ValueError):  # of a name that no file can have
        return found if found.is_absolute() and found.exists() else None
    return None


def _got(address: str, key: str | None) -> Mapping[str, Any]:
    """A JSON object at an address, without proxies and redirects: a key would go to another server."""
    parts = urlsplit(address)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            connection.request("GET", parts.path, headers=headers)
            answer = connection.getresponse()
            content = answer.read(MOST_BYTES)
    except (OSError, ValueError, HTTPException) as failure:
        raise NotServed(f"{address}: {unreachable(failure, key)}") from None
    why = refusal(answer.status, answer.getheader("Content-Type", ""), answer.getheader("Location"))
    if why:
        raise NotServed(without_key(f"{address}: {why}", key))
    try:
        found = without_key(json.loads(content), key)
    except (ValueError, RecursionError):
        raise NotServed(f"{address}: answers with no JSON: check the address and its port") from None
    return found if isinstance(found, dict) else {}


def key() -> str | None:
    return os.environ.get("HARNESS_API_KEY", "").strip() or None
