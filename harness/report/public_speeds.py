"""Public speeds as one HTML page, and as tables: the share of the ceiling reached, by machine."""

from __future__ import annotations

import csv as csv_format
import io
import json as json_format
import statistics
from collections.abc import Iterable, Sequence

from harness.base.text import csv_cell, plural
from harness.report import page, parts
from harness.report.plots import COLOURS, Chart, Mark, named_layout, names_height, plain_figure
from harness.report.text_table import NONE, Table, formatted
from harness.theory.public_speeds import COLUMNS, PublicSpeed, used

TITLE = "Public speeds"
MEANING = (
    "Speeds that others measured and published, each with its source; none was measured or repeated here.",
    "Ceiling: the most tokens per second that the machine's data sheet allows, for these weights and this"
    " context (decode) or prompt (prefill); see harness theory. Share: of that ceiling, reached.",
    "A suspicious row is shown with its reason, and used nowhere.",
)
_BITS = ("16 bits", "5 to 8 bits", "4 bits", "2 and 3 bits")


def lead(rows: Sequence[PublicSpeed]) -> str:
    """How much there is."""
    machines, sources = ({each.device.name for each in rows}, {each.source for each in rows})
    left_out = len(rows) - len(used(rows))
    return (
        f"{plural(len(rows), 'row')} of {plural(len(machines), 'machine')}, from"
        f" {plural(len(sources), 'source')}; {left_out} of them suspicious."
    )


def by_machine(rows: Sequence[PublicSpeed]) -> Table:
    """A line per machine, of the rows that are used."""
    headings = ["machine", "maker", "run by", "years", "decodes", "share: median", "least", "most"]
    headings += ["prefills", "prefill share: median", "least", "most"]
    lines = []
    for name, of_machine in _by_machine(rows).items():
        years = sorted({each.year for each in of_machine if each.year})
        span = NONE if not years else str(years[0]) if len(years) == 1 else f"{years[0]} to {years[-1]}"
        decodes = [share for each in of_machine if (share := each.share)]
        prefills = [share for each in of_machine if (share := each.prompt_share)]
        families = ", ".join(sorted({each.family for each in of_machine}))
        lines.append([name, of_machine[0].maker, families, span, *_shares(decodes), *_shares(prefills)])
    return Table(headings, lines, title="By machine")


def every(rows: Sequence[PublicSpeed]) -> Table:
    """A line per row; suspicious ones are marked."""
    headings = ["machine", "model", "weights", "software", "year", "context", "tok/s", "ceiling", "share"]
    headings += ["prompt", "prefill tok/s", "prefill ceiling", "prefill share", "source", "suspicious"]
    lines = [
        [
            each.device.name,
            each.name,
            each.quant,
            " ".join(part for part in (each.stack, each.version, each.family) if part),
            str(each.year or NONE),
            formatted(each.context),
            formatted(each.tok_s, "{:,.1f}"),
            formatted(each.ceiling_tok_s, "{:,.1f}"),
            formatted(each.share, "{:.0%}"),
            formatted(each.prompt_tokens),
            formatted(each.prompt_tok_s),
            formatted(each.prompt_ceiling_tok_s),
            formatted(each.prompt_share, "{:.0%}"),
            each.source,
            each.suspicious,
        ]
        for each in rows
    ]
    numeric = [False] * 4 + [True] * 9 + [False] * 2
    return Table(headings, lines, numeric, ["yellow" * bool(each.suspicious) for each in rows], "All rows")


def html(rows: Sequence[PublicSpeed]) -> str:
    """The whole page as text."""
    return page.filled(
        "public_speeds.html",
        title=TITLE,
        lead=lead(rows),
        figure=shares(rows),
        tables=[by_machine(rows), every(rows)],
        meaning=MEANING,
    )


def markdown(rows: Sequence[PublicSpeed]) -> str:
    parts = [f"# {TITLE}", lead(rows), *(by_machine(rows).markdown(), every(rows).markdown()), *MEANING]
    return "\n\n".join(parts) + "\n"


def csv(rows: Sequence[PublicSpeed]) -> str:
    """One line per row, figures in full precision, empty if unknown."""
    out = io.StringIO()
    values = [_fields(each) for each in rows]
    writer = csv_format.DictWriter(out, fieldnames=list(values[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in each.items()} for each in values)
    return out.getvalue()


def json(rows: Sequence[PublicSpeed]) -> str:
    return json_format.dumps([_fields(each) for each in rows], indent=1, allow_nan=False) + "\n"


def _fields(row: PublicSpeed) -> dict[str, object]:
    """The columns of the data, with what follows from them."""
    device = row.device
    own: dict[str, object] = {
        "model": row.name,
        "machine": device.name,
        "memory_gib": device.memory.value / 2**30 or None,
        "bandwidth_gb_per_s": device.data_sheet_bytes_per_s / 1e9,
    }
    given = {name: own[name] if name in own else getattr(row, name) for name in COLUMNS}
    return given | {
        "maker": row.maker,
        "ceiling_tok_s": row.ceiling_tok_s,
        "share": row.share,
        "prompt_ceiling_tok_s": row.prompt_ceiling_tok_s,
        "prompt_share": row.prompt_share,
    }


def shares(rows: Sequence[PublicSpeed]) -> Chart:
    """The share of the ceiling that each decode reached: a line per machine, a colour per bits of weights."""
    of_machines = _by_machine([each for each in rows if each.tok_s])
    drawn = [each for found in of_machines.values() for each in found]
    marks = {name: Mark(colour, "circle") for name, colour in zip(_BITS, COLOURS, strict=False)}
    data = []
    for v, (name, mark) in enumerate(marks.items()):
        points = [each for each in drawn if _bits(each) == name]
        data.append(
            parts.scatter(
                name,
                [round(each.share or 0, 4) for each in points],
                [plain_figure(each.device.name) for each in points],
                mark,
                "%{text}: %{x:.0%}<extra>%{y}</extra>",
                v,
                marker={"size": 7, "opacity": 0.75},
                text=[plain_figure(f"{each.name} {each.quant}, {each.stack}") for each in points],
            )
        )
    return Chart(
        "share-of-ceiling",
        "Share of the ceiling that decode reached",
        "Each dot is a published decode speed, as a share of the most that the machine's bandwidth allows at"
        " that context. Machines of a maker stand together.",
        data,
        named_layout(
            list(of_machines),
            "share of the ceiling",
            in_order=True,
            xaxis={"tickformat": ".0%", "range": [0, 1]},
        ),
        ["machine", "model", "weights", "share"],
        [[each.device.name, each.name, each.quant, f"{each.share:.1%}"] for each in drawn],
        height=names_height(list(of_machines)),
        legend=list(marks.items()),
        legend_of="Weights",
    )


def _bits(row: PublicSpeed) -> str:
    bits = next((int(char) for char in row.quant if char.isdigit()), 16)
    return _BITS[0] if not row.packed else _BITS[1] if bits >= 5 else _BITS[2] if bits == 4 else _BITS[3]


def _by_machine(rows: Iterable[PublicSpeed]) -> dict[str, list[PublicSpeed]]:
    """The rows that are used, by machine; in the order of makers."""
    found: dict[str, list[PublicSpeed]] = {}
    for each in sorted(used(rows), key=lambda each: (each.maker, each.device.name)):
        found.setdefault(each.device.name, []).append(each)
    return found


def _shares(shares: Sequence[float]) -> list[str]:
    """How many, their median, the least and the most."""
    if not shares:
        return [NONE] * 4
    figures = (statistics.median(shares), min(shares), max(shares))
    return [str(len(shares)), *(f"{share:.0%}" for share in figures)]
