"""The chapter on tokens guessed ahead: speed against acceptance length, with theory's line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from harness.analysis import speculation, traffic
from harness.analysis.columns import ShownCell, SpeculationRow
from harness.analysis.identity import weights_content
from harness.analysis.speculation import acceptance_length, acceptance_rate, guesses_per_pass
from harness.dataset.study import Study
from harness.records.kinds import Record
from harness.report import parts
from harness.report.parts import Chapter, column, lines, scatter
from harness.report.plots import FAINT, Chart, Mark, extent, figure_layout, legend, packed
from harness.report.tables import Column, word_column
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
    """`counts`: of the guesses. `plain_tokens_per_s`: of the same cell without them. `theory`: the speed-up
    at this acceptance length."""

    counts: SpeculationRow
    plain_tokens_per_s: float | None
    costs: Costs | None
    length: float | None
    accepted_share: float | None
    guesses_per_pass: float | None
    speed_up: float | None
    theory: float | None


Named = Sequence[tuple[str, GuessedRow]]


def chapter(study: Study) -> Chapter[GuessedRow] | None:
    """The chapter on speculation; None without a cell in which tokens are guessed."""
    if not any(row["speculation"] for row in study.rows):
        return None
    records = {row["name"]: stored.record for row in study.rows if (stored := study.behind(row))}
    models = parts.by_model(
        _row(study, records, row, counts)
        for of_model in study.models.values()
        for row in of_model
        if (counts := row["speculation"]) and row["name"] in records
    )
    return parts.chapter(
        study,
        TITLE,
        MEANING,
        {TITLE: COLUMNS},
        models,
        list,
        partial(_figures, records=records),
        lambda named: [
            f"theory, {row['variant']}: {costs.sentence()}" for row, costs in _lines(named, records)
        ],
    )


COLUMNS: Sequence[Column[GuessedRow]] = (
    column("guesses by", "counts.by", "", "what guesses, by the stack's own name"),
    word_column(
        "acceptance",
        lambda row: f"synthetic, {row['counts']['synthetic']:g}" if row["counts"]["synthetic"] else "real",
        "real: a guess is accepted if it is the model's own token; synthetic: at random, to this mean length",
    ),
    column("acceptance length", "length", "{:.2f}", "tokens per pass of the model"),
    column("acceptance rate", "accepted_share", "{:.0%}", "accepted of the guesses"),
    column("guesses/pass", "guesses_per_pass", "{:.1f}", "guesses per pass of the model"),
    column("tok/s", "tokens_per_s", "{:.1f}", "over all decoded tokens"),
    column("tok/s without", "plain_tokens_per_s", "{:.1f}", "of the same cell without guesses"),
    column("speed-up", "speed_up", "{:.2f}x", "tok/s over tok/s without guesses"),
    column("theory", "theory", "{:.2f}x", "the speed-up at this acceptance length; below, from what"),
)


def _row(study: Study, records: Mapping[str, Record], row: ShownCell, counts: SpeculationRow) -> GuessedRow:
    group = speculation.group(records[row["name"]])
    others = (other for other in study.rows if other["name"] in records and not other["speculation"])
    rates = (other["tokens_per_s"] for other in others if speculation.group(records[other["name"]]) == group)
    plain, rate, length = next(rates, None), row["tokens_per_s"], acceptance_length(counts)
    costs = _costs(study, records, row, counts, plain)
    return {
        **row,
        "counts": counts,
        "plain_tokens_per_s": plain,
        "costs": costs,
        "length": length,
        "accepted_share": acceptance_rate(counts),
        "guesses_per_pass": guesses_per_pass(counts),
        "speed_up": rate / plain if plain and rate else None,
        "theory": costs.speed_up(length) if costs and length else None,
    }


def _costs(
    study: Study, records: Mapping[str, Record], row: ShownCell, counts: SpeculationRow, plain: float | None
) -> Costs | None:
    guesses = guesses_per_pass(counts)
    if guesses is None or not plain:
        return None
    decode_ms, record = 1e3 / plain, records[row["name"]]
    verify = _verify(study, records, record, guesses + 1, decode_ms)
    return Costs(guesses, decode_ms, *verify, *_draft(study, records, row, counts, decode_ms))


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
    study: Study, records: Mapping[str, Record], row: ShownCell, counts: SpeculationRow, decode_ms: float
) -> tuple[float, str]:
    """Of one guess: a decode step of the draft model where that was measured, else by its bytes."""
    record, size, whole = records[row["name"]], counts["draft_model_bytes"], row["model_bytes"]
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


def _lines(named: Named, records: Mapping[str, Record]) -> list[tuple[GuessedRow, Costs]]:
    """One line for cells that guess alike, whatever is accepted."""
    alike: dict[str, tuple[GuessedRow, Costs]] = {}
    for _, row in named:
        options = {**records[row["name"]]["options"], "accept": None}
        if row["costs"]:
            alike.setdefault(str(options), (row, row["costs"]))
    return list(alike.values())


def _figures(
    model: str, named: Named, marks: Mapping[str, Mark], records: Mapping[str, Record]
) -> Iterator[Chart]:
    """tok/s against acceptance length; theory dashed; dotted, without guesses."""
    data, table = [], []
    hover = "%{x:.2f} tokens a pass: %{y:,.1f} tokens/s"
    for v, (label, row) in enumerate(named):
        x, y = parts.points([row], "length", "tokens_per_s")
        if x and y[0]:
            data.append(scatter(label, x, y, marks[row["name"]], hover, v, meta=extent(y)))
            table.append([label, f"{x[0]:.2f}", f"{y[0]:.1f}"])
    for row, costs in _lines(named, records) if data else ():
        lengths, plain = np.linspace(1, costs.guesses + 1, LINE_POINTS), 1e3 / costs.decode_ms
        for name, speed_up, dash in (
            (f"{row['variant']}, theory", costs.speed_up, "dash"),
            ("without guesses", lambda _: 1.0, "dot"),
        ):
            rates = np.array([plain * speed_up(length) for length in lengths])
            data.append(lines(name, packed(lengths), packed(rates), Mark(FAINT, ""), dash=dash))
    yield Chart(
        "speculation",
        "Tokens per second against acceptance length",
        f"Tokens per second of {model} against its tokens per pass; dashed, theory; dotted, without guesses.",
        data,
        figure_layout("acceptance length, tokens per pass", "tokens/s"),
        ["variant", "acceptance length", "tokens/s"],
        table,
        legend=legend(named, marks),
    )
