"""Read a Raspberry Pi's firmware: its real clock, and throttling now and since boot."""

from __future__ import annotations

import re
import shutil
import subprocess

from harness.machine.sensors.source import Source

# Each reading starts a process: 5 ms of one core on a Pi 4. Two every five seconds are 0.05% of four cores.
EVERY = 5
TIMEOUT_S = 2.0
BITS_COLUMN = "pi_throttled_bits"  # see harness.machine.sensors.bits
_QUERIES = {
    BITS_COLUMN: (("get_throttled",), re.compile(r"throttled=(0x[0-9a-fA-F]{1,8})\b")),
    "pi_arm_clock_hz": (("measure_clock", "arm"), re.compile(r"frequency\(\d+\)=(\d{1,12})\b")),
}


def board(missing: dict[str, str]) -> Source | None:
    """The `vcgencmd` on PATH; null without one. A query that fails at first is dropped, with the reason in
    `missing`; one that fails later is null."""
    program = shutil.which("vcgencmd")
    if program is None:
        return None
    queries = {}
    for column, (words, form) in _QUERIES.items():
        value, failure = _query(program, words, form)
        if value is None:
            missing[f"vcgencmd {' '.join(words)}"] = failure
        else:
            queries[column] = words, form

    def read() -> dict[str, int | None]:
        return {column: _query(program, words, form)[0] for column, (words, form) in queries.items()}

    columns = {column: f"vcgencmd {' '.join(words)}" for column, (words, _) in queries.items()}
    return Source(columns, read, EVERY) if columns else None


def _query(program: str, words: tuple[str, ...], form: re.Pattern[str]) -> tuple[int | None, str]:
    """The number in its output, or null and the reason."""
    output, failure = _output([program, *words])
    found = form.search(output)
    return (int(found[1], 0), "") if found else (None, failure or f"it printed {output.strip()[:100]!r}")


def _output(command: list[str]) -> tuple[str, str | None]:
    """The output of the command, or the reason why there is none. Runs for at most TIMEOUT_S."""
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"it did not end within {TIMEOUT_S:g} s"
    except OSError as refusal:
        return "", f"it could not be started: {refusal.strerror}"
    if ran.returncode:
        last = (ran.stderr.strip() or ran.stdout.strip()).splitlines()[-1:]
        return "", f"it failed: {last[0][:200] if last else f'exit status {ran.returncode}'}"
    return ran.stdout, None
