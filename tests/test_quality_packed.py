"""`harness run --quality` of what bitsandbytes quantizes when it loads, and of GPTQ and AWQ checkpoints."""

import pytest

from harness.base import data
from harness.campaign import worker
from runners.protocol import Request

MODEL = "austen-4m"


def kld_of(ran) -> dict[str, dict[str, float]]:
    assert ran.code == 0, ran.out + ran.err
    assert {row["reference"] for row in ran.json} == {"hf fp32"}
    return {row["variant"]: row["figures"]["kld_mean"] for row in ran.json}


@pytest.mark.slow("bitsandbytes quantizes when it loads")
def test_bitsandbytes_loses_more_at_four_bits_than_at_eight(
    harness, scoring, hf_interpreter, bnb_interpreter
):
    variants = [{"name": quant, "stack": "bnb", "quant": quant} for quant in ("int8", "nf4")]
    kld = kld_of(harness("run", "--quality", scoring({"weights": MODEL}, *variants, n_ctx=512), "--json"))
    assert 0 < kld["int8"]["high"] < kld["nf4"]["low"]


@pytest.mark.slow("packs the model three times, and every kernel scores it")
def test_kernels_agree_on_the_divergence_of_a_packed_checkpoint(
    harness, scoring, tmp_path, hf_interpreter, gptqm_interpreter
):
    source = str(data.weights(MODEL))
    for method, bits in (("gptq", 4), ("gptq", 8), ("awq", 4)):
        options = {"format": method, "bits": bits, "group_size": 128, "threads": 1}
        files = {"source": source, "target": str(tmp_path / f"{method}-{bits}")}
        model = {"name": MODEL, "path": source, "shape": None}
        request = Request("pack", "hf", "cpu", model, options, files=files)
        worker.facts_of(worker.run_job(request, hf_interpreter, tmp_path, 900))
    paths = {"hf": source} | {method: str(tmp_path / f"{method}-{{bits}}") for method in ("gptq", "awq")}
    variants = [
        {"name": "gptq", "stack": "gptqm", "kernel": "torch"},
        {"name": "gptq-8", "stack": "gptqm", "kernel": "torch", "bits": 8},
        {"name": "gptq-aten", "stack": "gptqm", "kernel": "aten"},
        {"name": "awq", "stack": "gptqm", "kernel": "torch", "format": "awq"},
        {"name": "awq-aten", "stack": "gptqm", "kernel": "aten", "format": "awq"},
    ]
    config = scoring({"name": MODEL, "weights": paths}, *variants, n_ctx=512)
    kld = kld_of(harness("run", "--quality", config, "--json"))
    mean = {name: each["value"] for name, each in kld.items()}
    assert 0 < mean["gptq-8"] < 0.1 * mean["gptq"]
    for method in ("gptq", "awq"):
        assert mean[f"{method}-aten"] == pytest.approx(mean[method], rel=0.05)
