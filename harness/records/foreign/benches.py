"""Tools that time blocks of tokens at chosen depths of context: llama-bench, llama-benchy and
llama-sweep-bench.

Formats: `struct test` in tools/llama-bench/llama-bench.cpp (github.com/ggml-org/llama.cpp), results.py
(github.com/eugr/llama-benchy), examples/sweep-bench (github.com/ikawrakow/ik_llama.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.records.foreign.form import Figures, Format, Item, Row
from harness.records.foreign.log import LEAST_DEPTHS, LogError, at_depths, distinct

BOTH = "tests of prompt and generation together (pp+tg) are left out: their t/s is neither's"
# Fields that are a test's own, its result or its model; the others are its settings.
_RESULTS = ("avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts")
_OWN = {"n_prompt", "n_gen", "n_depth", "test_time", "model_type", "model_size", "model_n_params", *_RESULTS}


def llama_bench(form: Format, rows: Sequence[Row]) -> tuple[list[Item], list[str]]:
    """Tests: `pp512` evaluates a prompt of 512 tokens, `tg128` generates 128, `@ d4096` behind 4,096 others.
    Figures are means over repetitions. A test's name has the settings in which the model's tests differ.
    Raises LogError."""
    if not all("n_prompt" in row or "n_gen" in row for row in rows):
        raise LogError(
            f"a {form.name} without n_prompt and n_gen: whether its t/s are of prompts or of generation is "
            "unknown"
        )
    values: dict[tuple[str, str], set[str]] = {}  # of each model's settings
    for row in rows:
        for key in row.keys() - _OWN:
            values.setdefault((_model(row), key), set()).add(str(row[key]))
    items = []
    for row in rows:
        prompt, new, depth = (int(row.get(name) or 0) for name in ("n_prompt", "n_gen", "n_depth"))
        if prompt and new:
            continue
        model = _model(row)
        settings = [f"{key}={row[key]}" for key in row if len(values.get((model, key), ())) > 1]
        kind = (f"tg{new}" if new else f"pp{prompt}") + (f" @ d{depth}" if depth else "")
        name = " ".join(filter(None, [model, kind, *settings]))
        if new:
            depths = " ".join(filter(None, [model, *settings])) or "depths"
            items.append(Item({**row, "rate": row["avg_ts"]}, name, depths=depths))
        else:
            items.append(Item({**row, "prompt_rate": row["avg_ts"], "n_gen": None}, name))
    if not items:
        raise LogError(f"a {form.name} without a test of a prompt or of generation alone; {BOTH}")
    names = distinct(item.name for item in items)
    items = [replace(item, name=name) for item, name in zip(items, names, strict=True)]
    return items, [BOTH] if len(items) < len(rows) else []


def _model(row: Row) -> str:
    return str(row.get("model_type") or row.get("model_filename") or "")


def llama_benchy(form: Format, reports: Sequence[Row]) -> tuple[list[Item], list[str]]:
    """The benchmarks by depth, as means over runs; those that load a context measure its prefill."""
    rows, names, depths = [], [], []
    for row in (row for report in reports for row in report["benchmarks"]):
        depth, prompt, new = (row[f"{name}_size"] or 0 for name in ("context", "prompt", "response"))
        users, loads = int(row.get("concurrency") or 1), bool(row.get("is_context_prefill_phase"))
        rate = row.get("tg_throughput" if users == 1 else "tg_req_throughput")
        sizes = {"prompt_size": prompt or None, "response_size": new or None, "depth": depth + prompt}
        rows.append({**row, **sizes, "rate": rate, "ttft": row.get("e2e_ttft") or row.get("ttfr")})
        name = f"pp{prompt} tg{new}" + (f" @ d{depth}" if depth else "") + (f" c{users}" if users > 1 else "")
        names.append(f"{name} (context)" if loads else name)
        depths.append("depths" if users == 1 and not loads and new else "")
    items = zip(rows, distinct(names), depths, strict=True)
    return [Item(row, name, depths=series) for row, name, series in items], []


def sweep(form: Format, rows: Sequence[Row]) -> tuple[list[Item], list[str]]:
    """A series per sweep, each of which begins where N_KV falls: a row generates TG tokens behind N_KV, and
    T_TG is the time of all of them. Raises LogError."""
    sweeps: list[list[tuple[float, float]]] = []
    before = float("inf")
    for row in rows:
        figures = Figures.of(row, form.figures)
        depth, tokens, ms = figures.depth, figures.new or 0, figures.decode or 0
        if depth <= before:
            sweeps.append([])
        before = depth
        if tokens > 0 and ms > 0:
            sweeps[-1].append((depth + tokens // 2, ms / tokens))
    series = [line for points in sweeps if (line := at_depths(points))]
    if not series:
        raise LogError(f"a {form.name} with fewer than {LEAST_DEPTHS} depths; give a larger -c")
    names = ["sweep"] if len(series) == 1 else [f"sweep {at}" for at in range(1, len(series) + 1)]
    items = [Item(name=name, series=line) for name, line in zip(names, series, strict=True)]
    return items, ["a point is the mean over the tokens of a row (T_TG / TG), at N_KV + TG / 2"]
