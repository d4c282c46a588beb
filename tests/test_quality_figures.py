"""Perplexity, KL divergence and agreement from logits, against plain formulas and bounds."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy

from benchmarks.validity import quality as simulated
from harness.analysis import quality, quality_figures, token_scores
from harness.analysis.token_scores import kept, scores

VOCABULARY, POSITIONS = 300, 40
CHANCE = np.random.default_rng(7)
TARGETS = [int(integer) for integer in CHANCE.integers(VOCABULARY, size=POSITIONS)]
THEIRS = CHANCE.normal(0, 3, (POSITIONS, VOCABULARY)).astype(np.float32)
OURS = THEIRS + CHANCE.normal(0, 0.3, THEIRS.shape).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(float) - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def windows(count: int, spread: float) -> tuple[list[token_scores.Scores], list[np.ndarray]]:
    """Windows whose likelihood differs far more from window to window than from model to model."""
    chance = np.random.default_rng(1)
    found, references = [], []
    for _ in range(count):
        theirs = chance.normal(3 + chance.normal(0, spread), 1, 200)
        change = chance.normal(0.02, 0.01, 200)
        nothing = np.zeros(200)
        found.append(
            token_scores.Scores(theirs + change, change**2, nothing + 1, nothing + 1, change, nothing)
        )
        references.append(theirs)
    return found, references


def test_equal_logits_make_the_vocabulary_the_perplexity():
    flat = scores(np.zeros((POSITIONS, VOCABULARY), np.float32), TARGETS, None)
    assert quality_figures.figures([flat], None)["ppl"]["value"] == pytest.approx(VOCABULARY)


def test_likelihood_divergence_and_agreement_are_those_of_the_plain_formulas():
    found = scores(OURS, TARGETS, kept(THEIRS, TARGETS))
    p, q, rows = softmax(THEIRS), softmax(OURS), np.arange(POSITIONS)
    assert found.nll == pytest.approx(-np.log(q[rows, TARGETS]))
    assert found.change == pytest.approx(q[rows, TARGETS] - p[rows, TARGETS])
    exact = (p * (np.log(p) - np.log(q))).sum(axis=1)
    assert (abs(found.kld - exact) <= found.loss + 1e-7).all()  # of second order
    assert found.kld.mean() == pytest.approx(exact.mean(), abs=1e-5)
    assert (found.same_top == (p.argmax(axis=1) == q.argmax(axis=1))).all()
    first_five = [set(row.argsort()[-5:]) for row in p], [set(row.argsort()[-5:]) for row in q]
    assert found.same_top5 == pytest.approx([len(a & b) / 5 for a, b in zip(*first_five, strict=True)])


def test_a_model_does_not_diverge_from_itself():
    found = scores(THEIRS, TARGETS, kept(THEIRS, TARGETS))
    assert abs(found.kld).max() < 1e-6
    assert found.same_top.min() == found.same_top5.min() == 1
    assert abs(found.change).max() == 0


def test_the_loss_of_a_kept_reference_is_stated_and_small():
    found = scores(OURS, TARGETS, kept(THEIRS, TARGETS))
    exact = (softmax(THEIRS) * np.log(softmax(THEIRS) / softmax(OURS))).sum(axis=1).mean()
    assert abs(found.kld.mean() - exact) <= quality_figures.loss_nats([found]) < 1e-4


def test_slices_do_not_change_what_is_found(monkeypatch):
    whole = scores(OURS, TARGETS, kept(THEIRS, TARGETS))
    monkeypatch.setattr(token_scores, "SLICE_BYTES", 8 * VOCABULARY * 7)
    in_slices = scores(OURS, TARGETS, kept(THEIRS, TARGETS))
    assert (whole.kld == in_slices.kld).all()
    assert (whole.nll == in_slices.nll).all()


def test_another_vocabulary_is_refused_with_both_sizes():
    with pytest.raises(token_scores.OtherVocabulary, match="300 tokens, and the reference's 299"):
        scores(OURS, TARGETS, kept(THEIRS[:, :-1], [0] * POSITIONS))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_the_first_position_that_is_no_number_is_found(odd):
    logits = THEIRS.copy()
    assert token_scores.first_not_finite(logits) is None
    logits[11, 5] = logits[30, 0] = odd
    assert token_scores.first_not_finite(logits) == 11


def test_the_change_of_perplexity_is_known_far_better_than_the_perplexity():
    found = quality_figures.figures(*windows(64, spread=0.5))
    ratio, ppl = found["ln_ppl_ratio"], found["ppl"]
    assert ratio["value"] == pytest.approx(0.02, abs=0.002)
    assert 0 < ratio["standard_error"] < 0.001 < 0.03 < ppl["standard_error"] / ppl["value"]
    assert ratio["low"] < ratio["value"] < ratio["high"]


def test_intervals_hold_the_value_and_grow_with_fewer_windows():
    many, few = (quality_figures.figures(*windows(count, spread=0.5)) for count in (64, 8))
    for name in ("ppl", "kld_mean", "kld_median", "kld_p99"):
        for figures in (many, few):
            assert figures[name]["low"] <= figures[name]["value"] <= figures[name]["high"]
        assert few[name]["high"] - few[name]["low"] > many[name]["high"] - many[name]["low"]
    assert many["kld_max"] == {"value": many["kld_max"]["value"], "low": None, "high": None}


def test_one_window_has_figures_and_no_interval():
    found = quality_figures.figures(*windows(1, spread=0.5))
    assert found["ppl"]["value"] > 0
    assert all(figure["low"] is None and figure["high"] is None for figure in found.values())


def test_a_broken_model_still_has_a_perplexity():
    logits = np.zeros((2, 10), np.float32)
    logits[:, 1] = 5000
    found = quality_figures.figures([scores(logits, [0, 0], None)], None)
    assert found["ppl"]["value"] == pytest.approx(math.exp(quality_figures.HIGHEST_NLL))


def test_a_change_of_quality_is_that_of_the_same_windows():
    chance = np.random.default_rng(3)
    base = list(chance.normal(3, 0.5, 64))
    new = [each + change for each, change in zip(base, chance.normal(0.01, 0.004, 64), strict=True)]
    change = quality_figures.change(base, new, 0.9)
    assert change.cost == change.middle == pytest.approx(0.01, abs=0.002)
    low, high = change.ends
    assert low < change.cost < high < low + 0.003
    assert change.p < 1e-6
    same = quality_figures.change(base, base, 0.9)
    assert (same.cost, same.p) == (0, 1)
    assert quality_figures.change([3.0], [3.03], 0.9).ends is None


def test_the_interval_of_a_change_of_quality_covers_it_with_few_windows_too():
    """The rates of the benchmark in small; a bootstrap covers 62% of three windows and 75% of four."""
    for count in (3, 8):
        assert 0.86 <= simulated.covered(count, 500)["ln PPL, 90%"] <= 0.94


def test_intervals_of_a_stored_score_are_those_of_its_windows():
    golden = json.loads((Path(__file__).parent / "golden" / "scored" / "record.json").read_text())
    stored = golden["quality"]
    for figure in stored["figures"].values():
        figure |= {"low": figure["value"], "high": figure["value"]}
    found = quality.row(golden)["figures"]["ppl"]
    nll = np.array(stored["means"]["nll"])
    t = scipy.stats.t(len(nll) - 1).ppf(0.975)
    half = t * nll.std(ddof=1) / math.sqrt(len(nll))
    ends = [math.exp(nll.mean() + sign * half) for sign in (-1, 1)]
    assert [found["low"], found["high"]] == pytest.approx(ends)
