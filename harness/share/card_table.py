"""The table of a card: what the cells, searches and scores of a variant found, on one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from harness.analysis.columns import Ended, Score, Search, ShownCell
from harness.analysis.figures import BY_NAME, shown_in
from harness.dataset import search_rows
from harness.dataset.study import Study, ok, timed
from harness.report import figure_texts, tables
from harness.report.figure_texts import number
from harness.report.text_table import NONE, Table


@dataclass(frozen=True)
class _Line:
    """`main`: the cell whose speed is shown; None: only its context or its quality was measured."""

    label: str
    main: ShownCell | None
    cells: Sequence[ShownCell]
    searches: Sequence[Search]
    scores: Sequence[Score]


def table_of(study: Study) -> Table:
    def key(row: Ended) -> tuple[str, str, str | None]:
        return row["stack"], row["variant"], row["device"]

    ended: list[Ended] = [*study.rows, *study.searches, *study.scores]
    keys = sorted(set(map(key, ended)), key=lambda key: [part or "" for part in key])
    several_devices = len({on for *_, on in keys}) > 1
    lines = []
    for stack, variant, on in keys:
        cells = [row for row in study.rows if key(row) == (stack, variant, on)]
        line = _Line(
            f"{stack} {variant}" + f" on {on}" * several_devices,
            min(cells, key=lambda row: (bool(timed(row)), row["workload"] != "decode"), default=None),
            cells,
            [row for row in study.searches if key(row) == (stack, variant, on)],
            [row for row in study.scores if key(row) == (stack, variant, on)],
        )
        lines.append([text(line) for _, text in COLUMNS])
    shown = [
        column
        for column, (heading, _) in enumerate(COLUMNS)
        if heading == "variant" or any(texts[column] != NONE for texts in lines)
    ]
    headings = [COLUMNS[column][0] for column in shown]
    texts = [[line[column] for column in shown] for line in lines]
    return Table(headings, texts, [heading not in WORDS for heading in headings])


def _status(line: _Line) -> str:
    if line.main:
        return figure_texts.state(line.main)
    return ", ".join(dict.fromkeys(row["status"] for row in (*line.searches, *line.scores)))


def _of_main(text: Callable[[ShownCell], str], ok_alone: bool = True) -> Callable[[_Line], str]:
    """The text of a figure of the variant's main cell; `ok_alone`: a dash unless that is ok."""
    return lambda line: text(line.main) if line.main and (ok(line.main) or not ok_alone) else NONE


def _prefill(line: _Line) -> str:
    rates = [rate for row in line.cells if ok(row) and (rate := BY_NAME["pp512"].value(row))]
    return number(max(rates, default=None), "{:,.1f}")


def _context(line: _Line) -> str:
    """The longest of searches, else of growing runs."""
    if verified := [(length, search) for search in line.searches if (length := search["verified_n_ctx"])]:
        length, search = max(verified, key=itemgetter(0))
        past = figure_texts.PAST_TRAINING * bool(figure_texts.past_training(search["flags"]))
        return number(length, "{:,.0f}") + past + search_rows.trained_mark(search)
    grown = [row for row in line.cells if ok(row) and row["max_ctx"]]
    return figure_texts.longest(max(grown, key=lambda row: row["max_ctx"] or 0)) if grown else NONE


def _perplexity(line: _Line) -> str:
    if line.main and line.main["status"] == "invalid":
        return NONE
    rows = [line.main, *line.scores] if line.main else line.scores
    return number(next((found for row in rows if (found := row["perplexity"]) is not None), None))


CONTEXT = BY_NAME["max_ctx"]
WORDS = ("variant", "status", "flags")
SPECIAL: Mapping[str, Callable[[_Line], str]] = {
    "tokens_per_s": _of_main(
        lambda row: figure_texts.plus_minus(row["tokens_per_s"], row["tokens_per_s_ci95"])
    ),
    "B_ms": _of_main(lambda row: figure_texts.B(row) if row["tokens_per_s"] is None else NONE),  # published
    "pp512": _prefill,
    "file_bytes": _of_main(tables.text_of(BY_NAME["file_bytes"]), ok_alone=False),
    "max_ctx": _context,
    "perplexity": _perplexity,
    "flags": _of_main(figure_texts.flags, ok_alone=False),
}
"""The text of figures that are not the main cell's alone."""
COLUMNS: tuple[tuple[str, Callable[[_Line], str]], ...] = (
    ("variant", lambda line: line.label),
    ("status", _status),
    *(
        (figure.label, SPECIAL.get(figure.name) or _of_main(tables.text_of(figure)))
        for figure in shown_in("card")
    ),
)
