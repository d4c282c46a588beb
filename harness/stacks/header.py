"""The header of a stack's file: environments, options, limits."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from harness.base.files import NotStarted
from harness.theory.memory import MEMORY_MODELS

# Rules in a runner's header: options, limits, and how a context's length is set. Pure.


Given = str | int | float
"""A value of an option, also true and false."""
Value = Given | None
"""Null: the stack's own."""
Options = Mapping[str, Value]
Table = dict[str, Any]
"""A table of TOML as it was read."""
When = dict[str, tuple[Value, ...]]
"""The values that options must have, by option."""


class HeaderError(ValueError):
    """A runner's header is missing or wrong: a mistake in this project, not in the user's config."""


@dataclass(frozen=True)
class Option:
    """One option of a stack. `default` null means: `default_from` (threads or tokens), else the stack's
    own. `flag`: what sets it on the command line of the stack's own program, `{}` for the value; or by value,
    where that differs, an empty name for all others; empty: nothing does."""

    name: str
    type: str
    help: str
    choices: tuple[Value, ...] = ()
    default: Value = None
    default_from: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    flag: str | Mapping[str, str] = ""

    def flag_for(self, value: Value) -> str:
        """The words that set it to a value, as a shell takes them; empty: it cannot be set, or needs none."""
        word = ("off", "on")[value] if isinstance(value, bool) else str(value)
        form = self.flag if isinstance(self.flag, str) else self.flag.get(word, self.flag.get("", ""))
        return "" if value is None else form.replace("{}", shlex.quote(word))


@dataclass(frozen=True)
class KernelChange:
    """A change of kernels in variants whose name contains `variant` (empty: in all) for passes of more than
    `longest` tokens; `then` names both kernels."""

    longest: int
    then: str
    variant: str = ""


@dataclass(frozen=True)
class Limit:
    """A limitation of a stack; `message` is the library's own. Where every option in `when` has one of its
    values, and some option in `unless` has none of its, the given rules must hold: on linear layers, packing
    of the weights, their files, the device.
    `covers`: an option that must be at least prompt + new tokens. `never`: the combination is impossible.
    `refuses`: such a cell is not started; otherwise it runs, and the library itself fails."""

    message: str
    when: When = field(default_factory=dict)
    unless: When = field(default_factory=dict)
    in_features_multiple_of: int | None = None
    out_features_multiple_of: int | None = None
    bits: tuple[int, ...] = ()
    group_sizes: tuple[int, ...] = ()
    symmetric: bool | None = None
    act_order: bool | None = None
    sharded: bool | None = None
    compute_capability: tuple[int, int] | None = None
    compute_capability_below: tuple[int, int] | None = None
    compute_capability_except: tuple[int, int] | None = None
    device: str | None = None
    covers: str | None = None
    never: bool = False
    refuses: bool = False


@dataclass(frozen=True)
class Context:
    """How to set the length of a context that is allocated as a whole, where every option in `when` has one
    of its values. `option`: takes the length in tokens. `granule`: lengths are multiples of this. `dry`: the
    runner's job `account` computes the memory of a length without allocating it."""

    option: str
    granule: int
    dry: bool
    when: When = field(default_factory=dict)


@dataclass(frozen=True)
class FirstVariant:
    """The line of a stack in the config that `harness init` writes, by device family: a comment where the
    stack is only offered. `order`: of the lines; `{dtype}` stands for a 16-bit type that the GPU computes."""

    order: int
    cpu: str
    cuda: str

    def line(self, device: str) -> str:
        return self.cpu if device == "cpu" else self.cuda


@dataclass(frozen=True)
class Trial:
    """Values that `harness tune` tries of options that belong together, each set at once. `device`: cpu or
    gpu, where they have no effect elsewhere; `purpose`: decode or prefill alone; null: all."""

    settings: tuple[Mapping[str, Given], ...]
    device: str | None = None
    purpose: str | None = None


# What a workload, a check or weights may need of a stack: its logits; its weights as it holds them; a context
# that can be filled without a decode; memory that is its own process's; several users at once; and that it
# needs no vocabulary.
CAPABILITIES = ("logits", "dequantize", "context", "max_ctx", "memory", "users", "ids")
ONE_USER = "it serves one user at a time"  # unless its header has `several_users`
WITHOUT_FILES = ("none", "served")
PURPOSES, KINDS_OF_DEVICES = ("decode", "prefill"), ("cpu", "gpu")


def holds(when: When, options: Options) -> bool:
    """Whether every option in `when` has one of its values. `options`: resolved."""
    return all(options.get(name) in values for name, values in when.items())


# The type of each rule; of the switches, the one value that has an effect.
_RULES: dict[str, type] = {"message": str, "when": dict, "unless": dict, "covers": str, "device": str}
_CAPABILITIES = ("compute_capability", "compute_capability_below", "compute_capability_except")
_RULES |= dict.fromkeys(_CAPABILITIES, str)
_RULES |= {"in_features_multiple_of": int, "out_features_multiple_of": int, "bits": list, "group_sizes": list}
_SWITCHES = {"symmetric": True, "act_order": False, "sharded": False, "never": True, "refuses": True}


def limit_rule(stack: str, given: Table, options: dict[str, Option]) -> Limit:
    def wrong(sentence: str) -> HeaderError:
        return HeaderError(f"runners/stacks/{stack}.py: a limit {sentence}")

    for key, value in given.items():
        if key not in _RULES and key not in _SWITCHES:
            raise wrong(f"has no rule {key}; there are {', '.join([*_RULES, *_SWITCHES])}")
        if key in _SWITCHES and value is not _SWITCHES[key]:
            raise wrong(f"accepts only {key} = {str(_SWITCHES[key]).lower()}")
        if key in _RULES and type(value) is not _RULES[key]:
            raise wrong(f"has {key} = {value!r}, expected {_RULES[key].__name__}")
    if not given.get("message"):
        raise wrong("lacks message, the library's own")
    if not given.keys() - {"message", "when", "unless", "refuses"}:
        raise wrong("has no rule")
    known: Table = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    required = {"when": when(given, options, wrong), "unless": when(given, options, wrong, "unless")}
    if "covers" in given and (given["covers"] not in options or options[given["covers"]].type != "int"):
        raise wrong(f"has covers = {given['covers']!r}, which is no option of type int")
    for key in known.keys() & set(_CAPABILITIES):
        if not re.fullmatch(r"\d+\.\d", given[key]):
            raise wrong(f"has {key} = {given[key]!r}, expected a version such as 8.0")
        known[key] = tuple(map(int, given[key].split(".")))
    return Limit(**(known | required))


def context_rule(stack: str, given: Table, options: dict[str, Option]) -> Context:
    def wrong(sentence: str) -> HeaderError:
        return HeaderError(f"runners/stacks/{stack}.py: a context {sentence}")

    if given.keys() - {"when"} != {"option", "granule", "dry"}:
        raise wrong("needs option, granule and dry; when is optional")
    option, granule, dry = given["option"], given["granule"], given["dry"]
    if option not in options or options[option].type != "int":
        raise wrong(f"has option = {option!r}, which is no option of type int")
    if type(granule) is not int or granule < 1:
        raise wrong(f"has granule = {granule!r}, expected a whole number of tokens, at least 1")
    if type(dry) is not bool:
        raise wrong(f"has dry = {dry!r}, expected true or false")
    return Context(option, granule, dry, when(given, options, wrong))


def trial_rule(stack: str, given: Table, options: dict[str, Option]) -> Trial:
    """Raises HeaderError."""

    def wrong(sentence: str) -> HeaderError:
        return HeaderError(f"runners/stacks/{stack}.py: tune {sentence}")

    if given.keys() - {"device", "purpose"} != {"settings"}:
        raise wrong("needs settings; device and purpose are optional")
    for key, known in (("purpose", PURPOSES), ("device", KINDS_OF_DEVICES)):
        if given.get(key, known[0]) not in known:
            raise wrong(f"has {key} = {given[key]!r}, expected {' or '.join(known)}")
    for each in given["settings"]:
        when({"when": each}, options, wrong)
    return Trial(tuple(given["settings"]), given.get("device"), given.get("purpose"))


def only_rule(stack: str, key: str, given: Table, options: dict[str, Option]) -> When:
    """The options with which a key of the header holds."""

    def wrong(sentence: str) -> HeaderError:
        return HeaderError(f"runners/stacks/{stack}.py: {key} {sentence}")

    return when({"when": given}, options, wrong)


def when(
    given: Table, options: dict[str, Option], wrong: Callable[[str], HeaderError], key: str = "when"
) -> When:
    """The values in `when` that options must have, by option. Raises `wrong` for an unknown option or
    value."""
    found = {k: tuple(v) if isinstance(v, list) else (v,) for k, v in given.get(key, {}).items()}
    for name, values in found.items():
        if name not in options:
            raise wrong(f"has {key} = {name}, which is no option")
        choices = (True, False) if options[name].type == "bool" else options[name].choices or values
        if strange := [value for value in values if value not in choices]:
            raise wrong(f"has {key} = {name} {strange[0]}, which is no choice")
    return found


# Read the PEP 723 header of a runner, the one place where the controller learns of a stack. Imports no
# stack.


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


# The reference pattern of PEP 723.
_BLOCK = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")


@dataclass(frozen=True)
class Environment:
    """One way to build a stack's interpreter. `device`: the device family it serves. `unisolated`: packages
    built with the environment's own torch at hand; `optional`: optional requirements; `imports`:
    compiled modules of kernels; `without`: packages that others require and that are left out; `lock_name`:
    see locks(); `accepts`: the versions, of Python too, with which the runner works in an interpreter that is
    adopted (default: any, and `requires_python`); `may_lack`: the dependencies that it need not have;
    `toolkit`: the version of the CUDA toolkit that its source builds use here, empty for none."""

    stack: str
    name: str
    device: str
    requires_python: str
    dependencies: tuple[str, ...]
    source_builds: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    unisolated: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    lock_name: str = ""
    accepts: tuple[str, ...] = ()
    may_lack: tuple[str, ...] = ()
    toolkit: str = ""
    without: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """`stack/environment`."""
        return f"{self.stack}/{self.name}"

    def with_packages(self, requirements: Sequence[str]) -> Environment:
        """This environment with other versions of its packages: each requirement replaces the pinned one of
        the same project; those of other projects are ignored."""
        given = {project_of(each): each for each in requirements}
        dependencies = tuple(given.get(project_of(each), each) for each in self.dependencies)
        if dependencies == self.dependencies:
            return self
        return replace(self, dependencies=dependencies, lock_name="")  # the lock is of the pinned ones

    def locks(self) -> list[Path]:
        """The exact versions and hashes of its packages, and of what compiles them; empty without a lock."""
        own = runners_folder() / "locks" / f"{self.lock_name}.txt"
        return [own, own.with_name("build.txt")] if own.is_file() else []


def project_of(requirement: str) -> str:
    """The normalized project name of a requirement such as `llama-cpp-python==0.3.36` (PEP 503)."""
    name = re.split(r"[\s\[<>=!~;@]", requirement.strip(), maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Header:
    """The header of a runner.

    `weights`: the format it loads (gguf, hf, gptq or awq), "{option}" for the one that option names, `served`
    for a server that has its own, or none. `cannot`: what it cannot do, of CAPABILITIES, and why.
    `simulated`: its time is not this machine's. `jobs_of`: the stack that does jobs on files for it;
    empty: itself. `secret`: its option that names the environment variable of a key, which its worker gets;
    empty: none.
    `named`: options whose values stand in every variant's name, given or not. `functional`: devices on which
    its speed is meaningless, and why. `inheritable`: options that a stack which extends this one has too.

    `memory`: one of MEMORY_MODELS; null: its memory is not forecast. `cannot_truncate`: options with any
    of which its KV cache cannot be cut to fewer tokens. `scratch`: the options with which a GPU holds the
    scratch memory of ExLlamaV2; null: never. `reference`: the options with which it computes the
    reference logits of weights in its format; it makes files of this format for all stacks. `published`:
    its variants in the published study, by their names here. `offers`: rows of variants, as in a config,
    among which `harness recommend` chooses, of rows that differ in dtype alone the first that the device
    runs; empty: the defaults. `trials`: the options that `harness tune`
    tries after threads, in this order. `program`: the stack's own program, `{}` for the path of the weights;
    its options' flags follow; empty: none. `kernel_changes`: by the length of a pass. `fused`: parts of
    the names of variants with fused layers.
    `first`: its line in a first config; null: none. `loads`: by its option quant, the arguments with which
    transformers loads a checkpoint so.
    `applies`: methods of quantized checkpoints (quant_method) that it loads as they are, each with the
    options that must name what is stored. `dequantizes`: those that it loads as weights of its option dtype.
    `needs`: by method, the package that its own environment lacks. `mixed_layers`: it loads GPTQ whose layers
    differ. `layouts`: of packed checkpoints, those that it loads; empty: all that are known here. `wrappers`:
    of the model_types with a text_config, those that it loads; null: unknown. `architectures`: the
    model_types that it runs, each with its scalings of rotary positions; empty: not known. `made`: the
    options that its engine's own files depend on, which its job `convert` makes of a checkpoint before it is
    loaded; null: it loads the checkpoint itself.
    `successor`: of a stack whose package is no longer maintained, the stack that runs the same files today.
    """

    stack: str
    summary: str
    weights: str
    named: tuple[str, ...]
    options: dict[str, Option]
    environments: dict[str, Environment]
    limits: tuple[Limit, ...] = ()
    functional: dict[str, str] = field(default_factory=dict)
    contexts: tuple[Context, ...] = ()
    inheritable: tuple[str, ...] = ()
    memory: str | None = None
    scratch: When | None = None
    reference: dict[str, Given] | None = None
    cannot_truncate: tuple[When, ...] = ()
    published: dict[str, str] = field(default_factory=dict)
    offers: tuple[Table, ...] = ()
    trials: tuple[Trial, ...] = ()
    program: str = ""
    kernel_changes: tuple[KernelChange, ...] = ()
    fused: tuple[str, ...] = ()
    first: FirstVariant | None = None
    loads: Mapping[str, str] = field(default_factory=dict)
    applies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dequantizes: Sequence[str] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    mixed_layers: bool = False
    layouts: Sequence[str] = ()
    wrappers: Sequence[str] | None = None
    architectures: Mapping[str, Sequence[str]] = field(default_factory=dict)
    made: Sequence[str] | None = None
    successor: str = ""
    cannot: Mapping[str, str] = field(default_factory=dict)
    simulated: bool = False
    jobs_of: str = ""
    secret: str = ""

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
        """How these options (resolved) set the context length; null: the context grows, there is nothing to
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
    """The header in a runner's source text."""
    table = _table(stack, text)
    try:
        tool = table["tool"]["harness"]
        base = _extended(stack, tool["extends"]) if "extends" in tool else None
        options = _own_options(tool) | _inherited(stack, tool, base)
        limits = tuple(limit_rule(stack, given, options) for given in tool.get("limits", ()))
        contexts = tuple(context_rule(stack, given, options) for given in tool.get("context", ()))
        header = Header(
            stack,
            tool["summary"],
            tool["weights"],
            tuple(tool.get("named", ())),
            options,
            _environments(stack, table),
            limits,
            dict(tool.get("functional", {})),
            contexts + (base.contexts if base else ()),
            tuple(tool.get("inheritable", ())),
            tool.get("memory", base.memory if base else None),
            only_rule(stack, "scratch", tool["scratch"], options) if "scratch" in tool else None,
            tool.get("reference"),
            (base.cannot_truncate if base else ())
            + tuple(
                only_rule(stack, "cannot_truncate", given, options)
                for given in tool.get("cannot_truncate", ())
            ),
            dict(tool.get("published", {})),
            tuple(tool.get("offers", ())),
            tuple(trial_rule(stack, given, options) for given in tool.get("tune", ())),
            tool.get("program", ""),
            tuple(KernelChange(**given) for given in tool.get("kernel_changes", ())),
            tuple(tool.get("fused", ())),
            FirstVariant(**tool["first"]) if "first" in tool else None,
            tool.get("loads", {}),
            applies=tool.get("applies", {}),
            dequantizes=tuple(tool.get("dequantizes", ())),
            needs=tool.get("needs", {}),
            mixed_layers=tool.get("mixed_layers", False),
            layouts=tuple(tool.get("layouts", ())),
            wrappers=tool.get("wrappers", base.wrappers if base else None),
            architectures=tool.get("architectures", {}),
            made=tool.get("made"),
            successor=tool.get("successor", ""),
            cannot=({} if tool.get("several_users") else {"users": ONE_USER}) | tool.get("cannot", {}),
            simulated=tool.get("simulated", False),
            jobs_of=tool.get("jobs_of", ""),
            secret=tool.get("secret", ""),
        )
    except (AttributeError, KeyError, TypeError) as mistake:
        raise HeaderError(f"runners/stacks/{stack}.py: header: {mistake!r}") from mistake
    _check(header)
    return header


def _check(header: Header) -> None:
    """Raises HeaderError for names that the header uses and does not define."""

    def wrong(sentence: str) -> HeaderError:
        return HeaderError(f"runners/stacks/{header.stack}.py: {sentence}")

    devices = {environment.device for environment in header.environments.values()}
    if strange := header.functional.keys() - devices:
        raise wrong(f"functional on {strange.pop()}, without an environment")
    for key, names in (
        ("inheritable", header.inheritable),
        ("reference", header.reference or ()),
        ("made", header.made or ()),
        ("applies", {name for required in header.applies.values() for name in required}),
        ("offers", {name for row in header.offers for name in row}),
        ("secret", [header.secret] if header.secret else ()),
    ):
        if unknown := [name for name in names if name not in header.options]:
            raise wrong(f"{key} has {unknown[0]}, which is no option")
    if unknown := [name for name in header.cannot if name not in CAPABILITIES]:
        raise wrong(f"cannot has {unknown[0]}; there are {', '.join(CAPABILITIES)}")
    for change in header.kernel_changes:
        if type(change.longest) is not int or not isinstance(change.then, str):
            raise wrong("has kernel_changes without a whole number `longest` and a text `then`")
    if header.memory not in (None, *MEMORY_MODELS):
        raise wrong(f"has memory = {header.memory!r}; there are {', '.join(MEMORY_MODELS)}")


def _environments(stack: str, table: Table) -> dict[str, Environment]:
    shared, python = tuple(table.get("dependencies", ())), table["requires-python"]
    return {
        name: Environment(
            stack=stack,
            name=name,
            device=given["device"],
            requires_python=given.get("requires-python", python),
            dependencies=shared + tuple(given.get("dependencies", ())),
            source_builds=tuple(given.get("source-builds", ())),
            variables=given.get("variables", {}),
            unisolated=tuple(given.get("no-build-isolation", ())),
            optional=tuple(given.get("optional", ())),
            imports=tuple(given.get("imports", ())),
            without=tuple(given.get("without", ())),
            lock_name=f"{stack}-{name}" if "dependencies" in given else stack,
            accepts=tuple(table["tool"]["harness"].get("accepts", ())),
            may_lack=tuple(table["tool"]["harness"].get("may_lack", ())),
        )
        for name, given in table["tool"]["harness"]["env"].items()
    }


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


def _own_options(tool: Table) -> dict[str, Option]:
    return {name: _option(name, given) for name, given in tool.get("options", {}).items()}


def _option(name: str, given: Table) -> Option:
    known = {key.replace("-", "_"): value for key, value in given.items()}
    known["choices"] = tuple(known.get("choices", ()))
    return Option(name=name, **known)


def _extended(stack: str, base: str) -> Header:
    path = runners_folder() / "stacks" / f"{base}.py"
    if not path.exists():
        raise HeaderError(f"runners/stacks/{stack}.py: extends {base}, which is no stack")
    text = path.read_text(encoding="utf-8")
    if "inheritable" not in _table(base, text)["tool"]["harness"]:
        raise HeaderError(f"runners/stacks/{stack}.py: extends {base}, which has nothing inheritable")
    return parse(base, text)


def _inherited(stack: str, tool: Table, base: Header | None) -> dict[str, Option]:
    """The options that a stack inherits from the one that it extends."""
    if base is None:
        return {}
    if has := [name for name in base.inheritable if name in tool.get("options", {})]:
        raise HeaderError(f"runners/stacks/{stack}.py: inherits {has[0]} from {base.stack}, but has it too")
    return {name: base.options[name] for name in base.inheritable}
