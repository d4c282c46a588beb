"""Models by name or by a config.json: the dense shapes of this project, and those of the shipped files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.base import bounds, data
from harness.base.files import JsonFileError, object_of
from harness.base.text import shortened
from harness.theory import names
from harness.theory.architectures import decoder_of
from harness.theory.config_settings import ConfigJsonError
from harness.theory.decoder import Decoder
from harness.theory.hf_config import SHAPES
from harness.theory.names import NotUnderstood


class NoModel(ValueError):
    """Not a known model; the message is one sentence."""


@dataclass(frozen=True)
class Described:
    """A model's layers, and the config.json that describes it if it is not dense."""

    decoder: Decoder
    config: dict[str, object] | None = None


class Known(Mapping[str, Decoder]):
    """Names in lower case. `own`: the user's shapes, which override the others. A config.json is read when
    its model is asked for."""

    def __init__(self, own: Mapping[str, Decoder] | None = None) -> None:
        self._shapes = SHAPES | dict(own or {})

    def __getitem__(self, name: str) -> Decoder:
        return self._shapes[name] if name in self._shapes else _shipped(name)

    def __iter__(self) -> Iterator[str]:
        yield from self._shapes
        yield from (name for name in data.model_names() if name not in self._shapes)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes or name in data.model_names()


def known_name(text: str) -> str | None:
    """The known model of a name, whatever its context; None: none, or several."""
    try:
        name = names.named(text, Known()).name
    except NotUnderstood:
        return None
    return name if name in Known() else name.rpartition("-")[0]


@cache
def _shipped(name: str) -> Decoder:
    return decoder_of(config_of(name))


def config_of(name: str) -> dict[str, object]:
    """The shipped config.json of this name, with its source at `harness_source`. Raises KeyError."""
    if name not in data.model_names():
        raise KeyError(name)
    return dict(json.loads(data.model(name).read_text()))


def described(text: str, folder: Path, otherwise: str = "") -> tuple[str, Described]:
    """The model with a name, or at a path that ends in .json (from `folder`), and its name here.

    `otherwise`: what to do for an unknown name. Raises NoModel.
    """
    try:
        if text.endswith(".json"):
            return _by_config(folder.absolute() / Path(text).expanduser())
        named = names.named(text, Known(), otherwise)
    except NotUnderstood as why:
        raise NoModel(why.sentence("shape", f'"{shortened(text)}"')) from None
    except ConfigJsonError as why:
        raise NoModel(f"{shortened(text, 200)}: {why}") from why
    except JsonFileError as why:
        raise NoModel(str(why)) from why
    except (OSError, RuntimeError) as why:  # RuntimeError: no such user's home
        reason = (why.strerror if isinstance(why, OSError) else None) or str(why)
        raise NoModel(f"{shortened(text, 200)}: {reason.lower()}") from why
    return named.name, Described(named.made, None if named.made.is_dense else config_of(named.name))


def _by_config(path: Path) -> tuple[str, Described]:
    """The model in a config.json, named after its folder, or after a file of another name."""
    config = object_of(path, bounds.CONFIG_JSON_BYTES)
    decoder = decoder_of(config)
    name = path.parent.name if path.name == "config.json" else path.stem
    return name, Described(decoder, None if decoder.is_dense else config)
