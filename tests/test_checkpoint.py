"""Models as stored: what the headers of any file or folder say, exactly, and nothing that they only claim."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from damage import Patches, edited, edits, patches, places
from hypothesis import example, given
from hypothesis import strategies as st

from harness.models import locate, split_gguf
from harness.models.locate import Ready, WeightsError, read
from harness.models.safetensors_files import SafetensorsError, read_header
from harness.theory import decoder, floors, tensors
from harness.theory.architectures import decoder_of
from harness.theory.decoder import Decoder, dense, dense_like
from harness.theory.hf_config import SHAPES
from harness.theory.tensors import Tensor, streamed_bytes

TINY = SHAPES["tiny-llama"]
INDEX = "model.safetensors.index.json"
ENTRY = tuple[str, list[int], int]  # dtype, shape, bytes of an element


# --- files as others write them -----------------------------------------------------------------------------


def gguf_writer(path: Path, shape: Decoder, **options: Any) -> gguf.GGUFWriter:
    """By the gguf library, all counts of a shape in its metadata, no tensors yet."""
    writer = gguf.GGUFWriter(path, shape.arch, **options)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(shape.context)
    writer.add_block_count(shape.count)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    if shape.window:
        writer.add_sliding_window(shape.window)
    return writer


def write(writer: gguf.GGUFWriter, stored: list[Tensor]) -> None:
    """The headers of all files, and holes in place of the tensors' values."""
    for tensor in stored:
        number = gguf.GGMLQuantizationType[tensor.type.upper()]
        writer.add_tensor_info(tensor.name, tensor.dims, None, tensor.bytes, raw_dtype=number)
    parts = writer.tensors
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    paths = [Path(file.name) for file in writer.fout]
    writer.close()
    for path, infos in zip(paths, parts, strict=True):
        alignment = writer.data_alignment
        data = sum(writer.ggml_pad(info.nbytes, alignment) for info in infos.values())
        os.truncate(path, writer.ggml_pad(path.stat().st_size, alignment) + data)


def write_gguf(path: Path, shape: Decoder = TINY, extra: tuple[Tensor, ...] = (), **options: Any) -> Path:
    write(gguf_writer(path, shape, **options), [*tensors.of_shape(shape), *extra])
    return path


def write_safetensors(path: Path, entries: dict[str, ENTRY], metadata: dict[str, str] | None = None) -> Path:
    """By hand, as the format is documented: length, JSON padded with spaces, a hole in place of the data."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, dims, size) in entries.items():
        begin, end = end, end + math.prod(dims) * size
        header[name] = {"dtype": dtype, "shape": dims, "data_offsets": [begin, end]}
    return write_raw(path, header, end)


def write_raw(path: Path, header: Any, data_bytes: int = 0) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + data_bytes)
    return path


def entries(shape: Decoder, stored_tied: bool = False) -> dict[str, ENTRY]:
    """A shape's tensors by the names that transformers gives them, in bf16."""
    names = {f"attn_{x}": f"self_attn.{x[0]}_proj" for x in ("q", "k", "v", "output")}
    names |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    names |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    found: dict[str, ENTRY] = {}
    for tensor in tensors.of_shape(replace(shape, tied=shape.tied and not stored_tied)):
        *layer, part, kind = tensor.name.split(".")
        place = f"model.layers.{layer[1]}." if layer else ""
        found[f"{place}{names[part]}.{kind}"] = ("BF16", list(tensor.dims), 2)
    return found


def config_of(shape: Decoder) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.count,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
    }


def write_config(folder: Path, shape: Decoder = TINY, **changed: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**config_of(shape), **changed}))
    return folder


def write_shards(folder: Path, shape: Decoder, count: int, index: bool = True) -> list[Path]:
    """The tensors in turn over so many shards, and the index that names them."""
    found = list(entries(shape).items())
    paths = [folder / f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map: dict[str, str] = {}
    for i, path in enumerate(paths):
        write_safetensors(path, dict(found[i::count]), {"format": "pt"})
        weight_map |= dict.fromkeys((name for name, _ in found[i::count]), path.name)
    if index:
        content = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(content))
    return paths


def streamed(checkpoint: Ready) -> int:
    return sum(streamed_bytes(tensor, checkpoint.tied) for tensor in checkpoint.tensors)


def counting(path: Path, most: int) -> tuple[Path, list[int]]:
    """The same path, and the bytes of every read through it or a path made of it: `most` bytes in all."""
    reads: list[int] = []

    def count(read: int | None) -> None:
        reads.append(read or 0)
        assert sum(reads) <= most, "reads on and on"

    class File(io.FileIO):
        def read(self, *size: int) -> bytes:
            content = super().read(*size)
            count(len(content))
            return content

        def readinto(self, buffer: Any) -> int | None:
            read = super().readinto(buffer)
            count(read)
            return read

        def readall(self) -> bytes:
            count(os.fstat(self.fileno()).st_size)  # first: it may be more than the memory holds
            return super().readall()

    class Counting(type(path)):  # type: ignore[misc]
        def open(self, mode: str = "r", buffering: int = -1) -> Any:
            return File(self, mode) if buffering == 0 else io.BufferedReader(File(self, mode), 8192)

    return Counting(path), reads


@contextmanager
def within(seconds: float, megabytes: float) -> Iterator[None]:
    """The seconds, of CPU time, are a guard against what never ends."""
    began = time.process_time()
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()
    assert peak < megabytes
    assert time.process_time() - began < seconds


# --- GGUF ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        TINY,
        SHAPES["tiny-qwen2"],
        replace(TINY, tied=True),
        dense_like(TINY, o_bias=True, mlp_bias=True, qkv_bias=True),
        dense_like(TINY, arch="qwen3", qk_norm=True, head_dim=128),
        dense_like(TINY, window=1024, rope_theta=5e5, norm_eps=1e-6, context=131_072),
    ],
)
def test_a_gguf_tells_its_shape_and_every_tensor(tmp_path, shape):
    checkpoint = read(write_gguf(tmp_path / "model.gguf", shape))
    assert checkpoint.decoder == shape
    assert tuple(checkpoint.tensors) == tensors.of_shape(shape)
    assert checkpoint.format == "gguf"
    assert checkpoint.quantization == "f16"
    assert checkpoint.tied == shape.tied
    assert not checkpoint.synthetic
    assert checkpoint.parameters == decoder.parameters(shape)


def test_bytes_of_quantized_blocks_are_exact(tmp_path):
    stored = [
        Tensor("token_embd.weight", "q6_k", (1000, 512), 1000 * 512 // 256 * 210),
        Tensor("output.weight", "nvfp4", (1000, 512), 1000 * 512 // 64 * 36),
        Tensor("blk.0.ffn_up.weight", "mxfp4", (1000, 512), 1000 * 512 // 32 * 17),
    ]
    write(gguf_writer(tmp_path / "model.gguf", TINY), stored)
    checkpoint = read(tmp_path / "model.gguf")
    assert list(checkpoint.tensors) == stored
    assert checkpoint.parameters == 3 * 512_000
    assert streamed(checkpoint) == stored[1].bytes + stored[2].bytes


def test_tensors_beyond_the_shape_count_and_a_name_says_that_weights_are_synthetic(tmp_path):
    """Llama 3 stores 64 factors of its rotary frequencies."""
    writer = gguf_writer(tmp_path / "model.gguf", TINY)
    writer.add_name("tiny-llama (synthetic, random weights)")
    write(writer, [*tensors.of_shape(TINY), Tensor("rope_freqs.weight", "f32", (64,), 256)])
    checkpoint = read(tmp_path / "model.gguf")
    assert (checkpoint.decoder, checkpoint.synthetic) == (TINY, True)
    assert checkpoint.parameters == decoder.parameters(TINY) + 64


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.feed_forward_length", [512, 512]),
        ("llama.attention.head_count", [8] * 8),  # an array of 8 is no count of 8
        ("llama.attention.head_count_kv", [2] * 2),
        ("llama.attention.sliding_window", [16, 16]),
        ("general.architecture", "gemma2"),
    ],
)
def test_a_header_whose_counts_differ_by_layer_has_no_shape(tmp_path, key, value):
    checkpoint = read(changed_gguf(tmp_path / "model.gguf", key, value))
    assert checkpoint.decoder is None
    assert len(checkpoint.tensors) == len(tensors.of_shape(TINY))


def changed_gguf(path: Path, key: str, value: Any) -> Path:
    """A file of TINY with another value of one key."""
    writer = gguf_writer(path, TINY)
    kind = gguf.GGUFValueType.get_type(value)
    if isinstance(value, int) and not isinstance(value, bool):
        kind = gguf.GGUFValueType.INT64 if value < 0 else gguf.GGUFValueType.UINT64
    array = gguf.GGUFValueType.UINT32 if isinstance(value, list) else None
    writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, kind, array)
    write(writer, tensors.of_shape(TINY))
    return path


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("block_count", 0, "has llama.block_count 0"),
        ("block_count", 1, "has tensors of 2 layers, and its block_count is 1"),
        ("block_count", 2**32 - 1, "has tensors of 2 layers, and its block_count is 4294967295"),
        ("embedding_length", 512, "has token_embd.weight of 512 x 256, and its keys say 512 x 512"),
        ("feed_forward_length", 513, "has blk.0.ffn_gate.weight of 512 x 256, and its keys say 513 x 256"),
        ("attention.head_count", 0, "has llama.attention.head_count 0"),
        ("attention.head_count", 4, "has blk.0.attn_q.weight of 256 x 256, and its keys say 128 x 256"),
        ("attention.head_count_kv", 3, "has head_count 8, which is not a multiple of its head_count_kv 3"),
        ("attention.head_count_kv", 8, "has blk.0.attn_k.weight of 64 x 256, and its keys say 256 x 256"),
        ("attention.key_length", -32, "has llama.attention.key_length -32"),
        ("attention.key_length", 16, "has blk.0.attn_q.weight of 256 x 256, and its keys say 128 x 256"),
        ("attention.value_length", 64, "has blk.0.attn_v.weight of 64 x 256, and its keys say 128 x 256"),
        ("context_length", 2**63, "has context_length 9223372036854775808, longer than any model's"),
        ("context_length", True, "has llama.context_length true"),
        ("context_length", "long", "has llama.context_length 'long'"),
        ("rope.freq_base", float("nan"), "has llama.rope.freq_base nan"),
        ("rope.freq_base", 0.0, "has llama.rope.freq_base 0"),
    ],
)
def test_a_header_that_contradicts_its_tensors_is_refused_with_both(tmp_path, key, value, sentence):
    path = changed_gguf(tmp_path / "model.gguf", f"llama.{key}", value)
    with pytest.raises(WeightsError, match=sentence):
        read(path)
    with pytest.raises(locate.WeightsRefused, match=sentence):
        locate.local(path)


def test_what_a_header_leaves_out_is_what_llama_cpp_takes_it_for(tmp_path):
    writer = gguf_writer(tmp_path / "model.gguf", dense_like(TINY, kv_heads=8))
    for key in ("head_count_kv", "key_length", "value_length", "sliding_window"):
        writer.kv_data[0].pop(f"llama.attention.{key}", None)
    del writer.kv_data[0]["llama.rope.freq_base"]
    write(writer, tensors.of_shape(dense_like(TINY, kv_heads=8)))
    assert read(tmp_path / "model.gguf").decoder == dense_like(TINY, kv_heads=8)


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}
MIXTRAL |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
MIXTRAL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def mixture(path: Path, arch: str = "llama", experts: int = 8, used: int = 2) -> Path:
    """Two layers of a mixture, in one GGUF."""
    writer = gguf_writer(path, dense_like(TINY, arch=arch, layers=2, heads=4))
    writer.add_expert_count(experts)
    writer.add_expert_used_count(used)
    write(writer, tensors.of_shape(decoder_of(MIXTRAL)))
    return path


def test_of_a_mixture_a_token_reads_the_experts_that_it_uses(tmp_path):
    found = read(mixture(tmp_path / "mixture.gguf"))
    assert (found.decoder.experts, found.decoder.experts_used) == (8, 2)
    whole = sum(tensor.bytes for tensor in found.tensors)
    idle = 2 * 3 * 6 * (32 * 32) * 2
    embedding = 64 * 32 * 2
    needs = floors.demand_of_tensors(found.decoder, found.tensors)
    assert needs.resident_bytes == whole
    assert needs.weight_bytes_per_token == whole - idle - embedding


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"experts": 4}, "has 8 experts in blk.0.ffn_gate_exps.weight, and its expert_count is 4"),
        ({"used": 9}, "uses 9 of 8 experts for a token"),
        ({"arch": "mixtra"}, "is a mixture of experts whose layers of architecture 'mixtra' are not known"),
        ({"arch": "qwen3mo"}, "are not known; the nearest that is: qwen3moe"),
    ],
)
def test_a_mixture_that_contradicts_itself_or_is_not_known_is_refused(tmp_path, arguments, said):
    with pytest.raises(WeightsError, match=said):
        read(mixture(tmp_path / "mixture.gguf", **arguments))


@pytest.mark.parametrize("name", ["attn_k", "attn_v", "attn_output"])
def test_a_mixture_with_a_matrix_of_other_dimensions_has_no_cache_that_can_be_told(tmp_path, name):
    whole = mixture(tmp_path / "whole.gguf")
    found = {tensor.name: tensor for tensor in read(whole).tensors}
    odd = found[f"blk.1.{name}.weight"]
    found[odd.name] = replace(odd, dims=(1, *odd.dims)[::-1])
    writer = gguf_writer(tmp_path / "odd.gguf", dense_like(TINY, layers=2, heads=4))
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    write(writer, [*found.values()])
    with pytest.raises(WeightsError, match="is a mixture of experts"):
        read(tmp_path / "odd.gguf")


def test_experts_that_nobody_knows_how_to_count_are_refused(tmp_path):
    experts = Tensor("blk.0.ffn_up_exps.weight", "f16", (8, 32, 32), 2 * 8 * 32 * 32)
    write_gguf(tmp_path / "not-said.gguf", extra=(experts,))
    with pytest.raises(WeightsError, match="and its expert_count is 0"):
        read(tmp_path / "not-said.gguf")


# --- GGUF in parts ------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three parts as the gguf library splits."""
    write_gguf(tmp_path / "model.gguf", split_max_tensors=10)
    found = sorted(tmp_path.glob("model-*-of-00003.gguf"))
    assert len(found) == 3
    return found


def test_any_part_of_a_split_model_is_the_whole(parts, tmp_path):
    whole = read(write_gguf(tmp_path / "plain.gguf"))
    for part in parts:
        checkpoint = read(part)
        assert (checkpoint.path, checkpoint.files) == (parts[0], tuple(parts))
        assert (checkpoint.decoder, checkpoint.tensors) == (whole.decoder, whole.tensors)
    assert len({split_gguf.read_whole(part).digest for part in parts}) == 1


def _exchanged(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[2].read_bytes())


def _pipe_for_a_part(parts: list[Path]) -> None:
    parts[1].unlink()
    pipe(parts[1])


def _renamed(parts: list[Path]) -> None:
    parts[0] = parts[0].rename(parts[0].with_name("renamed.gguf"))


@pytest.mark.parametrize(
    ("damage", "named", "sentence"),
    [
        (lambda parts: parts[1].unlink(), 2, r"model-00002-of-00003\.gguf: is missing, part 2 of 3"),
        (_pipe_for_a_part, 0, r"00002-of-00003\.gguf: is not a regular file"),  # and is not waited for
        (_exchanged, 0, "its header is not that of part 2 of 3"),
        (_exchanged, 1, "the others cannot be found"),  # it says that it is the third
        (lambda parts: os.truncate(parts[1], 200), 0, r"00002-of-00003\.gguf: cut short"),
        (_renamed, 0, "part 1 of 3 of a split model, but its name"),
    ],
)
def test_a_part_that_is_missing_damaged_renamed_or_in_anothers_place_is_named(parts, damage, named, sentence):
    damage(parts)
    with pytest.raises(WeightsError, match=sentence):
        read(parts[named])


def test_parts_that_have_a_tensor_twice_or_lack_one_are_refused(parts, tmp_path):
    def part(number: int, claimed: int, stored: list[Tensor]) -> None:
        writer = gguf_writer(tmp_path / f"odd-{number:05d}-of-00002.gguf", TINY)
        writer.add_uint16("split.no", number - 1)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", claimed)
        write(writer, stored)

    stored = tensors.of_shape(TINY)
    first = tmp_path / "odd-00001-of-00002.gguf"
    part(1, len(stored), stored[:10])
    part(2, len(stored), stored[10:])
    assert len(read(first).tensors) == len(stored)
    part(2, len(stored), stored[9:])
    with pytest.raises(WeightsError, match=r"has tensor .* twice"):
        read(first)
    part(2, len(stored), stored[11:])
    with pytest.raises(WeightsError, match=f"claims {len(stored)} tensors, and its parts have"):
        read(first)


@pytest.mark.parametrize(("number", "count"), [(0, 65_535), (7, 3), (3, 3)])
def test_a_number_of_parts_that_makes_no_sense_is_refused(tmp_path, number, count):
    writer = gguf_writer(tmp_path / f"odd-00001-of-{count:05d}.gguf", TINY)
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    write(writer, tensors.of_shape(TINY))
    with pytest.raises(WeightsError, match="which is impossible"):
        read(tmp_path / f"odd-00001-of-{count:05d}.gguf")


# --- safetensors --------------------------------------------------------------------------------------------


def test_a_safetensors_header_gives_names_types_dimensions_and_bytes(tmp_path):
    path = write_safetensors(
        tmp_path / "model.safetensors",
        {
            "a": ("F32", [2, 3], 4),
            "b": ("BF16", [5], 2),
            "packed": ("I32", [4, 4], 4),
            "fp8": ("F8_E4M3", [7], 1),
            "scalar": ("F16", [], 2),
            "nothing": ("U8", [0, 9], 1),
        },
        {"format": "pt"},
    )
    assert list(read_header(path).values()) == [
        Tensor("a", "f32", (2, 3), 24),
        Tensor("b", "bf16", (5,), 10),
        Tensor("packed", "i32", (4, 4), 64),
        Tensor("fp8", "f8_e4m3", (7,), 7),
        Tensor("scalar", "f16", (), 2),
        Tensor("nothing", "u8", (0, 9), 0),
    ]


def test_tensors_in_any_order_are_read_in_the_order_of_their_data(tmp_path):
    header = {
        "second": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
        "first": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
    }
    path = write_raw(tmp_path / "x.safetensors", header, 6)
    assert list(read_header(path)) == ["first", "second"]


@given(st.integers(0, 2000) | st.integers(0, 1 << 21))
def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path, kept):
    path = write_safetensors(tmp_path / "model.safetensors", entries(TINY))
    size = path.stat().st_size
    os.truncate(path, size + 1 + kept)
    with pytest.raises(SafetensorsError, match="followed by other bytes"):
        read_header(path)
    os.truncate(path, kept % size)
    with pytest.raises(SafetensorsError, match=r"cut short|is empty"):
        read_header(path)


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    "b": {"dtype": "BF16", "shape": [3, 2], "data_offsets": [4, 16]},
    "c": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [16, 19]},
    "d": {"dtype": "BOOL", "shape": [], "data_offsets": [19, 20]},
}
JUNK = ["F32", "u8", "F9", "x" * 9999, "\n", -1, 2**63, 2**70, True, 4.0, None, [], {}, [0, 4, 8], [-4, 0]]
JUNK += [[4, 0], [2**40, 2**40 + 4], [2**63, 2**63], [True, 4], HEADER["a"]]
PIECES = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"-1",
    b"1e9",
    b"NaN",
    b"null",
    b"9" * 30,
    b"\\ud800",
    b"\xff",
]


@given(edits(places(HEADER), JUNK, min_size=0), patches(320, PIECES) | st.just([]))
@example([], [])
def test_a_safetensors_header_is_read_as_it_is_or_refused_in_one_sentence(tmp_path, changes, damage):
    header = edited(HEADER, changes)
    path = write_raw(tmp_path / "model.safetensors", header, 20)
    write_over(path, [(8 + at, piece) for at, piece in damage])
    os.truncate(path, 8 + int.from_bytes(path.read_bytes()[:8], "little") + 20)
    sentence, found = "", {}
    try:
        found = read_header(path)
    except SafetensorsError as refusal:
        sentence = str(refusal)
    if sentence:
        assert changes or damage
        assert sentence.startswith(f"{path}: ")
        assert len(sentence) < len(str(path)) + 250
        assert sentence.isprintable()
        return
    assert sum(tensor.bytes for tensor in found.values()) == 20
    if not damage:
        header.pop("__metadata__", None)
        described = {name: (entry["dtype"].lower(), entry["shape"]) for name, entry in header.items()}
        assert {name: (tensor.type, list(tensor.dims)) for name, tensor in found.items()} == described


LONG = {
    "deep": b"[" * (4 << 20),
    "deep objects": b'{"a":' * 800_000,
    "empties": b'{"a":[' + b"[[]]," * 800_000 + b"1]}",
    "keys": b"{" + b",".join(b'"%x":{}' % i for i in range(330_000)) + b"}",
    "one name": b'{"' + b"x" * (4 << 20) + b'":{"dtype":"U8","shape":[4],"data_offsets":[0,5]}}',
    "one type": b'{"a":{"dtype":"' + b"x" * (4 << 20) + b'","shape":[4],"data_offsets":[0,4]}}',
    "digits": b'{"a":{"dtype":"U8","shape":[' + b"9" * (4 << 20) + b'],"data_offsets":[0,4]}}',
    "dimensions": b'{"a":{"dtype":"U8","shape":[4' + b",0" * (2 << 20) + b'],"data_offsets":[0,4]}}',
}
READS_ALL = """
import sys, time
from pathlib import Path
from harness.models.safetensors_files import SafetensorsError, read_header
from runners import clock
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        read_header(path)
    except SafetensorsError as refusal:
        print(refusal)
print(clock.peak_rss_bytes(), time.process_time())
"""


def test_the_longest_hostile_headers_are_refused_in_bounded_memory(tmp_path):
    """In a process of its own: the library's memory is not Python's, and getrusage gives a parent's peak."""
    for name, header in LONG.items():
        write_raw(tmp_path / name, header[: (4 << 20) - 8], 4)
    ran = subprocess.run(
        [sys.executable, "-c", READS_ALL, tmp_path], capture_output=True, text=True, check=True
    )
    *refusals, used = ran.stdout.splitlines()
    assert [Path(refusal.partition(": ")[0]).name for refusal in refusals] == sorted(LONG)
    assert all(len(refusal) < len(str(tmp_path)) + 250 for refusal in refusals)
    peak_bytes, seconds = map(float, used.split())
    assert peak_bytes < 500e6
    assert seconds < 60  # a guard against what never ends


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_000, (4 << 20) + 1])
def test_a_header_that_claims_more_than_any_has_is_not_read(tmp_path, length):
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(struct.pack("<Q", length))
    os.truncate(path, 200_000_000)
    counted, _ = counting(path, most=8192)
    with within(60, 1), pytest.raises(SafetensorsError, match="a header over 4 MiB"):
        read_header(counted)


def write_over(path: Path, damage: Patches) -> None:
    with path.open("r+b") as file:
        for at, piece in damage:
            file.seek(at)
            file.write(piece)


# --- folders ------------------------------------------------------------------------------------------------


TIED = replace(TINY, tied=True)
# LLaVA: a wrapper's config, and a vision tower whose layers have the names of a decoder's.
LLAVA = {"model_type": "llava", "text_config": config_of(TINY), "vision_config": {"hidden_size": 64}}
SIGHT = ("vision_tower.layers.0.q_proj", "multi_modal_projector.linear_1", "model.visual.embed_tokens")


@pytest.mark.parametrize(
    ("config", "stored", "shape"),
    [
        (config_of(TINY), entries(TINY), TINY),
        (config_of(TIED), entries(TIED), TIED),
        (config_of(TIED), entries(TIED, stored_tied=True), TIED),
        (
            LLAVA,
            {f"language_model.{name}": entry for name, entry in entries(TINY).items()}
            | {f"{name}.weight": ("BF16", [64, 64], 2) for name in SIGHT},
            TINY,
        ),
    ],
    ids=["plain", "tied", "a copy of the embedding", "an image model"],
)
def test_a_checkpoint_has_the_parameters_and_the_bytes_of_a_token_of_its_config(
    tmp_path, config, stored, shape
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", stored)
    checkpoint = read(tmp_path)
    assert (checkpoint.format, checkpoint.quantization, checkpoint.tied) == ("hf", None, shape.tied)
    assert replace(checkpoint.decoder, norm_eps=shape.norm_eps) == shape
    assert checkpoint.parameters == decoder.parameters(shape)
    assert {tensor.type for tensor in checkpoint.tensors} == {"bf16"}
    assert streamed(checkpoint) == 2 * decoder.active_params(shape)
    beside = read(tmp_path / "model.safetensors")
    assert replace(beside, path=tmp_path) == checkpoint


def test_a_model_that_lacks_its_embedding_or_an_untied_lm_head_is_refused(tmp_path):
    stored = entries(TINY)
    del stored["lm_head.weight"]
    write_safetensors(write_config(tmp_path) / "model.safetensors", stored)
    with pytest.raises(WeightsError, match=r"has no lm_head, and its config\.json does not tie it"):
        read(tmp_path)
    (tmp_path / "config.json").unlink()
    assert read(tmp_path).tied  # nothing says otherwise
    del stored["model.embed_tokens.weight"]
    write_safetensors(write_config(tmp_path) / "model.safetensors", stored)
    with pytest.raises(WeightsError, match="has no input embedding"):
        read(tmp_path)


def test_packed_weights_are_counted_by_the_shape(tmp_path):
    """AWQ packs eight weights in an I32 and adds zeros and scales: no element of those is a parameter."""
    stored = entries(TINY)
    dims = stored.pop("model.layers.0.mlp.up_proj.weight")[1]
    stored["model.layers.0.mlp.up_proj.qweight"] = ("I32", [dims[1], dims[0] // 8], 4)
    stored["model.layers.0.mlp.up_proj.qzeros"] = ("I32", [dims[1] // 128, dims[0] // 8], 4)
    stored["model.layers.0.mlp.up_proj.scales"] = ("F16", [dims[1] // 128, dims[0]], 2)
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128}
    write_config(tmp_path, quantization_config=quantization)
    write_safetensors(tmp_path / "model.safetensors", stored)
    checkpoint = read(tmp_path)
    assert checkpoint.quantization
    assert "awq" in checkpoint.quantization
    assert checkpoint.parameters == decoder.parameters(TINY)
    (tmp_path / "config.json").unlink()
    assert read(tmp_path).parameters is None


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "mamba"])
def test_a_mistake_in_how_weights_are_quantized_is_refused_for_every_kind_of_model(tmp_path, kind):
    write_config(tmp_path, model_type=kind, quantization_config={"quant_method": "gptq", "bits": "four"})
    write_safetensors(tmp_path / "model.safetensors", entries(TINY))
    with pytest.raises(WeightsError, match=r"quantization_config\.bits must be from 2 to 8, not 'four'"):
        locate.read(tmp_path, needs_shape=False)


def test_shards_are_read_with_their_index_alone(tmp_path):
    write_config(tmp_path)
    whole = read(write_safetensors(tmp_path / "model.safetensors", entries(TINY)))
    (tmp_path / "model.safetensors").unlink()
    write_shards(tmp_path, TINY, 3)
    checkpoint = read(tmp_path)
    assert sorted(checkpoint.tensors, key=str) == sorted(whole.tensors, key=str)
    assert checkpoint.decoder == whole.decoder
    (tmp_path / INDEX).unlink()
    with pytest.raises(WeightsError, match=f"has no model.safetensors and no {INDEX}"):
        read(tmp_path)
    with pytest.raises(WeightsError, match="is one of 3 shards; name their folder"):
        read(tmp_path / "model-00002-of-00003.safetensors")


def test_a_missing_shard_is_named(tmp_path):
    write_shards(write_config(tmp_path), TINY, 3)[1].unlink()
    missing = r"model-00002-of-00003\.safetensors: is missing, one of 3 shards"
    with pytest.raises(WeightsError, match=missing):
        read(tmp_path)


def test_the_index_decides_which_files_are_the_model(tmp_path):
    write_shards(write_config(tmp_path), TINY, 2)
    path = tmp_path / INDEX
    index = json.loads(path.read_text())
    expected = len(entries(TINY))
    for name in ("consolidated", "adapter_model", "other"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"x": ("F32", [9], 4)})
    assert len(read(tmp_path).tensors) == expected

    del index["weight_map"]["lm_head.weight"]  # in a shard all the same: loaded
    path.write_text(json.dumps(index))
    assert len(read(tmp_path).tensors) == expected

    shard = "model-00001-of-00002.safetensors"
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = shard  # a buffer: not missed
    path.write_text(json.dumps(index))
    assert len(read(tmp_path).tensors) == expected

    index["weight_map"]["model.layers.9.self_attn.q_proj.weight"] = shard
    path.write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"lacks 'model\.layers\.9\.self_attn\.q_proj\.weight', though"):
        read(tmp_path)


OUTSIDE = ("../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x.bin")
NO_NAMES = ("a\0.safetensors", "a\n.safetensors", "\ud800.safetensors", 7, ["x"])


@pytest.mark.parametrize("shard", [*OUTSIDE, *NO_NAMES])
def test_an_index_names_files_of_its_folder_alone(tmp_path, shard):
    folder = write_config(tmp_path)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": shard}}))
    with pytest.raises(WeightsError, match="which is not a file of its folder"):
        read(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", "[" * 9999])
def test_an_index_that_is_none_is_a_sentence(tmp_path, index):
    (write_config(tmp_path) / INDEX).write_text(index)
    with pytest.raises(WeightsError, match=r"index\.json: (has no weight_map|is not|is nested)"):
        read(tmp_path)


def test_an_index_may_name_the_lm_head_that_a_tied_model_does_not_store(tmp_path):
    tied = replace(TINY, tied=True)
    shard = write_shards(write_config(tmp_path, tied), tied, 1)[0].name
    path = tmp_path / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = shard
    path.write_text(json.dumps(index))
    assert read(tmp_path).parameters == decoder.parameters(tied)
    write_config(tmp_path, TINY)
    with pytest.raises(WeightsError, match=r"lacks 'lm_head\.weight', though its index names it"):
        read(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    first, second = write_shards(write_config(tmp_path), TINY, 2)
    second.write_bytes(first.read_bytes())
    with pytest.raises(WeightsError, match=r"00002-of-00002\.safetensors: has tensor .* of another shard"):
        read(tmp_path)


def test_what_a_folder_holds_decides_what_is_read_of_it(tmp_path):
    write_config(tmp_path)
    assert read(tmp_path).format == "config"
    assert read(tmp_path).tensors == ()
    assert read(tmp_path).parameters == decoder.parameters(TINY)

    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(WeightsError, match="only safetensors and GGUF can be read"):
        read(tmp_path)

    write_gguf(tmp_path / "model.gguf", split_max_tensors=10)
    write_gguf(tmp_path / "mmproj-model.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert read(tmp_path).format == "gguf"
    write_gguf(tmp_path / "second.gguf")
    with pytest.raises(WeightsError, match=r"has 2 GGUF models \(.*second.gguf\): name one"):
        read(tmp_path)

    for name in ("adapter_model", "consolidated"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"x": ("F32", [9], 4)})
    with pytest.raises(WeightsError, match="has 2 GGUF models"):
        read(tmp_path)
    write_shards(tmp_path, TINY, 2)
    write_safetensors(tmp_path / "model.safetensors", entries(TINY) | {"x": ("F32", [9], 4)})
    checkpoint = read(tmp_path)  # before the shards, as transformers does
    assert checkpoint.parameters == decoder.parameters(TINY) + 9


def test_a_file_without_a_suffix_is_known_by_its_content(tmp_path):
    """The hub's cache names files by their hash."""
    write_gguf(tmp_path / "model.gguf").rename(tmp_path / "0a1b")
    write_safetensors(tmp_path / "model.safetensors", entries(TINY)).rename(tmp_path / "2c3d")
    assert read(tmp_path / "0a1b").format == "gguf"
    checkpoint = read(tmp_path / "2c3d")
    assert checkpoint.format == "hf"
    assert checkpoint.decoder is None
    assert not checkpoint.tied
    assert checkpoint.parameters == decoder.parameters(TINY)


def test_experts_without_a_config_json_are_refused(tmp_path):
    stored = entries(TINY) | {"model.layers.0.mlp.experts.0.up_proj.weight": ("BF16", [32, 32], 2)}
    path = write_safetensors(tmp_path / "model.safetensors", stored)
    with pytest.raises(WeightsError, match="nothing says how many of them a token uses"):
        read(path)


# --- more than any model has --------------------------------------------------------------------------------


def write_index(folder: Path, names: list[str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}))


@pytest.mark.parametrize(
    ("count", "sentence"),
    [(1000, "is missing, one of 1000 shards"), (1001, "names over 1000 shards, more than any")],
)
def test_a_thousand_shards_are_looked_for_and_no_more(tmp_path, count, sentence):
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    write_safetensors(tmp_path / names[0], {"x": ("F32", [9], 4)})
    write_index(tmp_path, names)
    with pytest.raises(WeightsError, match=sentence):
        read(tmp_path)


@pytest.mark.slow("100,000 tensors are read twice: 5 s")
def test_a_hundred_thousand_tensors_are_read_and_no_more(tmp_path):
    def shard(number: int, count: int) -> None:
        empty = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
        header = b",".join(b'"%d.%x":%b' % (number, i, empty) for i in range(count))
        write_raw(tmp_path / f"model-{number:05d}-of-00003.safetensors", b"{%b}" % header)

    write_index(tmp_path, [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)])
    shard(1, 50_000)
    shard(2, 50_000)
    with pytest.raises(WeightsError, match="is missing, one of 3 shards"):
        read(tmp_path)
    shard(3, 1)
    with pytest.raises(WeightsError, match="has over 100000 tensors, more than any dense model"):
        read(tmp_path)


def test_headers_of_a_thousand_shards_are_not_all_read_where_each_is_as_long_as_one_may_be(tmp_path):
    longest = write_raw(tmp_path / "longest", b"{}" + b" " * ((4 << 20) - 2))
    folder = tmp_path / "model"
    folder.mkdir()
    names = [f"model-{i + 1:05d}-of-01000.safetensors" for i in range(1000)]
    write_index(folder, names)
    for name in names:
        (folder / name).symlink_to(longest)
    counted, _ = counting(folder, most=64 << 20)
    with pytest.raises(WeightsError, match="headers"):
        read(counted)


# --- whatever is wrong is one sentence ----------------------------------------------------------------------


def _file(name: str, content: bytes) -> Any:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def link(path: Path, target: str) -> Path:
    path.symlink_to(path.with_name(target))
    return path


def _config_pipe(folder: Path) -> Path:
    pipe(folder / "config.json")
    return write_safetensors(folder / "model.safetensors", entries(TINY))


WRONG = {
    "missing": (lambda folder: folder / "none.gguf", "no such file"),
    "pipe": (lambda folder: pipe(folder / "pipe.gguf"), "not a regular file"),
    "pipe in a folder": (lambda folder: pipe(folder / "pipe.gguf").parent, "not a regular file"),
    "config is a pipe": (_config_pipe, r"config\.json: is not a regular file"),
    "shard is a pipe": (
        lambda folder: pipe(folder / "model.safetensors").parent,
        r"model\.safetensors: is not a regular file",
    ),
    "device": (lambda folder: Path("/dev/zero"), "not a regular file"),
    "empty folder": (lambda folder: folder, "holds no model"),
    "null": (lambda folder: Path("a\0b"), "embedded null"),
    "long name": (lambda folder: folder / ("x" * 300), "file name too long"),
    "below a file": (lambda folder: _file("x", b"x")(folder) / "y", "not a directory"),
    "loop": (lambda folder: link(folder / "loop", "loop"), "too many levels of symbolic links"),
    "broken link": (
        lambda folder: link(folder / "model.safetensors", "gone").parent,
        r"model\.safetensors: is missing",
    ),
    "no GGUF": (_file("model.gguf", b"PK\x03\x04"), "not a GGUF file: it begins with .*; fetch it again"),
    "GGUF 9": (_file("m.gguf", b"GGUF\x09" + bytes(99)), "version 9 is not supported.* fetch the file again"),
    "cut GGUF": (_file("model.gguf", b"GGUF"), "cut short"),
    "no safetensors": (_file("model.safetensors", b"PK\x03\x04"), "a header over 4 MiB|cut short"),
    "pickle": (_file("pytorch_model.bin", b"PK\x03\x04 and more"), "only GGUF and safetensors headers"),
    "no object": (_file("config.json", b"[]"), "not a JSON object"),
    "no JSON": (_file("config.json", b"{'a': 1}"), "is not JSON"),
    "NaN": (_file("config.json", b'{"rope_theta": NaN}'), "has NaN"),
    "twice": (_file("config.json", b'{"a": 1, "a": 2}'), "has key 'a' twice"),
    "digits": (_file("config.json", b'{"x": ' + b"9" * 100_000 + b"}"), "a number of 100000 digits"),
    "deep": (_file("config.json", b"[" * 100_000), "nested too deeply"),
    "no UTF-8": (_file("config.json", b'{"\xff": 1}'), "is not UTF-8"),
    "long config": (_file("config.json", b" " * ((1 << 20) + 1)), "longer than 1 MiB"),
    "no model's": (_file("tokenizer.json", b'{"version": "1.0"}'), r"tokenizer\.json: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_whatever_is_wrong_is_one_sentence(tmp_path, name):
    make, sentence = WRONG[name]
    with pytest.raises(WeightsError, match=sentence) as caught:
        read(make(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_a_sentence(tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    path.chmod(0)
    me = os.geteuid()
    try:
        if me == 0:  # root may read all files
            os.seteuid(65_534)
        with pytest.raises(WeightsError, match="permission denied"):
            read(path)
    finally:
        os.seteuid(me)


VALUES = [None, True, 0, -1, 2**70, 1.5, 1e308, "", "x", [], [1], {}, {"a": {}}, [[]] * 3]
CONFIG_KEYS = [*config_of(TINY), "quantization_config", "rope_scaling", "text_config", "layer_types"]


@given(st.booleans(), edits([(key,) for key in CONFIG_KEYS], VALUES, min_size=0, max_size=3))
@example(False, [])
@example(True, [])
def test_a_damaged_config_is_read_or_refused_and_nothing_else(tmp_path, tied, changes):
    config = edited(config_of(replace(TINY, tied=tied)), changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        checkpoint = read(tmp_path)
    except WeightsError:
        assert changes
        return
    assert checkpoint.parameters


@given(patches(2900, [bytes([value]) for value in (0, 1, 2, 8, 9, 127, 255)]))
@example([(0, b"G")])  # as it was
def test_a_damaged_gguf_is_read_or_refused_and_nothing_else(tmp_path, damage):
    path = write_gguf(tmp_path / "model.gguf", extra=(Tensor("rope_freqs.weight", "f32", (16,), 64),))
    size = path.stat().st_size
    write_over(path, damage)
    try:
        checkpoint = read(path)
    except WeightsError:
        assert damage != [(0, b"G")]
        return
    assert sum(tensor.bytes for tensor in checkpoint.tensors) <= size
    assert checkpoint.parameters
    if checkpoint.decoder is not None:
        assert decoder.parameters(checkpoint.decoder) < 1e7


# --- what is read -------------------------------------------------------------------------------------------


LARGE = dense("llama", 32_000, 8192, 80, 28_672, 64, 8, 128)  # Llama 2 70B


@pytest.mark.parametrize(
    ("store", "files", "reads_a_file"),
    [
        (lambda folder: write_shards(write_config(folder, LARGE), LARGE, 80), 80, 8),
        (lambda folder: write_gguf(folder / "large.gguf", LARGE, split_max_tensors=20), 37, 4),
    ],
)
def test_of_a_140_gb_model_the_headers_alone_are_read(tmp_path, store, files, reads_a_file):
    """Files with holes, so that it takes no disk."""
    store(tmp_path)
    counted, reads = counting(tmp_path, most=3_000_000)
    checkpoint = read(counted)
    assert replace(checkpoint.decoder, norm_eps=LARGE.norm_eps) == LARGE
    assert sum(tensor.bytes for tensor in checkpoint.tensors) > 137e9
    assert files < len(reads) < files * reads_a_file


# --- the hub's cache, links, encoder-decoders


def hub_model(root: Path, *commits: str, main: str | None = None) -> Path:
    """A model's folder in the hub's cache: a snapshot of links to blobs for each commit."""
    folder = root / "models--owner--name"
    (folder / "blobs").mkdir(parents=True)
    for commit in commits:
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        blob = write_gguf(folder / "blobs" / commit)
        (snapshot / "model.gguf").symlink_to(f"../../blobs/{blob.name}")
    if main is not None:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(main)
    return folder


@pytest.mark.parametrize(
    ("commits", "main", "read_commit"), [(("a", "b"), "b", "b"), (("a",), None, "a"), (("a",), "gone", "a")]
)
def test_a_models_folder_in_the_hubs_cache_stands_for_its_snapshot(tmp_path, commits, main, read_commit):
    folder = hub_model(tmp_path, *commits, main=main)
    assert locate.local(folder).path == folder / "snapshots" / read_commit / "model.gguf"


def test_several_snapshots_without_a_ref_are_named(tmp_path):
    folder = hub_model(tmp_path, "a", "b")
    with pytest.raises(WeightsError, match=f"has 2 snapshots.*: name one: {folder}/snapshots/a, {folder}"):
        read(folder)


@pytest.mark.parametrize("name", ["", "snapshots/a", "snapshots/a/model.gguf"])
def test_a_link_whose_target_is_missing_is_said_to_be_one(harness, tmp_path, name):
    folder = hub_model(tmp_path, "a")
    (folder / "blobs" / "a").unlink()
    for ran in (harness("theory", folder / name), harness("run", folder / name, "--dry-run")):
        assert ran.code == 2
        assert (
            "it is a link to ../../blobs/a, which is missing: fetch it again (hf download owner/name)"
            in ran.err
        )
        assert "did you mean" not in ran.err


def test_a_link_in_a_checkpoint_whose_target_is_missing_is_said_to_be_one(tmp_path):
    write_config(tmp_path)
    (tmp_path / locate.SINGLE).symlink_to("elsewhere")
    with pytest.raises(WeightsError, match="a link to elsewhere, which is missing: fetch it again"):
        read(tmp_path)


def t5(path: Path, *sides: str) -> Path:
    """An encoder-decoder of one layer on each side, by llama.cpp's names, in f16."""
    writer = gguf.GGUFWriter(path, "t5")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    dims = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_o"), (64, 64))
    layer = dims | {"ffn_up": (128, 64), "ffn_down": (64, 128)}
    crossed = {f"cross_{name}": of for name, of in dims.items()}
    named = {"token_embd": (1000, 64), "output": (1000, 64)}
    for side in sides:
        of_side = layer | (crossed if side == "dec" else {})
        named |= {f"{side}.blk.0.{name}": of for name, of in of_side.items()}
    write(writer, [tensors.typed(f"{name}.weight", "f16", of) for name, of in named.items()])
    return path


def test_a_step_of_an_encoder_decoder_reads_its_decoder_alone(harness, tmp_path):
    ran = harness("theory", t5(tmp_path / "t5.gguf", "enc", "dec"), "--machine", "rtx-4090", "--json")
    (row,) = ran.json
    decoder = 4 * 64 * 64 + 2 * 64 * 64 + 2 * 128 * 64  # without K and V of cross-attention
    assert row["weight_bytes_per_token"] == 2 * (decoder + 1000 * 64)
    assert row["tokens_per_s"] == pytest.approx(1008e9 / (2 * (decoder + 1000 * 64)))
    assert "is an encoder-decoder: a decode step reads its decoder, not its encoder" in ran.err


def test_an_encoder_alone_has_no_limit_of_decode(harness, tmp_path):
    ran = harness("theory", t5(tmp_path / "encoder.gguf", "enc"), "--machine", "rtx-4090")
    assert (ran.code, "is an encoder alone" in ran.err) == (2, True)
