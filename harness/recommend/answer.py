"""Predictions of all candidates -> the answer: rows, ranked by a goal, with one sentence each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.predict.speed import Predictor
from harness.predict.sums import added
from harness.predict.traits import Example, Range, Traits
from harness.recommend.candidates import Candidate

SHORT_PROMPT = 2048
MOST_LOSS = 0.02  # of the perplexity of 16-bit weights; more is not `balance`
MOST_KLD = 0.02  # nats per token, which costs about as much in ln PPL; where it was measured, it decides
PERPLEXITY_NOISE = 0.006  # its standard error, as llama.cpp prints it on wikitext
LEAST_BITS = 4  # per weight, with a 16-bit cache: for `balance` where no quality is known
MEASURED, CALIBRATED, ELSEWHERE, THEORY = BASES = "measured", "calibrated", "calibrated elsewhere", "theory"
GOALS = ("balance", "speed", "quality", "context")
KEPT, ENOUGH, SMALL_CACHE, UNLIKELY = 3, 2, 1, 0  # see _balanced
_LEADS = {
    "speed": "fastest",
    "quality": "best quality that fits",
    "context": "longest context",
    "balance": "fastest that keeps quality",
}


@dataclass(frozen=True)
class Quality:
    """`loss`: perplexity over that of 16-bit weights, less 1. `source`: whose, of which model. `kld`: mean
    KL divergence from them in nats per token, with the ends of its 95% interval; null: not measured."""

    loss: float
    source: str
    kld: float | None = None
    kld_ci95: tuple[float, float] | None = None

    @property
    def kept(self) -> bool:
        """Whether so little is lost that `balance` takes it."""
        return self.loss <= MOST_LOSS if self.kld is None else self.kld < MOST_KLD

    @property
    def cost(self) -> float:
        """Nats per token that are lost; of a published perplexity, those beyond its noise."""
        return max(0.0, self.loss - PERPLEXITY_NOISE) if self.kld is None else self.kld

    @property
    def words(self) -> str:
        return f"perplexity {self.loss:+.1%}" if self.kld is None else f"KLD {self.kld:.2g}"


@dataclass(frozen=True)
class Choice:
    """A candidate with all that is predicted of it. `start`, `deep`: tokens per second at zero context, and
    at the context asked for; `first_short`, `first_deep`: ms of a prompt of 2,048 tokens, and of the context.
    `basis`: what the prediction rests on."""

    candidate: Candidate
    start: Range
    deep: Range
    first_short: Range | None
    first_deep: Range | None
    quality: Quality | None
    basis: str

    @property
    def title(self) -> str:
        return f"{self.candidate.cell.variant.stack} {self.candidate.cell.variant.name}"


@dataclass(frozen=True)
class Ranked:
    choice: Choice
    why: str


def choices(
    found: Sequence[Candidate],
    examples: Sequence[Example],
    context: int,
    quality: Callable[[Candidate], Quality | None],
) -> list[Choice]:
    """Predict all candidates at once."""
    predictor, traits = Predictor(examples), [each.traits for each in found]
    figures = zip(
        found,
        _tokens_per_s(predictor, found, 1),
        _tokens_per_s(predictor, found, context),
        predictor.first_token_ms(traits, SHORT_PROMPT),
        predictor.first_token_ms(traits, context),
        strict=True,
    )
    return [
        Choice(each, start, deep, short, long, quality(each), basis(each, examples))
        for each, start, deep, short, long in figures
    ]


def _tokens_per_s(predictor: Predictor, found: Sequence[Candidate], n: int) -> list[Range]:
    """At position n; a step takes its parts one after the other."""
    parts = iter(predictor.latency_ms([part for each in found for part in each.parts], n))
    return [added([next(parts) for _ in each.parts]).inverted(1e3) for each in found]


def basis(candidate: Candidate, examples: Sequence[Example]) -> str:
    """`measured`: this variant on this device; `calibrated`: others of its kind of stack there; `calibrated
    elsewhere`: its kind of stack on another device of its kind; `theory`: none of these. Of a variant in two
    memories, the weaker."""
    return max((_basis(each, examples) for each in candidate.parts), key=BASES.index)


def _basis(wanted: Traits, examples: Sequence[Example]) -> str:
    alike = [each.traits for each in examples if each.traits.family == wanted.family]
    same_stack = [each for each in alike if each.group == wanted.group]
    here = [each for each in same_stack if each.device == wanted.device]
    if any(
        (each.model, each.type, each.layers) == (wanted.model, wanted.type, wanted.layers) for each in here
    ):
        return MEASURED
    engines = {(each.device, each.engine) for each in alike}
    if here or (wanted.device, wanted.engine) in engines:
        return CALIBRATED
    return ELSEWHERE if any(engine == wanted.engine for _, engine in engines) else THEORY


def ranked(found: Sequence[Choice], goal: str, most: int) -> list[Ranked]:
    """At most so many that fit, best first. The best of each goal come first, the goal asked for leading;
    then those that no other beats in both speed and quality (or bits, where no quality is known)."""
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
    leads: dict[int, list[str]] = {}
    chosen: list[Choice] = []
    for each_goal in [goal, *(other for other in GOALS if other != goal)]:
        best = max(fitting, key=keys[each_goal])
        if id(best) not in leads:
            chosen.append(best)
        leads.setdefault(id(best), []).append(each_goal)
    front = sorted((c for c in fitting if not _dominated(c, fitting)), key=keys[goal], reverse=True)
    shown = [*chosen, *(each for each in front if id(each) not in leads)][:most]

    def why(best: Choice) -> str:
        led = leads.get(id(best), ())
        reasons = [_reason(each, best, rated) + _rivals(each, best, shown, fitting, rated) for each in led]
        return "; ".join(reasons) or "none with as many bits, of weights and of cache, is faster"

    return [Ranked(each, why(each)) for each in shown]


def _rivals(goal: str, best: Choice, shown: Sequence[Choice], fitting: Sequence[Choice], rated: bool) -> str:
    """Those that may be as good: no winner is named where intervals overlap."""

    def is_rival(other: Choice) -> bool:
        if goal == "context":
            return other.candidate.longest == best.candidate.longest
        if goal == "quality":
            return _goodness(other) == _goodness(best)
        alike = goal == "speed" or _balanced(other, rated) == _balanced(best, rated)
        return alike and other.deep.high >= best.deep.low

    rivals = [each for each in fitting if each is not best and is_rival(each)]
    numbers = [str(n) for n, each in enumerate(shown, 1) if any(each is other for other in rivals)]
    parts = [f"row{'s' * (len(numbers) > 1)} {', '.join(numbers)}"] if numbers else []
    if hidden := len(rivals) - len(numbers):
        parts.append(f"{hidden} other{'s' * (hidden > 1)}" + " not shown" * (not numbers))
    end = "" if len(rivals) > 1 else "s"
    verb = {"context": f"hold{end} as much", "quality": f"lose{end} no more"}.get(goal, "may be as fast")
    return f" ({' and '.join(parts)} {verb})" if rivals else ""


def _reason(goal: str, best: Choice, rated: bool) -> str:
    """Why it leads at a goal, in a few words."""
    words, quality = _LEADS[goal], best.quality
    if goal == "context" and (longest := best.candidate.longest or 0) >= best.candidate.trained:
        limit = "it was trained on" if longest == best.candidate.trained else "was asked for"
        return f"{words}: all that {limit}"
    if goal == "balance":
        return _reason_of_balance(best, _balanced(best, rated))
    if goal != "quality" or best.candidate.is_whole:
        return words
    if quality is None:
        return "most bits a weight that fit, quality unknown"
    return "best known quality that fits" + (f" ({quality.words})" if quality.kld is not None else "")


def _reason_of_balance(best: Choice, rank: int) -> str:
    if best.candidate.is_whole:
        return f"{_LEADS['balance']} (16 bits)"
    if rank == KEPT and best.quality:
        if best.quality.kld is not None:
            return f"fastest that keeps KLD under {MOST_KLD} ({best.quality.words})"
        return f"{_LEADS['balance']} ({best.quality.words})"
    if rank == ENOUGH:
        return f"fastest with at least {LEAST_BITS} bits a weight and a 16-bit KV cache, quality unknown"
    if rank == SMALL_CACHE:
        return f"fastest with at least {LEAST_BITS} bits a weight; none that fits is known to keep quality"
    return "fastest; none that fits is known or likely to keep quality"


def _pace(choice: Choice) -> tuple[float, ...]:
    """Speed at the context, as it is printed; where it is the same, the longer context, and less memory."""
    candidate = choice.candidate
    return float(f"{choice.deep.value:.3g}"), candidate.longest or 0, -candidate.memory_bytes


def _goodness(choice: Choice) -> tuple[float, ...]:
    """Known quality before unknown, then the smaller loss, where it exceeds the noise of a perplexity; of
    unknown quality the more bits, and a 16-bit cache."""
    if choice.candidate.is_whole:
        return 1.0, 0.0
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
