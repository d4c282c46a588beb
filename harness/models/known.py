"""Models by name: the dense shapes of this project, and those of the shipped config.json files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache

from harness import shipped
from harness.theory.architectures import decoder_of
from harness.theory.decoder import Decoder
from harness.theory.families import SHAPES
from harness.theory.shapes import Shape


class Known(Mapping[str, "Shape | Decoder"]):
    """Names in lower case. `own`: the user's shapes, which override the others. A config.json is read when
    its model is asked for."""

    def __init__(self, own: Mapping[str, Shape] | None = None) -> None:
        self._shapes = SHAPES | dict(own or {})

    def __getitem__(self, name: str) -> Shape | Decoder:
        return self._shapes[name] if name in self._shapes else _shipped(name)

    def __iter__(self) -> Iterator[str]:
        yield from self._shapes
        yield from (name for name in shipped.model_names() if name not in self._shapes)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes or name in shipped.model_names()


@cache
def _shipped(name: str) -> Decoder:
    return decoder_of(config_of(name))


def config_of(name: str) -> dict[str, object]:
    """The shipped config.json of this name, with its source at `harness_source`. Raises KeyError."""
    if name not in shipped.model_names():
        raise KeyError(name)
    return dict(json.loads(shipped.model(name).read_text()))
