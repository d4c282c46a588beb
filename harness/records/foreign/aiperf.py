"""AIPerf's profile_export.jsonl: one record per request, with the gaps between the chunks of its stream.

The format is documented in docs/tutorials/working-with-profile-exports.md (github.com/ai-dynamo/aiperf).
Metrics have a value and a unit; `inter_chunk_latency` is a list, present only for streamed requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.base.text import plural
from harness.records.foreign import units
from harness.records.foreign.chunks import Requests
from harness.records.foreign.log import SHARED, Log, LogError, Reader, Request, of_objects, overlapping

FORMAT = "AIPerf export"


def _is_one(document: Mapping[str, Any]) -> bool:
    return {"metadata", "metrics"} <= document.keys() or _is_summary(document)


def _is_summary(document: Mapping[str, Any]) -> bool:
    """profile_export_aiperf.json: statistics over all requests."""
    latency = document.get("request_latency")
    return isinstance(latency, dict) and "unit" in latency and "avg" in latency


def _read(records: Sequence[Mapping[str, Any]]) -> Log:
    """The requests of an export. Raises LogError."""
    if any(_is_summary(record) for record in records):
        raise LogError(
            f"an {FORMAT} with statistics over all requests; use profile_export.jsonl from the same folder"
        )
    found = Requests(FORMAT)
    spans = []
    totals = 0
    for number, record in enumerate(records, 1):
        metrics, metadata = record.get("metrics") or {}, record.get("metadata") or {}
        if record.get("error") or ("time_to_first_token" not in metrics and "request_latency" not in metrics):
            found.add_failed()
            continue
        name = f"request {number}"
        prompt = _value(metrics, "input_sequence_length") or 0
        tokens = _value(metrics, "output_sequence_length")
        first_ms, gaps = _ms(metrics, "time_to_first_token"), _ms(metrics, "inter_chunk_latency")
        if "request_start_ns" in metadata and "request_end_ns" in metadata:
            spans.append((metadata["request_start_ns"], metadata["request_end_ns"]))
        if isinstance(gaps, list) and first_ms is not None:
            found.add(name, prompt, first_ms, gaps, tokens)
        else:
            totals += 1
            tpot = _ms(metrics, "inter_token_latency")
            rate = 1e3 / tpot if tpot else None
            found.add_totals(name, Request(tokens, first_ms, rate, prompt or None))
    notes = [f"{plural(totals, 'request')}: totals only: inter_chunk_latency needs streamed requests"]
    return found.log([*(notes if totals else []), *([SHARED] if overlapping(spans) else [])])


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


READERS: tuple[Reader, ...] = (of_objects(FORMAT, _is_one, _read),)
