"""The real mlx-lm on a CPU, small random checkpoints: what it quantizes, computes and holds is what was asked
for, or is not measured."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import records_below, settled, told
from small_checkpoints import config_of, configure, made

from harness.theory.decoder import Decoder, dense, kv_elements_per_token, parameters

SHAPE = dense("qwen2", 512, 128, 2, 256, 4, 2, 32, qkv_bias=True)
LAYERS = 7 * SHAPE.count + 1  # the lm_head too


@pytest.fixture
def of(real_config, tmp_path):
    """Writes a config of a small checkpoint: `of({"quant": "int4"}, {...}, shape=SHAPE)`."""

    def write(*variants: dict, shape: Decoder = SHAPE, **keys) -> Path:
        model = {"name": "small", "weights": str(made(tmp_path / "small", shape))}
        return real_config(*({"stack": "mlx"} | each for each in variants), model=model, **keys)

    return write


def test_each_type_runs_and_is_what_the_layers_in_memory_are(harness, of, tmp_path, mlx_interpreter):
    ran = harness("run", of({"quant": ["int4", "bf16"]}, {"quant": "int8", "ahead": True}), "--json")
    rows = {row["variant"]: row for row in ran.json}
    assert {name: settled(row) for name, row in rows.items()} == dict.fromkeys(rows, "ok")
    records = {record["variant"]: record for record in records_below(tmp_path / "results")}
    bits = {"int4": 4, "int8-ahead=true": 8}
    for name, record in records.items():
        loaded, counters = record["loaded"], record["done"]["counters"]
        assert counters == {"evaluated_tokens": 25 + 40 - 1}  # the last token is never fed back
        assert loaded["quant"] == name.removesuffix("-ahead=true")
        assert loaded["kernels"][loaded["kernel_asked"]] == LAYERS
        assert (loaded["parameters"], loaded["leftovers"]) == (parameters(SHAPE), [])
        assert (loaded["tied"], loaded["devices"]["cache"]) == (False, {"cpu": SHAPE.count})
        element = 2 if name == "bf16" else 4
        assert (loaded["kv_read"], loaded["options"]["compute"]) == (
            "grows",
            {2: "bf16", 4: "f32"}[element],
        )
        assert loaded["kv_bytes_per_token"] == element * kv_elements_per_token(SHAPE)
        assert record["done"]["facts_changed"]["memory"]["kv"] == {"cpu": 256 * loaded["kv_bytes_per_token"]}
        if name in bits:  # matrices in groups of 64, each with a scale and a bias
            matrices = loaded["bytes_by_type"]["packed"] * 8 // bits[name]
            assert (
                loaded["bytes_by_type"]["scales"] == loaded["bytes_by_type"]["biases"] == matrices // 64 * 4
            )
            vectors = parameters(SHAPE) - matrices
            assert loaded["model_bytes"] == matrices * bits[name] // 8 + matrices // 64 * 8 + vectors * 4
        else:
            assert loaded["model_bytes"] == 2 * parameters(SHAPE)


def test_each_type_computes_its_model_and_products_added_up_in_bf16_do_not(
    harness, of, hf_interpreter, mlx_interpreter
):
    """The kernel of a CPU adds up in the type of the activations: over 2,816 numbers bf16 loses 7%."""
    wide = dense("qwen2", 512, 128, 2, 2816, 4, 2, 32, qkv_bias=True)
    variants = {"quant": ["int4", "int8", "bf16"]}, {"quant": "int4", "compute": "bf16"}
    checks = harness("run", "--check-weights", of(*variants, shape=wide, new_tokens=20), "--json").json
    found = {check["variant"]: check for check in checks}
    wrong = found.pop("int4-compute=bf16")
    assert {name: check["verdict"] for name, check in found.items()} == dict.fromkeys(found, "agrees")
    own = [depth["relative_error"] for name in ("int4", "int8") for depth in found[name]["own"]]
    assert max(own) < 0.002  # the reference's float16
    assert (wrong["verdict"], "off its own weights" in wrong["reason"]) == ("wrong", True)


def test_layers_that_have_no_whole_groups_are_known_before_and_invalid_after(
    harness, of, tmp_path, mlx_interpreter
):
    odd = dense("llama", 512, 128, 1, 96, 2, 2, 64)
    path = of({"quant": "int8"}, shape=odd)
    assert "in_features 96 is not divisible by 64" in harness("run", path, "--dry-run").words
    (row,) = harness("run", path, "--json").json
    assert row["status"] == "invalid"
    assert "1 linear layer is not quantized as requested: model.layers.0.mlp.down_proj" in " ".join(
        row["reasons"]
    )


def test_a_type_given_twice_is_a_sentence_before_anything_runs(harness, of):
    twice = harness("run", of({"quant": "bf16", "compute": "f32"}), "--dry-run", "--json").json
    assert "compute is of quantized weights" in twice[0]["will_be_refused"][0]


SESSION = """
import json, math
import numpy as np
from runners.protocol import Request
from runners.stacks import mlx

def opened(path, **options):
    given = {"quant": "f32", "group_size": 64, "compute": None, "ahead": False} | options
    return mlx.load(Request("generate", "mlx", "cpu", {"path": path}, given))

old, new, broken, quantized = %r
PROMPT, found = list(range(3, 303)), {}
one, ahead, five = opened(old), opened(old, ahead=True), opened(new)
ids = list(one.generate(PROMPT, 12))
found["ahead"] = list(ahead.generate(PROMPT, 12)) == ids and ahead.evaluated() == one.evaluated() == 311
found["transformers 5"] = list(five.generate(PROMPT, 12)) == ids

def close(a, b):
    return bool(np.abs(a - b).max() < 1e-4 * np.abs(b).max())

one.empty(400)
together = one.feed(PROMPT, len(PROMPT))
one.empty(400)
each = np.concatenate([one.feed([token], 1) for token in PROMPT])
found["one by one"] = close(each, together)
kept = one.keep()
one.write_kept(kept, mlx.Path(%r))
read = one.read_kept(mlx.Path(%r))
for name, cut in (("truncated", lambda: one.truncate(256)), ("restored", lambda: one.restore(kept, 256)),
                  ("read", lambda: one.restore(read, 256))):
    cut()
    found[name] = one.held() == 256 and close(one.feed(PROMPT[256:], 1), together[-1:])
found["steps"] = list(one.steps(12)) == ids
one.truncate(0)
one.restore(one.keep(), 0)
found["emptied"] = one.held() == 0 and close(one.feed(PROMPT, 1), together[-1:])
for name, path in (("damaged", broken), ("quantized", quantized)):
    try:
        list(opened(path).generate([1, 2, 3], 4))
    except ValueError as failure:
        found[name] = f"{type(failure).__name__}: {failure}"
print(json.dumps(found))
"""


def test_a_session_keeps_its_context_and_loads_no_other_model_than_the_checkpoints(tmp_path, mlx_interpreter):
    """Rotary positions in rope_parameters, and no word on whether the lm_head is the embedding: mlx-lm would
    take others than the model's."""
    shape = dense("qwen2", 512, 64, 1, 128, 2, 1, 32, qkv_bias=True)
    old = made(tmp_path / "old", shape)
    new, broken = (shutil.copytree(old, tmp_path / name) for name in ("new", "broken"))
    quantized = configure(shutil.copytree(old, tmp_path / "q"), quantization={"bits": 4, "group_size": 64})
    config = config_of(new)
    del config["tie_word_embeddings"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    (new / "config.json").write_text(json.dumps(config))
    content = bytearray((broken / "model.safetensors").read_bytes())
    content[-2:] = b"\xc0\x7f"  # NaN in bfloat16
    (broken / "model.safetensors").write_bytes(content)
    file = str(tmp_path / "kept")
    (line,) = told(mlx_interpreter, SESSION % ((str(old), str(new), str(broken), str(quantized)), file, file))
    found = json.loads(line)
    assert found.pop("damaged").startswith("ValueError: not-a-number logits at token 4: ")
    refused = f"Refused: {quantized}: is quantized (quantization); mlx loads only 16- and 32-bit checkpoints"
    assert found.pop("quantized").startswith(refused)
    assert found == dict.fromkeys(found, True)
    assert len(found) == 8
