"""Run one campaign of the settings of one cell: each round has every setting once that a search asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.analysis import disturbances
from harness.analysis.figures import Figure
from harness.analysis.racing import DEFAULTS, Search, Setting, options_label
from harness.analysis.verdicts import USABLE
from harness.campaign import rounds
from harness.campaign.attempts import AttemptRunner
from harness.campaign.opening import Campaign, RunOptions, Watcher, examined, locked, preparation_of, prepared
from harness.campaign.prepare import Preparation
from harness.campaign.rounds import Due
from harness.config import Experiment, Model, Variant, Workload, plan
from harness.config.plan import Cell
from harness.config.variants import varied
from harness.dataset.study import load_study
from harness.records import Record, Stored


@dataclass(frozen=True)
class Tuned:
    """`variant`: the defaults. `metric`: the figure of `workload` that is to get better. `busy`: repeats that
    the machine disturbed count too."""

    experiment: Experiment
    model: Model
    variant: Variant
    workload: Workload
    metric: Figure
    busy: bool = False

    def cell(self, setting: Setting) -> Cell:
        """The cell of a setting."""
        (found,) = plan.cells(
            self.experiment.model_copy(
                update={
                    "models": (self.model,),
                    "variants": (varied(self.variant, dict(setting)),),
                    "workloads": (self.workload,),
                    "include": (),
                    "exclude": (),
                }
            )
        )
        return found


@dataclass(frozen=True)
class Outcome:
    """`reasons`: by setting, why its last repeat without a figure has none. `weights`: the file or folder
    that was loaded; None: none."""

    reasons: Mapping[Setting, str]
    weights: str | None


def run(tuned: Tuned, search: Search, options: RunOptions, watcher: Watcher) -> Outcome:
    """Measure rounds until the search is over. Nothing measured before is reused. Raises as
    campaign.run()."""
    tuned = replace(tuned, experiment=_short(tuned.experiment))
    preparation = preparation_of(tuned.experiment, watcher)
    measures = not tuned.cell(DEFAULTS).header.simulated
    with locked(preparation, options, watcher, measures):
        return _Rounds(tuned, options, watcher, preparation).measure(search)


def _short(experiment: Experiment) -> Experiment:
    """Leave out steps that a search does not need: another round makes up for a disturbed repeat."""
    left_out = {"retry_disturbed": 0, "check_weights": False}
    left_out |= {"measure_bandwidth": False, "measure_matrix_rate": False}
    return experiment.model_copy(update={"protocol": experiment.protocol.model_copy(update=left_out)})


class _Rounds:
    """The rounds of one campaign, whose cells are prepared as the search comes to them."""

    def __init__(self, tuned: Tuned, options: RunOptions, watcher: Watcher, preparation: Preparation) -> None:
        self._tuned, self._options, self._watcher = tuned, options, watcher
        self._preparation = preparation
        self._first: Campaign | None = None
        self._attempts: dict[str, AttemptRunner] = {}
        self._settings: dict[str, Setting] = {}
        self._reasons: dict[Setting, str] = {}
        self._weights: str | None = None
        self._done = 0

    def measure(self, search: Search) -> Outcome:
        number = 0
        while settings := search.due():
            number += 1
            cells = [self._tuned.cell(each) for each in settings]
            self._settings |= {cell.id: each for cell, each in zip(cells, settings, strict=True)}
            self._prepare([cell for cell in cells if cell.id not in self._attempts])
            search.add(*self._costs(self._round(cells, number)))
            left = ", ".join(options_label(each) for each in search.due() if each)
            self._watcher.say(f"round {number}: {left or 'no setting'} continues")
        return Outcome(self._reasons, self._weights)

    def _prepare(self, cells: Sequence[Cell]) -> None:
        if not cells:
            return
        given = (self._tuned.experiment, cells, self._options, self._watcher, self._preparation)
        campaign = prepared(*given)
        if self._first is None:
            campaign = examined(campaign)
            # A separate name keeps the records out of a nightly baseline (compare --baseline).
            campaign.shared["campaign"]["name"] = f"{self._tuned.experiment.name}-tune"
            self._first = campaign
        attempts = AttemptRunner(replace(campaign, shared=self._first.shared), cells)
        self._attempts |= dict.fromkeys((cell.id for cell in cells), attempts)

    def _round(self, cells: Sequence[Cell], number: int) -> list[Stored]:
        order = plan.shuffled(cells, self._tuned.experiment.protocol.order_seed, number)
        todo = [Due(cell, number) for cell in order]
        stored = rounds.measure_round(todo, self._attempt, self._watcher, done=self._done)
        self._done += len(stored)
        return stored

    def _attempt(self, due: Due, place: int, of: int) -> Stored:
        assert self._first is not None  # _prepare() comes before
        campaign = self._first.shared["campaign"]
        label = options_label(self._settings[due.cell.id])
        where = campaign | {"round": due.repeat, "setting": label}
        return self._attempts[due.cell.id].measure(due, place, of, where)

    def _costs(self, stored: Sequence[Stored]) -> tuple[dict[Setting, float | None], set[Setting]]:
        """Costs by setting, None where the repeat has no valid figure; and settings that failed by their own
        fault. Reasons are kept for both."""
        gathered, metric = load_study(stored), self._tuned.metric
        costs: dict[Setting, float | None] = {}
        failed = set()
        for row, each in zip(gathered.repeats, gathered.stored, strict=True):
            setting = self._settings[row["cell"]]
            counts = _counts(row["status"], row["reasons"], each.record, self._tuned.busy)
            value = metric.value(row) if counts else None
            costs[setting] = None if value is None else metric.cost(value)
            if value is None:
                self._reasons[setting] = f"{row['status']}: {'; '.join(row['reasons'])}"
                if not row["disturbed"]:
                    failed.add(setting)
            self._weights = each.record["model"]["weights"].get("file") or self._weights
        return costs, failed


def _counts(status: str, reasons: Sequence[str], record: Record, busy: bool) -> bool:
    """Whether a repeat counts for its setting. Threads that wait for each other are a cost of more threads
    than CPUs, and no disturbance."""
    if status in USABLE:
        return True
    if record["outcome"] != "ok" or not (busy or disturbances.oversubscribed(record)):
        return False
    return set(reasons) <= {each.detail for each in disturbances.disturbances(record)}
