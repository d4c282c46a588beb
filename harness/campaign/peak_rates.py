"""Measure the device's peak between cells: read bandwidth, and the matrix rate (FLOP/s) once.

NumPy and the C library measure a CPU; a stack's own kernels measure a GPU, under the stack's interpreter.
If a probe fails, the campaign reports it and continues without.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import machine
from harness.campaign import worker
from harness.campaign.repeat import Inputs
from harness.machine import ProbeError
from harness.machine.probes import MatrixRate
from harness.records import measured
from harness.records.values import plain
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from runners.protocol import NO_JOB, Request

PROBE_EVERY_S = 60.0  # a probe takes a second on a CPU, five through a stack
STACK_TIMEOUT_S = 120.0

Say = Callable[[str], None]


class Probes:
    """The probes of one campaign: one before each round of repeats, and one a minute."""

    def __init__(self, ready: Iterable[object], say: Say, bandwidth: bool, matrix: bool) -> None:
        """`ready`: the Inputs of the cells that are ready; anything else is ignored."""
        cells = [each for each in ready if isinstance(each, Inputs)]
        self._device_id = cells[0].device_id if cells else None
        self._threads = max((cell.threads for cell in cells), default=0)
        self._stacks = measuring(cell.interpreter for cell in cells)
        self._say, self._wants_bandwidth, self._wants_matrix = say, bandwidth, matrix
        self._taken: list[measured.BandwidthProbe] = []
        self._matrix: measured.MatrixProbe | None = None
        self._round, self._at = 0, 0.0

    def so_far(self, repeat: int) -> tuple[list[measured.BandwidthProbe], measured.MatrixProbe | None]:
        """Run the probes that are due. Returns all results so far."""
        due = repeat != self._round or time.monotonic() > self._at + PROBE_EVERY_S
        if self._device_id is not None and due and (self._wants_bandwidth or self._wants_matrix):
            if self._device_id == "cpu":
                self._of_cpu()
            else:
                self._of_gpu(self._device_id)
            self._wants_matrix = False  # once, before the first repeat
            self._round, self._at = repeat, time.monotonic()
        return list(self._taken), self._matrix

    def _of_cpu(self) -> None:
        try:
            if self._wants_bandwidth:
                self._taken.append(plain(machine.read_bandwidth(self._threads)))
        except ProbeError as failure:
            self._say(f"probe failed: {failure}")
        try:
            if self._wants_matrix:
                self._matrix = plain(cpu_matrix_rate(self._threads, self._stacks, self._say))
        except ProbeError as failure:
            self._say(f"probe failed: {failure}")

    def _of_gpu(self, device_id: str) -> None:
        for interpreter in tuple(self._stacks):
            measures = ["read"] * self._wants_bandwidth + ["matrix"] * self._wants_matrix
            try:
                rates = through_stack(interpreter, device_id, self._threads, measures)
            except ProbeError as failure:
                self._say(f"probe failed: {failure}")
                self._stacks.remove(interpreter)  # it would fail again
                continue
            if self._wants_bandwidth:
                self._taken.append(rates["read"])
            if self._wants_matrix:
                self._matrix = rates["matrix"]
            return


class NotMeasured(ProbeError):
    """The stack's probe measures no such thing."""


def measuring(interpreters: Iterable[Interpreter]) -> list[Interpreter]:
    """One interpreter per stack, by name; without stacks that have no kernels to run: no dependencies, or
    another stack that does their jobs."""
    by_stack = {
        interpreter.environment.stack: interpreter
        for interpreter in interpreters
        if interpreter.environment.dependencies
    }
    return [by_stack[stack] for stack in sorted(by_stack) if not stacks()[stack].jobs_of]


def cpu_matrix_rate(threads: int, built: Sequence[Interpreter], say: Say) -> MatrixRate:
    """The fastest matrix product of NumPy and the stacks. A stack may be far faster (on one CPU OpenBLAS's
    float32 gave 250 GFLOP/s, ggml's f16 400, its repacked q4_0 585), and no MFU should exceed 100%.

    Raises ProbeError if NumPy fails; the failure of a stack is only reported.
    """
    probe = machine.matrix_rate(threads)
    torches: set[str] = set()  # stacks with the same torch have the same kernels
    for interpreter in built:
        if torches.intersection(interpreter.lock):
            continue
        try:
            matrix = through_stack(interpreter, "cpu", threads, ["matrix"])["matrix"]
        except NotMeasured:
            continue
        except ProbeError as failure:
            say(f"probe failed: {failure}")
            continue
        probe["kernels"] |= matrix["kernels"]
        torches |= {version for version in interpreter.lock if version.startswith("torch==")}
    fastest = max(probe["kernels"], key=lambda name: float(probe["kernels"][name]))
    return probe | {"kernel": fastest, "flops_per_s": probe["kernels"][fastest]}


def through_stack(
    interpreter: Interpreter, device_id: str, threads: int, measures: Sequence[str]
) -> Mapping[str, Any]:
    """Run a stack's `probe` job. `measures`: `read`, `matrix`, or both. Returns the result of each.

    Raises ProbeError.
    """
    stack = interpreter.environment.stack
    if device_id == "cpu":
        machine.check_quota(threads, "the CPU")
    options = {"measure": list(measures), "threads": threads}
    request = Request("probe", stack, device_id, {"name": "none", "path": None}, options)
    with tempfile.TemporaryDirectory(prefix="harness-probe-") as folder:
        try:
            job = worker.run_job(request, interpreter, Path(folder), STACK_TIMEOUT_S, threads)
            facts = worker.facts_of(job)
        except (worker.JobFailed, OSError) as failure:
            kind = NotMeasured if NO_JOB in str(failure) else ProbeError
            raise kind(f"{device_id} could not be measured by {stack}: {failure}") from failure
    if missing := [part for part in measures if part not in facts]:
        raise NotMeasured(
            f"{device_id} could not be measured by {stack}: its probe did not return {missing[0]}"
        )
    shared = {"threads": facts.get("threads"), "stack": stack}
    return {part: facts[part] | shared for part in measures}
