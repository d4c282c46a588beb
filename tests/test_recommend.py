"""`harness recommend`: what can run, how it is ranked, and what is said where little is known."""

from __future__ import annotations

import copy
import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from conftest import refused
from golden_record import record
from test_checkpoint import write_config

from harness.api import prediction
from harness.api.prediction import Given
from harness.base import data
from harness.config import Model, load
from harness.dataset.study import Study
from harness.models import locate
from harness.recommend import commands as typed
from harness.recommend import examples, outcomes, quality_loss
from harness.recommend.candidates import Candidate, Subject, candidates
from harness.recommend.commands import Source
from harness.recommend.outcomes import with_predictions
from harness.recommend.places import place_of
from harness.recommend.quality_loss import Perplexity
from harness.recommend.sides import by_experts, first_that_fits, sides_of
from harness.recommend.speed import Predictor
from harness.recommend.traits import Example, Range, Traits
from harness.theory.floors import demand_of_tensors
from harness.theory.ggml_quants import quantized
from harness.theory.ggml_types import element_bytes
from harness.theory.known_models import Described, Known
from harness.theory.machines import MACHINES
from harness.theory.memory import LlamaCpp, longest_context, total_bytes
from harness.theory.memory import Model as Held
from harness.theory.split_weights import Placement, split_layers, step_s


@functools.cache
def offered(model: str, machine: str, context: int = 8192, stacks: tuple[str, ...] = ()) -> list[Candidate]:
    return candidates(subject(model), place_of(MACHINES[machine], machine, 4), context, stacks)


def subject(model: str) -> Subject:
    made = Known()[model]
    return Subject(Model(name=model, described=Described(made) if made.is_dense else None), made)


def named(found: list[Candidate]) -> dict[str, Candidate]:
    return {f"{each.cell.variant.stack} {each.cell.variant.name}": each for each in found}


def recommended(harness, model: str, *more, machine: str = "rtx-4090") -> tuple[list[Any], dict[str, Any]]:
    """The ranking, and the rows of what fits by name."""
    ran = harness("recommend", model, "--machine", machine, *more, "--json")
    assert ran.code == 0, ran.err
    return ran.json["ranking"], {row["name"]: row for row in ran.json["variants"] if row["fits"]}


def test_the_answer_for_a_known_card_begins_with_what_keeps_quality(harness):
    ranking, rows = recommended(harness, "qwen1.5-7b", "--context", "8k")
    best = ranking[0]
    assert "keeps quality" in best["why"]
    assert rows[best["name"]]["quality_loss"] < 0.02
    assert "RTX 4090" in rows[best["name"]]["quality_source"]
    fastest = next(each["name"] for each in ranking if "fastest" in each["why"].split("; ")[0])
    assert fastest in rows
    # Published: 1 / (11.72 ms) at the start, of which 4.9 ms are the study's loop of early 2024, which a
    # server of today does not have; 4.14 GB of weights and 8,192 tokens of cache of 512 KiB.
    q4_0 = rows["llamacpp q4_0"]
    assert q4_0["tokens_per_s"][0] > 1000 / (11.72 - 4)
    assert q4_0["memory_bytes"] > 4.14e9 + 8192 * 2**19
    assert q4_0["basis"] == "other machines"  # others' cards of this name are not the user's


@pytest.mark.parametrize(
    ("goal", "key"),
    [("speed", "tokens_per_s_at_context"), ("context", "longest_context")],
)
def test_a_goal_comes_first(harness, goal, key):
    ranking, rows = recommended(harness, "qwen1.5-14b", "--for", goal)
    figures = {n: row[key][0] if isinstance(row[key], list) else row[key] or 0 for n, row in rows.items()}
    assert figures[ranking[0]["name"]] == pytest.approx(max(figures.values()), rel=0.005)  # as printed
    assert len(ranking) == 5


def test_where_no_quality_is_known_sixteen_bits_do_not_win_for_that_alone(harness):
    (best, *_), rows = recommended(harness, "llama-3.1-8b")
    assert rows["hf bf16-dynamic"]["quality_loss"] is None
    assert "fastest with at least 4 bits a weight and a 16-bit KV cache, quality unknown" in best["why"]
    enough = [
        row["tokens_per_s_at_context"][0]
        for row in rows.values()
        if row["bits_per_weight"] >= 4 and "q8_0" not in str(row["options"].get("type_k"))
    ]
    # Of those that are about as fast, the one with the most bits.
    assert rows[best["name"]]["tokens_per_s_at_context"][0] > max(enough) / 1.1
    assert rows[best["name"]]["bits_per_weight"] < 10
    assert rows["llamacpp q4_0-flash_attn=true"]["tokens_per_s_at_context"][0] == max(enough)
    assert rows[best["name"]]["variant"] == "q4_k_m-flash_attn=true"


def test_bits_of_a_weight_are_those_of_linear_layers_in_every_stack():
    bits = {name: each.bits for name, each in named(offered("qwen1.5-0.5b", "rtx-4090")).items()}
    assert bits["llamacpp q4_0"] == 4.5  # a scale of 16 bits for 32 weights
    assert bits["llamacpp q8_0"] == 8.5
    assert bits["hf bf16-dynamic"] == 16
    # A scale and a zero for 128 weights; GPTQ has an index of 32 bits for each input besides.
    assert bits["autoawq gemm"] == pytest.approx(4 + 20 / 128)
    assert bits["gptq marlin-4"] == pytest.approx(4 + 20 / 128, abs=0.04)
    assert bits["bnb nf4-dynamic"] == 4.5  # a scale of 32 bits for 64 weights


@pytest.mark.parametrize("machine", ["rtx-4090", "apple-m2-16gb", "mi60"])
def test_no_winner_is_named_of_variants_that_may_be_as_fast(harness, machine):
    """Intervals overlap widely on a machine that nobody measured, but what is unknown there is common."""
    (leader, *others), fits = recommended(harness, "qwen1.5-4b", "--for", "speed", machine=machine)
    rows = {name: row["tokens_per_s_at_context"] for name, row in fits.items()}
    reach = [n for n, each in enumerate(others, 2) if rows[each["name"]][2] >= rows[leader["name"]][1]]
    rivals = r"\((?:rows? ([\d, ]+))?(?: and )?(?:(\d+) others?(?: not shown)?)? may be as fast\)"
    found = re.search(rf"fastest[^;]*?{rivals}", leader["why"])
    named = [int(number) for number in found[1].split(", ")] if found and found[1] else []
    assert set(named) <= set(reach)
    overlapping = [row for row in rows.values() if row[2] >= rows[leader["name"]][1]]
    assert len(named) + int(found[2] or 0 if found else 0) < len(overlapping) - 1


@pytest.mark.parametrize("more", [("--memory", "8GB"), ("--context", "64k"), ()])
def test_what_is_said_of_the_first_is_true_of_its_row(harness, more):
    """Of a model of which some qualities are published."""
    ranking, rows = recommended(harness, "qwen1.5-7b", *more)
    first = ranking[0]
    row, why = rows[first["name"]], first["why"]
    kept = [r for r in rows.values() if r["bits_per_weight"] >= 16 or (r["quality_loss"] or 1) <= 0.02]
    whole = [r for r in kept if r["options"].get("type_k", "f16") == "f16"]
    assert ("fastest that keeps quality" in why) == bool(whole)
    assert ("none that fits is known to keep quality" in why) == (not whole)
    assert row["bits_per_weight"] >= 4
    for each in ranking:
        if "all that are faster have fewer bits" in each["why"]:
            mine = rows[each["name"]]
            assert not [
                other
                for other in rows.values()
                if other["bits_per_weight"] >= mine["bits_per_weight"]
                and other["tokens_per_s_at_context"][0] > 1.005 * mine["tokens_per_s_at_context"][0]
                and (
                    other["options"].get("type_k", "f16") == "f16" or mine["options"].get("type_k") == "q8_0"
                )
            ]


def test_of_variants_that_are_as_fast_the_one_with_more_context_comes_first(harness):
    ranking, rows = recommended(harness, "llama-3.1-8b", machine="apple-m2-16gb")
    first, plain = rows[ranking[0]["name"]], rows["llamacpp q4_k_m"]
    assert first["tokens_per_s_at_context"][0] >= 0.995 * plain["tokens_per_s_at_context"][0]  # as printed
    assert first["longest_context"] > plain["longest_context"]
    assert first["memory_bytes"] < plain["memory_bytes"]


def test_variants_that_hold_the_same_context_share_its_lead_and_a_small_cache_is_said(harness):
    ran = harness("recommend", "qwen1.5-0.5b", "--machine", "rtx-4090", "--for", "context")
    assert re.search(
        r"1\. .*longest context: all that it was trained on \(rows? [2-5][\d, a-z]* holds? as much\)",
        " ".join(ran.out.split()),
    )
    small = harness("recommend", "gpt-oss-20b", "--machine", "rtx-4090", "--context", "32k").out
    (reasons,) = [part for part in small.split("\n\n") if part.startswith("1. ")]
    said = re.split(r"\n(?=\d\. )", reasons)
    said = [" ".join(each.split()) for each in said]
    assert ["KV q8_0" in line for line in said] == [False, True]
    assert ["KV cache of fewer than 16 bits" in line for line in said] == [False, True]


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"gpu_layers": -1}, True),
        ({"gpu_layers": 12}, False),
        ({"n_cpu_moe": 0, "override_tensor": ""}, True),
        ({"n_cpu_moe": 4}, False),
        ({"override_tensor": "exps=CPU"}, False),
    ],
)
def test_what_was_partly_on_the_cpu_is_no_example_of_a_card(options, counts):
    record: Any = {"device": "GPU-1", "options": options}
    assert examples.is_special(record) is not counts


def test_weights_of_mixtures_by_name_can_be_measured_where_they_can_be_made(tmp_path):
    assert prediction.model_from("qwen3-30b-a3b").source.row == {"shape": "qwen3-30b-a3b"}
    assert prediction.model_from("deepseek-v3").source.row is None
    tiny_models.written(tmp_path, "mixtral").rename(tmp_path / "config.json")
    row = prediction.model_from(str(tmp_path / "config.json")).source.row
    assert row
    path = tmp_path / "proof.yaml"
    path.write_text(f"models: [{json.dumps(row)}]\nvariants: [{{stack: llamacpp, quant: q4_0}}]\n")
    (model,) = load(path).models
    assert model.described
    assert model.described.decoder.experts == 8


def test_the_table_has_intervals_and_says_what_to_run(harness):
    asked = "recommend", "qwen1.5-7b", "--machine", "rtx-4090", "--stacks", "llamacpp"
    ran = harness(*asked, COLUMNS="80")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    first = "qwen1.5-7b on GeForce RTX 4090 with 25.8 GB (24 GB as sold), 8,192 tokens of context"
    assert " ".join(lines[:2]) == first
    assert "90% intervals" in " ".join(ran.out.split())
    assert max(map(len, ran.out.partition("\nrun llamacpp ")[0].splitlines())) <= 80
    assert "more columns with --wide: ctx, bits\n" in ran.out
    assert " bits: of a weight" not in ran.out  # of a column that is not shown
    assert " bits: of a weight" in harness(*asked, "--wide").out.replace("\n", " ")
    assert any(line.strip().startswith("llama-server:") and "-c 8192 -ngl 999" in line for line in lines)
    assert "FROM ./qwen1.5-7b-" in ran.out


@pytest.mark.parametrize(
    ("machine", "family"),
    [("rtx-4070-super", "NVIDIA"), ("apple-m2-16gb", "Apple"), ("mi50", "AMD"), ("rtx-4090", "NVIDIA")],
)
def test_figures_of_a_machine_without_measurements_say_what_they_rest_on(harness, machine, family):
    """Also where others measured a machine of this name."""
    text = " ".join(harness("recommend", "qwen1.5-7b", "--machine", machine).out.split())
    assert re.search(
        rf"these figures rest on others' measurements of \d+ machines of {family}, carried", text
    )


def test_where_prompts_alone_were_measured_decode_rests_on_other_machines(harness):
    ran = harness("recommend", "llama-3.1-8b", "--machine", "mi50", "--json")
    rows = {row["name"]: row for row in ran.json["variants"]}
    assert {row["basis"] for row in rows.values()} == {"other machines"}
    # Measured by others: 1,083 tokens of a prompt of 1,024 per second in q4_0.
    assert rows["llamacpp q4_0"]["ttft_2048_ms"][0] == pytest.approx(2048 / 1083.08 * 1e3, rel=0.2)


def test_what_is_short_is_no_zero_and_the_same_machine_with_more_memory_is_named(harness):
    ran = harness("recommend", "deepseek-r1:14b", "--machine", "pi 5 8gb")
    assert ran.code == 1
    found = re.search(
        r"llamacpp (.+), needs ([\d.]+) GB with 8,192 tokens, ([\d.]+) GB more than the ([\d.]+)", ran.err
    )
    assert found
    assert "=" not in found[1]
    needs, short, usable = map(float, found.groups()[1:])
    assert short > 0
    assert needs - usable == pytest.approx(short, abs=0.011)
    assert "; the same machine with 17.2 GB (16 GB as sold) holds it" in ran.err


def test_a_context_beyond_the_trained_one_is_said(harness):
    given = ("--machine", "rtx-4090", "--context", "64k", "--stacks", "llamacpp")
    ran = harness("recommend", "qwen1.5-0.5b", *given)
    assert "beyond the 32,768 tokens that it was trained on" in ran.out


def test_a_cpu_that_nobody_measured_has_wide_intervals(harness):
    given = ("--machine", "mybox", "--memory", "16GB", "--bandwidth", "60", "--stacks", "llamacpp", "--json")
    ran = harness("recommend", "qwen2.5-7b", *given)
    assert "mybox is taken for a CPU" in ran.err
    row = next(r for r in json.loads(ran.out)["variants"] if r["name"] == "llamacpp q4_0")
    _, low, high = row["tokens_per_s"]
    assert row["basis"] == "other machines"
    assert 1.6 < high / low < 4
    assert low < 60e9 / 4.4e9 < high * 2
    assert row["ttft_2048_ms"][2] > 5 * row["ttft_2048_ms"][1]  # few prompts of CPUs were measured


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("no-such-model", "no-such-model"),
        ("qwen1.5-7b --machine no-such-card", "or give --memory and --bandwidth"),
        ("qwen1.5-7b --machine rtx-4090 --bandwidth 100", "is known; drop --bandwidth"),
        ("qwen1.5-7b --bandwidth 100", "this one is measured"),
        ("qwen1.5-7b --machine rtx-4090 --prove 2", "--prove measures on this machine"),
        ("qwen1.5-7b --machine rtx-4090 --stacks llamacp", "did you mean llamacpp?"),
        ("qwen1.5-7b --machine rtx-4090 --stacks fake", "no stack of those runs"),
        ("qwen1.5-7b --context 0", "not a count"),
        ("qwen1.5-7b --machine rtx-4090 --context 1", "a prompt and a token need 2"),
        ("qwen1.5-7b --machine rtx-4090 --memory 100GB", "rtx-4090 has at most 25.8 GB (24 GB as sold)"),
        ("qwen1.5-7b --machine rtx-4090 --results /dev/null", "is not a results folder"),
        ("qwen1.5-7b --for fun", "invalid choice"),
        (
            "qwen1.5-7b --prove 1 --bandwidth 99 --memory 9GB",
            "--prove measures on this machine; drop --bandwidth",
        ),
        (
            "qwen1.5-7b --prove 1 --memory-speed ddr5-5600 --memory 16GB",
            "--prove measures on this machine; drop --memory-speed",
        ),
        ("qwen1.5-7b --machine rpi-5-8gb --host-memory 8GB --host-bandwidth 9", "is a CPU"),
        ("qwen1.5-7b --machine rtx-4090 --host-bandwidth 64", "--host-bandwidth needs --host-memory"),
        ("deepseek-v3 --prove 1", "cannot be made here: give its GGUF"),
        ("qwen1.5-7b --memory much", "not a size of memory"),
    ],
)
def test_a_mistake_is_one_sentence(harness, arguments, says):
    ran = harness("recommend", *arguments.split())
    assert ran.code == 2
    assert says in ran.err.splitlines()[-1]
    assert ran.out == ""


def test_candidates_are_what_the_stacks_offer_and_can_run_on_the_device():
    card, board = named(offered("qwen1.5-7b", "rtx-4090")), named(offered("qwen1.5-0.5b", "rpi-5"))
    groups = {each.traits.group for each in card.values()}
    assert {"llamacpp q4_0", "hf bf16-dynamic", "autoawq exllamav2-fuse_layers=true"} <= card.keys()
    assert {"llamacpp", "llamacpp flash", "gptq int4-exllamav2"} <= groups
    assert not any(name.startswith(("gptq ", "autoawq ")) for name in board)  # only functional on a CPU
    old = named(offered("qwen1.5-0.5b", "rtx-4090", stacks=("gptqm",)))
    assert not any("machete" in name for name in old)  # for Hopper alone


def test_memory_and_longest_context_are_those_of_the_theory():
    found = named(offered("qwen1.5-7b", "rtx-4090"))["llamacpp q4_0"]
    assert found.fits
    # Published: 34,290 tokens in q4_0; here at most the trained 32,768.
    assert found.longest == found.trained == 32_768
    large = named(offered("qwen1.5-14b", "rtx-4090"))["llamacpp q4_0"]
    assert large.longest == pytest.approx(18_431, rel=0.01)  # published


def test_quality_is_of_the_same_weights_or_of_the_nearest_size_and_never_of_others():
    known = [
        Perplexity("qwen1.5-7b", "llamacpp", "fp16", 10.0, "a study"),
        Perplexity("qwen1.5-7b", "llamacpp", "q4_0", 10.1, "a study"),
        Perplexity("qwen1.5-0.5b", "llamacpp", "fp16", 20.0, "a study"),
        Perplexity("qwen1.5-0.5b", "llamacpp", "q4_0", 22.0, "a study"),
    ]
    found = named(offered("qwen1.5-4b", "rtx-4090"))
    of = quality_loss.known_quality(known, "qwen1.5-4b", {})
    near = of(found["llamacpp q4_0"])
    assert near is not None
    assert near.loss == pytest.approx(0.01)
    assert near.source == "qwen1.5-7b, a study"
    assert of(found["llamacpp q8_0"]) is None
    assert of(found["hf bf16-dynamic"]) is None
    assert of(found["llamacpp q4_0-flash_attn=true-type_k=q8_0-type_v=q8_0"]) is None
    assert quality_loss.known_quality(known, "llama-3-8b", {})(found["llamacpp q4_0"]) is None


def scored(kld: float, model: str = "qwen1.5-4b", quant: str = "q4_0", **changes: object) -> dict:
    """The golden score, of another model and quantization."""
    found = json.loads((Path(__file__).parent / "golden" / "scored" / "record.json").read_text())
    found["model"]["name"] = model
    of_windows = found["quality"]["means"]["kld"]
    scale = kld / (sum(of_windows) / len(of_windows))
    found["quality"]["means"]["kld"] = [scale * of_window for of_window in of_windows]
    found["quality"]["figures"]["kld_mean"]["value"] = kld
    found["stack"], found["options"] = "llamacpp", {"quant": quant, "type_k": "f16", "type_v": "f16"}
    return found | changes


def stored(record: dict[str, Any], tmp_path: Path, second: int = 0) -> Path:
    """The file of a record, in the folder `results`."""
    model, when = record["model"]["name"], f"20261101T00000{second}.000000Z"
    folder = tmp_path / "results" / "machine" / model / record["options"]["quant"] / when
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record))
    return folder / "record.json"


def test_a_quality_that_was_scored_here_stands_before_a_published_one_and_for_its_options_alone():
    published = [
        Perplexity("qwen1.5-4b", "llamacpp", "fp16", 10.0, "a study"),
        Perplexity("qwen1.5-4b", "llamacpp", "q4_0", 10.1, "a study"),
    ]
    found = named(offered("qwen1.5-4b", "rtx-4090"))
    here = quality_loss.measured_quality([scored(0.004), scored(0.5, outcome="error")], "qwen1.5-4b")
    of = quality_loss.known_quality(published, "qwen1.5-4b", here)
    for name in ("llamacpp q4_0", "llamacpp q4_0-flash_attn=true"):
        known = of(found[name])
        assert known is not None
        assert (known.source, known.kld) == ("measured here", 0.004)
    assert of(found["llamacpp q4_0-flash_attn=true-type_k=q8_0-type_v=q8_0"]) is None
    assert quality_loss.measured_quality([scored(0.004)], "qwen1.5-7b") == {}


def test_measured_divergence_orders_quality_and_decides_what_balance_keeps(harness, tmp_path):
    for second, (quant, kld) in enumerate(
        (("q2_k", 0.08), ("q4_0", 0.03), ("q4_k_m", 0.006), ("q8_0", 1e-4))
    ):
        stored(scored(kld, "qwen2.5-7b", quant), tmp_path, second)
    given = ("qwen2.5-7b", "--stacks", "llamacpp", "--results", tmp_path / "results")
    (best, *_), rows = recommended(harness, *given)
    assert best["why"].startswith("fastest that keeps KLD under 0.02 (KLD 0.006)")
    assert rows[best["name"]]["options"]["quant"] == "q4_k_m"
    q4_0 = rows["llamacpp q4_0"]
    low, high = q4_0["kld_mean_ci95"]
    assert q4_0["kld_mean"] == pytest.approx(0.03)
    assert 0.029 < low < 0.03 < high < 0.031
    assert (rows["llamacpp q6_k"]["kld_mean"], rows["llamacpp q6_k"]["quality_source"]) == (None, None)
    table = harness("recommend", *given, "--machine", "rtx-4090", "--all").out.splitlines()
    assert any("q4_0 " in line and "0.03000" in line for line in table)
    assert any("quality from measured here" in line for line in table)
    assert any("q6_k " in line and "0.0" not in line for line in table)
    (first, *_), _ = recommended(harness, *given, "--memory", "12GB", "--for", "quality")
    assert "q4_k_m" in first["name"]
    assert first["why"].startswith("fastest at 16-bit quality (KLD 0.006) (")
    assert "lose no more)" in first["why"]  # q8_0 of KLD 0.0001 and 16 bits
    assert "below 0.02 it does not order" in " ".join(table)
    for second, (quant, kld) in enumerate((("q2_k", 0.08), ("q4_0", 0.03))):
        stored(scored(kld, "qwen2.5-7b", quant), tmp_path / "worse", second)
    given = (*given[:-1], tmp_path / "worse/results")
    (first, *_), _ = recommended(harness, *given, "--memory", "12GB", "--for", "quality")
    assert first["why"].startswith("best known quality that fits (KLD 0.03)")


def test_a_shipped_model_is_recommended_by_name_and_by_path_alike(harness, tmp_path):
    record = scored(0.006, "austen-4m", "q4_k_m")
    reference = record["quality"]["reference"]["weights"]
    reference["fingerprint"] = locate.local(data.weights("austen-4m")).fingerprint
    path = stored(record, tmp_path)
    command = ("--machine", "rtx-4090", "--stacks", "llamacpp", "--context", "1k", "--json")
    command = (*command, "--results", tmp_path / "results")
    by_name, by_path = (
        harness("recommend", given, *command) for given in ("austen-4m", data.weights("austen-4m"))
    )
    assert (by_name.code, by_name.err) == (0, "")
    assert by_name.json == by_path.json
    rows = {row["name"]: row for row in by_name.json["variants"]}
    assert rows["llamacpp q4_k_m"]["quality_source"] == "measured here"
    assert rows["llamacpp q4_0"]["quality_loss"] is None
    reference["fingerprint"] = "0123456789abcdef-fedcba9876543210"  # it was trained again since
    path.write_text(json.dumps(record))
    after = harness("recommend", "austen-4m", *command).json["variants"]
    assert {row["quality_source"] for row in after} == {None}


def test_a_score_counts_for_the_weights_that_were_loaded_or_compared_with():
    record = scored(0.004)
    loaded, whole = record["model"]["weights"], record["quality"]["reference"]["weights"]
    of_file = copy.deepcopy(record)
    of_file["quality"]["reference"]["weights"] = {"format": "hf", "sample": "5a3b"}
    for found, fingerprint in (
        (record, loaded["fingerprint"]),
        (record, whole["fingerprint"]),
        (record, "another-place-" + whole["fingerprint"].rpartition("-")[2]),
        (of_file, "1f2e-5a3b"),
        (record, None),
    ):
        assert len(quality_loss.measured_quality([found], "qwen1.5-4b", fingerprint)) == 1
    assert quality_loss.measured_quality([record], "qwen1.5-4b", "1f2e-5a3b") == {}


def test_the_config_to_prove_a_variant_is_one_that_the_harness_runs(tmp_path):
    found = [*named(offered("tiny-qwen2", "rtx-4090")).values()]
    path = tmp_path / "proof.yaml"
    path.write_text(typed.config_text([each.cell for each in found], {"shape": "tiny-qwen2"}, "cuda", 4096))
    experiment = load(path)
    assert len(experiment.variants) == len(found)
    assert [workload.kind for workload in experiment.workloads] == ["decode", "depth"]
    assert [v.options for v in experiment.variants] == [each.cell.variant.options for each in found]
    assert [v.name for v in experiment.variants] == [each.cell.variant.name for each in found]
    whole, place = subject("tiny-qwen2"), place_of(MACHINES["rtx-4090"], "rtx-4090", 4)
    in_file = replace(whole, stored="iq4_xs", tensors=quantized(whole.made, "iq4_xs"))
    as_is = candidates(in_file, place, 4096, ["llamacpp"])
    cells = [each.cell for each in as_is]
    path.write_text(typed.config_text(cells, {"name": "m", "weights": "m.gguf"}, "cuda", 4096))
    names = [v.name for v in load(path).variants]
    assert names == [typed.measured_name(each) for each in cells]
    assert len(set(names)) == 3


def test_the_commands_carry_context_cache_and_threads():
    found = named(offered("qwen1.5-7b", "rtx-4090"))
    cached = found["llamacpp q4_0-flash_attn=true-type_k=q8_0-type_v=q8_0"]
    on_card = typed.commands_of_candidate(cached, Source("model", "org/model"), 8192, "cuda", threads=4)
    assert on_card["llama-server"] == (
        "llama-server -m model-Q4_0.gguf -c 8192 -ngl 999 -fa on -ctk q8_0 -ctv q8_0"
    )
    assert on_card["first"].splitlines() == [
        "hf download org/model --local-dir model",
        'python convert_hf_to_gguf.py "model" --outtype f16 --outfile model-F16.gguf',
        "llama-quantize model-F16.gguf model-Q4_0.gguf Q4_0",
    ]
    assert "OLLAMA_KV_CACHE_TYPE=q8_0" in on_card["Modelfile"]
    given = Source("my", gguf="/at/my.gguf", gguf_type="q4_0")
    on_cpu = typed.commands_of_candidate(found["llamacpp q4_0"], given, 4096, "cpu", threads=4)
    assert on_cpu["llama-cli"] == "llama-cli -m /at/my.gguf -c 4096 -fa off -t 4"
    assert on_cpu["Modelfile"].startswith("FROM /at/my.gguf\n")
    assert "first" not in on_cpu
    long = named(offered("qwen1.5-7b", "rtx-4090", 40_000))["hf bf16-dynamic"]
    of_bnb, of_hf, beyond = (
        typed.commands_of_candidate(each, Source("m", "org/m"), context, "cuda", threads=None)
        for each, context in (
            (found["bnb int8-dynamic"], 4096),
            (found["hf bf16-dynamic"], 4096),
            (long, 40_000),
        )
    )
    assert "load_in_8bit=True" in of_bnb["transformers"]
    assert of_hf["vLLM"] == 'vllm serve "org/m" --dtype bfloat16 --max-model-len 4096'
    assert beyond["vLLM"].startswith("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve ")
    assert on_cpu["harness run"] == "variants: [{stack: llamacpp, flash_attn: false, quant: q4_0}]"


VLLM = "vLLM serves it, with --max-model-len 8192"


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("autoawq exllamav2-fuse_layers=true", f"an AWQ checkpoint of m; {VLLM}"),
        ("gptq exllamav2-4", f"a GPTQ checkpoint of m; {VLLM}"),
        ("hf bf16-dynamic", "a checkpoint of m"),
        ("bnb nf4-dynamic", "a checkpoint of m"),
        ("llamacpp q4_0", "a GGUF of m in Q4_0, as m-Q4_0.gguf"),
    ],
)
def test_without_the_name_of_a_file_or_repository_words_say_what_to_fetch(variant, words):
    found = named(offered("qwen1.5-7b", "rtx-4090", 8192))
    commands = typed.commands_of_candidate(found[variant], Source("m"), 8192, "cuda", threads=None)
    assert commands["fetch"] == words
    assert not {"vLLM", "transformers", "first"} & commands.keys()


def test_the_config_to_measure_the_first_is_one_that_the_harness_runs(harness, tmp_path):
    ran = harness("recommend", "qwen1.5-0.5b", "--machine", "rtx-4090", "--stacks", "llamacpp")
    lines = ran.out.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("  harness run:"))
    (tmp_path / "mine.yaml").write_text("\n".join(line[16:] for line in lines[first:]))
    experiment = load(tmp_path / "mine.yaml")
    assert [model.name for model in experiment.models] == ["qwen1.5-0.5b"]
    assert [variant.stack for variant in experiment.variants] == ["llamacpp"]
    assert experiment.device == "cuda"


def speeds(rows: list[Traits]) -> list[Range]:
    return [step.inverted(1e3) for step in Predictor().latency_ms(rows, 1)]


def test_no_prediction_is_faster_than_memory_can_be_read():
    for machine in ("rtx-4090", "rpi-5", "apple-m2"):
        found = offered("qwen1.5-1.8b", machine)
        for each, speed in zip(found, speeds([e.traits for e in found]), strict=True):
            assert speed.high * each.traits.read_bytes <= each.traits.bytes_per_s * 1.000001


def test_a_quantized_gguf_stays_what_it_is():
    whole = subject("tiny-qwen2")
    place = place_of(MACHINES["rtx-4090"], "rtx-4090", 4)
    made = {each.type for each in candidates(replace(whole, stored="q8_0"), place, 4096, ["llamacpp"])}
    assert made == {"q8_0"}
    # A type that is not made here is measured as the file has it, by its own tensors.
    tensors = quantized(whole.made, "iq4_xs")
    (as_is, *_) = candidates(replace(whole, stored="iq4_xs", tensors=tensors), place, 4096, ["llamacpp"])
    assert (as_is.type, as_is.cell.quant) == ("iq4_xs", "iq4_xs")
    assert as_is.weight_bytes == sum(each.bytes for each in tensors)


def test_a_gguf_is_for_llama_cpp_alone():
    given = Given(subject("tiny-qwen2"), Source("my", gguf="my.gguf", gguf_type="f16"))
    found = [each for each in offered("tiny-qwen2", "rtx-4090") if given.runs(each.cell)]
    assert {each.cell.variant.stack for each in found} == {"llamacpp"}
    assert len({each.cell.quant for each in found}) == 9


GIVEN_GPU = ("--memory", "24GB", "--bandwidth", "936", "--vendor", "nvidia")


def test_a_cpu_is_given_by_its_memory_and_has_the_bandwidth_of_its_channels(harness):
    given = ("recommend", "llama-3.1-8b", "--machine", "core i5-9500", "--memory", "16GB")
    by_memory = harness(*given, "--memory-speed", "DDR4-2666", "--json")
    by_bandwidth = harness(*given, "--bandwidth", "42.656", "--kind", "cpu", "--json")
    assert by_memory.code == 0, by_memory.err
    assert by_memory.json == by_bandwidth.json
    four = harness(*given, "--memory-speed", "ddr4-2666", "--channels", "4", "--json").json["variants"]
    assert four[0]["tokens_per_s"][0] > 1.5 * by_memory.json["variants"][0]["tokens_per_s"][0]
    refused(harness(*given, "--memory-speed", "fast"), "is not a kind of memory")
    refused(harness(*given, "--channels", "2"), "--channels needs --memory-speed")
    refused(harness(*given[:-2], "--memory-speed", "ddr4-2666"), "give its --memory")


@pytest.mark.parametrize(
    ("vendor", "family"), [("amd", "AMD"), ("apple", "Apple"), ("intel", "Intel"), ("nvidia", "NVIDIA")]
)
def test_a_gpu_that_is_not_known_has_the_errors_of_its_vendor_alone(harness, vendor, family):
    given = ("recommend", "llama-3.1-8b", "--memory", "24GB", "--bandwidth", "600", "--kind", "gpu")
    unknown, known = (" ".join(harness(*given, *more).out.split()) for more in ((), ("--vendor", vendor)))
    assert "how far off: unknown for a GPU of an unknown maker (--vendor)" in unknown
    assert re.search(rf"how far off: [^.]* machines? of {family}", known)


def given_machine(harness, model: str, *more: str) -> dict[str, dict[str, Any]]:
    ran = harness("recommend", model, *GIVEN_GPU, *more, "--json")
    assert ran.code == 0, ran.err
    return {row["name"]: row for row in ran.json["variants"]}


def test_a_mixture_is_predicted_from_the_bytes_that_a_token_reads(harness):
    rows = given_machine(harness, "qwen3-30b-a3b")
    q4_0 = rows["llamacpp q4_0"]
    made = Known()["qwen3-30b-a3b"]
    assert {row["stack"] for row in rows.values()} == {"llamacpp"}
    assert "llamacpp mxfp4_moe" not in rows  # it was not released so
    assert q4_0["weight_bytes"] == sum(each.bytes for each in quantized(made, "q4_0"))
    # 3.3 of 30.5 billion parameters a token: faster than all bytes can be read, slower than a token's.
    value, low, high = q4_0["tokens_per_s"]
    assert 936e9 / q4_0["weight_bytes"] < low < value < high < 936e9 / 1.7e9
    assert q4_0["quality_loss"] is None
    assert not rows["llamacpp f16"]["fits"]
    intel = ("--memory", "64GB", "--bandwidth", "456", "--vendor", "intel")
    text = harness("recommend", "qwen3-30b-a3b", *intel).out
    assert "only dense models were measured: what a mixture of experts costs" in " ".join(text.split())


def test_gpt_oss_comes_in_the_type_of_its_checkpoint(harness):
    rows = given_machine(harness, "gpt-oss-20b", "--context", "32k")
    assert {row["variant"].partition("-")[0] for row in rows.values()} == {"mxfp4_moe"}
    found = {each.cell.variant.name: each for each in offered("gpt-oss-20b", "rtx-4090", 32_768)}
    assert found["mxfp4_moe"].type == "mxfp4_moe"
    assert found["mxfp4_moe"].cell.quant == "mxfp4_moe"


@pytest.mark.parametrize("model", ["gemma-3-12b", "gpt-oss-20b", "qwen3-30b-a3b", "granite-4.0-h-small"])
def test_the_longest_context_of_any_architecture_is_that_of_the_theory(model):
    for each in offered(model, "rtx-4090"):
        options = each.cell.options(4)
        engine = LlamaCpp(True, bool(options["flash_attn"]))
        needs = demand_of_tensors(Known()[model], quantized(Known()[model], each.type), kv_bits(options))
        held = Held(Known()[model], needs.resident_bytes, needs.embedding_bytes, needs.kv_bytes_per_token)
        most = longest_context(engine, held, each.available_bytes)
        assert each.longest == (most and min(most, max(each.trained, 8192)))


def kv_bits(options: Any) -> float:
    return 8 * sum(element_bytes(str(options[name])) for name in ("type_k", "type_v")) / 2


def test_what_fits_no_card_is_split_between_the_card_and_main_memory(harness):
    given = ("qwen2.5-72b", "--machine", "rtx-4090", "--stacks", "llamacpp", "--context", "4k")
    beside = ("--host-memory", "64GB", "--host-bandwidth", "60")
    without = harness("recommend", *given)
    assert "a host with 64 GB of main memory is assumed for the rest" in " ".join(without.err.split())
    assert re.search(r"llama-server .* -ngl \d\d ", without.out)
    rows = {row["name"]: row for row in harness("recommend", *given, *beside, "--json").json["variants"]}
    split = next(row for name, row in rows.items() if name.startswith("llamacpp q4_0-gpu_layers="))
    layers = split["gpu_layers"]
    assert split["options"]["gpu_layers"] == layers
    assert 30 < layers < 60
    assert split["fits"]
    assert split["memory_bytes"] < 25e9
    # The CPU's side alone takes this long, so no whole step is faster.
    on_cpu = (80 + 1 - layers) / 80 * split["weight_bytes"] * 0.9
    assert split["tokens_per_s"][2] < 60e9 / on_cpu
    text = harness("recommend", *given, *beside)
    assert f"-ngl {layers}" in text.out or "-ngl" in text.out
    assert "layers and the output on the GPU (-ngl " in " ".join(text.out.split())


@pytest.mark.parametrize("model", ["qwen2.5-72b", "qwen3-30b-a3b", "gemma-3-27b", "llama-3.2-3b"])
def test_both_sides_of_a_split_are_the_whole(model):
    made, tensors = Known()[model], quantized(Known()[model], "q4_k_m")
    whole = demand_of_tensors(made, tensors, 16)
    sides = sides_of(Placement(gpu_layers=made.count // 2), made, tensors, 2.0)
    assert sum(side.read_bytes for side in sides) == pytest.approx(whole.weight_bytes_per_token)
    assert sum(side.model.made.count for side in sides) == made.count
    held = sum(side.model.weight_bytes for side in sides)
    embedding = next(each.bytes for each in tensors if each.part == "embedding")
    assert held == whole.resident_bytes + (embedding if made.tied else 0)
    kv = sum(side.model.kv_bytes_per_token for side in sides)
    assert kv == pytest.approx(whole.kv_bytes_per_token)


@pytest.mark.parametrize("gib", [8, 12, 16])
def test_of_a_mixture_as_few_layers_as_need_be_have_their_experts_on_the_cpu(gib):
    made, tensors = Known()["qwen3-30b-a3b"], quantized(Known()["qwen3-30b-a3b"], "q4_k_m")
    engine, available = LlamaCpp(True, True), gib * 2.0**30

    def fits(placement: Placement) -> bool:
        return total_bytes(engine, sides_of(placement, made, tensors, 2.0)[0].model, 8192) <= available

    placement = first_that_fits(by_experts(made), fits)
    assert placement is not None
    assert fits(placement)
    assert not fits(Placement(placement.n_cpu_moe - 1))
    on_gpu, on_cpu = sides_of(placement, made, tensors, 2.0)
    of_layer = [
        t.bytes for t in tensors if "_exps." in t.name and int(t.name.split(".")[1]) < placement.n_cpu_moe
    ]
    embedding = next(each.bytes for each in tensors if each.part == "embedding")
    assert on_cpu.model.weight_bytes == sum(of_layer) + embedding
    assert (on_cpu.model.kv_bytes_per_token, on_gpu.model.made) == (0, made)
    read = on_gpu.read_bytes + on_cpu.read_bytes
    assert read == pytest.approx(demand_of_tensors(made, tensors, 16).weight_bytes_per_token)


def test_a_mixture_that_fits_no_card_is_offered_with_experts_on_the_cpu(harness):
    given = ("qwen3-30b-a3b", "--machine", "rtx-3060-12gb", "--context", "8k")
    given += ("--host-memory", "32GB", "--host-bandwidth", "50")
    rows = harness("recommend", *given, "--json").json["variants"]
    apart = {row["name"]: row for row in rows if row["n_cpu_moe"]}
    layers = {row["name"]: row for row in rows if row["gpu_layers"]}
    found = next(
        row for name, row in apart.items() if name.startswith("llamacpp q4_k_m-flash_attn=true-n_cpu")
    )
    other = next(
        row for name, row in layers.items() if name.startswith("llamacpp q4_k_m-flash_attn=true-gpu")
    )
    assert (found["options"]["n_cpu_moe"], found["gpu_layers"]) == (found["n_cpu_moe"], None)
    assert found["fits"]
    assert found["memory_bytes"] < 12 * 2**30 - 0.7 * 2**30
    # Not faster than the bytes, and faster than whole layers: these bring attention and caches to the CPU.
    sides = split_layers(
        Placement(found["n_cpu_moe"]), Known()["qwen3-30b-a3b"], quantized(Known()["qwen3-30b-a3b"], "q4_k_m")
    )
    assert found["tokens_per_s"][2] < 1 / step_s(sides, 50e9, 360e9)
    assert found["tokens_per_s"][0] > other["tokens_per_s"][0]
    text = harness("recommend", *given).out
    first = re.search(r"-ngl 999 -fa on --n-cpu-moe (\d+)", text)
    assert first
    assert f"n_cpu_moe: {first[1]}" in text
    assert "Modelfile" not in text
    assert f"the experts of {first[1]} of 48 layers on the CPU: a step reads" in " ".join(text.split())
    dense = harness(
        "recommend", "qwen2.5-72b", *given[1:3], "--host-memory", "64GB", "--host-bandwidth", "50", "--json"
    )
    assert not any(row["n_cpu_moe"] for row in dense.json["variants"])


def test_where_hardly_anything_was_measured_it_is_too_few_to_say(harness):
    said = " ".join(harness("recommend", "qwen3-8b", "--machine", "arc-a770-16gb").out.split())
    assert "how far off: too few to say: others measured 2 rows on 1 machine of Intel, so the" in said
    assert "within 25%" not in said


@pytest.mark.parametrize(
    ("stack", "machine", "bits"),
    [
        ("vllm", "a100-80gb-sxm", {"hf-bf16": 16, "gptq-bf16": 4, "awq-bf16": 4}),
        ("mlx", "apple-m4-pro", {"bf16": 16, "int8": 8, "int4": 4}),
        ("torchao", "a100-80gb-sxm", {"int8-dynamic": 8, "int4-dynamic": 4}),
    ],
)
def test_a_stack_that_nobody_measured_is_answered_with_a_wide_interval_and_says_so(
    harness, stack, machine, bits
):
    given = ("recommend", "qwen2.5-7b", "--machine", machine, "--stacks", stack)
    rows = {row["variant"]: row for row in harness(*given, "--json").json["variants"]}
    assert {name: int(row["bits_per_weight"]) for name, row in rows.items()} == bits
    for row in rows.values():
        _, low, high = row["tokens_per_s"]
        assert (row["basis"], high > 2 * low or high * row["weight_bytes"] > 200e9) == ("theory", True)
    said = " ".join(harness(*given).out.split())
    assert f"how far off: unknown for {stack}: no speed of it was used" in said
    unasked = harness("recommend", "qwen2.5-7b", "--machine", machine, "--json").json["variants"]
    assert stack not in {row["stack"] for row in unasked}


def test_what_is_reserved_is_said_and_can_be_changed(harness):
    given = ("recommend", "qwen2.5-32b", "--machine", "rx-7900-xt", "--context", "4k")
    usual, headless, own = (harness(*given, *more) for more in ((), ("--headless",), ("--reserve", "0")))
    said = " ".join(usual.out.split())
    assert "0.8 GB are reserved for the display and the driver (--headless: 0.5 GB; --reserve SIZE" in said
    assert "0.5 GB are reserved for the driver, without a display" in headless.out
    assert "0.0 GB are reserved, as given" in own.out
    every = harness("recommend", "--machine", "rx-7900-xt", "--models", "qwen2.5-14b").out
    assert "0.8 GB are reserved for the display and the driver" in every
    rows = [harness(*given, *more, "--json").json["variants"] for more in ((), ("--reserve", "0"))]
    fits = [{row["name"]: row["fits"] for row in each} for each in rows]
    assert [each["llamacpp q4_k_m-flash_attn=true"] for each in fits] == [False, True]
    nothing = harness("recommend", "gpt-oss-120b", "--machine", "rtx-3060-12gb", "--host-memory", "8GB")
    assert "0.8 GB are reserved for the display and the driver" in nothing.out
    assert "that are usable" in nothing.err
    refused(harness("recommend", "qwen2.5-32b", "--memory", "1GB", "--headless"), "nothing of it is reserved")


def test_the_page_says_what_became_of_predictions(tmp_path):
    study = Study("a study", [], further_methods={"protocol": "as usual"})
    assert with_predictions(study, [tmp_path]) == study
    (tmp_path / data.RECOMMENDED).mkdir()
    assert with_predictions(study, [tmp_path]) == study
    outcomes.keep_outcome(tmp_path, OUTCOME)
    said = with_predictions(study, [tmp_path]).methods["predictions"]
    assert isinstance(said, list)
    assert "of 1 predictions that were measured, 1 lie in their interval" in said[0]
    assert any("machines of NVIDIA that others measured" in sentence for sentence in said[1:])


OUTCOME: outcomes.Outcome = {
    "model": "m",
    "stack": "llamacpp",
    "variant": "q4_0",
    "device": "cpu",
    "context": 4096,
    "predicted": 11.0,
    "low": 9.0,
    "high": 13.0,
    "measured": 10.0,
}


def test_outcomes_are_kept_and_damaged_ones_do_not_count(tmp_path):
    (tmp_path / data.RECOMMENDED).mkdir()
    assert outcomes.outcomes_so_far(tmp_path) is None
    outcomes.keep_outcome(tmp_path, OUTCOME)
    outcomes.keep_outcome(tmp_path, {**OUTCOME, "measured": 20.0})
    outcomes.keep_outcome(tmp_path, {**OUTCOME, "predicted": 1e308, "measured": 1e-308})
    with (tmp_path / data.RECOMMENDED / outcomes.NAME).open("a") as file:
        file.write('{"predicted": 1}\nnot json\n')
    assert outcomes.outcomes_so_far(tmp_path) == (
        "of 2 predictions that were measured, 1 lie in their interval; median error 27.5%, largest 45.0%"
    )


def test_a_proof_measures_and_keeps_what_came_of_it(harness, tmp_path, llamacpp_interpreter):
    write_config(tmp_path)
    given = ("config.json", "--stacks", "llamacpp", "--context", "600")
    ran = harness("recommend", *given, "--prove", "1")
    assert ran.code == 0, ran.err
    assert "llamacpp " in ran.out
    # A busy machine may leave no ok repeat; then the sentence reports it.
    kept = tmp_path / "results" / data.RECOMMENDED / outcomes.NAME
    assert kept.exists() or "no measurement is ok" in ran.err
    again = harness("recommend", *given)
    assert ("1 predictions that were measured" in again.out) == kept.exists()


def test_a_model_far_smaller_than_all_that_was_measured_is_said_to_be_extrapolated(harness, tmp_path):
    given = ("--machine", "rtx-4090", "--results", tmp_path)
    small, usual = (
        " ".join(harness("recommend", model, *given).out.split()) for model in ("austen-4m", "qwen2.5-7b")
    )
    assert "1,024 tokens of context" in small  # as many as it was trained on
    assert "far less than any that was measured" in small
    assert "how far off" not in small
    assert "8,192 tokens of context" in usual
    assert "how far off: on 17 machines of NVIDIA" in usual
    assert "extrapolated" not in usual


def test_a_gpu_without_bf16_is_offered_fp16_and_others_bf16(harness):
    def variants(machine: str) -> dict[str, list[str]]:
        found = harness("recommend", "qwen1.5-0.5b", "--machine", machine, "--stacks", "hf", "bnb", "--json")
        return {row["name"]: row["options"].get("dtype") for row in found.json["variants"]}

    assert set(variants("titan-rtx").values()) == {"fp16"}
    assert variants("rtx-4090") == {
        "hf bf16-dynamic": "bf16",
        "bnb int8-dynamic": None,
        "bnb nf4-dynamic": None,
    }
    ran = harness("recommend", "qwen1.5-0.5b", "--machine", "titan-rtx", "--stacks", "hf")
    assert 'dtype: "fp16"' in ran.out or "dtype: fp16" in ran.out
    assert "bfloat16" not in ran.out


def test_where_fp16_is_slow_llama_cpp_alone_is_offered():
    """Of Pascal, 6.1 computes 16-bit floats at 1/64 of the rate of 32 bits; 6.0 at twice that."""
    of = {name: {each.cell.variant.stack for each in offered("qwen1.5-0.5b", name)} for name in PASCAL}
    assert (of["p40"], of["gtx-1080-ti"]) == ({"llamacpp"}, {"llamacpp"})
    assert {"llamacpp", "hf", "gptq"} <= of["p100-pcie-16gb"]


PASCAL = ("p40", "gtx-1080-ti", "p100-pcie-16gb")


@pytest.mark.parametrize(("kind", "stacks"), [("cpu", {"llamacpp", "hf", "bnb"}), ("gpu", {"gptqm"})])
def test_a_machine_of_which_the_bandwidth_is_known_is_what_the_user_says(harness, kind, stacks):
    size = ("--machine", "epyc", "--memory", "384GB", "--bandwidth", "460")
    ran = harness("recommend", "qwen1.5-0.5b", *size, "--kind", kind, "--json")
    assert "is taken for" not in ran.err
    assert stacks <= {row["stack"] for row in ran.json["variants"]}
    assert any("marlin" in row["variant"] for row in ran.json["variants"]) == (kind == "gpu")
    ran = harness("recommend", "qwen1.5-0.5b", *size)
    assert "epyc is taken for a GPU, by its bandwidth (if it is not: --kind cpu)" in ran.err
    ran = harness("recommend", "qwen1.5-0.5b", "--machine", "4090", "--kind", "gpu")
    assert (ran.code, "--kind is of a machine that is not known" in ran.err) == (2, True)


def test_two_gpus_are_said_not_to_be_measured(harness):
    ran = harness("recommend", "qwen2.5-32b", "--machine", "2x 3090", "--stacks", "llamacpp")
    assert "qwen2.5-32b on 2x GeForce RTX 3090 with 51.5 GB (48 GB as sold)" in ran.out
    assert "2x 3090: the memory of 2 GPUs, whose layers take turns, at the bandwidth of one" in ran.err


def test_own_records_of_a_cpu_have_the_maker_and_the_rate_that_is_predicted_there():
    of_cpu = examples.traits_of_record(record(), "q4_k_m", 20e9)
    assert of_cpu
    assert (of_cpu.maker, of_cpu.flops) == ("CPU", 400e9)
    of_board = examples.traits_of_record(record(machine__cpu="Raspberry Pi 5 Model B Rev 1.0"), "q4_k_m")
    assert of_board
    predicted = named(offered("qwen1.5-0.5b", "rpi-5"))["llamacpp q4_k_m"].traits
    assert (of_board.maker, of_board.flops) == (predicted.maker, predicted.flops)
    assert of_board.maker == "board"


def test_a_package_that_is_unmaintained_is_offered_where_it_was_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "nothing-installed"))
    candidate = next(each for each in offered("qwen1.5-7b", "rtx-3090") if each.cell.header.successor)
    own = Example(candidate.traits, {2: 10.0}, {})
    theirs = Example(replace(candidate.traits, setup="somebody's"), {2: 10.0}, {})
    offers = [prediction.is_current(candidate, [], measured) for measured in ([own], [theirs], [])]
    assert offers == [True, False, False]


def test_packages_that_are_unmaintained_are_offered_only_if_asked_for_or_installed(
    harness, monkeypatch, tmp_path
):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "nothing-installed"))
    words = (
        "gptq: the package of the published study, unmaintained since 2025; gptqm runs the same files today"
    )

    def stacks_on(machine, *more):
        ran = harness("recommend", "qwen1.5-7b", "--machine", machine, *more, "--json")
        return {row["stack"] for row in ran.json["variants"]}

    elsewhere = stacks_on("rtx-3090")
    assert elsewhere & {"gptqm", "gptq", "autoawq"} == {"gptqm"}
    assert stacks_on("rtx-3090", "--stacks", "gptq") == {"gptq"}
    assert words in " ".join(
        harness("recommend", "qwen1.5-7b", "--machine", "rtx-3090", "--stacks", "gptq").out.split()
    )
    assert words not in " ".join(
        harness("recommend", "qwen1.5-7b", "--machine", "rtx-3090", "--all").out.split()
    )
