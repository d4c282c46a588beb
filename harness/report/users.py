"""The chapter on several users: tokens per second of all and of each against how many they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.analysis.columns import Cell, Percentiles, UsersRow
from harness.base.text import plural
from harness.dataset.study import Study
from harness.report import parts
from harness.report.parts import Chapter, column, lines
from harness.report.plots import Chart, Mark, Named, extent, figure_layout, legend
from harness.report.tables import Column, number
from harness.report.text_table import NONE

TITLE = "Several users"
KIND = "batch"
MEANING = (
    "Requests of several users at once, each with a prompt of its own. All users: tokens per second of all"
    " together from the first token of the last user on. Each: of one user after its first token, the median."
    " Theory: the weights read once per step, the KV cache read and tokens computed for each user, at the"
    " rates of the data sheet, or the measured bandwidth where there is none."
)
PERCENTILES = "median, 90th and 99th percentile over users and rounds"
OVERLAYS = {"theory": ("theory (dashed)", "dashed, theory")}
HOVER = "users: %{x}, %{y:,.1f} tokens/s"


class OfUsers(Cell):
    """A cell with so many users; None for a cell that has none. `limit`: tokens per second that theory allows
    those who decode at once."""

    at: UsersRow | None
    limit: float | None


def chapter(study: Study) -> Chapter[OfUsers] | None:
    """The chapter on several users; None without any."""
    models = parts.cells_of(study, KIND)
    return parts.chapter(study, TITLE, MEANING, {TITLE: COLUMNS}, models, shown, _figures, _notes)


def shown(rows: Sequence[Cell]) -> list[OfUsers]:
    """A row per number of users of these cells; one without for a cell that has none."""
    none: list[None] = [None]
    return [{**row, "at": at, "limit": _limit(row, at)} for row in rows for at in row["users"] or none]


def _limit(row: Cell, at: UsersRow | None) -> float | None:
    limit = row["users_limit"]
    return dict(limit["tokens_per_s"]).get(at["users"]) if limit and at and not at["queued"] else None


def _notes(named: Named) -> list[str]:
    """Where theory has steps become compute-bound."""
    bounds = [(label, limit["compute_bound_from"]) for label, row in named if (limit := row["users_limit"])]
    return [f"{label}: in theory compute-bound from {users:,} users on" for label, users in bounds if users]


def _percentiles(of: Percentiles | None) -> str:
    return f"{of['median']:,.1f} / {of['p90']:,.1f} / {of['p99']:,.1f}" if of else NONE


COLUMNS: tuple[Column[OfUsers], ...] = (
    column("users", "at.users", "{:.0f}", "at once"),
    column("all tok/s", "at.tokens_per_s", "{:,.1f}", "while all decode; - if some waited"),
    column("limit", "limit", "{:,.1f}", "all tok/s that theory allows"),
    column("each tok/s", "at.user_tokens_per_s", "{:,.2f}", "of one user, the median"),
    column(
        "output tok/s",
        "at.output_tokens_per_s",
        "{:,.1f}",
        "all tokens over all of the time, prompts included",
    ),
    Column(
        "TTFT ms",
        lambda row: _percentiles(row["at"] and row["at"]["ttft_ms"]),
        f"time to first token: {PERCENTILES}",
    ),
    Column(
        "TPOT ms",
        lambda row: _percentiles(row["at"] and row["at"]["tpot_ms"]),
        f"time per token after it: {PERCENTILES}",
    ),
    column(
        "fairness",
        "at.slowest_over_fastest",
        "{:.2f}",
        "tokens per second of the slowest user over those of the fastest",
    ),
)


def _figures(model: str, named: Named, marks: Mapping[str, Mark]) -> Iterator[Chart]:
    """Tokens per second of all users with theory's, and of each, against their number."""
    numbers = sorted({at["users"] for _, row in named for at in row["users"]})
    for name, of, rate, limit in (
        ("users-all", "all users", "at.tokens_per_s", "limit"),
        ("users-each", "each user", "at.user_tokens_per_s", ""),
    ):
        data, table = [], []
        for v, (label, row) in enumerate(named):
            rows, mark = shown([row]), marks[row["name"]]
            x, y = parts.points(rows, "at.users", rate)
            if row["users"]:
                data.append(lines(label, x, y, mark, HOVER, v, meta=extent(y)))
                rates = dict(zip(x, y, strict=True))
                table.append([label, *(number(rates.get(users), "{:,.1f}") for users in numbers)])
            x, y = parts.points(rows, "at.users", limit)
            if y:
                data.append(lines(f"{label}, theory", x, y, mark, HOVER, v, "theory", "dash", extent(y)))
        yield Chart(
            name,
            f"Tokens per second of {of}",
            f"Tokens per second of {of} of {model} against users at once.",
            data,
            figure_layout("users at once", "tokens/s"),
            ["variant", *(plural(users, "user") for users in numbers)],
            table,
            across=2,
            legend=legend(named, marks),
            known=OVERLAYS,
        )
