"""Tools that time blocks of tokens, often at chosen depths of context: llama-bench, llama-benchy,
llama-sweep-bench and llama-batched-bench.

Formats: `struct test` in tools/llama-bench/llama-bench.cpp, tools/batched-bench
(github.com/ggml-org/llama.cpp), results.py (github.com/eugr/llama-benchy), examples/sweep-bench
(github.com/ikawrakow/ik_llama.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.records.foreign.form import Format, Item, Row, figures_of
from harness.records.foreign.log import LEAST_DEPTHS, LogError, at_depths, distinct, number

BOTH = "tests of prompt and generation together (pp+tg) are left out: their t/s is neither's"
# Fields that are a test's own, its result or its model; the others are its settings.
_OWN = {
    "n_prompt",
    "n_gen",
    "n_depth",
    "test_time",
    "avg_ns",
    "stddev_ns",
    "avg_ts",
    "stddev_ts",
    "samples_ns",
}
_OWN |= {"samples_ts", "model_type", "model_size", "model_n_params"}


def llama_bench(form: Format, rows: Sequence[Row]) -> tuple[list[Item], list[str]]:
    """Tests: `pp512` evaluates a prompt of 512 tokens, `tg128` generates 128, `@ d4096` behind 4,096 others.
    Figures are means over repetitions. A test's name has the settings that differ from those of another test
    of that model and kind. Raises LogError."""
    tests: list[tuple[Row, str, str]] = []
    settings: dict[tuple[str, str], dict[str, set[str]]] = {}
    for row in rows:
        if "n_prompt" not in row and "n_gen" not in row:
            raise LogError(
                f"a {form.name} without n_prompt and n_gen: whether its t/s are of prompts or of generation "
                "is unknown"
            )
        prompt, new, depth = (int(row.get(name) or 0) for name in ("n_prompt", "n_gen", "n_depth"))
        if prompt and new:
            continue
        model = str(row.get("model_type") or row.get("model_filename") or "")
        kind = (f"tg{new}" if new else f"pp{prompt}") + (f" @ d{depth}" if depth else "")
        tests.append((row, model, kind))
        for key in row.keys() - _OWN:
            settings.setdefault((model, kind), {}).setdefault(key, set()).add(str(row[key]))
    if not tests:
        raise LogError(f"a {form.name} without a test of a prompt or of generation alone; {BOTH}")
    items = []
    for row, model, kind in tests:
        seen = settings.get((model, kind), {})
        own = [f"{key}={row[key]}" for key in row if len(seen.get(key, ())) > 1]
        if int(row.get("n_gen") or 0):
            figures, depths = (
                {**row, "rate": row["avg_ts"]},
                " ".join(filter(None, [model, *own])) or "depths",
            )
        else:
            figures, depths = {**row, "prompt_rate": row["avg_ts"], "n_gen": None}, ""
        items.append(Item(figures, " ".join(filter(None, [model, kind, *own])), depths=depths))
    named = [
        Item(item.row, name, depths=item.depths)
        for item, name in zip(items, distinct(item.name for item in items), strict=True)
    ]
    return named, [BOTH] if len(tests) < len(rows) else []


def llama_benchy(form: Format, reports: Sequence[Row]) -> tuple[list[Item], list[str]]:
    """The benchmarks by depth, as means over runs; those that load a context measure its prefill."""
    rows, names, depths = [], [], []
    for row in (row for report in reports for row in report["benchmarks"]):
        depth, prompt, new = (row[f"{name}_size"] or 0 for name in ("context", "prompt", "response"))
        users, loads = int(row.get("concurrency") or 1), bool(row.get("is_context_prefill_phase"))
        rate = row.get("tg_throughput" if users == 1 else "tg_req_throughput")
        sizes = {"prompt_size": prompt or None, "response_size": new or None, "depth": depth + prompt}
        rows.append({**row, **sizes, "rate": rate})
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
        figures = figures_of(row, form.figures)
        depth, tokens, ms = (figures[name] for name in ("depth", "new", "decode"))
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


def batched(form: Format, rows: Sequence[Row]) -> tuple[list[Item], list[str]]:
    """The totals of rows of one sequence (`pl`, or B in its table). Raises LogError."""
    rows_of_one = [row for row in rows if number(row["pl"]) == 1]
    single = [Item(row, f"row {at}") for at, row in enumerate(rows_of_one, 1)]
    if not single:
        raise LogError(f"a {form.name} without a row of one sequence: use -npl 1")
    shared = (
        f"{len(rows) - len(single)} of {len(rows)} rows are of several sequences at once and are left out"
    )
    return single, [shared] if len(single) < len(rows) else []
