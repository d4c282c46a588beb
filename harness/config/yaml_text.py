"""The text of a config: YAML with line numbers, and mistakes shown at them."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from harness.base import bounds, data
from harness.base.files import NotStarted, nearest
from harness.base.text import alike, shortened
from harness.config.experiment import KINDS, PATTERNS, Plain

# Mistakes in a config, as sentences: what is wrong, where, and what was probably meant.


Loc = tuple[str | int, ...]
"""The keys and list indexes that lead to a value."""

MOST_SHOWN = 10
_Row = TypeVar("_Row", bound=BaseModel)

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "a mapping (key: value)",
    "model_attributes_type": "a mapping (key: value)",
}
_EXAMPLES: dict[Loc, str] = {
    ("models",): ", such as models: [{shape: qwen1.5-0.5b, weights: synthetic}]",
    ("variants",): ", such as variants: [{stack: llamacpp, quant: q4_0}]",
}
_OF_KIND = ("union_tag_not_found", "union_tag_invalid")
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


class ConfigError(NotStarted, ValueError):
    """The config is wrong. One line per mistake: `FILE:LINE: dotted.key: what; did you mean X?`"""

    prefix = ""


class NoConfig(ConfigError):
    """The file cannot be read as a config, so the message has no line."""

    prefix = NotStarted.prefix


def dotted(loc: Iterable[str | int]) -> str:
    return ".".join(shortened(str(part)) for part in loc)


def shown(value: object) -> str:
    """A value as a message quotes it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return f'"{shortened(value)}"' if isinstance(value, str) else shortened(str(value))


def suggestion(word: object, known: Iterable[Any]) -> str:
    """The hint for an unknown word: the known word that it begins or resembles, else all if there are few."""
    names = [str(k) for k in known]
    if isinstance(word, str):
        begun = [name for name in names if word and name.startswith(word.lower())]
        close = begun if len(begun) == 1 else alike(word.lower(), names)
        if close:
            return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= 24 else ""


def expected(what: str, value: object) -> str:
    quotes = " (put it in quotes)" if what == "text" and isinstance(value, (bool, int, float)) else ""
    return f"expected {what}, got {shown(value)}{quotes}"


@dataclass
class Mistakes:
    """Collects mistakes, to report them together. `place` maps a Loc to its place in the file."""

    place: Callable[[Loc], str]
    found: list[tuple[Loc, str]] = field(default_factory=list)

    def add(self, loc: Loc, text: str) -> None:
        self.found.append((loc, text))

    def stop_if_any(self) -> None:
        """Raise ConfigError with the first ten, if there is one."""
        if not self.found:
            return
        lines = [
            f"{self.place(loc)}: {dotted(loc)}: {text}" if loc else f"{self.place(loc)}: {text}"
            for loc, text in self.found[:MOST_SHOWN]
        ]
        more = len(self.found) - MOST_SHOWN
        raise ConfigError("\n".join([*lines, f"and {more} more"] if more > 0 else lines))

    def checked(self, kind: type[_Row], row: object, loc: Loc, folder: Path | None = None) -> _Row | None:
        """The row as `kind`; None after adding its mistakes. Relative paths start at `folder`."""
        try:
            return kind.model_validate(row, context=folder)
        except ValidationError as wrong:
            for error in wrong.errors(include_url=False):
                self.add(loc + _loc_in(row, error), _sentence(kind, error))
            return None


def _loc_in(row: Any, error: Any) -> Loc:
    """Where an error is in the row as it was written: without pydantic's tag of a union and without the index
    of a value that may be a list and is not."""
    loc: list[str | int] = []
    for part in error["loc"]:
        if part in row if isinstance(row, dict) else isinstance(row, list) and isinstance(part, int):
            row = row[part]
            loc.append(part)
    if error["type"] == "missing":
        loc.append(error["loc"][-1])
    return (*loc, "kind") if error["type"] in _OF_KIND else tuple(loc)


def _sentence(kind: type[BaseModel], error: Any) -> str:
    """A sentence for one of pydantic's errors."""
    name, given, context = error["type"], error["input"], error.get("ctx", {})
    if name == "extra_forbidden":
        return "unknown key" + suggestion(error["loc"][-1], _keys(kind, error["loc"][:-1]))
    if name == "missing":
        return "is missing" + _EXAMPLES.get(error["loc"], "")
    if name in _EXPECTED:
        return expected(_EXPECTED[name], given)
    if name in _BOUNDS:
        words, bound = _BOUNDS[name]
        return f"must be {words} {_plain(context[bound])}, got {shown(given)}"
    if name == "string_pattern_mismatch":
        return f"{PATTERNS[context['pattern']]}, got {shown(given)}"
    if name == "literal_error":
        known = re.findall(r"'([^']*)'", context["expected"]) or [context["expected"]]
        return f"cannot be {shown(given)}" + suggestion(given, known)
    if name in _OF_KIND:
        word = given.get("kind")
        return ("is missing" if word is None else f"unknown workload {shown(word)}") + suggestion(word, KINDS)
    if name == "value_error":
        return str(context["error"])
    if name == "too_short":
        return "must not be empty"
    if name == "finite_number":
        return f"must be a finite number, got {shown(given)}"
    sentence: str = error["msg"]
    return sentence[0].lower() + sentence[1:]


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def _keys(kind: type[BaseModel], loc: Loc) -> list[str]:
    """The keys that a mapping at loc may have; a tag in it chooses among the models of a union."""
    models = [kind]
    for part in loc:
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        tagged = [
            model for model in models if getattr(model.model_fields.get("kind"), "default", None) == part
        ]
        models = tagged or [model for field in fields for model in _models(field.annotation)] or models
    return [*dict.fromkeys(key for model in models for key in model.model_fields)]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


# A YAML text to plain data, with the line of every key.
#
# Refuses what YAML allows and a config never needs (anchors, tags, deep nesting), before building it.


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
