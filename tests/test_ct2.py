"""The real CTranslate2 on a CPU: small checkpoints, converted as a campaign does it. What it loads matches
the checkpoint and the request, or is no measurement."""

import platform
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import failed
from small_checkpoints import configure, made, read, store
from test_hf import PROMPT, request_of, said

from harness.analysis.requested import option_mismatches
from harness.campaign import worker as campaign_worker
from harness.theory.decoder import dense, parameters
from harness.theory.hf_config import SHAPES
from runners.protocol import Done, Request

QWEN2 = SHAPES["tiny-qwen2"]
LLAMA = replace(dense("llama", 256, 128, 4, 256, 4, 2, 32), tied=True)  # 2 heads of keys and values for 4
QUANTS = {"int8": "int8_float32", "float32": "float32"}  # what a CPU has


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder of a checkpoint, made once: `source(QWEN2)`."""
    root, known = tmp_path_factory.mktemp("checkpoints"), {}

    def of(shape):
        if shape not in known:
            known[shape] = made(root / str(len(known)), shape)
        return known[shape]

    return of


@pytest.fixture(scope="module")
def convert(ct2_interpreter, tmp_path_factory):
    """The folder of CTranslate2's files of a checkpoint, made once: `convert(path, "int8")`."""
    root, known = tmp_path_factory.mktemp("converted"), {}

    def of(path, quant):
        if (path, quant) not in known:
            target = root / str(len(known))
            files, model = {"source": str(path), "target": str(target)}, {"name": "m", "path": str(path)}
            request = Request("convert", "ct2", "cpu", model, {"quant": quant, "threads": 1}, files=files)
            campaign_worker.facts_of(campaign_worker.run_job(request, ct2_interpreter, root, 900))
            known[path, quant] = target
        return known[path, quant]

    return of


def request_with(path: Path, folder: Path, quant: str, **given) -> Request:
    request = request_of(path, "ct2", quant=quant, **given)
    return replace(
        request, files={"made": str(folder)}, options={"quant": quant, "gemm": "auto", "threads": 1} | given
    )


def copied(folder: Path, target: Path, **settings: object) -> Path:
    """A copy of converted files, with other settings in CTranslate2's config.json."""
    return configure(shutil.copytree(folder, target), **settings)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize(("shape", "kv_bytes"), [(QWEN2, 2 * 2 * 256 * 4), (LLAMA, 2 * 4 * 128 * 4)])
def test_each_type_decodes_and_is_reported_as_the_engine_has_it(
    worker, source, convert, ct2_interpreter, shape, kv_bytes, quant
):
    path, size = source(shape), {"int8": 1, "float32": 4}[quant]
    folder = convert(path, quant)
    loaded, ids, end = said(worker(request_with(path, folder, quant), ct2_interpreter))
    assert (len(ids), end["counters"]) == (12, {})
    assert (loaded["quant"], loaded["settings"]["compute_type"]) == (quant, QUANTS[quant])
    linears = 5 * shape.count + 1  # q, k and v are one
    assert loaded["kernels"] == {f"Dense[{quant}]": linears, f"Embeddings[{quant}]": 1}
    assert loaded["kernel_asked"] == f"Dense[{quant}]"
    assert (loaded["parameters"], loaded["tied"]) == (parameters(shape), shape.tied)
    assert loaded["options"] == {"gemm": None, "threads": 1}
    assert set(loaded["devices"]["weights"]) == {"cpu"}
    row_bytes = shape.hidden_size * size + (4 if quant == "int8" else 0)
    assert loaded["input_embedding_bytes"] == shape.vocab_size * row_bytes
    assert loaded["model_bytes"] > 0.97 * (folder / "model.bin").stat().st_size
    # Keys and values of all heads are cached in float32, though a model with grouped heads has fewer.
    assert (loaded["kv_read"], loaded["kv_bytes_per_token"]) == ("copied", kv_bytes)
    backend, cpu = loaded["settings"]["cpu"]["GEMM_S8 backend"], Path("/proc/cpuinfo").read_text()
    saturates = quant == "int8" and backend.startswith("DNNL") and "vnni" not in cpu
    assert bool(loaded["warnings"]) == saturates


@pytest.mark.skipif(platform.machine() != "x86_64", reason="CTranslate2 has MKL for x86-64 alone")
def test_the_library_of_matrix_products_can_be_chosen_and_is_read_back(
    worker, source, convert, ct2_interpreter
):
    path = source(QWEN2)
    folder = convert(path, "float32")
    for gemm, backend in (("mkl", "MKL"), ("onednn", "DNNL")):
        loaded, _, _ = said(worker(request_with(path, folder, "float32", gemm=gemm), ct2_interpreter))
        assert loaded["options"]["gemm"] == gemm
        assert loaded["settings"]["cpu"]["SGEMM backend"].startswith(backend)


def test_a_prompt_is_the_ids_that_were_given_and_no_token_ends_a_decode(
    worker, source, convert, ct2_interpreter, tmp_path
):
    path = source(QWEN2)
    folder = convert(path, "float32")
    _, ids, _ = said(worker(request_with(path, folder, "float32"), ct2_interpreter))
    ends = copied(folder, tmp_path / "ends", eos_token=str(ids[3]), bos_token=str(ids[0]))
    _, again, _ = said(worker(request_with(path, ends, "float32"), ct2_interpreter))
    assert again == ids
    logits = logits_of(worker, request_with(path, folder, "float32"), ct2_interpreter, tmp_path, ids)
    assert list(logits.argmax(axis=1)[len(PROMPT) - 1 :]) == ids


def logits_of(worker, request: Request, interpreter, tmp_path: Path, ids: list[int]) -> np.ndarray:
    """After each of the prompt's ids and of those decoded after it but the last, these one by one."""
    end = len(PROMPT) + len(ids) - 1
    asked = {"ids": [*PROMPT, *ids[:-1]], "prompt_tokens": len(PROMPT), "windows": [[len(PROMPT), end]]}
    files = request.files | {"logits": str(tmp_path / "logits.npy")}
    job = replace(request, job="logits", workloads=[asked | {"seconds": None}], files=files)
    last = worker(job, interpreter)[-1]
    assert isinstance(last, Done), last
    return np.load(tmp_path / "logits.npy")


def test_types_of_16_bits_are_said_to_need_a_gpu_and_are_no_measurement(
    harness, real_config, worker, source, convert, ct2_interpreter
):
    path = source(QWEN2)
    sixteen = ["bfloat16", "float16", "int8_bfloat16", "int8_float16"]
    config = real_config({"stack": "ct2", "quant": sixteen}, model={"name": "s", "weights": str(path)})
    plan = harness("run", "--dry-run", config, "--json").json
    assert [row["will_fail"] for row in plan] == [["needs a GPU (cuda)"]] * 4
    folder = convert(path, "bfloat16")
    last = failed(worker(request_with(path, folder, "bfloat16"), ct2_interpreter))
    assert "Requested bfloat16 compute type" in last.reason


def test_files_of_another_type_are_refused(worker, source, convert, ct2_interpreter):
    path = source(QWEN2)
    last = failed(worker(request_with(path, convert(path, "float32"), "int8"), ct2_interpreter))
    assert (last.outcome, "in float32; expected int8" in last.reason) == ("refused", True)


def test_threads_that_did_not_start_are_seen(worker, source, convert, own_interpreter, monkeypatch):
    # No fork: there CTranslate2 has torch's OpenMP, which has read its variables already.
    path, python = source(QWEN2), own_interpreter("ct2")
    folder = convert(path, "float32")
    asked = request_with(path, folder, "float32", threads=2)
    loaded, _, _ = said(worker(asked, python))
    assert loaded["options"]["threads"] == 2
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    loaded, _, _ = said(worker(asked, python))
    (mismatch,) = option_mismatches("cpu", asked.options, loaded)
    assert "threads" in mismatch.detail
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    assert failed(worker(asked, python)).reason.startswith("unset OMP_DYNAMIC")


def test_weights_that_are_no_numbers_are_an_error(worker, source, convert, ct2_interpreter, tmp_path):
    path = shutil.copytree(source(QWEN2), tmp_path / "nan")
    tensors = {name: values.astype(np.float32) for name, values in read(path).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = np.nan
    store(path, tensors)
    last = failed(worker(request_with(path, convert(path, "float32"), "float32"), ct2_interpreter))
    assert "not-a-number logits" in last.reason


def test_a_checkpoint_that_lacks_a_tensor_is_not_filled_up(source, convert, tmp_path):
    path = shutil.copytree(source(QWEN2), tmp_path / "lacks")
    tensors = {name: values.astype(np.float32) for name, values in read(path).items()}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    store(path, tensors)
    with pytest.raises(campaign_worker.JobFailed, match=r"has no model.layers.1.mlp.up_proj.weight"):
        convert(path, "int8")


def test_windows_that_it_computes_wrongly_are_refused(worker, source, convert, ct2_interpreter, tmp_path):
    path = configure(shutil.copytree(source(QWEN2), tmp_path / "left-out"), use_sliding_window=True)
    with pytest.raises(
        campaign_worker.JobFailed, match="has use_sliding_window, which CTranslate2 leaves out"
    ):
        convert(path, "float32")
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    path = configure(shutil.copytree(source(LLAMA), tmp_path / "mistral"), **mistral)
    folder = convert(path, "float32")
    asked = request_with(path, folder, "float32")
    assert "more than the model's sliding window of 16" in failed(worker(asked, ct2_interpreter)).reason
    asked.workloads[0]["prompt"] = PROMPT[:8]
    loaded, ids, _ = said(worker(asked, ct2_interpreter))
    assert (loaded["kv_read"], loaded["window"], len(ids)) == ("window", 16, 12)
