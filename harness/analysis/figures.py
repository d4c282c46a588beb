"""The figures: the one place that knows each figure's place, column, heading, unit, meaning, and use.

A row has every figure under its name. Rows of repeats and cells, SQL, CSV files, tables in a terminal and on
the page, the card, nights, history and `compare` go through FIGURES in its order, the most important first.
A figure needs nothing but its entry; columns.Repeat declares those that code computes with.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import numpy as np
from typing_extensions import NotRequired, Required, get_type_hints

from harness.analysis.columns import (
    SECTIONS,
    AnyRow,
    Cell,
    JudgedRepeat,
    Repeat,
    SpeculationRow,
    is_score,
    is_search,
    no_spikes,
)
from harness.analysis.line_fit import block_spread
from harness.analysis.speculation import acceptance_length, acceptance_rate
from harness.analysis.verdicts import USABLE
from harness.base.files import TABLE_OF
from harness.base.lookup import value_at

Row = Mapping[str, object]
Table = Literal["Speed", "Memory", "Shape and cost"]
TABLES: tuple[Table, ...] = ("Speed", "Memory", "Shape and cost")
Family = Literal["slower", "memory", "energy", "context", "quality"]
VERDICTS: Mapping[Family, tuple[str, str]] = {
    "slower": ("SLOWER", "FASTER"),
    "memory": ("LARGER", "SMALLER"),
    "energy": ("COSTLIER", "CHEAPER"),
    "context": ("SHORTER", "LONGER"),
    "quality": ("WORSE", "BETTER"),
}
"""By the threshold that applies: what a change for the worse and for the better is called."""
FAMILIES: tuple[str, ...] = tuple(VERDICTS)
Csv = Literal["cells", "repeats"]
Shown = Literal["terminal", "first", "machines", "point", "card", "bundle"]
"""The tables of a terminal; the columns that a page's table begins with; the cells of several machines; the
text at a point of the page's picture; the card; what a bundle claims of its records."""
MB = 1e6


@dataclass(frozen=True)
class Figure:
    """One figure. `name`: its key in a row, and its column in SQL and CSV. `label`: its heading, empty if no
    table shows it. `form`, `scale`: how tables write it, divided by the scale. `table`: of the page.

    `path`: its place in a judged repeat (columns.JudgedRepeat), or a quotient of two places, as in
    `energy.joules / energy.tokens`; empty: its name. `read`: computes it from a row's columns instead.
    `compared`: its value where runs are compared, also in rows of searches and scores. `ends`: the key of its
    95% interval. `pool`: how the figures of a cell's repeats become one; last: the last repeat's, or a figure
    that cell_intervals.py computes; again: read from the pooled columns. `csv`: the CSV files that have it.

    `family`: the threshold of compare that applies; empty: it is not compared. `whole`: not compared for a
    `grow` workload, which may run longer. `inverse`: name and unit of 1,000 over it, for tools that know
    smaller-is-better alone.
    """

    name: str
    label: str
    meaning: str
    form: str = "{:,.2f}"
    scale: float = 1.0
    numeric: bool = True
    unit: str = ""
    table: Table | None = None
    shown: Sequence[Shown] = ()
    path: str = ""
    read: Callable[[Repeat], float | None] | None = None
    compared: Callable[[AnyRow], float | None] | None = None
    ends: str = ""
    pool: Literal["last", "median", "max", "again"] = "last"
    csv: Literal["", "repeats", "cells", "both"] = ""
    better: Literal["lower", "higher"] = "lower"
    family: Family | Literal[""] = ""
    whole: bool = False
    inverse: tuple[str, str] | None = None

    @property
    def short(self) -> str:
        """The label without its unit: `B`."""
        return self.label.removesuffix(" ms").removesuffix(" tok/ms")

    @property
    def statuses(self) -> tuple[str, ...]:
        """Of the rows that count: the speed of a functional stack means nothing; its memory and longest
        context do."""
        return ("ok",) if self.family == "slower" else USABLE

    @property
    def worse(self) -> str:
        return VERDICTS[self.family or "slower"][0]

    @property
    def improved(self) -> str:
        return VERDICTS[self.family or "slower"][1]

    def of(self, judged: Row) -> object:
        """The figure of a judged repeat, or of the columns of a cell; None: it has none."""
        if self.read:
            return self.read(cast(Repeat, judged))
        first, *others = [value_at(judged, path) for path in (self.path or self.name).split(" / ")]
        if not others:
            return first
        over = others[0]
        known = isinstance(first, (int, float)) and isinstance(over, (int, float)) and over > 0
        return first / over if known else None

    def number(self, row: Row) -> float | None:
        """The figure of a row, as tables show it."""
        value = row.get(self.name)
        return value if isinstance(value, (int, float)) else None

    def value(self, row: AnyRow) -> float | None:
        """The figure of a row of a repeat, a search or a score, as runs are compared; None: none, or not
        positive."""
        if self.whole and row.get("workload") == "grow":
            return None
        value = self.compared(row) if self.compared else self.number(row)
        return float(value) if value is not None and value > 0 else None

    def error(self, row: AnyRow) -> float | None:
        """The relative standard error within a repeat, from blocks of tokens; None: too few blocks."""
        if not self.ends or is_search(row) or is_score(row):
            return None
        low, high = cast("list[float | None] | None", value_at(row, self.ends)) or (None, None)
        if low is None or high is None or min(low, high) <= 0:
            return None
        spread = block_spread((math.log(high) - math.log(low)) / 2, row["n_tokens"] or 0)
        return math.sqrt(spread.variance) if spread else None

    def cost(self, value: float) -> float:
        """Logarithm of the figure or of its inverse, so that higher is worse. A difference of two costs is a
        relative change, and noise is symmetric."""
        return math.log(value) if self.better == "lower" else -math.log(value)

    def figure(self, cost: float) -> float:
        """The figure that has this cost."""
        return math.exp(cost if self.better == "lower" else -cost)

    def change(self, cost: float) -> float:
        """The relative change of the figure, new / base - 1, from a difference of costs."""
        return math.expm1(cost if self.better == "lower" else -cost)


def _slope(row: AnyRow) -> float | None:
    """W, where the slope is distinguishable from zero."""
    if is_search(row) or is_score(row):
        return None
    return row["W_tokens_per_ms"] if row["W_identifiable"] else None


def _peak_bytes(row: Repeat) -> float | None:
    """Peak memory: the resident set on a CPU; on a GPU the allocator's peak, else the device's. None for
    workloads of timed rows, whose memory includes copies of the context."""
    if row["workload"] in TABLE_OF:
        return None
    if row["device"] == "cpu":
        return row["peak_rss_bytes"]
    return row["peak_allocator_bytes"] or row["peak_vram_bytes"]


def _longest(row: AnyRow) -> float | None:
    """Longest context in tokens: of a search, or of a `grow` workload."""
    if is_score(row):
        return None
    return row["verified_n_ctx"] if is_search(row) else row["max_ctx"]


def _perplexity(row: AnyRow) -> float | None:
    """The perplexity of a score, from which rows of repeats take it."""
    return row["perplexity"] if is_score(row) else None


def _pass_ms(row: Repeat, n: int) -> float | None:
    """Time of a pass over n tokens at an empty cache: measured, or on the line between its neighbours."""
    passes = [prefill_pass for prefill_pass in row["passes"] if prefill_pass["depth"] == 0]
    if not passes or not passes[0]["n"] <= n <= passes[-1]["n"]:
        return None
    return float(
        np.interp(
            n, [prefill_pass["n"] for prefill_pass in passes], [prefill_pass["ms"] for prefill_pass in passes]
        )
    )


def _pp512(row: Repeat) -> float | None:
    ms = _pass_ms(row, 512)
    return 512e3 / ms if ms else None


def _at_16k(row: Repeat) -> float | None:
    depths = row["depths"] or {"at": [], "curved": False}
    return next((at["tokens_per_s"] for at in depths["at"] if at["depth"] == 16_384), None)


def _B_as_w16(row: Repeat) -> float | None:
    B_ms, bpw = row["B_ms"], row["bpw"]
    return B_ms * 16 / bpw if B_ms is not None and bpw else None


def _task_s(row: Repeat, kept: bool) -> float | None:
    return next((task["task_s"] for task in row["tasks"] if task["prefix_kept"] is kept), None)


def _guessed(row: Repeat, read: Callable[[SpeculationRow], float | None]) -> float | None:
    """A figure of the tokens that were guessed ahead; None where none may be."""
    return read(row["speculation"]) if row["speculation"] else None


# fmt: off
FIGURES: tuple[Figure, ...] = (
    Figure("tokens_per_s", "tok/s", "over all decoded tokens",
           form="{:,.1f}", unit="tok/s", table="Speed",
           shown=("terminal", "first", "machines", "card", "bundle"),
           ends="tokens_per_s_ci95", pool="median", csv="both", better="higher", family="slower",
           whole=True, inverse=("ms_per_token", "ms/token")),
    Figure("pp512", "pp512 tok/s", "prefill of 512 tokens at an empty cache, in tokens per second",
           form="{:,.0f}", unit="tok/s", shown=("terminal", "card"), read=_pp512, better="higher",
           csv="repeats", family="slower", inverse=("pp512_ms_per_token", "ms/token"), pool="again"),
    Figure("ttft_ms", "TTFT ms",
           "time to first token: prefill of the prompt; too fast: the weights cannot be read in that time",
           form="{:,.1f}", unit="ms", table="Speed",
           shown=("terminal", "first", "machines", "card", "bundle"),
           pool="median", csv="both", family="slower"),
    Figure("peak_vram_bytes", "peak VRAM MB", "peak VRAM of the worker",
           form="{:,.0f}", scale=MB, table="Memory", shown=("terminal", "first", "bundle"), csv="both"),
    Figure("peak_rss_bytes", "peak RSS MB", "peak resident set size of the worker",
           form="{:,.0f}", scale=MB, table="Memory", shown=("terminal", "first", "bundle"), pool="max",
           csv="both"),
    Figure("memory_bytes", "peak MB", "peak memory: resident set on a CPU, else VRAM",
           form="{:,.0f}", scale=MB, unit="bytes", table="Speed", shown=("first", "machines", "card"),
           read=_peak_bytes, family="memory", whole=True, pool="again"),
    Figure("watts", "watts", "mean power of the whole device during decode; see J/token",
           form="{:,.1f}", table="Shape and cost", shown=("terminal",), pool="median", csv="both",
           path="energy.joules / energy.window_s"),
    Figure("joules_per_token", "J/token",
           "energy of the whole device during decode, idle power included; see docs/reference/sensors.md",
           form="{:,.3g}", unit="J", table="Shape and cost",
           shown=("terminal", "machines", "point", "bundle"),
           pool="median", csv="both", family="energy", path="energy.joules / energy.tokens"),
    Figure("energy_price_per_mtok", "price/Mtok",
           "energy of a million decoded tokens at the price of --price, in its currency",
           form="{:,.3g}", table="Shape and cost", shown=("terminal",), csv="cells"),
    Figure("quality", "", "status of the variant's score on a text, or `not scored`",
           numeric=False, csv="cells"),
    Figure("perplexity", "perplexity", "as measured or reported; lower is better",
           table="Speed", shown=("terminal", "first", "machines", "point", "card"),
           csv="both", compared=_perplexity, family="quality", path="record.reported.perplexity"),
    Figure("kld_mean", "KLD", "mean KL divergence from the 16-bit weights, nats per token",
           form="{:,.5f}", table="Speed", shown=("terminal", "first", "machines", "point"),
           ends="kld_mean_ci95", csv="both"),
    Figure("top1", "top-1", "tokens that it and the 16-bit weights rank first",
           form="{:.1%}", table="Speed", shown=("terminal", "first", "point"), csv="both", better="higher"),
    Figure("B_ms", "B ms",
           "TPOT extrapolated to zero context; not identifiable: its 95% interval exceeds 10% to each side",
           unit="ms", table="Speed", shown=("terminal", "first", "machines", "point", "card", "bundle"),
           ends="B_ci95_ms", csv="both", family="slower"),
    Figure("W_tokens_per_ms", "W tok/ms",
           "tokens of context per further ms of TPOT; not identifiable: slope not distinguishable from "
           "zero, or fewer than 2,049 tokens; not applicable: every step reads the whole of a static cache",
           form="{:,.0f}", unit="tok/ms", table="Speed", shown=("terminal", "first", "machines", "bundle"),
           ends="W_ci95", csv="both", better="higher", family="slower",
           inverse=("us_per_token_of_context", "us/token"), compared=_slope),
    Figure("bpw", "BPW", "bits per weight: bits of all tensors over the number of parameters",
           table="Speed", shown=("terminal", "first", "machines", "point"), pool="median", csv="both"),
    Figure("bandwidth_share", "MBU",
           "all bytes read per second over the highest bandwidth measured in the run; where probes differ "
           "by more than a fifth, the bandwidth is not stable: over the highest to over the lowest",
           form="{:.0%}", table="Shape and cost", shown=("terminal", "first", "machines", "bundle"),
           pool="median",
           csv="both", better="higher"),
    Figure("weight_bytes_per_token", "MB/token", "weights that one decode step reads",
           form="{:,.0f}", scale=MB, table="Memory", shown=("terminal", "first"), pool="median", csv="both"),
    Figure("tokens", "tokens", "tokens decoded per repeat",
           form="{:,.0f}", table="Shape and cost", shown=("terminal", "first", "machines", "bundle"),
           csv="both", path="record.tokens"),
    Figure("joules_per_token_above_idle", "J/token above idle",
           "without the power of the idle device, measured before the first repeat",
           form="{:,.3g}", table="Shape and cost", shown=("terminal",), pool="median", csv="both",
           path="energy.joules_above_idle / energy.tokens"),
    Figure("start_tokens_per_s", "tok/s start", "over the first 128 tokens, of 256 or more",
           form="{:,.1f}", table="Speed", shown=("terminal",), pool="median", csv="both", better="higher"),
    Figure("end_tokens_per_s", "tok/s end", "over the last 128 tokens",
           form="{:,.1f}", table="Speed", shown=("terminal",), pool="median", csv="both", better="higher"),
    Figure("tokens_per_pass", "tok/pass",
           "tokens that a pass of the model gave, where some are guessed ahead",
           shown=("terminal",), read=lambda row: _guessed(row, acceptance_length), better="higher",
           pool="again"),
    Figure("accepted_share", "accepted", "guessed tokens that the model accepted",
           form="{:.0%}", shown=("terminal",), read=lambda row: _guessed(row, acceptance_rate),
           better="higher", pool="again"),
    Figure("nominal_bits", "Nominal", "bits in the name of the type",
           form="{:,.0f}", table="Speed", pool="median"),
    Figure("W_ratio", "W MBU, spec", "W over the W at the bandwidth of the data sheet",
           form="{:.0%}", table="Speed", pool="median", csv="both",
           path="known_W / limits.sheet.W_tokens_per_ms"),
    Figure("W_measured_ratio", "W MBU, measured",
           "W over the W at the highest bandwidth measured on this machine",
           form="{:.0%}", table="Speed", pool="median", csv="both",
           path="known_W / limits.measured.W_tokens_per_ms"),
    Figure("W_declared_ratio", "W MBU, spec, copied",
           "W MBU, spec, for a cache that each step copies: reads it twice and writes it once",
           form="{:.0%}", table="Speed", pool="median", csv="cells",
           path="known_W / limits.sheet.W_declared_tokens_per_ms"),
    Figure("W_declared_measured_ratio", "W MBU, measured, copied",
           "the same at the bandwidth measured on this machine",
           form="{:.0%}", table="Speed", pool="median", csv="cells",
           path="known_W / limits.measured.W_declared_tokens_per_ms"),
    Figure("B_as_w16_ms", "B as 16-bit", "B x 16 / BPW: the B of 16-bit weights at the same bandwidth, ms",
           read=_B_as_w16, table="Speed", pool="median", csv="cells"),
    Figure("B_ratio", "B MBU, spec", "model bandwidth utilisation at B, of the bandwidth of the data sheet",
           form="{:.0%}", table="Speed", shown=("first",), pool="median", csv="both",
           path="limits.sheet.B_ms / B_ms"),
    Figure("B_measured_ratio", "B MBU, measured",
           "the same, of the highest bandwidth measured on this machine",
           form="{:.0%}", table="Speed", pool="median", csv="both", path="limits.measured.B_ms / B_ms"),
    Figure("slow_from_n", "50 ms from n", "position n from which TPOT exceeds 50 ms (20 tok/s)",
           form="{:,.0f}", table="Speed", pool="median", csv="both"),
    Figure("W_identifiable", "",
           "whether the slope is distinguishable from zero, and no jump or plateau causes it",
           csv="both"),
    Figure("last_n", "", "the last token's position",
           csv="cells"),
    Figure("median_ms", "", "median TPOT, ms",
           pool="median", csv="repeats"),
    Figure("B_theory_ms", "", "the least B that the data sheet's bandwidth allows",
           csv="both", path="limits.sheet.B_ms"),
    Figure("W_theory_tokens_per_ms", "", "the W at the data sheet's bandwidth",
           csv="both", path="limits.sheet.W_tokens_per_ms"),
    Figure("B_measured_theory_ms", "", "the least B that the measured bandwidth allows",
           path="limits.measured.B_ms"),
    Figure("W_measured_theory_tokens_per_ms", "", "the W at the measured bandwidth",
           path="limits.measured.W_tokens_per_ms"),
    Figure("W_declared_theory_tokens_per_ms", "",
           "the W at the data sheet's bandwidth, with the cache read as the stack declares",
           path="limits.sheet.W_declared_tokens_per_ms"),
    Figure("W_declared_measured_theory_tokens_per_ms", "", "the same at the measured bandwidth",
           path="limits.measured.W_declared_tokens_per_ms"),
    Figure("prefill_ms", "", "prefill as published, ms", path="record.reported.prefill_ms"),
    Figure("vram_bytes", "", "VRAM after the model is loaded, as published",
           path="record.reported.vram_bytes"),
    Figure("perplexity_stderr", "", "standard error of the perplexity, as published",
           path="record.reported.perplexity_stderr"),
    Figure("memory_budget_bytes", "", "memory that the run was allowed", path="record.memory_budget.bytes"),
    Figure("budget_means", "", "what kept the run within that memory", numeric=False,
           path="record.memory_budget.means"),
    Figure("served_by", "", "API of the server that was measured; none: the stack ran in process",
           numeric=False, path="record.loaded.served.api"),
    Figure("model_buffer_bytes", "", "weights as the stack allocates them", path="buffers.model"),
    Figure("file_bytes", "file MB", "size of the file",
           form="{:,.0f}", scale=MB, table="Memory", shown=("first", "card"), csv="cells",
           path="record.reported.file_bytes"),
    Figure("model_bytes", "tensors MB",
           "all tensors: as loaded where the stack reports that, else as stored",
           form="{:,.0f}", scale=MB, table="Memory", csv="both"),
    Figure("kv_bytes_per_token", "KV KB/token", "KV cache per token",
           form="{:,.1f}", scale=1000.0, table="Memory", csv="both"),
    Figure("loaded_bytes", "after load MB", "memory in use after the model is loaded",
           form="{:,.0f}", scale=MB, table="Memory", shown=("first",), pool="median", csv="both"),
    Figure("peak_vram_source", "VRAM by",
           "process: NVML's figure of the worker's processes; device less start: the device's, without "
           "what was used before the worker started; device: of all processes",
           numeric=False, table="Memory", csv="both"),
    Figure("peak_allocator_bytes", "peak allocator MB",
           "peak memory that the allocator of the stack handed out",
           form="{:,.0f}", scale=MB, table="Memory", pool="max", csv="both",
           path="record.done.counters.allocator.peak_allocated_bytes"),
    Figure("kv_read", "cache read",
           "how a decode step reads the KV cache. padded256: once, in steps of 256 tokens; copied: copies "
           "it at each step; full: all of a static cache",
           numeric=False, table="Memory", csv="both", path="record.loaded.kv_read"),
    Figure("kv_buffer_bytes", "KV buffer MB", "KV cache as the stack allocates it",
           form="{:,.0f}", scale=MB, table="Memory", csv="cells", path="buffers.kv"),
    Figure("compute_buffer_bytes", "compute buffer MB", "compute buffers of the stack",
           form="{:,.0f}", scale=MB, table="Memory", csv="cells", path="buffers.compute"),
    Figure("n_ctx", "n_ctx", "context length allocated, as the stack rounds it; - for a cache that grows",
           form="{:,.0f}", table="Memory", csv="both", path="record.loaded.options.n_ctx"),
    Figure("max_ctx", "longest context",
           "tokens of context reached, or that fit; +: stopped at a target; not held: more than fits in "
           "memory",
           form="{:,.0f}", unit="tokens", table="Memory",
           shown=("first", "machines", "point", "card", "bundle"),
           csv="both", better="higher", family="context", compared=_longest),
    Figure("shape", "shape", "shape of latency(n); short: under 2,048 tokens, too few to determine it",
           numeric=False, table="Shape and cost", shown=("first",), csv="both"),
    Figure("segments", "segments", "line of each segment of a hinge or a mode change",
           numeric=False, table="Shape and cost"),
    Figure("spikes", "spikes", "single tokens with a latency far above their neighbours",
           table="Shape and cost", shown=("first",)),
    Figure("robust_B_ms", "B robust", "B of a robust fit, which ignores spikes, ms; shown where it differs",
           table="Shape and cost", pool="median", csv="both"),
    Figure("robust_W_tokens_per_ms", "W robust", "W of the robust fit",
           form="{:,.0f}", table="Shape and cost", pool="median", csv="both"),
    Figure("plain_B_ms", "", "B by least squares with the spikes that B leaves out",
           pool="median", csv="both"),
    Figure("plain_W_tokens_per_ms", "", "W by least squares with these spikes",
           pool="median"),
    Figure("fixed_ms", "fixed ms",
           "fixed cost per token: the part that does not shrink with the bytes read",
           table="Shape and cost", shown=("first",), csv="cells"),
    Figure("bytes_ms", "", "time per token to read the bytes: the rest of B"),
    Figure("dominated_by", "dominated by", "the larger part of B: fixed cost, or reading bytes",
           numeric=False, table="Shape and cost", shown=("first",), csv="cells"),
    Figure("drift", "drift",
           "by how much longer the first tokens took when decoded again after the run; B and W are without"
           " it",
           form="{:+.1%}", table="Shape and cost", pool="median"),
    Figure("outside_stack_ms", "",
           "time of a token outside the stack's own clock, until a client of a server has it",
           pool="median"),
    Figure("bandwidth_share_range", "",
           "MBU over the highest and over the lowest bandwidth that was measured",
           csv="both"),
    Figure("bandwidth_bytes_per_s", "", "the highest read bandwidth measured in the run",
           csv="both"),
    Figure("energy_window_s", "", "time over which the energy was read, seconds", path="energy.window_s"),
    Figure("energy_source", "", "what counted the energy, and of what", numeric=False, path="energy.source"),
    Figure("energy_reason", "", "why there is no energy", numeric=False, path="energy.reason"),
    Figure("idle_watts", "", "power of the idle device before the first repeat",
           pool="median", csv="both", path="energy.idle_watts"),
    Figure("cpu_s_per_token", "CPU s/token", "CPU time of the worker per decoded token, over all its threads",
           form="{:,.3g}",
           path="record.done.cpu_s / record.tokens", table="Shape and cost", pool="median", csv="both"),
    Figure("wall_s", "repeat s", "time of a whole repeat: import, load, warm-up and the timed part",
           form="{:,.1f}", unit="s", path="record.timing.wall_s", table="Shape and cost", pool="median",
           csv="both"),
    Figure("hottest_c", "hottest °C", "highest temperature of the device during the timed part",
           form="{:,.0f}", table="Shape and cost", pool="median"),
    Figure("median_clock_mhz", "clock MHz", "median clock of the device during the timed part",
           form="{:,.0f}", table="Shape and cost", pool="median"),
    Figure("weights_check", "", "verdict of the comparison of its logits with a reference",
           numeric=False, csv="both"),
    Figure("flags", "flags", "warnings about the figures; details below",
           numeric=False, table="Shape and cost", shown=("card",), csv="both"),
    Figure("ttft_8k_ms", "TTFT 8k ms", "time of a prefill pass over 8,192 tokens",
           form="{:,.1f}", unit="ms", read=lambda row: _pass_ms(row, 8192), csv="repeats",
           family="slower", pool="again"),
    Figure("tokens_per_s_16k", "tok/s at 16k", "decode with 16,384 tokens in the cache",
           form="{:,.1f}", unit="tok/s", read=_at_16k, better="higher", csv="repeats", family="slower",
           inverse=("ms_per_token_16k", "ms/token"), pool="again"),
    Figure("task_s", "task s", "a conversation whose prompts are evaluated whole",
           unit="s", read=lambda row: _task_s(row, kept=False),
           csv="repeats", family="slower", pool="again"),
    Figure("task_kept_s", "task s, prefix kept", "a conversation that keeps the prefix in the cache",
           unit="s", read=lambda row: _task_s(row, kept=True),
           csv="repeats", family="slower", pool="again"),
    Figure("users_tokens_per_s", "tok/s of all users", "with the most users at once",
           form="{:,.1f}", unit="tok/s", path="users.-1.tokens_per_s", better="higher", csv="repeats",
           family="slower", pool="again"),
    Figure("users_output_tokens_per_s", "output tok/s of all users", "with the most users at once",
           form="{:,.1f}", unit="tok/s", path="users.-1.output_tokens_per_s", better="higher",
           csv="repeats", family="slower", pool="again"),
    Figure("user_tokens_per_s", "tok/s of each user", "with the most users at once",
           unit="tok/s", path="users.-1.user_tokens_per_s", better="higher", csv="repeats",
           family="slower", pool="again"),
    Figure("user_ttft_ms", "TTFT ms of users", "with the most users at once",
           form="{:,.1f}", unit="ms", path="users.-1.ttft_ms.median", csv="repeats",
           family="slower", pool="again"),
    Figure("user_ttft_p99_ms", "TTFT ms of users, p99", "with the most users at once",
           form="{:,.1f}", unit="ms", path="users.-1.ttft_ms.p99", csv="repeats",
           family="slower", pool="again"),
    Figure("user_tpot_ms", "TPOT ms of users", "with the most users at once",
           unit="ms", path="users.-1.tpot_ms.median", csv="repeats",
           family="slower", pool="again"),
    Figure("user_tpot_p99_ms", "TPOT ms of users, p99", "with the most users at once",
           unit="ms", path="users.-1.tpot_ms.p99", csv="repeats",
           family="slower", pool="again"),
)
# fmt: on


def type_at(path: str) -> Any:
    """The type that columns.JudgedRepeat declares at the path of a figure. Raises KeyError: there is none."""
    kind: Any = JudgedRepeat
    for step in path.split("."):
        while get_origin(kind) in (Union, UnionType, NotRequired, Required, Annotated):
            kind = next(of for of in get_args(kind) if of is not NoneType)
        within = get_args(kind)  # of a list or a mapping
        kind = within[-1] if within else get_type_hints(kind)[step]
    return kind


def row_of(judged: JudgedRepeat) -> Repeat:
    """The row of a repeat: its columns, and every figure."""
    row: dict[str, object] = {name: value for name, value in judged.items() if name not in SECTIONS}
    for figure in FIGURES:
        if figure.ends:
            row.setdefault(figure.ends)
    row |= {figure.name: figure.of(judged) for figure in FIGURES if figure.pool != "again"}
    return cast(Repeat, row | again(row))


def pooled(rows: Sequence[Row]) -> dict[str, float | None]:
    """The medians and maxima over a cell's repeats."""
    medians: dict[str, float | None] = {}
    for figure in FIGURES:
        if figure.pool in ("median", "max"):
            values = [value for row in rows if (value := figure.number(row)) is not None]
            if figure.pool == "max":
                medians[figure.name] = max(filter(None, values), default=None)
            else:
                medians[figure.name] = statistics.median(values) if values else None
    return medians


def again(row: Row) -> dict[str, object]:
    """The figures that are read from the columns of a row, which were changed."""
    return {figure.name: figure.of(row) for figure in FIGURES if figure.pool == "again"}


def of_section(name: str, section: object) -> dict[str, object]:
    """The figures that one section of a judged repeat gives."""
    return {
        figure.name: figure.of({name: section}) for figure in FIGURES if figure.path.startswith(f"{name}.")
    }


def empty_cell() -> Cell:
    """A cell of which nothing is known: every figure is None, every count 0, every list empty."""
    types: Mapping[str, Any] = get_type_hints(Cell)
    lists = {name: list[object]() for name, of in types.items() if get_origin(of) is list}
    counts = ("repeats", "repeats_ok", "disturbed_attempts")
    empty = {**dict.fromkeys([*Cell.__required_keys__, *BY_NAME]), **dict.fromkeys(counts, 0)}
    return cast(Cell, {**empty, **lists, "spikes": no_spikes(), "max_ctx_is_target": False})


BY_NAME = {figure.name: figure for figure in FIGURES}
COMPARED = tuple(figure for figure in FIGURES if figure.family)


def shown_in(place: Shown) -> list[Figure]:
    """The figures that one kind of table shows."""
    return [figure for figure in FIGURES if place in figure.shown]


IDENTITY = ("cell", "model", "stack", "variant", "kind", "weights", "machine", "device")
FIRST_COLUMNS: Mapping[Csv, tuple[str, ...]] = {
    "cells": ("name", "status", "reasons", "repeats_ok", "repeats", *IDENTITY),
    "repeats": (
        *("campaign", "repeat", "started_utc", "content_key", "workload", "prompt_tokens", "new_tokens"),
        *IDENTITY,
    ),
}
"""What a line of a CSV file is of."""


def csv_headings(of: Csv) -> list[str]:
    """The columns of a CSV file, of which an interval is two."""
    headings = [*FIRST_COLUMNS[of]]
    for figure in _in_csv(of):
        headings.append(figure.name)
        headings += [f"{figure.ends}_low", f"{figure.ends}_high"] if figure.ends else []
    return headings


def csv_values(of: Csv, row: Row) -> list[object]:
    """The line of a row, whose lists are texts."""
    if row["kind"] == "reported" and not row["tokens"]:  # a published figure may not say how many
        row = {**row, "tokens": None}
    values = [row[name] for name in FIRST_COLUMNS[of]]
    for figure in _in_csv(of):
        values.append(row[figure.name])
        if figure.ends:
            values += cast("list[float | None] | None", row[figure.ends]) or [None, None]
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]


def _in_csv(of: Csv) -> list[Figure]:
    return [figure for figure in FIGURES if figure.csv in (of, "both")]
