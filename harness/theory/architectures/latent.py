"""Multi-head latent attention: DeepSeek V2 and V3 with R1, Kimi K2, GLM-4.7 Flash. Pure."""

from __future__ import annotations

from harness.theory.architectures.mixtures import mixture_of
from harness.theory.config_settings import Build, Values
from harness.theory.decoder import Decoder
from harness.theory.layer_parts import (
    Latent,
)


def _deepseek(settings: Values) -> Decoder:
    """DeepSeek without the layer that predicts a second token. The first layers are dense."""
    values = settings.of(max_position_embeddings=4096)
    is_third = values.kind != "deepseek_v2"
    attention = Latent(
        heads=values.count("num_attention_heads"),
        kv_rank=values.count("kv_lora_rank"),
        rope=values.count("qk_rope_head_dim"),
        nope=values.count("qk_nope_head_dim"),
        value=values.count("v_head_dim"),
        q_rank=values.maybe("q_lora_rank"),
        bias=values.flag("attention_bias"),
    )
    shared = values.count("n_shared_experts", default=0, least=0) * values.count("moe_intermediate_size")
    experts = values.experts(shared=shared, correction=is_third)
    sparse = values.sparse(values.count("first_k_dense_replace", default=0, least=0))
    ffn = values.count("intermediate_size")
    return mixture_of(values, "deepseek2", attention, experts, sparse=sparse, dense_ffn=ffn)


LATENT_BUILD: dict[str, Build] = dict.fromkeys(
    ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _deepseek
)
