"""`harness recommend`: which stack and quantization to run."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.cli import NOT_OK, OK, Mistake, say
from harness.cli.options import add_reserve, gb_per_s, memory_gib, tokens, unknown

# Options of `harness recommend`; only parsing, so that --help is fast.


GOALS = ("balance", "speed", "quality", "context")  # as in harness/recommend/answer.py


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `harness recommend` to its parser."""
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a name (harness theory --list-models), a hub repository, a .gguf, a folder, or a config.json",
    )
    add(
        "--context",
        type=tokens,
        metavar="N",
        help="tokens of context, e.g. 16k (default: 8k, or what the model was trained on if that is less)",
    )
    add(
        "--machine",
        default="this",
        metavar="NAME",
        help="a known machine (harness theory --list-machines), or this one (default)",
    )
    add(
        "--memory",
        type=memory_gib,
        metavar="SIZE",
        help="memory to use at most, as sold: 16GB is 16 GiB; of a named machine, its size",
    )
    add(
        "--bandwidth",
        type=gb_per_s,
        metavar="GB/S",
        help="read bandwidth of a machine that is not known; needs --memory",
    )
    add_reserve(parser)
    add("--kind", choices=("gpu", "cpu"), help="of that machine (default: a GPU from 150 GB/s on)")
    add(
        "--host-memory",
        type=memory_gib,
        metavar="SIZE",
        help="main memory of the GPU's host, for layers or experts on the CPU where the model does not fit",
    )
    add("--host-bandwidth", type=gb_per_s, metavar="GB/S", help="its read bandwidth")
    add("--for", dest="goal", choices=GOALS, default="balance", help="what comes first (default: balance)")
    add("--stacks", nargs="+", default=[], metavar="STACK", help="only these stacks")
    add("--most", type=_count, default=5, metavar="N", help="rows to print (default: 5)")
    add("--all", action="store_true", help="print every variant, also those that do not fit")
    add("--prove", type=_count, metavar="N", help="measure the first N on this machine, and rank again")
    add(
        "--calibrate",
        action="store_true",
        help="first measure this machine with two small models in three types, and the rate of every type",
    )
    add("--results", type=Path, default=Path("results"), metavar="DIR", help="own records (default: results)")
    add("--json", action="store_true", help="print one JSON object: the ranking, and every prediction")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return 0


def _count(text: str) -> int:
    if not 1 <= _whole(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to 1,000")
    return _whole(text)


# `harness recommend`: which stack and quantization to run: predicted, ranked, and proved on request.


LEAST_CONTEXT = 2
USUAL_CONTEXT = 8192


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the answer; 1 if nothing fits. Raises Mistake."""
    # Before NumPy is loaded. The matrices of a fit are small: on a busy machine the threads of OpenBLAS wait
    # for each other ten times as long as they compute. Probes and workers set their own number.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from harness.cli import recommend_inputs
    from harness.recommend import answer as recommend_answer
    from harness.recommend import candidates

    _check(arguments)
    if arguments.model is None:
        recommend_inputs.calibrate(arguments)
        return OK
    given = recommend_inputs.model_from(arguments.model)
    model = given.subject.model
    if arguments.prove and given.source.row is None:
        raise Mistake(
            f"--prove measures weights, and those of {model.name} cannot be made here: give its GGUF"
        )
    if arguments.calibrate:
        recommend_inputs.calibrate(arguments)
    if arguments.context is None:
        arguments.context = max(
            LEAST_CONTEXT, min(USUAL_CONTEXT, given.subject.made.context or USUAL_CONTEXT)
        )
    place = recommend_inputs.place_from(arguments)
    known = recommend_inputs.known_models(arguments.results, place)
    offered = candidates.candidates(given.subject, place, arguments.context, arguments.stacks)
    offered = [each for each in offered if given.runs(each.cell)]
    if not offered:
        raise Mistake(f"no stack{' of those' if arguments.stacks else ''} runs {model.name} on {place.name}")
    scored = recommend_answer.measured_quality(known.scores, model.name, given.fingerprint)
    of_quality = recommend_answer.known_quality(known.perplexities, model.name, scored)
    found = recommend_answer.choices(known.given(offered), known.examples, arguments.context, of_quality)
    ranking = recommend_answer.ranked(found, arguments.goal, arguments.most)
    if arguments.prove and ranking:
        recommend_inputs.prove(arguments, given, [each.choice for each in ranking[: arguments.prove]])
        known = recommend_inputs.known_models(arguments.results, place)
        found = recommend_answer.choices(known.given(offered), known.examples, arguments.context, of_quality)
        ranking = recommend_answer.ranked(found, arguments.goal, arguments.most)
    if arguments.json:
        print(json.dumps(_as_json(found, ranking, arguments.context), indent=1, allow_nan=False))
    else:
        _print(arguments, given, place, known, found, ranking)
    if ranking:
        return OK
    say(_fits_nowhere(found, arguments.context, place))
    return NOT_OK


def _check(arguments: argparse.Namespace) -> None:
    """Raises Mistake."""
    from harness.cli.recommend_inputs import THIS
    from harness.stacks.header import stacks

    for name in arguments.stacks:
        if name not in stacks():
            raise Mistake(unknown("stack", name, stacks()))
    if arguments.context is not None and arguments.context < LEAST_CONTEXT:
        raise Mistake(f"--context {arguments.context}: a prompt and a token need {LEAST_CONTEXT}")
    for option in ("prove", "calibrate"):
        for other in ("machine", "bandwidth"):
            if getattr(arguments, option) and getattr(arguments, other) not in (THIS, None):
                raise Mistake(f"--{option} measures on this machine; drop --{other}")
    if arguments.kind and not arguments.bandwidth:
        raise Mistake("--kind is of a machine that is not known; give its --memory and --bandwidth")
    if arguments.model is None and not arguments.calibrate:
        raise Mistake("name a model, or give --calibrate to measure this machine")


def _print(
    arguments: argparse.Namespace,
    given: Any,
    place: Any,
    known: Any,
    found: Sequence[Any],
    ranking: Sequence[Any],
) -> None:
    from harness.recommend import answer as recommend_answer
    from harness.recommend import text
    from harness.theory.machines import reserved_words

    made, memory = given.subject.made, f"{(place.device.memory_bytes or 0) / 2**30:.1f} GiB"
    print(
        f"{given.subject.model.name} on {place.name} with {memory}, {arguments.context:,} tokens of context"
    )
    if place.device.reserve_bytes or arguments.reserve:
        print(f"of its memory {reserved_words(place.device.reserve, 'are ')}")
    if arguments.context > made.context:
        print(f"beyond the {made.context:,} tokens that it was trained on: quality is not known there")
    if ranking or arguments.all:
        print()
    if arguments.all:
        text.show_all(found, arguments.context)
        print()
    if ranking:
        text.show(ranking, arguments.context)
        text.show_notes(ranking, known.examples, place, recommend_answer.outcomes_so_far(arguments.results))
        text.show_commands(ranking[0].choice, given.source, arguments.context, place)


def _fits_nowhere(found: Sequence[Any], context: int, place: Any) -> str:
    """How much is missing for the smallest variant, and the smallest known machine with enough."""
    from harness.theory.machines import MACHINES, reserved_words

    whole = [each for each in found if each.candidate.split is None]
    least = min(whole, key=lambda each: each.candidate.memory_bytes)
    candidate = least.candidate
    short = candidate.memory_bytes - candidate.available_bytes
    hint = f"; {candidate.longest:,} tokens of context would fit" if candidate.longest else ""
    alike = [each for each in MACHINES.values() if each.family == place.device.family]
    enough = [each for each in alike if each.memory_bytes - each.reserve.value >= candidate.memory_bytes]
    if enough:
        first = min(enough, key=lambda each: (each.memory_bytes, each.bandwidth_bytes_per_s))
        hint += (
            f"; the smallest known machine that holds it: {first.name}, {first.memory_bytes / 2**30:.0f} GiB"
        )
    if place.device.family != "cpu" and place.host is None:
        hint += "; --host-memory and --host-bandwidth would put layers on the CPU"
    reserved = f" ({reserved_words(place.device.reserve, 'are ')})" if place.device.reserve_bytes else ""
    return (
        f"nothing fits: the smallest, {least.title}, needs {candidate.memory_bytes / 1e9:.1f} GB with "
        f"{context:,} tokens, {short / 1e9:.1f} GB more than the {candidate.available_bytes / 1e9:.1f} GB "
        f"that are usable{reserved}{hint}"
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
        "gpu_layers": candidate.split.gpu_layers if candidate.split else None,
        "n_cpu_moe": candidate.split.n_cpu_moe or None if candidate.split else None,
        "host_memory_bytes": candidate.split.memory_bytes if candidate.split else None,
        "available_bytes": candidate.available_bytes,
        "weight_bytes": candidate.weight_bytes,
        "bits_per_weight": candidate.bits,
        "longest_context": candidate.longest,
        "tokens_per_s": ends(choice.start),
        "tokens_per_s_at_context": ends(choice.deep),
        "ttft_2048_ms": ends(choice.first_short),
        "ttft_context_ms": ends(choice.first_deep),
        "quality_loss": choice.quality.loss if choice.quality else None,
        "kld_mean": choice.quality.kld if choice.quality else None,
        "kld_mean_ci95": choice.quality.kld_ci95 if choice.quality else None,
        "quality_source": choice.quality.source if choice.quality else None,
        "basis": choice.basis,
    }
