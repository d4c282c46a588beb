"""A quantized variant against its own weights, dequantized: did the kernels compute what the file holds?

The file's values and settings are held against the 16-bit weights as well, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from harness.analysis.records import agreement, own_weights
from harness.campaign.prepare import NotReady, Preparation
from harness.campaign.repeat import Inputs
from harness.campaign.weights_check.logits import Logits, NoLogits
from harness.campaign.weights_check.reference import NoReference, Reference, digest_of
from harness.models import checkpoint, gguf_shape
from harness.models.checkpoint import CheckpointError
from harness.models.weights import FULL_TYPES, Ready
from harness.plan import Cell
from harness.results import Draft
from harness.stacks.header import references
from harness.system.cache import CacheError
from harness.theory.shapes import Shape

# Bump when a check against own weights compares something else.
METHOD = 2
FAILURES = (NoLogits, NoReference, NotReady, CacheError, CheckpointError, OSError, ValueError, MemoryError)


def identity(cell: Cell, preparation: Preparation) -> Draft | None:
    """Identifies the check against a variant's own weights across campaigns; null for one not quantized."""
    stack = references().get("hf")
    if stack is None or cell.packing or cell.weights_format not in ("gguf", "hf"):
        return None
    if cell.weights_format == "hf" and cell.quant in (None, *FULL_TYPES):
        return None
    if cell.weights_format == "gguf" and cell.quant in FULL_TYPES:
        return None
    try:
        return {"method": METHOD, "lock": digest_of(preparation.interpreter(stack))}
    except NotReady:
        return None


def is_quantized(cell: Cell, inputs: Inputs) -> bool:
    """Whether its weights as loaded are other than 16 or 32 bits, and no packed checkpoint's, which is
    compared with its own weights anyway."""
    stored = inputs.weights.quant if inputs.weights else None
    quant = stored if cell.weights_format == "gguf" else cell.quant or stored
    return bool(stored) and quant not in FULL_TYPES and not cell.packing


def compare(
    cell: Cell,
    preparation: Preparation,
    inputs: Callable[[Cell], Inputs | NotReady],
    seconds: float,
    folder: Path,
    original: Ready | None,
    ids: list[int],
    ours: Logits,
    windows: Sequence[Sequence[int]],
    chosen: Path | None,
) -> Draft:
    """`original`: the model's 16-bit weights; null: none. `ids`, `ours`: the token ids, and the
    variant's logits. `folder`: for arrays. `chosen`: the variant's experts, which the reference follows.

    Raises one of FAILURES.
    """
    given = preparation.weights(cell)
    assert given is not None  # its logits are there
    found: Draft = {"settings": []}
    if original and (theirs := _shape(original)) and given.format == "gguf" and (mine := _shape(given)):
        found["settings"] = own_weights.other_settings(asdict(mine), asdict(theirs))
    with preparation.dequantized(cell, given, original) as own:
        found["values"] = None
        if original and not found["settings"]:
            found["values"] = preparation.differences(cell, own.path, original)
        reference = Reference([cell], preparation, inputs, seconds, folder, (own.path, ids))
        depths = agreement.compare(*reference.logits(chosen), *ours, windows)
        return found | {"depths": depths, "reference": reference.description, **followed(reference)}


def followed(reference: Reference) -> Draft:
    """`experts`: what a reference that followed a variant's experts says of them; empty: it followed none."""
    found = reference.experts or {}
    if "followed" not in found:
        return {}
    theirs = found["followed"]
    own = {"experts": found["experts"], "used": found["used"], "chosen": theirs["used"]}
    return {"experts": own | {key: theirs[key] for key in ("choices", "others", "gap")}}


def _shape(ready: Ready) -> Shape | None:
    """Null for another architecture than those whose shape is known."""
    return gguf_shape.shape_of(ready.header) if ready.header else checkpoint.read(ready.path).shape
