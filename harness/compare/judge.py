"""Verdicts on the metrics of a cell: the change, its interval, and whether it exceeds the threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import TypedDict

from harness.analysis import quality
from harness.analysis.columns import AnyRow, Score, is_score, is_search
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
from harness.analysis.figures import COMPARED as METRICS
from harness.analysis.figures import VERDICTS
from harness.analysis.figures import Figure as Metric
from harness.base.text import plural

SAME, UNCLEAR, INVALID = "SAME", "UNCLEAR", "INVALID"
WORSE = tuple(worse for worse, _ in VERDICTS.values())
BETTER = tuple(better for _, better in VERDICTS.values())
LEVEL = 0.9  # of the intervals
FEWEST_REPEATS = 2  # of a baseline: one repeat shows no run-to-run noise
# Standard deviation assumed between campaigns where a machine's own is unknown, by family. Speed: the worst
# of the days in benchmarks/validity/comparing.py. Memory is counted, and hardly depends on the day; quality
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

    def values(self, metric: Metric) -> dict[str, list[float]]:
        """The metric's values by campaign; campaigns without one are left out."""
        found = {
            name: [v for row in rows if (v := metric.value(row)) is not None]
            for name, rows in self._valid(metric).items()
        }
        return {name: values for name, values in found.items() if values}

    def _valid(self, metric: Metric) -> dict[str, list[AnyRow]]:
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
    noisy: dict[str, tuple[MetricChange, Metric, Difference]] = {}
    far: dict[str, float] = {}
    shared: list[SharedFigures] = []
    for metric in METRICS:
        compared: dict[str, tuple[Sample, Sample]] = {}
        of_metric: dict[str, MetricChange] = {}
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
                if differs := _quality(row, metric, before, after):
                    noisy[f"{metric.name} {name}"] = row, metric, differs
            else:
                compared[name] = base.sample(metric), new.sample(metric)
                of_metric[name] = row
        if not compared:
            continue
        bound, prior = math.log1p(thresholds[metric.family]), ASSUMED[metric.family]
        news = {name: new for name, (_, new) in compared.items()}
        bases = settled({name: base for name, (base, _) in compared.items()}, news, bound, prior)
        for name, kept in bases.samples.items():
            _leave_out(of_metric[name], metric, compared[name][0], kept)
            of_metric[name]["nights"] = max(1, bases.in_a_row[name])
            of_metric[name]["nights_to_fail"] = bases.needed[name]
            far[f"{metric.name} {name}"] = bases.far
        earlier = {name: runs.sample(metric) for name, runs in (history or {}).items() if runs.values(metric)}
        pairs_of_metric = {name: (bases.samples[name], news[name]) for name in compared}
        found = differences(pairs_of_metric, prior, earlier)
        noisy |= {
            f"{metric.name} {name}": (of_metric[name], metric, each) for name, each in found.cells.items()
        }
        shared.append(_shared(metric, found.shared, found.campaign_shift))
        for row in of_metric.values():
            row["shared_change"], row["shared_ci90"] = shared[-1]["change"], shared[-1]["ci90"]
            row["shared_between"] = shared[-1]["between"]
    changes = significant({key: each for key, (_, _, each) in noisy.items()})
    for key, (row, metric, difference) in noisy.items():
        _noisy(row, metric, difference, changes[key], len(noisy))
        if row["verdict"] == metric.worse:
            _count_nights(row, changes[key], far.get(key, math.inf))
    order = {name: number for number, name in enumerate(pairs)}
    return Judged(sorted(rows, key=lambda each: order[each[0]]), shared)


def unjudged(
    metric: Metric, base: float | None, new: float | None, repeats: tuple[int, int], threshold: float
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


def _row(metric: Metric, base: Runs, new: Runs, threshold: float) -> MetricChange | None:
    """The figures of both sides, with a verdict if they cannot be compared; null where neither has one."""
    values = [side.values(metric) for side in (base, new)]
    if not any(values):
        return None
    counts = [sum(map(len, side.values())) for side in values]
    row = unjudged(metric, _shown(metric, base), _shown(metric, new), (counts[0], counts[1]), threshold)
    row["base_campaigns"] = len(values[0])
    if base.repeats < FEWEST_REPEATS and not (base.searched or base.scored):
        why = "the baseline has one repeat, so run-to-run noise is unknown; measure at least two"
        row["verdict"], row["reason"] = INVALID, why
        return row
    for where, count in zip(("the baseline", "the new runs"), counts, strict=True):
        if count:
            continue
        # Noise decides whether a slope is distinguishable from zero, so this is not a fault.
        unclear = {
            "W_tokens_per_ms": f"slope not distinguishable from zero in {where}",
            "B_ms": f"B not known to 10% in {where}",
        }
        row["verdict"] = UNCLEAR if metric.name in unclear else INVALID
        row["reason"] = unclear.get(metric.name, f"{metric.name} is not known in {where}")
        return row
    return row


def _shown(metric: Metric, side: Runs) -> float | None:
    """Geometric mean over campaigns of the geometric means over repeats."""
    return metric.figure(side.sample(metric).mean) if side.values(metric) else None


def _shared(metric: Metric, found: Shared | None, shift: CampaignShift) -> SharedFigures:
    """The shift that all cells share; without one, only how campaigns differ."""
    change, ends = relative(metric, found.change) if found else (None, None)
    return {
        "metric": metric.name,
        "cells": found.cells if found else None,
        "change": change,
        "ci90": ends,
        "between": shift.source,
    }


def relative(metric: Metric, change: Change) -> tuple[float, list[float] | None]:
    """The change and its interval."""
    ends = sorted(metric.change(end) for end in change.ends) if change.ends else None
    return metric.change(change.cost), ends


def _noisy(
    row: MetricChange, metric: Metric, found: Difference, significant: Sequence[Change], count: int
) -> None:
    """Fill in the change and its verdict. `count`: differences among which it is significant or not."""
    row["spread"] = found.spread
    row["change"], row["change_ci90"] = relative(metric, found.whole)
    own = 0.0
    if found.own:
        own, row["own_ci90"] = relative(metric, found.own)
        row["own_change"] = own
    if found.whole.ends is None or row["change_ci90"] is None:
        row["verdict"], row["reason"] = INVALID, "run-to-run noise is unknown"
        return
    row["p"] = found.whole.p
    bound = math.log1p(row["threshold"])
    if change := beyond(significant, bound):
        by_itself = beyond([each for each in significant if each is found.whole], bound)
        if not by_itself:
            row["reason"] = f"{own:+.1%} beyond what all cells share"
        row["verdict"] = metric.worse if change > 0 else metric.improved
        return
    known = [each for each in (found.whole, found.own) if each]
    for each in known:
        least, most = each.ends or (0.0, 0.0)
        if least > bound or most < -bound:
            why = f"the medians differ by only {metric.change(each.middle):+.1%}"
            if each not in significant:
                why = f"not significant among {count} differences"
            row["verdict"], row["reason"] = UNCLEAR, why
            return
    _judge(row, found.whole.ends, None)


def _count_nights(row: MetricChange, significant: Sequence[Change], far: float) -> None:
    """Whether a change for the worse may be one bad night. `far`: a cost beyond which none is."""
    if beyond(significant, far) > 0:
        row["nights_to_fail"] = 1
    if row["nights"] < row["nights_to_fail"]:
        why = f"night {row['nights']} in a row, fails after {row['nights_to_fail']}"
        row["reason"] = f"{row['reason']}; {why}" if row["reason"] else why


def _judge(row: MetricChange, ends: tuple[float, float], unclear: str | None) -> None:
    """The verdict of an interval of costs. `unclear`: why it is UNCLEAR; null: the interval itself."""
    bound, (least, most) = math.log1p(row["threshold"]), ends
    if -bound < least and most < bound:
        row["verdict"] = SAME
        return
    low, high = row["change_ci90"] or (0.0, 0.0)
    row["verdict"], row["reason"] = UNCLEAR, unclear or f"anywhere from {low:+.1%} to {high:+.1%}"


def _leave_out(row: MetricChange, metric: Metric, base: Sample, kept: Sample) -> None:
    """Take campaigns that were themselves a change out of the baseline."""
    if count := len(base.campaigns) - len(kept.campaigns):
        row["base"] = metric.figure(kept.mean)
        row["base_repeats"], row["base_campaigns"] = kept.repeats, len(kept.campaigns)
        row["reason"] = f"{count} of the earlier campaigns changed as well and are not in the baseline"


def _context(row: MetricChange, metric: Metric, base: Runs, new: Runs) -> None:
    """Compare longest contexts: verified, not sampled. The true limit is less than a granule above each."""
    before, after = ([v for values in side.values(metric).values() for v in values] for side in (base, new))
    low = min(after) / (max(before) + base.granule - 1) - 1
    high = (max(after) + new.granule - 1) / min(before) - 1
    mean = [sum(values) / len(values) for values in (before, after)]
    row["base"], row["new"], row["change"] = mean[0], mean[1], mean[1] / mean[0] - 1
    row["change_ci90"] = [low, high]
    bound, most, least = math.log1p(row["threshold"]), metric.cost(1 + low), metric.cost(1 + high)
    if least > bound or most < -bound:
        row["verdict"] = metric.worse if least > bound else metric.improved
    elif {*before} == {*after}:
        row["verdict"] = SAME
    else:
        alike = len({*before}) == len({*after}) == 1
        why = f"searches resolve {base.granule} tokens" if alike else "searches on one side differ"
        _judge(row, (least, most), why)


def _quality(row: MetricChange, metric: Metric, base: Score, new: Score) -> Difference | None:
    """The difference of two scores window by window: what is hard about the text is hard for both. Null where
    they are not compared."""
    row["base"], row["new"] = metric.value(base), metric.value(new)
    apart = base["ids_sha256"] != new["ids_sha256"] or base["n_ctx"] != new["n_ctx"]
    if apart or base["windows"] != new["windows"] or not base["means"] or not new["means"]:
        row["verdict"], row["reason"] = INVALID, "the two scores are of other text, tokens or windows"
        return None
    if (windows := len(base["means"]["nll"])) < quality.FEWEST_WINDOWS:
        why = f"{plural(windows, 'window')} of text are too few to judge by; score at least"
        why += f" {quality.FEWEST_WINDOWS} (`chunks` of the workload `quality`)"
        row["verdict"], row["reason"] = INVALID, why
        return None
    return Difference(quality.change(base["means"]["nll"], new["means"]["nll"], LEVEL))
