"""Terminal output of `harness theory MODEL --memory SIZE`: which weights and KV types fit."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.text_table import NONE, formatted, say
from harness.report.theory_text import Columns, beyond_trained, short, theory_table
from harness.theory.machines import (
    Figure,
    memory_words,
    reserved_words,
)
from harness.theory.memory import LLAMA_CPP, TRANSFORMERS
from harness.theory.memory_choices import Choice


def _fits(row: Choice) -> str:
    spare = f"{abs(row['spare_bytes']) / 1e9:.1f} GB"
    return f"yes, {spare} to spare" if row["fits"] else f"no, {spare} short"


def _tokens(count: int | None) -> str:
    return formatted(count) if count else NONE


COLUMNS: Columns[Choice] = (
    ("model", lambda row: row["model"]),
    ("weights", lambda row: row["weights"]),
    ("GB", lambda row: formatted(row["model_bytes"], "{:,.2f}", 1e9)),
    ("KV", lambda row: row["kv"]),
    ("fits", _fits),
    ("longest", lambda row: _tokens(row["longest"])),
    ("longest: ideal", lambda row: _tokens(row["longest_ideal"])),
)
CHOICE_MEANINGS = {
    "longest": "longest: context, at most the trained one",
    "longest: ideal": "ideal: weights and cache alone, in all of the memory",
    "tok/s at most": "tok/s at most: weights, cache and states read once from this memory; no stack reaches"
    " it",
}
SPEEDS: Columns[Choice] = (
    ("tok/s at most", lambda row: short(row["tokens_per_s"])),
    ("at the context", lambda row: short(row["tokens_per_s_at_context"])),
)
_ENGINES = {
    LLAMA_CPP: "in llama.cpp with flash attention on a GPU",
    TRANSFORMERS: "as stored, by PyTorch on a GPU, where a stack applies this quantization",
}


def show_choices(
    rows: Sequence[Choice],
    context: int,
    has_bandwidth: bool,
    memory_bytes: float,
    reserve: Figure,
    wide: bool,
) -> None:
    say(f"Memory: {memory_words(memory_bytes)}; {reserved_words(reserve, 'of it are ')}.")
    for engine, where in _ENGINES.items():
        if of_engine := [row for row in rows if row["engine"] == engine]:
            say(f"With {context:,} tokens of context, {where}:")
            theory_table((*COLUMNS, *SPEEDS), of_engine, wide, CHOICE_MEANINGS)
    for row in {row["model"]: row for row in rows}.values():
        if row["trained"] < context:
            say(beyond_trained(row["model"], row["trained"], row["trained_stated"]))
    if not has_bandwidth:
        say("--bandwidth GB/S adds the most tokens per second.")
