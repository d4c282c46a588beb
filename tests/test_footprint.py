"""The estimate of memory against what was measured: every longest context of the published study, llama.cpp's
own account of its buffers."""

import json
import statistics
from dataclasses import replace
from typing import Any

import gguf_holes
import pytest
from conftest import STUDY

from harness.theory import ggml_quants
from harness.theory.architectures import decoder_of
from harness.theory.decoder import dense, kv_elements_per_token, lm_head_params
from harness.theory.hf_config import SHAPES
from harness.theory.known_models import config_of
from harness.theory.loaded_sizes import loaded_bytes
from harness.theory.machines import MACHINES
from harness.theory.memory import (
    Engine,
    LlamaCpp,
    Model,
    Torch,
    compute_bytes,
    exllama_v2_scratch,
    longest_context,
)
from harness.theory.packed_sizes import Packing, packed_bytes
from harness.theory.tensors import of_shape

CARD = MACHINES["rtx-4090"]
AVAILABLE = CARD.memory_bytes - CARD.reserve.value  # the reserve that the study had on its card: 0.7 GiB


def of_study(record: dict[str, Any]) -> tuple[Engine, Model]:
    """How a row of the study held its model. Checkpoints as large as its files, where it has their size."""
    shape, stack, variant = dense(**record["model"]["shape"]), record["stack"], record["variant"]
    kv = 2 * kv_elements_per_token(shape)
    if stack == "llamacpp":
        tensors = ggml_quants.quantized(shape, "f16" if variant == "fp16" else variant, as_published=True)
        embedding = sum(tensor.bytes for tensor in tensors if tensor.part == "embedding")
        return LlamaCpp(on_gpu=True), Model(shape, sum(t.bytes for t in tensors), embedding, kv)
    quant = {"int8": "int8", "int4": "nf4"}.get(variant) if stack == "bnb" else None
    weights: float = loaded_bytes(of_shape(shape), "bf16", quant)
    if stack in ("gptq", "autoawq"):
        packing = Packing({"gptq": "gptq", "autoawq": "awq"}[stack])
        weights = sum(packed_bytes(of_shape(shape), packing).values())
        weights = max(weights, record["reported"]["file_bytes"] or 0)
    scratch = exllama_v2_scratch(shape) if "exllamav2" in variant else 0.0
    embedding = 2.0 * lm_head_params(shape)
    engine = Torch(on_gpu=True, cache="rebuilt", scratch_bytes=scratch, rope_tables=True)
    return engine, Model(shape, weights, embedding, kv)


def measured() -> list[dict[str, Any]]:
    """The study's rows with a longest context, or none for want of memory. Those with fused layers are left
    out: their cache rolled over, so that no length was too long."""
    found = [json.loads(path.read_text()) for path in sorted(STUDY.glob("*/*/record.json"))]
    found = [record for record in found if "fused" not in record["variant"]]
    return [r for r in found if "max_ctx_measured_4090.csv" in r["reported"].get("printed", {})]


def test_the_longest_contexts_of_the_published_study_are_predicted_within_5_percent_in_the_median():
    errors = {}
    for record in measured():
        said = record["reported"]["printed"]["max_ctx_measured_4090.csv"]["max_ctx"]
        found = longest_context(*of_study(record), AVAILABLE)
        if said == "oom":
            assert found is None, record["cell"]
        elif said.endswith("+"):
            assert found is not None
            assert found > int(said[:-1]), record["cell"]
        elif said != "exception":
            assert found is not None, record["cell"]
            errors[record["cell"]] = abs(found / int(said) - 1)
    assert len(errors) >= 70
    assert statistics.median(errors.values()) <= 0.05
    assert max(errors.values()) <= 0.15, max(errors.items(), key=lambda each: each[1])


@pytest.mark.parametrize(("budget_mib", "searched"), [(1700, 2560), (3072, 17_152)])
def test_a_static_cache_searched_on_a_cpu_is_predicted_within_a_granule_and_1_percent(budget_mib, searched):
    """Qwen1.5-0.5B in bf16, one thread; 2,560 tokens were filled too."""
    shape = SHAPES["qwen1.5-0.5b"]
    model = Model(shape, loaded_bytes(of_shape(shape), "bf16", None), 0.0, 2 * kv_elements_per_token(shape))
    found = longest_context(Torch(on_gpu=False, cache="static", granule=256), model, budget_mib * 2**20)
    assert found is not None
    assert abs(found - searched) <= 256 + 0.01 * searched


@pytest.mark.parametrize(("quant", "searched"), [("q8_0", 2304), ("q4_k_m", 4096), ("q4_0", 4096)])
def test_the_longest_contexts_searched_on_a_cpu_are_predicted_within_a_granule_and_1_percent(quant, searched):
    """Found and proved by `harness run --max-ctx quickstart --set memory_budget=1GiB`: README.md."""
    shape, tensors = SHAPES["qwen1.5-0.5b"], ggml_quants.quantized(SHAPES["qwen1.5-0.5b"], quant)
    model = Model(shape, sum(tensor.bytes for tensor in tensors), 0, 2 * kv_elements_per_token(shape))
    found = longest_context(LlamaCpp(on_gpu=False), model, 2**30)
    assert found is not None
    assert abs(found - searched) <= 256 + 0.01 * searched


@pytest.mark.parametrize(
    ("name", "off", "flash"),
    [
        ("qwen3-30b-a3b", 2_246_668_452, 320_161_710),
        ("deepseek-v2-lite", 1_231_447_655, 252_339_815),
        ("gemma-3-27b", 2_285_381_878, 560_075_899),
        ("granite-4.0-h-tiny", 890_649_969, 218_502_267),
        ("lfm2-8b-a1b", 2_237_933_814, 142_868_480),
    ],
)
def test_the_compute_buffer_is_near_that_of_llama_cpp(name, off, flash):
    """Bytes that llama-cpp-python 0.3.36 states for 32,768 tokens, without and with flash attention."""
    made = decoder_of(config_of(name))
    for stated, flash_attn in ((off, False), (flash, True)):
        estimate = LlamaCpp(True, flash_attn).parts(Model(made, 0, 0, 0), 32_768)["compute"]
        assert estimate == pytest.approx(stated, rel=0.02 if stated > 1e9 else 0.15)


@pytest.mark.parametrize("kind", ["deepseek_v2, lite", "qwen3_moe", "falcon_h1", "qwen3_next", "lfm2"])
def test_a_model_that_lacks_tensors_is_estimated_without_them(kind):
    """A file may be of another version, or damaged; each tensor in turn is left out of all layers."""
    made = decoder_of(gguf_holes.config(kind))
    whole = compute_bytes(made, 512, 512, 4096, 0, False)
    for name in {piece.name for layer in made.layers() for piece in layer.pieces}:
        runs = tuple(
            (replace(layer, pieces=tuple(piece for piece in layer.pieces if piece.name != name)), times)
            for layer, times in made.runs
        )
        assert 0 < compute_bytes(replace(made, runs=runs), 512, 512, 4096, 0, False) <= 2 * whole
