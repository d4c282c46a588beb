"""Are our decode and our prefill as fast as llama.cpp's own? Ours against its tools, as a ratio.

Same GGUF file, same libraries, same threads and settings: llama-bench and llama-batched-bench are built from
the source that llama-cpp-python's sdist carries, and run with the environment's own libllama and libggml.
Each pair runs both, in alternating order, in fresh processes; the interval is of the median ratio, by
bootstrap of the pairs. Target: 1.00 within 2%, our argmax apart. Where the interval is wider than that, the
machine was too noisy to tell.

    PYTHONPATH=. .venv/bin/python -m benchmarks.fidelity [decode] [prompt] [depth] [batched] [--pairs 8]
        [--threads 2] [--flash-attn] [--model FILE.gguf]

The first run downloads the sdist and builds the tools (minutes); both stay in the harness's cache folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fidelity import compared, ours, tools
from harness.campaign import worker
from harness.stacks import build
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks

TARGET = 0.02
DRAWS = 10_000
HARNESS = Path(sys.executable).parent / "harness"
NAMES = ("decode", "prompt", "depth", "batched")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=[*NAMES, []], default=[], metavar="WHAT")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flash-attn", action="store_true")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: synthetic qwen1.5-0.5b q4_0)")
    arguments = parser.parse_args()

    environment = stacks()["llamacpp"].environments["cpu"]
    interpreter = build.create(environment, lambda line: print(line, file=sys.stderr, flush=True))
    libraries = library_folder(interpreter)
    folder = tools.built(environment)
    variables = worker.worker_variables("cpu", arguments.threads)
    # Goes before the RUNPATH that the build left in the tools, so the environment's own files are loaded.
    theirs = compared.Tools(folder, arguments, variables | {"LD_LIBRARY_PATH": str(libraries)})
    theirs.model = arguments.model or synthetic_model()
    side = ours.Side(interpreter, theirs.model, arguments.threads, arguments.flash_attn)
    print(f"model {theirs.model}\ntools {folder}")

    same = compare_libraries(folder / "llama-bench", theirs.variables, side)
    every = compared.all_of(theirs, side)
    for name in arguments.what or NAMES:
        compare(every[name], arguments.pairs)
    print("  llama-bench: " + settings(theirs.said))
    if not same:
        print("not the same libraries on both sides: the ratios are not what they claim", file=sys.stderr)
    return 0 if same else 1


def compare(each: compared.Compared, pairs: int) -> None:
    print(f"\n{each.what}")
    ratios, with_argmax = [], []
    for pair in range(1, pairs + 1):
        busy = psutil.cpu_percent(interval=1.0)  # by others: nothing of ours runs now
        if pair % 2:
            theirs, mine = each.theirs(), each.ours()
        else:
            mine, theirs = each.ours(), each.theirs()
        ratios.append(mine.ms / theirs.ms)
        with_argmax.append((mine.ms + mine.argmax_ms) / theirs.ms)
        print(
            f"pair {pair}: llama.cpp's {theirs.ms:.3f}, ours {mine.ms:.3f} + argmax {mine.argmax_ms:.3f}, "
            f"ratio {ratios[-1]:.4f} (machine {busy:.0f}% busy before)",
            flush=True,
        )
    low, high = interval(ratios)
    middle = statistics.median(ratios)
    print(
        f"ratio: median {middle:.4f}, 95% interval {low:.4f} to {high:.4f}, "
        f"with argmax {statistics.median(with_argmax):.4f}"
    )
    print(f"target: 1.00 within {TARGET:.0%}: {verdict(low, high)}")


def interval(ratios: list[float]) -> tuple[float, float]:
    """95% interval of the median, by bootstrap of the pairs."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS)]


def verdict(low: float, high: float) -> str:
    if low >= 1 - TARGET and high <= 1 + TARGET:
        return "reached"
    return "missed" if high < 1 - TARGET or low > 1 + TARGET else "inconclusive, the interval is too wide"


def compare_libraries(bench: Path, variables: dict[str, str], side: ours.Side) -> bool:
    """Print which libllama and libggml files each side loads; True when their contents are the same.

    A wheel holds copies where a build has links, so the two sides open files of different names.
    """
    ran = side.run({"kind": "decode", "prompt": [1], "new_tokens": 2}, 3)
    said = subprocess.run(["ldd", str(bench)], capture_output=True, text=True, env=variables, check=True)
    theirs = ours.named({Path(found) for found in re.findall(r"=> (/\S+)", said.stdout)})
    for name in sorted(theirs | ran.libraries):
        print(f"  {name}: theirs {theirs.get(name, 'none')}, ours {ran.libraries.get(name, 'none')}")
    shared = {name for name in ran.libraries if name in theirs}
    same = shared == set(ran.libraries) and all(
        digest(theirs[name]) == digest(ran.libraries[name]) for name in shared
    )
    print(f"  the same bytes: {'yes' if same else 'NO'}")
    print("  ours:        " + ", ".join(f"{name} {value}" for name, value in ran.loaded["options"].items()))
    return same


def digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def settings(bench: dict[str, Any]) -> str:
    """What llama-bench says it used."""
    names = ("n_threads", "n_batch", "n_ubatch", "type_k", "type_v", "flash_attn", "load_mode", "repack")
    return ", ".join(f"{name} {bench.get(name)}" for name in (*names, "n_gpu_layers", "cpu_info"))


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


if __name__ == "__main__":
    sys.exit(main())
