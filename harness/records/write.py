"""Write records completely or not at all, never over another; recover records of a killed controller."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import BinaryIO

from harness.base import bounds, files, system
from harness.base.files import open_regular, read_regular, sync_folder
from harness.records.files import ResultsError, write_columns, write_whole
from harness.records.kinds import Record, checked
from harness.records.measured import MeasuredEnd
from harness.records.read import SCHEMA, Stored
from harness.records.searched import Draft, Probe, UntimedEnd
from harness.records.tables import Tables, add_rows
from harness.records.token_times import NO_TOKENS, TokenTimes
from harness.records.values import Fields, clause
from runners.protocol import Event, Loaded, NonsenseError, Phase, Rows, decode

Samples = dict[str, list[int | None]]
"""Columns sampled during a run, including `t_ns`; null where a value could not be read."""

WHEN = "%Y%m%dT%H%M%S.%fZ"  # the folder of a record: when it began
LOG_TAIL_LINES = 20


class Running:
    """A repeat in progress: owns its folder and the lock on it until finish()."""

    def __init__(self, folder: Path, begun: Draft) -> None:
        self.folder, self._begun = folder, begun
        self.events: BinaryIO = (folder / "events.jsonl").open("wb", buffering=0)
        # Lock before begun.json makes the folder recoverable. The kernel releases it if the controller dies.
        system.lock(self.events)
        write_whole(folder / "begun.json", json.dumps({**begun, "begun_by": begun_by()}).encode())

    def note(self, probe: Probe) -> None:
        """Store a probe of a search at once, so that it can be recovered. Raises ResultsError."""
        try:
            with (self.folder / "probes.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(probe, allow_nan=False) + "\n")
        except OSError as refusal:
            raise ResultsError(f"cannot write results to {self.folder}: {refusal.strerror}") from refusal

    def finish(
        self,
        end: MeasuredEnd | UntimedEnd,
        times: TokenTimes = NO_TOKENS,
        memory: Samples | None = None,
        sensors: Samples | None = None,
        tables: Tables | None = None,
    ) -> Stored:
        """Write the series, then the record, then delete the temporary files. Raises ResultsError."""
        try:
            samples = {"memory": memory, "sensors": sensors}
            stored = _finish(self.folder, {**self._begun, **end}, times, samples, tables or {})
        finally:
            self.events.close()
        return stored


def begin(cell_folder: Path, begun: Draft) -> Running:
    """Create a new folder for a repeat of a cell. Raises ResultsError (read-only, disk full, not a folder,
    or a link that a stranger may have put there)."""
    _refuse_links(cell_folder)
    while True:
        folder = cell_folder / datetime.now(timezone.utc).strftime(WHEN)
        try:
            folder.mkdir(parents=True)
            for above in folder.parents[:4]:
                sync_folder(above)
            return Running(folder, begun)
        except FileExistsError:
            if not folder.is_dir():  # a file is where a results folder must be
                raise ResultsError(f"{folder}: a file is where a results folder must be") from None
        except OSError as refusal:
            raise ResultsError(f"cannot write results: {refusal}") from refusal


def _refuse_links(cell_folder: Path) -> None:
    for above in (cell_folder, *cell_folder.parents[:2]):  # of the model, and of the machine
        if above.is_symlink():
            raise ResultsError(f"{above}: a symbolic link is where a results folder must be")


def check_writable(root: Path) -> None:
    """Raises ResultsError if records cannot be written below root. Creates no folder: the run may be refused
    yet."""
    try:
        tempfile.TemporaryFile(dir=next(each for each in (root, *root.parents) if each.exists())).close()
    except OSError as refusal:
        raise ResultsError(
            f"{root}: cannot write results here: {refusal.strerror}; choose another: --out DIR"
        ) from refusal


def keep(folder: Path, fields: Fields, series: dict[str, list[int]], prefill: dict[str, list[int]]) -> Stored:
    """Write a record of kind `reported` and its series, if any (`n`, `latency_ns`), into a new folder.

    Raises ResultsError if the record is invalid, or the folder exists or cannot be written.
    """
    record = _numbered(folder, fields)
    try:
        folder.mkdir(parents=True)
    except OSError as refusal:
        raise ResultsError(f"{folder}: cannot write results here: {refusal.strerror}") from refusal
    for name, columns in (("tokens", series), ("prefill", prefill)):
        if columns:
            write_columns(folder / f"{name}.parquet", columns)
    write_whole(folder / "record.json", _text(record))
    return Stored(folder, record)


def receive(cell_folder: Path, when: str, files: Mapping[str, bytes]) -> Path | None:
    """Write the files of a finished record that was measured elsewhere; `when`: the name of its folder there.
    Null if the record is here already. A folder that holds another record keeps it, and this one goes into
    the next free one. Raises ResultsError."""
    _refuse_links(cell_folder)
    at = datetime.strptime(when, WHEN)
    record = files["record.json"]
    try:
        while (folder := cell_folder / at.strftime(WHEN)).exists():
            try:
                if read_regular(folder / "record.json", bounds.RECORD_BYTES) == record:
                    return None
            except FileNotFoundError:
                break  # this machine failed before the record, which comes last
            at += timedelta(microseconds=1)
        folder.mkdir(parents=True, exist_ok=True)
        for name in sorted(files, key="record.json".__eq__):
            write_whole(folder / name, files[name])
    except OSError as refusal:
        raise ResultsError(f"{cell_folder}: cannot write results here: {refusal.strerror}") from refusal
    return folder


def recover(root: Path, unreadable: Callable[[ResultsError], None]) -> list[Stored]:
    """Write interrupted records for folders whose controller died before writing one. Calls `unreadable` for
    each folder that cannot be recovered: it is damaged, or another machine or user began it."""
    found: list[Stored] = []
    for path in sorted(root.rglob("begun.json")):
        try:
            found += _recovered(path.parent)
        except (OSError, ValueError, TypeError, LookupError, RecursionError, ResultsError) as damage:
            why = getattr(damage, "strerror", None) or damage
            unreadable(ResultsError(f"{path}: cannot be recovered: {why}"))
    return found


def _recovered(folder: Path) -> Iterator[Stored]:
    begun: Fields = json.loads(read_regular(folder / "begun.json", bounds.RECORD_BYTES))
    if wrong := clause(Draft, begun):
        raise ValueError(wrong)
    if begun.pop("begun_by", None) != begun_by():
        raise ValueError("another machine or user began it")
    if (folder / "record.json").exists():  # died between the record and the tidying
        _tidy(folder)
        return
    with open_regular(folder / "events.jsonl", os.O_RDWR) as log:
        try:
            system.lock(log)
        except OSError:
            return  # another campaign is writing it now
        events = list(events_in(log.read(bounds.EVENTS_BYTES)))
        times = TokenTimes.of_events(events, begun["workload"]["prompt_tokens"])
        tables: Tables = {}
        for event in events:
            if isinstance(event, Rows):
                add_rows(tables, event)
        if "search" in begun:
            probes = [*begun["search"]["probes"], *_probes_in(folder / "probes.jsonl")]
            begun["search"] = begun["search"] | {"probes": probes}
        phases = [e.name.partition(":")[0] for e in events if isinstance(e, Phase)]
        record = begun | {
            "outcome": "interrupted",
            "phase": phases[-1] if phases else "start",
            "reason": "the controller died before the repeat was finished",
            "loaded": next((e.facts for e in events if isinstance(e, Loaded)), None),
            "done": None,
            "tokens": len(times),
            "timing": {"started_utc": begun["started_utc"], "wall_s": None, "phases": []},
            "memory": {},
            "log_tail": tail(folder / "worker.log"),
        }
        yield _finish(folder, record, times, {}, tables)


def begun_by() -> str:
    """This machine and user, in a form that names neither and that no stranger can write."""
    machine = files.small_text(Path("/etc/machine-id")) or uuid.getnode()  # the latter off Linux
    return hashlib.sha256(f"harness {machine} {system.user_id()}".encode()).hexdigest()


def tail(path: Path) -> list[str]:
    """The last lines of a text file, from at most 64 KiB; empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            return [
                line[:500] for line in file.read().decode("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:]
            ]
    except OSError:
        return []


def events_in(raw: bytes) -> Iterator[Event]:
    """The complete events at the beginning of a stream that may be cut off anywhere."""
    *lines, _ = raw.split(b"\n")
    for line in lines:
        try:
            yield decode(line)
        except NonsenseError:
            return


def _probes_in(path: Path) -> Iterator[Probe]:
    """The complete probes at the beginning of a file that may be cut off anywhere."""
    try:
        *lines, _ = read_regular(path, bounds.RECORD_BYTES).decode().split("\n")
        yield from map(json.loads, lines)
    except (OSError, ValueError):
        return


def _finish(
    folder: Path,
    fields: Fields,
    times: TokenTimes,
    samples: dict[str, Samples | None],
    tables: Tables,
) -> Stored:
    record = _finished(folder, fields)
    if len(times):
        write_columns(folder / "tokens.parquet", times.columns())
    for name, columns in tables.items():
        write_columns(folder / f"{name}.parquet", columns)
    for name, sampled in samples.items():
        if sampled and sampled["t_ns"]:
            write_columns(folder / f"{name}.parquet", sampled)
    write_whole(folder / "record.json", _text(record))
    _tidy(folder)
    return Stored(folder, record, times)


def _finished(folder: Path, fields: Fields) -> Record:
    """The finished record, without the worker's facts where these make it unreadable. Raises ResultsError if
    the rest is no record either."""
    try:
        return checked({"schema": SCHEMA, **fields})
    except ValueError as wrong:
        failed = {
            "outcome": "error",
            "reason": f"worker protocol error: {wrong}",
            "loaded": None,
            "done": None,
        }
        return _numbered(folder, {**fields, **failed})


def _numbered(folder: Path, fields: Fields) -> Record:
    try:
        return checked({"schema": SCHEMA, **fields})
    except ValueError as wrong:
        raise ResultsError(f"{folder}: not a record: {wrong}") from wrong


def _tidy(folder: Path) -> None:
    leftovers = [path.name for path in folder.glob("*.partial")]  # from a write that was killed
    for name in (*leftovers, "events.jsonl", "probes.jsonl", "request.json", "begun.json"):
        (folder / name).unlink(missing_ok=True)


def _text(record: Record) -> bytes:
    return json.dumps(record, indent=1, allow_nan=False).encode()
