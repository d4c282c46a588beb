"""The index of a results folder: the same rows as without it, whatever happened to the file."""

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

import duckdb
import pytest
from conftest import Ran, stored_in
from made_nights import Nights

from harness.analysis import quality
from harness.base import files
from harness.compare import history, sides
from harness.dataset import index, judging
from harness.dataset.study import load_study, with_prefill

CELLS = ["tiny-qwen2 fake a", "tiny-qwen2 fake b"]


@pytest.fixture
def nights(run_once: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    """Three nights of two cells, twice each, in folders that are indexed as large ones are."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "FEWEST", 1)
    grown = Nights(run_once, tmp_path / "results")
    for night in range(3):
        grown.add(night)
    return grown


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each use of an index judged."""
    counts: list[int] = []
    plain = index.mend

    def counted(connection: Any, root: Path, found: Any) -> None:
        kept = {}
        if connection.execute("from duckdb_tables() select 1 where table_name = 'records'").fetchall():
            kept = dict(connection.execute("select folder, stamp from records").fetchall())
        counts.append(sum(kept.get(folder) != stamp for folder, stamp in found.items()))
        plain(connection, root, found)

    monkeypatch.setattr(index, "mend", counted)
    return counts


def opened(root: Path) -> index.Index:
    found = index.opened(root)
    assert found is not None
    return found


def as_without(root: Path) -> None:
    """The rows of the index are those of the records read anew."""
    kept, plain = opened(root), load_study(stored_in(root))

    def keyed(rows: Any) -> dict[Any, Any]:
        return {(row["content_key"], row["repeat"], row["started_utc"]): {**row} for row in rows}

    assert keyed(kept.repeats()) == keyed(plain.repeats)
    shown = kept.study()
    assert [*shown.cells] == [*with_prefill(plain).cells]
    for kind in ("searches", "checks", "scores"):
        assert [*getattr(shown, kind)] == [*getattr(plain, kind)]


def test_rows_are_those_of_the_records_read_anew(nights):
    as_without(nights.root)


@pytest.mark.parametrize("kind", ["prefill", "depth", "turns", "scored"])
def test_rows_of_other_workloads_are_too(nights, kind):
    shutil.copytree(
        Path(__file__).parent / "golden" / kind, nights.root / "m" / "model" / f"a.{kind}.0" / "1"
    )
    as_without(nights.root)


def test_an_index_that_is_current_judges_nothing(nights, judged, capsys):
    for _ in range(3):
        assert len(opened(nights.root).study().cells) == 2
    assert judged == [12]
    assert capsys.readouterr().err == ""


def test_of_many_records_the_time_that_is_left_is_told(nights, monkeypatch, capsys):
    monkeypatch.setattr(judging, "AT_ONCE", 4)
    monkeypatch.setattr(judging, "LONG_S", -1.0)
    opened(nights.root)
    assert re.fullmatch(r"harness: about \d+ s are left\n", capsys.readouterr().err)


def test_only_records_that_are_new_or_changed_are_judged(nights, judged):
    opened(nights.root)
    nights.add(3)
    as_without(nights.root)
    changed = sorted(nights.root.rglob("record.json"))[5]
    record = json.loads(changed.read_text())
    changed.write_text(json.dumps({**record, "outcome": "oom", "reason": "out of memory"}))
    as_without(nights.root)
    shutil.rmtree(changed.parent)
    as_without(nights.root)
    assert judged == [12, 4, 1, 0]


@pytest.mark.parametrize("seed", [0, 2])
def test_whatever_changes_the_rows_are_those_of_the_records_read_anew(nights, seed):
    chance, golden = random.Random(seed), Path(__file__).parent / "golden" / "scored" / "record.json"

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
    for number in range(12):
        chance.choice(changes)(number)
        if chance.random() < 0.7:
            as_without(nights.root)


def test_a_series_that_changed_is_read_again(nights):
    before = {row["tokens_per_s"] for row in opened(nights.root).repeats()}
    path = sorted(nights.root.rglob("tokens.parquet"))[0]
    path.write_bytes(sorted(nights.root.rglob("tokens.parquet"))[-1].read_bytes())
    assert {row["tokens_per_s"] for row in opened(nights.root).repeats()} != before
    as_without(nights.root)


def test_a_better_bandwidth_of_a_campaign_is_that_of_all_its_repeats(nights):
    first, *_ = sorted(nights.root.rglob("record.json"))
    opened(nights.root)
    record = json.loads(first.read_text())
    probe = {"threads": 1, "read_bytes_per_s": 5e10, "seconds": 0.1}
    first.write_text(json.dumps({**record, "bandwidth_probes": [probe]}))
    rows = [row for row in opened(nights.root).repeats() if row["campaign"] == record["campaign"]["id"]]
    assert [row["bandwidth_bytes_per_s"] for row in rows] == [5e10] * 4
    as_without(nights.root)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for at in range(0, len(content), 997):
        content[at] ^= 0xFF
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def foreign(path: Path) -> None:
    path.unlink()
    with duckdb.connect(str(path)) as other:
        other.execute("create table cells as select 'faster' as name, 1e9 as tokens_per_s")


def link(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_text("untouched")
    path.unlink()
    path.symlink_to(secret)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "bytes changed, its time kept": flip,
    "another database": foreign,
    "a link": link,
    "no database": lambda path: path.write_text("select 1"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_index_is_built_anew_with_one_sentence(nights, capsys, damage):
    opened(nights.root).connection.close()
    DAMAGES[damage](nights.root / index.NAME)
    kept = opened(nights.root)
    assert [cell["name"] for cell in kept.study().cells] == CELLS
    said = capsys.readouterr().err
    assert said.count("\n") == 1 + (damage == "a folder"), said  # which cannot be replaced either
    assert f"{nights.root / index.NAME}" in said
    assert damage != "a link" or (nights.root.parent / "secret").read_text() == "untouched"


def test_a_place_that_cannot_be_written_is_told_while_none_is_current(nights, capsys):
    (nights.root / index.NAME).mkdir()
    opened(nights.root)
    assert "was not written here, or was damaged: it is built anew\n" in capsys.readouterr().err
    opened(nights.root)
    assert capsys.readouterr().err == ""
    nights.add(3)
    opened(nights.root)
    assert "cannot be written: Is a directory\n" in capsys.readouterr().err


def test_a_deleted_index_is_built_anew_without_a_word(nights, judged, capsys):
    opened(nights.root)
    (nights.root / index.NAME).unlink()
    as_without(nights.root)
    assert judged == [12, 12]
    assert capsys.readouterr().err == ""


def test_an_index_of_another_version_is_built_anew(nights, judged, capsys, monkeypatch):
    opened(nights.root)
    monkeypatch.setattr(index, "_code", lambda: "another")
    opened(nights.root)
    assert judged == [12, 12]
    assert "is of another version of the harness: it is built anew\n" in capsys.readouterr().err


def test_an_index_that_came_with_its_folder_is_not_believed(nights, capsys, tmp_path):
    opened(nights.root)
    copy = tmp_path / "copied"
    shutil.copytree(nights.root, copy)
    with duckdb.connect(str(copy / index.NAME)) as lying:
        lying.execute("update repeats set tokens_per_s = 1e9")
    assert max(row["tokens_per_s"] for row in opened(copy).repeats()) < 1e6
    assert "was not written here, or was damaged: it is built anew\n" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_has_its_index_in_the_cache_folder(nights, monkeypatch, judged):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    as_without(nights.root)
    as_without(nights.root)
    assert judged == [12]
    assert not (nights.root / index.NAME).exists()
    assert len([*(files.cache_folder() / "indexes").glob("*.duckdb")]) == 1


def test_a_file_system_without_locks_has_its_index_in_the_cache_folder(nights, monkeypatch, capsys):
    plain = duckdb.connect

    def connect(path: str = ":memory:", **options: Any) -> Any:
        if path.startswith(str(nights.root)):
            raise duckdb.IOException(f'Could not set lock on file "{path}": No locks available')
        return plain(path, **options)

    monkeypatch.setattr(duckdb, "connect", connect)
    as_without(nights.root)
    assert "cannot be written: " in (said := capsys.readouterr().err)
    assert "No locks available\n" in said
    assert len([*(files.cache_folder() / "indexes").glob("*.duckdb")]) == 1


def test_a_full_disk_is_a_sentence_and_the_answer_is_right(nights, capsys, full_disk):
    plain = load_study(stored_in(nights.root))
    full_disk(100_000)
    assert [*opened(nights.root).study().cells] == [*plain.cells]
    assert "cannot be written: " in capsys.readouterr().err
    assert not [*nights.root.glob("index*")]


def test_records_that_cannot_be_read_are_named_each_time(harness, nights):
    broken = sorted(nights.root.rglob("record.json"))[0]
    broken.write_text("{")
    for _ in range(2):
        ran = harness("report", nights.root, "--list")
        assert ran.err.count(f"skipped: {broken}: not a record") == 1
        assert ran.out.count("ok 2/2") == 2  # of other nights


def test_the_list_of_an_unchanged_folder_is_the_same_and_opens_no_index(harness, nights, monkeypatch):
    first = harness("report", nights.root, "--list")
    monkeypatch.setattr(duckdb, "connect", lambda *_: pytest.fail("the index was opened"))
    again = harness("report", nights.root, "--list")
    assert again == first
    assert again.out.count("ok 2/2") == 2
    monkeypatch.undo()
    assert first.out == harness("report", nights.root, "--list").out


def test_the_history_of_the_index_is_that_of_the_records(nights):
    for night in range(3, 9):
        nights.add(night, 1.1 if night >= 6 else 1.0, "b")
    kept, plain = history.history(nights.root), history.of_records(stored_in(nights.root))
    assert [(each.name, each.metric.name, each.values, each.began) for each in kept.series] == [
        (each.name, each.metric.name, each.values, each.began) for each in plain.series
    ]
    steps = [history.step_row(step) for step in history.found_in(kept)]
    assert steps == [history.step_row(step) for step in history.found_in(plain)]
    assert "SLOWER" in {step["verdict"] for step in steps}


def test_a_record_that_cannot_be_analysed_ends_no_comparison(harness, nights, monkeypatch):
    folder = nights.root / "m" / "model" / "a.quality.0" / "1"
    shutil.copytree(Path(__file__).parent / "golden" / "scored", folder)
    monkeypatch.setattr(quality, "row", lambda record: record["unforeseen"])
    for fewest in (1000, 1):  # its records are read here, or by the index
        monkeypatch.setattr(index, "FEWEST", fewest)
        ran = harness("compare", nights.root, "--baseline", "last:2")
        assert f"passed over: {folder}: cannot be analysed: KeyError('unforeseen')" in ran.err
        assert "tok/s" in ran.out


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


def chosen(root: Path, count: int, campaign: str | None = None) -> Any:
    """What rolling() chooses: names and notes, and the folders of every campaign."""
    return [
        (
            side.name,
            side.notes,
            side.damages,
            [
                {of: [each.folder for each in found] for of, found in held.items()}
                for held in (side.campaigns, side.history)
            ],
        )
        for side in sides.rolling(root, count, campaign)
    ]


def test_the_campaigns_compared_are_those_chosen_from_all_records(nights, monkeypatch):
    for night in range(3, 22):
        nights.add(night, cell="a" if night != 9 else None)
    for path in nights.root.rglob("0005.00-*/record.json"):  # a cell that was dropped
        path.write_text(path.read_text().replace('"cell": "', '"cell": "old.'))
    next(nights.root.rglob("0020.00-0/record.json")).write_text("{")
    times = [None, "2026-09-20T02:00:00+00:00", "2026-09-12T02:00:00+00:00"]
    with monkeypatch.context() as without:
        without.setattr(index, "FEWEST", 10**9)
        expected = [chosen(nights.root, 2, each) for each in times]
    opened(nights.root)
    read = []
    plain = index.Index.facts
    monkeypatch.setattr(index.Index, "facts", lambda *of: (read.append(each) or each for each in plain(*of)))
    assert [chosen(nights.root, 2, each) for each in times] == expected
    assert len(read) < 3 * 22 * 4
    for path in nights.root.rglob("0021.00-*/record.json"):  # in place, after the index was made
        path.write_text(path.read_text().replace('"repeat": 2', '"repeat": 1'))
    found = chosen(nights.root, 2)
    monkeypatch.setattr(index, "of_known_records", lambda root: None)
    assert found == chosen(nights.root, 2)


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
    wrong = [row for row in opened(nights.root).repeats() if row["status"] == "invalid"]
    assert {row["model"] for row in wrong} == {"other-1b", "tiny-qwen2"}


# Processes: two at once, and kills.


INDEXED = """
import sys
from pathlib import Path
from harness.dataset import index, judging
index.FEWEST = 1
print(sorted(row["started_utc"] for row in index.opened(Path(sys.argv[1])).repeats()))
"""


def indexing(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", INDEXED, root], stdout=subprocess.PIPE, text=True)


def test_two_at_once_find_the_same(nights):
    started = sorted(each.record["started_utc"] for each in stored_in(nights.root))
    for again in range(2):
        both = [indexing(nights.root) for _ in range(2)]
        assert [each.communicate(timeout=120)[0] for each in both] == [f"{started}\n"] * 2
        nights.add(10 + again)
        started = sorted(each.record["started_utc"] for each in stored_in(nights.root))
    as_without(nights.root)
    assert not [*nights.root.glob("*.part*")]


def test_kills_at_any_moment_lose_nothing(nights):
    before = {
        path: path.read_bytes() for path in nights.root.rglob("*") if path.suffix in (".json", ".parquet")
    }
    for step in range(8):
        (nights.root / index.NAME).unlink(missing_ok=True)
        process = indexing(nights.root)
        writing = time.monotonic() + 60
        while not [*nights.root.glob("*.part")] and process.poll() is None and time.monotonic() < writing:
            time.sleep(0.002)
        time.sleep(step * 0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        as_without(nights.root)
    assert {path: path.read_bytes() for path in before} == before
