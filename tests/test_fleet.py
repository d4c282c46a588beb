"""A fleet without Ray: placement, transport and storage of records, and mistakes of a user."""

import base64
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import refused
from hypothesis import given
from hypothesis import strategies as st

from harness import config as configs
from harness.campaign.fleet import Event, parcels, place_of, portions
from harness.campaign.fleet.cluster import devices_of
from harness.campaign.fleet.jobs import portable
from harness.campaign.fleet.on_node import Lines
from harness.campaign.fleet.parcels import Damaged
from harness.campaign.fleet.results import Results, just_before
from harness.cli import fleet as cli_fleet
from harness.config import plan


def nothing(*_: object) -> None:
    """Nothing unreadable is expected."""
    raise AssertionError(_)


@pytest.fixture
def measured(harness, config, tmp_path) -> list[Path]:
    """Folders of two finished records of the fake stack."""
    assert harness("run", config({}, {"B_ms": 0.3}), "-o", "elsewhere").code == 0
    return [path.parent for path in sorted((tmp_path / "elsewhere").rglob("record.json"))]


# Who measures what


@given(st.lists(st.floats(1, 10), min_size=6, max_size=200), st.integers(2, 6))
def test_equal_devices_that_take_cells_when_they_are_free_are_busy_alike(seconds, devices):
    left = {str(number): each for number, each in enumerate(seconds)}
    busy = [0.0] * devices
    while cells := portions.taken(left, devices):
        busy[busy.index(min(busy))] += sum(left.pop(cell) for cell in cells)
    assert not left
    assert max(busy) - min(busy) <= 2 * max(seconds)  # the last cells decide


def test_a_device_alone_takes_all_cells_in_their_order():
    assert portions.taken({"a": 1, "b": 2}, 1) == ["a", "b"]


def test_a_cell_of_unknown_length_counts_as_the_median():
    weights = portions.work_of({"a": 1.0, "b": None, "c": 3.0}, {"a": 1, "b": 2, "c": 1})
    assert weights == {"a": 1, "b": 4, "c": 3}
    assert portions.work_of({"a": None, "b": None}, {"a": 3, "b": 1}) == {"a": 3, "b": 1}


def test_where_of_a_model_and_of_a_variant_both_choose_devices(config):
    model = {"shape": "tiny-qwen2", "where": ["rtx4090", "rpi5"]}
    path = config({"name": "all"}, {"name": "gpus", "where": ["rtx*"]}, model=model)
    cells = {cell.variant.name: cell for cell in plan.cells(configs.load(path))}
    devices = ["rtx4090", "rtx5090", "rpi5"]
    goes = {name: [d for d in devices if portions.goes_to(cell, d)] for name, cell in cells.items()}
    assert goes == {"all": ["rtx4090", "rpi5"], "gpus": ["rtx4090"]}
    assert portions.unknown_devices(cells.values(), ["rtx4090"]) == ["rpi5"]


def test_where_does_not_change_the_id_of_a_cell(config, tmp_path):
    def id_of(**more: Any) -> str:
        (cell,) = plan.cells(configs.load(config({"name": "v", **more})))
        return cell.id

    assert id_of() == id_of(where=["a*"])


def test_resources_of_rays_own_are_no_devices():
    there = {"CPU": 2.0, "memory": 1e9, "object_store_memory": 1e8, "node:10.0.0.1": 1.0, "rpi5": 1.0}
    assert devices_of({**there, "accelerator_type:H100": 1.0, "cpu:amd-epyc-2c": 1.0}) == {
        "rpi5": 1,
        "cpu:amd-epyc-2c": 1,
    }


def test_a_config_for_other_machines_names_shipped_weights_and_has_whole_paths(real_config, tmp_path):
    (tmp_path / "text.txt").write_text("words")
    workloads = [{"kind": "quality", "text": "text.txt"}, {"kind": "decode"}]
    models = [{"weights": "austen-4m"}, {"weights": "mine", "name": "mine"}]
    path = real_config({"stack": "hf", "dtype": "bf16"}, models=models, workloads=workloads)
    sent = portable(configs.load(path), tmp_path)
    assert sent["models"][0]["weights"] == "austen-4m"
    assert sent["models"][1]["weights"] == {"path": str(tmp_path / "mine")}
    assert sent["workloads"] == [{"kind": "quality", "text": str(tmp_path / "text.txt")}, {"kind": "decode"}]


# Records on their way


def test_a_record_arrives_byte_for_byte_and_only_once(measured, tmp_path):
    root = tmp_path / "results"
    stored = parcels.store(root, parcels.packed(measured[0]))
    assert stored is not None
    sent = {path.name: path.read_bytes() for path in measured[0].iterdir()}
    assert {path.name: path.read_bytes() for path in stored.folder.iterdir()} == sent
    assert stored.folder.relative_to(root) == measured[0].relative_to(tmp_path / "elsewhere")
    assert parcels.store(root, parcels.packed(measured[0])) is None


def test_a_record_never_overwrites_another_that_began_at_the_same_moment(measured, tmp_path):
    parcel = parcels.packed(measured[0])
    first = parcels.store(tmp_path / "results", parcel)
    second = parcels.store(
        tmp_path / "results", with_record(parcel, lambda record: record.update(reason="other"))
    )
    assert first is not None
    assert second is not None
    assert first.folder != second.folder
    assert parcels.digest_of(first.folder) == digest_in(parcel)


def test_what_a_crash_left_of_a_record_is_completed(measured, tmp_path):
    root, parcel = tmp_path / "results", parcels.packed(measured[0])
    left = root / measured[0].relative_to(tmp_path / "elsewhere")
    left.mkdir(parents=True)
    (left / "tokens.parquet").write_bytes(b"half")
    stored = parcels.store(root, parcel)
    assert stored is not None
    assert stored.folder == left
    assert len(stored.times) == 40


def changed(parcel, change) -> str:
    record = json.loads(base64.b64decode(parcel["files"]["record.json"]))
    change(record)
    return base64.b64encode(json.dumps(record).encode()).decode()


def digest_in(parcel) -> str:
    return parcels.digest(base64.b64decode(parcel["files"]["record.json"]))


def with_files(parcel, **files: str):
    return {**parcel, "files": parcel["files"] | files}


def with_record(parcel, change):
    return with_files(parcel, **{"record.json": changed(parcel, change)})


HARMS = {
    "no base64": (lambda p: with_files(p, **{"worker.log": "-"}), "a file that is not base64"),
    "no record": (lambda p: {**p, "files": {"worker.log": "AAAA"}}, "without a readable record"),
    "other file": (lambda p: with_files(p, **{"../x.parquet": "AAAA"}), "a file that no record has"),
    "folder": (lambda p: {**p, "when": "../../../x"}, "lead out of the results folder"),
    "incomplete": (lambda p: with_record(p, lambda record: record.pop("cell")), "cell is missing"),
    "cell": (lambda p: with_record(p, lambda record: record.update(cell="../x")), "lead out of the results"),
}


@pytest.mark.parametrize(("harm", "says"), HARMS.values(), ids=HARMS)
def test_a_damaged_parcel_is_refused_and_writes_nothing(measured, tmp_path, harm, says):
    with pytest.raises(Damaged, match=says):
        parcels.store(tmp_path / "results", harm(parcels.packed(measured[0])))
    assert not (tmp_path / "results").exists()


def test_the_interrupted_record_of_a_lost_node_is_not_doubled_when_the_node_comes_back(measured, tmp_path):
    def interrupted(start):
        return lambda record: record.update(outcome="interrupted", started_utc=start)

    parcel = parcels.packed(measured[0])
    start = json.loads((measured[0] / "record.json").read_text())["started_utc"]
    results = Results(tmp_path / "results", nothing)

    def received(parcel):
        return results.receive(parcel, parcels.record_in(parcel))

    assert received(with_record(parcel, interrupted(just_before(start))))  # as the fleet writes it
    assert received(with_record(parcel, interrupted(start))) is None
    assert received(parcel)  # it finished the repeat after all: kept
    outcomes = [json.loads(p.read_text())["outcome"] for p in (tmp_path / "results").rglob("record.json")]
    assert sorted(outcomes) == ["interrupted", "ok"]


def test_a_spool_offers_what_the_fleet_does_not_have_and_goes_when_it_has_all(measured, cache):
    with parcels.spool_folder("tag") as here:
        for folder in measured:
            parcels.store(here / "results", parcels.packed(folder))
        assert list(parcels.unsent("tag", ())) == []  # its campaign runs
    digests = [parcels.digest_of(folder) for folder in measured]
    assert [digest_in(p) for p in parcels.unsent("tag", digests[:1])] == digests[1:]
    assert list(parcels.unsent("tag", digests)) == []
    assert not here.exists()


# A job on a node, without Ray


def job_of(do: str, path: Path, **more: Any) -> dict[str, Any]:
    experiment = configs.load(path)
    job = {"do": do, "tag": path.parent.name, "config": experiment.source | {"name": experiment.name}}
    job |= {"cells": [cell.id for cell in plan.cells(experiment)], "config_path": str(path)}
    job |= {"command_line": ["harness", "run"], "fleet": {"device": "local", "clock_ahead_s": 0.5}}
    return job | {"known": [], "earlier": []} | dict.fromkeys(("fresh", "retry_failed", "wait"), False) | more


def done(job: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "harness.campaign.fleet.node", str(os.getpid())]
    ran = subprocess.run(command, input=json.dumps(job) + "\n", capture_output=True, text=True, timeout=600)
    assert ran.stderr == ""
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_a_campaign_of_a_node_measures_nothing_that_the_fleet_has(config, fake_interpreter):
    path = config({"name": "a"}, {"name": "b"})
    lines = done(job_of("measure", path))
    assert [line["event"] for line in lines if line["event"] not in ("message", "warning")] == [
        *("begins", "record", "begins", "record", "ended")
    ]
    records = [line["parcel"] for line in lines if line["event"] == "record"]
    first = parcels.record_in(records[0])
    assert first["campaign"]["fleet"] == {"device": "local", "clock_ahead_s": 0.5}
    assert first["campaign"]["config_path"] == str(path)
    again = done(job_of("measure", path, earlier=records[:1]))
    new = [parcels.record_in(line["parcel"]) for line in again if line["event"] == "record"]
    assert [record["cell"] for record in new] == [parcels.record_in(records[1])["cell"]]
    assert len(again[-1]["records"]) == 2


def test_a_survey_has_a_record_to_be_for_each_cell(config, tmp_path, fake_interpreter):
    (line,) = done(job_of("survey", config({"name": "a"}, {"name": "b"})))
    assert line["event"] == "surveyed"
    assert len(line["cells"]) == 2
    assert line["shared"]["campaign"]["fleet"]["device"] == "local"


# Mistakes of a user


@pytest.mark.parametrize(
    ("on", "says"),
    [
        ("there", "expected a file FLEET.yaml, ray://HOST:10001, HOST:6379, auto, or local-cluster:N"),
        ("local-cluster:99", "at most 16 nodes"),
        ("none.yaml", "none.yaml: no such file"),
        ("ray://127.0.0.1:1", "ray://127.0.0.1:1 does not answer"),
    ],
)
def test_a_fleet_that_cannot_be_is_one_sentence(harness, config, on, says):
    pytest.importorskip("ray") if on.startswith("ray:") else None
    refused(harness("run", config({}), "--on", on), says)


def test_an_address_that_is_silent_is_no_cluster(harness, config):
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which accepts, and says nothing
        address = f"ray://127.0.0.1:{silent.getsockname()[1]}"
        ran = harness("run", config({}), "--on", address)
    why = f"harness: {address} does not answer: no Ray cluster there within 10 s\n"
    assert (ran.code, ran.err) == (2, why)


def test_without_ray_the_sentence_says_how_to_install_it(config, tmp_path):
    hidden = tmp_path / "hidden.py"
    hidden.write_text(
        "import sys, importlib.util as u; f = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'ray' else f(name, *a)\n"
        "from harness import cli; sys.exit(cli.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, hidden, "run", config({}), "--on", "local-cluster:2"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 2
    install = "pip install 'ray[client]>=2.60'"
    assert 'fleet = ["ray[client]>=2.60"]' in (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert ran.stderr == f"harness: a fleet needs Ray, which is not installed here: {install}\n"


def test_mistakes_in_the_file_of_a_fleet_have_their_lines(tmp_path):
    path = tmp_path / "fleet.yaml"
    rows = ["address: there", "devices:", "  a: {device: gpu}", "  b: {devise: cpu}"]
    path.write_text("\n".join([*rows, "  c: {device: cpu, gpu: X}"]))
    with pytest.raises(configs.ConfigError) as found:
        place_of(str(path))
    lines = str(found.value).splitlines()
    assert sorted(re.sub(r".*fleet.yaml:(\d).*", r"\1", line) for line in lines) == ["1", "3", "4", "5"]
    assert any("did you mean device?" in line for line in lines)


def test_a_fleet_file_gives_each_device_the_config_as_it_runs_it(tmp_path):
    path = tmp_path / "fleet.yaml"
    rows = ["address: auto", "devices:", "  rtx: {device: cuda, gpu: RTX 4090}", "  pi:"]
    path.write_text("\n".join([*rows, "  box: {device: cpu}"]))
    place = place_of(str(path))
    config = {"device": "cuda", "gpu": "A100", "models": []}
    assert place.address == "auto"
    assert place.config_of(config, "rtx") == {"device": "cuda", "gpu": "RTX 4090", "models": []}
    assert place.config_of(config, "pi") == config
    assert place.config_of(config, "box") == {"device": "cpu", "gpu": None, "models": []}


def test_forecasts_of_this_machine_do_not_go_with_a_fleet(harness, config):
    refused(harness("run", config({}), "--on", "local-cluster:2", "--dry-run"), "leave out --on")


def test_the_line_of_a_repeat_says_how_many_of_its_device_are_done():
    event: Event = {"event": "record", "device": "a", "cell": "x", "repeat": 1, "status": "ok", "reasons": []}
    assert cli_fleet.text_of(event) == "a: x #1  ok"
    counted: Event = {**event, "status": "invalid", "reasons": ["busy"], "repeats_done": 3, "repeats": 9}
    assert cli_fleet.text_of(counted) == "a: x #1  invalid (3/9): busy"


STOPPED_WHILE_PRINTING = """
import os, signal, sys
from harness.campaign.fleet import node
class Interrupted:
    def write(self, text):
        if text.startswith("{") and "first" in text:
            os.kill(os.getpid(), signal.SIGTERM)
        return sys.__stdout__.write(text)
    def flush(self):
        sys.__stdout__.flush()
signal.signal(signal.SIGTERM, node._stop)
sys.stdout = Interrupted()
try:
    node.say("first")
except KeyboardInterrupt:
    node.say("stopped")
"""


def test_a_node_that_is_stopped_while_it_prints_ends_its_line_first():
    ran = subprocess.run([sys.executable, "-c", STOPPED_WHILE_PRINTING], capture_output=True, text=True)
    assert [json.loads(line)["event"] for line in ran.stdout.splitlines()] == ["first", "stopped"], ran


def test_lines_that_came_before_an_interrupt_are_read_after_it():
    read, write = os.pipe()
    os.write(write, b"one\ntwo\nthr")
    printed = Lines(read, 1000)
    assert next(iter(printed)) == "one"
    os.write(write, b"ee\n")
    os.close(write)
    assert list(printed) == ["two", "three"]
    os.close(read)
