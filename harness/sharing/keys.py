"""Content keys recomputed from what a record says: who changes a fact must change its key. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from harness import plan
from harness.config.sizes import size_bytes
from harness.results.kinds import Record

_SOURCE = (
    "kind",
    "seed",
    "path",
    "repo",
    "file",
    "revision",
)  # of a config's weights; the rest was found later
_FOUND = ("prompt", "prompt_source")


def recomputed(record: Record) -> list[str]:
    """The keys that its facts may have; empty where they are too few: before it was ready, an adopted
    interpreter, an older harness. Several, since a record does not say which file a config named."""
    environment = record.get("environment")
    if record["kind"] not in ("measured", "searched") or not environment or environment.get("adopted"):
        return []
    model, workload = record["model"], dict(record["workload"])
    if not isinstance(model["weights"].get("seed"), int) or "options" not in record:
        return []
    bounded = record["kind"] == "searched" or bool(record.get("memory_budget"))
    protocol = record.get("protocol") or {}
    stack = [environment.get("name"), *(f"{k}={v}" for k, v in (environment.get("variables") or {}).items())]
    stack += environment.get("lock") or []
    if bounded:
        stack.append(str((record.get("memory_budget") or {}).get("means")))
    if record["kind"] == "searched":
        stack.append(f"{protocol.get('timeout_s', 0):g} s a probe")
    budget = protocol.get("memory_budget")
    lengths = {name: value for name, value in workload.items() if name not in _FOUND}
    without = {name: value for name, value in lengths.items() if name != "new_tokens"}
    return [
        plan.key_of(
            record["cell"],
            {
                "model": {"name": model["name"], "shape": model.get("shape"), "weights": weights},
                "stack": record["stack"],
                "options": record["asked"].get("options"),
                "workload": asked,
            },
            record["options"],
            stack,
            model["weights"].get("fingerprint"),
            record["machine"]["slug"],
            record.get("device", ""),
            size_bytes(budget) if budget else None,
        )
        for weights, asked in product(_weights(record), (lengths, without))
    ]


def _weights(record: Record) -> Iterator[dict[str, Any]]:
    """The weights as the config may have named them."""
    known: dict[str, Any] = dict(record["model"]["weights"])
    source = {name: known.get(name) for name in _SOURCE}
    yield source | {"file": None}
    if known["kind"] != "hub" or not isinstance(known.get("file"), str):
        return
    name, quant = known["file"].rpartition("/")[2], str(known.get("quant"))
    for file, revision in product((name, name.replace(quant, "{quant}")), (None, known.get("revision"))):
        yield source | {"file": file, "revision": revision}
