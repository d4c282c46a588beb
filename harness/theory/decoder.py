"""A decoder for text as its layers, with its parameters: every architecture that the theory knows. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, repeat

from harness.theory.layers import Cache, Heads, Layer, Piece, gated, layer, norms
from harness.theory.shapes import Shape


@dataclass(frozen=True)
class Decoder:
    """`arch`: llama.cpp's name of the architecture. `runs`: alike layers in a row, and
    how many, in order. `others`: tensors of no
    layer besides the input embedding and lm_head. `experts`, `experts_used`: in a layer, by a token; 0: none.
    `heads`, `ffn`: the most of any layer. `shape`: of a dense Llama- or Qwen-like model, null for others.
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
    shape: Shape | None = None

    @property
    def window(self) -> int | None:
        """The window that all layers have; null if some attend to all tokens, or differ."""
        windows = {each.cache.window for each, _ in self.runs if each.cache.k}
        return windows.pop() if len(windows) == 1 else None

    @property
    def count(self) -> int:
        """Of layers."""
        return sum(times for _, times in self.runs)

    def layers(self) -> Iterator[Layer]:
        """One after the other."""
        for each, times in self.runs:
            yield from repeat(each, times)

    @property
    def expert_share(self) -> float:
        """Share of the experts' weights that one token reads."""
        return self.experts_used / self.experts if self.experts else 1.0

    def pieces(self) -> Iterator[Piece]:
        """All of a file but the input embedding and lm_head, by their whole names, in its order."""
        for number, each in enumerate(self.layers()):
            for piece in (*each.pieces, *each.unused):
                yield Piece(f"blk.{number}.{piece.name}", piece.dims)
        yield from self.others


@lru_cache(maxsize=256)
def of_shape(shape: Shape) -> Decoder:
    """The same model, of a dense shape."""
    heads = Heads(
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.qkv_bias,
        shape.o_bias,
        "head" if shape.qk_norm else None,
    )
    one = layer(
        norms(shape.hidden_size, "attn_norm", "ffn_norm"),
        heads.pieces(shape.hidden_size),
        gated(shape.hidden_size, shape.intermediate_size, shape.mlp_bias),
        cache=heads.cache(shape.window),
    )
    return Decoder(
        arch=shape.arch,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        context=shape.context,
        tied=shape.tied,
        runs=((one, shape.layers),),
        others=tuple(norms(shape.hidden_size, "output_norm")),
        heads=shape.heads,
        ffn=shape.intermediate_size,
        shape=shape,
    )


def made(model: Shape | Decoder) -> Decoder:
    return of_shape(model) if isinstance(model, Shape) else model


def layer_params(model: Shape | Decoder, norms: bool = True) -> int:
    """All but the input embedding and lm_head; without `norms`: the linear layers' weights and biases."""
    return round(sum(_counted(made(model), norms).values()))


def lm_head_params(model: Shape | Decoder) -> int:
    """Of the output matrix; the input embedding has as many, and is the same matrix if tied."""
    return model.vocab_size * model.hidden_size


def active_layer_params(model: Shape | Decoder, norms: bool = True) -> int:
    """Parameters of the layers that one token is computed with: of the experts, those that it uses. A table
    with a row for each token (Gemma 3n) does not count."""
    decoder = made(model)
    counted = _counted(decoder, norms)
    return round(counted["shared"] + counted["experts"] * decoder.expert_share)


def expert_params(model: Shape | Decoder) -> int:
    """Of all experts; 0 without a mixture."""
    return _counted(made(model), True)["experts"]


def table_params(model: Shape | Decoder) -> int:
    """Of tables with a row for each token besides the input embedding."""
    return _counted(made(model), True)["table"]


def active_params(model: Shape | Decoder, norms: bool = True) -> int:
    """Parameters that a decode step computes with: all but the input embedding, of which it reads one row."""
    return active_layer_params(model, norms) + lm_head_params(model)


def parameters(model: Shape | Decoder, norms: bool = True) -> int:
    """All weights and biases; a tied embedding counts once."""
    return layer_params(model, norms) + lm_head_params(model) * (1 if model.tied else 2)


def kv_elements_per_token(model: Shape | Decoder, in_windows: bool = True) -> int:
    """Elements of KV cache that a token adds, in layers with a window too, until it is full. `in_windows`:
    those of layers with a window count."""
    caches = [(each.cache, times) for each, times in made(model).runs if not each.cache.borrowed]
    return sum(times * (c.k + c.v) for c, times in caches if in_windows or not c.window)


def queries_to_a_key(model: Shape | Decoder) -> int:
    """Query heads to a KV head, the most of any layer; a latent cache has one for all queries."""
    decoder = made(model)
    caches = (each.cache for each, _ in decoder.runs if each.cache.k)
    return max((c.products // (c.k + c.v) if c.v else decoder.heads for c in caches), default=0)


def kinds(model: Shape | Decoder) -> dict[Cache, int]:
    """How many layers keep what of earlier tokens."""
    found: Counter[Cache] = Counter()
    for each, times in made(model).runs:
        found[each.cache] += times
    return dict(found)


def in_runs(layers: Iterable[Layer]) -> tuple[tuple[Layer, int], ...]:
    return tuple((each, sum(1 for _ in alike)) for each, alike in groupby(layers))


@lru_cache(maxsize=256)
def _counted(decoder: Decoder, with_norms: bool) -> Counter[str]:
    found: Counter[str] = Counter()
    for each, times in (*decoder.runs, (Layer(decoder.others), 1)):
        for piece in each.pieces:
            if with_norms or "norm" not in piece.name:
                part = "experts" if piece.of_experts else "table" if is_table(piece.name) else "shared"
                found[part] += times * piece.elements
    return found


def is_table(name: str) -> bool:
    """A table with a row for each token, of which a step reads one: the input embedding, and Gemma 3n's."""
    return name.startswith(("token_embd.", "per_layer_token_embd."))
