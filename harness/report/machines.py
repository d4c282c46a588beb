"""A page of several machines: each model's fastest cells, their share of the ceiling, and all cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from harness.analysis.columns import Cell, Search, ShownCell
from harness.analysis.figures import shown_in
from harness.base.text import list_named
from harness.dataset.study import Study, by_size, ok, timed
from harness.report import answers, head, model_tables, page, parts, ranked_groups, summary, tables
from harness.report.figure_texts import number
from harness.report.model_tables import ModelTable
from harness.report.plots import Chart, Mark, named_layout, names_height, plain_figure
from harness.report.text_table import in_markdown
from harness.report.variant_looks import bits, stack_colours

RowT = TypeVar("RowT", Cell, Search)
CEILING = (
    "Ceiling: the highest read bandwidth that the cell's own run measured on its device. MBU: the share of it"
    " that decode read in weights and KV cache per second; models, quantizations and machines of any size"
    " compare by it. tok/s compares where the model and the bits are the same."
)
FASTEST = "Machines: the fastest cell of each machine and stack, among those that are ok."
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
    """The cells and searches, with the machine in their names, the fastest first."""
    cells = sorted(_named(found.cells), key=lambda row: (not ok(row), -(row["tokens_per_s"] or 0.0)))
    return Study(title, cells, searches=_named(found.searches), warnings=found.warnings)


def _named(rows: Sequence[RowT]) -> list[RowT]:
    """Model, machine, stack and variant; and when it began, where two are of the same machine."""
    named = [row.copy() for row in rows]
    for row in named:
        row["name"] = f"{row['model']} {_machine(row)} {row['name'].removeprefix(row['model']).lstrip()}"
    names = Counter(row["name"] for row in named)
    for row in named:
        row["name"] += f" ({row['started_utc'][:16]})" * (names[row["name"]] > 1)
    return named


def _machine(row: Cell | Search) -> str:
    return row["machine"] + ", third-party" * (row["kind"] == "reported")


def shares(cells: Sequence[Cell]) -> Chart | None:
    """The share of the ceiling of each cell that is ok: a line per machine, a colour per stack; None without
    any."""
    reached = [row for row in cells if ok(row) and row["bandwidth_share"] is not None]
    if not reached:
        return None
    machines = list(dict.fromkeys(map(_machine, reached)))
    hues = stack_colours({row["stack"] for row in reached})
    data = []
    for v, (stack, colour) in enumerate(hues.items()):
        of_stack = [row for row in reached if row["stack"] == stack]
        speeds = [f"{row['variant']}, {number(row['tokens_per_s'], '{:,.1f}')} tok/s" for row in of_stack]
        data.append(
            parts.scatter(
                stack,
                [round(row["bandwidth_share"] or 0.0, 3) for row in of_stack],
                [plain_figure(_machine(row)) for row in of_stack],
                Mark(colour, "circle"),
                f"{plain_figure(stack)} %{{text}}: %{{x:.1~%}}<extra>%{{y}}</extra>",
                v,
                marker={"symbol": [bits(row)[1] for row in of_stack], "opacity": 0.75},
                text=list(map(plain_figure, speeds)),
            )
        )
    return Chart(
        "share-of-ceiling",
        "Share of the ceiling",
        "Each dot is a cell that is ok: the share of its machine's ceiling that decode reached. The shape is"
        " the bits per weight, as on the pages of one machine. The fastest machine is at the top.",
        data,
        named_layout(machines, "share of the ceiling", in_order=True, xaxis={"tickformat": ".1~%"}),
        height=names_height(machines),
        legend=[(stack, Mark(colour, "circle")) for stack, colour in hues.items()],
        legend_of="Stack",
    )


def views(study: Study) -> list[page.View]:
    """A view of each model, the one on most machines first."""
    machines: dict[str, set[str]] = {}
    for row in (*study.cells, *study.searches):
        machines.setdefault(row["model"], set()).add(row["machine"])
    models = sorted(machines, key=lambda model: (-len(machines[model]), by_size(model)))
    return [_view(f"m{number}", study, model) for number, model in enumerate(models)]


def _view(anchor: str, study: Study, model: str) -> page.View:
    part = study.of_model(model)
    group = ranked_groups.group(model, model, part.rows, part.searches)
    fastest: dict[tuple[str, str, str | None], tuple[str, ShownCell]] = {}
    for label, row in group.every:
        fastest.setdefault((_machine(row), row["stack"], row["device"]), (label, row))
    figure = shares(part.cells)
    shown = [("Machines", list(fastest.values()), [figure] if figure else []), ("Cells", group.every, [])]
    return page.View(
        anchor,
        model,
        summary.counts(part),
        summary.none_ok(part),
        [page.Panel("", answers.answers(group), ())] if group.named or group.searched else [],
        [],
        [_table(title, named, figures) for title, named, figures in shown if named],
        {},
        summary.failures(part),
        summary.flagged(part),
    )


def _table(title: str, named: ranked_groups.Named, figures: Sequence[Chart]) -> ModelTable:
    names, rows = zip(*named, strict=True)
    columns = [
        tables.RATE if figure.name == "tokens_per_s" else tables.column_of(figure)
        for figure in shown_in("machines")
    ]
    used = tables.used_columns(columns, rows)
    more = [column >= model_tables.MOST for column in range(2 + len(used))]
    badges = [model_tables.badges_of(row) for row in rows]
    return ModelTable(tables.of_columns(title, used, rows, names), used, rows, more, (), badges, figures)


def html(study: Study, rows: Rows, shown: Sequence[page.View]) -> str:
    """The whole page as text."""
    return page.of_views(study, shown, rows.origin, [FASTEST, CEILING, MORE])


def markdown(study: Study, rows: Rows, shown: Sequence[page.View]) -> str:
    """The lines of each model's machines."""
    origin = [rows.origin.line] if rows.origin else []
    texts = [f"# {in_markdown(study.title)}", *origin, FASTEST, CEILING]
    for number_of_view, view in enumerate(shown):  # the meanings of the columns once
        texts += [f"## {in_markdown(view.model)}", view.counts]
        if view.tables:
            machines = replace(view.tables[0].table, title="")
            texts.append((replace(machines, meanings=()) if number_of_view else machines).markdown())
    return "\n\n".join(texts) + "\n"
