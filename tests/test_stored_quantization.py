"""Checkpoints whose weights are quantized, or contradict their config.json: refused by their headers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_holes import config
from stored_again import Tensors, stored_again
from test_checkpoint import TINY, config_of, entries, write_config, write_safetensors
from test_packed_weights import GPTQ, cell, packed_entries, write_packed
from test_weights import write_checkpoint

from harness.campaign import forecast
from harness.models import layout, locate
from harness.models.locate import WeightsError, WeightsRefused, WeightsUnavailable, read
from harness.theory import decoder
from harness.theory.packing_settings import packing_in

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
LAYER = "model.layers.0.self_attn.q_proj"


def quantized(folder: Path, settings: dict[str, Any] | None, kind: str = "F8_E4M3", per: int = 1) -> Path:
    """A checkpoint whose linear layers have elements of one byte, `per` weights each, and scales."""
    folder.mkdir(exist_ok=True)
    stored = {}
    for name, (dtype, dims, size) in entries(TINY).items():
        if "_proj" not in name:
            stored[name] = (dtype, dims, size)
            continue
        stored[name] = (kind, [dims[0], dims[1] // per], 1)
        stored[f"{name}_scale"] = ("F32", [], 4)
    write_safetensors(folder / "model.safetensors", stored, {"format": "pt"})
    return write_config(folder, quantization_config=settings) if settings else write_config(folder)


STORED = {
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "F8_E4M3", 1),
    "modelopt nvfp4, group 16": (NVFP4, "U8", 2),
    "fp8, blocks of 128 x 128": (FP8, "F8_E4M3", 1),
    "mxfp4": ({"quant_method": "mxfp4"}, "U8", 2),
    "hqq 4-bit": ({"quant_method": "hqq", "nbits": 4}, "U8", 2),
    "f8_e4m3, and no quantization_config says how": (None, "F8_E4M3", 1),
}


DEQUANTIZED = ("fp8, blocks of 128 x 128", "mxfp4")  # by transformers, while it loads them


@pytest.mark.parametrize("words", STORED)
def test_a_checkpoint_is_what_it_is_stored_as_and_no_stack_takes_it_for_another(tmp_path, words):
    folder = quantized(tmp_path / "m", *STORED[words])
    assert read(folder).quantization == locate.local(folder).quant == words
    widened = words in DEQUANTIZED
    why = (
        "; stack hf loads that, dequantized to its dtype, bnb does not"
        if widened
        else ", which no stack here"
    )
    for stack, options in (("hf", {}), ("bnb", {"quant": "nf4"}), ("bnb", {"quant": "int8"})):
        if widened and stack == "hf":
            assert forecast.local_weights(cell(stack, folder)) is not None
            continue
        with pytest.raises(WeightsRefused, match=f"m: is {words}{why}"):
            forecast.local_weights(cell(stack, folder, **options))
    with pytest.raises(WeightsRefused, match=f"is {words}; only 16- and 32-bit weights are converted"):
        forecast.local_weights(cell("llamacpp", folder))


def test_modelopts_own_file_says_how_weights_are_stored(tmp_path):
    folder = quantized(tmp_path / "m", None)
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(told))
    assert read(folder).quantization == "modelopt fp8"


TWICE, IN_8_BITS = {"quant": "nf4", "double_quant": True}, {"load_in_4bit": False, "load_in_8bit": True}


@pytest.mark.parametrize(
    ("stored", "options", "refusal"),
    [
        ({}, {"quant": "nf4"}, None),
        ({}, {"quant": "int8"}, "quant int8 was requested, set quant: nf4"),
        ({}, {"quant": "fp4"}, "quant fp4 was requested, set quant: nf4"),
        ({}, TWICE, "double_quant true was requested, set double_quant: false"),
        ({"bnb_4bit_use_double_quant": True}, TWICE, None),
        ({"bnb_4bit_quant_type": "fp4"}, {"quant": "fp4"}, None),
        (IN_8_BITS, {"quant": "int8"}, None),
        (IN_8_BITS, {"quant": "nf4"}, "set quant: int8"),
    ],
)
def test_bitsandbytes_loads_what_is_stored_under_its_name_alone(tmp_path, stored, options, refusal):
    folder = quantized(tmp_path / "m", NF4 | stored, "U8", 2)
    asked = cell("bnb", folder, **options)
    if refusal is None:
        ready = forecast.local_weights(asked)
        assert ready.quant == read(folder).quantization
    else:
        with pytest.raises(WeightsRefused, match=f"which stack bnb loads as it is stored; .*{refusal}"):
            forecast.local_weights(asked)
    with pytest.raises(WeightsRefused, match="stack bnb loads that, hf does not"):
        forecast.local_weights(cell("hf", folder))


def part_packed(folder: Path, part: str) -> Path:
    """A GPTQ checkpoint whose lm_head is packed too, or one of whose layers is not."""
    folder.mkdir()
    packing = packing_in(GPTQ)
    stored = packed_entries(TINY, packing)
    if part == "lm_head":
        del stored["lm_head.weight"]
        for kind in ("qweight", "qzeros", "scales", "g_idx"):
            stored[f"lm_head.{kind}"] = stored[f"{LAYER}.{kind}"]
    else:
        for kind in ("qweight", "qzeros", "scales", "g_idx"):
            del stored[f"{LAYER}.{kind}"]
        stored[f"{LAYER}.weight"] = ("F16", [256, 256], 2)
    write_safetensors(folder / "model.safetensors", stored, {"format": "pt"})
    return write_config(folder, quantization_config=GPTQ)


OTHER_BITS = GPTQ | {"dynamic": {"+:.*1.*": {"bits": 8}}}
NOT_ALIKE: dict[str, Callable[[Path], Path]] = {
    r"has rules for single layers \(dynamic: '\+:[^']*'\), so its weights are not all gptq-int4": (
        lambda path: write_packed(path, OTHER_BITS)
    ),
    r"lm_head\.qweight is packed; only the layers' matrices": lambda path: part_packed(path, "lm_head"),
    r"q_proj\.weight is f16, so its weights are not all gptq-int4": lambda path: part_packed(path, "layer"),
}


@pytest.mark.parametrize("refusal", NOT_ALIKE)
def test_a_packed_checkpoint_that_is_not_packed_alike_is_refused_by_auto_gptq(tmp_path, refusal):
    folder = NOT_ALIKE[refusal](tmp_path / "m")
    with pytest.raises(WeightsRefused, match=refusal):
        forecast.local_weights(cell("gptq", folder))


# --- contradictions -----------------------------------------------------------------------------------------


def refused(folder: Path, sentence: str) -> None:
    """By `harness theory` and by a run."""
    with pytest.raises(WeightsError, match=sentence):
        read(folder)
    with pytest.raises(WeightsRefused, match=sentence):
        locate.local(folder)


def mixture(folder: Path) -> dict[str, Any]:
    """The config.json of its tensors."""
    folder.mkdir()
    given = config("qwen3_moe", num_hidden_layers=1)
    stored = {}
    for row in layout.of(given).rows:
        if "{}" in row.there:
            for expert in range(row.dims[0]):
                stored[row.there.format(expert)] = ("BF16", [*row.dims[1:]], 2)
        else:
            stored[row.there] = ("BF16", [*row.dims], 2)
    write_safetensors(folder / "model.safetensors", stored, {"format": "pt"})
    return given


def dense(folder: Path) -> dict[str, Any]:
    write_checkpoint(folder)
    return config_of(TINY)


@pytest.mark.parametrize(
    ("made", "changed", "name", "stored", "of_config"),
    [
        (dense, {"intermediate_size": 1024}, "mlp.gate_proj", "512 x 256", "1024 x 256"),
        (dense, {"num_key_value_heads": 8}, "self_attn.k_proj", "64 x 256", "256 x 256"),
        (dense, {"num_attention_heads": 16, "head_dim": 32}, "self_attn.q_proj", "256 x 256", "512 x 256"),
        (dense, {"vocab_size": 500}, "embed_tokens", "512 x 256", "500 x 256"),
        (mixture, {"moe_intermediate_size": 64}, "experts.0.gate_proj", "96 x 256", "64 x 256"),
        (mixture, {"num_key_value_heads": 4}, "self_attn.k_proj", "128 x 256", "256 x 256"),
    ],
)
def test_a_config_that_contradicts_a_matrix_is_refused_with_its_name(
    tmp_path, made, changed, name, stored, of_config
):
    given = made(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(given))
    assert read(path.parent).decoder is not None
    path.write_text(json.dumps(given | changed))
    refused(path.parent, f"{name}.weight is {stored}, and its config.json says {of_config}")


def test_a_tied_lm_head_that_is_stored_with_other_values_is_refused(tmp_path):
    """transformers would use the embedding, and other programs the stored lm_head. A copy is fine."""
    folder = write_checkpoint(tmp_path / "m", tie_word_embeddings=True)
    assert read(folder).tied

    def change(tensors: Tensors) -> None:
        dtype, shape, values = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = dtype, shape, b"\1" * len(values)

    folder = stored_again(folder, tmp_path / "other", change)
    refused(folder, r"ties the lm_head to the embedding, and its lm_head\.weight holds other values")


def test_layers_that_draft_tokens_are_not_loaded(tmp_path):
    """transformers ignores them; they follow the last layer, or have a name of their own."""
    stored = entries(TINY)
    drafts = {f"mtp.{name}": entry for name, entry in stored.items() if "layers.0." in name}
    write_safetensors(tmp_path / "model.safetensors", stored | drafts, {"format": "pt"})
    found = read(write_config(tmp_path))
    assert found.parameters == decoder.parameters(TINY)
    assert {tensor.name for tensor in found.tensors} == set(stored)


# --- files that no stack loads or converts ------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "loads"), [("llava", False), ("mistral3", False), ("gemma3", True)])
def test_a_multimodal_model_is_loaded_only_where_transformers_does(tmp_path, kind, loads):
    folder = tmp_path / "m"
    folder.mkdir()
    stored = {f"language_model.{name}": entry for name, entry in entries(TINY).items()}
    write_safetensors(folder / "model.safetensors", stored, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "text_config": config_of(TINY)}))
    if loads:
        assert forecast.local_weights(cell("hf", folder)) is not None
    else:
        with pytest.raises(WeightsUnavailable, match=f"is {kind}, a multimodal model that stack hf does not"):
            forecast.local_weights(cell("hf", folder))
    with pytest.raises(WeightsUnavailable, match=f"is {kind}, which is not converted to GGUF here"):
        forecast.local_weights(cell("llamacpp", folder))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("rope", "refusal"),
    [
        ({"rope_type": "linear", "factor": 2.0}, None),
        (LLAMA3, None),
        ({"rope_type": "llama3", "factor": 8.0}, "rope scaling 'llama3' lacks low_freq_factor"),
        ({"rope_type": "yarn", "factor": 4.0}, "rope scaling 'yarn' of llama is not converted"),
        ({"type": "dynamic", "factor": 4.0}, "rope scaling 'dynamic' of llama is not converted"),
    ],
)
def test_a_scaling_of_positions_that_is_not_converted_is_known_before_a_run(tmp_path, rope, refusal):
    folder = write_checkpoint(tmp_path / "m", rope_scaling=rope)
    if refusal is None:
        assert forecast.local_weights(cell("llamacpp", folder)) is not None
        return
    with pytest.raises(WeightsError, match=refusal):
        forecast.local_weights(cell("llamacpp", folder))
    assert forecast.local_weights(cell("hf", folder)) is not None


# --- as a user sees it --------------------------------------------------------------------------------------


def test_commands_say_what_is_stored_and_foretell_the_refusal(harness, tmp_path):
    folder = quantized(tmp_path / "m", FP8)
    (tmp_path / "c.yaml").write_text(
        "models: [{name: m, weights: m}]\nvariants: [{stack: hf}, {stack: llamacpp}]\n"
        "workloads: [{kind: decode, prompt_tokens: 8, new_tokens: 16}]\n"
    )
    listed = harness("theory", folder, "--memory", "24GB", "--json")
    assert [(row["weights"], row["kv"], row["engine"]) for row in json.loads(listed.out)] == [
        ("fp8, blocks of 128 x 128", "f16", "transformers")
    ]
    assert "q8_0" not in harness("theory", folder, "--memory", "24GB").out
    assert "m holds, in bytes: f8_e4m3 1,114,112, bf16 526,848, f32 56" in harness("theory", folder).out

    planned = harness("run", "c.yaml", "--dry-run")
    assert planned.code == 1
    assert planned.out.count("will be refused: ") == 1
    assert "is fp8, blocks of 128 x 128; only 16- and 32-bit weights are converted to GGUF" in planned.words
    assert planned.err.splitlines()[-1] == "harness: of 2 cells, 1 will be refused (exit code 1)"

    recommended = harness("recommend", folder, "--machine", "rtx-4090")
    assert recommended.code == 2
    assert "is fp8, blocks of 128 x 128; recommend compares types" in recommended.err
