"""A quantized model's own weights in 16 bits, and two checkpoints compared tensor by tensor."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import request_for

from harness.campaign import worker
from harness.campaign.worker import JobFailed
from harness.theory.decoder import Decoder, dense_fields, dense_like
from harness.theory.hf_config import SHAPES


@pytest.fixture
def converted(job: Callable, checkpoint: Callable, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """A checkpoint and its GGUF: `converted("tiny-llama", "q4_0")`."""

    def make(name: str, quant: str = "f16", **changed: Any) -> tuple[Path, Path]:
        source, made = checkpoint(name, **changed), tmp_path / "f16.gguf"
        files = {"source": str(source), "target": str(made)}
        job(job="convert", options={"dtype": "f16", "threads": 1}, files=files)
        if quant == "f16":
            return source, made
        smaller = tmp_path / f"{quant}.gguf"
        files = {"source": str(made), "target": str(smaller)}
        job(job="quantize", options={"quant": quant, "threads": 1, "as_published": False}, files=files)
        return source, smaller

    return make


@pytest.fixture
def dequantized(job: Callable, tmp_path: Path) -> Callable[..., Path]:
    def make(source: Path, shape: Decoder | None = None, **files: str) -> Path:
        target = tmp_path / "dequantized"
        shutil.rmtree(target, ignore_errors=True)
        model = {"name": "m", "path": str(source), "shape": dense_fields(shape)}
        named = {"source": str(source), "target": str(target), **files}
        job(job="dequantize", model=model, options={"threads": 1}, files=named)
        return target

    return make


@pytest.fixture
def differences(job: Callable) -> Callable[[Path, Path], dict[str, Any]]:
    return lambda source, original: job(
        job="differences", files={"source": str(source), "original": str(original)}
    )


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("tiny-llama", {}),
        ("tiny-qwen2", {"tied": True}),
        ("tiny-qwen2", {"arch": "qwen3", "qkv_bias": False, "qk_norm": True}),
    ],
)
def test_a_16_bit_gguf_becomes_the_checkpoint_that_it_was_made_of(
    converted, dequantized, differences, name, changed
):
    source, made = converted(name, **changed)
    for given in (
        dequantized(made, config=str(source / "config.json")),
        dequantized(made, dense_like(SHAPES[name], **changed)),
    ):
        found = differences(given, source)
        assert found["missing"] == []
        assert found["compared"] > 20
        assert {tensor["row_error"] for tensor in found["matrices"]} == {0.0}
        assert {tensor["error"] for tensor in found["vectors"]} == {0.0}
        kept, original = (json.loads((path / "config.json").read_text()) for path in (given, source))
        for key in ("model_type", "rope_theta", "rms_norm_eps", "num_key_value_heads", "tie_word_embeddings"):
            assert kept[key] == original[key]


@pytest.mark.parametrize(
    ("quant", "least", "most"), [("q8_0", 0.004, 0.02), ("q4_0", 0.07, 0.15), ("q2_k", 0.2, 0.45)]
)
def test_a_quantized_gguf_is_off_by_what_its_type_loses(
    converted, dequantized, differences, quant, least, most
):
    source, made = converted("tiny-llama", quant)
    found = differences(dequantized(made, config=str(source / "config.json")), source)
    assert least < found["matrices"][0]["error"] <= found["matrices"][0]["row_error"] < most
    assert found["vectors"][0]["error"] == 0


def test_one_row_of_another_model_is_found(converted, dequantized, differences):
    source, made = converted("tiny-qwen2", "q4_0")
    reader = gguf.GGUFReader(made, "r+")
    tensor = next(each for each in reader.tensors if each.name == "blk.1.ffn_up.weight")
    tensor.data[7] = tensor.data[8].copy()
    reader.data.flush()
    worst, second = differences(dequantized(made, config=str(source / "config.json")), source)["matrices"][:2]
    assert worst["name"] == "model.layers.1.mlp.up_proj.weight"
    assert worst["row_error"] == pytest.approx(np.sqrt(2), abs=0.1)
    assert worst["error"] < 0.15 > second["row_error"]


def test_a_gguf_of_another_model_is_refused(converted, dequantized, checkpoint):
    _, made = converted("tiny-llama")
    other = checkpoint("tiny-llama", layers=3)
    with pytest.raises(JobFailed, match=r"has no blk\.2\.attn_norm\.weight, which its model requires"):
        dequantized(made, config=str(other / "config.json"))
    wider = checkpoint("tiny-llama", intermediate_size=1024)
    with pytest.raises(JobFailed, match=r"is 512 x 256; in its model it is 1024 x 256"):
        dequantized(made, config=str(wider / "config.json"))


@pytest.mark.parametrize(("quant", "least", "most"), [("nf4", 0.07, 0.15), ("int8", 0.004, 0.03)])
def test_what_bitsandbytes_holds_is_off_by_what_its_type_loses(
    bnb_interpreter, checkpoint, differences, tmp_path, quant, least, most
):
    source, target = checkpoint("tiny-qwen2", tied=True), tmp_path / "own"
    request = request_for("bnb", "dequantize", {}, source, quant=quant, n_ctx=64)
    request = replace(request, workloads=[], files={"target": str(target)})
    worker.facts_of(worker.run_job(request, bnb_interpreter, tmp_path, 900, threads=1))
    found = differences(target, source)
    assert found["missing"] == []
    assert least < found["matrices"][0]["error"] <= found["matrices"][0]["row_error"] < most
    assert found["vectors"][0]["error"] == 0
