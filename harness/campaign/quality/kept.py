"""Logits of references in the cache folder, 16 bits each, known by content; the oldest make room."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from harness.analysis.series.divergence import TOP, Kept
from harness.results import Draft
from harness.system.cache import cache_folder, exclusive, made

METHOD = 2  # bump when other values are kept
MOST_BYTES = 8 << 30  # of all references together
ARRAYS = ("codes.npy", "top.npy", "nll.npy")
_COMPLETE = "description.json"


class TooLarge(ValueError):
    """A reference would take more than MOST_BYTES; the message is one sentence."""


class KeptReference:
    """The windows of one reference, in `folder` as ARRAYS. `description`: of a reference that has run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._codes, self._top, self._nll = (np.load(folder / name, mmap_mode="r") for name in ARRAYS)
        self.description: Draft = json.loads((folder / _COMPLETE).read_text())

    @property
    def vocabulary(self) -> int:
        return int(self._codes.shape[2])

    def window(self, number: int) -> Kept:
        """A window, from 0."""
        return Kept(self._codes[number], self._top[number], self._nll[number])


Made = Callable[[int, Kept], None]


def of(known_by: Draft, windows: int, make: Callable[[Made], Draft]) -> KeptReference:
    """The reference that `known_by` identifies: kept, or made now. `make`: is given what takes each window,
    and returns the description.

    Raises TooLarge, CacheError, OSError, and what `make` raises.
    """
    digest = hashlib.sha256(json.dumps([METHOD, known_by], sort_keys=True, default=str).encode()).hexdigest()
    parent = made(cache_folder() / "references")
    folder = parent / digest[:20]
    with exclusive(parent / "lock"):
        if not (folder / _COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
            folder.mkdir()
            writer = _Writer(folder, windows)
            try:
                description = make(writer.add)
                writer.close()
                (folder / _COMPLETE).write_text(json.dumps(description))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        os.utime(folder)
        _make_room(folder)
    return KeptReference(folder)


class _Writer:
    """Writes windows to arrays whose vocabulary the first window shows."""

    def __init__(self, folder: Path, windows: int) -> None:
        self._folder, self._windows = folder, windows
        self._arrays: dict[str, np.memmap] = {}

    def add(self, number: int, window: Kept) -> None:
        if not self._arrays:
            positions, vocabulary = window.codes.shape
            size = window.codes.nbytes * self._windows
            if size > MOST_BYTES:
                fit = MOST_BYTES // window.codes.nbytes
                raise TooLarge(
                    f"the reference's logits would take {size / 1e9:.1f} GB of the cache folder, and at most"
                    f" {MOST_BYTES / 1e9:.1f} GB are kept: {fit} windows fit (chunks: {fit})"
                )
            for name, shape, kind in (
                ("codes", (positions, vocabulary), np.uint16),
                ("top", (positions, TOP), np.int64),
                ("nll", (positions,), np.float64),
            ):
                path = self._folder / f"{name}.npy"
                whole = (self._windows, *shape)
                self._arrays[name] = np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=whole)
        for name, array in self._arrays.items():
            array[number] = getattr(window, name)

    def close(self) -> None:
        for array in self._arrays.values():
            array.flush()
        self._arrays = {}


def _make_room(kept: Path) -> None:
    """Delete the oldest others until all take at most MOST_BYTES."""
    others = [path for path in kept.parent.iterdir() if path.is_dir() and path != kept]
    others.sort(key=lambda each: each.stat().st_mtime)
    sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in (kept, *others)}
    while others and sum(sizes.values()) > MOST_BYTES:
        shutil.rmtree(oldest := others.pop(0), ignore_errors=True)
        del sizes[oldest]
