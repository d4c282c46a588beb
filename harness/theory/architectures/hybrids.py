"""Hybrids of attention with linear attention, Mamba 2 or short convolutions. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.theory.architectures.attention import USUAL, assembled
from harness.theory.config_settings import FULL, Build, ConfigJsonError, Values, shown
from harness.theory.decoder import Decoder
from harness.theory.layer_parts import (
    Cache,
    Delta,
    Layer,
    Mamba2,
    Piece,
    gated,
    layer,
    norms,
    plain,
    short_convolution,
)

LINEAR = "linear_attention"


def _qwen(settings: Values) -> Decoder:
    """Qwen3-Next and Qwen3.5: three layers of a gated delta rule to one of gated attention."""
    values = settings.of(
        head_dim=256,
        max_position_embeddings=32_768,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    )
    hidden, period = values.hidden, values.count("full_attention_interval", default=4)
    heads = values.heads(qkv_bias=values.flag("attention_bias"), qk_norm="head", gated=True)
    delta = Delta(
        key_heads=values.count("linear_num_key_heads"),
        value_heads=values.count("linear_num_value_heads"),
        key_dim=values.count("linear_key_head_dim"),
        value_dim=values.count("linear_value_head_dim"),
        kernel=values.count("linear_conv_kernel_dim"),
        together=values.kind == "qwen3_next",
    )
    is_mixture = values.kind not in ("qwen3_5", "qwen3_5_text")
    shared = values.count("shared_expert_intermediate_size") if is_mixture else 0
    experts = values.experts(shared=shared, shared_gate=True) if is_mixture else None
    sparse = values.sparse(period=values.count("decoder_sparse_step", default=1)) if experts else []
    ffn = 0 if experts and all(sparse) else values.count("intermediate_size")
    kinds = values.kinds((FULL, LINEAR), lambda n: LINEAR if (n + 1) % period else FULL)

    def of(number: int, kind: str) -> Layer:
        mixer = delta if kind == LINEAR else heads
        feed = experts.pieces(hidden) if experts and sparse[number] else gated(hidden, ffn)
        return layer(
            norms(hidden, "attn_norm", "post_attention_norm"), mixer.pieces(hidden), feed, cache=mixer.cache()
        )

    arch = {True: "qwen3next", False: "qwen35"}[values.kind == "qwen3_next"]
    return assembled(
        values,
        arch + ("moe" if is_mixture and arch == "qwen35" else ""),
        [of(number, kind) for number, kind in enumerate(kinds)],
        norms(hidden, "output_norm"),
        heads=heads.heads,
        ffn=max(ffn, experts.ffn, experts.shared) if experts else ffn,
        experts=experts,
    )


def _mamba(values: Values, inner: int, *, bias: bool, gated_norm: bool = True) -> Mamba2:
    return Mamba2(
        inner=inner,
        heads=values.count("mamba_n_heads"),
        state=values.count("mamba_d_state"),
        groups=values.count("mamba_n_groups"),
        kernel=values.count("mamba_d_conv"),
        conv_bias=values.flag("mamba_conv_bias", True),
        bias=bias,
        gated_norm=gated_norm,
    )


def _granite(settings: Values) -> Decoder:
    """Granite 4: Mamba 2 with a few layers of attention; a mixture, unless it has no experts."""
    values = settings.of(
        max_position_embeddings=2048,
        num_local_experts=8,
        mamba_n_heads=128,
        mamba_n_groups=1,
        mamba_d_state=256,
        mamba_d_conv=4,
    )
    hidden, shared = values.hidden, values.count("shared_intermediate_size")
    bias = values.flag("attention_bias")
    heads = values.heads(qkv_bias=bias, o_bias=bias)
    inner = values.count("mamba_expand", default=2) * hidden
    mamba = _mamba(values, inner, bias=values.flag("mamba_proj_bias"))
    has_experts = values.count("num_local_experts", least=0) > 0
    experts = values.experts("intermediate_size", shared=shared) if has_experts else None
    kinds = values.kinds(("mamba", LINEAR, "attention", FULL), lambda n: LINEAR)

    def of(kind: str) -> Layer:
        mixer = mamba if kind in ("mamba", LINEAR) else heads
        feed = experts.pieces(hidden) if experts else gated(hidden, shared)
        return layer(norms(hidden, *USUAL), mixer.pieces(hidden), feed, cache=mixer.cache())

    arch = "granitehybrid"
    if not any(kind in ("mamba", LINEAR) for kind in kinds):
        arch = "granitemoe" if experts else "granite"
    return assembled(
        values,
        arch,
        map(of, kinds),
        norms(hidden, "output_norm"),
        heads=heads.heads,
        ffn=shared,
        experts=experts,
    )


def _falcon(settings: Values) -> Decoder:
    """Falcon-H1: every layer has attention and Mamba 2 side by side."""
    values = settings.of(
        max_position_embeddings=8192, mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_n_heads=128
    )
    hidden, ffn = values.hidden, values.count("intermediate_size")
    bias = values.flag("attention_bias")
    heads = values.heads(qkv_bias=bias, o_bias=bias)
    inner = values.maybe("mamba_d_ssm") or values.count("mamba_expand", default=2) * hidden
    mamba = _mamba(
        values, inner, bias=values.flag("mamba_proj_bias"), gated_norm=values.flag("mamba_rms_norm")
    )
    one = layer(
        norms(hidden, "attn_norm"),
        [Piece("ffn_norm", (hidden,))],  # llama.cpp's name, without ".weight"
        heads.pieces(hidden),
        mamba.pieces(hidden),
        gated(hidden, ffn, values.flag("mlp_bias")),
        cache=replace(heads.cache(), state=mamba.cache().state),
    )
    others = norms(hidden, "output_norm")
    return assembled(values, "falcon-h1", [one] * values.layers, others, heads=heads.heads, ffn=ffn)


def _lfm2(settings: Values) -> Decoder:
    """LFM2: short convolutions with a few layers of attention."""
    values = settings.of(
        max_position_embeddings=128_000, tie_word_embeddings=True, conv_L_cache=3, use_expert_bias=True
    )
    hidden = values.hidden
    heads = values.heads(qk_norm="head")
    convolution = short_convolution(hidden, values.count("conv_L_cache"), values.flag("conv_bias"))
    attention = layer(heads.pieces(hidden), cache=heads.cache())
    is_mixture = values.kind == "lfm2_moe"
    experts = values.experts(correction=values.flag("use_expert_bias")) if is_mixture else None
    first = values.count("num_dense_layers", default=2, least=0) if is_mixture else values.layers
    ffn = values.count("intermediate_size") if is_mixture else _lfm2_ffn(values)
    attends = values.numbers("full_attn_idxs") or [*range(values.layers)]
    kinds = values.kinds((FULL, "conv"), lambda n: FULL if n in attends else "conv")

    def of(number: int, kind: str) -> Layer:
        mixer = attention if kind == FULL else convolution
        feed = experts.pieces(hidden) if experts and number >= first else gated(hidden, ffn)
        return layer(norms(hidden, *USUAL), mixer.pieces, feed, cache=mixer.cache)

    return assembled(
        values,
        "lfm2moe" if is_mixture else "lfm2",
        [of(number, kind) for number, kind in enumerate(kinds)],
        norms(hidden, "token_embd_norm"),  # llama.cpp's name for the last one
        heads=heads.heads,
        ffn=ffn,
        experts=experts,
    )


def _lfm2_ffn(values: Values) -> int:
    """Two thirds of the file's value, times a multiplier, rounded up to a multiple."""
    ffn = values.count("block_ff_dim", "intermediate_size")
    if not values.flag("block_auto_adjust_ff_dim", True):
        return ffn
    factor = values.get("block_ffn_dim_multiplier")
    scale = float(factor) if isinstance(factor, (int, float)) and 0 < factor < 100 else 1.0
    multiple = values.count("block_multiple_of", default=256)
    return -(-int(scale * int(2 * ffn / 3)) // multiple) * multiple


_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron(settings: Values) -> Decoder:
    """Nemotron-H: a layer is Mamba 2, attention, or a feed-forward (a mixture in Nemotron 3)."""
    values = settings.of(
        max_position_embeddings=4096,
        head_dim=128,
        ssm_state_size=128,
        conv_kernel=4,
        n_groups=8,
        mamba_head_dim=64,
        mamba_num_heads=128,
    )
    hidden = values.hidden
    bias = values.flag("attention_bias")
    heads = values.heads(qkv_bias=bias, o_bias=bias)
    mamba = Mamba2(
        inner=values.count("mamba_num_heads") * values.count("mamba_head_dim"),
        heads=values.count("mamba_num_heads"),
        state=values.count("ssm_state_size"),
        groups=values.count("n_groups"),
        kernel=values.count("conv_kernel"),
        conv_bias=values.flag("use_conv_bias", True),
        bias=values.flag("mamba_proj_bias"),
    )
    kinds = _nemotron_kinds(values)
    ffn = values.count("intermediate_size")
    experts = None
    if "moe" in kinds:
        shared = values.count("moe_shared_expert_intermediate_size", default=0, least=0)
        experts = values.experts(shared=shared, correction=True, is_gated=False)

    def of(kind: str) -> Layer:
        mixer: Iterator[Piece] = plain(hidden, ffn, values.flag("mlp_bias"))
        cache = Cache()
        if kind == "moe" and experts:
            mixer = experts.pieces(hidden)
        elif kind in ("mamba", "attention"):
            attends = mamba if kind == "mamba" else heads
            mixer, cache = attends.pieces(hidden), attends.cache()
        return layer(norms(hidden, "attn_norm"), mixer, cache=cache)

    return assembled(
        values,
        "nemotron_h_moe" if experts else "nemotron_h",
        map(of, kinds),
        norms(hidden, "output_norm"),
        heads=heads.heads,
        ffn=max(experts.ffn, experts.shared) if experts else ffn,
        experts=experts,
    )


def _nemotron_kinds(values: Values) -> list[str]:
    names, pattern = values.get("layers_block_type"), values.get("hybrid_override_pattern")
    if isinstance(names, list) and names and all(name in _NEMOTRON.values() for name in names):
        return [str(name) for name in names]
    if isinstance(pattern, str) and 0 < len(pattern) < 1000 and set(pattern) <= set(_NEMOTRON):
        return [_NEMOTRON[letter] for letter in pattern]
    raise ConfigJsonError(
        f"hybrid_override_pattern {shown(pattern)} is not a pattern of {' '.join(_NEMOTRON)}"
    )


BUILD: dict[str, Build] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _qwen),
    "granitemoehybrid": _granite,
    "falcon_h1": _falcon,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "nemotron_h": _nemotron,
}
