"""Models that are not dense as tensors of a checkpoint and of a GGUF: names, sizes, and what is refused."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
from small_checkpoints import read as read_values
from small_checkpoints import synthesized
from tiny_models import KINDS

from harness.analysis import expert_routing
from harness.config import load, plan
from harness.models import check, layout, locate
from harness.stacks.header import references
from harness.theory import decoder
from harness.theory.architectures import decoder_of
from harness.theory.known_models import Described, config_of
from runners.weights.layout import Back, Row, backwards, layout_parts, rows_of, stored, turned, values

# Names that llama.cpp's own map lacks: its converter splits or renames them beforehand (conversion/*.py).
CONVERTED = ("gate_up_proj", "down_proj", "sinks", "expert_bias", "experts")


def plain(kind: str, **changes: Any) -> dict[str, Any]:
    return layout.of(tiny_models.config(kind, **changes)).plain()


def made_of(target: Path, kind: str, shard_bytes: int = 5 * 10**9) -> dict[str, np.ndarray]:
    synthesized(target, None, shard_bytes, layout=plain(kind))
    return read_values(target)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_that_llama_cpps_own_map_gives(kind):
    made = layout.of(tiny_models.config(kind))
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == made.architecture)
    known = gguf.get_tensor_name_map(arch, made.layers)
    checked = 0
    for row in made.rows:
        there = row.there.replace("experts.{}.", "experts.")
        if name := known.get_name(there, (".weight", ".bias")):
            # The converter appends to what has no ending in transformers.
            assert row.name in (name, f"{name}.bias", f"{name}.weight")
            checked += 1
        else:
            assert any(part in row.there for part in CONVERTED), row
    assert checked > len(made.rows) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_as_many_values_as_the_model_has_parameters(kind, tmp_path):
    found = made_of(tmp_path / "hf", kind)
    parameters = decoder.parameters(decoder_of(tiny_models.config(kind)))
    assert sum(each.size for each in found.values()) == parameters
    assert all(np.isfinite(each).all() and each.all() for each in found.values())
    assert locate.local(tmp_path / "hf").synthetic


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_to_a_gguf_and_back_keeps_every_value(kind, tmp_path):
    given = made_of(tmp_path / "hf", kind, shard_bytes=10**6)
    rows = rows_of(plain(kind))

    def read(name: str, first: int, count: int) -> np.ndarray:
        return given[name].ravel()[first : first + count]

    made: dict[Row, np.ndarray] = {}
    for row in rows:
        pieces = [values(row, first, count, read) for first, count in layout_parts(row)]
        made[row] = np.concatenate(pieces).reshape(row.dims)
    names = set()
    for name, back in backwards(rows):
        found = [turned(part, [taken(part, made[row]) for row in part.rows]) for part in back]
        assert np.array_equal(np.concatenate(found), given[name].ravel()), name
        names.add(name)
    assert names == given.keys() == stored(rows).keys()


def taken(part: Back, values: np.ndarray) -> np.ndarray:
    """The rows of a GGUF's tensor that a part is made of."""
    of_expert = values if part.expert is None else values[part.expert]
    whole = of_expert.ndim == 1 and part.expert is not None
    return (of_expert if whole else of_expert[part.begin : part.end]).ravel()


def test_values_do_not_depend_on_shards_or_the_other_tensors(tmp_path):
    one, other = (made_of(tmp_path / str(size), "gpt_oss", size) for size in (5 * 10**9, 10**6))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "has norm_topk_prob true; this model has false"),
        ("gemma3_text", {"query_pre_attn_scalar": 256}, "scales queries by 64; query_pre_attn_scalar is 256"),
        (
            "gemma3_text",
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping null; this model has",
        ),
        ("gemma3_text", {"sliding_window_pattern": 3}, "attends to all tokens in one layer of 6"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "has swiglu_limit 7; this model has 5"),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "in one layer of 2"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope scaling 'longrope' of phi3 is not converted"),
        ("lfm2", {"conv_bias": True}, "has conv_bias null; this model has true"),
    ],
)
def test_what_llama_cpp_computes_otherwise_has_no_gguf(kind, changes, why):
    model = tiny_models.config(kind, **changes)
    described = Described(decoder_of(model), model)
    check.check_synthetic(described, "hf", references()["hf"])
    with pytest.raises(locate.WeightsUnavailable, match=why):
        check.check_synthetic(described, "gguf", references()["gguf"])


def test_a_kind_without_a_layout_is_unavailable_in_every_format():
    model = config_of("deepseek-v2-lite")
    for form in ("hf", "gguf"):
        with pytest.raises(locate.WeightsUnavailable, match="deepseek_v2 is neither synthesized"):
            check.check_synthetic(Described(decoder_of(model), model), form, references()[form])


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 17}, "17 experts are chosen for a token, of 16"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts must be a whole number from 1"),
        ("gemma3_text", {"sliding_window": 5000}, "sliding_window 5000 is longer than the context of 4096"),
        ("qwen3_moe", {"model_type": "qwen3_mo"}, "'qwen3_mo' is not known; the nearest that is: qwen3_moe"),
    ],
)
def test_a_mistaken_config_json_is_one_sentence_with_its_line(kind, changes, said, tmp_path):
    path = tiny_models.written(tmp_path, kind, **changes)
    text = f"models: [{{shape: {path.name}}}]\nvariants: [{{stack: hf}}]\n"
    (tmp_path / "one.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"one\.yaml:1: models\.0\.shape: ") as found:
        load(tmp_path / "one.yaml")
    assert said in str(found.value)
    assert str(found.value).count("\n") == 0


@pytest.mark.parametrize(
    "changes",
    [
        *({"rope_scaling": ["yarn"]}, {"rope_theta": "many"}, {"rope_parameters": {"full_attention": 3}}),
        *({"rms_norm_eps": "small"}, {"partial_rotary_factor": 7}),
        {"rope_scaling": {"rope_type": "linear", "factor": "two"}},
    ],
)
def test_values_of_a_config_json_that_make_no_sense_are_a_sentence(changes):
    model = tiny_models.config("mixtral", **changes)
    key = next(iter(changes))
    with pytest.raises(locate.WeightsUnavailable, match=f"{key}|factor"):
        check.check_synthetic(Described(decoder_of(model), model), "gguf", references()["gguf"])


def test_a_config_names_a_known_model_or_a_config_json(tmp_path):
    (tmp_path / "mine").mkdir()
    tiny_models.written(tmp_path / "mine", "mixtral").rename(tmp_path / "mine/config.json")
    shapes = ("Qwen/Qwen3-30B-A3B", "mine/config.json", "tinyllama-1.1b", "qwen3-0.6b")
    rows = ", ".join(f"{{shape: {shape}}}" for shape in shapes)
    (tmp_path / "one.yaml").write_text(f"models: [{rows}]\nvariants: [{{stack: hf}}]\n")
    models = load(tmp_path / "one.yaml").models
    assert [model.name for model in models] == ["qwen3-30b-a3b", "mine", "tinyllama-1.1b", "qwen3-0.6b"]
    assert [model.made.arch for model in models if model.made] == ["qwen3moe", "llama", "llama", "qwen3"]
    assert [model.described.config is not None for model in models] == [True, True, False, False]
    before = [cell.id for cell in plan.cells(load(tmp_path / "one.yaml"))]
    tiny_models.written(tmp_path / "mine", "mixtral", hidden_size=512).rename(tmp_path / "mine/config.json")
    after = [cell.id for cell in plan.cells(load(tmp_path / "one.yaml"))]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True, True]


def test_of_one_repeated_token_the_experts_are_said_to_be_pinned():
    def record(distinct: int, counts: list[int]) -> Any:
        found = {"experts": 8, "tokens": 20, "distinct_tokens": distinct, "layers": [counts] * 2}
        return {"kind": "measured", "done": {"routing": found}, "model": {"weights": {"synthetic": True}}}

    even, pinned = record(19, [5] * 8), record(1, [20, 20, *[0] * 6])
    assert [flag.code for flag in expert_routing.routing_notes(even)] == ["synthetic_routing"]
    assert "busiest expert 1.0 times" in expert_routing.routing_notes(even)[0].detail
    assert [flag.code for flag in expert_routing.routing_notes(pinned)] == [
        "synthetic_routing",
        "pinned_experts",
    ]
    assert "fed 1 different tokens, and used 2 of 8 experts" in expert_routing.routing_notes(pinned)[1].detail
    pinned["model"]["weights"]["synthetic"] = False
    assert [flag.code for flag in expert_routing.routing_notes(pinned)] == ["pinned_experts"]
