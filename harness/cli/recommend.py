"""`harness recommend`: which stack and quantization to run."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from harness import machine
from harness.api import prediction as predicting
from harness.api.inputs import check_stacks, stored
from harness.api.prediction import (
    LEAST_CONTEXT,
    USUAL_CONTEXT,
    OnMachine,
    Prediction,
    Variants,
    prediction,
)
from harness.api.theory import ALL, THIS
from harness.base import data
from harness.cli import NOT_OK, OK, Mistake, main, say
from harness.cli.commands import GOALS
from harness.dataset.study import load_study
from harness.recommend import answer, commands, found_text, outcomes, questions, text
from harness.recommend.answer import Choice, Ranked
from harness.recommend.candidates import Candidate, Subject
from harness.recommend.places import Place
from harness.recommend.questions import Found, Pair
from harness.recommend.speed import Predictor
from harness.report.text_table import wrapped
from harness.report.theory_text import short
from harness.theory import cpus, machine_names
from harness.theory.decoder import Decoder
from harness.theory.machines import MACHINES, memory_words, reserved_words

USUAL_TOK_S = 10.0
MOST, MOST_MACHINES = 5, 15
_OF_ONE = ("memory", "bandwidth", "reserve")  # options of one machine


def run(arguments: argparse.Namespace) -> int:
    """Print the answer; 1 if nothing fits. Raises Mistake."""
    _check(arguments)
    if arguments.memory_speed:
        channels = arguments.channels or cpus.USUAL_CHANNELS
        arguments.kind = arguments.kind or "cpu"
        arguments.bandwidth = cpus.bytes_per_s(arguments.memory_speed, channels) / 1e9
    if arguments.model is None:
        return _what_runs_here(arguments)
    given = predicting.model_from(arguments.model)
    model = given.subject.model
    if arguments.prove and given.source.row is None:
        raise Mistake(
            f"--prove measures weights, and those of {model.name} cannot be made here: give its GGUF"
        )
    if arguments.context is None:
        arguments.context = predicting.usual_context(given.subject.made)
    if arguments.machine == ALL:
        return _which_machine(arguments, given.subject)
    asked = _on_machine(arguments)
    variants = predicting.variants(given, asked, arguments.context, arguments.stacks, arguments.results)
    choices = variants.choices()
    ranking = _ranked(arguments, choices)
    if arguments.prove and ranking:
        _prove(arguments, variants, [each.choice for each in ranking[: arguments.prove]])
        variants = variants.measured_again(arguments.results)
        choices = variants.choices()
        ranking = _ranked(arguments, choices)
    if arguments.json:
        whole = {
            "context": arguments.context,
            "tok_s": arguments.tok_s,
            "ranking": [{"name": each.choice.title, "why": each.why} for each in ranking],
            "variants": [prediction(choice) for choice in choices],
        }
        print(json.dumps(whole, indent=1, allow_nan=False))
    else:
        _print(arguments, variants, choices, ranking)
    if ranking:
        return OK
    fitting = [choice for choice in choices if choice.candidate.fits]
    fastest = max(fitting, key=lambda choice: choice.deep.value, default=None)
    place = variants.place
    say(_too_slow(arguments, fastest) if fastest else _fits_nowhere(choices, arguments.context, place))
    return NOT_OK


def _on_machine(arguments: argparse.Namespace) -> OnMachine:
    return OnMachine(
        machine=arguments.machine,
        memory=arguments.memory,
        bandwidth=arguments.bandwidth,
        memory_speed=arguments.memory_speed,
        channels=arguments.channels,
        kind=arguments.kind,
        vendor=arguments.vendor,
        reserve=arguments.reserve,
        host_memory=arguments.host_memory,
        host_bandwidth=arguments.host_bandwidth,
    )


def _prove(arguments: argparse.Namespace, variants: Variants, choices: Sequence[Choice]) -> None:
    """Measure these variants with a short decode and windows up to the context, and append each prediction
    with its outcome. Raises Mistake."""
    given, results = variants.given, arguments.results
    assert given.source.row is not None  # checked before
    folder: Path = results / data.RECOMMENDED
    config = folder / f"{given.subject.model.name}.yaml"
    device = "cpu" if choices[0].candidate.traits.family == "cpu" else "cuda"
    cells = [choice.candidate.cell for choice in choices]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(commands.config_text(cells, given.source.row, device, arguments.context))
    except OSError as refusal:
        raise Mistake(f"{config}: cannot be written: {refusal.strerror}") from refusal
    if main(["run", str(config), "-o", str(results)]) not in (OK, NOT_OK):
        raise Mistake(f"{config} could not be measured")
    here = machine.facts()["slug"]
    rows = load_study([*stored(results)]).cells
    windows = [row for row in rows if row["depths"] and row["machine"] == here]
    for choice in choices:
        outcome = outcomes.outcome_of_choice(choice, windows, arguments.context)
        say(outcomes.outcome_sentence(choice, outcome))
        if outcome and choice.basis != answer.MEASURED:  # that was no prediction
            outcomes.keep_outcome(results, outcome)


def _ranked(arguments: argparse.Namespace, choices: Sequence[Choice]) -> list[Ranked]:
    """The ranking of those that reach the speed asked for."""
    fast = questions.reaching(choices, arguments.tok_s) if arguments.tok_s else choices
    return answer.ranked(fast, arguments.goal, arguments.most or MOST)


def _what_runs_here(arguments: argparse.Namespace) -> int:
    """Of all known models, by size, the best variant on one machine. Raises Mistake."""
    subjects = predicting.known_subjects(arguments.models)
    place = predicting.place_from(_on_machine(arguments))
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


def _which_machine(arguments: argparse.Namespace, subject: Subject) -> int:
    """The known machines on which a model reaches a speed, each with its variant. Raises Mistake."""
    places = predicting.all_places(_on_machine(arguments))
    pairs = questions.pairs([subject], places, arguments.context)
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


def _of_hosts(pairs: Sequence[Pair]) -> list[str]:
    """A sentence where a mixture's experts may be on the CPU of a GPU's host, and that is not known."""
    if not any(each.subject.made.experts and each.place.takes_host and not each.place.host for each in pairs):
        return []
    return [
        "A GPU's host is not known, so mixtures are whole on the GPU: --host-memory SIZE offers "
        "experts on the CPU."
    ]


def _reaching(arguments: argparse.Namespace, pairs: Sequence[Pair]) -> tuple[list[Found], Choice | None]:
    """The best variant of each pair that reaches the speed; the nearest choice where nothing does."""
    context = arguments.context
    arguments.tok_s = arguments.tok_s or USUAL_TOK_S
    devices = {each.name: each for pair in pairs for each in pair.place.devices}
    known = predicting.measured_here(arguments.results, [*devices.values()])
    predictor = Predictor(known.examples)

    def predict(candidates: Sequence[Candidate]) -> Sequence[Choice]:
        return answer.choices(candidates, known.examples, context, lambda _: None, predictor)

    found = questions.best(pairs, context, arguments.tok_s, predict)
    return found, None if found else questions.nearest(pairs, context, predict)


def _show_found(
    arguments: argparse.Namespace,
    heading: str,
    shown: Sequence[Found],
    notes: Sequence[str],
    found: Sequence[Found],
    nearest: Choice | None,
    pairs: Sequence[Pair],
) -> int:
    """Print some of those found; 1 where nothing reaches the speed."""
    context, tok_s = arguments.context, arguments.tok_s
    hosts = _of_hosts(pairs)
    if arguments.json:
        rows = [_row_of(each) for each in shown]
        print(json.dumps({"context": context, "tok_s": tok_s, "rows": rows}, indent=1, allow_nan=False))
    elif shown:
        model, on = arguments.model or "MODEL", "NAME" if arguments.machine == ALL else arguments.machine
        of_machine = f" --machine {shlex.quote(on)}" if on != THIS else ""
        notes = [
            *found_text.that_may(found, tok_s),
            *notes,
            *hosts,
            *found_text.of_others(found, shown),
            f"One of them in full: harness recommend {model}{of_machine} --context {context}",
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


def _too_slow(arguments: argparse.Namespace, nearest: Choice) -> str:
    traits, speed = nearest.candidate.traits, nearest.deep.value
    return (
        f"nothing reaches {arguments.tok_s:g} tok/s at {arguments.context:,} tokens of context: the nearest, "
        f"{traits.model} as {text.title(nearest)} on {traits.device}, is predicted at {short(speed)}, "
        f"{short(arguments.tok_s - speed)} too few"
    )


def _beyond(made: Decoder) -> str:
    return f"beyond the {made.context:,} tokens that it was trained on: quality is not known there"


def _check(arguments: argparse.Namespace) -> None:
    """Raises Mistake."""
    check_stacks(arguments.stacks)
    if arguments.context is not None and arguments.context < LEAST_CONTEXT:
        raise Mistake(f"--context {arguments.context}: a prompt and a token need {LEAST_CONTEXT}")
    for other in ("machine", "bandwidth", "memory_speed"):
        if arguments.prove and getattr(arguments, other) not in (THIS, None):
            raise Mistake(f"--prove measures on this machine; drop --{other.replace('_', '-')}")
    if arguments.kind and not (arguments.bandwidth or arguments.memory_speed):
        raise Mistake("--kind is of a machine that is not known; give its --memory and --bandwidth")
    if arguments.memory_speed and (arguments.bandwidth or not arguments.memory):
        raise Mistake("--memory-speed is of a CPU: give its --memory, and no --bandwidth")
    if arguments.channels and not arguments.memory_speed:
        raise Mistake("--channels needs --memory-speed")
    if arguments.vendor and (not arguments.bandwidth or arguments.kind not in (None, "gpu")):
        raise Mistake("--vendor is of a GPU that is not known; give its --memory and --bandwidth")
    is_this = arguments.machine == THIS and not (arguments.bandwidth or arguments.memory_speed)
    if arguments.reserve and arguments.memory and is_this:
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
    arguments: argparse.Namespace, variants: Variants, choices: Sequence[Choice], ranking: Sequence[Ranked]
) -> None:
    given, place = variants.given, variants.place
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
        text.show_all(choices, arguments.context, arguments.wide)
        text.show_unmaintained(choices)
        print()
    if ranking:
        shown = text.show(ranking, arguments.context, arguments.wide)
        if not arguments.all:
            text.show_unmaintained([each.choice for each in ranking])
        if ranking[0].choice.deep.value < (arguments.tok_s or 0):
            print("\nless is predicted; only the upper ends of these intervals reach that speed")
        so_far = outcomes.outcomes_so_far(arguments.results)
        text.show_notes(ranking, shown, variants.known.examples, place, so_far)
        text.show_commands(ranking[0].choice, given.source, arguments.context, place)


def _reserved(arguments: argparse.Namespace, place: Place) -> list[str]:
    if not (place.device.reserve_bytes or arguments.reserve):
        return []
    return [reserved_words(place.device.reserve, "are ")]


def _fits_nowhere(choices: Sequence[Choice], context: int, place: Place) -> str:
    """How much is missing for the smallest variant, and the smallest known machine with enough."""
    whole = [choice for choice in choices if choice.candidate.split is None]
    least = min(whole, key=lambda choice: choice.candidate.memory_bytes)
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


class OneModel(Prediction):
    """The best variant of one model on one machine."""

    model: str
    parameters: int
    machine: str
    machine_memory_bytes: float | None
    bytes_per_s: float
    reaches: str


def _row_of(found: Found) -> OneModel:
    """One model on one machine."""
    place = found.pair.place
    return {
        "model": found.pair.subject.model.name,
        "parameters": found.parameters,
        "machine": place.device.name,
        "machine_memory_bytes": place.device.memory_bytes,
        "bytes_per_s": place.bytes_per_s,
        "reaches": "predicted" if found.reaches else "upper end of the interval",
        **prediction(found.choice),
    }
