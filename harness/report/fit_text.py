"""Output of `harness fit`: a table with one line per variant and its warnings, or a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.analysis.columns import Ends
from harness.analysis.warnings import Warnings
from harness.base.text import plural
from harness.dataset.logs import Row
from harness.report.text_table import NONE, formatted, say
from harness.report.theory_text import Columns, short, theory_table


def interval(value: float | None, ends: Ends | None, digits: int) -> str:
    """`22.80 (22.75 to 22.84)`; `900 (> 512)` or `0.40 (< 1.25)` where one end is open."""
    if value is None:
        return NONE
    if ends is None:
        return f"{value:.{digits}f}"
    low, high = ends
    if low is None or high is None:
        end = f"< {high:.{digits}f}" if low is None else f"> {low:.{digits}f}"
        return f"{value:.{digits}f} ({end})"
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _W(row: Row) -> str:
    if not row["per_token"]:
        return NONE
    if row["shape"] == "short":
        return "too short"
    if row["W_tokens_per_ms"] is None or not row["W_identifiable"]:
        return "not identifiable"
    return interval(row["W_tokens_per_ms"], row["W_ci95"], _digits(row["W_tokens_per_ms"]))


def _digits(value: float) -> int:
    """Decimals that give three significant digits; none from 100 on."""
    return max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0


def _prefill_rate(row: Row) -> float | None:
    prompt, first_ms = row["prompt_tokens"], row["first_token_ms"]
    return 1e3 * prompt / first_ms if prompt and first_ms else None


def _tpot(row: Row) -> str:
    """`13.2 at 8,064`: in the middle of the series, and the tokens of context there."""
    if row["median_ms"] is None or row["median_n"] is None:
        return NONE
    return f"{short(row['median_ms'])} at {row['median_n']:,}"


COLUMNS: Columns[Row] = (
    ("variant", lambda row: row["variant"]),
    ("tokens", lambda row: formatted(row["n_tokens"])),
    ("first ms", lambda row: short(row["first_token_ms"])),
    ("B ms", lambda row: interval(row["B_ms"], row["B_ci95_ms"], 2)),
    ("W tok/ms", _W),
    ("TPOT ms", _tpot),
    ("tok/s", lambda row: short(row["tokens_per_s"])),
    ("shape", lambda row: row["shape"] or NONE),
    ("spikes", lambda row: formatted(row["spikes"]["count"]) if row["per_token"] else NONE),
    ("every", lambda row: short(row["spikes"]["period_tokens"])),
    ("50 ms from n", lambda row: formatted(row["slow_from_n"])),
)
TOTALS: Columns[Row] = (
    ("variant", lambda row: row["variant"]),
    ("prompt", lambda row: formatted(row["prompt_tokens"])),
    ("first ms", lambda row: short(row["first_token_ms"])),
    ("prefill tok/s", lambda row: short(_prefill_rate(row))),
    ("tokens", lambda row: formatted(row["n_tokens"])),
    ("tok/s", lambda row: short(row["tokens_per_s"])),
    ("ms/token", lambda row: short(1e3 / row["tokens_per_s"] if row["tokens_per_s"] else None)),
    ("spread", lambda row: formatted(row["spread"], "{:.1%}")),
)
AGAINST: Columns[Row] = (
    ("B theory", lambda row: short(row["B_theory_ms"])),
    ("B MBU", lambda row: formatted(row["B_ratio"], "{:.0%}")),
    ("W theory", lambda row: short(row["W_theory"])),
    ("W MBU", lambda row: formatted(row["W_ratio"], "{:.0%}")),
    ("B as 16-bit", lambda row: short(row["B_as_w16_ms"])),
)

MEANINGS = {
    "first ms": "first: prefill",
    "B ms": "B: TPOT extrapolated to zero context; - where its interval exceeds 10% to each side",
    "W tok/ms": "W: tokens of context per further ms of TPOT",
    "TPOT ms": "TPOT: median, and the context at the middle of the series",
    "every": "every: tokens from spike to spike",
    "50 ms from n": "50 ms from n: where TPOT exceeds 50 ms",
    "B theory": "theory: what the bandwidth allows (harness theory)",
    "B MBU": "MBU: the share of it that was reached",
    "B as 16-bit": "B as 16-bit: B x 16 / BPW, the B of 16-bit weights at the same bandwidth",
}
TOTALS_MEANINGS = {
    "first ms": "first: TTFT, or the time of the prompt",
    "prefill tok/s": "prefill tok/s: prompt / first",
    "tok/s": "tok/s: of decode",
    "spread": "spread: standard deviation of the repetitions' rate",
}


MOST_SHOWN = 40  # variants; a log may have thousands of requests


def show_fits(rows: Sequence[Row], notes: Sequence[str], wide: bool) -> None:
    """Print the table of usable variants, robust fits that differ, warnings, unusable variants and notes; of
    many variants only the first."""
    rows, further = rows[:MOST_SHOWN], rows[MOST_SHOWN:]
    usable = [row for row in rows if row["unusable"] is None]
    if series := [row for row in usable if row["per_token"]]:
        against = "B_theory_ms" in series[0]
        theory_table((*COLUMNS, *(AGAINST if against else ())), series, wide, MEANINGS)
    if totals := [row for row in usable if not row["per_token"]]:
        theory_table(TOTALS, totals, wide, TOTALS_MEANINGS)
    for row in usable:
        if row["robust_B_ms"] is not None:
            W = f", W {short(row['robust_W_tokens_per_ms'])}" if row["W_identifiable"] else ""
            say(f"{row['variant']}: robust fit: B {row['robust_B_ms']:.2f} ms{W}")
        if len(row["segments"]) > 1:
            parts = (
                f"to n = {part['to_n']:,} "
                + ("" if part["B_ms"] is None else f"B {part['B_ms']:.2f} ms, ")
                + ("flat" if part["flat"] else f"W {short(part['W_tokens_per_ms'])}")
                for part in row["segments"]
            )
            say(f"{row['variant']}: {row['shape']}: {'; '.join(parts)}")
        for flag in row["flags"]:
            say(f"{row['variant']}: {flag['code']}: {flag['detail']}")
    for code in dict.fromkeys(flag["code"] for row in usable for flag in row["flags"]):
        say(f"next for {code}: {Warnings[code].next_step}")
    if any(row["shape"] == "short" for row in usable):
        say("too short: W needs 2,049 tokens")
    for row in rows:
        if row["unusable"] is not None:
            say(f"{row['variant']}: unusable: {row['unusable']}")
    for note in notes:
        say(f"note: {note}")
    if further:
        unusable = sum(row["unusable"] is not None for row in further)
        warned = sum(bool(row["flags"]) for row in further)
        more = plural(len(further), "more variant")
        say(f"{more}, {unusable} unusable, {warned} with warnings: --json has all")
