"""Weights in either format: facts of a folder, conversions, and errors."""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from stored_again import Tensors, stored_again
from stored_again import read as read_tensors
from test_checkpoint import (
    TINY,
    config_of,
    entries,
    gguf_writer,
    write,
    write_config,
    write_gguf,
    write_safetensors,
    write_shards,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from harness.campaign.prepare import Preparation
from harness.campaign.prompts import PROMPT_TEXT
from harness.campaign.repeat import NotReady
from harness.campaign.tokenized_text import tokenized
from harness.config import Decode, Model, Variant, Weights
from harness.config.plan import Cell
from harness.models import check, locate, make
from harness.models.locate import WeightsError
from harness.theory import decoder, ggml_quants
from harness.theory.hf_config import SHAPES
from harness.theory.known_models import Described
from harness.theory.loaded_sizes import loaded_bytes
from harness.theory.tensors import Tensor, of_shape

TIED = replace(TINY, tied=True)


def write_checkpoint(folder: Path, shape: decoder.Decoder = TINY, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", entries(shape), {"format": "pt"})
    return write_config(folder, shape, **changed)


def write_tokenizer(folder: Path, vocabulary: int = 300) -> Tokenizer:
    """A small byte-level BPE, as the tokenizers library saves it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet)
    made.train_from_iterator([PROMPT_TEXT], trainer)
    made.save(str(folder / "tokenizer.json"))
    return made


SEED = 5  # of no other test's synthetic weights: the cache is shared


def cell(stack: str, path: Path | None = None, **options: Any) -> Cell:
    """A cell of weights at a path, or of the smallest shape's synthetic ones."""
    if path is None:
        model = Model(
            name="tiny-qwen2", described=Described(SHAPES["tiny-qwen2"]), weights=Weights(seed=SEED)
        )
    else:
        model = Model(name="mine", weights=Weights(kind="path", path=str(path)))
    workload = Decode(prompt_tokens=25, new_tokens=8)
    return Cell(f"{stack}-cell", model, Variant(stack=stack, name="v", options=options), workload)


def _another_seed() -> Model:
    return Model(name="tiny-qwen2", described=Described(SHAPES["tiny-qwen2"]), weights=Weights(seed=SEED + 1))


@pytest.fixture
def preparation() -> Preparation:
    return Preparation("cpu", None, 2, lambda line: None)


# --- what is at a path --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_a_checkpoints_folder_tells_all_that_a_gguf_tells(tmp_path, count):
    write_config(tmp_path)
    write_shards(tmp_path, TINY, count)
    ready = locate.local(tmp_path)
    parameters = decoder.parameters(TINY)
    assert (ready.format, ready.quant, ready.architecture) == ("hf", "bf16", "llama")
    assert ready.vocab_size == TINY.vocab_size
    assert ready.attention == {"layers": TINY.count, "kv_heads": TINY.kv_heads, "head_dim": TINY.head_dim}
    assert ready.sizes == {
        "model_bytes": 2 * parameters,
        "parameters": parameters,
        "bytes_by_type": {"bf16": 2 * parameters},
        "input_embedding_bytes": 2 * TINY.vocab_size * TINY.hidden_size,
        "tied": False,
    }
    assert not ready.synthetic
    assert (ready.tokenizer, ready.revision, ready.header) == (None, None, None)


def test_what_transformers_does_not_load_is_not_counted(tmp_path):
    """A tied model's second copy of the matrix, and the tables and masks that old checkpoints hold."""
    stored = entries(TIED, stored_tied=True)
    assert "lm_head.weight" in stored
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", [TIED.head_dim // 2], 4)
    stored["model.layers.0.self_attn.bias"] = ("BOOL", [1, 1, 4096, 4096], 1)  # more than all weights
    stored["model.layers.0.self_attn.masked_bias"] = ("F32", [], 4)
    write_safetensors(tmp_path / "model.safetensors", stored)
    ready = locate.local(write_config(tmp_path, TIED))
    assert ready.sizes["parameters"] == decoder.parameters(TIED)
    assert ready.sizes["bytes_by_type"] == {"bf16": ready.sizes["model_bytes"]}
    assert ready.sizes["model_bytes"] == 2 * decoder.parameters(TIED)
    assert ready.sizes["tied"]
    assert ready.quant == "bf16"


NEOX = "gpt_neox.layers.0.attention"
OTHERS = {
    "gpt2": (
        {"wte.weight": [512, 256], "h.0.attn.c_attn.weight": [256, 768], "h.0.attn.c_attn.bias": [768]},
        {"h.0.attn.bias": ("BOOL", [1, 1, 1024, 1024], 1), "h.0.attn.masked_bias": ("F32", [], 4)},
    ),
    "gpt_neox": (
        {f"{NEOX}.dense.weight": [256, 256], "embed_out.weight": [512, 256]},
        {f"{NEOX}.bias": ("U8", [1, 1, 2048, 2048], 1), f"{NEOX}.rotary_emb.inv_freq": ("F32", [32], 4)},
    ),
    "codegen": (
        {"transformer.h.0.attn.qkv_proj.weight": [768, 256]},
        {"transformer.h.0.attn.causal_mask": ("BOOL", [1, 1, 2048, 2048], 1)},
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_masks_that_older_architectures_store_are_no_weights(tmp_path, kind):
    """By the names that checkpoints of theirs have."""
    loaded, buffers = OTHERS[kind]
    stored = {name: ("F16", dims, 2) for name, dims in loaded.items()} | buffers
    write_safetensors(tmp_path / "model.safetensors", stored)
    ready = locate.local(write_config(tmp_path, model_type=kind))
    parameters = sum(math.prod(dims) for dims in loaded.values())
    assert (ready.quant, ready.sizes["parameters"]) == ("f16", parameters)
    assert ready.sizes["bytes_by_type"] == {"f16": 2 * parameters}


def test_our_own_checkpoints_are_synthetic(tmp_path):
    assert locate.local(write_checkpoint(tmp_path, harness_synthetic=True)).synthetic


def test_an_architecture_that_only_transformers_knows_is_taken_but_not_converted(tmp_path):
    ready = locate.local(write_checkpoint(tmp_path, model_type="gemma9"))
    assert (ready.architecture, ready.attention) == ("gemma9", None)
    assert ready.sizes["parameters"] == decoder.parameters(TINY)
    assert ready.vocab_size == TINY.vocab_size
    with pytest.raises(WeightsError, match="is gemma9, which is not converted to GGUF"):
        check.check_convertible(ready)


def test_a_folder_with_one_gguf_is_that_gguf(tmp_path):
    path = write_gguf(tmp_path / "model.gguf")
    assert locate.local(tmp_path) == locate.local(path)


def lying(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.write((1 << 62).to_bytes(8, "little"))


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_shards(folder, TINY, 3)[1].unlink()


def shards_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_shards(folder, TINY, 3, index=False)


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def change(**changed: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(config_of(TINY) | changed)) and None


NEITHER = r"m: has no model\.safetensors and no model\.safetensors\.index\.json"
DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard": (without_a_shard, r"model-00002-of-00003\.safetensors: is missing, one of 3 shards"),
    "a header that lies": (lying, r"model\.safetensors: not a safetensors file, or one with a header over"),
    "cut short": (lambda f: os.truncate(f / "model.safetensors", 5000), "cut short"),
    "pickles": (only_pickles, "its weights are pickled, .* save_pretrained"),
    "a mixture": (change(num_local_experts=8), "is a mixture of experts"),
    "another head": (change(architectures=["LlamaForSequenceClassification"]), "must name LlamaForCausalLM"),
    "another size": (change(vocab_size=99), "embed_tokens.weight is 512 x 256, and its config.json says 99"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json: is not JSON"),
    "no model_type": (change(model_type=None), r"config\.json: has no model_type"),
    "an empty model_type": (change(model_type=""), r"config\.json: has no model_type"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has a config.json and no weights"),
    "shards alone": (shards_alone, NEITHER),
    "another name": (lambda f: (f / "model.safetensors").rename(f / "mine.safetensors"), NEITHER),
    "nothing": (lambda f: [p.unlink() for p in f.iterdir()], "holds no model"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_folder_that_is_no_whole_checkpoint_is_one_sentence(tmp_path, name):
    damage, sentence = DAMAGED[name]
    folder = write_checkpoint(tmp_path / "m")
    damage(folder)
    with pytest.raises(WeightsError, match=sentence) as told:
        locate.local(folder)
    assert str(folder) in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_one_file_of_a_checkpoint_is_not_the_checkpoint(tmp_path, name):
    write_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match="is one file of a checkpoint; name its folder"):
        locate.local(tmp_path / name)


@pytest.mark.parametrize(
    ("changed", "is_another"),
    [
        (lambda f: (f / "model.safetensors").touch(), True),
        (lambda f: write_config(f, rope_theta=1e6), True),
        (lambda f: write_tokenizer(f), True),
        (lambda f: (f / "tokenizer_config.json").write_text('{"add_bos_token": true}'), True),
        (lambda f: (f / "modeling_mine.py").write_text("LAYERS = 2"), True),
        (lambda f: (f / "README.md").write_text("said more"), False),
    ],
)
def test_a_checkpoints_fingerprint_changes_with_what_is_loaded(tmp_path, changed, is_another):
    before = locate.local(write_checkpoint(tmp_path)).fingerprint
    changed(tmp_path)
    assert (locate.local(tmp_path).fingerprint != before) == is_another


def test_a_copy_has_the_fingerprint_of_the_original_but_for_its_times(tmp_path):
    folder, file = write_checkpoint(tmp_path / "m"), write_gguf(tmp_path / "m.gguf")
    write_tokenizer(folder)
    for original, copied in ((folder, tmp_path / "copy"), (file, tmp_path / "copy.gguf")):
        (shutil.copytree if original.is_dir() else shutil.copyfile)(original, copied)
        for path in (copied, *copied.glob("*")):
            os.utime(path, (1, 1))
        before, after = (locate.local(path).fingerprint.split("-") for path in (original, copied))
        same = [ours == theirs for ours, theirs in zip(before, after, strict=True)]
        assert same == [True, True, False, True]


def test_a_damaged_folder_of_the_cache_is_made_anew(tmp_path):
    folder = write_checkpoint(tmp_path / "hf")
    assert locate.cached(folder) is not None
    without_a_shard(folder)
    assert locate.cached(folder) is None
    assert not folder.exists()


# --- what is made, and by whom ------------------------------------------------------------------------------


def test_one_synthetic_checkpoint_is_made_and_every_gguf_from_it(llamacpp_interpreter, cache):
    said: list[str] = []
    preparation = Preparation("cpu", None, 2, said.append)
    f16 = preparation.weights(cell("llamacpp"))
    q8_0 = preparation.weights(cell("llamacpp", quant="q8_0"))
    checkpoint = preparation.weights(cell("hf"))
    shape = SHAPES["tiny-qwen2"]
    assert checkpoint.path == make.checkpoint_folder(make.synthetic_name(Described(shape), SEED))
    assert (checkpoint.quant, f16.quant, q8_0.quant) == ("bf16", "f16", "q8_0")
    assert all(ready.synthetic for ready in (checkpoint, f16, q8_0))
    assert checkpoint.sizes["parameters"] == f16.sizes["parameters"] == decoder.parameters(shape)
    assert q8_0.sizes["model_bytes"] == ggml_quants.model_bytes(shape, "q8_0")
    jobs = [line.split(":")[0] for line in said if line.endswith(": import")]
    assert jobs == ["synthesize tiny-qwen2 hf", "convert tiny-qwen2 f16", "quantize tiny-qwen2 q8_0"]
    assert not list((cache / "weights").rglob("*.partial-*"))
    by_llamacpp, by_hf = (
        preparation.prompts.ids(cell("llamacpp"), q8_0),
        preparation.prompts.ids(cell("hf"), checkpoint),
    )
    assert by_llamacpp[0] == by_hf[0]


def test_a_checkpoint_given_serves_every_stack_with_one_prompt(tmp_path, preparation, llamacpp_interpreter):
    folder = preparation.checkpoint(replace(cell("llamacpp"), model=_another_seed())).path
    name = "model.embed_tokens.weight"

    def change(tensors: Tensors) -> None:
        dtype, shape, values = tensors[name]
        tensors[name] = dtype, shape, b"\x80\x2b" + values[2:]  # 2**-40, which F16 does not hold

    mine = stored_again(folder, tmp_path / "mine", change)
    embedding = read_tensors(mine)[name][2]
    expected = write_tokenizer(mine).encode(PROMPT_TEXT * 2, add_special_tokens=False).ids[:25]
    stored = preparation.weights(cell("hf", mine))
    bf16 = preparation.weights(cell("llamacpp", mine, quant="bf16"))
    q4_0 = preparation.weights(cell("llamacpp", mine, quant="q4_0"))
    assert (stored.path, bf16.quant, q4_0.quant) == (mine, "bf16", "q4_0")
    for asked, ready in ((cell("hf", mine), stored), (cell("llamacpp", mine), q4_0)):
        ids, source = preparation.prompts.ids(asked, ready)
        assert ids == expected
        assert source == "the harness's fixed text, by the model's own tokenizer"
    (values,) = (t.data for t in gguf.GGUFReader(bf16.path).tensors if t.name == "token_embd.weight")
    assert values.tobytes() == embedding  # by no way round


def test_a_gguf_is_refused_where_a_checkpoint_is_needed(tmp_path, preparation):
    path = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(NotReady, match=f"stack hf needs a Hugging Face checkpoint, but {path} is a GGUF"):
        preparation.weights(cell("hf", path))
    on_hub = Weights(kind="hub", repo="a/b", file="m.gguf", revision="main")
    refused = replace(cell("bnb"), model=Model(name="m", weights=on_hub))
    with pytest.raises(NotReady, match=r"a/b/m\.gguf is a GGUF"):  # and it is not downloaded first
        preparation.weights(refused)


@pytest.mark.parametrize("stack", ["hf", "bnb"])
def test_code_of_a_checkpoint_on_the_hub_is_refused_before_anything_is_downloaded(preparation, stack):
    on_hub = Weights(kind="hub", repo="a/b", revision="main")
    asked = replace(cell(stack, trust_remote_code=True), model=Model(name="m", weights=on_hub))
    with pytest.raises(NotReady) as told:
        preparation.weights(asked)
    sentence = "trust_remote_code needs a local folder: Python files are not downloaded"
    assert (told.value.outcome, str(told.value)) == ("error", sentence)
    assert preparation.fingerprint(asked) is None


def test_weights_of_another_shape_than_the_one_beside_them_are_refused(tmp_path, preparation):
    folder = write_checkpoint(tmp_path / "m")
    model = Model(
        name="m", described=Described(SHAPES["qwen1.5-0.5b"]), weights=Weights(kind="path", path=str(folder))
    )
    with pytest.raises(NotReady, match=r"has layers \d+, but the config.s shape has 24"):
        preparation.weights(replace(cell("hf"), model=model))
    model = model.model_copy(update={"described": Described(TINY)})
    assert preparation.weights(replace(cell("hf"), model=model)).path == folder


def test_a_stack_without_weights_needs_none(preparation):
    assert preparation.weights(cell("fake")) is None
    assert preparation.fingerprint(cell("fake")) == "none"


# --- prompts ------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_is_broken_or_anothers_is_one_sentence(tmp_path, preparation):
    folder = write_checkpoint(tmp_path / "m")
    write_tokenizer(folder)
    whole = (folder / "tokenizer.json").read_bytes()
    for broken in (b"", b"{}", whole[: len(whole) // 2], b"\xff\xfe", b'{"model": {"type": "BPE"}}'):
        (folder / "tokenizer.json").write_bytes(broken)
        with pytest.raises(NotReady, match=r"cannot tokenize: .*tokenizer\.json") as told:
            preparation.prompts.ids(cell("hf", folder), locate.local(folder))
        assert "\n" not in str(told.value)
    (folder / "tokenizer.json").unlink()
    write_tokenizer(folder)
    whole = locate.local(folder)
    small = replace(whole, decoder=replace(whole.decoder, vocab_size=20))
    with pytest.raises(NotReady, match=r"tokenizer returns id \d+, but the model has 20"):
        preparation.prompts.ids(cell("hf", folder), small)


def test_without_a_tokenizer_the_ids_are_fixed_and_within_the_vocabulary(tmp_path, preparation):
    ids, source = preparation.prompts.ids(cell("hf"), locate.local(write_checkpoint(tmp_path)))
    assert source == "fixed ids (no tokenizer)"
    assert len(ids) == 25
    assert max(ids) < TINY.vocab_size


@pytest.mark.parametrize(
    ("template", "settings", "bos"),
    [
        (None, None, None),
        ("<s> $A", None, "<s>"),
        ("<s> $A </s>", {"add_bos_token": "yes"}, "<s>"),  # no bool: llama.cpp's converter passes it over
        ("$A </s>", None, None),
        ("<s> $A", {"add_bos_token": False}, None),
        (None, {"add_bos_token": True, "bos_token": "</s>"}, "</s>"),
        (None, {"add_bos_token": True, "bos_token": {"content": "<s>", "special": True}}, "<s>"),
        ("<s> $A", {"add_bos_token": True}, "<s>"),
        (None, {"bos_token": "<s>"}, None),
    ],
)
def test_a_tokenizer_says_which_token_belongs_in_front_of_a_text(tmp_path, template, settings, bos):
    made = write_tokenizer(tmp_path)
    made.add_special_tokens(["<s>", "</s>"])
    if template:
        special = [(name, made.token_to_id(name)) for name in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    made.save(str(tmp_path / "tokenizer.json"))
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = tokenized(tmp_path / "tokenizer.json", PROMPT_TEXT, 5)
    assert found.ids == made.encode(PROMPT_TEXT, add_special_tokens=False).ids[:5]
    assert found.bos == (bos and made.token_to_id(bos))


def test_all_sources_of_a_model_get_the_ids_of_its_checkpoint_or_are_refused(tmp_path, preparation):
    """A GGUF of our own conversion has no vocabulary."""
    folder = write_checkpoint(tmp_path / "m")
    write_tokenizer(folder)
    bare = write_gguf(tmp_path / "bare.gguf")

    def of(**paths: Path) -> Model:
        given = {form: Weights(kind="path", path=str(path)) for form, path in paths.items()}
        return Model(name="m", weights=next(iter(given.values())), of_format=given)

    def prompt(stack: str, model: Model) -> list[int]:
        each = replace(cell(stack), model=model)
        return preparation.prompts.ids(each, preparation.weights(each))[0]

    both = of(hf=folder, gguf=bare)
    assert prompt("hf", both) == prompt("llamacpp", both)
    with pytest.raises(NotReady, match="all stacks of a model need the same token ids") as told:
        prompt("llamacpp", of(gguf=bare))
    assert told.value.outcome == "refused"
    assert str(bare) in str(told.value)
    assert str(folder) in str(told.value)


# --- arithmetic ---------------------------------------------------------------------------------------------


def test_loaded_bytes_are_those_of_the_hand():
    """An embedding of 1000 x 128, one layer's matrix of 128 x 256 with a bias, a norm, an lm_head."""
    stored = [
        Tensor("model.embed_tokens.weight", "bf16", (1000, 128), 256_000),
        Tensor("model.layers.0.self_attn.q_proj.weight", "bf16", (256, 128), 65_536),
        Tensor("model.layers.0.self_attn.q_proj.bias", "bf16", (256,), 512),
        Tensor("model.norm.weight", "bf16", (128,), 256),
        Tensor("lm_head.weight", "bf16", (1000, 128), 256_000),
    ]
    kept = 256_000 + 512 + 256 + 256_000
    assert loaded_bytes(stored, "bf16") == loaded_bytes(stored, "fp16") == kept + 65_536
    assert loaded_bytes(stored, "fp32") == 2 * (kept + 65_536)
    assert loaded_bytes(stored, "bf16", "int8") == kept + 32_768 + 256 * 4
    assert loaded_bytes(stored, "bf16", "nf4") == kept + 16_384 + 512 * 4
    assert loaded_bytes(stored, "fp32", "fp4") == 2 * kept + 16_384 + 512 * 4
    assert loaded_bytes(stored, "bf16", "nf4", double_quant=True) == kept + 16_384 + 512 + 2 * 4


def test_a_7b_in_4_bits_takes_what_is_known_of_it():
    """Qwen1.5-7B: 6,476,005,376 weights in its layers' matrices, 1,245,184,000 of embedding and lm_head."""
    shape = SHAPES["qwen1.5-7b"]
    matrices = decoder.layer_params(decoder.dense_like(shape, qkv_bias=False), norms=False)
    rest = decoder.parameters(shape) - matrices
    assert loaded_bytes(of_shape(shape), "bf16", "nf4") == matrices // 2 + matrices // 64 * 4 + 2 * rest
    assert loaded_bytes(of_shape(shape), "bf16") == 2 * decoder.parameters(shape)
    assert np.isclose(loaded_bytes(of_shape(shape), "bf16", "nf4") / 1e9, 6.1, atol=0.1)


def test_a_mixture_whose_keys_contradict_each_other_is_refused_before_it_is_measured(
    harness, real_config, llamacpp_interpreter, tmp_path
):
    """A token's share of experts is unknown: reading all weights would exceed the bandwidth several times."""
    writer = gguf_writer(tmp_path / "mixture.gguf", TINY)
    writer.add_expert_count(8)
    write(writer, of_shape(TINY))
    path = real_config(
        {"stack": "llamacpp"}, model={"name": "mixture", "weights": "mixture.gguf"}, new_tokens=8
    )
    ran = harness("run", path, "--json")
    assert ran.code == 1
    (row,) = ran.json
    assert row["status"] == "refused"
    assert "uses 0 of 8 experts for a token" in " ".join(row["reasons"])
    assert "uses 0 of 8 experts" in harness("run", path, "--dry-run").words
    assert [check["verdict"] for check in harness("run", "--check-weights", path, "--json").json] == [
        "failed"
    ]
