"""What does a score cost? 64 windows of 512 tokens of the shipped model in every stack that runs on a CPU.

    PYTHONPATH=. .venv/bin/python -m benchmarks.quality.cost [--threads 2] [--folder DIR]

Target: at most 60 s each, with the start of the process, but without the reference, which is computed once
before. GPTQ and AWQ: the model's weights, rounded. Prints a table in Markdown; builds environments that lack.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.quality.__main__ import CHUNKS, HARNESS, MODEL, N_CTX, folder_of, parser_of, scored
from benchmarks.quality.calibrated import METHODS, rounded

TARGET_S = 60.0
VARIANTS: list[dict[str, Any]] = [
    {"stack": "llamacpp", "quant": ["f16", "q8_0", "q4_k_m"], "models": [MODEL]},
    {"stack": "hf", "dtype": ["fp32", "bf16"], "models": [MODEL]},
    {"stack": "bnb", "quant": ["int8", "nf4"], "models": [MODEL]},
    *({"stack": "gptqm", "format": method, "kernel": "aten", "models": [method]} for method in METHODS),
]


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    with folder_of(arguments) as folder:
        return cost(folder, arguments.threads)


def cost(folder: Path, threads: int) -> int:
    models: list[dict[str, Any]] = [{"name": MODEL, "weights": MODEL}]
    for method in METHODS:
        path = rounded(folder, method, threads)
        models.append({"name": method, "weights": {"hf": MODEL, method: str(path)}})
    workload = {"kind": "quality", "n_ctx": N_CTX, "chunks": CHUNKS}
    config = {"protocol": {"threads": threads}, "models": models, "workloads": [workload]}
    for name in (MODEL, *METHODS):  # now, so that no score has it in its time
        shared = ["--export-reference", str(folder / f"{name}.reference"), "--only", f"{name}.*"]
        written = folder / "config.json"
        written.write_text(json.dumps(config | {"variants": VARIANTS}))
        if not (folder / f"{name}.reference").exists():
            subprocess.run([str(HARNESS), "quality", str(written), *shared], check=True, cwd=folder)
    print("| variant | status | seconds | of these in the worker |")
    print("| --- | --- | ---: | ---: |")
    late = []
    for record in scored(folder / "cost", config | {"variants": VARIANTS}):
        name, seconds = f"{record['stack']} {record['variant']}", record["timing"]["wall_s"]
        worker = record["quality"].get("seconds")
        print(f"| {name} | {record['outcome']} | {seconds:.1f} | {worker and format(worker, '.1f')} |")
        late += [name] if seconds > TARGET_S or record["outcome"] != "ok" else []
    print(f"target of {TARGET_S:.0f} s: {'missed by ' + ', '.join(late) if late else 'reached'}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
