"""llama-bench's results as JSON, JSONL, CSV, Markdown and SQL, and `harness report --export llama-bench`.

Each row is a test: `pp512` evaluates a prompt of 512 tokens, `tg128` generates 128, `@ d4096` behind 4,096
others. Figures are means over repetitions. The fields are those of `struct test` in
tools/llama-bench/llama-bench.cpp (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.records.foreign import depths, markdown, numerals
from harness.records.foreign.log import Log, LogError, Reader, Request, distinct, of_objects, of_text

FORMAT = "llama-bench result"
AVERAGES = (
    "llama-bench gives averages of whole tests, not per-token times; `-d 0,4096,8192` gives points by depth, "
    'and llama-server with "timings_per_token": true every token'
)
DEPTHS = (
    "tests at several depths are also a series: a point is the mean of a test, at the middle of its tokens"
)
UNKNOWN = f"a {FORMAT} without n_prompt and n_gen: whether its t/s are of prompts or of generation is unknown"
BOTH = "tests of prompt and generation together (pp+tg) are left out: their t/s is neither's"
# Fields that are a test's own or its result; the others are its settings.
_OWN = {
    "n_prompt",
    "n_gen",
    "n_depth",
    "test",
    "test_time",
    "avg_ns",
    "stddev_ns",
    "avg_ts",
    "stddev_ts",
    "t/s",
}
_OWN |= {"samples_ns", "samples_ts", "model", "model_type", "size", "model_size", "params", "model_n_params"}
_TEST = re.compile(r"(?:pp ?(\d+))?\+?(?:tg ?(\d+))?(?: @ d(\d+))?")
_RATE = re.compile(numerals.NUMBER)
_INSERT = re.compile(r"INSERT INTO \w+ \(([^)]*)\) VALUES \((.*)\);\s*")  # a line
_Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Test:
    prompt: int
    new: int
    depth: int
    rate: float  # tokens/s
    spread: float | None  # standard deviation of the rate, as a share
    model: str
    settings: Mapping[str, str]

    @property
    def name(self) -> str:
        parts = [f"pp{self.prompt}"] * bool(self.prompt) + [f"tg{self.new}"] * bool(self.new)
        depth = f" @ d{self.depth}" if self.depth else ""
        return f"{self.model} {'+'.join(parts)}{depth}".strip()


def _is_row(row: _Row) -> bool:
    return "avg_ts" in row and "avg_ns" in row


def _is_csv(text: str) -> bool:
    return "avg_ts" in text and any(map(_is_header, text.splitlines()))


def _is_header(line: str) -> bool:
    return {"avg_ns", "avg_ts"} <= {cell.strip('" ') for cell in line.split(",")}


def _is_markdown(text: str) -> bool:
    return "t/s" in text and any(map(_is_table_row, markdown.rows(text)))


def _is_table_row(row: _Row) -> bool:
    return {"model", "test", "t/s"} <= row.keys() and "ttfr (ms)" not in row  # that is llama-benchy's


def _is_sql(text: str) -> bool:
    return "avg_ts" in text and any(map(_INSERT.fullmatch, text.splitlines()))


def _read_csv(text: str) -> Log:
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if _is_header(line))
    return _read([row for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))) if row.get("avg_ts")])


def _read_sql(text: str) -> Log:
    rows = []
    for insert in filter(None, map(_INSERT.fullmatch, text.splitlines())):
        names = [name.strip() for name in insert[1].split(",")]
        rows.append(
            dict(zip(names, next(csv.reader([insert[2]], quotechar="'", skipinitialspace=True)), strict=True))
        )
    return _read(rows)


def _read_markdown(text: str) -> Log:
    return _read([*filter(_is_table_row, markdown.rows(text))])


def _read(rows: Sequence[_Row]) -> Log:
    """The tests, and a series for tests at LEAST or more depths. Raises LogError."""
    decimal = numerals.mark(found[0] for row in rows if (found := _RATE.search(str(row.get("t/s", "")))))
    tests = [_test(row, decimal) for row in rows]
    single = [test for test in tests if not (test.prompt and test.new)]
    names = _names(single)
    requests = {name: _request(test) for name, test in zip(names, single, strict=True)}
    points: dict[str, list[tuple[float, float]]] = {}
    for name, test in zip(names, single, strict=True):
        if test.new and not requests[name].fault:
            of_depths = name.replace(test.name, test.model).strip() or "depths"
            point = (depths.middle(test.depth, test.new), 1e3 / test.rate)
            points.setdefault(of_depths, []).append(point)
    series = {name: made for name, each in points.items() if (made := depths.series(each))}
    if not requests:
        raise LogError(f"a {FORMAT} without a test of a prompt or of generation alone; {BOTH}")
    notes = [*([DEPTHS] if series else []), *([BOTH] if len(single) < len(tests) else []), AVERAGES]
    return Log(FORMAT, series, requests, notes)


def _test(row: _Row, decimal: str | None) -> _Test:
    settings = {name: str(value) for name, value in row.items() if name not in _OWN}
    if "test" in row:
        found = _TEST.fullmatch(row["test"].strip())
        if found is None or _RATE.search(row["t/s"]) is None or not any(found.groups()[:2]):
            raise LogError(f"a {FORMAT} with the test {row['test']!r} at {row['t/s']!r}, which is not known")
        prompt, new, depth = (int(number or 0) for number in found.groups())
        value, deviation = numerals.mean(row["t/s"], decimal)
        return _Test(prompt, new, depth, value, _share(deviation, value), row["model"], settings)
    if "n_prompt" not in row and "n_gen" not in row:
        raise LogError(UNKNOWN)
    prompt, new, depth = (int(row.get(name) or 0) for name in ("n_prompt", "n_gen", "n_depth"))
    model = str(row.get("model_type") or row.get("model_filename") or "")
    rate, deviation = float(row["avg_ts"]), row.get("stddev_ts")
    return _Test(prompt, new, depth, rate, _share(deviation, rate), model, settings)


def _share(deviation: Any, rate: float) -> float | None:
    """Of one repetition it is 0, and says nothing."""
    return float(deviation) / rate if deviation and rate and float(deviation) else None


def _request(test: _Test) -> Request:
    if test.new:
        return Request(test.new, None, test.rate, spread=test.spread)
    first_ms = 1e3 * test.prompt / test.rate if test.rate else None
    return Request(None, first_ms, None, test.prompt, spread=test.spread)


def _names(tests: Sequence[_Test]) -> list[str]:
    """A name for each: the model and the test, where these are equal the settings that differ, and a number
    where these are too."""
    values: dict[str, dict[str, set[str]]] = {}  # of each setting of the tests of one name
    for test in tests:
        for key, value in test.settings.items():
            values.setdefault(test.name, {}).setdefault(key, set()).add(value)
    found = []
    for test in tests:
        differing = (key for key, of_key in values.get(test.name, {}).items() if len(of_key) > 1)
        found.append(" ".join([test.name, *(f"{key}={test.settings.get(key)}" for key in differing)]))
    return distinct(found)


READERS: tuple[Reader, ...] = (
    of_objects(FORMAT, _is_row, _read),
    of_text(FORMAT, _is_sql, _read_sql),
    of_text(FORMAT, _is_markdown, _read_markdown),
    of_text(FORMAT, _is_csv, _read_csv),
)
