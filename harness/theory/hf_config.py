"""The shape of a checkpoint from its parsed config.json, as transformers would build the model. Pure.

The file is not trusted: for any content the result is a Shape or a ConfigJsonError.
Defaults and biases: configuration_*.py and modeling_*.py of transformers' llama, mistral, qwen2 and qwen3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.theory.config_values import (
    MOST,
    MOST_HEAD_DIM,
    MOST_LAYERS,
    MOST_THETA,
    MOST_TOKENS,
    NAME,
    ConfigJsonError,
    NoShape,
    count,
    flag,
    mapping,
    number,
    shown,
    within,
)
from harness.theory.shapes import Shape

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class _Family:
    """llama.cpp's name of the architecture, transformers' name of the class, defaults of missing keys."""

    arch: str
    causal: str
    context: int
    head_dim: int | None = None


_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", context=2048),
    "mistral": _Family("llama", "MistralForCausalLM", context=131_072),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM", context=32_768),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM", context=32_768, head_dim=128),
}


DENSE = tuple(_FAMILIES)
"""model_type of what `shape_of` describes."""


def shape_of(config: Mapping[str, object]) -> Shape:
    """The shape of a dense Llama, Mistral, Qwen2 or Qwen3 model for text, or of the one inside a wrapper.

    A missing number without a default is an error, never guessed. Without `num_key_value_heads` every head
    has its own. A sliding window counts if the model uses it (Mistral; Qwen with use_sliding_window) in all
    layers; Shape cannot describe one in some layers, so that is an error.
    """
    config = mapping(config, "config.json")
    kind, text = _decoder(config)
    family = _FAMILIES[kind]
    hidden = count(text, "hidden_size")
    layers = count(text, "num_hidden_layers", MOST_LAYERS)
    heads = count(text, "num_attention_heads")
    kv_heads = count(text, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        pair = f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        raise ConfigJsonError(pair)
    if text.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise ConfigJsonError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    attention_bias = kind in ("llama", "qwen3") and flag(text, "attention_bias")
    tied = "tie_word_embeddings"
    return Shape(
        arch=family.arch,
        vocab_size=count(text, "vocab_size"),
        hidden_size=hidden,
        layers=layers,
        intermediate_size=count(text, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=count(text, "head_dim", MOST_HEAD_DIM, default=family.head_dim or hidden // heads),
        tied=flag(text if text.get(tied) is not None else config, tied),
        qkv_bias=kind == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=kind == "llama" and flag(text, "mlp_bias"),
        qk_norm=kind == "qwen3",
        rope_theta=_theta(text),
        norm_eps=number(text, "rms_norm_eps", 1, default=1e-6),
        context=count(text, "max_position_embeddings", MOST_TOKENS, default=family.context),
        window=_window(text, kind, layers),
    )


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint's weights are stored. `method`: as transformers names it. `words`: for people.
    `options`: what a stack that applies the method must be asked for, by the names of its options."""

    method: str
    words: str
    options: Mapping[str, str | int | float] = field(default_factory=dict)


def quantization_of(config: Mapping[str, object]) -> Quantization | None:
    """How the weights are quantized ("gptq 4-bit, group 128"); null if they are not.

    Invalid details are omitted; an invalid method is a ConfigJsonError.
    """
    for key, given in quantization_configs(config):
        if found := _quantization(given, key):
            return found
    return None


def modelopt(given: Mapping[str, object]) -> Quantization | None:
    """From ModelOpt's separate file, hf_quant_config.json. Raises ConfigJsonError."""
    settings = mapping(given.get("quantization"), "quantization")
    return _quantization({**settings, "quant_method": "modelopt"}, "quantization")


def quantization_configs(config: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The quantization of a config.json, by its keys. Raises ConfigJsonError."""
    config = mapping(config, "config.json")
    for place in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config", "quantization"):  # the last is MLX's own
            given = place.get(key) if isinstance(place, Mapping) else None
            if given is not None:
                yield key, mapping(given, key)


def _quantization(given: Mapping[str, object], key: str) -> Quantization | None:
    if not given:
        return None
    method = given.get("quant_method")
    if method is None:  # early bitsandbytes and MLX do not name their method
        flags = {"load_in_4bit", "load_in_8bit"} & given.keys()
        method = "bitsandbytes" if flags else "mlx" if "bits" in given else "unnamed"
    if not isinstance(method, str) or not NAME.fullmatch(method):
        raise ConfigJsonError(f"{key}.quant_method must be a name, not {shown(method)}")
    bits, group, blocks = _details(given)
    found = method.lower() + (f" {bits}-bit" if bits else "") + _type_of(given)
    options: dict[str, str | int | float] = {}
    if method.lower() == "bitsandbytes":
        named = given.get("bnb_4bit_quant_type") or "fp4"  # transformers' own default
        kind = str(named) if bits == 4 else "int8"
        nested = bits == 4 and given.get("bnb_4bit_use_double_quant") is True
        options = {"quant": kind, "double_quant": nested}
        found += f" ({kind})" if kind in ("nf4", "fp4") else ""
        found += ", double_quant" if nested else ""
    rules = ", rules for single layers" if given.get("dynamic") else ""
    words = found + (f", {group}" if group else "") + (f", {blocks}" if blocks else "") + rules
    return Quantization(method.lower(), words, options)


def _type_of(given: Mapping[str, object]) -> str:
    """The type of the weights where it says more than their bits: ModelOpt's, Quark's, floats; or empty."""
    settings = _of_weights(given)
    if settings.get("type") == "float":
        return " float"
    name = next((n for key in ("quant_algo", "dtype") if isinstance(n := settings.get(key), str)), "")
    return f" {name.lower()}" if NAME.fullmatch(name) else ""


def _of_weights(given: Mapping[str, object]) -> Mapping[str, Any]:
    """The settings with those of the weights, which compressed-tensors, Quark and HQQ nest."""
    groups = given.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    nested: list[object] = [first.get("weights")] if isinstance(first, Mapping) else []
    for outer, inner in (("global_quant_config", "weight"), ("quant_config", "weight_quant_params")):
        if isinstance(place := given.get(outer), Mapping):
            nested.append(place.get(inner))
    for found in nested:
        if isinstance(found, Mapping):
            return {**given, **found}
    return given


def _details(given: Mapping[str, object]) -> tuple[int | None, str, str]:
    """Bits, group and blocks; null or empty if not given."""
    settings = _of_weights(given)
    names = ("bits", "w_bit", "num_bits", "nbits")
    bits = next((settings[name] for name in names if within(settings.get(name), 64)), None)
    if bits is None:
        bits = (
            4 if settings.get("load_in_4bit") is True else 8 if settings.get("load_in_8bit") is True else None
        )
    size = settings.get("group_size", settings.get("q_group_size"))
    group = f"group {size}" if within(size, MOST) else "one group a row" if size == -1 else ""
    block = settings.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(within(side, MOST) for side in block):
        return bits, group, f"blocks of {block[0]} x {block[1]}"
    return bits, group, ""


def _decoder(config: Mapping[str, object], nested: bool = False) -> tuple[str, Mapping[str, object]]:
    """The family, and the part of the file with the text model."""
    kind = config.get("model_type")
    named = kind if isinstance(kind, str) and NAME.fullmatch(kind) else "this model"
    for key in _EXPERTS:
        if count(config, key, default=1, least=0) > 1:
            raise ConfigJsonError(f"{named} is a mixture of experts; only dense models are known")
    if kind is None and not nested:
        kind = next((name for name in _FAMILIES if _is_causal(config, name)), None)
    if not isinstance(kind, str) or kind not in _FAMILIES:
        inner = config.get("text_config")
        if not nested and isinstance(inner, Mapping):
            return _decoder(inner, nested=True)
        what = "text_config.model_type" if nested else "model_type"
        problem = f"{what} is missing" if kind is None else f"{what} {shown(kind)} is not known"
        mistake = NoShape if isinstance(kind, str) else ConfigJsonError
        raise mistake(f"{problem}; known: {', '.join(_FAMILIES)}")
    if config.get("architectures") is not None and not _is_causal(config, kind):
        names = config["architectures"]
        first = names[0] if isinstance(names, list) and names else names
        raise ConfigJsonError(f"architectures must name {_FAMILIES[kind].causal}, not {shown(first)}")
    return kind, config


def _is_causal(config: Mapping[str, object], kind: str) -> bool:
    """Whether the architectures name the causal language model; early LLaMA files have LLaMAForCausalLM."""
    names = config.get("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and name.lower() == _FAMILIES[kind].causal.lower() for name in names[:10]
    )


def _theta(config: Mapping[str, object]) -> float:
    """Transformers 5 keeps it in rope_parameters, which takes precedence over the key of transformers 4."""
    inner = config.get("rope_parameters")
    if inner is not None and (known := mapping(inner, "rope_parameters")).get("rope_theta") is not None:
        return number(known, "rope_theta", MOST_THETA)
    return number(config, "rope_theta", MOST_THETA, default=10_000.0)


def _window(config: Mapping[str, object], kind: str, layers: int) -> int | None:
    if kind == "llama" or (kind != "mistral" and not flag(config, "use_sliding_window")):
        return None
    if config.get("sliding_window", 4096) is None:  # a missing key is 4096, null is none
        return None
    window = count(config, "sliding_window", MOST_TOKENS, default=4096)
    if kind == "mistral":
        return window
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise ConfigJsonError(f"layer_types must be a list of {layers}, one for each layer")
        sliding = sum(1 for layer in types if layer == "sliding_attention")
    else:
        sliding = max(0, layers - count(config, "max_window_layers", default=28, least=0))
    if 0 < sliding < layers:
        raise NoShape(f"a sliding window over {sliding} of {layers} layers; known: over all or none")
    return window if sliding else None
