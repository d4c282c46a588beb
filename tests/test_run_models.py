"""`harness run MODEL...`: files, folders and names in place of a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_checkpoint import TINY, gguf_writer, write, write_config, write_gguf, write_shards
from test_not_a_model import LFS

from harness import config
from harness.api import prompt_speed
from harness.config import plan
from harness.models import gguf_files
from harness.theory.ggml_quants import quantized

DECODE = ("--set", "workloads=[{kind: decode}]")  # alone
FAKE = ("--stacks", "fake", "--set", "measure_bandwidth=false", "--set", "retry_disturbed=0", *DECODE)
ONE_REPEAT = ("--set", "repeats=1", "--set", "protocol.warmup.at_least_s=0", "--tokens", "20")


def stored(path: Path, quant: str, name: str = "Tiny Llama") -> Path:
    """A file of this type, without data in its tensors."""
    writer = gguf_writer(path, TINY)
    writer.add_name(name)
    write(writer, quantized(TINY, quant))
    return path


def test_a_gguf_is_measured_without_a_config_and_its_config_runs_again(harness, tmp_path):
    stored(tmp_path / "tiny-Q4_0.gguf", "q4_0")
    ran = harness("run", "tiny-Q4_0.gguf", *FAKE, *ONE_REPEAT)
    assert ran.code == 0
    assert "harness: tiny: fake q4_0 on cpu, 20 tokens x 1\n" in ran.err
    assert "harness: config: results/configs/tiny.yaml\n" in ran.err
    assert (tmp_path / "reports" / "tiny.html").exists()
    again = harness("run", "results/configs/tiny.yaml")
    assert again.code == 0
    assert "measured already and kept" in again.err
    assert len(json.loads(harness("report", "--list", "--json").out)) == 1


def test_a_kept_config_that_someone_has_edited_is_not_overwritten(harness, tmp_path):
    stored(tmp_path / "tiny-Q4_0.gguf", "q4_0")
    first, kept = (
        ("run", "tiny-Q4_0.gguf", *FAKE, *ONE_REPEAT),
        tmp_path / "results" / "configs" / "tiny.yaml",
    )
    assert harness(*first).code == 0
    edited = kept.read_text() + "# mine\n"
    kept.write_text(edited)
    for _ in range(2):
        assert "harness: config: results/configs/tiny-2.yaml\n" in harness(*first).err
    assert kept.read_text() == edited
    assert [path.name for path in sorted(kept.parent.iterdir())] == ["tiny-2.yaml", "tiny.yaml"]


def test_by_default_it_is_a_short_campaign_in_llama_cpp_and_full_is_the_studys(harness, tmp_path):
    stored(tmp_path / "tiny-Q4_0.gguf", "q4_0")
    assert "tiny: llamacpp q4_0 on cpu, 128 tokens x 3" in harness("run", "tiny-Q4_0.gguf", "--dry-run").err
    assert "9975 tokens x 3" in harness("run", "tiny-Q4_0.gguf", "--dry-run", "--full").err
    assert not (tmp_path / "results").exists()


def test_files_of_one_model_are_one_model_each_cell_named_by_the_type_of_its_tensors(harness, tmp_path):
    one = stored(tmp_path / "tiny-Q4_0.gguf", "q4_0")
    stored(tmp_path / "renamed-Q5_K_M.gguf", "iq4_nl")
    assert harness("run", one, "renamed-Q5_K_M.gguf", *FAKE, *ONE_REPEAT).code == 0
    (kept,) = (tmp_path / "results" / "configs").glob("*.yaml")
    experiment = config.load(kept)
    assert [model.name for model in experiment.models] == ["tiny"]
    assert set(experiment.models[0].of_format) == {"q4_0", "iq4_nl"}
    rows = json.loads(harness("report", "--list", "--json").out)
    assert {(row["model"], row["variant"]) for row in rows} == {("tiny", "q4_0"), ("tiny", "iq4_nl")}


def test_a_file_is_the_same_cell_alone_and_beside_other_files(tmp_path):
    one = stored(tmp_path / "tiny-Q4_0.gguf", "q4_0")
    other = stored(tmp_path / "tiny-Q8_0.gguf", "q8_0")
    ids = []
    for weights in (str(one), {"q4_0": str(one), "q8_0": str(other)}):
        rows = {"models": [{"name": "m", "weights": weights}]}
        rows["variants"] = [{"stack": "llamacpp", "quant": "q4_0"}]
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(rows))
        (cell,) = plan.cells(config.load(tmp_path / "c.yaml"))
        assert cell.source.path == str(one)
        ids.append(cell.id)
    assert ids[0] == ids[1]


def test_other_models_and_a_second_file_of_a_type_are_models_of_their_own(tmp_path):
    paths = [
        stored(tmp_path / "tiny-Q4_0.gguf", "q4_0"),
        stored(tmp_path / "tiny-imatrix-Q4_0.gguf", "q4_0"),
        stored(tmp_path / "chat-Q8_0.gguf", "q8_0", "Tiny Llama Chat"),
    ]
    found = [(model.name, [*model.files]) for model in gguf_files.stored_models(paths)]
    assert found == [("tiny", ["q4_0"]), ("tiny-imatrix-Q4_0", ["q4_0"]), ("chat", ["q8_0"])]


def test_parts_of_a_split_file_are_one_model(tmp_path):
    write_gguf(tmp_path / "m-f16.gguf", split_max_tensors=10)
    (model,) = gguf_files.stored_models(sorted(tmp_path.glob("*.gguf")))
    assert model.name == "m"
    assert len(model.files) == 1


@pytest.mark.parametrize(
    ("name", "base", "quant"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct", "q4_1"),
        ("gemma-3-270m-it-UD-Q4_K_XL.gguf", "gemma-3-270m-it", "q4_k_xl"),
        ("Qwen3-0.6B.i1-IQ2_XXS.gguf", "Qwen3-0.6B", "iq2_xxs"),
        ("phi-4-fp16-00001-of-00003.gguf", "phi-4", "fp16"),
        ("BitNet-TQ1_0.GGUF", "BitNet", "tq1_0"),
        ("mine.gguf", "mine", None),
    ],
)
def test_a_type_is_told_from_the_rest_of_a_name(name, base, quant):
    assert (gguf_files.without_type(name), gguf_files.type_in(name)) == (base, quant)


def test_a_folder_is_its_checkpoint_or_the_files_of_its_one_model(harness, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    stored(folder / "tiny-Q4_0.gguf", "q4_0")
    stored(folder / "tiny-Q8_0.gguf", "q8_0")
    assert "tiny: llamacpp q4_0, llamacpp q8_0 on" in harness("run", "mine", "--dry-run").err
    stored(folder / "chat-Q8_0.gguf", "q8_0", "Chat")


def test_all_models_of_a_folder_and_of_the_folders_in_it_are_measured(harness, tmp_path):
    folder = tmp_path / "mine"
    (folder / "deeper").mkdir(parents=True)
    stored(folder / "deeper" / "tiny-Q4_0.gguf", "q4_0")
    stored(folder / "deeper" / "chat-Q8_0.gguf", "q8_0", "Chat")
    (folder / "checkpoint").mkdir()
    write_config(folder / "checkpoint")
    write_shards(folder / "checkpoint", TINY, 2)
    ran = harness("run", "mine", "--dry-run")
    assert "checkpoint, chat, tiny: " in ran.err, ran.err
    lines = [line.split(".decode")[0] for line in ran.out.splitlines()]
    assert [name for name in lines if name in ("tiny", "chat", "checkpoint")] == [
        "checkpoint",
        "chat",
        "tiny",
    ]
    assert {"llamacpp.q4_0", "llamacpp.q8_0"} <= {*lines}
    assert harness("run", "mine/deeper", *FAKE, *ONE_REPEAT).code == 0
    rows = json.loads(harness("report", "--list", "--json").out)
    assert {(row["model"], row["variant"]) for row in rows} == {("tiny", "q4_0"), ("chat", "q8_0")}


def test_random_weights_have_the_shape_of_a_known_name(harness):
    ran = harness("run", "qwen1.5-0.5b", "--synthetic", "--quant", "q8_0", "--dry-run")
    assert "qwen1.5-0.5b: llamacpp q8_0 on cpu, 128 tokens x 3" in ran.err


def bad_inputs(folder: Path) -> dict[str, Any]:
    stored(folder / "tiny-Q4_0.gguf", "q4_0")
    (folder / "lfs.gguf").write_bytes(LFS)
    (folder / "empty.gguf").touch()
    (folder / "cut.gguf").write_bytes((folder / "tiny-Q4_0.gguf").read_bytes()[:-100])
    write_gguf(folder / "m.gguf", split_max_tensors=10)
    next(folder.glob("m-00002-of-*.gguf")).unlink()
    (folder / "qwen1.5-0.5b").mkdir()
    (folder / "models").mkdir()
    (folder / "models" / "smollm.gguf").touch()
    write_config(folder)
    return {
        "lfs.gguf": "lfs.gguf: is a Git LFS pointer of 135 bytes",
        "empty.gguf": "empty.gguf: is empty (0 bytes): the download failed; fetch it again",
        "cut.gguf": "bytes: the download did not finish; fetch it again",
        "m-00001-of-00003.gguf": "part 2 of 3 of a split model: put all parts into one folder",
        "none.gguf": "harness: none.gguf: no such file or directory\n",
        "./none.gguf": "harness: none.gguf: no such file or directory\n",
        "tiny-q4.gguf": "tiny-q4.gguf: no such file or directory; did you mean tiny-Q4_0.gguf?",
        "models/smollm.gguff": "directory; did you mean models/smollm.gguf?",
        "model/smollm.gguf": "directory; did you mean models/smollm.gguf?",
        "models/smolm": "models/smolm: no such file or directory; did you mean models/smollm.gguf?",
        "models/other.yaml": "harness: models/other.yaml: no such file\n",
        "qwen1.5-0.5b": "qwen1.5-0.5b: holds no model",
        "tiny-Q4_0.gguf quickstart": "quickstart: is no model, and a config is measured alone",
        "quickstart --quant q8_0": "--stacks, --quant and --model are for models",
        "tiny-Q4_0.gguf --quant q8_0": "tiny is stored as q4_0, which cannot become q8_0: leave out --quant",
        "tiny-Q4_0.gguf --stacks hf": (
            "tiny is a GGUF, which hf does not load; try llamacpp or ik or llamaserver"
        ),
        "tiny-Q4_0.gguf --stacks lamacpp": "unknown stack lamacpp; did you mean llamacpp?",
        "qwen1.5-1.8b --synthetic --quant q9": "unknown quant of llamacpp q9",
        "tiny-Q4_0.gguf --tokens x": "new_tokens",
        "nothing-like-it": "nothing-like-it: no such file, shipped config or known model; ",
    }


def test_each_mistake_is_one_sentence_before_anything_runs(harness, tmp_path):
    for line, sentence in bad_inputs(tmp_path).items():
        ran = harness("run", *line.split())
        assert ran.code == 2, line
        assert sentence in ran.err, line
        assert ran.err.count("\n") == 1, ran.err
    assert not (tmp_path / "results").exists()


def test_a_repository_may_have_the_address_of_the_hub_before_it(harness):
    for address in ("", "hf.co/", "https://huggingface.co/"):
        ran = harness("run", f"{address}org/chat-GGUF:Q8_0", "--dry-run", HF_HUB_OFFLINE="1")
        assert ran.err.startswith("harness: chat-GGUF: llamacpp q8_0 on "), ran.err


def test_a_folder_for_results_that_cannot_be_is_one_sentence(harness, tmp_path):
    stored(tmp_path / "tiny-Q4_0.gguf", "q4_0")
    (tmp_path / "file").touch()
    ran = harness("run", "tiny-Q4_0.gguf", "--out", "file")
    assert ran.code == 2
    assert "file/configs/tiny.yaml: cannot be written: " in ran.err


def test_a_config_goes_before_a_model_of_its_name(harness, config):
    config({}, name="qwen1.5-0.5b")
    assert "fake" in harness("run", "qwen1.5-0.5b", "--dry-run").words


def test_init_writes_the_config_of_a_gguf(harness, tmp_path):
    stored(tmp_path / "tiny-Q4_0.gguf", "q4_0")
    ran = harness("init", "tiny-Q4_0.gguf")
    assert "wrote: tiny.yaml\n" in ran.out
    assert "\ntiny.llamacpp.q4_0.decode " in harness("run", "--dry-run", "tiny.yaml").out


def test_in_a_config_a_word_is_a_model_and_quant_finds_files_in_any_case(harness, tmp_path):
    stored(tmp_path / "my-tiny-Q4_0.gguf", "q4_0")
    stored(tmp_path / "my-tiny-Q8_0.gguf", "q8_0")
    words = ["my-tiny-Q4_0.gguf", "austen-4m", "owner/repo", "owner/other:Q8_0", "owner/third-GGUF"]
    rows = {"models": words, "variants": [{"stack": "llamacpp"}]}
    (tmp_path / "words.yaml").write_text(yaml.safe_dump(rows))
    experiment = config.load(tmp_path / "words.yaml")
    assert [model.name for model in experiment.models] == [
        *("my-tiny-Q4_0", "austen-4m", "repo", "other", "third-GGUF")
    ]
    assert experiment.models[-1].weights.file == "*Q4_K_M.gguf"
    assert experiment.protocol.new_tokens == 128
    rows["models"] = ["qwen1.5-0.5b"]
    (tmp_path / "words.yaml").write_text(yaml.safe_dump(rows))
    refused = harness("run", "words.yaml")
    assert (
        'models.0: "qwen1.5-0.5b" is not weights: for random ones, write {shape: qwen1.5-0.5b}' in refused.err
    )
    rows = {"models": [{"name": "t", "weights": "*-tiny-{quant}.gguf"}]}
    rows["variants"] = [{"stack": "llamacpp", "quant": ["q4_0", "q8_0"]}]
    (tmp_path / "glob.yaml").write_text(yaml.safe_dump(rows))
    assert harness("run", "--dry-run", "glob.yaml").code == 0
    rows["variants"] = [{"stack": "llamacpp", "quant": "q5_0"}]
    (tmp_path / "glob.yaml").write_text(yaml.safe_dump(rows))
    assert "*-tiny-q5_0.gguf: no such file" in harness("run", "--dry-run", "glob.yaml").words
    stored(tmp_path / "your-tiny-q4_0.gguf", "q4_0")
    refused = harness("run", tmp_path / "*-tiny-q4_0.gguf", "--dry-run")
    assert "matches 2 files: my-tiny-Q4_0.gguf, your-tiny-q4_0.gguf" in refused.err


def test_users_and_depths_of_the_command_line_become_workloads(harness, tmp_path):
    stored(tmp_path / "tiny-Q4_0.gguf", "q4_0")
    ran = harness(
        "run", "tiny-Q4_0.gguf", "--stacks", "llamacpp", "--users", "1,4", "--depth", "0,2k", "--dry-run"
    )
    kinds = [line.split()[0].rpartition(".")[2] for line in ran.out.splitlines()[1:4]]
    assert kinds == ["decode", "batch", "depth"], ran.out + ran.err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("tiny-Q4_0.gguf --users 1,x", "concurrency"),
        ("tiny-Q4_0.gguf --depth 4kk", "depths"),
        ("quickstart --users 4", "a config has workloads of kind batch and depth"),
        ("tiny-Q4_0.gguf --depth 4k --max-ctx", "--depth has no effect with --max-ctx"),
    ],
)
def test_users_or_depths_that_cannot_be_measured_are_one_sentence(harness, tmp_path, line, reason):
    stored(tmp_path / "tiny-Q4_0.gguf", "q4_0")
    ran = harness("run", *line.split())
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
    assert reason in ran.err


@pytest.mark.parametrize(("stack", "kind"), [("llamacpp", "prefill"), ("llamaserver", "turns")])
def test_a_prompt_of_512_tokens_is_read_beside_the_decode(harness, tmp_path, stack, kind):
    stored(tmp_path / "tiny-Q4_0.gguf", "q4_0")
    ran = harness("run", "tiny-Q4_0.gguf", "--stacks", stack, "--dry-run", "--json")
    assert [row["cell"].split(".")[3] for row in ran.json] == ["decode", kind]


def test_no_prompt_is_read_where_it_would_take_a_cpu_minutes_or_the_settings_have_workloads(
    harness, tmp_path, monkeypatch
):
    stored(tmp_path / "tiny-Q4_0.gguf", "q4_0")
    line = ("run", "tiny-Q4_0.gguf", "--stacks", "llamacpp", "--dry-run", "--json")
    assert len(harness(*line, *DECODE).json) == 1
    monkeypatch.setattr(prompt_speed, "BUDGET_S", 1e-6)
    assert len(harness(*line).json) == 1
