"""The results table that `harness run` and `harness list` print, with what to know about its rows."""

from __future__ import annotations

import json

from harness.analysis.records import disturbances, known
from harness.analysis.records.disturbances import BusyProcess
from harness.analysis.records.quality import NOT_SCORED
from harness.cli import searches_table
from harness.cli.exits import say
from harness.dataset.gather import Gathered
from harness.report import prefill, quality, tables, workloads
from harness.report.table import note
from harness.system.wording import named

NAMES_SHOWN = 3  # of the cells that were not scored


def show(gathered: Gathered, as_json: bool, busiest: BusyProcess | None = None) -> None:
    """Print what is wrong with the records, then one array, or the searches, the scores, the cells, and notes
    on them. `busiest`: the process to name where repeats stayed disturbed."""
    for warning in gathered.warnings:
        say(warning)
    if sentence := disturbances.summary(gathered.cells, busiest):
        say(sentence)
    if as_json:
        rows = [*gathered.repeats, *gathered.searches, *gathered.scores]
        print(json.dumps(rows, indent=1, allow_nan=False))
        return
    if gathered.searches:
        searches_table.show(gathered.searches)
    if gathered.scores:
        quality.show(gathered.scores)
    if not gathered.cells and (gathered.searches or gathered.scores):
        return
    for number, table in enumerate(workloads.shown(gathered.swept)):
        if number:
            note("")
        table.show()
    if workloads.decodes(gathered.cells) and (peak := tables.bandwidth(gathered.repeats)):
        note(peak)
    if any(map(prefill.extrapolates, gathered.swept)):
        note(prefill.EXTRAPOLATION)
    checked = [row["weights_check"] for row in gathered.cells if row.get("weights_check")]
    if checked:
        counts = ", ".join(f"{word} {checked.count(word)}" for word in dict.fromkeys(checked))
        note(f"logits against the 16-bit reference: {counts}")
    unscored = [row["name"] for row in gathered.cells if row["quality"] == NOT_SCORED]
    if unscored:
        note(f"quality not scored: {named(unscored, NAMES_SHOWN)}", "yellow")
    if any(row["weights"] == "synthetic" for row in gathered.cells):
        note("synthetic weights: sizes are exact, latencies almost exact")
    if any(row["slope_ms"] is not None and not row["W_identifiable"] for row in gathered.cells):
        note("W -: the slope is not distinguishable from zero, or there are fewer than 2,049 tokens")
    for row in gathered.cells:
        of_line = {flag["code"]: flag["detail"] for flag in row["flags"] if flag["code"] in known.OF_LINE}
        for detail in of_line.values():
            note(f"{row['name']}: {detail}")
    # The reason for disturbed repeats is printed once for all of them.
    disturbed = {why for row in gathered.repeats if row["disturbed"] for why in row["reasons"]}
    for row in gathered.cells:
        if row["workload"] == "grow" and row["max_ctx"]:
            note(f"{row['name']}: {tables.growth(row)}")
        for reason in [why for why in row["reasons"] if why not in disturbed]:
            note(f"{row['name']}: {reason}", "yellow")
