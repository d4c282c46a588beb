"""One worker: every end is an event, and no process or file is left behind."""

import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import gone, request_for, shell_script

from harness.campaign import peak_rates
from harness.campaign import worker as campaign_worker
from harness.stacks.adopted import Interpreter
from harness.stacks.header import runners_folder, stacks
from runners.protocol import Died, Done, Loaded, Phase, Request, Tokens, holds

WARMUP = {"window_tokens": 4, "max_windows": 5, "tolerance": 0.5}


def request_of(new_tokens: int = 40, **options: object) -> Request:
    workload = {"kind": "decode", "prompt": [1, 2, 3], "new_tokens": new_tokens, "warmup": WARMUP}
    return request_for("fake", "generate", workload, **{"n_ctx": 100} | options)


def test_a_worker_says_load_tokens_done(worker, fake_interpreter):
    events = worker(request_of(), fake_interpreter)
    assert isinstance(events[-1], Done)
    phases = ["import", "load", "warmup", "generate", "finish", "control"]
    assert [e.name for e in events if isinstance(e, Phase) and ":" not in e.name] == phases
    assert sum(isinstance(e, Loaded) for e in events) == 1
    assert sum(len(e.ids) for e in events if isinstance(e, Tokens)) == 40


def test_a_worker_says_how_long_its_warm_up_may_take(worker, fake_interpreter):
    events = worker(request_of(B_ms=400.0), fake_interpreter)
    begun, *later = [e.name for e in events if isinstance(e, Phase) and e.name.startswith("warmup: ")]
    assert begun == "warmup: until the speed is steady, at most 5 times 4 tokens"
    assert later[-1] < begun  # it counts down


def test_a_worker_stands_still_at_a_moment_until_it_was_seen_to(tmp_path, fake_interpreter):
    request = request_of(clock="real")
    worker, seen_to_ns, waited = campaign_worker.Worker(request, fake_interpreter, tmp_path), 0, []
    for event in worker.events(600):
        if isinstance(event, Phase) and waited:
            assert event.t_ns > seen_to_ns
        if holds(event):
            time.sleep(0.05)
            seen_to_ns = time.perf_counter_ns()
            waited.append(getattr(event, "name", "loaded"))
    assert waited == ["load", "loaded", "generate", "finish"]
    assert isinstance(event, Done)


def test_the_first_tokens_are_decoded_again_after_the_timed_part(worker, fake_interpreter):
    def windows(**options: Any) -> tuple[list[int], list[int]]:
        request = request_of(new_tokens=800, B_ms=2.0, W_tokens_per_ms=100.0, **options)
        events = worker(request, fake_interpreter)
        stamps = [t for e in events if isinstance(e, Tokens) for t in e.t_ns]
        done = events[-1].facts["control"]
        first = [b - a for a, b in itertools.pairwise(stamps)][: len(done["latency_ns"])]
        return first, done["latency_ns"]

    before, after = windows()
    assert len(after) == 99  # an eighth, without the prefill
    assert statistics.median(after) == pytest.approx(statistics.median(before), rel=1e-3)
    before, after = windows(drift_per_1000=0.1)
    assert statistics.median(after) / statistics.median(before) == pytest.approx(1.08, abs=0.005)
    assert len(windows(noise=0.3)[1]) == 199  # noisy: twice as long


def test_stamps_are_the_latency_the_fake_was_told(worker, fake_interpreter):
    events = worker(request_of(B_ms=2.0, prefill_ms=10.0), fake_interpreter)
    stamps = [t for e in events if isinstance(e, Tokens) for t in e.t_ns]
    late = [stamp - (10e6 + 2e6 * k) for k, stamp in enumerate(stamps)]
    assert 0 <= min(late) <= max(late) < 1000  # of virtual time, whatever else runs


@pytest.mark.parametrize(
    ("options", "outcome", "reason"),
    [
        ({"die_at_token": 20, "die_by": "kill"}, "crash", "killed by SIGKILL"),
        ({"die_at_token": 20, "die_by": "exit"}, "crash", "exited with 7 without Done or Failed"),
        ({"garbage_at_token": 20}, "error", "worker protocol error"),
    ],
)
def test_every_death_is_an_event_with_its_reason(worker, fake_interpreter, options, outcome, reason):
    last = worker(request_of(**options), fake_interpreter)[-1]
    assert isinstance(last, Died)
    assert last.outcome == outcome
    assert reason in last.reason


def test_a_job_that_fails_tells_the_worker_s_own_reason(tmp_path, fake_interpreter):
    request = Request("generate_all", "fake", "cpu", {})
    events = campaign_worker.run_job(request, fake_interpreter, tmp_path, 600)
    with pytest.raises(campaign_worker.JobFailed, match="stack fake has no job 'generate_all'"):
        campaign_worker.facts_of(events)


def test_a_stack_without_probes_measures_no_peak(fake_interpreter):
    with pytest.raises(peak_rates.NotMeasured, match="has no job 'probe'"):
        peak_rates.through_stack(fake_interpreter, "cpu", 1, ["matrix"])


def test_a_hang_is_stopped_and_the_tokens_before_it_are_kept(worker, fake_interpreter):
    events = worker(request_of(new_tokens=5000, hang_at_token=3000), fake_interpreter, timeout_s=10)
    assert events[-1] == Died("timeout", "not finished within 10 s; stopped in phase generate")
    assert sum(len(e.ids) for e in events if isinstance(e, Tokens)) >= 2560


def test_a_worker_dies_with_its_controller_and_its_children_too(tmp_path, fake_interpreter, cache):
    with_a_child = f'sleep 3600 & echo $! >{tmp_path}/child\nexec {fake_interpreter.python} "$@"'
    python = shell_script(tmp_path / "python", with_a_child)
    script = f"""
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from harness.campaign import worker as launch
from harness.stacks import build
from harness.stacks.header import stacks
from test_launch import request_of
interpreter = replace(build.find(stacks()["fake"].environments["cpu"]), python=Path({str(python)!r}))
worker = launch.Worker(request_of(hang_at_token=1), interpreter, Path({str(tmp_path)!r}))
for event in worker.events(1000):
    print(worker.pid, flush=True)
"""
    controller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with controller.stdout:
        pid, child = int(controller.stdout.readline()), int((tmp_path / "child").read_text())
        assert psutil.pid_exists(pid)
        assert psutil.pid_exists(child)
        controller.send_signal(signal.SIGKILL)
        controller.wait()
    assert gone(pid)
    assert gone(child)


def test_a_worker_that_was_reaped_before_it_was_noted_has_ended(tmp_path, fake_interpreter):
    """As where Ctrl-C comes between the two."""
    worker = campaign_worker.Worker(request_of(hang_at_token=1), fake_interpreter, tmp_path)
    os.kill(worker.pid, signal.SIGKILL)
    os.waitpid(worker.pid, 0)
    worker.stop()
    assert worker.exit_status is None


def test_the_time_in_which_the_controller_was_stopped_does_not_count(tmp_path):
    script = """
import os, signal, time
from harness.campaign import worker as launch
launch.WAIT_S = 0.001
lines = launch.lines(0, 1.0)
print(next(lines), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
print(*lines, flush=True)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], bufsize=0, **pipes) as controller:
        controller.stdin.write(b"begins\n")
        os.waitpid(controller.pid, os.WUNTRACED)
        time.sleep(1.5)
        controller.stdin.write(b"is done\n")
        controller.stdin.close()
        controller.send_signal(signal.SIGCONT)
        assert controller.stdout.read() == b"b'begins\\n'\nb'is done\\n'\n"


def test_stopping_kills_the_whole_group_and_reaps_it(tmp_path, fake_interpreter):
    worker = campaign_worker.Worker(request_of(hang_at_token=1), fake_interpreter, tmp_path)
    worker.stop()
    assert not psutil.pid_exists(worker.pid)
    worker.stop()  # harmless


def test_the_worker_cannot_import_its_own_stacks_by_bare_name(tmp_path, fake_interpreter):
    """`import fake` inside a library must not find runners/stacks/fake.py."""
    ours = [str(runners_folder()), str(runners_folder().parent)]
    code = (
        "import sys, runpy; sys.argv = ['x']\n"
        f"sys.path.insert(0, {ours[0]!r})\n"
        f"runpy.run_path({str(runners_folder() / '__main__.py')!r}, run_name='not main')\n"
        f"assert not [p for p in sys.path if p in {ours!r}], sys.path\n"
        "import runners.stacks.fake\n"
        "try:\n    import fake\nexcept ImportError:\n    print('good')\n"
    )
    command = [fake_interpreter.python, "-I", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout == "good\n"


def test_a_worker_finds_the_commands_of_its_environment_first(tmp_path, monkeypatch):
    """torch compiles a kernel with the ninja in its own environment."""
    python = shell_script(tmp_path / "bin" / "python", 'echo "$PATH"')
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    interpreter = Interpreter(stacks()["fake"].environments["cpu"], python, ())
    list(campaign_worker.run_job(request_of(), interpreter, tmp_path, 600))
    assert (tmp_path / "worker.log").read_text() == f"{python.parent}:/usr/bin:/bin\n"


def test_the_worker_sees_one_device_and_the_threads_asked_for(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    on_cpu = campaign_worker.worker_variables("cpu", 3)
    assert on_cpu["CUDA_VISIBLE_DEVICES"] == ""
    assert on_cpu["OMP_NUM_THREADS"] == "3"
    assert "PYTHONPATH" not in on_cpu
    assert campaign_worker.worker_variables("GPU-1", 3)["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in campaign_worker.worker_variables("hip", 3)
