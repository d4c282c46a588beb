"""What only a GPU can show, through the whole command on the machine's first one; skipped elsewhere."""

from __future__ import annotations

import json
import re

import pyarrow.parquet as pq
import pytest

from harness import machine

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu(harness, tmp_path):
    """Rows and folder of a run on the GPU: `gpu({"stack": "hf"}, new_tokens=300)`."""
    if not machine.nvidia_gpus():
        pytest.skip("no NVIDIA GPU or driver on this machine")

    def run(*variants, **protocol):
        experiment = {
            "device": "cuda",
            "protocol": {"new_tokens": 600, "repeats": 1, "retry_disturbed": 0} | protocol,
            "models": [{"shape": "qwen1.5-0.5b"}],
            "variants": list(variants),
        }
        (tmp_path / "gpu.yaml").write_text(json.dumps(experiment))
        return harness("run", "gpu.yaml", "--json").json

    return run


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_events_and_the_host_agree_token_by_token(gpu, tmp_path, cache):
    (row,) = gpu({"stack": "hf", "cache": cache})
    assert row["status"] == "ok", row["reasons"]
    series = pq.read_table(next((tmp_path / "results").rglob("tokens.parquet")))
    assert len(series["device_ns"]) == 600
    assert row["ttft_ms"] > row["B_theory_ms"]


def test_a_gpu_tells_its_compute_capability(harness):
    if not machine.nvidia_gpus():
        pytest.skip("no NVIDIA GPU or driver on this machine")
    _, gpu, *_ = harness("machine", "--json").json
    assert re.fullmatch(r"\d+\.\d", gpu["compute_capability"])
    assert f"compute capability {gpu['compute_capability']}" in harness("machine").out


def test_every_weight_and_the_cache_are_on_the_gpu(gpu, tmp_path):
    rows = gpu(
        {"stack": "hf"}, {"stack": "bnb", "quant": ["int8", "nf4"]}, {"stack": "llamacpp", "quant": "q8_0"}
    )
    assert [row["status"] for row in rows] == ["ok"] * 4, [row["reasons"] for row in rows]
    for path in (tmp_path / "results").rglob("record.json"):
        for on in json.loads(path.read_text())["loaded"]["devices"].values():
            assert not isinstance(on, dict) or not {"cpu", "CPU", "meta"} & on.keys()


def test_compiled_steps_compile_nothing_while_timing(gpu):
    (row,) = gpu({"stack": "hf", "cache": "static", "compile": True})
    assert row["status"] == "ok", row["reasons"]


def test_growing_segments_are_what_the_allocator_was_told(gpu, tmp_path):
    (row,) = gpu({"stack": "hf", "expandable_segments": True})
    assert row["status"] == "ok", row["reasons"]
    record = json.loads(next((tmp_path / "results").rglob("record.json")).read_text())
    assert record["done"]["counters"]["allocator"]["peak_allocated_bytes"] > row["model_bytes"]
