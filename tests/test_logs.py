"""Logs of other tools: each is recognised by its content, and what is no token's latency moves no figure."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.base.data import model, model_names
from harness.records.foreign.log import Log, LogError, OptionError
from harness.records.foreign.read import read_log
from harness.records.foreign.table import Options

LOGS = Path(__file__).parent / "logs"
# Of each file the tool, its series (name, TTFT, median ms of decode, positions), and its requests (name,
# tokens, TTFT, tok/s, tokens of the prompt).
TG, PP = ("llama 7B Q4_0 tg1024", 1024, None, 91.8, None), ("llama 7B Q4_0 pp512", None, 190.0, None, 512)
SWEEP = ("sweep", 23.95, 28.06, 64, 4160)
EXPECTED: dict[str, tuple[str, list[Any], list[Any]]] = {
    "aiperf.jsonl": (
        "AIPerf",
        [("request 1", 61.5, 5.2, 551, 559)],
        [("request 3", 9, 64, 200, 550)],
    ),
    "llama-bench.csv": ("llama-bench", [], [PP, TG]),
    "llama-bench.json": ("llama-bench", [], [PP, TG]),
    "llama-benchy.json": ("llama-benchy", [], [("pp2048 tg32", 32, 985, 41.1, 2048)]),
    "llama-cli.txt": ("llama.cpp", [], [("request 1", 231, 1149.49, 92.29, 10715)]),
    "llama-response.json": ("llama.cpp", [], [("request 1", 35, 31.5, 50, 21)]),
    "llama-server-progress.txt": ("llama.cpp", [], [("request 1", 2000, 1031.5, 21.73, 521)]),
    "llama-server.txt": (
        "llama.cpp",
        [],
        [("request 1", 35, 31.5, 50, 21), ("request 2", 10, 63, 40, 42)],
    ),
    "llama-stream.txt": ("llama.cpp", [("request 1", 31.5, 20.1, 26, 34)], []),
    "llama-sweep-bench.jsonl": ("llama-sweep-bench", [SWEEP], []),
    "llama-sweep-bench.md.txt": ("llama-sweep-bench", [SWEEP], []),
    "ollama-response.json": ("Ollama", [], [("request 1", 61, 345, 22.99, 30)]),
    "ollama-verbose.txt": ("Ollama", [], [("request 1", 61, 345, 22.99, 30)]),
    "ollama.jsonl": ("Ollama", [("request 1", 345, 43.5, 31, 39)], []),
    "sglang.jsonl": ("SGLang", [("request 1", 350, 20.1, 51, 60)], []),
    "vllm.json": (
        "vLLM",
        [("request 1", 61, 12.035, 26, 34), ("request 3", 93, 13.035, 51, 59)],
        [],
    ),
}


def logged(tmp_path: Path, content: str | dict[str, Any] | list[Any], **options: str) -> Log:
    path = tmp_path / "log"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_log(path, Options(**options))


def lines(rows: list[Any]) -> str:
    return "\n".join(map(json.dumps, rows))


TOTALS = "has totals of requests alone"
REFUSED = {
    "evalscope.txt": TOTALS,
    "guidellm.json": TOTALS,
    "llama-batched-bench.txt": "llama-sweep-bench gives points by depth",
    "llama-cli-rates.txt": "--perf prints the times",
    "lm-studio.json": TOTALS,
    "lms.txt": TOTALS,
    "mlx_lm.json": "stream_generate()",
    "mlx_lm.txt": "stream_generate()",
    "optimum-benchmark.json": "a CSV with a column latency_s",
    "requests.csv": "a row of it is a request, as its column prompt_tokens shows",
}


def test_every_format_has_a_file():
    assert sorted(EXPECTED | REFUSED) == sorted(path.name for path in LOGS.iterdir() if path.suffix != ".md")


@pytest.mark.parametrize(("name", "sentence"), REFUSED.items())
def test_a_log_of_totals_alone_is_refused_with_what_to_do(name, sentence):
    with pytest.raises(LogError, match=re.escape(sentence)):
        read_log(LOGS / name, Options())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_log_has_the_figures_of_its_tool(name):
    tool, expected_series, expected_requests = EXPECTED[name]
    log = read_log(LOGS / name, Options())
    assert tool in log.format
    series = [
        (name, one.ms[0], np.median(one.ms[1:]), one.n[0], one.n[-1]) for name, one in log.series.items()
    ]
    assert series == [(row[0], *map(near, row[1:])) for row in expected_series]
    requests = [
        (name, one.new_tokens, one.first_token_ms, one.tokens_per_s, one.prompt_tokens)
        for name, one in log.requests.items()
    ]
    assert requests == [(row[0], *map(near, row[1:])) for row in expected_requests]
    assert not requests or any(
        re.search("not per-token times|B, W or shape|B and W", note) for note in log.notes
    )


def near(value: float | None) -> Any:
    return value if value is None else pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_log_of_another_tool_takes_no_columns_and_no_unit(name):
    with pytest.raises(OptionError, match="defines names and units itself"):
        read_log(LOGS / name, Options(unit="s"))


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.endswith(".txt")])
def test_a_decimal_comma_is_refused_in_a_sentence_and_never_read_as_another_number(tmp_path, name):
    text = re.sub(r"(\d)\.(\d)", r"\1,\2", (LOGS / name).read_text())
    if name == "llama-stream.txt":  # JSON, which has no such number
        return
    with pytest.raises(LogError, match=r"[\d,]+m?s? has a comma, .*: run the tool with LC_ALL=C"):
        logged(tmp_path, text)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("| model | size | test | t/s |\n|---|--:|--:|--:|\n| m | 3 | tg128 | 91.8 ± 0.1 |\n", "use -o json"),
        ("INSERT INTO test (build_commit, avg_ns, avg_ts) VALUES ('4f6', '11', '91.8');\n", "use -o json"),
        ("| model | test | t/s | ttfr (ms) |\n|:--|--:|--:|--:|\n| m | tg32 | 41.1 | |\n", "its JSON report"),
        ("============ Serving Benchmark Result ============\nMean TPOT (ms):    7.91\n", "--save-detailed"),
        ({"backend": "sglang", "duration": 4.4, "accept_length": None}, "run `sglang.bench_serving --out"),
        ({"completed": 4, "request_throughput": 1.0}, "averages only; run `vllm bench serve"),
        ({"avg_latency": 2.62, "latencies": [2.62, 2.63]}, "the times of whole runs, and neither"),
        ({"elapsed_time": 9.1, "num_requests": 100, "tokens_per_second": 2e3}, "has one time of all"),
        ({"request_latency": {"unit": "ms", "avg": 3.0}}, "use profile_export.jsonl"),
        ({"latency_mode": "api", "benchmarks": []}, "the llama-benchy report has no complete request"),
        ({"n_prompt": 512, "n_gen": 128, "avg_ns": 1, "avg_ts": 9.0}, "prompt and generation together"),
        ({"avg_ns": 1, "avg_ts": 91.8}, "without n_prompt and n_gen"),
        ("llama_perf: prompt eval time =    1149.49 ms / 10715 tokens\n", "log has no complete request"),
        ("GGUF\x03", "it is a model, not a log; `harness theory FILE`"),
        ("promptTokens\tcompletionTokens\tlatency_ms\n512\t128\t4310\n", "as its column promptTokens"),
        ("request_id;tokens;ttft (ms);latency_s\n1;128;210;4.31\n", "as its column ttft (ms) shows"),
        ({"output_lens": [128], "latency_s": [4.31]}, "as its column output_lens shows"),
    ],
)  # fmt: skip
def test_what_has_no_figures_of_one_user_is_refused_with_what_to_do(tmp_path, content, sentence):
    with pytest.raises(LogError, match=re.escape(sentence)):
        logged(tmp_path, content)


def test_output_of_a_second_tool_is_named(tmp_path):
    both = "".join((LOGS / name).read_text() for name in ("llama-server-progress.txt", "ollama-verbose.txt"))
    assert "another tool, which is not read: Ollama result" in logged(tmp_path, both).notes[-1]


# --- units


@pytest.mark.parametrize(
    ("header", "row", "option"),
    [
        ("n,latency_ms", "{n},0.02", "ms"),
        ("n,latency_s", "{n},2000", "s"),
    ],
)
def test_a_unit_that_makes_tokens_implausible_is_asked_for_and_the_users_word_counts(
    tmp_path, header, row, option
):
    content = "\n".join([header, *(row.format(n=n * n) for n in range(1, 9))])
    with pytest.raises(OptionError, match=r"which unit is latency_\w+ in\?.* tokens/s; give --unit"):
        logged(tmp_path, content)
    assert logged(tmp_path, content, unit=option)


def test_a_table_of_tokens_may_have_columns_of_their_requests(tmp_path):
    rows = [f"{n},{n},{20 + n % 3}" for n in range(1, 40)]
    assert logged(tmp_path, "\n".join(["n,completion_tokens,latency_ms", *rows])).series["all"].ms[1] == 22
    asked = logged(tmp_path, "\n".join(["ttft_ms,x,itl_ms", *rows]), latency="itl_ms")
    assert len(asked.series["all"].ms) == 39


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param("32768,7.9365\n1,4.5372\n16384,6.2228\n4096,4.9826", id="not sorted"),
        pytest.param("1,4.5\n1,4.5744\n4096,4.9826\n16384,6.2228\n32768,7.9365", id="repeats"),
    ],
)
def test_the_rows_of_a_sweep_are_read_in_any_order(tmp_path, cells):
    (series,) = logged(tmp_path, f"n,latency_ms\n{cells}").series.values()
    assert series.fault is None
    assert series.n.tolist() == [1, 4096, 16384, 32768]
    assert series.ms == pytest.approx([4.5372, 4.9826, 6.2228, 7.9365])


@pytest.mark.parametrize(
    ("n", "first", "expected"),
    [(100_000, 30.0, None), (51, 29.0, None), (100_000, 9000.0, 9000.0), (1, 30.0, 30.0)],
    ids=["deep, as fast as a step", "behind a short prompt", "deep, a prompt's time", "at the start"],
)
def test_the_first_row_behind_a_prompt_is_a_ttft_only_if_longer_than_a_step(tmp_path, n, first, expected):
    ms = [first, *(30 + at % 3 / 10 for at in range(39))]
    (series,) = logged(
        tmp_path, [{"n": n + at, "latency_ms": value} for at, value in enumerate(ms)]
    ).series.values()
    assert series.ms[0] == pytest.approx(np.nan if expected is None else expected, nan_ok=True)


# --- impossible values, requests printed twice, prompts from the cache

OLLAMA = json.loads((LOGS / "ollama-response.json").read_text())
BENCH = {"model_type": "m", "n_prompt": 0, "n_gen": 128, "avg_ns": 1, "avg_ts": 91.8}


def timings(n: int, ms: float, prompt_n: int = 21, prompt_ms: float = 31.5, **more: Any) -> dict[str, Any]:
    return {"predicted_n": n, "predicted_ms": ms, "prompt_n": prompt_n, "prompt_ms": prompt_ms, **more}


def vllm(gaps: list[list[float]], tokens: list[int], ttft: float = 0.35, **changes: Any) -> str:
    lists = {"input_lens": [50] * len(gaps), "output_lens": tokens, "ttfts": [ttft] * len(gaps), "itls": gaps}
    return json.dumps({"max_concurrency": 1, "request_rate": "inf", **lists, **changes})


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (OLLAMA | {"eval_count": 61.5}, "tokens: 61.5"),
        (OLLAMA | {"eval_count": 1e30}, r"tokens: 1e\+30"),
        (OLLAMA | {"eval_duration": -5}, "decode time: -5e-06 ms"),
        (OLLAMA | {"eval_duration": 2.653}, "tokens/s: 2299"),
        (OLLAMA | {"prompt_eval_count": -30}, "prompt tokens: -30"),
        (OLLAMA | {"prompt_eval_duration": float("inf")}, "first token: inf ms"),
        (OLLAMA | {"prompt_eval_duration": float("nan")}, "first token: nan ms"),
        (BENCH | {"avg_ts": 0}, "tokens/s: 0"),
        (BENCH | {"n_gen": -1024}, "tokens: -1024"),
        ("eval time = -2502.93 ms / 231 runs", "decode time: -2502.93 ms"),
        (vllm([[0.02] * 9], [10], ttft=-0.9), "first token: -900 ms"),
        (vllm([[0.02] * 9], [10], input_lens=[-8000]), "prompt tokens: -8000"),
    ],
)
def test_a_request_with_an_impossible_total_is_left_out_by_name(tmp_path, content, fault):
    with pytest.raises(LogError, match=f"1 of 1 requests left out, with impossible values: .*{fault}"):
        logged(tmp_path, content)


def test_the_other_requests_of_a_log_with_an_impossible_total_remain(tmp_path):
    later = OLLAMA | {"eval_duration": 3_000_000_000}
    log = logged(tmp_path, [OLLAMA, later | {"eval_count": -1}, later])
    assert [*log.requests] == ["request 1", "request 3"]
    assert log.notes[0] == "1 of 3 requests left out, with impossible values: request 2: tokens: -1"


@pytest.mark.parametrize("name", ["llama-cli.txt", "ollama-verbose.txt"])
def test_a_request_that_is_printed_twice_counts_once_and_two_that_differ_do_not(tmp_path, name):
    text = (LOGS / name).read_text()
    log = logged(tmp_path, text + text)
    assert len(log.requests) == 1
    assert any("printed twice" in note for note in log.notes)
    other = re.sub("2502.93|2.653", "17.5", text)
    assert len(logged(tmp_path, text + other).requests) == 2
    progress = "slot print_timing: id  {} | task {} | n_decoded = 500, tg = 12.8 t/s\n"
    rates = "".join(progress.format(slot, slot) for slot in (0, 1))
    assert len(logged(tmp_path, rates).requests) == 2  # equal rates alone are no proof


@pytest.mark.parametrize(
    "content",
    [
        {"timings": timings(35, 700, prompt_n=0, prompt_ms=0.0)},
        "prompt eval time = 0.00 ms / 0 tokens\n       eval time = 700.00 ms / 35 tokens",
        "prompt eval time = 0.00 ms / 1 tokens\n       eval time = 700.00 ms / 35 runs",
        OLLAMA | {"prompt_eval_count": 0, "prompt_eval_duration": 100_000},
        {key: value for key, value in OLLAMA.items() if key != "prompt_eval_count"},
        OLLAMA | {"prompt_eval_duration": 0},
    ],
)
def test_a_prompt_of_which_nothing_was_evaluated_and_a_time_of_zero_are_no_ttft(tmp_path, content):
    (request,) = logged(tmp_path, content).requests.values()
    assert request.first_token_ms is None
    assert request.tokens_per_s


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
        pytest.param([*STEPS[:50], 0.04, 0.0, *STEPS[50:]], 102, 350, 51, "spread over", id="a gap of zero"),
    ],
)
def test_a_chunk_that_is_no_step_of_decoding_moves_no_latency(
    tmp_path, gaps, tokens, first_ms, first_n, note
):
    log = logged(tmp_path, vllm([gaps], [tokens]))
    (series,) = log.series.values()
    assert series.fault is None
    assert (series.n[0], series.n[-1]) == (first_n, 50 + tokens)
    assert series.ms[0] == pytest.approx(first_ms)
    assert series.ms[1:].mean() == pytest.approx(MEAN, rel=1e-3)
    assert series.ms[1:].max() < 1.02 * MEAN
    assert note in " ".join(log.notes)
    assert bool(note) == bool(log.notes)


@pytest.mark.parametrize(
    ("gaps", "tokens", "fault"),
    [
        ([*STEPS[:40], *[0.0] * 20], 61, "20 of its 60 gaps are zero"),
        ([0.0] * 9, 10, "9 of its 9 gaps are zero"),
        (STEPS, 300, "300 tokens came in 100 chunks"),
        (STEPS, 50, "50 tokens came in 100 chunks, so a chunk is not one token"),
        ([*STEPS[:50], -0.02, *STEPS[50:]], 101, "the gap before chunk 52 is -20 ms"),
    ],
)
def test_gaps_that_are_not_of_one_token_give_no_series(tmp_path, gaps, tokens, fault):
    (series,) = logged(tmp_path, vllm([gaps], [tokens])).series.values()
    assert fault in series.fault


def test_requests_without_timing_and_failed_ones_are_counted_with_the_reason(tmp_path):
    log = logged(
        tmp_path, vllm([[], [], STEPS, [], STEPS], [2000, 2120, 100, 1, 100], errors=["", "", "", "", "no"])
    )
    assert [*log.series] == ["request 3"]
    assert log.requests["request 4"].first_token_ms == 350  # one token has no gap, but a TTFT
    assert log.notes[0].startswith("2 requests of 5: left out, with no timing (no gaps)")
    assert log.notes[1] == "1 request of 5: failed or cancelled, and left out"
    with pytest.raises(LogError, match="no complete request; 2 requests of 2: left out, with no timing"):
        logged(tmp_path, vllm([[], []], [2000, 2120]))
    (series,) = logged(tmp_path, vllm([STEPS], [100], ttft=0.0)).series.values()
    assert np.isnan(series.ms[0])
    appended = f"{vllm([STEPS], [100])}\n{vllm([STEPS], [100])}"
    assert [*logged(tmp_path, appended).series] == ["run 1 request 1", "run 2 request 1"]


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


@pytest.mark.parametrize(
    "content",
    [
        vllm([STEPS], [100], accept_length=2.9),
        vllm([STEPS], [100], spec_decode_acceptance_length=2.9),
        (LOGS / "llama-server-progress.txt").read_text(),
        {"timings": timings(35, 700, draft_n=3340, draft_n_accepted=1331)},
        "\n".join(f"data: {json.dumps({'timings': timings(n, 20 * n, draft_n=n)})}" for n in range(1, 9)),
    ],
)
def test_a_step_with_a_draft_is_no_token(tmp_path, content):
    log = logged(tmp_path, content)
    assert (len(log.requests), log.series) == (1, {})
    assert any("speculative decoding" in note for note in log.notes)


def test_the_chunks_of_ollama_are_tokens_where_their_number_is(tmp_path):
    stamps = [f"2026-01-05T10:00:0{at // 20}.{at % 20 * 50:03}123456+02:00" for at in range(60)]
    chunks = [{"model": "m", "created_at": stamp, "done": False, "response": "x"} for stamp in stamps]
    (series,) = logged(tmp_path, lines([*chunks, OLLAMA])).series.values()
    assert series.ms.tolist() == [345, *[pytest.approx(50)] * 59]
    assert (series.n[0], series.n[-1]) == (31, 90)
    log = logged(tmp_path, lines([*chunks[:20], OLLAMA]))
    assert not log.series
    assert log.requests["request 1"].new_tokens == 61
    assert "1 request: totals only: the chunks are not the tokens" in log.notes[0]


@pytest.mark.parametrize(
    "chunks",
    [
        [
            {"model": name, "created_at": f"2026-01-05T10:00:{at * ms / 1e3:09.6f}Z", "done": False}
            for at in range(40)
            for name, ms in (("a", 20), ("b", 40))
        ]
        + [OLLAMA | {"model": name, "eval_count": 40} for name in "ab"],
        [
            {"id": name, "timings": timings(n, ms * n)}
            for n in range(1, 40)
            for name, ms in (("a", 20.0), ("b", 40.0))
        ],
    ],
    ids=["Ollama", "llama-server"],
)
def test_interleaved_streams_are_a_series_each(tmp_path, chunks):
    log = logged(tmp_path, lines(chunks))
    assert [np.median(series.ms[1:]) for series in log.series.values()] == pytest.approx([20, 40])
    assert any("concurrently" in note for note in log.notes)


def test_streams_and_responses_of_one_file_have_names_of_their_own(tmp_path):
    chunks = [{"id": "a", "timings": timings(n, 20 * n)} for n in range(1, 5)]
    log = logged(tmp_path, lines([*chunks, {"id": "b", "timings": timings(35, 700)}]))
    assert ([*log.series], [*log.requests]) == (["request 1"], ["request 2"])


def test_a_stream_that_lacks_a_chunk_names_how_many_tokens_came_at_once(tmp_path):
    events = (LOGS / "llama-stream.txt").read_text().split("\n\n")
    (series,) = logged(tmp_path, "\n\n".join(events[:3] + events[4:])).series.values()
    assert series.fault == "2 tokens came in one chunk after token 3"


SLOT = """slot launch_slot_: id  {0} | task {0} | processing task
slot print_timing: id  {0} | task {0} | prompt eval time =   31.50 ms /    21 tokens
slot print_timing: id  {0} | task {0} |        eval time =  700.00 ms /    35 tokens
slot      release: id  {0} | task {0} | stop processing: n_tokens = 55, truncated = 0
"""


def test_slots_of_a_log_that_overlap_are_said_and_a_restarted_server_is_not(tmp_path):
    first, second = (SLOT.format(slot).splitlines() for slot in (0, 1))
    mixed = "\n".join(line for both in zip(first, second, strict=True) for line in both).replace(
        "700.", "701.", 1
    )
    log = logged(tmp_path, mixed)
    assert [(r.first_token_ms, r.tokens_per_s) for r in log.requests.values()] == [
        (31.5, pytest.approx(35 / 0.701)),
        (31.5, 50),
    ]
    assert any("concurrently" in note for note in log.notes)
    in_turn = SLOT.format(0) + SLOT.format(1)
    restarted = in_turn + in_turn.replace("700", "720")
    assert not any("concurrently" in note for note in logged(tmp_path, restarted).notes)


def test_prompts_of_slots_that_are_not_named_are_joined_to_no_request(tmp_path):
    prompt, decode = SLOT.replace("slot print_timing: id  {0} | task {0} | ", "").splitlines()[1:3]
    mixed = [prompt, prompt.replace("31.50", "20.00"), decode, decode.replace("700.00", "500.00")]
    log = logged(tmp_path, "\n".join([*mixed, prompt, decode]))
    requests = log.requests.values()
    assert [(r.first_token_ms, r.prompt_tokens) for r in requests] == [(None, None), (None, None), (31.5, 21)]
    assert any("concurrently" in note for note in log.notes)


def test_progress_lines_alone_give_the_last_rate(tmp_path):
    progress = "".join((LOGS / "llama-server-progress.txt").read_text().splitlines(keepends=True)[:2])
    (request,) = logged(tmp_path, progress).requests.values()
    assert (request.new_tokens, request.first_token_ms, request.tokens_per_s) == (1900, None, 21.5)


# --- tests of blocks of tokens

DEPTHS = [(n, 23.7 + n / 249) for n in (64, 576, 1088, 4160)]  # position, ms


def benchy(depth: int, rate: float, **changes: Any) -> dict[str, Any]:
    means = {"tg_throughput": {"mean": rate}, "e2e_ttft": {"mean": 985.0}}
    sizes = {"concurrency": 1, "prompt_size": 0, "response_size": 128, "context_size": depth}
    return sizes | means | changes


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ([BENCH | {"n_depth": n - 64, "avg_ts": 1e3 / ms} for n, ms in DEPTHS], "m"),
        ({"benchmarks": [benchy(n - 64, 1e3 / ms) for n, ms in DEPTHS]}, "depths"),
    ],
    ids=["llama-bench", "llama-benchy"],
)
def test_speeds_at_several_depths_are_points_of_a_series(tmp_path, content, name):
    log = logged(tmp_path, content)
    assert log.series[name].n.tolist() == [n for n, _ in DEPTHS]
    assert log.series[name].ms == pytest.approx([ms for _, ms in DEPTHS])
    assert len(log.requests) == 4


def test_each_sweep_of_a_file_is_a_series(tmp_path):
    text = (LOGS / "llama-sweep-bench.jsonl").read_text()
    assert [*logged(tmp_path, text + text).series] == ["sweep 1", "sweep 2"]
    with pytest.raises(LogError, match="fewer than 3 depths"):
        logged(tmp_path, "".join(text.splitlines(keepends=True)[:2]))


def test_tests_of_llama_bench_that_differ_in_a_setting_are_named_by_it(tmp_path):
    rows = [BENCH | {"n_threads": threads} for threads in (8, 4, 4)]
    log = logged(tmp_path, [*rows, BENCH | {"n_prompt": 512}])
    assert [*log.requests] == ["m tg128 n_threads=8", "m tg128 n_threads=4", "m tg128 n_threads=4 #2"]
    assert "pp+tg" in log.notes[0]


@pytest.mark.parametrize("form", ["{0}\nwarning: done\n", "{0}", "noise\n{1}\n"])
def test_the_json_of_llama_bench_is_found_among_lines_of_standard_error(tmp_path, form):
    rows = [BENCH, BENCH | {"n_gen": 64}]
    log = logged(
        tmp_path, "ggml: found\n  Device 0: x\n" + form.format(json.dumps(rows, indent=2), lines(rows))
    )
    assert [*log.requests] == ["m tg128", "m tg64"]


def test_a_mean_is_shown_with_the_spread_of_its_repetitions(harness):
    prompt, decode = harness("fit", LOGS / "llama-bench.json", "--json").json
    assert (prompt["spread"], decode["spread"]) == (near(4.453e-4), near(0.68))
    assert (prompt["flags"], [flag["code"] for flag in decode["flags"]]) == ([], ["repetitions_differ"])
    ran = harness("fit", LOGS / "llama-bench.json", "--fail-on", "repetitions_differ")
    assert "repetitions differ by 68%" in ran.out
    assert ran.code == 3
    out = ran.out.splitlines()
    assert " ".join(out[0].split()) == "variant prompt first ms prefill tok/s tokens tok/s ms/token spread"
    assert out[2].split()[-4:] == ["1,024", "91.8", "10.9", "68.0%"]


def test_several_users_of_llama_benchy_are_said(tmp_path):
    row = benchy(0, 70.2, concurrency=2, tg_req_throughput={"mean": 41.1, "std": 4.11})
    log = logged(tmp_path, {"benchmarks": [row]})
    assert log.requests["pp0 tg128 c2"].tokens_per_s == 41.1
    assert log.requests["pp0 tg128 c2"].spread == pytest.approx(0.1)
    assert any("concurrently" in note for note in log.notes)


# --- early ends, limits and gates of `harness fit`


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


def test_fit_knows_mixtures_and_a_config_json(harness, tmp_path):
    (tmp_path / "log.csv").write_text("n,latency_ms\n" + "\n".join(f"{n},20" for n in range(1, 100)))
    name = next(model_name for model_name in model_names() if model_name.startswith("gpt-oss-20b"))
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
    (tmp_path / "log.json").write_text(json.dumps(OLLAMA | {"eval_count": 610}))
    bounds = ("--model", "qwen1.5-14b", "--machine", "rtx-4090", "--fail-on", "faster_than_limit")
    ran = harness("fit", "log.json", *bounds, "--bpw", "request 1=8")
    assert ran.code == 3
    assert "4.35 ms a token, but reading the weights takes 13." in " ".join(ran.out.split())
    ran = harness("fit", "log.json", "--fail-on", "faster_than_limit")
    assert (ran.code, ran.err) == (2, "harness: --fail-on faster_than_limit needs --model and --machine\n")
    assert harness("fit", "log.json", "--fail-on", "slower").code == 2
