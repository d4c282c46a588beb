"""`harness bisect`: which version of a package, or which option, made a cell slower or faster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from harness import compare
from harness.analysis import bisection
from harness.analysis.bisection import CHANGED, FAILED, SAME, UNCLEAR, Enough, Found, Pair
from harness.analysis.figures import Figure
from harness.analysis.paired import CONFIDENCE
from harness.base.files import NotFinished
from harness.base.text import list_named, plural
from harness.campaign import ab as campaign_ab
from harness.cli import NOT_OK, OK, Mistake, ab, say
from harness.cli.arguments import say_what_is_random
from harness.cli.bisect_places import Place, places_between, planned
from harness.compare.ab import Rounds
from harness.compare.judge import relative
from harness.compare.show import change_text
from harness.records import Stored
from harness.stacks.header import project_of

QUIET = "harness doctor says what disturbs measurements here, and --busy uses what was disturbed"


def run(arguments: argparse.Namespace) -> int:
    """Search, print each measured pair and the answer. Exits with 0 if there is one step, or no change."""
    if arguments.dry_run and arguments.json:
        raise Mistake("--json has no effect with --dry-run")
    places = places_between(arguments)
    last = len(places) - 1
    say_what_is_random(arguments, [each.experiment for each in places])
    if arguments.dry_run:
        for each in places:
            print(each.title)
        pairs = 1 if last == 1 else last.bit_length() + 1
        say(f"at most {plural(arguments.max_rounds, 'round')} of each pair; about {plural(pairs, 'pair')}")
        return OK
    search = _Search(arguments, places)
    found = bisection.search(last, search.measure, arguments.threshold, arguments.max_rounds)
    if arguments.json:
        print(json.dumps([search.row(pair, pair is found.answer) for pair in found.pairs], indent=1))
        say(search.answer(found))
    else:
        print(search.answer(found))
    say(f"records: {(arguments.out or Path('results')).absolute()}")
    return OK if search.is_whole(found) else NOT_OK


class _Search:
    """Measures pairs of places, and says what was found in words."""

    def __init__(self, arguments: argparse.Namespace, places: Sequence[Place]) -> None:
        self._arguments, self._places = arguments, places
        self._metric: Figure | None = None
        self._provisional = False
        self._others: dict[tuple[int, int], list[str]] = {}

    def measure(self, base: int, new: int, enough: Enough) -> Pair:
        """Measure two places in turns. Raises NotFinished if another version ran than the one named."""
        arguments, places = self._arguments, (self._places[base], self._places[new])
        wanted = planned(arguments, *places)
        (name,) = wanted.pairs
        rounds = Rounds(arguments.threshold, [name], arguments.busy)

        def on_round(stored: Sequence[Stored]) -> Sequence[str]:
            for repeat in stored:
                _check_version(repeat, places["AB".index(repeat.record["campaign"]["side"])])
            rounds.add(stored)
            return rounds.open(enough)

        limits, configs = campaign_ab.Limits(arguments.max_rounds), (places[0].config, places[1].config)
        ab.measure(wanted, limits, configs, arguments, on_round, fresh=False)
        for warning in rounds.warnings:
            say(warning)
        if name not in (steering := rounds.steering()):
            sides = {side: f"with {place.title}" for side, place in zip("AB", places, strict=True)}
            pair = Pair(base, new, (), rounds.why_not(name, sides))
        else:
            self._metric, differences = steering[name]
            self._provisional |= rounds.provisional(self._metric, name) is not None
            pair = Pair(base, new, differences)
        own = {project_of(requirement) for place in places for requirement in place.package}
        self._others[base, new] = [
            f"{project} {differing['base']} -> {differing['new']}"
            for differing in compare.differing(rounds.records)
            if differing["what"].startswith("package ")
            and (project := project_of(differing["what"].removeprefix("package "))) not in own
        ]
        if not arguments.json:
            print(f"{places[0].title} -> {places[1].title}: {self._figure(pair)}", flush=True)
        return pair

    def row(self, pair: Pair, is_answer: bool) -> dict[str, object]:
        """A pair, as `--json` has it; `change`, `change_ci90`: of the figure, as `harness ab` has them."""
        change, ends = self._change(pair)
        return {
            "base": self._places[pair.base].title,
            "new": self._places[pair.new].title,
            "metric": self._metric.name if self._metric and pair.differences else None,
            "change": change,
            "change_ci90": ends,
            "rounds": len(pair.differences),
            "verdict": pair.verdict,
            "reason": pair.failure,
            "answer": is_answer,
        }

    def _change(self, pair: Pair) -> tuple[float | None, list[float] | None]:
        return (
            relative(self._metric, pair.change(CONFIDENCE))
            if self._metric and pair.differences
            else (None, None)
        )

    def _figure(self, pair: Pair) -> str:
        """`tok/s -8.3%, 90% interval -9.1% to -7.5%, 16 rounds counted`"""
        change, ends = self._change(pair)
        if self._metric is None or change is None:
            return f"not measured: {pair.failure}"
        counted = f"{plural(len(pair.differences), 'round')} counted"
        return f"{change_text(self._metric.label, change, ends)}, {counted}"

    def is_whole(self, found: Found) -> bool:
        """Whether the question is answered: by one step between neighbours, or by no change."""
        if self._provisional:
            return False
        if found.answer is None:
            return found.pairs[0].verdict == SAME
        return found.answer.new - found.answer.base == 1 and found.answer.verdict == CHANGED

    def answer(self, found: Found) -> str:
        """The answer in one sentence."""
        words = self._answer(found)
        return f"provisional: {words}" if self._provisional else words

    def _answer(self, found: Found) -> str:
        ends, answer = found.pairs[0], found.answer
        if answer is None:
            if ends.verdict == FAILED:
                why = ends.failure if self._arguments.json else "no round of both counts"
                hint = f"; {QUIET}" if "invalid" in str(ends.failure) else ""
                return f"GOOD and BAD are not compared: {why}{hint}"
            if ends.verdict == SAME:
                threshold = f"{100 * self._arguments.threshold:.3g}%"
                return f"nothing to find: no change of {threshold}: {self._figure(ends)}"
            return f"not known whether GOOD and BAD differ: {self._figure(ends)}; {ab.MAY_DECIDE}"
        base, new = self._places[answer.base], self._places[answer.new]
        towards = "slower" if ends.change().cost > 0 else "faster"
        between = f"between {base.title} and {new.title}"
        if answer.new - answer.base == 1:
            parts = [f"{towards} since {new.since}: {self._figure(answer)}, {between}"]
        else:
            parts = [f"{towards} {between}, not known where: {self._figure(answer)}"]
            open_ = [each for each in found.pairs if answer.base < each.new < answer.new]
            parts += [f"{self._places[each.new].title}: {self._why_passed(each)}" for each in open_]
        if answer.verdict != CHANGED:
            parts.append("that step alone was not decided")
        if found.rest is not None and self._metric:
            rest, whole = (self._metric.change(cost) for cost in (found.rest, ends.change().cost))
            parts.append(f"the difference came in more than one step: {rest:+.1%} of {whole:+.1%} elsewhere")
        if others := self._others[answer.base, answer.new]:
            parts.append(f"other packages differ too: {list_named(others, 5)}")
        return "; ".join(parts)

    def _why_passed(self, pair: Pair) -> str:
        return f"unclear, {self._figure(pair)}" if pair.verdict == UNCLEAR else self._figure(pair)


def _check_version(stored: Stored, place: Place) -> None:
    """Raises NotFinished: the environment has another version than the one named."""
    environment = stored.record.get("environment")  # none where it could not be built
    locked = {project_of(each): each.partition("==")[2] for each in (environment or {}).get("lock") or ()}
    for requirement in place.package if environment else ():
        ran = locked.get(project_of(requirement)) or "another build"
        if (ran if "+" in place.title else ran.partition("+")[0]) != place.title:
            raise NotFinished(
                f"{requirement} was to be measured, and {ran} ran: {stored.folder}; "
                "`harness env forget` gives up an adopted interpreter"
            )
