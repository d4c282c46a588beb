"""The keys that llama.cpp reads of a model that is not dense, from its config.json: one place for each
architecture's GGUF metadata. Pure.

Names and meaning: gguf-py/gguf/constants.py and conversion/*.py of llama.cpp. A key that an architecture does
not read does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.models.yarn import TRUNCATED
from harness.theory.config_values import MOST_THETA, MOST_TOKENS, count, mapping, number
from harness.theory.decoder import Decoder

Value = int | float | str | list[int]
# Where config.json has no such key: configuration_*.py of transformers.
_THETA = {
    "gpt_oss": 150_000.0,
    **dict.fromkeys(("gemma3_text", "gemma3", "lfm2", "lfm2_moe", "mixtral"), 1e6),
}
_EPSILON = {"qwen3_moe": 1e-6, "gemma3_text": 1e-6, "gemma3": 1e-6}
_NO_CACHE_IN_SOME = ("granitehybrid", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe")
# ExpertGatingFuncType, for architectures that read it: softmax, sigmoid.
_GATING = {"deepseek_v2": 1, **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite"), 2)}
_GATING |= dict.fromkeys(("lfm2_moe", "minimax_m2", "nemotron_h"), 2)


def keys(config: Mapping[str, Any], model: Decoder) -> dict[str, Value]:
    """Without the architecture in front, nor what the file itself says: its name and type. `config`: of the
    text model, which `model` describes. Raises ConfigJsonError."""
    found: dict[str, Value | None] = {**_sizes(config, model), **_rotary(config, model)}
    if model.experts:
        found |= _experts(config, model)
    if window := count(config, "sliding_window", MOST_TOKENS, default=0, least=0):
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
    return {key: value for key, value in found.items() if value is not None}


def rotary_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """How positions are rotated: rope_type, rope_theta and what else config.json says, in transformers 4's
    keys or in 5's; of layers without a window, if those differ. Raises ConfigJsonError."""
    given = mapping(config.get("rope_parameters") or {}, "rope_parameters")
    given = mapping(given.get("full_attention", given), "rope_parameters.full_attention")
    scaling = mapping(config.get("rope_scaling") or given, "rope_scaling")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    usual = _THETA.get(str(config.get("model_type")), 10_000.0)
    theta, partial = (
        number(given if given.get(key) is not None else config, key, below, default)
        for key, below, default in (("rope_theta", MOST_THETA, usual), ("partial_rotary_factor", 1.01, 1.0))
    )
    factor = number(scaling, "factor", 1e6, default=1.0)
    found = {"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": partial, "factor": factor}
    found["truncate"] = scaling.get("truncate") is not False
    original = "original_max_position_embeddings"
    known = scaling if scaling.get(original) is not None else config
    return found | {original: count(known, original, MOST_TOKENS, default=0, least=0)}


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
    epsilon: float = _EPSILON.get(config["model_type"], 1e-5)
    for key in ("rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon"):
        epsilon = number(config, key, 1.0, default=epsilon)
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
        "rope.dimension_count": rotated or int(head_dim * known["partial_rotary_factor"]),
        "rope.dimension_sections": [head_dim // 8] * 4,
        "rope.freq_base": known["rope_theta"],
    }
    if known["rope_type"] in ("linear", "yarn"):
        found["rope.scaling.type"] = known["rope_type"]
        found["rope.scaling.factor"] = known["factor"]
    if known["rope_type"] == "yarn":
        found[TRUNCATED] = int(known["truncate"])
    original = known["original_max_position_embeddings"] or (4096 if model.arch == "phi3" else 0)
    if original and (known["rope_type"] == "yarn" or model.arch == "phi3"):
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
