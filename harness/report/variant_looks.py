"""How a variant looks in every figure: its stack is the colour, the bits of its weights are the shape."""

from __future__ import annotations

import re
from collections.abc import Iterable
from zlib import crc32

from harness.analysis.columns import Cell
from harness.dataset.study import Study, labels, timed
from harness.report.plots import COLOUR_OF_STACK, COLOURS, FAINT, OTHER_COLOURS, SHAPES, Mark

# Word, fewest bits, symbol.
BITS = (
    ("16", 12.0, "circle"),
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
    marks_of = {}
    for model, rows in study.models.items():
        for row, label in zip(rows, labels(rows, model), strict=True):
            colour = hues[_hued(study, row, label)]
            marks_of[row["name"]] = Mark(colour, bits(row)[1], row["stack"])
    return marks_of


def hues_of(study: Study) -> dict[str, str]:
    """Stack, or variant where there is one stack -> colour; variants reuse hues."""
    all_names = [
        _hued(study, row, label)
        for model, rows in study.models.items()
        for row, label in zip(rows, labels(rows, model), strict=True)
    ]
    names = list(dict.fromkeys(all_names))
    if not is_of_one_stack(study):
        colour_of = stack_colours(names)
        return {name: colour_of[name] for name in names}
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def stack_colours(stacks: Iterable[str]) -> dict[str, str]:
    """The colour of each stack, the same on every page. One that the table does not name has one of the
    others by its name, or the next if another stack of the page has that, then that of a stack that is not
    on the page; grey if none is left."""
    colour_of: dict[str, str] = {}
    here = sorted(stacks)
    spare = [day for stack, day in COLOUR_OF_STACK.items() if stack not in here]
    for stack in here:
        first = crc32(stack.encode()) % len(OTHER_COLOURS)
        free = [
            colour
            for colour in (*OTHER_COLOURS[first:], *OTHER_COLOURS[:first], *spare)
            if colour not in colour_of.values()
        ]
        colour_of[stack] = COLOUR_OF_STACK.get(stack) or (free[0] if free else FAINT)
    return colour_of


def bits(row: Cell) -> tuple[str, str]:
    """Class of the bits of a row's weights, and its symbol: by the type's name, else by bits per weight."""
    named = _NAMED.match(row["variant"])
    value = row["nominal_bits"] or (float(named[1]) if named else row["bpw"])
    if value is None:
        return UNKNOWN
    return next((word, symbol) for word, least, symbol in BITS if value >= least)


def style_key(study: Study) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The key of the figures: names with their colours, and classes of bits with the symbols in use."""
    used = {mark.symbol for mark in marks(study).values()}
    classes = [*((word, symbol) for word, _, symbol in BITS), UNKNOWN]
    hues = hues_of(study)
    shown = list(hues.items()) if len(hues) <= len(COLOURS) or not is_of_one_stack(study) else []
    return shown, [(word, symbol) for word, symbol in classes if symbol in used and symbol in SHAPES]


def is_of_one_stack(study: Study) -> bool:
    """Whether colours are those of variants."""
    return len({row["stack"] for row in study.cells}) <= 1


def _hued(study: Study, row: Cell, label: str) -> str:
    """The stack or variant that a row's colour identifies."""
    return label.replace(f" {timed(row)}", "") if is_of_one_stack(study) else row["stack"]
