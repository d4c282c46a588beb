"""Generating until memory runs out: that it did is the answer, with the length, the share and the reason."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran, stored_in
from test_memory_limit import with_cgroup

from harness import records
from harness.analysis import growth

# A worker's growth until not even 10 kB are left, and a session that needs 4 MiB to count.
UNTIL_NOTHING_IS_LEFT = """
import json, resource, time
from runners.clock import status_bytes
from runners.workloads.filling import Growth

class Session:
    def counters(self):
        return {"looked_up": len(bytearray(2**22))}

def stream():
    size = 2**20
    while True:
        try:
            held.append(bytearray(size))
        except MemoryError:
            if size < 10_000:
                raise
            size //= 2
        yield 0

held, growth = [], Growth(Session(), 1, (MemoryError,))
limit = status_bytes("VmData") + 2**23
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
growth.stamped(stream(), lambda event: None, time.perf_counter_ns)
print(json.dumps([growth.summary()["stopped"], growth.counters()]))
"""


@pytest.fixture
def grow(config: Callable[..., Path], harness: Callable[..., Ran]) -> Callable[..., list[dict[str, Any]]]:
    """Runs fake variants that grow, and returns their rows: `grow({"die_at_token": 700}, target=4000)`."""

    def run(*variants: dict[str, Any], target: int = 2000, code: int = 0, **protocol: Any) -> Any:
        # So short that a busy machine cannot keep it from a CPU for long.
        workloads = [{"kind": "grow", "target": target}]
        path = config(*({"B_ms": 0.02} | each for each in variants), workloads=workloads, **protocol)
        ran = harness("run", path, "--json")
        assert ran.code == code, ran.err
        return ran.json

    return run


RAN_OUT = "the fake ran out of memory, as asked"
# Of a growth to 1,000 tokens: its variant, status, length, whether that is the target, and what ended it.
ENDS = {
    "memory": ({"die_at_token": 700, "die_by": "oom"}, "ok", 25 + 699, False, RAN_OUT),
    "target": ({}, "ok", 1000, True, None),
    "segfault": ({"die_at_token": 100, "die_by": "segfault"}, "crash", None, False, None),
    "error": ({"die_at_token": 100, "die_by": "error"}, "error", None, False, None),
    "before-a-token": ({"oom_above_n_ctx": 100}, "oom", None, False, None),
}


def test_memory_that_ran_out_or_a_target_is_the_answer_to_the_exact_token(grow, harness, tmp_path) -> None:
    found = grow(*({"name": name} | ends[0] for name, ends in ENDS.items()), target=1000, code=1)
    keys = ("status", "max_ctx", "max_ctx_is_target", "limit_reason")
    assert {row["variant"]: tuple(row[key] for key in keys) for row in found} == {
        name: tuple(ends) for name, (_, *ends) in ENDS.items()
    }
    (stored,) = (each for each in stored_in(tmp_path / "results") if each.record["variant"] == "memory")
    assert len(records.series(stored)["latency_ns"]) == 699  # none of the last batch is lost
    assert stored.record["outcome"] == "ok"
    shown = " ".join(harness("run", tmp_path / "fake.yaml", "--wide").out.split())
    assert "held 724 tokens of prompt and decode" in shown
    assert RAN_OUT in shown


def test_another_kernel_than_asked_for_grows_to_no_answer(grow) -> None:
    (row,) = grow({"die_at_token": 700, "die_by": "oom", "runs_kernel": "other"}, code=1)
    assert row["status"] == "invalid"
    assert row["max_ctx"] == 724  # shown with the reason; tables leave it out


@with_cgroup
def test_a_kill_at_the_budget_is_the_answer_as_far_as_it_is_known(grow, tmp_path: Path) -> None:
    (row,) = grow({"leak_bytes_per_token": 65536, "B_ms": 0.3}, target=8000, memory_budget="100MiB")
    assert row["status"] == "ok"
    assert "killed at the memory budget of 0.10 GB" in row["limit_reason"]
    assert 512 <= row["max_ctx"] - 25 <= 100 * 2**20 / 65536
    (stored,) = stored_in(tmp_path / "results")
    assert stored.record["outcome"] == "oom"
    assert stored.record["memory_budget"]["bytes"] == 100 * 2**20


def test_the_allocators_state_is_kept_step_by_step(grow, tmp_path: Path) -> None:
    grow({"leak_bytes_per_token": 4096, "B_ms": 0.05}, target=1200)
    (stored,) = stored_in(tmp_path / "results")
    steps = stored.record["done"]["memory_steps"]
    assert [n for n, _, _ in steps] == sorted(n for n, _, _ in steps)
    n, allocated, reserved = steps[-1]
    assert allocated == reserved >= 4096 * (n - 25)


def test_after_memory_ran_out_there_is_enough_of_it_to_ask_the_session() -> None:
    command = [sys.executable, "-c", UNTIL_NOTHING_IS_LEFT]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    stopped, counters = json.loads(ran.stdout)
    assert "MemoryError" in stopped
    assert counters == {"looked_up": 2**22}


def record(**changed: Any) -> dict[str, Any]:
    marks = [{"at": "loaded", "rss_anon_bytes": 400, "vram_bytes": 1000}]
    return {
        "workload": {"kind": "grow", "prompt_tokens": 25, "new_tokens": 975},
        "outcome": "oom",
        "reason": "no room",
        "tokens": 75,
        "device": "cpu",
        "memory": {"marks": marks},
        "memory_budget": {"bytes": 1400, "means": "cgroup v1"},
    } | changed


def test_the_share_is_of_what_was_free_when_the_model_was_loaded() -> None:
    assert growth.growth_row(record(), None, 5.0)["kv_share_of_free"] == pytest.approx(100 * 5 / 1000)
    on_gpu = record(device="GPU-1", memory_budget=None)
    assert growth.growth_row(on_gpu, 3000, 5.0)["kv_share_of_free"] == pytest.approx(100 * 5 / 2000)


@pytest.mark.parametrize(
    "unknown", [{"memory": {}}, {"memory_budget": None}, {"memory_budget": {"bytes": 300, "means": "x"}}]
)
def test_without_knowing_what_was_free_there_is_no_share(unknown: dict[str, Any]) -> None:
    said = growth.growth_row(record(**unknown), None, 5.0)
    assert (said["max_ctx"], said["kv_share_of_free"]) == (100, None)


def test_other_workloads_grow_to_nothing() -> None:
    decode = record(workload={"kind": "decode", "prompt_tokens": 25, "new_tokens": 75})
    assert set(growth.growth_row(decode, None, 5.0).values()) == {None, False}
