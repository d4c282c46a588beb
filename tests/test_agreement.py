"""Is it the same model? Logits of known differences, and what is said of them."""

import json
import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from harness.analysis import agreement, own_weights
from harness.report import quality as report
from harness.theory.decoder import dense_fields
from harness.theory.hf_config import SHAPES

PROMPT = [0, 25]


def drawn(positions: int = 25, vocabulary: int = 512, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(positions, vocabulary)).astype(np.float32)


def compared(reference: Any, variant: Any, asked: list[list[int]] | None = None) -> list[dict]:
    return agreement.compare(
        reference, range(len(reference)), variant, range(len(variant)), asked or [[0, len(reference)]]
    )


def record(depths: list[dict], options: dict | None = None, **more: Any) -> dict:
    """A checked record with the keys that readers use."""
    began = "2026-01-01T00:00:00+00:00"
    cell = {"cell": "m.s.v", "content_key": "k", "stack": "llamacpp", "variant": "v"}
    run = {"campaign": {"id": began}, "started_utc": began, "outcome": "ok"}
    place = {"machine": {"slug": "here"}, "asked": {"device": "cpu"}, "options": options or {}}
    model = {"model": {"name": "m", "weights": {"kind": "path", "quant": "f16"}}}
    check = {"speaks_for": ["k"], "reference": {"name": "hf fp32"}, "depths": depths}
    return cell | run | place | model | {"check": check} | more


def test_equal_logits_are_not_off_at_all():
    logits = drawn()
    (depth,) = compared(logits, logits.copy())
    assert depth["n"] == depth["positions"] == 25
    assert depth["relative_error"] == depth["relative_error_max"] == depth["kl_nats"] == 0
    assert depth["top1_agreement"] == 1
    assert depth["near_ties"] == 0


def test_the_error_is_the_length_of_the_difference_over_the_references():
    logits = drawn(2)
    variant = logits.copy()
    variant[0] *= 1.1
    (depth,) = compared(logits, variant)
    assert depth["relative_error"] == pytest.approx(0.05, rel=1e-5)
    assert depth["relative_error_max"] == pytest.approx(0.1, rel=1e-5)


def test_the_divergence_is_that_of_the_distributions_in_nats():
    reference, variant = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    (depth,) = compared(reference.astype(np.float32), 5 + variant.astype(np.float32))
    assert depth["kl_nats"] == pytest.approx(0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75), rel=1e-5)


def test_two_models_with_nothing_in_common_are_wrong_whatever_their_types():
    depths = compared(drawn(), drawn(seed=1))
    assert depths[0]["relative_error"] == pytest.approx(np.sqrt(2), rel=0.05)
    assert depths[0]["top1_agreement"] < 0.2
    for quant in ("f16", "q8_0", "q4_0", "q2_k"):
        word, reason = agreement.verdict(record(depths, {"quant": quant}))
        assert word == "wrong"
        assert "it is not the same model" in str(reason)


@pytest.mark.parametrize(
    ("off", "right", "wrong"),
    [(0.03, "bf16", None), (0.1, "q8_0", "f16"), (0.1, "int8", "fp32"), (0.3, "nf4", "q8_0")],
)
def test_an_error_is_judged_by_the_bits_there_are(off: float, right: str, wrong: str | None):
    logits, noise = drawn(), drawn(seed=1)
    depths = compared(logits, np.float32((1 - off**2) ** 0.5) * logits + np.float32(off) * noise)
    assert agreement.verdict(record(depths, {"quant": right})) == ("agrees", None)
    if wrong:
        assert agreement.verdict(record(depths, {"dtype": wrong}))[0] == "wrong"


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"quant": "f16", "type_k": "f16", "type_v": "q4_0"}, 4),
        ({"quant": "q3_k_m"}, 3),
        ({"quant": "int8", "dtype": "bf16"}, 8),
        ({"quant": "nf4"}, 4),
        ({"dtype": "fp16"}, 16),
        ({"quant": None}, 8),
    ],
)
def test_the_coarsest_type_counts_the_cache_included_and_the_file_where_none_is_asked(options, bits):
    of = record([], options)
    of["model"]["weights"]["quant"] = "q8_0"
    assert agreement.bits(of) == bits


def test_logits_of_the_same_weights_may_not_be_larger_than_theirs():
    logits = drawn(50)
    for by, word in ((1.0, "agrees"), (1.005, "agrees"), (1.02, "wrong"), (0.98, "wrong")):
        depths = compared(logits, logits * np.float32(by))
        assert agreement.verdict(record(depths, {"dtype": "bf16"}))[0] == word
        own = {"depths": depths, "settings": [], "values": None}
        told = record(compared(logits, logits), {"quant": "q2_k"})
        told["check"]["own"] = own
        assert agreement.verdict(told)[0] == word
        assert agreement.verdict(record(depths, {"quant": "q2_k"})) == ("agrees", None)
    assert "logits are 2.0% smaller than those of its own weights" in str(agreement.verdict(told)[1])
    without = [{key: value for key, value in depth.items() if key != "scale"} for depth in depths]
    older = record(without, {"dtype": "bf16"})
    assert agreement.verdict(older) == ("agrees", None)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"quant": "q4_0"}, 0.1),
        ({"quant": "q4_k_m"}, 0.2),
        ({"quant": "iq2_xxs"}, 0.2),
        ({"quant": "int8"}, 0.15),
        ({"quant": "nf4"}, 0.06),
        ({"quant": "q4_0", "type_k": "q8_0", "type_v": "f16"}, 0.15),
        ({"quant": "nf4", "type_v": "q4_0"}, 0.6),
        ({"quant": None}, 0.1),
    ],
)
def test_against_its_own_weights_arithmetic_alone_explains_an_error(options: dict, allowed: float):
    of = record([], options)
    of["model"]["weights"]["quant"] = "q8_0"
    assert own_weights.allowed_own_weights(of) == allowed
    logits, noise = drawn(), drawn(seed=1)
    for off, word in ((allowed * 0.9, "agrees"), (allowed * 1.1, "wrong")):
        depths = compared(logits, np.float32((1 - off**2) ** 0.5) * logits + np.float32(off) * noise)
        of["check"] |= {"depths": compared(logits, logits), "own": {"depths": depths, "settings": []}}
        assert agreement.verdict(of)[0] == word


@pytest.mark.parametrize(
    ("quant", "values", "said"),
    [
        ("q4_0", {"row_error": 0.3}, None),
        ("q4_0", {"row_error": 1.41}, "a row of m is 141% off the 16-bit weights, and q4_0 explains 70%"),
        ("q8_0", {"row_error": 0.3}, "a row of m is 30% off the 16-bit weights, and q8_0 explains 20%"),
        ("q2_k", {"error": 0.02}, "v is 2% off the 16-bit weights, and q2_k explains 1%"),
        ("q2_k", {"missing": ["b"]}, "its file lacks b of the 16-bit weights"),
    ],
)
def test_a_file_whose_values_its_type_does_not_explain_is_wrong(quant: str, values: dict, said: str | None):
    logits = drawn()
    of = record(compared(logits, logits), {"quant": quant})
    found = {
        "matrices": [{"name": "m", "error": 0.0, "row_error": values.get("row_error", 0.0)}],
        "vectors": [{"name": "v", "error": values.get("error", 0.0)}],
        "missing": values.get("missing", []),
    }
    of["check"]["own"] = {"depths": compared(logits, logits), "settings": [], "values": found}
    word, reason = agreement.verdict(of)
    assert word == ("wrong" if said else "agrees")
    assert said is None or str(reason).startswith(said)


def test_the_table_shows_the_own_error_with_what_is_allowed_and_why_there_is_none():
    logits, noise = drawn(), drawn(seed=1)
    own = {"depths": compared(logits, logits + np.float32(0.04) * noise), "settings": [], "values": None}
    known, failed = (record(compared(logits, logits), {"quant": "q4_k_m"}) for _ in range(2))
    known["check"]["own"] = own
    failed["check"]["own_failure"] = "is gemma2, which is not dequantized here"
    rows = [agreement.row(each) | {"name": name} for name, each in (("a", known), ("b", failed))]
    at = report.headings(rows).index("own weights")
    assert [report.cells(row, rows)[at] for row in rows] == ["4.00% (20%)", "-"]
    assert report.agreement_notes(rows) == [
        "b: not compared with its own weights: is gemma2, which is not dequantized here"
    ]
    assert "own weights" not in report.headings(rows[1:])


def test_settings_are_compared_but_for_the_window():
    shape = dense_fields(SHAPES["tiny-llama"])
    assert own_weights.other_settings(shape | {"window": 4096, "rope_theta": 10000.0000001}, shape) == []
    assert own_weights.other_settings(shape | {"rope_theta": 1e6, "layers": 1}, shape) == [
        "layers is 1, and 2 in the 16-bit weights",
        "rope_theta is 1000000.0, and 10000.0 in the 16-bit weights",
    ]


def test_one_wrong_depth_is_enough():
    logits = drawn(50)
    variant = logits.copy()
    variant[25:] = drawn(25, seed=1)
    word, reason = agreement.verdict(record(compared(logits, variant, [PROMPT, [25, 50]])))
    assert word == "wrong"
    assert "n = 50" in str(reason)


def test_a_near_tie_that_fell_the_other_way_is_counted_apart():
    logits = np.zeros((3, 8), np.float32)
    logits[:, 0], logits[:, 1] = 10, (9.995, 9, 9.995)
    variant = logits.copy()
    variant[:2, 1] = 10.01
    (depth,) = compared(logits, variant)
    assert depth["top1_agreement"] == pytest.approx(1 / 3)
    assert depth["near_ties"] == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_said_and_wrong(value: float):
    logits = drawn()
    variant = logits.copy()
    variant[3, 7] = value
    depths = compared(logits, variant)
    assert json.loads(json.dumps(depths, allow_nan=False))[0]["not_finite"] == 1
    word, reason = agreement.verdict(record(depths))
    assert word == "wrong"
    assert reason == "NaN or infinite logits at 1 of 25 positions up to n = 25"


def test_of_a_reference_that_is_no_number_nothing_is_said_against_the_variant():
    logits = drawn()
    logits[3, 7] = np.nan
    word, reason = agreement.verdict(record(compared(logits, drawn())))
    assert word == "unchecked"
    assert "reference" in str(reason)


def test_two_vocabularies_are_not_compared():
    with pytest.raises(ValueError, match="511 logits per position, the reference has 512"):
        compared(drawn(), drawn(vocabulary=511))


def test_rows_are_matched_by_position_and_a_window_that_one_lacks_is_left_out():
    logits = drawn(75)
    positions = [*range(25), *range(275, 325)]
    windows = [PROMPT, [275, 300], [300, 325]]
    found = agreement.compare(logits, positions, logits[:50], positions[:50], windows)
    assert [(depth["n"], depth["relative_error"]) for depth in found] == [(25, 0), (300, 0)]
    without = np.concatenate([logits[:25], logits[50:]])
    found = agreement.compare(logits, positions, without, [*range(25), *range(300, 325)], windows)
    assert [(depth["n"], depth["relative_error"]) for depth in found] == [(25, 0), (325, 0)]
    shifted = [*range(25), *range(276, 301)]
    assert [d["n"] for d in agreement.compare(logits, positions, logits[:50], shifted, windows)] == [25]


def test_windows_cover_the_prompt_and_the_end_and_never_meet():
    for prompt in (1, 25, 100, 290, 2_500):
        for new in (1, 2, 24, 25, 26, 250, 275, 276, 300, 301, 325, 2_050, 2_090, 2_100, 2_101, 9_975):
            found = agreement.windows(prompt, prompt + new)
            assert found[0] == [max(0, prompt - agreement.WINDOW), prompt]
            assert found[-1][1] == prompt + new
            for (_, end), (first, after) in pairwise(found):
                assert end <= first < after <= prompt + new
                assert after - first <= agreement.WINDOW
    assert agreement.windows(25, 2_200) == [PROMPT, [275, 300], [2_075, 2_100], [2_175, 2_200]]


def test_past_2100_each_depth_is_at_most_twice_the_one_before_it_and_a_window():
    for tokens in (3_000, 4_224, 4_225, 10_000, 100_000):
        ends = [end for _, end in agreement.windows(25, tokens)]
        assert ends[:3] == [25, 300, 2_100]
        assert all(after <= 2 * end + agreement.WINDOW for end, after in pairwise(ends[2:]))
    assert ends == [25, 300, 2_100, 4_200, 8_400, 16_800, 33_600, 67_200, 100_000]


def test_a_table_shows_the_prompt_two_fixed_depths_and_the_deepest_of_each_check():
    def check(*compared: int) -> dict:
        return {"depths": [{"n": n} for n in compared], "own": []}

    deep = check(25, 300, 2_100, 4_200, 8_400, 10_000)
    shown = [25, 300, 2_100, 10_000]
    assert report.headings([deep])[2:-2] == [f"{of} n={n:,}" for n in shown for of in ("error", "top-1")]
    late = report.headings([deep, check(25, 300, 2_100, 4_200), check()])
    assert [heading for heading in late if "error" in heading][-2:] == ["error n=4,200", "error n=10,000"]


def test_logits_are_compared_in_64_bits_one_position_at_a_time():
    logits = drawn(50, 20_000)
    variant = logits * np.float32(1.01)
    tracemalloc.start()
    (depth,) = compared(logits, variant)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert depth["relative_error"] == pytest.approx(0.01, rel=1e-3)
    assert peak_bytes < 12 * 8 * 20_000


def test_a_wrong_check_makes_the_cells_it_speaks_for_invalid_and_a_later_one_lifts_it():
    logits = drawn()
    bad, good = compared(logits, drawn(seed=1)), compared(logits, logits)
    wrong = agreement.row(record(bad))
    failed = agreement.row(record([], outcome="oom", started_utc="2026-01-02T00:00:00+00:00"))
    right = agreement.row(record(good, started_utc="2026-01-03T00:00:00+00:00"))

    def told(*checks: dict) -> list[dict]:
        rows = [
            {"content_key": key, "status": status, "reasons": [], "flags": [], "disturbed": "cpu"}
            for key, status in (("k", "ok"), ("k", "oom"), ("other", "ok"))
        ]
        agreement.apply_checks(rows, agreement.latest_checks(checks))
        return rows

    first, second, third = told(failed, wrong)
    assert (first["status"], second["status"], third["status"]) == ("invalid", "oom", "ok")
    assert first["flags"] == [{"code": "weights_disagree", "detail": first["reasons"][0]}]
    assert (first["weights_check"], third["weights_check"]) == ("wrong", None)
    assert (first["disturbed"], third["disturbed"]) == (None, "cpu")  # not for the machine's doing alone
    assert [row["status"] for row in told(right, wrong, failed)] == ["ok", "oom", "ok"]
    assert told(failed)[0]["weights_check"] == "failed"
