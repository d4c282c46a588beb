"""The base of all models of a config, and the types of a count of tokens and of a share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)

from harness.base.text import shortened
from harness.theory import quantities

Plain = dict[str, Any]
"""A mapping of YAML."""
MOST_TOKENS = 10_000_000
PERCENT = r"^[0-9]{1,2}(\.[0-9]{1,4})?%$"


def tokens_of(given: object) -> object:
    """32k as 32,768; all else as it is given."""
    return quantities.token_count(given) or given if isinstance(given, str) else given


Tokens = Annotated[
    int,
    BeforeValidator(tokens_of),
    Field(ge=1, le=MOST_TOKENS),
    WithJsonSchema(
        {
            "type": ["integer", "string"],
            "minimum": 1,
            "maximum": MOST_TOKENS,
            "pattern": quantities.TOKENS,
        }
    ),
]
"""A count of tokens; 32k is 32,768."""


def _share(given: Any) -> Any:
    """0.5% as 0.005."""
    if not isinstance(given, str):
        return given
    if not re.match(PERCENT, given):
        raise ValueError(f'expected a share such as 0.5% or 0.005, got "{shortened(given)}"')
    return float(given[:-1]) / 100


Share = Annotated[
    float,
    BeforeValidator(_share),
    Field(gt=0, lt=1),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                {"type": "string", "pattern": PERCENT},
            ]
        }
    ),
]


class Frozen(BaseModel):
    """No unknown keys, no conversions ("3" and true are not numbers), no NaN, no changes."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def absolute(path: str, folder: Path) -> str:
    """The absolute path of one that is relative to a folder, absolute, or from ~. Raises ValueError."""
    try:
        return str(folder.absolute() / Path(path).expanduser())
    except RuntimeError:
        raise ValueError(f'no such user\'s home folder: "{shortened(path)}"') from None
