"""What `harness quality` does with models that cannot be compared on a text: one sentence each."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from stored_again import Tensors, stored_again

from harness.base import data

MODEL = "austen-4m"
MORE = 256  # tokens


@pytest.fixture
def scored(harness, scoring) -> Callable[..., tuple[str, str]]:
    """Scores weights in llama.cpp, and returns the status and the reason."""

    def run(weights: object) -> tuple[str, str]:
        variant = {"stack": "llamacpp", "quant": "f16"}
        ran = harness(
            "run", "--quality", scoring({"name": "m", "weights": weights}, variant, chunks=1), "--json"
        )
        assert ran.code == 1, ran.out + ran.err
        (row,) = ran.json
        (reason,) = row["reasons"]
        assert "\n" not in reason
        return row["status"], reason

    return run


def test_a_larger_vocabulary_than_the_references_is_refused(
    scored, tmp_path, hf_interpreter, llamacpp_interpreter
):
    """The model has more tokens than its tokenizer."""
    size = json.loads((data.weights(MODEL) / "config.json").read_text())["vocab_size"]

    def widen(tensors: Tensors) -> None:
        for name, (dtype, shape, values) in tensors.items():
            if len(shape) == 2 and shape[0] == size:
                tensors[name] = dtype, [size + MORE, shape[1]], values + bytes(2 * MORE * shape[1])

    wide = stored_again(data.weights(MODEL), tmp_path / "wide", widen, vocab_size=size + MORE)
    assert scored({"hf": str(data.weights(MODEL)), "gguf": str(wide)}) == (
        "refused",
        "its vocabulary has 2304 tokens, and the reference's 2048: a KL divergence needs the same tokens",
    )


@pytest.mark.parametrize(("content", "status"), [(None, "refused"), ("{", "error")])
def test_a_model_without_a_whole_tokenizer_is_refused(
    scored, tmp_path, hf_interpreter, llamacpp_interpreter, content, status
):
    tokenizer = Path(shutil.copytree(data.weights(MODEL), tmp_path / "copied")) / "tokenizer.json"
    tokenizer.unlink()
    if content:
        tokenizer.write_text(content)
    found, reason = scored(str(tokenizer.parent))
    assert found == status
    assert ("tokenizer.json" if content else "tokenizer") in reason
