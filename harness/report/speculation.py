"""The chapter on tokens guessed ahead: speed against acceptance length, with theory's line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness.analysis import speculation, traffic
from harness.analysis.columns import ShownCell, SpeculationRow
from harness.analysis.identity import weights_content
from harness.analysis.speculation import acceptance_length, acceptance_rate, guesses_per_pass
from harness.dataset.study import Floats, Study, labels
from harness.records.kinds import Record
from harness.report.plots import (
    FAINT,
    Chapter,
    Figure,
    Mark,
    Plotly,
    figure_layout,
    legend,
    packed,
    plain_figure,
)
from harness.report.plots import marks as marks_of
from harness.report.tables import Column, number_column, word_column
from harness.theory.floors import prefill_floor_s

TITLE = "Speculation"
MEANING = (
    "Tokens per second where tokens are guessed ahead and one pass of the model verifies several. Acceptance"
    " length: tokens per pass of the model, its own one included. Theory: acceptance length x decode step /"
    " (pass that verifies the guesses and one token more + a step of the draft model for each guess)."
    " Synthetic acceptance accepts guesses at random, so many that the mean is as requested: its text is not"
    " the model's."
)
LINE_POINTS = 40


class Costs(NamedTuple):
    """What a pass takes, in ms, and where that is from. `draft_ms`: of one guess."""

    guesses: float
    decode_ms: float
    verify_ms: float
    verify_from: str
    draft_ms: float
    draft_from: str

    def speed_up(self, length: float) -> float:
        return speculation.speed_up(length, self.guesses, self.decode_ms, self.verify_ms, self.draft_ms)

    def sentence(self) -> str:
        return (
            f"a decode step takes {self.decode_ms:.2f} ms, a pass over {self.guesses + 1:.1f} tokens"
            f" {self.verify_ms:.2f} ({self.verify_from}), a guess {self.draft_ms:.2f} ({self.draft_from})"
        )


class GuessedRow(ShownCell):
    """`counts`: of the guesses. `plain_tokens_per_s`: of the same cell without them."""

    counts: SpeculationRow
    plain_tokens_per_s: float | None
    costs: Costs | None


def chapter(study: Study) -> Chapter[GuessedRow] | None:
    """The chapter on speculation; null without a cell in which tokens are guessed."""
    if not any(row["speculation"] for row in study.rows):
        return None
    marks = marks_of(study)
    records = {row["name"]: each.record for row in study.rows if (each := study.behind(row))}
    rows, notes, figures = {}, {}, {}
    for model, every in study.models.items():
        found = [
            _row(study, records, row, counts)
            for row in every
            if (counts := row["speculation"]) and row["name"] in records
        ]
        if not found:
            continue
        rows[model] = found
        lines = _lines(found, records)
        notes[model] = [f"theory, {row['variant']}: {costs.sentence()}" for row, costs in lines]
        drawn = _figure(model, found, lines, marks)
        figures[model] = [drawn] if drawn else []
    return Chapter(TITLE, MEANING, {TITLE: COLUMNS}, rows, notes, figures)


def _speed_up(row: GuessedRow) -> float | None:
    plain, rate = row["plain_tokens_per_s"], row["tokens_per_s"]
    return rate / plain if plain and rate else None


def _in_theory(row: GuessedRow) -> float | None:
    length = acceptance_length(row["counts"])
    return row["costs"].speed_up(length) if row["costs"] and length else None


COLUMNS: Sequence[Column[GuessedRow]] = (
    word_column("guesses by", lambda row: row["counts"]["by"], "what guesses, by the stack's own name"),
    word_column(
        "acceptance",
        lambda row: f"synthetic, {row['counts']['synthetic']:g}" if row["counts"]["synthetic"] else "real",
        "real: a guess is accepted if it is the model's own token; synthetic: at random, to this mean length",
    ),
    number_column(
        "acceptance length",
        lambda row: acceptance_length(row["counts"]),
        "{:.2f}",
        "tokens per pass of the model",
    ),
    number_column(
        "acceptance rate", lambda row: acceptance_rate(row["counts"]), "{:.0%}", "accepted of the guesses"
    ),
    number_column(
        "guesses/pass", lambda row: guesses_per_pass(row["counts"]), "{:.1f}", "guesses per pass of the model"
    ),
    number_column("tok/s", lambda row: row["tokens_per_s"], "{:.1f}", "over all decoded tokens"),
    number_column(
        "tok/s without",
        lambda row: row["plain_tokens_per_s"],
        "{:.1f}",
        "of the same cell without guesses",
    ),
    number_column("speed-up", _speed_up, "{:.2f}x", "tok/s over tok/s without guesses"),
    number_column(
        *("theory", _in_theory, "{:.2f}x"), "the speed-up at this acceptance length; below, from what"
    ),
)


def _row(study: Study, records: Mapping[str, Record], row: ShownCell, counts: SpeculationRow) -> GuessedRow:
    group = speculation.group(records[row["name"]])
    plain = (other for other in study.rows if other["name"] in records and not other["speculation"])
    rates = (other["tokens_per_s"] for other in plain if speculation.group(records[other["name"]]) == group)
    found: GuessedRow = {**row, "counts": counts, "plain_tokens_per_s": next(rates, None), "costs": None}
    return {**found, "costs": _costs(study, records, found)}


def _costs(study: Study, records: Mapping[str, Record], row: GuessedRow) -> Costs | None:
    guesses, rate = guesses_per_pass(row["counts"]), row["plain_tokens_per_s"]
    if guesses is None or not rate:
        return None
    verify = _verify(study, records, records[row["name"]], guesses + 1, 1e3 / rate)
    return Costs(guesses, 1e3 / rate, *verify, *_draft(study, records, row, 1e3 / rate))


def _verify(
    study: Study, records: Mapping[str, Record], record: Record, tokens: float, decode_ms: float
) -> tuple[float, str]:
    """Of a pass over so many tokens, in proportion to a decode step: as prefill passes of these weights and
    threads, else by the data sheet, else no more than one."""
    for name, curves in study.prefill.items():
        other, curve = records.get(name), curves.get(0)
        if other is None or curve is None or curve.n[0] > 1 or tokens > curve.n[-1]:
            continue
        if _place(other) == _place(record) and weights_content(other) == weights_content(record):
            ratio = float(np.interp(tokens, curve.n, curve.ms) / curve.ms[0])
            return decode_ms * ratio, f"as prefill passes of {other['stack']}"
    needs, ceiling = traffic.prefill_demand(record), traffic.prefill_ceiling(record)
    if needs and ceiling:
        one, several = (prefill_floor_s(needs, ceiling, round(n), "every") for n in (1, tokens))
        return decode_ms * several / one, "as the data sheet allows"
    return decode_ms, "at least: no prefill pass was measured"


def _place(record: Record) -> tuple[object, ...]:
    return record["machine"]["slug"], record.get("device"), record.get("threads")


def _draft(
    study: Study, records: Mapping[str, Record], row: GuessedRow, decode_ms: float
) -> tuple[float, str]:
    """Of one guess: a decode step of the draft model where that was measured, else by its bytes."""
    record, size, whole = records[row["name"]], row["counts"]["draft_model_bytes"], row["model_bytes"]
    wanted = record["options"].get("draft"), record["stack"], _place(record)
    for other in study.rows:
        of = records.get(other["name"])
        if of is None or other["speculation"] or not wanted[0] or not (rate := other["tokens_per_s"]):
            continue
        if (of["model"]["weights"].get("path"), of["stack"], _place(of)) == wanted:
            return 1e3 / rate, "a decode step of the draft model"
    if size and whole:
        return decode_ms * size / whole, "a decode step, by the bytes of both models"
    return 0.0, "no draft model"


def _lines(rows: Sequence[GuessedRow], records: Mapping[str, Record]) -> list[tuple[GuessedRow, Costs]]:
    """One line for cells that guess alike, whatever is accepted."""
    found: dict[str, tuple[GuessedRow, Costs]] = {}
    for row in rows:
        options = {**records[row["name"]]["options"], "accept": None}
        if row["costs"]:
            found.setdefault(str(options), (row, row["costs"]))
    return list(found.values())


def _figure(
    model: str,
    rows: Sequence[GuessedRow],
    lines: Sequence[tuple[GuessedRow, Costs]],
    marks: Mapping[str, Mark],
) -> Figure | None:
    """tok/s against acceptance length; theory dashed; dotted, without guesses."""
    named = list(zip(labels(rows, model), rows, strict=True))
    drawn = [
        (place, label, row, length, rate)
        for place, (label, row) in enumerate(named)
        if (length := acceptance_length(row["counts"])) and (rate := row["tokens_per_s"])
    ]
    if not drawn:
        return None
    data: list[Plotly] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": plain_figure(label),
            "x": [round(length, 4)],
            "y": [round(rate, 4)],
            "marker": {"color": marks[row["name"]].colour, "symbol": marks[row["name"]].symbol, "size": 9},
            "hovertemplate": "%{x:.2f} tokens a pass: %{y:,.1f} tokens/s<extra>%{fullData.name}</extra>",
            "meta": {"v": place, "low": round(rate, 4), "top": round(rate * 1.1, 4), "peak": rate},
        }
        for place, label, row, length, rate in drawn
    ]
    for row, costs in lines:
        lengths = np.linspace(1, costs.guesses + 1, LINE_POINTS)
        rates = 1e3 / costs.decode_ms * np.array([costs.speed_up(length) for length in lengths])
        data.append(_line(lengths, rates, f"{row['variant']}, theory", "dash"))
        data.append(_line(lengths, np.full(LINE_POINTS, 1e3 / costs.decode_ms), "without guesses", "dot"))
    return Figure(
        "speculation",
        "Tokens per second against acceptance length",
        f"Tokens per second of {model} against its tokens per pass; dashed, theory; dotted, without guesses.",
        data,
        figure_layout(
            "acceptance length, tokens per pass",
            "tokens/s",
            xaxis={"rangemode": "tozero"},
            yaxis={"rangemode": "tozero"},
        ),
        ["variant", "acceptance length", "tokens/s"],
        [[label, f"{length:.2f}", f"{rate:.1f}"] for _, label, _, length, rate in drawn],
        legend=legend(named, marks),
    )


def _line(x: Floats, y: Floats, name: str, dash: str) -> Plotly:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": plain_figure(name),
        "x": packed(x),
        "y": packed(y),
        "line": {"color": FAINT, "width": 1, "dash": dash},
        "hoverinfo": "skip",
    }
