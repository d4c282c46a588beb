"""Columns of the tables, and the text of each cell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar, cast

from harness.analysis.columns import (
    Cell,
    Counted,
    Ended,
    Ends,
    FlagRow,
    Repeat,
    Result,
    SegmentRow,
    ShownCell,
    Spikes,
    Variant,
)
from harness.analysis.figures import BY_NAME, FIGURES, Figure, shown_in
from harness.analysis.figures import TABLES as PAGE_TABLES
from harness.analysis.traffic import UNSTABLE, spread
from harness.analysis.warnings import Warnings
from harness.base.lookup import value_at
from harness.base.text import plural
from harness.dataset.study import bounds, failure, finite, ok, provisional
from harness.report.text_table import NONE, Table, formatted
from harness.report.timed_rows import WithPrompt, prompt_rate
from harness.theory import floors

# The figures of a row as the tables write them, one function for each kind of column.


PAST_TRAINING = ", past training"  # follows a length beyond the trained context
NOT_IDENTIFIABLE = "not identifiable"
LONGEST_NAME = 30  # characters beside which four figures and a status fit in 80 columns
NOT_HELD = ", not held"  # follows a length that the memory cannot hold
PROVISIONAL_MARK = "~"  # before a figure of no repeat that is ok
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
    """Tokens of KV cache that fit in a memory together with the weights; 0 if none fit, null if sizes are
    unknown. On a GPU only the weights read per token count: an input embedding may stay outside."""
    weights = (row["model_bytes"] if row["device"] == "cpu" else None) or row["weight_bytes_per_token"]
    kv = row["kv_bytes_per_token"]
    if memory_bytes is None or weights is None or not kv:
        return None
    return floors.max_ctx(memory_bytes, weights, kv) or 0


def counted(row: Ended, reasons: list[str], of: Cell | None = None) -> Counted:
    """The columns that a table shows of every row. `of`: the cell whose repeats count."""
    return {
        "name": row["name"],
        "model": row["model"],
        "stack": row["stack"],
        "variant": row["variant"],
        "device": row["device"],
        "kind": row["kind"],
        "weights": row["weights"],
        "status": row["status"],
        "reasons": reasons,
        "repeats": of["repeats"] if of else 0,
        "repeats_ok": of["repeats_ok"] if of else 0,
        "disturbed_attempts": of["disturbed_attempts"] if of else 0,
        "stayed_disturbed": of["stayed_disturbed"] if of else [],
    }


def hidden(row: Repeat) -> bool:
    """Whether there is a line whose slope is not distinguishable from zero."""
    has_line = row["slope_ms"] is not None or row["B_ms"] is not None
    return row["W_identifiable"] is False and has_line


def B(row: Repeat) -> str:
    """B, or `not identifiable`: the interval or a flag has the reason; see withheld.withhold."""
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


def of_baseline(row: ShownCell, of: Callable[[Cell], float | None]) -> float | None:
    """A figure of the baseline; None without one."""
    return of(row["baseline"]) if row["baseline"] else None


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


def segments(found: Sequence[SegmentRow]) -> str:
    """`26 to 2,048: B 12.10, W 900; 2,049 to 9,999: B 14.10, flat`; a dash for a single segment, which is
    the line of the speed table."""
    if len(found) < 2:
        return NONE
    lines = (
        f"{s['from_n']:,} to {s['to_n']:,}: B {number(s['B_ms'])}, "
        + ("flat" if s["flat"] else f"W {number(s['W_tokens_per_ms'], '{:,.0f}')}")
        for s in found
    )
    return "; ".join(lines)


def spikes(found: Spikes) -> str:
    if not found["count"]:
        return NONE
    period = number(found["period_tokens"], " every {:,.0f}")
    return f"{found['count']} of {number(found['size_ms'], '{:.1f}')} ms" + (period if period != NONE else "")


def flags(row: Repeat) -> str:
    return ", ".join(dict.fromkeys(flag["code"] for flag in row["flags"])) or NONE


# The tables of the page: their columns, with format and meaning.


R = TypeVar("R", contravariant=True)


@dataclass(frozen=True)
class Column(Generic[R]):
    """`text`: formats a cell. `shows_failure`: a failed cell shows its status here."""

    heading: str
    text: Callable[[R], str]
    meaning: str
    shows_failure: bool = False
    numeric: bool = True


# What a number's format does not say: the text of a figure by its name.
TEXTS: Mapping[str, Callable[[Cell], str]] = {
    "ttft_ms": ttft,
    "memory_bytes": peak_memory,
    **{name: partial(quality, figure=BY_NAME[name]) for name in ("perplexity", "kld_mean", "top1")},
    "B_ms": B,
    "W_tokens_per_ms": W,
    "bandwidth_share": mbu,
    "tokens": lambda row: number(row["tokens"] or None, "{:,.0f}"),
    "W_ratio": lambda row: W_share(row, row["W_ratio"]),
    "W_measured_ratio": lambda row: W_share(row, row["W_measured_ratio"]),
    "W_declared_ratio": lambda row: W_declared_share(row, row["W_declared_ratio"]),
    "W_declared_measured_ratio": lambda row: W_declared_share(row, row["W_declared_measured_ratio"]),
    "slow_from_n": slow_from,
    "max_ctx": longest,
    "segments": lambda row: segments(row["segments"]),
    "spikes": lambda row: spikes(row["spikes"]),
    "flags": flags,
}
SHOWS_FAILURE = ("ttft_ms", "W_tokens_per_ms", "B_ms", "max_ctx", "tokens")
"""The figures in whose place a failed cell has its status."""


def column_of(figure: Figure) -> Column[Cell]:
    """A figure as a column of a page. Of a text, such as the shape, it is not numeric."""
    return Column(
        figure.label,
        text_of(figure),
        figure.meaning,
        shows_failure=figure.name in SHOWS_FAILURE,
        numeric=figure.numeric,
    )


def text_of(figure: Figure) -> Callable[[Cell], str]:
    """How tables write a figure."""
    if not figure.numeric and figure.name not in TEXTS:
        return lambda row: str(value_at(row, figure.name) or NONE)
    return TEXTS.get(figure.name) or (lambda row: number(figure.number(row), figure.form, figure.scale))


def _interval_of(figure: Figure) -> Column[Cell]:
    digits = int(re.findall(r"\.(\d+)", figure.form)[0])
    return Column(
        f"{figure.short} 95%",
        lambda row: interval(cast("Ends | None", value_at(row, figure.ends)), digits),
        f"95% confidence interval of {figure.short}",
    )


def _against_baseline(figure: Figure) -> Iterator[Column[ShownCell]]:
    yield Column(
        f"{figure.short} baseline",
        lambda row: number(of_baseline(row, figure.number), figure.form),
        f"{figure.short} of the baseline",
    )
    yield Column(
        f"{figure.short} / baseline",
        lambda row: ratio_to_baseline(figure.number(row), of_baseline(row, figure.number)),
        f"{figure.short} over the {figure.short} of the baseline",
    )


def _of_page(table: str) -> Iterator[Column[ShownCell]]:
    figures = [figure for figure in FIGURES if figure.table == table]
    for figure in figures:
        yield column_of(figure)
        if figure.ends:
            yield _interval_of(figure)
    for name in ("B_ms", "W_tokens_per_ms") if table == "Speed" else ():
        yield from _against_baseline(BY_NAME[name])


TABLES: Mapping[str, Sequence[Column[ShownCell]]] = {table: [*_of_page(table)] for table in PAGE_TABLES}


RowT = TypeVar("RowT", bound=Counted)
T = TypeVar("T")


def column_cell(row: RowT, column: Column[RowT]) -> str:
    """One figure as text; without one, the status of a failed cell, or a dash."""
    text = column.text(row)
    return (failure(row) or NONE) if text == NONE and column.shows_failure else text


def used_columns(columns: Sequence[Column[T]], rows: Sequence[T]) -> list[Column[T]]:
    """The columns for which at least one row has a figure."""
    return [c for c in columns if any(c.text(row) != NONE for row in rows)]


# The tables of cells and of searches: for the terminal with their columns, for the page of given columns.


def _slope(row: Repeat) -> str:
    """W in a terminal, where notes below the table say why there is none."""
    if row["kv_read"] == "full" and row["slope_ms"] is not None:
        return "not applicable"  # a static cache's latency does not depend on n
    return number(row["W_tokens_per_ms"] if row["W_identifiable"] else None, "{:,.0f}")


def _prompt(row: WithPrompt) -> str:
    """`812`; `~812` where the machine disturbed every repeat."""
    return PROVISIONAL_MARK * row["prompt_provisional"] + number(prompt_rate(row), "{:,.0f}")


NAME: Column[Variant] = Column("cell", lambda row: row["name"], "model, stack and variant", numeric=False)
STATUS: Column[Counted] = Column("status", state, "outcome of the repeats", numeric=False)


def is_unsure(row: Counted) -> bool:
    """Whether what it shows was measured, but in no repeat that is ok."""
    return row["kind"] == "measured" and not row["repeats_ok"]


def _rate(row: Cell) -> str:
    """`61.0 ±0.4`; `~61.0` where no repeat is ok."""
    return _marked(row, plus_minus(row["tokens_per_s"], row["tokens_per_s_ci95"]))


def _marked(row: Cell, text: str) -> str:
    return PROVISIONAL_MARK * (text != NONE and is_unsure(row)) + text


RATE: Column[Cell] = replace(column_of(BY_NAME["tokens_per_s"]), text=_rate)
IN_TERMINAL: Mapping[str, Callable[[WithPrompt], str]] = {
    "tokens_per_s": _rate,
    "pp512": _prompt,
    "ttft_ms": lambda row: _marked(row, number(row["ttft_ms"], "{:,.1f}")),
    "B_ms": lambda row: number(row["B_ms"]),
    "W_tokens_per_ms": _slope,
}
"""The text of figures where notes below the table say the rest."""


def of_terminal() -> list[Column[WithPrompt]]:
    """In order of importance: a narrow terminal shows the first ones, and the status after three."""
    columns: list[Column[WithPrompt]] = []
    for figure in shown_in("terminal"):
        column: Column[WithPrompt] = column_of(figure)
        columns.append(replace(column, text=IN_TERMINAL.get(figure.name) or text_of(figure)))
    return [*columns[:3], STATUS, *columns[3:]]


def bandwidth(rows: Sequence[Repeat]) -> str:
    """The bandwidth that each MBU of these rows is a share of: the highest of the row's own campaign. Empty
    without an MBU."""
    with_mbu = [row for row in rows if row["bandwidth_share"] is not None]
    peaks = {peak for row in with_mbu if (peak := row["bandwidth_bytes_per_s"])}
    if not peaks:
        return ""
    low, high = (f"{peak / 1e9:.0f}" for peak in (min(peaks), max(peaks)))
    if low != high:
        same = len({(row["machine"], row["device"]) for row in with_mbu}) == 1
        unstable = same and max(peaks) > UNSTABLE * min(peaks)
        return (
            f"MBU: share of the highest read bandwidth measured in each row's own run, {low} to {high} GB/s"
            + ": this machine's bandwidth is not stable, so MBUs of different runs do not compare" * unstable
        )
    own = [row for row in rows if row["bandwidth_bytes_per_s"] in peaks]
    return f"MBU: share of {spread([rate for row in own for rate in row['bandwidth_probes_bytes_per_s']])}"


def growth(row: Cell) -> str:
    """How long a context a growing generation reached, and why it ended."""
    text = f"held {plural(row['max_ctx'] or 0, 'token')} of prompt and decode"
    if row["max_ctx_is_target"]:
        return f"{text}, its target"
    if row["kv_share_of_free"]:
        text += f", a cache of {row['kv_share_of_free']:.0%} of the free memory"
    return f"{text}: {row['limit_reason']}"


def table(title: str, columns: Sequence[Column[T]], rows: Sequence[T], marked: Sequence[str]) -> Table:
    """One line per row. `marked`: their colours."""
    return Table(
        [column.heading for column in columns],
        [[column.text(row) for column in columns] for row in rows],
        [column.numeric for column in columns],
        marked,
        title,
        [column.meaning for column in columns],
    )


def of_columns(
    title: str, columns: Sequence[Column[RowT]], rows: Sequence[RowT], names: Sequence[str] | None = None
) -> Table:
    """One line per row, with its status, for a page; a failed cell has its status in place of a figure.
    `names`: instead of the rows' own."""
    shown = [replace(column, text=partial(column_cell, column=column)) for column in columns]
    whole = table(title, (NAME, STATUS, *shown), rows, colours(rows))
    if names is None:
        return whole
    return replace(whole, lines=[[name, *line[1:]] for name, line in zip(names, whole.lines, strict=True)])


def in_terminal(columns: Sequence[Column[RowT]], rows: Sequence[RowT]) -> Table:
    """One line per row, for a terminal. `columns`: with STATUS at its place."""
    needed = (columns[0].heading, columns[1].heading, STATUS.heading)
    whole = replace(table("", (NAME, *columns), rows, colours(rows)), meanings=(), needed=needed)
    return with_short_names(whole, [row["model"] for row in rows])


def with_short_names(table: Table, models: Sequence[str]) -> Table:
    """The table with what the names in its first column share as its title, and the rest of each name there.
    Where that leaves little room, the model stands on a line of its own, above its rows. `models`: of each
    line."""
    shared, names = short_names([line[0] for line in table.lines])
    if not any(names):
        lines = [line[1:] for line in table.lines]
        numeric = table.numeric and table.numeric[1:]
        return replace(table, headings=table.headings[1:], lines=lines, numeric=numeric, title=shared)
    lines, marked = [], []
    last = ""
    for name, model, line, colour in zip(names, models, table.lines, table.marked or (), strict=True):
        if max(map(len, names)) > LONGEST_NAME and len(set(models)) > 1:
            if model != last:
                lines.append([model, *[""] * (len(line) - 1)])
                marked.append("")
            name, last = "  " + name.removeprefix(f"{model} "), model
        lines.append([name, *line[1:]])
        marked.append(colour)
    return replace(table, lines=lines, marked=marked, title=shared)


def cells(rows: Sequence[WithPrompt]) -> Table:
    """One line per decode, for a terminal."""
    return in_terminal(of_terminal(), rows)


def colours(rows: Sequence[Counted]) -> list[str]:
    """Of each line: none where the row is ok, yellow where the machine alone disturbed it, else red."""
    return ["" if ok(row) else "yellow" if provisional(row) else "red" for row in rows]


def short_names(names: Sequence[str]) -> tuple[str, list[str]]:
    """The words that all names share, options of variants among them, and the rest of each name, which is
    empty where all are the same."""
    words = [re.split(r" |-(?=\w+=)", name) for name in names]
    shared = [word for word in words[0] if all(word in each for each in words)] if words else []
    if len(set(names)) > 1:
        while shared and not all(set(each) - set(shared) for each in words):
            shared.pop()
    rest = [" ".join(word for word in each if word not in shared) for each in words]
    return (" ".join(shared), rest) if len(set(rest)) == len(set(names)) else ("", list(names))
