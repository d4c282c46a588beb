"""The choices of a mixture's routers, and how well its speed represents real text. Pure."""

from __future__ import annotations

from harness.analysis.warnings import Flag, Warnings
from harness.records.kinds import Record, done_of
from harness.records.measured import Routing
from harness.theory.layer_parts import distinct_share

PINNED = 0.5  # fewer than this share of the experts that an even choice is expected to use


def routing_notes(record: Record) -> list[Flag]:
    """Flags where random routers choose more evenly than trained ones, or one repeated token was measured."""
    routing = done_of(record).get("routing")
    if not routing or not routing["layers"] or not routing["tokens"]:
        return []
    raised = []
    if record["model"]["weights"].get("synthetic"):
        fixed = "; steps were fed fixed ids, not those with the highest logit, which may repeat"
        fed = fixed if done_of(record).get("fed") else ""
        raised.append(Warnings.synthetic_routing.flag(busiest=busiest(routing), fed=fed))
    used, expected = distinct(routing), expected_distinct(routing)
    if used < PINNED * expected:
        steps, different, experts = routing["tokens"], routing["distinct_tokens"], routing["experts"]
        numbers = {"steps": steps, "different": different, "experts": experts}
        raised.append(Warnings.pinned_experts.flag(used=used, expected=expected, **numbers))
    return raised


def busiest(routing: Routing) -> float:
    """How often a layer's most chosen expert was chosen, over its mean expert: the mean of the layers."""
    shares = [max(counts) * len(counts) / sum(counts) for counts in routing["layers"] if sum(counts)]
    return sum(shares) / len(shares) if shares else 1.0


def distinct(routing: Routing) -> float:
    """Experts that were chosen at least once, the mean of the layers."""
    return sum(sum(count > 0 for count in counts) for counts in routing["layers"]) / len(routing["layers"])


def expected_distinct(routing: Routing) -> float:
    """The same, if each step had chosen uniformly."""
    used = sum(map(sum, routing["layers"])) / len(routing["layers"]) / routing["tokens"]
    return routing["experts"] * distinct_share(routing["experts"], round(used), routing["tokens"])
