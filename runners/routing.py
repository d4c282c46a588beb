"""The experts that a mixture's routers choose, in an untimed decode after the timed part."""

from __future__ import annotations

from typing import Any

from runners.protocol import Session

MOST_TOKENS = 64  # decode steps that are counted
FIXED = "fixed ids"


def fix(session: Session, workload: dict[str, Any]) -> dict[str, Any]:
    """Have the session's decode steps fed fixed ids, where the workload's `fixed_ids` (the vocabulary's size)
    asks for it: random weights may decode one token for ever, which keeps to the same experts. Returns the
    fact `fed`; empty for a stack that cannot."""
    if "fixed_ids" not in workload or not hasattr(session, "fix"):
        return {}
    # Those of a prompt without a tokenizer go on: every id once before one repeats.
    session.fix([(1013 + 7919 * i) % workload["fixed_ids"] for i in range(workload["holds"] + 1)])
    return {"fed": FIXED}


def counted(
    session: Session,
    prompt: list[int],
    new_tokens: int,
    does_not_fit: tuple[type[BaseException], ...],
) -> dict[str, Any]:
    """`routing`: what the session's own method says of the run's first tokens. Empty for a stack without one,
    for a model without experts, and where the pass does not fit beside the run's own context."""
    if not hasattr(session, "routing"):
        return {}
    try:
        found = session.routing(prompt, min(new_tokens, MOST_TOKENS))
    except does_not_fit:
        return {}
    return {"routing": found} if found else {}


def facts(experts: int, ids: list[int], counts: list[list[int]]) -> dict[str, Any]:
    """`ids`: fed to the counted steps. `counts`: by layer, how often each of the experts was chosen."""
    return {"experts": experts, "tokens": len(ids), "distinct_tokens": len(set(ids)), "layers": counts}
