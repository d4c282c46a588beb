"""The text that quality is scored on, and the token ids of its windows."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.base import bounds, data
from harness.base.files import NotStarted, read_regular
from harness.campaign.prepare import Preparation
from harness.campaign.repeat import Inputs, NotReady
from harness.config import Quality
from harness.config.plan import Cell

LICENSE = (
    "public domain: the end of Jane Austen's Persuasion (1818), from Debian's r-cran-janeaustenr 1.0.0-1"
)


class TextError(NotStarted):
    """A text cannot be scored; the message is one sentence."""


@dataclass(frozen=True)
class Text:
    """`license`: of the shipped text; None for the user's own."""

    path: Path
    content: str
    sha256: str
    license: str | None

    @property
    def special(self) -> dict[str, int]:
        """How often strings come that some tokenizer has as one token: the most frequent ones."""
        return dict(Counter(_SPECIAL.findall(self.content)).most_common(MOST_SPECIAL))


# The forms of special tokens: those of Llama 3, Qwen, Phi and GPT, of SentencePiece, and of Gemma.
_SPECIAL = re.compile(r"<\|[^<>|\s]{1,40}\|>|</?s>|<(?:bos|eos|pad|unk|start_of_turn|end_of_turn)>")
MOST_SPECIAL = 4  # named in a record


def read(workload: Quality) -> Text:
    """The text of a workload. Raises TextError: it is missing, too large, binary, or not UTF-8."""
    is_default = workload.text == "default"
    path = data.shipped_text() if is_default else Path(workload.text)
    try:
        raw = read_regular(path, bounds.TEXT_BYTES, links=True)
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


@dataclass(frozen=True)
class Tokens:
    """Ids of each window. `bos`: the first of each; None: the tokenizer or the workload wants none. `total`:
    tokens of the whole text."""

    windows: list[list[int]]
    bos: int | None
    total: int

    @property
    def sha256(self) -> str:
        """The digest of all ids, as 64-bit integers, little-endian."""
        return hashlib.sha256(np.concatenate(self.windows).astype("<i8").tobytes()).hexdigest()


def tokens_of(cell: Cell, inputs: Inputs, preparation: Preparation, workload: Quality, text: Text) -> Tokens:
    """Tokenize like llama-perplexity: a BOS precedes the text, and replaces the first token of each window.
    Raises NotReady."""
    assert inputs.weights is not None
    windows = workload.windows()
    tokens = preparation.prompts.tokenized(cell, inputs.weights, text.content, 1 << 62)
    bos = [tokens.bos] if workload.bos and tokens.bos is not None else []
    ids = bos + tokens.ids
    if len(ids) < (needed := max(end for _, end in windows)):
        fits = workload.fitting(len(ids))
        hint = f"chunks: {fits} would fit" if fits else "give a longer text, or shorter windows"
        needs = f"{workload.chunks} windows of {workload.holds} tokens need {needed:,}"
        raise NotReady("refused", f"{text.path}: has {len(ids):,} tokens, and {needs}; {hint}")
    of_windows = [bos + ids[first + len(bos) : end] for first, end in windows]
    return Tokens(of_windows, bos[0] if bos else None, len(tokens.ids))
