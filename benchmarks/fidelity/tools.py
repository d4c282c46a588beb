"""llama.cpp's own tools, built from the source that llama-cpp-python's sdist carries."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from harness.base.files import cache_folder, exclusive
from harness.campaign import worker
from harness.stacks import build
from harness.stacks.adopted import Interpreter
from harness.stacks.header import Environment

PACKAGE = "llama-cpp-python"
FOLDER = cache_folder() / "benchmarks"


def built(environment: Environment, tool: str) -> Path:
    """The tool of the version that the environment holds, built into the cache once."""
    version = next(d.partition("==")[2] for d in environment.dependencies if d.startswith(PACKAGE))
    FOLDER.mkdir(parents=True, exist_ok=True)
    flags = shlex.split(environment.variables.get("CMAKE_ARGS", ""))
    flags += ["-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_COMMON=ON", "-DBUILD_SHARED_LIBS=ON"]
    flags += ["-DLLAMA_BUILD_APP=OFF", "-DLLAMA_OPENSSL=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    known = [version, flags, tool, build.key_of(environment)]
    key = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]
    folder = FOLDER / f"{tool}-{version}-{key}"
    with exclusive(FOLDER / "llama-bench.lock"):
        complete = folder / "complete"
        if complete.exists():
            return folder / "bin" / tool
        source = source_folder(version) / "vendor" / "llama.cpp"
        cmake, variables = cmake_command()
        log = FOLDER / f"{folder.name}.log"
        print(f"building {tool} {version}; log: {log}", file=sys.stderr, flush=True)
        with log.open("wb") as sink:
            for step in (
                [cmake, "-S", str(source), "-B", str(folder), *flags],
                [cmake, "--build", str(folder), "--target", tool, "--parallel", str(os.cpu_count())],
            ):
                if subprocess.run(step, stdout=sink, stderr=subprocess.STDOUT, env=variables).returncode:
                    raise SystemExit(f"it could not be built; log: {log}")
        complete.touch()
    return folder / "bin" / tool


def library_variables(interpreter: Interpreter, threads: int) -> dict[str, str]:
    """Variables under which the tools load the environment's own libllama and libggml: they go before the
    RUNPATH that the build left in the tools."""
    folder = next(interpreter.python.parent.parent.glob("lib/python*/site-packages/llama_cpp/lib"))
    return worker.worker_variables("cpu", threads) | {"LD_LIBRARY_PATH": str(folder)}


def source_folder(version: str) -> Path:
    """llama-cpp-python's source, downloaded and unpacked into the cache once."""
    name = f"llama_cpp_python-{version}"
    folder, archive = FOLDER / name, FOLDER / f"{name}.tar.gz"
    if folder.is_dir():
        return folder
    if not archive.is_file():
        print(f"downloading {name}.tar.gz", file=sys.stderr, flush=True)
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
