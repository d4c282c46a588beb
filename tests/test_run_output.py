"""What `harness run` prints in 80 columns: the answer, figures, and what matters most below them."""

from __future__ import annotations

import re

import pytest

from harness.report.tables import short_names
from harness.report.text_table import FAILED, WARNED, Note, show

MODEL = {"name": "Meta-Llama-3.1-8B-Instruct", "shape": "tiny-qwen2"}
BATCH = {"kind": "batch", "concurrency": [1, 4, 8], "new_tokens": 12, "rounds": 1}
PROMPT = {"kind": "prefill", "lengths": [512], "passes": 2}


def lines_of(ran) -> list[str]:
    lines = ran.out.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith(("records: ", "report: ")))
    return lines


def test_the_answer_is_the_first_line_and_figures_stand_before_the_status(harness, config):
    ran = harness("run", config({}, repeats=2), COLUMNS="80")
    first, empty, headings, line, *_ = lines_of(ran)
    assert re.match(r"tiny-qwen2 fake v0: [\d,]+\.\d tok/s; ", first)
    assert (empty, headings.split()[0]) == ("", "tok/s")  # one cell needs no name beside its answer
    assert re.match(r" *[\d,.]+( ±[\d.]+)? +[\d.]+ +ok 2/2 ", line)


def test_what_all_rows_share_stands_once_above_the_table(harness, config):
    ran = harness("run", config({"quant": "q8_0"}, {"quant": "q4_0"}, model=MODEL), COLUMNS="80")
    lines = lines_of(ran)
    title = lines.index("Meta-Llama-3.1-8B-Instruct fake")
    assert [line.split()[0] for line in lines[title + 1 : title + 4]] == ["cell", "v0", "v1"]


@pytest.mark.parametrize("variants", [1, 2])
def test_several_users_have_figures_in_80_columns_and_an_answer(harness, config, variants):
    rows = [{"B_ms": 4, "user_ms": 1}] * variants
    ran = harness("run", config(*rows, model=MODEL, workloads=[BATCH]), COLUMNS="80")
    text = " ".join(lines_of(ran))
    assert "fake v0: 8 users: 727 tok/s together, 90.9 each; one user 250 tok/s." in text
    assert "users  all tok/s  each tok/s" in text
    assert re.search(r"8 +727\.3 +90\.91", text)


def test_the_speed_of_a_prompt_stands_beside_decode_and_has_no_table_of_its_own(harness, config):
    ran = harness("run", config({}, workloads=[{"kind": "decode"}, PROMPT]), COLUMNS="80")
    assert re.search(r"v0: .*; reads a prompt of 512 tokens at [\d,]+ tok/s;", " ".join(lines_of(ran)))
    assert ran.out.count("pp512 tok/s") == 1
    assert "depth" not in ran.out


def test_a_cell_that_failed_is_the_first_note_and_its_line_has_its_status(harness, config):
    ran = harness("run", config({}, {"die_by": "error", "die_at_token": 5}), COLUMNS="80")
    lines = lines_of(ran)
    assert ran.code == 1
    assert any(re.match(r"v1 .* error 0/1", line) for line in lines)
    below = lines[next(place for place, line in enumerate(lines) if line.startswith("v1 ")) + 1 :]
    assert below[0] == "tiny-qwen2 fake v1: the fake failed, as asked"


def test_progress_names_cells_without_their_digest(harness, config):
    assert "] tiny-qwen2 fake v0 #1  ok" in harness("run", config({})).err


def test_three_notes_are_shown_the_gravest_first_and_wide_shows_all(capsys):
    notes = [Note(f"remark {n}") for n in range(3)]
    blocks = [*notes, Note("a warning", WARNED), Note("a failure", FAILED), Note("of B", heading="B ms")]
    show(blocks, wide=False)
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["a failure", "a warning", "remark 0", "with --wide: 2 more notes"]
    show(blocks, wide=True)
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_names_are_as_short_as_tells_rows_apart():
    one, other = "m llamacpp q4_0-threads=2", "m llamacpp q8_0-threads=2"
    assert short_names([one, other]) == ("m llamacpp threads=2", ["q4_0", "q8_0"])
    assert short_names([one, one]) == ("m llamacpp q4_0 threads=2", ["", ""])
    assert short_names(["m a q", "m a q-x=1"]) == ("m a", ["q", "q x=1"])
    assert short_names(["a b", "b a"]) == ("", ["a b", "b a"])
