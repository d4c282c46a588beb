"""The result of `harness tune`: a table of settings, the verdict, and how to run the winner."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import TypedDict

from harness.analysis.figures import Figure
from harness.analysis.racing import DEFAULTS, FIRST_LOOK, Result, Setting, options_label
from harness.base.text import plural, signed_percent
from harness.report.text_table import NONE, Table, formatted
from harness.stacks.header import Header, Options, Value


@dataclass(frozen=True)
class Found:
    """`winner`: None if there is none. `finalist`: the setting of the last race, if there was one. `metric`:
    of which more is better. `threshold`: the smallest relative gain that matters. `reasons`: by setting, why
    it has no figure."""

    results: Sequence[Result]
    winner: Setting | None
    finalist: Setting | None
    metric: Figure
    threshold: float
    reasons: Mapping[Setting, str]

    @property
    def measured(self) -> bool:
        """Whether there is a figure of the defaults, without which there is no verdict."""
        return any(result.setting == DEFAULTS and result.cost is not None for result in self.results)

    @property
    def decided(self) -> bool:
        """Whether every setting was compared with the defaults, or failed by its own fault."""
        return self.measured and not any(result.undecided for result in self.results)


def table(found: Found) -> Table:
    """A line for each setting. A gain that is not significant is shown by its interval alone."""
    headings = ["setting", "rounds", found.metric.unit, "gain", "95% CI", ""]
    lines = []
    for row, result in zip(rows(found), found.results, strict=True):
        gain = NONE if row["gain"] is None or not result.significant else signed_percent(row["gain"])
        figures = [formatted(row["figure"], "{:,.1f}"), gain, _between(row) or NONE]
        lines.append([row["name"], str(row["rounds"]), *figures, _mark(row)])
    return Table(headings, lines, [False, True, True, True, True, False])


class SettingRow(TypedDict):
    """`gain`: against the defaults, as a share of their figure; None: not measured, of the defaults, or
    `provisional`: too few rounds, or too much noise, for a gain."""

    name: str
    options: dict[str, Value]
    rounds: int
    metric: str
    unit: str
    figure: float | None
    gain: float | None
    gain_ci95: list[float] | None
    winner: bool
    provisional: bool
    reason: str | None


def rows(found: Found) -> list[SettingRow]:
    gains = [_gain(found.metric, result) for result in found.results]
    return [
        {
            "name": options_label(result.setting),
            "options": dict(result.setting),
            "rounds": result.rounds,
            "metric": found.metric.name,
            "unit": found.metric.unit,
            "figure": None if result.cost is None else found.metric.figure(result.cost),
            "gain": gain,
            "gain_ci95": ends,
            "winner": result.setting == found.winner,
            "provisional": result.undecided,
            "reason": _reason(found, result),
        }
        for result, (gain, ends) in zip(found.results, gains, strict=True)
    ]


def _reason(found: Found, result: Result) -> str | None:
    """Why a setting has no figure or no gain; None if it has both."""
    lost = found.reasons.get(result.setting)
    if result.cost is None:
        return lost
    if not result.undecided:
        return None
    if result.rounds >= FIRST_LOOK:
        return "the rounds differ too much for a gain"
    few = f"compared in {plural(result.rounds, 'round')} of at least {FIRST_LOOK}"
    return "; ".join(filter(None, [few, lost or found.reasons.get(DEFAULTS)]))


def verdict(found: Found) -> str:
    """One sentence."""
    if not found.measured:
        why = found.reasons.get(DEFAULTS, "no round of it has a valid figure")
        return f"the defaults could not be measured: {why}"
    undecided = sum(result.undecided for result in found.results)
    total = plural(len(found.results) - 1, "setting")
    failed = sum(result.failed for result in found.results)
    lost = f"; {plural(failed, 'setting')} gave no valid figure" if failed else ""
    no_winner = f"no setting is significantly faster than the defaults{lost}"
    again = "measure again on a quiet machine, with more --rounds, or with --busy"
    if undecided and found.winner is None:
        return f"provisional: {undecided} of {total} could not be compared with the defaults{lost}; {again}"
    if found.finalist is None:
        return f"{no_winner}; gains below {100 * found.threshold:.3g}% are not looked for"
    (row,) = (result for result in rows(found) if result["name"] == options_label(found.finalist))
    if found.winner is None:
        return f"{no_winner}; the best of them, {row['name']}, has {_between(row)} of {row['unit']} (95% CI)"
    gain = f"{signed_percent(row['gain'] or 0.0)} {row['unit']}, 95% CI {_between(row)}"
    others = f"; {undecided} of {total} could not be compared: {again}" if undecided else ""
    return f"{row['name']} is significantly faster than the defaults: {gain}{others}"


def _between(row: SettingRow) -> str:
    return " to ".join(map(signed_percent, row["gain_ci95"] or ()))


def command(header: Header, options: Options, weights: str | None) -> str | None:
    """The command line of the stack's own program with these options (resolved), but for the length of the
    context; None: it has none."""
    if not header.program or weights is None:
        return None
    words = [
        option.flag_for(options.get(name))
        for name, option in header.options.items()
        if option.default_from != "tokens"
    ]
    return " ".join([header.program.replace("{}", shlex.quote(weights)), *filter(None, words)])


def config_row(stack: str, options: Options) -> str:
    """`{stack: llamacpp, quant: q4_0, threads: 2}`, for the variants of a config."""
    pairs = (f"{key}: {_config_word(value)}" for key, value in {"stack": stack, **options}.items())
    return f"{{{', '.join(pairs)}}}"


def _gain(metric: Figure, result: Result) -> tuple[float | None, list[float] | None]:
    if result.setting == DEFAULTS or not result.rounds or result.undecided:
        return None, None
    ends = result.change.ends
    both_ends = sorted(metric.change(end) for end in ends) if ends else None
    return metric.change(result.change.cost), both_ends


def _mark(row: SettingRow) -> str:
    if row["winner"]:
        return "winner"
    return ": ".join(filter(None, ["provisional" * row["provisional"], row["reason"]]))


def _config_word(value: object) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", value)
    return str(value) if plain else json.dumps(value)
