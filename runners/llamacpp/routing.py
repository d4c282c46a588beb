"""The experts that the routers of a mixture choose in llama.cpp: heard, or given to them, by its callback.

The callback is a parameter of a context, and asks for every node of its graph, which would cost timed tokens
milliseconds: a context that is timed has none.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from runners.llamacpp.lib import LOG, lib, libggml, make_context, metadata
from runners.workloads.experts import Heard

# Nodes by their names, which end in a layer's number: cb() in build_moe_ffn, llama-graph.cpp.
_CHOSEN = "ffn_moe_topk"
# What is chosen by, or its logits: the last of them that there is.
_SCORES = ("ffn_moe_logits", "ffn_moe_logits_biased", "ffn_moe_probs_biased")


class LlamaHeard(Heard):
    """What is heard in a context that has its `callback`."""

    def __init__(self, model: int, given: np.ndarray | None = None) -> None:
        super().__init__(given)
        architecture = metadata(model, "general.architecture")
        self.experts = int(metadata(model, f"{architecture}.expert_count") or 0)
        self._used = int(metadata(model, f"{architecture}.expert_used_count") or 0)
        self.groups = int(metadata(model, f"{architecture}.expert_group_count") or 0)
        """Of experts: of more than one, a choice is more than that of the highest scores."""
        self._layers: dict[int, int] = {}
        self._scores: np.ndarray | None = None
        self.callback = lib.ggml_backend_sched_eval_callback(self._node)  # kept: C holds a bare pointer

    def _node(self, tensor: int, asks: bool, _user: Any) -> bool:
        name, _, number = _get_name(tensor).decode().rpartition("-")
        wanted = name == _CHOSEN or (self.given is not None and name in _SCORES)
        if asks:
            return wanted
        if name in _SCORES:
            self._scores = _read(tensor, self.experts, np.float32)
        elif wanted:
            layer = self._layers.setdefault(int(number), len(self._layers))
            own = _read(tensor, self._used, np.int32)
            followed = self.hear(layer, own, self._scores)
            if followed is not None:
                _write(tensor, np.ascontiguousarray(followed, np.int32))
        return True


class Choices(LlamaHeard):
    """Another, small context of the same model. Close it."""

    def __init__(self, model: int, options: dict[str, Any], tokens: int) -> None:
        super().__init__(model)
        self._context = 0
        if self.experts:
            small = {"n_ctx": tokens, "n_batch": 1, "n_ubatch": 1}
            with LOG.aside():
                self._context = make_context(model, options | small, on_node=self.callback)

    def step(self, token: int, position: int) -> None:
        """Evaluate one token. Raises RuntimeError."""
        ids = (lib.llama_token * 1)(token)  # the batch holds a bare pointer to it
        if lib.llama_decode(self._context, lib.llama_batch_get_one(ids, 1)):
            raise RuntimeError(f"llama_decode failed at token {position + 1} of the routing's pass")

    def highest(self, vocab_size: int) -> int:
        """The id with the highest logit."""
        row = np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, -1), (vocab_size,))
        return int(row.argmax())

    def close(self) -> None:
        if self._context:
            lib.llama_free(self._context)


def _read(tensor: int, width: int, dtype: type) -> np.ndarray:
    """A tensor's rows of so many values."""
    found = np.empty((int(_rows(tensor)), width), dtype)
    for row, at in zip(found, _places(tensor, found), strict=True):
        _tensor_get(tensor, row.ctypes.data, at, row.nbytes)
    return found


def _write(tensor: int, values: np.ndarray) -> None:
    for row, at in zip(values, _places(tensor, values), strict=True):
        _tensor_set(tensor, row.ctypes.data, at, row.nbytes)


def _places(tensor: int, rows: np.ndarray) -> list[int]:
    """Where each row begins, in bytes: experts chosen are the first of each row of all, sorted."""
    row_bytes = rows.shape[1] * rows.itemsize
    step = (int(_extent(tensor)) - row_bytes) // (len(rows) - 1) if len(rows) > 1 else 0
    return [number * step for number in range(len(rows))]


_get_name, _rows, _extent = (libggml[f"ggml_{name}"] for name in ("get_name", "nrows", "nbytes"))
_tensor_get, _tensor_set = libggml["ggml_backend_tensor_get"], libggml["ggml_backend_tensor_set"]
for _function, _result in ((_get_name, ctypes.c_char_p), (_rows, ctypes.c_int64), (_extent, ctypes.c_size_t)):
    _function.argtypes, _function.restype = [ctypes.c_void_p], _result
for _function in (_tensor_get, _tensor_set):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    _function.restype = None
