"""`harness run --check-weights` on real llama.cpp and transformers: reports, records and errors found."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import settled, stored_in

from harness import config as configs
from harness import records
from harness.campaign.prepare import Preparation
from harness.campaign.repeat import Inputs
from harness.campaign.scoring import LogitsJob, NoLogits, Passage
from harness.campaign.weights_reference import Reference, free_bytes, precision
from harness.config import plan
from harness.models import make
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from harness.theory.hf_config import SHAPES
from harness.theory.known_models import Described


@pytest.fixture
def of(real_config) -> Callable[..., Path]:
    """Writes a config of one model: `of({"shape": "tiny-qwen2"}, {"stack": "llamacpp"}, new_tokens=40)`."""
    return lambda model, *variants, **keys: real_config(*variants, model=model, name="check", **keys)


@pytest.fixture
def file(harness, llamacpp_interpreter, tmp_path) -> Path:
    """A user's own f16 file."""
    made = Path(harness("env", "synth", "tiny-llama", "--quant", "f16").out.strip())
    return Path(shutil.copy(made, tmp_path / "mine.gguf"))


@pytest.fixture
def answering(tmp_path: Path) -> Callable[[str], Callable[[plan.Cell], Inputs]]:
    """Inputs of cells whose worker is a script: it has `asked`, the request, and `say(event, **fields)`."""

    def make(script: str) -> Callable[[plan.Cell], Inputs]:
        path, code = tmp_path / "python", tmp_path / "worker.py"
        code.write_text(f"{WORKER}{script}\n")
        # A line with #! takes no path that has a space.
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{code}" "$@"\n')
        path.chmod(0o700)

        def inputs(cell: plan.Cell) -> Inputs:
            return Inputs(
                interpreter=Interpreter(stacks()["hf"].environments["cpu"], path, ()),
                device_id="cpu",
                weights=None,
                prompt=[1] * 25,
                prompt_source="fixed ids (no tokenizer)",
                options=cell.options(1),
                threads=1,
                timeout_s=300,
                sample_interval_ms=500,
                warmup={},
            )

        return inputs

    return make


WORKER = """
import json, os, sys
import numpy as np

request, pipe = sys.argv[-4:-2]
asked = json.load(open(request))


def say(event, **fields):
    os.write(int(pipe), json.dumps({"event": event, **fields}).encode() + b"\\n")


"""


def verdicts(ran) -> dict[str, str]:
    return {check["variant"]: check["verdict"] for check in ran.json}


def overwrite(path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change the bytes of one tensor of a GGUF file in place."""
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(each for each in reader.tensors if each.name == name)
    tensor.data[:] = change(tensor.data.copy())
    reader.data.flush()


def test_every_variant_of_a_users_file_is_held_against_the_file_itself_and_kept(harness, of, file, tmp_path):
    path = of({"name": "mine", "weights": str(file)}, {"stack": "llamacpp", "quant": ["q8_0", "q4_0"]})
    ran = harness("run", "--check-weights", path, "--json")
    assert ran.code == 0, ran.out
    assert verdicts(ran) == {"q8_0": "agrees", "q4_0": "agrees"}
    assert "at most 60 s of computing, and as much for each reference\n" in ran.err
    q8_0, q4_0 = ran.json
    assert q8_0["reference"] == "llamacpp as stored"
    assert [depth["n"] for depth in q8_0["depths"]] == [25, 65]
    for coarse, fine in zip(q4_0["depths"], q8_0["depths"], strict=True):
        assert 0.001 < fine["relative_error"] < coarse["relative_error"] < 0.6
    again = harness("run", "--check-weights", path, "--json")
    assert again.json == ran.json
    assert "reference" not in again.err
    assert len(stored_in(tmp_path / "results")) == 2
    anew = harness("run", "--check-weights", path, "--json", "--fresh")
    assert [check["depths"] for check in anew.json] == [check["depths"] for check in ran.json]
    assert len(stored_in(tmp_path / "results")) == 4


def test_a_file_whose_matrices_changed_places_is_wrong_and_so_is_its_speed(harness, of, file, tmp_path):
    quants = {"stack": "llamacpp", "quant": ["q8_0", "q4_0"]}
    path = of({"name": "mine", "weights": str(file)}, quants, check_weights=True)
    assert harness("run", "--check-weights", path).code == 0
    spoiled = loaded_by(tmp_path, "q8_0")
    matrices = {each.name: each.data.copy() for each in gguf.GGUFReader(spoiled).tensors}
    overwrite(spoiled, "blk.0.ffn_down.weight", lambda _: matrices["blk.1.ffn_down.weight"])
    table = harness("run", "--check-weights", path, "--fresh")
    assert table.code == 1
    assert "it is not the same model" in table.out
    ran = harness("run", path, "--json")
    assert ran.code == 1
    assert "checking" not in ran.err
    rows = {row["variant"]: row for row in ran.json}
    assert {name: (settled(row), row["weights_check"]) for name, row in rows.items()} == {
        "q8_0": ("invalid", "wrong"),
        "q4_0": ("ok", "agrees"),
    }
    codes = [flag["code"] for flag in rows["q8_0"]["flags"]]  # so short a series may have no B, said last
    assert [code for code in codes if code != "B_not_identifiable"][-1] == "weights_disagree"
    assert "it is not the same model" in " ".join(rows["q8_0"]["reasons"])
    assert "Same model? Logits against the 16-bit reference" in (tmp_path / "reports/check.html").read_text()
    listed = harness("report", "--list", "--json")
    assert {row["variant"]: settled(row) for row in listed.json} == {"q8_0": "invalid", "q4_0": "ok"}
    markdown = harness("report", "results", "--format", "md").out
    assert "| mine llamacpp q8_0 | llamacpp as stored |" in markdown


def test_rows_of_q_that_a_conversion_left_unpermuted_are_seen(harness, of, hf_interpreter, tmp_path):
    """Llama's q and k are stored in another order in a GGUF; a conversion that forgets it is fluent, and
    wrong."""
    spoiled = Path(harness("env", "synth", "tiny-llama", "--quant", "f16").out.strip())
    before = spoiled.read_bytes()

    def unpermuted(rows: np.ndarray) -> np.ndarray:  # 8 heads of 32 rows, whose halves are interleaved
        return rows.reshape(8, 16, 2, -1).swapaxes(1, 2).reshape(rows.shape)

    overwrite(spoiled, "blk.0.attn_q.weight", unpermuted)
    variants = [{"stack": "llamacpp", "quant": ["f16", "bf16"]}, {"stack": "hf", "dtype": "bf16"}]
    try:
        ran = harness("run", "--check-weights", of({"shape": "tiny-llama"}, *variants), "--json")
    finally:
        spoiled.write_bytes(before)
    assert ran.code == 1
    assert verdicts(ran) == {"f16": "wrong", "bf16": "agrees", "bf16-dynamic": "agrees"}
    assert {check["reference"] for check in ran.json} == {"hf fp32"}
    errors = {check["variant"]: check["depths"][-1]["relative_error"] for check in ran.json}
    assert 0 < errors["bf16"] < 0.02
    assert 0 < errors["bf16-dynamic"] < 0.03


def test_a_setting_that_the_logits_hardly_show_is_seen_in_the_files_header(harness, of, file, tmp_path):
    path = of({"name": "mine", "weights": str(file)}, {"stack": "llamacpp", "quant": "q4_0"})
    ran = harness("run", "--check-weights", path, "--json")
    assert verdicts(ran) == {"q4_0": "agrees"}
    assert ran.json[0]["own"]
    reader = gguf.GGUFReader(loaded_by(tmp_path, "q4_0"), "r+")
    reader.fields["llama.attention.layer_norm_rms_epsilon"].parts[-1][0] = 1e-3
    reader.data.flush()
    ran = harness("run", "--check-weights", path, "--json", "--fresh")
    assert verdicts(ran) == {"q4_0": "wrong"}
    assert ran.json[0]["reason"] == (
        "norm_eps is 0.001, and 1e-05 in the 16-bit weights: it is not the same model"
    )


def loaded_by(folder: Path, variant: str) -> Path:
    """The file that a variant's check read."""
    found = {s.record["variant"]: s.record for s in stored_in(folder / "results")}
    return Path(found[variant]["model"]["weights"]["file"])


def test_without_16_bit_weights_a_file_is_compared_with_its_own_weights_dequantized(
    harness, of, llamacpp_interpreter, hf_interpreter, cache
):
    path = harness("env", "synth", "tiny-llama", "--quant", "q4_0").out.strip()
    ran = harness(
        "run", "--check-weights", of({"name": "mine", "weights": path}, {"stack": "llamacpp"}), "--json"
    )
    assert ran.code == 0
    (check,) = ran.json
    assert check["verdict"] == "agrees"
    assert check["reference"] == "hf fp32, unpacked"
    assert check["depths"] == check["own"]
    assert max(depth["relative_error"] for depth in check["own"]) < check["allowed_error"] == 0.1
    assert list(cache.rglob("dequantized/*.lock"))
    assert list(cache.rglob("dequantized/*/config.json")) == []


def test_dequantized_weights_without_a_tokenizer_get_the_ids_of_the_variant(
    harness, of, llamacpp_interpreter, hf_interpreter
):
    given = of({"weights": "austen-4m"}, {"stack": "llamacpp", "quant": "q8_0"})
    ran = harness("run", "--check-weights", given, "--json")
    assert verdicts(ran) == {"q8_0": "agrees"}
    assert ran.json[0]["own"]


def test_a_file_that_cannot_be_a_checkpoint_is_compared_with_its_weights_dequantized_in_llama_cpp(
    harness, of, checkpoint, llamacpp_interpreter, cache, tmp_path
):
    """Rope scaling, which without the model's config.json is known to llama.cpp alone."""
    source = Path(shutil.copytree(checkpoint("tiny-llama"), tmp_path / "scaled"))
    config = json.loads((source / "config.json").read_text())
    scaling = {"rope_type": "linear", "factor": 2.0}
    (source / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    path = of({"name": "mine", "weights": str(source)}, {"stack": "llamacpp", "quant": "q4_0"})
    assert verdicts(harness("run", "--check-weights", path, "--json")) == {"q4_0": "agrees"}
    alone = shutil.copy(loaded_by(tmp_path, "q4_0"), tmp_path / "alone.gguf")
    ran = harness(
        "run",
        "--check-weights",
        of({"name": "alone", "weights": str(alone)}, {"stack": "llamacpp"}),
        "--json",
    )
    assert ran.code == 0
    (check,) = [each for each in ran.json if each["model"] == "alone"]
    assert (check["verdict"], check["reference"]) == ("agrees", "llamacpp f16, unpacked")
    assert 0 < max(depth["relative_error"] for depth in check["own"]) < check["allowed_error"] == 0.1
    assert "rope scaling, which needs the model's config.json" in ran.err
    assert list(cache.rglob("dequantized/*.gguf")) == []
    again = harness("run", "--check-weights", tmp_path / "check.yaml", "--json")
    assert (again.code, again.json) == (0, ran.json)
    assert len(stored_in(tmp_path / "results")) == 2


def test_where_nothing_was_compared_the_check_has_not_passed_and_says_why(harness, of, fake_interpreter):
    ran = harness("run", "--check-weights", of({"shape": "tiny-qwen2"}, {"stack": "fake"}))
    assert ran.code == 1
    assert "unchecked: its stack loads no weights: there is nothing to compare" in ran.err


def test_a_variant_that_gives_no_logits_has_failed_and_the_others_go_on(harness, of, file):
    variants = [
        {"stack": "llamacpp", "name": "refused", "type_v": "q4_0"},  # which needs flash attention
        {"stack": "fake", "name": "fake"},
        {"stack": "llamacpp", "name": "plain"},
    ]
    ran = harness("run", "--check-weights", of({"name": "mine", "weights": str(file)}, *variants), "--json")
    assert ran.code == 1
    assert verdicts(ran) == {"refused": "failed", "fake": "unchecked", "plain": "agrees"}
    reasons = {check["variant"]: check["reason"] for check in ran.json}
    assert "loads no weights" in reasons["fake"]
    assert reasons["refused"]


def test_a_depth_that_would_take_too_long_is_left_out_and_named(harness, of, file):
    path = of({"name": "mine", "weights": str(file)}, {"stack": "llamacpp"}, new_tokens=2_000)
    ran = harness("run", "--check-weights", path, "--seconds", "0.000001", "--json")
    assert ran.code == 0
    (check,) = ran.json
    assert [depth["n"] for depth in check["depths"]] == [25]
    assert check["left_out_n"] == [300, 2_025]
    table = harness("run", "--check-weights", path, "--seconds", "0.000001")
    assert "over the time limit: mine llamacpp as-stored: n = 300, 2,025" in table.out


def test_of_a_long_prompt_the_last_positions_are_compared_and_no_more_are_kept(
    harness, of, file, job, tmp_path
):
    path = of({"name": "mine", "weights": str(file)}, {"stack": "llamacpp"}, prompt_tokens=60, new_tokens=30)
    ran = harness("run", "--check-weights", path, "--json")
    assert ran.code == 0, ran.out
    (check,) = ran.json
    assert [(depth["n"], depth["positions"]) for depth in check["depths"]] == [(60, 25), (90, 25)]
    ids = [(37 * i + 11) % 512 for i in range(60)]

    def logits(**keep: int) -> tuple[list[int], np.ndarray]:
        asked = {"ids": ids, "prompt_tokens": 60, "windows": [], "seconds": None} | keep
        facts = job(
            job="logits",
            model={"name": "m", "path": str(file), "shape": None},
            options={o.name: o.default for o in stacks()["llamacpp"].options.values()}
            | {"threads": 1, "n_ctx": 64},
            workloads=[asked],
            files={"logits": str(tmp_path / "rows.npy")},
        )
        return facts["positions"], np.load(tmp_path / "rows.npy")

    whole, exact = logits()
    kept, rows = logits(prompt_keep=5)
    assert whole == [*range(60)]
    assert kept == [*range(55, 60)]
    assert np.abs(rows - exact[55:]).max() < 0.02 * exact.std()


def test_logits_that_do_not_fit_in_memory_are_no_logits(of, answering, tmp_path):
    (cell,) = plan.cells(configs.load(of({"shape": "tiny-qwen2"}, {"stack": "hf"}), []))
    inputs = answering("""
with open(asked["files"]["logits"], "wb") as file:
    header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 512)}
    np.lib.format.write_array_header_1_0(file, header)
say("Phase", name="scored", t_ns=0)
""")
    job = LogitsJob(cell, inputs(cell), tmp_path, tmp_path, 60.0, pytest.fail)
    with pytest.raises(NoLogits, match="do not fit the controller's memory") as refusal:
        job.one(Passage([1] * 65, [[0, 25], [40, 65]]))
    assert refusal.value.outcome == "oom"


@pytest.mark.parametrize(
    ("rows", "phases", "said"),
    [
        (25, 0, "a job of logits without all of them"),
        (25, 2, "more logits than requested"),
        (24, 1, "other logits than requested"),
    ],
)
def test_logits_other_than_requested_are_a_worker_protocol_error(of, answering, tmp_path, rows, phases, said):
    (cell,) = plan.cells(configs.load(of({"shape": "tiny-qwen2"}, {"stack": "hf"}), []))
    inputs = answering(f"""
np.save(asked["files"]["logits"], np.ones(({rows}, 512), np.float32))
for _ in range({phases}):
    say("Phase", name="scored", t_ns=0)
say("Done", facts={{}})
""")
    job = LogitsJob(cell, inputs(cell), tmp_path, tmp_path, 60.0, pytest.fail)
    with pytest.raises(NoLogits, match=f"worker protocol error: {said}"):
        job.one(Passage([1] * 65, [[0, 25], [40, 65]]))


def test_a_float32_reference_that_runs_out_of_memory_is_tried_in_bf16_once(
    of, answering, hf_interpreter, tmp_path
):
    cells = plan.cells(configs.load(of({"shape": "tiny-qwen2"}, {"stack": "hf"}), []))
    lines: list[str] = []
    preparation = Preparation("cpu", None, 1, lines.append)
    refuses = (
        'if asked["options"]["dtype"] in REFUSED: sys.exit(say("Failed", outcome="oom", reason="full"))\n'
    )
    answers = """
workload = asked["workloads"][0]
kept = range(workload["prompt_tokens"] - workload["prompt_keep"], workload["prompt_tokens"])
np.save(asked["files"]["logits"], np.ones((len(kept), 512), np.float32))
say("Phase", name="scored", t_ns=0)
say("Done", facts={})
"""
    inputs = answering('REFUSED = ["fp32"]\n' + refuses + answers)
    reference = Reference(cells, preparation, inputs, 60.0, tmp_path)
    passage = Passage([1] * 65, [[0, 25], [40, 65]])

    def computed(job: LogitsJob, why: str):
        logits, facts = job.one(passage)
        return logits, reference.described(job, why, facts)

    (found, positions), description = reference.run(computed)
    assert found.shape == (25, 512)
    assert positions == [*range(25)]
    assert (description["name"], description["why"]) == ("hf bf16", "in float32 it did not fit: full")
    inputs = answering('REFUSED = ["fp32", "bf16"]\n' + refuses)
    reference = Reference(cells, preparation, inputs, 60.0, tmp_path)
    lines.clear()
    for _ in range(2):
        with pytest.raises(NoLogits, match="the reference, in hf, failed: full") as refusal:
            reference.run(computed)
        assert refusal.value.outcome == "oom"
    assert lines == [f"loading the reference of tiny-qwen2: hf {dtype}" for dtype in ("fp32", "bf16")]


def test_a_reference_that_fails_is_a_failure_and_a_check_is_made_again(harness, of, hf_interpreter, file):
    """Here the cache has something else in the place of the reference's checkpoint."""
    model = {"shape": "tiny-llama", "weights": {"synthetic": True, "seed": 7}}
    path = of(model, {"stack": "llamacpp", "quant": "f16"}, check_weights=True)
    assert harness("env", "synth", "tiny-llama", "--seed", "7").code == 0
    place = make.checkpoint_folder(make.synthetic_name(Described(SHAPES["tiny-llama"]), 7)).parent
    shutil.rmtree(place)
    place.touch()
    failed = harness("run", "--check-weights", path, "--json")
    assert failed.code == 1
    assert verdicts(failed) == {"f16": "failed"}
    assert "the reference, in hf, failed: " in failed.json[0]["reason"]
    place.unlink()
    ran = harness("run", path)
    assert "the reference, in hf, failed: " in ran.err
    assert "checking the weights" not in ran.err
    again = harness("run", "--check-weights", path, "--json")
    assert again.code == 0, again.out
    assert verdicts(again) == {"f16": "agrees"}


def test_of_a_device_whose_memory_nobody_knows_float32_is_not_asked():
    assert free_bytes("cpu")
    assert free_bytes("MIG-00000000-0000-0000-0000-000000000000") is None
    assert free_bytes("GPU-00000000-0000-0000-0000-000000000000") is None
    assert precision(1_000_000, None) == (
        "bf16",
        "in float32 its weights take 0.0 GB, and how much of the device is free is not known",
    )


def test_the_reference_is_float32_where_that_leaves_room_and_says_so():
    assert precision(7_000_000_000, 80 * 10**9) == (
        "fp32",
        "in float32 its weights take 28.0 GB, and 80.0 GB are free",
    )
    assert precision(7_000_000_000, 46 * 10**9)[0] == "bf16"


def test_a_check_that_was_cut_off_is_recovered_and_done_again(harness, config, tmp_path):
    path = config({"name": "only"})
    assert harness("run", "--check-weights", path).code == 1
    (stored,) = stored_in(tmp_path / "results")
    begun = {key: value for key, value in stored.record.items() if key not in ("schema", "outcome", "reason")}
    running = records.begin(stored.folder.parent, begun)
    running.events.close()  # as when the controller dies
    ran = harness("run", "--check-weights", path, "--json", "--fresh")
    assert ran.code == 1
    assert "recovered an interrupted" in ran.err
    outcomes = [each.record["outcome"] for each in stored_in(tmp_path / "results")]
    assert sorted(outcomes) == ["interrupted", "unavailable", "unavailable"]


def test_a_folder_of_checks_alone_is_reported(harness, config, tmp_path):
    assert harness("run", "--check-weights", config({"name": "only"}), "-o", "checks").code == 1
    ran = harness("report", "checks", "-o", "page.html")
    assert ran.code == 0, ran.err
    assert "its stack loads no weights" in (tmp_path / "page.html").read_text()
    assert harness("report", "--list", "checks", "--json").json == []


def test_what_makes_no_sense_starts_nothing(harness, config, tmp_path):
    assert harness("run", "--check-weights", config({}), "--seconds", "0").code == 2
    assert harness("run", "--check-weights", config({}), "--only", "nothing").code == 2
    assert not (tmp_path / "results").exists()


def test_a_checked_record_without_its_figures_is_passed_over(harness, config, tmp_path):
    assert harness("run", "--check-weights", config({"name": "only"})).code == 1
    (stored,) = stored_in(tmp_path / "results")
    for spoiled, said in (
        ({"outcome": "ok"}, "check.depths"),
        ({"check": {"asked": {}, "speaks_for": []}}, "check.asked.windows"),
        ({"check": stored.record["check"] | {"left_out": [[1, 2, 3]]}}, "check.left_out"),
    ):
        (stored.folder / "record.json").write_text(json.dumps(stored.record | spoiled))
        with pytest.raises(records.ResultsError, match=said):
            records.read(stored.folder / "record.json")
