"""The choice and its reasons, how far off predictions were, and what came of them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import TypedDict

from harness.analysis.columns import Cell as ColumnsCell
from harness.analysis.quality_figures import EQUAL_KLD
from harness.base.data import RECOMMENDED
from harness.recommend import evidence
from harness.recommend.candidates import Candidate
from harness.recommend.commands import measured_name
from harness.recommend.evidence import DECODE, NORMAL_90, how_far_off
from harness.recommend.least_squares import Floats
from harness.recommend.quality_loss import Quality
from harness.recommend.speed import Predictor
from harness.recommend.terms import family_name
from harness.recommend.traits import Example, Range, Traits

if TYPE_CHECKING:
    from harness.dataset.study import Study

# Predictions of all candidates -> the answer: rows, ranked by a goal, with one sentence each. Pure.

SHORT_PROMPT = 2048
ABOUT_AS_FAST = 1.1  # for `balance`, the better quality comes first of speeds that differ by no more
LEAST_BITS = 4  # per weight, with a 16-bit cache: for `balance` where no quality is known
MEASURED, HERE_TOO, ELSEWHERE, THEORY = BASES = "measured", "other variants", "other machines", "theory"
GOALS = ("balance", "speed", "quality", "context")
KEPT, ENOUGH, SMALL_CACHE, UNLIKELY = 3, 2, 1, 0  # see _balanced
_LEADS = {
    "speed": "fastest",
    "quality": "fastest at 16-bit quality",
    "context": "longest context",
    "balance": "fastest that keeps quality",
}


@dataclass(frozen=True)
class Choice:
    """A candidate with its predictions. `start`, `deep`: tokens per second at zero context, and at the
    requested context; `first_short`, `first_deep`: ms of a prompt of 2,048 tokens, and of the context.
    `basis`: the evidence for the prediction.
    `unknowns`: the standard deviation of `deep`'s logarithm by each unknown, in the same order for all
    choices."""

    candidate: Candidate
    start: Range
    deep: Range
    first_short: Range | None
    first_deep: Range | None
    quality: Quality | None
    basis: str
    unknowns: Floats = field(compare=False, repr=False)

    @property
    def title(self) -> str:
        return f"{self.candidate.cell.variant.stack} {self.candidate.cell.variant.name}"

    def is_faster(self, other: Choice) -> bool:
        """Whether it is faster at the context with a probability of 95%. What is unknown of the machine is
        common to both."""
        spread = float(np.linalg.norm(self.unknowns - other.unknowns))
        return math.log(self.deep.value / other.deep.value) > NORMAL_90 * spread


@dataclass(frozen=True)
class Ranked:
    choice: Choice
    why: str


def choices(
    found: Sequence[Candidate],
    examples: Sequence[Example],
    context: int,
    quality: Callable[[Candidate], Quality | None],
    fitted: Predictor | None = None,
) -> list[Choice]:
    """Predict all candidates at once. `fitted`: to these examples, where it is asked again."""
    fitted, traits = fitted or Predictor(examples), [each.traits for each in found]
    start, deep = (fitted.steps([each.parts for each in found], n) for n in (1, context))
    figures = zip(
        found,
        start.ranges,
        deep.ranges,
        deep.unknowns,
        fitted.first_token_ms(traits, SHORT_PROMPT),
        fitted.first_token_ms(traits, context),
        strict=True,
    )
    return [
        Choice(
            candidate=each,
            start=first.inverted(1e3),
            deep=last.inverted(1e3),
            first_short=short,
            first_deep=long,
            quality=quality(each),
            basis=basis(each, examples),
            unknowns=unknowns,
        )
        for each, first, last, unknowns, short, long in figures
    ]


def basis(candidate: Candidate, examples: Sequence[Example]) -> str:
    """`measured`: this variant on the user's device; `other variants`: others of its kind of stack there;
    `other machines`: its kind of stack on others' devices of its family; `theory`: none of these. Of a
    variant in two memories, the weaker."""
    return max((_basis(each, examples) for each in candidate.parts), key=BASES.index)


def _basis(wanted: Traits, examples: Sequence[Example]) -> str:
    timed = [each.traits for each in examples if each.at_ms and each.traits.engine == wanted.engine]
    here = [each for each in timed if not each.setup and each.device == wanted.device]
    if any(_identity(each) == _identity(wanted) for each in here):
        return MEASURED
    if here:
        return HERE_TOO
    family = family_name(wanted)
    elsewhere = (family, DECODE) in evidence.table() or any(family_name(each) == family for each in timed)
    return ELSEWHERE if elsewhere else THEORY


def _identity(of: Traits) -> tuple[str | int, ...]:
    """What makes it the same variant on the same device."""
    return of.group, of.device, of.model, of.type, of.layers, of.software


def ranked(found: Sequence[Choice], goal: str, most: int) -> list[Ranked]:
    """At most so many choices that fit, best first. The best of each goal come first, led by the requested
    goal; then choices that no other beats in both speed and quality (or bits, where quality is unknown). By
    quality, the best is followed by these alone, in its order."""
    fitting = [each for each in found if each.candidate.fits]
    if not fitting:
        return []
    # 16 bits keep quality, but are no answer where of nothing else quality is known: they would always win.
    rated = any(each.quality for each in fitting if not each.candidate.is_whole)
    keys: Mapping[str, Callable[[Choice], tuple[float, ...]]] = {
        "speed": _pace,
        "quality": lambda each: (*_goodness(each), *_pace(each)),
        "context": lambda each: (each.candidate.longest or 0, *_pace(each)),
        "balance": lambda each: (_balanced(each, rated), *_pace(each)),
    }
    fastest = max(fitting, key=keys["balance"])
    leads: dict[int, list[str]] = {}
    chosen: list[Choice] = []
    for each_goal in [goal, *(other for other in GOALS if other != goal)]:
        best = max(fitting, key=keys[each_goal])
        if each_goal == "balance":
            best = _best_of_alike(fastest, fitting, rated)
        if id(best) not in leads and not (chosen and goal == "quality"):
            chosen.append(best)
        leads.setdefault(id(best), []).append(each_goal)
    front = sorted((c for c in fitting if not _dominated(c, fitting)), key=keys[goal], reverse=True)
    shown = [*chosen, *(each for each in front if not any(each is other for other in chosen))][:most]

    def why(best: Choice) -> str:
        led = leads.get(id(best), [])
        led = [each for each in led if each != "speed" or "balance" not in led]  # the fastest of fewer
        rivals = [_rivals(each, best, shown, fitting, rated) for each in led]
        reasons = [_reason(each, best, fastest, rated) + of for each, of in zip(led, rivals, strict=True)]
        return "; ".join(reasons) or "every faster one has fewer bits, per weight or in its cache"

    return [Ranked(each, why(each)) for each in shown]


def _best_of_alike(fastest: Choice, fitting: Sequence[Choice], rated: bool) -> Choice:
    """The one that loses least, as far as is known, of those that are about as fast."""
    rank, least = _balanced(fastest, rated), fastest.deep.value / ABOUT_AS_FAST
    alike = [each for each in fitting if _balanced(each, rated) == rank and each.deep.value >= least]
    return max(alike, key=lambda each: (*_goodness(each), *_pace(each)))


def _rivals(goal: str, best: Choice, shown: Sequence[Choice], fitting: Sequence[Choice], rated: bool) -> str:
    """Name choices that may be as good: that the best is not faster with certainty."""

    def is_rival(other: Choice) -> bool:
        if goal == "context":
            return other.candidate.longest == best.candidate.longest
        if goal == "quality":
            return _goodness(other) == _goodness(best)
        alike = goal == "speed" or _balanced(other, rated) == _balanced(best, rated)
        return alike and not best.is_faster(other)

    rivals = [each for each in fitting if each is not best and is_rival(each)]
    numbers = [str(n) for n, each in enumerate(shown, 1) if any(each is other for other in rivals)]
    parts = [f"row{'s' * (len(numbers) > 1)} {', '.join(numbers)}"] if numbers else []
    if hidden := len(rivals) - len(numbers):
        parts.append(f"{hidden} other{'s' * (hidden > 1)}" + " not shown" * (not numbers))
    end = "" if len(rivals) > 1 else "s"
    verb = {"context": f"hold{end} as much", "quality": f"lose{end} no more"}.get(goal, "may be as fast")
    return f" ({' and '.join(parts)} {verb})" if rivals else ""


def _reason(goal: str, best: Choice, fastest: Choice, rated: bool) -> str:
    """Why a choice leads at a goal, in a few words."""
    words, quality = _LEADS[goal], best.quality
    if goal == "context" and (longest := best.candidate.longest or 0) >= best.candidate.trained:
        limit = "it was trained on" if longest == best.candidate.trained else "was requested"
        return f"{words}: all that {limit}"
    if goal == "balance":
        reason = _reason_of_balance(best, _balanced(best, rated))
        return reason if best is fastest else reason.replace("fastest", "within 10% of the fastest", 1)
    if goal != "quality":
        return words
    if _goodness(best) == _AS_WHOLE:
        figures = f" ({quality.words})" if quality and not best.candidate.is_whole else ""
        return f"{words}{figures}"
    if quality is None:
        return "most bits a weight that fit, quality unknown"
    return "best known quality that fits" + (f" ({quality.words})" if quality.kld is not None else "")


def _reason_of_balance(best: Choice, rank: int) -> str:
    if best.candidate.is_whole:
        return f"{_LEADS['balance']} (16 bits)"
    if rank == KEPT and best.quality:
        if best.quality.kld is not None:
            return f"fastest that keeps KLD under {EQUAL_KLD} ({best.quality.words})"
        return f"{_LEADS['balance']} ({best.quality.words})"
    if rank == ENOUGH:
        return f"fastest with at least {LEAST_BITS} bits a weight and a 16-bit KV cache, quality unknown"
    if rank == SMALL_CACHE:
        return f"fastest with at least {LEAST_BITS} bits a weight; none that fits is known to keep quality"
    return "fastest; none that fits is known or likely to keep quality"


def _pace(choice: Choice) -> tuple[float, ...]:
    """Speed at the context, as printed; for equal speeds, the longer context, then less memory."""
    candidate = choice.candidate
    return float(f"{choice.deep.value:.3g}"), candidate.longest or 0, -candidate.memory_bytes


_AS_WHOLE = 1.0, 0.0


def _goodness(choice: Choice) -> tuple[float, ...]:
    """Known quality before unknown, then the smaller loss, as far as evidence orders them; of unknown quality
    the more bits, and a 16-bit cache."""
    if choice.candidate.is_whole:
        return _AS_WHOLE
    if choice.quality is None:
        return 0.0, choice.candidate.bits, choice.candidate.keeps_cache
    return 1.0, -choice.quality.cost


def _balanced(choice: Choice, rated: bool) -> int:
    """How likely its quality is kept: known to be; unknown, with bits of which most models lose little; the
    same but for the cache; neither. `rated`: whether quality is known of any that is quantized; if not, bits
    alone count."""
    candidate, known = choice.candidate, choice.quality
    if rated and (candidate.is_whole or (known is not None and known.kept)):
        return KEPT
    if known is not None or candidate.bits < LEAST_BITS:
        return UNLIKELY
    return ENOUGH if candidate.keeps_cache else SMALL_CACHE


def _dominated(choice: Choice, others: Sequence[Choice]) -> bool:
    """Whether another is at least as fast with as many bits of weights and cache, and better in one; or alike
    in these, and holds more context or takes less memory."""
    mine, pace = _merits(choice), _pace(choice)
    for other in others:
        theirs = _merits(other)
        if theirs == mine and _pace(other) > pace:
            return True
        if theirs != mine and all(t >= m for t, m in zip(theirs, mine, strict=True)):
            return True
    return False


def _merits(choice: Choice) -> tuple[float, ...]:
    return _pace(choice)[0], choice.candidate.bits, choice.candidate.keeps_cache


# Outcomes: predictions that were measured later, stored with the records, and their errors so far.

HEADING = "predictions"


def with_predictions(study: Study, folders: Iterable[Path]) -> Study:
    """The study with outcomes of predictions that `harness recommend --prove` stored in these results."""
    outcomes = [sentence for folder in folders if (sentence := outcomes_so_far(folder))]
    if not outcomes:
        return study
    known = [how_far_off(family) for family, phase in evidence.table() if phase == DECODE]
    return replace(study, further_methods={**study.further_methods, HEADING: [*outcomes, *known]})


NAME = "outcomes.jsonl"  # in the folder RECOMMENDED of the results


class Outcome(TypedDict):
    """Tokens per second at the last position of `context`, predicted with its interval, and measured."""

    model: str
    stack: str
    variant: str
    device: str
    context: int
    predicted: float
    low: float
    high: float
    measured: float


def outcome_of_choice(choice: Choice, windows: Sequence[ColumnsCell], context: int) -> Outcome | None:
    """Pair a prediction with the latest measurement at its context; null: there is none."""
    cell, found = choice.candidate.cell, choice.deep
    wanted = cell.model.name, cell.variant.stack, measured_name(cell)
    mine = [
        row for row in windows if (row["model"], row["stack"], row["variant"]) == wanted and row["depths"]
    ]
    for row in sorted(mine, key=lambda row: row["started_utc"], reverse=True):
        for at in row["depths"]["at"] if row["depths"] else []:
            if at["depth"] == context - 1 and row["status"] == "ok":
                return {
                    "model": wanted[0],
                    "stack": wanted[1],
                    "variant": wanted[2],
                    "device": choice.candidate.traits.device,
                    "context": context,
                    "predicted": found.value,
                    "low": found.low,
                    "high": found.high,
                    "measured": at["tokens_per_s"],
                }
    return None


def outcome_sentence(choice: Choice, outcome: Outcome | None) -> str:
    """Compare a prediction with its measurement."""
    found = choice.deep
    predicted = f"{choice.title}: predicted {found.value:.3g} tok/s ({found.low:.3g} to {found.high:.3g})"
    if outcome is None:
        return f"{predicted}, no measurement is ok"
    return f"{predicted}, measured {outcome['measured']:.3g}: off by {error(outcome):+.1%}"


def error(outcome: Outcome) -> float:
    """Predicted over measured, less 1."""
    return outcome["predicted"] / outcome["measured"] - 1


def keep_outcome(results: Path, outcome: Outcome) -> None:
    """Append an outcome."""
    with (results / RECOMMENDED / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(outcome) + "\n")


def outcomes_so_far(results: Path) -> str | None:
    """The error of all predictions that were measured; null without any. A damaged line does not count."""
    try:
        lines = (results / RECOMMENDED / NAME).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    errors, inside = [], 0
    for line in lines:
        try:
            outcome: Outcome = json.loads(line)
            off, lies_in = abs(error(outcome)), outcome["low"] <= outcome["measured"] <= outcome["high"]
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            continue
        if math.isfinite(off):
            errors.append(off)
            inside += lies_in
    if not errors:
        return None
    return (
        f"of {len(errors)} predictions that were measured, {inside} lie in their interval; median error "
        f"{statistics.median(errors):.1%}, largest {max(errors):.1%}"
    )
