"""AIPerf's profile_export.jsonl: one record per request, with the gaps between the chunks of its stream.

The format is documented in docs/tutorials/working-with-profile-exports.md (github.com/ai-dynamo/aiperf).
Metrics have a value and a unit; `inter_chunk_latency` is a list, present only for streamed requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.logs import units
from harness.logs.log import SHARED, Log, LogError, Request, Series, generation, left_out, overlapping

FORMAT = "AIPerf export"


def is_one(document: Any) -> bool:
    if not isinstance(document, dict):
        return False
    return {"metadata", "metrics"} <= document.keys() or is_summary(document)


def is_summary(document: Mapping[str, Any]) -> bool:
    """profile_export_aiperf.json: statistics over all requests."""
    latency = document.get("request_latency")
    return isinstance(latency, dict) and "unit" in latency and "avg" in latency


def read(records: Sequence[Mapping[str, Any]]) -> Log:
    """The requests of an export. Raises LogError."""
    if any(is_summary(record) for record in records):
        raise LogError(
            f"an {FORMAT} with statistics over all requests; use profile_export.jsonl from the same folder"
        )
    series: dict[str, Series] = {}
    requests: dict[str, Request] = {}
    spans = []
    failed = 0
    for number, record in enumerate(records, 1):
        metrics, metadata = record.get("metrics") or {}, record.get("metadata") or {}
        if record.get("error") or ("time_to_first_token" not in metrics and "request_latency" not in metrics):
            failed += 1
            continue
        name = f"request {number}"
        prompt = int(_value(metrics, "input_sequence_length") or 0)
        length = _value(metrics, "output_sequence_length")
        first_ms, gaps = _ms(metrics, "time_to_first_token"), _ms(metrics, "inter_chunk_latency")
        if "request_start_ns" in metadata and "request_end_ns" in metadata:
            spans.append((metadata["request_start_ns"], metadata["request_end_ns"]))
        if isinstance(gaps, list) and first_ms is not None:
            series[name] = generation(prompt, first_ms, gaps, None if length is None else int(length))
        else:
            tpot = _ms(metrics, "inter_token_latency")
            requests[name] = Request(int(length or 0), first_ms, 1e3 / tpot if tpot else None)
    notes = left_out(failed, len(records))
    if requests:
        notes.append(
            f"{len(requests)} requests have totals only: inter_chunk_latency needs streamed requests"
        )
    notes += [SHARED] if overlapping(spans) else []
    if not series and not requests:
        raise LogError(f"an {FORMAT} without a successful request")
    return Log(FORMAT, series, requests, notes)


def _value(metrics: Mapping[str, Any], name: str) -> Any:
    return (metrics.get(name) or {}).get("value")


def _ms(metrics: Mapping[str, Any], name: str) -> Any:
    """A metric, or a list of them, in ms; null where it is missing."""
    value = _value(metrics, name)
    if value is None:
        return None
    unit = metrics[name].get("unit", "ms")
    if unit not in units.NAMES:
        raise LogError(f"an {FORMAT} with {name} in {unit}, which is not a unit of time")
    scale = units.MS[units.NAMES[unit]]
    return [each * scale for each in value] if isinstance(value, list) else value * scale
