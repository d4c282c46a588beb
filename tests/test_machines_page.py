"""The page of several machines: one line per machine and stack, by model, and the share of the ceiling."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_nights import Nights
from test_page import BROWSER, DESK, Reader, browser  # noqa: F401

from harness.dataset import judging, rows


@pytest.fixture
def folders(run_once: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A machine each: the second decodes half as fast, with half the bandwidth; the third a tenth."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    for night, (name, slower) in enumerate((("desk", 1.0), ("lap", 2.0), ("pi", 10.0))):
        probes = [{"read_bytes_per_s": 40e9 / slower}]
        Nights(run_once, tmp_path / name).add(night, slower, machine__slug=name, bandwidth_probes=probes)
        for path in (tmp_path / name).rglob("record.json"):
            path.write_text(path.read_text().replace('"content_key": "', f'"content_key": "{name}-'))
    return [tmp_path / name for name in ("desk", "lap", "pi")]


def table(printed: str) -> list[dict[str, str]]:
    """The lines of the first Markdown table, by heading."""
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    head, _, *rest = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, line, strict=True)) for line in rest]


def shown(harness: Any, *folders: Path) -> list[dict[str, str]]:
    ran = harness("report", *folders, "--format", "md")
    assert ran.code == 0, ran.err
    return table(ran.out)


def copied(folder: Path, copy: Path) -> Path:
    """The records of `lap` under the name of another machine."""
    shutil.copytree(folder, copy)
    for path in copy.rglob("record.json"):
        path.write_text(path.read_text().replace('"slug": "lap"', '"slug": "copied"'))
    (copy / "lap").rename(copy / "copied")
    return copy


def without_tokens(folder: Path) -> None:
    for path in folder.rglob("record.json"):
        record = json.loads(path.read_text())
        record |= {"outcome": "oom", "reason": "not enough"}
        path.write_text(json.dumps(record))


def test_a_machine_is_a_line_with_its_fastest_cell_and_its_share_of_its_ceiling(harness, folders):
    lines = shown(harness, *folders)
    assert [line["cell"].split()[0] for line in lines] == ["desk", "lap", "pi"]
    speeds = [float(line["tok/s"].split()[0].replace(",", "")) for line in lines]
    assert speeds[0] > 1.8 * speeds[1] > 1.8 * 4 * speeds[2]
    shares = [float(line["MBU"].rstrip("%")) for line in lines]
    assert max(shares) - min(shares) <= 0.1 * max(shares)


def test_one_folder_that_holds_several_machines_is_shown_so_too(harness, folders, tmp_path):
    for folder in folders:
        shutil.copytree(folder, tmp_path / "group", dirs_exist_ok=True)
    together, apart = shown(harness, tmp_path / "group"), shown(harness, *folders)
    for line in (*together, *apart):
        line["cell"] = line["cell"].split(" (")[0]  # names that a folder has twice get the cell's
    assert together == apart


def test_one_machine_and_a_baseline_have_the_page_of_cells(harness, folders):
    for arguments in ([folders[0]], [*folders[:1], "--baseline", folders[1]]):
        ran = harness("report", *arguments, "--format", "md")
        assert ran.code == 0
        assert "## Methods" in ran.out


def test_a_machine_without_a_sound_cell_comes_last_with_the_reason(harness, folders):
    without_tokens(folders[0])
    lines = shown(harness, *folders)
    assert [line["cell"].split()[0] for line in lines] == ["lap", "pi", "desk"]
    assert lines[-1]["status"].startswith("oom")


def test_a_series_that_two_machines_have_is_of_neither(harness, folders, tmp_path):
    ran = harness("report", *folders, copied(folders[1], tmp_path / "copy"), "--format", "md")
    assert "equal to the last digit on copied, lap: left out" in ran.err
    assert [line["cell"].split()[0] for line in table(ran.out)] == ["desk", "pi"]


def test_where_all_is_copied_a_sentence_says_so(harness, folders, tmp_path):
    copy = copied(folders[1], tmp_path / "copy")
    ran = harness("report", folders[1], copy)
    assert ran.code == 2
    assert ran.err.startswith(f"harness: {folders[1]}, {copy}: every series is a copy of another machine's")


def test_bundles_are_read_once_and_again_when_they_change(harness, folders, tmp_path, monkeypatch):
    bundles = [tmp_path / f"{folder.name}.tar.zst" for folder in folders]
    for folder, bundle in zip(folders, bundles, strict=True):
        harness("share", folder, "--bundle", bundle)
    first = shown(harness, *bundles)
    assert len(first) == 3
    judged: list[int] = []
    plain = judging.judge
    monkeypatch.setattr(rows, "judge", lambda some, best: judged.append(len(some)) or plain(some, best))
    assert shown(harness, *bundles) == first
    assert not judged
    shutil.copy(bundles[2], bundles[1])
    assert len(shown(harness, *bundles)) == 2
    assert judged == [4]


def test_a_price_is_refused_for_several_machines(harness, folders):
    ran = harness("report", *folders, "--price", "0.3")
    assert ran.code != 0
    assert "a price and a power log are of one machine" in ran.err


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no browser on PATH")
def test_a_filter_leaves_the_line_the_cells_and_the_dots_of_a_machine(harness, folders, tmp_path, browser):  # noqa: F811
    page = tmp_path / "page.html"
    assert harness("report", *folders, "-o", page).code == 0
    reader = Reader(browser, page)
    figure = reader.figure(0, "m0")
    assert reader.plot(figure, "plot.data.flatMap(({ y }) => y).length") == 6
    reader.page.fill(".filter input", "lap FAKE")
    reader.page.wait_for_function(
        "document.querySelectorAll('#m0 .tabled tbody tr:not([hidden])').length === 3"
    )
    assert reader.plot(figure, "plot.data.flatMap(({ y }) => y).join()") == "lap,lap"
    reader.page.fill(".filter input", "")
    assert reader.plot(figure, "plot.data.flatMap(({ y }) => y).length") == 6
    assert not reader.complaints
    assert len(reader.requests) == 1


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no browser on PATH")
def test_the_page_has_every_cell_and_its_source_and_cuts_nothing_off(harness, folders, tmp_path, browser):  # noqa: F811
    long = "a-machine-with-a-very-long-name-16c-64gib-and-a-card-24gib"
    for path in folders[1].rglob("record.json"):
        path.write_text(path.read_text().replace('"slug": "lap"', f'"slug": "{long}"'))
    (folders[1] / "lap").rename(folders[1] / long)
    page = tmp_path / "page.html"
    assert harness("report", *folders, "-o", page).code == 0
    reader = Reader(browser, page, viewport=DESK)
    figure = reader.figure(0, "m0")
    assert figure.get_by_role("button", name="save as PNG").is_visible()
    text = reader.page.locator("#m0").inner_text()
    for name in ("desk", long, "pi"):
        assert f"{name} fake a" in text
        assert f"{name} fake b" in text
    assert "12 records" in reader.page.locator("footer").inner_text()
    for table in reader.page.locator("#m0 .tabled .scroll").all():
        assert table.evaluate("at => at.scrollWidth <= at.clientWidth")
    reader.end()


def test_a_bundle_and_the_folder_that_it_was_made_of_count_once(harness, folders):
    bundle = folders[0].with_name("desk.tar.zst")
    harness("share", folders[0], "--bundle", bundle)
    alone, both = (
        harness("report", *given, "--format", "csv").out.count("\n")
        for given in ([folders[0]], [folders[0], bundle])
    )
    assert both == alone
    assert shown(harness, *folders, bundle) == shown(harness, *folders)
