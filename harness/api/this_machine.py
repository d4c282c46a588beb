"""The devices of this machine, and their peak rates: measured once, and kept in the cache."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from harness import machine
from harness.api.progress import Progress
from harness.base.files import JsonFileError, Mistake, cache_folder, object_of, write_whole
from harness.base.nvml import visible_gpus
from harness.base.text import say
from harness.campaign import peak_rates
from harness.campaign.device_lock import DeviceBusy, device_lock
from harness.campaign.other_processes import busy_now
from harness.machine import ProbeError
from harness.machine.cgroups import usable_memory_bytes
from harness.machine.cpu_times import BUSY_SHARE
from harness.machine.emulation import cpu_kind
from harness.stacks import build
from harness.stacks.adopted import Interpreter
from harness.stacks.header import references, stacks
from harness.theory.machines import Figure, Machine

Row = dict[str, Any]

FACTS = (
    *("architecture", "physical_cores", "logical_cpus", "usable_cpus", "last_level_cache_bytes"),
    *("os", "virtualized", "emulated", "driver", "compute_capability"),
)
RATES = (
    *("read_bytes_per_s", "read_kernel", "read_kernels", "working_set_bytes"),
    *("matrix_flops_per_s", "matrix_kernel", "matrix_kernels", "threads"),
)


def this_cpu() -> Machine:
    """The CPU of this machine as the theory takes one: usable memory, and bandwidth and matrix rate, measured
    once and kept in the cache. Raises Mistake."""
    row = next(devices())
    if not (kept := _kept_rates()):
        kept = _measured_now(row)
    row |= kept
    when = f"measured {row['measured']}"
    return Machine(
        name=row["name"],
        memory=Figure(usable_memory_bytes(), "the operating system, within the limits of this container"),
        bandwidth=Figure(row["read_bytes_per_s"], f"{when}: {row['read_kernel']}"),
        rates={"measured": Figure(row["matrix_flops_per_s"], f"{when}: {row['matrix_kernel']}")},
        rate="measured",
        cpu_kind=cpu_kind(platform.machine()),
    )


def _measured_now(row: Row) -> Row:
    """The rates of this CPU, measured, and kept unless the machine is busy. Raises Mistake."""
    progress = Progress()
    try:
        with device_lock("cpu", wait=False, say=progress.say):
            progress.say("measuring this machine, once")
            done = measure(row, progress)
            progress.clear()
    except DeviceBusy as busy:
        raise Mistake(f"{str(busy).partition(';')[0]}; this machine cannot be measured now") from busy
    if not done:
        raise Mistake(row["note"])
    return {**{key: row[key] for key in RATES}, "measured": "now"}


def _rates_file() -> Path:
    return cache_folder() / "rates" / f"{machine.facts()['slug']}.json"


def _kept_rates() -> Row | None:
    """The rates of this CPU that were measured last, if the same stacks were built; says when that was."""
    try:
        kept = object_of(_rates_file(), 1 << 20)
    except (OSError, JsonFileError):
        return None
    rates = (kept.get("read_bytes_per_s"), kept.get("matrix_flops_per_s"))
    if kept.get("stacks") != _measured_stacks() or not all(isinstance(rate, float) for rate in rates):
        return None
    say(f"this machine as measured on {kept.get('measured')} (again: harness doctor --measure)")
    return kept


def _keep_rates(row: Row) -> None:
    """Best effort: without it the next question measures again."""
    kept = {"measured": str(date.today()), "stacks": _measured_stacks()}
    with contextlib.suppress(OSError):
        file = _rates_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(kept | {key: row[key] for key in RATES}, indent=1).encode())


def _measured_stacks() -> list[str]:
    return [str(each.python) for each in peak_rates.measuring(_built("cpu"))]


def devices() -> Iterator[Row]:
    """One row per visible device, without rates. `device`: as in a record; `family`: as in a config."""
    empty: Row = dict.fromkeys(("device", "family", "name", "memory_bytes", *FACTS, *RATES, "note"))
    facts = machine.facts()
    known: Any = facts
    system = {
        "device": "cpu",
        "family": "cpu",
        "name": facts["cpu"],
        "os": f"{facts['os']} {facts['kernel']}",
    }
    yield empty | {key: known[key] for key in empty if key in known} | system
    gpus = visible_gpus()
    for gpu in gpus:
        seen: Row = {"device": gpu["uuid"], "family": "cuda", "name": gpu["name"]}
        seen |= {"driver": gpu["driver"], "compute_capability": gpu["compute_capability"]}
        yield empty | seen | {"memory_bytes": gpu["memory_bytes"]}
    if gpus:
        return
    for family in ("metal", "hip", "vulkan"):
        try:
            yield empty | {"device": machine.device_id(family, None), "family": family}
        except machine.DeviceError:
            continue
        return  # a second family would be the same GPU again


def measure(row: Row, progress: Progress) -> bool:
    """Fill in the rates; false if a probe failed. A missing environment is a note."""
    threads, built = machine.default_threads(), peak_rates.measuring(_built(row["family"]))
    try:
        if row["family"] == "cpu":
            busy = busy_now() or 0.0
            _fill(row, read=machine.read_bandwidth(threads))
            _fill(row, matrix=peak_rates.cpu_matrix_rate(threads, built, progress.say))
            if busy > BUSY_SHARE:
                say(f"other processes use {busy:.0%} of the CPUs: measured, but not kept")
            else:
                _keep_rates(row)
            if not built:
                row["note"] = f"the kernels of a stack may be faster, but none is built; run: {_create(row)}"
        elif built:
            rates = peak_rates.through_stack(built[0], row["device"], threads, ["read", "matrix"])
            _fill(row, rates["read"], rates["matrix"])
        else:
            row["note"] = f"no stack is built for this device; run: {_create(row)}"
    except ProbeError as failure:
        row["note"] = str(failure)
        return False
    return True


def _create(row: Row) -> str:
    return f"harness env create {references()['gguf'].stack} --device {row['family']}"


def _built(family: str) -> Iterator[Interpreter]:
    for header in stacks().values():
        environment = header.environment_for(family)
        if environment is not None and (found := build.find(environment)):
            yield found


def _fill(row: Row, read: Any = None, matrix: Any = None) -> None:
    if read:
        row.update({key: read[key] for key in ("read_bytes_per_s", "working_set_bytes", "threads")})
        row.update(read_kernel=read["kernel"], read_kernels=read["kernels"])
    if matrix:
        row.update(matrix_flops_per_s=matrix["flops_per_s"], threads=matrix["threads"])
        row.update(matrix_kernel=matrix["kernel"], matrix_kernels=matrix["kernels"])
