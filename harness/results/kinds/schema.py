"""The JSON Schema of records, as docs/record.schema.json and the tables of docs/record.md have it."""

from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from typing_extensions import get_original_bases

from harness.results.kinds import KINDS
from harness.results.kinds.checked import Checked
from harness.results.kinds.measured import Measured
from harness.results.kinds.reported import Published
from harness.results.kinds.scored import Scored
from harness.results.kinds.searched import Searched


def json_schema() -> dict[str, Any]:
    """One schema for the five kinds, told apart by `kind`; each key with its description."""
    every: Any = Annotated[
        Measured | Checked | Searched | Scored | Published, Field(title="A record of harness")
    ]
    schema = TypeAdapter(every).json_schema()
    parts = schema["$defs"]
    for name, kind in KINDS.items():
        properties = parts[kind.__name__]["properties"]
        properties["kind"] = {"const": name}
        for base in bases(kind):
            # pydantic reads the docstrings of a class's own keys alone.
            for key, found in properties_of(base).items():
                if description := found.get("description"):
                    properties[key]["description"] = description
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def bases(kind: Any) -> tuple[Any, ...]:
    """The types that a kind takes its keys from."""
    return tuple(base for base in get_original_bases(kind) if hasattr(base, "__annotations__"))


def properties_of(part: Any) -> dict[str, dict[str, Any]]:
    """The keys of one type, with their schemas and descriptions."""
    found: dict[str, dict[str, Any]] = TypeAdapter(part).json_schema()["properties"]
    return found
