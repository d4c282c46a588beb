"""Chapters on several users, decode at depth, turns of a conversation and tokens guessed ahead, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from harness.analysis import speculation
from harness.analysis.columns import AtDepthRow, Cell, ShownCell, TaskRow
from harness.base.lookup import value_at
from harness.dataset.study import Study, timed
from harness.report import chapters, parts
from harness.report.chapters import Chapter, column
from harness.report.figure_texts import B, W, plus_minus
from harness.report.parts import bars, error_bars, figure_at, lines
from harness.report.plots import COLOURS, NO_COLOUR, Chart, Mark, Named, extent, figure_layout, legend
from harness.report.tables import Column
from harness.report.text_table import NONE


class TimedRow(Cell):
    """A cell with one of its timed rows and what follows from that: so many users, a depth, a conversation,
    or its guesses. `at`: None for a cell that has none."""

    at: Mapping[str, object] | None


Rows = Callable[[Cell], Sequence[Mapping[str, object]]]


@dataclass(frozen=True)
class Against:
    """A figure: `y` against `x` of each timed row, a line per cell. `ends`: of its interval. `limit`: what
    theory allows, dashed."""

    name: str
    y_title: str
    x_title: str
    x: str
    y: str
    hover: str
    ends: str = ""
    limit: str = ""
    across: int = 1


@dataclass(frozen=True)
class Workload:
    """A chapter. `rows`: the timed rows of a cell. `per_cell`: its table has a line per cell, not per timed
    row; `columns`: for these cells. `drawn`: further figures of a model's cells."""

    title: str
    meaning: str
    rows: Rows
    columns: Callable[[Sequence[Cell]], Sequence[Column[TimedRow]]]
    figures: Sequence[Against] = ()
    drawn: Callable[[Named], Iterator[Chart]] = lambda _: iter(())
    notes: Callable[[Named], Sequence[str]] = lambda _: ()
    per_cell: bool = False

    def shown(self, rows: Sequence[Cell]) -> list[TimedRow]:
        """The lines of the table of these cells."""
        no_row: list[None] = [None]
        return [
            {**row, "at": at}
            for row in rows
            for at in (no_row if self.per_cell else self.rows(row) or no_row)
        ]

    def chapter(
        self, study: Study, models: Mapping[str, Sequence[tuple[str, ShownCell]]]
    ) -> Chapter[TimedRow] | None:
        """The chapter of these cells; None without any."""
        columns = self.columns([row for named in models.values() for _, row in named])
        return chapters.chapter(
            study,
            self.title,
            self.meaning,
            {self.title: columns},
            models,
            self.shown,
            self._figures,
            self.notes,
        )

    def _figures(self, model: str, named: Named, marks: Mapping[str, Mark]) -> Iterator[Chart]:
        yield from (_against(figure, self.rows, model, named, marks) for figure in self.figures)
        yield from self.drawn(named)


def of_study(study: Study) -> dict[str, Chapter[TimedRow] | None]:
    """By the id of their section."""
    chapters_of = {
        name: WORKLOADS[kind].chapter(study, chapters.cells_where(study, partial(_is_of, kind)))
        for name, kind in (("depth", "depth"), ("turns", "turns"), ("users", "batch"))
    }
    guessing = chapters.cells_where(study, lambda row: row["speculation"])
    return {**chapters_of, "speculation": guesses(study).chapter(study, guessing)}


def _is_of(kind: str, row: ShownCell) -> bool:
    return timed(row) == kind


THEORY = {"theory": ("theory (dashed)", "dashed, theory")}


def _against(figure: Against, rows: Rows, model: str, named: Named, marks: Mapping[str, Mark]) -> Chart:
    data = []
    for v, (label, row) in enumerate(named):
        mark, timed_rows = marks[row["name"]], rows(row)
        x, y = parts.points(timed_rows, figure.x, figure.y)
        if y:
            ends = [value_at(at, figure.ends) for at in timed_rows] if figure.ends else []
            whiskers = error_bars(y, ends, mark.colour) if ends else {}
            data.append(lines(label, x, y, mark, figure.hover, v, meta=extent(y), error_y=whiskers))
        x, y = parts.points(timed_rows, figure.x, figure.limit)
        if y:
            data.append(lines(f"{label}, theory", x, y, mark, figure.hover, v, "theory", "dash", extent(y)))
    return Chart(
        figure.name,
        f"{figure.y_title} against {figure.x_title}",
        f"{figure.y_title} of {model} against {figure.x_title}"
        f"{', with 95% confidence intervals' * bool(figure.ends)}.",
        data,
        figure_layout(figure.x_title, "tokens/s", xaxis={"tickformat": ",~r"}),
        across=figure.across,
        legend=legend(named, marks),
        known=THEORY,
    )


def _users(row: Cell) -> list[dict[str, object]]:
    limit = row["users_limit"]
    rates = dict(limit["tokens_per_s"]) if limit else {}
    return [{**at, "limit": None if at["queued"] else rates.get(at["users"])} for at in row["users"]]


def _compute_bound(named: Named) -> list[str]:
    """Where theory has steps become compute-bound."""
    limits = [(label, limit["compute_bound_from"]) for label, row in named if (limit := row["users_limit"])]
    return [f"{label}: in theory compute-bound from {users:,} users on" for label, users in limits if users]


def _percentiles(heading: str, path: str, meaning: str) -> Column[TimedRow]:
    def text(row: TimedRow) -> str:
        figures = [figure_at(row, f"{path}.{name}") for name in ("median", "p90", "p99")]
        return " / ".join(f"{figure:,.1f}" for figure in figures if figure is not None) or NONE

    return Column(heading, text, f"{meaning}: median, 90th and 99th percentile over users and rounds")


USERS = (
    column("users", "at.users", "{:.0f}", "at once"),
    column("all tok/s", "at.tokens_per_s", "{:,.1f}", "while all decode; - if some waited"),
    column("limit", "at.limit", "{:,.1f}", "all tok/s that theory allows"),
    column("each tok/s", "at.user_tokens_per_s", "{:,.2f}", "of one user, the median"),
    column(
        "output tok/s",
        "at.output_tokens_per_s",
        "{:,.1f}",
        "all tokens over all of the time, prompts included",
    ),
    _percentiles("TTFT ms", "at.ttft_ms", "time to first token"),
    _percentiles("TPOT ms", "at.tpot_ms", "time per token after it"),
    column(
        "fairness",
        "at.slowest_over_fastest",
        "{:.2f}",
        "tokens per second of the slowest user over those of the fastest",
    ),
)
OF_USERS = partial(
    Against, x_title="users at once", x="users", hover="users: %{x}, %{y:,.1f} tokens/s", across=2
)


CURVED = ", curved"  # follows B and W that a line does not describe


def _at(row: Cell) -> Sequence[AtDepthRow]:
    return row["depths"]["at"] if row["depths"] else ()


def _depths(row: Cell) -> list[dict[str, object]]:
    B_ms, W = row["B_theory_ms"], row["W_theory_tokens_per_ms"]
    return [
        {**at, "limit": 1e3 / (B_ms + at["depth"] / W) if B_ms is not None and W else None} for at in _at(row)
    ]


def _rate(row: Cell, depth: int) -> str:
    """`61.0 ±0.4`"""
    rows = [at for at in _at(row) if at["depth"] == depth]
    return plus_minus(rows[0]["tokens_per_s"], rows[0]["tokens_per_s_ci95"]) if rows else NONE


def _bent(row: Cell, text: str) -> str:
    return text + CURVED * bool(text != NONE and row["depths"] and row["depths"]["curved"])


def _depth_columns(rows: Sequence[Cell]) -> list[Column[TimedRow]]:
    depths = sorted({at["depth"] for row in rows for at in _at(row)})
    meaning = "with {:,} tokens in the KV cache, ± to the farther end of the 95% confidence interval"
    return [
        *(Column(f"tok/s at {n:,}", partial(_rate, depth=n), meaning.format(n)) for n in depths),
        Column(
            "B ms",
            lambda row: _bent(row, B(row)),
            f"TPOT extrapolated to zero context{CURVED}: no line describes the windows",
        ),
        Column(
            "W tok/ms",
            lambda row: _bent(row, W(row)),
            "tokens of context per further ms of TPOT",
        ),
    ]


def _curved(named: Named) -> list[str]:
    curved = [label for label, row in named if row["depths"] and row["depths"]["curved"]]
    return [f"no line holds, latency bends with depth: {', '.join(curved)}"] if curved else []


SECONDS = (("prefill", Mark(COLOURS[1], "square")), ("decode", Mark(COLOURS[0], "square")))


def _conversations(row: Cell) -> list[dict[str, object]]:
    return [
        {
            **task,
            "prefix": _prefix(task),
            "prefill_share": task["prefill_s"] / task["task_s"] if task["task_s"] else None,
        }
        for task in row["tasks"]
    ]


def _prefix(task: TaskRow) -> str:
    return "kept" if task["prefix_kept"] else "not kept"


TURNS = (
    column("prefix", "at.prefix", "", "whether the conversation so far stayed in the KV cache"),
    column("first TTFT ms", "at.first_ttft_ms", "{:,.1f}", "time to first token of the first turn"),
    column("later TTFT ms", "at.later_ttft_ms", "{:,.1f}", "the same of the others, median over turns"),
    column("prefill s", "at.prefill_s", "{:,.2f}", "of all turns, first tokens included"),
    column("task s", "at.task_s", "{:,.2f}", "the whole conversation"),
    column("share of prefill", "at.prefill_share", "{:.0%}", "prefill s over task s"),
)


def _turns(named: Named) -> Iterator[Chart]:
    """For each cell two stacks per turn, without and with the prefix kept, side by side."""
    for label, row in named:
        turns = [(f"prefix {_prefix(task)}", turn) for task in row["tasks"] for turn in task["turns"]]
        x = [[prefix for prefix, _ in turns], [str(turn["turn"]) for _, turn in turns]]
        hover = "turn %{x}: %{fullData.name} %{y:.3f} s<extra></extra>"
        yield Chart(
            "turns",
            f"{label}: seconds per turn",
            f"Seconds of each turn of {row['name']}, with its prefix kept or not: prefill below (orange),"
            " decode above it (blue).",
            [
                bars(
                    part,
                    x,
                    [round((figure_at(turn, f"{part}_ms") or 0.0) / 1e3, 5) for _, turn in turns],
                    mark.colour,
                    hover,
                    v,
                )
                for v, (part, mark) in enumerate(SECONDS)
                if turns
            ],
            figure_layout(
                "turn",
                "seconds",
                barmode="stack",
                bargap=0.25,
                xaxis={"type": "multicategory", "gridcolor": NO_COLOUR},
            ),
            height=380,
            across=2,
            legend=SECONDS,
            legend_of="Parts",
        )


WORKLOADS = {
    "depth": Workload(
        "Depth",
        "Tokens per second of decode with a number of tokens in the KV cache, which prefill put there. Each"
        " depth has several short windows, in rounds. B and W are of a line through the windows' means: B,"
        " TPOT extrapolated to zero context; W, tokens of context per further ms of TPOT. Intervals of 95%"
        " include how repeats differ; that of a single repeat may be of its windows alone, which is a lower"
        " bound. Theory: the most that the bandwidth of the data sheet allows.",
        _depths,
        _depth_columns,
        [
            Against(
                "depth",
                "Tokens per second",
                "tokens in the KV cache",
                "depth",
                "tokens_per_s",
                "%{x:,} tokens in the cache: %{y:,.1f} tokens/s",
                "tokens_per_s_ci95",
                "limit",
            )
        ],
        notes=_curved,
        per_cell=True,
    ),
    "turns": Workload(
        "Turns",
        "A conversation of several turns: each adds a prompt and decodes an answer. Without its prefix kept,"
        " a turn evaluates the whole conversation again; with it, only what is new. Medians over all ok"
        " repeats.",
        _conversations,
        lambda _: TURNS,
        drawn=_turns,
    ),
    "batch": Workload(
        "Several users",
        "Requests of several users at once, each with a prompt of its own. All users: tokens per second of"
        " all together from the first token of the last user on. Each: of one user after its first token, the"
        " median. Theory: the weights read once per step, the KV cache read and tokens computed for each"
        " user, at the rates of the data sheet, or the measured bandwidth where there is none.",
        _users,
        lambda _: USERS,
        [
            OF_USERS("users-all", "Tokens per second of all users", y="tokens_per_s", limit="limit"),
            OF_USERS("users-each", "Tokens per second of each user", y="user_tokens_per_s"),
        ],
        notes=_compute_bound,
    ),
}
"""By the kind of their cells' workload."""


GUESSES = (
    column("guesses by", "at.by", "", "what guesses, by the stack's own name"),
    column(
        "acceptance",
        "at.acceptance",
        "",
        "real: a guess is accepted if it is the model's own token; synthetic: at random, to this mean length",
    ),
    column("acceptance length", "at.length", "{:.2f}", "tokens per pass of the model"),
    column("acceptance rate", "at.accepted_share", "{:.0%}", "accepted of the guesses"),
    column("guesses/pass", "at.guesses_per_pass", "{:.1f}", "guesses per pass of the model"),
    column("tok/s", "tokens_per_s", "{:.1f}", "over all decoded tokens"),
    column("tok/s without", "at.plain_tokens_per_s", "{:.1f}", "of the same cell without guesses"),
    column("speed-up", "at.speed_up", "{:.2f}x", "tok/s over tok/s without guesses"),
)


def guesses(study: Study) -> Workload:
    """The chapter on speculation; `study` has the same cells without guesses."""
    plain = cache(lambda: _without_guesses(study))
    return Workload(
        "Speculation",
        "Tokens per second where tokens are guessed ahead and one pass of the model verifies several."
        " Acceptance length: tokens per pass of the model, its own one included. Synthetic acceptance accepts"
        " guesses at random, so many that the mean is as requested: its text is not the model's.",
        lambda row: _guessed(row, study, plain),
        lambda _: GUESSES,
        [
            Against(
                "speculation",
                "Tokens per second",
                "acceptance length, tokens per pass",
                "length",
                "tokens_per_s",
                "%{x:.2f} tokens a pass: %{y:,.1f} tokens/s",
            )
        ],
    )


def _without_guesses(study: Study) -> dict[str, float | None]:
    """The speed of the first cell of each group that guesses nothing."""
    speeds: dict[str, float | None] = {}
    for row in study.rows:
        if not row["speculation"] and (stored := study.behind(row)):
            speeds.setdefault(speculation.group(stored.record), row["tokens_per_s"])
    return speeds


def _guessed(
    row: Cell, study: Study, speeds: Callable[[], Mapping[str, float | None]]
) -> list[dict[str, object]]:
    """`speeds`: see _without_guesses(), which reads every record; only asked where a cell guesses."""
    counts, stored, rate = row["speculation"], study.behind(row), row["tokens_per_s"]
    if counts is None or stored is None:
        return []
    plain = speeds().get(speculation.group(stored.record))
    return [
        {
            **counts,
            "acceptance": "real" if counts["synthetic"] is None else f"synthetic, {counts['synthetic']:g}",
            "length": speculation.acceptance_length(counts),
            "accepted_share": speculation.acceptance_rate(counts),
            "guesses_per_pass": speculation.guesses_per_pass(counts),
            "tokens_per_s": rate,
            "plain_tokens_per_s": plain,
            "speed_up": rate / plain if plain and rate else None,
        }
    ]
