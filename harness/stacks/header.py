"""Read the PEP 723 header of a runner, the one place where the controller learns of a stack. Imports no
stack."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from harness.stacks import rules
from harness.stacks.rules import (
    Context,
    Given,
    HeaderError,
    KernelChange,
    Limit,
    Option,
    Options,
    Trial,
    When,
    holds,
)
from harness.theory.footprint import MEMORY_MODELS

# The reference pattern of PEP 723.
_BLOCK = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")


@dataclass(frozen=True)
class Environment:
    """One way to build a stack's interpreter. `device`: the device family it serves. `unisolated`: packages
    built with the environment's own torch at hand; `optional`: optional requirements; `imports`:
    compiled modules of kernels; `lock_name`: see locks(); `accepts`: the versions, of Python too, with which
    the runner works in an interpreter that is adopted (default: any, and `requires_python`); `toolkit`: the
    version of the CUDA toolkit that its source builds use here, empty for none."""

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
    toolkit: str = ""

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

    `weights`: the format it loads (gguf, hf, gptq or awq), none, or "{option}" for the one that option names.
    `named`: options whose values stand in every variant's name, given or not. `functional`: devices on which
    its speed is meaningless, and why. `lends`: options that a stack which borrows from this one has too.

    `memory`: one of MEMORY_MODELS; null: its memory is not forecast. `uncut`: options with any of which its
    KV cache cannot be cut to fewer tokens. `scratch`: the options with which a GPU
    holds the scratch memory of ExLlamaV2; null: never. `reference`: the options with which it computes the
    reference logits of weights in its format; it makes files of this format for all stacks. `unfused`: the
    options that undo fused layers, whose logits are compared with the unfused ones too. `published`: its
    variants in the published study, by their names here. `offers`: rows of variants, as in a config, among
    which `harness recommend` chooses; empty: the defaults. `trials`: what `harness tune` tries beside
    threads, in this order. `program`: the stack's own program, `{}` for the path of the weights; its
    options' flags follow; empty: none. `kernel_changes`: by the length of a pass. `fused` and `waits`: parts
    of the names of variants with fused layers, and of those in which a matrix product waits for the device,
    so that attention adds to the host's time.
    `applies`: methods of quantized checkpoints (quant_method) that it
    loads as they are, each with the options that must name what is stored. `wrappers`: of the model_types
    with a text_config, those that it loads; null: unknown. `converts`: dense model_types that its job
    `convert` takes, each with its scalings of rotary positions.
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
    lends: tuple[str, ...] = ()
    memory: str | None = None
    scratch: When | None = None
    reference: dict[str, Given] | None = None
    uncut: tuple[When, ...] = ()
    unfused: dict[str, Given] = field(default_factory=dict)
    published: dict[str, str] = field(default_factory=dict)
    offers: tuple[dict[str, Any], ...] = ()
    trials: tuple[Trial, ...] = ()
    program: str = ""
    kernel_changes: tuple[KernelChange, ...] = ()
    fused: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    applies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    wrappers: Sequence[str] | None = None
    converts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of weights it loads; empty for none."""
        if self.weights.startswith("{"):
            return tuple(map(str, self.options[self.weights[1:-1]].choices))
        return () if self.weights == "none" else (self.weights,)

    def environment_for(self, device: str) -> Environment | None:
        return next((e for e in self.environments.values() if e.device == device), None)

    def context_of(self, options: Options) -> Context | None:
        """How these options (resolved) set the context length; null: the context grows, there is nothing to
        set."""
        return next((context for context in self.contexts if holds(context.when, options)), None)


def runners_folder() -> Path:
    """The folder of the runners; HARNESS_RUNNERS names another one, whose name must be `runners`."""
    return Path(os.environ.get("HARNESS_RUNNERS") or Path(__file__).parent.parent.parent / "runners")


def stacks() -> dict[str, Header]:
    """Every runner with a header, by stack name (= file name)."""
    return _stacks(runners_folder())


@cache
def _stacks(folder: Path) -> dict[str, Header]:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    return {name: parse(name, text) for name, text in texts.items() if "\n# /// script\n" in "\n" + text}


def references() -> dict[str, Header]:
    """By format of weights, the stack of the reference logits, which makes files of this format."""
    return {header.weights: header for header in stacks().values() if header.reference is not None}


def parse(stack: str, text: str) -> Header:
    """The header in a runner's source text."""
    table = _table(stack, text)
    try:
        tool = table["tool"]["harness"]
        lender = _lender(stack, tool["borrows"]) if "borrows" in tool else None
        options = _own_options(tool) | _lent(stack, tool, lender)
        limits = tuple(rules.limit(stack, given, options) for given in tool.get("limits", ()))
        contexts = tuple(rules.context(stack, given, options) for given in tool.get("context", ()))
        header = Header(
            stack,
            tool["summary"],
            tool["weights"],
            tuple(tool.get("named", ())),
            options,
            _environments(stack, table),
            limits,
            dict(tool.get("functional", {})),
            contexts + (lender.contexts if lender else ()),
            tuple(tool.get("lends", ())),
            tool.get("memory", lender.memory if lender else None),
            rules.only(stack, "scratch", tool["scratch"], options) if "scratch" in tool else None,
            tool.get("reference"),
            (lender.uncut if lender else ())
            + tuple(rules.only(stack, "uncut", given, options) for given in tool.get("uncut", ())),
            dict(tool.get("unfused", {})),
            dict(tool.get("published", {})),
            tuple(tool.get("offers", ())),
            tuple(rules.trial(stack, given, options) for given in tool.get("tune", ())),
            tool.get("program", ""),
            tuple(KernelChange(**given) for given in tool.get("kernel_changes", ())),
            tuple(tool.get("fused", ())),
            tuple(tool.get("waits", ())),
            applies=tool.get("applies", {}),
            wrappers=tool.get("wrappers", lender.wrappers if lender else None),
            converts=tool.get("converts", {}),
        )
    except (AttributeError, KeyError, TypeError) as mistake:
        raise HeaderError(f"runners/{stack}.py: header: {mistake!r}") from mistake
    _check(header)
    return header


def _check(header: Header) -> None:
    """Raises HeaderError for names that the header uses and does not define."""

    def wrong(sentence: str) -> HeaderError:
        return HeaderError(f"runners/{header.stack}.py: {sentence}")

    devices = {environment.device for environment in header.environments.values()}
    if strange := header.functional.keys() - devices:
        raise wrong(f"functional on {strange.pop()}, without an environment")
    for key, names in (
        ("lends", header.lends),
        ("reference", header.reference or ()),
        ("unfused", header.unfused),
        ("applies", {name for required in header.applies.values() for name in required}),
        ("offers", {name for row in header.offers for name in row}),
    ):
        if unknown := [name for name in names if name not in header.options]:
            raise wrong(f"{key} has {unknown[0]}, which is no option")
    for change in header.kernel_changes:
        if type(change.longest) is not int or not isinstance(change.then, str):
            raise wrong("has kernel_changes without a whole number `longest` and a text `then`")
    if header.memory not in (None, *MEMORY_MODELS):
        raise wrong(f"has memory = {header.memory!r}; there are {', '.join(MEMORY_MODELS)}")


def _environments(stack: str, table: dict[str, Any]) -> dict[str, Environment]:
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
            lock_name=f"{stack}-{name}" if "dependencies" in given else stack,
            accepts=tuple(table["tool"]["harness"].get("accepts", ())),
        )
        for name, given in table["tool"]["harness"]["env"].items()
    }


def _table(stack: str, text: str) -> dict[str, Any]:
    blocks = [m for m in _BLOCK.finditer(text) if m["type"] == "script"]
    if len(blocks) != 1:
        raise HeaderError(f"runners/{stack}.py: {len(blocks)} script blocks, expected one")
    lines = blocks[0]["content"].splitlines()
    try:
        table: dict[str, Any] = tomllib.loads("\n".join(line[2:] for line in lines))
    except tomllib.TOMLDecodeError as mistake:
        raise HeaderError(f"runners/{stack}.py: header: {mistake}") from mistake
    return table


def _own_options(tool: dict[str, Any]) -> dict[str, Option]:
    return {name: _option(name, given) for name, given in tool.get("options", {}).items()}


def _option(name: str, given: dict[str, Any]) -> Option:
    known = {key.replace("-", "_"): value for key, value in given.items()}
    known["choices"] = tuple(known.get("choices", ()))
    return Option(name=name, **known)


def _lender(stack: str, lender: str) -> Header:
    path = runners_folder() / f"{lender}.py"
    if not path.exists():
        raise HeaderError(f"runners/{stack}.py: borrows from {lender}, which is no stack")
    text = path.read_text(encoding="utf-8")
    if "lends" not in _table(lender, text)["tool"]["harness"]:
        raise HeaderError(f"runners/{stack}.py: borrows from {lender}, which lends nothing")
    return parse(lender, text)


def _lent(stack: str, tool: dict[str, Any], lender: Header | None) -> dict[str, Option]:
    """The options that a lender lends."""
    if lender is None:
        return {}
    if has := [name for name in lender.lends if name in tool.get("options", {})]:
        raise HeaderError(f"runners/{stack}.py: borrows {has[0]} from {lender.stack}, but already has it")
    return {name: lender.options[name] for name in lender.lends}
