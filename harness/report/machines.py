"""A page of several machines: each model's fastest cells, their share of the ceiling, and all cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple, TypeVar

from harness.analysis.columns import Cell, Search, ShownCell
from harness.analysis.figures import BY_NAME, shown_in
from harness.base.text import list_named
from harness.dataset.study import Study, by_size, failure, ok, timed
from harness.dataset.table import synthetic
from harness.report import answers, head, page, parts, quality, summary, tables
from harness.report.plots import (
    Chart,
    Mark,
    bits,
    named_layout,
    names_height,
    plain_figure,
    stack_colours,
)
from harness.report.quality import ModelTable
from harness.report.tables import Column, held, number, number_column
from harness.report.text_table import NONE, in_markdown

RowT = TypeVar("RowT", Cell, Search)
FEW = 0.1  # a share below it has a digit more
CEILING = (
    "Ceiling: the highest read bandwidth that the cell's own run measured on its device. MBU: the share of it"
    " that decode read in weights and KV cache per second; models, quantizations and machines of any size"
    " compare by it. tok/s compares where the model and the bits are the same."
)
FASTEST = "Machines: a line per machine and stack, with its fastest cell among those that are ok."
MORE = "harness report of one machine's folder also shows its latencies, memory, quality and protocol."


class Rows(NamedTuple):
    """Decodes, searches, sentences about what is wrong with records, and where they come from."""

    cells: Sequence[Cell]
    searches: Sequence[Search]
    warnings: Sequence[str]
    origin: head.Origin | None


def rows(study: Study) -> Rows:
    cells = [row for row in study.cells if not timed(row)]
    return Rows(cells, study.searches, study.warnings, head.origin(study))


def joined(folders: Sequence[Rows]) -> Rows:
    """The rows of several folders. A series that a cell of another machine has to the last digit is a copy:
    both are left out, with a sentence."""
    # A bundle and the folder that it was made of have the same records.
    once = {(row["machine"], row["cell"], row["started_utc"]): row for of in folders for row in of.cells}
    cells = [*once.values()]
    machines: dict[str, set[str]] = {}
    for row in cells:
        if row["series_sha256"]:
            machines.setdefault(row["series_sha256"], set()).add(row["machine"])
    copies = {digest: of for digest, of in machines.items() if len(of) > 1}
    warnings = [warning for of in folders for warning in of.warnings]
    for digest, names in copies.items():
        (name, *_) = (row["name"] for row in cells if row["series_sha256"] == digest)
        where = list_named(sorted(names), summary.NAMES_SHOWN)
        warnings.append(f"{name}: equal to the last digit on {where}: left out, for one of them is a copy")
    return Rows(
        [row for row in cells if row["series_sha256"] not in copies],
        [row for of in folders for row in of.searches],
        list(dict.fromkeys(warnings)),
        head.joined([of.origin for of in folders if of.origin]),
    )


def study(title: str, found: Rows) -> Study:
    """The cells and searches, with the machine in their names."""
    return Study(title, _named(found.cells), searches=_named(found.searches), warnings=found.warnings)


def _named(rows: Sequence[RowT]) -> list[RowT]:
    """Model, machine, stack and variant; and when it began, where two are of the same machine."""
    found = [row.copy() for row in rows]
    for row in found:
        machine = row["machine"] + ", third-party" * (row["kind"] == "reported")
        row["name"] = f"{row['model']} {machine} {row['name'].removeprefix(row['model']).lstrip()}"
    names = Counter(row["name"] for row in found)
    for row in found:
        row["name"] += f" ({row['started_utc'][:16]})" * (names[row["name"]] > 1)
    return found


# A model's lines: one per machine and stack.


@dataclass(frozen=True)
class Line:
    """The cells, the fastest first, and the longest context of a machine's stack."""

    machine: str
    stack: str
    cells: Sequence[ShownCell]
    longest: int | None

    @property
    def fastest(self) -> ShownCell | None:
        """None where no cell is ok."""
        return next((row for row in self.cells if ok(row) and row["tokens_per_s"] is not None), None)

    @property
    def ceiling(self) -> float | None:
        """The highest of the cells', bytes/s."""
        return max((rate for row in self.cells if (rate := row["bandwidth_bytes_per_s"])), default=None)

    @cached_property
    def shares(self) -> list[tuple[float, Cell]]:
        """The cells that are ok, by the share of the ceiling that each reached."""
        known = ((row["bandwidth_share"], row) for row in self.cells if ok(row))
        return sorted(((share, row) for share, row in known if share is not None), key=itemgetter(0))


def lines(study: Study, model: str) -> list[Line]:
    """The fastest machine first, with all of its stacks; those without an ok cell last."""
    cells: dict[tuple[str, str], list[ShownCell]] = {}
    searches: dict[tuple[str, str], list[Search]] = {}
    name = _places(study)
    for row in study.models.get(model, []):
        cells.setdefault((name[_place(row)], row["stack"]), []).append(row)
    for search in study.searches:
        if search["model"] == model:
            searches.setdefault((name[_place(search)], search["stack"]), []).append(search)
    drawn = [_line(*at, cells.get(at, []), searches.get(at, [])) for at in {**cells, **searches}]
    best: dict[str, float] = {}
    for line in drawn:
        best[line.machine] = max(best.get(line.machine, 0.0), _speed(line.fastest))
    return sorted(
        drawn, key=lambda line: (-best[line.machine], line.machine, -_speed(line.fastest), line.stack)
    )


def _line(machine: str, stack: str, cells: Sequence[ShownCell], searches: Sequence[Search]) -> Line:
    reached = [row["max_ctx"] for row in cells if ok(row) and held(row)]
    reached += [row["verified_n_ctx"] for row in searches if ok(row)]
    ordered = sorted(cells, key=lambda row: (not ok(row), -_speed(row)))
    return Line(machine, stack, ordered, max(filter(None, reached), default=None))


def _speed(row: Cell | None) -> float:
    return (row and row["tokens_per_s"]) or 0.0


def _place(row: Cell | Search) -> tuple[str, str, bool]:
    return row["machine"], str(row["device"]), row["kind"] == "reported"


def _places(study: Study) -> dict[tuple[str, str, bool], str]:
    """The machine's name; with its device where it has several, and where others published the figures."""
    places = {*map(_place, study.cells), *map(_place, study.searches)}
    devices = Counter(machine for machine, _ in {place[:2] for place in places})
    return {
        (machine, device, reported): machine
        + f" on {device}" * (devices[machine] > 1)
        + ", third-party" * reported
        for machine, device, reported in places
    }


def _of_fastest(name: str, meaning: str) -> Column[Line]:
    """A figure of the fastest cell."""
    column = tables.RATE if name == "tokens_per_s" else tables.column_of(BY_NAME[name])
    return Column(column.heading, lambda line: column.text(line.fastest) if line.fastest else NONE, meaning)


LINES: tuple[Column[Line], ...] = (  # a page begins with the first of them
    Column("machine", lambda line: line.machine, "the fastest first", numeric=False),
    Column("stack", lambda line: line.stack, "the software that ran", numeric=False),
    Column(
        "fastest",
        lambda line: _variant(line),
        "the variant of its fastest cell; else why none is ok",
        numeric=False,
    ),
    _of_fastest(
        "tokens_per_s",
        "decoded tokens per second of that cell, with the farther end of its 95% confidence interval",
    ),
    _of_fastest("bandwidth_share", "share of the ceiling, by that cell"),
    _of_fastest("memory_bytes", "peak memory of that cell: resident set on a CPU, else VRAM"),
    number_column(
        "longest context",
        lambda line: line.longest,
        "{:,.0f}",
        "tokens that a growing decode or a search reached, with any variant",
    ),
    Column(
        "ok",
        lambda line: f"{sum(map(ok, line.cells))}/{len(line.cells)}" if line.cells else NONE,
        "cells that are ok, of all",
    ),
    Column(
        "best MBU",
        lambda line: _share(line.shares[-1][0] if line.shares else None),
        "share of the ceiling, by any of its cells",
    ),
    number_column(
        "ceiling GB/s", lambda line: line.ceiling, "{:,.0f}", "the highest read bandwidth measured", 1e9
    ),
    _of_fastest("tokens", "decoded by the fastest cell"),
    *(
        _of_fastest(figure.name, "energy of the fastest cell")
        for figure in shown_in("machines")
        if figure.family == "energy"
    ),
)


def _variant(line: Line) -> str:
    if line.fastest is None:
        return next((failure(row) for row in line.cells if failure(row)), "no decode")
    return f"{line.fastest['variant']}{' (synthetic)' * synthetic(line.fastest)}"


def table(drawn: Sequence[Line], figures: Sequence[Chart]) -> ModelTable:
    """The machines of a model."""
    columns = tables.used_columns(LINES, drawn)
    marked = ["yellow" * (line.fastest is None) for line in drawn]
    shown = tables.table("Machines", columns, drawn, marked)
    return ModelTable(shown, columns, (), _more(columns), (), (), figures)


def _more(columns: Sequence[Column[Any]], before: int = 0) -> list[bool]:
    """Which columns of a table wait for "all columns", with those `before`."""
    return [place >= quality.MOST for place in range(before + len(columns))]


def _share(share: float | None) -> str:
    return number(share, "{:.0%}" if share is None or share >= FEW else "{:.1%}")


def shares(drawn: Sequence[Line]) -> Chart | None:
    """The share of the ceiling of each cell that is ok: a line per machine, a colour per stack; null without
    any."""
    reached = [(line, line.shares) for line in drawn if line.shares]
    if not reached:
        return None
    machines = list(dict.fromkeys(line.machine for line, _ in reached))
    hues = stack_colours({line.stack for line, _ in reached})
    data = []
    for v, (stack, colour) in enumerate(hues.items()):
        own = [(line.machine, *each) for line, of in reached if line.stack == stack for each in of]
        data.append(
            parts.scatter(
                stack,
                [round(share, 3) for _, share, _ in own],
                [plain_figure(machine) for machine, *_ in own],
                Mark(colour, "circle"),
                f"{plain_figure(stack)} %{{text}}: %{{x:.1~%}}<extra>%{{y}}</extra>",
                v,
                marker={"symbol": [bits(row)[1] for *_, row in own], "opacity": 0.75},
                text=[
                    plain_figure(f"{row['variant']}, {number(row['tokens_per_s'], '{:,.1f}')} tok/s")
                    for *_, row in own
                ],
            )
        )
    return Chart(
        "share-of-ceiling",
        "Share of the ceiling",
        "Each dot is a cell that is ok: the share of its machine's ceiling that decode reached. The shape is"
        " the bits per weight, as on the pages of one machine. The fastest machine is at the top.",
        data,
        named_layout(machines, "share of the ceiling", in_order=True, xaxis={"tickformat": ".1~%"}),
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
        height=names_height(machines),
        legend=[(stack, Mark(colour, "circle")) for stack, colour in hues.items()],
        legend_of="Stack",
    )


# The page, and its tables as Markdown.


def views(study: Study) -> list[page.View]:
    """A view of each model, the one on most machines first."""
    machines: dict[str, set[str]] = {}
    for row in (*study.cells, *study.searches):
        machines.setdefault(row["model"], set()).add(row["machine"])
    models = sorted(machines, key=lambda model: (-len(machines[model]), by_size(model)))
    return [_view(f"m{place}", study, model) for place, model in enumerate(models)]


def _view(anchor: str, study: Study, model: str) -> page.View:
    drawn = lines(study, model)
    figure = shares(drawn)
    part = replace(
        study,
        cells=[row for line in drawn for row in line.cells],
        searches=[row for row in study.searches if row["model"] == model],
    )
    group = answers.group(model, model, part.rows, part.searches)
    return page.View(
        anchor,
        model,
        summary.counts(part),
        summary.none_ok(part),
        [page.Panel("", answers.answers(group), ())] if group.named or group.searched else [],
        [],
        [
            table(drawn, [figure] if figure else []),
            *([_all_cells(group.every)] if group.every else []),
        ],
        {},
        summary.failures(part),
        summary.flagged(part),
    )


def _all_cells(named: Sequence[tuple[str, ShownCell]]) -> ModelTable:
    names, rows = zip(*named, strict=True)
    columns = [
        tables.RATE if figure.name == "tokens_per_s" else tables.column_of(figure)
        for figure in shown_in("machines")
    ]
    used = tables.used_columns(columns, rows)
    shown = tables.of_columns("Cells", used, rows, names)
    return ModelTable(shown, used, rows, _more(used, 2), (), [quality.badges_of(row) for row in rows])


def html(study: Study, found: Rows, shown: Sequence[page.View]) -> str:
    """The whole page as text."""
    return page.of_views(study, shown, found.origin, [FASTEST, CEILING, MORE])


def markdown(study: Study, found: Rows, shown: Sequence[page.View]) -> str:
    """The lines of each model's machines."""
    parts = [
        f"# {in_markdown(study.title)}",
        *([found.origin.line] if found.origin else []),
        FASTEST,
        CEILING,
    ]
    for place, view in enumerate(shown):
        machines = replace(view.tables[0].table, title="")
        parts += [f"## {in_markdown(view.model)}", view.counts]
        parts.append((replace(machines, meanings=()) if place else machines).markdown())
    return "\n\n".join(parts) + "\n"
