"""The answers of a report: in words, against its tables, and no cell is the best that its figures do not tell
apart from the next."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import stored_in
from golden_record import record
from test_first_screen import CELLS, DISTURBED, SCORED, group, row

from harness.dataset.study import Study, load_study
from harness.records import Stored
from harness.report import exports, summary
from harness.report import page as report_page
from harness.report.answers import CRITERION, Answer, answers
from harness.report.closing import commands, sentences
from harness.report.ranked_groups import groups

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?\+?")
FASTEST, SMALLEST, QUALITY, LONGEST = range(4)


def in_tables(study: Study) -> dict[str, set[str]]:
    """By a cell's name: the numbers of its rows in the Markdown, also as an answer writes them: MB as GB, and
    B as tokens per second."""
    found: dict[str, set[str]] = {}
    for line in exports.markdown(study).splitlines():
        if line.startswith("| "):
            name, *cells = (part.strip() for part in line.strip("|").split(" | "))
            for number in (number for cell in cells for number in NUMBER.findall(cell)):
                value = float(number.replace(",", "").rstrip("+"))
                as_written = {number, f"{value / 1e3:,.1f}", f"{1e3 / value:,.1f}" if value else number}
                found.setdefault(name, set()).update(as_written)
    return found


def check(study: Study) -> int:
    """Every figure of every answer, and of the sentence on counts; returns how many there were."""
    tables, checked = in_tables(study), 0
    for ranked in groups(study):
        cells = dict(ranked.every)
        for answer in answers(ranked):
            known = set().union(*(tables[cells[label]["name"]] for label in answer.leaders))
            numbers = NUMBER.findall(answer.text) if answer.leaders else []
            assert set(numbers) <= known, answer
            checked += len(numbers)
    status = [str(row["status"]) for row in study.cells]
    total, *by_status = re.findall(r"(\d+) (\w+)", summary.counts(study).replace("of ", ""))
    assert total == (str(len(status)), "cells" if len(status) > 1 else "cell")
    assert all(status.count(word) == int(count) for count, word in by_status if word != "models")
    return checked


def test_every_figure_of_the_published_studys_answers_stands_in_a_table(published: Study):
    assert check(published) >= 45


def test_every_figure_of_a_campaigns_answers_stands_in_a_table(harness: Any, config: Any, tmp_path: Path):
    variants = [{"B_ms": 1.0}, {"B_ms": 1.0, "name": "same"}, {"B_ms": 4.0}, {"die_at_token": 3}]
    harness("run", config(*variants, repeats=2, timeout_s=600))
    study = load_study(stored_in(tmp_path / "results"))
    cells = [{**cell, "status": "ok"} if cell["stayed_disturbed"] else cell for cell in study.cells]
    assert check(replace(study, cells=cells)) >= 2


def test_each_goal_has_an_answer_with_its_variant_and_what_that_costs():
    fastest, smallest, quality, longest = answers(group(*CELLS))
    assert fastest == Answer("Fastest", ("a q4_0",), ["90.0 tok/s", "4.0 GB peak RSS"])
    assert smallest == Answer("Smallest", ("a q4_0",), ["4.0 GB peak RSS", "perplexity 9.00"])
    assert (quality.leaders, quality.text) == (("a q8_0",), "perplexity 8.00, 50.0 tok/s, 8.0 GB peak RSS")
    assert quality.note == "1 of 3 cells has no perplexity"
    assert (longest.leaders, longest.text) == (("b slow",), "9,000 tokens, 40.0 tok/s")


def test_they_are_one_sentence_of_a_model_in_a_terminal_and_in_markdown():
    study = Study("t", list(CELLS))
    (sentence,) = sentences(study)
    assert sentence == (
        "m: fastest and smallest: a q4_0 (90.0 tok/s, 4.0 GB peak RSS, perplexity 9.00); best quality that"
        " fits: a q8_0 (perplexity 8.00, 50.0 tok/s, 8.0 GB peak RSS; 1 of 3 cells has no perplexity);"
        " longest context: b slow (9,000 tokens, 40.0 tok/s)."
    )
    assert f"- {sentence}\n" in exports.markdown(study).replace("\\_", "_")


def test_one_cell_has_its_figures_without_a_superlative_and_without_a_cell_nothing_is_said():
    assert sentences(Study("t", CELLS[:1])) == ["m a q8_0: 50.0 tok/s; 8.0 GB peak RSS; perplexity 8.00."]
    assert CRITERION not in report_page.page(Study("t", CELLS[:1]))
    failed = row("a q8_0", status="invalid", tokens_per_s=50.0)
    assert sentences(Study("t", [failed])) == ["m: no cell is ok."]
    disturbed = [cell | DISTURBED for cell in CELLS]
    assert sentences(Study("t", disturbed))[0].startswith(
        "m: provisional: fastest and smallest: a q4_0 (90.0"
    )
    assert sentences(Study("t", [*disturbed[1:], CELLS[0]])) == sentences(Study("t", CELLS[:1]))
    assert sentences(Study("t", [])) == []
    unknown = row("a q8_0", tokens_per_s=None)  # such as a server's whose times were read late
    assert sentences(Study("t", [unknown])) == sentences(Study("t", [unknown, unknown])) == []


# A name, two or more cells, and of the answer to a goal the leaders, the figures and the note.
RATE = {"tokens_per_s": 45.3, "tokens_per_s_ci95": [44.0, 46.5]}
ONCE = {"repeats": 1}
CASES: dict[str, tuple[list[dict[str, Any]], int, tuple[str, ...], str, str]] = {
    "what did not fit has no best quality": (
        *(CELLS, QUALITY, ("a q8_0",)),
        *("perplexity 8.00, 50.0 tok/s, 8.0 GB peak RSS", "1 of 3 cells has no perplexity"),
    ),
    "intervals overlap": (
        [row("a x", **RATE), row("a y", tokens_per_s=45.1, tokens_per_s_ci95=[44.2, 46.0])],
        *(FASTEST, ("a x", "a y"), "45.1 to 45.3 tok/s, not distinguishable", ""),
    ),
    "a third is slower": (
        [row("a z", tokens_per_s=30.0, tokens_per_s_ci95=[29.0, 31.0]), row("a x", **RATE)],
        *(FASTEST, ("a x",), "45.3 tok/s", ""),
    ),
    "an open interval": (
        [row("a x", **RATE), row("a y", tokens_per_s=20.0, tokens_per_s_ci95=[19.0, None])],
        *(FASTEST, ("a x", "a y"), "20.0 to 45.3 tok/s, not distinguishable", ""),
    ),
    "repeats without an interval": (
        [
            row("a two", tokens_per_s=50.0, repeats=2),
            row("b v", tokens_per_s=48.0, tokens_per_s_ci95=[48, 48]),
        ],
        *(FASTEST, ("a two", "b v"), "48.0 to 50.0 tok/s, not distinguishable"),
        "without an interval: a two",
    ),
    "one run has the stated noise": (
        [row("a x", tokens_per_s=100.0, **ONCE), row("a y", tokens_per_s=103.0, **ONCE)],
        *(FASTEST, ("a y", "a x"), "100.0 to 103.0 tok/s, not distinguishable", ""),
    ),
    "one run beyond the stated noise, though its own interval is narrower": (
        [
            row("a x", tokens_per_s=100.0, tokens_per_s_ci95=[99.9, 100.1], **ONCE),
            row("a y", tokens_per_s=105.0, **ONCE),
        ],
        *(FASTEST, ("a y",), "105.0 tok/s", ""),
    ),
    "rates over other numbers of tokens": (
        [row("a x", tokens_per_s=90.0, tokens=40), row("a y", **RATE), row("a z", tokens_per_s=4.0, **ONCE)],
        *(FASTEST, ("a y",), "45.3 tok/s", "1 of 3 cells has no speed over 256 tokens"),
    ),
    "B where more cells have one that is identifiable": (
        [
            row("a x", B_ms=10.0, W_identifiable=True, **ONCE),
            row("a y", B_ms=12.0, shape="flat", **ONCE),
            row("a z", B_ms=1.0, W_identifiable=False, shape="short", **ONCE),
        ],
        *(FASTEST, ("a x",), "100.0 tok/s at zero context", "1 of 3 cells has no speed"),
    ),
    "B of published figures": (
        [row(f"a v{B:.0f}", kind="reported", B_ms=B, B_ci95_ms=[B, B]) for B in (5.0, 10.0)],
        *(FASTEST, ("a v5",), "200.0 tok/s at zero context", ""),
    ),
    "the stated error of a perplexity": (
        [row("a x", perplexity=14.12), row("a y", perplexity=14.21), row("a z", perplexity=14.9)],
        *(QUALITY, ("a x", "a y"), "perplexity 14.12 to 14.21, not distinguishable", ""),
    ),
    "the own error of a perplexity": (
        [row(f"a v{ppl}", perplexity=ppl, perplexity_stderr=0.01) for ppl in (14.12, 14.21)],
        *(QUALITY, ("a v14.12",), "perplexity 14.12", ""),
    ),
    "divergences before perplexities": (
        *(SCORED, QUALITY, ("a q8_0",), "KLD 0.00020, 50.0 tok/s, 8.0 GB peak RSS", ""),
    ),
    "a divergence of rounding alone": (
        [SCORED[0] | {"kld_mean": 6e-8, "kld_mean_ci95": [5e-8, 7e-8]}, *SCORED[1:]],
        *(QUALITY, ("a q8_0",), "KLD under 0.00001, 50.0 tok/s, 8.0 GB peak RSS", ""),
    ),
    "divergences that order no scores": (
        [
            row(f"a v{kld}", kld_mean=kld, kld_mean_ci95=[0.99 * kld, 1.01 * kld])
            for kld in (0.015, 1e-4, 0.03)
        ],
        *(QUALITY, ("a v0.0001", "a v0.015"), "KLD 0.00010 to 0.01500, not distinguishable", ""),
    ),
    "a file with the perplexity that it comes with": (
        [row("a q2", file_bytes=298e6, perplexity=62.14), row("a q8", file_bytes=664e6, perplexity=34.22)],
        *(SMALLEST, ("a q2",), "298 MB file, perplexity 62.14", ""),
    ),
    "memory within its noise": (
        [row("a x", peak_rss_bytes=1.0e9), row("a y", peak_rss_bytes=1.01e9)],
        *(SMALLEST, ("a x", "a y"), "1.0 GB peak RSS, not distinguishable", ""),
    ),
    "a length that stopped at a target": (
        [*CELLS, row("c v", max_ctx=10_000, max_ctx_is_target=True)],
        *(LONGEST, ("b slow",), "9,000 tokens, 40.0 tok/s"),
        "c v stopped at a target of 10,000+ tokens and may hold more",
    ),
    "no speed": ([row("a v")], FASTEST, (), "no speed is known", ""),
    "no quality": ([row("a v")], QUALITY, (), "no perplexity is known", ""),
    "no length": ([row("a v")], LONGEST, (), "not measured: harness run MODEL|CONFIG --max-ctx", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_cells_lead_together_where_their_figures_do_not_tell_them_apart(case: str):
    cells, goal, leaders, text, note = CASES[case]
    answer = answers(group(*cells))[goal]
    assert (answer.leaders, answer.text, answer.note) == (leaders, text, note)


def test_figures_of_two_machines_and_of_others_are_not_ranked_together():
    rows = [
        row("s a", machine="here", tokens_per_s=10.0, repeats=1),
        row("s b", machine="here", tokens_per_s=20.0, repeats=1),
        row("s c", machine="there", tokens_per_s=99.0, repeats=1, kind="reported"),
    ]
    assert sentences(Study("t", rows)) == [
        "m on here: fastest: s b (20.0 tok/s).",
        "m on there, third-party s c: 99.0 tok/s.",
    ]


def test_a_page_of_published_figures_says_on_top_whose_they_are_and_of_which_year(published: Study):
    said, *notes = summary.third_party(published.rows)
    assert "51 of 148 cells: bpw is nominal: scales, zeros and the 16-bit lm_head come on top." in notes
    assert said.startswith("148 of 148 cells hold third-party figures, not measured here: ")
    assert all(part in said for part in ("by noooop, 2024", "github.com/noooop", "CC0-1.0"))
    page = report_page.page(published)
    assert page.index("third-party figures") < page.index("148 cells of 8 models")
    assert exports.markdown(published).startswith(f"> {said}\n")
    ours = row("s a") | {"baseline": published.rows[0]}
    (beside,) = summary.third_party([ours])
    assert beside.startswith("1 of 1 cells are compared with third-party figures")
    assert summary.third_party([row("s a") | {"baseline": None}]) == []


def test_a_length_that_the_memory_cannot_hold_is_not_held_in_every_table(published: Study):
    text = exports.markdown(published)
    named = "| qwen1.5-14b autoawq gemm-fused on cuda "
    lines = [line for line in text.splitlines() if line.startswith(named)]
    lengths = [cell for line in lines for cell in line.split(" | ") if cell.startswith("100,000+")]
    assert len(lengths) == 2
    assert {cell.rstrip(" |") for cell in lengths} == {"100,000+, not held"}


def test_the_stacks_own_program_serves_a_file_but_not_random_weights(tmp_path: Path):
    stored = Stored(tmp_path, record(model__weights__file="/m/my file.gguf"))
    cell = row("llamacpp q4_k_m", tokens_per_s=90.0, started_utc=stored.record["started_utc"])

    def said(weights: str) -> list[str]:
        known = [cell | {"weights": weights}]
        return commands(Study("t", known, repeats=known, stored=[stored]))

    assert said("synthetic") == []
    (command,) = said("real")
    assert command.startswith("to serve it: llama-server --model '/m/my file.gguf' --threads ")


def test_the_line_of_a_repeat_has_the_figures_of_its_row(harness: Any, config: Any):
    # With a spike at each fourth token the median of the steps is far from their mean.
    ran = harness("run", config({"spike_every": 4, "spike_ms": 40}), "--json")
    (found,) = ran.json
    assert re.search(rf"TTFT {found['ttft_ms']:.1f} ms, {found['tokens_per_s']:.1f} tok/s", ran.err)
    assert found["tokens_per_s"] < 0.5e3 / found["median_ms"]
