"""The summary's sentences against the tables of the same report: no figure is in a sentence alone, and no
cell is called the best that its figures do not tell apart from the next."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from conftest import stored_in

from harness.analysis.figures import empty_cell
from harness.dataset.study import Study, labels, load_study
from harness.report import page as report_page
from harness.report import summary

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?\+?")
# Numbers of cells, which are no figures of a table.
COUNTS = re.compile(r"\d+ cells|and \d+ more|in \d+ of \d+")


def ran(harness: Any, config: Any, folder: Path, *variants: dict[str, Any], repeats: int = 1) -> Study:
    """A campaign of fake cells. That a busy machine disturbed one is not what is tested here."""
    harness("run", config(*variants, repeats=repeats, timeout_s=600))
    study = load_study(stored_in(folder / "results"))
    cells = [{**row, "status": "ok"} if row["stayed_disturbed"] else row for row in study.cells]
    return replace(study, cells=cells)


def in_tables(study: Study) -> dict[str, set[str]]:
    """By a cell's name: the numbers of its rows in the Markdown."""
    text = report_page.markdown(study)
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line.startswith("| "):
            name, *cells = (part.strip() for part in line.strip("|").split(" | "))
            found.setdefault(name, set()).update(number for cell in cells for number in NUMBER.findall(cell))
    return found


def of_cells(sentence: str, model: str, study: Study) -> list[tuple[str, str]]:
    """Each `label (figures)` of a sentence: the cell's name, and its figures."""
    rows = study.models[model]
    names = dict(zip(labels(rows, model), (str(row["name"]) for row in rows), strict=True))
    every = "|".join(re.escape(label) for label in sorted(names, key=len, reverse=True))
    found = re.findall(rf"({every})(?: \(([^()]*)\)|: ([^;]*?)(?=[;.]$|;|\.$))", sentence)
    return [(names[label], one or other) for label, one, other in found]


def check(study: Study) -> int:
    """Every figure of every sentence of the summary; returns how many there were."""
    tables, checked = in_tables(study), 0
    for model, sentence in summary.per_model(study):
        for name, said in of_cells(sentence, model, study):
            for number in NUMBER.findall(said):
                assert number in tables[name], f"{number} of {name} stands in no table: {sentence}"
        rest = COUNTS.sub("", sentence)
        for label in sorted(labels(study.models[model], model), key=len, reverse=True):
            rest = rest.replace(label, "")
        known = set().union(*(tables[str(row["name"])] for row in study.models[model]))
        assert set(NUMBER.findall(rest)) <= known, sentence
        checked += len(NUMBER.findall(rest))
    for sentence in summary.costs(study):
        model, _, said = sentence.partition(",")
        known = set().union(*(tables[str(row["name"])] for row in study.models[model]))
        assert set(NUMBER.findall(COUNTS.sub("", said))) <= known, sentence
        checked += 1
    status = [str(row["status"]) for row in study.cells]
    total, *by_status = re.findall(r"(\d+) (\w+)", summary.counts(study).replace("of ", ""))
    assert total == (str(len(status)), "cells" if len(status) > 1 else "cell")
    assert all(status.count(word) == int(count) for count, word in by_status if word != "models")
    return checked


def test_every_figure_of_the_published_studys_sentences_stands_in_a_table(published: Study):
    assert check(published) >= 50


def test_every_figure_of_a_campaigns_sentences_stands_in_a_table(harness: Any, config: Any, tmp_path: Path):
    variants = [{"B_ms": 1.0}, {"B_ms": 1.0, "name": "same"}, {"B_ms": 4.0}, {"die_at_token": 3}]
    study = ran(harness, config, tmp_path, *variants, repeats=2)
    assert check(study) >= 4


def test_with_one_cell_there_is_no_superlative(harness: Any, config: Any, tmp_path: Path):
    study = ran(harness, config, tmp_path, {"B_ms": 1.0})
    ((model, said),) = summary.per_model(study)
    assert model == "tiny-qwen2"
    assert re.fullmatch(r"fake v0: [\d.,]+ tok/s; fake v0: [\d.,]+ MB, peak RSS\.", said)
    assert check(study) == 2
    assert summary.CRITERION not in report_page.page(study)


def row(name: str, **figures: Any) -> dict[str, Any]:
    known = {"name": f"m s {name}", "model": "m", "stack": "s", "variant": name, "status": "ok"}
    known |= {"kind": "measured", "repeats": 1, "tokens": 256, "baseline": None}
    return empty_cell() | known | figures


def said(*rows: dict[str, Any]) -> str:
    ((_, sentence),) = summary.per_model(Study("t", rows))
    return sentence


def test_the_fastest_is_taken_of_the_measured_rate_and_not_mixed_with_B():
    slow = row("a", tokens_per_s=40.0, tokens_per_s_ci95=[39.5, 40.5], B_ms=20.0)
    quick = row("b", tokens_per_s=45.3, tokens_per_s_ci95=[45.0, 45.6], B_ms=18.36)
    assert said(slow, quick) == "fastest over 256 tokens: s b (45.3 tok/s)."


def test_where_intervals_overlap_there_is_no_winner():
    one = row("a", tokens_per_s=45.3, tokens_per_s_ci95=[44.0, 46.5])
    two = row("b", tokens_per_s=45.1, tokens_per_s_ci95=[44.2, 46.0])
    slow = row("c", tokens_per_s=30.0, tokens_per_s_ci95=[29.0, 31.0])
    assert said(one, two) == "fastest over 256 tokens: not distinguishable (45.1 tok/s to 45.3 tok/s)."
    assert said(slow, two, one) == (
        "fastest over 256 tokens, not distinguishable: s a (45.3 tok/s), s b (45.1 tok/s)."
    )
    open_ended = row("b", tokens_per_s=20.0, tokens_per_s_ci95=[19.0, None])
    assert "not distinguishable" in said(one, open_ended)


def test_a_speed_without_an_interval_and_that_of_one_run_have_the_stated_noise():
    for more in ({}, {"repeats": 1, "tokens_per_s_ci95": [99.9, 100.1]}):
        first = row("a", tokens_per_s=100.0, **more)
        assert "not distinguishable" in said(first, row("b", tokens_per_s=103.0))
        assert "s b (105.0 tok/s)" in said(first, row("b", tokens_per_s=105.0))


def test_rates_over_different_numbers_of_tokens_are_not_compared():
    short, more = row("a", tokens_per_s=90.0, tokens=40), row("b", tokens_per_s=50.0)
    assert said(short, more, row("c", tokens_per_s=40.0)) == (
        "fastest over 256 tokens of 2 cells with this figure: s b (50.0 tok/s)."
    )


def test_B_is_compared_only_where_it_is_identifiable():
    line, flat = row("a", B_ms=10.0, W_identifiable=True), row("b", B_ms=12.0, shape="flat")
    short = row("c", B_ms=1.0, W_identifiable=False, shape="short")
    assert said(line, flat, short) == (
        "fastest at zero context of 2 cells with this figure: s a (B 10.00 ms)."
    )
    theirs = row("d", B_ms=9.0, W_identifiable=False, kind="reported")
    assert said(theirs) == "s d: B 9.00 ms."


def test_perplexities_are_told_apart_by_their_own_error_or_by_the_stated_one():
    one, two = row("q5_0", perplexity=14.12), row("fp16", perplexity=14.21, status="unavailable")
    far = row("q4_0", perplexity=14.90)
    assert said(one, two, far) == "lowest perplexity, not distinguishable: s q5_0 (14.12), s fp16 (14.21)."
    sure = {"perplexity_stderr": 0.01}
    assert said(one | sure, two | sure, far) == "lowest perplexity: s q5_0 (14.12)."


def test_the_smallest_is_named_with_the_perplexity_that_it_comes_with():
    small = row("q2_k", file_bytes=298e6, perplexity=62.14)
    large = row("q8_0", file_bytes=664e6, perplexity=34.22)
    assert said(small, large).startswith("smallest file: s q2_k (298 MB, perplexity 62.14); ")


def test_memory_within_its_noise_has_no_winner():
    near = said(row("a", peak_rss_bytes=1000e6), row("b", peak_rss_bytes=1010e6))
    assert near == "least peak RSS: not distinguishable (1,000 MB to 1,010 MB)."
    assert "s a (1,000 MB)" in said(row("a", peak_rss_bytes=1000e6), row("b", peak_rss_bytes=1100e6))


def test_a_context_that_stopped_at_its_target_may_be_longer_than_the_longest_found():
    target = row("b", max_ctx=100_000, max_ctx_is_target=True)
    assert said(row("a", max_ctx=182_253), row("c", max_ctx=90_000), target) == (
        "longest context: s a (182,253 tokens), while s b stopped at a target (100,000+ tokens) and may hold"
        " more."
    )


def test_figures_of_two_machines_and_of_others_are_not_ranked_together():
    rows = [
        row("a", machine="here", tokens_per_s=10.0),
        row("b", machine="here", tokens_per_s=20.0),
        row("c", machine="there", tokens_per_s=99.0, kind="reported"),
    ]
    assert summary.per_model(Study("t", rows)) == [
        ("m on here", "fastest over 256 tokens: s b (20.0 tok/s)."),
        ("m on there, third-party", "s c: 99.0 tok/s."),
    ]


def test_a_page_of_published_figures_says_on_top_whose_they_are_and_of_which_year(published: Study):
    said, *notes = summary.third_party(published.rows)
    assert "51 of 148 cells: bpw is nominal: scales, zeros and the 16-bit lm_head come on top." in notes
    assert said.startswith("148 of 148 cells hold third-party figures, not measured here: ")
    assert all(part in said for part in ("by noooop, 2024", "github.com/noooop", "CC0-1.0"))
    page = report_page.page(published)
    assert page.index("third-party figures") < page.index("148 cells of 8 models")
    assert report_page.markdown(published).startswith(f"> {said}\n")
    ours = row("a") | {"baseline": published.rows[0]}
    (beside,) = summary.third_party([ours])
    assert beside.startswith("1 of 1 cells are compared with third-party figures")
    assert summary.third_party([row("a")]) == []


def test_a_length_that_the_memory_cannot_hold_is_not_held_in_every_table(published: Study):
    text = report_page.markdown(published)
    lines = [
        line for line in text.splitlines() if line.startswith("| qwen1.5-14b autoawq gemm-fused on cuda ")
    ]
    lengths = [cell for line in lines for cell in line.split(" | ") if cell.startswith("100,000+")]
    assert len(lengths) == 2
    assert {cell.rstrip(" |") for cell in lengths} == {"100,000+, not held"}
