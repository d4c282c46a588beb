"""Print, of each model on each machine, the best variant that reaches a speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

from harness.recommend.answer import LEAST_BITS, SHORT_PROMPT
from harness.recommend.evidence import how_far_off
from harness.recommend.questions import PULLS_SOURCE, SMALL_KV, Found
from harness.recommend.terms import family_name
from harness.recommend.text import NEEDED, range_text, seconds_text, thousands
from harness.report.text_table import NONE, Table, explained, wrapped
from harness.report.theory_text import short
from harness.theory import names


def show_found(
    heading: str, answers: Sequence[Found], of_machines: bool, notes: Sequence[str], wide: bool
) -> None:
    """Print a row for each model of one machine, or for each machine of one model."""
    split = next((answer.choice.candidate.split for answer in answers if answer.choice.candidate.split), None)
    lines = [_line_of(answer, of_machines, split is not None) for answer in answers]
    print(wrapped(heading) + "\n")
    shown = Table([*lines[0]], [[*line.values()] for line in lines], needed=NEEDED).show(wide)
    of_types = {answer.choice.candidate.type: answer.choice.candidate.bits for answer in answers}
    bits = ", ".join(f"{name} {value:.1f}" for name, value in sorted(of_types.items(), key=itemgetter(1)))
    meanings = {
        "tok/s": "tok/s: at the end of that context, predicted for llama.cpp with flash attention, with 90% "
        "intervals",
        "TTFT": f"TTFT: predicted, in s, of {SHORT_PROMPT:,} tokens",
        "ctx": "ctx: the longest context that fits",
        "GB": "GB: of the file to download",
        "mem": "mem: GB of memory",
        "type": f"type: bits of a weight in the linear layers, scales included, are {bits}; from "
        f"{LEAST_BITS} on most models lose little",
    }
    marks = []
    if any(not answer.choice.candidate.keeps_cache for answer in answers):
        marks.append(f"*: with a {SMALL_KV} KV cache, which loses something too; the others' has 16 bits.")
    if split:
        marks.append(
            "n_cpu_moe: the experts of so many layers are on the CPU, with "
            f"{split.available_bytes / 1e9:.0f} GB at {split.traits.bytes_per_s / 1e9:,.0f} GB/s; all else "
            "is on the GPU. Of such a variant no TTFT is predicted."
        )
    families = dict.fromkeys(family_name(answer.choice.candidate.traits) for answer in answers)
    errors = [how_far_off(family) for family in families]
    print("\n" + "\n".join(map(wrapped, (*marks, *notes, explained(shown, meanings), *errors))))


def of_sizes() -> str:
    """Which model stands for its size: no quality that models share is known."""
    return (
        f"A row is the model of its size class that people run most ({LEAST_BITS} bits first), not the best:"
        f" {PULLS_SOURCE}."
    )


def counted(answers: Sequence[Found], count: int, kind: str, tok_s: float, context: int) -> str:
    """How many reach the speed, and how many may."""
    perhaps = sum(not answer.reaches for answer in answers)
    more = f", and {perhaps} more may (~)" if perhaps else ""
    reach = f"{len(answers) - perhaps} of {count} known {kind} at {tok_s:g} tok/s or more"
    return f"{reach} with {context:,} tokens of context{more}"


def that_may(answers: Sequence[Found], tok_s: float) -> list[str]:
    """What the mark of those that may reach the speed says."""
    if all(answer.reaches for answer in answers):
        return []
    return [f"~: fewer than {tok_s:g} tok/s are predicted; only the upper end of the interval reaches them."]


def of_others(answers: Sequence[Found], shown: Sequence[Found]) -> list[str]:
    """How many are not shown, and what they reach."""
    left = Counter(answer.kind for answer in answers) - Counter(answer.kind for answer in shown)
    kinds = {
        "that reach it": left[True, True],
        f"that reach it with fewer than {LEAST_BITS} bits": left[True, False],
        "that may": left[False, True] + left[False, False],
    }
    counts = [f"{count} {words}" for words, count in kinds.items() if count]
    return [f"Not shown (--all): {names.listed(counts)}."] if counts else []


def _line_of(answer: Found, of_machines: bool, is_split: bool) -> dict[str, str]:
    candidate, place, split = answer.choice.candidate, answer.pair.place, answer.choice.candidate.split
    of_machine = {
        "machine": place.device.name,
        "mem": f"{(place.device.memory_bytes or 0) / 1e9:.0f}",
        "GB/s": f"{place.bytes_per_s / 1e9:.0f}",
    }
    of_model = {"model": candidate.traits.model, "B": short(answer.parameters / 1e9)}
    first = answer.choice.first_short
    return (of_machine if of_machines else of_model) | {
        "type": candidate.type.removesuffix("_moe") + "*" * (not candidate.keeps_cache),
        **({"n_cpu_moe": str(split.n_cpu_moe) if split else NONE} if is_split else {}),
        "tok/s": "~" * (not answer.reaches) + range_text(answer.choice.deep),
        "TTFT": seconds_text(first),
        "ctx": thousands(candidate.longest),
        **({} if of_machines else {"GB": f"{candidate.weight_bytes / 1e9:.1f}"}),
    }
