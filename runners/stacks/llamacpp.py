"""One model in llama.cpp: loads a GGUF, decodes greedily token by token, and reports its settings."""
# /// script
# requires-python = ">=3.10"
# dependencies = ["llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy==2.2.6"]
#
# [tool.harness]
# summary = "llama.cpp through llama-cpp-python: GGUF files and converted checkpoints, on CPUs and GPUs"
# weights = "gguf"
# several_users = true
# named = ["quant"]
# memory = "llama.cpp"
# reference = { type_k = "f32", type_v = "f32", flash_attn = false }
# offers = [
#   { flash_attn = [false, true], quant = [
#     "f16", "q8_0", "q6_k", "q5_k_m", "q5_0", "q4_k_m", "q4_0", "q3_k_m", "q2_k",
#   ] },
#   { flash_attn = true, type_k = "q8_0", type_v = "q8_0", quant = ["q8_0", "q6_k", "q4_k_m", "q4_0"] },
# ]
# program = "llama-server --model {}"
#
# # MMVQ_MAX_BATCH_SIZE, MMQ_MAX_BATCH_SIZE (ggml-cuda, spring of 2024).
# [[tool.harness.kernel_changes]]
# longest = 8
# then = "from matrix-vector to matrix-matrix kernels"
#
# [[tool.harness.kernel_changes]]
# longest = 32
# then = "to dequantizing the weights to 16 bits for cuBLAS"
#
# [[tool.harness.tune]]
# settings = [{ flash_attn = false }, { flash_attn = true }]
#
# [[tool.harness.tune]]
# settings = [{ type_k = "f16", type_v = "f16" }, { type_k = "q8_0", type_v = "q8_0", flash_attn = true }]
#
# [[tool.harness.tune]]
# purpose = "prefill"
# settings = [{ n_ubatch = 64 }, { n_ubatch = 128 }, { n_ubatch = 256 }, { n_ubatch = 512 }]
#
# [[tool.harness.tune]]
# purpose = "prefill"
# settings = [{ n_batch = 128 }, { n_batch = 256 }, { n_batch = 512 }]
#
# [[tool.harness.tune]]
# device = "gpu"
# settings = [{ gpu_layers = -1 }]
#
# [[tool.harness.tune]]
# device = "cpu"
# settings = [{ repack = false }, { repack = true }]
#
# [[tool.harness.tune]]
# device = "cpu"
# settings = [{ mmap = false }, { mmap = true }]
#
# [[tool.harness.limits]]
# when = { flash_attn = false, type_v = ["q8_0", "q5_0", "q5_1", "q4_0", "q4_1"] }
# never = true
# message = "quantized V cache requires flash_attn to be enabled"
#
# [[tool.harness.context]]
# option = "n_ctx"
# granule = 256
# dry = true
#
# [tool.harness.first]
# order = 1
# cpu = "- {stack: llamacpp, quant: [q8_0, q4_k_m, q4_0]}  # a list is a matrix"
# cuda = "- {stack: llamacpp, quant: [f16, q8_0, q4_k_m], flash_attn: true}  # a list is a matrix"
#
# [tool.harness.options.quant]
# type = "string"
# choices = [
#   "f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "q2_k", "q3_k_s", "q3_k_m", "q3_k_l",
#   "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "mxfp4_moe", "q2_k_s", "iq1_s", "iq1_m", "iq2_xxs",
#   "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "iq3_s", "iq3_m", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0",
# ]
# help = "type of the weights, as llama-quantize names it; default: whatever the file holds"
#
# [tool.harness.options.threads]
# type = "int"
# minimum = 1
# maximum = 512  # GGML_MAX_N_THREADS; more is an abort
# default-from = "threads"
# flag = "--threads {}"
# help = "CPU threads, for prompt and decode alike"
#
# [tool.harness.options.cpus]
# type = "string"
# flag = "--cpu-range {} --cpu-strict 1"
# help = "keep each thread on one of these CPUs, as in 0-3, on the device cpu; default: the system moves them"
#
# [tool.harness.options.n_ctx]
# type = "int"
# minimum = 1
# maximum = 2147483392  # positions are int32
# default-from = "tokens"
# help = "KV cells to allocate, rounded up to 256 by llama.cpp; default: prompt + new tokens"
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
# # Never auto, which may silently differ between two builds (88 against 100 tok/s on one CPU).
# # Off is what llama.cpp did when the published study was made; on is worth its own row.
# [tool.harness.options.flash_attn]
# default = false
# flag = "--flash-attn {}"
# help = "flash attention, on or off; llama.cpp's own choice (auto) is not offered"
#
# [tool.harness.options.type_k]
# choices = ["f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1"]
# default = "f16"
# flag = "--cache-type-k {}"
# help = "type of the K cache"
#
# [tool.harness.options.type_v]
# choices = ["f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1"]
# default = "f16"
# flag = "--cache-type-v {}"
# help = "type of the V cache; a quantized one needs flash_attn"
#
# # llama.cpp's library has it on, its programs off.
# [tool.harness.options.swa_full]
# default = false
# flag = { on = "--swa-full" }
# help = "let layers with a sliding window cache the whole context, so that it can be cut to an earlier token"
#
# [tool.harness.options.gpu_layers]
# minimum = -1
# default = -1
# flag = { "-1" = "", "" = "--gpu-layers {}" }  # its own default: all that fit
# help = "layers on the GPU, -1 for all; always none on the device cpu"
#
# [tool.harness.options.n_cpu_moe]
# minimum = 0
# maximum = 10000
# default = 0
# flag = { "0" = "", "" = "--n-cpu-moe {}" }
# help = "layers, from the first on, whose experts stay on the CPU while the rest is on the GPU"
#
# [tool.harness.options.override_tensor]
# type = "string"
# flag = "--override-tensor {}"
# help = "PATTERN=BUFFER,...: where tensors with such names go, ffn_down_exps=CPU; default: to their layer"
#
# [tool.harness.options.mmap]
# default = true
# flag = { off = "--no-mmap" }
# help = "map the file instead of reading it into memory"
#
# [tool.harness.options.repack]
# default = true
# flag = { off = "--no-repack" }
# help = "let llama.cpp repack the weights for this CPU while it loads them"
#
# [tool.harness.env.cpu]
# device = "cpu"
# source-builds = ["llama-cpp-python"]
#
# [tool.harness.env.cpu.variables]
# CMAKE_ARGS = """-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
# -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DGGML_METAL=off"""
#
# [tool.harness.env.cuda]
# device = "cuda"
# source-builds = ["llama-cpp-python"]
#
# [tool.harness.env.cuda.variables]
# CMAKE_ARGS = """-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
# -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DGGML_CUDA=on"""
#
# [tool.harness.env.metal]
# device = "metal"
# source-builds = ["llama-cpp-python"]
#
# [tool.harness.env.metal.variables]
# CMAKE_ARGS = """-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
# -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DGGML_METAL=on"""
#
# [tool.harness.env.vulkan]
# device = "vulkan"
# source-builds = ["llama-cpp-python"]
#
# [tool.harness.env.vulkan.variables]
# CMAKE_ARGS = """-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
# -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DGGML_VULKAN=on"""
#
# [tool.harness.env.hip]
# device = "hip"
# source-builds = ["llama-cpp-python"]
#
# [tool.harness.env.hip.variables]
# CMAKE_ARGS = """-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
# -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DGGML_HIP=on"""
# ///

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from runners.llamacpp import routing
from runners.llamacpp.account import account
from runners.llamacpp.lib import (
    DoesNotFit,
    devices,
    lib,
    load_model,
    make_context,
    model_params,
    opened,
    quant_of,
    system_info,
)
from runners.llamacpp.session import LlamaSession, all_versions, cpus_in, pin
from runners.llamacpp.weights import convert, dequantize, quantize
from runners.protocol import Request, Say

__all__ = ["DOES_NOT_FIT", "load", "probe", "tokenize"]
__all__ += ["account", "convert", "dequantize", "quantize"]  # jobs of other files

DOES_NOT_FIT: tuple[type[BaseException], ...] = (DoesNotFit, MemoryError)


def load(request: Request) -> LlamaSession:
    """Load the model and allocate its context. Raises DoesNotFit, or the error of llama.cpp."""
    mode = lib.LLAMA_LOAD_MODE_MMAP if request.options["mmap"] else lib.LLAMA_LOAD_MODE_NONE
    model = load_model(Path(request.model["path"]), request.device, load_mode=mode, **model_params(request))
    requested, found = request.options.get("quant"), quant_of(model)
    if requested not in (None, found):
        raise ValueError(f"{request.model['path']}: asked for {requested}, the file holds {found}")
    cpus, heard = request.options.get("cpus"), _heard(model, request)
    callback = heard and heard.callback
    context = make_context(model, request.options, on_node=callback, sequences=request.users)
    pinned = bool(cpus) and request.device == "cpu"
    pool = pin(context, request.options["threads"], cpus_in(cpus)) if pinned else None
    session = LlamaSession(request, model, context, pool)
    session.heard = heard
    if request.device != "cpu" and request.job == "generate":
        session.rehearse(request.options["n_ctx"] // request.users - 1)
    return session


def _heard(model: int, request: Request) -> routing.LlamaHeard | None:
    """For the experts that are asked for; None for a model without, or where groups of them are chosen
    first."""
    if "experts" not in request.files:
        return None
    follow = request.files.get("follow")
    heard = routing.LlamaHeard(model, np.load(follow) if follow else None)
    return heard if heard.experts and heard.groups < 2 else None


def tokenize(request: Request, say: Say) -> dict[str, Any]:
    """The ids of workloads[0]["text"], nothing added, and the BOS that the vocabulary puts in front of a text
    (None: none); None ids for a model without a vocabulary."""
    text = request.workloads[0]["text"].encode()
    with opened(Path(request.model["path"]), vocab_only=True) as model:
        vocab = lib.llama_model_get_vocab(model)
        size = lib.llama_vocab_n_tokens(vocab)
        if lib.llama_vocab_type(vocab) == lib.LLAMA_VOCAB_TYPE_NONE:
            return {"ids": None, "bos": None, "vocab_size": size}
        bos = lib.llama_vocab_bos(vocab) if lib.llama_vocab_get_add_bos(vocab) else -1
        room = len(text) + 16  # a token is at least a byte; some tokenizers put a space in front
        ids = (lib.llama_token * room)()
        count = lib.llama_tokenize(vocab, text, len(text), ids, room, False, False)
    if count < 0:
        raise RuntimeError(f"{len(text)} bytes of text are more than {room} tokens")
    return {"ids": list(ids[:count]), "bos": bos if bos >= 0 else None, "vocab_size": size}


def probe(request: Request, say: Say) -> dict[str, Any]:
    """The devices of this build on this machine; with the option `measure` also their speed: see
    runners/llamacpp/probe.py."""
    facts = {
        "versions": all_versions(),
        "devices": devices(),
        "gpu": bool(lib.llama_supports_gpu_offload()),
        "system_info": system_info(),
    }
    if not request.options.get("measure"):
        return facts
    # Not at the top: a process that times tokens does not need them.
    if request.options["measure"] == ["types"]:
        from runners.llamacpp.probe import measure_types

        return facts | measure_types(request, say)
    from runners.llamacpp.probe import measure

    return facts | measure(request, say)
