"""The first screen of a report, without a browser: an answer to each goal, and the picture."""

import re
from pathlib import Path
from typing import Any

import pytest
from golden_record import record

from harness.analysis.figures import empty_cell
from harness.dataset.study import Study
from harness.records import Stored
from harness.report import head, picture, ranked_groups, summary, variant_looks
from harness.report import page as report_page


def row(name: str, **figures: Any) -> dict[str, Any]:
    """A cell of model `m`; `name`: stack and variant."""
    stack, variant = name.split(" ")
    known = {"name": f"m {name}", "model": "m", "stack": stack, "variant": variant, "status": "ok"}
    return empty_cell() | known | {"kind": "measured", "repeats": 3, "tokens": 256} | figures


CELLS = [
    row("a q8_0", tokens_per_s=50.0, tokens_per_s_ci95=[49.0, 51.0], peak_rss_bytes=8e9, perplexity=8.0),
    row("a q4_0", tokens_per_s=90.0, tokens_per_s_ci95=[88.0, 92.0], peak_rss_bytes=4e9, perplexity=9.0),
    row("b slow", tokens_per_s=40.0, tokens_per_s_ci95=[39.0, 41.0], peak_rss_bytes=6e9, max_ctx=9000),
    row("b gone", status="oom", reasons=["out of memory"], perplexity=7.0),
]
DISTURBED = {"status": "invalid", "reasons": ["waited"], "stayed_disturbed": ["cpu"] * 3}


def group(*cells: dict[str, Any]) -> ranked_groups.Group:
    (found,) = ranked_groups.groups(Study("t", list(cells)))
    return found


def test_published_figures_and_our_own_are_answered_apart():
    cells = [
        row("a v", machine="here", tokens_per_s=1.0, repeats=1),
        row("a w", machine="there", kind="reported"),
    ]
    cells.append(row("a x", machine="here", tokens_per_s=2.0, repeats=1))
    (view,) = report_page.views(Study("t", cells))
    assert [panel.title for panel in view.panels] == ["m on here", "m on there, third-party"]
    assert [panel.answers[0].leaders for panel in view.panels] == [("a x",), ()]


def pictured(*cells: dict[str, Any]) -> dict[str, picture.Picture]:
    drawn = picture.pictures(group(*cells), variant_looks.marks(Study("t", list(cells))))
    return {each.name: each for each in drawn}


def test_the_picture_has_every_ok_variant_best_at_top_left_with_its_front_and_whiskers():
    speed = pictured(*CELLS)["speed"]
    points = {point.label: point for point in speed.points}
    assert [label for label, point in points.items() if point.front] == ["a q4_0"]
    assert points["a q4_0"].x < points["b slow"].x < points["a q8_0"].x
    assert points["a q4_0"].y < points["a q8_0"].y < points["b slow"].y
    for point in points.values():
        low, high = point.whisker or (0, 0)
        assert low > point.y > high
    assert "a q4_0" in speed.text
    assert points["a q4_0"].lines[1:3] == ["90.0 tok/s (95% CI 88.0 to 92.0)", "4.0 GB peak RSS"]


def test_the_quality_picture_has_only_variants_with_a_perplexity_and_says_how_many_lack_one():
    quality = pictured(*CELLS)["quality"]
    assert {point.label for point in quality.points} == {"a q8_0", "a q4_0"}
    assert all(point.front for point in quality.points)
    assert "1 of 3 ok cells lack a figure" in quality.text
    assert pictured(*CELLS[:2])["quality"].points[0].whisker is None  # no standard error is known


def test_speed_against_energy_is_drawn_where_two_cells_have_it_with_what_counted():
    by = {"energy_source": "RAPL: CPU packages, other processes included"}
    cells = [CELLS[0] | by | {"joules_per_token": 2.0}, CELLS[1] | by | {"joules_per_token": 0.5}, CELLS[2]]
    energy = pictured(*cells)["energy"]
    points = {point.label: point for point in energy.points}
    assert [label for label, point in points.items() if point.front] == ["a q4_0"]
    assert points["a q4_0"].x < points["a q8_0"].x
    assert "J/token 0.5" in points["a q4_0"].lines
    assert energy.x_title == "J/token (RAPL), lower is better"
    assert "1 of 3 ok cells lack a figure" in energy.text
    assert "energy" not in pictured(*cells[1:])


SCORED = [
    row("a q8_0", tokens_per_s=50.0, peak_rss_bytes=8e9, perplexity=8.0, perplexity_stderr=0.5)
    | {"kld_mean": 2e-4, "kld_mean_ci95": [1.9e-4, 2.1e-4], "tokens_per_s_ci95": [49.0, 51.0]},
    row("a q4_0", tokens_per_s=90.0, peak_rss_bytes=4e9, perplexity=8.1, perplexity_stderr=0.5)
    | {"kld_mean": 3e-2, "kld_mean_ci95": [2.9e-2, 3.1e-2], "tokens_per_s_ci95": [88.0, 92.0]},
    row("a q3", tokens_per_s=80.0, peak_rss_bytes=5e9, perplexity=8.2, perplexity_stderr=0.5)
    | {"kld_mean": 4e-2, "kld_mean_ci95": [3.9e-2, 4.1e-2], "tokens_per_s_ci95": [78.0, 82.0]},
]


def test_where_kl_divergence_is_known_it_stands_for_quality_with_a_cross_of_intervals():
    drawn = pictured(*SCORED)
    points = {point.label: point for point in drawn["both"].points}
    assert drawn["both"].x_title.startswith("KLD")
    assert [label for label, point in points.items() if point.front] == ["a q8_0", "a q4_0"]
    for point in points.values():
        (left, right), (low, high) = point.across or (0, 0), point.whisker or (0, 0)
        assert left < point.x < right
        assert high < point.y < low
    assert [text for _, text in drawn["both"].x_ticks] == ["1e-4", "0.001", "0.01", "0.1"]
    # A decade is as wide everywhere: the axis is logarithmic.
    places = [place for place, _ in drawn["both"].x_ticks]
    assert places[1] - places[0] == pytest.approx(places[3] - places[2], abs=0.02)


def test_without_perplexity_there_is_one_picture_and_with_one_point_none():
    assert pictured(CELLS[0] | {"perplexity": None}, CELLS[2]).keys() == {"speed"}
    assert pictured(CELLS[0]) == {}


def test_differences_of_no_matter_do_not_fill_the_picture():
    cells = [row(f"a v{place}", tokens_per_s=100 + place / 10, peak_rss_bytes=5e8) for place in (0, 1)]
    speed = pictured(*cells)["speed"]
    low, high = sorted(point.y for point in speed.points)
    assert 0 < high - low < 2
    assert speed.x_title == "MB, peak RSS"


def test_a_model_is_a_view_of_its_own_and_all_models_are_another():
    cells = [*CELLS, row("a q8_0") | {"model": "n", "name": "n a q8_0", "tokens_per_s": 5.0}]
    page = report_page.page(Study("t", cells))
    shown = re.findall(r'<section class=view id="?(\w+)"?[^>]*?( hidden)?>', page)
    assert shown == [("m0", ""), ("m1", " hidden"), ("all", " hidden")]
    assert ".view[hidden] { display: block }" in page.partition("<noscript>")[2]  # without a script: all
    assert "id=all" not in report_page.page(Study("t", CELLS))


def test_a_model_without_an_ok_cell_says_why_and_what_to_do_in_its_view_and_among_all_models():
    failed = row("a q8_0", status="oom", reasons=["no room"]) | {"model": "n", "name": "n a q8_0"}
    page = report_page.page(Study("t", [*CELLS, failed]))
    assert page.count("No cell is ok. 1 of 1 oom: no room. Next: take fewer bits or a shorter context") == 2


def test_cells_that_stayed_disturbed_have_the_disturbance_as_the_cause_and_its_next_step():
    cell = row("a q8_0", status="invalid", reasons=["1,234 page faults"], stayed_disturbed=["memory"] * 3)
    assert summary.none_ok(Study("t", [cell])) == (
        "No cell is ok. 3 of 3 repeats stayed disturbed: memory was short and pages were read from disk;"
        " close programs that use memory, then run again with --retry-failed."
    )


def test_a_study_of_ok_prefills_alone_does_not_say_that_no_cell_is_ok():
    cell = row("a q8_0") | {"name": "m a q8_0 prefill", "workload": "prefill"}
    assert "No cell is ok" not in report_page.page(Study("t", [cell]))


def ran(*changed: dict[str, Any]) -> Study:
    stored = [Stored(Path(), record(**each)) for each in changed]
    days = sorted(each.record["started_utc"][:10] for each in stored)
    return Study("t", CELLS, ran=stored, days=days, n_records=len(stored))


def test_the_page_begins_with_machine_date_and_commit_and_ends_with_how_to_cite_it():
    commit = {"harness__git_commit": "0123456789abcdef"}
    study = ran(commit, commit | {"started_utc": "2026-11-21T00:00:00+00:00"})
    page = report_page.page(study)
    begins = "AMD EPYC, 2 cores, 25.3 GB · 2026-11-20 to 2026-11-21 · harness 0.1.0 (commit 0123456789)"
    assert re.search(r"<h1>t</h1>\s*<p class=source>(.*)</p>", page)[1] == begins  # type: ignore[index]
    text, bibtex = head.citations(study.title, head.origin(study))
    for part in ("AMD EPYC", "harness 0.1.0 (commit 0123456789)", "2026-11-21", "2 records"):
        assert part in text
        assert part in bibtex
    assert re.fullmatch(
        r"@misc\{harness-t-2026-11-21, title = \{.*\}, year = \{2026\}, note = \{.*\}\}", bibtex
    )
    assert text in page.partition("<footer>")[2]


def test_published_figures_are_cited_by_their_source_and_a_log_not_at_all():
    source = {"title": "100% of a_b", "url": "https://x.example/", "license": "CC0-1.0"}
    study = ran({"kind": "reported", "source": source, "harness": None})
    text, bibtex = head.citations(study.title, head.origin(study))
    assert "100% of a_b, https://x.example/" in text
    assert r"100\% of a\_b" in bibtex
    assert head.citations("t", head.origin(Study("t", []))) == []


def test_the_first_figure_of_an_answer_is_its_speed_and_the_key_says_what_colour_and_shape_are():
    page = report_page.page(Study("t", CELLS))
    assert "<strong>90.0 tok/s</strong>" in page
    assert page.index("<b>Stack</b>") < page.index("<b>Bits per weight</b>")
    assert "<b>Variant</b>" in report_page.page(Study("t", CELLS[:2]))


def test_sizes_have_one_unit_on_the_page_and_the_page_says_it_once():
    page = report_page.page(ran({})).partition('id="plotly"')[0]
    assert "GiB" not in page
    assert page.count("1e6 bytes") == 1


def test_figures_of_a_machine_that_was_never_quiet_are_provisional_on_top_of_the_page():
    page = report_page.page(Study("t", [each | DISTURBED for each in CELLS]))
    assert "No cell is ok." not in page
    assert page.index(summary.PROVISIONAL) < page.index("provisional: 90.0 tok/s")
    assert "provisional 0/3" in page
    assert summary.PROVISIONAL not in report_page.page(Study("t", [CELLS[0] | DISTURBED, *CELLS[1:]]))


@pytest.mark.parametrize("place", ["name", "variant", "stack", "model"])
def test_no_name_is_markup_on_the_first_screen(place: str):
    evil = "\"'><img src=x onerror=alert(1)>"
    cells = [cell | {place: f"{cell[place]} {evil}"} for cell in CELLS]
    page = report_page.page(Study("t", cells))
    assert "<img" not in page.partition('id="plotly"')[0]
    assert "&lt;img" in page
