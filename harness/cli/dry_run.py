"""Forecast of a run, from the config alone. Needs no environment and no weights."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from harness import machine, records
from harness.analysis import traffic
from harness.base.text import duration, list_named, plural
from harness.campaign import device_lock, forecast, other_processes, weights_reference
from harness.campaign.forecast import Forecast
from harness.campaign.quality import RANDOM
from harness.campaign.weight_files import WeightFiles
from harness.cli import NOT_OK, OK, say
from harness.config import Experiment
from harness.config.plan import Cell
from harness.machine.cpu_times import BUSY_SHARE
from harness.records import ResultsError
from harness.report.text_table import NONE, Table, wrapped
from harness.stacks import adopted, build
from harness.stacks.adopted import EnvironmentFailed
from harness.stacks.header import Header
from harness.theory import split_weights

Timed = tuple[float, float, int]
"""Seconds of one repeat, seconds of its longest warm-up, and the repeats."""
NOT_OK_AS = ("will_be_refused", "will_fail", "will_not_fit")  # a cell counts as the first that holds
# Of a GPU's data sheet, in prompts of the published study: 0.2 to 0.5 (harness/recommend/terms.py).
GPU_MFU = 0.3
PPL_ALONE = "perplexity alone: no 16-bit weights"
PPL_AND_KLD = {
    True: "perplexity and KLD",
    False: PPL_ALONE,
    None: "perplexity, and KLD if its 16-bit weights can be fetched",
}
LATEST = 20  # newest records searched for a bandwidth probe; all records of a run have one, or none has


MEASURED_NOW = "measured now"
CELLS_SHOWN = 24  # of several models, more are summed up by model
CELLS_NAMED = 3  # that have a problem


def show(
    experiment: Experiment,
    forecasts: Sequence[Forecast],
    root: Path,
    as_json: bool,
    has_reference: bool = False,
    fewest: int | None = None,
    wide: bool = False,
) -> int:
    """Print a table and the totals, or one array; names a missing device once. NOT_OK if a cell would fail,
    be refused or not fit. `root`: the results folder. `has_reference`: scores are compared with a given
    reference. `fewest`: rounds after which a campaign of two sides may end, of as many as the protocol has
    repeats. `wide`: a line for each cell, with all columns, though there are many."""
    here = Here(experiment, root, has_reference)
    if absent := here.device.absent:
        name, has = here.device.name, here.device.memory_bytes
        planned = f"; the forecast is for {name} with {has / 1e9:.1f} GB" if has else ""
        say(f"{absent}{planned}")
    rows = [here.row(each, experiment.protocol.repeats, bool(fewest)) for each in forecasts]
    lines = [each.line for each in rows]
    # A bandwidth measured now has the load in it.
    unchanged = as_json or not here.bandwidth or here.bandwidth_source == MEASURED_NOW
    slower, busy = (1.0, "") if unchanged else _slower()
    if as_json:
        print(json.dumps(lines, indent=1))
    else:
        rows = [replace(each, slower=slower) for each in rows]
        by_model = len(_models(rows)) > 1 and len(rows) > CELLS_SHOWN and not wide
        table = _models_table(rows) if by_model else _cells_table(rows, fewest)
        table.show(wide)
        for note in _problems(rows):
            print(wrapped(note))
        if by_model:
            print(f"a line for each of the {len(rows)} cells: --wide")
    timed = [each.timed for each in rows if each.timed]
    takes = f", {duration_of(timed, experiment)}" if timed else ""
    if timed and fewest:
        least = [(one_s, warm_up_s, min(fewest, times)) for one_s, warm_up_s, times in timed]
        takes = f", at least {duration_of(least, experiment)}, at most {duration_of(timed, experiment)}"
    if timed and here.bandwidth:
        takes += f", at {here.bandwidth / 1e9:.1f} GB/s of memory bandwidth, {here.bandwidth_source}{busy}"
    bounded = [each for each in rows if each.least_s is not None and each.able]
    if bounded and here.device.bytes_per_s:
        seconds = sum((each.one_s or 0) * each.times for each in bounded)
        takes += (
            f", at least {duration(seconds)} for {plural(sum(each.times for each in bounded), 'repeat')} of"
            f" those that can run, at the {here.device.bytes_per_s / 1e9:,.0f} GB/s of the data sheet"
        )
    if any(each.one_s is None for each in rows) and here.waits and not here.bandwidth:
        takes += ", time unknown: another campaign is measuring here, and nothing was measured before"
    takes += "".join(f"; {words}" for words in here.files.to_write())
    if not has_reference and any(line["figures"] not in (None, PPL_ALONE) for line in lines):
        say("the reference of each model is computed once more, unless it is kept or given (--reference)")
    for interpreter in dict.fromkeys(line["interpreter"] for line in lines if line["interpreter"]):
        say(interpreter)
    say(f"{plural(len(lines), 'cell')}{takes}")
    not_ok = Counter(each.verdict for each in rows if not each.able)
    if not not_ok:
        return OK
    why = ", ".join(f"{count} {what}" for what, count in not_ok.items())
    say(f"of {plural(len(lines), 'cell')}, {why} (exit code 1)")
    return NOT_OK


@dataclass(frozen=True)
class Row:
    """The forecast of a cell. `line`: its figures, as JSON has them. `times`: its repeats. `least_s`: seconds
    of one repeat, at least, where `line` has no estimate; None if unknown. `problems`: why it cannot run.
    `slower`: by how much the load of the machine lengthens it."""

    cell: Cell
    line: dict[str, Any]
    times: int
    least_s: float | None
    problems: Sequence[str]
    slower: float = 1.0

    @property
    def verdict(self) -> str:
        """`will fail`, `will be refused` or `will not fit`; empty: it can run."""
        return next((key.replace("_", " ") for key in NOT_OK_AS if self.line[key]), "")

    @property
    def able(self) -> bool:
        return not self.verdict

    @property
    def one_s(self) -> float | None:
        """Seconds of one repeat, without warm-up: an estimate, or at least so long; None if unknown."""
        return self.least_s if self.line["seconds"] is None else self.slower * self.line["seconds"]

    @property
    def timed(self) -> Timed | None:
        """Its part of the estimate of a run; None: unknown, or it cannot run."""
        if self.line["seconds"] is None or not self.able:
            return None
        return self.slower * self.line["seconds"], self.slower * self.line["warm_up_seconds"], self.times

    def in_time(self, seconds: float | None) -> str:
        """Seconds of repeats in words."""
        if seconds is None or not self.able:
            return NONE
        return f"{'at least' if self.line['seconds'] is None else 'about'} {duration(seconds)}"


def _cells_table(rows: Sequence[Row], fewest: int | None) -> Table:
    """A line for each cell, below its model if there are several."""
    headings = ["cell", "", "memory", "on the CPU", "to write", "time", "warm-up", "filling"]
    headings += ["tok/s at most", "scores", "weights"]
    lines: list[list[str]] = []
    marked: list[str] = []
    models, names = _models(rows), _names(rows)
    for model in models:
        if len(models) > 1:
            lines.append([model, *[""] * (len(headings) - 1)])
            marked.append("")
        for row, name in zip(rows, names, strict=True):
            if row.cell.model.name == model:
                lines.append([name, *_figures(row, fewest)])
                marked.append("" if row.able else "yellow")
    return Table(headings, lines, marked=marked)


def _figures(row: Row, fewest: int | None) -> list[str]:
    """The columns of a cell besides its name."""
    line, time = row.line, row.in_time(row.one_s)
    warm_up, filling = (row.slower * (line[key] or 0.0) for key in ("warm_up_seconds", "fill_seconds"))
    ceiling = line["most_tokens_per_s"]
    return [
        row.verdict,
        *(_gb(line[key]) for key in ("memory_bytes", "host_memory_bytes", "disk_bytes")),
        time if time == NONE else f"{time} x {f'{fewest} to ' if fewest else ''}{row.times}",
        f"up to {duration(warm_up)} each" if warm_up and row.able else NONE,
        duration(filling) if filling and row.able else NONE,
        NONE if ceiling is None else f"{ceiling:.3g}",
        line["figures"] or "",
        line["weights"],
    ]


def _names(rows: Sequence[Row]) -> list[str]:
    """The ids of the cells without their digests where these tell none apart, and without the model's name
    if there are several models."""
    short = [each.cell.id.rpartition(".")[0] for each in rows]
    if len(set(short)) < len(short):
        short = [each.cell.id for each in rows]
    if len(_models(rows)) == 1:
        return short
    return [name.removeprefix(f"{row.cell.model.name}.") for name, row in zip(short, rows, strict=True)]


def _models_table(rows: Sequence[Row]) -> Table:
    """A line for each model, and the sums."""
    lines = []
    groups = [(name, [each for each in rows if each.cell.model.name == name]) for name in _models(rows)]
    for name, group in [*groups, ("all", rows)]:
        needs = [size for each in group if (size := each.line["memory_bytes"]) is not None]
        ends = dict.fromkeys(f"{size / 1e9:,.1f}" for size in (min(needs), max(needs))) if needs else ()
        known = [(each, each.one_s * each.times) for each in group if each.able and each.one_s is not None]
        sizes = [size for each in group if (size := each.line["disk_bytes"]) is not None]
        lines.append(
            [
                name,
                str(len(group)),
                str(sum(each.able for each in group)),
                f"{' to '.join(ends)} GB" if ends else NONE,
                _gb(sum(sizes)) if sizes else NONE,
                known[0][0].in_time(sum(seconds for _, seconds in known)) if known else NONE,
            ]
        )
    return Table(["model", "cells", "can run", "memory", "to write", "time"], lines)


def _models(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(each.cell.model.name for each in rows))


def _problems(rows: Sequence[Row]) -> list[str]:
    """Each reason once, with the cells that it is for, where it is not for all."""
    names: dict[str, list[str]] = {}
    several = len(_models(rows)) > 1
    for row, name in zip(rows, _names(rows), strict=True):
        model = f"{row.cell.model.name} " * several
        for reason in row.problems:
            names.setdefault(reason, []).append(f"{model}{name}")
    return [
        reason if len(cells) == len(rows) else f"{reason} ({list_named(cells, CELLS_NAMED)})"
        for reason, cells in names.items()
    ]


def _gb(size: float | None) -> str:
    """`2.3 GB`"""
    return NONE if size is None else "nothing" if size == 0 else f"{size / 1e9:,.1f} GB"


def estimate(experiment: Experiment, forecasts: Sequence[Forecast], root: Path) -> str | None:
    """Estimated time of a run of these cells, in one sentence; None if unknown. Measured cells count too.

    Runs no bandwidth probe, as the campaign does that anyway: uses the latest one in the records below
    `root`, or the data sheet of the board.
    """
    family = experiment.device.partition(":")[0]
    if family != "cpu" or (known := _known_bandwidth(root / machine.facts()["slug"])) is None:
        return None
    bandwidth, source = known
    slower, busy = _slower()
    timed: list[Timed] = []
    for each in forecasts:
        takes_s, _ = each.duration(bandwidth)
        if takes_s is not None and not each.failures:
            warm_up_s = each.longest_warm_up_s(experiment.protocol.warmup, bandwidth)
            times = each.cell.workload.repeated(experiment.protocol.repeats)
            timed.append((slower * takes_s, slower * warm_up_s, times))
    if not timed:
        return None
    at = f"at {bandwidth / 1e9:.1f} GB/s of memory bandwidth, {source}{busy}"
    others = "kept repeats save time; preparation, and repeats of what others disturb, add to it"
    return f"{duration_of(timed, experiment)}, {at}; {others}"


def scoring_estimate(experiment: Experiment, cells: Sequence[Cell], root: Path) -> str | None:
    """Estimated time of scoring these cells, in one sentence; None if unknown. Measures what this CPU reads
    and computes (about 2 s), unless another campaign is measuring."""
    here = Here(experiment, root, has_reference=False)
    rows = [here.row(each, 1, by_rounds=False) for each in forecast.forecasts(experiment, cells)]
    timed = [row.timed[0] for row in rows if row.timed]
    if not timed:
        return None
    takes = f"about {duration(sum(timed))} for {plural(len(timed), 'score')}"
    if any(row.line["figures"] != PPL_ALONE for row in rows):
        takes += ", and as long once more for a reference that is not kept"
    return f"{takes}; kept scores save time"


def _slower() -> tuple[float, str]:
    """By how much the load of this machine lengthens a run, about, and why, in a clause: each other process
    takes as much of a CPU as ours. A run waits for another campaign, so its load does not count."""
    share = 0.0 if device_lock.is_busy("cpu") else other_processes.busy_now() or 0.0
    if share <= BUSY_SHARE:
        return 1.0, ""
    return 1 + share, f", {share:.0%} longer because others use as much of the CPUs"


def duration_of(timed: Sequence[Timed], experiment: Experiment) -> str:
    """The time of all repeats, in words."""
    cooling = experiment.protocol.cool_down
    count = sum(repeats for *_, repeats in timed)
    total = sum(seconds * repeats for seconds, _, repeats in timed)
    longest = {
        "warm up": sum(warm_up_s * repeats for _, warm_up_s, repeats in timed),
        "cool down": count * cooling.at_most_s if cooling else 0.0,
    }
    waits = [f"up to {duration(most_s)} to {what}" for what, most_s in longest.items() if most_s]
    return " and ".join([f"about {duration(total)} for {plural(count, 'repeat')}", *waits])


def _known_bandwidth(results_here: Path) -> tuple[float, str] | None:
    """Read bandwidth of this machine in bytes/s, and its source; None if unknown."""
    # Folder names are start times of repeats.
    newest = sorted(results_here.glob("*/*/*/record.json"), key=lambda each: each.parent.name)[-LATEST:]
    for path in reversed(newest):
        with contextlib.suppress(ResultsError):
            record = records.read(path)
            seen = traffic.ceiling_bytes_per_s([record])
            if seen is not None and record.get("device") == "cpu":
                return seen, "measured here before"
    board = traffic.board(machine.facts()["cpu"])
    return (board.bandwidth_bytes_per_s, f"as specified for a {board.name}") if board else None


def _interpreter(header: Header, family: str) -> str | None:
    """The interpreter that a stack would use, in words; None where it has none for this device."""
    environment = header.environment_for(family)
    if environment is None:
        return None
    try:
        adopted.find(environment)
    except EnvironmentFailed as failure:
        return str(failure)
    found = build.find(environment)
    return f"{environment.title}: {f'{found.words}, {found.python}' if found else 'will be built'}"


class Here:
    """This machine: the device, its bandwidth, and the files of its weights."""

    def __init__(self, experiment: Experiment, root: Path, has_reference: bool) -> None:
        self._has_reference = has_reference
        self.device = forecast.device_of(experiment)
        self._warmup = experiment.protocol.warmup
        self._threads = experiment.protocol.threads or machine.default_threads()
        self.files = WeightFiles(self.device.family, self._threads, not self.device.absent)
        self.bandwidth: float | None = None
        # A probe would disturb the measurements of another campaign.
        self.waits = self.device.family == "cpu" and device_lock.is_busy("cpu")
        if self.waits and (known := _known_bandwidth(root / machine.facts()["slug"])):
            self.bandwidth, self.bandwidth_source = known
        elif self.device.family == "cpu" and not self.waits:
            self.bandwidth_source = MEASURED_NOW
            with contextlib.suppress(machine.ProbeError):  # without a probe there is no time estimate
                self.bandwidth = machine.read_bandwidth(self._threads)["read_bytes_per_s"]

    @cached_property
    def _flops(self) -> float | None:
        """FLOP/s of the CPU; None where it cannot be measured now."""
        if self.bandwidth is not None and not self.waits:
            with contextlib.suppress(machine.ProbeError):
                return machine.matrix_rate(self._threads)["flops_per_s"]
        return None

    @cached_property
    def _cpu_bandwidth(self) -> float | None:
        """The read bandwidth of this machine's CPU; None where it could not be measured."""
        with contextlib.suppress(machine.ProbeError):
            return float(machine.read_bandwidth(self._threads)["read_bytes_per_s"])
        return None

    def _rates(self, cell: Cell) -> tuple[float | None, float | None]:
        """Bytes/s and FLOP/s for the time of a cell; None where it is not estimated."""
        if cell.scores and self.device.family != "cpu":
            return self.device.bytes_per_s, self.device.flops and GPU_MFU * self.device.flops
        return self.bandwidth, self._flops if cell.workload.timed == "rows" or cell.scores else None

    def row(self, found: Forecast, repeats: int, by_rounds: bool) -> Row:
        """The forecast of a cell. `repeats`: of the protocol; `by_rounds`: each round is one of them."""
        cell, device, source, sides = found.cell, self.device, self.files.of(found), found.sides
        refused = [each.reason for each in found.broken if each.refuses]
        refused += [each for each in (found.over_budget, found.too_deep) if each] + source.refused
        if cell.scores and cell.source and cell.source.kind == "synthetic":
            refused.append(RANDOM)
        fails = [each.reason for each in found.broken if not each.refuses] + source.lacks
        fails = list(dict.fromkeys(reason for reason in (*fails, source.no_space) if reason))
        problems = [f"will be refused: {reason}" for reason in refused]
        problems += [f"will fail: {reason}" for reason in fails]
        problems += [found.no_room] if found.no_room and not found.too_deep else []
        ceiling, notes = None, [*problems]
        if sides:
            gpu, cpu = device.bytes_per_s, self._cpu_bandwidth
            ceiling = 1 / split_weights.step_s(sides, cpu, gpu) if gpu and cpu else None
            gb = f"{sides.gpu_bytes / 1e9:.1f} GB on the GPU, {sides.cpu_bytes / 1e9:.1f} GB on the CPU"
            at_most = f"; at most {ceiling:.3g} tok/s with this CPU" if ceiling else ""
            notes.insert(len(refused), f"weights: {gb}{at_most}")
        figures = None
        if cell.scores:
            has_reference = True if self._has_reference else weights_reference.expected(cell)
            figures = PPL_AND_KLD[has_reference]
        bytes_per_s, flops = self._rates(cell)
        takes_s, fill_s = found.duration(bytes_per_s, flops)
        warm_up_s, least_s = 0.0, None
        if takes_s is not None and bytes_per_s:
            warm_up_s = found.longest_warm_up_s(self._warmup, bytes_per_s)
        elif takes_s is None and device.bytes_per_s:
            least_s, _ = found.duration(device.bytes_per_s, device.flops)
        line = {
            "cell": cell.id,
            "weights": source.words,
            "disk_bytes": source.disk_bytes,
            "memory_bytes": found.memory_bytes,
            "host_memory_bytes": found.host_bytes,
            "weights_on_gpu_bytes": sides and sides.gpu_bytes,
            "weights_on_cpu_bytes": sides and sides.cpu_bytes,
            "most_tokens_per_s": ceiling,
            "seconds": takes_s,
            "warm_up_seconds": warm_up_s,
            "fill_seconds": fill_s,
            "figures": figures,
            "will_fail": fails,
            "will_be_refused": refused,
            "will_not_fit": None if found.fits is None else not found.fits,
            "unavailable": device.absent,
            "interpreter": None if device.absent else _interpreter(cell.header, device.family),
            "note": "; ".join(notes) or None,
        }
        times = repeats if by_rounds else cell.workload.repeated(repeats)
        return Row(cell, line, times, least_s, problems)
