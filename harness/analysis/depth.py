"""What tables of timed rows say: speed at each depth, seconds per turn, whether the cache was right. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from harness.analysis import prefill, repeat_figures, users, windows
from harness.analysis.columns import AtDepthRow, DepthsRow, Figures, PassRow, SurfaceFigures, TaskRow, TurnRow
from harness.analysis.warnings import Flag, Warnings
from harness.base.text import plural
from harness.records import tables
from harness.records.kinds import Record, done_of, loaded_of
from harness.records.measured import Surface

Columns = Mapping[str, Sequence[int]]

LEAST_CONTROL = 0.01  # of the logits: below, they do not show whether keys and values were written
FAR_LESS = 0.5  # of the first turn's time, for more tokens
AS_LONG = 0.9  # as without the prefix
GROWS = 1.2  # times the first turn's time: prefill is no plateau there
TURN_FAULTS = {
    False: ("a prefix was reused", "tokens were evaluated twice"),
    True: ("tokens were left out", "its prefix was not reused"),
}
"""By whether a turn reuses its prefix: what fewer and what more evaluated tokens mean."""


def surface_row(workload: str, repeats_columns: Sequence[Columns]) -> SurfaceFigures:
    """Figures of a kind of workload, from the tables of its repeats together; None or empty for others."""
    return {
        "passes": passes(repeats_columns) if workload == "prefill" else [],
        "depths": depths(repeats_columns) if workload == "depth" else None,
        "tasks": tasks(repeats_columns) if workload == "turns" else [],
        "users": users.rows(repeats_columns) if workload == "batch" else [],
    }


def surface_faults(record: Record, table: Columns) -> list[Flag]:
    """Reasons why the rows are wrong. `table`: empty if it was not read."""
    surface = done_of(record).get("surface") or Surface()
    is_served = bool(loaded_of(record).get("served"))  # what a server keeps of a prefix is its own choice
    raised = []
    for check in surface.get("checks", []):
        if check["control"] > LEAST_CONTROL and check["distance"] > check["control"] / 2:
            tokens = plural(check["n"], "token")
            raised.append(Warnings.cache_not_written.flag(**{**check, "tokens": tokens}))
            break
    for turn in surface.get("counted", []):
        fed, evaluated = turn["fed"], turn["evaluated"]
        if evaluated < fed or (evaluated > fed and not is_served):
            fewer, more = TURN_FAULTS[bool(turn["reuse"])]
            what = fewer if evaluated < fed else more
            numbers = {"turn": turn["turn"], "evaluated": evaluated, "given": fed}
            raised.append(Warnings.turn_not_evaluated.flag(what=what, **numbers))
            break
    server_counts = is_served and surface.get("counted")
    if not raised and not server_counts and tables.name_of(record) == "turns":
        raised += _by_time(table, is_served)
    return raised


def _by_time(table: Columns, is_served: bool) -> list[Flag]:
    """A prefix that times show to be reused, or not to be where it must; empty: none."""
    rows = _by_row(table)
    cold, with_prefix = ({row["turn"]: row for row in rows if row["reuse"] == reuse} for reuse in (0, 1))
    if not (first := cold.get(1)):
        return []
    for turn, row in cold.items():
        far_less = row["prefill_ns"] < FAR_LESS * first["prefill_ns"]
        # A first turn that the machine slowed proves nothing: a reused prefix takes as long as a kept one.
        if row["evaluated"] >= first["evaluated"] and far_less and _as_fast(row, with_prefix.get(turn)):
            less = f"{row['prefill_ns'] / 1e6:.1f} ms for {plural(row['evaluated'], 'token')}"
            than = f"{first['prefill_ns'] / 1e6:.1f} ms for {first['evaluated']}"
            return [Warnings.turn_prefix_reused.flag(turn=turn, less=less, first=than)]
    for turn, row in with_prefix.items():
        other = cold.get(turn) if not is_served else None
        if other is None or other["prefill_ns"] <= GROWS * first["prefill_ns"]:
            continue
        fewer = 4 * row["evaluated"] <= other["evaluated"]
        if fewer and row["prefill_ns"] > AS_LONG * other["prefill_ns"]:
            ms, without = row["prefill_ns"] / 1e6, other["prefill_ns"] / 1e6
            return [Warnings.turn_prefix_lost.flag(turn=turn, ms=ms, without=without)]
    return []


def _as_fast(row: dict[str, int], with_prefix: dict[str, int] | None) -> bool:
    """Whether a turn took no longer than with its prefix kept and what was decoded evaluated again."""
    if with_prefix is None:
        return True
    return AS_LONG * row["prefill_ns"] < with_prefix["prefill_ns"] * (
        1 + with_prefix["decoded"] / with_prefix["evaluated"]
    )


def passes(repeats_columns: Sequence[Columns]) -> list[PassRow]:
    """The passes of prefill: medians over those of all repeats, at one level."""
    return [
        PassRow(
            depth=depth, n=int(length), ms=of.median_ms(length), passes=int(np.count_nonzero(of.n == length))
        )
        for depth, of in sorted(prefill.by_depth(repeats_columns).items())
        for length in of.lengths
    ]


def depths(all_columns: Sequence[Columns]) -> DepthsRow | None:
    """The speed at each depth: the inverse of the mean over windows, and of these over repeats. Of several
    repeats without intervals, which their campaign gives: see cell_intervals.rates_at_depths."""
    repeats = [of for table in all_columns if (of := windows.analyse_windows(table))]
    at: dict[int, list[windows.AtDepth]] = {}
    for windows_at in (windows_at for of in repeats for windows_at in of.at):
        at.setdefault(windows_at.depth, []).append(windows_at)
    if not at:
        return None
    return {
        "at": [_at_depth(depth, alike) for depth, alike in sorted(at.items())],
        "curved": windows.curved(all_columns),
    }


def _at_depth(depth: int, repeats: Sequence[windows.AtDepth]) -> AtDepthRow:
    ms, ends = statistics.fmean(repeat.ms for repeat in repeats), repeats[0].ends_ms
    return AtDepthRow(
        depth=depth,
        ms=ms,
        tokens_per_s=1e3 / ms,
        tokens_per_s_ci95=[1e3 / ends[1], 1e3 / ends[0] if ends[0] > 0 else None]
        if ends and len(repeats) == 1
        else None,
        windows=sum(repeat.windows for repeat in repeats),
    )


def surface_figures(table: Columns) -> Figures | None:
    """B, W and tok/s of one repeat's windows; None without a line."""
    windows_found = windows.analyse_windows(table)
    if windows_found is None:
        return None
    line, slope = windows_found.line, windows_found.slope_ends_ms
    figures = repeat_figures.empty_figures(windows_found.tokens)
    figures |= {
        "last_n": windows_found.deepest,
        "median_ms": windows_found.mean_ms,
        "B_ms": line.B_ms if line else None,
        "B_ci95_ms": [*windows_found.B_ends_ms] if windows_found.B_ends_ms else None,
        "slope_ms": line.slope_ms if line else None,
        "slope_ci95_ms": [*slope] if slope else None,
        "W_tokens_per_ms": line.W_tokens_per_ms if line else None,
        "W_ci95": repeat_figures.inverse(slope) if slope else None,
        "W_identifiable": slope is not None and slope[0] > 0,
    }
    return figures


def tasks(all_columns: Sequence[Columns]) -> list[TaskRow]:
    """The conversations of turns: one without its prefix kept, and one with it; medians over repeats."""
    rows = [row for table in all_columns for row in _by_row(table)]
    conversations = []
    for reuse in sorted({row["reuse"] for row in rows}):
        turns = []
        for turn in sorted({row["turn"] for row in rows if row["reuse"] == reuse}):
            same = [row for row in rows if row["reuse"] == reuse and row["turn"] == turn]
            prefill, decode = (
                statistics.median(row[name] / 1e6 for row in same) for name in ("prefill_ns", "decode_ns")
            )
            last = same[-1]
            turns.append(
                TurnRow(
                    turn=turn,
                    depth=last["depth"],
                    evaluated=last["evaluated"],
                    prefill_ms=prefill,
                    decode_ms=decode,
                    decoded=last["decoded"],
                )
            )
        later = [turn["prefill_ms"] for turn in turns[1:]]
        prefill_s = sum(turn["prefill_ms"] for turn in turns) / 1e3
        conversations.append(
            TaskRow(
                prefix_kept=bool(reuse),
                first_ttft_ms=turns[0]["prefill_ms"],
                later_ttft_ms=statistics.median(later) if later else None,
                prefill_s=prefill_s,
                task_s=prefill_s + sum(turn["decode_ms"] for turn in turns) / 1e3,
                turns=turns,
            )
        )
    return conversations


def _by_row(columns: Columns) -> list[dict[str, int]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
