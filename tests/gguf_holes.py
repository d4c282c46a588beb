"""Files of models that are not dense, as llama.cpp wants them, with a hole in place of the values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
from gguf_again import finish
from test_checkpoint import write

from harness.models import gguf_keys
from harness.models.gguf_keys import SIGMOID, head_dim_of
from harness.theory import tensors
from harness.theory.architectures import decoder_of
from harness.theory.decoder import Decoder
from runners.weights import layout

BASE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40_960,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
FINE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
SHARED = FINE | {"shared_expert_intermediate_size": 160}
DEEPSEEK = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
}
LINEAR = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MAMBA = {
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "layer_types": [("mamba", "attention")[n in (3, 6)] for n in range(9)],
    "shared_intermediate_size": 512,
    "tie_word_embeddings": True,
}
NEMOTRON = {
    "head_dim": 32,
    "mamba_num_heads": 16,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "n_groups": 2,
}
LFM2 = {"full_attn_idxs": [2, 5], "conv_L_cache": 3, "tie_word_embeddings": True, "block_multiple_of": 64}
# What differs from BASE in the config.json of one model of each kind, small enough to be loaded; after a
# comma: another variant.
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS,
    "qwen2_moe": SHARED,
    "qwen3_moe": FINE | {"head_dim": 64},
    "gpt_oss": EXPERTS | {"num_local_experts": 32, "sliding_window": 128, "head_dim": 64},
    "deepseek_v2": DEEPSEEK | {"first_k_dense_replace": 1},
    "deepseek_v2, lite": DEEPSEEK | {"q_lora_rank": None, "num_hidden_layers": 27},
    "deepseek_v3": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "glm4_moe": DEEPSEEK | {"attention_bias": True, "use_qk_norm": True},
    "llama4_text": {
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 768,
        "interleave_moe_layer_step": 2,
        "head_dim": 32,
    },
    "gemma": {"head_dim": 64},
    "gemma2": {"head_dim": 64, "sliding_window": 1024},
    "gemma3_text": {"head_dim": 64, "sliding_window": 512},
    "gemma3n_text": {
        "head_dim": 32,
        "sliding_window": 512,
        "num_hidden_layers": 25,
        "num_kv_shared_layers": 5,
        "vocab_size_per_layer_input": 320,
    },
    "phi": {},
    "phi3": {"sliding_window": 2047},
    "phimoe": EXPERTS | {"num_local_experts": 16, "attention_bias": True, "lm_head_bias": True},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 1024},
    "olmoe": EXPERTS | {"num_key_value_heads": 8},
    "cohere": {"num_hidden_layers": 64, "use_qk_norm": True},
    "cohere2": {"sliding_window": 1024},
    "starcoder2": {"sliding_window": 1024},
    "stablelm": {"use_qkv_bias": True},
    "granite": {"tie_word_embeddings": True},
    "granitemoe": EXPERTS | {"num_local_experts": 32},
    "granitemoeshared": EXPERTS | {"shared_intermediate_size": 160},
    "granitemoehybrid": MAMBA | EXPERTS | {"num_local_experts": 16},
    "granitemoehybrid, no experts": MAMBA | {"num_local_experts": 0, "layer_types": ["attention"] * 9},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 512, "head_dim": 32, "mamba_rms_norm": True},
    "lfm2": LFM2,
    "lfm2_moe": LFM2 | FINE,
    "qwen3_next": SHARED | LINEAR,
    "qwen3_5_text": LINEAR | {"tie_word_embeddings": True},
    "qwen3_5_moe_text": SHARED | LINEAR,
    "nemotron_h": NEMOTRON | {"hybrid_override_pattern": "M-M*-MM-M"},
    "nemotron_h, experts": NEMOTRON
    | DEEPSEEK
    | {"hybrid_override_pattern": "MEM*EMEM*", "moe_shared_expert_intermediate_size": 160},
    "nemotron": {},
    "smollm3": {},
    "ernie4_5": {"head_dim": 32},
    "ernie4_5_moe": {
        "head_dim": 32,
        "moe_num_experts": 16,
        "moe_k": 4,
        "moe_intermediate_size": 96,
        "moe_num_shared_experts": 2,
    },
    "exaone": {},
    "exaone4": {"num_hidden_layers": 64, "sliding_window": 4096},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32, "num_experts": 16, "moe_topk": 4},
    "minimax_m2": EXPERTS | {"num_local_experts": 16, "head_dim": 64},
    "glm": {},
    "glm4": {"head_dim": 32, "attention_bias": True},
    "ministral3": {"head_dim": 64},
    "seed_oss": {"head_dim": 64},
    "internlm2": {},
    "arcee": {},
}


def config(kind: str, **changes: Any) -> dict[str, Any]:
    """Of a small model."""
    return {"model_type": kind.partition(",")[0], **BASE, **KINDS[kind], **changes}


def all_keys(config: Mapping[str, Any], model: Decoder) -> dict[str, Any]:
    """Those of models that are converted, and those that other architectures read besides."""
    keys: dict[str, Any] = gguf_keys.metadata_keys(config, model)
    get, arch, head_dim = config.get, model.arch, head_dim_of(config)
    has = [{piece.name for piece in layer.pieces} for layer in model.layers()]
    epsilon = float(get("layer_norm_eps") or get("norm_epsilon") or keys["attention.layer_norm_rms_epsilon"])
    keys |= dict.fromkeys(("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"), epsilon)
    if not model.is_dense:
        keys["logit_scale"] = float(get("logit_scale") or 0.25)
        keys["attention.shared_kv_layers"] = get("num_kv_shared_layers", 0)
        keys["rope.dimension_sections"] = [head_dim // 8] * 4
    if arch in ("granitehybrid", "nemotron_h", "nemotron_h_moe"):
        kv_heads = keys["attention.head_count_kv"]
        keys["attention.head_count_kv"] = [kv_heads if "attn_k.weight" in names else 0 for names in has]
    if arch == "nemotron_h":
        keys["feed_forward_length"] = [get("intermediate_size") * ("ffn_up.weight" in names) for names in has]
    if arch == "nemotron_h_moe":
        ffn = get("moe_intermediate_size")
        keys["feed_forward_length"] = [ffn * ("ffn_up_exps.weight" in names) for names in has]
    if arch == "llama4":
        keys["feed_forward_length"] = config["intermediate_size_mlp"]
    if config["model_type"] == "granitemoehybrid" and not model.experts:
        keys["feed_forward_length"] = config["shared_intermediate_size"]
    if arch == "deepseek2":
        rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        keys |= {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.kv_lora_rank": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": rotated,
        }
        keys |= {"attention.q_lora_rank": get("q_lora_rank")} if get("q_lora_rank") else {}
    return keys | (_expert_keys(config, model) if model.experts else {}) | _state_keys(config)


def _expert_keys(config: Mapping[str, Any], model: Decoder) -> dict[str, Any]:
    get, kind = config.get, config["model_type"]
    keys = {
        "expert_shared_count": get("n_shared_experts") or 0,
        "interleave_moe_layer_step": get("interleave_moe_layer_step") or 1,
        "leading_dense_block_count": get("first_k_dense_replace")
        or get("num_dense_layers")
        or {"lfm2moe": 2, "ernie4_5-moe": 1}.get(model.arch, 0),
        "expert_shared_feed_forward_length": get("shared_expert_intermediate_size")
        or get("moe_shared_expert_intermediate_size")
        or get("moe_num_shared_experts", 0) * get("moe_intermediate_size", 0)
        or get("shared_intermediate_size", 0),
    }
    if kind in ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite", "minimax_m2", "nemotron_h"):
        keys["expert_gating_func"] = SIGMOID
    return keys | ({"expert_gating_func": 1} if kind == "deepseek_v2" else {})


def _state_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    if "linear_num_key_heads" in config:
        heads, state = config["linear_num_value_heads"], config["linear_value_head_dim"]
        inner, groups = heads * state, config["linear_num_key_heads"]
    elif "mamba_num_heads" in config:
        heads, state, groups = config["mamba_num_heads"], config["ssm_state_size"], config["n_groups"]
        inner = heads * config["mamba_head_dim"]
    elif "mamba_n_heads" in config:
        heads, state, groups = config["mamba_n_heads"], config["mamba_d_state"], config["mamba_n_groups"]
        inner = config.get("mamba_d_ssm") or 2 * config["hidden_size"]
    else:
        return {}
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }


def write_hole(path: Path, config: Mapping[str, Any]) -> Decoder:
    """A file in 16 bits without a vocabulary. Returns the config's model."""
    model = decoder_of(config)
    write(header_of(path, model, config), tensors.of_shape(model))
    return model


def header_of(
    path: Path,
    model: Decoder,
    config: Mapping[str, Any],
    file_type: gguf.LlamaFileType = gguf.LlamaFileType.MOSTLY_F16,
) -> gguf.GGUFWriter:
    """A writer with all keys and no tensors."""
    writer = gguf.GGUFWriter(path, model.arch)
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("none")
    layout.add_keys(writer, model.arch, all_keys(config, model))
    return writer


def write_random(path: Path, config: Mapping[str, Any]) -> Decoder:
    """A file in 16 bits with random values, small enough for every activation to stay finite."""
    model = decoder_of(config)
    random = numpy.random.default_rng(0)
    with_keys = header_of(path, model, config)
    for tensor in tensors.of_shape(model):
        values = random.standard_normal(tensor.dims, numpy.float32) * tensor.dims[-1] ** -0.5
        if "ssm_a" in tensor.name:
            values = -0.1 - abs(values)  # a state that decays
        elif len(tensor.dims) == 1 and "norm" in tensor.name:
            values += 1
        with_keys.add_tensor(
            tensor.name, values.astype(numpy.float16 if tensor.type == "f16" else numpy.float32)
        )
    finish(with_keys)
    return model
