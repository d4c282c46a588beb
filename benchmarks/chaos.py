"""Does a SIGKILL at any moment lose anything? Kills the controller or its worker, again and again, and looks.

Campaigns of fake cells, and of tiny real ones in llama.cpp, run one after another in one results folder. At
random moments, uniform over the time a whole campaign takes, `harness run` or the worker of the moment gets
SIGKILL. After each kill: every file of a finished record is still there, byte for byte; every record reads,
and so does its series; nothing that the killed process had started lives on. After a killed controller the
same command goes on where it was. Each campaign ends with all its cells ok: exit code 0, or 1 where a killed
worker is on record, and then 0 with --retry-failed; and no half-written file was ever taken for a whole one.
With --job the kills hit a build, a conversion, a search, a page or rows being written: see chaos_jobs.py.

    .venv/bin/python benchmarks/chaos.py [--kills 50] [--seed 1] [--fake-only] [--job JOB] [--keep DIR]

Target: no problem in 50 kills. Exits 1 when there is one. The test suite runs a sample.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chaos_jobs
import psutil

from harness import records
from harness.analysis.verdicts import status
from harness.base.files import cache_folder
from harness.models import locate
from harness.records import ResultsError
from harness.stacks import build
from harness.stacks.header import stacks

WORKER_WITHIN_S = 3.0  # how long to wait for a worker to kill before killing the controller instead
END_WITHIN_S = 300.0
NEW_TOKENS = 80
REPEATS = 2
FAKE_CELLS = 2
REAL_QUANTS = ("f16", "q4_0")
USABLE = {"ok", "invalid"}  # measured whole; on a busy machine a verdict may still call the figures invalid


@dataclass
class Report:
    """What was done, and what was wrong with it. `problems` is empty when all is well."""

    kills: Counter[str] = field(default_factory=Counter)
    campaigns: int = 0
    records: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """Where one chaos run lives: all it writes, its cache and its temporary files included."""

    folder: Path
    fake_only: bool

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def variables(self) -> dict[str, str]:
        return {
            **os.environ,
            "HARNESS_CACHE": str(self.folder / "cache"),
            "TMPDIR": str(self.folder / "tmp"),
        }

    def prepare(self) -> None:
        environments = cache_folder() / "envs"
        environments.mkdir(parents=True, exist_ok=True)
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        (self.folder / "cache").mkdir(exist_ok=True)
        if not (self.folder / "cache" / "envs").exists():
            (self.folder / "cache" / "envs").symlink_to(environments)

    def command(self, campaign: int, *options: str) -> list[str]:
        config = self.folder / f"campaign-{campaign}.yaml"
        if not config.exists():
            config.write_text(json.dumps(experiment(campaign, self.fake_only)))  # JSON is YAML
        return ["run", str(config), "--out", str(self.results), *options]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fake-only", action="store_true", help="no llama.cpp cells")
    parser.add_argument("--job", choices=[*chaos_jobs.JOBS], help="kill this in place of campaigns")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this new folder, and keep it")
    arguments = parser.parse_args()
    fake_only = arguments.fake_only or arguments.job in {*chaos_jobs.JOBS} - {"conversion"}
    if not fake_only and build.find(stacks()["llamacpp"].environments["cpu"]) is None:
        raise SystemExit(
            "no llama.cpp environment: make one by `harness env create llamacpp`, or --fake-only"
        )
    with workplace(arguments.keep) as folder:
        if arguments.job:
            return jobs(arguments.job, arguments.kills, arguments.seed, folder)
        report = run(arguments.kills, arguments.seed, fake_only, folder, say=print)
    print(
        f"{report.kills.total()} kills ({counted(report.kills)}) in {report.campaigns} campaigns, "
        f"{report.wall_s:.0f} s; records: {counted(report.records)}"
    )
    for problem in report.problems:
        print(f"problem: {problem}")
    verdict = "missed" if report.problems else "reached"
    print(f"target: no problem in {report.kills.total()} kills; {len(report.problems)} found: {verdict}")
    return 1 if report.problems else 0


def jobs(name: str, kills: int, seed: int, folder: Path) -> int:
    """Kill one of the single commands so often, and print what was wrong."""
    begun, place = time.monotonic(), Place(folder, fake_only=True)
    place.prepare()
    problems = chaos_jobs.run(
        name, kills, seed, folder, place.variables, lambda line: print(line, flush=True)
    )
    for problem in problems:
        print(f"problem: {problem}")
    verdict = "missed" if problems else "reached"
    spent = f"seed {seed}, {time.monotonic() - begun:.0f} s"
    print(f"target: no problem in {kills} kills of a {name}; {len(problems)} found: {verdict} ({spent})")
    return 1 if problems else 0


@contextmanager
def workplace(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        yield Path(folder)


def run(kills: int, seed: int, fake_only: bool, folder: Path, say: Any = lambda line: None) -> Report:
    """Kill `kills` times in campaigns below `folder` (empty; the caller removes it), and check it all."""
    begun = time.monotonic()
    chance = random.Random(seed)
    place, report, watch = Place(folder, fake_only), Report(), Watch(folder / "results")
    place.prepare()
    typical_s = rehearse(place, report, watch)
    say(f"a whole campaign takes {typical_s:.1f} s")
    while report.kills.total() < kills:
        report.campaigns += 1
        one_campaign(place, kills, chance, typical_s, report, watch, say)
    watch.check(report)
    before = set(watch.seen)
    again = finish(place, report.campaigns)
    watch.check(report)
    expected = int(set(watch.states(report.campaigns).values()) != {"ok"})
    if again.returncode != expected or set(watch.seen) != before:
        report.problems.append(
            f"finished, and run once more: exit code {again.returncode}, or it measured again"
        )
    report.records.update(watch.outcomes())
    whole_weights(place, report)
    report.wall_s = time.monotonic() - begun
    return report


def experiment(campaign: int, fake_only: bool) -> dict[str, object]:
    """A config whose cells differ from those of every other campaign: in tokens, and in the weights' seed."""
    # A busy machine must not make a cell invalid: what is tested is what is kept, not how fast it was.
    warmup = {"window_tokens": 4, "max_windows": 2, "tolerance": 0.99}
    protocol = {"new_tokens": NEW_TOKENS + campaign, "repeats": REPEATS, "timeout_s": 60, "warmup": warmup}
    protocol["retry_disturbed"] = 0  # no campaign waits for a quiet moment
    variants: list[dict[str, object]] = [
        {"stack": "fake", "name": f"fake{i}", "B_ms": 3.0 + i, "load_ms": 100.0, "clock": "real"}
        for i in range(FAKE_CELLS)
    ]
    if not fake_only:
        variants.append({"stack": "llamacpp", "name": "real", "quant": [*REAL_QUANTS]})
    model = {"shape": "tiny-qwen2", "weights": {"synthetic": True, "seed": campaign}}
    return {
        "protocol": protocol | {"measure_bandwidth": not fake_only},
        "models": [model],
        "variants": variants,
    }


def rehearse(place: Place, report: Report, watch: Watch) -> float:
    """Run a whole campaign undisturbed; return how long it took."""
    begun = time.monotonic()
    ran = finish(place, 0)
    took = time.monotonic() - begun
    watch.check(report)
    if ran.returncode != int(set(watch.states(0).values()) != {"ok"}) or set(watch.outcomes()) - USABLE:
        raise SystemExit(f"an undisturbed campaign ended with {ran.returncode}: {ran.stderr.strip()[-800:]}")
    return took


def one_campaign(
    place: Place,
    kills: int,
    chance: random.Random,
    typical_s: float,
    report: Report,
    watch: Watch,
    say: Any,
) -> None:
    """Run, kill and resume one campaign until it ends by itself; then have it complete."""
    number, workers_killed = report.campaigns, 0
    while True:
        controller = start(place, number)
        victim = None
        while victim != "controller" and report.kills.total() < kills:
            if ended_within(controller, chance.uniform(0, typical_s)):
                break
            watch.look()
            victim = kill(controller, chance.choice(["controller", "worker"]), place, report)
            if victim is None:  # it ended just before
                break
            report.kills[victim] += 1
            workers_killed += victim == "worker"
            watch.check(report)
            say(f"kill {report.kills.total()}: {victim} in campaign {number}, {len(watch.seen)} files kept")
        if victim == "controller":
            if report.kills.total() < kills:
                continue
            controller = start(place, number)
        break
    if not ended_within(controller, END_WITHIN_S):
        report.problems.append(f"campaign {number}: not ended after {END_WITHIN_S:g} s")
        controller.kill()
    said = controller.communicate()[1]
    watch.check(report)
    complete(place, number, controller.returncode, workers_killed, said, report, watch)


def complete(
    place: Place, number: int, code: int, workers_killed: int, said: str, report: Report, watch: Watch
) -> None:
    """The campaign has ended by itself: its exit code must tell, and --retry-failed must bring it to 0.

    On a busy machine a cell may be invalid however often it is measured: it is whole, and no loss.
    """
    states = watch.states(number)
    expected = int(set(states.values()) != {"ok"})
    if code != expected:
        report.problems.append(
            f"campaign {number}: exit code {code}, its records say {expected}: {said[-500:]}"
        )
    failed = set(states.values()) - USABLE
    if failed and not workers_killed:
        report.problems.append(f"campaign {number}: {', '.join(failed)}, and no worker was killed")
    if failed:
        again = finish(place, number, "--retry-failed")
        watch.check(report)
        states = watch.states(number)
        if again.returncode != int(set(states.values()) != {"ok"}):
            report.problems.append(
                f"campaign {number}: --retry-failed ended with {again.returncode}: {again.stderr[-500:]}"
            )
    cells = REPEATS * (FAKE_CELLS + (0 if place.fake_only else len(REAL_QUANTS)))
    if len(states) != cells or set(states.values()) - USABLE:
        found = counted(Counter(states.values()))
        report.problems.append(f"campaign {number}: {found} of {cells} at its end")


def start(place: Place, campaign: int, *options: str) -> subprocess.Popen[str]:
    return chaos_jobs.start(place.command(campaign, *options), place.variables, place.folder)


def finish(place: Place, campaign: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, undisturbed."""
    controller = start(place, campaign, *options)
    said = controller.communicate(timeout=END_WITHIN_S)[1]
    return subprocess.CompletedProcess(controller.args, controller.returncode, None, said)


def ended_within(process: subprocess.Popen[str], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def kill(controller: subprocess.Popen[str], whom: str, place: Place, report: Report) -> str | None:
    """SIGKILL the controller or its worker; wait until all that must die is dead. Returns whom it got.

    With no worker to kill for a while, the controller has it. None: the campaign had ended.
    """
    try:
        family = psutil.Process(controller.pid)
        worker = worker_of(family, WORKER_WITHIN_S) if whom == "worker" else None
        doomed = [worker] if worker else [family, *family.children(recursive=True)]
        if controller.poll() is not None:
            return None
        (worker or family).send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return None
    if worker is None:
        controller.communicate()
    report.problems += chaos_jobs.wait_gone(None if worker else place.folder, doomed)
    return "worker" if worker else "controller"


def worker_of(controller: psutil.Process, within_s: float) -> psutil.Process | None:
    """The worker that the controller has at this moment, or gets within so many seconds."""
    deadline = time.monotonic() + within_s
    while True:
        for child in controller.children():
            try:
                if any(word.endswith("/runners") for word in child.cmdline()):
                    return child
            except psutil.NoSuchProcess:
                continue
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)


class Watch:
    """Every file of a finished record, as first seen: it must stay there and stay the same."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seen: dict[Path, str] = {}
        self.records: dict[Path, dict[str, Any]] = {}

    def look(self) -> None:
        """Note the files of all records that are there now."""
        for path in self.root.rglob("record.json"):
            if path not in self.seen:
                for file in (path, *path.parent.glob("*.parquet")):
                    self.seen[file] = digest(file)

    def check(self, report: Report) -> None:
        """Compare with what was seen, then read what is new, through the harness's own reader."""
        for file, content in list(self.seen.items()):
            if not file.exists():
                report.problems.append(f"lost: {file}")
                del self.seen[file]
            elif digest(file) != content:
                report.problems.append(f"changed: {file}")
                self.seen[file] = digest(file)
        self.look()
        for stored in records.records(self.root, lambda damage: report.problems.append(str(damage))):
            if stored.folder not in self.records:
                self.records[stored.folder] = stored.record
                report.problems += whole(stored)

    def states(self, campaign: int) -> dict[tuple[str, int], str]:
        """Status of each repeat of a campaign's cells: ok if any of its records is, else its latest."""
        states: dict[tuple[str, int], str] = {}
        for _, record in sorted(self.records.items()):
            if record["workload"]["new_tokens"] == NEW_TOKENS + campaign:
                key = (record["cell"], record["repeat"])
                states[key] = "ok" if states.get(key) == "ok" else status(record)[0]
        return states

    def outcomes(self) -> Counter[str]:
        return Counter(status(record)[0] for record in self.records.values())


def whole(stored: records.Stored) -> list[str]:
    """What is wrong with one finished record: its series must read, and hold as many tokens as it says."""
    record, problems = stored.record, []
    try:
        columns = records.series(stored)
        if len(columns.get("latency_ns", [])) != record["tokens"]:
            problems.append(
                f"{stored.folder}: {record['tokens']} tokens, {len(columns['latency_ns'])} in its series"
            )
    except (ResultsError, KeyError) as damage:
        problems.append(f"{stored.folder}: {damage!r}")
    if record["outcome"] == "ok" and record["tokens"] != record["workload"]["new_tokens"]:
        problems.append(f"{stored.folder}: ok with {record['tokens']} tokens")
    if "partial" in str(record["model"]["weights"].get("file")):
        problems.append(f"{stored.folder}: measured half-written weights")
    if list(stored.folder.glob("events.jsonl")) and not (stored.folder / "begun.json").exists():
        problems.append(f"{stored.folder}: a finished record keeps its events")
    return problems


def whole_weights(place: Place, report: Report) -> None:
    """Every weights file under its final name opens and is whole; files of one type are of one size."""
    sizes: dict[str, set[int]] = {}
    for file in (place.folder / "cache").glob("weights/*/*.gguf"):
        try:
            locate.local(file)
        except locate.WeightsError as damage:
            report.problems.append(f"a half-written weights file under a whole one's name: {damage}")
        sizes.setdefault(file.name, set()).add(file.stat().st_size)
    report.problems += [f"{name}: sizes {found}" for name, found in sizes.items() if len(found) > 1]


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def counted(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "none"


if __name__ == "__main__":
    sys.exit(main())
