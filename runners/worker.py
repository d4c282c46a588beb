"""The worker: load a model, warm up, time a workload, report events. Runs one Request and ends."""

from __future__ import annotations

import importlib
import itertools
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runners import clock as runners_clock
from runners import protocol
from runners.clock import (
    Clock,
    Emit,
    cpu_usage,
    cpu_wait_ns,
    data_bytes,
    page_faults,
    peak_rss_bytes,
    stamp,
    stamping_cost_ns,
    suspended_ns,
)
from runners.protocol import (
    Done,
    Event,
    Failed,
    Instruments,
    Loaded,
    Phase,
    Refused,
    Request,
    Session,
    reason_of,
)
from runners.workloads import filling, prefill_depth_turns, scoring, users
from runners.workloads.filling import Growth
from runners.workloads.warm_up import control_windows, uncollected, warm_up

# Jobs on files alone, by the module that does them under the interpreter of any stack.
MODULES = {
    "synthesize": "weights.synthetic",
    "pack": "weights.packed",
    "unpack": "weights.packed",
    "differences": "weights.layout",
}
Measure = Callable[..., dict[str, Any]]
# Workloads that time something other than a stream of tokens.
SURFACE: dict[Any, Measure] = {
    "prefill": prefill_depth_turns.measure_prefill,
    "depth": prefill_depth_turns.measure_depth,
    "turns": prefill_depth_turns.measure_turns,
    "batch": users.measure_batch,
}


def main(request_path: Path, events_fd: int, go_on_fd: int, alive_fd: int) -> int:
    """Run one Request. The exit code is 0 unless the job failed; events have the details. On Windows the
    pipes are handles."""
    if sys.platform == "win32":
        import msvcrt

        events_fd, go_on_fd, alive_fd = (
            msvcrt.open_osfhandle(handle, 0) for handle in (events_fd, go_on_fd, alive_fd)
        )
    die_with_controller(alive_fd)
    for fd in (events_fd, go_on_fd, alive_fd):
        os.set_inheritable(fd, False)

    def emit(event: Event) -> None:
        line = memoryview(protocol.encode(event))
        while line:
            line = line[os.write(events_fd, line) :]
        if protocol.holds(event):
            os.read(go_on_fd, 1)

    does_not_fit: tuple[type[BaseException], ...] = (MemoryError,)
    try:
        emit(Phase("import", time.perf_counter_ns()))
        request = Request.read(request_path)
        runner = importlib.import_module(f"runners.{MODULES.get(request.job, f'stacks.{request.stack}')}")
        does_not_fit += getattr(runner, "DOES_NOT_FIT", ())
        if request.job == "import":
            emit(Done({}))
        elif request.job == "generate":
            generate(request, runner, emit, does_not_fit, instruments_of(runner, request))
        elif request.job == "fit":
            fit(request, runner, emit, instruments_of(runner, request))
        else:
            emit(Done({**answer_of(request, runner, emit), "peak_rss_bytes": peak_rss_bytes()}))
    except BaseException as failure:
        traceback.print_exc()
        refused = isinstance(failure, Refused)
        outcome = "oom" if isinstance(failure, does_not_fit) else "refused" if refused else "error"
        emit(Failed(outcome, reason_of(failure)))
        return 1
    return 0


def answer_of(request: Request, runner: Any, emit: Emit) -> dict[str, Any]:
    """The facts of a job that is not timed. Raises ValueError: the runner lacks it."""

    def say(phase: str) -> None:
        emit(Phase(phase, time.perf_counter_ns()))

    if request.job == "logits":
        return scoring.write_logits(runner.load(request), request, say)
    job = getattr(runner, request.job, None)
    if request.job not in protocol.JOBS or job is None:
        raise ValueError(f"stack {request.stack} {protocol.NO_JOB} {request.job!r}")
    answer: dict[str, Any] = job(request, say)
    return answer


def die_with_controller(alive_fd: int) -> None:
    """Have the kernel kill this process group, children of this process included, when the controller ends;
    off Linux a thread ends this process alone. `alive_fd`: a pipe whose only other end the controller has,
    and never writes to."""
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(alive_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(alive_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(alive_fd, fcntl.F_SETFL, fcntl.fcntl(alive_fd, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([alive_fd], [], [], 0)[0]:  # it died before the call above
            os.killpg(0, signal.SIGKILL)
        return

    def wait_for_its_end() -> None:
        os.read(alive_fd, 1)
        os._exit(1)

    threading.Thread(target=wait_for_its_end, daemon=True).start()


def instruments_of(runner: Any, request: Request) -> Instruments:
    """The runner's own, if it provides them, else this process's."""
    brought: Instruments | None = runner.instruments(request) if hasattr(runner, "instruments") else None
    return brought or Instruments(time.perf_counter_ns, cpu_wait_ns, page_faults, suspended_ns)


def loaded(request: Request, runner: Any, emit: Emit, clock: Clock) -> Session:
    emit(Phase("load", clock()))
    session: Session = runner.load(request)
    if made := request.files.get("made"):
        read_through(Path(made))
    emit(Loaded({**session.facts(), "heap_free_bytes": runners_clock.free_bytes()}))
    return session


def read_through(folder: Path) -> None:
    """Have an engine's own files in the page cache: of one that it maps, a page that warm-up did not use, as
    an embedding's row, would be read from the disk while tokens are timed."""
    buffer = bytearray(1 << 20)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def fit(request: Request, runner: Any, emit: Emit, instruments: Instruments) -> None:
    """Load with a context of the requested length, and fill it: see filling. The outcome shows whether it
    fits. `most_s` of the workload limits the total time."""
    clock = instruments.clock_ns
    began = clock()
    session = loaded(request, runner, emit, clock)
    workload, filled = request.workloads[0], filling.not_filled()

    def say(phase: str) -> None:
        emit(Phase(phase, clock()))

    if workload["fill"]:
        say("fill")
        left_s = workload["most_s"] - (clock() - began) / 1e9
        with uncollected():
            filled = filling.fill(
                session,
                workload["tokens"],
                workload["prompt"],
                left_s,
                say,
                instruments,
                request.options["threads"],
            )
    say("finish")
    taken = {"data_bytes": data_bytes(), "peak_rss_bytes": peak_rss_bytes()}
    emit(Done({**filled, **taken, "facts_after": session.facts()}))
    session.close()


def generate(
    request: Request,
    runner: Any,
    emit: Emit,
    does_not_fit: tuple[type[BaseException], ...],
    instruments: Instruments,
) -> None:
    """Load once, then for each workload warm up, time, and send Done.

    A workload of kind grow succeeds when memory runs out: `stopped` has the reason (null: it reached its
    end), `memory_steps` [tokens held, allocated bytes, reserved bytes] at each flush, if the stack has them.
    """
    session = loaded(request, runner, emit, instruments.clock_ns)
    for workload in request.workloads:
        measured, fed = SURFACE.get(workload.get("kind")), scoring.force_tokens(session, workload)
        if measured:
            surface(session, workload, emit, instruments, measured, fed)
        else:
            decode(session, workload, emit, does_not_fit, instruments, fed)
    session.close()


def decode(
    session: Session,
    workload: dict[str, Any],
    emit: Emit,
    does_not_fit: tuple[type[BaseException], ...],
    instruments: Instruments,
    fed: dict[str, Any],
) -> None:
    """Decode token by token, every one stamped, and a control window after it."""
    clock, suspended = instruments.clock_ns, instruments.suspended_ns()
    prompt, new_tokens = workload["prompt"], workload["new_tokens"]

    def say(phase: str) -> None:
        emit(Phase(phase, clock()))

    say("warmup")
    warmup = warm_up(session, prompt, new_tokens, **workload["warmup"], clock=clock, say=say)
    # One token more than requested shows that a stack does not stop.
    stream = itertools.islice(session.generate(prompt, new_tokens), new_tokens + 1)
    growth = Growth(session, len(prompt), does_not_fit) if workload.get("kind") == "grow" else None
    say("generate")
    with uncollected():
        usage = Usage(instruments)
        timing = growth.stamped(stream, emit, clock) if growth else stamp(stream, emit, clock)
    used = usage.since()
    say("finish")
    ended = {
        **(growth.summary() if growth else {}),
        "counters": growth.counters() if growth else session.counters(),
        "facts_after": session.facts(),
    }
    if not growth:  # which has no memory left
        say("control")
        ended["control"] = control_windows(session, prompt, new_tokens, warmup, instruments)
    more = {
        "stamp_ns_per_token": stamping_cost_ns(),
        "suspended_ns": _suspended_since(suspended, instruments),
    }
    measured = {**timing, **ended, "warmup": warmup, **used, **after_all(), **more, **fed}
    if not growth:  # after all figures: the probe itself takes a little memory
        measured |= scoring.counted_experts(session, prompt, new_tokens, does_not_fit)
    emit(Done(measured))


def surface(
    session: Session,
    workload: dict[str, Any],
    emit: Emit,
    instruments: Instruments,
    measure: Measure,
    fed: dict[str, Any],
) -> None:
    """Time passes, windows, turns or users: rows of a table, in place of a stream of tokens."""
    clock, suspended = instruments.clock_ns, instruments.suspended_ns()

    def say(phase: str) -> None:
        emit(Phase(phase, clock()))

    say("warmup")
    # Of one user, which may be less than prompt and window.
    settings, room = workload["warmup"], workload["holds"] // max(workload.get("concurrency", [1]))
    prompt = workload["prompt"][: room // 2]
    window = min(settings["window_tokens"], room - len(prompt))
    warmup = warm_up(session, prompt, window, **settings, clock=clock, say=say)
    say("generate")
    with uncollected():
        usage, began = Usage(instruments), clock()
        found = measure(session, workload, emit, instruments, say) | {"elapsed_ns": clock() - began}
    used = usage.since() | {"major_faults": found.pop("major_faults")}
    say("finish")
    counters = found.pop("counters", {})
    facts = {"start_ns": began, "flushes": [], "counters": counters, "facts_after": session.facts()}
    more = {"warmup": warmup, "suspended_ns": _suspended_since(suspended, instruments), **fed}
    emit(Done({**facts, "surface": found, **used, **after_all(), **more}))


class Usage:
    """Counters of the process's use of the machine, from now on."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._usage, self._faults = cpu_usage(), instruments.page_faults()
        self._waited_ns = instruments.cpu_wait_ns()

    def since(self) -> dict[str, Any]:
        waited_ns = self._instruments.cpu_wait_ns()
        (cpu_s, switches), (cpu_s_before, switches_before) = cpu_usage(), self._usage
        major, minor = self._instruments.page_faults()
        return {
            "major_faults": major - self._faults[0],
            "minor_faults": minor - self._faults[1],
            "involuntary_switches": None if switches is None else switches - (switches_before or 0),
            "cpu_wait_ns": None if self._waited_ns is None else (waited_ns or 0) - self._waited_ns,
            "cpu_s": cpu_s - cpu_s_before,
        }


def after_all() -> dict[str, Any]:
    """Memory at the end of a workload."""
    return {"peak_rss_bytes": peak_rss_bytes(), "heap_free_bytes": runners_clock.free_bytes()}


def _suspended_since(before: int | None, instruments: Instruments) -> int | None:
    return None if before is None else max(0, (instruments.suspended_ns() or 0) - before)
