"""References as files: written on a machine that holds the 16-bit weights, read on one that does not."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.analysis.token_scores import TOP
from harness.base import bounds
from harness.base.files import (
    NotStarted,
    open_regular,
    sha256,
    strict_json,
)
from harness.campaign.reference_scores import ARRAYS, KeptReference, kept
from harness.campaign.worker import Facts
from harness.config import Quality
from harness.models.locate import Ready
from harness.models.make import FULL_TYPES
from harness.records import checked
from harness.records.values import plain

FORMAT = 1  # bump when a file's content means something else
DESCRIPTION = "description.json"
APART = 0.01  # of two counts of parameters: a conversion adds a few vectors, another size of a model far more
_KNOWN = ("name", "why", "stack", "options", "unpacked", "versions", "seconds")


class BadReference(NotStarted):
    """A file cannot be used as a reference, or not be written; the message is one sentence."""


@dataclass(frozen=True)
class Origin:
    """The inputs of a reference: the text, the windows, their ids. `bos`: the first id of each window; None:
    none."""

    text_sha256: str
    workload: Quality
    ids_sha256: str
    bos: int | None = None

    @property
    def windows(self) -> dict[str, object]:
        return {name: getattr(self.workload, name) for name in ("n_ctx", "chunks", "depths")}


def write_reference(path: Path, reference: KeptReference, origin: Origin, model: str, weights: Ready) -> None:
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
                    raise ValueError("it holds other files than an exported reference")
                if archive.getinfo(DESCRIPTION).file_size > bounds.REFERENCE_DESCRIPTION_BYTES:
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
            reference = self._described["reference"]
            self.description: checked.Reference = plain(
                {
                    "name": str(reference["name"]),
                    "why": str(reference["why"]),
                    "file": {"name": path.name, "sha256_of_description": self.identity},
                    **{key: reference.get(key) for key in _KNOWN[2:]},
                    "weights": self._model,
                }
            )
        except OSError as refusal:
            raise BadReference(f"{path}: {(refusal.strerror or str(refusal)).lower()}") from refusal
        except _DAMAGES as damage:
            raise BadReference(f"{path}: is no reference that --export-reference wrote: {damage}") from damage

    def mismatch(self, origin: Origin, weights: Sequence[Ready]) -> str | None:
        """Why this is the reference of something else, in one sentence; None if it fits. `weights`: of the
        model, those on this machine."""
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
        """The reference, in the cache folder. Raises BadReference: it is damaged; CacheError."""
        try:
            return kept({"file": self.identity}, self._extract)
        except (OSError, *_DAMAGES) as damage:
            raise BadReference(f"{self._path}: is damaged: {damage}") from damage

    def _extract(self, folder: Path) -> checked.Reference:
        with open_regular(self._path, links=True) as file, zipfile.ZipFile(file) as archive:
            for name in ARRAYS:
                if (size := archive.getinfo(name).file_size) > bounds.REFERENCE_BYTES:
                    raise ValueError(f"{name} has {size:,} bytes")
                with archive.open(name) as member, (folder / name).open("x+b") as array:
                    shutil.copyfileobj(member, array)
                    array.seek(0)
                    if sha256(array) != self._hashes[name]:
                        raise ValueError(f"the SHA-256 of {name} is another")
        codes, top, nll = (np.load(folder / name, mmap_mode="r") for name in ARRAYS)
        windows = len(Quality.model_validate({"kind": "quality", **self._windows}).windows())
        shapes = codes.shape[:1] == (windows,) and codes.ndim == 3
        shapes = shapes and top.shape == (*codes.shape[:2], TOP) and nll.shape == codes.shape[:2]
        types = (codes.dtype, top.dtype, nll.dtype) == (np.uint16, np.int64, np.float64)
        if not (shapes and types and np.isfinite(nll).all()):
            raise ValueError("arrays that no reference has")
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


def _facts(weights: Ready) -> Facts:
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
