"""One model with torchao's weights: quantized while transformers loads it, decoded by hf's loop."""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "torchao==0.18.0", "numpy==2.2.6",
# ]
#
# [tool.harness]
# summary = "torchao in transformers: int8 and int4 weights made of a 16-bit checkpoint while it loads"
# weights = "hf"
# accepts = ["python>=3.10", "torch>=2.6", "transformers>=4.56", "torchao>=0.17"]
# named = ["quant", "cache"]
# extends = "hf"
# offers = [{ quant = ["int8", "int4"] }]
#
# # torchao's kernels for 4 bits on a CPU need AVX-512 and its prototypes; the others are of CUDA.
# [[tool.harness.limits]]
# when = { quant = "int4" }
# device = "cuda"
# message = "Torch not compiled with CUDA enabled"
#
# [[tool.harness.limits]]
# when = { quant = "int4", dtype = ["fp16", "fp32"] }
# never = true
# message = "tinygemm computes in bf16"
#
# [[tool.harness.limits]]
# when = { dtype = "bf16" }
# compute_capability = "8.0"
# message = "has no bf16; use dtype fp16"
#
# [tool.harness.loads]
# int8 = "quantization_config=TorchAoConfig(Int8WeightOnlyConfig())"
# int4 = """quantization_config=TorchAoConfig(Int4WeightOnlyConfig( \
#   int4_packing_format="tile_packed_to_4d"))"""
#
# [tool.harness.options.quant]
# choices = ["int8", "int4"]
# default = "int8"
# help = "type of the linear layers' weights; embeddings and lm_head stay as dtype"
#
# [tool.harness.options.dtype]
# choices = ["bf16", "fp16", "fp32"]
# default = "bf16"
# help = "type of unquantized tensors and of the arithmetic"
#
# [tool.harness.options.compile]
# default = true
# help = "torch.compile of the decode step; without it a CPU unpacks every matrix at every product"
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

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
from transformers import TorchAoConfig

from runners.hf import loading
from runners.hf.device import DTYPES
from runners.hf.probe import probe
from runners.hf.session import DOES_NOT_FIT, HfSession
from runners.protocol import Request, Say
from runners.stacks import hf
from runners.weights.safetensors import narrowed, stored_in, write_in_float16

__all__ = ["DOES_NOT_FIT", "dequantize", "load", "probe"]

CLASSES = {"Int8Tensor": "int8", "Int4TilePackedTo4dTensor": "int4"}


def load(request: Request) -> HfSession:
    """Load a checkpoint, quantizing its linear layers. Raises the errors of transformers and torchao, Refused
    for a checkpoint that is quantized already."""
    path, model = Path(request.model["path"]), _quantized(request)
    facts = hf.facts_of_torchao(path, model, request)
    kernel = facts["kernel_asked"].partition("[")[2].removesuffix("]")
    facts["quant"] = CLASSES.get(kernel, kernel)
    session = HfSession(request, model, lambda: loading.model_facts(model, name=loading.held_by) | facts)
    session.settle()
    return session


def dequantize(request: Request, say: Say) -> dict[str, Any]:
    """Make the folder files["target"]: the checkpoint, its linear layers quantized as `load` does it and
    dequantized again, all of it in float16. Options: as for `load`."""
    began = time.monotonic()
    made = {  # a tied lm_head once
        name: (tuple(tensor.shape), partial(_in_half, name, tensor))
        for name, tensor in _quantized(request).named_parameters()
    }
    tensors = write_in_float16(request, made, say)
    return {"tensors": tensors, "seconds": time.monotonic() - began, "versions": loading.versions("torchao")}


@torch.inference_mode()
def _in_half(name: str, tensor: Tensor) -> np.ndarray:
    """One tensor in float16, a quantized one dequantized."""
    whole = tensor.dequantize() if hasattr(tensor, "__tensor_flatten__") else tensor
    return narrowed(whole.detach().float().cpu().numpy(), name)


def _quantized(request: Request) -> nn.Module:
    path, options = Path(request.model["path"]), request.options
    loading.check_unquantized(path, stored_in(path), request.stack)
    of_4_bits = partial(Int4WeightOnlyConfig, int4_packing_format="tile_packed_to_4d")
    chosen = Int8WeightOnlyConfig() if options["quant"] == "int8" else of_4_bits()
    model = hf.load_model(request, quantization_config=TorchAoConfig(chosen))
    loading.check_types(path, model, DTYPES[options["dtype"]])
    return model
