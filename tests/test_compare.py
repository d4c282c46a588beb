"""Two sets of runs compared by the real command: its output and its exit codes."""

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from conftest import refused, stored_in
from golden_record import record

from harness.analysis.figures import FAMILIES, empty_cell
from harness.compare.judge import Runs, judged
from harness.compare.sides import side
from harness.records.files import write_columns

SLOW = {"slower": {"a": 1.25}}  # more than campaigns of an unknown machine may differ


@pytest.fixture
def runs(tmp_path) -> Callable[..., Path]:
    """Makes records as a campaign leaves them: `runs("base", "a", "b")` of cells a and b, three repeats each
    of 400 tokens of 10 ms, within 0.3%; `slower`: by cell, what latencies are multiplied with."""

    def made(
        name: str, *cells: str, slower: dict[str, float] | None = None, repeats: int = 3, night: int = 1
    ) -> Path:
        began = datetime(2026, 3, night, 1, tzinfo=timezone.utc)
        chance = np.random.default_rng(zlib.crc32(f"{name} {night}".encode()))
        for cell, repeat in product(cells or ("a",), range(1, repeats + 1)):
            usual = 10e6 * (slower or {}).get(cell, 1.0) * math.exp(chance.normal(0, 0.003))
            ns = (usual * np.exp(chance.normal(0, 0.01, 400))).astype(int).tolist()
            at = (began + timedelta(minutes=repeat)).isoformat()
            of = {"cell": f"m.llamacpp.{cell}.decode.0", "content_key": cell, "variant": cell}
            of |= {"repeat": repeat, "tokens": len(ns), "started_utc": at, "bandwidth_probes": []}
            of |= {"campaign__id": began.isoformat(), "campaign__name": "nightly"}
            of |= {"workload__new_tokens": len(ns), "done__counters": {}, "done__cpu_wait_ns": 0}
            of |= {"memory__rusage__max_rss_bytes": int(5e7 + 1e4 * chance.random())}
            of |= {"timing__first_token_ns": ns[0], "timing__last_token_ns": sum(ns)}
            folder = tmp_path / name / cell / at.replace(":", "")
            columns = {"n": list(range(26, 26 + len(ns))), "token_id": [0] * len(ns), "latency_ns": ns}
            folder.mkdir(parents=True)
            write_columns(folder / "tokens.parquet", columns)
            (folder / "record.json").write_text(json.dumps(record(**of)))
        return tmp_path / name

    return made


@pytest.fixture
def nights(runs) -> Callable[..., Path]:
    """More nights of one folder: `nights(1, 2, 3, slower={"a": 1.25})`."""

    def made(*numbers: int, cells: tuple[str, ...] = (), **more: dict[str, float]) -> Path:
        for number in numbers:
            folder = runs("nights", *cells, night=number, **more)
        return folder

    return made


def gated(folder: Path, fail_on: str = "slower:5%") -> tuple[str | Path, ...]:
    """The command that compares the latest campaign with those before it."""
    return ("compare", folder, "--baseline", "last:14", "--fail-on", fail_on)


def rewritten(folder: Path, change: Callable[[dict, int], None]) -> Path:
    """Change every record of a folder, as if it had been measured so."""
    for number, path in enumerate(sorted(folder.rglob("record.json"))):
        record = json.loads(path.read_text())
        change(record, number)
        path.write_text(json.dumps(record))
    return folder


def copied(base: Path, change: Callable[[dict, int], None]) -> Path:
    """A folder of the same records, changed."""
    return rewritten(shutil.copytree(base, base.with_name("new")), change)


def crashed(record: dict) -> None:
    record |= {"outcome": "crash", "reason": "killed by SIGSEGV"}


def test_a_slowdown_that_was_asked_to_fail_ends_with_3_and_says_by_how_much(harness, runs):
    base, new = runs("base"), runs("new", **SLOW)
    ran = harness("compare", base, new, "--fail-on", "slower:2%", "--format", "json")
    assert ran.code == 3
    rows = {row["metric"]: row for row in ran.json}
    assert {row["verdict"] for name, row in rows.items() if name in ("tokens_per_s", "B_ms")} == {"SLOWER"}
    assert rows["tokens_per_s"]["fails"]
    low, high = rows["tokens_per_s"]["change_ci90"]
    assert low < rows["tokens_per_s"]["change"] < high
    assert rows["tokens_per_s"]["change"] == pytest.approx(1 / 1.25 - 1, abs=0.01)
    assert rows["memory_bytes"]["verdict"] == "SAME"
    assert not rows["memory_bytes"]["fails"]
    assert "SLOWER" in ran.err


def test_the_same_slowdown_is_told_and_fails_nothing_that_was_not_asked(harness, runs):
    base, new = runs("base"), runs("new", **SLOW)
    ran = harness("compare", base, new)
    assert ran.code == 0
    assert "SLOWER" in ran.out
    assert harness("compare", base, new, "--fail-on", "memory:2%").code == 0
    assert harness("compare", base, new, "--fail-on", "slower:40%").code == 0
    assert harness("compare", new, base, "--fail-on", "slower:2%").code == 0  # it got faster


def test_what_else_differs_stands_before_any_figure(harness, runs):
    base, new = runs("base"), runs("new")

    def clock(khz: float) -> dict:
        timed = {"cpu_clock_khz": dict.fromkeys(("lowest", "median", "highest"), khz)}
        return {"missing": {}, "interval_ms": 1000, "timed": timed, "throttled": [], "energy": None}

    def update(record: dict, number: int) -> None:
        record["loaded"]["versions"]["llama.cpp"] = "b2"
        record["conditions"]["governor"] = "powersave"
        record["sensors"] = clock(2e6)

    rewritten(new, update)
    rewritten(base, lambda record, _: record.update(sensors=clock(3e6)))
    for form in ([], ["--format", "md"]):
        said = harness("compare", base, new, *form).out
        assert said.index("version of llama.cpp") < said.index("tok/s")
        assert "powersave" in said
        assert "cpu clock khz" in said
    (first, *_) = harness("compare", base, new, "--format", "json").json
    assert "version of llama.cpp" in [differ["what"] for differ in first["differs"]]


def test_a_cell_that_failed_is_not_compared_and_the_exit_is_not_green(harness, runs):
    base = runs("base", "good", "bad")
    new = copied(base, lambda record, _: crashed(record) if record["variant"] == "bad" else None)
    ran = harness("compare", base, new, "--fail-on", "slower:50%")
    assert ran.code == 1
    assert "no repeat is ok in the new runs: crash (killed by SIGSEGV)" in ran.out
    assert "some cells were not compared" in ran.err
    rows = harness("compare", base, new, "--format", "json").json
    assert {row["verdict"] for row in rows if "bad" in row["name"]} == {"INVALID"}


def test_a_cell_that_only_one_side_has_is_said_and_the_exit_is_not_green(harness, runs):
    base, new = runs("base", "a", "b"), runs("new", "a")
    ran = harness("compare", base, new)
    assert ran.code == 1
    assert "only the baseline has it" in ran.out


def test_weights_of_the_same_content_are_the_same_model_wherever_they_lie(harness, runs):
    """The id of a cell holds their path, and a copy has another time."""
    base, new = runs("base", "a", "b"), runs("new", "a", "b")

    def measured(record: dict, place: str, time: int) -> None:
        record["model"]["weights"] |= {"file": f"{place}/w.gguf", "fingerprint": f"headers-99-{time}-content"}
        record["cell"] += str(time) * (record["variant"] == "b")

    rewritten(base, lambda record, _: measured(record, "/here", 1))
    rewritten(new, lambda record, _: measured(record, "/there", 2))
    ran = harness("compare", base, new, "--format", "json")
    assert ran.code == 0, ran.err
    assert {row["cell"] for row in ran.json} == {"m.llamacpp.a.decode.0", "m.llamacpp.b.decode.01"}
    assert "the weights have the same content in /here/w.gguf and in /there/w.gguf" in ran.err
    assert "weights" not in str([row["differs"] for row in ran.json])


@pytest.mark.parametrize("cells", [("a", "b"), ("b",)])
@pytest.mark.parametrize(
    ("change", "apart"),
    [
        (
            lambda of: of["model"]["weights"].update(fingerprint="a-1-2-b", file="/x.gguf"),
            "has other weights (",
        ),
        (lambda of: of["asked"]["options"].update(n_ctx=64), "has other options (n_ctx: "),
        (lambda of: of["workload"].update(new_tokens=9), "has another workload (new_tokens: "),
        (lambda of: of["model"]["weights"].pop("fingerprint"), "has another config: "),
    ],
)
def test_what_cells_of_one_name_have_apart_is_said(harness, runs, cells, change, apart):
    base, new = runs("base", *cells), runs("new", *cells)

    def another(record: dict, _: int) -> None:
        if record["variant"] == "b":
            record["cell"] += "0"
            change(record)

    rewritten(new, another)
    ran = harness("compare", base, new)
    assert ran.code == (1 if "a" in cells else 2)
    said = " ".join((ran.out + ran.err).split())
    assert f"the other side's cell of this name {apart}" in said
    assert "harness ab compares two" in said


def test_a_cell_that_lost_a_repeat_is_compared_in_part_and_the_exit_is_not_green(harness, runs):
    base = runs("base")
    new = copied(base, lambda record, _: crashed(record) if record["repeat"] == 2 else None)
    ran = harness("compare", base, new)
    assert ran.code == 1
    assert "in part: 1 of 3 repeats: crash (killed by SIGSEGV)" in ran.out
    assert "SAME" in ran.out
    ran = harness("compare", new, base)  # the baseline may have had a bad day
    assert ran.code == 0
    assert "in the baseline 1 of 3 repeats: crash" in ran.err


def test_a_regression_goes_before_what_was_not_compared(harness, runs):
    base, new = runs("base", "a", "b"), runs("new", "a", **SLOW)
    assert harness("compare", base, new, "--fail-on", "slower:2%").code == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda of: of["model"]["weights"].update(kind="hub", synthetic=False),
            "its weights were synthetic and are hub",
        ),
        (lambda of: of["machine"].update(slug="another"), "was measured on"),
    ],
    ids=["real weights", "another machine"],
)
def test_synthetic_and_real_weights_and_two_machines_are_not_compared(harness, runs, change, says):
    base = runs("base")
    ran = harness("compare", base, copied(base, lambda record, _: change(record)))
    assert ran.code == 2
    assert says in ran.err


def test_the_latest_campaign_is_held_against_those_before_it(harness, nights):
    folder = nights(1, 2, 3)
    assert harness(*gated(folder)).code == 0
    nights(4, **SLOW)
    ran = harness(*gated(folder), "--format", "json")
    assert ran.code == 3
    (row,) = [row for row in ran.json if row["metric"] == "tokens_per_s"]
    assert (row["base_campaigns"], row["base_repeats"], row["new_repeats"]) == (3, 9, 3)
    short = harness("compare", folder, "--baseline", "last:1", "--format", "json").json
    assert {row["base_campaigns"] for row in short} == {1}


def dated(folder: Path, began: str, **campaign: str) -> Path:
    """Date the records of a campaign as a wrong clock would have."""
    rewritten(folder, lambda record, _: record.update(started_utc=began))
    return rewritten(folder, lambda record, _: record["campaign"].update(id=began, **campaign))


def test_a_night_dated_in_the_future_does_not_blind_the_gate(harness, runs, nights):
    gate = gated(folder := nights(1, 2, 3))
    dated(runs("ahead", night=5), "2999-01-01T00:00:00.000001+00:00").rename(folder / "ahead")
    assert harness(*gate).code == 0
    nights(4, **SLOW)
    ran = harness(*gate)
    assert ran.code == 3
    assert "1 campaign from the future left out (2999-01-01T00:00)" in ran.err
    ran = harness(*gate, "--campaign", "2999-01-01T00:00:00.000001+00:00")
    refused(ran, "from the future left out (2999-01-01T00:00): correct the clock")


def test_a_night_by_a_clock_that_was_set_back_is_the_latest(harness, runs, nights):
    gate = gated(folder := nights(1, 2, 3))
    back = runs("back", night=4, **SLOW)
    dated(back, "2020-01-01T00:00:00.000001+00:00", order="2026-03-03T01:00:00+00:00#000001")
    back.rename(folder / "back")
    assert harness(*gate).code == 3
    assert harness(*gate, "--campaign", "2026-03-03T01:00:00+00:00").code == 0
    missing = harness(*gate, "--campaign", "2026-03-09T01:00:00+00:00")
    assert (missing.code, missing.err) == (2, f"harness: {folder}: no campaign 2026-03-09T01:00:00+00:00\n")


def test_a_campaign_takes_its_place_after_those_of_a_clock_that_was_ahead(harness, config, tmp_path):
    run = ("run", config({}), "--fresh")
    harness(*run)
    dated(tmp_path / "results", "2999-01-01T00:00:00+00:00")
    for _ in range(2):
        harness(*run)
    records = map(json.loads, map(Path.read_text, (tmp_path / "results").rglob("record.json")))
    places = [record["campaign"].get("order", "") for record in records]
    assert sorted(places) == ["", *(f"2999-01-01T00:00:00+00:00#00000{number}" for number in (1, 2))]


def test_a_slowdown_that_stays_is_slower_every_night(harness, nights):
    folder = nights(1, 2, 3, 4, 5)
    for night in (6, 7, 8, 9):
        nights(night, **SLOW)
        ran = harness(*gated(folder, "slower:2%"), "--format", "json")
        assert ran.code == 3, night
    (row,) = [row for row in ran.json if row["metric"] == "tokens_per_s"]
    assert (row["base_campaigns"], row["base_repeats"]) == (5, 15)
    assert "3 earlier campaigns changed as well" in row["reason"]


def test_one_slow_night_warns_and_the_second_in_a_row_fails(harness, nights):
    gate = gated(nights(1, 2, 3, 4, 5), "slower:2%")
    nights(6, slower={"a": 1.06})
    ran = harness(*gate, "--format", "json")
    assert ran.code == 0
    (row,) = [row for row in ran.json if row["metric"] == "tokens_per_s"]
    assert (row["verdict"], row["fails"], row["nights"], row["nights_to_fail"]) == ("SLOWER", False, 1, 2)
    assert row["reason"] == "night 1 in a row, fails after 2"
    assert "::warning title=SLOWER" in harness(*gate, "--format", "gha", "-o", os.devnull).out
    nights(7, slower={"a": 1.06})
    ran = harness(*gate, "--format", "json")
    assert ran.code == 3
    (row,) = [row for row in ran.json if row["metric"] == "tokens_per_s"]
    assert (row["fails"], row["nights"], row["base_campaigns"]) == (True, 2, 5)


def test_a_slow_night_alone_is_forgiven_and_one_far_beyond_any_other_fails_at_once(harness, nights):
    gate = gated(nights(1, 2, 3, 4, 5), "slower:2%")
    nights(6, slower={"a": 1.06})
    nights(7)
    assert harness(*gate).code == 0
    nights(8, slower={"a": 1.25})
    assert harness(*gate).code == 3


def test_what_got_faster_twice_is_the_new_baseline(harness, nights):
    nights(1, 2, 3, 4, 5, **SLOW)
    gate = gated(nights(6, 7, 8), "slower:2%")
    assert harness(*gate).code == 0
    nights(9, **SLOW)
    assert harness(*gate).code == 3


def test_a_cell_that_was_dropped_is_not_compared_once_and_then_noted(harness, nights):
    nights(1, 2, 3, cells=("a", "b"))
    asked = ("compare", nights(4), "--baseline", "last:14")
    assert harness(*asked).code == 1
    nights(5)
    ran = harness(*asked)
    assert ran.code == 0
    assert "m.llamacpp.b.decode.0: last measured in the campaign of 2026-03-03" in ran.err


def test_a_record_that_cannot_be_read_counts_as_long_as_it_is_compared_with(harness, nights):
    folder = nights(1, 2, 3, 4)
    damaged = folder / "a" / "20260301T010100.000000Z" / "record.json"
    damaged.parent.mkdir()
    damaged.write_text("{")
    assert harness("compare", folder, "--baseline", "last:14").code == 1
    ran = harness("compare", folder, "--baseline", "last:2")
    assert ran.code == 0
    assert "1 record of earlier campaigns cannot be read" in ran.err


def test_a_day_stands_for_the_campaigns_that_began_on_it(harness, runs):
    runs("results", night=1)
    runs("results", night=2, **SLOW)
    ran = harness("compare", "2026-03-01", "2026-03-02", "--fail-on", "slower:5%")
    assert ran.code == 3
    refused(harness("compare", "2026-03-01", "2026-04-01"), "no campaign began on 2026-04-01")


def test_of_a_repeat_measured_again_the_latest_counts(runs):
    folder = runs("twice")
    runs("twice", night=2)
    every = stored_in(folder)
    (kept,) = side(str(folder), folder).campaigns.values()
    assert (len(every), len(kept)) == (6, 3)
    newest = sorted(str(each.record["started_utc"]) for each in every)[3:]
    assert sorted(judged.facts["started_utc"] for judged in kept) == newest


def test_of_two_versions_of_a_cell_the_later_is_compared_and_the_other_said(harness, runs):
    base, new = runs("base"), runs("new")
    earlier = {"content_key": "old", "started_utc": "2020-01-01T00:00:00+00:00"}
    rewritten(shutil.copytree(new, new / "old"), lambda record, _: record.update(earlier))
    ran = harness("compare", base, new)
    assert ran.code == 0
    assert "3 records of earlier versions" in ran.err


# The longest context: a search is exact, within a granule.


def searched(folder: Path, n_ctx: int) -> Path:
    probe = {"n_ctx": n_ctx, "limit_bytes": 1, "reason": None}
    probe |= dict.fromkeys(("filled", "fits", "allocates"), True)
    probe |= dict.fromkeys(("peak_bytes", "fill_s", "speed_ratio", "left_out")) | {"seconds": 1.0}
    search = {"probes": [probe], "verified_n_ctx": n_ctx, "verified_by": "decode", "granule": 256}
    of = {"kind": "searched", "search": search, "workload__kind": "max_ctx"}
    of |= {"outcome": "ok", "reason": None}
    of["started_utc"] = {"base": "2026-03-01T01:00:00Z", "new": "2026-03-02T01:00:00Z"}[folder.name]
    (folder / "one").mkdir(parents=True)
    (folder / "one" / "record.json").write_text(json.dumps(record(**of)))
    return folder


@pytest.mark.parametrize(
    ("before", "after", "verdict", "code"),
    [
        (32768, 32768, "SAME", 0),
        (32768, 30000, "SHORTER", 3),
        (30000, 32768, "LONGER", 0),
        (2304, 2048, "UNCLEAR", 0),
    ],
)
def test_a_longest_context_is_compared_to_its_granule(harness, tmp_path, before, after, verdict, code):
    base, new = searched(tmp_path / "base", before), searched(tmp_path / "new", after)
    ran = harness("compare", base, new, "--fail-on", "context:2%", "--format", "json")
    assert ran.code == code, ran.err
    (row,) = ran.json
    assert (row["metric"], row["base"], row["new"], row["verdict"]) == ("max_ctx", before, after, verdict)


def grown(*lengths: int, target: bool = False) -> Runs:
    growth = empty_cell() | {"kind": "measured", "status": "ok", "workload": "grow", "device": "cpu"}
    growth["tokens_per_s"] = 9.0
    rows = [growth | {"max_ctx": n, "memory_bytes": n, "max_ctx_is_target": target} for n in lengths]
    return Runs({"campaign": rows})


def said(base: Runs, new: Runs) -> dict[str, str]:
    thresholds = dict.fromkeys(FAMILIES, 0.02)
    return {row["metric"]: row["verdict"] for _, row in judged({"x": (base, new)}, thresholds).rows}


TARGET = grown(16000, 16000, target=True)


@pytest.mark.parametrize(
    ("base", "new", "verdict"),
    [
        (grown(10000, 10010), grown(12000, 12020), "LONGER"),
        (grown(10000), grown(9000, 9010), "INVALID"),  # one says nothing of its spread
        (grown(10000, 9000, 11000), grown(9700), "UNCLEAR"),
        (TARGET, grown(6000, 6005), "SHORTER"),
        (TARGET, TARGET, "SAME"),
    ],
)
def test_a_growth_is_a_sample_of_its_length_and_neither_slower_nor_larger(base, new, verdict):
    assert said(base, new) == {"max_ctx": verdict}


# Mistakes of a user, and missing files.


def test_folders_without_a_common_cell_are_one_sentence_and_exit_2(harness, runs):
    base, new = runs("base", "a"), runs("new", "b")
    refused(harness("compare", base, new), "no cell in common")


def test_copies_of_records_are_not_compared_with_themselves(harness, runs):
    base = runs("base")
    new = shutil.copytree(base, base.with_name("new"))
    refused(harness("compare", base, new), "hold the same records; give two different campaigns")
    later = {"started_utc": "2026-03-02T01:00:00Z"}
    rewritten(new, lambda record, number: record.update(later if number else {}))
    assert "1 record of the baseline also on the new side" in harness("compare", base, new).err


def test_records_of_a_newer_schema_are_said_and_the_exit_is_not_green(harness, runs):
    base, new = runs("base"), runs("new")
    rewritten(new, lambda record, number: record.update(schema=1 if number else 2))
    ran = harness("compare", base, new)
    assert ran.code == 1
    assert "record schema 2 is newer than this harness reads (1)" in ran.err
    rewritten(new, lambda record, _: record.update(schema=2))
    ran = harness("compare", base, new)
    assert (ran.code, ran.out) == (2, "")
    assert "record schema 2 is newer" in ran.err


def test_a_baseline_of_one_repeat_is_not_compared(harness, runs):
    base, new = runs("base", repeats=1), runs("new")
    ran = harness("compare", base, new, "--fail-on", "slower:2%")
    assert ran.code == 2
    assert "the baseline has one repeat" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("a b --fail-on slower:two", "the threshold must be a percentage, as in slower:2%"),
        ("a b --fail-on slower:nan%", "the threshold must be a percentage"),
        ("a b --fail-on slower:-2%", "the threshold must be a percentage"),
        ("a b --fail-on slower:2", "the threshold must be a percentage"),
        ("a b --fail-on slower:2% --fail-on slower:3%", "slower already has a threshold; give it once"),
        ("a b --fail-on faster:2%", "must begin with one of slower, memory, energy, context"),
        ("a", "compare takes two results folders or days"),
        ("a ./a", "a: base and new are the same; give two different ones"),
        ("a b c", "compare takes two results folders or days"),
        ("a b", "a: no such results folder"),
        ("published/rtx4090-qwen1.5 b", "no measurements: 148 records hold published figures alone"),
        ("a b --threshold much", "--threshold: much: must be a percentage, as in 1%"),
        ("--baseline last:0", "must be last:N, as in last:14"),
        ("a b --baseline last:3", "takes at most one results folder"),
        ("--baseline last:3", "results: no such results folder"),
    ],
)
def test_what_is_asked_wrongly_is_one_sentence_and_exit_2(harness, arguments, said):
    refused(harness("compare", *arguments.split()), said)


def test_the_first_campaign_has_nothing_to_be_compared_with(harness, runs):
    refused(harness("compare", runs("nights"), "--baseline", "last:14"), "nothing to compare with")


# Forms


def test_the_page_is_one_file_with_every_verdict(harness, runs, tmp_path):
    base, new = runs("base"), runs("new", **SLOW)
    ran = harness("compare", base, new, "--format", "html", "-o", tmp_path / "c.html")
    assert ran.out.strip() == str(tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    assert "SLOWER" in page
    assert "change-tokens_per_s" in page or "Change of tok/s" in page
    assert "<script src" not in page


def test_on_github_a_regression_is_an_annotation_the_tables_a_summary_and_figures_a_file(
    harness, runs, tmp_path
):
    base, new = runs("base"), runs("new", **SLOW)
    asked = ("--fail-on", "slower:2%", "--format", "gha", "-o", tmp_path / "b.json")
    ran = harness("compare", base, new, *asked, GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"))
    assert ran.code == 3
    assert ran.out.startswith("::error title=SLOWER")
    assert "| SLOWER (fails) |" in (tmp_path / "summary.md").read_text()
    figures = json.loads((tmp_path / "b.json").read_text())
    assert {"name", "unit", "value", "range", "extra"} <= set(figures[0])


def test_what_cannot_be_written_is_one_sentence(harness, runs, tmp_path):
    base, new = runs("base"), runs("new")
    (tmp_path / "file").write_text("")
    ran = harness("compare", base, new, "--format", "html", "-o", tmp_path / "file" / "c.html")
    refused(ran, "cannot be written")
