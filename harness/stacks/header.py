"""Read the PEP 723 header of a runner: options, limits, contexts, weights, environments. Imports no stack."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RUNNERS = Path(__file__).parent.parent.parent / "runners"
# The reference pattern of PEP 723.
_BLOCK = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")


class HeaderError(ValueError):
    """A runner's header is missing or wrong: a mistake in this project, not in the user's config."""


@dataclass(frozen=True)
class Option:
    """One option of a stack. `default` null means: `default_from` (threads or tokens), else the stack's
    own."""

    name: str
    type: str
    help: str
    choices: tuple[Any, ...] = ()
    default: Any = None
    default_from: str | None = None
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True)
class Limit:
    """A limitation of a stack; `says` is the library's own message. Where every option in `when` has one of
    its values, the given rules must hold: on linear layers, packing of the weights, their files, the device.
    `covers`: an option that must be at least prompt + new tokens. `never`: the combination is impossible.
    `refuses`: such a cell is not started; otherwise it runs, and the library itself fails."""

    says: str
    when: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    in_features_multiple_of: int | None = None
    out_features_multiple_of: int | None = None
    bits: tuple[int, ...] = ()
    group_sizes: tuple[int, ...] = ()
    symmetric: bool | None = None
    act_order: bool | None = None
    sharded: bool | None = None
    compute_capability: tuple[int, int] | None = None
    compute_capability_below: tuple[int, int] | None = None
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
    when: dict[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Environment:
    """One way to build a stack's interpreter. `device`: the device family it serves. `unisolated`: packages
    built with the environment's own torch at hand; `optional`: optional requirements; `imports`:
    compiled modules of kernels."""

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


@dataclass(frozen=True)
class Header:
    """The header of a runner. `weights`: the format it loads (gguf, hf, gptq or awq), none, or
    "{option}" for the one that option names. `named`: options whose values stand in every variant's name,
    given or not. `functional`: devices on which its speed is meaningless, and why."""

    stack: str
    summary: str
    weights: str
    named: tuple[str, ...]
    options: dict[str, Option]
    environments: dict[str, Environment]
    limits: tuple[Limit, ...] = ()
    functional: dict[str, str] = field(default_factory=dict)
    contexts: tuple[Context, ...] = ()

    def environment_for(self, device: str) -> Environment | None:
        return next((e for e in self.environments.values() if e.device == device), None)

    def context_of(self, options: Mapping[str, Any]) -> Context | None:
        """How these options (resolved) set the context length; null: the context grows, there is nothing to
        set."""
        return next(
            (
                context
                for context in self.contexts
                if all(options.get(name) in values for name, values in context.when.items())
            ),
            None,
        )


@cache
def stacks() -> dict[str, Header]:
    """Every runner with a header, by stack name (= file name)."""
    found = {}
    for path in sorted(RUNNERS.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\n# /// script\n" in "\n" + text:
            found[path.stem] = parse(path.stem, text)
    return found


def parse(stack: str, text: str) -> Header:
    """The header in a runner's source text."""
    table = _table(stack, text)
    try:
        tool = table["tool"]["harness"]
        options = _own_options(tool) | _borrowed(stack, tool)
        shared = tuple(table.get("dependencies", ()))
        python = table["requires-python"]
        environments = {
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
            )
            for name, given in tool["env"].items()
        }
        named = tuple(tool.get("named", ()))
        limits = tuple(_limit(stack, given, options) for given in tool.get("limits", ()))
        functional = dict(tool.get("functional", {}))
        if strange := functional.keys() - {environment.device for environment in environments.values()}:
            raise HeaderError(f"runners/{stack}.py: functional on {strange.pop()}, without an environment")
        contexts = tuple(_context(stack, given, options) for given in tool.get("context", ()))
        return Header(
            stack,
            tool["summary"],
            tool["weights"],
            named,
            options,
            environments,
            limits,
            functional,
            contexts,
        )
    except (AttributeError, KeyError, TypeError) as mistake:
        raise HeaderError(f"runners/{stack}.py: header: {mistake!r}") from mistake


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


def _borrowed(stack: str, tool: dict[str, Any]) -> dict[str, Option]:
    """Options from another stack's header: its own, not those that it borrows."""
    found: dict[str, Option] = {}
    for lender, names in tool.get("borrows", {}).items():
        path = RUNNERS / f"{lender}.py"
        if not path.exists():
            raise HeaderError(f"runners/{stack}.py: borrows from {lender}, which is no stack")
        theirs = _own_options(_table(lender, path.read_text(encoding="utf-8"))["tool"]["harness"])
        for name in names:
            if name not in theirs:
                raise HeaderError(f"runners/{stack}.py: borrows {name} from {lender}, which lacks it")
            if name in found or name in tool.get("options", {}):
                raise HeaderError(f"runners/{stack}.py: borrows {name} from {lender}, but already has it")
            found[name] = theirs[name]
    return found


# The type of each rule; of the switches, the one value that has an effect.
_RULES: dict[str, type] = {"says": str, "when": dict, "covers": str, "device": str}
_CAPABILITIES = ("compute_capability", "compute_capability_below")
_RULES |= dict.fromkeys(_CAPABILITIES, str)
_RULES |= {"in_features_multiple_of": int, "out_features_multiple_of": int, "bits": list, "group_sizes": list}
_SWITCHES = {"symmetric": True, "act_order": False, "sharded": False, "never": True, "refuses": True}


def _limit(stack: str, given: dict[str, Any], options: dict[str, Option]) -> Limit:
    def wrong(sentence: str) -> HeaderError:
        return HeaderError(f"runners/{stack}.py: a limit {sentence}")

    for key, value in given.items():
        if key not in _RULES and key not in _SWITCHES:
            raise wrong(f"has no rule {key}; there are {', '.join([*_RULES, *_SWITCHES])}")
        if key in _SWITCHES and value is not _SWITCHES[key]:
            raise wrong(f"accepts only {key} = {str(_SWITCHES[key]).lower()}")
        if key in _RULES and type(value) is not _RULES[key]:
            raise wrong(f"has {key} = {value!r}, expected {_RULES[key].__name__}")
    if not given.get("says"):
        raise wrong("lacks says, the message of the library")
    if not given.keys() - {"says", "when", "refuses"}:
        raise wrong("has no rule")
    known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    when = _when(given, options, wrong)
    if "covers" in given and (given["covers"] not in options or options[given["covers"]].type != "int"):
        raise wrong(f"has covers = {given['covers']!r}, which is no option of type int")
    for key in known.keys() & set(_CAPABILITIES):
        if not re.fullmatch(r"\d+\.\d", given[key]):
            raise wrong(f"has {key} = {given[key]!r}, expected a version such as 8.0")
        known[key] = tuple(map(int, given[key].split(".")))
    return Limit(**(known | {"when": when}))


def _context(stack: str, given: dict[str, Any], options: dict[str, Option]) -> Context:
    def wrong(sentence: str) -> HeaderError:
        return HeaderError(f"runners/{stack}.py: a context {sentence}")

    if given.keys() - {"when"} != {"option", "granule", "dry"}:
        raise wrong("needs option, granule and dry; when is optional")
    option, granule, dry = given["option"], given["granule"], given["dry"]
    if option not in options or options[option].type != "int":
        raise wrong(f"has option = {option!r}, which is no option of type int")
    if type(granule) is not int or granule < 1:
        raise wrong(f"has granule = {granule!r}, expected a whole number of tokens, at least 1")
    if type(dry) is not bool:
        raise wrong(f"has dry = {dry!r}, expected true or false")
    return Context(option, granule, dry, _when(given, options, wrong))


def _when(
    given: dict[str, Any], options: dict[str, Option], wrong: Callable[[str], HeaderError]
) -> dict[str, tuple[Any, ...]]:
    """The values that options must have, by option. Raises `wrong` for an unknown option or value."""
    when = {k: tuple(v) if isinstance(v, list) else (v,) for k, v in given.get("when", {}).items()}
    for name, values in when.items():
        if name not in options:
            raise wrong(f"has when = {name}, which is no option")
        choices = (True, False) if options[name].type == "bool" else options[name].choices or values
        if strange := [value for value in values if value not in choices]:
            raise wrong(f"has when = {name} {strange[0]}, which is no choice")
    return when
