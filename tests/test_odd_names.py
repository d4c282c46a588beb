"""Folders whose names nobody expects: the record that cannot be read is named, and the others are shown."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import refused
from made_nights import Nights

from harness.dataset import table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")

NOT_UTF8 = [b"caf\xe9", b"\xed\xa0\x80" + b"\xff" * 9]  # with the cell three, as many as are named
ODD = [
    *map(str.encode, ["a\nb", "a\x1b[31mb", "::error::a", "<script>", "x" * 255, "\u202ea", " ", "a'b\"c"])
]


@pytest.fixture
def results(run_once: list[Path], tmp_path: Path) -> Path:
    grown = Nights(run_once, tmp_path / "results")
    for night in range(5):
        grown.add(night)
    return grown.root


def renamed(folder: Path, name: bytes) -> Path:
    return folder.rename(folder.with_name(os.fsdecode(name)))


def shows_the_others(harness, results, count, *said):
    """Every way to read the folder shows `count` repeats and says these sentences."""
    for command in (
        ("report", results, "--list"),
        ("report", results, "-o", "page.html"),
        ("compare", results, "--baseline", "last:4"),
        ("sql", "select count(*) as n from repeats", results, "--json"),
    ):
        ran = harness(*command)
        assert ran.code in (0, 1), (command, ran.err)  # 1: some were not compared
        for sentence in said:
            assert sentence in ran.err, command
        assert "\x1b" not in ran.err
    assert json.loads(ran.out) == [{"n": count}], ran.err


def test_folders_whose_names_are_not_utf8_are_named_and_the_others_are_shown(harness, results):
    records = sorted(results.rglob("record.json"))
    renamed(records[-1].parents[1], b"cell\xe9")
    for path, name in zip(records, NOT_UTF8, strict=False):
        renamed(path.parent, name)
    count = len(records) // 2 - len(NOT_UTF8)
    names = [ascii(os.fsdecode(name))[1:-1] for name in (b"cell\xe9", *NOT_UTF8)]
    shows_the_others(
        harness, results, count, *(f"/{name}: its name is not UTF-8: rename it" for name in names)
    )


def test_records_with_odd_names_are_shown(harness, results):
    records = sorted(results.rglob("record.json"))
    for path, name in zip(records, ODD, strict=False):
        renamed(path.parent, name)
    shows_the_others(harness, results, len(records))


@pytest.mark.parametrize("name", [b"caf\xe9", b"a\nb"], ids=ascii)
def test_a_results_folder_may_have_any_name(harness, results, name):
    count = len([*results.rglob("record.json")])
    shows_the_others(harness, odd := renamed(results, name), count)
    asked = "select count(*) as n from tokens", odd, "--json"
    if name.isascii():
        assert json.loads(harness("sql", *asked).out) == [{"n": count * 600}]
    else:
        refused(harness("sql", *asked), "its name is not UTF-8, so tokens cannot be read: rename it")


def test_records_may_be_nested_a_thousand_folders_deep(harness, results, request):
    count = len([*results.rglob("record.json")])
    record = next(results.rglob("record.json")).parent
    shutil.copytree(record, deep := results / "deep")
    for _ in range(1100):
        (outer := results / "outer").mkdir()
        deep.rename(outer / "d")
        outer.rename(deep)
    request.addfinalizer(lambda: subprocess.run(["rm", "-r", deep], check=True))  # pytest cannot
    ran = harness("report", results, "--list")
    assert ran.code == 0, ran.err
    ran = harness("sql", "select count(*) as n from repeats", results, "--json")
    assert json.loads(ran.out) == [{"n": count + 1}], ran.err


def test_a_folder_whose_only_record_cannot_be_analysed_is_a_sentence(harness, run_once, monkeypatch):
    monkeypatch.setattr(table, "repeat_row", lambda *_: {}["unforeseen"])
    for command in (("-o", "page.html"), ("--format", "csv"), ("--history",), ("--list",)):
        ran = harness("report", run_once[0].parent, *command)
        assert "cannot be analysed: KeyError('unforeseen')" in ran.err, command
        assert ran.code == (0 if command == ("--list",) else 2), command
