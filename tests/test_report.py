"""Text and drawings of a report on synthetic studies, without a browser (that is test_page.py)."""

import base64
import csv
import io
import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import UndefinedError

from harness.analysis.figures import empty_cell
from harness.dataset.study import Curve, MemoryCurve, Study, failure, labels
from harness.records import ResultsError
from harness.report import (
    bars,
    chapters,
    closing,
    curves,
    exports,
    figure_texts,
    picture,
    plots,
    summary,
    tables,
    templates,
    variant_looks,
)
from harness.report import page as report_page
from harness.report.text_table import Table

SYNTHETIC = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "report.py"))["study"]


def row(name: str = "m llamacpp q4_0", **figures: Any) -> dict[str, Any]:
    model, stack, variant = name.split(" ")
    known = {"name": name, "model": model, "stack": stack, "variant": variant, "status": "ok", "repeats": 3}
    return empty_cell() | known | {"repeats_ok": 3, "cell": name, "baseline": None} | figures


def latency(*drawn: tuple[dict[str, Any], Any]) -> plots.Chart:
    """The figure of rows of one model, each with its latencies from n = 26 on."""
    cells = [cell for cell, _ in drawn]
    series = {cell["name"]: Curve(np.arange(26.0, 26 + len(ms)), ms) for cell, ms in drawn}
    named = [(cell["variant"], cell) for cell in cells]
    figure = curves.latency_curves("m", named, series, variant_looks.marks(Study("t", cells)))
    assert figure is not None
    return figure


def column(heading: str) -> tables.Column:
    return next(c for table in tables.TABLES.values() for c in table if c.heading == heading)


@pytest.mark.parametrize(
    ("heading", "figures", "text"),
    [
        ("B ms", {"B_ms": 12.345}, "12.35"),
        ("B ms", {}, "-"),
        ("B ms", {"status": "oom", "reasons": ["CUDA out of memory"]}, "oom"),
        ("B ms", {"status": "oom", "B_ms": 12.0}, "12.00"),  # it stopped early; the fit uses its tokens
        ("B ms", {"status": "error", "reasons": ["no kernel"]}, "error: no kernel"),
        ("B MBU, spec", {"status": "error", "reasons": ["no kernel"]}, "-"),
        ("B 95%", {"B_ci95_ms": [12.0, 12.5]}, "12.00 to 12.50"),
        ("B 95%", {"B_ci95_ms": [None, 12.5]}, "< 12.50"),
        ("W 95%", {"W_ci95": [900.4, None]}, "> 900"),
        ("W tok/ms", {"B_ms": 1.0, "W_tokens_per_ms": 1e4, "W_identifiable": False}, "not identifiable"),
        ("W MBU, spec", {"B_ms": 1.0, "W_ratio": 0.5, "W_identifiable": False}, "-"),
        ("W tok/ms", {"status": "oom", "W_identifiable": False}, "oom"),
        ("W tok/ms", {"W_tokens_per_ms": 12345.6, "W_identifiable": True}, "12,346"),
        ("50 ms from n", {"slow_from_n": 2049, "last_n": 9999}, "2,049"),
        ("50 ms from n", {"slow_from_n": None, "last_n": 9999}, "not by 9,999"),
        ("longest context", {"max_ctx": 100_000, "max_ctx_is_target": True}, "100,000+"),
        ("tensors MB", {"model_bytes": 1.5e9}, "1,500"),
        (
            "spikes",
            {"spikes": {"count": 3, "size_ms": 120.0, "period_tokens": 256}},
            "3 of 120.0 ms every 256",
        ),
        ("spikes", {"spikes": {"count": 1, "size_ms": 120.0, "period_tokens": None}}, "1 of 120.0 ms"),
        ("flags", {"flags": [{"code": "a", "detail": ""}, {"code": "a", "detail": ""}]}, "a"),
        ("B / baseline", {"B_ms": 10.0, "baseline": row(B_ms=8.0)}, "1.25x"),
        ("B / baseline", {"B_ms": 10.0, "baseline": None}, "-"),
        ("B ms", {"B_ms": float("nan")}, "-"),
    ],
)
def test_a_cell_tells_its_figure_or_what_became_of_it(heading: str, figures: Any, text: str):
    assert tables.column_cell(row(**figures), column(heading)) == text


def test_a_reported_row_says_so_and_a_measured_one_how_many_repeats_were_ok():
    assert figure_texts.state(row(kind="reported")) == "reported"
    assert figure_texts.state(row(kind="reported", status="oom")) == "reported oom"
    assert figure_texts.state(row()) == "ok 3/3"


def test_the_summary_names_the_fastest_smallest_longest_and_what_failed():
    cells = [
        row(
            "m s q8", tokens_per_s=50.0, repeats=1, B_ms=20.0, peak_rss_bytes=2e9, max_ctx=100, perplexity=8.0
        ),
        row(
            "m s q4", tokens_per_s=90.0, repeats=1, B_ms=11.0, peak_rss_bytes=1e9, max_ctx=200, perplexity=9.0
        ),
        row("m s q9", tokens_per_s=999.0, status="invalid", reasons=["faster than memory allows"]),
    ]
    study = Study("t", cells)
    assert summary.counts(study) == "3 cells: 2 ok, 1 invalid."
    assert closing.sentences(study) == [
        "m: fastest, smallest and longest context: s q4 (90.0 tok/s, 1.0 GB peak RSS, perplexity 9.00, 200"
        " tokens); best quality that fits: s q8 (perplexity 8.00, 50.0 tok/s, 2.0 GB peak RSS)."
    ]
    assert summary.failures(study) == [("invalid: faster than memory allows", ["m s q9"])]
    assert closing.sentences(Study("t", [cells[2]])) == ["m: no cell is ok."]


def test_a_thinned_curve_is_made_of_measured_points_and_keeps_its_highest():
    chance = np.random.default_rng(0)
    n = np.arange(26.0, 10_000)
    ms = 10 + n / 1000 + chance.normal(0, 0.05, len(n))
    spikes = chance.choice(np.arange(1, len(n) - 1), 60, replace=False)
    ms[spikes] += 100
    x, y = plots.thinned(n, ms)
    assert len(x) <= 1500
    assert set(zip(x, y, strict=True)) <= set(zip(n, ms, strict=True))
    assert n[ms.argmax()] in x
    assert (np.diff(x) > 0).all()
    assert (x[0], x[-1]) == (n[0], n[-1])


def test_packed_numbers_are_those_that_were_given():
    whole = plots.packed(np.array([26.0, 9999.0]))
    assert whole["dtype"] == "u2"
    assert np.frombuffer(base64.b64decode(whole["bdata"]), "<u2").tolist() == [26, 9999]
    broken = plots.packed(np.array([12.345678, 70_000.0]))
    assert np.frombuffer(base64.b64decode(broken["bdata"]), "<f4") == pytest.approx(
        [12.345678, 70_000], rel=1e-6
    )


def test_the_colour_is_the_stack_the_shape_is_the_bits_and_alike_in_every_model():
    names = ("llamacpp q8_0", "llamacpp q4_k_m", "llamacpp q2_k", "hf bf16", "bnb nf4", "gptq int4-marlin")
    cells = [row(f"{model} {name}") for model in "ab" for name in names]
    found = variant_looks.marks(Study("t", cells))
    looks = [found[f"a {name}"] for name in names]
    assert looks == [found[f"b {name}"] for name in names]
    assert len({mark.colour for mark in looks[:3]}) == 1
    assert len({mark.colour for mark in looks[2:]}) == 4
    symbols = ["square", "triangle-up", "triangle-down", "circle", "triangle-up", "triangle-up"]
    assert [mark.symbol for mark in looks] == symbols


@pytest.mark.parametrize(
    ("known", "word"),
    [
        ({"variant": "q6_k", "nominal_bits": 6}, "6 to 5"),
        ({"variant": "exllamav2-fused", "bpw": 4.3}, "4"),  # the digits are of the kernel
        ({"variant": "q4_0", "bpw": 5.02}, "4"),  # a large embedding in 8 bits
        ({"variant": "gemm"}, "unknown"),
    ],
)
def test_bits_are_those_of_the_types_name_before_the_bits_per_weight(known: Any, word: str):
    assert variant_looks.bits(row(**known))[0] == word


def test_a_study_of_one_stack_has_a_colour_per_variant():
    cells = [row(f"m s v{i}") for i in range(6)]
    assert len({mark.colour for mark in variant_looks.marks(Study("t", cells)).values()}) == 6


def test_a_stack_has_the_same_colour_on_all_pages_and_an_unknown_one_has_a_hue_of_no_other():
    def hues(*stacks: str) -> dict[str, str]:
        return variant_looks.hues_of(Study("t", [row(f"m {stack} v") for stack in stacks]))

    known = ("llamacpp", "hf", "gptq", "bnb", "autoawq", "gptqm")
    every = hues(*known, "mine", "yours", "theirs")
    assert len(set(every.values())) == 9
    assert hues("yours", "hf", "mine", "theirs").items() <= every.items()
    assert hues("gptqm", "mine")["mine"] == hues("mine", "llamacpp")["mine"]
    many = hues("llamacpp", *map(str, range(9)))
    assert len(set(many.values())) == 10  # those of stacks that are not here, and grey
    assert set(many.values()) - set(plots.COLOURS) == {plots.FAINT}


def _light(colour: str) -> np.ndarray[Any, Any]:
    share = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


# Machado, Oliveira and Fernandes 2009: linear RGB as someone without red, or without green, cones sees it.
SEEN = {
    "by all": np.eye(3),
    "without red": np.array(
        [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]
    ),
    "without green": np.array(
        [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]
    ),
}


@pytest.mark.parametrize("night", [False, True])
def test_the_hues_differ_also_for_colour_blind_readers_and_stand_out_from_the_paper(night: bool):
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])

    def lab(colour: str, seen: Any) -> Any:
        xyz = to_xyz @ np.clip(seen @ _light(colour), 0, 1) / (0.9505, 1, 1.089)
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    hues = list(plots.HUES.values() if night else plots.HUES)
    paper = float((to_xyz @ _light(plots.NIGHT[plots.PAPER] if night else plots.PAPER))[1])
    for hue in hues:
        low, high = sorted((paper, float((to_xyz @ _light(hue))[1])))
        assert (high + 0.05) / (low + 0.05) > 3
    for who, seen in SEEN.items():
        apart = [np.linalg.norm(lab(a, seen) - lab(b, seen)) for a in hues for b in hues if a != b]
        assert min(apart) > 15, who


def test_the_pareto_front_is_what_nothing_is_as_good_as_in_both():
    assert picture.pareto([(1, 5), (2, 4), (3, 4), (2, 6), (4, 1), (4, 1), (1, 7)]) == {0, 1, 4, 5}


def test_the_view_opens_on_the_usual_latency_and_leaves_the_first_token_out():
    ms = np.full(5000, 10.0)
    ms[0], ms[300::500] = 500.0, 200.0
    figure = latency((row(), ms))
    assert figure.layout["yaxis"]["range"][1] < 15
    curve, ticks = figure.data
    assert curve["meta"] == {"v": 0, "low": 10.0, "top": 11.0, "peak": 10.0}  # the first token is not drawn
    assert ticks["customdata"] == [200.0] * 10
    assert len(np.frombuffer(base64.b64decode(ticks["x"]["bdata"]), "<u2")) == 10
    assert {*ticks["y"]} == {round(1 - curves.EDGE, 3)}


def test_the_limits_of_all_variants_are_one_band():
    cells = [row(f"m s v{B}", B_theory_ms=B, W_theory_tokens_per_ms=100.0, B_ms=2 * B) for B in (1.0, 3.0)]
    figure = latency(*((cell, np.full(100, cell["B_ms"])) for cell in cells))
    (band,) = (trace for trace in figure.data if trace["meta"].get("kind") == "theory")
    half = len(band["y"]) // 2
    assert (band["y"][0], band["y"][-1]) == (1.0, 3.0)
    assert (band["y"][half - 1], band["y"][half]) == (2.24, 4.24)


def test_limits_and_baseline_stand_beside_the_bars_and_an_unknown_W_has_none():
    cell = row(B_ms=10.0, B_theory_ms=5.0, B_ci95_ms=[9.0, 12.0], baseline=row(B_ms=8))
    cell |= {"W_tokens_per_ms": 1000.0, "W_identifiable": False}
    drawn = chapters.with_data(bars.of_model("m", [("v", cell)], variant_looks.marks(Study("t", [cell]))))
    assert [figure.name for figure in drawn] == ["B"]
    bar, sheet, baseline = drawn[0].data
    assert (bar["error_x"]["arrayminus"], bar["error_x"]["array"]) == ([1.0], [2.0])
    assert (sheet["x"], baseline["x"]) == ([5.0], [8.0])


def test_every_figure_has_its_text():
    study = SYNTHETIC(tokens=600)
    in_chapters = report_page.figures_chapters(study)["prefill"].figures.items()
    decodes = {model: report_page.of_decodes(study, model) for model in study.decodes}
    for title, drawn in [*decodes.items(), *in_chapters]:
        assert drawn, title
        for figure in drawn:
            assert figure.text.endswith(".")
    first, *_ = decodes.values()
    assert [figure.name for figure in first] == ["latency", "B", "W", "memory-over-time"]


def test_figures_need_no_more_than_a_row_has():
    bare = Study("t", [row("m s x"), row("m s y", status="error")])
    assert report_page.of_decodes(bare, "m") == []
    assert "Nothing to draw" in report_page.page(bare)
    assert "No cells." in report_page.page(Study("t", []))
    assert failure(bare.cells[1]) == "error"
    short = Study("t", [row()], series={row()["name"]: Curve(np.array([26.0]), np.array([1.0]))})
    memory = {row()["name"]: MemoryCurve(np.array([0.0, 1.0]), None, np.array([np.nan, 2e9]))}
    (drawn,) = report_page.of_decodes(replace(short, memory=memory), "m")
    assert drawn.name == "memory-over-time"


def test_markdown_has_the_pages_tables_and_no_name_breaks_them():
    text = exports.markdown(Study("t", [row("m s a|b<i>", B_ms=12.5), row("m s q4", status="oom")]))
    assert text.startswith("2 cells: 1 ok, 1 oom.\n\n## Invalid and failed cells\n\n")
    assert "- oom (m s q4)" in text
    assert "| cell | status | B ms |" in text
    assert "| m s a\\|b&lt;i> | ok 3/3 | 12.50 |" in text
    assert "| m s q4 | oom 3/3 | oom |" in text


def test_csv_has_every_figure_in_full_and_empty_where_there_is_none():
    text = exports.csv(
        [row(B_ms=12.345678, B_ci95_ms=[12.0, None], baseline=row(B_ms=11.0)), row(status="oom")]
    )
    first, second = csv.DictReader(io.StringIO(text))
    assert (first["B_ms"], first["B_ci95_ms_low"], first["B_ci95_ms_high"]) == ("12.345678", "12.0", "")
    assert (first["baseline_B_ms"], second["B_ms"], second["status"]) == ("11.0", "", "oom")


def test_json_is_one_array_without_nan():
    text = exports.json([row(B_ms=float("nan"), W_ci95=[1.0, float("inf")])])
    (cell,) = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert cell["B_ms"] is None
    assert cell["W_ci95"] == [1.0, None]


def test_a_name_can_break_neither_the_pages_html_nor_its_json():
    evil = "</script><img/onerror=alert(1)/src=x>"
    page = report_page.page(SYNTHETIC(tokens=300, odd_name=evil))
    assert evil not in page
    assert "<img" not in page.split("<script>")[0]
    assert "&lt;/script&gt;&lt;img/onerror" in page


def test_no_text_of_a_comparison_is_markup():
    evil = "</script><img src=x>'\""
    table = Table([evil, evil], [[evil, evil]], marked=[True], title=evil, meanings=[evil, evil])
    drawn = plots.Chart(evil, evil, evil, [{"name": evil}], {"title": evil})
    texts = {"title": evil, "notes": [evil], "counts": evil, "meaning": [evil]}
    page = templates.filled("comparison.html", **texts, tables=[table], figures=[drawn])
    assert "<img" not in page.split("<script>")[0]
    assert evil not in page
    (figure,) = re.findall(r'<script type="application/json">(.*?)</script>', page)
    assert json.loads(figure)["data"] == [{"name": evil}]


def test_a_page_without_one_of_its_values_is_an_error():
    with pytest.raises(UndefinedError, match="'lead' is undefined"):
        templates.filled("history.html", title="t", warnings=[])


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot be written"):
        report_page.write(tmp_path / "file" / "page.html", Study("t", [row()]))


def test_a_label_leaves_out_what_all_cells_of_a_model_share():
    def cells(*devices: str) -> list[dict[str, Any]]:
        return [row(f"m s q{i}") | {"name": f"m s q{i} on {d}", "device": d} for i, d in enumerate(devices)]

    assert labels(cells("cuda", "cuda"), "m") == ["s q0", "s q1"]
    assert labels(cells("cuda", "hip"), "m") == ["s q0 on cuda", "s q1 on hip"]
    same = [{"name": "m s q", "device": "cpu"}, {"name": "s q", "device": "cpu"}]
    assert labels(same, "m") == ["m s q", "s q"]
