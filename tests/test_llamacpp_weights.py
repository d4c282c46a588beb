"""Quantized files: the published sizes, every type near full precision, one sentence for what cannot be."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.stacks.header import stacks
from harness.theory import tensors
from harness.theory.decoder import Shape, parameters
from harness.theory.hf_config import SHAPES
from harness.theory.memory import OF_MIXTURES

QUANTS = [q for q in stacks()["llamacpp"].options["quant"].choices if q != OF_MIXTURES]


def unquantized(job: Any, target: Path, shape: Shape, dtype: str) -> dict[str, Any]:
    """A synthetic model as a GGUF; its checkpoint is gone again."""
    model, made = {"name": "m", "path": None, "shape": asdict(shape)}, target.with_suffix(".hf")
    job(job="synthesize", model=model, options={"threads": 2}, files={"target": str(made)})
    files = {"source": str(made), "target": str(target)}
    facts = job(job="convert", options={"dtype": dtype, "threads": 2}, files=files)
    for path in made.iterdir():
        path.unlink()
    return facts


def quantize(job: Any, source: Path, quant: str, target: Path) -> dict[str, Any]:
    files = {"source": str(source), "target": str(target)}
    return job(job="quantize", options={"quant": quant, "threads": 2}, files=files)


def test_the_published_sizes_of_0_5b_come_out_of_real_files(job, tmp_path):
    source, target = tmp_path / "f16.gguf", tmp_path / "quantized.gguf"
    made = unquantized(job, source, SHAPES["qwen1.5-0.5b"], "f16")
    assert made["parameters"] == parameters(SHAPES["qwen1.5-0.5b"])
    # As in published/gguf_bpw.csv; the other four types take 50 s more, and test_gguf_types.py adds them up.
    printed = {"q8_0": ("628.14", "8.50"), "q5_0": ("426.32", "5.77"), "q4_0": ("371.02", "5.02")}
    printed["q3_k_m"] = ("328.00", "4.44")
    for quant, figures in printed.items():
        facts = quantize(job, source, quant, target)
        bpw = facts["model_bytes"] * 8 / facts["parameters"]
        assert (f"{facts['model_bytes'] / 2**20:.2f}", f"{bpw:.2f}") == figures
        assert facts["model_bytes"] == tensors.model_bytes(SHAPES["qwen1.5-0.5b"], quant)
        target.unlink()
    source.unlink()


@pytest.mark.parametrize("shape", ["tiny-qwen2", "tiny-llama"])
def test_every_type_loads_decodes_and_stays_near_full_precision(job, tmp_path, shape):
    source = tmp_path / "source.gguf"
    unquantized(job, source, SHAPES[shape], "f32")
    options = {name: option.default for name, option in stacks()["llamacpp"].options.items()}
    options |= {"threads": 1, "n_ctx": 64}  # two on a busy machine wait for each other
    workload = {"ids": list(range(40, 72)), "prompt_tokens": 24, "windows": [[24, 32]], "seconds": None}
    found = {}
    for quant in QUANTS:
        target, rows = tmp_path / f"{quant}.gguf", tmp_path / f"{quant}.npy"
        quantize(job, source, quant, target)
        job(
            job="logits",
            model={"name": "m", "path": str(target), "shape": None},
            options=options | {"quant": quant},
            workloads=[workload],
            files={"logits": str(rows)},
        )
        found[quant] = np.load(rows)
    exact, off = found["f32"], {}
    for quant, logits in found.items():
        assert logits.shape == (32, SHAPES[shape].vocab_size)
        assert 0.5 < logits.std() < 3  # activations near RMS 1
        off[quant] = float(np.sqrt(((logits - exact) ** 2).mean()) / exact.std())
    bits = {"f32": 24, "f16": 11, "bf16": 8} | {q: int(q[1]) for q in QUANTS if q.startswith("q")}
    for quant, error in off.items():
        # In steps of the type, 2 to 9 were seen: outliers share a scale with others, activations round too.
        assert error < 12 * 2.0 ** -bits[quant], (quant, error)


def test_what_cannot_be_quantized_is_one_sentence(job, tmp_path):
    with pytest.raises(RuntimeError, match=r"no such file: .*nothing\.gguf"):
        quantize(job, tmp_path / "nothing.gguf", "q4_0", tmp_path / "target")
    (tmp_path / "text.gguf").write_text("this is no model")
    with pytest.raises(RuntimeError, match=r"text\.gguf.*invalid magic"):
        quantize(job, tmp_path / "text.gguf", "q4_0", tmp_path / "target")
    with pytest.raises(RuntimeError, match=r"text\.gguf would be overwritten"):
        quantize(job, tmp_path / "text.gguf", "q4_0", tmp_path / "text.gguf")
