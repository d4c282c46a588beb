"""The estimate of memory against llama.cpp's own dry account, by model, context and flash attention.

    python benchmarks/memory_account.py [--quant q4_k_m] [--lengths 4096 32768 131072] [MODEL...]

Writes each model's header at its real size with a hole in place of the values (a few KB on the disk), and
asks llama.cpp for the memory of its weights, caches and buffers without allocating it. Nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gguf_holes import header_of
from test_checkpoint import write

from harness.base import data
from harness.campaign import worker
from harness.stacks import build
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from harness.theory import decoder, floors
from harness.theory.architectures import decoder_of
from harness.theory.decoder import Decoder
from harness.theory.ggml_quants import quantized
from harness.theory.known_models import config_of
from harness.theory.memory import LlamaCpp, Model, Parts
from harness.theory.tensors import Tensor
from runners.protocol import Request

COLUMNS = ("model", "n_ctx", "flash", "weights GB", "KV MB", "compute MB", "llama.cpp: KV", "compute")
COLUMNS += ("error", "on a CPU")
LENGTHS = (4096, 32_768, 131_072)
FAMILIES = (
    *("mixtral-8x7b", "mixtral-8x22b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "qwen3-235b-a22b"),
    *("gpt-oss-20b", "gpt-oss-120b", "deepseek-v2-lite", "deepseek-v3", "glm-4.5-air", "llama-4-scout"),
    *("llama-4-maverick", "qwen3-next-80b-a3b", "qwen3.5-4b", "granite-4.0-h-tiny", "granite-4.0-h-small"),
    *("falcon-h1-7b", "nemotron-nano-9b-v2", "lfm2-8b-a1b", "gemma-2-9b", "gemma-3-1b", "gemma-3-27b"),
    *("gemma-3n-e4b", "phi-3-mini-128k", "phi-3.5-moe", "phi-4", "mistral-small-3.2-24b", "ministral-8b"),
    *("granite-3.3-8b", "smollm3-3b", "olmo-2-7b", "olmo-3-7b", "command-r7b", "starcoder2-7b"),
)
"""One or two of each kind of layer that the theory knows."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="shipped models, or all (default: a choice)"
    )
    parser.add_argument("--quant", default="q4_k_m")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    given = parser.parse_args()
    names = list(data.model_names()) if given.models == ["all"] else given.models or FAMILIES
    environment = stacks()["llamacpp"].environment_for("cpu")
    interpreter = build.find(environment) if environment else None
    if interpreter is None:
        raise SystemExit("llama.cpp is not built here: harness env build llamacpp")
    rows = []
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for row in compared(name, given.quant, given.lengths, interpreter, Path(folder)):
                rows.append(row)
                print(line(row), flush=True)
    for side in ("error", "cpu_error"):
        off = [row for row in rows if abs(row[side]) > 0.01]
        print(f"{side}: {len(rows) - len(off)} of {len(rows)} within 1%", file=sys.stderr)
    return 0


def compared(
    name: str, quant: str, lengths: Sequence[int], interpreter: Interpreter, folder: Path
) -> Iterator[dict[str, Any]]:
    """One row for each length without and with flash attention. `error`: of weights, caches and buffers as
    reserved, which a GPU takes; `cpu_error`: as touched on a CPU, with scratch memory. Of the total."""
    config = config_of(name)
    config = dict(config.get("text_config", config))  # type: ignore[call-overload]
    if table := config.get("vocab_size_per_layer_input"):
        config["vocab_size"] = table  # files of Gemma 3n have no rows for the tokens of images and sounds
    made = decoder_of(config)
    stored = quantized(made, "mxfp4_moe" if made.arch == "gpt-oss" else quant)
    path = folder / f"{name}.gguf"
    write(header_of(path, made, config), stored)
    for flash in (False, True):
        try:
            said = account(interpreter, folder, path, lengths, flash_attn=flash)
        except worker.JobFailed as failed:
            print(f"{name}: {failed}", file=sys.stderr)
            return
        for at in said["at"]:
            yield row_of(name, made, stored, flash, said, at)
    path.unlink()


def account(
    interpreter: Interpreter, folder: Path, path: Path, lengths: Sequence[int], **options: Any
) -> dict[str, Any]:
    """The job `account` of llama.cpp. Raises worker.JobFailed."""
    defaults = {each.name: each.default for each in stacks()["llamacpp"].options.values()}
    workload = {"kind": "account", "n_ctx": list(lengths)}
    model = {"name": path.stem, "path": str(path), "shape": None}
    resolved = defaults | {"threads": 1, "mmap": False} | options
    request = Request("account", "llamacpp", "cpu", model, resolved, [workload])
    return worker.facts_of(worker.run_job(request, interpreter, folder, 300))


def row_of(
    name: str, made: Decoder, stored: Sequence[Tensor], flash: bool, said: dict[str, Any], at: dict[str, Any]
) -> dict[str, Any]:
    n_ctx = at["n_ctx"]
    needs = floors.demand_of_tensors(made, stored)
    of_token = 2.0 * decoder.kv_elements_per_token(made)
    held = Model(made, sum(tensor.bytes for tensor in stored), needs.embedding_bytes, of_token)
    gpu = LlamaCpp(True, flash).parts(held, n_ctx)
    cpu = LlamaCpp(False, flash).parts(held, n_ctx)
    weights = sum(said["model"].values())
    reserved = {part: sum(on.values()) for part, on in at["memory"].items()}
    touched = {part: sum(on.values()) for part, on in at["touched"].items()}
    buffers = reserved["compute"] + reserved["output"]
    work = sum(touched[part] for part in ("compute", "output", "work", "cells"))
    whole = gpu | {"weights": held.weight_bytes}  # here the input embedding is on the same device
    return {
        "model": name,
        "n_ctx": n_ctx,
        "flash_attn": flash,
        "weights": weights,
        "kv": reserved["kv"],
        "compute": buffers,
        "touched": work,
        "estimated": {"weights": held.weight_bytes, "kv": gpu["kv"], "compute": gpu["compute"]},
        "estimated_touched": cpu["compute"],
        "error": total(whole) / (weights + reserved["kv"] + buffers) - 1,
        "cpu_error": total(cpu) / (weights + reserved["kv"] + work) - 1,
    }


def total(parts: Parts) -> float:
    """Without the process or the CUDA context, which llama.cpp does not count."""
    return sum(size for part, size in parts.items() if part != "runtime")


def line(row: dict[str, Any]) -> str:
    ours = row["estimated"]
    cells = [
        row["model"],
        f"{row['n_ctx']:,}",
        "on" if row["flash_attn"] else "off",
        f"{row['weights'] / 1e9:.2f}",
        f"{ours['kv'] / 1e6:,.1f}",
        f"{ours['compute'] / 1e6:,.1f}",
        f"{row['kv'] / 1e6:,.1f}",
        f"{row['compute'] / 1e6:,.1f}",
        f"{row['error']:+.2%}",
        f"{row['cpu_error']:+.2%}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
