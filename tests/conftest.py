"""Shared by all tests: the real command, real workers, a cache of their own. No mocks."""

import contextlib
import copy
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import coverage
import forked
import nvml_cards
import psutil
import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings
from made_nights import run_once as run_once
from raylets import nodes as nodes
from raylets import own_cache as own_cache
from small_checkpoints import with_layout

from harness import cli, machine, records
from harness.analysis.verdicts import USABLE
from harness.base.files import cache_folder, made
from harness.base.variables import recorded
from harness.campaign import worker as campaign_worker
from harness.records import Stored
from harness.stacks import adopted, build
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from harness.theory.decoder import dense_fields, dense_like
from harness.theory.hf_config import SHAPES
from harness.theory.packed_sizes import FORMATS
from runners.protocol import Died, Event, Failed, Request

# Models that this machine has are not found by name, and its Ollama is not asked.
os.environ |= {"OLLAMA_HOST": "127.0.0.1:9", "OLLAMA_MODELS": "/nowhere"}
os.environ["COLUMNS"] = "100"  # else tables and sentences are as wide as the terminal that the tests run in
ROOT = Path(__file__).parent.parent
STUDY = ROOT / "results" / "published" / "rtx4090-qwen1.5"
STUDY_TABLES = ROOT / "harness" / "data" / "study_tables"
# Later ones use the weights of those before.
REAL_STACKS = sorted(
    (name for name, header in stacks().items() if header.formats),
    key=lambda name: (
        ["gguf", "hf", *FORMATS].index(stacks()[name].formats[0]),
        stacks()[name].reference is None,
    ),
)
ENVIRONMENTS = cache_folder() / "envs"
HARNESS = str(Path(sys.executable).parent / "harness")
LONG_TEST_S = 1800  # thousands of examples, or a stack, on a machine ten times as busy

# Properties: a file of a test's folder is written anew by every example, so one folder serves them all.
_PROPERTIES = settings(
    deadline=None,
    derandomize=True,  # the same examples in each run: what new ones find is no fault of the change at hand
    print_blob=True,
    phases=set(Phase) - {Phase.explain},  # minutes, for a comment on each argument
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("fast", _PROPERTIES, max_examples=50)
settings.register_profile("all", _PROPERTIES, max_examples=2000)
settings.register_profile("random", _PROPERTIES, max_examples=2000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """A function by its name: its address differs in each process."""
    return getattr(val, "__qualname__", None) if callable(val) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs a real stack, which its fixtures and parameters say, and keep each stack's tests in one
    process: it has the stack's libraries loaded."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        asked = {parameters.params.get("stack")} if parameters else set()
        asked |= {name.removesuffix("_interpreter") for name in getattr(item, "fixturenames", [])}
        used = [stack for stack in REAL_STACKS if stack in asked]
        if used:
            item.add_marker(pytest.mark.xdist_group(used[-1]))
        if used or is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.timeout(LONG_TEST_S), append=False)
        if not item.get_closest_marker("first_tier"):
            for stack in used:
                item.add_marker(pytest.mark.stack(name=stack))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache for this session: its own weights and locks, the user's environments (they take minutes). Those
    with torch are forked ones: see `forked`."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "envs").mkdir()
    servers = []
    for real in (path.parent for path in ENVIRONMENTS.glob("*/complete.json")):
        stack, here = real.name.partition("-")[0], folder / "envs" / real.name
        if stack in forked.IMPORTS:
            servers.append(forked.Server(real, stack, here))
        elif stack == "fake" and "COVERAGE_PROCESS_CONFIG" in os.environ:
            shutil.copytree(real, here, symlinks=True)
            for packages in here.glob("lib/python*/site-packages"):
                ours = Path(coverage.__file__).parent.parent
                begin = "import coverage; coverage.process_startup()"
                (packages / "covered.pth").write_text(
                    f"import sys; sys.path.append({str(ours)!r}); {begin}\n"
                )
        else:
            here.symlink_to(real)
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("HARNESS_CACHE", str(folder))
        (shared := folder / "shared").mkdir()
        shared.chmod(0o1777)
        variables.setenv("HARNESS_LOCKS", str(shared))  # campaigns of other processes and users go on
        yield folder
    for server in servers:
        server.stop()
    shutil.rmtree(folder / "weights", ignore_errors=True)  # gigabytes


@pytest.fixture(autouse=True)
def _own_cache(cache: Path) -> Iterator[None]:
    """Every test uses the session's cache, and leaves no machine that it made up to the next."""
    yield
    look_anew()


def look_anew() -> None:
    """Forget what a process learns once of its machine."""
    for known in (machine.facts, adopted.description):
        known.cache_clear()


@pytest.fixture
def own_processes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this test are no forks, so their memory is their own."""
    folder = cache.with_name(f"{cache.name}-own")
    if not folder.exists():
        folder.mkdir()
        (folder / "envs").symlink_to(ENVIRONMENTS)
        (folder / "weights").symlink_to(made(cache / "weights"))
    monkeypatch.setenv("HARNESS_CACHE", str(folder))


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The output without its line breaks and columns."""
        return " ".join(self.out.split())

    @property
    def json(self) -> Any:
        """The output, strictly JSON: without NaN and infinity."""
        assert self.out, self.err
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Calls the command's main() in the test's folder and returns what it printed. The workers it starts are
    real processes."""

    def run(*arguments: str | Path, **variables: str) -> Ran:
        look_anew()
        on_stop = {number: signal.getsignal(number) for number in cli.STOPS}
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as place:
            place.chdir(tmp_path)
            for name, value in variables.items():
                place.setenv(name, value)
            try:
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    code = cli.main([*map(str, arguments)])
            except SystemExit as end:  # argparse's
                code = int(end.code or 0)
            finally:
                for number, handler in on_stop.items():
                    signal.signal(number, handler)
        return Ran(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Ran]:
    """Runs the installed command as a separate process in the test's folder."""

    def run(*arguments: str | Path, **variables: str) -> Ran:
        whole = [HARNESS, *map(str, arguments)]
        ran = subprocess.run(
            whole, capture_output=True, text=True, cwd=tmp_path, env=os.environ | variables, timeout=900
        )
        assert "Traceback" not in ran.stderr, ran.stderr
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    return run


@pytest.fixture
def vcgencmd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a stand-in `vcgencmd` before all else on PATH, `vcgencmd("echo throttled=0x0")`, or another in its
    place: a shell script that gets the arguments. They are in the file returned, a line for each call."""
    called = tmp_path / "called"

    def put(script: str) -> Path:
        program = shell_script(tmp_path / "bin" / "vcgencmd", f'echo "$*" >> {called}\n{script}')
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return called

    return put


def interruptible() -> None:
    """For the start of a process that a test interrupts: where signals are ignored, as under nohup, it must
    not inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Has pynvml answer for these cards: `nvml(card("GPU-1", ...), FORBIDDEN)`."""
    return partial(nvml_cards.install, monkeypatch)


@pytest.fixture
def background(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the real command in the background, and kills it when the test ends, passed or failed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path, stdout: Any = subprocess.DEVNULL) -> subprocess.Popen[str]:
        command = [HARNESS, *map(str, arguments)]
        pipes = {"stdout": stdout, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, cwd=tmp_path, text=True, preexec_fn=interruptible, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def write_config(path: Path, variants: list[dict[str, Any]], protocol: dict[str, Any], keys: Any) -> Path:
    """A config of these variants; `keys`: of the protocol, but for `model` and what stands at the top."""
    models = [keys.pop("model", {"shape": "tiny-qwen2"})]
    experiment: dict[str, Any] = {"models": models, "variants": variants}
    experiment |= {key: keys.pop(key) for key in ("device", "gpu", "models", "workloads") if key in keys}
    path.write_text(json.dumps({"protocol": protocol | keys} | experiment))  # JSON is YAML
    return path


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config of fake variants: `config({"B_ms": 1.0}, {...}, repeats=2)`."""

    def write(*variants: dict[str, Any], name: str = "fake", **keys: Any) -> Path:
        protocol = {"new_tokens": 40, "repeats": 1, "timeout_s": 60, "measure_bandwidth": False}
        protocol |= {"retry_disturbed": 0}  # a busy machine must not add records
        protocol |= {"warmup": {"at_least_s": 0}}
        rows = [{"stack": "fake", "name": f"v{i}"} | variant for i, variant in enumerate(variants)]
        return write_config(tmp_path / f"{name}.yaml", rows, protocol, keys)

    return write


@pytest.fixture
def real_config(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config of real variants: `real_config({"stack": "hf"}, model={...}, new_tokens=24)`."""

    def write(*variants: dict[str, Any], name: str = "real", **keys: Any) -> Path:
        # A window of a tiny model is a few ms: on a busy machine two rarely agree within 2%.
        # One thread: two that wait for each other on a busy machine may take seconds for a token.
        protocol = {"new_tokens": 40, "repeats": 1, "threads": 1, "timeout_s": 900, "retry_disturbed": 0}
        protocol |= {"measure_bandwidth": False, "warmup": {"tolerance": 0.9}}
        return write_config(tmp_path / f"{name}.yaml", [*variants], protocol, keys)

    return write


@pytest.fixture
def scoring(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config of scores: `scoring({"weights": "austen-4m"}, {"stack": "hf"}, chunks=2)`."""

    def write(model: dict[str, Any], *variants: dict[str, Any], **workload: Any) -> Path:
        protocol = {"threads": 1, "measure_bandwidth": False, "timeout_s": 900}
        workloads = [{"kind": "quality", "n_ctx": 64, "chunks": 4} | workload]
        keys = {"model": model, "workloads": workloads}
        return write_config(tmp_path / "quality.yaml", [*variants], protocol, keys)

    return write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk of a given size: `small_disk("200k")`. Skips where that is not allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = False

    def mount(size: str) -> Path:
        nonlocal mounted
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", str(disk)]
        mounted = bool(shutil.which("mount")) and os.geteuid() == 0 and not subprocess.run(command).returncode
        if not mounted:
            pytest.skip("needs root, to mount a small disk")
        return disk

    yield mount
    if mounted:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.fixture
def own_interpreter(own_processes: None) -> Callable[[str], Interpreter]:
    """The environment of a stack whose workers are no forks: `own_interpreter("hf")`."""

    return built


def built(stack: str) -> Interpreter:
    """A stack's environment for CPUs; skips where there is none."""
    if found := build.find(stacks()[stack].environments["cpu"]):
        return found
    pytest.skip(f"the environment of {stack} is not built: harness env create {stack}")


@pytest.fixture(scope="session")
def fake_interpreter(cache: Path) -> Interpreter:
    return build.create(stacks()["fake"].environments["cpu"], lambda line: None)


def _interpreter_of(stack: str) -> Any:
    """A fixture: a stack's real environment for CPUs."""

    @pytest.fixture(scope="session", name=f"{stack}_interpreter")
    def found(cache: Path) -> Interpreter:
        return built(stack)

    return found


globals().update({f"{stack}_interpreter": _interpreter_of(stack) for stack in REAL_STACKS})


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
        campaign_worker.facts_of(campaign_worker.run_job(request, hf_interpreter, root, 900))

    return made


@pytest.fixture(scope="session")
def checkpoint(hf_interpreter: Interpreter, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a synthetic checkpoint, made once a session: `checkpoint("tiny-llama", tied=True)`."""
    root = tmp_path_factory.mktemp("checkpoints")

    def made(name: str, **changed: Any) -> Path:
        shape = dense_like(SHAPES[name], **changed)
        target = root / f"{name}-{sha256(repr(shape).encode()).hexdigest()[:16]}"
        if not target.exists():
            model = {"name": name, "path": None, "shape": dense_fields(shape)}
            options, files = {"seed": 1, "threads": 1}, {"target": str(target)}
            request = with_layout(Request("synthesize", "hf", "cpu", model, options, files=files))
            campaign_worker.facts_of(campaign_worker.run_job(request, hf_interpreter, root, 900))
        return target

    return made


@pytest.fixture(scope="session")
def answers() -> dict[str, list[Event | Died]]:
    """What workers of real stacks have answered in this session, by interpreter and Request."""
    return {}


@pytest.fixture
def worker(tmp_path: Path, answers: dict[str, list[Event | Died]]) -> Callable[..., list[Event | Died]]:
    """Runs one Request in an interpreter and returns all events of the worker. A real stack is asked the same
    once a session, unless `fresh`."""

    def run(
        request: Request, interpreter: Interpreter, timeout_s: float = 900, fresh: bool = False
    ) -> list[Event | Died]:
        variables = recorded(os.environ)
        key = json.dumps([str(interpreter.python), asdict(request), variables])
        if request.stack not in REAL_STACKS or request.files or fresh:
            return list(campaign_worker.run_job(request, interpreter, tmp_path, timeout_s, threads=2))
        if key not in answers:
            answers[key] = list(campaign_worker.run_job(request, interpreter, tmp_path, timeout_s, threads=2))
        return copy.deepcopy(answers[key])

    return run


@pytest.fixture
def job(llamacpp_interpreter: Interpreter, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs one llama.cpp job, `job(job="synthesize", model=..., files=...)`, and returns the facts of Done.

    Raises worker.JobFailed with the reason when it fails.
    """

    def run(**fields: Any) -> dict[str, Any]:
        given = {"stack": "llamacpp", "device": "cpu", "model": {"name": "m", "path": None, "shape": None}}
        request = with_layout(Request(**(given | fields)))
        return campaign_worker.facts_of(
            campaign_worker.run_job(request, llamacpp_interpreter, tmp_path, 900, threads=2)
        )

    return run


def request_for(
    stack: str, job: str, workload: dict[str, Any], path: Path | None = None, **options: object
) -> Request:
    """What a worker is asked, with one thread and the stack's default options but for these."""
    defaults = {name: option.default for name, option in stacks()[stack].options.items()} | {"threads": 1}
    model = {"name": "m", "path": path and str(path), "shape": None}
    return Request(job, stack, "cpu", model, defaults | options, [workload])


def refused(ran: Ran, said: str, code: int = 2) -> None:
    """The command printed one sentence, and nothing else."""
    assert (ran.code, ran.out) == (code, ""), ran
    assert said in ran.err
    assert ran.err.count("\n") == 1, ran.err


def settled(row: dict[str, Any], undisturbed: str = "ok") -> str:
    """A row's status, or what it is without the machine's disturbance: a test of a real stack cannot rule
    that out."""
    return undisturbed if row.get("disturbed") else str(row["status"])


def failures(rows: Iterable[dict[str, Any]]) -> list[tuple[str, str, list[str]]]:
    """The rows that are neither ok nor disturbed by the machine alone: cell, status, reasons."""
    return [(row["cell"], row["status"], row["reasons"]) for row in rows if settled(row) not in USABLE]


def failed(events: list[Event | Died]) -> Failed:
    """The end of a worker that failed in good order."""
    last = events[-1]
    assert isinstance(last, Failed), last
    return last


def until(true: Callable[[], object], seconds: float = 120) -> None:
    """Waits; a file or process that is not there yet is not true yet."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if true():
                return
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def shell_script(path: Path, text: str) -> Path:
    """A program that stands in for another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def stored_in(folder: Path) -> list[Stored]:
    """All records in a folder of results, none of which is damaged."""
    return list(records.records(folder, lambda damage: pytest.fail(str(damage))))


@pytest.fixture(scope="session")
def published() -> Any:
    """The published study with its series, read once a session."""
    from harness.dataset.study import load_study, with_series  # here, for most processes need none of it

    return with_series(load_study(stored_in(STUDY)), "x")


def records_below(folder: Path) -> list[dict[str, Any]]:
    """The records in a folder of results, in the order of their paths."""
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("record.json"))]


def gone(pid: int) -> bool:
    """Whether a process ends within a minute. One whose parent ended first is a zombie until it is reaped."""
    for _ in range(1200):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
                continue
        return True
    return False


def told(interpreter: Interpreter, code: str) -> list[str]:
    """The lines that code prints, with the runners at hand."""
    first = "import sys; sys.path.insert(0, sys.argv[1])\n"
    command = [interpreter.python, "-c", first + code, ROOT]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """Sets how large a file may get; a write beyond it fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
