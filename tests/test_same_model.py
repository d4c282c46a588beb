"""One checkpoint is one model: transformers in fp32 and llama.cpp in F32 compute the same logits from it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_checkpoints import with_layout
from test_convert import LLAMA3

from harness.campaign import worker
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from runners.protocol import Done, Request, Tokens

PROMPT = [(37 * i + 11) % 512 for i in range(25)]
NEW_TOKENS = 40
# Plain arithmetic on both sides: no fused attention, nothing in 16 bits.
PLAIN = {
    "hf": {"dtype": "fp32", "attn": "eager"},
    "llamacpp": {"quant": "f32", "type_k": "f32", "type_v": "f32", "flash_attn": False, "repack": False},
}
QWEN3 = {"arch": "qwen3", "qk_norm": True, "head_dim": 64}
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


@pytest.fixture
def stack(hf_interpreter: Interpreter, llamacpp_interpreter: Interpreter, tmp_path: Path) -> Callable:
    """Runs one job in one stack: `stack("hf", "generate", checkpoint, workload)`; returns ids and facts."""
    interpreters = {"hf": hf_interpreter, "llamacpp": llamacpp_interpreter}

    def run(name: str, job: str, path: Path, **fields: Any) -> tuple[list[int], dict[str, Any]]:
        options = {option.name: option.default for option in stacks()[name].options.values()}
        options |= {"threads": 1, "n_ctx": 256} | PLAIN[name]
        model = {"name": "m", "path": str(path), "shape": None}
        given = {"model": model, "options": options} | fields
        request = with_layout(Request(job, name, "cpu", **given))
        events = list(worker.run_job(request, interpreters[name], tmp_path, 900, threads=1))
        assert isinstance(events[-1], Done), events[-1]
        return [i for e in events if isinstance(e, Tokens) for i in e.ids], events[-1].facts

    return run


@pytest.fixture
def logits(stack: Callable, tmp_path: Path) -> Callable[..., np.ndarray]:
    """Teacher-forced logits of the prompt and, one by one, of the windows."""

    def run(name: str, path: Path, ids: list[int], windows: list[list[int]]) -> np.ndarray:
        workload = {"ids": ids, "prompt_tokens": len(PROMPT), "windows": windows, "seconds": None}
        file = tmp_path / f"{name}.npy"
        _, facts = stack(name, "logits", path, workloads=[workload], files={"logits": str(file)})
        rows = np.load(file)
        positions = [p for first, end in windows for p in range(first, end)]
        assert facts["positions"] == [*range(len(PROMPT)), *positions]
        assert rows.shape == (len(facts["positions"]), 512)
        return rows

    return run


def converted(stack: Callable, source: Path, target: Path) -> Path:
    files = {"source": str(source), "target": str(target)}
    stack("llamacpp", "convert", source, options={"dtype": "f32"}, files=files)
    return target


def relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    """Of the worst position: norm of the difference over norm of the logits."""
    return float((np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)).max())


def generated(stack: Callable, name: str, path: Path) -> list[int]:
    warmup = {"window_tokens": 2, "max_windows": 1, "tolerance": 1.0}
    workload = {"prompt": PROMPT, "new_tokens": NEW_TOKENS, "warmup": warmup}
    return stack(name, "generate", path, workloads=[workload])[0]


def check_up_to_a_near_tie(ids: list[int], rows: np.ndarray) -> None:
    """Each id is the choice of the logits before it, up to two that are nearly equal."""
    for token, row in zip(ids, rows[len(PROMPT) - 1 :], strict=False):
        if token != row.argmax():
            assert row.max() - row[token] < 1e-3 * row.std()
            return


@pytest.mark.parametrize(
    ("name", "changed"),
    [("tiny-qwen2", {}), ("tiny-llama", {"tied": True, **BIASES}), ("tiny-llama", QWEN3)],
    ids=["qwen2", "llama, gqa, tied, biases", "qwen3, gqa"],
)
def test_a_converted_checkpoint_has_the_logits_and_the_greedy_ids_of_the_original(
    stack, logits, checkpoint, tmp_path, name, changed
):
    source = checkpoint(name, **changed)
    target = converted(stack, source, tmp_path / "m.gguf")
    ids = generated(stack, "llamacpp", target)
    windows = [[len(PROMPT), len(PROMPT) + NEW_TOKENS]]
    exact, found = (logits(s, p, PROMPT + ids, windows) for s, p in (("hf", source), ("llamacpp", target)))
    assert relative_error(found, exact) < 1e-3  # 2e-6 was seen
    assert exact.std() > 0.5
    assert len(set(ids)) > 5
    check_up_to_a_near_tie(ids, exact)
    check_up_to_a_near_tie(ids, found)


def test_both_stacks_generate_the_same_ids(stack, logits, checkpoint, tmp_path):
    source = checkpoint("tiny-llama")
    target = converted(stack, source, tmp_path / "m.gguf")
    ids = generated(stack, "hf", source)
    assert len(ids) == NEW_TOKENS
    windows = [[len(PROMPT), len(PROMPT) + NEW_TOKENS]]
    check_up_to_a_near_tie(ids, logits("llamacpp", target, PROMPT + ids, windows))


def test_scaled_rotary_positions_are_the_same_in_both(stack, logits, checkpoint, tmp_path):
    plain, source = checkpoint("tiny-llama"), tmp_path / "scaled"
    shutil.copytree(plain, source)
    config = json.loads((source / "config.json").read_text()) | {"rope_scaling": LLAMA3}
    (source / "config.json").write_text(json.dumps(config))
    ids, windows = [(53 * i + 7) % 512 for i in range(100)], [[40, 50], [60, 100]]
    exact = logits("hf", source, ids, windows)
    found = logits("llamacpp", converted(stack, source, tmp_path / "m.gguf"), ids, windows)
    assert relative_error(found, exact) < 1e-3
    unscaled = logits("llamacpp", converted(stack, plain, tmp_path / "plain.gguf"), ids, windows)
    assert relative_error(unscaled, exact) > 0.05  # the scaling is no small thing
