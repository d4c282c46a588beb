"""The real torchao on a CPU: small checkpoints, quantized while transformers loads them."""

import pytest
from conftest import failures, records_below
from small_checkpoints import made

from harness.theory.decoder import parameters
from harness.theory.hf_config import SHAPES

SHAPE = SHAPES["tiny-qwen2"]
LINEARS = 7 * SHAPE.count


@pytest.fixture
def write(real_config, tmp_path):
    """A config of torchao's variants of one small checkpoint."""

    def config(*variants, **keys):
        path = tmp_path / "small"
        weights = path if path.exists() else made(path, SHAPE)
        rows = [{"stack": "torchao"} | each for each in variants]
        return real_config(*rows, model={"name": "small", "weights": str(weights)}, **keys)

    return config


def test_int8_is_counted_from_its_tensors_and_eager_mode_is_functional(
    harness, write, tmp_path, torchao_interpreter
):
    ran = harness("run", write({"compile": False}, {"cache": "static", "compile": False}), "--json")
    assert [row["status"] for row in ran.json] == ["functional"] * 2
    held = (1 if SHAPE.tied else 2) * SHAPE.vocab_size * SHAPE.hidden_size  # embedding and lm_head
    for record in records_below(tmp_path / "results"):
        loaded = record["loaded"]
        assert (loaded["quant"], loaded["kernel_asked"]) == ("int8", "Linear[Int8Tensor]")
        assert (loaded["kernels"]["Linear[Int8Tensor]"], loaded["leftovers"]) == (LINEARS, [])
        assert loaded["parameters"] == parameters(SHAPE)
        # A byte of a weight in the layers, and scales; 16 bits elsewhere.
        assert loaded["model_bytes"] == pytest.approx(parameters(SHAPE) + held, rel=0.03)


def test_a_compiled_step_has_a_kernel_of_its_own_and_agrees_with_its_weights(
    harness, write, tmp_path, torchao_interpreter, hf_interpreter
):
    path = write({"cache": "static"})
    assert failures(harness("run", path, "--json").json) == []
    (record,) = records_below(tmp_path / "results")
    assert record["loaded"]["options"]["compile"] is True
    (check,) = harness("run", "--check-weights", path, "--json").json
    assert check["verdict"] == "agrees"


def test_four_bits_have_no_kernel_on_a_cpu(harness, write, torchao_interpreter):
    ran = harness("run", write({"quant": "int4"}), "--dry-run")
    assert "will fail: needs a GPU (cuda)" in ran.words
