"""The log of a wall meter, aligned to tokens by the wall clock: its figures, and what it cannot be."""

import csv
import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from conftest import records_below, refused
from golden_record import record, write_record

from harness.base import bounds
from harness.dataset import energy
from harness.records import ResultsError
from harness.records.files import write_columns

BEGAN = datetime(2026, 11, 20, 8, 0, 0, tzinfo=timezone.utc)
GAPS = 400  # of 100 ms: a decode of 40 s after a first token of a second


def repeat(folder: Path, number: int = 1, began: datetime | None = BEGAN, stack: str = "llamacpp") -> None:
    """A repeat whose generation began then; null: one that does not say when."""
    timing = {"first_token_ns": 10**9, "last_token_ns": 10**9 + GAPS * 10**8}
    timing |= {"generate_utc": began.isoformat()} if began else {}
    started = f"2026-11-20T07:5{number}:00+00:00"
    changes = {"repeat": number, "started_utc": started, "timing": timing, "done__flushes": []}
    changes |= {"tokens": 1 + GAPS, "workload__new_tokens": 1 + GAPS}
    at = write_record(
        folder / f"{stack}{number}", record(**changes, stack=stack, content_key=f"{stack:a<16}")
    )
    times = [1_000_000_000, *[100_000_000] * GAPS]
    write_columns(at / "tokens.parquet", {"n": [*range(26, 26 + len(times))], "latency_ns": times})


def meter(path: Path, seconds: float = 60.0, every_s: float = 1.0, shift_h: float = 0.0) -> Path:
    """From 10 s before generation: 20 W, from the first token on 50 W."""
    lines = ["time,watts"]
    for at_s in np.arange(-10.0, seconds - 10.0, every_s):
        at = BEGAN + timedelta(seconds=float(at_s), hours=shift_h)
        lines.append(f"{at.isoformat()},{50 if at_s >= 1 else 20}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_wall_meters_energy_is_that_of_the_decode_alone(harness, tmp_path):
    repeat(tmp_path / "results")
    meter(tmp_path / "power.csv")
    ran = harness("report", "results", "--list", "--power-log", "power.csv", "--price", "0.30")
    lines = ran.out.splitlines()
    place = next(place for place, line in enumerate(lines) if "watts" in line)
    heading, cell = (re.split(r"  +", line.strip()) for line in lines[place : place + 2])
    figures = dict(zip(heading, cell, strict=True))
    assert (figures["watts"], figures["J/token"], figures["price/Mtok"]) == ("50.0", "5", "0.417")
    assert ran.out.count("J/token: wall meter: the whole machine with its power supply") == 1
    (row,) = json.loads(harness("report", "results", "--format", "json", "--power-log", "power.csv").out)
    assert row["joules_per_token"] == pytest.approx(5.0)
    assert (row["energy_window_s"], row["joules_per_token_above_idle"]) == (40.0, None)
    lines = harness("report", "results", "--format", "csv", "--power-log", "power.csv").out.splitlines()
    (line,) = csv.DictReader(lines)
    assert float(line["joules_per_token"]) == pytest.approx(5.0)
    assert harness("report", "results", "--power-log", "power.csv", "-o", "page.html").code == 0
    assert "wall meter: the whole machine" in (tmp_path / "page.html").read_text()


def test_a_log_in_unix_times_and_further_columns_is_the_same(harness, tmp_path):
    repeat(tmp_path / "results")
    lines = [f"{230},{BEGAN.timestamp() + s:.1f},50" for s in range(-10, 50)]
    (tmp_path / "power.csv").write_text("\n".join(["volts,time,watts", *lines]))
    (row,) = json.loads(harness("report", "results", "--format", "json", "--power-log", "power.csv").out)
    assert row["joules_per_token"] == pytest.approx(5.0)


def test_a_cell_has_the_median_of_its_repeats(harness, tmp_path):
    for number, later_s in ((1, 0), (2, 60), (3, 120)):
        repeat(tmp_path / "results", number, BEGAN + timedelta(seconds=later_s))
    watts = [*[10] * 60, *[30] * 60, *[40] * 60]
    lines = [f"{BEGAN.timestamp() + s},{watt}" for s, watt in enumerate(watts)]
    (tmp_path / "power.csv").write_text("\n".join(["time,watts", *lines]))
    (row,) = json.loads(harness("report", "results", "--format", "json", "--power-log", "power.csv").out)
    assert (row["watts"], row["joules_per_token"]) == pytest.approx((30.0, 3.0))


def test_a_log_with_too_few_lines_within_a_decode_gives_none_and_says_so_once(harness, tmp_path):
    for stack in ("llamacpp", "ik"):
        repeat(tmp_path / "results", stack=stack)
    meter(tmp_path / "power.csv", every_s=5)
    said = harness("report", "results", "--list", "--power-log", "power.csv").out
    why = "no J/token: the power log has no line for 5 s of a decode of 40 s: it needs one each tenth of it"
    assert said.count(why) == 1
    meter(tmp_path / "power.csv", every_s=3.5)
    assert "no J/token" not in harness("report", "results", "--list", "--power-log", "power.csv").out


@pytest.mark.parametrize("shift_h", [2.0, -5.5])
def test_a_log_of_another_time_zone_is_refused_with_the_shift_that_fits(harness, tmp_path, shift_h):
    repeat(tmp_path / "results")
    meter(tmp_path / "power.csv", shift_h=shift_h)
    ran = harness("report", "results", "--power-log", "power.csv")
    refused(ran, f"shifted by {-shift_h:+g} h it would: is it of another time zone?")
    assert "the decodes here, from 2026-11-20 08:00:01 to 2026-11-20 08:00:41" in ran.err


def test_a_log_of_another_day_or_that_ends_early_is_refused_with_both_spans(harness, tmp_path):
    repeat(tmp_path / "results")
    meter(tmp_path / "power.csv", seconds=30)
    ran = harness("report", "results", "--list", "--power-log", "power.csv")
    refused(ran, "from 2026-11-20 07:59:50 to 2026-11-20 08:00:19 (UTC) it does not cover the decodes here")
    assert "time zone" not in ran.err


def test_records_that_do_not_say_when_their_tokens_came_have_no_wall_energy(harness, tmp_path):
    repeat(tmp_path / "results", began=None)
    meter(tmp_path / "power.csv")
    ran = harness("report", "results", "--power-log", "power.csv")
    refused(ran, "no record here says at what time its tokens came: measure anew")
    repeat(tmp_path / "results", stack="ik")
    repeat(tmp_path / "results", stack="hf")
    (tmp_path / "results" / "hf1" / "tokens.parquet").write_bytes(b"damaged")
    said = harness("report", "results", "--list", "--wide", "--power-log", "power.csv").out
    assert "no J/token of 2 cells: the record does not say at what time its tokens came" in said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it must begin with a line that names the columns time,watts"),
        ("time;watts\n1;2\n", "it must begin with a line that names the columns time,watts"),
        ("time,watts\n1795773600,50\n", "fewer than two lines with a time and watts"),
        ("time,watts\n2026-11-20 08:00:00,50\n", "power.csv:2: 2026-11-20 08:00:00 has no offset from UTC"),
        ("time,watts\nyesterday,50\n", "power.csv:2: 'yesterday' is no time"),
        ("time,watts\n1795773600000,50\n", "power.csv:2: 1795773600000 is no Unix time in seconds"),
        ("time,watts\nnan,50\n", "power.csv:2: nan is no Unix time in seconds"),
        ("time,watts\n1795773600,-1\n", "power.csv:2: '-1' is no power in watts"),
        (f"time,watts\n{'1' * 200_000},5\n", "power.csv:1: field larger than field limit"),
        ("time,watts\n1795773600\n", "power.csv:2: '' is no power in watts"),
        (
            "time,watts\n1795773601,5\n1795773600,5\n",
            "power.csv:3: its time is before that of the line above",
        ),
    ],
)
def test_what_is_no_power_log_is_refused_with_its_line(harness, tmp_path, text, why):
    repeat(tmp_path / "results")
    (tmp_path / "power.csv").write_text(text)
    refused(harness("report", "results", "--list", "--power-log", "power.csv"), why)


def test_a_log_has_lines_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "POWER_LOG_LINES", 3)
    (log := tmp_path / "power.csv").write_text("time,watts\n1,5\n2,5\n")
    assert len(energy.power_log(log).watts) == 2
    log.write_text("time,watts\n1,5\n2,5\n3,5\n")
    with pytest.raises(ResultsError, match=r"power\.csv: more than 3 lines"):
        energy.power_log(log)


def test_a_file_that_is_not_there_or_no_text_is_refused(harness, tmp_path):
    repeat(tmp_path / "results")
    refused(harness("report", "results", "--power-log", "none.csv"), "none.csv: No such file or directory")
    (tmp_path / "power.csv").write_bytes(b"\xff\xfe\x00")
    refused(harness("report", "results", "--power-log", "power.csv"), "not a text file in UTF-8")
    refused(harness("report", "results", "--memory", "--power-log", "power.csv"), "--power-log has no effect")


def test_a_run_says_when_its_generation_began_by_the_wall_clock(harness, config, tmp_path):
    before = datetime.now(timezone.utc)
    assert harness("run", config({"B_ms": 1.0, "clock": "real"})).code == 0
    (record,) = records_below(tmp_path / "results")
    assert before < datetime.fromisoformat(record["timing"]["generate_utc"]) < datetime.now(timezone.utc)
