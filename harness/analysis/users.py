"""Several users at once: speed of all and of each, waiting times, fairness, and the limit. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from harness.analysis import traffic
from harness.analysis.columns import Percentiles, UsersLimit, UsersRow
from harness.analysis.flags import CEILING_TOLERANCE
from harness.analysis.served import CLIENT_SHARE
from harness.analysis.warnings import Flag, Warnings
from harness.base.text import plural
from harness.records import tables
from harness.records.kinds import Record, done_of, loaded_of
from harness.records.measured import Surface
from harness.theory import floors

# Tokens a user; one that comes just inside or outside that time changes the user's share by 12%.
FEWEST_TOGETHER = 8

Columns = Mapping[str, Sequence[int]]
Floats = NDArray[np.float64]
Round = Mapping[str, Floats]
"""A round's columns, a value per user; times in ms."""


def rows(tables_of_repeats: Sequence[Columns]) -> list[UsersRow]:
    """One row per number of users; rounds of several repeats are pooled.

    `tokens_per_s`: of all users together, from the first token of the last user until the first user ended,
    as S_TG of llama-batched-bench; None where that are fewer than `FEWEST_TOGETHER` tokens a user.
    `output_tokens_per_s`: all tokens over all of the time, prompts included. `user_tokens_per_s`: of one user
    after its first token, without the prompts of others where a stack evaluates all of them before any step.
    Medians over rounds, or over users and rounds.
    """
    return [_row(users, rounds) for users, rounds in sorted(_rounds(tables_of_repeats).items())]


def _rounds(tables_of_repeats: Sequence[Columns]) -> dict[int, list[Round]]:
    rounds: dict[int, list[Round]] = {}
    for table in filter(None, tables_of_repeats):
        columns = {name: np.array(column, dtype=float) for name, column in table.items()}
        columns |= {name.replace("_ns", "_ms"): ns / 1e6 for name, ns in columns.items() if "_ns" in name}
        for number, users in sorted({*zip(table["round"], table["concurrency"], strict=True)}):
            of_round = (columns["round"] == number) & (columns["concurrency"] == users)
            rounds.setdefault(users, []).append({name: column[of_round] for name, column in columns.items()})
    return rounds


def _row(users: int, rounds: Sequence[Round]) -> UsersRow:
    queued = any(bool(one_round["ttft_ms"].max() > one_round["last_ms"].min()) for one_round in rounds)
    together = [] if queued else [rate for one_round in rounds if (rate := _together(one_round)) is not None]
    tpot = [_tpot_ms(one_round) for one_round in rounds]
    fair = [
        float(of_users.min() / of_users.max()) for of_users in tpot if len(of_users) and of_users.max() > 0
    ]
    of_each = np.concatenate(tpot)
    middle = float(np.median(of_each)) if len(of_each) else 0.0
    outputs = [float(one_round["tokens"].sum() / one_round["last_ms"].max()) * 1e3 for one_round in rounds]
    return {
        "users": users,
        "rounds": len(rounds),
        "tokens_per_s": float(np.median(together)) if together else None,
        "output_tokens_per_s": float(np.median(outputs)),
        "user_tokens_per_s": 1e3 / middle if middle else None,
        "ttft_ms": _percentiles(np.concatenate([one_round["ttft_ms"] for one_round in rounds])),
        "tpot_ms": _percentiles(of_each) if len(of_each) else None,
        "slowest_over_fastest": float(np.median(fair)) if fair else None,
        "queued": queued,
    }


def _together(of_round: Round) -> float | None:
    """Tokens per second of all users while all decode; None for too few tokens, or if they are unknown."""
    if "together" not in of_round or of_round["together"].mean() < min(
        FEWEST_TOGETHER, of_round["tokens"].max() - 1
    ):
        return None
    took = float(of_round["last_ms"].min() - of_round["ttft_ms"].max())
    return float(of_round["together"].sum()) / took * 1e3 if took > 0 else None


def _tpot_ms(of_round: Round) -> Floats:
    """Of each user with two tokens or more; empty if it is not known when their steps began."""
    if "decode_ms" not in of_round:
        return np.empty(0)
    several = of_round["tokens"] > 1
    took: Floats = (of_round["last_ms"] - of_round["decode_ms"])[several] / (of_round["tokens"][several] - 1)
    return took


def _percentiles(values: Floats) -> Percentiles:
    middle, p90, p99 = map(float, np.percentile(values, [50, 90, 99]))
    return {"median": middle, "p90": p90, "p99": p99}


def limit(record: Record, bandwidth: float | None) -> UsersLimit | None:
    """What theory allows, with weights read once per step, and KV cache read and tokens computed for each
    user: by the data sheet; where that is unknown, by the measured bandwidth. None for other workloads, and
    where neither or the model's bytes are known."""
    needs, ceiling = traffic.batch_demand(record), traffic.prefill_ceiling(record)
    concurrency = record["workload"].get("concurrency")
    by = "data sheet" if ceiling else "measured bandwidth"
    ceiling = ceiling or (floors.Ceiling(bandwidth, math.inf) if bandwidth else None)
    if not concurrency or needs is None or ceiling is None:
        return None
    n = _middle(record)
    return {
        "by": by,
        "tokens_per_s": [
            (users, users / floors.batch_floor_s(needs, ceiling, users, n)) for users in sorted(concurrency)
        ],
        "compute_bound_from": floors.compute_bound_users(needs, ceiling, n),
    }


def _middle(record: Record) -> int:
    """The mean position of decode steps."""
    return record["workload"]["prompt_tokens"] + record["workload"]["new_tokens"] // 2


def faults(record: Record, table: Columns, bandwidth: float | None) -> list[Flag]:
    """Reasons why the rows are not those of so many users, each with all of its tokens."""
    workload, counters = record["workload"], done_of(record)["counters"]
    rounds, raised = _rounds([table]), []
    if len(table["user"]) != workload.get("rounds", 0) * sum(workload.get("concurrency", [])):
        raised.append(Warnings.rows_missing.flag(what="table of timed rows"))
    if wrong := [tokens for tokens in table["tokens"] if tokens != workload["new_tokens"]]:
        tokens = plural(min(wrong), "token")
        raised.append(Warnings.other_length.flag(tokens=tokens, requested=workload["new_tokens"]))
    if cached := counters.get("cached_tokens"):
        raised.append(Warnings.prompts_reused.flag(cached=plural(cached, "token")))
    busiest = max((one_round for several in rounds.values() for one_round in several), key=_client_share)
    if (share := _client_share(busiest)) > CLIENT_SHARE:
        delay = float(busiest["client_ms"].sum() / busiest["tokens"].sum())
        raised.append(Warnings.client_too_slow.flag(share=share, delay=delay))
    return [*raised, *_faster_than_possible(record, rounds, bandwidth)]


def _client_share(of_round: Round) -> float:
    """Of a round's time: one client serves all users, one after another."""
    return float(of_round["client_ms"].sum() / of_round["last_ms"].max())


def _faster_than_possible(
    record: Record, rounds: Mapping[int, Sequence[Round]], bandwidth: float | None
) -> list[Flag]:
    """A flag where a step took less than reading all that no cache holds, at the higher ceiling."""
    needs, at_most = traffic.batch_demand(record), traffic.highest_ceiling(record, bandwidth)
    if needs is None or at_most is None:
        return []
    needs = replace(needs, layer_bytes=max(0.0, needs.layer_bytes - traffic.cache_bytes(record)))
    for users, several in rounds.items():
        measured = _row(users, several)["tokens_per_s"]
        least_s = floors.batch_floor_s(needs, at_most, users, _middle(record))
        if measured and measured * least_s > users * CEILING_TOLERANCE:
            numbers = {"users": plural(users, "user"), "rate": measured, "most": users / least_s}
            return [Warnings.users_faster_than_limit.flag(**numbers)]
    return []


def notes(record: Record, table: Columns) -> list[Flag]:
    """Users who waited for others, and ids that differ from those of one user alone; none of other
    workloads."""
    if tables.name_of(record) != "users":
        return []
    raised = []
    if waited := [row["users"] for row in rows([table]) if row["queued"]]:
        served = loaded_of(record).get("served")
        slots = served and served.get("slots")
        has = f"; the server has {plural(slots, 'slot')}" if slots else ""
        users = ", ".join([*map(str, waited[:-1]), plural(waited[-1], "user")])
        raised.append(Warnings.users_queued.flag(users=users, slots=has))
    surface = done_of(record).get("surface") or Surface()
    fewest = min(surface.get("alike", []), key=lambda of_round: of_round["tokens"], default=None)
    if fewest and fewest["tokens"] < (requested := record["workload"]["new_tokens"]):
        users, alike = plural(fewest["concurrency"], "user"), f"the first {fewest['tokens']} of {requested}"
        raised.append(Warnings.ids_differ.flag(users=users, alike=alike))
    return raised
