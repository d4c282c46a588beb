"""The speed of a cell, predicted from measured ones. Pure, but for the shipped numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.base import data
from harness.recommend import evidence
from harness.recommend.evidence import DECODE, PROMPTS, UNKNOWN_SPREAD
from harness.recommend.least_squares import Floats, fitted
from harness.recommend.terms import (
    FIRST_TOKEN_SPREAD,
    PARAMETERS,
    Name,
    Prior,
    family_name,
    far_of,
    fit_of,
    is_of_machine,
    spread_of,
    terms_of,
)
from harness.recommend.traits import Attention, Example, Range, Traits

# Fit the cost of a decode step to measurements, and predict other variants with intervals.
#
# A step at position n takes
#
# t(n) = (host^p + (overhead + bytes / (bandwidth e) + n s)^p)^(1/p)
#
# host: ms per layer in which PyTorch's Python code starts kernels, while the device works through them; the
# slower of the two decides (p = 5 for a soft maximum; llama.cpp starts none, so host is 0). overhead: of a
# step and of each layer on the device. e: the share of the bandwidth reached, by backend and type. s: of a
# token in the cache: its bytes, and each layer's heads. All parameters are positive, so their logarithms are
# fitted, as sums of terms (terms.py). What others measured is fitted once and shipped: the terms of backends
# and types, without those of single machines and sources, in which a user's machine differs from theirs.
# The user's own measurements then move these terms, and those of the machine. Intervals: Laplace's
# approximation around the fit, and the spread that is left. docs/concepts/predictions.md has more.


Parameters = dict[str, Floats]
Times = Callable[[Parameters], Floats]

SOFT = 5.0  # p; of 3 to 16 the one with the smallest error when a size is left out
PLACES = 24  # positions at which a fitted line is compared
NORMAL_90 = 1.645
_LEAST_MS = 1e-6
_STEP = 1e-4  # of a derivative
SHIPPED = "speed_terms.json"  # in harness/data, as benchmarks/predictions.py --store writes it


@dataclass(frozen=True)
class Terms:
    """Fitted terms: their means, and the deviations that independent unknowns (columns) give them."""

    names: tuple[Name, ...] = ()
    mean: Floats = field(default_factory=lambda: np.zeros(0))
    root: Floats = field(default_factory=lambda: np.zeros((0, 0)))

    def of_kinds(self) -> Terms:
        """Those that hold on any machine, with their covariance."""
        kept = [i for i, name in enumerate(self.names) if not is_of_machine(name)]
        covariance = (self.root @ self.root.T)[np.ix_(kept, kept)]
        names = tuple(self.names[i] for i in kept)
        return Terms(names, self.mean[kept], np.asarray(np.linalg.cholesky(covariance), float))


class _Places:
    """The place of each term in the fitted values: those of earlier fits first, then new ones by their
    priors."""

    def __init__(self, known: Terms) -> None:
        self._known = known
        self._places = {name: i for i, name in enumerate(known.names)}
        self._priors: list[Prior] = []

    def place(self, name: Name, prior: Prior) -> int:
        if name not in self._places:
            self._places[name] = len(self._places)
            self._priors.append(prior)
        return self._places[name]

    def terms(self) -> Terms:
        """All terms as they are known before a further fit."""
        known, new = self._known, len(self._priors)
        root = np.zeros((len(self._places), known.root.shape[1] + new))
        root[: len(known.mean), : known.root.shape[1]] = known.root
        root[len(known.mean) :, known.root.shape[1] :] = np.diag([each.sd for each in self._priors])
        return Terms(tuple(self._places), np.append(known.mean, [each.mean for each in self._priors]), root)


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

    def __init__(self, rows: Sequence[Traits], places: _Places) -> None:
        of_rows = {
            name: [
                [(places.place(of, prior), weight) for of, prior, weight in terms_of(name, traits)]
                for traits in rows
            ]
            for name in PARAMETERS
        }
        self.sums = {name: _sum(of_parameter) for name, of_parameter in of_rows.items()}
        self._has = {name: np.array([[bool(terms)] for terms in rows]) for name, rows in of_rows.items()}
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
            cache = seen.kv_bytes * self._per_byte_ms * p["kv"] + p["head"] * seen.heads * 1e-6
            overlapped, after = np.where(self._waits, 0.0, cache), np.where(self._waits, cache, 0.0)
            return (_slower(p["host"] * self._layers, device + overlapped) + after) * p["all"]

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


@cache
def shipped() -> Mapping[str, Terms]:
    """The terms fitted to what others measured, by fit."""
    return {
        fit: Terms(
            tuple(tuple(name) for name in stored["names"]),
            np.array(stored["mean"]),
            np.array([[*row, *[0.0] * (len(stored["mean"]) - len(row))] for row in stored["root"]]),
        )
        for fit, stored in json.loads((data.HERE / SHIPPED).read_text(encoding="utf-8")).items()
    }


def stored(terms: Mapping[str, Terms]) -> str:
    """The content of that file: of roots, which are triangular, the part that is not zero."""
    content = {
        fit: {
            "names": of_fit.names,
            "mean": [round(value, 4) for value in of_fit.mean.tolist()],
            "root": [[round(v, 4) for v in row[: i + 1]] for i, row in enumerate(of_fit.root.tolist())],
        }
        for fit, of_fit in sorted(terms.items())
    }
    return json.dumps(content, separators=(",", ":")).replace('],"', '],\n"').replace("],[", "],\n[") + "\n"


class Predictor:
    """Predicts from the shipped terms, and from examples of the user's own machine or of others. `known`: the
    terms that are known before (default: those shipped); `spreads`: of machines and sources that no fit saw,
    by family and phase, beyond what the terms say (default: those shipped)."""

    def __init__(
        self,
        examples: Sequence[Example] = (),
        known: Mapping[str, Terms] | None = None,
        spreads: Mapping[tuple[str, str], float] | None = None,
    ) -> None:
        of_fits: dict[str, list[Example]] = {}
        for example in examples:
            of_fits.setdefault(fit_of(example.traits), []).append(example)
        self.terms = dict(shipped() if known is None else known)
        for fit, of_fit in of_fits.items():
            self.terms[fit] = fitted_terms(of_fit, self.terms.get(fit, Terms()))
        self._spreads = evidence.spreads() if spreads is None else spreads
        names = [name for terms in self.terms.values() for name in terms.names if is_of_machine(name)]
        self._devices = {device for _, _, device, *_ in names}
        self._own = {(each.traits.device, each.traits.engine) for each in examples if not each.traits.setup}

    def latency_ms(self, rows: Sequence[Traits], n: int) -> list[Range]:
        """Predict each variant's decode step at position n."""
        return self.steps([[traits] for traits in rows], n).ranges

    def steps(self, parts: Sequence[Sequence[Traits]], n: int) -> Steps:
        """Predict decode steps at position n, whose parts take turns."""
        return self._predicted(parts, n, is_prompt=False)

    def first_token_ms(self, rows: Sequence[Traits], tokens: int) -> list[Range | None]:
        """Predict TTFT for a length of prompt; None where the device's rate is unknown."""
        known = [[traits] for traits in rows if traits.flops]
        ranges = iter(self._predicted(known, tokens, is_prompt=True).ranges)
        return [next(ranges) if traits.flops else None for traits in rows]

    def _predicted(self, parts: Sequence[Sequence[Traits]], n: int, is_prompt: bool) -> Steps:
        """Predict times, none of which ends before memory can be read."""
        by_fit: dict[str, list[tuple[int, Traits]]] = {}
        for i, of_step in enumerate(parts):
            for traits in of_step:
                by_fit.setdefault(fit_of(traits), []).append((i, traits))
        value, least = np.zeros(len(parts)), np.zeros(len(parts))
        blocks = []
        for fit, of_fit in by_fit.items():
            ms, least_ms, unknowns = self._times(fit, [traits for _, traits in of_fit], n, is_prompt)
            places = [i for i, _ in of_fit]
            np.add.at(value, places, ms)
            np.add.at(least, places, least_ms)
            block = np.zeros((len(parts), unknowns.shape[1]))
            np.add.at(block, places, ms[:, None] * unknowns)
            blocks.append(block)
        unknowns = np.hstack(blocks) / value[:, None] if blocks else np.zeros((0, 0))
        factor = np.exp(NORMAL_90 * np.sqrt((unknowns**2).sum(axis=1)))
        ends = zip(value, np.maximum(value / factor, least), value * factor, strict=True)
        return Steps([Range(*map(float, each)) for each in ends], unknowns)

    def _times(
        self, fit: str, rows: Sequence[Traits], n: int, is_prompt: bool
    ) -> tuple[Floats, Floats, Floats]:
        """Times in ms, the least possible ones, and the deviations of their logarithms by each unknown."""
        places, at = _Places(self.terms.get(fit, Terms())), np.full((len(rows), 1), float(n))
        of_rows = _Rows([self._as_known(traits) for traits in rows], places)
        terms = places.terms()
        p, ms = of_rows.parameters(terms.mean), of_rows.prompts(at) if is_prompt else of_rows.steps(at)

        def log_ms(moved: Parameters) -> Floats:
            return np.asarray(np.log(ms(moved)[:, 0]))

        slopes = _slopes(log_ms, p, of_rows.sums, len(terms.mean))
        least = of_rows.least_ms(np.ones_like(at) if is_prompt else at)[:, 0]
        unknowns = np.hstack([slopes @ terms.root, *self._spread(rows, is_prompt)])
        return np.maximum(np.exp(log_ms(p)), least), least, unknowns

    def _as_known(self, traits: Traits) -> Traits:
        """The traits without a device of which nothing is known, so that few terms serve many machines."""
        return traits if traits.device in self._devices else replace(traits, device="")

    def _spread(self, rows: Sequence[Traits], is_prompt: bool) -> tuple[Floats, Floats]:
        """The deviations that each row has for itself, and those that the rows of a device share (of several
        devices, no comparison asks)."""
        alone, shared = np.zeros(len(rows)), np.zeros((len(rows), 1))
        for i, traits in enumerate(rows):
            is_own = (traits.device, traits.engine) in self._own and not traits.setup
            alone[i] = FIRST_TOKEN_SPREAD if is_prompt else spread_of(traits, is_own)
            if not is_own:
                key = family_name(traits), PROMPTS if is_prompt else DECODE
                shared[i] = self._spreads.get(key, UNKNOWN_SPREAD[key[1]])
        return np.diag(alone), shared


def fitted_terms(examples: Sequence[Example], known: Terms, near: Terms | None = None) -> Terms:
    """Fit the terms of one fit to its examples, from what is known of them before. `near`: terms fitted to
    almost the same examples, where the search begins."""
    places = _Places(known)
    rows = _Rows([example.traits for example in examples], places)
    before = places.terms()
    ends = np.array([example.of_line for example in examples], float)
    n = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * np.linspace(0, 1, PLACES)
    which, weights, measured = _observed(examples, n)
    prompts = [(i, p, ms) for i, e in enumerate(examples) for p, ms in e.first_tokens.items()]
    of_prompt = np.array([i for i, _, _ in prompts], int)
    lengths = np.ones((len(examples), 1))
    lengths[of_prompt, 0] = [p for _, p, _ in prompts]
    picked = [*which, *of_prompt]
    sums = {name: _Sum(terms.places[picked], terms.weights[picked]) for name, terms in rows.sums.items()}
    logs = np.log(np.concatenate([measured, [ms for *_, ms in prompts]]))
    of_steps = [spread_of(examples[i].traits, not examples[i].traits.setup) for i in which]
    spreads = np.array([*of_steps, *[FIRST_TOKEN_SPREAD] * len(prompts)])
    steps, firsts = rows.steps(n), rows.prompts(lengths)

    def log_ms(p: Parameters) -> Floats:
        line = (steps(p)[which] * weights).sum(axis=1)
        first = firsts(p)[of_prompt, 0]
        return np.asarray(np.log(np.maximum(np.concatenate([line, first]), _LEAST_MS)))

    def values(unknowns: Floats) -> Floats:
        return np.asarray(before.mean + before.root @ unknowns)

    def residuals(unknowns: Floats) -> Floats:
        return np.asarray((log_ms(rows.parameters(values(unknowns))) - logs) / spreads)

    def jacobian(unknowns: Floats) -> Floats:
        slopes = _slopes(log_ms, rows.parameters(values(unknowns)), sums, len(before.mean))
        return np.asarray(slopes @ before.root / spreads[:, None])

    scales = np.array([far_of(examples[i].traits) for i in picked])
    start: Floats = np.zeros(before.root.shape[1])
    if near:
        found = dict(zip(near.names, near.mean, strict=True))
        means = [found.get(name, mean) for name, mean in zip(before.names, before.mean, strict=True)]
        start = np.asarray(np.linalg.solve(before.root, np.array(means) - before.mean), float)
    unknowns, covariance = fitted(residuals, jacobian, scales, start, is_near=near is not None)
    root = before.root @ np.linalg.cholesky(covariance)
    return Terms(before.names, values(unknowns), np.asarray(root, float))


def read_s(parts: Iterable[tuple[float, float]]) -> float:
    """The least time to read parts one after the other; each: bytes, and the bytes/s of its memory."""
    return math.fsum(size / bytes_per_s for size, bytes_per_s in parts)
