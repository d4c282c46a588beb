"""What a report says and draws of synthetic studies, without a browser (that is test_page.py)."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import UndefinedError

from harness.dataset.study import Curve, MemoryCurve, Study, failure, labels
from harness.report import (
    bars,
    cell_text,
    columns,
    comparisons,
    curves,
    document,
    drawing,
    export,
    figures,
    markup,
    summary,
)
from harness.report.table import Table
from harness.results import ResultsError

SYNTHETIC = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "report.py"))["study"]


def row(name: str = "m llamacpp q4_0", **figures: Any) -> dict[str, Any]:
    model, stack, variant = name.split(" ")
    known = {"name": name, "model": model, "stack": stack, "variant": variant, "status": "ok", "repeats": 3}
    return known | {"repeats_ok": 3, "cell": name} | figures


def column(heading: str) -> columns.Column:
    return next(c for table in columns.TABLES.values() for c in table if c.heading == heading)


@pytest.mark.parametrize(
    ("heading", "figures", "text"),
    [
        ("B ms", {"B_ms": 12.345}, "12.35"),
        ("B ms", {}, "-"),
        ("B ms", {"status": "oom", "reasons": ["CUDA out of memory"]}, "oom"),
        ("B ms", {"status": "oom", "B_ms": 12.0}, "12.00"),  # it stopped early, and is fitted on what it has
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
        ("longest context", {"max_ctx": "100000+"}, "100000+"),
        ("tensors MB", {"model_bytes": 1.5e9}, "1,500"),
        (
            "spikes",
            {"spikes": {"count": 3, "size_ms": 120.0, "period_tokens": 256}},
            "3 of 120.0 ms every 256",
        ),
        ("spikes", {"spikes": {"count": 1, "size_ms": 120.0, "period_tokens": None}}, "1 of 120.0 ms"),
        ("flags", {"flags": [{"code": "a", "detail": ""}, {"code": "a", "detail": ""}]}, "a"),
        ("B / baseline", {"B_ms": 10.0, "baseline": {"B_ms": 8.0}}, "1.25x"),
        ("B / baseline", {"B_ms": 10.0, "baseline": None}, "-"),
        ("B ms", {"B_ms": float("nan")}, "-"),
    ],
)
def test_a_cell_tells_its_figure_or_what_became_of_it(heading: str, figures: Any, text: str):
    assert columns.cell(row(**figures), column(heading)) == text


def test_a_reported_row_says_so_and_a_measured_one_how_many_repeats_were_ok():
    assert cell_text.state(row(kind="reported")) == "reported"
    assert cell_text.state(row(kind="reported", status="oom")) == "reported oom"
    assert cell_text.state(row()) == "ok 3/3"


def test_the_summary_names_the_fastest_smallest_longest_and_what_failed():
    cells = [
        row("m s q8", tokens_per_s=50.0, B_ms=20.0, peak_rss_bytes=2e9, max_ctx=100, perplexity=8.0),
        row("m s q4", tokens_per_s=90.0, B_ms=11.0, peak_rss_bytes=1e9, max_ctx=200, perplexity=9.0),
        row("m s q9", tokens_per_s=999.0, status="invalid", reasons=["faster than memory allows"]),
    ]
    study = Study("t", cells)
    assert summary.counts(study) == "3 cells: 2 ok, 1 invalid."
    assert summary.per_model(study) == [
        (
            "m",
            "fastest: s q4 (90.0 tok/s); least peak RSS: s q4 (1,000 MB, perplexity 9.00); longest context: s"
            " q4 (200 tokens); lowest perplexity: s q8 (8.00).",
        )
    ]
    assert summary.failures(study) == [("invalid: faster than memory allows", ["m s q9"])]
    assert summary.per_model(Study("t", [cells[2]])) == [("m", "no cell is ok.")]


def test_a_thinned_curve_is_made_of_measured_points_and_keeps_its_spikes():
    chance = np.random.default_rng(0)
    n = np.arange(26.0, 10_000)
    ms = 10 + n / 1000 + chance.normal(0, 0.05, len(n))
    spikes = chance.choice(np.arange(1, len(n) - 1), 60, replace=False)
    ms[spikes] += 100
    x, y = drawing.thinned(n, ms)
    assert len(x) <= 1500
    assert set(zip(x, y, strict=True)) <= set(zip(n, ms, strict=True))
    assert set(n[spikes]) <= set(x)
    assert (np.diff(x) > 0).all()
    assert (x[0], x[-1]) == (n[0], n[-1])


def test_packed_numbers_are_those_that_were_given():
    whole = drawing.packed(np.array([26.0, 9999.0]))
    assert whole["dtype"] == "u2"
    assert np.frombuffer(base64.b64decode(whole["bdata"]), "<u2").tolist() == [26, 9999]
    broken = drawing.packed(np.array([12.345678, 70_000.0]))
    assert np.frombuffer(base64.b64decode(broken["bdata"]), "<f4") == pytest.approx(
        [12.345678, 70_000], rel=1e-6
    )


def test_fifty_six_variants_look_different_and_the_same_variant_alike_in_every_model():
    cells = [row(f"{model} s v{i}") for model in "ab" for i in range(56)]
    marks = drawing.marks(Study("t", cells))
    assert len(set(marks.values())) == 56
    assert marks["a s v3"] == marks["b s v3"]
    first = [marks[f"a s v{i}"] for i in range(7)]
    assert len({mark.colour for mark in first}) == len({mark.symbol for mark in first}) == 7


def test_the_pareto_front_is_what_nothing_is_as_good_as_in_both():
    assert comparisons.pareto([(1, 5), (2, 4), (3, 4), (2, 6), (4, 1), (4, 1), (1, 7)]) == {0, 1, 4, 5}


def test_the_view_opens_on_the_usual_latency_and_leaves_the_first_token_out():
    n = np.arange(26.0, 5026)
    ms = np.full(5000, 10.0)
    ms[0], ms[300::500] = 500.0, 200.0
    figure = curves.latency(
        "m", [("v", row())], {row()["name"]: Curve(n, ms)}, drawing.marks(Study("t", [row()]))
    )
    assert figure is not None
    assert figure.layout["yaxis"]["range"][1] < 15
    assert figure.data[0]["meta"] == {"v": 0, "low": 10.0, "top": 11.0, "peak": 200.0}


def test_limits_and_baseline_stand_beside_the_bars_and_an_unknown_W_has_none():
    cell = row(
        B_ms=10.0,
        B_ratio=0.5,
        B_measured_ratio=0.6,
        B_ci95_ms=[9.0, 12.0],
        baseline={"B_ms": 8},
        W_tokens_per_ms=1000.0,
        W_identifiable=False,
    )
    marks = drawing.marks(Study("t", [cell]))
    drawn = bars.bars("m", [("v", cell)], marks)
    assert [figure.name for figure in drawn] == ["B"]
    bar, sheet, measured, baseline = drawn[0].data
    assert (bar["error_x"]["arrayminus"], bar["error_x"]["array"]) == ([1.0], [2.0])
    assert (sheet["x"], measured["x"], baseline["x"]) == ([5.0], [6.0], [8.0])


def test_every_figure_has_its_text_and_its_data_as_a_table():
    study = SYNTHETIC(tokens=600)
    in_chapters = figures.chapters(study)["prefill"].figures.items()
    for title, drawn in [*figures.sections(study).values(), *in_chapters]:
        assert drawn, title
        for figure in drawn:
            assert figure.text.endswith(".")
            assert figure.rows
            assert {len(line) for line in figure.rows} == {len(figure.headers)}
    names = [figure.name for figure in figures.sections(study)["m0"][1]]
    assert names == [
        *("latency", "B", "W", "size-latency", "latency-perplexity", "size-perplexity", "memory")
    ]


def test_figures_need_no_more_than_a_row_has():
    bare = Study("t", [{"name": "x", "status": "ok"}, {"name": "y", "status": "error", "reasons": []}])
    assert figures.sections(bare) == {"m0": ("None", [])}
    assert "Nothing to draw" in document.page(bare)
    assert "No cells." in document.page(Study("t", []))
    assert failure(bare.cells[1]) == "error"
    short = Study("t", [row()], series={row()["name"]: Curve(np.array([26.0]), np.array([1.0]))})
    memory = {row()["name"]: MemoryCurve(np.array([0.0, 1.0]), None, np.array([np.nan, 2e9]))}
    assert [f.name for f in figures.sections(replace(short, memory=memory))["m0"][1]] == ["memory"]


def test_markdown_has_the_pages_tables_and_no_name_breaks_them():
    text = export.markdown(Study("t", [row("m s a|b<i>", B_ms=12.5), row("m s q4", status="oom")]))
    assert text.startswith("2 cells: 1 ok, 1 oom.\n\n- **m**: ")
    assert "- oom (m s q4)" in text
    assert "| cell | status | B ms |" in text
    assert "| m s a\\|b&lt;i> | ok 3/3 | 12.50 |" in text
    assert "| m s q4 | oom 3/3 | oom |" in text


def test_csv_has_every_figure_in_full_and_empty_where_there_is_none():
    text = export.csv(
        [row(B_ms=12.345678, B_ci95_ms=[12.0, None], baseline={"B_ms": 11.0}), row(status="oom")]
    )
    first, second = csv.DictReader(io.StringIO(text))
    assert (first["B_ms"], first["B_ci95_ms_low"], first["B_ci95_ms_high"]) == ("12.345678", "12.0", "")
    assert (first["baseline_B_ms"], second["B_ms"], second["status"]) == ("11.0", "", "oom")


def test_json_is_one_array_without_nan():
    text = export.json([row(B_ms=float("nan"), W_ci95=[1.0, float("inf")])])
    (cell,) = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert cell["B_ms"] is None
    assert cell["W_ci95"] == [1.0, None]


def test_a_name_can_break_neither_the_pages_html_nor_its_json():
    evil = "</script><img/onerror=alert(1)/src=x>"
    page = document.page(SYNTHETIC(tokens=300, odd_name=evil))
    assert evil not in page
    assert "<img" not in page.split("<script>")[0]
    assert "&lt;/script&gt;&lt;img/onerror" in page


def test_no_text_of_a_comparison_is_markup():
    evil = "</script><img src=x>'\""
    table = Table([evil, evil], [[evil, evil]], marked=[True], title=evil, meanings=[evil, evil])
    drawn = drawing.Figure(evil, evil, evil, [{"name": evil}], {"title": evil}, [evil, evil], [[evil, evil]])
    texts = {"title": evil, "notes": [evil], "counts": evil, "meaning": [evil]}
    page = markup.filled("comparison.html", **texts, tables=[table], figures=[drawn])
    assert "<img" not in page.split("<script>")[0]
    assert evil not in page
    (figure,) = re.findall(r'<script type="application/json">(.*?)</script>', page)
    assert json.loads(figure)["data"] == [{"name": evil}]


def test_a_page_without_one_of_its_values_is_an_error():
    with pytest.raises(UndefinedError, match="'lead' is undefined"):
        markup.filled("history.html", title="t", warnings=[])


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot be written"):
        document.write(tmp_path / "file" / "page.html", Study("t", [row()]))


def test_figures_are_written_as_png_files(tmp_path: Path):
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))):
        pytest.skip("no chromium or chrome on PATH")
    study = Study("t", [row("../../m s q4", B_ms=12.0), row("../../m s q8", B_ms=14.0)])
    (path,) = export.png(tmp_path, study)
    assert path == tmp_path / "m-B.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_a_browser_the_figures_are_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("BROWSER_PATH", "/nonexistent")
    with pytest.raises(export.FiguresError, match="none was found; install one"):
        export.png(tmp_path, Study("t", [row(B_ms=12.0)]))


def test_a_label_leaves_out_what_all_cells_of_a_model_share():
    def cells(*devices: str) -> list[dict[str, Any]]:
        return [row(f"m s q{i}") | {"name": f"m s q{i} on {d}", "device": d} for i, d in enumerate(devices)]

    assert labels(cells("cuda", "cuda"), "m") == ["s q0", "s q1"]
    assert labels(cells("cuda", "hip"), "m") == ["s q0 on cuda", "s q1 on hip"]
    same = [{"name": "m s q", "device": "cpu"}, {"name": "s q", "device": "cpu"}]
    assert labels(same, "m") == ["m s q", "s q"]
