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
# extends = "hf"
# memory = "bitsandbytes"
# applies = { bitsandbytes = ["quant", "double_quant"] }
# published = { int8-dynamic = "int8", nf4-dynamic = "int4" }
# offers = [{ quant = ["int8", "nf4"] }, { quant = ["int8", "nf4"], dtype = "fp16" }]
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
# message = "double_quant is of nf4 and fp4; int8 has no scales to quantize"
#
# [[tool.harness.limits]]
# when = { dtype = "bf16" }
# compute_capability = "8.0"
# message = "has no bf16; use dtype fp16"
#
# # CUDA programming guide, throughput of native arithmetic instructions: 2 results of 16 bits a clock on 6.1,
# # 128 of 32 bits.
# [[tool.harness.limits]]
# when = { dtype = "fp16" }
# compute_capability_except = "6.1"
# message = "computes fp16 at 1/64 of the rate of fp32; use dtype fp32"
#
# [tool.harness.first]
# order = 3
# cpu = "# - {stack: bnb, quant: [int8, nf4]}   # bitsandbytes; first: harness env create bnb"
# cuda = "- {stack: bnb, quant: [int8, nf4], dtype: {dtype}}  # bitsandbytes"
#
# [tool.harness.loads]
# int8 = "quantization_config=BitsAndBytesConfig(load_in_8bit=True)"
# fp4 = "quantization_config=BitsAndBytesConfig(load_in_4bit=True)"
# nf4 = """quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", \
#   bnb_4bit_compute_dtype="bfloat16")"""
#
# [tool.harness.options.quant]
# choices = ["int8", "nf4", "fp4"]
# default = "nf4"
# help = "type of the linear layers' weights; embeddings and lm_head stay as dtype"
#
# [tool.harness.options.double_quant]
# default = false
# help = "quantize the scales of nf4 and fp4 too; a CPU's kernel undoes that"
#
# [tool.harness.options.dtype]
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
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from runners.hf import loading
from runners.hf.device import DTYPES
from runners.hf.probe import probe
from runners.hf.session import DOES_NOT_FIT, HfSession
from runners.protocol import Refused, Request, Say
from runners.stacks import hf
from runners.weights.safetensors import narrowed, stored_in, write_in_float16

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
    """Load a checkpoint, quantizing its linear layers unless it holds them quantized. Raises the errors of
    transformers and bitsandbytes, Refused for a checkpoint of another type."""
    model, quant = _quantized(request), request.options["quant"]
    session = HfSession(request, model, lambda: _facts(model, quant))
    session.settle()
    return session


def dequantize(request: Request, say: Say) -> dict[str, Any]:
    """Make the folder files["target"]: the checkpoint, its linear layers quantized as `load` does it and
    dequantized again, all of it in float16. Options: as for `load`."""
    began = time.monotonic()
    model = _quantized(request)  # not decoded: a CPU's kernel would repack the weights
    layers = {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, _LAYERS)}
    made = {  # a tied lm_head once
        name: (_size(layers.get(name), tensor), partial(_in_half, name, layers.get(name), tensor))
        for name, tensor in model.named_parameters()
    }
    tensors = write_in_float16(request, made, say)
    versions = loading.versions("bitsandbytes")
    return {"tensors": tensors, "seconds": time.monotonic() - began, "versions": versions}


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
    options, path = request.options, Path(request.model["path"])
    quant, double, dtype = options["quant"], options["double_quant"], DTYPES[options["dtype"]]
    if quant == "int8":
        if double:
            raise ValueError("double_quant is of nf4 and fp4; int8 has no scales to quantize")
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    else:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quant,
            bnb_4bit_use_double_quant=double,
            bnb_4bit_compute_dtype=dtype,
        )
    if stored := _stored_as(path):
        _check_type(path, {stored}, quant, double)
    else:
        loading.check_unquantized(path, stored_in(path), request.stack)
    model = hf.load_model(request, quantization_config=quantization)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _LAYERS)}
    _check_type(path, {_type_of(layer) for layer in layers.values()}, quant, double)
    loading.check_types(path, model, dtype, _LAYERS)
    for name, layer in layers.items():
        weight = layer.weight
        held = weight.shape if quant == "int8" else weight.quant_state.shape
        if tuple(held) != (layer.out_features, layer.in_features):  # quantizing, transformers does not look
            raise ValueError(f"{path}: its {name}.weight has another size than in its config.json")
        if quant != "int8":
            layer.compute_dtype = dtype  # a checkpoint that bitsandbytes wrote may name another
    return model


def _stored_as(source: Path) -> tuple[str, bool] | None:
    """The type of a checkpoint that bitsandbytes wrote, and whether its scales are quantized; None for any
    other checkpoint. The defaults are those of BitsAndBytesConfig."""
    given = loading.quantization_in(source)
    if given.get("quant_method") != "bitsandbytes":
        return None
    if given.get("load_in_8bit"):
        return "int8", False
    return given.get("bnb_4bit_quant_type", "fp4"), bool(given.get("bnb_4bit_use_double_quant"))


def _type_of(layer: nn.Module) -> tuple[str, bool]:
    """The type that a layer's weights have, and whether its scales are quantized."""
    if isinstance(layer, bitsandbytes.nn.Linear8bitLt):
        return str(layer.weight.dtype).removeprefix("torch."), False
    state = layer.weight.quant_state
    return state.quant_type, state.nested


def _check_type(source: Path, found: Collection[tuple[str, bool]], quant: str, double: bool) -> None:
    """Raises Refused for other types than the requested one; those of quantized layers, or of their file."""
    if found != {(quant, double)}:
        has = " and ".join(_named(*each) for each in sorted(found)) or "no quantized layer"
        raise Refused(
            f"{source}: holds {has}, and {_named(quant, double)} was requested: request what it holds, or"
            " name the 16-bit checkpoint that it was made of"
        )


def _named(quant: str, double: bool) -> str:
    return quant + (" with double_quant" if double else "")


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
        **loading.model_facts(model, _packed),
        "versions": loading.versions("bitsandbytes"),
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
