"""A config.json of a small model of every kind that is synthesized besides the dense ones."""

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_LFM2 = {"conv_L_cache": 3, "tie_embedding": True, "layer_types": ["conv", "full_attention"] * 2}
_FINE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
_KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _FINE | {"head_dim": 64, "norm_topk_prob": True, "rope_theta": 1e6},
    "qwen2_moe": _FINE | {"shared_expert_intermediate_size": 256},
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4, "num_key_value_heads": 8},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma3_text": {
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 16,
        "num_hidden_layers": 7,
        "tie_word_embeddings": True,
    },
    "phi3": {"partial_rotary_factor": 0.75, "head_dim": 32},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 64,
        "sliding_window": 16,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    },
    "lfm2": _LFM2 | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": _LFM2 | _FINE | {"num_dense_layers": 1, "norm_topk_prob": True},
}
KINDS = tuple(_KINDS)
MIXTURES = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "gpt_oss", "lfm2_moe")


def config(kind: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": kind, **_BASE, **_KINDS[kind], **changes}


def written(folder: Path, kind: str, **changes: Any) -> Path:
    """The file."""
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(config(kind, **changes)))
    return path
