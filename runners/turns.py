"""Turns of a conversation, with and without its prefix kept in the KV cache. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runners.clock import MajorFaults
from runners.context import Context
from runners.protocol import Instruments, Rows, Session


def measure(
    session: Session,
    workload: dict[str, Any],
    emit: Callable[[Rows], None],
    instruments: Instruments,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """One conversation for each value of `prefix_cache`: `turns` prompts, the first of `first` new tokens and
    the others of `each`, and `new_tokens` decoded after each.

    With the prefix kept a turn feeds the last id decoded and the new ones; without, it empties the cache and
    feeds the whole conversation. `counted`: of each turn's prefill the tokens `fed`, and those `evaluated` by
    the stack's own count.
    """
    clock, faults = instruments.clock_ns, MajorFaults(instruments.page_faults)
    turns, new_tokens = workload["turns"], workload["new_tokens"]
    most = workload["first"] + (turns - 1) * workload["each"] + turns * new_tokens
    counted = []
    for reuse in workload["prefix_cache"]:
        context = Context(session, workload["prompt"], 0, most, clock, say)
        said: list[int] = []  # the conversation so far
        unread: list[int] = []  # those of it that are not in the cache
        for turn in range(1, turns + 1):
            count = workload["first"] if turn == 1 else workload["each"]
            new = context.ids(len(said), count)
            said += new
            unread += new
            with faults:
                began = clock()
                if not reuse:
                    session.empty(most)
                    unread = list(said)
                depth, before = session.held(), session.evaluated()
                session.feed(unread, 1)
                stream = session.steps(new_tokens)
                ids = [next(stream)]
                first = clock()
                evaluated = session.evaluated()
                decoding = clock()
                ids += stream
                ended = clock()
            row = {
                "reuse": int(reuse),
                "turn": turn,
                "depth": depth,
                "evaluated": len(unread),
                "prefill_ns": first - began,
                "decoded": len(ids) - 1,
                "decode_ns": ended - decoding,
            }
            emit(Rows("turns", {name: [value] for name, value in row.items()}))
            if before is not None and evaluated is not None:
                seen = {"fed": len(unread), "evaluated": evaluated - before}
                counted.append({"reuse": int(reuse), "turn": turn} | seen)
            held = session.held()
            said += ids
            if held != len(said) - 1:
                raise RuntimeError(f"the KV cache holds {held} tokens of {len(said) - 1} after turn {turn}")
            unread = said[-1:]
    return {"major_faults": faults.counted, "counted": counted}
