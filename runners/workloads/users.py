"""Several users at once: their times, at several numbers of users. Standard library only."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from runners.clock import MajorFaults
from runners.protocol import Answer, Instruments, Rows, Session


def measure_batch(
    session: Session,
    workload: dict[str, Any],
    emit: Callable[[Rows], None],
    instruments: Instruments,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time `rounds` rounds over all numbers of users in `concurrency`, in random order, after one that only
    warms up.

    `alike`: of that first round, the first tokens of the last user that are the same when its prompt is
    evaluated alone. Sums of a batch differ in their last bits from those of one user, so that ids may
    differ where two are almost equally likely.
    """
    faults, of_warm_up = (MajorFaults(instruments.page_faults) for _ in range(2))
    alike: list[dict[str, int]] = []
    for number in range(workload["rounds"] + 1):
        for users in random.Random(number).sample(workload["concurrency"], len(workload["concurrency"])):
            prompts = [prompt_of(workload["prompt"], number, user) for user in range(users)]
            with faults if number else of_warm_up:
                answers = session.serve_batch(prompts, workload["new_tokens"])
            if number:
                emit(rows(number, answers))
            elif answers[-1].ids is not None:
                (alone,) = session.serve_batch(prompts[-1:], workload["new_tokens"])
                alike.append({"concurrency": users, "tokens": in_common(answers[-1].ids, alone.ids or [])})
    served = getattr(session, "row_counters", dict)
    return {"major_faults": faults.counted, "alike": alike, "counters": served()}


def prompt_of(ids: list[int], round: int, user: int) -> list[int]:
    """The ids in another order for each user and round, so that no two share a prefix."""
    return random.Random(f"{round} {user}").sample(ids, len(ids))


def rows(number: int, answers: list[Answer]) -> Rows:
    """One row per user; raises RuntimeError where one got no token."""
    if silent := [str(user) for user, answer in enumerate(answers) if not answer.t_ns]:
        raise RuntimeError(f"no token for user {', '.join(silent)} of {len(answers)}")
    all_decode_ns = max(answer.t_ns[0] for answer in answers)
    one_ended_ns = min(answer.t_ns[-1] for answer in answers)
    columns: dict[str, list[int]] = {
        "round": [number] * len(answers),
        "concurrency": [len(answers)] * len(answers),
        "user": list(range(len(answers))),
        "ttft_ns": [answer.t_ns[0] for answer in answers],
        "decode_ns": [answer.t_ns[0] if answer.decode_ns is None else answer.decode_ns for answer in answers],
        "last_ns": [answer.t_ns[-1] for answer in answers],
        "tokens": [len(answer.t_ns) for answer in answers],
        "together": [sum(all_decode_ns < t <= one_ended_ns for t in answer.t_ns) for answer in answers],
        "client_ns": [answer.client_ns for answer in answers],
    }
    return Rows("users", columns)


def in_common(ids: list[int], others: list[int]) -> int:
    """How many tokens of both are the same before the first that is not."""
    pairs = zip(ids, others, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others)))
