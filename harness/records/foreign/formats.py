"""Every format that is read: how it is recognised, where its figures are, their units, and what it lacks.

The first row that recognises a file reads it. A tool whose file has totals alone is refused: these are its
figures already. Sources are named in the modules of the tools.
"""

from __future__ import annotations

import re

from harness.records.foreign import benches, llama_cpp, streams
from harness.records.foreign.form import NUMBER, Format
from harness.records.foreign.log import LEAST_DEPTHS, SERVE

_SERVE, _SGLANG = streams.DETAILS.values()
_WHOLE = f"and neither the tokens of one nor TTFT, so no tok/s of decode; run {_SERVE} for per-token times"
_TOTALS = f"has totals of requests alone, and so no B, W or shape; {SERVE}"
_TIMINGS = (
    "llama.cpp's timings are totals of a request: no B, W or shape; "
    'request a stream with "timings_per_token": true for per-token times'
)
_OLLAMA = (
    "Ollama gives totals of a request: no B, W or shape; save a stream (curl -N, without "
    '"stream": false) as JSONL for per-token times'
)
_SERVING = {"first s": "ttfts", "gaps s": "itls", "prompt": "input_lens", "new": "output_lens"}
_TIMING_FIGURES = {
    "new": "predicted_n",
    "decode ms": "predicted_ms",
    "prompt": "prompt_n",
    "first ms": "prompt_ms",
    "rate": "rate",
}


def _printed(name: str, text: str, refusal: str) -> Format:
    """Text that is recognised by a part of it, and refused."""
    return Format(name, marks=(text,), pattern=re.escape(text), refusal=refusal)


REFUSED: tuple[Format, ...] = (
    Format(
        "result of `vllm bench latency`",
        keys=("avg_latency latencies",),
        refusal=f"has the times of whole runs, {_WHOLE}",
    ),
    Format(
        "result of `vllm bench throughput`",
        keys=("elapsed_time num_requests",),
        refusal=f"has one time of all requests, {_WHOLE}",
    ),
    _printed(
        "printed summary of a serving benchmark (vLLM, SGLang)",
        "= Serving Benchmark Result =",
        f"has averages only; run {_SERVE} or {_SGLANG} for per-token times",
    ),
    Format(
        "AIPerf summary",
        keys=("request_latency.unit request_latency.avg",),
        refusal="has statistics over all requests; use profile_export.jsonl from the same folder",
    ),
    _printed("table of llama-benchy", "ttfr (ms)", "is not read: use its JSON report"),
    Format(
        "markdown of llama-bench",
        marks=("t/s",),
        pattern=r"^\|[^\n]*\| *test *\| *t/s *\|",
        refusal="is not read: use -o json",
    ),
    Format(
        "SQL of llama-bench",
        marks=("INSERT INTO ",),
        pattern=r"^INSERT INTO \w+ \([^)\n]*\bavg_ts\b",
        refusal="is not read: use -o json",
    ),
    Format(
        "llama-batched-bench result",
        keys=("pp tg n_kv t_pp t_tg pl",),
        marks=("S_PP t/s",),
        pattern=r"^\| *PP *\| *TG *\| *B *\|",
        refusal="has means of whole runs; llama-sweep-bench gives points by depth",
    ),
    Format("GuideLLM report", keys=("benchmarks.0.requests",), refusal=_TOTALS),
    Format("LM Studio result", keys=("stats.tokens_per_second", "stats.tokensPerSecond"), refusal=_TOTALS),
    _printed("output of `lms chat --stats`", "Tokens/Second: ", _TOTALS),
    _printed("evalscope result", "Average time per output token (s)", _TOTALS),
    Format(
        "mlx_lm result",
        keys=("generation_tokens generation_tps",),
        marks=("tokens-per-sec", "generation_tps="),
        pattern="tokens-per-sec|generation_tps=",
        refusal="has totals alone, and so no B, W or shape; for per-token times write the time of each "
        "response of stream_generate() to a CSV and give it with --time-column and --unit",
    ),
    Format(
        "optimum-benchmark report",
        keys=("load_model decode", "report.load_model report.decode"),
        refusal="is not read: write the latencies of one run in per_token to a CSV with a column latency_s",
    ),
)
FORMATS: tuple[Format, ...] = (
    *REFUSED,
    Format(
        "SGLang benchmark result",
        keys=("accept_length", "total_output_tokens_retokenized"),
        figures=_SERVING,
        items=streams.serving,
    ),
    Format(
        "vLLM benchmark result",
        keys=("itls", "request_throughput completed"),
        figures=_SERVING,
        items=streams.serving,
    ),
    Format(
        "AIPerf export",
        keys=("metadata metrics",),
        figures={
            "new": "metrics.output_sequence_length.value",
            "prompt": "metrics.input_sequence_length.value",
            "first *": "metrics.time_to_first_token",
            "gaps *": "metrics.inter_chunk_latency",
            "step *": "metrics.inter_token_latency",
            "start ns": "metadata.request_start_ns",
            "end ns": "metadata.request_end_ns",
        },
        note="inter_chunk_latency is of streamed requests; others have totals only: no B, W or shape",
    ),
    Format(
        "llama.cpp server log",
        keys=("timings",),
        figures=_TIMING_FIGURES,
        items=llama_cpp.timings,
        note=_TIMINGS,
    ),
    Format(
        "llama.cpp server log",
        marks=("eval time", "n_decoded"),
        pattern=llama_cpp.LOG,
        figures=_TIMING_FIGURES,
        items=llama_cpp.log,
        note=_TIMINGS,
    ),
    Format(
        "llama-bench result",
        keys=("avg_ts avg_ns",),
        figures={
            "new": "n_gen",
            "prompt": "n_prompt",
            "depth": "n_depth",
            "rate": "rate",
            "prompt_rate": "prompt_rate",
            "deviation": "stddev_ts",
        },
        note="llama-bench gives averages of whole tests, not per-token times; `-d 0,4096,8192` gives points "
        'by depth, and llama-server with "timings_per_token": true every token',
        items=benches.llama_bench,
    ),
    Format(
        "llama-benchy report",
        keys=("benchmarks.0.tg_throughput benchmarks.0.context_size", "benchmarks latency_mode"),
        figures={
            "new": "response_size",
            "prompt": "prompt_size",
            "depth": "depth",
            "users": "concurrency",
            "first ms": "ttft.mean",
            "rate": "rate.mean",
            "deviation": "rate.std",
        },
        note="llama-benchy gives totals, not per-token times: no B, W or shape; --depth with "
        f"{LEAST_DEPTHS} or more depths gives points by depth; {SERVE}",
        items=benches.llama_benchy,
    ),
    Format(
        "llama-sweep-bench result",
        keys=("pp tg n_kv t_pp t_tg",),
        marks=("N_KV",),
        pattern=rf"^\| *{NUMBER} *\| *(?P<tg>{NUMBER}) *\| *(?P<n_kv>{NUMBER}) *\| *{NUMBER} *\| *{NUMBER} *"
        rf"\| *(?P<t_tg>{NUMBER}) *\| *{NUMBER} *\|",
        figures={"depth": "n_kv", "new": "tg", "decode s": "t_tg"},
        items=benches.sweep,
    ),
    Format(
        "Ollama result",
        keys=("created_at done",),
        figures={
            "new": "eval_count",
            "decode ns": "eval_duration",
            "prompt": "prompt_eval_count",
            "first ns": "prompt_eval_duration",
            "gaps ms": "gaps",
        },
        items=streams.ollama,
        note=_OLLAMA,
    ),
    Format(
        "Ollama result",  # what --verbose prints
        marks=("eval duration:",),
        pattern=r"^[ \t]*(?:prompt eval count: +(?P<prompt>\S{1,40})"
        r"|prompt eval duration: +(?P<first>\S{1,40})"
        r"|eval count: +(?P<new>\S{1,40})|eval duration: +(?P<decode>\S{1,40}))",
        ends="decode",
        figures={"new": "new", "decode duration": "decode", "prompt": "prompt", "first duration": "first"},
        note=_OLLAMA,
    ),
    # Behind llama.cpp's own row, which reads what --perf prints too.
    _printed("llama-cli answer", "| Generation: ", "has rates without counts; --perf prints the times"),
)
