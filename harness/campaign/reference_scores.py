"""The reference of quality: its logits, made once and kept, and as files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.analysis.token_scores import Kept
from harness.base import bounds
from harness.base.files import (
    bytes_of,
    cache_folder,
    delete_oldest,
    exclusive,
    made,
)
from harness.records import checked

METHOD = 2  # bump when other values are kept
ARRAYS = ("codes.npy", "top.npy", "nll.npy")
_COMPLETE = "description.json"


class TooLarge(ValueError):
    """A reference would take more than MOST_BYTES; the message is one sentence."""


class KeptReference:
    """The windows of one reference, in `folder` as ARRAYS. `description`: of a reference that has run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._codes, self._top, self._nll = (np.load(folder / name, mmap_mode="r") for name in ARRAYS)
        self.description: checked.Reference = json.loads((folder / _COMPLETE).read_text())

    @property
    def vocabulary(self) -> int:
        return int(self._codes.shape[2])

    def window(self, number: int) -> Kept:
        """A window, from 0."""
        return Kept(self._codes[number], self._top[number], self._nll[number])


def kept(known_by: object, make: Callable[[Path], checked.Reference]) -> KeptReference:
    """The reference that `known_by` identifies: kept, or made now. `make`: writes ARRAYS to a folder, and
    returns the description.

    Raises CacheError, OSError, and what `make` raises.
    """
    digest = hashlib.sha256(json.dumps([METHOD, known_by], sort_keys=True, default=str).encode()).hexdigest()
    parent = made(cache_folder() / "references")
    folder = parent / digest[:20]
    with exclusive(parent / "lock"):
        if not (folder / _COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
            folder.mkdir()
            try:
                (folder / _COMPLETE).write_text(json.dumps(make(folder)))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        os.utime(folder)
        others = [path for path in parent.iterdir() if path.is_dir() and path != folder]
        delete_oldest(others, bounds.REFERENCE_BYTES - bytes_of(folder))
    return KeptReference(folder)


class Writer:
    """Writes windows to ARRAYS, whose vocabulary the first window shows."""

    def __init__(self, folder: Path, windows: int) -> None:
        self._folder, self._windows = folder, windows
        self._arrays: dict[str, np.memmap] = {}

    def __enter__(self) -> Writer:
        return self

    def add(self, number: int, window: Kept) -> None:
        """Raises TooLarge."""
        if not self._arrays and window.codes.nbytes * self._windows > bounds.REFERENCE_BYTES:
            size, fit = window.codes.nbytes * self._windows, bounds.REFERENCE_BYTES // window.codes.nbytes
            raise TooLarge(
                f"the reference's logits would take {size / 1e9:.1f} GB of the cache folder, and at most"
                f" {bounds.REFERENCE_BYTES / 1e9:.1f} GB are kept: {fit} windows fit (chunks: {fit})"
            )
        arrays: tuple[NDArray[Any], ...] = (window.codes, window.top, window.nll)
        for name, values in zip(ARRAYS, arrays, strict=True):
            if name not in self._arrays:
                shape = (self._windows, *values.shape)
                self._arrays[name] = np.lib.format.open_memmap(
                    self._folder / name, mode="w+", dtype=values.dtype, shape=shape
                )
            self._arrays[name][number] = values

    def __exit__(self, *_: object) -> None:
        for array in self._arrays.values():
            array.flush()
        self._arrays = {}
