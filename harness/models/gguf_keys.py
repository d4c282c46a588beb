"""The keys that llama.cpp reads of a model that is converted here (layout.KINDS), from its config.json.

Names and meaning: gguf-py/gguf/constants.py and conversion/*.py of llama.cpp. A key that an architecture does
not read does no harm. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.models.yarn import TRUNCATED
from harness.theory.config_settings import MOST_THETA, MOST_TOKENS, Settings, settings_of
from harness.theory.decoder import Decoder

Value = int | float | str | list[int]
# Where config.json has no such key: configuration_*.py of transformers.
_THETA = {
    "gpt_oss": 150_000.0,
    **dict.fromkeys(("gemma3_text", "gemma3", "lfm2", "lfm2_moe", "mixtral"), 1e6),
}
_EPSILON = {"qwen3_moe": 1e-6, "gemma3_text": 1e-6, "gemma3": 1e-6}
SIGMOID = 2  # of llama.cpp's ExpertGatingFuncType


def metadata_keys(config: Mapping[str, Any], model: Decoder) -> dict[str, Value]:
    """The keys without the architecture in front, and without the file's own name and type. `config`: of the
    text model, which `model` describes. Raises ConfigJsonError."""
    settings, get = settings_of(config, "config.json"), config.get
    heads, head_dim = config["num_attention_heads"], head_dim_of(config)
    kv_heads: int | list[int] = get("num_key_value_heads") or heads
    if model.arch in ("lfm2", "lfm2moe"):  # only some layers have a cache
        attends = (bool(layer.cache.k) for layer in model.layers())
        kv_heads = [int(attention and (get("num_key_value_heads") or heads)) for attention in attends]
    epsilon: float = model.norm_eps or _EPSILON.get(config["model_type"], 1e-5)
    for key in ("rms_norm_eps", "norm_eps"):
        epsilon = settings.number(key, 1.0, default=epsilon)
    keys: dict[str, Value] = {
        "vocab_size": model.vocab_size,
        "context_length": model.context,
        "embedding_length": model.hidden_size,
        "block_count": model.count,
        "feed_forward_length": model.ffn if model.arch == "lfm2" else get("intermediate_size") or 0,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": epsilon,
        **_rotary_keys(config, model),
    }
    if model.experts:
        keys |= {
            "expert_count": model.experts,
            "expert_used_count": model.experts_used,
            "expert_feed_forward_length": get("moe_intermediate_size") or config["intermediate_size"],
            "expert_shared_feed_forward_length": get("shared_expert_intermediate_size") or 0,
        }
    if model.arch == "lfm2moe":
        keys["leading_dense_block_count"] = get("num_dense_layers") or 2
        keys["expert_gating_func"] = SIGMOID
    # llama.cpp's llama, qwen2 and qwen3 have no window, whatever the key says.
    if not model.is_dense and (
        window := settings.count("sliding_window", most=MOST_TOKENS, default=0, least=0)
    ):
        keys["attention.sliding_window"] = window
    if "conv_L_cache" in config:
        keys["shortconv.l_cache"] = config["conv_L_cache"]
    return keys


def _rotary_keys(config: Mapping[str, Any], model: Decoder) -> dict[str, Value]:
    rotary = rotary_of(config)
    keys: dict[str, Value] = {
        "rope.dimension_count": int(head_dim_of(config) * rotary.partial),
        "rope.freq_base": rotary.theta,
    }
    if rotary.kind in ("linear", "yarn"):
        keys["rope.scaling.type"] = rotary.kind
        keys["rope.scaling.factor"] = rotary.factor
    if rotary.kind == "yarn":
        keys[TRUNCATED] = int(rotary.truncate)
    original = rotary.original or (4096 if model.arch == "phi3" else 0)
    if original and (rotary.kind == "yarn" or model.arch == "phi3"):
        keys["rope.scaling.original_context_length"] = original
    return keys


@dataclass(frozen=True)
class Rotary:
    """How positions are rotated. `original`: the context before it was scaled; 0: not known. `stated`: the
    keys of the scaling."""

    kind: str
    theta: float
    partial: float
    factor: float
    truncate: bool
    original: int
    low_freq_factor: float
    high_freq_factor: float
    stated: frozenset[str]


def rotary_of(config: Mapping[str, Any]) -> Rotary:
    """Read config.json in transformers 4's keys or in 5's; of layers without a window, if those differ.
    Raises ConfigJsonError."""
    whole = settings_of(config, "config.json")
    rope = settings_of(whole.get("rope_parameters") or {}, "rope_parameters")
    rope = settings_of(rope.get("full_attention", rope), "rope_parameters.full_attention")
    scaling = settings_of(whole.get("rope_scaling") or rope, "rope_scaling")

    def holder(first: Settings, key: str) -> Settings:
        return first if first.get(key) is not None else whole

    theta, partial, original = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
    usual = _THETA.get(str(whole.get("model_type")), 10_000.0)
    return Rotary(
        kind=str(scaling.get("rope_type", scaling.get("type", "default"))),
        theta=holder(rope, theta).number(theta, MOST_THETA, usual),
        partial=holder(rope, partial).number(partial, 1.01, 1.0),
        factor=scaling.number("factor", 1e6, default=1.0),
        truncate=scaling.get("truncate") is not False,
        original=holder(scaling, original).count(original, most=MOST_TOKENS, default=0, least=0),
        low_freq_factor=scaling.number("low_freq_factor", 1e6, default=1.0),
        high_freq_factor=scaling.number("high_freq_factor", 1e6, default=4.0),
        stated=frozenset(key for key, value in scaling.items() if value is not None),
    )


def head_dim_of(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
