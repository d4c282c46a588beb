"""What a record must hold for its readers, by kind: a form of types, held against one record. Pure.

A form is a Value, Maybe(form) for what may be null, [form] for a list, {...: form} for a mapping of any keys,
or {"key": form} for one with these keys, where "key?" may be missing. Other keys are welcome: nobody reads
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from typing import Any

from harness.theory.ggml import element_bytes
from harness.theory.shapes import Shape

Record = dict[str, Any]
Form = Any
"""Value | Maybe | list | dict, as the module says; recursive, which mypy has no name for here."""

OUTCOMES = ("ok", "oom", "error", "crash", "timeout", "interrupted", "refused", "unavailable")

# What is more, or nearer to 0, is damage: no figure comes near, and products and ratios of it would overflow.
_MOST, _LEAST = 2**63, 2**-63


@dataclass(frozen=True)
class Value:
    """One value: what it must be, in words, and how that is seen."""

    must_be: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Maybe:
    """The form, or null."""

    form: Form


def _is_time(value: object) -> bool:
    try:
        return datetime.fromisoformat(str(value)).tzinfo is not None
    except ValueError:
        return False


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _MOST  # which neither infinity nor NaN is


TEXT = Value("text", lambda value: isinstance(value, str))
COUNT = Value("a whole number from 0", lambda value: type(value) is int and 0 <= value < _MOST)
POSITIVE = Value("a whole number from 1", lambda value: type(value) is int and 0 < value < _MOST)
NUMBER = Value("a number", _is_number)
ABOVE_0 = Value("a number above 0", lambda value: _is_number(value) and value > _LEAST)
SWITCH = Value("true or false", lambda value: isinstance(value, bool))
TIME = Value("a time with its zone", lambda value: isinstance(value, str) and _is_time(value))
MAPPING = Value("a mapping", lambda value: isinstance(value, dict))
NAMES = Value(
    "names", lambda value: isinstance(value, list | dict) and all(isinstance(name, str) for name in value)
)
OUTCOME = Value(f"one of {', '.join(OUTCOMES)}", lambda value: value in OUTCOMES)

_TYPES = {"str": TEXT, "int": POSITIVE, "bool": SWITCH, "float": ABOVE_0, "int | None": Maybe(POSITIVE)}
_SHAPE_KEYS = {field.name for field in fields(Shape)}
SHAPE = {
    field.name + ("" if field.default is MISSING else "?"): _TYPES[str(field.type)] for field in fields(Shape)
}

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
    "tokens": COUNT,
}
_MACHINE = {
    "slug": TEXT,
    "cpu": Maybe(TEXT),
    "physical_cores": Maybe(COUNT),
    "memory_bytes": Maybe(COUNT),
    "last_level_cache_bytes": Maybe(COUNT),
    "gpus": [{"name": TEXT, "memory_bytes": Maybe(COUNT), "uuid?": Maybe(TEXT), "driver?": Maybe(TEXT)}],
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
    "memory?": Maybe({...: {...: COUNT}}),
}
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
            "header?": Maybe(
                {"model_bytes": COUNT, "parameters": COUNT, "input_embedding_bytes": COUNT, "tied": SWITCH}
            ),
            "attention?": Maybe({"layers": COUNT, "kv_heads": COUNT, "head_dim": COUNT}),
        },
    },
    "workload": _WORKLOAD | {"prompt?": [COUNT], "prompt_source?": TEXT},
    "bandwidth_probes?": [{"read_bytes_per_s": ABOVE_0}],
    "matrix_probe?": Maybe({"flops_per_s": ABOVE_0}),
    "options?": MAPPING,
    "threads?": POSITIVE,
    "loaded?": Maybe(LOADED),
    "done?": Maybe({"peak_rss_bytes?": Maybe(COUNT)}),
    "timing": {"wall_s?": Maybe(NUMBER), "first_token_ns?": COUNT, "last_token_ns?": COUNT},
    "memory": {
        "peak_rss_bytes?": Maybe(COUNT),
        "peak_rss_anon_bytes?": Maybe(COUNT),
        "peak_rss_file_bytes?": Maybe(COUNT),
        "peak_vram_bytes?": Maybe(COUNT),
        "rusage?": Maybe({"max_rss_bytes?": Maybe(COUNT)}),
    },
}
# What the verdicts read besides, of a repeat that came to its end.
FINISHED = {
    "device": TEXT,
    "options": MAPPING,
    "threads": POSITIVE,
    "conditions": {"pressure?": {...: NUMBER}},
    "loaded": LOADED,
    "done": {
        "counters": {"stack_decode_ms?": Maybe(NUMBER), "sampling_ms?": NUMBER},
        "facts_changed": MAPPING,
        "warmup": {"agreed": SWITCH},
        "major_faults": COUNT,
        "cpu_wait_ns?": Maybe(COUNT),
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
        "printed": {...: {...: TEXT}},
    },
}
KINDS: dict[str, Form] = {"measured": MEASURED, "reported": REPORTED}
BEGUN = {"started_utc": TIME, "workload": {"prompt_tokens": COUNT}}


def wrong_with(record: Record) -> str | None:
    """Why readers could not use this record, as a clause; null when they can."""
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        return f"its kind must be one of {', '.join(KINDS)}"
    if wrong := misfit(record, KINDS[kind]):
        return wrong
    shape = record["model"].get("shape") or {}
    if unknown := [name for name in shape if name not in _SHAPE_KEYS]:
        return f"model.shape.{unknown[0]} is no part of a shape"
    return _measured(record) if kind == "measured" else None


def misfit(value: Any, form: Form, where: str = "") -> str | None:
    """Where and how a value does not fit its form, as a clause; null when it does."""
    if isinstance(form, Value):
        return None if form.holds(value) else f"{where or 'it'} must be {form.must_be}"
    if isinstance(form, Maybe):
        return None if value is None else misfit(value, form.form, where)
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{where or 'it'} must be a list"
        return _first(misfit(each, form[0], f"{where}[{index}]") for index, each in enumerate(value))
    if not isinstance(value, dict):
        return f"{where or 'it'} must be a mapping"
    inside = f"{where}." if where else ""
    if ... in form:
        return _first(misfit(each, form[...], f"{inside}{key}") for key, each in value.items())
    for key, of in form.items():
        name = key.rstrip("?")
        if name not in value:
            if key == name:
                return f"{inside}{name} is missing"
        elif wrong := misfit(value[name], of, f"{inside}{name}"):
            return wrong
    return None


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
    if wrong := misfit(record, FINISHED):
        return wrong
    if record["tokens"] and not timed:
        return "timing.last_token_ns is missing"
    after = loaded | record["done"]["facts_changed"]
    for facts, name in ((loaded, "loaded"), (after, "done.facts_changed")):
        if wrong := misfit(facts, LOADED, name):
            return wrong
        if facts.get("kernel_asked") is not None and "kernels" not in facts:
            return f"{name}.kernels is missing"
    return None


def _weights(record: Record, loaded: Record) -> str | None:
    """What the bytes of a decode step are counted from."""
    weights = record["model"]["weights"]
    sizes = weights.get("header") or loaded
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


def _first(clauses: Any) -> str | None:
    return next((clause for clause in clauses if clause), None)
