"""What cells are ranked by: speed, size and quality, with the ends of their intervals. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from harness.analysis.columns import Cell
from harness.analysis.quality_figures import EQUAL_KLD
from harness.base import text
from harness.dataset.study import bounds, finite
from harness.report.ranked_groups import Named

# Half of a 95% interval, as a share of the figure.
SPEED_NOISE = 0.02  # of one run; repeats on an idle machine differ by about 1%
MEMORY_NOISE = 0.01  # RSS of repeats of one cell
# llama.cpp prints 6.2332 +/- 0.0378 for Llama 3 8B on the test part of wikitext-2: a standard error of 0.6%
# (ggml-org/llama.cpp, pull request 6936).
PERPLEXITY_NOISE = 0.012
STANDARD_ERRORS = 1.96
LEAST_KLD = 1e-6  # nats; figures draw what is less here: 16 bits differ by rounding alone
Value = tuple[float, float, float]
"""A figure and the ends of its 95% interval."""


@dataclass(frozen=True)
class Measure:
    """`name`: what a cell without the figure lacks. `of`: a cell's figure; None without one. `number`: writes
    it, `unit`: what stands around it. `most`: the highest is the best."""

    name: str
    of: Callable[[Cell], Value | None]
    number: Callable[[float], str]
    unit: str = "{}"
    most: bool = False

    def text(self, *values: float) -> str:
        """`90.0 tok/s`, or of several figures `89.0 to 90.0 tok/s`."""
        ends = dict.fromkeys((self.number(min(values)), self.number(max(values))))
        return self.unit.format(" to ".join(ends))


def with_noise(value: float, noise: float) -> Value:
    """A figure with this relative noise."""
    return value, value * (1 - noise), value * (1 + noise)


def rate(row: Cell, by_B: bool) -> tuple[float | None, float | None, float | None]:
    """Tokens per second with the ends of their 95% interval, None where unknown. `by_B`: at zero context."""
    if not by_B:
        return finite(row["tokens_per_s"]), *bounds(row["tokens_per_s_ci95"])
    fast, slow = (1e3 / end if end else None for end in bounds(row["B_ci95_ms"]))
    value = finite(row["B_ms"])
    return (1e3 / value if value and B_identifiable(row) else None), slow, fast


def B_identifiable(row: Cell) -> bool:
    """Whether B is more than an extrapolation: an identifiable or flat line, or a published figure."""
    line = row["W_identifiable"] is True or row["shape"] == "flat"
    return line or (row["kind"] == "reported" and not row["shape"])


def speed_is_B(named: Named) -> bool:
    """Whether speeds compare by B: more cells have an identifiable one than tok/s over as many tokens."""
    by_tokens = Counter(row["tokens"] for _, row in named if finite(row["tokens_per_s"]) is not None)
    at_zero = sum(finite(row["B_ms"]) is not None and B_identifiable(row) for _, row in named)
    return at_zero > max(by_tokens.values(), default=0)


def measure_of_speed(named: Named) -> Measure:
    """Of any number of tokens; at zero context where speeds compare by B."""
    by_B = speed_is_B(named)
    unit = "{} tok/s at zero context" if by_B else "{} tok/s"
    return Measure("speed", lambda row: _noisy(row, *rate(row, by_B)), "{:,.1f}".format, unit, most=True)


def measure_of_comparable_speed(named: Named) -> Measure:
    """Of the number of tokens that most cells decoded: rates over others do not compare."""
    measure = measure_of_speed(named)
    if speed_is_B(named):
        return measure
    by_tokens = Counter(row["tokens"] for _, row in named if measure.of(row))
    tokens = next((tokens for tokens, _ in by_tokens.most_common(1)), None)
    over = f" over {tokens:,} tokens" if tokens is not None else ""
    return replace(
        measure, name=f"speed{over}", of=lambda row: measure.of(row) if row["tokens"] == tokens else None
    )


def _noisy(row: Cell, value: float | None, low: float | None, high: float | None) -> Value | None:
    """A speed with its interval. That of a single run ignores run-to-run noise, so it is at least
    SPEED_NOISE; several runs without one are too few for it."""
    if value is None:
        return None
    _, least, most = with_noise(value, SPEED_NOISE)
    if low is None and high is None:
        return (value, 0.0, math.inf) if row["repeats"] > 1 else (value, least, most)
    low, high = low or 0.0, math.inf if high is None else high
    return (value, low, high) if row["repeats"] > 1 else (value, min(low, least), max(high, most))


@dataclass(frozen=True)
class SizeMeasure:
    """A figure of memory or of a file, by its key in a row."""

    key: str
    name: str
    noise: float

    def of(self, row: Mapping[str, object]) -> float | None:
        value = row[self.key]
        return value if isinstance(value, (int, float)) else None


# Cells are ranked by the first measure that the most of them have.
SIZES = (
    SizeMeasure("peak_vram_bytes", "peak VRAM", MEMORY_NOISE),
    SizeMeasure("peak_rss_bytes", "peak RSS", MEMORY_NOISE),
    SizeMeasure("loaded_bytes", "after load", MEMORY_NOISE),
    SizeMeasure("file_bytes", "file", 0.0),
    SizeMeasure("model_bytes", "tensors", 0.0),
)


def size_measure(named: Named) -> SizeMeasure:
    """The measure of size that the most cells have."""
    return max(SIZES, key=lambda size: sum(bool(size.of(row)) for _, row in named))


def measure_of_size(size: SizeMeasure) -> Measure:
    def of(row: Cell) -> Value | None:
        value = size.of(row)
        return with_noise(value, size.noise) if value else None

    return Measure(f"size ({size.name})", of, text.sized, f"{{}} {size.name}")


def quality_is_kld(named: Named) -> bool:
    """Whether qualities compare by KL divergence, whose interval is far narrower than a perplexity's: as many
    cells have one."""
    divergences = sum(row["kld_mean"] is not None for _, row in named)
    return bool(divergences) and divergences >= sum(row["perplexity"] is not None for _, row in named)


def _perplexity(row: Cell) -> Value | None:
    value, error = row["perplexity"], row["perplexity_stderr"]
    if value is None:
        return None
    return with_noise(value, STANDARD_ERRORS * error / value if error else PERPLEXITY_NOISE)


def _divergence(row: Cell) -> Value | None:
    """A KL divergence with its interval; one below EQUAL_KLD is as good as none."""
    value, (low, high) = row["kld_mean"], bounds(row["kld_mean_ci95"])
    if value is None:
        return None
    if low is None or high is None:
        return value, 0.0, math.inf
    return (value, 0.0, max(high, EQUAL_KLD)) if value < EQUAL_KLD else (value, low, high)


PERPLEXITY = Measure("perplexity", _perplexity, "{:.2f}".format, "perplexity {}")
KLD = Measure("KLD", _divergence, lambda kld: "under 0.00001" if kld < 1e-5 else f"{kld:.5f}", "KLD {}")


def measure_of_quality(named: Named) -> Measure:
    return KLD if quality_is_kld(named) else PERPLEXITY
