"""Shared by all tests: the real command, real workers, a cache of their own. No mocks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, Phase, settings

from harness import launch
from harness.cache import cache_folder
from harness.envs import build
from harness.envs.build import Interpreter
from harness.envs.header import stacks
from harness.theory.families import SHAPES
from runners.protocol import Died, Event, Request

HARNESS = str(Path(sys.executable).parent / "harness")

# Properties: a file of a test's folder is written anew by every example, so one folder serves them all.
_PROPERTIES = settings(
    deadline=None,
    derandomize=False,
    print_blob=True,
    phases=set(Phase) - {Phase.explain},  # minutes, for a comment on each argument
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("fast", _PROPERTIES, max_examples=50)
settings.register_profile("all", _PROPERTIES, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache for this session: its own weights and locks, the user's environments (they take minutes)."""
    folder = tmp_path_factory.mktemp("cache")
    environments = cache_folder() / "envs"
    environments.mkdir(parents=True, exist_ok=True)
    (folder / "envs").symlink_to(environments)
    before = os.environ.get("HARNESS_CACHE")
    os.environ["HARNESS_CACHE"] = str(folder)
    yield folder
    os.environ.pop("HARNESS_CACHE")
    if before is not None:
        os.environ["HARNESS_CACHE"] = before
    shutil.rmtree(folder / "weights", ignore_errors=True)  # gigabytes


@pytest.fixture(autouse=True)
def _own_cache(cache: Path) -> None:
    """Every test uses the session's cache."""


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def harness(tmp_path: Path) -> Callable[..., Ran]:
    """Runs the real command in the test's folder and returns what it said."""

    def run(*arguments: str | Path, **variables: str) -> Ran:
        command = [HARNESS, *map(str, arguments)]
        ran = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | variables, timeout=900
        )
        assert "Traceback" not in ran.stderr, ran.stderr
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    return run


@pytest.fixture
def background(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the real command beside the test, and kills it when the test ends, passed or failed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path) -> subprocess.Popen[str]:
        command = [HARNESS, *map(str, arguments)]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, cwd=tmp_path, text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config of fake variants: `config({"B_ms": 1.0}, {...}, repeats=2)`; protocol keys by name."""

    def write(*variants: dict[str, Any], name: str = "fake", **protocol: Any) -> Path:
        settings = {"new_tokens": 40, "repeats": 1, "timeout_s": 20, "measure_bandwidth": False} | protocol
        rows = [{"stack": "fake", "name": f"v{i}"} | variant for i, variant in enumerate(variants)]
        experiment = {"protocol": settings, "models": [{"shape": "tiny-qwen2"}], "variants": rows}
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(experiment))  # JSON is YAML
        return path

    return write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk of a given size: `small_disk("200k")`. Skips where that is not allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = False

    def mount(size: str) -> Path:
        nonlocal mounted
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
        mounted = bool(shutil.which("mount")) and os.geteuid() == 0 and not subprocess.run(command).returncode
        if not mounted:
            pytest.skip("needs root, to mount a small disk")
        return disk

    yield mount
    if mounted:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.fixture(scope="session")
def fake_interpreter(cache: Path) -> Interpreter:
    return build.create(stacks()["fake"].environments["cpu"], lambda line: None)


def _interpreter_of(stack: str) -> Any:
    """A fixture: a stack's real environment for CPUs."""

    @pytest.fixture(scope="session", name=f"{stack}_interpreter")
    def made(cache: Path) -> Interpreter:
        return build.create(stacks()[stack].environments["cpu"], print)

    return made


llamacpp_interpreter = _interpreter_of("llamacpp")
hf_interpreter = _interpreter_of("hf")
bnb_interpreter = _interpreter_of("bnb")
gptq_interpreter = _interpreter_of("gptq")
autoawq_interpreter = _interpreter_of("autoawq")
gptqm_interpreter = _interpreter_of("gptqm")


@pytest.fixture(scope="session")
def packed(
    checkpoint: Callable[..., Path], hf_interpreter: Interpreter, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """The folder of a synthetic checkpoint, packed, made once a session: `packed("tiny-llama", "awq")`;
    `unpack` is what it is in 16 bits."""
    root = tmp_path_factory.mktemp("packed")

    def made(name: str, format: str, bits: int = 4, unpack: bool = False, **changed: Any) -> Path:
        source = checkpoint(name, **changed)
        target = root / f"{source.name}-{format}{bits}"
        if not target.exists():
            run("pack", source, target, format=format, bits=bits, group_size=128)
        whole = target.with_name(f"{target.name}-unpacked")
        if unpack and not whole.exists():
            run("unpack", target, whole)
        return whole if unpack else target

    def run(job: str, source: Path, target: Path, **options: Any) -> None:
        files = {"source": str(source), "target": str(target)}
        model = {"name": "m", "path": str(source), "shape": None}
        request = Request(job, "hf", "cpu", model, options | {"threads": 1}, files=files)
        launch.facts_of(launch.run_job(request, hf_interpreter, root, 300))

    return made


@pytest.fixture(scope="session")
def checkpoint(hf_interpreter: Interpreter, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a synthetic checkpoint, made once a session: `checkpoint("tiny-llama", tied=True)`."""
    root = tmp_path_factory.mktemp("checkpoints")

    def made(name: str, **changed: Any) -> Path:
        shape = replace(SHAPES[name], **changed)
        target = root / f"{name}-{hash(shape)}"
        if not target.exists():
            model = {"name": name, "path": None, "shape": asdict(shape)}
            options, files = {"seed": 1, "threads": 1}, {"target": str(target)}
            request = Request("synthesize", "hf", "cpu", model, options, files=files)
            launch.facts_of(launch.run_job(request, hf_interpreter, root, 300))
        return target

    return made


@pytest.fixture
def worker(tmp_path: Path) -> Callable[..., list[Event | Died]]:
    """Runs one Request in an interpreter and returns everything the worker said."""

    def run(request: Request, interpreter: Interpreter, timeout_s: float = 300) -> list[Event | Died]:
        return list(launch.run_job(request, interpreter, tmp_path, timeout_s, threads=2))

    return run


@pytest.fixture
def job(llamacpp_interpreter: Interpreter, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs one llama.cpp job, `job(job="synthesize", model=..., files=...)`, and returns the facts of Done.

    Raises launch.JobFailed with the reason when it fails.
    """

    def run(**fields: Any) -> dict[str, Any]:
        given = {"stack": "llamacpp", "device": "cpu", "model": {"name": "m", "path": None, "shape": None}}
        request = Request(**(given | fields))
        return launch.facts_of(launch.run_job(request, llamacpp_interpreter, tmp_path, 900, threads=2))

    return run


def gone(pid: int) -> bool:
    """Whether a process ends within 5 s. One whose parent ended first is a zombie until init reaps it."""
    for _ in range(100):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
                continue
        return True
    return False


def told(interpreter: Interpreter, code: str) -> list[str]:
    """The lines that code prints, with the runners at hand."""
    root, first = Path(__file__).parent.parent, "import sys; sys.path.insert(0, sys.argv[1])\n"
    command = [interpreter.python, "-c", first + code, root]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
