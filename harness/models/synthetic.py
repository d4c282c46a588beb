"""Synthetic weights: their identity and place in the cache, their layout and bytes, and what has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from harness.known import Described
from harness.models import layout
from harness.models.layout import Layout, NoLayout
from harness.models.weights import WeightsUnavailable, digest
from harness.system.cache import cache_folder
from harness.theory import gguf_types
from harness.theory.config_values import ConfigJsonError
from harness.theory.decoder import Decoder
from harness.theory.packed import FORMATS
from harness.theory.shapes import Shape

# Bump when runners/synthetic.py makes other values for the same shape and seed.
# 2: a Hugging Face checkpoint, from which GGUF files are converted; 1 was a GGUF.
SYNTHESIS = 2
CHECKPOINT_ELEMENT_BYTES = 2  # of 16-bit checkpoints that are made here


def synthetic_name(model: Shape | Described, seed: int) -> str:
    """The identity of a synthetic model: shape or config.json, seed and generator version."""
    known = (
        {"shape": asdict(model)} if isinstance(model, Shape) else {"config": layout_of(model.config).config}
    )
    return "synthetic-" + digest({**known, "seed": seed, "synthesis": SYNTHESIS})


def checkpoint_path(model: Shape | Described, seed: int) -> Path:
    """The cache folder of a synthetic checkpoint."""
    return named_folder(synthetic_name(model, seed))


def named_folder(name: str) -> Path:
    """The same, by its identity."""
    return cache_folder() / "weights" / name.rpartition("-")[2] / "hf"


def layout_of(config: Mapping[str, object]) -> Layout:
    """Raises WeightsUnavailable."""
    try:
        return layout.of(config)
    except (NoLayout, ConfigJsonError) as why:
        raise WeightsUnavailable(str(why)) from why


def gguf_layout_of(config: Mapping[str, object]) -> Layout:
    """The same for a GGUF. Raises WeightsUnavailable, also if llama.cpp would compute another model."""
    try:
        layout.check_gguf(config)
    except ConfigJsonError as why:
        raise WeightsUnavailable(str(why)) from why
    except NoLayout as why:
        raise WeightsUnavailable(f"its GGUF would be another model: {why}") from why
    return layout_of(config)


def check_synthetic(model: Described, form: str) -> None:
    """Raises WeightsUnavailable for a model that cannot be synthesized in a stack's format."""
    if form in FORMATS:
        raise WeightsUnavailable(
            f"only dense models are packed as {form} here; this one is {model.decoder.arch}"
        )
    (gguf_layout_of if form == "gguf" else layout_of)(model.config)


def synthetic_bytes(shape: Shape | Decoder, quant: str) -> int:
    """Bytes of the tensors of a synthetic file; a dense one stands in for a published one."""
    return gguf_types.model_bytes(shape, quant, as_published=isinstance(shape, Shape))
