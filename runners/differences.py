"""Compare two checkpoints of one model, tensor by tensor: the job `differences`, for every stack."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from runners.protocol import Request, Say
from runners.safetensors_folder import CHUNK, NOT_WEIGHTS, Stored, floats, json_object, stored_in

WORST = 3  # tensors of each kind that are named
# A row this much shorter than the tensor's median row may be below the smallest float16: not compared.
SHORT_ROW = 1e-3


def differences(request: Request, say: Say) -> dict[str, Any]:
    """files["source"] against files["original"], two folders. An error is the norm of the difference over
    the norm of the original.

    `matrices` and `vectors`: the worst, each with its name and error; of a matrix by its worst row.
    `missing`: names of tensors that the source lacks, or has in another size.
    """
    began = time.monotonic()
    source, original = (stored_in(Path(request.files[name])) for name in ("source", "original"))
    if json_object(Path(request.files["original"]) / "config.json").get("tie_word_embeddings"):
        original.pop("lm_head.weight", None)  # a copy of the embedding
    names = [name for name in original if not name.endswith(NOT_WEIGHTS)]
    found: dict[str, list[dict[str, Any]]] = {"matrices": [], "vectors": []}
    missing = []
    for number, name in enumerate(names, 1):
        ours, theirs = source.get(name), original[name]
        if ours is None or ours.shape != theirs.shape:
            missing.append(name)
            continue
        say(f"tensor {number}/{len(names)}")
        if len(theirs.shape) > 1 and theirs.shape[-2] > 1:  # of experts too; a convolution has one row each
            found["matrices"].append({"name": name, **_of_rows(ours, theirs)})
        else:
            off, norm = (math.sqrt(float(squares.sum())) for squares in _squares(ours, theirs, 1))
            found["vectors"].append({"name": name, "error": off / norm if norm else float(off > 0)})
    key = {"matrices": "row_error", "vectors": "error"}
    return {
        **{kind: sorted(of, key=lambda each: -each[key[kind]])[:WORST] for kind, of in found.items()},
        "compared": len(names) - len(missing),
        "missing": missing,
        "seconds": time.monotonic() - began,
    }


def _of_rows(ours: Stored, theirs: Stored) -> dict[str, Any]:
    off, norms = _squares(ours, theirs, theirs.shape[-1])
    compared = norms > SHORT_ROW**2 * np.median(norms)
    rows = np.sqrt(off[compared] / norms[compared])
    error = math.sqrt(float(off.sum() / norms.sum())) if norms.any() else float(off.any())
    return {"error": error, "row_error": float(rows.max(initial=0.0)), "rows": len(norms)}


def _squares(ours: Stored, theirs: Stored, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The squared norm of the difference and that of the original, in float64, of each `width` elements."""
    off, norms = [], []
    step = width * max(1, CHUNK // width)
    with ours.path.open("rb", buffering=0) as ours_file, theirs.path.open("rb", buffering=0) as theirs_file:
        for first in range(0, theirs.elements, step):
            exact = floats(theirs, theirs_file.fileno(), first, step).reshape(-1, width)
            mine = floats(ours, ours_file.fileno(), first, step).reshape(-1, width)
            norms.append(np.square(exact, dtype=np.float64).sum(axis=1))
            off.append(np.square(mine - exact, dtype=np.float64).sum(axis=1))
    return np.concatenate(off), np.concatenate(norms)
