"""llama-bench's JSON with the fields of llama.cpp 0.5.0-dev: a row per campaign, cell and test.

Each repeat is a sample. The fields, their order and types are those of `struct test` in
tools/llama-bench/llama-bench.cpp, as bundled with llama-cpp-python 0.3.36. docs/export.md defines each one.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from hashlib import sha256

from harness.analysis.rows import Repeat as Row
from harness.export.chosen import Repeat
from harness.results import Record, table
from harness.results.kinds import loaded_of

Test = dict[str, object]
"""A row: its fields are llama-bench's."""
Key = tuple[int, int, int]
"""n_prompt, n_gen, n_depth."""
BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "metal": "MTL", "vulkan": "Vulkan", "hip": "ROCm"}


def fits(row: Row) -> str:
    """Why an ok repeat has no equivalent in llama-bench; empty where it has one."""
    if row["kind"] != "measured":
        return "reported by others"
    if row["workload"] in ("prefill", "depth"):
        return ""
    if row["workload"] != "decode":
        return f"workload {row['workload']}"  # its length was not requested, or it is no single test
    return "" if row["series"] else "without a series"


def rows(chosen: Iterable[Sequence[Repeat]]) -> Iterator[Test]:
    """The rows of llama-bench. Prefill is a separate test, left out where TTFT is not valid."""
    for campaign in chosen:
        cells: dict[str, list[Repeat]] = {}
        for row, each in campaign:
            cells.setdefault(row["content_key"], []).append((row, each))
        for repeats in cells.values():
            if repeats[0][0]["workload"] != "decode":
                yield from _of_rows(repeats)
                continue
            prompt_ns, decode_ns, steps = [], [], 0
            for row, each in repeats:
                latency_ns = each.times.gaps_ns.tolist()
                steps = len(latency_ns) - 1  # the first token is the prompt's
                decode_ns.append(sum(latency_ns[1:]))
                if row["ttft_ms"] is not None:
                    prompt_ns.append(latency_ns[0])
            row, each = repeats[0]
            prompt = row["prompt_tokens"]
            known = _known(row, each.record, prompt)
            if prompt_ns:
                yield known | _test(prompt, 0, 0, row["started_utc"], prompt_ns)
            if steps:
                yield known | _test(0, steps, prompt, row["started_utc"], decode_ns)


def _of_rows(repeats: Sequence[Repeat]) -> Iterator[Test]:
    """A test per length and depth of prefill, and per depth of windows. A pass, or a window, is a sample."""
    samples: dict[Key, list[int]] = {}
    for row, each in repeats:
        columns = table(each)
        passes = zip(*(columns[name] for name in ("round", "depth", "n", "latency_ns")), strict=True)
        windows: dict[tuple[int, int], list[int]] = {}
        for number, depth, n, ns in passes:
            if row["workload"] == "prefill":
                samples.setdefault((n, 0, depth), []).append(ns)
            else:
                windows.setdefault((depth, number), []).append(ns)
        for (depth, _), steps in windows.items():
            samples.setdefault((0, len(steps), depth), []).append(sum(steps))
    row, each = repeats[0]
    for (prompt, new, depth), found in sorted(samples.items()):
        known = _known(row, each.record, prompt or row["prompt_tokens"])
        yield known | _test(prompt, new, depth, row["started_utc"], found)


def text(found: Sequence[Test]) -> str:
    """One array, as llama-bench prints it; empty for no rows."""
    return json.dumps(found, indent=2, allow_nan=False) + "\n" if found else ""


def builds(found: Sequence[Test]) -> list[str]:
    """The build ids in the rows, by the time of their first test."""
    in_order = sorted(found, key=lambda row: str(row["test_time"]))
    return list(dict.fromkeys(str(row["build_commit"]) for row in in_order))


def build(record: Record) -> str:
    """An id of 8 hexadecimal digits for a build: the stack, its versions, environment and build flags."""
    environment = record.get("environment") or {}
    versions = loaded_of(record).get("versions")
    known = [record["stack"], versions, environment.get("lock"), environment.get("variables")]
    known += filter(None, [environment.get("toolkit")])
    return sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]


def _known(row: Row, record: Record, batch: int) -> Test:
    """The fields of a test but its lengths and samples. `batch`: tokens evaluated at once, where the stack
    has no such option. Options that a stack lacks have llama-bench's default."""
    loaded, machine = loaded_of(record), record["machine"]
    options = record["options"] | (loaded.get("options") or {})
    on_gpu = record["device"] != "cpu"
    gpus = machine.get("gpus") or []
    used = [gpu for gpu in gpus if gpu.get("uuid") == record["device"]] or gpus
    flash, mapped = options.get("flash_attn"), options.get("mmap")
    header = record["model"]["weights"].get("header")
    parameters = loaded.get("parameters") or (header and header["parameters"])
    return {
        "build_commit": build(record),
        "build_number": 0,
        "cpu_info": machine["cpu"] or "",
        "gpu_info": ", ".join(gpu["name"] or "unknown" for gpu in used) if on_gpu else "",
        "backends": BACKENDS.get(record["asked"]["device"], "CUDA") if on_gpu else "CPU",
        "model_filename": row["cell"],
        "model_type": f"{row['model']} {row['stack']} {row['variant']}",
        "model_size": row["model_bytes"] or 0,
        "model_n_params": parameters or 0,
        "n_batch": options.get("n_batch", batch),
        "n_ubatch": options.get("n_ubatch", batch),
        "n_threads": record["threads"],
        "cpu_mask": "0x0",
        "cpu_strict": False,
        "poll": 50,
        "type_k": str(options.get("type_k", "")),
        "type_v": str(options.get("type_v", "")),
        "n_gpu_layers": options.get("gpu_layers", -1 if on_gpu else 0),
        "n_cpu_moe": 0,
        "split_mode": "none",
        "main_gpu": 0,
        "no_kv_offload": False,
        "flash_attn": int(flash) if isinstance(flash, bool) else -1,
        "devices": "auto" if on_gpu else "none",
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


def _test(prompt: int, new: int, depth: int, started_utc: str, samples_ns: Sequence[int]) -> Test:
    """Means and standard deviations as in llama-bench, but without its overflow of the deviation in ns."""
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
