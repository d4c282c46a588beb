"""How a variant looks in every figure: its stack is the colour, the bits of its weights are the shape."""

from __future__ import annotations

import re

from harness.dataset.study import Row, Study, figure, labels, timed
from harness.report.drawing import COLOURS, FAINT, SHAPES, Mark

# Word, fewest bits, symbol.
BITS = (
    ("16 bits", 12.0, "circle"),
    ("8", 7.0, "square"),
    ("6 to 5", 5.0, "diamond"),
    ("4", 4.0, "triangle-up"),
    ("under 4", 0.0, "triangle-down"),
)
UNKNOWN = ("unknown", "x")
_NAMED = re.compile(r"(?:i?q|int|nf|fp|bf|f|w)(\d+)")  # how a variant's name begins: q4_k_m, nf4, bf16


def marks(study: Study) -> dict[str, Mark]:
    """A mark for each cell's name; the same variant of two models, or in another workload, looks the same.

    In a study of one stack the colours tell its variants apart."""
    hues = hues_of(study)
    found = {}
    for model, rows in study.models.items():
        for row, label in zip(rows, labels(rows, model), strict=True):
            colour = hues[_hued(study, row, label)]
            found[str(row["name"])] = Mark(colour, bits(row)[1], str(row.get("stack") or ""))
    return found


def hues_of(study: Study) -> dict[str, str]:
    """Stack, or variant where there is one stack -> colour. A seventh stack has no hue of its own, and
    variants take turns."""
    every = [
        _hued(study, row, label)
        for model, rows in study.models.items()
        for row, label in zip(rows, labels(rows, model), strict=True)
    ]
    known = list(dict.fromkeys(every))
    if len(_stacks(study)) > 1:
        return {name: COLOURS[place] if place < len(COLOURS) else FAINT for place, name in enumerate(known)}
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(known)}


def bits(row: Row) -> tuple[str, str]:
    """Class of the bits of a row's weights, and its symbol: by the type's name, else by bits per weight."""
    named = _NAMED.match(str(row.get("variant") or ""))
    value = figure(row, "nominal_bits") or (float(named[1]) if named else figure(row, "bpw"))
    if value is None:
        return UNKNOWN
    return next((word, symbol) for word, least, symbol in BITS if value >= least)


def key(study: Study) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The key of the figures: names with their colours, and classes of bits with the symbols in use."""
    used = {mark.symbol for mark in marks(study).values()}
    classes = [*((word, symbol) for word, _, symbol in BITS), UNKNOWN]
    hues = hues_of(study)
    shown = list(hues.items()) if len(hues) <= len(COLOURS) or len(_stacks(study)) > 1 else []
    return shown, [(word, symbol) for word, symbol in classes if symbol in used and symbol in SHAPES]


def _stacks(study: Study) -> set[str]:
    return {str(row.get("stack")) for row in study.cells}


def _hued(study: Study, row: Row, label: str) -> str:
    """What the colour of a row stands for."""
    return str(row.get("stack")) if len(_stacks(study)) > 1 else label.replace(f" {timed(row)}", "")
