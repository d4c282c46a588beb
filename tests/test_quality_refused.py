"""What `harness quality` does with models that cannot be compared on a text: one sentence each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.base import data

MODEL = "austen-4m"
MORE = 256  # tokens


@pytest.fixture
def reasons(harness, tmp_path: Path) -> Callable[..., list[tuple[str, str]]]:
    """Scores a model in llama.cpp: `reasons(weights)` is each score's status with its reasons."""

    def run(weights: object, **workload: object) -> list[tuple[str, str]]:
        given = {"protocol": {"threads": 1, "measure_bandwidth": False, "timeout_s": 900}}
        given |= {"models": [{"name": "m", "weights": weights}]}
        given |= {"variants": [{"stack": "llamacpp", "quant": "f16"}]}
        given |= {"workloads": [{"kind": "quality", "n_ctx": 64, "chunks": 1} | workload]}
        path = tmp_path / "quality.yaml"
        path.write_text(json.dumps(given))
        ran = harness("quality", path, "--json")
        assert ran.code == 1, ran.out + ran.err
        return [(row["status"], "; ".join(row["reasons"])) for row in ran.json]

    return run


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(data.weights(MODEL), tmp_path / "copied"))


def widened(folder: Path) -> None:
    """Give the model more tokens than its tokenizer has."""
    raw, described = (
        (folder / "model.safetensors").read_bytes(),
        json.loads((folder / "config.json").read_text()),
    )
    length, size = int.from_bytes(raw[:8], "little"), described["vocab_size"]
    header, data, added = json.loads(raw[8 : 8 + length]), b"", {}
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        first, end = tensor["data_offsets"]
        part, shape = raw[8 + length + first : 8 + length + end], tensor["shape"]
        if len(shape) == 2 and shape[0] == size:
            part, shape = part + bytes(2 * MORE * shape[1]), [size + MORE, shape[1]]
        offsets = [len(data), len(data) + len(part)]
        added[name] = {"dtype": tensor["dtype"], "shape": shape, "data_offsets": offsets}
        data += part
    words = json.dumps(added).encode()
    words += b" " * (-len(words) % 8)
    (folder / "model.safetensors").write_bytes(len(words).to_bytes(8, "little") + words + data)
    (folder / "config.json").write_text(json.dumps(described | {"vocab_size": size + MORE}))


def test_a_larger_vocabulary_than_the_references_is_refused(
    reasons, copied, hf_interpreter, llamacpp_interpreter
):
    widened(copied)
    ((status, reason),) = reasons({"hf": str(data.weights(MODEL)), "gguf": str(copied)})
    assert (status, reason) == (
        "refused",
        "its vocabulary has 2304 tokens, and the reference's 2048: a KL divergence needs the same tokens",
    )


def test_a_model_without_a_tokenizer_is_refused(reasons, copied, hf_interpreter, llamacpp_interpreter):
    (copied / "tokenizer.json").unlink()
    ((status, reason),) = reasons(str(copied))
    assert (status, "tokenizer" in reason) == ("refused", True), reason
    assert reason.count("\n") == 0


def test_a_tokenizer_that_is_damaged_is_one_sentence(reasons, copied, hf_interpreter, llamacpp_interpreter):
    (copied / "tokenizer.json").write_text("{")
    ((status, reason),) = reasons(str(copied))
    assert "tokenizer.json" in reason, (status, reason)
    assert reason.count("\n") == 0
