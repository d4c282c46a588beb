"""`harness theory`: the limits of the hardware for a model, as a table, CSV or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.api import theory
from harness.api.inputs import known_machines, reserved
from harness.api.theory import ALL, THIS, Weights
from harness.base.text import csv_of, plural, unknown
from harness.cli import OK, Mistake, say
from harness.theory import base_shapes, machine_names
from harness.theory.decoder import Decoder
from harness.theory.floors import PUBLISHED, UNITS
from harness.theory.ggml_quants import ALL_QUANTS
from harness.theory.known_models import Known
from harness.theory.machines import DRIVER_RESERVE_BYTES, Figure, Machine, changed_reserve
from harness.theory.memory_choices import USUAL_KV, Choice, kv_bits
from harness.theory.memory_choices import choices as fitting_choices
from harness.theory.names import NotUnderstood
from harness.theory.rows import Ask, Row

_OF_A_MODEL = ("machine", "memory", "bpw", "quant", "chunk", "rate", "tensors")
_NESTED = (  # of a row, left out of a CSV
    *("bytes_by_part", "bytes_by_type", "chunked_prefill", "rates", "reached", "reached_by_others"),
    *("reached_prefill", "slopes", "tensors"),
)
_NEED_A_MACHINE = ("bpw", "tensors", "chunk", "rate", "acceptance")  # also with --memory


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
    _sort(arguments, shapes, machines)
    if arguments.n_cpu_moe and not arguments.machine:
        raise Mistake("--n-cpu-moe needs a --machine, the GPU")
    if arguments.channels and not arguments.memory_speed:
        raise Mistake("--channels needs --memory-speed")
    if arguments.memory_speed and not arguments.machine:
        raise Mistake("--memory-speed needs a --machine, a CPU")
    if arguments.memory and not arguments.machine:
        return _show_choices(arguments, shapes)
    if arguments.bandwidth:
        raise Mistake("--bandwidth goes with --memory, and without a machine")
    return _print(arguments, _rows(arguments, shapes, machines))


def _known(own: Path | None) -> tuple[Known, Mapping[str, Machine]]:
    """Models and machines by name; those of the user override the built-in ones."""
    machines = known_machines()
    if own is None:
        return Known(), machines
    from harness.config.mistakes import ConfigError
    from harness.config.own_model import load_own_model

    try:
        shapes, of_file = load_own_model(own)
    except ConfigError as wrong:
        raise Mistake(str(wrong)) from wrong
    lower = {name.lower(): shape for name, shape in shapes.items()}
    return Known(lower), machines.with_own({name.lower(): machine for name, machine in of_file.items()})


def _rows(arguments: argparse.Namespace, shapes: Known, machines: Mapping[str, Machine]) -> list[Row]:
    if not arguments.models:
        raise Mistake(
            "name a model or a file: harness theory qwen1.5-7b --machine rtx-4090 (or --list-models)"
        )
    ask, reserve = _ask(arguments), reserved(arguments.reserve)
    named = theory.machines_of(
        arguments.machine, machines, arguments.memory, arguments.memory_speed, arguments.channels
    )
    chosen = {name: machine.reserving(reserve) for name, machine in named.items()}
    weights = Weights(
        quants=theory.quants_of(arguments.quant),
        bpw=arguments.bpw,
        tied=arguments.tied,
        as_published=arguments.units == PUBLISHED.name,
        as_released=not arguments.n_cpu_moe,
        with_tensors=arguments.tensors,
    )
    models = [theory.model_of(text, weights, shapes) for text in dict.fromkeys(arguments.models)]
    return theory.rows(
        models, chosen, ask, "all" if arguments.tensors else "stored" if arguments.json else ""
    )


def _sort(arguments: argparse.Namespace, shapes: Mapping[str, Decoder], known: Mapping[str, Machine]) -> None:
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


def _show_choices(arguments: argparse.Namespace, shapes: Known) -> int:
    """Print a row for each type of weights and of the KV cache. Raises Mistake."""
    for option in _NEED_A_MACHINE:
        if getattr(arguments, option):
            raise Mistake(f"--{option} needs a --machine, also with --memory")
    if not arguments.models:
        raise Mistake("name a model: harness theory qwen3-30b-a3b --memory 16GB --context 32k")
    rows: list[Choice] = []
    memory = arguments.memory * 2.0**30
    reserve = changed_reserve(Figure(DRIVER_RESERVE_BYTES, "the driver"), reserved(arguments.reserve))
    kvs = [arguments.kv] if arguments.kv else USUAL_KV
    bytes_per_s = arguments.bandwidth and arguments.bandwidth * 1e9
    for text in dict.fromkeys(arguments.models):
        model = theory.find(text, shapes)
        if model.made is None:
            lacks, mend = "unknown architecture", "drop"
            if not model.has_config:
                lacks, mend = "has no config.json", "add the model's, or drop"
            raise Mistake(f"{text}: {lacks}, so only its stored bytes are known; {mend} --memory")
        stored = model.stored if model.stored and model.stored.is_fixed else None
        limits = theory.quants_of(arguments.quant), memory, arguments.context, bytes_per_s
        rows += fitting_choices(
            model.name, model.made, *limits, stored, model.trained_stated, kvs, reserve.value
        )
    if not rows:
        raise Mistake(f"--kv {arguments.kv}: these weights are for PyTorch, and llama.cpp has this type")
    if arguments.json:
        print(json.dumps(rows, indent=1))
    elif arguments.csv:
        print(csv_of(rows), end="")
    else:
        from harness.report import theory_choices

        theory_choices.show_choices(
            rows, arguments.context, bool(bytes_per_s), memory, reserve, arguments.wide
        )
    return OK


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
    for option in ("cpu_bandwidth", "host_memory"):
        if getattr(arguments, option) and not arguments.n_cpu_moe:
            raise Mistake(f"--{option.replace('_', '-')} is of the CPU that --n-cpu-moe gives experts to")
    return Ask(
        units=UNITS[arguments.units],
        kv_bits=kv_bits(arguments.kv or USUAL_KV[0]),
        kv_read=arguments.kv_read,
        length=arguments.length,
        kv_block=arguments.kv_block,
        context=arguments.context,
        prompt=arguments.prompt,
        chunks=arguments.chunk,
        rate=arguments.rate,
        speculation=speculation,
        n_cpu_moe=arguments.n_cpu_moe or 0,
        cpu_bytes_per_s=arguments.cpu_bandwidth and arguments.cpu_bandwidth * 1e9,
        cpu_memory_bytes=arguments.host_memory and arguments.host_memory * 2.0**30,
    )


def _print(arguments: argparse.Namespace, rows: list[Row]) -> int:
    if arguments.json:
        print(json.dumps(rows, indent=1, allow_nan=False))
    elif arguments.csv:
        print(csv_of([_flat(row) for row in rows]), end="")
    else:
        from harness.report import theory_text

        of_files = any(Path(given).exists() for given in arguments.models)
        theory_text.show_theory(rows, arguments.wide, of_files)
        if len(arguments.models) == 1:
            theory_text.show_downloads(arguments.models[0], [each.lower() for each in arguments.quant])
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


def _list(arguments: argparse.Namespace, shapes: Known, machines: Mapping[str, Machine]) -> int:
    from harness.report import theory_lists

    known = (
        [theory_lists.model_row(name, shape) for name, shape in shapes.items()]
        if arguments.list_models
        else [theory_lists.machine_row(name, machine) for name, machine in machines.items()]
    )
    if arguments.json:
        print(json.dumps(known, indent=1))
    elif arguments.csv:
        rows = [{k: json.dumps(v) if isinstance(v, dict) else v for k, v in line.items()} for line in known]
        print(csv_of(rows), end="")
    elif arguments.list_models:
        theory_lists.show_models(known, arguments.wide)
    else:
        theory_lists.show_machines(machines, arguments.wide)
    return OK


def _published(arguments: argparse.Namespace) -> int:
    """Print one published table, or all, as CSV, to compare with `diff`."""
    if arguments.models:
        raise Mistake("--published prints the tables of the study as they are: name no MODEL")
    from harness.theory.published import STUDY_TABLES, TABLES

    if arguments.published not in (*TABLES, "all"):
        raise Mistake(unknown("table", arguments.published, [*TABLES, "all"]))
    wanted = list(TABLES) if arguments.published == "all" else [arguments.published]
    if agrees := _agreement([name for name in wanted if name in STUDY_TABLES]):
        say(agrees)
    if arguments.json:
        print(json.dumps([{"table": name, "rows": TABLES[name]()} for name in wanted], indent=1))
        return OK
    for number, name in enumerate(wanted):
        if len(wanted) > 1:
            print(f"{'' if number == 0 else chr(10)}# {name}")
        print(csv_of(TABLES[name]()), end="")
    return OK


def _agreement(tables: Sequence[str]) -> str:
    """How many cells of the study's tables come out as printed, and a line for each that does not; empty: no
    table is one of the study's."""
    from harness.theory.published import compared

    counts, differ = [], []
    for count, slips in map(compared, tables):
        counts.append(count)
        differ += slips
    if not counts:
        return ""
    of = f"{sum(counts):,} cells of {plural(len(counts), 'table')}"
    if not differ:
        return f"all {of} agree with the published study"
    which = "".join(
        f"\n  {each.table}, {each.row}, {each.column}: {each.ours}, printed as {each.printed}"
        + (f" ({each.why})" if each.why else "")
        for each in differ
    )
    return f"{sum(counts) - len(differ):,} of {of} agree with the published study; these differ:{which}"
