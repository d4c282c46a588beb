"""GGUF files by the model that they hold: one model may be stored in several types."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from harness.models import gguf_model, locate, split_gguf
from harness.models.gguf import GgufHeader
from harness.theory.base_shapes import GGUF_TYPE
from harness.theory.ggml_quants import ALL_QUANTS

_TYPE = re.compile(rf"[-_. :]+{GGUF_TYPE}(?=$|[-_. ])", re.IGNORECASE)
DEPTH = 4  # of folders in a folder: the hub's cache has models--OWNER--NAME/snapshots/COMMIT
_SHAPE = (
    *("block_count", "embedding_length", "feed_forward_length", "expert_count"),
    *("attention.head_count", "attention.head_count_kv"),
)
_VOCABULARY = (
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    locate.VOCABULARY,
)  # an array is its length


@dataclass
class StoredModel:
    """A model, and its files by the type that their tensors have."""

    name: str
    files: dict[str, Path] = field(default_factory=dict)


def type_in(name: str) -> str | None:
    """The type in the name of a file, in lower case; None: it has none."""
    match = _TYPE.search(_stem(name))
    return match[1].lower() if match else None


def without_type(name: str) -> str:
    """The name of a file or a model up to its type."""
    stem = _stem(name)
    match = _TYPE.search(stem)
    return stem[: match.start()] if match else stem


def _stem(name: str) -> str:
    return re.sub(r"(-[0-9]{5}-of-[0-9]{5})?\.gguf$", "", name, flags=re.IGNORECASE)


def below(folder: Path, depth: int = DEPTH) -> list[Path]:
    """The GGUF models of a folder, and of those in it down to a depth: a split one once, and no projector,
    adapter or encoder. Raises OSError."""
    models: list[Path] = []
    for parent, folders, names in os.walk(folder):
        is_deepest = len(Path(parent).relative_to(folder).parts) >= depth
        folders[:] = [] if is_deepest else sorted(name for name in folders if not name.startswith("."))
        paths = [Path(parent, name) for name in names if name.lower().endswith(".gguf")]
        models += split_gguf.whole_file([path for path in paths if path.is_file()])
    return [path for path in models if not gguf_model.is_other_kind(path)]


def stored_models(paths: Iterable[Path]) -> list[StoredModel]:
    """The models of these files, each part of a split one counting as all of it. Files with the same shape,
    vocabulary and name are one model; a second file of one type is a model of its own, as is a file of a type
    that cannot be requested.

    Raises WeightsError.
    """
    models: dict[object, StoredModel] = {}
    seen: set[Path] = set()
    for path in paths:
        ready = locate.local(path)
        if ready.path in seen or ready.header is None:
            continue
        seen.add(ready.path)
        name, quant = without_type(ready.path.name), ready.quant or "unknown"
        identity = _identity(ready.header, name) if quant in ALL_QUANTS else ready.path
        model = models.get(identity)
        if model and quant in model.files:
            identity, name, model = ready.path, _stem(ready.path.name), None
        if model is None:
            model = models[identity] = StoredModel(name)
        model.name = min(model.name, name, key=len)
        model.files[quant] = ready.path.absolute()
    return list(models.values())


def _identity(header: GgufHeader, name: str) -> object:
    named = without_type(str(header.metadata.get("general.name") or name)).lower()
    keys = (*(f"{header.architecture}.{key}" for key in _SHAPE), *_VOCABULARY)
    rows = gguf_model.dims_of(header, "token_embd.weight")[:1]
    return header.architecture, named, rows, *map(header.metadata.get, keys)
