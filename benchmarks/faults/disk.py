"""A disk that is full at every write in turn, and one that is read-only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.place import Place, remount, small_disk

PAGE = 4096  # a tmpfs is filled by pages
ENOUGH = "size=64m,nr_inodes=100k"
Say = Callable[[str], None]
PUBLISHED = Path(__file__).parents[2] / "results" / "published"


def commands(place: Place) -> dict[str, tuple[list[str | Path], dict[str, str]]]:
    """What writes to the disk: words and variables of each command."""
    on_disk = place.disk / "cache"
    return {
        "campaign": (["run", place.config, "-o", place.disk / "results"], {}),
        "page": (["report", PUBLISHED, "-o", place.disk / "page.html"], {}),
        "environment": (["env", "create", "fake"], {"HARNESS_CACHE": str(on_disk)}),
        "export": (["report", PUBLISHED, "--export", "csv", "-o", place.disk / "export.csv"], {}),
    }


def full(place: Place, name: str, disks: int | None, say: Say) -> None:
    """Run a command on disks of one page, two pages, ... and of one file, two files, ... until it fits; on
    all of these, or on so many of either kind, from the smallest to the largest."""
    words, variables = commands(place)[name]
    with small_disk(place.disk, ENOUGH):
        place.completes(f"{name} on a large disk", *words, **variables)
        used = sum(-(-path.lstat().st_size // PAGE) for path in place.disk.rglob("*"))
        files = sum(1 for _ in place.disk.rglob("*"))
    sizes = [f"size={pages * PAGE},nr_inodes=100k" for pages in spread(1, used + 1, disks)]
    inodes = [f"size=64m,nr_inodes={count}" for count in spread(2, files + 3, disks)]
    for options in sizes + inodes:
        with small_disk(place.disk, options):
            place.run(*words, **variables)
            before = place.records(place.disk / "results")
            remount(place.disk, ENOUGH)
            place.completes(f"{name} with {options}", *words, **variables)
            place.kept(before, place.disk / "results", f"{name} with {options}")
    say(f"{name}: {len(sizes)} disks by size, {len(inodes)} by files; {len(place.problems)} problems so far")


def spread(first: int, last: int, count: int | None) -> list[int]:
    """The whole numbers from `first` to `last`, or `count` of them at like distances."""
    if count is None or count > last - first:
        return list(range(first, last + 1))
    return [first + round(i * (last - first) / (count - 1)) for i in range(count)]


def read_only(place: Place, say: Say) -> None:
    """Every command where results, cache, temporary files and the working directory cannot be written."""
    with small_disk(place.disk, ENOUGH):
        results, cache = place.disk / "results", place.disk / "cache"
        cache.mkdir()
        (cache / "envs").symlink_to(place.beside / "envs")
        place.completes("before read-only", "run", place.config, "-o", results)
        before = place.records(results)
        (place.disk / "config.yaml").write_text(place.config.read_text())
        (place.disk / "log.csv").write_text("latency_ms\n" + "20.5\n21.0\n20.7\n" * 20)
        remount(place.disk, "ro")
        variables = {"HARNESS_CACHE": str(cache), "TMPDIR": str(place.disk)}
        config, log, page = place.disk / "config.yaml", place.disk / "log.csv", place.disk / "page.html"
        reading: list[list[str | Path]] = [
            ["report", results, "--list"],
            ["report", results, "--memory"],
            ["report", results, "--format", "md"],
            ["run", config, "--dry-run", "-o", results],
            ["fit", log],
            ["theory", "qwen1.5-0.5b", "--machine", "4090"],
            ["env", "list"],
        ]
        writing: list[list[str | Path]] = [
            ["run", config, "-o", results],
            ["run", config, "--fresh", "-o", results],
            ["run", "--max-ctx", config, "-o", results],
            ["report", results, "-o", page],
            ["report", results, "--history", "-o", page],
            ["report", results, "--export", "csv", "-o", place.disk / "export.csv"],
            ["init", place.disk / "new.yaml"],
            ["env", "synth", "tiny-qwen2"],
        ]
        for words in reading:
            if place.run(*words, **variables).returncode:
                place.problems.append(f"read-only: {' '.join(map(str, words))} failed, and only reads")
        for words in writing:
            if not place.run(*words, **variables).returncode:
                place.problems.append(f"read-only: {' '.join(map(str, words))} ended with 0")
        remount(place.disk, "rw")
        place.kept(before, results, "read-only")
    say(f"read-only: {len(reading)} commands that read, {len(writing)} that write")
