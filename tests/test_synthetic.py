"""Synthetic checkpoints: exact in size, sane in value, the same every time, read back unchanged."""

import json

import numpy as np
import pytest
from small_checkpoints import laid, read, synthesized

from harness.models import locate
from harness.models.layout import NoLayout, dense_config
from harness.theory.architectures import decoder_of
from harness.theory.decoder import dense, dense_like, parameters
from harness.theory.hf_config import SHAPES

DENORMAL_BELOW = 2.0**-14  # in float16
# What no family has by default: each of these is written in its own way.
ODD = {
    "llama with biases": dense_like(SHAPES["tiny-llama"], qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama, mlp biases": dense_like(SHAPES["tiny-llama"], mlp_bias=True, tied=True),
    "llama, wide heads": dense_like(SHAPES["tiny-llama"], head_dim=64),
    "qwen2 with a window": dense_like(SHAPES["tiny-qwen2"], window=128),
    "qwen2, narrow heads": dense_like(SHAPES["tiny-qwen2"], head_dim=32),
    "qwen3": dense("qwen3", 512, 256, 2, 512, 8, 2, 64, qk_norm=True, tied=True),
    "qwen3 with a window": dense("qwen3", 512, 256, 2, 512, 8, 2, 64, qk_norm=True, window=128),
}


@pytest.mark.parametrize("name", [*SHAPES, *ODD])
def test_the_config_of_every_shape_reads_back_as_that_shape(name):
    shape = (SHAPES | ODD)[name]
    config = json.loads(json.dumps(laid(shape)["config"]))
    assert decoder_of(config) == shape
    assert not config.keys() & {"rope_parameters", "dtype"}  # transformers 4 would pass over them


@pytest.mark.parametrize("shape", [SHAPES["tiny-qwen2"], *ODD.values()], ids=["tiny-qwen2", *ODD])
def test_a_checkpoint_has_the_tensors_of_its_shape_and_no_others(tmp_path, shape):
    made = synthesized(tmp_path / "m", shape)
    found = locate.read(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["harness_synthetic"], config["harness_seed"]) == (True, 0)
    assert found.decoder == shape
    assert made["parameters"] == found.parameters == parameters(shape)
    assert made["tensors"] == len(found.tensors)
    assert {tensor.type for tensor in found.tensors} == {"bf16"}
    begin = (tmp_path / "m" / "model.safetensors").read_bytes()[:8]
    assert int.from_bytes(begin, "little") % 8 == 0
    assert made["bytes"] == sum(path.stat().st_size for path in (tmp_path / "m").iterdir())


def test_the_same_seed_gives_the_same_bytes_whatever_the_threads(tmp_path):
    shape = dense_like(SHAPES["tiny-qwen2"], vocab_size=20_000)  # several chunks in a tensor

    def bytes_of(name: str, **options: int) -> dict[str, bytes]:
        synthesized(tmp_path / name, shape, **options)
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    one, two = (bytes_of(f"{threads}", seed=3, threads=threads) for threads in (1, 2))
    other = bytes_of("other", seed=4)
    assert one == two
    assert one["model.safetensors"] != other["model.safetensors"]


def test_no_two_tensors_and_no_two_parts_of_one_are_alike(tmp_path):
    synthesized(tmp_path / "m", dense_like(SHAPES["tiny-qwen2"], vocab_size=20_000))
    matrices = {name: found.ravel() for name, found in read(tmp_path / "m").items() if found.ndim == 2}
    starts = [found[at : at + 64] for found in matrices.values() for at in range(0, found.size - 64, 1 << 20)]
    assert len(starts) > len(matrices)
    assert len({start.tobytes() for start in starts}) == len(starts)


def test_the_values_of_a_tensor_do_not_depend_on_its_shard(tmp_path):
    shape = SHAPES["tiny-llama"]
    synthesized(tmp_path / "whole", shape)
    synthesized(tmp_path / "sharded", shape, shard_bytes=400_000)
    shards = sorted(path.name for path in (tmp_path / "sharded").glob("*.safetensors"))
    assert shards == [f"model-{i:05d}-of-00010.safetensors" for i in range(1, 11)]
    for shard in shards:
        assert (tmp_path / "sharded" / shard).stat().st_size < 400_000 + 4096
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * parameters(shape)
    assert set(index["weight_map"].values()) == set(shards)
    assert locate.read(tmp_path / "sharded").parameters == parameters(shape)
    whole, sharded = read(tmp_path / "whole"), read(tmp_path / "sharded")
    assert whole.keys() == sharded.keys() == index["weight_map"].keys()
    for name, found in whole.items():
        assert np.array_equal(found, sharded[name]), name


@pytest.mark.parametrize("shape", [SHAPES["tiny-qwen2"], *ODD.values()], ids=["tiny-qwen2", *ODD])
def test_values_are_exact_in_float16_without_zeros_or_denormals_and_of_the_right_spread(tmp_path, shape):
    synthesized(tmp_path / "m", shape)
    for name, found in read(tmp_path / "m").items():
        exact = found.astype(np.float64)
        assert np.array_equal(found.astype(np.float16).astype(np.float64), exact), name
        assert np.isfinite(exact).all(), name
        assert np.abs(exact).min() >= DENORMAL_BELOW, name
        assert exact.std() > 0, name
        if found.ndim == 2:
            untied_embedding = name == "model.embed_tokens.weight" and not shape.tied
            spread = exact.std() * (1.0 if untied_embedding else found.shape[1] ** 0.5)
            # Twice in each of 2 layers something is added to the residual: 1 / sqrt(4).
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert spread == pytest.approx(0.5 if into_residual else 1.0, rel=0.02), name


def test_every_norm_has_the_same_few_outlier_channels(tmp_path):
    synthesized(tmp_path / "m", dense_like(SHAPES["tiny-qwen2"], hidden_size=1280, heads=20, kv_heads=20))
    norms = {name: found for name, found in read(tmp_path / "m").items() if "norm" in name}
    assert len(norms) == 5
    channels = {name: tuple(np.flatnonzero(found > 6.0)) for name, found in norms.items()}
    assert len(set(channels.values())) == 1
    planted = next(iter(channels.values()))
    assert len(planted) == 5  # 1 in 256
    for found in norms.values():
        assert np.delete(found, planted) == pytest.approx(1.0, abs=0.6)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (dense_like(SHAPES["tiny-llama"], arch="mamba"), "cannot synthesize 'mamba'"),
        (dense_like(SHAPES["tiny-llama"], qkv_bias=True), "it has no such biases"),
        (dense_like(SHAPES["tiny-qwen2"], o_bias=True), "it has no such biases"),
        (dense_like(SHAPES["mistral-7b-v0.1"], mlp_bias=True), "cannot synthesize mistral"),
        (dense_like(SHAPES["tiny-qwen2"], qk_norm=True), "it has no such biases and norms"),
    ],
    ids=str,
)
def test_what_is_no_model_s_shape_has_no_layout(shape, said):
    with pytest.raises(NoLayout, match=said):
        dense_config(shape)


def test_a_folder_that_is_there_is_not_written_over(tmp_path):
    synthesized(tmp_path / "m", SHAPES["tiny-llama"])
    with pytest.raises(FileExistsError):
        synthesized(tmp_path / "m", SHAPES["tiny-llama"], seed=1)
