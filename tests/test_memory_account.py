"""The estimate of memory against llama.cpp's own account at real sizes, within 3%."""

import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import told
from gguf_holes import config, write_random

from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from runners.protocol import Request

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from memory_account import FAMILIES, compared

THREE_PERCENT = 0.03
LENGTHS = (4096, 32_768, 131_072)


def rows_of(name: str, interpreter: Interpreter, folder: Path) -> list[dict[str, Any]]:
    rows = list(compared(name, "q4_k_m", LENGTHS, interpreter, folder))
    assert len(rows) == 2 * len(LENGTHS)  # without and with flash attention
    return rows


@pytest.mark.parametrize(
    "name", ["qwen3-30b-a3b", "gemma-3-27b", "gpt-oss-20b", "deepseek-v2-lite", "granite-4.0-h-tiny"]
)
def test_the_estimate_is_within_3_percent_of_what_llama_cpp_would_take(llamacpp_interpreter, tmp_path, name):
    for row in rows_of(name, llamacpp_interpreter, tmp_path):
        assert row["estimated"]["weights"] == row["weights"], row
        assert row["estimated"]["kv"] == pytest.approx(row["kv"], rel=1e-3), row
        assert abs(row["error"]) <= THREE_PERCENT, row
        assert abs(row["cpu_error"]) <= THREE_PERCENT, row


@pytest.mark.slow("34 models, two processes each")
@pytest.mark.parametrize("name", FAMILIES)
def test_so_it_is_for_every_family(llamacpp_interpreter, tmp_path, name):
    for row in rows_of(name, llamacpp_interpreter, tmp_path):
        assert max(abs(row["error"]), abs(row["cpu_error"])) <= THREE_PERCENT, row


@pytest.mark.parametrize("swa_full", [False, True])
def test_a_cache_of_windows_is_as_small_and_goes_back_as_far_as_the_option_has_it(
    llamacpp_interpreter, tmp_path, swa_full
):
    """A window of 32 tokens, passes of 128, a context of 1,024; of nine layers one has no window."""
    write_random(tmp_path / "m.gguf", config("gemma3_text", sliding_window=32))
    options = {each.name: each.default for each in stacks()["llamacpp"].options.values()}
    options |= {"threads": 1, "n_ctx": 1024, "n_ubatch": 128, "n_batch": 128, "swa_full": swa_full}
    model = {"name": "m", "path": str(tmp_path / "m.gguf"), "shape": None}
    Request("fit", "llamacpp", "cpu", model, options, []).write(tmp_path / "request.json")
    code = f"""
from pathlib import Path
from runners.stacks import llamacpp
from runners.protocol import Request

session = llamacpp.load(Request.read(Path({str(tmp_path / "request.json")!r})))
facts = session.facts()
print(facts["options"]["swa_full"], facts["options"]["n_seq_max"], sum(facts["memory"]["kv"].values()))
session.feed([1] * 900, 1)
session.truncate(895)
print(session.held())
try:
    session.truncate(100)
    print(session.held())
except RuntimeError as refusal:
    print(refusal)
"""
    facts, near, far = told(llamacpp_interpreter, code)[-3:]
    of_token = 2 * 2 * 2 * 64  # bytes of keys and values of a layer
    cells = 1024 + 8 * (1024 if swa_full else 256)
    assert facts == f"{swa_full} 1 {cells * of_token}"
    assert near == "895"
    assert far == "100" if swa_full else "go back to 100, set swa_full: true" in far
