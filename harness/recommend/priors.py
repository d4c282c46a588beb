"""What is believed of each parameter of a step's latency before anything is measured. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.recommend.least_squares import NORMAL
from harness.recommend.traits import DENSE, FUSED, GGML, PUBLISHED, TORCH, Traits

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
