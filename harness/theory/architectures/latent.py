"""Multi-head latent attention: DeepSeek V2 and V3 with R1, Kimi K2, GLM-4.7 Flash. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from harness.theory.architectures.dense import USUAL, assembled
from harness.theory.architectures.values import Build, Values
from harness.theory.decoder import Decoder
from harness.theory.layers import Latent, Piece, gated, layer, norms


def _deepseek(given: Values) -> Decoder:
    """Without the layer that predicts a second token. The first layers are dense."""
    values = given.of(max_position_embeddings=4096)
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
    hidden, ffn = values.hidden, values.count("intermediate_size")
    shared = values.count("n_shared_experts", default=0, least=0) * values.count("moe_intermediate_size")
    experts = values.experts(shared=shared, correction=is_third)
    sparse = values.sparse(values.count("first_k_dense_replace", default=0, least=0))

    def pieces(is_sparse: bool) -> Iterator[Piece]:
        yield from norms(hidden, *USUAL)
        yield from attention.pieces(hidden)
        yield from experts.pieces(hidden) if is_sparse else gated(hidden, ffn)

    return assembled(
        values,
        "deepseek2",
        [layer(pieces(is_sparse), cache=attention.cache()) for is_sparse in sparse],
        norms(hidden, "output_norm"),
        heads=attention.heads,
        ffn=ffn,
        experts=experts.count,
        used=experts.used,
    )


BUILD: dict[str, Build] = dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _deepseek)
