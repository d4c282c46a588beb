"""The KV cache of a llama.cpp context: what it holds, how it is cut, copied and brought back."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from runners.llamacpp_lib import lib


class LlamaContext:
    """One context, whose only sequence has the number 0; see runners.protocol.Session."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._memory = lib.llama_get_memory(context)

    def held(self) -> int:
        """Tokens in the KV cache."""
        return int(lib.llama_memory_seq_pos_max(self._memory, 0)) + 1

    def truncate(self, tokens: int) -> None:
        """Forget all but the first `tokens`. Raises RuntimeError if this model's cache cannot."""
        lib.llama_synchronize(self._context)
        # A layer with a window has dropped what is before it, and llama.cpp would go on without.
        window = lib.llama_model_n_swa(lib.llama_get_model(self._context))
        oldest = lib.llama_memory_seq_pos_min(self._memory, 0)
        if window and tokens < self.held() and oldest > max(0, tokens - window):
            raise RuntimeError(
                f"the cache of layers with a window begins at token {oldest + 1}: to go back to {tokens}, "
                "set swa_full: true"
            )
        if not lib.llama_memory_seq_rm(self._memory, 0, tokens, -1):
            raise RuntimeError("llama.cpp cannot remove the end of this model's cache")

    def context_bytes(self) -> int:
        """Bytes of a copy of the context."""
        lib.llama_synchronize(self._context)
        return int(lib.llama_state_seq_get_size(self._context, 0))

    def keep(self) -> np.ndarray:
        """A copy of the context, for restore()."""
        kept = np.empty(self.context_bytes(), np.uint8)
        wrote = lib.llama_state_seq_get_data(self._context, _bytes_at(kept), kept.size, 0)
        if wrote != kept.size:
            raise RuntimeError(f"llama.cpp copied {wrote} bytes of its context, {kept.size} announced")
        return kept

    def restore(self, kept: np.ndarray, tokens: int) -> None:
        """Bring back the first `tokens` of a kept context. Raises RuntimeError if llama.cpp refuses it."""
        lib.llama_synchronize(self._context)
        if not lib.llama_state_seq_set_data(self._context, _bytes_at(kept), kept.size, 0):
            raise RuntimeError("llama.cpp refuses the context that was kept")
        self.truncate(tokens)

    def write_kept(self, kept: np.ndarray, path: Path) -> None:
        """Write a kept context to a file."""
        kept.tofile(path)

    def read_kept(self, path: Path) -> np.ndarray:
        """A kept context of a file."""
        return np.fromfile(path, np.uint8)

    def evaluated(self) -> int:
        """Tokens evaluated since the context was emptied, by llama.cpp's own count."""
        lib.llama_synchronize(self._context)
        return evaluated_in(lib.llama_perf_context(self._context))


def _bytes_at(buffer: np.ndarray) -> Any:
    return buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def evaluated_in(perf: Any) -> int:
    """Tokens evaluated. llama.cpp counts single tokens and batches separately, and reports 1 for 0."""
    batched = 0 if perf.n_p_eval == 1 else perf.n_p_eval
    single = 0 if perf.n_eval == 1 and perf.t_eval_ms == 0 else perf.n_eval
    return batched + single
