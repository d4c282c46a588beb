"""Is our decode loop as fast as llama.cpp's own? ms per token of ours against llama-bench's, as a ratio.

Same GGUF file, same libraries, same threads and settings: llama-bench is built from the source that
llama-cpp-python's sdist carries, and run with the environment's own libllama and libggml. Each pair runs
both, in alternating order, in fresh processes. Target: within 2%, our argmax apart.

    .venv/bin/python benchmarks/fidelity.py [--pairs 5] [--threads 2] [--flash-attn] [--model FILE.gguf]

The first run downloads the sdist and builds llama-bench (minutes); both stay in the harness's cache folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.stacks import build
from harness.stacks.build import Interpreter
from harness.stacks.header import Environment, stacks
from harness.system.cache import cache_folder, exclusive
from harness.worker import launch
from runners.protocol import Died, Done, Failed, Loaded, Request, Tokens

TOKENS = 128
TARGET = 0.02
RUN_TIMEOUT_S = 180
PACKAGE = "llama-cpp-python"
HARNESS = Path(sys.executable).parent / "harness"
FOLDER = cache_folder() / "benchmarks"
WARMUP = {"window_tokens": 16, "max_windows": 20, "tolerance": 0.02}  # the protocol's


@dataclass(frozen=True)
class Ours:
    """One run of our worker over TOKENS tokens, ms per token: as stamped, and the argmax within it."""

    total_ms: float
    argmax_ms: float
    facts: dict[str, Any]
    libraries: dict[str, str]

    @property
    def ms(self) -> float:
        return self.total_ms - self.argmax_ms


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flash-attn", action="store_true")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: synthetic qwen1.5-0.5b q4_0)")
    arguments = parser.parse_args()

    environment = stacks()["llamacpp"].environments["cpu"]
    interpreter = build.create(environment, say)
    libraries = library_folder(interpreter)
    bench = llama_bench(environment)
    variables = launch.worker_variables("cpu", arguments.threads)
    # Goes before the RUNPATH that the build left in llama-bench, so the environment's own files are loaded.
    bench_variables = variables | {"LD_LIBRARY_PATH": str(libraries)}
    model = arguments.model or synthetic_model()
    print(f"model {model}\nllama-bench {bench}")

    theirs: list[float] = []
    ours: list[Ours] = []
    resolved: dict[str, Any] = {}
    for pair in range(arguments.pairs):
        busy = psutil.cpu_percent(interval=1.0)  # by others: nothing of ours runs now
        for which in ("bench", "ours") if pair % 2 == 0 else ("ours", "bench"):
            if which == "bench":
                resolved = run_bench(bench, model, arguments, bench_variables)
                theirs.append(resolved["samples_ns"][0] / TOKENS / 1e6)
            else:
                ours.append(run_ours(interpreter, model, arguments))
        mine = ours[-1]
        print(
            f"pair {pair + 1}: llama-bench {theirs[-1]:.3f} ms/token, ours {mine.ms:.3f} + argmax "
            f"{mine.argmax_ms:.3f}, ratio {mine.ms / theirs[-1]:.4f} "
            f"(machine {busy:.0f}% busy before)",
            flush=True,
        )

    same = compare_libraries(bench, bench_variables, ours[-1].libraries)
    compare_settings(resolved, ours[-1].facts)
    ratios = [mine.ms / other for mine, other in zip(ours, theirs, strict=True)]
    median_theirs, median_ours = statistics.median(theirs), statistics.median(m.ms for m in ours)
    with_argmax = statistics.median(m.total_ms for m in ours)
    print(f"llama-bench: median {median_theirs:.3f} ms/token, spread {spread(theirs):.2%} of it")
    print(f"ours:        median {median_ours:.3f} ms/token, spread {spread([m.ms for m in ours]):.2%} of it")
    print(
        f"ratio of medians {median_ours / median_theirs:.4f} (with argmax {with_argmax / median_theirs:.4f})"
    )
    print(f"ratio by pair: median {statistics.median(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}")
    off = abs(median_ours / median_theirs - 1)
    print(f"target: within {TARGET:.0%}; off by {off:.2%}: {'reached' if off <= TARGET else 'missed'}")
    if not same:
        print("not the same libraries on both sides: the ratio is not what it claims", file=sys.stderr)
    return 0 if same else 1


def spread(samples: list[float]) -> float:
    """Standard deviation over the mean, from the samples: llama-bench's stddev_ns wraps on long tests."""
    return statistics.stdev(samples) / statistics.mean(samples) if len(samples) > 1 else 0.0


def run_bench(
    bench: Path, model: Path, arguments: argparse.Namespace, variables: dict[str, str]
) -> dict[str, Any]:
    """One llama-bench process, one repetition, contexts 0 to 127; it warms up by one token of its own."""
    command = [
        *(str(bench), "-m", str(model), "-p", "0", "-n", str(TOKENS), "-r", "1", "-o", "json"),
        *("-t", str(arguments.threads), "-fa", "1" if arguments.flash_attn else "0"),
        *("-b", "512", "-ub", "512", "-ctk", "f16", "-ctv", "f16", "-lm", "mmap", "--repack", "1"),
        *("-ngl", "0", "-dev", "none"),
    ]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"llama-bench took more than {RUN_TIMEOUT_S} s: is the machine busy?") from None
    if ran.returncode:
        raise SystemExit(f"llama-bench ended with {ran.returncode}: {ran.stderr.strip()[-500:]}")
    said: dict[str, Any] = json.loads(ran.stdout)[0]
    return said


def run_ours(interpreter: Interpreter, model: Path, arguments: argparse.Namespace) -> Ours:
    """One real worker: a prompt of one token, then TOKENS decodes at contexts 1 to 128.

    llama.cpp reads the KV cache in steps of 256 cells, so the context shifted by one costs the same.
    """
    header = stacks()["llamacpp"]
    sources = {"threads": arguments.threads, "tokens": TOKENS + 2}
    options = {o.name: sources.get(o.default_from or "", o.default) for o in header.options.values()}
    workload = {"kind": "decode", "prompt": [1], "new_tokens": TOKENS + 1, "warmup": WARMUP}
    request = Request(
        "generate",
        "llamacpp",
        "cpu",
        {"name": "fidelity", "path": str(model), "shape": None},
        options | {"flash_attn": arguments.flash_attn},
        [workload],
    )
    stamps: list[int] = []
    facts: dict[str, Any] = {}
    libraries: dict[str, str] = {}
    last: object = None
    with tempfile.TemporaryDirectory(prefix="fidelity-") as folder:
        worker = launch.Worker(request, interpreter, Path(folder), arguments.threads)
        for last in worker.events(RUN_TIMEOUT_S):
            if isinstance(last, Loaded):
                facts = last.facts
                libraries = named(mapped(worker.pid))
            elif isinstance(last, Tokens):
                stamps += last.t_ns
    if isinstance(last, (Failed, Died)) or not isinstance(last, Done):
        raise SystemExit(f"our worker: {getattr(last, 'reason', 'ended without a word')}")
    return Ours(
        total_ms=(stamps[-1] - stamps[0]) / TOKENS / 1e6,
        argmax_ms=last.facts["counters"]["sampling_ms"] / (TOKENS + 1),
        facts=facts,
        libraries=libraries,
    )


def compare_libraries(bench: Path, variables: dict[str, str], ours: dict[str, str]) -> bool:
    """Print which libllama and libggml files each side loads; True when their contents are the same.

    A wheel holds copies where a build has links, so the two sides open files of different names.
    """
    said = subprocess.run(["ldd", str(bench)], capture_output=True, text=True, env=variables, check=True)
    theirs = named({Path(found) for found in re.findall(r"=> (/\S+)", said.stdout)})
    for name in sorted(theirs | ours):
        print(f"  {name}: llama-bench {theirs.get(name, 'none')}, ours {ours.get(name, 'none')}")
    shared = {name for name in ours if name in theirs}
    same = shared == set(ours) and all(digest(theirs[name]) == digest(ours[name]) for name in shared)
    print(f"  the same bytes: {'yes' if same else 'NO'}")
    return same


def mapped(pid: int) -> set[Path]:
    """The files in a process's address space. Not psutil's memory_maps: it walks the pages too."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line[line.index("/") :]) for line in lines if "/" in line}


def named(paths: set[Path]) -> dict[str, str]:
    """libllama, libggml, libggml-base, libggml-cpu -> the file; llama-common is llama-bench's alone."""
    found = {p.name.split(".so")[0]: str(p) for p in paths if re.match(r"lib(llama|ggml)", p.name)}
    return {name: path for name, path in found.items() if not re.match(r"libllama-(common|bench)", name)}


def digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def compare_settings(bench: dict[str, Any], facts: dict[str, Any]) -> None:
    """Print what each side says it used."""
    names = ("n_threads", "n_batch", "n_ubatch", "type_k", "type_v", "flash_attn", "load_mode", "repack")
    print("  llama-bench: " + ", ".join(f"{n} {bench.get(n)}" for n in (*names, "n_gpu_layers", "cpu_info")))
    print("  ours:        " + ", ".join(f"{name} {value}" for name, value in facts["options"].items()))


def synthetic_model() -> Path:
    """The path of the synthetic qwen1.5-0.5b in q4_0, made if need be."""
    command = [str(HARNESS), "synth", "qwen1.5-0.5b", "--quant", "q4_0", "--json"]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(json.loads(made.stdout)[0]["path"])


def library_folder(interpreter: Interpreter) -> Path:
    """Where the environment keeps the libllama and libggml that our worker loads."""
    found = sorted(interpreter.python.parent.parent.glob("lib/python*/site-packages/llama_cpp/lib"))
    if not found:
        raise SystemExit(f"no llama_cpp/lib in {interpreter.python.parent.parent}")
    return found[0]


def llama_bench(environment: Environment) -> Path:
    """llama-bench of the version that the environment holds, built into the cache once."""
    version = next(d.partition("==")[2] for d in environment.dependencies if d.startswith(PACKAGE))
    FOLDER.mkdir(parents=True, exist_ok=True)
    flags = shlex.split(environment.variables.get("CMAKE_ARGS", ""))
    flags += ["-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_COMMON=ON", "-DBUILD_SHARED_LIBS=ON"]
    flags += ["-DLLAMA_BUILD_APP=OFF", "-DLLAMA_OPENSSL=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    key = hashlib.sha256(json.dumps([version, flags, build.key_of(environment)]).encode()).hexdigest()[:12]
    folder = FOLDER / f"llama-bench-{version}-{key}"
    bench = folder / "bin" / "llama-bench"
    with exclusive(FOLDER / "llama-bench.lock"):
        complete = folder / "complete"
        if complete.exists():
            return bench
        source = source_folder(version) / "vendor" / "llama.cpp"
        cmake, variables = cmake_command()
        log = FOLDER / f"{folder.name}.log"
        say(f"building llama-bench {version}; log: {log}")
        with log.open("wb") as sink:
            for step in (
                [cmake, "-S", str(source), "-B", str(folder), *flags],
                [cmake, "--build", str(folder), "--target", "llama-bench", "--parallel", str(os.cpu_count())],
            ):
                if subprocess.run(step, stdout=sink, stderr=subprocess.STDOUT, env=variables).returncode:
                    raise SystemExit(f"llama-bench could not be built; log: {log}")
        complete.touch()
    return bench


def source_folder(version: str) -> Path:
    """llama-cpp-python's source, downloaded and unpacked into the cache once."""
    name = f"llama_cpp_python-{version}"
    folder, archive = FOLDER / name, FOLDER / f"{name}.tar.gz"
    if folder.is_dir():
        return folder
    if not archive.is_file():
        say(f"downloading {name}.tar.gz")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(FOLDER), f"{PACKAGE}=={version}"], check=True)
    unpacked = FOLDER / f"{name}.partial"
    shutil.rmtree(unpacked, ignore_errors=True)
    shutil.unpack_archive(archive, unpacked)
    (unpacked / name).rename(folder)
    unpacked.rmdir()
    return folder


def cmake_command() -> tuple[str, dict[str, str]]:
    """cmake, and variables under which it finds ninja: the machine's own, else PyPI's wheels through uv."""
    if (cmake := shutil.which("cmake")) and (shutil.which("ninja") or shutil.which("make")):
        generator = {"CMAKE_GENERATOR": "Ninja"} if shutil.which("ninja") else {}
        return cmake, {**os.environ, **generator}
    tools = FOLDER / "tools"
    uv = build.uv_binary()
    subprocess.run([uv, "venv", "--quiet", "--allow-existing", str(tools)], check=True)
    python = str(tools / "bin" / "python")
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, "cmake", "ninja"], check=True)
    path = f"{tools / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return str(tools / "bin" / "cmake"), {**os.environ, "PATH": path, "CMAKE_GENERATOR": "Ninja"}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
