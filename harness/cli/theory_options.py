"""Options of `harness theory`, and the names that it understands."""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.base.files import is_local
from harness.base.text import csv_cell, list_named, printable, shortened
from harness.cli import OK, Mistake, say
from harness.cli.options import add_reserve, add_wide, gb_per_s, memory_gib, reserved, tokens, unknown
from harness.models import served
from harness.theory import base_shapes, names, tensors
from harness.theory.decoder import Decoder, parameters
from harness.theory.hf_config import Quantization
from harness.theory.known_models import Known
from harness.theory.machines import DRIVER_RESERVE_BYTES, Figure, Machine, changed_reserve
from harness.theory.memory import (
    KV_TYPES,
    USUAL_KV,
    Choice,
    Form,
    choices,
)
from harness.theory.names import NotUnderstood
from harness.theory.tensors import ALL_QUANTS, QUANTS, Packing, Tensor

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
        return name.lower() == THIS or _stands(lambda: names.machines(name, known))

    def is_model(name: str) -> bool:
        return _stands(lambda: base_shapes.understood(name, shapes)) or Path(name).exists()

    def is_quant(name: str) -> bool:
        return name.lower() in (*ALL_QUANTS, ALL)

    arguments.quant = [name for given in arguments.quant for name in given.split(",") if name]
    arguments.machine = names.joined(arguments.machine, is_machine)
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
    given: Iterable[str], known: Mapping[str, Machine], memory: float | None = None
) -> dict[str, Machine]:
    """The machines by name; a name of several is the slowest, and says so. `this` is measured."""
    found: dict[str, Machine] = {}
    for name in given:
        if name.lower() == THIS and THIS not in known:
            from harness.cli.doctor import this_cpu

            known = {**known, THIS: this_cpu()}
        try:
            several = names.machines(name, known, memory)
        except NotUnderstood as why:
            raise Mistake(why.sentence("machine", shortened(name))) from why
        key, notes = names.slowest(shortened(name), several)
        for sentence in notes:
            say(sentence)
        found[key] = several[key]
    return found


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
        writer = csv.DictWriter(sys.stdout, fieldnames=list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: csv_cell(value) for key, value in row.items()} for row in found)
    else:
        from harness.report import theory_text

        theory_text.show_choices(found, arguments.context, bool(bytes_per_s), memory, reserve, arguments.wide)
    return OK


# Options of `harness theory`; only parsing, so that --help is fast.


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `harness theory` to its parser."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a name (--list-models, or of the hub or Ollama), a .gguf, a folder, or a config.json",
    )
    add = parser.add_argument
    add(
        "--machine",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="names (--list-machines), or `this`: the CPU here, with bandwidth and rate measured once",
    )
    add(
        "--memory",
        type=memory_gib,
        metavar="SIZE",
        help="memory of the machines, as sold: selects a variant, or sets another size; 16GB is 16 times "
        "2^30 bytes. Without a machine: which weights and KV types fit",
    )
    add_reserve(parser)
    add(
        "--bandwidth",
        type=gb_per_s,
        metavar="GB/S",
        help="with --memory and no machine: its read bandwidth, for the most tokens per second",
    )
    form = parser.add_argument_group("form of the weights (default: 16, 8 and 4 bits; for a file: as stored)")
    form.add_argument(
        "--bpw", nargs="+", type=_bits, default=[], metavar="BITS", help="bits per weight, e.g. 4.85"
    )
    form.add_argument(
        "--quant",
        nargs="+",
        default=[],
        metavar="TYPE",
        help="quantization types of llama.cpp, e.g. q4_k_m q8_0; or all",
    )
    form.add_argument(
        "--tied", action="store_true", help="the lm_head shares its weights with the input embedding"
    )
    form.add_argument(
        "--tensors", action="store_true", help="also list every tensor: type, bytes, bytes read per step"
    )
    cache = parser.add_argument_group("KV cache")
    cache.add_argument(
        "--kv",
        type=str.lower,
        choices=KV_TYPES,
        metavar="TYPE",
        help=f"its type in llama.cpp: {', '.join(KV_TYPES)} (default: f16; with --memory and no machine:"
        f" {', '.join(USUAL_KV)})",
    )
    cache.add_argument(
        "--kv-read",
        choices=("grows", "padded256", "full", "copied", "window"),
        default="grows",
        help="what a decode step reads: grows, the tokens so far (default); padded256, up to a multiple of "
        "256; full, all of a static cache; copied, the tokens twice, and a write; window, the last ones",
    )
    cache.add_argument(
        "--length", type=tokens, metavar="N", help="tokens of a static cache (full) or of the window (window)"
    )
    at = parser.add_argument_group("context and prompt (token counts accept k and M: 32k is 32,768)")
    at.add_argument(
        "--context",
        type=tokens,
        default=10_000,
        metavar="N",
        help="also show decode at this position (default: 10000)",
    )
    at.add_argument("--prompt", type=tokens, default=25, metavar="N", help="prompt tokens (default: 25)")
    at.add_argument(
        "--chunk",
        nargs="+",
        type=tokens,
        default=[],
        metavar="N",
        help="also show prefill in chunks of N tokens",
    )
    at.add_argument(
        "--kv-block",
        type=tokens,
        metavar="N",
        help="prefill tokens that share one read of the KV cache (default: a chunk; 1: as in the published "
        "RTX 4090 study)",
    )
    at.add_argument("--rate", metavar="NAME", help="compute rate of the machine to use, e.g. fp16-tensor")
    split = parser.add_argument_group("experts on a GPU's host CPU, as in llama.cpp")
    split.add_argument(
        "--n-cpu-moe",
        type=tokens,
        metavar="N",
        help="the experts of the first N layers (of all, if there are fewer) are read by the CPU, all else by"
        " the machine's GPU",
    )
    split.add_argument(
        "--cpu-bandwidth",
        type=gb_per_s,
        metavar="GB/S",
        help="what that CPU reads from its memory; without it only the memory is printed",
    )
    split.add_argument(
        "--host-memory",
        type=memory_gib,
        metavar="SIZE",
        help="its main memory, in which they must fit",
    )
    draft = parser.add_argument_group("speculative decoding")
    draft.add_argument(
        "--acceptance", type=_share, metavar="P", help="acceptance rate of a drafted token, 0 to 1"
    )
    draft.add_argument(
        "--draft-length", type=tokens, metavar="N", help="drafted tokens per round (default: 4)"
    )
    draft.add_argument(
        "--draft-cost",
        type=_share,
        metavar="C",
        help="time of a draft step over the time of a decode step (default: 0)",
    )
    add(
        "--units",
        choices=["si", "published"],
        default="si",
        help="published: binary units, as in the published RTX 4090 study (default: si)",
    )
    add("--from", dest="own", type=Path, metavar="FILE", help="YAML file with your own shapes and machines")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list-models", action="store_true", help="list the known models")
    instead.add_argument(
        "--list-machines", action="store_true", help="list the known machines, with the source of each figure"
    )
    instead.add_argument(
        "--published", metavar="TABLE", help="recompute a table of the published study; or `all`"
    )
    add_wide(parser)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--csv", action="store_true", help="print the rows as CSV")
    shape.add_argument("--json", action="store_true", help="print one JSON array, one object per row")


def _bits(text: str) -> float:
    value = _number(text)
    if not 0.1 <= value <= 128:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 128")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        hint = "; name models before options" if text[:1].isalpha() else ""
        raise argparse.ArgumentTypeError(f"{text} is not a number{hint}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


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
        loaded = (*tensors.as_released(made, quantization.method, packing),)
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
