"""Read a Raspberry Pi's firmware: its real clock, and throttling now and since boot."""

from __future__ import annotations

import re
import shutil
import subprocess

from harness.machine.cpu_sensors import THROTTLING
from harness.machine.sensor import Source

# Each reading starts a process: 5 ms of one core on a Pi 4. Two every five seconds are 0.05% of four cores.
EVERY = 5
TIMEOUT_S = 2.0
BITS_COLUMN = "pi_throttled_bits"  # see harness.machine.sensor_values
_VCGENCMD_QUERIES = {
    BITS_COLUMN: (("get_throttled",), re.compile(r"throttled=(0x[0-9a-fA-F]{1,8})\b")),
    "pi_arm_clock_hz": (("measure_clock", "arm"), re.compile(r"frequency\(\d+\)=(\d{1,12})\b")),
}


def firmware(missing: dict[str, str]) -> Source | None:
    """The `vcgencmd` on PATH; None without one. A query that fails at first is dropped, with the reason in
    `missing`; one that fails later is None."""
    program = shutil.which("vcgencmd")
    if program is None:
        return None
    queries = {}
    for column, (words, form) in _VCGENCMD_QUERIES.items():
        answer = _answer(program, words, form)
        if isinstance(answer, str):
            missing[f"vcgencmd {' '.join(words)}"] = answer
        else:
            queries[column] = words, form

    def read() -> dict[str, int | None]:
        answers = {column: _answer(program, words, form) for column, (words, form) in queries.items()}
        return {column: None if isinstance(answer, str) else answer for column, answer in answers.items()}

    columns = {column: f"vcgencmd {' '.join(words)}" for column, (words, _) in queries.items()}
    return (
        Source(columns, read, EVERY, replaces=THROTTLING if BITS_COLUMN in columns else "")
        if columns
        else None
    )


def _answer(program: str, words: tuple[str, ...], form: re.Pattern[str]) -> int | str:
    """The number that a query prints, or the reason why there is none. Runs for at most TIMEOUT_S."""
    try:
        ran = subprocess.run(
            [program, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {TIMEOUT_S:g} s"
    except OSError as refusal:
        return f"it could not be started: {refusal.strerror}"
    if ran.returncode:
        last = (ran.stderr.strip() or ran.stdout.strip()).splitlines()[-1:]
        return f"it failed: {last[0][:200] if last else f'exit status {ran.returncode}'}"
    number = form.search(ran.stdout)
    return int(number[1], 0) if number else f"it printed {ran.stdout.strip()[:100]!r}"
