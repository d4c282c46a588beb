"""Tensors and kernels of a loaded model with packed linear layers, counted from its modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from runners import hf_checked, hf_loaded
from runners.protocol import Refused
from runners.safetensors_folder import stored_in

Named = Callable[[nn.Module], str | None]
"""The name of the kernel that a layer calls; null for a layer that is not packed."""

# Tensors of a packed layer -> the kinds in which a checkpoint's bytes are counted; null: by type. `B` and `s`
# are Marlin's.
KINDS = {"qweight": "qweight", "B": "qweight", "qzeros": "qzeros", "scales": "scales", "s": "scales"}
KINDS |= {"g_idx": "g_idx", "bias": None}
UNPACKS = (
    "every product unpacks the whole matrix first: it shows that the model is right, and no kernel's speed"
)


def check_whole(source: Path, trusted: bool) -> set[str]:
    """The names of all tensors that a model of this config.json has, before it is packed.

    Raises ValueError for a checkpoint that lacks one or has others, or in which only some linear layers are
    packed, or the lm_head too: auto-gptq and autoawq would silently leave such a layer uninitialized.
    """
    stored = stored_in(source)
    config = AutoConfig.from_pretrained(source, trust_remote_code=trusted, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
    if "lm_head.qweight" in stored:
        raise ValueError(f"{source}: its lm_head is packed too, which is not supported")
    for name, tensor in model.state_dict().items():
        packed = name.removesuffix("weight") + "qweight"
        tied = name == "lm_head.weight" and config.tie_word_embeddings
        if not tied and name not in stored and packed not in stored:
            raise ValueError(f"{source}: has no {name}, which its config.json requires")
        if ".layers." in name and name in stored and tensor.dim() == 2:
            raise ValueError(f"{source}: has {name} unpacked besides packed layers, which is not supported")
    places = set(model.state_dict())
    layers = {name.removesuffix("qweight") for name in stored if name.endswith(".qweight")}
    layers &= {name.removesuffix("weight") for name in places}
    packed_places = {layer + part for layer in layers for part in KINDS}
    hf_checked.check_none_left(source, stored.keys() - places - packed_places)
    return places


def check_bits(source: Path, model: nn.Module, name: Named, bits: int) -> None:
    """Raises Refused if a packed layer has another number of bits, as rules by layer (`dynamic`) give it. A
    kernel that knows one number alone does not name it."""
    found = {getattr(module, "bits", bits) for module in model.modules() if name(module)}
    if others := sorted(found - {bits}):
        more = " and ".join(map(str, others))
        raise Refused(f"{source}: has layers of {more} bits beside {bits}, and is none of {bits} bits")


def kernel_facts(
    model: nn.Module, name: Named, expected: str, known: Collection[str] | None = None
) -> dict[str, Any]:
    """As hf_loaded.model_facts. `expected`: the kernel that every linear layer but lm_head should call; those
    that call another are `leftovers`. `known`: the result of check_whole: biases outside of it were added by
    the stack; null: it adds none."""
    head = model.get_output_embeddings()
    weights = {
        module: _weights(module, known is None or f"{path}.bias" in known)
        for path, module in model.named_modules()
        if name(module)
    }
    linear = {
        path: module
        for path, module in model.named_modules()
        if module in weights or (isinstance(module, nn.Linear) and module is not head)
    }
    other = sorted(path for path, module in linear.items() if name(module) != expected)
    return {
        **hf_loaded.model_facts(
            model, lambda module: _held(module) if module in weights else {}, name, weights
        ),
        "kernel_asked": expected,
        "leftovers": other if len(other) < len(linear) else [],
    }


def _weights(layer: nn.Module, with_bias: bool) -> int:
    """Weights and biases, packed or not. The three libraries have two names for a layer's size."""
    n_in = layer.in_features if hasattr(layer, "in_features") else layer.infeatures
    n_out = layer.out_features if hasattr(layer, "out_features") else layer.outfeatures
    return n_in * n_out + (layer.bias.numel() if with_bias and layer.bias is not None else 0)


def _held(layer: nn.Module) -> dict[str, list[Tensor]]:
    """A packed layer's tensors by kind."""
    found: dict[str, list[Tensor]] = {}
    for part, kind in KINDS.items():
        if isinstance(tensor := getattr(layer, part, None), Tensor):
            found.setdefault(kind or str(tensor.dtype).removeprefix("torch."), []).append(tensor)
    return found


def lacks(module: str, device: torch.device, since: tuple[int, int] | None = None) -> str | None:
    """Why a kernel with compiled code in `module` does not run here; null if it does. `since`: the compute
    capability that it needs."""
    if device.type != "cuda":
        return "needs a GPU (cuda)"
    try:
        importlib.import_module(module)
    except Exception as failure:  # it is missing, or torch no longer has a symbol
        return f"{module} does not load: {str(failure).splitlines()[0]}"
    has = torch.cuda.get_device_capability(device)
    if since and has < since:
        return f"needs compute capability {since[0]}.{since[1]}; this GPU has {has[0]}.{has[1]}"
    return None
