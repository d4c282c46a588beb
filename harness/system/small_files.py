"""Read one small file of sysfs, procfs or a cgroup; null if it is missing or unreadable."""

from __future__ import annotations

from pathlib import Path


def text(path: Path) -> str | None:
    """The file without surrounding whitespace. Some files of sysfs cannot be read: null too."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0 \n")
    except OSError:
        return None


def number(path: Path) -> int | None:
    """An integer; null if the file holds none."""
    try:
        return int(text(path) or "")
    except ValueError:
        return None


def counters(path: Path) -> dict[str, int]:
    """The numbers of a file with lines `key number`; empty if it is missing."""
    lines = (line.split() for line in (text(path) or "").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}
