"""Is this record's figure a figure? Reasons why not, from the record alone. Pure."""

from __future__ import annotations

import math
from typing import Any

from harness.analysis.traffic import bandwidth_share, ceiling_bytes_per_s

# Two clocks on one run: llama.cpp's own counters against our stamps.
CLOCK_TOLERANCE = 0.02
CLOCK_TOLERANCE_MS_PER_TOKEN = 0.1
CEILING_TOLERANCE = 1.05  # a share of the measured bandwidth above this is no measurement
CONTENTION_TOLERANCE = 0.05  # of threads x time; 0.1% is usual on a quiet machine
CONTENTION_FLOOR_NS = 50_000_000  # a wait or two, which any machine has, is a large share of a very short run
STALLED_SHARE = 0.01  # of the timed part
STALLED_FLOOR_US = 10_000
PAGE_BYTES = 4096
REFAULT_FLOOR_BYTES = 64 << 20
REFAULT_TOLERANCE = 0.05  # of the model: the counter is the machine's, and others read files too

Record = dict[str, Any]


def status(record: Record, ceiling: float | None = None, has_series: bool = True) -> tuple[str, list[str]]:
    """The outcome, or `invalid` when a verdict says so, with the reasons.

    `ceiling`: read bandwidth in bytes/s; null: the best of the probes that the record itself has.
    `has_series`: whether its per-token file is still whole.
    """
    if record["outcome"] != "ok" or record["kind"] == "reported":  # others' figures are shown as they stand
        return record["outcome"], [record["reason"]] if record.get("reason") else []
    reasons = invalid_because(record, ceiling or ceiling_bytes_per_s([record]))
    if not has_series:
        reasons.append("its series of tokens is missing or damaged")
    return ("invalid", reasons) if reasons else ("ok", [])


def invalid_because(record: Record, ceiling: float | None) -> list[str]:
    """Each reason why a finished repeat's figures are none, as a sentence; empty when it stands."""
    loaded, done = record["loaded"], record["done"]
    prompt, new = record["workload"]["prompt_tokens"], record["workload"]["new_tokens"]
    reasons = []
    if record["tokens"] != new:
        reasons.append(f"{record['tokens']} tokens came, {new} were asked for")
    evaluated = done["counters"].get("evaluated_tokens")
    if evaluated is not None and evaluated != prompt + record["tokens"] - 1:
        expected = prompt + record["tokens"] - 1
        reasons.append(
            f"{evaluated} tokens were evaluated where {expected} had to be: a prefix was reused or added"
        )
    for facts in (loaded, loaded | done["facts_changed"]):
        asked = facts.get("kernel_asked")
        if asked is not None and asked not in facts["kernels"]:
            ran = ", ".join(facts["kernels"]) or "none"
            reasons.append(f"kernel {asked} was asked for and {ran} ran")
            break
    reasons += _weights(record)
    reasons += _options(record)
    reasons += _placement(record)
    if not done["warmup"]["agreed"]:
        reasons.append("warm-up never settled: no two windows in a row agreed")
    reasons += _second_clock(record)
    reasons += _paging(record)
    reasons += _contention(record)
    share = bandwidth_share(record, ceiling)
    if share is not None and share > CEILING_TOLERANCE:
        reasons.append(
            f"faster than memory allows: {share:.0%} of the read bandwidth measured on this machine"
        )
    return reasons


def _weights(record: Record) -> list[str]:
    """What the file's header says against what the stack says it loaded."""
    header, loaded = record["model"]["weights"].get("header"), record["loaded"]
    reasons = []
    if header:
        for name in ("model_bytes", "parameters"):
            if loaded.get(name) is not None and loaded[name] != header[name]:
                reasons.append(
                    f"{name} is {loaded[name]} in the stack and {header[name]} in the file's header"
                )
    asked, found = record["options"].get("quant"), loaded.get("quant")
    if asked is not None and found is not None and asked != found:
        reasons.append(f"weights of type {asked} were asked for and {found} were loaded")
    return reasons


def _options(record: Record) -> list[str]:
    """Switches, names and threads that the stack resolved to something else than was asked. Sizes it may
    round."""
    resolved = record["loaded"].get("options") or {}
    asked = {k: v for k, v in record["options"].items() if isinstance(v, bool | str) or k == "threads"}
    changed = [k for k, v in asked.items() if resolved.get(k) is not None and resolved[k] != v]
    return [f"{name} {asked[name]} was asked for and {resolved[name]} ran" for name in changed]


def _placement(record: Record) -> list[str]:
    """Layers or cache on the CPU when a GPU was asked for."""
    if record["device"] == "cpu" or record["options"].get("gpu_layers", -1) != -1:
        return []
    devices = record["loaded"].get("devices") or {}
    strayed = [
        f"{part}: {on['CPU']} on the CPU"
        for part, on in devices.items()
        if isinstance(on, dict) and on.get("CPU")
    ]
    return [f"not all on the device asked for ({'; '.join(strayed)})"] if strayed else []


def _second_clock(record: Record) -> list[str]:
    """The stack's own decode time against ours, less what we do between its steps (argmax)."""
    theirs = record["done"]["counters"].get("stack_decode_ms")
    steps = record["tokens"] - 1
    if theirs is None or steps < 1:
        return []
    ours = (record["timing"]["last_token_ns"] - record["timing"]["first_token_ns"]) / 1e6
    ours -= record["done"]["counters"].get("sampling_ms", 0.0)
    if abs(ours - theirs) > CLOCK_TOLERANCE * theirs + CLOCK_TOLERANCE_MS_PER_TOKEN * steps:
        return [
            f"two clocks differ: {ours / steps:.3f} ms a token here, {theirs / steps:.3f} by the stack's own"
        ]
    return []


def _contention(record: Record) -> list[str]:
    """Threads that were ready and had no CPU: someone else was running. Two threads that meet at a barrier
    for every tensor are slowed by far more than the share they lose."""
    waited_ns, timing = record["done"].get("cpu_wait_ns"), record["timing"]
    if waited_ns is None or not timing.get("last_token_ns"):
        return []
    share = waited_ns / (timing["last_token_ns"] * record["threads"])
    if share > CONTENTION_TOLERANCE and waited_ns > CONTENTION_FLOOR_NS:
        return [f"its threads waited for a CPU {share:.0%} of the time: other processes were running"]
    return []


def _paging(record: Record) -> list[str]:
    reasons = []
    if faults := record["done"]["major_faults"]:
        reasons.append(f"{faults} major page faults while timing")
    pressure = record["conditions"].get("pressure", {})
    if pressure.get("pswpin"):
        reasons.append(f"{pressure['pswpin']} pages were swapped in while timing")
    refaulted = PAGE_BYTES * pressure.get("workingset_refault_file", 0)
    allowed = REFAULT_TOLERANCE * (record["loaded"].get("model_bytes") or math.inf)
    if refaulted > max(allowed, REFAULT_FLOOR_BYTES):
        reasons.append(f"{refaulted / 1e6:.0f} MB of evicted file pages were read again while timing")
    timed_us = (record["timing"].get("last_token_ns") or 0) / 1e3
    for name, what in (
        ("memory_stall_us", "memory pressure stalled the machine"),
        ("cgroup_throttled_us", "the CPU quota throttled it"),
    ):
        if pressure.get(name, 0) > max(STALLED_SHARE * timed_us, STALLED_FLOOR_US):
            reasons.append(f"{what} for {pressure[name] / 1e6:.2f} s of {timed_us / 1e6:.2f}")
    return reasons
