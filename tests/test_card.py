"""The card of `harness share`: what stands on it, that it can be checked, and that it can be read."""

import json
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from conftest import STUDY, Ran, refused
from forging import HONEST
from golden_record import record, write_record
from made_nights import Nights
from markdown_it import MarkdownIt

from harness.records.files import read_columns, write_columns
from harness.share import read_bundle

ROOT = Path(__file__).parent.parent
Harness = Callable[..., Ran]
SUM = re.compile(r"SHA-256 ([0-9a-f]{64})")


@pytest.fixture
def grown(run_once: list[Path], tmp_path: Path) -> Nights:
    return Nights(run_once, tmp_path / "results")


class Shown(HTMLParser):
    """The text of each cell of a table, by its line, and of each item of a list."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.lines: list[list[str]] = []
        self.items: list[str] = []
        self._into: list[str] = []
        self.feed(MarkdownIt("commonmark").enable("table").render(markdown))

    def handle_starttag(self, tag: str, attributes: object) -> None:
        if tag == "tr":
            self.lines.append([])
        if tag in ("td", "th", "li"):
            self._into = self.items if tag == "li" else self.lines[-1]
            self._into.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "li"):
            self._into = []

    def handle_data(self, data: str) -> None:
        if self._into:
            self._into[-1] += data

    @property
    def rows(self) -> list[dict[str, str]]:
        return [dict(zip(self.lines[0], line, strict=True)) for line in self.lines[1:]]


def checksum(ran: Ran) -> str:
    (found,) = SUM.findall(ran.out)
    return str(found)


# What stands on it


def test_it_is_a_table_of_markdown_with_machine_versions_and_a_row_per_variant(
    grown: Nights, harness: Harness
):
    grown.add(0, machine__cpu="AMD Ryzen <9> 7950X|3D", machine__memory_bytes=64 << 30)
    ran = harness("share", grown.root)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(r"**tiny-qwen2 on AMD Ryzen &lt;9> 7950X\|3D, ")
    assert ran.out.count("\n") <= 16
    shown = Shown(ran.out)
    listed = {r["variant"]: r for r in harness("report", grown.root, "--format", "json").json}
    assert [row["variant"] for row in shown.rows] == ["fake a", "fake b"]
    for row, variant in zip(shown.rows, "ab", strict=True):
        low, high = listed[variant]["tokens_per_s_ci95"]
        found = listed[variant]["tokens_per_s"]
        rate = f"{found:,.1f} ±{max(high - found, found - low):.1f}"
        assert (row["status"], row["tok/s"]) == ("ok 2/2", rate)
        assert row["TTFT ms"] == f"{listed[variant]['ttft_ms']:.1f}"
    notes = "\n".join(shown.items)
    assert re.search(r"^2026-09-01, harness \d\S+ ", notes, re.MULTILINE)
    assert "fake: fake 1, python 3" in notes
    assert "600 tokens after 25" in notes


def test_its_first_note_is_the_answer_of_the_terminal(grown: Nights, harness: Harness):
    grown.add(0)
    answer, *_ = harness("report", grown.root, "--list", "--wide").out.splitlines()
    first, *_ = Shown(harness("share", grown.root).out).items
    assert first.startswith("fastest: ")
    assert answer.startswith(f"tiny-qwen2: {first[:40]}")


def test_what_is_not_ok_is_named_with_its_reason_and_shows_no_speed(grown: Nights, harness: Harness):
    grown.add(0, cell="b", outcome="oom", reason="out of memory: 3 GB more")
    good, bad = Shown(out := harness("share", grown.root).out).rows
    assert good["status"] == "ok 2/2"
    assert bad["status"] == "oom 0/2"
    assert {bad["tok/s"], bad["TTFT ms"]} == {"-"}
    assert "tiny-qwen2 fake b: oom: out of memory: 3 GB more" in Shown(out).items


def test_a_pasted_card_calls_nobody_and_has_no_link(grown: Nights, harness: Harness):
    evil = "@everyone http://evil.example HTTPS://evil.example www.evil.example a@evil.example"
    grown.add(0, cell="b", outcome="error", reason=evil, machine__cpu=evil)
    card = harness("share", grown.root).out
    assert "everyone" in card
    assert not re.search(r"@|://|www\.", card, re.IGNORECASE)


def test_there_is_no_card_of_a_damaged_series(grown: Nights, harness: Harness):
    grown.add(0)
    path = next(grown.root.rglob("tokens.parquet"))
    path.write_bytes(path.read_bytes()[:-40])
    refused(harness("share", grown.root), f"{path}: not a series")


def test_synthetic_weights_are_said_in_its_first_line(harness: Harness):
    card = harness("share", HONEST, "--only", "*.llamacpp.*").out
    assert card.startswith("**tiny-qwen2 (synthetic weights) on ")
    assert any(item.startswith("synthetic weights: ") for item in Shown(card).items)


def test_the_last_measurement_of_a_variant_stands_for_it(grown: Nights, harness: Harness):
    grown.add(0, content_key="0" * 20, cell="a")
    grown.add(1, 2.0)
    rows = Shown(harness("share", grown.root).out).rows
    assert [row["variant"] for row in rows] == ["fake a", "fake b"]
    assert float(rows[0]["tok/s"].split()[0].replace(",", "")) < 700


def test_published_figures_name_their_source_and_are_none_of_ours(harness: Harness):
    ran = harness("share", STUDY, "--only", "qwen1.5-7b.*")
    assert ran.code == 0
    shown = Shown(ran.out)
    assert "NVIDIA GeForce RTX 4090 with 25.8 GB" in ran.out
    assert len(shown.rows) == 20
    assert {row["status"].split()[0] for row in shown.rows} == {"reported"}
    assert any(item.startswith("source: Single-user inference of Qwen1.5") for item in shown.items)
    assert any(item.startswith("qwen1.5-7b llamacpp fp16 on cuda: unavailable: ") for item in shown.items)


def test_a_card_says_how_many_cells_of_its_folder_it_shows_and_in_which_order(harness: Harness):
    shown = Shown(harness("share", STUDY, "--only", "qwen1.5-7b.*").out)
    assert shown.items[2].startswith("20 of 148 cells of its results folder, by name: ")
    variants = [row["variant"] for row in shown.rows]
    assert variants == sorted(variants)


def test_the_card_of_an_interrupted_run_says_how_far_it_came(harness: Harness, tmp_path: Path):
    folder = tmp_path / "results" / "m" / "x" / "c"
    write_record(folder / "20260101T000000.000000Z", record(place_in_order=[1, 3]))
    cut = record(place_in_order=[2, 3], repeat=2, outcome="interrupted", reason="stopped")
    write_record(folder / "20260101T000001.000000Z", cut)
    assert (
        harness("share", "results")
        .out.splitlines()[0]
        .endswith(", not complete: 1 of 3 repeats of the run**")
    )
    last = record(place_in_order=[3, 3], repeat=3, cell="other.cell", model__name="other")  # of the same run
    write_record(folder.with_name("other") / "20260101T000002.000000Z", last)
    assert "not complete" not in harness("share", "results", "--only", "other*").out
    assert "not complete" not in harness("share", "results", "--only", f"{record()['cell']}*").out


def test_the_page_about_it_shows_it(harness: Harness):
    page = (ROOT / "docs" / "guide" / "share.md").read_text()
    ran = harness("share", "published/rtx4090-qwen1.5", "--only", "*7b.llamacpp.q4*")
    assert ran.out in page


def test_a_search_alone_has_a_row_with_its_length(harness: Harness, config: Callable[..., Path]):
    harness("run", config({"name": "a", "oom_above_n_ctx": 5000, "B_ms": 2.0}), "--max-ctx")
    (row,) = Shown(harness("share", "results").out).rows
    assert (row["variant"], row["status"], row["longest context"]) == ("fake a", "ok", "4,864")


# Which records


def test_it_is_of_the_newest_campaign_and_says_which_others_there_are(grown: Nights, harness: Harness):
    grown.add(0, model__name="older")
    grown.add(1)
    ran = harness("share", grown.root)
    assert ran.out.startswith("**tiny-qwen2 ")
    assert re.fullmatch(r"harness: .*--only GLOB \([\w-]+/older\)\n", ran.err)
    other = harness("share", grown.root, "--only", "*/tiny*", "--only", "nothing")
    assert other.out.startswith("**tiny-qwen2 ")


def test_several_models_of_one_campaign_must_be_told_apart(harness: Harness):
    ran = harness("share", STUDY)
    refused(ran, "its newest campaign has 8")
    assert "--only 'rtx-4090/qwen1.5-0.5b.*'" in ran.err
    assert harness("share", STUDY, "--only", "rtx-4090/qwen1.5-0.5b.*").code == 0
    refused(harness("share", STUDY, "--only", "qwen9*"), "matches none of 148 records")


def test_a_folder_without_records_and_a_glob_for_a_bundle_are_one_sentence(harness: Harness, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    refused(harness("share", "empty"), "empty: no records")
    refused(harness("share", STUDY, "--bundle", "a.tar.zst", "--only", "x"), "--only is for the card")


# The checksum


def test_a_folder_and_its_bundle_have_one_card(grown: Nights, harness: Harness, tmp_path: Path):
    grown.add(0, campaign__name="of zaphod")
    of_folder = harness("share", grown.root, "--hide", "zaphod")
    assert harness("share", grown.root, "--bundle", "a.tar.zst", "--hide", "zaphod").out
    assert harness("share", "a.tar.zst").out == of_folder.out
    with read_bundle.opened(HONEST) as opened:
        shutil.copytree(opened.folder, tmp_path / "honest")
    for model in ("tiny-qwen2", "tiny-*"):
        pair = [harness("share", at, "--only", f"{model}.*").out for at in ("honest", HONEST)]
        assert pair[0] == pair[1] != ""


@pytest.mark.parametrize("changed", ["record", "series", "none"])
def test_the_checksum_is_of_every_record_and_of_every_token(grown: Nights, harness: Harness, changed: str):
    grown.add(0)
    before = checksum(harness("share", grown.root))
    path = next(grown.root.rglob("record.json"))
    if changed == "record":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"threads": 3}))
    if changed == "series":
        columns = read_columns(path.parent / "tokens.parquet", ())
        columns["latency_ns"][300] += 1
        write_columns(path.parent / "tokens.parquet", columns)
    path.parent.rename(path.parent.with_name("another-name"))
    assert (checksum(harness("share", grown.root)) == before) is (changed == "none")


def test_nothing_of_a_person_stands_on_it(harness: Harness, tmp_path: Path):
    reason = "cannot open /home/zaphod/models/x on beeblebrox, zaphod@beeblebrox, serial: AB12CD34"
    made = record(outcome="error", reason=reason, model__weights__file="/home/zaphod/secret.d/tiny.gguf")
    write_record(tmp_path / "results" / "a", made)
    for more in ([], ["--svg", "card.svg"]):
        ran = harness("share", "results", *more)
        card = (tmp_path / "card.svg").read_text() if more else ran.out
        assert "tiny.gguf" in card
        assert not re.search(r"zaphod|beeblebrox|secret\.d|/home|AB12CD34", card)


# The picture


def texts(svg: str) -> list[str]:
    return ["".join(each.itertext()) for each in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_has_the_text_of_the_card_and_needs_nothing_else(
    grown: Nights, harness: Harness, tmp_path
):
    grown.add(0, machine__cpu="<script>&\x07", cell="b", outcome="crash", reason="signal 11 & <b>")
    card = Shown(harness("share", grown.root).out)
    ran = harness("share", grown.root, "--svg", "card.svg")
    assert ran.out == f"{tmp_path / 'card.svg'}\n"
    svg = (tmp_path / "card.svg").read_text()
    shown = " ".join(" ".join(texts(svg)).split())
    for row in card.rows:
        assert " ".join(row.values()) in shown
    for item in card.items:
        assert item in shown
    assert not re.search(r"href|url\(|<script|@import", svg)
    assert "prefers-color-scheme: dark" in svg


@pytest.mark.browser
def test_every_line_of_the_picture_lies_within_it(harness: Harness, tmp_path: Path):
    test_page = pytest.importorskip("test_page", reason="playwright is not installed")
    if test_page.BROWSER is None:
        pytest.skip("no browser on PATH")
    harness("share", STUDY, "--only", "qwen1.5-7b.*", "--svg", "card.svg")
    with test_page.playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=test_page.BROWSER, args=["--disable-dev-shm-usage"])
        page = browser.new_page(viewport={"width": 1600, "height": 900})
        page.goto((tmp_path / "card.svg").as_uri())
        boxes: list[list[float]] = page.evaluate(
            "[...document.querySelectorAll('text')].map(e => e.getBBox()).map(b => [b.x, b.x + b.width, b.y])"
        )
        across: float = page.evaluate("document.documentElement.viewBox.baseVal.width")
        browser.close()
    assert len(boxes) > 20
    assert all(0 < left < right < across for left, right, _ in boxes)
    assert [top for *_, top in boxes] == sorted(top for *_, top in boxes)


# Views of a bundle


@pytest.mark.parametrize("view", ["--list", "--memory", "--history", "--export=csv"])
def test_a_bundle_has_every_view_of_its_folder(harness: Harness, tmp_path: Path, view: str):
    with read_bundle.opened(HONEST) as opened:
        shutil.copytree(opened.folder, tmp_path / "honest")
    to_output = [] if view in ("--list", "--memory") else ["-o", "-"]
    pair: list[Any] = [harness("report", at, view, *to_output) for at in ("honest", HONEST)]
    assert pair[0].out == pair[1].out != ""
    assert pair[0].code == pair[1].code == 0
