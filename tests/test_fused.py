"""autoawq's fused layers as they are, on a CPU: what is compiled for a GPU is played by tests/stand_ins."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import forked
import numpy as np
import pytest
from test_hf import PROMPT, request_of, said

from harness.analysis import verdicts
from harness.stacks.adopted import Interpreter
from harness.stacks.build import uv_binary
from harness.theory.decoder import kv_elements_per_token
from harness.theory.hf_config import SHAPES
from runners.protocol import Done, Failed

STAND_INS = Path(__file__).parent / "stand_ins"
SHAPE = SHAPES["tiny-llama"]
FUSED = {"kernel": "gemm", "fuse_layers": True}


@pytest.fixture(scope="module")
def interpreter(autoawq_interpreter, tmp_path_factory) -> Iterator[Interpreter]:
    """autoawq's environment for CPUs, with stand-ins for the extension and flash-attn."""
    folder = tmp_path_factory.mktemp("fused") / "env"
    base = autoawq_interpreter.python
    subprocess.run([uv_binary(), "venv", "--quiet", "--python", base, folder], check=True)
    (theirs,) = base.parent.parent.glob("lib/python*/site-packages")
    (ours,) = folder.glob("lib/python*/site-packages")
    (ours / "both.pth").write_text(f"{STAND_INS}\n{theirs}\n")
    server = forked.Server(folder, "autoawq", tmp_path_factory.mktemp("forked") / "env")
    yield replace(autoawq_interpreter, python=server.python)
    server.stop()


@pytest.fixture
def forced(worker, packed, interpreter, tmp_path):
    """Logits after `ids`, the first 25 at once and the rest one by one but for those before `window`."""

    def logits(ids: list[int], window: int = 25, **options: object) -> np.ndarray:
        request = request_of(packed("tiny-llama", "awq"), "autoawq", "logits", **(FUSED | options))
        request.options["max_seq_len"] = len(ids)
        windows = [[window, len(ids)]]
        request.workloads[:] = [{"ids": ids, "prompt_tokens": 25, "windows": windows, "seconds": None}]
        request.files["logits"] = str(tmp_path / "logits.npy")
        last = worker(request, interpreter)[-1]
        assert isinstance(last, Done), last
        return np.load(tmp_path / "logits.npy")

    return logits


def test_fused_layers_are_counted_and_hold_their_own_cache(worker, packed, interpreter):
    request = request_of(packed("tiny-llama", "awq"), "autoawq", **FUSED, max_seq_len=64)
    loaded, ids, end = said(worker(request, interpreter))
    assert (loaded["fused_layers"], loaded["options"]["fuse_layers"]) == (SHAPE.count, True)
    assert loaded["kernels"]["WQLinear_GEMM[awq_ext]"] == SHAPE.count * 5  # q, k and v are one
    assert (loaded["leftovers"], loaded["attention"], loaded["kv_read"]) == ([], "flash_attn", "grows")
    assert loaded["kv_bytes_per_token"] == 2 * kv_elements_per_token(SHAPE)
    assert loaded["memory"]["kv"] == {"cpu": 65 * loaded["kv_bytes_per_token"]}
    unfused, _, _ = said(
        worker(request_of(packed("tiny-llama", "awq"), "autoawq", kernel="torch"), interpreter)
    )
    assert (loaded["parameters"], loaded["model_bytes"]) == (unfused["parameters"], unfused["model_bytes"])
    assert (len(ids), end["counters"]["evaluated_tokens"]) == (12, 25 + 11)


def test_every_generation_begins_afresh(worker, packed, interpreter, forced):
    request = request_of(packed("tiny-llama", "awq"), "autoawq", **FUSED, max_seq_len=64)
    _, ids, _ = said(worker(request, interpreter))  # after the windows of a warm-up
    assert forced(PROMPT + ids)[24:-1].argmax(axis=1).tolist() == ids


def test_tokens_fed_together_after_others_are_evaluated_after_them(forced):
    ids = list(range(3, 43))
    np.testing.assert_allclose(forced(ids, window=35)[-5:], forced(ids)[-5:], rtol=1e-3, atol=1e-3)


def test_fused_layers_compute_a_prompt_as_unfused_do_and_count_a_decoded_token_twice(forced):
    ids = list(range(3, 43))
    fused, unfused = forced(ids), forced(ids, fuse_layers=False)
    errors = np.linalg.norm(fused - unfused, axis=1) / np.linalg.norm(unfused, axis=1)
    assert errors[:25].max() < 0.01
    assert 0.01 < errors[25:].mean() < 0.5


def test_a_cache_that_is_too_short_is_an_error_unless_a_window_is_asked_for(worker, packed, interpreter):
    path, options = packed("tiny-llama", "awq"), FUSED | {"max_seq_len": 32}
    assert worker(request_of(path, "autoawq", **options), interpreter)[-1] == Failed(
        "error", "fused layers of max_seq_len 32 cannot hold the 37 tokens asked for"
    )
    loaded, ids, end = said(worker(request_of(path, "autoawq", **options, allow_window=True), interpreter))
    assert (loaded["holds_tokens"], len(ids), end["counters"]["evaluated_tokens"]) == (32, 12, None)


def test_a_window_makes_the_record_invalid(harness, config, tmp_path):
    harness("run", config({}, new_tokens=40))
    (path,) = (tmp_path / "results").rglob("record.json")
    record = json.loads(path.read_text())
    for holds, status in ((65, "ok"), (64, "invalid")):
        record["loaded"]["holds_tokens"] = holds
        found, reasons = verdicts.status(record)
        assert (found, bool(reasons)) == (status, status != "ok")
    assert reasons[0].startswith("its cache holds 64 tokens of 65")
