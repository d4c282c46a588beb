"""Measure the power of the idle device, for energy above it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import psutil

from harness.analysis import device_energy
from harness.machine.cpu_times import BUSY_SHARE, Times, busy_share
from harness.machine.sensor import Search
from harness.machine.sensors import sources
from harness.records.sensed import IdlePower

IDLE_INTERVAL_S = 0.5  # between readings: of a power, each counts


def idle_power(
    device_id: str,
    say: Callable[[str], None],
    root: Path = Path("/"),
    sleep: Callable[[float], None] = time.sleep,
    cpu_times: Callable[[], Times] = lambda: psutil.cpu_times()._asdict(),
) -> IdlePower | None:
    """The device's power over some seconds, as long as its counter needs; None, at once, without a counter,
    and of a CPU that was not idle. `root`: the folder that contains sys."""
    on_cpu = device_id == "cpu"
    with ExitStack() as opened:
        counters = [source for source in sources(Search(device_id, root, opened)) if source.energy]
        domains = {column: counter for source in counters for column, counter in source.energy.items()}
        if (span_s := device_energy.idle_span_s(domains, on_cpu)) is None:
            return None
        columns: dict[str, list[int | None]] = {name: [] for name in ("t_ns", *domains)}
        before = cpu_times()
        for number in range(round(span_s / IDLE_INTERVAL_S) + 1):
            if number:
                sleep(IDLE_INTERVAL_S)
            values: dict[str, int | None] = {"t_ns": time.perf_counter_ns()}
            for source in counters:
                values |= source.read()
            for name, column in columns.items():
                column.append(values.get(name))
    busy = busy_share(before, cpu_times()) if on_cpu else None
    if busy is not None and busy > BUSY_SHARE:
        say(f"no J/token above idle: other processes use {busy:.0%} of the CPUs, which are not idle")
        return None
    return device_energy.idle_power(columns, domains, on_cpu)


idle_power_once = cache(idle_power)  # of a command: one that tunes has many campaigns
