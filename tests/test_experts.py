"""The experts that a mixture's routers choose: heard, followed, and judged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
from conftest import Ran
from test_other_models_run import made
from test_same_model import PROMPT, relative_error, stack

from harness.analysis import agreement, own_weights
from harness.models import layout, yarn
from runners.workloads.experts import Heard, gaps

__all__ = ["made", "stack"]  # fixtures


def test_the_gap_is_how_far_scores_are_from_the_choice_in_their_own_spread():
    scores = np.array([[3.0, 1.0, -1.0, -3.0]])
    spread = np.sqrt(2) * np.sqrt(5)
    assert gaps(scores, np.array([[1, 0]])) == 0
    assert gaps(scores, np.array([[0, 2]])) == pytest.approx(2 / spread)
    assert gaps(scores, np.array([[3, 2]])) == pytest.approx(6 / spread)
    softmax = np.exp(scores) / np.exp(scores).sum()
    assert gaps(softmax, np.array([[0, 2]])) == pytest.approx(2 / spread)


def test_choices_by_scores_with_an_error_are_explained_by_it_and_those_of_another_router_are_not():
    random = np.random.default_rng(0)

    def found(count: int, used: int, error: float, right: float = 1.0) -> str | None:
        scores = random.normal(size=(5_000, count))
        chosen = np.argsort(right * scores + error * random.normal(size=scores.shape))[:, -used:]
        gap = float(np.sqrt(np.square(gaps(scores, chosen)).mean()))
        return own_weights.experts_wrong({"experts": count, "gap": gap}, error, "its own weights")

    for experts in ((4, 1), (8, 2), (32, 4), (128, 8), (256, 8)):
        for error in (0.05, 0.2, 0.6):
            assert found(*experts, error) is None
        assert "and its types explain" in str(found(*experts, 0.2, right=0.0))


def test_experts_of_a_batch_whose_first_tokens_a_layer_left_out_are_followed_where_known(tmp_path):
    given = np.array([[[0], [1], [2]], [[-1], [2], [0]]])
    heard = Heard(given)
    heard.experts, scores = 3, np.eye(3)
    first = heard.hear(0, np.array([[0], [1], [2]]), scores)
    last = heard.hear(1, np.array([[1], [0]]), scores[1:])
    assert first.tolist() == [[0], [1], [2]]
    assert last.tolist() == [[2], [0]]
    facts = heard.write(tmp_path / "e.npy")
    assert facts["followed"] | {"gap": 0} == {"layers": 2, "used": 1, "choices": 5, "others": 1, "gap": 0}
    assert facts["followed"]["gap"] > 0
    assert np.load(tmp_path / "e.npy")[1].tolist() == [[-1], [1], [0]]


def test_another_number_of_experts_is_said_and_not_followed(tmp_path):
    heard = Heard(np.zeros((1, 2, 1), int))
    assert heard.hear(0, np.array([[0, 1], [1, 2]]), np.eye(3)[:2]) is None
    found = heard.write(tmp_path / "e.npy")
    assert (found["used"], found["followed"]["used"], found["followed"]["choices"]) == (2, 1, 0)


def checked(error: float, **experts: Any) -> dict[str, Any]:
    """A check of a q8_0 mixture: the error of its logits, and its experts."""
    depth = {"n": 25, "positions": 25, "not_finite": 0, "reference_not_finite": 0, "relative_error": error}
    found = {"depths": [{**depth, "scale": 1.0}]}
    if experts:
        usual = {"experts": 8, "used": 2, "chosen": 2, "choices": 100, "others": 5, "gap": 0.02}
        found["experts"] = usual | experts
    check = {**found, "own": {**found, "settings": []}}
    weights = {"decoder": {"experts": 8}}
    return {"outcome": "ok", "check": check, "options": {"quant": "q8_0"}, "model": {"weights": weights}}


@pytest.mark.parametrize(
    ("error", "experts", "word", "said"),
    [
        (0.09, {"gap": 0.09}, "agrees", None),
        (0.11, {"gap": 0.09}, "wrong", "logits are 11% off its own weights, dequantized"),
        (0.01, {"gap": 0.21}, "wrong", "21% of their spread (root mean square) too low by its own weights"),
        (0.01, {"chosen": 1, "choices": 0}, "wrong", "a token uses 1 expert, and 2 in its own weights"),
        (0.01, {}, "agrees", None),
        (0.3, {}, "unchecked", "near a tie may choose others; logits are 30% off the 16-bit reference"),
    ],
)
def test_a_mixture_is_judged_at_equal_routing_by_the_bounds_of_any_model(error, experts, word, said):
    record: Any = checked(error, **experts)
    assert own_weights.allowed_own_weights(record) == 0.1
    found, reason = agreement.verdict(record)
    assert found == word
    assert (said or "") in (reason or "")


def test_logits_that_yarns_rounding_moves_are_unchecked_between_stacks():
    record: Any = checked(0.3, gap=0.02)
    record["model"]["weights"]["yarn_difference"] = 0.76
    record |= {"stack": "llamacpp"}
    record["check"]["reference"] = {"stack": "hf"}
    found, reason = agreement.verdict(record)
    assert found == "unchecked"
    assert "truncate: false" in str(reason)
    record["check"]["reference"] = {"stack": "llamacpp"}
    assert agreement.verdict(record)[0] == "wrong"


@pytest.mark.slow  # real stacks: 20 s a kind
@pytest.mark.parametrize("kind", ["gpt_oss", "lfm2_moe", "mixtral", "qwen3_moe"])
def test_both_stacks_compute_the_same_with_experts_that_neither_would_choose(kind, made, stack, tmp_path):
    source, target = made(kind, "f32")
    config = tiny_models.config(kind)
    used, experts = config["num_experts_per_tok"], config.get("num_experts") or config["num_local_experts"]
    layers = config["num_hidden_layers"] - config.get("num_dense_layers", 0)
    random = np.random.default_rng(0)
    given = [random.permutation(experts)[:used] for _ in range(layers * (len(PROMPT) + 10))]
    np.save(tmp_path / "given.npy", np.reshape(given, (layers, -1, used)))
    ids = [*PROMPT, *PROMPT[:10]]
    workload = {"ids": ids, "prompt_tokens": 25, "prompt_keep": 5, "windows": [[25, 35]], "seconds": None}
    rows, facts = {}, {}
    for name, path in (("hf", source), ("llamacpp", target)):
        for way in ("free", "follow"):
            files = {"logits": str(tmp_path / "l.npy"), "experts": str(tmp_path / f"{name}-{way}.npy")}
            files |= {"follow": str(tmp_path / "given.npy")} if way == "follow" else {}
            _, found = stack(name, "logits", path, workloads=[workload], files=files)
            rows[name, way], facts[name, way] = np.load(tmp_path / "l.npy"), found["experts"]
    assert relative_error(rows["llamacpp", "follow"], rows["hf", "follow"]) < 1e-3
    assert relative_error(rows["hf", "follow"], rows["hf", "free"]) > 0.3
    mine, theirs = (facts[name, "follow"]["followed"] for name in ("llamacpp", "hf"))
    assert 1 < mine["gap"] < 1.01 * theirs["gap"]
    assert theirs["choices"] == layers * 35
    # Its last layer may take only tokens with logits.
    assert mine["choices"] in (layers * 35, layers * 35 - 20)
    heard = [np.sort(np.load(tmp_path / f"{name}-free.npy")) for name in ("llamacpp", "hf")]
    known = heard[0] >= 0
    assert (heard[0] != heard[1])[known].mean() < 0.02


@pytest.mark.slow  # real stacks
def test_a_mixture_of_which_a_stack_uses_fewer_experts_is_wrong(
    harness: Callable[..., Ran], hf_interpreter: Any, llamacpp_interpreter: Any, tmp_path: Path
) -> None:
    tiny_models.written(tmp_path, "mixtral")
    settings = '{"prompt_tokens": 25, "new_tokens": 40}'
    text = f"models: [{{shape: mixtral.json}}]\nvariants: [{{stack: llamacpp}}]\nprotocol: {settings}\n"
    (tmp_path / "one.yaml").write_text(text.replace("llamacpp}", "llamacpp, quant: q8_0}"))
    assert harness("run", "--check-weights", tmp_path / "one.yaml", "--json").json[0]["verdict"] == "agrees"
    record = json.loads(next((tmp_path / "results").rglob("record.json")).read_text())
    file = Path(record["model"]["weights"]["file"])
    reader = gguf.GGUFReader(file, "r+")
    reader.fields["llama.expert_used_count"].parts[-1][0] = 1
    reader.data.flush()
    del reader
    (again,) = harness("run", "--check-weights", tmp_path / "one.yaml", "--json", "--fresh").json
    assert again["verdict"] == "wrong"
    assert "a token uses 1 expert, and 2 in" in again["reason"]


@pytest.mark.slow  # real stacks
def test_yarn_that_is_not_truncated_is_said_in_a_run(harness, hf_interpreter, llamacpp_interpreter, tmp_path):
    scaling = tiny_models.config("gpt_oss")["rope_scaling"] | {"truncate": False}
    tiny_models.written(tmp_path, "gpt_oss", rope_scaling=scaling)
    settings = '{"prompt_tokens": 25, "new_tokens": 40, "repeats": 1, "measure_bandwidth": false}'
    text = f"models: [{{shape: gpt_oss.json}}]\nvariants: [{{stack: llamacpp}}]\nprotocol: {settings}\n"
    (tmp_path / "one.yaml").write_text(text)
    harness("run", tmp_path / "one.yaml")
    (row,) = harness("report", tmp_path / "results", "--format", "json").json
    assert "yarn_rounded" in [flag["code"] for flag in row["flags"]]


def gpt_oss(**more: Any) -> dict[str, Any]:
    """The keys of gpt-oss's GGUF that YaRN depends on."""
    known = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
        "rope.freq_base": 150_000.0,
        "attention.key_length": 64,
    }
    keys = {f"gpt-oss.{key}": value for key, value in (known | more).items() if value is not None}
    return {"general.architecture": "gpt-oss", **keys}


def test_rounding_yarns_range_moves_frequencies_by_the_formulas_of_both():
    """Its ends are 8.09 and 17.40 for llama.cpp's 8 and 18; the worst is the frequency of pair 17."""
    exact, rounded = ((17 - low) / (high - low) for low, high in ((8.0928, 17.3980), (8, 18)))
    expected = (1 - rounded + rounded / 32) / (1 - exact + exact / 32) - 1
    assert yarn.yarn_difference(gpt_oss()) == pytest.approx(expected, rel=1e-3)
    assert yarn.yarn_difference(gpt_oss()) == pytest.approx(0.763, abs=0.001)
    assert yarn.yarn_difference(gpt_oss(**{yarn.TRUNCATED: 1})) == 0
    assert yarn.yarn_difference(gpt_oss(**{yarn.TRUNCATED: 0})) > 0.5
    assert yarn.yarn_difference(gpt_oss(**{"rope.scaling.type": None})) == 0
    assert yarn.yarn_difference(gpt_oss(**{"rope.freq_base": "much"})) == 0
    assert yarn.yarn_difference({**gpt_oss(), "general.architecture": "llama"}) == 0


def test_a_gguf_made_here_says_whether_yarn_is_truncated():
    scaling = tiny_models.config("gpt_oss")["rope_scaling"]
    made = [
        layout.of(tiny_models.config("gpt_oss", rope_scaling=each)).metadata
        for each in (scaling, scaling | {"truncate": False})
    ]
    assert [each[yarn.TRUNCATED] for each in made] == [1, 0]
    with pytest.raises(layout.NoLayout, match="without a rope_scaling"):
        layout.check_gguf(tiny_models.config("gpt_oss", rope_scaling=None))


@pytest.mark.slow  # real stacks
@pytest.mark.parametrize("name", ["hf", "llamacpp"])
def test_fixed_ids_are_fed_in_place_of_a_token_that_repeats(name: str, made: Callable, stack: Callable):
    source, target = made("qwen3_moe", "f32")
    warmup = {"window_tokens": 2, "max_windows": 1, "tolerance": 1.0}
    workload = {"prompt": PROMPT, "new_tokens": 30, "holds": 55, "warmup": warmup, "fixed_ids": 512}
    ids, facts = stack(name, "generate", source if name == "hf" else target, workloads=[workload])
    assert facts["fed"] == "fixed ids"
    assert facts["routing"]["distinct_tokens"] == 30
    fed = [(1013 + 7919 * i) % 512 for i in range(25, 54)]
    file = {"logits": str(source.parent / "l.npy")}
    given = {"ids": [*PROMPT, *fed], "prompt_tokens": 25, "windows": [[25, 54]], "seconds": None}
    stack(name, "logits", source if name == "hf" else target, workloads=[given], files=file)
    rows = np.load(file["logits"])[24:]
    assert ids == rows.argmax(-1).tolist()  # its own choices, after the fed tokens
    plain = {key: value for key, value in workload.items() if key != "fixed_ids"}
    _, facts = stack(name, "generate", source if name == "hf" else target, workloads=[plain])
    assert "fed" not in facts
