"""The figures: the one place that knows each figure's column, heading, unit, meaning, and use.

Rows of repeats and cells, medians, CSV files, tables in a terminal and on the page, the card, nights, history
and `compare` go through FIGURES in its order, the most important first. A figure that analysis computes is a
key of columns.Cell; one that a record holds needs nothing but its entry, with a `source`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from harness.analysis.columns import AnyRow, SpeculationRow, is_score, is_search
from harness.analysis.line_fit import block_spread
from harness.analysis.speculation import acceptance_length, acceptance_rate
from harness.base.files import TABLE_OF

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

    `path`: its place in a row where that is not its name, as in `users.-1.ttft_ms.p99`; `read`: computes it
    from a row; `source`: its place in a record, which may be a quotient, as in `done.load_ns / tokens`.
    `compared`: its value where runs are compared, also in rows of searches and scores. `ends`: the key of its
    95% interval. `pool`: how a cell's repeats become one; last: the last repeat's, or a figure that
    repeat_figures.py computes. `csv`: the CSV files that have it.

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
    read: Callable[[AnyRow], float | None] | None = None
    compared: Callable[[AnyRow], float | None] | None = None
    source: str = ""
    ends: str = ""
    pool: Literal["last", "median", "max"] = "last"
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
    def worse(self) -> str:
        return VERDICTS[self.family or "slower"][0]

    @property
    def improved(self) -> str:
        return VERDICTS[self.family or "slower"][1]

    def number(self, row: Row) -> float | None:
        """The figure of a row of a repeat or a cell, as tables show it."""
        found = self.read(cast(AnyRow, row)) if self.read else at(row, self.path or self.name)
        return found if isinstance(found, (int, float)) else None

    def value(self, row: AnyRow) -> float | None:
        """The figure of a row of a repeat, a search or a score, as runs are compared; None: none, or not
        positive."""
        if self.whole and row.get("workload") == "grow":
            return None
        if self.compared:
            found = self.compared(row)
        else:
            found = None if is_search(row) or is_score(row) else self.number(row)
        return float(found) if found is not None and found > 0 else None

    def error(self, row: AnyRow) -> float | None:
        """The relative standard error within a repeat, from blocks of tokens; None: too few blocks."""
        if not self.ends or is_search(row) or is_score(row):
            return None
        low, high = cast("list[float | None] | None", at(row, self.ends)) or (None, None)
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


def _peak_bytes(row: AnyRow) -> float | None:
    """Peak memory: the resident set on a CPU; on a GPU the allocator's peak, else the device's. None for
    workloads of timed rows, whose memory includes copies of the context."""
    if is_search(row) or is_score(row) or row["workload"] in TABLE_OF:
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


def _pass_ms(row: AnyRow, n: int) -> float | None:
    """Time of a pass over n tokens at an empty cache: measured, or on the line between its neighbours."""
    if is_search(row) or is_score(row):
        return None
    passes = [each for each in row["passes"] if each["depth"] == 0]
    if not passes or not passes[0]["n"] <= n <= passes[-1]["n"]:
        return None
    return float(np.interp(n, [each["n"] for each in passes], [each["ms"] for each in passes]))


def _pp512(row: AnyRow) -> float | None:
    ms = _pass_ms(row, 512)
    return 512e3 / ms if ms else None


def _at_16k(row: AnyRow) -> float | None:
    if is_search(row) or is_score(row) or not row["depths"]:
        return None
    return next((at["tokens_per_s"] for at in row["depths"]["at"] if at["depth"] == 16_384), None)


def _task_s(row: AnyRow, kept: bool) -> float | None:
    if is_search(row) or is_score(row):
        return None
    return next((task["task_s"] for task in row["tasks"] if task["prefix_kept"] is kept), None)


def _guessed(row: AnyRow, read: Callable[[SpeculationRow], float | None]) -> float | None:
    """A figure of the tokens that were guessed ahead; None where none may be."""
    if is_search(row) or is_score(row) or not row["speculation"]:
        return None
    return read(row["speculation"])


# fmt: off
FIGURES: tuple[Figure, ...] = (
    Figure("tokens_per_s", "tok/s", "over all decoded tokens",
           form="{:,.1f}", unit="tok/s", table="Speed",
           shown=("terminal", "first", "machines", "card", "bundle"),
           ends="tokens_per_s_ci95", pool="median", csv="both", better="higher", family="slower",
           whole=True, inverse=("ms_per_token", "ms/token")),
    Figure("pp512", "pp512 tok/s", "prefill of 512 tokens at an empty cache, in tokens per second",
           form="{:,.0f}", unit="tok/s", shown=("terminal", "card"), read=_pp512, better="higher",
           csv="repeats", family="slower", inverse=("pp512_ms_per_token", "ms/token")),
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
           read=_peak_bytes, family="memory", whole=True),
    Figure("watts", "watts", "mean power of the whole device during decode; see J/token",
           form="{:,.1f}", table="Shape and cost", shown=("terminal",), pool="median", csv="both"),
    Figure("joules_per_token", "J/token",
           "energy of the whole device during decode, idle power included; see docs/reference/sensors.md",
           form="{:,.3g}", unit="J", table="Shape and cost",
           shown=("terminal", "machines", "point", "bundle"),
           pool="median", csv="both", family="energy"),
    Figure("energy_price_per_mtok", "price/Mtok",
           "energy of a million decoded tokens at the price of --price, in its currency",
           form="{:,.3g}", table="Shape and cost", shown=("terminal",), csv="cells"),
    Figure("quality", "", "status of the variant's score on a text, or `not scored`",
           numeric=False, csv="both"),
    Figure("perplexity", "perplexity", "as measured or reported; lower is better",
           form="{:,.2f}", table="Speed", shown=("terminal", "first", "machines", "point", "card"),
           csv="both", compared=_perplexity, family="quality"),
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
           csv="both"),
    Figure("joules_per_token_above_idle", "J/token above idle",
           "without the power of the idle device, measured before the first repeat",
           form="{:,.3g}", table="Shape and cost", shown=("terminal",), pool="median", csv="both"),
    Figure("start_tokens_per_s", "tok/s start", "over the first 128 tokens, of 256 or more",
           form="{:,.1f}", table="Speed", shown=("terminal",), pool="median", csv="both", better="higher"),
    Figure("end_tokens_per_s", "tok/s end", "over the last 128 tokens",
           form="{:,.1f}", table="Speed", shown=("terminal",), pool="median", csv="both", better="higher"),
    Figure("tokens_per_pass", "tok/pass",
           "tokens that a pass of the model gave, where some are guessed ahead",
           shown=("terminal",), read=lambda row: _guessed(row, acceptance_length), better="higher"),
    Figure("accepted_share", "accepted", "guessed tokens that the model accepted",
           form="{:.0%}", shown=("terminal",), read=lambda row: _guessed(row, acceptance_rate),
           better="higher"),
    Figure("nominal_bits", "Nominal", "bits in the name of the type",
           form="{:,.0f}", table="Speed", pool="median"),
    Figure("W_ratio", "W MBU, spec", "W over the W at the bandwidth of the data sheet",
           form="{:.0%}", table="Speed", pool="median", csv="both"),
    Figure("W_measured_ratio", "W MBU, measured",
           "W over the W at the highest bandwidth measured on this machine",
           form="{:.0%}", table="Speed", pool="median", csv="both"),
    Figure("W_declared_ratio", "W MBU, spec, copied",
           "W MBU, spec, for a cache that each step copies: reads it twice and writes it once",
           form="{:.0%}", table="Speed", pool="median", csv="cells"),
    Figure("W_declared_measured_ratio", "W MBU, measured, copied",
           "the same at the bandwidth measured on this machine",
           form="{:.0%}", table="Speed", pool="median", csv="cells"),
    Figure("B_as_w16_ms", "B as 16-bit", "B x 16 / BPW: the B of 16-bit weights at the same bandwidth, ms",
           table="Speed", pool="median", csv="cells"),
    Figure("B_ratio", "B MBU, spec", "model bandwidth utilisation at B, of the bandwidth of the data sheet",
           form="{:.0%}", table="Speed", shown=("first",), pool="median", csv="both"),
    Figure("B_measured_ratio", "B MBU, measured",
           "the same, of the highest bandwidth measured on this machine",
           form="{:.0%}", table="Speed", pool="median", csv="both"),
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
           csv="both"),
    Figure("W_theory_tokens_per_ms", "", "the W at the data sheet's bandwidth",
           csv="both"),
    Figure("file_bytes", "file MB", "size of the file",
           form="{:,.0f}", scale=MB, table="Memory", shown=("first", "card"), csv="cells"),
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
           form="{:,.0f}", scale=MB, table="Memory", pool="max", csv="both"),
    Figure("kv_read", "cache read",
           "how a decode step reads the KV cache. padded256: once, in steps of 256 tokens; copied: copies "
           "it at each step; full: all of a static cache",
           numeric=False, table="Memory", csv="both"),
    Figure("kv_buffer_bytes", "KV buffer MB", "KV cache as the stack allocates it",
           form="{:,.0f}", scale=MB, table="Memory", csv="cells"),
    Figure("compute_buffer_bytes", "compute buffer MB", "compute buffers of the stack",
           form="{:,.0f}", scale=MB, table="Memory", csv="cells"),
    Figure("n_ctx", "n_ctx", "context length allocated, as the stack rounds it; - for a cache that grows",
           form="{:,.0f}", table="Memory", csv="both"),
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
    Figure("idle_watts", "", "power of the idle device before the first repeat",
           pool="median", csv="both"),
    Figure("cpu_s_per_token", "CPU s/token", "CPU time of the worker per decoded token, over all its threads",
           form="{:,.3g}", source="done.cpu_s / tokens", table="Shape and cost", pool="median", csv="both"),
    Figure("hottest_c", "hottest °C", "highest temperature of the device during the timed part",
           form="{:,.0f}", table="Shape and cost", pool="median"),
    Figure("median_clock_mhz", "clock MHz", "median clock of the device during the timed part",
           form="{:,.0f}", table="Shape and cost", pool="median"),
    Figure("weights_check", "", "verdict of the comparison of its logits with a reference",
           numeric=False, csv="both"),
    Figure("flags", "flags", "warnings about the figures; details below",
           numeric=False, table="Shape and cost", shown=("card",), csv="both"),
    Figure("ttft_8k_ms", "TTFT 8k ms", "time of a prefill pass over 8,192 tokens",
           form="{:,.1f}", unit="ms", read=lambda row: _pass_ms(row, 8192), better="lower", csv="repeats",
           family="slower"),
    Figure("tokens_per_s_16k", "tok/s at 16k", "decode with 16,384 tokens in the cache",
           form="{:,.1f}", unit="tok/s", read=_at_16k, better="higher", csv="repeats", family="slower",
           inverse=("ms_per_token_16k", "ms/token")),
    Figure("task_s", "task s", "a conversation whose prompts are evaluated whole",
           form="{:,.2f}", unit="s", read=lambda row: _task_s(row, kept=False), better="lower",
           csv="repeats", family="slower"),
    Figure("task_kept_s", "task s, prefix kept", "a conversation that keeps the prefix in the cache",
           form="{:,.2f}", unit="s", read=lambda row: _task_s(row, kept=True), better="lower",
           csv="repeats", family="slower"),
    Figure("users_tokens_per_s", "tok/s of all users", "with the most users at once",
           form="{:,.1f}", unit="tok/s", path="users.-1.tokens_per_s", better="higher", csv="repeats",
           family="slower"),
    Figure("users_output_tokens_per_s", "output tok/s of all users", "with the most users at once",
           form="{:,.1f}", unit="tok/s", path="users.-1.output_tokens_per_s", better="higher",
           csv="repeats", family="slower"),
    Figure("user_tokens_per_s", "tok/s of each user", "with the most users at once",
           form="{:,.2f}", unit="tok/s", path="users.-1.user_tokens_per_s", better="higher", csv="repeats",
           family="slower"),
    Figure("user_ttft_ms", "TTFT ms of users", "with the most users at once",
           form="{:,.1f}", unit="ms", path="users.-1.ttft_ms.median", better="lower", csv="repeats",
           family="slower"),
    Figure("user_ttft_p99_ms", "TTFT ms of users, p99", "with the most users at once",
           form="{:,.1f}", unit="ms", path="users.-1.ttft_ms.p99", better="lower", csv="repeats",
           family="slower"),
    Figure("user_tpot_ms", "TPOT ms of users", "with the most users at once",
           form="{:,.2f}", unit="ms", path="users.-1.tpot_ms.median", better="lower", csv="repeats",
           family="slower"),
    Figure("user_tpot_p99_ms", "TPOT ms of users, p99", "with the most users at once",
           form="{:,.2f}", unit="ms", path="users.-1.tpot_ms.p99", better="lower", csv="repeats",
           family="slower"),
)
# fmt: on


def at(values: object, path: str) -> object:
    """What is at a path of keys and places in lists; None where it ends early."""
    for step in path.split("."):
        if isinstance(values, Mapping):
            values = values.get(step)
        elif isinstance(values, list) and values:
            values = values[int(step)]
        else:
            return None
    return values


def of_record(record: Row) -> dict[str, float | None]:
    """The figures that are in a record."""
    found: dict[str, float | None] = {}
    for figure in SOURCED:
        parts = [at(record, path) for path in figure.source.split(" / ")]
        numbers = [part for part in parts if isinstance(part, (int, float))]
        known = len(numbers) == len(parts) and all(numbers[1:])
        found[figure.name] = numbers[0] / (numbers[1] if len(parts) > 1 else 1) if known else None
    return found


def medians(rows: Sequence[Row]) -> dict[str, float | None]:
    """The medians and maxima over a cell's repeats."""
    found: dict[str, float | None] = {}
    for figure in FIGURES:
        values = [value for row in rows if (value := figure.number(row)) is not None]
        if figure.pool == "median":
            found[figure.name] = statistics.median(values) if values else None
        elif figure.pool == "max":
            found[figure.name] = max(filter(None, values), default=None)
    return found


BY_NAME = {figure.name: figure for figure in FIGURES}
COMPARED = tuple(figure for figure in FIGURES if figure.family)
SOURCED = tuple(figure for figure in FIGURES if figure.source)


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
    values = [row[name] for name in FIRST_COLUMNS[of]]
    for figure in _in_csv(of):
        values.append(figure.number(row) if figure.read or figure.path else row.get(figure.name))
        if figure.ends:
            values += cast("list[float | None] | None", row[figure.ends]) or [None, None]
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]


def _in_csv(of: Csv) -> list[Figure]:
    return [figure for figure in FIGURES if figure.csv in (of, "both")]
