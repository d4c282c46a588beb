"""References as files: written on a machine that holds the 16-bit weights, read on one that does not.

A zip archive without compression: description.json, and the arrays that kept.py keeps. The description has
their hashes, so its own hash identifies the whole.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import zipfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from harness.analysis.series.divergence import TOP, Kept
from harness.campaign.quality import kept
from harness.campaign.quality.kept import ARRAYS, KeptReference, Made
from harness.config import Quality
from harness.models.weights import FULL_TYPES, Ready
from harness.results import Draft
from harness.system.endings import NotStarted
from harness.system.files import open_regular, sha256
from harness.system.json_file import strict_json

FORMAT = 1  # bump when a file's content means something else
DESCRIPTION = "description.json"
MOST_DESCRIPTION_BYTES = 4 << 20
APART = 0.01  # of two counts of parameters: a conversion adds a few vectors, another size of a model far more
_TYPES: dict[str, DTypeLike] = {"codes": np.uint16, "top": np.int64, "nll": np.float64}
_KNOWN = ("name", "why", "stack", "options", "unpacked", "versions", "seconds")


class BadReference(NotStarted):
    """A file cannot be used as a reference, or not be written; the message is one sentence."""


@dataclass(frozen=True)
class Origin:
    """What a reference was computed from: the text, the windows, their ids. `bos`: the first of each; null:
    none."""

    text_sha256: str
    workload: Quality
    ids_sha256: str
    bos: int | None = None

    @property
    def windows(self) -> dict[str, object]:
        return {name: getattr(self.workload, name) for name in ("n_ctx", "chunks", "depths")}


def write(path: Path, reference: KeptReference, origin: Origin, model: str, weights: Ready) -> None:
    """Write a reference, whole or not at all; `weights`: of 16 bits, those it was computed with.

    Raises BadReference: the file exists, or cannot be written.
    """
    hashes = {}
    for name in ARRAYS:
        with (reference.folder / name).open("rb") as array:
            hashes[name] = sha256(array)
    described = {
        "format": FORMAT,
        "text_sha256": origin.text_sha256,
        "ids_sha256": origin.ids_sha256,
        "bos": origin.bos,
        "windows": origin.windows,
        "model": {"name": model} | _facts(weights),
        "reference": {key: reference.description.get(key) for key in _KNOWN},
        "sha256": hashes,
    }
    partial = path.with_name(f"{secrets.token_hex(8)}.partial")
    try:
        if path.exists():
            raise BadReference(f"{path}: exists already")
        with zipfile.ZipFile(partial, "x") as archive:
            archive.writestr(DESCRIPTION, json.dumps(described, indent=1, sort_keys=True))
            for name in ARRAYS:
                archive.write(reference.folder / name, name)
        partial.replace(path)
    except OSError as refusal:
        raise BadReference(f"{path}: {(refusal.strerror or str(refusal)).lower()}") from refusal
    finally:
        partial.unlink(missing_ok=True)


class GivenReference:
    """A reference out of a file. `identity`: the hash of its content."""

    def __init__(self, path: Path) -> None:
        """Reads the description alone. Raises BadReference."""
        self._path = path
        try:
            with open_regular(path, links=True) as file, zipfile.ZipFile(file) as archive:
                if sorted(archive.namelist()) != sorted((DESCRIPTION, *ARRAYS)):
                    raise ValueError("its members are others")
                if archive.getinfo(DESCRIPTION).file_size > MOST_DESCRIPTION_BYTES:
                    raise ValueError("its description is too long")
                raw = archive.read(DESCRIPTION)
            self._described: Any = strict_json(raw)
            if self._described["format"] != FORMAT:
                raise ValueError(f"its format is {self._described['format']}, not {FORMAT}")
            self.identity = hashlib.sha256(raw).hexdigest()
            self._hashes = {name: str(self._described["sha256"][name]) for name in ARRAYS}
            self._model = {str(key): value for key, value in self._described["model"].items()}
            self._parameters = int(self._model["parameters"])
            self._windows = dict(self._described["windows"])
            self.description: Draft = {
                "name": str(self._described["reference"]["name"]),
                "why": str(self._described["reference"]["why"]),
                "file": {"name": path.name, "sha256_of_description": self.identity},
                **{key: self._described["reference"].get(key) for key in _KNOWN[2:]},
                "weights": self._model,
            }
        except OSError as refusal:
            raise BadReference(f"{path}: {(refusal.strerror or str(refusal)).lower()}") from refusal
        except _DAMAGES as damage:
            raise BadReference(f"{path}: is no reference that --export-reference wrote: {damage}") from damage

    def mismatch(self, origin: Origin, weights: Sequence[Ready]) -> str | None:
        """Why this is the reference of something else, in one sentence; null if it fits. `weights`: of the
        model, as far as they are on this machine."""
        if self._described.get("text_sha256") != origin.text_sha256:
            return f"{self._path}: is the reference of another text"
        if self._windows != origin.windows:
            return f"{self._path}: has windows of {_words(self._windows)}, not {_words(origin.windows)}"
        if (theirs := self._described.get("bos")) != origin.bos:
            has, wanted = (f"BOS {each}" if each is not None else "no BOS" for each in (theirs, origin.bos))
            return f"{self._path}: has {has} in front of each window, and here it is {wanted}"
        if self._described.get("ids_sha256") != origin.ids_sha256:
            return f"{self._path}: its model's tokenizer makes other tokens of the text"
        for ready in weights:
            ours = _facts(ready)
            if ready.quant in FULL_TYPES and ready.format == self._model.get("format"):
                same = ours["sample"] == self._model.get("sample")
            elif ready.packing is None:
                same = abs(int(ours["parameters"]) - self._parameters) <= APART * self._parameters
            else:
                continue
            if not same:
                return f"{self._path}: is the reference of {self._model.get('name')}, with other weights"
        return None

    def kept(self) -> KeptReference:
        """The reference, in the cache folder. Raises BadReference: it is damaged; TooLarge, CacheError."""
        try:
            return kept.of({"file": self.identity}, self._number, self._make)
        except kept.TooLarge:
            raise
        except (OSError, *_DAMAGES) as damage:
            raise BadReference(f"{self._path}: is damaged: {damage}") from damage

    @property
    def _number(self) -> int:
        return len(Quality.model_validate({"kind": "quality", **self._windows}).windows())

    def _make(self, made: Made) -> Draft:
        with ExitStack() as stack:
            file = stack.enter_context(open_regular(self._path, links=True))
            archive = stack.enter_context(zipfile.ZipFile(file))
            members = [stack.enter_context(archive.open(name)) for name in ARRAYS]
            read = [
                _rows(member, kind, self._number)
                for member, kind in zip(members, _TYPES.values(), strict=True)
            ]
            for number in range(self._number):
                window = Kept(*(each() for each in read))
                if window.top.shape[-1] != TOP or not np.isfinite(window.nll).all():
                    raise ValueError("values that no reference has")
                made(number, window)
        with zipfile.ZipFile(self._path) as archive:
            for name in ARRAYS:
                with archive.open(name) as member:
                    if sha256(member) != self._hashes[name]:
                        raise ValueError(f"the SHA-256 of {name} is another")
        return self.description


_DAMAGES = (
    zipfile.BadZipFile,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    NotImplementedError,
    EOFError,
)


def _facts(weights: Ready) -> dict[str, Any]:
    """What tells a copy of the weights from others: a fingerprint without times."""
    return {
        "format": weights.format,
        "architecture": weights.architecture,
        "quant": weights.quant,
        "parameters": weights.sizes["parameters"],
        "sample": weights.fingerprint.rpartition("-")[2],
    }


def _words(windows: dict[str, object]) -> str:
    depths = windows.get("depths")
    deep = f" and at {', '.join(map(str, depths))}" if isinstance(depths, list) and depths else ""
    return f"{windows.get('n_ctx')} tokens, {windows.get('chunks')} of them{deep}"


def _rows(member: IO[bytes], kind: DTypeLike, count: int) -> Callable[[], NDArray[Any]]:
    """Reads an .npy of `count` windows, one a call. Raises ValueError: it is of another type or count."""
    if np.lib.format.read_magic(member) != (1, 0):
        raise ValueError("an array of another version")
    shape, by_column, found = np.lib.format.read_array_header_1_0(member)
    if by_column or found != np.dtype(kind) or not shape or shape[0] != count:
        raise ValueError(f"an array of {found}, {shape}")
    size = int(np.prod(shape[1:], dtype=object)) * found.itemsize
    if size * count > kept.MOST_BYTES:
        raise ValueError(f"an array of {size * count:,} bytes")

    def following() -> NDArray[Any]:
        raw = member.read(size)
        return np.frombuffer(raw, found).reshape(shape[1:])

    return following
