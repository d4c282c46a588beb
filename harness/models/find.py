"""Find the weights that a name stands for: of a local Ollama, in the hub's cache, in LM Studio's folders.

A name is the place's own (`smollm2:135m`, `owner/repo`, `repo`), another spelling of it (without owner or
`-GGUF`, with a type at its end), or that of a known model (`qwen3-8b`), which every place spells in its own
way. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.base import bounds
from harness.base.files import HUB_MODEL, JsonFileError, object_of
from harness.base.text import list_named, server_address
from harness.models import gguf_files, hub, locate, served
from harness.models.locate import WeightsError
from harness.models.served import NotServed
from harness.theory import base_shapes
from harness.theory.known_models import known_name

OLLAMA_PORT = 11434
OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")  # its Linux service is a user of its own
OLLAMA_MODEL = "application/vnd.ollama.image.model"
OLLAMA_REGISTRY = "registry.ollama.ai/library/"  # of names without a host and an owner
LM_STUDIO = ("~/.lmstudio/models", "~/.cache/lm-studio/models")
NAMED, SPELLED, KNOWN = 3, 2, 1  # how a stored model has a name, the best first
_SPELLINGS = {"fp16": "f16", "fp32": "f32"}


class Several(ValueError):
    """A name fits several models; the message is the end of a sentence."""


@dataclass(frozen=True)
class Stored:
    """A model in one of the places. `name`: as the place has it. `place`: in words. `address`: of the server
    that serves it, and `type` what it says of its weights. `files`: its GGUFs. `folder`: of its repository,
    which `is_checkpoint` if it has one too. `revision`: of a repository in the hub's cache."""

    name: str
    place: str
    address: str = ""
    type: str | None = None
    files: tuple[Path, ...] = ()
    folder: Path = Path()
    is_checkpoint: bool = False
    revision: str = ""


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
    wanted = _Wanted(
        name, base, kind and _SPELLINGS.get(kind, kind), known_name(base) if "/" not in base else None
    )
    places = [_served_by_ollama()] if served and not checkpoint else []
    places += [_files_of_ollama(), _in_hub_cache(), _of_lm_studio()]
    ranked = [[(_rank(wanted, model), model) for model in place] for place in places]
    own = [(place, NAMED) for place in ranked]  # a place's own name goes before the order of the places
    for place, rank in own + [(place, rank) for place in ranked for rank in (SPELLED, KNOWN)]:
        alike = (model for its_rank, model in place if its_rank == rank)
        if model := _one([usable for each in alike if (usable := _usable(each, wanted, checkpoint))]):
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


def _rank(wanted: _Wanted, model: Stored) -> int:
    own = base_shapes.without_site(model.name).lower()
    own_names = {own, own.removesuffix(":latest")} | {own.rpartition("/")[2].removesuffix(":latest")}
    if wanted.text in own_names:
        return NAMED
    spelled = own_names | {each.stem.lower() for each in model.files}
    spelled |= {gguf_files.without_type(each) for each in spelled}
    if {_plain(wanted.text), _plain(wanted.base)} & {*map(_plain, spelled)}:
        return SPELLED
    plain = gguf_files.without_type(own.rpartition("/")[2])
    is_base = ("base" in re.split(r"\W+", each) for each in (wanted.text, plain))
    return KNOWN if wanted.known and len({*is_base}) == 1 and known_name(plain) == wanted.known else 0


def _plain(name: str) -> str:
    return name.removesuffix("-gguf")


def _usable(model: Stored, wanted: _Wanted, checkpoint: bool) -> Stored | None:
    """The model with its files of the wanted type alone; None: none of it serves."""
    if checkpoint:
        return replace(model, files=()) if model.is_checkpoint else None
    if wanted.type is None or wanted.type == gguf_files.type_in(model.name):
        return model
    if model.address:
        return model if model.type == wanted.type else None
    files = tuple(each for each in model.files if _type(each) == wanted.type)
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
    return ", ".join(["this folder", ollama, *(str(each) for each in places)])


# Ollama: the API of its server, and its store, where a manifest names the blobs of a tag.


def ollama_address() -> str:
    """The address of the local Ollama, read from OLLAMA_HOST as its own client does. Raises ValueError."""
    scheme, has_scheme, rest = os.environ.get("OLLAMA_HOST", "").strip().rpartition("://")
    host, _, port = rest.partition("/")[0].rpartition(":") if re.search(r":\d*$", rest) else (rest, "", "")
    usual = {"http": 80, "https": 443}.get(scheme, OLLAMA_PORT) if has_scheme else OLLAMA_PORT
    host = "127.0.0.1" if host in ("", "0.0.0.0") else host
    return server_address(f"{scheme or 'http'}://{host}:{port or usual}")


def _served_by_ollama() -> Iterator[Stored]:
    with contextlib.suppress(NotServed, ValueError):
        address = ollama_address()
        for name, kind in served.ollama_models(address).items():
            yield Stored(name, f"Ollama at {address}", address, type=kind and kind.lower())


def ollama_folders() -> list[Path]:
    own = os.environ.get("OLLAMA_MODELS")
    return [Path(own).expanduser()] if own else [Path.home() / ".ollama" / "models", OLLAMA_SERVICE]


def _files_of_ollama() -> Iterator[Stored]:
    for folder in ollama_folders():
        manifests = folder / "manifests"
        for path in _listed(manifests, "*/*/*/*"):
            name = str(path.parent.relative_to(manifests)).removeprefix(OLLAMA_REGISTRY)
            name = f"{name.removeprefix('registry.ollama.ai/')}:{path.name}"
            with contextlib.suppress(OSError, JsonFileError):
                rows = object_of(path, bounds.CONFIG_JSON_BYTES).get("layers")
                layers = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
                digests = [str(row.get("digest")) for row in layers if row.get("mediaType") == OLLAMA_MODEL]
                blobs = [
                    folder / "blobs" / each.replace(":", "-") for each in digests if _DIGEST.fullmatch(each)
                ]
                if len(blobs) == 1 and blobs[0].is_file():
                    yield Stored(name, f"Ollama's folder {folder}", files=(blobs[0],))


_DIGEST = re.compile(r"sha256:\w+")


# The hub's cache (models--OWNER--NAME/snapshots/COMMIT), and LM Studio's folders (OWNER/NAME).


def _in_hub_cache() -> Iterator[Stored]:
    cache = hub.cache_of_hub()
    for path in _listed(cache, f"{HUB_MODEL}*"):
        repo = path.name.removeprefix(HUB_MODEL).replace("--", "/", 1)
        with contextlib.suppress(OSError):
            main, folders = locate.snapshots(path)
            newest = max(folders, key=lambda folder: folder.stat().st_mtime, default=None)
            folder = main or newest
            if folder and (model := _in_folder(folder, repo, f"the hub's cache {cache}")):
                yield replace(model, revision="main" if main else folder.name)


def _of_lm_studio() -> Iterator[Stored]:
    for root in dict.fromkeys(Path(each).expanduser().resolve() for each in LM_STUDIO):
        for path in _listed(root, "*/*"):
            if model := _in_folder(path, str(path.relative_to(root)), f"LM Studio's folder {root}"):
                yield model


def _in_folder(folder: Path, name: str, place: str) -> Stored | None:
    """The model of a repository's folder."""
    with contextlib.suppress(OSError):
        files = gguf_files.below(folder)
        is_checkpoint = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
        if files or is_checkpoint:
            return Stored(name, place, files=tuple(files), folder=folder, is_checkpoint=is_checkpoint)
    return None


def _listed(folder: Path, pattern: str) -> list[Path]:
    """Paths below a folder; none where it is missing or cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(folder.glob(pattern))
    return []
