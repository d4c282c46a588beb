"""Ollama's models: the API of its server, and its store, where a manifest names the blobs of a tag."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from harness.base import bounds
from harness.base.files import JsonFileError, object_of
from harness.base.text import server_address
from harness.models import served
from harness.models.model_folders import Stored, listed
from harness.models.served import NotServed

OLLAMA_PORT = 11434
OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")  # its Linux service is a user of its own
OLLAMA_MODEL = "application/vnd.ollama.image.model"
OLLAMA_REGISTRY = "registry.ollama.ai/library/"  # of names without a host and an owner


def ollama_address() -> str:
    """The address of the local Ollama, read from OLLAMA_HOST as its own client does. Raises ValueError."""
    scheme, has_scheme, rest = os.environ.get("OLLAMA_HOST", "").strip().rpartition("://")
    host, _, port = rest.partition("/")[0].rpartition(":") if re.search(r":\d*$", rest) else (rest, "", "")
    usual = {"http": 80, "https": 443}.get(scheme, OLLAMA_PORT) if has_scheme else OLLAMA_PORT
    host = "127.0.0.1" if host in ("", "0.0.0.0") else host
    return server_address(f"{scheme or 'http'}://{host}:{port or usual}")


def served_by_ollama() -> Iterator[Stored]:
    with contextlib.suppress(NotServed, ValueError):
        address = ollama_address()
        for name, kind in served.ollama_models(address).items():
            yield Stored(name, f"Ollama at {address}", address, type=kind and kind.lower())


def ollama_folders() -> list[Path]:
    configured = os.environ.get("OLLAMA_MODELS")
    return (
        [Path(configured).expanduser()]
        if configured
        else [Path.home() / ".ollama" / "models", OLLAMA_SERVICE]
    )


def files_of_ollama() -> Iterator[Stored]:
    for folder in ollama_folders():
        manifests = folder / "manifests"
        for path in listed(manifests, "*/*/*/*"):
            name = str(path.parent.relative_to(manifests)).removeprefix(OLLAMA_REGISTRY)
            name = f"{name.removeprefix('registry.ollama.ai/')}:{path.name}"
            with contextlib.suppress(OSError, JsonFileError):
                rows = object_of(path, bounds.CONFIG_JSON_BYTES).get("layers")
                layers = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
                digests = [str(row.get("digest")) for row in layers if row.get("mediaType") == OLLAMA_MODEL]
                blobs = [
                    folder / "blobs" / digest.replace(":", "-")
                    for digest in digests
                    if _DIGEST.fullmatch(digest)
                ]
                if len(blobs) == 1 and blobs[0].is_file():
                    yield Stored(name, f"Ollama's folder {folder}", files=(blobs[0],))


_DIGEST = re.compile(r"sha256:\w+")
