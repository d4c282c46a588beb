"""Read the text that quality is scored on; every mistake in it is one sentence."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from harness import shipped
from harness.config import Quality
from harness.system.endings import NotStarted
from harness.system.files import read_regular

MOST_BYTES = 64 << 20
LICENSE = (
    "public domain: the end of Jane Austen's Persuasion (1818), from Debian's r-cran-janeaustenr 1.0.0-1"
)


class TextError(NotStarted):
    """A text cannot be scored; the message is one sentence."""


@dataclass(frozen=True)
class Text:
    """`license`: of the shipped text; null for the user's own."""

    path: Path
    content: str
    sha256: str
    license: str | None


def read(workload: Quality) -> Text:
    """The text of a workload. Raises TextError: it is missing, too large, binary, or not UTF-8."""
    is_default = workload.text == "default"
    path = shipped.text() if is_default else Path(workload.text)
    try:
        raw = read_regular(path, MOST_BYTES, links=True)
    except OSError as refusal:
        raise TextError(f"{path}: {(refusal.strerror or str(refusal)).lower()}") from refusal
    if b"\0" in raw:
        raise TextError(f"{path}: is binary, not a text in UTF-8")
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise TextError(f"{path}: byte {wrong.start} is not UTF-8; convert the text to UTF-8") from wrong
    if not content.strip():
        raise TextError(f"{path}: is empty")
    return Text(path, content, hashlib.sha256(raw).hexdigest(), LICENSE if is_default else None)
