"""A worker's memory is bounded, by each means there is here, and nothing is left of the bound."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import shell_script, until
from test_launch import request_of

from harness.campaign import worker as campaign_worker
from harness.campaign.memory_limit import RLIMIT_DATA, MemoryLimit, mechanism_here
from harness.machine.cgroups import V2
from harness.machine.memory_spill import UNIFIED, spills
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from runners.protocol import Died, Done, Event, Failed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory can be bounded on Linux alone")
HERE = mechanism_here() if sys.platform == "linux" else ""
MIB = 1 << 20
with_cgroup = pytest.mark.skipif(HERE == RLIMIT_DATA, reason="needs a memory cgroup that can be written")


def folder_of(memory_limit: MemoryLimit) -> Path:
    return Path(memory_limit.prefix[-1]).parent


def last_event(folder: Path, interpreter: Interpreter, limit: MemoryLimit, **options: object) -> Event | Died:
    request = request_of(new_tokens=500, **options)
    return list(campaign_worker.run_job(request, interpreter, folder, 600, memory_limit=limit))[-1]


@pytest.mark.parametrize("mechanism", sorted({HERE, RLIMIT_DATA}))
def test_a_worker_that_takes_more_than_its_budget_is_out_of_memory(tmp_path, fake_interpreter, mechanism):
    with MemoryLimit(200 * MIB, mechanism) as memory_limit:
        last = last_event(tmp_path, fake_interpreter, memory_limit, leak_bytes_per_token=MIB)
    assert isinstance(last, Died | Failed), last
    assert last.outcome == "oom"
    if mechanism != RLIMIT_DATA:
        assert last.reason == f"killed at the memory budget of 0.21 GB ({mechanism})"
        assert not folder_of(memory_limit).exists()


@pytest.mark.parametrize("mechanism", sorted({HERE, RLIMIT_DATA}))
def test_a_worker_that_keeps_to_its_budget_knows_nothing_of_it(tmp_path, fake_interpreter, mechanism):
    with MemoryLimit(200 * MIB, mechanism) as memory_limit:
        last = last_event(tmp_path, fake_interpreter, memory_limit, leak_bytes_per_token=1000)
        assert isinstance(last, Done)
        assert memory_limit.oom_kills() == 0
        assert memory_limit.facts() == {"bytes": 200 * MIB, "means": mechanism}


@with_cgroup
def test_no_cgroup_is_left_of_a_worker_that_was_killed_or_of_an_interrupt(tmp_path, fake_interpreter):
    with MemoryLimit(200 * MIB) as memory_limit:
        last = last_event(tmp_path, fake_interpreter, memory_limit, die_at_token=9, die_by="kill")
        assert folder_of(memory_limit).is_dir()
    assert last == Died("crash", "killed by SIGKILL")  # by someone else
    assert not folder_of(memory_limit).exists()
    with pytest.raises(KeyboardInterrupt), MemoryLimit(200 * MIB) as memory_limit:
        raise KeyboardInterrupt
    assert not folder_of(memory_limit).exists()


@with_cgroup
def test_no_cgroup_is_left_of_an_interrupt_while_it_is_made(monkeypatch):
    made = []

    def interrupted(command: list[str], **_: object) -> None:
        made.append(Path(command[3]).parent)
        assert made[0].is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.campaign.memory_limit.subprocess.run", interrupted)
    with pytest.raises(KeyboardInterrupt), MemoryLimit(200 * MIB):
        pass
    assert not made[0].exists()


@with_cgroup
def test_a_kill_for_memory_elsewhere_is_not_taken_for_the_workers(tmp_path, fake_interpreter):
    worker = campaign_worker.Worker(request_of(hang_at_token=1), fake_interpreter, tmp_path)
    with MemoryLimit(30 * MIB) as elsewhere:
        hog = [*elsewhere.prefix, sys.executable, "-c", "bytearray(2**28)"]
        assert subprocess.run(hog).returncode == -signal.SIGKILL
        assert elsewhere.oom_kills()
    os.kill(worker.pid, signal.SIGKILL)
    *_, last = worker.events(600)
    assert last == Died("crash", "killed by SIGKILL")


@with_cgroup
def test_what_is_still_in_it_at_the_end_is_killed():
    with MemoryLimit(200 * MIB) as memory_limit:
        strays = subprocess.Popen([*memory_limit.prefix, "setsid", "sleep", "100"])
        until(lambda: str(strays.pid) in (folder_of(memory_limit) / "cgroup.procs").read_text())
    assert strays.wait(5) == -signal.SIGKILL
    assert not folder_of(memory_limit).exists()


@with_cgroup
def test_the_next_memory_limit_removes_what_a_killed_controller_left():
    script = (
        "import os, signal; from harness.campaign.memory_limit import MemoryLimit\n"
        "with MemoryLimit(1 << 28) as limit:\n"
        "    print(limit.prefix[-1], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    left = Path(killed.stdout.strip()).parent
    assert left.is_dir()
    with MemoryLimit(200 * MIB):
        assert not left.exists()


def made_up(root: Path, limits_children: str) -> Path:
    (root / "cgroup.controllers").write_text("cpu memory pids\n")
    (root / "cgroup.subtree_control").write_text(f"{limits_children}\n")
    return root


def test_a_cgroup_of_version_2_is_limited_joined_and_asked(tmp_path):
    root = made_up(tmp_path, "cpu memory")
    with MemoryLimit(3 * MIB, cgroups=root) as memory_limit:
        assert memory_limit.mechanism == str(V2)
        folder = folder_of(memory_limit)
        assert folder.parent == root
        assert folder.name.startswith(f"harness-{os.getpid()}-")
        assert (folder / "memory.max").read_text() == str(3 * MIB)
        assert (folder / "memory.swap.max").read_text() == "0"
        said = subprocess.run([*memory_limit.prefix, "sh", "-c", "echo $$"], capture_output=True, text=True)
        assert (folder / "cgroup.procs").read_text() == said.stdout  # joined before exec, by the same process
        assert (memory_limit.oom_kills(), memory_limit.pressure()) == (0, {})
        (folder / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\noom_group_kill 0\n")
        (folder / "memory.stat").write_text("anon 9\nworkingset_refault_anon 1\nworkingset_refault_file 5\n")
        (folder / "memory.pressure").write_text(
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=77\nfull avg10=0.00 avg60=0.00 total=5\n"
        )
        assert memory_limit.oom_kills() == 2
        refaults = {"workingset_refault_file": 5, "workingset_refault_anon": 1}
        assert memory_limit.pressure() == refaults | {"memory_stall_us": 77}
        for file in folder.iterdir():  # of a real one no file has to be removed
            file.unlink()
    assert not folder.exists()


def test_without_a_cgroup_that_limits_its_children_there_is_rlimit_data(tmp_path):
    with MemoryLimit(64 * MIB, cgroups=made_up(tmp_path, "cpu")) as memory_limit:
        assert memory_limit.mechanism == RLIMIT_DATA
        command = [*memory_limit.prefix, "sh", "-c", "ulimit -d"]
        limited = subprocess.run(command, capture_output=True, text=True)
        assert limited.stdout == "65536\n"
    with pytest.raises(OSError, match="cannot create a cgroup v2 here"):
        MemoryLimit(64 * MIB, str(V2), cgroups=tmp_path).__enter__()


def died_of(folder: Path, script: str, **limit: MemoryLimit) -> Died:
    """How a worker ends whose Python is this script."""
    python = shell_script(folder / "python", script)
    interpreter = Interpreter(stacks()["fake"].environments["cpu"], python, ())
    (died,) = campaign_worker.run_job(request_of(), interpreter, folder, 600, **limit)
    assert isinstance(died, Died)
    return died


ABORT = "kill -ABRT $$"
LAST_WORDS = [
    ("terminate called after throwing an instance of 'std::bad_alloc'", ABORT, "oom", "oom"),
    ("ggml_aligned_malloc: insufficient memory (attempted to allocate  44.89 MB)", ABORT, "crash", "oom"),
    ("MemoryError", "exit 1", "crash", "oom"),
    ("/some/where/ggml.c:7: GGML_ASSERT(a != b) failed", ABORT, "crash", "crash"),
]


@pytest.mark.parametrize(("words", "end", "alone", "fenced"), LAST_WORDS)
def test_a_worker_that_ends_for_want_of_memory_is_out_of_memory(tmp_path, words, end, alone, fenced):
    """C++'s own word always; a stack's only within a budget, where memory is what was short."""
    assert died_of(tmp_path, f'echo "{words}"\n{end}').outcome == alone
    with MemoryLimit(200 * MIB, RLIMIT_DATA) as memory_limit:
        died = died_of(tmp_path, f'echo "{words}"\n{end}', memory_limit=memory_limit)
    assert died.outcome == fenced
    assert words.removeprefix("/some/where/") in died.reason


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        ("CUDA error: out of memory", "oom", "out of GPU memory"),
        ("ROCm error: out of memory", "oom", "out of GPU memory"),
        ("CUDA error: an illegal memory access was encountered", "crash", "killed by SIGABRT"),
        ("CUDA error: the resource allocation failed", "crash", "killed by SIGABRT"),
    ],
)
def test_a_gpu_call_that_ends_llama_cpp_while_decoding_is_quoted_with_its_place(
    tmp_path, error, outcome, reason
):
    """As ggml_cuda_error prints it, after what was said about an allocation that was tried again."""
    script = f"""
echo "CUDA error: an earlier one"
echo "{error}"
echo "  current device: 0, in function alloc at /tmp/build/ggml/src/ggml-cuda/ggml-cuda.cu:512"
echo "  cuMemCreate(&handle, reserve_size, &prop, 0)"
echo "/tmp/build/ggml/src/ggml-cuda/ggml-cuda.cu:98: CUDA error"
{ABORT}"""
    place = "current device: 0, in function alloc at ggml-cuda.cu:512; "
    call = "cuMemCreate(&handle, reserve_size, &prop, 0)"
    assert died_of(tmp_path, script) == Died(outcome, f"{reason}: {error}; {place}{call}")


LINUX, WSL = "Linux version 6.8.0-generic", "Linux version 5.15.90.1-microsoft-standard-WSL2"


@pytest.mark.parametrize(
    ("family", "variables", "version", "system", "why"),
    [
        ("cpu", {UNIFIED: "1"}, WSL, "Linux", None),
        ("cuda", {}, LINUX, "Linux", None),
        ("cuda", {}, WSL, "Linux", "drivers for Windows"),
        ("cuda", {}, "", "Windows", "drivers for Windows"),
        ("cuda", {UNIFIED: "0"}, LINUX, "Linux", "is set"),
        ("hip", {}, LINUX, "Linux", None),
        ("hip", {"HSA_XNACK": "0"}, LINUX, "Linux", None),
        ("hip", {"HSA_XNACK": "1"}, LINUX, "Linux", "migrate"),
        ("hip", {UNIFIED: "1"}, LINUX, "Linux", "is set"),
        ("metal", {}, "", "Darwin", "uses system memory"),
        ("vulkan", {}, LINUX, "Linux", "may move"),
    ],
)
def test_where_memory_of_a_device_may_spill_it_is_said_why(family, variables, version, system, why):
    found = spills(family, variables, version, system)
    assert found is None if why is None else why in str(found)


def test_a_limit_that_the_machine_ignores_is_refused(tmp_path, monkeypatch):
    """As qemu-user does it: no error, and no limit."""
    shell = shell_script(tmp_path / "sh", "echo unlimited")
    monkeypatch.setattr("harness.campaign.memory_limit.LIMITED", [str(shell)])
    with pytest.raises(OSError, match="RLIMIT_DATA set to 1024 KiB, but it stays unlimited"):
        MemoryLimit(1 << 20, RLIMIT_DATA).__enter__()
