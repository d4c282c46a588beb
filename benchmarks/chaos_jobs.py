"""Single commands under chaos.py's kills: a build, a conversion, a search, a page and rows being written.

Each command is run from its beginning, killed after a random time, or one process that it had started is, and
run again: what is there must be whole, nothing may run on, and the same command must then complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import growth as nights
import psutil
from growth import CELLS

from harness import records
from harness.dataset.rows import of_folder
from harness.models import locate

HARNESS = Path(sys.executable).parent / "harness"
END_WITHIN_S = 900.0
DIE_WITHIN_S = 20.0
PAGE_END = b"</html>"


@dataclass(frozen=True)
class Job:
    """`renew`: takes away what an earlier command made, keeping what it must keep; `command`: what is killed;
    `whole`: what is wrong with what is there now, and, if it has completed, what is missing."""

    command: Callable[[Path, int], list[str]]
    renew: Callable[[Path], None]
    whole: Callable[[Path, int, bool], Iterable[str]]


def _build(place: Path, number: int) -> list[str]:
    return ["env", "create", "fake"]


def _drop_build(place: Path) -> None:
    shutil.rmtree(place / "cache", ignore_errors=True)


def _whole_build(place: Path, number: int, completed: bool) -> Iterable[str]:
    """An environment with complete.json must have a python that runs."""
    marks = list((place / "cache" / "envs").glob("*/complete.json"))
    for mark in marks:
        python = mark.parent / "bin" / "python"
        if subprocess.run([python, "-I", "-c", "pass"], capture_output=True).returncode:
            yield f"{mark.parent}: complete, and its python does not run"
        try:
            json.loads(mark.read_text())
        except ValueError as damage:
            yield f"{mark}: {damage}"
    if completed and len(marks) != 1:
        yield f"{len(marks)} complete environments"


def _convert(place: Path, number: int) -> list[str]:
    return ["env", "synth", "tiny-qwen2", "--seed", str(number), "--quant", "f16", "q4_0"]


def _drop_weights(place: Path) -> None:
    shutil.rmtree(place / "cache" / "weights", ignore_errors=True)


def _whole_weights(place: Path, number: int, completed: bool) -> Iterable[str]:
    found = [*(place / "cache" / "weights").glob("*/*.gguf"), *(place / "cache" / "weights").glob("*/hf")]
    for path in found:
        try:
            locate.local(path)
        except locate.WeightsError as damage:
            yield f"a half-written file under a whole one's name: {damage}"
    if completed and len(found) != 3:
        yield f"{len(found)} weights where two files and their checkpoint were to be"
    if completed and (left := list((place / "cache" / "weights").glob("*/*.partial-*"))):
        yield f"left over: {left}"


def _search(place: Path, number: int) -> list[str]:
    # A worker that was killed is on record as an error, and not searched again without this.
    return [
        "run",
        "--max-ctx",
        str(_config(place, number)),
        "--out",
        str(place / "results"),
        "--retry-failed",
    ]


def _keep(place: Path) -> None:
    """Every record made stays."""


def _whole_searches(place: Path, number: int, completed: bool) -> Iterable[str]:
    yield from (damage for damage in _damages(place / "results"))
    if completed:
        stored = list(records.records(place / "results", lambda damage: None))
        ok = [s for s in stored if s.record["outcome"] == "ok" and f"search{number}x" in s.record["cell"]]
        if len(ok) != 1:
            yield f"{len(ok)} searches of search{number} are ok where one was to be"


def _config(place: Path, number: int) -> Path:
    """A search of the fake's contexts, of another cell for every number."""
    path = place / f"search-{number}.yaml"
    if not path.exists():
        variants = [{"stack": "fake", "name": f"search{number}x", "B_ms": 2.0, "oom_above_n_ctx": 1000}]
        protocol = {"memory_budget": "256MiB", "timeout_s": 60, "measure_bandwidth": False}
        config = {"protocol": protocol, "models": [{"shape": "tiny-qwen2"}], "variants": variants}
        path.write_text(json.dumps(config))  # JSON is YAML
    return path


def _damages(root: Path) -> list[str]:
    found: list[str] = []
    list(records.records(root, lambda damage: found.append(str(damage))))
    return found


def _page(place: Path, number: int) -> list[str]:
    source = Path(__file__).parents[1] / "results" / "published"
    return ["report", str(source), "--output", str(place / "page.html")]


def _whole_page(place: Path, number: int, completed: bool) -> Iterable[str]:
    page = place / "page.html"
    if page.exists() and not page.read_bytes().rstrip().endswith(PAGE_END):
        yield f"{page}: {page.stat().st_size} bytes of a page without its end"
    if completed and not page.exists():
        yield "no page"


NIGHTS = 4  # of 100 records each


def _rows(place: Path, number: int) -> list[str]:
    results = place / "nights"
    for night in range(len({path.name for path in results.glob("*/*/*/*")}) // CELLS, NIGHTS):
        nights.night(results, night)
    return ["sql", "select count(*) as n, sum(tokens_per_s) as s from repeats", str(results), "--json"]


def _drop_rows(place: Path) -> None:
    """Write a record anew, so that its row is made and kept again."""
    record = next((place / "nights").rglob("record.json"))
    record.write_bytes(record.read_bytes())


def _whole_rows(place: Path, number: int, completed: bool) -> Iterable[str]:
    """Every record is as it was, and all have a row."""
    yield from _damages(place / "nights")
    if completed and (found := len(of_folder(place / "nights").judged)) != NIGHTS * CELLS:
        yield f"{found} rows of {NIGHTS * CELLS} records"


JOBS = {
    "build": Job(_build, _drop_build, _whole_build),
    "conversion": Job(_convert, _drop_weights, _whole_weights),
    "search": Job(_search, _keep, _whole_searches),
    "page": Job(_page, _keep, _whole_page),
    "rows": Job(_rows, _drop_rows, _whole_rows),
}


def run(
    name: str, kills: int, seed: int, folder: Path, variables: dict[str, str], say: Callable[[str], None]
) -> list[str]:
    """Kill one job so often; return what was wrong."""
    job, chance = JOBS[name], random.Random(f"{name} {seed}")
    place = folder / name
    place.mkdir(parents=True)
    variables = variables | {"HARNESS_CACHE": str(place / "cache"), "TMPDIR": str(place)}
    if name != "build":
        (place / "cache").mkdir()
        (place / "cache" / "envs").symlink_to(folder / "cache" / "envs")
    problems: list[str] = []
    begun = time.monotonic()
    problems += complete(job, place, 0, variables)
    typical_s, killed, number = time.monotonic() - begun, 0, 0
    say(f"{name}: takes {typical_s:.1f} s undisturbed")
    while killed < kills and not problems:
        number += 1
        job.renew(place)
        controller = start(job.command(place, number), variables, place)
        try:
            controller.wait(chance.uniform(0, typical_s))
        except subprocess.TimeoutExpired:
            whom = kill(controller, chance.random() < 0.3)
            killed += 1
            problems += wait_gone(place)
            problems += [f"after kill {killed}: {what}" for what in job.whole(place, number, False)]
            say(f"kill {killed}: {whom} of a {name}, {len(problems)} problems")
        controller.communicate()
        problems += [f"after kill {killed}: {what}" for what in complete(job, place, number, variables)]
    return [f"{name}: {problem}" for problem in problems]


def start(words: Iterable[str], variables: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    """Run `harness` with these words in a folder."""
    return subprocess.Popen(
        [str(HARNESS), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        cwd=folder,
    )


def complete(job: Job, place: Path, number: int, variables: dict[str, str]) -> list[str]:
    """Run to the end, undisturbed; what is wrong afterwards."""
    process = start(job.command(place, number), variables, place)
    said = process.communicate(timeout=END_WITHIN_S)[1]
    wrong = [] if process.returncode == 0 else [f"ended with {process.returncode}: {said.strip()[-600:]}"]
    return wrong + list(job.whole(place, number, True)) + wait_gone(place)


def kill(controller: subprocess.Popen[str], a_child: bool) -> str:
    """SIGKILL a command or one process below it, and wait until the command has ended."""
    family = psutil.Process(controller.pid)
    children = family.children(recursive=True) if a_child else []
    victim = random.Random(len(children)).choice(children) if children else family
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.send_signal(signal.SIGKILL)
    controller.communicate(timeout=END_WITHIN_S)
    return "a process" if children else "the command"


def wait_gone(folder: Path | None, doomed: Sequence[psutil.Process] = ()) -> list[str]:
    """Wait a little for these processes, and for all that use the folder, to end; what is wrong if some do
    not."""
    deadline = time.monotonic() + DIE_WITHIN_S
    while True:
        alive = [f"still running: {each}" for each in doomed if lives(each)]
        alive += [
            f"still running: {command[:200]}" for command in (running(folder) if folder else {}).values()
        ]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def running(folder: Path) -> dict[int, str]:
    """Command lines of the processes that have the folder in theirs, or its cache as HARNESS_CACHE."""
    mark = f"HARNESS_CACHE={folder / 'cache'}\0".encode()
    found = {}
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or not lives(process):
                continue
            command = " ".join(process.cmdline())
            variables = Path(f"/proc/{process.pid}/environ").read_bytes()
        except (psutil.Error, OSError):
            continue
        if mark in variables + b"\0" or f"{folder}/" in command:
            found[process.pid] = command
    return found
