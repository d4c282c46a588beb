"""A clock that is wrong, goes back between two campaigns, or jumps while one runs: faketime sets it.

Only the time of day is changed; the monotonic clock goes on, as it does when a machine's clock is set.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable

from benchmarks.faults.place import Place

# When a campaign runs, and when the next of the same config does.
PAIRS = [
    ("2026-06-01 12:00:00", "2025-06-01 12:00:00"),
    ("2026-06-01 12:00:00", "2099-12-31 23:59:58"),
    ("1970-01-01 00:00:10", "2026-06-01 12:00:00"),
    ("2106-02-07 06:28:14", "2038-01-19 03:14:06"),
    ("2026-06-01 12:00:00", "2026-06-01 12:00:00"),
]
JUMPS = ["-2y", "+10y", "-1h", "+0.5s"]


def wrong(place: Place, say: Callable[[str], None]) -> None:
    """Two campaigns at a time each; a third, later again, must find both and measure nothing."""
    for first, second in PAIRS:
        root = place.disk / "results"
        shutil.rmtree(root, ignore_errors=True)
        for at, fresh in ((first, []), (second, ["--fresh"])):
            before = place.records(root)
            ran = place.run("run", place.config, "-o", root, *fresh, **at_time(f"@{at}"))
            if ran.returncode not in (0, 1):
                place.problems.append(f"at {at}: ended with {ran.returncode}: {ran.stderr[-400:]}")
            place.kept(before, root, f"at {at}")
        before = place.records(root)
        if len(before) != 8:
            place.problems.append(f"at {first}, then {second}: {len(before)} records where 8 were to be")
        for words in (
            ["list", root],
            ["history", root],
            ["compare", "--results", root, "--baseline", "last:1"],
        ):
            place.run(*words)
        say(f"{first}, then {second}: {len(before)} records")


def jumping(place: Place, say: Callable[[str], None]) -> None:
    """The clock is set while a campaign runs, every second, forth and back."""
    rate = place.folder / "clock"
    for jump in JUMPS:
        root = place.disk / "results"
        shutil.rmtree(root, ignore_errors=True)
        rate.write_text("+0\n")
        over = threading.Event()

        def set_it(jump: str = jump, over: threading.Event = over) -> None:
            now = False
            while not over.wait(1):
                now = not now
                rate.write_text(f"{jump if now else '+0'}\n")

        setting = threading.Thread(target=set_it)
        setting.start()
        try:
            variables = at_time("") | {"FAKETIME_TIMESTAMP_FILE": str(rate), "FAKETIME_NO_CACHE": "1"}
            del variables["FAKETIME"]
            ran = place.run("run", place.config, "-o", root, **variables)
        finally:
            over.set()
            setting.join()
        found = place.records(root)
        if ran.returncode not in (0, 1) or len(found) != 4:
            said = f"ended with {ran.returncode}, {len(found)} records of 4"
            place.problems.append(f"the clock set by {jump}: {said}: {ran.stderr[-400:]}")
        place.completes(f"the clock set by {jump}", "run", place.config, "-o", root)
        place.kept(found, root, f"the clock set by {jump}")
        say(f"set by {jump} each second: {len(found)} records")


def at_time(when: str) -> dict[str, str]:
    """The variables that faketime sets."""
    shown = subprocess.run(["faketime", "now", "env"], capture_output=True, text=True, check=True).stdout
    library = next(line.partition("=")[2] for line in shown.splitlines() if line.startswith("LD_PRELOAD="))
    return {"LD_PRELOAD": library, "FAKETIME": when, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
