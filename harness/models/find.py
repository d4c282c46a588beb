"""Find the weights that a name stands for: of a local Ollama, in the hub's cache, in LM Studio's folders.

A name is the place's own (`smollm2:135m`, `owner/repo`, `repo`), another spelling of it (without owner or
`-GGUF`, with a type at its end), or that of a known model (`qwen3-8b`), which every place spells in its own
way. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.base.text import list_named
from harness.models import gguf_files, hub, locate, served
from harness.models.locate import WeightsError
from harness.models.model_folders import LM_STUDIO, Stored, of_hub_cache, of_lm_studio
from harness.models.ollama_models import files_of_ollama, ollama_address, ollama_folders, served_by_ollama
from harness.models.served import NotServed
from harness.theory import base_shapes
from harness.theory.known_models import known_name

NAMED, SPELLED, KNOWN = 3, 2, 1  # how a stored model has a name, the best first
_SPELLINGS = {"fp16": "f16", "fp32": "f32"}


class Several(ValueError):
    """A name fits several models; the message is the end of a sentence."""


@dataclass(frozen=True)
class _Wanted:
    """A name in lower case. `base`: without the type at its end. `known`: the known model that it is."""

    text: str
    base: str
    type: str | None
    known: str | None


def find(text: str, served: bool, checkpoint: bool = False) -> Stored | None:
    """The model of this name; None: none. `served`: Ollama's server goes before its files. `checkpoint`: a
    GGUF does not do. Raises Several."""
    name = base_shapes.without_site(text).lower()
    base, kind = gguf_files.without_type(name), gguf_files.type_in(name)
    requested = _Wanted(
        name, base, kind and _SPELLINGS.get(kind, kind), known_name(base) if "/" not in base else None
    )
    places = [served_by_ollama()] if served and not checkpoint else []
    places += [files_of_ollama(), of_hub_cache(), of_lm_studio()]
    ranked = [[(_rank(requested, model), model) for model in place] for place in places]
    # A place's own name goes before the order of the places.
    by_own_name = [(place, NAMED) for place in ranked]
    for place, rank in by_own_name + [(place, rank) for place in ranked for rank in (SPELLED, KNOWN)]:
        alike = (model for its_rank, model in place if its_rank == rank)
        if model := _one(
            [usable for candidate in alike if (usable := _usable(candidate, requested, checkpoint))]
        ):
            return model
    return None


def _one(models: Sequence[Stored]) -> Stored | None:
    """Of a GGUF and a checkpoint the GGUF; of two names of one file the shorter. Raises Several."""
    by_length = sorted(models, key=lambda model: len(model.name), reverse=True)
    usual = [model for model in by_length if model.files] or by_length
    unique = {model.files or model.name: model for model in usual}
    if len(unique) > 1:
        listed = list_named(sorted(model.name for model in unique.values()), 6)
        raise Several(f"{usual[0].place} has {listed}: name one of them")
    return next(iter(unique.values()), None)


def _rank(requested: _Wanted, model: Stored) -> int:
    stored_name = base_shapes.without_site(model.name).lower()
    own_names = {stored_name, stored_name.removesuffix(":latest")}
    own_names.add(stored_name.rpartition("/")[2].removesuffix(":latest"))
    if requested.text in own_names:
        return NAMED
    spelled = own_names | {file.stem.lower() for file in model.files}
    spelled |= {gguf_files.without_type(name) for name in spelled}
    if {_plain(requested.text), _plain(requested.base)} & {*map(_plain, spelled)}:
        return SPELLED
    plain = gguf_files.without_type(stored_name.rpartition("/")[2])
    is_base = ("base" in re.split(r"\W+", name) for name in (requested.text, plain))
    return KNOWN if requested.known and len({*is_base}) == 1 and known_name(plain) == requested.known else 0


def _plain(name: str) -> str:
    return name.removesuffix("-gguf")


def _usable(model: Stored, requested: _Wanted, checkpoint: bool) -> Stored | None:
    """The model with its files of the wanted type alone; None: none of it serves."""
    if checkpoint:
        return replace(model, files=()) if model.is_checkpoint else None
    if requested.type is None or requested.type == gguf_files.type_in(model.name):
        return model
    if model.address:
        return model if model.type == requested.type else None
    files = tuple(file for file in model.files if _type(file) == requested.type)
    return replace(model, files=files) if files else None


def _type(path: Path) -> str | None:
    """The type of a GGUF by its name, else by its header."""
    if kind := gguf_files.type_in(path.name):
        return _SPELLINGS.get(kind, kind)
    with contextlib.suppress(WeightsError):
        return locate.read(path, needs_shape=False).quant
    return None


def searched() -> str:
    """The places that were searched, in words."""
    try:
        served.ollama_models(address := ollama_address())
        ollama = f"Ollama at {address}"
    except (NotServed, ValueError):
        ollama = "Ollama (no answer)"
    places = [ollama_folders()[0], hub.cache_of_hub(), Path(LM_STUDIO[0]).expanduser()]
    return ", ".join(["this folder", ollama, *(str(place) for place in places)])
