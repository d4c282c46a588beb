"""The config's JSON Schema (draft 2020-12), stack options included, so that editors complete and check it.

`python -m harness.config.schema > configs/schema.json` refreshes the shipped one.
"""

from __future__ import annotations

import json

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaValue, models_json_schema

from harness.config.experiment import KINDS
from harness.config.variants import (
    EXCLUDED_BY,
    File,
    FormatWeights,
    HubWeights,
    InlineShape,
    ModelRow,
    PathWeights,
    SyntheticWeights,
    VariantRow,
)
from harness.stacks.header import Header, Option, stacks
from harness.theory import names
from harness.theory.hf_config import SHAPES
from harness.theory.tensors import ALL_QUANTS

_JSON_TYPES = {
    "string": "string",
    "path": "string",
    "url": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
}


def schema() -> JsonSchemaValue:
    """The schema as plain data."""
    kinds: list[type[BaseModel]] = [File, ModelRow, InlineShape, PathWeights, HubWeights, SyntheticWeights]
    kinds += [FormatWeights, VariantRow, *KINDS.values()]
    _, made = models_json_schema([(kind, "validation") for kind in kinds])
    defs: JsonSchemaValue = made["$defs"]
    file, row = defs.pop("File"), defs.pop("VariantRow")
    for name, kind in KINDS.items():
        defs[kind.__name__]["required"] = ["kind"]
        defs[kind.__name__]["properties"]["kind"] = {"const": name}
    model = defs["ModelRow"]["properties"]
    model["shape"]["anyOf"] = [
        {"enum": list(SHAPES)},
        {"type": "string", "minLength": 1},
        _ref("InlineShape"),
    ]
    one = [{"type": "string", "minLength": 1}, *map(_ref, ("PathWeights", "HubWeights", "SyntheticWeights"))]
    for form in (by_format := defs["FormatWeights"])["properties"].values():
        form.pop("default")
        form["anyOf"] = one
    by_format["properties"] |= {quant: {"anyOf": one} for quant in ALL_QUANTS}
    by_format["minProperties"] = 1
    model["weights"]["anyOf"] = [*one, _ref("FormatWeights")]
    for stack, header in stacks().items():
        defs[f"{stack}-variant"] = _variant(header, row)
    defs["Variant"] = {"oneOf": [_ref(f"{stack}-variant") for stack in stacks()]}
    defs["Exclude"] = _exclude()
    top = file["properties"]
    word = {"type": "string", "minLength": 1, "description": "a path, org/name of the hub, or a known name"}
    top["models"]["items"] = {"anyOf": [word, _ref("ModelRow")]}
    top["variants"]["items"] = top["include"]["items"] = _ref("Variant")
    top["exclude"]["items"] = _ref("Exclude")
    top["workloads"]["items"] = {"oneOf": [_ref(kind.__name__) for kind in KINDS.values()]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **file,
        "title": "harness config",
        "$defs": dict(sorted(defs.items())),
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def _variant(header: Header, row: JsonSchemaValue) -> JsonSchemaValue:
    return {
        "type": "object",
        "description": header.summary,
        "properties": {
            **row["properties"],
            "stack": {"const": header.stack},
            **{name: _option(option) for name, option in header.options.items()},
        },
        "required": ["stack"],
        "additionalProperties": False,
    }


def _option(option: Option) -> JsonSchemaValue:
    one = _one_or_many(_scalar(option))
    if option.default is not None:
        one["default"] = option.default
    return {"description": option.help, **one}


def _scalar(option: Option) -> JsonSchemaValue:
    value: JsonSchemaValue = {"type": _JSON_TYPES[option.type]}
    if option.choices:
        value["enum"] = list(option.choices)
    if option.minimum is not None:
        value["minimum"] = option.minimum
    if option.maximum is not None:
        value["maximum"] = option.maximum
    if option.type == "int" and not option.choices:
        value |= {"type": ["integer", "string"], "pattern": names.TOKENS}
    return value


def _one_or_many(value: JsonSchemaValue) -> JsonSchemaValue:
    return {"anyOf": [value, {"type": "array", "items": value, "minItems": 1}]}


def _exclude() -> JsonSchemaValue:
    names = {key: {"type": "string", "description": "a glob"} for key in EXCLUDED_BY}
    options = sorted({name for header in stacks().values() for name in header.options})
    any_value = _one_or_many({"type": ["string", "number", "boolean"]})
    return {
        "type": "object",
        "description": "a cell is left out where all of these match",
        "properties": {**names, **dict.fromkeys(options, any_value)},
        "minProperties": 1,
        "additionalProperties": False,
    }


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
