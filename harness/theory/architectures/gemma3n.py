"""Gemma 3n: streams of activations, a table of each layer for each token, layers that share a cache. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.theory.architectures.attention import SANDWICH, assembled
from harness.theory.config_settings import MOST, Build, ConfigJsonError, Values, is_whole
from harness.theory.decoder import Decoder
from harness.theory.layer_parts import (
    Layer,
    Piece,
    gated,
    layer,
    linear,
    norms,
)

_KV = ("attn_k", "attn_v")


def _gemma3n(settings: Values) -> Decoder:
    values = settings.of(
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
        shared_layer = layer(own(widths[number], borrowed), cache=cache)
        return replace(shared_layer, unused=unused) if borrowed else shared_layer

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
    widths = values.get("intermediate_size")
    if not isinstance(widths, list):
        return [values.count("intermediate_size", default=16_384)] * values.layers
    if len(widths) != values.layers or not all(is_whole(width, MOST) for width in widths):
        raise ConfigJsonError(
            f"intermediate_size must be a list of {values.layers} widths, one for each layer"
        )
    return [int(width) for width in widths]


GEMMA3N_BUILD: dict[str, Build] = {"gemma3n_text": _gemma3n, "gemma3n": _gemma3n}
