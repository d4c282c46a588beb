"""What is wrong with a series, as codes and sentences, from the series and the ceiling alone. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.analysis.series.latency import Analysis, jump, plateau
from harness.analysis.series.line import Floats
from harness.analysis.series.shapes import Segment, is_flat
from harness.system.wording import plural

CEILING_TOLERANCE = 1.05  # faster than the ceiling by more than this is no measurement
# The same of figures without a series, whose ceiling is a data sheet's: for their rounding.
DATA_SHEET_TOLERANCE = 1.02
UNSYNCHRONISED = 0.9  # a prefill reads all weights too: it cannot take less than this of the steps after it
SAME_N = 3  # tokens: to within which the place of a change is found
SECOND_TOKEN = 5.0  # times the steps after it: where the time of an unsynchronised first token went


@dataclass(frozen=True)
class Flag:
    """`invalidates`: which figures: `all`, `W`, `first token`; null for a remark."""

    code: str
    detail: str
    invalidates: str | None = "all"

    def row(self) -> dict[str, str]:
        return {"code": self.code, "detail": self.detail}


@dataclass(frozen=True)
class Limit:
    """What the higher ceiling allows: ms to read the weights once, ms per token of context (null: none).

    `first_ms`: of the first token, where it need not read all that a step reads (null: as B_ms).
    `declared_slope_ms`: with the cache read as the stack declares, be that more than once.
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
        """Of the ceiling, as B and as W reach it; null where there is no figure or no limit."""
        allows = self.W_tokens_per_ms
        B_share = self.B_ms / B_ms if self.B_ms and B_ms and B_ms > 0 else None
        return B_share, W / allows if W and allows and identifiable else None


def flags(
    found: Analysis,
    limit: Limit | None = None,
    expected_tokens: int | None = None,
    kv_read: str | None = None,
) -> list[Flag]:
    """All that is wrong with one series; `expected_tokens`: how many were asked for, where that is known.

    `kv_read`: as the stack declares it. With a static cache (`full`) a step may read more than a prefill
    does; a sliding one (`window`) is flat from its window on.
    """
    raised = [*(_first_token(found) if kv_read != "full" else []), *_shape(found, kv_read == "window")]
    if expected_tokens is not None and found.n_tokens != expected_tokens:
        raised.append(
            Flag("early_stop", f"{plural(found.n_tokens, 'token')} of {expected_tokens}", invalidates=None)
        )
    if limit is not None:
        raised += _faster_than(found, limit)
    return raised


def published(
    B_ms: float | None, W_tokens_per_ms: float | None, first_token_ms: float | None, limit: Limit | None
) -> list[Flag]:
    """What is wrong with figures that have no series: faster than the ceiling allows."""
    if limit is None:
        return []
    raised = []
    for code, what, ms in (
        ("faster_than_limit", "B", B_ms),
        ("first_token_faster_than_limit", "the first token", first_token_ms),
    ):
        if ms is not None and ms < limit.B_ms / DATA_SHEET_TOLERANCE:
            detail = f"{what} took {ms:.2f} ms, and reading the weights takes {limit.B_ms:.2f}"
            raised.append(Flag(code, detail, "first token" if what != "B" else "all"))
    if limit.slope_ms and W_tokens_per_ms and 1 / W_tokens_per_ms < limit.slope_ms / DATA_SHEET_TOLERANCE:
        raised.append(_slope(W_tokens_per_ms, limit.slope_ms))
    return raised


def identical(series: Mapping[str, Floats]) -> dict[str, Flag]:
    """By name: those that are equal to the last digit to another one."""
    names: dict[bytes, list[str]] = {}
    for name, ms in series.items():
        names.setdefault(hashlib.sha256(np.ascontiguousarray(ms).tobytes()).digest(), []).append(name)
    return {
        name: Flag(
            "identical_series", f"equal to the last digit to {', '.join(o for o in same if o != name)}"
        )
        for same in names.values()
        if len(same) > 1
        for name in same
    }


def same_changes(changes: Mapping[str, int | None]) -> dict[str, Flag]:
    """By name: series of one stack whose mode changes at the same n as another's. `changes`: as of
    series.change_of_mode.

    A machine that heats up or is disturbed changes at another token in each series; a kernel that is chosen
    by the length of the context changes at the same one.
    """
    raised = {}
    for name, at in changes.items():
        if at is None:
            continue
        alike = sum(other is not None and abs(other - at) <= SAME_N for other in changes.values())
        if alike > 1:
            detail = (
                f"at n = {at:,}: a change at the same n in {alike} series of this stack: a change of kernel"
            )
            raised[name] = Flag("kernel_change", detail, invalidates=None)
    return raised


def _first_token(found: Analysis) -> list[Flag]:
    first, second, settled = found.first_token_ms, found.second_ms, found.settled_ms
    if first is None or second is None or settled is None or first >= UNSYNCHRONISED * settled:
        return []
    detail = f"the first token took {first:.2f} ms, the steps after it {settled:.2f}, and a prefill reads"
    detail += " the weights as often"
    if second > SECOND_TOKEN * settled:
        detail += f"; the second took {second:.0f}: the clock was read before the device was done"
    return [Flag("first_token_unsynchronised", detail, invalidates="first token")]


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
        return [Flag("drift", f"{detail}: the machine or the kernel changed, not the work", invalidates=None)]
    return []


def _faster_than(found: Analysis, limit: Limit) -> list[Flag]:
    raised = []
    allowed = limit.B_ms / CEILING_TOLERANCE
    if found.fastest_ms is not None and found.fastest_ms < allowed:
        raised.append(
            Flag(
                "faster_than_limit",
                f"{found.fastest_ms:.2f} ms, and reading the weights takes {limit.B_ms:.2f}",
            )
        )
    first_ms = limit.B_ms if limit.first_ms is None else limit.first_ms
    if found.first_token_ms is not None and found.first_token_ms < first_ms / CEILING_TOLERANCE:
        detail = f"the first token took {found.first_token_ms:.2f} ms, and reading the weights takes"
        raised.append(Flag("first_token_faster_than_limit", f"{detail} {first_ms:.2f}", "first token"))
    if limit.slope_ms and found.line and found.W_identifiable:
        most = _steepest_ms(found)
        if most is not None and most < limit.slope_ms / CEILING_TOLERANCE:
            raised.append(_slope(1 / found.line.slope_ms, limit.slope_ms))
    return raised


def _steepest_ms(found: Analysis) -> float | None:
    """The most that a token of context may cost by this series; null where the line does not tell.

    A host that is slower than its device up to some position makes the line flatter than the work is, and a
    series that bends upwards: an honest one may then have any slope. So may one that hardly rises.
    """
    known, shape = found.interval, found.shape
    if known is None or shape is None or found.median_ms is None or found.bends_up:
        return None
    whole = Segment(shape.segments[0].from_n, shape.segments[-1].to_n, known.centre)
    return None if is_flat(whole, found.median_ms) else known.centre.slope_ms + known.slope_half_ms


def _slope(W: float, slope_ms: float) -> Flag:
    detail = f"W is {W:.0f} tokens/ms, and bandwidth allows {1 / slope_ms:.0f}"
    return Flag("slope_faster_than_limit", detail, "W")
