"""A page of several machines: by model, the share of its ceiling that each reaches, and its fastest cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple, cast

from harness.analysis.columns import Cell, Search
from harness.base.text import list_named, plural
from harness.dataset.study import Study, by_size, failure, ok, timed
from harness.dataset.table import synthetic
from harness.report import page, summary
from harness.report.plots import (
    Figure,
    Mark,
    Plotly,
    bits,
    figure_layout,
    named_axis,
    plain_figure,
    stack_colours,
)
from harness.report.tables import held, mbu, number, peak_memory, plus_minus
from harness.report.text_table import NONE, Table, in_markdown

LINE_PX = 22
FEW = 0.1  # a share below it has a digit more
CEILING = (
    "Ceiling: the highest read bandwidth that the cell's own run measured on its device. Share: of that, what"
    " decode read in weights and KV cache per second; models, quantizations and machines of any size compare"
    " by it. tok/s compares where the model and the bits are the same."
)
FASTEST = (
    "A line per machine and stack: its fastest cell among those that are ok. Dots: every cell that is ok."
)

# Rows: what the page needs of a cell and of a search. An index keeps them, so that records need not be read.

OF_CELL = (
    *(
        "cell",
        "started_utc",
        "name",
        "model",
        "stack",
        "variant",
        "machine",
        "device",
        "kind",
        "weights",
        "status",
        "reasons",
    ),
    *(
        "repeats",
        "stayed_disturbed",
        "workload",
        "tokens",
        "tokens_per_s",
        "tokens_per_s_ci95",
        "series_sha256",
    ),
    *(
        "bandwidth_share",
        "bandwidth_share_range",
        "bandwidth_bytes_per_s",
        "bpw",
        "nominal_bits",
        "joules_per_token",
    ),
    *("peak_rss_bytes", "peak_vram_bytes", "peak_allocator_bytes", "max_ctx", "max_ctx_is_target"),
    *("device_memory_bytes", "model_bytes", "weight_bytes_per_token", "kv_bytes_per_token", "flags"),
)
OF_SEARCH = ("name", "model", "stack", "variant", "machine", "device", "kind", "status", "verified_n_ctx")


class Rows(NamedTuple):
    """Decodes and searches, with the columns above alone, and sentences about what is wrong with records."""

    cells: Sequence[Cell]
    searches: Sequence[Search]
    warnings: Sequence[str]


def rows(study: Study) -> Rows:
    cells = [
        {name: row[name] for name in OF_CELL} for row in cast("list[Any]", study.cells) if not timed(row)
    ]
    searches = [{name: row[name] for name in OF_SEARCH} for row in cast("list[Any]", study.searches)]
    return Rows(cast("list[Cell]", cells), cast("list[Search]", searches), study.warnings)


def joined(every: Sequence[Rows]) -> Rows:
    """Of several folders. A series that a cell of another machine has to the last digit is a copy: both are
    left out, with a sentence."""
    # A bundle and the folder that it was made of have the same records.
    once = {(row["machine"], row["cell"], row["started_utc"]): row for each in every for row in each.cells}
    cells = [*once.values()]
    machines: dict[str, set[str]] = {}
    for row in cells:
        if row["series_sha256"]:
            machines.setdefault(row["series_sha256"], set()).add(row["machine"])
    copies = {digest: of for digest, of in machines.items() if len(of) > 1}
    warnings = [warning for each in every for warning in each.warnings]
    for digest, of in copies.items():
        (name, *_) = (row["name"] for row in cells if row["series_sha256"] == digest)
        where = list_named(sorted(of), summary.NAMES_SHOWN)
        warnings.append(f"{name}: equal to the last digit on {where}: left out, for one of them is a copy")
    kept = [row for row in cells if row["series_sha256"] not in copies]
    return Rows(kept, [row for each in every for row in each.searches], list(dict.fromkeys(warnings)))


def several(found: Rows) -> bool:
    """Whether they are of more than one machine."""
    return len({row["machine"] for row in _every(found)}) > 1


# A model's lines: one per machine and stack.


@dataclass(frozen=True)
class Line:
    """`fastest`: null where no cell is ok. `ceiling`: the cells' highest, bytes/s."""

    machine: str
    stack: str
    cells: Sequence[Cell]
    fastest: Cell | None
    ceiling: float | None
    longest: int | None

    @cached_property
    def shares(self) -> list[tuple[float, Cell]]:
        """The cells that are ok, by the share of the ceiling that each reached."""
        known = ((row["bandwidth_share"], row) for row in self.cells if ok(row))
        return sorted(((share, row) for share, row in known if share is not None), key=itemgetter(0))


def lines(found: Rows, model: str) -> list[Line]:
    """The fastest machine first, with all of its stacks; those without an ok cell last."""
    of: dict[tuple[str, str], list[Cell]] = {}
    searched: dict[tuple[str, str], list[Search]] = {}
    name = _names(found)
    for row in found.cells:
        if row["model"] == model:
            of.setdefault((name[_place(row)], row["stack"]), []).append(row)
    for search in found.searches:
        if search["model"] == model:
            searched.setdefault((name[_place(search)], search["stack"]), []).append(search)
    made = [_line(*at, of.get(at, []), searched.get(at, [])) for at in {**of, **searched}]
    best: dict[str, float] = {}
    for each in made:
        best[each.machine] = max(best.get(each.machine, 0.0), _speed(each))
    return sorted(made, key=lambda each: (-best[each.machine], each.machine, -_speed(each), each.stack))


def _line(machine: str, stack: str, cells: Sequence[Cell], searched: Sequence[Search]) -> Line:
    reached = [row["max_ctx"] for row in cells if ok(row) and held(row)]
    reached += [row["verified_n_ctx"] for row in searched if ok(row)]
    ceilings = [row["bandwidth_bytes_per_s"] for row in cells]
    return Line(
        machine,
        stack,
        cells,
        max(filter(_ranked, cells), key=lambda row: row["tokens_per_s"] or 0.0, default=None),
        max((each for each in ceilings if each), default=None),
        max((each for each in reached if each), default=None),
    )


def _ranked(row: Cell) -> bool:
    return ok(row) and row["tokens_per_s"] is not None


def _speed(line: Line) -> float:
    return (line.fastest and line.fastest["tokens_per_s"]) or 0.0


def _every(found: Rows) -> list[Cell | Search]:
    return [*found.cells, *found.searches]


def _place(row: Cell | Search) -> tuple[str, str, bool]:
    return row["machine"], str(row["device"]), row["kind"] == "reported"


def _names(found: Rows) -> dict[tuple[str, str, bool], str]:
    """The machine's; with its device where it has several, and where others published the figures."""
    places = {_place(row) for row in _every(found)}
    devices = Counter(machine for machine, _ in {place[:2] for place in places})
    return {
        (machine, device, reported): machine
        + f" on {device}" * (devices[machine] > 1)
        + ", third-party" * reported
        for machine, device, reported in places
    }


COLUMNS = {
    "machine": "the fastest first",
    "stack": "the software that ran",
    "fastest": "the variant of its fastest cell; else why none is ok",
    "tok/s": "decoded tokens per second of that cell, with the farther end of its 95% confidence interval",
    "share": "of the ceiling, by that cell",
    "best share": "of the ceiling, by any of its cells",
    "ceiling GB/s": "the highest read bandwidth that was measured",
    "tokens": "decoded by the fastest cell",
    "peak MB": "peak memory of the fastest cell: resident set on a CPU, else VRAM",
    "longest context": "tokens that a growing decode or a search reached, with any of its variants",
    "J/token": "energy of the fastest cell",
    "ok": "cells that are ok, of all",
}


def table(drawn: Sequence[Line]) -> Table:
    return Table(
        [*COLUMNS],
        [_texts(each) for each in drawn],
        [*[False] * 3, *[True] * (len(COLUMNS) - 3)],
        ["yellow" * (each.fastest is None) for each in drawn],
        "Machines",
        [*COLUMNS.values()],
    )


def _texts(line: Line) -> list[str]:
    row = line.fastest
    count = f"{sum(map(ok, line.cells))}/{len(line.cells)}" if line.cells else NONE
    ceiling, length = number(line.ceiling, "{:,.0f}", 1e9), number(line.longest, "{:,.0f}")
    if row is None:
        why = next((failure(each) for each in line.cells if failure(each)), "no decode")
        return [line.machine, line.stack, why, *[NONE] * 3, ceiling, NONE, NONE, length, NONE, count]
    best = line.shares[-1][0] if line.shares else None
    return [
        *(line.machine, line.stack, f"{row['variant']}{' (synthetic)' * synthetic(row)}"),
        plus_minus(row["tokens_per_s"], row["tokens_per_s_ci95"]),
        mbu(row),
        _share(best),
        *(ceiling, number(row["tokens"], "{:,.0f}"), peak_memory(row), length),
        *(number(row["joules_per_token"]), count),
    ]


def _share(share: float | None) -> str:
    return number(share, "{:.0%}" if share is None or share >= FEW else "{:.1%}")


def shares(drawn: Sequence[Line]) -> Figure | None:
    """The share of the ceiling of each cell that is ok: a line per machine, a colour per stack; null without
    any."""
    reached = [(line, line.shares) for line in drawn if line.shares]
    if not reached:
        return None
    machines = list(dict.fromkeys(line.machine for line, _ in reached))
    hues = stack_colours({line.stack for line, _ in reached})
    data: list[Plotly] = []
    for place, (stack, colour) in enumerate(hues.items()):
        own = [(line.machine, *each) for line, of in reached if line.stack == stack for each in of]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": stack,
                "x": [round(share, 3) for _, share, _ in own],
                "y": [plain_figure(machine) for machine, *_ in own],
                "text": [
                    plain_figure(f"{row['variant']}, {number(row['tokens_per_s'], '{:,.1f}')} tok/s")
                    for *_, row in own
                ],
                "marker": {
                    "color": colour,
                    "symbol": [bits(row)[1] for *_, row in own],
                    "size": 8,
                    "opacity": 0.75,
                },
                "hovertemplate": f"{plain_figure(stack)} %{{text}}: %{{x:.1~%}}<extra>%{{y}}</extra>",
                "meta": {"v": place},
            }
        )
    return Figure(
        "share-of-ceiling",
        "Share of the ceiling",
        "Each dot is a cell that is ok: the share of its machine's ceiling that decode reached. The shape is"
        " the bits per weight, as on the pages of one machine. The fastest machine is at the top.",
        data,
        figure_layout(
            "share of the ceiling",
            "",
            xaxis={"tickformat": ".1~%", "rangemode": "tozero"},
            yaxis=named_axis(machines, in_order=True),
        ),
        ["machine", "stack", "cells", "share: least", "median", "most"],
        [
            [
                line.machine,
                line.stack,
                str(len(of)),
                *map(_share, (of[0][0], median(map(itemgetter(0), of)), of[-1][0])),
            ]
            for line, of in reached
        ],
        height=80 + LINE_PX * len(machines),
        legend=[(stack, Mark(colour, "circle")) for stack, colour in hues.items()],
        legend_of="Stack",
    )


# The page, and its tables as Markdown.


@dataclass(frozen=True)
class View:
    """All of one model."""

    anchor: str
    model: str
    counts: str
    figures: Sequence[Figure]
    table: Table


def views(found: Rows) -> list[View]:
    """A view of each model, the one on most machines first."""
    of: dict[str, set[str]] = {}
    for row in _every(found):
        of.setdefault(row["model"], set()).add(row["machine"])
    made = []
    for place, model in enumerate(sorted(of, key=lambda model: (-len(of[model]), by_size(model)))):
        drawn = lines(found, model)
        figure = shares(drawn)
        cells = [row for line in drawn for row in line.cells]
        counts = (
            f"{plural(len(cells), 'cell')} of {plural(len(of[model]), 'machine')}, {sum(map(ok, cells))} ok"
        )
        made.append(View(f"m{place}", model, counts, [figure] if figure else [], table(drawn)))
    return made


def lead(found: Rows) -> str:
    """How much there is."""
    machines = {row["machine"] for row in _every(found)}
    return f"{plural(len(found.cells), 'cell')} of {plural(len(machines), 'machine')}."


MORE = "harness report of one machine's folder shows its latencies, memory, quality and methods."


def titled(every: Sequence[View]) -> list[tuple[str, Sequence[Figure]]]:
    """The figures, by model."""
    return [(view.model, view.figures) for view in every]


def html(title: str, found: Rows, every: Sequence[View]) -> str:
    """The whole page as text."""
    return page.filled(
        "machines.html",
        title=title,
        lead=f"{lead(found)} {MORE}",
        views=every,
        meanings=[FASTEST, CEILING],
        warnings=found.warnings,
    )


def markdown(title: str, found: Rows, every: Sequence[View]) -> str:
    parts = [f"# {in_markdown(title)}", lead(found), FASTEST, CEILING]
    for place, view in enumerate(every):
        shown = replace(view.table, title="", meanings=() if place else view.table.meanings)
        parts += [f"## {in_markdown(view.model)}", view.counts, shown.markdown()]
    return "\n\n".join(parts) + "\n"
