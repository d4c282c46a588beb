"""Parse the rows of variants and exclusions: check options by the stack's header, expand matrices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from harness.config import yaml_text
from harness.config.experiment import Exclude, Scalar, Variant
from harness.config.forms import VariantRow
from harness.config.frozen import tokens_of
from harness.config.mistakes import Loc, Mistakes, expected, shown, suggestion
from harness.stacks.header import stacks
from harness.stacks.rules import Option, Options, Value
from harness.system.wording import shortened
from harness.theory.packed import FORMATS

EXCLUDED_BY = ("model", "stack", "variant", "workload")  # globs; other keys are values of options
MAX_CELLS = 10_000  # more is a mistake in a matrix: at a minute each, a week

_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "string": ("text", (str,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("true or false", (bool,)),
}
_INT32 = 2**31 - 1  # stacks pass whole numbers to C, which silently truncates larger ones
_MAX_NAME = 100


def expanded(given: Any, loc: Loc, names: list[str], mistakes: Mistakes) -> list[Variant]:
    """All variants of a row, first list outermost; empty after adding its mistakes. `names`: the models'."""
    if not isinstance(given, dict):
        mistakes.add(loc, expected("a mapping such as {stack: llamacpp, quant: q4_0}", given))
        return []
    before = len(mistakes.found)
    keys = list(VariantRow.model_fields)
    row = mistakes.checked(VariantRow, {key: given[key] for key in keys if key in given}, loc)
    if row is None:
        return []
    for index, glob in enumerate(row.models):
        if names and not any(fnmatchcase(name, glob) for name in names):
            mistakes.add((*loc, "models", index), f"{shown(glob)} matches no model" + suggestion(glob, names))
    header = stacks().get(row.stack)
    if header is None:
        mistakes.add((*loc, "stack"), f"unknown stack {shown(row.stack)}" + suggestion(row.stack, stacks()))
        return []
    values: dict[str, list[Scalar]] = {}
    for key, value in given.items():
        if key in keys:
            continue
        if key not in header.options:
            mistakes.add((*loc, key), "unknown key" + suggestion(key, [*header.options, *keys]))
            continue
        values[key] = _values(value, header.options[key].type == "int")
        if not values[key]:
            mistakes.add((*loc, key), "an empty list gives no variants")
        for index, item in enumerate(values[key]):
            if wrong := _option_mistake(header.options[key], item):
                mistakes.add((*loc, key, index) if isinstance(value, list) else (*loc, key), wrong)
    if len(mistakes.found) > before:
        return []
    if (count := math.prod(len(v) for v in values.values())) > MAX_CELLS:
        mistakes.add(loc, f"a matrix of {count} variants; at most {MAX_CELLS}")
        return []
    defaults = {key: option.default for key, option in header.options.items()}
    varying = [key for key in values if len(values[key]) > 1]
    found = []
    for chosen in product(*values.values()):
        options = dict(zip(values, chosen, strict=True))
        name = _variant_name(row.name, options, varying, defaults, header.named)
        if len(name) > _MAX_NAME:
            mistakes.add(loc, f"the variant name {shown(name)} is too long; give it a shorter name")
            return []
        of = {"models": tuple(row.models), "where": tuple(row.where)}
        found.append(Variant(stack=row.stack, name=name, options=options, **of))
    return found


def _values(given: Any, whole: bool) -> list[Any]:
    """The values of an option; 32k is 32,768 where they are whole numbers."""
    values = given if isinstance(given, list) else [given]
    return [tokens_of(value) for value in values] if whole else values


def given_values(stack: str, name: str, text: str) -> list[Scalar]:
    """The values of an option as a command line has them, parted by commas. Raises ConfigError."""
    place = f"--option {shortened(f'{name}={text}')}"
    mistakes = Mistakes(lambda loc: place)
    option = stacks()[stack].options.get(name)
    values: list[Any] = []
    if option is None:
        mistakes.add((), f"unknown option of {stack}" + suggestion(name, stacks()[stack].options))
    else:
        parsed = [yaml_text.parse(each, lambda line: place)[0] for each in text.split(",")]
        values = _values(parsed, option.type == "int")
        for wrong in filter(None, (_option_mistake(option, value) for value in values)):
            mistakes.add((), wrong)
    mistakes.stop_if_any()
    return values


def varied(variant: Variant, changes: Mapping[str, Scalar]) -> Variant:
    """The variant with other values of some options, which its name ends with."""
    name = "-".join([variant.name, *(f"{key}={_word(value)}" for key, value in changes.items())])
    options = {**variant.options, **changes}
    return variant.model_copy(update={"name": name[:_MAX_NAME], "options": options})


def weights_format(variant: Variant) -> str:
    """The format that the variant's stack loads: gguf, hf, gptq, awq or none. A header with an option in
    braces takes that option's value."""
    header = stacks()[variant.stack]
    if not header.weights.startswith("{"):
        return header.weights
    option = header.options[header.weights[1:-1]]
    return str(variant.options.get(option.name, option.default))


def quant_of(variant: Variant) -> str | None:
    """The requested quantization or the stack's default; null: as stored."""
    quant = _option_of(variant, "quant")
    return None if quant is None else str(quant)


def bits_of(variant: Variant) -> int | None:
    """The requested bits of GPTQ or AWQ weights, 4 by default; null for other stacks."""
    if weights_format(variant) not in FORMATS:
        return None
    bits = _option_of(variant, "bits")
    return 4 if bits is None else int(bits)


def _option_of(variant: Variant, name: str) -> Value:
    option = stacks()[variant.stack].options.get(name)
    return variant.options.get(name, option.default if option else None)


def _variant_name(
    given: str | None,
    options: dict[str, Scalar],
    varying: list[str],
    defaults: Options,
    named: tuple[str, ...],
) -> str:
    """The given name and the options that vary; else the named options and those that are not the default."""
    keys = sorted(varying if given else [key for key in options if options[key] != defaults[key]])
    parts: list[Value] = [given] if given else []
    parts += [options.get(key, defaults[key]) for key in named if not given or key in varying]
    parts += [f"{key}={_word(options[key])}" for key in keys if key not in named]
    return "-".join(str(part) for part in parts if part) or "default"


def _word(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else re.sub(r"[^A-Za-z0-9._+-]+", "-", str(value))


def _option_mistake(option: Option, value: Any) -> str | None:
    """What is wrong with a value given for an option."""
    what, types = _TYPES[option.type]
    if type(value) not in types:
        return expected(what, value)
    if option.choices and value not in option.choices:
        return f"unknown {option.name} {shown(value)}" + suggestion(value, option.choices)
    if option.type not in ("int", "float"):
        return None
    if not math.isfinite(value):
        return f"must be a finite number, got {value}"
    widest = _INT32 if option.type == "int" else math.inf
    low = -widest if option.minimum is None else option.minimum
    high = widest if option.maximum is None else option.maximum
    if value < low:
        return f"must be at least {low}, got {value}"
    return f"must be at most {high}, got {value}" if value > high else None


def exclusion(given: Any, loc: Loc, used: set[str], mistakes: Mistakes) -> Exclude | None:
    """The rule of a row; null after adding its mistakes. `used`: the stacks of the variants."""
    if not isinstance(given, dict) or not given:
        what = expected("a mapping such as {model: qwen*, quant: q4_0}", given)
        mistakes.add(loc, "is empty, which would exclude everything" if given == {} else what)
        return None
    before = len(mistakes.found)
    names = {key: given[key] for key in EXCLUDED_BY if key in given}
    options = {key: value for key, value in given.items() if key not in names}
    known = {key: option.type for stack in used for key, option in stacks()[stack].options.items()}
    for key, glob in names.items():
        if not isinstance(glob, str):
            mistakes.add((*loc, key), expected("text", glob))
    wanted = {key: tuple(_values(value, known.get(key) == "int")) for key, value in options.items()}
    for key, values in wanted.items():
        if key not in known:
            hint = suggestion(key, [*sorted(known), *EXCLUDED_BY])
            mistakes.add((*loc, key), "unknown key" + hint)
        elif not all(isinstance(value, (str, int, float)) for value in values):
            mistakes.add((*loc, key), expected("a value, or a list of values", options[key]))
    return Exclude(**names, options=wanted) if len(mistakes.found) == before else None
