"""Tensors that a request puts into another buffer than their layer's: the list that llama.cpp takes, and
whether its log has each of them there."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from typing import Any

from llama_cpp._ggml import libggml

# LLM_FFN_EXPS_REGEX in llama.cpp's common/common.h, which its --n-cpu-moe uses; harness/theory/placement.py
# has the same.
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
MAIN_MEMORY = "CPU"


class Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override"""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def overrides(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Patterns and buffer types, in order; the first that matches a tensor's name decides."""
    found = [(rf"blk\.{layer}{EXPERTS}", MAIN_MEMORY) for layer in range(options.get("n_cpu_moe") or 0)]
    given = options.get("override_tensor")
    pairs = [each.partition("=") for each in given.split(",")] if given else []
    return [*found, *((pattern, buffer) for pattern, _, buffer in pairs)]


def array_of(wanted: list[tuple[str, str]]) -> Any:
    """For llama_model_params, ended by a null; llama.cpp keeps the pointer as long as the model. Raises
    ValueError for a buffer type that this build lacks."""
    known = _buffer_types()
    if missing := [buffer for _, buffer in wanted if buffer not in known]:
        raise ValueError(f"override_tensor: unknown buffer type {missing[0]}; there are {', '.join(known)}")
    return (Override * (len(wanted) + 1))(
        *((pattern.encode(), known[buffer]) for pattern, buffer in wanted), (None, None)
    )


def placed(
    wanted: list[tuple[str, str]], sizes: Mapping[str, int], found: Mapping[str, str]
) -> dict[str, Any] | None:
    """Where the tensors that `wanted` matches are, null if there is none: their number and bytes by buffer
    type, and the `misplaced`. `sizes`: of all tensors; `found`: the buffer types that llama.cpp logged."""
    if not wanted:
        return None
    patterns = [(re.compile(pattern), buffer) for pattern, buffer in wanted]
    tensors: dict[str, int] = {}
    held: dict[str, int] = {}
    misplaced = []
    for name, size in sizes.items():
        asked = next((buffer for pattern, buffer in patterns if pattern.search(name)), None)
        if asked is None:
            continue
        at = found.get(name)
        if at is None or _memory_of(at) != _memory_of(asked):
            misplaced.append({"tensor": name, "asked": asked, "found": at})
        if at is not None:
            tensors[at] = tensors.get(at, 0) + 1
            held[at] = held.get(at, 0) + size
    return {"tensors": tensors, "bytes": held, "misplaced": misplaced}


def _memory_of(buffer: str) -> str:
    """llama.cpp takes a faster buffer type of main memory for CPU: repacked, or pinned for a GPU."""
    return MAIN_MEMORY if buffer.startswith(MAIN_MEMORY) or buffer.endswith("_Host") else buffer


def _buffer_types() -> dict[str, int]:
    """Each device's own, by name, as common/arg.cpp collects them."""
    ggml: Any = libggml
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ggml.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
    ggml.ggml_backend_buft_name.restype = ctypes.c_char_p
    found = {}
    for index in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(index)))
        buffer = ggml.ggml_backend_dev_buffer_type(device)
        if buffer:
            found[ggml.ggml_backend_buft_name(ctypes.c_void_p(buffer)).decode()] = buffer
    return found
