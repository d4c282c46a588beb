"""Decode cells as others collect them: llm-d's benchmark report, and submissions to LocalMaxxing.

A document per campaign and cell. What a format cannot express is left out, and what is unknown is not filled
in. docs/reference/columns.md has how to use them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from harness.analysis.columns import Repeat as Row
from harness.analysis.identity import recorded_gpu
from harness.records import Record
from harness.records.kinds import loaded_of
from harness.report.head import versions_text
from harness.share.export import BACKENDS, Repeat, cells_of

Document = dict[str, object]


def fits_requests(row: Row, record: Record) -> str:
    """Why an ok repeat is no single request; empty where it is one."""
    if row["workload"] != "decode":
        return f"workload {row['workload']}"
    if not row["series"]:
        return "without a series"
    return "" if row["ttft_ms"] is not None else "without a TTFT"


def text(found: Iterable[Document]) -> str:
    """A document a line."""
    return "".join(f"{json.dumps(each, allow_nan=False)}\n" for each in found)


# llm-d's benchmark report, version 0.2: llmdbenchmark/analysis/benchmark_report/br_v0_2_json_schema.json of
# github.com/llm-d/llm-d-benchmark at 8bc9f1d (August 2026). Its documents are valid in version 0.2.1 too, and
# in JSON they are YAML. A repeat is one request.


def llm_d(chosen: Iterable[Sequence[Repeat]]) -> Iterator[Document]:
    for repeats in cells_of(chosen):
        row, each = repeats[0]
        gpu = recorded_gpu(each.record)
        engine: Document = {
            "kind": "inference_engine" if gpu else "generic",  # an engine must have an accelerator
            "tool": row["stack"],
            "tool_version": versions_text(each.record),
            "model": {"name": row["model"]},
        }
        if gpu:
            accelerator = {"model": gpu["name"] or "unknown", "count": 1, "parallelism": {}}
            engine |= {"role": "replica", "replicas": 1, "accelerator": accelerator}
        label = f"{row['stack']} {row['variant']}"
        stack = {
            "metadata": {"label": label, "cfg_id": row["content_key"]},
            "standardized": engine,
            "native": {"args": each.record["options"]},
        }
        load = {
            "tool": "harness",
            "tool_version": each.record["harness"]["version"],
            "source": "unknown",
            "input_seq_len": {"distribution": "fixed", "value": row["prompt_tokens"]},
            "output_seq_len": {"distribution": "fixed", "value": row["new_tokens"]},
            "concurrency": 1,
        }
        yield {
            "version": "0.2",
            "run": {
                "uid": f"{row['campaign']} {row['content_key']}",
                "eid": row["campaign"],
                "time": {"start": row["started_utc"]},
                "description": f"{row['model']} {label}",
            },
            "scenario": {"stack": [stack], "load": {"metadata": {}, "standardized": load, "native": {}}},
            "results": {"request_performance": {"aggregate": _requests(repeats)}},
        }


def _requests(repeats: Sequence[Repeat]) -> Document:
    latencies_s = [each.times.latency_ns / 1e9 for _, each in repeats]
    requests_s = [float(latency.sum()) for latency in latencies_s]
    tokens = [len(latency) for latency in latencies_s]
    prompts = [row["prompt_tokens"] for row, _ in repeats]
    firsts_s = [float(latency[0]) for latency in latencies_s]
    steps_s = [latency[1:] for latency in latencies_s]  # the first token is the prompt's
    latency: Document = {
        "time_to_first_token": _statistics("s", firsts_s),
        "request_latency": _statistics("s", requests_s),
        "normalized_time_per_output_token": _statistics("s/token", np.divide(requests_s, tokens)),
    }
    if all(len(steps) for steps in steps_s):
        latency["time_per_output_token"] = _statistics("s/token", [steps.mean() for steps in steps_s])
        latency["inter_token_latency"] = _statistics("s/token", np.concatenate(steps_s))
    return {
        "requests": {
            "total": len(repeats),
            "input_length": _statistics("count", prompts),
            "output_length": _statistics("count", tokens),
        },
        "latency": latency,
        "throughput": {
            "output_token_rate": _statistics("tokens/s", np.divide(tokens, requests_s)),
            "total_token_rate": _statistics("tokens/s", np.divide(np.add(tokens, prompts), requests_s)),
        },
    }


def _statistics(units: str, values: Sequence[float] | np.ndarray) -> Document:
    found = np.asarray(values, dtype=float)
    several = {"stddev": float(found.std(ddof=1))} if len(found) > 1 else {}
    tails = {f"p{of}": float(np.percentile(found, of)) for of in (90, 99) if len(found) >= LEAST_FOR_TAILS}
    spread = {"min": float(found.min()), "p50": float(np.median(found)), "max": float(found.max())}
    return {"units": units, "mean": float(found.mean()), **several, **spread, **tails}


LEAST_FOR_TAILS = 100  # values, for a 99th percentile to be one of them


# Submissions to LocalMaxxing: bodies of POST /api/benchmarks, by localmaxxing.com/api-docs and
# /api/agent-context, and by its own client, github.com/LottoLottoLotto/localmaxxing-cli at 4ab2009 (2026),
# which writes GiB where it says Gb, and sends medians.


ENGINES = ("llama.cpp", "vllm", "sglang", "exllamav2", "mlx")
"""The engines that it accepts, as stacks name them in their versions."""


def _engine(record: Record) -> Document:
    """Its name and its version; empty for one that is not accepted."""
    versions = loaded_of(record).get("versions") or {}
    name = next((name for name in ENGINES if name in versions), None)
    return {"engineName": name, "engineVersion": versions[name]} if name else {}


def fits_localmaxxing(row: Row, record: Record) -> str:
    """Why an ok repeat cannot be submitted; empty where it can."""
    if why := fits_requests(row, record):
        return why
    if row["weights"] == "synthetic":
        return "synthetic weights"
    if row["tokens_per_s"] is None:
        return "without tok/s"
    if row["device"] != "cpu" and recorded_gpu(record) is None:
        return "no single GPU known"
    return "" if _engine(record) else f"stack {row['stack']} is no engine of LocalMaxxing"


def localmaxxing(chosen: Iterable[Sequence[Repeat]]) -> Iterator[Document]:
    """`hfId`, the model's name on the hub, is missing where the weights are a file; it must be added."""
    for repeats in cells_of(chosen):
        row, each = repeats[0]
        record, weights = each.record, each.record["model"]["weights"]
        peaks = [peak for of, _ in repeats if (peak := of["peak_vram_bytes"])]
        yield _known(
            {
                "hfId": weights.get("repo"),
                "hardware": _hardware(record),
                **_engine(record),
                "quantization": str(loaded_of(record).get("quant") or row["variant"]).upper(),
                "backend": BACKENDS.get(record["asked"]["device"], "CUDA").lower(),
                "tokSOut": _median([of["tokens_per_s"] for of, _ in repeats]),
                "ttftMs": _median([of["ttft_ms"] for of, _ in repeats]),
                "peakVramGb": max(peaks) / 2**30 if peaks else None,
                "promptTokens": row["prompt_tokens"],
                "outputTokens": row["tokens"],
                "contextLength": row["n_ctx"],
                "batchSize": 1,
                "notes": f"harness {record['harness']['version']}, median of {len(repeats)}",
            }
        )


def _hardware(record: Record) -> Document:
    machine, gpu = record["machine"], recorded_gpu(record)
    known = {"cpu": machine["cpu"], "ramGb": _gib(machine["memory_bytes"]), "os": machine.get("os")}
    if gpu is None:
        return _known({"hwClass": "CPU_ONLY", **known})
    card = {"gpuName": gpu["name"], "gpuCount": 1, "vramGb": _gib(gpu["memory_bytes"])}
    return _known({"hwClass": "DISCRETE_GPU", **card, **known})


def _median(values: Sequence[float | None]) -> float:
    return statistics.median(value for value in values if value is not None)


def _gib(size: int | None) -> float | None:
    return round(size / 2**30, 1) if size else None


def _known(fields: Document) -> Document:
    return {name: value for name, value in fields.items() if value is not None}
