"""`harness theory`: limits of the hardware for a model name or the header of a file, before anything runs."""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from harness.cli.exits import OK, Mistake
from harness.cli.machines import known as known_machines
from harness.cli.names import unknown
from harness.cli.theory import choices, files, options, reached
from harness.cli.theory import names as typed
from harness.known import Known
from harness.system.printing import printable
from harness.system.wording import csv_cell
from harness.theory import decoder, gguf_types
from harness.theory.choices import released_in
from harness.theory.decoder import Decoder
from harness.theory.fits import Form
from harness.theory.machine import Machine
from harness.theory.placement import Placement, PlacementError
from harness.theory.row_types import Row, RowWithTensors, TensorRow
from harness.theory.rows import Ask, row, row_without_shape
from harness.theory.shapes import Shape
from harness.theory.tensors import Tensor, streamed_bytes
from harness.theory.units import PUBLISHED, UNITS

BITS = (16.0, 8.0, 4.0)
_OF_A_MODEL = ("machine", "memory", "bpw", "quant", "chunk", "rate", "tensors")
_NESTED = (  # of a row, left out of a CSV
    *(
        "bytes_by_part",
        "bytes_by_type",
        "chunked_prefill",
        "rates",
        "reached",
        "reached_prefill",
        "slopes",
        "tensors",
    ),
)


class Model(NamedTuple):
    """A requested model. `stored`: the form in its files; `made`: null if the files do not define it."""

    given: str
    name: str
    made: Shape | Decoder | None
    tied: bool
    forms: list[Form]
    stored: Form | None


def add(parser: argparse.ArgumentParser) -> None:
    options.add(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the requested output. Raises Mistake."""
    for alone in ("published", "list_models", "list_machines"):
        given = [name for name in _OF_A_MODEL if getattr(arguments, name)]
        if getattr(arguments, alone) and given:
            raise Mistake(f"--{alone.replace('_', '-')} stands alone, without --{given[0]}")
    if arguments.published:
        return _published(arguments)
    shapes, machines = _known(arguments.own)
    if arguments.list_models or arguments.list_machines:
        return _list(arguments, shapes, machines)
    typed.sort(arguments, shapes, machines)
    if arguments.n_cpu_moe and not arguments.machine:
        raise Mistake("--n-cpu-moe needs a --machine, the GPU")
    if arguments.memory and not arguments.machine:
        return choices.show(arguments, shapes, files.whole_model)
    if arguments.bandwidth:
        raise Mistake("--bandwidth goes with --memory, and without a machine")
    return _print(arguments, _rows(arguments, shapes, machines))


def _known(own: Path | None) -> tuple[Known, Mapping[str, Machine]]:
    """Models and machines by name; those of the user override the built-in ones."""
    machines = known_machines()
    if own is None:
        return Known(), machines
    from harness.config.mistakes import ConfigError
    from harness.config.own import load

    try:
        shapes, of_file = load(own)
    except ConfigError as wrong:
        raise Mistake(str(wrong)) from wrong
    lower = {name.lower(): shape for name, shape in shapes.items()}
    return Known(lower), machines.with_own({name.lower(): each for name, each in of_file.items()})


def _rows(arguments: argparse.Namespace, shapes: Known, machines: Mapping[str, Machine]) -> list[Row]:
    """One row per model, machine and form of the weights, in the requested order."""
    if not arguments.models:
        raise Mistake(
            "name a model or a file: harness theory qwen1.5-7b --machine rtx-4090 (or --list-models)"
        )
    ask = _ask(arguments)
    chosen: list[tuple[str | None, Machine | None]] = [
        *typed.machines(arguments.machine, machines, arguments.memory, _this_machine).items()
    ]
    chosen = chosen or [(None, None)]
    for name, machine in chosen:
        if machine and ask.rate is not None and ask.rate not in machine.rates:
            raise Mistake(unknown(f"rate of {name}", ask.rate, machine.rates))
        if machine and ask.n_cpu_moe and (machine.family == "cpu" or machine.unified):
            raise Mistake(f"--n-cpu-moe needs a GPU with memory of its own; {name} has none")
    models = [_model(given, arguments, shapes) for given in dict.fromkeys(arguments.models)]
    for model in models if ask.n_cpu_moe else ():
        try:
            Placement(ask.n_cpu_moe).check(model.made, None)
        except PlacementError as wrong:
            raise Mistake(f"{model.given}: {wrong}") from wrong
        if model.made is None:
            raise Mistake(f"{model.given}: --n-cpu-moe needs a model whose layers are known")
    names_given = [model.name for model in models]
    found: list[Row] = []
    for model in models:
        name = model.name if names_given.count(model.name) == 1 else model.given
        measured: list[reached.Unread] = []
        shape = decoder.made(model.made).shape if model.made else None
        if shape and arguments.machine and ask.units.name != PUBLISHED.name:
            measured = [*reached.of_model(name, shape)]
        for machine_name, machine in chosen:
            for form in model.forms:
                if model.made:
                    line = row(name, model.made, form, machine_name, machine, ask)
                else:
                    line = row_without_shape(name, form, model.tied, machine_name, machine, ask)
                if measured and machine:
                    reached.add(line, measured, machine)
                if arguments.tensors or (arguments.json and form is model.stored):
                    share = decoder.made(model.made).expert_share if model.made else 1.0
                    tensors = [_tensor(tensor, model.tied, share) for tensor in form.tensors]
                    listed: RowWithTensors = {**line, "tensors": tensors}
                    line = listed
                found.append(line)
    return found


def _ask(arguments: argparse.Namespace) -> Ask:
    has_length = arguments.kv_read in ("full", "window")
    if has_length and arguments.length is None:
        raise Mistake(f"--kv-read {arguments.kv_read} needs --length")
    if arguments.length is not None and not has_length:
        raise Mistake("--length needs --kv-read full or window")
    for option in ("chunk", "rate"):
        if getattr(arguments, option) and not arguments.machine:
            raise Mistake(f"--{option} needs a --machine")
    speculation = None
    if arguments.acceptance is not None:
        speculation = arguments.acceptance, arguments.draft_length or 4, arguments.draft_cost or 0.0
    elif arguments.draft_length is not None or arguments.draft_cost is not None:
        raise Mistake("--draft-length and --draft-cost need --acceptance")
    if (arguments.n_cpu_moe is None) != (arguments.cpu_bandwidth is None):
        raise Mistake("--n-cpu-moe and --cpu-bandwidth go together")
    return Ask(
        units=UNITS[arguments.units],
        kv_bits=arguments.kv_bits,
        kv_read=arguments.kv_read,
        length=arguments.length,
        kv_block=arguments.kv_block,
        context=arguments.context,
        prompt=arguments.prompt,
        chunks=arguments.chunk,
        rate=arguments.rate,
        speculation=speculation,
        n_cpu_moe=arguments.n_cpu_moe or 0,
        cpu_bytes_per_s=arguments.cpu_bandwidth * 1e9 if arguments.cpu_bandwidth else math.inf,
    )


def _model(given: str, arguments: argparse.Namespace, shapes: Known) -> Model:
    """A model by its name or its files, with the requested forms of its weights."""
    if known := typed.model(given, shapes):
        made: Shape | Decoder | None = known.made
        assert made is not None
        if arguments.tied:
            made = replace(made, tied=True)
        name, tied, stored = known.name, made.tied, None
    else:
        name, made, tied, stored = files.file(given)
        if arguments.tied:
            raise Mistake(f"{given}: --tied is only for model names; a file defines whether it is tied")
    if made is None and (arguments.bpw or arguments.quant):
        raise Mistake(f"{given}: unknown shape, so only the stored weights are known; drop --bpw and --quant")
    quants = typed.quants(arguments.quant)
    released = released_in(decoder.made(made)) if made else None
    if released and not (quants or stored or arguments.bpw):
        quants = [released]
    default = [] if quants or stored else BITS
    forms = [Form(f"{bits:g} bits", bits) for bits in arguments.bpw or default]
    for quant in quants:
        as_published = arguments.units == PUBLISHED.name
        assert made is not None
        forms.append(Form(quant, tensors=tuple(gguf_types.quantized(made, quant, as_published))))
    if arguments.tensors and not (arguments.quant or stored):
        raise Mistake(f"{given}: --tensors needs --quant, or a file with tensors")
    if stored and not forms:
        forms = [stored]
    return Model(given, name, made, tied, forms, stored)


def _this_machine() -> Machine:
    from harness.cli.machine import this_cpu

    return this_cpu()


def _tensor(tensor: Tensor, tied: bool, expert_share: float) -> TensorRow:
    return {
        "name": printable(tensor.name),
        "part": tensor.part,
        "type": tensor.type,
        "dims": list(tensor.dims),
        "bytes": tensor.bytes,
        "streamed_bytes": streamed_bytes(tensor, tied, expert_share),
    }


def _print(arguments: argparse.Namespace, rows: list[Row]) -> int:
    if arguments.json:
        print(json.dumps(rows, indent=1, allow_nan=False))
    elif arguments.csv:
        _csv([_flat(row) for row in rows])
    else:
        from harness.report import theory

        theory.show(rows, of_files=any(Path(given).exists() for given in arguments.models))
    return OK


def _flat(row: Row) -> dict[str, object]:
    """A row for CSV: nested figures become columns, lists of objects are dropped."""
    flat: dict[str, object] = {}
    for key, value in row.items():
        if key == "prefill_knees":
            for which in ("every", "last"):
                ends = (row["prefill_knees"] or {}).get(which) or (None, None)
                flat |= {f"prefill_knee_{which}_{end}": ends[i] for i, end in enumerate(("from", "to"))}
        elif key == "prefill_ms":
            flat |= {
                f"prefill_{which}_ms": (row["prefill_ms"] or {}).get(which) for which in ("every", "last")
            }
        elif key == "fits":
            for stack, fit in (row["fits"] or {}).items():
                flat |= {f"{stack} {figure}": number for figure, number in fit.items()} if fit else {}
        elif key == "sides":
            flat |= row["sides"] or {}
        elif key not in _NESTED:
            flat[key] = value
    return flat


def _csv(rows: Sequence[Mapping[str, object]]) -> None:
    writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: csv_cell(value) for key, value in row.items()} for row in rows)


def _list(arguments: argparse.Namespace, shapes: Known, machines: Mapping[str, Machine]) -> int:
    from harness.report import listings, theory

    if arguments.list_models:
        models = [listings.model(name, shape) for name, shape in shapes.items()]
        known: Sequence[Mapping[str, object]] = models
    else:
        rows = [listings.machine(name, machine) for name, machine in machines.items()]
        known = rows
    if arguments.json:
        print(json.dumps(known, indent=1))
    elif arguments.csv:
        _csv([{k: json.dumps(v) if isinstance(v, dict) else v for k, v in line.items()} for line in known])
    elif arguments.list_models:
        theory.table(listings.MODELS, models)
    else:
        theory.table(listings.MACHINES, rows)
        listings.sources(rows)
    return OK


def _published(arguments: argparse.Namespace) -> int:
    """Print one published table, or all, as CSV, to compare with `diff`."""
    if arguments.models:
        raise Mistake("--published prints the tables of the study as they are: name no MODEL")
    from harness.published import TABLES

    if arguments.published not in (*TABLES, "all"):
        raise Mistake(unknown("table", arguments.published, [*TABLES, "all"]))
    wanted = list(TABLES) if arguments.published == "all" else [arguments.published]
    if arguments.json:
        print(json.dumps([{"table": name, "rows": TABLES[name]()} for name in wanted], indent=1))
        return OK
    for number, name in enumerate(wanted):
        if len(wanted) > 1:
            print(f"{'' if number == 0 else chr(10)}# {name}")
        _csv(TABLES[name]())
    return OK
