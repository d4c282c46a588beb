"""The models, machines and quantizations that `harness theory` understands by name or file."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.base.files import is_local
from harness.base.text import csv_of, list_named, printable, shortened
from harness.cli import OK, Mistake, say
from harness.cli.options import reserved, unknown
from harness.models import served
from harness.theory import base_shapes, cpus, machine_names, names, packed_sizes, tensors
from harness.theory.decoder import Decoder, parameters
from harness.theory.ggml_quants import ALL_QUANTS, QUANTS
from harness.theory.known_models import Known
from harness.theory.machines import DRIVER_RESERVE_BYTES, Figure, Machine, changed_reserve
from harness.theory.memory_choices import USUAL_KV, Choice, choices
from harness.theory.memory_fit import Form
from harness.theory.names import NotUnderstood
from harness.theory.packed_sizes import Packing
from harness.theory.quantization import Quantization
from harness.theory.tensors import Tensor

if TYPE_CHECKING:
    from harness.models.locate import Ready


# Resolve names on the command line of `harness theory`: models or files, machines, quantizations.


THIS, ALL = "this", "all"


def sort_of(
    arguments: argparse.Namespace, shapes: Mapping[str, Decoder], known: Mapping[str, Machine]
) -> None:
    """Join machine names that the shell has split; split quantizations at commas; move models given after
    --machine or --quant."""

    def is_machine(name: str) -> bool:
        return name.lower() == THIS or _stands(lambda: machine_names.machines(name, known))

    def is_model(name: str) -> bool:
        return _stands(lambda: base_shapes.understood(name, shapes)) or Path(name).exists()

    def is_quant(name: str) -> bool:
        return name.lower() in (*ALL_QUANTS, ALL)

    arguments.quant = [name for given in arguments.quant for name in given.split(",") if name]
    arguments.machine = machine_names.joined(arguments.machine, is_machine)
    for option, belongs in (("machine", is_machine), ("quant", is_quant)):
        given = getattr(arguments, option)
        models = [name for name in given if not belongs(name) and is_model(name)]
        setattr(arguments, option, [name for name in given if name not in models])
        arguments.models += models


def _stands(resolve: Callable[[], object]) -> bool:
    """Whether a name is known, or ambiguous."""
    try:
        resolve()
    except NotUnderstood as why:
        return why.ambiguous
    return True


def machines_of(
    given: Iterable[str],
    known: Mapping[str, Machine],
    memory: float | None = None,
    memory_speed: float | None = None,
    channels: int | None = None,
) -> dict[str, Machine]:
    """The machines by name; a name of several is the slowest, and says so. `this` is measured.
    `memory_speed`: transfers per second of a CPU's memory."""
    found: dict[str, Machine] = {}
    for name in given:
        if name.lower() == THIS and THIS not in known:
            from harness.cli.doctor import this_cpu

            known = {**known, THIS: this_cpu()}
        try:
            several = machine_names.machines(name, known, memory)
        except NotUnderstood as why:
            raise Mistake(why.sentence("machine", shortened(name))) from why
        if memory_speed:
            several = {
                key: with_memory_speed(machine, shortened(name), memory_speed, channels)
                for key, machine in several.items()
            }
        key, notes = machine_names.slowest(shortened(name), several)
        for sentence in notes:
            say(sentence)
        found[key] = several[key]
    return found


def with_memory_speed(machine: Machine, name: str, transfers_per_s: float, channels: int | None) -> Machine:
    """A CPU with memory of another speed. Raises Mistake for a machine with one kind of memory."""
    if machine.family != "cpu" or machine.board:
        raise Mistake(f"{name} is known, and has one kind of memory; drop --memory-speed")
    return cpus.with_speed(machine, transfers_per_s, channels)


def model_of(given: str, shapes: Mapping[str, Decoder]) -> names.Named | None:
    """A known model, with a message for one that stands for another; None for a file. Raises Mistake."""
    if served.is_address(given):
        raise Mistake(f"{printable(given)}: a server does not tell its weights: name its model")
    path = Path(given)
    is_file = path.exists() or path.suffix in (".gguf", ".json", ".safetensors")
    if given and is_file and given.lower() not in shapes:
        return None
    try:
        found = base_shapes.understood(given, shapes, "give its config.json or --from")
    except NotUnderstood as why:
        if base_shapes.is_path(given) or is_local(given):
            return None  # it is missing, which the reader of the file reports
        raise Mistake(why.sentence("model (and no file)", shortened(given))) from why
    if found.note:
        say(printable(found.note))
    return found


def quants_of(given: Iterable[str]) -> list[str]:
    """The types in lower case, with `all` expanded."""
    found = [quant.lower() for quant in given]
    if strange := next((quant for quant in found if quant not in (*ALL_QUANTS, ALL)), None):
        raise Mistake(unknown("quantization", strange, ALL_QUANTS))
    return [*QUANTS] if ALL in found else found


# `harness theory MODEL --memory SIZE`: which weights and KV types fit, without a machine's name.


_NOT_HERE = ("bpw", "tensors", "chunk", "rate", "acceptance")


def show_choices(arguments: argparse.Namespace, shapes: Known) -> int:
    """Print a row for each type of weights and of the KV cache. Raises Mistake."""
    for option in _NOT_HERE:
        if getattr(arguments, option):
            raise Mistake(f"--{option} needs a --machine, also with --memory")
    if not arguments.models:
        raise Mistake("name a model: harness theory qwen3-30b-a3b --memory 16GB --context 32k")
    found: list[Choice] = []
    memory = arguments.memory * 2.0**30
    reserve = changed_reserve(Figure(DRIVER_RESERVE_BYTES, "the driver"), reserved(arguments.reserve))
    kvs = [arguments.kv] if arguments.kv else USUAL_KV
    bytes_per_s = arguments.bandwidth and arguments.bandwidth * 1e9
    for text in dict.fromkeys(arguments.models):
        model = find(text, shapes)
        if model.made is None:
            lacks, mend = "unknown architecture", "drop"
            if not model.has_config:
                lacks, mend = "has no config.json", "add the model's, or drop"
            raise Mistake(f"{text}: {lacks}, so only its stored bytes are known; {mend} --memory")
        stored = model.stored if model.stored and model.stored.is_fixed else None
        limits = quants_of(arguments.quant), memory, arguments.context, bytes_per_s
        found += choices(model.name, model.made, *limits, stored, model.trained_stated, kvs, reserve.value)
    if not found:
        raise Mistake(f"--kv {arguments.kv}: these weights are for PyTorch, and llama.cpp has this type")
    if arguments.json:
        print(json.dumps(found, indent=1))
    elif arguments.csv:
        print(csv_of(found), end="")
    else:
        from harness.report import theory_text

        theory_text.show_choices(found, arguments.context, bool(bytes_per_s), memory, reserve, arguments.wide)
    return OK


# A model of `harness theory` by its name or the headers of its files: its layers, its weights as stored.


class Found(NamedTuple):
    """A model. `made`: None if its files do not define its layers. `stored`: the form in its files, where
    known. `trained_stated`: as in a row. `has_config`: its files describe its layers, in whatever form."""

    name: str
    made: Decoder | None
    tied: bool
    stored: Form | None
    trained_stated: bool
    is_file: bool = False
    has_config: bool = True


def find(text: str, shapes: Mapping[str, Decoder]) -> Found:
    """A model by its name or its files. Raises Mistake."""
    from harness.models.locate import WeightsError, read

    if named := model_of(text, shapes):
        return Found(named.name, named.made, named.made.tied, None, True)
    try:
        checkpoint = read(Path(text))
    except WeightsError as wrong:
        raise Mistake(printable(str(wrong))) from wrong
    path, made = Path(text).absolute(), checkpoint.decoder
    stem = path.stem if path.is_file() else path.name
    return Found(
        printable(path.parent.name if path.name == "config.json" else stem),
        made,
        checkpoint.tied,
        _form(text, checkpoint),
        checkpoint.states_context,
        is_file=True,
        has_config=checkpoint.config is not None or checkpoint.format == "gguf",
    )


_OF_DECODER = re.compile(r"^dec\.|(?:^|\.)decoder\.")


def _form(given: str, checkpoint: Ready) -> Form | None:
    """The form of the weights in a model's files, with messages on quantized ones: who loads them, and the
    bits of their matrices; None where the bytes are not known."""
    from harness.models.check import loaded_by, loading
    from harness.models.packed_layers import bits_by_matrix

    # A tied model's second copy of the embedding is not loaded.
    loaded = tuple(t for t in checkpoint.tensors if not (checkpoint.tied and t.part == "lm_head"))
    label = checkpoint.quantization or "as stored"
    quantization, packing, made = checkpoint.stored, checkpoint.packing, checkpoint.decoder
    if any(tensors.is_of_encoder(tensor.name) for tensor in loaded):
        if not any(_OF_DECODER.search(tensor.name) for tensor in loaded):
            raise Mistake(
                f"{printable(given)}: is an encoder alone: it generates no tokens, so no limit holds"
            )
        say(
            f"{printable(given)}: is an encoder-decoder: a decode step reads its decoder, not its encoder nor"
            " K and V of its cross-attention, which are read once for a prompt"
        )
    if checkpoint.format == "gguf" or quantization is None:
        return Form(label, tensors=loaded, parameters=checkpoint.parameters) if loaded else None
    loads = loaded_by(quantization, packing) or "no stack here loads that"
    if made and any(quantization.method in each.dequantizes for each in loading(quantization, packing)):
        loads += f" ({2 * parameters(made) / 1e9:,.1f} GB in 16 bits)"
    say(f"{printable(given)}: is {label}; {loads}")
    if made and made.is_dense and loaded:
        by_bits = (
            f"{bits:g} in {list_named(names, len(names)) if len(names) < 4 else f'{len(names)} matrices'}"
            for bits, names in bits_by_matrix(made, loaded).items()
        )
        say(f"bits per weight, scales included: {'; '.join(by_bits)}")
    if checkpoint.format == "config" and made:
        loaded = (*packed_sizes.as_released(made, quantization.method, packing),)
        label += " as released"
    if not loaded:
        say("its bytes are not known without its weights: the rows are of types made of 16-bit weights")
        return None
    return replace(checkpoint_form(label, loaded, quantization, packing), parameters=checkpoint.parameters)


def checkpoint_form(
    label: str, stored: Iterable[Tensor], quantization: Quantization, packing: Packing | None = None
) -> Form:
    """The form of a quantized checkpoint: who loads it is as the stacks' headers say."""
    from harness.models.check import loading

    engines = frozenset(stack.memory for stack in loading(quantization, packing) if stack.memory)
    return Form(label, tensors=tuple(stored), loaded_by=engines)
