"""What other processes used of the GPU while timing, and does that invalidate a figure? Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.analysis.sensors import Columns, Timed
from harness.analysis.throttling import read, to_the_end
from harness.analysis.warnings import Flag, Warnings
from harness.machine.sensor_values import GPU_OTHERS, GPU_OTHERS_COLUMN
from harness.records.kinds import Record, memory_of, served_elsewhere
from harness.records.measured import EndFacts, Surface
from harness.records.sensed import OthersOnGpu

# Of the device's time. Contexts take turns, so that a mean is longer by as much. A desktop's compositor takes
# 1 to 5% and more only in short bursts, which a mean over the timed part holds down.
SHARED_TOLERANCE = 0.10
SHARED_NOTED = 0.02  # run-to-run noise
# A process that computes holds a context of 100 MB and more; the driver's own is less.
HELD_NOTED_BYTES = 100e6
NOT_SEEN = "in the timed part not even the worker's own work was seen"


def others_on_gpu(columns: Columns, during: Timed | None, done: EndFacts | None) -> OthersOnGpu | None:
    """What others used in the timed part, also of a workload whose result is a table; None where it was not
    read there. Each reading is the mean since the one before, and counts for as long."""
    elapsed_ns = ((done or EndFacts()).get("surface") or Surface()).get("elapsed_ns")
    if during is not None:
        start_ns, end_ns = during.start_ns, during.end_ns
    elif done and elapsed_ns:
        start_ns, end_ns = done["start_ns"], done["start_ns"] + elapsed_ns
    else:
        return None
    readings = to_the_end(read(columns, GPU_OTHERS_COLUMN), start_ns, end_ns)
    if not readings:
        return None
    times_ns, percents = zip(*readings, strict=True)
    spans_ns = np.diff(np.minimum([start_ns, *times_ns], end_ns))  # the last reading may come after the end
    return {"mean_percent": float(np.average(percents, weights=spans_ns)), "readings": len(readings)}


def conditions(record: Record) -> Iterator[Flag]:
    """Others' work, which invalidates a repeat unless it is little; and memory that others held, where their
    work is not known. None of a server elsewhere, which is itself another process."""
    sensors = record.get("sensors")
    if not sensors or served_elsewhere(record):
        return
    if others := sensors.get("others_on_gpu"):
        share = others["mean_percent"] / 100
        if share > SHARED_NOTED:
            warning = Warnings.gpu_shared if share > SHARED_TOLERANCE else Warnings.gpu_shared_little
            yield warning.flag(share=share)
        return
    marks = memory_of(record).get("marks") or []
    started = next((mark["vram_bytes"] for mark in marks if mark["at"] == "started"), None)
    if started and started >= HELD_NOTED_BYTES:
        why = sensors["missing"].get(GPU_OTHERS, "older records do not have it")
        yield Warnings.gpu_memory_of_others.flag(megabytes=started / 1e6, why=why)
