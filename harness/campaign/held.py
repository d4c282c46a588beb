"""A model as the stack of a cell holds it in memory: weights and KV cache in bytes, by config and headers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from harness.models import checkpoint, packed, synthetic, weights
from harness.models.gguf_shape import shape_of
from harness.models.weights import Ready, WeightsError
from harness.plan import Cell
from harness.stacks.rules import Options, holds
from harness.theory import footprint
from harness.theory.decoder import (
    Decoder,
    expert_params,
    kv_elements_per_token,
    lm_head_params,
    parameters,
)
from harness.theory.footprint import BITSANDBYTES, LLAMA_CPP, Engine, LlamaCpp, Model, Torch
from harness.theory.ggml import element_bytes
from harness.theory.loaded import ELEMENT_BYTES, loaded_bytes
from harness.theory.packed import Packing, packed_bytes
from harness.theory.shapes import Shape
from harness.theory.tensors import Tensor, of_shape


def engine_of(cell: Cell, options: Options, on_gpu: bool, model: Shape | Decoder) -> Engine:
    """The memory model of the cell's stack. `options`: resolved."""
    if cell.header.memory == LLAMA_CPP:
        ubatch = min(int(options.get("n_ubatch") or 512), int(options.get("n_batch") or 512))
        return LlamaCpp(on_gpu, bool(options.get("flash_attn")), ubatch)
    scratch = 0.0
    if on_gpu and cell.header.scratch and holds(cell.header.scratch, options):
        scratch = footprint.exllama_v2_scratch(model)
    return Torch(on_gpu, "static" if cell.header.context_of(options) else "dynamic", scratch)


def _kv_element_bytes(options: Options) -> float:
    """Mean bytes per K or V element; 16 bits if the stack has no option for it."""
    if "dtype" in options:
        return ELEMENT_BYTES[str(options["dtype"])]
    types = (str(options.get(name, "f16")) for name in ("type_k", "type_v"))
    return sum(map(element_bytes, types)) / 2


def made_of(cell: Cell, ready: Ready | None) -> Shape | Decoder | None:
    """The model, by its config or its weights."""
    if cell.model.made or ready is None:
        return cell.model.made
    if ready.decoder or ready.header:
        return ready.decoder or (shape_of(ready.header) if ready.header else None)
    return checkpoint.read(ready.path, needs_shape=False).shape if ready.format == "hf" else None


def dense(made: Shape | Decoder | None) -> Shape | None:
    return made if isinstance(made, Shape) else None


def packing_of(cell: Cell, shape: Shape | None, ready: Ready | None) -> Packing | None:
    """How the cell's weights are packed, or will be packed when they are made."""
    if ready and ready.packing:
        return ready.packing
    made_here = ready is not None or (cell.source is not None and cell.source.kind == "synthetic")
    if cell.packing and made_here and shape:
        with contextlib.suppress(WeightsError):  # reported when the weights are packed
            return packed.grouped(cell.packing, shape)
    return cell.packing


def held_model(cell: Cell, ready: Ready | None, options: Options) -> Model | None:
    """The weights and KV cache as the cell's stack holds them; null if neither shape nor weights are known,
    or if its header names no memory model. `options`: resolved."""
    made = made_of(cell, ready)
    if cell.header.memory is None or (ready is None and made is None):
        return None
    known = ready.attention if ready else None
    loaded = bytes_of_shape(cell, made) if made else None
    if ready:
        loaded = _bytes_of(cell, ready) or loaded
    if loaded is None or (made is None and known is None):
        return None
    # Of an unknown architecture only the attention is known; its buffers are not counted.
    made = made or Shape("", 0, 0, 0, 0, 0, 0, 0)
    if known and isinstance(made, Shape):
        layers, kv_heads, head_dim = known["layers"], known["kv_heads"], known["head_dim"]
        made = replace(made, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    embedding = 0.0
    if ready and not ready.sizes["tied"]:
        embedding = loaded * ready.sizes["input_embedding_bytes"] / ready.sizes["model_bytes"]
    elif ready is None and not made.tied:
        embedding = loaded * lm_head_params(made) / parameters(made)
    return Model(made, loaded, embedding, kv_elements_per_token(made) * _kv_element_bytes(options))


def bytes_of_shape(cell: Cell, made: Shape | Decoder) -> float:
    """Bytes of a model's weights in the format the cell's stack loads."""
    if packing := packing_of(cell, dense(made), None):
        return sum(packed_bytes(of_shape(made), packing).values())
    if cell.weights_format == "hf":
        return _as_loaded(cell, of_shape(made))
    return synthetic.synthetic_bytes(made, cell.quant or weights.SOURCE_QUANT)


def _bytes_of(cell: Cell, ready: Ready) -> float | None:
    """As bytes_of_shape, for weights on this machine; null if they will be packed first."""
    if cell.packing and not ready.packing:
        return None
    if cell.weights_format == "hf" and ready.quant in weights.FULL_TYPES:
        return _as_loaded(cell, checkpoint.read(ready.path, needs_shape=False).loaded)
    if cell.weights_format != "gguf" or cell.quant in (None, ready.quant):
        return float(ready.sizes["model_bytes"])
    return weights.quantized_bytes(ready.header, str(cell.quant)) if ready.header else None


def _as_loaded(cell: Cell, tensors: Sequence[Tensor]) -> float:
    options = cell.options(1)
    if "dtype" not in options:
        return float(sum(tensor.bytes for tensor in tensors))
    quant = cell.quant if cell.header.memory == BITSANDBYTES else None
    return loaded_bytes(tensors, str(options["dtype"]), quant, bool(options.get("double_quant")))


def step_bytes(held: Model, ready: Ready | None) -> float:
    """Of the weights, those that a step reads: of experts, a token's."""
    if not held.made.experts:
        return held.weight_bytes
    experts = ready.sizes.get("expert_bytes", 0) / ready.sizes["model_bytes"] if ready else None
    share = expert_params(held.made) / parameters(held.made) if experts is None else experts
    return held.weight_bytes * (1 - share * (1 - held.made.expert_share))
