"""How a model is stored: each tensor of its GGUF, and where transformers has its values.

One table of names, data/tensor_names.csv, serves synthesis, conversion to GGUF and the way back. Names and
orders: modeling_*.py and conversion_mapping.py of transformers 5.23, conversion/*.py of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.base import data
from harness.models import gguf_keys
from harness.models.gguf_keys import Rotary, Value, head_dim_of, rotary_of
from harness.theory.architectures import decoder_of, text_model
from harness.theory.config_settings import Settings, shown
from harness.theory.decoder import Decoder, dense_fields
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


# By model_type ("": all that have no other row) and name in a GGUF (without an ending: .weight and .bias):
# the name in transformers, and how its values lie there.
_NAMES = {
    (kind, row["gguf"]): (row["transformers"], row["how"])
    for row in data.rows("tensor_names.csv")
    for kind in row["kinds"].split() or [""]
}


@dataclass(frozen=True)
class _Family:
    """`causal`: transformers' class. What llama.cpp computes: with these rope `scalings`; with all tokens in
    one layer of `every`, the others in windows (0: as the file says); with the values `fixed` of keys of
    config.json, whose defaults in transformers come second."""

    causal: str
    scalings: tuple[str, ...] = ()
    every: int = 0
    fixed: Mapping[str, tuple[object, object]] = field(default_factory=dict)


_ABSENT = (None, None)
_SILU = {"hidden_act": ("silu", "silu")}
_NOT_NORMALIZED = {"norm_topk_prob": (False, False), "clip_qkv": _ABSENT}
_FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", ("linear", "llama3"), fixed=_SILU),
    "mistral": _Family("MistralForCausalLM", ("linear", "llama3"), fixed=_SILU),
    "qwen2": _Family("Qwen2ForCausalLM", ("linear",), fixed=_SILU),
    "qwen3": _Family("Qwen3ForCausalLM", ("linear",), fixed=_SILU | {"attention_bias": _ABSENT}),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM", fixed={"norm_topk_prob": (True, False), "attention_bias": _ABSENT}
    ),
    "qwen2_moe": _Family("Qwen2MoeForCausalLM", fixed=_NOT_NORMALIZED),
    "olmoe": _Family("OlmoeForCausalLM", fixed=_NOT_NORMALIZED),
    "mixtral": _Family("MixtralForCausalLM", ("linear",)),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        ("linear",),
        every=6,
        fixed={"attn_logit_softcapping": _ABSENT, "final_logit_softcapping": _ABSENT},
    ),
    "phi3": _Family("Phi3ForCausalLM"),
    "gpt_oss": _Family(
        "GptOssForCausalLM",
        ("yarn",),
        every=2,
        fixed={"swiglu_limit": (7.0, 7.0), "swiglu_alpha": (1.702, 1.702)},
    ),
    "lfm2": _Family("Lfm2ForCausalLM", fixed={"conv_bias": _ABSENT}),
    "lfm2_moe": _Family(
        "Lfm2MoeForCausalLM",
        fixed={"conv_bias": _ABSENT, "norm_topk_prob": (True, True), "routed_scaling_factor": (1.0, 1.0)},
    ),
}
KINDS = tuple(_FAMILIES)
"""Every model_type that can be synthesized and converted."""
_SCALED_BY = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# What a dense architecture has of biases on q, k and v, the attention's output and the feed-forward, and of a
# norm on q and k, where its config.json does not say so: modeling_*.py of transformers.
_HAS = {"qwen2": (True, False, False, False), "qwen3": (False, False, False, True)}


def _differences(config: Config, model: Decoder, family: _Family) -> Iterator[str]:
    """Why llama.cpp would compute another model, as clauses."""
    kind, arch, rotary = config["model_type"], model.arch, rotary_of(config)
    for key, (value, usual) in family.fixed.items():
        stated = config.get(key, usual)
        if (stated or None) != (value or None):
            yield f"llama.cpp's {arch} has {key} {shown(value)}; this model has {shown(stated)}"
    if kind == "qwen2" and model.heads * model.head_dim != model.hidden_size:
        yield "llama.cpp's qwen2 needs heads * head_dim equal to hidden_size"
    if kind == "gemma3_text":
        scale, head_dim = config.get("query_pre_attn_scalar") or 256, head_dim_of(config)
        # llama.cpp knows the 27B by its 62 layers (src/models/gemma3.cpp).
        expected = model.hidden_size // config["num_attention_heads"] if model.count == 62 else head_dim
        if scale != expected:
            yield f"llama.cpp's gemma3 scales queries by {expected}; query_pre_attn_scalar is {scale}"
    windows = [bool(layer.cache.window) for layer in model.layers()]
    alternating = [(number + 1) % family.every != 0 for number in range(model.count)] if family.every else []
    if alternating and any(windows) and windows != alternating:
        yield f"llama.cpp's {arch} attends to all tokens in one layer of {family.every}; this model in others"
    if rotary.kind not in ("default", *family.scalings):
        yield f"rope scaling {rotary.kind!r} of {kind} is not converted"
    for key in _SCALED_BY.get(rotary.kind, ()):
        if key not in rotary.stated:
            yield f"rope scaling {rotary.kind!r} lacks {key}"
    if rotary.kind == "llama3" and rotary.high_freq_factor <= rotary.low_freq_factor:
        yield "rope scaling 'llama3' has a high_freq_factor that is not above its low_freq_factor"
    if kind == "gpt_oss" and rotary.kind == "default":
        yield "transformers takes YaRN for gpt_oss without a rope_scaling, and llama.cpp none; name it"


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


def of(config: Config) -> Layout:
    """Raises NoLayout, and the errors of `decoder_of`."""
    model = decoder_of(config)
    kind, text = text_model(config)
    family = _FAMILIES.get(kind)
    if family is None:
        raise NoLayout(f"{kind} is neither synthesized nor converted here; known: {', '.join(KINDS)}")
    text = Settings({"tie_word_embeddings": model.tied, **text, "model_type": kind})
    if model.arch in ("lfm2", "lfm2moe"):  # transformers' lfm2_moe has no other key for it
        attends = (bool(layer.cache.k) for layer in model.layers())
        text["layer_types"] = ["full_attention" if attention else "conv" for attention in attends]
    sized = text | {"head_dim": model.head_dim} if model.is_dense else text
    head_dim = head_dim_of(sized)
    rows = [_row(tensor.name, tensor.type, tensor.dims, kind, head_dim) for tensor in of_shape(model)]
    if factors := _rope_factors(rotary_of(text), head_dim) if model.is_dense else ():
        rows.insert(0, Row("rope_freqs.weight", "f32", (len(factors),), "", "constant", values=factors))
    of_text = {
        key: value for key, value in text.items() if key not in _LEFT_OUT and not key.startswith("harness_")
    }
    padding = {} if model.is_dense else {"pad_token_id": None}
    return Layout(
        config={"architectures": [family.causal], **padding, **of_text, "torch_dtype": "bfloat16"},
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
    if family is None:
        return
    if why := next(_differences({**text, "model_type": kind}, decoder_of(config), family), None):
        raise NoLayout(f"its GGUF would be another model: {why}")


def _row(name: str, kind: str, dims: tuple[int, ...], model_type: str, head_dim: int) -> Row:
    prefix, piece = "", name
    if name.startswith("blk."):
        _, number, piece = name.split(".", 2)
        prefix = f"model.layers.{number}."
    base, _, suffix = piece.rpartition(".")
    names = ((model_type, piece), (model_type, base), ("", base))
    key = next(key for key in names if key in _NAMES)
    there, how = _NAMES[key]
    there = prefix + (there if key[1] == piece else f"{there}.{suffix}")
    return Row(name, kind, dims, there, how, dims[0] // head_dim if how == "rotated" else 0)
