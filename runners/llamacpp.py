"""One model in llama.cpp: loads a GGUF, decodes greedily token by token, and reports its settings."""
# /// script
# requires-python = ">=3.10"
# dependencies = ["llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy==2.2.6"]
#
# [tool.harness]
# summary = "llama.cpp through llama-cpp-python: GGUF files and converted checkpoints, on CPUs and GPUs"
# weights = "gguf"
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
# says = "quantized V cache requires flash_attn to be enabled"
#
# [[tool.harness.context]]
# option = "n_ctx"
# granule = 256
# dry = true
#
# [tool.harness.options.quant]
# type = "string"
# choices = [
#   "f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "q2_k", "q3_k_s", "q3_k_m", "q3_k_l",
#   "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "mxfp4_moe",
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
# type = "int"
# minimum = 1
# default = 512
# flag = "--batch-size {}"
# help = "most prompt tokens in one llama_decode; at most n_ctx"
#
# [tool.harness.options.n_ubatch]
# type = "int"
# minimum = 1
# default = 512
# flag = "--ubatch-size {}"
# help = "most prompt tokens in one pass over the weights; at most n_batch"
#
# # Never auto, which may silently differ between two builds (88 against 100 tok/s on one CPU).
# # Off is what llama.cpp did when the published study was made; on is worth its own row.
# [tool.harness.options.flash_attn]
# type = "bool"
# default = false
# flag = "--flash-attn {}"
# help = "flash attention, on or off; llama.cpp's own choice (auto) is not offered"
#
# [tool.harness.options.type_k]
# type = "string"
# choices = ["f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1"]
# default = "f16"
# flag = "--cache-type-k {}"
# help = "type of the K cache"
#
# [tool.harness.options.type_v]
# type = "string"
# choices = ["f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1"]
# default = "f16"
# flag = "--cache-type-v {}"
# help = "type of the V cache; a quantized one needs flash_attn"
#
# # llama.cpp's library has it on, its programs off.
# [tool.harness.options.swa_full]
# type = "bool"
# default = false
# flag = { on = "--swa-full" }
# help = "let layers with a sliding window cache the whole context, so that it can be cut to an earlier token"
#
# [tool.harness.options.gpu_layers]
# type = "int"
# minimum = -1
# default = -1
# flag = { "-1" = "", "" = "--gpu-layers {}" }  # its own default: all that fit
# help = "layers on the GPU, -1 for all; always none on the device cpu"
#
# [tool.harness.options.n_cpu_moe]
# type = "int"
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
# type = "bool"
# default = true
# flag = { off = "--no-mmap" }
# help = "map the file instead of reading it into memory"
#
# [tool.harness.options.repack]
# type = "bool"
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

import ctypes
import importlib.metadata
import math
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from runners import llamacpp_routing, routing, windows
from runners.experts import Heard
from runners.llamacpp_account import CHUNK, account, tensor_bytes
from runners.llamacpp_context import LlamaContext, evaluated_in
from runners.llamacpp_convert import convert
from runners.llamacpp_dequantize import dequantize
from runners.llamacpp_lib import (
    LOG,
    RESOLUTION_BYTES,
    DoesNotFit,
    devices,
    lib,
    load_model,
    make_context,
    model_params,
    opened,
    quant_of,
    system_info,
    versions,
)
from runners.llamacpp_placement import overrides, placed
from runners.llamacpp_threads import cpus_in, free, pin
from runners.llamacpp_weights import quantize
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
    context = make_context(model, request.options, on_node=heard and heard.callback)
    pinned = bool(cpus) and request.device == "cpu"
    pool = pin(context, request.options["threads"], cpus_in(cpus)) if pinned else None
    session = LlamaSession(request, model, context, pool)
    session.heard = heard
    if request.device != "cpu" and request.job == "generate":
        session.rehearse(request.options["n_ctx"] - 1)
    return session


def _heard(model: int, request: Request) -> llamacpp_routing.LlamaHeard | None:
    """For the experts that are asked for; null for a model without, or where groups of them are chosen
    first."""
    if "experts" not in request.files:
        return None
    follow = request.files.get("follow")
    heard = llamacpp_routing.LlamaHeard(model, np.load(follow) if follow else None)
    return heard if heard.experts and heard.groups < 2 else None


class LlamaSession(LlamaContext):
    """One model and one context; see runners.protocol.Session."""

    def __init__(self, request: Request, model: int, context: int, pool: int | None = None) -> None:
        """`pool`: of threads that stay on their CPUs; null: llama.cpp's own."""
        super().__init__(context)
        self._request, self._pool = request, pool
        self.heard: Heard | None = None
        self._fixed: list[int] | None = None
        self._model = model
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._n_batch = lib.llama_n_batch(context)
        self.chunk = min(self._n_batch, CHUNK)
        self._batch = batch = lib.llama_batch_init(self._n_batch, 0, 1)
        for i in range(self._n_batch):
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
        self._ids, self._positions, self._keeps = (
            np.ctypeslib.as_array(column, (self._n_batch,))
            for column in (batch.token, batch.pos, batch.logits)
        )
        self._address = 0
        self._row = np.empty(0, np.float32)
        self._after_prefill: Any = None
        self._wait_ns: list[int] = []
        self._argmax_ns: list[int] = []
        self._steps_ns = 0

    def rehearse(self, last: int) -> None:
        """Take steps at several depths up to the position `last`, see windows.rehearsed, and forget them."""
        for depth in windows.rehearsed(last):
            self.feed([0] * (depth - self.held()), 1)
            self.feed([0], 1)
        self._clear()

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Clears the cache now, outside TTFT; the rest runs when iterated."""
        self._clear()
        return self._decode(prompt, new_tokens)

    def _clear(self) -> None:
        lib.llama_synchronize(self._context)  # else tokens of a failed decode would count here
        lib.llama_memory_clear(self._memory, True)
        lib.llama_perf_context_reset(self._context)
        self._after_prefill = None
        self._wait_ns, self._argmax_ns, self._steps_ns = [], [], 0

    def _decode(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        for start in range(0, len(prompt), self._n_batch):
            chunk = prompt[start : start + self._n_batch]
            self._evaluate(chunk, start, keep=start + len(chunk) == len(prompt))
        decoded = time.perf_counter_ns()
        lib.llama_synchronize(self._context)
        self._after_prefill = lib.llama_perf_context(self._context)
        if self.held() != len(prompt):
            raise RuntimeError("the KV cache does not hold exactly the prompt")
        yield from self._steps(len(prompt), new_tokens, decoded)

    def fix(self, ids: list[int]) -> None:
        """See runners.protocol.Session."""
        self._fixed = ids

    def steps(self, new_tokens: int) -> Iterator[int]:
        """Greedy ids after those fed; see runners.protocol.Session."""
        return self._steps(self.held(), new_tokens, time.perf_counter_ns())

    def _steps(self, first: int, new_tokens: int, decoded: int) -> Iterator[int]:
        """Greedy ids from the logits that are there; `first`: positions held, `decoded`: when llama_decode
        returned."""
        context, batch, clock = self._context, self._batch, time.perf_counter_ns
        wait_ns, argmax_ns, fixed = self._wait_ns, self._argmax_ns, self._fixed
        batch.n_tokens = 1
        batch.logits[0] = 1
        began = None
        for position in range(first, first + new_tokens):
            lib.llama_synchronize(context)
            if began is not None:
                self._steps_ns += clock() - began
            row = self._logits(-1)
            ready = clock()
            token = int(row.argmax())
            picked = clock()
            wait_ns.append(ready - decoded)
            argmax_ns.append(picked - ready)
            if not math.isfinite(row[token]):  # argmax returns a NaN if there is one
                raise ValueError(f"not-a-number logits at token {position + 1}")
            yield token
            if position == first + new_tokens - 1:
                return  # the last token is never fed back
            batch.token[0] = token if fixed is None else fixed[position % len(fixed)]
            batch.pos[0] = position
            began = clock()
            refused = lib.llama_decode(context, batch)
            decoded = clock()
            if refused:
                raise self._refusal(refused, position)

    def _evaluate(self, ids: list[int], start: int, keep: int) -> None:
        """Decode `ids` as one batch from position `start` on, with logits after the last `keep` of them."""
        count = len(ids)
        self._batch.n_tokens = count
        self._ids[:count] = ids
        self._positions[:count] = np.arange(start, start + count)
        self._keeps[:count] = 0
        self._keeps[count - keep : count] = 1
        if refused := lib.llama_decode(self._context, self._batch):
            raise self._refusal(refused, start + len(ids) - 1)

    def _refusal(self, code: int, position: int) -> Exception:
        if code == 1:
            n_ctx = lib.llama_n_ctx(self._context)
            return DoesNotFit(f"no KV cell left at token {position + 1}: the context holds {n_ctx}")
        return LOG.failure(f"llama_decode gave {code} at token {position + 1}")

    def _logits(self, index: int) -> np.ndarray:
        """llama.cpp's own buffer, not a copy. It does not move, so the view is kept."""
        address = ctypes.addressof(lib.llama_get_logits_ith(self._context, index).contents)
        if address != self._address:
            buffer = (ctypes.c_float * self._vocab_size).from_address(address)
            self._address, self._row = address, np.frombuffer(buffer, np.float32)
        return self._row

    def empty(self, tokens: int) -> None:
        """Reset; see runners.protocol.Session. A context too short for `tokens` fails when it is full."""
        self._clear()

    def feed(self, ids: list[int], keep: int) -> np.ndarray:
        """Logits after the last `keep` of `ids`, evaluated after those before: float32 (keep, vocabulary)."""
        begin, rows = self.held(), []
        for start in range(0, len(ids), self._n_batch):
            chunk = ids[start : start + self._n_batch]
            kept = min(len(chunk), max(0, start + len(chunk) - (len(ids) - keep)))
            self._evaluate(chunk, begin + start, kept)
            rows += [self._logits(i).copy() for i in range(len(chunk) - kept, len(chunk))]
        return np.array(rows, np.float32)

    def routing(self, prompt: list[int], new_tokens: int) -> dict[str, Any] | None:
        """The experts chosen in greedy decode steps after a prompt; null for a model without experts."""
        choices = llamacpp_routing.Choices(self._model, self._request.options, len(prompt) + new_tokens)
        try:
            if not choices.experts:
                return None
            for position, token in enumerate(prompt):
                choices.step(token, position)
            choices.begin()
            ids = []
            for position in range(len(prompt), len(prompt) + new_tokens):
                fixed = self._fixed and self._fixed[position % len(self._fixed)]
                ids.append(choices.highest(self._vocab_size) if fixed is None else fixed)
                choices.step(ids[-1], position)
            return routing.facts(choices.experts, ids, choices.counts())
        finally:
            choices.close()

    @contextmanager
    def experts(self) -> Iterator[Heard | None]:
        """See runners.protocol.Session."""
        yield self.heard

    def counters(self) -> dict[str, Any]:
        """llama.cpp's own figures for the last generate.

        `stack_decode_ms` sums the times from each llama_decode to the end of its computation: without
        argmax and our loop. `steps_ms` is the same by our clock. `wait` is from the return of llama_decode to
        logits on the host: near zero on a CPU, where llama_decode computes and copies before it returns.
        `argmax` and `wait` per token would take another 10 KB each per 10,000 tokens; hence only their
        spread.
        """
        first, last = self._after_prefill, lib.llama_perf_context(self._context)
        prompt = evaluated_in(first)
        return {
            "evaluated_tokens": evaluated_in(last),
            "prompt_evaluated": prompt,
            "decode_evaluated": evaluated_in(last) - prompt,
            "kv_positions": self.held(),
            "stack_prefill_ms": first.t_p_eval_ms + first.t_eval_ms,
            "stack_decode_ms": last.t_p_eval_ms + last.t_eval_ms - first.t_p_eval_ms - first.t_eval_ms,
            "reused_graphs": last.n_reused,
            "sampling_ms": sum(self._argmax_ns) / 1e6,
            "steps_ms": self._steps_ns / 1e6,
            "argmax": _spread(self._argmax_ns),
            "wait": _spread(self._wait_ns),
        }

    def facts(self) -> dict[str, Any]:
        """Resolved: as llama.cpp has it after loading, `n_ctx` rounded up to a multiple of 256."""
        options, context, model = self._request.options, self._context, self._model
        on_gpu = sum(count for device, count in LOG.layers.items() if device != "CPU")
        wanted = overrides(options)
        sizes = tensor_bytes(Path(self._request.model["path"])) if wanted else {}
        return {
            "versions": _all_versions(),
            "quant": quant_of(model),
            "kernels": {
                "tensors": LOG.tensors,
                "repacked": dict(LOG.repacked),
                "flash_attn": LOG.flash_attn == "enabled",
                "rotated_kv": LOG.rotated,
            },
            "devices": {"layers": dict(LOG.layers), "kv": dict(LOG.kv_layers), "present": devices()},
            "placement": placed(wanted, sizes, LOG.overridden),
            "graph_splits": LOG.splits,
            "warnings": list(LOG.warnings),
            "options": {
                "threads": lib.llama_n_threads(context),
                "threads_batch": lib.llama_n_threads_batch(context),
                "n_ctx": lib.llama_n_ctx(context),
                "n_batch": lib.llama_n_batch(context),
                "n_ubatch": lib.llama_n_ubatch(context),
                "flash_attn": LOG.flash_attn == "enabled",
                "type_k": LOG.kv_types[0],
                "type_v": LOG.kv_types[1],
                "gpu_layers": on_gpu,
                "mmap": any("Mapped" in name for name in LOG.memory["model"]),
                "repack": options["repack"],
                "swa_full": options["swa_full"],
                "n_seq_max": lib.llama_n_seq_max(context),
                "kv_unified": LOG.kv_unified,
                "cpus": options.get("cpus"),
            },
            "system_info": system_info(),
            "kv_read": "padded256",
            "memory": LOG.memory,
            "memory_resolution_bytes": RESOLUTION_BYTES,
            "logits_bytes": self._vocab_size * 4,
            "model_bytes": lib.llama_model_size(model),
            "parameters": lib.llama_model_n_params(model),
            "vocab_size": self._vocab_size,
            "trained_context": lib.llama_model_n_ctx_train(model),
        }

    def close(self) -> None:
        lib.llama_batch_free(self._batch)
        lib.llama_free(self._context)
        if self._pool is not None:
            free(self._pool)
        lib.llama_model_free(self._model)


def _spread(ns: list[int]) -> dict[str, float]:
    low, middle, high = (min(ns), statistics.median(ns), max(ns)) if ns else (0, 0, 0)
    return {"min_us": low / 1e3, "median_us": middle / 1e3, "max_us": high / 1e3}


def _all_versions() -> dict[str, str]:
    return {
        **versions(),
        "gguf": importlib.metadata.version("gguf"),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def tokenize(request: Request, say: Say) -> dict[str, Any]:
    """The ids of workloads[0]["text"], nothing added; null ids for a model without a vocabulary."""
    text = request.workloads[0]["text"].encode()
    with opened(Path(request.model["path"]), vocab_only=True) as model:
        vocab = lib.llama_model_get_vocab(model)
        size = lib.llama_vocab_n_tokens(vocab)
        if lib.llama_vocab_type(vocab) == lib.LLAMA_VOCAB_TYPE_NONE:
            return {"ids": None, "vocab_size": size}
        room = len(text) + 16  # a token is at least a byte; some tokenizers put a space in front
        ids = (lib.llama_token * room)()
        count = lib.llama_tokenize(vocab, text, len(text), ids, room, False, False)
    if count < 0:
        raise RuntimeError(f"{len(text)} bytes of text are more than {room} tokens")
    return {"ids": list(ids[:count]), "vocab_size": size}


def probe(request: Request, say: Say) -> dict[str, Any]:
    """The devices of this build on this machine; with the option `measure` also their speed: see
    llamacpp_probe, and llamacpp_types for `["types"]`."""
    facts = {
        "versions": _all_versions(),
        "devices": devices(),
        "gpu": bool(lib.llama_supports_gpu_offload()),
        "system_info": system_info(),
    }
    if not request.options.get("measure"):
        return facts
    # Not at the top: a process that times tokens does not need them.
    if request.options["measure"] == ["types"]:
        from runners.llamacpp_types import measure_types

        return facts | measure_types(request, say)
    from runners.llamacpp_probe import measure

    return facts | measure(request, say)
