"""optimum-benchmark's benchmark_report.json, or a benchmark.json with its config: per-token latencies.

The format is defined in optimum_benchmark/scenarios/inference (github.com/huggingface/optimum-benchmark).
`per_token.latency.values` has the events of all runs. Events are not cleared between runs: after R runs the
list holds run 1, then runs 1 and 2, and so on to runs 1 to R, so most values are copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.records.foreign import units
from harness.records.foreign.log import Floats, Log, LogError, Reader, Request, Series, of_objects

FORMAT = "optimum-benchmark report"
COPIES = (
    "per_token repeats the latencies of earlier runs ({:,} values, {:,} measured): each run is shown once"
)
TOTALS = (
    "a report without per_token latencies has means of whole runs: no B, W or shape; run text-generation "
    "with the pytorch backend, which reports per_token"
)
_Report = Mapping[str, Any]


def _is_one(document: _Report) -> bool:
    report = _report(document)
    return "load_model" in report and bool({"prefill", "decode", "per_token"} & report.keys())


def _report(document: _Report) -> _Report:
    inner = document.get("report")
    return inner if isinstance(inner, dict) else document


def _read(documents: Sequence[_Report]) -> Log:
    """The runs of each report. Raises LogError."""
    series: dict[str, Series] = {}
    requests: dict[str, Request] = {}
    notes: dict[str, None] = {}
    for number, document in enumerate(documents, 1):
        prefix = f"report {number} " if len(documents) > 1 else ""
        report = _report(document)
        prefill, steps = _ms(report, "prefill"), _ms(report, "per_token")
        runs = len(_ms(report, "decode")) or len(prefill)
        if not len(steps) or not runs:
            first = float(np.mean(prefill)) if len(prefill) else None
            requests[f"{prefix}mean"] = Request(None, first, _rate(report))
            notes[TOTALS] = None
            continue
        measured = _measured(steps, runs)
        if len(measured) < len(steps):
            notes[COPIES.format(len(steps), len(measured))] = None
        if len(measured) % runs:
            raise LogError(f"an {FORMAT} whose {len(steps)} per-token latencies are not of {runs} equal runs")
        prompt = _prompt_tokens(document)
        for run, latencies in enumerate(measured.reshape(runs, -1)):
            first = float(prefill[run]) if len(prefill) == runs else np.nan
            n = prompt + 1 + np.arange(len(latencies) + 1, dtype=float)
            series[f"{prefix}run {run + 1}"] = Series(n, np.concatenate([[first], latencies]))
    return Log(FORMAT, series, requests, [*notes])


def _measured(steps: Floats, runs: int) -> Floats:
    """The latencies without the copies: of growing prefixes the last, which has all runs."""
    tokens, rest = divmod(len(steps), runs * (runs + 1) // 2)
    if rest or runs == 1:
        return steps
    last = steps[-runs * tokens :]
    prefixes = np.concatenate([last[: run * tokens] for run in range(1, runs + 1)])
    return last if np.array_equal(prefixes, steps) else steps


def _ms(report: _Report, part: str) -> Floats:
    """The latencies of a part; none where it has none."""
    latency = (report.get(part) or {}).get("latency") or {}
    scale = units.MS[units.NAMES[latency.get("unit", "s")]]
    return np.asarray(latency.get("values") or [], dtype=float) * scale


def _rate(report: _Report) -> float | None:
    rate = ((report.get("decode") or {}).get("throughput") or {}).get("value")
    return None if rate is None else float(rate)


def _prompt_tokens(document: _Report) -> int:
    """The prompt's tokens in a report with its config; 0: unknown."""
    scenario = (document.get("config") or {}).get("scenario") or {}
    return int((scenario.get("input_shapes") or {}).get("sequence_length") or 0)


READERS: tuple[Reader, ...] = (of_objects(FORMAT, _is_one, _read),)
