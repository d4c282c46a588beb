"""Memory read from outside: of this process, of one that has ended, of workers at the moments they tell."""

import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import records_below
from golden_record import write_record

from harness.campaign.worker_memory import (
    MemorySampler,
    Resident,
    Vram,
    _in_status,
    mark,
    resident,
    watched,
    weight_files,
    weights_in_ram,
)

MB = 1_000_000
SHORT = {"window_tokens": 4, "max_windows": 2, "tolerance": 0.5, "at_least_s": 0}


def test_what_the_kernel_says_of_a_process_is_what_psutil_says():
    taken = bytearray(b"\1" * 64 * MB)
    held, seen = resident(os.getpid()), psutil.Process().memory_info()
    assert abs(held.anon_bytes + held.file_bytes - seen.rss) < 8 * MB
    assert abs(held.file_bytes - seen.shared) < 8 * MB
    assert held.anon_bytes > len(taken)
    assert held.highest_bytes >= held.anon_bytes + held.file_bytes - 8 * MB  # counted a moment apart


def test_a_process_that_has_ended_holds_nothing(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert resident(process.pid) is None  # a zombie
    process.wait()
    assert resident(process.pid) is None
    assert weights_in_ram(process.pid, frozenset()) is None
    assert mark("finished", process.pid, Vram(), frozenset())["rss_anon_bytes"] is None
    with MemorySampler(process.pid, 100, Vram()) as sampler:
        sampler._thread.join(5)
    assert sampler.summary()["samples"] == 0


def test_a_status_with_long_lists_before_its_sizes_is_read_to_its_end(tmp_path):
    """Of a user in a thousand groups, on a machine of a thousand CPUs."""
    sizes = "VmHWM:\t     300 kB\nRssAnon:\t     200 kB\nRssFile:\t      90 kB\nRssShmem:\t       1 kB\n"
    (tmp_path / "status").write_text("Name:\tx\nGroups:\t" + "100000 " * 1000 + "\n" + sizes)
    with (tmp_path / "status").open("rb") as opened:
        assert _in_status(opened.fileno()) == Resident(200 * 1024, 91 * 1024, 300 * 1024)


def test_of_the_weights_that_is_counted_which_was_read(tmp_path):
    """Through a link too, as a hub's files are; another file's pages are not theirs."""
    stored = tmp_path / "blobs" / "1"
    stored.parent.mkdir()
    other = tmp_path / "other"
    for file in (stored, other):
        file.write_bytes(b"\1" * 8 * MB)
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(stored)
    views = []
    for file in (stored, other):
        with file.open("rb") as opened:
            views.append(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ))
    assert sum(view[i] for view in views for i in range(0, 8 * MB, 4096)) > 0
    for weights in (folder, folder / "model.safetensors"):
        files = weight_files(weights)
        held = weights_in_ram(os.getpid(), files)
        assert abs(held - 8 * MB) < 65536  # whole pages, and what is read ahead


def test_weights_that_cannot_be_listed_are_not_told_and_end_nothing(tmp_path):
    (tmp_path / "a file").touch()
    for weights in (tmp_path / "gone" / "it.gguf", tmp_path / "a file" / "it.gguf"):
        files = weight_files(weights)
        assert files is None
        assert mark("loaded", os.getpid(), Vram(), files)["rss_weights_bytes"] is None
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert weight_files(tmp_path) == {os.fsencode(tmp_path.resolve() / name) for name in ("a file", "loop")}


def test_a_device_that_is_not_there_has_no_memory_to_tell():
    with watched(None) as vram:
        assert vram.used() is None
    with watched("GPU-00000000-0000-0000-0000-000000000000") as vram:
        assert vram.used() is None


def test_memory_is_read_as_the_worker_tells_of_a_moment_and_never_while_it_is_timed(
    harness, config, tmp_path
):
    leaking = {"leak_bytes_per_token": 200_000, "B_ms": 2.0, "name": "leaking", "clock": "real"}
    harness("run", config(leaking, new_tokens=200, warmup=SHORT), "--json")
    (record,) = records_below(tmp_path / "results")
    marks = record["memory"]["marks"]
    assert [each["at"] for each in marks] == ["started", "imported", "loaded", "warmed", "finished"]
    started, _, loaded, warmed, finished = marks
    assert set(started.values()) == {"started", None}  # there was no process yet
    # Before and after the warm-up, and before the fake gives its 200 tokens' back.
    assert warmed["rss_anon_bytes"] < finished["rss_anon_bytes"] - 30 * MB
    assert finished["rss_anon_bytes"] - loaded["rss_anon_bytes"] == pytest.approx(40 * MB, abs=4 * MB)
    assert record["memory"]["after_load_rss_bytes"] == loaded["rss_anon_bytes"] + loaded["rss_file_bytes"]
    assert record["memory"]["after_load_vram_bytes"] is None
    assert record["memory"]["peak_rss_bytes"] > 22 * MB  # at the last sample, a moment before the end


def test_of_a_worker_that_never_loads_the_moments_before_are_kept(harness, config, tmp_path):
    harness("run", config({"oom_above_n_ctx": 10}), "--json")
    (record,) = records_below(tmp_path / "results")
    memory = record["memory"]
    assert [each["at"] for each in memory["marks"]] == ["started", "imported"]
    assert memory["after_load_rss_bytes"] is None


def test_the_table_says_where_the_memory_of_each_cell_goes(harness, config, tmp_path):
    long = "n" * 60
    harness(
        "run", config({"name": "small"}, {"leak_bytes_per_token": 500_000, "name": "leaking"}, {"name": long})
    )
    found = {row["variant"]: row for row in harness("report", "--memory", "results", "--json").json}
    small, leaking = found["small"], found["leaking"]
    parts = (*small["loaded"]["parts"].values(), small["loaded"]["unattributed_bytes"])
    assert small["loaded"]["total_bytes"] == sum(part or 0 for part in parts)
    assert small["file_bytes"] is None
    assert leaking["peak"]["unattributed_bytes"] > small["peak"]["unattributed_bytes"] + 10 * MB
    assert leaking["peak"]["by_difference"] == []
    ran = harness("report", "--memory", "results")
    assert ran.code == 0
    assert "~" not in ran.out
    for heading in ("total", "slack", "runtime", "unattributed"):  # of parts that no row has no column
        assert heading in ran.out.splitlines()[0]
    assert "tiny-qwen2 fake leaking  ok\n" in ran.out
    narrow = harness("report", "--memory", "results", COLUMNS="80").out.splitlines()
    assert narrow[0] == ran.out.splitlines()[0]  # the name of 60 letters stands above its figures
    loaded = narrow[narrow.index(f"tiny-qwen2 fake {long}  ok") + 1].split()
    assert loaded[:2] == ["loaded", f"{found[long]['loaded']['total_bytes'] / MB:,.1f}"]
    assert "%" in ran.out
    assert "NaN" not in ran.out + json.dumps([small, leaking])


def test_a_folder_that_is_none_and_one_that_is_empty_are_said_as_list_says_them(harness, tmp_path):
    for folder in (tmp_path / "no such", Path(__file__)):
        ran, listed = harness("report", "--memory", folder), harness("report", "--list", folder)
        assert (ran.code, ran.err) == (listed.code, listed.err) == (2, ran.err)
    (tmp_path / "empty").mkdir()
    ran = harness("report", "--memory", tmp_path / "empty", "--json")
    assert (ran.code, ran.json) == (0, [])
    assert harness("report", "--memory", tmp_path / "empty").code == 0


def test_published_sizes_are_shown_where_nothing_was_measured(harness, tmp_path):
    study = Path(__file__).parent.parent / "results" / "published" / "rtx4090-qwen1.5" / "qwen1.5-0.5b"
    published = tmp_path / "results" / "published"
    shutil.copytree(study, published / study.name)
    ran = harness("report", "--memory", published)
    assert ran.code == 0
    assert "reported" in ran.out
    write_record(tmp_path / "results" / "machine" / "m" / "c" / "20260101T000000.000000Z")
    (row,) = harness("report", "--memory", tmp_path / "results", "--json").json
    assert row["kind"] == "measured"
