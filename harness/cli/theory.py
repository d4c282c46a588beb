"""`harness theory`: compute the limits of the hardware."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from harness.base import bounds, data
from harness.base.files import read_regular, strict_json
from harness.base.text import csv_of, plural, printable
from harness.cli import OK, Mistake, parser, say, theory_options
from harness.cli.options import known as known_machines
from harness.cli.options import reserved, unknown
from harness.cli.shared_options import RESULTS
from harness.cli.theory_options import Found
from harness.theory import floors, ggml_quants, machine_names, packed_sizes
from harness.theory.decoder import Decoder, dense
from harness.theory.floors import PUBLISHED, UNITS
from harness.theory.known_models import Known
from harness.theory.machines import Machine
from harness.theory.memory_choices import USUAL_KV, kv_bits, released_in
from harness.theory.memory_fit import Form
from harness.theory.public_speeds import others
from harness.theory.quantization import Quantization
from harness.theory.rows import (
    Ask,
    Reached,
    ReachedPrefill,
    Row,
    RowWithTensors,
    TensorRow,
    row,
    row_without_shape,
)
from harness.theory.split_weights import Placement, PlacementError
from harness.theory.tensors import Tensor, streamed_bytes

if TYPE_CHECKING:
    from harness.records import Record


# The share of a ceiling reached by the fastest decode and prefill of the same model, weights and machine,
# published or measured here.


Unread = dict[str, Any]
"""A record that is not checked against its types: reading 60 of them in full would take seconds."""
Speed = tuple[float, float, str]
"""Tokens per second, the context they were measured at, and the source."""
NEWEST = 60  # records of a model that are read
_BITS = {"16 bits": 16, "8 bits": 8, "4 bits": 4}  # stand for any type with this many bits


def add_reached(row: Row, records: Sequence[Unread], machine: Machine) -> None:
    """Set `reached` and `reached_prefill`; None without a measurement or a known ceiling. `records`: see
    of_model."""
    if row["B_ms"] is None:
        return
    of_row = [(r, _speed(r)) for r in records if _is_on(r, machine) and _has(r, row["weights"])]
    row["reached"] = _decode(row, of_row)
    row["reached_prefill"] = _prefill(row, of_row)


def _decode(row: Row, records: Sequence[tuple[Unread, Speed | None]]) -> Reached | None:
    B_ms, W = row["B_ms"], row["W_tokens_per_ms"]
    found: list[Reached] = []
    for record, speed in records:
        if B_ms is not None and speed is not None:
            tokens_per_s, n, source = speed
            floor_ms = B_ms + (n / W if W else 0.0)
            found.append(
                {
                    "tokens_per_s": tokens_per_s,
                    "share": floor_ms * tokens_per_s / 1e3,
                    "stack": record["stack"],
                    "variant": record["variant"],
                    "source": source,
                }
            )
    return max(found, key=lambda each: each["share"], default=None)


def _prefill(row: Row, records: Sequence[tuple[Unread, Speed | None]]) -> ReachedPrefill | None:
    """The prefill of a prompt of the same length. Times below the limit, or below a later step's (see
    floors.UNSYNCHRONISED), are excluded: the clock was read too early."""
    floor_ms, prompt = (row["prefill_ms"] or {}).get("last"), row["prompt_tokens"]
    found: list[ReachedPrefill] = []
    for record, speed in records:
        if floor_ms is None or prompt is None or (timed := _prefill_ms(record, prompt)) is None:
            continue
        ms, source = timed
        step_ms = 1e3 / speed[0] if speed else 0.0
        if ms >= max(floor_ms, floors.UNSYNCHRONISED * step_ms):
            found.append(
                {
                    "ms": ms,
                    "share": floor_ms / ms,
                    "stack": record["stack"],
                    "variant": record["variant"],
                    "source": source,
                }
            )
    return max(found, key=lambda each: each["share"], default=None)


def of_model(model: str, made: Decoder) -> Iterator[Unread]:
    """The records of a dense model of this name and shape, published and own. Skips unreadable ones."""
    published = (data.HERE / data.PUBLISHED).glob(f"*/{model}/*/record.json")
    own = sorted(RESULTS.glob(f"*/{model}/*/*/record.json"), key=lambda path: path.parent.name)
    for path in [*published, *own[-NEWEST:]]:
        try:
            record = strict_json(read_regular(path, bounds.RECORD_BYTES))
            stored = dense(**record["model"]["shape"])
            if stored == made and record["workload"]["kind"] == "decode" and record["outcome"] == "ok":
                yield record | {"path": path}
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            continue


def _is_on(record: Unread, machine: Machine) -> bool:
    from harness.analysis.identity import recorded_gpu

    if record.get("device") == "cpu":
        return str(record["machine"].get("cpu")) == machine.name
    if (on := recorded_gpu(cast("Record", record))) is None:
        return False
    name, memory = str(on.get("name")), on.get("memory_bytes")
    known = machine_names.of_gpu(name, memory if isinstance(memory, int) else None)
    return known.name == machine.name if known else f" {name.lower()}".endswith(f" {machine.name.lower()}")


def _has(record: Unread, weights: str) -> bool:
    """Whether its weights are those of a row."""
    from harness.stacks.header import references  # pydantic takes 0.1 s

    reported = record.get("reported") or {}
    quant = record["variant"] if reported else (record.get("loaded") or {}).get("quant")
    of_gguf = record["stack"] == references()["gguf"].stack
    if weights in _BITS:
        bits = reported.get("bpw") or _bits(quant)
        return not of_gguf and bits == _BITS[weights]
    return of_gguf and str(quant).replace("fp16", "f16") == weights


def _bits(quant: str | None) -> int | None:
    from harness.analysis.traffic import nominal_bits

    return nominal_bits(quant)


def _speed(record: Unread) -> Speed | None:
    """The speed in a record; None if the record has no valid one."""
    if reported := record.get("reported"):
        source = record["source"]["title"]
        return (1e3 / reported["B_ms"], 0.0, source) if reported.get("B_ms") else None
    if (whole := _valid(record)) is None:
        return None
    timing, steps = whole["timing"], whole["tokens"] - 1
    if steps < 1 or "last_token_ns" not in timing:
        return None
    context = whole["workload"]["prompt_tokens"] + whole["tokens"] / 2
    rate = steps / (timing["last_token_ns"] - timing["first_token_ns"]) * 1e9
    return rate, context, _here(record)


def _prefill_ms(record: Unread, prompt: int) -> tuple[float, str] | None:
    """Milliseconds of a prompt of this length, and the source; None if that was not measured."""
    same = record["workload"]["prompt_tokens"] == prompt
    if reported := record.get("reported"):
        ms = reported.get("prefill_ms") if same else _in_series(record, prompt)
        return (ms, record["source"]["title"]) if ms else None
    whole = _valid(record) if same else None
    if whole is None or "first_token_ns" not in whole["timing"]:
        return None
    return whole["timing"]["first_token_ns"] / 1e6, _here(record)


def _in_series(record: Unread, prompt: int) -> float | None:
    from harness.records import ResultsError, Stored, prefill_series

    try:
        series = prefill_series(Stored(record["path"].parent, cast("Record", record)))
    except ResultsError:
        return None
    times = dict(zip(series.get("n", []), series.get("latency_ns", []), strict=True))
    return times[prompt] / 1e6 if prompt in times else None


def _valid(record: Unread) -> Record | None:
    """The whole of a record of our own; None if it cannot be read or its verdict is not ok."""
    from harness import records
    from harness.analysis.verdicts import verdict

    try:
        whole = records.read(record["path"])
        return whole if verdict(whole).status == "ok" else None
    except records.ResultsError:
        return None


def _here(record: Unread) -> str:
    return f"measured here, {record['started_utc'][:10]}"


# `harness theory`: limits of the hardware for a model name or the header of a file, before anything runs.


BITS = (16.0, 8.0, 4.0)
_OF_A_MODEL = ("machine", "memory", "bpw", "quant", "chunk", "rate", "tensors")
_NESTED = (  # of a row, left out of a CSV
    *(
        "bytes_by_part",
        "bytes_by_type",
        "chunked_prefill",
        "rates",
        "reached",
        "reached_by_others",
        "reached_prefill",
        "slopes",
        "tensors",
    ),
)


class Model(NamedTuple):
    """A requested model, as `text` names it, with the requested forms of its weights."""

    text: str
    found: Found
    forms: list[Form]


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
    theory_options.sort_of(arguments, shapes, machines)
    if arguments.n_cpu_moe and not arguments.machine:
        raise Mistake("--n-cpu-moe needs a --machine, the GPU")
    if arguments.channels and not arguments.memory_speed:
        raise Mistake("--channels needs --memory-speed")
    if arguments.memory_speed and not arguments.machine:
        raise Mistake("--memory-speed needs a --machine, a CPU")
    if arguments.memory and not arguments.machine:
        return theory_options.show_choices(arguments, shapes)
    if arguments.bandwidth:
        raise Mistake("--bandwidth goes with --memory, and without a machine")
    return _print(arguments, _rows(arguments, shapes, machines))


Names = str | Sequence[str]


def theory_rows(models: Names, machines: Names = (), quants: Names = ()) -> list[Row]:
    """The rows of `harness theory MODEL... --machine MACHINE... --quant TYPE... --json`. Raises Mistake."""
    given = [[names] if isinstance(names, str) else list(names) for names in (models, machines, quants)]
    arguments = parser(["theory"]).parse_args(["theory", "--", *given[0]])
    arguments.machine, arguments.quant = given[1:]
    return _rows(arguments, *_known(None))


def _known(own: Path | None) -> tuple[Known, Mapping[str, Machine]]:
    """Models and machines by name; those of the user override the built-in ones."""
    machines = known_machines()
    if own is None:
        return Known(), machines
    from harness.config.load import load_own_model
    from harness.config.yaml_text import ConfigError

    try:
        shapes, of_file = load_own_model(own)
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
        *theory_options.machines_of(
            arguments.machine, machines, arguments.memory, arguments.memory_speed, arguments.channels
        ).items()
    ]
    wanted = reserved(arguments.reserve)
    chosen = [(name, machine and machine.reserving(wanted)) for name, machine in chosen]
    chosen = chosen or [(None, None)]
    for name, machine in chosen:
        if machine and ask.rate is not None and ask.rate not in machine.rates:
            raise Mistake(unknown(f"rate of {name}", ask.rate, machine.rates))
        if machine and ask.n_cpu_moe and (machine.family == "cpu" or machine.unified):
            raise Mistake(f"--n-cpu-moe needs a GPU with memory of its own; {name} has none")
    models = [_model(text, arguments, shapes) for text in dict.fromkeys(arguments.models)]
    for model in models if ask.n_cpu_moe else ():
        try:
            Placement(ask.n_cpu_moe).check(model.found.made, None)
        except PlacementError as wrong:
            raise Mistake(f"{model.text}: {wrong}") from wrong
        if model.found.made is None:
            raise Mistake(f"{model.text}: --n-cpu-moe needs a model whose layers are known")
    names = [model.found.name for model in models]
    is_study = ask.units.name == PUBLISHED.name
    by_others = {name: others(machine) for name, machine in chosen if machine and not is_study}
    rows: list[Row] = []
    for text, found, forms in models:
        name, made = found.name if names.count(found.name) == 1 else text, found.made
        measured: list[Unread] = []
        if made and made.is_dense and arguments.machine and not is_study:
            measured = [*of_model(name, made)]
        for machine_name, machine in chosen:
            for form in forms:
                if made:
                    line = row(name, made, form, machine_name, machine, ask)
                    line["trained_stated"] = found.trained_stated
                else:
                    line = row_without_shape(name, form, found.tied, machine_name, machine, ask)
                line["reached_by_others"] = by_others.get(machine_name)
                if measured and machine:
                    add_reached(line, measured, machine)
                if arguments.tensors or (arguments.json and form is found.stored):
                    share = made.expert_share if made else 1.0
                    tensors = [_tensor(tensor, found.tied, share) for tensor in form.tensors]
                    listed: RowWithTensors = {**line, "tensors": tensors}
                    line = listed
                rows.append(line)
    return rows


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


def _model(text: str, arguments: argparse.Namespace, shapes: Known) -> Model:
    """A model by its name or its files, with the requested forms of its weights."""
    found = theory_options.find(text, shapes)
    if arguments.tied and found.is_file:
        raise Mistake(f"{text}: --tied is only for model names; a file defines whether it is tied")
    if arguments.tied and found.made:
        found = found._replace(made=replace(found.made, tied=True), tied=True)
    made, stored = found.made, found.stored
    if made is None and (arguments.bpw or arguments.quant):
        raise Mistake(f"{text}: unknown shape, so only the stored weights are known; drop --bpw and --quant")
    quants = theory_options.quants_of(arguments.quant)
    released = released_in(made) if made and not (quants or stored or arguments.bpw) else None
    quants = [released] if released else quants
    default = [] if quants or stored else BITS
    forms = [Form(f"{bits:g} bits", bits) for bits in arguments.bpw or default]
    for quant in quants:
        as_published = arguments.units == PUBLISHED.name
        assert made is not None
        forms.append(Form(quant, tensors=ggml_quants.quantized(made, quant, as_published)))
    if made and released and not arguments.n_cpu_moe:
        released_tensors = packed_sizes.as_released(made, packed_sizes.MXFP4, None)
        quantization = Quantization(packed_sizes.MXFP4, packed_sizes.MXFP4)
        label = f"{packed_sizes.MXFP4} as released"
        forms.append(theory_options.checkpoint_form(label, released_tensors, quantization))
    if arguments.tensors and not (arguments.quant or stored):
        raise Mistake(f"{text}: --tensors needs --quant, or a file with tensors")
    if stored and not forms:
        forms = [stored]
    return Model(text, found, forms)


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
    from harness.report import theory_text

    known = (
        [theory_text.model_row(name, shape) for name, shape in shapes.items()]
        if arguments.list_models
        else [theory_text.machine_row(name, machine) for name, machine in machines.items()]
    )
    if arguments.json:
        print(json.dumps(known, indent=1))
    elif arguments.csv:
        rows = [{k: json.dumps(v) if isinstance(v, dict) else v for k, v in line.items()} for line in known]
        print(csv_of(rows), end="")
    elif arguments.list_models:
        theory_text.show_models(known, arguments.wide)
    else:
        theory_text.show_machines(machines, arguments.wide)
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
