"""The speed of a cell, predicted from measured ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.recommend.least_squares import NORMAL, Floats, fitted
from harness.theory.floors import Reach

# Traits of a variant on a device, known before it runs, and measurements of other variants. Pure.


GGML, TORCH, FUSED = "ggml", "torch", "fused"
"""Kinds of engine: llama.cpp; PyTorch, a kernel at a time; PyTorch with fused layers."""
DENSE, EXPERTS, STATES = "dense", "experts", "states"
"""Kinds of layers, by their costs besides bytes: dense; mixtures of experts; with states (linear attention,
Mamba), with or without experts."""


@dataclass(frozen=True)
class Traits:
    """A model in a stack on a device.

    `group`: the stack and its kernel, which share an overhead. `type`: of the weights. `device`: its name;
    `family`: cpu, cuda, metal, hip, vulkan. `kind`: of its layers.
    `read_bytes`: of weights and states, in one step; `reaches`: the KV cache, by what layers attend to.
    `head_elements`: of one head. `bytes_per_s`: the device's read bandwidth, or that of a model in two
    memories. `pass_flops`: of one token in a prompt; `flops`: the device's rate for them, null: unknown.
    `packed`: weights of fewer than 16 bits, whose products may have kernels and a rate of their own.
    `expert_bytes`: of all experts, of which a token uses `expert_share`.
    `static_tokens`: of a static cache, all of which each step reads.
    `of_types`: bytes of weights in one step by ggml's type of the tensors, in llama.cpp. `multiply_s`:
    seconds of a step by the rates measured of each type; null: not measured. `waits`: a matrix product waits
    for the device, so that attention adds to the host's time.
    `setup`: whose machine of this kind; empty: the user's. `software`: a version with costs of its own;
    empty: today's. `generation`: of a maker's chips; empty: unknown.
    """

    group: str
    engine: str
    type: str
    model: str
    device: str
    family: str
    layers: int
    read_bytes: float
    reaches: tuple[Reach, ...]
    bytes_per_s: float
    head_elements: int = 128
    pass_flops: float = 0.0
    packed: bool = True
    flops: float | None = None
    static_tokens: int | None = None
    kind: str = DENSE
    expert_bytes: float = 0.0
    expert_share: float = 1.0
    of_types: tuple[tuple[str, float], ...] = ()
    multiply_s: float | None = None
    waits: bool = False
    setup: str = ""
    software: str = ""
    generation: str = ""


PUBLISHED, PUBLIC = "published", "public"  # sources of an example that was not measured here


@dataclass(frozen=True)
class Example:
    """A measured variant: latency in ms at positions, on the line fitted over the positions `of_line`.

    `first_tokens`: ms of a prompt by its length, where a prompt long enough was timed. `source`: whose.
    """

    traits: Traits
    at_ms: Mapping[int, float]
    of_line: tuple[int, int]
    first_tokens: Mapping[int, float]
    source: str


@dataclass(frozen=True)
class Range:
    """A predicted figure with its 90% interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval, as a share of the value."""
        return (self.high - self.low) / 2 / self.value

    def inverted(self, of: float) -> Range:
        """`of` divided by this."""
        return Range(of / self.value, of / self.high, of / self.low)


# What steps and prompts attend to, of many variants at once: bytes, heads and products. Pure.


class Seen(NamedTuple):
    """The attention of steps, in arrays of (rows, positions). `kv_bytes`: read. `heads`: query heads of all
    layers, times the tokens that each attends to. `tokens`: the most that any layer attends to."""

    kv_bytes: Floats
    heads: Floats
    tokens: Floats


class Attention:
    """The caches of some variants. Arrays have a last axis for the layers that attend alike."""

    def __init__(self, rows: Sequence[Traits]) -> None:
        most = max((len(each.reaches) for each in rows), default=0) or 1
        reaches = [[*each.reaches, *[Reach(0.0, 0.0, 0)] * (most - len(each.reaches))] for each in rows]
        self._kv_bytes = np.array([[r.kv_bytes for r in row] for row in reaches], float)[:, None]
        self._flops = np.array([[r.flops for r in row] for row in reaches], float)[:, None]
        windows = [[math.inf if r.window is None else r.window for r in row] for row in reaches]
        self._window = np.array(windows, float)[:, None]
        self._chunked = np.array([[r.chunked for r in row] for row in reaches], bool)[:, None]
        # A query and a cached token: a multiplication and an addition for each element of K, and of V.
        self._heads = self._flops / np.array([4.0 * t.head_elements for t in rows])[:, None, None]

    def at(self, n: Floats) -> Seen:
        """The attention of steps at positions `n`."""
        tokens = self._attended(n[..., None])
        return Seen(
            (tokens * self._kv_bytes).sum(axis=-1), (tokens * self._heads).sum(axis=-1), tokens.max(axis=-1)
        )

    def pair_flops(self, tokens: Floats) -> Floats:
        """FLOP of attention in prompts of so many tokens, over all pairs of a query and a token."""
        length = tokens[..., None]
        within = np.minimum(length, self._window)
        pairs = within * (within + 1) / 2
        with np.errstate(invalid="ignore"):  # an infinite window is never exceeded
            past = np.where(length > self._window, (length - within) * self._window, 0.0)
        whole = np.floor_divide(length, np.maximum(within, 1))
        rest = length - whole * within
        chunks = whole * pairs + rest * (rest + 1) / 2
        return np.asarray((np.where(self._chunked, chunks, pairs + past) * self._flops).sum(axis=-1))

    def _attended(self, n: Floats) -> Floats:
        within = np.minimum(n, self._window)
        chunk = np.where(np.isfinite(self._window) & (self._window > 0), self._window, 1.0)
        return np.where(self._chunked, (n - 1) % chunk + 1, within)


# What is believed of each parameter of a step's latency before anything is measured. Pure.


Name = tuple[str, ...]

STUDY_LOOP, OLDER, OLDER_YEAR = "study", "2024", 2024
"""Software with costs of its own: the published study's loops of early 2024, and releases of that year and
before."""

# The spread of a latency's logarithm around the model: on a setup with measurements of its own, and on one of
# which others' are public (a model's and a type's deviation on one machine are not known there).
_SPREAD = {
    ("gpu", GGML): (0.009, 0.05),
    ("cpu", GGML): (0.04, 0.08),
    **{("gpu", engine): (0.04, 0.15) for engine in (TORCH, FUSED)},
    **{("cpu", engine): (0.06, 0.15) for engine in (TORCH, FUSED)},
}
# From how many spreads on a latency counts less. Some rows of PyTorch's stacks are far off: kernels switch.
_FAR = {GGML: NORMAL, TORCH: 1.0, FUSED: 1.0}


@dataclass(frozen=True)
class Prior:
    """The prior of a parameter's logarithm."""

    mean: float
    sd: float


# Means: ms for host, step and layer; shares for eff and mfu; ratios for kv (bytes moved per byte of cache);
# ns per token and layer's head for head, ns per token for token; for pairs, attention's time in a prompt over
# that of other products of as many operations. Spreads are of logarithms: 0.7 is a factor of 2.
_ROOTS: dict[tuple[str, str, str], tuple[float, float]] = {
    ("host", "gpu", TORCH): (0.25, 0.7),
    ("host", "gpu", FUSED): (0.08, 0.7),
    ("host", "cpu", TORCH): (0.15, 0.8),
    ("host", "cpu", FUSED): (0.15, 0.8),
    ("step", "gpu", GGML): (0.3, 0.7),
    ("step", "cpu", GGML): (0.3, 1.0),
    ("layer", "gpu", GGML): (0.03, 0.7),
    ("layer", "gpu", TORCH): (0.08, 0.5),
    ("layer", "gpu", FUSED): (0.06, 0.5),
    ("layer", "cpu", GGML): (0.03, 0.7),
    ("layer", "cpu", TORCH): (0.05, 0.7),
    ("eff", "gpu", GGML): (0.8, 0.2),
    ("eff", "gpu", TORCH): (0.85, 0.15),
    ("eff", "gpu", FUSED): (0.85, 0.15),
    ("eff", "cpu", GGML): (0.6, 0.3),
    ("eff", "cpu", TORCH): (0.5, 0.6),
    ("kv", "gpu", GGML): (1.1, 0.3),
    ("kv", "gpu", TORCH): (3.0, 0.5),
    ("kv", "gpu", FUSED): (1.2, 0.5),
    ("kv", "cpu", GGML): (2.0, 0.7),
    ("kv", "cpu", TORCH): (4.0, 0.7),
    ("head", "gpu", GGML): (0.03, 1.0),
    ("head", "gpu", TORCH): (0.005, 1.0),
    ("head", "gpu", FUSED): (0.1, 1.0),
    ("head", "cpu", GGML): (1.0, 1.5),
    ("head", "cpu", TORCH): (1.0, 1.5),
    ("token", "gpu", GGML): (5.0, 1.0),
    ("mfu", "gpu", GGML): (0.3, 0.6),
    ("mfu", "gpu", TORCH): (0.4, 0.6),
    ("mfu", "gpu", FUSED): (0.4, 0.6),
    ("mfu", "cpu", GGML): (0.6, 0.6),
    ("mfu", "cpu", TORCH): (0.6, 0.6),
    **{("pairs", kind, engine): (1.0, 0.7) for kind in ("gpu", "cpu") for engine in (GGML, TORCH, FUSED)},
}
# The share of the rates measured of each type (the probe's matrices are large, and nothing else is computed),
# and how far a family of types and a type deviate.
_OF_RATES = Prior(math.log(0.9), 0.12)
_SPREADS_OF_RATES = 0.03, 0.04
# Layers that are not dense: they start more kernels (a router, its choice, indexed products), read smaller
# pieces, and multiply each expert by few of a prompt's tokens.
_KIND = {
    "layer": Prior(math.log(1.5), 0.5),
    "eff": Prior(math.log(0.9), 0.2),
    "mfu": Prior(math.log(0.6), 0.4),
}
# How far a stack's kernel, a type, software, a setup, a device and a model deviate from the root: spreads of
# logarithms.
_GROUP = {
    **{("host", engine, like): 0.5 for engine in (TORCH, FUSED) for like in ("gpu", "cpu")},
    **{("mfu", engine, like): 0.5 for engine in (TORCH, FUSED) for like in ("gpu", "cpu")},
    **{("eff", engine, like): 0.15 for engine in (TORCH, FUSED) for like in ("gpu", "cpu")},
    # Of llama.cpp: with and without flash attention, and by the types of the cache, which a CPU unpacks.
    ("mfu", GGML, "gpu"): 0.1,
    ("mfu", GGML, "cpu"): 0.5,
    ("eff", GGML, "gpu"): 0.02,
    ("eff", GGML, "cpu"): 0.1,
    ("head", GGML, "gpu"): 0.3,
    ("head", GGML, "cpu"): 1.0,
}
_PACKED = 0.5  # products of packed weights against those of 16 bits
_LIKE = dict.fromkeys(("cuda", "metal", "hip", "vulkan"), "gpu")  # kinds with the priors of another
# Types of a family share their way to be unpacked, and so a part of their deviation.
_FAMILY, _TYPE = {"gpu": 0.1, "cpu": 0.25}, {"gpu": 0.015, "cpu": 0.15}
_SOFTWARE = {
    GGML: {
        ("step", ""): 1.5,
        ("layer", ""): 0.7,
        ("eff", ""): 0.1,
        ("kv", ""): 0.3,
        ("head", ""): 1.5,
        ("token", ""): 1.5,
        ("mfu", ""): 0.5,
    },
    **{engine: {("host", ""): 0.5} for engine in (TORCH, FUSED)},
}
_INTERFACE = {
    ("mfu", "vulkan"): 0.4,
    ("kv", "vulkan"): 0.2,
    ("step", "vulkan"): 0.6,
    ("layer", "vulkan"): 0.6,
    ("eff", "vulkan"): 0.15,
}  # against hip
_DEVICE = {
    ("host", ""): 0.35,
    ("step", ""): 0.3,
    ("layer", ""): 0.3,
    ("layer", "cuda"): 0.2,
    ("eff", ""): 0.06,
    ("eff", "cpu"): 0.08,
    ("kv", ""): 0.2,
    ("mfu", ""): 0.2,
    ("mfu", "hip"): 0.25,
    ("mfu", "vulkan"): 0.25,
}
_GENERATION = {
    ("eff", ""): 0.15,
    ("eff", "metal"): 0.07,
    ("eff", "hip"): 0.1,
    ("eff", "vulkan"): 0.1,
    ("step", ""): 0.3,
    ("layer", ""): 0.4,
    ("mfu", ""): 0.15,
}
# Pascal and older multiply packed weights slowly and have no CUDA graphs; HBM is faster than kernels for one
# token ask for; Vulkan reaches about half of what an Arc's data sheet has; the study's loop took 4.9 ms a
# step besides its kernels, which had no flash attention.
_LEVELS = {
    ("eff", "before 7.0"): Prior(-0.35, 0.3),
    ("layer", "before 7.0"): Prior(0.5, 0.5),
    ("eff", "HBM"): Prior(-0.25, 0.15),
    ("eff", "Arc"): Prior(-0.5, 0.4),
    ("mfu", "Arc"): Prior(-1.0, 0.8),
    ("step", STUDY_LOOP): Prior(2.8, 0.7),
    ("head", STUDY_LOOP): Prior(1.2, 1.0),
    ("token", STUDY_LOOP): Prior(2.3, 1.0),
}
# Smaller GPUs take longer for what a layer does besides its products.
_BY_BANDWIDTH, _USUAL_BYTES_PER_S = Prior(-0.3, 0.3), 5e11
# Before compute capability 7.0, unpacking weights takes longer than reading them, so that the share of the
# bandwidth grows with operations per byte: of 8 bits 76 to 136 on 6.1. Others' rates are of wider numbers;
# four times a Tesla P100's of 32 bits is 51.
_BY_OPERATIONS, _USUAL_OPERATIONS, _LEAST_OPERATIONS = Prior(1.0, 0.3), 100.0, 50.0
_SETUP = {
    ("eff", ""): 0.02,
    ("eff", "hip"): 0.09,
    ("eff", "vulkan"): 0.09,
    ("eff", "cpu"): 0.08,
    ("mfu", "hip"): 0.3,
    ("mfu", "vulkan"): 0.3,
}
# A model on all machines, where architectures differ, and a model and kernel on one.
_MODEL = {("eff", ""): 0.03}
_MODEL_HERE = {("step", "cuda"): 0.01, ("kv", "cuda"): 0.05, ("eff", "cpu"): 0.02}
FIRST_TOKEN_SPREAD = 0.08


_MAKERS = {"cuda": "NVIDIA", "metal": "Apple", "hip": "AMD", "vulkan": "AMD"}


def maker_of(traits: Traits) -> str:
    """The devices that share what is measured: of one maker, or CPUs."""
    return "Intel" if traits.generation == "Arc" else _MAKERS.get(traits.family, "CPU")


def fit_of(traits: Traits) -> tuple[str, str]:
    """The variants that share what is measured."""
    return maker_of(traits), traits.engine


def spread_of(traits: Traits, is_calibrated: bool) -> float:
    """The spread of a latency's logarithm around the model."""
    own, public = _SPREAD[_LIKE.get(traits.family, traits.family), traits.engine]
    return own if is_calibrated else public


def far_of(traits: Traits) -> float:
    """The number of these spreads from which a latency counts less."""
    return _FAR[traits.engine]


def family_of(quant: str) -> str:
    """Types of llama.cpp whose kernels unpack alike: blocks of 32 with one scale; K-quants, of which those of
    2 and 3 bits have scales of so few bits that they bound more than bytes do; codebooks; none."""
    if quant.startswith(("q2_k", "q3_k")):
        return "few bits"
    if quant.startswith(("iq", "mxfp4")):
        return "codebook"
    return "k" if "_k" in quant else "legacy" if quant.startswith("q") else "whole"


def terms_of(parameter: str, traits: Traits) -> list[tuple[Name, Prior, float]]:
    """The terms whose weighted sum is the logarithm of a parameter; empty: the parameter is 0."""
    kind = traits.family
    like = _LIKE.get(kind, kind)
    root = _ROOTS.get((parameter, kind, traits.engine), _ROOTS.get((parameter, like, traits.engine)))
    if root is None:
        return []
    shared, spreads = Prior(math.log(root[0]), root[1]), (_FAMILY[like], _TYPE[like])
    name: Name = (parameter,)
    if parameter == "eff" and traits.multiply_s is not None:
        name, shared, spreads = (*name, "of rates"), _OF_RATES, _SPREADS_OF_RATES
    found: list[tuple[Name, Prior]] = [(name, shared)]
    if parameter in _KIND and traits.kind != DENSE:
        found.append(((parameter, "kind", traits.kind), _KIND[parameter]))
    if (of_group := (parameter, traits.engine, like)) in _GROUP:
        found.append(((parameter, "of", traits.group), Prior(0.0, _GROUP[of_group])))
    if parameter == "mfu":
        found.append(((parameter, str(traits.packed)), Prior(0.0, _PACKED)))
    if parameter == "eff":
        of = traits.engine if traits.engine == GGML else traits.group
        for shared_by, spread in zip((family_of(traits.type), traits.type), spreads, strict=True):
            found.append(((*name, of, "type", shared_by), Prior(0.0, spread)))
    if (parameter, traits.family) in _INTERFACE:
        found.append(((parameter, "by", traits.family), Prior(0.0, _INTERFACE[parameter, traits.family])))
    levels = [
        (_DEVICE, ("on", traits.device)),
        (_SETUP, ("on", traits.device, traits.setup)),
    ]
    if traits.engine == GGML:
        if traits.setup in ("", PUBLISHED):  # others' rows are too few to tell
            levels.append((_MODEL_HERE, ("model", traits.device, traits.group, traits.model)))
        if traits.generation:
            levels.append((_GENERATION, ("generation", traits.generation)))
        if traits.software != STUDY_LOOP:  # whose models are of one architecture
            levels.append((_MODEL, ("model", traits.model)))
    if traits.software:
        levels.append((_SOFTWARE[traits.engine], ("software", traits.software)))
    for table, of_level in levels:
        if (sd := table.get((parameter, kind), table.get((parameter, "")))) is not None:
            prior = _LEVELS.get((parameter, of_level[-1]), Prior(0.0, sd))
            found.append(((parameter, *of_level), prior))
    weighted = [(of, prior, 1.0) for of, prior in found]
    if (parameter, kind) == ("layer", "cuda"):
        by = math.log(traits.bytes_per_s / _USUAL_BYTES_PER_S)
        weighted.append(((parameter, "by bandwidth"), _BY_BANDWIDTH, by))
    if parameter == "eff" and traits.generation == "before 7.0" and traits.packed and traits.flops:
        per_byte = max(traits.flops / traits.bytes_per_s, _LEAST_OPERATIONS)
        by = math.log(per_byte / _USUAL_OPERATIONS)
        weighted.append(((parameter, "by operations"), _BY_OPERATIONS, by))
    return weighted


PARAMETERS = ("host", "step", "layer", "eff", "kv", "head", "token", "mfu", "pairs")


# Fit the cost of a decode step to measurements, and predict other variants with intervals. Pure.
#
# A step at position n takes
#
# t(n) = (host^p + (overhead + bytes / (bandwidth e) + n s)^p)^(1/p)
#
# host: ms per layer in which PyTorch's Python code starts kernels, while the device works through them; the
# slower of the two decides (p = 5 for a soft maximum; llama.cpp starts none, so host is 0). overhead: of a
# step and of each layer on the device. e: the share of the bandwidth reached, by stack and type. s: of a
# token in the cache: its bytes, each layer's heads, and a constant. All parameters are positive, so their
# logarithms are fitted, each with a prior; those of a stack, type, device or model that were not measured
# keep the prior's mean and spread (partial pooling). Intervals: Laplace's approximation around the fit,
# plus the residuals' spread. Derivation and errors: docs/guide/recommend.md.


Parameters = dict[str, Floats]
Times = Callable[[Parameters], Floats]

SOFT = 5.0  # p; of 3 to 16 the one with the smallest error when a size is left out
PLACES = 24  # positions at which a fitted line is compared
NORMAL_90 = 1.645
_LEAST_MS = 1e-6
_STEP = 1e-4  # of a derivative


class _Terms:
    """The terms in use with their priors, in the order of the fitted values."""

    def __init__(self) -> None:
        self._places: dict[Name, int] = {}
        self.mean: list[float] = []
        self.sd: list[float] = []

    def place(self, name: Name, prior: Prior) -> int:
        if name not in self._places:
            self._places[name] = len(self.mean)
            self.mean.append(prior.mean)
            self.sd.append(prior.sd)
        return self._places[name]


class _Sum(NamedTuple):
    """By row (of variants): the places of the terms that a parameter's logarithm sums, and their weights."""

    places: NDArray[np.int64]
    weights: Floats

    def of(self, theta: Floats) -> Floats:
        return np.asarray((theta[self.places] * self.weights).sum(axis=1))


def _sum(rows: Sequence[Sequence[tuple[int, float]]]) -> _Sum:
    """Of rows of places with their weights; those with fewer are filled with weights of 0."""
    most = max(map(len, rows), default=0)
    filled = np.array([[*row, *[(0, 0.0)] * (most - len(row))] for row in rows]).reshape(len(rows), most, 2)
    return _Sum(filled[:, :, 0].astype(int), filled[:, :, 1])


class _Rows:
    """Variants whose times are computed at once: the terms that each parameter sums, and fixed factors."""

    def __init__(self, rows: Sequence[Traits], terms: _Terms) -> None:
        of_rows = {
            name: [
                [(terms.place(of, prior), weight) for of, prior, weight in terms_of(name, traits)]
                for traits in rows
            ]
            for name in PARAMETERS
        }
        self.sums = {name: _sum(places) for name, places in of_rows.items()}
        self._has = {name: np.array([[bool(p)] for p in places]) for name, places in of_rows.items()}
        self._attention = Attention(rows)
        self._layers = _column(t.layers for t in rows)
        self._least_read_ms = _column(t.read_bytes / t.bytes_per_s * 1e3 for t in rows)
        self._read_ms = _column((t.multiply_s or t.read_bytes / t.bytes_per_s) * 1e3 for t in rows)
        self._per_byte_ms = _column(1e3 / t.bytes_per_s for t in rows)
        self._static = _column(t.static_tokens or 0 for t in rows)
        self._waits = _column(t.waits for t in rows) > 0
        self._per_flop_ms = _column(1e3 / t.flops if t.flops else math.nan for t in rows)
        self._pass_flops = _column(t.pass_flops for t in rows)
        self._expert_bytes = _column(t.expert_bytes for t in rows)
        self._idle = _column(1 - t.expert_share for t in rows)

    def parameters(self, theta: Floats) -> Parameters:
        """Each parameter as a column; 0 for rows without it."""
        return {
            name: np.where(self._has[name], np.exp(each.of(theta))[:, None], 0.0)
            for name, each in self.sums.items()
        }

    def steps(self, n: Floats) -> Times:
        """Latencies at positions `n`, of shape (rows, positions)."""
        seen = self._attention.at(np.where(self._static > 0, self._static, n))

        def ms(p: Parameters) -> Floats:
            device = p["step"] + p["layer"] * self._layers + self._read_ms / p["eff"]
            cache = seen.kv_bytes * self._per_byte_ms * p["kv"]
            cache = cache + (p["head"] * seen.heads + p["token"] * seen.tokens) * 1e-6
            overlapped, after = np.where(self._waits, 0.0, cache), np.where(self._waits, cache, 0.0)
            return _slower(p["host"] * self._layers, device + overlapped) + after

        return ms

    def prompts(self, tokens: Floats) -> Times:
        """The times of prompts: of a step that reads the experts of all tokens, if each token chooses
        uniformly, or of the products, whichever is longer. NaN without a rate."""
        step, linear = self.steps(np.ones_like(tokens)), tokens * self._pass_flops
        pairs = self._attention.pair_flops(tokens)
        others = self._expert_bytes * (self._idle - self._idle**tokens) * self._per_byte_ms

        def ms(p: Parameters) -> Floats:
            products = (linear + pairs * p["pairs"]) * self._per_flop_ms / p["mfu"]
            return _slower(step(p) + others / p["eff"], products)

        return ms

    def least_ms(self, n: Floats) -> Floats:
        """The time to read the weights, and the cache up to `n`, once."""
        return self._least_read_ms + self._attention.at(n).kv_bytes * self._per_byte_ms


def _slopes(
    of: Callable[[Parameters], Floats], p: Parameters, sums: Mapping[str, _Sum], terms: int
) -> Floats:
    """Derivatives of a value of each row by each of so many terms, all of which are sums in a parameter's
    logarithm."""
    centre = of(p)
    first = terms * np.arange(len(centre))[:, None]
    places, slopes = [], []
    for name, each in sums.items():
        if each.places.size:
            moved = of({**p, name: p[name] * math.exp(_STEP)})
            places.append(first + each.places)
            slopes.append(((moved - centre) / _STEP)[:, None] * each.weights)
    flat = np.concatenate(places, axis=None), np.concatenate(slopes, axis=None)
    return np.asarray(np.bincount(*flat, terms * len(centre)).reshape(len(centre), terms), float)


def _column(values: Iterable[float]) -> Floats:
    return np.array(list(values), float)[:, None]


def _slower(one: Floats, other: Floats) -> Floats:
    if not one.any():  # llama.cpp starts no kernels
        return other
    return np.asarray((one**SOFT + other**SOFT) ** (1 / SOFT))


def _observed(examples: Sequence[Example], n: Floats) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Each measured latency: its example, the weights of latencies at `n` that give the fitted line's value
    there, and the latency in ms."""
    which, weights, measured = [], [], []
    through = np.linalg.pinv(np.stack([np.ones_like(n), n], axis=-1))
    for i, example in enumerate(examples):
        for position, ms in example.at_ms.items():
            which.append(i)
            weights.append(np.array([1.0, position]) @ through[i])
            measured.append(ms)
    return np.array(which, int), np.array(weights), np.array(measured)


@dataclass(frozen=True)
class Steps:
    """Predicted times, and what their errors share. `unknowns`: by time (row) and independent unknown
    (column), the standard deviation that it gives the time's logarithm."""

    ranges: list[Range]
    unknowns: Floats


class Predictor:
    """Fitted to examples, by interface and engine, each when it is asked for. Variants that none of them
    resembles are predicted from the priors."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples: dict[tuple[str, str], list[Example]] = {}
        for each in examples:
            self._examples.setdefault(fit_of(each.traits), []).append(each)
        self._fits: dict[tuple[str, str], _Fit] = {}

    def latency_ms(self, rows: Sequence[Traits], n: int) -> list[Range]:
        """Predict each variant's decode step at position n."""
        return self.steps([[each] for each in rows], n).ranges

    def tokens_per_s(self, rows: Sequence[Traits], n: int) -> list[Range]:
        return [each.inverted(1e3) for each in self.latency_ms(rows, n)]

    def steps(self, parts: Sequence[Sequence[Traits]], n: int) -> Steps:
        """Predict decode steps at position n, whose parts take turns."""
        return self._predicted(parts, n, is_prompt=False)

    def first_token_ms(self, rows: Sequence[Traits], tokens: int) -> list[Range | None]:
        """Predict TTFT for a length of prompt; null where the device's rate is unknown."""
        known = [[traits] for traits in rows if traits.flops]
        found = iter(self._predicted(known, tokens, is_prompt=True).ranges)
        return [next(found) if traits.flops else None for traits in rows]

    def _predicted(self, parts: Sequence[Sequence[Traits]], n: int, is_prompt: bool) -> Steps:
        """Predict times, none of which ends before memory can be read."""
        rows = [(i, each) for i, of_step in enumerate(parts) for each in of_step]
        by_fit: dict[tuple[str, str], list[tuple[int, Traits]]] = {}
        for i, each in rows:
            by_fit.setdefault(fit_of(each), []).append((i, each))
        value, least = np.zeros(len(parts)), np.zeros(len(parts))
        blocks = []
        for key, found in by_fit.items():
            if key not in self._fits:
                self._fits[key] = _Fit(self._examples.get(key, ()))
            ms, least_ms, unknowns = self._fits[key].times([each for _, each in found], n, is_prompt)
            places = [i for i, _ in found]
            np.add.at(value, places, ms)
            np.add.at(least, places, least_ms)
            block = np.zeros((len(parts), unknowns.shape[1]))
            np.add.at(block, places, ms[:, None] * unknowns)
            blocks.append(block)
        unknowns = np.hstack(blocks) / value[:, None] if blocks else np.zeros((0, 0))
        factor = np.exp(NORMAL_90 * np.sqrt((unknowns**2).sum(axis=1)))
        ends = zip(value, np.maximum(value / factor, least), value * factor, strict=True)
        return Steps([Range(*map(float, each)) for each in ends], unknowns)


class _Fit:
    """The fit to examples of one interface and engine."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._terms = _Terms()
        self._theta: Floats = np.empty(0)
        self._root: Floats = np.empty((0, 0))  # Cholesky's, of the covariance
        self._setups = {(each.traits.device, each.traits.setup) for each in examples}
        if examples:
            self._fit(examples)

    def _is_calibrated(self, traits: Traits) -> bool:
        return (traits.device, traits.setup) in self._setups

    def times(self, rows: Sequence[Traits], n: int, is_prompt: bool) -> tuple[Floats, Floats, Floats]:
        """Times in ms, the least possible ones, and the deviations of their logarithms by each unknown."""
        of_rows, at = _Rows(rows, self._terms), np.full((len(rows), 1), float(n))
        known = len(self._theta)  # terms that came after the fit are at their priors
        theta = np.append(self._theta, self._terms.mean[known:])
        p, ms = of_rows.parameters(theta), of_rows.prompts(at) if is_prompt else of_rows.steps(at)

        def log_ms(moved: Parameters) -> Floats:
            return np.asarray(np.log(ms(moved)[:, 0]))

        spreads = [FIRST_TOKEN_SPREAD if is_prompt else spread_of(t, self._is_calibrated(t)) for t in rows]
        slopes = _slopes(log_ms, p, of_rows.sums, len(theta))
        shared = slopes[:, :known] @ self._root, slopes[:, known:] * self._terms.sd[known:]
        least = of_rows.least_ms(np.ones_like(at) if is_prompt else at)[:, 0]
        return np.maximum(np.exp(log_ms(p)), least), least, np.hstack([*shared, np.diag(spreads)])

    def _fit(self, examples: Sequence[Example]) -> None:
        rows = _Rows([example.traits for example in examples], self._terms)
        mean, sd = np.array(self._terms.mean), np.array(self._terms.sd)
        ends = np.array([example.of_line for example in examples], float)
        n = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * np.linspace(0, 1, PLACES)
        which, weights, measured = _observed(examples, n)
        prompts = [(i, p, ms) for i, e in enumerate(examples) for p, ms in e.first_tokens.items()]
        of_prompt = np.array([i for i, _, _ in prompts], int)
        lengths = np.ones((len(examples), 1))
        lengths[of_prompt, 0] = [p for _, p, _ in prompts]
        picked = [*which, *of_prompt]
        sums = {name: _Sum(each.places[picked], each.weights[picked]) for name, each in rows.sums.items()}
        logs = np.log(np.concatenate([measured, [ms for *_, ms in prompts]]))
        of_steps = [spread_of(examples[i].traits, examples[i].source != PUBLIC) for i in which]
        spreads = np.array([*of_steps, *[FIRST_TOKEN_SPREAD] * len(prompts)])
        steps, firsts = rows.steps(n), rows.prompts(lengths)

        def log_ms(p: Parameters) -> Floats:
            line = (steps(p)[which] * weights).sum(axis=1)
            first = firsts(p)[of_prompt, 0]
            return np.asarray(np.log(np.maximum(np.concatenate([line, first]), _LEAST_MS)))

        def residuals(theta: Floats) -> Floats:
            return np.asarray((log_ms(rows.parameters(theta)) - logs) / spreads)

        def jacobian(theta: Floats) -> Floats:
            by_term = _slopes(log_ms, rows.parameters(theta), sums, len(mean))
            return np.asarray(by_term / spreads[:, None])

        scales = np.array([far_of(examples[i].traits) for i in picked])
        self._theta, covariance = fitted(residuals, jacobian, scales, mean, sd)
        self._root = np.asarray(np.linalg.cholesky(covariance), float)


def read_s(parts: Iterable[tuple[float, float]]) -> float:
    """The least time to read parts one after the other; each: bytes, and the bytes/s of its memory."""
    return math.fsum(size / bytes_per_s for size, bytes_per_s in parts)
