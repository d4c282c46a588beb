"""What a Raspberry Pi's firmware says: its true clock, and whether it throttles now or did since boot."""

from __future__ import annotations

import re
import shutil
import subprocess

from harness.machine.sensors.source import Source

# Each reading is a process: some 5 ms of one core on a Pi 4, two each five seconds, 0.05% of its four cores.
EVERY = 5
TIMEOUT_S = 2.0
BITS_COLUMN = "pi_throttled_bits"  # harness.machine.sensors.bits has what each says
_ASKED = {
    BITS_COLUMN: (("get_throttled",), re.compile(r"throttled=(0x[0-9a-fA-F]{1,8})\b")),
    "pi_arm_clock_hz": (("measure_clock", "arm"), re.compile(r"frequency\(\d+\)=(\d{1,12})\b")),
}


def board(missing: dict[str, str]) -> Source | None:
    """The `vcgencmd` on PATH; null without one. What fails at the first look is asked no more, and `missing`
    says why; what fails later is null then."""
    program = shutil.which("vcgencmd")
    if program is None:
        return None
    asked = {}
    for column, (words, form) in _ASKED.items():
        value, failure = _asked(program, words, form)
        if value is None:
            missing[f"vcgencmd {' '.join(words)}"] = failure
        else:
            asked[column] = words, form

    def read() -> dict[str, int | None]:
        return {column: _asked(program, words, form)[0] for column, (words, form) in asked.items()}

    columns = {column: f"vcgencmd {' '.join(words)}" for column, (words, _) in asked.items()}
    return Source(columns, read, EVERY) if columns else None


def _asked(program: str, words: tuple[str, ...], form: re.Pattern[str]) -> tuple[int | None, str]:
    """The number that it answers with, or null and why it is none."""
    said, failure = _said([program, *words])
    found = form.search(said)
    return (int(found[1], 0), "") if found else (None, failure or f"it said {said.strip()[:100]!r}")


def _said(command: list[str]) -> tuple[str, str | None]:
    """What it printed, and why that is nothing; it runs as long as TIMEOUT_S."""
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
