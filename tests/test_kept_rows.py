"""Rows that are kept: those of the records as they are now, whatever happened to the file that keeps them."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran, stored_in
from made_nights import Nights

from harness.analysis import quality
from harness.base import files
from harness.dataset import judging, rows
from harness.dataset.study import load_study, study_of


@pytest.fixture
def nights(run_once: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    """Three nights of two cells, twice each."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    grown = Nights(run_once, tmp_path / "results")
    for night in range(3):
        grown.add(night)
    return grown


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records were judged, each time that any were."""
    counts: list[int] = []
    plain = judging.judge

    def counted(stored: Any, ceilings: Any) -> Any:
        counts.append(len(stored))
        return plain(stored, ceilings)

    monkeypatch.setattr(rows, "judge", counted)
    return counts


def kept() -> Path:
    """The file that keeps the rows of the only folder."""
    (path,) = (files.cache_folder() / "rows").iterdir()
    return path


def as_without(root: Path) -> None:
    """The Study of the rows that are kept is that of the records read anew."""
    found, plain = study_of(rows.of_folder(root).judged), load_study(stored_in(root))
    parts = ("cells", "repeats", "searches", "checks", "scores", "prefill", "n_records", "days", "probes")
    for part in parts:
        assert repr(getattr(found, part)) == repr(getattr(plain, part)), part


def speeds(root: Path) -> list[float]:
    return [row["tokens_per_s"] for row in study_of(rows.of_folder(root).judged).repeats]


def test_rows_of_every_workload_are_kept_and_equal_those_of_the_records_read_anew(nights, judged, capsys):
    for kind in ("prefill", "depth", "turns", "scored"):
        folder = nights.root / "m" / "model" / f"a.{kind}.0" / "1"
        shutil.copytree(Path(__file__).parent / "golden" / kind, folder)
    as_without(nights.root)
    assert sum(judged) == 12 + 4
    judged.clear()
    as_without(nights.root)
    assert judged == []
    assert capsys.readouterr().err == ""


def test_nothing_is_written_to_the_results(harness, nights):
    before = {path: path.stat().st_mtime_ns for path in [nights.root, *nights.root.rglob("*")]}
    for command in (("report", "--list"), ("report", "--history"), ("report", "-o", "page.html")):
        assert harness(command[0], nights.root, *command[1:]).code == 0
    assert {path: path.stat().st_mtime_ns for path in [nights.root, *nights.root.rglob("*")]} == before


def test_of_many_records_the_time_that_is_left_is_told(nights, monkeypatch, capsys):
    monkeypatch.setattr(rows, "AT_ONCE", 4)
    monkeypatch.setattr(rows, "MANY", 12)
    monkeypatch.setattr(rows, "LONG_S", -1.0)
    rows.of_folder(nights.root)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("harness: 12 records are judged once; their rows are kept in the cache")
    assert re.fullmatch(r"harness: about \d+ s are left", second)
    as_without(nights.root)


def test_only_records_that_are_new_or_changed_are_judged(nights, judged):
    rows.of_folder(nights.root)
    nights.add(3)
    rows.of_folder(nights.root)
    changed = sorted(nights.root.rglob("record.json"))[5]
    record = json.loads(changed.read_text())
    changed.write_text(json.dumps({**record, "outcome": "oom", "reason": "out of memory"}))
    rows.of_folder(nights.root)
    series = changed.with_name("tokens.parquet")
    series.write_bytes(max(nights.root.rglob("tokens.parquet")).read_bytes())
    rows.of_folder(nights.root)
    shutil.rmtree(changed.parent)
    rows.of_folder(nights.root)
    assert judged == [12, 4, 1, 1]
    as_without(nights.root)


def test_whatever_changes_the_rows_are_those_of_the_records_read_anew(nights):
    chance, golden = random.Random(0), Path(__file__).parent / "golden" / "scored" / "record.json"

    def some() -> Path:
        return chance.choice(sorted(nights.root.glob("*/*/*.decode.*/*/record.json")))

    def changed(path: Path, **keys: Any) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))

    def scored(number: int) -> None:
        record, place = json.loads(golden.read_text()), some()
        record["model"]["name"] = json.loads(place.read_text())["model"]["name"]
        record |= {"content_key": f"{number:020x}", "started_utc": f"2026-11-24T21:{number:02}:00+00:00"}
        (place.parents[1] / f"scored-{number}").mkdir()
        (place.parents[1] / f"scored-{number}" / "record.json").write_text(json.dumps(record))

    changes: list[Callable[[int], Any]] = [
        lambda number: nights.add(10 + number),
        lambda number: nights.add(60 - number, model__name=f"other-{chance.randrange(2)}b"),
        lambda number: nights.add(10 + number, cell="a", options={"speculate": "ngram"}),
        lambda number: shutil.copy(some().parent / "tokens.parquet", some().parent),
        lambda number: changed(some(), outcome="oom", reason="out of memory"),
        lambda number: changed(some(), repeat=chance.choice([1, 2])),
        lambda number: changed(some(), conditions={"pressure": {"cpu_some_avg10": 90.0}}),
        lambda number: shutil.rmtree(some().parent),
        scored,
    ]
    for number, change in enumerate(chance.sample(changes, len(changes))):
        change(number)
        as_without(nights.root)


def test_a_better_bandwidth_of_a_campaign_is_that_of_all_its_repeats(nights):
    first, *_ = sorted(nights.root.rglob("record.json"))
    rows.of_folder(nights.root)
    record = json.loads(first.read_text())
    probe = {"threads": 1, "read_bytes_per_s": 5e10, "seconds": 0.1}
    first.write_text(json.dumps({**record, "bandwidth_probes": [probe]}))
    repeats = study_of(rows.of_folder(nights.root).judged).repeats
    of_campaign = [row for row in repeats if row["campaign"] == record["campaign"]["id"]]
    assert [row["bandwidth_bytes_per_s"] for row in of_campaign] == [5e10] * 4
    as_without(nights.root)


# Whatever a stranger, an accident or another version did.


def test_a_record_in_place_of_one_with_the_same_size_and_time_has_its_own_row(nights):
    before = speeds(nights.root)
    for name in ("record.json", "tokens.parquet"):
        old, new = min(nights.root.rglob(name)), max(nights.root.rglob(name))
        status = old.stat()
        content = new.read_bytes()
        old.write_bytes(
            content + b" " * (status.st_size - len(content)) if name == "record.json" else content
        )
        os.utime(old, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert speeds(nights.root) != before
    as_without(nights.root)


def test_rows_that_came_with_a_folder_are_not_believed(nights, tmp_path):
    before = speeds(nights.root)
    lying = re.sub(rb'"tokens_per_s": [0-9.]+', b'"tokens_per_s": 1e9', kept().read_bytes())
    assert lying != kept().read_bytes()
    copy = shutil.copytree(nights.root, tmp_path / "copied")
    for path in (
        copy / kept().name,
        copy / "rows" / kept().name,
        *(each / "row.json" for each in copy.rglob("*T*")),
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(lying)
    assert speeds(copy) == before


def forged(path: Path) -> None:
    path.write_bytes(re.sub(rb'"tokens_per_s": [0-9.]+', b'"tokens_per_s": 1e9', path.read_bytes()))


def link(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_text("untouched")
    path.unlink()
    path.symlink_to(secret)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "another figure": forged,
    "of another folder": lambda path: path.write_bytes(path.read_bytes().replace(b"results", b"another")),
    "a link": link,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_damaged_or_of_others_is_made_again(nights, judged, damage):
    before = speeds(nights.root)
    DAMAGES[damage](kept())
    judged.clear()
    for _ in range(2):
        assert speeds(nights.root) == before
    assert judged == [12] * (2 if damage == "a folder" else 1)  # which cannot be replaced
    assert damage != "a link" or (files.cache_folder() / "secret").read_text() == "untouched"


def test_rows_of_another_version_are_made_again(nights, judged, monkeypatch):
    rows.of_folder(nights.root)
    monkeypatch.setattr(rows, "_version", lambda: "another")
    rows.of_folder(nights.root)
    assert judged == [12, 12]


def test_a_full_disk_is_a_sentence_and_the_answer_is_right(nights, capsys, full_disk, monkeypatch):
    monkeypatch.setattr(rows, "MANY", 12)
    plain = load_study(stored_in(nights.root))
    full_disk(10_000)
    assert speeds(nights.root) == [row["tokens_per_s"] for row in plain.repeats]
    assert "the rows cannot be kept, so records are judged again each time: " in capsys.readouterr().err
    assert not [*(files.cache_folder() / "rows").iterdir()]


def test_rows_of_a_folder_that_is_gone_go_with_the_next_that_are_kept(nights, tmp_path):
    other = shutil.copytree(nights.root, tmp_path / "other")
    rows.of_folder(other)
    shutil.rmtree(other)
    rows.of_folder(nights.root)
    assert json.loads(kept().read_bytes().partition(b"\n")[0])["source"] == str(nights.root)


def test_records_that_cannot_be_read_are_named_each_time_by_the_path_that_was_given(
    harness, nights, tmp_path
):
    broken = sorted(nights.root.rglob("record.json"))[0]
    broken.write_text("{")
    for named in (nights.root, Path(os.path.relpath(nights.root, tmp_path)), nights.root):
        ran = harness("report", named, "--list")
        assert ran.err.count(f"skipped: {named / broken.relative_to(nights.root)}: not a record") == 1
        assert ran.out.count("ok 2/2") == 2  # of other nights


def test_a_record_that_cannot_be_analysed_ends_no_comparison(harness, nights, monkeypatch):
    folder = nights.root / "m" / "model" / "a.quality.0" / "1"
    shutil.copytree(Path(__file__).parent / "golden" / "scored", folder)
    monkeypatch.setattr(quality, "row", lambda record: record["unforeseen"])
    ran = harness("compare", nights.root, "--baseline", "last:2")
    assert f"passed over: {folder}: cannot be analysed: KeyError('unforeseen')" in ran.err
    assert "tok/s" in ran.out


# One campaign of many, and copies.


def test_a_campaign_is_shown_alone(harness, nights):
    ran = harness("report", nights.root, "--campaign", "latest", "--format", "json")
    assert {row["campaign"][:10] for row in json.loads(ran.out)} == {"2026-09-03"}
    assert [row["repeats"] for row in json.loads(ran.out)] == [2, 2]
    listed = harness("report", nights.root, "--list", "--campaign", "latest", "--json")
    assert [row["campaign"][:10] for row in json.loads(listed.out)] == ["2026-09-03"] * 4
    day = harness("report", nights.root, "--campaign", "2026-09-02", "--format", "json")
    assert {row["campaign"][:10] for row in json.loads(day.out)} == {"2026-09-02"}
    assert "shown together" not in day.err


def test_a_campaign_is_named_by_its_time(harness, nights):
    def shown(*when: str) -> Ran:
        return harness("report", nights.root, *(f"--campaign={each}" for each in when), "--format", "json")

    none = shown("2026-08-01")
    assert none.code == 2
    assert "no campaign began at 2026-08-01; the first is 2026-09-01T02:00, the last 2026-09-03T" in none.err
    assert json.loads(shown("2026-09-02T02:00:00Z").out) == json.loads(shown("2026-09-02").out)
    for wrong in ("", "2026", "2026-13-40", "nope", "2026-09-02T02:00:00+02:00"):
        assert "neither latest nor a time in UTC" in shown(wrong).err
    nights.add(1.25)
    assert "2 campaigns began at 2026-09-02, and are shown together" in shown("2026-09-02").err


def test_a_campaign_of_one_of_several_folders_is_shown(harness, nights, tmp_path):
    Nights(nights.records, tmp_path / "later").add(40)
    both = (nights.root, tmp_path / "later", "--campaign", "2026-10-11", "--format", "json")
    assert {row["campaign"][:10] for row in json.loads(harness("report", *both).out)} == {"2026-10-11"}
    ran = harness("report", nights.root, tmp_path / "later", "--campaign", "2026-11-01")
    assert "results, " in ran.err
    assert (
        "later: no campaign began at 2026-11-01; the first is 2026-09-01T02:00, the last 2026-10-11"
        in ran.err
    )


def test_a_campaign_has_its_records_as_they_are_now(harness, nights):
    latest = ("report", nights.root, "--campaign", "latest", "--format", "json")
    assert {row["status"] for row in json.loads(harness(*latest).out)} == {"ok"}
    for path in nights.root.rglob("record.json"):  # whose folders stay
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "outcome": "oom", "reason": "out of memory"}))
    assert {row["status"] for row in json.loads(harness(*latest).out)} == {"oom"}
    nights.add(7)
    assert {row["campaign"][:10] for row in json.loads(harness(*latest).out)} == {"2026-09-08"}


def test_copies_of_one_series_are_told_once_for_a_cell(harness, nights):
    for path in [*nights.root.rglob("tokens.parquet")]:
        copy = path.parent.with_name(f"{path.parent.name}-copy")
        shutil.copytree(path.parent, copy)
        record = json.loads((copy / "record.json").read_text())
        (copy / "record.json").write_text(
            json.dumps({**record, "started_utc": record["started_utc"][:-7] + "5+00:00"})
        )
    lines = [
        line for line in harness("report", nights.root, "--list").out.splitlines() if "last digit" in line
    ]
    assert len(lines) == 2


def test_a_copy_under_the_name_of_another_model_is_found(nights):
    nights.add(5, model__name="other-1b")
    first = next(nights.root.rglob("0000.00-0/record.json"))
    copy = next(nights.root.rglob("0005.00-0/record.json"))
    shutil.copy(first.parent / "tokens.parquet", copy.parent)
    as_without(nights.root)
    wrong = [
        row for row in study_of(rows.of_folder(nights.root).judged).repeats if row["status"] == "invalid"
    ]
    assert {row["model"] for row in wrong} == {"other-1b", "tiny-qwen2"}


# Processes: two at once, and kills.


KEEPING = """
import sys
from pathlib import Path
from harness.dataset import rows
print(sorted(each.facts["started_utc"] for each in rows.of_folder(Path(sys.argv[1])).judged))
"""


def keeping(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", KEEPING, root], stdout=subprocess.PIPE, text=True)


def test_two_at_once_find_the_same(nights):
    started = sorted(stored.record["started_utc"] for stored in stored_in(nights.root))
    both = [keeping(nights.root) for _ in range(2)]
    assert [process.communicate(timeout=120)[0] for process in both] == [f"{started}\n"] * 2
    nights.add(10)
    as_without(nights.root)


def test_kills_at_any_moment_lose_nothing(nights):
    before = {path: path.read_bytes() for path in nights.root.rglob("*") if path.is_file()}
    for step in range(3):
        shutil.rmtree(files.cache_folder() / "rows", ignore_errors=True)
        process = keeping(nights.root)
        writing = time.monotonic() + 60
        while not [*files.cache_folder().glob("rows/*")] and process.poll() is None:
            assert time.monotonic() < writing
            time.sleep(0.002)
        time.sleep(step * 0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        as_without(nights.root)
    assert {path: path.read_bytes() for path in before} == before
