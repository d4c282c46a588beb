"""Results of a stranger: nothing outside their folder is read or written, one bad record ends nothing, and
no text of one is obeyed by a terminal."""

import copy
import csv
import errno
import gzip
import io
import json
import os
import re
from base64 import b64encode
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from golden_record import BEGUN, GOLDEN, record, write_record
from test_launch import request_of

from harness import records
from harness.analysis.verdicts import verdict
from harness.base import bounds, files
from harness.base.text import printable, printable_lines
from harness.dataset.study import load_study
from harness.records import NO_TOKENS, ResultsError, Stored
from harness.records.files import read_columns
from harness.records.foreign.log import LogError
from harness.records.foreign.read import read_log
from harness.records.foreign.table import Options
from harness.report import page
from harness.stacks import build
from harness.stacks.adopted import EnvironmentFailed
from harness.stacks.header import Environment, stacks
from runners import clock, worker
from runners.protocol import Done, Instruments
from runners.stacks import fake


def begun_in(root: Path) -> Path:
    """A folder as a controller of this machine and user leaves it that was killed."""
    running = records.begin(root / "machine" / "m" / "cell", BEGUN)
    running.events.close()
    return running.folder


def begun_elsewhere(root: Path) -> Path:
    folder = begun_in(root)
    (folder / "begun.json").write_text(json.dumps(BEGUN | {"begun_by": "0" * 64}))
    return folder


def record_in(root: Path, repeat: int = 1, **changes: Any) -> Path:
    """A record below root, with parts replaced: `model__shape__heads=3`."""
    folder = root / "machine" / "m" / "cell" / f"20261120T00000{repeat}.000000Z"
    return write_record(folder, record(repeat=repeat, **changes))


# Recovery


def test_recovery_writes_through_no_link_and_reads_through_none(tmp_path):
    victim, private = tmp_path / "victim", tmp_path / "private"
    victim.write_text("precious")
    private.write_text("secret\n")
    folder = begun_in(tmp_path / "results")
    (folder / "record.json.partial").symlink_to(victim)
    (folder / "worker.log").symlink_to(private)
    (stored,) = records.recover(tmp_path / "results", print)
    assert victim.read_text() == "precious"
    assert stored.record["log_tail"] == []
    assert victim.exists()


@pytest.mark.parametrize("name", ["begun.json", "events.jsonl"])
def test_recovery_passes_over_a_folder_whose_files_are_links(tmp_path, name):
    folder = begun_in(tmp_path / "results")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    told: list[str] = []
    assert records.recover(tmp_path / "results", lambda damage: told.append(str(damage))) == []
    assert [name in each or "begun.json" in each for each in told] == [True]
    assert "it is a symbolic link" in told[0]
    assert not (folder / "record.json").exists()


def test_what_another_machine_or_user_began_is_left_as_it_is(tmp_path):
    ours, theirs = begun_in(tmp_path), begun_elsewhere(tmp_path)
    before = {path.name: path.read_bytes() for path in theirs.iterdir()}
    told: list[str] = []
    found = records.recover(tmp_path, lambda damage: told.append(str(damage)))
    assert [stored.folder for stored in found] == [ours]
    assert "begun_by" not in found[0].record
    (only,) = told
    assert "another machine or user began it" in only
    assert str(theirs) in only
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == before


@pytest.mark.parametrize(
    "begun",
    [{"search": 1}, {"search": {}}, {"workload": {"prompt_tokens": 2**62}}, {"search": {"probes": 7}}],
)
def test_one_begun_folder_that_makes_no_sense_does_not_stop_the_others(tmp_path, begun):
    strange, ours = begun_in(tmp_path), begun_in(tmp_path)
    content = json.loads((strange / "begun.json").read_text())
    (strange / "begun.json").write_text(json.dumps(content | begun))
    told: list[ResultsError] = []
    found = records.recover(tmp_path, told.append)
    assert ours in [stored.folder for stored in found]
    assert len(found) + len(told) == 2


@pytest.mark.parametrize("above", ["machine", "machine/m", "machine/m/cell"])
def test_no_repeat_is_begun_behind_a_link_in_the_results(tmp_path, above):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / "results" / above
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    with pytest.raises(ResultsError, match="a symbolic link is where a results folder must be"):
        records.begin(tmp_path / "results" / "machine" / "m" / "cell", BEGUN)
    assert list(elsewhere.iterdir()) == []


def test_looking_whether_results_can_be_written_leaves_every_file_alone(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".writable-{os.getpid()}").symlink_to(victim)
    records.check_writable(tmp_path)
    assert victim.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 2


# Reading


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("make", [os.mkfifo, endless, Path.mkdir], ids=["fifo", "endless", "folder"])
@pytest.mark.parametrize("name", ["record.json", "tokens.parquet", "begun.json", "worker.log"])
def test_what_is_no_regular_file_is_neither_waited_for_nor_read(tmp_path, name, make):
    folder = record_in(tmp_path) if name == "tokens.parquet" else begun_in(tmp_path)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    damages: list[ResultsError] = []
    for stored in records.records(tmp_path, damages.append):
        assert not stored.has_series
        with pytest.raises(ResultsError, match="not a series"):
            records.series(stored)
    records.recover(tmp_path, damages.append)
    assert len(damages) == (name in ("record.json", "begun.json"))
    assert records.tail(folder / name) == []


@pytest.mark.parametrize("make", [os.mkfifo, endless], ids=["fifo", "endless"])
def test_a_log_that_is_no_regular_file_is_refused(tmp_path, make):
    make(tmp_path / "log.csv")
    with pytest.raises(LogError, match="it is not a regular file"):
        read_log(tmp_path / "log.csv", Options())


def test_a_log_behind_a_link_is_read(tmp_path):
    (tmp_path / "real.csv").write_text("latency_ms\n1\n2\n")
    (tmp_path / "log.csv").symlink_to(tmp_path / "real.csv")
    assert len(read_log(tmp_path / "log.csv", Options()).series["all"].ms) == 2


def test_a_record_that_is_too_large_is_refused_unread(tmp_path):
    folder = record_in(tmp_path)
    os.truncate(folder / "record.json", 1 << 40)  # a hole: it takes no space
    with pytest.raises(ResultsError, match="it is larger than 12 MiB"):
        records.read(folder / "record.json")


def test_a_record_with_an_object_of_very_many_names_is_refused(tmp_path):
    path = record_in(tmp_path) / "record.json"
    record = json.loads(path.read_text())
    for names, refused in ((bounds.RECORD_NAMES, False), (bounds.RECORD_NAMES + 1, True)):
        record["loaded"]["devices"] = {f"part {number}": {"CPU": 1} for number in range(names)}
        path.write_text(json.dumps(record))
        with pytest.raises(ResultsError, match="100,000 names") if refused else nullcontext():
            records.read(path)


def test_a_series_that_is_small_on_disk_and_large_in_memory_is_refused_unread(tmp_path):
    rows = pa.nulls(5_000_000, pa.int64()).fill_null(1)
    pq.write_table(pa.table({"n": rows, "latency_ns": rows}), tmp_path / "tokens.parquet", compression="zstd")
    assert (tmp_path / "tokens.parquet").stat().st_size < 100_000
    with pytest.raises(ResultsError, match="it has more than 4,194,304 values"):
        read_columns(tmp_path / "tokens.parquet", ("n",))


def test_a_series_whose_footer_says_less_than_its_pages_hold_is_refused_unread(tmp_path):
    def number(value: int, size: int) -> bytes:
        """As Thrift writes a number above 0, in so many bytes."""
        return bytes((value * 2 >> 7 * at) & 127 | (128 if at + 1 < size else 0) for at in range(size))

    path, count, said = tmp_path / "tokens.parquet", 10_000_000, 1_050_000
    rows = pa.table({"n": pa.nulls(count, pa.int64()).fill_null(7)})
    one = {"data_page_size": 1 << 30, "max_rows_per_page": count, "row_group_size": count}
    plain = {"use_dictionary": False, "write_statistics": False, "compression": "zstd"}
    pq.write_table(rows, path, write_batch_size=count, **one, **plain)
    size = pq.ParquetFile(path).metadata.row_group(0).column(0).total_uncompressed_size
    raw = path.read_bytes()
    for true, length in ((count, 4), (size, 4)):
        assert number(true, length) in raw[-1000:]
        raw = raw[:-1000] + raw[-1000:].replace(number(true, length), number(said, length))
    path.write_bytes(raw)
    footer = pq.ParquetFile(path).metadata
    assert (footer.num_rows, footer.row_group(0).column(0).total_uncompressed_size) == (said, said)
    with pytest.raises(ResultsError, match="it has more than 4,194,304 values"):
        read_columns(path, ("n",))


def test_lists_are_refused_before_they_are_read(tmp_path):
    lists = pa.array([list(range(1000))] * 10)
    pq.write_table(pa.table({"n": lists}), tmp_path / "tokens.parquet")
    with pytest.raises(ResultsError, match="its column n does not hold integers"):
        read_columns(tmp_path / "tokens.parquet", ("n",))


def test_a_log_that_is_small_on_disk_and_large_in_memory_is_refused(tmp_path):
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress(b"0" * (1 << 26)))
    with pytest.raises(LogError, match="it is larger than 32 MiB when decompressed"):
        read_log(tmp_path / "log.csv.gz", Options())
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress(b"latency_ms\n" + b"1\n" * (1 << 22)))
    with pytest.raises(LogError, match="it has more than 1,500,000 values"):
        read_log(tmp_path / "log.csv.gz", Options())


@pytest.mark.parametrize(
    "text",
    [
        "latency_ms" + "," * 100_000,
        "latency_ms\n" + "," * 100_000 + "\n1" * 100_000,
        "latency_ms" + "," * 900 + "\n1" * 100_000,
        json.dumps([{f"key {number}": 1} for number in range(20_000)]),
    ],
    ids=["wide", "wide below its header", "padded", "a key per object"],
)
def test_a_log_whose_table_would_be_far_larger_than_its_text_is_refused(tmp_path, text):
    (tmp_path / "log").write_text(text)
    with pytest.raises(LogError, match="its table is too large: "):
        read_log(tmp_path / "log", Options())


def test_of_a_repeat_that_was_cut_off_a_bounded_part_of_its_events_is_read(tmp_path):
    events = begun_in(tmp_path) / "events.jsonl"
    os.truncate(events, 1 << 40)  # a hole: it takes no space
    damages: list[ResultsError] = []
    (recovered,) = records.recover(tmp_path, damages.append)
    assert (recovered.record["outcome"], damages) == ("interrupted", [])


# One bad record


@pytest.mark.parametrize("shown", ["--list", "--memory", "--format md", "--export csv"])
def test_names_that_are_markup_are_text(harness, tmp_path, shown):
    record_in(tmp_path / "results", variant="[/nope]", cell="[/nope]", stack="[bold")
    ran = harness("report", tmp_path / "results", *shown.split())
    assert "Traceback" not in ran.err
    assert ran.code in (0, 1)
    assert "--export" in shown or "nope" in ran.out


@pytest.mark.parametrize("field", ["heads", "kv_heads", "layers", "vocab_size", "hidden_size", "context"])
def test_a_shape_beyond_all_models_is_refused_and_the_other_records_are_shown(harness, tmp_path, field):
    good = record_in(tmp_path / "results")
    bad = record_in(tmp_path / "results", 2, **{f"model__shape__{field}": 2**62})
    ran = harness("report", tmp_path / "results", "--format", "json")
    assert ran.code == 0
    assert f"{bad / 'record.json'}: not a record: model.shape.{field}" in ran.err
    assert [row["repeats"] for row in ran.json] == [1]
    assert good.exists()


def test_figures_beyond_64_bits_do_not_end_a_report(harness, tmp_path):
    largest = dict.fromkeys(("heads", "kv_heads", "layers", "head_dim", "vocab_size"), 2**32 - 1)
    shape = GOLDEN["model"]["shape"] | largest
    record_in(tmp_path / "results", model__shape=shape)
    for shown in (["--format", "md"], ["--memory"], ["--list"]):
        assert harness("report", tmp_path / "results", *shown).code == 0


def test_a_record_that_cannot_be_analysed_is_named_and_the_others_are_shown(harness, tmp_path, monkeypatch):
    """No such record is known: the fault is put where every record passes."""
    from harness.dataset import table

    record_in(tmp_path / "results")
    bad = record_in(tmp_path / "results", 2)
    whole = table.repeat_row

    def breaks(record: Any, *others: Any) -> Any:
        if record["repeat"] == 2:
            raise KeyError("nobody thought of it")
        return whole(record, *others)

    monkeypatch.setattr(table, "repeat_row", breaks)
    ran = harness("report", "--list", tmp_path / "results", "--json")
    assert ran.code == 0
    assert [row["repeat"] for row in ran.json] == [1]
    assert f"skipped: {bad}: cannot be analysed: KeyError('nobody thought of it')" in ran.err


# The page


def test_of_a_list_without_end_a_page_shows_the_beginning(tmp_path):
    record_in(tmp_path / "results", protocol__threads=[1, 2] * 300_000)
    made = page.page(load_study([*records.records(tmp_path / "results", pytest.fail)]))
    assert re.search(r"\d{3},\d{3} more", made)
    assert made.count("\n- ") < 20_000


@pytest.mark.parametrize("is_served", [False, True], ids=["file", "served"])
def test_a_page_runs_its_own_scripts_alone_and_reaches_no_other_host(tmp_path, is_served):
    """By its Content-Security-Policy, which browsers keep."""
    text = "</script><script>alert(1)</script><img src=https://evil.example/x>"
    record_in(tmp_path / "results", variant=text, model__name=text)
    study = load_study([*records.records(tmp_path / "results", pytest.fail)])
    made = page.page(study, version="1" if is_served else "")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', made)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == ("'self'" if is_served else "'none'")
    assert rules["img-src"] == "data: blob:"
    scripts = re.findall(r"<script>(.*?)</script>", made, re.DOTALL)
    hashes = {b64encode(sha256(script.encode()).digest()).decode() for script in scripts}
    assert {f"'sha256-{each}'" for each in hashes} <= set(rules["script-src"].split())
    assert "unsafe" not in rules["script-src"]
    assert not any("alert(1)" in script for script in scripts)


# Tables for spreadsheets


@pytest.mark.parametrize(
    "text",
    [
        "=cmd|' /C calc'!A0",
        "+1",
        "-1",
        "@SUM(A1)",
        "\t=1",
        "\r=1",
        "\n=1",
        "\nx",
        "\tx",
        "\ufeff=1",
        "\u200b+1",
        " @a",
    ],
)
def test_no_cell_of_a_csv_file_is_a_formula(harness, tmp_path, text):
    record_in(tmp_path / "results", variant=text)
    ran = harness("report", tmp_path / "results", "--format", "csv")
    (row,) = csv.DictReader(io.StringIO(ran.out))
    assert row["variant"].startswith("'")
    assert float(row["bpw"]) > 0


@pytest.mark.parametrize("sign", ["=", "+", "-", "@"])
def test_signs_of_full_width_are_signs(harness, tmp_path, sign):
    record_in(tmp_path / "results", variant=f"{chr(ord(sign) + 0xFEE0)}1")
    ran = harness("report", tmp_path / "results", "--format", "csv")
    (row,) = csv.DictReader(io.StringIO(ran.out))
    assert row["variant"].startswith("'")


# Writing


def test_a_page_that_does_not_fit_leaves_the_page_before(harness, tmp_path, full_disk):
    record_in(tmp_path / "results")
    page = tmp_path / "page.html"
    assert harness("report", tmp_path / "results", "-o", page).code == 0
    whole = page.read_bytes()
    full_disk(len(whole) // 2)
    ran = harness("report", tmp_path / "results", "-o", page)
    assert ran.code == 2
    assert f"{page}: cannot be written: {os.strerror(errno.EFBIG)}" in ran.err
    assert page.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "results"]


def test_a_full_disk_under_any_other_file_is_a_sentence(harness, tmp_path):
    for side in ("before", "after"):
        record_in(tmp_path / side, started_utc=f"2026-11-2{len(side)}T00:00:00+00:00")
    ran = harness("compare", "before", "after", "--format", "gha", GITHUB_STEP_SUMMARY="/dev/full")
    assert ran.code == 1
    assert f"cannot be written: {os.strerror(errno.ENOSPC)}" in ran.err


def test_a_page_is_written_through_the_link_that_the_user_named(tmp_path):
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    files.write_output(tmp_path / "link.html", b"page")
    assert (tmp_path / "real.html").read_bytes() == b"page"
    assert (tmp_path / "link.html").is_symlink()
    files.write_output(Path("/dev/null"), b"page")
    assert not Path("/dev/null").is_file()


def test_a_write_never_takes_a_name_that_is_there(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "known")
    (tmp_path / "known.partial").symlink_to(victim)
    with pytest.raises(FileExistsError):
        files.write_whole(tmp_path / "record.json", b"{}")
    assert victim.read_text() == "precious"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """One whose build is writing alone: it starts no uv."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_venv", lambda steps, folder: folder.mkdir())
    monkeypatch.setattr(build, "_install", lambda steps, python: {})
    monkeypatch.setattr(build, "_frozen", lambda *_: ["a==1"])
    return next(iter(stacks()["fake"].environments.values()))


def test_a_full_disk_while_an_environment_is_built_is_a_sentence(environment, full_disk):
    full_disk(4)
    with pytest.raises(EnvironmentFailed, match=r"fake/\w+ could not be built: .*File too large"):
        build.create(environment, print)
    assert build.find(environment) is None


def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done from now on, in order: the names that are synced, and those that files get."""
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def sync(opened: int) -> None:
        done.append(f"sync {Path(f'/proc/self/fd/{opened}').readlink().name}")
        fsync(opened)

    def rename(path: Path, target: Path) -> Path:
        done.append(f"rename {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    monkeypatch.setattr(os, "sync", lambda: done.append("sync all"))
    return done


def test_a_record_survives_a_power_failure_in_its_folder_and_in_the_folders_above(tmp_path, monkeypatch):
    done = synced(monkeypatch)
    running = records.begin(tmp_path / "results" / "machine" / "m" / "cell", BEGUN)
    assert {"sync cell", "sync m", "sync machine", "sync results"} <= set(done)
    running.finish(GOLDEN, NO_TOKENS)
    written = done[done.index("rename record.json") :]
    assert written == ["rename record.json", f"sync {running.folder.name}"]
    assert [each.folder for each in records.records(tmp_path, print)] == [running.folder]
    assert Stored(running.folder, GOLDEN).series_path is None


def test_an_environment_is_complete_only_after_its_packages_are_on_the_disk(environment, monkeypatch):
    done = synced(monkeypatch)
    build.create(environment, print)
    assert done[0] == "sync all"
    assert done[-2:] == ["rename complete.json", f"sync {build.folder_of(environment).name}"]


# A terminal, a page's name and a clock


@pytest.mark.parametrize("slug", ["../../out", "/tmp/out", "", "a/b", "A", "a" * 81, "a\n"])
def test_a_page_s_name_cannot_lead_out_of_its_folder(harness, tmp_path, slug):
    record_in(tmp_path / "work" / "theirs", machine__slug=slug)
    ran = harness("report", tmp_path / "work" / "theirs")
    assert ran.code == 2
    assert "machine.slug must be 1 to 80 of a to z, 0 to 9 and -" in ran.err
    assert list(tmp_path.rglob("*.html")) == []


HOSTILE = "\x1b[2J\x9b31m\r\n::error::owned\u202e##[stop-commands]x"


def test_no_text_of_a_record_is_obeyed_by_a_terminal_or_by_ci(harness, tmp_path):
    record_in(tmp_path / "results", variant=HOSTILE, outcome="crash", reason=HOSTILE, model__name=HOSTILE)
    for shown in ("--list", "--list --json", "--format md", "--format csv"):
        ran = harness("report", tmp_path / "results", *shown.split())
        for line in (ran.out + ran.err).splitlines():
            assert line.isprintable()
            assert not line.strip().startswith("::")
            assert "##[" not in line
        assert "owned" in ran.out


def test_what_is_printable_stays_as_it_is():
    text = "a: [1]\n  é 模型 ±0.5% :: ## x"
    assert printable_lines(text) == text
    assert printable_lines(" ::a\n##vso[b") == " :\\:a\n##vso\\[b"
    assert printable("\t\udc80\n") == "\\t\\udc80\\n"


def test_a_suspend_during_a_repeat_makes_it_invalid():
    events, clock = [], iter([7_000_000_000, 9_500_000_000])
    own = fake.instruments(request := request_of())
    suspended = Instruments(own.clock_ns, own.cpu_wait_ns, own.page_faults, lambda: next(clock))
    worker.generate(request, fake, events.append, (MemoryError,), suspended)
    done = events[-1]
    assert isinstance(done, Done)
    assert done.facts["suspended_ns"] == 2_500_000_000
    record = copy.deepcopy(GOLDEN)
    record["done"]["suspended_ns"] = 2_500_000_000
    found = verdict(record)
    assert (found.status, found.disturbed) == ("invalid", "suspend")
    assert found.reasons == ["the machine was suspended for 2.5 s"]
    record["done"]["suspended_ns"] = 1_000_000
    assert verdict(record).status == "ok"


def test_the_time_that_a_machine_was_suspended_does_not_grow_while_it_is_awake():
    assert abs(clock.suspended_ns() - clock.suspended_ns()) < 2_000_000
