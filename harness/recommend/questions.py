"""Answers before a model or a machine is chosen: of each model on each machine, the best variant that fits
and reaches a speed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from harness.base import data
from harness.config import Model
from harness.config.plan import Cell
from harness.recommend import candidates, sides
from harness.recommend.answer import LEAST_BITS, Choice
from harness.recommend.candidates import Candidate, Subject
from harness.recommend.places import Place
from harness.stacks.header import references
from harness.theory import decoder, floors
from harness.theory import memory as theory_memory
from harness.theory.ggml_types import element_bytes
from harness.theory.memory_choices import OF_MIXTURES

# Types of GGUF worth a look, with the type of their matrices; some of these have more bits, none has fewer.
TYPES = {
    "f16": "f16",
    "q8_0": "q8_0",
    "q6_k": "q6_k",
    "q5_k_m": "q5_k",
    "q4_k_m": "q4_k",
    OF_MIXTURES: "mxfp4",
    "q3_k_m": "q3_k",
    "q2_k": "q2_k",
}
KV, SMALL_KV = "f16", "q8_0"  # types of the cache
SIZES = (2, 5, 10, 20, 40, 80, 160)  # billions of parameters: the classes end here
# Times that a model's family was pulled from the Ollama library. Source: data/models.json of
# github.com/auditomatic/ollama-models-registry (MIT), commit 31464bb1, which reads ollama.com/library daily.
PULLS = {each["model"]: int(each["pulls"]) for each in data.rows("popularity.csv")}
PULLS_SOURCE = "pulls of its family from the Ollama library until 2026-08-21"
Predict = Callable[[Sequence[Candidate]], Sequence[Choice]]


@dataclass(frozen=True)
class Pair:
    """A model on a machine. `cells`: in llama.cpp with flash attention, by type of weights and of the cache,
    the best first: 4 bits a weight and a 16-bit cache, then a q8_0 cache, then fewer bits a weight."""

    subject: Subject
    place: Place
    cells: dict[tuple[str, str], Cell]


def pairs(subjects: Iterable[Subject], places: Sequence[Place], context: int) -> list[Pair]:
    """Each model on each machine."""
    # A model without its shape: the bytes of all its tensors are counted here, and not by the forecast too.
    bare = [replace(subject, model=Model(name=subject.model.name)) for subject in subjects]
    return [
        Pair(subject, place, cells)
        for subject in bare
        for cells in [_cells(subject, context)]
        for place in places
    ]


def _cells(subject: Subject, context: int) -> dict[tuple[str, str], Cell]:
    offer = {"flash_attn": True, "quant": [quant for quant in TYPES if quant != OF_MIXTURES]}
    small_cache = {**offer, "type_k": SMALL_KV, "type_v": SMALL_KV}
    header = references()["gguf"].model_copy(update={"offers": (offer, small_cache)})
    cells = {
        (candidates.type_of(subject, cell), str(cell.variant.options.get("type_k", KV))): cell
        for cell in candidates.cells_of(subject, header, context)
    }
    by_bits = [*dict.fromkeys([*TYPES, *(name for name, _ in cells)])]

    def order(kinds: tuple[str, str]) -> tuple[bool, bool, int]:
        return _bits(kinds[0]) < LEAST_BITS, kinds[1] != KV, by_bits.index(kinds[0])

    return {kinds: cells[kinds] for kinds in sorted(cells, key=order)}


def _bits(name: str) -> float:
    """Of an element of the matrices of a type; of another than `TYPES`, the fewest of all."""
    return 8 * element_bytes(TYPES.get(name, "iq1_s"))


@dataclass(frozen=True)
class Found:
    """`reaches`: the predicted speed does; else the upper end of its interval alone."""

    pair: Pair
    choice: Choice
    reaches: bool

    @cached_property
    def parameters(self) -> int:
        return decoder.parameters(self.pair.subject.made)

    @cached_property
    def size(self) -> int:
        """The class of its size: of those that end in `SIZES`, and one above."""
        return sum(self.parameters > billions * 1e9 for billions in SIZES)

    @property
    def has_bits(self) -> bool:
        """Whether it has as many as most models need to lose little."""
        return self.choice.candidate.bits >= LEAST_BITS

    @property
    def kind(self) -> tuple[bool, bool]:
        """Greater is better."""
        return self.reaches, self.has_bits

    @property
    def rank(self) -> tuple[float, ...]:
        """Within its class: what reaches, has 4 bits, is pulled more, is larger, has more bits, is faster."""
        candidate = self.choice.candidate
        pulls = PULLS.get(self.pair.subject.model.name, 0)
        return *self.kind, pulls, self.parameters, candidate.bits, self.choice.deep.value


def best(pairs: Sequence[Pair], context: int, tok_s: float, predict: Predict) -> list[Found]:
    """For each pair the best variant that is predicted to reach the speed at the context; where there is
    none, the best one whose interval does."""
    reached: dict[int, Choice] = {}
    perhaps: dict[int, Choice] = {}
    rest = {i: offers(pair, context, tok_s) for i, pair in enumerate(pairs)}
    while asked := {i: variant for i, variants in rest.items() if (variant := next(variants, None))}:
        for i, choice in zip(asked, predict([*asked.values()]), strict=True):
            if choice.deep.value >= tok_s:
                reached[i] = choice
            elif choice.deep.high >= tok_s:
                perhaps.setdefault(i, choice)
        rest = {i: rest[i] for i in asked if i not in reached}
    return [Found(pairs[i], choice, i in reached) for i, choice in sorted((perhaps | reached).items())]


def nearest(pairs: Sequence[Pair], context: int, predict: Predict) -> Choice | None:
    """The fastest variant of the pair that is the fastest with the fewest bits; None: nothing fits."""
    smallest = [
        (pair, variant)
        for pair in pairs
        for variant in [next(offers(pair, context, fewest_bits_first=True), None)]
        if variant
    ]
    fastest = max(
        zip([pair for pair, _ in smallest], predict([variant for _, variant in smallest]), strict=True),
        key=lambda answer: answer[1].deep.value,
        default=None,
    )
    return fastest and max(predict([*offers(fastest[0], context)]), key=lambda choice: choice.deep.value)


def offers(
    pair: Pair, context: int, tok_s: float = 0.0, fewest_bits_first: bool = False
) -> Iterator[Candidate]:
    """The variants that fit, of a mixture with experts on the CPU where need be, without those whose weights
    cannot be read in the time of a token."""
    subject, place = pair.subject, pair.place
    memories = place.devices if subject.made.experts else [place]
    available = sum(memory.available_bytes for memory in memories)
    fastest = max(memory.bytes_per_s for memory in memories)
    engine = theory_memory.LlamaCpp(on_gpu=place.device.family != "cpu", flash_attn=True)
    for name, kv in reversed(pair.cells) if fewest_bits_first else pair.cells:
        # Before each tensor gets its type, which takes milliseconds: all of them in the smallest.
        least = floors.demand_of_bits(subject.made, _bits(name), 8 * element_bytes(kv))
        model = theory_memory.Model(
            subject.made, least.resident_bytes, least.embedding_bytes, least.kv_bytes_per_token
        )
        too_large = theory_memory.total_bytes(engine, model, context) > available
        if too_large or least.weight_bytes_per_token * tok_s > fastest:
            continue
        whole = candidates.candidate_of(subject, pair.cells[name, kv], place, context)
        if whole and whole.fits:
            yield whole
        elif whole:
            apart = candidates.in_two(subject, whole, place, context, sides.by_experts(subject.made))
            yield from (variant for variant in apart if variant.fits)


def by_size(answers: Iterable[Found], most: int | None) -> list[Found]:
    """The first by rank of each class of size, at most so many; None: all. Those with 4 bits come first, then
    the smallest class."""
    rows: list[Found] = []
    ordered = sorted(answers, key=lambda answer: answer.rank, reverse=True)
    for size in range(len(SIZES) + 1):
        rows += [answer for answer in ordered if answer.size == size][:most]
    return sorted(rows, key=lambda answer: not answer.has_bits)


def by_memory(answers: Iterable[Found]) -> list[Found]:
    """Machines that reach the speed with 4 bits, with fewer, and those that may reach it; each by the price
    of their memory: the smallest first, of equal ones the slowest."""

    def price(answer: Found) -> tuple[float, float]:
        return answer.pair.place.device.memory_bytes or 0, answer.pair.place.bytes_per_s

    return sorted(sorted(answers, key=price), key=lambda answer: answer.kind, reverse=True)


def reaching(offered: Sequence[Choice], tok_s: float) -> list[Choice]:
    """Those that fit and are predicted to reach the speed; without any, those whose interval does."""
    fitting = [choice for choice in offered if choice.candidate.fits]
    return [choice for choice in fitting if choice.deep.value >= tok_s] or [
        choice for choice in fitting if choice.deep.high >= tok_s
    ]
