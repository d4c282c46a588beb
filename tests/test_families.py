"""Shapes by name, and from a checkpoint's config.json, which is believed in nothing; the published parameters
of public models and the bytes of their published GGUF files come out."""

import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from csv_tables import of_each, rows
from damage import Edits, edited, edits
from hypothesis import example, given
from hypothesis import strategies as st

from harness.theory import decoder, tensors
from harness.theory.architectures import decoder_of
from harness.theory.config_settings import ConfigJsonError
from harness.theory.decoder import Decoder, dense_fields, dense_like, kv_elements_per_token, parameters
from harness.theory.ggml_quants import ALL_QUANTS, quantized
from harness.theory.hf_config import SHAPES
from harness.theory.known_models import Known
from harness.theory.quantization import quantization_of

# Elements of each checkpoint on the hub, or in Meta's files; Qwen1.5-0.5B: untied.
PUBLISHED = {model: int(count) for model, count in rows("parameters")}


def config(model_type: str, architecture: str, numbers: tuple[int, ...], **others: Any) -> dict[str, Any]:
    """config.json as the hub has it: hidden, layers, ffn, heads, kv heads (0: no such key), vocabulary."""
    keys = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    keys += ("num_key_value_heads", "vocab_size")
    told = {key: number for key, number in zip(keys, numbers, strict=True) if number}
    plain = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "bos_token_id": 1}
    return {"architectures": [architecture], "model_type": model_type, **plain, **told, **others}


def llama(*numbers: int, **others: Any) -> dict[str, Any]:
    return config("llama", "LlamaForCausalLM", numbers, **{"pretraining_tp": 1} | others)


def mistral(*numbers: int, **others: Any) -> dict[str, Any]:
    told = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-05, "tie_word_embeddings": False}
    return config("mistral", "MistralForCausalLM", numbers, **told | others)


def qwen2(*numbers: int, **others: Any) -> dict[str, Any]:
    told = {"rms_norm_eps": 1e-06, "rope_theta": 1e6, "use_sliding_window": False, "max_window_layers": 28}
    return config("qwen2", "Qwen2ForCausalLM", numbers, **told | others)


def qwen3(*numbers: int, **others: Any) -> dict[str, Any]:
    told = {"rms_norm_eps": 1e-06, "rope_theta": 1_000_000, "head_dim": 128, "attention_bias": False}
    told |= {"max_position_embeddings": 40_960, "rope_scaling": None, "sliding_window": None}
    return config("qwen3", "Qwen3ForCausalLM", numbers, **told | others)


def windows(tokens: int) -> dict[str, Any]:
    return {"max_position_embeddings": tokens, "sliding_window": tokens}


ROPE_3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
WIDE = {"head_dim": 128, "sliding_window": None}
LLAMA = {"rms_norm_eps": 1e-05, "rope_scaling": None}
LLAMA_3 = LLAMA | {"rope_theta": 500_000.0, "attention_bias": False, "tie_word_embeddings": False}
CONFIGS = {
    "llama-7b": llama(4096, 32, 11_008, 32, 0, 32_000, rms_norm_eps=1e-06, max_position_embeddings=2048),
    "llama-65b": llama(8192, 80, 22_016, 64, 0, 32_000, rms_norm_eps=1e-05, max_position_embeddings=2048),
    "llama-2-7b": llama(4096, 32, 11_008, 32, 32, 32_000, **LLAMA, max_position_embeddings=4096),
    "llama-3-8b": llama(4096, 32, 14_336, 32, 8, 128_256, **LLAMA_3, max_position_embeddings=8192),
    "llama-3.2-1b": llama(
        *(2048, 16, 8192, 32, 8, 128_256),
        **LLAMA_3 | {"rope_scaling": ROPE_3, "head_dim": 64, "mlp_bias": False, "tie_word_embeddings": True},
        max_position_embeddings=131_072,
    ),
    "qwen1.5-110b": qwen2(8192, 80, 49_152, 64, 8, 152_064, **windows(32_768)),
    "qwen2-0.5b": qwen2(
        *(896, 24, 4864, 14, 2, 151_936),
        **windows(131_072) | {"max_window_layers": 24, "tie_word_embeddings": True},
    ),
    "qwen2-72b": qwen2(8192, 80, 29_568, 64, 8, 152_064, **windows(131_072)) | {"rms_norm_eps": 1e-05},
    "qwen3-0.6b": qwen3(1024, 28, 3072, 16, 8, 151_936, tie_word_embeddings=True),
    "qwen3-32b": qwen3(5120, 64, 25_600, 64, 8, 151_936, tie_word_embeddings=False),
    "mistral-7b-v0.1": mistral(4096, 32, 14_336, 32, 8, 32_000, rope_theta=10_000.0, sliding_window=4096),
    "mistral-7b-v0.3": mistral(4096, 32, 14_336, 32, 8, 32_768, rope_theta=1e6, sliding_window=None),
    "mistral-nemo-12b": mistral(
        *(5120, 40, 14_336, 32, 8, 131_072), **WIDE, rope_theta=1e6, max_position_embeddings=128_000
    ),
    "mistral-small-24b": mistral(5120, 40, 32_768, 32, 8, 131_072, **WIDE, rope_theta=1e8),
}
SMALL = CONFIGS["qwen2-0.5b"]


def refusal(given: Any) -> str:
    with pytest.raises(ConfigJsonError) as refused:
        decoder_of(given)
    return str(refused.value)


# --- the catalogue


@of_each("name", PUBLISHED)
def test_a_shape_has_as_many_parameters_as_the_published_checkpoint(name):
    assert parameters(SHAPES[name]) == PUBLISHED[name]


def test_every_real_model_has_a_published_count():
    ours = [name for name in SHAPES if not name.startswith("tiny-") and not name.endswith("-mha")]
    assert sorted(ours) == sorted(PUBLISHED)
    assert list(SHAPES)[-2:] == ["tiny-qwen2", "tiny-llama"]
    assert list(SHAPES) == [name.lower() for name in SHAPES]


def test_qwen15_of_the_hub_ties_what_ours_keeps_apart():
    assert parameters(replace(SHAPES["qwen1.5-0.5b"], tied=True)) == 463_987_712
    assert not any(shape.tied for name, shape in SHAPES.items() if name.startswith("qwen1.5-"))


@of_each("name", SHAPES)
def test_a_shape_is_consistent_and_lists_as_many_elements_as_it_counts(name):
    shape = SHAPES[name]
    assert shape.heads % shape.kv_heads == 0
    assert shape.head_dim % 2 == 0
    assert shape.window is None or shape.window < shape.context
    fields = dense_fields(shape)
    assert (shape.arch == "qwen2") == fields["qkv_bias"]
    assert (shape.arch == "qwen3") == fields["qk_norm"]
    assert dense_like(shape) == shape
    assert sum(tensor.elements for tensor in tensors.of_shape(shape)) == parameters(shape)


def test_without_gqa_a_model_keeps_five_or_eight_times_the_cache():
    for name, ratio in {"qwen1.5-32b": 5, "qwen1.5-110b": 8}.items():
        grouped, full = SHAPES[name], SHAPES[f"{name}-mha"]
        assert full == dense_like(grouped, kv_heads=grouped.heads)
        assert kv_elements_per_token(full) == ratio * kv_elements_per_token(grouped)
    total = parameters(SHAPES["qwen1.5-110b-mha"], norms=False)
    assert total / 2**30 == pytest.approx(112.32, abs=0.01)


def test_qwen_pads_its_vocabulary_by_size():
    padded = {name: shape.vocab_size for name, shape in SHAPES.items() if name.startswith("qwen2")}
    small = ("-0.5b", "-1.5b", "-3b")
    assert all(size == (151_936 if name.endswith(small) else 152_064) for name, size in padded.items())


# --- config.json


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_from_the_hub_gives_the_shape_of_that_name(name):
    through_json = json.loads(json.dumps(CONFIGS[name]))
    assert decoder_of(through_json) == SHAPES[name]
    assert quantization_of(through_json) is None


def test_a_config_of_transformers_5_keeps_theta_inside_rope_parameters():
    moved = dict(CONFIGS["llama-3-8b"])
    theta = moved.pop("rope_theta")
    assert decoder_of(moved).rope_theta == 10_000
    moved["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    assert decoder_of(moved) == SHAPES["llama-3-8b"]
    assert decoder_of(moved | {"rope_theta": 1e4}) == SHAPES["llama-3-8b"]
    assert decoder_of(moved | {"rope_parameters": {"rope_type": "default"}}).rope_theta == 10_000


def test_what_a_config_leaves_out_is_what_transformers_takes():
    bare = llama(4096, 32, 11_008, 32, 0, 32_000)
    assert decoder_of(bare) == SHAPES["llama-7b"]
    assert decoder_of(bare | {"architectures": None}) == SHAPES["llama-7b"]
    assert decoder_of(bare | {"architectures": ["LLaMAForCausalLM"]}) == SHAPES["llama-7b"]
    assert decoder_of(bare | {"model_type": None}) == SHAPES["llama-7b"]  # named by its architecture
    assert decoder_of(bare | {"num_key_value_heads": None, "head_dim": None}).kv_heads == 32
    no_head_dim = {key: value for key, value in CONFIGS["qwen3-32b"].items() if key != "head_dim"}
    assert decoder_of(no_head_dim).head_dim == 128  # Qwen3's own, not 5120 / 64
    assert decoder_of(mistral(4096, 32, 14_336, 32, 8, 32_000)).window == 4096  # no key; null would be none


def test_biases_are_where_each_family_has_them():
    def biases(given: dict[str, Any]) -> tuple[bool, bool, bool]:
        fields = dense_fields(decoder_of(given | {"attention_bias": True, "mlp_bias": True}))
        return fields["qkv_bias"], fields["o_bias"], fields["mlp_bias"]

    assert biases(CONFIGS["llama-3-8b"]) == (True, True, True)
    assert biases(CONFIGS["qwen2-0.5b"]) == (True, False, False)
    assert biases(CONFIGS["qwen3-0.6b"]) == (True, True, False)
    assert biases(CONFIGS["mistral-7b-v0.3"]) == (False, False, False)


def test_a_window_of_qwen_counts_if_it_is_used_and_over_all_layers():
    def window(**others: Any) -> int | None:
        return decoder_of(SMALL | {"sliding_window": 4096} | others).window

    assert window(use_sliding_window=False) is None
    assert window(use_sliding_window=True, max_window_layers=0) == 4096
    assert window(use_sliding_window=True, max_window_layers=24) is None
    assert window(use_sliding_window=True, max_window_layers=0, sliding_window=None) is None
    assert window(use_sliding_window=True, layer_types=["sliding_attention"] * 24) == 4096
    assert window(use_sliding_window=True, layer_types=["full_attention"] * 24) is None
    partial = SMALL | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    assert refusal(partial) == "a sliding window over 4 of 24 layers; known: over all or none"


def test_a_wrapper_is_the_model_for_text_inside_it():
    inner = {key: value for key, value in CONFIGS["mistral-small-24b"].items() if key != "architectures"}
    wrapper = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": inner,
        "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    assert decoder_of(wrapper) == SHAPES["mistral-small-24b"]
    assert words_of(wrapper) == "fp8, blocks of 128 x 128"
    del inner["tie_word_embeddings"]
    assert decoder_of(wrapper | {"tie_word_embeddings": True}).tied
    assert not decoder_of(wrapper | {"text_config": inner | {"tie_word_embeddings": False}}).tied
    assert decoder_of({"model_type": "internvl_chat", "llm_config": SMALL}) == SHAPES["qwen2-0.5b"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "phi33"}, "architecture 'phi33' is not known; the nearest that is: phi3"),
        ({"model_type": None, "architectures": None}, "model_type is missing; known: "),
        ({"model_type": ["qwen2"]}, "model_type a list is not known"),
        ({"num_local_experts": 8}, "qwen2 is a mixture of experts; only dense models are known"),
        ({"n_routed_experts": 256, "model_type": "\x1b[31m"}, "architecture '\\x1b[31m' is not known"),
        ({"architectures": ["Qwen2ForSequence"]}, "must name Qwen2ForCausalLM, not 'Qwen2ForSequence'"),
        ({"architectures": []}, "architectures must name Qwen2ForCausalLM, not a list"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "896"}, "hidden_size must be a whole number from 1 to 10000000, not '896'"),
        ({"hidden_size": 896.0}, "not 896"),
        ({"hidden_size": True}, "not true"),
        ({"hidden_size": 897}, "hidden_size 897 is not a multiple of num_attention_heads 14"),
        ({"num_hidden_layers": -1}, "from 1 to 10000, not -1"),
        ({"num_hidden_layers": 10**5000}, "not a huge number"),
        ({"vocab_size": 1e300}, "not 1e+300"),
        ({"num_key_value_heads": 3}, "num_attention_heads 14 is not a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": 1}, "rms_norm_eps must be a number between 0 and 1, not 1"),
        ({"rms_norm_eps": float("nan")}, "not nan"),
        ({"rope_theta": 0}, "rope_theta must be a number between 0 and 1e+15, not 0"),
        ({"rope_parameters": [1]}, "rope_parameters must be a mapping, not a list"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
        ({"use_sliding_window": True, "layer_types": ["x"]}, "layer_types must be a list of 24"),
        ({"max_position_embeddings": {}}, "not a mapping"),
    ],
)
def test_what_gives_no_shape_is_refused_in_a_sentence(change, said):
    assert said in refusal(SMALL | change)


def compressed(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
HQQ = {"weight_quant_params": {"nbits": 4, "group_size": 64}}
QUARK = {"weight": {"dtype": "fp8_e4m3"}}
IN_128 = {"bits": 4, "group_size": 128}
NO_NUMBERS = {"bits": "four", "group_size": [1], "config_groups": {"a": 3}}


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("gptq", IN_128 | {"desc_act": False}, "gptq 4-bit, group 128"),
        ("gptq", {"bits": 8, "group_size": -1}, "gptq 8-bit, one group a row"),
        ("awq", {"w_bit": 4, "q_group_size": 64, "version": "gemm"}, "awq 4-bit, group 64"),
        ("bitsandbytes", NF4, "bitsandbytes 4-bit (nf4)"),
        (None, {"load_in_8bit": True, "load_in_4bit": False}, "bitsandbytes 8-bit"),
        (None, compressed(num_bits=4, type="int", group_size=128), "compressed-tensors 4-bit, group 128"),
        ("mxfp4", {}, "mxfp4"),
        (None, NF4 | {"bnb_4bit_use_double_quant": True}, "bitsandbytes 4-bit (nf4), double_quant"),
        ("modelopt", {"quant_algo": "FP8"}, "modelopt fp8"),
        ("modelopt", {"quant_algo": "NVFP4", "group_size": 16}, "modelopt nvfp4, group 16"),
        (None, compressed(num_bits=8, type="float"), "compressed-tensors 8-bit float"),
        ("hqq", {"quant_config": HQQ}, "hqq 4-bit, group 64"),
        ("quark", {"global_quant_config": QUARK}, "quark fp8_e4m3"),
        ("auto-round", IN_128, "auto-round 4-bit, group 128"),
        ("gptq", IN_128 | {"dynamic": {"-:x": {}}}, "gptq 4-bit, group 128, rules for single layers"),
        (None, {"group_size": 64, "bits": 4}, "mlx 4-bit, group 64"),
        ("gptq", NO_NUMBERS, "gptq"),
        (None, {}, None),
    ],
)
def test_a_quantization_is_named_in_a_few_words(method, settings, said):
    given = settings | ({"quant_method": method} if method else {})
    assert words_of(SMALL | {"quantization_config": given}) == said


def words_of(config: dict[str, Any]) -> str | None:
    found = quantization_of(config)
    return found.words if found else None


@pytest.mark.parametrize("given", [4, "gptq", {"quant_method": "a\nb"}, {"quant_method": 3}])
def test_a_quantization_that_is_no_name_is_refused(given):
    with pytest.raises(ConfigJsonError, match="quantization_config"):
        quantization_of(SMALL | {"quantization_config": given})


NESTED: list[Any] = []
for _ in range(2000):
    NESTED = [NESTED]
JUNK: list[Any] = [None, True, False, 0, -1, 1, 2, 3, 2**31, 2**63, 10**400, 1e300, -0.0, 1.5, float("inf")]
JUNK += [float("nan"), "", "4096", "\x00\x1b[31m\n" * 99, "\ud800", [], [[]], {}, {"a": {"b": []}}]
JUNK += ["llama", "qwen3", ["LlamaForCausalLM"], [None], {"model_type": "llama"}, CONFIGS["llama-2-7b"]]
KEYS = [
    "num_experts",
    "text_config",
    "rope_parameters",
    "layer_types",
    "head_dim",
    "attention_bias",
    "mlp_bias",
]
KEYS += ["quantization_config", "quantization", "sliding_window", "use_sliding_window", "tie_word_embeddings"]
ALL_KEYS = sorted({*KEYS, *(key for config in CONFIGS.values() for key in config)})


@st.composite
def hostile_configs(draw: st.DrawFn) -> tuple[str, bool, Edits]:
    """A config by name, whether it is a wrapper's `text_config`, and what to change in it."""
    name, wrapped = draw(st.sampled_from(sorted(CONFIGS))), draw(st.booleans())
    keys = sorted({*KEYS, *CONFIGS[name]})
    ways = [("text_config", key) for key in keys] + [("model_type",)] if wrapped else [(key,) for key in keys]
    return name, wrapped, draw(edits(ways, JUNK))


@given(hostile_configs())
@example(("llama-2-7b", False, [(("num_key_value_heads",), 3)]))
def test_a_hostile_config_gives_a_shape_that_makes_sense_or_one_sentence(hostile):
    name, wrapped, changes = hostile
    config = {"model_type": "mistral3", "text_config": CONFIGS[name]} if wrapped else CONFIGS[name]
    gives_sense_or_a_sentence(edited(config, changes))


@pytest.mark.parametrize("key", ALL_KEYS)
def test_a_value_nested_deeper_than_python_recurses_is_as_any_other(key):
    gives_sense_or_a_sentence({**CONFIGS["llama-2-7b"], key: NESTED})


def gives_sense_or_a_sentence(config: dict[str, Any]) -> None:
    for read in (decoder_of, quantization_of):
        found, said = None, ""
        try:
            found = read(config)
        except ConfigJsonError as refused:
            said = str(refused)
        assert said.isprintable()
        assert len(said) < 1000  # the known ones
        if isinstance(found, Decoder):
            assert found.heads % found.kv_heads == 0
            assert 0 < parameters(found) < 10**20
        else:
            assert found is None or found.words.isprintable()


@pytest.mark.parametrize("given", [NESTED, *(junk for junk in JUNK if junk != CONFIGS["llama-2-7b"])])
def test_a_config_that_is_none_is_refused(given):
    assert refusal(given).isprintable()


# --- public models


HERE = Path(__file__).parent / "models"
KNOWN = Known()
# Parts that the published total counts besides the text model, or leaves out; null: undocumented.
APART = {
    "deepseek-r1": "a layer that predicts a second token, and scales of FP8",
    "deepseek-v3": "a layer that predicts a second token, and scales of FP8",
    "gemma-3n-e2b": "the towers for images and sound",
    "gemma-3n-e4b": "the towers for images and sound",
    "gemma-3-12b": "the vision tower",
    "gemma-3-27b": "the vision tower",
    "gemma-3-4b": "the vision tower",
    "glm-4.5": "a layer that predicts a second token",
    "glm-4.5-air": "a layer that predicts a second token",
    "kimi-k2": None,
    "llama-4-maverick": "the vision tower",
    "llama-4-scout": "the vision tower",
    "mistral-small-3.1-24b": "the vision tower",
    "mistral-small-3.2-24b": "the vision tower",
    "nemotron-3-nano-30b-a3b": "not the biases of the routers",
    "qwen3.5-397b-a17b": "the vision tower and a layer that predicts a second token",
    "qwen3.5-4b": "the vision tower and a layer that predicts a second token",
}
WITHIN = 0.005  # of a total that is published rounded only
HEADER = 1024  # bytes by which the headers of a model's files differ: names, and padding of each tensor


@cache
def published() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((HERE / "published.json").read_text())
    return {name: row for name, row in found.items() if name in KNOWN}


def total(name: str) -> int:
    return decoder.parameters(KNOWN[name])


def rounded(text: str) -> float:
    units = {"T": 1e12, "B": 1e9, "M": 1e6}
    return float(text.rstrip("".join(units))) * units[text[-1]]


def test_every_exact_published_total_comes_out_to_the_last_parameter():
    exact = {name: row["total"] for name, row in published().items() if row["total"] and name not in APART}
    assert len(exact) >= 60
    assert {name: total(name) for name in exact} == exact


def test_a_published_total_that_counts_more_is_larger():
    for name, what in APART.items():
        row = published()[name]
        said = row["total"] or rounded(row["total_rounded"])
        assert (total(name) < said) == (what is None or not what.startswith("not")), name


def test_every_rounded_published_total_is_within_half_a_percent_or_its_last_digit():
    for name, row in published().items():
        if row["total"] or not row["total_rounded"] or name in APART:
            continue
        said, digits = rounded(row["total_rounded"]), row["total_rounded"].rstrip("TBM").partition(".")[2]
        last = rounded("1" + row["total_rounded"][-1]) * 10.0 ** -len(digits)
        assert abs(total(name) - said) <= max(WITHIN * said, last), name


def test_active_parameters_are_those_that_are_published():
    assert (
        decoder.active_params(KNOWN["mixtral-8x7b"]) + decoder.lm_head_params(KNOWN["mixtral-8x7b"])
        == (published()["mixtral-8x7b"]["active"])
    )
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-20b", "deepseek-v3", "mixtral-8x22b"):
        said = rounded(published()[name]["active_rounded"])
        counted = decoder.active_params(KNOWN[name])
        with_embedding = counted + decoder.lm_head_params(KNOWN[name])
        assert min(abs(counted - said), abs(with_embedding - said)) <= 0.03 * said, name


def files() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((HERE / "gguf_files.json").read_text())
    return found


def tensor_bytes(row: dict[str, Any]) -> int:
    quant = {"mxfp4": "mxfp4_moe"}.get(row["type"], row["type"])
    assert quant in ALL_QUANTS
    return sum(tensor.bytes for tensor in quantized(KNOWN[row["model"]], quant, imatrix=row["imatrix"]))


def test_the_tensors_of_published_gguf_files_take_these_bytes():
    rows = [row for row in files() if row["tensor_bytes"] and "differs" not in row]
    assert len(rows) >= 12
    assert [tensor_bytes(row) for row in rows] == [row["tensor_bytes"] for row in rows]


def test_all_published_gguf_files_of_a_model_are_their_tensors_and_one_header():
    headers: dict[tuple[str, str], list[int]] = defaultdict(list)
    rows = [row for row in files() if row["file_bytes"] and "differs" not in row]
    assert len(rows) >= 100
    for row in rows:
        headers[row["model"], row["file"][:10].lower()].append(row["file_bytes"] - tensor_bytes(row))
    for model, sizes in headers.items():
        assert min(sizes) > 0, model
        assert max(sizes) - min(sizes) <= 2 * HEADER, model
        assert max(sizes) < 20e6, model  # a vocabulary of 262,144 tokens
    assert sum(len(sizes) for sizes in headers.values() if len(sizes) > 4) >= 100


def test_a_file_that_differs_says_why():
    assert all(row["differs"] not in ("", "?") for row in files() if "differs" in row)
