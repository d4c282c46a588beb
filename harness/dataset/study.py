"""A folder of results as a Study: rows, series, searches, scores."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from harness import records
from harness.analysis import (
    agreement,
    cell_intervals,
    memory,
    prefill_rows,
    quality,
    speculation,
    time_split,
    withheld,
)
from harness.analysis import prefill as analysis_prefill
from harness.analysis.columns import (
    Cell,
    Check,
    Counted,
    Outcome,
    Repeat,
    Score,
    Search,
    ShownCell,
    Variant,
)
from harness.base.files import FAULTS, TABLE_OF
from harness.base.text import plural
from harness.dataset import cell_rows, repeat_flags, row_names, search_rows
from harness.dataset.judging import Judged, judge, rows_of
from harness.dataset.matching import baseline_rows
from harness.dataset.methods import attention, methods
from harness.records import NO_TOKENS, ResultsError, Stored, TokenTimes
from harness.records.kinds import served_elsewhere
from harness.records.parts import Machine

if TYPE_CHECKING:
    import pandas as pd


LONGEST_REASON = 32  # characters shown in a table cell; the full reason is below the table
Floats = NDArray[np.float64]


T = TypeVar("T")


@dataclass(frozen=True)
class Curve:
    """Latency in ms against `n`, a token's position or a prompt's length. At full resolution: only display is
    thinned. `prefill`: its first point is the first token, which is not drawn."""

    n: Floats
    ms: Floats
    prefill: bool = True

    @property
    def decode(self) -> Curve:
        return Curve(self.n[1:], self.ms[1:], prefill=False) if self.prefill else self


@dataclass(frozen=True)
class MemoryCurve:
    """Memory of a worker over time. `vram_bytes`: None where no GPU was used."""

    seconds: Floats
    rss_bytes: Floats | None
    vram_bytes: Floats | None = None


@dataclass(frozen=True, repr=False)
class Study:
    """All that a report shows.

    `cells`: one row per cell with a unique `name`; a figure that is None or missing is shown as a dash.
    `repeats`: one row per record. `checks`: one named row per check of a variant's logits. `searches`: one
    named row per search for the longest context. `scores`: one named row per score of a text. `attributions`:
    one row per cell, where its memory goes. By row name: `series`, the repeat to draw, including its first
    token (prefill, which is not drawn); `memory`; `prefill`, the median passes by depth; `baseline`, the row
    to compare with. `further_methods`: what `methods` cannot know from the records. `warnings`: unreadable
    files. `stored`: the record of each repeat. Of repeats and searches: `ran`, the first record of each
    machine, protocol, set of versions, command and source; `n_records`, how many were measured here (or
    published, if none was), and `days`, their dates; `probes`, the read bandwidths of each machine, bytes/s.
    `fitted`: B and W of each repeat as bundles of every version claim them. `tables`: reads a table of
    `harness sql`."""

    title: str
    cells: Sequence[Cell]
    repeats: Sequence[Repeat] = ()
    checks: Sequence[Check] = ()
    searches: Sequence[Search] = ()
    scores: Sequence[Score] = ()
    attributions: Sequence[memory.Attribution] = ()
    series: Mapping[str, Curve] = field(default_factory=dict)
    memory: Mapping[str, MemoryCurve] = field(default_factory=dict)
    prefill: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    baseline: Mapping[str, Cell] = field(default_factory=dict)
    further_methods: Mapping[str, object] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    stored: Sequence[Stored] = ()
    ran: Sequence[Stored] = ()
    n_records: int = 0
    days: Sequence[str] = ()
    probes: Mapping[str, Sequence[float]] = field(default_factory=dict)
    fitted: Sequence[dict[str, float | str | None]] = ()
    tables: Callable[[str], pd.DataFrame] | None = None

    def __repr__(self) -> str:
        """`Study('results': 2 cells, 6 repeats)`"""
        rows = {
            "cell": len(self.cells),
            "repeat": len(self.repeats),
            "search result": len(self.searches),
            "score": len(self.scores),
            "check": len(self.checks),
        }
        counts = [plural(count, kind) for kind, count in rows.items() if count]
        return f"Study({self.title!r}: {', '.join(counts) or 'nothing'})"

    def frame(self, name: str) -> pd.DataFrame:
        """A table of `harness sql`: cells, repeats, nights, tokens or memory; empty for a log. Raises
        ResultsError."""
        if self.tables is None:
            import pandas as pd

            return pd.DataFrame()
        return self.tables(name)

    def of_model(self, model: str) -> Study:
        """The study with the cells and searches of one model alone."""
        cells = [row for row in self.cells if row["model"] == model]
        return replace(self, cells=cells, searches=[row for row in self.searches if row["model"] == model])

    def behind(self, cell: Cell) -> Stored | None:
        """The record behind a cell's row."""
        return self._by_row.get(cell_rows.cell_identity(cell))

    @cached_property
    def _by_row(self) -> dict[tuple[str, int, str], Stored]:
        return {
            cell_rows.cell_identity(row): stored
            for row, stored in zip(self.repeats, self.stored, strict=bool(self.stored))  # made rows have none
        }

    @property
    def machines(self) -> list[Machine]:
        """The facts of each machine."""
        return list(
            {stored.record["machine"]["slug"]: stored.record["machine"] for stored in self.ran}.values()
        )

    @property
    def methods(self) -> dict[str, object]:
        """Heading -> text, list or mapping, in display order; commands go under a heading with "repeat" or
        "command" in it."""
        energy = [*dict.fromkeys(source for row in self.cells if (source := row["energy_source"]))]
        counted = {"Energy": energy} if energy else {}
        return attention(self.cells) | counted | methods(self.ran, self.probes) | {**self.further_methods}

    @cached_property
    def rows(self) -> list[ShownCell]:
        """The cells, each with its `baseline`: a row or None."""
        return [{**row, "baseline": self.baseline.get(row["name"])} for row in self.cells]

    @cached_property
    def models(self) -> dict[str, list[ShownCell]]:
        """The rows of each model, in order of first appearance."""
        models: dict[str, list[ShownCell]] = {}
        for row in self.rows:
            models.setdefault(row["model"], []).append(row)
        return models

    @cached_property
    def decodes(self) -> dict[str, list[ShownCell]]:
        """The decode cells of each model that has any."""
        decodes = {model: [row for row in rows if not timed(row)] for model, rows in self.models.items()}
        return {model: rows for model, rows in decodes.items() if rows}


def ok(row: Outcome) -> bool:
    return row["status"] == "ok"


def provisional(row: Counted) -> bool:
    """Whether it has figures that are not ok only because the machine disturbed every repeat."""
    return row["status"] == "invalid" and 0 < row["repeats"] == len(row["stayed_disturbed"])


def failure(row: Outcome) -> str:
    """`oom`, or `error: ` and the reason; empty for a cell that is ok."""
    status = row["status"]
    if status == "ok":
        return ""
    if status == "oom" or not row["reasons"]:
        return status
    why = " ".join(row["reasons"][0].split())
    return f"{status}: {why if len(why) <= LONGEST_REASON else why[: LONGEST_REASON - 1] + '…'}"


def finite(value: float | None) -> float | None:
    """A figure as a finite number; None: none."""
    return float(value) if value is not None and math.isfinite(value) else None


def bounds(interval: Sequence[float | None] | None) -> tuple[float | None, float | None]:
    """The ends of an interval; an open end is None, and both are None without an interval."""
    low, high = interval or (None, None)
    return finite(low), finite(high)


def labels(rows: Sequence[Variant], model: str) -> list[str]:
    """Short labels of a model's cells: their names without the model and without a device that all share; the
    full names where these tell more rows apart."""
    names = [row["name"] for row in rows]
    devices = {str(row["device"]) for row in rows}
    shared = f" on {devices.pop()}" if len(devices) == 1 else ""
    short = [name.removeprefix(f"{model} ").removesuffix(shared) for name in names]
    return short if len(set(short)) == len(set(names)) else names


def timed(row: Repeat) -> str | None:
    """The kind of workload of a row that has timed rows: prefill, depth or turns; None for a decode."""
    return row["workload"] if row["workload"] in TABLE_OF else None


def load_study(stored: Sequence[Stored]) -> Study:
    """The Study of some records; see study_of()."""
    return study_of(judge(stored))


def study_of(judged: Sequence[Judged], with_cells: bool = True) -> Study:
    """All rows of records that were judged. What takes longer to read is left to attributions() and
    with_series(). `with_cells`: whether their rows are needed, too.

    Records that cannot be analysed are left out, with a warning each."""
    try:
        return _study_of(judged, with_cells)
    except FAULTS:  # one record must not end the analysis of all: find it
        faults = {record.stored.folder: fault for record in judged if (fault := _fault(record, with_cells))}
        if not faults:
            raise
        study = _study_of([record for record in judged if record.stored.folder not in faults], with_cells)
        return replace(study, warnings=[*faults.values(), *study.warnings])


def _fault(record: Judged, with_cells: bool) -> str | None:
    """Why a record cannot be analysed, as a sentence; None: it can."""
    try:
        _study_of([record], with_cells)
    except FAULTS as fault:
        return f"{record.stored.folder}: left out, cannot be analysed: {fault!r}"
    return None


def _study_of(judged: Sequence[Judged], with_cells: bool) -> Study:
    warnings = [damage for record in judged if (damage := record.facts["damage"])]
    ordered = sorted(
        (record for record in judged if not record.facts["damage"]),
        key=lambda record: by_size(record.facts["model"]),
    )
    of_kind: dict[str, list[Any]] = {"searched": [], "checked": [], "scored": []}
    repeats: list[Repeat] = []
    repeated: list[Judged] = []
    for record, row in zip(ordered, rows_of(ordered), strict=True):
        if record.facts["kind"] in of_kind:
            of_kind[record.facts["kind"]].append(row)
        else:
            repeats.append(row)
            repeated.append(record)
    warnings += dict.fromkeys(warning for record in ordered for warning in record.facts["warnings"])
    searches = row_names.with_unique_names(search_rows.latest_searches(of_kind["searched"]))
    checks = row_names.with_unique_names(agreement.latest_checks(of_kind["checked"]))
    scores = row_names.with_unique_names(search_rows.latest_searches(of_kind["scored"]))
    fitted = [_fitted(row) for row in repeats]
    stored = [record.stored for record in repeated]
    compare(repeats, stored, checks, scores)
    cells, prefill = list[Cell](), dict[str, Mapping[int, Curve]]()
    if with_cells:
        cells = row_names.with_unique_names(pooled(repeats, repeated))
        cells, prefill = _with_prefill(cells, repeats, repeated, warnings)
    for row in repeats:  # cells pool facts that a single repeat does not have
        withheld.withhold(row)
    ran = [record for record in ordered if record.facts["kind"] not in ("checked", "scored")]
    measured = [record for record in ran if record.facts["kind"] != "reported"] or ran
    examples: dict[str, Stored] = {}
    for record in ran:
        examples.setdefault(record.facts["provenance"], record.stored)
    return Study(
        title="",
        cells=cells,
        repeats=repeats,
        stored=stored,
        ran=[*examples.values()],
        days=sorted({record.facts["started_utc"][:10] for record in measured}),
        n_records=len(measured),
        probes=_probes(ran),
        fitted=fitted,
        checks=checks,
        searches=searches,
        scores=scores,
        prefill=prefill,
        warnings=warnings,
    )


def _probes(ran: Sequence[Judged]) -> dict[str, list[float]]:
    """The read bandwidths that were measured on each machine, bytes/s."""
    probes: dict[str, list[float]] = {}
    for record in ran:
        if record.facts["kind"] != "reported":
            probes.setdefault(record.facts["machine"], []).extend(record.facts["probes"])
    return probes


def compare(
    repeats: Sequence[Repeat], stored: Sequence[Stored], checks: Sequence[Check], scores: Sequence[Score]
) -> None:
    """Add to the rows of repeats what only others, checks and scores tell. `stored`: of each row."""
    stored_of = _by_row(repeats, stored)
    plain = {row["guess_group"]: row for row in repeats if row["guess_group"] and not row["speculation"]}
    for row in repeats:
        if row["speculation"] and row["guess_group"]:
            other, this = plain.get(row["guess_group"]), stored_of[id(row)]
            plain_ids = other and (stored_of[id(other)].record, _times(stored_of[id(other)], []))
            ids = speculation.compared_ids(this.record, _times(this, []), plain_ids)
            row["flags"].append(ids.row())
    repeat_flags.flag_identical_series(repeats)
    of_stack: dict[tuple[str, str, str], list[Repeat]] = {}
    for row in repeats:
        of_stack.setdefault((row["campaign"], row["model"], row["stack"]), []).append(row)
    for alike in of_stack.values():
        repeat_flags.flag_kernel_changes(alike)
    repeat_flags.drop_intervals(repeats)
    agreement.apply_checks(repeats, checks)
    quality.apply(repeats, scores)


def pooled(repeats: Sequence[Repeat], judged: Sequence[Judged]) -> list[Cell]:
    """The rows of cells, without names, of repeats that were compared. `judged`: each of them."""
    record_of = _by_row(repeats, judged)

    def timed_rows(row: Repeat) -> dict[str, list[int]]:
        return record_of[id(row)].timed if row["workload"] in TABLE_OF else {}

    return time_split.split_time(cell_rows.per_cell(repeats, timed_rows))


def _by_row(repeats: Sequence[Repeat], records: Sequence[T]) -> dict[int, T]:
    return {id(row): record for row, record in zip(repeats, records, strict=True)}


def _with_prefill(
    cells: Sequence[Cell], repeats: Sequence[Repeat], judged: Sequence[Judged], warnings: list[str]
) -> tuple[list[Cell], dict[str, Mapping[int, Curve]]]:
    """The cells with the analysis of their prefill passes, and the passes of each; of the repeats that a
    cell's figures come from, or of the record behind its row."""
    with_passes = [cell for cell in cells if cell["workload"] == "prefill" or cell["kind"] == "reported"]
    if not with_passes:
        return [*cells], {}
    of_row = _by_row(repeats, judged)
    behind = {cell_rows.cell_identity(row): of_row[id(row)] for row in repeats}
    shown_repeats = cell_rows.shown_repeats(repeats)
    swept: dict[str, _Sweep] = {}
    campaigns = []
    for cell in with_passes:
        last = behind[cell_rows.cell_identity(cell)]
        shown = shown_repeats.get(cell["content_key"], [])
        measured = [of_row[id(row)] for row in shown if ok(row)] or [last]
        depths = analysis_prefill.by_depth([_passes(each, warnings) for each in measured])
        if not depths:
            continue
        try:
            analysed = prefill_rows.analysed(last.stored.record, depths)
        except ValueError as reason:
            _warn(warnings, ResultsError(f"{last.stored.folder}: prefill.parquet: {reason}"))
            continue
        swept[cell["name"]] = _Sweep(last.stored, depths, analysed)
        campaigns.append(cell_intervals.campaign_of(shown or [cell]))
    together = analysis_prefill.between_processes([each.found for each in swept.values()], campaigns)
    swept = {
        name: each._replace(found=analysed)
        for (name, each), analysed in zip(swept.items(), together, strict=True)
    }
    return (
        [each.cell(cell) if (each := swept.get(cell["name"])) else cell for cell in cells],
        {
            name: {depth: Curve(of.lengths, of.medians) for depth, of in each.depths.items()}
            for name, each in swept.items()
        },
    )


def _passes(judged: Judged, warnings: list[str]) -> Mapping[str, Sequence[int]]:
    """The prefill passes of a record, by column; published ones are in a file beside their figures."""
    if judged.facts["kind"] != "reported":
        return judged.timed
    return _read(records.prefill_series, judged.stored, warnings)


class _Sweep(NamedTuple):
    """The record behind a cell, the passes of all its repeats by depth, and what they give."""

    last: Stored
    depths: Mapping[int, analysis_prefill.Passes]
    found: Mapping[int, analysis_prefill.Prefill]

    def cell(self, cell: Cell) -> Cell:
        """The cell with the row of its sweep."""
        record, ceiling = self.last.record, cell["bandwidth_bytes_per_s"]
        row = prefill_rows.row(record, self.depths, self.found, ceiling)
        # Of our own records it is a reason why they are invalid; see harness/analysis/verdicts.py.
        reported = record["kind"] == "reported"
        raised = prefill_rows.faster_than_possible(record, self.depths, ceiling) if reported else []
        return {**cell, "prefill": row, "flags": [*cell["flags"], *(flag.row() for flag in raised)]}


def attributions(study: Study, warnings: list[str]) -> list[memory.Attribution]:
    """One row per cell: where its memory goes; see memory.attribution_row. None for timed rows, whose
    worker keeps copies of the context. Unreadable files are added to `warnings`."""
    rows = []
    for cell in study.cells:
        if not timed(cell) and (stored := study.behind(cell)) is not None:
            samples = _read(records.memory_series, stored, warnings)
            rows.append(memory.attribution_row(cell, stored.record, _times(stored, warnings), samples))
    return rows


def with_series(study: Study, title: str, baseline: Study | None = None) -> Study:
    """All that a report shows. `baseline`: other records, compared with cells of the same model, stack and
    variant."""
    warnings = list(study.warnings)
    curves, series = {}, {}
    for cell in study.cells:
        stored = study.behind(cell)
        if not stored:
            continue
        if cell["series_sha256"] and not cell["speculation"] and (times := _times(stored, warnings)):
            series[cell["name"]] = Curve(times.n.astype(float), times.latency_ms)
        if served_elsewhere(stored.record):  # whose samples are of its client
            continue
        if samples := _read(records.memory_series, stored, warnings):
            curves[cell["name"]] = _memory(samples)
    return replace(
        study,
        title=title,
        attributions=attributions(study, warnings),
        series=series,
        memory=curves,
        baseline=baseline_rows([*study.cells, *study.searches], baseline.cells) if baseline else {},
        warnings=[*warnings, *(baseline.warnings if baseline else [])],
    )


def _times(stored: Stored, warnings: list[str]) -> TokenTimes:
    try:
        return stored.times
    except ResultsError as damage:
        _warn(warnings, damage)
        return NO_TOKENS


def _read(
    reader: Callable[[Stored], dict[str, list[Any]]], stored: Stored, warnings: list[str]
) -> dict[str, list[Any]]:
    try:
        return reader(stored)
    except ResultsError as damage:
        _warn(warnings, damage)
        return {}


def _warn(warnings: list[str], damage: ResultsError) -> None:
    if str(damage) not in warnings:
        warnings.append(str(damage))


def _fitted(row: Repeat) -> dict[str, float | str | None]:
    """B and W by least squares through all steps, known or not."""
    if row["plain_B_ms"] is not None:
        return {"B_ms": row["plain_B_ms"], "W_tokens_per_ms": row["plain_W_tokens_per_ms"]}
    return {"B_ms": row["B_ms"], "W_tokens_per_ms": row["W_tokens_per_ms"]}


@cache
def by_size(model: str) -> list[tuple[float, str]]:
    """Sort key of a model's name by size: 0.5b, 1.8b, 14b, 110b."""
    return [(float(number or 0), word) for number, word in re.findall(r"(\d+(?:\.\d+)?)|(\D+)", model)]


def _memory(samples: Mapping[str, Sequence[Any]]) -> MemoryCurve:
    seconds = np.asarray(samples["t_ns"], dtype=float) / 1e9
    anonymous, mapped, vram = (
        np.asarray([np.nan if value is None else value for value in samples.get(key) or []], dtype=float)
        for key in ("rss_anon_bytes", "rss_file_bytes", "vram_bytes")
    )
    has_vram = len(vram) > 0 and bool(np.isfinite(vram).any())
    return MemoryCurve(seconds - seconds[0], anonymous + mapped, vram if has_vram else None)
