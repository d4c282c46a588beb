"""GGUF headers: read by skipping, and never believed beyond the file's own length."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from harness.models import gguf_header, weights
from harness.models.gguf_header import GgufError
from harness.models.weights import WeightsError
from harness.theory.families import SHAPES


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A GGUF by the gguf library, with a vocabulary and two tensors."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_file_type(1)
    writer.add_token_list([f"word{i}" for i in range(1000)])
    writer.add_token_scores([0.5] * 1000)
    writer.add_tensor("token_embd.weight", np.ones((32, 64), np.float16))
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_header_says_what_the_gguf_library_wrote(small):
    header = gguf_header.read(small)
    assert header.architecture == "llama"
    assert header.quant == "f16"
    assert header.has_vocabulary
    assert header.metadata["tokenizer.ggml.tokens"] == 1000
    assert header.attention() == {"layers": 3, "kv_heads": 2, "head_dim": 16}
    assert header.weights() == {
        "model_bytes": 32 * 64 * 2 + 64 * 4,
        "parameters": 32 * 64 + 64,
        "bytes_by_type": {"f16": 4096, "f32": 256},
        "input_embedding_bytes": 4096,
        "tied": True,
    }
    offsets = {t.name: t.data_offset for t in gguf.GGUFReader(small).tensors}
    mine = {name: t.offset for name, t in header.tensors.items()}
    assert len({offsets[name] - mine[name] for name in mine}) == 1


def test_a_file_cut_anywhere_is_refused(small, tmp_path):
    whole = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    data_ends = len(whole) - (-256 % 32)  # padding after the last tensor may go missing
    for length in [*range(400), *range(400, data_ends - 1, 97), data_ends - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(GgufError, match=r"cut short|not a GGUF"):
            gguf_header.read(cut)


def test_hostile_headers_are_refused_in_bounded_memory(tmp_path):
    huge = 2**63
    magic = b"GGUF" + struct.pack("<I", 3)
    key = struct.pack("<Q", 1) + b"k"
    hostile = {
        "many tensors": magic + struct.pack("<QQ", huge, 0),
        "many keys": magic + struct.pack("<QQ", 0, huge),
        "long key": magic + struct.pack("<QQ", 0, 1) + struct.pack("<Q", huge),
        "long string": magic + struct.pack("<QQ", 0, 1) + key + struct.pack("<IQ", 8, huge),
        "long array": magic + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 4, huge),
        "array of strings": magic + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, huge),
        "nested arrays": magic + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 9, 1),
        "unknown type": magic + struct.pack("<QQ", 0, 1) + key + struct.pack("<I", 77),
        "dimensions": magic + struct.pack("<QQ", 1, 0) + key + struct.pack("<I", 2**31),
        "huge tensor": magic + struct.pack("<QQ", 1, 0) + key + struct.pack("<IQQIQ", 2, huge, huge, 0, 0),
        "huge offset": magic + struct.pack("<QQ", 1, 0) + key + struct.pack("<IQIQ", 1, 1, 0, huge),
        "version": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "not one": b"PK\x03\x04" * 10,
        "empty": b"",
    }
    tracemalloc.start()
    try:
        for name, content in hostile.items():
            path = tmp_path / "hostile.gguf"
            path.write_bytes(content + b"\0" * 64 if name != "empty" else b"")
            with pytest.raises(GgufError):
                gguf_header.read(path)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_a_header_with_bytes_flipped_is_read_or_refused_and_nothing_else(small, tmp_path):
    chance = random.Random(7)
    whole = small.read_bytes()
    path = tmp_path / "flipped.gguf"
    for _ in range(600):
        content = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            content[chance.randrange(600)] = chance.randrange(256)
        path.write_bytes(content)
        try:
            header = gguf_header.read(path)
        except GgufError:
            continue
        header.weights()
        header.attention()


def test_missing_weights_are_one_sentence(tmp_path):
    with pytest.raises(WeightsError, match="no such file"):
        weights.local(tmp_path / "none.gguf")
    with pytest.raises(WeightsError, match="is a directory"):
        weights.local(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WeightsError, match="not a regular file"):
        weights.local(tmp_path / "pipe")


def test_the_fingerprint_changes_when_the_file_does(small):
    before = weights.local(small).fingerprint
    small.touch()
    assert weights.local(small).fingerprint != before


def test_a_synthetic_file_is_named_by_all_that_makes_its_bytes():
    shape, other = SHAPES["tiny-qwen2"], SHAPES["tiny-llama"]
    paths = {
        weights.synthetic_path(shape, 0, "q4_0", "llama.cpp 1"),
        weights.synthetic_path(shape, 1, "q4_0", "llama.cpp 1"),
        weights.synthetic_path(shape, 0, "q8_0", "llama.cpp 1"),
        weights.synthetic_path(shape, 0, "q4_0", "llama.cpp 2"),
        weights.synthetic_path(other, 0, "q4_0", "llama.cpp 1"),
    }
    assert len(paths) == 5
    sources = {weights.synthetic_path(shape, 0, "f16", quantizer) for quantizer in ("1", "2")}
    assert len(sources) == 1  # the source does not depend on the quantizer
