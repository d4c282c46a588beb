"""One GPTQ or AWQ checkpoint in gptqmodel, the kernel chosen by name; decoded by hf's loop."""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "gptqmodel==7.6.0", "numpy==2.2.6",
# ]
#
# [tool.harness]
# summary = "gptqmodel: GPTQ and AWQ checkpoints, by today's kernels, which it compiles when first used"
# weights = "{format}"
# accepts = ["python>=3.11", "torch>=2.8", "transformers>=5.0", "gptqmodel>=7.6"]
# named = ["format", "kernel", "bits"]
# extends = "hf"
# scratch = { kernel = "exllamav2" }
# mixed_layers = true
# offers = [
#   { kernel = ["marlin", "machete", "exllamav2", "aten"] },
#   { kernel = "marlin", bits = 8 },
#   { format = "awq", kernel = ["marlin", "gemm"] },
# ]
#
# [tool.harness.options.format]
# choices = ["gptq", "awq"]
# default = "gptq"
# help = "format of the checkpoint"
#
# [tool.harness.options.kernel]
# choices = ["marlin", "machete", "exllamav2", "triton", "gemm", "aten", "torch"]
# default = "marlin"
# help = "kernel of the packed matrices; aten: PyTorch's for CPUs; torch (and GPTQ's triton) unpacks"
#
# [tool.harness.options.bits]
# choices = [4, 8]
# default = 4
# help = "bits per weight of the checkpoint"
#
# [tool.harness.options.dtype]
# choices = ["bf16", "fp16"]
# default = "fp16"
# help = "type of unquantized tensors and of the arithmetic; aten always computes in bf16"
#
# [[tool.harness.limits]]
# when = { dtype = "bf16" }
# compute_capability = "8.0"
# message = "has no bf16; use dtype fp16"
#
# # CUDA programming guide, throughput of native arithmetic instructions: 2 results of 16 bits a clock on 6.1,
# # 128 of 32 bits.
# [[tool.harness.limits]]
# when = { kernel = ["exllamav2", "gemm", "torch", "triton"], dtype = "fp16" }
# compute_capability_except = "6.1"
# message = "computes fp16 at 1/64 of the rate of fp32"
#
# [[tool.harness.limits]]
# when = { kernel = "gemm", format = "gptq" }
# never = true
# message = "gemm is a kernel of AWQ"
#
# [[tool.harness.limits]]
# when = { kernel = ["marlin", "machete", "exllamav2", "triton", "gemm"] }
# device = "cuda"
# message = "CUDA is not available."
#
# [[tool.harness.limits]]
# when = { kernel = "aten" }
# device = "cpu"
# message = "is not supported by this kernel"
#
# [[tool.harness.limits]]
# when = { kernel = ["exllamav2", "gemm", "aten"] }
# bits = [4]
# message = "supports 4 bits alone"
#
# [[tool.harness.limits]]
# when = { format = "awq" }
# bits = [4]
# message = "an AWQ checkpoint (gemm) has 4 bits"
#
# [[tool.harness.limits]]
# when = { kernel = "marlin", format = "gptq" }
# symmetric = true
# message = "supports symmetric quantization alone"
#
# [[tool.harness.limits]]
# when = { kernel = "marlin", format = "gptq" }
# compute_capability = "7.5"
# message = "GPTQ Marlin requires compute capability >= 7.5"
#
# [[tool.harness.limits]]
# when = { kernel = "marlin", format = "awq" }
# compute_capability = "8.0"
# message = "Marlin kernel only supports compute capability >= 8.0."
#
# [[tool.harness.limits]]
# when = { kernel = "machete" }
# compute_capability = "9.0"
# compute_capability_below = "9.1"
# message = "Machete kernel is Hopper-only (SM90)"
#
# [[tool.harness.limits]]
# when = { kernel = "machete" }
# in_features_multiple_of = 64
# out_features_multiple_of = 128
# message = "`in_features` must be divisible by 64 and `out_features` by 128"
#
# [[tool.harness.limits]]
# when = { kernel = "machete", format = "gptq" }
# group_sizes = [-1, 64, 128]
# message = "does not support this group_size"
#
# [[tool.harness.limits]]
# when = { kernel = ["marlin", "exllamav2"] }
# group_sizes = [-1, 32, 64, 128]
# message = "does not support this group_size"
#
# [[tool.harness.limits]]
# when = { kernel = "exllamav2" }
# in_features_multiple_of = 32
# out_features_multiple_of = 32
# message = "must be divisible by 32"
#
# [[tool.harness.limits]]
# when = { kernel = "triton", format = "awq" }
# in_features_multiple_of = 32
# out_features_multiple_of = 8
# group_sizes = [-1, 32, 64, 128]
# message = "must be divisible by 32 and 8, in groups of 32, 64, 128 or all"
#
# [[tool.harness.limits]]
# when = { kernel = "triton", format = "awq", dtype = "bf16" }
# never = true
# message = "its Triton kernel of AWQ computes in fp16 alone"
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

import os
import re
from pathlib import Path
from typing import Any

# gptqmodel 7.6 (models/auto.py) would otherwise set growing segments and two more settings, unasked. What was
# asked for, torch_device.prepare sets.
os.environ["PYTORCH_ALLOC_CONF"] = (
    os.environ.get("PYTORCH_ALLOC_CONF")
    or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    or "expandable_segments:False"
)
os.environ.setdefault("GPTQMODEL_OFFLINE", "1")  # a worker downloads nothing (utils/machete.py)

import gptqmodel.models.loader
import torch
from gptqmodel import BACKEND, GPTQModel
from gptqmodel.nn_modules.qlinear import BaseQuantLinear
from gptqmodel.quantization import FORMAT, METHOD
from gptqmodel.utils.importer import get_kernel_for_backend, validate_quant_linear
from torch import nn

from runners.hf import device as hf_device
from runners.hf import loading
from runners.hf.device import DTYPES
from runners.hf.loading import UNPACKS, check_whole, kernel_facts
from runners.hf.probe import probe as torch_probe
from runners.hf.session import DOES_NOT_FIT, HfSession
from runners.protocol import Request, Say
from runners.weights.safetensors import staged, stored_in

__all__ = ["DOES_NOT_FIT", "load", "probe"]

PACKAGES = ("gptqmodel",)
BACKENDS = {
    "gptq": {
        "marlin": BACKEND.GPTQ_MARLIN,
        "machete": BACKEND.GPTQ_MACHETE,
        "exllamav2": BACKEND.GPTQ_EXLLAMA_V2,
        "triton": BACKEND.GPTQ_TRITON,
        "aten": BACKEND.GPTQ_TORCH_ATEN,
        "torch": BACKEND.GPTQ_TORCH,
    },
    "awq": {
        "marlin": BACKEND.AWQ_MARLIN,
        "machete": BACKEND.AWQ_MACHETE,
        "exllamav2": BACKEND.AWQ_EXLLAMA_V2,
        "triton": BACKEND.AWQ_GEMM_TRITON,
        "gemm": BACKEND.AWQ_GEMM,
        "aten": BACKEND.AWQ_TORCH_ATEN,
        "torch": BACKEND.AWQ_TORCH,
    },
}
STORED_AS = {"gptq": (METHOD.GPTQ, FORMAT.GPTQ), "awq": (METHOD.AWQ, FORMAT.GEMM)}
NEEDS_CUTLASS = (
    "needs a download, CUTLASS, and no worker downloads anything: once, with this environment's Python, run "
    "python -c \"from gptqmodel import extension; extension.load('machete')\""
)


def load(request: Request) -> HfSession:
    """Load a checkpoint. Raises the errors of gptqmodel, ValueError for missing tensors."""
    options, device = request.options, hf_device.device_of(request.device)
    format, kernel, dtype = options["format"], options["kernel"], DTYPES[options["dtype"]]
    hf_device.prepare(device, dtype, options["threads"], options["expandable_segments"])
    source, trusted = Path(request.model["path"]), options["trust_remote_code"]
    if kernel not in BACKENDS[format]:
        raise ValueError(f"{kernel} is not a kernel of {format}; known: {', '.join(BACKENDS[format])}")
    known, backend = check_whole(source, trusted, mixed=True), BACKENDS[format][kernel]
    gptqmodel.models.loader.load_hf_tokenizer = lambda *_, **__: None  # ids suffice; some have none
    with hf_device.memory_errors(), staged(source) as folder:
        # By name: by default it chooses a kernel itself, and reports it only in its log.
        wrapped = GPTQModel.load(
            str(folder), backend=backend, device=str(device), dtype=dtype, trust_remote_code=trusted
        )
    model, bits = wrapped.model, wrapped.quantize_config.bits
    widths = sorted({getattr(module, "bits", bits) for module in model.modules() if _name(module)})
    unpacked = {name.removesuffix(".weight") for name in stored_in(source) if name.endswith(".weight")}
    model.set_attn_implementation(options["attn"])
    loading.hold(model, options["mmap"])
    expected = get_kernel_for_backend(backend, *STORED_AS[format]).__name__
    facts = {"quant": f"{format}-int{'/'.join(map(str, widths))}", "versions": loading.versions(*PACKAGES)}
    facts["functional"] = UNPACKS if kernel == "torch" and device.type == "cpu" else None
    session = HfSession(
        request,
        model,
        lambda: kernel_facts(model, _name, expected, known, unpacked) | facts | {"options": {"bits": bits}},
    )
    session.settle()  # compiles kernels
    return session


def _name(module: nn.Module) -> str | None:
    """The class of a packed layer, which names its kernel; but on a CPU aten's may unpack instead, if it
    finds that it is not for inference."""
    if not isinstance(module, BaseQuantLinear):
        return None
    unpacks = getattr(module, "linear_mode", None) == "train"
    return type(module).__name__ + ("[torch]" if unpacks else "")


def probe(request: Request, say: Say) -> dict[str, Any]:
    """Like torch_probe.probe; if nothing is measured also `kernels`: None for kernels that run here, else why
    not. The first call compiles each kernel, which takes minutes."""
    facts = torch_probe(request, say)
    if request.options.get("measure"):
        return facts
    device, kernels = hf_device.device_of(request.device), {}
    for format, of_format in BACKENDS.items():
        for name, backend in of_format.items():
            say(f"{format} {name}")
            kernel = get_kernel_for_backend(backend, *STORED_AS[format])
            kernels[f"{format} {name}"] = _refusal(kernel, device)
    return facts | {"kernels": kernels}


def _refusal(kernel: type[BaseQuantLinear], device: torch.device) -> str | None:
    """gptqmodel's own reason to refuse a kernel for 4 bits, group size 128, fp16; None if it accepts."""
    settings = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "pack_dtype": torch.int32}
    works, why = validate_quant_linear(kernel, device=device, dtype=torch.float16, **settings)
    if works:
        return None
    if "GPTQMODEL_OFFLINE" in str(why):
        return NEEDS_CUTLASS
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", str(why).strip().splitlines()[0])
