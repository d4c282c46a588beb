"""An experiment: every key of a config, and its type. Frozen, with every matrix expanded; building one reads
nothing."""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    field_validator,
)

from harness.config.base import Frozen, Plain, Tokens
from harness.config.sizes import SIZE, size_bytes
from harness.config.workloads import Decode, Workload
from harness.theory.decoder import Decoder
from harness.theory.known_models import Described
from harness.theory.machines import HEADLESS

Scalar = str | int | float | bool

NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$"
DEVICE = r"^(cpu|cuda|cuda:[0-9]{1,3}|metal|vulkan|hip)$"
_PART = r"(?:[A-Za-z0-9]|\{[a-z]+\})(?:[A-Za-z0-9._-]|\{[a-z]+\})*"
REPO = f"^{_PART}/{_PART}$"
PATTERNS = {
    NAME: "must be at most 64 of A-Z a-z 0-9 . _ - and begin with a letter, a digit or _ (it names a folder)",
    DEVICE: "must be cpu, cuda, cuda:N, metal, vulkan or hip",
    REPO: "must be org/name",
}
Name = Annotated[str, Field(pattern=NAME)]

# Seeds go into 64-bit generators.
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
CPU_WARMUP_S, GPU_WARMUP_S = 1.0, 2.0


class Warmup(Frozen):
    """Decode before timing until a window agrees with the one before and with the one four before."""

    window_tokens: int = Field(default=16, ge=2, le=100_000)
    """Tokens in a window."""
    max_windows: int = Field(default=20, ge=2, le=10_000)
    """Windows after which warm-up gives up; the record notes it."""
    tolerance: float = Field(default=0.02, gt=0, lt=1)
    """Two windows agree when their median latencies differ by at most this share."""
    at_least_s: float | None = Field(default=None, ge=0, le=86_400)
    """Shortest warm-up in seconds; default: 1 on a CPU, 2 on a GPU, whose clocks rise more slowly."""

    def shortest_s(self, device: str) -> float:
        usual = CPU_WARMUP_S if device == "cpu" else GPU_WARMUP_S
        return usual if self.at_least_s is None else self.at_least_s

    def on(self, device: str) -> dict[str, object]:
        """The settings of a warm-up on a device, for the worker."""
        return self.model_dump() | {"at_least_s": self.shortest_s(device)}


class CoolDown(Frozen):
    """Wait before each repeat until the device has cooled down, up to a time limit."""

    to_c: float = Field(ge=0, le=120)
    """Degrees Celsius at which a repeat may begin."""
    at_most_s: float = Field(default=300, gt=0, le=86_400)
    """Longest wait in seconds; then the repeat starts anyway, and its record notes it."""


class Protocol(Frozen):
    """How every cell is measured."""

    prompt_tokens: Tokens = 25
    """Tokens of prompt, the same ids in every stack."""
    new_tokens: Tokens = 128
    """Tokens to decode; end of text is ignored. W needs 2,049; the published study has 9,975."""
    repeats: int = Field(default=3, ge=1, le=1000)
    """Processes per cell, interleaved with other cells."""
    retry_disturbed: int = Field(default=2, ge=0, le=100)
    """How often a disturbed repeat is measured again, at the end of its round."""
    order_seed: Seed = 0
    """Seed of the random order of the runs."""
    # poll() takes its timeout in 31-bit milliseconds.
    timeout_s: float = Field(default=7200, gt=0, le=1_000_000)
    """Time limit of one run in seconds, loading included."""
    threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads in every stack; by default one for each usable physical core that is no efficiency core."""
    warmup: Warmup = Warmup()
    """Warm-up before timing."""
    measure_bandwidth: bool = True
    """Measure the device's read bandwidth between the cells."""
    measure_matrix_rate: bool = False
    """Measure the device's matrix rate (FLOP/s) once, before the first cell."""
    check_weights: bool = False
    """Check every variant's logits against the 16-bit reference before timing."""
    sample_interval_ms: int = Field(default=200, ge=100, le=60_000)
    """Milliseconds between memory samples."""
    cool_down: CoolDown | None = None
    """Before each repeat wait until the device has cooled down; by default not at all."""
    memory_budget: str | None = Field(default=None, pattern=SIZE)
    """Memory limit of a worker on the CPU, weights included, e.g. 2GiB; by default no limit."""
    reserve: str | None = Field(default=None, pattern=f"^(0|headless)$|{SIZE}")
    """Memory of the device that no model can use, for forecasts: 300MiB, 0, or headless (no display is on the
    card); by default what is usual for the device."""

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _has_a_unit(cls, given: Any) -> Any:
        if given is not None and not isinstance(given, str):
            raise ValueError("give a size with a unit, as in 2GiB or 1.5GB")
        if given is not None:
            size_bytes(given)
        return given

    @field_validator("reserve", mode="before")
    @classmethod
    def _is_reserve(cls, given: Any) -> Any:
        if given is None or given in ("headless", "0", 0):
            return None if given is None else str(given)
        if not isinstance(given, str):
            raise ValueError("give a size with a unit, as in 300MiB, 0, or headless")
        size_bytes(given)
        return given

    @property
    def reserved(self) -> float | str | None:
        """Bytes, `headless`, or null."""
        if self.reserve in (None, HEADLESS):
            return self.reserve
        return 0.0 if self.reserve == "0" else float(size_bytes(str(self.reserve)))

    @property
    def memory_budget_bytes(self) -> int | None:
        return None if self.memory_budget is None else size_bytes(self.memory_budget)


class Weights(Frozen):
    """Where weights come from. `path` (absolute), `repo` and `file` may contain `{quant}` and `{bits}`. A
    `repo` without `file` means its checkpoint. `served`: a server has them."""

    kind: Literal["synthetic", "path", "hub", "served"] = "synthetic"
    seed: Seed = 0
    path: str | None = None
    repo: str | None = None
    file: str | None = None
    revision: str | None = None

    def filled(self, quant: str | None, bits: int | None) -> Weights:
        """Replace `{quant}` and `{bits}` by the variant's values; None leaves a placeholder as it is."""
        known = {"{quant}": quant, "{bits}": bits}
        found: dict[str, str] = {}
        for key in ("path", "repo", "file"):
            text = getattr(self, key)
            for placeholder, value in known.items():
                if text is not None and value is not None:
                    text = text.replace(placeholder, str(value))
            found[key] = text
        return self.model_copy(update=found)


class Model(Frozen):
    """A model to measure. `described` is None only where the weights bring their own layers. `weights`: for
    stacks of all formats; or, with `of_format`, the first of those: by format, or by a GGUF's type. `where`:
    globs of a fleet's devices."""

    name: Name
    described: Described | None = None
    weights: Weights = Weights()
    of_format: dict[str, Weights] = Field(default={})
    where: tuple[str, ...] = ("*",)

    @property
    def made(self) -> Decoder | None:
        """The model's layers; None where only the weights have them."""
        return self.described.decoder if self.described else None

    def weights_for(self, form: str, quant: str | None = None) -> Weights | None:
        """The weights for a stack of this format (gguf, hf, gptq or awq); None: it could load none of these.
        `quant`: the type of a GGUF, which may have a file of its own.

        GGUF files are converted from a checkpoint, and synthetic weights are packed.
        """
        if not self.of_format:
            return self.weights
        if form == "gguf" and quant in self.of_format:
            return self.of_format[quant]
        if form in self.of_format:
            return self.of_format[form]
        stored = self.of_format.get("hf")
        return stored if stored and (form == "gguf" or stored.kind == "synthetic") else None


class Variant(Frozen):
    """One way to run a model: a stack, and the options explicitly given, one value each."""

    stack: str
    name: str
    options: dict[str, Scalar] = Field(default={})
    models: tuple[str, ...] = ("*",)
    """Globs: the models this variant is for."""
    where: tuple[str, ...] = ("*",)
    """Globs: the devices of a fleet that it is for."""

    def fits(self, model: Model) -> bool:
        return any(fnmatchcase(model.name, glob) for glob in self.models)


class Exclude(Frozen):
    """Combinations to leave out: globs of names and of workloads' kinds, and for each option the values
    explicitly given."""

    model: str = "*"
    stack: str = "*"
    variant: str = "*"
    workload: str = "*"
    options: dict[str, tuple[Scalar, ...]] = Field(default={})

    def matches(self, model: Model, variant: Variant, workload: Workload) -> bool:
        return (
            fnmatchcase(model.name, self.model)
            and fnmatchcase(workload.kind, self.workload)
            and fnmatchcase(variant.stack, self.stack)
            and fnmatchcase(variant.name, self.variant)
            and all(
                any(_same(variant.options.get(key), value) for value in values)
                for key, values in self.options.items()
            )
        )


class Experiment(Frozen):
    """The config, checked and expanded. `source` is the config after --set, as plain data."""

    name: Name
    device: str = Field(default="cpu", pattern=DEVICE)
    gpu: str | None = None
    """Run only where the GPU's name contains this."""
    protocol: Protocol = Protocol()
    models: tuple[Model, ...]
    variants: tuple[Variant, ...]
    include: tuple[Variant, ...] = ()
    exclude: tuple[Exclude, ...] = ()
    workloads: tuple[Workload, ...] = (Decode(),)
    source: Plain = Field(default={})

    def combinations(self) -> list[tuple[Model, Variant, Workload]]:
        """All combinations to measure: the matrix without `exclude`, then `include`; lengths resolved."""
        protocol = self.protocol
        workloads = [w.resolved(protocol.prompt_tokens, protocol.new_tokens) for w in self.workloads]
        matrix = product(self.models, self.variants, workloads)
        added = product(self.models, self.include, workloads)
        found = [each for each in matrix if not any(rule.matches(*each) for rule in self.exclude)]
        return [(m, variant, workload) for m, variant, workload in [*found, *added] if variant.fits(m)]


def _same(given: Scalar | None, wanted: Scalar) -> bool:
    # In Python True == 1; in a config they are two values.
    return given == wanted and isinstance(given, bool) == isinstance(wanted, bool)
