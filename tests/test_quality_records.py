"""Records of scores: what is read of them, where it is shown, and how two are compared."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_record import record as measured
from golden_record import write_record

from harness.analysis import quality
from harness.analysis.figures import FAMILIES
from harness.compare import series
from harness.compare.judge import Runs, judged
from harness.dataset.study import Study, load_study
from harness.records import Stored
from harness.records.kinds import wrong_with
from harness.report import quality as report
from harness.report import tables
from harness.report.timed_rows import with_prompts

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "scored" / "record.json").read_text())


def scored(**changes: object) -> dict[str, Any]:
    """The golden score with keys of its `quality` changed; null removes one."""
    found = copy.deepcopy(GOLDEN)
    found["quality"] |= changes
    found["quality"] = {key: value for key, value in found["quality"].items() if value is not None}
    return found


SPEED = measured()
OF_SPEED = {key: SPEED[key] for key in ("stack", "variant", "device", "machine", "model", "environment")}
OTHER_TEXT = GOLDEN["quality"]["text"] | {"ids_sha256": "0" * 64}
NOT_FINITE = {"window": 2, "position": 300}


def score_of_speed(top: dict[str, Any] | None = None, **changes: object) -> dict[str, Any]:
    """A score of what SPEED measured, with these keys of the record and of its `quality` changed."""
    return scored(**changes) | copy.deepcopy(OF_SPEED) | (top or {})


def studied(*scores: dict[str, Any]) -> Study:
    """The study of SPEED and of these scores."""
    return load_study([Stored(Path(str(number)), each) for number, each in enumerate((SPEED, *scores))])


def score(nll: Any) -> Any:
    """The row of the golden score, with these nats per token in its windows."""
    return quality.row(scored(means={"nll": [3 + float(each) for each in nll]}))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """A results folder with one score whose log-likelihood is worse by `nll` nats per token."""

    def made(name: str, nll: float = 0.0, **changes: Any) -> Path:
        found = scored(**changes)
        means = found["quality"]["means"]
        means["nll"] = [each + nll * (1 + 0.1 * (number % 3)) for number, each in enumerate(means["nll"])]
        found["campaign"]["id"] = found["started_utc"] = f"2026-11-0{len(name)}T00:00:00+00:00"
        write_record(tmp_path / name / "machine" / "model" / "cell" / "20261101T000000.000000Z", found)
        return tmp_path / name

    return made


def test_the_golden_score_is_a_record_and_has_its_figures():
    assert wrong_with(GOLDEN) is None
    row = quality.row(GOLDEN)
    assert row["status"] == "ok"
    assert row["perplexity"] == row["figures"]["ppl"]["value"]
    assert row["figures"]["kld_mean"]["low"] < row["kld_mean"] < row["figures"]["kld_mean"]["high"]


def test_a_score_without_figures_is_no_record():
    assert wrong_with(scored(figures=None)) == "quality.figures must be there where the outcome is ok"


def test_a_score_of_logits_that_are_no_numbers_is_invalid_with_the_position_and_so_is_the_speed():
    row = quality.row(scored(figures=None, not_finite=NOT_FINITE))
    why = "NaN or infinite logits at position 300 of window 2"
    assert (row["status"], row["reasons"], row["figures"]) == ("invalid", [why], {})
    after: Any = studied().repeats[0] | {"status": "ok", "reasons": []}
    quality.apply([after], [quality.row(score_of_speed(figures=None, not_finite=NOT_FINITE))])
    assert (after["status"], after["quality"]) == ("invalid", "invalid")
    assert after["reasons"][-1] == f"{why} of the scored text"
    disturbed: Any = studied().repeats[0] | {
        "status": "invalid",
        "disturbed": "cpu_contention",
        "reasons": [],
    }
    quality.apply([disturbed], [quality.row(score_of_speed(figures=None, not_finite=NOT_FINITE))])
    assert disturbed["disturbed"] is None  # else its figures would be provisional


def test_a_score_of_another_kernel_than_requested_is_invalid():
    ran = GOLDEN["quality"]["ran"] | {"options": {"flash_attn": True}}
    row = quality.row(scored(ran=ran))
    assert row["status"] == "invalid"
    assert "flash_attn" in row["reasons"][0]


def test_the_speed_of_a_variant_has_the_quality_of_the_same_variant():
    gathered = studied(score_of_speed())
    (row,) = gathered.repeats
    assert row["perplexity"] == GOLDEN["quality"]["figures"]["ppl"]["value"]
    assert row["kld_mean"] == GOLDEN["quality"]["figures"]["kld_mean"]["value"]
    assert {"perplexity", "KLD", "top-1"} <= {*tables.cells(with_prompts(gathered.cells)[0]).headings}
    assert row["kld_mean_ci95"][0] < row["kld_mean"] < row["kld_mean_ci95"][1]


def test_a_speed_that_was_not_scored_says_so_where_others_of_its_model_were():
    other = studied(score_of_speed({"variant": "another"}))
    assert other.repeats[0]["perplexity"] is None
    assert list(tables.cells(with_prompts(other.cells)[0]).lines[0]).count("not scored") == 3
    unscored, _ = tables.cells(with_prompts(studied().cells)[0]).fitted(wide=True)
    assert "perplexity" not in unscored.headings
    assert studied(GOLDEN).repeats[0]["quality"] is None  # of another model


def test_divergences_in_one_table_are_of_the_same_text():
    longer = score_of_speed(text=OTHER_TEXT, scored=10**6)
    others = [score_of_speed({"variant": name, "content_key": name}) for name in ("a", "b")]
    rows: Any = studied().repeats
    quality.apply(rows, [quality.row(each) for each in (longer, *others)])
    assert (rows[0]["quality"], rows[0]["kld_mean"]) == ("other text", None)
    quality.apply(rows, [quality.row(each) for each in (longer, *others, score_of_speed())])
    assert (rows[0]["quality"], rows[0]["kld_mean"]) == ("ok", quality.row(GOLDEN)["kld_mean"])


def test_a_speed_has_the_quality_that_a_later_campaign_scored():
    score = score_of_speed({"campaign": GOLDEN["campaign"] | {"id": "2030-01-01T00:00:00+00:00"}})
    assert studied(score).repeats[0]["kld_mean"] == quality.row(GOLDEN)["kld_mean"]


@pytest.mark.parametrize("other", ["environment", "model"])
def test_a_score_of_other_packages_or_weights_is_not_that_of_a_speed(other):
    score = score_of_speed()
    assert studied(score).repeats[0]["quality"] == "ok"
    if other == "model":
        score["model"]["weights"]["fingerprint"] += "0"
    else:
        score["environment"]["lock"] = ["torch==1.0"]
    (row,) = studied(score).repeats
    assert (row["quality"], row["kld_mean"]) == ("not scored", None)


def test_of_two_scores_of_as_many_tokens_the_last_counts():
    score = score_of_speed()
    later = score_of_speed({"started_utc": "2030-01-01T00:00:00+00:00", "content_key": "later"})
    later["quality"]["figures"]["kld_mean"]["value"] = 0.5
    for order in ([score, later], [later, score]):
        assert studied(*order).repeats[0]["kld_mean"] == 0.5


def test_a_score_without_a_reference_has_a_perplexity_and_the_reason_once():
    why = "no 16-bit weights to compare with (mine.gguf is q4_0)"
    ppl = {"ppl": GOLDEN["quality"]["figures"]["ppl"]}
    alone = score_of_speed(reference=None, loss_nats=None, no_reference=why, figures=ppl)
    assert wrong_with(alone) is None
    study = studied(alone, alone | {"variant": "other", "content_key": "other"})
    cell = study.repeats[0]
    assert (cell["quality"], cell["perplexity"]) == ("ok", ppl["ppl"]["value"])
    assert (cell["kld_mean"], cell["kld_mean_ci95"], cell["top1"]) == (None, None, None)
    assert [line[3:] for line in report.table(study.scores).lines] == [["-"] * 10] * 2
    (said,) = [note for note in report.notes(study.scores) if "no KLD" in note]
    first, second = (row["name"] for row in study.scores)
    assert said == f"no KLD and no agreement of {first}, {second}: {why}"


def test_the_table_of_scores_says_what_was_scored_and_what_is_wrong():
    gathered = load_study([Stored(Path("a"), GOLDEN)])
    assert len(report.table(gathered.scores).lines) == 1
    assert report.notes(gathered.scores)[0].startswith("scored ")


def test_a_worse_perplexity_fails_a_comparison_and_one_score_a_side_is_enough(harness, folder):
    ran = harness(
        "compare", folder("a"), folder("bb", nll=0.02), "--fail-on", "quality:0.5%", "--format", "json"
    )
    assert ran.code == 3, ran.err
    (row,) = ran.json
    assert (row["metric"], row["verdict"]) == ("perplexity", "WORSE")
    assert row["change_ci90"][0] < row["change"] < row["change_ci90"][1]
    assert row["change"] == pytest.approx(0.022, abs=0.003)


def test_the_same_scores_are_the_same(harness, folder):
    ran = harness("compare", folder("a"), folder("bb"), "--format", "json")
    assert ran.code == 0, ran.err
    assert [row["verdict"] for row in ran.json] == ["SAME"]


@pytest.mark.parametrize(("windows", "verdict"), [(1, "INVALID"), (7, "INVALID"), (8, "WORSE")])
def test_a_few_windows_of_text_give_no_verdict_and_the_option_for_more(harness, folder, windows, verdict):
    few = {key: values[:windows] for key, values in GOLDEN["quality"]["means"].items()}
    sides = [
        folder(name, nll, windows=windows, means=copy.deepcopy(few)) for name, nll in (("a", 0), ("bb", 0.03))
    ]
    ran = harness("compare", *sides, "--fail-on", "quality:0.5%", "--format", "json")
    (row,) = ran.json
    assert row["verdict"] == verdict
    assert ran.code == (3 if verdict == "WORSE" else 2)  # 2: nothing was compared
    if verdict == "INVALID":
        assert "too few to judge by; score at least 8 (`chunks` of the workload `quality`)" in row["reason"]
        assert row["change"] is None
        (note,) = [
            note
            for note in report.notes([quality.row(scored(windows=windows, means=few))])
            if "fewer" in note
        ]
        assert "raise `chunks` of the workload `quality`" in note


def test_of_many_variants_alike_none_is_worse_by_chance():
    """One of 40 has a 90% interval beyond 0.5% and a p-value of 0.004: one in 250 such is no discovery."""
    base = np.zeros(16)
    noise = np.linspace(-1, 1, 16)
    likely = 0.02 + 0.0435 * noise / noise.std(ddof=1) * 0.55
    pairs = {"odd": (Runs({"a": [score(base)]}), Runs({"b": [score(likely)]}))}
    ((_, alone),) = judged(pairs, dict.fromkeys(FAMILIES, 0.005)).rows
    assert alone["verdict"] == "WORSE"
    for number in range(39):
        other = Runs({"b": [score(0.001 * noise[::-1] * (-1) ** number)]})
        pairs[f"alike {number}"] = Runs({"a": [score(base)]}), other
    rows = dict(judged(pairs, dict.fromkeys(FAMILIES, 0.005)).rows)
    assert (rows["odd"]["verdict"], rows["odd"]["p"]) == ("UNCLEAR", alone["p"])
    assert rows["odd"]["reason"] == "not significant among 40 differences"


def test_scores_of_other_text_are_not_compared(harness, folder):
    ran = harness("compare", folder("a"), folder("bb", text=OTHER_TEXT), "--format", "json")
    assert ran.code == 2
    assert ran.json[0]["verdict"] == "INVALID"
    assert "other text, tokens or windows" in ran.json[0]["reason"]


def test_a_score_behind_a_bos_is_not_compared_with_one_without(harness, folder):
    text = GOLDEN["quality"]["text"] | {"ids_sha256": "of ids behind a BOS"}
    ran = harness("compare", folder("a"), folder("bb", bos=2, text=text))
    assert ran.code == 2
    assert "the two scores are of other text, tokens or windows" in ran.err
    assert "BOS in front of each window none 2" in " ".join(ran.out.split())


def test_a_history_has_the_quality_of_each_campaign(folder):
    found = series.history(folder("a"))
    assert [(each.metric.name, len(each.values)) for each in found.series] == [("perplexity", 1)]
