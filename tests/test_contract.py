"""What every stack must do: run, say what ran, compute its model, cut its cache, refuse what it cannot. The
stacks are those with a header: a new one is tested without a line here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REAL_STACKS, built, failures, records_below, stored_in
from small_checkpoints import configure, made

from harness import records
from harness.analysis import verdicts
from harness.analysis.depth import surface_faults
from harness.models import engine_files
from harness.stacks.header import Header, stacks
from harness.theory.decoder import dense, parameters

FIELDS = {"arch": "qwen2", "vocab_size": 640, "hidden_size": 256, "layers": 2, "intermediate_size": 384}
FIELDS |= {"heads": 4, "kv_heads": 2, "head_dim": 64, "qkv_bias": True}
SHAPE = dense(**FIELDS)
MODEL = {"name": "small", "shape": FIELDS}
PROMPT, NEW = 25, 40
NEEDS = {
    "logits": {"kind": "quality"},
    "context": {"kind": "prefill"},
    "max_ctx": {"kind": "max_ctx"},
    "memory": {"kind": "grow"},
    "users": {"kind": "batch"},
}
SURFACE = [
    {"kind": "prefill", "lengths": [1, 4, 20], "depth": [0, 90], "passes": 2},
    {"kind": "depth", "depths": [0, 300], "window": 8, "stop_at": "90%", "most_windows": 4},
    {"kind": "turns", "first": 30, "each": 5, "new_tokens": 4, "turns": 2},
]
WITH_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()
# What runs on a CPU, where that is not the defaults alone.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llamacpp": [{"quant": "f16"}, {"quant": "q4_0"}],
    "ik": [{"quant": "q8_0"}],
    "bnb": [{"quant": ["nf4", "int8"]}],
    "gptq": [{"kernel": "torch"}],
    "autoawq": [{"kernel": "torch"}],
    "gptqm": [{"kernel": "torch"}],
    "torchao": [{"compile": False}],
    "ct2": [{"quant": ["int8", "float32"]}],
    "mlx": [{"quant": ["int4", "int8", "bf16"]}],
    "ort": [{"quant": ["int4", "int8", "fp32"]}],
    "openvino": [{"quant": ["int4", "int8", "fp16"]}],
    "vllm": [{"format": ["hf", "gptq", "awq"] if WITH_AVX512 else "hf", "compile": False}],
}
FROM_FILES = [name for name in REAL_STACKS if "ids" not in stacks()[name].cannot]
CONVERTING = [name for name in FROM_FILES if stacks()[name].made is not None]


def with_context() -> list[Any]:
    """The stacks that keep a context; llama.cpp and transformers in the first tier."""
    names = [name for name in FROM_FILES if "context" not in stacks()[name].cannot]
    first = {"llamacpp", "hf"}
    return [pytest.param(name, marks=[pytest.mark.first_tier] if name in first else []) for name in names]


@pytest.fixture
def write(real_config: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a config of what a stack runs here."""

    def config(stack: str, **keys: Any) -> Path:
        built(stack)
        rows = [{"stack": stack} | variant for variant in VARIANTS.get(stack, [{}])]
        return real_config(*rows, name=stack, **({"model": MODEL} | keys))

    return config


@pytest.mark.parametrize("stack", FROM_FILES)
def test_a_stack_decodes_and_says_what_ran(harness, write, tmp_path, stack):
    rows = harness("run", write(stack), "--json").json
    assert {row["tokens"] for row in rows} == {NEW}
    for record in records_below(tmp_path / "results"):
        loaded, counters = record["loaded"], record["done"]["counters"]
        assert record["outcome"] == "ok", record["reason"]
        assert not [flag for condition in verdicts.STACK for flag in condition(record)]
        assert counters.get("evaluated_tokens", PROMPT + NEW - 1) == PROMPT + NEW - 1
        assert loaded["versions"]
        assert loaded["kernels"]
        assert loaded["parameters"] == parameters(SHAPE)
        assert 0 < loaded["model_bytes"] <= 4 * parameters(SHAPE)
        assert loaded["options"].get("threads", 1) == 1
        assert record["done"]["peak_rss_bytes"] > loaded["model_bytes"]


@pytest.mark.parametrize("stack", [name for name in FROM_FILES if "logits" not in stacks()[name].cannot])
def test_the_logits_are_those_of_the_checkpoint(harness, write, hf_interpreter, stack):
    checks = harness("run", "--check-weights", write(stack, new_tokens=12), "--json").json
    assert {check["variant"]: check["verdict"] for check in checks} == dict.fromkeys(
        (check["variant"] for check in checks), "agrees"
    ), checks


@pytest.mark.parametrize("stack", with_context())
def test_a_context_is_filled_cut_and_kept(harness, write, tmp_path, stack):
    keys = {"workloads": SURFACE, "warmup": {"tolerance": 0.9, "at_least_s": 0}}
    rows = harness("run", write(stack, **keys), "--json").json
    assert failures(row for row in rows if row["workload"] != "turns") == []
    stored = stored_in(tmp_path / "results")
    assert len(stored) % len(SURFACE) == 0
    for run in stored:
        record = run.record
        assert record["outcome"] == "ok", record["reason"]
        assert records.table(run)
        assert surface_faults(record, {}) == []  # without a table no times are compared
        done = record["done"]["surface"]
        if record["workload"]["kind"] == "prefill":
            passes = {(check["depth"], check["n"]) for check in done["checks"]}
            assert passes == {(depth, n) for depth in (0, 90) for n in (1, 4, 20)}
            assert all(check["distance"] < check["control"] / 2 for check in done["checks"])
        if record["workload"]["kind"] == "turns" and done["counted"]:
            counted = [(turn["reuse"], turn["fed"], turn["evaluated"]) for turn in done["counted"]]
            assert counted == [(0, 30, 30), (0, 39, 39), (1, 30, 30), (1, 6, 6)]


def unable(header: Header) -> list[tuple[str, str]]:
    return [(header.stack, need) for need in NEEDS if need in header.cannot]


@pytest.mark.parametrize(("stack", "need"), [pair for header in stacks().values() for pair in unable(header)])
def test_what_a_stack_cannot_do_is_said_before_a_run(harness, real_config, stack, need):
    row = {"stack": stack} | VARIANTS.get(stack, [{}])[0] | ({"url": "http://x"} if stack == "http" else {})
    row |= {"quant": "q8_0"} if stacks()[stack].weights == "gguf" else {}
    model = {"name": "m", "weights": "served"} if stack == "http" else MODEL
    ran = harness("run", real_config(row, model=model, workloads=[NEEDS[need]]), "--dry-run")
    said = f"{stack} does not run {NEEDS[need]['kind']}: {stacks()[stack].cannot[need]}"
    assert said in ran.words + ran.err


@pytest.mark.parametrize("stack", [name for name in FROM_FILES if stacks()[name].architectures])
def test_a_model_that_a_stack_does_not_run_is_said_before_anything_is_made(
    harness, real_config, tmp_path, stack
):
    path = made(tmp_path / "small", dense("llama", 64, 64, 1, 96, 2, 1, 32))
    config = real_config({"stack": stack}, model={"name": "small", "weights": str(path)})
    configure(path, model_type="unheard")
    said = f"{path}: is unheard, which stack {stack} does not run; it runs "
    assert said in harness("run", config, "--dry-run").words
    configure(path, model_type="llama", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    if "yarn" not in stacks()[stack].architectures["llama"]:
        assert "rope scaling" in harness("run", config, "--dry-run").words


@pytest.mark.parametrize("stack", CONVERTING)
def test_files_of_an_engine_are_made_again_if_cut_and_checked_if_they_are_other_weights(
    harness, real_config, cache, hf_interpreter, tmp_path, stack
):
    built(stack)
    weights = made(tmp_path / "small", SHAPE)
    path = real_config({"stack": stack}, model={"name": "small", "weights": str(weights)})
    before = set(cache.glob(f"weights/*/{stack}"))
    harness("run", path)
    (folder,) = set(cache.glob(f"weights/*/{stack}")) - before
    largest = max(
        (file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    whole = largest.read_bytes()

    largest.write_bytes(whole[:-100])
    ran = harness("run", path, "--fresh")
    assert {record["outcome"] for record in records_below(tmp_path / "results")} == {"ok"}
    assert f"convert small for {stack}" in ran.err
    assert largest.read_bytes() == whole

    values = np.frombuffer(whole, np.uint8).copy()
    middle = slice(len(whole) // 3, 2 * len(whole) // 3)
    values[middle] = 0
    largest.write_bytes(values.tobytes())
    engine_files.seal(folder)  # as if the converter had made it so
    (check,) = harness("run", "--check-weights", path, "--fresh", "--json").json
    assert check["verdict"] in ("wrong", "failed")  # a file with names between its tensors is not read at all
