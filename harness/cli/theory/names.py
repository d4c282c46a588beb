"""Resolve names on the command line of `harness theory`: models or files, machines, quantizations."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from harness.cli.exits import Mistake, say
from harness.cli.names import unknown
from harness.system.wording import shortened
from harness.theory import machine_names, names
from harness.theory.decoder import Decoder
from harness.theory.gguf_types import ALL_QUANTS, QUANTS
from harness.theory.machine import Machine
from harness.theory.names import NotUnderstood
from harness.theory.shapes import Shape

THIS, ALL = "this", "all"


def sort(
    arguments: argparse.Namespace, shapes: Mapping[str, Shape | Decoder], known: Mapping[str, Machine]
) -> None:
    """Join machine names that the shell has split; split quantizations at commas; move models given after
    --machine or --quant."""

    def is_machine(name: str) -> bool:
        return name.lower() == THIS or _stands(lambda: machine_names.machines(name, known))

    def is_model(name: str) -> bool:
        return _stands(lambda: names.named(name, shapes)) or Path(name).exists()

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


def machines(
    given: Iterable[str], known: Mapping[str, Machine], memory: float | None, this: Callable[[], Machine]
) -> dict[str, Machine]:
    """The machines by name; prints a message for a name of several. `this` measures this machine."""
    found: dict[str, Machine] = {}
    for name in given:
        if name.lower() == THIS and THIS not in known:
            known = {**known, THIS: this()}
        try:
            several = machine_names.machines(name, known, memory)
        except NotUnderstood as why:
            raise Mistake(why.sentence("machine", shortened(name))) from why
        if sentence := machine_names.one_of_each(shortened(name), several):
            say(sentence)
        found |= several
    return found


def model(given: str, shapes: Mapping[str, Shape | Decoder]) -> names.Named | None:
    """A known model; null for a file."""
    path = Path(given)
    is_file = path.exists() or path.suffix in (".gguf", ".json", ".safetensors")
    if given and is_file and given.lower() not in shapes:
        return None
    try:
        return names.named(given, shapes, "give its config.json or --from")
    except NotUnderstood as why:
        if "/" in given:  # a missing path, which the reader of the file reports
            return None
        raise Mistake(why.sentence("model (and no file)", shortened(given))) from why


def quants(given: Iterable[str]) -> list[str]:
    """The types in lower case, with `all` expanded."""
    found = [quant.lower() for quant in given]
    if strange := next((quant for quant in found if quant not in (*ALL_QUANTS, ALL)), None):
        raise Mistake(unknown("quantization", strange, ALL_QUANTS))
    return [*QUANTS] if ALL in found else found
