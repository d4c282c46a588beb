"""Models that are not dense, as layers: their parameters against transformers' own; hostile config.json."""

import json
import math
import subprocess
from dataclasses import replace

import pytest
from damage import Edits, edited, edits
from hypothesis import given
from hypothesis import strategies as st

from harness.base import data
from harness.theory import decoder, floors
from harness.theory.architectures import decoder_of
from harness.theory.config_settings import ConfigJsonError, NoShape
from harness.theory.decoder import Decoder
from harness.theory.floors import Ceiling, Demand, Pass, cost
from harness.theory.ggml_quants import quantized
from harness.theory.known_models import config_of
from harness.theory.layer_parts import distinct_share

NAMES = data.model_names()
JUNK = [0, -1, 1.5, True, None, "", "x" * 300, 10**30, [], {}, [1, 2], "full_attention", ["conv"]]
# Elements of the text model that transformers builds, a tied matrix once, and of the routers' corrections,
# which it keeps as buffers and checkpoints store.
COUNT = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
for line in sys.stdin:
    config = json.loads(line)
    text = config.get("text_config", config)
    kind = text.pop("model_type")
    try:
        made = AutoConfig.for_model(kind, **text)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
        held = {id(p): p.numel() for p in model.parameters()}
        buffers = {n: b.numel() for n, b in model.named_buffers()}
        ends = ("correction_bias", "expert_bias")
        corrections = sum(size for n, size in buffers.items() if n.endswith(ends))
        print(json.dumps(sum(held.values()) + corrections))
    except Exception as why:
        print(json.dumps(f"{type(why).__name__}: {why}"[:300]))
"""


def made(name: str) -> Decoder:
    return decoder_of(config_of(name))


def test_every_shipped_model_is_known_and_says_where_its_figures_are_from():
    assert len(NAMES) >= 60
    for name in NAMES:
        assert config_of(name)["harness_source"], name
        assert decoder.parameters(made(name)) > 10**8, name


@pytest.mark.stack(name="hf")
@pytest.mark.slow("builds every model without its weights")
def test_every_shipped_model_has_the_parameters_that_transformers_builds(own_interpreter):
    lines = "".join(json.dumps(config_of(name)) + "\n" for name in NAMES)
    command = [own_interpreter("hf").python, "-c", COUNT]
    ran = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    counted = dict(zip(NAMES, map(json.loads, ran.stdout.splitlines()), strict=True))
    # Code of their own on the hub, not in transformers.
    apart = {name for name in NAMES if config_of(name)["model_type"] in ("kimi_k2", "internlm2", "exaone")}
    assert {name for name, count in counted.items() if isinstance(count, str)} == apart
    known = set(NAMES) - apart
    assert {n: decoder.parameters(made(n)) for n in known} == {n: counted[n] for n in known}


def test_experts_that_many_tokens_use_are_counted_as_they_are_drawn():
    assert distinct_share(8, 2, 1) == 0.25
    assert distinct_share(128, 8, 1e6) == pytest.approx(1)
    # Of two experts, each token using one: two tokens use one with probability 1/2, else both.
    assert distinct_share(2, 1, 2) == 0.75


SMALL = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 2} | SMALL
MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2}
GEMMA = {"model_type": "gemma2", "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 512} | SMALL


def test_a_token_computes_with_its_experts_alone():
    mixture = decoder_of(MIXTRAL)
    expert = 3 * 64 * 128
    shared = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 + 8 * 64
    assert decoder.layer_params(mixture) == 2 * (shared + 8 * expert) + 64
    assert decoder.active_layer_params(mixture) == 2 * (shared + 2 * expert) + 64


def test_more_tokens_read_more_experts_until_they_read_all():
    needs = floors.demand_of_bits(decoder_of(MIXTRAL), 16)
    idle = needs.expert_bytes * 3 / 4
    step = needs.weight_bytes_per_token
    assert weights(needs, 1) == step
    assert weights(needs, 2) == pytest.approx(step + needs.expert_bytes * (7 / 16 - 1 / 4))
    assert weights(needs, 1000) == pytest.approx(step + idle)
    assert needs.resident_bytes == needs.layer_bytes + idle + needs.lm_head_bytes + needs.embedding_bytes


def test_a_mixture_is_bound_by_compute_where_a_pass_computes_as_long_as_it_reads():
    needs, ceiling = floors.demand_of_bits(made("qwen3-30b-a3b"), 4), Ceiling(1e12, 165e12)
    ridge = floors.prefill_ridge(needs, ceiling)
    assert ridge is not None
    before, after = (ceiling.excess_s(cost(needs, Pass(n))) for n in (math.floor(ridge), math.ceil(ridge)))
    assert before < 0 <= after
    dense = replace(needs, experts=0)
    assert ridge > 2 * (floors.prefill_ridge(dense, ceiling) or math.inf)
    slow = Ceiling(1e12, 20e12)
    knees, alone = floors.prefill_knees(needs, slow), floors.prefill_ridge(needs, slow)
    assert knees is not None
    assert alone is not None
    assert knees[0] > alone  # where every token reads the cache again
    batch = floors.compute_bound_batch(needs, ceiling)
    reading_s = weights(needs, batch) / ceiling.bytes_per_s
    assert needs.flops_per_token * batch / ceiling.flops == pytest.approx(reading_s)


def weights(needs: Demand, tokens: float) -> float:
    return cost(needs, Pass(tokens)).weights


def test_a_state_is_read_and_written_by_each_pass_of_each_user_and_counts_toward_every_crossing():
    needs, ceiling = floors.demand_of_bits(made("qwen3-next-80b-a3b"), 4), Ceiling(1e12, 165e12)
    states = sum(cache.state * layers for cache, layers in decoder.kinds(made("qwen3-next-80b-a3b")).items())
    assert needs.state_bytes == 4 * states > 0
    for step in (Pass(), Pass(depth=5000), Pass(512), Pass(512, kv_block=1)):
        assert cost(needs, step).states == 8 * states
    assert cost(needs, Pass(users=7)).states == 7 * 8 * states
    none = replace(needs, state_bytes=0.0)
    assert cost(needs, Pass()).bytes == cost(none, Pass()).bytes + 8 * states
    moved_s = 8 * states / ceiling.bytes_per_s
    for floor_s, times in (
        (lambda of: floors.decode_floor_s(of, ceiling, 1000), 1),
        (lambda of: floors.B_s(of, ceiling), 1),
        (lambda of: floors.B_s(of, ceiling, "full", 1000), 1),
        (lambda of: floors.batch_floor_s(of, ceiling, 3, 1000), 3),
        (lambda of: floors.prefill_floor_s(of, ceiling, 30, chunk=10), 3),
    ):
        assert floor_s(needs) - floor_s(none) == pytest.approx(times * moved_s)
    for crossing in (
        lambda of: (floors.prefill_knees(of, Ceiling(1e12, 20e12)) or [0])[0],
        lambda of: floors.prefill_ridge(of, ceiling),
        lambda of: floors.compute_bound_users(of, Ceiling(1e12, 10e12), 1),
    ):
        assert crossing(needs) > crossing(none) > 1


def test_latency_has_a_slope_of_its_own_up_to_each_window_and_none_where_nothing_grows():
    needs, ceiling = floors.demand_of_bits(made("gpt-oss-20b"), 4), Ceiling(1e12, math.inf)
    (first, W), (past, flatter) = floors.slopes(needs, ceiling)
    assert (first, past) == (1, 129)
    assert flatter == pytest.approx(2 * (W or 0))  # every second layer has a window
    steps = [floors.decode_floor_s(needs, ceiling, n) for n in (100, 101, 1000, 1001)]
    assert 1 / (steps[1] - steps[0]) == pytest.approx(W, rel=1e-6)
    assert 1 / (steps[3] - steps[2]) == pytest.approx(flatter, rel=1e-6)
    states = replace(needs, reaches=(), state_bytes=1e6)
    assert floors.slopes(states, ceiling) == [(1, None)]
    assert floors.B_s(states, ceiling) == (needs.weight_bytes_per_token + 2e6) / 1e12


def test_every_second_layer_of_gemma_2_has_a_window():
    windows = [layer.cache.window for layer in decoder_of(GEMMA).layers()]
    assert windows == [512, None, 512]
    given = {**GEMMA, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    assert [layer.cache.window for layer in decoder_of(given).layers()] == [None, 512, 512]


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        (MIXTRAL, {"num_experts_per_tok": 9}, "9 experts are chosen for a token, of 8"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts must be a whole number from 1 to "),
        (
            MIXTRAL,
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        (MIXTRAL, {"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4"),
        (
            MIXTRAL,
            {"model_type": "mixtrall"},
            "architecture 'mixtrall' is not known; the nearest that is: mixtral",
        ),
        (MIXTRAL, {"model_type": "whisper"}, "architecture 'whisper' is not known"),
        (MIXTRAL, {"vocab_size": None}, "vocab_size is missing"),
        (GEMMA, {"sliding_window": 9000}, "sliding_window 9000 is longer than the context of 8192"),
        (GEMMA, {"layer_types": ["full_attention"]}, "layer_types must be a list of 3, one for each layer"),
        (
            GEMMA,
            {"layer_types": ["round"] * 3},
            "layer_types has 'round'; known: full_attention, sliding_attention",
        ),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_in_a_sentence(model, changes, said):
    with pytest.raises(ConfigJsonError) as refused:
        decoder_of(model | changes)
    assert str(refused.value).startswith(said)
    assert isinstance(refused.value, NoShape) == said.startswith("architecture")  # which is no mistake


def one_of_each_kind() -> list[str]:
    """What is read of a file depends on its kind alone."""
    found: dict[object, str] = {}
    for name in NAMES:
        config = config_of(name)
        inner = config.get("text_config")
        found[inner.get("model_type") if isinstance(inner, dict) else config["model_type"]] = name
    return sorted(found.values())


@st.composite
def hostile_configs(draw: st.DrawFn) -> tuple[str, Edits]:
    name = draw(st.sampled_from(one_of_each_kind()))
    config = config_of(name)
    inner = config.get("text_config")
    ways: list[tuple[str | int, ...]] = [("model_type",)]
    ways += [("text_config", key) for key in inner] if isinstance(inner, dict) else [(key,) for key in config]
    return name, draw(edits(ways, JUNK))


@given(hostile_configs())
def test_a_hostile_config_gives_layers_that_make_sense_or_one_sentence(hostile: tuple[str, Edits]):
    name, changes = hostile
    found, said = None, ""
    try:
        found = decoder_of(edited(config_of(name), changes))
    except ConfigJsonError as refused:
        said = str(refused)
    assert said.isprintable()
    assert len(said) < 2000
    if found is None:
        return
    assert 0 < decoder.active_params(found) <= decoder.parameters(found) + decoder.lm_head_params(found)
    assert decoder.kv_elements_per_token(found) >= 0


def test_theory_says_which_weights_and_kv_types_fit_a_memory(harness):
    asked = ("qwen3-30b-a3b", "gemma-3-12b", "--memory", "16GB", "--context", "32k", "--bandwidth", "448")
    rows = harness("theory", *asked, "--json").json
    of = {(row["model"], row["weights"], row["kv"]): row for row in rows}
    assert len(rows) == 7 * 3 + 6 * 3
    assert [of["qwen3-30b-a3b", quant, "f16"]["fits"] for quant in ("q4_k_m", "q2_k")] == [False, True]
    assert of["gemma-3-12b", "q4_k_m", "q8_0"]["longest"] > of["gemma-3-12b", "q4_k_m", "f16"]["longest"]
    least = of["gemma-3-12b", "q4_k_m", "f16"]
    read = sum(t.bytes for t in quantized(made("gemma-3-12b"), "q4_k_m"))
    assert 1 / least["tokens_per_s"] == pytest.approx(read / 448e9, rel=1e-3)  # tied: all of it is read
    assert least["tokens_per_s_at_context"] < least["tokens_per_s"]
    said = harness("theory", *asked).out
    assert "With 32,768 tokens of context" in said
    assert "GB short" in said
    assert "GB to spare" in said


def test_a_mixture_on_a_page_of_theory_says_how_many_experts_and_slopes_it_has(harness):
    ran = harness("theory", "gpt-oss-20b", "--machine", "rtx-4090", "--quant", "mxfp4_moe")
    said = " ".join(ran.out.split())
    assert "4 of 32 experts a token" in said
    assert "from n = 129" in said
    said = harness("theory", "qwen3-next-80b-a3b", "--machine", "h200", "--bpw", "8").out
    assert "MB of state are read and written by each step" in said
