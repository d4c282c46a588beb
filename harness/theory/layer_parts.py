"""The parts of a decoder's layer: its tensors, and its cache of earlier tokens. Pure.

Names are those of llama.cpp's gguf-py, without `blk.N.`; a file in Hugging Face's layout may divide the same
elements otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

# Matrices that llama.cpp does not quantize (tensor_allows_quantization in llama-quant.cpp); it converts most
# of them to F32.
_IN_16_BITS = ("laurel", "per_layer_model_proj", "altup_proj", "altup_unembd_proj")
_KEPT = (
    *("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d", "shortconv.conv.weight", "altup", "laurel"),
    "per_layer_model_proj",
)


@dataclass(frozen=True)
class Piece:
    """A tensor. `dims`: rows first: a matrix is (n_out, n_in), all experts are (experts, n_out, n_in)."""

    name: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def of_experts(self) -> bool:
        """Whether it holds one part for each expert, of which a token reads only the chosen ones'."""
        return "_exps." in self.name

    @property
    def is_matrix(self) -> bool:
        """Whether a file in 16 bits has it in 16 bits; llama.cpp converts the others to F32."""
        return is_quantized(self.name, self.dims) or any(name in self.name for name in _IN_16_BITS)


@dataclass(frozen=True)
class Cache:
    """The data that a layer keeps of earlier tokens.

    `k`, `v`: elements that a token adds. `products`: multiplications and additions of one query with one
    cached token, over all heads: its score, and its share of the output. `window`: tokens attended to, None
    for all; `chunked`: only those since the last multiple of the window. `borrowed`: another layer holds
    them, and this one reads them again. `expanded`: elements that a token adds where a stack caches the
    keys and values made from a latent; 0: there is none. `state`: elements that do not grow, read and written
    by every step.
    """

    k: int = 0
    v: int = 0
    products: int = 0
    window: int | None = None
    chunked: bool = False
    borrowed: bool = False
    expanded: int = 0
    state: int = 0


NOTHING = Cache()


@dataclass(frozen=True)
class Layer:
    """One kind of layer. `unused`: tensors that its files hold besides, which nothing computes with."""

    pieces: tuple[Piece, ...]
    cache: Cache = NOTHING
    unused: tuple[Piece, ...] = ()


def is_quantized(name: str, dims: Sequence[int]) -> bool:
    """Whether a quantization changes the type of this tensor of a GGUF file."""
    return math.prod(dims[:-1]) > 1 and _may_change(name)


@cache
def _may_change(name: str) -> bool:
    return name.endswith("weight") and not any(part in name for part in _KEPT)


def linear(name: str, n_out: int, n_in: int, bias: bool = False) -> Iterator[Piece]:
    """A matrix, and its bias."""
    yield Piece(f"{name}.weight", (n_out, n_in))
    if bias:
        yield Piece(f"{name}.bias", (n_out,))


def norms(width: int, *names: str, bias: bool = False) -> Iterator[Piece]:
    """A norm's scale of this width for each name, with its bias."""
    for name in names:
        yield Piece(f"{name}.weight", (width,))
        if bias:
            yield Piece(f"{name}.bias", (width,))


@dataclass(frozen=True)
class Heads:
    """Attention with `heads` queries and `kv_heads` keys and values of `head_dim` elements.

    `qk_norm`: the width of a norm on q and on k, `head` (one that all heads share), `heads` (one
    for each), `all` (over all heads at once) or None. `gated`: q
    has a gate as wide. `sinks`: a learned score for each head. `fused`: q, k and v in one matrix.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str | None = None
    gated: bool = False
    sinks: bool = False
    fused: bool = False

    def pieces(self, hidden: int) -> Iterator[Piece]:
        """Q, K and V in one matrix or three, the output matrix, norms and sinks."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.fused:
            yield from linear("attn_qkv", q + 2 * kv, hidden, self.qkv_bias)
        else:
            yield from linear("attn_q", q * (1 + self.gated), hidden, self.qkv_bias)
            yield from linear("attn_k", kv, hidden, self.qkv_bias)
            yield from linear("attn_v", kv, hidden, self.qkv_bias)
        yield from linear("attn_output", hidden, q, self.o_bias)
        for name, heads in (("attn_q_norm", self.heads), ("attn_k_norm", self.kv_heads)):
            dims = {
                "head": (self.head_dim,),
                "heads": (heads, self.head_dim),
                "all": (heads * self.head_dim,),
            }
            if self.qk_norm:
                yield Piece(f"{name}.weight", dims[self.qk_norm])
        if self.sinks:
            yield Piece("attn_sinks.weight", (self.heads,))

    def cache(self, window: int | None = None, chunked: bool = False) -> Cache:
        kv = self.kv_heads * self.head_dim
        return Cache(kv, kv, 2 * self.heads * self.head_dim, window, chunked)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek V2, arXiv:2405.04434): a token's keys and values are made from
    `kv_rank` elements, cached with `rope` elements of a key that all heads share.

    `nope`, `value`: of a head's key and value. `q_rank`: elements that queries go through, if any.
    """

    heads: int
    kv_rank: int
    rope: int
    nope: int
    value: int
    q_rank: int | None = None
    bias: bool = False

    def pieces(self, hidden: int) -> Iterator[Piece]:
        """Tensors as in llama.cpp, which splits the matrix for keys and values in two, by head."""
        q = self.heads * (self.nope + self.rope)
        if self.q_rank is None:
            yield from linear("attn_q", q, hidden)
        else:
            yield from linear("attn_q_a", self.q_rank, hidden, self.bias)
            yield from norms(self.q_rank, "attn_q_a_norm")
            yield from linear("attn_q_b", q, self.q_rank)
        yield from linear("attn_kv_a_mqa", self.kv_rank + self.rope, hidden, self.bias)
        yield from norms(self.kv_rank, "attn_kv_a_norm")
        yield Piece("attn_k_b.weight", (self.heads, self.kv_rank, self.nope))
        yield Piece("attn_v_b.weight", (self.heads, self.value, self.kv_rank))
        yield from linear("attn_output", hidden, self.heads * self.value, self.bias)

    def cache(self, window: int | None = None, chunked: bool = False) -> Cache:
        """Scores and outputs are computed on the latent elements, as a cache of them allows."""
        return Cache(
            self.kv_rank + self.rope,
            products=self.heads * (2 * self.kv_rank + self.rope),
            window=window,
            chunked=chunked,
            expanded=self.heads * (self.nope + self.rope + self.value),
        )


@dataclass(frozen=True)
class Delta:
    """A gated delta rule (linear attention, arXiv:2412.06464): a state of key x value elements a head.
    `together`: the two gates of a head are rows of one matrix (Qwen3-Next), not of two (Qwen3.5)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    together: bool = True

    @property
    def _widths(self) -> tuple[int, int]:
        return self.key_heads * self.key_dim, self.value_heads * self.value_dim

    def pieces(self, hidden: int) -> Iterator[Piece]:
        keys, values = self._widths
        yield from linear("attn_qkv", 2 * keys + values, hidden)
        yield from linear("attn_gate", values, hidden)
        if self.together:
            yield from linear("ssm_ba", 2 * self.value_heads, hidden)
        else:
            yield from linear("ssm_alpha", self.value_heads, hidden)
            yield from linear("ssm_beta", self.value_heads, hidden)
        yield Piece("ssm_conv1d.weight", (2 * keys + values, self.kernel))
        yield Piece("ssm_dt.bias", (self.value_heads,))
        yield Piece("ssm_a", (self.value_heads,))
        yield from norms(self.value_dim, "ssm_norm")
        yield from linear("ssm_out", hidden, values)

    def cache(self) -> Cache:
        keys, values = self._widths
        state = self.value_heads * self.key_dim * self.value_dim
        return Cache(state=state + (2 * keys + values) * (self.kernel - 1))


@dataclass(frozen=True)
class Mamba2:
    """A selective state space layer (arXiv:2405.21060). `inner`: its width; `groups`: of B and C."""

    inner: int
    heads: int
    state: int
    groups: int
    kernel: int
    conv_bias: bool = True
    bias: bool = False
    gated_norm: bool = True

    @property
    def _convolved(self) -> int:
        return self.inner + 2 * self.groups * self.state

    def pieces(self, hidden: int) -> Iterator[Piece]:
        yield from linear("ssm_in", self.inner + self._convolved + self.heads, hidden, self.bias)
        yield Piece("ssm_conv1d.weight", (self._convolved, self.kernel))
        if self.conv_bias:
            yield Piece("ssm_conv1d.bias", (self._convolved,))
        yield Piece("ssm_dt.bias", (self.heads,))
        yield Piece("ssm_a", (self.heads, 1))
        yield Piece("ssm_d", (self.heads, 1))
        if self.gated_norm:
            yield Piece("ssm_norm.weight", (self.groups, self.inner // self.groups))
        yield from linear("ssm_out", hidden, self.inner, self.bias)

    def cache(self) -> Cache:
        return Cache(state=self.inner * self.state + self._convolved * (self.kernel - 1))


def short_convolution(hidden: int, kernel: int, bias: bool = False) -> Layer:
    """A gated convolution over a few tokens (LFM2)."""
    pieces = (
        Piece("shortconv.conv.weight", (hidden, kernel)),
        *linear("shortconv.in_proj", 3 * hidden, hidden, bias),
        *linear("shortconv.out_proj", hidden, hidden, bias),
    )
    return Layer(pieces, Cache(state=hidden * (kernel - 1)))


def gated(hidden: int, ffn: int, bias: bool = False, suffix: str = "") -> Iterator[Piece]:
    """A gated feed-forward."""
    yield from linear(f"ffn_gate{suffix}", ffn, hidden, bias)
    yield from plain(hidden, ffn, bias, suffix)


def fused(hidden: int, ffn: int) -> Iterator[Piece]:
    """A gated feed-forward with the gate in the same matrix."""
    yield from linear("ffn_up", 2 * ffn, hidden)
    yield from linear("ffn_down", hidden, ffn)


def plain(hidden: int, ffn: int, bias: bool = False, suffix: str = "") -> Iterator[Piece]:
    """A feed-forward of two matrices."""
    yield from linear(f"ffn_up{suffix}", ffn, hidden, bias)
    yield from linear(f"ffn_down{suffix}", hidden, ffn, bias)


@dataclass(frozen=True)
class Experts:
    """The feed-forward of a mixture: a router chooses `used` of `count` experts of width `ffn` for a token.

    `shared`: width of an expert that every token uses, 0: none; `shared_gate`: it has a gate of one row.
    `bias`: of the experts and the router (gpt-oss). `correction`: a bias of each expert's choice.
    """

    count: int
    used: int
    ffn: int
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    correction: bool = False
    is_gated: bool = True

    def pieces(self, hidden: int) -> Iterator[Piece]:
        yield from linear("ffn_gate_inp", self.count, hidden, self.bias)
        if self.correction:
            yield Piece("exp_probs_b.bias", (self.count,))
        stacked = ("ffn_gate_exps", "ffn_up_exps") if self.is_gated else ("ffn_up_exps",)
        for name, n_out, n_in in (
            *((name, self.ffn, hidden) for name in stacked),
            ("ffn_down_exps", hidden, self.ffn),
        ):
            yield Piece(f"{name}.weight", (self.count, n_out, n_in))
            if self.bias:
                yield Piece(f"{name}.bias", (self.count, n_out))
        if self.shared:
            yield from (gated if self.is_gated else plain)(hidden, self.shared, suffix="_shexp")
        if self.shared_gate:
            yield Piece("ffn_gate_inp_shexp.weight", (hidden,))


def distinct_share(count: int, used: int, tokens: float) -> float:
    """Share of the experts that `tokens` tokens are expected to use, each choosing `used` of `count`
    uniformly, whatever the others choose: 1 - (1 - used / count) ** tokens. Real text chooses less evenly."""
    return 1 - float((1 - used / count) ** tokens)


def layer(*parts: Iterable[Piece], cache: Cache = NOTHING) -> Layer:
    return Layer(tuple(piece for part in parts for piece in part), cache)
