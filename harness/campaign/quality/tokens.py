"""The token ids of a text's windows, behind the BOS that the model's tokenizer asks for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from harness.campaign.prepare import NotReady, Preparation
from harness.campaign.quality.texts import Text
from harness.campaign.repeat import Inputs
from harness.config import Quality
from harness.plan import Cell


@dataclass(frozen=True)
class Tokens:
    """Ids of each window. `bos`: the first of each; null: the tokenizer or the workload wants none. `total`:
    tokens of the whole text."""

    windows: list[list[int]]
    bos: int | None
    total: int

    @property
    def sha256(self) -> str:
        """Of all ids, as 64-bit integers, little-endian."""
        return hashlib.sha256(np.concatenate(self.windows).astype("<i8").tobytes()).hexdigest()


def tokens_of(cell: Cell, inputs: Inputs, preparation: Preparation, workload: Quality, text: Text) -> Tokens:
    """As llama-perplexity: a BOS before the text, and in place of the first token of each window. Raises
    NotReady."""
    assert inputs.weights is not None
    windows = workload.windows()
    found = preparation.tokenized(cell, inputs.weights, text.content, 1 << 62)
    bos = [found.bos] if workload.bos and found.bos is not None else []
    ids = bos + found.ids
    if len(ids) < (needed := max(end for _, end in windows)):
        fits = workload.fitting(len(ids))
        hint = f"chunks: {fits} would fit" if fits else "give a longer text, or shorter windows"
        needs = f"{workload.chunks} windows of {workload.holds} tokens need {needed:,}"
        raise NotReady("refused", f"{text.path}: has {len(ids):,} tokens, and {needs}; {hint}")
    of_windows = [bos + ids[first + len(bos) : end] for first, end in windows]
    return Tokens(of_windows, bos[0] if bos else None, len(found.ids))
