"""Verdicts on the metrics of a cell: the change, its interval, and whether it exceeds the threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from typing_extensions import TypedDict

from harness.analysis import quality_figures
from harness.analysis.baseline import baseline
from harness.analysis.columns import AnyRow, Score, is_score, is_search
from harness.analysis.differences import Difference, Differences, beyond, costs, differences, significant
from harness.analysis.figures import COMPARED, VERDICTS, Figure
from harness.analysis.paired import Change
from harness.base.text import plural

SAME, UNCLEAR, INVALID = "SAME", "UNCLEAR", "INVALID"
WORSE = tuple(worse for worse, _ in VERDICTS.values())
BETTER = tuple(better for _, better in VERDICTS.values())
LEVEL = 0.9  # of the intervals
FEWEST_REPEATS = 2  # of a baseline: one repeat shows no run-to-run noise
# Standard deviation assumed between campaigns where a machine's own is unknown, by family. Speed: the worst
# of the days that benchmarks/validity simulates. Memory is counted, and hardly depends on the day; quality
# differs by rounding alone.
ASSUMED = {"slower": 0.03, "energy": 0.03, "memory": 0.002, "context": 0.002, "quality": 0.0002}


class MetricChange(TypedDict):
    """A metric on both sides, and the change between them; `verdict`: empty until it is judged. `nights`: the
    latest campaigns in a row that are worse, the new one included; `nights_to_fail`: how many fail."""

    metric: str
    unit: str
    better: str
    family: str
    base: float | None
    new: float | None
    base_repeats: int
    new_repeats: int
    base_campaigns: int
    change: float | None
    change_ci90: list[float] | None
    own_change: float | None
    own_ci90: list[float] | None
    shared_change: float | None
    shared_ci90: list[float] | None
    shared_between: str | None
    p: float | None
    spread: float | None
    threshold: float
    verdict: str
    nights: int
    nights_to_fail: int
    reason: str | None


class SharedFigures(TypedDict):
    """The shift of a metric that `cells` cells share, and how campaigns differ."""

    metric: str
    cells: int | None
    change: float | None
    ci90: list[float] | None
    between: str


@dataclass(frozen=True)
class Runs:
    """One side's usable rows of a cell, of repeats, searches and scores, by campaign."""

    campaigns: Mapping[str, Sequence[AnyRow]]

    def costs(self, metric: Figure) -> dict[str, list[float]]:
        """The metric's costs by campaign, without campaigns that have none."""
        by_campaign = {}
        for campaign, rows in self.campaigns.items():
            valid = [row for row in rows if row["status"] in metric.statuses]
            values = [value for row in valid if (value := metric.value(row)) is not None]
            if values:
                by_campaign[campaign] = [metric.cost(value) for value in values]
        return by_campaign

    def errors(self, metric: Figure) -> dict[str, float]:
        """By campaign, the standard error of a repeat by blocks of tokens (root mean square), where known."""
        by_campaign = {}
        for campaign, rows in self.campaigns.items():
            if errors := [error for row in rows if row["status"] == "ok" and (error := metric.error(row))]:
                by_campaign[campaign] = math.sqrt(fmean(error**2 for error in errors))
        return by_campaign

    @property
    def repeats(self) -> int:
        return sum(map(len, self.campaigns.values()))

    @property
    def searched(self) -> bool:
        """Whether all rows are searches, whose result is verified, not sampled."""
        return all(is_search(row) for rows in self.campaigns.values() for row in rows)

    @property
    def scored(self) -> bool:
        """Whether all rows are scores of a text, which hardly differ from run to run."""
        return all(is_score(row) for rows in self.campaigns.values() for row in rows)

    @property
    def latest(self) -> AnyRow:
        """The last row."""
        return [*self.campaigns.values()][-1][-1]

    @property
    def granule(self) -> int:
        """The step of the searches in tokens: results are multiples of it."""
        searches = [row for rows in self.campaigns.values() for row in rows if is_search(row)]
        return max(row["granule"] or 1 for row in searches)


@dataclass(frozen=True)
class Judged:
    """`rows`: one per pair and metric, with the pair's name. `shared`: one per metric that was compared."""

    rows: Sequence[tuple[str, MetricChange]]
    shared: Sequence[SharedFigures]


@dataclass(frozen=True)
class _Noisy:
    """A row whose verdict waits for all differences. `far`: a cost beyond which a change is no bad night."""

    row: MetricChange
    metric: Figure
    difference: Difference
    far: float = math.inf


def judged(
    pairs: Mapping[str, tuple[Runs, Runs]],
    thresholds: Mapping[str, float],
    history: Mapping[str, Runs] | None = None,
) -> Judged:
    """A row per pair (base, new) and metric that either side has.

    `thresholds`: by family, the relative change in cost above which a change counts. A change that is not
    statistically significant among all differences is UNCLEAR. `history`: earlier campaigns, where the
    baselines have too few to show how campaigns differ.
    """
    rows: list[tuple[str, MetricChange]] = []
    noisy: list[_Noisy] = []
    shared: list[SharedFigures] = []
    for metric in COMPARED:
        compared: dict[str, MetricChange] = {}
        for name, (base, new) in pairs.items():
            row = _row(metric, base, new, thresholds[metric.family])
            if row is None:
                continue
            rows.append((name, row))
            if row["verdict"]:
                continue
            if base.searched and new.searched:
                _context(row, metric, base, new)
            elif is_score(before := base.latest) and is_score(after := new.latest):
                if difference := _quality(row, metric, before, after):
                    noisy.append(_Noisy(row, metric, difference))
            else:
                compared[name] = row
        if compared:
            of_metric, figures = _campaigns(metric, compared, pairs, history or {})
            noisy += of_metric
            shared.append(figures)
    changes = significant({number: noisy_row.difference for number, noisy_row in enumerate(noisy)})
    for number, noisy_row in enumerate(noisy):
        _verdict(noisy_row, changes[number], len(noisy))
    order = {name: number for number, name in enumerate(pairs)}
    return Judged(sorted(rows, key=lambda named: order[named[0]]), shared)


def _campaigns(
    metric: Figure,
    rows: Mapping[str, MetricChange],
    pairs: Mapping[str, tuple[Runs, Runs]],
    history: Mapping[str, Runs],
) -> tuple[list[_Noisy], SharedFigures]:
    """The differences of the latest campaign from those before it, and what the cells share."""
    bound, prior = math.log1p(next(iter(rows.values()))["threshold"]), ASSUMED[metric.family]
    bases, news = ({name: pairs[name][side].costs(metric) for name in rows} for side in (0, 1))
    campaigns = sorted({campaign for of_cell in bases.values() for campaign in of_cell})
    values, errors = [], []
    for name in rows:
        base, new = (side.errors(metric) for side in pairs[name])
        values.append([*(bases[name].get(campaign, []) for campaign in campaigns), *news[name].values()])
        errors.append(
            [*(base.get(campaign, 0.0) for campaign in campaigns), new.get(next(iter(news[name])), 0.0)]
        )
    table = costs(values, errors)
    settled = baseline(table, bound, prior)
    earlier = {name: history[name].costs(metric) for name in rows if name in history}
    names = sorted({campaign for of_cell in earlier.values() for campaign in of_cell})
    past = (
        costs([[earlier.get(name, {}).get(campaign, []) for campaign in names] for name in rows])
        if names
        else None
    )
    compared = differences(table, settled.campaigns, len(campaigns), prior, past)
    shared = _shared(metric, compared)
    for cell, (name, row) in enumerate(rows.items()):
        baseline_costs = [
            costs for costs, keep in zip(values[cell], settled.campaigns[cell], strict=True) if keep
        ]
        if left_out := len(bases[name]) - len(baseline_costs):
            row["base"] = metric.figure(fmean(map(fmean, baseline_costs)))
            row["base_repeats"], row["base_campaigns"] = sum(map(len, baseline_costs)), len(baseline_costs)
            are = "is" if left_out == 1 else "are"
            changed = f"{plural(left_out, 'earlier campaign')} changed as well"
            row["reason"] = f"{changed} and {are} not in the baseline"
        row["nights"], row["nights_to_fail"] = max(1, settled.in_a_row[cell]), settled.needed[cell]
        row["shared_change"], row["shared_ci90"] = shared["change"], shared["ci90"]
        row["shared_between"] = shared["between"]
    noisy = [
        _Noisy(row, metric, difference, settled.far)
        for row, difference in zip(rows.values(), compared.every, strict=True)
    ]
    return noisy, shared


def unjudged(
    metric: Figure, base: float | None, new: float | None, repeats: tuple[int, int], threshold: float
) -> MetricChange:
    """The figures of both sides, from one campaign each."""
    return {
        "metric": metric.name,
        "unit": metric.unit,
        "better": metric.better,
        "family": metric.family,
        "base": base,
        "new": new,
        "base_repeats": repeats[0],
        "new_repeats": repeats[1],
        "base_campaigns": 1,
        "change": None,
        "change_ci90": None,
        "own_change": None,
        "own_ci90": None,
        "shared_change": None,
        "shared_ci90": None,
        "shared_between": None,
        "p": None,
        "spread": None,
        "threshold": threshold,
        "verdict": "",
        "nights": 1,
        "nights_to_fail": 1,
        "reason": None,
    }


def _row(metric: Figure, base: Runs, new: Runs, threshold: float) -> MetricChange | None:
    """The figures of both sides, with a verdict if they cannot be compared; None where neither has one."""
    sides = [side.costs(metric) for side in (base, new)]
    if not any(sides):
        return None
    # Geometric means over campaigns of the geometric means over repeats.
    shown = [metric.figure(fmean(map(fmean, side.values()))) if side else None for side in sides]
    counts = [sum(map(len, side.values())) for side in sides]
    row = unjudged(metric, shown[0], shown[1], (counts[0], counts[1]), threshold)
    row["base_campaigns"] = len(sides[0])
    if base.repeats < FEWEST_REPEATS and not (base.searched or base.scored):
        why = "the baseline has one repeat, so run-to-run noise is unknown; measure at least two"
        row["verdict"], row["reason"] = INVALID, why
    elif not all(counts):
        where = "the baseline" if not counts[0] else "the new runs"
        # Noise decides whether a slope is distinguishable from zero, so this is not a fault.
        unclear = {
            "W_tokens_per_ms": f"slope not distinguishable from zero in {where}",
            "B_ms": f"B not known to 10% in {where}",
        }
        row["verdict"] = UNCLEAR if metric.name in unclear else INVALID
        row["reason"] = unclear.get(metric.name, f"{metric.name} is not known in {where}")
    return row


def _shared(metric: Figure, compared: Differences) -> SharedFigures:
    """The shift that all cells share; without one, only how campaigns differ."""
    change, ends = relative(metric, compared.shared) if compared.shared else (None, None)
    cells = compared.cells if compared.shared else None
    return {
        "metric": metric.name,
        "cells": cells,
        "change": change,
        "ci90": ends,
        "between": compared.days.source,
    }


def relative(metric: Figure, change: Change) -> tuple[float, list[float] | None]:
    """The change and its interval."""
    ends = sorted(metric.change(end) for end in change.ends) if change.ends else None
    return metric.change(change.cost), ends


def settle(row: MetricChange, metric: Figure, change: Change, sign: int, unclear: str | None = None) -> None:
    """Fill in a change and its verdict. `sign`: of a change that counts, 1 if worse; 0: it does not count.
    `unclear`: why it is UNCLEAR; None: its interval is too wide."""
    row["change"], row["change_ci90"] = relative(metric, change)
    row["p"] = change.p
    if change.ends is None:
        row["verdict"], row["reason"] = INVALID, "run-to-run noise is unknown: fewer than two repeats"
        return
    bound, (least, most) = math.log1p(row["threshold"]), change.ends
    if sign:
        row["verdict"] = metric.worse if sign > 0 else metric.improved
    elif -bound < least and most < bound:
        row["verdict"] = SAME
    else:
        low, high = sorted(metric.change(end) for end in change.ends)
        row["verdict"], row["reason"] = UNCLEAR, unclear or f"anywhere from {low:+.1%} to {high:+.1%}"


def _verdict(noisy: _Noisy, significant: Sequence[Change], count: int) -> None:
    """Fill in the change and its verdict. `count`: differences among which it is significant or not."""
    row, metric, whole, own = noisy.row, noisy.metric, noisy.difference.whole, noisy.difference.own
    bound, row["spread"] = math.log1p(row["threshold"]), noisy.difference.spread
    if own:
        row["own_change"], row["own_ci90"] = relative(metric, own)
    sign = beyond(significant, bound)
    settle(row, metric, whole, sign)
    if sign:
        reasons = [row["reason"]]
        if not beyond([change for change in significant if change is whole], bound):
            reasons = [f"{row['own_change']:+.1%} beyond what all cells share"]
        if sign > 0 and beyond(significant, noisy.far) > 0:
            row["nights_to_fail"] = 1
        if sign > 0 and row["nights"] < row["nights_to_fail"]:
            reasons.append(f"night {row['nights']} in a row, fails after {row['nights_to_fail']}")
        row["reason"] = "; ".join(filter(None, reasons)) or None
        return
    for change in filter(None, (own, whole)):
        least, most = change.ends or (0.0, 0.0)
        if least > bound or most < -bound:
            row["verdict"], row["reason"] = UNCLEAR, f"not significant among {count} differences"
            if change in significant:
                row["reason"] = f"the medians differ by only {metric.change(change.middle):+.1%}"


def _context(row: MetricChange, metric: Figure, base: Runs, new: Runs) -> None:
    """Compare longest contexts: verified, not sampled. The true limit is less than a granule above each."""
    before, after = (
        [value for rows in side.campaigns.values() for search in rows if (value := metric.value(search))]
        for side in (base, new)
    )
    base_mean, new_mean = fmean(before), fmean(after)
    row["base"], row["new"] = base_mean, new_mean
    most = metric.cost(min(after) / (max(before) + base.granule - 1))
    least = metric.cost((max(after) + new.granule - 1) / min(before))
    cost, bound = metric.cost(new_mean / base_mean), math.log1p(row["threshold"])
    alike = len({*before}) == len({*after}) == 1
    why = f"searches resolve {base.granule} tokens" if alike else "searches on one side differ"
    sign = (least > bound) - (most < -bound)
    settle(row, metric, Change(cost, cost, (least, most)), sign, why)
    if not sign and {*before} == {*after}:
        row["verdict"], row["reason"] = SAME, None


def _quality(row: MetricChange, metric: Figure, base: Score, new: Score) -> Difference | None:
    """The difference of two scores window by window: what is hard about the text is hard for both. Null where
    they are not compared."""
    row["base"], row["new"] = metric.value(base), metric.value(new)
    apart = base["ids_sha256"] != new["ids_sha256"] or base["n_ctx"] != new["n_ctx"]
    if apart or base["windows"] != new["windows"] or not base["means"] or not new["means"]:
        row["verdict"], row["reason"] = INVALID, "the two scores are of other text, tokens or windows"
        return None
    if (windows := len(base["means"]["nll"])) < quality_figures.FEWEST_WINDOWS:
        why = f"{plural(windows, 'window')} of text are too few to judge by; score at least"
        why += f" {quality_figures.FEWEST_WINDOWS} (`chunks` of the workload `quality`)"
        row["verdict"], row["reason"] = INVALID, why
        return None
    return Difference(quality_figures.change(base["means"]["nll"], new["means"]["nll"], LEVEL))
