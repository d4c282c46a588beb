"""Public models: their published parameters and the bytes of their published GGUF files come out."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from harness.theory import decoder
from harness.theory.known_models import Known
from harness.theory.tensors import ALL_QUANTS, quantized

HERE = Path(__file__).parent / "models"
KNOWN = Known()
# What the published total counts besides the text model, or leaves out; null: nobody says what it is.
APART = {
    "deepseek-r1": "a layer that predicts a second token, and scales of FP8",
    "deepseek-v3": "a layer that predicts a second token, and scales of FP8",
    "gemma-3n-e2b": "the towers for images and sound",
    "gemma-3n-e4b": "the towers for images and sound",
    "gemma-3-12b": "the vision tower",
    "gemma-3-27b": "the vision tower",
    "gemma-3-4b": "the vision tower",
    "glm-4.5": "a layer that predicts a second token",
    "glm-4.5-air": "a layer that predicts a second token",
    "kimi-k2": None,
    "llama-4-maverick": "the vision tower",
    "llama-4-scout": "the vision tower",
    "mistral-small-3.1-24b": "the vision tower",
    "mistral-small-3.2-24b": "the vision tower",
    "nemotron-3-nano-30b-a3b": "not the biases of the routers",
    "qwen3.5-397b-a17b": "the vision tower and a layer that predicts a second token",
    "qwen3.5-4b": "the vision tower and a layer that predicts a second token",
}
WITHIN = 0.005  # of a total that is published rounded only
HEADER = 1024  # bytes by which the headers of a model's files differ: names, and padding of each tensor


@cache
def published() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((HERE / "published.json").read_text())
    return {name: row for name, row in found.items() if name in KNOWN}


def total(name: str) -> int:
    return decoder.parameters(KNOWN[name])


def rounded(text: str) -> float:
    units = {"T": 1e12, "B": 1e9, "M": 1e6}
    return float(text.rstrip("".join(units))) * units[text[-1]]


def test_every_exact_published_total_comes_out_to_the_last_parameter():
    exact = {name: row["total"] for name, row in published().items() if row["total"] and name not in APART}
    assert len(exact) >= 60
    assert {name: total(name) for name in exact} == exact


def test_a_published_total_that_counts_more_is_larger():
    for name, what in APART.items():
        row = published()[name]
        said = row["total"] or rounded(row["total_rounded"])
        assert (total(name) < said) == (what is None or not what.startswith("not")), name


def test_every_rounded_published_total_is_within_half_a_percent_or_its_last_digit():
    for name, row in published().items():
        if row["total"] or not row["total_rounded"] or name in APART:
            continue
        said, digits = rounded(row["total_rounded"]), row["total_rounded"].rstrip("TBM").partition(".")[2]
        last = rounded("1" + row["total_rounded"][-1]) * 10.0 ** -len(digits)
        assert abs(total(name) - said) <= max(WITHIN * said, last), name


def test_active_parameters_are_those_that_are_published():
    assert (
        decoder.active_params(KNOWN["mixtral-8x7b"]) + decoder.lm_head_params(KNOWN["mixtral-8x7b"])
        == (published()["mixtral-8x7b"]["active"])
    )
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-20b", "deepseek-v3", "mixtral-8x22b"):
        said = rounded(published()[name]["active_rounded"])
        counted = decoder.active_params(KNOWN[name])
        with_embedding = counted + decoder.lm_head_params(KNOWN[name])
        assert min(abs(counted - said), abs(with_embedding - said)) <= 0.03 * said, name


def files() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((HERE / "gguf_files.json").read_text())
    return found


def tensor_bytes(row: dict[str, Any]) -> int:
    quant = {"mxfp4": "mxfp4_moe"}.get(row["type"], row["type"])
    assert quant in ALL_QUANTS
    return sum(tensor.bytes for tensor in quantized(KNOWN[row["model"]], quant, imatrix=row["imatrix"]))


def test_the_tensors_of_published_gguf_files_take_these_bytes():
    rows = [row for row in files() if row["tensor_bytes"] and "differs" not in row]
    assert len(rows) >= 12
    assert [tensor_bytes(row) for row in rows] == [row["tensor_bytes"] for row in rows]


def test_all_published_gguf_files_of_a_model_are_their_tensors_and_one_header():
    headers: dict[tuple[str, str], list[int]] = defaultdict(list)
    rows = [row for row in files() if row["file_bytes"] and "differs" not in row]
    assert len(rows) >= 100
    for row in rows:
        headers[row["model"], row["file"][:10].lower()].append(row["file_bytes"] - tensor_bytes(row))
    for model, sizes in headers.items():
        assert min(sizes) > 0, model
        assert max(sizes) - min(sizes) <= 2 * HEADER, model
        assert max(sizes) < 20e6, model  # a vocabulary of 262,144 tokens
    assert sum(len(sizes) for sizes in headers.values() if len(sizes) > 4) >= 100


def test_a_file_that_differs_says_why():
    assert all(row["differs"] not in ("", "?") for row in files() if "differs" in row)
