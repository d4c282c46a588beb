"""The command as a person meets it: help, errors of one sentence, exit codes, --json."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import refused, until
from test_checkpoint import TINY, entries, write_config, write_gguf, write_safetensors

from harness import __version__, machine
from harness.base.files import cache_folder
from harness.cli import COMMANDS, init
from harness.config import load, plan
from harness.report import text_table
from harness.stacks import build
from harness.stacks.header import stacks
from harness.theory import decoder

CONFIGS = Path(__file__).parent.parent / "configs"


def test_help_names_every_subcommand_and_the_exit_codes(harness):
    said = harness("--help").out
    for word in (*COMMANDS, "measure:", "choose:", "look:", "share:", "set up:", "exit codes", "130"):
        assert word in said
    assert max(map(len, said.splitlines())) <= 100


ACTIONS = [f"env {action}" for action in ("list", "create", "check", "use", "forget", "pack", "synth")]


@pytest.mark.parametrize("command", [*COMMANDS, *ACTIONS])
def test_help_of_a_command_is_one_screen(harness, command):
    """--help-all lists the rest."""
    lines = harness(*command.split(), "--help", COLUMNS="80").out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


def test_help_of_a_command_has_rarely_used_options_on_request(harness):
    assert "--skip-known-failures" not in harness("run", "--help").out
    assert "--skip-known-failures" in harness("run", "--help-all").out
    assert harness("sql", "--help-all").out == harness("sql", "--help").out


def test_help_of_a_command_can_be_asked_in_words(harness):
    assert harness("help", "ab").out == harness("ab", "--help").out
    assert harness("help").out == harness("--help").out


def test_help_imports_nothing_slow():
    asked = [[], *(command.split() for command in [*COMMANDS, *ACTIONS])]
    code = (
        "import sys\nfrom harness.cli import main\n"
        f"for words in {asked}:\n"
        "    try:\n        main([*words, '--help'])\n    except SystemExit:\n        pass\n"
        "slow = {'pydantic', 'yaml', 'pandas', 'plotly', 'jinja2', 'numpy', 'pyarrow', 'rich', 'psutil'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_command_and_the_package_as_a_module_say_the_version(harness):
    module = subprocess.run([sys.executable, "-m", "harness", "--version"], capture_output=True, text=True)
    assert harness("--version").out == module.stdout == f"harness {__version__}\n"


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_a_dry_run_of_a_shipped_config_lists_its_cells_and_writes_nothing(harness, name, tmp_path):
    cells = plan.cells(load(CONFIGS / name))
    ran = harness("run", CONFIGS / name, "--dry-run", HARNESS_CACHE=str(tmp_path / "empty"))
    assert ran.code == ("will" in ran.err.splitlines()[-1])
    assert len(ran.out.splitlines()) > 1
    assert re.search(rf"^harness: {len(cells)} cells", ran.err, re.MULTILINE)
    assert max(map(len, ran.out.splitlines())) <= text_table.PIPE_WIDTH
    wide = harness("run", CONFIGS / name, "--dry-run", "--wide", HARNESS_CACHE=str(tmp_path / "empty"))
    for cell in cells:
        short = cell.id.removeprefix(f"{cell.model.name}.").rpartition(".")[0]
        assert short in wide.out
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "empty").exists()


def test_a_dry_run_tells_where_weights_come_from_and_what_they_take(harness):
    lines = harness("run", CONFIGS / "quickstart.yaml", "--dry-run", "--json").json
    # The source is made once, for the first that needs it.
    assert [line["weights"] for line in lines] == [
        *("synthesize checkpoint, convert f16, quantize q8_0", "quantize q4_k_m", "quantize q4_0"),
        *["synthetic, nothing more to make"] * 2,
    ]
    assert 3e9 < lines[0]["disk_bytes"] < 3.2e9
    for line in lines:
        assert 0.4e9 < line["memory_bytes"] < 3e9
    for line in lines[:3]:
        assert line["seconds"] > 0


def test_a_repository_that_variants_share_is_to_be_fetched_once(harness, tmp_path):
    empty = {"HARNESS_CACHE": str(tmp_path / "empty"), "HF_HUB_CACHE": str(tmp_path / "hub")}
    ran = harness("run", "4090-qwen15", "--dry-run", "--json", **empty)
    sizes: dict[str, list[float]] = {}
    for line in ran.json:
        sizes.setdefault(line["weights"], []).append(line["disk_bytes"])
    assert any(len(each) > 1 for each in sizes.values())
    for each in sizes.values():
        assert each[0] > 0
        assert not any(each[1:])
    assert 2.3e12 < sum(map(sum, sizes.values())) < 2.4e12
    by_model = harness("run", "4090-qwen15", "--dry-run", **empty)
    assert re.search(r"\nall +160 +103 .* 2,341\.4 GB +at least ", by_model.out)
    assert len(by_model.out.splitlines()) < 30


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml"])
def test_a_name_is_a_file_where_the_user_stands_else_a_shipped_config(harness, config, tmp_path, name):
    (tmp_path / "quickstart").mkdir()  # no file, and so no config
    shipped = harness("run", "--dry-run", name)
    assert shipped.code == 0, shipped.err
    assert "\nqwen1.5-0.5b.llamacpp.q8_0.decode " in shipped.out
    assert ("for the folder of that name here: ./quickstart" in shipped.err) == (name == "quickstart")
    config({}, name="quickstart")
    assert "\ntiny-qwen2.fake." in harness("run", "--dry-run", name).out


def test_a_name_of_no_config_is_met_with_the_closest_that_is_shipped(harness):
    ran = harness("run", "quikstart")
    said = "harness: quikstart: no such file, shipped config or known model; did you mean quickstart?\n"
    assert (ran.code, ran.err) == (2, said)
    assert harness("run", "../quickstart").err == "harness: ../quickstart: no such file or directory\n"


def test_a_folder_of_runners_that_has_none_is_one_sentence(harness, tmp_path):
    (tmp_path / "runners" / "stacks").mkdir(parents=True)
    ran = harness("run", "quickstart", "--dry-run", HARNESS_RUNNERS=str(tmp_path))
    refused(ran, f"HARNESS_RUNNERS={tmp_path}: is no folder named runners; did you mean {tmp_path}/runners?")


def test_a_published_study_is_a_folder_where_the_user_stands_else_the_shipped_one(harness, tmp_path):
    study = "published/rtx4090-qwen1.5"
    assert harness("report", study, "--memory", "--json").code == 0
    said = harness("report", study, "--list").err
    assert "its 148 records are published figures: see harness report " in said
    (tmp_path / "published" / "rtx4090-qwen1.5").mkdir(parents=True)
    assert "no records" in harness("report", "published/rtx4090-qwen1.5").err
    assert "no such results folder" in harness("report", "published/../configs").err


@pytest.mark.parametrize(("built", "then"), [(None, "harness env create llamacpp; "), (object(), "")])
def test_init_says_what_comes_next(monkeypatch, tmp_path, capsys, built, then):
    facts = machine.facts() | {"gpus": []}
    monkeypatch.setattr(machine, "facts", lambda: facts)
    monkeypatch.setattr(init, "visible_gpus", list)
    monkeypatch.setattr(build, "find", lambda environment: built)
    assert init.run(argparse.Namespace(file=str(tmp_path / "c.yaml"))) == 0
    assert capsys.readouterr().out.endswith(f"\nnext: {then}harness run {tmp_path / 'c.yaml'}\n")


def test_init_writes_a_config_of_this_machine_once(harness, tmp_path):
    ran = harness("init")
    assert ran.code == 0, ran.err
    cpu = machine.facts()["cpu"]
    assert ran.out.startswith(f"found: {cpu}, ")
    assert cpu in (written := (tmp_path / "harness.yaml").read_text())
    assert harness("run", "--dry-run", "harness.yaml").code == 0
    again = harness("init", "harness.yaml")
    assert (again.code, "already exists" in again.err) == (2, True)
    assert (tmp_path / "harness.yaml").read_text() == written
    assert harness("init", "nowhere/c.yaml").err == (
        "harness: nowhere/c.yaml: cannot be written: No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("capability", "memory", "shape", "dtype"),
    [("8.9", 25.8e9, "qwen1.5-1.8b", "bf16"), ("7.5", 6e9, "qwen1.5-0.5b", "fp16")],
)
def test_the_config_of_a_machine_with_a_gpu_is_for_the_gpu(tmp_path, capability, memory, shape, dtype):
    gpu = {"name": 'NVIDIA "X" 1', "memory_bytes": memory, "compute_capability": capability}
    (tmp_path / "gpu.yaml").write_text(init.text(machine.facts() | {"gpus": [gpu]}, "gpu.yaml"))
    made = load(tmp_path / "gpu.yaml")
    assert (made.device, made.gpu, made.models[0].name) == ("cuda", gpu["name"], shape)
    assert {variant.stack for variant in made.variants} == {"llamacpp", "hf", "bnb"}
    assert {variant.options.get("dtype") for variant in made.variants} == {None, dtype}


def test_what_a_made_config_has_in_comments_is_right_too(tmp_path):
    rows = re.sub(r"(?m)^  # ", "  ", init.text(machine.facts() | {"gpus": []}, "all.yaml"))
    (tmp_path / "all.yaml").write_text(rows)
    made = load(tmp_path / "all.yaml")
    assert len(made.models) == 3
    assert {variant.stack for variant in made.variants} == {"llamacpp", "hf", "bnb"}


BAD = {
    "unknown key": ("protocol: {new_token: 3}\nmodels: []\nvariants: []\n", "new_tokens"),
    "not yaml": ("{[", "bad.yaml:1"),
    "empty": ("", "empty"),
    "code": ("!!python/object/apply:os.system ['touch pwned']\n", "bad.yaml:1"),
    "bomb": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "bad.yaml"),
    "deep": ("[" * 100_000, "bad.yaml"),
    "not utf-8": (b"\xff\xfe\x00", "UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistaken_config_is_a_few_lines_and_exit_code_2(harness, tmp_path, name):
    content, told = BAD[name]
    (tmp_path / "bad.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    for command in (["run"], ["run", "--dry-run"]):
        ran = harness(*command, "bad.yaml")
        assert ran.code == 2
        assert told in ran.err
        assert 1 <= len(ran.err.splitlines()) <= 11
        assert ran.out == ""
    assert not (tmp_path / "pwned").exists()
    assert not (tmp_path / "results").exists()


def test_list_of_a_missing_folder_is_one_sentence_and_of_an_empty_one_an_empty_array(harness, tmp_path):
    ran = harness("report", "--list", "nowhere")
    assert (ran.code, ran.err) == (2, "harness: nowhere: no such results folder\n")
    assert harness("report", "--list", tmp_path, "--json").json == []


def test_list_passes_over_a_damaged_record_and_says_so(harness, config, tmp_path):
    harness("run", config({}))
    damaged = tmp_path / "results" / "x"
    damaged.mkdir()
    (damaged / "record.json").write_text("{")
    ran = harness("report", "--list", "--json")
    assert len(ran.json) == 1
    assert "skipped" in ran.err


def test_env_list_has_every_declared_environment(harness):
    listed = {(line["stack"], line["environment"]) for line in harness("env", "list", "--json").json}
    assert listed == {(h.stack, e) for h in stacks().values() for e in h.environments}
    assert {("llamacpp", e) for e in ("cpu", "cuda", "metal", "vulkan", "hip")} <= listed


def test_env_create_builds_once_and_says_where(harness):
    first, second = harness("env", "create", "fake"), harness("env", "create", "fake")
    assert first.code == second.code == 0
    assert Path(first.out.split(": ")[1].strip()).exists()
    assert first.out == second.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("env synth qwen1.5-05b", "did you mean qwen1.5-0.5b"),
        ("env synth tiny-qwen2 --quant Q4_K_M", "did you mean q4_k_m"),
        ("env synth tiny-qwen2 --format hf --quant f16", "--quant needs --format gguf"),
        ("env synth tiny-qwen2 --format onnx", "invalid choice"),
        ("env check llamacp", "unknown stack llamacp"),
        ("env synth tiny-qwen2 --seed -1", "--seed: -1 is not a whole number from 0 to 9,223,"),
        (f"env synth tiny-qwen2 --seed {2**80}", "is not a whole number from 0 to"),
        ("env check llamacpp --device tpu", "no environment for device tpu; there are cpu, cuda"),
        ("run", "name a MODEL (a GGUF file, a folder, a name such as qwen3:8b, or owner/repo:Q4_K_M), or a"),
        ("run missing.yaml", "missing.yaml: no such file, nor a shipped config; known: 4090-qwen15, "),
        ("run .", ".: holds no model: no .safetensors, no .gguf, no config.json\n"),
        ("report --open", "no page in reports/; harness run quickstart writes one"),
        ("report --json", "--json has no effect for a page; its tables: --format json"),
        ("report --list -o x", "--output has no effect with --list"),
        ("report --serve 99999", "--serve: 99999 is no port; the folder comes first"),
        ("report --serve results", "--serve: results is no port; the folder comes first: report DIR --serve"),
        (
            "report published/public-speeds --list",
            "are speeds without records: only their table and --format show",
        ),
        ("share --json", "--json and --beside are for --verify"),
        ("run x.yaml --quality --full", "--tokens or --full has no effect with --quality"),
        ("run x.yaml --seconds 0", "--seconds: 0 is not a number of seconds above 0 and at most 1e6"),
        ("run quickstart --check-weights --dry-run", "--dry-run has no forecast of --check-weights"),
        ("report published/x", "no such results folder; there are published/public-speeds, published/rtx"),
        ("report a b --list", "--list, --memory, --history and --export show one folder: name one"),
        ("run x.yaml --no-fill", "--no-fill needs --max-ctx"),
        ("run x.yaml --quality --seconds 3", "--seconds needs --check-weights"),
        ("run x.yaml --quality --tokens 3", "--tokens or --full has no effect with --quality"),
        ("run x.yaml --quality --max-ctx", "not allowed with argument --quality"),
        ("share --bundle a.tar.zst --svg a.svg", "--svg: not allowed with argument --bundle"),
        ("run x --fast", "harness: unrecognized arguments: --fast; harness run --help has the options\n"),
        ("theory qwen1.5-7b --context 32kk", "harness: --context: 32kk is not a count"),
        ("run x --tokns 5", "harness: unknown option --tokns; did you mean --tokens?\n"),
        ("theory qwen1.5-7b --machne=m2", "unknown option --machne; did you mean --machine?"),
        ("env create fake --divice cpu", "unknown option --divice; did you mean --device?"),
        ("env", "required: ACTION; harness env --help"),
        ("theory qwen1.5-7b --published all", "name no MODEL"),
        ("fly", "unknown command fly; there are run, tune, ab, bisect, recommend, "),
        ("recomend", "unknown command recomend; did you mean recommend?\n"),
    ],
)
def test_a_mistaken_command_line_is_exit_code_2(harness, arguments, told):
    ran = harness(*arguments.split())
    assert ran.code == 2
    assert told in ran.err


def test_a_cache_that_cannot_be_used_is_one_sentence(harness, config, tmp_path):
    (tmp_path / "file").write_text("")
    for command in (("run", config({})), ("env", "create", "fake")):
        refused(harness(*command, HARNESS_CACHE=str(tmp_path / "file")), "set HARNESS_CACHE")


def test_a_dry_run_counts_weights_as_each_stack_holds_them(harness, real_config, tmp_path):
    """One checkpoint for all; 16 bits, 32, packed by bitsandbytes, and a static cache of the length asked."""
    variants = [{"stack": "hf", "dtype": ["bf16", "fp32"]}, {"stack": "bnb", "quant": "nf4"}]
    variants += [{"stack": "hf", "cache": "static", "n_ctx": 8000}, {"stack": "llamacpp", "quant": "q8_0"}]
    path = real_config(*variants, model={"shape": "qwen1.5-0.5b"}, new_tokens=100)
    lines = harness("run", path, "--dry-run", "--json", HARNESS_CACHE=str(tmp_path / "empty")).json
    bf16, fp32, nf4, static, q8_0 = lines
    assert bf16["weights"] == "synthesize checkpoint"
    assert bf16["disk_bytes"] == 2 * 619_570_176
    assert [line["weights"] for line in (fp32, nf4, static)] == ["synthetic, nothing more to make"] * 3
    assert q8_0["weights"] == "convert f16, quantize q8_0"
    kv = 2 * 24 * 1024 * 2  # bytes a token, in 16 bits
    growing = 125 * kv * 25 // 24  # one layer of a cache that grows is held twice
    assert fp32["memory_bytes"] - bf16["memory_bytes"] == 2 * 619_570_176 + growing
    assert static["memory_bytes"] - bf16["memory_bytes"] == 8000 * kv - growing
    matrices = 24 * (4 * 1024 * 1024 + 3 * 1024 * 2816)
    assert bf16["memory_bytes"] - nf4["memory_bytes"] == matrices * 2 - matrices // 2 - matrices // 64 * 4


def test_a_dry_run_looks_at_weights_that_are_given(harness, real_config, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", entries(TINY))
    write_config(folder)
    write_gguf(tmp_path / "mine.gguf")
    models = [{"weights": "mine"}, {"name": "file", "weights": "mine.gguf"}]
    models += [{"name": "none", "weights": "nowhere"}]
    variants = [{"stack": "hf", "dtype": "fp32"}, {"stack": "llamacpp", "quant": "q4_0"}]
    path = real_config(*variants, models=models, new_tokens=9975)
    lines = harness("run", path, "--dry-run", "--json").json
    assert [(line["will_fail"] or [line["weights"]])[0] for line in lines] == [
        f"{folder} (bf16)",
        f"{folder}, convert f16, quantize q4_0",
        f"stack hf needs a Hugging Face checkpoint, but {folder}.gguf is a GGUF",
        f"{folder}.gguf, quantize q4_0",
        f"{tmp_path}/nowhere: no such file or directory",
        f"{tmp_path}/nowhere: no such file or directory",
    ]
    assert lines[0]["disk_bytes"] == 0
    kv_bytes = 2 * (TINY.count + 1) * TINY.kv_heads * TINY.head_dim * 4 * 10_000
    assert lines[0]["memory_bytes"] == 4 * decoder.parameters(TINY) + kv_bytes + (272 << 20)
    assert lines[1]["disk_bytes"] > 2 * decoder.parameters(TINY)


@pytest.mark.parametrize(
    ("option", "signum"), [([], signal.SIGINT), ([], signal.SIGHUP), (["--max-ctx"], signal.SIGINT)]
)
def test_of_what_is_interrupted_it_is_said_that_the_same_command_goes_on(
    config, background, tmp_path, option, signum
):
    """However often it is."""
    path = config({"load_ms": 20_000.0, "clock": "real"}, memory_budget="256MiB")
    process = background("run", path, *option)
    until(lambda: list(tmp_path.glob("results/**/request.json")), 600)
    while process.poll() is None:
        process.send_signal(signum)
        time.sleep(0.01)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert err.endswith(
        "finished work is kept: harness report results shows it, the same command continues\n"
    )
    (record,) = tmp_path.glob("results/**/record.json")
    assert json.loads(record.read_text())["outcome"] == "interrupted"


def test_a_dry_run_of_cells_that_cannot_be_ends_with_1_and_says_so_last(harness, real_config):
    path = real_config({"stack": "llamacpp", "quant": "q4_0"}, model={"weights": "nowhere.gguf"})
    for options in ([], ["--json"]):
        ran = harness("run", path, "--dry-run", *options)
        assert (ran.code, ran.err.splitlines()[-1]) == (1, "harness: of 1 cell, 1 will fail (exit code 1)")


def test_a_dry_run_says_where_it_would_write_what_and_that_it_does_not_fit(harness, real_config, small_disk):
    disk = small_disk("60m")
    config = real_config({"stack": "llamacpp", "quant": "q8_0"}, model={"shape": "qwen1.5-0.5b"})
    ran = harness("run", config, "--dry-run", HARNESS_CACHE=str(disk))
    assert ran.code == 1
    assert f"of weights to make or fetch, in {disk} (0.06 GB free)" in ran.err
    assert f"GB of weights are to be written to {disk}, where 0.06 GB is free" in ran.words
    assert "1 will fail (exit code 1)" in ran.err


def test_a_run_whose_weights_do_not_fit_the_disk_is_refused_before_it_begins(
    harness, real_config, small_disk, llamacpp_interpreter, tmp_path
):
    disk = small_disk("60m")
    (disk / "envs").symlink_to(cache_folder() / "envs")
    config = real_config({"stack": "llamacpp", "quant": "q8_0"}, model={"shape": "qwen1.5-0.5b"})
    ran = harness("run", config, "--wait", HARNESS_CACHE=str(disk))
    assert ran.code == 2
    assert f"nothing was measured: 3.1 GB of weights are to be written to {disk}, where" in ran.err
    assert not [*(tmp_path / "results").rglob("record.json")]


def test_a_dry_run_names_weights_that_are_not_there(harness, tmp_path):
    (tmp_path / "there.gguf").write_bytes(b"")
    (tmp_path / "mine-q4_0.gguf").write_bytes(b"")
    (tmp_path / "c.yaml").write_text("""\
models:
  - {name: one, weights: there.gguf}
  - {name: two, weights: "mine-{quant}.gguf"}
  - {name: three, weights: {hf: {repo: a/b}, gguf: nowhere.gguf}}
  - {name: four, weights: {gptq: "four-{bits}"}}
variants:
  - {stack: llamacpp, quant: [q4_0, q8_0, q6_k], models: ["*o*"]}
  - {stack: gptq, models: [four]}
exclude:
  - {model: two, quant: q6_k}
""")
    ran = harness("run", "--dry-run", "c.yaml")
    assert ran.code == 1
    assert ran.err.endswith("harness: of 9 cells, 9 will fail (exit code 1)\n")
    for name in ("mine-q8_0.gguf", "four-4"):
        assert f"{tmp_path}/{name}: no such file or directory" in ran.words


def test_a_dry_run_names_cells_whose_options_exclude_each_other(harness, real_config):
    variant = {"stack": "llamacpp", "quant": "q4_0", "type_v": ["q8_0", "f16"]}
    ran = harness(
        "run", "--dry-run", real_config(variant, model={"shape": "qwen1.5-0.5b", "weights": "synthetic"})
    )
    _, quantized, plain, *_ = ran.out.splitlines()
    assert ran.code == 1
    assert quantized.startswith("qwen1.5-0.5b.llamacpp.q4_0-type_v=q8_0.decode  will fail  ")
    assert "will fail" not in plain
    assert "will fail: quantized V cache requires flash_attn to be enabled (" in ran.words


def test_one_cell_is_no_cells(harness, config):
    assert "harness: 1 cell\n" in harness("run", "--dry-run", config({})).err
    assert "harness: 2 cells\n" in harness("run", "--dry-run", config({}, {}, repeats=3)).err


def test_synth_makes_a_checkpoint_or_ggufs_of_it(harness, llamacpp_interpreter):
    folder = Path(harness("env", "synth", "tiny-llama", "--format", "hf").out.strip())
    assert (folder / "config.json").exists()
    (stored,) = harness("env", "synth", "tiny-llama", "--format", "hf", "--json").json
    said = {"path": str(folder), "format": "hf", "quant": "bf16", "bpw": 16}
    assert stored | said == stored
    q8_0, f16 = harness("env", "synth", "tiny-llama", "--quant", "q8_0", "f16", "--json").json
    assert [row["quant"] for row in (q8_0, f16)] == ["q8_0", "f16"]
    assert q8_0["parameters"] == f16["parameters"] == stored["parameters"]
    assert q8_0["bpw"] < 9 < f16["bpw"]


def test_without_a_command_it_says_where_the_user_stands(harness, config):
    machine, measured, then = harness().out.splitlines()
    assert machine.startswith("machine:  ")
    assert measured == "measured: nothing yet in results/"
    assert then.startswith("next:     harness run quickstart")
    harness("run", config({}))
    _, measured, then = harness().out.splitlines()
    assert re.fullmatch(
        r"measured: 1 cell of 1 model, last on \d{4}-\d\d-\d\d \(harness report --list\)", measured
    )
    assert then.startswith("next:     harness report --open")


def test_run_without_a_config_offers_those_that_are_here(harness, config):
    config({})
    refused(harness("run"), "here: fake.yaml; shipped: ")


def test_open_shows_the_newest_page_or_that_of_a_folder(harness, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("webbrowser.open", lambda address: shown.append(address) or True)
    (tmp_path / "reports").mkdir()
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    for age, name in enumerate(("old.html", "new.html")):
        (tmp_path / "reports" / name).write_text("")
        os.utime(tmp_path / "reports" / name, (age, age))
    assert harness("report", "--open").code == 0
    assert harness("report", "published/rtx4090-qwen1.5", "-o", "study.html", "--open").code == 0
    assert [address.rpartition("/")[2] for address in shown] == ["new.html", "study.html"]
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    ran = harness("report", "--open")
    assert (ran.code, "no browser was found here" in ran.err) == (1, True)


def test_over_ssh_open_says_how_to_fetch_the_page_or_to_look_at_it(harness, tmp_path, monkeypatch):
    for display in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(display, raising=False)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "my page.html").write_text("")
    ran = harness("report", "--open", SSH_CONNECTION="10.0.0.2 50000 10.0.0.7 22")
    assert ran.code == 0
    assert f"@10.0.0.7:{tmp_path}/reports/my page.html' .\n" in ran.err
    assert "ssh -L 8000:127.0.0.1:8000 " in ran.err
