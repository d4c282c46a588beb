"""One AWQ checkpoint in autoawq, the kernel chosen by name, fused or not; decoded by hf's loop."""
# /// script
# requires-python = ">=3.10,<3.14"
#
# [tool.harness]
# summary = "autoawq, of the published study, unmaintained since 2025: gptqm runs its files today"
# successor = "gptqm"
# weights = "awq"
# named = ["kernel"]
# functional = { cpu = "every product unpacks the whole matrix first" }
# extends = "hf"
# scratch = { kernel = "exllamav2" }
# cannot_truncate = [{ fuse_layers = true }]
# fused = ["fused", "fuse_layers=true"]
# offers = [{ kernel = ["gemm", "exllama", "exllamav2"], fuse_layers = [false, true] }]
#
# [[tool.harness.context]]
# when = { fuse_layers = true }
# option = "max_seq_len"
# granule = 256
# dry = false
#
# # ExLlamaV2: MAX_Q_GEMM_ROWS (q_gemm.cu). gemm: WQLinear_GEMM.forward.
# [[tool.harness.kernel_changes]]
# variant = "exllamav2"
# longest = 50
# then = "to dequantizing the weights to 16 bits for cuBLAS"
#
# [[tool.harness.kernel_changes]]
# variant = "gemm"
# longest = 1024
# then = "to dequantizing the weights to 16 bits for cuBLAS"
#
# [tool.harness.published]
# "gemm-fuse_layers=true" = "gemm-fused"
# "exllama-fuse_layers=true" = "exllama-fused"
# "exllamav2-fuse_layers=true" = "exllamav2-fused"
#
# [tool.harness.options.kernel]
# choices = ["gemm", "exllama", "exllamav2", "torch"]
# default = "gemm"
# help = "kernel of the packed matrices; gemm is autoawq's own, torch unpacks and multiplies"
#
# [tool.harness.options.fuse_layers]
# default = false
# help = "one matrix for q, k and v, flash-attn, and a cache of max_seq_len tokens allocated at once"
#
# [tool.harness.options.max_seq_len]
# type = "int"
# minimum = 1
# default-from = "tokens"
# help = "length of the cache of fused layers, in tokens; ignored without fused layers"
#
# [tool.harness.options.allow_window]
# default = false
# help = "let fused layers decode past max_seq_len, where their cache is corrupt; the record is invalid"
#
# [[tool.harness.limits]]
# when = { fuse_layers = true, allow_window = false }
# covers = "max_seq_len"
# refuses = true
# message = "past it autoawq zeroes heads of the cache, without a word"
#
# [[tool.harness.limits]]
# when = { fuse_layers = true, cache = "static" }
# never = true
# refuses = true
# message = "fused layers have a cache of their own, and take no other"
#
# [[tool.harness.limits]]
# when = { kernel = ["gemm", "exllama", "exllamav2"] }
# device = "cuda"
# message = "autoawq falls back to unpacking in PyTorch, or asserts a CUDA device"
#
# [[tool.harness.limits]]
# when = { fuse_layers = true }
# device = "cuda"
# message = "Skipping fusing modules because AWQ extension is not installed."
#
# [[tool.harness.limits]]
# when = { fuse_layers = true }
# compute_capability = "8.0"
# message = "FlashAttention only supports Ampere GPUs or newer."
#
# [[tool.harness.limits]]
# when = { kernel = ["gemm", "exllama", "exllamav2"] }
# compute_capability = "7.5"
# message = "no kernel image is available for execution on the device"
#
# # Seen in the wheels: the kernels have code of 7.5 to 9.0, torch 2.6 of 5.0 to 9.0, neither has PTX.
# [[tool.harness.limits]]
# compute_capability_below = "10.0"
# message = "no kernel image is available for execution on the device"
#
# [[tool.harness.limits]]
# bits = [4]
# message = "Only 4-bit are supported for now."
#
# [[tool.harness.limits]]
# out_features_multiple_of = 8
# message = "AssertionError"
#
# [tool.harness.env.cpu]
# device = "cpu"
# dependencies = [
#   "torch==2.13.0", "transformers==4.56.2", "accelerate==1.15.0", "autoawq==0.2.9", "numpy==2.2.6",
#   "setuptools==84.2.1", "wheel==0.48.0",
# ]
# no-build-isolation = ["autoawq"]
# variables = { UV_TORCH_BACKEND = "cpu" }
#
# # The kernels' wheel is built against torch 2.6. Fused layers alone need flash-attn, whose build takes an
# # hour where its authors' wheel cannot be had.
# [tool.harness.env.cuda]
# device = "cuda"
# requires-python = ">=3.10,<3.13"
# dependencies = [
#   "torch==2.6.0", "transformers==4.56.2", "accelerate==1.15.0", "autoawq==0.2.9", "autoawq-kernels==0.0.9",
#   "numpy==2.2.6", "setuptools==84.2.1", "wheel==0.48.0",
# ]
# no-build-isolation = ["autoawq", "autoawq-kernels", "flash-attn"]
# optional = ["flash-attn==2.7.4.post1"]
# imports = ["awq_ext", "exl_ext", "exlv2_ext"]
# ///

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import awq.models.base
import awq.modules.linear.gemm
import torch
from awq import AutoAWQForCausalLM
from torch import nn

from runners.hf import device as hf_device
from runners.hf import loading
from runners.hf.loading import UNPACKS, check_whole, kernel_facts, lacks
from runners.hf.probe import probe as torch_probe
from runners.hf.session import DOES_NOT_FIT, HfSession
from runners.protocol import Request, Say
from runners.weights.safetensors import staged

__all__ = ["DOES_NOT_FIT", "load", "probe"]

PACKAGES = ("autoawq",)
MODULES = {"gemm": "awq_ext", "exllama": "exl_ext", "exllamav2": "exlv2_ext"}  # compiled code of each kernel
KERNELS = {
    "gemm": "WQLinear_GEMM[awq_ext]",
    "exllama": "WQLinear_Exllama",
    "exllamav2": "WQLinear_ExllamaV2",
    "torch": "WQLinear_GEMM[torch]",
}
LONGEST_INPUT = 2048  # autoawq's own: exllamav2's scratch memory is for this many tokens at once
SPARE = 1  # flash-attn appends the latest token once more: the last one needs room for that
_gemm = awq.modules.linear.gemm


def load(request: Request) -> HfSession:
    """Load an AWQ checkpoint. Raises the errors of autoawq, ValueError for missing tensors."""
    options, device = request.options, hf_device.device_of(request.device)
    hf_device.prepare(device, torch.float16, options["threads"], options["expandable_segments"])
    kernel, fuse, source = options["kernel"], options["fuse_layers"], Path(request.model["path"])
    check_whole(source, options["trust_remote_code"])
    if device.type == "cpu":  # else it requires an Intel extension that current torch lacks
        awq.models.base.get_best_device = lambda: "cuda:0"
        _gemm.TRITON_AVAILABLE = False
    if kernel == "torch":
        _gemm.awq_ext, _gemm.TRITON_AVAILABLE = None, False
    with hf_device.memory_errors(), staged(source) as folder:
        model = AutoAWQForCausalLM.from_quantized(
            str(folder),
            max_seq_len=options["max_seq_len"] + SPARE if fuse else LONGEST_INPUT,
            fuse_layers=fuse,
            use_exllama=kernel == "exllama",
            use_exllama_v2=kernel == "exllamav2",
            torch_dtype=torch.float16,
            device_map={"": str(device)},
            safetensors=True,
            trust_remote_code=options["trust_remote_code"],
        ).model
    model.set_attn_implementation(options["attn"])
    loading.hold(model, options["mmap"])
    context = FusedCache(model, options["allow_window"]) if _fused(model) else None
    session = HfSession(request, model, lambda: _facts(model, kernel), context)
    session.settle()
    return session


class FusedCache:
    """The caches that fused layers allocate for themselves; see hf_cache.TransformersCache.

    Several tokens at once reset it, whatever came before. Past its end it is rolled along the wrong
    dimension, and heads are zeroed instead of tokens (autoawq 0.2.9, modules/fused/cache.py).
    """

    in_chunks = False
    same_buffers = True

    def __init__(self, model: nn.Module, allow_window: bool) -> None:
        self._model, self._allow_window = model.model, allow_window
        self._attention = [block.attn for block in model.model.blocks]
        self.capacity = self._attention[0].max_seq_len - SPARE
        self._rolls = False

    def allocate(self) -> None:
        """Allocated already."""

    def empty(self, tokens: int) -> None:
        self._rolls = tokens > self.capacity
        if self._rolls and not self._allow_window:
            raise ValueError(
                f"fused layers of max_seq_len {self.capacity} cannot hold the {tokens} tokens asked for"
            )
        self._at(0)
        self._model.last_forward_num_tokens = 0

    def _at(self, position: int) -> None:
        for attention in self._attention:
            attention.start_pos = position

    def deepen(self, tokens: int) -> bool:
        if tokens >= self.capacity:
            return False
        self._at(tokens)
        return True

    def keep(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Nothing: see restore()."""
        return []

    def restore(self, kept: list[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> None:
        """Empty it. Raises ValueError for any tokens."""
        if tokens:
            raise ValueError("fused layers cannot be cut to fewer tokens")
        self.empty(0)

    def arguments(self) -> dict[str, Any]:
        return {}

    def tokens(self) -> int | None:
        """The tokens in the cache; None once it may have rolled."""
        held = self._attention[0].start_pos
        return None if self._rolls and held else int(held)

    def facts(self) -> dict[str, Any]:
        held = [tensor for attention in self._attention for tensor in (attention.cache.k, attention.cache.v)]
        total = sum(tensor.nbytes for tensor in held)
        place = str(held[0].device)
        return {
            "options": {"cache": None, "n_ctx": None, "max_seq_len": self.capacity},
            "kv_read": "grows",
            "window": None,
            "kv_bytes_per_token": total // (self.capacity + SPARE),
            "kv_layers": {"WindowedCache": len(self._attention)},
            "holds_tokens": self.capacity,
            "memory": {place: total},
            "devices": {place: len(held)},
        }


def _fused(model: nn.Module) -> int:
    """Layers that are fused."""
    return sum(type(module).__name__ == "QuantAttentionFused" for module in model.modules())


def _name(module: nn.Module) -> str | None:
    """The kernel that a layer's forward calls; None if it is not autoawq's. Without compiled code gemm takes
    another at each call; for 1,024 tokens or more at once every kernel unpacks."""
    kind = type(module).__name__
    if kind != "WQLinear_GEMM":
        return kind if kind.startswith("WQLinear") else None
    called = "awq_ext" if _gemm.awq_ext is not None else "triton" if _gemm.TRITON_AVAILABLE else "torch"
    return f"{kind}[{called}]"


def _facts(model: nn.Module, kernel: str) -> dict[str, Any]:
    fused = _fused(model)
    return {
        **kernel_facts(model, _name, KERNELS[kernel]),
        "versions": loading.versions(*PACKAGES, *_optional("autoawq-kernels", "flash-attn")),
        "quant": "awq-int4",
        "functional": None if torch.cuda.is_available() else UNPACKS,
        "fused_layers": fused,
        "options": {"fuse_layers": fused == model.config.num_hidden_layers}
        | ({"attn": None} if fused else {}),
    } | ({"attention": "flash_attn"} if fused else {})


def _optional(*packages: str) -> list[str]:
    """The installed ones of the packages."""
    return [
        name for name in packages if next(iter(importlib.metadata.Distribution.discover(name=name)), None)
    ]


def probe(request: Request, say: Say) -> dict[str, Any]:
    """Like torch_probe.probe; `kernels`: None for kernels that run here, else why not."""
    device = hf_device.device_of(request.device)
    found = {name: lacks(module, device) for name, module in MODULES.items()}
    fused = lacks("awq_ext", device) or lacks("flash_attn", device)
    return torch_probe(request, say) | {"kernels": found | {"fused layers": fused, "torch": None}}
