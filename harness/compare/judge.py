"""Verdicts on the metrics of a cell: the change, its interval, and whether it exceeds the threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.analysis import scores
from harness.analysis.differences import (
    CampaignShift,
    Change,
    Difference,
    Repeats,
    Sample,
    Shared,
    beyond,
    differences,
    settled,
    significant,
)
from harness.analysis.line import METRICS, Metric

Row = Mapping[str, Any]
SAME, UNCLEAR, INVALID = "SAME", "UNCLEAR", "INVALID"
WORSE = tuple(dict.fromkeys(metric.worse for metric in METRICS))
BETTER = tuple(dict.fromkeys(metric.improved for metric in METRICS))
LEVEL = 0.9  # of the intervals
FEWEST_REPEATS = 2  # of a baseline: one repeat shows no run-to-run noise
# Standard deviation assumed between campaigns where a machine's own is unknown, by family. Speed: the worst
# of the days in benchmarks/validity/comparing.py. Memory is counted, and hardly depends on the day; quality
# differs by rounding alone.
ASSUMED = {"slower": 0.03, "memory": 0.002, "context": 0.002, "quality": 0.0002}


@dataclass(frozen=True)
class Runs:
    """One side's usable rows of a cell, of repeats, searches and scores, by campaign."""

    campaigns: Mapping[str, Sequence[Row]]

    def values(self, metric: Metric) -> dict[str, list[float]]:
        """The metric's values by campaign; campaigns without one are left out."""
        found = {
            name: [v for row in rows if (v := metric.value(row)) is not None]
            for name, rows in self._valid(metric).items()
        }
        return {name: values for name, values in found.items() if values}

    def _valid(self, metric: Metric) -> dict[str, list[Row]]:
        """The rows that count for a metric; the speed of a functional row does not."""
        timed = metric.family == "slower"
        return {
            name: [row for row in rows if not timed or row["status"] == "ok"]
            for name, rows in self.campaigns.items()
        }

    def sample(self, metric: Metric) -> Sample:
        """The metric's costs; needs at least one value."""
        valid = self._valid(metric).values()
        errors = [each for rows in valid for row in rows if (each := metric.error(row))]
        within = math.sqrt(sum(each**2 for each in errors) / len(errors)) if errors else None
        costs = {
            name: Repeats([metric.cost(value) for value in values])
            for name, values in self.values(metric).items()
        }
        return Sample(costs, within)

    @property
    def repeats(self) -> int:
        return sum(map(len, self.campaigns.values()))

    @property
    def searched(self) -> bool:
        """Whether all rows are searches, whose result is verified, not sampled."""
        return all(row["kind"] == "searched" for rows in self.campaigns.values() for row in rows)

    @property
    def scored(self) -> bool:
        """Whether all rows are scores of a text, which hardly differ from run to run."""
        return all(row["kind"] == "scored" for rows in self.campaigns.values() for row in rows)

    @property
    def latest(self) -> Row:
        """The last row."""
        return [*self.campaigns.values()][-1][-1]

    @property
    def granule(self) -> int:
        """The step of the searches in tokens: results are multiples of it."""
        return max(int(row["granule"]) for rows in self.campaigns.values() for row in rows)


@dataclass(frozen=True)
class Judged:
    """`rows`: one per pair and metric, with the pair's name. `shared`: one per metric that was compared."""

    rows: Sequence[tuple[str, dict[str, Any]]]
    shared: Sequence[dict[str, Any]]


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
    rows: list[tuple[str, dict[str, Any]]] = []
    noisy: dict[str, tuple[dict[str, Any], Metric, Difference]] = {}
    shared: list[dict[str, Any]] = []
    for metric in METRICS:
        compared: dict[str, tuple[Sample, Sample]] = {}
        of_metric: dict[str, dict[str, Any]] = {}
        for name, (base, new) in pairs.items():
            row = _row(metric, base, new, thresholds[metric.family])
            if row is None:
                continue
            rows.append((name, row))
            if row["verdict"] is not None:
                continue
            if base.searched and new.searched:
                row |= _context(metric, base, new, row["threshold"])
            elif base.scored and new.scored:
                row |= _quality(metric, base.latest, new.latest, row["threshold"])
            else:
                compared[name] = base.sample(metric), new.sample(metric)
                of_metric[name] = row
        if not compared:
            continue
        bound, prior = math.log1p(thresholds[metric.family]), ASSUMED[metric.family]
        news = {name: new for name, (_, new) in compared.items()}
        bases = settled({name: base for name, (base, _) in compared.items()}, news, bound, prior)
        for name, kept in bases.items():
            of_metric[name] |= _left_out(metric, compared[name][0], kept)
        before = {name: runs.sample(metric) for name, runs in (history or {}).items() if runs.values(metric)}
        found = differences({name: (bases[name], news[name]) for name in compared}, prior, before)
        noisy |= {
            f"{metric.name} {name}": (of_metric[name], metric, each) for name, each in found.cells.items()
        }
        shared.append(_shared(metric, found.shared, found.campaign_shift))
        for row in of_metric.values():
            row |= {f"shared_{key}": shared[-1][key] for key in ("change", "ci90", "between")}
    changes = significant({key: each for key, (_, _, each) in noisy.items()})
    for key, (row, metric, difference) in noisy.items():
        row |= _noisy(metric, difference, changes[key], row["threshold"], len(noisy))
    order = {name: number for number, name in enumerate(pairs)}
    return Judged(sorted(rows, key=lambda each: order[each[0]]), shared)


def _row(metric: Metric, base: Runs, new: Runs, threshold: float) -> dict[str, Any] | None:
    """The figures of both sides, with a verdict if they cannot be compared; null where neither has one."""
    values = [side.values(metric) for side in (base, new)]
    if not any(values):
        return None
    counts = [sum(map(len, side.values())) for side in values]
    row: dict[str, Any] = {
        "metric": metric.name,
        "unit": metric.unit,
        "better": metric.better,
        "family": metric.family,
        "base": _shown(metric, base),
        "new": _shown(metric, new),
        "base_repeats": counts[0],
        "new_repeats": counts[1],
        "base_campaigns": len(values[0]),
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
        "verdict": None,
        "reason": None,
    }
    if base.repeats < FEWEST_REPEATS and not (base.searched or base.scored):
        why = "the baseline has one repeat, so run-to-run noise is unknown; measure at least two"
        return row | {"verdict": INVALID, "reason": why}
    for where, count in zip(("the baseline", "the new runs"), counts, strict=True):
        if not count and metric.name == "W_tokens_per_ms":
            # Noise decides whether a slope is distinguishable from zero, so this is not a fault.
            return row | {"verdict": UNCLEAR, "reason": f"slope not distinguishable from zero in {where}"}
        if not count and metric.name == "B_ms":
            return row | {"verdict": UNCLEAR, "reason": f"B not known to 10% in {where}"}
        if not count:
            return row | {"verdict": INVALID, "reason": f"{metric.name} is not known in {where}"}
    return row


def _shown(metric: Metric, side: Runs) -> float | None:
    """Geometric mean over campaigns of the geometric means over repeats."""
    return metric.figure(side.sample(metric).mean) if side.values(metric) else None


def _shared(metric: Metric, found: Shared | None, shift: CampaignShift) -> dict[str, Any]:
    """The shift that all cells share; without one, only how campaigns differ."""
    row: dict[str, Any] = {"metric": metric.name, "cells": found.cells if found else None}
    row |= {"change": None, "ci90": None, "between": shift.source}
    if found:
        row |= _figures(metric, found.change, "change", "ci90")
    return row


def _figures(metric: Metric, change: Change, name: str, interval: str) -> dict[str, Any]:
    """The change and its interval, relative, under these keys."""
    ends = sorted(metric.change(end) for end in change.ends) if change.ends else None
    return {name: metric.change(change.cost), interval: ends}


def _noisy(
    metric: Metric, found: Difference, significant: Sequence[Change], threshold: float, count: int
) -> dict[str, Any]:
    row: dict[str, Any] = {"spread": found.spread, **_figures(metric, found.whole, "change", "change_ci90")}
    if found.own:
        row |= _figures(metric, found.own, "own_change", "own_ci90")
    if found.whole.ends is None:
        return row | {"verdict": INVALID, "reason": "run-to-run noise is unknown"}
    row["p"] = found.whole.p
    bound = math.log1p(threshold)
    if change := beyond(significant, bound):
        by_itself = beyond([each for each in significant if each is found.whole], bound)
        if not by_itself:
            row["reason"] = f"{row['own_change']:+.1%} beyond what all cells share"
        return row | {"verdict": metric.worse if change > 0 else metric.improved}
    known = [each for each in (found.whole, found.own) if each]
    for each in known:
        least, most = each.ends or (0.0, 0.0)
        if least > bound or most < -bound:
            if each not in significant:
                return row | {"verdict": UNCLEAR, "reason": f"not significant among {count} differences"}
            why = f"the medians differ by only {metric.change(each.middle):+.1%}"
            return row | {"verdict": UNCLEAR, "reason": why}
    least, most = found.whole.ends
    if -bound < least and most < bound:
        return row | {"verdict": SAME}
    low, high = row["change_ci90"]
    return row | {"verdict": UNCLEAR, "reason": f"anywhere from {low:+.1%} to {high:+.1%}"}


def _left_out(metric: Metric, base: Sample, kept: Sample) -> dict[str, Any]:
    """Row values for a baseline without campaigns that were themselves a change."""
    count = len(base.campaigns) - len(kept.campaigns)
    if not count:
        return {}
    return {
        "base": metric.figure(kept.mean),
        "base_repeats": kept.repeats,
        "base_campaigns": len(kept.campaigns),
        "reason": f"{count} of the earlier campaigns changed as well and are not in the baseline",
    }


def _context(metric: Metric, base: Runs, new: Runs, threshold: float) -> dict[str, Any]:
    """Compare longest contexts: verified, not sampled. The true limit is less than a granule above each."""
    before, after = ([v for values in side.values(metric).values() for v in values] for side in (base, new))
    low = min(after) / (max(before) + base.granule - 1) - 1
    high = (max(after) + new.granule - 1) / min(before) - 1
    mean = [sum(values) / len(values) for values in (before, after)]
    row: dict[str, Any] = {"base": mean[0], "new": mean[1], "change": mean[1] / mean[0] - 1}
    row |= {"change_ci90": [low, high]}
    bound, most, least = math.log1p(threshold), metric.cost(1 + low), metric.cost(1 + high)
    if least > bound:
        return row | {"verdict": metric.worse}
    if most < -bound:
        return row | {"verdict": metric.improved}
    if {*before} == {*after} or (-bound < least and most < bound):
        return row | {"verdict": SAME}
    alike = len({*before}) == len({*after}) == 1
    why = f"searches resolve {base.granule} tokens" if alike else "searches on one side differ"
    return row | {"verdict": UNCLEAR, "reason": why}


def _quality(metric: Metric, base: Row, new: Row, threshold: float) -> dict[str, Any]:
    """Compare two scores window by window: what is hard about the text is hard for both."""
    row: dict[str, Any] = {"base": metric.value(base), "new": metric.value(new)}
    if any(base[key] != new[key] for key in ("ids_sha256", "n_ctx", "windows")):
        return row | {"verdict": INVALID, "reason": "the two scores are of other text, tokens or windows"}
    cost, least, most = scores.change(base["means"]["nll"], new["means"]["nll"], LEVEL)
    row["change"] = metric.change(cost)
    row["change_ci90"] = [metric.change(least), metric.change(most)]
    bound = math.log1p(threshold)
    if least > bound or most < -bound:
        return row | {"verdict": metric.worse if least > bound else metric.improved}
    if -bound < least and most < bound:
        return row | {"verdict": SAME}
    low, high = row["change_ci90"]
    return row | {"verdict": UNCLEAR, "reason": f"anywhere from {low:+.1%} to {high:+.1%}"}
