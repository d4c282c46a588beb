"""Bytes that a decode step reads: as loaded, caches read once, in full, copied or up to a window."""

import copy
from typing import Any

import numpy as np
import pytest
from golden_record import GOLDEN

from harness.analysis import traffic
from harness.analysis.verdicts import status, verdict
from harness.dataset import cell_rows, table
from harness.records import TokenTimes
from harness.records.kinds import wrong_with
from harness.report import figure_texts, tables
from harness.report import text_table as report_table

RATE = 1008e9  # of the data sheet below
WEIGHTS, KV, PROMPT, NEW = 4_000_000_000, 500_000, 25, 9975
N_CTX = 10_000


def loaded(**facts: Any) -> dict[str, Any]:
    """Facts of a stack that counts its own bytes."""
    sizes = {"model_bytes": WEIGHTS + 600_000_000, "parameters": 8_000_000_000, "tied": False}
    sizes |= {"input_embedding_bytes": 600_000_000, "kv_bytes_per_token": KV, "quant": "nf4"}
    options = {"n_ctx": N_CTX, "threads": 1}
    return {"versions": {}, "kernels": {}, "options": options, "kv_read": "copied"} | sizes | facts


def record(ms: np.ndarray | None = None, device: str = "GPU-1", **facts: Any) -> dict[str, Any]:
    """A finished repeat of NEW tokens on a GPU whose data sheet is known, or on a CPU."""
    made = copy.deepcopy(GOLDEN)
    made |= {"device": device, "loaded": loaded(**facts), "tokens": NEW, "options": {"threads": 1}}
    made["model"]["shape"] = None
    made["model"]["weights"] |= {"quant": "bf16", "header": GOLDEN["model"]["weights"]["header"]}
    made["model"]["weights"]["header"] = made["model"]["weights"]["header"] | {"parameters": 8_000_000_000}
    made["workload"] |= {"prompt_tokens": PROMPT, "new_tokens": NEW}
    gpu = {"name": "NVIDIA GeForce RTX 4090", "memory_bytes": 24 << 30}
    made["machine"] |= {"last_level_cache_bytes": 0, "gpus": [] if device == "cpu" else [gpu]}
    made["done"]["counters"] = {"evaluated_tokens": PROMPT + NEW - 1}
    ms = np.full(NEW, 10.0) if ms is None else ms
    made["timing"] |= {"first_token_ns": int(ms[0] * 1e6), "last_token_ns": int(ms.sum() * 1e6)}
    return made


def row(made: dict[str, Any], ms: np.ndarray, ceiling: float | None = None) -> dict[str, Any]:
    columns = {"n": list(range(PROMPT + 1, PROMPT + 1 + len(ms))), "latency_ns": [int(v * 1e6) for v in ms]}
    return table.repeat_row(made, TokenTimes.of_columns(columns), "x", ceiling)


@pytest.mark.parametrize(("number", "sheet"), [(0, "GeForce RTX 3090"), (1, "H100 SXM"), (2, None)])
def test_the_data_sheet_is_that_of_the_gpu_which_was_measured_and_not_of_another_here(number, sheet):
    made = record(device=f"GPU-{number}")
    names = ["NVIDIA GeForce RTX 3090", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 3090 Laptop GPU"]
    made["machine"]["gpus"] = [
        {"uuid": f"GPU-{i}", "name": name, "memory_bytes": 24 << 30} for i, name in enumerate(names)
    ]
    found = traffic.data_sheet(made)
    assert (found and found.name) == sheet
    assert table.device_memory_bytes(made) == 24 << 30
    made["machine"]["gpus"][number] |= {"name": None, "memory_bytes": None}
    assert wrong_with(made) is None
    assert (traffic.data_sheet(made), table.device_memory_bytes(made)) == (None, None)


def test_which_of_several_gpus_a_family_of_devices_means_is_not_known():
    made = record(device="vulkan")
    assert traffic.data_sheet(made).name == "GeForce RTX 4090"
    made["machine"]["gpus"] *= 2
    assert traffic.data_sheet(made) is None


def honest(kv_read: str, host_ms: float, window: int = 0, seed: int = 0) -> np.ndarray:
    """Latencies in ms of a device that reads at its data sheet's rate, and of a host that may be slower."""
    n = np.arange(PROMPT, PROMPT + NEW, dtype=float)
    moved = {"grows": n, "copied": 3 * n, "full": np.full(NEW, N_CTX), "window": np.minimum(n, window)}[
        kv_read
    ]
    ms = np.maximum((WEIGHTS + KV * moved) / RATE * 1e3, host_ms)
    ms[0] = max(WEIGHTS / RATE * 1e3, host_ms)  # a prompt attends to itself alone
    return ms * (1 + np.abs(np.random.default_rng(seed).normal(size=NEW)) * 0.01)


def test_bytes_are_those_that_were_loaded_where_the_stack_counts_them():
    made = record()
    assert traffic.model_bytes(made) == WEIGHTS + 600_000_000
    assert traffic.weight_bytes_per_token(made) == WEIGHTS
    assert traffic.bpw(made) == pytest.approx(4.6)
    assert traffic.kv_bytes_per_token(made) == KV
    made["loaded"] |= {"tied": True, "model_bytes": WEIGHTS}
    assert traffic.weight_bytes_per_token(made) == WEIGHTS
    del made["loaded"]["tied"]  # one that says its total alone leaves the parts to the header
    header = made["model"]["weights"]["header"]
    assert traffic.weight_bytes_per_token(made) == header["model_bytes"] - header["input_embedding_bytes"]


def test_bytes_are_compared_with_the_file_only_in_the_type_that_it_stores():
    made = record()
    assert status(made)[1] == []  # 4-bit of a 16-bit file
    made["loaded"]["parameters"] -= 1
    assert "parameters is 7999999999 in the stack" in status(made)[1][0]
    same = record(quant="bf16")
    assert "model_bytes is 4600000000 in the stack" in status(same)[1][0]
    del same["model"]["weights"]["quant"]
    assert "model_bytes is 4600000000 in the stack" in status(same)[1][0]


def test_a_stack_that_counts_half_of_its_bytes_is_no_record():
    made = record()
    assert wrong_with(made) is None
    del made["loaded"]["input_embedding_bytes"]
    assert wrong_with(made) == "input_embedding_bytes is missing beside model_bytes"
    assert wrong_with(record(input_embedding_bytes=10**10)) == (
        "input_embedding_bytes must be at most model_bytes"
    )
    assert wrong_with(record(leftovers="lm_head")) == "loaded.leftovers must be a list"
    assert wrong_with(record(window=-1)) == "loaded.window must be a whole number from 0"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kv_read", ["grows", "copied", "full", "window"])
def test_no_honest_run_is_called_impossible(kv_read, seed):
    """At the ceiling itself, and where the host hides none, some, most or all of the slope."""
    for host_ms in (0, 5, 7, 8.5, 9, 12, 16, 18, 20):
        ms = honest(kv_read, host_ms, 2048, seed)
        said = row(record(ms, kv_read=kv_read, window=2048), ms, RATE)
        assert said["status"] == "ok", (host_ms, said["reasons"])
        assert said["flags"] == [], host_ms


@pytest.mark.parametrize("kv_read", ["grows", "copied", "full", "window"])
def test_no_honest_run_on_a_cpu_reads_more_than_memory_gives(kv_read):
    ms = honest(kv_read, 0, 2048)
    made = record(ms, "cpu", kv_read=kv_read, window=2048)
    share = traffic.bandwidth_share(made, RATE)
    assert share == pytest.approx({"copied": 0.56}.get(kv_read, 1), abs=0.02)
    assert verdict(made, RATE).reasons == []
    assert "faster than memory allows" in " ".join(verdict(made, RATE * 0.45).reasons)


def test_mbu_counts_all_bytes_and_the_verdict_only_those_past_the_cache():
    ms = honest("grows", 0) - 0.4 * WEIGHTS / RATE * 1e3  # of the weights, which are 4.0 of 6.5 GB on average
    made = record(ms, "cpu", kv_read="grows")
    made["bandwidth_probes"] = [{"read_bytes_per_s": rate} for rate in (RATE * 0.9, RATE)]
    (reason,) = verdict(made, RATE).reasons
    assert reason == (
        "faster than memory allows: past the CPU's cache it reads 131% of 1008 GB/s, the highest read "
        "bandwidth measured here (probes read 907 to 1008 GB/s)"
    )
    made["machine"]["last_level_cache_bytes"] = WEIGHTS // 2
    said = row(made, ms, RATE)
    assert (said["status"], said["flags"]) == ("ok", [])
    assert said["bandwidth_share"] == pytest.approx(6.5 / 4.9, rel=0.02)
    assert said["past_cache_share"] == pytest.approx(4.5 / 4.9, rel=0.02)
    assert said["B_measured_theory_ms"] == pytest.approx(WEIGHTS / RATE * 1e3)
    made["machine"]["last_level_cache_bytes"] = WEIGHTS
    assert traffic.past_cache_share(made, RATE) is None
    assert traffic.bandwidth_share(made, RATE) == said["bandwidth_share"]
    assert tables.bandwidth([said]) == (
        "MBU: share of 1008 GB/s, the highest read bandwidth measured here (probes read 907 to 1008 GB/s)"
    )
    slower = row(made, ms, RATE / 2)
    assert slower["bandwidth_share"] == pytest.approx(2 * said["bandwidth_share"])
    without = {**said, "bandwidth_share": None, "bandwidth_bytes_per_s": 2 * RATE}
    assert tables.bandwidth([said, slower, without]) == (
        "MBU: share of the highest read bandwidth measured in each row's own run, 504 to 1008 GB/s:"
        " this machine's bandwidth is not stable, so MBUs of different runs do not compare"
    )
    assert tables.bandwidth([without]) == ""


def test_what_no_machine_does_is_still_seen():
    ms = honest("full", 0)
    said = row(record(ms, kv_read="full"), ms * 0.9)
    assert said["status"] == "invalid"
    assert said["flags"][0]["code"] == "faster_than_limit"
    flatter = honest("grows", 0)[0] + np.arange(NEW) * KV / RATE * 1e3 * 0.8
    assert row(record(flatter), flatter)["flags"][0]["code"] == "slope_faster_than_limit"
    ms = honest("grows", 0, 0)
    ms[2000:] = ms[2000]  # a cache that lost its contents
    assert "plateau_past_window" in [f["code"] for f in row(record(ms, kv_read="grows"), ms)["flags"]]


def test_a_copied_cache_has_a_share_of_the_ideal_and_one_of_what_it_moves():
    ms = honest("copied", 0)
    said = row(record(ms), ms, RATE / 2)
    assert said["W_theory_tokens_per_ms"] == pytest.approx(RATE / KV / 1e3)
    assert said["W_declared_theory_tokens_per_ms"] == pytest.approx(RATE / KV / 3e3)
    assert said["W_ratio"] == pytest.approx(1 / 3, rel=0.02)
    assert said["W_declared_ratio"] == pytest.approx(1, rel=0.02)
    assert said["W_declared_measured_ratio"] == pytest.approx(2, rel=0.02)
    once = row(record(ms, kv_read="padded256"), ms)
    assert once["W_declared_ratio"] == once["W_ratio"]


def test_a_static_cache_is_a_floor_of_weights_and_all_of_it_and_has_no_W():
    ms = honest("full", 0)
    said = row(record(ms, kv_read="full"), ms)
    assert said["B_theory_ms"] == pytest.approx((WEIGHTS + KV * N_CTX) / RATE * 1e3)
    assert said["B_ratio"] == pytest.approx(1, abs=0.02)
    assert not said["W_identifiable"]
    assert (said["W_theory_tokens_per_ms"], said["W_ratio"], said["W_declared_ratio"]) == (None, None, None)
    assert figure_texts.W(said) == "not applicable"
    assert next(c for c in tables.of_terminal() if c.heading == "W tok/ms").text(said) == "not applicable"
    (shown,) = (c for c in tables.TABLES["Speed"] if c.heading == "W MBU, spec, copied")
    assert shown.text(said) == report_table.NONE
    copied = honest("copied", 0)
    assert shown.text(row(record(copied), copied)) in ("99%", "100%", "101%")


def test_a_window_is_read_up_to_its_length_and_has_a_slope_only_before_it():
    ms = honest("window", 0, 2048)
    for made in (record(ms, "cpu", kv_read="window", window=2048), record(ms, "cpu", kv_read="window")):
        limit = traffic.limits(made, RATE)["measured"]
        assert (limit.slope_ms, limit.declared_slope_ms) == (None, None)
    attended = np.minimum(np.arange(PROMPT + 1, PROMPT + NEW), 2048).mean()
    seconds = (made["timing"]["last_token_ns"] - made["timing"]["first_token_ns"]) / 1e9 / (NEW - 1)
    wide = record(ms, "cpu", kv_read="window", window=2048)
    assert traffic.bandwidth_share(wide, RATE) == pytest.approx((WEIGHTS + KV * attended) / seconds / RATE)
    # Of a window that is not told no byte is counted.
    assert traffic.bandwidth_share(made, RATE) == pytest.approx(WEIGHTS / seconds / RATE)
    within = record(ms, kv_read="window", window=NEW + PROMPT)
    assert traffic.limits(within, RATE)["measured"].slope_ms == pytest.approx(KV / RATE * 1e3)


def test_where_probes_differ_by_more_than_a_fifth_mbu_is_a_range_and_its_ceiling_the_highest():
    made, ms = record(device="cpu"), np.full(NEW, 400.0)
    made["bandwidth_probes"] = [{"read_bytes_per_s": rate, "threads": 2} for rate in (36e9, 61e9)]
    of_one = row(made, ms, 61e9)
    read = of_one["bandwidth_share"] * 61e9
    assert of_one["bandwidth_share_range"] == pytest.approx([read / 61e9, read / 36e9])
    assert figure_texts.mbu(of_one) == f"{read / 61e7:.0f} to {read / 36e7:.0f}%"
    assert "probes read 36 to 61 GB/s: this machine's bandwidth is not stable" in tables.bandwidth([of_one])
    made["bandwidth_probes"] = made["bandwidth_probes"][1:]
    steady = row(made, ms, 61e9)
    assert (steady["bandwidth_share_range"], steady["bandwidth_share"]) == (None, of_one["bandwidth_share"])
    assert figure_texts.mbu(steady) == f"{read / 61e7:.0f}%"


def test_runs_minutes_apart_whose_probes_differ_give_one_cell_with_a_range():
    rows = []
    for number, rate in enumerate((36e9, 61e9)):
        made = record(device="cpu") | {
            "repeat": number + 1,
            "started_utc": f"2026-11-27T10:{number}0:00+00:00",
        }
        made["campaign"] = made["campaign"] | {"id": f"2026-11-27T10:{number}0:00+00:00"}
        made["bandwidth_probes"] = [{"read_bytes_per_s": rate, "threads": 2}]
        rows.append(row(made, np.full(NEW, 400.0), rate))
    assert [each["bandwidth_share_range"] for each in rows] == [None, None]
    (cell,) = cell_rows.per_cell(rows)
    read = rows[1]["bandwidth_share"] * 61e9
    assert cell["bandwidth_share_range"] == pytest.approx([read / 61e9, read / 36e9])
    assert "MBUs of different runs do not compare" in tables.bandwidth(rows)
