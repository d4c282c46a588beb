"""The tables of a model on the page: their first columns, the sparklines and the badges."""

from typing import Any

import numpy as np

from harness.analysis.figures import empty_cell
from harness.dataset.study import Curve, Study
from harness.report import model_tables
from harness.report import page as report_page


def row(name: str = "m s v", **figures: Any) -> dict[str, Any]:
    model, stack, variant = name.split(" ")
    known = {"name": name, "model": model, "stack": stack, "variant": variant, "status": "ok"}
    known |= {"kind": "measured", "repeats": 3, "repeats_ok": 3, "baseline": None}
    return empty_cell() | known | figures


MANY = {"nominal_bits": 4, "bpw": 4.5, "ttft_ms": 9.0, "B_ms": 5.0, "B_ci95_ms": [4.0, 6.0], "B_ratio": 0.5}
MANY |= {
    "B_as_w16_ms": 9.0,
    "tokens_per_s": 99.0,
    "start_tokens_per_s": 99.0,
    "last_n": 99,
    "perplexity": 8.0,
}


def curve(slope: float = 1.0) -> Curve:
    n = np.arange(26.0, 3026)
    return Curve(n, 10 + slope * n / 1000)


def test_a_table_begins_with_its_most_asked_columns_and_shows_eight_with_the_sparkline():
    (table, *_) = model_tables.tables_of_model("m", [row(**MANY)], {"m s v": curve()})
    shown = [heading for heading, more in zip(table.table.headings, table.more, strict=True) if not more]
    assert shown == ["cell", "status", "tok/s", "TTFT ms", "perplexity", "B ms", "BPW"]
    assert sum(table.more) >= 4
    (bare, *_) = model_tables.tables_of_model("m", [row(**MANY)], {})
    assert (bare.more.count(False), bare.sparks) == (model_tables.MOST, [])


def test_a_few_columns_are_all_shown():
    (table,) = model_tables.tables_of_model("m", [row(B_ms=5.0)], {})
    assert table.more == [False, False, False]


def test_a_sparkline_begins_at_zero_and_leaves_out_the_first_token():
    slow_start = Curve(curve().n, np.concatenate([[500.0], curve().ms[1:]]))
    found = model_tables.spark(slow_start)
    assert found is not None
    heights = [float(point.split(",")[1]) for point in found.points.split()]
    assert heights[-1] == 1.0  # the highest median is at the top
    assert heights == sorted(heights, reverse=True)
    assert heights[0] == 1 + round((model_tables.HEIGHT - 2) * (1 - 10.075 / 12.976), 1)
    assert found.text == "10.1 to 13.0 ms by position 3,025"


def test_a_series_too_short_for_a_sparkline_has_none():
    assert model_tables.spark(Curve(np.arange(26.0, 40), np.full(14, 9.0))) is None
    assert model_tables.spark(None) is None


def test_badges_are_a_rows_warnings_by_code_and_why_it_is_not_ok():
    flags = [{"code": "halves_differ", "detail": "one"}, {"code": "halves_differ", "detail": "two"}]
    bad = row(status="invalid", reasons=["too fast", "too hot"], flags=flags)
    assert model_tables.badges_of(bad) == [("why", "too fast; too hot"), ("halves differ", "one; two")]
    assert model_tables.badges_of(row(flags=[])) == []


def test_no_reason_or_detail_is_markup_in_a_badge():
    evil = '"><img src=x>'
    bad = row(status="invalid", B_ms=1.0, reasons=[evil], flags=[{"code": evil, "detail": evil}])
    page = report_page.page(Study("t", [bad])).partition('id="plotly"')[0]
    assert "<img" not in page
    assert page.count("class=badge") == 2
