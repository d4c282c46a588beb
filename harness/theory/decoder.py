"""A decoder for text as its layers, with its parameters: every architecture that the theory knows. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, repeat
from typing import Any

from harness.theory.layer_parts import Cache, Heads, Layer, Piece, gated, layer, norms


@dataclass(frozen=True)
class Decoder:
    """`arch`: llama.cpp's name of the architecture. `runs`: alike layers in a row, and
    how many, in order. `others`: tensors of no
    layer besides the input embedding and lm_head. `experts`, `experts_used`: in a layer, by a token; 0: none.
    `heads`, `ffn`: the most of any layer. `rope_theta`, `norm_eps`: of a model that `dense` makes, None for
    others.
    """

    arch: str
    vocab_size: int
    hidden_size: int
    context: int
    tied: bool
    runs: tuple[tuple[Layer, int], ...]
    others: tuple[Piece, ...] = ()
    experts: int = 0
    experts_used: int = 0
    heads: int = 0
    ffn: int = 0
    rope_theta: float | None = None
    norm_eps: float | None = None

    def __hash__(self) -> int:
        """Of the numbers alone: hashing all layers takes up to 0.1 ms, and few models share the numbers."""
        return hash((self.vocab_size, self.hidden_size, self.context, self.heads, self.ffn, len(self.runs)))

    @property
    def is_dense(self) -> bool:
        """Whether it is a Llama, Mistral, Qwen2 or Qwen3 without experts, as `dense` makes it."""
        return self.rope_theta is not None

    @property
    def kv_heads(self) -> int:
        """KV heads of a dense model; 0: of another."""
        return self.runs[0][0].cache.k // self.head_dim if self.head_dim else 0

    @property
    def head_dim(self) -> int:
        """Elements of a head of a dense model; 0: of another."""
        return self.runs[0][0].cache.products // (2 * self.heads) if self.is_dense and self.heads else 0

    @property
    def window(self) -> int | None:
        """The window that all layers have; None if some attend to all tokens, or differ."""
        windows = {kind.cache.window for kind, _ in self.runs if kind.cache.k}
        return windows.pop() if len(windows) == 1 else None

    @property
    def count(self) -> int:
        """The number of layers."""
        return sum(times for _, times in self.runs)

    def layers(self) -> Iterator[Layer]:
        """One after the other."""
        for kind, times in self.runs:
            yield from repeat(kind, times)

    @property
    def expert_share(self) -> float:
        """Share of the experts' weights that one token reads."""
        return self.experts_used / self.experts if self.experts else 1.0


@lru_cache(maxsize=256, typed=True)
def dense(
    arch: str,
    vocab_size: int,
    hidden_size: int,
    layers: int,
    intermediate_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tied: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    rope_theta: float = 10_000.0,
    norm_eps: float = 1e-5,
    context: int = 4096,
    window: int | None = None,
) -> Decoder:
    """A decoder with alike layers, a gated feed-forward and RMS norms. `arch` is llama.cpp's name for it.

    Biases: `qkv_bias` on q, k and v (Qwen2), `o_bias` on the attention's output, `mlp_bias` on all three of
    the feed-forward. `qk_norm`: a norm of head_dim on q and on k (Qwen3). `window`: tokens attended to; None
    for all.
    """
    attention = Heads(heads, kv_heads, head_dim, qkv_bias, o_bias, "head" if qk_norm else None)
    one = layer(
        norms(hidden_size, "attn_norm", "ffn_norm"),
        attention.pieces(hidden_size),
        gated(hidden_size, intermediate_size, mlp_bias),
        cache=attention.cache(window),
    )
    return Decoder(
        arch=arch,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        context=context,
        tied=tied,
        runs=((one, layers),),
        others=tuple(norms(hidden_size, "output_norm")),
        heads=heads,
        ffn=intermediate_size,
        rope_theta=rope_theta,
        norm_eps=norm_eps,
    )


def dense_fields(decoder: Decoder | None) -> dict[str, Any] | None:
    """The arguments of `dense` that make this model, as records and workers have them; None: it is none that
    `dense` makes."""
    if decoder is None or not decoder.is_dense:
        return None
    names = {piece.name for piece in decoder.runs[0][0].pieces}
    return {
        "arch": decoder.arch,
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "layers": decoder.count,
        "intermediate_size": decoder.ffn,
        "heads": decoder.heads,
        "kv_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "tied": decoder.tied,
        "qkv_bias": "attn_q.bias" in names,
        "o_bias": "attn_output.bias" in names,
        "mlp_bias": "ffn_up.bias" in names,
        "qk_norm": "attn_q_norm.weight" in names,
        "rope_theta": decoder.rope_theta,
        "norm_eps": decoder.norm_eps,
        "context": decoder.context,
        "window": decoder.window,
    }


def dense_like(decoder: Decoder, **changed: Any) -> Decoder:
    """A dense model with some other arguments of `dense`."""
    return dense(**(dense_fields(decoder) or {}) | changed)


def layer_params(model: Decoder, norms: bool = True) -> int:
    """All but the input embedding and lm_head; without `norms`: the linear layers' weights and biases."""
    return round(sum(_counted(model, norms).values()))


def lm_head_params(model: Decoder) -> int:
    """Parameters of the output matrix, as many as of the input embedding; one matrix if tied."""
    return model.vocab_size * model.hidden_size


def active_layer_params(model: Decoder, norms: bool = True) -> int:
    """Parameters of the layers that one token is computed with: of the experts, those that it uses. A table
    with a row for each token (Gemma 3n) does not count."""
    counted = _counted(model, norms)
    return round(counted["shared"] + counted["experts"] * model.expert_share)


def expert_params(model: Decoder) -> int:
    """Parameters of all experts; 0 without a mixture."""
    return _counted(model, True)["experts"]


def table_params(model: Decoder) -> int:
    """Parameters of tables with a row for each token, without the input embedding."""
    return _counted(model, True)["table"]


def active_params(model: Decoder, norms: bool = True) -> int:
    """Parameters that a decode step computes with: all but the input embedding, of which it reads one row."""
    return active_layer_params(model, norms) + lm_head_params(model)


def parameters(model: Decoder, norms: bool = True) -> int:
    """All weights and biases; a tied embedding counts once."""
    return layer_params(model, norms) + lm_head_params(model) * (1 if model.tied else 2)


def kv_elements_per_token(model: Decoder, in_windows: bool = True) -> int:
    """Elements of KV cache that a token adds, in layers with a window too, until it is full. `in_windows`:
    those of layers with a window count."""
    caches = [(kind.cache, times) for kind, times in model.runs if not kind.cache.borrowed]
    return sum(times * (c.k + c.v) for c, times in caches if in_windows or not c.window)


def queries_to_a_key(model: Decoder) -> int:
    """Query heads to a KV head, the most of any layer; a latent cache has one for all queries."""
    caches = (kind.cache for kind, _ in model.runs if kind.cache.k)
    return max((c.products // (c.k + c.v) if c.v else model.heads for c in caches), default=0)


def kinds(model: Decoder) -> dict[Cache, int]:
    """Count the layers with each kind of cache."""
    kinds_of_cache: Counter[Cache] = Counter()
    for kind, times in model.runs:
        kinds_of_cache[kind.cache] += times
    return dict(kinds_of_cache)


def in_runs(layers: Iterable[Layer]) -> tuple[tuple[Layer, int], ...]:
    return tuple((kind, sum(1 for _ in alike)) for kind, alike in groupby(layers))


@lru_cache(maxsize=256)
def _counted(decoder: Decoder, with_norms: bool) -> Counter[str]:
    elements: Counter[str] = Counter()
    for kind, times in (*decoder.runs, (Layer(decoder.others), 1)):
        for piece in kind.pieces:
            if with_norms or "norm" not in piece.name:
                part = "experts" if piece.of_experts else "table" if is_table(piece.name) else "shared"
                elements[part] += times * piece.elements
    return elements


def is_table(name: str) -> bool:
    """A table with a row for each token, of which a step reads one: the input embedding, and Gemma 3n's."""
    return name.startswith(("token_embd.", "per_layer_token_embd."))
