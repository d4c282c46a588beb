"""Is this record's measurement valid? Reasons why not, and notes on it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.analysis.records import (
    clocks,
    disturbances,
    grow_results,
    placement,
    prefill,
    rotary,
    routing,
    surface,
    throttling,
)
from harness.analysis.records.disturbances import Reason
from harness.analysis.records.flags import Flag
from harness.analysis.records.placement import NAMES_SHOWN
from harness.analysis.records.traffic import (
    ceiling_bytes_per_s,
    past_cache_share,
    probed_bytes_per_s,
    spread,
)
from harness.analysis.rows import Disturbance
from harness.results import tables
from harness.results.kinds import Record, done_of, loaded_of
from harness.results.kinds.measured import Counters
from harness.results.kinds.parts import StackFacts
from harness.results.token_times import TokenTimes
from harness.stacks.rules import Options
from harness.system.wording import plural

CEILING_TOLERANCE = 1.05  # a larger share of the measured bandwidth is a measurement error

BEYOND_TRAINED = "beyond_trained_context"
USABLE = ("ok", "functional")  # it ran as requested, but the speed of a functional one means nothing


@dataclass(frozen=True)
class Verdict:
    """A repeat's status and reasons. `disturbed`: the disturbance, where only disturbances made it invalid;
    null otherwise."""

    status: str
    reasons: list[str]
    disturbed: Disturbance | None = None


def status(
    record: Record, ceiling: float | None = None, has_series: bool = True, times: TokenTimes | None = None
) -> tuple[str, list[str]]:
    """Status and reasons of `verdict`."""
    found = verdict(record, ceiling, has_series, times)
    return found.status, found.reasons


def verdict(
    record: Record,
    ceiling: float | None = None,
    has_series: bool = True,
    times: TokenTimes | None = None,
    table: surface.Columns | None = None,
) -> Verdict:
    """The status of a record: its outcome, or `invalid` or `functional`, with the reasons.

    `ceiling`: read bandwidth in bytes/s; null: the best of the record's own probes. `has_series`: whether the
    file of its tokens or timed rows is intact. `times`, `table`: these, if read; without them a device's
    clock is not compared, and no turn with another.
    """
    known = [f"known beforehand: {why}" for why in record.get("known_failure", [])]
    functional = loaded_of(record).get("functional") or _emulated(record)
    usable = Verdict("functional", [str(functional)]) if functional else Verdict("ok", [])
    if grow_results.ended_by_memory(record) and (
        reasons := option_mismatches(record["device"], record["options"], loaded_of(record))
    ):
        return Verdict("invalid", [*reasons, *known])
    if grow_results.ended_by_memory(record) or (record["kind"] == "searched" and record["outcome"] == "ok"):
        return usable
    if record["outcome"] != "ok" or record["kind"] == "reported":  # published figures are shown as they are
        reason = record.get("reason")
        return Verdict(record["outcome"], [reason, *known] if reason else [])
    ceiling = ceiling or ceiling_bytes_per_s([record])
    found = _reasons(record, ceiling)
    found += clocks.of_device(record, times)
    found += map(Reason, surface.faults(record, table or {}))
    if table and tables.name_of(record) == "prefill":
        fast = prefill.faster_than_possible(record, prefill.by_depth([table]), ceiling)
        found += [Reason(f"faster than its limit: {flag.detail}") for flag in fast]
    if not has_series:
        what = "table of timed rows" if tables.name_of(record) else "series of tokens"
        found.append(Reason(f"its {what} is missing or damaged"))
    if found:
        texts = [reason.text for reason in found]
        return Verdict("invalid", [*texts, *known], disturbances.kind(found))
    return usable


def _emulated(record: Record) -> str | None:
    """Why no speed of the record's machine means anything; null for a real one."""
    shown = (record.get("machine") or {}).get("emulated")
    return f"the machine is emulated ({shown}): its speeds mean nothing" if shown else None


def attempts_left(record: Record, found: Verdict) -> bool:
    """Whether the campaign measures this repeat again."""
    retries = (record.get("protocol") or {}).get("retry_disturbed", 0)
    return found.disturbed is not None and record.get("attempt", 1) <= retries


def option_mismatches(device: str, options: Options, facts: StackFacts) -> list[str]:
    """Differences between what a stack loaded and what was requested, one sentence each."""
    return [
        *other_kernels(facts),
        *placement.mismatches(device, options, facts),
        *other_options(options, facts),
    ]


def invalid_because(record: Record, ceiling: float | None) -> list[str]:
    """Each reason why a finished repeat is invalid, as a sentence; empty for a valid one."""
    return [reason.text for reason in _reasons(record, ceiling)]


def _reasons(record: Record, ceiling: float | None) -> list[Reason]:
    """Faults of the stack first, then disturbances by the machine."""
    return [
        *map(Reason, _stack_faults(record, ceiling)),
        *clocks.of_stack(record),
        *disturbances.reasons(record),
    ]


def _stack_faults(record: Record, ceiling: float | None) -> list[str]:
    loaded, done = loaded_of(record), done_of(record)
    prompt, new = record["workload"]["prompt_tokens"], record["workload"]["new_tokens"]
    reasons = []
    stopped = grow_results.stopped(record)
    if record["tokens"] != new and not stopped and not tables.name_of(record):
        reasons.append(f"{plural(record['tokens'], 'token')} generated, {new} requested")
    evaluated = done["counters"].get("evaluated_tokens")
    if evaluated is not None and evaluated != prompt + record["tokens"] - 1 and not stopped:
        expected = prompt + record["tokens"] - 1
        reasons.append(
            f"{evaluated} tokens were evaluated, {expected} expected: a prefix was reused or added"
        )
    # The stack's report after loading, then the one after the run.
    for facts in (loaded, loaded | done["facts_changed"]):
        if mismatches := [
            *other_kernels(facts),
            *placement.mismatches(record["device"], record["options"], facts),
        ]:
            reasons += mismatches
            break
    reasons += _window(record)
    reasons += _weights(record)
    reasons += other_options(record["options"], loaded_of(record))
    if compiled := done["counters"].get("compilations"):
        reasons.append(f"{plural(compiled, 'compilation')} while timing")
    share = past_cache_share(record, ceiling)
    if ceiling is not None and share is not None and share > CEILING_TOLERANCE:
        measured = spread([*probed_bytes_per_s([record]), ceiling])
        reasons.append(f"faster than memory allows: past the CPU's cache it reads {share:.0%} of {measured}")
    return reasons


def notes(record: Record) -> list[Flag]:
    """Notes on a repeat that invalidate none of its figures."""
    loaded, done = loaded_of(record), done_of(record)
    facts, workload = loaded | done.get("facts_changed", StackFacts()), record["workload"]
    raised = []
    decoded = record["tokens"] if workload["kind"] == "grow" else workload["new_tokens"]
    raised += beyond_trained(facts, workload["prompt_tokens"] + decoded, "the context grows to")
    if pins := ((record.get("environment") or {}).get("adopted") or {}).get("pins_not_met"):
        raised.append(Flag("not_pinned", f"an adopted interpreter, not pinned: {'; '.join(pins)}", None))
    raised += [Flag("stack_warning", warning, invalidates=None) for warning in facts.get("warnings") or []]
    if retries := done.get("counters", Counters()).get("allocator_retries"):
        places = ", ".join(str(n) for n, _ in retries[:NAMES_SHOWN])
        more = f" and {len(retries) - NAMES_SHOWN} more places" if len(retries) > NAMES_SHOWN else ""
        times = plural(sum(count for _, count in retries), "time")
        detail = f"{times} the allocator had to free memory and try again"
        raised.append(Flag("allocator_retries", f"{detail}, at n = {places}{more}", invalidates=None))
    raised += [*routing.notes(record), *rotary.notes(record)]
    return [*raised, *throttling.notes(record), *disturbances.notes(record)]


def beyond_trained(facts: StackFacts, length: int | None, reaches: str) -> list[Flag]:
    """A flag for a context that is longer than any in the model's training; empty where either is unknown."""
    trained = facts.get("trained_context")
    if not trained or not length or length <= trained:
        return []
    detail = f"{reaches} {length} tokens, but the model was trained on at most {trained}"
    return [Flag(BEYOND_TRAINED, detail, invalidates=None)]


def other_kernels(facts: StackFacts) -> list[str]:
    """Differences between the kernels that ran and the requested ones, one sentence each."""
    return [*_kernels(facts), *_leftovers(facts)]


def _kernels(facts: StackFacts) -> list[str]:
    requested = facts.get("kernel_asked")
    if requested is None or requested in (ran := facts["kernels"]):
        return []
    # For a torch model these are all classes of layers; the one that replaced the requested one is linear.
    linear = [name for name in ran if "Linear" in name and name != "Linear"] or list(ran)
    return [f"kernel {requested} was requested but {', '.join(linear) or 'none'} ran"]


def _leftovers(facts: StackFacts) -> list[str]:
    """Linear layers that should be quantized but are not."""
    names = facts.get("leftovers") or []
    if not names:
        return []
    more = ", ..." if len(names) > NAMES_SHOWN else ""
    layers = f"{len(names)} linear layers are" if len(names) > 1 else "1 linear layer is"
    return [f"{layers} not quantized as requested: {', '.join(names[:NAMES_SHOWN])}{more}"]


def _window(record: Record) -> list[str]:
    """A KV cache shorter than the run: the stack discarded tokens and continued."""
    holds, workload = loaded_of(record).get("holds_tokens"), record["workload"]
    needed = workload["prompt_tokens"] + workload["new_tokens"]
    if holds is None or holds >= needed:
        return []
    return [
        f"its cache holds {holds} tokens of {needed}: past them it discards tokens, so latency stops growing"
    ]


def _weights(record: Record) -> list[str]:
    """Compare the loaded weights with the file's header. Bytes are compared only where the stack keeps the
    stored types: of a GGUF, and of a checkpoint with a single type (it is cast to one type)."""
    weights, loaded = record["model"]["weights"], loaded_of(record)
    header, stored, found = weights.get("header"), weights.get("quant"), loaded.get("quant")
    reasons = []
    if header:
        cast = weights.get("format") == "hf" and len(header.get("bytes_by_type") or ()) != 1
        cast = cast or bool(stored and found and stored != found)
        sizes = [
            ("parameters", loaded.get("parameters"), header["parameters"]),
            ("draft_bytes", loaded.get("draft_bytes"), header.get("draft_bytes", 0)),
        ]
        if not cast:
            sizes.insert(0, ("model_bytes", loaded.get("model_bytes"), header["model_bytes"]))
        reasons += [
            f"{name} is {ours} in the stack but {theirs} in the file's header"
            for name, ours, theirs in sizes
            if ours is not None and ours != theirs
        ]
    requested = record["options"].get("quant")
    if requested is not None and found is not None and requested != found:
        reasons.append(f"weights of type {requested} were requested but {found} were loaded")
    return reasons


def other_options(requested: Options, facts: StackFacts) -> list[str]:
    """Switches, names and thread counts that the stack resolved differently. It may round sizes."""
    resolved: Mapping[str, object] = facts.get("options") or {}
    given = {k: v for k, v in requested.items() if isinstance(v, bool | str) or k == "threads"}
    changed = [k for k, v in given.items() if resolved.get(k) is not None and resolved[k] != v]
    return [f"{name} {_word(given[name])} was requested but {_word(resolved[name])} ran" for name in changed]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
