"""Which experts the routers of a mixture choose in llama.cpp, through its evaluation callback.

In a context of its own: the callback is a parameter of a context, and asks for every node of its graph, which
would cost timed tokens milliseconds.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from runners.llamacpp_lib import LOG, lib, libggml, make_context, metadata

_CHOSEN = b"ffn_moe_topk-"  # and the layer's number: cb() in build_moe_ffn, llama-graph.cpp


class Choices:
    """A small context of the same model, which counts the experts of each layer. Close it."""

    def __init__(self, model: int, options: dict[str, Any], tokens: int) -> None:
        self._counts: dict[int, np.ndarray] = {}
        architecture = metadata(model, "general.architecture")
        self._used = int(metadata(model, f"{architecture}.expert_used_count") or 0)
        self._experts = int(metadata(model, f"{architecture}.expert_count") or 0)
        self._callback = lib.ggml_backend_sched_eval_callback(self._hear)  # kept: C holds a bare pointer
        self._context = 0
        if self._experts:
            small = {"n_ctx": tokens, "n_batch": 1, "n_ubatch": 1}
            with LOG.aside():
                self._context = make_context(model, options | small, on_node=self._callback)

    @property
    def experts(self) -> int:
        """In a layer; 0: the model is no mixture."""
        return self._experts

    def step(self, token: int, position: int) -> None:
        """Evaluate one token. Raises RuntimeError."""
        ids = (lib.llama_token * 1)(token)  # the batch holds a bare pointer to it
        if lib.llama_decode(self._context, lib.llama_batch_get_one(ids, 1)):
            raise RuntimeError(f"llama_decode failed at token {position + 1} of the routing's pass")

    def highest(self, vocab_size: int) -> int:
        """The id with the highest logit."""
        row = np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, -1), (vocab_size,))
        return int(row.argmax())

    def begin(self) -> None:
        """Count from now on."""
        self._counts = {}

    def counts(self) -> list[list[int]]:
        """By layer: of each expert."""
        return [self._counts[layer].tolist() for layer in sorted(self._counts)]

    def close(self) -> None:
        if self._context:
            lib.llama_free(self._context)

    def _hear(self, tensor: int, asks: bool, _user: Any) -> bool:
        name = _get_name(tensor)
        if not name.startswith(_CHOSEN):
            return not asks
        if not asks:
            chosen = np.empty(self._used, np.int32)  # of one token, the first of the sorted experts
            _tensor_get(tensor, chosen.ctypes.data, 0, chosen.nbytes)
            layer = int(name[len(_CHOSEN) :])
            counts = self._counts.setdefault(layer, np.zeros(self._experts, np.int64))
            counts[chosen] += 1
        return True


_get_name, _tensor_get = libggml["ggml_get_name"], libggml["ggml_backend_tensor_get"]
_get_name.argtypes, _get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
_tensor_get.restype = None
