"""What an experiment is: typed, frozen, with every matrix expanded. Building one reads nothing."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.theory.shapes import Shape

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
PromptTokens = Annotated[int, Field(ge=1, le=10_000_000)]
NewTokens = Annotated[int, Field(ge=1, le=10_000_000)]


class Frozen(BaseModel):
    """No unknown keys, no conversions ("3" and true are not numbers), no NaN, no changes."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Warmup(Frozen):
    """Decode before timing until two consecutive windows agree."""

    window_tokens: int = Field(default=16, ge=2, le=100_000)
    """Tokens in a window."""
    max_windows: int = Field(default=20, ge=2, le=10_000)
    """Windows after which warm-up gives up; the record says so."""
    tolerance: float = Field(default=0.02, gt=0, lt=1)
    """Two windows agree when their median latencies differ by at most this share."""


class Protocol(Frozen):
    """How every cell is measured."""

    prompt_tokens: PromptTokens = 25
    """Tokens of prompt, the same ids in every stack."""
    new_tokens: NewTokens = 9975
    """Tokens to decode; end of text is ignored."""
    repeats: int = Field(default=3, ge=1, le=1000)
    """Processes per cell, interleaved with other cells."""
    order_seed: Seed = 0
    """Seed of the random order of the runs."""
    # poll() takes its timeout in 31-bit milliseconds.
    timeout_s: float = Field(default=7200, gt=0, le=1_000_000)
    """Seconds one run may take in all, loading included."""
    threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads in every stack; by default the machine's physical cores."""
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


class Decode(Frozen):
    """Decode greedily, token by token. A null length means the protocol's."""

    kind: Literal["decode"] = "decode"
    new_tokens: NewTokens | None = None
    """Tokens to decode, in place of the protocol's."""
    prompt_tokens: PromptTokens | None = None
    """Tokens of prompt, in place of the protocol's."""


class Weights(Frozen):
    """Where weights come from. `path` (absolute), `repo` and `file` may contain `{quant}` and `{bits}`; of a
    `repo` without `file` the checkpoint is meant."""

    kind: Literal["synthetic", "path", "hub"] = "synthetic"
    seed: Seed = 0
    path: str | None = None
    repo: str | None = None
    file: str | None = None
    revision: str | None = None

    def filled(self, quant: str | None, bits: int | None) -> Weights:
        """A variant's, in place of `{quant}` and `{bits}`; what it has not stays as it is."""
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
    """A model to measure. `shape` is null only where the weights bring their own. `weights`: for stacks of
    all formats; or, with `of_format`, the first of those."""

    name: Name
    shape: Shape | None = None
    weights: Weights = Weights()
    of_format: dict[str, Weights] = {}

    def weights_for(self, form: str) -> Weights | None:
        """What a stack of this format (gguf, hf, gptq or awq) is given; null: nothing that it could take.

        GGUF files are converted from a checkpoint, and synthetic weights are packed.
        """
        if not self.of_format:
            return self.weights
        if form in self.of_format:
            return self.of_format[form]
        stored = self.of_format.get("hf")
        return stored if stored and (form == "gguf" or stored.kind == "synthetic") else None


class Variant(Frozen):
    """One way to run a model: a stack, and the options explicitly given, one value each."""

    stack: str
    name: str
    options: dict[str, Scalar] = {}
    models: tuple[str, ...] = ("*",)
    """Globs: the models this variant is for."""

    def fits(self, model: Model) -> bool:
        return any(fnmatchcase(model.name, glob) for glob in self.models)


class Exclude(Frozen):
    """Combinations to leave out: globs of names, and for each option the values explicitly given."""

    model: str = "*"
    stack: str = "*"
    variant: str = "*"
    options: dict[str, tuple[Scalar, ...]] = {}

    def matches(self, model: Model, variant: Variant) -> bool:
        return (
            fnmatchcase(model.name, self.model)
            and fnmatchcase(variant.stack, self.stack)
            and fnmatchcase(variant.name, self.variant)
            and all(
                any(_same(variant.options.get(key), value) for value in values)
                for key, values in self.options.items()
            )
        )


class Experiment(Frozen):
    """What the user wrote, checked and expanded. `source` is the config after --set, as plain data."""

    name: Name
    device: str = Field(default="cpu", pattern=DEVICE)
    gpu: str | None = None
    """Run only where the GPU's name contains this."""
    protocol: Protocol = Protocol()
    models: tuple[Model, ...]
    variants: tuple[Variant, ...]
    include: tuple[Variant, ...] = ()
    exclude: tuple[Exclude, ...] = ()
    workloads: tuple[Decode, ...] = (Decode(),)
    source: dict[str, Any] = {}

    def combinations(self) -> list[tuple[Model, Variant, Decode]]:
        """All there is to measure: the matrix less `exclude`, then `include`; lengths resolved."""
        pairs = [
            (model, variant)
            for model in self.models
            for variant in self.variants
            if variant.fits(model) and not any(rule.matches(model, variant) for rule in self.exclude)
        ]
        pairs += [(model, added) for model in self.models for added in self.include if added.fits(model)]
        workloads = [resolved(workload, self.protocol) for workload in self.workloads]
        return [(model, variant, workload) for model, variant in pairs for workload in workloads]


def resolved(workload: Decode, protocol: Protocol) -> Decode:
    """The workload with the protocol's lengths where it has none of its own."""
    return Decode(
        new_tokens=workload.new_tokens or protocol.new_tokens,
        prompt_tokens=workload.prompt_tokens or protocol.prompt_tokens,
    )


def _same(given: Scalar | None, wanted: Scalar) -> bool:
    # In Python True == 1; in a config they are two values.
    return given == wanted and isinstance(given, bool) == isinstance(wanted, bool)
