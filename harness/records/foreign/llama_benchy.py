"""llama-benchy's report: JSON, or its table in Markdown.

The format is defined in results.py (github.com/eugr/llama-benchy). Throughputs are means over runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.records.foreign import depths, markdown, numerals
from harness.records.foreign.log import (
    SHARED,
    Log,
    LogError,
    Reader,
    Request,
    Series,
    distinct,
    of_objects,
    of_text,
)
from harness.records.foreign.totals import SERVE

FORMAT = "llama-benchy report"
TOTALS = (
    "llama-benchy gives totals, not per-token times: no B, W or shape; --depth with "
    f"{depths.LEAST} or more depths gives points by depth; {SERVE}"
)
_TEST = re.compile(r"(?:ctx_)?(pp|tg)(\d*)(?: @ d\d+)?(?: \(c(\d+)\))?")
_NUMBER = re.compile(numerals.NUMBER)
_Object = Mapping[str, Any]


def _is_one(document: _Object) -> bool:
    benchmarks = document.get("benchmarks")
    return (
        isinstance(benchmarks, list)
        and bool(benchmarks or "latency_mode" in document)
        and all(
            isinstance(each, dict) and "tg_throughput" in each and "context_size" in each
            for each in benchmarks
        )
    )


def _read(reports: Sequence[_Object]) -> Log:
    """The benchmarks by depth; those that load a context measure its prefill."""
    found: list[tuple[str, Request]] = []
    points = []
    shared = False
    for each in (each for report in reports for each in report["benchmarks"]):
        depth, prompt, new = (each[f"{name}_size"] or 0 for name in ("context", "prompt", "response"))
        concurrency = int(each.get("concurrency") or 1)
        shared |= concurrency > 1
        first = _mean(each, "e2e_ttft") or _mean(each, "ttfr")
        rate_name = "tg_throughput" if concurrency == 1 else "tg_req_throughput"
        rate = _mean(each, rate_name)
        name = f"pp{prompt} tg{new}{f' @ d{depth}' if depth else ''}"
        name += f" c{concurrency}" if concurrency > 1 else ""
        loads = bool(each.get("is_context_prefill_phase"))
        found.append(
            (
                f"{name} (context)" if loads else name,
                Request(new or None, first, rate, prompt or None, spread=_spread(each, rate_name)),
            )
        )
        if rate and concurrency == 1 and not loads and not found[-1][1].fault:
            points.append((depths.middle(depth + prompt, new), 1e3 / rate))
    series = depths.series(points)
    return _log(found, shared, {"depths": series} if series else {})


def _mean(benchmark: _Object, name: str) -> float | None:
    value = (benchmark.get(name) or {}).get("mean")
    return None if value is None else float(value)


def _spread(benchmark: _Object, name: str) -> float | None:
    """The standard deviation between runs, as a share of their mean."""
    mean, deviation = (float((benchmark.get(name) or {}).get(key) or 0) for key in ("mean", "std"))
    return deviation / mean if mean and deviation else None


def _rows(text: str) -> list[dict[str, str]]:
    rows = markdown.rows(text) if "ttfr (ms)" in text else ()
    return [row for row in rows if {"model", "test", "ttfr (ms)"} <= row.keys()]


def _read_table(text: str) -> Log:
    """The rows of its table: of a prompt or of generation, with (c2) for two requests at once."""
    found, shared = [], False
    rows = _rows(text)
    columns = ("e2e_ttft (ms)", "t/s", "t/s (req)")
    printed = (_NUMBER.search(row.get(name, "")) for row in rows for name in columns)
    decimal = numerals.mark(number[0] for number in printed if number)
    for row in rows:
        test = _TEST.fullmatch(row["test"])
        if test is None:
            raise LogError(f"the {FORMAT} has the test {row['test']!r}, which is not known")
        tokens, several = int(test[2]) if test[2] else None, int(test[3] or 1) > 1
        shared |= several
        if test[1] == "pp":
            request = Request(None, _cell(row, "e2e_ttft (ms)", decimal), None, tokens)
        else:
            column = "t/s (req)" if "t/s (req)" in row or several else "t/s"
            rate = _cell(row, column, decimal)
            deviation = numerals.mean(row[column], decimal)[1] if rate else None
            request = Request(tokens, None, rate, spread=deviation and rate and deviation / rate)
        found.append((f"{row['model']} {row['test']}", request))
    return _log(found, shared, {})


def _log(found: Sequence[tuple[str, Request]], shared: bool, series: dict[str, Series]) -> Log:
    names = distinct([name for name, _ in found])
    requests = dict(zip(names, (request for _, request in found), strict=True))
    return Log(FORMAT, series, requests, [*([SHARED] if shared else []), TOTALS])


def _cell(row: Mapping[str, str], name: str, decimal: str | None) -> float | None:
    number = _NUMBER.search(row.get(name, ""))
    return numerals.value(number[0], decimal) if number else None


READERS: tuple[Reader, ...] = (
    of_objects(FORMAT, _is_one, _read),
    of_text(FORMAT, _rows, _read_table),
)
