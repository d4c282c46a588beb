"""The loaded model: layer classes, devices, types and bytes, counted from a torch model's modules."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from runners import torch_device

PAGE_BYTES = 4096  # or a multiple of it
# Parameters of experts of which a token uses some: as in harness.theory.tensors.
_EXPERTS = re.compile(r"(?<!shared_)experts\.|block_sparse_moe\.(in|out)put_linear")
Packed = Callable[[nn.Module], dict[str, list[Tensor]]]
"""Tensors of a quantized layer besides its parameters, by kind."""


def versions(*packages: str) -> dict[str, str]:
    """Versions of the packages; `packages`: those of a stack besides transformers."""
    names = ("torch", "transformers", "accelerate", "numpy", *packages)
    found = {name: importlib.metadata.version(name) for name in names}
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    return found | {"python": platform.python_version()}


@torch_device.memory_errors()
def hold(model: nn.Module, mmap: bool) -> None:
    """Bring the weights on the CPU into memory before timing. With `mmap`, weights mapped from the checkpoint
    stay mapped, and a byte of every page is read: otherwise an unused row of the embedding would be read from
    the disk while timing. Without it they are copied, one after another."""
    mapped, copies = _mappings(), dict[tuple[Any, ...], Tensor]()
    for tensor in _on_cpu(model):
        if mmap:
            tensor.detach().reshape(-1).view(torch.uint8)[::PAGE_BYTES].sum()
        elif mapped is None or _lies_in(tensor, mapped):
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if place not in copies:
                copies[place] = tensor.detach().clone()
            tensor.data = copies[place]  # one copy of what two modules share


def is_mapped(model: nn.Module, wanted: bool) -> bool | None:
    """Whether weights are mapped from a file; null if unknown, or if `wanted` and no stored tensor is used as
    it is: all are cast, quantized, or on a GPU."""
    mapped = _mappings()
    if mapped is None:
        return None
    return any(_lies_in(tensor, mapped) for tensor in _on_cpu(model)) or (None if wanted else False)


def _on_cpu(model: nn.Module) -> Iterator[Tensor]:
    return (t for t in (*model.parameters(), *model.buffers()) if t.device.type == "cpu" and t.numel())


def _mappings() -> list[range] | None:
    """Addresses of this process that are mapped from files (Linux); null if unknown."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    fields = [line.split(maxsplit=5) for line in lines]  # addresses, rights, offset, device, inode, path
    ends = [each[0].split("-") for each in fields if each[4] != "0"]
    return [range(int(first, 16), int(last, 16)) for first, last in ends]


def _lies_in(tensor: Tensor, mapped: list[range]) -> bool:
    return any(tensor.data_ptr() in addresses for addresses in mapped)


def model_facts(
    model: nn.Module,
    packed: Packed = lambda module: {},
    name: Callable[[nn.Module], str | None] = lambda module: None,
    weights: Mapping[nn.Module, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Classes, devices, types and exact bytes of the modules; a tensor that two modules share counts once.

    `name`: of a layer's kernel, if not its class. `weights`: the number in a layer, biases included, if they
    are not parameters.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    by_type: Counter[str] = Counter()
    by_device: Counter[str] = Counter()
    mapped = _mappings() or []
    seen: set[tuple[str, int]] = set()
    for kind, tensor in _held(model, packed):
        place = (str(tensor.device), tensor.data_ptr())
        if tensor.numel() and place not in seen:
            seen.add(place)
            by_type[kind] += tensor.nbytes
            in_file = tensor.device.type == "cpu" and _lies_in(tensor, mapped)
            by_device[f"{tensor.device}{' mapped' if in_file else ''}"] += tensor.nbytes
    experts = sum(p.nbytes for name, p in model.named_parameters() if _EXPERTS.search(name))
    tied = is_tied(model)
    return {
        "kernels": dict(Counter(name(module) or type(module).__name__ for module in _leaves(model))),
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
        # auto-gptq separates tied matrices for Marlin: two in memory, one in the model.
        "parameters": _parameters(model, tied or ties(model.config), weights),
        "input_embedding_bytes": embedding.weight.nbytes,
        "tied": tied,
        **({"expert_bytes": experts} if experts else {}),
        "vocab_size": embedding.weight.shape[0],
        "trained_context": getattr(model.config.get_text_config(), "max_position_embeddings", None),
    }


def is_tied(model: nn.Module) -> bool:
    """Whether the lm_head is the input embedding."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return bool(head.weight.data_ptr() == embedding.weight.data_ptr())


def ties(config: Any) -> bool:
    """Whether a config.json says so."""
    return bool(config.get_text_config(decoder=True).tie_word_embeddings)


def compute_dtype(model: nn.Module) -> str | None:
    """The type of the norms, by our name: that of the activations; null if mixed."""
    found = {p.dtype for name, p in model.named_parameters() if "norm" in name}
    return next((name for name, dtype in torch_device.DTYPES.items() if found == {dtype}), None)


def _leaves(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if next(module.children(), None) is None)


def _held(model: nn.Module, packed: Packed) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of weights, by the name of its type or its kind from `packed`. Other buffers and complex
    numbers are omitted: they are computed tables, not weights."""
    for module in model.modules():
        for kind, tensors in packed(module).items():  # first: of duplicates the first name counts
            yield from ((kind, tensor) for tensor in tensors)
        for parameter in module.parameters(recurse=False):
            if not parameter.is_complex():
                yield str(parameter.dtype).removeprefix("torch."), parameter


def _parameters(model: nn.Module, tied: bool, weights: Mapping[nn.Module, int]) -> int:
    """Weights and biases of the model, packed or not."""
    head = model.get_output_embeddings() if tied else None
    count = 0
    for module in model.modules():
        if module is head:
            continue
        if module in weights:
            count += weights[module]
            continue
        for name, parameter in module.named_parameters(recurse=False):
            linear = name == "weight" and isinstance(module, nn.Linear)
            if not parameter.is_complex():
                count += module.in_features * module.out_features if linear else parameter.numel()
    return count
