"""The user's machines, from a `machines.toml` in the form of the shipped one; mistakes are sentences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from harness.base import bounds, data
from harness.base.files import read_regular
from harness.config.base import Frozen
from harness.config.mistakes import ConfigError, Loc, Mistakes, expected, suggestion
from harness.config.yaml_text import Document
from harness.theory.machines import CITED, DOCUMENTS, MACHINES, Machine, Machines, machine
from harness.theory.names import LONGEST

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
_RATE = re.compile(r"(fp|bf|int)\d+(-tensor(-fp32)?)?")
_LINE = re.compile(r"\s*(?P<heading>\[)?(?P<parts>[\w.\"' -]+)(?(heading)]|=)")  # a heading or a key

Gib = Annotated[float, Field(ge=0.25, le=16_384)]
GbPerS = Annotated[float, Field(ge=0.1, le=100_000)]
Tera = Annotated[float, Field(ge=1e-4, le=1e6)]


class Record(Frozen):
    """One machine. data/machines.toml explains the keys."""

    name: Annotated[str, Field(min_length=1, max_length=LONGEST)]
    family: Literal["cuda", "hip", "vulkan", "metal", "cpu"]
    compute_capability: str | None = None
    unified: bool = False
    board: bool = False
    cpu_kind: Literal["Arm", "RISC-V", "x86 without AVX2"] | None = None
    memory_gib: Gib
    sold_gib: list[Gib] = Field(default=[])
    bandwidth_gb_per_s: GbPerS
    peak_bandwidth_gb_per_s: GbPerS | None = None
    bus_bits: Annotated[int, Field(ge=8, le=65_536)] | None = None
    bus_mt_per_s: Annotated[float, Field(ge=100, le=100_000)] | None = None
    tflops: dict[str, Tera] = Field(default={})
    source: str = ""
    sources: dict[str, str] = Field(default={})

    def figures(self) -> list[str]:
        peak = ["peak_bandwidth"] if self.peak_bandwidth_gb_per_s else []
        return ["memory", "bandwidth", *peak, *self.tflops]


def known() -> Machines:
    """The shipped machines and the user's. Raises ConfigError."""
    file = data.users_machines()
    try:
        content = read_regular(file, bounds.MACHINES_BYTES, links=True)
    except (FileNotFoundError, NotADirectoryError):
        return MACHINES
    except OSError as wrong:
        raise ConfigError(f"{file}: cannot be read: {wrong.strerror}") from None
    return Machines(load(content, file))


def load(content: bytes, file: Path) -> dict[str, Machine]:
    """The machines of a file, by name. Raises ConfigError."""
    try:
        text = content.decode("utf-8-sig")
        tables = data.parsed(text)
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is not UTF-8 text") from None
    except RecursionError:
        raise ConfigError(f"{file}: is nested too deeply") from None
    except ValueError as wrong:
        what, _, at = str(wrong).partition(" (at ")
        line = re.match(r"line (\d+)", at)
        raise ConfigError(f"{file}{f':{line[1]}' if line else ''}: is not TOML: {what}") from None
    mistakes = Mistakes(Document(tables, _places(text, file)).place)
    documents = checked_documents(tables.pop(DOCUMENTS, {}), mistakes)
    found = {}
    for name, given in tables.items():
        if name in MACHINES:
            mistakes.add((name,), "is a machine that is known already; choose another name")
        elif checked(name, given, documents, mistakes):
            found[name] = machine(given, documents)
    mistakes.stop_if_any()
    return found


def checked_documents(given: Any, mistakes: Mistakes) -> dict[str, str]:
    """The table of documents."""
    if not isinstance(given, dict):
        mistakes.add((DOCUMENTS,), expected("a table", given))
        return {}
    for name, document in given.items():
        if not isinstance(document, str):
            mistakes.add((DOCUMENTS, name), expected("text", document))
    return {name: str(document) for name, document in given.items()}


def checked(name: str, given: Any, documents: dict[str, str], mistakes: Mistakes) -> bool:
    """Whether a record is a machine; its mistakes are added."""
    before = len(mistakes.found)
    if not _NAME.fullmatch(name) or len(name) > LONGEST or name == "this":
        mistakes.add((name,), 'a name has lower-case letters, digits, dots and dashes, and is not "this"')
    if not isinstance(given, dict):
        mistakes.add((name,), expected("a table, as in [my-card]", given))
        return False
    if row := mistakes.checked(Record, given, (name,)):
        for loc, text in _wrong(row, documents):
            mistakes.add((name, *loc), text)
    return len(mistakes.found) == before


def _wrong(row: Record, documents: dict[str, str]) -> list[tuple[Loc, str]]:
    """List contradictions between a record's values."""
    found: list[tuple[Loc, str]] = []
    capability = row.compute_capability
    if capability is None and row.family == "cuda":
        found.append((("compute_capability",), 'is missing, such as compute_capability = "8.9"'))
    elif capability is not None and row.family != "cuda":
        found.append((("compute_capability",), "is of family cuda alone"))
    elif capability and not re.fullmatch(r"[0-9]{1,2}\.[0-9]", capability):
        found.append((("compute_capability",), f'is a text such as "8.9", got "{capability}"'))
    if (row.bus_bits is None) != (row.bus_mt_per_s is None):
        found.append((("bus_bits",), "bus_bits and bus_mt_per_s go together"))
    if row.peak_bandwidth_gb_per_s and row.peak_bandwidth_gb_per_s < row.bandwidth_gb_per_s:
        found.append((("peak_bandwidth_gb_per_s",), "is less than bandwidth_gb_per_s"))
    for rate in row.tflops:
        if not _RATE.fullmatch(rate):
            found.append((("tflops", rate), "is no type of arithmetic, such as fp16, int8 or fp16-tensor"))
    for figure in row.figures():
        if not (row.sources.get(figure) or row.source):
            found.append((("source",), f"is missing: where is {figure} from?"))
            break
    for what, source in {"": row.source, **row.sources}.items():
        loc: Loc = ("sources", what) if what else ("source",)
        if what and what not in row.figures():
            found.append((loc, "unknown figure" + suggestion(what, row.figures())))
        for cited in CITED.findall(source):
            if cited not in documents and not (cited == "source" and what):
                found.append((loc, f"{{{cited}}} is not in [documents]"))
    return found


def _places(text: str, file: Path) -> dict[Loc, str]:
    """The line of each heading and key."""
    places: dict[Loc, str] = {(): str(file)}
    heading: Loc = ()
    for number, line in enumerate(text.splitlines(), 1):
        if found := _LINE.match(line):
            parts = tuple(part.strip(" \"'") for part in found["parts"].split("."))
            heading = parts if found["heading"] else heading
            places[heading if found["heading"] else (*heading, *parts)] = f"{file}:{number}"
    return places
