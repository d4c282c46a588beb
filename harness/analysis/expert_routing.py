"""The choices of a mixture's routers, and how well its speed represents real text. Pure."""

from __future__ import annotations

from harness.analysis.warnings import Flag, Warnings
from harness.records.kinds import Record, done_of
from harness.records.measured import Routing
from harness.theory.decoder import distinct_share

PINNED = 0.5  # fewer than this share of the experts that an even choice is expected to use


def routing_notes(record: Record) -> list[Flag]:
    """Flags where random routers choose more evenly than trained ones, or one repeated token was measured."""
    found = done_of(record).get("routing")
    if not found or not found["layers"] or not found["tokens"]:
        return []
    raised = []
    if record["model"]["weights"].get("synthetic"):
        fixed = "; steps were fed fixed ids, not those with the highest logit, which may repeat"
        fed = fixed if done_of(record).get("fed") else ""
        raised.append(Warnings.synthetic_routing.flag(busiest=busiest(found), fed=fed))
    used, expected = distinct(found), expected_distinct(found)
    if used < PINNED * expected:
        steps, different, experts = found["tokens"], found["distinct_tokens"], found["experts"]
        numbers = {"steps": steps, "different": different, "experts": experts}
        raised.append(Warnings.pinned_experts.flag(used=used, expected=expected, **numbers))
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
