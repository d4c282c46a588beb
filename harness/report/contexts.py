"""The longest context of each variant, as rows: searched or grown here, published, and by theory. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.dataset.baseline_match import key, matched
from harness.dataset.study import Row, Study, failure, figure, ok
from harness.theory import floors

HOW = {"decode": "decoding", "allocation": "allocation"}
FAILED = ("oom", "error")  # published: tried, without a length
KNOWN = ("name", "model", "stack", "variant", "device", "kind", "status", "reasons")


def rows(study: Study) -> list[Row]:
    """One row per search and per growing run, with the published figures of its variant; then the published
    figures of other variants. Memory in bytes, contexts in tokens; `share`: context over that of theory."""
    measured = [row for row in study.cells if row.get("kind") == "measured"]
    sizes = {key(row): row for row in measured}
    growing = [row for row in measured if row.get("workload") == "grow" and figure(row, "max_ctx")]
    ours = [_from_search(row, sizes.get(key(row), row)) for row in study.searches] + [
        _from_growth(r) for r in growing
    ]
    reported = [row for row in study.cells if row.get("kind") == "reported"]
    reported = [row for row in reported if figure(row, "max_ctx") or row.get("status") in FAILED]
    theirs, alone = matched(study, ours, reported)
    found = [{**row, **_published(theirs.get(str(row["name"])))} for row in ours]
    return _with_unique_names(found) + [
        {each: row.get(each) for each in KNOWN} | _published(row) for row in alone
    ]


def held(row: Row) -> bool:
    """Whether the device can hold the context that the cell reached. A cache that drops tokens can run past
    its memory."""
    reached, most = figure(row, "max_ctx"), theory_n_ctx(row, figure(row, "device_memory_bytes"))
    return reached is None or most is None or reached <= most


def theory_n_ctx(row: Row, memory_bytes: float | None) -> int | None:
    """Tokens of KV cache that fit in a memory together with the weights; 0 if none fit, null if sizes are
    unknown. On a GPU only the weights read per token count: an input embedding may stay outside."""
    on_cpu = row.get("device") == "cpu"
    weights = (figure(row, "model_bytes") if on_cpu else None) or figure(row, "weight_bytes_per_token")
    kv = figure(row, "kv_bytes_per_token")
    if memory_bytes is None or weights is None or not kv:
        return None
    return floors.max_ctx(memory_bytes, weights, kv) or 0


def _from_search(row: Row, cell: Row) -> dict[str, object]:
    """`cell`: of the same variant; its sizes are used where the search has none."""
    n_ctx = figure(row, "verified_n_ctx") if ok(row) else None
    memory = figure(row, "memory_budget_bytes") or figure(row, "limit_bytes")
    predicted = figure(row, "predicted_n_ctx")
    result: dict[str, object] = {
        "n_ctx": n_ctx,
        "how": HOW.get(str(row.get("verified_by"))) if n_ctx else None,
        "allocated_n_ctx": row.get("allocated_n_ctx") if n_ctx else None,
        "prediction_off": predicted / n_ctx - 1 if n_ctx and predicted else None,
    }
    sizes = row if figure(row, "kv_bytes_per_token") else cell
    return {**row, **result} | _against_theory(n_ctx, sizes, memory, _which(row, "free"))


def _from_growth(row: Row) -> dict[str, object]:
    n_ctx = figure(row, "max_ctx")
    memory = figure(row, "memory_budget_bytes") or figure(row, "device_memory_bytes")
    result = {"n_ctx": n_ctx, "is_target": bool(row.get("max_ctx_is_target")), "how": "growing"}
    return {**row, **result} | _against_theory(n_ctx, row, memory, _which(row, "all"))


def _which(row: Row, unstated: str) -> str:
    """`budget (cgroup v1)`, `free VRAM`."""
    stated = row.get("limit_stated", figure(row, "memory_budget_bytes") is not None)
    mechanism = f" ({row['budget_means']})" if row.get("budget_means") else ""
    return (
        "budget" if stated else f"{unstated} {'RAM' if row.get('device') == 'cpu' else 'VRAM'}"
    ) + mechanism


def _against_theory(n_ctx: float | None, sizes: Row, memory: float | None, which: str) -> dict[str, object]:
    theory = theory_n_ctx(sizes, memory)
    return {
        "memory_bytes": memory,
        "memory_is": which if memory else None,
        "theory_n_ctx": theory,
        "share": n_ctx / theory if n_ctx and theory else None,
    }


def _published(row: Row | None) -> dict[str, object]:
    if row is None:
        return {}
    n_ctx, memory = figure(row, "max_ctx"), figure(row, "device_memory_bytes")
    against = _against_theory(n_ctx, row, memory, str(row.get("machine")))
    result = {"n_ctx": n_ctx, "is_target": bool(row.get("max_ctx_is_target")), "failure": failure(row)}
    return {f"published_{name}": value for name, value in {**result, **against}.items()}


def _with_unique_names(found: Sequence[Row]) -> list[Row]:
    """Rows with unique names: a variant that was both searched and grown has two rows."""
    names = Counter(str(row["name"]) for row in found)
    return [
        {**row, "name": f"{row['name']} ({row['how'] or 'searched'})"} if names[str(row["name"])] > 1 else row
        for row in found
    ]
