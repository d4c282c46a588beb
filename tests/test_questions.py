"""`harness recommend` before a model or a machine is chosen: what runs here, which machine it takes, and the
smallest loss at a speed."""

from __future__ import annotations

import json
from collections import Counter
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any

import pytest

from harness.base import data
from harness.recommend.questions import PULLS, SIZES, TYPES
from harness.theory import base_shapes, decoder, floors, machine_names
from harness.theory.ggml_quants import model_bytes, quantized
from harness.theory.ggml_types import element_bytes
from harness.theory.known_models import Known
from harness.theory.machines import Machine
from harness.theory.memory import LlamaCpp, longest_context, total_bytes
from harness.theory.memory import Model as Held

MACHINES = ["rtx-4090", "rx-7900-xt", "rpi-5-8gb", "apple-m4-16gb"]
PREDICTED, UPPER_END = "predicted", "upper end of the interval"


def asked(harness, *arguments: str) -> dict[str, Any]:
    ran = harness("recommend", *arguments, "--json")
    assert ran.code == 0, ran.err
    return ran.json


def machine_of(row: dict[str, Any]) -> Machine:
    return machine_names.machines(row["machine"])[row["machine"]]


def check_row(row: dict[str, Any], context: int, tok_s: float) -> None:
    """It fits by the theory, its file has the theory's bytes, and it reaches the speed as it says."""
    made, found = Known()[row["model"]], machine_of(row)
    kind = row["variant"].partition("-")[0]
    tensors = quantized(made, kind, as_published=made.is_dense)
    kv_bits = 8 * element_bytes(row["options"].get("type_k", "f16"))
    needs = floors.demand_of_tensors(made, tensors, kv_bits)
    held = Held(made, needs.resident_bytes, needs.embedding_bytes, needs.kv_bytes_per_token)
    engine = LlamaCpp(on_gpu=found.family != "cpu", flash_attn=True)
    available = found.memory_bytes - found.reserve.value
    assert row["memory_bytes"] == total_bytes(engine, held, context) <= available
    assert row["longest_context"] == min(longest_context(engine, held, available) or 0, made.context)
    assert row["weight_bytes"] == model_bytes(made, kind, as_published=made.is_dense)
    assert row["parameters"] == decoder.parameters(made)
    value, low, high = row["tokens_per_s_at_context"]
    assert low <= value <= high <= 1.001 * found.bandwidth_bytes_per_s / needs.weight_bytes_per_token
    assert row["reaches"] == (PREDICTED if value >= tok_s else UPPER_END)
    assert high >= tok_s


def size_of(row: dict[str, Any]) -> int:
    return sum(row["parameters"] > each * 1e9 for each in SIZES)


def rank_of(row: dict[str, Any]) -> tuple[float, ...]:
    bits, pulls = row["bits_per_weight"], PULLS.get(row["model"], 0)
    speed = row["tokens_per_s_at_context"][0]
    return row["reaches"] == PREDICTED, bits >= 4, pulls, row["parameters"], bits, speed


@pytest.mark.parametrize("machine", MACHINES)
def test_of_each_size_the_best_variant_that_fits_and_reaches_the_speed(harness, machine):
    given = ("--machine", machine, "--context", "8k", "--models", "qwen3*", "gemma-3*", "mixtral*")
    every, best = (asked(harness, *given, *more)["rows"] for more in (["--all"], []))
    assert [row["model"] for row in every]
    for row in every:
        check_row(row, 8192, 10)
    assert {size_of(row) for row in best} == {size_of(row) for row in every}
    assert len(best) == len({size_of(row) for row in best})
    for row in best:
        assert rank_of(row) == max(rank_of(other) for other in every if size_of(other) == size_of(row))
    for rows in (every, best):
        keys = [(row["bits_per_weight"] >= 4, -size_of(row), rank_of(row)) for row in rows]
        assert keys == sorted(keys, reverse=True)


def test_a_model_has_the_most_bits_with_which_it_fits_and_reaches_the_speed(harness):
    """As `harness recommend MODEL` predicts them."""
    given = ("--machine", "rtx-4090", "--context", "8k")
    others = asked(harness, "llama-3.1-8b", *given, "--stacks", "llamacpp")["variants"]
    flash = {each["variant"]: each for each in others if each["variant"].endswith("-flash_attn=true")}
    shown = [each for name, each in flash.items() if name.partition("-")[0] in TYPES]
    tok_s = flash["q5_k_m-flash_attn=true"]["tokens_per_s_at_context"][0] * 0.999
    reach = [each for each in shown if each["fits"] and each["tokens_per_s_at_context"][0] >= tok_s]
    most = max(reach, key=lambda each: each["bits_per_weight"])
    (row,) = asked(harness, *given, "--models", "llama-3.1-8b", "--tok-s", str(tok_s))["rows"]
    assert len(reach) < len(shown)
    assert row["variant"] == most["variant"]
    for key in ("tokens_per_s_at_context", "ttft_2048_ms"):
        assert row[key] == pytest.approx(most[key], rel=1e-6)


def test_more_rows_of_a_size_come_in_order_and_only_of_the_models_asked_for(harness):
    rows = asked(harness, "--machine", "rtx-4090", "--models", "qwen3*", "--most", "3")["rows"]
    assert all(fnmatch(row["model"], "qwen3*") for row in rows)
    assert max(sum(size_of(row) == size for row in rows) for size in range(len(SIZES) + 1)) == 3
    assert all(Known()[row["model"]].context >= 8192 for row in rows)


def test_models_trained_on_fewer_tokens_than_asked_for_are_counted_and_left_out(harness):
    ran = harness("recommend", "--machine", "rtx-4090", "--models", "llama-2-7b", "qwen3-8b")
    assert "runs 1 of 2 known models" in ran.out
    assert "Left out: 1 that were trained on fewer than 8,192 tokens." in ran.out


def test_machines_that_reach_a_speed_come_by_memory_and_then_by_bandwidth(harness):
    rows = asked(harness, "qwen3-8b", "--machine", "all", "--tok-s", "30", "--context", "16k", "--all")[
        "rows"
    ]
    assert {"rtx-4090", "rx-7900-xt"} <= {row["machine"] for row in rows}
    assert not any(row["machine"].startswith("rpi-5") for row in rows)
    for row in rows:
        check_row(row, 16_384, 30)
        found = machine_of(row)
        figures = row["machine_memory_bytes"], row["bytes_per_s"]
        assert figures == (found.memory_bytes, found.bandwidth_bytes_per_s)
    order = [(*kind_of(row), row["machine_memory_bytes"], row["bytes_per_s"]) for row in rows]
    assert all(one <= other for one, other in pairwise(order))


def kind_of(row: dict[str, Any]) -> tuple[bool, bool]:
    """Smaller is better: whether it may miss the speed, and whether it has fewer than 4 bits."""
    return row["reaches"] != PREDICTED, row["bits_per_weight"] < 4


def test_machines_that_reach_the_speed_with_four_bits_are_listed_and_the_others_counted(harness):
    given = ("qwen3-30b-a3b", "--machine", "all", "--tok-s", "30", "--context", "32k")
    every, shown = (asked(harness, *given, *more)["rows"] for more in (["--all"], []))
    kinds = Counter(kind_of(row) for row in every)
    assert min(kinds.values()) > 0
    assert len(kinds) == 4
    assert {kind_of(row) for row in shown} == {(False, False)}
    assert shown == every[: len(shown)]
    text = " ".join(harness("recommend", *given).out.split())
    reach, fewer = kinds[False, False], kinds[False, True]
    assert f"runs on {reach + fewer} of " in text
    assert f" of context, and {len(every) - reach - fewer} more may (~)" in text
    hidden = (
        f"Not shown (--all): {reach - len(shown)} that reach it, {fewer} that reach it with fewer than 4 bits"
    )
    assert f"{hidden} and {len(every) - reach - fewer} that may" in text


def test_a_machine_has_four_bits_with_a_small_cache_before_fewer(harness):
    """As the model's own answer on that machine does."""
    given = ("qwen3-30b-a3b", "--context", "32k", "--tok-s", "32")
    rows = {row["machine"]: row for row in asked(harness, *given, "--machine", "all", "--all")["rows"]}
    found = rows["ryzen-ai-max-395-128gb"]
    assert (found["options"]["type_k"], found["bits_per_weight"] > 4) == ("q8_0", True)
    own = asked(harness, *given, "--machine", "ryzen-ai-max-395-128gb", "--stacks", "llamacpp")["variants"]
    same = next(row for row in own if row["name"] == found["name"])
    # A fit for all machines has the bandwidths of all.
    assert found["tokens_per_s_at_context"] == pytest.approx(same["tokens_per_s_at_context"], rel=0.02)


def test_models_that_were_never_released_are_for_those_who_name_them(harness):
    rows = asked(harness, "--machine", "rtx-4090", "--all")["rows"]
    assert not [row["model"] for row in rows if row["model"].startswith("tiny-")]
    assert not [row for row in rows if "mxfp4" in row["variant"] and "gpt-oss" not in row["model"]]
    (row,) = asked(harness, "--machine", "rtx-4090", "--models", "tiny-qwen2")["rows"]
    assert row["model"] == "tiny-qwen2"


def test_an_unknown_pattern_is_reported_and_ollamas_names_match(harness):
    given = ("--machine", "rtx-4090", "--all", "--models", "llama3.1:*", "zzzz*", "qwen3:8b")
    ran = harness("recommend", *given, "--json")
    assert ran.code == 0
    assert "--models zzzz* matches no known model" in ran.err
    assert {row["model"] for row in ran.json["rows"]} == {"llama-3.1-8b", "qwen3-8b"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--machine", "apple-m4-16gb", "--models", "qwen3*"),
        ("qwen3-8b", "--machine", "all", "--tok-s", "30", "--context", "32k", "--all"),
    ],
)
def test_the_table_has_the_rows_of_the_json_and_marks_those_that_may_miss_the_speed(harness, arguments):
    found, text = asked(harness, *arguments), harness("recommend", *arguments, COLUMNS="80").out
    table = [line.split() for line in text.split("\n\n")[1].splitlines()[1:]]
    key = "model" if arguments[0] == "--machine" else "machine"
    assert [line[0] for line in table] == [row[key] for row in found["rows"]]
    for line, row in zip(table, found["rows"], strict=True):
        value, low, high = (f"{each:.3g}" for each in row["tokens_per_s_at_context"])
        marked = "~" * (row["reaches"] == UPPER_END) + value
        assert line[4 if key == "machine" else 3 :][:4] == [marked, f"({low}", "to", f"{high})"]
        assert f"{row['longest_context'] // 1024}k" in line
        assert f"{row['variant'].partition('-')[0]} {row['bits_per_weight']:.1f}"[:-1] in " ".join(
            text.split()
        )
    assert ("only the upper end" in text) == ("more may (~)" in text)
    assert ("only the upper end" in text) >= any(row["reaches"] == UPPER_END for row in found["rows"])
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("machine", ["rtx-4090", "rx-7900-xt"])
def test_the_smallest_loss_at_a_speed_is_the_first_and_ends_with_its_commands(harness, machine):
    given = ("qwen1.5-7b", "--machine", machine, "--for", "quality", "--context", "8k")
    every = asked(harness, *given)["variants"]
    speeds = sorted(row["tokens_per_s_at_context"][0] for row in every if row["fits"])
    tok_s = speeds[len(speeds) // 2]
    found = asked(harness, *given, "--tok-s", str(tok_s))
    rows = {row["name"]: row for row in found["variants"]}
    ranked = [rows[each["name"]] for each in found["ranking"]]
    reach = [row for row in every if row["fits"] and row["tokens_per_s_at_context"][0] >= tok_s]
    assert all(row["fits"] and row["tokens_per_s_at_context"][0] >= tok_s for row in ranked)
    losses = [row["quality_loss"] for row in reach if row["quality_loss"] is not None]
    assert losses
    # Within the noise of a perplexity all lose as little.
    assert max(ranked[0]["quality_loss"], 0.006) == max(min(losses), 0.006)
    costs = [max(row["quality_loss"], 0.006) for row in ranked if row["quality_loss"] is not None]
    assert costs == sorted(costs)
    bits = [row["bits_per_weight"] for row in ranked[len(costs) :]]
    assert bits == sorted(bits, reverse=True)
    text = harness("recommend", *given, "--tok-s", str(tok_s)).out
    commands = text[text.rindex("\nrun llamacpp ") :]
    assert f"llama-server -m qwen1.5-7b-{ranked[0]['variant'].partition('-')[0].upper()}.gguf" in commands


def test_where_only_intervals_reach_the_speed_it_is_said(harness):
    given = ("qwen3-8b", "--machine", "rx-7900-xt", "--context", "8k", "--stacks", "llamacpp")
    fitting = [row for row in asked(harness, *given)["variants"] if row["fits"]]
    highest = max(row["tokens_per_s_at_context"][0] for row in fitting)
    ran = harness("recommend", *given, "--tok-s", str(highest * 1.001))
    assert ran.code == 0
    assert "only the upper ends of these intervals reach that speed" in ran.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--machine", "rtx-4090", "--models", "qwen3*"),
        ("qwen3-8b", "--machine", "all"),
        ("qwen3-8b", "--machine", "rtx-4090", "--for", "quality"),
    ],
)
def test_a_speed_that_nothing_reaches_names_the_nearest_and_what_it_lacks(harness, arguments):
    ran = harness("recommend", *arguments, "--tok-s", "50000", "--json")
    assert ran.code == 1
    assert json.loads(ran.out).get("rows" if "--for" not in arguments else "ranking") == []
    said = ran.err.splitlines()[-1]
    assert "nothing reaches 50000 tok/s at 8,192 tokens of context: the nearest, qwen3" in said
    predicted, lacks = said.partition(" is predicted at ")[2].removesuffix(" too few").split(", ", 1)
    assert float(predicted.replace(",", "")) + float(lacks.replace(",", "")) == pytest.approx(5e4, rel=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--machine", "rtx-3060-12gb", "--models", "qwen3-30b*"),
        ("qwen3-30b-a3b", "--machine", "all", "--all"),
    ],
)
def test_mixtures_have_experts_on_the_cpu_where_the_host_is_known(harness, arguments):
    """As `harness recommend MODEL` predicts them; where it is not known, it is said."""
    host = ("--host-memory", "32GB", "--host-bandwidth", "50")
    alone, text = harness("recommend", *arguments), harness("recommend", *arguments, *host).out
    assert "A GPU's host is not known" in alone.out + alone.err
    assert "n_cpu_moe" not in alone.out
    assert "n_cpu_moe: the experts of so many layers are on the CPU, with 33 GB at 50 GB/s" in " ".join(
        text.split()
    )
    assert "A GPU's host is not known" not in text
    rows = asked(harness, *arguments, *host)["rows"]
    assert not any(
        row["n_cpu_moe"] for row in rows if machine_of(row).unified or machine_of(row).family == "cpu"
    )
    row = next(row for row in rows if (row["model"], row["machine"]) == ("qwen3-30b-a3b", "rtx-3060-12gb"))
    own = asked(harness, "qwen3-30b-a3b", "--machine", "rtx-3060-12gb", *host)["variants"]
    alike = next(each for each in own if each["name"] == row["name"])
    assert row["n_cpu_moe"]
    for key in ("memory_bytes", "host_memory_bytes", "n_cpu_moe"):
        assert row[key] == alike[key]
    assert row["tokens_per_s_at_context"] == pytest.approx(alike["tokens_per_s_at_context"], rel=0.05)


def test_where_nothing_fits_it_is_said(harness):
    ran = harness("recommend", "--machine", "rpi-5-8gb", "--models", "llama-3.1-405b")
    assert (ran.code, ran.out) == (1, "")
    assert "nothing fits with 8,192 tokens of context" in ran.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--models qwenn3* --machine rtx-4090", "--models qwenn3* matches no known model"),
        ("--models qwenn3* --machine rtx-4090", "did you mean qwen3-"),
        ("--models zzzz", "see harness theory --list-models"),
        ("qwen3-8b --models qwen3*", "--models narrows the known models"),
        ("--tok-s 0", "--tok-s: 0 is not a number of tokens per second above 0"),
        ("--tok-s=-3", "--tok-s: -3 is not a number"),
        ("--tok-s nan", "--tok-s: nan is not a number"),
        ("--tok-s 1e9", "--tok-s: 1e9 is not a number of tokens per second above 0 and under 1e9"),
        ("--machine all", "--machine all needs a model"),
        *((f"--machine {each}", "2 to 8 of a known GPU") for each in ("2x", "0x-3090", "99x3090")),
        ("--prove 2", "--prove needs a model"),
        ("--for speed", "--for is for one model on one machine"),
        ("qwen3-8b --machine all --stacks llamacpp", "--stacks is for one model on one machine"),
        ("qwen3-8b --machine all --memory 8GB", "--memory is for one model on one machine"),
        ("qwen3-8b --machine all --headless", "--reserve is for one model on one machine"),
        ("--machine rpi-5-8gb --host-memory 8GB --host-bandwidth 9", "is a CPU; --host-memory"),
        (
            "--machine apple-m4-16gb --host-memory 8GB --host-bandwidth 9",
            "is a GPU that shares its CPU's memory",
        ),
        ("qwen3-8b --machine all --host-bandwidth 8", "--host-bandwidth needs --host-memory"),
    ],
)
def test_a_mistake_is_one_sentence(harness, arguments, says):
    ran = harness("recommend", *arguments.split())
    assert ran.code == 2
    assert says in ran.err.splitlines()[-1]
    assert ran.out == ""


def test_the_model_of_a_size_is_the_one_that_people_run_most_and_4_bits_come_first(harness):
    rows = harness("recommend", "--machine", "rtx-4090", "--json").json["rows"]
    models = [row["model"] for row in rows]
    assert {"llama-3.2-1b", "llama-3.1-8b"} <= set(models)
    assert not {"internlm2-1.8b", "starcoder2-15b"} & set(models)
    bits = [row["bits_per_weight"] >= 4 for row in rows]
    assert bits == sorted(bits, reverse=True)


def test_pulls_are_of_models_that_are_known_by_the_name_that_was_pulled():
    known = Known()
    for row in data.rows("popularity.csv"):
        name = base_shapes.understood(row["ollama"], known, "").name
        assert row["model"] in (name, name.removesuffix("-instruct"))
        assert int(row["pulls"]) > 0


def test_a_host_of_unknown_bandwidth_is_a_usual_one_and_is_said_to_be(harness):
    given = (
        "recommend",
        "--machine",
        "rtx-4090",
        "--models",
        "qwen3-30b-a3b",
        "--host-memory",
        "64GB",
        "--json",
    )
    assumed, stated = harness(*given), harness(*given, "--host-bandwidth", "89.6")
    assert "--host-bandwidth is not given: 89.6 GB/s is taken, the median of the desktop CPUs" in assumed.err
    assert assumed.json == stated.json
    assert stated.err == ""
    of_server = harness("recommend", "qwen3-30b-a3b", "--machine", "h100", "--host-memory", "64GB", "--json")
    assert "the median of the server CPUs" in of_server.err
