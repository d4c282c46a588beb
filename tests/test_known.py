"""B and W stand only where the data determine them, in every output."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from harness.analysis.copied_blocks import copies

NO_B = "B_not_identifiable"


def gaps(count: int, ms: float = 20.0, noise: float = 0.005) -> np.ndarray:
    return ms * (1 + noise * np.random.default_rng(count).normal(size=count))


def spiked(at: int, ms: float) -> np.ndarray:
    found = gaps(201)
    found[at] = ms
    return found


def requests(path: Path, prompt: int, gaps_ms: np.ndarray) -> Path:
    """A vLLM result of one request."""
    content = {"ttfts": [0.9], "itls": [list(gaps_ms / 1e3)]}
    content |= {"input_lens": [prompt], "output_lens": [len(gaps_ms) + 1]}
    path.write_text(json.dumps(content))
    return path


SPIKES = "slow outliers (spikes); with them B 29.24"


@pytest.mark.parametrize(
    ("prompt", "gaps_ms", "B_ms", "codes", "said"),
    [
        (50, gaps(201), 20.0, [], "20.0"),
        (50, spiked(0, 1300), 20.0, ["late_second_token"], "took 1,300 ms"),
        (50, spiked(90, 1300), 20.0, ["spikes_left_out"], SPIKES),
        (8000, gaps(127, 13.2, 0.02), None, [NO_B], "13.2 at 8,064"),
        (8000, np.full(127, 13.2), None, [NO_B], "13.2 at 8,064"),  # a coarse clock has no noise
        (550, gaps(200, 13.2, 0.06), None, [NO_B], "95% interval"),
        (550, np.concatenate([[0.008], gaps(11, 13.2)]), None, [NO_B], "its 12 tokens give no interval"),
    ],
    ids=["known", "late second token", "spike", "far", "far without noise", "wide", "too short"],
)
def test_a_request_has_B_only_where_it_is_known_to_a_tenth(
    harness, tmp_path, prompt, gaps_ms, B_ms, codes, said
):
    log = requests(tmp_path / "vllm.json", prompt, gaps_ms)
    (row,) = harness("fit", log, "--json").json
    assert row["B_ms"] == (B_ms and pytest.approx(B_ms, rel=0.01))
    assert [flag["code"] for flag in row["flags"]] == codes
    assert row["median_ms"] == pytest.approx(np.median(gaps_ms[1:]), rel=0.01)
    assert row["median_n"] == pytest.approx(prompt + len(gaps_ms) / 2, abs=2)
    if B_ms:
        low, high = row["B_ci95_ms"]
        assert low < row["B_ms"] < high
        assert row["tokens_per_s"] == pytest.approx(1e3 / np.mean(gaps_ms[codes == ["late_second_token"] :]))
    assert said in " ".join(harness("fit", log).out.split())


TWELVE = "46.2422 47.2188 48.0156 48.4141 49.2344 49.7656 50.3125 50.9141 51.6523 52.1289 52.7070 52.2500"
SWEEP_BENCH = "23.947 25.907 27.971 30.206 32.181 34.148 36.335 38.350 40.387 42.433 44.423 46.535 48.601 "
SWEEP_BENCH += "50.809 52.780 54.737"
SWEEPS = {
    "twelve depths": (range(128, 11_393, 1024), TWELVE, 46.6, 1764),
    "four depths": ((1, 4096, 16_384, 32_768), "4.5372 4.9826 6.2228 7.9365", 4.54, 9673),
    "llama-sweep-bench": (range(64, 7745, 512), SWEEP_BENCH, 23.7, 249),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_rows_with_gaps_in_n_are_points_of_a_sweep(harness, tmp_path, name):
    n, ms, B_ms, W = SWEEPS[name]
    log = tmp_path / "sweep.csv"
    log.write_text("n,latency_ms\n" + "\n".join(f"{k},{v}" for k, v in zip(n, ms.split(), strict=True)))
    (row,) = harness("fit", log, "--json").json
    assert (row["shape"], row["first_token_ms"], row["tokens_per_s"]) == ("sweep", None, None)
    assert row["B_ms"] == pytest.approx(B_ms, rel=2e-3)
    assert row["W_tokens_per_ms"] == pytest.approx(W, rel=2e-3)
    for key, ends in (("B_ms", "B_ci95_ms"), ("W_tokens_per_ms", "W_ci95")):
        assert row[ends][0] < row[key] < row[ends][1]
    assert not {"first_token_unsynchronised", NO_B} & {flag["code"] for flag in row["flags"]}
    assert f"{W} (" in harness("fit", log).out


def test_windows_of_neighbouring_tokens_are_one_point_each(harness, tmp_path):
    depths = np.repeat([1, 4000, 8000, 16_000], 32)
    n = depths + np.tile(np.arange(32), 4)
    ms = 20 + (n - 1) / 1000 + np.random.default_rng(0).normal(0, 0.02, len(n))
    log = tmp_path / "windows.csv"
    log.write_text("n,latency_ms\n" + "\n".join(f"{k},{v}" for k, v in zip(n, ms, strict=True)))
    (row,) = harness("fit", log, "--json").json
    assert row["shape"] == "sweep"
    assert row["W_tokens_per_ms"] == pytest.approx(1000, rel=0.02)


def test_latencies_that_repeat_in_blocks_have_no_interval(harness, tmp_path):
    values = gaps(80, 25.7)
    grown = np.concatenate([values[:count] for count in range(1, 80)])
    log = tmp_path / "log.json"
    log.write_text(json.dumps({"latency_s": list(grown / 1e3)}))
    (row,) = harness("fit", log, "--json").json
    assert [flag["code"] for flag in row["flags"]] == ["repeated_blocks", NO_B]
    assert (row["B_ms"], row["B_ci95_ms"], row["tokens_per_s_ci95"]) == (None, None, None)
    assert row["tokens_per_s"] == pytest.approx(1e3 / 25.7, rel=0.01)


@pytest.mark.parametrize(
    ("ms", "count"),
    [
        (gaps(400), 0),
        (np.round(gaps(4000, noise=0.05)), 0),  # a clock of whole ms
        (np.tile([20.0, 21.0, 22.0], 100), 0),
        (np.concatenate([gaps(100), gaps(100)]), 100),
        (np.concatenate([gaps(100), gaps(37), gaps(100)[50:70]]), 20),
        (gaps(5), 0),
    ],
    ids=["none", "whole ms", "a pattern", "twice", "a part", "short"],
)
def test_copies_are_blocks_that_chance_does_not_make(ms, count):
    assert copies(ms) == count


def test_no_output_has_a_B_that_is_wide_or_a_W_without_a_slope(harness, config, tmp_path):
    noisy = {"B_ms": 2.0, "noise": 0.9}
    ran = harness("run", config(noisy, {"B_ms": 2.0}, new_tokens=64, repeats=2), "-o", "r", "--wide")
    shown = {line.split()[0]: line for line in ran.out.splitlines() if line.startswith(("v0 ", "v1 "))}
    assert "v0: B, the time of a token at zero context, is not known to 10%: 95% interval" in ran.out
    assert "v1: B" not in ran.out
    assert "  2.0" in shown["v1"]
    for row in harness("report", "--list", "r", "--json").json:
        known = row["variant"] == "v1"
        assert (row["B_ms"] is not None) == known
        assert row["B_ci95_ms"]
        assert row["slope_ci95_ms"]
        assert row["W_tokens_per_ms"] is row["W_ratio"] is row["B_ratio"] is None
        assert (NO_B in [flag["code"] for flag in row["flags"]]) != known
    for command in (("report", "r", "--export", "csv"), ("report", "r", "--format", "csv")):
        for line in csv.DictReader(io.StringIO(harness(*command).out)):
            assert bool(line["B_ms"]) == (line["variant"] == "v1")
            assert line["B_ci95_ms_high"]
            assert not line["W_tokens_per_ms"]
    assert "| not identifiable |" in harness("report", "r", "--format", "md").out
