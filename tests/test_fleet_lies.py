"""A node that lies: what it sends is refused in one sentence before anything is done with it, and what other
nodes measure is kept. The nodes' lines are those of real campaigns, but for what a test changes in them."""

import asyncio
import base64
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import records_below
from raylets import MEASURED, check, slow_cells
from test_fleet import done, job_of, nothing, with_files, with_record

import harness as harness_itself
from harness import config as configs
from harness import machine
from harness.campaign.fleet import Event, FleetError, Place, driver, on_node
from harness.campaign.fleet.cluster import Cluster, Node, Outcome
from harness.campaign.fleet.results import Results
from harness.campaign.opening import RunOptions
from harness.config import plan

Json = dict[str, Any]
Line = Json | str | None
Lie = Callable[[list[Json]], list[Line]]
HONEST: dict[tuple[str, str], list[Json]] = {}  # by device and job


class Replayed:
    """A cluster of the nodes `a`, which lies in jobs of one kind, and `b`, each with a device of its name."""

    authenticated = True

    def __init__(self, lies_in: str, lie: Lie) -> None:
        self._lies_in, self._lie = lies_in, lie
        self._lines: list[tuple[str, Line]] = []
        self._ended: list[tuple[str, Outcome]] = []
        self.jobs: list[tuple[str, str]] = []

    def nodes(self) -> list[Node]:
        return [Node("a", "10.0.0.1", {"a": 1}), Node("b", "10.0.0.2", {"b": 1})]

    def version(self, node: Node) -> tuple[list[str], str, float]:
        return [harness_itself.__version__], "", 0.0

    def submit(self, name: str, job: Json, node: str, device: str | None = None) -> None:
        self.jobs.append((node, job["do"]))
        lies = node == "a" and job["do"] == self._lies_in
        copied = json.loads(json.dumps(HONEST.get((node, job["do"]), [])))
        self._lines += [(name, line) for line in (self._lie(copied) if lies else copied)]
        self._ended.append((name, Outcome()))

    def lines(self, wait_s: float) -> Iterator[tuple[str, str | None]]:
        while self._lines:
            name, line = self._lines.pop(0)
            yield name, json.dumps(line) if isinstance(line, dict) else line

    def ended(self) -> list[tuple[str, Outcome]]:
        found, self._ended = self._ended, []
        return found

    def cancel(self, names: Collection[str]) -> None:
        """Nothing: its jobs have ended."""


class Events(list[Event]):
    """`jobs`: which a fleet has given to which nodes."""

    happened = list.append
    jobs: list[tuple[str, str]]

    def text(self) -> str:
        return "\n".join(event.get("text", "") for event in self)


@pytest.fixture
def fleet(config, fake_interpreter, own_cache, tmp_path) -> Callable[[str, Lie], Events]:
    """Runs two cells on the two nodes, of which `a` lies: `fleet("measure", change)`. Nothing may be written
    outside the results folder."""
    path = config({"name": "one"}, {"name": "two"})
    for do in ("survey", "measure") if not HONEST else ():  # a survey would bring the records of a campaign
        for device in ("a", "b"):
            HONEST[device, do] = done(job_of(do, path, fleet={"device": device, "clock_ahead_s": 0.0}))
    experiment = configs.load(path)
    options = RunOptions(root=tmp_path / "results", config_path=path, command_line=["harness", "run"])

    def run(lies_in: str, lie: Lie) -> Events:
        before, events = outside(tmp_path), Events()
        replayed = Replayed(lies_in, lie)
        events.jobs, fake = replayed.jobs, cast(Cluster, replayed)
        try:
            driver.run(experiment, plan.cells(experiment), options, Place("10.0.0.9:6379"), fake, events)
        finally:
            assert outside(tmp_path) == before
        return events

    return run


def outside(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if (folder / "results") not in (each, *each.parents))


def outcomes(tmp_path: Path, device: str) -> list[tuple[str, str]]:
    found = records_below(tmp_path / "results")
    return sorted(
        (record["outcome"], record.get("reason") or "")
        for record in found
        if record["campaign"]["fleet"]["device"] == device
    )


def test_nodes_that_do_not_lie_are_believed(fleet, tmp_path):
    events = fleet("measure", list)
    assert outcomes(tmp_path, "a") == outcomes(tmp_path, "b") == [("ok", ""), ("ok", "")]
    assert "cannot be used" not in events.text()
    assert "stays on its node" not in events.text()


# What a campaign sends: the first of its two records is a lie


def first(lines: list[Json], event: str) -> Json:
    return next(line for line in lines if line["event"] == event)


def record_with(change: Callable[[Json], object]) -> Lie:
    """The first record is another, with hashes of its own."""

    def lie(lines: list[Json]) -> list[Line]:
        line = first(lines, "record")
        line["parcel"] = with_record(line["parcel"], change)
        return [*lines]

    return lie


def parcel_with(change: Callable[[Json], Json]) -> Lie:
    def lie(lines: list[Json]) -> list[Line]:
        line = first(lines, "record")
        line["parcel"] = change(line["parcel"])
        return [*lines]

    return lie


def file_named(name: str) -> Lie:
    return parcel_with(lambda parcel: with_files(parcel, **{name: "AAAA"}))


def begun_with(change: Callable[[Json], object]) -> Lie:
    def lie(lines: list[Json]) -> list[Line]:
        change(first(lines, "begins")["begun"])
        return [*lines]

    return lie


def instead(*lines: Line) -> Lie:
    """The lines in place of the first record."""
    return lambda honest: [*honest[: honest.index(first(honest, "record"))], *lines]


def other_machine(record: Json) -> None:
    facts = record["machine"]
    facts["cpu"] = "Cortex-A76"
    facts["slug"] = machine.slug("Cortex-A76", facts["physical_cores"], facts["memory_bytes"], [])


def key_of_the_other(lines: list[Json]) -> list[Line]:
    """The second record has the content key with which the first began."""
    begun = [line["begun"] for line in lines if line["event"] == "begins"]
    key = begun[1]["content_key"] = begun[0]["content_key"]
    line = [line for line in lines if line["event"] == "record"][1]
    line["parcel"] = with_record(line["parcel"], lambda record: record.update(content_key=key))
    return [*lines]


LIES: dict[str, tuple[Lie, str]] = {
    "another machine": (record_with(other_machine), "a record of another machine: cortex-a76-"),
    "another machine of the same name": (
        record_with(lambda record: record["machine"].update(last_level_cache_bytes=1)),
        "a record of another machine: its own has other last_level_cache_bytes",
    ),
    "another machine, as it begins": (begun_with(other_machine), "a record of another machine: cortex-a76-"),
    "another device": (
        record_with(lambda record: record["campaign"]["fleet"].update(device="b")),
        "a record of the device b, and was given a",
    ),
    "a folder above": (
        parcel_with(lambda parcel: {**parcel, "when": "../../../../x"}),
        "would lead out of the results folder",
    ),
    "a machine above": (
        record_with(lambda record: record["machine"].update(slug="../../x")),
        "machine.slug must be 1 to 80 of",
    ),
    "a machine above, as it begins": (
        lambda lines: [
            *begun_with(lambda begun: begun["machine"].update(slug="../../x"))(lines)[
                : lines.index(first(lines, "record"))
            ],
            {"event": "failed", "reason": "it was stopped"},
        ],
        "in begins, begun.machine.slug must be 1 to 80 of",
    ),
    "a cell above": (
        record_with(lambda record: record.update(cell="../../x")),
        "that cannot be true: its cell ../../x is not one of model tiny-qwen2 and stack fake",
    ),
    "a file above": (file_named("../../x.parquet"), "a file that no record has"),
    "an absolute file": (file_named("/tmp/x.parquet"), "a file that no record has"),
    "a gigabyte": (instead(None), "sent more than 64 MiB in one message; no record takes so much"),
    "no JSON": (instead("{"), "a line that no node sends: it is not JSON"),
    "deep JSON": (instead("[" * 100_000), "a line that no node sends: it is not JSON"),
    "no number": (instead('{"event": "message", "line": NaN}'), "a line that no node sends: it is not JSON"),
    "another event": (instead({"event": "exec"}), "its node sent a line that no node sends"),
    "an event of another job": (
        lambda lines: [*lines[:1], *HONEST["a", "survey"]],
        "its node sent a line that no node sends",
    ),
    "half a line": (instead({"event": "record"}), "in record, parcel is missing"),
    "a long reason": (
        instead({"event": "failed", "reason": "x" * (1 << 17)}),
        "in failed, reason",
    ),
    "a schema to come": (
        record_with(lambda record: record.update(schema=999)),
        "that cannot be true: record.json: record schema 999 is newer",
    ),
    "a token more": (
        record_with(lambda record: record.update(tokens=41)),
        "that cannot be true: its series has 40 tokens, but it claims 41",
    ),
    "a damaged series": (
        parcel_with(lambda p: with_files(p, **{"tokens.parquet": base64.b64encode(b"x").decode()})),
        "that cannot be true: tokens.parquet",
    ),
    "memory that it does not have": (
        record_with(lambda record: record["done"].update(peak_rss_bytes=1 << 50)),
        "that cannot be true: it took 1125899.9 GB of memory",
    ),
    "another content key": (
        record_with(lambda record: record.update(content_key="0" * 20)),
        "a record with another content key than it began with",
    ),
    "the content key of another cell": (key_of_the_other, "whose content key is that of"),
    "a cell of nobody": (
        record_with(lambda record: record.update(cell=record["cell"] + "0")),
        "which it was not given",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_about_a_cell_is_a_failed_record_and_other_nodes_are_kept(fleet, tmp_path, name):
    lie, sentence = LIES[name]
    events = fleet("measure", lie)
    found = outcomes(tmp_path, "a")
    failed = [(outcome, reason) for outcome, reason in found if outcome in ("interrupted", "unavailable")]
    assert failed
    assert len(found) - len(failed) == (lie is key_of_the_other)  # it lies after its first record
    assert all(sentence in reason and "\n" not in reason for _, reason in failed), failed
    assert outcomes(tmp_path, "b") == [("ok", ""), ("ok", "")]
    assert f"cannot be used: {failed[0][1]}" in events.text()
    assert [job for node, job in events.jobs if node == "a"] == ["survey", "measure"]
    assert ("b", "tidy") in events.jobs
    results = Results(tmp_path / "results", nothing)  # all can be read
    assert len(results.digests) == len(records_below(tmp_path / "results"))


# What a node says before its campaigns


def survey_with(change: Callable[[Json], object]) -> Lie:
    def lie(lines: list[Json]) -> list[Line]:
        change(first(lines, "surveyed"))
        return [*lines]

    return lie


def _other_facts(line: Json) -> None:
    one, two = line["cells"].values()
    one["facts"], two["facts"] = two["facts"], one["facts"]


SURVEYS: dict[str, tuple[Lie, str]] = {
    "a machine above": (
        survey_with(lambda line: line["shared"]["machine"].update(slug="../../x")),
        "in surveyed, shared.machine.slug must be 1 to 80 of",
    ),
    "another device": (
        survey_with(lambda line: line["shared"]["campaign"]["fleet"].update(device="b")),
        "its node surveyed the device b, and was given a",
    ),
    "a cell left out": (
        survey_with(lambda line: line["cells"].popitem()),
        "its node surveyed other cells than it was given",
    ),
    "facts of another cell": (survey_with(_other_facts), "which it was not given"),
    "half a record": (
        survey_with(lambda line: [cell["facts"].pop("model") for cell in line["cells"].values()]),
        "in surveyed, model is missing",
    ),
}


@pytest.mark.parametrize("name", SURVEYS)
def test_a_lie_about_a_node_is_one_sentence_before_anything_starts(fleet, tmp_path, name):
    lie, sentence = SURVEYS[name]
    with pytest.raises(FleetError) as refusal:
        fleet("survey", lie)
    assert str(refusal.value).startswith("a: none of its nodes can be used: its node s")
    assert sentence in str(refusal.value)
    assert not (tmp_path / "results").exists()


def test_a_lie_after_a_survey_is_the_reason_of_all_its_cells(fleet, tmp_path):
    fleet("survey", lambda lines: [*lines, None])
    reason = "its node sent more than 64 MiB in one message; no record takes so much"
    assert outcomes(tmp_path, "a") == [("unavailable", reason)] * 2
    assert outcomes(tmp_path, "b") == [("ok", ""), ("ok", "")]


def test_a_lie_from_an_earlier_run_stays_on_its_node(fleet, tmp_path):
    def lie(lines: list[Json]) -> list[Line]:
        old = first(HONEST["a", "measure"], "record")
        return [*lines, {"event": "record", "parcel": with_record(old["parcel"], other_machine)}]

    events = fleet("survey", lie)
    assert "a record of another machine: cortex-a76-" in events.text()
    assert "it stays on its node" in events.text()
    assert outcomes(tmp_path, "a") == outcomes(tmp_path, "b") == [("ok", ""), ("ok", "")]


# How much comes in one message


def test_nothing_is_kept_of_a_message_that_is_too_long():
    mailbox = on_node.Mailbox(1000)

    async def lines() -> list[tuple[str, str | None]]:
        await mailbox.put("campaign 1", "x" * 1001)
        await mailbox.put("campaign 1", "x")
        return await mailbox.take(1.0)

    assert asyncio.run(lines()) == [("campaign 1", None), ("campaign 1", "x")]


def test_of_a_line_that_is_too_long_a_node_passes_on_the_begin():
    program = f"print('x' * {1 << 24}, 'next', 'last', sep='\\n', end='')"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as printing:
        assert printing.stdout is not None
        long, *others = on_node.Lines(printing.stdout.fileno(), 1000)
    assert 1000 < len(long) < 1 << 18
    assert others == ["next"]


# A real node

LYING = """
import base64, json, sys
if "harness.campaign.fleet.node" in sys.orig_argv:
    from harness.campaign.fleet import parcels
    honest = parcels.packed
    def lying(folder):
        parcel = honest(folder)
        record = json.loads(base64.b64decode(parcel["files"]["record.json"]))
        record["machine"]["last_level_cache_bytes"] = 1
        content = json.dumps(record).encode()
        parcel["files"]["record.json"] = base64.b64encode(content).decode()
        return parcel
    parcels.packed = lying
"""


@pytest.mark.slow("a Ray cluster takes ten seconds to start")
@pytest.mark.xdist_group("ray")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: make fleet")
def test_cells_of_a_node_whose_harness_lies_go_to_an_equal_one(nodes, command, config, tmp_path):
    (tmp_path / "lying").mkdir()
    (tmp_path / "lying" / "sitecustomize.py").write_text(LYING)
    fleet = nodes()
    fleet("add", 1, "a", f"PYTHONPATH={tmp_path / 'lying'}")
    fleet("add", 2, "a")
    ran = command("run", slow_cells(config, 2), "--on", fleet.address)
    assert ran.code in MEASURED, ran.err
    found = records_below(tmp_path / "results")
    check(found, 2)
    (refused,) = [record["reason"] for record in found if record["outcome"] == "interrupted"]
    assert refused == "its node sent a record of another machine: its own has other last_level_cache_bytes"
    assert f"1 cell goes to an equal device: {refused}" in ran.err
