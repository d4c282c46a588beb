"""The config's JSON Schema (draft 2020-12), stack options included, so that editors complete and check it.

`python -m harness.config.schema > configs/schema.json` refreshes the shipped one.
"""

from __future__ import annotations

import json

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaValue, models_json_schema

from harness.config.form import (
    File,
    FormatWeights,
    HubWeights,
    InlineShape,
    ModelRow,
    PathWeights,
    SyntheticWeights,
)
from harness.config.variants import EXCLUDED_BY, variant_row
from harness.config.workloads import KINDS
from harness.stacks.header import stacks
from harness.theory.ggml_quants import ALL_QUANTS
from harness.theory.hf_config import SHAPES


def schema() -> JsonSchemaValue:
    """The schema as plain data."""
    kinds: list[type[BaseModel]] = [File, ModelRow, InlineShape, PathWeights, HubWeights, SyntheticWeights]
    kinds += [FormatWeights, *map(variant_row, stacks())]
    _, made = models_json_schema([(kind, "validation") for kind in kinds])
    defs: JsonSchemaValue = made["$defs"]
    file = defs.pop("File")
    for workload in KINDS.values():
        defs[workload.__name__].setdefault("required", []).append("kind")
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
        rows = defs[f"{stack}-variant"]["properties"]
        for name in header.options:
            several = rows[name]
            of_option = {key: several.pop(key) for key in ("title", "default", "description")}
            rows[name] = of_option | {"anyOf": [several["items"], several]}  # one value, or a list of them
    defs["Variant"] = {"oneOf": [_ref(f"{stack}-variant") for stack in stacks()]}
    defs["Exclude"] = _exclude()
    top = file["properties"]
    word = {"type": "string", "minLength": 1, "description": "a path, org/name of the hub, or a known name"}
    top["models"]["items"] = {"anyOf": [word, _ref("ModelRow")]}
    top["variants"]["items"] = top["include"]["items"] = _ref("Variant")
    top["exclude"]["items"] = _ref("Exclude")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **file,
        "title": "harness config",
        "$defs": dict(sorted(defs.items())),
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def _exclude() -> JsonSchemaValue:
    names = {key: {"type": "string", "description": "a glob"} for key in EXCLUDED_BY}
    options = sorted({name for header in stacks().values() for name in header.options})
    value = {"type": ["string", "number", "boolean"]}
    any_value = {"anyOf": [value, {"type": "array", "items": value, "minItems": 1}]}
    return {
        "type": "object",
        "description": "a cell is left out where all of these match",
        "properties": {**names, **dict.fromkeys(options, any_value)},
        "minProperties": 1,
        "additionalProperties": False,
    }


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
