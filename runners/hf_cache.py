"""The context of a decode in transformers' own caches: allocate, clear, deepen; how a step reads it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from runners import torch_device

# How a step reads a cache of these layers. A static sliding window is missing: it reads less than n_ctx.
_READ = {"DynamicLayer": "copied", "DynamicSlidingWindowLayer": "window", "StaticLayer": "full"}


class TransformersCache:
    """A dynamic cache, or a static one of `n_ctx` tokens, which is one block of memory for all generations.

    `capacity`: the tokens it is meant for. `in_chunks`: accepts several tokens after others. `same_buffers`:
    it stays at the same address for every step.
    """

    in_chunks = True

    def __init__(self, config: Any, kind: str, n_ctx: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = n_ctx
        self._config, self._dtype, self._device = config, dtype, device
        self._static = StaticCache(config=config, max_cache_len=n_ctx) if kind == "static" else None
        self._cache = self._emptied()
        self.same_buffers = self._all_are(StaticLayer)

    @torch_device.memory_errors()
    @torch.inference_mode()
    def allocate(self) -> None:
        """Allocate a static cache at once if its layers are plain: then torch refuses one that is far too
        large, before the first step makes a mask of that length and the kernel kills the process."""
        if self._static is not None and self.same_buffers:
            shape = _kv_shape(self._config)
            self._static.early_initialization(1, *shape, self._dtype, self._device)

    def empty(self, tokens: int) -> None:
        """Reset, with room for so many tokens. Raises ValueError for a static cache that is too short."""
        if self._static is not None and tokens > self.capacity:
            raise ValueError(
                f"a static cache of n_ctx {self.capacity} cannot hold the {tokens} tokens asked for"
            )
        self._cache = self._emptied()

    @torch.inference_mode()  # a static cache written in it can only be zeroed in it
    def _emptied(self) -> DynamicCache | StaticCache:
        if self._static is None:
            return DynamicCache(config=self._config)
        self._static.reset()
        return self._static

    @torch_device.memory_errors()
    @torch.inference_mode()
    def deepen(self, tokens: int) -> bool:
        """Repeat the first token to this depth, to load the kernels that run there; whether that is possible.
        Takes no more memory than decoding to it."""
        if not self._all_are(DynamicLayer):
            return False
        layers = self._cache.layers
        firsts = [[state[:, :, :1].clone() for state in (each.keys, each.values)] for each in layers]
        del layers
        self._cache = self._emptied()  # frees the shallower one
        held = [[state.expand(-1, -1, tokens, -1) for state in states] for states in firsts]
        self._cache = DynamicCache(held, config=self._config)
        return True

    @torch.inference_mode()
    def keep(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer. A step of a dynamic cache makes new tensors and leaves these."""
        if not self.tokens():
            return []
        if not all(hasattr(layer, "keys") for layer in self._cache.layers):
            raise ValueError("a context with states that do not grow with its tokens cannot be kept or cut")
        return [(layer.keys, layer.values) for layer in self._cache.layers]

    @torch.inference_mode()
    def restore(self, kept: list[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> None:
        """A dynamic cache of the first `tokens` of those kept. Raises ValueError for a static one."""
        if not tokens:
            self._cache = self._emptied()
            return
        if self._static is not None:
            raise ValueError("a static cache cannot be cut to fewer tokens")
        held = [[state[:, :, :tokens].to(self._device) for state in (keys, values)] for keys, values in kept]
        self._cache = DynamicCache(held, config=self._config)

    def arguments(self) -> dict[str, Any]:
        """The arguments of a forward pass for it."""
        return {"past_key_values": self._cache, "use_cache": True}

    def tokens(self) -> int:
        """Tokens that it holds."""
        return int(self._cache.get_seq_length())

    def facts(self) -> dict[str, Any]:
        """How a step reads it, its device, and the bytes per token; null if layers differ."""
        kinds = [type(layer).__name__ for layer in self._cache.layers]
        text, (kv_heads, head_dim) = self._config.get_text_config(decoder=True), _kv_shape(self._config)
        read = _READ.get(kinds[0]) if len(set(kinds)) == 1 else None
        held = [
            tensor
            for layer in self._cache.layers
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if tensor is not None
        ]
        on: Counter[str] = Counter()
        for tensor in held:
            on[str(tensor.device)] += tensor.nbytes
        static = self._static is not None
        return {
            "options": {
                "cache": "static" if static else "dynamic",
                "n_ctx": max(getattr(layer, "max_cache_len", 0) for layer in self._cache.layers)
                if static
                else None,
            },
            "kv_read": read,
            "window": getattr(text, "sliding_window", None) if read == "window" else None,
            "kv_bytes_per_token": read and 2 * len(kinds) * kv_heads * head_dim * self._dtype.itemsize,
            "kv_layers": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "memory": dict(on),
            "devices": dict(Counter(str(tensor.device) for tensor in held)),
        }

    def _all_are(self, kind: type) -> bool:
        """Whether all layers are plain ones of a kind, without a window or a state."""
        return {type(layer) for layer in self._cache.layers} == {kind}


def _kv_shape(config: Any) -> tuple[int, int]:
    """KV heads and head size."""
    text = config.get_text_config(decoder=True)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return kv_heads, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
