"""What does calibration save? KL divergence of the same types, with and without a text to calibrate on.

llama.cpp: K- and IQ-types by llama-quantize, with the importance matrix of llama-imatrix and without; both
tools are built from the source that llama-cpp-python's sdist carries. GPTQ and AWQ of 4 bits: by gptqmodel's
own quantizers, and rounded to nearest by the harness; all run in gptqmodel on the CPU. The text: that of the
shipped one behind the windows that are scored.

    PYTHONPATH=. .venv/bin/python -m benchmarks.quality.calibrated [--threads 2] [--folder DIR]

Prints a table in Markdown. The first run builds the tools and the environment of gptqm (minutes).
"""

from __future__ import annotations

import bisect
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.fidelity import tools
from benchmarks.quality.__main__ import (
    CHUNKS,
    MODEL,
    N_CTX,
    TOOLS,
    folder_of,
    libraries,
    parser_of,
    run,
    scored,
    with_vocabulary,
)
from harness import data
from harness.campaign import worker
from harness.models import tokenizer
from harness.stacks import build
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from runners.protocol import Request

TYPES = ("q4_k_m", "q3_k_m", "q2_k", "iq4_xs", "iq3_xxs", "iq2_xs")
METHODS = ("gptq", "awq")
SIDES = ("rounded", "calibrated")
BITS, GROUP = 4, 128
JOB_S = 600

Models = list[dict[str, Any]]
Missing = dict[str, str]
"""By name, why a tool did not quantize."""


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    with folder_of(arguments) as folder:
        compare(folder, arguments.threads)
    return 0


def compare(folder: Path, threads: int) -> None:
    text = folder / "calibration.txt"
    text.write_text(behind_the_windows(), encoding="utf-8")
    count = len(tokenizer.tokenized(data.weights(MODEL) / "tokenizer.json", text.read_text(), 1 << 62).ids)
    print(f"calibrated on {count // N_CTX} windows of {N_CTX} tokens", file=sys.stderr, flush=True)
    missing: Missing = {}
    models = ggufs(folder, text, threads, missing)
    variants: list[dict[str, Any]] = [{"stack": "llamacpp", "models": [each["name"] for each in models]}]
    for method in METHODS:
        models += packed(folder, text, method, threads, missing)
    for method in METHODS:
        named = [each["name"] for each in models if each["name"].startswith(method)]
        variants.append({"stack": "gptqm", "format": method, "kernel": "aten", "models": named})
    protocol = {"threads": threads}
    workload = {"kind": "quality", "n_ctx": N_CTX, "chunks": CHUNKS}
    config = {"protocol": protocol, "models": models, "variants": variants, "workloads": [workload]}
    show({each["model"]["name"]: each for each in scored(folder / "scores", config)}, missing)


def ggufs(folder: Path, text: Path, threads: int, missing: Missing) -> Models:
    """The model in each type of llama.cpp, without the matrix and with it."""
    environment = stacks()["llamacpp"].environments["cpu"]
    interpreter = _interpreter("llamacpp")
    binaries, variables = tools.built(environment, TOOLS), libraries(interpreter, threads)
    whole, matrix = folder / "whole.gguf", folder / "matrix.gguf"
    with_vocabulary(interpreter, whole, folder)
    command = [str(binaries / "llama-imatrix"), "-m", str(whole), "-f", str(text), "-o", str(matrix)]
    command += ["-c", str(N_CTX), "-t", str(threads), "-ngl", "0"]
    run(command, variables, folder / "imatrix.log")
    models: Models = []
    for quant in TYPES:
        for side in SIDES:
            file = folder / f"{quant}-{side}.gguf"
            given = ["--imatrix", str(matrix)] if side == "calibrated" else []
            command = [str(binaries / "llama-quantize"), *given, str(whole), str(file), quant, str(threads)]
            if reason := refusal(command, variables, folder / f"{file.stem}.log"):
                missing[file.stem] = reason
            else:
                models.append({"name": file.stem, "weights": {"hf": MODEL, "gguf": str(file)}})
    return models


def rounded(folder: Path, method: str, threads: int) -> Path:
    """The folder of the model packed as `method` stores it, rounded to nearest."""
    path = folder / f"{method}-rounded"
    if not path.exists():
        files = {"source": str(data.weights(MODEL)), "target": str(path)}
        model = {"name": MODEL, "path": None, "shape": None}
        options = {"format": method, "bits": BITS, "group_size": GROUP, "threads": threads}
        request = Request("pack", "llamacpp", "cpu", model, options, files=files)
        worker.facts_of(worker.run_job(request, _interpreter("llamacpp"), folder, JOB_S))
    return path


def packed(folder: Path, text: Path, method: str, threads: int, missing: Missing) -> Models:
    """The model packed by `method`, rounded and calibrated."""
    source, interpreter = data.weights(MODEL), _interpreter("gptqm")
    paths = {"rounded": rounded(folder, method, threads), "calibrated": folder / f"{method}-calibrated"}
    if not paths["calibrated"].exists():
        words = [str(interpreter.python), str(Path(__file__).with_name("packed.py")), str(source)]
        words += [str(paths["calibrated"]), method, str(text), str(N_CTX)]
        variables = worker.worker_variables("cpu", threads)
        if reason := refusal(words, variables, folder / f"{method}.log"):
            missing[paths["calibrated"].name] = reason
    given = [path for path in paths.values() if path.exists()]
    return [{"name": path.name, "weights": {"hf": MODEL, method: str(path)}} for path in given]


def refusal(command: list[str], variables: dict[str, str], log: Path) -> str | None:
    """Run a command; if it fails, the last line that it prints about something else than our files."""
    with log.open("w") as sink:
        failed = subprocess.run(
            command, stdout=sink, stderr=subprocess.STDOUT, env=variables, cwd=log.parent
        ).returncode
    lines = log.read_text(errors="replace").strip().splitlines()
    return next(line for line in reversed(lines) if str(log.parent) not in line) if failed else None


def show(records: Mapping[str, Any], missing: Missing) -> None:
    headings = [f"{side}: {what}" for side in SIDES for what in ("mean KLD", "95% interval", "top-1 %")]
    print("| type | " + " | ".join([*headings, "KLD saved"]) + " |")
    print("| --- |" + " ---: |" * (len(headings) + 1))
    for name in (*TYPES, *METHODS):
        sides = [records.get(f"{name}-{side}") for side in SIDES]
        columns = []
        for side, record in zip(SIDES, sides, strict=True):
            reason = missing.get(f"{name}-{side}")
            columns += [f"unavailable: {reason}", "-", "-"] if reason else _columns(record)
        klds = [record["quality"]["figures"]["kld_mean"]["value"] for record in sides if _has(record)]
        saved = f"{1 - klds[1] / klds[0]:.0%}" if len(klds) == len(SIDES) else "-"
        print(f"| {name} | " + " | ".join([*columns, saved]) + " |")


def _has(record: Any) -> bool:
    return bool(record and record["quality"].get("figures"))


def _columns(record: Any) -> list[str]:
    if record is None:
        return ["-"] * 3
    if not _has(record):
        return [f"{record['outcome']}: {record['reason']}", "-", "-"]
    kld, top1 = (record["quality"]["figures"][name] for name in ("kld_mean", "top1"))
    return [f"{kld['value']:.5f}", f"{kld['low']:.5f} to {kld['high']:.5f}", f"{100 * top1['value']:.2f}"]


def behind_the_windows() -> str:
    """The paragraphs of the shipped text that begin behind the windows that are scored."""
    source, paragraphs = data.weights(MODEL) / "tokenizer.json", data.shipped_text().read_text().split("\n\n")

    def tokens(count: int) -> int:
        return len(tokenizer.tokenized(source, "\n\n".join(paragraphs[:count]), 1 << 62).ids)

    first = bisect.bisect_left(range(len(paragraphs) + 1), N_CTX * CHUNKS, key=tokens)
    return "\n\n".join(paragraphs[first:])


def _interpreter(stack: str) -> Interpreter:
    environment = stacks()[stack].environments["cpu"]
    return build.create(environment, lambda line: print(line, file=sys.stderr, flush=True))


if __name__ == "__main__":
    sys.exit(main())
