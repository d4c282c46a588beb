"""Dense architectures with keys and values for groups of queries, besides Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.theory.config_settings import Build, Values
from harness.theory.decoder import Decoder, in_runs
from harness.theory.layer_parts import (
    Experts,
    Layer,
    Piece,
    fused,
    gated,
    layer,
    norms,
    plain,
)

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

    def build(self, settings: Values) -> Decoder:
        values = settings.of(**self.defaults)

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


def _gemma3(settings: Values) -> Decoder:
    """One layer in six attends to all tokens, unless sliding_window_pattern says otherwise. Files of
    the models for images leave out most keys."""
    pattern = settings.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    defaults = _GEMMA | {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    return Family("gemma3", defaults, qk_norm="head", norms=SANDWICH, windows=True, full_every=pattern).build(
        settings
    )


DENSE_BUILD: dict[str, Build] = {kind: family.build for kind, family in FAMILIES.items()}
DENSE_BUILD |= {"gemma3_text": _gemma3, "gemma3": _gemma3}
