"""`python -m harness.campaign.fleet.node PARENT_PID`: one job of a fleet on this node. The job comes as
a line of JSON on standard input, and events go as lines of JSON to standard output.

The job is an ordinary campaign with its own device lock, into a folder of the cache. The process
prints nothing while a token is timed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import config, machine
from harness.analysis.attempts import BusyProcess
from harness.analysis.verdicts import Verdict, attempts_left, status
from harness.base.files import FULL, NotFinished, NotStarted
from harness.campaign import forecast, provenance, run
from harness.campaign.fleet import parcels
from harness.campaign.fleet.jobs import Job
from harness.campaign.fleet.results import identity
from harness.campaign.opening import RunOptions
from harness.config import Experiment, plan
from harness.config.plan import Cell
from harness.records import Draft, Stored
from harness.stacks.inside.guard import end_with
from runners.protocol import Rows

MESSAGE_S = 2.0  # between transient messages
# Cells are only compared with each other, so any rates will do where time is estimated before a run.
NOMINAL_BYTES_PER_S, NOMINAL_FLOPS = 20e9, 1e11


def main(parent_pid: int) -> int:
    """Do the job on standard input; it ends with its parent. 1: a line `failed` has the reason."""
    end_with(parent_pid)
    signal.signal(signal.SIGTERM, _stop)
    with contextlib.suppress(OSError):  # Ray starts its workers with a niceness of 15
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    job: Job = json.loads(sys.stdin.readline())
    try:
        JOBS[job["do"]](job)
    except (NotStarted, NotFinished) as reason:
        say("failed", reason=str(reason))
    except KeyboardInterrupt:
        say("failed", reason="it was stopped")
    except OSError as refusal:
        if refusal.errno not in FULL:
            raise
        say("failed", reason=f"{refusal.filename or 'a file'} cannot be written: {refusal.strerror}")
    else:
        return 0
    return 1


def _stop(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: the record is written now
    raise KeyboardInterrupt


def say(event: str, **values: Any) -> None:
    """Print what happens, whole before the process is stopped: half a line would run into the next one. A
    parent that is gone reads nothing, and what was measured is in the spool."""
    line = json.dumps({"event": event, **values})
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with contextlib.suppress(BrokenPipeError):
            print(line, flush=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def survey(job: Job) -> None:
    """What is known of the cells here before they run: `seconds` of a repeat (null: unknown; comparable among
    cells, not a time), `no_room`, and `facts` of a record, which together with `shared` are one that was not
    measured. Then the records that the fleet does not have yet, of the machine in `shared`."""
    with tempfile.TemporaryDirectory() as here:
        experiment, cells = _wanted(job, Path(here))
    device = forecast.device_of(experiment)
    threads = experiment.protocol.threads or machine.default_threads()
    shared = provenance.campaign_fields(experiment, Path(job["config_path"]), job["command_line"])
    shared["campaign"]["fleet"] = job["fleet"]
    found = {}
    for cell in cells:
        known = forecast.expected(cell, device, threads)
        options, slug = cell.options(threads), shared["machine"]["slug"]
        key = plan.content_key(cell, options, ("unavailable",), None, slug, experiment.device)
        found[cell.id] = {
            "seconds": known.duration(NOMINAL_BYTES_PER_S, NOMINAL_FLOPS)[0],
            "no_room": known.no_room,
            "facts": provenance.repeat_fields(cell, 1, key, experiment.device, experiment.gpu),
        }
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    say("surveyed", shared=shared, cells=found, niceness=niceness)
    for parcel in parcels.unsent(job["tag"], job["known"]):
        say("record", parcel=parcel)


def measure(job: Job) -> None:
    """Run a campaign of some cells. `earlier`: records of them that the fleet has, which are not measured
    again. Ends with the identities of all records that count: content key, repeat, start."""
    with parcels.spool_folder(job["tag"]) as here:
        experiment, cells = _wanted(job, here)
        root = here / "results"
        earlier = [parcels.store(root, parcel) for parcel in job["earlier"]]
        lines = Lines({stored.folder for stored in earlier if stored})
        options = RunOptions(
            root=root,
            config_path=Path(job["config_path"]),
            command_line=job["command_line"],
            fresh=job["fresh"],
            retry_failed=job["retry_failed"],
            wait=job["wait"],
            fleet=job["fleet"],
        )
        try:
            stored = run.run(experiment, cells, options, lines)
        finally:
            lines.send_rest(root)
    say("ended", records=[identity(each.record) for each in stored])


def tidy(job: Job) -> None:
    """Remove the records that the fleet has stored."""
    for parcel in parcels.unsent(job["tag"], job["known"]):
        say("record", parcel=parcel)


JOBS: dict[str, Callable[[Job], None]] = {"survey": survey, "measure": measure, "tidy": tidy}


def _wanted(job: Job, here: Path) -> tuple[Experiment, list[Cell]]:
    path = here / "config.yaml"
    path.write_text(json.dumps(job["config"]), encoding="utf-8")  # JSON is YAML
    experiment = config.load(path)
    wanted = set(job["cells"])
    return experiment, [cell for cell in plan.cells(experiment) if cell.id in wanted]


class Lines:
    """A campaign's Watcher: each repeat as a line when it begins, and as a record when it ends."""

    def __init__(self, sent: set[Path]) -> None:
        """`sent`: folders of records that the fleet has."""
        self._sent = sent
        self._said_s = 0.0

    def say(self, line: str) -> None:
        if time.monotonic() >= self._said_s + MESSAGE_S:
            self._said_s = time.monotonic()
            say("message", line=line)

    def warn(self, line: str) -> None:
        say("warning", line=line)

    def repeat_begins(self, number: int, of: int, cell: Cell, begun: Draft) -> None:
        say("begins", number=number, of=of, begun=begun)

    def tokens(self, count: int, latency_ns: int) -> None:
        """Nothing: a line would disturb the tokens that follow."""

    def rows(self, rows: Rows) -> None:
        """Nothing, as for tokens."""

    def repeat_ends(self, stored: Stored, found: Verdict) -> None:
        again = attempts_left(stored.record, found)
        self._send(stored.folder, status=found.status, reasons=list(found.reasons), again=again)

    def disturbed_by(self, process: BusyProcess) -> None:
        say("warning", line=f"repeats were disturbed by {process.name}")

    def search_ends(self, stored: Stored) -> None:
        state, reasons = status(stored.record)
        self._send(stored.folder, status=state, reasons=list(reasons), again=False)

    def send_rest(self, root: Path) -> None:
        """Records that no call announced: checks of weights, and a repeat that was interrupted."""
        for path in sorted(root.rglob("record.json")):
            if path.parent not in self._sent:
                self._send(path.parent)

    def _send(self, folder: Path, **values: Any) -> None:
        self._sent.add(folder)
        say("record", parcel=parcels.packed(folder), **values)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
