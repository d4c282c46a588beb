"""A fleet on real raylets of this machine: what is kept and moved, whatever happens to nodes."""

import json
import random
import signal
import socket
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import Ran, until
from conftest import records_below as records
from ray_nodes import PATIENT_CLIENT
from raylets import (
    MARKS,
    MEASURED,
    caches,
    check,
    ended,
    namespaces_allowed,
    slow_cells,
    start_of,
    under_way,
)

import harness
from harness.base.files import cache_folder
from harness.campaign.device_lock import device_lock

pytestmark = MARKS
DONE = "fleet/*/*/results/*/*/*/*/record.json"


def test_twelve_cells_on_three_nodes_end_in_one_folder_and_one_page(command, tmp_path):
    ran: Ran = command("run", "fleet-demo", "--on", "local-cluster:3", "--set", "repeats=1")
    assert ran.code == 0, ran.err
    found = records(tmp_path / "results")
    check(found, 12)
    assert len({r["campaign"]["id"] for r in found}) >= 3
    assert {r["campaign"]["fleet"]["device"] for r in found} == {"local"}
    assert (tmp_path / "reports" / "fleet-demo.html").exists()
    again: Ran = command("run", "fleet-demo", "--on", "local-cluster:2", "--set", "repeats=1", "--json")
    assert again.code == 0
    assert len(records(tmp_path / "results")) == 12
    events = [json.loads(line) for line in again.out.splitlines()]
    assert [e for e in events if e["event"] == "record"] == []
    assert events[-1]["event"] == "ended"


def test_a_node_killed_in_a_repeat_leaves_it_interrupted_and_cells_move(nodes, background, config, tmp_path):
    fleet, told = nodes("a", "a"), tmp_path / "events"
    with told.open("w") as out:  # its repeats take ten seconds: one runs when the node is killed
        path = slow_cells(config, 3, ms=200.0)
        running = background("run", path, "--json", "--on", fleet.address, stdout=out)
    until(lambda: told.read_text().count('"begins"') >= 2, 300)
    fleet("kill", 1)
    code, err = ended(running)
    assert code in MEASURED, err
    found = records(tmp_path / "results")
    check(found, 3)
    (lost,) = [r for r in found if r["outcome"] == "interrupted"]
    assert "node died" in lost["reason"]
    assert "to an equal device" in told.read_text()


def test_a_node_killed_while_its_record_is_on_its_way_loses_nothing(nodes, background, config, tmp_path):
    fleet, path = nodes("a", "a"), slow_cells(config, 6)
    running = background("run", path, "--on", fleet.address)
    until(lambda: list(caches()[0].glob(DONE)), 300)
    fleet("kill", 1)
    code, err = ended(running)
    assert code in MEASURED, err
    fleet("add", 1, "a")  # unsent records come with the next run
    code, err = ended(background("run", path, "--on", fleet.address))
    assert code in MEASURED, err
    found = records(tmp_path / "results")
    assert len({r["content_key"] for r in found if r["outcome"] == "ok"}) == 6
    assert set(Counter(map(start_of, found)).values()) == {1}
    assert not list(caches()[0].glob("fleet/*/*/results"))


def test_a_node_killed_when_it_has_nothing_to_do_changes_nothing(nodes, background, config, tmp_path):
    fleet = nodes("a", "b")
    rows = [{"name": "a", "where": ["a"]}, {"name": "b", "where": ["b"], "B_ms": 200.0, "clock": "real"}]
    running = background("run", config(*rows, new_tokens=50), "--on", fleet.address)
    until(lambda: records(tmp_path / "results") and under_way(2), 300)
    fleet("kill", 1)
    code, err = ended(running)
    assert code in MEASURED, err
    assert [r["outcome"] for r in records(tmp_path / "results")] == ["ok", "ok"]


def test_without_an_equal_device_cells_of_a_lost_node_are_unavailable(nodes, background, config, tmp_path):
    fleet = nodes("a", "b")
    path = slow_cells(config, 3)
    running = background("run", path, "--on", fleet.address)
    until(lambda: under_way(1) and under_way(2), 300)
    fleet("kill", 1)
    code, err = ended(running)
    assert code == 1, err
    found = records(tmp_path / "results")
    of_a = [r for r in found if r["campaign"]["fleet"]["device"] == "a"]
    assert {r["outcome"] for r in of_a} >= {"unavailable"}
    assert all("died" in r["reason"] for r in of_a if r["outcome"] == "unavailable")
    assert [r["outcome"] for r in found if r["campaign"]["fleet"]["device"] == "b"] == ["ok"] * 3
    fleet("add", 1, "a")  # the node comes back, and its records are fetched
    code, err = ended(background("run", path, "--on", fleet.address))
    assert code in MEASURED, err


def test_a_node_that_joins_late_takes_work(nodes, background, config, tmp_path):
    fleet = nodes("a")
    running = background("run", slow_cells(config, 10, repeats=2), "--on", fleet.address)
    until(lambda: under_way(1), 300)
    fleet("add", 2, "b")
    code, err = ended(running)
    assert code in MEASURED, err
    devices = Counter(r["campaign"]["fleet"]["device"] for r in records(tmp_path / "results"))
    assert devices["b"] > 0


def test_a_head_that_is_killed_ends_the_run_and_loses_nothing(nodes, background, config, tmp_path):
    fleet = nodes("a", "a")
    path = slow_cells(config, 8)
    running = background("run", path, "--on", fleet.address)
    until(lambda: records(tmp_path / "results") and under_way(1), 300)
    fleet("head")
    code, err = ended(running)
    assert code == 1, err
    assert "is lost; finished work is kept" in err
    before = {p: p.read_bytes() for p in (tmp_path / "results").rglob("record.json")}
    fleet.end()
    code, err = ended(background("run", path, "--on", nodes("a", "a").address))
    assert code in MEASURED, err
    assert all(path.read_bytes() == content for path, content in before.items())
    check(records(tmp_path / "results"), 8)


def test_a_node_that_lost_the_network_is_replaced_and_its_work_is_kept(nodes, background, config, tmp_path):
    fleet = nodes("a", "a")
    running = background("run", slow_cells(config, 6), "--on", fleet.address)
    until(lambda: under_way(1), 300)
    fleet("stop", 1)
    code, err = ended(running)
    assert code in MEASURED, err
    fleet("go", 1)
    found = records(tmp_path / "results")
    assert len({r["content_key"] for r in found if r["outcome"] == "ok"}) == 6
    assert set(Counter(map(start_of, found)).values()) == {1}


def test_cells_of_a_node_whose_link_is_cut_move_and_what_it_measured_meanwhile_is_kept(
    nodes, background, config, tmp_path
):
    if not namespaces_allowed():
        pytest.skip("needs root, to make network namespaces")
    fleet = nodes(elsewhere=True)
    for number in (1, 2):
        fleet("join", number, "a")
    path, told = slow_cells(config, 3, ms=200.0), tmp_path / "events"
    with told.open("w") as out:
        running = background("run", path, "--json", "--on", fleet.address, stdout=out)
    until(lambda: told.read_text().count('"begins"') >= 2, 300)
    fleet("cut", 1)
    if not (there := under_way(1)):
        pytest.skip("this machine is too busy: the repeat ended before the link was cut")
    code, err = ended(running)
    assert code in MEASURED, err
    events = [json.loads(line) for line in told.read_text().splitlines()]
    assert [e["text"] for e in events if e["event"] == "moved"] == [
        "1 cell goes to an equal device: its node died or left the cluster"
    ]
    found = records(tmp_path / "results")
    check(found, 3)
    (lost,) = [r for r in found if r["outcome"] == "interrupted"]
    assert "node died or left the cluster" in lost["reason"]
    until(lambda: not there[0].exists(), 300)
    fleet("mend", 1)
    fleet("leave", 1)  # Ray has ended there, or will: it is started again
    fleet("join", 1, "a")
    code, err = ended(background("run", path, "--on", fleet.address))
    assert code in MEASURED, err
    found = records(tmp_path / "results")
    assert set(Counter(map(start_of, found)).values()) == {1}
    assert len(found) == 5
    assert not list(caches()[0].glob("fleet/*/*/results"))


def test_interrupting_the_fleet_records_the_repeats_of_the_moment(nodes, background, config, tmp_path):
    fleet = nodes("a", "a")
    path = slow_cells(config, 2, ms=300.0)
    running = background("run", path, "--on", fleet.address)
    until(lambda: under_way(1) and under_way(2), 300)
    running.send_signal(signal.SIGINT)
    code, err = ended(running)
    assert code == 130
    assert "the same command continues" in err
    assert "interrupted" in {r["outcome"] for r in records(tmp_path / "results")}
    code, err = ended(background("run", path, "--on", fleet.address))
    assert code in MEASURED, err
    check(records(tmp_path / "results"), 2)


@pytest.mark.parametrize("version", ["0.0.1", harness.__version__], ids=["older", "same number"])
def test_a_node_whose_harness_has_other_modules_is_refused_with_both_versions(
    nodes, command, config, tmp_path, version
):
    package = tmp_path / "old" / "harness"
    (package / "campaign").mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = {version!r}")
    (package / "campaign" / "__init__.py").write_text("")
    fleet = nodes("a")
    fleet("add", 2, "a", f"PYTHONPATH={package.parent}")
    ran = command("run", config({}), "--on", fleet.address)
    assert ran.code == 2
    assert f"harness {version} on the node at" in ran.err
    assert f", {harness.__version__}" in ran.err
    assert "here: install the same on both" in ran.err
    assert not (tmp_path / "results").exists() or not records(tmp_path / "results")


def test_a_device_that_nobody_has_is_one_sentence(nodes, command, config, tmp_path):
    fleet = nodes("a")
    ran = command("run", config({"where": ["rtx5090"]}), "--on", fleet.address)
    why = "harness: where: no device of the fleet matches rtx5090; there are a\n"
    assert (ran.code, ran.err) == (2, why)
    file = tmp_path / "fleet.yaml"
    file.write_text(f"address: {fleet.address}\ndevices: {{rtx4090: {{device: cuda}}}}")
    ran = command("run", config({}), "--on", file)
    assert ran.code == 2
    assert "devices.rtx4090: no node of" in ran.err


def test_a_device_that_is_busy_gives_its_cells_to_an_equal_one(nodes, command, config, tmp_path, monkeypatch):
    fleet = nodes("a", "a")
    with monkeypatch.context() as there:
        there.setenv("HARNESS_CACHE", str(caches()[0]))
        busy = device_lock("cpu", False, print, measures=False)
        busy.__enter__()
    try:
        ran = command("run", config(*({"name": f"v{n}"} for n in range(6))), "--on", fleet.address)
    finally:
        busy.__exit__(None, None, None)
    assert ran.code == 0, ran.err
    assert "another campaign (process" in ran.err
    check(records(tmp_path / "results"), 6)


def test_a_full_results_folder_loses_nothing(nodes, command, config, small_disk):
    fleet, disk = nodes("a", "a"), small_disk("120k")
    path = config(*({"name": f"v{n}"} for n in range(12)))
    ran = command("run", path, "--on", fleet.address, "-o", disk / "results")
    assert ran.code == 1, ran.err
    assert "stays in their caches, and comes with the next run" in ran.err
    subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
    ran = command("run", path, "--on", fleet.address, "-o", disk / "results")
    assert ran.code == 0, ran.err
    check(records(disk / "results"), 12)


def test_a_node_with_a_full_disk_gives_its_cells_to_an_equal_one(
    nodes, command, config, small_disk, cache, tmp_path
):
    fleet, disk = nodes(), small_disk("100k")
    (disk / "envs").symlink_to(cache / "envs")
    fleet("add", 1, "a", f"HARNESS_CACHE={disk}")
    fleet("add", 2, "a")
    ran = command("run", config(*({"name": f"v{n}"} for n in range(12))), "--on", fleet.address)
    assert ran.code == 0, ran.err
    assert "No space left on device" in ran.err
    check(records(tmp_path / "results"), 12)


@pytest.mark.network
def test_cells_of_a_node_that_cannot_build_their_stack_have_the_reason(
    nodes, command, real_config, tmp_path, cache
):
    own = cache_folder() / "local-cluster" / "1" / "envs"
    own.mkdir(parents=True)
    for fake in (cache / "envs").glob("fake-*"):
        (own / fake.name).symlink_to(fake)
    fleet = nodes()
    fleet("add", 1, "a", "CC=/nowhere/cc", "CXX=/nowhere/c++")
    path = real_config({"stack": "fake"}, {"stack": "llamacpp", "quant": "q8_0"}, new_tokens=4)
    ran = command("run", path, "--on", fleet.address)
    assert ran.code == 1, ran.err
    found = {each["stack"]: each for each in records(tmp_path / "results")}
    assert found["fake"]["outcome"] == "ok"
    assert found["llamacpp"]["outcome"] == "unavailable"
    assert "environment llamacpp/cpu could not be built" in found["llamacpp"]["reason"]


def test_a_fleet_is_reached_through_rays_client(nodes, command, config, tmp_path):
    fleet = nodes("a", "a")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fleet("client", port)
    until(lambda: accepts(port), 300)
    path = config(*({"name": f"v{n}"} for n in range(4)))
    ran = command("run", path, "--on", f"ray://127.0.0.1:{port}", **PATIENT_CLIENT)
    assert ran.code == 0, ran.err
    check(records(tmp_path / "results"), 4)


def accepts(port: int) -> bool:
    with socket.socket() as there:
        return there.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    "most", [6, pytest.param(20, marks=pytest.mark.long("five minutes; six kills show the same in less"))]
)
def test_kills_at_random_moments_lose_and_double_nothing(nodes, background, config, tmp_path, most):
    chance = random.Random(25)
    fleet, path, kills = nodes("a", "a", "a"), slow_cells(config, 12, ms=10.0, repeats=2), 0
    kept: dict[Path, bytes] = {}
    last = time.monotonic() + 800
    while kills < most and time.monotonic() < last:
        how = "--fresh" if kills == most // 2 else "--wait"
        running = background("run", path, how, "--on", fleet.address)
        while running.poll() is None and kills < most:
            time.sleep(chance.uniform(0.5, 5.0))
            number = chance.randint(1, 3)
            fleet("kill", number)
            fleet("add", number, "a")
            kills += 1
        _, err = ended(running)
        now = {p: p.read_bytes() for p in (tmp_path / "results").rglob("record.json")}
        assert all(now.get(p) == content for p, content in kept.items())
        kept = now
    code, err = ended(background("run", path, "--retry-failed", "--on", fleet.address))
    assert code in MEASURED, err
    found = records(tmp_path / "results")
    assert set(Counter(map(start_of, found)).values()) == {1}
    assert len({(r["content_key"], r["repeat"]) for r in found if r["outcome"] == "ok"}) == 24
    assert kills == most


def test_nothing_is_left_running_after_a_local_cluster(command, config, tmp_path, monkeypatch):
    monkeypatch.setenv("STARTED_BY", str(tmp_path))  # which all that it starts has too

    def left() -> bool:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("STARTED_BY") == str(tmp_path):
                    return True
        return False

    command("run", config({}), "--on", "local-cluster:2")
    until(lambda: not left(), 60)
