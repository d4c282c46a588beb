"""The figures and verdicts of records: as a bundle claims them, and as its records give them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.analysis.records import agreement, searches
from harness.dataset.gather import Gathered
from harness.results import Stored
from harness.system.endings import FAULTS
from harness.system.wording import shortened

OF_REPEATS = (
    *("status", "tokens", "ttft_ms", "tokens_per_s", "B_ms", "W_tokens_per_ms", "bandwidth_share"),
    *("peak_rss_bytes", "peak_vram_bytes", "max_ctx", "joules_per_token"),
)
OF_SEARCHES = ("status", "verified_n_ctx", "allocated_n_ctx", "limit_bytes")
OF_CHECKS = ("verdict",)
TOLERANCE = 1e-6  # relative: the same arithmetic on another CPU

Figures = dict[str, Any]


def of(stored: Sequence[Stored], gathered: Gathered) -> list[Figures]:
    """The figures of each record, in order; empty for one that cannot be analysed."""
    rows = {
        each.folder: {**row, **fitted}
        for row, fitted, each in zip(gathered.repeats, gathered.fitted, gathered.stored, strict=True)
    }
    found = []
    for each in stored:
        try:
            found.append(_figures(each, rows))
        except FAULTS:
            found.append({})
    return found


def _figures(each: Stored, rows: Mapping[Any, Any]) -> Figures:
    kind = each.record["kind"]
    row: Mapping[str, Any]
    names: Sequence[str]
    if kind == "searched":
        row, names = searches.row(each.record), OF_SEARCHES
    elif kind == "checked":
        row, names = agreement.row(each.record), OF_CHECKS
    else:
        row, names = rows.get(each.folder, {}), OF_REPEATS
    return {name: row.get(name) for name in names} if row else {}


def differences(claimed: Mapping[str, Any], computed: Mapping[str, Any]) -> list[str]:
    """A sentence for each figure that is not what the records give."""
    return [
        f"{name} is {_shown(computed.get(name))} by its record, but {_shown(claimed.get(name))} was claimed"
        for name in _all(claimed, computed)
        if not _same(claimed.get(name), computed.get(name))
    ]


def _all(*of: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for names in of for name in names))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=TOLERANCE)
    return bool(a == b)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return shortened(str(value)) if isinstance(value, str | int | None) else "no single value"
