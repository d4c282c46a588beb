"""A record is written whole or not at all, never overwritten, and readable for ever."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from harness import results
from harness.results import ResultsError, Running, Stored
from runners.protocol import Loaded, Phase, Tokens, encode

GOLDEN = Path(__file__).parent / "golden"
BEGUN = {
    "kind": "measured",
    "cell": "m.fake.v.decode.00000000",
    "repeat": 1,
    "started_utc": "2026-11-20T00:00:00+00:00",
    "workload": {"kind": "decode", "prompt_tokens": 25, "new_tokens": 4},
}
GOOD = BEGUN | {"schema": 1, "outcome": "ok"}
SAID = [
    Phase("load", 1),
    Loaded({"versions": {}}),
    Phase("generate", 2),
    Tokens(0, [10, 20], [1, 2]),
    Tokens(2, [31, 40], [3, 4]),
]


def refuse(damage: ResultsError) -> None:
    raise damage


def abandon(root: Path, said: bytes) -> Path:
    """A folder as a controller that was killed leaves it."""
    running = results.begin(root / "machine" / "m" / "cell", BEGUN)
    running.events.write(said)
    running.events.close()
    return running.folder


def test_a_finished_repeat_is_a_record_and_a_series_and_nothing_else(tmp_path):
    running = results.begin(tmp_path / "machine" / "m" / "cell", BEGUN)
    memory = {"t_ns": [1, 2], "rss_anon_bytes": [3, 4], "rss_file_bytes": [5, 6], "vram_bytes": [None, None]}
    series = {"token_id": [1, 2], "latency_ns": [10, 11]}
    stored = running.finish(BEGUN | {"outcome": "ok"}, series, memory)
    names = {path.name for path in stored.folder.iterdir()}
    assert names == {"record.json", "tokens.parquet", "memory.parquet"}
    assert results.series(stored) == {"n": [26, 27], "token_id": [1, 2], "latency_ns": [10, 11]}
    assert [s.record["schema"] for s in results.records(tmp_path, refuse)] == [results.SCHEMA]


def test_two_repeats_never_share_a_folder(tmp_path):
    folders = {abandon(tmp_path, b"") for _ in range(50)}
    assert len(folders) == 50


def test_what_a_killed_controller_had_is_recovered_whatever_the_cut(tmp_path):
    stream = b"".join(encode(event) for event in SAID)
    for cut in random.Random(1).sample(range(len(stream) + 1), 40):
        root = tmp_path / str(cut)
        abandon(root, stream[:cut])
        (stored,) = results.recover(root, refuse)
        assert stored.record["outcome"] == "interrupted"
        whole = sum(len(e.ids) for e in results.events_in(stream[:cut]) if isinstance(e, Tokens))
        assert stored.record["tokens"] == whole
        assert results.series(stored).get("latency_ns", []) == [10, 10, 11, 9][:whole]
        assert results.recover(root, refuse) == []


def test_a_repeat_that_is_still_running_is_left_alone(tmp_path):
    running = results.begin(tmp_path / "cell", BEGUN)
    assert results.recover(tmp_path, refuse) == []
    assert not (running.folder / "record.json").exists()
    running.events.close()
    assert len(results.recover(tmp_path, refuse)) == 1


def test_a_record_already_written_is_never_made_interrupted(tmp_path):
    folder = abandon(tmp_path, b"")
    (folder / "record.json").write_text(json.dumps(BEGUN | {"schema": 1, "outcome": "ok"}))
    assert results.recover(tmp_path, refuse) == []
    assert json.loads((folder / "record.json").read_text())["outcome"] == "ok"
    assert not (folder / "begun.json").exists()


def test_the_golden_record_of_every_schema_still_reads():
    samples = sorted(GOLDEN.glob("record-*.json"))
    assert [path.name for path in samples] == [f"record-{n}.json" for n in range(1, results.SCHEMA + 1)]
    for path in samples:
        record = results.read(path)
        assert record["schema"] == results.SCHEMA
        assert record["outcome"] in results.OUTCOMES


def test_a_record_of_a_newer_harness_is_told_and_passed_over(tmp_path):
    contents = {"new": GOOD | {"schema": 99}, "odd": [1], "bare": {"schema": 1}, "good": GOOD}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(json.dumps(content))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "record.json").write_text('{"schema": 1, "cell"')
    told: list[str] = []
    found = list(results.records(tmp_path, lambda damage: told.append(str(damage))))
    assert [s.folder.name for s in found] == ["good"]
    assert len(told) == 4
    assert any("newer than this harness reads" in line for line in told)


def test_a_folder_that_cannot_be_recovered_is_told_and_passed_over(tmp_path):
    folder = abandon(tmp_path, b"")
    (folder / "begun.json").write_text("{")
    told: list[str] = []
    assert results.recover(tmp_path, lambda damage: told.append(str(damage))) == []
    assert "cannot be recovered" in told[0]


def test_a_corrupt_series_is_an_error_in_one_sentence(tmp_path):
    (tmp_path / "tokens.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ResultsError, match="not a series"):
        results.series(Stored(tmp_path, BEGUN))


def test_ten_thousand_tokens_with_random_ids_take_at_most_60_kb(tmp_path):
    chance = random.Random(0)
    latency = [int(10.9e6 + 5200 * n + chance.gauss(0, 3e5)) for n in range(10_000)]
    series = {
        "token_id": [chance.randrange(151_936) for _ in range(10_000)],
        "latency_ns": latency,
        "argmax_us": [int(chance.gauss(50, 4)) for _ in range(10_000)],
    }
    stored = results.begin(tmp_path / "cell", BEGUN).finish(BEGUN | {"outcome": "ok"}, series, None)
    assert stored.series_path is not None
    assert stored.series_path.stat().st_size <= 60_000


def test_nan_never_enters_a_record(tmp_path):
    running = results.begin(tmp_path / "cell", BEGUN)
    with pytest.raises(ValueError, match="not JSON compliant"):
        running.finish(BEGUN | {"B_ms": float("nan")}, {}, None)


def test_a_results_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot write results here"):
        results.check_writable(tmp_path / "file")
    with pytest.raises(ResultsError, match="cannot write results"):
        results.begin(tmp_path / "file" / "cell", BEGUN)


def test_a_full_disk_is_an_error_and_loses_nothing_finished(small_disk):
    disk = small_disk("128k")
    finished = results.begin(disk / "cell", BEGUN).finish(BEGUN | {"outcome": "ok"}, {}, None)
    running: Running = results.begin(disk / "cell", BEGUN)
    with pytest.raises(ResultsError, match="cannot be written"):
        running.finish(BEGUN | {"outcome": "ok", "log_tail": ["x" * 200_000]}, {}, None)
    assert [s.folder for s in results.records(disk, refuse)] == [finished.folder]
