"""Judge a campaign of two sides that were measured in turns: pairs of cells, paired round by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from harness import compare, records
from harness.analysis import paired
from harness.analysis.attempts import counting
from harness.analysis.columns import Repeat
from harness.analysis.figures import BY_NAME, COMPARED, Figure
from harness.analysis.paired import Change, discoveries
from harness.analysis.verdicts import USABLE
from harness.base.text import plural
from harness.compare.cells import lost
from harness.compare.judge import WORSE, settle, unjudged
from harness.dataset import campaign_order
from harness.dataset.study import load_study
from harness.records import ResultsError, Stored

SIDES = ("A", "B")
ON_SIDE = {side: f"on side {side}" for side in SIDES}
# The figure whose interval decides how many rounds there are: the first that a pair has.
STEERING = (
    *("tokens_per_s", "pp512", "tokens_per_s_16k", "task_s", "task_kept_s", "B_ms"),
    *("users_tokens_per_s", "users_output_tokens_per_s"),
)


Attempt = tuple[Repeat, Stored]


@dataclass
class Rounds:
    """What was measured so far. `threshold`: the smallest relative change to be found; `pairs`: names;
    `busy`: whether repeats that the machine disturbed count, too."""

    threshold: float
    pairs: Sequence[str]
    busy: bool = False
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _attempts: dict[tuple[str, str], dict[int, list[Attempt]]] = field(default_factory=dict)

    def add(self, stored: Sequence[Stored]) -> None:
        """The records of one round."""
        study = load_study(stored)
        self.warnings += study.warnings
        for row, repeat in zip(study.repeats, study.stored, strict=True):
            campaign = repeat.record["campaign"]
            rounds = self._attempts.setdefault((campaign["pair"], campaign["side"]), {})
            rounds.setdefault(campaign["round"], []).append((row, repeat))

    def steering(self) -> dict[str, tuple[Figure, list[float]]]:
        """By pair, the figure that decides how many rounds there are, and its differences (see
        _differences); without the pairs that have none."""
        steering: dict[str, tuple[Figure, list[float]]] = {}
        for name in STEERING:
            for pair, differences in self._differences(BY_NAME[name]).items():
                steering.setdefault(pair, (BY_NAME[name], differences))
        return steering

    def open(self, decided: Callable[[Sequence[float]], bool] | None = None) -> list[str]:
        """The pairs that need another round: too few, or differences that are not `decided` (default: the
        interval is narrow). None does of which a side failed twice, or was disturbed each time."""
        steering = {pair: differences for pair, (_, differences) in self.steering().items()}
        changes = paired.changes(steering)

        def is_open(pair: str) -> bool:
            differences = steering.get(pair, [])
            if differences and decided:
                return not decided(differences)
            if len(differences) >= paired.FEWEST_ROUNDS:
                return paired.wide(changes[pair], math.log1p(self.threshold))
            sides = [[row for row, _ in self._counting(pair, side).values()] for side in SIDES]
            rounds = max((at for side in SIDES for at in self._attempts.get((pair, side), ())), default=0)
            if differences or not any(row["disturbed"] for rows in sides for row in rows):
                return bool(differences) or rounds < 2
            failed = any(
                len(rows) > 1
                and not any(row["status"] in USABLE or row["disturbed"] is not None for row in rows)
                for rows in sides
            )
            return not failed and rounds < 2 * paired.FEWEST_ROUNDS

        return [pair for pair in self.pairs if is_open(pair)]

    def comparison(self, sides: tuple[str, str], fail_on: Mapping[str, float]) -> compare.Comparison:
        """The verdict of every pair and metric. `fail_on`: by family, the relative change in cost that
        fails."""
        changes = {
            (pair, metric): change
            for metric in COMPARED
            for pair, change in paired.changes(self._differences(metric)).items()
        }
        p = {key: change.p for key, change in changes.items() if change.p is not None}
        significant = discoveries(p, paired.FALSE_DISCOVERIES)
        rows = [
            self._row(pair, metric, change, (pair, metric) in significant, fail_on.get(metric.family))
            for (pair, metric), change in changes.items()
        ]
        with_rows = {pair for pair, _ in changes}
        return compare.Comparison(
            base=sides[0],
            new=sides[1],
            rows=sorted(rows, key=lambda row: self.pairs.index(row["name"])),
            records=self.records,
            not_compared=[
                {**self._cell(pair), "reason": self.why_not(pair)}
                for pair in self.pairs
                if pair not in with_rows
            ],
            partial=[
                {**self._cell(pair), "reason": why}
                for pair in self.pairs
                if pair in with_rows and (why := self._lost(pair, self.busy))
            ],
            damages=self.warnings,
            notes=self.notes,
            paired=True,
        )

    def _counting(self, pair: str, side: str) -> dict[int, Attempt]:
        """The attempt that counts, by round."""
        return {
            number: counting(
                attempts,
                lambda attempt: attempt[0]["status"] in USABLE,
                lambda attempt: attempt[0]["disturbed"],
            )
            for number, attempts in self._attempts.get((pair, side), {}).items()
        }

    def _costs(self, metric: Figure, pair: str, side: str) -> dict[int, tuple[float, Repeat]]:
        """The cost of a metric by round, with the row that it is from."""
        costs = {}
        for number, (row, _) in self._counting(pair, side).items():
            valid = row["status"] in metric.statuses
            valid = valid or (self.busy and row["disturbed"] is not None)
            if valid and (value := metric.value(row)) is not None:
                costs[number] = metric.cost(value), row
        return costs

    def _differences(self, metric: Figure) -> dict[str, list[float]]:
        """The cost of B minus the cost of A, in each round that has both, of the pairs that have such a
        round."""
        differences = {}
        for pair in self.pairs:
            a, b = (self._costs(metric, pair, side) for side in SIDES)
            differences[pair] = [b[number][0] - a[number][0] for number in sorted(a.keys() & b.keys())]
        return {pair: of_pair for pair, of_pair in differences.items() if of_pair}

    def provisional(self, metric: Figure, pair: str) -> str | None:
        """How many repeats of a figure were disturbed; None: none."""
        rows = [row for side in SIDES for _, row in self._costs(metric, pair, side).values()]
        disturbed = sum(row["disturbed"] is not None for row in rows)
        return f"provisional: {disturbed} of {plural(len(rows), 'repeat')} disturbed" if disturbed else None

    def _row(
        self, pair: str, metric: Figure, change: Change, significant: bool, failing: float | None
    ) -> compare.Change:
        a, b = (self._costs(metric, pair, side) for side in SIDES)
        both = a.keys() & b.keys()
        base, new = (metric.figure(fmean(side[number][0] for number in both)) for side in (a, b))
        row = unjudged(metric, base, new, (len(both), len(both)), self.threshold)
        settle(row, metric, change, significant * paired.direction(change, math.log1p(self.threshold)))
        row["reason"] = "; ".join(filter(None, (self.provisional(metric, pair), row["reason"]))) or None
        fails = bool(change.ends and failing is not None and change.ends[0] > math.log1p(failing))
        return {**self._cell(pair), **row, "fails": fails and row["verdict"] in WORSE}

    def _cell(self, pair: str) -> compare.OfCell:
        """The pair, as the cell of side B."""
        record = self._stored(pair, "B")[-1].record
        return {
            "name": pair,
            "cell": record["cell"],
            "machine": record["machine"]["slug"],
            "device": record["asked"]["device"],
        }

    def _stored(self, pair: str, side: str) -> list[Stored]:
        return [stored for _, stored in self._counting(pair, side).values()]

    @property
    def records(self) -> compare.OfSides:
        """By pair, the records of both sides."""
        return {pair: (self._stored(pair, "A"), self._stored(pair, "B")) for pair in self.pairs}

    def why_not(self, pair: str, named: Mapping[str, str] = ON_SIDE) -> str:
        """Why a pair has no figure. `named`: the sides, as the answer has them."""
        return self._lost(pair, True, named) or "neither side has a figure for it"

    def _lost(self, pair: str, disturbed: bool, named: Mapping[str, str] = ON_SIDE) -> str | None:
        """How many repeats are not usable, and why; None: none. `disturbed`: with those that the machine
        disturbed, which further rounds make good."""
        parts = []
        for side in SIDES:
            rows = [row for row, _ in self._counting(pair, side).values()]
            if why := lost(rows, lambda row: disturbed or not row["disturbed"]):
                parts.append(f"{named[side]} {why}")
        return "; ".join(parts) or None


def latest(folder: Path, threshold: float, campaign: str | None = None) -> tuple[Rounds, tuple[str, str]]:
    """The rounds of the campaign of that id, else the latest, of two sides, and the names of the sides.

    Raises ResultsError: no such campaign.
    """
    records.check_folder(folder)
    damages: list[str] = []
    every = list(records.records(folder, lambda damage: damages.append(f"passed over: {damage}")))
    of_two = [each for each in every if each.record["campaign"].get("side")]
    ids = {each.record["campaign"]["id"]: campaign_order.place(each.record) for each in of_two}
    future = list(filter(campaign_order.from_the_future, ids))
    notes = [campaign_order.left_out(future)] if future else []
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
