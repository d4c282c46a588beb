"""The chapter on several users: tokens per second of all and of each against how many they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from harness.analysis.columns import Cell, Percentiles, UsersRow
from harness.base.text import plural
from harness.dataset.study import Study
from harness.report import parts
from harness.report.parts import Chapter, column, lines
from harness.report.plots import Chart, Mark, Named, extent, figure_layout, legend, marks
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
    draw = partial(_figure, marks=marks(study))
    return parts.chapter(
        TITLE,
        MEANING,
        {TITLE: COLUMNS},
        parts.cells_of(study, KIND),
        shown,
        lambda model, named: (
            draw(model, named, "users-all", "at.tokens_per_s", "limit", "Tokens per second of all users"),
            draw(model, named, "users-each", "at.user_tokens_per_s", "", "Tokens per second of each user"),
        ),
        _notes,
    )


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


def _figure(
    model: str, named: Named, name: str, rate: str, limit: str, title: str, marks: Mapping[str, Mark]
) -> Chart | None:
    """Tokens per second against users. `rate`, `limit`: the paths of the measured figure and of theory's."""
    named = [(label, row) for label, row in named if row["users"]]
    if not named:
        return None
    data = []
    for v, (label, row) in enumerate(named):
        mark, rows = marks[row["name"]], shown([row])
        for path, word, kind, dash in ((rate, "", "", ""), (limit, ", theory", "theory", "dash")):
            x, y = parts.points(rows, "at.users", path)
            if y or not kind:
                data.append(lines(label + word, x, y, mark, HOVER, v, kind, dash, extent(y)))
    overlays, words = parts.overlays(data, OVERLAYS)
    numbers = sorted({at["users"] for _, row in named for at in row["users"]})
    rates = [dict(zip(*parts.points(shown([row]), "at.users", rate), strict=True)) for _, row in named]
    return Chart(
        name,
        title,
        f"{title} of {model} against users at once{words}.",
        data,
        figure_layout(
            "users at once", "tokens/s", xaxis={"rangemode": "tozero"}, yaxis={"rangemode": "tozero"}
        ),
        ["variant", *(plural(users, "user") for users in numbers)],
        [
            [label, *(number(of_users.get(users), "{:,.1f}") for users in numbers)]
            for (label, _), of_users in zip(named, rates, strict=True)
        ],
        across=2,
        legend=legend(named, marks),
        overlays=overlays,
    )
