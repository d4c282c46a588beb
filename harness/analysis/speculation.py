"""Tokens that were guessed ahead and verified several at once: counts, ids and theory. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from harness.analysis.columns import SpeculationRow
from harness.analysis.identity import computes
from harness.analysis.warnings import Flag, Warnings
from harness.records.kinds import Record, done_of, loaded_of
from harness.records.measured import Counters
from harness.records.token_times import TokenTimes

OPTIONS = ("speculate", "draft", "draft_tokens", "accept")


def requested(record: Record) -> bool:
    options = record.get("options") or {}
    return options.get("speculate", "none") != "none" or options.get("speculation") is True


def first_burst_tokens(record: Record) -> int:
    """Tokens that came together first: one, unless the prompt's pass verified guesses too."""
    return (done_of(record).get("counters") or Counters()).get("first_burst_tokens", 1)


def row(record: Record) -> SpeculationRow | None:
    """What was guessed in a generation, and how much of it was accepted; None where nothing may be guessed.

    Each pass of the model after the prompt's gives one token of its own and the accepted guesses before it,
    so that the counts give the number of passes.
    """
    counters, served = done_of(record).get("counters") or {}, loaded_of(record).get("served")
    drafted = counters.get("drafted_tokens")
    if not loaded_of(record) or not (requested(record) or drafted):
        return None
    guesses: SpeculationRow = {
        "by": (served.get("speculation") or "unknown") if served else "assisted generation",
        "synthetic": (record["options"].get("accept") or None),
        "drafted": drafted,
        "accepted": counters.get("accepted_tokens"),
        "tokens": record["tokens"] + 1 - first_burst_tokens(record),
        "passes": None,
        "draft_model_bytes": loaded_of(record).get("draft_model_bytes"),
    }
    if drafted is None and served and served["api"] == "llama-server":  # it leaves out counts of nothing
        guesses["drafted"] = guesses["accepted"] = 0
    passes = guesses["tokens"] - 1 - (guesses["accepted"] or 0)
    guesses["passes"] = passes if guesses["drafted"] is not None and passes > 0 else None
    return guesses


def pooled(rows: Sequence[SpeculationRow | None]) -> SpeculationRow | None:
    """Those of a cell's repeats together; None where one is missing."""
    counted = [row for row in rows if row]
    if not counted or len(counted) < len(rows):
        return None

    def total(counts: Sequence[int | None]) -> int | None:
        whole = [count for count in counts if count is not None]
        return sum(whole) if len(whole) == len(counts) else None

    return {
        **counted[-1],
        "drafted": total([row["drafted"] for row in counted]),
        "accepted": total([row["accepted"] for row in counted]),
        "tokens": sum(row["tokens"] - 1 for row in counted) + 1,
        "passes": total([row["passes"] for row in counted]),
    }


def acceptance_length(guesses: SpeculationRow) -> float | None:
    """Tokens per pass of the model, of all passes after the prompt's."""
    return (guesses["tokens"] - 1) / guesses["passes"] if guesses["passes"] else None


def acceptance_rate(guesses: SpeculationRow) -> float | None:
    """Accepted of the guessed tokens; None where none was guessed."""
    drafted, accepted = guesses["drafted"], guesses["accepted"]
    return accepted / drafted if drafted and accepted is not None else None


def guesses_per_pass(guesses: SpeculationRow) -> float | None:
    return (
        None
        if guesses["drafted"] is None or not guesses["passes"]
        else guesses["drafted"] / guesses["passes"]
    )


def notes(record: Record) -> list[Flag]:
    """That tokens came together, by how many, and that acceptance was synthetic."""
    if (guesses := row(record)) is None or record["outcome"] != "ok":
        return []
    raised, length = [], acceptance_length(guesses)
    if length is None:
        raised.append(Warnings.guessed_ahead.flag(how="tokens may be guessed ahead"))
    else:
        counts = f"{guesses['accepted']} of {guesses['drafted']} guesses accepted"
        raised.append(Warnings.guessed_ahead.flag(how=f"{length:.2f} tokens a pass, {counts}"))
    if guesses["synthetic"]:
        raised.append(Warnings.synthetic_acceptance.flag(length=guesses["synthetic"]))
    return raised


def group(record: Record) -> str:
    """Equal for cells that differ in their guesses alone: machine, stack, weights, options, workload."""
    given = record.get("options") or {}
    options = {name: value for name, value in given.items() if name not in OPTIONS}
    place = [record["machine"]["slug"], record.get("device"), record["stack"], record["model"]["name"]]
    same = json.dumps([place, computes(record), options, record["workload"]], sort_keys=True, default=str)
    return hashlib.sha256(same.encode()).hexdigest()


def group_of_ids(record: Record, guessed: bool) -> str | None:
    """The group in which greedy ids are equal. None where it did not end, where acceptance is synthetic, and
    for a repeat without guesses of a stack that cannot guess. `guessed`: whether it has guesses."""
    options = record.get("options") or {}
    if record["outcome"] != "ok" or options.get("accept") or not (guessed or "speculate" in options):
        return None
    return group(record)


def compared_ids(record: Record, times: TokenTimes, other: tuple[Record, TokenTimes] | None) -> Flag:
    """Whether the ids of a generation are those of another without guesses. Greedily they are the same, but
    for rounding: a pass over several tokens adds up in another order. Tokens without an id are last; see
    runners.served.session."""
    if other is None or times.ids is None or other[1].ids is None:
        return Warnings.ids_compared.flag(how="no run without guesses to compare the ids with")
    compared_tokens = min(_ids(record), _ids(other[0]))
    here, there = times.ids[:compared_tokens], other[1].ids[:compared_tokens]
    first = next((at for at, (a, b) in enumerate(zip(here, there, strict=True), 1) if a != b), None)
    of = (
        f"{compared_tokens} tokens"
        if compared_tokens == record["tokens"]
        else f"{compared_tokens} tokens that came with ids"
    )
    if first is None:
        return Warnings.ids_compared.flag(how=f"the same ids as without guesses for all {of}")
    how = f"the ids differ from those without guesses, first at token {first} of {of}"
    return Warnings.ids_compared.flag(how=how)


def _ids(record: Record) -> int:
    counters = done_of(record).get("counters") or {}
    return min(record["tokens"], counters.get("piece_tokens", record["tokens"]))
