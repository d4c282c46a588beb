"""llama.cpp's dry accounting: the memory of a context of any length, without allocating it."""

from __future__ import annotations

import ctypes
import glob
import os
import re
from pathlib import Path
from typing import Any

from runners import clock
from runners.llamacpp.lib import (
    LOG,
    RESOLUTION_BYTES,
    lib,
    libggml,
    load_model,
    make_context,
    metadata,
    model_params,
    quant_of,
)
from runners.protocol import ACCOUNTED, Request, Say
from runners.workloads import filling

GRANULE = 256  # llama.cpp rounds a context up to that
CHUNK = 512  # ids at once when a context is filled, as many as in a prompt by default
CELL_BYTES = (
    48  # a cell's position, shift, extra and 256 sequences (llama-kv-cells.h), allocated with the context
)
HELD_BYTES = 96  # a cell in use: a node in each of two sets
MAIN_MEMORY = "CPU"
# ggml-cpu.c: a product first converts the other factor to a type that depends on the weights: bytes per
# element.
_FACTOR_BYTES = {"f32": 0.0, "f16": 2.0, "bf16": 2.0}
_FACTOR_QUANTIZED = 292 / 256  # block_q8_K, the largest of the 8-bit types


def account(request: Request, say: Say) -> dict[str, Any]:
    """For each `n_ctx` of workloads[0] (the option is ignored), by part and device, in bytes: the reserved
    `memory`, and the part `touched` by a fill to the end (Session.chunk at once) and by decode.

    Logits of a whole chunk are reserved and never requested. `cells`: llama.cpp's bookkeeping. `work`:
    scratch memory of the backends. `process`: this process, with a small context.
    """
    # llama.cpp aborts if allocations are simulated under another load mode than NONE.
    params = {"no_alloc": True, "load_mode": lib.LLAMA_LOAD_MODE_NONE, **model_params(request)}
    path = Path(request.model["path"])
    model = load_model(path, request.device, **params)
    threads = request.options["threads"]
    context = make_context(model, request.options | {"n_ctx": GRANULE})
    process = clock.process_accounting(threads - 1)
    lib.llama_free(context)
    for kind in ("rss_anon_bytes", "data_bytes"):
        process[kind] -= GRANULE * CELL_BYTES
    at = [_at(model, request.options, n_ctx) for n_ctx in request.workloads[0]["n_ctx"]]
    say(ACCOUNTED)
    return {
        "granule": GRANULE,
        "process": process,
        "model": _by_device(path),
        "at": at,
        "layers": dict(LOG.layers),
        "memory_resolution_bytes": RESOLUTION_BYTES,
    }


def _at(model: int, options: dict[str, Any], n_ctx: int) -> dict[str, Any]:
    reserved = _reserved(model, options | {"n_ctx": n_ctx})
    chunk = filling.largest_chunk(n_ctx, min(options["n_batch"], CHUNK))
    at_once = min(options["n_ubatch"], chunk)
    needed = _reserved(model, options | {"n_ctx": n_ctx, "n_ubatch": at_once}, outputs=1)
    work = {device: _work_bytes(model, options, device, n_ctx, at_once) for device in reserved["compute"]}
    graphs = _graph_bytes() * (1 + (chunk > at_once))  # one with logits, one without
    work[MAIN_MEMORY] = work.get(MAIN_MEMORY, 0) + n_ctx * HELD_BYTES + graphs
    more = {"cells": {MAIN_MEMORY: n_ctx * CELL_BYTES}, "work": work}
    touched = {
        device: min(size, needed["compute"][device]) if device == MAIN_MEMORY else size
        for device, size in reserved["compute"].items()  # a GPU's buffers take memory whether touched or not
    }
    return {
        "n_ctx": n_ctx,
        "memory": reserved | more,
        "touched": reserved | {"compute": touched} | more,
    }


def _reserved(model: int, options: dict[str, Any], outputs: int = 0) -> dict[str, dict[str, int]]:
    """Bytes of kv, output and compute buffers; `outputs`: the most tokens at once with logits, 0
    for all."""
    LOG.forget_context()
    lib.llama_free(make_context(model, options, outputs))
    layers = sum(LOG.kv_layers.values())
    # With simulated allocations llama.cpp logs the size of the whole cache and the device of each layer.
    kv = {device: LOG.kv_bytes * count // layers for device, count in LOG.kv_layers.items()}
    return {"kv": kv, "output": LOG.memory["output"], "compute": LOG.memory["compute"]}


def _work_bytes(model: int, options: dict[str, Any], device: str, n_ctx: int, at_once: int) -> int:
    """Scratch memory of a backend for its largest product, besides llama.cpp's buffers. From the sources of
    ggml 0.17: CPU backend (ggml_graph_plan), confirmed by measurement; CUDA backend
    (ggml_cuda_mul_mat_cublas, fattn-common.cuh), not measured. Unknown for other backends."""
    heads, kv_heads = lib.llama_model_n_head(model), lib.llama_model_n_head_kv(model)
    width = int(_of_arch(model, "attention.key_length") or lib.llama_model_n_embd(model) // heads)
    kv_width, flash = width * kv_heads, options["flash_attn"]
    # Attention's weights are converted from 32 bits to the type of V.
    scores = 0 if flash or options["type_v"] == "f32" else 2 * n_ctx * at_once * heads
    if device == MAIN_MEMORY:
        factor = _FACTOR_BYTES.get(quant_of(model), _FACTOR_QUANTIZED)
        return max(scores, int(int(_of_arch(model, "feed_forward_length") or 0) * at_once * factor))
    if not device.startswith("CUDA") or device.endswith("_Host"):
        return 0
    if flash:  # K and V become f16 together
        return sum(2 * n_ctx * kv_width for kind in ("type_k", "type_v") if options[kind] != "f16")
    return max(scores, 0 if options["type_k"] == "f32" else 4 * n_ctx * kv_width)  # K becomes f32


def _graph_bytes() -> int:
    """A graph and its tensors, rebuilt for each computation (llm_graph_result::reset, graph_max_nodes)."""
    ggml: Any = libggml
    ggml.ggml_tensor_overhead.restype = ggml.ggml_graph_overhead_custom.restype = ctypes.c_size_t
    nodes = max(1024, 8 * sum(LOG.tensors.values()))
    one = nodes * ggml.ggml_tensor_overhead()
    return int(one + ggml.ggml_graph_overhead_custom(ctypes.c_size_t(nodes), ctypes.c_bool(False)))


def _of_arch(model: int, key: str) -> str:
    return metadata(model, f"{metadata(model, 'general.architecture')}.{key}")


class _Reading(ctypes.Structure):
    """struct gguf_init_params"""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


def tensor_bytes(path: Path) -> dict[str, int]:
    """Bytes of the tensors of a file and its further parts, by name."""
    sizes: dict[str, int] = {}
    for part_of_it in parts(path):
        sizes |= _tensors(part_of_it)
    return sizes


def parts(path: Path) -> list[Path]:
    """A file, or of a split one all files."""
    return [*path.parent.glob(re.sub(r"-00001-of-(?=\d+\.gguf$)", "-*-of-", glob.escape(path.name)))]


def _by_device(path: Path) -> dict[str, int]:
    """Bytes of the model's tensors by the device of their layer, or by the buffer type that an override gave
    them. The input embedding is always in main memory; a tied one is also on the output's device."""
    sizes = tensor_bytes(path)
    found: dict[str, int] = {}
    for name, size in sizes.items():
        part, *layer = name.split(".")
        places = {LOG.assigned[int(layer[0]) if part == "blk" else -1]}
        if name in LOG.overridden:
            places = {LOG.overridden[name]}
        elif part == "token_embd":
            places = {MAIN_MEMORY, *(places if "output.weight" not in sizes else ())}
        for device in places:
            found[device] = found.get(device, 0) + size
    return found


def _tensors(path: Path) -> dict[str, int]:
    """Bytes of a file's tensors, by name."""
    gguf: Any = libggml
    gguf.gguf_init_from_file.restype = ctypes.c_void_p
    gguf.gguf_get_tensor_name.restype = ctypes.c_char_p
    gguf.gguf_get_n_tensors.restype = ctypes.c_int64
    gguf.gguf_get_tensor_size.restype = ctypes.c_size_t
    file = ctypes.c_void_p(gguf.gguf_init_from_file(os.fsencode(path), _Reading(True, None)))
    sizes = {
        gguf.gguf_get_tensor_name(file, ctypes.c_int64(i)).decode(): int(
            gguf.gguf_get_tensor_size(file, ctypes.c_int64(i))
        )
        for i in range(gguf.gguf_get_n_tensors(file))
    }
    gguf.gguf_free(file)
    return sizes
