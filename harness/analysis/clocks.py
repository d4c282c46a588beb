"""The stack's and the device's own clocks against ours, on one run. Pure."""

from __future__ import annotations

import numpy as np

from harness.analysis.warnings import Flag, Warnings
from harness.records.kinds import Record, done_of, served_elsewhere
from harness.records.token_times import TokenTimes

CLOCK_TOLERANCE = 0.02
CLOCK_TOLERANCE_MS_PER_TOKEN = 0.02
OUR_LOOP_MS_PER_TOKEN = 0.1  # between two steps, where the stack's runner does not time the steps alone
PAUSE_MS = 50.0  # of a CPU that a hypervisor stopped once or twice
# Per token, for a device's own clock: the larger of the two.
DEVICE_CLOCK_TOLERANCE = 0.01
DEVICE_CLOCK_TOLERANCE_NS = 50_000
FIRST_EVENT_NS = 1_000_000  # ours may begin this much earlier: 0.23 ms until an idle H200 had the first event
# Share of tokens that a busy host delivered late; any machine has some in 10,000.
BUSY_HOST_SHARE = 0.01
FIRST_TOKENS = 5  # none of these may be late: an unsynchronised clock shows there


def clock_of_stack(record: Record) -> list[Flag]:
    """Compare the stack's own decode time with ours, less our work between steps. A wait for a CPU between
    the two clocks makes ours longer, by at most the process's total wait. A hypervisor's waits are not
    counted: a difference as short as one or two of them may be a disturbance."""
    counters, timing = done_of(record)["counters"], record["timing"]
    theirs, steps = counters.get("stack_decode_ms"), record["tokens"] - 1
    if theirs is None or steps < 1:
        return []
    between = (timing["last_token_ns"] - timing["first_token_ns"]) / 1e6 - counters.get("sampling_ms", 0.0)
    timed, loop = counters.get("steps_ms"), OUR_LOOP_MS_PER_TOKEN * steps
    compared = [(between, loop)] if timed is None else [(timed, 0.0), (between, loop)]
    waited = (done_of(record).get("cpu_wait_ns") or 0) / 1e6
    # A server's clock has the step that ended the text, which gives no token.
    end = theirs / (steps + 1) if counters.get("ended_by") == "stop" else 0.0
    for ours, more in compared:
        allowed = CLOCK_TOLERANCE * theirs + CLOCK_TOLERANCE_MS_PER_TOKEN * steps
        late = ours - theirs - (allowed + more + waited)
        if theirs - ours > allowed + end or late > 0:
            both = f"{ours / steps:.3f} ms/token here, {theirs / steps:.3f} by the stack's own"
            if served_elsewhere(record) and ours < theirs:
                return [Warnings.first_read_late.flag(clocks=both)]
            paused = 0 < late <= PAUSE_MS
            return [(Warnings.paused_between_clocks if paused else Warnings.clocks_differ).flag(clocks=both)]
    return []


def clock_of_device(record: Record, times: TokenTimes | None) -> list[Flag]:
    """Compare each token's time on the device's own clock (CUDA events) with ours. Our flushes fall between
    two events and are not part of our latencies."""
    timed = done_of(record)["counters"].get("device_tokens")
    if timed is None:
        return []
    if timed != record["tokens"]:
        return [Warnings.device_clock_incomplete.flag(timed=timed, tokens=record["tokens"])]
    if not times:
        return []
    device = times.device_latency_ns(done_of(record).get("flushes", []))
    if device is None:
        return [Warnings.device_clock_missing.flag()]
    host = times.latency_ns
    longer_ns, allowed = host - device, np.maximum(DEVICE_CLOCK_TOLERANCE * device, DEVICE_CLOCK_TOLERANCE_NS)
    differ = np.abs(longer_ns) > allowed
    differ[0] &= not 0 < longer_ns[0] <= FIRST_EVENT_NS
    if not differ.any():
        return []
    at = int(np.argmax(np.abs(longer_ns)))
    differences = (
        f"{int(differ.sum())} of {len(host)} tokens by more than 1% and 0.05 ms; most "
        f"at n = {times.n[at]}: {host[at] / 1e6:.3f} ms here, {device[at] / 1e6:.3f} by the device's own"
    )
    in_all = max(DEVICE_CLOCK_TOLERANCE * float(device.sum()), DEVICE_CLOCK_TOLERANCE_NS)
    if abs(float(longer_ns.sum())) > in_all:
        return [Warnings.device_clocks_differ.flag(differences=differences)]
    # A short token after a long one only makes up for a busy host's delay.
    late_before = np.concatenate([[False], (longer_ns > allowed / 2)[:-1]])
    if (differ & (longer_ns < 0) & ~late_before).any():
        return [Warnings.clock_too_early.flag(differences=differences)]
    if differ.mean() <= BUSY_HOST_SHARE and not differ[:FIRST_TOKENS].any():
        return []
    return [Warnings.host_busy.flag(differences=differences)]
