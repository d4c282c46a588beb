"""Results in the formats of other tools."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from harness.analysis import figures
from harness.analysis.columns import Repeat as Row
from harness.analysis.identity import SERVER
from harness.base.files import TABLE_OF
from harness.base.text import csv_text
from harness.dataset.study import campaigns
from harness.records import Record, ResultsError, Stored, table
from harness.records.kinds import loaded_of

Repeat = tuple[Row, Stored]

# Choose the repeats to export: those that are ok. The others are counted by reason.


@dataclass
class Chosen:
    """The ok repeats, read lazily one campaign at a time. `left_out`: the others read so far, by reason.

    `unfit`: why an ok repeat cannot be exported; empty where it can.
    """

    stored: Iterable[Stored]
    unfit: Callable[[Row], str] = lambda row: ""
    left_out: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    seen: int = 0

    def by_campaign(self) -> Iterator[list[Repeat]]:
        """The repeats of each campaign, oldest first."""
        for campaign in campaigns(self.stored):
            self.warnings += campaign.study.warnings
            self.left_out.update("search" for _ in campaign.study.searches)
            fit: list[Repeat] = []
            for row, each in campaign.repeats:
                self.seen += 1
                if row["status"] != "ok":
                    self.left_out["disturbed" if row["disturbed"] else str(row["status"])] += 1
                elif why := self.unfit(row):
                    self.left_out[why] += 1
                else:
                    fit.append((row, each))
            if fit:
                yield fit


# CSV export: one line per repeat, all figures at full precision.


def lines_text(chosen: Iterable[Sequence[Repeat]]) -> str:
    """A heading and a line per repeat, of several users one per number of them; empty without repeats."""
    lines = [
        [
            *figures.csv_values("repeats", {**row, "flags": _codes(row)}),
            row["users"][0]["users"] if row["users"] else None,
        ]
        for campaign in chosen
        for whole, _ in campaign
        for row in _by_users(whole)
    ]
    return csv_text([[*figures.csv_headings("repeats"), "users"], *lines]) if lines else ""


def _by_users(row: Row) -> list[Row]:
    """The row for each number of users; as it is without any."""
    whole = [{**row, "users": [at]} for at in row["users"]]
    return [cast(Row, each | figures.again(each)) for each in whole] or [row]


def _codes(row: Row) -> str:
    return " ".join(dict.fromkeys(flag["code"] for flag in row["flags"]))


# llama-bench's JSON with the fields of llama.cpp 0.5.0-dev: a row per campaign, cell and test.
#
# The fields, their order and types are those of `struct test` in tools/llama-bench/llama-bench.cpp, as
# bundled with llama-cpp-python 0.3.36. docs/reference/columns.md defines each one.


Test = dict[str, object]
"""A row: its fields are llama-bench's."""
Key = tuple[int, int, int]
"""n_prompt, n_gen, n_depth."""
BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "metal": "MTL", "vulkan": "Vulkan", "hip": "ROCm"}


def unfit_llama_bench(row: Row) -> str:
    """Why an ok repeat has no equivalent in llama-bench; empty where it has one."""
    if row["workload"] in ("prefill", "depth"):
        return ""
    if row["workload"] != "decode":
        return f"workload {row['workload']}"  # its length was not requested, or it is no single test
    return "" if row["series"] else "without a series"


def llama_bench_rows(chosen: Iterable[Sequence[Repeat]]) -> Iterator[Test]:
    """The rows of llama-bench: a test per cell of a campaign, its lengths and depth."""
    for campaign in chosen:
        cells: dict[str, list[Repeat]] = {}
        for row, each in campaign:
            cells.setdefault(row["content_key"], []).append((row, each))
        for repeats in cells.values():
            samples: dict[Key, list[int]] = {}
            for row, each in repeats:
                for test, ns in _samples(row, each):
                    samples.setdefault(test, []).append(ns)
            row, each = repeats[0]
            for test in sorted(samples, key=lambda test: (test[1], test)):  # prefill first
                fields = _fields(row, each.record, test[0] or row["prompt_tokens"])
                yield fields | _test(test, row["started_utc"], samples[test])


def _samples(row: Row, each: Stored) -> Iterator[tuple[Key, int]]:
    """Times of a repeat in ns: of its prefill, where TTFT is valid, and of its decode; of a workload of
    prefill or depth, of each pass or window."""
    if row["workload"] == "decode":
        prompt, (first, *steps) = row["prompt_tokens"], each.times.latency_ns.tolist()
        if row["ttft_ms"] is not None:
            yield (prompt, 0, 0), first
        if steps:  # the first token is the prompt's
            yield (0, len(steps), prompt), sum(steps)
        return
    columns = table(each)
    passes = zip(*(columns[name] for name in ("round", "depth", "n", "latency_ns")), strict=True)
    windows: dict[tuple[int, int], list[int]] = {}
    for number, depth, n, ns in passes:
        if row["workload"] == "prefill":
            yield (n, 0, depth), ns
        else:
            windows.setdefault((depth, number), []).append(ns)
    for (depth, _), steps in windows.items():
        yield (0, len(steps), depth), sum(steps)


def llama_bench_builds(rows: Sequence[Test]) -> list[str]:
    """The build ids in the rows, by the time of their first test."""
    in_order = sorted(rows, key=lambda row: str(row["test_time"]))
    return list(dict.fromkeys(str(row["build_commit"]) for row in in_order))


def _build(record: Record) -> str:
    """An id of 8 hexadecimal digits for a build: the stack, its versions, environment and build flags."""
    environment = record.get("environment") or {}
    versions = loaded_of(record).get("versions")
    facts = [record["stack"], versions, environment.get("lock"), environment.get("variables")]
    facts += filter(None, [environment.get("toolkit")])
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def _fields(row: Row, record: Record, batch: int) -> Test:
    """The fields of a test but its lengths and samples. `batch`: tokens evaluated at once, where the stack
    has no such option. Options that a stack lacks have llama-bench's default."""
    loaded, machine = loaded_of(record), record["machine"]
    options = record["options"] | (loaded.get("options") or {})
    elsewhere = row["server"] and row["server"]["device"]
    on_gpu = record["device"] not in ("cpu", SERVER)
    gpus = machine.get("gpus") or []
    used = [gpu for gpu in gpus if gpu.get("uuid") == record["device"]] or gpus
    flash, mapped = options.get("flash_attn"), options.get("mmap")
    header = record["model"]["weights"].get("header")
    parameters = loaded.get("parameters") or (header and header["parameters"])
    return {
        "build_commit": _build(record),
        "build_number": 0,
        "cpu_info": "" if elsewhere else machine["cpu"] or "",
        "gpu_info": ", ".join(gpu["name"] or "unknown" for gpu in used) if on_gpu else "",
        "backends": BACKENDS.get(record["asked"]["device"], "CUDA") if on_gpu else elsewhere or "CPU",
        "model_filename": row["cell"],
        "model_type": f"{row['model']} {row['stack']} {row['variant']}",
        "model_size": row["model_bytes"] or 0,
        "model_n_params": parameters or 0,
        "n_batch": options.get("n_batch", batch),
        "n_ubatch": options.get("n_ubatch", batch),
        "n_threads": 0 if elsewhere else record["threads"],
        "cpu_mask": "0x0",
        "cpu_strict": False,
        "poll": 50,
        "type_k": str(options.get("type_k", "")),
        "type_v": str(options.get("type_v", "")),
        "n_gpu_layers": options.get("gpu_layers", -1 if on_gpu or elsewhere else 0),
        "n_cpu_moe": 0,
        "split_mode": "none",
        "main_gpu": 0,
        "no_kv_offload": False,
        "flash_attn": int(flash) if isinstance(flash, bool) else -1,
        "devices": "auto" if on_gpu or elsewhere else "none",
        "tensor_split": "0.00",
        "tensor_buft_overrides": "none",
        "load_mode": ("mmap" if mapped else "none") if isinstance(mapped, bool) else "auto",
        "lazy_mode": "auto",
        "embeddings": False,
        "no_op_offload": 0,
        "no_host": False,
        "repack": bool(options.get("repack", False)),
        "fit_target": 0,
        "fit_min_ctx": 0,
    }


def _test(test: Key, started_utc: str, samples_ns: Sequence[int]) -> Test:
    """Means and standard deviations as in llama-bench, but without its overflow of the deviation in ns."""
    prompt, new, depth = test
    rates = [1e9 * (prompt + new) / ns for ns in samples_ns]
    several = len(samples_ns) > 1
    return {
        "n_prompt": prompt,
        "n_gen": new,
        "n_depth": depth,
        "test_time": f"{datetime.fromisoformat(started_utc).astimezone(timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
        "avg_ns": round(statistics.fmean(samples_ns)),
        "stddev_ns": round(statistics.stdev(samples_ns)) if several else 0,
        "avg_ts": statistics.fmean(rates),
        "stddev_ts": statistics.stdev(rates) if several else 0.0,
        "samples_ns": list(samples_ns),
        "samples_ts": rates,
    }


# Parquet export: every token of every repeat with a series; one row group per repeat.


WHOSE = ("campaign", "cell", "model", "stack", "variant", "kind", "machine", "device", "started_utc")
COLUMNS = ("n", "latency_ns", "token_id", "device_ns")
SCHEMA = pa.schema(
    [
        *((name, pa.dictionary(pa.int32(), pa.string())) for name in WHOSE),
        ("repeat", pa.int64()),
        *((name, pa.int64()) for name in COLUMNS),
    ]
)


def unfit_tokens(row: Row) -> str:
    """Why an ok repeat has no tokens to export; empty where it may have some."""
    return f"workload {row['workload']}" if row["workload"] in TABLE_OF else ""


def write_tokens(target: Path, chosen: Iterable[Sequence[Repeat]]) -> int:
    """Write the file and return the number of repeats in it; without a series there is no file.

    The file is written as TARGET.partial and then renamed. `n` is as its source counts it; a value not
    measured is null. Raises ResultsError.
    """
    partial, count = target.with_name(f"{target.name}.partial"), 0
    try:
        with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as file:
            for row, each in (repeat for campaign in chosen for repeat in campaign):
                series = each.times.columns()
                if not series:
                    continue
                length = len(series["n"])
                zeros = pa.array([0] * length, pa.int32())
                columns = [
                    pa.DictionaryArray.from_arrays(zeros, pa.array([str(figures.at(row, name))]))
                    for name in WHOSE
                ]
                columns.append(pa.array([row["repeat"]] * length, pa.int64()))
                columns += [pa.array(series.get(name, [None] * length), pa.int64()) for name in COLUMNS]
                file.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
                count += 1
        if count:
            partial.replace(target)
    except OSError as refusal:
        raise ResultsError(f"{target}: cannot be written: {refusal.strerror or refusal}") from refusal
    finally:
        partial.unlink(missing_ok=True)
    return count
