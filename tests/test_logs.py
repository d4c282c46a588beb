"""Logs of other tools: each is recognised by its content, and what is no token's latency moves no figure."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.base.data import model, model_names
from harness.records.foreign.log import Log, LogError
from harness.records.foreign.read import read_log
from harness.records.foreign.table import Options

CPP = """{0}:        load time =     812{1}11 ms
{0}: prompt eval time =    1149{1}49 ms / 10715 tokens (    0{1}11 ms per token,  9321{1}55 tokens per second)
{0}:        eval time =    2502{1}93 ms /   231 runs   (   10{1}84 ms per token,    92{1}29 tokens per second)
"""
PROGRESS = """2.00.1 I slot print_timing: id  3 | task 0 | n_decoded = 38, tg = 12.61 t/s, tg_3s = 12.61 t/s
2.04.1 I slot print_timing: id  3 | task 0 | n_decoded = 1900, tg = 21.5 t/s, tg_3s = 21.0 t/s
"""
FINAL = """2.10.0 I slot print_timing: id  3 | task 0 |
prompt eval time =    1031.50 ms /   521 tokens (    1.98 ms per token,   505.09 tokens per second)
       eval time =   92051.37 ms /  2000 tokens (   46.03 ms per token,    21.73 tokens per second)
draft acceptance = 0.39850 ( 1331 accepted /  3340 generated)
"""
SLOT = """slot launch_slot_: id  {0} | task {0} | processing task
slot print_timing: id  {0} | task {0} | prompt eval time =   31.50 ms /    21 tokens
slot print_timing: id  {0} | task {0} |        eval time =  700.00 ms /    35 tokens
slot      release: id  {0} | task {0} | stop processing: n_tokens = 55, truncated = 0
"""
OLLAMA = """total duration:       3.043357277s
load duration:        43.357277ms
prompt eval count:    30 token(s)
prompt eval duration: 345ms
prompt eval rate:     86.96 tokens/s
eval count:           61 token(s)
eval duration:        {}
eval rate:            22.99 tokens/s
"""
DONE = {"model": "m", "created_at": "2026-01-05T10:00:03Z", "done": True, "prompt_eval_count": 30}
DONE |= {"prompt_eval_duration": 345_000_000, "eval_count": 61, "eval_duration": 2_653_000_000}
BENCH = {"model_type": "llama 7B Q4_0", "n_threads": 8}
PP = BENCH | {"n_prompt": 512, "n_gen": 0, "n_depth": 0, "avg_ns": 190_000_000, "avg_ts": 2694.7}
TG = BENCH | {"n_prompt": 0, "n_gen": 1024, "n_depth": 0, "avg_ns": 11_154_684_095, "avg_ts": 91.8}
STDERR = "ggml_cuda_init: found 1 ROCm devices:\n  Device 0: AMD, gfx1100 (0x1100), VMM: no\n"
TABLE = """| model         |     size | ngl |    test |            t/s |
| ------------- | -------: | --: | ------: | -------------: |
| llama 7B Q4_0 | 3.56 GiB |  99 |   pp512 | 2694.70 ± 1.20 |
| llama 7B Q4_0 | 3.56 GiB |  99 |  tg1024 |   91.80 ± 0.05 |

build: 4f6a2b1 (6500)
"""
SQL = "CREATE TABLE IF NOT EXISTS llama_bench (\n  avg_ts REAL\n);\n"
LMS = "Tokens/Second: 51.43\n  Time to First Token: 0.111s\n  Prompt Tokens: 24\n  Predicted Tokens: 53\n"
MLX = "Prompt: 30 tokens, 210.5 tokens-per-sec\nGeneration: 64 tokens, 91.2 tokens-per-sec\n"
TRIAL, TPS = "Trial", "prompt_tps=210.5, generation_tps=91.200, peak_memory=4.2"
EVALSCOPE = """| Number of concurrency | {} |
| Average time to first token (s) | 0.2130 |
| Average time per output token (s) | 0.0712 |
"""
BENCHY = {"concurrency": 1, "prompt_size": 2048, "response_size": 32, "is_context_prefill_phase": False}
STATS = {"tokens_per_second": 51.43, "time_to_first_token": 0.111}


def csv(rows: list[dict[str, Any]]) -> str:
    return "\n".join(
        ",".join(f'"{cell}"' for cell in cells) for cells in ([*rows[0]], *(r.values() for r in rows))
    )


def sql(row: dict[str, Any]) -> str:
    values = (repr(str(value)) for value in row.values())
    return f"INSERT INTO llama_bench ({', '.join(row)}) VALUES ({', '.join(values)});\n"


def benchy(depth: int, rate: float, **changes: Any) -> dict[str, Any]:
    means = {"tg_throughput": {"mean": rate}, "e2e_ttft": {"mean": 985.0}}
    return BENCHY | means | {"context_size": depth} | changes


def vllm(gaps: list[list[float]], tokens: list[int], ttft: float = 0.35, **changes: Any) -> str:
    lists = {"input_lens": [50] * len(gaps), "output_lens": tokens, "ttfts": [ttft] * len(gaps), "itls": gaps}
    return json.dumps({"max_concurrency": 1, "request_rate": "inf", **lists, **changes})


def logged(tmp_path: Path, content: str | dict[str, Any] | list[Any]) -> Log:
    path = tmp_path / "log"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_log(path, Options())


@pytest.mark.parametrize(
    ("content", "tool", "tokens", "first_ms", "rate"),
    [
        pytest.param(CPP.format("llama_perf", "."), "llama.cpp", 231, 1149.49, 92.29, id="llama-cli"),
        pytest.param(CPP.format("llama_perf", ","), "llama.cpp", 231, 1149.49, 92.29, id="decimal commas"),
        pytest.param(PROGRESS, "llama.cpp", 1900, None, 21.5, id="progress of llama-server alone"),
        pytest.param(PROGRESS + FINAL, "llama.cpp", 2000, 1031.5, 21.73, id="llama-server"),
        pytest.param(OLLAMA.format("2.653s"), "Ollama", 61, 345, 22.99, id="ollama --verbose"),
        pytest.param(OLLAMA.format("1m2.653s"), "Ollama", 61, 345, 0.974, id="over a minute"),
        pytest.param(DONE, "Ollama", 61, 345, 22.99, id="ollama's response"),
        pytest.param(
            {"stats": STATS, "usage": {"completion_tokens": 53}}, "LM Studio", 53, 111, 51.43, id="v0"
        ),
        pytest.param(
            {"stats": {"total_output_tokens": 9, "tokens_per_second": 5, "time_to_first_token_seconds": 0.2}},
            *("LM Studio", 9, 200, 5),
            id="v1",
        ),
        pytest.param(f"Prediction Stats:\n  {LMS}", "LM Studio", 53, 111, 51.43, id="lms"),
        pytest.param(
            f"==========\n{MLX}Peak memory: 4.2 GB", "mlx_lm", 64, 142.5, 91.2, id="mlx_lm.generate"
        ),
        pytest.param(
            {"prompt_tokens": 30, "prompt_tps": 210.5, "generation_tokens": 61, "generation_tps": 22.99},
            *("mlx_lm", 61, 142.5, 22.99),
            id="mlx_lm's response",
        ),
        pytest.param(EVALSCOPE.format(1), "evalscope", None, 213, 14.04, id="evalscope"),
        pytest.param(
            {"ttft_ms": 91.2, "tpot_ms": 12.4, "completion_tokens": 256},
            "table of requests",
            256,
            91.2,
            80.6,
            id="summary",
        ),
        pytest.param({"benchmarks": [benchy(0, 41.1)]}, "llama-benchy", 32, 985, 41.1, id="llama-benchy"),
        pytest.param(
            {"load_model": {}, "prefill": {"latency": {"unit": "s", "values": [0.02]}}},
            *("optimum-benchmark", None, 20, None),
            id="optimum-benchmark without per_token",
        ),
    ],
)
def test_a_tool_is_recognised_and_gives_the_totals_of_a_request(
    tmp_path, content, tool, tokens, first_ms, rate
):
    log = logged(tmp_path, content)
    (request,) = log.requests.values()
    assert tool in log.format
    assert not log.series
    assert request.new_tokens == tokens
    assert request.first_token_ms == (first_ms and pytest.approx(first_ms, rel=1e-3))
    assert request.tokens_per_s == (rate and pytest.approx(rate, rel=1e-3))
    assert any("no B, W or shape" in note or "for B and W" in note for note in log.notes)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param([PP, TG], id="json"),
        pytest.param(
            f"{STDERR}{json.dumps([PP, TG], indent=2)}\nwarning: done\n", id="json among other lines"
        ),
        pytest.param(f"{STDERR}{json.dumps(PP)}\n{json.dumps(TG)}\n", id="jsonl among other lines"),
        pytest.param(csv([PP, TG]), id="csv"),
        pytest.param(STDERR + csv([PP, TG]), id="csv among other lines"),
        pytest.param(TABLE, id="md"),
        pytest.param(STDERR + TABLE, id="md among other lines"),
        pytest.param(SQL + sql(PP) + sql(TG), id="sql"),
    ],
)
def test_llama_bench_is_a_table_of_its_tests_in_every_format(tmp_path, content):
    log = logged(tmp_path, content)
    assert log.format == "llama-bench result"
    assert not log.series
    prompt, decode = log.requests.values()
    assert [*log.requests] == ["llama 7B Q4_0 pp512", "llama 7B Q4_0 tg1024"]
    assert (prompt.prompt_tokens, prompt.new_tokens, prompt.tokens_per_s) == (512, None, None)
    assert prompt.first_token_ms == pytest.approx(190, rel=1e-3)
    assert (decode.new_tokens, decode.first_token_ms, decode.tokens_per_s) == (1024, None, 91.8)
    assert "not per-token times" in log.notes[-1]


def test_the_table_of_llama_benchy_is_not_taken_for_llama_benchs(tmp_path):
    table = """| model | test | t/s | peak t/s | ttfr (ms) | est_ppt (ms) | e2e_ttft (ms) |
|:------|-----:|----:|---------:|----------:|-------------:|--------------:|
| m | pp2048 @ d4096 | 2100.50 ± 10.10 | | 970.00 ± 3.00 | 968.00 ± 3.00 | 985.00 ± 3.00 |
| m | tg32 @ d4096 | 41.10 ± 0.20 | 42.00 | | | |
"""
    log = logged(tmp_path, table)
    assert log.format == "llama-benchy report"
    prompt, decode = log.requests.values()
    assert (prompt.prompt_tokens, prompt.first_token_ms, prompt.tokens_per_s) == (2048, 985, None)
    assert (decode.new_tokens, decode.tokens_per_s) == (32, 41.1)
    twice = logged(tmp_path, f"{table}\n{table}")  # equal figures of other tests are no copies
    assert len(twice.requests) == 4
    several = table.replace("t/s | peak", "t/s (total) | t/s (req) | peak", 1).replace(
        "|----:|", "|----:|---:|", 1
    )
    several = several.replace("tg32 @ d4096 |", "tg32 @ d4096 (c2) | 70.20 |").replace(
        "10.10 |", "10.10 | 1 |"
    )
    log = logged(tmp_path, several)
    assert log.requests["m tg32 @ d4096 (c2)"].tokens_per_s == 41.1
    assert "concurrently" in log.notes[0]


def test_tests_of_llama_bench_that_differ_in_a_setting_are_named_by_it(tmp_path):
    log = logged(tmp_path, [TG, TG | {"n_threads": 4}, TG | {"n_threads": 4}])
    name = "llama 7B Q4_0 tg1024 n_threads="
    assert [*log.requests] == [f"{name}8", f"{name}4", f"{name}4 #2"]


def test_speeds_of_unknown_tests_and_of_prompt_and_generation_together_are_no_decode_speed(tmp_path):
    with pytest.raises(LogError, match="without n_prompt and n_gen"):
        logged(tmp_path, sql({"build_commit": "4f6a2b1", "avg_ns": 11_154_684_095, "avg_ts": 91.8}))
    log = logged(tmp_path, [TG, TG | {"n_prompt": 512}])
    assert [*log.requests] == ["llama 7B Q4_0 tg1024"]
    assert "pp+tg" in log.notes[0]


ROWS = [(n, 23.7 + n / 249) for n in (64, 576, 1088, 4160)]  # position, ms


def sweep(n: float, ms: float) -> dict[str, float]:
    return {
        "pp": 512,
        "tg": 128,
        "n_kv": n - 64,
        "t_pp": 1.5,
        "speed_pp": 341,
        "t_tg": ms * 0.128,
        "speed_tg": 1,
    }


def markdown(rows: list[dict[str, float]]) -> str:
    lines = [
        "|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row.values())) + " |" for row in rows)])


@pytest.mark.parametrize(
    ("content", "name"),
    [
        pytest.param(markdown([sweep(*row) for row in ROWS]), "sweep", id="llama-sweep-bench md"),
        pytest.param(
            "\n".join(json.dumps(sweep(*row)) for row in ROWS), "sweep", id="llama-sweep-bench jsonl"
        ),
        pytest.param(
            [
                BENCH | {"n_prompt": 0, "n_gen": 128, "n_depth": n - 64, "avg_ns": 1, "avg_ts": 1e3 / ms}
                for n, ms in ROWS
            ],
            "llama 7B Q4_0",
            id="llama-bench -d",
        ),
        pytest.param(
            {"benchmarks": [benchy(n - 64, 1e3 / ms, prompt_size=0, response_size=128) for n, ms in ROWS]},
            "depths",
            id="llama-benchy --depth",
        ),
    ],
)
def test_speeds_at_several_depths_are_points_of_a_series(tmp_path, content, name):
    found = logged(tmp_path, content).series[name]
    assert found.n.tolist() == [n for n, _ in ROWS]
    assert found.ms == pytest.approx([ms for _, ms in ROWS], rel=1e-4)


def test_each_sweep_of_a_file_is_a_series_and_rows_of_several_sequences_are_left_out(tmp_path):
    twice = "\n".join(json.dumps(sweep(*row)) for row in ROWS * 2)
    assert [*logged(tmp_path, twice).series] == ["sweep 1", "sweep 2"]
    batched = [sweep(*ROWS[0]) | {"pl": pl} for pl in (1, 8)]
    log = logged(tmp_path, batched)
    assert (len(log.requests), log.series) == (1, {})
    assert "1 of 2 rows are of several sequences" in log.notes[0]
    with pytest.raises(LogError, match="fewer than 3 depths"):
        logged(tmp_path, markdown([sweep(*row) for row in ROWS[:2]]))


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (CPP.format("INFO [ print_timings]", ".") + CPP.format("llama_print_timings", "."), 1),
        (CPP.format("a", ".") + CPP.format("b", ".").replace("2502.93", "2502.94"), 2),
        (OLLAMA.format("2.653s") * 2, 1),
        (MLX * 2, 1),
        (f"{TRIAL} 1:  {TPS}\n{TRIAL} 2:  {TPS}\n", 2),  # equal rates alone are no proof
        ([DONE, DONE], 1),
    ],
)
def test_a_request_that_is_printed_twice_counts_once(tmp_path, content, count):
    log = logged(tmp_path, content)
    assert len(log.requests) == count
    assert any("printed twice" in note for note in log.notes) == (count == 1)


# --- the chunks of a stream that a client saw

STEPS = [0.02 + 0.0001 * (at % 3) for at in range(99)]  # s
MEAN = np.mean(STEPS) * 1e3


@pytest.mark.parametrize(
    ("gaps", "tokens", "first_ms", "first_n", "note"),
    [
        pytest.param(STEPS, 100, 350, 51, "", id="a gap a token"),
        pytest.param([0.35, *STEPS], 100, 350, 51, "repeats the TTFT", id="first gap repeats the TTFT"),
        pytest.param([1.3, *STEPS], 100, 1650, 51, "belongs to prefill", id="first chunk is empty"),
        pytest.param([8e-6, *STEPS], 101, 350, 52, "tokens came at once", id="two tokens at first"),
        pytest.param([0.0, *STEPS], 101, 350, 52, "tokens came at once", id="first gap is zero"),
        pytest.param([*STEPS, 1e-6], 100, 350, 51, "", id="last chunk is empty"),
        pytest.param(
            [*STEPS[:50], 0.04, 0.0, *STEPS[50:]], 102, 350, 51, "spread over them", id="one gap of zero"
        ),
    ],
)
def test_a_chunk_that_is_no_step_of_decoding_moves_no_latency(
    tmp_path, gaps, tokens, first_ms, first_n, note
):
    log = logged(tmp_path, vllm([gaps], [tokens]))
    (found,) = log.series.values()
    assert found.fault is None
    assert found.n[0] == first_n
    assert found.n[-1] == 50 + tokens
    assert found.ms[0] == pytest.approx(first_ms)
    assert found.ms[1:].mean() == pytest.approx(MEAN, rel=1e-3)
    assert found.ms[1:].max() < 1.02 * MEAN
    assert note in " ".join(log.notes)
    assert bool(note) == bool(log.notes)


@pytest.mark.parametrize(
    ("gaps", "tokens", "fault"),
    [
        ([*STEPS[:40], *[0.0] * 20], 61, "20 of its 60 gaps are zero"),
        ([0.0] * 9, 10, "9 of its 9 gaps are zero"),
        (STEPS, 300, "300 tokens came in 100 chunks"),
        (STEPS, 50, "50 tokens came in 100 chunks, so a chunk is not one token"),
    ],
)
def test_gaps_that_are_not_of_one_token_give_no_series(tmp_path, gaps, tokens, fault):
    (found,) = logged(tmp_path, vllm([gaps], [tokens])).series.values()
    assert fault in found.fault


def test_requests_without_timing_are_counted_with_the_reason(tmp_path):
    log = logged(tmp_path, vllm([[], [], STEPS, []], [2000, 2120, 100, 1]))
    assert [*log.series] == ["request 3"]
    assert log.requests["request 4"].first_token_ms == 350  # one token has no gap, but a TTFT
    assert "2 of 4 requests left out: no timing (no gaps)" in log.notes[0]
    with pytest.raises(LogError, match="no successful request: 2 of 2 requests left out: no timing"):
        logged(tmp_path, vllm([[], []], [2000, 2120]))


def test_a_ttft_of_zero_is_not_known(tmp_path):
    (found,) = logged(tmp_path, vllm([STEPS], [100], ttft=0.0)).series.values()
    assert np.isnan(found.ms[0])


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({}, False),
        ({"max_concurrency": 32}, True),
        ({"max_concurrency": None}, True),  # and a rate of inf: all at once
        ({"max_concurrency": None, "request_rate": 0.1}, False),
        ({"max_concurrency": None, "max_concurrent_requests": 1}, False),
        ({"max_concurrent_requests": 2}, True),
        ({"concurrency": 31.4, "accept_length": None, "duration": 4.4}, True),
        ({"max_concurrency": None, "concurrency": 0.99, "accept_length": None}, False),
        ({"max_concurrency": 4, "start_times": [10.0, 20.0]}, False),
        ({"max_concurrency": None, "request_rate": 5, "start_times": [10.0, 10.1]}, True),
    ],
)
def test_requests_that_ran_at_once_are_said(tmp_path, changes, shared):
    log = logged(tmp_path, vllm([STEPS, STEPS], [100, 100], **changes))
    assert any("concurrently" in note for note in log.notes) == shared


@pytest.mark.parametrize("name", ["accept_length", "spec_decode_acceptance_length"])
def test_a_step_with_a_draft_is_no_token(tmp_path, name):
    log = logged(tmp_path, vllm([STEPS], [100], **{name: 2.9}))
    assert not log.series
    assert log.requests["request 1"].tokens_per_s == pytest.approx(1e3 / MEAN)
    assert "2.9 tokens a step: speculative decoding" in log.notes[0]


def test_the_chunks_of_ollama_are_tokens_where_their_number_is(tmp_path):
    stamps = [f"2026-01-05T10:00:0{at // 20}.{at % 20 * 50:03}123456+02:00" for at in range(60)]
    chunks = [{"model": "m", "created_at": at, "done": False, "response": "x"} for at in stamps]
    (found,) = logged(tmp_path, "\n".join(map(json.dumps, [*chunks, DONE]))).series.values()
    assert found.ms.tolist() == [345, *[pytest.approx(50)] * 59]
    assert (found.n[0], found.n[-1]) == (31, 90)
    log = logged(tmp_path, "\n".join(map(json.dumps, [*chunks[:20], DONE])))
    assert not log.series
    assert log.requests["request 1"].new_tokens == 61
    assert "1 request: totals only: the chunks are not the tokens" in log.notes[0]


# --- llama.cpp


def timings(n: int, ms: float, prompt_n: int = 21, prompt_ms: float = 31.5, **more: Any) -> dict[str, Any]:
    return {"predicted_n": n, "predicted_ms": ms, "prompt_n": prompt_n, "prompt_ms": prompt_ms, **more}


@pytest.mark.parametrize(
    "content",
    [
        {"timings": timings(35, 700, prompt_n=0, prompt_ms=0.0)},
        "prompt eval time = 0.00 ms / 0 tokens\n       eval time = 700.00 ms / 35 tokens",
        "prompt eval time = 0.00 ms / 1 tokens\n       eval time = 700.00 ms / 35 runs",
        DONE | {"prompt_eval_count": 0, "prompt_eval_duration": 100_000},
        {key: value for key, value in DONE.items() if not key.startswith("prompt")},
        {"prompt_tokens": 0, "prompt_tps": 0.0, "generation_tokens": 61, "generation_tps": 22.99},
    ],
)
def test_a_prompt_of_which_nothing_was_evaluated_has_no_ttft(tmp_path, content):
    (request,) = logged(tmp_path, content).requests.values()
    assert request.first_token_ms is None
    assert request.tokens_per_s


def test_streams_of_two_slots_are_told_apart(tmp_path):
    chunks = [
        {"id": f"chatcmpl-{name}", "timings": timings(n, 20.0 * pace * n, prompt_ms=31.5)}
        for n in range(1, 40)
        for name, pace in (("a", 1), ("b", 2))
    ]
    log = logged(tmp_path, "\n".join(f"data: {json.dumps(chunk)}\n" for chunk in chunks))
    assert [set(each.ms[1:].round(6)) for each in log.series.values()] == [{20.0}, {40.0}]
    assert any("concurrently" in note for note in log.notes)


def test_streams_and_responses_of_one_file_have_names_of_their_own(tmp_path):
    chunks = [{"id": "a", "timings": timings(n, 20 * n)} for n in range(1, 5)]
    log = logged(tmp_path, "\n".join(map(json.dumps, [*chunks, {"id": "b", "timings": timings(35, 700)}])))
    assert ([*log.series], [*log.requests]) == (["request 1"], ["request 2"])


def test_slots_of_a_log_that_overlap_are_said_and_a_restarted_server_is_not(tmp_path):
    first, second = (SLOT.format(slot).splitlines() for slot in (0, 1))
    mixed = [line for both in zip(first, second, strict=True) for line in both]
    mixed = "\n".join(mixed).replace("700.00", "701.00", 1)
    log = logged(tmp_path, mixed)
    assert [request.tokens_per_s for request in log.requests.values()] == pytest.approx([35 / 0.701, 50])
    assert any("concurrently" in note for note in log.notes)
    in_turn = SLOT.format(0) + SLOT.format(1)
    restarted = in_turn + in_turn.replace("700", "720")
    assert not any("concurrently" in note for note in logged(tmp_path, restarted).notes)


@pytest.mark.parametrize(
    "content",
    [
        PROGRESS + FINAL,
        {"timings": timings(35, 700, draft_n=3340, draft_n_accepted=1331)},
        "\n".join(f"data: {json.dumps({'timings': timings(n, 20 * n, draft_n=n)})}" for n in range(1, 9)),
    ],
)
def test_a_draft_of_llama_cpp_is_said_and_there_is_no_series(tmp_path, content):
    log = logged(tmp_path, content)
    assert not log.series
    assert len(log.requests) == 1
    assert any("speculative decoding" in note for note in log.notes)


# --- optimum-benchmark


def test_copies_of_earlier_runs_in_optimum_benchmark_are_left_out(tmp_path):
    runs = [[25.5 + run / 10 + at / 100 for at in range(5)] for run in range(3)]
    grown = [ms for end in range(1, 4) for run in runs[:end] for ms in run]
    parts = {"prefill": [26.6] * 3, "decode": [129.0] * 3, "per_token": grown}
    report = {name: {"latency": {"unit": "ms", "values": values}} for name, values in parts.items()}
    config = {"scenario": {"input_shapes": {"sequence_length": 16}}}
    log = logged(tmp_path, {"config": config, "report": {"load_model": {}, **report}})
    assert [each.ms.tolist() for each in log.series.values()] == [[26.6, *run] for run in runs]
    assert log.series["run 1"].n.tolist() == [17, 18, 19, 20, 21, 22]
    assert "30 values, 15 measured" in log.notes[0]
    parts["per_token"] = [ms for run in runs for ms in run]
    report["per_token"]["latency"]["values"] = parts["per_token"]
    log = logged(tmp_path, {"load_model": {}, **report})
    assert [each.ms[1:].tolist() for each in log.series.values()] == runs
    assert not log.notes


# --- tables of requests

REQUESTS = Path(__file__).parent / "tables" / "requests.csv"
TIMED = [(512, 128, 0.21, 4.31), (512, 131, 0.22, 4.44), (512, 127, 0.21, 4.29), (512, 128, 0.21, 4.30)]


def table_of(header: str, cells: str, separator: str = ",") -> str:
    """A table of TIMED: `cells` of p, n, f and l, the tokens of prompt and answer, TTFT and latency in s."""
    rows = [
        separator.join(str(eval(cell, {}, dict(zip("pnfl", row, strict=True)))) for cell in cells.split(";"))
        for row in TIMED
    ]
    return "\n".join([header.replace(",", separator), *rows]) + "\n"


OF_USAGE = "\n".join(
    json.dumps({"usage": {"prompt_tokens": p, "completion_tokens": n}, "ttft": f, "latency": lat})
    for p, n, f, lat in TIMED
)
OF_LIST = json.dumps(
    {"model": "m", "requests": [{"output_tokens": n, "ttft_s": f, "e2e_s": lat} for _, n, f, lat in TIMED]}
)
OF_COLUMNS = json.dumps({"output_lens": [128, 127], "ttfts": [0.21, 0.21], "latencies": [4.31, 4.29]})


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(REQUESTS.read_text(), id="seconds without a name"),
        pytest.param(table_of("id,completion_tokens,ttft_ms,e2e_latency_ms", "1;n;f*1e3;l*1e3"), id="ms"),
        pytest.param(
            table_of("promptTokens,completionTokens,timeToFirstTokenMs,totalTimeMs", "p;n;f*1e3;l*1e3", "\t"),
            id="tabs and camel case",
        ),
        pytest.param(table_of("output_tokens,ttft_us,duration_us", "n;f*1e6;l*1e6"), id="us"),
        pytest.param(
            table_of("request_id,num_generated_tokens,ttft_ms,itl_ms", "p;n;f*1e3;(l-f)/(n-1)*1e3"), id="ITL"
        ),
        pytest.param(table_of("request_id,tokens,ttft,latency", "l;n;f;l"), id="tokens"),
        pytest.param(OF_USAGE, id="JSON lines with usage"),
        pytest.param(OF_LIST, id="a list in a document"),
        pytest.param(OF_COLUMNS, id="a list of each column"),
    ],
)
def test_a_table_of_requests_gives_their_totals_and_no_latency_of_tokens(tmp_path, content):
    log = logged(tmp_path, content)
    assert (log.format, log.series) == ("table of requests", {})
    first = log.requests["request 1"]
    assert (first.new_tokens, first.tokens_per_s) == (128, pytest.approx(127 / 4.1))
    assert first.first_token_ms == pytest.approx(210)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            table_of("output_tokens,latency_ms", "n;l"),
            "In ms its requests have 2.97e+04 tokens/s; give --unit s",
        ),
        (
            table_of("output_tokens,ttft,latency_ms", "n;f;l*1e3"),
            "ttft is far shorter than a token: name the unit",
        ),
        (table_of("output_tokens,ttft_s,latency_s", "n;l;f*10"), "ttft_s is not shorter than latency_s"),
        (table_of("prompt_tokens,latency_s", "p;l"), "is a row of it a request or a token?"),
        (table_of("request_id,max_tokens,latency_s", "l;n;l"), "its rows are requests, and tok/s is not"),
        (table_of("request_id,latency_s", "l;l"), "its rows are requests, and tok/s is not known"),
        (table_of("tokens,latency_s", "n;l"), "is a row of it a request or a token?"),
        (
            REQUESTS.with_name("vllm-latency.json").read_text(),
            "the times of 10 whole runs",
        ),
        (
            json.dumps({"elapsed_time": 9.1, "num_requests": 100, "tokens_per_second": 2000.0}),
            "one time of all",
        ),
    ],
)
def test_what_gives_no_speed_of_decode_is_refused_with_the_reason(tmp_path, content, said):
    with pytest.raises(LogError, match=re.escape(said)):
        logged(tmp_path, content)


def test_without_ttft_the_speed_of_a_request_is_said_to_include_its_prompt(tmp_path):
    log = logged(tmp_path, table_of("output_tokens,latency_s", "n;l"))
    assert log.requests["request 1"].tokens_per_s == pytest.approx(128 / 4.31)
    assert any("it includes the time of the prompt" in note for note in log.notes)


def test_rows_that_share_a_request_are_its_tokens(tmp_path):
    rows = [f"{name},350,{20 + n % 3}" for name in "ab" for n in range(40)]
    log = logged(tmp_path, "\n".join(["request_id,ttft_ms,itl_ms", *rows]))
    assert (log.format, len(log.series["all"].ms)) == ("table", 80)


@pytest.mark.parametrize("header", ["n,completion_tokens,latency_ms", "token,completion_tokens,latency_ms"])
def test_a_table_of_tokens_that_are_counted_stays_one(tmp_path, header):
    rows = [f"{n},{n},{20 + n % 3}" for n in range(1, 40)]
    assert logged(tmp_path, "\n".join([header, *rows])).series["all"].ms[1] == 22


@pytest.mark.parametrize("group", ["variant", "request_id"])
def test_requests_have_lengths_of_their_own_and_stop_early_only_as_variants(harness, tmp_path, group):
    rows = [f"{name},{n},{20 + n % 3}" for name, count in (("a", 50), ("b", 90)) for n in range(count)]
    (tmp_path / "log.csv").write_text("\n".join([f"{group},n,latency_ms", *rows]))
    found = harness("fit", "log.csv", "--group-column", group, "--json").json
    codes = {flag["code"] for row in found for flag in row["flags"]}
    assert ("early_stop" in codes) == (group == "variant")


def test_requests_of_one_log_that_ended_at_their_own_limits_did_not_stop_early(harness, tmp_path):
    rows = [f"{name},{n},{20 + n % 3},length" for name, count in (("a", 50), ("b", 90)) for n in range(count)]
    (tmp_path / "log.csv").write_text("\n".join(["variant,n,latency_ms,finish_reason", *rows]))
    (tmp_path / "vllm.json").write_text(vllm([[0.02] * 40, [0.02] * 60], [41, 61]))
    for log in ("log.csv", "vllm.json"):
        found = harness("fit", log, "--json").json
        assert "early_stop" not in {flag["code"] for row in found for flag in row["flags"]}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param([PP | {"stddev_ts": 1.2}, TG | {"stddev_ts": 62.42}], id="json"),
        pytest.param(TABLE.replace("91.80 ± 0.05", "91.80 ± 62.42"), id="md"),
    ],
)
def test_a_mean_is_shown_with_the_spread_of_its_repetitions(harness, tmp_path, content):
    (tmp_path / "bench").write_text(content if isinstance(content, str) else json.dumps(content))
    prompt, decode = harness("fit", "bench", "--json").json
    assert (prompt["spread"], decode["spread"]) == (
        pytest.approx(4.45e-4, rel=0.01),
        pytest.approx(0.68, rel=0.01),
    )
    assert (prompt["flags"], [flag["code"] for flag in decode["flags"]]) == ([], ["repetitions_differ"])
    assert "repetitions differ by 68%" in harness("fit", "bench").out
    assert harness("fit", "bench", "--fail-on", "repetitions_differ").code == 3


# --- the command


def test_totals_are_a_table_of_their_own(harness, tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps([PP, TG]))
    out = harness("fit", "bench.json").out.splitlines()
    assert " ".join(out[0].split()) == "variant prompt first ms prefill tok/s tokens tok/s ms/token"
    assert out[1].split()[-6:] == ["512", "190", "2,695", "-", "-", "-"]
    assert out[2].split()[-3:] == ["1,024", "91.8", "10.9"]
    assert harness("report", "bench.json").code == 0


def test_fit_knows_mixtures_and_a_config_json(harness, tmp_path):
    (tmp_path / "log.csv").write_text("n,latency_ms\n" + "\n".join(f"{n},20" for n in range(1, 100)))
    name = next(each for each in model_names() if each.startswith("gpt-oss-20b"))
    (tmp_path / "config.json").write_text(model(name).read_text())
    bounds = ("--machine", "rtx-4090", "--bpw", "all=4.25", "--json")
    found = [harness("fit", "log.csv", "--model", each, *bounds).json for each in (name, "config.json")]
    assert found[0][0]["B_theory_ms"] == pytest.approx(1.9, rel=0.15)  # 3.6 B active parameters
    assert found[0] == found[1]
    ran = harness("fit", "log.csv", "--model", "none.json", *bounds)
    assert (ran.code, ran.err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--bpw", "all=16"], 3, "faster_than_limit: 20.00 ms, but reading the weights takes"),
        (["--bpw", "all=4"], 0, ""),
        ([], 2, '--fail-on faster_than_limit needs --bpw "all=BITS"'),
    ],
)
def test_fail_on_ends_with_3_where_a_series_has_the_flag(harness, tmp_path, options, code, said):
    (tmp_path / "log.csv").write_text("n,latency_ms\n" + "\n".join(f"{n},20" for n in range(1, 100)))
    bounds = ("--model", "qwen1.5-14b", "--machine", "rtx-4090", "--fail-on", "faster_than_limit")
    ran = harness("fit", "log.csv", *bounds, *options)
    assert ran.code == code
    assert said in ran.out + ran.err


def test_fail_on_takes_what_is_said_of_the_line_of_a_log(harness, tmp_path):
    (tmp_path / "log.csv").write_text("n,latency_ms\n" + "\n".join(f"{n},20" for n in range(1, 13)))
    assert harness("fit", "log.csv", "--fail-on", "B_not_identifiable").code == 3
    assert harness("fit", "log.csv", "--fail-on", "bends").code == 0


def test_fail_on_judges_totals_too_and_is_refused_where_it_could_not_fail(harness, tmp_path):
    (tmp_path / "log.json").write_text(json.dumps(DONE | {"eval_count": 610}))
    bounds = ("--model", "qwen1.5-14b", "--machine", "rtx-4090", "--fail-on", "faster_than_limit")
    ran = harness("fit", "log.json", *bounds, "--bpw", "request 1=8")
    assert ran.code == 3
    assert "4.35 ms a token, but reading the weights takes 13." in " ".join(ran.out.split())
    ran = harness("fit", "log.json", "--fail-on", "faster_than_limit")
    assert (ran.code, ran.err) == (2, "harness: --fail-on faster_than_limit needs --model and --machine\n")
    assert harness("fit", "log.json", "--fail-on", "slower").code == 2
