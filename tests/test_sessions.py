"""Real sessions, moved through their context: fed, stepped, cut, copied, brought back. No latencies."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import stored_in, told

from harness import records
from harness.stacks.header import stacks
from runners.protocol import Request

N_CTX = 128
# Distances are shares of the right logits' length. `shifted`: those of one token further.
MOVES = """
import json, sys
import numpy as np
from runners.stacks import {stack}
from runners.protocol import Request

session = {stack}.load(Request(**json.loads({request!r})))
ids = [(7 * i) % 500 + 1 for i in range(60)]
said = dict(generated=list(session.generate(ids[:25], 8)))
session.empty(60)
session.feed(ids[:25], 1)
said["stepped"] = list(session.steps(8))
said["held"] = session.held()

def after(depth, *moves):
    session.empty(60)
    for move in moves:
        move()
    held = session.held()
    row = np.array(session.feed([ids[depth]], 1), np.float64)[-1]
    return held, row

session.empty(60)
session.feed(ids[:40], 1)
said["evaluated"] = session.evaluated()
said["bytes"], kept = session.context_bytes(), session.keep()
said["moves"] = []
for depth in (1, 10, 31, 40):
    _, right = after(depth, lambda: session.feed(ids[:depth], 1))
    _, shifted = after(depth, lambda: session.feed(ids[1:depth + 2], 1))
    cut = after(depth, lambda: session.feed(ids[:40], 1), lambda: session.truncate(depth))
    back = after(depth, lambda: session.feed([3] * 50, 1), lambda: session.restore(kept, depth))
    off = [float(np.linalg.norm(row - right) / np.linalg.norm(right)) for row in (cut[1], back[1], shifted)]
    said["moves"].append([depth, cut[0], back[0], off])
print(json.dumps(said))
"""
UNCUT = """
import json
from runners.stacks import hf
from runners.protocol import Request

session = hf.load(Request(**json.loads({request!r})))
session.empty(60)
session.feed([1, 2, 3], 1)
try:
    session.truncate(2)
except ValueError as refusal:
    print(refusal)
session.truncate(0)
print(session.held())
"""


def request_of(stack: str, path: Path, **options: Any) -> str:
    defaults = {option.name: option.default for option in stacks()[stack].options.values()}
    given = defaults | {"threads": 1, "n_ctx": N_CTX} | options
    return json.dumps(asdict(Request("generate", stack, "cpu", {"path": str(path)}, given)))


def check_moves(said: dict[str, Any]) -> None:
    assert said["stepped"] == said["generated"]
    assert len(set(said["stepped"])) > 2
    assert said["held"] == 25 + 7  # the last token is never fed back
    for depth, cut, back, (off_cut, off_back, off_shifted) in said["moves"]:
        assert cut == back == depth
        assert max(off_cut, off_back) < 1e-3 < 0.05 < off_shifted


@pytest.mark.first_tier
def test_llamacpp_decodes_on_from_any_depth_that_it_is_brought_to(llamacpp_interpreter, harness):
    path = Path(harness("env", "synth", "tiny-qwen2", "--quant", "f32").out.strip())
    request = request_of("llamacpp", path, type_k="f32", type_v="f32")
    (line,) = told(llamacpp_interpreter, MOVES.format(stack="llamacpp", request=request))
    said = json.loads(line)
    check_moves(said)
    assert said["evaluated"] == 40
    assert said["bytes"] >= 40 * 2 * 2 * 256 * 4  # keys and values, 2 layers of 256 in float32


@pytest.mark.first_tier
def test_transformers_decodes_on_from_any_depth_that_it_is_brought_to(hf_interpreter, checkpoint):
    request = request_of("hf", checkpoint("tiny-qwen2"), dtype="fp32")
    (line,) = told(hf_interpreter, MOVES.format(stack="hf", request=request))
    said = json.loads(line)
    check_moves(said)
    assert said["evaluated"] is None
    assert said["bytes"] == 40 * 2 * 2 * 256 * 4


@pytest.mark.first_tier
def test_a_static_cache_says_that_it_cannot_be_cut_and_can_be_emptied(hf_interpreter, checkpoint):
    request = request_of("hf", checkpoint("tiny-qwen2"), cache="static")
    said = told(hf_interpreter, UNCUT.format(request=request))
    assert said == ["a static cache cannot be cut to fewer tokens", "0"]


def test_a_static_cache_times_first_passes_and_turns_without_a_prefix(
    harness, real_config, hf_interpreter, tmp_path
):
    """A context shorter than a prompt and a window of the warm-up, too."""
    first = {"kind": "prefill", "lengths": [1, 4], "passes": 2}
    harness("run", real_config({"stack": "hf", "cache": "static"}, workloads=[first]))
    (stored,) = stored_in(tmp_path / "results")
    assert stored.record["outcome"] == "ok", stored.record["reason"]
    assert len(records.table(stored)["n"]) == 4
