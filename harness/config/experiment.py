"""An experiment: every key of a config, and its type."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
)

from harness.base.text import shortened
from harness.theory import quantities
from harness.theory.decoder import Decoder
from harness.theory.known_models import Described
from harness.theory.machines import HEADLESS

# The base of all models of a config, and the types of a count of tokens and of a share.


Plain = dict[str, Any]
"""A mapping of YAML."""
MOST_TOKENS = 10_000_000
PERCENT = r"^[0-9]{1,2}(\.[0-9]{1,4})?%$"


def tokens_of(given: object) -> object:
    """32k as 32,768; all else as it is given."""
    return quantities.token_count(given) or given if isinstance(given, str) else given


Tokens = Annotated[
    int,
    BeforeValidator(tokens_of),
    Field(ge=1, le=MOST_TOKENS),
    WithJsonSchema(
        {
            "type": ["integer", "string"],
            "minimum": 1,
            "maximum": MOST_TOKENS,
            "pattern": quantities.TOKENS,
        }
    ),
]
"""A count of tokens; 32k is 32,768."""


def _share(given: Any) -> Any:
    """0.5% as 0.005."""
    if not isinstance(given, str):
        return given
    if not re.match(PERCENT, given):
        raise ValueError(f'expected a share such as 0.5% or 0.005, got "{shortened(given)}"')
    return float(given[:-1]) / 100


Share = Annotated[
    float,
    BeforeValidator(_share),
    Field(gt=0, lt=1),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                {"type": "string", "pattern": PERCENT},
            ]
        }
    ),
]


class Frozen(BaseModel):
    """No unknown keys, no conversions ("3" and true are not numbers), no NaN, no changes."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def absolute(path: str, folder: Path) -> str:
    """The absolute path of one that is relative to a folder, absolute, or from ~. Raises ValueError."""
    try:
        return str(folder.absolute() / Path(path).expanduser())
    except RuntimeError:
        raise ValueError(f'no such user\'s home folder: "{shortened(path)}"') from None


# Sizes of memory in a config: text with an explicit unit. Pure.


UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = r"^([0-9]{1,15}(?:\.[0-9]{1,9})?) ?(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)$"


def size_bytes(text: str) -> int:
    """Whole bytes of a size such as 2GiB or 1.5 GB. Raises ValueError with the expected form."""
    found = re.fullmatch(SIZE, text)
    if found is None:
        raise ValueError(f"must be a size with a unit, as in 2GiB or 1.5GB (there are {', '.join(UNITS)})")
    size = int(float(found[1]) * UNITS[found[2]])
    if size < 1:
        raise ValueError("must be at least one byte")
    return size


# What is run on each model: the kinds of workloads, their lengths and limits.


_Self = TypeVar("_Self", bound="_Workload")
Capability = Literal["logits", "context", "memory", "users"]


class _Workload(Frozen):
    prompt_tokens: Tokens | None = None
    """Tokens of prompt, in place of the protocol's."""

    timed: ClassVar[Literal["tokens", "rows"] | None] = "tokens"
    """What is timed: each token of one decode, or rows of a table; null: nothing."""
    needs: ClassVar[Capability | None] = None
    """What it needs of a stack besides tokens; null: nothing."""

    @property
    def cuts(self) -> bool:
        """Whether it cuts the KV cache to fewer tokens."""
        return False

    def repeated(self, repeats: int) -> int:
        """How often it runs where the protocol has `repeats`."""
        return repeats

    def resolved(self: _Self, prompt_tokens: int, new_tokens: int) -> _Self:
        """Itself; lengths it does not set come from the protocol."""
        return self.model_copy(update={"prompt_tokens": self.prompt_tokens or prompt_tokens})


class Decode(_Workload):
    """Decode greedily, token by token. A null length means the protocol's."""

    kind: Literal["decode"] = "decode"
    new_tokens: Tokens | None = None
    """Tokens to decode, in place of the protocol's."""

    def resolved(self, prompt_tokens: int, new_tokens: int) -> Decode:
        lengths = {"new_tokens": self.new_tokens or new_tokens}
        return super().resolved(prompt_tokens, new_tokens).model_copy(update=lengths)

    @property
    def holds(self) -> int:
        """Tokens that its context must hold."""
        return (self.prompt_tokens or 0) + (self.new_tokens or 0)


class MaxCtx(_Workload):
    """Find the longest context that fits. A context length in the variant's options is ignored."""

    kind: Literal["max_ctx"] = "max_ctx"
    fill: bool = True
    """Fill the context and decode at its end; otherwise only allocate it."""
    past_trained: bool = False
    """Search past the context that the model was trained on."""
    prompt_tokens: Tokens | None = None
    """Tokens of text, repeated until the context is full."""

    timed = None
    needs = "context"

    @model_serializer(mode="wrap")
    def _plain(self, values: SerializerFunctionWrapHandler) -> Plain:
        """The default is left out, so that ids of cells stay."""
        found: Plain = values(self)
        return {name: value for name, value in found.items() if name != "past_trained" or value}

    @property
    def new_tokens(self) -> int:
        """No tokens: nothing is timed."""
        return 0

    @property
    def holds(self) -> int:
        """Tokens that its context must hold at least."""
        return self.prompt_tokens or 0


class Grow(_Workload):
    """Decode until memory runs out, or the target is reached."""

    needs = "memory"

    kind: Literal["grow"] = "grow"
    target: Annotated[Tokens, Field(ge=2)] = 100_000
    """Tokens of prompt and decode."""

    @property
    def new_tokens(self) -> int:
        """The target minus the prompt."""
        return self.target - (self.prompt_tokens or 0)

    @property
    def holds(self) -> int:
        """Tokens that its context must hold."""
        return self.target


Depth = Annotated[
    int,
    BeforeValidator(tokens_of),
    Field(ge=0, le=MOST_TOKENS),
    WithJsonSchema({"type": ["integer", "string"], "minimum": 0, "maximum": MOST_TOKENS}),
]
"""Tokens in the KV cache before; 4k is 4,096."""


def _each_once(given: list[int]) -> list[int]:
    twice = next((value for place, value in enumerate(given) if value in given[:place]), None)
    if twice is not None:
        raise ValueError(f"{json.dumps(twice)} occurs twice")
    return given


class _Surface(_Workload):
    """A workload whose result is a table of timed rows."""

    prompt_tokens: Tokens | None = None
    """Tokens of text, repeated as often as needed; by default the protocol's prompt."""
    repeats: int | None = Field(
        default=None, ge=1, le=1000, exclude=True
    )  # as often as it runs, it is the same
    """Processes per cell at most, where the protocol has more: its rows have an interval without others."""

    timed = "rows"

    def repeated(self, repeats: int) -> int:
        return min(repeats, self.repeats or repeats)


def _lengths(given: Any) -> Any:
    if isinstance(given, str) and given != "auto":
        raise ValueError(f'expected auto or a list, got "{shortened(given)}"')
    return None if given == "auto" else given


class Prefill(_Surface):
    """Time single forward passes over several numbers of tokens, at several depths of context."""

    kind: Literal["prefill"] = "prefill"
    lengths: Annotated[
        Annotated[list[Tokens], Field(min_length=1, max_length=200)] | None,
        BeforeValidator(_lengths),
        WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "array", "items": {"minimum": 1}}]}),
    ] = None
    """Tokens of a pass; auto: powers of two up to `up_to`, and more where the slope changes."""
    up_to: Tokens = 1024
    """Longest pass of `lengths: auto`."""
    depth: list[Depth] = Field(default=[0], min_length=1, max_length=50)
    """Tokens in the KV cache before a pass."""
    passes: int = Field(default=5, ge=2, le=1000)
    """Passes of each length and depth, in rounds."""

    needs = "context"
    _once = field_validator("depth")(_each_once)

    @field_validator("lengths")
    @classmethod
    def _lengths_once(cls, given: list[int] | None) -> list[int] | None:
        return given and _each_once(given)

    @property
    def cuts(self) -> bool:
        """Between passes behind other tokens."""
        return max(self.depth) > 0

    @property
    def longest(self) -> int:
        """Tokens of the longest pass."""
        return max(self.lengths or [self.up_to])

    @property
    def new_tokens(self) -> int:
        """No tokens: a pass is no decode."""
        return 0

    @property
    def holds(self) -> int:
        """Tokens that its context must hold: those of the deepest pass, and one after it."""
        return max(self.depth) + self.longest + 1


MOST_SCORED = 1 << 17  # tokens of a window: the logits of its second half are in memory at once
WINDOW_ROOM = 260  # a window begins up to 255 tokens from its depth, and its first steps are not timed


class Windows(_Surface):
    """Decode short windows at several depths of context, filled by prefill."""

    kind: Literal["depth"] = "depth"
    depths: list[Depth] = Field(min_length=1, max_length=50)
    """Tokens in the KV cache at which the speed is wanted."""
    window: int = Field(default=64, ge=8, le=10_000)
    """Tokens in a window."""
    stop_at: Share = 0.005
    """Half the 95% interval of tok/s, as a share of it, at which a depth is known well enough."""
    most_windows: int = Field(default=24, ge=4, le=10_000)
    """Windows of a depth, on average, after which it ends anyway."""

    keep_context: bool = False
    """Keep the filled context in the cache folder, for further repeats and runs."""

    _once = field_validator("depths")(_each_once)

    @property
    def cuts(self) -> bool:
        """Whether the context is cut between depths."""
        return True

    @property
    def new_tokens(self) -> int:
        """No tokens: windows are rows of a table, not one decode."""
        return 0

    @property
    def holds(self) -> int:
        """Tokens that its context must hold."""
        return max(self.depths) + self.window + WINDOW_ROOM


class Turns(_Surface):
    """A conversation of several turns, with and without its prefix kept in the KV cache."""

    kind: Literal["turns"] = "turns"
    first: Tokens = 2000
    """Tokens of the first prompt."""
    each: Tokens = 200
    """Tokens that each later turn adds."""
    new_tokens: Tokens = 150
    """Tokens decoded in each turn."""
    turns: int = Field(default=10, ge=1, le=1000)
    prefix_cache: list[bool] = Field(default=[False, True], min_length=1, max_length=2)
    """off: each turn evaluates the whole conversation; on: what is new."""

    _once = field_validator("prefix_cache")(_each_once)

    @property
    def holds(self) -> int:
        """Tokens that its context must hold."""
        return self.first + (self.turns - 1) * self.each + self.turns * self.new_tokens


SLOT_STEP = 256  # llama.cpp gives every sequence a multiple of this many KV cells


class Batch(_Surface):
    """Several users at once, each with a prompt of its own, decoded together."""

    kind: Literal["batch"] = "batch"
    concurrency: list[Annotated[int, Field(ge=1, le=256)]] = Field(  # 256: llama.cpp's LLAMA_MAX_SEQ
        default=[1, 2, 4, 8, 16], min_length=1, max_length=50
    )
    """Users at once."""
    new_tokens: Annotated[Tokens, Field(ge=2)] = 256
    """Tokens decoded for each user."""
    rounds: int = Field(default=3, ge=1, le=1000)
    """Rounds over all numbers of users, in random order, after one that warms up."""

    needs = "users"
    _once = field_validator("concurrency")(_each_once)

    @property
    def holds(self) -> int:
        """Tokens that its context must hold: those of all users together."""
        of_each = (self.prompt_tokens or 0) + self.new_tokens
        return max(self.concurrency) * -(-of_each // SLOT_STEP) * SLOT_STEP


class Quality(_Workload):
    """Perplexity of a text, and the divergence from the 16-bit weights: teacher-forced, nothing is timed."""

    kind: Literal["quality"] = "quality"
    text: str = Field(default="default", min_length=1)
    """A file in UTF-8, relative to this file's folder, absolute, or from ~; default: the shipped text."""
    n_ctx: Annotated[Tokens, Field(ge=8, le=MOST_SCORED)] = 512
    """Tokens of a window; those of its second half are scored, as llama-perplexity does."""
    chunks: int = Field(default=64, ge=1, le=10_000)
    """Windows, from the start of the text."""
    depths: list[Annotated[Tokens, Field(ge=8, le=MOST_SCORED)]] = Field(default=[], max_length=20)
    """Besides, as many windows of each of these lengths; as many of their last tokens are scored."""
    bos: bool = True
    """Begin each window with a BOS, as llama-perplexity does, if the model's tokenizer asks for one."""
    reference: Literal["auto"] = "auto"
    """The model's 16-bit weights, in transformers if they are a checkpoint."""

    timed = None
    needs = "logits"

    @field_validator("text")
    @classmethod
    def _absolute(cls, text: str, info: ValidationInfo) -> str:
        return text if text == "default" or info.context is None else absolute(text, info.context)

    @field_validator("depths")
    @classmethod
    def _longer(cls, given: list[int], info: ValidationInfo) -> list[int]:
        n_ctx = info.data.get("n_ctx", 0)
        if short := [depth for depth in given if depth <= n_ctx]:
            raise ValueError(f"{min(short)} is not deeper than the windows of n_ctx {n_ctx}")
        return _each_once(given)

    @model_serializer(mode="wrap")
    def _plain(self, values: SerializerFunctionWrapHandler) -> Plain:
        """The default is left out: ids of cells are made of this, and without a BOS in question they stay."""
        found: Plain = values(self)
        return {name: value for name, value in found.items() if name != "bos" or not value}

    def repeated(self, repeats: int) -> int:
        """Once: it has an interval from its windows."""
        return 1

    def resolved(self, prompt_tokens: int, new_tokens: int) -> Quality:
        """Itself: it has no prompt."""
        return self

    @property
    def new_tokens(self) -> int:
        """No tokens: nothing is decoded."""
        return 0

    @property
    def holds(self) -> int:
        """Tokens that its context must hold."""
        return max([self.n_ctx, *self.depths])

    def windows(self) -> list[tuple[int, int]]:
        """First token and end of each window in the text: `chunks` of n_ctx, then `chunks` of each depth.
        Windows of all depths end at the same tokens, so that they score the same ones."""
        deepest = max(self.depths, default=0)
        found = [(k * self.n_ctx, (k + 1) * self.n_ctx) for k in range(self.chunks)]
        for depth in self.depths:
            ends = (deepest + k * self.n_ctx for k in range(self.chunks))
            found += [(end - depth, end) for end in ends]
        return found

    def fitting(self, tokens: int) -> int:
        """The most `chunks` for a text of so many tokens."""
        return 1 + (tokens - self.holds) // self.n_ctx if tokens >= self.holds else 0

    @property
    def positions(self) -> int:
        """Positions of a window that are scored: those before its second half's tokens, but the first."""
        return self.n_ctx - self.n_ctx // 2 - 1


Workload = Decode | MaxCtx | Grow | Prefill | Windows | Turns | Batch | Quality
KINDS: dict[str, type[Workload]] = {kind.model_fields["kind"].default: kind for kind in get_args(Workload)}


# The data model of an experiment: typed, frozen, with every matrix expanded. Building one reads nothing.


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
        """Replace `{quant}` and `{bits}` by the variant's values; null leaves a placeholder as it is."""
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
    """A model to measure. `described` is null only where the weights bring their own layers. `weights`: for
    stacks of all formats; or, with `of_format`, the first of those: by format, or by a GGUF's type. `where`:
    globs of a fleet's devices."""

    name: Name
    described: Described | None = None
    weights: Weights = Weights()
    of_format: dict[str, Weights] = Field(default={})
    where: tuple[str, ...] = ("*",)

    @property
    def made(self) -> Decoder | None:
        """The model's layers; null where only the weights have them."""
        return self.described.decoder if self.described else None

    def weights_for(self, form: str, quant: str | None = None) -> Weights | None:
        """The weights for a stack of this format (gguf, hf, gptq or awq); null: it could load none of these.
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
