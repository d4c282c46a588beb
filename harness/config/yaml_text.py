"""A YAML text to plain data, with the line of every key. Refuses what YAML allows and a config never
needs (anchors, tags, deep nesting), before building it."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.base import bounds, data
from harness.base.files import nearest
from harness.base.text import shortened
from harness.config.base import Plain
from harness.config.mistakes import ConfigError, Loc, NoConfig, dotted, suggestion

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass
class Document:
    """Plain data, and where each part of it was written: "FILE:LINE", or the --set that gave it."""

    data: Plain
    places: dict[Loc, str]

    def place(self, loc: Loc) -> str:
        """The place of the value at loc, else of its nearest parent."""
        while loc not in self.places:
            loc = loc[:-1]
        return self.places[loc]


def read(path: Path) -> Document:
    """The document in a file. Raises ConfigError."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise NoConfig(f"{path}: is a folder, not a YAML file")
        if not stat.S_ISREG(mode):
            raise NoConfig(f"{path}: is not a regular file")
        with path.open("rb") as file:
            raw = file.read(bounds.CONFIG_BYTES + 1)
    except FileNotFoundError:
        if not data.is_name(path):
            raise NoConfig(f"{path}: no such file{nearest(path)}") from None
        hint = nearest(path) or suggestion(path.name, data.config_names())
        raise NoConfig(f"{path}: no such file, nor a shipped config{hint}") from None
    except OSError as wrong:
        raise NoConfig(f"{path}: cannot be read: {wrong.strerror}") from None
    if raw.startswith(b"GGUF"):
        raise NoConfig(f"{path}: is a model, not a config: name it as `weights` of a model in a config")
    if len(raw) > bounds.CONFIG_BYTES:
        raise NoConfig(f"{path}: is no GGUF, and too large (over 1 MiB) for a config")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        line = raw.count(b"\n", 0, wrong.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 text (byte 0x{raw[wrong.start]:02x})") from None
    value, lines = parse(text, lambda line: f"{path}:{line}")
    if value is None:
        raise NoConfig(f"{path}: is empty")
    if not isinstance(value, dict):
        raise ConfigError(f"{path}:{lines[()]}: expected key: value lines at the top, as in models: ...")
    return Document(value, {loc: f"{path}:{line}" for loc, line in lines.items()})


def parse(text: str, place: Callable[[int], str]) -> tuple[Any, dict[Loc, int]]:
    """Plain data of a YAML text and the line, from 1, of every key and list item. Raises ConfigError.

    `place` names a line in messages.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {(): 1}
        lines: dict[Loc, int] = {(): node.start_mark.line + 1}
        return loader.plain(node, (), lines), lines
    except yaml.reader.ReaderError as wrong:
        line = text.count("\n", 0, wrong.position) + 1
        raise ConfigError(f"{place(line)}: contains the control character U+{wrong.character:04X}") from None
    except _Refused as wrong:
        raise ConfigError(f"{place(wrong.line)}: {wrong}") from None
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        reason = shortened(", ".join(part for part in (wrong.context, wrong.problem) if part), 160)
        if "'\\t'" in (wrong.problem or ""):
            reason = "a tab; YAML is indented by spaces"
        raise ConfigError(f"{place(mark.line + 1 if mark else 1)}: is not valid YAML: {reason}") from None
    except (ValueError, OverflowError) as wrong:  # of "\UFFFFFFFF", which PyYAML lets through
        raise ConfigError(f"{place(1)}: is not valid YAML: {shortened(str(wrong), 160)}") from None


class _Refused(Exception):
    def __init__(self, node: Any, sentence: str) -> None:
        super().__init__(sentence)
        self.line: int = node.start_mark.line + 1


class _Loader(yaml.SafeLoader):
    # Fewer surprises than YAML 1.1: 1:30 and 010 are text, not 90 and 8; dates are text; 1e6 is a number.
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse on the event, before what is inside it is parsed: bounded time and memory."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _Refused(event, "anchors and aliases (& and *) are not allowed; write the value out")
        if event.tag is not None:
            raise _Refused(event, f"tags are not allowed: {shortened(event.tag)}")
        self.values += 1
        if self.values > bounds.CONFIG_VALUES:
            raise _Refused(event, f"more than {bounds.CONFIG_VALUES} values, too many for a config")
        self.depth += 1
        if self.depth > bounds.CONFIG_DEPTH:
            raise _Refused(event, f"nested more than {bounds.CONFIG_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def plain(self, node: yaml.Node, loc: Loc, lines: dict[Loc, int]) -> Any:
        if isinstance(node, yaml.MappingNode):
            mapping: Plain = {}
            for key_node, value_node in node.value:
                if not isinstance(key_node, yaml.ScalarNode):
                    raise _Refused(key_node, "a key must be a word, not a list or a mapping")
                key = self.text(key_node)
                inner = (*loc, key)
                if key in mapping:
                    raise _Refused(key_node, f"{dotted(inner)}: given twice, first on line {lines[inner]}")
                lines[inner] = key_node.start_mark.line + 1
                mapping[key] = self.plain(value_node, inner, lines)
            return mapping
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                lines[(*loc, index)] = item.start_mark.line + 1
            return [self.plain(item, (*loc, index), lines) for index, item in enumerate(node.value)]
        self.text(node)
        return self.construct_object(node)

    def text(self, node: yaml.Node) -> str:
        text: str = node.value
        if odd := _UNPRINTABLE.search(text):
            raise _Refused(node, f"contains a line break or the control character U+{ord(odd[0]):04X}")
        return text


for _tag, _pattern, _first in (
    ("bool", r"^(?:(?i:yes|no|true|false|on|off))$", "yYnNtTfFoO"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    # 19 digits: longer ones take quadratic time to read, and no setting is that large.
    ("int", r"^[-+]?(?:0|[1-9][0-9_]{0,18})$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+.0123456789",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))
