"""The JSON Schema of records, docs/record.schema.json."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import get_original_bases

from harness.records.checked import Checked
from harness.records.kinds import KINDS
from harness.records.measured import Measured
from harness.records.published import Published
from harness.records.scored import Scored
from harness.records.searched import Searched


def json_schema() -> Any:
    """One schema for the five kinds, with `kind` as discriminator; each key has its description."""
    every: Any = Annotated[
        Measured | Checked | Searched | Scored | Published, Field(title="A record of harness")
    ]
    # pydantic reads descriptions from the source, which takes 0.35 s: only here
    described = ConfigDict(use_attribute_docstrings=True)
    schema = TypeAdapter(every, config=described).json_schema()
    for name, kind in KINDS.items():
        properties = schema["$defs"][kind.__name__]["properties"]
        properties["kind"] = {"const": name}
        for part in _parts_of(kind):  # of a class's own keys alone it reads them
            alone = TypeAdapter(list[part], config=described)  # type: ignore[valid-type]
            own = alone.json_schema()["$defs"][part.__name__]
            for key, value in own["properties"].items():
                if description := value.get("description"):
                    properties[key]["description"] = description
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _parts_of(kind: Any) -> Iterator[Any]:
    """The types that a kind takes its keys from, and theirs."""
    for base in get_original_bases(kind):
        if hasattr(base, "__annotations__"):
            yield base
            yield from _parts_of(base)
