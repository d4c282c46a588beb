"""The tensors of a file that is to be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.models import gguf_keys
from harness.models.gguf_keys import Value, head_dim_of, rotary_of
from harness.theory.architectures import decoder_of, text_model
from harness.theory.decoder import Decoder
from harness.theory.hf_config import Settings
from harness.theory.tensors import of_shape

# How a model that is not dense is stored: each tensor of its GGUF, and where transformers has its values.
#
# One table of names serves synthesis, conversion to GGUF and the way back. Names and orders: modeling_*.py
# and conversion_mapping.py of transformers 5.23, conversion/*.py of llama.cpp.


Config = Mapping[str, Any]
_LEFT_OUT = ("quantization_config", "torch_dtype", "dtype", "architectures")


class NoLayout(ValueError):
    """The model cannot be made, or not in this format; the message is one clause."""


@dataclass(frozen=True)
class Row:
    """A tensor of a GGUF. `type`: f32, or f16 where the file's own 16- or 32-bit type. `there`: its name in
    transformers, {} an expert's number.

    `how` its values lie there: `same`; `plus_one` (the GGUF has one more); `rotated` (rows of `heads` heads
    in another order); `convolution` (an axis of one more); `transposed` (each expert's); `even` and `odd`
    (columns of a matrix that holds two, transposed); `row` (a matrix of one).
    """

    name: str
    type: str
    dims: tuple[int, ...]
    there: str
    how: str = "same"
    heads: int = 0


@dataclass(frozen=True)
class Layout:
    """`config`: config.json of the text model in bfloat16. `architecture`, `metadata`: of the GGUF."""

    config: Config
    architecture: str
    metadata: dict[str, Value]
    rows: tuple[Row, ...]
    tied: bool
    layers: int

    def plain(self) -> dict[str, Any]:
        """For a request to a worker."""
        return asdict(self)


_USUAL = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
}


@dataclass(frozen=True)
class _Family:
    """`causal`: transformers' class. `names`: of a layer's tensors where they differ from the usual ones,
    without .weight or .bias; `whole`: with them, and how their values lie there. `rotated`: the rows of q and
    k. `one_less`: of its norms. `gguf`: why llama.cpp would compute another model, as a clause."""

    causal: str
    names: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    rotated: bool = False
    one_less: bool = False
    gguf: Callable[[Config, Decoder], Iterator[str]] = lambda config, model: iter(())


def _scaling(config: Config, *known: str) -> Iterator[str]:
    kind = rotary_of(config).kind
    if kind not in ("default", *known):
        yield f"rope scaling {kind!r} of {config['model_type']} is not converted"


def _qwen3_moe(config: Config, model: Decoder) -> Iterator[str]:
    if not config.get("norm_topk_prob"):
        yield "llama.cpp's qwen3moe normalizes the chosen experts' weights; norm_topk_prob is not true"
    if config.get("attention_bias"):
        yield "llama.cpp's qwen3moe has no attention_bias; this model has one"
    yield from _scaling(config)


def _not_normalized(config: Config, model: Decoder) -> Iterator[str]:
    if config.get("norm_topk_prob"):
        yield f"llama.cpp's {model.arch} does not normalize experts' weights; norm_topk_prob is true"
    if config.get("clip_qkv"):
        yield f"llama.cpp's {model.arch} has no clip_qkv; this model has one"
    yield from _scaling(config)


def _gemma3(config: Config, model: Decoder) -> Iterator[str]:
    scale, head_dim = config.get("query_pre_attn_scalar") or 256, head_dim_of(config)
    # llama.cpp knows the 27B by its 62 layers (src/models/gemma3.cpp).
    expected = model.hidden_size // config["num_attention_heads"] if model.count == 62 else head_dim
    if scale != expected:
        yield f"llama.cpp's gemma3 scales queries by {expected}; query_pre_attn_scalar is {scale}"
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            yield f"llama.cpp's gemma3 has no {key}; this model has one"
    yield from _alternating(config, model, 6)
    yield from _scaling(config, "linear")


def _alternating(config: Config, model: Decoder, every: int) -> Iterator[str]:
    """llama.cpp knows which layers have windows by the architecture."""
    windows = [bool(each.cache.window) for each in model.layers()]
    if any(windows) and windows != [(number + 1) % every != 0 for number in range(model.count)]:
        yield f"llama.cpp's {model.arch} attends to all tokens in one layer of {every}; this model in others"


def _gpt_oss(config: Config, model: Decoder) -> Iterator[str]:
    for key, known in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.get(key, known) != known:
            yield f"llama.cpp's gpt-oss has {key} {known}; this model {config[key]}"
    yield from _alternating(config, model, 2)
    yield from _scaling(config, "yarn")
    if rotary_of(config).kind == "default":
        yield "transformers takes YaRN for gpt_oss without a rope_scaling, and llama.cpp none; name it"


def _lfm2(config: Config, model: Decoder) -> Iterator[str]:
    if config.get("conv_bias"):
        yield f"llama.cpp's {model.arch} has no conv_bias; this model has one"
    if model.experts and config.get("routed_scaling_factor", 1.0) != 1.0:
        yield f"routed_scaling_factor {config['routed_scaling_factor']} of lfm2_moe is not converted"
    if model.experts and config.get("norm_topk_prob") is False:
        yield "llama.cpp's lfm2moe normalizes the chosen experts' weights; norm_topk_prob is false"
    yield from _scaling(config)


_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_LFM2_WHOLE = {
    "shortconv.conv.weight": ("conv.conv.weight", "convolution"),
    "exp_probs_b.bias": ("feed_forward.expert_bias", "same"),
}
_FAMILIES: dict[str, _Family] = {
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", gguf=_qwen3_moe),
    "qwen2_moe": _Family(
        "Qwen2MoeForCausalLM",
        {
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        {"ffn_gate_inp_shexp.weight": ("mlp.shared_expert_gate.weight", "row")},
        gguf=_not_normalized,
    ),
    "olmoe": _Family("OlmoeForCausalLM", gguf=_not_normalized),
    "mixtral": _Family(
        "MixtralForCausalLM",
        {
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        rotated=True,
        gguf=lambda config, model: _scaling(config, "linear"),
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        one_less=True,
        gguf=_gemma3,
    ),
    "phi3": _Family(
        "Phi3ForCausalLM",
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        gguf=lambda config, model: _scaling(config),
    ),
    "gpt_oss": _Family(
        "GptOssForCausalLM",
        {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        {
            "attn_sinks.weight": ("self_attn.sinks", "same"),
            "ffn_gate_exps.weight": ("mlp.experts.gate_up_proj", "even"),
            "ffn_up_exps.weight": ("mlp.experts.gate_up_proj", "odd"),
            "ffn_gate_exps.bias": ("mlp.experts.gate_up_proj_bias", "even"),
            "ffn_up_exps.bias": ("mlp.experts.gate_up_proj_bias", "odd"),
            "ffn_down_exps.weight": ("mlp.experts.down_proj", "transposed"),
            "ffn_down_exps.bias": ("mlp.experts.down_proj_bias", "same"),
        },
        gguf=_gpt_oss,
    ),
    "lfm2": _Family("Lfm2ForCausalLM", _LFM2, _LFM2_WHOLE, gguf=_lfm2),
    "lfm2_moe": _Family("Lfm2MoeForCausalLM", _LFM2, _LFM2_WHOLE, gguf=_lfm2),
}
KINDS = tuple(_FAMILIES)
"""Every model_type that can be synthesized and converted, besides the dense ones."""


def of(config: Config) -> Layout:
    """Raises NoLayout, and the errors of `decoder_of`."""
    model = decoder_of(config)
    kind, text = text_model(config)
    family = _FAMILIES.get(kind)
    if family is None:
        raise NoLayout(f"{kind} is neither synthesized nor converted here; known: {', '.join(KINDS)}")
    text = Settings({"tie_word_embeddings": model.tied, **text, "model_type": kind})
    if model.arch in ("lfm2", "lfm2moe"):  # transformers' lfm2_moe has no other key for it
        attends = (bool(each.cache.k) for each in model.layers())
        text["layer_types"] = ["full_attention" if attention else "conv" for attention in attends]
    head_dim = head_dim_of(text)
    rows = tuple(_row(each.name, each.type, each.dims, family, head_dim) for each in of_shape(model))
    kept = {
        key: value for key, value in text.items() if key not in _LEFT_OUT and not key.startswith("harness_")
    }
    return Layout(
        config={"architectures": [family.causal], "pad_token_id": None, **kept, "torch_dtype": "bfloat16"},
        architecture=model.arch,
        metadata=gguf_keys.metadata_keys(text, model),
        rows=rows,
        tied=model.tied,
        layers=model.count,
    )


def check_gguf(config: Config) -> None:
    """Raises NoLayout if llama.cpp would compute another model than transformers."""
    kind, text = text_model(config)
    family = _FAMILIES.get(kind)
    if family and (why := next(family.gguf({**text, "model_type": kind}, decoder_of(config)), None)):
        raise NoLayout(why)


def _row(name: str, kind: str, dims: tuple[int, ...], family: _Family, head_dim: int) -> Row:
    if name in _OUTSIDE:
        how = "plus_one" if family.one_less and "norm" in name else "same"
        return Row(name, kind, dims, _OUTSIDE[name], how)
    _, number, piece = name.split(".", 2)
    in_layer = f"model.layers.{number}."
    if piece in family.whole:
        there, how = family.whole[piece]
        return Row(name, kind, dims, in_layer + there, how)
    base, _, suffix = piece.rpartition(".")
    there = f"{in_layer}{(_USUAL | dict(family.names))[base]}.{suffix}"
    if family.one_less and "norm" in base:
        return Row(name, kind, dims, there, "plus_one")
    if family.rotated and base in ("attn_q", "attn_k"):
        return Row(name, kind, dims, there, "rotated", dims[0] // head_dim)
    return Row(name, kind, dims, there)
