"""The tables of cells and of searches that `harness run` and `harness report --list` print."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from harness.analysis import flags
from harness.analysis.columns import Search
from harness.analysis.quality import NOT_SCORED
from harness.analysis.warnings import Warnings
from harness.base.text import list_named, plural
from harness.cli import say
from harness.dataset.study import Study, with_prefill
from harness.report import prefill_depth_turns, quality, summary, tables
from harness.report.text_table import Block, Note, show

# The table of searches that `harness run` and `harness report --list` print.


def searches_blocks(searches: Sequence[Search]) -> Iterator[Block]:
    """The table, then why each search ended, and what its length does not mean."""
    yield tables.searches(searches)
    for row in searches:
        reasons = row["reasons"] if row["reasons"] else [row["not_filled"], row["limit_reason"]]
        for reason in filter(None, [*reasons, *(flag["detail"] for flag in row["flags"])]):
            yield Note(f"{row['name']}: {reason}")


# The results table that they print, with what to know about its rows.


NAMES_SHOWN = 3  # of the cells that were not scored
NOTED = (
    *flags.OF_LINE,
    *(Warnings.ids_compared.name, Warnings.users_queued.name, Warnings.two_memories.name),
    *(Warnings.answer_ended.name, Warnings.counted_by_proxy.name, Warnings.prompt_not_counted.name),
    *(Warnings.tokens_in_pieces.name, Warnings.usage_unusable.name),
    *(Warnings.model_loaded.name, Warnings.other_form.name),
    *(Warnings.gpu_shared_little.name, Warnings.gpu_memory_of_others.name),
)


def show_cells_table(study: Study, as_json: bool, wide: bool) -> None:
    """Print what is wrong with the records, then one array, or cells_blocks()."""
    for warning in study.warnings:
        say(warning)
    if as_json:
        rows = [*study.repeats, *study.searches, *study.scores]
        print(json.dumps(rows, indent=1, allow_nan=False))
    else:
        show(cells_blocks(study), wide)


def cells_blocks(study: Study) -> Iterator[Block]:
    """The searches, the scores, the cells, and notes on them."""
    if study.searches:
        yield from searches_blocks(study.searches)
    if study.scores:
        yield from quality.blocks(study.scores)
    if not study.cells and (study.searches or study.scores):
        return
    swept = with_prefill(study).cells
    for number, table in enumerate(prefill_depth_turns.shown_workloads(swept)):
        if number:
            yield Note("")
        yield table
    if prefill_depth_turns.decodes(study.cells) and (peak := tables.bandwidth(study.cells)):
        yield Note(peak)
    if any(prefill_depth_turns.extrapolates(row["prefill"]) for row in swept):
        yield Note(prefill_depth_turns.EXTRAPOLATION)
    measured = [row for row in study.cells if row["joules_per_token"] is not None]
    if sources := dict.fromkeys(str(row["energy_source"]) for row in measured):
        yield Note(f"J/token: {'; '.join(sources)}")
    unknown = Counter(
        why for row in study.cells if row["joules_per_token"] is None and (why := row["energy_reason"])
    )
    for why, count in unknown.most_common(1):
        which = "" if unknown.total() == len(study.cells) else f" of {plural(unknown.total(), 'cell')}"
        yield Note(f"no J/token{which}: {why}{', and other reasons' * (count < unknown.total())}")
    checked = [row["weights_check"] for row in study.cells if row["weights_check"]]
    if checked:
        counts = ", ".join(f"{word} {checked.count(word)}" for word in dict.fromkeys(checked))
        yield Note(f"logits against the 16-bit reference: {counts}")
    unscored = [row["name"] for row in study.cells if row["quality"] == NOT_SCORED]
    if unscored:
        yield Note(f"quality not scored: {list_named(unscored, NAMES_SHOWN)}", "yellow")
    if summary.has_synthetic_figures(study):
        yield Note("synthetic weights: sizes are exact, latencies almost exact")
    if any(row["slope_ms"] is not None and not row["W_identifiable"] for row in study.cells):
        yield Note(
            "no W (the growth of latency with context): it is not distinguishable from zero, or there are"
            " fewer than 2,049 tokens"
        )
    for row in study.cells:
        noted = {flag["code"]: flag["detail"] for flag in row["flags"] if flag["code"] in NOTED}
        for detail in noted.values():
            yield Note(f"{row['name']}: {detail}")
    # The reason for disturbed repeats is printed once for all of them.
    disturbed = {why for row in study.cells for why in row["disturbed_reasons"]}
    for row in study.cells:
        if row["workload"] == "grow" and row["max_ctx"]:
            yield Note(f"{row['name']}: {tables.growth(row)}")
        for reason in [why for why in row["reasons"] if why not in disturbed]:
            yield Note(f"{row['name']}: {reason}", "yellow")
