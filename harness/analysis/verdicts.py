"""The status of a record: ok, disturbed or invalid, and the reasons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from harness.analysis import (
    depth,
    flags,
    gpu_sharing,
    prefill,
    served,
    speculation,
    throttling,
    traffic,
    users,
)
from harness.analysis.columns import Cell, Disturbance, Growth
from harness.analysis.traffic import ceiling_bytes_per_s, past_cache_share, probed_bytes_per_s, spread
from harness.analysis.warnings import DISTURBANCES, Flag, Warnings
from harness.base.text import cores_text, plural
from harness.records import tables
from harness.records.kinds import Record, done_of, loaded_of, memory_of, served_elsewhere
from harness.records.measured import Counters, Surface
from harness.records.parts import Conditions, Misplaced, Placed, StackFacts
from harness.records.tables import TokenTimes
from harness.stacks.header import Options

# Find disturbances: repeats that the machine, not the stack, made invalid, and what to do about them. Pure.
#
# A repeat that is invalid only for a disturbance is measured again. Counters of the worker (page faults,
# waits for a CPU, memory) decide, and the machine's CPU time and steal. Its memory counters, which other
# processes may have raised without any effect here, give notes.


CONTENTION_TOLERANCE = 0.05  # of threads x time; a quiet machine has 0.1%
CONTENTION_FLOOR_NS = 50_000_000  # one or two normal waits are a large share of a very short run
# Of the machine's cores. A process on one of two cores that reads memory slowed a reader on the other by 41%;
# with a tenth of the cores' time it may cost 8%.
OTHER_WORK_TOLERANCE = 0.10
# Of the CPU time asked for. On a virtual machine with two busy CPUs, over 55 minutes, 6% of the seconds had a
# burst of 0.1 to 0.2 s; of windows of 1 to 10 s at most 1% had more than both of these.
STEAL_TOLERANCE = 0.05
STEAL_FLOOR_S = 0.2
STALLED_SHARE = 0.01  # of the timed part
STALLED_FLOOR_US = 10_000
PAGE_BYTES = 4096
REFAULT_FLOOR_BYTES = 64 << 20
REFAULT_TOLERANCE = 0.05  # of the model
PAGED_IN_FLOOR_BYTES = 4 << 20
PAGED_IN_TOLERANCE = 0.01  # of the weights that each step reads; the warm-up has read them all
SUSPENDED_FLOOR_NS = 10_000_000  # the two clocks are read to 1 ms
NAMED_CPUS = 0.1  # a process that used fewer CPUs than this is not named

T = TypeVar("T")
Pressure = Mapping[str, float]


@dataclass(frozen=True)
class BusyProcess:
    """The process that used most CPU time while repeats were disturbed: on average `cpus` of `of_cpus`."""

    name: str
    pid: int
    cpus: float
    of_cpus: int


def disturbances(record: Record) -> list[Flag]:
    """Each disturbance that makes a finished repeat invalid."""
    found = []
    if (suspended_ns := done_of(record).get("suspended_ns") or 0) > SUSPENDED_FLOOR_NS:
        found.append(Warnings.suspended.flag(seconds=suspended_ns / 1e9))
    found += _quota(record)  # before the warm-up, which a quota keeps from settling too
    # Windows of few tokens differ with what is accepted in them.
    if not done_of(record)["warmup"]["agreed"] and not speculation.row(record):
        found.append(Warnings.warmup_unsettled.flag())
    found += [*_paging(record), *_contention(record), *_stolen(record)]
    return [*found, *throttling.flags(record), *gpu_sharing.flags(record)]


def disturbance_notes(record: Record) -> list[Flag]:
    """Notes on pressure on the whole machine while timing, which need not have reached the worker, and on
    threads that waited for each other."""
    if record["outcome"] != "ok" or not record.get("done"):
        return []
    _, machine = _pressures(record)
    details = _memory_was_short(record, machine)
    if machine.get("pswpin"):
        details.append(f"{plural(round(machine['pswpin']), 'page')} swapped in")
    if not _quota(record) and (throttled := _throttled(record)):
        details.append(f"the CPU quota throttled the cgroups around it {throttled}")
    found = [Warnings.machine_under_pressure.flag(pressure="; ".join(details))] if details else []
    share, of_others = _waited(record)
    if share and of_others <= CONTENTION_TOLERANCE and not oversubscribed(record):
        threads = plural(record["threads"], "thread")
        found.append(Warnings.own_threads_waited.flag(share=share, threads=threads))
    return [*found, *(flag for flag in _other_work(record) if flag.disturbance is None)]


def _paging(record: Record) -> list[Flag]:
    found = []
    if faults := done_of(record)["major_faults"]:
        found.append(Warnings.page_faults.flag(faults=plural(faults, "major page fault")))
    own, _ = _pressures(record)
    found += [Warnings.memory_pressure.flag(pressure=text) for text in _memory_was_short(record, own)]
    if paged_in := _weights_paged_in(record):
        found.append(Warnings.weights_paged_in.flag(megabytes=paged_in / 1e6))
    # Within a memory budget the worker's own limit causes the pressure: another attempt would meet it again.
    return [replace(each, disturbance=None) for each in found] if record.get("memory_budget") else found


def _pressures(record: Record) -> tuple[Pressure, Pressure]:
    """Pressure counters while timing: of the worker's own cgroup, if it had one, and of the machine.

    Older records keep both under one name: within a budget the cgroup's counters replaced the machine's.
    """
    conditions = record.get("conditions") or Conditions()
    machine = conditions.get("pressure") or {}
    if (own := conditions.get("worker_pressure")) is not None:
        return own, machine
    budget = record.get("memory_budget")
    names = _OWN_IN_OLDER.get(budget["means"], ()) if budget else ()
    own = {name: rise for name, rise in machine.items() if name in names}
    return own, {name: rise for name, rise in machine.items() if name not in names}


_OWN_IN_OLDER = {
    "cgroup v2": ("workingset_refault_file", "memory_stall_us"),
    "cgroup v1": ("workingset_refault_file",),  # which has no PSI
}


def _memory_was_short(record: Record, pressure: Pressure) -> list[str]:
    page_bytes = record["machine"].get("page_bytes") or PAGE_BYTES
    refaulted = page_bytes * pressure.get("workingset_refault_file", 0)
    allowed = REFAULT_TOLERANCE * (loaded_of(record).get("model_bytes") or math.inf)
    found = []
    if refaulted > max(allowed, REFAULT_FLOOR_BYTES):
        found.append(f"{refaulted / 1e6:.0f} MB of evicted file pages were read again")
    if stalled := _stalled(record, pressure, "memory_stall_us"):
        found.append(f"memory pressure stalled it for {stalled}")
    return found


def _stalled(record: Record, pressure: Pressure, name: str) -> str | None:
    """How long it stalled; null where too short to matter."""
    timed_us, stalled_us = _timed_ns(record) / 1e3, pressure.get(name, 0)
    if stalled_us <= max(STALLED_SHARE * timed_us, STALLED_FLOOR_US):
        return None
    return f"{stalled_us / 1e6:.2f} s of {timed_us / 1e6:.2f}"


def _throttled(record: Record) -> str | None:
    """How often and how long a CPU quota throttled its cgroups; null where too short to matter. The kernel
    adds up the time of all CPUs, so that it may exceed the time that passed."""
    _, machine = _pressures(record)
    if not _stalled(record, machine, "cgroup_throttled_us"):
        return None
    periods, us = machine.get("cgroup_throttled_periods"), machine["cgroup_throttled_us"]
    often = "" if periods is None else f"in {plural(round(periods), 'period')}, "
    return f"{often}for {us / 1e6:.2f} s over all CPUs ({_timed_ns(record) / 1e9:.2f} s timed)"


def _timed_ns(record: Record) -> int:
    surface = done_of(record).get("surface") or Surface()
    return record["timing"].get("last_token_ns") or surface.get("elapsed_ns") or 0


def _weights_paged_in(record: Record) -> int | None:
    """Bytes of mapped weights paged in while timing, though the warm-up had read them; null: few or unknown.

    A token that waits for a read already under way has no major fault, so faults alone do not show this.
    Rows of an input embedding are allowed: they are read when their tokens come.
    """
    weights = {mark["at"]: mark.get("rss_weights_bytes") for mark in memory_of(record).get("marks") or []}
    before, after = weights.get("warmed"), weights.get("finished")
    model_bytes, step_bytes = traffic.model_bytes(record), traffic.weight_bytes_per_token(record)
    if before is None or after is None or model_bytes is None or step_bytes is None:
        return None
    allowed = model_bytes - step_bytes + max(PAGED_IN_TOLERANCE * step_bytes, PAGED_IN_FLOOR_BYTES)
    return int(after - before) if after - before > allowed else None


def _quota(record: Record) -> list[Flag]:
    """Throttling by a CPU quota. Other processes may share the cgroup, so the worker's own CPU wait must
    confirm it, where known."""
    waited_ns, throttled = done_of(record).get("cpu_wait_ns"), _throttled(record)
    if not throttled or (waited_ns is not None and waited_ns <= STALLED_SHARE * _timed_ns(record)):
        return []
    quota = (record.get("conditions") or Conditions()).get("cpu_quota")
    of = f" of {quota:.2f} CPUs" if quota is not None else ""
    return [Warnings.quota_throttled.flag(of=of, throttled=throttled)]


def _contention(record: Record) -> list[Flag]:
    """Threads that waited for a CPU: a barrier per tensor makes them lose far more than this share. Where
    they did not, work of others beside them."""
    share, of_others = _waited(record)
    if oversubscribed(record) and share:
        cpus = plural(record["machine"]["usable_cpus"] or 0, "CPU")
        return [Warnings.too_many_threads.flag(share=share, threads=record["threads"], cpus=cpus)]
    if share and of_others > CONTENTION_TOLERANCE:
        return [Warnings.waited_for_cpu.flag(share=share)]
    return [flag for flag in _other_work(record) if flag.disturbance]


def _waited(record: Record) -> tuple[float, float]:
    """The share of its time for which a record's threads waited for a CPU, 0 where that is little; and the
    share that other processes can have caused: each thread waits for them as long as they run, at most."""
    done, timed_ns = done_of(record), _timed_ns(record)
    waited_ns = done.get("cpu_wait_ns")
    if waited_ns is None or not timed_ns:
        return 0.0, 0.0
    if _quota(record):  # its threads waited for the quota too
        _, machine = _pressures(record)
        waited_ns -= round(1e3 * machine["cgroup_throttled_us"])
    share = waited_ns / (timed_ns * timed_threads(record))
    if share <= CONTENTION_TOLERANCE or waited_ns <= CONTENTION_FLOOR_NS:
        return 0.0, 0.0
    cpus, cpu_s = record["machine"].get("usable_cpus"), done.get("cpu_s")
    if cpus is None or cpu_s is None:
        return share, share
    return share, min(share, max(0.0, cpus - 1e9 * cpu_s / timed_ns))


def _other_work(record: Record) -> list[Flag]:
    """Work of others while timing, a disturbance or, if it is little, a note: it may take SMT siblings of the
    cores used, or memory bandwidth, without a thread ever waiting. Empty where it is not known, or may be
    that of the server which computed."""
    used = (record.get("conditions") or Conditions()).get("cpu_time")
    cores = record["machine"].get("all_cores")
    if used is None or cores is None or served_elsewhere(record):
        return []
    others_s = used["machine_s"] - used["harness_s"]
    if others_s <= CONTENTION_FLOOR_NS / 1e9:
        return []
    own, others = used["harness_s"] / used["elapsed_s"], others_s / used["elapsed_s"]
    shared = min(others, own + others - cores)  # at least: more are busy than there are cores
    beside = others / cores if record.get("device") == "cpu" else 0.0
    numbers = {"others": others, "cores": plural(cores, "core"), "own": own}
    if shared > CONTENTION_TOLERANCE * own or beside > OTHER_WORK_TOLERANCE:
        return [Warnings.other_work.flag(**numbers)]
    return [Warnings.little_other_work.flag(**numbers)] if beside > CONTENTION_TOLERANCE else []


def _stolen(record: Record) -> list[Flag]:
    """Steal, as a share of the CPU time that all processes here asked for; in an older record, which does not
    have it, of its threads' time. A thread that a hypervisor stops is as late as one that waits for a CPU."""
    _, machine = _pressures(record)
    stolen_s, timed_s = machine.get("steal_ms", 0) / 1e3, _timed_ns(record) / 1e9
    if stolen_s <= STEAL_FLOOR_S or not timed_s:
        return []
    used = (record.get("conditions") or Conditions()).get("cpu_time")
    wanted_s = stolen_s + used["machine_s"] if used else timed_s * timed_threads(record)
    share = min(1.0, stolen_s / max(wanted_s, timed_s))
    return [Warnings.stolen.flag(share=share)] if share > STEAL_TOLERANCE else []


def timed_threads(record: Record) -> int:
    """Threads that may wait for a CPU while timing: the client of a server elsewhere works with one."""
    return 1 if served_elsewhere(record) else record["threads"]


def oversubscribed(record: Record) -> bool:
    """Whether it has more threads than this machine has CPUs, which then wait for each other."""
    cpus = record["machine"].get("usable_cpus")
    return cpus is not None and record["threads"] > cpus


def disturbance_summary(
    cells: Iterable[Cell], busiest: BusyProcess | None = None, busy: bool = False
) -> str | None:
    """How many repeats stayed disturbed, why, and what to do, in one sentence; null: none did.

    `cells`: rows of dataset.cells.per_cell. `busy`: the user wants the machine measured as it is.
    """
    rows = [row for row in cells if row.get("kind") == "measured"]
    kinds = Counter(kind for row in rows for kind in row["stayed_disturbed"])
    stayed, of = kinds.total(), sum(row["repeats"] for row in rows)
    if not stayed:
        return None
    (kind, _), *_ = kinds.most_common(1)
    if busiest and busiest.cpus >= NAMED_CPUS and kind in ("cpu", "warmup"):
        cpus = f"{busiest.cpus:.1f} of {busiest.of_cpus} CPUs"
        why = f"`{busiest.name}` (pid {busiest.pid}) used {cpus} meanwhile"
        advice = "close it, or lower `threads`"
    else:
        why, advice = DISTURBANCES[kind]
    which = f"{stayed} of {plural(of, 'repeat')} stayed disturbed"
    if busy:
        again = "once the machine is quiet, run the same command with --retry-failed in place of --busy"
        return f"provisional: {which}: {why}; for figures that count, {again}"
    return f"{which}: {why}; {advice}, then run again with --retry-failed"


def disturbance_kind(found: Sequence[Flag]) -> Disturbance | None:
    """The first disturbance, if all reasons are disturbances; null otherwise."""
    kinds = [reason.disturbance for reason in found]
    return kinds[0] if kinds and None not in kinds else None


def counting(attempts: Sequence[T], usable: Callable[[T], bool], disturbed: Callable[[T], object]) -> T:
    """The attempt at a repeat that counts: the latest, or, if it was disturbed, the latest usable one if any.

    `attempts`: oldest first.
    """
    latest = attempts[-1]
    usables = (each for each in reversed(attempts) if usable(each))
    return next(usables, latest) if disturbed(latest) else latest


# The stack's or the device's own clock against ours, on one run. Pure.


# Two clocks on one run: llama.cpp's own counters and our timestamps.
CLOCK_TOLERANCE = 0.02
CLOCK_TOLERANCE_MS_PER_TOKEN = 0.02
OUR_LOOP_MS_PER_TOKEN = 0.1  # between two steps, where the stack's runner does not time the steps alone
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
    timed = counters.get("steps_ms")
    loop = OUR_LOOP_MS_PER_TOKEN * steps
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
            paused = 0 < late <= CONTENTION_FLOOR_NS / 1e6
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


# How far a growing generation got before memory ran out, and its cache's share of the free memory. Pure.


def ended_by_memory(record: Record) -> bool:
    """Whether running out of memory is the result, not a failure: a `grow` workload that decoded a token."""
    ran_out = record["workload"]["kind"] == "grow" and record["outcome"] == "oom"
    return bool(ran_out and record["tokens"])


def growth_stopped(record: Record) -> str | None:
    """Why a `grow` workload ended before its target, in the reporter's words; null where it did not."""
    return record.get("reason") if ended_by_memory(record) else done_of(record).get("stopped")


def growth_row(record: Record, device_bytes: int | None, kv_bytes_per_token: float | None) -> Growth:
    """Results of a `grow` workload; null for others.

    `max_ctx`: tokens of prompt and decode held, a lower bound. `max_ctx_is_target`: it reached its target.
    `limit_reason`: what ended it. `kv_share_of_free`: size of the KV cache at the end over the memory free on
    the device, or in the budget, once the model was loaded.
    """
    found = Growth(max_ctx=None, limit_reason=None, kv_share_of_free=None, max_ctx_is_target=False)
    ended = record["outcome"] == "ok" or ended_by_memory(record)
    if record["workload"]["kind"] != "grow" or not ended:
        return found
    length, why = record["workload"]["prompt_tokens"] + record["tokens"], growth_stopped(record)
    found |= {"max_ctx": length, "limit_reason": why, "max_ctx_is_target": why is None}
    free = _free_when_loaded(record, device_bytes)
    if free and kv_bytes_per_token:
        found["kv_share_of_free"] = kv_bytes_per_token * length / free
    return found


def _free_when_loaded(record: Record, device_bytes: int | None) -> int | None:
    """Bytes free once loaded: of the budget, less anonymous memory; or of the device."""
    marks = {mark["at"]: mark for mark in memory_of(record).get("marks", [])}
    loaded, budget = marks.get("loaded"), record.get("memory_budget")
    if record.get("device") == "cpu":
        limit, taken = budget and budget["bytes"], loaded and loaded["rss_anon_bytes"]
    else:
        limit, taken = device_bytes, loaded and loaded["vram_bytes"]
    return limit - taken if limit is not None and taken is not None and taken < limit else None


# Are weights and KV cache on the requested device, and tensors in the requested buffers? Pure.


ELSEWHERE = ("cpu", "meta", "disk")  # not on a GPU; on a CPU only the first is correct
NAMES_SHOWN = 3
# Of llama.cpp's graph with all layers on a GPU: the input embedding, always on the CPU, and all else.
OFFLOADED_SPLITS = 2


def placement_mismatches(device: str, options: Options, facts: StackFacts) -> list[Flag]:
    """Weights, tables or KV cache on another device, or tensors in another buffer, than the requested one."""
    if misplaced := (facts.get("placement") or Placed(misplaced=[]))["misplaced"]:
        return [_misplaced(misplaced)]
    wrong: Sequence[str]
    if device == "cpu":
        wrong = ELSEWHERE[1:]
    elif options.get("gpu_layers", -1) == -1:
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
    if mismatches:
        return [Warnings.offloaded.flag(parts="; ".join(mismatches))]
    return [] if facts.get("placement") else _splits(device, facts)  # else split on purpose


def _misplaced(misplaced: Sequence[Misplaced]) -> Flag:
    """The tensors that are in another buffer than the requested one."""
    where = [
        f"{each['tensor']} ({each['asked']} was requested, {each['found'] or 'its layer'} has it)"
        for each in misplaced[:NAMES_SHOWN]
    ]
    more = ", ..." if len(misplaced) > NAMES_SHOWN else ""
    tensors = plural(len(misplaced), "tensor")
    return Warnings.misplaced.flag(tensors=tensors, where=", ".join(where) + more)


def _splits(device: str, facts: StackFacts) -> list[Flag]:
    """Operations without a kernel for the GPU: llama.cpp runs them on the CPU, whatever it reports of layers.
    The graph is split at each change of device."""
    most = max((facts.get("graph_splits") or {}).values(), default=0)
    if device == "cpu" or most <= OFFLOADED_SPLITS:
        return []
    return [Warnings.operations_on_cpu.flag(splits=most, all_on_gpu=OFFLOADED_SPLITS)]


# Is this record's measurement valid? Reasons why not, and notes on it. Pure.


CEILING_TOLERANCE = 1.05  # a larger share of the measured bandwidth is a measurement error

USABLE = ("ok", "functional")  # it ran as requested, but the speed of a functional one means nothing


@dataclass(frozen=True)
class Verdict:
    """A repeat's status and reasons. `disturbed`: the disturbance, where only disturbances made it invalid;
    null otherwise. `next_steps`: the user's, for the reasons."""

    status: str
    reasons: list[str]
    disturbed: Disturbance | None = None
    next_steps: list[str] = field(default_factory=list)


def invalid(found: Sequence[Flag], known: Sequence[str] = ()) -> Verdict:
    """The verdict on a repeat with these faults. `known`: what was known of it before it ran."""
    texts = [each.detail for each in found]
    steps = list(dict.fromkeys(each.warning.next_step for each in found))
    return Verdict("invalid", [*texts, *known], disturbance_kind(found), steps)


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
    table: depth.Columns | None = None,
) -> Verdict:
    """The status of a record: its outcome, or `invalid` or `functional`, with the reasons.

    `ceiling`: read bandwidth in bytes/s; null: the best of the record's own probes. `has_series`: whether the
    file of its tokens or timed rows is intact. `times`, `table`: these, if read; without them a device's
    clock is not compared, and no turn with another.
    """
    known = [f"known beforehand: {why}" for why in record.get("known_failure", [])]
    why = functional(record)
    usable = Verdict("functional", [why]) if why else Verdict("ok", [])
    if ended_by_memory(record) and (
        reasons := option_mismatches(record["device"], record["options"], loaded_of(record))
    ):
        return invalid(reasons, known)
    if ended_by_memory(record) or (record["kind"] == "searched" and record["outcome"] == "ok"):
        return usable
    if record["outcome"] != "ok" or record["kind"] == "reported":  # published figures are shown as they are
        reason = record.get("reason")
        return Verdict(record["outcome"], [reason, *known] if reason else [])
    ceiling = ceiling or ceiling_bytes_per_s([record])
    found = [*_reasons(record, ceiling), *clock_of_device(record, times)]
    found += depth.surface_faults(record, table or {})
    if table and tables.name_of(record) == "prefill":
        found += prefill.faster_than_possible(record, prefill.by_depth([table]), ceiling)
    if table and tables.name_of(record) == "users":
        found += users.faults(record, table, ceiling)
    if not has_series:
        what = "table of timed rows" if tables.name_of(record) else "series of tokens"
        found.append(Warnings.rows_missing.flag(what=what))
    if why and disturbance_kind(found):
        return usable  # its speed means nothing anyway
    return invalid(found, known) if found else usable


def functional(record: Record) -> str | None:
    """Why the speed of the record's stack or machine means nothing; null: it does."""
    shown = (record.get("machine") or {}).get("emulated")
    emulated = Warnings.emulated.flag(machine=shown).detail if shown else None
    return loaded_of(record).get("functional") or emulated


def attempts_left(record: Record, found: Verdict) -> bool:
    """Whether the campaign measures this repeat again."""
    retries = (record.get("protocol") or {}).get("retry_disturbed", 0)
    return found.disturbed is not None and record.get("attempt", 1) <= retries


def option_mismatches(device: str, options: Options, facts: StackFacts) -> list[Flag]:
    """Differences between the loaded and the requested options."""
    return [
        *other_kernels(facts),
        *placement_mismatches(device, options, facts),
        *other_options(options, facts),
    ]


def _reasons(record: Record, ceiling: float | None) -> list[Flag]:
    """Faults of the stack first, then disturbances by the machine."""
    return [*_stack_faults(record, ceiling), *clock_of_stack(record), *disturbances(record)]


def _stack_faults(record: Record, ceiling: float | None) -> list[Flag]:
    loaded, done = loaded_of(record), done_of(record)
    prompt, new = record["workload"]["prompt_tokens"], record["workload"]["new_tokens"]
    reasons = []
    stopped = growth_stopped(record)
    if record["tokens"] != new and not stopped and not tables.name_of(record):
        if served_elsewhere(record):
            reasons += served.other_length(record)
        else:
            tokens = plural(record["tokens"], "token")
            reasons.append(Warnings.other_length.flag(tokens=tokens, requested=new))
    evaluated, expected = done["counters"].get("evaluated_tokens"), prompt + record["tokens"] - 1
    if (counted := done["counters"].get("prompt_tokens")) is not None:
        # Of a server, which may add a template, and whose counts of the answer need not be right.
        expected = counted + record["tokens"] - 1
        evaluated = expected - done["counters"].get("cached_tokens", 0)
    if evaluated is not None and evaluated != expected and not stopped:
        reasons.append(Warnings.other_prefix.flag(evaluated=evaluated, expected=expected))
    # The stack's report after loading, then the one after the run.
    for facts in (loaded, loaded | done["facts_changed"]):
        if mismatches := [
            *other_kernels(facts),
            *placement_mismatches(record["device"], record["options"], facts),
        ]:
            reasons += mismatches
            break
    reasons += served.faults(record)
    reasons += _window(record)
    reasons += _weights(record)
    reasons += other_options(record["options"], loaded_of(record))
    if compiled := done["counters"].get("compilations"):
        reasons.append(Warnings.compiled.flag(compilations=plural(compiled, "compilation")))
    share = past_cache_share(record, ceiling)
    if ceiling is not None and share is not None and share > CEILING_TOLERANCE:
        measured = spread([*probed_bytes_per_s([record]), ceiling])
        reasons.append(Warnings.memory_faster_than_limit.flag(share=share, measured=measured))
    return reasons


def notes(record: Record) -> list[Flag]:
    """Notes on a repeat that invalidate none of its figures."""
    loaded, done = loaded_of(record), done_of(record)
    facts, workload = loaded | done.get("facts_changed", StackFacts()), record["workload"]
    raised = []
    decoded = record["tokens"] if workload["kind"] == "grow" else workload["new_tokens"]
    raised += beyond_trained(facts, workload["prompt_tokens"] + decoded, "the context grows to")
    if pins := ((record.get("environment") or {}).get("adopted") or {}).get("pins_not_met"):
        raised.append(Warnings.not_pinned.flag(packages="; ".join(pins)))
    raised += [Warnings.stack_warning.flag(message=each) for each in facts.get("warnings") or []]
    if retries := done.get("counters", Counters()).get("allocator_retries"):
        places = ", ".join(str(n) for n, _ in retries[:NAMES_SHOWN])
        more = f" and {len(retries) - NAMES_SHOWN} more places" if len(retries) > NAMES_SHOWN else ""
        times = plural(sum(count for _, count in retries), "time")
        raised.append(Warnings.allocator_retries.flag(times=times, places=places + more))
    if where := traffic.elsewhere_in_memory(record):
        raised.append(Warnings.two_memories.flag(where=where))
    if record.get("device") == "cpu" and record["machine"].get("core_kinds"):
        threads, cores = plural(record["threads"], "thread"), cores_text(record["machine"])
        raised.append(Warnings.cores_of_several_kinds.flag(threads=threads, cores=cores))
    raised += [*flags.routing_notes(record), *flags.rotary_notes(record)]
    raised += [*served.notes(record), *speculation.notes(record)]
    return [*raised, *throttling.notes(record), *gpu_sharing.notes(record), *disturbance_notes(record)]


def beyond_trained(facts: StackFacts, length: int | None, reaches: str) -> list[Flag]:
    """A flag for a context that is longer than any in the model's training; empty where either is unknown."""
    trained = facts.get("trained_context")
    if not trained or not length or length <= trained:
        return []
    numbers = {"length": length, "trained": trained}
    return [Warnings.beyond_trained_context.flag(reaches=reaches, **numbers)]


def other_kernels(facts: StackFacts) -> list[Flag]:
    """Differences between the kernels that ran and the requested ones."""
    return [*_kernels(facts), *_leftovers(facts)]


def _kernels(facts: StackFacts) -> list[Flag]:
    requested = facts.get("kernel_asked")
    if requested is None or requested in (ran := facts["kernels"]):
        return []
    # For a torch model these are all classes of layers; the one that replaced the requested one is linear.
    linear = [name for name in ran if "Linear" in name and name != "Linear"] or list(ran)
    return [Warnings.other_kernel.flag(requested=requested, ran=", ".join(linear) or "none")]


def _leftovers(facts: StackFacts) -> list[Flag]:
    """Linear layers that should be quantized but are not."""
    names = facts.get("leftovers") or []
    if not names:
        return []
    more = ", ..." if len(names) > NAMES_SHOWN else ""
    layers = f"{len(names)} linear layers are" if len(names) > 1 else "1 linear layer is"
    return [Warnings.not_quantized.flag(layers=layers, names=", ".join(names[:NAMES_SHOWN]) + more)]


def _window(record: Record) -> list[Flag]:
    """A KV cache shorter than the run: the stack discarded tokens and continued. Of servers, Ollama does."""
    facts = loaded_of(record) | done_of(record).get("facts_changed", StackFacts())
    holds, server, workload = facts.get("holds_tokens"), facts.get("served"), record["workload"]
    needed = workload["prompt_tokens"] + workload["new_tokens"]
    stops = served_elsewhere(record) and not (server and server["api"] in ("ollama", "openai"))  # it has both
    if holds is None or holds >= needed or stops:
        return []
    return [Warnings.short_cache.flag(holds=holds, needed=needed)]


def _weights(record: Record) -> list[Flag]:
    """Compare the loaded weights with the file's header. Bytes are compared only where the stack keeps the
    stored types: of a GGUF, and of a checkpoint with a single type (it is cast to one type)."""
    if served_elsewhere(record):
        return served.other_model(record)
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
            Warnings.other_weights.flag(name=name, loaded=ours, stored=theirs)
            for name, ours, theirs in sizes
            if ours is not None and ours != theirs
        ]
    requested = record["options"].get("quant")
    if requested is not None and found is not None and requested != found:
        reasons.append(Warnings.other_type.flag(requested=requested, found=found))
    return reasons


def other_options(requested: Options, facts: StackFacts) -> list[Flag]:
    """Switches, names and thread counts that the stack resolved differently. Sizes may be rounded."""
    resolved: Mapping[str, object] = facts.get("options") or {}
    given = {k: v for k, v in requested.items() if isinstance(v, bool | str) or k == "threads"}
    changed = [k for k, v in given.items() if resolved.get(k) is not None and resolved[k] != v]
    return [
        Warnings.other_option.flag(name=name, requested=_word(given[name]), ran=_word(resolved[name]))
        for name in changed
    ]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
