"""Are our perplexity, KL divergence and agreement those of llama-perplexity, on the same files?

The shipped model as a GGUF of 32 bits, its quantized types as the harness makes them, the shipped text, 64
windows of 512. llama-perplexity is built from the source that llama-cpp-python's sdist carries, and runs with
the environment's own libllama and libggml. Targets: PPL within 0.1%, mean KLD within 1% (or 1e-6 nats, the
last digit that it prints), the share of equal first tokens within 0.1 points; transformers in float32 against
llama.cpp in f32: PPL within 0.05%.

    PYTHONPATH=. .venv/bin/python -m benchmarks.quality [--threads 2] [--folder DIR]

The first run downloads the sdist and builds the tool (minutes); both stay in the harness's cache folder.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.fidelity import tools
from harness import records
from harness.base import data
from harness.campaign import worker
from harness.models import layout
from harness.stacks import build
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from runners.protocol import Request

HARNESS = Path(sys.executable).parent / "harness"
MODEL = "austen-4m"
TYPES = ("f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
COMPARED = ("f16", "q8_0", "q4_k_m", "q2_k")
N_CTX, CHUNKS = 512, 64
PPL, KLD, KLD_DIGIT, POINTS, STACKS = 0.001, 0.01, 1e-6, 0.1, 0.0005
TRIES = 5
SHOWN = {"ppl": 4, "kld_mean": 6, "kld_p99": 5, "kld_max": 4, "rms_dp": 3, "top1": 3}
FIGURES = {
    "ppl": r"Mean PPL\(Q\)\s*:\s*([\d.]+)",
    "base": r"Mean PPL\(base\)\s*:\s*([\d.]+)",
    "ln_ppl_ratio": r"Mean ln\(PPL\(Q\)/PPL\(base\)\)\s*:\s*(-?[\d.]+)",
    "kld_mean": r"Mean\s+KLD:\s*(-?[\d.]+)",
    "kld_p99": r"99\.0%\s+KLD:\s*(-?[\d.]+)",
    "kld_median": r"Median\s+KLD:\s*(-?[\d.]+)",
    "kld_max": r"Maximum KLD:\s*(-?[\d.]+)",
    "rms_dp": r"RMS Δp\s*:\s*([\d.]+)",
    "top1": r"Same top p:\s*([\d.]+)",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the records and files here")
    parser.add_argument("--chunks", type=int, default=CHUNKS, help=f"windows (default: {CHUNKS})")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = (arguments.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return compare(folder, arguments.threads, arguments.chunks)


def compare(folder: Path, threads: int, chunks: int) -> int:
    environment = stacks()["llamacpp"].environments["cpu"]
    interpreter = build.create(environment, lambda line: print(line, file=sys.stderr, flush=True))
    binary = tools.built(environment, "llama-perplexity")
    whole = folder / "whole.gguf"
    with_vocabulary(interpreter, whole, folder)
    shared = {
        "protocol": {"threads": threads},
        "workloads": [{"kind": "quality", "n_ctx": N_CTX, "chunks": chunks}],
    }
    ours = by_variant(
        scored(
            folder / "gguf",
            {
                **shared,
                "models": [{"name": "gguf", "weights": str(whole)}],
                "variants": [{"stack": "llamacpp", "quant": [*TYPES]}],
            },
        )
    )
    both = by_variant(
        scored(
            folder / "stacks",
            {
                **shared,
                "models": [{"weights": MODEL}],
                "variants": [
                    {"stack": "hf", "dtype": ["fp32", "bf16"]},
                    {"stack": "llamacpp", "quant": "f32", "type_k": "f32", "type_v": "f32", "name": "f32"},
                ],
            },
        )
    )
    variables = tools.library_variables(interpreter, threads)
    base = folder / "base.kld"
    command = [str(binary), "-c", str(N_CTX), "-b", str(N_CTX), "--chunks", str(chunks), "-t", str(threads)]
    command += ["-fa", "off", "-ngl", "0", "-f", str(data.shipped_text()), "--kl-divergence-base", str(base)]
    run([*command, "-m", str(whole), "-ctk", "f32", "-ctv", "f32"], variables, folder / "base.log")
    missed = []
    print(f"{'':8}" + "".join(f"{name:>10} {'theirs':>10}" for name in SHOWN))
    for quant in TYPES:
        record = ours[quant]
        file = record["model"]["weights"]["file"]
        said = run(
            [*command, "-m", file, "--kl-divergence"], variables, folder / f"{quant}.log", "Same top p:"
        )
        theirs = {name: float(re.search(pattern, said)[1]) for name, pattern in FIGURES.items()}
        mine = {name: figure["value"] for name, figure in record["quality"]["figures"].items()}
        mine |= {name: 100 * mine[name] for name in ("top1", "rms_dp")}
        pairs = (f"{mine[name]:10.{digits}f} {theirs[name]:10.{digits}f}" for name, digits in SHOWN.items())
        print(f"{quant:8}" + "".join(pairs), flush=True)
        if quant in COMPARED:
            missed += [f"{quant}: {each}" for each in beyond(mine, theirs)]
    stack = {name: record["quality"]["figures"]["ppl"]["value"] for name, record in both.items()}
    apart = stack["f32"] / stack["fp32-dynamic"] - 1
    print(
        f"transformers fp32 {stack['fp32-dynamic']:.5f}, bf16 {stack['bf16-dynamic']:.5f}; "
        f"llama.cpp f32 {stack['f32']:.5f}: {apart:+.5%}"
    )
    missed += [f"transformers and llama.cpp are {apart:+.4%} apart"] if abs(apart) > STACKS else []
    missed += order(ours)
    print(f"targets: {'reached' if not missed else 'missed: ' + '; '.join(missed)}")
    return 1 if missed else 0


def beyond(mine: Mapping[str, float], theirs: Mapping[str, float]) -> list[str]:
    found = []
    if abs(mine["ppl"] / theirs["ppl"] - 1) > PPL:
        found.append(f"PPL {mine['ppl'] / theirs['ppl'] - 1:+.3%}")
    if abs(mine["kld_mean"] - theirs["kld_mean"]) > max(KLD * theirs["kld_mean"], KLD_DIGIT):
        found.append(f"KLD {mine['kld_mean']:.6f} against {theirs['kld_mean']:.6f}")
    if abs(mine["top1"] - theirs["top1"]) > POINTS:
        found.append(f"top-1 {mine['top1'] - theirs['top1']:+.3f} points")
    return found


def order(records: Mapping[str, Any]) -> list[str]:
    """What is wrong with the order of the quantized types by mean KLD: better first, and intervals of types
    two apart do not overlap."""
    types = TYPES[1:]
    kld = {quant: records[quant]["quality"]["figures"]["kld_mean"] for quant in types}
    found = [f"{a} is not better than {b}" for a, b in pairwise(types) if kld[a]["value"] >= kld[b]["value"]]
    for a, b in zip(types, types[2:], strict=False):
        if kld[a]["high"] >= kld[b]["low"]:
            found.append(f"the intervals of {a} and {b} overlap")
    for quant, each in kld.items():
        print(f"{quant:8} mean KLD {each['value']:.5f} [{each['low']:.5f}, {each['high']:.5f}]")
    return found


def by_variant(records: list[Any]) -> dict[str, Any]:
    return {record["variant"]: record for record in records}


def scored(folder: Path, config: dict[str, Any]) -> list[Any]:
    """The records of `harness run --quality`."""
    folder.mkdir(exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    command = [str(HARNESS), "run", "--quality", str(file), "-o", str(folder / "results"), "--wait"]
    subprocess.run(command, check=True)
    found = records.records(folder / "results", lambda damage: print(damage, file=sys.stderr))
    return [each.record for each in found]


def with_vocabulary(interpreter: Interpreter, target: Path, folder: Path) -> None:
    """The shipped model as a GGUF of 32 bits, with its vocabulary."""
    source, bare = data.weights(MODEL), folder / "bare.gguf"
    laid = layout.of(json.loads((source / "config.json").read_text())).plain()
    model = {"name": MODEL, "path": None, "layout": laid}
    files = {"source": str(source), "target": str(bare)}
    request = Request("convert", "llamacpp", "cpu", model, {"dtype": "f32", "threads": 2}, files=files)
    worker.facts_of(worker.run_job(request, interpreter, folder, 600))
    script = Path(__file__).with_name("vocabulary.py")
    words = [str(interpreter.python), str(script), str(bare), str(source / "tokenizer.json"), str(target)]
    subprocess.run(words, check=True)


def run(command: list[str], variables: dict[str, str], log: Path, until: str = "") -> str:
    """What a tool prints, until it has printed `until`: its logging thread may end before its last lines."""
    for _ in range(TRIES):
        with log.open("w") as sink:
            ran = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, env=variables)
        if ran.returncode:
            raise SystemExit(f"{command[0]} ended with {ran.returncode}; log: {log}")
        if until in (said := log.read_text(errors="replace")):
            return said
    raise SystemExit(f"{command[0]} did not print {until!r}; log: {log}")


if __name__ == "__main__":
    sys.exit(main())
