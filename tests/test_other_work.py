"""Other work on the CPUs that makes no thread of ours wait, and CPU time that a hypervisor withholds."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import records_below
from golden_record import GOLDEN, record

from harness import machine
from harness.analysis.attempts import disturbance_summary
from harness.analysis.verdicts import verdict
from harness.campaign import repeat
from harness.campaign.other_processes import cpu_time

S = 1_000_000_000
LOOP = "while True: pass"


def timed(seconds: float = 10.0, **changes: Any) -> dict[str, Any]:
    """A record of so many seconds, of a stack without a clock of its own."""
    stamps = {"first_token_ns": S // 10, "last_token_ns": int(seconds * S)}
    changes = {"done__counters": {}, "threads": 2} | changes
    return record(timing=GOLDEN["timing"] | stamps, **changes)


def beside(own: float, others: float, cores: int, seconds: float = 10.0, **changes: Any) -> dict[str, Any]:
    """A record while the harness and other processes used so many CPUs of a machine with so many cores."""
    used = {"elapsed_s": seconds, "machine_s": (own + others) * seconds, "harness_s": own * seconds}
    return timed(seconds, conditions__cpu_time=used, machine__all_cores=cores, **changes)


@pytest.mark.parametrize(
    ("own", "others", "cores", "says"),
    [
        (1.0, 1.0, 2, "invalid"),  # one thread beside a busy loop
        (2.0, 2.0, 4, "invalid"),  # cores of its own, but one memory
        (4.0, 4.0, 4, "invalid"),  # 8 CPUs that are 4 cores: each thread shares its core
        (4.0, 0.3, 4, "invalid"),
        (16.0, 1.0, 16, "invalid"),
        (4.0, 0.1, 4, "ok"),  # what a desktop does while idle
        (1.0, 0.05, 2, "ok"),
        (1.0, 0.15, 2, "note"),
        (8.0, 1.0, 16, "note"),
        (8.0, 1.7, 16, "invalid"),
        (1.0, 1.0, 64, "ok"),
    ],
)
def test_work_of_others_disturbs_where_it_shares_cores_or_uses_a_tenth_of_them(own, others, cores, says):
    judged = beside(own, others, cores)
    found, noted = verdict(judged), [flag.code for flag in verdict(judged).notes]
    text = f"other processes used {others:.1f} CPUs while timing "
    text += f"({cores} cores; its own processes used {own:.1f})"
    assert (found.status, found.disturbed) == (("invalid", "cpu") if says == "invalid" else ("ok", None))
    assert found.reasons == ([text] if says == "invalid" else [])
    assert noted == (["little_other_work"] if says == "note" else [])


def test_beside_a_gpu_only_others_on_the_core_of_its_thread_disturb():
    gpu = {"device": "GPU-1", "loaded__devices": {}}
    assert verdict(beside(1.0, 15.0, 16, **gpu)).status == "ok"
    assert verdict(beside(1.0, 15.5, 16, **gpu)).disturbed == "cpu"
    assert verdict(beside(1.0, 2.0, 16, **gpu)).notes == []


def test_what_is_unknown_or_too_short_or_may_be_the_server_is_no_other_work():
    served = {"api": "openai", "elsewhere": True, "template": False}
    for quiet in (
        timed(machine__all_cores=2),
        beside(1.0, 1.0, 2, seconds=0.05),
        beside(1.0, 1.0, 2, loaded__served=served),
    ):
        assert verdict(quiet).status == "ok"


@pytest.mark.parametrize(
    ("steal_ms", "changes", "share"),
    [
        (10_000, {}, "50%"),  # half of two CPUs
        (1_100, {}, "6%"),
        (900, {}, None),
        # Where the machine's CPU time is known, of that: of 30 busy CPUs 0.5% are no matter.
        (1_500, {"conditions__cpu_time": {"elapsed_s": 10.0, "machine_s": 300.0, "harness_s": 300.0}}, None),
        # A thread that works a tenth of the time, and loses a quarter of that.
        (300, {"conditions__cpu_time": {"elapsed_s": 10.0, "machine_s": 0.9, "harness_s": 0.9}}, None),
        (5_000, {"conditions__cpu_time": {"elapsed_s": 10.0, "machine_s": 15.0, "harness_s": 15.0}}, "25%"),
    ],
)
def test_cpu_time_that_a_hypervisor_withholds_is_a_disturbance_from_a_twentieth_on(steal_ms, changes, share):
    found = verdict(timed(conditions__pressure={"steal_ms": steal_ms}, **changes))
    assert found.disturbed == (share and "steal")
    why = [f"the hypervisor withheld {share} of the CPU time that was asked for"] if share else []
    assert found.reasons == why


def test_a_burst_of_steal_in_a_short_run_is_none():
    assert verdict(timed(1.0, conditions__pressure={"steal_ms": 200})).status == "ok"
    assert verdict(timed(1.0, conditions__pressure={"steal_ms": 210})).disturbed == "steal"


def test_steal_and_other_work_cost_simulated_time_nothing(harness, config, tmp_path, monkeypatch):
    seconds = itertools.count(0, 10)
    monkeypatch.setattr(repeat, "pressure", lambda: {"steal_ms": 1000 * next(seconds), "pswpin": 0})
    (row,) = harness("run", config({}), "--json").json
    (found,) = records_below(tmp_path / "results")
    assert (row["status"], found["conditions"]["pressure"]) == ("ok", {"pswpin": 0})
    assert "cpu_time" not in found["conditions"]


def test_what_stays_stolen_is_not_laid_to_other_processes():
    cells = [{"kind": "measured", "repeats": 3, "stayed_disturbed": ["steal"] * 3}]
    told = str(disturbance_summary(cells))
    assert told.startswith("3 of 3 repeats stayed disturbed: the hypervisor withheld the CPUs; ")


@pytest.fixture
def neighbours() -> Iterator[None]:
    """Other processes that use half of the cores. They are no children of ours."""
    loops = max(1, machine.all_cores() // 2)
    orphans = f'exec 2>&-; for i in $(seq {loops}); do "$0" -c "{LOOP}" >&- & echo $!; done'
    command = ["sh", "-c", orphans, sys.executable]
    pids = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    yield
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)


@pytest.mark.usefixtures("neighbours")
def test_a_run_beside_other_work_is_disturbed(harness, real_config, llamacpp_interpreter, tmp_path):
    ran = harness("run", real_config({"stack": "llamacpp", "quant": "q4_0"}, new_tokens=2000))
    (found,) = records_below(tmp_path / "results")
    used = found["conditions"]["cpu_time"]
    assert used["machine_s"] - used["harness_s"] > 0.1 * used["elapsed_s"], used
    assert 0 < found["timing"]["last_token_ns"] / S < used["elapsed_s"]
    assert verdict(found).disturbed == "cpu"
    assert "stayed disturbed" in ran.err


def test_other_work_costs_simulated_time_nothing(harness, config, tmp_path):
    assert harness("run", config({})).code == 0
    (found,) = records_below(tmp_path / "results")
    assert "cpu_time" not in found["conditions"]


def test_the_cpu_time_of_what_we_started_is_ours(own_processes: None):
    """Also where it has ended since."""
    before = cpu_time()
    work = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", work], check=True)
    after = cpu_time()
    rise = {name: after[name] - before[name] for name in before}
    assert rise["harness_s"] >= 0.25
    assert rise["machine_s"] > 0
