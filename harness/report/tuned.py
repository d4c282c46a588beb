"""The result of `harness tune`: a table of settings, the verdict, and how to run the winner."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.analysis.records.metrics import Metric
from harness.analysis.series.halving import DEFAULTS, Result, Setting, label
from harness.report.table import NONE, Table
from harness.stacks.header import Header
from harness.stacks.rules import Options
from harness.system.wording import plural


@dataclass(frozen=True)
class Found:
    """`winner`: null: none. `finalist`: the setting of the last race, if there was one. `metric`: of which
    more is better. `threshold`: the smallest relative gain that matters. `reasons`: by setting, why it has no
    figure."""

    results: Sequence[Result]
    winner: Setting | None
    finalist: Setting | None
    metric: Metric
    threshold: float
    reasons: Mapping[Setting, str]

    @property
    def measured(self) -> bool:
        """Whether there is a figure of the defaults, without which there is no verdict."""
        return any(each.setting == DEFAULTS and each.cost is not None for each in self.results)


def table(found: Found) -> Table:
    """A line for each setting."""
    headings = ["setting", "rounds", found.metric.unit, "gain", "95% CI", ""]
    lines = []
    for row in rows(found):
        interval = " to ".join(map(_signed, row["gain_ci95"] or ())) or NONE
        figures = [_number(row["figure"]), NONE if row["gain"] is None else _signed(row["gain"]), interval]
        lines.append([row["name"], str(row["rounds"]), *figures, _mark(row)])
    return Table(headings, lines, [False, True, True, True, True, False])


def rows(found: Found) -> list[dict[str, Any]]:
    """A flat object for each setting: `figure` in `unit`, `gain` against the defaults with its interval, both
    as a share of the defaults' figure; null: not measured, or of the defaults themselves."""
    return [
        {
            "name": label(each.setting),
            "options": dict(each.setting),
            "rounds": each.rounds,
            "metric": found.metric.name,
            "unit": found.metric.unit,
            "figure": None if each.cost is None else found.metric.figure(each.cost),
            **_gain(found.metric, each),
            "winner": each.setting == found.winner,
            "reason": found.reasons.get(each.setting) if each.cost is None else None,
        }
        for each in found.results
    ]


def verdict(found: Found) -> str:
    """One sentence."""
    if not found.measured:
        why = found.reasons.get(DEFAULTS, "no round of it has a valid figure")
        return f"the defaults could not be measured: {why}"
    without = sum(each.cost is None for each in found.results)
    lost = f"; {plural(without, 'setting')} gave no valid figure" if without else ""
    none = f"no setting is significantly faster than the defaults{lost}"
    if found.finalist is None:
        return f"{none}; gains below {100 * found.threshold:.3g}% are not looked for"
    (row,) = (each for each in rows(found) if each["name"] == label(found.finalist))
    gain = f"{_signed(row['gain'])} {row['unit']}, 95% CI {' to '.join(map(_signed, row['gain_ci95']))}"
    if found.winner is None:
        return f"{none}; the best of them, {row['name']}, has {gain}"
    return f"{row['name']} is significantly faster than the defaults: {gain}"


def command(header: Header, options: Options, weights: str | None) -> str | None:
    """The command line of the stack's own program with these options (resolved), but for the length of the
    context; null: it has none."""
    if not header.program or weights is None:
        return None
    words = [
        option.flag_for(options[name])
        for name, option in header.options.items()
        if option.default_from != "tokens"
    ]
    return " ".join([header.program.replace("{}", shlex.quote(weights)), *filter(None, words)])


def config_row(stack: str, options: Options) -> str:
    """`{stack: llamacpp, quant: q4_0, threads: 2}`, for the variants of a config."""
    pairs = (f"{key}: {_word(value)}" for key, value in {"stack": stack, **options}.items())
    return f"{{{', '.join(pairs)}}}"


def _gain(metric: Metric, result: Result) -> dict[str, Any]:
    if result.setting == DEFAULTS or not result.rounds:
        return {"gain": None, "gain_ci95": None}
    ends = result.change.ends
    known = sorted(metric.change(end) for end in ends) if ends else None
    return {"gain": metric.change(result.change.cost), "gain_ci95": known}


def _mark(row: Mapping[str, Any]) -> str:
    return "winner" if row["winner"] else row["reason"] or ""


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.1f}"


def _signed(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}"  # no minus before a zero


def _word(value: object) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", value)
    return str(value) if plain else json.dumps(value)
