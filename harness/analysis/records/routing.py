"""What a mixture's routers chose, and how far its speed stands for real text. Pure."""

from __future__ import annotations

from harness.analysis.records.flags import Flag
from harness.results.kinds import Record, done_of
from harness.results.kinds.measured import Routing
from harness.theory.layers import distinct_share

PINNED = 0.5  # fewer than this share of the experts that an even choice is expected to use


def notes(record: Record) -> list[Flag]:
    """That random routers choose more evenly than trained ones, and that one repeated token was measured."""
    found = done_of(record).get("routing")
    if not found or not found["layers"] or not found["tokens"]:
        return []
    raised = []
    if record["model"]["weights"].get("synthetic"):
        detail = (
            f"random routers chose a layer's busiest expert {busiest(found):.1f} times as often as its mean;"
            " trained ones are less even on real text, which matters where experts are cached or offloaded"
        )
        if done_of(record).get("fed"):
            detail += "; steps were fed fixed ids, not those with the highest logit, which may repeat"
        raised.append(Flag("synthetic_routing", detail, invalidates=None))
    used, expected = distinct(found), expected_distinct(found)
    if used < PINNED * expected:
        detail = (
            f"{found['tokens']} decode steps were fed {found['distinct_tokens']} different tokens, and used"
            f" {used:.0f} of {found['experts']} experts in a layer; an even choice uses {expected:.0f}:"
            " repeated tokens keep to the same experts, which may stay in a CPU's cache"
        )
        raised.append(Flag("pinned_experts", detail, invalidates=None))
    return raised


def busiest(found: Routing) -> float:
    """How often a layer's most chosen expert was chosen, over its mean expert: the mean of the layers."""
    shares = [max(counts) * len(counts) / sum(counts) for counts in found["layers"] if sum(counts)]
    return sum(shares) / len(shares) if shares else 1.0


def distinct(found: Routing) -> float:
    """Experts that were chosen at least once, the mean of the layers."""
    return sum(sum(count > 0 for count in counts) for counts in found["layers"]) / len(found["layers"])


def expected_distinct(found: Routing) -> float:
    """The same, if each step had chosen uniformly."""
    used = sum(map(sum, found["layers"])) / len(found["layers"]) / found["tokens"]
    return found["experts"] * distinct_share(found["experts"], round(used), found["tokens"])
