"""The study's tables: which figure stands in which column, how it is written, and what it means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from harness.dataset.study import Row, bounds, failure, figure
from harness.report.contexts import held

Text = Callable[[Row, str], str]
NONE = "-"
NOT_HELD = ", not held"  # beside a length that the memory cannot hold
W_SAID = (
    "tokens of context per further ms; not identifiable: the slope cannot be told from none; not applicable: "
    "a static cache is read whole at every step"
)


def number(row: Row, key: str, form: str = "{:.2f}", unit: float = 1.0) -> str:
    value = figure(row, key)
    if value is not None:
        return form.format(value / unit)
    given = row.get(key)  # such as 100000+ of a published table
    return given if isinstance(given, str) and given else NONE


def interval(row: Row, key: str, digits: int = 2) -> str:
    """`12.1 to 12.4`; `> 12.1` or `< 12.4` where it is open."""
    low, high = bounds(row, key)
    if low is None and high is None:
        return NONE
    if low is None or high is None:
        return f"< {high:,.{digits}f}" if low is None else f"> {low:,.{digits}f}"
    return f"{low:,.{digits}f} to {high:,.{digits}f}"


def word(row: Row, key: str) -> str:
    value = row.get(key)
    return NONE if value is None or value == "" else str(value)


def state(row: Row) -> str:
    """`ok 3/3`, or what became of it; `ok 3/3 (2 disturbed)` where the machine disturbed two attempts;
    `reported` where someone published it."""
    status = str(row.get("status"))
    if row.get("kind") == "reported":
        return "reported" if status == "ok" else f"reported {status}"
    repeats = row.get("repeats")
    if not repeats:
        return status
    disturbed = row.get("disturbed_attempts")
    return f"{status} {row.get('repeats_ok') or 0}/{repeats}" + (
        f" ({disturbed} disturbed)" * bool(disturbed)
    )


def hidden(row: Row) -> bool:
    """Whether there is a line, but no slope to be told from none."""
    return row.get("W_identifiable") is False and figure(row, "B_ms") is not None


def W(row: Row, key: str) -> str:
    if hidden(row):
        return "not applicable" if row.get("kv_read") == "full" else "not identifiable"
    return number(row, key, "{:,.0f}")


def W_share(row: Row, key: str) -> str:
    return NONE if hidden(row) else number(row, key, "{:.0%}")


def W_declared_share(row: Row, key: str) -> str:
    """Only where the cache is read more than once: else it is the share of the ideal."""
    return W_share(row, key) if row.get("kv_read") == "copied" else NONE


def ratio_to_baseline(row: Row, key: str) -> str:
    here, there = figure(row, key), figure(row.get("baseline"), key)
    return NONE if here is None or not there else f"{here / there:.2f}x"


def of_baseline(row: Row, key: str, form: str = "{:.2f}") -> str:
    return number(row.get("baseline") or {}, key, form)


def slow_from(row: Row, key: str) -> str:
    value = figure(row, key)
    if value is not None:
        return f"{value:,.0f}"
    last = figure(row, "last_n")
    return f"not by {last:,.0f}" if last is not None else NONE


def tokens(row: Row, key: str) -> str:
    """A dash for none: of a reported row no series is known."""
    return number(row, key, "{:,.0f}") if row.get(key) else NONE


def longest(row: Row, key: str) -> str:
    """`36,076`; `100,000+` where a target was reached and nothing beyond was tried; `not held` beside what
    the memory cannot hold."""
    return number(row, key, "{:,.0f}") + "+" * bool(row.get("max_ctx_is_target")) + NOT_HELD * (not held(row))


def segments(row: Row, key: str) -> str:
    """`26 to 2,048: B 12.10, W 900; 2,049 to 9,999: B 14.10, flat`; a single segment is the line of the
    other table."""
    found: Sequence[Mapping[str, object]] = row.get(key) or []
    if len(found) < 2:
        return NONE
    parts = (
        f"{number(s, 'from_n', '{:,.0f}')} to {number(s, 'to_n', '{:,.0f}')}: B {number(s, 'B_ms')}, "
        + ("flat" if s.get("flat") else f"W {number(s, 'W_tokens_per_ms', '{:,.0f}')}")
        for s in found
    )
    return "; ".join(parts)


def spikes(row: Row, key: str) -> str:
    found = row.get(key) or {}
    if not found.get("count"):
        return NONE
    period = number(found, "period_tokens", " every {:,.0f}")
    return f"{found['count']} of {number(found, 'size_ms', '{:.1f}')} ms" + (period if period != NONE else "")


def flags(row: Row, key: str) -> str:
    return ", ".join(dict.fromkeys(str(flag.get("code")) for flag in row.get(key) or [])) or NONE


@dataclass(frozen=True)
class Column:
    """`text`: how a cell is written. `telling`: a failed cell says here what became of it."""

    heading: str
    key: str
    text: Text
    meaning: str
    telling: bool = False
    numeric: bool = True


def _number(
    heading: str, key: str, form: str, meaning: str, unit: float = 1.0, telling: bool = False
) -> Column:
    return Column(heading, key, partial(number, form=form, unit=unit), meaning, telling)


def _mb(heading: str, key: str, meaning: str) -> Column:
    return _number(heading, key, "{:,.0f}", meaning, 1e6)


SPEED: tuple[Column, ...] = (
    _number("Nominal", "nominal_bits", "{:.0f}", "bits that the type's name promises"),
    _number("BPW", "bpw", "{:.2f}", "bits per weight: all tensors over the parameters"),
    _number("perplexity", "perplexity", "{:.2f}", "as measured or reported; less is better"),
    _number("TTFT ms", "ttft_ms", "{:.1f}", "time to the first token: the prompt's prefill", telling=True),
    Column("W tok/ms", "W_tokens_per_ms", W, W_SAID, telling=True),
    Column("W 95%", "W_ci95", partial(interval, digits=0), "95% interval of W"),
    Column("W of sheet", "W_ratio", W_share, "share of the W that the data sheet's bandwidth allows"),
    Column(
        "W of measured", "W_measured_ratio", W_share, "the same of the bandwidth measured on this machine"
    ),
    Column(
        "W of sheet, copied",
        "W_declared_ratio",
        W_declared_share,
        "the same of the data sheet's, for a cache that each step copies: read twice and written once",
    ),
    Column(
        "W of measured, copied",
        "W_declared_measured_ratio",
        W_declared_share,
        "the same of the bandwidth measured on this machine",
    ),
    _number("B ms", "B_ms", "{:.2f}", "latency at zero context", telling=True),
    Column("B 95%", "B_ci95_ms", interval, "95% interval of B"),
    _number(
        "B as w16", "B_as_w16_ms", "{:.2f}", "B x 16 / BPW: what 16-bit weights would take at this rate, ms"
    ),
    _number("B of sheet", "B_ratio", "{:.0%}", "share of the data sheet's bandwidth that B reaches"),
    _number(
        "B of measured", "B_measured_ratio", "{:.0%}", "the same of the bandwidth measured on this machine"
    ),
    _number("tok/s", "tokens_per_s", "{:.1f}", "over all decoded tokens"),
    Column("tok/s 95%", "tokens_per_s_ci95", partial(interval, digits=1), "95% interval of tok/s"),
    _number("tok/s start", "start_tokens_per_s", "{:.1f}", "over the first 128 tokens"),
    _number("tok/s end", "end_tokens_per_s", "{:.1f}", "over the last 128 tokens"),
    Column(
        "50 ms from n", "slow_from_n", slow_from, "position from which a token takes over 50 ms (20 tok/s)"
    ),
    Column("B baseline", "B_ms", of_baseline, "B of the baseline, ms"),
    Column("B / baseline", "B_ms", ratio_to_baseline, "B here over B of the baseline"),
    Column("W baseline", "W_tokens_per_ms", partial(of_baseline, form="{:,.0f}"), "W of the baseline"),
    Column("W / baseline", "W_tokens_per_ms", ratio_to_baseline, "W here over W of the baseline"),
)
MEMORY: tuple[Column, ...] = (
    _mb("file MB", "file_bytes", "the file's size"),
    _mb("tensors MB", "model_bytes", "all tensors: as loaded where the stack counts its own, else as stored"),
    _mb("MB/token", "weight_bytes_per_token", "weights that one decode step reads"),
    _number("KV KB/token", "kv_bytes_per_token", "{:,.1f}", "KV cache of a token", 1e3),
    _mb("after load MB", "loaded_bytes", "taken once the model is loaded"),
    _mb("peak RSS MB", "peak_rss_bytes", "the worker's highest resident memory"),
    _mb("peak VRAM MB", "peak_vram_bytes", "the highest video memory"),
    _mb("peak allocator MB", "peak_allocator_bytes", "the highest that the stack's allocator gave out"),
    Column(
        "cache read",
        "kv_read",
        word,
        "how a step reads the KV cache: padded256, once, in steps of 256; copied at each step; full, always",
        numeric=False,
    ),
    _mb("KV buffer MB", "kv_buffer_bytes", "the KV cache as the stack allocates it"),
    _mb("compute buffer MB", "compute_buffer_bytes", "what the stack computes in"),
    _number(
        "n_ctx",
        "n_ctx",
        "{:,.0f}",
        "tokens of context allocated, as the stack rounds it; - for a cache that grows",
    ),
    Column(
        "longest context",
        "max_ctx",
        longest,
        "tokens of context reached, or that fit; +: a target; not held: more than the memory holds",
        telling=True,
    ),
)
SHAPE: tuple[Column, ...] = (
    Column("tokens", "tokens", tokens, "decoded in a repeat", telling=True),
    Column(
        "shape",
        "shape",
        word,
        "which shape latency(n) has; short: under 2,048 tokens, too few to tell",
        numeric=False,
    ),
    Column("segments", "segments", segments, "lines of a hinge or a mode change", numeric=False),
    Column("spikes", "spikes", spikes, "single tokens far above their neighbours"),
    _number("B robust", "robust_B_ms", "{:.2f}", "B of a line that spikes do not move, where it differs, ms"),
    _number("W robust", "robust_W_tokens_per_ms", "{:,.0f}", "W of that line"),
    _number("fixed ms", "fixed_ms", "{:.2f}", "of each token, what does not shrink with the bytes read"),
    Column("dominated by", "dominated_by", word, "the larger part of B: fixed cost, or bytes", numeric=False),
    _number("of bandwidth", "bandwidth_share", "{:.0%}", "bytes read per second, of the rate measured here"),
    _number("J/token", "joules_per_token", "{:.3g}", "energy of the whole device in decode; docs/sensors.md"),
    _number("hottest °C", "hottest_c", "{:.0f}", "the device's highest temperature in the timed part"),
    _number("clock MHz", "median_clock_mhz", "{:,.0f}", "the device's clock in the timed part, the median"),
    Column("flags", "flags", flags, "what to know about the figures; details below", numeric=False),
)
TABLES = {"Speed": SPEED, "Memory": MEMORY, "Shape and cost": SHAPE}


def cell(row: Row, column: Column) -> str:
    """One figure as text; where there is none, what became of the cell, or a dash."""
    text = column.text(row, column.key)
    return (failure(row) or NONE) if text == NONE and column.telling else text


def used(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Without those that no row has a figure for."""
    return [c for c in columns if any(c.text(row, c.key) != NONE for row in rows)]
