"""Flags for what is wrong with a series: codes and sentences, from the series and the ceiling alone. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.analysis.rows import FlagRow
from harness.analysis.series.drift import Drift
from harness.analysis.series.latency import LATE_SECOND, SWEEP, Analysis, jump, plateau
from harness.analysis.series.line import Floats
from harness.analysis.series.shapes import Segment, is_flat
from harness.system.wording import named, plural
from harness.theory import floors

CEILING_TOLERANCE = 1.05  # faster than the ceiling by more than this is a measurement error
# The same for figures without a series, against a data sheet's ceiling: allows for rounding.
DATA_SHEET_TOLERANCE = 1.02
NAMED = 8  # of series that are equal
ONE_LINE = ("line", "staircase", "flat")  # shapes that one line describes
SAME_N = 3  # tokens: how precisely the position of a change is known
DRIFTED = 0.01  # share; a drift between the windows below this is no news


@dataclass(frozen=True)
class Flag:
    """`invalidates`: which figures: `all`, `W` or `first token`; null for a note."""

    code: str
    detail: str
    invalidates: str | None = "all"

    def row(self) -> FlagRow:
        return {"code": self.code, "detail": self.detail}


@dataclass(frozen=True)
class Limit:
    """The least time that the higher ceiling allows.

    `B_ms`: to read the weights once. `slope_ms`: per token of context; null: no limit. `first_ms`: for the
    first token, where it reads less than a later step; null: as B_ms. `declared_slope_ms`: per token of
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

    def shares(
        self, B_ms: float | None, W: float | None, identifiable: bool
    ) -> tuple[float | None, float | None]:
        """Shares of the ceiling that B and W reach; null where there is no figure or no limit."""
        allows = self.W_tokens_per_ms
        B_share = self.B_ms / B_ms if self.B_ms and B_ms and B_ms > 0 else None
        return B_share, W / allows if W and allows and identifiable else None


def flags(
    found: Analysis,
    limit: Limit | None = None,
    expected_tokens: int | None = None,
    kv_read: str | None = None,
) -> list[Flag]:
    """All flags of one series. `expected_tokens`: how many were requested; null: not known.

    `kv_read`: as the stack declares it. With a static cache (`full`) a step may read more than prefill does.
    With a sliding window (`window`) latency is flat past the window.
    """
    raised = [*(_first_token(found) if kv_read != "full" else []), *_shape(found, kv_read == "window")]
    raised += _line(found)
    sweep = found.shape is not None and found.shape.name == SWEEP
    if expected_tokens is not None and found.n_tokens != expected_tokens and not sweep:
        raised.append(
            Flag("early_stop", f"{plural(found.n_tokens, 'token')} of {expected_tokens}", invalidates=None)
        )
    if limit is not None:
        raised += _faster_than(found, limit)
    return raised


def published(
    B_ms: float | None, W_tokens_per_ms: float | None, first_token_ms: float | None, limit: Limit | None
) -> list[Flag]:
    """Flags of figures without a series: those faster than the ceiling allows."""
    if limit is None:
        return []
    raised = []
    for code, what, ms in (
        ("faster_than_limit", "B", B_ms),
        ("first_token_faster_than_limit", "the first token", first_token_ms),
    ):
        if ms is not None and ms < limit.B_ms / DATA_SHEET_TOLERANCE:
            detail = f"{what} took {ms:.2f} ms, but reading the weights takes {limit.B_ms:.2f}"
            raised.append(Flag(code, detail, "first token" if what != "B" else "all"))
    if limit.slope_ms and W_tokens_per_ms and 1 / W_tokens_per_ms < limit.slope_ms / DATA_SHEET_TOLERANCE:
        raised.append(_slope(W_tokens_per_ms, limit.slope_ms))
    return raised


def machine_drift(drift: Drift | None) -> list[Flag]:
    """The flag of a machine that changed between the two windows of a run, beyond the interval and 1%."""
    if drift is None or not drift.significant or abs(drift.share) <= DRIFTED:
        return []
    longer = "longer" if drift.share > 0 else "less"
    detail = f"the same tokens took {abs(drift.share):.1%} {longer} after the run: the machine changed"
    return [Flag("machine_drift", f"{detail}; B and W are without it", invalidates=None)]


def identical(series: Mapping[str, Floats]) -> dict[str, Flag]:
    """Flags by name: series equal to another one to the last digit."""
    names: dict[bytes, list[str]] = {}
    for name, ms in series.items():
        names.setdefault(hashlib.sha256(np.ascontiguousarray(ms).tobytes()).digest(), []).append(name)
    return {
        name: Flag(
            "identical_series", f"equal to the last digit to {named([o for o in same if o != name], NAMED)}"
        )
        for same in names.values()
        if len(same) > 1
        for name in same
    }


def same_changes(changes: Mapping[str, int | None]) -> dict[str, Flag]:
    """Flags by name: series of one stack whose mode changes at the same n. `changes`: see change_of_mode.

    A hot or disturbed machine changes at a different token in each series. A kernel chosen by context length
    changes at the same token in all.
    """
    raised = {}
    for name, at in changes.items():
        if at is None:
            continue
        alike = sum(other is not None and abs(other - at) <= SAME_N for other in changes.values())
        if alike > 1:
            detail = f"{alike} series of this stack change at n = {at:,}: a change of kernel"
            raised[name] = Flag("kernel_change", detail, invalidates=None)
    return raised


def _first_token(found: Analysis) -> list[Flag]:
    first, second, settled = found.first_token_ms, found.second_ms, found.settled_ms
    if first is None or second is None or settled is None or first >= floors.UNSYNCHRONISED * settled:
        return []
    detail = f"the first token took {first:.2f} ms, later steps {settled:.2f}: prefill reads all weights too"
    if second > LATE_SECOND * settled:
        detail += f"; the second took {second:.0f}: the clock was read before the device was done"
    return [Flag("first_token_unsynchronised", detail, invalidates="first token")]


def _line(found: Analysis) -> list[Flag]:
    """What the line leaves out, and why it may have no interval."""
    raised = []
    if found.late_ms is not None and found.settled_ms is not None:
        gap = f"the gap before the second token took {found.late_ms:,.0f} ms"
        detail = (
            f"{gap}, later ones {found.settled_ms:.2f}: it belongs to prefill, and no figure of decode has it"
        )
        raised.append(Flag("late_second_token", detail, invalidates=None))
    if found.plain and found.line:
        W = found.plain.W_tokens_per_ms
        plain = f"B {found.plain.B_ms:.2f} ms" + (f", W {W:,.0f}" if W and found.W_identifiable else "")
        detail = "B and W are without spikes; with them least squares gives"
        raised.append(Flag("spikes_left_out", f"{detail} {plain}", invalidates=None))
    if found.copied:
        detail = f"{found.copied:,} of {found.n_tokens:,} latencies repeat earlier ones in blocks"
        raised.append(Flag("repeated_blocks", f"{detail}: copies give no interval", invalidates=None))
    if found.bends:
        raised.append(Flag("bends", "latency bends with depth: no line describes it well", invalidates=None))
    return raised


def _shape(found: Analysis, slides: bool) -> list[Flag]:
    if found.shape is None or found.median_ms is None:
        return []
    flat = plateau(found.shape, found.median_ms)
    if flat and slides:
        return []
    if flat:
        detail = f"latency rises up to n = {flat.from_n - 1} and is flat from there: the cache rolled over"
        return [Flag("plateau_past_window", detail)]
    if levels := jump(found.shape):
        at = found.shape.segments[1].from_n
        detail = f"latency jumps from {levels[0]:.2f} to {levels[1]:.2f} ms at n = {at:,}"
        return [
            Flag("drift", f"{detail}: the machine or the kernel changed, not the workload", invalidates=None)
        ]
    if found.halves and found.shape.name in ONE_LINE:
        first, second = found.halves
        detail = f"the first half gives B {first.B_ms:.2f} ms, the second {second.B_ms:.2f}"
        rises = f"{first.slope_ms * 1e3:.3g} and {second.slope_ms * 1e3:.3g} ms"
        detail += f"; latency rises by {rises} per 1,000 tokens"
        return [Flag("halves_differ", f"{detail}: noise is slow here, and the intervals allow for it", None)]
    return []


def _faster_than(found: Analysis, limit: Limit) -> list[Flag]:
    raised = []
    allowed = limit.B_ms / CEILING_TOLERANCE
    if found.fastest_ms is not None and found.fastest_ms < allowed:
        raised.append(
            Flag(
                "faster_than_limit",
                f"{found.fastest_ms:.2f} ms, but reading the weights takes {limit.B_ms:.2f}",
            )
        )
    first_ms = limit.B_ms if limit.first_ms is None else limit.first_ms
    if found.first_token_ms is not None and found.first_token_ms < first_ms / CEILING_TOLERANCE:
        detail = f"the first token took {found.first_token_ms:.2f} ms, but reading the weights takes"
        raised.append(Flag("first_token_faster_than_limit", f"{detail} {first_ms:.2f}", "first token"))
    if limit.slope_ms and found.line and found.W_identifiable:
        most = _steepest_ms(found)
        if most is not None and most < limit.slope_ms / CEILING_TOLERANCE:
            raised.append(_slope(1 / found.line.slope_ms, limit.slope_ms))
    return raised


def _steepest_ms(found: Analysis) -> float | None:
    """Upper end of the slope's interval, in ms per token of context; null where it is not reliable.

    A host that is slower than its device up to some position makes the line too flat, and the series bends
    upwards: a correct series may then have any slope. So may one that hardly rises.
    """
    known, shape = found.interval, found.shape
    if known is None or shape is None or found.median_ms is None or found.bends_up:
        return None
    whole = Segment(shape.segments[0].from_n, shape.segments[-1].to_n, known.centre)
    return None if is_flat(whole, found.median_ms) else known.centre.slope_ms + known.slope_half_ms


def _slope(W: float, slope_ms: float) -> Flag:
    detail = f"W is {W:.0f} tokens/ms, but bandwidth allows {1 / slope_ms:.0f}"
    return Flag("slope_faster_than_limit", detail, "W")
