"""A memory budget, from the config to the verdict: its meaning, its refusals, the runs within it."""

import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import gone, records_below, until
from golden_record import record
from test_hf import request_of, said
from test_memory_limit import with_cgroup

from harness import config as configs
from harness.analysis.verdicts import status
from harness.campaign import worker as campaign_worker
from harness.campaign.memory_limit import MemoryLimit, mechanism_here
from harness.campaign.repeat import WorkerReport
from harness.config import plan
from harness.config.sizes import size_bytes
from harness.machine.cgroups import cgroups_of, free_memory_bytes
from harness.stacks.header import runners_folder
from runners.protocol import Loaded, Phase, Tokens

TINY = """\
protocol: {new_tokens: 40, repeats: 1, measure_bandwidth: false, retry_disturbed: 0, timeout_s: 900}
models:
  - shape: tiny-qwen2
variants:
"""


def written(folder: Path, *rows: str) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(TINY + "".join(f"  - {row}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("1.5 GB", 1_500_000_000), ("64 kB", 64_000), ("1B", 1), ("0.5KiB", 512)],
)
def test_a_size_is_as_its_unit_says(text, size):
    assert size_bytes(text) == size


UNIT = "protocol.memory_budget: give a size with a unit, as in"
SIZE = "protocol.memory_budget: must be a size with a unit, as in"
MAPS = "variants.0.mmap: true maps the weights"


@pytest.mark.parametrize(
    ("settings", "row", "sentence"),
    [
        ("memory_budget=1073741824", "{stack: hf}", UNIT),
        ("memory_budget=1.5", "{stack: hf}", UNIT),
        ("memory_budget=2", "{stack: hf}", f"{UNIT} 2GiB"),
        ("memory_budget=2gib", "{stack: hf}", SIZE),
        ("memory_budget=-2GiB", "{stack: hf}", SIZE),
        ("memory_budget=0.0GiB", "{stack: hf}", "protocol.memory_budget: must be at least one byte"),
        ("memory_budget=1GiB device=cuda", "{stack: hf}", "is for device cpu; cuda has its own memory"),
        ("memory_budget=1GiB", "{stack: hf, mmap: true}", MAPS),
        ("memory_budget=1GiB", "{stack: hf, mmap: [false, true]}", MAPS),
    ],
)
def test_a_budget_that_makes_no_sense_is_a_sentence(tmp_path, settings, row, sentence):
    with pytest.raises(configs.ConfigError) as wrong:
        configs.load(written(tmp_path, row), settings.split())
    assert sentence in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_within_a_budget_weights_are_not_mapped_and_nothing_else_is_another_cell(tmp_path):
    path = written(tmp_path, "{stack: llamacpp, quant: q4_0}", "{stack: bnb}", "{stack: fake}")
    free = plan.cells(configs.load(path))
    bound = plan.cells(configs.load(path, ["memory_budget=1GiB"]))
    assert [cell.id for cell in bound] == [cell.id for cell in free]
    assert [cell.options(1).get("mmap") for cell in free] == [True, True, None]
    assert [cell.options(1).get("mmap") for cell in bound] == [False, False, None]
    explicit = plan.cells(configs.load(written(tmp_path, "{stack: hf, mmap: false}"), ["memory_budget=1GiB"]))
    assert explicit[0].options(1)["mmap"] is False


def test_a_budget_is_in_the_content_key_and_none_leaves_it_as_it_was(tmp_path):
    path = written(tmp_path, "{stack: fake}")

    def key(*settings: str) -> str:
        (cell,) = plan.cells(configs.load(path, settings))
        return plan.content_key(cell, {"n_ctx": 65}, ["v1"], "weights", "machine", "cpu")

    assert key() == key("timeout_s=9") != key("memory_budget=1GiB") != key("memory_budget=2GiB")
    assert key("memory_budget=1GiB") == key("memory_budget=1024MiB")
    (cell,) = plan.cells(configs.load(path))
    asked = plan._request(cell.model, cell.variant, cell.workload)
    assert key() == plan._digest([cell.id, asked, {"n_ctx": 65}, ["v1"], "weights", "machine", "cpu"])[:20]


def test_a_repeat_that_takes_more_than_the_budget_is_out_of_memory_and_the_rest_runs(
    harness, config, tmp_path
):
    path = config({"leak_bytes_per_token": 1 << 20}, {}, memory_budget="120MiB", new_tokens=300)
    ran = harness("run", path, "--json")
    assert ran.code == 1
    assert [row["status"] for row in ran.json] == ["oom", "ok"]
    for each in records_below(tmp_path / "results"):
        assert each["memory_budget"] == {"bytes": 120 << 20, "means": mechanism_here()}
    assert harness("report", "--list", "--json").code == 0  # readable by their form


def test_a_budget_that_is_not_there_or_below_the_weights_is_refused_in_a_sentence(harness, tmp_path):
    path = written(tmp_path, "{stack: llamacpp, quant: q8_0}")
    unmade = ("--set", "models.0.weights={synthetic: true, seed: 77}")
    beyond = harness("run", path, "--json", *unmade, "--set", "memory_budget=999TiB")
    assert beyond.code == 1
    (row,) = beyond.json
    assert row["status"] == "refused"
    pattern = r"the memory budget is 1098412116\.1 MB and \d+\.\d MB is free on this machine"
    assert re.fullmatch(pattern, row["reasons"][0]), row["reasons"]
    below = harness("run", path, "--json", *unmade, "--set", "memory_budget=1000kB")
    (row,) = below.json
    assert row["status"] == "refused"
    assert re.fullmatch(r"the weights take 1\.\d MB and the memory budget is 1\.0 MB", row["reasons"][0])
    planned = harness("run", path, "--dry-run", "--json", *unmade, "--set", "memory_budget=1000kB")
    (line,) = planned.json
    assert line["will_be_refused"] == row["reasons"]
    assert line["will_not_fit"] is True
    assert "in the budget" in line["note"]
    assert "synthesize" not in beyond.err + below.err  # nothing was made for it
    assert not list(tmp_path.rglob("worker.log"))  # nor started
    assert "memory_budget" not in records_below(tmp_path / "results")[0]


@with_cgroup
def test_an_interrupt_leaves_no_cgroup(background, config, tmp_path):
    campaign = background("run", config({"hang_at_token": 1}, memory_budget="200MiB", timeout_s=60))

    def ours() -> list[Path]:
        around = [cgroup.folder for cgroup in cgroups_of("memory")]
        return [found for folder in around for found in folder.glob(f"harness-{campaign.pid}-*")]

    def is_worker(pid: int) -> bool:
        with suppress(psutil.NoSuchProcess):  # one that has ended, a zombie too
            return str(runners_folder()) in psutil.Process(pid).cmdline()
        return False

    found: list[tuple[Path, int]] = []

    def looked() -> bool:
        for cgroup in ours():
            with suppress(OSError):  # one that was made to see whether it can be, and is gone
                inside = map(int, (cgroup / "cgroup.procs").read_text().split())
                found.extend((cgroup, pid) for pid in inside if is_worker(pid))
        return bool(found)

    until(looked)
    ((cgroup, pid),) = found
    campaign.send_signal(signal.SIGINT)
    campaign.communicate(timeout=600)
    assert not cgroup.exists()
    assert gone(pid)


def test_real_stacks_load_with_mmap_off_and_say_so(
    harness, tmp_path, hf_interpreter, llamacpp_interpreter, own_processes
):
    path = written(tmp_path, "{stack: llamacpp, quant: q4_0}", "{stack: hf}", "{stack: hf, cache: static}")
    budget = min(2 << 30, free_memory_bytes() // 2)
    harness("run", path, "--set", f"memory_budget={budget}B")
    found = records_below(tmp_path / "results")
    assert len(found) == 3
    for each in found:
        assert each["outcome"] == "ok", each["reason"]
        assert each["options"]["mmap"] is each["loaded"]["options"]["mmap"] is False
        assert each["memory_budget"] == {"bytes": budget, "means": mechanism_here()}
        reasons = status(each)[1]
        assert not [reason for reason in reasons if "mmap" in reason]


@pytest.mark.parametrize("stack", ["hf", "bnb"])
def test_without_mmap_a_checkpoint_is_read_and_is_the_same_model(
    tmp_path, checkpoint, stack, own_interpreter
):
    """By the kernel's own list of what is mapped, and by the tokens."""
    interpreter = own_interpreter(stack)
    path, ids, facts = checkpoint("tiny-llama", tied=True), {}, {}
    for mmap in (True, False):
        worker = campaign_worker.Worker(request_of(path, stack, new=50, mmap=mmap), interpreter, tmp_path)
        ids[mmap] = []
        for event in worker.events(600):
            if isinstance(event, Loaded):
                facts[mmap] = event.facts
                maps = Path(f"/proc/{worker.pid}/maps").read_text()
                assert ("model.safetensors" in maps) is mmap
            elif isinstance(event, Tokens):
                ids[mmap] += event.ids
        assert facts[mmap]["options"]["mmap"] is mmap
        assert facts[mmap]["tied"] is True
    assert ids[True] == ids[False]
    assert len(ids[True]) == 50
    assert facts[True]["bytes_by_type"] == facts[False]["bytes_by_type"]


def test_weights_that_were_cast_are_not_said_to_be_mapped(worker, checkpoint, hf_interpreter):
    path = checkpoint("tiny-qwen2")
    for mmap, told in ((True, None), (False, False)):
        facts, _, _ = said(worker(request_of(path, dtype="fp32", mmap=mmap), hf_interpreter))
        assert facts["options"]["mmap"] is told


def test_packed_weights_are_read_too(worker, packed, autoawq_interpreter):
    path = packed("tiny-llama", "awq")
    for mmap in (True, False):
        request = request_of(path, "autoawq", kernel="torch", mmap=mmap)
        facts, _, _ = said(worker(request, autoawq_interpreter))
        assert facts["options"]["mmap"] is mmap


def test_a_stack_that_mapped_its_weights_within_a_budget_is_caught():
    asked = {"options__mmap": False, "loaded__options__mmap": True}
    state, reasons = status(record(**asked))
    assert (state, reasons) == ("invalid", ["mmap false was requested but true ran"])


def test_pressure_within_a_budget_is_the_workers_own_where_its_cgroup_tells(tmp_path):
    """The machine's counters include all processes, and are recorded separately."""
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    with MemoryLimit(64 << 20, "cgroup v2", cgroups=tmp_path) as memory_limit:
        folder = Path(memory_limit.prefix[-1]).parent
        seen = WorkerReport(memory_limit)
        for phase, refaults, stalled in (("generate", 5, 10), ("finish", 100_005, 3_000_010)):
            (folder / "memory.stat").write_text(f"workingset_refault_file {refaults}\n")
            (folder / "memory.pressure").write_text(f"some avg10=0.00 total={stalled}\nfull total=0\n")
            seen.add(Phase(phase, 0), lambda count, latency: None)
    assert seen.worker_pressure == {"workingset_refault_file": 100_000, "memory_stall_us": 3_000_000}
    assert seen.pressure["workingset_refault_file"] < 100_000
    state, reasons = status(record(conditions__worker_pressure=seen.worker_pressure))
    assert state == "invalid"
    assert any("evicted file pages were read again" in reason for reason in reasons)
    assert any("memory pressure stalled" in reason for reason in reasons)
