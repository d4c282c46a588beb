"""llama-sweep-bench's and llama-batched-bench's tables in Markdown and JSONL.

A row of a sweep generates TG tokens behind N_KV; T_TG is the time of all of them. Formats:
examples/sweep-bench (github.com/ikawrakow/ik_llama.cpp), tools/batched-bench (github.com/ggml-org/llama.cpp),
whose rows have a number of sequences, B or `pl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.records.foreign import depths, markdown, numerals
from harness.records.foreign.log import Log, LogError, Reader, of_objects, of_text, timed

FORMAT = "llama-sweep-bench result"
BATCHED = "llama-batched-bench result"
POINTS = "a point is the mean over the tokens of a row (T_TG / TG), at N_KV + TG / 2"
OF_ONE = "{} of {} rows are of several sequences at once and are left out"
TOTALS = (
    "llama-batched-bench gives means of whole runs: no B, W or shape; llama-sweep-bench gives points by depth"
)
_NAMES = {"PP": "pp", "TG": "tg", "N_KV": "n_kv", "T_PP s": "t_pp", "T_TG s": "t_tg", "B": "pl"}
_Row = Mapping[str, Any]


def _is_row(row: _Row) -> bool:
    return {"pp", "tg", "n_kv", "t_pp", "t_tg"} <= row.keys()


def _rows(text: str) -> list[_Row]:
    if "N_KV" not in text:
        return []
    named = ({_NAMES.get(name, name): cell for name, cell in row.items()} for row in markdown.rows(text))
    return [row for row in named if _is_row(row)]


def _is_sweep(row: _Row) -> bool:
    return _is_row(row) and "pl" not in row


def _is_sweep_table(text: str) -> bool:
    rows = _rows(text)
    return bool(rows) and all(map(_is_sweep, rows))


def _read(rows: Sequence[_Row]) -> Log:
    """A series per sweep, each of which begins where N_KV falls. Raises LogError."""
    sweeps: list[list[tuple[float, float]]] = []
    before = float("inf")
    for row in rows:
        at, tokens, s = float(row["n_kv"]), float(row["tg"]), _s(row["t_tg"])
        if at <= before:
            sweeps.append([])
        before = at
        if tokens > 0 and s > 0:
            sweeps[-1].append((depths.middle(at, tokens), 1e3 * s / tokens))
    made = [depths.series(points) for points in sweeps]
    found = [each for each in made if each]
    if not found:
        raise LogError(f"a {FORMAT} with fewer than {depths.LEAST} depths; give a larger -c")
    names = ["sweep"] if len(found) == 1 else [f"sweep {number}" for number in range(1, len(found) + 1)]
    return Log(FORMAT, dict(zip(names, found, strict=True)), notes=[POINTS])


def _read_batched(rows: Sequence[_Row]) -> Log:
    """The totals of rows of one sequence. Raises LogError."""
    single = [row for row in rows if int(row["pl"]) == 1]
    shared = [OF_ONE.format(len(rows) - len(single), len(rows))] if len(single) < len(rows) else []
    if not single:
        raise LogError(f"a {BATCHED} without a row of one sequence: use -npl 1")
    requests = {}
    for number, row in enumerate(single, 1):
        tokens, ms, prompt_ms = int(row["tg"]), 1e3 * _s(row["t_tg"]), 1e3 * _s(row["t_pp"])
        requests[f"row {number}"] = timed(tokens, prompt_ms, ms, int(row["pp"]) or None)
    return Log(BATCHED, requests=requests, notes=[*shared, TOTALS])


def _s(cell: float | str) -> float:
    """A time, which tables have with three decimals."""
    return numerals.ungrouped(cell) if isinstance(cell, str) else float(cell)


READERS: tuple[Reader, ...] = (
    of_objects(FORMAT, _is_sweep, _read),
    of_objects(BATCHED, _is_row, _read_batched),
    of_text(FORMAT, _is_sweep_table, lambda text: _read(_rows(text))),
    of_text(
        BATCHED,
        lambda text: _rows(text) and not _is_sweep_table(text),
        lambda text: _read_batched(_rows(text)),
    ),
)
