"""Rules in a runner's header: options, limits, and how a context's length is set. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Given = str | int | float
"""A value of an option, also true and false."""
Value = Given | None
"""Null: the stack's own."""
Options = Mapping[str, Value]
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
    """Of variants whose name contains `variant` (empty: of all): a pass of more tokens than `longest` runs
    other kernels, and `then` says from what to what."""

    longest: int
    then: str
    variant: str = ""


@dataclass(frozen=True)
class Limit:
    """A limitation of a stack; `says` is the library's own message. Where every option in `when` has one of
    its values, the given rules must hold: on linear layers, packing of the weights, their files, the device.
    `covers`: an option that must be at least prompt + new tokens. `never`: the combination is impossible.
    `refuses`: such a cell is not started; otherwise it runs, and the library itself fails."""

    says: str
    when: When = field(default_factory=dict)
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
    when: When = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """Values that `harness tune` tries of options that belong together, each set at once. `device`: cpu or
    gpu, where they have no effect elsewhere; `purpose`: decode or prefill alone; null: all."""

    settings: tuple[Mapping[str, Given], ...]
    device: str | None = None
    purpose: str | None = None


PURPOSES, KINDS_OF_DEVICES = ("decode", "prefill"), ("cpu", "gpu")


def holds(when: When, options: Options) -> bool:
    """Whether every option in `when` has one of its values. `options`: resolved."""
    return all(options.get(name) in values for name, values in when.items())


# The type of each rule; of the switches, the one value that has an effect.
_RULES: dict[str, type] = {"says": str, "when": dict, "covers": str, "device": str}
_CAPABILITIES = ("compute_capability", "compute_capability_below")
_RULES |= dict.fromkeys(_CAPABILITIES, str)
_RULES |= {"in_features_multiple_of": int, "out_features_multiple_of": int, "bits": list, "group_sizes": list}
_SWITCHES = {"symmetric": True, "act_order": False, "sharded": False, "never": True, "refuses": True}


def limit(stack: str, given: dict[str, Any], options: dict[str, Option]) -> Limit:
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
    required = when(given, options, wrong)
    if "covers" in given and (given["covers"] not in options or options[given["covers"]].type != "int"):
        raise wrong(f"has covers = {given['covers']!r}, which is no option of type int")
    for key in known.keys() & set(_CAPABILITIES):
        if not re.fullmatch(r"\d+\.\d", given[key]):
            raise wrong(f"has {key} = {given[key]!r}, expected a version such as 8.0")
        known[key] = tuple(map(int, given[key].split(".")))
    return Limit(**(known | {"when": required}))


def context(stack: str, given: dict[str, Any], options: dict[str, Option]) -> Context:
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
    return Context(option, granule, dry, when(given, options, wrong))


def trial(stack: str, given: dict[str, Any], options: dict[str, Option]) -> Trial:
    """Raises HeaderError."""

    def wrong(sentence: str) -> HeaderError:
        return HeaderError(f"runners/{stack}.py: tune {sentence}")

    if given.keys() - {"device", "purpose"} != {"settings"}:
        raise wrong("needs settings; device and purpose are optional")
    for key, known in (("purpose", PURPOSES), ("device", KINDS_OF_DEVICES)):
        if given.get(key, known[0]) not in known:
            raise wrong(f"has {key} = {given[key]!r}, expected {' or '.join(known)}")
    for each in given["settings"]:
        when({"when": each}, options, wrong)
    return Trial(tuple(given["settings"]), given.get("device"), given.get("purpose"))


def only(stack: str, key: str, given: dict[str, Any], options: dict[str, Option]) -> When:
    """The options with which a key of the header holds."""

    def wrong(sentence: str) -> HeaderError:
        return HeaderError(f"runners/{stack}.py: {key} {sentence}")

    return when({"when": given}, options, wrong)


def when(given: dict[str, Any], options: dict[str, Option], wrong: Callable[[str], HeaderError]) -> When:
    """The values in `when` that options must have, by option. Raises `wrong` for an unknown option or
    value."""
    found = {k: tuple(v) if isinstance(v, list) else (v,) for k, v in given.get("when", {}).items()}
    for name, values in found.items():
        if name not in options:
            raise wrong(f"has when = {name}, which is no option")
        choices = (True, False) if options[name].type == "bool" else options[name].choices or values
        if strange := [value for value in values if value not in choices]:
            raise wrong(f"has when = {name} {strange[0]}, which is no choice")
    return found
