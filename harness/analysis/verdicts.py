"""Is a record's measurement valid? Its status, the reasons why not, and notes on it. Pure.

Conditions of validity are two tables of functions, for finished repeats and for any. Each yields flags with
the numbers that it saw, faults and notes; what a flag says, what it invalidates and what to do is in
warnings.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harness.analysis import (
    depth,
    disturbances,
    expert_routing,
    flags,
    prefill,
    prefill_rows,
    requested,
    served,
    speculation,
    traffic,
    users,
)
from harness.analysis.attempts import disturbance_kind
from harness.analysis.clocks import clock_of_device, clock_of_stack
from harness.analysis.columns import Disturbance
from harness.analysis.disturbances import Condition
from harness.analysis.flags import CEILING_TOLERANCE
from harness.analysis.growth import ended_by_memory, growth_stopped
from harness.analysis.requested import NAMES_SHOWN
from harness.analysis.warnings import ALL, Flag, Warnings
from harness.base.text import cores_text, plural
from harness.records import tables
from harness.records.kinds import Record, done_of, loaded_of, served_elsewhere
from harness.records.measured import Counters
from harness.records.parts import StackFacts
from harness.records.token_times import TokenTimes

USABLE = ("ok", "functional")  # it ran as requested, but the speed of a functional one means nothing


def other_length(record: Record) -> list[Flag]:
    """More or fewer tokens than requested."""
    new_tokens = record["workload"]["new_tokens"]
    if record["tokens"] == new_tokens or growth_stopped(record) or tables.name_of(record):
        return []
    if served_elsewhere(record):
        return served.other_length(record)
    return [Warnings.other_length.flag(tokens=plural(record["tokens"], "token"), requested=new_tokens)]


def other_prefix(record: Record) -> Iterator[Flag]:
    """A prefix that was reused, or tokens that were added to the prompt."""
    counters, decoded = done_of(record)["counters"], record["tokens"] - 1
    evaluated, expected = counters.get("evaluated_tokens"), record["workload"]["prompt_tokens"] + decoded
    if (counted := counters.get("prompt_tokens")) is not None:
        # Of a server, which may add a template, and whose counts of the answer need not be right.
        expected = counted + decoded
        evaluated = expected - counters.get("cached_tokens", 0)
    if evaluated is not None and evaluated != expected and not growth_stopped(record):
        yield Warnings.other_prefix.flag(evaluated=evaluated, expected=expected)


def compiled(record: Record) -> Iterator[Flag]:
    """The stack compiled something while it was timed."""
    if compilations := done_of(record)["counters"].get("compilations"):
        yield Warnings.compiled.flag(compilations=plural(compilations, "compilation"))


STACK: tuple[Condition, ...] = (
    other_length,
    other_prefix,
    requested.device_and_kernels,
    served.faults,
    requested.short_cache,
    requested.other_weights,
    lambda record: requested.other_options(record["options"], loaded_of(record)),
    compiled,
)
FINISHED: tuple[Condition, ...] = (*STACK, clock_of_stack, *disturbances.CONDITIONS)
"""Conditions of a finished repeat."""


def faster_than_memory(record: Record, ceiling: float | None) -> Iterator[Flag]:
    """It read more than the measured bandwidth allows. `ceiling`: bytes/s."""
    share = traffic.past_cache_share(record, ceiling)
    if ceiling is not None and share is not None and share > CEILING_TOLERANCE:
        measured = traffic.spread([*traffic.probed_bytes_per_s([record]), ceiling])
        yield Warnings.memory_faster_than_limit.flag(share=share, measured=measured)


def context_past_training(record: Record) -> list[Flag]:
    """The run goes past the context that the model was trained on."""
    workload = record["workload"]
    decoded = record["tokens"] if workload["kind"] == "grow" else workload["new_tokens"]
    return beyond_trained(_facts(record), workload["prompt_tokens"] + decoded, "the context grows to")


def beyond_trained(facts: StackFacts, length: int | None, reaches: str) -> list[Flag]:
    """A flag for a context that is longer than any in the model's training; empty where either is unknown."""
    trained = facts.get("trained_context")
    if not trained or not length or length <= trained:
        return []
    numbers = {"length": length, "trained": trained}
    return [Warnings.beyond_trained_context.flag(reaches=reaches, **numbers)]


def reported_by_stack(record: Record) -> Iterator[Flag]:
    """Other versions than pinned, the stack's own warnings, and its allocator's retries."""
    if pins := ((record.get("environment") or {}).get("adopted") or {}).get("pins_not_met"):
        yield Warnings.not_pinned.flag(packages="; ".join(pins))
    for message in _facts(record).get("warnings") or []:
        yield Warnings.stack_warning.flag(message=message)
    if retries := done_of(record).get("counters", Counters()).get("allocator_retries"):
        places = ", ".join(str(n) for n, _ in retries[:NAMES_SHOWN])
        more = f" and {len(retries) - NAMES_SHOWN} more places" if len(retries) > NAMES_SHOWN else ""
        times = plural(sum(count for _, count in retries), "time")
        yield Warnings.allocator_retries.flag(times=times, places=places + more)


def where_it_ran(record: Record) -> Iterator[Flag]:
    """Weights in two memories, and cores of several kinds."""
    if where := traffic.elsewhere_in_memory(record):
        yield Warnings.two_memories.flag(where=where)
    if record.get("device") == "cpu" and record["machine"].get("core_kinds"):
        threads, cores = plural(record["threads"], "thread"), cores_text(record["machine"])
        yield Warnings.cores_of_several_kinds.flag(threads=threads, cores=cores)


ANY: tuple[Condition, ...] = (
    context_past_training,
    reported_by_stack,
    where_it_ran,
    expert_routing.routing_notes,
    flags.rotary_notes,
    served.notes,
    speculation.notes,
    *disturbances.DEVICE,
)
"""Conditions of a repeat, as far as it got."""


def _facts(record: Record) -> StackFacts:
    """What the stack reports after the run, as far as it got."""
    return loaded_of(record) | done_of(record).get("facts_changed", StackFacts())


@dataclass(frozen=True)
class Verdict:
    """A repeat's status and reasons. `disturbed`: the disturbance, where only disturbances made it invalid;
    None otherwise. `next_steps`: the user's, for the reasons. `notes`: what invalidates not all of it."""

    status: str
    reasons: list[str]
    disturbed: Disturbance | None = None
    next_steps: list[str] = field(default_factory=list)
    notes: list[Flag] = field(default_factory=list)


def invalid(faults: Sequence[Flag], known_failure: Sequence[str] = (), notes: Sequence[Flag] = ()) -> Verdict:
    """The verdict on a repeat with these faults. `known_failure`: what was known of it before it ran."""
    reasons = [*(fault.detail for fault in faults), *known_failure]
    steps = list(dict.fromkeys(fault.warning.next_step for fault in faults))
    return Verdict("invalid", reasons, disturbance_kind(faults), steps, [*notes])


def status(record: Record) -> tuple[str, list[str]]:
    """Status and reasons of a record by itself, without its series."""
    judged = verdict(record)
    return judged.status, judged.reasons


def verdict(
    record: Record,
    ceiling: float | None = None,
    has_series: bool = True,
    times: TokenTimes | None = None,
    table: depth.Columns | None = None,
) -> Verdict:
    """The status of a record: its outcome, or `invalid` or `functional`, with the reasons.

    `ceiling`: read bandwidth in bytes/s; None: the best of the record's own probes. `has_series`: whether the
    file of its tokens or timed rows is intact. `times`, `table`: these, if read; without them a device's
    clock is not compared, and no turn with another.
    """
    known_failure = [f"known beforehand: {why}" for why in record.get("known_failure", [])]
    outcome, measured = record["outcome"], record["kind"] == "measured"
    if not measured and record["kind"] != "reported":
        return _of_outcome(record, known_failure, [])
    while_running = _raised(ANY, record)
    after_all = _raised(FINISHED, record) if measured and outcome == "ok" else []
    notes = [flag for flag in (*while_running, *after_all) if flag.invalidates != ALL]
    if ended_by_memory(record):
        mismatches = requested.option_mismatches(record["device"], record["options"], loaded_of(record))
        return invalid(mismatches, known_failure, notes) if mismatches else _usable(record, notes)
    if outcome != "ok" or not measured:  # published figures are shown as they are
        return _of_outcome(record, known_failure, notes)
    ceiling = ceiling or traffic.ceiling_bytes_per_s([record])
    faults = [flag for flag in (*after_all, *while_running) if flag.invalidates == ALL]
    faults += faster_than_memory(record, ceiling)
    faults += [*clock_of_device(record, times), *depth.surface_faults(record, table or {})]
    if table and tables.name_of(record) == "prefill":
        faults += prefill_rows.faster_than_possible(record, prefill.by_depth([table]), ceiling)
    if table and tables.name_of(record) == "users":
        faults += users.faults(record, table, ceiling)
    if not has_series:
        what = "table of timed rows" if tables.name_of(record) else "series of tokens"
        faults.append(Warnings.rows_missing.flag(what=what))
    if functional(record) and disturbance_kind(faults):
        faults = []  # its speed means nothing anyway
    return invalid(faults, known_failure, notes) if faults else _usable(record, notes)


def _raised(conditions: Sequence[Condition], record: Record) -> list[Flag]:
    return [flag for condition in conditions for flag in condition(record)]


def _usable(record: Record, notes: list[Flag]) -> Verdict:
    why = functional(record)
    return Verdict("functional", [why], notes=notes) if why else Verdict("ok", [], notes=notes)


def _of_outcome(record: Record, known_failure: Sequence[str], notes: list[Flag]) -> Verdict:
    """The verdict of what is not judged: a search that ended, a failure, published figures."""
    if record["kind"] == "searched" and record["outcome"] == "ok":
        return _usable(record, notes)
    reason = record.get("reason")
    return Verdict(record["outcome"], [reason, *known_failure] if reason else [], notes=notes)


def functional(record: Record) -> str | None:
    """Why the speed of the record's stack or machine means nothing; None: it does."""
    shown = (record.get("machine") or {}).get("emulated")
    emulated = Warnings.emulated.flag(machine=shown).detail if shown else None
    return loaded_of(record).get("functional") or emulated


def attempts_left(record: Record, judged: Verdict) -> bool:
    """Whether the campaign measures this repeat again."""
    retries = (record.get("protocol") or {}).get("retry_disturbed", 0)
    return judged.disturbed is not None and record.get("attempt", 1) <= retries
