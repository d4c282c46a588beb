"""What a record must hold for its readers, by kind: a form of types, held against one record. Pure."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from harness.results.sensed import COOLED, SENSORS
from harness.results.values import (
    ABOVE_0,
    COUNT,
    FROM_0,
    MAPPING,
    NAMES,
    NUMBER,
    PAIRS,
    POSITIVE,
    SWITCH,
    TEXT,
    TIME,
    TRIPLES,
    Form,
    Maybe,
    Value,
    schema_error,
)
from harness.theory.ggml import element_bytes
from harness.theory.shapes import Shape

Record = dict[str, Any]
OUTCOMES = ("ok", "oom", "error", "crash", "timeout", "interrupted", "refused", "unavailable")

OUTCOME = Value(f"one of {', '.join(OUTCOMES)}", lambda value: value in OUTCOMES)

_TYPES = {"str": TEXT, "int": POSITIVE, "bool": SWITCH, "float": ABOVE_0, "int | None": Maybe(POSITIVE)}
_SHAPE_KEYS = {field.name for field in fields(Shape)}
SHAPE = {
    field.name + ("" if field.default is MISSING else "?"): _TYPES[str(field.type)] for field in fields(Shape)
}

# Of the machine, before a campaign.
_FINDING = {"level": TEXT, "what": TEXT, "found": TEXT} | dict.fromkeys(("effect?", "fix?"), Maybe(TEXT))

# Of every kind.
_COMMON = {
    "cell": TEXT,
    "repeat": POSITIVE,
    "content_key": TEXT,
    "started_utc": TIME,
    "outcome": OUTCOME,
    "reason?": Maybe(TEXT),
    "stack": TEXT,
    "variant": TEXT,
    "campaign": {"id": TEXT, "name": TEXT, "command_line?": [TEXT]},
    "doctor?": [_FINDING],
    "tokens": COUNT,
}
_MACHINE = {
    "slug": TEXT,
    "cpu": Maybe(TEXT),
    "physical_cores": Maybe(COUNT),
    "memory_bytes": Maybe(COUNT),
    "usable_cpus?": Maybe(COUNT),
    "last_level_cache_bytes": Maybe(COUNT),
    "page_bytes?": Maybe(POSITIVE),
    "gpus": [
        {"name": TEXT, "memory_bytes": Maybe(COUNT)}
        | dict.fromkeys(("uuid?", "driver?", "compute_capability?"), Maybe(TEXT))
    ],
}
_WORKLOAD = {"kind": TEXT, "prompt_tokens": COUNT, "new_tokens": COUNT}

# What a stack says of itself, after loading and again after the run.
_SIZES = {"model_bytes?": Maybe(COUNT), "parameters?": Maybe(COUNT), "input_embedding_bytes?": Maybe(COUNT)}
LOADED = _SIZES | {
    "tied?": SWITCH,
    "versions?": {...: TEXT},
    "quant?": Maybe(TEXT),
    "kernels?": NAMES,
    "kernel_asked?": Maybe(TEXT),
    "devices?": Maybe(MAPPING),
    "options?": Maybe({"n_ctx?": Maybe(COUNT), "threads?": Maybe(COUNT)}),
    "kv_read?": Maybe(TEXT),
    "kv_bytes_per_token?": Maybe(COUNT),
    "window?": Maybe(COUNT),
    "trained_context?": Maybe(COUNT),
    "leftovers?": Maybe([TEXT]),
    "warnings?": Maybe([TEXT]),
    "memory?": Maybe({...: {...: COUNT}}),
    "heap_free_bytes?": Maybe(COUNT),
    "allocator?": Maybe({"allocated_bytes?": Maybe(COUNT), "reserved_bytes?": Maybe(COUNT)}),
}
COUNTERS = {
    "stack_decode_ms?": Maybe(NUMBER),
    "sampling_ms?": NUMBER,
    "device_tokens?": Maybe(COUNT),
    "compilations?": Maybe(COUNT),
    "allocator?": Maybe(dict.fromkeys(("peak_allocated_bytes?", "peak_reserved_bytes?"), Maybe(COUNT))),
    "allocator_retries?": Maybe(PAIRS),
}
PRESSURES = {"pressure?": {...: NUMBER}, "worker_pressure?": {...: NUMBER}}
MARKED = ("rss_anon_bytes", "rss_file_bytes", "vram_bytes")
MEASURED = _COMMON | {
    "asked": {"device": TEXT},
    "device?": TEXT,
    "harness?": {"version": TEXT, "git_commit": Maybe(TEXT)},
    "machine": _MACHINE,
    "model": {
        "name": TEXT,
        "shape?": Maybe(SHAPE),
        "weights": {
            "kind": TEXT,
            "synthetic?": SWITCH,
            "file?": Maybe(TEXT),
            "file_bytes?": Maybe(COUNT),
            "header?": Maybe(
                {"model_bytes": COUNT, "parameters": COUNT, "input_embedding_bytes": COUNT, "tied": SWITCH}
                | {"bytes_by_type?": {...: COUNT}}
            ),
            "attention?": Maybe({"layers": COUNT, "kv_heads": COUNT, "head_dim": COUNT}),
        },
    },
    "workload": _WORKLOAD | {"prompt?": [COUNT], "prompt_source?": TEXT},
    "bandwidth_probes?": [{"read_bytes_per_s": ABOVE_0}],
    "matrix_probe?": Maybe({"flops_per_s": ABOVE_0}),
    "options?": MAPPING,
    "threads?": POSITIVE,
    "memory_budget?": {"bytes": POSITIVE, "means": TEXT},
    "known_failure?": [TEXT],
    "loaded?": Maybe(LOADED),
    "done?": Maybe(
        {
            "peak_rss_bytes?": Maybe(COUNT),
            "heap_free_bytes?": Maybe(COUNT),
            "start_ns?": COUNT,
            "memory_steps?": TRIPLES,
            "counters?": COUNTERS,
            "facts_changed?": LOADED,
        }
    ),
    "timing": {"wall_s?": Maybe(NUMBER), "first_token_ns?": COUNT, "last_token_ns?": COUNT},
    "memory": {
        "marks?": [{"at": TEXT, "rss_weights_bytes?": Maybe(COUNT)} | dict.fromkeys(MARKED, Maybe(COUNT))],
        "peak_rss_bytes?": Maybe(COUNT),
        "peak_rss_anon_bytes?": Maybe(COUNT),
        "peak_rss_file_bytes?": Maybe(COUNT),
        "peak_vram_bytes?": Maybe(COUNT),
        "after_load_rss_bytes?": Maybe(COUNT),
        "after_load_vram_bytes?": Maybe(COUNT),
        "rusage?": Maybe({"max_rss_bytes?": Maybe(COUNT)}),
    },
    "sensors?": SENSORS,
    "cooled?": COOLED,
    "attempt?": POSITIVE,
    "waited_for_quiet?": {"waited_s": NUMBER, "busy_share": Maybe(NUMBER)},
}
# What the verdicts read besides, of a repeat that came to its end.
FINISHED = {
    "device": TEXT,
    "options": MAPPING,
    "threads": POSITIVE,
    "conditions": PRESSURES,
    "loaded": LOADED,
    "done": {
        "counters": COUNTERS,
        "facts_changed": MAPPING,
        "warmup": {"agreed": SWITCH},
        "major_faults": COUNT,
        "cpu_wait_ns?": Maybe(COUNT),
        "flushes?": PAIRS,
    },
}
REPORTED = _COMMON | {
    "device": TEXT,
    "machine": _MACHINE,
    "model": {"name": TEXT, "shape": Maybe(SHAPE), "weights": {"kind": TEXT}},
    "workload": _WORKLOAD,
    "n_counts_from": COUNT,
    "source": {
        "title": TEXT,
        "url": TEXT,
        "license": TEXT,
        "tables": {...: TEXT},
        "series": Maybe(TEXT),
        "prefill_series": Maybe(TEXT),
        "notes": [TEXT],
    },
    "reported": {
        "bpw": Maybe(ABOVE_0),
        "prefill_ms": Maybe(ABOVE_0),
        "B_ms": Maybe(NUMBER),
        "W_tokens_per_ms": Maybe(ABOVE_0),
        "file_bytes": Maybe(COUNT),
        "model_bytes": Maybe(COUNT),
        "model_buffer_bytes": Maybe(COUNT),
        "vram_bytes": Maybe(COUNT),
        "kv_buffer_bytes": Maybe(COUNT),
        "kv_buffer_n_ctx": Maybe(POSITIVE),
        "max_ctx": Maybe(POSITIVE),
        "max_ctx_is_target": SWITCH,
        "perplexity": Maybe(ABOVE_0),
        "perplexity_stderr?": Maybe(ABOVE_0),
        "printed": {...: {...: TEXT}},
    },
}
CHECKED = _COMMON | {
    key: MEASURED[key] for key in ("asked", "device?", "machine", "model", "workload", "options?")
}
CHECKED["check"] = {
    "asked": {"windows": PAIRS, "seconds": ABOVE_0, "reference": Maybe({"stack": TEXT, "variant": TEXT})},
    "speaks_for": [TEXT],
    "unchecked?": TEXT,
    "reference?": {"name": TEXT, "why": TEXT},
    "left_out?": PAIRS,
    "depths?": [
        {
            "n": POSITIVE,
            "positions": POSITIVE,
            "not_finite": COUNT,
            "reference_not_finite": COUNT,
            **dict.fromkeys(
                ("relative_error", "relative_error_max", "top1_agreement", "kl_nats"), Maybe(FROM_0)
            ),
            "near_ties": Maybe(COUNT),
        }
    ],
}
_LENGTH = Maybe(POSITIVE)
_PROBE = {
    "n_ctx": POSITIVE,
    "limit_bytes": POSITIVE,
    "filled": SWITCH,
    "fits": Maybe(SWITCH),
    "allocates": SWITCH,
    "reason": Maybe(TEXT),
    "peak_bytes": Maybe(COUNT),
    "seconds": NUMBER,
    "fill_s": Maybe(NUMBER),
    "speed_ratio": Maybe(NUMBER),
    "left_out": Maybe(TEXT),
}
SEARCHED = _COMMON | {
    key: MEASURED[key] for key in ("asked", "device?", "machine", "model", "workload", "options?")
}
SEARCHED |= {
    "loaded?": Maybe(LOADED),
    "timing": {"wall_s?": Maybe(NUMBER)},
    "memory_budget?": Maybe({"bytes": POSITIVE, "means": TEXT}),
    "search": {
        "probes": [_PROBE],
        **dict.fromkeys(("predicted_n_ctx?", "predicted_allocated_n_ctx?"), _LENGTH),
        **dict.fromkeys(("verified_n_ctx?", "allocated_n_ctx?", "granule?", "limit_bytes?"), _LENGTH),
        **dict.fromkeys(("verified_by?", "limit_reason?", "not_filled?", "predicted_from?"), Maybe(TEXT)),
        "need?": Maybe({...: FROM_0}),
        "account_s?": NUMBER,
    },
}
KINDS: dict[str, Form] = {
    "measured": MEASURED,
    "reported": REPORTED,
    "checked": CHECKED,
    "searched": SEARCHED,
}
BEGUN = {"started_utc": TIME, "workload": {"prompt_tokens": COUNT}}


def wrong_with(record: Record) -> str | None:
    """Why readers could not use this record, as a clause; null when they can."""
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        return f"its kind must be one of {', '.join(KINDS)}"
    if wrong := schema_error(record, KINDS[kind]):
        return wrong
    shape = record["model"].get("shape") or {}
    if unknown := [name for name in shape if name not in _SHAPE_KEYS]:
        return f"model.shape.{unknown[0]} is no part of a shape"
    if kind == "checked":
        return _checked(record)
    return _measured(record) if kind == "measured" else None


def _measured(record: Record) -> str | None:
    """What holds between the values of a measured record."""
    loaded, timing = record.get("loaded") or {}, record["timing"]
    if ("first_token_ns" in timing) != ("last_token_ns" in timing):
        return "timing must have both first_token_ns and last_token_ns, or none"
    timed = "last_token_ns" in timing
    if timed and record["tokens"] > 1 and timing["last_token_ns"] <= timing["first_token_ns"]:
        return "timing.last_token_ns must be after first_token_ns"
    if "prompt_source" in record["workload"]:
        weights = record["model"]["weights"]
        if missing := [n for n, of in (("prompt", record["workload"]), ("file", weights)) if n not in of]:
            return f"{missing[0]} is missing beside workload.prompt_source"
    if wrong := _weights(record, loaded):
        return wrong
    if record["outcome"] != "ok":
        return None
    if wrong := schema_error(record, FINISHED):
        return wrong
    if record["tokens"] and not timed:
        return "timing.last_token_ns is missing"
    after = loaded | record["done"]["facts_changed"]
    for facts, name in ((loaded, "loaded"), (after, "done.facts_changed")):
        if wrong := schema_error(facts, LOADED, name):
            return wrong
        if facts.get("kernel_asked") is not None and "kernels" not in facts:
            return f"{name}.kernels is missing"
    return None


def _checked(record: Record) -> str | None:
    """What a check that came to its end has: every depth with an error, or with what is no number."""
    if record["outcome"] != "ok":
        return None
    check = record["check"]
    if not check.get("depths") or "reference" not in check:
        return "check.depths and check.reference must be there where the outcome is ok"
    for index, depth in enumerate(check["depths"]):
        if depth["relative_error"] is None and not depth["not_finite"] + depth["reference_not_finite"]:
            return f"check.depths[{index}].relative_error is missing"
    return None


def _weights(record: Record, loaded: Record) -> str | None:
    """What the bytes of a decode step are counted from."""
    said = "tied" in loaded and loaded.get("model_bytes") is not None  # the stack counted what it loaded
    sizes = loaded if said else record["model"]["weights"].get("header") or loaded
    if not sizes.get("tied", True) and sizes.get("model_bytes") is not None:
        embedding = sizes.get("input_embedding_bytes")
        if embedding is None:
            return "input_embedding_bytes is missing beside model_bytes"
        if embedding > sizes["model_bytes"]:
            return "input_embedding_bytes must be at most model_bytes"
    for name in ("type_k", "type_v"):
        try:
            element_bytes(record.get("options", {}).get(name, "f16"))
        except (KeyError, TypeError):
            return f"options.{name} must be one of ggml's types"
    return None
