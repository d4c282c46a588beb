"""Repeats that the machine, not the stack, made invalid, and what to do about them. Pure.

A repeat that is invalid only for a disturbance is measured again. Counters of the worker (page faults, waits
for a CPU, memory) decide, and the machine's CPU time and steal. Its memory counters, which other processes
may have raised without any effect here, give notes. A condition yields both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from harness.analysis import gpu_sharing, speculation, throttling, traffic
from harness.analysis.warnings import ALL, Flag, Warnings
from harness.base.text import plural
from harness.records.common import Conditions
from harness.records.kinds import Record, done_of, loaded_of, memory_of, served_elsewhere
from harness.records.measured import Surface

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

Pressure = Mapping[str, float]
Condition = Callable[[Record], Iterable[Flag]]
"""A condition of validity of a repeat: the flags that it raises, faults and notes."""


def suspended(record: Record) -> Iterator[Flag]:
    """The machine slept."""
    if (suspended_ns := done_of(record).get("suspended_ns") or 0) > SUSPENDED_FLOOR_NS:
        yield Warnings.suspended.flag(seconds=suspended_ns / 1e9)


def quota(record: Record) -> Iterator[Flag]:
    """Throttling by a CPU quota. Other processes may share the cgroup, so the worker's own CPU wait must
    confirm it, where known."""
    if throttled := _throttled_by_quota(record):
        cpus = (record.get("conditions") or Conditions()).get("cpu_quota")
        of = f" of {cpus:.2f} CPUs" if cpus is not None else ""
        yield Warnings.quota_throttled.flag(of=of, throttled=throttled)


def warm_up(record: Record) -> Iterator[Flag]:
    """Speed still changed. Windows of few tokens differ with what is accepted in them."""
    if not done_of(record)["warmup"]["agreed"] and not speculation.row(record):
        yield Warnings.warmup_unsettled.flag()


def paging(record: Record) -> Iterator[Flag]:
    """Pages read from disk while timing. Within a memory budget the worker's own limit causes the pressure:
    another attempt would meet it again."""
    raised = []
    if faults := done_of(record)["major_faults"]:
        raised.append(Warnings.page_faults.flag(faults=plural(faults, "major page fault")))
    own, _ = _pressures(record)
    raised += [Warnings.memory_pressure.flag(pressure=text) for text in _memory_was_short(record, own)]
    if paged_in := _weights_paged_in(record):
        raised.append(Warnings.weights_paged_in.flag(megabytes=paged_in / 1e6))
    for flag in raised:
        yield replace(flag, disturbance=None) if record.get("memory_budget") else flag


def contention(record: Record) -> Iterator[Flag]:
    """Threads that waited for a CPU: a barrier per tensor makes them lose far more than this share. Where
    they did not wait for others, work of others beside them, or that they waited for each other."""
    share, of_others = _waited(record)
    is_fault = False
    if share and oversubscribed(record):
        is_fault = True
        cpus = plural(record["machine"]["usable_cpus"] or 0, "CPU")
        yield Warnings.too_many_threads.flag(share=share, threads=record["threads"], cpus=cpus)
    elif share and of_others > CONTENTION_TOLERANCE:
        is_fault = True
        yield Warnings.waited_for_cpu.flag(share=share)
    elif share:
        yield Warnings.own_threads_waited.flag(share=share, threads=plural(record["threads"], "thread"))
    other_work = _other_work(record)
    if other_work and not (is_fault and other_work.disturbance):
        yield other_work


def stolen(record: Record) -> Iterator[Flag]:
    """Steal, as a share of the CPU time that all processes here asked for, or of its threads' time where that
    is not known. A thread that a hypervisor stops is as late as one that waits for a CPU."""
    _, machine = _pressures(record)
    stolen_s, timed_s = machine.get("steal_ms", 0) / 1e3, _timed_ns(record) / 1e9
    if stolen_s <= STEAL_FLOOR_S or not timed_s:
        return
    used = _conditions(record).get("cpu_time")
    wanted_s = stolen_s + used["machine_s"] if used else timed_s * timed_threads(record)
    if (share := min(1.0, stolen_s / max(wanted_s, timed_s))) > STEAL_TOLERANCE:
        yield Warnings.stolen.flag(share=share)


def machine_pressure(record: Record) -> Iterator[Flag]:
    """Pressure on the whole machine while timing, which need not have reached the worker."""
    _, machine = _pressures(record)
    details = _memory_was_short(record, machine)
    if machine.get("pswpin"):
        details.append(f"{plural(round(machine['pswpin']), 'page')} swapped in")
    if not _throttled_by_quota(record) and (throttled := _throttled(record)):
        details.append(f"the CPU quota throttled the cgroups around it {throttled}")
    if details:
        yield Warnings.machine_under_pressure.flag(pressure="; ".join(details))


CONDITIONS: tuple[Condition, ...] = (
    suspended,
    quota,  # before the warm-up, which a quota keeps from settling too
    warm_up,
    paging,
    machine_pressure,
    contention,
    stolen,
)
"""Of a finished repeat."""
DEVICE: tuple[Condition, ...] = (throttling.conditions, gpu_sharing.conditions)
"""Of a repeat, as far as it got."""


def disturbances(record: Record) -> list[Flag]:
    """Each disturbance that makes a finished repeat invalid."""
    return [
        flag for condition in (*CONDITIONS, *DEVICE) for flag in condition(record) if flag.invalidates == ALL
    ]


def _conditions(record: Record) -> Conditions:
    return record.get("conditions") or Conditions()


def _pressures(record: Record) -> tuple[Pressure, Pressure]:
    """Pressure counters while timing: of the worker's own cgroup, if it had one, and of the machine."""
    conditions = _conditions(record)
    return conditions.get("worker_pressure") or {}, conditions.get("pressure") or {}


def _memory_was_short(record: Record, pressure: Pressure) -> list[str]:
    page_bytes = record["machine"].get("page_bytes") or PAGE_BYTES
    refaulted = page_bytes * pressure.get("workingset_refault_file", 0)
    allowed = REFAULT_TOLERANCE * (loaded_of(record).get("model_bytes") or math.inf)
    details = []
    if refaulted > max(allowed, REFAULT_FLOOR_BYTES):
        details.append(f"{refaulted / 1e6:.0f} MB of evicted file pages were read again")
    stalled_us = pressure.get("memory_stall_us", 0)
    if _matters(record, stalled_us):
        timed_s = _timed_ns(record) / 1e9
        details.append(f"memory pressure stalled it for {stalled_us / 1e6:.2f} s of {timed_s:.2f}")
    return details


def _matters(record: Record, stalled_us: float) -> bool:
    """Whether it stalled for long enough."""
    return stalled_us > max(STALLED_SHARE * _timed_ns(record) / 1e3, STALLED_FLOOR_US)


def _throttled(record: Record) -> str | None:
    """How often and how long a CPU quota throttled its cgroups; None if too short to matter. The kernel adds
    up the time of all CPUs, so that it may exceed the time that passed."""
    _, machine = _pressures(record)
    if not _matters(record, us := machine.get("cgroup_throttled_us", 0)):
        return None
    periods = machine.get("cgroup_throttled_periods")
    often = "" if periods is None else f"in {plural(round(periods), 'period')}, "
    return f"{often}for {us / 1e6:.2f} s over all CPUs ({_timed_ns(record) / 1e9:.2f} s timed)"


def _throttled_by_quota(record: Record) -> str | None:
    """The same if it slowed the worker, as far as known."""
    waited_ns = done_of(record).get("cpu_wait_ns")
    slowed = waited_ns is None or waited_ns > STALLED_SHARE * _timed_ns(record)
    return _throttled(record) if slowed else None


def _timed_ns(record: Record) -> int:
    surface = done_of(record).get("surface") or Surface()
    return record["timing"].get("last_token_ns") or surface.get("elapsed_ns") or 0


def _weights_paged_in(record: Record) -> int | None:
    """Bytes of mapped weights paged in while timing, though the warm-up had read them; None: few or unknown.

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


def _waited(record: Record) -> tuple[float, float]:
    """The share of its time for which a record's threads waited for a CPU, 0 where that is little; and the
    share that other processes can have caused: each thread waits for them as long as they run, at most."""
    done, timed_ns = done_of(record), _timed_ns(record)
    waited_ns = done.get("cpu_wait_ns")
    if waited_ns is None or not timed_ns:
        return 0.0, 0.0
    if _throttled_by_quota(record):  # its threads waited for the quota too
        _, machine = _pressures(record)
        waited_ns -= round(1e3 * machine["cgroup_throttled_us"])
    share = waited_ns / (timed_ns * timed_threads(record))
    if share <= CONTENTION_TOLERANCE or waited_ns <= CONTENTION_FLOOR_NS:
        return 0.0, 0.0
    cpus, cpu_s = record["machine"].get("usable_cpus"), done.get("cpu_s")
    if cpus is None or cpu_s is None:
        return share, share
    return share, min(share, max(0.0, cpus - 1e9 * cpu_s / timed_ns))


def _other_work(record: Record) -> Flag | None:
    """Work of others while timing, a disturbance or, if it is little, a note: it may take SMT siblings of the
    cores used, or memory bandwidth, without a thread ever waiting. None where it is not known, or may be
    that of the server which computed."""
    used, cores = _conditions(record).get("cpu_time"), record["machine"].get("all_cores")
    if used is None or cores is None or served_elsewhere(record):
        return None
    others_s = used["machine_s"] - used["harness_s"]
    if others_s <= CONTENTION_FLOOR_NS / 1e9:
        return None
    own, others = used["harness_s"] / used["elapsed_s"], others_s / used["elapsed_s"]
    shared = min(others, own + others - cores)  # at least: more are busy than there are cores
    beside = others / cores if record.get("device") == "cpu" else 0.0
    if shared > CONTENTION_TOLERANCE * own or beside > OTHER_WORK_TOLERANCE:
        warning = Warnings.other_work
    elif beside > CONTENTION_TOLERANCE:
        warning = Warnings.little_other_work
    else:
        return None
    return warning.flag(others=others, cores=plural(cores, "core"), own=own)


def timed_threads(record: Record) -> int:
    """Threads that may wait for a CPU while timing: the client of a server elsewhere works with one."""
    return 1 if served_elsewhere(record) else record["threads"]


def oversubscribed(record: Record) -> bool:
    """Whether it has more threads than this machine has CPUs, which then wait for each other."""
    cpus = record["machine"].get("usable_cpus")
    return cpus is not None and record["threads"] > cpus
