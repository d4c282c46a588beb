"""What `harness recommend` goes by: the model, the machine, measurements made for it."""

from __future__ import annotations

import argparse
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from harness import machine
from harness.base import bounds, data
from harness.base.files import object_of
from harness.base.nvml import Gpu, visible_gpus
from harness.base.text import list_named, printable
from harness.cli import NOT_OK, OK, Mistake, options, say, theory_options
from harness.cli.options import stored
from harness.config import Model
from harness.config.plan import Cell
from harness.config.variants import InlineShape, safe_name
from harness.models import check, layout, locate
from harness.models.locate import WeightsError, read
from harness.models.make import FULL_TYPES
from harness.recommend import answer, commands, examples, outcomes
from harness.recommend.answer import Choice
from harness.recommend.candidates import Subject
from harness.recommend.commands import Source
from harness.recommend.places import Place, place_of
from harness.recommend.traits import Example
from harness.records.kinds import Record
from harness.theory import base_shapes, machine_names, names
from harness.theory.decoder import Decoder, dense_fields
from harness.theory.known_models import Described, config_of
from harness.theory.known_models import Known as KnownModels
from harness.theory.machines import MACHINES, Figure, Machine, memory_words
from harness.theory.memory_choices import released_in
from harness.theory.names import NotUnderstood

# The inputs of a recommendation: the model, the machine, and the records to predict from.


THIS = "this"
INTERFACES = {"amd": "hip", "apple": "metal", "intel": "vulkan"}  # of GPUs that are not NVIDIA's, by vendor
CPU_KINDS = {"arm": "Arm", "risc-v": "RISC-V", "no-avx2": "x86 without AVX2"}  # by --kind
GPU_BYTES_PER_S = 150e9  # a machine of which only memory and bandwidth are known is a GPU from here on


@dataclass(frozen=True)
class Known:
    """What was measured here: examples to predict from, and scores of texts."""

    examples: Sequence[Example]
    scores: Sequence[Record]


@dataclass(frozen=True)
class Given:
    """A model, and where its weights come from. `fingerprint`: of these; null where they are not here."""

    subject: Subject
    source: Source
    fingerprint: str | None = None

    def runs(self, cell: Cell) -> bool:
        """Whether the weights can be converted for the cell: a GGUF is for stacks of that format alone."""
        return self.source.gguf is None or cell.weights_format == "gguf"


def model_from(given: str) -> Given:
    """A model by its name or its files. Raises Mistake."""
    is_shipped = given in data.weights_names() and not Path(given).exists()
    if not is_shipped and (known := theory_options.model_of(given, KnownModels())):
        is_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", given) and not base_shapes.formats(given)
        hub = given if is_hub else None
        named = Subject(_model(known.name, known.made), known.made)
        is_made = known.made.is_dense or _is_made(config_of(known.name))
        name = safe_name(given.rpartition("/")[2]) if known.note else None
        row: dict[str, object] | None = {"shape": known.name} if is_made else None
        return Given(named, Source(name or known.name, hub, row=row))
    path = data.weights(given) if is_shipped else Path(given)
    try:
        found = read(path)
        if found.format == "gguf":
            path = found.path  # of a folder
        quant = found.quant if found.format == "gguf" else None
    except WeightsError as wrong:
        raise Mistake(printable(str(wrong))) from wrong
    if found.decoder is None:
        raise Mistake(
            f"{printable(given)}: the layers of {found.architecture or 'this architecture'} are not known"
        )
    if found.format == "hf" and found.quantization:
        loads = check.loaded_by(found.stored, found.packing) if found.stored else ""
        raise Mistake(
            f"{printable(given)}: is {found.quantization}; recommend compares types that are made of 16-bit"
            " weights: give those, or see this one's limits with harness theory"
            + (f" ({loads}: measure it with harness run)" if loads else "")
        )
    if found.format == "config" and found.quantization and not released_in(found.decoder):
        say(f"{printable(given)}: is {found.quantization}; these types are made of its 16-bit weights")
    made, whole, fingerprint = found.decoder, str(path.absolute()), None
    kept = quant if quant and quant not in FULL_TYPES else None
    if path.name == "config.json":
        name = path.absolute().parent.name
        row = {"shape": spelled_out(made)} if made.is_dense else None
        if not made.is_dense and _is_made(object_of(path, bounds.CONFIG_JSON_BYTES)):
            row = {"shape": whole}
        source = Source(name)
    else:
        name = path.stem if path.is_file() else path.absolute().name
        row = {"weights": given if is_shipped else whole}
        source = Source(name, None if quant else whole, whole if quant else None, quant)
        fingerprint = _fingerprint(path)
    name = safe_name(name) or "model"
    subject = Subject(_model(name, made), made, kept, found.tensors if kept else ())
    return Given(subject, replace(source, row=row and {"name": name, **row}), fingerprint)


def _fingerprint(path: Path) -> str | None:
    """The fingerprint of the weights in a path; null where no stack loads them."""
    try:
        return locate.local(path).fingerprint
    except WeightsError:
        return None


def _is_made(config: dict[str, object]) -> bool:
    """Whether weights of a model that is not dense can be made for all stacks."""
    try:
        layout.of(config)
        layout.check_gguf(config)
    except layout.NoLayout:
        return False
    return True


def _model(name: str, made: Decoder) -> Model:
    """A model to plan with; one that is not dense brings its layers with its weights."""
    return Model(name=name, described=Described(made) if made.is_dense else None)


def spelled_out(made: Decoder) -> dict[str, object]:
    """A dense model as a config spells its shape out."""
    known = dense_fields(made) or {}
    return {key: known[key] for key in InlineShape.model_fields}


def place_from(arguments: argparse.Namespace) -> Place:
    """The machine. Raises Mistake."""
    found = _place(arguments)
    found = replace(found, device=found.device.reserving(options.reserved(arguments.reserve)))
    host = _host(arguments, f"the CPU of {found.name}", SERVERS if found.generation == "HBM" else DESKTOPS)
    if host and not found.takes_host:
        kind = "a CPU" if found.device.family == "cpu" else "a GPU that shares its CPU's memory"
        raise Mistake(
            f"{found.name} is {kind}; --host-memory and --host-bandwidth are of the CPU next to a GPU"
        )
    return replace(found, host=host or found.host)


DESKTOPS = "desktop", ("ryzen-7950x", "ryzen-9950x", "core-ultra-9-285k", "core-i9-14900k")
SERVERS = "server", ("epyc-9654", "epyc-9755", "xeon-6980p")


USUAL_HOST_GIB = 64


def with_usual_host(arguments: argparse.Namespace, place: Place) -> Place:
    """A GPU with a usual host, for a model that does not fit it whole."""
    say(
        f"nothing fits {place.name} whole: a host with {USUAL_HOST_GIB} GB of main memory is assumed for the"
        " rest; --host-memory SIZE gives yours"
    )
    arguments.host_memory = USUAL_HOST_GIB
    kind = SERVERS if place.generation == "HBM" else DESKTOPS
    return replace(place, host=_host(arguments, f"the CPU of {place.name}", kind))


def _host(arguments: argparse.Namespace, name: str, kind: tuple[str, Sequence[str]]) -> Place | None:
    """The given CPU next to a GPU, without a bandwidth with the median of known CPUs of its kind; null: not
    given. Raises Mistake."""
    memory, bandwidth = arguments.host_memory, arguments.host_bandwidth
    if bandwidth and not memory:
        raise Mistake("--host-bandwidth needs --host-memory")
    if memory and not bandwidth:
        bandwidth = median(MACHINES[each].bandwidth_bytes_per_s for each in kind[1]) / 1e9
        say(
            f"--host-bandwidth is not given: {bandwidth:.1f} GB/s is taken, the median of the {kind[0]} CPUs"
            f" {list_named(kind[1], len(kind[1]))}"
        )
    return memory and place_of(_cpu_of(name, memory, bandwidth), "", machine.default_threads())


def _place(arguments: argparse.Namespace) -> Place:
    threads = machine.default_threads()
    if arguments.machine == THIS and arguments.bandwidth:
        if not arguments.memory:
            raise Mistake(
                "--bandwidth is of a machine that is not known, and needs --memory; this one is measured"
            )
        name = f"a machine of {arguments.bandwidth:g} GB/s"
        return _unknown(arguments, name, threads)
    if arguments.machine == THIS:
        return replace(_limited(_this(threads), arguments.memory), here=True)
    named = printable(arguments.machine)
    try:
        known = options.known()
        several = machine_names.machines(arguments.machine, known, arguments.memory)
    except NotUnderstood as why:
        if not (arguments.memory and arguments.bandwidth) or why.ambiguous:
            sentence = why.sentence("machine", named)
            joint = " Or" if sentence.endswith("?") else "; or"
            hint = (
                "" if why.ambiguous else f"{joint} give --memory and --bandwidth (of a CPU: --memory-speed)"
            )
            raise Mistake(sentence + hint) from why
        return _unknown(arguments, named, threads)
    takes_any_memory = any(each.assumed for each in several.values())
    if arguments.bandwidth:
        several = {name: _with_given(each, named, arguments) for name, each in several.items()}
    name, notes = machine_names.slowest(named, several)
    for sentence in notes:
        say(sentence)
    found = several[name]
    if takes_any_memory:
        return place_of(found, name, threads)
    largest = max(each.memory_bytes for each in machine_names.machines(arguments.machine, known).values())
    if found.memory_bytes > largest:
        raise Mistake(f"{named} has at most {memory_words(largest)}; drop --memory, or give less")
    return place_of(found, name, threads)


def _with_given(known: Machine, named: str, arguments: argparse.Namespace) -> Machine:
    """A known CPU with the bandwidth that is given, or that of the memory that is. Raises Mistake."""
    if arguments.memory_speed:
        return theory_options.with_memory_speed(known, named, arguments.memory_speed, arguments.channels)
    if not known.assumed:
        raise Mistake(f"{named} is known; drop --bandwidth")
    bandwidth = Figure(arguments.bandwidth * 1e9, "given")
    return replace(known, bandwidth=bandwidth, peak_bandwidth=None, assumed="")


def all_places(arguments: argparse.Namespace) -> list[Place]:
    """Every known machine, in every size of memory that it is sold with, and GPUs with the host that is
    given. Raises Mistake."""
    found: dict[str, Machine] = {}
    for name in MACHINES:
        found |= machine_names.machines(name)
    host = _host(arguments, "the CPU of the GPUs", DESKTOPS)
    places = [place_of(each, name, machine.default_threads()) for name, each in found.items()]
    return [replace(each, host=host if each.takes_host else None) for each in places]


def known_subjects(patterns: Sequence[str]) -> list[Subject]:
    """The known models whose names match; without patterns all that were released. An unknown pattern is
    reported. Raises Mistake where none is known."""
    known = KnownModels()
    matches = {each: _matching(each.lower(), known) for each in patterns}
    sentences = [
        f"--models {printable(each)} matches no known model: "
        + options.unknown("model", each.strip("*"), known, "see harness theory --list-models")
        for each, found in matches.items()
        if not found
    ]
    if sentences and len(sentences) == len(matches):
        raise Mistake("; ".join(sentences))
    for sentence in sentences:
        say(sentence)
    chosen = {name for found in matches.values() for name in found}
    return [
        Subject(Model(name=name), known[name])
        for name in known
        if name in chosen or (not patterns and not _MADE_UP.search(name))
    ]


_MADE_UP = re.compile("^tiny-|-mha$")  # the project's own


def _matching(pattern: str, known: KnownModels) -> list[str]:
    """By a pattern of known names, of names as Ollama has them (`llama3.1:*`), or by a single name."""
    if found := fnmatch.filter(known, pattern):
        return found
    bare = re.sub("[-:]", "", pattern)
    if "*" in pattern:
        return [name for name in known if fnmatch.fnmatch(name.replace("-", ""), bare)]
    try:
        return [names.named(pattern, known).name]
    except NotUnderstood:
        return []


def _unknown(arguments: argparse.Namespace, name: str, threads: int) -> Place:
    """A machine of which only memory and bandwidth are known: a GPU or a CPU as requested, else by the
    bandwidth."""
    kind, gb_per_s = arguments.kind or (arguments.vendor and "gpu"), arguments.bandwidth
    is_gpu = kind == "gpu" if kind else gb_per_s * 1e9 >= GPU_BYTES_PER_S
    if kind is None:
        taken, other = ("GPU", "cpu") if is_gpu else ("CPU", "gpu")
        say(f"{name} is taken for a {taken}, by its bandwidth (if it is not: --kind {other})")
    unknown = replace(_cpu_of(name, arguments.memory, gb_per_s), cpu_kind=CPU_KINDS.get(kind, ""))
    if not is_gpu:
        return place_of(unknown, name, threads)
    if arguments.vendor in INTERFACES:
        return replace(
            place_of(replace(unknown, gpu_api=INTERFACES[arguments.vendor]), name, threads),
            unified=arguments.vendor == "apple",
        )
    place = place_of(replace(unknown, compute_capability=(8, 6)), name, threads)
    return replace(place, generation="", maker="NVIDIA" if arguments.vendor else "")


def _cpu_of(name: str, memory_gib: float, gb_per_s: float) -> Machine:
    memory, bandwidth = Figure(int(memory_gib * 2**30), "given"), Figure(gb_per_s * 1e9, "given")
    return Machine(name=name, memory=memory, bandwidth=bandwidth, rates={}, rate="")


def _this(threads: int) -> Place:
    """The first GPU of this machine, by its data sheet; without one its CPU, as measured here."""
    from harness.cli.doctor import this_cpu  # with all that a campaign needs

    gpus = visible_gpus()
    if not gpus:
        return place_of(this_cpu(), "this machine", threads)
    gpu: Gpu = gpus[0]
    sheet = machine_names.of_gpu(gpu["name"] or "", gpu["memory_bytes"])
    if sheet is None:
        name = gpu["name"] or "this GPU"
        raise Mistake(f"{name} has no known data sheet; give --machine, --memory and --bandwidth")
    place = place_of(sheet, gpu["name"] or sheet.name, threads)
    return replace(place, host=place_of(this_cpu(), "this machine", threads)) if place.takes_host else place


def _limited(place: Place, memory_gib: float | None) -> Place:
    """Limit a place to this memory. Raises Mistake if the place has less."""
    if memory_gib is None:
        return place
    limit = int(memory_gib * 2**30)
    has = place.device.memory_bytes or 0
    if limit > has:
        raise Mistake(f"--memory {memory_gib:g}GB is more than this machine's {memory_words(has)}")
    return replace(place, device=replace(place.device, memory_bytes=limit, reserve_bytes=0))


def known_models(arguments: argparse.Namespace, devices: Sequence[Place]) -> Known:
    """The user's own records, to predict for these devices. Raises Mistake and ResultsError."""
    folder: Path = arguments.results
    if folder.exists() and not folder.is_dir():
        raise Mistake(f"{printable(str(folder))} is no folder of results")
    mine = [*stored(folder)] if folder.is_dir() else []
    if not mine:
        return Known((), ())
    from harness.dataset.study import load_study  # with all verdicts, and scipy

    # This machine's own bandwidth is measured each time; a share of it must mean the same in all.
    bandwidths = {each.name: each.bytes_per_s for each in devices}
    found = examples.of_own(load_study(mine), bandwidths)
    return Known(found, [each.record for each in mine if each.record["kind"] == "scored"])


# `harness recommend --prove`: measure the first of a ranking, and keep how far off the predictions were.


def prove(arguments: argparse.Namespace, given: Given, choices: Sequence[Choice]) -> None:
    """Measure these variants with a short decode and windows up to the context, and append each prediction
    with its outcome. Raises Mistake."""
    from harness.cli import main
    from harness.dataset.study import load_study

    assert given.source.row is not None  # checked before
    folder = arguments.results / data.RECOMMENDED
    config = folder / f"{given.subject.model.name}.yaml"
    device = "cpu" if choices[0].candidate.traits.family == "cpu" else "cuda"
    cells = [choice.candidate.cell for choice in choices]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(commands.config_text(cells, given.source.row, device, arguments.context))
    except OSError as refusal:
        raise Mistake(f"{config}: cannot be written: {refusal.strerror}") from refusal
    if main(["run", str(config), "-o", str(arguments.results)]) not in (OK, NOT_OK):
        raise Mistake(f"{config} could not be measured")
    here = machine.facts()["slug"]
    rows = load_study([*stored(arguments.results)]).cells
    windows = [row for row in rows if row["depths"] and row["machine"] == here]
    for choice in choices:
        outcome = outcomes.outcome_of_choice(choice, windows, arguments.context)
        say(outcomes.outcome_sentence(choice, outcome))
        if outcome and choice.basis != answer.MEASURED:  # that was no prediction
            outcomes.keep_outcome(arguments.results, outcome)
