"""The chapter on several users: tokens per second of all and of each against how many they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.analysis.columns import Cell, Percentiles, UsersRow
from harness.base.text import plural
from harness.dataset.study import Study, labels, timed
from harness.report.plots import Chapter, Figure, Mark, Named, Plotly, figure_layout, legend, plain_figure
from harness.report.plots import marks as marks_of
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


class OfUsers(Cell):
    """A cell with so many users; null for a cell that has none."""

    at: UsersRow | None


def chapter(study: Study) -> Chapter[OfUsers] | None:
    """The chapter on several users; null without any."""
    marks = marks_of(study)
    rows, notes, figures = {}, {}, {}
    for model, every in study.models.items():
        named = [
            (label, row) for label, row in zip(labels(every, model), every, strict=True) if timed(row) == KIND
        ]
        if not named:
            continue
        rows[model] = shown([row for _, row in named])
        notes[model] = _notes(named)
        drawn = [(label, row) for label, row in named if row["users"]]
        figures[model] = [
            _figure(model, drawn, marks, name, title, of, has_limit)
            for name, title, of, has_limit in (
                ("users-all", "tokens per second of all users", lambda each: each["tokens_per_s"], True),
                (
                    "users-each",
                    "tokens per second of each user",
                    lambda each: each["user_tokens_per_s"],
                    False,
                ),
            )
            if drawn
        ]
    return Chapter(TITLE, MEANING, {TITLE: COLUMNS}, rows, notes, figures) if rows else None


def shown(rows: Sequence[Cell]) -> list[OfUsers]:
    """A row per number of users of these cells; one without for a cell that has none."""
    none: list[None] = [None]
    return [{**row, "at": at} for row in rows for at in row["users"] or none]


def _notes(named: Named) -> list[str]:
    """Where theory has steps become compute-bound."""
    bounds = [(label, of["compute_bound_from"]) for label, row in named if (of := row["users_limit"])]
    return [f"{label}: in theory compute-bound from {users:,} users on" for label, users in bounds if users]


def _column(heading: str, of: Callable[[UsersRow], float | None], form: str, meaning: str) -> Column[OfUsers]:
    return Column(heading, lambda row: number(of(row["at"]), form) if row["at"] else NONE, meaning)


def _percentiles(heading: str, of: Callable[[UsersRow], Percentiles | None], what: str) -> Column[OfUsers]:
    def text(row: OfUsers) -> str:
        found = of(row["at"]) if row["at"] else None
        return f"{found['median']:,.1f} / {found['p90']:,.1f} / {found['p99']:,.1f}" if found else NONE

    return Column(heading, text, f"{what}: median, 90th and 99th percentile over users and rounds")


def _limit(row: Cell, users: int) -> float | None:
    """Of those who decode at once."""
    of = row["users_limit"]
    queued = any(at["queued"] for at in row["users"] if at["users"] == users)
    return dict(of["tokens_per_s"]).get(users) if of and not queued else None


COLUMNS: tuple[Column[OfUsers], ...] = (
    _column("users", lambda at: at["users"], "{:.0f}", "at once"),
    _column("all tok/s", lambda at: at["tokens_per_s"], "{:,.1f}", "while all decode; - if some waited"),
    Column(
        "limit",
        lambda row: number(_limit(row, row["at"]["users"]), "{:,.1f}") if row["at"] else NONE,
        "all tok/s that theory allows",
    ),
    _column("each tok/s", lambda at: at["user_tokens_per_s"], "{:,.2f}", "of one user, the median"),
    _column(
        *("output tok/s", lambda at: at["output_tokens_per_s"], "{:,.1f}"),
        "all tokens over all of the time, prompts included",
    ),
    _percentiles("TTFT ms", lambda at: at["ttft_ms"], "time to first token"),
    _percentiles("TPOT ms", lambda at: at["tpot_ms"], "time per token after it"),
    _column(
        *("fairness", lambda at: at["slowest_over_fastest"], "{:.2f}"),
        "tokens per second of the slowest user over those of the fastest",
    ),
)


def _figure(
    model: str,
    named: Named,
    marks: Mapping[str, Mark],
    name: str,
    title: str,
    of: Callable[[UsersRow], float | None],
    has_limit: bool,
) -> Figure:
    """Tokens per second against users; theory's limit dashed."""
    data: list[Plotly] = []
    overlays = {}
    for place, (label, row) in enumerate(named):
        mark = marks[row["name"]]
        points = [(each["users"], rate) for each in row["users"] if (rate := of(each)) is not None]
        data.append(
            _trace(label, points, "lines+markers", mark, {"v": place})
            | {"marker": {"color": mark.colour, "symbol": mark.symbol, "size": 8}}
        )
        if has_limit and (limit := row["users_limit"]):
            points = [(users, rate) for users, _ in limit["tokens_per_s"] if (rate := _limit(row, users))]
            trace = _trace(f"{label}, theory", points, "lines", mark, {"v": place})
            trace["line"]["dash"], trace["meta"]["kind"] = "dash", "theory"
            data.append(trace)
            overlays["theory"] = "theory (dashed)"
    numbers = sorted({each["users"] for _, row in named for each in row["users"]})
    rates = [{each["users"]: of(each) for each in row["users"]} for _, row in named]
    return Figure(
        name,
        title.capitalize(),
        f"{title.capitalize()} of {model} against users at once"
        + ("; dashed, theory" if overlays else "")
        + ".",
        data,
        figure_layout(
            "users at once", "tokens/s", xaxis={"rangemode": "tozero"}, yaxis={"rangemode": "tozero"}
        ),
        ["variant", *(plural(users, "user") for users in numbers)],
        [
            [label, *(number(of_row.get(users), "{:,.1f}") for users in numbers)]
            for (label, _), of_row in zip(named, rates, strict=True)
        ],
        across=2,
        legend=legend(named, marks),
        overlays=overlays,
    )


def _trace(
    label: str, points: Sequence[tuple[int, float]], mode: str, mark: Mark, meta: dict[str, object]
) -> Plotly:
    rates = [round(rate, 4) for _, rate in points]
    return {
        "type": "scatter",
        "mode": mode,
        "name": plain_figure(label),
        "x": [users for users, _ in points],
        "y": rates,
        "line": {"color": mark.colour, "width": 1.5},
        "hovertemplate": "users: %{x}, %{y:,.1f} tokens/s<extra>%{fullData.name}</extra>",
        "meta": meta | ({"low": min(rates), "top": max(rates)} if rates else {}),
    }
