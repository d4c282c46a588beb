"""What was really loaded: layer classes, devices, types and bytes, counted from a torch model's modules."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from runners import torch_device

PAGE_BYTES = 4096  # or a multiple of it
# How a step reads a cache of these layers. A static one of a window is not here: it reads less than n_ctx.
_READ = {"DynamicLayer": "copied", "DynamicSlidingWindowLayer": "window", "StaticLayer": "full"}
Packed = Callable[[nn.Module], dict[str, Tensor]]
"""Of a quantized layer: what it holds beside its parameters and buffers, by a name for each."""


def versions(*packages: str) -> dict[str, str]:
    """Versions of what runs; `packages`: those of a stack beside transformers."""
    names = ("torch", "transformers", "accelerate", "numpy", *packages)
    found = {name: importlib.metadata.version(name) for name in names}
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    return found | {"python": platform.python_version()}


def page_in(model: nn.Module) -> None:
    """Read a byte of every page of the weights on the CPU. They are mapped from the checkpoint, and a row of
    the embedding that no token has asked for yet would come from the disk while timing."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.detach().reshape(-1).view(torch.uint8)[::PAGE_BYTES].sum()


def model_facts(model: nn.Module, packed: Packed = lambda module: {}) -> dict[str, Any]:
    """Classes, devices, types and exact bytes of the modules; a tensor that two modules share counts once."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    by_type: Counter[str] = Counter()
    by_device: Counter[str] = Counter()
    seen: set[tuple[str, int]] = set()
    for name, tensor in _held(model, packed):
        place = (str(tensor.device), tensor.data_ptr())
        if tensor.numel() and place not in seen:
            seen.add(place)
            by_type[name] += tensor.nbytes
            by_device[str(tensor.device)] += tensor.nbytes
    tied = head.weight.data_ptr() == embedding.weight.data_ptr()
    return {
        "kernels": dict(Counter(type(module).__name__ for module in _leaves(model))),
        "leftovers": [],
        "devices": {
            "parameters": dict(Counter(str(p.device) for p in model.parameters())),
            "buffers": dict(Counter(str(b.device) for b in model.buffers())),
        },
        "lm_head": {
            "class": type(head).__name__,
            "dtype": str(head.weight.dtype).removeprefix("torch."),
        },
        "model_bytes": sum(by_type.values()),
        "bytes_by_type": dict(by_type),
        "memory": {"model": dict(by_device)},
        "parameters": _parameters(model, tied),
        "input_embedding_bytes": embedding.weight.nbytes,
        "tied": tied,
        "vocab_size": embedding.weight.shape[0],
        "trained_context": getattr(model.config.get_text_config(), "max_position_embeddings", None),
    }


def cache_facts(config: Any, cache: Any, dtype: torch.dtype) -> dict[str, Any]:
    """How a step reads the KV cache, where that is, and the bytes that a token adds to it; null where layers
    differ in that."""
    kinds = [type(layer).__name__ for layer in cache.layers]
    text, (kv_heads, head_dim) = config.get_text_config(decoder=True), _kv_shape(config)
    read = _READ.get(kinds[0]) if len(set(kinds)) == 1 else None
    held = [
        tensor
        for layer in cache.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if tensor is not None
    ]
    on: Counter[str] = Counter()
    for tensor in held:
        on[str(tensor.device)] += tensor.nbytes
    return {
        "kv_read": read,
        "window": getattr(text, "sliding_window", None) if read == "window" else None,
        "kv_bytes_per_token": read and 2 * len(kinds) * kv_heads * head_dim * dtype.itemsize,
        "kv_layers": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "memory": dict(on),
        "devices": dict(Counter(str(tensor.device) for tensor in held)),
    }


def _kv_shape(config: Any) -> tuple[int, int]:
    """KV heads and head size."""
    text = config.get_text_config(decoder=True)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return kv_heads, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def all_are(kind: type, cache: Any) -> bool:
    """Whether a cache's layers are plain ones of a kind, none of them with a window or a state."""
    return {type(layer) for layer in cache.layers} == {kind}


@torch_device.memory_errors()
@torch.inference_mode()
def allocate(cache: StaticCache, config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Take a static cache's memory at once, where its layers are plain: what is far too large is then refused
    by torch, before the first step makes a mask as long and the kernel kills the process."""
    if all_are(StaticLayer, cache):
        cache.early_initialization(1, *_kv_shape(config), dtype, device)


def deepened(cache: DynamicCache, tokens: int, config: Any) -> DynamicCache | None:
    """A cache of so many tokens, all as the one that `cache` holds; null where not all layers are plain."""
    if not all_are(DynamicLayer, cache):
        return None
    held = [[state.repeat(1, 1, tokens, 1) for state in (layer.keys, layer.values)] for layer in cache.layers]
    return DynamicCache(held, config=config)


def compute_dtype(model: nn.Module) -> str | None:
    """The type of the norms, by our name: what activations are computed in; null for a mixture."""
    found = {p.dtype for name, p in model.named_parameters() if "norm" in name}
    return next((name for name, dtype in torch_device.DTYPES.items() if found == {dtype}), None)


def _leaves(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if next(module.children(), None) is None)


def _held(model: nn.Module, packed: Packed) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of weights, by its type's name or the one that `packed` gives it. Buffers are left out
    but for those: they are tables that the code makes, not weights."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            yield str(parameter.dtype).removeprefix("torch."), parameter
        yield from packed(module).items()


def _parameters(model: nn.Module, tied: bool) -> int:
    """Weights and biases as the model has them, however they are packed."""
    head = model.get_output_embeddings() if tied else None
    count = 0
    for module in model.modules():
        if module is head:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            linear = name == "weight" and isinstance(module, nn.Linear)
            count += module.in_features * module.out_features if linear else parameter.numel()
    return count
