"""The header of a runner (PEP 723): all that the controller knows of a stack. Imports no stack."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from harness.base.files import NotStarted
from harness.theory.memory import MEMORY_MODELS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Given = str | int | float | bool
"""A value of an option."""
Value = Given | None
"""None: the stack's own."""
Options = Mapping[str, Value]
Table = dict[str, Any]
"""A table of TOML as it was read."""
CAPABILITIES = ("logits", "dequantize", "context", "max_ctx", "memory", "users", "ids")
"""What a workload, a check or weights may need of a stack: its logits; its weights as it holds them; a
context that can be filled without a decode; memory that is its own process's; several users at once; and that
it needs no vocabulary."""
ONE_USER = "it serves one user at a time"  # unless its header has `several_users`
WITHOUT_FILES = ("none", "served")

_Item = TypeVar("_Item")
Several = Annotated[tuple[_Item, ...], Field(strict=False)]
"""A list of TOML."""


_TYPES: dict[type, str] = {bool: "bool", int: "int", float: "float", str: "string"}  # of options, by default


def _values(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _capability(version: Any) -> tuple[int, int]:
    if not re.fullmatch(r"\d+\.\d", str(version)) or not isinstance(version, str):
        raise ValueError(f"{version!r} is not a version such as 8.0")
    major, minor = version.split(".")
    return int(major), int(minor)


When = dict[str, Annotated[tuple[Given, ...], BeforeValidator(_values)]]
"""The values that options must have, by option; a header may write one alone."""
ComputeCapability = Annotated[tuple[int, int], BeforeValidator(_capability)]


class HeaderError(ValueError):
    """A runner's header is missing or wrong: a mistake in this project, not in the user's config."""


class Rows(BaseModel):
    """A table of a header: no unknown keys, no conversions, no changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Option(Rows):
    """One option of a stack."""

    name: str
    type: Literal["int", "float", "string", "bool", "path", "url"]
    """A header may leave it out where the default has it."""
    help: str
    choices: Several[Given] = ()
    default: Value = None
    """None: `default_from`, else the stack's own."""
    default_from: Literal["threads", "tokens"] | None = Field(default=None, alias="default-from")
    minimum: int | float | None = None
    maximum: int | float | None = None
    flag: str | dict[str, str] = ""
    """What sets it on the command line of the stack's own program, `{}` for the value; or by value, where
    that differs, an empty name for all others; empty: nothing does."""

    def flag_for(self, value: Value) -> str:
        """The words that set it to a value, as a shell takes them; empty: it cannot be set, or needs none."""
        word = ("off", "on")[value] if isinstance(value, bool) else str(value)
        form = self.flag if isinstance(self.flag, str) else self.flag.get(word, self.flag.get("", ""))
        return "" if value is None else form.replace("{}", shlex.quote(word))


class KernelChange(Rows):
    """A change of kernels in variants whose name contains `variant` (empty: in all) for passes of more than
    `longest` tokens; `then` names both kernels."""

    longest: int
    then: str
    variant: str = ""


class Limit(Rows):
    """A limitation of a stack; `message` is the library's own. Where every option in `when` has one of its
    values, and some option in `unless` has none of its, the other rules must hold: on linear layers, packing
    of the weights, their files, the device."""

    message: str = Field(min_length=1)
    when: When = Field(default={})
    unless: When = Field(default={})
    in_features_multiple_of: int | None = None
    """That side of every linear layer is a multiple, embedding and lm_head apart."""
    out_features_multiple_of: int | None = None
    bits: Several[int] = ()
    """The packed weights have one of these."""
    group_sizes: Several[int] = ()
    symmetric: Literal[True] | None = None
    act_order: Literal[False] | None = None
    sharded: Literal[False] | None = None
    """All weights are in one file; those not downloaded yet: less than 5 GB."""
    compute_capability: ComputeCapability | None = None
    """The GPU has at least this."""
    compute_capability_below: ComputeCapability | None = None
    compute_capability_except: ComputeCapability | None = None
    device: str | None = None
    """The config is for this family of devices."""
    covers: str | None = None
    """An option that must be at least prompt + new tokens."""
    never: bool = False
    """The combination is impossible."""
    refuses: bool = False
    """Such a cell is not started; otherwise it runs, and the library itself fails."""

    @model_validator(mode="after")
    def _has_a_rule(self) -> Limit:
        if not self.model_fields_set - {"message", "when", "unless", "refuses"}:
            raise ValueError("has no rule")
        return self


class Context(Rows):
    """How to set the length of a context that is allocated as a whole, where every option in `when` has one
    of its values."""

    option: str
    """Takes the length in tokens."""
    granule: int = Field(ge=1)
    """Lengths are multiples of this."""
    dry: bool
    """The runner's job `account` computes the memory of a length without allocating it."""
    when: When = Field(default={})


class FirstVariant(Rows):
    """The line of a stack in the config that `harness init` writes, by device family: a comment where the
    stack is only offered. `order`: of the lines; `{dtype}` stands for a 16-bit type that the GPU computes."""

    order: int
    cpu: str
    cuda: str

    def line(self, device: str) -> str:
        return self.cpu if device == "cpu" else self.cuda


class Trial(Rows):
    """Values that `harness tune` tries of options that belong together, each set at once. `device` and
    `purpose` are None where they have an effect on all."""

    settings: Several[dict[str, Given]]
    device: Literal["cpu", "gpu"] | None = None
    purpose: Literal["decode", "prefill"] | None = None


def holds(when: When, options: Options) -> bool:
    """Whether every option in `when` has one of its values. `options`: resolved."""
    return all(options.get(name) in values for name, values in when.items())


class Environment(Rows):
    """One way to build a stack's interpreter."""

    stack: str
    name: str
    device: str
    """The device family it serves."""
    requires_python: str = Field(alias="requires-python")
    dependencies: Several[str]
    source_builds: Several[str] = Field(default=(), alias="source-builds")
    variables: dict[str, str] = Field(default={})
    unisolated: Several[str] = Field(default=(), alias="no-build-isolation")
    """Packages built with the environment's own torch at hand."""
    optional: Several[str] = ()
    """Optional requirements."""
    imports: Several[str] = ()
    """Compiled modules of kernels."""
    lock_name: str = ""
    """See locks()."""
    accepts: Several[str] = ()
    """The versions, of Python too, with which the runner works in an interpreter that is adopted (default:
    any, and `requires_python`)."""
    may_lack: Several[str] = ()
    """The dependencies that an adopted interpreter need not have."""
    toolkit: str = ""
    """The version of the CUDA toolkit that its source builds use here, empty for none."""
    without: Several[str] = ()
    """Packages that others require and that are left out."""

    @property
    def title(self) -> str:
        """`stack/environment`."""
        return f"{self.stack}/{self.name}"

    def with_packages(self, requirements: Sequence[str]) -> Environment:
        """This environment with other versions of its packages: each requirement replaces the pinned one of
        the same project; those of other projects are ignored."""
        replacing = {project_of(requirement): requirement for requirement in requirements}
        dependencies = tuple(replacing.get(project_of(pinned), pinned) for pinned in self.dependencies)
        if dependencies == self.dependencies:
            return self
        changes = {"dependencies": dependencies, "lock_name": ""}  # the lock is of the pinned ones
        return self.model_copy(update=changes)

    def locks(self) -> list[Path]:
        """The exact versions and hashes of its packages, and of what compiles them; empty without a lock. Not
        locked are optional packages, and torch with what it needs where UV_TORCH_BACKEND chooses it."""
        own = runners_folder() / "locks" / f"{self.lock_name}.txt"
        return [own, own.with_name("build.txt")] if own.is_file() else []


def project_of(requirement: str) -> str:
    """The normalized project name of a requirement such as `llama-cpp-python==0.3.36` (PEP 503)."""
    name = re.split(r"[\s\[<>=!~;@]", requirement.strip(), maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


class Header(Rows):
    """The table [tool.harness] of a runner, with what it inherits from the stack that it extends."""

    stack: str
    summary: str
    weights: str
    """The format it loads (gguf, hf, gptq or awq), "{option}" for the one that option names, `served` for a
    server that has its own, or none."""
    named: Several[str] = ()
    """Options whose values stand in every variant's name, given or not."""
    options: dict[str, Option]
    environments: dict[str, Environment] = Field(alias="env")
    limits: Several[Limit] = ()
    functional: dict[str, str] = Field(default={})
    """Devices on which its speed is meaningless, and why."""
    contexts: Several[Context] = Field(default=(), alias="context")
    inheritable: Several[str] = ()
    """Options that a stack which extends this one has too."""
    memory: str | None = None
    """One of MEMORY_MODELS; None: its memory is not forecast."""
    scratch: When | None = None
    """The options with which a GPU holds the scratch memory of ExLlamaV2; None: never."""
    reference: dict[str, Given] | None = None
    """The options with which it computes the reference logits of weights in its format; it makes files of
    this format for all stacks."""
    cannot_truncate: Several[When] = ()
    """Options with any of which its KV cache cannot be cut to fewer tokens."""
    published: dict[str, str] = Field(default={})
    """Its variants in the published study, by their names here."""
    offers: Several[Table] = ()
    """Rows of variants, as in a config, among which `harness recommend` chooses, of rows that differ in dtype
    alone the first that the device runs; empty: the defaults."""
    trials: Several[Trial] = Field(default=(), alias="tune")
    """The options that `harness tune` tries after threads, in this order."""
    program: str = ""
    """The stack's own program, `{}` for the path of the weights; its options' flags follow."""
    kernel_changes: Several[KernelChange] = ()
    """By the length of a pass."""
    fused: Several[str] = ()
    """Parts of the names of variants with fused layers."""
    first: FirstVariant | None = None
    """Its line in a first config."""
    loads: dict[str, str] = Field(default={})
    """By its option quant, the arguments with which transformers loads a checkpoint so."""
    applies: dict[str, list[str]] = Field(default={})
    """Methods of quantized checkpoints (quant_method) that it loads as they are, each with the options that
    must name what is stored."""
    dequantizes: Several[str] = ()
    """The methods that it loads as weights of its option dtype."""
    needs: dict[str, str] = Field(default={})
    """By method, the package that its own environment lacks."""
    mixed_layers: bool = False
    """It loads GPTQ whose layers differ."""
    layouts: Several[str] = ()
    """Of packed checkpoints, those that it loads; empty: all that are known here."""
    wrappers: list[str] | None = None
    """Of the model_types with a text_config, those that it loads; None: unknown."""
    architectures: dict[str, list[str]] = Field(default={})
    """The model_types that it runs, each with its scalings of rotary positions; empty: not known."""
    made: list[str] | None = None
    """The options that its engine's own files depend on, which its job `convert` makes of a checkpoint before
    it is loaded; None: it loads the checkpoint itself."""
    successor: str = ""
    """Of a stack whose package is no longer maintained, the stack that runs the same files today."""
    cannot: dict[str, str] = Field(default={})
    """What it cannot do, of CAPABILITIES, and why."""
    simulated: bool = False
    """Its time is not this machine's."""
    jobs_of: str = ""
    """The stack that does jobs on files for it; empty: itself."""
    secret: str = ""
    """Its option that names the environment variable of a key, which its worker gets; empty: none."""

    @model_validator(mode="after")
    def _names_what_it_has(self) -> Header:
        """Refuse names of options, values and devices that the header does not define."""
        named: dict[str, Sequence[str]] = {
            "inheritable": self.inheritable,
            "reference": [*(self.reference or ())],
            "made": self.made or [],
            "applies": [name for names in self.applies.values() for name in names],
            "offers": [name for row in self.offers for name in row],
            "secret": [self.secret] if self.secret else [],
        }
        for key, names in named.items():
            if unknown := [name for name in names if name not in self.options]:
                raise ValueError(f"{key} has {unknown[0]}, which is no option")
        conditions = [("limits", when) for limit in self.limits for when in (limit.when, limit.unless)]
        conditions += [("context", context.when) for context in self.contexts]
        conditions += [("scratch", self.scratch or {})]
        conditions += [("cannot_truncate", when) for when in self.cannot_truncate]
        for trial in self.trials:
            for row in trial.settings:
                conditions.append(("tune", {name: (value,) for name, value in row.items()}))
        for key, when in conditions:
            for name, values in when.items():
                self._check_values(key, name, values)
        lengths = [("limits", limit.covers) for limit in self.limits if limit.covers is not None]
        lengths += [("context", context.option) for context in self.contexts]
        for key, name in lengths:
            if name not in self.options or self.options[name].type != "int":
                raise ValueError(f"{key} has {name}, which is no option of type int")
        if beyond := self.cannot.keys() - set(CAPABILITIES):
            raise ValueError(f"cannot has {beyond.pop()}; there are {', '.join(CAPABILITIES)}")
        if strange := self.functional.keys() - {each.device for each in self.environments.values()}:
            raise ValueError(f"functional on {strange.pop()}, without an environment")
        if self.memory not in (None, *MEMORY_MODELS):
            raise ValueError(f"has memory = {self.memory!r}; there are {', '.join(MEMORY_MODELS)}")
        return self

    def _check_values(self, key: str, name: str, values: Sequence[Given]) -> None:
        if name not in self.options:
            raise ValueError(f"{key} has {name}, which is no option")
        option = self.options[name]
        choices = (True, False) if option.type == "bool" else option.choices or values
        if strange := [value for value in values if value not in choices]:
            raise ValueError(f"{key} has {name} {strange[0]}, which is no choice")

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of weights it loads; empty for none."""
        if self.weights.startswith("{"):
            return tuple(map(str, self.options[self.weights[1:-1]].choices))
        return () if self.weights in WITHOUT_FILES else (self.weights,)

    @property
    def worker(self) -> Header:
        """The stack that does jobs on files for it."""
        return stacks()[self.jobs_of] if self.jobs_of else self

    def environment_for(self, device: str) -> Environment | None:
        return next((e for e in self.environments.values() if e.device == device), None)

    def context_of(self, options: Options) -> Context | None:
        """How these options (resolved) set the context length; None: the context grows, there is nothing to
        set."""
        return next((context for context in self.contexts if holds(context.when, options)), None)


_RUNNERS = Path(__file__).parent.parent.parent / "runners"  # a path takes as long as the rest of a cell


def runners_folder() -> Path:
    """The folder of the runners; HARNESS_RUNNERS names another one, whose name must be `runners`."""
    other = os.environ.get("HARNESS_RUNNERS")
    return Path(other) if other else _RUNNERS


def stacks() -> dict[str, Header]:
    """Every runner with a header, by stack name (= file name). Raises NotStarted where HARNESS_RUNNERS names
    no folder of them."""
    return _stacks(runners_folder())


@cache
def _stacks(folder: Path) -> dict[str, Header]:
    if folder.name != _RUNNERS.name or not folder.is_dir():
        hint = f"; did you mean {inner}?" if (inner := folder / _RUNNERS.name).is_dir() else ""
        raise NotStarted(f"HARNESS_RUNNERS={folder}: is no folder named runners{hint}")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted((folder / "stacks").glob("*.py"))}
    return {name: parse(name, text) for name, text in texts.items() if "\n# /// script\n" in "\n" + text}


def references() -> dict[str, Header]:
    """The stack of the reference logits, which makes files of the format, by format of weights."""
    return {header.weights: header for header in stacks().values() if header.reference is not None}


def parse(stack: str, text: str) -> Header:
    """The header in a runner's source text. Raises HeaderError."""
    table = _table(stack, text)
    try:
        return Header.model_validate({"stack": stack} | _completed(stack, table))
    except ValidationError as wrong:
        words = {"extra_forbidden": "unknown key", "missing": "is missing"}
        mistakes = []
        for error in wrong.errors(include_url=False):
            key = ".".join(map(str, error["loc"]))
            mistakes.append(f"{key}: {words.get(error['type'], error['msg'])}")
        raise HeaderError(f"runners/stacks/{stack}.py: {'; '.join(mistakes)}") from wrong
    except (AttributeError, KeyError, TypeError) as wrong:  # a table that is no table
        raise HeaderError(f"runners/stacks/{stack}.py: header: {wrong!r}") from wrong


# The reference pattern of PEP 723.
_BLOCK = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")


def _table(stack: str, text: str) -> Table:
    blocks = [m for m in _BLOCK.finditer(text) if m["type"] == "script"]
    if len(blocks) != 1:
        raise HeaderError(f"runners/stacks/{stack}.py: {len(blocks)} script blocks, expected one")
    lines = blocks[0]["content"].splitlines()
    try:
        table: Table = tomllib.loads("\n".join(line[2:] for line in lines))
    except tomllib.TOMLDecodeError as mistake:
        raise HeaderError(f"runners/stacks/{stack}.py: header: {mistake}") from mistake
    return table


def _completed(stack: str, table: Table) -> Table:
    """[tool.harness] with what its tables share, and with what it inherits."""
    tool: Table = dict(table["tool"]["harness"])
    of_stack = {"stack": stack, "requires-python": table["requires-python"]}
    of_stack |= {key: tool.pop(key, ()) for key in ("accepts", "may_lack")}
    for name, row in tool["env"].items():
        dependencies = [*table.get("dependencies", ()), *row.get("dependencies", ())]
        lock = f"{stack}-{name}" if "dependencies" in row else stack
        own = {"name": name, "dependencies": dependencies, "lock_name": lock}
        tool["env"][name] = of_stack | row | own
    options: Table = {}
    for name, row in tool.get("options", {}).items():
        of_default = _TYPES.get(type(row.get("default")))
        options[name] = ({"type": of_default} if of_default else {}) | row | {"name": name}
    tool["options"] = options
    if not tool.pop("several_users", False):
        tool["cannot"] = {"users": ONE_USER} | tool.get("cannot", {})
    if (name := tool.pop("extends", None)) is None:
        return tool
    path = runners_folder() / "stacks" / f"{name}.py"
    if not path.exists():
        raise HeaderError(f"runners/stacks/{stack}.py: extends {name}, which is no stack")
    base = parse(name, path.read_text(encoding="utf-8"))
    if not base.inheritable:
        raise HeaderError(f"runners/stacks/{stack}.py: extends {name}, which has nothing inheritable")
    if has := [option for option in base.inheritable if option in tool["options"]]:
        raise HeaderError(f"runners/stacks/{stack}.py: inherits {has[0]} from {name}, but has it too")
    tool["options"] |= {option: base.options[option] for option in base.inheritable}
    tool["context"] = [*tool.get("context", ()), *base.contexts]
    inherited = [when for when in base.cannot_truncate if when.keys() <= tool["options"].keys()]
    tool["cannot_truncate"] = [*inherited, *tool.get("cannot_truncate", ())]
    return {"memory": base.memory, "wrappers": base.wrappers} | tool
