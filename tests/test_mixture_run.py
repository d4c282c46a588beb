"""Mixtures of experts, windows and hybrids measured in llama.cpp: the recorded bytes of a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import records_below
from gguf_again import finish
from gguf_holes import config as config_of
from gguf_holes import write_random

from harness.analysis import traffic
from harness.theory import decoder, floors
from harness.theory.ggml_quants import quantized

PROMPT, NEW = 25, 40


@pytest.fixture
def measured(harness, real_config, llamacpp_interpreter, tmp_path: Path) -> Callable[..., Any]:
    """The record of a random model, and the model: `measured("qwen3_moe", "q8_0")`."""

    def run(kind: str, quant: str, **changes: Any) -> tuple[Any, decoder.Decoder]:
        made = write_random(tmp_path / "model.gguf", config_of(kind, **changes))
        short = {"prompt_tokens": PROMPT, "new_tokens": NEW, "warmup": {"max_windows": 2}}
        model = {"name": "tiny", "weights": "model.gguf"}
        harness("run", real_config({"stack": "llamacpp", "quant": quant}, model=model, **short))
        (record,) = records_below(tmp_path / "results")
        assert record["tokens"] == NEW
        return record, made

    return run


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "granitemoehybrid"])
def test_of_a_mixture_a_step_reads_only_the_experts_of_one_token(kind, measured):
    record, made = measured(kind, "q8_0")
    expected = floors.demand_of_tensors(made, quantized(made, "q8_0"))
    assert traffic.weight_bytes_per_token(record) == pytest.approx(expected.weight_bytes_per_token, rel=1e-4)
    assert traffic.model_bytes(record) == pytest.approx(expected.resident_bytes, rel=1e-4)
    assert traffic.kv_bytes_per_token(record) == expected.kv_bytes_per_token


def test_of_layers_with_a_window_a_step_reads_no_more_than_the_window(measured):
    record, made = measured("gemma3_text", "f16", sliding_window=32)
    (step,) = [traffic.prefill_demand(record)]
    assert step is not None
    assert {(reach.window, reach.kv_bytes) for reach in step.reaches} == {
        (cache.window, layers * 2 * (cache.k + cache.v)) for cache, layers in decoder.kinds(made).items()
    }
    assert traffic.limits(record, 1e9)["measured"].slope_ms is None


def test_a_hybrid_reads_and_writes_its_states_at_every_step(measured):
    record, made = measured("falcon_h1", "f16")
    step = traffic.prefill_demand(record)
    assert step is not None
    states = sum(cache.state * layers for cache, layers in decoder.kinds(made).items())
    assert step.state_bytes == states * floors.STATE_BYTES > 0
    limit = traffic.limits(record, 1e9)["measured"]
    assert limit.B_ms == pytest.approx((step.weight_bytes_per_token + 2 * step.state_bytes) / 1e6)


def test_a_mixture_of_an_unknown_architecture_is_refused_with_the_reason(harness, real_config, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "strange")
    writer.add_uint32("strange.expert_count", 8)
    writer.add_tensor("token_embd.weight", np.zeros((32, 32), np.float16))
    finish(writer)
    path = real_config({"stack": "llamacpp", "quant": "f16"}, model={"name": "tiny", "weights": "model.gguf"})
    ran = harness("run", path, "--dry-run")
    assert "is a mixture of experts whose layers of architecture 'strange' are" in ran.words + ran.err
