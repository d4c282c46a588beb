"""Sweeps of prefill passes: synthetic ones of known truth, and the eighteen published ones."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.validity import prefill as simulated
from benchmarks.validity import processes
from harness import records
from harness.analysis import prefill as prefills
from harness.analysis import prefill_rows
from harness.analysis.prefill import Prefill, analyse
from harness.records.files import write_columns
from harness.report import exports, page
from harness.theory import floors
from harness.theory.floors import Ceiling, Demand, Pass, Reach, cost

SWEEP = np.unique(np.geomspace(1, 8192, 48).round())
DENSE = np.arange(1.0, 501.0)


def swept(n: np.ndarray, ms: np.ndarray, rounds: int = 5, noise: float = 0.005, **known: int) -> Prefill:
    chance = np.random.default_rng(0)
    return analyse(prefills.by_depth([simulated.table(n, ms, rounds, chance, noise)])[0], **known)


def first(found: Prefill, n: int):
    return next(first_token for first_token in found.first_tokens if first_token.n == n)


def test_plateau_slope_ridge_and_attention_are_recovered_from_a_sweep():
    found = swept(SWEEP, np.maximum(20, 0.1 * SWEEP + 2e-5 * SWEEP**2))
    assert found.plateau.value == pytest.approx(20, rel=0.02)
    assert found.slope.value == pytest.approx(0.1, rel=0.1)
    assert found.quadratic_ms == pytest.approx(2e-5, rel=0.1)
    assert found.ridge.value == pytest.approx(192.6, rel=0.1)  # 0.1 n + 2e-5 n^2 = 20
    assert found.ridge.ends[0] < 192.6 < found.ridge.ends[1]


def test_a_ridge_is_found_alike_where_computing_follows_reading_instead_of_overlapping_it():
    found = swept(SWEEP[SWEEP <= 2000], 20 + 0.1 * SWEEP[SWEEP <= 2000])
    assert found.ridge.value == pytest.approx(200, rel=0.05)


def test_without_attention_no_quadratic_term_is_made_up():
    assert swept(SWEEP, np.maximum(20, 0.1 * SWEEP)).quadratic_ms is None


@pytest.mark.parametrize("n", [DENSE, 2.0 ** np.arange(11)])
def test_without_noise_the_ridge_is_exact_also_with_three_lengths_past_it(n):
    found = swept(n, np.maximum(20, 0.1 * n), rounds=1, noise=0)
    assert found.ridge.value == pytest.approx(200, rel=1e-4)


@pytest.mark.parametrize("tile", [43, 52, 58])
def test_the_last_tile_of_a_sweep_is_no_other_kernel(tile):
    tiles = np.ceil(DENSE / tile) * tile - (tile - 1) / 2
    found = swept(DENSE, np.maximum(20, 0.1 * tiles), rounds=1, noise=0.001)
    assert found.kernel_from_n == 1
    assert found.ridge.value == pytest.approx(200, rel=0.05)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("name", simulated.LENGTHS)
def test_the_intervals_cover_the_truth(name, tiled):
    """Of 20 sweeps; docs/validation.md has the rates of 100."""
    assert min(simulated.coverage(name, tiled, 20)) >= 0.8


def test_the_intervals_of_several_processes_cover_the_mean_one():
    """Of 20 cells; docs/validation.md has the rates of 120. With the passes of all as independent values one
    in four covers the plateau, half of them the slope."""
    for name, hits in processes.swept(cells=1, processes=5, spread=0.01, campaigns=20).items():
        assert None not in hits
        assert sum(hits) / len(hits) >= 0.85, name


def test_of_two_processes_alone_a_ridge_has_no_interval():
    found = processes.swept(cells=1, processes=2, spread=0.01, campaigns=1)
    assert {hit for hits in found.values() for hit in hits} == {None}


def test_lengths_that_one_process_lacks_do_not_bend_the_curve():
    """A process that is 5% slower and has every other length leaves no steps in a smooth curve."""
    chance = np.random.default_rng(0)
    ms = np.maximum(20, 0.1 * SWEEP)
    quick = simulated.table(SWEEP, ms, 5, chance, 0.001)
    slow = simulated.table(SWEEP[::2], 1.05 * ms[::2], 5, chance, 0.001)
    passes = prefills.by_depth([quick, slow])[0]
    found = analyse(passes)
    assert found.steps == ()
    assert found.plateau.value == pytest.approx(20 * 1.05**0.5, rel=0.002)
    assert found.plateau.processes == pytest.approx((20, 21), rel=0.005)
    deeper = {name: column[:] for name, column in slow.items()} | {"depth": [1024] * len(slow["n"])}
    assert analyse(prefills.by_depth([quick, deeper])[1024]).plateau.processes == ()


@pytest.mark.parametrize(
    ("n", "ms", "reason"),
    [
        (DENSE, np.full(500, 20.0), "hardly grows"),
        (DENSE, 20 + 0.02 * DENSE, "not reached: at 500 tokens computing takes 5"),
        (np.arange(256.0, 2049, 64), 0.1 * np.arange(256.0, 2049, 64), "no plateau"),
        (np.array([1.0, 64, 512]), np.array([20.0, 20, 50]), "fewer than 8 lengths"),
    ],
)
def test_a_ridge_that_was_not_reached_is_null_with_the_reason(n, ms, reason):
    found = swept(n, ms)
    assert found.ridge is None
    assert reason in found.ridge_reason


def test_a_sweep_that_ends_on_its_plateau_extrapolates_nothing():
    found = swept(DENSE, np.full(500, 20.0))
    assert {first_token.how for first_token in found.first_tokens} == {None}
    assert "hardly grows" in first(found, 512).reason


def test_a_step_past_512_tokens_is_found_and_a_single_slow_pass_is_none():
    n = np.unique(np.concatenate([np.geomspace(1, 2048, 30).round(), [510, 511, 512, 513, 514, 515]]))
    ms = np.maximum(20, 0.1 * n) + 15 * (n > 512)
    (step,) = swept(n, ms, chunk=512).steps
    assert step.n == 513
    assert step.jump_ms == pytest.approx(15.1, abs=1)
    slow = np.maximum(20, 0.1 * DENSE)
    slow[99] *= 3
    assert swept(DENSE, slow).steps == ()


def test_figures_are_those_of_the_last_kernel_where_a_stack_changes_to_another():
    ms = np.where(DENSE <= 32, 12 + 0.7 * DENSE, np.maximum(34, 20 + 0.1 * DENSE))
    found = swept(DENSE, ms, rounds=1)
    assert found.kernel_from_n in range(26, 34)  # where the first kernel is as slow as the second
    assert found.plateau.value == pytest.approx(34, rel=0.02)
    assert found.ridge.value == pytest.approx(340, rel=0.05)


def test_a_ttft_is_measured_within_the_lengths_extrapolated_near_them_and_null_far_from_them():
    found = swept(DENSE[::4], np.maximum(20, 0.1 * DENSE[::4]))
    assert (first(found, 512).how, first(found, 2048).how) == ("extrapolated", "extrapolated")
    assert first(found, 512).ms.value == pytest.approx(51.2, rel=0.02)
    low, high = first(found, 2048).ms.ends
    assert low < 204.8 < high
    assert first(found, 32768).ms is None
    assert "attention" in first(found, 32768).reason
    longer = swept(SWEEP, np.maximum(20, 0.1 * SWEEP + 2e-5 * SWEEP**2))
    assert first(longer, 2048).how == "measured"
    assert first(longer, 32768).how == "extrapolated"
    assert first(longer, 32768).ms.value == pytest.approx(0.1 * 32768 + 2e-5 * 32768**2, rel=0.1)


def test_a_prompt_of_several_chunks_takes_several_passes():
    found = swept(DENSE, np.maximum(20, 0.1 * DENSE), chunk=512)
    assert first(found, 2048).ms.value == pytest.approx(4 * 51.2, rel=0.02)
    additive = swept(DENSE, 20 + 0.1 * DENSE, chunk=512)
    assert first(additive, 2048).ms.value == pytest.approx(4 * 71.2, rel=0.02)


def test_nothing_is_extrapolated_across_a_known_change_of_kernel():
    found = swept(DENSE, np.maximum(20, 0.1 * DENSE), changes_after=1024)
    assert first(found, 512).how == "extrapolated"
    assert "past 1,024 tokens" in first(found, 2048).reason


def test_a_pass_without_a_positive_latency_is_refused():
    with pytest.raises(ValueError, match="no positive latency"):
        swept(np.array([1.0, 2.0]), np.array([1.0, 0.0]))


@pytest.mark.parametrize("lm_head", ["every", "last"])
def test_theorys_ridge_is_where_its_least_time_leaves_the_reading_of_weights(lm_head):
    demand = Demand(10**9, 10**8, 2e9, 2e8, 2e8, (Reach(1e5, 4e5),))
    ceiling = Ceiling(1e12, 2e14)
    ridge = floors.prefill_ridge(demand, ceiling, lm_head)
    for n in (int(ridge), int(ridge) + 1):
        work = cost(demand, Pass(n, outputs=n if lm_head == "every" else 1))
        assert (work.flops / ceiling.flops > work.bytes / ceiling.bytes_per_s) == (n > ridge)
        assert floors.prefill_floor_s(demand, ceiling, n, lm_head) == ceiling.least_s(work)


def test_a_pass_at_depth_attends_to_what_the_cache_holds():
    demand = Demand(10**9, 10**8, 2e9, 2e8, 2e8, (Reach(1e5, 4e5),))
    whole, before, after = (cost(demand, each) for each in (Pass(300), Pass(200), Pass(100, depth=200)))
    assert after.bytes == whole.bytes
    assert after.flops == pytest.approx(whole.flops - before.flops + 2 * demand.lm_head_params)


def test_a_model_in_two_memories_has_no_mbu_of_prefill():
    record = json.loads((Path(__file__).parent / "golden/prefill/record.json").read_text())
    n = np.tile(SWEEP, 3)
    rounds, processes = np.repeat([0, 1, 2], len(SWEEP)), np.zeros(len(n), np.int64)
    depths = {0: prefills.Passes(n, 5.0 + 0.01 * n, rounds, processes)}
    placed = {"tensors": {"CPU": 3}, "bytes": {"CPU": 10**6}, "misplaced": []}
    for device, has_mbu in (("cpu", True), ("GPU-1", False)):
        record |= {"device": device, "loaded": record["loaded"] | {"placement": placed}}
        found = prefill_rows.row(record, depths, prefill_rows.analysed(record, depths), 1e11)
        assert all((each["mbu_measured"] is not None) == has_mbu for each in found["utilisation"])
        assert found["utilisation"]


@pytest.fixture(scope="module")
def sweeps(published) -> dict[str, dict]:
    """What was found in each published sweep, by stack and variant."""
    rows = {f"{row['stack']} {row['variant']}": row for row in published.cells if row["prefill"]}
    assert not [f for row in rows.values() for f in row["flags"] if f["code"].startswith("prefill")]
    return {name: row["prefill"] for name, row in rows.items()}


def test_the_eighteen_published_sweeps_are_analysed_without_a_false_alarm(sweeps):
    assert len(sweeps) == 18
    for found in sweeps.values():
        assert found["plateau_ms"] > 0
        assert found["slope_ms"] > 0
        assert (found["ridge_n"] is None) == (found["ridge_reason"] is not None)
        assert found["comparison"]
        assert all(0 < each["mfu"] < 1 and 0 < each["mbu"] < 1 for each in found["utilisation"])


GGUFS = "q2_k q3_k_m q4_0 q4_k_m q5_0 q5_k_m q6_k q8_0"
EXLLAMAV2 = ("gptq int4-exllamav2", "autoawq exllamav2", "autoawq exllamav2-fused")
# By variant: the first length of its last kernel, its ridge, both as a range, and what is said of it.
LATE = ((25, 33), (350, 500), "past 32 tokens to dequantizing")
FOUND = {f"llamacpp {name}": LATE for name in GGUFS.split()}
FOUND |= dict.fromkeys(EXLLAMAV2, ((51, 51), None, "past 50 tokens"))
FOUND |= {"autoawq exllama": (None, (0, 10), ""), "autoawq gemm": (None, (50, 80), "earlier than in theory")}


@pytest.mark.parametrize("name", FOUND)
def test_published_kernels_change_and_become_compute_bound_where_they_do(sweeps, name):
    found, (kernel_from_n, ridge_n, said) = sweeps[name], FOUND[name]
    for key, ends in (("kernel_from_n", kernel_from_n), ("ridge_n", ridge_n)):
        assert ends is None or ends[0] <= found[key] <= ends[1]
    assert said in found["comparison"]
    if name.startswith("llamacpp"):
        assert 30 < found["plateau_ms"] < 40
    if name in EXLLAMAV2:
        assert 51 in [step["n"] for step in found["steps"]]


def test_a_published_ridge_lies_in_its_interval_and_before_the_one_of_theory(sweeps):
    bf16 = sweeps["hf bf16"]
    assert bf16["ridge_ci95"][0] < bf16["ridge_n"] < bf16["ridge_theory"]["last"]


def test_published_bitsandbytes_does_not_become_compute_bound_within_500_tokens(sweeps):
    for name in ("bnb int4", "bnb int8"):
        assert sweeps[name]["ridge_n"] is None
        assert sweeps[name]["ridge_reason"].startswith("not reached")


def test_a_gemm_that_changes_at_1024_tokens_has_no_ttft_of_2048(sweeps):
    by_n = {each["n"]: each for each in sweeps["autoawq gemm"]["ttft"]}
    assert by_n[512]["how"] == "extrapolated"
    assert by_n[2048]["ms"] is None
    assert "1,024" in by_n[2048]["reason"]


@pytest.fixture
def bf16(published) -> records.Stored:
    return next(
        result for result in published.stored if result.record["cell"] == "qwen1.5-7b.hf.bf16.published"
    )


def test_passes_faster_than_the_machine_allows_are_flagged(bf16):
    passes = prefills.by_depth([records.prefill_series(bf16)])[0]
    assert prefill_rows.faster_than_possible(bf16.record, {0: passes}, None) == []
    (flag,) = prefill_rows.faster_than_possible(bf16.record, {0: replace(passes, ms=passes.ms / 3)}, None)
    assert flag.code == "prefill_faster_than_limit"
    assert "1 tokens in 6" in flag.detail or "1 token in 6" in flag.detail


def test_rounds_and_depths_are_read_and_a_file_without_them_has_one_pass_at_depth_zero(bf16, tmp_path):
    columns = records.prefill_series(bf16)
    assert set(columns["depth"]) == {0}
    assert set(columns["round"]) == {1}
    own = {"round": [1, 1, 2, 2], "depth": [0, 512, 0, 512], "n": [8] * 4, "latency_ns": [5, 6, 7, 8]}
    write_columns(tmp_path / "prefill.parquet", own)
    assert records.prefill_series(records.Stored(tmp_path, bf16.record)) == own
    depths = prefills.by_depth([own, own])
    assert depths[512].ms.tolist() == [6e-6, 8e-6] * 2
    assert len(set(depths[0].rounds)) == 4  # the rounds of two repeats


def test_the_chapter_draws_both_conventions_of_the_lm_head_and_the_measured_ridge(published):
    time, rate = page.figures_chapters(published)["prefill"].figures["qwen1.5-7b"]
    for figure in (time, rate):
        kinds = [trace["meta"].get("kind") for trace in figure.data]
        assert kinds.count(None) == kinds.count("every") == kinds.count("last") == 18
        assert kinds.count("ridge") == 16
    text = exports.markdown(published)
    assert "| qwen1.5-7b autoawq gemm on cuda | reported | 10.8 |" in text
    assert "90.8\\*" in text
    assert "- autoawq gemm: earlier than in theory" in text
