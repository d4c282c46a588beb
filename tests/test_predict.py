"""Predictions of decode: from the published study, from a few measured variants, and from nothing."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks import formulas, predictions
from harness.base import data
from harness.recommend import evidence
from harness.recommend.examples import of_line
from harness.recommend.speed import SHIPPED, Predictor, Terms, _Attention, fitted_terms, read_s, shipped
from harness.recommend.traits import DENSE, EXPERTS, GGML, TORCH, Example, Range, Traits
from harness.theory import public_speeds
from harness.theory.floors import Demand, Pass, Reach, cost

CARD = Traits(
    group="llamacpp",
    engine=GGML,
    type="q4_0",
    model="m",
    device="a card",
    family="cuda",
    layers=32,
    read_bytes=4e9,
    reaches=(Reach(kv_bytes=5e5, flops=5e5),),
    bytes_per_s=1e12,
    pass_flops=1.5e10,
    flops=1e14,
    maker="NVIDIA",
)
CPU = replace(CARD, device="a CPU", family="cpu", maker="CPU", bytes_per_s=2e10, flops=None)
NOTHING: dict[str, Terms] = {}


@pytest.fixture(scope="module")
def published() -> list[Example]:
    return predictions.of_study()


@pytest.fixture(scope="module")
def public() -> list[Example]:
    return predictions.of_public(public_speeds.used(public_speeds.rows()))


def test_a_whole_size_of_the_published_study_is_predicted_from_the_others_if_it_is_the_users_own(published):
    """benchmarks.predictions --own has the other sizes."""
    gguf = [replace(e, traits=replace(e.traits, setup="")) for e in published if e.traits.engine == GGML]
    asked = [e for e in gguf if e.traits.model == "qwen1.5-7b"]
    predictor = Predictor([e for e in gguf if e.traits.model != "qwen1.5-7b"])
    n = min(asked[0].at_ms)
    predicted = predictor.latency_ms([e.traits for e in asked], n)
    measured = [example.at_ms[n] for example in asked]
    errors = [abs(step.value / ms - 1) for step, ms in zip(predicted, measured, strict=True)]
    assert len(asked) == 8
    assert statistics.median(errors) < 0.02
    assert max(errors) < 0.05
    assert all(step.low < ms < step.high for step, ms in zip(predicted, measured, strict=True))
    assert all(width(step) < 1.1 for step in predicted)


def test_the_shipped_terms_and_errors_are_those_of_the_data(published, public):
    """benchmarks.predictions --store writes both. The errors here are those of CPUs, which take the least
    time."""
    everything = [*published, *public]
    terms = predictions.fitted(everything)
    of_kinds, stored = predictions.of_kinds(terms), shipped()
    assert {fit: of_fit.names for fit, of_fit in of_kinds.items()} == {f: t.names for f, t in stored.items()}
    for fit, of_fit in of_kinds.items():
        assert stored[fit].mean == pytest.approx(of_fit.mean, abs=0.01)
        assert np.linalg.norm(stored[fit].root, axis=1) == pytest.approx(
            np.linalg.norm(of_fit.root, axis=1), abs=0.01
        )
    of_cpus = [each for each in everything if each.traits.family == "cpu"]
    table = predictions.by_family(predictions.left_out(of_cpus, terms))
    (again,) = [row for row in table if (row["family"], row["phase"]) == ("CPU", evidence.DECODE)]
    row = evidence.table()["CPU", evidence.DECODE]
    assert (row.machines, row.sources, row.rows) == (again["machines"], again["sources"], again["rows"])
    assert row.median == pytest.approx(float(again["median"]), abs=0.01)


@pytest.mark.parametrize("maker", ["NVIDIA", "AMD", "Apple", "CPU"])
def test_of_each_family_most_rows_lie_in_the_interval_without_their_machine_and_source(maker):
    row = evidence.table()[maker, evidence.DECODE]
    assert row.inside >= 0.85
    assert row.median < 0.15  # an interval as wide as this needs would hold anything
    assert row.width < 2.0
    assert not row.is_few


def test_no_shipped_term_is_of_one_machine_or_one_source(public):
    names = {name for of_fit in shipped().values() for name in of_fit.names}
    devices = {each.traits.device for each in public}
    assert not any(set(name) & devices for name in names)
    assert (data.HERE / SHIPPED).stat().st_size < 130_000


def test_rows_of_others_on_this_kind_of_machine_are_not_the_users_own(public):
    """Many rows of one source say little about another machine of its name."""
    (row, *_) = [each for each in public if each.traits.device == "GeForce RTX 4080"]
    rows = [
        replace(row, traits=replace(row.traits, software="", setup="one source"), at_ms={n: 2 * ms})
        for n, ms in row.at_ms.items()
        for _ in range(20)
    ]
    mine = replace(row.traits, software="", setup="")
    before, after = (Predictor(given).latency_ms([mine], min(row.at_ms))[0] for given in ([], rows))
    assert after.value < 1.5 * before.value
    assert width(after) > 0.8 * width(before)


def test_an_unknown_family_has_a_wide_interval_and_nobody_elses_accuracy():
    unknown = replace(CARD, maker="", generation="")
    known, wide = Predictor().latency_ms([CARD, unknown], 1)
    assert width(wide) > 1.5 * width(known)
    assert "unknown maker" in evidence.how_far_off("unknown")
    assert "too few to say" in evidence.how_far_off("Intel")


def test_the_published_examples_are_those_with_figures(published):
    assert len(published) == 100
    assert {e.traits.device for e in published} == {"GeForce RTX 4090"}
    assert sum(bool(e.first_tokens) for e in published) == 18
    bnb = next(e for e in published if (e.traits.group, e.traits.model) == ("bnb int8", "qwen1.5-7b"))
    assert bnb.traits.read_bytes > 7.1e9  # a byte a weight of the linear layers, two of the lm_head


def test_what_was_measured_of_a_device_sharpens_what_is_predicted_there():
    larger = replace(CPU, model="larger", layers=40, read_bytes=8e9)
    alone = Predictor([]).latency_ms([larger], 1)[0]
    measured = Example(CPU, {100: 300.0}, {})
    known = Predictor([measured]).latency_ms([larger], 1)[0]
    # The low ends are near the limit of the memory.
    assert math.log(known.high / known.value) < 0.5 * math.log(alone.high / alone.value)
    assert known.value == pytest.approx(600, rel=0.15)


def test_another_type_of_weights_and_another_device_are_less_sure():
    measured = [
        Example(replace(CARD, model=f"m{n}", read_bytes=n * 1e9), {1: 5.0 + n}, {}) for n in range(1, 8)
    ]
    rows = [CARD, replace(CARD, type="q2_k"), replace(CARD, device="another card")]
    here, other_type, elsewhere = Predictor(measured).latency_ms(rows, 1)
    assert width(here) < width(other_type) < width(elsewhere)


def test_latency_grows_with_the_context_and_with_the_bytes():
    short, long = (Predictor([]).latency_ms([CARD, replace(CARD, read_bytes=8e9)], n) for n in (1, 10_000))
    assert [each.value for each in long] > [each.value for each in short]
    assert short[1].value > short[0].value


def test_a_cache_that_a_cpu_unpacks_slowly_is_predicted_as_it_was_measured():
    packed = replace(CPU, group="llamacpp flash q8_0", reaches=(Reach(kv_bytes=2.5e5, flops=5e5),))

    def depths(traits: Traits, us_per_token: float) -> list[Example]:
        line = {n: 300 + us_per_token * n / 1e3 for n in (1, 513, 2048)}
        return [Example(traits, {n: ms}, {}) for n, ms in line.items()]

    predictor = Predictor([*depths(CPU, 50.0), *depths(packed, 150.0)])
    plain, slow = (each.value for each in predictor.latency_ms([CPU, packed], 2048))
    assert plain == pytest.approx(300 + 102, rel=0.05)
    assert slow == pytest.approx(300 + 307, rel=0.05)


def test_an_interval_that_ends_at_the_limit_of_the_memory_has_a_slow_end():
    limit_ms = 200.0  # 4 GB at 20 GB/s
    faster = Example(replace(CPU, reaches=()), {1: 170.0}, {})
    found = Predictor([faster] * 5).latency_ms([faster.traits], 1)[0]
    assert found.value == found.low == pytest.approx(limit_ms)
    assert found.high > 1.03 * limit_ms


def test_the_time_to_the_first_token_needs_a_compute_rate():
    short, none = Predictor([]).first_token_ms([CARD, CPU], 2048)
    assert none is None
    assert short is not None
    longer = Predictor([]).first_token_ms([CARD], 8192)[0]
    assert longer is not None
    assert 4 * short.value < longer.value < 8 * short.value  # attention grows with the square
    assert width(longer) > width(short)


def test_a_fitted_line_counts_where_it_meets_what_it_was_fitted_to():
    """A host that is slower than the device hides the growth at first: B of the fitted line is below it."""
    torch = replace(CARD, engine=TORCH, group="hf bf16", read_bytes=2e9, bytes_per_s=3e11)
    predictor = Predictor([], NOTHING)
    n = np.linspace(26, 10_000, 24)
    curve = {int(at): predictor.latency_ms([torch], int(at))[0].value for at in n}
    slope, first = np.polyfit([*curve], [*curve.values()], 1)
    assert first < curve[26] * 0.97
    off = [
        abs(ms / predictor.latency_ms([torch], at)[0].value - 1)
        for at, ms in of_line(first, 1 / slope, 26, 10_000).items()
    ]
    assert max(off) < 1 - first / curve[26]


def test_layers_with_a_window_cost_no_more_past_it():
    window = replace(CARD, reaches=(Reach(4e5, 4e5, window=1024), Reach(1e5, 1e5)))
    at = {n: Predictor([]).latency_ms([window], n)[0].value for n in (1024, 2024, 10_024)}
    alone = replace(CARD, reaches=(Reach(1e5, 1e5),))
    plain = {n: Predictor([]).latency_ms([alone], n)[0].value for n in at}
    assert at[2024] - at[1024] == pytest.approx(plain[2024] - plain[1024])
    assert at[1024] - plain[1024] > 1.5 * (plain[1024] - Predictor([]).latency_ms([alone], 1)[0].value)


def test_pairs_of_a_prompt_are_those_that_each_query_attends_to():
    def counted(reach: Reach, tokens: int) -> float:
        rows = [replace(CARD, reaches=(reach,))]
        return float(_Attention(rows).pairs(np.array([float(tokens)]))[0])

    def summed(reach: Reach, tokens: int) -> float:
        return sum(attended(reach, n) * reach.flops for n in range(1, tokens + 1))

    def attended(reach: Reach, n: int) -> float:
        return cost(Demand(0, 0, 0, 0, 0, (reach,)), Pass(depth=n - 1)).cache

    for reach in (Reach(1, 3), Reach(1, 3, window=10), Reach(1, 3, window=10, chunked=True)):
        for tokens in (1, 9, 10, 11, 25, 40):
            assert counted(reach, tokens) == pytest.approx(summed(reach, tokens))
            rows = _Attention([replace(CARD, reaches=(reach,))])
            assert rows.at(np.array([float(tokens)]))[0][0] == attended(reach, tokens)


def test_of_a_mixture_one_is_less_sure_until_one_was_measured():
    def measured(n: int, kind: str) -> Example:
        of = replace(CARD, model=f"m{n}", read_bytes=n * 1e9, kind=kind)
        return Example(of, {1: 5.0 + 1.3 * n}, {})

    dense = [measured(n, DENSE) for n in range(1, 8)]
    mixture = replace(CARD, kind=EXPERTS)
    sure, unsure = Predictor(dense).latency_ms([CARD, mixture], 1)
    known = Predictor([*dense, measured(5, EXPERTS)]).latency_ms([mixture], 1)[0]
    assert width(sure) < width(known) < width(unsure)


def test_a_prompt_reads_the_experts_of_all_its_tokens():
    one = replace(CARD, kind=EXPERTS, expert_bytes=4e10, expert_share=1 / 16, pass_flops=1e6)
    first = {n: Predictor([], NOTHING).first_token_ms([one], n)[0] for n in (1, 2, 1000)}
    times = {n: found.value for n, found in first.items() if found}
    assert times[1] < times[2] < times[1000]
    assert times[1000] - times[1] == pytest.approx(4e10 * 15 / 16 / 1e12 / 0.75 * 1e3, rel=0.01)


def test_an_experts_few_tokens_take_longer_each_and_attention_as_long_as_in_a_dense_model():
    """llama.cpp computes 512 tokens at once, of which an expert gets its share; kernels compute 32 more."""

    def prompt_ms(tokens: int, **changes: Any) -> float:
        alone = replace(CARD, layers=0, read_bytes=1.0, kind=EXPERTS, **changes)
        found = Predictor([], NOTHING).first_token_ms([alone], tokens)[0]
        assert found is not None
        return found.value

    few, more, whole = (prompt_ms(512, reaches=(), expert_share=share) for share in (1 / 32, 1 / 8, 1.0))
    assert few / more == pytest.approx((1 + 32 / 16) / (1 + 32 / 64), rel=0.01)
    assert more / whole == pytest.approx((1 + 32 / 64) / (1 + 32 / 512), rel=0.01)
    assert prompt_ms(4096, reaches=(), expert_share=1 / 8) == pytest.approx(8 * more, rel=0.01)
    attention = [prompt_ms(65536, pass_flops=1.0, expert_share=share) for share in (1 / 32, 1.0)]
    assert attention[0] == pytest.approx(attention[1])


@pytest.mark.parametrize("maker", ["Intel", "board"])
def test_where_few_rows_exist_a_step_takes_the_plain_formula_and_the_overhead(maker):
    family = "cpu" if maker == "board" else "vulkan"
    few = replace(CARD, maker=maker, family=family, bytes_per_s=2e10, reaches=())
    step, longer = (Predictor([], known).latency_ms([few], 1)[0] for known in (NOTHING, None))
    assert step.value == pytest.approx(formulas.plain_ms(few), rel=0.01)
    assert longer.value == pytest.approx(step.value, rel=0.15)  # a few rows move it little


def test_other_tools_formulas_give_what_their_sources_say():
    """llmfit's comments: a 27B in Q4 on an RTX 4090 at about 40 tokens/s; whichllm's CPUs: 18 billion
    parameters a second of an 8-bit type."""
    large = replace(CARD, type="q4_k_m", pass_flops=54e9, bytes_per_s=1.008e12)
    assert 1e3 / formulas.llmfit_ms(large) == pytest.approx(1008 / 13.5 * 0.55)
    assert 1e3 / formulas.whichllm_ms(CARD) == pytest.approx(1e12 / 4e9 * 0.53)
    assert 1e3 / formulas.whichllm_ms(replace(CPU, type="q8_0")) == pytest.approx(18 / 7.5)
    mixture = replace(CARD, kind=EXPERTS, expert_bytes=6e10, expert_share=1 / 20)  # 3 of 4 GB are experts'
    assert 1e3 / formulas.whichllm_ms(mixture) == pytest.approx(1e12 / 61e9 / 0.195 * 0.53, rel=0.01)
    experts, others = 0.75 * 7.5, 0.25 * 7.5  # billions of parameters
    assert formulas.llmfit_ms(mixture) == pytest.approx(experts * 0.58 + others * 3.2)


def test_the_type_of_weights_changes_no_compute_rate_in_vulkan(public):
    """It unpacks them to 16 bits; ROCm multiplies them in 8, at twice the rate on an RX 6700 XT."""
    card = [
        each.traits for each in public if each.traits.device == "Radeon RX 6700 XT" and each.traits.packed
    ]
    rates = {traits.family: traits.flops for traits in card}
    assert rates["hip"] == 2 * rates["vulkan"]


def test_before_tensor_cores_more_operations_per_byte_read_faster():
    """Unpacking bounds such a GPU: twice the rate is nearly twice the speed, elsewhere none."""

    def ratio(generation: str) -> float:
        slow = replace(CARD, generation=generation, layers=1, reaches=())
        one, two = Predictor([]).latency_ms([slow, replace(slow, flops=2 * CARD.flops)], 1)
        return one.value / two.value

    assert ratio("8.9") == 1
    assert 1.5 < ratio("before 7.0") < 2


def test_parts_in_two_memories_follow_each_other():
    assert read_s([(12e9, 1e12), (30e9, 6e10)]) == pytest.approx(0.512)
    on_host = replace(CPU, family="cpu", model="other")
    both, card, host = Predictor([]).steps([[CARD, on_host], [CARD], [on_host]], 1).ranges
    assert both.value == pytest.approx(card.value + host.value)
    assert 4 + 200 < both.low < both.value < both.high < card.high + host.high


def test_what_is_unknown_of_a_machine_is_common_to_its_variants():
    """Fewer bytes are faster on any machine, though either speed is uncertain."""
    unknown = replace(CARD, device="another card", layers=1)
    fewer = replace(unknown, type="q2_k", read_bytes=2.4e9)
    found = Predictor([]).steps([[unknown], [fewer]], 1)
    whole_ms, fewer_ms = found.ranges
    assert fewer_ms.high > whole_ms.low
    difference = math.log(whole_ms.value / fewer_ms.value)
    assert difference > 1.645 * np.linalg.norm(found.unknowns[0] - found.unknowns[1])


def test_a_range_is_turned_over_with_its_ends():
    assert Range(10, 8, 12.5).inverted(1000) == Range(100, 80, 125)


def test_one_wrong_value_of_twenty_moves_no_fit():
    def measured(n: int) -> Example:
        traits = replace(CARD, setup="they", read_bytes=n * 1e9)
        return Example(traits, {1: 100.0 if n == 7 else 3 + 1.25 * n}, {})

    rows = [measured(n) for n in range(1, 21)]
    found, without = (
        Predictor([], {"gpu ggml": fitted_terms(each, Terms())}).latency_ms([CARD], 1)[0].value
        for each in (rows, [row for row in rows if 100.0 not in row.at_ms.values()])
    )
    assert found == pytest.approx(without, rel=0.01)


def width(found: Range) -> float:
    return found.high / found.low
