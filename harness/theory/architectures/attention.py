"""Readers of config.json: dense models, mixtures, Gemma 3n, latent attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from harness.theory.decoder import (
    Decoder,
    Experts,
    Heads,
    Latent,
    Layer,
    Piece,
    fused,
    gated,
    in_runs,
    layer,
    linear,
    norms,
    plain,
)
from harness.theory.hf_config import CHUNKED, FULL, MOST, Build, ConfigJsonError, Values, is_whole

# Dense architectures with keys and values for groups of queries, besides Llama, Mistral, Qwen2 and Qwen3.


USUAL = ("attn_norm", "ffn_norm")
SANDWICH = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
AFTER = ("post_attention_norm", "post_ffw_norm")


@dataclass(frozen=True)
class Family:
    """`arch`: llama.cpp's name. Biases and `qk_norm` are those of every model, or named by the key of
    config.json that says whether there are any. `fused`: q, k and v are one matrix; `fused_gate`: so are the
    feed-forward's gate and its other input. `head_bias`: of lm_head. `norms`: of a layer, with a bias
    each if `norm_bias`. `windows`: by the key sliding_window; `full_every`: one layer in so many has none;
    `beyond_context`: files may have one longer than the context, which is none. `defaults`: of keys that
    its files may leave out.
    """

    arch: str
    defaults: dict[str, object] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: str | None = None
    qk_norm_key: str | None = None
    norms: tuple[str, ...] = USUAL
    norm_bias: bool = False
    output_norm: bool = True
    is_gated: bool = True
    fused: bool = False
    fused_gate: bool = False
    head_bias: bool = False
    windows: bool = False
    full_every: int | None = None
    beyond_context: bool = False

    def build(self, given: Values) -> Decoder:
        values = given.of(**self.defaults)

        def bias(which: bool | str) -> bool:
            return values.flag(which) if isinstance(which, str) else which

        has_norm = self.qk_norm_key is None or values.flag(self.qk_norm_key)
        heads = values.heads(
            bias(self.qkv_bias), bias(self.o_bias), self.qk_norm if has_norm else None, fused=self.fused
        )
        hidden, ffn = values.hidden, values.count("intermediate_size")
        feed = (gated if self.is_gated else plain)(hidden, ffn, bias(self.mlp_bias))
        if self.fused_gate:
            feed = fused(hidden, ffn)
        pieces = [
            *norms(hidden, *self.norms, bias=self.norm_bias),
            *heads.pieces(hidden),
            *feed,
        ]
        windows = (
            values.windows(self.full_every, self.beyond_context) if self.windows else [None] * values.layers
        )
        layers = [layer(pieces, cache=heads.cache(window)) for window in windows]
        others = [*norms(hidden, "output_norm", bias=self.norm_bias)] if self.output_norm else []
        if self.head_bias:
            others.append(Piece("output.bias", (values.vocab,)))
        return assembled(values, self.arch, layers, others, heads=heads.heads, ffn=ffn)


def assembled(
    values: Values,
    arch: str,
    layers: Iterable[Layer],
    others: Iterable[Piece],
    *,
    heads: int,
    ffn: int,
    experts: Experts | None = None,
) -> Decoder:
    return Decoder(
        arch=arch,
        vocab_size=values.vocab,
        hidden_size=values.hidden,
        context=values.context,
        tied=values.tied,
        runs=in_runs(layers),
        others=tuple(others),
        experts=experts.count if experts else 0,
        experts_used=experts.used if experts else 0,
        heads=heads,
        ffn=ffn,
    )


_GEMMA: dict[str, object] = {"head_dim": 256, "tie_word_embeddings": True}
_COHERE: dict[str, object] = {"tie_word_embeddings": True, "max_position_embeddings": 8192}
_GLM: dict[str, object] = {"attention_bias": True, "max_position_embeddings": 131_072}

FAMILIES: dict[str, Family] = {
    "gemma": Family("gemma", _GEMMA | {"max_position_embeddings": 8192}),
    "gemma2": Family(
        "gemma2",
        _GEMMA | {"sliding_window": 4096, "max_position_embeddings": 8192, "vocab_size": 256_000},
        norms=SANDWICH,
        windows=True,
        full_every=2,
    ),
    "glm": Family("chatglm", _GLM, qkv_bias="attention_bias", fused_gate=True),
    "glm4": Family("glm4", _GLM, qkv_bias="attention_bias", norms=SANDWICH, fused_gate=True),
    "phi": Family(
        "phi2",
        {"max_position_embeddings": 2048},
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norms=("attn_norm",),
        norm_bias=True,
        is_gated=False,
        head_bias=True,
    ),
    "phi3": Family(
        "phi3",
        {"max_position_embeddings": 4096},
        fused=True,
        fused_gate=True,
        windows=True,
        beyond_context=True,
    ),
    "granite": Family(
        "granite",
        {"max_position_embeddings": 2048},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "ministral": Family("llama", {"max_position_embeddings": 131_072, "sliding_window": 4096}, windows=True),
    "ministral3": Family("mistral3", {"max_position_embeddings": 262_144, "head_dim": 128}, windows=True),
    "smollm3": Family(
        "smollm3",
        {"tie_word_embeddings": True, "max_position_embeddings": 32_768},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "olmo": Family("olmo", {"max_position_embeddings": 2048}, norms=(), output_norm=False),
    "olmo2": Family("olmo2", {"max_position_embeddings": 2048}, qk_norm="all", norms=AFTER),
    "olmo3": Family(
        "olmo2",
        {"max_position_embeddings": 2048, "sliding_window": 4096},
        qk_norm="all",
        norms=AFTER,
        windows=True,
        full_every=4,
    ),
    "cohere": Family("command-r", _COHERE, norms=("attn_norm",), qk_norm="heads", qk_norm_key="use_qk_norm"),
    "cohere2": Family(
        "cohere2",
        _COHERE | {"sliding_window": 4096},
        norms=("attn_norm",),
        windows=True,
        full_every=4,
    ),
    "starcoder2": Family(
        "starcoder2",
        {"use_bias": True, "tie_word_embeddings": True, "max_position_embeddings": 4096},
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        norm_bias=True,
        is_gated=False,
        windows=True,
    ),
    "stablelm": Family(
        "stablelm", {"max_position_embeddings": 4096}, qkv_bias="use_qkv_bias", norm_bias=True
    ),
    "ernie4_5": Family(
        "ernie4_5",
        {"tie_word_embeddings": True, "max_position_embeddings": 131_072, "head_dim": 128},
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
    ),
    "exaone": Family("exaone", {"max_position_embeddings": 32_768}),
    "exaone4": Family(
        "exaone4", {"max_position_embeddings": 2048}, qk_norm="head", norms=AFTER, windows=True, full_every=4
    ),
    "hunyuan_v1_dense": Family(
        "hunyuan-dense", {"max_position_embeddings": 2048}, qkv_bias="attention_bias", qk_norm="head"
    ),
    "seed_oss": Family(
        "seed_oss",
        {"attention_bias": True, "head_dim": 128, "max_position_embeddings": 524_288},
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        norms=("attn_norm", "post_attention_norm"),
    ),
    "internlm2": Family("internlm2", {"max_position_embeddings": 32_768}, qkv_bias="bias", o_bias="bias"),
    "nemotron": Family("nemotron", {"max_position_embeddings": 4096}, norm_bias=True, is_gated=False),
    "arcee": Family("arcee", {"max_position_embeddings": 4096}, is_gated=False),
}


def _gemma3(given: Values) -> Decoder:
    """One layer in six attends to all tokens, unless sliding_window_pattern says otherwise. Files of
    the models for images leave out most keys."""
    pattern = given.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    defaults = _GEMMA | {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    return Family("gemma3", defaults, qk_norm="head", norms=SANDWICH, windows=True, full_every=pattern).build(
        given
    )


DENSE_BUILD: dict[str, Build] = {kind: family.build for kind, family in FAMILIES.items()}
DENSE_BUILD |= {"gemma3_text": _gemma3, "gemma3": _gemma3}


# Gemma 3n: streams of activations, a table of each layer for each token, layers that share a cache. Pure.


_KV = ("attn_k", "attn_v")


def _gemma3n(given: Values) -> Decoder:
    values = given.of(
        head_dim=256,
        vocab_size=262_400,
        vocab_size_per_layer_input=262_144,
        hidden_size_per_layer_input=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_kv_shared_layers=15,
        altup_num_inputs=4,
        laurel_rank=64,
        sliding_window=512,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    hidden, count = values.hidden, values.layers
    heads, windows, widths = values.heads(qk_norm="head"), values.windows(5), _widths(values)
    inputs, of_layer = values.count("altup_num_inputs"), values.count("hidden_size_per_layer_input")
    borrowing = count - values.count("num_kv_shared_layers", least=0)

    # Files hold keys and values of all layers; transformers does not make those of the layers that borrow.
    unused = tuple(p for p in heads.pieces(hidden) if p.name.startswith(_KV))

    def own(ffn: int, borrowed: bool) -> Iterator[Piece]:
        yield from norms(hidden, *SANDWICH, "post_norm", "laurel_post_norm", "altup_router_norm")
        yield from (p for p in heads.pieces(hidden) if not (borrowed and p.name.startswith(_KV)))
        yield from gated(hidden, ffn)
        yield from linear("laurel_l", values.count("laurel_rank"), hidden)
        yield from linear("laurel_r", hidden, values.count("laurel_rank"))
        yield from linear("inp_gate", of_layer, hidden)
        yield from linear("proj", hidden, of_layer)
        yield from linear("altup_predict_coef", inputs**2, inputs)
        yield from linear("altup_correct_coef", inputs, inputs)
        yield from linear("altup_router", inputs, hidden)
        yield Piece("altup_correct_scale.weight", (hidden,))

    def of(number: int) -> Layer:
        borrowed = number >= borrowing
        cache = replace(heads.cache(windows[number]), borrowed=borrowed)
        kept = layer(own(widths[number], borrowed), cache=cache)
        return replace(kept, unused=unused) if borrowed else kept

    tables = values.count("vocab_size_per_layer_input")
    others = [
        *norms(hidden, "output_norm"),
        Piece("per_layer_token_embd.weight", (tables, count * of_layer)),
        *linear("per_layer_model_proj", count * of_layer, hidden),
        *norms(of_layer, "per_layer_proj_norm"),
        Piece("altup_proj.weight", (inputs - 1, hidden, hidden)),
        Piece("altup_unembd_proj.weight", (inputs - 1, hidden, hidden)),
    ]
    return assembled(values, "gemma3n", map(of, range(count)), others, heads=heads.heads, ffn=max(widths))


def _widths(values: Values) -> list[int]:
    """The widths of each layer's feed-forward, from a list or a single value."""
    given = values.get("intermediate_size")
    if not isinstance(given, list):
        return [values.count("intermediate_size", default=16_384)] * values.layers
    if len(given) != values.layers or not all(is_whole(each, MOST) for each in given):
        raise ConfigJsonError(
            f"intermediate_size must be a list of {values.layers} widths, one for each layer"
        )
    return [int(each) for each in given]


GEMMA3N_BUILD: dict[str, Build] = {"gemma3n_text": _gemma3n, "gemma3n": _gemma3n}


# Multi-head latent attention: DeepSeek V2 and V3 with R1, Kimi K2, GLM-4.7 Flash. Pure.


def _deepseek(given: Values) -> Decoder:
    """DeepSeek without the layer that predicts a second token. The first layers are dense."""
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
    shared = values.count("n_shared_experts", default=0, least=0) * values.count("moe_intermediate_size")
    experts = values.experts(shared=shared, correction=is_third)
    sparse = values.sparse(values.count("first_k_dense_replace", default=0, least=0))
    ffn = values.count("intermediate_size")
    return _decoder(values, "deepseek2", attention, experts, sparse=sparse, dense_ffn=ffn)


LATENT_BUILD: dict[str, Build] = dict.fromkeys(
    ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _deepseek
)


# Mixtures of experts whose attention has grouped queries: Mixtral, Qwen, gpt-oss, GLM, Llama 4. Pure.


_POST = ("attn_norm", "post_attention_norm")


def _decoder(
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
    """`sparse`: whether a layer is a mixture, null: all; the others have one feed-forward of `dense_ffn`."""
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


def _mixtral(given: Values) -> Decoder:
    values = given.of(max_position_embeddings=131_072)
    experts = values.experts("intermediate_size")
    return _decoder(values, "llama", values.heads(), experts, windows=values.windows())


def _qwen2(given: Values) -> Decoder:
    values = given.of(max_position_embeddings=32_768, use_sliding_window=False)
    experts = values.experts(shared=values.count("shared_expert_intermediate_size"), shared_gate=True)
    heads = values.heads(qkv_bias=values.flag("qkv_bias", True))
    return _decoder(values, "qwen2moe", heads, experts, **_qwen_layers(values))  # type: ignore[arg-type]


def _qwen3(given: Values) -> Decoder:
    values = given.of(max_position_embeddings=32_768, use_sliding_window=False)
    bias = values.flag("attention_bias")
    heads = values.heads(qkv_bias=bias, o_bias=bias, qk_norm="head")
    return _decoder(values, "qwen3moe", heads, values.experts(), **_qwen_layers(values))  # type: ignore[arg-type]


def _qwen_layers(values: Values) -> dict[str, object]:
    sparse = values.sparse(every=values.count("decoder_sparse_step", default=1))
    return {
        "sparse": sparse,
        "dense_ffn": 0 if all(sparse) else values.count("intermediate_size"),
        "windows": values.windows(),
    }


def _gpt_oss(given: Values) -> Decoder:
    values = given.of(head_dim=64, sliding_window=128, max_position_embeddings=131_072, attention_bias=True)
    bias = values.flag("attention_bias")
    heads = values.heads(qkv_bias=bias, o_bias=bias, sinks=True)
    experts = values.experts("intermediate_size", bias=True)
    return _decoder(values, "gpt-oss", heads, experts, windows=values.windows(2), names=_POST)


def _glm4(given: Values) -> Decoder:
    """GLM 4 without the layer that predicts a second token."""
    values = given.of(max_position_embeddings=131_072)
    ffn = values.count("moe_intermediate_size")
    experts = values.experts(shared=ffn * values.count("n_shared_experts", default=1), correction=True)
    first = values.count("first_k_dense_replace", default=1, least=0)
    return _decoder(
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


def _llama4(given: Values) -> Decoder:
    """Layers with rotary positions attend to their chunk; every fourth has none and attends to all."""
    values = given.of(
        head_dim=128,
        max_position_embeddings=131_072,
        attention_chunk_size=8192,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=202_048,
    )
    experts = values.experts("intermediate_size", shared=values.count("intermediate_size"))
    sparse = values.sparse(every=values.count("interleave_moe_layer_step", default=1))
    if moe_layers := values.numbers("moe_layers"):
        sparse = [number in moe_layers for number in range(values.layers)]
    rotary = values.get("no_rope_layers")
    chunk = values.maybe("attention_chunk_size")

    def otherwise(number: int) -> str:
        listed = isinstance(rotary, list) and len(rotary) == values.layers
        has_chunk = rotary[number] if listed and isinstance(rotary, list) else (number + 1) % 4
        return CHUNKED if has_chunk else FULL

    kinds = values.kinds((FULL, CHUNKED), otherwise)
    return _decoder(
        values,
        "llama4",
        values.heads(),
        experts,
        sparse=sparse,
        dense_ffn=0 if all(sparse) else values.count("intermediate_size_mlp"),
        windows=[chunk if kind == CHUNKED else None for kind in kinds],
        chunked=True,
    )


def _phi(given: Values) -> Decoder:
    values = given.of(max_position_embeddings=131_072)
    bias = values.flag("attention_bias")
    head = [Piece("output.bias", (values.vocab,))] if values.flag("lm_head_bias") else []
    return _decoder(
        values,
        "phimoe",
        values.heads(qkv_bias=bias, o_bias=bias),
        values.experts("intermediate_size"),
        windows=None,  # as long as the context in every published file
        norm_bias=True,
        others=head,
    )


def _granite(given: Values) -> Decoder:
    values = given.of(max_position_embeddings=2048)
    bias = values.flag("attention_bias")
    shared = values.count("shared_intermediate_size", default=0, least=0)
    experts = values.experts("intermediate_size", shared=shared)
    return _decoder(values, "granitemoe", values.heads(qkv_bias=bias, o_bias=bias), experts)


def _olmoe(given: Values) -> Decoder:
    values = given.of(max_position_embeddings=4096)
    return _decoder(values, "olmoe", values.heads(qk_norm="all"), values.experts("intermediate_size"))


def _ernie(given: Values) -> Decoder:
    values = given.of(max_position_embeddings=131_072, tie_word_embeddings=True)
    first = values.count("moe_layer_start_index", default=1, least=0)
    last = values.get("moe_layer_end_index")
    end = values.layers - 1 if last in (None, -1) else values.count("moe_layer_end_index", least=0)
    every = values.count("moe_layer_interval", default=1)
    shared = values.count("moe_num_shared_experts", default=0, least=0)
    experts = values.experts(shared=shared * values.count("moe_intermediate_size"), correction=True)
    bias = values.flag("use_bias")
    return _decoder(
        values,
        "ernie4_5-moe",
        values.heads(qkv_bias=bias, o_bias=bias),
        experts,
        sparse=[(n + 1) % every == 0 and first <= n <= end for n in range(values.layers)],
        dense_ffn=values.count("intermediate_size"),
    )


def _hunyuan(given: Values) -> Decoder:
    values = given.of(max_position_embeddings=2048)
    bias = values.flag("attention_bias")
    experts = values.experts("intermediate_size", shared=values.count("intermediate_size"))
    heads = values.heads(qkv_bias=bias, o_bias=bias, qk_norm="head")
    return _decoder(values, "hunyuan-moe", heads, experts)


def _minimax(given: Values) -> Decoder:
    values = given.of(max_position_embeddings=196_608, head_dim=128)
    experts = values.experts("intermediate_size", correction=True)
    return _decoder(values, "minimax-m2", values.heads(qk_norm="all"), experts)


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
