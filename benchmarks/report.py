"""What a report costs at the study's full size: 6 models x 19 variants x 10,000 tokens, written as one page.

The series are synthetic (a 256-staircase, noise, spikes; some cells out of memory), and given as arrays:
reading records and fitting them is not in it. Prints the time to build and write the page, its size, and the
highest memory of the process. Targets: 15 s (fit included, which takes about 25 ms a series), 1.5 GB, 5 MB.

    .venv/bin/python benchmarks/report.py [--out PAGE.html] [--tokens 10000]
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from harness.analysis.figures import empty_cell
from harness.dataset.study import Curve, MemoryCurve, Study
from harness.report import page

TARGETS = {"time": 15.0, "memory": 1.5e9, "size": 5e6}
BANDWIDTH = 1008e9  # bytes/s
MODELS = {"0.5b": 0.46, "1.8b": 1.5, "4b": 3.6, "7b": 7.1, "14b": 13.2, "32b": 30.3}  # parameters, G
LLAMACPP = dict(
    zip(
        ("q8_0", "q6_k", "q5_k_m", "q5_0", "q4_k_m", "q4_0", "q3_k_m", "q2_k"),
        (8.5, 6.56, 5.7, 5.6, 4.9, 4.6, 4.1, 3.3),
        strict=True,
    )
)
OTHERS = (
    *("bf16", "bnb-int8", "bnb-int4", "gptq-int8", "gptq-int4", "awq", "awq-fused", "gptqm", "exl2", "hqq"),
    "eetq",
)
VARIANTS = {f"llamacpp {name}": bits for name, bits in LLAMACPP.items()} | {
    f"hf {name}": 16.0 if name == "bf16" else 8.0 if "8" in name else 4.5 for name in OTHERS
}
MEMORY_BYTES = 24 * 2**30


def study(tokens: int = 10_000, odd_name: str | None = None) -> Study:
    """A study of the published one's size and looks; `odd_name` takes the place of the first variant's."""
    chance = np.random.default_rng(0)
    cells: list[dict[str, Any]] = []
    series, memory, prefill, baseline = {}, {}, {}, {}
    for model, giga in MODELS.items():
        for place, (variant, bits) in enumerate(VARIANTS.items()):
            stack, quant = variant.split(" ")
            quant = odd_name if odd_name and place == 0 else quant
            row = _row(f"qwen1.5-{model}", stack, quant, giga, bits, tokens)
            cells.append(row)
            if row["status"] != "ok":
                continue
            name = row["name"]
            series[name] = _series(row, tokens, chance)
            memory[name] = _memory(row, chance)
            lengths = np.arange(1, 501.0)
            ms = np.maximum(row["B_ms"], lengths * giga / 40) * (1 + chance.normal(0, 0.01, 500))
            prefill[name] = {0: Curve(lengths, ms)}
            if stack == "llamacpp":
                baseline[name] = empty_cell() | {
                    "B_ms": row["B_ms"] * 1.04,
                    "W_tokens_per_ms": row["W_tokens_per_ms"] * 0.97,
                }
    return Study(
        title="Qwen1.5 on an RTX 4090",
        cells=cells,
        series=series,
        memory=memory,
        prefill=prefill,
        baseline=baseline,
        further_methods={
            "how_to_repeat_it": "harness run configs/4090-qwen15.yaml",
            "harness": "0.4.0 (commit 0f3a954)",
            "protocol": {"new_tokens": tokens - 25, "repeats": 3, "warmup": {"window_tokens": 16}},
            "versions": {
                "llamacpp": ["llama-cpp-python 0.3.16", "ggml 0.9.4"],
                "hf": ["transformers 4.57.1"],
            },
        },
        warnings=["results/rtx-4090/x/record.json: not a record: lacks a schema number"],
    )


def _row(model: str, stack: str, quant: str, giga: float, bits: float, tokens: int) -> dict[str, Any]:
    size = giga * 1e9 * bits / 8
    kv_bytes = 98_304 * giga**0.5
    B_theory, W_theory = size / BANDWIDTH * 1e3, BANDWIDTH / kv_bytes / 1e3
    fixed = 1.1 if stack == "llamacpp" else 14.0
    hidden = stack == "hf" and giga < 4
    B_ms = fixed + B_theory / (0.85 if stack == "llamacpp" else 0.7)
    W = W_theory * (0.62 if stack == "llamacpp" else 0.4)
    row: dict[str, Any] = empty_cell() | {
        "cell": f"{model}.{stack}.{quant}",
        "name": f"{model} {stack} {quant}",
        "model": model,
        "stack": stack,
        "variant": quant,
        "kind": "measured",
        "weights": "synthetic",
        "status": "ok",
        "reasons": [],
        "repeats_ok": 3,
        "repeats": 3,
        "machine": "rtx-4090",
        "device": "cuda",
        "tokens": tokens - 25,
        "n_ctx": tokens,
        "bpw": bits,
        "model_bytes": size,
        "file_bytes": size * 1.01,
    }
    if size + tokens * kv_bytes > MEMORY_BYTES:
        return row | {"status": "oom", "reasons": ["CUDA out of memory while loading"], "repeats_ok": 0}
    if quant == "hqq" and giga > 10:
        why = "no kernel for this shape: expected a multiple of 4096, got 13696"
        return row | {"status": "error", "reasons": [why], "repeats_ok": 0}
    spiky = stack == "hf"
    return row | {
        "ttft_ms": B_ms * 1.3,
        "B_ms": B_ms,
        "B_ci95_ms": [B_ms * 0.985, B_ms * 1.02],
        "W_tokens_per_ms": W,
        "W_ci95": [W * 0.9, W * 1.15],
        "W_identifiable": not hidden,
        "shape": "hinge" if hidden else "staircase",
        "segments": [],
        "spikes": {"count": 39, "size_ms": 120.0, "period_tokens": 256.0} if spiky else row["spikes"],
        "flags": [{"code": "spikes", "detail": "39 tokens 120 ms slower, every 256"}] if spiky else [],
        "slow_from_n": None,
        "last_n": tokens,
        "start_tokens_per_s": 1e3 / B_ms,
        "end_tokens_per_s": 1e3 / (B_ms + tokens / W),
        "B_theory_ms": B_theory,
        "W_theory_tokens_per_ms": W_theory,
        "B_ratio": B_theory / B_ms,
        "W_ratio": W / W_theory,
        "B_measured_ratio": B_theory / B_ms / 0.92,
        "W_measured_ratio": W / W_theory / 0.92,
        "B_as_w16_ms": B_ms * 16 / bits,
        "weight_bytes_per_token": size * 0.94,
        "kv_bytes_per_token": kv_bytes,
        "peak_rss_bytes": 2e9,
        "peak_vram_bytes": size + tokens * kv_bytes,
        "loaded_bytes": size * 1.02,
        "max_ctx": int((MEMORY_BYTES - size) / kv_bytes),
        "fixed_ms": fixed,
        "perplexity": 8 + 30 / giga**0.5 / bits**2,
        "dominated_by": "fixed" if fixed > B_ms / 2 else "bytes",
        "prefill_knees": {"last": [int(6 * bits), 544]},
    }


def _series(row: dict[str, Any], tokens: int, chance: np.random.Generator) -> Curve:
    n = np.arange(26.0, tokens + 1)
    ms = row["B_ms"] + (np.ceil(n / 256) * 256 - 1) / row["W_tokens_per_ms"]
    ms *= 1 + chance.normal(0, 0.01, len(n))
    if row["stack"] == "hf":
        ms[200::256] += 120
    ms[0] = row["ttft_ms"]
    return Curve(n, ms)


def _memory(row: dict[str, Any], chance: np.random.Generator) -> MemoryCurve:
    seconds = np.arange(0, 120, 0.2)
    grown = np.minimum(seconds / 10, 1)
    rss = 4e8 + 1.6e9 * grown + chance.normal(0, 1e6, len(seconds))
    return MemoryCurve(seconds, rss, row["peak_vram_bytes"] * (0.7 * grown + 0.3 * seconds / 120))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=10_000)
    arguments = parser.parse_args()
    made = study(arguments.tokens)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.out or Path(folder) / "report.html"
        begun = time.perf_counter()
        page.write(path, made)
        seconds, size = time.perf_counter() - begun, path.stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{len(made.cells)} cells, {len(made.series)} series of {arguments.tokens} tokens")
    _say("page written in", seconds, "s", TARGETS["time"])
    imports = f"(of which arrays and imports: {before / 1e6:.0f})"
    _say("peak memory of the process, MB", peak / 1e6, imports, TARGETS["memory"] / 1e6)
    _say("page, MB", size / 1e6, "", TARGETS["size"] / 1e6)
    return 0


def _say(what: str, value: float, unit: str, target: float) -> None:
    verdict = "reached" if value <= target else "missed"
    print(f"{what} {value:.2f} {unit} target: under {target:g}, ratio {value / target:.3f}: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
