"""One process that reads many hostile inputs: watches the readers, and reports what none of them may do."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.hostile.inputs import formats
from benchmarks.hostile.mutations import Content, Special
from benchmarks.hostile.readers import MOST_BYTES, MOST_S, READERS, Reader, Wrong

SPARE_BYTES = 2 << 30  # of address space beyond what the process has: over the limit is measured, not killed
STATE = struct.Struct("<Qd")  # inputs begun, and the CPU time when the latest began
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "os.rename": 1, "os.symlink": 1, "os.link": 1}
CHANGES |= {"os.chmod": 0, "os.chown": 0, "os.truncate": 0, "os.utime": 0}
STARTS = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork", "socket.connect"}
# The first has limits of its own, beyond those for the reading process; the second measures this CPU and
# reads nothing of the input; the third is the hostile server.
OWN_PROCESSES = ("limited_tokenizer.py", "harness.machine.probes", "('127.0.0.1', ")
OURS = 99  # the exit code of a mistake in this folder


def main(name: str, first_seed: int, count: int, folder: Path) -> None:
    """Read `count` inputs of a format in folder/here; findings go to folder/findings.jsonl, progress to
    folder/state and folder/count."""
    here = folder / "here"
    here.mkdir(exist_ok=True)
    os.chdir(here)
    format, readers = formats()[name](), READERS[name]
    tempfile.tempdir = str(here)  # where the records of a bundle are laid out
    for each, reader in readers.items():  # imports, and whether the sound input is taken
        laid_out(here, format.sound)
        if not reader() and each != "compare":  # one repeat each is too few to compare
            raise SystemExit(f"{each} refuses the sound {name}")
    guard = Guard(here)
    state = os.open(folder / "state", os.O_RDWR | os.O_CREAT)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPARE_BYTES, size + SPARE_BYTES))
    counts = {"read": 0, "taken": 0}

    @seed(first_seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(format.damaged, st.sampled_from(sorted(readers)))
    def read(files: dict[str, Content], reader: str) -> None:
        laid_out(here, files)
        (folder / "reader").write_text(reader)
        os.pwrite(state, STATE.pack(counts["read"] + 1, time.process_time()), 0)
        wrong, taken = watched(readers[reader], guard)
        if taken and format.is_refused:
            wrong.append("taken")
        counts["read"] += 1
        counts["taken"] += taken
        for what in wrong:
            with (folder / "findings.jsonl").open("a") as lines:
                lines.write(json.dumps({"format": name, "reader": reader, "what": what}) + "\n")
            if guard.new(what):
                kept = folder / "inputs" / f"{name}-{first_seed}-{counts['read']}"
                shutil.copytree(here, kept, symlinks=True, dirs_exist_ok=True, ignore=specials)

    try:
        read()
    except Exception:  # of making inputs: what readers raise is noted
        traceback.print_exc()
        raise SystemExit(OURS) from None
    finally:
        (folder / "count").write_text(json.dumps(counts))


def watched(reader: Reader, guard: Guard) -> tuple[list[str], bool]:
    """What the reader did that it must not, and whether it took the input."""
    wrong: list[str] = []
    taken = False
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begun = _status("VmRSS"), time.process_time()
    with guard.armed():
        try:
            taken = reader()
        except Wrong as found:
            wrong.append(str(found))
        except BaseException as escaped:  # a MemoryError and pyo3's panic among them
            if isinstance(escaped, KeyboardInterrupt):
                raise
            last = traceback.extract_tb(escaped.__traceback__)[-1]
            ours = [f for f in traceback.extract_tb(escaped.__traceback__) if "/harness/" in f.filename]
            place = (ours or [last])[-1]
            wrong.append(f"{type(escaped).__name__} from {Path(place.filename).name}:{place.name}")
    took, peak = time.process_time() - begun, _status("VmHWM") - before
    if took > MOST_S:
        wrong.append(f"over {MOST_S:g} s")
    if peak > MOST_BYTES:
        wrong.append(f"over {MOST_BYTES >> 20} MB")
    return wrong + guard.seen, taken


class Guard:
    """Sees every write, process and connection that Python makes; armed, notes those outside its folder."""

    def __init__(self, here: Path) -> None:
        self.here, self.seen, self._on = str(here.resolve()), list[str](), False
        self._kept: set[str] = set()
        sys.addaudithook(self._hook)

    def new(self, what: str) -> bool:
        known = what in self._kept
        self._kept.add(what)
        return not known

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        self.seen, self._on = [], True
        try:
            yield
        finally:
            self._on = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        path: Any = None
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
            path = arguments[0]
        elif event in CHANGES:
            path = arguments[CHANGES[event]]
        elif event in STARTS and not any(own in str(arguments) for own in OWN_PROCESSES):
            self.seen.append(f"{event}")
        if not isinstance(path, str | bytes | os.PathLike) or os.fsdecode(path) == os.devnull:
            return
        self._on = False  # realpath has events too
        at = Path(os.fsdecode(path))
        named = event != "open" or arguments[2] & os.O_NOFOLLOW  # of a link these mean the name itself
        real = str(Path(os.path.realpath(at.parent)) / at.name) if named else os.path.realpath(at)
        self._on = True
        if not real.startswith(self.here + "/") and real != self.here:
            self.seen.append(f"{event} outside its folder")


def laid_out(here: Path, files: dict[str, Content]) -> None:
    """The folder with these files in it and nothing else."""
    for left in here.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    for name, content in files.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, Special):
            special(path, content)


def special(path: Path, made: Special) -> None:
    if made.kind == "pipe":
        os.mkfifo(path)
    elif made.kind == "folder":
        path.mkdir()
    elif made.kind == "link":
        path.symlink_to(path.name if made.target == "loop" else made.target)
    else:
        path.touch()
        os.truncate(path, made.size)


def specials(folder: str, names: list[str]) -> list[str]:
    """What cannot be kept: pipes and holes."""
    found = [(name, Path(folder) / name) for name in names]
    return [
        name
        for name, path in found
        if not path.is_symlink() and (path.is_fifo() or (path.is_file() and path.stat().st_size > 1 << 30))
    ]


def _status(key: str) -> int:
    """A size of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    return 0


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
