"""Open a log, detect its format from its content, and read it."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from harness.base import bounds
from harness.base.files import FAULTS, nearest, read_regular
from harness.records.foreign import (
    aiperf,
    csv,
    guidellm,
    llama_bench,
    llama_benchy,
    llama_server,
    ollama,
    optimum,
    sweep_bench,
    totals,
    vllm,
)
from harness.records.foreign.log import Content, Log, LogError, OptionError, Reader, usable
from harness.records.foreign.table import Options

GZIP, GGUF = b"\x1f\x8b", b"GGUF"
READERS: tuple[Reader, ...] = (  # the first that recognises a file reads it; the most general last
    *vllm.READERS,
    *aiperf.READERS,
    *guidellm.READERS,
    *llama_server.READERS,
    *llama_bench.READERS,
    *llama_benchy.READERS,
    *sweep_bench.READERS,
    *ollama.READERS,
    *optimum.READERS,
    *totals.READERS,
)
_START = re.compile(r"^[\[{]", re.MULTILINE)


def read_log(path: Path, options: Options) -> Log:
    """The log in a file. Raises LogError."""
    text = _file_text(path)
    if not text.strip():
        raise LogError("it is empty")
    damage: LogError | None = None
    documents: list[Any] = []
    is_json = text.lstrip()[0] in "{["
    try:
        documents = _documents(text) if is_json else _behind_others(text)
    except LogError as why:
        damage, documents = why, _behind_others(text)
    of_objects = all(isinstance(each, dict) for each in documents)
    content = Content(text, documents if of_objects else ())
    for reader in READERS:
        if reader.is_one(content):
            _no_columns(options, reader.format)
            log = _guarded(reader.read, content, reader.format)
            return replace(log, notes=[*log.notes, *_others(content, reader)])
    if damage:
        raise damage
    return _of_json(documents, options) if is_json else csv.read(text, options)


def _others(content: Content, chosen: Reader) -> list[str]:
    """A note on what other tools printed in the same text."""
    if content.objects:  # JSON of one tool may look like that of another
        return []
    found = dict.fromkeys(each.format for each in READERS if each.is_one(content))
    return [
        f"the file also has output of another tool, which is not read: {each}"
        for each in found
        if each != chosen.format
    ]


def _file_text(path: Path) -> str:
    try:
        content = read_regular(path, bounds.LOG_BYTES, links=True)
    except FileNotFoundError:
        raise OptionError(f"no such file{nearest(path)}") from None
    except IsADirectoryError:
        raise LogError("it is a folder, not a file") from None
    except OSError as refusal:
        raise LogError(f"it cannot be read: {refusal.strerror}") from refusal
    if content.startswith(GGUF):
        raise LogError("it is a model, not a log; `harness theory FILE` says what limits it")
    if content.startswith(GZIP):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = file.read(bounds.LOG_BYTES + 1)
        except (OSError, EOFError, zlib.error) as damage:
            raise LogError("it is a damaged gzip file") from damage
    if len(content) > bounds.LOG_BYTES:
        raise LogError(f"it is larger than {bounds.LOG_BYTES >> 20} MiB when decompressed")
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # written by > in PowerShell
    try:
        text = content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise LogError("it is not a text file")
    if sum(map(text.count, "\n\r,;\t[{")) > bounds.LOG_VALUES:
        raise LogError(f"it has more than {bounds.LOG_VALUES:,} values")
    return text


def _behind_others(text: str) -> list[Any]:
    """One JSON document, or objects one per line, among lines of standard error; empty: none, or damaged."""
    try:
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    except (ValueError, RecursionError):  # ValueError: also a number of thousands of digits
        found = []
    return found or _embedded(text)


def _embedded(text: str) -> list[Any]:
    """The document that begins and ends among other lines; empty: none, or another may follow."""
    for start in islice(_START.finditer(text), bounds.LOG_STARTS):
        try:
            document, end = json.JSONDecoder().raw_decode(text, start.start())
        except (ValueError, RecursionError):
            continue
        if _START.search(text, end):
            return []
        return document if isinstance(document, list) else [document]
    return []


def _documents(text: str) -> list[Any]:
    """One JSON document, or one per line. Raises LogError."""
    try:
        whole = json.loads(text)
        return whole if isinstance(whole, list) else [whole]
    except (ValueError, RecursionError):  # ValueError: also a number of thousands of digits
        pass
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as damage:
            raise LogError(f"it is not JSON, and as JSONL line {number} is damaged") from damage
    return found


def _of_json(documents: list[Any], options: Options) -> Log:
    if not documents or not all(isinstance(each, dict) for each in documents):
        raise LogError("it is JSON, but not objects")
    if len(documents) == 1:
        inner = [each for each in documents[0].values() if isinstance(each, list) and each]
        if len(inner) == 1 and all(isinstance(each, dict) for each in inner[0]):
            return csv.of_objects(inner[0], options)
        if found := csv.of_lists(documents[0], options):
            return found
    return csv.of_objects(documents, options)


def _no_columns(options: Options, form: str) -> None:
    if options.any:
        raise OptionError(
            f"the {form} defines names and units itself: --unit and column options are for tables"
        )


def _guarded(reader: Callable[[Content], Log], content: Content, form: str) -> Log:
    """Run a reader. A file with unexpected content gives one sentence, not a traceback. Raises LogError."""
    try:
        log = usable(reader(content))
    except LogError:
        raise
    except FAULTS as damage:
        raise LogError(f"its fields are not those of the {form} that it looks like") from damage
    if not log.series and not log.requests:
        raise LogError(f"no complete request: the {form} has no totals; it may be cut")
    return log
