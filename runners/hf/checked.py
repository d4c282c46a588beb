"""Is a model of transformers what its files hold and its name says? Checked before and after it loads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runners.hf import loading
from runners.protocol import Refused
from runners.weights.safetensors import FLOATS, NOT_WEIGHTS, Stored, json_object

# Tensors of a checkpoint without which the same tokens are decoded.
WITHOUT_EFFECT = re.compile(
    "|".join(
        (
            *(rf"{re.escape(end)}$" for end in NOT_WEIGHTS),  # tables and masks that transformers computes
            r"\.(attn|attention)\.bias$|\.attn\.causal_mask$|\.inv_freq$|position_ids$",  # those of others
            # Towers of other senses: a text uses none. The controller counts none: _OTHER_SENSES there.
            r"(^|\.)(vision|visual|audio|image|multi_modal|mm_)",
        )
    )
)
_PLAIN = (*FLOATS, "F64")


def quantization_in(source: Path) -> dict[str, Any]:
    """The quantization that a checkpoint's config.json describes; empty for none."""
    config = json_object(source / "config.json")
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        if isinstance(given := place.get("quantization_config"), dict) and given:
            return given
    return {}


def check_unquantized(source: Path, stored: Mapping[str, Stored], stack: str) -> None:
    """Raises Refused for a checkpoint whose weights are not 16- or 32-bit floats. Of such a one transformers
    dequantizes the weights, takes their codes for weights, or leaves out their scales, by the method."""
    given = quantization_in(source)
    coded = (
        f"{name} is stored as {tensor.dtype}"
        for name, tensor in sorted(stored.items())
        if tensor.dtype not in _PLAIN and not WITHOUT_EFFECT.search(name)
    )
    found = next(coded, "")
    if not (given or found):
        return
    words = " ".join(str(given[key]) for key in ("quant_method", "quant_algo", "format") if given.get(key))
    kind = "is quantized" + (f" ({words})" if words else "") + (f": {found}" if found else "")
    raise Refused(
        f"{source}: {kind}; {stack} loads only 16- and 32-bit checkpoints: name the one that this was made of"
    )


def check_whole(source: Path, model: nn.Module, found: Mapping[str, Any]) -> None:
    """Raises ValueError unless all parameters are from the checkpoint, and all of its tensors in the model.

    `found`: transformers' loading info; the tensors that a model's class declares to be left out, such as
    heads that draft, are not in it.
    """
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{source}: has no {missing[0]}, which its config.json requires")
    if odd := sorted(str(key[0]) for key in found["mismatched_keys"]):
        raise ValueError(f"{source}: its {odd[0]} has another size than in its config.json")
    check_none_left(source, found["unexpected_keys"])
    if found["error_msgs"]:
        raise ValueError(f"{source}: {found['error_msgs'][0]}")
    if loading.ties(model.config) and not loading.is_tied(model):
        raise ValueError(
            f"{source}: its config.json ties the lm_head to the embedding, but its lm_head.weight is another:"
            " remove the tensor, or set tie_word_embeddings to false"
        )


def check_none_left(source: Path, left: Iterable[str]) -> None:
    """Raises ValueError for tensors of a checkpoint that are left out, unless they have no effect."""
    if names := sorted(name for name in left if not WITHOUT_EFFECT.search(name)):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(
            f"{source}: has {names[0]}{more}, which the model of its config.json does not have: correct"
            " config.json, else another model would be measured"
        )


def check_types(source: Path, model: nn.Module, dtype: torch.dtype, quantized: tuple[type, ...] = ()) -> None:
    """Raises Refused if a matrix outside of the `quantized` layers has another type than the requested one.
    Not those that the model's own class keeps in float32."""
    kept = re.compile("|".join(_kept_in_float32(model)) or "$^")
    for path, module in model.named_modules():
        if isinstance(module, quantized):
            continue
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if parameter.dim() > 1 and parameter.dtype != dtype and not kept.search(name):
                has, asked = (str(each).removeprefix("torch.") for each in (parameter.dtype, dtype))
                raise Refused(f"{source}: its {name} was loaded as {has}, and {asked} was requested")


def _kept_in_float32(model: nn.Module) -> list[str]:
    named = (getattr(model, f"_keep_in_fp32_modules{end}", None) or () for end in ("", "_strict"))
    return [re.escape(name) for names in named for name in names]
