"""Quantized checkpoints as people download them, by their headers: what they are, their exact bytes, the bits
of each matrix, and which stacks load them. Laid out as the libraries write them (theirs are in
`test_downloaded_formats_run`)."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint import ENTRY, TINY, entries, write_config, write_safetensors
from test_packed_weights import AWQ, GPTQ, cell, packed_entries, write_packed

from harness.campaign import forecast, loaded_model
from harness.models import check, locate
from harness.models.locate import WeightsError, WeightsRefused, read
from harness.models.packed_layers import bits_by_matrix
from harness.theory.decoder import parameters
from harness.theory.packing_settings import packing_in

Layout = dict[str, tuple[str, list[int], int]]


def compressed(bits: int, kind: str, form: str, group: int | None = None, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "group" if group else "channel"}
    scheme = {"targets": ["Linear"], "weights": weights | {"group_size": group, "symmetric": True}}
    given = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme}}
    return given | {"ignore": ["lm_head"]} | more


def torchao(kind: str, **given: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": given}}}


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


def tensors_of(format: str, o: int, i: int) -> Layout:
    """The tensors of a matrix of o rows, by the ends of their names: type, sizes, bytes of an element."""
    if format in ("W4A16", "W8A16"):
        per = 8 if format == "W4A16" else 4
        packed = ("I32", [o, i // per], 4)
        return {
            "weight_packed": packed,
            "weight_scale": ("BF16", [o, i // 128], 2),
            "weight_shape": ("I64", [2], 8),
        }
    if format == "NVFP4":
        scales = {"weight_scale": ("F8_E4M3", [o, i // 16], 1)}
        alone = dict.fromkeys(("weight_global_scale", "input_global_scale"), ("F32", [1], 4))
        return {"weight_packed": ("U8", [o, i // 2], 1)} | scales | alone
    if format == "FP8":
        return {"weight": ("F8_E4M3", [o, i], 1), "weight_scale": ("BF16", [o, 1], 2)}
    if format == "block fp8":
        return {"weight": ("F8_E4M3", [o, i], 1), "weight_scale_inv": ("F32", [o // 32, i // 32], 4)}
    if format == "torchao int8":
        scales: Layout = {"_weight_scale": ("F32", [o, 1], 4), "_weight_zero_point": ("I8", [o, 1], 1)}
        return {"_weight_qdata": ("I8", [o, i], 1)} | scales
    if format == "nf4 twice":
        scales = {"weight.absmax": ("U8", [o * i // 64], 1), "weight.quant_map": ("F32", [16], 4)}
        scales |= {"weight.nested_absmax": ("F32", [-(-o * i // 16384)], 4)}
        scales |= {"weight.nested_quant_map": ("F32", [256], 4)}
        state: Layout = {"weight.quant_state.bitsandbytes__nf4": ("U8", [170], 1)}
        return {"weight": ("U8", [o * i // 2, 1], 1)} | scales | state
    assert format == "int8"
    return {"weight": ("I8", [o, i], 1), "SCB": ("F32", [o], 4), "weight_format": ("U8", [], 1)}


# Settings, words, bits of a weight in the q of the first layer, and the stacks' clause.
WIDENED, ADOPTED = "stack hf loads that, dequantized to its dtype", "in an interpreter that has torchao"
FORMATS: dict[str, tuple[dict[str, Any], str, float, str]] = {
    "W4A16": (
        compressed(4, "int", "pack-quantized", 128),
        "compressed-tensors 4-bit, group 128",
        4 + 16 / 128 + 0.002,
        WIDENED,
    ),
    "W8A16": (
        compressed(8, "int", "pack-quantized", 128),
        "compressed-tensors 8-bit, group 128",
        8 + 16 / 128 + 0.002,
        WIDENED,
    ),
    "FP8": (
        compressed(8, "float", "float-quantized"),
        "compressed-tensors 8-bit float",
        8 + 16 / 256,
        WIDENED,
    ),
    "NVFP4": (
        compressed(4, "float", "nvfp4-pack-quantized", 16),
        "compressed-tensors 4-bit float (nvfp4), group 16",
        4 + 8 / 16 + 0.001,
        WIDENED,
    ),
    "block fp8": (FP8, "fp8, blocks of 32 x 32", 8 + 32 / 32**2, WIDENED),
    "torchao int8": (
        torchao("Int8WeightOnlyConfig", group_size=None),
        "torchao int8 weight only",
        8 + 40 / 256,
        ADOPTED,
    ),
    "nf4 twice": (
        NF4 | {"bnb_4bit_use_double_quant": True},
        "bitsandbytes 4-bit (nf4), double_quant",
        4 + 8 / 64 + 8 * (4 * 4 + 64 + 1024 + 170) / 256**2,
        "stack bnb loads that",
    ),
    "int8": (INT8, "bitsandbytes 8-bit", 8 + 32 / 256, "stack bnb loads that"),
}


def written(folder: Path, format: str, settings: dict[str, Any]) -> tuple[Path, int]:
    """The folder of a checkpoint, and the bytes of its tensors."""
    folder.mkdir()
    stored: dict[str, ENTRY] = {}
    for name, entry in entries(TINY).items():
        if "_proj" not in name:
            stored[name] = entry
            continue
        (o, i), layer = entry[1], name.removesuffix("weight")
        stored |= {f"{layer}{end}": each for end, each in tensors_of(format, o, i).items()}
    file = folder / "model.safetensors"
    write_safetensors(file, stored, {"format": "pt"})
    header = int.from_bytes(file.read_bytes()[:8], "little")
    return write_config(folder, quantization_config=settings), file.stat().st_size - 8 - header


@pytest.mark.parametrize("format", FORMATS)
def test_a_format_is_named_and_its_bytes_and_bits_are_those_of_its_header(tmp_path, format):
    settings, words, bits, loads = FORMATS[format]
    folder, size = written(tmp_path / "m", format, settings)
    found = read(folder)
    ready = locate.local(folder)
    assert found.quantization == ready.quant == words
    assert (ready.sizes["model_bytes"], ready.sizes["parameters"]) == (size, parameters(TINY))
    by_matrix = bits_by_matrix(TINY, found.loaded)
    q = next(bits for bits, names in by_matrix.items() if "attn_q of layer 0" in names)
    assert q == pytest.approx(bits, abs=0.006)
    assert by_matrix[16.0] == ["embedding", "lm_head"]
    assert sum(map(len, by_matrix.values())) == 7 * TINY.count + 2
    assert loads in check.loaded_by(ready.stored)


@pytest.mark.parametrize("format", FORMATS)
def test_each_stack_loads_it_or_says_which_does(tmp_path, format):
    settings, words, _, loads = FORMATS[format]
    folder, _ = written(tmp_path / "m", format, settings)
    quant = {"quant": "int8"} if format == "int8" else {"quant": "nf4", "double_quant": True}
    for stack, options in (("hf", {}), ("bnb", quant)):
        asked = cell(stack, folder, **options)
        if f"stack {stack} " in loads or (stack == "hf" and loads == ADOPTED):
            assert forecast.local_weights(asked) is not None
            continue
        with pytest.raises(WeightsRefused) as refused:
            forecast.local_weights(asked)
        assert f"m: is {words}; stack " in str(refused.value)
        assert loads in str(refused.value)
        assert str(refused.value).endswith(f", {stack} does not")
    with pytest.raises(WeightsRefused, match="only 16- and 32-bit weights are converted to GGUF"):
        forecast.local_weights(cell("llamacpp", folder))


def test_memory_is_foretold_of_the_weights_as_they_are_loaded(tmp_path):
    folder, size = written(tmp_path / "m", "W4A16", FORMATS["W4A16"][0])
    held = [
        loaded_model.held_model(asked, forecast.local_weights(asked), asked.options(1)).weight_bytes
        for asked in (cell("hf", folder), cell("hf", folder, dtype="fp32"))
    ]
    assert held == [2 * parameters(TINY), 4 * parameters(TINY)]
    folder, size = written(tmp_path / "ao", "torchao int8", FORMATS["torchao int8"][0])
    asked = cell("hf", folder)
    assert loaded_model.held_model(asked, locate.local(folder), asked.options(1)).weight_bytes == size


OTHER = {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}


@pytest.mark.parametrize(
    ("changed", "words", "why"),
    [
        (
            {"config_groups": FORMATS["W4A16"][0]["config_groups"] | {"group_1": OTHER}},
            "compressed-tensors 4-bit, group 128, rules for single layers",
            "its layers have 2 types of weights (config_groups), and transformers dequantizes one",
        ),
        (
            {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
            "compressed-tensors 4-bit, group 128",
            "its weights are transformed (transform_config), which transformers does not undo",
        ),
        (
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors 4-bit, group 128",
            "its weights are sparse (sparsity_config), which transformers does not undo",
        ),
    ],
)
def test_what_transformers_would_dequantize_to_other_values_is_refused(tmp_path, changed, words, why):
    folder, _ = written(tmp_path / "m", "W4A16", FORMATS["W4A16"][0] | changed)
    with pytest.raises(WeightsRefused) as refused:
        forecast.local_weights(cell("hf", folder))
    assert str(refused.value).endswith(f"is {words}, which stack hf would dequantize to other values: {why}")
    assert check.loaded_by(locate.local(folder).stored) == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            torchao("IntxWeightOnlyConfig", weight_dtype={"_type": "torch.dtype", "_data": "int4"}),
            "intx weight only (int4)",
        ),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "int4 weight only"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "\x1b[2J"}}}, ""),
        ({"quant_method": "torchao", "quant_type": {"default": 7}}, ""),
        ({"quant_method": "torchao", "quant_type": []}, ""),
    ],
)
def test_torchao_s_settings_are_words_whatever_they_hold(tmp_path, settings, words):
    folder, _ = written(tmp_path / "m", "torchao int8", settings)
    assert read(folder).quantization == f"torchao {words}".strip()


def mixed(folder: Path, settings: dict[str, Any]) -> Path:
    """One matrix of 8 bits, one of 16, and a packed lm_head."""
    folder.mkdir()
    stored = packed_entries(TINY, packing_in(settings))
    wide = packed_entries(TINY, packing_in(settings | {"bits": 8}))
    down, q = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"
    stored |= {name: entry for name, entry in wide.items() if name.startswith(down)}
    for kind in ("qweight", "qzeros", "scales", "g_idx"):
        stored.pop(f"{q}.{kind}", None)
    stored[f"{q}.weight"] = ("F16", [256, 256], 2)
    if settings is not AWQ:
        del stored["lm_head.weight"]
        stored["lm_head.qweight"] = ("I32", [256 // 8, TINY.vocab_size], 4)
        stored["lm_head.qzeros"] = ("I32", [2, TINY.vocab_size // 8], 4)
        stored["lm_head.scales"] = ("F16", [2, TINY.vocab_size], 2)
        stored["lm_head.g_idx"] = ("I32", [256], 4)
    write_safetensors(folder / "model.safetensors", stored, {"format": "pt"})
    rules = {r"+:.*layers\.1\.mlp\.down_proj.*": {"bits": 8}, r"-:.*layers\.0\.self_attn\.q_proj.*": {}}
    return write_config(folder, quantization_config=settings | {"dynamic": rules, "lm_head": True})


def test_layers_of_gptq_that_differ_without_a_rule_are_no_stacks(tmp_path):
    folder = mixed(tmp_path / "m", GPTQ)
    write_config(folder, quantization_config=GPTQ)
    with pytest.raises(WeightsError, match=r"q_proj\.weight is f16, so its weights are not all gptq-int4"):
        forecast.local_weights(cell("gptqm", folder))


def test_layers_of_gptq_that_differ_are_gptqmodels_alone(tmp_path):
    folder = mixed(tmp_path / "m", GPTQ)
    assert forecast.local_weights(cell("gptqm", folder)) is not None
    with pytest.raises(WeightsRefused, match=r"has rules for single layers \(dynamic"):
        forecast.local_weights(cell("gptq", folder))
    by_matrix = bits_by_matrix(TINY, read(folder).loaded)
    named = {name: bits for bits, names in by_matrix.items() for name in names}
    assert named["attn_q of layer 0"] == named["embedding"] == 16
    assert named["ffn_down of layer 1"] == pytest.approx(4 + named["ffn_down of layer 0"], abs=0.1)
    assert 4 < named["lm_head"] < 5


def test_a_layer_that_no_number_of_bits_explains_is_an_error(tmp_path):
    folder = write_packed(tmp_path / "m", GPTQ, qweight=("I32", [40, 256], 4))
    with pytest.raises(locate.WeightsError, match=r"4 bits, but .*q_proj\.qweight holds 5"):
        forecast.local_weights(cell("gptqm", folder))


def test_theory_and_recommend_name_the_stacks_that_load_it(harness, tmp_path):
    folder, _ = written(tmp_path / "m", "NVFP4", FORMATS["NVFP4"][0])
    ran = harness("theory", folder)
    assert f"m: is compressed-tensors 4-bit float (nvfp4), group 16; {WIDENED}" in ran.err
    matrices = 7 * TINY.count
    assert (
        f"bits per weight, scales included: 4.5 in {matrices} matrices; 16 in embedding, lm_head" in ran.err
    )
    (row,) = harness("theory", folder, "--json").json
    assert row["model_bytes"] == locate.local(folder).sizes["model_bytes"]
    refused = harness("recommend", folder, "--machine", "rtx-4090")
    assert refused.code == 2
    assert f"({WIDENED}: measure it with harness run)" in refused.err.replace("\n", " ")
    (tmp_path / "m" / "config.json").write_text(
        json.dumps(
            json.loads((tmp_path / "m" / "config.json").read_text())
            | {"quantization_config": {"quant_method": "hqq"}}
        )
    )
    assert "m: is hqq; no stack here loads that" in harness("theory", folder).err
