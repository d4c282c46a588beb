"""Logits of given tokens, and the experts that they choose."""

from __future__ import annotations

import struct
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from runners.protocol import SCORED, Request, Say, Session

# The experts that a mixture's routers choose, in an untimed decode after the timed part.


MOST_TOKENS = 64  # decode steps that are counted
FIXED = "fixed ids"


def force_tokens(session: Session, workload: dict[str, Any]) -> dict[str, Any]:
    """Have the session's decode steps fed fixed ids, where the workload's `fixed_ids` (the vocabulary's size)
    asks for it: random weights may decode one token for ever, which keeps to the same experts. Returns the
    fact `fed`; empty for a stack that cannot."""
    if "fixed_ids" not in workload or not hasattr(session, "force_tokens"):
        return {}
    # Those of a prompt without a tokenizer go on: every id once before one repeats.
    session.force_tokens([(1013 + 7919 * i) % workload["fixed_ids"] for i in range(workload["holds"] + 1)])
    return {"fed": FIXED}


def counted_experts(
    session: Session,
    prompt: list[int],
    new_tokens: int,
    does_not_fit: tuple[type[BaseException], ...],
) -> dict[str, Any]:
    """`routing`: the session's report on the run's first tokens. Empty for a stack without one,
    for a model without experts, and where the pass does not fit in memory with the run's own context."""
    if not hasattr(session, "routing"):
        return {}
    try:
        found = session.routing(prompt, min(new_tokens, MOST_TOKENS))
    except does_not_fit:
        return {}
    return {"routing": found} if found else {}


def routing_facts(experts: int, ids: list[int], counts: list[list[int]]) -> dict[str, Any]:
    """`ids`: fed to the counted steps. `counts`: by layer, how often each of the experts was chosen."""
    return {"experts": experts, "tokens": len(ids), "distinct_tokens": len(set(ids)), "layers": counts}


# Logits after given ids (teacher forcing): the job `logits` of the worker, for every stack. Standard library
# only.


KERNEL_FACTS = ("kernels", "kernel_asked", "leftovers", "options")
CHUNK = 512  # tokens of context evaluated at once
FLOAT_BYTES = 4
DEEPER = 2.0  # later tokens cost more: attention grows with the context


def write_logits(session: Session, request: Request, say: Say) -> dict[str, Any]:
    """Write the logits of each workload as rows of a float32 .npy to files["logits"], one workload after the
    other: at each phase SCORED the file holds those of one, which bounds memory and disk. Report the
    positions (from 0) that the rows of the last one follow.

    A workload begins with an empty context. The first `prompt_tokens` of its `ids` are fed at once, as a
    prompt, with logits after the last `prompt_keep` of them (default: after each); those of each of the
    `windows` [first, end) one by one, as in decode, with logits after each; those between in chunks. A window
    that would exceed `seconds` in all (None: no limit), at the pace so far, is skipped, with all later ones.

    files["experts"]: for the experts that a mixture's routers choose (see protocol.Session).
    """
    hear = getattr(session, "experts", nullcontext) if "experts" in request.files else nullcontext
    facts: dict[str, Any] = {"seconds": 0.0}
    with hear() as heard:
        for workload in request.workloads:
            rows, positions, seconds = _fed(session, workload, heard, say)
            columns = sum(map(len, rows)) // len(positions) // FLOAT_BYTES
            with Path(request.files["logits"]).open("wb") as file:
                file.write(_npy_header(len(positions), columns))
                file.writelines(rows)
            say(SCORED)
            facts = {"positions": positions, "vocab_size": columns, "seconds": facts["seconds"] + seconds}
        facts |= {"experts": heard.write(Path(request.files["experts"]))} if heard else {}
    reported = session.facts()
    ran = {key: reported[key] for key in KERNEL_FACTS if key in reported}
    return facts | {"ran": ran, "versions": reported["versions"]}


def _fed(
    session: Session, workload: dict[str, Any], heard: Any, say: Say
) -> tuple[list[bytes], list[int], float]:
    """The logits of a workload, their positions, and the seconds that they took."""
    ids, prompt, limit_s = workload["ids"], workload["prompt_tokens"], workload["seconds"]
    keep, clock = workload.get("prompt_keep", prompt), time.monotonic
    # With a limit twice: the first reads the weights from the disk, so its pace does not count.
    for _ in range(1 if limit_s is None else 2):
        session.empty(max([prompt, *(end for _, end in workload["windows"])]))
        if heard:
            heard.begin()
        began = clock()
        rows = [_bytes(session.feed(ids[:prompt], keep))]
    fed, token_s = prompt, (clock() - began) / prompt
    positions = list(range(prompt - keep, prompt))
    for first, end in workload["windows"]:
        if limit_s is not None and clock() - began + DEEPER * token_s * (end - fed) > limit_s:
            break
        for start in range(fed, first, CHUNK):
            chunk, chunk_began = ids[start : min(start + CHUNK, first)], clock()
            session.feed(chunk, 1)
            token_s = (clock() - chunk_began) / len(chunk)
            say(f"logits: {start + len(chunk)} of {workload['windows'][-1][1]} tokens")
        rows += [_bytes(session.feed([token], 1)) for token in ids[first:end]]
        positions += range(first, end)
        fed = end
    return rows, positions, clock() - began


def _bytes(logits: Any) -> bytes:
    return memoryview(logits).tobytes()


def _npy_header(rows: int, columns: int) -> bytes:
    """The header of a float32 array, NumPy's format 1.0 (numpy.lib.format); data begin at multiples of 64."""
    words = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}"
    begin = b"\x93NUMPY\x01\x00"
    padded = words.ljust(-(-(len(begin) + 2 + len(words) + 1) // 64) * 64 - len(begin) - 3) + "\n"
    return begin + struct.pack("<H", len(padded)) + padded.encode()
