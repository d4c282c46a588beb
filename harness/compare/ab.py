"""Judge a campaign of two sides that were measured in turns: pairs of cells, paired round by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import compare, records
from harness.analysis import differences as analysis_differences
from harness.analysis.columns import Repeat
from harness.analysis.differences import Change, discoveries
from harness.analysis.figures import COMPARED as METRICS
from harness.analysis.figures import Figure as Metric
from harness.analysis.verdicts import USABLE, counting
from harness.base.text import list_named, plural
from harness.compare.judge import INVALID, SAME, UNCLEAR, WORSE, relative, unjudged
from harness.dataset import table
from harness.dataset.study import load_study
from harness.records import Record, ResultsError, Stored

SIDES = ("A", "B")
ON_SIDE = {side: f"on side {side}" for side in SIDES}
# The figure whose interval decides how many rounds there are: the first that a pair has.
STEERING = (
    *("tokens_per_s", "pp512", "tokens_per_s_16k", "task_s", "task_kept_s", "B_ms"),
    *("users_tokens_per_s", "users_output_tokens_per_s"),
)


@dataclass
class Rounds:
    """What was measured so far. `threshold`: the smallest relative change to be found; `pairs`: names;
    `busy`: whether repeats that the machine disturbed count, too."""

    threshold: float
    pairs: Sequence[str]
    busy: bool = False
    _rows: dict[tuple[str, str, int], list[tuple[Repeat, Stored]]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, stored: Sequence[Stored]) -> None:
        """The records of one round."""
        gathered = load_study(stored)
        self.warnings += gathered.warnings
        for row, each in zip(gathered.repeats, gathered.stored, strict=True):
            of = each.record["campaign"]
            key = (of["pair"], of["side"], of["round"])
            self._rows.setdefault(key, []).append((row, each))

    def steering(self) -> dict[str, tuple[Metric, list[float]]]:
        """By pair, the figure that decides how many rounds there are, and its differences (see
        _differences); without the pairs that have none."""
        found: dict[str, tuple[Metric, list[float]]] = {}
        for metric in (metric for name in STEERING for metric in METRICS if metric.name == name):
            for pair, values in self._differences(metric).items():
                if values:
                    found.setdefault(pair, (metric, values))
        return found

    def open(self, decided: Callable[[Sequence[float]], bool] | None = None) -> list[str]:
        """The pairs that need another round: too few, or differences that are not `decided` (default: the
        interval is narrow). None does of which a side failed twice, or was disturbed each time."""
        differences: dict[str, list[float]] = {pair: [] for pair in self.pairs}
        differences |= {pair: values for pair, (_, values) in self.steering().items()}
        found = analysis_differences.changes({pair: values for pair, values in differences.items() if values})
        bound = math.log1p(self.threshold)
        names = []
        for pair, values in differences.items():
            rows = [[row for row, _ in self._counting(pair, side).values()] for side in SIDES]
            failed = any(len(of) > 1 and not any(_may_count(row) for row in of) for of in rows)
            rounds = max((round for of, _, round in self._rows if of == pair), default=0)
            if values and decided:
                again = not decided(values)
            elif len(values) >= analysis_differences.FEWEST_ROUNDS:
                again = analysis_differences.wide(found[pair], bound)
            elif any(row["disturbed"] for of in rows for row in of) and not values:
                again = not failed and rounds < 2 * analysis_differences.FEWEST_ROUNDS
            else:
                again = bool(values) or rounds < 2
            if again:
                names.append(pair)
        return names

    def comparison(self, sides: tuple[str, str], fail_on: Mapping[str, float]) -> compare.Comparison:
        """The verdict of every pair and metric. `fail_on`: by family, the relative change in cost that
        fails."""
        rows: dict[tuple[str, str], compare.Change] = {}
        changes: dict[tuple[str, str], tuple[Metric, Change]] = {}
        for metric in METRICS:
            differences = self._differences(metric)
            found = analysis_differences.changes(
                {pair: values for pair, values in differences.items() if values}
            )
            for pair, change in found.items():
                rows[metric.name, pair] = self._row(metric, pair, len(differences[pair]), change)
                changes[metric.name, pair] = metric, change
        p = {key: each.p for key, (_, each) in changes.items() if each.p is not None}
        significant = discoveries(p, analysis_differences.FALSE_DISCOVERIES_AB)
        bound = math.log1p(self.threshold)
        for key, (metric, change) in changes.items():
            row = rows[key]
            row["verdict"], row["reason"] = _verdict(metric, change, key in significant, bound)
            failing = fail_on.get(metric.family)
            beyond = change.ends is not None and failing is not None and change.ends[0] > math.log1p(failing)
            row["fails"] = row["verdict"] in WORSE and beyond
            if provisional := self.provisional(metric, key[1]):
                row["reason"] = "; ".join(filter(None, (provisional, row["reason"])))
        order = {pair: number for number, pair in enumerate(self.pairs)}
        without = [pair for pair in self.pairs if not any(of == pair for _, of in rows)]
        return compare.Comparison(
            base=sides[0],
            new=sides[1],
            rows=[row for _, row in sorted(rows.items(), key=lambda item: order[item[0][1]])],
            environment=self.environment(),
            not_compared=[{**self._cell(pair), "reason": self.why_not(pair)} for pair in without],
            partial=[
                {**self._cell(pair), "reason": lost}
                for pair in self.pairs
                if pair not in without and (lost := self._lost(pair, self.busy))
            ],
            damages=self.warnings,
            notes=self.notes,
            paired=True,
        )

    def _counting(self, pair: str, side: str) -> dict[int, tuple[Repeat, Stored]]:
        """The attempt that counts, by round."""
        return {
            round: counting(
                attempts, lambda each: each[0]["status"] in USABLE, lambda each: each[0]["disturbed"]
            )
            for (of, on, round), attempts in self._rows.items()
            if (of, on) == (pair, side)
        }

    def _values(self, metric: Metric, pair: str, side: str) -> dict[int, float]:
        found = {}
        for round, (row, _) in self._counting(pair, side).items():
            valid = row["status"] == "ok" or (row["status"] in USABLE and metric.family != "slower")
            valid = valid or (self.busy and row["disturbed"] is not None)
            value = metric.value(row) if valid else None
            if value is not None:
                found[round] = metric.cost(value)
        return found

    def _differences(self, metric: Metric) -> dict[str, list[float]]:
        """The cost of B minus the cost of A by pair, in each round that has both."""
        found = {}
        for pair in self.pairs:
            a, b = (self._values(metric, pair, side) for side in SIDES)
            found[pair] = [b[round] - a[round] for round in sorted(a.keys() & b.keys())]
        return found

    def provisional(self, metric: Metric, pair: str) -> str | None:
        """How many repeats of a figure were disturbed; null: none."""
        rows = []
        for side in SIDES:
            of_round = self._counting(pair, side)
            rows += [of_round[round][0] for round in self._values(metric, pair, side)]
        disturbed = sum(row["disturbed"] is not None for row in rows)
        return f"provisional: {disturbed} of {plural(len(rows), 'repeat')} disturbed" if disturbed else None

    def _row(self, metric: Metric, pair: str, rounds: int, change: Change) -> compare.Change:
        a, b = (self._values(metric, pair, side) for side in SIDES)
        both = a.keys() & b.keys()
        base, new = (metric.figure(sum(side[r] for r in both) / len(both)) for side in (a, b))
        row = unjudged(metric, base, new, (rounds, rounds), self.threshold)
        row["change"], row["change_ci90"] = relative(metric, change)
        row["p"] = change.p
        return {**self._cell(pair), **row, "fails": False}

    def _cell(self, pair: str) -> compare.OfCell:
        """The pair, as the cell of side B."""
        record = self._records(pair, "B")[-1]
        return {
            "name": pair,
            "cell": record["cell"],
            "machine": record["machine"]["slug"],
            "device": record["asked"]["device"],
        }

    def _records(self, pair: str, side: str) -> list[Record]:
        return [each.record for _, each in self._counting(pair, side).values()]

    def environment(self) -> list[compare.Differing]:
        """Differences between the sides, with the pairs that they apply to; null: all."""
        records = {pair: (self._records(pair, "A"), self._records(pair, "B")) for pair in self.pairs}
        return list(compare.differing(records))

    def why_not(self, pair: str, named: Mapping[str, str] = ON_SIDE) -> str:
        """Why a pair has no figure. `named`: the sides, as the answer has them."""
        return self._lost(pair, True, named) or "neither side has a figure for it"

    def _lost(self, pair: str, disturbed: bool, named: Mapping[str, str] = ON_SIDE) -> str | None:
        """How many repeats are not usable, and why; null: none. `disturbed`: with those that the machine
        disturbed, which further rounds make good."""
        parts = []
        for side in SIDES:
            rows = [row for row, _ in self._counting(pair, side).values()]
            bad = [row for row in rows if row["status"] not in USABLE and (disturbed or not row["disturbed"])]
            if bad:
                why = list_named(
                    list(dict.fromkeys(f"{row['status']} ({'; '.join(row['reasons'])})" for row in bad)), 2
                )
                parts.append(f"{named[side]} {len(bad)} of {plural(len(rows), 'repeat')}: {why}")
        return "; ".join(parts) or None


def _may_count(row: Repeat) -> bool:
    """Whether it counts, or might have on a quiet machine."""
    return row["status"] in USABLE or row["disturbed"] is not None


def latest(folder: Path, threshold: float, campaign: str | None = None) -> tuple[Rounds, tuple[str, str]]:
    """The rounds of the campaign of that id, else the latest, of two sides, and the names of the sides.

    Raises ResultsError: no such campaign.
    """
    records.check_folder(folder)
    damages: list[str] = []
    every = list(records.records(folder, lambda damage: damages.append(f"passed over: {damage}")))
    of_two = [each for each in every if each.record["campaign"].get("side")]
    ids = {each.record["campaign"]["id"]: table.place(each.record) for each in of_two}
    future = list(filter(table.from_the_future, ids))
    notes = [table.left_out(future)] if future else []
    known = [each for each in ids if each not in future and campaign in (None, each)]
    if not known:
        which = f"no campaign {campaign} of" if campaign else "no campaign of"
        raise ResultsError(f"{folder}: {'; '.join([f'{which} `harness ab`', *notes])}")
    last = max(known, key=ids.__getitem__)
    found = [each for each in of_two if each.record["campaign"]["id"] == last]
    found.sort(key=lambda each: str(each.record["started_utc"]))
    campaigns = [each.record["campaign"] for each in found]
    rounds = Rounds(threshold, sorted({of["pair"] for of in campaigns}))
    rounds.add(found)
    rounds.warnings += damages
    rounds.notes += notes
    paths = {of["side"]: Path(of.get("config_path", "")).name for of in campaigns}
    return rounds, (f"A: {paths.get('A', '')}", f"B: {paths.get('B', '')}")


def _verdict(metric: Metric, change: Change, significant: bool, bound: float) -> tuple[str, str | None]:
    """The verdict and its reason."""
    if change.ends is None:
        return INVALID, "run-to-run noise is unknown: fewer than two rounds"
    sign = analysis_differences.direction(change, bound)
    if sign and significant:
        return metric.worse if sign > 0 else metric.improved, None
    least, most = change.ends
    if -bound < least and most < bound:
        return SAME, None
    low, high = sorted(metric.change(end) for end in change.ends)
    return UNCLEAR, f"anywhere from {low:+.1%} to {high:+.1%}"
