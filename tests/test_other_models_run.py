"""Synthetic mixtures, windows and hybrids are one model in transformers and in llama.cpp, end to end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from conftest import records_below
from test_same_model import NEW_TOKENS, PROMPT, check_up_to_a_near_tie, logits, relative_error, stack
from tiny_models import KINDS, MIXTURES

from harness.models import gguf, layout
from harness.theory.architectures import decoder_of
from harness.theory.ggml_quants import model_bytes, quantized
from harness.theory.known_models import config_of

SOME = ("qwen3_moe", "gemma3_text", "gpt_oss", "lfm2")  # that differ most
__all__ = ["logits", "stack"]  # fixtures


@pytest.fixture
def made(stack: Callable, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """The checkpoint and the GGUF of a kind: `made("phi3", "f32")`."""

    def run(kind: str, dtype: str, **changes: Any) -> tuple[Path, Path]:
        model = {"name": "m", "path": None, "shape": None}
        model["layout"] = layout.of(tiny_models.config(kind, **changes)).plain()  # type: ignore[assignment]
        source, target = tmp_path / "hf", tmp_path / f"{dtype}.gguf"
        stack("hf", "synthesize", source, model=model, files={"target": str(source)})
        files = {"source": str(source), "target": str(target)}
        stack("llamacpp", "convert", source, model=model, options={"dtype": dtype}, files=files)
        return source, target

    return run


def generated(stack: Callable, name: str, path: Path) -> tuple[list[int], dict[str, Any]]:
    """The ids, and the facts of the end."""
    warmup = {"window_tokens": 2, "max_windows": 1, "tolerance": 1.0}
    workload = {"prompt": PROMPT, "new_tokens": NEW_TOKENS, "warmup": warmup}
    return stack(name, "generate", path, workloads=[workload])


@pytest.mark.parametrize("kind", KINDS)
def test_both_stacks_compute_the_same_logits_past_any_window(kind, made, logits, stack):
    source, target = made(kind, "f32")
    (ids, ours), (other_ids, theirs) = (
        generated(stack, *each) for each in (("llamacpp", target), ("hf", source))
    )
    if kind in MIXTURES and ids == other_ids:  # else a near tie led one of them elsewhere
        experts, same = (np.array(facts["routing"]["layers"]) for facts in (ours, theirs))
        assert np.abs(experts - same).sum() <= 0.02 * experts.sum()
    windows = [[len(PROMPT), len(PROMPT) + NEW_TOKENS]]
    exact, found = (logits(s, p, PROMPT + ids, windows) for s, p in (("hf", source), ("llamacpp", target)))
    assert relative_error(found, exact) < 1e-3
    assert exact.std() > 0.3
    check_up_to_a_near_tie(ids, exact)


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_files_have_the_tensors_types_and_bytes_that_theory_gives(kind, made, stack, tmp_path):
    _, source = made(kind, "f16")
    model = decoder_of(tiny_models.config(kind))
    for quant in ("f16", "q8_0", "q4_k_m", "q2_k", "mxfp4_moe"):
        target = tmp_path / f"{quant}.gguf"
        if quant != "f16":
            files, options = {"source": str(source), "target": str(target)}, {"quant": quant, "threads": 1}
            stack("llamacpp", "quantize", source, options=options, files=files)
        header = gguf.read(target)
        found = {name: (t.type, t.dims) for name, t in header.tensors.items()}
        assert found == {t.name: (t.type, t.dims) for t in quantized(model, quant)}
        assert sum(tensor.bytes for tensor in header.tensors.values()) == model_bytes(model, quant)


@pytest.fixture
def written(real_config: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A config of a kind's config.json: `written("gpt_oss", {"stack": "hf"})`."""

    def write(kind: str, *variants: dict[str, Any]) -> Path:
        tiny_models.written(tmp_path, kind)
        model = {"shape": f"{kind}.json"}
        return real_config(*variants, model=model, prompt_tokens=25, warmup={"max_windows": 2})

    return write


@pytest.mark.parametrize("kind", SOME)
def test_a_config_json_is_measured_in_both_stacks_from_one_model(
    kind, harness, written, hf_interpreter, llamacpp_interpreter, tmp_path
):
    eager = {"attn": "eager"} if kind == "gpt_oss" else {}
    hf, llamacpp = {"stack": "hf", "dtype": "fp32"} | eager, {"stack": "llamacpp", "quant": ["f16", "q4_k_m"]}
    done = harness("run", written(kind, hf, llamacpp))
    records = records_below(tmp_path / "results")
    assert [record["outcome"] for record in records] == ["ok"] * 3, done.out + done.err
    model = decoder_of(tiny_models.config(kind))
    for record in records:
        assert record["model"]["weights"]["synthetic"]
        assert record["model"]["weights"]["decoder"]["experts"] == model.experts
        if kind not in MIXTURES:
            assert "routing" not in record["done"]
            continue
        routing = record["done"]["routing"]
        assert routing["tokens"] == 40
        assert routing["experts"] == model.experts
        assert {sum(layer) for layer in routing["layers"]} == {40 * model.experts_used}


@pytest.mark.parametrize("kind", SOME)
def test_check_weights_finds_the_stacks_to_agree_and_the_file_to_be_right(
    kind, harness, written, hf_interpreter, llamacpp_interpreter
):
    variant = {"stack": "llamacpp", "quant": ["f16", "q8_0"]}
    checked = harness("run", "--check-weights", written(kind, variant))
    assert checked.code == 0, checked.out + checked.err


def test_making_and_converting_a_layer_of_a_mixture_of_30b_takes_little_memory(job, tmp_path):
    laid = layout.of({**config_of("qwen3-30b-a3b"), "num_hidden_layers": 1, "vocab_size": 32_000}).plain()
    model = {"name": "m", "path": None, "shape": None, "layout": laid}
    source, target = str(tmp_path / "hf"), str(tmp_path / "m.gguf")
    synthesized = job(job="synthesize", model=model, options={"threads": 2}, files={"target": source})
    files = {"source": source, "target": target}
    converted = job(job="convert", model=model, options={"dtype": "f16", "threads": 2}, files=files)
    for path in (*Path(source).iterdir(), Path(target)):
        path.unlink()
    assert synthesized["bytes"] > 1.4e9
    assert converted["bytes"] > 1.4e9
    assert synthesized["peak_rss_bytes"] < 300e6
    assert converted["peak_rss_bytes"] < 300e6
