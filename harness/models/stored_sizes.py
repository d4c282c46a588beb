"""Whether the tensors of a checkpoint are those that its config.json describes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from harness.base import bounds, files
from harness.models import layout
from harness.models.gguf_model import Contradiction, dims_text
from harness.models.safetensors_files import FLOATS, samples
from harness.theory.config_settings import ConfigJsonError
from harness.theory.decoder import Decoder
from harness.theory.tensors import Tensor

LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.")
_WHOLE = (*FLOATS, "f8_e4m3", "f8_e5m2")  # an element is a weight
_DRAFT = re.compile(r"(?:^|\.)(mtp|mtp_layers|nextn)\.")  # Qwen's and others' heads that draft a next token
_EXPERT = re.compile(r"\.experts\.([0-9]{1,6})\.")


def check_copy(files: Iterable[Path], tensors: Iterable[Tensor]) -> None:
    """Raise Contradiction if a tied lm_head is stored besides with other values: transformers would use the
    embedding in its place, and other programs what is stored."""
    two = {tensor.part: tensor for tensor in tensors if tensor.name.endswith(".weight")}
    embedding, head = two.get("embedding"), two.get("lm_head")
    if embedding is None or head is None or head.type not in FLOATS:
        return
    is_alike = (embedding.dims, embedding.type) == (head.dims, head.type)
    if is_alike and samples(files, embedding.name) == samples(files, head.name):
        return
    raise Contradiction(
        f"its config.json ties the lm_head to the embedding, and its {head.name} holds other values:"
        " set tie_word_embeddings to false if that lm_head is the model's, else remove it"
    )


def check_counts(decoder: Decoder, tensors: Iterable[Tensor]) -> None:
    """Raise Contradiction unless config.json matches the layers and the experts."""
    numbered = {int(match[1]) for tensor in tensors if (match := LAYER.search(tensor.name))}
    layers = decoder.count
    # Layers that predict a second token follow the last, and are not loaded.
    if len(numbered) < layers or (decoder.is_dense and len(numbered) > layers):
        raise Contradiction(f"has {len(numbered)} layers, and its config.json says {layers}")
    experts = {int(match[1]) for tensor in tensors if (match := _EXPERT.search(tensor.name))}
    if experts and len(experts) != decoder.experts:
        raise Contradiction(f"has {len(experts)} experts, and its config.json says {decoder.experts}")


def check_dims(decoder: Decoder, config: Path, tensors: Iterable[Tensor]) -> None:
    """Raise Contradiction unless config.json matches the vocabulary, and the layers' matrices of a model
    whose layout is known; those that are stored one element to a weight."""
    vocabulary = (decoder.vocab_size, decoder.hidden_size)
    by_name: dict[str, tuple[int, ...]] = {}
    with contextlib.suppress(ConfigJsonError, layout.NoLayout):
        rows = layout.of(files.object_of(config, bounds.CONFIG_JSON_BYTES)).rows
        by_name = {
            row.there: row.dims for row in rows if row.how in ("same", "rotated") and len(row.dims) > 1
        }
    for tensor in tensors:
        dims: tuple[int, ...] | None = None
        if tensor.part in ("embedding", "lm_head") and tensor.name.endswith(".weight"):
            dims = vocabulary
        elif layer := LAYER.search(tensor.name):
            name = f"model.{tensor.name[layer.start() :].removeprefix('.')}"
            of_expert = by_name.get(_EXPERT.sub(".experts.{}.", name), ())
            dims = of_expert[1:] if _EXPERT.search(name) else by_name.get(name)
        if dims and tensor.type in _WHOLE and tensor.dims != dims:
            raise Contradiction(
                f"its {tensor.name[:60]} is {dims_text(tensor.dims)}, and its config.json says"
                f" {dims_text(dims)}"
            )


def is_draft(name: str, decoder: Decoder | None) -> bool:
    """Whether a tensor only drafts a second token, which plain decode does not."""
    layer = LAYER.search(name)
    return bool(_DRAFT.search(name) or (decoder and layer and int(layer[1]) >= decoder.count))
