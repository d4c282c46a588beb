"""`harness run --quality` on the shipped model and real stacks: figures, what is kept and refused."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stored_again import Tensors, stored_again

from harness import config as configs
from harness import records
from harness.base import bounds, data
from harness.campaign import device_lock, quality_text
from harness.campaign.quality_text import TextError
from harness.campaign.tokenized_text import tokenized
from harness.config import Quality, plan
from harness.config.mistakes import ConfigError

MODEL = "austen-4m"
ROOT = Path(__file__).parent.parent


def test_the_shipped_model_and_text_are_those_of_its_readme():
    folder = data.weights(MODEL)
    readme = (folder / "README.md").read_text()
    files = [path for path in sorted(folder.iterdir()) if path.name != "README.md"]
    for path in (*files, data.shipped_text()):
        size, digest = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
        assert f"| {path.name} | {size:,} | `{digest}` |" in readme
    assert (folder / "model.safetensors").stat().st_size < 12e6


def test_the_shipped_text_has_windows_enough_for_the_default_workload():
    ids = tokenized(data.weights(MODEL) / "tokenizer.json", data.shipped_text().read_text(), 1 << 62).ids
    assert len(ids) >= Quality().n_ctx * Quality().chunks


def test_a_shipped_model_is_named_in_a_config(scoring):
    experiment = configs.load(scoring({"weights": MODEL}, {"stack": "hf"}))
    assert experiment.models[0].name == MODEL
    assert experiment.models[0].weights.path == str(data.weights(MODEL))
    assert [cell.scores for cell in plan.cells(experiment)] == [True]


def test_a_misspelt_shipped_model_is_a_mistake(scoring):
    with pytest.raises(ConfigError, match=r"unknown weights \"austin-4m\"; did you mean austen-4m"):
        configs.load(scoring({"weights": "austin-4m"}, {"stack": "hf"}))


def test_a_text_is_looked_for_beside_the_config(scoring, tmp_path):
    (tmp_path / "mine.txt").write_text("Words.\n")
    experiment = configs.load(scoring({"weights": MODEL}, {"stack": "hf"}, text="mine.txt"))
    workload = experiment.workloads[0]
    assert isinstance(workload, Quality)
    assert quality_text.read(workload).content == "Words.\n"


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (None, "no such file"),
        (b"", "is empty"),
        (b"GGUF\0\0\0", "is binary"),
        ("Caf\xe9".encode("latin-1"), "byte 3 is not UTF-8; convert the text to UTF-8"),
        ("Wort".encode("utf-16"), "is binary"),
        (bytes(bounds.TEXT_BYTES + 1), "it is larger than 64 mib"),
    ],
    ids=["missing", "empty", "binary", "latin-1", "utf-16", "large"],
)
def test_a_text_that_cannot_be_read_is_one_sentence(content, wrong, tmp_path):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TextError, match=re.escape(f"{path}: {wrong}")):
        quality_text.read(Quality(text=str(path)))


def test_nothing_is_started_without_the_text(harness, scoring, tmp_path):
    ran = harness("run", "--quality", scoring({"weights": MODEL}, {"stack": "fake"}, text="none.txt"))
    assert ran.code == 2
    assert ran.err == f"harness: {tmp_path / 'none.txt'}: no such file or directory\n"
    assert not list(tmp_path.rglob("record.json"))


def test_a_stack_without_weights_has_no_quality(harness, scoring, fake_interpreter):
    ran = harness("run", "--quality", scoring({"weights": MODEL}, {"stack": "fake"}), "--json")
    assert ran.code == 1
    assert [(row["status"], row["reasons"]) for row in ran.json] == [
        ("unavailable", ["its stack loads no weights: there is no text model to score"])
    ]


@pytest.mark.parametrize(("more", "column"), [((), "reasons"), (("--dry-run",), "will_be_refused")])
def test_random_weights_are_refused_with_a_sentence(harness, scoring, llamacpp_interpreter, more, column):
    path = scoring({"shape": "tiny-qwen2"}, {"stack": "llamacpp", "quant": "q8_0"})
    ran = harness("run", "--quality", path, "--json", *more)
    assert ran.code == 1
    assert [row.get("status", "refused") for row in ran.json] == ["refused"]
    assert ran.json[0][column][0].startswith("random weights: their agreement says nothing of any text")


def test_a_text_that_is_too_short_says_how_much_fits(harness, scoring, tmp_path, hf_interpreter):
    (tmp_path / "short.txt").write_text(data.shipped_text().read_text()[:1000])
    ran = harness(
        "run",
        "--quality",
        scoring({"weights": MODEL}, {"stack": "hf"}, text="short.txt", chunks=20),
        "--json",
    )
    assert ran.code == 1
    (row,) = ran.json
    assert row["status"] == "refused"
    assert re.search(
        r"has \d+ tokens, and 20 windows of 64 tokens need 1,280; chunks: \d would fit", row["reasons"][0]
    )


def test_windows_of_every_depth_end_at_the_same_tokens():
    workload = Quality(n_ctx=64, chunks=2, depths=[128, 256])
    base, at_128, at_256 = (workload.windows()[k : k + 2] for k in (0, 2, 4))
    assert base == [(0, 64), (64, 128)]
    assert [end for _, end in at_128] == [end for _, end in at_256] == [256, 320]
    assert [end - first for first, end in (*at_128, *at_256)] == [128, 128, 256, 256]
    assert [workload.fitting(tokens) for tokens in (255, 256, 319, 320)] == [0, 1, 1, 2]


def test_a_depth_within_the_windows_is_a_mistake(scoring):
    with pytest.raises(ConfigError, match="64 is not deeper than the windows of n_ctx 64"):
        configs.load(scoring({"weights": MODEL}, {"stack": "hf"}, depths=[64, 128]))


def test_a_quantized_cache_is_scored_at_each_depth(
    harness, scoring, hf_interpreter, llamacpp_interpreter, monkeypatch
):
    given = {"stack": "llamacpp", "quant": "f16", "type_k": ["f16", "q4_0"]}
    ran = harness(
        "run", "--quality", scoring({"weights": MODEL}, given, chunks=2, depths=[128, "1.25k"]), "--json"
    )
    assert ran.code == 0, ran.out + ran.err
    exact, rounded = ran.json
    assert [[each["depth"] for each in row["at_depth"]] for row in ran.json] == [[128, 1280]] * 2
    for ours, theirs in zip(rounded["at_depth"], exact["at_depth"], strict=True):
        assert ours["scored"] == rounded["scored"] == 2 * 31
        assert ours["figures"]["kld_mean"]["value"] > 3 * theirs["figures"]["kld_mean"]["value"]
    path = scoring({"weights": MODEL}, given, chunks=2, depths=[128, "1.25k"])
    monkeypatch.setattr(device_lock, "is_busy", lambda device: False)  # by another test
    table = harness("run", "--quality", path, "--wide")
    first, *_ = table.err.splitlines()
    assert re.fullmatch(r"harness: about [\d.]+ (s|min) for 2 scores, and as long once more .*", first)
    assert " at 1,280 " in table.out
    assert "trained on at most 1,024 tokens: figures at 1,280 are of a model" in table.out + table.err


def test_types_are_scored_against_the_checkpoint_in_order_and_kept(
    harness, scoring, tmp_path, hf_interpreter, llamacpp_interpreter
):
    path = scoring(
        {"weights": MODEL},
        {"stack": "llamacpp", "quant": ["f16", "q8_0", "q2_k"]},
        {"stack": "hf", "dtype": "bf16"},
        n_ctx=128,
        chunks=6,
    )
    ran = harness("run", "--quality", path, "--json")
    assert ran.code == 0, ran.out + ran.err
    assert re.search(r"^scoring \S+: \d of 6 windows, about [\d.]+ \w+ left$", ran.err, re.MULTILINE)
    found = {row["variant"]: row for row in ran.json}
    assert {row["reference"] for row in found.values()} == {"hf fp32"}
    kld = {name: row["figures"]["kld_mean"]["value"] for name, row in found.items()}
    assert kld["f16"] < kld["q8_0"] < kld["q2_k"]
    assert found["q2_k"]["figures"]["top1"]["value"] < found["q8_0"]["figures"]["top1"]["value"] <= 1
    assert max(row["loss_nats"] for row in found.values()) < 1e-4
    f16 = found["f16"]
    assert f16["scored"] == 6 * 63
    assert abs(f16["figures"]["ln_ppl_ratio"]["value"]) < 0.001
    again = harness("run", "--quality", path, "--json")
    assert again.json == ran.json
    table = harness("run", "--quality", path).out
    assert "PPL" in table
    assert "scored 378 tokens of" in table
    assert len(list(records.records(tmp_path / "results", pytest.fail))) == 4


def test_a_bos_begins_each_window_in_every_stack_where_the_tokenizer_asks_for_one(
    harness, scoring, tmp_path, hf_interpreter, llamacpp_interpreter
):
    folder = tmp_path / "bos"
    shutil.copytree(data.weights(MODEL), folder)
    settings = {"add_bos_token": True, "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    stacks = {"stack": "hf", "dtype": "fp32"}, {"stack": "llamacpp", "quant": "f32"}

    def scored(weights: str, *variants: dict, **workload: object) -> tuple[object, str, str]:
        ran = harness(
            "run", "--quality", scoring({"name": "m", "weights": weights}, *variants, **workload), "--json"
        )
        ((found, ids),) = {(row["bos"], row["ids_sha256"]) for row in ran.json}
        assert all(row["status"] == "ok" for row in ran.json), ran.out
        shown = harness("run", "--quality", scoring({"name": "m", "weights": weights}, *variants, **workload))
        return found, ids, shown.out + shown.err

    bos, behind, said = scored(str(folder), *stacks)
    assert bos == json.loads((folder / "tokenizer.json").read_text())["added_tokens"][0]["id"]
    assert f"each begins with the BOS that the tokenizer asks for (id {bos})" in said
    none, without, said = scored(str(folder), stacks[0], bos=False)
    assert (none, "no BOS was put in front" in said, without == behind) == (None, True, False)
    none, asked_by_none, said = scored(MODEL, stacks[0])
    assert (none, "no BOS: the tokenizer asks for none" in said, asked_by_none) == (None, True, without)


def test_special_tokens_in_a_text_are_text_in_every_stack_and_named_as_are_carriage_returns(
    harness, scoring, tmp_path, hf_interpreter, llamacpp_interpreter
):
    lines = data.shipped_text().read_text()[:6000].splitlines()
    marked = [f"{line}<|endoftext|>" if at % 9 == 0 else line for at, line in enumerate(lines)]
    (tmp_path / "marked.txt").write_bytes("\r\n".join(marked).encode())
    stacks = {"stack": "hf", "dtype": "fp32"}, {"stack": "llamacpp", "quant": "f32"}
    path = scoring({"weights": MODEL}, *stacks, text="marked.txt", chunks=3)
    ran = harness("run", "--quality", path, "--json")
    assert len({row["ids_sha256"] for row in ran.json}) == 1
    one, other = (row["perplexity"] for row in ran.json)
    assert one == pytest.approx(other, rel=1e-3)
    said = " ".join(harness("run", "--quality", path).out.split())
    assert f"contains <|endoftext|> ({-(-len(lines) // 9)} times): scored as text" in said
    assert f"has {len(lines) - 1} carriage returns (CRLF line ends), which are scored as they stand" in said


def test_a_special_token_that_is_written_in_a_text_has_no_id_of_its_own(tmp_path):
    """The second added token is special by its form alone, as llama.cpp's converter counts it."""
    folder = tmp_path / "model"
    shutil.copytree(data.weights(MODEL), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        tokenizer["added_tokens"][0] | {"id": 4095, "content": "<|fim|>", "special": False}
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    own = {added["id"] for added in tokenizer["added_tokens"]}
    for text in ("one <|endoftext|> two", "one <|fim|> two"):
        assert not own & {*tokenized(folder / "tokenizer.json", text, 99).ids}


def test_a_model_whose_logits_overflow_is_invalid_with_the_position(
    harness, scoring, tmp_path, hf_interpreter
):
    def largest(tensors: Tensors) -> None:
        dtype, shape, _ = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = dtype, shape, b"\x7f\x7f" * shape[0]  # bfloat16: products overflow

    folder = stored_again(data.weights(MODEL), tmp_path / "broken", largest)
    model = {"name": "broken", "weights": {"hf": str(data.weights(MODEL)), "gguf": str(folder)}}
    ran = harness("run", "--quality", scoring(model, {"stack": "llamacpp", "quant": "f32"}), "--json")
    assert ran.code == 1
    (row,) = ran.json
    assert (row["status"], row["reasons"]) == (
        "invalid",
        ["NaN or infinite logits at position 33 of window 1"],
    )
    assert row["figures"] == {}


def test_a_model_with_another_tokenizer_than_its_reference_is_refused(
    harness, scoring, tmp_path, hf_interpreter
):
    folder = tmp_path / "other"
    shutil.copytree(data.weights(MODEL), folder)
    made = json.loads((folder / "tokenizer.json").read_text())
    made["model"]["merges"] = made["model"]["merges"][: len(made["model"]["merges"]) // 2]
    (folder / "tokenizer.json").write_text(json.dumps(made))
    model = {"name": "other", "weights": {"hf": str(data.weights(MODEL)), "gguf": str(folder)}}
    ran = harness("run", "--quality", scoring(model, {"stack": "llamacpp", "quant": "f32"}), "--json")
    assert ran.code == 1
    (row,) = ran.json
    assert row["status"] == "refused"
    assert "a KL divergence needs the same tokens" in row["reasons"][0]


def test_cells_and_fingerprints_of_a_shipped_model_are_the_same_in_every_installation(scoring, tmp_path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom harness import config\nfrom harness.base import data\n"
        "from harness.config import plan\n"
        "from harness.models import locate\nprint(data.weights('austen-4m'))\n"
        "print([cell.id for cell in plan.cells(config.load(Path(sys.argv[1])))])\n"
        "print(locate.local(data.weights('austen-4m')).fingerprint)\n"
    )
    path = scoring({"weights": MODEL}, {"stack": "llamacpp", "quant": ["q8_0", "q2_k"]}, {"stack": "hf"})
    found = []
    for place in ("one", "other"):
        for package in ("harness", "runners"):
            # Files have new times, as those of an installation have.
            shutil.copytree(
                *(ROOT / package, tmp_path / place / package),
                ignore=shutil.ignore_patterns("__pycache__", "published", "configs"),
                copy_function=shutil.copyfile,
            )
        ran = subprocess.run(
            [sys.executable, "-c", program, path],
            cwd=tmp_path / place,
            env=os.environ | {"PYTHONPATH": str(tmp_path / place), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        found.append(ran.stdout.splitlines())
    (first, *one), (second, *other) = found
    assert first != second
    assert one == other
    copied = tmp_path / "mine"
    shutil.copytree(data.weights(MODEL), copied)
    mine = configs.load(scoring({"name": MODEL, "weights": str(copied)}, {"stack": "hf"}))
    assert plan.cells(mine)[0].id not in one[0]


def test_an_exported_reference_gives_the_same_figures_without_the_reference_stack(
    harness, scoring, tmp_path, hf_interpreter, llamacpp_interpreter
):
    path, file = (
        scoring({"weights": MODEL}, {"stack": "llamacpp", "quant": "q2_k"}),
        tmp_path / "reference.zip",
    )
    exported = harness("run", "--quality", path, "--export-reference", file, "-o", tmp_path / "there")
    assert exported.code == 0, exported.err
    assert not list(records.records(tmp_path / "there", pytest.fail))
    computed = harness("run", "--quality", path, "--json", "-o", tmp_path / "computed").json[0]
    row = harness("run", "--quality", path, "--json", "-o", tmp_path / "given", "--reference", file).json[0]
    assert row["figures"] == computed["figures"]
    assert row["reference"] == "hf fp32"
    ran = harness("run", "--quality", path, "--json", "--reference", file, "--set", "workloads.0.chunks=3")
    assert ran.code == 1
    assert ran.json[0]["status"] == "refused"
    assert "has windows of 64 tokens, 4 of them, not 64 tokens, 3 of them" in ran.json[0]["reasons"][0]


def test_a_dry_run_estimates_the_score_of_a_7b_on_a_gpu_that_is_elsewhere(harness, scoring):
    model = {"name": "7b", "shape": "qwen1.5-7b", "weights": {"repo": "Qwen/Qwen1.5-7B"}}
    path = scoring(model, {"stack": "hf", "dtype": "fp16"}, n_ctx=512, chunks=64)
    gpu = ("--set", "device=cuda", "--set", "gpu=RTX 4090", "--dry-run")
    ran = harness("run", "--quality", path, *gpu, "--json")
    (line,) = ran.json
    weights_bytes = 2 * 7.72e9
    logits_bytes = 256 * 151_936 * 4
    assert weights_bytes + logits_bytes < line["memory_bytes"] < weights_bytes + 6 * logits_bytes + 2e9
    twice = harness("run", "--quality", path, *gpu, "--json", "--set", "workloads.0.chunks=128").json[0]
    assert 1.8 < twice["seconds"] / line["seconds"] < 2.1
    assert "the reference of each model is computed once more" in ran.err
    assert harness("run", "--quality", path, *gpu).out.splitlines()[1].endswith(" min x 1")
