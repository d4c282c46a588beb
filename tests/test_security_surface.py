"""What a record of unknown origin, a terminal and a clock may do: records are shown, and nothing else."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from golden_record import GOLDEN, record
from test_launch import request_of

from harness.analysis.verdicts import verdict
from harness.base.text import printable, printable_lines
from runners import clock, worker
from runners.protocol import Done, Instruments
from runners.stacks import fake


@pytest.fixture
def stranger(tmp_path):
    """A results folder with one record: `stranger(machine__slug="../../x")`."""

    def made(**changed: object) -> Path:
        folder = tmp_path / "work" / "theirs" / "m" / "c"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(record(**changed)))
        return tmp_path / "work" / "theirs"

    return made


@pytest.mark.parametrize("slug", ["../../out", "/tmp/out", "", "a/b", "A", "a" * 81, "a\n"])
def test_a_page_s_name_cannot_lead_out_of_its_folder(harness, stranger, tmp_path, slug):
    folder = stranger(machine__slug=slug)
    ran = harness("report", folder)
    assert ran.code == 2
    assert "machine.slug must be 1 to 80 of a to z, 0 to 9 and -" in ran.err
    assert list(tmp_path.rglob("*.html")) == []


HOSTILE = "\x1b[2J\x9b31m\r\n::error::owned\u202e##[stop-commands]x"


def test_no_text_of_a_record_is_obeyed_by_a_terminal_or_by_ci(harness, stranger):
    folder = stranger(variant=HOSTILE, outcome="crash", reason=HOSTILE, model__name=HOSTILE)
    for command in ("list", "list --json", "report --format md", "report --format csv"):
        name, *options = command.split()
        ran = harness(name, folder, *options)
        for line in (ran.out + ran.err).splitlines():
            assert line.isprintable()
            assert not line.strip().startswith("::")
            assert "##[" not in line
        assert "owned" in ran.out


def test_what_is_printable_stays_as_it_is():
    text = "a: [1]\n  é 模型 ±0.5% :: ## x"
    assert printable_lines(text) == text
    assert printable_lines(" ::a\n##vso[b") == " :\\:a\n##vso\\[b"
    assert printable("\t\udc80\n") == "\\t\\udc80\\n"


def test_a_suspend_during_a_repeat_makes_it_invalid():
    events, clock = [], iter([7_000_000_000, 9_500_000_000])
    own = fake.instruments(request := request_of())
    suspended = Instruments(own.clock_ns, own.cpu_wait_ns, own.page_faults, lambda: next(clock))
    worker.generate(request, fake, events.append, (MemoryError,), suspended)
    done = events[-1]
    assert isinstance(done, Done)
    assert done.facts["suspended_ns"] == 2_500_000_000
    record = copy.deepcopy(GOLDEN)
    record["done"]["suspended_ns"] = 2_500_000_000
    found = verdict(record)
    assert (found.status, found.disturbed) == ("invalid", "suspend")
    assert found.reasons == ["the machine was suspended for 2.5 s"]
    record["done"]["suspended_ns"] = 1_000_000
    assert verdict(record).status == "ok"


def test_the_time_that_a_machine_was_suspended_does_not_grow_while_it_is_awake():
    assert abs(clock.suspended_ns() - clock.suspended_ns()) < 2_000_000
