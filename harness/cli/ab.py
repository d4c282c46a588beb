"""`harness ab`: measure two sides in turns in one campaign, until the change between them is known."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.analysis.figures import BY_NAME
from harness.analysis.paired import FEWEST_ROUNDS
from harness.base.text import duration, list_named, plural
from harness.campaign import ab, forecast
from harness.campaign.rounds import RunOptions
from harness.cli import Mistake, compare, dry_run, model_arguments, say
from harness.cli.options import WAIT, add_chosen, add_wide, chosen
from harness.cli.progress import Progress
from harness.compare import Change
from harness.compare.ab import Rounds
from harness.compare.judge import SAME, UNCLEAR
from harness.config import ConfigError, Experiment, plan
from harness.config.plan import Cell
from harness.records import Stored
from harness.stacks.header import project_of

EPILOG = """The day of the machine, and all that drifts slowly, is in both sides and cancels. So this finds a
change of 1%, which no comparison of two campaigns can show. Each round measures every pair of cells once on
each side, one next to the other, in random order. Rounds are added until the 90% interval of tok/s of every
pair is narrower than half of the threshold, or a limit is met. Every repeat is a record of the results
folder, as with `harness run`.

examples:
  harness ab before.yaml after.yaml
  harness ab model.gguf --set-b flash_attn=true
  harness ab quickstart --package-b llama-cpp-python==0.3.35"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    what = "a GGUF file, a folder, owner/repo or a known name; or a config"
    parser.add_argument("a", metavar="A", help=f"side A: {what}")
    parser.add_argument(
        "b", nargs="?", metavar="B", help="side B (default: A, changed by --set-b or --package-b)"
    )
    model_arguments.add(parser)
    for side in ("", "-a", "-b"):
        where = f"side {side[1:].upper()}" if side else "both sides"
        parser.add_argument(
            f"--set{side}",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help=f"override a key of the config of {where}; repeatable",
        )
    for side in ("a", "b"):
        parser.add_argument(
            f"--package-{side}",
            action="append",
            default=[],
            metavar="NAME==VERSION",
            help=f"use this version of a stack's package on side {side.upper()}, in an environment of its "
            "own; repeatable",
        )
    add_chosen(parser)
    parser.add_argument(
        "--threshold", default="1%", metavar="1%", help="smallest change to be found (default: 1%%)"
    )
    parser.add_argument(
        "--max-rounds", type=int, default=100, metavar="N", help="limit of the rounds (default: 100)"
    )
    parser.add_argument("--max-minutes", type=float, metavar="M", help="begin no round after M minutes")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="use repeats that other processes disturbed, too, on a machine that is never quiet: the "
        "intervals are wider, and the verdict is provisional",
    )
    parser.add_argument("--wait", action="store_true", help=WAIT)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the pairs and a forecast of each cell, and measure nothing",
    )
    parser.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="slower:2%",
        help="exit with 3 if B is SLOWER (LARGER) and the whole interval is beyond that; repeatable",
    )
    parser.add_argument(
        "--format", choices=["md", "json", "html", "gha"], help="format of the verdict (default: plain text)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the verdict to FILE")
    add_wide(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure both sides, print the verdict; exit codes as those of `harness compare`."""
    fail_on = compare.thresholds(arguments.fail_on)
    if fail_on and arguments.busy:
        raise Mistake(
            "--fail-on needs a verdict that counts, and that of --busy is provisional: give one of them"
        )
    threshold, limits = compare.share("--threshold", arguments.threshold), limits_of(arguments)
    a, b = (_loaded(arguments, side) for side in "ab")
    wanted = planned(a[1], b[1], (arguments.package_a, arguments.package_b), arguments)
    sides, names, pairs = wanted.sides, list(wanted.pairs), list(wanted.pairs.values())
    model_arguments.say_what_is_random(arguments, sides)
    if not (arguments.b or arguments.set_a or arguments.set_b or arguments.package_a or arguments.package_b):
        say("both sides are the same, so this finds noise alone: name B, or what changes (--set-b)")
    root = (arguments.out or Path("results")).absolute()
    if arguments.dry_run:
        return _forecast(sides, pairs, names, limits, root, arguments.wide)
    options = (
        RunOptions(root, a[0], arguments.command_line, fresh=True, wait=arguments.wait),
        RunOptions(root, b[0], arguments.command_line, fresh=True, wait=arguments.wait),
    )
    rounds = Rounds(threshold, names, arguments.busy)

    def on_round(stored: Sequence[Stored]) -> Sequence[str]:
        rounds.add(stored)
        return rounds.open()

    progress = Progress()
    ended = ab.run(wanted, limits, options, progress, on_round)
    progress.clear()
    found = rounds.comparison(("A: " + _title(arguments, "a"), "B: " + _title(arguments, "b")), fail_on)
    compare.show(found, arguments)
    for name in names:
        if of_pair := [row for row in found.rows if row["name"] == name]:
            print(_answer(of_pair[0]), file=sys.stderr if arguments.format else sys.stdout)
    say(f"{ended}; records: {root}")
    return compare.exit_code(found)


def planned(
    a: Experiment,
    b: Experiment,
    packages: tuple[Sequence[str], Sequence[str]],
    arguments: argparse.Namespace,
) -> ab.Plan:
    """The pairs of two sides that --only names. Raises Mistake."""
    pairs = _pairs((a, b), arguments)
    _check((a, b), pairs, packages)
    return ab.Plan((a, b), dict(zip(_names(pairs), pairs, strict=True)), packages)


def _loaded(arguments: argparse.Namespace, side: str) -> tuple[Path, Experiment]:
    """The config of a side. Raises Mistake, ConfigError."""
    given, own = getattr(arguments, side) or arguments.a, getattr(arguments, f"set_{side}")
    try:
        return model_arguments.experiment([given], arguments, [*arguments.set, *own])
    except ConfigError as wrong:
        message = str(wrong)
        for setting in own:
            message = message.replace(f"--set {setting}", f"--set-{side} {setting}")
        raise ConfigError(message) from wrong


def _answer(row: Change) -> str:
    """The change of the figure that decides, in words, and what may decide it where it is open."""
    counted = f"{plural(row['base_repeats'] or 0, 'round')} counted"
    if row["change"] is None or row["change_ci90"] is None:
        return f"{row['name']}: not decided: {row['reason']}; {counted}"
    low, high = row["change_ci90"]
    figure = BY_NAME[row["metric"]].label
    if row["verdict"] == UNCLEAR:
        step = "more rounds, a quieter machine or a larger --threshold may decide it"
        answer = f"not distinguishable in {figure}, {counted}; {step}"
    elif row["verdict"] == SAME:
        answer = f"no change of {100 * row['threshold']:.3g}% in {figure}, {counted}"
    else:
        interval = f"90% interval {low:+.1%} to {high:+.1%}"
        answer = f"B is {row['verdict']}: {figure} {row['change']:+.1%}, {interval}, {counted}"
    provisional = "provisional: " * (row["reason"] or "").startswith("provisional")
    return f"{row['name']}: {provisional}{answer}"


def limits_of(arguments: argparse.Namespace) -> ab.Limits:
    """Raises Mistake."""
    if arguments.max_rounds < 2:
        raise Mistake(f"--max-rounds {arguments.max_rounds}: must be 2 or more")
    minutes = arguments.max_minutes
    if minutes is not None and not 0 < minutes < 1e5:
        raise Mistake(f"--max-minutes {minutes:g}: must be above 0")
    return ab.Limits(arguments.max_rounds, None if minutes is None else 60 * minutes)


def _pairs(sides: tuple[Experiment, Experiment], arguments: argparse.Namespace) -> list[tuple[Cell, Cell]]:
    timed = [[cell for cell in plan.cells(each) if not (cell.searches or cell.scores)] for each in sides]
    pairs, alone = plan.pairs(*timed)
    if pairs:
        wanted = {cell.id for cell in chosen([cell for pair in pairs for cell in pair], arguments)}
        pairs = [pair for pair in pairs if wanted & {cell.id for cell in pair}]
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


def _forecast(
    sides: tuple[Experiment, Experiment],
    pairs: Sequence[tuple[Cell, Cell]],
    names: Sequence[str],
    limits: ab.Limits,
    root: Path,
    wide: bool,
) -> int:
    for name, (a, b) in zip(names, pairs, strict=True):
        print(f"{name}: {a.id} against {b.id}")
    fewest = min(FEWEST_ROUNDS, limits.rounds)
    ends = "" if limits.seconds is None else f", none begins after {duration(limits.seconds)}"
    say(
        f"a round is one repeat of each cell; {fewest} to {limits.rounds} rounds, until the intervals are "
        f"narrow{ends}"
    )
    forecasts = []
    for number, side in enumerate(sides):
        forecasts += forecast.forecasts(side, [pair[number] for pair in pairs])
    protocol = sides[0].protocol.model_copy(update={"repeats": limits.rounds})
    longest = sides[0].model_copy(update={"protocol": protocol})
    return dry_run.show(longest, forecasts, root, as_json=False, fewest=fewest, wide=wide)
