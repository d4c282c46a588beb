"""Random weights of a given shape as a GGUF, written in a stream, and quantized by llama.cpp itself.

Sizes are exact, because which tensor gets which type depends on shapes and names alone. Values keep
activations near RMS 1, with a few outlier channels past 6.0 as real models have (kernels branch on them), and
hold no zero, NaN or anything that is a denormal in float16 (arithmetic on those has a speed of its own).
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from runners.llamacpp_lib import FTYPES, LOG, lib, metadata, opened
from runners.protocol import Request, Say

CHUNK = 1 << 20  # elements made at a time: 4 MiB of float32 a thread, whatever the shape
SAY_EVERY_S = 0.3
OUTLIER = 12.0  # a normalised channel times this is past 6.0 for 62% of tokens
QUANTIZE_BUFFER_BYTES = 256 << 20  # of rows at once; llama.cpp's own default is 8 GiB
_F16_SMALLEST_NORMAL = np.uint16(0x0400)  # bits of 2**-14


@dataclass(frozen=True)
class Tensor:
    """`shape` as numpy counts it, rows first. Values are `mean` + N(0, 1) * `std`, some channels of which are
    `outliers`."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    outliers: bool = False

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def tensors(shape: dict[str, Any]) -> list[Tensor]:
    """All tensors of a dense Llama- or Qwen2-like shape, by llama.cpp's names."""
    hidden, ffn, layers = shape["hidden_size"], shape["intermediate_size"], shape["layers"]
    q, kv = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    into_residual = (2 * layers) ** -0.5  # 2 * layers terms are added up: each gets its share of the variance

    def norm(name: str) -> Tensor:
        return Tensor(name, (hidden,), std=0.1, mean=1.0, outliers=True)

    def linear(name: str, n_in: int, n_out: int, gain: float = 1.0) -> Tensor:
        return Tensor(name, (n_out, n_in), std=gain * n_in**-0.5)

    # A tied embedding is the output matrix too: at N(0, 1) every token would predict itself.
    embedding_std = hidden**-0.5 if shape["tied"] else 1.0
    found = [Tensor("token_embd.weight", (shape["vocab_size"], hidden), embedding_std)]
    for i in range(layers):
        found.append(norm(f"blk.{i}.attn_norm.weight"))
        for name, width in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            found.append(linear(f"blk.{i}.{name}.weight", hidden, width))
            if shape["qkv_bias"]:
                found.append(Tensor(f"blk.{i}.{name}.bias", (width,), std=0.02))
        if shape["qk_norm"]:
            names = (f"blk.{i}.attn_q_norm.weight", f"blk.{i}.attn_k_norm.weight")
            found += [Tensor(name, (shape["head_dim"],), std=0.1, mean=1.0) for name in names]
        found += [
            linear(f"blk.{i}.attn_output.weight", q, hidden, into_residual),
            norm(f"blk.{i}.ffn_norm.weight"),
            linear(f"blk.{i}.ffn_gate.weight", hidden, ffn),
            linear(f"blk.{i}.ffn_up.weight", hidden, ffn),
            linear(f"blk.{i}.ffn_down.weight", ffn, hidden, into_residual),
        ]
    found.append(norm("output_norm.weight"))
    if not shape["tied"]:
        found.append(linear("output.weight", hidden, shape["vocab_size"]))
    return found


def synthesize(request: Request, say: Say) -> dict[str, Any]:
    """Write files["target"].

    Options: `seed`, `threads`, `dtype` (f16 or f32, the same values), `vocab` (a small real tokenizer rather
    than none). The bytes follow from the shape, the options but threads, and numpy's version.
    """
    began = said = time.monotonic()
    shape, options = request.model["shape"], request.options
    seed, wide = options.get("seed", 0), options.get("dtype", "f16") == "f32"
    target = Path(request.files["target"])
    planned = tensors(shape)
    offsets, size = write_header(target, request.model["name"], shape, wide, options.get("vocab", False))
    outliers = _outlier_channels(seed, shape["hidden_size"])

    def fill(piece: tuple[int, Tensor, int]) -> int:
        number, tensor, chunk = piece
        values = _values(seed, tensor, chunk, outliers).astype(_dtype(tensor, wide), copy=False)
        at, left = offsets[tensor.name] + chunk * CHUNK * values.itemsize, memoryview(values).cast("B")
        while left:
            written = os.pwrite(file, left, at)
            at, left = at + written, left[written:]
        return number

    pieces = [(i, t, chunk) for i, t in enumerate(planned, 1) for chunk in range(-(-t.elements // CHUNK))]
    file = os.open(target, os.O_WRONLY)
    try:
        with ThreadPoolExecutor(options.get("threads")) as pool:
            for number in pool.map(fill, pieces):
                if (now := time.monotonic()) > said + SAY_EVERY_S:
                    say(f"tensor {number}/{len(planned)}")
                    said = now
        say("flushing to disk")
        os.fsync(file)
    finally:
        os.close(file)
    return {
        "bytes": size,
        "tensors": len(planned),
        "parameters": sum(t.elements for t in planned),
        "seconds": time.monotonic() - began,
        "versions": {"numpy": np.__version__},
    }


def write_header(
    target: Path, name: str, shape: dict[str, Any], wide: bool, vocab: bool
) -> tuple[dict[str, int], int]:
    """A GGUF with a hole in place of its tensors' values. Returns their offsets and the file's size."""
    import gguf  # not at the top: a process that measures has no use for it in its memory

    arch = shape["arch"]
    if arch not in ("llama", "qwen2", "qwen3") or shape["o_bias"] or shape["mlp_bias"]:
        raise ValueError(f"cannot synthesize {arch!r}: llama, qwen2 and qwen3 are known, without more biases")
    if arch == "qwen2" and shape["heads"] * shape["head_dim"] != shape["hidden_size"]:
        raise ValueError("llama.cpp's qwen2 has heads * head_dim equal to hidden_size; this shape has not")
    writer = gguf.GGUFWriter(target, arch)
    writer.add_name(f"{name} (synthetic, random weights)")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if wide else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_context_length(shape["context"])
    writer.add_block_count(shape["layers"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["norm_eps"])
    if vocab:
        tokens, types, merges = _vocabulary(shape["vocab_size"])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        writer.add_eos_token_id(len(merges) + 256)
        writer.add_add_bos_token(False)
    else:
        writer.add_tokenizer_model("none")

    offsets, end = {}, 0
    for tensor in tensors(shape):
        dtype = _dtype(tensor, wide)
        size = tensor.elements * dtype.itemsize
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, size)
        offsets[tensor.name] = end
        end += writer.ggml_pad(size, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = writer.ggml_pad(target.stat().st_size, writer.data_alignment)
    os.truncate(target, start + end)
    return {name: start + offset for name, offset in offsets.items()}, start + end


def _dtype(tensor: Tensor, wide: bool) -> np.dtype[Any]:
    return np.dtype(np.float32 if wide or len(tensor.shape) == 1 else np.float16)


def _values(seed: int, tensor: Tensor, chunk: int, outliers: np.ndarray) -> np.ndarray:
    """One chunk in float16, seeded by its place alone: the same whichever thread makes it, and when."""
    key = np.random.SeedSequence([seed, crc32(tensor.name.encode()), chunk])
    count = min(CHUNK, tensor.elements - chunk * CHUNK)
    drawn = np.random.Generator(np.random.SFC64(key)).standard_normal(count, dtype=np.float32)
    drawn *= np.float32(tensor.std)
    if tensor.mean:  # a norm
        drawn += np.float32(tensor.mean)
    if tensor.outliers:
        drawn[outliers] *= OUTLIER
    bits = drawn.astype(np.float16).view(np.uint16)
    sign = bits & 0x8000
    bits &= 0x7FFF
    np.maximum(bits, _F16_SMALLEST_NORMAL, out=bits)
    bits |= sign
    return bits.view(np.float16)


def _outlier_channels(seed: int, hidden: int) -> np.ndarray:
    """The same channels in every layer, as in real models: 1 in 256, at least 4."""
    return np.random.Generator(np.random.SFC64(seed)).choice(hidden, max(4, hidden // 256), replace=False)


def _vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """A byte-level BPE as GPT-2 writes it: 256 bytes, merges of two letters, end of text, unused tokens."""
    import gguf

    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    tokens = [chr(b) for b in shown] + [chr(256 + i) for i in range(len(hidden))]
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    pairs = [(a, b) for a in (chr(256 + hidden.index(ord(" "))), *letters) for b in letters][: size - 257]
    tokens += [a + b for a, b in pairs]
    types = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL]
    tokens.append("<|endoftext|>")
    types += [gguf.TokenType.UNUSED] * (size - len(tokens))
    tokens += [f"<|unused{i}|>" for i in range(size - len(tokens))]
    return tokens, types, [f"{a} {b}" for a, b in pairs]


def quantize(request: Request, say: Say) -> dict[str, Any]:
    """files["source"] -> files["target"] by llama.cpp's llama_model_quantize.

    Options: `quant`, `threads`, and `as_published`: the rules of the files people have, not today's.
    """
    began = time.monotonic()
    source, target = Path(request.files["source"]), Path(request.files["target"])
    if not source.is_file():
        raise FileNotFoundError(f"no such file: {source}")
    if target.exists() and target.samefile(source):
        raise ValueError(f"{source} would be overwritten while it is read")
    params = quantize_params(source, **request.options)
    said = began

    def progress(line: str) -> None:
        nonlocal said
        if line.startswith("[") and (now := time.monotonic()) > said + SAY_EVERY_S:
            said = now
            say("tensor " + line[1:].split("]")[0].replace(" ", ""))

    LOG.forget()
    with LOG.listening(progress):
        failed = lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), params)
    if failed:
        free_mb = shutil.disk_usage(target.parent).free // 10**6
        raise LOG.failure(f"{source.name} to {request.options['quant']}, {free_mb} MB free")
    say("flushing to disk")
    file = os.open(target, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
    with opened(target, vocab_only=True) as model:
        return {
            "bytes": target.stat().st_size,
            "model_bytes": lib.llama_model_size(model),
            "parameters": lib.llama_model_n_params(model),
            "seconds": time.monotonic() - began,
        }


def quantize_params(source: Path, quant: str, threads: int, as_published: bool = False) -> Any:
    """llama.cpp's defaults, but for memory and, `as_published`, for a type that is not what it was."""
    params = lib.llama_model_quantize_default_params()
    params.ftype = FTYPES[quant]
    params.nthread = threads
    params.max_buf_size = QUANTIZE_BUFFER_BYTES
    if as_published and quant in ("q2_k", "q3_k_s"):
        with opened(source, vocab_only=True) as model:
            width = metadata(model, f"{metadata(model, 'general.architecture')}.feed_forward_length")
        # Rows that 256 does not divide cannot be Q3_K. llama.cpp made them Q4_1 when the published q2_k files
        # of 1.8B and 14B were made. Now it makes them Q4_0, and those sizes would not come out.
        if width.isdigit() and int(width) % 256:
            override = lib.llama_model_tensor_override
            params.tt_overrides = (override * 2)(override(b"ffn_down", lib.GGML_TYPE_Q4_1), override())
    return params
