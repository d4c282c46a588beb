"""Records and their files -> a Study: analysed rows, curves to draw, and warnings for unreadable files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from harness import results
from harness.analysis.records import agreement, attribution, known, quality, searches, traffic
from harness.analysis.records import prefill as prefills
from harness.analysis.rows import Attribution, Cell, Check, Repeat, Score, Search
from harness.analysis.series import budget
from harness.dataset import cells, names, rows
from harness.dataset.baseline_match import baseline_rows
from harness.dataset.study import Curve, Floats, MemoryCurve, Study, ok, timed
from harness.results import NO_TOKENS, ResultsError, Stored, TokenTimes
from harness.results.kinds import Record, loaded_of
from harness.system.endings import FAULTS
from harness.system.wording import plural


class Gathered:
    """All rows of some records, one per repeat, and their series; each file is read once. `fitted`: B and W
    of each repeat as bundles of every version claim them.

    Records that cannot be analysed are left out, with a warning each."""

    def __init__(self, stored: Sequence[Stored]) -> None:
        self.warnings: list[str] = []
        try:
            self._gather(stored)
        except FAULTS:  # one record must not end the analysis of all: find it
            usable = [each for each in stored if self._is_usable(each)]
            if len(usable) == len(stored):
                raise
            self._gather(usable)

    def _is_usable(self, each: Stored) -> bool:
        try:
            Gathered([])._gather([each])
        except FAULTS as fault:
            self._warn(ResultsError(f"{each.folder}: left out, cannot be analysed: {fault!r}"))
            return False
        return True

    def _gather(self, stored: Sequence[Stored]) -> None:
        by_size = sorted(stored, key=lambda each: _by_size(str(each.record["model"]["name"])))
        self._ran = [each for each in by_size if each.record["kind"] not in ("checked", "scored")]
        self.stored = [each for each in self._ran if each.record["kind"] != "searched"]
        searched = [searches.row(each.record) for each in by_size if each.record["kind"] == "searched"]
        self.searches: list[Search] = names.named(searches.latest(searched))
        checked = [agreement.row(each.record) for each in by_size if each.record["kind"] == "checked"]
        self.checks: list[Check] = names.named(agreement.latest(checked))
        scored = [quality.row(each.record) for each in by_size if each.record["kind"] == "scored"]
        self.scores: list[Score] = names.named(searches.latest(scored))
        self.curves: dict[str, Curve] = {}
        tables: dict[tuple[str, int, str], dict[str, list[int]]] = {}
        ceilings = _ceilings(self.stored)
        self.repeats: list[Repeat] = []
        for each in self.stored:
            times, table = self._times(each), self._read(results.table, each)
            path = str(each.series_path) if times else None
            ceiling = ceilings.get(each.record["campaign"]["id"])
            self.repeats.append(row := rows.row(each.record, times, path, ceiling, table))
            if table:
                tables[cells.identity(row)] = table
            if path:
                self.curves[path] = Curve(times.n.astype(float), times.ms)
        nothing = Curve(np.empty(0), np.empty(0))
        rows.flag_identical_series(
            self.repeats, [self.curves.get(str(r["series"]), nothing).ms for r in self.repeats]
        )
        of_stack: dict[tuple[str, str], list[Repeat]] = {}
        for row in self.repeats:
            of_stack.setdefault((row["model"], row["stack"]), []).append(row)
        for alike in of_stack.values():
            rows.flag_kernel_changes(alike)
        rows.drop_intervals(self.repeats)
        agreement.apply_checks(self.repeats, self.checks)
        quality.apply(self.repeats, self.scores)
        self.cells: list[Cell] = names.named(budget.split_time(cells.per_cell(self.repeats, tables)))
        self.fitted = [_fitted(row) for row in self.repeats]
        for row in self.repeats:  # cells pool what a repeat alone does not know
            known.withhold(row)

    @cached_property
    def swept(self) -> list[Cell]:
        """The cells, each with the analysis of its prefill passes, which takes a while."""
        return [self._with_prefill(cell) for cell in self.cells]

    @cached_property
    def memory(self) -> list[Attribution]:
        """One row per cell: where its memory goes; see analysis.records.attribution. None for timed rows,
        whose worker keeps copies of the context."""
        found = []
        for cell in self.cells:
            if not timed(cell) and (each := self.behind(cell)) is not None:
                samples = self._read(results.memory_series, each)
                found.append(attribution.row(cell, each.record, self._times(each), samples))
        return found

    def study(self, title: str, baseline: Gathered | None = None) -> Study:
        """The Study of these records. `baseline`: other records, compared with cells of the same model, stack
        and variant."""
        drawn = {cell["name"]: self.behind(cell) for cell in self.cells}
        memory, prefill = {}, {}
        for name, each in drawn.items():
            if each is None:
                continue
            if samples := self._read(results.memory_series, each):
                memory[name] = _memory(samples)
        for cell in self.cells:
            if depths := self._passes.get(cell["content_key"]):
                prefill[cell["name"]] = {depth: _medians(n, ms) for depth, (n, ms, _) in depths.items()}
        return Study(
            title=title,
            cells=self.swept,
            repeats=self.repeats,
            checks=self.checks,
            searches=self.searches,
            scores=self.scores,
            attributions=self.memory,
            series={
                c["name"]: self.curves[str(c["series"])] for c in self.cells if c["series"] in self.curves
            },
            memory=memory,
            prefill=prefill,
            baseline=baseline_rows([*self.cells, *self.searches], baseline.cells) if baseline else {},
            machines=list({r.record["machine"]["slug"]: r.record["machine"] for r in self._ran}.values()),
            methods=_attention(self.cells) | _methods(self._ran),
            warnings=[*self.warnings, *(baseline.warnings if baseline else [])],
        )

    @cached_property
    def _passes(self) -> dict[str, prefills.Passes]:
        """By content key of a cell: the prefill passes of its ok repeats, or of the record behind its row."""
        of: dict[str, list[Stored]] = {}
        for row, each in zip(self.repeats, self.stored, strict=True):
            if ok(row):
                of.setdefault(row["content_key"], []).append(each)
        found = {}
        for cell in self.cells:
            last = self.behind(cell)
            shown = of.get(cell["content_key"]) or ([last] if last else [])
            read = [self._read(results.prefill_series, each) for each in shown]
            found[cell["content_key"]] = prefills.by_depth([columns for columns in read if columns])
        return found

    def _with_prefill(self, cell: Cell) -> Cell:
        each, depths = self.behind(cell), self._passes.get(cell["content_key"])
        if not depths or each is None:
            return cell
        ceiling = cell["bandwidth_bytes_per_s"]
        try:
            found = prefills.row(each.record, depths, ceiling)
        except ValueError as reason:
            self._warn(ResultsError(f"{each.folder}: prefill.parquet: {reason}"))
            return cell
        # Of our own records it is a reason why they are invalid; see records.verdicts.
        reported = each.record["kind"] == "reported"
        raised = prefills.faster_than_possible(each.record, depths, ceiling) if reported else []
        return {**cell, "prefill": found, "flags": [*cell["flags"], *(flag.row() for flag in raised)]}

    def behind(self, cell: Cell) -> Stored | None:
        """The record behind a cell's row."""
        return self._by_row.get(cells.identity(cell))

    @cached_property
    def _by_row(self) -> dict[tuple[str, int, str], Stored]:
        return {cells.identity(row): each for row, each in zip(self.repeats, self.stored, strict=True)}

    def _times(self, each: Stored) -> TokenTimes:
        try:
            return each.times
        except ResultsError as damage:
            self._warn(damage)
            return NO_TOKENS

    def _read(self, reader: Callable[[Stored], dict[str, list[Any]]], each: Stored) -> dict[str, list[Any]]:
        try:
            return reader(each)
        except ResultsError as damage:
            self._warn(damage)
            return {}

    def _warn(self, damage: ResultsError) -> None:
        if str(damage) not in self.warnings:
            self.warnings.append(str(damage))


def _fitted(row: Repeat) -> dict[str, float | None]:
    """B and W by least squares through all steps, known or not."""
    if row["plain_B_ms"] is not None:
        return {"B_ms": row["plain_B_ms"], "W_tokens_per_ms": row["plain_W_tokens_per_ms"]}
    return {"B_ms": row["B_ms"], "W_tokens_per_ms": row["W_tokens_per_ms"]}


def _by_size(model: str) -> list[tuple[float, str]]:
    """Sort key of a model's name by size: 0.5b, 1.8b, 14b, 110b."""
    return [(float(number or 0), word) for number, word in re.findall(r"(\d+(?:\.\d+)?)|(\D+)", model)]


def _ceilings(stored: Sequence[Stored]) -> dict[str, float | None]:
    """By campaign: the best bandwidth measured in it."""
    campaigns: dict[str, list[Record]] = {}
    for each in stored:
        campaigns.setdefault(each.record["campaign"]["id"], []).append(each.record)
    return {key: traffic.ceiling_bytes_per_s(found) for key, found in campaigns.items()}


def _medians(n: Floats, ms: Floats) -> Curve:
    lengths = np.unique(n)
    return Curve(lengths, np.array([np.median(ms[n == length]) for length in lengths]))


def _memory(samples: Mapping[str, Sequence[Any]]) -> MemoryCurve:
    seconds = np.asarray(samples["t_ns"], dtype=float) / 1e9
    anonymous, mapped, vram = (
        np.asarray([np.nan if value is None else value for value in samples.get(key) or []], dtype=float)
        for key in ("rss_anon_bytes", "rss_file_bytes", "vram_bytes")
    )
    has_vram = len(vram) > 0 and bool(np.isfinite(vram).any())
    return MemoryCurve(seconds - seconds[0], anonymous + mapped, vram if has_vram else None)


def _attention(cells: Sequence[Cell]) -> dict[str, object]:
    """Cost of context per stack, across its models: a fixed cost, and the bandwidth of KV cache reads."""
    lines = []
    for found in budget.budgets(cells):
        if found.of == "W" and found.bytes_per_s:
            fixed = (
                f"{found.fixed_ms * 1e6:.0f} ns per token of context"
                if found.fixed_ms > 0
                else "no fixed cost"
            )
            rate = f"{found.bytes_per_s / 1e9:,.0f} GB/s of KV cache"
            if found.bytes_per_s > (sheet := _data_sheet(cells, found.group)):
                rate += f", above the {sheet / 1e9:,.0f} of the data sheet: the models' slopes do not fix it"
            lines.append(f"{', '.join(found.group)}: {fixed}, and {rate} ({plural(found.cells, 'cell')}).")
    return {"Cost of context": lines} if lines else {}


def _data_sheet(cells: Sequence[Cell], place: tuple[str | None, ...]) -> float:
    """Bandwidth of the data sheet of a stack, machine and device, bytes/s; infinite where unknown."""
    known = (
        W * 1e3 * kv
        for row in cells
        if (row["stack"], row["machine"], row["device"]) == place
        and (W := row["W_theory_tokens_per_ms"])
        and (kv := row["kv_bytes_per_token"]) is not None
    )
    return max(known, default=float("inf"))


def _methods(stored: Sequence[Stored]) -> dict[str, object]:
    """How the records were measured, and the commands that repeat it; differing values are all listed."""

    def distinct(values: Sequence[object]) -> list[object]:
        return list({str(value): value for value in values if value}.values())

    records = [each.record for each in stored]
    ours = [record for record in records if record["kind"] != "reported"]
    loaded = [record for record in ours if record["kind"] == "measured" or record.get("loaded")]
    probed: dict[str, list[float]] = {}
    for record in ours:
        probed.setdefault(record["machine"]["slug"], []).extend(traffic.probed_bytes_per_s([record]))
    methods: dict[str, object] = {
        "Sources": distinct([_source(record) for record in records if record.get("source")]),
        "Protocol": distinct([record.get("protocol") for record in ours]),
        "Stacks": distinct([_versions(record) for record in loaded]),
        "Read bandwidth": [f"{slug}: {traffic.spread(rates)}" for slug, rates in probed.items() if rates],
        "Harness": distinct([record.get("harness") for record in ours]),
        "To repeat it": distinct([" ".join(r["campaign"].get("command_line") or []) for r in ours]),
    }
    return {heading: content for heading, content in methods.items() if content}


def _source(record: Record) -> str:
    source = record["source"]
    return f"{source['title']}, {source['url']}, {source['license']}"


def _versions(record: Record) -> str | None:
    versions = loaded_of(record).get("versions")
    listed = (
        ", ".join(f"{name} {version}" for name, version in versions.items()) if versions else "not loaded"
    )
    adopted = (record.get("environment") or {}).get("adopted") or {}
    pins = "; not pinned" if adopted.get("pins_not_met") else ""
    return f"{record['stack']}: {listed}{pins}"
