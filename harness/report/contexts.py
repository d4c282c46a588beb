"""How long a context each variant holds, as rows: searched or grown here, published, and by theory. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.dataset.baseline_match import key, matched
from harness.dataset.study import Row, Study, failure, figure, ok
from harness.theory import floors

HOW = {"decode": "decoding", "allocation": "allocation"}
FAILED = ("oom", "error")  # published: what was tried, and has no length
KNOWN = ("name", "model", "stack", "variant", "device", "kind", "status", "reasons")


def rows(study: Study) -> list[Row]:
    """A row a search and a run that grew, each with what was published of its variant; then what was
    published of others. Memory is in bytes, contexts in tokens; a share is that of theory."""
    measured = [row for row in study.cells if row.get("kind") == "measured"]
    sizes = {key(row): row for row in measured}
    grown = [row for row in measured if row.get("workload") == "grow" and figure(row, "max_ctx")]
    ours = [_searched(row, sizes.get(key(row), row)) for row in study.searches] + [_grown(r) for r in grown]
    reported = [row for row in study.cells if row.get("kind") == "reported"]
    reported = [row for row in reported if figure(row, "max_ctx") or row.get("status") in FAILED]
    theirs, alone = matched(study, ours, reported)
    found = [{**row, **_published(theirs.get(str(row["name"])))} for row in ours]
    return _told_apart(found) + [{each: row.get(each) for each in KNOWN} | _published(row) for row in alone]


def held(row: Row) -> bool:
    """Whether a cell's device can hold the context that it reached: a cache that loses what is in it goes on
    past that."""
    reached, most = figure(row, "max_ctx"), theory_n_ctx(row, figure(row, "device_memory_bytes"))
    return reached is None or most is None or reached <= most


def theory_n_ctx(row: Row, memory_bytes: float | None) -> int | None:
    """Tokens of KV cache that a memory holds beside the weights; 0 where not one, null where sizes are not
    known. On a GPU the weights are those that a token reads: an input embedding may stay outside."""
    on_cpu = row.get("device") == "cpu"
    weights = (figure(row, "model_bytes") if on_cpu else None) or figure(row, "weight_bytes_per_token")
    kv = figure(row, "kv_bytes_per_token")
    if memory_bytes is None or weights is None or not kv:
        return None
    return floors.max_ctx(memory_bytes, weights, kv) or 0


def _searched(row: Row, cell: Row) -> dict[str, Any]:
    """`cell`: of the same variant, whose sizes count where the search knows none."""
    n_ctx = figure(row, "verified_n_ctx") if ok(row) else None
    memory = figure(row, "memory_budget_bytes") or figure(row, "limit_bytes")
    predicted = figure(row, "predicted_n_ctx")
    said = {
        "n_ctx": n_ctx,
        "how": HOW.get(str(row.get("verified_by"))) if n_ctx else None,
        "allocated_n_ctx": row.get("allocated_n_ctx") if n_ctx else None,
        "prediction_off": predicted / n_ctx - 1 if n_ctx and predicted else None,
    }
    sizes = row if figure(row, "kv_bytes_per_token") else cell
    return {**row, **said} | _against_theory(n_ctx, sizes, memory, _which(row, "free"))


def _grown(row: Row) -> dict[str, Any]:
    n_ctx = figure(row, "max_ctx")
    memory = figure(row, "memory_budget_bytes") or figure(row, "device_memory_bytes")
    said = {"n_ctx": n_ctx, "is_target": bool(row.get("max_ctx_is_target")), "how": "growing"}
    return {**row, **said} | _against_theory(n_ctx, row, memory, _which(row, "all"))


def _which(row: Row, unstated: str) -> str:
    """`budget (cgroup v1)`, `free VRAM`."""
    stated = row.get("limit_stated", figure(row, "memory_budget_bytes") is not None)
    means = f" ({row['budget_means']})" if row.get("budget_means") else ""
    return ("budget" if stated else f"{unstated} {'RAM' if row.get('device') == 'cpu' else 'VRAM'}") + means


def _against_theory(n_ctx: float | None, sizes: Row, memory: float | None, which: str) -> dict[str, Any]:
    theory = theory_n_ctx(sizes, memory)
    return {
        "memory_bytes": memory,
        "memory_is": which if memory else None,
        "theory_n_ctx": theory,
        "share": n_ctx / theory if n_ctx and theory else None,
    }


def _published(row: Row | None) -> dict[str, Any]:
    if row is None:
        return {}
    n_ctx, memory = figure(row, "max_ctx"), figure(row, "device_memory_bytes")
    against = _against_theory(n_ctx, row, memory, str(row.get("machine")))
    told = {"n_ctx": n_ctx, "is_target": bool(row.get("max_ctx_is_target")), "failure": failure(row)}
    return {f"published_{name}": value for name, value in (told | against).items()}


def _told_apart(found: Sequence[Row]) -> list[Row]:
    """A variant that was both searched and grown has two rows, and two names."""
    names = Counter(str(row["name"]) for row in found)
    return [
        {**row, "name": f"{row['name']} ({row['how'] or 'searched'})"} if names[str(row["name"])] > 1 else row
        for row in found
    ]
