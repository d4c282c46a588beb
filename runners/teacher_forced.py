"""Logits after given ids (teacher forcing): the job `logits` of every stack that decodes. NumPy only."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runners.protocol import Request

KERNEL_FACTS = ("kernels", "kernel_asked", "leftovers", "options")
CHUNK = 512  # tokens of context evaluated at once
DEEPER = 2.0  # later tokens cost more: attention grows with the context


class Fed(Protocol):
    """A session that takes ids. A single id takes the path of a decode step."""

    def empty(self, tokens: int) -> None:
        """Reset, with room for so many tokens."""

    def facts(self) -> dict[str, Any]:
        """See runners.protocol.Session."""

    def feed(self, ids: list[int], keep: int) -> np.ndarray:
        """Evaluate `ids` after those before; logits after the last `keep` of them: float32 (keep,
        vocabulary)."""


def write(session: Fed, request: Request, versions: dict[str, str]) -> dict[str, Any]:
    """Write logits as rows of a float32 .npy to files["logits"]; report the positions (from 0) that they
    follow.

    workloads[0]: the first `prompt_tokens` of `ids` are fed at once, as a prompt, with logits after the last
    `prompt_keep` of them (default: after each); those of each of the `windows` [first, end) one by one, as
    in decode, with logits after each; those between in chunks. A window that would exceed `seconds` in all
    (null: no limit), at the pace so far, is skipped, with all later ones.
    """
    workload, clock = request.workloads[0], time.monotonic
    ids, prompt, limit_s = workload["ids"], workload["prompt_tokens"], workload["seconds"]
    keep = workload.get("prompt_keep", prompt)
    for _ in range(2):  # the first reads the weights from the disk, so its pace does not count
        session.empty(max([prompt, *(end for _, end in workload["windows"])]))
        began = clock()
        rows = [session.feed(ids[:prompt], keep)]
    fed, token_s = prompt, (clock() - began) / prompt
    positions = list(range(prompt - keep, prompt))
    for first, end in workload["windows"]:
        if limit_s is not None and clock() - began + DEEPER * token_s * (end - fed) > limit_s:
            break
        for start in range(fed, first, CHUNK):
            chunk, chunk_began = ids[start : min(start + CHUNK, first)], clock()
            session.feed(chunk, 1)
            token_s = (clock() - chunk_began) / len(chunk)
        rows += [session.feed([token], 1) for token in ids[first:end]]
        positions += range(first, end)
        fed = end
    seconds = clock() - began
    with Path(request.files["logits"]).open("wb") as file:
        np.save(file, np.concatenate(rows))
    facts = session.facts()
    return {
        "ran": {key: facts[key] for key in KERNEL_FACTS if key in facts},
        "positions": positions,
        "vocab_size": rows[0].shape[1],
        "versions": versions,
        "seconds": seconds,
    }
