"""The keys that llama.cpp reads of a model, from its config.json: one place for each architecture's metadata.

Names and meaning: gguf-py/gguf/constants.py and conversion/*.py of llama.cpp. A key that an architecture does
not read does no harm. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.theory.decoder import Decoder
from harness.theory.hf_config import MOST_THETA, MOST_TOKENS, Settings, settings_of

Value = int | float | str | list[int]
# Where config.json has no such key: configuration_*.py of transformers.
_THETA = {
    "gpt_oss": 150_000.0,
    **dict.fromkeys(("gemma3_text", "gemma3", "lfm2", "lfm2_moe", "mixtral"), 1e6),
}
_EPSILON = {"qwen3_moe": 1e-6, "gemma3_text": 1e-6, "gemma3": 1e-6}
_UNREAD_OF_DENSE = (
    *("attention.layer_norm_epsilon", "attention.shared_kv_layers"),
    *("logit_scale", "rope.dimension_sections"),
)
_NO_CACHE_IN_SOME = ("granitehybrid", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe")
# ExpertGatingFuncType, for architectures that read it: softmax, sigmoid.
_GATING = {"deepseek_v2": 1, **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite"), 2)}
_GATING |= dict.fromkeys(("lfm2_moe", "minimax_m2", "nemotron_h"), 2)


def metadata_keys(config: Mapping[str, Any], model: Decoder) -> dict[str, Value]:
    """The keys without the architecture in front, and without the file's own name and type. `config`: of the
    text model, which `model` describes. Raises ConfigJsonError."""
    found: dict[str, Value | None] = {**_sizes(config, model), **_rotary(config, model)}
    if model.experts:
        found |= _experts(config, model)
    read = settings_of(config, "config.json")
    # llama.cpp's llama, qwen2 and qwen3 have no window, whatever the key says.
    window = 0 if model.is_dense else read.count("sliding_window", most=MOST_TOKENS, default=0, least=0)
    if window:
        found["attention.sliding_window"] = window
    if model.arch == "deepseek2":
        found |= {
            "attention.q_lora_rank": config.get("q_lora_rank"),
            "attention.kv_lora_rank": config["kv_lora_rank"],
            "attention.key_length_mla": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
            "attention.value_length_mla": config["v_head_dim"],
        }
    if "conv_L_cache" in config:
        found["shortconv.l_cache"] = config["conv_L_cache"]
    found |= _states(config, model.hidden_size)
    unread = _UNREAD_OF_DENSE if model.is_dense else ()
    return {key: value for key, value in found.items() if value is not None and key not in unread}


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
    given = settings_of(whole.get("rope_parameters") or {}, "rope_parameters")
    given = settings_of(given.get("full_attention", given), "rope_parameters.full_attention")
    scaling = settings_of(whole.get("rope_scaling") or given, "rope_scaling")

    def holder(first: Settings, key: str) -> Settings:
        return first if first.get(key) is not None else whole

    theta, partial, original = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
    usual = _THETA.get(str(whole.get("model_type")), 10_000.0)
    return Rotary(
        kind=str(scaling.get("rope_type", scaling.get("type", "default"))),
        theta=holder(given, theta).number(theta, MOST_THETA, usual),
        partial=holder(given, partial).number(partial, 1.01, 1.0),
        factor=scaling.number("factor", 1e6, default=1.0),
        truncate=scaling.get("truncate") is not False,
        original=holder(scaling, original).count(original, most=MOST_TOKENS, default=0, least=0),
        low_freq_factor=scaling.number("low_freq_factor", 1e6, default=1.0),
        high_freq_factor=scaling.number("high_freq_factor", 1e6, default=4.0),
        stated=frozenset(key for key, value in scaling.items() if value is not None),
    )


def head_dim_of(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _sizes(config: Mapping[str, Any], model: Decoder) -> dict[str, Value | None]:
    hidden, heads = model.hidden_size, config["num_attention_heads"]
    get, has = config.get, [{piece.name for piece in each.pieces} for each in model.layers()]
    kv_heads: int | list[int] = get("num_key_value_heads") or heads
    head_dim = head_dim_of(config)
    ffn: int | list[int] = get("intermediate_size") or 0
    if model.arch in _NO_CACHE_IN_SOME and isinstance(kv_heads, int):
        kv_heads = [kv_heads if "attn_k.weight" in names else 0 for names in has]
    if model.arch == "deepseek2":
        kv_heads, head_dim = 1, config["kv_lora_rank"] + config["qk_rope_head_dim"]
    if model.arch == "nemotron_h":
        ffn = [config["intermediate_size"] if "ffn_up.weight" in names else 0 for names in has]
    if model.arch == "nemotron_h_moe":
        ffn = [config["moe_intermediate_size"] if "ffn_up_exps.weight" in names else 0 for names in has]
    if model.arch == "llama4":
        ffn = config["intermediate_size_mlp"]
    if config["model_type"] == "granitemoehybrid" and not model.experts:
        ffn = config["shared_intermediate_size"]
    if model.arch == "lfm2":
        ffn = model.ffn
    epsilon: float = model.norm_eps or _EPSILON.get(config["model_type"], 1e-5)
    for key in ("rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon"):
        epsilon = settings_of(config, "config.json").number(key, 1.0, default=epsilon)
    return {
        "vocab_size": model.vocab_size,
        "context_length": model.context,
        "embedding_length": hidden,
        "block_count": model.count,
        "feed_forward_length": ffn,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": get("kv_lora_rank") if model.arch == "deepseek2" else head_dim,
        "attention.layer_norm_epsilon": float(epsilon),
        "attention.layer_norm_rms_epsilon": float(epsilon),
        "logit_scale": float(get("logit_scale") or 0.25),
        "attention.shared_kv_layers": get("num_kv_shared_layers", 0),
    }


def _rotary(config: Mapping[str, Any], model: Decoder) -> dict[str, Value | None]:
    head_dim, known = head_dim_of(config), rotary_of(config)
    rotated = config.get("qk_rope_head_dim") if model.arch == "deepseek2" else None
    found: dict[str, Value | None] = {
        "rope.dimension_count": rotated or int(head_dim * known.partial),
        "rope.dimension_sections": [head_dim // 8] * 4,
        "rope.freq_base": known.theta,
    }
    if known.kind in ("linear", "yarn"):
        found["rope.scaling.type"] = known.kind
        found["rope.scaling.factor"] = known.factor
    if known.kind == "yarn":
        found[TRUNCATED] = int(known.truncate)
    original = known.original or (4096 if model.arch == "phi3" else 0)
    if original and (known.kind == "yarn" or model.arch == "phi3"):
        found["rope.scaling.original_context_length"] = original
    return found


def _experts(config: Mapping[str, Any], model: Decoder) -> dict[str, Value | None]:
    get = config.get
    return {
        "expert_count": model.experts,
        "expert_used_count": model.experts_used,
        "expert_feed_forward_length": get("moe_intermediate_size") or config["intermediate_size"],
        "expert_shared_count": get("n_shared_experts") or 0,
        "expert_gating_func": _GATING.get(config["model_type"]),
        "interleave_moe_layer_step": get("interleave_moe_layer_step") or 1,
        "leading_dense_block_count": get("first_k_dense_replace")
        or get("num_dense_layers")
        or {"lfm2moe": 2, "ernie4_5-moe": 1}.get(model.arch, 0),
        "expert_shared_feed_forward_length": get("shared_expert_intermediate_size")
        or get("moe_shared_expert_intermediate_size")
        or get("moe_num_shared_experts", 0) * get("moe_intermediate_size", 0)
        or get("shared_intermediate_size", 0),
    }


def _states(config: Mapping[str, Any], hidden: int) -> dict[str, Value | None]:
    if "linear_num_key_heads" in config:
        heads, of_head = config["linear_num_value_heads"], config["linear_value_head_dim"]
        inner, state, groups = heads * of_head, of_head, config["linear_num_key_heads"]
    elif "mamba_num_heads" in config:
        heads, state, groups = config["mamba_num_heads"], config["ssm_state_size"], config["n_groups"]
        inner = heads * config["mamba_head_dim"]
    elif "mamba_n_heads" in config:
        heads, state, groups = config["mamba_n_heads"], config["mamba_d_state"], config["mamba_n_groups"]
        inner = config.get("mamba_d_ssm") or 2 * hidden
    else:
        return {}
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }


# YaRN's rotary frequencies, which llama.cpp computes with the ends of its range rounded to whole dimensions;
# transformers does not round them where config.json says `truncate: false`, as gpt-oss's does.
# Formulas: ggml_rope_yarn_corr_dims and rope_yarn of ggml; _compute_yarn_parameters of transformers.

TRUNCATED = "harness.yarn_truncate"
"""The key, after the architecture's name, for `truncate` in a GGUF made here: 1 or 0."""
UNTRUNCATED = "gpt-oss"  # every published config.json of this architecture has `truncate: false`
_FAST, _SLOW = 32.0, 1.0  # rotations; beta_fast and beta_slow of both


def yarn_difference(metadata: Mapping[str, Any]) -> float:
    """The largest share by which a frequency in llama.cpp is off that of the model's config.json; 0: none is.
    `metadata`: of a GGUF."""
    arch = metadata.get("general.architecture")

    def of(key: str) -> Any:
        return metadata.get(f"{arch}.{key}")

    truncated = of(TRUNCATED)
    if of("rope.scaling.type") != "yarn" or (arch != UNTRUNCATED if truncated is None else truncated):
        return 0.0
    named = ("rope.dimension_count", "rope.freq_base", "rope.scaling.original_context_length")
    given = (of(named[0]) or of("attention.key_length"), *map(of, named[1:]), of("rope.scaling.factor"))
    if not all(isinstance(each, (int, float)) and math.isfinite(each) and each > 1 for each in given):
        return 0.0  # llama.cpp refuses it, or does not scale
    dims, base, context, factor = given

    def end(rotations: float) -> float:
        return float(dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base)))

    low, high = end(_FAST), end(_SLOW)
    exact = _scales(int(dims), factor, low, high)
    rounded = _scales(int(dims), factor, math.floor(low), math.ceil(high))
    return max(abs(mine / theirs - 1) for mine, theirs in zip(rounded, exact, strict=True))


def _scales(dims: int, factor: float, low: float, high: float) -> list[float]:
    """The factor on the frequency of each pair of dimensions."""
    first, last = max(low, 0), min(high, dims - 1)
    shares = (min(1.0, max(0.0, (i - first) / max(0.001, last - first))) for i in range(max(1, dims // 2)))
    return [1 - share + share / factor for share in shares]
