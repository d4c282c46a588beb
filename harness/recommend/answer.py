"""The choice and its reasons, how far off predictions were, and what came of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from harness.analysis.quality_figures import EQUAL_KLD
from harness.recommend import evidence
from harness.recommend.candidates import Candidate
from harness.recommend.evidence import DECODE, NORMAL_90
from harness.recommend.least_squares import Floats
from harness.recommend.quality_loss import Quality
from harness.recommend.speed import Predictor
from harness.recommend.terms import family_name
from harness.recommend.traits import Example, Range, Traits

if TYPE_CHECKING:
    pass

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
    offered: Sequence[Candidate],
    examples: Sequence[Example],
    context: int,
    quality: Callable[[Candidate], Quality | None],
    fitted: Predictor | None = None,
) -> list[Choice]:
    """Predict all candidates at once. `fitted`: to these examples, where it is asked again."""
    fitted, traits = fitted or Predictor(examples), [candidate.traits for candidate in offered]
    start, deep = (fitted.steps([candidate.parts for candidate in offered], n) for n in (1, context))
    figures = zip(
        offered,
        start.ranges,
        deep.ranges,
        deep.unknowns,
        fitted.first_token_ms(traits, SHORT_PROMPT),
        fitted.first_token_ms(traits, context),
        strict=True,
    )
    return [
        Choice(
            candidate=candidate,
            start=first.inverted(1e3),
            deep=last.inverted(1e3),
            first_short=short,
            first_deep=long,
            quality=quality(candidate),
            basis=basis(candidate, examples),
            unknowns=unknowns,
        )
        for candidate, first, last, unknowns, short, long in figures
    ]


def basis(candidate: Candidate, examples: Sequence[Example]) -> str:
    """`measured`: this variant on the user's device; `other variants`: others of its kind of stack there;
    `other machines`: its kind of stack on others' devices of its family; `theory`: none of these. Of a
    variant in two memories, the weaker."""
    return max((_basis(part, examples) for part in candidate.parts), key=BASES.index)


def _basis(traits: Traits, examples: Sequence[Example]) -> str:
    timed = [
        example.traits for example in examples if example.at_ms and example.traits.engine == traits.engine
    ]
    here = [measured for measured in timed if not measured.setup and measured.device == traits.device]
    if any(_identity(measured) == _identity(traits) for measured in here):
        return MEASURED
    if here:
        return HERE_TOO
    family = family_name(traits)
    elsewhere = (family, DECODE) in evidence.table() or any(
        family_name(measured) == family for measured in timed
    )
    return ELSEWHERE if elsewhere else THEORY


def _identity(traits: Traits) -> tuple[str | int, ...]:
    """What makes it the same variant on the same device."""
    return traits.group, traits.device, traits.model, traits.type, traits.layers, traits.software


def ranked(offered: Sequence[Choice], goal: str, most: int) -> list[Ranked]:
    """At most so many choices that fit, best first. The best of each goal come first, led by the requested
    goal; then choices that no other beats in both speed and quality (or bits, where quality is unknown). By
    quality, the best is followed by these alone, in its order."""
    fitting = [choice for choice in offered if choice.candidate.fits]
    if not fitting:
        return []
    # 16 bits keep quality, but are no answer where of nothing else quality is known: they would always win.
    rated = any(choice.quality for choice in fitting if not choice.candidate.is_whole)
    keys: Mapping[str, Callable[[Choice], tuple[float, ...]]] = {
        "speed": _pace,
        "quality": lambda choice: (*_goodness(choice), *_pace(choice)),
        "context": lambda choice: (choice.candidate.longest or 0, *_pace(choice)),
        "balance": lambda choice: (_balanced(choice, rated), *_pace(choice)),
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
    shown = [*chosen, *(choice for choice in front if not any(choice is other for other in chosen))][:most]

    def why(best: Choice) -> str:
        led = leads.get(id(best), [])
        led = [order for order in led if order != "speed" or "balance" not in led]  # the fastest of fewer
        rivals = [_rivals(order, best, shown, fitting, rated) for order in led]
        reasons = [
            _reason(order, best, fastest, rated) + rivals_text
            for order, rivals_text in zip(led, rivals, strict=True)
        ]
        return "; ".join(reasons) or "every faster one has fewer bits, per weight or in its cache"

    return [Ranked(choice, why(choice)) for choice in shown]


def _best_of_alike(fastest: Choice, fitting: Sequence[Choice], rated: bool) -> Choice:
    """The one that loses least, as far as is known, of those that are about as fast."""
    rank, least = _balanced(fastest, rated), fastest.deep.value / ABOUT_AS_FAST
    alike = [choice for choice in fitting if _balanced(choice, rated) == rank and choice.deep.value >= least]
    return max(alike, key=lambda choice: (*_goodness(choice), *_pace(choice)))


def _rivals(goal: str, best: Choice, shown: Sequence[Choice], fitting: Sequence[Choice], rated: bool) -> str:
    """Name choices that may be as good: that the best is not faster with certainty."""

    def is_rival(other: Choice) -> bool:
        if goal == "context":
            return other.candidate.longest == best.candidate.longest
        if goal == "quality":
            return _goodness(other) == _goodness(best)
        alike = goal == "speed" or _balanced(other, rated) == _balanced(best, rated)
        return alike and not best.is_faster(other)

    rivals = [choice for choice in fitting if choice is not best and is_rival(choice)]
    numbers = [str(n) for n, choice in enumerate(shown, 1) if any(choice is other for other in rivals)]
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
    candidate, quality = choice.candidate, choice.quality
    if rated and (candidate.is_whole or (quality is not None and quality.kept)):
        return KEPT
    if quality is not None or candidate.bits < LEAST_BITS:
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
