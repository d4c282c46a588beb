"""The tables of cells and of searches that `harness run` and `harness report --list` print."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from harness.analysis.columns import Cell
from harness.analysis.quality import NOT_SCORED
from harness.analysis.warnings import Warnings
from harness.base.text import few, list_named, plural, say
from harness.dataset.study import Study, timed
from harness.report import longest, prefill, quality, summary, tables
from harness.report.closing import sentences
from harness.report.text_table import ANSWER, DISTURBED, FAILED, REMARK, WARNED, Block, Note, Table, show
from harness.report.timed_rows import with_prompts
from harness.report.workloads import WORKLOADS


def searches_blocks(study: Study) -> Iterator[Block]:
    """The table, then why each search ended, and what its length does not mean."""
    searches = [row for row in longest.context_rows(study) if row["search"]]
    first, *others = longest.COLUMNS
    yield tables.in_terminal((first, tables.STATUS, *others), searches)
    for row in study.searches:
        reasons = row["reasons"] if row["reasons"] else [row["not_filled"], row["limit_reason"]]
        for reason in filter(None, reasons):
            yield Note(f"{row['name']}: {reason}", FAILED if row["reasons"] else REMARK)
        yield from (Note(f"{row['name']}: {flag['detail']}", WARNED) for flag in row["flags"])


NAMES_SHOWN = 3  # of the cells that a note is about
ENOUGH = 2049  # tokens to see how latency grows with context; see analysis/shape.py
OF_B = (Warnings.spikes_left_out.name, Warnings.bends.name, Warnings.B_not_identifiable.name)
NOTED = (
    *(Warnings.late_second_token.name, Warnings.repeated_blocks.name),
    *(Warnings.ids_compared.name, Warnings.users_queued.name, Warnings.two_memories.name),
    *(Warnings.answer_ended.name, Warnings.counted_by_proxy.name, Warnings.prompt_not_counted.name),
    *(Warnings.tokens_in_pieces.name, Warnings.usage_unusable.name),
    *(Warnings.model_loaded.name, Warnings.other_form.name),
    *(Warnings.gpu_shared_little.name, Warnings.gpu_memory_of_others.name),
)


def show_cells_table(study: Study, as_json: bool, wide: bool) -> None:
    """Print what is wrong with the records, then one array, or cells_blocks()."""
    for warning in few(study.warnings):
        say(warning)
    if as_json:
        print_rows(study)
    else:
        show(cells_blocks(study), wide)


def print_rows(study: Study) -> None:
    """Print one array, a row a line: of each repeat, search and score."""
    rows = [*study.repeats, *study.searches, *study.scores]
    encode = json.JSONEncoder(allow_nan=False).encode
    print("[" + ",\n ".join(map(encode, rows)) + "]")


def cells_blocks(study: Study) -> Iterator[Block]:
    """The answers, the searches, the scores, the cells, and notes on them."""
    yield from (Note(sentence, ANSWER) for sentence in sentences(study))
    if study.searches:
        yield from searches_blocks(study)
    if study.scores:
        yield from quality.blocks(study.scores)
    if not study.cells and (study.searches or study.scores):
        return
    yield from tables_of_workloads(study.cells)
    yield from _failures(study.cells)
    yield from _warnings(study.cells)
    yield from _remarks(study.cells)
    if any(prefill.extrapolates(row["prefill"]) for row in study.cells):
        yield Note(prefill.EXTRAPOLATION)


def tables_of_workloads(rows: Sequence[Cell]) -> Iterator[Table]:
    """One of decodes, and one for each other kind of workload, as far as they have a row."""
    decodes, others = with_prompts(rows)
    if decodes:
        yield tables.cells(decodes)
    if swept := [row for row in others if timed(row) == prefill.KIND]:
        yield tables.in_terminal((*prefill.SHORT, tables.STATUS), prefill.shown(swept))
    for kind, workload in WORKLOADS.items():
        if shown := [row for row in others if timed(row) == kind]:
            yield tables.in_terminal((*workload.columns(shown), tables.STATUS), workload.shown(shown))


def _failures(rows: Sequence[Cell]) -> Iterator[Note]:
    """Why cells are not ok; what disturbed them is printed once for all of them."""
    disturbed = {why for row in rows for why in row["disturbed_reasons"]}
    reasons = [(row, why) for row in rows for why in row["reasons"] if why not in disturbed]
    yield from _of_cells(rows, reasons, FAILED)
    if any(row["prompt_provisional"] or tables.is_unsure(row) for row in with_prompts(rows)[0]):
        yield Note(f"{tables.PROVISIONAL_MARK}: provisional, as no repeat is ok", DISTURBED)


def _warnings(rows: Sequence[Cell]) -> Iterator[Note]:
    if summary.has_synthetic_figures(rows):
        yield Note("synthetic weights: sizes are exact, latencies almost exact", WARNED)
    if unscored := [row["name"] for row in rows if row["quality"] == NOT_SCORED]:
        yield Note(f"quality not scored: {list_named(unscored, NAMES_SHOWN)}", WARNED)
    for codes, rank, heading in ((NOTED, WARNED, ""), (OF_B, REMARK, "B ms")):
        raised = [(row, {flag["code"]: flag["detail"] for flag in row["flags"]}) for row in rows]
        details = [(row, by_code[code]) for row, by_code in raised for code in codes if code in by_code]
        yield from _of_cells(rows, details, rank, heading)


def _remarks(rows: Sequence[Cell]) -> Iterator[Note]:
    grown = [row for row in rows if row["workload"] == "grow" and row["max_ctx"]]
    yield from _of_cells(rows, [(row, tables.growth(row)) for row in grown], REMARK)
    if checked := [row["weights_check"] for row in rows if row["weights_check"]]:
        counts = ", ".join(f"{word} {checked.count(word)}" for word in dict.fromkeys(checked))
        yield Note(f"logits against the 16-bit reference: {counts}")
    unknown = Counter(why for row in rows if (why := row["energy_reason"]))
    sources = (str(row["energy_source"]) for row in rows if row["energy_source"] and not row["energy_reason"])
    if measured := dict.fromkeys(sources):
        yield Note(f"J/token: {'; '.join(measured)}")
    for why, count in unknown.most_common(1):
        which = "" if unknown.total() == len(rows) else f" of {plural(unknown.total(), 'cell')}"
        yield Note(f"no J/token{which}: {why}{', and other reasons' * (count < unknown.total())}")
    decodes = [row for row in rows if not timed(row)]
    flat = [
        row["tokens"] or 0 for row in decodes if row["slope_ms"] is not None and not row["W_identifiable"]
    ]
    if flat and (most := max(flat)) < ENOUGH:
        yield Note(
            f"{plural(most, 'token')} are too few to show how speed falls with context; use --tokens {ENOUGH}"
        )
    elif flat:
        yield Note("no W: the growth of latency with context is not distinguishable from zero")
    if peak := tables.bandwidth(decodes):
        yield Note(peak, heading="MBU")


def _of_cells(
    rows: Sequence[Cell], noted: Sequence[tuple[Cell, str]], rank: int, heading: str = ""
) -> Iterator[Note]:
    """A note for each text, with the cells that it is about unless it is about all rows."""
    for text in dict.fromkeys(text for _, text in noted):
        names = list(dict.fromkeys(row["name"] for row, note_text in noted if note_text == text))
        about = "" if len(names) == len(rows) else f"{list_named(names, NAMES_SHOWN)}: "
        yield Note(f"{about}{text}", rank, heading)
