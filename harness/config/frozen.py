"""The base of all models of a config, and the type of a count of tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from harness.theory import counts

MOST_TOKENS = 10_000_000


def tokens_of(given: object) -> object:
    """32k as 32,768; all else as it is given."""
    return counts.tokens(given) or given if isinstance(given, str) else given


Tokens = Annotated[
    int,
    BeforeValidator(tokens_of),
    Field(ge=1, le=MOST_TOKENS),
    WithJsonSchema(
        {
            "type": ["integer", "string"],
            "minimum": 1,
            "maximum": MOST_TOKENS,
            "pattern": counts.TOKENS,
        }
    ),
]
"""A count of tokens; 32k is 32,768."""


class Frozen(BaseModel):
    """No unknown keys, no conversions ("3" and true are not numbers), no NaN, no changes."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
