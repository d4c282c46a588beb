"""A model as the stack of a cell holds it in memory: weights and KV cache in bytes, by config and headers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from harness.analysis.traffic import nominal_bits
from harness.config.plan import Cell
from harness.models import make
from harness.models.locate import Ready, WeightsError
from harness.stacks.header import Options, holds
from harness.theory import memory as theory_memory
from harness.theory.decoder import (
    Decoder,
    dense,
    dense_like,
    kv_elements_per_token,
    lm_head_params,
    parameters,
)
from harness.theory.ggml_quants import quantized
from harness.theory.ggml_types import element_bytes
from harness.theory.loaded_sizes import ELEMENT_BYTES, loaded_bytes
from harness.theory.memory import BITSANDBYTES, LLAMA_CPP, Engine, LlamaCpp, Model, Torch
from harness.theory.packed_sizes import Packing, packed_bytes
from harness.theory.split_weights import Placement
from harness.theory.tensors import Tensor, of_shape

_UNKNOWN = dense("", 0, 0, 0, 0, 0, 0, 0)


def engine_of(cell: Cell, options: Options, on_gpu: bool, made: Decoder) -> Engine:
    """The memory model of the cell's stack. `options`: resolved."""
    if cell.header.memory == LLAMA_CPP:
        ubatch = min(int(options.get("n_ubatch") or 512), int(options.get("n_batch") or 512))
        return LlamaCpp(on_gpu, bool(options.get("flash_attn")), ubatch, bool(options.get("swa_full")))
    scratch = 0.0
    if on_gpu and cell.header.scratch and holds(cell.header.scratch, options):
        scratch = theory_memory.exllama_v2_scratch(made)
    return Torch(on_gpu, "static" if cell.header.context_of(options) else "dynamic", scratch)


def kv_element_bytes(options: Options) -> float:
    """Mean bytes per K or V element; 16 bits if the stack has no option for it."""
    if "dtype" in options:
        return ELEMENT_BYTES[str(options["dtype"])]
    types = (str(options.get(name, "f16")) for name in ("type_k", "type_v"))
    return sum(map(element_bytes, types)) / 2


def made_of(cell: Cell, ready: Ready | None) -> Decoder | None:
    """The model, by its config or its weights."""
    return cell.model.made or (ready.decoder if ready else None)


def trained_context(cell: Cell, ready: Ready | None) -> int | None:
    """Tokens that the model was trained on; None if neither config nor weights state it."""
    if ready and ready.header:
        return ready.header.integer(f"{ready.architecture}.context_length")
    made = made_of(cell, ready)
    return made.context if made else None


def packing_of(cell: Cell, made: Decoder | None, ready: Ready | None) -> Packing | None:
    """How the cell's weights are packed, or will be packed when they are made."""
    if ready and ready.packing:
        return ready.packing
    made_here = ready is not None or (cell.source is not None and cell.source.kind == "synthetic")
    if cell.packing and made_here and made and made.is_dense:
        with contextlib.suppress(WeightsError):  # reported when the weights are packed
            return make.grouped_layers(cell.packing, made)
    return cell.packing


def held_model(cell: Cell, ready: Ready | None, options: Options) -> Model | None:
    """The weights and KV cache as the cell's stack holds them; None if neither shape nor weights are known,
    or if its header names no memory model. `options`: resolved."""
    return _loaded_model(cell, ready, options) if cell.header.memory else None


def _loaded_model(cell: Cell, ready: Ready | None, options: Options) -> Model | None:
    """As held_model, whatever the memory model; None also for a stack that loads no weights."""
    made = made_of(cell, ready)
    if not cell.header.formats:
        return None
    attention = ready.attention if ready else None
    loaded = (_bytes_of(cell, ready) if ready else None) or (bytes_of_shape(cell, made) if made else None)
    if loaded is None or (made is None and attention is None):
        return None
    # Of an unknown architecture only the attention is known; its buffers are not counted.
    if made is None or (attention and made.is_dense):
        made = dense_like(made or _UNKNOWN, **(attention or {}))
    if ready is None or _is_dequantized(cell, ready):
        untied = 0.0 if made.tied else lm_head_params(made) / parameters(made)
    else:
        sizes = ready.sizes
        untied = 0.0 if sizes["tied"] else sizes["input_embedding_bytes"] / sizes["model_bytes"]
    return Model(made, loaded, loaded * untied, kv_elements_per_token(made) * kv_element_bytes(options))


def bytes_of_shape(cell: Cell, made: Decoder) -> float:
    """Bytes of a model's weights in the format the cell's stack loads."""
    if packing := packing_of(cell, made, None):
        return sum(packed_bytes(of_shape(made), packing).values())
    if cell.weights_format == "hf":
        return _as_loaded(cell, of_shape(made))
    return make.synthetic_bytes(made, cell.quant or make.SOURCE_QUANT)


def _bytes_of(cell: Cell, ready: Ready) -> float | None:
    """Like bytes_of_shape, for weights on this machine; None if they will be packed first, or dequantized
    while they load."""
    if (cell.packing and not ready.packing) or _is_dequantized(cell, ready):
        return None
    if cell.weights_format == "hf" and ready.quant in make.FULL_TYPES:
        return _as_loaded(cell, ready.loaded)
    if cell.weights_format != "gguf" or cell.quant in (None, ready.quant):
        return float(ready.sizes["model_bytes"])
    return make.quantized_bytes(ready.header, str(cell.quant)) if ready.header else None


def _is_dequantized(cell: Cell, ready: Ready | None) -> bool:
    stored = ready.stored if ready else None
    return stored is not None and stored.method in cell.header.dequantizes


def _as_loaded(cell: Cell, tensors: Sequence[Tensor]) -> float:
    options, bits = cell.options(1), nominal_bits(cell.quant)
    if "dtype" not in options:
        quant = {4: "nf4", 8: "int8"}.get(bits or 16)  # scales of the engine's own may differ a little
        return loaded_bytes(tensors, "bf16", quant) if quant else float(sum(each.bytes for each in tensors))
    quant = cell.quant if cell.header.memory == BITSANDBYTES else None
    return loaded_bytes(tensors, str(options["dtype"]), quant, bool(options.get("double_quant")))


def placement_of(options: Options) -> Placement | None:
    """The placement in the options; None: every tensor goes where its layer is."""
    experts, tensors = int(options.get("n_cpu_moe") or 0), str(options.get("override_tensor") or "")
    layers = int(options.get("gpu_layers", -1) or 0)
    return Placement(experts, tensors, layers) if experts or tensors or layers != -1 else None


def _tensors(cell: Cell, ready: Ready | None) -> Sequence[Tensor]:
    """The tensors as the stack loads them; empty if unknown."""
    if ready and ready.header and cell.quant in (None, ready.quant):
        return [*ready.header.tensors.values()]
    made = made_of(cell, ready)
    return quantized(made, cell.quant or make.SOURCE_QUANT) if made else ()
