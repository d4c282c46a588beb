"""Write a file or a folder of weights into the cache: one process at a time, and whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.models import weights
from harness.models.weights import WeightsError
from harness.system.cache import exclusive

SPARE_DISK_BYTES = 1 << 30


@contextmanager
def written(
    target: Path, expected_bytes: float, what: str, there: Callable[[Path], object] = weights.cached
) -> Iterator[Path | None]:
    """A temporary name beside the target, which becomes the target if the block ends without an error; null
    if another process has made the target. `what`: names it in messages; `there`: whether it is made.

    Raises WeightsError (too little free disk), CacheError.
    """
    with exclusive(target.with_suffix(".lock")):
        if there(target):
            yield None
            return
        for leftover in target.parent.glob(f"{target.name}.partial-*"):
            weights.drop(leftover)
        free = shutil.disk_usage(target.parent).free
        needed = expected_bytes + SPARE_DISK_BYTES
        if free < needed:
            raise WeightsError(
                f"{what} needs {needed / 1e9:.1f} GB of disk, but only "
                f"{free / 1e9:.1f} GB is free in {target.parent}"
            )
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        try:
            yield partial
            partial.replace(target)
        finally:
            weights.drop(partial)
