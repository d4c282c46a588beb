"""`harness ab`: measure two sides in turns in one campaign, until the change between them is known."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.analysis.figures import BY_NAME
from harness.analysis.paired import FEWEST_ROUNDS
from harness.api import named_models
from harness.api.inputs import chosen
from harness.api.progress import Progress
from harness.base.text import duration, list_named, plural
from harness.campaign import ab as campaign_ab
from harness.campaign import forecast
from harness.campaign.opening import RunOptions
from harness.cli import Mistake, compare, dry_run, say
from harness.cli.arguments import keeping, models_choice, say_what_is_random
from harness.cli.shared_options import RESULTS
from harness.compare import Change
from harness.compare.ab import Rounds
from harness.compare.judge import SAME, UNCLEAR
from harness.compare.show import change_text
from harness.config import ConfigError, Experiment, plan
from harness.config.plan import Cell
from harness.records import Stored
from harness.stacks.header import project_of

MAY_DECIDE = "more rounds, a quieter machine or a larger --threshold may decide it"


def run(arguments: argparse.Namespace) -> int:
    """Measure both sides, print the verdict; exit codes as those of `harness compare`."""
    fail_on = compare.gates(arguments)
    if fail_on and arguments.busy:
        raise Mistake(
            "--fail-on needs a verdict that counts, and that of --busy is provisional: give one of them"
        )
    settings = arguments.set_a, arguments.set_b
    limits = campaign_ab.Limits(arguments.max_rounds, 60 * arguments.max_minutes)
    (path_a, a), (path_b, b) = (
        loaded(model, arguments, own, f"--set-{side} ")
        for model, own, side in zip((arguments.a, arguments.b or arguments.a), settings, "ab", strict=True)
    )
    wanted = planned(a, b, (arguments.package_a, arguments.package_b), arguments)
    say_what_is_random(arguments, wanted.sides)
    if not (arguments.b or arguments.set_a or arguments.set_b or arguments.package_a or arguments.package_b):
        say("both sides are the same, so this finds noise alone: name B, or what changes (--set-b)")
    root = (arguments.out or RESULTS).absolute()
    if arguments.dry_run:
        return _forecast(wanted, limits, root, arguments.wide)
    rounds = Rounds(arguments.threshold, list(wanted.pairs), arguments.busy)

    def on_round(stored: Sequence[Stored]) -> Sequence[str]:
        rounds.add(stored)
        return rounds.open()

    ended = measure(wanted, limits, (path_a, path_b), arguments, on_round)
    verdict = rounds.comparison((f"A: {_title(arguments, 'a')}", f"B: {_title(arguments, 'b')}"), fail_on)
    code = compare.show(verdict, arguments)
    for name in wanted.pairs:
        if of_pair := [row for row in verdict.rows if row["name"] == name]:
            print(_answer(of_pair[0]), file=sys.stderr if arguments.format else sys.stdout)
    say(f"{ended}; records: {root}")
    return code


def measure(
    wanted: campaign_ab.Plan,
    limits: campaign_ab.Limits,
    configs: tuple[Path, Path],
    arguments: argparse.Namespace,
    on_round: campaign_ab.OnRound,
    fresh: bool = True,
) -> str:
    """Measure rounds of both sides; returns why they ended. `configs`: the paths of their configs."""
    root, progress = (arguments.out or RESULTS).absolute(), Progress()
    a, b = (
        RunOptions(root, path, arguments.command_line, fresh=fresh, wait=arguments.wait) for path in configs
    )
    ended = campaign_ab.run(wanted, limits, (a, b), progress, on_round)
    progress.clear()
    return ended


def planned(
    a: Experiment,
    b: Experiment,
    packages: tuple[Sequence[str], Sequence[str]],
    arguments: argparse.Namespace,
) -> campaign_ab.Plan:
    """The pairs of two sides that --only names. Raises Mistake."""
    pairs = _pairs((a, b), arguments)
    _check((a, b), pairs, packages)
    return campaign_ab.Plan((a, b), dict(zip(_names(pairs), pairs, strict=True)), packages)


def loaded(
    model: str, arguments: argparse.Namespace, settings: Sequence[str], option: str = ""
) -> tuple[Path, Experiment]:
    """What a side measures: a model or config with the keys of --set and those of its own, which errors name
    as `option` and the setting. Raises Mistake, ConfigError."""
    try:
        settings_of_both = [*arguments.set, *settings]
        return named_models.experiment(
            [model], models_choice(arguments), settings_of_both, keeping(arguments)
        )
    except ConfigError as wrong:
        message = str(wrong)
        for setting in settings:
            message = message.replace(f"--set {setting}", f"{option}{setting}")
        raise ConfigError(message) from wrong


def _answer(row: Change) -> str:
    """The change of the figure that decides, in words, and what may decide it where it is open."""
    label, counted = BY_NAME[row["metric"]].label, f"{plural(row['base_repeats'], 'round')} counted"
    if row["change"] is None or row["change_ci90"] is None:
        return f"{row['name']}: not decided: {row['reason']}; {counted}"
    if row["verdict"] == UNCLEAR:
        answer = f"not distinguishable in {label}, {counted}; {MAY_DECIDE}"
    elif row["verdict"] == SAME:
        answer = f"no change of {100 * row['threshold']:.3g}% in {label}, {counted}"
    else:
        answer = f"B is {row['verdict']}: {change_text(label, row['change'], row['change_ci90'])}, {counted}"
    provisional = "provisional: " * (row["reason"] or "").startswith("provisional")
    return f"{row['name']}: {provisional}{answer}"


def _pairs(sides: tuple[Experiment, Experiment], arguments: argparse.Namespace) -> list[tuple[Cell, Cell]]:
    timed = [[cell for cell in plan.cells(each) if not (cell.searches or cell.scores)] for each in sides]
    pairs, alone = plan.pairs(*timed)
    if pairs:
        both = [cell for pair in pairs for cell in pair]
        matching = {cell.id for cell in chosen(both, arguments.only, arguments.trust_remote_code)}
        pairs = [pair for pair in pairs if matching & {cell.id for cell in pair}]
    if alone and not arguments.only:
        ids = list_named([cell.id for cell in alone], 3)
        raise Mistake(
            f"{plural(len(alone), 'cell')} without a partner on the other side: {ids}; choose with --only"
        )
    if not pairs:
        raise Mistake("no cell of A has a partner in B (the same model and workload)")
    return pairs


def _check(
    sides: tuple[Experiment, Experiment],
    pairs: Sequence[tuple[Cell, Cell]],
    packages: tuple[Sequence[str], Sequence[str]],
) -> None:
    """Raises Mistake: two devices, a package of no stack, or a package that is not a version."""
    a, b = ((each.device, each.gpu) for each in sides)
    if a != b:
        raise Mistake(f"A is on {a[0]} and B on {b[0]}: both sides must use the same device")
    for number, given in enumerate(packages):
        environments = [e for pair in pairs for e in pair[number].header.environments.values()]
        known = {project_of(each) for environment in environments for each in environment.dependencies}
        for each in given:
            if project_of(each) not in known:
                side, has = "ab"[number], list_named(sorted(known), 20) or "none that can be chosen"
                raise Mistake(
                    f"--package-{side} {each}: side {side.upper()} has no such package; it has {has}"
                )


def _names(pairs: Sequence[tuple[Cell, Cell]]) -> list[str]:
    """A unique name for each pair."""
    names = []
    for a, b in pairs:
        of = [f"{cell.variant.stack} {cell.variant.name}" for cell in (a, b)]
        names.append(f"{a.model.name} {' -> '.join(dict.fromkeys(of))}")
    return [
        f"{name} {a.workload.kind} {a.tokens}" if names.count(name) > 1 else name
        for name, (a, _) in zip(names, pairs, strict=True)
    ]


def _title(arguments: argparse.Namespace, side: str) -> str:
    """`quickstart variants.0.flash_attn=true`"""
    given = Path(arguments.a if side == "a" else arguments.b or arguments.a)
    changes = [*getattr(arguments, f"set_{side}"), *getattr(arguments, f"package_{side}")]
    return " ".join([given.name, *changes])


def _forecast(wanted: campaign_ab.Plan, limits: campaign_ab.Limits, root: Path, wide: bool) -> int:
    for name, (a, b) in wanted.pairs.items():
        print(f"{name}: {a.id} against {b.id}")
    fewest = min(FEWEST_ROUNDS, limits.rounds)
    ends = "" if math.isinf(limits.seconds) else f", none begins after {duration(limits.seconds)}"
    say(
        f"a round is one repeat of each cell; {fewest} to {limits.rounds} rounds, until the intervals are "
        f"narrow{ends}"
    )
    cells_of_sides = zip(*wanted.pairs.values(), strict=True)
    forecasts = []
    for side, cells in zip(wanted.sides, cells_of_sides, strict=True):
        forecasts += forecast.forecasts(side, cells)
    protocol = wanted.sides[0].protocol.model_copy(update={"repeats": limits.rounds})
    longest = wanted.sides[0].model_copy(update={"protocol": protocol})
    return dry_run.show(longest, forecasts, root, as_json=False, fewest=fewest, wide=wide)
