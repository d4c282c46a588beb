"""Are our decode and our prefill as fast as llama.cpp's own? Ours against its tools, as a ratio.

Same GGUF file, same libraries, same threads and settings: llama-bench is built from the source that
llama-cpp-python's sdist carries, and runs with the environment's own libllama and libggml.
Each pair runs both, in alternating order, in fresh processes; the interval is of the median ratio, by
bootstrap of the pairs. Target: 1.00 within 2%, our argmax apart. Where the interval is wider than that, the
machine was too noisy to tell.

    PYTHONPATH=. .venv/bin/python -m benchmarks.fidelity [decode] [prompt] [depth] [--pairs 8] [--threads 2]
        [--flash-attn] [--model FILE.gguf]

The first run downloads the sdist and builds the tool (minutes); both stay in the harness's cache folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fidelity import tools
from benchmarks.fidelity.sides import Compared, Ours, Theirs, all_of, named
from benchmarks.one_process import interval
from harness.stacks import build
from harness.stacks.header import stacks

TARGET = 0.02
HARNESS = Path(sys.executable).parent / "harness"
NAMES = ("decode", "prompt", "depth")


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
    binary = tools.built(environment, "llama-bench")
    model = arguments.model or synthetic_model()
    ours = Ours(interpreter, model, arguments.threads, arguments.flash_attn)
    theirs = Theirs(binary, ours, tools.library_variables(interpreter, arguments.threads))
    print(f"model {model}\ntool {binary}")

    same = compare_libraries(theirs)
    every = all_of(theirs)
    for name in arguments.what or NAMES:
        compare(every[name], arguments.pairs)
    print("  llama-bench: " + settings(theirs.said))
    if not same:
        print("not the same libraries on both sides: the ratios are not what they claim", file=sys.stderr)
    return 0 if same else 1


def compare(each: Compared, pairs: int) -> None:
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


def verdict(low: float, high: float) -> str:
    if low >= 1 - TARGET and high <= 1 + TARGET:
        return "reached"
    return "missed" if high < 1 - TARGET or low > 1 + TARGET else "inconclusive, the interval is too wide"


def compare_libraries(side: Theirs) -> bool:
    """Print which libllama and libggml files each side loads; True when their contents are the same.

    A wheel holds copies where a build has links, so the two sides open files of different names.
    """
    ran = side.ours.run({"kind": "decode", "prompt": [1], "new_tokens": 2}, 3)
    ldd = ["ldd", str(side.binary)]
    said = subprocess.run(ldd, capture_output=True, text=True, env=side.variables, check=True)
    theirs = named({Path(found) for found in re.findall(r"=> (/\S+)", said.stdout)})
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
    command = [str(HARNESS), "env", "synth", "qwen1.5-0.5b", "--quant", "q4_0", "--json"]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(json.loads(made.stdout)[0]["path"])


if __name__ == "__main__":
    sys.exit(main())
