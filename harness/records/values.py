"""What single values of a record must be, and the clause that says where one is not.

`MustBe` names a value's type in words; pydantic holds the value against it, without converting anything.
"""

from datetime import datetime
from functools import cache
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, core_schema

# What is more, or nearer to 0, is damage: no figure comes near, and products and ratios of it would overflow.
_MOST, _LEAST = 2**63, 2**-63


class MustBe:
    """The words for a type, in the place of pydantic's."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        words = f"must be {self.words}"
        return core_schema.custom_error_schema(
            schema, custom_error_type="value", custom_error_message=words.replace("{", "{{")
        )


class OneOf:
    """Text that is one of these."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.texts = texts

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.texts))


def _with_zone(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("no time zone")
    return text


OUTCOMES = ("ok", "oom", "error", "crash", "timeout", "interrupted", "refused", "unavailable")

Text = Annotated[str, MustBe("text")]
# It names folders and pages, so it must not lead out of one.
Slug = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,80}$"), MustBe("1 to 80 of a to z, 0 to 9 and -")]
Count = Annotated[int, Field(ge=0, lt=_MOST), MustBe("a whole number from 0")]
Positive = Annotated[int, Field(gt=0, lt=_MOST), MustBe("a whole number from 1")]
Extent = Annotated[int, Field(gt=0, lt=2**32), MustBe("a whole number from 1 to 4294967295")]
Number = Annotated[float, Field(gt=-_MOST, lt=_MOST, allow_inf_nan=False), MustBe("a number")]
From0 = Annotated[float, Field(ge=0, lt=_MOST, allow_inf_nan=False), MustBe("a number from 0")]
Above0 = Annotated[float, Field(gt=_LEAST, lt=_MOST, allow_inf_nan=False), MustBe("a number above 0")]
Switch = Annotated[bool, MustBe("true or false")]
Time = Annotated[str, AfterValidator(_with_zone), MustBe("a time with its zone")]
Outcome = Annotated[str, OneOf(OUTCOMES), MustBe(f"one of {', '.join(OUTCOMES)}")]
Pairs = Annotated[
    list[Annotated[list[Count], Field(min_length=2, max_length=2)]], MustBe("pairs of whole numbers")
]
Triples = Annotated[
    list[Annotated[list[Count], Field(min_length=3, max_length=3)]], MustBe("triples of whole numbers")
]
Fields = dict[str, Any]
"""A mapping of JSON whose keys have no types."""
Names = Annotated[list[str] | Fields, MustBe("names")]
Placements = Annotated[dict[str, Count] | list[Any], MustBe("counts by device")]

_CLAUSES = {
    "missing": "is missing",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "extra_forbidden": "is no part of a shape",
}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Building one takes up to 0.2 s, so only those that are needed are built."""
    return TypeAdapter(kind)


def clause(kind: Any, value: Any, where: str = "") -> str | None:
    """Where and how a value is not of a type, e.g. `timing.wall_s must be a number`; None where it is."""
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as wrong:
        first = wrong.errors(include_url=False, include_context=False, include_input=False)[0]
        place = where + "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
        return f"{place.removeprefix('.') or 'it'} {_CLAUSES.get(first['type'], first['msg'])}"
    return None


def plain(value: object) -> Any:
    """A value of JSON that comes from outside the records (a worker, the machine, a config): its type is
    checked when its record is finished."""
    return value
