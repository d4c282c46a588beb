"""The config: the meaning of a YAML file, and one sentence for each mistake in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from harness.config import ConfigError, Decode, Experiment, Grow, MaxCtx, load
from harness.config.schema import schema
from harness.config.variants import weights_format
from harness.theory.hf_config import SHAPES

CONFIGS = Path(__file__).parent.parent / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
EIGHT = ["q8_0", "q6_k", "q5_k_m", "q5_0", "q4_k_m", "q4_0", "q3_k_m", "q2_k"]

SMALL = """\
protocol:
  new_tokens: 256
models:
  - shape: qwen1.5-0.5b
variants:
  - stack: llamacpp
    quant: q4_0
"""


def written(tmp_path: Path, text: str | bytes, *settings: str) -> Experiment:
    path = tmp_path / "small.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(path, settings)


def mistake(tmp_path: Path, text: str | bytes, *settings: str) -> str:
    """The sentence, with the folder left out."""
    with pytest.raises(ConfigError) as wrong:
        written(tmp_path, text, *settings)
    return str(wrong.value).replace(f"{tmp_path}{os.sep}", "")


def with_variant(row: str) -> str:
    return SMALL.replace("  - stack: llamacpp\n    quant: q4_0\n", f"  - {row}\n")


def names(experiment: Experiment) -> list[str]:
    return [variant.name for variant in experiment.variants]


# The meaning of a file


def test_a_further_model_of_an_option_is_relative_to_the_file_and_keeps_its_name(tmp_path):
    row = "{stack: llamaserver, speculate: draft, draft: [drafts/d.gguf, /x/e.gguf]}"
    one, other = written(tmp_path, with_variant(row)).variants
    assert one.options["draft"] == str(tmp_path / "drafts" / "d.gguf")
    assert other.options["draft"] == "/x/e.gguf"
    assert one.name == "draft=drafts-d.gguf-speculate=draft"
    assert "expected a path, got 3" in mistake(tmp_path, with_variant("{stack: llamaserver, draft: 3}"))


def test_a_small_file_gets_the_protocol_of_the_study(tmp_path):
    experiment = written(tmp_path, SMALL.replace("protocol:\n  new_tokens: 256\n", ""))
    assert (experiment.name, experiment.device, experiment.gpu) == ("small", "cpu", None)
    protocol = experiment.protocol
    assert (protocol.prompt_tokens, protocol.new_tokens, protocol.repeats) == (25, 128, 3)
    assert (protocol.timeout_s, protocol.threads, protocol.warmup.tolerance) == (7200, None, 0.02)
    [(model, variant, workload)] = experiment.combinations()
    assert (model.name, model.weights.kind) == ("qwen1.5-0.5b", "synthetic")
    assert model.made == SHAPES["qwen1.5-0.5b"]
    assert (variant.stack, variant.name, variant.options) == ("llamacpp", "q4_0", {"quant": "q4_0"})
    assert workload == Decode(new_tokens=128, prompt_tokens=25)


@pytest.mark.parametrize(
    ("more", "prefix"),
    [("", ""), (", name: mine, n_batch: 64", "mine-")],  # a name is told apart by what varies
)
def test_lists_make_a_matrix_with_the_first_key_outermost(tmp_path, more, prefix):
    text = with_variant(f"{{stack: llamacpp, quant: [q8_0, q4_0], threads: [1, 2]{more}}}")
    found = ["q8_0-threads=1", "q8_0-threads=2", "q4_0-threads=1", "q4_0-threads=2"]
    assert names(written(tmp_path, text)) == [prefix + name for name in found]


def test_a_variant_is_named_by_what_differs_from_the_defaults(tmp_path):
    row = "{stack: llamacpp, threads: 2, quant: q4_0, mmap: true, flash_attn: on}"
    experiment = written(tmp_path, with_variant(row))
    assert names(experiment) == ["q4_0-flash_attn=true-threads=2"]
    options = {"threads": 2, "quant": "q4_0", "mmap": True, "flash_attn": True}
    assert experiment.variants[0].options == options


def test_exclude_and_include_change_the_matrix(tmp_path):
    text = """\
models:
  - shape: tiny-qwen2
  - shape: tiny-llama
variants:
  - {stack: llamacpp, quant: [q8_0, q4_0], threads: [1, 2]}
  - {stack: fake, models: ["*llama"]}
exclude:
  - {model: tiny-l*, stack: llamacpp, quant: [q8_0], threads: 2}
  - {variant: q4_0*, threads: 1}
include:
  - {stack: llamacpp, quant: f16, models: [tiny-qwen2]}
"""
    found = [(m.name, v.stack, v.name) for m, v, _ in written(tmp_path, text).combinations()]
    assert found == [
        ("tiny-qwen2", "llamacpp", "q8_0-threads=1"),
        ("tiny-qwen2", "llamacpp", "q8_0-threads=2"),
        ("tiny-qwen2", "llamacpp", "q4_0-threads=2"),
        ("tiny-llama", "llamacpp", "q8_0-threads=1"),
        ("tiny-llama", "llamacpp", "q4_0-threads=2"),
        ("tiny-llama", "fake", "f16"),
        ("tiny-qwen2", "llamacpp", "f16"),
    ]


def test_each_workload_takes_the_lengths_it_lacks_from_the_protocol(tmp_path):
    text = SMALL + "workloads:\n  - {kind: decode}\n  - {kind: decode, new_tokens: 8, prompt_tokens: 4}\n"
    lengths = [(w.prompt_tokens, w.new_tokens) for _, _, w in written(tmp_path, text).combinations()]
    assert lengths == [(25, 256), (4, 8)]


def test_workloads_of_memory_time_nothing_or_grow_to_a_target(tmp_path):
    text = SMALL + "workloads:\n  - {kind: max_ctx, fill: false}\n  - {kind: grow, target: 100}\n"
    search, grow = (workload for _, _, workload in written(tmp_path, text).combinations())
    assert search == MaxCtx(fill=False, prompt_tokens=25)
    assert grow == Grow(target=100, prompt_tokens=25)
    assert (search.new_tokens, grow.new_tokens) == (0, 75)


def test_a_rule_may_exclude_a_workload_of_some_variants(tmp_path):
    text = SMALL + "workloads: [{kind: max_ctx}, {kind: grow}]\nexclude: [{workload: grow, quant: q4_0}]\n"
    kinds = [workload.kind for _, _, workload in written(tmp_path, text).combinations()]
    assert kinds == ["max_ctx"]


def test_weights_come_from_a_path_the_hub_or_are_synthetic(tmp_path):
    text = """\
models:
  - weights: gguf/mine-{quant}.gguf
  - weights: {path: "~/other.gguf"}
  - weights: {repo: Qwen/Qwen1.5-0.5B-Chat-GGUF, file: "qwen1_5-0_5b-chat-{quant}.gguf"}
  - {name: made, shape: tiny-llama, weights: {synthetic: true, seed: 7}}
  - weights: {repo: Qwen/Qwen1.5-0.5B}
  - weights: ~/models/Qwen1.5-1.8B
variants:
  - {stack: fake}
"""
    mine, other, hub, made, checkpoint, folder = written(tmp_path, text).models
    assert (mine.name, mine.made) == ("mine", None)
    assert (mine.weights.kind, mine.weights.path) == ("path", str(tmp_path / "gguf/mine-{quant}.gguf"))
    assert other.weights.path == str(Path("~/other.gguf").expanduser())
    assert (hub.name, hub.weights.kind, hub.weights.revision) == ("qwen1_5-0_5b-chat", "hub", "main")
    assert (made.weights.kind, made.weights.seed) == ("synthetic", 7)
    assert (checkpoint.name, checkpoint.weights.kind) == ("Qwen1.5-0.5B", "hub")
    assert (checkpoint.weights.file, checkpoint.weights.revision) == (None, "main")
    assert (folder.name, folder.weights.kind) == ("Qwen1.5-1.8B", "path")


@pytest.mark.parametrize(
    ("row", "file", "name"),
    [
        ("weights: austen-4m", "austen-4m", "austen-4m"),  # the name of a shipped model
        ("weights: austen", "austen", "austen"),  # nearly that
        ("{shape: qwen1.5-0.5b, weights: tuned.gguf}", "tuned.gguf", "tuned"),
        ("{shape: qwen1.5-0.5b, weights: {gguf: tuned.gguf}}", "tuned.gguf", "tuned"),
        ("{name: given, shape: qwen1.5-0.5b, weights: tuned.gguf}", "tuned.gguf", "given"),
    ],
)
def test_a_file_of_the_users_is_measured_and_goes_by_its_own_name(tmp_path, row, file, name):
    (tmp_path / file).touch()
    [model] = written(tmp_path, f"models:\n  - {row}\nvariants:\n  - {{stack: fake}}\n").models
    assert (model.name, model.weights.path) == (name, str(tmp_path / file))


BY_FORMAT = """\
models:
  - shape: qwen1.5-7b
    weights:
      hf: {repo: Qwen/Qwen1.5-7B-Chat}
      gguf: {repo: Qwen/Qwen1.5-7B-Chat-GGUF, file: "qwen1_5-7b-chat-{quant}.gguf"}
      gptq: {repo: "Qwen/Qwen1.5-7B-Chat-GPTQ-Int{bits}"}
      awq: awq-here
variants:
  - {stack: llamacpp, quant: q4_0}
"""


def test_weights_may_be_named_by_the_format_that_stacks_load(tmp_path):
    [model] = written(tmp_path, BY_FORMAT).models
    named = {form: model.weights_for(form) for form in ("hf", "gguf", "gptq", "awq")}
    assert [weights and weights.kind for weights in named.values()] == ["hub", "hub", "hub", "path"]
    assert named["gptq"].filled(None, 8).repo == "Qwen/Qwen1.5-7B-Chat-GPTQ-Int8"
    filled = named["gguf"].filled("q4_0", None)
    assert (filled.file, filled.revision) == ("qwen1_5-7b-chat-q4_0.gguf", "main")
    assert named["awq"].path == str(tmp_path / "awq-here")
    jsonschema.validate(yaml.safe_load(BY_FORMAT), schema())


def test_a_gguf_is_converted_and_synthetic_weights_are_packed_where_a_format_is_not_named(tmp_path):
    def of(weights: str) -> dict[str, str | None]:
        text = SMALL.replace("qwen1.5-0.5b", f"tiny-llama\n    weights: {weights}")
        [model] = written(tmp_path, text).models
        found = {form: model.weights_for(form) for form in ("hf", "gguf", "gptq", "awq")}
        return {form: source and (source.repo or source.kind) for form, source in found.items()}

    assert of("{hf: {repo: a/b}}") == {"hf": "a/b", "gguf": "a/b", "gptq": None, "awq": None}
    made = {"hf": "synthetic", "gguf": "synthetic", "gptq": "synthetic"}
    assert of("{hf: synthetic, awq: {repo: c/d}}") == {**made, "awq": "c/d"}
    assert of("{gptq: {repo: a/b}}") == {"hf": None, "gguf": None, "gptq": "a/b", "awq": None}
    assert of("{repo: a/b}") == dict.fromkeys(("hf", "gguf", "gptq", "awq"), "a/b")


def test_a_setting_puts_a_local_path_in_place_of_a_repository(tmp_path):
    [model] = written(tmp_path, BY_FORMAT, "models.0.weights.gptq=/data/Int{bits}").models
    source = model.weights_for("gptq")
    assert (source.kind, source.filled(None, 4).path) == ("path", "/data/Int4")


def test_a_shape_may_be_spelled_out(tmp_path):
    shape = "{arch: qwen2, vocab_size: 512, hidden_size: 256, layers: 2, intermediate_size: 512, "
    shape += "heads: 4, kv_heads: 2}"
    [model] = written(tmp_path, SMALL.replace("shape: qwen1.5-0.5b", f"{{name: own, shape: {shape}}}")).models
    assert (model.made.head_dim, model.made.kv_heads) == (64, 2)
    assert "attn_q.bias" in {piece.name for piece in model.made.runs[0][0].pieces}


def test_the_config_is_kept_as_given_with_its_settings(tmp_path):
    experiment = written(tmp_path, SMALL, "repeats=1", "variants.0.quant=[q8_0, q4_0]")
    assert experiment.source == {
        "protocol": {"new_tokens": 256, "repeats": 1},
        "models": [{"shape": "qwen1.5-0.5b"}],
        "variants": [{"stack": "llamacpp", "quant": ["q8_0", "q4_0"]}],
    }


def test_an_experiment_does_not_change(tmp_path):
    experiment = written(tmp_path, SMALL)
    with pytest.raises(ValidationError, match="frozen"):
        experiment.device = "cuda"


def test_yaml_surprises_are_text_and_1e3_is_a_number(tmp_path):
    assert written(tmp_path, SMALL, "timeout_s=1e3").protocol.timeout_s == 1000
    assert written(tmp_path, SMALL, "new_tokens=1_000").protocol.new_tokens == 1000
    assert written(tmp_path, SMALL, "name=2024-01-02").name == "2024-01-02"
    assert "expected a whole number" in mistake(tmp_path, SMALL, "new_tokens=1:30")
    assert "expected a whole number" in mistake(tmp_path, SMALL, "new_tokens=010")


# --set


def test_settings_reach_into_the_file_and_the_last_one_wins(tmp_path):
    settings = ["new_tokens=8", "protocol.new_tokens=16", "protocol.warmup.max_windows=3", "device=cuda:0"]
    experiment = written(tmp_path, SMALL, *settings, "gpu=RTX 4090", "workloads=[{kind: decode}]")
    assert (experiment.protocol.new_tokens, experiment.protocol.warmup.max_windows) == (16, 3)
    assert (experiment.device, experiment.gpu) == ("cuda:0", "RTX 4090")


def test_a_setting_of_a_stack_is_one_of_every_variant_and_of_the_included_that_have_it(tmp_path):
    both = SMALL + "include: [{stack: llamacpp, quant: q8_0, name: more}]\n"
    experiment = written(tmp_path, both, "flash_attn=true", "warmup.max_windows=3")
    assert experiment.protocol.warmup.max_windows == 3
    of_llamacpp = [each for each in (*experiment.variants, *experiment.include) if each.stack == "llamacpp"]
    assert [each.options["flash_attn"] for each in of_llamacpp] == [True, True]
    assert "did you mean flash_attn?" in mistake(tmp_path, both, "flash_atn=true")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("new_token=8", "new_token: unknown key; did you mean new_tokens?"),
        ("protocol.repeat=1", "protocol.repeat: unknown key; did you mean repeats?"),
        ("new_tokens", "expected key=value"),
        ("=3", "expected key=value"),
        ("new_tokens=0", "protocol.new_tokens: must be at least 1, got 0"),
        ("new_tokens=", "protocol.new_tokens: expected a whole number, got nothing"),
        ("variants.3.quant=q8_0", "variants has rows 0 to 0, no 3"),
        ("variants.x=1", "variants has rows 0 to 0, no x"),
        ("device.x=1", 'device is "cpu", it has no x inside'),
        ("variants.0.quant=Q4_K_M", 'variants.0.quant: unknown quant "Q4_K_M"; did you mean q4_k_m?'),
        ("models=&a [*a]", "anchors and aliases (& and *) are not allowed; write the"),
        ("device=[", "is not valid YAML: "),
    ],
)
def test_a_mistaken_setting_is_named_in_place_of_a_line(tmp_path, setting, sentence):
    said = mistake(tmp_path, "device: cpu\n" + SMALL, setting)
    assert said.startswith(f"--set {setting}: {sentence}")


def test_a_very_deep_setting_is_refused(tmp_path):
    assert "nested more than 20 deep" in mistake(tmp_path, SMALL, "protocol" + ".a" * 100_000 + "=1")


# Mistakes in the file


# By a line of SMALL and the place of its mistakes: the replacement, and the rest of the sentence.
MISTAKES = {
    ("new_tokens: 256", "2: protocol."): {
        "new_token: 256": "new_token: unknown key; did you mean new_tokens?",
        'new_tokens: "256"': 'new_tokens: expected a whole number, got "256"',
        "new_tokens: true": "new_tokens: expected a whole number, got true",
        "new_tokens: 2.5": "new_tokens: expected a whole number, got 2.5",
        "new_tokens: 0": "new_tokens: must be at least 1, got 0",
        "new_tokens: -5": "new_tokens: must be at least 1, got -5",
        "new_tokens: 10_000_001": "new_tokens: must be at most 10000000, got 10000001",
        "timeout_s: .inf": "timeout_s: must be a finite number, got inf",
        "timeout_s: .nan": "timeout_s: must be a finite number, got nan",
        "timeout_s: 0": "timeout_s: must be more than 0, got 0",
        "repeats: 1001": "repeats: must be at most 1000, got 1001",
        "order_seed: -1": "order_seed: must be at least 0, got -1",
        "threads: 0": "threads: must be at least 1, got 0",
        "warmup: {tolerance: 1}": "warmup.tolerance: must be less than 1, got 1",
        "warmup: {window: 8}": "warmup.window: unknown key; did you mean window_tokens?",
    },
    ("quant: q4_0", "7: variants.0."): {
        "quant: Q4_0": 'quant: unknown quant "Q4_0"; did you mean q4_0?',
        "quant: [q8_0, q4km]": 'quant.1: unknown quant "q4km"; did you mean q4_k_m?',
        "quant: 4": "quant: expected text, got 4 (put it in quotes)",
        "quant: []": "quant: an empty list gives no variants",
        "threads: 0": "threads: must be at least 1, got 0",
        "threads: on": "threads: expected a whole number, got true",
        "flash_attn: auto": 'flash_attn: expected true or false, got "auto"',
        "n_batch: 4294967297": "n_batch: must be at most 2147483647, got 4",
        "n_ctx: 128": "n_ctx: n_ctx 128 is smaller than prompt_tokens 25 + new_tokens 256 = 281",
        "models: [gwen*]": 'models.0: "gwen*" matches no model; known: qwen1.5-0.5b',
        "name: a/b": "name: must be at most 64 of ",
    },
    ("shape: qwen1.5-0.5b", "4: models.0"): {
        "shape: qwen1.5-0.6b": '.shape: unknown shape "qwen1.5-0.6b"; did you mean qwen1.5-0.5b?',
        "shape: 0.5": ".shape: expected a shape's name, got 0.5",
        "weights: synthetic": ": synthetic weights need a shape; harness theory ",
        "weights: sintetic": '.weights: unknown weights "sintetic"; did you ',
        "weights: {pth: x}": ".weights.pth: unknown key; did you mean path?",
        "weights: {repo: a/b, file: model.safetensors}": ".weights: file must be a .gguf; omit it to",
        "weights: {file: b.gguf}": ".weights.repo: is missing",
        "weights: {hf: a/b, gptk: c}": ".weights.gptk: unknown key; did you mean gptq?",
        "weights: {ggff: c}": ".weights.ggff: unknown key; did you mean gguf",
        "weights: {awq: }": ".weights.awq: expected synthetic, a path or a",
        "weights: {hf: {hf: a}}": ".weights.hf.hf: unknown key",
        "weights: {gptq: {repo: a/b, file: c.gguf}}": ".weights.gptq.file: gptq weights are a "
        "checkpoint: a repo without file",
        "weights: {awq: synthetic}": ": synthetic weights need a shape",
        'weights: {repo: "a/b-{bit}"}': '.weights.repo: unknown placeholder "{bit}"; known: {quant}, {bits}',
        'weights: {repo: "a/b{"}': ".weights.repo: must be org/name",
        "weights: {repo: a, file: b}": ".weights.repo: must be org/name",
        "weights: {repo: a/b, file: ../c}": ".weights: file must be a path in",
        "weights: a-{q}.gguf": '.weights: unknown placeholder "{q}"; known:',
        "name: ../x": ".name: must be at most 64 of ",
    },
}
MISTAKES_BEFORE_MODELS = {  # on a line of their own
    "device: cdua": "device: must be cpu, cuda, cuda:N, metal, vulkan or hip, got ",
    "gpu: RTX 4090": "gpu: needs a GPU device such as cuda; device is cpu",
    "workloads: [{kind: decod}]": 'workloads.0.kind: unknown workload "decod"; did you mean decode?',
    "workloads: [{new_tokens: 5}]": "workloads.0.kind: is missing; known: decode, max_ctx, grow",
    "workloads: [{kind: decode}, {kind: decode, new_tokens: 256}]": "workloads.1: the same as workloads.0",
    "exclude: [{quant: q8_0}]": "exclude.0: matches no combination of model, variant and workload",
    "workloads: [{kind: grow, target: 9}]": "workloads.0.target: must be above the prompt's 25 tokens, got 9",
    "workloads: [{kind: max_ctx, new_tokens: 5}]": "workloads.0.new_tokens: unknown key",
    "workloads: [{kind: max_ctx}, {kind: max_ctx, fill: true}]": "workloads.1: the same as workloads.0",
    "exclude: [{workload: grow}]": "exclude.0: matches no combination of model, variant and workload",
    "exclude: [{qaunt: q4_0}]": "exclude.0.qaunt: unknown key; did you mean quant?",
    "exclude: [{quant: q4_0}]": "exclude: leaves nothing to measure",
    "exclude: [{}]": "exclude.0: is empty, which would exclude everything",
    "include: [{stack: llamacpp, quant: q4_0}]": "include.0: llamacpp q4_0 of qwen1.5-0.5b is already in "
    "variants.0; give one a name",
    "protocol: {}": "protocol: given twice, first on line 1",
}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [(old, new, at + rest) for (old, at), rows in MISTAKES.items() for new, rest in rows.items()]
    + [("models:", f"{new}\nmodels:", f"3: {rest}") for new, rest in MISTAKES_BEFORE_MODELS.items()]
    + [
        ("protocol:", "protocoll:", "1: protocoll: unknown key; did you mean protocol?"),
        ("quant:", "quants:", "7: variants.0.quants: unknown key; did you mean quant?"),
        ("shape:", "shapes:", "4: models.0.shapes: unknown key; did you mean shape?"),
        ("\n  new_tokens: 256", "", "1: protocol: expected a mapping (key: value), got nothing"),
        ("llamacpp", "llama.cpp", '6: variants.0.stack: unknown stack "llama.cpp"; did you mean llamacpp?'),
        ("stack: llamacpp\n    quant: q4_0", "quant: q4_0", "6: variants.0.stack: is missing"),
        ("- shape: qwen1.5-0.5b", "[]", "3: models: "),
        (
            "models:",
            "models:\n  - shape: qwen1.5-0.5b",
            "5: models.1: the name qwen1.5-0.5b is that of models.0; give one a name",
        ),
        (
            "  new_tokens: 256",
            "  repeats: 1\n  repeats: 2",
            "3: protocol.repeats: given twice, first on line 2",
        ),
    ],
)
def test_a_mistake_is_a_sentence_with_its_line_and_key(tmp_path, old, new, sentence):
    said = mistake(tmp_path, SMALL.replace(old, new, 1))
    assert said.startswith("small.yaml:" + sentence)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"hidden_size": 258}, "hidden_size 258 is not a multiple of heads 4"),
        ({"hidden_size": 12}, "head_dim is odd"),
        ({"layers": -1}, "layers: must be at least 1, got -1"),
        ({"arch": "qwen3"}, 'arch: cannot be "qwen3"; did you mean qwen2?'),
        ({"head": 4}, "head: unknown key; did you mean heads?"),
    ],
)
def test_a_shape_without_sense_is_refused(tmp_path, change, sentence):
    shape = {"arch": "qwen2", "vocab_size": 512, "hidden_size": 256, "layers": 2}
    shape |= {"intermediate_size": 512, "heads": 4, "kv_heads": 4} | change
    text = SMALL.replace("- shape: qwen1.5-0.5b", "- " + json.dumps({"name": "own", "shape": shape}))
    said = mistake(tmp_path, text)
    assert said.startswith("small.yaml:4: models.0.shape")
    assert sentence in said


def test_weights_per_quant_need_a_quant(tmp_path):
    text = SMALL.replace("shape: qwen1.5-0.5b", "weights: m-{quant}.gguf").replace(
        "quant: q4_0", "threads: 1"
    )
    assert mistake(tmp_path, text).startswith("small.yaml:6: variants.0: needs a quant: the weights of m")


def test_several_mistakes_are_told_together_and_many_are_cut_short(tmp_path):
    said = mistake(tmp_path, SMALL.replace("q4_0", "q4").replace("0.5b", "0.6b")).splitlines()
    assert [line.split(":")[1] for line in said] == ["4", "7"]
    many = mistake(tmp_path, SMALL + "".join(f"key{i}: 1\n" for i in range(300))).splitlines()
    assert len(many) == 11
    assert many[-1] == "and 290 more"


def test_mistakes_in_all_parts_of_a_file_are_told_together(tmp_path):
    text = """\
protocol: {new_tokens: many}
models:
  - shape: qwen1.5-0.5b
  - shape: qwen1.5-0.6b
variants:
  - {stack: llamacpp, quant: q4}
  - {stack: hf, dtyp: bf16}
  - {stack: hf, cache: static, n_ctx: 64}
workloads:
  - kind: decod
  - kind: grow
    target: 20
exclude:
  - qaunt: q4_0
  - cache: static
"""
    said = mistake(tmp_path, text).splitlines()
    assert sorted(int(line.split(":")[1]) for line in said) == [1, 4, 6, 7, 10, 14]


def test_a_mistake_that_follows_from_another_is_not_told(tmp_path):
    """Without the protocol's lengths nobody knows whether n_ctx is too small; a stack that is misspelt may
    have the option of a rule."""
    text = with_variant("{stack: llamacpp, n_ctx: 300}").replace("protocol", "protocoll")
    assert mistake(tmp_path, text) == "small.yaml:1: protocoll: unknown key; did you mean protocol?"
    text = with_variant("{stack: llamacp}") + "exclude: [{flash_attn: true}]\n"
    assert mistake(tmp_path, text).startswith("small.yaml:6: variants.0.stack: unknown stack")
    assert "\n" not in mistake(tmp_path, text)


def test_the_line_is_that_of_a_key_deep_in_a_long_file(tmp_path):
    text = SMALL.replace("    quant: q4_0\n", "\n# a comment\n\n    quant:\n      - q8_0\n      - q4\n")
    assert mistake(tmp_path, text).startswith("small.yaml:12: variants.0.quant.1: unknown quant")


# Files that are no config


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "small.yaml: is empty"),
        ("# nothing\n\n", "small.yaml: is empty"),
        ("- a\n- b\n", "small.yaml:1: expected key: value lines at the top"),
        ("models: [\n", "small.yaml:2: is not valid YAML: while parsing a flow node"),
        ("a: b: c\n", "small.yaml:1: is not valid YAML: mapping values are not allowed here"),
        ("models:\n\t- shape: x\n", "small.yaml:2: is not valid YAML: a tab; YAML is indented by spaces"),
        (
            "models: [{shape: tiny-qwen2}]\n",
            "small.yaml:1: variants: is missing, such as variants: [{stack: ",
        ),
        ("a: 1\n---\nb: 2\n", "small.yaml:2: is not valid YAML: expected a single document"),
        (b"GGUF\x03\x00\x00\x00", "small.yaml: is a model, not a config: name it as `weights` of a model"),
        (b"name: \xff\xfe\n", "small.yaml:1: is not UTF-8 text (byte 0xff)"),
        ("a: 1\nname: \x07\n", "small.yaml:2: contains the control character U+0007"),
        ('a: 1\nname: "\\e[31m"\n', "small.yaml:2: contains a line break or the control character U+001B"),
        ('name: "\\uD800"\n', "small.yaml:1: contains a line break or the control character U+D800"),
        ('name: "\\UFFFFFFFF"\n', "small.yaml:1: is not valid YAML"),
        ("name: !!python/object/apply:os.system ['touch ran']\n", "small.yaml:1: tags are not allowed: "),
        ("name: !mine x\n", "small.yaml:1: tags are not allowed: !mine"),
        ("a: &a [1]\nb: *a\n", "small.yaml:1: anchors and aliases (& and *) are not allowed"),
        ("<<: {device: cpu}\n" + SMALL, "small.yaml:1: <<: unknown key"),
        ("? [a]\n: 1\n", "small.yaml:1: a key must be a word"),
        ("? [a\x85b]\n: 1\n", "small.yaml:1: a key must be a word"),
        ("x" * (1 << 20) + ": 1", "small.yaml: is no GGUF, and too large (over 1 MiB)"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_a_sentence(tmp_path, text, sentence):
    assert mistake(tmp_path, text).startswith(sentence)


def test_a_folder_a_missing_file_and_a_pipe_are_refused_in_a_sentence(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path, sentence in (
        (tmp_path, "is a folder, not a YAML file"),
        (tmp_path / "none.yaml", "no such file"),
        (tmp_path / "none" / "none.yaml", "no such file"),
        (tmp_path / "pipe.yaml", "is not a regular file"),
        (Path("/dev/zero"), "is not a regular file"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"{path}: {sentence}")):
            load(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused_in_a_sentence(tmp_path):
    path = tmp_path / "secret.yaml"
    path.write_text(SMALL)
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load(path)


BOMB = "a0: &a0 [lol, lol]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(60))


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "a: " + "[" * 100_000,
        "a: " + "[\n" * 100_000,
        "a: " + "{b: " * 100_000,
        "- " * 100_000,
        "".join(" " * i + "a:\n" for i in range(1400)),
        "a: [" + "1," * 500_000 + "]",
        "".join(f"k{i}: 1\n" for i in range(100_000)),
        "a: " + "9" * 1_000_000,
        "a: 1." + "9" * 1_000_000,
        "#" * 1_000_000,
        "x" * 1_000_000 + ": 1",
        SMALL.replace("q4_0", "[" + "q4_0," * 9000 + "]"),
        with_variant(f"{{stack: llamacpp, n_batch: {list(range(999))}, n_ubatch: {list(range(999))}}}"),
        SMALL.replace("quant: q4_0", f"n_ctx: {list(range(1, 9000))}"),
        SMALL + f"exclude: [{'{model: z},' * 4000}]",
    ],
    ids=lambda text: text[:12].strip(),
)
def test_a_hostile_file_is_refused_in_bounded_time_and_words(tmp_path, text):
    start = time.process_time()  # what others take of the CPU is not in it
    said = mistake(tmp_path, text)
    assert time.process_time() - start < 10
    assert len(said) < 3000
    assert len(said.splitlines()) <= 11


def test_a_hostile_file_takes_little_memory(tmp_path):
    path = tmp_path / "bomb.yaml"
    path.write_text("a: " + "[" * 1_000_000)
    # Not getrusage's peak: on Linux it begins at the size of the process that forked.
    script = (
        "import sys; from pathlib import Path; from harness.config import ConfigError, load\n"
        "from runners.worker import peak_rss_bytes\n"
        "try: load(Path(sys.argv[1]))\n"
        "except ConfigError: print(peak_rss_bytes())"
    )
    ran = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 200e6


# What is shipped


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_loads_and_fits_the_schema_its_first_line_names(path):
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    assert load(path).name == path.stem
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.Draft202012Validator(schema()).validate(yaml.safe_load(text))


def test_the_shipped_configs_measure_what_the_issue_asks():
    quick = load(CONFIGS / "quickstart.yaml")
    assert (quick.protocol.new_tokens, quick.protocol.repeats, len(quick.combinations())) == (256, 3, 5)
    cpu = load(CONFIGS / "cpu-qwen15-0.5b.yaml")
    assert names(cpu) == EIGHT
    assert (cpu.protocol.prompt_tokens + cpu.protocol.new_tokens, cpu.protocol.repeats) == (10_000, 1)
    study = load(CONFIGS / "4090-qwen15.yaml")
    assert (study.device, study.gpu, len(study.models)) == ("cuda", "RTX 4090", 8)
    assert [v.name for v in study.variants if v.stack == "llamacpp"] == EIGHT
    counts = Counter(variant.stack for variant in study.variants)
    assert counts == {"llamacpp": 8, "hf": 1, "bnb": 2, "gptq": 3, "autoawq": 6}
    for model, variant, _ in study.combinations():
        weights = model.weights_for(weights_format(variant))
        assert str(weights.repo).startswith("Qwen/Qwen1.5-")


def test_the_shipped_schema_is_current():
    shipped = json.loads((CONFIGS / "schema.json").read_text())
    assert shipped == schema(), "run: python -m harness.config.schema > configs/schema.json"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("new_tokens", "new_token"),
        ("256", '"256"'),
        ("256", "0"),
        ("quant:", "quants:"),
        ("q4_0", "Q4_0"),
        ("q4_0", "[q4_0, 4]"),
        ("llamacpp", "llama.cpp"),
        ("models:", "workloads: [{kind: decod}]\nmodels:"),
        ("models:", "exclude: [{}]\nmodels:"),
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(tmp_path, old, new):
    text = SMALL.replace(old, new, 1)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), schema())
    assert mistake(tmp_path, text)


def test_a_whole_number_of_an_option_with_fractions_is_as_it_was_written_in_the_name(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "device: cpu\nmodels: [{shape: qwen1.5-0.5b}]\n"
        "variants: [{stack: llamaserver, speculate: draft, draft: d.gguf, accept: [2, 2.5]}]\n"
    )
    names = [variant.name for variant in load(path).variants]
    assert names == ["accept=2-draft=d.gguf-speculate=draft", "accept=2.5-draft=d.gguf-speculate=draft"]
