"""Fit what a decode step costs to what was measured, and predict other variants with intervals. Pure.

A step at position n takes

    t(n) = (host^p + (overhead + bytes / (bandwidth e) + n s)^p)^(1/p)

host: ms per layer in which PyTorch's Python code starts kernels, while the device works through them; the
slower of the two decides (p = 5 for a soft maximum; llama.cpp starts none, so host is 0). overhead: of a step
and of each layer on the device. e: the share of the bandwidth reached, by stack and type. s: of a token in
the cache: its bytes, each layer's heads, and a constant. All parameters are positive, so their logarithms are
fitted, each with a prior; those of a stack, type, device or model that were not measured keep the prior's
mean and spread (partial pooling). Intervals: Laplace's approximation around the fit, plus the residuals'
spread. Derivation and errors: docs/recommend.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from harness.predict import robust
from harness.predict.attention import Attention
from harness.predict.priors import (
    FIRST_TOKEN_SPREAD,
    PARAMETERS,
    Name,
    Prior,
    far_of,
    scale_of,
    spread_of,
    terms_of,
)
from harness.predict.traits import Example, Range, Traits

Floats = NDArray[np.float64]
Parameters = dict[str, Floats]

SOFT = 5.0  # p; of 3 to 16 the one with the smallest error when a size is left out
PLACES = 24  # positions at which a fitted line is compared
NORMAL_90 = 1.645
_LEAST_MS = 1e-6
_STEP = 1e-4  # of a derivative


class _Terms:
    """The terms that occur, each with its prior. Their places are those of the fitted values."""

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


class _Rows:
    """Some variants, for all of which times are computed at once: which terms each parameter sums, and the
    fixed factors."""

    def __init__(self, rows: Sequence[Traits], terms: _Terms) -> None:
        self._places = {
            name: [[terms.place(*each) for each in terms_of(name, traits)] for traits in rows]
            for name in PARAMETERS
        }
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

    def design(self, terms: int) -> dict[str, Floats]:
        """By parameter, how often each row's logarithm has each term."""
        found = {}
        for name, of_rows in self._places.items():
            found[name] = np.zeros((len(of_rows), terms))
            for row, places in enumerate(of_rows):
                np.add.at(found[name][row], places, 1.0)
        return found

    def parameters(self, theta: Floats, design: dict[str, Floats]) -> Parameters:
        """Each as a column; 0 where a row has none."""
        return {
            name: np.where(
                [[bool(each)] for each in self._places[name]], np.exp(matrix @ theta)[:, None], 0.0
            )
            for name, matrix in design.items()
        }

    def ms(self, p: Parameters, n: Floats) -> Floats:
        """Latency at positions `n`, of shape (rows, positions)."""
        tokens = np.where(self._static > 0, self._static, n)
        device = p["step"] + p["layer"] * self._layers + self._read_ms / p["eff"]
        seen = self._attention.at(tokens)
        cache = seen.kv_bytes * self._per_byte_ms * p["kv"]
        cache = cache + (p["head"] * seen.heads + p["token"] * seen.tokens) * 1e-6
        beside, after = np.where(self._waits, 0.0, cache), np.where(self._waits, cache, 0.0)
        return _slower(p["host"] * self._layers, device + beside) + after

    def first_token_ms(self, p: Parameters, tokens: Floats) -> Floats:
        """Of prompts: a step that reads the experts of all tokens, if each chooses its own uniformly, or the
        time of its products, whichever is longer. NaN without a rate."""
        flops = tokens * self._pass_flops + self._attention.pair_flops(tokens) * p["pairs"]
        others = self._expert_bytes * (self._idle - self._idle**tokens) * self._per_byte_ms / p["eff"]
        return _slower(self.ms(p, np.ones_like(tokens)) + others, flops * self._per_flop_ms / p["mfu"])

    def least_ms(self, n: Floats) -> Floats:
        """To read the weights, and the cache up to `n`, once."""
        return self._least_read_ms + self._attention.at(n).kv_bytes * self._per_byte_ms


def _slopes(of: Callable[[Parameters], Floats], p: Parameters, design: dict[str, Floats]) -> Floats:
    """Derivatives of a value of each row by each term, all of which are sums in a parameter's logarithm."""
    centre = of(p)
    found = np.zeros((len(centre), next(iter(design.values())).shape[1]))
    for name, matrix in design.items():
        moved = of({**p, name: p[name] * math.exp(_STEP)})
        found += ((moved - centre) / _STEP)[:, None] * matrix
    return found


def _column(values: Iterable[float]) -> Floats:
    return np.array(list(values), float)[:, None]


def _slower(one: Floats, other: Floats) -> Floats:
    return np.asarray((one**SOFT + other**SOFT) ** (1 / SOFT))


def _observed(examples: Sequence[Example], n: Floats) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Each measured latency: its example, weights of the latencies at `n` that give the fitted line's value
    there, and itself in ms."""
    which, weights, measured = [], [], []
    for i, example in enumerate(examples):
        design = np.column_stack([np.ones(PLACES), n[i]])
        through = np.linalg.pinv(design)
        for position, ms in example.at_ms.items():
            which.append(i)
            weights.append(np.array([1.0, position]) @ through)
            measured.append(ms)
    return np.array(which, int), np.array(weights), np.array(measured)


class Predictor:
    """Fitted to examples. Variants that none of them resembles are predicted from the priors."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._terms = _Terms()
        self._theta, self._covariance = np.empty(0), np.empty((0, 0))
        if examples:
            self._fit(examples)

    def latency_ms(self, rows: Sequence[Traits], n: int) -> list[Range]:
        """Of the decode step at position n, of each variant."""
        return self._predicted(rows, n, _Rows.ms, [spread_of(traits) for traits in rows])

    def tokens_per_s(self, rows: Sequence[Traits], n: int) -> list[Range]:
        return [each.inverted(1e3) for each in self.latency_ms(rows, n)]

    def first_token_ms(self, rows: Sequence[Traits], tokens: int) -> list[Range | None]:
        """Of a prompt of some length; null where the device's rate is unknown."""
        known = [traits for traits in rows if traits.flops]
        spreads = [FIRST_TOKEN_SPREAD] * len(known)
        found = iter(self._predicted(known, tokens, _Rows.first_token_ms, spreads))
        return [next(found) if traits.flops else None for traits in rows]

    def _predicted(
        self,
        rows: Sequence[Traits],
        n: int,
        times: Callable[[_Rows, Parameters, Floats], Floats],
        spreads: Sequence[float],
    ) -> list[Range]:
        """None ends before the time in which memory can be read."""
        if not rows:
            return []
        of_rows, at = _Rows(rows, self._terms), np.full((len(rows), 1), float(n))
        theta, covariance = self._extended()
        design = of_rows.design(len(theta))
        p = of_rows.parameters(theta, design)

        def log_ms(moved: Parameters) -> Floats:
            return np.asarray(np.log(times(of_rows, moved, at)[:, 0]))

        centre, slopes = log_ms(p), _slopes(log_ms, p, design)
        scale = np.array([scale_of(traits) for traits in rows])
        fitted = np.einsum("ri,ij,rj->r", slopes, covariance, slopes)
        half = NORMAL_90 * scale * np.sqrt(fitted + np.square(spreads))
        least = np.log(of_rows.least_ms(at if times is _Rows.ms else np.ones_like(at))[:, 0])
        centre = np.maximum(centre, least)
        ends = (np.exp(each) for each in (centre, np.maximum(centre - half, least), centre + half))
        return [Range(*map(float, each)) for each in zip(*ends, strict=True)]

    def _extended(self) -> tuple[Floats, Floats]:
        """The fit; terms that came after it are at their priors."""
        fitted, sd = len(self._theta), np.array(self._terms.sd)
        covariance = np.diag(sd**2)
        covariance[:fitted, :fitted] = self._covariance
        return np.append(self._theta, self._terms.mean[fitted:]), covariance

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
        design = rows.design(len(mean))
        picked = {name: np.vstack([m[which], m[of_prompt]]) for name, m in design.items()}
        logs = np.log(np.concatenate([measured, [ms for *_, ms in prompts]]))
        of_steps = [spread_of(examples[i].traits) for i in which]
        spreads = np.array([*of_steps, *[FIRST_TOKEN_SPREAD] * len(prompts)])

        def log_ms(p: Parameters) -> Floats:
            line = (rows.ms(p, n)[which] * weights).sum(axis=1)
            first = rows.first_token_ms(p, lengths)[of_prompt, 0]
            return np.asarray(np.log(np.maximum(np.concatenate([line, first]), _LEAST_MS)))

        def residuals(theta: Floats) -> Floats:
            off = (log_ms(rows.parameters(theta, design)) - logs) / spreads
            return np.concatenate([off, (theta - mean) / sd])

        def jacobian(theta: Floats) -> Floats:
            by_term = _slopes(log_ms, rows.parameters(theta, design), picked)
            return np.vstack([by_term / spreads[:, None], np.diag(1 / sd)])

        far = [far_of(examples[i].traits) for i in (*which, *of_prompt)]
        scales = np.array([*far, *[robust.NORMAL] * len(mean)])
        self._theta, self._covariance = robust.fitted(residuals, jacobian, mean, scales)
