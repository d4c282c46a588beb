"""The first tier's real stacks: llama.cpp and transformers decode one model, and a page shows them."""

import json
from pathlib import Path

import pytest
from conftest import failures


@pytest.fixture
def path(real_config) -> Path:
    cells = [{"stack": "llamacpp", "quant": "q4_0"}, {"stack": "hf"}]
    return real_config(*cells, name="both", new_tokens=24, warmup={"window_tokens": 4, "tolerance": 0.9})


@pytest.mark.first_tier
def test_two_real_stacks_decode_one_model_and_the_page_has_both(
    harness, path, tmp_path, llamacpp_interpreter, hf_interpreter
):
    rows = {row["stack"]: row for row in harness("run", path, "--json").json}
    assert failures(rows.values()) == []
    assert {row["tokens"] for row in rows.values()} == {24}
    assert (rows["llamacpp"]["kv_read"], rows["hf"]["kv_read"]) == ("padded256", "copied")
    assert rows["llamacpp"]["bpw"] < 6 < rows["hf"]["bpw"] == 16
    records = [json.loads(found.read_text()) for found in tmp_path.glob("results/**/record.json")]
    assert len({tuple(record["workload"]["prompt"]) for record in records}) == 1
    page = (tmp_path / "reports" / "both.html").read_text()
    assert all(row["cell"] in page or row["variant"] in page for row in rows.values())


@pytest.mark.first_tier
def test_weights_that_llama_cpp_quantized_are_the_model_that_transformers_decodes(
    harness, path, llamacpp_interpreter, hf_interpreter
):
    checks = harness("run", "--check-weights", path, "--json").json
    assert {check["stack"]: check["verdict"] for check in checks} == {"llamacpp": "agrees", "hf": "agrees"}


@pytest.mark.first_tier
def test_the_longest_context_of_llama_cpp_is_found_within_a_budget(harness, path, llamacpp_interpreter):
    budget = ["--set", "memory_budget=512MiB", "--no-fill"]
    (row,) = harness("run", "--max-ctx", path, "--only", "*llamacpp*", *budget, "--json").json
    assert failures([row]) == []
    assert row["verified_n_ctx"] >= 256
