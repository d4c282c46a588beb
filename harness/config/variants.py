"""The rows of variants and exclusions: check options by the stack's header, expand matrices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WrapValidator,
    create_model,
)

from harness.base import bounds
from harness.base.text import server_address, shortened
from harness.config import yaml_text
from harness.config.base import absolute, tokens_of
from harness.config.experiment import (
    Exclude,
    Model,
    Scalar,
    Variant,
    Weights,
)
from harness.config.form import VariantRow
from harness.config.mistakes import Loc, Mistakes, expected, shown, suggestion
from harness.stacks.header import Option, Options, Value, runners_folder, stacks
from harness.theory.packed_sizes import FORMATS
from harness.theory.quantities import TOKENS

EXCLUDED_BY = ("model", "stack", "variant", "workload")  # globs; other keys are values of options

_TYPES = {"int": int, "float": float, "bool": bool}  # all others are text
_INT32 = 2**31 - 1  # stacks pass whole numbers to C, which silently truncates larger ones
_MAX_NAME = 100
SECRET = r"HARNESS_[A-Z0-9_]{1,60}"  # a config of somebody else's must not send another key to its server


def variant_row(stack: str) -> type[VariantRow]:
    """The form of a variant's row: its keys, and each option of the stack with a value or a list of them."""
    return _variant_row(stack, runners_folder())


@cache
def _variant_row(stack: str, runners: Path) -> type[VariantRow]:
    header = stacks()[stack]
    fields: dict[str, Any] = {"stack": (Literal[stack], ...)}
    for name, option in header.options.items():
        one = _value_type(option, is_secret=name == header.secret)
        many: Any = Annotated[list[one], Field(min_length=1)]  # type: ignore[valid-type]
        field = Field(default=option.default, description=option.help)
        fields[name] = (Annotated[many, BeforeValidator(_one_or_several)], field)
    return create_model(f"{stack}-variant", __base__=VariantRow, __doc__=header.summary, **fields)


def _one_or_several(value: Any) -> Any:
    if value == []:
        raise ValueError("an empty list gives no variants")
    return value if isinstance(value, list) else [value]


def _as_given(value: Any, check: Callable[[Any], object]) -> Any:
    """The value that passed: 2 of a float is 2 in the name of its variant."""
    check(value)
    return value


def _value_type(option: Option, is_secret: bool) -> Any:
    """The type of one value of an option, its bounds and its choices."""

    def typed(value: Any) -> Any:
        if option.type in ("path", "url") and not isinstance(value, str):
            raise ValueError(expected("a path" if option.type == "path" else "an address", value))
        return tokens_of(value) if option.type == "int" else value

    def allowed(value: Any) -> Any:
        if option.choices and value not in option.choices:
            raise ValueError(f"unknown {option.name} {shown(value)}" + suggestion(value, option.choices))
        if is_secret and not re.fullmatch(SECRET, value):
            raise ValueError("must be the name of a variable, HARNESS_..., never the key itself")
        if option.type == "path":
            absolute(value, Path())  # a variant's name has the path as it was written
        return server_address(value) if option.type == "url" else value

    low, high = option.minimum, option.maximum
    extra: Any = {"enum": [*option.choices]} if option.choices else None
    if option.type == "int":
        low, high = -_INT32 if low is None else low, _INT32 if high is None else high
        extra = extra or {"type": ["integer", "string"], "pattern": TOKENS}
    rules: list[Any] = [Field(ge=low, le=high, json_schema_extra=extra)]
    if option.type in ("int", "path", "url"):
        rules.append(BeforeValidator(typed))
    if option.type == "float":
        rules.append(WrapValidator(_as_given))
    if option.choices or is_secret or option.type in ("path", "url"):
        rules.append(AfterValidator(allowed))
    return Annotated[(_TYPES.get(option.type, str), *rules)]


def expanded(given: Any, loc: Loc, names: list[str], folder: Path, mistakes: Mistakes) -> list[Variant]:
    """All variants of a row, first list outermost; empty after adding its mistakes. `names`: the models'.
    Relative paths start at `folder`."""
    if not isinstance(given, dict):
        mistakes.add(loc, expected("a mapping such as {stack: llamacpp, quant: q4_0}", given))
        return []
    before = len(mistakes.found)
    stack = given.get("stack")
    header = stacks().get(stack) if isinstance(stack, str) else None
    if header is None:
        known = {key: given[key] for key in VariantRow.model_fields if key in given}
        if mistakes.checked(VariantRow, known, loc):
            mistakes.add((*loc, "stack"), f"unknown stack {shown(stack)}" + suggestion(stack, stacks()))
        return []
    row = mistakes.checked(variant_row(header.stack), given, loc)
    if row is None:
        return []
    for index, glob in enumerate(row.models):
        if names and not any(fnmatchcase(name, glob) for name in names):
            mistakes.add((*loc, "models", index), f"{shown(glob)} matches no model" + suggestion(glob, names))
    if len(mistakes.found) > before:
        return []
    values: dict[str, list[Scalar]] = {key: getattr(row, key) for key in given if key in header.options}
    for key in [key for key in values if header.options[key].type == "url"]:
        values[key] = [*dict.fromkeys(values[key])]  # two spellings of one address
    if (count := math.prod(len(v) for v in values.values())) > bounds.CONFIG_CELLS:
        mistakes.add(loc, f"a matrix of {count} variants; at most {bounds.CONFIG_CELLS}")
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
        for key in [key for key, path in options.items() if path and header.options[key].type == "path"]:
            options[key] = absolute(str(options[key]), folder)
        of = {"models": tuple(row.models), "where": tuple(row.where)}
        found.append(Variant(stack=row.stack, name=name, options=options, **of))
    return found


def given_values(stack: str, name: str, text: str) -> list[Scalar]:
    """The values of an option of `--option NAME=VALUE,...`. Raises ConfigError."""
    place = f"--option {shortened(f'{name}={text}')}"
    mistakes = Mistakes(lambda loc: place)
    values = [yaml_text.parse(word, lambda line: place)[0] for word in text.split(",")]
    if name not in (options := stacks()[stack].options):
        mistakes.add((), f"unknown option of {stack}" + suggestion(name, options))
    row = not mistakes.found and mistakes.checked(variant_row(stack), {"stack": stack, name: values}, ())
    mistakes.found = [((), sentence) for _, sentence in mistakes.found]
    mistakes.stop_if_any()
    return list(getattr(row, name))


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
    """The requested quantization or the stack's default; None: as stored."""
    quant = _option_of(variant, "quant")
    return None if quant is None else str(quant)


def weights_of(model: Model, variant: Variant) -> Weights | None:
    """The weights that a variant loads, placeholders in place; None: its stack could load none."""
    return model.weights_for(weights_format(variant), quant_of(variant))


def bits_of(variant: Variant) -> int | None:
    """The requested bits of GPTQ or AWQ weights, 4 by default; None for other stacks."""
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
    return "-".join(str(part) for part in parts if part) or ("as-stored" if "quant" in named else "default")


def _word(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else re.sub(r"[^A-Za-z0-9._+-]+", "-", str(value))


def exclusion(given: Any, loc: Loc, used: set[str], mistakes: Mistakes) -> Exclude | None:
    """The rule of a row; None after adding its mistakes. `used`: the stacks of the variants."""
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
    wanted = {key: tuple(value) if isinstance(value, list) else (value,) for key, value in options.items()}
    wanted |= {key: tuple(map(tokens_of, wanted[key])) for key in wanted if known.get(key) == "int"}
    for key, values in wanted.items():
        if key not in known:
            hint = suggestion(key, [*sorted(known), *EXCLUDED_BY])
            mistakes.add((*loc, key), "unknown key" + hint)
        elif not all(isinstance(value, (str, int, float)) for value in values):
            mistakes.add((*loc, key), expected("a value, or a list of values", options[key]))
    return Exclude(**names, options=wanted) if len(mistakes.found) == before else None
