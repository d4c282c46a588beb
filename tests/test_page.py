"""The page in a real browser: it opens offline, and reacts to a reader. Skipped where there is none."""

import runpy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_longest_report import search
from test_report_memory import attributed

from harness import load_results
from harness.dataset.study import Study
from harness.report import page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser on PATH: {', '.join(BROWSERS)}"),
]

SYNTHETIC = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "report.py"))["study"]
DESK = {"width": 1280, "height": 900}
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}}
TOUCHED: dict[str, Any] = {"has_touch": True, "is_mobile": True}
MODEL = "m4"  # the view of the fifth model
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
    page.write(found, study)
    return found


class Reader:
    """An open page, with its requests and errors."""

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
        """The figure of plotly.js in a section, in its view, scrolled to and drawn."""
        self.page.evaluate("view => { location.hash = view; }", section.partition("-")[0])
        figure = self.page.locator(f"#{section} figure:not(.overview)").nth(number)
        figure.scroll_into_view_if_needed()
        figure.locator(".plot.js-plotly-plot .main-svg").first.wait_for()
        return figure

    def plot(self, figure: Any, expression: str) -> Any:
        """A JavaScript expression of `plot`, the figure's element of plotly.js."""
        return figure.locator(".plot").evaluate(f"plot => {expression}")

    def end(self) -> None:
        """It has complained of nothing and asked for no other file."""
        assert self.complaints == []
        files = {url.partition("#")[0] for url in self.requests if not url.startswith("blob:null/")}
        assert files == {self.requests[0]}
        self.context.close()


@pytest.fixture(scope="module")
def reader(browser: Any, path: Path) -> Iterator[Reader]:
    """The full study, for tests that leave it as they found it."""
    made = Reader(browser, path, viewport=DESK)
    yield made
    made.end()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Reader]]:
    """Opens a page for one test: `opened(path, **options)`."""
    made: list[Reader] = []

    def open(path: Path, **options: Any) -> Reader:
        made.append(Reader(browser, path, **{"viewport": DESK} | options))
        return made[-1]

    yield open
    for each in made:
        each.end()


def test_the_full_study_is_one_file_below_5_mb_and_draws_only_what_comes_into_view(opened, path: Path):
    assert path.stat().st_size < 5e6
    reader = opened(path)
    seen = reader.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN")
    ready = reader.page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    assert reader.page.evaluate("document.documentElement.dataset.ready") == "yes"
    reader.figure(0)
    print(f"{path.stat().st_size / 1e6:.2f} MB; painted {seen:.0f} ms after opening, ready {ready:.0f} ms")
    assert 0 < reader.page.locator(".js-plotly-plot").count() < 10
    assert reader.requests[0] == path.as_uri()


def test_a_variant_is_toggled_in_every_figure_of_its_model_by_mouse_and_by_key(reader: Reader):
    figure = reader.figure(0)
    button = figure.get_by_role("button", name="llamacpp q6_k")
    shown = "plot.data.filter(trace => trace.name.startsWith('llamacpp q6_k') && trace.visible"
    shown += " && trace.mode !== 'text').length"
    assert reader.plot(figure, shown) == 2  # the curve and its baseline
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert reader.plot(figure, shown) == 0
    assert reader.plot(reader.figure(3), shown) == 0  # memory
    reader.figure(0)
    button.press("Space")
    assert reader.plot(figure, shown) == 2
    llamacpp = "plot.data.filter(trace => trace.name.startsWith('llamacpp') && trace.visible).length"
    figure.get_by_role("button", name="llamacpp", exact=True).click()
    assert reader.plot(figure, llamacpp) == 0
    figure.get_by_role("button", name="llamacpp", exact=True).click()
    assert reader.plot(figure, llamacpp) > 10
    figure.get_by_role("button", name="all / none").click()
    curves = "plot.data.filter(trace => trace.meta.v !== undefined && trace.visible).length"
    assert reader.plot(figure, curves) == 0
    figure.get_by_role("button", name="all / none").click()
    assert reader.plot(figure, curves) > 20
    band = "plot.data.find(trace => trace.fill === 'toself').visible"
    assert reader.plot(figure, band) is True
    figure.get_by_label("limit by the data sheet").uncheck()
    assert reader.plot(figure, band) is False
    figure.get_by_label("limit by the data sheet").check()


def test_the_axis_is_switched_and_spikes_are_ticks_that_tell_their_latency(reader: Reader):
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
    spikes = "plot.data.filter(trace => trace.meta.kind === 'spikes')"
    assert reader.plot(figure, f"{spikes}.every(trace => trace.y.every(y => y > 0.9 && y < 1))")
    assert reader.plot(figure, f"Math.min(...{spikes}.flatMap(trace => trace.customdata))") > 100
    figure.get_by_label("spikes").uncheck()
    assert reader.plot(figure, f"{spikes}.some(trace => trace.visible)") is False
    figure.get_by_label("spikes").check()


# Where, in the window, the 500th point of a figure's first curve is drawn.
POINT = """(() => {
  const { xaxis, yaxis } = plot._fullLayout, box = plot.getBoundingClientRect();
  const { x, y } = plot._fullData.find(({ visible, mode }) => visible === true && mode === "lines+markers");
  return [box.x + xaxis._offset + xaxis.l2p(x[500]), box.y + yaxis._offset + yaxis.l2p(y[500])];
})()"""


def test_hovering_reads_the_exact_value(reader: Reader, study: Study):
    figure = reader.figure(0)
    figure.get_by_role("button", name="all / none").click()
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
    figure.get_by_role("button", name="all / none").click()


def test_a_table_is_sorted_by_click_and_key_with_failures_last(reader: Reader):
    reader.page.get_by_role("navigation", name="Model").get_by_role("link", name="qwen1.5-32b").click()
    table = reader.page.locator("#m5-tables table.sortable").first
    heading = table.locator("th", has=reader.page.get_by_role("button", name="B ms", exact=True))
    place = heading.evaluate("head => head.cellIndex")

    def column() -> list[str]:
        cells: list[str] = table.evaluate(
            "(table, place) => [...table.tBodies[0].rows].map(row => row.cells[place].textContent)", place
        )
        return cells

    whole = [text for text in column() if text.replace(".", "").isdigit()]
    assert 5 < len(whole) < 19
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    figures, failed = column()[: len(whole)], column()[len(whole) :]
    assert [float(text) for text in figures] == sorted(float(text) for text in whole)
    assert {text.split(":")[0] for text in failed} == {"oom", "error"}
    heading.get_by_role("button").press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert [float(text) for text in column()[: len(whole)]] == sorted(map(float, whole), reverse=True)
    assert {text.split(":")[0] for text in column()[len(whole) :]} == {"oom", "error"}


def test_a_table_has_eight_columns_until_all_are_asked_for_and_a_filter_keeps_rows(reader: Reader):
    page = reader.page
    reader.figure(0)
    tables = page.locator(f"#{MODEL}-tables .tabled")
    for number in range(tables.count()):
        assert tables.nth(number).locator("thead th:visible").count() <= 8
    speed = tables.first
    everything = speed.get_by_label("all ")
    everything.press("Space")
    assert speed.locator("thead th:visible").count() == speed.locator("thead th").count() > 15
    everything.press("Space")
    search = page.locator(f"#{MODEL}-tables").get_by_role("searchbox")
    search.fill("Q4 llama")
    assert speed.locator("tbody tr:visible").count() == 2
    search.fill("")
    assert speed.locator("tbody tr:visible").count() == 19


def test_a_warning_is_a_badge_on_its_row_that_tells_its_sentence(reader: Reader):
    reader.figure(0)
    badge = reader.page.locator(f"#{MODEL}-tables .badge", has_text="spikes").first
    badge.focus()
    assert reader.page.locator("#tip").text_content() == "spikes\n39 tokens 120 ms slower, every 256"
    reader.page.keyboard.press("Escape")
    assert reader.page.locator("#tip").is_hidden()


def test_what_is_not_ok_is_folded_and_grouped_by_reason(reader: Reader):
    reader.page.evaluate("location.hash = 'm5'")
    folded = reader.page.locator("#m5 > details", has_text="Invalid and failed cells")
    assert not folded.locator("li").first.is_visible()
    folded.locator("summary").press("Enter")
    assert folded.locator("li").all_text_contents()[0].startswith("oom: CUDA out of memory while loading (")
    assert folded.locator("li").count() == 2


def test_one_model_is_shown_at_a_time_by_its_link_its_address_and_the_way_back(reader: Reader):
    page = reader.page
    models = page.get_by_role("navigation", name="Model")

    def shown() -> list[str]:
        found: list[str] = page.locator(".view:visible").evaluate_all("views => views.map(view => view.id)")
        return found

    models.get_by_role("link", name="qwen1.5-7b").press("Enter")
    assert shown() == ["m3"]
    assert models.locator("[aria-current=page]").all_text_contents() == ["qwen1.5-7b"]
    models.get_by_role("link", name="all models").click()
    assert shown() == ["all"]
    page.go_back()
    assert shown() == ["m3"]
    page.evaluate("location.hash = 'm1-prefill'")
    page.wait_for_function("document.getElementById('m1').hidden === false")
    assert shown() == ["m1"]
    page.evaluate("location.hash = 'methods'")  # below every view
    page.wait_for_timeout(100)
    assert shown() == ["m1"]


def test_a_variant_is_selected_everywhere_and_a_second_click_clears_it(reader: Reader):
    page, figure = reader.page, reader.figure(0)
    point = page.locator(f"#{MODEL} .picture:visible .dot[data-variant='llamacpp q4_0']")
    rows = page.locator("tr.chosen:visible th")
    pale = "plot.data.filter(trace => trace.opacity < 0.5).length"
    point.click()
    assert point.get_attribute("aria-pressed") == "true"
    assert rows.first.text_content().startswith("llamacpp q4_0")
    reader.figure(0)
    assert reader.plot(figure, pale) > 10
    assert reader.plot(figure, "plot.data.find(trace => trace.name === 'llamacpp q4_0').opacity") is None
    assert "llamacpp q4_0" in page.get_by_role("status").text_content()
    rows.first.get_by_role("button").press("Enter")
    assert rows.count() == 0
    reader.figure(0)
    assert reader.plot(figure, pale) == 0
    point.press("Space")
    page.keyboard.press("Escape")
    assert point.get_attribute("aria-pressed") == "false"


def test_a_click_on_a_line_selects_its_variant(reader: Reader):
    figure = reader.figure(0)
    x, y = reader.plot(figure, POINT)
    reader.page.mouse.move(x - 40, y)
    reader.page.mouse.move(x, y, steps=4)
    figure.locator(".hoverlayer .hovertext").first.wait_for()
    reader.page.mouse.click(x, y)
    label = reader.page.locator(f"#{MODEL} .dot.chosen").first.get_attribute("data-variant")
    assert label in reader.page.get_by_role("status").text_content()
    reader.page.keyboard.press("Escape")
    assert reader.page.locator(".chosen").count() == 0


def test_a_point_tells_its_row_to_pointer_and_keyboard_and_the_switch_changes_the_measures(reader: Reader):
    page = reader.page
    reader.figure(0)
    overview = page.locator(f"#{MODEL} .overview")
    point = overview.locator(".picture:visible .dot[data-variant='llamacpp q8_0']")
    point.hover()
    tip = page.locator("#tip")
    for text in ("llamacpp q8_0", "tok/s", "95% CI", "GB peak VRAM", "perplexity"):
        assert text in tip.text_content()
    page.mouse.move(0, 0)
    assert tip.is_hidden()
    point.focus()
    assert tip.is_visible()
    overview.get_by_role("button", name="Quality against size").click()
    assert overview.locator(".picture:visible").get_attribute("data-name") == "quality"
    assert "perplexity" in overview.locator(".picture:visible .y-title").text_content()
    overview.get_by_role("button", name="Speed against size").click()


def test_one_tab_reaches_the_picture_and_arrow_keys_name_each_of_its_points(reader: Reader):
    page = reader.page
    reader.figure(0)
    page.locator(f"#{MODEL} .overview").get_by_role("button", name="Speed against quality").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Home")
    tip, named = page.locator("#tip"), []
    points = page.locator(f"#{MODEL} .picture:visible .dot")
    for _ in range(points.count()):
        point = page.locator(".dot:focus")
        named.append(point.get_attribute("data-variant"))
        assert tip.text_content().startswith(named[-1])
        assert point.get_attribute("aria-label").startswith(f"{named[-1]}, ")
        page.keyboard.press("ArrowRight")
    assert sorted(named) == sorted(points.evaluate_all("dots => dots.map(dot => dot.dataset.variant)"))
    page.keyboard.press("Home")
    assert page.locator(".dot:focus").get_attribute("data-variant") == named[0]
    page.keyboard.press("Tab")
    assert page.locator(".dot:focus").count() == 0
    page.keyboard.press("Escape")


def test_points_on_each_other_are_all_named_and_each_click_selects_the_next(
    opened, study: Study, tmp_path: Path
):
    same = {"tokens_per_s": 50.0, "tokens_per_s_ci95": [49.0, 51.0], "peak_vram_bytes": 4e9, "status": "ok"}
    cells = [{**cell, **same} for cell in study.cells[:3]]
    far = {**study.cells[3], **same, "tokens_per_s": 90.0, "tokens_per_s_ci95": [89.0, 91.0]}
    page.write(path := tmp_path / "same.html", Study("t", [*cells, far | {"peak_vram_bytes": 8e9}]))
    reader = opened(path)
    point = reader.page.locator(".picture:visible .dot").first
    box = point.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    reader.page.mouse.move(x, y)
    shown = reader.page.locator("#tip").text_content()
    names = {f"{cell['stack']} {cell['variant']}" for cell in cells}
    assert all(name in shown for name in names)
    selected = []
    for _ in names:
        reader.page.mouse.click(x, y)
        selected.append(reader.page.locator(".dot.chosen").first.get_attribute("data-variant"))
    assert set(selected) == names
    reader.page.mouse.click(x, y)
    assert reader.page.locator(".chosen").count() == 0


def test_a_phones_first_screen_has_the_speed_before_any_other_result_and_a_tap_names_a_point(
    opened, path: Path
):
    reader = opened(path, **PHONE | TOUCHED)
    first = reader.page.locator(".answers:visible strong").first
    assert "tok/s" in first.text_content()
    box = first.bounding_box()
    assert box["y"] + box["height"] < PHONE["viewport"]["height"]
    assert reader.page.evaluate("document.documentElement.scrollWidth") == 360
    point = reader.page.locator(".picture:visible .dot").last
    point.tap()
    assert reader.page.locator("#tip").text_content().startswith(point.get_attribute("data-variant"))


# What ends beyond the viewport and is in no box that scrolls, also invisible names, which widen a page too.
BEYOND = """() => [...document.querySelectorAll("body *")].filter(each => {
  const { left, right, width } = each.getBoundingClientRect();
  return width && !each.closest(".scroll, .defs") && (left < 0 || right > innerWidth);
}).map(each => each.outerHTML.slice(0, 80))"""


def test_nothing_is_wider_than_a_phone(opened, tmp_path: Path):
    """The published model that has points at the right edge of its picture."""
    page.write(tmp_path / "report.html", load_results("published/rtx4090-qwen1.5/qwen1.5-32b"))
    reader = opened(tmp_path / "report.html", **PHONE | TOUCHED)
    dots = reader.page.locator(".picture:visible .dot")
    for dot in dots.all():
        dot.dispatch_event("click")  # a selected point shows its name, also one that had no room
        assert reader.page.evaluate(BEYOND) == []
    assert reader.page.evaluate("document.documentElement.scrollWidth") == 360


def test_the_last_tick_of_a_narrow_figure_has_its_label(opened, path: Path):
    figure = opened(path, **PHONE | TOUCHED).figure(0)
    assert "10,000" in figure.locator(".xtick text:visible").all_text_contents()


# Controls below 24 px. A link in a sentence may be as high as its line, and a box is as large as its label.
SMALL = """controls => controls.filter(each => {
  const { width, height } = each.getBoundingClientRect();
  return each.offsetParent && !each.closest("p, dd, label > *") && (width < 24 || height < 24);
}).map(each => each.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("device", [{}, PHONE | TOUCHED], ids=["desk", "phone"])
def test_controls_are_large_enough_to_hit_no_toolbar_covers_a_figure_and_axe_finds_nothing(
    opened, path: Path, device: dict[str, Any]
):
    reader = opened(path, **device)
    for number in range(4):
        reader.figure(number)
    assert reader.page.locator("a, button, summary, input, select, label").evaluate_all(SMALL) == []
    assert reader.page.locator(".modebar-btn").count() == 0
    for section in (MODEL, "all"):
        reader.page.evaluate("view => { location.hash = view; }", section)
        found = axe.Axe().run(reader.page)
        assert found.violations_count == 0, found.generate_report()
        headings = reader.page.locator("h1:visible, h2:visible, h3:visible, h4:visible").all_text_contents()
        assert len(headings) == len(set(headings)), headings


def test_a_figure_is_saved_as_a_picture_and_its_zoom_is_reset(reader: Reader):
    figure = reader.figure(0)
    whole = reader.plot(figure, "plot._fullLayout.xaxis.range")
    reader.plot(figure, "Plotly.relayout(plot, {'xaxis.range': [100, 200]})")
    figure.get_by_role("button", name="reset zoom").click()
    assert reader.plot(figure, "plot._fullLayout.xaxis.range") == whole
    with reader.page.expect_download() as saved:
        figure.get_by_role("button", name="save as PNG").click()
    assert saved.value.suggested_filename == f"{MODEL}-latency.png"


def test_no_two_names_in_the_picture_overlap(reader: Reader):
    reader.figure(0)
    boxes = reader.page.locator(f"#{MODEL} .picture:visible .name:not(.none)").evaluate_all(
        "names => names.map(name => name.getBoundingClientRect().toJSON())"
    )
    assert boxes
    for number, a in enumerate(boxes):
        for b in boxes[:number]:
            across = a["right"] < b["left"] or b["right"] < a["left"]
            assert across or a["bottom"] < b["top"] or b["bottom"] < a["top"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_is_readable_on_a_phone_and_a_desk_by_day_and_by_night(
    opened, path: Path, tmp_path: Path, width: int, scheme: str
):
    device = PHONE | TOUCHED if width == 360 else {}
    reader = opened(path, color_scheme=scheme, **device)
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


def test_without_scripts_every_model_its_answers_its_pictures_and_its_tables_are_there(opened, path: Path):
    reader = opened(path, java_script_enabled=False)
    assert reader.page.locator(".view:visible").count() == reader.page.locator(".view").count() == 7
    assert reader.page.locator(".answers:visible").count() == 6
    assert reader.page.locator(".picture:visible").count() == 18
    assert reader.page.locator(f"#{MODEL}-tables tbody tr:visible").count() >= 19


def test_paper_is_white_also_where_the_screen_is_dark(opened, path: Path):
    reader = opened(path, color_scheme="dark")
    figure = reader.figure(0)
    paper = "plot._fullLayout.paper_bgcolor"
    assert reader.plot(figure, paper) == "#121212"
    reader.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert reader.plot(figure, paper) == "#ffffff"
    reader.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert reader.plot(figure, paper) == "#121212"


def test_on_a_phone_a_tap_reads_a_value_and_a_finger_scrolls_the_page(opened, path: Path):
    reader = opened(path, **PHONE | TOUCHED)
    figure = reader.figure(0)
    figure.locator(".plot").evaluate("plot => plot.scrollIntoView()")
    reader.page.wait_for_timeout(1000)  # a tap during a scroll or a redraw would miss
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


def test_every_figure_of_a_study_with_an_evil_name_is_drawn_and_the_name_is_only_text(opened, tmp_path: Path):
    path = tmp_path / "evil.html"
    study: Study = SYNTHETIC(tokens=600, odd_name=EVIL)
    kept = [cell for cell in study.cells if cell["model"] in ("qwen1.5-0.5b", "qwen1.5-14b")]
    page.write(path, replace(study, cells=kept, title=f"A study of {EVIL}"))
    reader = opened(path)
    assert reader.page.title() == f"A study of {EVIL}"
    for section in ("all", "m0", "m1"):
        for number in range(reader.page.locator(f"#{section} figure:not(.overview)").count()):
            reader.figure(number, section)
    drawn = reader.page.locator(".js-plotly-plot").count()
    assert drawn == reader.page.locator("figure:not(.overview)").count() == 13
    assert reader.page.locator("img[src=x]").count() == 0
    assert reader.page.locator("tbody th", has_text=EVIL).count() > 3
    ticks = reader.page.locator("#m0-B").locator(".ytick text").all_text_contents()
    assert "llamacpp </…(1)><b>q</b>" in ticks


def test_checks_of_weights_stand_in_a_table_of_their_own_and_an_evil_name_is_only_text(
    opened, study: Study, tmp_path: Path
):
    depth = {"n": 25, "relative_error": 0.0142, "top1_agreement": 0.96, "near_ties": 1}
    check = {"name": "m hf bf16", "reference": "hf fp32", "allowed_error": 0.06, "verdict": "agrees"}
    check |= {"own": [], "own_failure": None, "experts": None}
    check |= {"depths": [depth, depth | {"n": 300, "relative_error": None}], "reason": None, "left_out_n": []}
    wrong = check | {"name": f"m {EVIL}", "verdict": "wrong", "reason": "another model", "left_out_n": [2100]}
    few = {"cells": study.cells[:1], "series": {}, "memory": {}, "checks": [check, wrong]}
    path = tmp_path / "checks.html"
    page.write(path, replace(study, **few))
    reader = opened(path, **PHONE)
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
    assert reader.page.evaluate("document.documentElement.scrollWidth") == 360
    assert reader.page.locator("img[src=x]").count() == 0


def test_chapters_of_context_and_memory_are_drawn_and_a_part_is_hidden(browser: Any, tmp_path: Path):
    known = {"name": f"m s {EVIL}", "model": "m", "stack": "s", "variant": EVIL}
    moment = {"total_bytes": 5e8, "unattributed_bytes": 1e7, "unattributed_share": 0.02}
    moment |= {"parts": {"weights": 4e8, "kv": 9e7}, "by_difference": []}
    searches = [search(predicted_n_ctx=4352, model_bytes=4e8, **known)]
    attributions = [attributed(loaded=moment, peak=None, **known)]
    path = tmp_path / "chapters.html"
    page.write(path, Study("t", [], searches=searches, attributions=attributions))
    reader = Reader(browser, path, viewport={"width": 390, "height": 844})
    context, memory = reader.figure(0, "m0-longest"), reader.figure(0, "m0-memory")
    assert reader.page.evaluate("document.documentElement.scrollWidth") == 390
    assert reader.plot(context, "plot.data.filter(trace => trace.visible).map(trace => trace.x[0])") == [
        *(4096, 4352, (2**30 - 400_000_000) // 98_304)
    ]
    parts = memory.get_by_role("group", name="Parts")
    parts.get_by_role("button", name="KV cache").click()
    assert reader.plot(memory, "plot.data.map(trace => [trace.name, trace.visible])") == [
        *(["weights", True], ["KV cache", False], ["unattributed", True])
    ]
    assert reader.page.locator("#m0-memory tbody tr").count() == 1
    assert reader.page.locator("img[src=x]").count() == 0
    assert reader.complaints == []
    reader.context.close()
