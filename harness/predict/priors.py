"""What is believed of each parameter of a step's latency before anything is measured. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.predict import robust
from harness.predict.traits import DENSE, FUSED, GGML, TORCH, Traits

Name = tuple[str, ...]

# What makes 85 to 95% of the published rows lie in their interval when their size is left out
# (benchmarks/predictions.py).
_SPREAD = {
    ("gpu", GGML): 0.015,
    ("gpu", TORCH): 0.04,
    ("gpu", FUSED): 0.04,
    ("cpu", GGML): 0.04,
    ("cpu", TORCH): 0.06,
    ("cpu", FUSED): 0.06,
}
_INTERVALS = {("gpu", GGML): 0.5}
# From how many spreads on a latency counts less. Some rows of PyTorch's stacks are far off: kernels switch.
_FAR = {GGML: robust.NORMAL, TORCH: 1.0, FUSED: 1.0}


@dataclass(frozen=True)
class Prior:
    """Of a parameter's logarithm."""

    mean: float
    sd: float


# Means: ms for host, step and layer; shares for eff and mfu; ratios for kv (bytes moved per byte of cache);
# ns per token and layer's head for head, ns per token for token; for pairs, attention's time in a prompt over
# that of other products of as many operations. Spreads are of logarithms: 0.7 is a factor of 2. Of GPUs they
# are about what the published study shows.
_ROOTS: dict[tuple[str, str, str], tuple[float, float]] = {
    ("host", "gpu", TORCH): (0.25, 0.7),
    ("host", "gpu", FUSED): (0.08, 0.7),
    ("host", "cpu", TORCH): (0.15, 0.8),
    ("host", "cpu", FUSED): (0.15, 0.8),
    ("step", "gpu", GGML): (5.0, 1.0),
    ("step", "cpu", GGML): (0.3, 1.0),
    ("layer", "gpu", GGML): (0.03, 0.7),
    ("layer", "gpu", TORCH): (0.08, 0.5),
    ("layer", "gpu", FUSED): (0.06, 0.5),
    ("layer", "cpu", GGML): (0.03, 0.7),
    ("layer", "cpu", TORCH): (0.05, 0.7),
    ("eff", "gpu", GGML): (0.85, 0.15),
    ("eff", "gpu", TORCH): (0.85, 0.15),
    ("eff", "gpu", FUSED): (0.85, 0.15),
    ("eff", "cpu", GGML): (0.6, 0.5),
    ("eff", "cpu", TORCH): (0.5, 0.6),
    ("kv", "gpu", GGML): (1.1, 0.3),
    ("kv", "gpu", TORCH): (3.0, 0.5),
    ("kv", "gpu", FUSED): (1.2, 0.5),
    ("kv", "cpu", GGML): (2.0, 0.7),
    ("kv", "cpu", TORCH): (4.0, 0.7),
    ("head", "gpu", GGML): (0.1, 1.0),
    ("head", "gpu", TORCH): (0.005, 1.0),
    ("head", "gpu", FUSED): (0.1, 1.0),
    ("head", "cpu", GGML): (1.0, 1.5),
    ("head", "cpu", TORCH): (1.0, 1.5),
    ("token", "gpu", GGML): (50.0, 1.0),
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
# Layers that are not dense: they start more kernels (a router, its choice, indexed products), and read
# smaller pieces. Guesses, until such a model is measured.
_KIND = {"layer": Prior(math.log(1.5), 0.5), "eff": Prior(math.log(0.9), 0.2)}
# How far a stack's kernel, a type, a device and a model deviate from the root: spreads of logarithms.
_GROUP = {
    **{(name, like): 0.5 for name in ("host", "mfu") for like in ("gpu", "cpu")},
    **{("eff", like): 0.15 for like in ("gpu", "cpu")},
    # Of llama.cpp: with and without flash attention, and by the types of the cache, which a CPU unpacks.
    ("head", "gpu"): 0.3,
    ("head", "cpu"): 1.0,
}
_PACKED = 0.5  # products of packed weights against those of 16 bits
_LIKE = dict.fromkeys(("metal", "hip", "vulkan"), "gpu")  # kinds with the priors of another
_UNSEEN = 0.3  # more, for other makers' GPUs than NVIDIA's, of which nothing is published here
# Types of a family share their way to be unpacked, and so a part of their deviation.
_FAMILY, _TYPE = {"gpu": 0.1, "cpu": 0.25}, {"gpu": 0.015, "cpu": 0.15}
_DEVICE = {"host": 0.35, "step": 0.35, "layer": 0.35, "eff": 0.12, "kv": 0.2, "mfu": 0.2}
_MODEL = {
    ("step", "gpu", GGML): 0.02,
    ("kv", "gpu", GGML): 0.05,
    **{("eff", "cpu", engine): 0.02 for engine in (GGML, TORCH, FUSED)},
}
FIRST_TOKEN_SPREAD = 0.08


def kind_of(traits: Traits) -> str:
    """Devices that share what is measured: CPUs, NVIDIA's GPUs, and others by their interface."""
    return "gpu" if traits.family == "cuda" else traits.family


def spread_of(traits: Traits) -> float:
    """Of a measured latency's logarithm around the model."""
    kind = kind_of(traits)
    return _SPREAD[_LIKE.get(kind, kind), traits.engine]


def far_of(traits: Traits) -> float:
    """From how many of these spreads on a latency counts less (harness/predict/robust.py)."""
    return _FAR[traits.engine]


def scale_of(traits: Traits) -> float:
    """By which an interval is wider than the fit says."""
    return _INTERVALS.get((kind_of(traits), traits.engine), 1.0)


def family_of(quant: str) -> str:
    """Types of llama.cpp whose kernels unpack alike: blocks of 32 with one scale; K-quants, of which those of
    2 and 3 bits have scales of so few bits that they bound more than bytes do; codebooks; none."""
    if quant.startswith(("q2_k", "q3_k")):
        return "few bits"
    if quant.startswith(("iq", "mxfp4")):
        return "codebook"
    return "k" if "_k" in quant else "legacy" if quant.startswith("q") else "whole"


def terms_of(parameter: str, traits: Traits) -> list[tuple[Name, Prior]]:
    """The terms whose sum is the logarithm of a parameter; empty: the parameter is 0."""
    kind = kind_of(traits)
    like = _LIKE.get(kind, kind)
    if (root := _ROOTS.get((parameter, like, traits.engine))) is None:
        return []
    wider = _UNSEEN if kind in _LIKE else 0.0
    shared, spreads = Prior(math.log(root[0]), root[1] + wider), (_FAMILY[like], _TYPE[like])
    name: Name = (parameter, kind, traits.engine)
    if parameter == "eff" and traits.multiply_s is not None:
        name, shared, spreads = (*name, "of rates"), _OF_RATES, _SPREADS_OF_RATES
    found: list[tuple[Name, Prior]] = [(name, shared)]
    if parameter in _KIND and traits.kind != DENSE:
        found.append(((parameter, kind, traits.engine, traits.kind), _KIND[parameter]))
    if (parameter, like) in _GROUP:
        found.append(((parameter, kind, "of", traits.group), Prior(0.0, _GROUP[parameter, like])))
    if parameter == "mfu":
        found.append(((parameter, kind, traits.engine, str(traits.packed)), Prior(0.0, _PACKED)))
    if parameter == "eff":
        of = traits.engine if traits.engine == GGML else traits.group
        for shared_by, spread in zip((family_of(traits.type), traits.type), spreads, strict=True):
            found.append(((*name, of, "type", shared_by), Prior(0.0, spread)))
    if (of_engine := (parameter, like, traits.engine)) in _MODEL:
        of_model = Prior(0.0, _MODEL[of_engine])
        found.append(((parameter, "model", traits.device, traits.group, traits.model), of_model))
    if parameter in _DEVICE:
        found.append(((parameter, "on", traits.device, traits.engine), Prior(0.0, _DEVICE[parameter])))
    return found


PARAMETERS = ("host", "step", "layer", "eff", "kv", "head", "token", "mfu", "pairs")
