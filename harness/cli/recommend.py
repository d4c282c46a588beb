"""`harness recommend`: which stack and quantization to run."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
from collections.abc import Sequence
from typing import Any

from harness.cli import NOT_OK, OK, Mistake, say
from harness.cli.commands import GOALS
from harness.cli.options import unknown

LEAST_CONTEXT = 2
USUAL_CONTEXT = 8192
USUAL_TOK_S = 10.0
MOST, MOST_MACHINES = 5, 15
ALL = "all"
_OF_ONE = ("memory", "bandwidth", "reserve")  # options of one machine


def run(arguments: argparse.Namespace) -> int:
    """Print the answer; 1 if nothing fits. Raises Mistake."""
    # Before NumPy is loaded. The matrices of a fit are small: on a busy machine the threads of OpenBLAS wait
    # for each other ten times as long as they compute. Probes and workers set their own number.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from harness.cli import recommend_inputs
    from harness.recommend import answer as recommend_answer
    from harness.recommend import candidates, quality_loss
    from harness.theory import cpus

    _check(arguments)
    if arguments.memory_speed:
        channels = arguments.channels or cpus.USUAL_CHANNELS
        arguments.kind = arguments.kind or "cpu"
        arguments.bandwidth = cpus.bytes_per_s(arguments.memory_speed, channels) / 1e9
    if arguments.model is None:
        return _what_runs_here(arguments)
    given = recommend_inputs.model_from(arguments.model)
    model = given.subject.model
    if arguments.prove and given.source.row is None:
        raise Mistake(
            f"--prove measures weights, and those of {model.name} cannot be made here: give its GGUF"
        )
    if arguments.context is None:
        arguments.context = max(
            LEAST_CONTEXT, min(USUAL_CONTEXT, given.subject.made.context or USUAL_CONTEXT)
        )
    if arguments.machine == ALL:
        return _which_machine(arguments, given.subject)
    place = recommend_inputs.place_from(arguments)
    known = recommend_inputs.known_models(arguments, place.devices)
    offered = candidates.candidates(given.subject, place, arguments.context, arguments.stacks)
    if place.takes_host and not place.host and not any(candidate.fits for candidate in offered):
        place = recommend_inputs.with_usual_host(arguments, place)
        known = recommend_inputs.known_models(arguments, place.devices)
        offered = candidates.candidates(given.subject, place, arguments.context, arguments.stacks)
    offered = [each for each in offered if given.runs(each.cell) and _is_current(each, arguments, known)]
    if not offered:
        raise Mistake(f"no stack{' of those' if arguments.stacks else ''} runs {model.name} on {place.name}")
    scored = quality_loss.measured_quality(known.scores, model.name, given.fingerprint)
    of_quality = quality_loss.known_quality(quality_loss.published_quality(), model.name, scored)
    found = recommend_answer.choices(offered, known.examples, arguments.context, of_quality)
    ranking = _ranked(arguments, found)
    if arguments.prove and ranking:
        recommend_inputs.prove(arguments, given, [each.choice for each in ranking[: arguments.prove]])
        known = recommend_inputs.known_models(arguments, place.devices)
        found = recommend_answer.choices(offered, known.examples, arguments.context, of_quality)
        ranking = _ranked(arguments, found)
    if arguments.json:
        print(json.dumps(_as_json(arguments, found, ranking), indent=1, allow_nan=False))
    else:
        _print(arguments, given, place, known, found, ranking)
    if ranking:
        return OK
    fitting = [each for each in found if each.candidate.fits]
    fastest = max(fitting, key=lambda each: each.deep.value, default=None)
    say(_too_slow(arguments, fastest) if fastest else _fits_nowhere(found, arguments.context, place))
    return NOT_OK


def _is_current(candidate: Any, arguments: argparse.Namespace, known: Any) -> bool:
    """Whether its stack's package is maintained, or the stack is asked for, installed, or measured there."""
    from harness.recommend.answer import HERE_TOO, MEASURED, basis
    from harness.stacks import build

    header = candidate.cell.header
    if not header.successor or header.stack in arguments.stacks:
        return True
    installed = any(build.find(environment) for environment in header.environments.values())
    return installed or basis(candidate, known.examples) in (MEASURED, HERE_TOO)


def _ranked(arguments: argparse.Namespace, found: Sequence[Any]) -> Any:
    """The ranking of those that reach the speed asked for."""
    from harness.recommend import answer, questions

    fast = questions.reaching(found, arguments.tok_s) if arguments.tok_s else found
    return answer.ranked(fast, arguments.goal, arguments.most or MOST)


def _what_runs_here(arguments: argparse.Namespace) -> int:
    """Of all known models, by size, the best variant on one machine. Raises Mistake."""
    from harness.cli import recommend_inputs
    from harness.recommend import found_text, questions
    from harness.theory.machines import memory_words

    subjects = recommend_inputs.known_subjects(arguments.models)
    place = recommend_inputs.place_from(arguments)
    arguments.context = arguments.context or USUAL_CONTEXT
    trained = [each for each in subjects if each.made.context >= arguments.context]
    pairs = questions.pairs(trained, [place], arguments.context)
    found, nearest = _reaching(arguments, pairs)
    shown = questions.by_size(found, None if arguments.all else arguments.most or 1)
    heading = f"{place.device.name} with {memory_words(place.device.memory_bytes or 0)} runs "
    heading += found_text.counted(found, len(subjects), "models", arguments.tok_s, arguments.context)
    notes = [found_text.of_sizes()] if shown and not arguments.all else []
    notes += _reserved(arguments, place)
    if short := len(subjects) - len(trained):
        notes.append(f"Left out: {short} that were trained on fewer than {arguments.context:,} tokens.")
    return _show_found(arguments, heading, shown, notes, found, nearest, pairs)


def _which_machine(arguments: argparse.Namespace, subject: Any) -> int:
    """The known machines on which a model reaches a speed, each with its variant. Raises Mistake."""
    from harness.cli import recommend_inputs
    from harness.recommend import found_text, questions

    pairs = questions.pairs([subject], recommend_inputs.all_places(arguments), arguments.context)
    found, nearest = _reaching(arguments, pairs)
    found = questions.by_memory(found)
    best = [each for each in found if each.kind == found[0].kind]
    shown = found if arguments.all else best[: arguments.most or MOST_MACHINES]
    heading = f"{subject.model.name} runs on "
    heading += found_text.counted(found, len(pairs), "machines", arguments.tok_s, arguments.context)
    notes = ["The smallest memory comes first, then the lowest bandwidth."]
    if arguments.context > subject.made.context:
        notes.append(_beyond(subject.made))
    return _show_found(arguments, heading, shown, notes, found, nearest, pairs)


def _of_hosts(pairs: Sequence[Any]) -> list[str]:
    """A sentence where a mixture's experts may be on the CPU of a GPU's host, and that is not known."""
    if not any(each.subject.made.experts and each.place.takes_host and not each.place.host for each in pairs):
        return []
    return [
        "A GPU's host is not known, so mixtures are whole on the GPU: --host-memory SIZE offers "
        "experts on the CPU."
    ]


def _reaching(arguments: argparse.Namespace, pairs: Sequence[Any]) -> tuple[list[Any], Any]:
    """The best variant of each pair that reaches the speed; the nearest choice where nothing does."""
    from harness.cli import recommend_inputs
    from harness.recommend import answer, questions
    from harness.recommend.speed import Predictor

    context = arguments.context
    arguments.tok_s = arguments.tok_s or USUAL_TOK_S
    devices = {each.name: each for pair in pairs for each in pair.place.devices}
    known = recommend_inputs.known_models(arguments, [*devices.values()])
    predictor = Predictor(known.examples)

    def predict(questions: Sequence[Any]) -> Sequence[Any]:
        return answer.choices(questions, known.examples, context, lambda _: None, predictor)

    found = questions.best(pairs, context, arguments.tok_s, predict)
    return found, None if found else questions.nearest(pairs, context, predict)


def _show_found(
    arguments: argparse.Namespace,
    heading: str,
    shown: Sequence[Any],
    notes: Sequence[str],
    found: Sequence[Any],
    nearest: Any,
    pairs: Sequence[Any],
) -> int:
    """Print some of those found; 1 where nothing reaches the speed."""
    from harness.cli.recommend_inputs import THIS
    from harness.recommend import found_text

    context, tok_s = arguments.context, arguments.tok_s
    hosts = _of_hosts(pairs)
    if arguments.json:
        rows = [_row_of(each) for each in shown]
        print(json.dumps({"context": context, "tok_s": tok_s, "rows": rows}, indent=1, allow_nan=False))
    elif shown:
        names = arguments.model or "MODEL", "NAME" if arguments.machine == ALL else arguments.machine
        of_machine = f" --machine {shlex.quote(names[1])}" if names[1] != THIS else ""
        notes = [
            *found_text.that_may(found, tok_s),
            *notes,
            *hosts,
            *found_text.of_others(found, shown),
            f"One of them in full: harness recommend {names[0]}{of_machine} --context {context}",
        ]
        found_text.show_found(heading, shown, arguments.machine == ALL, notes, arguments.wide)
    if shown:
        return OK
    for each in hosts:
        say(each)
    nothing = (
        f"nothing fits with {context:,} tokens of context; give a smaller --context, or a larger --machine"
    )
    say(_too_slow(arguments, nearest) if nearest else nothing)
    return NOT_OK


def _too_slow(arguments: argparse.Namespace, nearest: Any) -> str:
    from harness.recommend import text
    from harness.report.theory_text import short

    traits, speed = nearest.candidate.traits, nearest.deep.value
    return (
        f"nothing reaches {arguments.tok_s:g} tok/s at {arguments.context:,} tokens of context: the nearest, "
        f"{traits.model} as {text.title(nearest)} on {traits.device}, is predicted at {short(speed)}, "
        f"{short(arguments.tok_s - speed)} too few"
    )


def _beyond(made: Any) -> str:
    return f"beyond the {made.context:,} tokens that it was trained on: quality is not known there"


def _check(arguments: argparse.Namespace) -> None:
    """Raises Mistake."""
    from harness.cli.recommend_inputs import THIS
    from harness.stacks.header import stacks

    for name in arguments.stacks:
        if name not in stacks():
            raise Mistake(unknown("stack", name, stacks()))
    if arguments.context is not None and arguments.context < LEAST_CONTEXT:
        raise Mistake(f"--context {arguments.context}: a prompt and a token need {LEAST_CONTEXT}")
    for other in ("machine", "bandwidth"):
        if arguments.prove and getattr(arguments, other) not in (THIS, None):
            raise Mistake(f"--prove measures on this machine; drop --{other}")
    if arguments.kind and not (arguments.bandwidth or arguments.memory_speed):
        raise Mistake("--kind is of a machine that is not known; give its --memory and --bandwidth")
    if arguments.memory_speed and (arguments.bandwidth or not arguments.memory):
        raise Mistake("--memory-speed is of a CPU: give its --memory, and no --bandwidth")
    if arguments.channels and not arguments.memory_speed:
        raise Mistake("--channels needs --memory-speed")
    if arguments.vendor and (not arguments.bandwidth or arguments.kind not in (None, "gpu")):
        raise Mistake("--vendor is of a GPU that is not known; give its --memory and --bandwidth")
    if arguments.reserve and arguments.memory and arguments.machine == THIS and not arguments.bandwidth:
        raise Mistake("--memory is all that may be used, and nothing of it is reserved; drop one of the two")
    of_all, of_one = arguments.machine == ALL, bool(arguments.model)
    if arguments.models and of_one:
        raise Mistake("--models narrows the known models; drop it, or the model")
    if arguments.model is None and (of_all or arguments.prove):
        raise Mistake(f"--{'machine all' if of_all else 'prove'} needs a model")
    for option in ("goal", "stacks", *_OF_ONE * of_all):
        if (of_all or not of_one) and getattr(arguments, option) not in (GOALS[0], [], None):
            name = "for" if option == "goal" else option.replace("_", "-")
            raise Mistake(f"--{name} is for one model on one machine")


def _print(
    arguments: argparse.Namespace,
    given: Any,
    place: Any,
    known: Any,
    found: Sequence[Any],
    ranking: Sequence[Any],
) -> None:
    from harness.recommend import outcomes, text
    from harness.report.text_table import wrapped
    from harness.theory.machines import memory_words

    made, memory = given.subject.made, memory_words(place.device.memory_bytes or 0)
    speed = f", {arguments.tok_s:g} tok/s or more" if arguments.tok_s else ""
    on = f"{given.subject.model.name} on {place.name} with {memory}"
    print(wrapped(f"{on}, {arguments.context:,} tokens of context{speed}"))
    for line in _reserved(arguments, place):
        print(wrapped(line))
    if arguments.context > made.context:
        print(wrapped(_beyond(made)))
    if ranking or arguments.all:
        print()
    if arguments.all:
        text.show_all(found, arguments.context, arguments.wide)
        text.show_unmaintained(found)
        print()
    if ranking:
        shown = text.show(ranking, arguments.context, arguments.wide)
        if not arguments.all:
            text.show_unmaintained([each.choice for each in ranking])
        if ranking[0].choice.deep.value < (arguments.tok_s or 0):
            print("\nless is predicted; only the upper ends of these intervals reach that speed")
        so_far = outcomes.outcomes_so_far(arguments.results)
        text.show_notes(ranking, shown, known.examples, place, so_far)
        text.show_commands(ranking[0].choice, given.source, arguments.context, place)


def _reserved(arguments: argparse.Namespace, place: Any) -> list[str]:
    from harness.theory.machines import reserved_words

    if not (place.device.reserve_bytes or arguments.reserve):
        return []
    return [reserved_words(place.device.reserve, "are ")]


def _fits_nowhere(found: Sequence[Any], context: int, place: Any) -> str:
    """How much is missing for the smallest variant, and the smallest known machine with enough."""
    from harness.recommend import text
    from harness.theory import machine_names
    from harness.theory.machines import MACHINES, memory_words

    whole = [each for each in found if each.candidate.split is None]
    least = min(whole, key=lambda each: each.candidate.memory_bytes)
    candidate = least.candidate
    short = candidate.memory_bytes - candidate.available_bytes
    hint = f"; {candidate.longest:,} tokens of context would fit" if candidate.longest else ""
    known = [each for name in MACHINES for each in machine_names.machines(name).values()]
    alike = [each for each in known if each.family == place.device.family]
    enough = [each for each in alike if each.memory_bytes - each.reserve.value >= candidate.memory_bytes]
    if enough:
        first = min(enough, key=lambda m: (m.name != place.name, m.memory_bytes, m.bandwidth_bytes_per_s))
        which = (
            "the same machine" if first.name == place.name else f"the smallest known machine: {first.name}"
        )
        hint += f"; {which} with {memory_words(first.memory_bytes)} holds it"
    digits = max(1, math.ceil(-math.log10(short / 1e9)))  # that tell the two sizes apart
    return (
        f"nothing fits: the smallest, {text.title(least)}, needs "
        f"{candidate.memory_bytes / 1e9:.{digits}f} GB with {context:,} tokens, "
        f"{short / 1e9:.{digits}f} GB more than the {candidate.available_bytes / 1e9:.{digits}f} GB "
        f"that are usable{hint}"
    )


def _as_json(
    arguments: argparse.Namespace, found: Sequence[Any], ranking: Sequence[Any]
) -> dict[str, object]:
    return {
        "context": arguments.context,
        "tok_s": arguments.tok_s,
        "ranking": [{"name": each.choice.title, "why": each.why} for each in ranking],
        "variants": [_row(each) for each in found],
    }


def _row_of(found: Any) -> dict[str, object]:
    """One model on one machine."""
    place = found.pair.place
    return {
        "model": found.pair.subject.model.name,
        "parameters": found.parameters,
        "machine": place.device.name,
        "machine_memory_bytes": place.device.memory_bytes,
        "bytes_per_s": place.bytes_per_s,
        "reaches": "predicted" if found.reaches else "upper end of the interval",
        **_row(found.choice),
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
