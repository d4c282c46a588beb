"""Values of logs: numbers of any locale are read right, and impossible ones are left out by name."""

import json
import re
from typing import Any

import numpy as np
import pytest
from test_logs import CPP, DONE, FINAL, OLLAMA, PROGRESS, TABLE, TG, benchy, logged, vllm

from harness.records.foreign import numerals
from harness.records.foreign.log import LogError

LMS = "Tokens/Second: 45,20\nTime to First Token: 0,350s\nPrompt Tokens: 1,024\nPredicted Tokens: 150\n"
EVALSCOPE = """| Average time to first token (s) | 0,2130 |
| Average time per output token (s) | 0,0712 |
"""
BENCHY_TABLE = """| model | test | t/s | ttfr (ms) | e2e_ttft (ms) |
|:------|-----:|----:|----------:|--------------:|
| m | pp2048 | 2,100.50 ± 10.10 | 970.00 | 1,985.00 ± 3.00 |
| m | tg32 | 41.10 ± 0.20 | | |
"""
MLX = "Prompt: 30 tokens, 210,500 tokens-per-sec\nGeneration: 61 tokens, 22,990 tokens-per-sec\n"
BATCHED = """|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |
|-------|--------|------|--------|----------|----------|----------|----------|
|   128 |    128 |    1 |    256 |    0,108 |  1186,64 |    3,079 |    41,57 |
"""


def commas(text: str) -> str:
    return text.replace(".", ",")


@pytest.mark.parametrize(
    ("content", "first_ms", "rate"),
    [
        pytest.param(commas(OLLAMA.format("2.653s")), 345, 22.99, id="ollama"),
        pytest.param("eval count: 61 token(s)\neval duration: 2,653s\n", None, 22.99, id="ollama, cut"),
        pytest.param(commas(PROGRESS + FINAL), 1031.5, 21.73, id="llama-server"),
        pytest.param(commas(PROGRESS), None, 21.5, id="llama-server's progress"),
        pytest.param(
            CPP.format("a", ",").replace("1149,49", "1.149,49"), 1149.49, 92.29, id="groups of dots"
        ),
        pytest.param(LMS, 350, 45.2, id="lms"),
        pytest.param(EVALSCOPE, 213, 14.04, id="evalscope"),
        pytest.param(MLX, 142.5, 22.99, id="mlx_lm"),
        pytest.param(BATCHED, 108, 41.57, id="llama-batched-bench"),
    ],
)
def test_a_decimal_comma_is_read_as_the_point_of_the_same_tool(tmp_path, content, first_ms, rate):
    (request,) = logged(tmp_path, content).requests.values()
    assert request.first_token_ms == (first_ms and pytest.approx(first_ms, rel=1e-3))
    assert request.tokens_per_s == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(
    ("content", "first_ms", "rate"),
    [
        pytest.param(TABLE.replace("2694.70", "2694,70").replace("91.80", "91,80"), 190, 91.8, id="decimal"),
        pytest.param(TABLE.replace("2694.70", "2,694.70"), 190, 91.8, id="thousands"),
        pytest.param(TABLE.replace("2694.70", "2,694"), 190, 91.8, id="thousands beside a decimal point"),
        pytest.param(TABLE.replace("2694.70", "2.694").replace("91.80", "91,80"), 190, 91.8, id="dots"),
        pytest.param(BENCHY_TABLE, 1985, 41.1, id="llama-benchy"),
    ],
)
def test_a_comma_in_a_table_of_rates_groups_thousands_or_is_decimal_as_its_numbers_show(
    tmp_path, content, first_ms, rate
):
    prompt, decode = logged(tmp_path, content).requests.values()
    assert prompt.first_token_ms == pytest.approx(first_ms, rel=1e-3)
    assert decode.tokens_per_s == pytest.approx(rate, rel=1e-3)


def test_a_number_of_json_may_have_an_exponent(tmp_path):
    row = {"pp": 128, "tg": 128, "pl": 1, "n_kv": 256, "t_pp": 1e-05, "t_tg": 3.079}
    (request,) = logged(tmp_path, row).requests.values()
    assert request.first_token_ms == pytest.approx(0.01)


def test_a_draft_is_said_whatever_the_decimal_mark(tmp_path):
    notes = logged(tmp_path, commas(FINAL)).notes
    assert any("1331 of 3340 drafted tokens" in note for note in notes)


@pytest.mark.parametrize(
    ("number", "decimal", "expected"),
    [
        ("2,694.70", None, 2694.7),
        ("2.694,70", None, 2694.7),
        ("1,234,567", None, 1234567),
        ("1.234.567,5", None, 1234567.5),
        ("0,350", None, 0.35),
        ("2694,700", None, 2694.7),
        ("-91,8", None, -91.8),
        ("2.653", None, 2.653),
        ("2.653", ",", 2653),
        ("2,653", ".", 2653),
        ("2,653", ",", 2.653),
        ("61", None, 61),
        ("2,653", None, "2653 or 2.653"),
        ("1,23,4", None, "is not a number"),
        ("12,34.5", None, "is not a number"),
    ],
)
def test_a_number_has_one_value_or_a_sentence(number, decimal, expected):
    if isinstance(expected, str):
        with pytest.raises(LogError, match=expected):
            numerals.value(number, decimal)
    else:
        assert numerals.value(number, decimal) == expected


# --- values that no request has

SUMMARY = {"ttft_ms": 91.2, "tpot_ms": 12.4, "completion_tokens": 256}
MLX_OBJECT = {"prompt_tokens": 30, "prompt_tps": 210.5, "generation_tokens": 61, "generation_tps": 22.99}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        pytest.param(DONE | {"eval_count": 61.5}, "tokens: 61.5", id="a count that is not whole"),
        pytest.param(DONE | {"eval_count": 1e30}, r"tokens: 1e\+30", id="a count beyond any"),
        pytest.param(DONE | {"eval_duration": -5}, "decode time: -5e-06 ms", id="a negative duration"),
        pytest.param(DONE | {"eval_duration": 2.653}, "tokens/s: 2299", id="seconds as nanoseconds"),
        pytest.param(DONE | {"prompt_eval_count": -30}, "prompt tokens: -30", id="a negative prompt"),
        pytest.param(SUMMARY | {"tpot_ms": -12.4}, "decode time: -12.4 ms", id="a negative TPOT"),
        pytest.param(SUMMARY | {"ttft_ms": float("inf")}, "first token: inf ms", id="infinity"),
        pytest.param(SUMMARY | {"ttft_ms": float("nan")}, "first token: nan ms", id="not a number"),
        pytest.param(MLX_OBJECT | {"generation_tps": -1}, "tokens/s: -1", id="mlx_lm"),
        pytest.param(TG | {"avg_ts": 0}, "tokens/s: 0", id="a rate of zero"),
        pytest.param(TG | {"n_gen": -1024}, "tokens: -1024", id="llama-bench"),
        pytest.param({"benchmarks": [benchy(0, -41)]}, "tokens/s: -41", id="llama-benchy"),
        pytest.param(EVALSCOPE.replace("0,0712", "-0,0712"), "decode time: -71.2 ms", id="evalscope"),
        pytest.param(
            CPP.format("a", ",").replace("2502", "-2502"), "decode time: -2502.93 ms", id="llama.cpp"
        ),
        pytest.param(vllm([[0.02] * 9], [10], ttft=-0.9), "first token: -900 ms", id="vLLM's TTFT"),
        pytest.param(vllm([[0.02] * 9], [-5]), "tokens: -5", id="vLLM's count"),
        pytest.param(
            vllm([[0.02] * 9], [10], input_lens=[-8000]), "prompt tokens: -8000", id="vLLM's prompt"
        ),
    ],
)
def test_a_request_with_an_impossible_total_is_left_out_by_name(tmp_path, content, what):
    with pytest.raises(LogError, match=f"1 of 1 requests left out, with impossible values: .*{what}"):
        logged(tmp_path, content)


def test_the_other_requests_of_a_log_with_an_impossible_total_remain(tmp_path):
    later = DONE | {"eval_duration": 3_000_000_000}
    log = logged(tmp_path, [DONE, later | {"eval_count": -1}, later])
    assert [*log.requests] == ["request 1", "request 3"]
    assert log.notes[0] == "1 of 3 requests left out, with impossible values: request 2: tokens: -1"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(SUMMARY | {"ttft_ms": 0}, id="summary"),
        pytest.param(DONE | {"prompt_eval_duration": 0}, id="ollama"),
        pytest.param({"stats": {"tokens_per_second": 51.43, "time_to_first_token": 0}}, id="LM Studio"),
    ],
)
def test_a_ttft_of_zero_was_not_measured(tmp_path, content):
    (request,) = logged(tmp_path, content).requests.values()
    assert request.first_token_ms is None


@pytest.mark.parametrize("command", ["fit", "report"])
def test_a_log_that_is_cut_before_its_first_total_is_one_sentence(harness, tmp_path, command):
    (tmp_path / "cut.log").write_text("\n".join(CPP.format("llama_perf", ",").splitlines()[:2]))
    ran = harness(command, "cut.log")
    assert ran.code != 0
    assert "no complete request: the llama.cpp server log" in ran.err


def test_interleaved_streams_of_two_models_are_a_series_each(tmp_path):
    chunks = []
    for at in range(40):
        for model, ms in (("a", 20), ("b", 50)):
            when = {"model": model, "created_at": f"2026-01-05T10:00:{at * ms / 1e3:09.6f}Z"}
            chunks.append(when | {"done": False})
    ends = [DONE | {"model": model, "eval_count": 40} for model in "ab"]
    log = logged(tmp_path, "\n".join(map(json.dumps, [*chunks, *ends])))
    fast, slow = log.series.values()
    assert np.median(fast.ms[1:]) == pytest.approx(20, rel=0.02)
    assert np.median(slow.ms[1:]) == pytest.approx(50, rel=0.02)
    assert any("concurrently" in note for note in log.notes)


def test_prompts_of_slots_that_are_not_named_are_joined_to_no_request(tmp_path):
    prompt, decode = FINAL.splitlines()[1:3]
    mixed = [prompt, prompt.replace("1031.50", "2000.00"), decode, decode.replace("92051.37", "50000.00")]
    log = logged(tmp_path, "\n".join([*mixed, prompt, decode]))
    assert [each.first_token_ms for each in log.requests.values()] == [None, None, 1031.5]
    assert [each.prompt_tokens for each in log.requests.values()] == [None, None, 521]
    assert any("which prompt belongs to which request" in note for note in log.notes)
    assert any("concurrently" in note for note in log.notes)


def rows(n: list[float], ms: list[float]) -> list[dict[str, Any]]:
    return [{"n": at, "latency_ms": each} for at, each in zip(n, ms, strict=True)]


def test_a_position_before_the_first_is_no_point(harness, tmp_path):
    (tmp_path / "log.json").write_text(json.dumps(rows([-1, 4096, 8192], [4.5, 5, 5.4])))
    (found,) = harness("fit", "log.json", "--json").json
    assert found["unusable"] == "n = -1 is before the first token"
    assert found["B_ms"] is None


def test_the_table_under_a_chart_has_measured_points_alone(harness, tmp_path):
    n = [*range(51, 72)]
    for name, positions in {"short": n, "sweep": [1, 4100, 16300, 32700]}.items():
        content = json.dumps(rows(positions, [100 + 0.5 * at for at in positions]))
        (tmp_path / f"{name}.json").write_text(content)
        assert harness("fit", f"{name}.json", "-o", f"{name}.html").code == 0
        table = (tmp_path / f"{name}.html").read_text().split("<summary>Data</summary>")[1]
        heads = [int(head.replace(",", "")) for head in re.findall(r">n ([\d,]+)<", table)]
        shown = re.findall(r">([\d.]+|-)</td>", table.split("</table>")[0])
        assert heads
        assert set(heads) <= set(positions)
        assert shown == [f"{100 + 0.5 * at:.3f}" for at in heads]


@pytest.mark.parametrize(
    ("n", "first", "expected"),
    [
        pytest.param(100_000, 30.0, None, id="deep, as fast as a step"),
        pytest.param(51, 29.0, None, id="behind a short prompt"),
        pytest.param(100_000, 9000.0, 9000.0, id="deep, a prompt's time"),
        pytest.param(1, 30.0, 30.0, id="at the start"),
    ],
)
def test_the_first_row_of_a_table_behind_a_prompt_is_a_ttft_only_if_longer_than_a_step(
    harness, tmp_path, n, first, expected
):
    table = rows([*range(n, n + 40)], [first, *(30 + at % 3 / 10 for at in range(39))])
    (tmp_path / "log.json").write_text(json.dumps(table))
    (found,) = harness("fit", "log.json", "--json").json
    assert found["first_token_ms"] == expected
    assert found["median_ms"] == pytest.approx(30, rel=0.01)


def test_a_segment_has_no_b_where_the_b_of_its_series_is_not_known(harness, tmp_path):
    steps = [0.0132 + 0.0001 * (at % 3) for at in range(127)]
    (tmp_path / "log.json").write_text(vllm([steps], [128], input_lens=[8000]))
    (found,) = harness("fit", "log.json", "--json").json
    assert found["B_ms"] is None
    (segment,) = found["segments"]
    assert (segment["B_ms"], segment["W_tokens_per_ms"]) == (None, None)


@pytest.mark.parametrize(
    ("unit", "W"),
    [("ms", r" 2\d\d \(2\d\d to 2\d\d\)"), ("s", r" 0\.2\d\d \(0\.2\d\d to 0\.2\d\d\)")],
)
def test_w_has_three_significant_digits_in_any_unit(harness, tmp_path, unit, W):
    n = [64 + 512 * at for at in range(16)]
    ms = [24 + at / 249 + 0.02 * (-1) ** k for k, at in enumerate(n)]
    (tmp_path / "log.json").write_text(json.dumps(rows(n, ms)))
    ran = harness("fit", "log.json", "--unit", unit)
    assert re.search(W, ran.out)


SWEEP = [(32768, 7.9365), (1, 4.5372), (16384, 6.2228), (4096, 4.9826)]


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param([f"{n},{ms}" for n, ms in SWEEP], id="not sorted"),
        pytest.param([f"{n},{ms + by}" for n, ms in SWEEP for by in (-0.1, 0.1)], id="repeats of a depth"),
        pytest.param([commas(f"{n};{ms}") for n, ms in sorted(SWEEP)], id="decimal commas"),
        pytest.param([commas(f"{n}\t{ms}") for n, ms in sorted(SWEEP)], id="decimal commas and tabs"),
        pytest.param([f"{n:,};{ms}" for n, ms in sorted(SWEEP)], id="thousands"),
    ],
)
def test_the_rows_of_a_sweep_are_read_in_any_order_and_locale(tmp_path, cells):
    separator = next(mark for mark in ";\t," if mark in cells[0])
    log = logged(tmp_path, "\n".join([f"n{separator}latency_ms", *cells]))
    (found,) = log.series.values()
    assert found.fault is None
    assert found.n.tolist() == [1, 4096, 16384, 32768]
    assert found.ms == pytest.approx([4.5372, 4.9826, 6.2228, 7.9365])


CLI = "[ Prompt: 85.2 t/s | Generation: 23.1 t/s ]\n"
EMPTY_BENCHY = {"version": "0.3.1", "latency_mode": "api", "model": "m", "benchmarks": []}


def test_the_rate_that_llama_cli_prints_is_that_of_its_answer(tmp_path):
    log = logged(tmp_path, f"> hello{chr(10)}Hi!{chr(10)}{commas(CLI)}")
    (request,) = log.requests.values()
    assert (log.format, request.tokens_per_s, request.first_token_ms) == ("llama-cli answer", 23.1, None)


def test_output_of_a_second_tool_is_said(tmp_path):
    assert (
        "another tool, which is not read: Ollama result"
        in logged(tmp_path, FINAL + OLLAMA.format("2.653s")).notes[-1]
    )
    assert not any("another tool" in note for note in logged(tmp_path, BATCHED).notes)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        pytest.param("GGUF\x03", "it is a model, not a log; `harness theory FILE`", id="a model"),
        pytest.param(
            "============ Serving Benchmark Result ============\nMean TPOT (ms):    7.91\n",
            "averages only; run `vllm bench serve --save-detailed`",
            id="vLLM's summary",
        ),
        pytest.param(EMPTY_BENCHY, "no complete request: the llama-benchy report", id="llama-benchy, empty"),
        pytest.param(
            "n,latency_ms\n1,20,1\n2,20,2\n", "decimal commas need ; between", id="commas in commas"
        ),
        pytest.param("n\tlatency_ms\n1\t20,125\n2\t20,250\n", "is 20125 or 20.125", id="unclear commas"),
        pytest.param(
            TABLE.replace("2694.70 ± 1.20", "2,694").replace("91.80 ± 0.05", "1,180"),
            "write its numbers with a decimal point",
            id="commas that nothing decides",
        ),
        pytest.param(
            {"backend": "sglang", "duration": 4.4, "completed": 4, "accept_length": None},
            "SGLang benchmark result has averages only; .*--output-details",
            id="SGLang without details",
        ),
    ],
)
def test_what_has_no_latencies_is_named(tmp_path, content, what):
    with pytest.raises(LogError, match=what):
        logged(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (vllm([[0.02] * 50 + [-0.02] + [0.02] * 49], [101]), "the gap before chunk 52 is -20 ms"),
        (json.dumps(rows([0, 16384], [5, 8])), "only 2 points; a line needs 3"),
    ],
)
def test_a_series_without_a_line_says_what_is_in_the_log(harness, tmp_path, content, why):
    (tmp_path / "log.json").write_text(content)
    ran = harness("fit", "log.json")
    assert f"unusable: {why}" in ran.out
