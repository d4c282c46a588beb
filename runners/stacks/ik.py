"""One model in ik_llama.cpp: a GGUF, of its own types too, decoded greedily by llama.cpp's session."""
# /// script
# requires-python = ">=3.10"
# dependencies = ["ik-llama-cpp-python==0.1.5", "gguf==0.19.0", "numpy==2.2.6"]
#
# [tool.harness]
# summary = "ik_llama.cpp, a fork of llama.cpp with its own types and kernels, on CPUs (PyPI's wheels)"
# weights = "gguf"
# named = ["quant"]
# memory = "llama.cpp"
# program = "llama-server --model {}"
#
# [[tool.harness.tune]]
# settings = [{ repack = false }, { repack = true, mmap = false }]
#
# [[tool.harness.limits]]
# when = { flash_attn = false, type_v = ["q8_0", "q6_0", "q5_0", "q5_1", "q4_0", "q4_1"] }
# never = true
# message = "V cache quantization requires flash_attn"
#
# [[tool.harness.limits]]
# when = { repack = true, mmap = true }
# never = true
# refuses = true
# message = "ik_llama.cpp repacks only weights that it reads: repack: true needs mmap: false"
#
# [[tool.harness.context]]
# option = "n_ctx"
# granule = 256
# dry = false
#
# [tool.harness.options.quant]
# type = "string"
# choices = [
#   "f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "q2_k", "q3_k_s", "q3_k_m", "q3_k_l",
#   "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "iq3_xxs", "iq3_s", "iq3_m", "iq4_nl", "iq4_xs",
#   "iq2_k", "iq2_kl", "iq3_kt", "iq3_ks", "iq3_k", "iq4_kt", "iq4_kss", "iq4_ks", "iq4_k", "iq5_ks",
#   "iq5_k", "iq6_k",
# ]
# help = "type of the weights, as its llama-quantize names it; default: whatever the file holds"
#
# [tool.harness.options.threads]
# type = "int"
# minimum = 1
# maximum = 512  # GGML_MAX_N_THREADS
# default-from = "threads"
# flag = "--threads {}"
# help = "CPU threads, for prompt and decode alike"
#
# [tool.harness.options.n_ctx]
# type = "int"
# minimum = 1
# maximum = 2147483392  # positions are int32
# default-from = "tokens"
# help = "KV cells to allocate, rounded up to 256 (32 without flash_attn); default: prompt + new tokens"
#
# [tool.harness.options.n_batch]
# minimum = 1
# default = 512
# flag = "--batch-size {}"
# help = "most prompt tokens in one llama_decode; at most n_ctx"
#
# [tool.harness.options.n_ubatch]
# minimum = 1
# default = 512
# flag = "--ubatch-size {}"
# help = "most prompt tokens in one pass over the weights; at most n_batch"
#
# # Its own default, which its kernels for CPUs are made for; llamacpp's is off.
# [tool.harness.options.flash_attn]
# default = true
# flag = "--flash-attn {}"
# help = "flash attention, on or off"
#
# [tool.harness.options.type_k]
# choices = ["f16", "bf16", "q8_0", "q8_kv", "q6_0", "q5_0", "q5_1", "q4_0", "q4_1"]
# default = "f16"
# flag = "--cache-type-k {}"
# help = "type of the K cache"
#
# [tool.harness.options.type_v]
# choices = ["f16", "bf16", "q8_0", "q6_0", "q5_0", "q5_1", "q4_0", "q4_1"]
# default = "f16"
# flag = "--cache-type-v {}"
# help = "type of the V cache; a quantized one needs flash_attn"
#
# [tool.harness.options.mmap]
# default = true
# flag = { off = "--no-mmap" }
# help = "map the file instead of reading it into memory"
#
# [tool.harness.options.repack]
# default = false
# flag = { on = "--run-time-repack" }
# help = "interleave rows of the weights while they are read; needs mmap: false"
#
# [tool.harness.env.cpu]
# device = "cpu"
# ///

from __future__ import annotations

import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runners.llamacpp import weights
from runners.llamacpp.account import parts
from runners.llamacpp.lib import LOG, DoesNotFit, lib, load_model, make_context, quant_of, system_info
from runners.llamacpp.session import LlamaSession, all_versions
from runners.llamacpp.weights import convert, quantize
from runners.protocol import Request, Say
from runners.stacks.llamacpp import tokenize

__all__ = ["DOES_NOT_FIT", "convert", "dequantize", "load", "probe", "quantize", "tokenize"]

DOES_NOT_FIT: tuple[type[BaseException], ...] = (DoesNotFit, MemoryError)


class IkSession(LlamaSession):
    """One model and one context; see runners.protocol.Session."""

    def __init__(self, request: Request, model: int, context: int) -> None:
        super().__init__(request, model, context)
        self._path = Path(request.model["path"])

    def routing(self, prompt: list[int], new_tokens: int) -> None:
        """Not heard: its mixtures choose experts inside fused operations."""

    def versions(self) -> dict[str, str]:
        return all_versions(_engine())

    def devices(self) -> list[dict[str, Any]]:
        return [{"name": "CPU", "description": "CPU", "type": "cpu", "memory_bytes": 0}]

    def facts(self) -> dict[str, Any]:
        """Its counts have a tied lm_head twice, as it is in memory without mmap; here it counts once."""
        found = super().facts()
        tied = not any(lib.has_tensor(path, "output.weight") for path in parts(self._path))
        repeated = lib.tensor(self._model, "token_embd.weight") if tied else 0
        if repeated:
            found["model_bytes"] -= lib.tensor_bytes(repeated)
            found["parameters"] -= lib.tensor_elements(repeated)
        found["options"]["mmap"] = self._mapped()
        return found

    def _mapped(self) -> bool:
        """Its log does not tell; Linux does. Elsewhere it is as it was asked for."""
        maps = Path("/proc/self/maps")
        if not maps.exists():
            return bool(self._request.options["mmap"])
        return str(self._path.resolve()) in maps.read_text(errors="replace")


def load(request: Request) -> IkSession:
    """Load the model and allocate its context. Raises DoesNotFit, or the error of ik_llama.cpp."""
    options = request.options
    path = Path(request.model["path"])
    mode = lib.LLAMA_LOAD_MODE_MMAP if options["mmap"] else lib.LLAMA_LOAD_MODE_NONE
    # Its loader fits layers into the memory of GPUs, of which there are none.
    model = load_model(path, "cpu", load_mode=mode, use_extra_bufts=options["repack"], fit=False)
    requested, found = options.get("quant"), quant_of(model)
    if requested not in (None, found):
        raise ValueError(f"{path}: asked for {requested}, the file holds {found}")
    layers = lib.llama_model_n_layer(model)
    LOG.assigned = ["CPU"] * (layers + 1)
    context = make_context(model, options)
    LOG.kv_layers["CPU"] = layers
    return IkSession(request, model, context)


def dequantize(request: Request, say: Say) -> dict[str, Any]:
    """As runners.llamacpp.weights.dequantize, after ik_llama.cpp has made 16 bits of the file, since the gguf
    package does not know its types."""
    target = Path(request.files["target"])
    threads = request.options["threads"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        files = request.files | {"target": str(Path(folder) / "f16.gguf")}
        options = {"quant": "f16", "threads": threads, "requantize": True}
        quantize(replace(request, options=options, files=files), say)
        files = request.files | {"source": files["target"]}
        return weights.dequantize(replace(request, files=files), say)


def probe(request: Request, say: Say) -> dict[str, Any]:
    """What this build is."""
    return {"versions": all_versions(_engine()), "devices": [], "gpu": False, "system_info": system_info()}


def _engine() -> dict[str, str]:
    return {"ik-llama-cpp-python": version("ik-llama-cpp-python")}
