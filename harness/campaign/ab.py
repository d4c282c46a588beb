"""Run one campaign of two sides: each round has every pair of cells once, one side next to the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.base.text import plural
from harness.campaign import rounds
from harness.campaign.attempts import AttemptRunner
from harness.campaign.opening import Campaign, RunOptions, Watcher, examined, locked, preparation_of, prepared
from harness.campaign.provenance import Shared
from harness.campaign.rounds import Due
from harness.config import Experiment, plan
from harness.config.plan import Cell
from harness.records import Stored

OnRound = Callable[[Sequence[Stored]], Sequence[str]]
"""Gets the records of a round; returns the pairs that need another one."""


@dataclass(frozen=True)
class Plan:
    """`sides`: the experiments A and B, with the same device. `pairs`: by name, a cell of each.
    `packages`: by side, requirements of its environments in place of the pinned ones."""

    sides: tuple[Experiment, Experiment]
    pairs: Mapping[str, tuple[Cell, Cell]]
    packages: tuple[Sequence[str], Sequence[str]] = ((), ())


@dataclass(frozen=True)
class Limits:
    """Where the rounds end at the latest. `seconds`: no round begins after that."""

    rounds: int
    seconds: float = math.inf


def run(
    wanted: Plan, limits: Limits, options: tuple[RunOptions, RunOptions], watcher: Watcher, on_round: OnRound
) -> str:
    """Measure rounds until no pair needs another one, or a limit is met. Returns why it ended.

    Nothing measured before is reused, as the sides of a pair must be measured in turns; but without `fresh`
    in the options, whole rounds of these pairs are, in the same versions. Raises as campaign.run().
    """
    wanted = replace(wanted, sides=(_without_retries(wanted.sides[0]), _without_retries(wanted.sides[1])))
    preparations = [
        preparation_of(each, watcher, packages)
        for each, packages in zip(wanted.sides, wanted.packages, strict=True)
    ]
    with locked(preparations[0], options[0], watcher):
        campaigns = {}
        for number, (side, preparation) in enumerate(zip("AB", preparations, strict=True)):
            cells = [pair[number] for pair in wanted.pairs.values()]
            campaign = prepared(wanted.sides[number], cells, options[number], watcher, preparation)
            campaigns[side] = examined(campaign) if side == "A" else campaign
        a, b = campaigns["A"], campaigns["B"]
        campaigns = {side: replace(each, shared=_shared(each, a)) for side, each in (("A", a), ("B", b))}
        attempts = {side: AttemptRunner(each, each.cells) for side, each in campaigns.items()}
        return _rounds(wanted, limits, campaigns, attempts, watcher, on_round)


def _without_retries(experiment: Experiment) -> Experiment:
    """A disturbed repeat is not measured again, which would be away from its partner: another round is."""
    protocol = experiment.protocol.model_copy(update={"retry_disturbed": 0})
    return experiment.model_copy(update={"protocol": protocol})


def _shared(campaign: Campaign, first: Campaign) -> Shared:
    """The facts of a side, with the campaign and the doctor's findings of side A. A separate name keeps the
    records out of a nightly baseline (compare --baseline)."""
    of, shared = first.shared["campaign"], campaign.shared.copy()
    shared["campaign"] = shared["campaign"] | {"id": of["id"], "name": f"{first.experiment.name}-ab"}
    if "order" in of:
        shared["campaign"]["order"] = of["order"]
    if "doctor" in first.shared:
        shared["doctor"] = first.shared["doctor"]
    return shared


def _rounds(
    wanted: Plan,
    limits: Limits,
    campaigns: Mapping[str, Campaign],
    attempts: Mapping[str, AttemptRunner],
    watcher: Watcher,
    on_round: OnRound,
) -> str:
    protocol = wanted.sides[0].protocol
    began, number, names = time.monotonic(), 0, list(wanted.pairs)
    pair_of: dict[tuple[str, str], str] = {}
    for name, cells in wanted.pairs.items():
        pair_of |= {(side, cell.id): name for side, cell in zip("AB", cells, strict=True)}
    # Two sides that are the same cell in the same versions share a content key: they differ in the repeat.
    alike = {
        name
        for name, (a, b) in wanted.pairs.items()
        if campaigns["A"].keys[a.id] == campaigns["B"].keys[b.id]
    }
    open_pairs: Sequence[str] = names
    done = 0
    if earlier := _earlier(campaigns, pair_of):
        open_pairs = on_round(earlier)
        number = max(each.record["campaign"]["round"] for each in earlier)

    def attempt(due: Due, place: int, of: int) -> Stored:
        name = pair_of[due.side, due.cell.id]
        where = campaigns[due.side].shared["campaign"] | {"side": due.side, "pair": name, "round": number}
        return attempts[due.side].measure(due, place, of, where)

    while open_pairs:
        if number >= limits.rounds:
            return f"ended by the limit of {limits.rounds} rounds"
        if time.monotonic() - began > limits.seconds:
            return f"ended by the limit of {limits.seconds / 60:.3g} minutes, after {number} rounds"
        number += 1
        todo = []
        for at, order in plan.turns(len(open_pairs), protocol.order_seed, number):
            name = open_pairs[at]
            for side in order:
                repeat = number if name not in alike else 2 * number - (side == "A")
                todo.append(Due(wanted.pairs[name]["AB".index(side)], repeat, side=side))
        stored = rounds.measure_round(todo, attempt, watcher, done=done)
        done += len(stored)
        open_pairs = on_round(stored)
        watcher.say(
            f"round {number}: {len(open_pairs)} of {plural(len(names), 'pair')} will have another round"
        )
    return f"every interval was narrow enough after {number} rounds"


def _earlier(campaigns: Mapping[str, Campaign], pair_of: Mapping[tuple[str, str], str]) -> list[Stored]:
    """The records of these pairs, in the same versions, of earlier rounds in which neither side failed: those
    are tried again."""
    found: dict[tuple[str, int], dict[str, list[Stored]]] = {}
    for side, campaign in campaigns.items():
        if campaign.options.fresh:
            continue
        names = {key: pair_of[side, cell] for cell, key in campaign.keys.items()}
        for (key, _), stored in campaign.attempts.items():
            for each in (each for each in stored if each.record["outcome"] == "ok"):
                of = each.record["campaign"]
                if key in names and (of.get("side"), of.get("pair")) == (side, names[key]):
                    found.setdefault((of["pair"], of["round"]), {}).setdefault(side, []).append(each)
    whole = (sides.values() for sides in found.values() if len(sides) == len(campaigns))
    return [each for sides in whole for stored in sides for each in stored]
