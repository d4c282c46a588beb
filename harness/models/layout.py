"""How a model is stored: each tensor of its GGUF, and where transformers has its values.

One table of names serves synthesis, conversion to GGUF and the way back. Names and orders: modeling_*.py and
conversion_mapping.py of transformers 5.23, conversion/*.py of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.models import gguf_keys
from harness.models.gguf_keys import Rotary, Value, head_dim_of, rotary_of
from harness.theory.architectures import decoder_of, text_model
from harness.theory.decoder import Decoder, dense_fields
from harness.theory.hf_config import Settings
from harness.theory.tensors import of_shape

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
    (columns of a matrix that holds two, transposed); `row` (a matrix of one); `constant` (only the GGUF has
    them: these `values`).
    """

    name: str
    type: str
    dims: tuple[int, ...]
    there: str
    how: str = "same"
    heads: int = 0
    values: tuple[float, ...] = ()


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


def _dense(config: Config, model: Decoder, *scalings: str) -> Iterator[str]:
    kind, rotary = config["model_type"], rotary_of(config)
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {config['hidden_act']!r} is not what llama.cpp computes for {kind}, silu"
    yield from _scaling(config, "linear", *scalings)
    for key in _SCALED_BY.get(rotary.kind, ()):
        if key not in rotary.stated:
            yield f"rope scaling {rotary.kind!r} lacks {key}"
    if rotary.kind == "llama3" and rotary.high_freq_factor <= rotary.low_freq_factor:
        yield "rope scaling 'llama3' has a high_freq_factor that is not above its low_freq_factor"


def _llama(config: Config, model: Decoder) -> Iterator[str]:
    yield from _dense(config, model, "llama3")


def _qwen2(config: Config, model: Decoder) -> Iterator[str]:
    if model.heads * model.head_dim != model.hidden_size:
        yield "llama.cpp's qwen2 needs heads * head_dim equal to hidden_size"
    yield from _dense(config, model)


def _qwen3(config: Config, model: Decoder) -> Iterator[str]:
    if config.get("attention_bias"):
        yield "llama.cpp's qwen3 has no attention_bias; this model has one"
    yield from _dense(config, model)


_SCALED_BY = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope_factors(rotary: Rotary, head_dim: int) -> tuple[float, ...]:
    """The divisors of the rotary frequencies in llama.cpp, as rope_type llama3 has them in transformers; none
    for another, and for one that check_gguf refuses.

    Wavelengths (tokens) below context / high_freq_factor stay, those beyond context / low_freq_factor are
    stretched by `factor`, and those between go smoothly from one to the other.
    """
    low, high = rotary.low_freq_factor, rotary.high_freq_factor
    if rotary.kind != "llama3" or high <= low:
        return ()
    lengths = (2 * math.pi * rotary.theta ** (i / head_dim) for i in range(0, head_dim, 2))
    smooth = (min(1, max(0, (rotary.original / length - low) / (high - low))) for length in lengths)
    return tuple(1 / ((1 - share) / rotary.factor + share) for share in smooth)


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
    "llama": _Family("LlamaForCausalLM", rotated=True, gguf=_llama),
    "mistral": _Family("MistralForCausalLM", rotated=True, gguf=_llama),
    "qwen2": _Family("Qwen2ForCausalLM", gguf=_qwen2),
    "qwen3": _Family("Qwen3ForCausalLM", gguf=_qwen3),
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
"""Every model_type that can be synthesized and converted."""
# What a dense architecture has of biases on q, k and v, the attention's output and the feed-forward, and of a
# norm on q and k, where its config.json does not say so: modeling_*.py of transformers.
_HAS = {"qwen2": (True, False, False, False), "qwen3": (False, False, False, True)}


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
    sized = text | {"head_dim": model.head_dim} if model.is_dense else text
    head_dim = head_dim_of(sized)
    rows = [_row(each.name, each.type, each.dims, family, head_dim) for each in of_shape(model)]
    if factors := _rope_factors(rotary_of(text), head_dim) if model.is_dense else ():
        rows.insert(0, Row("rope_freqs.weight", "f32", (len(factors),), "", "constant", values=factors))
    kept = {
        key: value for key, value in text.items() if key not in _LEFT_OUT and not key.startswith("harness_")
    }
    padding = {} if model.is_dense else {"pad_token_id": None}
    return Layout(
        config={"architectures": [family.causal], **padding, **kept, "torch_dtype": "bfloat16"},
        architecture=model.arch,
        metadata=gguf_keys.metadata_keys(sized, model),
        rows=tuple(rows),
        tied=model.tied,
        layers=model.count,
    )


def dense_config(model: Decoder) -> Config:
    """config.json of a dense model, with transformers 4's keys, which 5 reads too; 4 silently ignores those
    of 5. Raises NoLayout."""
    fields = dense_fields(model) or {}
    arch, window = model.arch, model.window
    kind = "mistral" if arch == "llama" and window else arch
    if not fields or kind not in ("llama", "mistral", *_HAS):
        raise NoLayout(f"cannot synthesize {arch!r}; known: llama, qwen2, qwen3")
    parts = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm")
    has = tuple(fields[part] for part in parts)
    bias = fields["o_bias"]
    expected = (bias, bias, has[2], False) if kind == "llama" else _HAS.get(kind, (False,) * 4)
    if has != expected:
        raise NoLayout(f"cannot synthesize {kind}: it has no such biases and norms")
    config = {
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.count,
        "intermediate_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.context,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "hidden_act": "silu",
    }
    if kind != "qwen2" or model.heads * model.head_dim != model.hidden_size:
        config["head_dim"] = model.head_dim
    if kind == "llama":
        config |= {"attention_bias": bias, "mlp_bias": has[2]}
    elif kind == "mistral":
        config["sliding_window"] = window
    else:
        config["use_sliding_window"] = bool(window)
        config |= {"sliding_window": window, "max_window_layers": 0} if window else {}
    return config


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
