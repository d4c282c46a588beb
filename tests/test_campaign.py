"""The whole command against the fake stack: the output, the stored records, the repeated work."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from conftest import failures, gone, until
from conftest import records_below as records

from harness.stacks.header import runners_folder

STATUSES = {
    "good": ({}, "ok", ""),
    "segfault": ({"die_at_token": 30}, "crash", "killed by SIGSEGV"),
    "abort": ({"die_at_token": 30, "die_by": "abort"}, "crash", "SIGABRT"),
    "hang": ({"hang_at_token": 30}, "timeout", "not finished within 10 s"),
    "oom": ({"oom_above_n_ctx": 64}, "oom", "does not fit"),
    "error": ({"die_at_token": 30, "die_by": "error"}, "error", "failed, as asked"),
    "nonsense": ({"garbage_at_token": 30}, "error", "worker protocol error"),
    "short": ({"stop_after": 20}, "invalid", "20 tokens generated, 40 requested"),
    "long": ({"extra_tokens": 5}, "invalid", "41 tokens generated, 40 requested"),
    "liar": (
        {"kernel": "marlin", "runs_kernel": "exllama"},
        "invalid",
        "marlin was requested but exllama ran",
    ),
    "prefix": ({"evaluates": "one"}, "invalid", "a prefix was reused or added"),
    "restless": ({"restless": True}, "invalid", "warm-up never settled"),
}
KEYS = {
    *("cell", "repeat", "model", "stack", "variant", "status", "reasons", "prompt_tokens", "new_tokens"),
    *("ttft_ms", "B_ms", "W_tokens_per_ms", "bpw", "model_bytes", "weight_bytes_per_token"),
    *("kv_bytes_per_token", "peak_rss_bytes", "peak_vram_bytes", "series"),
}


def test_every_failure_is_a_result_and_the_campaign_goes_on(harness, config):
    variants = [options | {"name": name} for name, (options, _, _) in STATUSES.items()]
    ran = harness("run", config(*variants, timeout_s=10), "--json")
    assert ran.code == 1
    rows = {row["variant"]: row for row in ran.json}
    assert set(rows) == set(STATUSES)
    for name, (_, status, reason) in STATUSES.items():
        assert rows[name]["status"] == status, (name, rows[name]["reasons"])
        assert reason in " ".join(rows[name]["reasons"])


def test_a_record_holds_what_is_needed_to_repeat_it(harness, config, tmp_path):
    assert harness("run", config({"B_ms": 0.3})).code == 0
    (record,) = records(tmp_path / "results")
    assert record["outcome"] == "ok"
    assert record["tokens"] == 40
    assert len(record["workload"]["prompt"]) == 25
    assert record["campaign"]["config"]["variants"][0]["B_ms"] == 0.3
    assert record["protocol"]["repeats"] == 1
    assert record["campaign"]["command_line"][1] == "run"
    assert record["options"]["B_ms"] == 0.3
    assert record["loaded"]["versions"]["fake"] == "1"
    assert record["environment"]["key"]
    assert record["machine"]["memory_bytes"] == psutil.virtual_memory().total
    assert {"git_commit", "version"} <= set(record["harness"])
    assert record["done"]["stamp_ns_per_token"] > 0
    hostname = os.uname().nodename
    assert hostname not in json.dumps(record)


def test_list_gives_one_object_per_record_with_null_for_missing(harness, config):
    harness("run", config({}, {"die_at_token": 5}, repeats=2))
    ran = harness("report", "--list", "--json")
    assert ran.code == 0
    assert len(ran.json) == 4
    for row in ran.json:
        assert set(row) >= KEYS
        assert row["status"] == "ok" or row["B_ms"] is None
        assert row["peak_vram_bytes"] is None
        if row["status"] == "ok":
            assert Path(row["series"]).is_absolute()
            assert Path(row["series"]).exists()
            assert row["ttft_ms"] >= 1.0  # the fake is never early; a busy machine makes it late


def test_a_finished_campaign_is_not_measured_again(harness, config, tmp_path):
    path = config({}, {"stop_after": 9}, repeats=2)
    assert harness("run", path).code == 1
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "results").rglob("*") if p.is_file()}
    again = harness("run", path)
    assert again.code == 1  # what is kept is still not ok
    assert "4 repeats measured already" in again.err
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "results").rglob("*") if p.is_file()} == before


def test_fresh_measures_all_again_and_overwrites_nothing(harness, config, tmp_path):
    path = config({}, {})
    harness("run", path)
    harness("run", path, "--fresh")
    assert len(records(tmp_path / "results")) == 4


def test_retry_failed_measures_only_what_is_not_ok(harness, config, tmp_path):
    path = config({"name": "good"}, {"name": "bad", "stop_after": 9})
    harness("run", path)
    harness("run", path, "--retry-failed")
    assert sorted(r["variant"] for r in records(tmp_path / "results")) == ["bad", "bad", "good"]


def test_a_change_of_options_is_another_cell_and_a_change_of_repeats_only_adds(harness, config, tmp_path):
    harness("run", config({"B_ms": 0.2}))
    harness("run", config({"B_ms": 0.2}, repeats=3))
    harness("run", config({"B_ms": 0.3}))
    kept = records(tmp_path / "results")
    found = sorted((r["options"]["B_ms"], r["repeat"]) for r in kept)
    assert found == [(0.2, 1), (0.2, 2), (0.2, 3), (0.3, 1)]


def test_an_interrupted_fresh_run_is_not_the_last_word(harness, background, config, tmp_path):
    path = config({"B_ms": 2.0, "clock": "real"}, new_tokens=1500)
    harness("run", path)
    controller = background("run", path, "--fresh")
    _wait_for_tokens(tmp_path)
    controller.send_signal(signal.SIGINT)
    assert controller.wait(timeout=600) == 130
    harness("run", path)
    found = sorted(records(tmp_path / "results"), key=lambda r: r["started_utc"])
    assert [r["outcome"] for r in found] == ["ok", "interrupted", "ok"]


def test_other_threads_are_another_measurement_of_the_same_cell(harness, config, tmp_path):
    path = config({})
    harness("run", path, "--set", "threads=1")
    harness("run", path, "--set", "threads=2")
    found = records(tmp_path / "results")
    assert len(found) == 2
    assert len({r["cell"] for r in found}) == 1


def test_a_page_that_cannot_be_written_is_not_nothing_started(harness, config, tmp_path):
    (tmp_path / "reports").write_text("in the way")
    ran = harness("run", config({}))
    assert ran.code == 1
    assert "cannot be written" in ran.err
    assert len(records(tmp_path / "results")) == 1


def test_a_series_that_is_gone_is_told_and_measured_again_when_asked(harness, config, tmp_path):
    path = config({}, repeats=2)
    harness("run", path)
    whole, damaged = sorted((tmp_path / "results").rglob("tokens.parquet"))
    damaged.write_bytes(b"garbage")
    whole.unlink()
    again = harness("run", path)
    assert again.code == 1
    assert "its series of tokens is missing or damaged" in again.out
    assert harness("run", path, "--retry-failed").code == 0
    assert len(records(tmp_path / "results")) == 4


def test_only_takes_the_cells_its_glob_matches_and_leaves_the_page_of_all(harness, config, tmp_path):
    path = config({"name": "alpha"}, {"name": "beta"})
    harness("run", path)
    page = (tmp_path / "reports" / "fake.html").read_text()
    assert [r["variant"] for r in harness("run", path, "--only", "*alpha*", "--json").json] == ["alpha"]
    nothing = harness("run", path, "--only", "*gamma*")
    assert nothing.code == 2
    assert "matches none of 2 cells" in nothing.err
    assert (tmp_path / "reports" / "fake.html").read_text() == page
    assert "beta" not in (tmp_path / "reports" / "fake-only.html").read_text().split("</script>")[-1]


def test_two_rows_never_share_a_name(harness, config):
    path = config({})
    harness("run", path, "--set", "new_tokens=20")
    harness("run", path, "--set", "new_tokens=30")
    names = [
        line.split("  ")[0] for line in harness("report", "--list").out.splitlines() if "  ok 1/1  " in line
    ]
    assert len(names) == len(set(names)) == 2


def test_set_overrides_the_config(harness, config):
    path = config({})
    ran = harness("run", path, "--set", "repeats=2", "--set", "new_tokens=10", "--json")
    assert [row["new_tokens"] for row in ran.json] == [10, 10]
    assert harness("run", path, "--set", "repeat=2").code == 2


def test_repeats_are_rounds_each_shuffled_anew(harness, config, tmp_path):
    harness("run", config(*[{} for _ in range(6)], repeats=2))
    ran = sorted(records(tmp_path / "results"), key=lambda r: r["started_utc"])
    assert [r["place_in_order"] for r in ran] == [[i, 12] for i in range(1, 13)]
    assert [r["repeat"] for r in ran] == [1] * 6 + [2] * 6
    assert [r["cell"] for r in ran[:6]] != [r["cell"] for r in ran[6:]]


def test_a_device_that_is_not_here_gives_unavailable_cells(harness, config):
    path = config({}, {}, device="cuda", gpu="RTX 4090")
    ran = harness("run", path, "--json", CUDA_VISIBLE_DEVICES="")
    if ran.json and ran.json[0]["status"] == "ok":
        pytest.skip("there is an RTX 4090 here")
    assert ran.code == 1
    assert [row["status"] for row in ran.json] == ["unavailable"] * 2
    assert "GPU" in ran.json[0]["reasons"][0]


def test_ctrl_c_ends_the_campaign_cleanly(background, config, tmp_path):
    variants = ({"B_ms": ms, "clock": "real"} for ms in (5.0, 6.0))
    path = config(*variants, new_tokens=5000, timeout_s=100)
    controller = background("run", path)
    workers = _wait_for_worker(controller.pid, tmp_path)
    _wait_for_tokens(tmp_path)
    time.sleep(0.2)  # they are written first, and counted then
    controller.send_signal(signal.SIGINT)
    _, err = controller.communicate(timeout=600)
    assert controller.returncode == 130, err
    assert "Traceback" not in err
    assert not [pid for pid in workers if psutil.pid_exists(pid)]
    interrupted = [r for r in records(tmp_path / "results") if r["outcome"] == "interrupted"]
    assert len(interrupted) == 1
    assert interrupted[0]["tokens"] > 0
    assert not list((tmp_path / "results").rglob("begun.json"))


def test_an_interrupted_repeat_is_always_run_again(harness, background, config, tmp_path):
    path = config({"B_ms": 10.0, "clock": "real"}, new_tokens=300)
    controller = background("run", path)
    (pid,) = _wait_for_worker(controller.pid, tmp_path)
    _wait_for_tokens(tmp_path)
    controller.kill()
    controller.wait()
    assert gone(pid)
    ran = harness("run", path, "--json")
    assert failures(ran.json) == []
    assert "recovered an interrupted repeat" in ran.err
    assert sorted(r["outcome"] for r in records(tmp_path / "results")) == ["interrupted", "ok"]


def test_a_second_campaign_on_the_device_is_refused_or_waits_as_asked(harness, background, config, tmp_path):
    endless, other = config({"hang_at_token": 1}, timeout_s=200, name="endless"), config({}, name="other")
    first = background("run", endless)
    _wait_for_worker(first.pid, tmp_path)
    refused = harness("run", other, "--out", tmp_path / "elsewhere")
    assert refused.code == 1
    assert "another campaign" in refused.err
    waiting = background("run", other, "--out", tmp_path / "elsewhere", "--wait")
    assert next(line for line in waiting.stderr if "waiting for another campaign" in line)
    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=600) == 130
    _, err = waiting.communicate(timeout=600)
    assert waiting.returncode == 0, err


def test_a_results_folder_that_is_wrong_starts_nothing(harness, config, tmp_path):
    path = config({})
    (tmp_path / "file").write_text("precious")
    ran = harness("run", path, "--out", tmp_path / "file")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "precious"


def test_a_full_disk_stops_the_campaign_and_keeps_what_was_finished(harness, config, small_disk):
    disk = small_disk("200k")
    ran = harness("run", config(*[{} for _ in range(30)]), "--out", disk)
    assert ran.code == 1
    assert "No space left on device" in ran.err
    found = records(disk)
    assert found
    assert all(r["outcome"] == "ok" for r in found)


def test_memory_growth_is_seen_in_the_samples(harness, config):
    leak = {"leak_bytes_per_token": 1_000_000, "B_ms": 10.0, "clock": "real"}
    (row,) = harness("run", config(leak, new_tokens=100, sample_interval_ms=100), "--json").json
    assert row["peak_rss_bytes"] > 100e6


def test_the_page_is_one_file_that_names_every_cell(harness, config, tmp_path):
    path = config({"name": "alpha"}, {"kernel": "<b>fast</b>", "runs_kernel": "slow"})
    harness("run", path, "--out", "here")
    page = (tmp_path / "here" / "fake.html").read_text()
    assert "alpha" in page
    assert "kernel &lt;b&gt;fast&lt;/b&gt; was requested" in page
    assert "<b>fast" not in page
    assert "src=" not in page.split("</script>")[-1]


def _wait_for_worker(controller: int, folder: Path) -> list[int]:
    workers: list[int] = []

    def look() -> bool:
        for child in psutil.Process(controller).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a probe that just ended
                # Before it executes anything a child has the controller's own command line.
                said = child.cmdline()
                if str(runners_folder()) in said and str(folder) in " ".join(said):
                    workers.append(child.pid)
        return bool(workers)

    until(look)
    return workers


def _wait_for_tokens(folder: Path) -> None:
    until(lambda: any('"Tokens"' in path.read_text() for path in folder.rglob("events.jsonl")))
