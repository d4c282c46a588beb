"""One process that reads many hostile inputs: runs the readers, and reports what none of them may do."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import socketserver
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.hostile.inputs import formats
from benchmarks.hostile.mutations import Content, Special
from harness import cli, records
from harness.base import bounds
from harness.campaign import prompts
from harness.models import served, weights
from harness.stacks.header import stacks
from runners.answers import EVENT_BYTES, WrongAnswer
from runners.served.apis import APIS, CHAT

MOST_S = 5.0  # of CPU time: a busy machine must not find anything
MOST_BYTES = 512 << 20
SPARE_BYTES = 2 << 30  # of address space beyond what the process has: over the limit is measured, not killed
STATE = struct.Struct("<Qd")  # inputs begun, and the CPU time when the latest began
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "os.rename": 1, "os.symlink": 1, "os.link": 1}
CHANGES |= {"os.chmod": 0, "os.chown": 0, "os.truncate": 0, "os.utime": 0}
STARTS = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork", "socket.connect"}
# The first has limits of its own, beyond those for the reading process; the second measures this CPU and
# reads nothing of the input; the third is the hostile server.
OWN_PROCESSES = ("limited_tokenizer.py", "harness.machine.probes", "('127.0.0.1', ")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|^::(?!\w+ title=)", re.MULTILINE)  # and GitHub's
OURS = 99  # the exit code of a mistake in this folder
Reader = Callable[[], bool]


class Wrong(Exception):
    """What a reader did and must not do."""


def command(*arguments: str) -> Reader:
    """A command in this process: whether its exit code is 0. Raises whatever escapes it."""

    def run() -> bool:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main([*arguments])
            except SystemExit as end:  # argparse's
                code = int(end.code or 0)
        if code not in (0, 1, 2, 3):
            raise Wrong(f"exit code {code}")
        for name, text in (("output", out), ("message", err)):
            if "Traceback (most" in text.getvalue():
                raise Wrong(f"a traceback in the {name}")
            if found := CONTROL.search(text.getvalue()):
                raise Wrong(f"{found[0]!r} in the {name}")
        return code == 0

    return run


def local(path: str) -> Reader:
    def run() -> bool:
        try:
            weights.local(Path(path))
        except weights.WeightsError:
            return False
        return True

    return run


def planned(path: str) -> Reader:
    """Whether some stack would load or convert it."""

    def run() -> bool:
        try:
            ready = weights.local(Path(path))
        except weights.WeightsError:
            return False
        taken = False
        for header in stacks().values():
            options = {name: option.default for name, option in header.options.items()}
            with contextlib.suppress(weights.WeightsError):
                if ready.format == "hf":
                    weights.check_loadable(ready, None, header, options)
                    weights.check_convertible(ready, header.converts)
                taken = True
        return taken

    return run


def tokenized() -> bool:
    try:
        return bool(
            prompts.tokenized(Path("tokenizer.json"), "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab some text", 8).ids
        )
    except weights.WeightsError:
        return False


def recovered() -> bool:
    damages: list[object] = []
    records.recover(Path("results"), damages.append)
    list(records.records(Path("results"), damages.append))
    return not damages


CHECKPOINT = {
    "theory": command("theory", "model", "--machine", "4090"),
    "theory --memory": command("theory", "model", "--memory", "24GB"),
    "plan": planned("model"),
}
RECORDS = {
    "list": command("report", "--list", "results"),
    "memory": command("report", "--memory", "results"),
    "report md": command("report", "results", "--format", "md"),
    "report page": command("report", "results"),
    "history": command("report", "--history", "results"),
    "compare": command("compare", "results/a", "results/b", "--format", "gha"),
    "export": command("report", "results", "--export", "csv", "-o", "export.csv"),
}
SQL = {"sql": command("sql", "from repeats", "results", "--json")}


def asked() -> bool:
    """Whether the query is answered: of a folder without records, within a second and the memory of all
    other readers, a quarter of what users have."""
    bounds.QUERY_BYTES, bounds.QUERY_ENGINE_BYTES = MOST_BYTES * 3 // 4, MOST_BYTES // 2
    Path("results").mkdir(exist_ok=True)
    text = os.fsdecode(Path("query").read_bytes().replace(b"\0", b""))
    return command("sql", "--csv", "--timeout=1", "--", text, "results")()


@contextlib.contextmanager
def hostile_server() -> Iterator[str]:
    """The address of one that sends the input, whatever it is asked."""
    answer, how = Path("answer").read_bytes(), Path("how").read_bytes()
    ended = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(MOST_S)
            with contextlib.suppress(OSError):  # the client has closed it
                self.request.recv(1 << 16)
                for place in range(len(answer) if how == b"slow" else 0):
                    self.request.sendall(answer[place : place + 1])
                    ended.wait(0.01)
                if how != b"slow":
                    self.request.sendall(answer)
                while how == b"endless":
                    self.request.sendall(answer[-(1 << 16) :])
                if how == b"open":
                    ended.wait(MOST_S)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            ended.set()
            server.shutdown()


def identified() -> bool:
    """Whether the server is taken for one, asked as before a run; each answer has a fifth of a second."""
    served.LOAD_S, served._got.__defaults__ = 0.2, (0.2, None)
    with hostile_server() as address:
        try:
            served.serving(address, "sk-0123456789")
            return bool(served.identity(address, None, "sk-0123456789"))
        except served.NotServed as why:
            if len(sentence := str(why)) > 1000 or "sk-0123456789" in sentence:
                raise Wrong(f"a message of {len(sentence)} characters, or with the key") from why
            return False


def heard() -> bool:
    """Whether its content is taken for an event of a stream, by some API."""
    taken = False
    content = Path("answer").read_bytes().partition(b"\r\n\r\n")[2][:EVENT_BYTES]
    with contextlib.suppress(ValueError, RecursionError):  # the worker's client has sentences for both
        event = json.loads(content)
        for api in [*APIS.values(), CHAT] if isinstance(event, dict) else ():
            with contextlib.suppress(WrongAnswer):
                taken |= bool(api.read(event).ids)
    return taken


FIT = {"fit": lambda name: command("fit", name), "fit --json": lambda name: command("fit", name, "--json")}
READERS: dict[str, dict[str, Reader]] = {
    "gguf": {
        "theory": command("theory", "model.gguf", "--machine", "4090"),
        "theory --memory": command("theory", "model.gguf", "--memory", "24GB"),
        "weights": local("model.gguf"),
    },
    "safetensors": CHECKPOINT,
    "index.json": CHECKPOINT,
    "config.json": CHECKPOINT,
    "tokenizer.json": {"tokenize": tokenized},
    "yaml": {"validate": command("run", "--dry-run", "config.yaml")},
    "record.json": RECORDS,
    "begun.json": {"recover": recovered, "list": command("report", "--list", "results")},
    "parquet": RECORDS,
    "csv": {name: made("log.csv") for name, made in FIT.items()},
    "csv.gz": {name: made("log.csv.gz") for name, made in FIT.items()},
    "jsonl": {name: made("log.jsonl") for name, made in FIT.items()},
    "bundle": {
        "verify": command("share", "--verify", "b.tar.zst"),
        "report md": command("report", "b.tar.zst", "--format", "md"),
    },
    "names": RECORDS | SQL,
    "grown": RECORDS | SQL,
    "servers": {"identity": identified, "events": heard},
    "sql": {"sql": asked},
}


def main(name: str, first_seed: int, count: int, folder: Path) -> None:
    """Read `count` inputs of a format in folder/here; findings go to folder/findings.jsonl, progress to
    folder/state and folder/count."""
    here = folder / "here"
    here.mkdir(exist_ok=True)
    os.chdir(here)
    format, readers = formats()[name](), READERS[name]
    if name == "bundle":  # its records are laid out in a temporary folder
        tempfile.tempdir = str(here)
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
