"""A record's sweep of prefill passes beside theory: its figures, MFU and MBU, kernel changes, flags. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from harness.analysis.prefill_rows import PrefillDepth, PrefillRow, Utilisation
from harness.analysis.records import traffic
from harness.analysis.records.flags import Flag
from harness.analysis.series import prefill
from harness.analysis.series.line import Floats
from harness.analysis.series.prefill import Prefill
from harness.results.kinds import Record
from harness.stacks.header import Header, stacks
from harness.system.wording import plural
from harness.theory import demand, floors, passes
from harness.theory.floors import Ceiling, Demand

Passes = Mapping[int, tuple[Floats, Floats, Floats]]
"""By depth: lengths, ms and rounds."""

NEAR = 4  # tokens after a known change within which the kernel's start confirms it: half a tile of MMQ
SAME = 0.1  # ridges that differ by less, or within the interval, agree
FLOOR_POINTS = 40  # of a line on a logarithmic axis
NAMED = 3  # faster than possible, in a flag


def by_depth(repeats: Sequence[Mapping[str, Sequence[int]]]) -> Passes:
    """The passes of some prefill.parquet of one cell; the rounds of each repeat are other rounds."""
    found: dict[int, list[Floats]] = {}
    for place, columns in enumerate(repeats):
        depth, n, took, rounds = (
            np.asarray(columns[name], dtype=float) for name in ("depth", "n", "latency_ns", "round")
        )
        passes = np.stack([n, took / 1e6, rounds + place * (rounds.max() + 1)])
        for each in np.unique(depth):
            found.setdefault(int(each), []).append(passes[:, depth == each])
    return {depth: tuple(np.hstack(passes)) for depth, passes in found.items()}


def row(record: Record, depths: Passes, bandwidth: float | None) -> PrefillRow | None:
    """The figures of a sweep at its least depth, which is an empty cache but where none was measured, and a
    part of them at the others. `bandwidth`: measured on its machine, bytes/s. Null without a pass. Raises
    ValueError for latencies that are not positive."""
    if not depths:
        return None
    least = min(depths)
    header = stacks().get(record["stack"])
    chunk = _chunk(record, header)
    known = _kernel_changes(record["variant"], header)
    n, ms, rounds = depths[least]
    longest = float(n.max())
    ahead = min((after for after, _ in known if after >= longest), default=None)
    found = prefill.analyse(n, ms, rounds, chunk, ahead)
    needs, ceiling = traffic.prefill_demand(record), traffic.prefill_ceiling(record)
    theory = {
        which: passes.prefill_ridge(needs, ceiling, which) if needs and ceiling and not least else None
        for which in ("every", "last")
    }
    seen = [each for each in known if _is_seen(found, each[0])]
    return {
        **_at_depth(least, n, ms, found),
        "rounds": found.rounds,
        "shortest_n": found.shortest_n,
        "plateau_ci95_ms": _listed(found.plateau_ci95_ms),
        "slope_ci95_ms": _listed(found.slope_ci95_ms),
        "quadratic_ms": found.quadratic_ms,
        "ridge_theory": theory,
        "bytes_per_s": ceiling.bytes_per_s if ceiling else None,
        "flops": ceiling.flops if ceiling else None,
        "floors": None if least else _floors(needs, ceiling, longest),
        "comparison": _comparison(found, needs, ceiling, theory["last"], seen),
        "steps": [{"n": step.n, "jump_ms": step.jump_ms} for step in found.steps],
        "ttft": [
            {
                "n": each.n,
                "ms": each.ms,
                "ci95_ms": _listed(each.ci95_ms),
                "how": each.how,
                "reason": each.reason,
            }
            for each in found.first_tokens
            if not least
        ],
        "utilisation": _utilisation(n, ms, least, needs, ceiling, bandwidth),
        "depths": [
            _at_depth(depth, n, ms, prefill.analyse(n, ms, rounds, chunk))
            for depth, (n, ms, rounds) in sorted(depths.items())
            if depth > least
        ],
    }


def faster_than_possible(record: Record, depths: Passes, bandwidth: float | None) -> list[Flag]:
    """A flag where passes took under 90% of the time to read the weights, or to compute, at the higher
    ceiling: the clock was read before the device was done."""
    needs, ceiling = traffic.prefill_demand(record), traffic.prefill_ceiling(record)
    rate = max(ceiling.bytes_per_s if ceiling else 0.0, bandwidth or 0.0)
    if needs is None or not rate:
        return []
    at_most = Ceiling(rate, ceiling.flops if ceiling else math.inf)
    # Weights and cache may be smaller than by the shape, which knows no types of the cache.
    loaded, kv = traffic.weight_bytes_per_token(record), traffic.kv_bytes_per_token(record)
    needs = demand.with_kv(needs, min(needs.kv_bytes_per_token, kv or math.inf))
    fewer = max(0.0, needs.weight_bytes_per_token - (loaded or math.inf))
    cached = traffic.cache_bytes(record) + fewer
    fast = []
    for depth, (n, ms, _) in depths.items():
        for length in np.unique(n):
            took = float(np.median(ms[n == length]))
            read, flops = passes.pass_work(needs, int(length), depth)
            least = max((read - cached) / at_most.bytes_per_s, flops / at_most.flops) * 1e3
            if took < floors.UNSYNCHRONISED * least:
                fast.append((int(length), took, least))
    if not fast:
        return []
    which = "; ".join(f"{n} tokens in {took:.2f} ms, at least {least:.2f}" for n, took, least in fast[:NAMED])
    more = f" and {len(fast) - NAMED} more lengths" if len(fast) > NAMED else ""
    detail = f"a pass of {which}{more}: the clock was read before the device was done"
    return [Flag("prefill_faster_than_limit", detail, invalidates=None)]


def _at_depth(depth: int, n: Floats, ms: Floats, found: Prefill) -> PrefillDepth:
    return {
        "depth": depth,
        "longest_n": found.longest_n,
        "longest_ms": float(np.median(ms[n == n.max()])),
        "kernel_from_n": found.kernel_from_n,
        "plateau_ms": found.plateau_ms,
        "slope_ms": found.slope_ms,
        "ridge_n": found.ridge_n,
        "ridge_ci95": _listed(found.ridge_ci95),
        "ridge_reason": found.ridge_reason,
    }


def _chunk(record: Record, header: Header | None) -> int | None:
    """Most tokens in one pass over the weights: the record's, else the stack's default; null: all."""
    option = header.options.get("n_ubatch") if header else None
    found = (record.get("options") or {}).get("n_ubatch") or (option and option.default)
    return found if isinstance(found, int) else None


def _kernel_changes(variant: str, header: Header | None) -> list[tuple[int, str]]:
    """Known changes of kernel of this variant: the longest pass before, and what follows."""
    changes = header.kernel_changes if header else ()
    return [(each.longest, each.then) for each in changes if each.variant in variant]


def _is_seen(found: Prefill, after: int) -> bool:
    """Whether the sweep shows this change: a step there, or where the last kernel begins."""
    at_step = any(step.n == after + 1 for step in found.steps)
    start = found.kernel_from_n
    return at_step or (start is not None and start > 1 and abs(start - after - 1) <= NEAR)


def _utilisation(
    n: Floats,
    ms: Floats,
    depth: int,
    needs: Demand | None,
    ceiling: Ceiling | None,
    bandwidth: float | None,
) -> list[Utilisation]:
    """MFU and MBU at lengths that double, and at the longest."""
    if needs is None:
        return []
    found: list[Utilisation] = []
    lengths = np.unique(n)
    wanted = {float(2**power) for power in range(24)} | {float(lengths[-1])}
    for length in lengths[np.isin(lengths, list(wanted))]:
        took = float(np.median(ms[n == length])) / 1e3
        read, flops = passes.pass_work(needs, int(length), depth)
        found.append(
            {
                "n": int(length),
                "ms": took * 1e3,
                "mfu": flops / took / ceiling.flops if ceiling else None,
                "mbu": read / took / ceiling.bytes_per_s if ceiling else None,
                "mbu_measured": read / took / bandwidth if bandwidth else None,
            }
        )
    return found


def _floors(
    needs: Demand | None, ceiling: Ceiling | None, longest: float
) -> dict[str, list[list[float]]] | None:
    """Theory's least ms by lm_head, as [n, ms], up to the longest pass."""
    if needs is None or ceiling is None:
        return None
    lengths = np.unique(np.geomspace(1, longest, FLOOR_POINTS).round()).astype(int)
    return {
        which: [
            [int(n), round(passes.prefill_floor_s(needs, ceiling, int(n), which) * 1e3, 4)] for n in lengths
        ]
        for which in ("every", "last")
    }


def _comparison(
    found: Prefill,
    needs: Demand | None,
    ceiling: Ceiling | None,
    theory: float | None,
    seen: Sequence[tuple[int, str]],
) -> str | None:
    """How the measured ridge differs from theory's (lm_head on the last token), and what makes it differ: the
    ridge is the plateau over the time of a token, so its ratio is the ratio of both."""
    if needs is None or ceiling is None or theory is None or found.slope_ms is None:
        return None
    read_ms = needs.weight_bytes_per_token / ceiling.bytes_per_s * 1e3
    token_ms = 2e3 * needs.layer_params / ceiling.flops
    changes = ", ".join(f"past {plural(after, 'token')} {what}" for after, what in seen)
    rate = f"at {ceiling.flops / 1e12:.0f} TFLOP/s"
    why = f"a further token takes {found.slope_ms / token_ms:.1f} times its computing {rate}"
    if found.plateau_ms is not None:
        plateau = found.plateau_ms / read_ms
        why = f"the plateau takes {plateau:.1f} times the reading of the weights, {why}"
    why += f"; the stack changes {changes}" if changes else ""
    if found.ridge_n is None:
        return f"{found.ridge_reason}; in theory {theory:.0f}: {why}"
    low, high = found.ridge_ci95 or (None, None)
    both = f"({found.ridge_n:.0f}, theory {theory:.0f})"
    if (low or 0.0) <= theory <= (high or math.inf) or abs(found.ridge_n / theory - 1) < SAME:
        return f"close to theory {both}, where both roofs differ alike: {why}"
    return f"{'later' if found.ridge_n > theory else 'earlier'} than in theory {both}: {why}"


def _listed(ends: tuple[float | None, float | None] | None) -> list[float | None] | None:
    return None if ends is None else list(ends)
