"""Mixtures of experts whose attention has grouped queries: Mixtral, Qwen, gpt-oss, GLM, Llama 4. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.theory.architectures.attention import USUAL, assembled
from harness.theory.config_settings import CHUNKED, FULL, Build, Values
from harness.theory.decoder import Decoder
from harness.theory.layer_parts import (
    Experts,
    Heads,
    Latent,
    Layer,
    Piece,
    gated,
    layer,
    norms,
)

_POST = ("attn_norm", "post_attention_norm")


def mixture_of(
    values: Values,
    arch: str,
    heads: Heads | Latent,
    experts: Experts,
    *,
    sparse: Sequence[bool] | None = None,
    dense_ffn: int = 0,
    windows: Sequence[int | None] | None = None,
    chunked: bool = False,
    names: tuple[str, ...] = USUAL,
    norm_bias: bool = False,
    others: Sequence[Piece] = (),
) -> Decoder:
    """`sparse`: whether a layer is a mixture, None: all; the others have one feed-forward of `dense_ffn`."""
    hidden = values.hidden

    def pieces(is_sparse: bool) -> Iterator[Piece]:
        yield from norms(hidden, *names, bias=norm_bias)
        yield from heads.pieces(hidden)
        yield from experts.pieces(hidden) if is_sparse else gated(hidden, dense_ffn)

    count = values.layers
    layers: list[Layer] = [
        layer(pieces(is_sparse), cache=heads.cache(window, chunked and window is not None))
        for is_sparse, window in zip(sparse or [True] * count, windows or [None] * count, strict=True)
    ]
    return assembled(
        values,
        arch,
        layers,
        (*norms(hidden, "output_norm", bias=norm_bias), *others),
        heads=heads.heads,
        ffn=max(dense_ffn, experts.shared, experts.ffn),
        experts=experts,
    )


def _mixtral(settings: Values) -> Decoder:
    values = settings.of(max_position_embeddings=131_072)
    experts = values.experts("intermediate_size")
    return mixture_of(values, "llama", values.heads(), experts, windows=values.windows())


def _qwen2(settings: Values) -> Decoder:
    values = settings.of(max_position_embeddings=32_768, use_sliding_window=False)
    experts = values.experts(shared=values.count("shared_expert_intermediate_size"), shared_gate=True)
    heads = values.heads(qkv_bias=values.flag("qkv_bias", True))
    return mixture_of(values, "qwen2moe", heads, experts, **_qwen_layers(values))  # type: ignore[arg-type]


def _qwen3(settings: Values) -> Decoder:
    values = settings.of(max_position_embeddings=32_768, use_sliding_window=False)
    bias = values.flag("attention_bias")
    heads = values.heads(qkv_bias=bias, o_bias=bias, qk_norm="head")
    return mixture_of(values, "qwen3moe", heads, values.experts(), **_qwen_layers(values))  # type: ignore[arg-type]


def _qwen_layers(values: Values) -> dict[str, object]:
    sparse = values.sparse(period=values.count("decoder_sparse_step", default=1))
    return {
        "sparse": sparse,
        "dense_ffn": 0 if all(sparse) else values.count("intermediate_size"),
        "windows": values.windows(),
    }


def _gpt_oss(settings: Values) -> Decoder:
    values = settings.of(
        head_dim=64, sliding_window=128, max_position_embeddings=131_072, attention_bias=True
    )
    bias = values.flag("attention_bias")
    heads = values.heads(qkv_bias=bias, o_bias=bias, sinks=True)
    experts = values.experts("intermediate_size", bias=True)
    return mixture_of(values, "gpt-oss", heads, experts, windows=values.windows(2), names=_POST)


def _glm4(settings: Values) -> Decoder:
    """GLM 4 without the layer that predicts a second token."""
    values = settings.of(max_position_embeddings=131_072)
    ffn = values.count("moe_intermediate_size")
    experts = values.experts(shared=ffn * values.count("n_shared_experts", default=1), correction=True)
    first = values.count("first_k_dense_replace", default=1, least=0)
    return mixture_of(
        values,
        "glm4moe",
        values.heads(
            qkv_bias=values.flag("attention_bias"), qk_norm="head" if values.flag("use_qk_norm") else None
        ),
        experts,
        sparse=values.sparse(first),
        dense_ffn=values.count("intermediate_size") if first else 0,
        names=_POST,
    )


def _llama4(settings: Values) -> Decoder:
    """Layers with rotary positions attend to their chunk; every fourth has none and attends to all."""
    values = settings.of(
        head_dim=128,
        max_position_embeddings=131_072,
        attention_chunk_size=8192,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=202_048,
    )
    experts = values.experts("intermediate_size", shared=values.count("intermediate_size"))
    sparse = values.sparse(period=values.count("interleave_moe_layer_step", default=1))
    if moe_layers := values.numbers("moe_layers"):
        sparse = [number in moe_layers for number in range(values.layers)]
    rotary = values.get("no_rope_layers")
    chunk = values.maybe("attention_chunk_size")

    def otherwise(number: int) -> str:
        listed = isinstance(rotary, list) and len(rotary) == values.layers
        has_chunk = rotary[number] if listed and isinstance(rotary, list) else (number + 1) % 4
        return CHUNKED if has_chunk else FULL

    kinds = values.kinds((FULL, CHUNKED), otherwise)
    return mixture_of(
        values,
        "llama4",
        values.heads(),
        experts,
        sparse=sparse,
        dense_ffn=0 if all(sparse) else values.count("intermediate_size_mlp"),
        windows=[chunk if kind == CHUNKED else None for kind in kinds],
        chunked=True,
    )


def _phi(settings: Values) -> Decoder:
    values = settings.of(max_position_embeddings=131_072)
    bias = values.flag("attention_bias")
    head = [Piece("output.bias", (values.vocab,))] if values.flag("lm_head_bias") else []
    return mixture_of(
        values,
        "phimoe",
        values.heads(qkv_bias=bias, o_bias=bias),
        values.experts("intermediate_size"),
        windows=None,  # as long as the context in every published file
        norm_bias=True,
        others=head,
    )


def _granite(settings: Values) -> Decoder:
    values = settings.of(max_position_embeddings=2048)
    bias = values.flag("attention_bias")
    shared = values.count("shared_intermediate_size", default=0, least=0)
    experts = values.experts("intermediate_size", shared=shared)
    return mixture_of(values, "granitemoe", values.heads(qkv_bias=bias, o_bias=bias), experts)


def _olmoe(settings: Values) -> Decoder:
    values = settings.of(max_position_embeddings=4096)
    return mixture_of(values, "olmoe", values.heads(qk_norm="all"), values.experts("intermediate_size"))


def _ernie(settings: Values) -> Decoder:
    values = settings.of(max_position_embeddings=131_072, tie_word_embeddings=True)
    first = values.count("moe_layer_start_index", default=1, least=0)
    last = values.get("moe_layer_end_index")
    end = values.layers - 1 if last in (None, -1) else values.count("moe_layer_end_index", least=0)
    interval = values.count("moe_layer_interval", default=1)
    shared = values.count("moe_num_shared_experts", default=0, least=0)
    experts = values.experts(shared=shared * values.count("moe_intermediate_size"), correction=True)
    bias = values.flag("use_bias")
    return mixture_of(
        values,
        "ernie4_5-moe",
        values.heads(qkv_bias=bias, o_bias=bias),
        experts,
        sparse=[(n + 1) % interval == 0 and first <= n <= end for n in range(values.layers)],
        dense_ffn=values.count("intermediate_size"),
    )


def _hunyuan(settings: Values) -> Decoder:
    values = settings.of(max_position_embeddings=2048)
    bias = values.flag("attention_bias")
    experts = values.experts("intermediate_size", shared=values.count("intermediate_size"))
    heads = values.heads(qkv_bias=bias, o_bias=bias, qk_norm="head")
    return mixture_of(values, "hunyuan-moe", heads, experts)


def _minimax(settings: Values) -> Decoder:
    values = settings.of(max_position_embeddings=196_608, head_dim=128)
    experts = values.experts("intermediate_size", correction=True)
    return mixture_of(values, "minimax-m2", values.heads(qk_norm="all"), experts)


MIXTURES_BUILD: dict[str, Build] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4,
    "llama4_text": _llama4,
    "phimoe": _phi,
    "granitemoe": _granite,
    "granitemoeshared": _granite,
    "olmoe": _olmoe,
    "ernie4_5_moe": _ernie,
    "hunyuan_v1_moe": _hunyuan,
    "minimax_m2": _minimax,
}
