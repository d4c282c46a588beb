"""The types of a quantized model's tensors: published sizes come out, and so does what llama.cpp does."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import STUDY_TABLES
from small_checkpoints import laid

from harness.models import gguf
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from harness.theory import ggml_types
from harness.theory.decoder import dense, dense_fields, dense_like
from harness.theory.ggml_quants import ALL_QUANTS, IK_QUANTS, QUANTS, Mix, quantized, retyped
from harness.theory.hf_config import SHAPES
from harness.theory.tensors import Tensor

OF_LLAMA_CPP = [quant for quant in ALL_QUANTS if quant not in IK_QUANTS]
NUMBERS = {name: number for number, name in ggml_types.FILE_TYPES.items() if name in OF_LLAMA_CPP}
ROOT = Path(__file__).parent.parent
MODELS = [f"qwen1.5-{size}" for size in ("0.5b", "1.8b", "4b", "7b", "14b", "32b", "72b", "110b")]
QWEN2, LLAMA = SHAPES["tiny-qwen2"], SHAPES["tiny-llama"]
VOCABULARY_BYTES = 5.92e6  # besides the tensors in a file of Qwen1.5: the 48 whole files bound it to 1%
# Where the rules part: layers (an eighth, a sixteenth, 80), GQA (4 and more), rows that 256 or 32 does not
# divide, tied embeddings; and models as they are.
SHAPES_TO_COMPARE = {
    "tiny-qwen2": QWEN2,
    "tiny-llama": LLAMA,
    "tied": dense_like(QWEN2, layers=9, tied=True),
    "gqa of 2, 33 layers": dense_like(LLAMA, layers=33, kv_heads=4),
    "odd feed-forward": dense_like(LLAMA, layers=17, intermediate_size=544),
    "odd everywhere": dense_like(LLAMA, layers=18, hidden_size=288, intermediate_size=500, head_dim=36),
    "tied, nothing fits": dense_like(LLAMA, hidden_size=80, intermediate_size=200, head_dim=20, tied=True),
    "head_dim apart": dense_like(LLAMA, head_dim=40),
    "80 layers, qwen2": dense_like(QWEN2, layers=80),
    "80 layers, llama": dense_like(LLAMA, layers=80, kv_heads=8),
    "80 layers, llama with gqa of 2": dense_like(LLAMA, layers=80, kv_heads=4),
    "80 layers, llama with gqa of 4": dense_like(LLAMA, layers=80),
    "llama-3-8b": dense("llama", 128_256, 4096, 32, 14_336, 32, 8, 128),
    "qwen1.5-1.8b": SHAPES["qwen1.5-1.8b"],
    "qwen1.5-14b": SHAPES["qwen1.5-14b"],
    "qwen1.5-32b": SHAPES["qwen1.5-32b"],
}
# Has llama.cpp choose the types of all tensors without computing a value: works on a file that is one hole.
# Its log gives a tensor's type before, and in brackets after, if it changes.
DRY_RUN = r"""
import json, re, sys
from pathlib import Path
from runners.llamacpp.weights import write_header
from runners.llamacpp.weights import FTYPES, LOG, lib, quantize_params
target, quants = Path(sys.argv[1]), json.loads(sys.argv[3])  # name: number
shapes = json.loads(Path(sys.argv[2]).read_text())
line = re.compile(r"\[ *\d+/ *\d+\] +(\S+) +- .*type = +(\w+), size =.*?(?:\((\w+)\))?$")
types = {}
for name, shape in shapes.items():
    write_header(target, name, shape, "f16")
    for quant in quants:
        newer = quant.startswith(("iq", "tq", "mxfp4")) or quant == "q2_k_s"
        published = name.startswith("qwen1.5") and quant in FTYPES and not newer
        for as_published in (False, True)[: 1 + published]:
            known = quant if quant in FTYPES else "q2_k"
            params, said = quantize_params(target, known, 1, as_published), []
            params.ftype = quants[quant]
            params.dry_run = True
            with LOG.listening(said.append):
                assert lib.llama_model_quantize(bytes(target), b"unused", params) == 0
            types[f"{name}: {quant}" + ", as published" * as_published] = {
                found[1]: (found[3] or found[2]).lower() for found in map(line.match, said) if found
            }
print(json.dumps(types))
"""


def published(table: str, column: str) -> dict[tuple[str, str], dict[str, str]]:
    """Rows by model and type, but for those that did not fit."""
    with (STUDY_TABLES / table).open() as file:
        rows = [row for row in csv.DictReader(file) if row[column] != "oom"]
    return {(row["model"], row["gguf_type"]): row for row in rows}


def as_published(model: str, quant: str) -> list[Tensor]:
    return quantized(SHAPES[f"qwen1.5-{model.lower()}"], quant, as_published=True)


def total(tensors: list[Tensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def types(tensors: list[Tensor]) -> dict[str, str]:
    return {tensor.name: tensor.type for tensor in tensors}


def test_every_published_size_and_bits_per_weight_comes_out():
    rows, got, want = published("gguf_bpw.csv", "size_mib"), {}, {}
    for key, row in rows.items():
        in_mib = 1024 if row["printed_unit"] == "GiB" else 1
        want[key] = f"{float(row['size_mib']) / in_mib:.2f}", row["bpw"]
        tensors = as_published(*key)
        bits = total(tensors) * 8 / sum(tensor.elements for tensor in tensors)
        got[key] = f"{total(tensors) / 2**20 / in_mib:.2f}", f"{bits:.2f}"
    assert got == want
    assert len(rows) == 46


def test_every_published_gpu_buffer_is_all_tensors_but_the_input_embedding():
    rows, got = published("gguf_model_buffer_4090.csv", "cuda_buffer_gb"), {}
    for key in rows:
        got[key] = f"{total([t for t in as_published(*key) if t.part != 'embedding']) / 2**30:.2f}"
    assert got == {key: row["cuda_buffer_gb"] for key, row in rows.items()}
    assert len(rows) == 46


def test_every_published_file_is_its_tensors_and_a_vocabulary():
    rows = published("gguf_file_size.csv", "file_gb")
    got = {key: (total(as_published(*key)) + VOCABULARY_BYTES) / 1e9 for key in rows}
    for key, row in rows.items():
        if key[0] in ("72B", "110B"):  # off as the sum of two rounded parts is; attn_v's rule adds up to 1.4
            assert got[key] == pytest.approx(float(row["file_gb"]), abs=0.1), key
        else:
            assert f"{got[key]:.3g}" == f"{float(row['file_gb']):.3g}", key
    assert len(rows) == 64


def test_the_published_files_differ_from_todays_only_where_rows_of_q3_k_do_not_fit():
    differ = set()
    for name in MODELS:
        for quant in QUANTS:
            now, then = quantized(SHAPES[name], quant), quantized(SHAPES[name], quant, as_published=True)
            differ |= {
                (name, quant, a.part, a.type, b.type) for a, b in zip(now, then, strict=True) if a != b
            }
    assert differ == {
        (name, quant, "ffn_down", "q4_0", "q4_1")
        for name in ("qwen1.5-1.8b", "qwen1.5-14b")
        for quant in ("q2_k", "q3_k_s")
    }


def test_no_row_of_q2_k_fell_back_to_another_type_than_today():
    shape = dense_like(
        LLAMA, hidden_size=288, head_dim=36
    )  # no published file has such rows: from the source alone
    stored = types(quantized(shape, "q2_k", as_published=True))
    assert (stored["blk.0.attn_q.weight"], stored["blk.0.attn_output.weight"]) == ("q4_0", "q4_1")


def test_the_types_are_those_that_the_runner_takes_and_fall_in_size():
    assert sorted(OF_LLAMA_CPP) == sorted(stacks()["llamacpp"].options["quant"].choices)
    assert set(IK_QUANTS) == set(stacks()["ik"].options["quant"].choices) - set(OF_LLAMA_CPP)
    sizes = [total(quantized(SHAPES["qwen1.5-7b"], quant)) for quant in QUANTS]
    assert sizes == sorted(sizes, reverse=True)


def test_a_file_of_any_type_is_retyped_as_its_shape_would_be():
    shape = SHAPES_TO_COMPARE["odd feed-forward"]
    mix = Mix(shape.arch, shape.count, shape.heads // shape.kv_heads)
    for quant in QUANTS:
        held = quantized(shape, quant)[::-1]
        assert retyped(held, "q2_k", mix) == quantized(shape, "q2_k")[::-1]


def test_an_unknown_type_is_a_key_error():
    with pytest.raises(KeyError, match="q9_9"):
        quantized(QWEN2, "q9_9")


def test_every_tensor_gets_the_type_that_llama_cpp_gives_it(llamacpp_interpreter: Interpreter, tmp_path):
    layouts = tmp_path / "layouts.json"
    layouts.write_text(json.dumps({name: laid(shape) for name, shape in SHAPES_TO_COMPARE.items()}))
    command = [llamacpp_interpreter.python, "-c", DRY_RUN, tmp_path / "hole.gguf", layouts]
    ran = subprocess.run([*command, json.dumps(NUMBERS)], cwd=ROOT, capture_output=True, check=True)
    got = {}
    for name, shape in SHAPES_TO_COMPARE.items():
        for quant in OF_LLAMA_CPP:
            got[f"{name}: {quant}"] = types(quantized(shape, quant))
            if name.startswith("qwen1.5") and quant in QUANTS:
                got[f"{name}: {quant}, as published"] = types(quantized(shape, quant, as_published=True))
    assert got == json.loads(ran.stdout)


@pytest.mark.parametrize("quant", ["f32", "q5_0", "q4_k_m", "q2_k"])
def test_a_file_that_llama_cpp_makes_has_these_types_and_bytes(job: Any, tmp_path: Path, quant: str):
    made, source, target = tmp_path / "made", tmp_path / "source.gguf", tmp_path / "target.gguf"
    shape = dense_like(LLAMA, layers=9, intermediate_size=544, tied=True)
    model = {"name": "m", "path": None, "shape": dense_fields(shape)}
    job(job="synthesize", model=model, files={"target": str(made)})
    job(job="convert", options={"dtype": "f16"}, files={"source": str(made), "target": str(source)})
    files = {"source": str(source), "target": str(target)}
    facts = job(job="quantize", options={"quant": quant, "threads": 2}, files=files)
    tensors, header = quantized(shape, quant), gguf.read(target)
    assert {name: (t.type, t.bytes) for name, t in header.tensors.items()} == {
        t.name: (t.type, t.bytes) for t in tensors
    }
    assert facts["model_bytes"] == total(tensors)
