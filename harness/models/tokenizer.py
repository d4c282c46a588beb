"""Tokenize a text with a checkpoint's own tokenizer.json, so that every stack gets the same ids."""

from __future__ import annotations

from pathlib import Path

from harness.models.weights import WeightsError


def ids(path: Path, text: str) -> list[int]:
    """Without special tokens. Raises WeightsError."""
    from tokenizers import Tokenizer

    try:
        return list(Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids)
    except Exception as mistake:  # the library raises no other type
        first = (str(mistake).strip() or type(mistake).__name__).splitlines()[0][:200]
        raise WeightsError(f"{path}: {first}") from mistake
