"""The speed of a cell, predicted from measured ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.recommend.least_squares import Floats, fitted
from harness.recommend.priors import (
    FIRST_TOKEN_SPREAD,
    PARAMETERS,
    Name,
    Prior,
    far_of,
    fit_of,
    spread_of,
    terms_of,
)
from harness.recommend.traits import PUBLIC, Attention, Example, Range, Traits

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
