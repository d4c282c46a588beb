"""A dense model from its parsed config.json, as transformers would build it, and known ones by name. Pure.

The file is not trusted: for any content the result is a Decoder or a ConfigJsonError. Defaults and biases:
configuration_*.py and modeling_*.py of transformers' llama, mistral, qwen2 and qwen3.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from harness.base import data
from harness.theory.config_settings import (
    MOST_THETA,
    MOST_TOKENS,
    ConfigJsonError,
    NoShape,
    Settings,
    Values,
    settings_of,
    shown,
)
from harness.theory.decoder import Decoder, dense

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


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
"""model_type of what `dense_of` describes."""


def dense_of(values: Values) -> Decoder:
    """A dense Llama, Mistral, Qwen2 or Qwen3 model for text.

    A missing number without a default is an error, never guessed. Without `num_key_value_heads` every head
    has its own. A sliding window counts if the model uses it (Mistral; Qwen with use_sliding_window) in all
    layers; one in some layers is an error.
    """
    kind, family = values.kind, _FAMILIES[values.kind]
    for key in EXPERTS:
        if values.count(key, default=1, least=0) > 1:
            raise ConfigJsonError(f"{kind} is a mixture of experts; only dense models are known")
    if (names := values.get("architectures")) is not None and not _is_causal(values, kind):
        first = names[0] if isinstance(names, list) and names else names
        raise ConfigJsonError(f"architectures must name {family.causal}, not {shown(first)}")
    defaults = {"max_position_embeddings": family.context, "head_dim": family.head_dim}
    values = Values(values | {key: default for key, default in defaults.items() if values.get(key) is None})
    heads, layers = values.heads(), values.layers
    attention_bias = kind in ("llama", "qwen3") and values.flag("attention_bias")
    return dense(
        arch=family.arch,
        vocab_size=values.vocab,
        hidden_size=values.hidden,
        layers=layers,
        intermediate_size=values.count("intermediate_size"),
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        tied=values.tied,
        qkv_bias=kind == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=kind == "llama" and values.flag("mlp_bias"),
        qk_norm=kind == "qwen3",
        rope_theta=_theta(values),
        norm_eps=values.number("rms_norm_eps", 1, default=1e-6),
        context=values.context,
        window=_window(values, kind, layers),
    )


def dense_kind(config: Settings) -> str | None:
    """The model_type of a file without one, by its architectures; None: another, or none."""
    return next((kind for kind in DENSE if _is_causal(config, kind)), None)


def _is_causal(config: Settings, kind: str) -> bool:
    """Whether the architectures name the causal language model; early LLaMA files have LLaMAForCausalLM."""
    names = config.get("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and name.lower() == _FAMILIES[kind].causal.lower() for name in names[:10]
    )


def _theta(config: Settings) -> float:
    """Transformers 5 keeps it in rope_parameters, which takes precedence over the key of transformers 4."""
    inner = config.get("rope_parameters")
    rope = settings_of({} if inner is None else inner, "rope_parameters")
    if rope.get("rope_theta") is not None:
        return rope.number("rope_theta", MOST_THETA)
    return config.number("rope_theta", MOST_THETA, default=10_000.0)


def _window(config: Settings, kind: str, layers: int) -> int | None:
    if kind == "llama" or (kind != "mistral" and not config.flag("use_sliding_window")):
        return None
    if config.get("sliding_window", 4096) is None:  # a missing key is 4096, None is none
        return None
    window = config.count("sliding_window", most=MOST_TOKENS, default=4096)
    if kind == "mistral":
        return window
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise ConfigJsonError(f"layer_types must be a list of {layers}, one for each layer")
        sliding = sum(1 for layer in types if layer == "sliding_attention")
    else:
        sliding = max(0, layers - config.count("max_window_layers", default=28, least=0))
    if 0 < sliding < layers:
        raise NoShape(f"a sliding window over {sliding} of {layers} layers; known: over all or none")
    return window if sliding else None


# Shapes of common model families by name, from the config.json of each in data/models.json. Pure.
#
# A name stands for the base model as the hub has it (Qwen3: the one without a suffix). `vocab_size` is the
# rows stored, padding included: Qwen2's are 151,936 in small models and 152,064 in large ones. Qwen1.5: all
# untied, as in the published tables and the GGUF files (on the hub 0.5B ties its embeddings). -mha: without
# GQA, which the published study lists besides the real ones. The tiny ones are for tests and first tries:
# their speed is meaningless.


SHAPES: dict[str, Decoder] = {
    name: dense_of(Values(config)) for name, config in json.loads(data.text("models.json")).items()
}
