"""The longest context, end to end: real workers that take memory, and all the ways of not fitting."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran, gone, stored_in, until
from test_memory_limit import with_cgroup

from harness import records
from harness.campaign.memory_headroom import DeviceLost, MemoryHeadroom, NoHeadroom, headroom_on
from harness.records.write import begun_by

MIB = 2**20
KV = 65536  # bytes a token: a granule is 16 MiB, far above the variation of the interpreter's memory


@pytest.fixture
def searched(config: Callable[..., Path], harness: Callable[..., Ran]) -> Callable[..., list[dict[str, Any]]]:
    """Searches fake variants under a budget and returns the rows: `searched({"oom_above_n_ctx": 5000})`."""

    def run(
        *variants: dict[str, Any], code: int = 0, arguments: tuple[str, ...] = (), **protocol: Any
    ) -> Any:
        # Steps of 2 ms: a busy machine's delays are no spill.
        rows = [{"B_ms": 2.0} | variant for variant in variants]
        path = config(*rows, **({"memory_budget": "256MiB"} | protocol))
        ran = harness("run", "--max-ctx", path, "--json", *arguments)
        assert ran.code == code, ran.err
        return ran.json

    return run


@with_cgroup
def test_memory_that_is_really_taken_is_predicted_and_proved_to_the_granule(searched) -> None:
    (row,) = searched({"kv_bytes_per_token": KV, "clock": "real"})  # memory is sampled as it fills
    headroom = (256 - 5 - 8) * MIB  # of an interpreter of Python alone: 5 to 8 MiB; weights 2 MB
    assert row["verified_n_ctx"] in range(headroom // KV // 256 * 256 - 256, headroom // KV + 257)
    assert row["verified_by"] == "decode"
    assert abs(row["predicted_n_ctx"] - row["verified_n_ctx"]) <= 256
    tried = {probe["n_ctx"]: probe["fits"] for probe in row["probes"]}
    assert tried[row["verified_n_ctx"]] is True
    assert tried[row["verified_n_ctx"] + 256] is False
    said = f"at {row['verified_n_ctx'] + 256} tokens: killed at the memory budget of 0.27 GB"
    assert row["limit_reason"].startswith(said)


@pytest.mark.parametrize("off_mib", [-20, 20])
def test_an_account_that_is_off_is_corrected(searched, off_mib: int) -> None:
    taken = {"kv_bytes_per_token": KV, "clock": "real"}  # memory is sampled as it fills
    exact, off = searched(taken, taken | {"account_off_bytes": off_mib * MIB})
    assert off["predicted_n_ctx"] != exact["predicted_n_ctx"]
    assert off["verified_n_ctx"] == exact["verified_n_ctx"]


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("refuse", "does not fit"),
        ("abort", "SIGABRT"),
        ("kill", "SIGKILL"),
        ("segfault", "SIGSEGV"),
        pytest.param("hang", "not finished within", marks=pytest.mark.slow("waits for time limits")),
    ],
)
def test_every_way_of_not_fitting_gives_the_same_answer(searched, way: str, said: str) -> None:
    (row,) = searched({"oom_above_n_ctx": 5000, "fits_by": way}, timeout_s=6)
    assert row["verified_n_ctx"] == 4864
    assert row["limit_reason"].startswith("at 5120 tokens: ")
    assert said in row["limit_reason"]


def test_an_error_that_is_not_for_memory_ends_the_search_and_how_to_go_on_is_said(
    searched, harness, tmp_path
):
    (row,) = searched({"oom_above_n_ctx": 5000, "fits_by": "error"}, code=1)
    assert row["status"] == "error"
    assert row["reasons"] == ["at 8192 tokens: the fake failed, as asked"]
    assert [probe["fits"] for probe in row["probes"]] == [True, None]
    assert (row["verified_n_ctx"], row["verified_by"], row["limit_reason"]) == (None, None, None)
    said = harness("run", "--max-ctx", tmp_path / "fake.yaml", "--set", "reserve=1GiB").err
    assert "reserve is for forecasts; this search takes the memory that is free" in said
    assert "has already been searched: error; use --retry-failed to search again" in said


def test_allocating_and_decoding_are_two_figures_where_they_differ(searched) -> None:
    deceiving = {"oom_above_n_ctx": 9000, "fills_to": 5000}
    (filled,) = searched(deceiving)
    assert (filled["verified_n_ctx"], filled["verified_by"]) == (4864, "decode")
    assert filled["allocated_n_ctx"] > filled["verified_n_ctx"]
    (allocated,) = searched(deceiving, arguments=("--no-fill",))
    assert (allocated["verified_n_ctx"], allocated["verified_by"]) == (8960, "allocation")
    assert allocated["fill_s"] == 0


@pytest.mark.parametrize(
    ("variant", "budget"), [({"oom_above_n_ctx": 100}, "256MiB"), ({"kv_bytes_per_token": KV}, "5MiB")]
)
def test_where_not_even_the_shortest_context_fits_there_is_none(searched, variant, budget: str) -> None:
    """By the worker's word, and by a budget that not even its process fits in."""
    (row,) = searched(variant, code=1, memory_budget=budget)
    assert (row["status"], row["verified_n_ctx"], row["probes"][-1]["n_ctx"]) == ("oom", None, 256)
    assert row["reasons"][0].startswith("not even 256 tokens fit: at 256 tokens: ")
    if budget == "5MiB":
        assert row["live_probes"] == 1


def test_a_stack_that_grows_has_no_context_to_search(harness: Callable[..., Ran], tmp_path: Path) -> None:
    path = tmp_path / "grows.yaml"
    path.write_text("models: [{shape: tiny-qwen2}]\nvariants: [{stack: hf, cache: dynamic}]\n")
    ran = harness("run", "--max-ctx", path, "--json")
    (row,) = ran.json
    assert (ran.code, row["status"], row["probes"]) == (1, "refused", [])
    expected = (
        "stack hf with cache: dynamic has no context length option: its cache grows; use workload kind grow"
    )
    assert row["reasons"] == [expected]


@pytest.mark.slow("waits for probes, and for a kill")
def test_a_killed_search_goes_on_from_its_probes(config, harness, background, tmp_path):
    busy = {"oom_above_n_ctx": 20000, "load_ms": 400.0, "clock": "real", "B_ms": 2.0}
    path = config(busy, memory_budget="256MiB")
    process = background("run", "--max-ctx", path)
    until(lambda: any("\n" in path.read_text() for path in tmp_path.glob("results/**/probes.jsonl")))
    (found,) = tmp_path.glob("results/**/probes.jsonl")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = [json.loads(line) for line in found.read_text().splitlines(keepends=True) if "\n" in line]
    assert 1 <= len(before) < 8
    (row,) = harness("run", "--max-ctx", path, "--json").json
    assert row["verified_n_ctx"] == 19968
    tried = [probe["n_ctx"] for probe in row["probes"]]
    assert tried[: len(before)] == [probe["n_ctx"] for probe in before]
    # A context that was too slow is tried once more: other processes may have disturbed it.
    answered = [probe["n_ctx"] for probe in row["probes"] if not (probe["held"] and probe["fits"] is False)]
    assert len(answered) == len(set(answered))
    assert {"ok", "interrupted"} == {record.record["outcome"] for record in kept(tmp_path)}
    until(lambda: not orphaned_cgroups())


def kept(folder: Path) -> list[records.Stored]:
    return stored_in(folder / "results")


def orphaned_cgroups() -> list[Path]:
    """Of processes that have ended; other tests may run at the same time."""
    found = Path("/sys/fs/cgroup").rglob("harness-*-*")
    return [path for path in found if not Path("/proc", path.name.split("-")[1]).exists()]


def test_an_interrupt_leaves_a_record_and_nothing_running(config, background, tmp_path):
    path = config({"oom_above_n_ctx": 20000, "load_ms": 2000.0, "clock": "real"}, memory_budget="256MiB")
    process = background("run", "--max-ctx", path)
    until(lambda: list(tmp_path.glob("results/**/probe-1/request.json")))
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=600) == 130
    (record,) = kept(tmp_path)
    assert record.record["outcome"] == "interrupted"
    workers = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert not [pid for pid in workers.stdout.split() if not gone(int(pid))]


def test_a_search_that_is_done_is_kept_and_made_anew_on_request(searched, tmp_path: Path) -> None:
    once = searched({"oom_above_n_ctx": 5000})
    assert searched({"oom_above_n_ctx": 5000}) == once
    anew = searched({"oom_above_n_ctx": 5000}, arguments=("--fresh",))
    assert anew[0]["started_utc"] > once[0]["started_utc"]
    other = searched({"oom_above_n_ctx": 5000}, memory_budget="128MiB")
    assert other[0]["started_utc"] > anew[0]["started_utc"]  # another budget, another search
    longer = searched({"oom_above_n_ctx": 5000}, timeout_s=40)  # another time for a probe, too
    assert longer[0]["content_key"] != once[0]["content_key"]
    assert len(kept(tmp_path)) == 4


def test_a_run_searches_after_all_that_is_timed(config, harness, tmp_path):
    path = config({"oom_above_n_ctx": 5000}, workloads=[{"kind": "max_ctx"}, {"kind": "decode"}])
    ran = harness("run", path, "--json")
    assert ran.code == 0
    decoded, search = ran.json
    assert (decoded["kind"], search["kind"]) == ("measured", "searched")
    assert search["started_utc"] > decoded["started_utc"]
    assert search["verified_n_ctx"] == 4864
    shown = harness("run", path)
    assert "4,864" in shown.out
    assert "longest" in shown.out


def test_a_length_beyond_the_trained_context_is_said_to_be_that_wherever_it_is_shown(
    config, harness, tmp_path
):
    def with_trained(tokens: int | None) -> None:
        """The record, as of a stack that reports the trained context."""
        (path,) = (tmp_path / "results").rglob("record.json")
        record = json.loads(path.read_text())
        record["loaded"]["trained_context"] = tokens
        path.write_text(json.dumps(record))

    path = config({"oom_above_n_ctx": 5000})
    harness("run", "--max-ctx", path)
    with_trained(2048)
    beyond = "memory holds 4864 tokens, but the model was trained on at most 2048"
    for shown in (harness("run", "--max-ctx", path), harness("report", "--list")):
        assert "4,864" in shown.out
        assert beyond in " ".join(shown.out.split())
    (row,) = harness("run", "--max-ctx", path, "--json").json
    assert (row["verified_n_ctx"], row["trained_context"]) == (4864, 2048)
    assert row["flags"] == [{"code": "beyond_trained_context", "detail": beyond}]
    harness("report", "results", "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "4,864, past training" in page
    assert beyond in page
    for trained in (4864, None):
        with_trained(trained)
        (row,) = harness("run", "--max-ctx", path, "--json").json
        assert (row["trained_context"], row["flags"]) == (trained, [])
        assert "trained on" not in harness("report", "--list").out


def test_a_search_ends_at_the_trained_context_unless_it_is_to_go_past_it(config, harness, tmp_path):
    shape = {"arch": "llama", "vocab_size": 64, "hidden_size": 32, "layers": 1, "intermediate_size": 32}
    model = {"name": "m", "shape": shape | {"heads": 2, "kv_heads": 2, "context": 2100}}
    path = config(
        {"oom_above_n_ctx": 5000, "kv_bytes_per_token": 1024},
        model=model,
        workloads=[{"kind": "max_ctx", "fill": False}],
    )
    ran = harness("run", "--max-ctx", path)
    assert ran.code == 0, ran.err
    assert "predicted: 2,048 tokens" in ran.err  # far from what memory allows: before the first probe
    assert ran.err.index("predicted: ") < ran.err.index("tries 2048 tokens")
    assert "2,048 (trained context)" in ran.out
    ended = "the model was trained on at most 2100 tokens (--past-trained searches on)"
    assert ended in " ".join(ran.out.split())
    assert "does not fit" not in ran.out + ran.err
    (row,) = harness("run", "--max-ctx", path, "--json").json
    assert (row["verified_n_ctx"], row["limited_by"], row["flags"]) == (2048, "trained context", [])
    harness("report", "results", "-o", tmp_path / "page.html")
    assert "2,048 tokens (trained context)" in (tmp_path / "page.html").read_text()
    for past in (["--past-trained"], ["--set", "workloads.0.past_trained=true"]):
        (row,) = harness("run", "--max-ctx", path, "--json", *past).json
        assert (row["verified_n_ctx"], row["limited_by"]) == (4864, "memory")


def test_without_a_budget_the_free_memory_less_a_margin_is_the_limit() -> None:
    with headroom_on("cpu", "cpu", None) as headroom:
        assert not headroom.stated
        assert headroom.limit_bytes == pytest.approx(0.9 * headroom.free(), rel=0.05)


def test_memory_that_others_have_taken_is_waited_for_and_then_missing(monkeypatch):
    monkeypatch.setattr("harness.campaign.memory_headroom.GIVEN_BACK_S", 0.5)
    given_back = iter([50, 50, 100])
    headroom = MemoryHeadroom(100, False, 0, None, lambda: next(given_back))
    waited, free = headroom.settle()
    assert (waited > 0.4, free, headroom.missing(free)) == (True, 100, 0)
    taken = MemoryHeadroom(100, False, 0, None, lambda: 50)
    assert taken.missing(taken.settle()[1]) == 50


def test_a_gpu_that_is_not_there_is_lost_and_one_that_cannot_be_asked_is_refused() -> None:
    with pytest.raises(DeviceLost, match="can no longer be read"), headroom_on("GPU-gone", "cuda", None):
        pass
    with pytest.raises(NoHeadroom, match="Vulkan"), headroom_on("vulkan", "vulkan", None):
        pass


def cut_off_after(folder: Path, probes: int) -> None:
    """Turn the one finished search into a search killed after so many probes."""
    (record,) = folder.glob("results/**/record.json")
    begun = json.loads(record.read_text())
    begun["search"] = {"probes": begun["search"]["probes"][:probes]}
    begun["begun_by"] = begun_by()
    (record.parent / "begun.json").write_text(json.dumps(begun))
    (record.parent / "events.jsonl").write_bytes(b"")
    record.unlink()


def test_a_fill_that_would_take_too_long_is_left_out_and_proves_no_decode_after_an_interrupt_either(
    searched, tmp_path
):
    slow = {"oom_above_n_ctx": 65536, "prefill_ms": 1000.0, "kv_bytes_per_token": 2048}
    (row,) = searched(slow, timeout_s=12)
    assert row["verified_by"] == "allocation"
    assert "tokens would take about" in row["not_filled"]
    cut_off_after(tmp_path, next(i for i, p in enumerate(row["probes"], 1) if p["left_out"]))
    (again,) = searched(slow, timeout_s=12)
    assert (again["verified_by"], again["verified_n_ctx"]) == ("allocation", row["verified_n_ctx"])
    assert again["not_filled"] == row["not_filled"]


def test_probes_that_were_held_to_another_limit_do_not_count(searched, tmp_path: Path) -> None:
    variant = {"oom_above_n_ctx": 5000}
    searched(variant)
    cut_off_after(tmp_path, 3)
    (begun,) = tmp_path.glob("results/**/begun.json")
    text = json.loads(begun.read_text())
    text["search"]["probes"][0] |= {"limit_bytes": 12345, "fits": False}
    begun.write_text(json.dumps(text))
    (row,) = searched(variant)
    assert row["verified_n_ctx"] == 4864
    assert 12345 not in [probe["limit_bytes"] for probe in row["probes"]]


def test_a_probe_that_fits_with_less_than_the_limit_of_now_is_not_measured_again(searched, tmp_path):
    variant = {"oom_above_n_ctx": 5000}
    (row,) = searched(variant)
    assert row["probes"][0]["fits"]
    cut_off_after(tmp_path, 3)
    (begun,) = tmp_path.glob("results/**/begun.json")
    text = json.loads(begun.read_text())
    text["search"]["probes"][0]["limit_bytes"] += MIB
    text["search"]["probes"][0]["peak_bytes"] = 100 * MIB
    begun.write_text(json.dumps(text))
    (again,) = searched(variant)
    assert again["verified_n_ctx"] == row["verified_n_ctx"]
    assert again["probes"][0]["limit_bytes"] == row["probes"][0]["limit_bytes"] + MIB
    first = row["probes"][0]["n_ctx"]
    assert [each["n_ctx"] for each in again["probes"]].count(first) == 1


def test_a_probe_that_loaded_something_else_proves_nothing(searched) -> None:
    (row,) = searched({"oom_above_n_ctx": 5000, "kernel": "fast", "runs_kernel": "slow"}, code=1)
    assert row["status"] == "error"
    assert row["reasons"] == ["at 4096 tokens: kernel fast was requested but slow ran"]


@with_cgroup
def test_memory_that_may_spill_is_searched_only_once_a_context_beyond_it_was_refused(
    config, harness, monkeypatch, tmp_path
):
    """On a CPU, with the headroom that WSL reports."""
    from harness.campaign import max_context

    @contextlib.contextmanager
    def spilling(*given: Any) -> Iterator[MemoryHeadroom]:
        with headroom_on(*given) as headroom:
            yield replace(headroom, may_spill="it may spill")

    monkeypatch.setattr(max_context, "headroom_on", spilling)
    rows = [{"kv_bytes_per_token": KV, "B_ms": 2.0}, {"kv_bytes_per_token": KV, "lazily": True}]
    refused = {"kv_bytes_per_token": KV, "oom_above_n_ctx": 3900, "name": "refuses"}
    path = config(*rows, refused, memory_budget="256MiB")
    from harness import cli

    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--max-ctx", str(path)]) == 1
    found = {r.record["variant"]: r.record for r in kept(tmp_path)}
    killed, spills, honest = found["v0"], found["v1"], found["refuses"]
    assert honest["outcome"] == killed["outcome"] == "ok"  # refused, or killed at its limit: shown
    assert spills["outcome"] == "refused"
    assert "more than fit on the device, were allocated" in spills["reason"]
    assert honest["search"]["probes"][0]["filled"] is False


def test_a_context_that_decodes_too_slowly_is_too_long_and_tried_twice_across_an_interrupt(
    searched, tmp_path
):
    spilled = {"oom_above_n_ctx": 4096, "slow_above_n": 3000, "kv_bytes_per_token": 1024}
    (row,) = searched(spilled)
    assert row["verified_n_ctx"] < 3000 + 256
    assert "times slower" in row["limit_reason"]
    slow = [probe["n_ctx"] for probe in row["probes"] if probe["held"] and not probe["fits"]]
    assert slow == [n for n in dict.fromkeys(slow) for _ in range(2)]  # each twice
    first = next(i for i, p in enumerate(row["probes"], 1) if p["held"] and not p["fits"])
    cut_off_after(tmp_path, first)
    (again,) = searched(spilled)
    assert again["verified_n_ctx"] == row["verified_n_ctx"]
    assert [probe["n_ctx"] for probe in again["probes"]].count(slow[0]) == 2


def test_a_slow_decode_on_a_busy_machine_is_no_lack_of_memory_where_half_of_it_is_free(
    searched, tmp_path, monkeypatch
):
    (counts := tmp_path / "disturbed").write_text("99")
    monkeypatch.setenv("HARNESS_FAKE_DISTURBED", str(counts))
    variant = {"oom_above_n_ctx": 4096, "slow_above_n": 3000, "kv_bytes_per_token": 1024}
    (row,) = searched(variant, memory_budget="2GiB")
    assert (row["status"], row["verified_n_ctx"], row["limited_by"]) == ("ok", 4096, "memory")
