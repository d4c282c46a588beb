"""What only the machine disturbed is measured again, each attempt is kept, and one of them counts."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import records_below, until
from golden_record import GOLDEN, record

from harness import config as configs
from harness.analysis.attempts import BusyProcess, disturbance_summary
from harness.analysis.columns import Repeat
from harness.analysis.verdicts import status, verdict
from harness.campaign import other_processes, rounds
from harness.cli import dry_run
from harness.compare.sides import side
from harness.config import plan
from harness.dataset import cell_rows, table
from harness.machine.cpu_times import BUSY_SHARE
from harness.records import Stored, TokenTimes

SLOW = {"B_ms": 10.0, "threads": 1}  # so that 30% of its time is a wait that counts
MS = 1_000_000
WAITED = {"done__cpu_wait_ns": 10**9}
THROTTLED = {"conditions__pressure": {"cgroup_throttled_us": 10**6, "cgroup_throttled_periods": 15}}
HOT = {"source": "NVML", "what": "thermal slowdown", "from_n": 26, "to_n": 30, "samples": 2}
HOT |= {"of_samples": 4, "ms": None, "events": None}
HASHES = """
import hashlib, os, threading
def hash_on():
    while True:
        hashlib.sha256(bytes(1 << 22))  # lets go of the interpreter's lock
threads = [threading.Thread(target=hash_on) for _ in range(4 * os.cpu_count())]
[thread.start() for thread in threads]
"""


@pytest.fixture
def disturb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Has so many of the next fake workers say that they had no CPU; the file counts down."""
    file = tmp_path / "disturbed"
    monkeypatch.setattr(other_processes, "AT_MOST_S", 1.0)  # a busy machine need not take 30 s
    monkeypatch.setenv("HARNESS_FAKE_DISTURBED", str(file))

    def so_many(workers: int) -> Path:
        file.write_text(str(workers))
        return file

    return so_many


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[int]:
    """The pid of a process that has more threads computing than there are CPUs, and is no child of ours."""
    (tmp_path / "hashes.py").write_text(HASHES)
    orphan = 'exec 2>&-; "$0" "$1" >&- & echo $!'
    command = ["sh", "-c", orphan, sys.executable, str(tmp_path / "hashes.py")]
    pid = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    yield pid
    os.kill(pid, signal.SIGKILL)


def records(root: Path) -> list[dict]:
    return sorted(records_below(root), key=lambda each: each["started_utc"])


@pytest.mark.parametrize(
    ("changes", "by"),
    [
        ({}, None),
        (WAITED, "cpu"),
        (WAITED | {"threads": 3}, None),  # more than there are CPUs: it would be so again
        ({"done__warmup__agreed": False}, "warmup"),
        ({"done__major_faults": 3}, "memory"),
        ({"done__major_faults": 3, "memory_budget": {"bytes": 1, "means": "cgroup v2"}}, None),
        ({"conditions__worker_pressure": {"workingset_refault_file": 10**5}}, "memory"),
        ({"conditions__worker_pressure": {"memory_stall_us": 10**9}}, "memory"),
        (THROTTLED | {"done__cpu_wait_ns": 10**6}, "quota"),
        (THROTTLED | WAITED, "quota"),  # it waited for its quota, and for nobody else
        (THROTTLED | WAITED | {"done__warmup__agreed": False}, "quota"),
        ({"sensors": {"throttled": [HOT]}}, "heat"),
        ({"tokens": 39}, None),
        ({"loaded__kernel_asked": "marlin"}, None),
        (WAITED | {"loaded__kernel_asked": "marlin"}, None),
        ({"done__counters__stack_decode_ms": 1e4}, None),
        (WAITED | {"done__counters__compilations": 1}, None),
        (WAITED | {"outcome": "oom", "reason": "does not fit"}, None),
    ],
)
def test_only_what_the_machine_alone_did_is_a_disturbance(changes, by):
    found = verdict(record(**changes))
    assert found.disturbed == by
    assert (found.status == "ok") == (not changes)
    assert verdict(record(**changes), has_series=False).disturbed is None


def clocked(ours_ms: float, theirs_ms: float, waited_ms: float = 0, **steps: float) -> dict:
    """A record of 39 steps by our clock and by the stack's."""
    counters = GOLDEN["done"]["counters"] | {"stack_decode_ms": theirs_ms, "sampling_ms": 0.0} | steps
    stamps = {"first_token_ns": MS, "last_token_ns": MS + int(ours_ms * MS)}
    done = {"done__counters": counters, "done__cpu_wait_ns": int(waited_ms * MS)}
    return record(**done, timing=GOLDEN["timing"] | stamps)


@pytest.mark.parametrize(
    ("ours_ms", "waited_ms", "steps_ms", "differ"),
    [
        # 39 steps may differ by 2% + 0.02 ms each: 2.78 ms of 100; and our loop takes up to 0.1 ms more.
        (106.6, 0, None, False),
        (106.8, 0, None, True),
        (145.0, 40, None, False),
        (147.0, 40, None, True),
        (97.3, 40, None, False),
        (97.1, 40, None, True),
        # Where our clock times the steps alone, the loop is no excuse.
        (106.6, 0, 102.7, False),
        (106.6, 0, 102.9, True),
        (106.6, 1, 102.9, False),
        (106.8, 0, 100.0, True),
    ],
)
def test_waiting_for_a_cpu_may_make_our_clock_longer_than_the_stacks_and_never_shorter(
    ours_ms, waited_ms, steps_ms, differ
):
    steps = {} if steps_ms is None else {"steps_ms": steps_ms}
    reasons = status(clocked(ours_ms, 100, waited_ms, **steps))[1]
    assert any("clocks" in reason for reason in reasons) == differ


@pytest.mark.parametrize(
    ("ours_ms", "by"),
    [
        (120.0, "cpu"),  # a hypervisor's pause, which cpu_wait_ns does not count
        (170.0, None),
        (80.0, None),  # no pause makes ours shorter
    ],
)
def test_clocks_that_differ_by_one_wait_are_measured_again_and_by_more_the_stack_is_at_fault(ours_ms, by):
    found = verdict(clocked(ours_ms, 100))
    assert (found.status, found.disturbed) == ("invalid", by)


def rows_of(*attempts: tuple[dict, str], repeat: int = 1) -> list[Repeat]:
    """Rows of attempts at a repeat: what differs from the golden record, and the second it began."""
    times = TokenTimes.of_columns({"n": list(range(26, 66)), "latency_ns": [9 * MS, *[MS] * 39]})
    return [
        table.repeat_row(
            record(repeat=repeat, started_utc=f"2026-01-01T00:00:0{at}+00:00", **changes), times, "x", None
        )
        for changes, at in attempts
    ]


def test_of_a_repeat_the_latest_counts_unless_that_was_disturbed_and_another_is_ok():
    def counts(*attempts: dict) -> int:
        found = rows_of(*((changes, str(at)) for at, changes in enumerate(attempts)))
        (row,) = cell_rows.counted(found)
        return found.index(row)

    oom = {"outcome": "oom", "reason": "does not fit"}
    gone = {"outcome": "interrupted", "reason": "stopped by the user"}
    assert counts({}, {}) == 1
    assert counts(WAITED, WAITED, {}) == 2
    assert counts({}, WAITED) == 0
    assert counts({}, {}, WAITED, WAITED) == 1
    assert counts({}, oom) == 1
    assert counts({}, gone) == 1
    assert counts(gone, WAITED) == 1
    assert counts(WAITED, oom) == 1
    assert counts(WAITED, WAITED) == 1


def test_a_cell_counts_its_disturbed_attempts_apart_from_its_repeats():
    found = [*rows_of((WAITED, "0"), ({}, "1")), *rows_of((WAITED, "2"), (WAITED, "3"), repeat=2)]
    (cell,) = cell_rows.per_cell(found)
    assert (cell["status"], cell["repeats_ok"], cell["repeats"]) == ("ok", 1, 2)
    assert cell["disturbed_attempts"] == 3
    assert cell["stayed_disturbed"] == ["cpu"]


def test_the_summary_names_the_process_that_took_the_cpus_and_what_to_do():
    cells = [{"kind": "measured", "repeats": 6, "stayed_disturbed": ["cpu", "cpu", "warmup"]}]
    cells.append({"kind": "measured", "repeats": 3, "stayed_disturbed": []})
    assert disturbance_summary(cells, BusyProcess("chromium", 4242, 1.44, 2)) == (
        "3 of 9 repeats stayed disturbed: `chromium` (pid 4242) used 1.4 of 2 CPUs meanwhile; close it, or "
        "lower `threads`, then run again with --retry-failed"
    )
    nobody = "3 of 9 repeats stayed disturbed: other processes used the CPUs; close other programs"
    assert str(disturbance_summary(cells)).startswith(nobody)
    assert str(disturbance_summary(cells, BusyProcess("idle", 1, 0.01, 2))).startswith(nobody)
    hot = [{"kind": "measured", "repeats": 1, "stayed_disturbed": ["heat"]}]
    assert "let it cool" in str(disturbance_summary(hot, BusyProcess("chromium", 4242, 1.44, 2)))
    throttled = [{"kind": "measured", "repeats": 1, "stayed_disturbed": ["quota"]}]
    assert str(disturbance_summary(throttled, BusyProcess("chromium", 4242, 1.44, 2))) == (
        "1 of 1 repeat stayed disturbed: a CPU quota throttled its threads; raise or remove it (--cpus, "
        "CPUQuota), then run again with --retry-failed"
    )
    assert disturbance_summary(cells[1:]) is None


def test_the_process_that_took_most_cpu_time_is_named_and_none_of_ours(busy):
    ours = subprocess.Popen([sys.executable, "-c", HASHES])
    try:
        assert not {os.getpid(), ours.pid} & {pid for pid, _ in other_processes.look().cpu_s}
    finally:
        ours.kill()
        ours.wait()
    named = None
    for _ in range(300):  # whatever else runs here has fewer threads, but may have its moment
        disturbers, before = other_processes.Disturbers(), other_processes.look()
        assert disturbers.busiest() is None
        time.sleep(0.5)
        disturbers.add(before, other_processes.look())
        named = disturbers.busiest()
        if named and named.pid == busy:
            break
    assert named
    assert named.pid == busy
    assert "python" in named.name
    assert named.cpus > 0


def test_waiting_for_a_quiet_moment_ends_though_none_comes_and_says_once_why_it_waits(busy):
    lines: list[str] = []
    waited = other_processes.wait_until_quiet(lines.append, at_most_s=1.5, look_s=0.3)
    assert waited["busy_share"] > 0.1
    (line,) = lines
    assert line.startswith("waiting up to ")
    assert other_processes.wait_until_quiet(lines.append, at_most_s=0.0, look_s=0.3)["busy_share"] > 0.1
    assert lines == [line]


def due(tmp_path: Path, *attempts: dict, retries: int = 2, **flags: bool) -> tuple[int, list[int]]:
    """How many records of attempts at a repeat are kept, and which attempts are due."""
    path = tmp_path / "config.yaml"
    path.write_text("models: [{shape: tiny-qwen2}]\nvariants: [{stack: fake}]\n")
    (cell,) = plan.cells(configs.load(path, []))
    stored = []
    for changes in attempts:
        folder = tmp_path / str(len(stored))
        folder.mkdir(exist_ok=True)
        (folder / "tokens.parquet").write_bytes(b"PAR1....PAR1")
        protocol = GOLDEN["protocol"] | {"retry_disturbed": 2}
        stored.append(Stored(folder, record(**{"protocol": protocol} | changes)))
    given = {"fresh": False, "retry_failed": False} | flags
    kept, todo = rounds.due([(cell, 1)], {cell.id: "key"}, {("key", 1): stored}, retries, **given)
    return len(kept), [each.attempt for each in todo]


def test_an_interrupted_campaign_goes_on_with_the_attempts_that_it_owes(tmp_path):
    first, second = (WAITED | {"attempt": number} for number in (1, 2))
    stopped = {"outcome": "interrupted", "reason": "stopped by the user", "attempt": 2}
    assert due(tmp_path) == (0, [1])
    assert due(tmp_path, first) == (0, [2])
    assert due(tmp_path, first, second) == (0, [3])
    assert due(tmp_path, first, stopped) == (0, [2])
    assert due(tmp_path, first, {"attempt": 2}) == (2, [])
    assert due(tmp_path, first, fresh=True) == (0, [1])
    assert due(tmp_path, first, retries=0) == (1, [])


def test_a_repeat_that_stayed_disturbed_is_run_again_only_when_failed_ones_are(tmp_path):
    all_three = [WAITED | {"attempt": number} for number in (1, 2, 3)]
    assert due(tmp_path, *all_three) == (3, [])
    assert due(tmp_path, *all_three, retry_failed=True) == (0, [1])
    older = WAITED | {"protocol": GOLDEN["protocol"]}  # of before repeats were measured again
    assert due(tmp_path, older) == (1, [])


def test_a_disturbed_repeat_is_measured_again_at_the_end_of_its_round(harness, config, disturb, tmp_path):
    disturb(1)
    path = config(SLOW, SLOW | {"name": "other"}, repeats=2, retry_disturbed=2)
    ran = harness("run", path)
    assert ran.code == 0, ran.err
    assert len(re.findall(r"  ok 2/2 \(1 disturbed\)", ran.out)) == 1
    assert len(re.findall(r"  ok 2/2  ", ran.out)) == 1
    assert ran.err.count("invalid: disturbed, measured again later") == 1
    assert "waited for a CPU" not in ran.out + ran.err
    assert "stayed disturbed" not in ran.err
    found = records(tmp_path / "results")
    assert [(each["repeat"], each["attempt"]) for each in found] == [(1, 1), (1, 1), (1, 2), (2, 1), (2, 1)]
    assert found[2]["cell"] == found[0]["cell"]
    assert [each["place_in_order"][0] for each in found] == [1, 2, 3, 4, 5]
    assert ["waited_for_quiet" in each for each in found] == [False, False, True, False, False]

    again = harness("run", path)
    assert again.code == 0
    assert "4 repeats measured already" in again.err
    assert again.out.splitlines()[:3] == ran.out.splitlines()[:3]
    assert len(records(tmp_path / "results")) == 5
    exported = harness("report", "results", "--export", "csv")
    assert len(exported.out.splitlines()) == 1 + 4
    assert "skipped: 1 disturbed" in exported.err
    (of_folder,) = side(str(tmp_path / "results"), tmp_path).campaigns.values()
    assert len(of_folder) == 4
    assert found[0]["started_utc"] not in {judged.facts["started_utc"] for judged in of_folder}


def test_a_machine_that_stays_busy_is_one_sentence_and_exit_1(harness, config, disturb, tmp_path):
    file = disturb(99)
    path = config(SLOW, retry_disturbed=2)
    ran = harness("run", path)
    assert ran.code == 1
    assert "  provisional 0/1  " in ran.out
    assert ran.err.count("invalid: disturbed, measured again later") == 2
    assert ran.err.count("invalid: disturbed again") == 1
    last = ran.err.splitlines()[-1]
    assert re.fullmatch(
        "harness: 1 of 1 repeat stayed disturbed: .* lower `threads`, then run again with --retry-failed;"
        " on a machine that is never quiet, --busy measures each repeat once",
        last,
    )
    assert ran.err.partition("[1/")[2].count("close") == 1  # before it, the doctor
    assert "waited for a CPU" not in ran.out + ran.err
    found = records(tmp_path / "results")
    assert [each["attempt"] for each in found] == [1, 2, 3]

    assert harness("run", path).code == 1
    assert len(records(tmp_path / "results")) == 3
    file.write_text("0")
    retried = harness("run", path, "--retry-failed")
    assert retried.code == 0
    assert [each["attempt"] for each in records(tmp_path / "results")] == [1, 2, 3, 1]
    assert "  ok 1/1 (3 disturbed)  " in harness("report", "--list").out


def test_a_busy_machine_gives_provisional_figures_that_are_not_exported(
    harness, config, disturb, busy, tmp_path
):
    disturb(99)
    path = config(SLOW, SLOW | {"B_ms": 20.0}, name="busy", retry_disturbed=2)
    ran = harness("run", path, "--busy")
    assert ran.code == 1
    assert [each["attempt"] for each in records(tmp_path / "results")] == [1, 1]
    assert ran.out.count("  provisional 0/1  ") == 2
    assert ran.out.startswith("tiny-qwen2: provisional: fastest")
    assert ran.err.splitlines()[-1] == (
        "harness: provisional: 2 of 2 repeats stayed disturbed: other processes used the CPUs; for figures"
        " that count, once the machine is quiet, run the same command with --retry-failed in place of --busy"
    )
    assert "close " not in ran.err.partition("[1/2]")[2]
    assert "Provisional: " in (tmp_path / "reports/busy.html").read_text()
    assert {row["status"] for row in harness("report", "--list", "--json").json} == {"invalid"}
    assert harness("report", "--export", "csv").err.endswith("nothing to export: 2 disturbed\n")

    assert "fake v0" in harness("run", path).out  # what was disturbed is not measured again
    assert len(records(tmp_path / "results")) == 2


def test_no_comparison_takes_provisional_figures(harness, config, disturb):
    file = disturb(0)
    path = config(SLOW, repeats=2)
    assert harness("run", path, "-o", "quiet").code == 0
    file.write_text("99")
    assert "provisional 0/2" in harness("run", path, "-o", "busy", "--busy").out
    ran = harness("compare", "quiet", "busy")
    assert ran.code == 2  # nothing could be compared
    assert "no repeat is ok in the new runs: invalid" in ran.out
    assert "SLOWER" not in ran.out.partition("\n\n")[0]


def test_the_forecast_of_time_allows_for_a_busy_machine(busy):
    until(lambda: (other_processes.busy_now() or 0) > BUSY_SHARE)
    slower, why = dry_run._slower()
    assert 1 + BUSY_SHARE < slower <= 2
    assert re.fullmatch(r", (\d+)% longer because others use as much of the CPUs", why)


def test_what_speed_means_nothing_of_is_not_provisional():
    emulated = record(**WAITED, machine__emulated="qemu")
    row = table.repeat_row(
        emulated, TokenTimes.of_columns({"n": list(range(26, 66)), "latency_ns": [MS] * 40}), None, None
    )
    assert (row["status"], row["disturbed"]) == ("functional", None)


def test_what_is_the_stacks_fault_is_not_measured_again(harness, config, disturb, tmp_path):
    disturb(3)
    liar, short = {"kernel": "marlin", "runs_kernel": "exllama"}, {"stop_after": 20}
    ran = harness("run", config(SLOW | liar, SLOW | short, {"restless": True}, retry_disturbed=0))
    assert ran.code == 1
    assert len(records(tmp_path / "results")) == 3
    ran = harness("run", config(SLOW | liar, SLOW | short, name="again", retry_disturbed=2), "--fresh")
    assert ran.code == 1
    assert "kernel marlin was requested but exllama ran" in ran.out
    assert [each["attempt"] for each in records(tmp_path / "results")] == [1] * 5


def test_without_retries_nothing_is_measured_again_and_the_reason_is_in_the_line(harness, config, disturb):
    disturb(99)
    ran = harness("run", config(SLOW, retry_disturbed=0), "--json")
    assert ran.code == 1
    (row,) = ran.json
    assert (row["status"], row["disturbed"], row["attempt"]) == ("invalid", "cpu", 1)
    assert "invalid: its threads waited for a CPU 30% of the time" in ran.err
    assert "until the CPUs are idle" not in ran.err
    assert ran.err.count("1 of 1 repeat stayed disturbed: other processes used the CPUs") == 1
