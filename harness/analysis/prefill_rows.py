"""A record's sweep of prefill passes against theory: its row, MFU and MBU, kernel changes, flags. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from harness.analysis import repeat_figures, traffic
from harness.analysis.columns import PrefillDepth, PrefillRow, Utilisation
from harness.analysis.prefill import Passes, Prefill, analyse
from harness.analysis.prefill_fit import Estimate
from harness.analysis.warnings import Flag, Warnings
from harness.base.text import plural
from harness.records.kinds import Record
from harness.stacks.header import stacks
from harness.theory import floors
from harness.theory.floors import Ceiling, Demand, Pass

NEAR = 4  # tokens after a known change within which the kernel's start confirms it: half a tile of MMQ
SAME = 0.1  # ridges that differ by less, or within the interval, agree
FLOOR_POINTS = 40  # of a line on a logarithmic axis
NAMED = 3  # faster than possible, in a flag


def analysed(record: Record, depths: Mapping[int, Passes]) -> dict[int, Prefill]:
    """The analysis at each depth. Raises ValueError for latencies that are not positive."""
    least = min(depths, default=0)
    # Most tokens in one pass over the weights: the record's, else the stack's default; None: all.
    header = stacks().get(record["stack"])
    option = header.options.get("n_ubatch") if header else None
    chunk = (record.get("options") or {}).get("n_ubatch") or (option and option.default)
    by_depth = {}
    for depth, passes in sorted(depths.items()):
        ahead = [after for after, _ in _kernel_changes(record) if depth == least and after >= passes.n.max()]
        by_depth[depth] = analyse(passes, chunk if isinstance(chunk, int) else None, min(ahead, default=None))
    return by_depth


def row(
    record: Record, depths: Mapping[int, Passes], by_depth: Mapping[int, Prefill], bandwidth: float | None
) -> PrefillRow:
    """The figures of a sweep at its least depth, which is an empty cache but where none was measured, and a
    part of them at the others. `by_depth`: of each, at least one. `bandwidth`: measured on its machine,
    bytes/s."""
    least = min(depths)
    passes, found = depths[least], by_depth[least]
    longest = float(passes.n.max())
    needs, ceiling = traffic.prefill_demand(record), traffic.prefill_ceiling(record)
    bandwidth = None if traffic.elsewhere_in_memory(record) else bandwidth
    theory = {
        which: floors.prefill_ridge(needs, ceiling, which) if needs and ceiling and not least else None
        for which in ("every", "last")
    }
    seen = [(after, then) for after, then in _kernel_changes(record) if _is_seen(found, after)]
    return {
        **_at_depth(least, passes, found),
        "rounds": found.rounds,
        "shortest_n": found.shortest_n,
        "plateau_ci95_ms": _ends(found.plateau),
        "slope_ci95_ms": _ends(found.slope),
        "quadratic_ms": found.quadratic_ms,
        "ridge_theory": theory,
        "bytes_per_s": ceiling.bytes_per_s if ceiling else None,
        "flops": ceiling.flops if ceiling else None,
        "floors": None if least else _floors(needs, ceiling, longest),
        "comparison": _comparison(found, needs, ceiling, theory["last"], seen),
        "steps": [{"n": step.n, "jump_ms": step.jump_ms} for step in found.steps],
        "ttft": [
            {
                "n": first.n,
                "ms": _value(first.ms),
                "ci95_ms": _positive(first.ms),
                "how": first.how,
                "reason": first.reason,
            }
            for first in found.first_tokens
            if not least
        ],
        "utilisation": _utilisation(passes, least, needs, ceiling, bandwidth),
        "depths": [
            _at_depth(depth, deeper, by_depth[depth])
            for depth, deeper in sorted(depths.items())
            if depth > least
        ],
    }


def faster_than_possible(record: Record, depths: Mapping[int, Passes], bandwidth: float | None) -> list[Flag]:
    """A flag where passes took under 90% of the time to read the weights, or to compute, at the higher
    ceiling: the clock was read before the device was done."""
    needs, at_most = traffic.prefill_demand(record), traffic.highest_ceiling(record, bandwidth)
    if needs is None or at_most is None:
        return []
    # Weights and cache may be smaller than by the shape, which knows no types of the cache.
    loaded, kv = traffic.weight_bytes_per_token(record), traffic.kv_bytes_per_token(record)
    needs = floors.with_kv(needs, min(needs.kv_bytes_per_token, kv or math.inf))
    fewer = max(0.0, needs.weight_bytes_per_token - (loaded or math.inf))
    cached = traffic.cache_bytes(record) + fewer
    fast = []
    for depth, passes in depths.items():
        for length in passes.lengths:
            took = passes.median_ms(length)
            work = floors.cost(needs, Pass(int(length), depth))
            least = max((work.bytes - cached) / at_most.bytes_per_s, work.flops / at_most.flops) * 1e3
            if took < floors.UNSYNCHRONISED * least:
                fast.append((int(length), took, least))
    if not fast:
        return []
    which = "; ".join(f"{n} tokens in {took:.2f} ms, at least {least:.2f}" for n, took, least in fast[:NAMED])
    more = f" and {len(fast) - NAMED} more lengths" if len(fast) > NAMED else ""
    return [Warnings.prefill_faster_than_limit.flag(passes=which + more)]


def _at_depth(depth: int, passes: Passes, prefill: Prefill) -> PrefillDepth:
    return {
        "depth": depth,
        "longest_n": prefill.longest_n,
        "longest_ms": passes.median_ms(prefill.longest_n),
        "kernel_from_n": prefill.kernel_from_n,
        "plateau_ms": _value(prefill.plateau),
        "slope_ms": _value(prefill.slope),
        "ridge_n": _value(prefill.ridge),
        "ridge_ci95": _ends(prefill.ridge),
        "ridge_reason": prefill.ridge_reason,
    }


def _kernel_changes(record: Record) -> list[tuple[int, str]]:
    """Known changes of kernel of the variant: the longest pass before, and what follows."""
    header = stacks().get(record["stack"])
    changes = header.kernel_changes if header else ()
    return [(change.longest, change.then) for change in changes if change.variant in record["variant"]]


def _is_seen(prefill: Prefill, after: int) -> bool:
    """Whether the sweep shows this change: a step there, or where the last kernel begins."""
    at_step = any(step.n == after + 1 for step in prefill.steps)
    start = prefill.kernel_from_n
    return at_step or (start is not None and start > 1 and abs(start - after - 1) <= NEAR)


def _utilisation(
    passes: Passes,
    depth: int,
    needs: Demand | None,
    ceiling: Ceiling | None,
    bandwidth: float | None,
) -> list[Utilisation]:
    """MFU and MBU at lengths that double, and at the longest."""
    if needs is None:
        return []
    rows: list[Utilisation] = []
    lengths = passes.lengths
    lengths_shown = {float(2**power) for power in range(24)} | {float(lengths[-1])}
    for length in lengths[np.isin(lengths, list(lengths_shown))]:
        took = passes.median_ms(length) / 1e3
        work = floors.cost(needs, Pass(int(length), depth))
        rows.append(
            {
                "n": int(length),
                "ms": took * 1e3,
                "mfu": work.flops / took / ceiling.flops if ceiling else None,
                "mbu": work.bytes / took / ceiling.bytes_per_s if ceiling else None,
                "mbu_measured": work.bytes / took / bandwidth if bandwidth else None,
            }
        )
    return rows


def _floors(
    needs: Demand | None, ceiling: Ceiling | None, longest: float
) -> dict[str, list[list[float]]] | None:
    """Theory's least ms by lm_head, as [n, ms], up to the longest pass."""
    if needs is None or ceiling is None:
        return None
    lengths = np.unique(np.geomspace(1, longest, FLOOR_POINTS).round()).astype(int)
    return {
        which: [
            [int(n), round(floors.prefill_floor_s(needs, ceiling, int(n), which) * 1e3, 4)] for n in lengths
        ]
        for which in ("every", "last")
    }


def _comparison(
    prefill: Prefill,
    needs: Demand | None,
    ceiling: Ceiling | None,
    theory: float | None,
    seen: Sequence[tuple[int, str]],
) -> str | None:
    """How the measured ridge differs from theory's (lm_head on the last token), and what makes it differ: the
    ridge is the plateau over the time of a token, so its ratio is the ratio of both."""
    if needs is None or ceiling is None or theory is None or prefill.slope is None:
        return None
    read_ms = needs.weight_bytes_per_token / ceiling.bytes_per_s * 1e3
    token_ms = 2e3 * needs.layer_params / ceiling.flops
    changes = ", ".join(f"past {plural(after, 'token')} {what}" for after, what in seen)
    rate = f"at {ceiling.flops / 1e12:.0f} TFLOP/s"
    why = f"a further token takes {prefill.slope.value / token_ms:.1f} times its computing {rate}"
    if prefill.plateau:
        why = (
            f"the plateau takes {prefill.plateau.value / read_ms:.1f} times the reading of the weights, {why}"
        )
    why += f"; the stack changes {changes}" if changes else ""
    if not prefill.ridge:
        return f"{prefill.ridge_reason}; in theory {theory:.0f}: {why}"
    both = f"({prefill.ridge.value:.0f}, theory {theory:.0f})"
    low, high = prefill.ridge.ends or (math.inf, 0.0)  # no interval: it holds nothing
    agrees = (low or 0.0) <= theory <= (math.inf if high is None else high)
    if agrees or abs(prefill.ridge.value / theory - 1) < SAME:
        return f"close to theory {both}, where both roofs differ alike: {why}"
    return f"{'later' if prefill.ridge.value > theory else 'earlier'} than in theory {both}: {why}"


def _value(estimate: Estimate | None) -> float | None:
    return estimate.value if estimate else None


def _positive(estimate: Estimate | None) -> list[float | None] | None:
    low, high = (estimate and estimate.ends) or (None, None)
    return None if low is None or high is None else repeat_figures.positive(low, high)


def _ends(estimate: Estimate | None) -> list[float | None] | None:
    return [*estimate.ends] if estimate and estimate.ends else None
