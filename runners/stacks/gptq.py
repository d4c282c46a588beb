"""One GPTQ checkpoint in auto-gptq, the kernel chosen by name; decoded by hf's loop."""
# /// script
# requires-python = ">=3.10,<3.14"
#
# [tool.harness]
# summary = "auto-gptq, of the published study, unmaintained since 2025: gptqm runs its files today"
# successor = "gptqm"
# weights = "gptq"
# layouts = ["gptq"]  # it would read every zero point of gptq_v2 off by one
# named = ["kernel", "bits"]
# functional = { cpu = "every product unpacks the whole matrix first" }
# extends = "hf"
# scratch = { kernel = "exllamav2" }
# published = { exllamav2-4 = "int4-exllamav2", marlin-4 = "int4-marlin" }
# offers = [{ kernel = ["exllamav2", "marlin"] }]
#
# # ExLlamaV2: MAX_Q_GEMM_ROWS (q_gemm.cu).
# [[tool.harness.kernel_changes]]
# variant = "exllamav2"
# longest = 50
# then = "to dequantizing the weights to 16 bits for cuBLAS"
#
# # auto-gptq would choose silently: exllamav2 if it loads, else any other kernel.
# [tool.harness.options.kernel]
# choices = ["exllamav2", "marlin", "exllama", "cuda", "torch"]
# default = "exllamav2"
# help = "kernel of the packed matrices; cuda is auto-gptq's first one, torch unpacks and multiplies"
#
# [tool.harness.options.bits]
# choices = [4, 8]
# default = 4
# help = "bits per weight of the checkpoint"
#
# [[tool.harness.limits]]
# when = { kernel = ["exllamav2", "marlin", "exllama", "cuda"] }
# device = "cuda"
# message = "auto-gptq falls back to unpacking in PyTorch (Marlin: no CUDA GPUs are available)"
#
# [[tool.harness.limits]]
# when = { kernel = ["exllamav2", "exllama"] }
# bits = [4]
# message = "auto-gptq takes its cuda kernel for other bits, whatever was asked for"
#
# [[tool.harness.limits]]
# when = { kernel = ["exllamav2", "exllama"] }
# in_features_multiple_of = 32
# out_features_multiple_of = 32
# message = "AssertionError"
#
# [[tool.harness.limits]]
# when = { kernel = "cuda" }
# in_features_multiple_of = 64
# out_features_multiple_of = 64
# message = "auto-gptq falls back to unpacking in PyTorch"
#
# [[tool.harness.limits]]
# when = { kernel = "marlin" }
# in_features_multiple_of = 128
# out_features_multiple_of = 256
# message = "`infeatures` must be divisible by 128 and `outfeatures` by 256."
#
# [[tool.harness.limits]]
# when = { kernel = "marlin" }
# bits = [4]
# message = "The quantized model uses a bitwidth different than 4"
#
# [[tool.harness.limits]]
# when = { kernel = "marlin" }
# group_sizes = [-1, 128]
# message = "The quantized model uses a group size that is not 128 or -1"
#
# [[tool.harness.limits]]
# when = { kernel = "marlin" }
# symmetric = true
# message = "The quantized model uses asymmetric quantization"
#
# [[tool.harness.limits]]
# when = { kernel = "marlin" }
# act_order = false
# message = "The quantized model uses act-order (also called desc-act) scheme"
#
# [[tool.harness.limits]]
# when = { kernel = "marlin" }
# sharded = false
# message = "The loading of sharded checkpoints with Marlin is currently not supported."
#
# [[tool.harness.limits]]
# when = { kernel = "marlin" }
# compute_capability = "8.0"
# message = """Can not use Marlin int4*fp16 kernel with a device of this compute capability, \
#   the minimum is 8.0."""
#
# # Seen in the wheels: the kernels have code of 6.0 to 9.0, torch 2.2.2 of 5.0 to 9.0 and no PTX.
# [[tool.harness.limits]]
# when = { kernel = ["exllamav2", "marlin", "exllama", "cuda"] }
# compute_capability = "6.0"
# message = "no kernel image is available for execution on the device"
#
# # CUDA programming guide, throughput of native arithmetic instructions: 2 results of 16 bits a clock on 6.1,
# # 128 of 32 bits.
# [[tool.harness.limits]]
# when = { kernel = ["exllamav2", "exllama"] }
# compute_capability_except = "6.1"
# message = "computes fp16 at 1/64 of the rate of fp32"
#
# [[tool.harness.limits]]
# compute_capability_below = "10.0"
# message = "no kernel image is available for execution on the device"
#
# [tool.harness.env.cpu]
# device = "cpu"
# dependencies = [
#   "torch==2.13.0", "transformers==4.56.2", "accelerate==1.15.0", "peft==0.18.1", "datasets==5.0.1",
#   "auto-gptq==0.7.1", "numpy==2.2.6",
# ]
# variables = { UV_TORCH_BACKEND = "cpu" }
#
# # The wheel's kernels are built against torch 2.2: with others they do not load, and auto-gptq is silent.
# [tool.harness.env.cuda]
# device = "cuda"
# requires-python = ">=3.10,<3.12"
# dependencies = [
#   "torch==2.2.2", "transformers==4.56.2", "accelerate==1.15.0", "peft==0.18.1", "datasets==3.6.0",
#   "auto-gptq==0.7.1", "numpy==1.26.4", "pyarrow<20", "pandas<2.3",
# ]
# imports = ["exllamav2_kernels", "autogptq_marlin_cuda", "exllama_kernels", "autogptq_cuda_64"]
# ///

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig
from torch import nn

from runners.hf import device as hf_device
from runners.hf import loading
from runners.hf.loading import UNPACKS, check_bits, check_whole, kernel_facts, lacks
from runners.hf.probe import probe as torch_probe
from runners.hf.session import DOES_NOT_FIT, HfSession
from runners.protocol import Request, Say
from runners.weights.safetensors import json_object, staged

__all__ = ["DOES_NOT_FIT", "load", "probe"]

PACKAGES = ("auto-gptq",)
MODULES = {  # compiled code; without it auto-gptq takes another kernel
    "exllamav2": "exllamav2_kernels",
    "marlin": "autogptq_marlin_cuda",
    "exllama": "exllama_kernels",
    "cuda": "autogptq_cuda_64",
}
SINCE = {"marlin": (8, 0)}  # compute capability


def load(request: Request) -> HfSession:
    """Load a GPTQ checkpoint. Raises the errors of auto-gptq, ValueError for missing tensors."""
    options, device = request.options, hf_device.device_of(request.device)
    hf_device.prepare(device, torch.float16, options["threads"], options["expandable_segments"])
    kernel, source = options["kernel"], Path(request.model["path"])
    known = check_whole(source, options["trust_remote_code"])
    with hf_device.memory_errors(), staged(source) as folder:  # for Marlin it writes a copy there
        wrapped = AutoGPTQForCausalLM.from_quantized(
            str(folder),
            device=str(device),
            torch_dtype=torch.float16,
            use_safetensors=True,
            model_basename="model",  # the checked file; the default is gptq_model-4bit-128g
            quantize_config=_settings(source),
            use_marlin=kernel == "marlin",
            disable_exllama=kernel != "exllama",
            disable_exllamav2=kernel != "exllamav2",
            local_files_only=True,
            trust_remote_code=options["trust_remote_code"],
        )
    model, bits = wrapped.model, wrapped.quantize_config.bits
    check_bits(source, model, _name, bits)
    if kernel == "torch":
        for module in model.modules():
            if hasattr(module, "autogptq_cuda_available"):
                module.autogptq_cuda_available = False
    model.set_attn_implementation(options["attn"])
    loading.hold(model, options["mmap"])
    session = HfSession(request, model, lambda: _facts(model, kernel, bits, known))
    session.settle()
    return session


def _settings(source: Path) -> BaseQuantizeConfig | None:
    """The settings in the checkpoint's config.json; None if auto-gptq finds its own file.

    Raises ValueError for zero points in a format that auto-gptq would misread.
    """
    own_file = source / "quantize_config.json"
    inline = json_object(source / "config.json").get("quantization_config") or {}
    settings = inline | (json_object(own_file) if own_file.exists() else {})
    if settings.get("checkpoint_format") == "gptq_v2":
        raise ValueError(f"{source}: is gptq_v2, which auto-gptq would read with every zero point off by one")
    if own_file.exists():
        return None
    known = {key: inline[key] for key in ("bits", "group_size", "desc_act", "sym") if key in inline}
    return BaseQuantizeConfig(**({"desc_act": False} | known))  # its own default is act-order


def _name(module: nn.Module) -> str | None:
    """The kernel that a layer's forward calls; None if it is not auto-gptq's."""
    kind = getattr(module, "QUANT_TYPE", None)
    if kind in ("cuda", "cuda-old"):  # it also unpacks for prompts of 128 tokens or more
        kind = "cuda" if module.autogptq_cuda_available and module.qweight.is_cuda else "torch"
    return kind and f"QuantLinear[{kind}]"


def _facts(model: nn.Module, kernel: str, bits: int, known: set[str]) -> dict[str, Any]:
    return {
        **kernel_facts(model, _name, f"QuantLinear[{kernel}]", known),
        "versions": loading.versions(*PACKAGES),
        "quant": f"gptq-int{bits}",
        "functional": None if torch.cuda.is_available() else UNPACKS,
        "options": {"bits": bits},
    }


def probe(request: Request, say: Say) -> dict[str, Any]:
    """Like torch_probe.probe; `kernels`: None for kernels that run here, else why not."""
    device = hf_device.device_of(request.device)
    found = {name: lacks(module, device, SINCE.get(name)) for name, module in MODULES.items()}
    return torch_probe(request, say) | {"kernels": found | {"torch": None}}
