"""A mixture of experts of real size on this machine: its measured speed and MBU against the prediction.

    python benchmarks/mixture_here.py [--model qwen3-30b-a3b] [--tokens 256] [--folder DIR]

Writes a GGUF in Q4_0 with random blocks (17 GB for the default), and measures it with `harness run`. Random
blocks are read and computed like real ones; the router's choices are random, where real text repeats more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy

from harness.models import gguf as models_gguf
from harness.theory.architectures import decoder_of
from harness.theory.known_models import config_of
from harness.theory.tensors import Tensor, quantized
from runners.weights import layout

CHUNK_BLOCKS = 1 << 20
# Of each type: bytes of a block, where its float16 scales lie, and the elements in it (ggml-common.h).
BLOCKS = {"q4_0": (18, (0,), 32), "q8_0": (34, (0,), 32), "q6_k": (210, (208,), 256)}
TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in (*BLOCKS, "f32")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=Path("mixture-here"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    file = given.folder / f"{given.model}-q4_0.gguf"
    if not file.exists():
        write(file, given.model)
    config = given.folder / "mixture.yaml"
    config.write_text(
        json.dumps(
            {
                "name": "mixture",
                "device": "cpu",
                "models": [{"name": given.model, "weights": str(file.absolute())}],
                "variants": [{"stack": "llamacpp", "quant": "q4_0"}],
                "protocol": {"new_tokens": given.tokens, "repeats": 2},
            }
        )
    )
    run = [sys.executable, "-m", "harness", "run", str(config), "-o", str(given.folder / "results")]
    return subprocess.run(run, check=False).returncode


def write(path: Path, name: str) -> None:
    """A GGUF in Q4_0, written in a stream."""
    config = config_of(name)
    made = decoder_of(config)
    stored = quantized(made, "q4_0")
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, made.arch)
    writer.add_name(f"{name} (synthetic, random weights)")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_tokenizer_model("none")
    layout.add_keys(writer, made.arch, models_gguf.metadata_keys(config, made))
    for tensor in stored:
        dtype = numpy.dtype(numpy.float32) if tensor.type == "f32" else numpy.dtype(numpy.uint8)
        shape = tensor.dims
        if tensor.type != "f32":
            size, _, elements = BLOCKS[tensor.type]
            shape = (*shape[:-1], shape[-1] // elements * size)
        writer.add_tensor_info(tensor.name, shape, dtype, tensor.bytes, TYPES[tensor.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = numpy.random.default_rng(0)
    out = writer.fout[0]
    writer.write_padding(out, out.tell())
    for tensor in stored:
        for chunk in values(tensor, random):
            chunk.tofile(out)
        writer.write_padding(out, tensor.bytes)
    writer.close()
    partial.rename(path)


def values(tensor: Tensor, random: numpy.random.Generator) -> Iterator[numpy.ndarray]:
    """Of a tensor, in chunks of bytes or of 32-bit numbers; quantized ones are uniform."""
    std = tensor.dims[-1] ** -0.5
    if tensor.type == "f32":
        drawn = random.standard_normal(tensor.elements, numpy.float32)
        yield 1 + 0.1 * drawn if "norm" in tensor.name else std * drawn
        return
    size, scales, elements = BLOCKS[tensor.type]
    # The root mean square of uniform quants: 4.6 of 16 levels, 74 of 256, 18.5 of 64 with scales of 64.
    rms = {"q4_0": 4.6, "q8_0": 74.0, "q6_k": 18.5 * 74.0}[tensor.type]
    scale = numpy.frombuffer(numpy.float16(std / rms).tobytes(), numpy.uint8)
    left = tensor.elements // elements
    while left:
        count = min(left, CHUNK_BLOCKS)
        blocks = numpy.frombuffer(random.bytes(count * size), numpy.uint8).reshape(count, size).copy()
        for at in scales:
            blocks[:, at : at + 2] = scale
        yield blocks
        left -= count


if __name__ == "__main__":
    raise SystemExit(main())
