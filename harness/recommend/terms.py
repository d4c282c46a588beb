"""The terms of each parameter of a step's time, and how far each may deviate. Pure.

A parameter's logarithm is a sum of terms: what all backends share, and the deviations of a backend, a
generation of chips, a family of weight types, a kind of layers, older software, a machine and a source. The
spreads here are what is believed before anything was measured; the fitted terms are shipped as data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.recommend.evidence import UNKNOWN
from harness.recommend.least_squares import NORMAL
from harness.recommend.traits import BEFORE_TENSOR_CORES, BOARD, DENSE, FUSED, GGML, TORCH, Traits

Name = tuple[str, ...]

PARAMETERS = ("host", "step", "layer", "eff", "kv", "token", "mfu", "tile", "pairs", "all")


@dataclass(frozen=True)
class Prior:
    """The prior of a term, a part of a logarithm: 0.7 is a factor of 2."""

    mean: float
    sd: float


# Means: ms for host, step and layer; shares for eff and mfu; ratios for kv (bytes moved per byte of cache);
# ps per operation with a cached token for token; for tile, the tokens that products take longer than their
# number says, as kernels compute them in blocks; for pairs, attention's time in a prompt over that of other
# products of as many operations; all: a factor of the whole time.
_ROOTS: dict[tuple[str, str, str], tuple[float, float]] = {
    ("host", "gpu", TORCH): (0.75, 0.7),
    ("host", "gpu", FUSED): (0.08, 0.7),
    ("host", "cpu", TORCH): (0.15, 0.8),
    ("step", "gpu", GGML): (0.3, 0.7),
    ("step", "cpu", GGML): (0.3, 1.0),
    ("layer", "gpu", GGML): (0.03, 0.7),
    ("layer", "gpu", TORCH): (0.08, 0.5),
    ("layer", "gpu", FUSED): (0.06, 0.5),
    ("layer", "cpu", GGML): (0.03, 0.7),
    ("layer", "cpu", TORCH): (0.05, 0.7),
    ("eff", "gpu", GGML): (0.75, 0.2),
    ("eff", "gpu", TORCH): (0.85, 0.15),
    ("eff", "gpu", FUSED): (0.85, 0.15),
    ("eff", "cpu", GGML): (0.6, 0.3),
    ("eff", "cpu", TORCH): (0.5, 0.6),
    ("kv", "gpu", GGML): (1.1, 0.3),
    ("kv", "gpu", TORCH): (3.0, 0.5),
    ("kv", "gpu", FUSED): (1.2, 0.5),
    ("kv", "cpu", GGML): (2.0, 0.7),
    ("kv", "cpu", TORCH): (4.0, 0.7),
    ("token", "gpu", GGML): (0.06, 1.0),
    ("token", "gpu", TORCH): (0.01, 1.0),
    ("token", "gpu", FUSED): (0.2, 1.0),
    ("token", "cpu", GGML): (2.0, 1.5),
    ("token", "cpu", TORCH): (2.0, 1.5),
    ("mfu", "gpu", GGML): (0.4, 0.6),
    ("mfu", "gpu", TORCH): (0.4, 0.6),
    ("mfu", "gpu", FUSED): (0.4, 0.6),
    ("mfu", "cpu", GGML): (0.6, 0.6),
    ("mfu", "cpu", TORCH): (0.6, 0.6),
    ("tile", "gpu", GGML): (32.0, 0.3),
    ("tile", "cpu", GGML): (8.0, 0.3),
    **{("pairs", kind, engine): (1.0, 0.7) for kind in ("gpu", "cpu") for engine in (GGML, TORCH, FUSED)},
}
# The share of the bandwidth on devices that few measured: that by which people estimate, no other maker's.
_FEW_ROWS, _PLAIN = ("Intel", BOARD), (0.6, 0.15)
_BACKEND = {"step": 0.7, "layer": 0.7, "eff": 0.15, "kv": 0.3, "token": 0.7, "mfu": 0.5, "pairs": 0.5}
_GENERATION = {"eff": 0.1, "layer": 0.25, "mfu": 0.25}
_TYPES = {"gpu": 0.1, "cpu": 0.2}
_GROUP = {"host": 0.5, "eff": 0.15, "mfu": 0.5}  # of PyTorch's stacks
# Layers that are not dense start more kernels, and read smaller pieces.
_KIND = {"layer": Prior(math.log(1.5), 0.5)}
_PACKED = 0.3  # products of packed weights against those of 16 bits
_SOFTWARE = {
    GGML: {"step": 1.0, "layer": 0.5, "eff": 0.1, "kv": 0.3, "token": 1.5, "mfu": 0.5, "pairs": 0.7},
    TORCH: {"host": 0.5},
    FUSED: {"host": 0.5},
}
# The study's loops against transformers' generate(), whose ms a layer the prior of host has: 0.72 and 0.8
# in DerekLiu35's runs of 32 layers on an A100 (public_speeds.csv), which are therefore not judged.
_STUDY_HOST = math.log(1 / 3)
# Smaller GPUs take longer for what a layer does besides its products.
_BY_BANDWIDTH, _USUAL_BYTES_PER_S = Prior(-0.3, 0.3), 5e11
# Before compute capability 7.0, unpacking weights takes longer than reading them, so that the share of the
# bandwidth grows with operations per byte: of 8 bits 76 to 136 on 6.1. Others' rates are of wider numbers;
# four times a Tesla P40's of 32 bits is 51.
_BY_OPERATIONS, _USUAL_OPERATIONS, _LEAST_OPERATIONS = Prior(1.0, 0.3), 100.0, 50.0
# Of one machine, and of one source on it, in which each fit expects their rows to deviate together.
MACHINE = SOURCE = {"all": {"gpu": 0.08, "cpu": 0.12}, "mfu": {"gpu": 0.15, "cpu": 0.25}}
# What the user's own measurements find out about the machine, beyond the factor of all its times; about a
# kernel on it, a type of weights, and a model.
_OWN = {"host": 0.35, "step": 0.5, "layer": 0.35, "eff": 0.07, "kv": 0.25, "token": 0.5}
_OWN_GROUP = {
    "gpu": {"eff": 0.02, "mfu": 0.1, "token": 0.3},
    "cpu": {"eff": 0.1, "mfu": 0.5, "token": 1.0},
}
_OWN_TYPE = {"gpu": {"eff": 0.02}, "cpu": {"eff": 0.15}}
_OWN_MODEL = {"gpu": {"eff": 0.02, "kv": 0.05}, "cpu": {"eff": 0.03}}
# The spread of a latency's logarithm around the model within one source, and of a TTFT's.
_SPREAD = {"gpu": {GGML: 0.05, TORCH: 0.15, FUSED: 0.15}, "cpu": {GGML: 0.08, TORCH: 0.15, FUSED: 0.15}}
_OWN_SPREAD = {"gpu": {GGML: 0.012, TORCH: 0.04, FUSED: 0.04}, "cpu": {GGML: 0.04, TORCH: 0.06, FUSED: 0.06}}
FIRST_TOKEN_SPREAD = 0.1
# From how many spreads on a latency counts less. Some rows of PyTorch's stacks are far off: kernels switch.
_FAR = {GGML: NORMAL, TORCH: 1.0, FUSED: 1.0}


def processor(traits: Traits) -> str:
    return "cpu" if traits.family == "cpu" else "gpu"


def fit_of(traits: Traits) -> str:
    """The variants that are fitted together."""
    return f"{processor(traits)} {traits.engine}"


def family_name(traits: Traits) -> str:
    """The family by which errors are counted: the maker of the GPU, or the kind of CPU. NVIDIA's GPUs that
    unpack weights more slowly than they read them are apart, and so are PyTorch and unmeasured stacks."""
    is_old = processor(traits) == "gpu" and traits.generation == BEFORE_TENSOR_CORES
    stack = traits.unmeasured or ("" if traits.engine == GGML else "PyTorch")
    return (traits.maker or UNKNOWN) + " Pascal and older" * is_old + (f", {stack}" if stack else "")


def spread_of(traits: Traits) -> float:
    """The spread of a latency's logarithm around the model."""
    return (_SPREAD if traits.setup else _OWN_SPREAD)[processor(traits)][traits.engine]


def far_of(traits: Traits) -> float:
    """The number of these spreads from which a latency counts less."""
    return _FAR[traits.engine]


def type_family(quant: str) -> str:
    """Types of llama.cpp whose kernels unpack alike: blocks of 32 with one scale; K-quants, of which those of
    2 and 3 bits have scales of so few bits that they bound more than bytes do; codebooks; none."""
    if quant.startswith(("q2_k", "q3_k")):
        return "few bits"
    if quant.startswith(("iq", "mxfp4")):
        return "codebook"
    return "k" if "_k" in quant else "legacy" if quant.startswith("q") else "whole"


def _backend(traits: Traits) -> str:
    """The kernels that run: a maker's, on AMD's GPUs by interface; empty: unknown."""
    return f"{traits.maker} {traits.family}" if traits.maker == "AMD" else traits.maker


Weighted = tuple[Name, Prior, float]


def terms_of(parameter: str, traits: Traits) -> list[Weighted]:
    """The terms whose weighted sum is the logarithm of a parameter; empty: the parameter is 0."""
    if parameter == "all":
        return _of_machine(parameter, traits)
    kind = processor(traits)
    root = _ROOTS.get((parameter, kind, traits.engine))
    if root is None:
        return []
    name: Name = (parameter,)
    if parameter == "eff" and traits.maker in _FEW_ROWS:
        name, root = ("eff", "plain"), _PLAIN
    terms: list[Weighted] = [(name, Prior(math.log(root[0]), root[1]), 1.0)]
    if traits.engine == GGML:
        terms += _of_kernels(parameter, traits)
    elif parameter in _GROUP:
        terms.append(((parameter, "group", traits.group), Prior(0.0, _GROUP[parameter]), 1.0))
    if traits.kind != DENSE and parameter in _KIND:
        terms.append(((parameter, traits.kind), _KIND[parameter], 1.0))
    if parameter == "mfu":
        terms.append(((parameter, "packed" if traits.packed else "whole"), Prior(0.0, _PACKED), 1.0))
        terms += _of_machine(parameter, traits)
    if traits.software and (sd := _SOFTWARE[traits.engine].get(parameter)):
        mean = _STUDY_HOST if traits.engine == TORCH else 0.0
        terms.append(((parameter, "software", traits.software), Prior(mean, sd), 1.0))
    return terms if traits.setup else [*terms, *_of_own(parameter, traits)]


def _of_kernels(parameter: str, traits: Traits) -> list[Weighted]:
    """What llama.cpp's kernels for a backend, a generation of chips and a type of weights deviate by."""
    kind, backend = processor(traits), _backend(traits)
    terms: list[Weighted] = []

    def add(deviation: Name, sd: float) -> None:
        terms.append(((parameter, *deviation), Prior(0.0, sd), 1.0))

    if parameter == "eff":
        types, sd = type_family(traits.type), _TYPES[kind]
        add(("type", types), sd)
        if kind == "gpu":
            add(("type", types, backend), sd)
    if kind == "cpu":
        return terms
    if parameter in _BACKEND:
        add(("backend", backend), _BACKEND[parameter])
    if traits.generation and parameter in _GENERATION:
        add(("generation", traits.generation), _GENERATION[parameter])
    if parameter == "mfu":
        add(("packed" if traits.packed else "whole", backend), _PACKED)
    if traits.kind != DENSE and parameter in _KIND:
        add((traits.kind, backend), _KIND[parameter].sd / 2)
    if parameter == "layer":
        by_bandwidth = math.log(traits.bytes_per_s / _USUAL_BYTES_PER_S)
        terms.append(((parameter, "by bandwidth"), _BY_BANDWIDTH, by_bandwidth))
    if parameter == "eff" and traits.generation == BEFORE_TENSOR_CORES and traits.packed and traits.flops:
        per_byte = max(traits.flops / traits.bytes_per_s, _LEAST_OPERATIONS)
        by_operations = math.log(per_byte / _USUAL_OPERATIONS)
        terms.append(((parameter, "by operations"), _BY_OPERATIONS, by_operations))
    return terms


def _of_machine(parameter: str, traits: Traits) -> list[Weighted]:
    kind = processor(traits)
    return [
        ((parameter, "machine", traits.device), Prior(0.0, MACHINE[parameter][kind]), 1.0),
        ((parameter, "source", traits.device, traits.setup), Prior(0.0, SOURCE[parameter][kind]), 1.0),
    ]


def _of_own(parameter: str, traits: Traits) -> list[Weighted]:
    kind, group = processor(traits), ("group", traits.group)
    levels: list[tuple[dict[str, float], Name]] = [(_OWN, ()), (_OWN_TYPE[kind], ("type", traits.type))]
    if traits.engine == GGML:
        levels += [(_OWN_GROUP[kind], group), (_OWN_MODEL[kind], (*group, "model", traits.model))]
    return [
        ((parameter, "own", traits.device, *name), Prior(0.0, sds[parameter]), 1.0)
        for sds, name in levels
        if parameter in sds
    ]


def is_of_machine(name: Name) -> bool:
    """Whether a term is of one machine, and so says nothing about another."""
    return len(name) > 1 and name[1] in ("machine", "source")
