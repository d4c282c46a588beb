"""Terminal output of `harness recommend`: the ranking, and the evidence for it."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

from harness.analysis.quality_figures import EQUAL_KLD
from harness.recommend import commands, evidence
from harness.recommend.answer import HERE_TOO, MEASURED, SHORT_PROMPT, THEORY, Choice, Ranked
from harness.recommend.commands import Source
from harness.recommend.evidence import DECODE, Evidence, how_far_off
from harness.recommend.places import Place
from harness.recommend.quality_loss import HERE, PERPLEXITY_NOISE
from harness.recommend.speed import read_s
from harness.recommend.terms import family_name
from harness.recommend.traits import DENSE, EXPERTS, Example, Range, Traits
from harness.report.text_table import NONE, Table, explained, say, wrapped
from harness.report.theory_text import short

NEEDED = ("GB", "PPL", "KLD")  # also in a narrow terminal
FAR = 2.0  # times as many bytes a step as any example: beyond this, speed is extrapolated


# Shorter names of variants, so that five rows with intervals fit a terminal.
_SHORTER = {
    r"-flash_attn=true": " flash",
    r"-type_k=(\w+)-type_v=\1": r" KV \1",
    r"-fuse_layers=true": " fused",
    r"-fuse_layers=false|-flash_attn=false|-dynamic": "",
    r"-gpu_layers=(\d+)": r" ngl \1",
    r"-n_cpu_moe=(\d+)": r" ncmoe \1",
}


def show(ranking: Sequence[Ranked], context: int, wide: bool) -> Sequence[str]:
    """Print the ranking, best first, each with its reason; returns the headings that were shown."""
    shown = _show([row.choice for row in ranking], context, wide, numbered=True)
    print()
    for number, row in enumerate(ranking, 1):
        why = f"{row.why}{_cache(row.choice)}{_split(row.choice)}"
        print(wrapped(f"{number}. {title(row.choice)}: {why}", "   "))
    return shown


def title(choice: Choice) -> str:
    return f"{choice.candidate.cell.variant.stack} {_variant(choice)}"


def _variant(choice: Choice) -> str:
    name = choice.candidate.cell.variant.name
    for long, short_form in _SHORTER.items():
        name = re.sub(long, short_form, name)
    return name


def _cache(choice: Choice) -> str:
    """A clause on a quantized KV cache whose loss is unknown; else empty."""
    if choice.candidate.keeps_cache or choice.quality:
        return ""
    return "; a KV cache of fewer than 16 bits loses something too, how much is unknown"


def _split(choice: Choice) -> str:
    """How its layers are divided, and what that costs at least."""
    candidate = choice.candidate
    if candidate.split is None:
        return ""
    sides = candidate.traits, candidate.split.traits
    least = read_s((side.read_bytes, side.bytes_per_s) for side in sides)
    reads = " and ".join(
        f"{side.read_bytes / 1e9:.1f} GB at {side.bytes_per_s / 1e9:,.0f} GB/s" for side in sides
    )
    where = f"{sides[0].layers} of {sides[0].layers + sides[1].layers} layers and the output "
    where += f"on the GPU (-ngl {candidate.split.gpu_layers})"
    if moved := candidate.split.n_cpu_moe:
        where = f"the experts of {moved} of {sides[0].layers} layers on the CPU"
    return f"; {where}: a step reads {reads}, {least * 1e3:.0f} ms at least"


def show_all(offered: Sequence[Choice], context: int, wide: bool) -> None:
    """Print every variant by its speed."""
    _show(sorted(offered, key=lambda choice: -choice.deep.value), context, wide)


_SAME_BELOW = ("stack", "quality from", "based on")


def _show(offered: Sequence[Choice], context: int, wide: bool, numbered: bool = False) -> Sequence[str]:
    """Print the table, and below it some columns that are the same in all rows; returns what was shown."""
    lines = [_line(choice, context) for choice in offered]
    same = {
        name: next(iter(values))
        for name in _SAME_BELOW
        if len(values := {line[name] for line in lines if line[name] != NONE}) == 1
    }
    headings = [name for name in lines[0] if name not in same]
    rows = [[line[name] for name in headings] for line in lines]
    if numbered:
        headings, rows = ["", *headings], [[str(n), *row] for n, row in enumerate(rows, 1)]
    shown = Table(headings, rows, needed=NEEDED).show(wide)
    if same:
        say(f"all rows: {'; '.join(f'{name} {value}' for name, value in same.items())}")
    return [*shown, *same]


def _line(choice: Choice, context: int) -> dict[str, str]:
    candidate = choice.candidate
    size = _size(candidate.memory_bytes, candidate.available_bytes)
    if split := candidate.split:
        size += f" + {_size(split.memory_bytes, split.available_bytes)}"
    loss, kld, source = _quality(choice)
    return {
        "stack": candidate.cell.variant.stack,
        "variant": _variant(choice),
        "tok/s": short(choice.start.value),
        f"at {context:,}": range_text(choice.deep),
        "TTFT": seconds_text(choice.first_short),
        "TTFT ctx": seconds_text(choice.first_deep),
        "ctx": thousands(candidate.longest),
        "GB": size,
        "bits": f"{candidate.bits:.1f}",
        "PPL": loss,
        "KLD": kld,
        "quality from": source,
        "based on": choice.basis,
    }


def _quality(choice: Choice) -> tuple[str, str, str]:
    """Perplexity above that of 16-bit weights, KL divergence from them, and where both are from."""
    quality = choice.quality
    if quality is None:
        return NONE, NONE, NONE
    kld = NONE if quality.kld is None else f"{quality.kld:.5f}"
    return f"{round(quality.loss, 3) + 0.0:+.1%}", kld, HERE if quality.source == HERE else "published"


def _size(memory_bytes: float, available_bytes: float) -> str:
    over = memory_bytes - available_bytes
    return f"{memory_bytes / 1e9:.1f}" + (f" ({over / 1e9:.1f} short)" if over > 0 else "")


def range_text(figure: Range) -> str:
    return f"{short(figure.value)} ({short(figure.low)} to {short(figure.high)})"


def thousands(tokens: int | None) -> str:
    """Tokens in whole units of 1,024."""
    return f"{tokens // 1024}k" if tokens else NONE


def seconds_text(figure: Range | None) -> str:
    if figure is None or not _is_useful(figure):
        return NONE
    seconds = figure.value / 1e3
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:,.0f}"


def _is_useful(figure: Range) -> bool:
    """Whether a 90% interval ends within ten times the value: one that does not says nothing of a wait."""
    return figure.high <= 10 * figure.value


def _widest_ttft(ranking: Sequence[Ranked]) -> str:
    """The widest 90% interval of a TTFT, over its value."""
    ttfts = [row.choice.first_short for row in ranking] + [row.choice.first_deep for row in ranking]
    useful = [ttft for ttft in ttfts if ttft and _is_useful(ttft)]
    if not useful:
        return ""
    low = min(ttft.low / ttft.value for ttft in useful)
    high = max(ttft.high / ttft.value for ttft in useful)
    return f" (90% intervals: {low:.2g} to {high:.2g} times that at the widest)"


def show_unmaintained(shown: Sequence[Choice]) -> None:
    """Print which stacks of these rows have a package that is no longer maintained."""
    for header in {
        choice.candidate.cell.header.stack: choice.candidate.cell.header for choice in shown
    }.values():
        if header.successor:
            print(
                wrapped(
                    f"{header.stack}: the package of the published study, unmaintained since 2025;"
                    f" {header.successor} runs the same files today"
                )
            )


def show_notes(
    ranking: Sequence[Ranked],
    shown: Sequence[str],
    examples: Sequence[Example],
    place: Place,
    so_far: str | None,
) -> None:
    """Print what the headings that were shown mean, the evidence for the predictions, and the error of those
    made here."""
    sources = dict.fromkeys(row.choice.quality.source for row in ranking if row.choice.quality)
    where = "this machine" if place.here else place.name
    meanings = {
        "tok/s": "tok/s: predicted, at the start, and at the end of the context with 90% intervals",
        "TTFT": f"TTFT: predicted, in s, of {SHORT_PROMPT:,} tokens and of the context"
        f"{_widest_ttft(ranking)}; none where too little is known of the compute rate",
        "ctx": "ctx: the longest context that fits",
        "GB": "GB: with the whole context",
        "bits": "bits: of a weight in the linear layers, scales included",
        "PPL": f"PPL: perplexity above that of 16-bit weights ({'; '.join(sources)}); up to"
        f" {PERPLEXITY_NOISE:.1%}, its standard error, counts as equal; -: not known",
        "KLD": f"KLD: mean KL divergence from 16-bit weights, nats per token; below {EQUAL_KLD} it does not"
        " order types by their scores at tasks (arXiv 2606.19558), so they count as equal to 16 bits, and"
        " speed decides",
        "based on": f"based on: measured, this variant on {where}; other variants, of the same kind of stack"
        " there; other machines, the same kind of stack on devices of the same family; theory, none of"
        " these",
    }
    lines = [explained(shown, meanings)]
    bases = {row.choice.basis for row in ranking}
    first = ranking[0].choice.candidate.traits if ranking else None
    kind, measured = (first.kind, _evidence(first)) if first else (DENSE, None)
    of_own = {example.traits.kind for example in examples if example.traits.device == place.name}
    if kind not in (DENSE, *(measured.kinds if measured else ()), *of_own):
        name = "a mixture of experts" if kind == EXPERTS else "a model with states"
        lines.append(
            f"only dense models were measured: what {name} costs besides its bytes is a guess, and the "
            "intervals are wider."
        )
    if any(row.choice.candidate.split for row in ranking):
        lines.append(
            "gpu_layers: as many layers as fit are on the GPU, the others on the CPU. n_cpu_moe: the experts "
            "of as few layers as need be are on the CPU, all else is on the GPU. Each side takes its time "
            "after the other. GB: on the GPU + in main memory. Of such a variant no TTFT is predicted."
        )
    if first and not bases & {MEASURED, HERE_TOO}:
        lines.append(_elsewhere(bases, measured, place))
    if first and (far := _extrapolated(first, measured, examples)):
        lines.append(far)
    elif first:
        lines.append(how_far_off(family_name(first)))
    lines += [so_far] if so_far else []
    print("\n" + "\n".join(map(wrapped, lines)))


def _evidence(traits: Traits) -> Evidence | None:
    return evidence.table().get((family_name(traits), DECODE))


def _elsewhere(bases: Set[str], measured: Evidence | None, place: Place) -> str:
    """Name the evidence where no decode was measured on the machine."""
    rests = "theory alone, the bytes that a step reads at this bandwidth"
    if bases != {THEORY} and measured:
        rests = f"others' measurements of {measured.of_whom}, carried over by bandwidth"
        rests += ", and rows of theory on that alone" * (THEORY in bases)
    where = "this machine" if place.here else place.name
    hint = "; --prove 3 measures the first three" * place.here
    return f"no decode was measured on {where} here: these figures rest on {rests}{hint}."


def _extrapolated(first: Traits, measured: Evidence | None, examples: Sequence[Example]) -> str | None:
    """A sentence where a variant reads far less or more in a step than all that was measured."""
    sizes = [example.traits.read_bytes for example in examples if example.traits.device == first.device]
    sizes += [measured.least_bytes, measured.most_bytes] if measured else []
    mine = first.read_bytes
    if not sizes or min(sizes) / FAR <= mine <= max(sizes) * FAR:
        return None
    less, size = ("less", min(sizes)) if mine < min(sizes) else ("more", max(sizes))
    return (
        f"a step reads {mine / 1e6:,.0f} MB, far {less} than any that was measured "
        f"({size / 1e6:,.0f} MB): these speeds are extrapolated, and their intervals do not count that."
    )


def show_commands(choice: Choice, source: Source, context: int, place: Place) -> None:
    """Print how to run the first of the ranking."""
    print(f"\nrun {title(choice)}:")
    threads = place.threads if place.here else None
    by_program = commands.commands_of_candidate(
        choice.candidate, source, context, place.device.family, threads
    )
    for program, command in by_program.items():
        first, *others = command.splitlines()
        print("\n".join([f"  {program + ':':14}{first}", *(" " * 16 + line for line in others)]))
