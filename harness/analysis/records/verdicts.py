"""Is this record's figure a figure? Reasons why not, and what else to know of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.analysis.records import disturbances, grow_results, throttling
from harness.analysis.records.disturbances import Kind, Reason
from harness.analysis.records.flags import Flag
from harness.analysis.records.traffic import bandwidth_share, ceiling_bytes_per_s
from harness.system.wording import plural

# Two clocks on one run: llama.cpp's own counters against our stamps.
CLOCK_TOLERANCE = 0.02
CLOCK_TOLERANCE_MS_PER_TOKEN = 0.1
# A device's own clock, token by token: whichever is larger.
DEVICE_CLOCK_TOLERANCE = 0.01
DEVICE_CLOCK_TOLERANCE_NS = 50_000
# Of tokens that the host came late to, and which the user got late: some of 10,000 are, on any machine.
BUSY_HOST_SHARE = 0.01
FIRST_TOKENS = 5  # of these none may be: an unsynchronised clock shows there
ELSEWHERE = ("cpu", "meta", "disk")  # not on a GPU; on a CPU only the first is right
NAMES_SHOWN = 3
CEILING_TOLERANCE = 1.05  # a share of the measured bandwidth above this is no measurement

USABLE = ("ok", "functional")  # it ran as asked; but of a functional one the speed says nothing
Record = dict[str, Any]
Series = Mapping[str, Sequence[int | None]]


@dataclass(frozen=True)
class Verdict:
    """A repeat's status, and why. `disturbed`: what of the machine made it invalid, where that is all that
    did; null otherwise."""

    status: str
    reasons: list[str]
    disturbed: Kind | None = None


def status(
    record: Record, ceiling: float | None = None, has_series: bool = True, series: Series | None = None
) -> tuple[str, list[str]]:
    """Status and reasons of `verdict`."""
    found = verdict(record, ceiling, has_series, series)
    return found.status, found.reasons


def verdict(
    record: Record, ceiling: float | None = None, has_series: bool = True, series: Series | None = None
) -> Verdict:
    """The outcome, or `invalid` when a verdict says so, or `functional`, with the reasons.

    `ceiling`: read bandwidth in bytes/s; null: the best of the probes that the record itself has.
    `has_series`: whether its per-token file is still whole. `series`: its columns, where they were read;
    without them a device's clock is not compared.
    """
    known = [f"known beforehand: {why}" for why in record.get("known_failure", [])]
    functional = (record.get("loaded") or {}).get("functional")
    usable = Verdict("functional", [str(functional)]) if functional else Verdict("ok", [])
    if grow_results.answers(record) and (
        reasons := option_mismatches(record, record["options"], record["loaded"])
    ):
        return Verdict("invalid", [*reasons, *known])
    if grow_results.answers(record) or (record["kind"] == "searched" and record["outcome"] == "ok"):
        return usable
    if record["outcome"] != "ok" or record["kind"] == "reported":  # others' figures are shown as they stand
        return Verdict(record["outcome"], [record["reason"], *known] if record.get("reason") else [])
    found = _reasons(record, ceiling or ceiling_bytes_per_s([record]))
    found += _device_clock(record, series)
    if not has_series:
        found.append(Reason("its series of tokens is missing or damaged"))
    if found:
        texts = [reason.text for reason in found]
        return Verdict("invalid", [*texts, *known], disturbances.kind(found))
    return usable


def attempts_left(record: Record, found: Verdict) -> bool:
    """Whether its campaign measures a repeat again after this attempt at it."""
    retries = (record.get("protocol") or {}).get("retry_disturbed", 0)
    return found.disturbed is not None and record.get("attempt", 1) <= retries


def option_mismatches(record: Record, options: Record, facts: Record) -> list[str]:
    """Where what a stack says it loaded is not what it was asked for, each a sentence. `options`: asked."""
    return [*other_kernels(facts), *_placement(record, facts), *other_options(options, facts)]


def invalid_because(record: Record, ceiling: float | None) -> list[str]:
    """Each reason why a finished repeat's figures are none, as a sentence; empty when it stands."""
    return [reason.text for reason in _reasons(record, ceiling)]


def _reasons(record: Record, ceiling: float | None) -> list[Reason]:
    """What the stack did wrong first, then what the machine did."""
    return [*map(Reason, _stack_faults(record, ceiling)), *disturbances.reasons(record)]


def _stack_faults(record: Record, ceiling: float | None) -> list[str]:
    loaded, done = record["loaded"], record["done"]
    prompt, new = record["workload"]["prompt_tokens"], record["workload"]["new_tokens"]
    reasons = []
    stopped = grow_results.stopped(record)
    if record["tokens"] != new and not stopped:
        reasons.append(f"{plural(record['tokens'], 'token')} came, {new} were asked for")
    evaluated = done["counters"].get("evaluated_tokens")
    if evaluated is not None and evaluated != prompt + record["tokens"] - 1 and not stopped:
        expected = prompt + record["tokens"] - 1
        reasons.append(
            f"{evaluated} tokens were evaluated where {expected} had to be: a prefix was reused or added"
        )
    # What the stack said after loading, and again after the run.
    for facts in (loaded, loaded | done["facts_changed"]):
        if mismatches := [*other_kernels(facts), *_placement(record, facts)]:
            reasons += mismatches
            break
    reasons += _window(record)
    reasons += _weights(record)
    reasons += other_options(record["options"], record["loaded"])
    if compiled := done["counters"].get("compilations"):
        reasons.append(f"{plural(compiled, 'compilation')} while timing")
    reasons += _second_clock(record)
    share = bandwidth_share(record, ceiling)
    if share is not None and share > CEILING_TOLERANCE:
        reasons.append(
            f"faster than memory allows: {share:.0%} of the read bandwidth measured on this machine"
        )
    return reasons


def remarks(record: Record) -> list[Flag]:
    """What to know of a repeat that invalidates none of its figures."""
    loaded, done = record.get("loaded") or {}, record.get("done") or {}
    facts, workload = loaded | (done.get("facts_changed") or {}), record["workload"]
    said = []
    trained, asked = facts.get("trained_context"), workload["prompt_tokens"] + workload["new_tokens"]
    if trained and asked > trained:
        detail = f"{asked} tokens are decoded, and the model was trained on contexts of up to {trained}"
        said.append(Flag("beyond_trained_context", detail, invalidates=None))
    said += [Flag("stack_warning", warning, invalidates=None) for warning in facts.get("warnings") or []]
    if retries := (done.get("counters") or {}).get("allocator_retries"):
        places = ", ".join(str(n) for n, _ in retries[:NAMES_SHOWN])
        more = f" and {len(retries) - NAMES_SHOWN} more places" if len(retries) > NAMES_SHOWN else ""
        times = plural(sum(count for _, count in retries), "time")
        detail = f"{times} the allocator had to free memory and try again"
        said.append(Flag("allocator_retries", f"{detail}, at n = {places}{more}", invalidates=None))
    return [*said, *throttling.remarks(record), *disturbances.remarks(record)]


def other_kernels(facts: Record) -> list[str]:
    """Where what a stack says of its kernels is not what it was asked for, each a sentence."""
    return [*_kernels(facts), *_leftovers(facts)]


def _kernels(facts: Record) -> list[str]:
    asked = facts.get("kernel_asked")
    if asked is None or asked in (ran := facts["kernels"]):
        return []
    # Of a torch model these are all classes of layers; what stands in place of the one asked for is linear.
    linear = [name for name in ran if "Linear" in name and name != "Linear"] or list(ran)
    return [f"kernel {asked} was asked for and {', '.join(linear) or 'none'} ran"]


def _leftovers(facts: Record) -> list[str]:
    """Linear layers that should have been quantized and are not."""
    names = facts.get("leftovers") or []
    if not names:
        return []
    more = ", ..." if len(names) > NAMES_SHOWN else ""
    layers = f"{len(names)} linear layers are" if len(names) > 1 else "1 linear layer is"
    return [f"{layers} not quantized as asked: {', '.join(names[:NAMES_SHOWN])}{more}"]


def _window(record: Record) -> list[str]:
    """A cache that was too short for what was decoded, and went on."""
    holds, workload = record["loaded"].get("holds_tokens"), record["workload"]
    asked = workload["prompt_tokens"] + workload["new_tokens"]
    if holds is None or holds >= asked:
        return []
    return [f"its cache holds {holds} tokens of {asked}: past them it loses what it held, and reads no more"]


def _weights(record: Record) -> list[str]:
    """What the file's header says against what the stack says it loaded; bytes only where it holds the types
    that the file stores: a GGUF's, and of a checkpoint, which is cast to one type, its only one."""
    weights, loaded = record["model"]["weights"], record["loaded"]
    header, stored, found = weights.get("header"), weights.get("quant"), loaded.get("quant")
    cast = weights.get("format") == "hf" and len((header or {}).get("bytes_by_type") or ()) != 1
    cast = cast or bool(stored and found and stored != found)
    compared = ["parameters"] if cast else ["model_bytes", "parameters"]
    reasons = []
    for name in compared if header else ():
        if loaded.get(name) is not None and loaded[name] != header[name]:
            reasons.append(f"{name} is {loaded[name]} in the stack and {header[name]} in the file's header")
    asked = record["options"].get("quant")
    if asked is not None and found is not None and asked != found:
        reasons.append(f"weights of type {asked} were asked for and {found} were loaded")
    return reasons


def other_options(asked: Record, facts: Record) -> list[str]:
    """Switches, names and threads that the stack resolved to something else than was asked. Sizes it may
    round."""
    resolved = facts.get("options") or {}
    asked = {k: v for k, v in asked.items() if isinstance(v, bool | str) or k == "threads"}
    changed = [k for k, v in asked.items() if resolved.get(k) is not None and resolved[k] != v]
    return [f"{name} {_word(asked[name])} was asked for and {_word(resolved[name])} ran" for name in changed]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _placement(record: Record, facts: Record) -> list[str]:
    """Weights, tables or cache elsewhere than on the device asked for."""
    wrong: Sequence[str]
    if record["device"] == "cpu":
        wrong = ELSEWHERE[1:]
    elif record["options"].get("gpu_layers", -1) == -1:
        wrong = ELSEWHERE
    else:
        return []
    mismatches = [
        f"{part}: {count} on {'the CPU' if name.lower() == 'cpu' else name}"
        for part, on in (facts.get("devices") or {}).items()
        if isinstance(on, dict)
        for name, count in on.items()
        if name.lower() in wrong and count
    ]
    return [f"offloaded, not all on the device asked for ({'; '.join(mismatches)})"] if mismatches else []


def _second_clock(record: Record) -> list[str]:
    """The stack's own decode time against ours, less what we do between its steps (argmax). A thread that
    waits for a CPU between the two makes ours the longer one, by at most what the process waited."""
    theirs = record["done"]["counters"].get("stack_decode_ms")
    steps = record["tokens"] - 1
    if theirs is None or steps < 1:
        return []
    ours = (record["timing"]["last_token_ns"] - record["timing"]["first_token_ns"]) / 1e6
    ours -= record["done"]["counters"].get("sampling_ms", 0.0)
    allowed = CLOCK_TOLERANCE * theirs + CLOCK_TOLERANCE_MS_PER_TOKEN * steps
    waited = (record["done"].get("cpu_wait_ns") or 0) / 1e6
    if theirs - ours > allowed or ours - theirs > allowed + waited:
        return [
            f"two clocks differ: {ours / steps:.3f} ms a token here, {theirs / steps:.3f} by the stack's own"
        ]
    return []


def _device_clock(record: Record, series: Series | None) -> list[Reason]:
    """Each token by the device's own clock (CUDA events) against ours. Our flushes stand between two of its
    events and are in no latency of ours."""
    told = record["done"]["counters"].get("device_tokens")
    if told is None:
        return []
    if told != record["tokens"]:
        return [Reason(f"the device's clock timed {told} tokens, and {record['tokens']} came")]
    if not series:
        return []
    times = series.get("device_ns")
    if times is None or None in times:
        return [Reason("its times by the device's clock are missing or damaged")]
    host, device = (np.array(column, dtype=float) for column in (series["latency_ns"], times))
    for index, flush_ns in record["done"].get("flushes", []):
        if index < len(device):
            device[index] -= flush_ns
    gaps, allowed = host - device, np.maximum(DEVICE_CLOCK_TOLERANCE * device, DEVICE_CLOCK_TOLERANCE_NS)
    differ = np.abs(gaps) > allowed
    if not differ.any():
        return []
    at = int(np.argmax(np.abs(gaps)))
    reason = (
        f"two clocks differ on {int(differ.sum())} of {len(host)} tokens by more than 1% and 0.05 ms; most "
        f"at n = {series['n'][at]}: {host[at] / 1e6:.3f} ms here, {device[at] / 1e6:.3f} by the device's own"
    )
    in_all = max(DEVICE_CLOCK_TOLERANCE * float(device.sum()), DEVICE_CLOCK_TOLERANCE_NS)
    if abs(float(gaps.sum())) > in_all:
        return [Reason(reason)]
    # A token that seems short after one that seemed long only gives back what a busy host took.
    late_before = np.concatenate([[False], (gaps > allowed / 2)[:-1]])
    if (differ & (gaps < 0) & ~late_before).any():
        return [Reason(f"{reason}; their totals agree: ours was read before the device was done")]
    if differ.mean() <= BUSY_HOST_SHARE and not differ[:FIRST_TOKENS].any():
        return []
    text = f"{reason}; their totals agree: the device was done before ours was read, on a busy host"
    return [Reason(text, "cpu")]
