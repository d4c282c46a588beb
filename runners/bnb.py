"""One model with bitsandbytes' linear layers: quantized while transformers loads it, decoded by hf's loop."""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "bitsandbytes==0.50.2", "numpy==2.2.6",
# ]
#
# [tool.harness]
# summary = "bitsandbytes in transformers: int8, nf4 and fp4 made of a 16-bit checkpoint while it loads"
# weights = "hf"
# accepts = ["python>=3.10", "torch>=2.6", "transformers>=4.56", "bitsandbytes>=0.46"]
# named = ["quant", "cache"]
# borrows = "hf"
# memory = "bitsandbytes"
# published = { int8-dynamic = "int8", nf4-dynamic = "int4" }
# offers = [{ quant = ["int8", "nf4"] }]
# waits = ["int8"]
#
# # matmul_4bit, which has a GEMV for one token.
# [[tool.harness.kernel_changes]]
# variant = "int4"
# longest = 1
# then = "from a matrix-vector kernel to dequantizing the weights to 16 bits"
#
# [[tool.harness.limits]]
# when = { quant = "int8", double_quant = true }
# never = true
# says = "double_quant is of nf4 and fp4; int8 has no scales to quantize"
#
# [tool.harness.options.quant]
# type = "string"
# choices = ["int8", "nf4", "fp4"]
# default = "nf4"
# help = "type of the linear layers' weights; embeddings and lm_head stay as dtype"
#
# [tool.harness.options.double_quant]
# type = "bool"
# default = false
# help = "quantize the scales of nf4 and fp4 too; a CPU's kernel undoes that"
#
# [tool.harness.options.dtype]
# type = "string"
# choices = ["bf16", "fp16", "fp32"]
# default = "bf16"
# help = "type of unquantized tensors and of the arithmetic"
#
# [tool.harness.env.cpu]
# device = "cpu"
# variables = { UV_TORCH_BACKEND = "cpu" }
#
# [tool.harness.env.cuda]
# device = "cuda"
# variables = { UV_TORCH_BACKEND = "auto" }
# ///

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from runners import hf, hf_loaded
from runners.hf_session import DOES_NOT_FIT, HfSession
from runners.protocol import Request, Say
from runners.safetensors_folder import (
    SHARD_BYTES,
    Entry,
    Piece,
    in_float16,
    json_object,
    narrowed,
    new_folder,
    put_made,
    write_pieces,
)
from runners.torch_device import DTYPES
from runners.torch_probe import probe

__all__ = ["DOES_NOT_FIT", "dequantize", "load", "probe"]

INT8_LARGEST = 127

CLASSES = {
    "int8": bitsandbytes.nn.Linear8bitLt,
    "nf4": bitsandbytes.nn.Linear4bit,
    "fp4": bitsandbytes.nn.Linear4bit,
}
INT8_ON_RANDOM_WEIGHTS = (
    "int8 takes input columns above 6.0 out and multiplies them in 16 bits: with random weights their number "
    "is made up, and with it a part of the latency"
)


def load(request: Request) -> HfSession:
    """Load a checkpoint, quantizing its linear layers. Raises the errors of transformers and bitsandbytes."""
    model, quant = _quantized(request), request.options["quant"]
    session = HfSession(request, model, lambda: _facts(model, quant))
    session.settle()
    return session


def dequantize(request: Request, say: Say) -> dict[str, Any]:
    """Make the folder files["target"]: the checkpoint, its linear layers quantized as `load` does it and
    dequantized again, all of it in float16. Options: as for `load`."""
    began = time.monotonic()
    source, target = Path(request.model["path"]), Path(request.files["target"])
    config = json_object(source / "config.json")
    model = _quantized(request)  # not decoded: a CPU's kernel would repack the weights
    layers = {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, _LAYERS)}
    held = dict(model.named_parameters())  # a tied lm_head once
    written = [Entry(name, "F16", _size(layers.get(name), tensor)) for name, tensor in held.items()]
    with new_folder(target, written, {"config.json": in_float16(config)}, SHARD_BYTES) as places:
        pieces = []
        for number, (name, tensor) in enumerate(held.items(), 1):
            make = partial(_in_half, name, layers.get(name), tensor)
            pieces.append(Piece(number, partial(put_made, *places[name], make)))
        write_pieces(pieces, len(pieces), 1, say)
    versions = hf_loaded.versions("bitsandbytes")
    return {"tensors": len(written), "seconds": time.monotonic() - began, "versions": versions}


_LAYERS = tuple(set(CLASSES.values()))


def _size(layer: nn.Module | None, tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape) if layer is None else (layer.out_features, layer.in_features)


@torch.inference_mode()
def _in_half(name: str, layer: nn.Module | None, tensor: Tensor) -> np.ndarray:
    """One tensor in float16, a quantized layer's dequantized."""
    if isinstance(layer, bitsandbytes.nn.Linear8bitLt):
        tensor = layer.weight.data.float() * (layer.weight.SCB.float()[:, None] / INT8_LARGEST)
    elif layer is not None:
        tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return narrowed(tensor.detach().float().cpu().numpy(), name)


def _quantized(request: Request) -> nn.Module:
    # int8 writes a line for every product of 16-bit activations that are not fp16: 168 a token at 0.5B.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    options = request.options
    quant, double = options["quant"], options["double_quant"]
    if quant == "int8":
        if double:
            raise ValueError("double_quant is of nf4 and fp4; int8 has no scales to quantize")
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    else:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quant,
            bnb_4bit_use_double_quant=double,
            bnb_4bit_compute_dtype=DTYPES[options["dtype"]],
        )
    return hf.load_model(request, quantization_config=quantization)


def _facts(model: nn.Module, quant: str) -> dict[str, Any]:
    """The model as bitsandbytes loaded it, counted from its modules."""
    head = model.get_output_embeddings()
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    quantized = [m for m in linear.values() if isinstance(m, CLASSES[quant])]
    states = [m.weight.quant_state for m in quantized if quant != "int8"]
    kinds = {state.quant_type for state in states}
    # With AVX512-BF16 a CPU multiplies packed weights, in bf16; else it unpacks them at every product.
    repacked = sum(getattr(state, "packing_format_for_cpu", False) for state in states)
    synthetic = getattr(model.config, "harness_synthetic", False)
    return {
        **hf_loaded.model_facts(model, _packed),
        "versions": hf_loaded.versions("bitsandbytes"),
        "quant": "int8" if quant == "int8" else "/".join(sorted(kinds)) or None,
        "kernel_asked": CLASSES[quant].__name__,
        "leftovers": sorted(name for name, m in linear.items() if not isinstance(m, CLASSES[quant])),
        "packing": {
            "blocksize": sorted({state.blocksize for state in states}),
            "repacked_for_cpu": repacked,
            "int8_threshold": sorted({m.state.threshold for m in quantized}) if quant == "int8" else [],
        },
        "options": {"double_quant": any(state.nested for state in states)}
        | ({"dtype": "bf16"} if repacked else {}),
        "warnings": [INT8_ON_RANDOM_WEIGHTS] if quant == "int8" and synthetic else [],
    }


def _packed(module: nn.Module) -> dict[str, list[Tensor]]:
    """Scales and tables of a quantized layer, which a step reads besides its weights."""
    if isinstance(module, bitsandbytes.nn.Linear8bitLt):
        scales = module.state.SCB if module.state.SCB is not None else module.weight.SCB
        return {} if scales is None else {"int8 scales": [scales]}
    state = getattr(getattr(module, "weight", None), "quant_state", None)
    if state is None:
        return {}
    found = {"absmax": state.absmax, "table": state.code}
    if state.nested:
        found |= {"absmax of absmax": state.state2.absmax, "table of absmax": state.state2.code}
    return {name: [tensor] for name, tensor in found.items() if isinstance(tensor, Tensor)}
