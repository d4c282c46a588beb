"""The real ik_llama.cpp on a CPU: files of its own types, and what ran."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import failures, records_below
from small_checkpoints import laid, made
from test_gguf_types import QWEN2, ROOT, SHAPES_TO_COMPARE, types

from harness.models import gguf
from harness.stacks.adopted import Interpreter
from harness.theory.decoder import dense_like, parameters
from harness.theory.ggml_quants import IK_QUANTS, quantized

# Not those of gigabytes, of which it reads all values; nor rows that 32 does not divide, which it refuses.
SHAPES = {
    name: shape
    for name, shape in SHAPES_TO_COMPARE.items()
    if not name.startswith(("qwen1.5", "llama-3", "odd everywhere", "tied, nothing"))
}
SMALL = dense_like(QWEN2, hidden_size=512, intermediate_size=1024, head_dim=128, tied=True)
DRY_RUN = r"""
import json, re, sys
from pathlib import Path
from runners.llamacpp.weights import LOG, lib, quantize_params, write_header
target, shapes, quants = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), json.loads(sys.argv[3])
changed = re.compile(r"\[ *\d+/ *\d+\] +(\S+) +- [^/]*?type = +\w+,[^/]*?converting to (\w+) ")
kept = re.compile(r"\[ *\d+/ *\d+\] +(\S+) +- .*type = +(\w+), size")
types = {}
for name, shape in shapes.items():
    write_header(target, name, shape, "f16")
    for quant in quants:
        params, said = quantize_params(target, quant, 1), []
        params.dry_run = True
        with LOG.listening(said.append):
            assert lib.llama_model_quantize(bytes(target), b"unused", params) == 0
        text = "\n".join(said)
        types[f"{name}: {quant}"] = {n: t.lower() for each in (kept, changed) for n, t in each.findall(text)}
print(json.dumps(types))
"""


@pytest.fixture
def write(real_config: Any, tmp_path: Path) -> Any:
    """A config of ik's variants of one small checkpoint with a tied lm_head."""

    def config(*variants: dict[str, Any], **keys: Any) -> Path:
        path = tmp_path / "small"
        weights = path if path.exists() else made(path, SMALL)
        rows = [{"stack": "ik"} | each for each in variants]
        return real_config(*rows, model={"name": "small", "weights": str(weights)}, **keys)

    return config


def test_every_tensor_gets_the_type_that_ik_llama_cpp_gives_it(ik_interpreter: Interpreter, tmp_path: Path):
    layouts = tmp_path / "layouts.json"
    layouts.write_text(json.dumps({name: laid(shape) for name, shape in SHAPES.items()}))
    command = [ik_interpreter.python, "-c", DRY_RUN, tmp_path / "hole.gguf", layouts, json.dumps(IK_QUANTS)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert json.loads(ran.stdout) == {
        f"{name}: {quant}": types(quantized(shape, quant))
        for name, shape in SHAPES.items()
        for quant in IK_QUANTS
    }


def test_its_own_types_run_as_the_file_has_them_and_agree_with_their_weights(
    harness: Any, write: Any, tmp_path: Path, ik_interpreter: Interpreter, hf_interpreter: Interpreter
):
    quants = ["iq4_k", "iq4_ks", "iq6_k"]
    path = write({"quant": quants}, {"quant": "iq4_k", "type_k": "q8_kv", "mmap": False, "repack": True})
    assert failures(harness("run", path, "--json").json) == []
    for record in records_below(tmp_path / "results"):
        loaded, quant = record["loaded"], record["options"]["quant"]
        assert loaded["quant"] == quant
        assert loaded["parameters"] == parameters(SMALL)
        assert loaded["model_bytes"] == sum(tensor.bytes for tensor in quantized(SMALL, quant))
        assert loaded["kernels"]["tensors"][quant] > 0
        assert bool(loaded["kernels"]["repacked"]) is record["options"]["repack"]
        assert loaded["options"]["mmap"] is record["options"]["mmap"]
    checks = harness("run", "--check-weights", path, "--json").json
    assert [check["verdict"] for check in checks] == ["agrees"] * 4


def test_a_file_of_its_own_types_is_known_and_refused_by_llama_cpp(
    harness: Any, write: Any, tmp_path: Path, ik_interpreter: Interpreter, llamacpp_interpreter: Interpreter
):
    harness("run", write({"quant": "iq3_ks"}))
    (record,) = records_below(tmp_path / "results")
    path = Path(record["model"]["weights"]["file"])
    header = gguf.read(path)
    assert header.quant == "iq3_ks"
    assert {tensor.type for tensor in header.tensors.values()} > {"iq3_ks"}
    assert "iq3_ks" in harness("theory", path).out
    ran = harness("run", path, "--stacks", "llamacpp", "--tokens", 32)
    assert (ran.code, "stack ik loads it, llamacpp does not" in ran.out + ran.err) == (1, True)
    advice = harness("recommend", path, "--machine", "raspberry-pi-5-8gb").out
    assert ("stack ik" in advice, "llamacpp" in advice, "Modelfile" in advice) == (True, False, False)
