"""Files of models that are not dense, as llama.cpp wants them, with a hole in place of the values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
from test_checkpoint import write

from harness.theory import decoder, tensors
from harness.theory.architectures import decoder_of
from harness.theory.decoder import Decoder

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


def keys(config: Mapping[str, Any], model: Decoder) -> dict[str, Any]:
    """What llama.cpp's converter writes, without the architecture: keys that one lacks do no harm."""
    get = config.get
    layers, hidden, heads = model.count, config["hidden_size"], config["num_attention_heads"]
    kv_heads: int | list[int] = get("num_key_value_heads") or heads
    head_dim = get("head_dim") or hidden // heads
    ffn: int | list[int] = get("intermediate_size") or 0
    has = [{piece.name for piece in each.pieces} for each in model.layers()]
    if model.arch in ("granitehybrid", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe"):
        kv_heads = [kv_heads if "attn_k.weight" in names else 0 for names in has]
    if model.arch == "deepseek2":
        kv_heads, head_dim = 1, config["kv_lora_rank"] + config["qk_rope_head_dim"]
    if model.arch == "nemotron_h":
        ffn = [ffn if "ffn_up.weight" in names else 0 for names in has]
    if model.arch == "nemotron_h_moe":
        ffn = [config["moe_intermediate_size"] if "ffn_up_exps.weight" in names else 0 for names in has]
    if model.arch == "llama4":
        ffn = config["intermediate_size_mlp"]
    if config["model_type"] == "granitemoehybrid" and not model.experts:
        ffn = config["shared_intermediate_size"]
    if model.arch == "lfm2":
        ffn = model.ffn
    found = {
        "vocab_size": model.vocab_size,
        "context_length": model.context,
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": ffn,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": get("kv_lora_rank") if model.arch == "deepseek2" else head_dim,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": get("qk_rope_head_dim") if model.arch == "deepseek2" else head_dim,
        "rope.dimension_sections": [head_dim // 8] * 4,
        "logit_scale": 0.25,
        "attention.shared_kv_layers": get("num_kv_shared_layers", 0),
    }
    if model.experts:
        found |= {
            "expert_count": model.experts,
            "expert_used_count": model.experts_used,
            "expert_feed_forward_length": get("moe_intermediate_size") or config["intermediate_size"],
            "expert_shared_count": get("n_shared_experts") or 0,
            "expert_gating_func": 2,
            "interleave_moe_layer_step": get("interleave_moe_layer_step") or 1,
            "leading_dense_block_count": get("first_k_dense_replace")
            or {"lfm2moe": 2, "ernie4_5-moe": 1}.get(model.arch, 0),
            "expert_shared_feed_forward_length": get("shared_expert_intermediate_size")
            or get("moe_shared_expert_intermediate_size")
            or get("moe_num_shared_experts", 0) * get("moe_intermediate_size", 0)
            or get("shared_intermediate_size", 0),
        }
    if window := get("sliding_window"):
        found["attention.sliding_window"] = window
    if model.arch == "deepseek2":
        found |= {
            "attention.q_lora_rank": get("q_lora_rank"),
            "attention.kv_lora_rank": config["kv_lora_rank"],
            "attention.key_length_mla": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
            "attention.value_length_mla": config["v_head_dim"],
        }
    if "conv_L_cache" in config:
        found["shortconv.l_cache"] = config["conv_L_cache"]
    return found | _states(config, hidden)


def _states(config: Mapping[str, Any], hidden: int) -> dict[str, int]:
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


def write_hole(path: Path, config: Mapping[str, Any]) -> Decoder:
    """A file in 16 bits without a vocabulary. Returns what the config describes."""
    model = decoder.made(decoder_of(config))
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
    for key, value in keys(config, model).items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(f"{model.arch}.{key}", value)
        else:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{model.arch}.{key}", value)
    return writer


def write_random(path: Path, config: Mapping[str, Any]) -> Decoder:
    """A file in 16 bits with random values, small enough for every activation to stay finite."""
    model = decoder.made(decoder_of(config))
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
    with_keys.write_header_to_file()
    with_keys.write_kv_data_to_file()
    with_keys.write_tensors_to_file()
    with_keys.close()
    return model
