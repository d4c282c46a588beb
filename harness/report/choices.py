"""Terminal output of `harness theory MODEL --memory SIZE`: which weights and KV types fit."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.table import NONE, formatted
from harness.report.theory import Columns, short, table
from harness.theory.choices import Choice
from harness.theory.footprint import LLAMA_CPP, TRANSFORMERS


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
SPEEDS: Columns[Choice] = (
    ("tok/s at most", lambda row: short(row["tokens_per_s"])),
    ("at the context", lambda row: short(row["tokens_per_s_at_context"])),
)


_ENGINES = {
    LLAMA_CPP: "in llama.cpp with flash attention on a GPU",
    TRANSFORMERS: "as stored, by PyTorch on a GPU, where a stack applies this quantization",
}


def show(rows: Sequence[Choice], context: int, has_bandwidth: bool) -> None:
    for engine, where in _ENGINES.items():
        if of_engine := [row for row in rows if row["engine"] == engine]:
            print(f"With {context:,} tokens of context, {where}:")
            table((*COLUMNS, *SPEEDS) if has_bandwidth else COLUMNS, of_engine)
    for model, trained in {row["model"]: row["trained"] for row in rows}.items():
        if trained < context:
            print(f"{model} was trained on at most {trained:,} tokens, fewer than asked for.")
    print("longest: context, at most the trained one; ideal: weights and cache alone, in all of the memory.")
    if has_bandwidth:
        print("tok/s at most: weights, cache and states read once from this memory; no stack reaches it.")
    else:
        print("--bandwidth GB/S adds the most tokens per second.")
