"""Tokens guessed ahead: counts, ids, theory, and what is left out where several tokens come at once."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import golden_record as golden
import numpy as np
import pytest
from stand_in_server import Behaviour, serving
from test_llamacpp import vars_of, with_vocabulary
from test_served import QUICK

from harness.analysis import speculation
from harness.analysis.speculation import acceptance_length, acceptance_rate, guesses_per_pass
from harness.analysis.warnings import Warnings
from harness.dataset import table
from harness.dataset.study import load_study
from harness.records import Stored
from harness.records.token_times import TokenTimes
from harness.report import workloads


@pytest.fixture
def guessing(harness, tmp_path, cache):
    """The rows of a server that guesses, which the config allows or does not."""

    def run(behaviour: Behaviour, *more: str) -> tuple[str, dict]:
        with serving(behaviour) as address:
            config = tmp_path / "c.yaml"
            variant = {"stack": "http", "url": address, "speculation": True}
            models = [{"name": "m", "weights": "served"}]
            config.write_text(json.dumps({"models": models, "variants": [variant]}))
            ran = harness("run", config, *QUICK, *more)
        (row,) = json.loads(harness("report", "results", "--format", "json").out)
        return ran.out + ran.err, row

    return run


def test_guesses_leave_averages_alone_and_are_counted(guessing, harness, tmp_path):
    _, row = guessing(Behaviour(speculates=True, drafted=9, accepted=6, burst=2, token_ms=5))
    assert row["status"] == "ok" or row["disturbed"], row["reasons"]  # by a busy machine
    assert row["disturbed"] or row["tokens_per_s"] > 0
    for figure in ("B_ms", "W_tokens_per_ms", "bandwidth_share", "median_ms", "slow_from_n", "shape"):
        assert row[figure] is None, figure
    assert row["spikes"]["count"] == 0
    # 11 tokens after the first are 6 guesses and the own tokens of 5 passes.
    assert row["speculation"]["passes"] == 5
    details = {flag["code"]: flag["detail"] for flag in row["flags"]}
    assert details["guessed_ahead"].startswith("2.20 tokens a pass, 6 of 9 guesses accepted")
    assert details["ids_compared"] == "no run without guesses to compare the ids with"
    harness("report", "results", "-o", "page.html")
    assert "guesses/pass" in (tmp_path / "page.html").read_text()


def test_a_warm_up_that_guesses_make_uneven_invalidates_nothing(guessing):
    behaviour = Behaviour(speculates=True, drafted=9, accepted=6, burst=5, token_ms=5)
    _, row = guessing(behaviour, "--set", "warmup.tolerance=0.0001")
    assert row["status"] == "ok" or row["disturbed"] != "warmup", row["reasons"]


def test_events_of_several_guessed_tokens_are_counted_after_the_first_of_them(guessing):
    _, row = guessing(Behaviour("vllm", speculates=True, tokens_at_once=3, token_ms=5))
    assert row["status"] == "ok" or row["disturbed"], row["reasons"]  # by a busy machine
    assert "12 tokens came in 4 pieces, up to 3 at once" in " ".join(f["detail"] for f in row["flags"])
    assert row["speculation"]["tokens"] == 1 + 9  # after those of the first event


def test_a_server_that_may_guess_but_found_nothing_to_guess_gave_a_token_a_pass(guessing):
    _, row = guessing(Behaviour(speculates=True))
    (note,) = [flag["detail"] for flag in row["flags"] if flag["code"] == "guessed_ahead"]
    assert note.startswith("1.00 tokens a pass, 0 of 0 guesses accepted")


def record(tokens: int = 12, drafted: int | None = 9, accepted: int | None = 6, **options: object) -> dict:
    counts = {"drafted_tokens": drafted, "accepted_tokens": accepted}
    return {
        "outcome": "ok",
        "tokens": tokens,
        "options": {"speculate": "draft", "accept": 0.0, **options},
        "loaded": {"served": {"api": "llama-server", "speculation": "draft-simple"}},
        "done": {"counters": {name: count for name, count in counts.items() if count is not None}},
    }


def test_the_counts_give_length_rate_and_guesses_a_pass():
    found = speculation.row(record())
    assert acceptance_length(found) == pytest.approx(11 / 5)
    assert acceptance_rate(found) == pytest.approx(6 / 9)
    assert guesses_per_pass(found) == pytest.approx(9 / 5)
    assert speculation.row(record(drafted=None, accepted=None, speculate="none")) is None


def test_counts_of_repeats_are_pooled_and_one_without_counts_leaves_none():
    two = speculation.pooled([speculation.row(record()), speculation.row(record(accepted=1))])
    assert acceptance_length(two) == pytest.approx(22 / (5 + 10))
    unknown = record(drafted=None, accepted=None)
    unknown["loaded"]["served"]["api"] = "vllm"
    assert (
        acceptance_length(speculation.pooled([speculation.row(each) for each in (record(), unknown)])) is None
    )


def guessed(**changes: object) -> dict:
    """The golden record with guesses; see golden_record."""
    served = {"api": "llama-server", "speculation": "draft-simple", "template": False, "elsewhere": False}
    options = golden.GOLDEN["options"] | {"speculate": "draft", "draft": "/draft.gguf", "accept": 0.0}
    return golden.record(loaded__served=served, options=options, **changes)


def test_the_speed_of_passes_that_give_several_tokens_is_that_of_all_after_the_first():
    ms = [9.0, 50, 0.1, 0.1, 0.1, *[40, 0.1, 0.1, 0.1] * 8]  # the first pass is the longest
    counters = {"drafted_tokens": 27, "accepted_tokens": 27, "pieces": 37, "awaited_pieces": 10}
    found = guessed(tokens=len(ms), done__counters=counters)
    n = list(range(26, 26 + len(ms)))
    tokens = TokenTimes.of_columns({"n": n, "latency_ns": [round(each * 1e6) for each in ms]})
    row = table.repeat_row(found, tokens, None, None)
    assert row["tokens_per_s"] == pytest.approx((len(ms) - 1) / sum(ms[1:]) * 1e3)
    assert row["start_tokens_per_s"] is row["end_tokens_per_s"] is None  # an edge may cut a pass in two


def test_more_accepted_tokens_than_came_give_no_length():
    assert acceptance_length(speculation.row(record(tokens=6, accepted=6))) is None


def test_synthetic_acceptance_is_a_note_of_its_own():
    notes = [flag.detail for flag in speculation.notes(record(accept=2.0))]
    assert notes[1].startswith("synthetic acceptance of 2 tokens a pass: the text is not the model's")


def times(ids: list[int]) -> TokenTimes:
    return TokenTimes(np.arange(len(ids)), np.ones(len(ids), dtype=np.int64), ids)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([1, 2, 3, 4], "the same ids as without guesses for all 4 tokens"),
        ([1, 2, 9, 4], "the ids differ from those without guesses, first at token 3 of 4 tokens"),
    ],
)
def test_ids_are_compared_with_those_of_plain_decode(ids, text):
    plain = record(tokens=4, speculate="none"), times([1, 2, 3, 4])
    flag = speculation.compared_ids(record(tokens=4), times(ids), plain)
    assert (flag.warning, flag.detail) == (Warnings.ids_compared, text)


def test_tokens_that_came_without_an_id_are_not_compared():
    here, there = record(tokens=4), record(tokens=4, speculate="none")
    here["done"]["counters"]["piece_tokens"] = 3
    flag = speculation.compared_ids(here, times([1, 2, 4, 0]), (there, times([1, 2, 4, 5])))
    assert flag.detail == "the same ids as without guesses for all 3 tokens that came with ids"


def test_the_speed_up_is_over_the_same_cell_without_guesses_and_no_other():
    def cell(ms: float, found: dict, key: str) -> Stored:
        found = found | {"content_key": key, "cell": key, "variant": key}
        n = list(range(26, 26 + found["tokens"]))
        step_ns = [round(ms * 1e6)] * found["tokens"]
        return Stored(Path(key), found, TokenTimes.of_columns({"n": n, "latency_ns": step_ns}))

    counters = {"drafted_tokens": 60, "accepted_tokens": 20}
    options = golden.GOLDEN["options"] | {"speculate": "none"}
    plain = golden.record(options=options, done__counters={})
    other = golden.record(options=options | {"threads": 7}, done__counters={})
    main = guessed(done__counters=counters) | {"stack": plain["stack"]}
    found = load_study([cell(8, main, "a"), cell(20, other, "b"), cell(10, plain, "c")])
    ((row,),) = workloads.of_study(found)["speculation"].rows.values()
    assert (row["at"]["plain_tokens_per_s"], row["at"]["speed_up"]) == pytest.approx((100, 1.25))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"speculate": "draft"}, "speculate: draft needs draft"),
        ({"stack": "hf", "speculate": "draft"}, "speculate: draft needs draft, the folder"),
        ({"stack": "hf", "draft": "a"}, "only speculate: draft has a draft model"),
        (
            {"stack": "hf", "speculate": "draft", "draft": "a", "cache": "static"},
            "assisted generation needs cache: dynamic",
        ),
        ({"accept": 2}, "accept needs speculate"),
        ({"speculate": "ngram", "draft": "/a.gguf"}, "only speculate: draft has a draft model"),
    ],
)
def test_options_that_contradict_each_other_are_refused(harness, real_config, options, sentence):
    ran = harness("run", real_config({"stack": "llamaserver", **options}), "--dry-run")
    assert f"will be refused: {sentence}" in ran.words


def test_a_draft_model_is_relative_to_the_config_and_another_file_is_another_cell(
    harness, real_config, job, tmp_path, llamaserver_interpreter
):
    path = with_vocabulary(job, tmp_path / "m.gguf", vars_of("tiny-qwen2", vocab_size=2000), "f32")
    draft = tmp_path / "drafts" / "d.gguf"
    draft.parent.mkdir()
    shutil.copy(path, draft)
    variant = {"stack": "llamaserver", "speculate": "draft", "draft": "drafts/d.gguf"}
    config = real_config(variant, model={"name": "m", "weights": str(path)})

    def records() -> list[dict]:
        ran = harness("run", config, "--busy", "-o", "r")
        assert ran.code in (0, 1), ran.err
        return [json.loads(each.read_text()) for each in (tmp_path / "r").rglob("record.json")]

    (first,) = records()
    assert first["options"]["draft"] == str(draft)
    assert first["variant"] == "draft=drafts-d.gguf-speculate=draft"
    with draft.open("r+b") as file:  # the last bytes are weights
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    assert len({each["content_key"] for each in records()}) == 2
    draft.unlink()
    assert f"{draft}: no such file" in harness("run", config, "-o", "r").err


def test_a_model_that_drafts_for_itself_is_right_and_synthetic_acceptance_is_ranked_nowhere(
    harness, real_config, job, tmp_path, llamaserver_interpreter
):
    path = with_vocabulary(job, tmp_path / "m.gguf", vars_of("tiny-qwen2", vocab_size=2000), "f32")
    draft = {"name": "d", "speculate": "draft", "draft": str(path), "accept": [0, 2]}
    config = real_config(
        *({"stack": "llamaserver", "n_ctx": 256} | each for each in ({}, draft)),
        model={"name": "m", "weights": str(path)},
    )
    ran = harness("run", config, "--busy")
    rows = json.loads(harness("report", "results", "--format", "json").out)
    real, synthetic = (next(row for row in rows if row["variant"] == f"d-accept={n}") for n in (0, 2))
    assert real["speculation"]["accepted"] > 0.8 * real["speculation"]["drafted"]
    assert acceptance_length(real["speculation"]) > 3
    (compared,) = (flag["detail"] for flag in real["flags"] if flag["code"] == "ids_compared")
    assert "the same ids as without guesses" in compared or "first at token" in compared
    assert "synthetic acceptance" in synthetic["name"]
    assert not re.search(r"fastest[^;(]*synthetic", ran.out)
    assert {flag["code"] for flag in synthetic["flags"]} >= {"guessed_ahead", "synthetic_acceptance"}
    harness("report", "results", "-o", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Tokens per second against acceptance length" in page


def test_assisted_generation_of_transformers_has_the_same_figures_and_chapter(
    harness, real_config, checkpoint, tmp_path, hf_interpreter
):
    path = checkpoint("tiny-qwen2")
    assisted = {"name": "d", "speculate": "draft", "draft": str(path), "draft_tokens": 3}
    variants = ({"stack": "hf", "dtype": "fp32"} | each for each in ({}, assisted))
    ran = harness("run", real_config(*variants, model={"name": "m", "weights": str(path)}), "--busy")
    rows = json.loads(harness("report", "results", "--format", "json").out)
    row = next(row for row in rows if row["variant"] == "d")
    # 40 tokens: 4 of the prompt's pass, then 9 passes of 4.
    assert (row["speculation"]["by"], row["speculation"]["passes"]) == ("assisted generation", 9)
    assert acceptance_length(row["speculation"]) == 4
    assert "the same ids as without guesses for all 40 tokens" in ran.out
    harness("report", "results", "-o", "page.html")
    assert "Tokens per second against acceptance length" in (tmp_path / "page.html").read_text()


def test_the_prompts_pass_counts_in_no_speed_where_it_verified_guesses_too():
    ms = [9.0, 0.1, 0.1, *[40, 0.1, 0.1] * 8]
    counters = {"drafted_tokens": 16, "accepted_tokens": 16, "first_burst_tokens": 3, "prompt_tokens": 25}
    found = guessed(tokens=27, done__counters=counters)
    n = list(range(26, 26 + len(ms)))
    tokens = TokenTimes.of_columns({"n": n, "latency_ns": [round(each * 1e6) for each in ms]})
    row = table.repeat_row(found, tokens, None, None)
    assert row["ttft_ms"] == 9
    assert row["tokens_per_s"] == pytest.approx(24 / sum(ms[3:]) * 1e3)
    assert (row["speculation"]["passes"], acceptance_length(row["speculation"])) == (8, 3)


def test_passes_that_give_fewer_tokens_after_the_warm_ups_length_are_no_jump_of_the_stack():
    ms = [9.0, *[40, 0.1, 0.1] * 5, *[40] * 16]
    warmup = {"agreed": True, "windows_ns": [[1] * 15]}
    found = guessed(
        tokens=32, done__counters={"drafted_tokens": 60, "accepted_tokens": 10}, done__warmup=warmup
    )
    n = list(range(26, 26 + len(ms)))
    tokens = TokenTimes.of_columns({"n": n, "latency_ns": [round(each * 1e6) for each in ms]})
    flags = {flag["code"] for flag in table.repeat_row(found, tokens, None, None)["flags"]}
    assert "slower_at_new_lengths" not in flags
    found["options"]["speculate"], found["done"]["counters"] = "none", {}
    flags = {flag["code"] for flag in table.repeat_row(found, tokens, None, None)["flags"]}
    assert "slower_at_new_lengths" in flags
