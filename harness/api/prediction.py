"""Predictions for the variants of a model on a machine: what is asked, and the records to predict from."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from typing_extensions import TypedDict

from harness import machine
from harness.api.inputs import check_stacks, known_machines, reserved, stored
from harness.api.theory import THIS, named_model, with_memory_speed
from harness.base import bounds, data
from harness.base.files import Mistake, object_of
from harness.base.nvml import Gpu, visible_gpus
from harness.base.text import list_named, printable, say, unknown
from harness.config import Model
from harness.config.experiment import Scalar
from harness.config.form import InlineShape
from harness.config.model_rows import safe_name
from harness.config.plan import Cell
from harness.models import check, layout, locate
from harness.models.locate import WeightsError, read
from harness.models.make import FULL_TYPES
from harness.recommend import answer, candidates, examples, quality_loss
from harness.recommend.answer import Choice
from harness.recommend.candidates import Candidate, Subject
from harness.recommend.commands import Source
from harness.recommend.places import Place, place_of
from harness.recommend.traits import Example, Range
from harness.records.kinds import Record
from harness.stacks import build
from harness.theory import base_shapes, machine_names, names
from harness.theory.decoder import Decoder, dense_fields
from harness.theory.known_models import Described, config_of
from harness.theory.known_models import Known as KnownModels
from harness.theory.machines import MACHINES, Figure, Machine, memory_words
from harness.theory.memory_choices import released_in
from harness.theory.names import NotUnderstood

LEAST_CONTEXT, USUAL_CONTEXT = 2, 8192
INTERFACES = {"amd": "hip", "apple": "metal", "intel": "vulkan"}  # of GPUs that are not NVIDIA's, by vendor
CPU_KINDS = {"arm": "Arm", "risc-v": "RISC-V", "no-avx2": "x86 without AVX2"}  # by --kind
GPU_BYTES_PER_S = 150e9  # a machine of which only memory and bandwidth are known is a GPU from here on


@dataclass(frozen=True)
class OnMachine:
    """A machine that is asked about: `this`, or by its name, or a stranger of which the rest is known.
    `memory`, `host_memory`: GiB, as sold; `bandwidth`, `host_bandwidth`: GB/s; `memory_speed`: transfers/s,
    on so many `channels`; `host_*`: of the CPU next to a GPU. `reserve`: a size with its unit."""

    machine: str = THIS
    memory: float | None = None
    bandwidth: float | None = None
    memory_speed: float | None = None
    channels: int | None = None
    kind: str | None = None
    vendor: str | None = None
    reserve: str | None = None
    host_memory: float | None = None
    host_bandwidth: float | None = None


@dataclass(frozen=True)
class Known:
    """What was measured here: examples to predict from, and scores of texts."""

    examples: Sequence[Example]
    scores: Sequence[Record]


@dataclass(frozen=True)
class Given:
    """A model, and where its weights come from. `fingerprint`: of these; None where they are not here."""

    subject: Subject
    source: Source
    fingerprint: str | None = None

    def runs(self, cell: Cell) -> bool:
        """Whether the weights can be converted for the cell: a GGUF is for stacks of that format alone."""
        return self.source.gguf is None or cell.weights_format == "gguf"


def model_from(given: str) -> Given:
    """A model by its name or its files. Raises Mistake."""
    is_shipped = given in data.weights_names() and not Path(given).exists()
    if not is_shipped and (known := named_model(given, KnownModels())):
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
    """The fingerprint of the weights in a path; None where no stack loads them."""
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


def place_from(asked: OnMachine) -> Place:
    """The machine. Raises Mistake."""
    place = _place(asked)
    place = replace(place, device=place.device.reserving(reserved(asked.reserve)))
    host = _host(asked, f"the CPU of {place.name}", SERVERS if place.generation == "HBM" else DESKTOPS)
    if host and not place.takes_host:
        kind = "a CPU" if place.device.family == "cpu" else "a GPU that shares its CPU's memory"
        raise Mistake(
            f"{place.name} is {kind}; --host-memory and --host-bandwidth are of the CPU next to a GPU"
        )
    return replace(place, host=host or place.host)


DESKTOPS = "desktop", ("ryzen-7950x", "ryzen-9950x", "core-ultra-9-285k", "core-i9-14900k")
SERVERS = "server", ("epyc-9654", "epyc-9755", "xeon-6980p")


USUAL_HOST_GIB = 64


def _with_usual_host(place: Place) -> Place:
    """A GPU with a usual host, for a model that does not fit it whole."""
    say(
        f"nothing fits {place.name} whole: a host with {USUAL_HOST_GIB} GB of main memory is assumed for the"
        " rest; --host-memory SIZE gives yours"
    )
    kind = SERVERS if place.generation == "HBM" else DESKTOPS
    return replace(place, host=_host(OnMachine(host_memory=USUAL_HOST_GIB), f"the CPU of {place.name}", kind))


def _host(asked: OnMachine, name: str, kind: tuple[str, Sequence[str]]) -> Place | None:
    """The given CPU next to a GPU, without a bandwidth with the median of known CPUs of its kind; None: not
    given. Raises Mistake."""
    memory, bandwidth = asked.host_memory, asked.host_bandwidth
    if bandwidth and not memory:
        raise Mistake("--host-bandwidth needs --host-memory")
    if memory and not bandwidth:
        bandwidth = median(MACHINES[cpu].bandwidth_bytes_per_s for cpu in kind[1]) / 1e9
        say(
            f"--host-bandwidth is not given: {bandwidth:.1f} GB/s is taken, the median of the {kind[0]} CPUs"
            f" {list_named(kind[1], len(kind[1]))}"
        )
    if not (memory and bandwidth):
        return None
    return place_of(_cpu_of(name, memory, bandwidth), "", machine.default_threads())


def _place(asked: OnMachine) -> Place:
    threads = machine.default_threads()
    if asked.machine == THIS and asked.bandwidth:
        if not asked.memory:
            raise Mistake(
                "--bandwidth is of a machine that is not known, and needs --memory; this one is measured"
            )
        name = f"a machine of {asked.bandwidth:g} GB/s"
        return _unknown(asked, name, threads)
    if asked.machine == THIS:
        return replace(_limited(_this(threads), asked.memory), here=True)
    named = printable(asked.machine)
    try:
        known = known_machines()
        several = machine_names.machines(asked.machine, known, asked.memory)
    except NotUnderstood as why:
        if not (asked.memory and asked.bandwidth) or why.ambiguous:
            sentence = why.sentence("machine", named)
            joint = " Or" if sentence.endswith("?") else "; or"
            hint = (
                "" if why.ambiguous else f"{joint} give --memory and --bandwidth (of a CPU: --memory-speed)"
            )
            raise Mistake(sentence + hint) from why
        return _unknown(asked, named, threads)
    takes_any_memory = any(each.assumed for each in several.values())
    if asked.bandwidth:
        several = {name: _with_given(known_one, named, asked) for name, known_one in several.items()}
    name, notes = machine_names.slowest(named, several)
    for sentence in notes:
        say(sentence)
    found = several[name]
    if takes_any_memory:
        return place_of(found, name, threads)
    largest = max(each.memory_bytes for each in machine_names.machines(asked.machine, known).values())
    if found.memory_bytes > largest:
        raise Mistake(f"{named} has at most {memory_words(largest)}; drop --memory, or give less")
    return place_of(found, name, threads)


def _with_given(known: Machine, named: str, asked: OnMachine) -> Machine:
    """A known CPU with the bandwidth that is given, or that of the memory that is. Raises Mistake."""
    if asked.memory_speed:
        return with_memory_speed(known, named, asked.memory_speed, asked.channels)
    if not known.assumed:
        raise Mistake(f"{named} is known; drop --bandwidth")
    bandwidth = Figure((asked.bandwidth or 0.0) * 1e9, "given")
    return replace(known, bandwidth=bandwidth, peak_bandwidth=None, assumed="")


def all_places(asked: OnMachine) -> list[Place]:
    """Every known machine, in every size of memory that it is sold with, and GPUs with the host that is
    given. Raises Mistake."""
    found: dict[str, Machine] = {}
    for name in MACHINES:
        found |= machine_names.machines(name)
    host = _host(asked, "the CPU of the GPUs", DESKTOPS)
    places = [place_of(each, name, machine.default_threads()) for name, each in found.items()]
    return [replace(each, host=host if each.takes_host else None) for each in places]


def known_subjects(patterns: Sequence[str]) -> list[Subject]:
    """The known models whose names match; without patterns all that were released. An unknown pattern is
    reported. Raises Mistake where none is known."""
    known = KnownModels()
    matches = {each: _matching(each.lower(), known) for each in patterns}
    sentences = [
        f"--models {printable(each)} matches no known model: "
        + unknown("model", each.strip("*"), known, "see harness theory --list-models")
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


def _unknown(asked: OnMachine, name: str, threads: int) -> Place:
    """A machine of which only memory and bandwidth are known: a GPU or a CPU as requested, else by the
    bandwidth."""
    kind, vendor, gb_per_s = asked.kind or (asked.vendor and "gpu"), asked.vendor, asked.bandwidth or 0.0
    is_gpu = kind == "gpu" if kind else gb_per_s * 1e9 >= GPU_BYTES_PER_S
    if kind is None:
        taken, other = ("GPU", "cpu") if is_gpu else ("CPU", "gpu")
        say(f"{name} is taken for a {taken}, by its bandwidth (if it is not: --kind {other})")
    stranger = replace(_cpu_of(name, asked.memory or 0.0, gb_per_s), cpu_kind=CPU_KINDS.get(kind or "", ""))
    if not is_gpu:
        return place_of(stranger, name, threads)
    if vendor in INTERFACES:
        with_api = replace(stranger, gpu_api=INTERFACES[vendor])
        return replace(place_of(with_api, name, threads), unified=vendor == "apple")
    place = place_of(replace(stranger, compute_capability=(8, 6)), name, threads)
    return replace(place, generation="", maker="NVIDIA" if vendor else "")


def _cpu_of(name: str, memory_gib: float, gb_per_s: float) -> Machine:
    memory, bandwidth = Figure(int(memory_gib * 2**30), "given"), Figure(gb_per_s * 1e9, "given")
    return Machine(name=name, memory=memory, bandwidth=bandwidth, rates={}, rate="")


def _this(threads: int) -> Place:
    """The first GPU of this machine, by its data sheet; without one its CPU, as measured here."""
    from harness.api.this_machine import this_cpu  # with all that a campaign needs

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


def measured_here(folder: Path, devices: Sequence[Place]) -> Known:
    """The records of a results folder, to predict for these devices. Raises Mistake and ResultsError."""
    if folder.exists() and not folder.is_dir():
        raise Mistake(f"{printable(str(folder))} is not a results folder")
    mine = [*stored(folder)] if folder.is_dir() else []
    if not mine:
        return Known((), ())
    from harness.dataset.study import load_study  # with all verdicts, and scipy

    # This machine's own bandwidth is measured each time; a share of it must mean the same in all.
    bandwidths = {each.name: each.bytes_per_s for each in devices}
    found = examples.of_own(load_study(mine), bandwidths)
    return Known(found, [each.record for each in mine if each.record["kind"] == "scored"])


@dataclass(frozen=True)
class Variants:
    """The variants of a model that a machine could run. `known`: what was measured here."""

    given: Given
    place: Place
    context: int
    known: Known
    candidates: Sequence[Candidate]

    def choices(self) -> list[Choice]:
        """Their predictions."""
        name = self.given.subject.model.name
        scored = quality_loss.measured_quality(self.known.scores, name, self.given.fingerprint)
        of_quality = quality_loss.known_quality(quality_loss.published_quality(), name, scored)
        return answer.choices(self.candidates, self.known.examples, self.context, of_quality)

    def measured_again(self, results: Path) -> Variants:
        """The same, with the records that have come since."""
        return replace(self, known=measured_here(results, self.place.devices))


def usual_context(made: Decoder) -> int:
    return max(LEAST_CONTEXT, min(USUAL_CONTEXT, made.context or USUAL_CONTEXT))


def variants(given: Given, asked: OnMachine, context: int, stacks: Sequence[str], results: Path) -> Variants:
    """The variants of a model on a machine; a GPU that is too small gets a usual host. `stacks`: only these;
    empty: those that are maintained, installed, or measured. Raises Mistake and ResultsError."""
    place = place_from(asked)
    offered = candidates.candidates(given.subject, place, context, stacks)
    if place.takes_host and not place.host and not any(candidate.fits for candidate in offered):
        place = _with_usual_host(place)
        offered = candidates.candidates(given.subject, place, context, stacks)
    known = measured_here(results, place.devices)
    offered = [
        candidate
        for candidate in offered
        if given.runs(candidate.cell) and is_current(candidate, stacks, known.examples)
    ]
    if not offered:
        of_those = " of those" if stacks else ""
        raise Mistake(f"no stack{of_those} runs {given.subject.model.name} on {place.name}")
    return Variants(given, place, context, known, offered)


def is_current(candidate: Candidate, asked: Sequence[str], measured: Sequence[Example]) -> bool:
    """Whether its stack's package is maintained, or the stack is asked for, installed, or measured there."""
    header = candidate.cell.header
    if not header.successor or header.stack in asked:
        return True
    installed = any(build.find(environment) for environment in header.environments.values())
    return installed or answer.basis(candidate, measured) in (answer.MEASURED, answer.HERE_TOO)


class Prediction(TypedDict):
    """A variant of a model on a machine. Speeds and times are `[value, low, high]` with the ends of an
    interval of 90%; None: not predicted. `tokens_per_s`: of decode at zero context; `ttft_*_ms`: the time to
    the first token of a prompt. `gpu_layers`, `n_cpu_moe`, `host_memory_bytes`: of a model in two memories.
    `quality_loss`: nats of perplexity; `kld_mean`: against its 16-bit weights. `basis`: the evidence."""

    name: str
    stack: str
    variant: str
    options: Mapping[str, Scalar]
    fits: bool
    memory_bytes: float
    gpu_layers: int | None
    n_cpu_moe: int | None
    host_memory_bytes: float | None
    available_bytes: float
    weight_bytes: float
    bits_per_weight: float
    longest_context: int | None
    tokens_per_s: list[float]
    tokens_per_s_at_context: list[float]
    ttft_2048_ms: list[float] | None
    ttft_context_ms: list[float] | None
    quality_loss: float | None
    kld_mean: float | None
    kld_mean_ci95: Sequence[float] | None
    quality_source: str | None
    basis: str


def prediction(choice: Choice) -> Prediction:
    candidate, split, quality = choice.candidate, choice.candidate.split, choice.quality

    def ends(figure: Range) -> list[float]:
        return [figure.value, figure.low, figure.high]

    return {
        "name": choice.title,
        "stack": candidate.cell.variant.stack,
        "variant": candidate.cell.variant.name,
        "options": candidate.cell.variant.options,
        "fits": candidate.fits,
        "memory_bytes": candidate.memory_bytes,
        "gpu_layers": split.gpu_layers if split else None,
        "n_cpu_moe": split.n_cpu_moe or None if split else None,
        "host_memory_bytes": split.memory_bytes if split else None,
        "available_bytes": candidate.available_bytes,
        "weight_bytes": candidate.weight_bytes,
        "bits_per_weight": candidate.bits,
        "longest_context": candidate.longest,
        "tokens_per_s": ends(choice.start),
        "tokens_per_s_at_context": ends(choice.deep),
        "ttft_2048_ms": ends(choice.first_short) if choice.first_short else None,
        "ttft_context_ms": ends(choice.first_deep) if choice.first_deep else None,
        "quality_loss": quality.loss if quality else None,
        "kld_mean": quality.kld if quality else None,
        "kld_mean_ci95": quality.kld_ci95 if quality else None,
        "quality_source": quality.source if quality else None,
        "basis": choice.basis,
    }


def predict(
    model: str,
    machine: str = THIS,
    *,
    context: int | None = None,
    memory: float | None = None,
    stacks: str | Sequence[str] = (),
    results: str | Path = data.RESULTS,
) -> list[Prediction]:
    """Speed, memory and quality of every variant of a model on a machine, before anything runs; those that
    do not fit have `fits` False. `harness recommend --json` ranks the same.

    Args:
        model: a known name, a repository of the hub, a GGUF, a checkpoint's folder, or a config.json.
        machine: a known name, or `this`, whose CPU is measured once (about 5 s) and kept.
        context: tokens of context; by default 8,192, or those that the model was trained on if fewer.
        memory: GiB of the machine's memory to use, as sold.
        stacks: only these.
        results: the folder with your own records, which predictions go by first.

    Raises Mistake for what is not known or has no variant there, ResultsError and ConfigError.
    """
    names = [stacks] if isinstance(stacks, str) else [*stacks]
    check_stacks(names)
    given = model_from(model)
    if context is not None and context < LEAST_CONTEXT:
        raise Mistake(f"context {context}: a prompt and a token need {LEAST_CONTEXT}")
    context = context or usual_context(given.subject.made)
    asked = OnMachine(machine, memory)
    return [prediction(choice) for choice in variants(given, asked, context, names, Path(results)).choices()]
