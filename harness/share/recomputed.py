"""What everybody can compute of a shared record: its figures, its status and its content key. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from harness.analysis import agreement
from harness.analysis.figures import shown_in
from harness.base.files import FAULTS
from harness.base.text import shortened
from harness.dataset import search_rows
from harness.dataset.study import Study
from harness.records import Stored
from harness.records.kinds import Record

TOLERANCE = 1e-6  # relative: the same arithmetic on another CPU
OF_SEARCH: tuple[Literal["verified_n_ctx", "allocated_n_ctx", "limit_bytes"], ...] = (
    *("verified_n_ctx", "allocated_n_ctx", "limit_bytes"),
)

Figures = dict[str, object]
"""Figures and the status of a record, by name."""


def figures_of(stored: Sequence[Stored], study: Study) -> list[Figures]:
    """The figures of each record, in order; empty for one that cannot be analysed. `study`: of them all."""
    figures: dict[Path, Figures] = {}
    for row, fitted, each in zip(study.repeats, study.fitted, study.stored, strict=True):
        claimed = {figure.name: figure.number(row) for figure in shown_in("bundle")}
        figures[each.folder] = {"status": row["status"], **claimed, **fitted}
    return [figures.get(result.folder) or _of_others(result.record) for result in stored]


def _of_others(record: Record) -> Figures:
    try:
        if record["kind"] == "checked":
            return {"verdict": agreement.row(record)["verdict"]}
        if record["kind"] == "searched":
            row = search_rows.search_row(record)
            return {"status": row["status"], **{name: row[name] for name in OF_SEARCH}}
    except FAULTS:  # the study names it
        pass
    return {}


def differences(claimed: Mapping[str, object], computed: Figures) -> list[str]:
    """A sentence for each figure that differs from the record."""
    return [
        f"{name} is {_shown(computed.get(name))} by its record, but {_shown(claimed.get(name))} was claimed"
        for name in dict.fromkeys([*claimed, *computed])
        if not _same(claimed.get(name), computed.get(name))
    ]


def _same(a: object, b: object) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=TOLERANCE)
    return a == b


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return shortened(str(value)) if isinstance(value, str | int | None) else "no single value"


_WEIGHTS = (
    *("kind", "seed", "repo", "revision", "fingerprint", "quant", "format", "synthetic", "header", "packing"),
)
_ENVIRONMENT = ("name", "variables", "toolkit", "lock", "adopted")


def shared_key(record: Record) -> str | None:
    """The content key by cell, options, build, versions, weights, machine and device: a campaign's own has
    paths, UUIDs and sources of weights, which a bundle lacks. None where they are not known: it never got
    ready to run, or it is a check or a published figure."""
    environment = record.get("environment") or {}
    if record["kind"] not in ("measured", "searched") or not environment or "options" not in record:
        return None
    protocol, weights = record.get("protocol") or {}, record["model"]["weights"]
    budget = record.get("memory_budget")
    facts = [
        *(record["cell"], record["stack"], record["variant"], record["asked"].get("options")),
        *(record["options"], record.get("threads"), record["model"]["name"], record["model"].get("shape")),
        [weights.get(name) for name in _WEIGHTS],
        [environment.get(name) for name in _ENVIRONMENT],
        *(record["workload"], record["machine"]["slug"], record.get("device")),
        *(protocol.get("memory_budget"), budget and budget["means"]),
        protocol.get("timeout_s") if record["kind"] == "searched" else None,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def shared_keys(records: Sequence[Record], anonymous: Sequence[Record]) -> dict[str, str]:
    """The shared key for each content key of some records; `anonymous`: the same records as they are shared.
    A key whose records have several shared keys, or share theirs with another, has none."""
    keys: dict[str, set[str]] = {}
    for record, shared in zip(records, anonymous, strict=True):
        if (key := shared_key(shared)) is not None:
            keys.setdefault(record["content_key"], set()).add(key)
    single = {own: shared.pop() for own, shared in keys.items() if len(shared) == 1}
    values = [*single.values()]
    return {own: key for own, key in single.items() if values.count(key) == 1}
