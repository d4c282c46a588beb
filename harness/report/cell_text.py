"""The figures of a row as the tables write them, one function for each kind of column."""

from __future__ import annotations

from harness.analysis.records.verdicts import BEYOND_TRAINED
from harness.dataset.study import Row, bounds, figure, part, parts
from harness.report.contexts import held
from harness.report.table import NONE

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
    return [str(flag.get("detail")) for flag in parts(row, "flags") if flag.get("code") == BEYOND_TRAINED]


def ttft(row: Row, key: str) -> str:
    """`68.2`; `2.3, too fast` where the weights cannot have been read in that time."""
    faster = any(flag.get("code") == "first_token_faster_than_limit" for flag in parts(row, "flags"))
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
