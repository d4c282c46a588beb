"""What a recommendation starts from: the model, the machine, and the records to predict from."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import machine, results, shipped
from harness.cli.exits import Mistake, say
from harness.cli.inputs import stored
from harness.cli.machine import this_cpu
from harness.cli.theory import names as typed
from harness.config import Model
from harness.config.forms import InlineShape
from harness.config.known import Known as KnownModels
from harness.config.rows import safe_name
from harness.dataset.gather import Gathered
from harness.models import weights
from harness.models.checkpoint import CheckpointError, read
from harness.models.weights import FULL_TYPES, WeightsError
from harness.plan import Cell
from harness.predict.traits import Example
from harness.recommend import examples, quality
from harness.recommend.candidates import Place, place_of
from harness.recommend.commands import Source
from harness.recommend.quality import Perplexity
from harness.system.gpus import Gpu, visible_gpus
from harness.system.printing import printable
from harness.theory import machine_names
from harness.theory.machine import Figure, Machine
from harness.theory.machines import MACHINES
from harness.theory.names import NotUnderstood
from harness.theory.shapes import Shape

STUDY = "published/rtx4090-qwen1.5"
THIS = "this"
GPU_BYTES_PER_S = 150e9  # a machine of which only memory and bandwidth are known is a GPU from here on


@dataclass(frozen=True)
class Known:
    """What was measured: examples to predict from, and perplexities."""

    examples: Sequence[Example]
    perplexities: Sequence[Perplexity]


@dataclass(frozen=True)
class Given:
    """A model, its row in a config, and where its weights come from."""

    model: Model
    shape: Shape
    row: dict[str, object]
    source: Source

    def runs(self, cell: Cell) -> bool:
        """Whether the weights can become what the cell loads: a quantized GGUF stays what it is."""
        if self.source.gguf is None:
            return True
        is_whole = self.source.gguf_type in FULL_TYPES
        return cell.weights_format == "gguf" and (is_whole or cell.quant == self.source.gguf_type)


def model(given: str) -> Given:
    """A model by its name or its files. Raises Mistake."""
    if known := typed.model(given, KnownModels()):
        shape = known.made if isinstance(known.made, Shape) else known.made.shape
        if shape is None:
            raise Mistake(_not_dense(known.name))
        hub = given if re.fullmatch(r"[\w.-]+/[\w.-]+", given) else None
        named = Model(name=known.name, shape=shape)
        return Given(named, shape, {"shape": known.name}, Source(known.name, hub))
    path = Path(given)
    try:
        found = read(path)
        quant = weights.local(path).quant if path.suffix == ".gguf" else None
    except (CheckpointError, WeightsError) as wrong:
        raise Mistake(printable(str(wrong))) from wrong
    if (shape := found.shape) is None:
        raise Mistake(_not_dense(printable(given)))
    whole = str(path.absolute())
    if path.name == "config.json":
        name = path.absolute().parent.name
        row: dict[str, object] = {"shape": asdict_of(shape)}
        source = Source(name)
    else:
        name, row = path.stem if path.is_file() else path.absolute().name, {"weights": whole}
        source = Source(name, None if quant else whole, whole if quant else None, quant)
    name = safe_name(name) or "model"
    return Given(Model(name=name, shape=shape), shape, {"name": name, **row}, source)


def _not_dense(name: str) -> str:
    return f"{name}: only dense Llama-like models are predicted; see harness theory {name} --machine MACHINE"


def asdict_of(shape: Shape) -> dict[str, object]:
    """A shape as a config spells it out."""
    return {key: getattr(shape, key) for key in InlineShape.model_fields}


def place(arguments: argparse.Namespace) -> Place:
    """The machine. Raises Mistake."""
    threads = machine.physical_cores()
    if arguments.machine == THIS:
        if arguments.bandwidth:
            raise Mistake("--bandwidth is of a machine that is not known; this one is measured")
        return replace(_limited(_this(threads), arguments.memory), here=True)
    named = printable(arguments.machine)
    try:
        several = machine_names.machines(arguments.machine, MACHINES, arguments.memory)
    except NotUnderstood as why:
        if not (arguments.memory and arguments.bandwidth) or why.ambiguous:
            hint = "" if why.ambiguous else "; or give --memory and --bandwidth"
            raise Mistake(why.sentence("machine", named) + hint) from why
        return _unknown(arguments, threads)
    if arguments.bandwidth:
        raise Mistake(f"{named} is known; drop --bandwidth")
    if len(several) > 1:
        raise Mistake(f"{named} is several: {', '.join(several)}; choose one, or give --memory")
    name, found = next(iter(several.items()))
    largest = max(each.memory_bytes for each in machine_names.machines(arguments.machine, MACHINES).values())
    if found.memory_bytes > largest:
        raise Mistake(f"{named} has at most {largest / 2**30:.0f} GiB; drop --memory, or give less")
    return place_of(found, name, threads)


def _unknown(arguments: argparse.Namespace, threads: int) -> Place:
    """A machine of which only memory and bandwidth are known."""
    bandwidth, name = arguments.bandwidth * 1e9, printable(arguments.machine)
    is_gpu = bandwidth >= GPU_BYTES_PER_S
    say(
        f"{name} is taken for a {'GPU' if is_gpu else 'CPU'}, by its bandwidth; its compute rate is not known"
    )
    given = "given"
    made = Machine(
        name=name,
        memory=Figure(int(arguments.memory * 2**30), given),
        bandwidth=Figure(bandwidth, given),
        rates={},
        rate="",
        compute_capability=(8, 6) if is_gpu else None,
    )
    return place_of(made, name, threads)


def _this(threads: int) -> Place:
    """The first GPU of this machine, by its data sheet; without one its CPU, measured now."""
    gpus = visible_gpus()
    if not gpus:
        return place_of(this_cpu(), "this machine", threads)
    gpu: Gpu = gpus[0]
    sheet = machine_names.of_gpu(gpu["name"] or "", gpu["memory_bytes"])
    if sheet is None:
        name = gpu["name"] or "this GPU"
        raise Mistake(f"{name} has no known data sheet; give --machine, --memory and --bandwidth")
    return place_of(sheet, gpu["name"] or sheet.name, threads)


def _limited(place: Place, memory_gib: float | None) -> Place:
    """With at most this memory. Raises Mistake if there is less."""
    if memory_gib is None:
        return place
    limit = int(memory_gib * 2**30)
    has = place.device.memory_bytes or 0
    if limit > has:
        raise Mistake(f"--memory {memory_gib:g}GB is more than this machine's {has / 2**30:.1f} GiB")
    return replace(place, device=replace(place.device, memory_bytes=limit, reserve_bytes=0))


def known(folder: Path, of_place: Place) -> Known:
    """The published study and the user's own records; unreadable ones are named and passed over. Raises
    Mistake."""
    if folder.exists() and not folder.is_dir():
        raise Mistake(f"{printable(str(folder))} is no folder of results")
    published = [*results.records(shipped.results(STUDY), say)]
    own = Gathered([*stored(folder)] if folder.is_dir() else [])
    found = [*examples.of_published(published), *examples.of_own(own)]
    # This machine's own bandwidth is measured each time; a share of it must mean the same in all.
    found = examples.with_bandwidths(found, {of_place.name: of_place.bytes_per_s})
    return Known(found, quality.published(each.record for each in published))
