"""HTML of tables, figures and lists."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from harness.dataset.study import Row, ok
from harness.report import columns
from harness.report.columns import Column
from harness.report.drawing import Figure


def table(title: str, chosen: Sequence[Column], lines: Iterable[tuple[str, Row, int | None]]) -> str:
    """A sortable table. `lines`: label, row, and the number of its model if the model filter of the page
    applies to it."""
    heads = [("cell", False, "model, stack and variant"), ("status", False, "outcome of the repeats")]
    heads += [(column.heading, column.numeric, column.meaning) for column in chosen]
    return sortable(title, heads, "".join(_line(chosen, *line) for line in lines))


def sortable(title: str, heads: Iterable[tuple[str, bool, str]], body: str) -> str:
    """A sortable table. `heads`: heading, whether the column is numeric, and its meaning; `body`: the lines
    as HTML."""
    head = "".join(
        f'<th scope="col" title="{escape(meaning)}"{" class=num" if numeric else ""}>'
        f"<button type=button>{escape(heading)}</button></th>"
        for heading, numeric, meaning in heads
    )
    made = f"<table class=sortable><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll tall" tabindex="0" role="region" aria-label="{escape(title)}">{made}</div>'


def _line(chosen: Sequence[Column], name: str, row: Row, number: int | None) -> str:
    cells = [f"<td>{escape(columns.state(row))}</td>"]
    for column in chosen:
        kind = "num" if column.numeric else "text"
        text = columns.cell(row, column)
        if not ok(row) and text.startswith(str(row.get("status"))):
            kind += f' why" title="{escape("; ".join(map(str, row.get("reasons") or [])))}'
        cells.append(f'<td class="{kind}">{escape(text)}</td>')
    badge = " <small>synthetic</small>" if row.get("weights") == "synthetic" else ""
    of = "" if number is None else f' data-m="{number}"'
    kind = "" if ok(row) else " class=bad"
    return f'<tr{of}{kind}><th scope="row">{escape(name)}{badge}</th>{"".join(cells)}</tr>'


def glossary(chosen: Sequence[Column]) -> str:
    """The meanings of the columns, collapsed."""
    items = "".join(f"<dt>{escape(c.heading)}</dt><dd>{escape(c.meaning)}</dd>" for c in chosen)
    return f"<details><summary>Columns</summary><dl>{items}</dl></details>"


def figure(drawn: Figure, group: str) -> str:
    """A figure for page.js to draw, its caption and its data. `group`: figures that share their switches."""
    drawing = {
        "group": group,
        "legend": [[label, mark.colour, mark.symbol] for label, mark in drawn.legend],
        "legendOf": drawn.legend_of,
        "overlays": drawn.overlays,
        "switch": drawn.switch,
        "data": drawn.data,
        "layout": drawn.layout,
    }
    text = json.dumps(drawing, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    text = text.replace("<", "\\u003c")  # so that no name can close the script tag
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in drawn.headers)
    lines = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td class=num>{escape(v)}</td>" for v in rest)
        + "</tr>"
        for first, *rest in drawn.rows
    )
    data = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    kind = f" class=of{drawn.across}" if drawn.across > 1 else ""
    text_of = escape(drawn.text)
    return (
        f"<figure{kind}><h3>{escape(drawn.title)}</h3><div class=tools></div>"
        f'<div class=plot role="img" aria-label="{text_of}" style="height:{drawn.height}px"></div>'
        f"<figcaption>{text_of}</figcaption>"
        f"<details><summary>Data</summary><div class=scroll tabindex=0>{data}</div></details>"
        f'<script type="application/json">{text}</script></figure>'
    )


def listed(items: Iterable[str]) -> str:
    """HTML items as a list; empty without items."""
    lines = "".join(f"<li>{item}</li>" for item in items)
    return f"<ul>{lines}</ul>" if lines else ""
