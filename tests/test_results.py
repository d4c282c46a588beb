"""A record is written whole or not at all, never overwritten, and readable for ever."""

import contextlib
import copy
import cProfile
import inspect
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import STUDY
from damage import GONE, edited, edits, patched, patches, places
from golden_record import BEGUN, GOLDEN, write_record
from hypothesis import example, given
from hypothesis import strategies as st

from harness import records
from harness.cli import STOPS, main
from harness.dataset import table
from harness.records import NO_TOKENS, ResultsError, Running, Stored, TokenTimes, files
from harness.records.parts import ShapeFields
from harness.theory.decoder import dense, dense_fields
from harness.theory.hf_config import SHAPES
from runners.protocol import Loaded, Phase, Tokens, encode

GOLDENS = Path(__file__).parent / "golden"
SAID = [Phase("load", 1), Loaded({"versions": {}}), Phase("generate", 2)]
SAID += [Tokens(0, [10, 20], [1, 2]), Tokens(2, [31, 40], [3, 4])]


def test_a_series_is_written_without_pandas_which_takes_as_long_to_import_as_a_campaign_takes(tmp_path):
    columns = {"n": [1, 2, 3], "vram_bytes": [None, 2**62, -1]}
    code = "import sys, pathlib; from harness.records import files; files.write_columns(pathlib.Path('x'), "
    code += f"{columns}); print('pandas' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.stdout.strip(), ran.stderr) == ("False", "")
    assert files.read_columns(tmp_path / "x", ("n",)) == columns


def refuse(damage: ResultsError) -> None:
    raise damage


def changed(where: str, value: Any = ..., *gone: str) -> dict[str, Any]:
    """The golden record with the value at `done.counters` replaced, or taken out, and others taken out."""
    record = copy.deepcopy(GOLDEN)
    for path, new in ((where, value), *((path, ...) for path in gone)):
        *parents, last = path.split(".")
        place = record
        for name in parents:
            place = place[name]
        if new is ...:
            del place[last]
        else:
            place[last] = new
    return record


INSTEAD = (None, True, 0, 1, -1, 2**70, 0.5, -1e308, float("inf"), float("nan"))
INSTEAD = (*INSTEAD, "", "ok", "\ud800", [], [1], ["a"], {}, {"a": 1}, {"a": {"b": None}})


EDITS = edits(places(GOLDEN), INSTEAD)
REPORTED = json.loads(next(STUDY.rglob("record.json")).read_text())
SERIES = TokenTimes.of_columns(
    {"n": [*range(26, 526)], "token_id": [*range(500)], "latency_ns": [10**6 + 17 * k for k in range(500)]}
)


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A series as it is stored."""
    running = records.begin(tmp_path_factory.mktemp("series") / "cell", BEGUN)
    return (running.finish(GOLDEN, SERIES).folder / "tokens.parquet").read_bytes()


def abandon(root: Path, said: bytes) -> Path:
    """A folder as a controller that was killed leaves it."""
    running = records.begin(root / "machine" / "m" / "cell", BEGUN)
    running.events.write(said)
    running.events.close()
    return running.folder


def test_a_finished_repeat_is_a_record_and_a_series_and_nothing_else(tmp_path):
    running = records.begin(tmp_path / "machine" / "m" / "cell", BEGUN)
    memory = {"t_ns": [1, 2], "rss_anon_bytes": [3, 4], "rss_file_bytes": [5, 6], "vram_bytes": [None, None]}
    series = {"n": [26, 27], "token_id": [1, 2], "latency_ns": [10, 11]}
    stored = running.finish(GOLDEN, TokenTimes.of_columns(series), memory)
    names = {path.name for path in stored.folder.iterdir()}
    assert names == {"record.json", "tokens.parquet", "memory.parquet"}
    assert records.series(stored) == stored.times.columns() == series
    assert records.memory_series(stored) == memory
    assert records.prefill_series(stored) == {}
    assert [s.record["schema"] for s in records.records(tmp_path, refuse)] == [records.SCHEMA]


def test_two_repeats_never_share_a_folder(tmp_path):
    folders = {abandon(tmp_path, b"") for _ in range(50)}
    assert len(folders) == 50


STREAM = b"".join(encode(event) for event in SAID)


@given(st.integers(0, len(STREAM)))
@example(len(STREAM) - 1)
@example(len(STREAM))
def test_what_a_killed_controller_had_is_recovered_whatever_the_cut(tmp_path, cut):
    root = tmp_path / "results"
    shutil.rmtree(root, ignore_errors=True)
    abandon(root, STREAM[:cut])
    (stored,) = records.recover(root, refuse)
    assert stored.record["outcome"] == "interrupted"
    ends = {len(STREAM) - len(encode(SAID[-1])): 2, len(STREAM): 4}
    whole = max((tokens for end, tokens in ends.items() if cut >= end), default=0)
    assert stored.record["tokens"] == whole
    assert records.series(stored).get("latency_ns", []) == [10, 10, 11, 9][:whole]
    assert records.recover(root, refuse) == []


def test_a_repeat_that_is_still_running_is_left_alone(tmp_path):
    running = records.begin(tmp_path / "cell", BEGUN)
    assert records.recover(tmp_path, refuse) == []
    assert not (running.folder / "record.json").exists()
    running.events.close()
    assert len(records.recover(tmp_path, refuse)) == 1


def test_a_record_already_written_is_never_made_interrupted(tmp_path):
    folder = abandon(tmp_path, b"")
    (folder / "record.json").write_text(json.dumps(BEGUN | {"schema": 1, "outcome": "ok"}))
    assert records.recover(tmp_path, refuse) == []
    assert json.loads((folder / "record.json").read_text())["outcome"] == "ok"
    assert not (folder / "begun.json").exists()


def test_the_golden_record_of_every_schema_still_reads():
    samples = sorted(GOLDENS.glob("record-*.json"))
    assert [path.name for path in samples] == [f"record-{n}.json" for n in range(1, records.SCHEMA + 1)]
    for path in samples:
        record = records.read(path)
        assert record["schema"] == records.SCHEMA
        assert record["outcome"] in records.OUTCOMES


def test_the_published_schema_takes_what_is_read_and_refuses_what_is_not():
    docs = Path(__file__).parent.parent / "docs"
    schema = jsonschema.Draft202012Validator(json.loads((docs / "record.schema.json").read_text()))
    published = sorted((docs.parent / "results" / "published").rglob("record.json"))
    for path in [*GOLDENS.glob("record-*.json"), *published[::10]]:
        assert [*schema.iter_errors(json.loads(path.read_text()))] == [], path
    for wrong in (changed("content_key"), changed("kind", "guessed"), changed("tokens", -1), [GOLDEN]):
        assert not schema.is_valid(wrong)


def test_a_record_has_the_fields_of_a_shape():
    kept = ShapeFields.__annotations__
    arguments = inspect.signature(dense).parameters
    assert [*kept] == [*arguments] == [*dense_fields(SHAPES["tiny-llama"])]
    optional = {name for name, argument in arguments.items() if argument.default is not argument.empty}
    assert ShapeFields.__optional_keys__ == optional


def test_what_a_record_lacks_is_told_in_one_sentence(tmp_path):
    """Written by hand: what was passed on to the readers before, and ended there."""
    bare = {name: GOLDEN[name] for name in ("schema", "kind", "cell", "repeat", "started_utc", "outcome")}
    wrong: dict[str, tuple[object, str]] = {
        "bare": (bare, "not a record: content_key is missing"),
        "list": ([GOLDEN], "not a record: it must be a mapping"),
        "newer": ({"schema": 99}, "schema 99 is newer than this harness reads"),
        "cut": ('{"schema": 1, "cell"', "not a record"),
        "text": (changed("schema", "1"), "not a record: schema must be a whole number from 1"),
        "kind": (changed("kind", "guessed"), "its kind must be one of measured, reported"),
        "outcome": (changed("outcome", ["ok"]), "outcome must be one of ok, oom"),
        "weights": (changed("model.weights", None), "model.weights must be a mapping"),
        "zone": (changed("started_utc", "2026-11-20"), "started_utc must be a time with its zone"),
        "shape": (changed("model.shape.layer", 2), "model.shape.layer is no part of a shape"),
        "type": (changed("options.type_k", "q9"), "options.type_k must be one of ggml's types"),
        "stamps": (changed("timing.first_token_ns"), "timing must have both"),
        "backwards": (changed("timing.last_token_ns", 1), "last_token_ns must be after first_token_ns"),
        "ended": (changed("done"), "done is missing"),
        "kernels": (changed("loaded.kernel_asked", "marlin", "loaded.kernels"), "loaded.kernels is missing"),
        "probe": (changed("bandwidth_probes", [{}]), "bandwidth_probes[0].read_bytes_per_s is missing"),
        "retries": (changed("done.counters.allocator_retries", [[1]]), "must be pairs of whole numbers"),
        "flushes": (changed("done.flushes", [[1, -2]]), "done.flushes must be pairs of whole numbers"),
        "half": (changed("variant", "\ud800"), "surrogates not allowed"),
        "nan": (changed("done.counters.stack_decode_ms", float("nan")), "NaN, which is not a finite number"),
        "huge": (changed("done.counters.stack_decode_ms", 10**400), "has a number of 401 digits"),
        "deep": ("[" * 100_000, "not a record"),
        "lines": (changed("loaded.versions", {"a\r\x1b[2Jb": 1}), r"loaded.versions.a\r\x1b[2Jb must be"),
    }
    for name, (content, sentence) in wrong.items():
        path = tmp_path / name / "record.json"
        path.parent.mkdir()
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ResultsError) as told:
            records.read(path)
        assert sentence in str(told.value)
        assert str(told.value).startswith(f"{path}: ")
        assert str(told.value).isprintable()


DAMAGES = st.tuples(EDITS, st.none() | st.just([]) | st.integers(0, 10**6) | patches(10**6, max_size=20))


def damaged_series(content: bytes, damage: list[tuple[int, bytes]] | int) -> bytes:
    """Cut at an offset, or with bytes written over it; offsets wrap around at its end."""
    if isinstance(damage, int):
        return content[: damage % len(content)]
    return patched(content, [(at % len(content), piece) for at, piece in damage])


def listed(folder: Path, *form: str) -> tuple[str, list[str]]:
    """What `harness list` prints, and its lines on stderr."""
    out, err, handlers = io.StringIO(), io.StringIO(), {number: signal.getsignal(number) for number in STOPS}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["report", "--list", str(folder), *form]) == 0
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return out.getvalue(), err.getvalue().splitlines()


@given(form=st.sampled_from([["--json"], []]), damages=st.lists(DAMAGES, min_size=1, max_size=3))
@example(form=[], damages=[([(("done",), GONE)], None)])
@example(form=[], damages=[([(("model", "weights", "header", "bytes_by_type"), {"\r": None})], None)])
@example(form=["--json"], damages=[([(("environment",), True)], None)])
@example(form=["--json"], damages=[([(("loaded", "devices", "layers"), True)], None)])
def test_a_folder_of_damaged_records_and_series_lists_what_can_be_listed(tmp_path, parquet, form, damages):
    """Each is listed or passed over, and none ends the listing."""
    root = tmp_path / "damaged"
    shutil.rmtree(root, ignore_errors=True)
    for number, (changes, series) in enumerate(damages):
        folder = write_record(root / str(number), edited(GOLDEN, changes))
        if series is not None:
            (folder / "tokens.parquet").write_bytes(damaged_series(parquet, series))
    out, err = listed(root, *form)
    assert all(line.startswith("harness: ") for line in err)
    over = sum(line.startswith("harness: skipped: ") for line in err)
    assert over <= len(damages)
    if form:
        assert len(json.loads(out)) == len(damages) - over


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_may_not_be_read_is_not_an_empty_one(harness, tmp_path):
    (tmp_path / "some" / "machine").mkdir(parents=True)
    (tmp_path / "some" / "machine").chmod(0)
    ran = harness("report", "--list", tmp_path / "some")
    assert f"skipped: {tmp_path / 'some' / 'machine'}: Permission denied" in ran.err
    (tmp_path / "some").chmod(0)
    ran = harness("report", "--list", tmp_path / "some")
    assert (ran.code, ran.err) == (2, f"harness: {tmp_path / 'some'}: Permission denied\n")


def test_a_folder_that_is_still_to_be_made_has_no_records_and_no_damage(tmp_path):
    assert list(records.records(tmp_path / "later", refuse)) == []


def test_the_command_lists_what_is_whole_and_names_what_it_passes_over(harness, tmp_path, parquet):
    for name, record in {"whole": GOLDEN, "lacking": changed("done"), "cut": GOLDEN}.items():
        folder = write_record(tmp_path / "some" / name, record)
        content = parquet[: len(parquet) // 2] if name == "cut" else parquet
        (folder / "tokens.parquet").write_bytes(content)
    ran = harness("report", "--list", tmp_path / "some", "--json")
    assert ran.code == 0
    assert len(ran.json) == 2
    assert [line.startswith("harness: skipped: ") for line in ran.err.splitlines()].count(True) == 1


@given(damage=st.integers(0, 10**6) | patches(10**6, max_size=20))
@example(damage=[(0, b"P")])  # as it was
def test_a_damaged_series_is_columns_or_one_sentence(tmp_path, parquet, damage):
    (tmp_path / "tokens.parquet").write_bytes(damaged_series(parquet, damage))
    try:
        columns = records.series(Stored(tmp_path, GOLDEN))
    except ResultsError:
        return
    assert {"n", "latency_ns"} <= columns.keys()
    assert all(type(value) is int for value in columns["latency_ns"])


@pytest.mark.parametrize("damage", [0, 1, 100, -1, [(-1, b"X")]], ids=str)
def test_a_series_that_is_cut_or_has_lost_its_last_byte_is_refused(tmp_path, parquet, damage):
    (tmp_path / "tokens.parquet").write_bytes(damaged_series(parquet, damage))
    with pytest.raises(ResultsError, match="not a series"):
        records.series(Stored(tmp_path, GOLDEN))


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"n": [1, 2]}, "it has no column latency_ns"),
        ({"n": [1, 2], "latency_ns": [None, 3]}, "its column latency_ns has nulls"),
        ({"n": [1, 2], "latency_ns": ["1", "2"]}, "its column latency_ns does not hold integers"),
    ],
)
def test_a_series_of_other_columns_is_told(tmp_path, columns, sentence):
    pq.write_table(pa.table(columns), tmp_path / "tokens.parquet")
    with pytest.raises(ResultsError, match=sentence):
        records.series(Stored(tmp_path, GOLDEN))


def test_a_record_is_read_in_some_thousands_of_calls(tmp_path):
    """Calls stand for time: no other process can stretch them. 800 of the golden record's."""
    for number in range(200):
        write_record(tmp_path / str(number))
    profile = cProfile.Profile(builtins=False)
    assert len(profile.runcall(lambda: list(records.records(tmp_path, refuse)))) == 200
    assert sum(entry.callcount for entry in profile.getstats()) < 200 * 2500


def test_a_reported_record_is_kept_once_and_read_back(tmp_path):
    path = next(STUDY.rglob("record.json"))
    record = {key: value for key, value in json.loads(path.read_text()).items() if key != "schema"}
    series, prefill = {"n": [25, 26], "latency_ns": [9, 10]}, {"n": [1], "latency_ns": [11]}
    stored = records.keep(tmp_path / "cell", record, series, prefill)
    assert [s.record for s in records.records(tmp_path, refuse)] == [stored.record]
    assert records.series(stored) == series
    assert records.prefill_series(stored) == prefill | {"depth": [0], "round": [1]}
    with pytest.raises(ResultsError, match="cannot write results here"):
        records.keep(tmp_path / "cell", record, {}, {})
    with pytest.raises(ResultsError, match=r"source\.license is missing"):
        records.keep(tmp_path / "other", record | {"source": {"title": "t", "url": "u"}}, {}, {})
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("good", "damage"),
    [(GOLDEN, EDITS), (REPORTED, edits(places(REPORTED), INSTEAD))],
    ids=["measured", "reported"],
)
@given(data=st.data())
def test_a_damaged_record_is_read_or_refused_in_one_sentence(tmp_path, good, damage, data):
    refused: list[str] = []
    write_record(tmp_path, edited(good, data.draw(damage)))
    found = list(records.records(tmp_path, lambda damage: refused.append(str(damage))))
    assert len(found) + len(refused) == 1
    assert not any("\n" in sentence for sentence in refused)
    for stored in found:
        table.repeat_row(stored.record, NO_TOKENS, None, None)


@pytest.mark.parametrize("good", [GOLDEN, REPORTED], ids=["measured", "reported"])
@pytest.mark.parametrize(
    ("changes", "refusals"),
    [
        ([], 0),
        ([(("later",), [1])], 0),
        ([(("model", "more"), 1)], 0),
        ([(("outcome",), "fine")], 1),
        ([(("cell",), GONE)], 1),
    ],
    ids=str,
)
def test_a_record_is_refused_for_a_part_that_is_read_and_for_no_other(tmp_path, good, changes, refusals):
    write_record(tmp_path, edited(good, changes))
    refused: list[ResultsError] = []
    assert len(list(records.records(tmp_path, refused.append))) == 1 - refusals
    assert len(refused) == refusals


@pytest.mark.parametrize("begun", ["{", "[]", "{}", '{"started_utc": "2026-11-20T00:00:00+00:00"}'])
def test_a_folder_that_cannot_be_recovered_is_told_and_passed_over(tmp_path, begun):
    folder = abandon(tmp_path, b"")
    (folder / "begun.json").write_text(begun)
    told: list[str] = []
    assert records.recover(tmp_path, lambda damage: told.append(str(damage))) == []
    assert "cannot be recovered" in told[0]


def test_ten_thousand_tokens_with_random_ids_take_at_most_60_kb(tmp_path):
    chance = random.Random(0)
    latency = [int(10.9e6 + 5200 * n + chance.gauss(0, 3e5)) for n in range(10_000)]
    series = {
        "n": list(range(26, 10_026)),
        "token_id": [chance.randrange(151_936) for _ in range(10_000)],
        "latency_ns": latency,
    }
    stored = records.begin(tmp_path / "cell", BEGUN).finish(GOLDEN, TokenTimes.of_columns(series))
    assert stored.series_path is not None
    assert stored.series_path.stat().st_size <= 60_000


def test_nan_never_enters_a_record(tmp_path):
    running = records.begin(tmp_path / "cell", BEGUN)
    with pytest.raises(ValueError, match="not JSON compliant"):
        running.finish(GOLDEN | {"B_ms": float("nan")})


def test_facts_of_a_worker_that_no_reader_could_use_make_the_repeat_an_error(tmp_path):
    stored = records.begin(tmp_path / "cell", BEGUN).finish(GOLDEN | {"loaded": {"versions": 3}})
    (read,) = records.records(tmp_path, refuse)
    assert read.record == stored.record
    assert (read.record["outcome"], read.record["loaded"]) == ("error", None)
    assert read.record["reason"] == "worker protocol error: loaded.versions must be a mapping"


def test_a_results_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match=r"cannot write results here: .*; choose another: --out DIR"):
        records.check_writable(tmp_path / "file")
    with pytest.raises(ResultsError, match="cannot write results"):
        records.begin(tmp_path / "file" / "cell", BEGUN)


def test_a_full_disk_is_an_error_and_loses_nothing_finished(small_disk):
    disk = small_disk("128k")
    finished = records.begin(disk / "cell", BEGUN).finish(GOLDEN)
    running: Running = records.begin(disk / "cell", BEGUN)
    with pytest.raises(ResultsError, match="cannot be written"):
        running.finish(GOLDEN | {"log_tail": ["x" * 200_000]})
    assert [s.folder for s in records.records(disk, refuse)] == [finished.folder]
