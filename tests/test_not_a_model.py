"""Files that lie where a model should be: each is refused before anything is loaded, with its cause."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_again import finish
from gguf_holes import config, header_of
from test_checkpoint import TINY, gguf_writer, write, write_config, write_gguf

from harness.models import check, locate
from harness.models.locate import WeightsError, read
from harness.theory import floors, ggml_quants, tensors
from harness.theory.architectures import decoder_of
from harness.theory.ggml_quants import ALL_QUANTS, quantized
from harness.theory.hf_config import SHAPES

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 4920739232\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Hugging Face</title></head></html>"
CAUSES = [
    (LFS, r"is a Git LFS pointer of 135 bytes for a file of 4,920.7 MB: run `git lfs pull`"),
    (PAGE, r"is a web page \(HTML\), not a model: .*/resolve/"),
    (b"", r"is empty \(0 bytes\): the download failed"),
    (b"\0" * 4096, "begins with zeros: the download did not finish"),
]


def refused(path: Path, sentence: str) -> None:
    """By `harness theory` and by a run."""
    with pytest.raises(WeightsError, match=sentence) as theory:
        read(path)
    assert "\n" not in str(theory.value)
    with pytest.raises(locate.WeightsError, match=sentence):
        locate.local(path)


@pytest.mark.parametrize(("content", "sentence"), CAUSES)
def test_what_was_saved_in_place_of_a_model_is_named(tmp_path, content, sentence):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    refused(path, sentence)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (write_config(folder) / "model.safetensors").write_bytes(content)
    refused(folder, sentence)


def test_an_empty_part_of_a_split_model_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", split_max_tensors=10)
    second = next(tmp_path.glob("m-00002-of-*.gguf"))
    second.write_bytes(b"")
    refused(tmp_path, rf"{second.name}: is empty \(0 bytes\)")


def test_parts_joined_by_cat_are_no_model(tmp_path):
    write_gguf(tmp_path / "m.gguf", split_max_tensors=10)
    joined = tmp_path / "joined" / "m.gguf"
    joined.parent.mkdir()
    joined.write_bytes(b"".join(part.read_bytes() for part in sorted(tmp_path.glob("m-*.gguf"))))
    refused(joined, "belong to no tensor: .* as by cat the parts of a split model")


@pytest.mark.parametrize(
    ("counted", "appended", "sentence"),
    [
        (-1, 0, r"[\d,]{5,} bytes of the file belong to no tensor: its tensor count \(20\) is wrong"),
        (+1, 0, r"its tensor count \(22\) is wrong: it lists 21 tensors"),
        (0, 100_000, r"100,000 bytes of the file belong to no tensor: .* or something was appended"),
        (0, 7, "7 bytes of the file belong to no tensor"),
    ],
)
@pytest.mark.parametrize("alignment", [32, 4096])
def test_a_gguf_holds_its_tensors_and_nothing_else(tmp_path, counted, appended, sentence, alignment):
    """With one tensor too few it would be measured without its output matrix, which is not read then."""
    untied = replace(TINY, tied=False)
    writer = gguf_writer(tmp_path / "m.gguf", untied)
    writer.add_custom_alignment(alignment)
    write(writer, tensors.of_shape(untied))
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    (count,) = struct.unpack_from("<Q", content, 8)
    struct.pack_into("<Q", content, 8, count + counted)
    (tmp_path / "m.gguf").write_bytes(content + b"x" * appended)
    refused(tmp_path / "m.gguf", sentence)


@pytest.mark.parametrize(
    "name",
    ["m.gguf.part1of2", "m.Q4_K_M.gguf.part-aa", "m.gguf-split-a", "m.gguf.001", "model.safetensors.part02"],
)
def test_pieces_cut_by_another_tool_are_to_be_joined(tmp_path, name):
    whole = write_gguf(tmp_path / "whole.gguf")
    piece = tmp_path / "pieces" / name
    piece.parent.mkdir()
    piece.write_bytes(whole.read_bytes()[:300_000])
    refused(piece, r"is one piece \(.*\) of m.*, cut by another tool .* cat PIECE1 PIECE2 > m")
    refused(piece.parent, "holds pieces of a model: each is one piece")


def other_gguf(path: Path, arch: str, **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.kv_data[0][key.replace("__", ".")] = gguf.gguf_writer.GGUFValue(value, kind, None)
    writer.add_tensor("blk.0.attn_q.weight", np.ones((32, 32), np.float16))
    finish(writer)
    return path


@pytest.mark.parametrize(
    ("arch", "keys", "sentence"),
    [
        ("clip", {}, "is a projector"),
        ("clip", {"general__type": "mmproj"}, "is a projector"),
        ("llama", {"general__type": "adapter", "adapter__type": "lora"}, "is a LoRA adapter"),
        ("llama", {"general__type": "imatrix"}, "is an importance matrix"),
        ("controlvector", {}, "is a control vector"),
        ("bert", {"bert__attention__causal": False}, "without causal attention.* no decode speed"),
        ("nomic-bert", {}, "without causal attention"),
        ("llama", {"llama__attention__causal": False}, "is llama without causal attention"),
        ("llama", {}, "has no input embedding"),
    ],
)
def test_a_gguf_that_is_no_language_model_is_named(tmp_path, arch, keys, sentence):
    refused(other_gguf(tmp_path / "x.gguf", arch, **keys), sentence)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert"])
def test_a_checkpoint_of_an_encoder_has_no_decode_speed(tmp_path, kind):
    write_config(tmp_path, model_type=kind, architectures=["SomeModel"])
    with pytest.raises(WeightsError, match=f"is {kind} without causal attention"):
        read(tmp_path / "config.json")


def test_a_folder_with_an_adapter_alone_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    refused(tmp_path, r"holds an adapter \(LoRA\), not a model")


@pytest.mark.parametrize("name", ["mmproj-F16.gguf", "Qwen-35B-mmproj-BF16.gguf", "MMPROJ.gguf", "zz.gguf"])
def test_a_folder_with_a_model_and_its_projector_is_the_model(tmp_path, name):
    other_gguf(tmp_path / name, "clip", general__type="mmproj")
    refused(tmp_path, "is a projector")
    model = write_gguf(tmp_path / "model.gguf")
    assert read(tmp_path).decoder == TINY
    assert locate.local(tmp_path).path == model


# --- the type of a file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", [quant for quant in ALL_QUANTS if quant != "mxfp4_moe"])  # of mixtures
@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama-3-8b", "qwen1.5-14b"])
def test_a_file_has_the_type_it_names_if_its_tensors_have(name, quant):
    stored = quantized(SHAPES[name], quant)
    assert ggml_quants.type_of_file(stored, quant) == quant


@pytest.mark.parametrize(
    ("file_type", "quant", "named"),
    [
        (gguf.LlamaFileType.MOSTLY_Q4_K_M, "f16", "f16"),
        (gguf.LlamaFileType.ALL_F32, "q4_k_m", "q4_k"),
        (gguf.LlamaFileType.GUESSED, "q8_0", "q8_0"),
        (None, "q6_k", "q6_k"),
        (None, "f16", "f16"),
        (gguf.LlamaFileType.MOSTLY_F16, "q3_k_s", "q3_k"),
    ],
)
def test_the_type_of_a_gguf_comes_from_its_tensors(tmp_path, file_type, quant, named):
    writer = gguf_writer(tmp_path / "model.gguf", TINY)
    del writer.kv_data[0]["general.file_type"]
    if file_type is not None:
        writer.add_file_type(file_type)
    write(writer, quantized(TINY, quant))
    assert read(tmp_path / "model.gguf").quantization == named
    assert locate.local(tmp_path / "model.gguf").quant == named


def test_16_bits_with_a_few_quantized_matrices_are_not_taken_for_16_bits(tmp_path):
    stored = tensors.of_shape(TINY)
    mixed = [tensors.typed(t.name, "q8_0" if t.part == "lm_head" else t.type, t.dims) for t in stored]
    write(gguf_writer(tmp_path / "model.gguf", TINY), mixed)
    ready = locate.local(tmp_path / "model.gguf")
    assert ready.quant == "f16-q8_0"
    with pytest.raises(locate.WeightsError, match="which needs f16 weights"):
        check.check_quantizable(ready, "q4_0")


# --- draft heads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe"])
def test_a_draft_head_is_not_read_in_plain_decode(tmp_path, kind):
    """Its layer follows the last; llama.cpp counts it in block_count."""
    given = config(kind, num_hidden_layers=4)
    model = decoder_of(given)
    plain, drafting = tmp_path / "plain.gguf", tmp_path / "drafting.gguf"
    stored = tensors.of_shape(model)
    write(header_of(plain, model, given), stored)
    writer = header_of(drafting, model, given)
    writer.add_block_count(5)
    writer.add_nextn_predict_layers(1)
    last = [tensor for tensor in stored if tensor.name.startswith("blk.3.")]
    head = [replace(tensor, name=tensor.name.replace("blk.3.", "blk.4.")) for tensor in last]
    width = model.hidden_size
    write(writer, [*stored, *head, tensors.typed("blk.4.nextn.eh_proj.weight", "f16", (width, 2 * width))])

    with_head, without = read(drafting), read(plain)
    assert with_head.decoder == without.decoder
    assert with_head.tensors == without.tensors
    demand = floors.demand_of_tensors(with_head.decoder, with_head.tensors)
    assert demand == floors.demand_of_tensors(model, stored)
    sizes, of_plain = with_head.sizes, without.sizes
    assert sizes["model_bytes"] - sizes["draft_bytes"] == of_plain["model_bytes"]  # llama.cpp counts them all
    assert sizes.get("expert_bytes") == of_plain.get("expert_bytes")
