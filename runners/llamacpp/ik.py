"""ik_llama.cpp's library, for CPUs, by the names that llama.cpp's binding has: it branched off in 2024."""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import ik_llama_cpp._ctypes_api as api

_lib = api._lib
libggml = _lib
"""A name of ggml is found through libllama.so, which has loaded the only ggml of this process."""

# Numbers of ik_llama.cpp's llama.h and ggml.h: enum llama_ftype and enum ggml_type.
FTYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_0": 2, "q4_1": 3, "q2_k": 10}
FTYPES |= {"q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17}
FTYPES |= {"q6_k": 18, "iq3_xxs": 23, "iq3_s": 26, "iq3_m": 27, "iq4_nl": 25, "iq4_xs": 30}
FTYPES |= {"iq2_k": 138, "iq3_k": 139, "iq4_k": 140, "iq5_k": 141, "iq6_k": 142, "iq4_ks": 145}
FTYPES |= {"iq4_kss": 148, "iq5_ks": 150, "iq3_kt": 152, "iq4_kt": 153, "iq3_ks": 154, "iq2_kl": 155}
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_0": 6, "q5_1": 7, "q4_0": 2, "q4_1": 3}
KV_TYPES |= {"q6_0": 133, "q8_kv": 151}
LLAMA_LOAD_MODE_NONE, LLAMA_LOAD_MODE_MMAP = 0, 1
LLAMA_FLASH_ATTN_TYPE_DISABLED, LLAMA_FLASH_ATTN_TYPE_ENABLED = 0, 1
LLAMA_KV_OVERRIDE_TYPE_INT, LLAMA_KV_OVERRIDE_TYPE_STR = 0, 3
LLAMA_VOCAB_TYPE_NONE = 0

llama_token = api.llama_token
llama_model_kv_override = api.llama_model_kv_override
llama_log_callback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)


# Parameters by llama.cpp's names. A name that neither has is an attribute of Python's, without effect.


class _ModelParams(api.llama_model_params):  # type: ignore[misc]
    devices = None  # CPUs alone

    @property
    def load_mode(self) -> int:
        return int(self.use_mmap)

    @load_mode.setter
    def load_mode(self, value: int) -> None:
        self.use_mmap = value == LLAMA_LOAD_MODE_MMAP

    @property
    def use_extra_bufts(self) -> bool:
        return bool(self.repack_tensors)

    @use_extra_bufts.setter
    def use_extra_bufts(self, value: bool) -> None:
        self.repack_tensors = value


class _ContextParams(api.llama_context_params):  # type: ignore[misc]
    @property
    def flash_attn_type(self) -> int:
        return int(self.flash_attn)

    @flash_attn_type.setter
    def flash_attn_type(self, value: int) -> None:
        self.flash_attn = value == LLAMA_FLASH_ATTN_TYPE_ENABLED


class _QuantizeParams(ctypes.Structure):
    """struct llama_model_quantize_params (llama.h)."""

    _fields_ = (
        ("nthread", c_int32),
        ("ftype", c_int),
        *((f"type_{number}", c_int) for number in range(11)),
        *(
            (name, c_bool)
            for name in (
                *("allow_requantize", "quantize_output_tensor", "only_copy", "pure", "keep_split"),
                *("ignore_imatrix_rules", "only_repack", "dry_run", "partial_requant"),
            )
        ),
        *((name, c_void_p) for name in ("imatrix", "kv_overrides", "custom_quants", "repack_pattern")),
    )


class _Perf:
    """llama_timings as llama.cpp's llama_perf_context_data."""

    def __init__(self, timings: Any) -> None:
        self.n_p_eval, self.t_p_eval_ms = timings.n_p_eval, timings.t_p_eval_ms
        self.n_eval, self.t_eval_ms = timings.n_eval, timings.t_eval_ms
        self.n_reused = 0


def _function(name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(_lib, name)
    found.restype, found.argtypes = result, arguments
    return found


llama_backend_init = api.llama_backend_init
llama_log_set = _function("llama_log_set", None, llama_log_callback, c_void_p)
llama_print_system_info = _function("llama_print_system_info", c_char_p)
llama_supports_gpu_offload = _function("llama_supports_gpu_offload", c_bool)

llama_model_default_params = _function("llama_model_default_params", _ModelParams)
llama_model_load_from_file = _function("llama_model_load_from_file", c_void_p, c_char_p, _ModelParams)
llama_model_free = api.llama_free_model
llama_model_get_vocab = api.llama_model_get_vocab
llama_model_meta_val_str = _function(
    "llama_model_meta_val_str", c_int32, c_void_p, c_char_p, c_char_p, c_size_t
)
llama_model_n_ctx_train = _function("llama_n_ctx_train", c_int32, c_void_p)
llama_model_n_layer = _function("llama_n_layer", c_int32, c_void_p)
llama_model_n_params = _function("llama_model_n_params", c_uint64, c_void_p)
llama_model_size = _function("llama_model_size", c_uint64, c_void_p)
llama_model_quantize_default_params = _function("llama_model_quantize_default_params", _QuantizeParams)
_quantize = _function("llama_model_quantize", c_uint32, c_char_p, c_char_p, POINTER(_QuantizeParams))

llama_vocab_n_tokens = api.llama_vocab_n_tokens
llama_vocab_type = _function("llama_vocab_type", c_int, c_void_p)
llama_vocab_bos = _function("llama_vocab_bos", llama_token, c_void_p)
llama_vocab_get_add_bos = _function("llama_vocab_get_add_bos", c_bool, c_void_p)
llama_tokenize = _function(
    "llama_vocab_tokenize",
    *(c_int32, c_void_p, c_char_p, c_int32, POINTER(llama_token), c_int32, c_bool, c_bool),
)

llama_context_default_params = _function("llama_context_default_params", _ContextParams)
llama_init_from_model = _function("llama_init_from_model", c_void_p, c_void_p, _ContextParams)
llama_free = api.llama_free
llama_get_model = _function("llama_get_model", c_void_p, c_void_p)
llama_n_ctx, llama_n_batch, llama_n_ubatch, llama_n_seq_max, llama_n_threads, llama_n_threads_batch = (
    _function(f"llama_{name}", c_uint32, c_void_p)
    for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch")
)
llama_batch_init, llama_batch_free = api.llama_batch_init, api.llama_batch_free
llama_decode, llama_get_logits_ith = api.llama_decode, api.llama_get_logits_ith
llama_synchronize = _function("llama_synchronize", None, c_void_p)
llama_perf_context_reset = _function("llama_reset_timings", None, c_void_p)
_timings = _function("llama_get_timings", api.llama_timings, c_void_p)

_BYTES, _AT = POINTER(c_uint8), (c_int32, c_uint32)
_state_size = _function("llama_state_seq_get_size", c_size_t, c_void_p, *_AT)
_state_data = _function("llama_state_seq_get_data", c_size_t, c_void_p, _BYTES, c_size_t, *_AT)
_set_state_data = _function("llama_state_seq_set_data", c_size_t, c_void_p, _BYTES, c_size_t, *_AT)
# Of a context: the cache has no handle of its own.
llama_memory_seq_rm = _function("llama_kv_cache_seq_rm", c_bool, c_void_p, c_int32, c_int32, c_int32)
_last_position = _function("llama_kv_cache_seq_pos_max", c_int32, c_void_p, c_int32)
_cells_used = _function("llama_get_kv_cache_used_cells", c_int32, c_void_p)
llama_memory_seq_pos_min = _function("llama_kv_cache_seq_pos_min", c_int32, c_void_p, c_int32)


def llama_get_memory(context: int) -> int:
    return context


def llama_memory_clear(memory: int, _data: bool) -> None:
    api.llama_kv_cache_clear(memory)


def llama_memory_seq_pos_max(memory: int, user: int) -> int:
    """The last position; -1 of an empty cache, of which ik_llama.cpp's own function says 0."""
    return int(_last_position(memory, user)) if _cells_used(memory) else -1


# Without llama.cpp's flags of a state, which ik_llama.cpp's functions require.
def llama_state_seq_get_size(context: int, user: int) -> int:
    return int(_state_size(context, user, 0))


def llama_state_seq_get_data(context: int, target: Any, size: int, user: int) -> int:
    return int(_state_data(context, target, size, user, 0))


def llama_state_seq_set_data(context: int, source: Any, size: int, user: int) -> int:
    return int(_set_state_data(context, source, size, user, 0))


def llama_perf_context(context: int) -> _Perf:
    return _Perf(_timings(context))


def llama_model_n_swa(_model: int) -> int:
    """0: layers with a window cache the whole context, so that it can be cut anywhere."""
    return 0


def llama_model_ftype(model: int) -> int:
    """The number in the file, which ik_llama.cpp tells as text alone; of a file without, another."""
    buffer = ctypes.create_string_buffer(32)
    llama_model_meta_val_str(model, b"general.file_type", buffer, len(buffer))
    return int(buffer.value or 1023)


def llama_ftype_name(_ftype: int) -> bytes:
    return b""


def llama_model_quantize(source: bytes, target: bytes, params: _QuantizeParams) -> int:
    return int(_quantize(source, target, ctypes.byref(params)))


# Tensors of a model, and whether a file has one.


class _Reading(ctypes.Structure):
    """struct gguf_init_params"""

    _fields_ = (("no_alloc", c_bool), ("ctx", c_void_p))


_tensor = _function("llama_get_model_tensor", c_void_p, c_void_p, c_char_p)
_open = _function("gguf_init_from_file", c_void_p, c_char_p, _Reading)
_find = _function("gguf_find_tensor", c_int, c_void_p, c_char_p)
_close = _function("gguf_free", None, c_void_p)
tensor_bytes = _function("ggml_nbytes", c_size_t, c_void_p)
tensor_elements = _function("ggml_nelements", c_int64, c_void_p)


def tensor(model: int, name: str) -> int:
    """A pointer; 0: there is none of that name."""
    return _tensor(model, name.encode()) or 0


def has_tensor(path: Path, name: str) -> bool:
    file = _open(os.fsencode(path), _Reading(True, None))
    try:
        return _find(file, name.encode()) >= 0
    finally:
        _close(file)
