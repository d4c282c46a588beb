"""No measurement is faster than its ceiling, but for those that are flagged for it."""

from collections import Counter
from typing import Any

import pytest

from harness import records
from harness.analysis import traffic
from harness.dataset import table
from harness.theory import floors
from harness.theory.decoder import dense
from harness.theory.floors import Ceiling
from harness.theory.machines import MACHINES
from harness.theory.rows import is_quantized

CARD = MACHINES["rtx-4090"]
BEATEN = 1.02  # by more than this no figure may


# A flag that accounts for a figure that is too fast, by figure.
EXPLAINED = {
    "B_ms": {"faster_than_limit", "plateau_past_window"},
    "W_tokens_per_ms": {"slope_faster_than_limit", "plateau_past_window"},
    "ttft_ms": {"first_token_faster_than_limit", "first_token_unsynchronised"},
}


def beaten_by(row: dict[str, Any]) -> dict[str, float]:
    """By figure, how many times as fast as the data sheet allows, where that is more than BEATEN."""
    B, W, first = (row[figure] for figure in EXPLAINED)
    found = {
        "B_ms": B and row["B_theory_ms"] / B,
        "W_tokens_per_ms": W and row["W_theory_tokens_per_ms"] and W / row["W_theory_tokens_per_ms"],
        "ttft_ms": first and row["B_theory_ms"] / first,
    }
    return {figure: times for figure, times in found.items() if times and times > BEATEN}


def test_no_published_figure_beats_its_ceiling_unless_a_flag_says_why(published):
    beaten, looked_at = Counter[str](), 0
    for stored in published.stored:
        row = table.repeat_row(stored.record, stored.times, None, None)
        if row["B_theory_ms"] is None:
            continue
        looked_at += 1
        codes = {flag["code"] for flag in row["flags"]}
        for figure, times in beaten_by(row).items():
            assert codes & EXPLAINED[figure], (row["cell"], figure, times, codes)
            beaten[figure] += 1
    assert looked_at > 90
    assert beaten == {"W_tokens_per_ms": 9, "ttft_ms": 7}  # slopes bound by a host, clocks read too early


def test_no_published_prefill_is_faster_than_what_its_kernels_multiply_with(published):
    lengths = 0
    for stored in published.stored:
        curve = records.prefill_series(stored)
        if not curve:
            continue
        bits = traffic.bpw(stored.record) or 16.0
        asked = floors.demand_of_bits(dense(**stored.record["model"]["shape"]), bits)
        rate = CARD.kernel_rate(is_quantized(bits))
        assert rate is not None
        ceiling = Ceiling(CARD.bandwidth_bytes_per_s, CARD.rates[rate].value)
        for n, ns in zip(curve["n"], curve["latency_ns"], strict=True):
            least_ns = floors.prefill_floor_s(asked, ceiling, n) * 1e9
            assert least_ns <= BEATEN * ns, (stored.record["cell"], n)
        lengths += len(curve["n"])
    assert lengths > 5000


@pytest.mark.parametrize(
    ("name", "sixteen_bits", "quantized"),
    [
        ("rtx-4090", "fp16-tensor", "int8"),
        ("rtx-4060-ti-8gb", None, None),  # its tensor cores' rate has no source here
        ("l4", "fp16", "int8"),
        ("apple-m2", "fp16", "fp16"),
        ("apple-m2-max", "fp32", "fp32"),
        ("rpi-5", "fp16", "int8"),
        ("rpi-4", "fp16", None),
        ("ryzen-7950x", None, None),
        ("epyc-9654", None, None),
        ("rtx-4090-laptop", "fp16-tensor", "int8"),
        ("l40s", "fp16", "int8"),
        ("titan-rtx", "fp16", "int8"),
        ("jetson-agx-orin-64gb", "fp16", "int8"),
        ("mi300x", "fp16", None),  # its int8 has no source here
        ("rx-7900-xtx", "fp16", "int8"),
        ("arc-b580", "fp16", "int8"),
        ("apple-m4-max-40core", "fp32", "fp32"),
        ("apple-m5", None, None),
    ],
)
def test_computing_is_counted_at_the_rate_of_the_units_that_kernels_use_or_is_unknown(
    name, sixteen_bits, quantized
):
    machine = MACHINES[name]
    assert machine.kernel_rate(quantized=False) == sixteen_bits
    assert machine.kernel_rate(quantized=True) == quantized


def test_an_l4_is_not_said_to_prefill_faster_than_a_4090(harness):
    asked = ("--machine", "rtx-4090", "l4", "--quant", "q4_0", "--prompt", "500", "--json")
    fast, slow = harness("theory", "qwen1.5-7b", *asked).json
    assert fast["prefill_ms"]["last"] < slow["prefill_ms"]["last"]
    assert fast["prefill_ms"]["last"] < 68  # the fastest published variant of llama.cpp


def test_prefill_turns_compute_bound_at_the_same_prompt_in_a_report_and_in_theory(harness, published):
    stored = next(
        result for result in published.stored if result.record["cell"].startswith("qwen1.5-7b.hf.bf16")
    )
    (told,) = harness("theory", "qwen1.5-7b", "--machine", "rtx-4090", "--quant", "f16", "--json").json
    row = table.repeat_row(stored.record, stored.times, None, None)
    assert row["prefill_knees"] == told["prefill_knees"]
