"""The theory: every published table again, floors by brute force, and names in `harness theory`."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_checkpoint import TINY, write_config, write_gguf, write_shards

from harness.base import data
from harness.theory import floors, public_speeds, published
from harness.theory.decoder import kv_elements_per_token, parameters
from harness.theory.floors import PUBLISHED, SI, Ceiling, Demand, Reach
from harness.theory.hf_config import SHAPES
from harness.theory.known_models import config_of
from harness.theory.machines import MACHINES
from harness.theory.published import SLIPS, STUDY_TABLES

PUBLISHED_RECORDS = data.HERE / data.PUBLISHED
CARD = Ceiling(1008e9, 82.58e12)


def printed(table: str) -> list[dict[str, str]]:
    return data.rows(f"study_tables/{table}.csv")


# --- the published study


@pytest.mark.parametrize("table", STUDY_TABLES)
def test_every_cell_of_a_published_table_comes_out_as_printed_or_is_a_listed_slip(table):
    ours, theirs = STUDY_TABLES[table](), printed(table)
    assert len(ours) == len(theirs) > 0
    for mine, row in zip(ours, theirs, strict=True):
        assert list(mine) == list(row)
        for column, cell in row.items():
            slip = (table, row["model"], column) in SLIPS
            assert (cell == mine[column]) is not slip, (table, row, column)


def test_every_listed_slip_stands_in_a_table():
    cells = {(t, row["model"], column) for t in STUDY_TABLES for row in printed(t) for column in row}
    assert SLIPS.keys() <= cells


def test_the_command_gives_the_published_figures_with_published_units(harness):
    models = [f"qwen1.5-{row['model'].lower()}" for row in printed("model_family")]
    ran = harness("theory", *models, "--machine", "rtx-4090", "--units", "published", "--json")
    rows = {(row["model"].removeprefix("qwen1.5-"), f"{row['weight_bits']:g}"): row for row in ran.json}
    for row in printed("decode_theory_4090"):
        said = rows[row["model"].lower(), row["weight_bits"]]
        assert f"{said['B_ms']:.2f}" == row["B_ms"]
        assert f"{said['W_tokens_per_ms']:.0f}" == row["W_tokens_per_ms"]
    for row in printed("prefill_knees_4090"):
        knees = rows[row["model"].lower(), row["weight_bits"]]["prefill_knees"][row["lm_head_on_tokens"]]
        ends = [int(row[end]) for end in ("compute_bound_from", "kv_bound_from") if row[end]]
        assert knees == (ends or None)
    for row in printed("max_ctx_theory_4090"):
        for bits in ("16", "8", "4"):
            ideal = rows[row["model"].lower(), bits]["fits"]["ideal"]
            assert str(ideal["longest_uncapped"] or "oom") == row[f"w{bits}kv16"]
    for row in printed("model_family"):
        said = rows[row["model"].lower(), "16"]
        for part in ("layer", "lm_head", "active", "total"):
            assert f"{said[f'{part}_params'] / 2**30:.2f}" == row[f"{part}_params_gi"]


def test_a_published_table_is_printed_as_it_was_published(harness):
    said = harness("theory", "--published", "decode_theory_4090").out
    assert list(csv.DictReader(io.StringIO(said))) == printed("decode_theory_4090")


def test_a_published_table_says_first_whether_its_cells_agree_and_which_do_not(harness):
    one = harness("theory", "--published", "decode_theory_4090")
    assert one.err == "harness: all 120 cells of 1 table agree with the published study\n"
    first, *differ = harness("theory", "--published", "all").err.splitlines()
    cells = sum(len(row) for table in STUDY_TABLES for row in printed(table))
    agree = f"{cells - len(SLIPS)} of {cells} cells of 8 tables agree with the published study"
    assert first == f"harness: {agree}; these differ:"
    assert len(differ) == len(SLIPS)
    assert any(
        "kv_cache, 110B, kv_params_per_1024_tokens_mi: 160, printed as 128 (" in line for line in differ
    )
    assert harness("theory", "--published", "llama_speeds").err == ""


def test_si_units_are_the_data_sheets(harness):
    (row,) = harness("theory", "qwen1.5-7b", "--machine", "rtx-4090", "--bpw", "16", "--json").json
    active = row["layer_params"] + row["lm_head_params"]
    assert row["active_params"] == active
    assert row["total_params"] == parameters(SHAPES["qwen1.5-7b"]) == 7_721_324_544
    assert row["B_ms"] == pytest.approx(active * 2 / 1008e9 * 1e3)
    assert row["W_tokens_per_ms"] == pytest.approx(1008e9 / 524_288 / 1e3)
    published_B = 13.12
    assert row["B_ms"] / published_B == pytest.approx(2**30 / 1e9, rel=1e-3)  # 7.4% higher


# --- floors


DEMANDS = st.builds(
    Demand,
    layer_params=st.integers(1, 10**6),
    lm_head_params=st.integers(0, 10**5),
    layer_bytes=st.floats(1, 2e6),
    lm_head_bytes=st.floats(0, 2e5),
    embedding_bytes=st.just(0),
    reaches=st.lists(
        st.builds(Reach, st.floats(1, 2000), st.floats(1, 3000), st.none() | st.integers(1, 80)),
        min_size=1,
        max_size=3,
    ).map(tuple),
    state_bytes=st.sampled_from([0.0, 5000.0]),
)


@given(DEMANDS, st.floats(0.2, 200), st.sampled_from(["every", "last"]))
@example(Demand(100, 0, 200.0, 0.0, 0, (Reach(2.0, 1.0, 40),)), 5.0, "every")
@example(Demand(1, 2, 1.0, 0.0, 0, (Reach(1.0, 2.0),)), 0.5, "last")
@example(Demand(1, 1000, 1.0, 0.0, 0, (Reach(9.0, 1.0),)), 1.0, "last")
@example(Demand(1, 0, 1.0, 0.0, 0, (Reach(3.0, 2.0, 2),)), 1.0, "every")  # as long past the window
@example(Demand(1, 0, 1.0, 0.0, 0, (Reach(1.0, 2.0), Reach(3.0, 1.0, 2))), 1.0, "every")  # touches at its end
def test_knees_are_where_a_count_token_by_token_sees_them(asked: Demand, flops: float, lm_head: str) -> None:
    ceiling = Ceiling(1, flops)
    knees = floors.prefill_knees(asked, ceiling, lm_head)
    assert crossings(knees, 100) == counted(asked, ceiling, lm_head, 100)[:2]  # so far token by token


@pytest.mark.parametrize(
    ("flops", "window", "expected"),
    [(1e9, None, None), (5.0, None, [False, False]), (5.0, 4, [False, True]), (5.0, 800, [False, False])],
)
def test_there_may_be_no_knee_one_or_two(flops: float, window: int | None, expected: Any) -> None:
    asked = Demand(1000, 0, 2000.0, 0.0, 0, (Reach(1.0, 1.0, window),))
    knees = floors.prefill_knees(asked, Ceiling(1, flops))
    assert (knees and [knee is None for knee in knees]) == expected


def crossings(knees: tuple[float, float | None] | None, most: int) -> list[int]:
    """The first whole lengths past each knee, as a count would see them."""
    if knees is None:
        return []
    found = [max(1, math.ceil(knees[0]))] + ([] if knees[1] is None else [math.floor(knees[1]) + 1])
    found = [n for n in found if n <= most]
    return [] if len(found) == 2 and found[0] >= found[1] else found


def counted(asked: Demand, ceiling: Ceiling, lm_head: str, most: int) -> list[int]:
    found, before, attention, kv = [], False, 0.0, 0.0
    for n in range(1, most + 1):
        for reach in asked.reaches:
            tokens = n if reach.window is None else min(n, reach.window)
            attention, kv = attention + reach.flops * tokens, kv + reach.kv_bytes * tokens
        heads = n if lm_head == "every" else 1
        flops = 2 * (asked.layer_params * n + asked.lm_head_params * heads) + attention
        read = asked.weight_bytes_per_token + 2 * asked.state_bytes + kv
        now = flops / ceiling.flops >= read / ceiling.bytes_per_s
        if now != before:
            found.append(n)
        before = now
    return found


def test_prefill_is_bound_by_compute_between_the_knees_and_by_reading_outside():
    asked = floors.demand_of_bits(SHAPES["qwen1.5-7b"], 16)
    first, second = floors.prefill_knees(asked, CARD)
    assert second is not None

    def computing_s(n: int) -> float:
        attention = math.fsum(reach.flops for reach in asked.reaches)
        flops = 2 * (asked.layer_params * n + asked.lm_head_params) + attention * n * (n + 1) / 2
        return flops / CARD.flops

    for n, bound in ((first - 2, False), (first + 2, True), (second - 2, True), (second + 2, False)):
        total = floors.prefill_floor_s(asked, CARD, round(n), kv_block=1)
        assert (total == pytest.approx(computing_s(round(n)))) == bound


def test_chunked_prefill_loses_nothing_while_chunks_exceed_the_first_knee():
    asked = floors.demand_of_bits(SHAPES["qwen1.5-14b"], 16)
    first, _ = floors.prefill_knees(asked, CARD)
    n = 4096
    whole = floors.prefill_floor_s(asked, CARD, n)
    for chunk in (128, 256, 512, 2048):
        assert chunk > first
        assert floors.prefill_floor_s(asked, CARD, n, chunk=chunk) == pytest.approx(whole, rel=1e-9)
    below = [floors.prefill_floor_s(asked, CARD, n, chunk=chunk) for chunk in (64, 32, 16, 8)]
    assert whole * 1.25 < below[0]
    assert all(more > 1.5 * less for less, more in pairwise(below))


def test_a_prefill_of_chunks_of_one_token_is_decoding():
    asked = floors.demand_of_bits(SHAPES["qwen1.5-0.5b"], 4)
    one_by_one = floors.prefill_floor_s(asked, CARD, 50, lm_head="every", chunk=1)
    assert one_by_one == pytest.approx(sum(floors.decode_floor_s(asked, CARD, n) for n in range(1, 51)))


def test_reading_the_cache_once_a_block_lies_between_once_a_token_and_once():
    asked = floors.demand_of_bits(SHAPES["qwen1.5-14b"], 4)
    token, block, once = (floors.prefill_floor_s(asked, CARD, 3000, kv_block=size) for size in (1, 64, None))
    assert once < block * 1.0001
    assert block < token / 2


@pytest.mark.parametrize(
    ("kv_read", "length", "tokens"),
    [
        ("grows", None, [1, 256, 257, 5000]),
        ("padded256", None, [256, 256, 512, 5120]),
        ("copied", None, [3, 768, 771, 15_000]),
        ("full", 8192, [8192] * 4),
        ("window", 300, [1, 256, 257, 300]),
    ],
)
def test_a_step_reads_the_cache_as_its_stack_does(kv_read, length, tokens):
    asked = floors.demand_of_bits(SHAPES["qwen1.5-0.5b"], 4)
    slow = Ceiling(1e9, 1e18)
    seen = [floors.decode_floor_s(asked, slow, n, kv_read, length) for n in (1, 256, 257, 5000)]
    weights_s = asked.weight_bytes_per_token / 1e9
    assert [(s - weights_s) * 1e9 / asked.kv_bytes_per_token for s in seen] == pytest.approx(tokens)


def test_a_static_cache_has_no_W_and_its_B_reads_all_of_it():
    asked = floors.demand_of_bits(SHAPES["qwen1.5-0.5b"], 16)
    assert floors.W_tokens_per_s(asked, CARD, "full") is None
    read = asked.weight_bytes_per_token + 10_000 * asked.kv_bytes_per_token
    assert floors.B_s(asked, CARD, "full", 10_000) == read / CARD.bytes_per_s


def test_a_model_with_a_window_reads_no_more_than_it():
    shape = SHAPES["mistral-7b-v0.1"]
    asked = floors.demand_of_bits(shape, 16)
    assert shape.window == 4096
    assert floors.decode_floor_s(asked, CARD, 4096) == floors.decode_floor_s(asked, CARD, 30_000)
    assert floors.decode_floor_s(asked, CARD, 4096) > floors.decode_floor_s(asked, CARD, 4000)


def test_an_a100_decodes_161_sequences_before_computing_takes_longer():
    a100 = MACHINES["a100-80gb-pcie"]
    ceiling = Ceiling(a100.bandwidth.value, a100.rates["fp16"].value)
    for name in ("llama-7b", "qwen1.5-14b"):
        weights_alone = replace(floors.demand_of_bits(SHAPES[name], 16, norms=False), reaches=())
        assert math.floor(floors.compute_bound_batch(weights_alone, ceiling)) == 161


def test_the_longest_context_is_the_last_that_fits():
    asked = floors.demand_of_bits(SHAPES["qwen1.5-7b"], 8)
    memory, resident = 24 * 2**30, asked.weight_bytes_per_token
    longest = floors.max_ctx(memory, resident, asked.kv_bytes_per_token)
    assert longest is not None
    assert resident + longest * asked.kv_bytes_per_token <= memory
    assert resident + (longest + 1) * asked.kv_bytes_per_token > memory
    assert floors.max_ctx(memory, memory, 1) is None


def test_speculative_decoding_gains_what_drawing_it_gives():
    assert floors.speculative_speedup(0, 4, 0) == 1
    assert floors.speculative_speedup(1, 4, 0) == 5
    assert floors.speculative_speedup(0.8, 5, 0.05) == pytest.approx(2.95, abs=0.005)
    chance = random.Random(3)
    acceptance, length, cost, rounds = 0.7, 4, 0.1, 40_000
    tokens = 0
    for _ in range(rounds):
        accepted = next((i for i in range(length) if chance.random() >= acceptance), length)
        tokens += accepted + 1
    drawn = tokens / (rounds * (length * cost + 1))
    assert floors.speculative_speedup(acceptance, length, cost) == pytest.approx(drawn, rel=0.02)


def test_a_cache_of_8_or_4_bits_halves_and_quarters_what_a_token_adds():
    shape = SHAPES["qwen1.5-32b"]
    sizes = [floors.demand_of_bits(shape, 16, kv_bits).kv_bytes_per_token for kv_bits in (16, 8, 4)]
    elements = kv_elements_per_token(shape)
    assert sizes == [2 * elements, elements, elements / 2]


def test_units_round_a_knee_as_each_counts_it():
    assert PUBLISHED.knee(99.6) == 99  # the last length before the crossing
    assert SI.knee(99.6) == 100  # the first past it
    assert SI.knee(-3) == 1  # from the first token on


# --- the LLaMA arithmetic


def test_the_articles_speeds_follow_from_twice_the_bytes_and_ours_from_once():
    rows = {(row["machine"], row["model"]): row for row in published.llama_speeds()}
    for row in rows.values():
        if row["published_tok_s"] and row["machine"] != "rpi-4":
            assert row["article_formula_tok_s"] == pytest.approx(row["published_tok_s"], rel=0.06)
            assert row["floor_tok_s"] == pytest.approx(2 * row["published_tok_s"], rel=0.12)
    pi = rows["rpi-4", "llama-7b"]
    assert round(pi["by_memory_tok_s"], 2) == 1.19
    assert round(pi["by_compute_tok_s"], 1) == 1.0
    assert pi["floor_tok_s"] < pi["published_tok_s"]  # faster than its machine allows
    assert all(row["floor_tok_s"] > row["seen_tok_s"] for row in rows.values() if row["seen_tok_s"])


# --- the command


def test_a_csv_has_the_columns_of_all_rows_though_no_stack_loads_every_form(harness):
    said = harness("theory", "gpt-oss-20b", "--machine", "rtx-4090", "--csv").out
    as_gguf, as_released = csv.DictReader(io.StringIO(said))
    longest = "llama.cpp longest", "transformers longest"
    assert [bool(as_gguf[name]) for name in longest] == [True, False]
    assert [bool(as_released[name]) for name in longest] == [False, True]


def test_known_models_and_machines_are_listed_each_by_its_own_option(harness):
    models, machines = harness("theory", "--list-models").out, harness("theory", "--list-machines").out
    assert ["qwen1.5-0.5b" in said for said in (models, machines)] == [True, False]
    assert ["rtx-4090" in said for said in (models, machines)] == [False, True]


def test_several_models_and_machines_make_one_table(harness):
    ran = harness("theory", "qwen1.5-0.5b", "llama-7b", "--machine", "rtx-4090", "apple-m2-16gb", "--json")
    assert [(row["model"], row["machine"], row["weight_bits"]) for row in ran.json] == [
        (model, machine, bits)
        for model in ("qwen1.5-0.5b", "llama-7b")
        for machine in ("rtx-4090", "apple-m2-16gb")
        for bits in (16, 8, 4)
    ]
    text = harness("theory", "qwen1.5-0.5b", "llama-7b", "--machine", "rtx-4090", "apple-m2-16gb").out
    assert all(name in text for name in ("qwen1.5-0.5b", "llama-7b", "rtx-4090", "apple-m2-16gb", "W tok/ms"))
    slow = ("--machine", "rpi-4-4gb", "--rate", "fp64", "--csv")
    rows = list(csv.DictReader(io.StringIO(harness("theory", "qwen1.5-1.8b", *slow).out)))
    assert [row["weights"] for row in rows] == ["16 bits", "8 bits", "4 bits"]
    assert [row["bound"] for row in rows] == ["", "memory", "compute"]  # 16 bits do not fit


def test_names_are_found_whatever_their_case_and_after_options_too(harness):
    (row,) = harness("theory", "--machine", "RTX-4090", "Qwen1.5-7B", "--quant", "Q4_K_M", "--json").json
    assert (row["model"], row["machine"], row["weights"]) == ("qwen1.5-7b", "rtx-4090", "q4_k_m")


def test_what_the_table_leaves_out_is_said_in_words(harness):
    asked = "--machine", "m2 pro", "rtx-4090", "--quant", "q4_k_m,f16"
    ran = harness("theory", "qwen2.5-7b", *asked, "--wide")
    fits = [line for line in ran.out.splitlines() if " to spare" in line or " short" in line]
    assert [line.split()[1] for line in fits] == ["q4_k_m", "f16"] * 2
    assert ["cannot load" in line for line in fits] == [True, False] * 2  # in transformers
    said = " ".join(ran.out.split())
    assert (
        "apple-m2-pro-16gb: of its 17.2 GB (16 GB as sold), 5.7 GB are reserved for the system, as macOS"
        in said
    )
    assert "https://github.com/exo-explore/exo/pull/1672" in said  # not broken at its hyphen
    assert "reached:" not in said  # no such column: these weights were not measured on this machine


@pytest.mark.parametrize(
    "arguments",
    ["qwen3-8b", "gpt-oss-20b --machine 4090", "gpt-oss-20b --memory 24GB", "llama-3-8b --machine 780m"],
)
def test_no_line_is_wider_than_the_terminal(harness, arguments):
    out = harness("theory", *arguments.split(), COLUMNS="80").out
    assert max(map(len, out.splitlines())) <= 80


def test_what_fits_with_flash_attention_alone_has_a_speed_at_its_context(harness):
    asked = "--machine", "rtx-4060-ti-16gb", "--quant", "q4_k_m", "--context"
    (said,) = harness("theory", "qwen2.5-14b", *asked, "32k", "--json").json
    fits = said["fits"]
    assert fits["llama.cpp"]["spare_bytes"] < 0 < fits["llama.cpp flash_attn"]["spare_bytes"]
    assert said["tokens_per_s_at_context"] > 0
    text = harness("theory", "qwen2.5-14b", *asked, "32k", "--wide").out
    (line,) = [line for line in text.splitlines() if " to spare" in line]
    assert re.search(r"no, 1\.\d GB short +[\d,]+ +yes, 0\.\d GB to spare", line)


@pytest.mark.parametrize(
    "alone", [["--published", "decode_theory_4090"], ["--list-models"], ["--list-machines"]]
)
def test_what_stands_alone_ignores_no_option(harness, alone):
    ran = harness("theory", *alone, "--machine", "rtx-3090")
    assert (ran.code, ran.err) == (2, f"harness: {alone[0]} stands alone, without --machine\n")


def test_a_context_beyond_the_trained_one_is_said_to_be_that(harness):
    asked = "theory", "qwen1.5-0.5b", "--machine", "rtx-4090", "--quant", "q4_0", "--context"
    said = "qwen1.5-0.5b was trained on at most 32,768 tokens: past them it answers worse, or not at all."
    assert said in " ".join(harness(*asked, "40k").out.split())
    assert "was trained on" not in harness(*asked, "32k").out


@pytest.mark.parametrize("where", [("--machine", "rtx-4090"), ("--memory", "24GB")])
def test_a_trained_context_that_config_json_does_not_state_is_said_to_be_assumed(harness, tmp_path, where):
    folder = write_config(tmp_path, max_position_embeddings=None)
    said = " ".join(harness("theory", folder / "config.json", *where).out.split())
    assumed = "2,048 tokens, the default of transformers, are assumed"
    assert f"does not state max_position_embeddings; {assumed}" in said
    assert "was trained on" not in said
    rows = harness("theory", folder / "config.json", *where, "--json").json
    assert {row["trained_stated"] for row in rows} == {False}


def test_a_16_bit_gguf_comes_first_among_what_fits_a_memory(harness, tmp_path):
    asked = "theory", write_gguf(tmp_path / "m.gguf"), "--memory", "24GB"
    rows = harness(*asked, "--json").json
    types = ["f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k"]
    assert [row["weights"] for row in rows[::3]] == types
    memory = "Memory: 25.8 GB (24 GB as sold); 0.5 GB of it are"
    assert harness(*asked).out.startswith(memory)


def test_weights_without_config_json_are_said_to_lack_it(harness, tmp_path):
    write_shards(write_config(tmp_path), TINY, 1)
    (tmp_path / "config.json").unlink()
    ran = harness("theory", tmp_path, "--memory", "24GB")
    assert (ran.code, "has no config.json" in ran.err) == (2, True)


def test_llama_cpp_quantizes_the_cache_with_flash_attention_alone(harness):
    asked = "theory", "qwen2.5-14b", "--machine", "rtx-4090", "--quant", "q4_k_m", "--kv", "q8_0", "--json"
    fits = harness(*asked).json[0]["fits"]
    assert fits["llama.cpp"] is None
    assert fits["transformers"] is None
    assert fits["llama.cpp flash_attn"]["spare_bytes"] > 0


@pytest.mark.parametrize(
    ("kv", "block_bytes"),
    [("f32", 128), ("bf16", 64), ("q8_0", 34), ("q5_1", 24), ("q4_0", 18), ("iq4_nl", 18)],
)
def test_a_cache_has_the_bytes_of_its_type(harness, kv, block_bytes):
    """Of ggml's blocks of 32 elements (ggml-common.h); q8_0 has 8.5 bits."""
    (row,) = harness("theory", "qwen3-30b-a3b", "--kv", kv, "--quant", "q4_k_m", "--json").json
    assert row["kv_bytes_per_token"] == 2 * 48 * 4 * 128 * block_bytes / 32
    (choice,) = harness("theory", "gpt-oss-20b", "--memory", "16GB", "--kv", kv, "--json").json
    assert choice["kv"] == kv


def test_the_reserve_is_said_with_how_to_change_it_and_can_be_changed(harness):
    """A 32B q4_k_m ran on a card of 20 GiB."""
    asked = "theory", "qwen2.5-32b", "--machine", "rx-7900-xt", "--quant", "q4_k_m", "--context", "4k"

    def spare(*given: str) -> float:
        return harness(*asked, *given, "--json").json[0]["fits"]["llama.cpp flash_attn"]["spare_bytes"]

    usual = spare()
    assert spare("--headless") - usual == pytest.approx(0.2 * 2**30, abs=1)
    assert spare("--reserve", "0") - usual == pytest.approx(0.7 * 2**30, abs=1)
    assert usual < 0 < spare("--reserve", "0")
    said = [
        " ".join(harness(*asked, *given).out.split()) for given in ((), ("--headless",), ("--reserve", "1GB"))
    ]
    of = "rx-7900-xt: of its 21.5 GB (20 GB as sold),"
    assert (
        f"{of} 0.8 GB are reserved for the display and the driver (--headless: 0.5 GB; --reserve" in said[0]
    )
    assert f"{of} 0.5 GB are reserved for the driver, without a display (--reserve SIZE: another)." in said[1]
    assert f"{of} 1.0 GB are reserved, as given." in said[2]
    small = harness("theory", "gpt-oss-20b", "--memory", "12GB", "--context", "8k", "--json").json
    freed = harness(
        "theory", "gpt-oss-20b", "--memory", "12GB", "--context", "8k", "--reserve", "0", "--json"
    ).json
    assert (small[0]["fits"], freed[0]["fits"]) == (False, True)


def test_beside_the_limit_of_prefill_is_the_fastest_that_was_measured_at_that_length(harness):
    asked = "theory", "qwen1.5-7b", "--machine", "rtx-4090", "--quant", "q4_0", "--prompt"
    (said,) = harness(*asked, "500", "--json").json
    reached = said["reached_prefill"]
    assert (reached["stack"], reached["variant"], reached["ms"]) == ("llamacpp", "q4_0", 70.246220)
    assert reached["share"] == pytest.approx(said["prefill_ms"]["last"] / 70.246220)
    assert "14% (70.2)" in harness(*asked, "500").out
    assert harness(*asked, "501", "--json").json[0]["reached_prefill"] is None
    # 16 bits: transformers' clock was read before the card was done.
    (said,) = harness("theory", "qwen1.5-7b", "--machine", "rtx-4090", "--bpw", "16", "--json").json
    assert (said["reached"]["stack"], said["reached_prefill"]) == ("hf", None)
    # 4 bits: AWQ's 5.1 ms are above the limit, and far below a later step of 8.5.
    (said,) = harness("theory", "qwen1.5-7b", "--machine", "rtx-4090", "--bpw", "4", "--json").json
    assert (said["reached_prefill"]["stack"], said["reached_prefill"]["ms"]) == ("gptq", 7.2)


def test_what_was_reached_here_is_of_the_gpu_that_was_measured_whatever_others_there_are(harness, tmp_path):
    (published,) = PUBLISHED_RECORDS.glob("*/qwen1.5-7b/*.llamacpp.q4_0.*/record.json")
    record = json.loads(published.read_text())
    names = ["NVIDIA GeForce RTX 3090", "NVIDIA H100 80GB HBM3"]
    gpus = [{"uuid": f"GPU-{i}", "name": name, "memory_bytes": 80 << 30} for i, name in enumerate(names)]
    record |= {"device": "GPU-1", "machine": record["machine"] | {"gpus": gpus}}
    folder = tmp_path / "results" / "here" / "qwen1.5-7b" / record["cell"] / "1"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record))
    asked = "theory", "qwen1.5-7b", "--quant", "q4_0", "--json", "--machine"
    rows = harness(*asked, "h100-sxm", "rtx-3090").json
    assert [row["reached"] is None for row in rows] == [False, True]


def test_what_does_not_fit_has_no_speed(harness):
    rows = harness("theory", "qwen1.5-7b", "--machine", "rpi-5-8gb", "--json").json
    assert [row["fits"]["llama.cpp"]["longest"] for row in rows] == [None, None, 5632]
    assert [row["tokens_per_s"] is None for row in rows] == [True, True, False]  # 8 bits leave no system room
    assert [row["tokens_per_s_at_context"] for row in rows] == [None] * 3
    text = harness("theory", "llama-3.1-70b", "--machine", "rtx-4060-ti-16gb", "--quant", "q4_k_m").out
    assert "no, 30.8 GB short" in text
    assert "No tok/s, since the weights do not fit:" in text
    assert "6.87" not in text
    asked = ("--machine", "rtx-4090", "--kv-read", "full", "--length", "4096", "--json")
    assert harness("theory", "qwen1.5-7b", *asked).json[0]["tokens_per_s_at_context"] is None


def test_a_long_name_is_never_folded(harness, tmp_path):
    name = "x" * 90
    own = tmp_path / "own.yaml"
    own.write_text(f"shapes:\n  {name}: {{like: qwen1.5-0.5b}}\n")
    out = harness("theory", name, "--machine", "rtx-4090", "--from", own, COLUMNS="60").out
    assert len([line for line in out.splitlines() if line.startswith(name)]) == 1 + 3 + 3


def test_without_a_machine_what_needs_one_is_null(harness):
    row = harness("theory", "qwen1.5-7b", "--json").json[0]
    assert row["kv_elements_per_token"] == 262_144
    assert row["machine"] is None
    assert row["B_ms"] is None
    assert "KV bytes/token" in harness("theory", "qwen1.5-7b").out


def test_a_quantization_has_the_exact_bytes_of_each_part_and_type(harness):
    (row,) = harness("theory", "qwen1.5-0.5b", "--quant", "q4_0", "--tensors", "--json").json
    assert f"{row['model_bytes'] / 2**20:.2f}" == "371.02"  # as published
    assert f"{row['weight_bits']:.2f}" == "5.02"
    assert sum(sum(types.values()) for types in row["bytes_by_part"].values()) == row["model_bytes"]
    assert sum(each["model_bytes"] for each in row["bytes_by_type"].values()) == row["model_bytes"]
    streamed = sum(tensor["streamed_bytes"] for tensor in row["tensors"])
    assert streamed == row["weight_bytes_per_token"]
    assert streamed == row["model_bytes"] - sum(row["bytes_by_part"]["embedding"].values())


def test_a_file_is_weighed_by_its_header_as_llama_cpp_weighs_it(harness, llamacpp_interpreter):
    (made,) = harness("env", "synth", "tiny-qwen2", "--quant", "q4_k_m", "--json").json
    (row,) = harness("theory", made["path"], "--machine", "rtx-4090", "--tensors", "--json").json
    assert row["weights"] == made["quant"]
    assert row["model_bytes"] == made["model_bytes"]
    by_type = {name: sizes["model_bytes"] for name, sizes in row["bytes_by_type"].items()}
    assert by_type == made["bytes_by_type"]
    assert row["weight_bytes_per_token"] == made["model_bytes"] - made["input_embedding_bytes"]
    assert row["total_params"] == made["parameters"]
    (by_rules,) = harness("theory", "tiny-qwen2", "--quant", "q4_k_m", "--tensors", "--json").json
    assert {t["name"]: t for t in by_rules["tensors"]} == {t["name"]: t for t in row["tensors"]}
    assert "ffn_down" in harness("theory", made["path"], "--tensors").out


@pytest.mark.parametrize(
    ("model", "quantization", "label", "tokens_per_s"),
    [
        ("gpt-oss-120b", {"quant_method": "mxfp4"}, "mxfp4 as released", 54.6),
        (
            "qwq-32b",
            {"quant_method": "gptq", "bits": 4, "group_size": 128},
            "gptq 4-bit, group 128 as released",
            15.35,
        ),
        ("qwq-32b", {"quant_method": "fp8"}, "fp8 as released", 8.33),
    ],
)
def test_a_config_json_counts_as_its_weights_were_released(
    harness, tmp_path, model, quantization, label, tokens_per_s
):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_of(model) | {"quantization_config": quantization}))
    (row,) = harness("theory", config, "--machine", "dgx-spark", "--json").json
    assert row["weights"] == label
    assert row["tokens_per_s"] == pytest.approx(tokens_per_s, rel=0.003)


def test_a_model_released_in_mxfp4_has_the_gguf_s_layout_and_the_released_one(harness, tmp_path):
    """The GGUF's sizes are those that llama.cpp's benches/dgx-spark.md lists: 59.02 and 11.27 GiB."""
    for name, gib, released in (("gpt-oss-120b", 59.02, 54.6), ("gpt-oss-20b", 11.27, 73.6)):
        rows = harness("theory", name, "--machine", "dgx-spark", "--json").json
        assert [row["weights"] for row in rows] == ["mxfp4_moe", "mxfp4 as released"]
        assert rows[0]["model_bytes"] / 2**30 == pytest.approx(gib, abs=0.005)
        assert rows[1]["tokens_per_s"] == pytest.approx(released, rel=0.003)
        measured = [
            row.tok_s
            for row in public_speeds.rows()
            if (row.name, row.device) == (name, MACHINES["dgx-spark"])
        ]
        assert rows[1]["tokens_per_s"] < max(filter(None, measured)) < rows[0]["tokens_per_s"]
    said = " ".join(harness("theory", "gpt-oss-20b", "--machine", "dgx-spark").out.split())
    assert (
        "experts in MXFP4 and the other matrices in q8_0. As released (gpt-oss), the others are in bf16"
        in said
    )


def test_a_quantization_of_unknown_size_is_said_to_be_unknown(harness, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_of("qwq-32b") | {"quantization_config": {"quant_method": "hqq"}}))
    ran = harness("theory", config, "--machine", "dgx-spark", "--json")
    assert [row["weights"] for row in ran.json] == ["16 bits", "8 bits", "4 bits"]
    assert "is hqq; no stack here loads that" in ran.err
    assert "its bytes are not known without its weights: the rows are of types made of 16-bit" in ran.err


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


@pytest.mark.parametrize(
    ("quantization", "stacks"),
    [
        (AWQ | {"version": "gemm"}, ("autoawq", "gptqm", "vllm")),
        (AWQ | {"version": "gemv"}, ()),
        (GPTQ | {"checkpoint_format": "gptq"}, ("gptq", "gptqm", "vllm")),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, ("gptqm", "vllm")),  # auto-gptq misreads its zero points
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, ("gptqm",)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("hf",)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, ("hf",)),
    ],
)
def test_transformers_loads_a_quantized_checkpoint_that_llama_cpp_does_not(
    harness, tmp_path, quantization, stacks
):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_of("qwq-32b") | {"quantization_config": quantization}))
    ran = harness("theory", config, "--machine", "rtx-4090", "--json")
    (row,) = ran.json
    assert {name: fit is not None for name, fit in row["fits"].items()} == {
        "ideal": True,
        "llama.cpp": False,
        "llama.cpp flash_attn": False,
        "transformers": bool(stacks),
    }
    assert (", ".join(stacks) + " load" if stacks else "no stack here loads that") in ran.err
    chosen = harness("theory", config, "--memory", "24GB", "--json").json
    assert {row["engine"] for row in chosen} == {"transformers"}


def test_a_quantization_is_read_from_the_file_beside_a_config_json_too(harness, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwq-32b")))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert "is modelopt fp8; no stack here" in harness("theory", tmp_path, "--machine", "rtx-4090").err


def test_a_config_json_is_as_good_as_its_models_name(harness, tmp_path):
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936}
    config |= {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False}
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32_768}))
    asked = ("--machine", "rtx-4090", "--json")
    unknown = {"reached": None, "reached_prefill": None}  # what others have reached is known of a name
    known = [row | unknown for row in harness("theory", "qwen1.5-7b", *asked).json]
    for path in (folder, folder / "config.json"):
        assert [row | {"model": "qwen1.5-7b"} for row in harness("theory", path, *asked).json] == known
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    ran = harness("theory", folder)
    assert ran.code == 2
    assert "mamba" in ran.err


def test_a_file_of_an_unknown_architecture_is_told_by_its_bytes(harness, llamacpp_interpreter, tmp_path):
    (made,) = harness("env", "synth", "tiny-llama", "--quant", "q8_0", "--json").json
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(Path(made["path"]).read_bytes().replace(b"llama", b"lamma"))
    (row,) = harness("theory", odd, "--machine", "rtx-4090", "--json").json
    streamed = made["model_bytes"] - made["input_embedding_bytes"]
    assert row["weight_bytes_per_token"] == streamed
    assert row["B_ms"] == pytest.approx(streamed / 1008e9 * 1e3)
    assert row["kv_bytes_per_token"] is None
    assert "so only bytes are shown" in harness("theory", odd, "--machine", "rtx-4090").out
    assert "only the stored weights are known" in harness("theory", odd, "--bpw", "4").err


def test_tied_weights_count_and_stream_once(harness):
    (row,) = harness("theory", "qwen1.5-0.5b", "--tied", "--bpw", "16", "--json").json
    assert row["total_params"] == row["active_params"] == 463_987_712
    assert row["model_bytes"] == row["weight_bytes_per_token"] == 2 * 463_987_712


def test_a_users_own_shapes_and_machines_come_from_yaml(harness, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(
        "shapes:\n  half: {like: qwen1.5-0.5b, layers: 12}\n"
        "machines:\n  box: {memory_gib: 8, bandwidth_gb_per_s: 10, tflops: 0.1}\n"
    )
    row = harness("theory", "half", "--machine", "box", "--from", own, "--json").json[0]
    assert row["kv_elements_per_token"] == 24_576
    assert row["B_ms"] == pytest.approx(row["active_params"] * 2 / 10e9 * 1e3)
    own.write_text("shapes:\n  wide: {like: mistral-nemo-12b, heads: 16, arch: qwen2}\n")
    (wide,) = harness("theory", "wide", "--from", own, "--quant", "f16", "--tensors", "--json").json
    dims = {tensor["name"]: tensor["dims"] for tensor in wide["tensors"]}
    assert dims["blk.0.attn_q.weight"] == [16 * 128, 5120]  # heads of 128, as Nemo has them
    assert dims["blk.0.attn_q.bias"] == [16 * 128]  # and biases, as Qwen2 has them
    own.write_text("shapes:\n  half: {like: qwen1.5-0.5, layerz: 12}\n")
    ran = harness("theory", "half", "--from", own)
    assert ran.code == 2
    assert "own.yaml:2: shapes.half.like: unknown shape" in ran.err
    assert "did you mean qwen1.5-0.5b" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("qwen1.5-7", "did you mean qwen1.5-7b"),
        ("gibberish", "unknown model (and no file) gibberish; see harness theory --list-models"),
        ("qwen1.5-7b --machine rtx-4091", "did you mean rtx-4090"),
        ("qwen1.5-7b --rate fp32", "--rate needs a --machine"),
        ("qwen1.5-7b --length 4096", "--length needs --kv-read full or window"),
        ("qwen1.5-7b --draft-length 4", "need --acceptance"),
        ("qwen1.5-7b --tensors", "--tensors needs --quant"),
        ("--bpw 4 qwen1.5-7b", "is not a number; name models before options"),
        ("qwen1.5-7b --quant q4_k_x", "did you mean q4_k_"),
        ("qwen1.5-7b --kv-read full", "needs --length"),
        ("qwen1.5-7b --machine rtx-4090 --rate fp17", "unknown rate of rtx-4090 fp17"),
        ("no/such.gguf", "no such file"),
        ("", "name a model or a file"),
        ("--published decode", "unknown table decode"),
        ("qwen1.5-7b --from none.yaml", "none.yaml: no such file"),
        ("qwen1.5-7b --bpw -4", "not between 0.1 and 128"),
        ("qwen1.5-7b --acceptance 1.5", "not between 0 and 1"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(harness, arguments, said):
    ran = harness("theory", *arguments.split())
    assert ran.code == 2
    assert said in ran.err
    assert ran.out == ""


def test_lists_name_every_model_and_machine_with_sources(harness):
    models = harness("theory", "--list-models", "--json").json
    assert [row["model"] for row in models] == [*SHAPES, *data.model_names()]
    assert all(0 < row["active_params"] <= row["total_params"] for row in models)
    machines = harness("theory", "--list-machines", "--json").json
    assert [row["machine"] for row in machines] == list(MACHINES)
    for row in machines:
        rates = {*row["other_rates"], *([row["rate"]] if row["rate"] else [])}
        assert row["sources"].keys() >= {"memory", "bandwidth", *rates}
        assert (row["rate"] is None) == (row["flops"] is None) == (rates == set())


def test_chunks_and_drafts_are_told_when_asked_for(harness):
    asked = ("qwen1.5-7b", "--machine", "rtx-4090", "--prompt", "4096", "--chunk", "512", "32")
    row = harness("theory", *asked, "--acceptance", "0.8", "--draft-cost", "0.1", "--json").json[0]
    assert [cut["chunk"] for cut in row["chunked_prefill"]] == [512, 32]
    assert row["chunked_prefill"][0]["ratio"] == pytest.approx(1)
    assert row["chunked_prefill"][1]["ratio"] > 2
    assert row["speculative_speedup"] == floors.speculative_speedup(0.8, 4, 0.1)
    on_a_pi = ("theory", "qwen1.5-1.8b", "--machine", "rpi-4-4gb", "--rate", "fp64", "--bpw", "4")
    slow = harness(*on_a_pi, "--acceptance", "0.8", "--json")
    assert slow.json[0]["speculative_speedup"] < 1  # bound by compute, where five tokens cost five steps


@pytest.mark.parametrize(
    ("shapes", "names"), [(list(SHAPES), list(MACHINES)[::25]), (list(SHAPES)[::25], list(MACHINES))]
)
def test_no_figure_in_json_is_nan_or_infinite(harness, shapes, names):
    out = harness("theory", *shapes, "--machine", *names, "--bpw", "4.85", "--json").out

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    rows = json.loads(out, parse_constant=refuse)
    assert len(rows) == len(shapes) * len(names)
