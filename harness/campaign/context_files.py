"""Filled contexts in the cache folder, which spare further repeats the filling; the oldest make room."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from harness.base.files import cache_folder, delete_oldest, made
from harness.campaign.repeat import Inputs
from harness.config import Windows
from harness.config.plan import Cell

MOST_BYTES = 6 << 30  # of the others; a worker keeps none above 2 GiB
# Options that keys and values do not depend on.
WITHOUT_EFFECT = ("n_ctx", "threads", "mmap")


def context_file_of(cell: Cell, inputs: Inputs) -> Path | None:
    """The file for a cell's filled context, which need not exist yet; None where none is kept. The worker
    adds a checksum to its name.

    Deletes the oldest others until they take at most MOST_BYTES.
    """
    if not isinstance(cell.workload, Windows) or not cell.workload.keep_context:
        return None
    made(folder := cache_folder() / "contexts")
    options = {name: value for name, value in inputs.options.items() if name not in WITHOUT_EFFECT}
    fingerprint = inputs.weights.fingerprint if inputs.weights else None
    known = [cell.variant.stack, list(inputs.interpreter.lock), fingerprint, options, inputs.prompt]
    deepest = max(cell.workload.depths)
    digest = hashlib.sha256(json.dumps([*known, deepest], sort_keys=True).encode()).hexdigest()[:20]
    wanted = folder / f"{digest}.context"
    others = [path for path in folder.iterdir() if not path.name.startswith(f"{digest}.")]
    delete_oldest(others, MOST_BYTES)
    return wanted
