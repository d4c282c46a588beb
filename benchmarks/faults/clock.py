"""A clock that is wrong, goes back between two campaigns, or jumps while one runs.

Only the time of day is moved, in the controller's Python; the monotonic clock goes on, as it does when a
machine's clock is set. faketime 0.9.10 cannot do that: with FAKETIME_DONT_FAKE_MONOTONIC every sleep of
Python's fails.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from datetime import datetime

from benchmarks.faults.place import Place

# When a campaign runs, and when the next of the same config does.
PAIRS = [
    ("2026-06-01 12:00:00", "2025-06-01 12:00:00"),
    ("2026-06-01 12:00:00", "2099-12-31 23:59:58"),
    ("1970-01-01 00:00:10", "2026-06-01 12:00:00"),
    ("2106-02-07 06:28:14", "2038-01-19 03:14:06"),
    ("2026-06-01 12:00:00", "2026-06-01 12:00:00"),
]
JUMPS_S = [-2 * 365 * 86400.0, 10 * 365 * 86400.0, -3600.0, 0.5]
# Imported by Python before all else: moves the time of day of the harness's modules by the seconds in a file.
# Of those alone: C libraries take the size and the address of the class for granted.
MOVED = """
import datetime, importlib.machinery, os, sys

class Moved(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        with open(os.environ["MOVED_CLOCK"]) as file:
            return datetime.datetime.now(tz) + datetime.timedelta(seconds=float(file.read()))

class Finder:
    def find_spec(self, name, path=None, target=None):
        if not name.startswith("harness."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def moved(module):
            execute(module)
            if vars(module).get("datetime") is datetime.datetime:
                module.datetime = Moved
        spec.loader.exec_module = moved
        return spec

sys.meta_path.insert(0, Finder())
"""


def wrong(place: Place, say: Callable[[str], None]) -> None:
    """Two campaigns at a time each; what reads the records must then find all of them."""
    clock = Clock(place)
    root = place.disk / "results"
    for pair in PAIRS:
        shutil.rmtree(root, ignore_errors=True)
        for at in pair:
            before = place.records(root)
            clock.move((datetime.fromisoformat(at) - datetime.now()).total_seconds())
            ran = place.run("run", place.config, "-o", root, "--fresh", **clock.variables)
            if ran.returncode not in (0, 1):
                place.problems.append(f"at {at}: ended with {ran.returncode}: {ran.stderr[-400:]}")
            place.kept(before, root, f"at {at}")
        found = place.records(root)
        if len(found) != 8:
            place.problems.append(f"at {' then '.join(pair)}: {len(found)} records where 8 were to be")
        for words in (
            ["report", root, "--list"],
            ["report", root, "--history"],
            ["compare", "--results", root, "--baseline", "last:1"],
        ):
            place.run(*words)
        say(f"{' then '.join(pair)}: {len(found)} records; {len(place.problems)} problems so far")


def jumping(place: Place, say: Callable[[str], None]) -> None:
    """The clock is set twice a second while a campaign runs, forth and back."""
    clock = Clock(place)
    root = place.disk / "results"
    for jump_s in JUMPS_S:
        shutil.rmtree(root, ignore_errors=True)
        over = threading.Event()
        setting = threading.Thread(target=clock.swing, args=(jump_s, over))
        setting.start()
        try:
            ran = place.run("run", place.config, "-o", root, **clock.variables)
        finally:
            over.set()
            setting.join()
        found = place.records(root)
        if ran.returncode not in (0, 1) or len(found) != 4:
            how = f"ended with {ran.returncode}, {len(found)} records of 4"
            place.problems.append(f"the clock set by {jump_s:g} s: {how}: {ran.stderr[-400:]}")
        place.completes(f"the clock set by {jump_s:g} s", "run", place.config, "-o", root)
        place.kept(found, root, f"the clock set by {jump_s:g} s")
        say(f"set by {jump_s:g} s again and again: {len(found)} records")


class Clock:
    """The moved time of day of commands that get `variables`."""

    def __init__(self, place: Place) -> None:
        self._offset, modules = place.folder / "offset", place.folder / "moved"
        modules.mkdir(exist_ok=True)
        (modules / "sitecustomize.py").write_text(MOVED)
        self.variables = {"PYTHONPATH": str(modules), "MOVED_CLOCK": str(self._offset)}
        self.move(0)

    def move(self, seconds: float) -> None:
        """Replaced whole: a command may be reading it."""
        partial = self._offset.with_suffix(".partial")
        partial.write_text(str(seconds))
        partial.replace(self._offset)

    def swing(self, seconds: float, over: threading.Event) -> None:
        moved = False
        while not over.wait(0.5):
            moved = not moved
            self.move(seconds if moved else 0)
