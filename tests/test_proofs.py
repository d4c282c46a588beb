"""Samples of the long proofs in benchmarks/: killed jobs, hostile inputs, full disks, clocks, power loss."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import clock, disk, power
from benchmarks.faults.__main__ import RECORD
from benchmarks.faults.place import Place
from benchmarks.hostile import __main__ as hostile
from benchmarks.hostile.inputs import formats
from harness.records import TokenTimes

TIMES = TokenTimes.of_columns(
    {"n": list(range(26, 26 + RECORD["tokens"])), "latency_ns": [10**6] * RECORD["tokens"]}
)
can_mount = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="needs root, to mount")


def quiet(line: str) -> None:
    pass


@pytest.fixture
def place(tmp_path: Path, fake_interpreter: object) -> Place:
    return Place(tmp_path / "place")


def problems_of_kills(job: str, folder: Path) -> str:
    """What two kills of a job found wrong; empty if nothing."""
    command = [sys.executable, "benchmarks/chaos.py", "--job", job, "--kills", "2", "--keep", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr


@pytest.mark.slow("each kill waits for a command to be under way")
@pytest.mark.parametrize("job", ["build", "search", "page"])
def test_a_killed_job_leaves_nothing_half_written_and_completes(job, tmp_path, fake_interpreter):
    assert problems_of_kills(job, tmp_path / "kept") == ""


def test_a_killed_conversion_leaves_no_half_written_weights(tmp_path, llamacpp_interpreter):
    assert problems_of_kills("conversion", tmp_path / "kept") == ""


@pytest.mark.slow("hundreds of files, and an interpreter for each format")
@pytest.mark.parametrize("name", list(formats()))
def test_hostile_inputs_do_no_harm(name, tmp_path):
    report = hostile.run(50, 1, [name], tmp_path)
    assert dict(report.findings) == {}
    assert report.read[name] == 50


def test_a_finished_record_survives_power_loss_at_any_moment(tmp_path):
    assert power.check(tmp_path, RECORD, RECORD, TIMES, quiet) == []


def test_the_check_of_power_loss_sees_a_write_that_was_not_synced(tmp_path):
    with power.noted(tmp_path / "made") as journal:
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "partial").write_text("whole")
        (tmp_path / "made" / "partial").rename(tmp_path / "made" / "record.json")
    power.after_loss(journal, len(journal.steps), False, tmp_path / "found")
    assert (tmp_path / "found" / "record.json").read_text() == ""


@can_mount
@pytest.mark.slow("a campaign on each of several small disks")
@pytest.mark.parametrize("command", ["campaign", "page", "environment", "export"])
def test_a_disk_full_at_any_write_loses_nothing_and_the_command_then_completes(command, place):
    disk.full(place, command, 5, quiet)
    assert place.problems == []


@can_mount
@pytest.mark.slow("fifteen commands")
def test_a_read_only_disk_stops_what_writes_and_nothing_that_reads(place):
    disk.read_only(place, quiet)
    assert place.problems == []


@pytest.mark.slow("ten campaigns at other times")
def test_a_wrong_clock_and_one_that_is_set_lose_no_record(place):
    clock.wrong(place, quiet)
    clock.jumping(place, quiet)
    assert place.problems == []
