"""The time of a decode step or a prompt, predicted from measured ones. Pure, but for the shipped numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from harness.base import data
from harness.recommend import evidence
from harness.recommend.evidence import DECODE, NORMAL_90, PROMPTS, UNKNOWN_SPREAD
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
from harness.recommend.traits import Example, Range, Traits
from harness.theory.floors import Reach

# A step at position n takes
#
# t(n) = (host^p + (overhead + bytes / (bandwidth e) + n s)^p)^(1/p)
#
# host: ms per layer in which PyTorch's Python code starts kernels, while the device works through them; the
# slower of the two decides (p = 5 for a soft maximum; llama.cpp starts none, so host is 0). overhead: of a
# step and of each layer on the device. e: the share of the bandwidth reached, by backend and type. s: of a
# token in the cache: its bytes, and the products with it. All parameters are positive, so their logarithms
# are fitted, as sums of terms (terms.py). What others measured is fitted once and shipped: the terms of
# backends and types, without those of single machines and sources, in which a user's machine differs from
# theirs. The user's own measurements then move these terms, and those of the machine. Intervals: Laplace's
# approximation around the fit, and the spread that is left. docs/concepts/predictions.md has more.

Parameters = dict[str, Floats]

SOFT = 5.0  # p; of 3 to 16 the one with the smallest error when a size is left out
MICRO_BATCH = 512.0  # tokens of a prompt that llama.cpp computes at once (n_ubatch)
_FAR = 30.0  # logarithms that a step of a search may try
_STEP = 1e-4  # of a derivative
SHIPPED = "speed_terms.json"  # in harness/data, as benchmarks.predictions --store writes it


@dataclass(frozen=True)
class Terms:
    """Fitted terms: their means, and the deviations that independent unknowns (columns) give them."""

    names: tuple[Name, ...] = ()
    mean: Floats = field(default_factory=lambda: np.zeros(0))
    root: Floats = field(default_factory=lambda: np.zeros((0, 0)))

    def of_kinds(self) -> Terms:
        """Those that hold on any machine, with their covariance."""
        general = [i for i, name in enumerate(self.names) if not is_of_machine(name)]
        covariance = (self.root @ self.root.T)[np.ix_(general, general)]
        names = tuple(self.names[i] for i in general)
        return Terms(names, self.mean[general], np.asarray(np.linalg.cholesky(covariance), float))

    def with_priors(self, priors: Mapping[Name, Prior]) -> Terms:
        """These, and others by what is believed of them before."""
        new = {name: prior for name, prior in priors.items() if name not in self.names}
        count, columns = self.root.shape
        root = np.zeros((count + len(new), columns + len(new)))
        root[:count, :columns] = self.root
        root[count:, columns:] = np.diag([prior.sd for prior in new.values()])
        mean = np.append(self.mean, [prior.mean for prior in new.values()])
        return Terms((*self.names, *new), mean, root)


class Asked(NamedTuple):
    """A time to predict: of a step at position `n`, or of a prompt of so many tokens."""

    traits: Traits
    n: int
    is_prompt: bool


class _Times:
    """Times that are computed at once. `terms`: all that they depend on; `design`: by parameter, the weight
    of each term (column) in each time (row)."""

    def __init__(self, asked: Sequence[Asked], terms: Terms) -> None:
        rows = [question.traits for question in asked]
        weighted = {name: [terms_of(name, traits) for traits in rows] for name in PARAMETERS}
        all_terms = [term for of_rows in weighted.values() for of_row in of_rows for term in of_row]
        self.terms = terms.with_priors({name: prior for name, prior, _ in all_terms})
        column = {name: i for i, name in enumerate(self.terms.names)}
        self.design: Parameters = {}
        for parameter, of_rows in weighted.items():
            self.design[parameter] = np.zeros((len(rows), len(column)))
            for i, of_row in enumerate(of_rows):
                for name, _, weight in of_row:
                    self.design[parameter][i, column[name]] = weight
        self._n = n = _column(question.n for question in asked)
        self._is_prompt = np.array([question.is_prompt for question in asked], bool)
        self._layers = _column(t.layers for t in rows)
        self._read_ms = _column(t.read_bytes / t.bytes_per_s * 1e3 for t in rows)
        self._per_byte_ms = _column(1e3 / t.bytes_per_s for t in rows)
        self._per_flop_ms = _column(1e3 / t.flops if t.flops else 0.0 for t in rows)
        seen = _Attention(rows)
        kv_bytes, self._attended = seen.at(np.where(self._is_prompt, 1.0, n))
        self._kv_ms = kv_bytes * self._per_byte_ms
        self._per_expert = np.minimum(n, MICRO_BATCH) * _column(t.expert_share for t in rows)
        self._linear = n * _column(t.pass_flops for t in rows)
        self._pairs = seen.pairs(n)
        # Of a prompt: the experts that further tokens choose, if each chooses uniformly.
        idle = _column(1 - t.expert_share for t in rows)
        self._others_ms = _column(t.expert_bytes for t in rows) * (idle - idle**n) * self._per_byte_ms

    @property
    def least_ms(self) -> Floats:
        """The time to read the weights, and the cache, once."""
        return self._read_ms + self._kv_ms

    def parameters(self, mean: Floats) -> Parameters:
        """The value of each parameter in each time; 0 where it has none."""
        return {
            name: np.where(weights.any(axis=1), np.exp(np.clip(weights @ mean, -_FAR, _FAR)), 0.0)
            for name, weights in self.design.items()
        }

    def ms(self, p: Parameters) -> Floats:
        """A prompt takes the time of a step that reads the experts of all tokens, or of the overhead and its
        products, whichever is longer. An expert computes its tokens in blocks that they do not fill: so many
        take the time of `tile` more."""
        overhead = p["step"] + p["layer"] * self._layers
        cache_ms = self._kv_ms * p["kv"] + p["token"] * self._attended * 1e-9
        device = overhead + self._read_ms / p["eff"] + cache_ms
        step = _slower(p["host"] * self._layers, device) * p["all"]
        if not self._is_prompt.any():
            return step
        linear = self._linear * (1 + p["tile"] / self._per_expert)
        products = (linear + self._pairs * p["pairs"]) * self._per_flop_ms / p["mfu"]
        prompt = _slower(step + self._others_ms / p["eff"], overhead + products)
        return np.where(self._is_prompt, prompt, step)

    def slopes(self, mean: Floats) -> Floats:
        """Derivatives of the logarithm of each time by each term."""
        p = self.parameters(mean)
        log_ms, slopes = np.log(self.ms(p)), np.zeros((len(self._n), len(mean)))
        for name, weights in self.design.items():
            if weights.any():
                moved = np.log(self.ms({**p, name: p[name] * math.exp(_STEP)}))
                slopes += ((moved - log_ms) / _STEP)[:, None] * weights
        return slopes


def _column(values: Iterable[float]) -> Floats:
    return np.array(list(values), float)


def _slower(one: Floats, other: Floats) -> Floats:
    return np.asarray((one**SOFT + other**SOFT) ** (1 / SOFT))


class _Attention:
    """What steps and prompts attend to. Arrays have a last axis for the layers that attend alike."""

    def __init__(self, rows: Sequence[Traits]) -> None:
        most = max((len(row.reaches) for row in rows), default=0) or 1
        reaches = [[*row.reaches, *[Reach(0.0, 0.0, 0)] * (most - len(row.reaches))] for row in rows]

        def array(values: Iterable[float]) -> Floats:
            return np.array(list(values), float).reshape(len(rows), most)

        all_reaches = [reach for row in reaches for reach in row]
        self._kv_bytes = array(reach.kv_bytes for reach in all_reaches)
        self._flops = array(reach.flops for reach in all_reaches)
        self._window = array(math.inf if reach.window is None else reach.window for reach in all_reaches)
        self._chunked = array(reach.chunked for reach in all_reaches) > 0

    def at(self, n: Floats) -> tuple[Floats, Floats]:
        """The bytes of the cache that steps at these positions read, and their operations with them."""
        n = n[:, None]
        chunk = np.where(np.isfinite(self._window) & (self._window > 0), self._window, 1.0)
        tokens = np.where(self._chunked, (n - 1) % chunk + 1, np.minimum(n, self._window))
        return (tokens * self._kv_bytes).sum(axis=1), (tokens * self._flops).sum(axis=1)

    def pairs(self, tokens: Floats) -> Floats:
        """Operations of attention in prompts of so many tokens, over all pairs of a query and a token."""
        length = tokens[:, None]
        within = np.minimum(length, self._window)
        pairs = within * (within + 1) / 2
        with np.errstate(invalid="ignore"):  # an infinite window is never exceeded
            past = np.where(length > self._window, (length - within) * self._window, 0.0)
        whole = np.floor_divide(length, np.maximum(within, 1))
        rest = length - whole * within
        chunks = whole * pairs + rest * (rest + 1) / 2
        return np.asarray((np.where(self._chunked, chunks, pairs + past) * self._flops).sum(axis=1))


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


class Predictor:
    """Predicts from the shipped terms, and from the user's own examples. `known`: the terms that are known
    before (default: those shipped); `spreads`: of machines and sources that no fit saw, by family and phase,
    beyond what the terms say (default: those shipped)."""

    def __init__(
        self,
        examples: Sequence[Example] = (),
        terms: Mapping[str, Terms] | None = None,
        spreads: Mapping[tuple[str, str], float] | None = None,
    ) -> None:
        self._terms = dict(shipped() if terms is None else terms)
        for fit, of_fit in by_fit(examples).items():
            self._terms[fit] = fitted_terms(of_fit, self._terms.get(fit, Terms()))
        self._spreads = evidence.spreads() if spreads is None else spreads
        self._own = {
            (example.traits.device, example.traits.engine) for example in examples if not example.traits.setup
        }

    def latency_ms(self, rows: Sequence[Traits], n: int) -> list[Range]:
        """Predict each variant's decode step at position n."""
        return self.steps([[traits] for traits in rows], n).ranges

    def steps(self, parts: Sequence[Sequence[Traits]], n: int) -> Steps:
        """Predict decode steps at position n, whose parts take turns."""
        return self._predicted(parts, n, is_prompt=False)

    def first_token_ms(self, rows: Sequence[Traits], tokens: int) -> list[Range | None]:
        """Predict TTFT for a length of prompt; None where the device's rate is unknown."""
        predictable = [[traits] for traits in rows if traits.flops]
        ranges = iter(self._predicted(predictable, tokens, is_prompt=True).ranges)
        return [next(ranges) if traits.flops else None for traits in rows]

    def _predicted(self, parts: Sequence[Sequence[Traits]], n: int, is_prompt: bool) -> Steps:
        """Predict times, none of which ends before memory can be read."""
        if not parts:
            return Steps([], np.zeros((0, 0)))
        owners: dict[str, list[int]] = {}
        asked: dict[str, list[Asked]] = {}
        for i, of_step in enumerate(parts):
            for traits in of_step:
                is_own = (traits.device, traits.engine) in self._own
                owners.setdefault(fit_of(traits), []).append(i)
                asked.setdefault(fit_of(traits), []).append(
                    Asked(traits if is_own else replace(traits, device="", setup="others"), n, is_prompt)
                )
        value, least, blocks = np.zeros(len(parts)), np.zeros(len(parts)), []
        for fit, of_fit in asked.items():
            times = _Times(of_fit, self._terms.get(fit, Terms()))
            ms = np.maximum(times.ms(times.parameters(times.terms.mean)), times.least_ms)
            own_spread, shared = self._spread(of_fit)
            of_terms = times.slopes(times.terms.mean) @ times.terms.root
            unknowns = np.zeros((len(parts), of_terms.shape[1] + len(own_spread) + 1))
            np.add.at(unknowns, owners[fit], ms[:, None] * np.hstack([of_terms, np.diag(own_spread), shared]))
            np.add.at(value, owners[fit], ms)
            np.add.at(least, owners[fit], times.least_ms)
            blocks.append(unknowns)
        unknowns = np.hstack(blocks) / value[:, None]
        factor = np.exp(NORMAL_90 * np.sqrt((unknowns**2).sum(axis=1)))
        ends = zip(value, np.maximum(value / factor, least), value * factor, strict=True)
        return Steps([Range(*map(float, end)) for end in ends], unknowns)

    def _spread(self, asked: Sequence[Asked]) -> tuple[Floats, Floats]:
        """The deviation that each time has for itself, and one that those of a device share (of several
        devices, no comparison asks)."""
        alone, shared = np.zeros(len(asked)), np.zeros((len(asked), 1))
        for i, (traits, _, is_prompt) in enumerate(asked):
            alone[i] = FIRST_TOKEN_SPREAD if is_prompt else spread_of(traits)
            if traits.setup:
                phase = PROMPTS if is_prompt else DECODE
                shared[i] = self._spreads.get((family_name(traits), phase), UNKNOWN_SPREAD[phase])
        return alone, shared


def by_fit(examples: Iterable[Example]) -> dict[str, list[Example]]:
    """The examples that are fitted together."""
    by_family: dict[str, list[Example]] = {}
    for example in examples:
        by_family.setdefault(fit_of(example.traits), []).append(example)
    return by_family


def fitted_terms(examples: Sequence[Example], base: Terms, near: Terms | None = None) -> Terms:
    """Fit the terms of one fit to its examples, from what is known of them before. `near`: terms fitted to
    almost the same examples, where the search begins."""
    measured = [(Asked(e.traits, n, False), ms) for e in examples for n, ms in e.at_ms.items()]
    measured += [(Asked(e.traits, n, True), ms) for e in examples for n, ms in e.first_tokens.items()]
    times, logs = _Times([asked for asked, _ in measured], base), np.log([ms for _, ms in measured])
    before = times.terms
    spreads = np.array([FIRST_TOKEN_SPREAD if a.is_prompt else spread_of(a.traits) for a, _ in measured])
    scales = np.array([far_of(asked.traits) for asked, _ in measured])

    def values(unknowns: Floats) -> Floats:
        return np.asarray(before.mean + before.root @ unknowns)

    def residuals(unknowns: Floats) -> Floats:
        return np.asarray((np.log(times.ms(times.parameters(values(unknowns)))) - logs) / spreads)

    def jacobian(unknowns: Floats) -> Floats:
        return np.asarray(times.slopes(values(unknowns)) @ before.root / spreads[:, None])

    start: Floats = np.zeros(before.root.shape[1])
    if near:
        means = dict(zip(near.names, near.mean, strict=True))
        centres = [means.get(name, mean) for name, mean in zip(before.names, before.mean, strict=True)]
        start = np.asarray(np.linalg.solve(before.root, np.array(centres) - before.mean), float)
    unknowns, covariance = fitted(residuals, jacobian, scales, start, is_near=near is not None)
    root = before.root @ np.linalg.cholesky(covariance)
    return Terms(before.names, values(unknowns), np.asarray(root, float))


def read_s(parts: Iterable[tuple[float, float]]) -> float:
    """The least time to read parts one after the other; each: bytes, and the bytes/s of its memory."""
    return math.fsum(size / bytes_per_s for size, bytes_per_s in parts)
