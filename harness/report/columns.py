"""The tables of the page: their columns, how each is written, and what it means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from harness.dataset.study import Row, failure
from harness.report.cell_text import (
    B,
    W,
    W_declared_share,
    W_share,
    flags,
    interval,
    longest,
    number,
    of_baseline,
    peak_memory,
    quality,
    ratio_to_baseline,
    segments,
    slow_from,
    spikes,
    tokens,
    ttft,
    word,
)
from harness.report.table import NONE

Text = Callable[[Row, str], str]
B_MEANING = "TPOT extrapolated to zero context; not identifiable: its 95% interval exceeds 10% to each side"
W_MEANING = (
    "tokens of context per further ms of TPOT; not identifiable: slope not distinguishable from zero, or"
    " fewer than 2,049 tokens; not applicable: every step reads the whole of a static cache"
)


@dataclass(frozen=True)
class Column:
    """`text`: formats a cell. `shows_failure`: a failed cell shows its status here."""

    heading: str
    key: str
    text: Text
    meaning: str
    shows_failure: bool = False
    numeric: bool = True


def _number(
    heading: str, key: str, form: str, meaning: str, unit: float = 1.0, shows_failure: bool = False
) -> Column:
    return Column(heading, key, partial(number, form=form, unit=unit), meaning, shows_failure)


def _quality(heading: str, key: str, form: str, meaning: str) -> Column:
    return Column(heading, key, partial(quality, form=form), meaning)


def _mb(heading: str, key: str, meaning: str) -> Column:
    return _number(heading, key, "{:,.0f}", meaning, 1e6)


# Beside speed and quality in one line.
PEAK = Column("peak MB", "", peak_memory, "peak memory: resident set on a CPU, else VRAM")
SPEED: tuple[Column, ...] = (
    _number("Nominal", "nominal_bits", "{:.0f}", "bits in the name of the type"),
    _number("BPW", "bpw", "{:.2f}", "bits per weight: bits of all tensors over the number of parameters"),
    _number("perplexity", "perplexity", "{:.2f}", "as measured or reported; lower is better"),
    _quality("KLD", "kld_mean", "{:.5f}", "mean KL divergence from the 16-bit weights, nats per token"),
    Column("KLD 95%", "kld_mean_ci95", partial(interval, digits=5), "95% confidence interval of the KLD"),
    _quality("top-1", "top1", "{:.1%}", "tokens that it and the 16-bit weights rank first"),
    Column(
        "TTFT ms",
        "ttft_ms",
        ttft,
        "time to first token: prefill of the prompt; too fast: the weights cannot be read in that time",
        shows_failure=True,
    ),
    Column("W tok/ms", "W_tokens_per_ms", W, W_MEANING, shows_failure=True),
    Column("W 95%", "W_ci95", partial(interval, digits=0), "95% confidence interval of W"),
    Column("W MBU, spec", "W_ratio", W_share, "W over the W at the bandwidth of the data sheet"),
    Column(
        "W MBU, measured",
        "W_measured_ratio",
        W_share,
        "W over the W at the bandwidth measured on this machine",
    ),
    Column(
        "W MBU, spec, copied",
        "W_declared_ratio",
        W_declared_share,
        "W MBU, spec, for a cache that each step copies: reads it twice and writes it once",
    ),
    Column(
        "W MBU, measured, copied",
        "W_declared_measured_ratio",
        W_declared_share,
        "the same at the bandwidth measured on this machine",
    ),
    Column("B ms", "B_ms", B, B_MEANING, shows_failure=True),
    Column("B 95%", "B_ci95_ms", interval, "95% confidence interval of B"),
    _number(
        "B as 16-bit",
        "B_as_w16_ms",
        "{:.2f}",
        "B x 16 / BPW: the B of 16-bit weights at the same bandwidth, ms",
    ),
    _number(
        "B MBU, spec",
        "B_ratio",
        "{:.0%}",
        "model bandwidth utilisation at B, of the bandwidth of the data sheet",
    ),
    _number(
        "B MBU, measured", "B_measured_ratio", "{:.0%}", "the same, of the bandwidth measured on this machine"
    ),
    _number("tok/s", "tokens_per_s", "{:.1f}", "over all decoded tokens"),
    Column("tok/s 95%", "tokens_per_s_ci95", partial(interval, digits=1), "95% confidence interval of tok/s"),
    _number("tok/s start", "start_tokens_per_s", "{:.1f}", "over the first 128 tokens"),
    _number("tok/s end", "end_tokens_per_s", "{:.1f}", "over the last 128 tokens"),
    Column("50 ms from n", "slow_from_n", slow_from, "position n from which TPOT exceeds 50 ms (20 tok/s)"),
    Column("B baseline", "B_ms", of_baseline, "B of the baseline, ms"),
    Column("B / baseline", "B_ms", ratio_to_baseline, "B over the B of the baseline"),
    Column("W baseline", "W_tokens_per_ms", partial(of_baseline, form="{:,.0f}"), "W of the baseline"),
    Column("W / baseline", "W_tokens_per_ms", ratio_to_baseline, "W over the W of the baseline"),
)
MEMORY: tuple[Column, ...] = (
    _mb("file MB", "file_bytes", "size of the file"),
    _mb("tensors MB", "model_bytes", "all tensors: as loaded where the stack reports that, else as stored"),
    _mb("MB/token", "weight_bytes_per_token", "weights that one decode step reads"),
    _number("KV KB/token", "kv_bytes_per_token", "{:,.1f}", "KV cache per token", 1e3),
    _mb("after load MB", "loaded_bytes", "memory in use after the model is loaded"),
    _mb("peak RSS MB", "peak_rss_bytes", "peak resident set size of the worker"),
    _mb("peak VRAM MB", "peak_vram_bytes", "peak VRAM"),
    _mb(
        "peak allocator MB", "peak_allocator_bytes", "peak memory that the allocator of the stack handed out"
    ),
    Column(
        "cache read",
        "kv_read",
        word,
        "how a decode step reads the KV cache. padded256: once, in steps of 256 tokens; copied: copies it at "
        "each step; full: all of a static cache",
        numeric=False,
    ),
    _mb("KV buffer MB", "kv_buffer_bytes", "KV cache as the stack allocates it"),
    _mb("compute buffer MB", "compute_buffer_bytes", "compute buffers of the stack"),
    _number(
        "n_ctx",
        "n_ctx",
        "{:,.0f}",
        "context length allocated, as the stack rounds it; - for a cache that grows",
    ),
    Column(
        "longest context",
        "max_ctx",
        longest,
        "tokens of context reached, or that fit; +: stopped at a target; not held: more than fits in memory",
        shows_failure=True,
    ),
)
SHAPE: tuple[Column, ...] = (
    Column("tokens", "tokens", tokens, "tokens decoded per repeat", shows_failure=True),
    Column(
        "shape",
        "shape",
        word,
        "shape of latency(n); short: under 2,048 tokens, too few to determine it",
        numeric=False,
    ),
    Column(
        "segments", "segments", segments, "line of each segment of a hinge or a mode change", numeric=False
    ),
    Column("spikes", "spikes", spikes, "single tokens with a latency far above their neighbours"),
    _number(
        "B robust",
        "robust_B_ms",
        "{:.2f}",
        "B of a robust fit, which ignores spikes, ms; shown where it differs",
    ),
    _number("W robust", "robust_W_tokens_per_ms", "{:,.0f}", "W of the robust fit"),
    _number(
        "fixed ms",
        "fixed_ms",
        "{:.2f}",
        "fixed cost per token: the part that does not shrink with the bytes read",
    ),
    Column(
        "dominated by",
        "dominated_by",
        word,
        "the larger part of B: fixed cost, or reading bytes",
        numeric=False,
    ),
    _number(
        "drift",
        "drift",
        "{:+.1%}",
        "by how much longer the first tokens took when decoded again after the run; B and W are without it",
    ),
    _number("MBU", "bandwidth_share", "{:.0%}", "all bytes read per second over the bandwidth measured here"),
    _number(
        "J/token",
        "joules_per_token",
        "{:.3g}",
        "energy of the whole device during decode; see docs/sensors.md",
    ),
    _number("hottest °C", "hottest_c", "{:.0f}", "highest temperature of the device during the timed part"),
    _number("clock MHz", "median_clock_mhz", "{:,.0f}", "median clock of the device during the timed part"),
    Column("flags", "flags", flags, "warnings about the figures; details below", numeric=False),
)
TABLES = {"Speed": SPEED, "Memory": MEMORY, "Shape and cost": SHAPE}


def cell(row: Row, column: Column) -> str:
    """One figure as text; without one, the status of a failed cell, or a dash."""
    text = column.text(row, column.key)
    return (failure(row) or NONE) if text == NONE and column.shows_failure else text


def used(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns for which at least one row has a figure."""
    return [c for c in columns if any(c.text(row, c.key) != NONE for row in rows)]
