"""The data files in harness/data/: machines, models, configs, the published study, and the user's own tables.

In a checkout `configs` and `published` are links to the top-level folders; an installed package has files.
Each file is read when it is asked for.
"""

from __future__ import annotations

import csv
import os
import sys
from argparse import ArgumentTypeError
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parents[1] / "data"
PUBLISHED = "published"
RESULTS = Path("results")  # the folder of results by default
RECOMMENDED = "recommended"  # folder of results in which `harness recommend` keeps what it predicted
PUBLIC_SPEEDS = "public-speeds"  # speeds without records, beside the studies


def config_names() -> list[str]:
    """The shipped configs, by the names that `harness run NAME` takes."""
    return sorted(path.stem for path in (HERE / "configs").glob("*.yaml"))


def schema() -> Path:
    return (HERE / "configs" / "schema.json").resolve()


def config(given: str) -> Path:
    """The config for a name: a file in the working directory, with or without `.yaml`, else a shipped one. A
    path with a folder, or an unknown name, is returned unchanged."""
    path = Path(given)
    if path.is_file() or not is_name(path):
        return path
    name = f"{path.name.removesuffix('.yaml')}.yaml"
    if (here := Path(name)).is_file():
        return here
    return shipped.resolve() if (shipped := HERE / "configs" / name).is_file() else path


@cache
def model_names() -> tuple[str, ...]:
    """The models whose config.json is shipped."""
    return tuple(sorted(path.stem for path in (HERE / "models").glob("*.json")))


def model(name: str) -> Path:
    return HERE / "models" / f"{name}.json"


@cache
def weights_names() -> tuple[str, ...]:
    """The models whose weights are shipped."""
    return tuple(sorted(path.parent.name for path in (HERE / "weights").glob("*/model.safetensors")))


def weights(name: str) -> Path:
    """The folder of a shipped checkpoint."""
    return HERE / "weights" / name


def weights_name(path: str | Path | None) -> str | None:
    """The name of the shipped checkpoint in this folder: the same in every installation; None: none."""
    folder = Path(path) if path else HERE
    return folder.name if folder == weights(folder.name) and folder.name in weights_names() else None


def shipped_text() -> Path:
    """The text that quality is scored on by default: in the public domain, and held out from the training of
    the shipped model."""
    return HERE / "weights" / "held-out.txt"


def published_names() -> list[str]:
    """The published figures that `harness report` shows."""
    studies = [path.name for path in (HERE / PUBLISHED).iterdir() if path.is_dir()]
    return [f"{PUBLISHED}/{name}" for name in sorted([*studies, PUBLIC_SPEEDS])]


def results(given: str) -> Path:
    """The results folder for a name: an existing path, else the shipped `published/NAME`. Raises
    ArgumentTypeError for no name."""
    if not given:
        raise ArgumentTypeError("a folder is named; this is an empty text")
    path = Path(given)
    shipped = HERE / path
    if path.exists() or path.parts[:1] != (PUBLISHED,) or ".." in path.parts or not shipped.is_dir():
        return path
    return shipped.resolve()


def is_name(path: Path) -> bool:
    """Whether a path is a bare name, without a folder."""
    return path.parts == (path.name,)


def text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file, by column."""
    return list(csv.DictReader(text(name).splitlines()))


def users_machines() -> Path:
    """The user's own machines: a file in $XDG_CONFIG_HOME/harness, else ~/.config/harness; may be missing."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path(os.environ.get("HOME", "/")) / ".config"
    return Path(folder) / "harness" / "machines.toml"


def parsed(toml: str) -> dict[str, Any]:
    """Raises ValueError, whose message ends in `(at line 2, column 5)`."""
    found: dict[str, Any] = tomllib.loads(toml)
    return found


@cache
def table(name: str) -> dict[str, Any]:
    """All of a shipped TOML file."""
    return parsed(text(name))
