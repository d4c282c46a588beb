"""Flags for what is wrong with a series, from the series and the ceiling alone. Pure."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.columns import LimitFigures
from harness.analysis.line_fit import Floats
from harness.analysis.machine_drift import Drift
from harness.analysis.repeat_figures import LATE_SECOND, SWEEP, Analysis, jump, plateau
from harness.analysis.warnings import Flag, Warnings
from harness.base.text import list_named, plural
from harness.records.kinds import Record, done_of, loaded_of
from harness.records.token_times import Ints
from harness.theory import floors

# Flags for what is wrong with a series: codes and sentences, from the series and the ceiling alone. Pure.


CEILING_TOLERANCE = 1.05  # faster than the ceiling by more than this is a measurement error
# The same for figures without a series, against a data sheet's ceiling: allows for rounding.
DATA_SHEET_TOLERANCE = 1.02
NAMED = 8  # of series that are equal
ONE_LINE = ("line", "staircase", "flat")  # shapes that one line describes
SAME_N = 3  # tokens: how precisely the position of a change is known
ANEW = 1.5  # times the latency of lengths that the warm-up has reached
DRIFTED = 0.01  # share; a drift between the windows below this is no news


@dataclass(frozen=True)
class Limit:
    """The least time that the higher ceiling allows.

    `B_ms`: to read the weights once. `slope_ms`: per token of context; None: no limit. `first_ms`: for the
    first token, where it reads less than a later step; None: as B_ms. `declared_slope_ms`: per token of
    context, with the cache read as the stack declares, which may be more than once.
    """

    B_ms: float
    slope_ms: float | None
    first_ms: float | None = None
    declared_slope_ms: float | None = None

    @property
    def W_tokens_per_ms(self) -> float | None:
        return 1 / self.slope_ms if self.slope_ms else None

    @property
    def W_declared_tokens_per_ms(self) -> float | None:
        return 1 / self.declared_slope_ms if self.declared_slope_ms else None

    def figures(self, kv_read: str | None) -> LimitFigures:
        """As rows have them. `kv_read`: as the stack declares it."""
        return {
            "B_ms": self.B_ms,
            "W_tokens_per_ms": self.W_tokens_per_ms,
            "W_declared_tokens_per_ms": self.W_declared_tokens_per_ms if kv_read else None,
        }

    def shares(
        self, B_ms: float | None, W: float | None, identifiable: bool
    ) -> tuple[float | None, float | None]:
        """Shares of the ceiling that B and W reach; None where there is no figure or no limit."""
        allows = self.W_tokens_per_ms
        B_share = self.B_ms / B_ms if self.B_ms and B_ms and B_ms > 0 else None
        return B_share, W / allows if W and allows and identifiable else None


def flags(
    analysis: Analysis,
    limit: Limit | None = None,
    expected_tokens: int | None = None,
    kv_read: str | None = None,
    first_token: bool = True,
) -> list[Flag]:
    """All flags of one series. `expected_tokens`: how many were requested; None: not known.

    `kv_read`: as the stack declares it. With a static cache (`full`) a step may read more than prefill does.
    With a sliding window (`window`) latency is flat past the window. `first_token`: whether it may be
    compared with later steps.
    """
    raised = _first_token(analysis) if first_token and kv_read != "full" else []
    raised += [*_shape(analysis, kv_read == "window"), *_line(analysis)]
    count, sweep = analysis.figures["n_tokens"] or 0, analysis.figures["shape"] == SWEEP
    if expected_tokens is not None and count != expected_tokens and not sweep:
        tokens = plural(count, "token")
        raised.append(Warnings.early_stop.flag(tokens=tokens, expected=expected_tokens))
    if limit is not None:
        raised += _faster_than(analysis, limit)
    return raised


def published(
    B_ms: float | None, W_tokens_per_ms: float | None, first_token_ms: float | None, limit: Limit | None
) -> list[Flag]:
    """Flags of figures without a series: those faster than the ceiling allows."""
    if limit is None:
        return []
    raised, least = [], limit.B_ms / DATA_SHEET_TOLERANCE
    if B_ms is not None and B_ms < least:
        raised.append(Warnings.faster_than_limit.flag(took=f"B took {B_ms:.2f} ms", least=limit.B_ms))
    if first_token_ms is not None and first_token_ms < least:
        first = Warnings.first_token_faster_than_limit
        raised.append(first.flag(took=first_token_ms, least=limit.B_ms))
    if limit.slope_ms and W_tokens_per_ms and 1 / W_tokens_per_ms < limit.slope_ms / DATA_SHEET_TOLERANCE:
        raised.append(_slope(W_tokens_per_ms, limit.slope_ms))
    return raised


def machine_drift(drift: Drift | None) -> list[Flag]:
    """The flag of a machine that changed between the two windows of a run, beyond the interval and 1%."""
    if drift is None or not drift.significant or abs(drift.share) <= DRIFTED:
        return []
    longer = "longer" if drift.share > 0 else "less"
    return [Warnings.machine_drift.flag(share=abs(drift.share), longer=longer)]


def digest(series: Ints | Floats) -> str | None:
    """Equal for series that are equal to the last digit; None where there is one value or none."""
    return hashlib.sha256(np.ascontiguousarray(series).tobytes()).hexdigest() if len(series) > 1 else None


def identical(digests: Mapping[str, str | None]) -> dict[str, list[str]]:
    """By name: the others with the same digest, of each that has any."""
    names: dict[str, list[str]] = {}
    for name, found in digests.items():
        if found is not None:
            names.setdefault(found, []).append(name)
    alike = [same for same in names.values() if len(same) > 1]
    return {name: [other for other in same if other != name] for same in alike for name in same}


def equal_series(others: Sequence[str]) -> Flag:
    return Warnings.identical_series.flag(others=list_named(others, NAMED))


def same_changes(changes: Mapping[str, int | None]) -> dict[str, Flag]:
    """Flags by name: series of one stack whose mode changes at the same n. `changes`: `mode_changes_at`.

    A hot or disturbed machine changes at a different token in each series. A kernel chosen by context length
    changes at the same token in all.
    """
    raised = {}
    places = sorted(at for at in changes.values() if at is not None)
    for name, at in changes.items():
        if at is None:
            continue
        alike = bisect_right(places, at + SAME_N) - bisect_left(places, at - SAME_N)
        if alike > 1:
            raised[name] = Warnings.kernel_change.flag(series=alike, n=at)
    return raised


def _first_token(analysis: Analysis) -> list[Flag]:
    first, second, settled = analysis.figures.get("first_token_ms"), analysis.second_ms, analysis.settled_ms
    if first is None or second is None or settled is None or first >= floors.UNSYNCHRONISED * settled:
        return []
    late = f"; the second took {second:.0f}: the clock was read before the device was done"
    second_ms = late if second > LATE_SECOND * settled else ""
    return [Warnings.first_token_unsynchronised.flag(first=first, later=settled, second=second_ms)]


def past_warm_up(record: Record, latency_ns: Ints) -> list[Flag]:
    """A jump exactly where the warm-up's windows ended: the stack makes something for each context length
    (cuDNN's attention: a plan, 35 ms on an H200)."""
    windows = (done_of(record).get("warmup") or {}).get("windows_ns")
    warmed = len(windows[-1]) + 1 if windows else 0
    if not warmed or len(latency_ns) < 2 * warmed or record["workload"]["kind"] != "decode":
        return []
    seen, new = (
        float(np.median(each)) / 1e6 for each in (latency_ns[1:warmed], latency_ns[warmed : 2 * warmed])
    )
    if new < ANEW * seen:
        return []
    by_cudnn = "cudnn" in (loaded_of(record).get("settings") or {}).get("sdpa_kernels", [])
    why = "; its attention is cuDNN's, which makes a plan for each" if by_cudnn else ""
    return [Warnings.slower_at_new_lengths.flag(seen=seen, new=new, tokens=warmed, why=why)]


def _line(analysis: Analysis) -> list[Flag]:
    """Points that the line leaves out, and why it may have no interval."""
    raised, figures = [], analysis.figures
    if analysis.late_ms is not None and analysis.settled_ms is not None:
        raised.append(Warnings.late_second_token.flag(gap=analysis.late_ms, later=analysis.settled_ms))
    if figures["plain_B_ms"] is not None:
        W = figures["plain_W_tokens_per_ms"]
        plain = f"B {figures['plain_B_ms']:.2f} ms" + (
            f", W {W:,.0f}" if W and figures["W_identifiable"] else ""
        )
        raised.append(Warnings.spikes_left_out.flag(line=plain))
    if analysis.copied:
        raised.append(Warnings.repeated_blocks.flag(copies=analysis.copied, tokens=figures["n_tokens"]))
    if analysis.bends:
        raised.append(Warnings.bends.flag())
    return raised


def _shape(analysis: Analysis, slides: bool) -> list[Flag]:
    level = analysis.figures["median_ms"]
    if analysis.shape is None or level is None:
        return []
    if flat := plateau(analysis.shape, level):
        return [] if slides else [Warnings.plateau_past_window.flag(n=flat.from_n - 1)]
    if levels := jump(analysis.shape):
        at = analysis.shape.segments[1].from_n
        return [Warnings.drift.flag(before=levels[0], after=levels[1], n=at)]
    if analysis.halves and analysis.shape.name in ONE_LINE:
        one, two = analysis.halves
        B, rises = (one.B_ms, two.B_ms), (one.slope_ms * 1e3, two.slope_ms * 1e3)
        return [Warnings.halves_differ.flag(first_B=B[0], second_B=B[1], first=rises[0], second=rises[1])]
    return []


def _faster_than(analysis: Analysis, limit: Limit) -> list[Flag]:
    raised = []
    allowed = limit.B_ms / CEILING_TOLERANCE
    if analysis.fastest_ms is not None and analysis.fastest_ms < allowed:
        took = f"{analysis.fastest_ms:.2f} ms"
        raised.append(Warnings.faster_than_limit.flag(took=took, least=limit.B_ms))
    first_ms = limit.B_ms if limit.first_ms is None else limit.first_ms
    first_token_ms = analysis.figures.get("first_token_ms")
    if first_token_ms is not None and first_token_ms < first_ms / CEILING_TOLERANCE:
        first = Warnings.first_token_faster_than_limit
        raised.append(first.flag(took=first_token_ms, least=first_ms))
    W, most = (
        analysis.figures["W_tokens_per_ms"] if analysis.figures["W_identifiable"] else None,
        analysis.steepest_ms,
    )
    if W and limit.slope_ms and most is not None and most < limit.slope_ms / CEILING_TOLERANCE:
        raised.append(_slope(W, limit.slope_ms))
    return raised


def _slope(W: float, slope_ms: float) -> Flag:
    return Warnings.slope_faster_than_limit.flag(W=W, most=1 / slope_ms)


def rotary_notes(record: Record) -> list[Flag]:
    """A flag where llama.cpp rotates positions differently from the model's config.json."""
    off = record["model"]["weights"].get("yarn_difference")
    return [Warnings.yarn_rounded.flag(off=off)] if off else []
