"""`harness recommend`: which stack and quantization to run: predicted, ranked, and proved on request."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from harness.cli.exits import NOT_OK, OK, Mistake, say
from harness.cli.names import unknown
from harness.cli.recommend import options

LEAST_CONTEXT = 2


def add(parser: argparse.ArgumentParser) -> None:
    options.add(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the answer; 1 if nothing fits. Raises Mistake."""
    from harness.cli.recommend import inputs, proof
    from harness.recommend import answer, candidates, outcomes, quality, text
    from harness.stacks.header import stacks

    for name in arguments.stacks:
        if name not in stacks():
            raise Mistake(unknown("stack", name, stacks()))
    if arguments.context < LEAST_CONTEXT:
        raise Mistake(f"--context {arguments.context}: a prompt and a token need {LEAST_CONTEXT}")
    if arguments.prove and arguments.machine != inputs.THIS:
        raise Mistake("--prove measures on this machine; drop --machine")
    given = inputs.model(arguments.model)
    model, shape = given.model, given.shape
    place = inputs.place(arguments)
    known = inputs.known(arguments.results, place)
    offered = candidates.candidates(model, shape, place, arguments.context, arguments.stacks)
    offered = [each for each in offered if given.runs(each.cell)]
    if not offered:
        raise Mistake(f"no stack{' of those' if arguments.stacks else ''} runs {model.name} on {place.name}")
    of_quality = quality.known(known.perplexities, model.name)
    found = answer.choices(offered, known.examples, arguments.context, of_quality)
    ranking = answer.ranked(found, arguments.goal, arguments.most)
    if arguments.prove and ranking:
        proof.prove(arguments, given, [each.choice for each in ranking[: arguments.prove]])
        known = inputs.known(arguments.results, place)
        found = answer.choices(offered, known.examples, arguments.context, of_quality)
        ranking = answer.ranked(found, arguments.goal, arguments.most)
    if arguments.json:
        print(json.dumps(_as_json(found, ranking, arguments.context), indent=1, allow_nan=False))
    else:
        memory = f"{(place.device.memory_bytes or 0) / 2**30:.1f} GiB"
        print(f"{model.name} on {place.name} with {memory}, {arguments.context:,} tokens of context")
        if arguments.context > shape.context:
            print(f"beyond the {shape.context:,} tokens that it was trained on: quality is not known there")
        if ranking or arguments.all:
            print()
        if arguments.all:
            text.show_all(found, arguments.context)
            print()
        if ranking:
            text.show(ranking, arguments.context)
            text.show_notes(ranking, known.examples, place, outcomes.so_far(arguments.results))
            text.show_commands(ranking[0].choice, given.source, arguments.context, place)
    if ranking:
        return OK
    say(_fits_nowhere(found, arguments.context))
    return NOT_OK


def _fits_nowhere(found: Sequence[Any], context: int) -> str:
    """How much is missing for the smallest variant."""
    least = min(found, key=lambda each: each.candidate.memory_bytes)
    candidate = least.candidate
    short = candidate.memory_bytes - candidate.available_bytes
    hint = f"; {candidate.longest:,} tokens of context would fit" if candidate.longest else ""
    return (
        f"nothing fits: the smallest, {least.title}, needs {candidate.memory_bytes / 1e9:.1f} GB with "
        f"{context:,} tokens, {short / 1e9:.1f} GB more than the {candidate.available_bytes / 1e9:.1f} GB "
        f"that are usable{hint}"
    )


def _as_json(found: Sequence[Any], ranking: Sequence[Any], context: int) -> dict[str, object]:
    return {
        "context": context,
        "ranking": [{"name": each.choice.title, "why": each.why} for each in ranking],
        "variants": [_row(each) for each in found],
    }


def _row(choice: Any) -> dict[str, object]:
    candidate = choice.candidate

    def ends(figure: Any) -> list[float] | None:
        return [figure.value, figure.low, figure.high] if figure else None

    return {
        "name": choice.title,
        "stack": candidate.cell.variant.stack,
        "variant": candidate.cell.variant.name,
        "options": candidate.cell.variant.options,
        "fits": candidate.fits,
        "memory_bytes": candidate.memory_bytes,
        "available_bytes": candidate.available_bytes,
        "weight_bytes": candidate.weight_bytes,
        "bits_per_weight": candidate.bits,
        "longest_context": candidate.longest,
        "tokens_per_s": ends(choice.start),
        "tokens_per_s_at_context": ends(choice.deep),
        "ttft_2048_ms": ends(choice.first_short),
        "ttft_context_ms": ends(choice.first_deep),
        "quality_loss": choice.quality.loss if choice.quality else None,
        "quality_source": choice.quality.source if choice.quality else None,
        "basis": choice.basis,
    }
