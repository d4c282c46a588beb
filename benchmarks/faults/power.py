"""Power loss, simulated: the order of writes is kept, and what was not synced by then is taken away.

A record is written while every creation, rename, removal and fsync is noted. Then the folder is made as it
would be found after the power went at each of these moments, by two kinds of disk:

  ordered  names change in the order in which they were changed; a file has the bytes of its last fsync
  strict   besides, a name lasts only once its folder was synced
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import records
from harness.records import ResultsError


@dataclass
class Journal:
    """What was done below `root`, in order. `finished`: steps done when a record was returned."""

    root: Path
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    finished: dict[Path, int] = field(default_factory=dict)

    def note(self, *step: Any) -> None:
        if all(not isinstance(part, Path) or part.is_relative_to(self.root) for part in step[1:3]):
            self.steps.append(step)


_CURRENT: list[Journal] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _CURRENT or event not in ("open", "os.mkdir", "os.rename", "os.remove"):
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, str | os.PathLike) and isinstance(flags, int) and flags & os.O_CREAT:
            at = Path(path)
            _CURRENT[-1].note("cut" if flags & os.O_TRUNC else "create", at.absolute())
    elif event == "os.rename":
        _CURRENT[-1].note("rename", Path(arguments[0]).absolute(), Path(arguments[1]).absolute())
    else:
        _CURRENT[-1].note(event, Path(arguments[0]).absolute())


@contextmanager
def noted(root: Path) -> Iterator[Journal]:
    """Note what is done below a folder. An audit hook cannot be taken away: it is made once."""
    journal, synced = Journal(root.absolute()), os.fsync
    if not getattr(_hook, "added", False):
        sys.addaudithook(_hook)
        _hook.added = True  # type: ignore[attr-defined]

    def fsync(file: Any) -> None:
        synced(file)
        number = file if isinstance(file, int) else file.fileno()
        at = Path(f"/proc/self/fd/{number}").readlink()
        journal.note("sync", at, None if at.is_dir() else at.read_bytes())

    os.fsync = fsync  # type: ignore[assignment]
    _CURRENT.append(journal)
    try:
        yield journal
    finally:
        _CURRENT.pop()
        os.fsync = synced


def after_loss(journal: Journal, steps: int, strict: bool, target: Path) -> None:
    """Make the folder as it is found when the power went after so many steps."""
    # A name is a file's number; a number has the bytes of its last fsync.
    names: dict[Path, int] = {}
    lasting: dict[Path, int] = {}
    synced: dict[int, bytes] = {}
    folders, lasting_folders = {journal.root}, {journal.root}
    for number, (what, *parts) in enumerate(journal.steps[:steps]):
        path = parts[0]
        if what == "os.mkdir":
            folders.add(path)
        elif what in ("create", "cut"):
            if path not in names or what == "cut":
                names[path] = names.get(path, number)
        elif what == "rename" and path in names:
            names[parts[1]] = names.pop(path)
        elif what == "os.remove":
            names.pop(path, None)
        elif what == "sync" and parts[1] is not None:
            synced[names.get(path, number)] = parts[1]
        elif what == "sync":
            lasting = {at: held for at, held in lasting.items() if at.parent != path}
            lasting |= {at: held for at, held in names.items() if at.parent == path}
            lasting_folders |= {at for at in folders if at.parent == path}
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shown = lasting if strict else names
    for folder in sorted(lasting_folders if strict else folders):
        at = target / folder.relative_to(journal.root)
        if at.parent.is_dir():
            at.mkdir(exist_ok=True)
    for path, held in shown.items():
        at = target / path.relative_to(journal.root)
        if at.parent.is_dir():
            at.write_bytes(synced.get(held, b""))


def problems(journal: Journal, target: Path, strict: bool) -> list[str]:
    """Lose power after each step; what is wrong with what is then read."""
    found: list[str] = []
    for steps in range(len(journal.steps) + 1):
        after_loss(journal, steps, strict, target)
        why = f"{'strict' if strict else 'ordered'} disk, after {steps} of {len(journal.steps)} steps"
        damages: list[str] = []
        records.recover(target, lambda damage, damages=damages: damages.append(str(damage)))  # type: ignore[misc]
        there = {}
        for stored in records.records(target, lambda damage, damages=damages: damages.append(str(damage))):  # type: ignore[misc]
            try:
                tokens = len(stored.times)
            except ResultsError as damage:
                damages.append(str(damage))
                continue
            there[stored.folder] = stored.record
            if stored.record["outcome"] == "ok" and tokens != stored.record["tokens"]:
                damages.append(f"{tokens} tokens of {stored.record['tokens']}")
        whole = [folder for folder, at in journal.finished.items() if at <= steps]
        found += [f"{why}: {damage}" for damage in damages if "begun.json" not in damage]
        for folder in whole:
            if target / folder.relative_to(journal.root) not in there:
                found.append(f"{why}: a finished record is lost")
    return found


def written(root: Path, count: int, begun: Any, record: Any, times: Any) -> Journal:
    """Write so many records below a folder, and note how."""
    root.mkdir(parents=True, exist_ok=True)
    with noted(root) as journal:
        for number in range(count):
            running = records.begin(root / "machine" / f"cell{number}", begun)
            stored = running.finish(record, times)
            journal.finished[stored.folder.absolute()] = len(journal.steps)
    return journal


def check(folder: Path, begun: Any, record: Any, times: Any, say: Callable[[str], None]) -> list[str]:
    """Both kinds of disk, two records."""
    journal = written(folder / "written", 2, begun, record, times)
    found = [p for strict in (False, True) for p in problems(journal, folder / "found", strict)]
    say(f"power loss: {2 * (len(journal.steps) + 1)} moments, {len(found)} problems")
    return found
