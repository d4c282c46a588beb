"""Whether the tensors of a checkpoint are those that its config.json describes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from harness.base import bounds, files
from harness.models import layout
from harness.models.gguf_model import Contradiction
from harness.models.safetensors_files import FLOATS, samples
from harness.theory.decoder import Decoder
from harness.theory.hf_config import ConfigJsonError
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


def check_sizes(made: Decoder, tensors: Iterable[Tensor]) -> None:
    """Raise Contradiction unless config.json matches the layers, the experts and the vocabulary."""
    numbered = {int(found[1]) for tensor in tensors if (found := LAYER.search(tensor.name))}
    layers = made.count
    # Layers that predict a second token follow the last, and are not loaded.
    if len(numbered) < layers or (made.is_dense and len(numbered) > layers):
        raise Contradiction(f"has {len(numbered)} layers, and its config.json says {layers}")
    experts = {int(found[1]) for tensor in tensors if (found := _EXPERT.search(tensor.name))}
    if experts and len(experts) != made.experts:
        raise Contradiction(f"has {len(experts)} experts, and its config.json says {made.experts}")
    vocabulary = (made.vocab_size, made.hidden_size)
    for tensor in tensors:
        is_table = tensor.part in ("embedding", "lm_head") and tensor.name.endswith(".weight")
        if is_table and tensor.type in _WHOLE and tensor.dims != vocabulary:
            raise Contradiction(
                f"its {tensor.name[:60]} is {_by(tensor.dims)}, and its config.json says {_by(vocabulary)}"
            )


def check_layout(config: Path, tensors: Iterable[Tensor]) -> None:
    """Raise Contradiction unless config.json matches the layers' matrices that are stored one element to a
    weight. Checks nothing of a model whose layout is not known."""
    try:
        rows = layout.of(files.object_of(config, bounds.CONFIG_JSON_BYTES)).rows
    except (ConfigJsonError, layout.NoLayout):
        return
    sizes = {row.there: row.dims for row in rows if row.how in ("same", "rotated") and len(row.dims) > 1}
    for tensor in tensors:
        place = LAYER.search(tensor.name)
        name = f"model.{tensor.name[place.start() :].removeprefix('.')}" if place else ""
        expert = _EXPERT.sub(".experts.{}.", name)
        size = sizes[expert][1:] if expert != name and expert in sizes else sizes.get(name)
        if size and tensor.type in _WHOLE and tensor.dims != size:
            raise Contradiction(
                f"its {tensor.name[:60]} is {_by(tensor.dims)}, and its config.json says {_by(size)}"
            )


def _by(dims: Iterable[int]) -> str:
    return " x ".join(map(str, dims))


def is_draft(name: str, made: Decoder | None) -> bool:
    """Whether a tensor only drafts a second token, which plain decode does not."""
    layer = LAYER.search(name)
    return bool(_DRAFT.search(name) or (made and layer and int(layer[1]) >= made.count))
