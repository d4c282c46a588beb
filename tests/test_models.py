"""GGUF headers: read by skipping, and never believed beyond the file's own length."""

import cProfile
import hashlib
import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from damage import patched, patches
from gguf_again import finish
from hypothesis import example, given
from hypothesis import strategies as st

from harness.models import gguf as models_gguf
from harness.models import locate, make
from harness.models.gguf import GgufError, GgufHeader
from harness.models.locate import WeightsError
from harness.theory import ggml_types
from harness.theory.hf_config import SHAPES
from harness.theory.known_models import Described


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
    finish(writer)
    return path


def test_a_header_says_what_the_gguf_library_wrote(small):
    header = models_gguf.read(small)
    assert header.architecture == "llama"
    assert header.quant == "f16"
    assert header.metadata["tokenizer.ggml.tokens"] == 1000
    assert header.attention() == {"layers": 3, "kv_heads": 2, "head_dim": 16}
    assert locate.local(small).sizes == {
        "model_bytes": 32 * 64 * 2 + 64 * 4,
        "parameters": 32 * 64 + 64,
        "bytes_by_type": {"f16": 4096, "f32": 256},
        "input_embedding_bytes": 4096,
        "tied": True,
    }


@given(st.data())
def test_a_file_cut_anywhere_is_refused(small, tmp_path, data):
    whole = small.read_bytes()
    data_ends = len(whole) - (-256 % 32)  # padding after the last tensor may go missing
    length = data.draw(
        st.sampled_from([0, data_ends - 1]) | st.integers(0, 400) | st.integers(0, data_ends - 1)
    )
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:length])
    with pytest.raises(GgufError, match=r"cut short|not a GGUF|is empty"):
        models_gguf.read(cut)


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
                models_gguf.read(path)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def write(path: Path, keys: list[bytes], tensors: list[bytes], data_bytes: int = 1 << 16) -> Path:
    """A GGUF by hand, its data a hole."""
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    path.write_bytes(start + b"".join(keys) + b"".join(tensors))
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + data_bytes)
    return path


U32, STRINGS = 4, struct.pack("<I", 8)
REFUSED = {
    "key twice": ([key(b"a", U32, b"1234"), key(b"a", U32, b"1234")], [], "key 'a' occurs twice"),
    "tensor twice": ([], [tensor(b"a", [4]), tensor(b"a", [4], 0, 32)], "tensor 'a' occurs twice"),
    "overlap": (
        [],
        [tensor(b"a", [16]), tensor(b"b", [16], 0, 32)],
        "tensor 'b' begins at offset 32, expected 64",
    ),
    "the same data": ([], [tensor(b"a", [8]), tensor(b"b", [8])], "begins at offset 0, expected 32"),
    "a gap": ([], [tensor(b"a", [8]), tensor(b"b", [8], 0, 64)], "begins at offset 64, expected 32"),
    "unaligned": ([], [tensor(b"a", [9]), tensor(b"b", [8], 0, 36)], "begins at offset 36, expected 64"),
    "dimension 0": ([], [tensor(b"a", [32, 0])], "has a dimension of 0"),
    "0 times huge": ([], [tensor(b"a", [2**63, 0, 2**63])], "has a dimension of 0"),
    "overflow": ([], [tensor(b"a", [2**32, 2**32, 2**32, 2**32])], "cut short"),
    "half a block": ([], [tensor(b"a", [48, 2], 8)], "rows that are not a multiple of the q8_0 block size"),
    "a scalar in blocks": ([], [tensor(b"a", [], 8)], "rows that are not a multiple of the q8_0 block size"),
    "removed type": ([], [tensor(b"a", [32], 4)], "unknown type number 4"),
    "type of tomorrow": ([], [tensor(b"a", [32], 43)], "unknown type number 43"),
    "alignment 0": ([key(b"general.alignment", U32, b"\0" * 4)], [], "invalid alignment 0"),
    "alignment 48": ([key(b"general.alignment", U32, b"0\0\0\0")], [], "invalid alignment 48"),
    "alignment in words": ([key(b"general.alignment", 8, text(b"32"))], [], "is not a whole number"),
    "count in words": ([key(b"split.count", 8, text(b"3"))], [], r"split\.count is not a whole number"),
    "long text": ([key(b"%d" % i, 8, text(b" " * 999_999)) for i in range(17)], [], "over 16 MiB of text"),
    "strings": (
        [key(b"a", 9, STRINGS + struct.pack("<Q", (4 << 20) + 1))],
        [],
        "an array of 4194305 strings",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ggml_refuses_or_no_model_has_is_one_sentence(tmp_path, name):
    keys, tensors, sentence = REFUSED[name]
    with pytest.raises(GgufError, match=sentence) as caught:
        models_gguf.read(write(tmp_path / "hostile.gguf", keys, tensors))
    assert str(caught.value).startswith(f"{tmp_path}/hostile.gguf: ")


def test_block_sizes_are_those_of_the_gguf_library():
    theirs = {
        int(kind): ggml_types.Type(kind.name.lower(), *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()
    }
    del theirs[gguf.GGMLQuantizationType.Q8_1]  # the library counts its scales in 32 bits, ggml.c in 16
    assert {number: ggml_types.TYPES[number] for number in theirs} == theirs
    further = {each for number, each in ggml_types.TYPES.items() if number not in theirs}
    assert {each for each in further if each.name not in ggml_types.IK_TYPES} == {
        ggml_types.Type("q8_1", 32, 36),
        ggml_types.Type("q2_0", 64, 18),  # newer than the library
    }


def test_the_digest_is_of_all_bytes_but_the_elements_of_arrays(tmp_path):
    """Fingerprints of weights have it in them."""

    def digest(words: list[bytes]) -> str:
        strings = STRINGS + struct.pack("<Q", len(words)) + b"".join(map(text, words))
        scores = struct.pack("<IQ2f", 6, 2, 0.5, 0.25)
        keys = [key(b"words", 9, strings), key(b"scores", 9, scores), key(b"n", U32, b"1234")]
        return models_gguf.read(write(tmp_path / "x.gguf", keys, [tensor(b"a", [4])], 16)).digest

    taken = b"GGUF" + struct.pack("<IQQ", 3, 1, 3) + key(b"words", 9, STRINGS + struct.pack("<QQQ", 2, 3, 5))
    taken += key(b"scores", 9, struct.pack("<IQ", 6, 2)) + key(b"n", U32, b"1234") + tensor(b"a", [4])
    assert digest([b"one", b"three"]) == hashlib.sha256(taken).hexdigest()[:16]
    assert digest([b"two", b"seven"]) == digest([b"one", b"three"])
    assert digest([b"four", b"five"]) != digest([b"one", b"three"])


def test_arrays_are_told_from_numbers(tmp_path):
    """A model whose layers differ has an array of heads, and its length is no number of heads."""
    arch = key(b"general.architecture", 8, text(b"llama"))
    counts = [
        key(b"llama." + name, U32, struct.pack("<I", 8)) for name in (b"block_count", b"embedding_length")
    ]
    heads = key(b"llama.attention.head_count", U32, struct.pack("<I", 4))
    array = struct.pack("<IQ8I", U32, 8, *[4] * 8)
    keys = [arch, *counts, heads]
    assert models_gguf.read(write(tmp_path / "x.gguf", keys, [], 0)).attention() is not None
    for wrong in (b"llama.attention.head_count", b"llama.attention.head_count_kv"):
        odd = [k for k in keys if wrong not in k] + [key(wrong, 9, array)]
        header = models_gguf.read(write(tmp_path / "x.gguf", odd, [], 0))
        assert header.attention() is None
        assert header.integer(wrong.decode()) is None
        assert header.metadata[wrong.decode()] == 8


def read_in_calls(path: Path) -> tuple[GgufHeader, int]:
    """A header, and the Python functions that reading it enters: time, as no other process can stretch it."""
    profile = cProfile.Profile(builtins=False)
    header = profile.runcall(models_gguf.read, path)
    return header, sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize(
    ("tokens", "merges"),
    [
        (26_214, 51_490),
        pytest.param(262_144, 514_906, marks=pytest.mark.slow("3 s to write; a tenth is always read")),
    ],
)
def test_a_large_vocabulary_is_read_in_few_calls(tmp_path, tokens, merges):
    """Tokens with scores and types, and merges, as Gemma's, of 19 MB, or a tenth of them."""
    writer = gguf.GGUFWriter(tmp_path / "large.gguf", "llama")
    writer.add_token_list([f"token number {i}" for i in range(tokens)])
    writer.add_token_scores([0.5] * tokens)
    writer.add_token_types([1] * tokens)
    writer.add_token_merges([f"to ken{i}" for i in range(merges)])
    writer.add_tensor("token_embd.weight", np.ones((32, 64), np.float16))
    finish(writer)
    header, calls = read_in_calls(tmp_path / "large.gguf")
    assert header.metadata["tokenizer.ggml.merges"] == merges
    assert header.tensors["token_embd.weight"].dims[0] == 32
    assert calls < 5000 * tokens / 262_144  # 3 for 64 KiB, none for a string: 0.07 s on two cores


WALKED = pytest.mark.slow("all that is walked at all takes 10 s, counted; a twentieth is always read")


@pytest.mark.parametrize("share", [0.05, pytest.param(1, marks=WALKED)])
def test_a_hostile_header_takes_calls_for_its_keys_and_tensors_and_none_for_its_strings(tmp_path, share):
    """Of 1: as many empty strings, keys and tensors as are walked at all."""
    count, words = int(25_000 * share), int((4 << 20) * share)
    keys = [key(b"%d" % i, 0, b"1") for i in range(count - 1)]
    tensors = [tensor(b"%d" % i, [8], 0, 32 * i) for i in range(count)]
    many = key(b"words", 9, STRINGS + struct.pack("<Q", words)) + bytes(8 * words)
    path = write(tmp_path / "hostile.gguf", [*keys, many], tensors, 32 * count)
    header, calls = read_in_calls(path)
    assert len(header.tensors) == count
    assert calls < 2_000_000 * share  # 17 for a key or tensor: 0.6 s on two cores, uncounted
    tracemalloc.start()
    try:
        models_gguf.read(path)
        assert tracemalloc.get_traced_memory()[1] < 5e6 + 55e6 * share
    finally:
        tracemalloc.stop()


HUGE = struct.pack("<Q", 2**63)
NUMBERS = [HUGE, *(struct.pack("<Q", number) for number in (0, 9, 77, 2**31, 2**64 - 1))]


AS_IT_WAS = [(0, b"G")]
# Big endian; the number of tensors, of keys, and of bytes of the first key.
REFUSED_DAMAGE = [[(4, b"\0\0\0\3")], [(8, HUGE)], [(16, HUGE)], [(24, HUGE)]]


@given(patches(600, max_size=5) | patches(600, NUMBERS, max_size=3))
@example(AS_IT_WAS)
@example(REFUSED_DAMAGE[0])
@example(REFUSED_DAMAGE[1])
@example(REFUSED_DAMAGE[2])
@example(REFUSED_DAMAGE[3])
def test_a_damaged_header_is_read_or_refused_in_one_sentence_and_bounded_memory(small, tmp_path, damage):
    path = tmp_path / "flipped.gguf"
    path.write_bytes(patched(small.read_bytes(), damage))
    sentence = ""
    tracemalloc.start()
    try:
        models_gguf.read(path).attention()
    except GgufError as refusal:
        sentence = str(refusal)
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 10e6
    assert not sentence or (sentence.startswith(f"{path}: ") and "\n" not in sentence)
    assert sentence or damage not in REFUSED_DAMAGE
    assert not sentence or damage != AS_IT_WAS


def test_missing_weights_are_one_sentence(tmp_path):
    with pytest.raises(WeightsError, match="no such file"):
        locate.local(tmp_path / "none.gguf")
    with pytest.raises(WeightsError, match="holds no model"):
        locate.local(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WeightsError, match="not a regular file"):
        locate.local(tmp_path / "pipe")


def test_weights_we_make_are_named_by_all_that_makes_their_bytes():
    shape, other = Described(SHAPES["tiny-qwen2"]), Described(SHAPES["tiny-llama"])
    name = make.synthetic_name(shape, 0)
    assert len({name, make.synthetic_name(shape, 1), make.synthetic_name(other, 0)}) == 3
    names = [make.synthetic_name(*made) for made in ((shape, 0), (shape, 1), (other, 0))]
    assert len({make.checkpoint_folder(made) for made in names}) == 3
    paths = {
        make.converted_path(name, "q4_0", "llama.cpp 1"),
        make.converted_path("another", "q4_0", "llama.cpp 1"),
        make.converted_path(name, "q8_0", "llama.cpp 1"),
        make.converted_path(name, "q4_0", "llama.cpp 2"),
        make.quantized_path(name, "q4_0", "llama.cpp 1"),  # of a GGUF, not of a checkpoint
    }
    assert len(paths) == 5
    sources = {make.converted_path(name, "f16", quantizer) for quantizer in ("1", "2")}
    assert len(sources) == 1  # the source does not depend on the quantizer
