"""Read what a runner says of itself in its PEP 723 header: options, weights, environments. Imports no
stack."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RUNNERS = Path(__file__).parent.parent.parent / "runners"
# The reference pattern of PEP 723.
_BLOCK = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")


class HeaderError(ValueError):
    """A runner's header is missing or wrong: a mistake in this project, not in the user's config."""


@dataclass(frozen=True)
class Option:
    """One option of a stack. `default` null means: `default_from` (threads or tokens), else the stack's
    own."""

    name: str
    type: str
    help: str
    choices: tuple[Any, ...] = ()
    default: Any = None
    default_from: str | None = None
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True)
class Environment:
    """One way to build a stack's interpreter. `device`: the device family it serves."""

    stack: str
    name: str
    device: str
    requires_python: str
    dependencies: tuple[str, ...]
    source_builds: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Header:
    """What a runner says of itself. `weights`: the format it loads (gguf or hf), or none. `named`: options
    whose values stand in every variant's name, given or not."""

    stack: str
    summary: str
    weights: str
    named: tuple[str, ...]
    options: dict[str, Option]
    environments: dict[str, Environment]

    def environment_for(self, device: str) -> Environment | None:
        return next((e for e in self.environments.values() if e.device == device), None)


@cache
def stacks() -> dict[str, Header]:
    """Every runner with a header, by stack name (= file name)."""
    found = {}
    for path in sorted(RUNNERS.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\n# /// script\n" in "\n" + text:
            found[path.stem] = parse(path.stem, text)
    return found


def parse(stack: str, text: str) -> Header:
    """The header in a runner's source text."""
    blocks = [m for m in _BLOCK.finditer(text) if m["type"] == "script"]
    if len(blocks) != 1:
        raise HeaderError(f"runners/{stack}.py: {len(blocks)} script blocks, expected one")
    lines = blocks[0]["content"].splitlines()
    try:
        table = tomllib.loads("\n".join(line[2:] for line in lines))
        tool = table["tool"]["harness"]
        options = {name: _option(name, given) for name, given in tool.get("options", {}).items()}
        shared = tuple(table.get("dependencies", ()))
        python = table["requires-python"]
        environments = {
            name: Environment(
                stack=stack,
                name=name,
                device=given["device"],
                requires_python=given.get("requires-python", python),
                dependencies=shared + tuple(given.get("dependencies", ())),
                source_builds=tuple(given.get("source-builds", ())),
                variables=given.get("variables", {}),
            )
            for name, given in tool["env"].items()
        }
        named = tuple(tool.get("named", ()))
        return Header(stack, tool["summary"], tool["weights"], named, options, environments)
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as mistake:
        raise HeaderError(f"runners/{stack}.py: header: {mistake!r}") from mistake


def _option(name: str, given: dict[str, Any]) -> Option:
    known = {key.replace("-", "_"): value for key, value in given.items()}
    known["choices"] = tuple(known.get("choices", ()))
    return Option(name=name, **known)
