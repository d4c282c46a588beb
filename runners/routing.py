"""The experts that a mixture's routers choose, in an untimed decode after the timed part."""

from __future__ import annotations

from typing import Any

from runners.protocol import Session

MOST_TOKENS = 64  # decode steps that are counted


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
