"""How long workloads take, before they run."""

import math

import pytest

from harness.base import data
from harness.campaign import forecast
from harness.campaign.durations import CPU_SHARE, START_S, time_s
from harness.config import Decode, Prefill, Turns, Windows, load, plan
from harness.theory.decoder import dense, parameters
from harness.theory.hf_config import SHAPES
from harness.theory.memory import Model

SHAPE = SHAPES["qwen2.5-0.5b"]
BYTES_PER_S, FLOPS = 20e9, 200e9
HELD = Model(SHAPE, weight_bytes=parameters(SHAPE) * 4.5 / 8, embedding_bytes=0, kv_bytes_per_token=12_288)


def test_a_decode_takes_its_steps_at_their_mean_depth_or_over_all_of_a_static_cache() -> None:
    decode = Decode(prompt_tokens=100, new_tokens=400)
    for static, mean in ((None, 301), (8192, 8192)):
        takes, _ = time_s(decode, HELD, BYTES_PER_S, math.inf, static)
        read = 400 * (HELD.weight_bytes + 12_288 * mean)
        assert takes == pytest.approx(START_S + read / (CPU_SHARE * BYTES_PER_S))


def test_a_sweep_takes_its_passes_and_those_that_are_not_timed() -> None:
    takes, filling = time_s(Prefill(lengths=[512], passes=5), HELD, BYTES_PER_S, FLOPS)
    one = 2 * 358e6 * 512 / FLOPS  # the layers' parameters; the lm_head and attention are some percent
    assert takes - START_S == pytest.approx(8 * one, rel=0.1)
    assert filling == 0


def test_windows_take_their_filling_and_steps_that_read_weights_and_cache() -> None:
    takes, filling = time_s(Windows(depths=[0, 8192], window=61), HELD, BYTES_PER_S, FLOPS)
    steps = 4 * 64 * (2 * HELD.weight_bytes + (8192 + 2) * 12_288) / (CPU_SHARE * BYTES_PER_S)
    assert takes == pytest.approx(START_S + filling + steps)
    assert filling > 8192 * 2 * 358e6 / FLOPS


def test_a_kept_prefix_takes_a_fraction_of_the_time_of_one_read_again() -> None:
    off, on = (
        time_s(Turns(new_tokens=1, prefix_cache=[kept]), HELD, BYTES_PER_S, FLOPS)[0] - START_S
        for kept in (False, True)
    )
    assert 5 < off / on < 8  # 30,845 tokens against 3,800, with attention


def test_a_model_of_unknown_shape_has_no_estimate_but_of_its_decode_steps() -> None:
    unknown = Model(dense("", 0, 0, 0, 0, 0, 0, 0), 1e9, 0, 0)
    cells = [each for each in plan.cells(load(data.config("quickstart"))) if each.workload.kind == "decode"]
    found = forecast.Forecast(cells[0], forecast.host(), (), held=unknown)
    new = cells[0].workload.new_tokens
    assert found.duration(BYTES_PER_S)[0] == pytest.approx(START_S + new * 1e9 / (CPU_SHARE * BYTES_PER_S))


def test_a_warm_up_takes_its_shortest_time_and_all_its_windows_at_most() -> None:
    experiment = load(data.config("quickstart"), ["warmup.max_windows=7", "warmup.at_least_s=3"])
    cell = next(each for each in plan.cells(experiment) if each.workload.kind == "decode")
    found = forecast.Forecast(cell, forecast.host(), (), held=HELD)
    longest_s = found.longest_warm_up_s(experiment.protocol.warmup, BYTES_PER_S)
    windows = (longest_s - 3) * CPU_SHARE * BYTES_PER_S / (HELD.weight_bytes + 12_288)
    assert windows == pytest.approx(8 * (16 + 12))  # of 16 tokens, after a prompt of 25
