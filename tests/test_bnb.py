"""The real thing: bitsandbytes on a CPU, small random checkpoints, one worker at a time."""

from __future__ import annotations

import pytest
from test_hf import request_of, said

from harness.theory.decoder import layer_params, parameters
from harness.theory.hf_config import SHAPES
from runners.protocol import Failed

SHAPE = SHAPES["tiny-qwen2"]
LINEARS = 7 * SHAPE.layers
QKV_BIASES = SHAPE.layers * (SHAPE.q_width + 2 * SHAPE.kv_width)
MATRICES = layer_params(SHAPE, norms=False) - QKV_BIASES


def test_int8_holds_a_byte_a_weight_and_a_scale_a_row_and_leaves_the_rest(
    worker, checkpoint, bnb_interpreter
):
    request = request_of(checkpoint("tiny-qwen2"), "bnb", quant="int8")
    loaded, _, end = said(worker(request, bnb_interpreter))
    rows = SHAPE.q_width + 2 * SHAPE.kv_width + 2 * SHAPE.intermediate_size + 2 * SHAPE.hidden_size
    assert loaded["bytes_by_type"]["int8"] == MATRICES
    assert loaded["bytes_by_type"]["int8 scales"] == 4 * rows * SHAPE.layers
    assert loaded["bytes_by_type"]["bfloat16"] == 2 * (parameters(SHAPE) - MATRICES)
    assert loaded["parameters"] == parameters(SHAPE)
    assert loaded["kernels"]["Linear8bitLt"] == LINEARS
    assert loaded["kernels"]["Linear"] == 1  # lm_head
    assert (loaded["kernel_asked"], loaded["quant"], loaded["leftovers"]) == ("Linear8bitLt", "int8", [])
    assert loaded["lm_head"] == {"class": "Linear", "dtype": "bfloat16"}
    assert loaded["packing"]["int8_threshold"] == [6.0]
    assert "random weights" in loaded["warnings"][0]
    assert end["counters"]["evaluated_tokens"] == 25 + 11


@pytest.mark.parametrize("quant", ["nf4", "fp4"])
def test_four_bits_hold_half_a_byte_a_weight_and_a_scale_for_64(worker, checkpoint, bnb_interpreter, quant):
    loaded, _, _ = said(worker(request_of(checkpoint("tiny-qwen2"), "bnb", quant=quant), bnb_interpreter))
    # Repacked for AVX512-BF16 the scales are bfloat16, else float32.
    scale_bytes = 2 if loaded["packing"]["repacked_for_cpu"] else 4
    assert loaded["bytes_by_type"]["uint8"] == MATRICES // 2
    assert loaded["bytes_by_type"]["absmax"] == MATRICES // 64 * scale_bytes
    assert loaded["bytes_by_type"]["bfloat16"] == 2 * (parameters(SHAPE) - MATRICES)
    assert loaded["parameters"] == parameters(SHAPE)
    assert (loaded["quant"], loaded["kernels"]["Linear4bit"]) == (quant, LINEARS)
    assert loaded["packing"]["blocksize"] == [64]
    assert loaded["warnings"] == []


def test_double_quantization_is_told_as_it_is_held_when_decoding(worker, checkpoint, bnb_interpreter):
    request = request_of(checkpoint("tiny-qwen2"), "bnb", quant="nf4", double_quant=True)
    loaded, _, _ = said(worker(request, bnb_interpreter))
    repacked = loaded["packing"]["repacked_for_cpu"]
    assert loaded["options"]["double_quant"] is (repacked == 0)
    assert ("absmax of absmax" in loaded["bytes_by_type"]) is (repacked == 0)


def test_a_type_that_the_kernel_does_not_compute_in_is_not_said_to_be_computed_in(
    worker, checkpoint, bnb_interpreter
):
    request = request_of(checkpoint("tiny-qwen2"), "bnb", quant="nf4", dtype="fp32")
    loaded, _, _ = said(worker(request, bnb_interpreter))
    assert loaded["options"]["dtype"] == ("bf16" if loaded["packing"]["repacked_for_cpu"] else "fp32")


def test_a_cache_that_does_not_fit_is_out_of_memory(worker, checkpoint, bnb_interpreter):
    request = request_of(checkpoint("tiny-qwen2"), "bnb", cache="static", n_ctx=2**31 - 1)
    last = worker(request, bnb_interpreter)[-1]
    assert isinstance(last, Failed)
    assert last.outcome == "oom"


def test_double_quantization_of_int8_is_refused(worker, checkpoint, bnb_interpreter):
    request = request_of(checkpoint("tiny-qwen2"), "bnb", quant="int8", double_quant=True)
    assert worker(request, bnb_interpreter)[-1] == Failed(
        "error", "double_quant is of nf4 and fp4; int8 has no scales to quantize"
    )


def test_no_line_is_logged_for_every_product(worker, checkpoint, bnb_interpreter, tmp_path):
    worker(request_of(checkpoint("tiny-qwen2"), "bnb", new=40, quant="int8"), bnb_interpreter, fresh=True)
    assert "will be cast" not in (tmp_path / "worker.log").read_text()
