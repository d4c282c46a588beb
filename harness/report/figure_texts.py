"""The figures of a row as the tables write them, one function for each kind of column."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.analysis.columns import (
    Cell,
    Counted,
    Ends,
    FlagRow,
    Repeat,
    Result,
    SegmentRow,
    ShownCell,
    Spikes,
)
from harness.analysis.figures import Figure
from harness.analysis.warnings import Warnings
from harness.dataset.study import bounds, finite, provisional
from harness.report.text_table import NONE, formatted
from harness.theory import floors

PAST_TRAINING = ", past training"  # follows a length beyond the trained context
NOT_IDENTIFIABLE = "not identifiable"
NOT_HELD = ", not held"  # follows a length that the memory cannot hold
TOO_FAST = ", too fast"  # follows a TTFT below the time that reading the weights takes


def number(value: float | None, form: str = "{:.2f}", unit: float = 1.0) -> str:
    return formatted(finite(value), form, unit)


def quality(row: Repeat, figure: Figure) -> str:
    """A figure of a score; without one the status of the score, or `not scored`."""
    text, state = number(figure.number(row), figure.form), row["quality"]
    return text if text != NONE or state in (None, "ok") else str(state)


def peak_memory(row: Repeat) -> str:
    """Peak memory in MB: on a CPU the resident set, on a GPU the device's, else the allocator's."""
    if row["device"] == "cpu":
        return _megabytes(row["peak_rss_bytes"])
    device = _megabytes(row["peak_vram_bytes"])
    return device if device != NONE else _megabytes(row["peak_allocator_bytes"])


def mbu(row: Repeat) -> str:
    """`33%`; `19 to 33%` where the measured bandwidth is not stable."""
    if ends := row["bandwidth_share_range"]:
        return f"{100 * (ends[0] or 0):.0f} to {number(ends[1], '{:.0%}')}"
    return number(row["bandwidth_share"], "{:.0%}")


def _megabytes(value: float | None) -> str:
    return number(value, "{:,.0f}", 1e6)


def interval(ends: Ends | None, digits: int = 2) -> str:
    """`12.1 to 12.4`; `> 12.1` or `< 12.4` where it is open."""
    low, high = bounds(ends)
    if low is None and high is None:
        return NONE
    if low is None or high is None:
        return f"< {high:,.{digits}f}" if low is None else f"> {low:,.{digits}f}"
    return f"{low:,.{digits}f} to {high:,.{digits}f}"


def plus_minus(value: float | None, ends: Ends | None) -> str:
    """`61.0 ±0.4`: with the farther end of its 95% confidence interval, where that has two ends."""
    low, high = bounds(ends)
    if value is None or low is None or high is None:
        return number(value, "{:,.1f}")
    return f"{value:,.1f} ±{max(high - value, value - low):.1f}"


def state(row: Counted) -> str:
    """The status: `ok 3/3`; `ok 3/3 (2 disturbed)` where other processes disturbed two attempts; `provisional
    0/3` where they disturbed all; `reported` for a published figure."""
    status = row["status"]
    if provisional(row):
        return f"provisional 0/{row['repeats']}"
    if row["kind"] == "reported":
        return "reported" if status == "ok" else f"reported {status}"
    if not row["repeats"]:
        return status
    disturbed = row["disturbed_attempts"]
    counts = f"{status} {row['repeats_ok']}/{row['repeats']}"
    return counts + (f" ({disturbed} disturbed)" * bool(disturbed))


def held(row: Cell) -> bool:
    """Whether the device can hold the context that the cell reached. A cache that drops tokens can run past
    its memory."""
    reached, most = row["max_ctx"], theory_n_ctx(row, row["device_memory_bytes"])
    return reached is None or most is None or reached <= most


def theory_n_ctx(row: Result, memory_bytes: float | None) -> int | None:
    """Tokens of KV cache that fit in a memory together with the weights; 0 if none fit, None if sizes are
    unknown. On a GPU only the weights read per token count: an input embedding may stay outside."""
    weights = (row["model_bytes"] if row["device"] == "cpu" else None) or row["weight_bytes_per_token"]
    kv = row["kv_bytes_per_token"]
    if memory_bytes is None or weights is None or not kv:
        return None
    return floors.max_ctx(memory_bytes, weights, kv) or 0


def hidden(row: Repeat) -> bool:
    """Whether there is a line whose slope is not distinguishable from zero."""
    has_line = row["slope_ms"] is not None or row["B_ms"] is not None
    return row["W_identifiable"] is False and has_line


def B(row: Repeat) -> str:
    """B, or `not identifiable`: the interval or a flag has the reason; see flags.withhold."""
    withheld = row["B_ms"] is None and row["slope_ms"] is not None
    return NOT_IDENTIFIABLE if withheld else number(row["B_ms"])


def W(row: Repeat) -> str:
    if hidden(row):
        return "not applicable" if row["kv_read"] == "full" else NOT_IDENTIFIABLE
    return number(row["W_tokens_per_ms"], "{:,.0f}")


def W_share(row: Repeat, share: float | None) -> str:
    return NONE if hidden(row) else number(share, "{:.0%}")


def W_declared_share(row: Repeat, share: float | None) -> str:
    """The share where each step copies the cache; else it equals W_share, and is not shown."""
    return W_share(row, share) if row["kv_read"] == "copied" else NONE


def ratio_to_baseline(here: float | None, there: float | None) -> str:
    here, there = finite(here), finite(there)
    return NONE if here is None or not there else f"{here / there:.2f}x"


def of_baseline(row: ShownCell, figure: Callable[[Cell], float | None]) -> float | None:
    """A figure of the baseline; None without one."""
    return figure(row["baseline"]) if row["baseline"] else None


def slow_from(row: Repeat) -> str:
    if row["slow_from_n"] is not None:
        return f"{row['slow_from_n']:,.0f}"
    return f"not by {row['last_n']:,.0f}" if row["last_n"] is not None else NONE


def longest(row: Cell) -> str:
    """`36,076`; `100,000+` where a target was reached and nothing longer was tried; `not held` where
    the memory cannot hold that many tokens; `past training` where the model was trained on shorter ones."""
    length = number(row["max_ctx"], "{:,.0f}") + "+" * bool(row["max_ctx_is_target"])
    return length + NOT_HELD * (not held(row)) + PAST_TRAINING * bool(past_training(row["flags"]))


def past_training(raised: Sequence[FlagRow]) -> list[str]:
    """Why a length is beyond the trained context, in one sentence; empty where it is not."""
    code = Warnings.beyond_trained_context.name
    return [flag["detail"] for flag in raised if flag["code"] == code]


def ttft(row: Repeat) -> str:
    """`68.2`; `2.3, too fast` where the weights cannot have been read in that time."""
    code = Warnings.first_token_faster_than_limit.name
    faster = any(flag["code"] == code for flag in row["flags"])
    text = number(row["ttft_ms"], "{:.1f}")
    return text if text == NONE else text + TOO_FAST * faster


def segments(rows: Sequence[SegmentRow]) -> str:
    """`26 to 2,048: B 12.10, W 900; 2,049 to 9,999: B 14.10, flat`; a dash for a single segment, which is
    the line of the speed table."""
    if len(rows) < 2:
        return NONE
    lines = (
        f"{s['from_n']:,} to {s['to_n']:,}: B {number(s['B_ms'])}, "
        + ("flat" if s["flat"] else f"W {number(s['W_tokens_per_ms'], '{:,.0f}')}")
        for s in rows
    )
    return "; ".join(lines)


def spikes(row: Spikes) -> str:
    if not row["count"]:
        return NONE
    period = number(row["period_tokens"], " every {:,.0f}")
    return f"{row['count']} of {number(row['size_ms'], '{:.1f}')} ms" + (period if period != NONE else "")


def flags(row: Repeat) -> str:
    return ", ".join(dict.fromkeys(flag["code"] for flag in row["flags"])) or NONE
