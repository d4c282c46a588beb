"""The real ONNX Runtime GenAI on a CPU: files that its builder makes of small checkpoints, and their runs."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import failures, records_below
from small_checkpoints import made
from test_hf import PROMPT, request_of, said

from harness.campaign import worker as campaign_worker
from harness.stacks.adopted import Interpreter
from harness.stacks.header import runners_folder, stacks
from harness.theory.decoder import dense, dense_like, parameters
from runners.protocol import Request

QUANTS = ("int4", "int8", "fp32")
SHAPE = dense("qwen2", 640, 256, 4, 384, 4, 2, 64, qkv_bias=True)
LINEARS = 5 * SHAPE.count + 1  # q, k and v are one matrix; with lm_head


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("source") / "small", SHAPE)


@pytest.fixture
def write(real_config: Callable[..., Path], source: Path) -> Callable[..., Path]:
    """A config of these types, or variants, of the small checkpoint."""

    def config(*variants: Any, weights: Path = source, **keys: Any) -> Path:
        rows = [each if isinstance(each, dict) else {"quant": each} for each in variants]
        model = {"name": "small", "weights": str(weights)}
        return real_config(*({"stack": "ort"} | row for row in rows), model=model, **keys)

    return config


@pytest.fixture
def converted(
    ort_interpreter: Interpreter, tmp_path: Path, source: Path
) -> Callable[..., tuple[Path, Callable[..., Request]]]:
    """The files of a checkpoint, int4 unless told, in a folder of the test's own, and a request of them."""

    def make(path: Path = source, **given: Any) -> tuple[Path, Callable[..., Request]]:
        target = tmp_path / f"made-{len([*tmp_path.glob('made-*')])}"
        request = request_of(path, "ort", "convert", **given)
        request.files.update(source=str(path), target=str(target))
        campaign_worker.facts_of(campaign_worker.run_job(request, ort_interpreter, tmp_path, 900))

        def asked(**more: Any) -> Request:
            wanted = request_of(path, "ort", **given | more)
            wanted.files["made"] = str(target)
            return wanted

        return target, asked

    return make


def reasons(rows: Sequence[dict[str, Any]]) -> str:
    return " ".join(reason for _, _, each in failures(rows) for reason in each)


def test_every_type_runs_and_is_named_by_the_nodes_that_ran(harness, write, tmp_path, ort_interpreter):
    ran = harness("run", write(*QUANTS, {"quant": "int4", "activations": "fp32"}), "--json")
    assert failures(ran.json) == []
    assert [row["tokens"] for row in ran.json] == [40] * 4
    for record in records_below(tmp_path / "results"):
        loaded, counters = record["loaded"], record["done"]["counters"]
        quant, level = record["options"]["quant"], record["options"]["activations"]
        kernel = "MatMul" if quant == "fp32" else "MatMulNBits"
        assert (loaded["quant"], loaded["kernel_asked"], loaded["leftovers"]) == (quant, kernel, [])
        assert loaded["kernels"][kernel] == LINEARS
        assert loaded["kernels"]["GroupQueryAttention"] == SHAPE.count
        assert loaded["options"].get("activations", level) == level
        assert (loaded["options"]["threads"], loaded["options"]["n_ctx"]) == (1, 25 + 40)
        assert set(loaded["devices"]["nodes"]) == {"cpu"}
        assert (loaded["parameters"], loaded["tied"]) == (parameters(SHAPE), False)
        assert (loaded["kv_read"], loaded["kv_bytes_per_token"]) == ("grows", 4 * 2 * 4 * 2 * 64)
        assert counters == {"evaluated_tokens": 25 + 39}  # and no second clock: it has none
    sizes = {row["variant"]: row["model_bytes"] for row in ran.json}
    assert sizes["fp32"] == 4 * parameters(SHAPE)
    assert sizes["int4"] < sizes["int8"] < sizes["fp32"] / 2


def test_an_end_of_text_ends_nothing_and_changes_no_id(worker, converted, ort_interpreter):
    folder, asked = converted()
    _, ids, _ = said(worker(asked(), ort_interpreter))
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["eos_token_id"] = sorted({ids[2], ids[3], ids[-1]})
    (folder / "genai_config.json").write_text(json.dumps(config))
    _, again, end = said(worker(asked(), ort_interpreter))
    assert again == ids
    assert end["counters"]["evaluated_tokens"] == len(PROMPT) + len(ids) - 1


@pytest.mark.parametrize(
    ("asked", "given", "quant", "says"),
    [
        ('"intra_op_num_threads": options["threads"]', '"intra_op_num_threads": 2', "fp32", "threads"),
        ('"int8": 4}', '"int8": 1}', "int4", "multiplied with activations: fp32, not int8"),
    ],
)
def test_what_the_engine_did_not_take_is_seen(
    harness, write, tmp_path, monkeypatch, ort_interpreter, asked, given, quant, says
):
    """A thread count; a rounding of activations, which a CPU may have no kernel for."""
    folder = tmp_path / "runners"
    shutil.copytree(runners_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "stacks" / "ort.py").read_text()
    assert text.count(asked) == 1
    (folder / "stacks" / "ort.py").write_text(text.replace(asked, given))
    monkeypatch.setenv("HARNESS_RUNNERS", str(folder))
    assert says in reasons(harness("run", write(quant), "--json").json)


@pytest.mark.parametrize("quant", ["int4", "fp32"])
def test_a_tied_embedding_is_counted_once(worker, converted, ort_interpreter, tmp_path, quant):
    tied = dense_like(SHAPE, tied=True)
    _, asked = converted(made(tmp_path / "tied", tied), quant=quant)
    loaded, _, _ = said(worker(asked(), ort_interpreter))
    assert (loaded["tied"], loaded["parameters"]) == (True, parameters(tied))
    if quant == "fp32":
        assert loaded["input_embedding_bytes"] == 4 * tied.vocab_size * tied.hidden_size


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_the_other_architectures_run(harness, write, tmp_path, ort_interpreter, hf_interpreter, arch):
    shape = dense(arch, 640, 256, 2, 384, 4, 2, 64, qk_norm=arch == "qwen3")
    path = write("fp32", weights=made(tmp_path / arch, shape))
    assert harness("run", "--check-weights", path, "--json").json[0]["verdict"] == "agrees"


def test_a_layer_that_the_builder_takes_for_lm_head_fails_in_a_sentence(
    harness, write, tmp_path, ort_interpreter
):
    shape = dense_like(SHAPE, intermediate_size=640)  # as many as the vocabulary has words
    ran = harness("run", write("int4", weights=made(tmp_path / "alike", shape)), "--json")
    assert "takes for lm_head" in reasons(ran.json)


def test_what_it_cannot_do_is_said_before_a_run(harness, write):
    path = write({"quant": "fp32", "activations": "fp32"})
    assert "activations is of int4 and int8" in harness("run", path, "--dry-run").words
    assert stacks()["ort"].made == ["quant", "activations"]
