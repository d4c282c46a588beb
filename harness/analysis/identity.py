"""The identity columns that rows of every kind of record share: cell, model, stack, machine. Pure."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `harness theory` reads records without their types, which take longer to import
    from harness.analysis.columns import Identity
    from harness.records.kinds import Record
    from harness.records.parts import Gpu


SERVER = "server"  # the device of a record whose tokens a server in another process computed


def identity(record: Record) -> Identity:
    """Cell, model, stack, variant, machine, device, content key, campaign and time of a record."""
    return {
        "cell": record["cell"],
        "model": record["model"]["name"],
        "stack": record["stack"],
        "variant": record["variant"],
        "machine": record["machine"]["slug"],
        "device": device(record),
        "content_key": record["content_key"],
        "campaign": record["campaign"]["id"],
        "started_utc": record["started_utc"],
    }


def computes(record: Record) -> str | None:
    """What decides logits besides the options: packages, the runner's code, and the weights by their content;
    None where it never got ready to run."""
    if not (environment := record.get("environment")):
        return None
    known = [environment.get("lock"), environment.get("runner"), weights_content(record)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def weights_content(record: Record) -> str | None:
    """The fingerprint of its weights without the times of their files: that of a copy is the same, and of
    weights that were made again. Null: it has none."""
    if not (fingerprint := record["model"]["weights"].get("fingerprint")):
        return None
    parts = str(fingerprint).split("-")
    if len(parts) == 4:  # headers, size, times, content; of a checkpoint in earlier records: all, content
        del parts[2]
    return "-".join(parts)


def device(record: Record) -> str | None:
    """The device it ran on, else the requested one."""
    found: str | None = record.get("device", record.get("asked", {}).get("device"))
    return found


def recorded_gpu(record: Record) -> Gpu | None:
    """The GPU it ran on, of all that the machine has; None for a CPU or a server, and where several may be
    meant."""
    on, gpus = device(record), record["machine"].get("gpus") or []
    if on in ("cpu", SERVER):
        return None
    of = [gpu for gpu in gpus if gpu.get("uuid") == on] or gpus
    return of[0] if len(of) == 1 else None


def weights(record: Record) -> str:
    """`synthetic`, or where the weights come from (path, hub); `none` for a stack that loads none."""
    stored = record["model"]["weights"]
    if record.get("loaded") and stored["kind"] == "synthetic" and "fingerprint" not in stored:
        return "none"
    return "synthetic" if stored.get("synthetic", stored["kind"] == "synthetic") else str(stored["kind"])
