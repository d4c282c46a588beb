"""The page in a real browser: it opens offline, and does what a reader asks. Skipped where there is none."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.dataset.study import Study
from harness.report import document

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser on PATH: {', '.join(BROWSERS)}"),
]

SYNTHETIC = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "report.py"))["study"]
MODEL = "m4"  # the section of the fifth model
EVIL = "</script><img src=x onerror=alert(1)><b>q</b>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tool:
        made = tool.chromium.launch(executable_path=BROWSER, args=["--disable-dev-shm-usage"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def study() -> Study:
    """The published study's size: 6 models x 19 variants x 10,000 tokens."""
    made: Study = SYNTHETIC()
    return made


@pytest.fixture(scope="module")
def path(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("page") / "report.html"
    document.write(found, study)
    return found


class Reader:
    """A page that is open, and what it asked for and complained of."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(offline=True, **options)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        self.page.goto(path.as_uri())

    def figure(self, number: int, section: str = MODEL) -> Any:
        """The figure of a section, scrolled to and drawn."""
        figure = self.page.locator(f"#{section} figure").nth(number)
        figure.scroll_into_view_if_needed()
        figure.locator(".plot.js-plotly-plot .main-svg").first.wait_for()
        return figure

    def plot(self, figure: Any, expression: str) -> Any:
        """A JavaScript expression of `plot`, the figure's element of plotly.js."""
        return figure.locator(".plot").evaluate(f"plot => {expression}")


@pytest.fixture(scope="module")
def reader(browser: Any, path: Path) -> Iterator[Reader]:
    made = Reader(browser, path, viewport={"width": 1280, "height": 900})
    yield made
    assert made.complaints == []
    assert made.requests == [path.as_uri()]
    made.context.close()


def test_the_full_study_is_one_file_below_8_mb_and_interactive(reader: Reader, path: Path):
    assert path.stat().st_size < 8e6
    ready = reader.page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    drawn = (
        reader.page.evaluate("performance.now()"),
        reader.figure(0),
        reader.page.evaluate("performance.now()"),
    )
    print(f"{path.stat().st_size / 1e6:.2f} MB; interactive {ready:.0f} ms after it was opened,", end=" ")
    print(f"a figure of 38 curves drawn {drawn[2] - drawn[0]:.0f} ms after it was scrolled to")
    assert reader.page.evaluate("document.documentElement.dataset.ready") == "yes"
    assert reader.page.locator(".js-plotly-plot").count() < 10, "figures are drawn when they come into view"


def test_a_variant_is_toggled_in_every_figure_of_its_model_by_mouse_and_by_key(reader: Reader):
    figure = reader.figure(0)
    button = figure.get_by_role("button", name="llamacpp q6_k")
    shown = "plot.data.filter(trace => trace.name.startsWith('llamacpp q6_k') && trace.visible).length"
    assert reader.plot(figure, shown) == 3  # the curve, its limit, its baseline
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert reader.plot(figure, shown) == 0
    assert reader.plot(reader.figure(6), shown) == 0  # memory
    reader.figure(0)
    button.press("Space")
    assert reader.plot(figure, shown) == 3
    figure.get_by_role("button", name="none").click()
    assert reader.plot(figure, "plot.data.some(trace => trace.visible)") is False
    figure.get_by_role("button", name="all", exact=True).click()
    figure.get_by_label("limit by the data sheet").uncheck()
    assert (
        reader.plot(figure, "plot.data.filter(trace => trace.visible && trace.line.dash === 'dash').length")
        == 0
    )
    assert reader.plot(figure, shown) == 2
    figure.get_by_label("limit by the data sheet").check()


def test_the_axis_is_switched_and_the_spikes_come_into_view(reader: Reader):
    figure = reader.figure(0)
    linear = reader.plot(figure, "plot.layout.yaxis.range")
    assert linear[0] == 0
    assert linear[1] < 50
    figure.get_by_role("button", name="log", exact=True).click()
    assert reader.plot(figure, "plot._fullLayout.yaxis.type") == "log"
    low, high = reader.plot(figure, "plot.layout.yaxis.range")
    assert 0 < 10**low < 8 < 40 < 10**high < 50
    figure.get_by_role("button", name="linear").click()
    assert reader.plot(figure, "[plot._fullLayout.yaxis.type, plot.layout.yaxis.range]") == ["linear", linear]
    figure.get_by_label("all spikes in view").check()
    assert reader.plot(figure, "plot.layout.yaxis.range[1]") > 150
    figure.get_by_label("all spikes in view").uncheck()


# Where, in the window, the 500th point of a figure's first curve is drawn.
POINT = """(() => {
  const { xaxis, yaxis } = plot._fullLayout, box = plot.getBoundingClientRect();
  const { x, y } = plot._fullData[0];
  return [box.x + xaxis._offset + xaxis.l2p(x[500]), box.y + yaxis._offset + yaxis.l2p(y[500])];
})()"""


def test_hovering_reads_the_exact_value(reader: Reader, study: Study):
    figure = reader.figure(0)
    figure.get_by_role("button", name="none").click()
    figure.get_by_role("button", name="llamacpp q8_0").click()
    x, y = reader.plot(figure, POINT)
    reader.page.mouse.move(x - 40, y)
    reader.page.mouse.move(x, y, steps=4)
    hover = figure.locator(".hoverlayer .hovertext")
    hover.first.wait_for()
    text = hover.first.text_content()
    curve = study.series["qwen1.5-14b llamacpp q8_0"]
    n = int(text.split("n ")[1].split(":")[0].replace(",", ""))
    assert f"{curve.ms[list(curve.n).index(n)]:.3f} ms" in text
    assert "llamacpp q8_0" in text
    figure.get_by_role("button", name="all", exact=True).click()


def test_a_table_is_sorted_by_click_and_key_with_failures_last(reader: Reader):
    table = reader.page.locator("table.sortable").first
    heading = table.locator("th", has=reader.page.get_by_role("button", name="B ms", exact=True))
    place = heading.evaluate("head => head.cellIndex")

    def column() -> list[str]:
        cells: list[str] = table.evaluate(
            "(table, place) => [...table.tBodies[0].rows].map(row => row.cells[place].textContent)", place
        )
        return cells

    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    figures, failed = column()[:104], column()[104:]
    assert [float(text) for text in figures] == sorted(float(text) for text in figures)
    assert {text.split(":")[0] for text in failed} == {"oom", "error"}
    heading.get_by_role("button").press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert column()[:104] == figures[::-1] or float(column()[0]) == float(figures[-1])
    assert {text.split(":")[0] for text in column()[104:]} == {"oom", "error"}
    reader.page.locator("#only").select_option(label="qwen1.5-14b")
    assert table.locator("tbody tr:visible").count() == 19
    reader.page.locator("#only").select_option(label="all")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_is_readable_on_a_phone_and_a_desk_by_day_and_by_night(
    browser: Any, path: Path, tmp_path: Path, width: int, scheme: str
):
    phone = {"has_touch": True, "is_mobile": True} if width == 390 else {}
    reader = Reader(browser, path, viewport={"width": width, "height": 844}, color_scheme=scheme, **phone)
    reader.page.screenshot(path=tmp_path / "top.png")
    figure = reader.figure(0)
    assert reader.page.evaluate("document.documentElement.scrollWidth") == width
    paper = {"light": "#ffffff", "dark": "#121212"}
    assert reader.plot(figure, "plot._fullLayout.paper_bgcolor") == paper[scheme]
    reader.page.screenshot(path=tmp_path / "figure.png")
    other = "dark" if scheme == "light" else "light"
    reader.page.emulate_media(color_scheme=other)
    reader.page.wait_for_function(
        "([id, paper]) => document.querySelector(`#${id} .plot`)._fullLayout.paper_bgcolor === paper",
        arg=[MODEL, paper[other]],
    )
    assert reader.complaints == []
    reader.context.close()


def test_on_a_phone_a_tap_reads_a_value_and_a_finger_scrolls_the_page(browser: Any, path: Path):
    reader = Reader(browser, path, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    figure = reader.figure(0)
    figure.locator(".plot").evaluate("plot => plot.scrollIntoView()")
    reader.page.wait_for_timeout(1000)  # a tap beside a scroll, or figures being drawn, would miss
    x, y = reader.plot(figure, POINT)
    reader.page.touchscreen.tap(x, y)
    figure.locator(".hoverlayer .hovertext").first.wait_for()
    before = reader.page.evaluate("scrollY")
    touch = reader.context.new_cdp_session(reader.page)
    for step in range(12):
        kind = "touchMove" if step else "touchStart"
        points = [{"x": x, "y": y - 12 * step}]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    reader.page.wait_for_function("before => scrollY > before + 50", arg=before)
    assert reader.complaints == []
    reader.context.close()


def test_every_figure_of_a_study_with_an_evil_name_is_drawn_and_the_name_is_only_text(
    browser: Any, tmp_path: Path
):
    path = tmp_path / "evil.html"
    study: Study = SYNTHETIC(tokens=600, odd_name=EVIL)
    kept = [cell for cell in study.cells if cell["model"] in ("qwen1.5-0.5b", "qwen1.5-14b")]
    document.write(path, Study(**(vars(study) | {"cells": kept, "title": f"A study of {EVIL}"})))
    reader = Reader(browser, path, viewport={"width": 1280, "height": 900})
    assert reader.page.title() == f"A study of {EVIL}"
    for section in ("across", "prefill", "m0", "m1"):
        for number in range(reader.page.locator(f"#{section} figure").count()):
            reader.figure(number, section)
    drawn = reader.page.locator(".js-plotly-plot").count()
    assert drawn == reader.page.locator("figure").count() == 19
    assert reader.page.locator("img[src=x]").count() == 0
    assert reader.page.locator("tbody th", has_text=EVIL).count() > 3
    ticks = reader.page.locator("#m0 figure").nth(1).locator(".ytick text").all_text_contents()
    assert "llamacpp </…(1)><b>q</b>" in ticks
    assert reader.complaints == []
    assert reader.requests == [path.as_uri()]
    reader.context.close()


def test_checks_of_weights_stand_in_a_table_of_their_own_and_an_evil_name_is_only_text(
    browser: Any, study: Study, tmp_path: Path
):
    depth = {"n": 25, "relative_error": 0.0142, "top1_agreement": 0.96, "near_ties": 1}
    check = {
        "name": "m hf bf16",
        "reference": "hf fp32",
        "allowed_error": 0.06,
        "verdict": "agrees",
        "unfused": [],
        "own": [],
        "own_failure": None,
    }
    check |= {"depths": [depth, depth | {"n": 300, "relative_error": None}], "reason": None, "left_out_n": []}
    wrong = check | {"name": f"m {EVIL}", "verdict": "wrong", "reason": "another model", "left_out_n": [2100]}
    few = {"cells": study.cells[:1], "series": {}, "memory": {}, "checks": [check, wrong]}
    path = tmp_path / "checks.html"
    document.write(path, Study(**(vars(study) | few)))
    reader = Reader(browser, path, viewport={"width": 390, "height": 844})
    reader.page.get_by_role("link", name="Same model?").click()
    section = reader.page.locator("#agreement")
    assert section.locator("tbody tr").first.locator("td").all_text_contents() == [
        *("hf fp32", "1.42%", "96% (1 near tie)", "NaN", "96% (1 near tie)", "6%", "agrees")
    ]
    assert section.locator("tr.bad th").text_content() == f"m {EVIL}"
    assert section.locator("li").all_text_contents() == [
        f"m {EVIL}: another model",
        f"not compared, over the time limit: m {EVIL}: n = 2,100",
    ]
    assert reader.page.evaluate("document.documentElement.scrollWidth") == 390
    assert reader.page.locator("img[src=x]").count() == 0
    assert reader.complaints == []
    reader.context.close()


def test_chapters_of_context_and_memory_are_drawn_and_a_part_is_hidden(browser: Any, tmp_path: Path):
    known = {"name": f"m s {EVIL}", "model": "m", "stack": "s", "variant": EVIL, "device": "cpu"}
    known |= {"status": "ok", "machine": "m", "reasons": []}
    search = known | {"kind": "searched", "verified_n_ctx": 4096, "verified_by": "decode"}
    search |= {
        "predicted_n_ctx": 4352,
        "limit_bytes": 2**30,
        "kv_bytes_per_token": 98_304,
        "model_bytes": 4e8,
    }
    moment = {"total_bytes": 5e8, "unattributed_bytes": 1e7, "unattributed_share": 0.02}
    moment["parts"] = {"weights": 4e8, "kv": 9e7}
    path = tmp_path / "chapters.html"
    study = Study("t", [], searches=[search], attributions=[known | {"loaded": moment, "peak": None}])
    document.write(path, study)
    reader = Reader(browser, path, viewport={"width": 390, "height": 844})
    context, memory = reader.figure(0, "longest"), reader.figure(0, "memory")
    assert reader.page.evaluate("document.documentElement.scrollWidth") == 390
    assert reader.plot(context, "plot.data.filter(trace => trace.visible).map(trace => trace.x[0])") == [
        *(4096, 4352, (2**30 - 400_000_000) // 98_304)
    ]
    parts = memory.get_by_role("group", name="Parts")
    parts.get_by_role("button", name="KV cache").click()
    assert reader.plot(memory, "plot.data.map(trace => [trace.name, trace.visible])") == [
        *(["weights", True], ["KV cache", False], ["unattributed", True])
    ]
    assert reader.page.locator("#memory tbody tr").count() == 2  # the table, and the figure's data
    assert reader.page.locator("img[src=x]").count() == 0
    assert reader.complaints == []
    reader.context.close()


def test_hovered_numbers_survive_packing():
    """Latencies are packed as 4-byte floats: their third decimal holds up to 16 seconds a token."""
    ms = np.array([0.001, 12.3456, 999.9994, 9_999.999])
    assert [f"{v:.3f}" for v in ms.astype("<f4")] == [f"{v:.3f}" for v in ms]
