"""What transformers and bitsandbytes load is what the files hold and the name says, or it is not measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import built, told
from stored_again import Tensors, stored_again
from test_hf import request_of, said

from runners.protocol import Failed

DOWN = "model.layers.0.mlp.down_proj"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
TIED = {"tie_word_embeddings": True}
# By stack: the options of its types, each with other weights in memory.
STACKS = [("hf", {"dtype": "bf16"}), ("bnb", {"quant": "int8"}), ("bnb", {"quant": "nf4"})]


def coded(dtype: str, columns_in_a_byte: int = 1, *more: str):
    """Stores one matrix in bytes, and adds scales by these names."""

    def change(tensors: Tensors) -> None:
        rows, columns = tensors[f"{DOWN}.weight"][1]
        shape = [rows, columns // columns_in_a_byte]
        tensors[f"{DOWN}.weight"] = dtype, shape, bytes(shape[0] * shape[1])
        tensors.update({f"{DOWN}.{name}": ("F32", [1], bytes(4)) for name in more})

    return change


def unchanged(tensors: Tensors) -> None:
    pass


def added(name: str):
    return lambda tensors: tensors.update({name: ("F32", [1], bytes(4))})


def with_head(of: str):
    """Adds an lm_head: the values of the embedding, or others."""

    def change(tensors: Tensors) -> None:
        dtype, shape, values = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = dtype, shape, values if of == "same" else bytes(len(values))

    return change


BLOCKS, SCALES = coded("F8_E4M3", 1, "weight_scale_inv"), coded("F8_E4M3", 1, "weight_scale", "input_scale")
NIBBLES = coded("U8", 2, "weight_scale", "weight_scale_2")
QUANTIZED = {
    "FP8 in blocks": (BLOCKS, FP8, "(fp8): {DOWN}.weight is stored as F8_E4M3"),
    "ModelOpt's FP8": (SCALES, MODELOPT, "(modelopt FP8): {DOWN}.weight is stored as F8_E4M3"),
    "ModelOpt's NVFP4": (NIBBLES, NVFP4, "(modelopt NVFP4): {DOWN}.weight is stored as U8"),
    "FP8 that no config names": (coded("F8_E5M2"), None, "is quantized: {DOWN}.weight is stored as F8_E5M2"),
    "a method alone": (unchanged, {"quant_method": "hqq"}, "is quantized (hqq); "),
}


@pytest.mark.parametrize(("stack", "options"), [STACKS[0], STACKS[2]])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_what_the_stack_does_not_hold_as_stored_is_refused(
    worker, checkpoint, tmp_path, stack, options, kind
):
    change, quantization, why = QUANTIZED[kind]
    path = stored_again(checkpoint("tiny-llama"), tmp_path / "m", change, quantization_config=quantization)
    last = worker(request_of(path, stack, **options), built(stack))[-1]
    assert isinstance(last, Failed)
    assert (last.outcome, last.reason.startswith(f"{path}: is quantized")) == ("refused", True)
    assert why.format(DOWN=DOWN) in last.reason
    assert f"; {stack} loads only 16- and 32-bit checkpoints: name the one that" in last.reason


MISTAKEN = {
    "a tensor too many": (
        added(f"{DOWN}.weight_scale"),
        {},
        f"has {DOWN}.weight_scale, which the model of its config.json does not have: correct config.json",
    ),
    "a size": (unchanged, {"intermediate_size": 1024}, ".weight has another size than in its config.json"),
    "another lm_head than the tied one": (
        with_head("other"),
        TIED,
        "ties the lm_head to the embedding, but its lm_head.weight is another",
    ),
}


@pytest.mark.parametrize(("stack", "options"), STACKS)
@pytest.mark.parametrize("kind", MISTAKEN)
def test_a_checkpoint_that_is_not_the_model_of_its_config_is_an_error(
    worker, checkpoint, tmp_path, stack, options, kind
):
    change, config, why = MISTAKEN[kind]
    path = stored_again(checkpoint("tiny-llama"), tmp_path / "m", change, **config)
    last = worker(request_of(path, stack, **options), built(stack))[-1]
    assert isinstance(last, Failed)
    assert (last.outcome, last.reason.startswith(f"{path}: ")) == ("error", True)
    assert why in last.reason


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (added("model.layers.0.self_attn.rotary_emb.inv_freq"), {}),  # transformers computes it
        (added("visual.patch_embed.proj.bias"), {}),  # of a tower that a text does not use
        (with_head("same"), TIED),
    ],
)
def test_tensors_without_an_effect_are_no_mistake(
    worker, checkpoint, hf_interpreter, tmp_path, change, config
):
    path = stored_again(checkpoint("tiny-llama"), tmp_path / "m", change, **config)
    loaded, ids, _ = said(worker(request_of(path), hf_interpreter))
    assert (len(ids), loaded["quant"], loaded["tied"]) == (12, "bf16", bool(config))


@pytest.fixture(scope="module")
def stored_nf4(checkpoint, bnb_interpreter, tmp_path_factory) -> Path:
    """A checkpoint as bitsandbytes saves it, with quantized scales."""
    target = tmp_path_factory.mktemp("nf4") / "m"
    code = f"""
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained(
    {str(checkpoint("tiny-qwen2"))!r}, quantization_config=how, dtype=torch.bfloat16, device_map={{"": "cpu"}}
)
model.save_pretrained({str(target)!r})
"""
    told(bnb_interpreter, code)
    return target


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"quant": "nf4", "double_quant": True}, None),
        ({"quant": "nf4"}, "nf4 was requested"),
        ({"quant": "fp4", "double_quant": True}, "fp4 with double_quant was requested"),
        ({"quant": "int8"}, "int8 was requested"),
    ],
)
def test_what_bitsandbytes_stored_is_measured_under_its_own_name_alone(
    worker, bnb_interpreter, stored_nf4, options, why
):
    events = worker(request_of(stored_nf4, "bnb", **options), bnb_interpreter)
    if why is None:
        loaded, ids, _ = said(events)
        assert (len(ids), loaded["quant"], loaded["leftovers"]) == (12, "nf4", [])
        return
    assert isinstance(events[-1], Failed)
    assert events[-1].outcome == "refused"
    assert events[-1].reason.startswith(f"{stored_nf4}: holds nf4 with double_quant, and {why}")


def test_what_bitsandbytes_stored_is_none_of_16_bits(worker, hf_interpreter, stored_nf4):
    last = worker(request_of(stored_nf4), hf_interpreter)[-1]
    assert isinstance(last, Failed)
    assert (last.outcome, "(bitsandbytes)" in last.reason) == ("refused", True)
