"""What does calibration save? KL divergence of types with and without llama.cpp's importance matrix.

The shipped model; calibrated on the part of the shipped text behind the windows that are scored (64 of 512).
llama-imatrix and llama-quantize are built from the source that llama-cpp-python's sdist carries.

    PYTHONPATH=. .venv/bin/python -m benchmarks.quality.calibrated [--threads 2] [--folder DIR]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.fidelity import tools
from benchmarks.quality.__main__ import CHUNKS, MODEL, N_CTX, TOOLS, libraries, run, scored, with_vocabulary
from harness import shipped
from harness.models import tokenizer
from harness.stacks import build
from harness.stacks.header import stacks

PLAIN = ("q4_k_m", "q3_k_m", "q2_k")
CALIBRATED = (*PLAIN, "iq4_xs", "iq3_xxs", "iq2_xs")  # the last three need a matrix


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the records and files here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        compare(folder, arguments.threads)
    return 0


def compare(folder: Path, threads: int) -> None:
    environment = stacks()["llamacpp"].environments["cpu"]
    interpreter = build.create(environment, lambda line: print(line, file=sys.stderr, flush=True))
    binaries, variables = tools.built(environment, TOOLS), libraries(interpreter, threads)
    whole, text, matrix = folder / "whole.gguf", folder / "calibration.txt", folder / "matrix.gguf"
    with_vocabulary(interpreter, whole, folder)
    text.write_text(behind_the_windows(), encoding="utf-8")
    words = [
        "-m",
        str(whole),
        "-f",
        str(text),
        "-o",
        str(matrix),
        "-c",
        str(N_CTX),
        "-t",
        str(threads),
        "-ngl",
        "0",
    ]
    run([str(binaries / "llama-imatrix"), *words], variables, folder / "imatrix.log")
    models = [{"name": "plain", "weights": MODEL}]
    for quant in CALIBRATED:
        file = folder / f"calibrated-{quant}.gguf"
        quantize = [str(binaries / "llama-quantize"), "--imatrix", str(matrix), str(whole), str(file)]
        run([*quantize, quant.upper(), str(threads)], variables, folder / f"quantize-{quant}.log")
        given = {"hf": MODEL, "gguf": str(file)}
        models.append({"name": f"calibrated-{quant}", "weights": given})
    variants: list[dict[str, Any]] = [
        {"stack": "llamacpp", "quant": [*PLAIN], "models": ["plain"]},
        {"stack": "llamacpp", "models": ["calibrated-*"]},
    ]
    config = {"protocol": {"threads": threads}, "models": models, "variants": variants}
    records = scored(folder / "calibrated", config)
    found: dict[tuple[str, str], Any] = {}
    for record in records:
        which, _, quant = record["model"]["name"].partition("-")
        found[which, quant or record["variant"]] = record["quality"]["figures"]
    print(
        f"{'':8} {'rounded: KLD':>14} {'95% interval':>20} {'calibrated':>12} {'95% interval':>20}  top-1 %"
    )
    for quant in CALIBRATED:
        sides = [found.get((which, quant)) for which in ("plain", "calibrated")]
        print(f"{quant:8} " + "  ".join(map(shown, sides)))


def shown(figures: Any) -> str:
    if figures is None:
        return f"{'-':>14} {'':>20} {'':>6}"
    kld = figures["kld_mean"]
    return f"{kld['value']:14.5f} [{kld['low']:.5f}, {kld['high']:.5f}] {100 * figures['top1']['value']:6.2f}"


def behind_the_windows() -> str:
    """The shipped text after the windows that are scored, by paragraphs."""
    text = shipped.text().read_text(encoding="utf-8")
    source = shipped.weights(MODEL) / "tokenizer.json"
    paragraphs = text.split("\n\n")
    low, high = 0, len(paragraphs)
    while low < high:  # the first paragraph that begins behind them
        middle = (low + high) // 2
        before = "\n\n".join(paragraphs[:middle])
        low, high = (
            (low, middle)
            if len(tokenizer.ids(source, before, 1 << 62)) >= N_CTX * CHUNKS
            else (middle + 1, high)
        )
    return "\n\n".join(paragraphs[low:])


if __name__ == "__main__":
    sys.exit(main())
