"""Columns of the tables, and the text of each cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from harness.analysis.columns import Cell, Repeat, Search
from harness.analysis.traffic import spread
from harness.analysis.warnings import Warnings
from harness.base.text import plural
from harness.dataset.study import Row, Study, bounds, failure, figure, key, matched, ok, part, parts
from harness.report.table import NONE, Table, formatted
from harness.theory import floors

# The longest context of each variant, as rows: searched or grown here, published, and by theory. Pure.


HOW = {"decode": "decoding", "allocation": "allocation"}
FAILED = ("oom", "error")  # published: tried, without a length
KNOWN = ("name", "model", "stack", "variant", "device", "kind", "status", "reasons")


def context_rows(study: Study) -> list[Row]:
    """One row per search and per growing run, with the published figures of its variant; then the published
    figures of other variants. Memory in bytes, contexts in tokens; `share`: context over that of theory."""
    measured = [row for row in study.cells if row.get("kind") == "measured"]
    sizes = {key(row): row for row in measured}
    growing = [row for row in measured if row.get("workload") == "grow" and figure(row, "max_ctx")]
    ours = [_from_search(row, sizes.get(key(row), row)) for row in study.searches] + [
        _from_growth(r) for r in growing
    ]
    reported = [row for row in study.cells if row.get("kind") == "reported"]
    reported = [row for row in reported if figure(row, "max_ctx") or row.get("status") in FAILED]
    theirs, alone = matched(study, ours, reported)
    found = [{**row, **_published(theirs.get(str(row["name"])))} for row in ours]
    return _with_unique_names(found) + [
        {each: row.get(each) for each in KNOWN} | _published(row) for row in alone
    ]


def held(row: Row) -> bool:
    """Whether the device can hold the context that the cell reached. A cache that drops tokens can run past
    its memory."""
    reached, most = figure(row, "max_ctx"), theory_n_ctx(row, figure(row, "device_memory_bytes"))
    return reached is None or most is None or reached <= most


def theory_n_ctx(row: Row, memory_bytes: float | None) -> int | None:
    """Tokens of KV cache that fit in a memory together with the weights; 0 if none fit, null if sizes are
    unknown. On a GPU only the weights read per token count: an input embedding may stay outside."""
    on_cpu = row.get("device") == "cpu"
    weights = (figure(row, "model_bytes") if on_cpu else None) or figure(row, "weight_bytes_per_token")
    kv = figure(row, "kv_bytes_per_token")
    if memory_bytes is None or weights is None or not kv:
        return None
    return floors.max_ctx(memory_bytes, weights, kv) or 0


def _from_search(row: Row, cell: Row) -> dict[str, object]:
    """`cell`: of the same variant; its sizes are used where the search has none."""
    n_ctx = figure(row, "verified_n_ctx") if ok(row) else None
    memory = figure(row, "memory_budget_bytes") or figure(row, "limit_bytes")
    predicted = figure(row, "predicted_n_ctx")
    result: dict[str, object] = {
        "n_ctx": n_ctx,
        "how": HOW.get(str(row.get("verified_by"))) if n_ctx else None,
        "allocated_n_ctx": row.get("allocated_n_ctx") if n_ctx else None,
        "prediction_off": predicted / n_ctx - 1 if n_ctx and predicted else None,
    }
    sizes = row if figure(row, "kv_bytes_per_token") else cell
    return {**row, **result} | _against_theory(n_ctx, sizes, memory, _which(row, "free"))


def _from_growth(row: Row) -> dict[str, object]:
    n_ctx = figure(row, "max_ctx")
    memory = figure(row, "memory_budget_bytes") or figure(row, "device_memory_bytes")
    result = {"n_ctx": n_ctx, "is_target": bool(row.get("max_ctx_is_target")), "how": "growing"}
    return {**row, **result} | _against_theory(n_ctx, row, memory, _which(row, "all"))


def _which(row: Row, unstated: str) -> str:
    """`budget (cgroup v1)`, `free VRAM`."""
    stated = row.get("limit_stated", figure(row, "memory_budget_bytes") is not None)
    mechanism = f" ({row['budget_means']})" if row.get("budget_means") else ""
    return (
        "budget" if stated else f"{unstated} {'RAM' if row.get('device') == 'cpu' else 'VRAM'}"
    ) + mechanism


def _against_theory(n_ctx: float | None, sizes: Row, memory: float | None, which: str) -> dict[str, object]:
    theory = theory_n_ctx(sizes, memory)
    return {
        "memory_bytes": memory,
        "memory_is": which if memory else None,
        "theory_n_ctx": theory,
        "share": n_ctx / theory if n_ctx and theory else None,
    }


def _published(row: Row | None) -> dict[str, object]:
    if row is None:
        return {}
    n_ctx, memory = figure(row, "max_ctx"), figure(row, "device_memory_bytes")
    against = _against_theory(n_ctx, row, memory, str(row.get("machine")))
    result = {"n_ctx": n_ctx, "is_target": bool(row.get("max_ctx_is_target")), "failure": failure(row)}
    return {f"published_{name}": value for name, value in {**result, **against}.items()}


def _with_unique_names(found: Sequence[Row]) -> list[Row]:
    """Rows with unique names: a variant that was both searched and grown has two rows."""
    names = Counter(str(row["name"]) for row in found)
    return [
        {**row, "name": f"{row['name']} ({row['how'] or 'searched'})"} if names[str(row["name"])] > 1 else row
        for row in found
    ]


# The figures of a row as the tables write them, one function for each kind of column.


PAST_TRAINING = ", past training"  # follows a length beyond the trained context
NOT_IDENTIFIABLE = "not identifiable"
NOT_HELD = ", not held"  # follows a length that the memory cannot hold
TOO_FAST = ", too fast"  # follows a TTFT below the time that reading the weights takes


def number(row: Row, key: str, form: str = "{:.2f}", unit: float = 1.0) -> str:
    value = figure(row, key)
    if value is not None:
        return form.format(value / unit)
    given = row.get(key)  # such as 100000+ of a published table
    return given if isinstance(given, str) and given else NONE


def quality(row: Row, key: str, form: str) -> str:
    """A figure of a score; without one the status of the score, or `not scored`."""
    text = number(row, key, form)
    state = row.get("quality")
    return text if text != NONE or state in (None, "ok") else str(state)


def peak_memory(row: Row, key: str) -> str:
    """Peak memory in MB: on a CPU the resident set, on a GPU the device's, else the allocator's."""
    keys = ("peak_rss_bytes",) if row.get("device") == "cpu" else ("peak_vram_bytes", "peak_allocator_bytes")
    found = [text for key in keys if (text := number(row, key, "{:,.0f}", 1e6)) != NONE]
    return found[0] if found else NONE


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
    """The status: `ok 3/3`; `ok 3/3 (2 disturbed)` where other processes disturbed two attempts; `reported`
    for a published figure."""
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
    """Whether there is a line whose slope is not distinguishable from zero."""
    has_line = figure(row, "slope_ms") is not None or figure(row, "B_ms") is not None
    return row.get("W_identifiable") is False and has_line


def B(row: Row, key: str) -> str:
    """Its interval or a flag has the reason where it is not identifiable; see analysis.records.known."""
    withheld = figure(row, "B_ms") is None and figure(row, "slope_ms") is not None
    return NOT_IDENTIFIABLE if withheld else number(row, key)


def W(row: Row, key: str) -> str:
    if hidden(row):
        return "not applicable" if row.get("kv_read") == "full" else NOT_IDENTIFIABLE
    return number(row, key, "{:,.0f}")


def W_share(row: Row, key: str) -> str:
    return NONE if hidden(row) else number(row, key, "{:.0%}")


def W_declared_share(row: Row, key: str) -> str:
    """Only where each step copies the cache; elsewhere it equals W_share."""
    return W_share(row, key) if row.get("kv_read") == "copied" else NONE


def ratio_to_baseline(row: Row, key: str) -> str:
    here, there = figure(row, key), figure(part(row, "baseline"), key)
    return NONE if here is None or not there else f"{here / there:.2f}x"


def of_baseline(row: Row, key: str, form: str = "{:.2f}") -> str:
    return number(part(row, "baseline"), key, form)


def slow_from(row: Row, key: str) -> str:
    value = figure(row, key)
    if value is not None:
        return f"{value:,.0f}"
    last = figure(row, "last_n")
    return f"not by {last:,.0f}" if last is not None else NONE


def tokens(row: Row, key: str) -> str:
    """A dash if unknown: a reported row has no series."""
    return number(row, key, "{:,.0f}") if row.get(key) else NONE


def longest(row: Row, key: str) -> str:
    """`36,076`; `100,000+` where a target was reached and nothing longer was tried; `not held` where
    the memory cannot hold that many tokens; `past training` where the model was trained on shorter ones."""
    length = number(row, key, "{:,.0f}") + "+" * bool(row.get("max_ctx_is_target"))
    return length + NOT_HELD * (not held(row)) + PAST_TRAINING * bool(past_training(row))


def past_training(row: Row) -> list[str]:
    """Why the length of a row is beyond the trained context, in one sentence; empty where it is not."""
    code = Warnings.beyond_trained_context.name
    return [str(flag.get("detail")) for flag in parts(row, "flags") if flag.get("code") == code]


def ttft(row: Row, key: str) -> str:
    """`68.2`; `2.3, too fast` where the weights cannot have been read in that time."""
    code = Warnings.first_token_faster_than_limit.name
    faster = any(flag.get("code") == code for flag in parts(row, "flags"))
    text = number(row, key, "{:.1f}")
    return text if text == NONE else text + TOO_FAST * faster


def segments(row: Row, key: str) -> str:
    """`26 to 2,048: B 12.10, W 900; 2,049 to 9,999: B 14.10, flat`; a dash for a single segment, which is
    the line of the speed table."""
    found = parts(row, key)
    if len(found) < 2:
        return NONE
    lines = (
        f"{number(s, 'from_n', '{:,.0f}')} to {number(s, 'to_n', '{:,.0f}')}: B {number(s, 'B_ms')}, "
        + ("flat" if s.get("flat") else f"W {number(s, 'W_tokens_per_ms', '{:,.0f}')}")
        for s in found
    )
    return "; ".join(lines)


def spikes(row: Row, key: str) -> str:
    found = part(row, key)
    if not found.get("count"):
        return NONE
    period = number(found, "period_tokens", " every {:,.0f}")
    return f"{found['count']} of {number(found, 'size_ms', '{:.1f}')} ms" + (period if period != NONE else "")


def flags(row: Row, key: str) -> str:
    return ", ".join(dict.fromkeys(str(flag.get("code")) for flag in parts(row, key))) or NONE


# The tables of the page: their columns, how each is written, and what it means.


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
    _number(
        "MBU", "bandwidth_share", "{:.0%}", "all bytes read per second over the bandwidth measured in the run"
    ),
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


def column_cell(row: Row, column: Column) -> str:
    """One figure as text; without one, the status of a failed cell, or a dash."""
    text = column.text(row, column.key)
    return (failure(row) or NONE) if text == NONE and column.shows_failure else text


def used_columns(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns for which at least one row has a figure."""
    return [c for c in columns if any(c.text(row, c.key) != NONE for row in rows)]


# The tables of cells and of searches: for the terminal with their columns, for the page of given columns.


# Heading, key, how to show it.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("tokens", "tokens", "{}"),
    ("TTFT ms", "ttft_ms", "{:.1f}"),
    ("B ms", "B_ms", "{:.2f}"),
    ("W tok/ms", "W_tokens_per_ms", "{:.0f}"),
    ("BPW", "bpw", "{:.2f}"),
    ("MB/token", "weight_bytes_per_token", "mb"),
    ("tok/s start", "start_tokens_per_s", "{:.1f}"),
    ("tok/s end", "end_tokens_per_s", "{:.1f}"),
    ("MBU", "bandwidth_share", "{:.0%}"),
    ("peak RSS MB", "peak_rss_bytes", "mb"),
)
# Of a model that was scored on a text.
QUALITY: tuple[tuple[str, str, str], ...] = (
    ("PPL", "perplexity", "{:.3f}"),
    ("KLD", "kld_mean", "{:.5f}"),
    ("top-1", "top1", "{:.1%}"),
)


def shown(row: Row, key: str, form: str) -> str:
    """One figure as text; a dash where it is missing or not identifiable. MB are 1e6 bytes."""
    if key in (each for _, each, _ in QUALITY):
        return quality(row, key, form)
    value = row[key]
    if key == "W_tokens_per_ms" and row["kv_read"] == "full" and row["slope_ms"] is not None:
        return "not applicable"  # a static cache's latency does not depend on n
    if not isinstance(value, (int, float)) or (key == "W_tokens_per_ms" and not row["W_identifiable"]):
        return NONE
    return f"{value / 1e6:.0f}" if form == "mb" else form.format(value)


def bandwidth(rows: Sequence[Repeat]) -> str:
    """The bandwidth that each MBU of these rows is a share of: the highest of the row's own campaign. Empty
    without an MBU; that of a GPU is not computed yet."""
    with_mbu = [row for row in rows if row["bandwidth_share"] is not None]
    peaks = {peak for row in with_mbu if (peak := row["bandwidth_bytes_per_s"])}
    if not peaks:
        return ""
    low, high = (f"{peak / 1e9:.0f}" for peak in (min(peaks), max(peaks)))
    if low != high:
        return (
            f"MBU: share of the highest read bandwidth measured in each row's own run, {low} to {high} GB/s"
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


def of_columns(
    title: str, columns: Sequence[Column], rows: Sequence[Row], names: Sequence[str] | None = None
) -> Table:
    """One line per row, with its status. `names`: instead of the rows' own."""
    named = zip(names or [str(row["name"]) for row in rows], rows, strict=True)
    return Table(
        headings=["cell", "status", *(column.heading for column in columns)],
        lines=[[name, state(row), *(column_cell(row, column) for column in columns)] for name, row in named],
        numeric=[False, False, *(column.numeric for column in columns)],
        marked=not_ok(rows),
        title=title,
        meanings=["model, stack and variant", "outcome of the repeats", *(c.meaning for c in columns)],
    )


def cells(rows: Sequence[Cell]) -> Table:
    """One named line per cell."""
    columns = COLUMNS + (QUALITY if any(row.get("quality") for row in rows) else ())
    lines = [[row["name"], state(row), *(shown(row, key, form) for _, key, form in columns)] for row in rows]
    headings = ["cell", "status", *(heading for heading, _, _ in columns)]
    return Table(headings, lines, [False, False, *[True] * len(columns)], not_ok(rows))


def searches(rows: Sequence[Search]) -> Table:
    """One named line per search for the longest context."""
    whole = partial(formatted, form="{:.0f}")
    lines = [
        [
            *(row["name"], row["status"], whole(row["verified_n_ctx"]), whole(row["trained_context"])),
            *(row["verified_by"] or NONE, whole(row["predicted_n_ctx"])),
            *(whole(row["limit_bytes"], unit=1e6), str(row["live_probes"])),
            *(whole(row["search_s"]), whole(row["fill_s"])),
        ]
        for row in rows
    ]
    headings = [
        *("cell", "status", "longest n_ctx", "trained n_ctx", "verified by", "predicted", "limit MB"),
        *("probes", "search s", "filling s"),
    ]
    return Table(headings, lines, [False, False, *[True] * 8], not_ok(rows))


def not_ok(rows: Sequence[Row]) -> list[bool]:
    return [not ok(row) for row in rows]
