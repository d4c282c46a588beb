"""The stack's or the device's own clock against ours, on one run. Pure."""

from __future__ import annotations

import numpy as np

from harness.analysis.records import disturbances
from harness.analysis.records.disturbances import Reason
from harness.results.kinds import Record, done_of
from harness.results.token_times import TokenTimes

# Two clocks on one run: llama.cpp's own counters and our timestamps.
CLOCK_TOLERANCE = 0.02
CLOCK_TOLERANCE_MS_PER_TOKEN = 0.02
OUR_LOOP_MS_PER_TOKEN = 0.1  # between two steps, where the stack's runner does not time the steps alone
# Per token, for a device's own clock: the larger of the two.
DEVICE_CLOCK_TOLERANCE = 0.01
DEVICE_CLOCK_TOLERANCE_NS = 50_000
# Share of tokens that a busy host delivered late; any machine has some in 10,000.
BUSY_HOST_SHARE = 0.01
FIRST_TOKENS = 5  # none of these may be late: an unsynchronised clock shows there


def of_stack(record: Record) -> list[Reason]:
    """Compare the stack's own decode time with ours, less our work between steps. A wait for a CPU between
    the two clocks makes ours longer, by at most the process's total wait. A hypervisor's waits are not
    counted: a difference as short as one or two of them may be a disturbance."""
    counters, timing = done_of(record)["counters"], record["timing"]
    theirs, steps = counters.get("stack_decode_ms"), record["tokens"] - 1
    if theirs is None or steps < 1:
        return []
    between = (timing["last_token_ns"] - timing["first_token_ns"]) / 1e6 - counters.get("sampling_ms", 0.0)
    timed = counters.get("steps_ms")
    loop = OUR_LOOP_MS_PER_TOKEN * steps
    compared = [(between, loop)] if timed is None else [(timed, 0.0), (between, loop)]
    waited = (done_of(record).get("cpu_wait_ns") or 0) / 1e6
    for ours, more in compared:
        allowed = CLOCK_TOLERANCE * theirs + CLOCK_TOLERANCE_MS_PER_TOKEN * steps
        late = ours - theirs - (allowed + more + waited)
        if theirs - ours > allowed or late > 0:
            both = f"{ours / steps:.3f} ms/token here, {theirs / steps:.3f} by the stack's own"
            paused = 0 < late <= disturbances.CONTENTION_FLOOR_NS / 1e6
            return [Reason(f"two clocks differ: {both}", "cpu" if paused else None)]
    return []


def of_device(record: Record, times: TokenTimes | None) -> list[Reason]:
    """Compare each token's time on the device's own clock (CUDA events) with ours. Our flushes fall between
    two events and are not part of our latencies."""
    timed = done_of(record)["counters"].get("device_tokens")
    if timed is None:
        return []
    if timed != record["tokens"]:
        return [Reason(f"the device's clock timed {timed} tokens, but {record['tokens']} were generated")]
    if not times:
        return []
    device = times.device_gaps_ns(done_of(record).get("flushes", []))
    if device is None:
        return [Reason("its times by the device's clock are missing or damaged")]
    host = times.gaps_ns
    gaps, allowed = host - device, np.maximum(DEVICE_CLOCK_TOLERANCE * device, DEVICE_CLOCK_TOLERANCE_NS)
    differ = np.abs(gaps) > allowed
    if not differ.any():
        return []
    at = int(np.argmax(np.abs(gaps)))
    reason = (
        f"two clocks differ on {int(differ.sum())} of {len(host)} tokens by more than 1% and 0.05 ms; most "
        f"at n = {times.n[at]}: {host[at] / 1e6:.3f} ms here, {device[at] / 1e6:.3f} by the device's own"
    )
    in_all = max(DEVICE_CLOCK_TOLERANCE * float(device.sum()), DEVICE_CLOCK_TOLERANCE_NS)
    if abs(float(gaps.sum())) > in_all:
        return [Reason(reason)]
    # A short token after a long one only makes up for a busy host's delay.
    late_before = np.concatenate([[False], (gaps > allowed / 2)[:-1]])
    if (differ & (gaps < 0) & ~late_before).any():
        return [Reason(f"{reason}; their totals agree: ours was read before the device was done")]
    if differ.mean() <= BUSY_HOST_SHARE and not differ[:FIRST_TOKENS].any():
        return []
    text = f"{reason}; their totals agree: the device was done before ours was read, on a busy host"
    return [Reason(text, "cpu")]
