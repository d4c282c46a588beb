"""The limits of the hardware for models by name or the headers of their files, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.api.inputs import known_machines
from harness.base import data
from harness.base.files import Mistake, is_local
from harness.base.text import list_named, printable, say, shortened, unknown
from harness.models import served
from harness.theory import base_shapes, cpus, ggml_quants, machine_names, names, packed_sizes, tensors
from harness.theory.decoder import Decoder, parameters
from harness.theory.floors import PUBLISHED, SI
from harness.theory.ggml_quants import ALL_QUANTS, QUANTS
from harness.theory.known_models import Known
from harness.theory.machines import Machine
from harness.theory.memory_choices import released_in
from harness.theory.memory_fit import Form
from harness.theory.names import NotUnderstood
from harness.theory.packed_sizes import Packing
from harness.theory.public_speeds import others
from harness.theory.quantization import Quantization
from harness.theory.rows import Ask, Row, RowWithTensors, TensorRow, row, row_without_shape
from harness.theory.split_weights import Placement, PlacementError
from harness.theory.tensors import Tensor, streamed_bytes

if TYPE_CHECKING:
    from harness.models.locate import Ready

THIS, ALL = "this", "all"
BITS = (16.0, 8.0, 4.0)  # of weights, where nothing else is asked for
Names = str | Sequence[str]


def theory_rows(models: Names, machines: Names = (), quants: Names = ()) -> list[Row]:
    """The limits of models on machines, one row per model, machine and type of weights, as
    `harness theory MODEL... --machine MACHINE... --quant TYPE... --json` prints them, without `tensors`.

    Each argument is a name or several, as that command takes them. In a row `B_ms` is the least time of a
    decode step in ms, `W_tokens_per_ms` the tokens of context that add 1 ms to it, and `model_bytes` bytes.
    Raises Mistake for a name that is not known, and ConfigError for a mistake in machines.toml.
    """
    texts, machine_names, types = (
        [words] if isinstance(words, str) else list(words) for words in (models, machines, quants)
    )
    if not texts:
        raise Mistake("name a model or a file")
    chosen = machines_of(machine_names, known_machines())
    weights = Weights(quants=quants_of(types))
    return rows([model_of(text, weights, Known()) for text in texts], chosen, Ask(units=SI))


def rows(models: Sequence[Model], machines: Mapping[str, Machine], ask: Ask, lists: str = "") -> list[Row]:
    """One row per model, machine and form of the weights, in this order. `lists`: `all` with the tensors of
    each row, `stored` with those of the files as they are. Raises Mistake."""
    for name, machine in machines.items():
        if ask.rate is not None and ask.rate not in machine.rates:
            raise Mistake(unknown(f"rate of {name}", ask.rate, machine.rates))
        if ask.n_cpu_moe and (machine.family == "cpu" or machine.unified):
            raise Mistake(f"--n-cpu-moe needs a GPU with memory of its own; {name} has none")
    for model in models if ask.n_cpu_moe else ():
        try:
            Placement(ask.n_cpu_moe).check(model.found.made, None)
        except PlacementError as wrong:
            raise Mistake(f"{model.text}: {wrong}") from wrong
        if model.found.made is None:
            raise Mistake(f"{model.text}: --n-cpu-moe needs a model whose layers are known")
    model_names = [model.found.name for model in models]
    is_study = ask.units.name == PUBLISHED.name
    by_others = {} if is_study else {name: others(machine) for name, machine in machines.items()}
    chosen: list[tuple[str | None, Machine | None]] = [*machines.items()] or [(None, None)]
    lines: list[Row] = []
    for text, found, forms in models:
        name, made = found.name if model_names.count(found.name) == 1 else text, found.made
        measured: list[dict[str, Any]] = []
        if made and made.is_dense and machines and not is_study:
            from harness.dataset import reached  # with all that reads records

            measured = [*reached.of_model(name, made, data.RESULTS)]
        for machine_name, on in chosen:
            for form in forms:
                if made:
                    line = row(name, made, form, machine_name, on, ask)
                    line["trained_stated"] = found.trained_stated
                else:
                    line = row_without_shape(name, form, found.tied, machine_name, on, ask)
                line["reached_by_others"] = by_others.get(machine_name or "")
                if measured and on:
                    reached.add_reached(line, measured, on)
                if lists == "all" or (lists == "stored" and form is found.stored):
                    share = made.expert_share if made else 1.0
                    listed = [_tensor(tensor, found.tied, share) for tensor in form.tensors]
                    with_tensors: RowWithTensors = {**line, "tensors": listed}
                    line = with_tensors
                lines.append(line)
    return lines


def _tensor(tensor: Tensor, tied: bool, expert_share: float) -> TensorRow:
    return {
        "name": printable(tensor.name),
        "part": tensor.part,
        "type": tensor.type,
        "dims": list(tensor.dims),
        "bytes": tensor.bytes,
        "streamed_bytes": streamed_bytes(tensor, tied, expert_share),
    }


def machines_of(
    given: Iterable[str],
    known: Mapping[str, Machine],
    memory: float | None = None,
    memory_speed: float | None = None,
    channels: int | None = None,
) -> dict[str, Machine]:
    """The machines by name; a name of several is the slowest, and says so. `this` is measured. `memory`: GiB,
    as sold; `memory_speed`: transfers per second of a CPU's memory. Raises Mistake."""
    machines: dict[str, Machine] = {}
    for name in given:
        if name.lower() == THIS and THIS not in known:
            from harness.api.this_machine import this_cpu

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
        machines[key] = several[key]
    return machines


def with_memory_speed(machine: Machine, name: str, transfers_per_s: float, channels: int | None) -> Machine:
    """A CPU with memory of another speed. Raises Mistake for a machine with one kind of memory."""
    if machine.family != "cpu" or machine.board:
        raise Mistake(f"{name} is known, and has one kind of memory; drop --memory-speed")
    return cpus.with_speed(machine, transfers_per_s, channels)


def quants_of(given: Iterable[str]) -> list[str]:
    """The types in lower case, with `all` expanded. Raises Mistake."""
    quants = [quant.lower() for quant in given]
    if strange := next((quant for quant in quants if quant not in (*ALL_QUANTS, ALL)), None):
        raise Mistake(unknown("quantization", strange, ALL_QUANTS))
    return [*QUANTS] if ALL in quants else quants


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


@dataclass(frozen=True)
class Weights:
    """The forms of weights that are asked for. `tied`: the lm_head shares its weights with the embedding.
    `as_published`: as llama.cpp of the published study made them. `as_released`: also as a model was released
    in 4 bits, where nothing else is asked for. `with_tensors`: only forms with tensors."""

    quants: Sequence[str] = ()
    bpw: Sequence[float] = ()
    tied: bool = False
    as_published: bool = False
    as_released: bool = True
    with_tensors: bool = False


class Model(NamedTuple):
    """A model, as `text` names it, with the forms of its weights that are asked for."""

    text: str
    found: Found
    forms: list[Form]


def model_of(text: str, weights: Weights, shapes: Known) -> Model:
    """A model by its name or its files, with the forms of its weights. Raises Mistake."""
    found = find(text, shapes)
    if weights.tied and found.is_file:
        raise Mistake(f"{text}: --tied is only for model names; a file defines whether it is tied")
    if weights.tied and found.made:
        found = found._replace(made=replace(found.made, tied=True), tied=True)
    made, stored = found.made, found.stored
    if made is None and (weights.bpw or weights.quants):
        raise Mistake(f"{text}: unknown shape, so only the stored weights are known; drop --bpw and --quant")
    if weights.with_tensors and not (weights.quants or stored):
        raise Mistake(f"{text}: --tensors needs --quant, or a file with tensors")
    released = released_in(made) if made and not (weights.quants or stored or weights.bpw) else None
    quants = [released] if released else weights.quants
    forms = [Form(f"{bits:g} bits", bits) for bits in weights.bpw or (() if quants or stored else BITS)]
    for quant in quants:
        assert made is not None
        forms.append(Form(quant, tensors=ggml_quants.quantized(made, quant, weights.as_published)))
    if made and released and weights.as_released:
        released_tensors = packed_sizes.as_released(made, packed_sizes.MXFP4, None)
        quantization = Quantization(packed_sizes.MXFP4, packed_sizes.MXFP4)
        forms.append(checkpoint_form(f"{packed_sizes.MXFP4} as released", released_tensors, quantization))
    return Model(text, found, [stored] if stored and not forms else forms)


def named_model(given: str, shapes: Mapping[str, Decoder]) -> names.Named | None:
    """A known model, with a message for one that stands for another; None for a file. Raises Mistake."""
    if served.is_address(given):
        raise Mistake(f"{printable(given)}: a server does not tell its weights: name its model")
    path = Path(given)
    is_file = path.exists() or path.suffix in (".gguf", ".json", ".safetensors")
    if given and is_file and given.lower() not in shapes:
        return None
    try:
        named = base_shapes.understood(given, shapes, "give its config.json or --from")
    except NotUnderstood as why:
        if base_shapes.is_path(given) or is_local(given):
            return None  # it is missing, which the reader of the file reports
        raise Mistake(why.sentence("model (and no file)", shortened(given))) from why
    if named.note:
        say(printable(named.note))
    return named


def find(text: str, shapes: Mapping[str, Decoder]) -> Found:
    """A model by its name or its files. Raises Mistake."""
    from harness.models.locate import WeightsError, read

    if named := named_model(text, shapes):
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
    bits of their matrices; None where the bytes are not known. Raises Mistake."""
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
