"""Every format that is read: how it is recognised, where its figures are, their units, and what it lacks.

The first row that recognises a file reads it. Sources: lmstudio.ai/docs, generate.py and benchmark.py of
mlx_lm (github.com/ml-explore/mlx-lm), the summary of `evalscope perf` (github.com/modelscope/evalscope),
src/guidellm/schemas/base/request_stats.py (github.com/vllm-project/guidellm); of others in their modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.records.foreign import benches, llama_cpp, streams
from harness.records.foreign.form import NUMBER, Format, Item, Row
from harness.records.foreign.log import LEAST_DEPTHS, SERVE


def _guidellm(form: Format, reports: Sequence[Row]) -> tuple[list[Item], list[str]]:
    """The requests of all benchmarks of all reports, by their outcome."""
    items = []
    benchmarks = [benchmark for report in reports for benchmark in report["benchmarks"]]
    for number, benchmark in enumerate(benchmarks, 1):
        prefix = f"benchmark {number} " if len(benchmarks) > 1 else ""
        for outcome in ("successful", "incomplete", "errored"):
            for place, row in enumerate(benchmark["requests"].get(outcome) or [], 1):
                items.append(Item(row, f"{prefix}request {place}", failed=outcome != "successful"))
    return items, []


_SERVE, _SGLANG = streams.DETAILS.values()
_WHOLE = f"and neither the tokens of one nor TTFT, so no tok/s of decode; run {_SERVE} for per-token times"
_TOTALS = "gives totals, not per-token times: no B, W or shape"
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
_EVALSCOPE = {
    "first": r"Average time to first token \(s\)",
    "step": r"Average time per output token \(s\)",
    "users": "Number of concurrency",
    "prompt": "Average input tokens per request",
    "new": "Average output tokens per request",
}


def _cells(names: str) -> str:
    """A pattern of a row of numbers in a table in Markdown; a group for each name but `_`."""
    groups = (f"(?P<{name}>{NUMBER})" if name != "_" else NUMBER for name in names.split())
    return r"^\|" + "".join(rf"[ \t]*{group}[ \t]*\|" for group in groups)


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
    Format(
        "printed summary of a serving benchmark (vLLM, SGLang)",
        marks=("= Serving Benchmark Result =",),
        pattern="= Serving Benchmark Result =",
        refusal=f"has averages only; run {_SERVE} or {_SGLANG} for per-token times",
    ),
    Format(
        "AIPerf summary",
        keys=("request_latency.unit request_latency.avg",),
        refusal="has statistics over all requests; use profile_export.jsonl from the same folder",
    ),
    Format(
        "table of llama-benchy",
        marks=("ttfr (ms)",),
        pattern=r"^\|[^\n]*\bttfr \(ms\)",
        refusal="is not read: use its JSON report",
    ),
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
        "GuideLLM report",
        keys=("benchmarks.0.requests",),
        figures={
            "new": "output_tokens",
            "first ms": "time_to_first_token_ms",
            "step ms": "inter_token_latency_ms",
            "start s": "request_start_time start_time",  # the latter in reports up to 0.3
            "end s": "request_end_time end_time",
        },
        note="GuideLLM stores the mean inter-token latency per request, no per-token times: no B, W or shape",
        items=_guidellm,
    ),
    Format(
        "llama.cpp server log",
        keys=("timings",),
        figures=_TIMING_FIGURES,
        items=llama_cpp.timings,
        note=_TIMINGS,
        repeats=True,
    ),
    Format(
        "llama.cpp server log",
        marks=("eval time", "n_decoded"),
        pattern=llama_cpp.LOG,
        figures=_TIMING_FIGURES,
        items=llama_cpp.log,
        note=_TIMINGS,
        repeats=True,
    ),
    Format(
        "llama-cli answer",
        marks=("| Generation: ",),
        pattern=rf"\[ Prompt: {NUMBER} t/s \| Generation: (?P<rate>{NUMBER}) t/s \]",
        figures={"rate": "rate"},
        note="llama-cli prints rates without counts: no TTFT, B, W or shape; --perf adds the prompt's time",
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
            "first ms": "e2e_ttft.mean ttfr.mean",
            "rate": "rate.mean",
            "deviation": "rate.std",
        },
        note=f"llama-benchy {_TOTALS}; --depth with {LEAST_DEPTHS} or more depths gives points by depth; "
        f"{SERVE}",
        items=benches.llama_benchy,
    ),
    Format(
        "llama-batched-bench result",
        keys=("pp tg n_kv t_pp t_tg pl",),
        marks=("N_KV",),
        pattern=_cells("pp tg pl n_kv t_pp _ t_tg _"),
        figures={"new": "tg", "prompt": "pp", "first s": "t_pp", "decode s": "t_tg"},
        note="llama-batched-bench gives means of whole runs: no B, W or shape; llama-sweep-bench gives "
        "points by depth",
        items=benches.batched,
    ),
    Format(
        "llama-sweep-bench result",
        keys=("pp tg n_kv t_pp t_tg",),
        marks=("N_KV",),
        pattern=_cells("pp tg n_kv t_pp _ t_tg _"),
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
        repeats=True,
    ),
    Format(
        "Ollama result",  # what --verbose prints
        marks=("eval duration:",),
        pattern=r"^[ \t]*(?:prompt eval count: +(?P<prompt>\S{1,40})"
        r"|prompt eval duration: +(?P<first>\S{1,40})"
        r"|eval count: +(?P<new>\S{1,40})|eval duration: +(?P<decode>\S{1,40}))",
        needs="new decode",
        ends="decode",
        figures={"new": "new", "decode duration": "decode", "prompt": "prompt", "first duration": "first"},
        note=_OLLAMA,
        repeats=True,
    ),
    Format(
        "optimum-benchmark report",
        keys=tuple(
            f"{prefix}load_model {prefix}{part}"
            for prefix in ("", "report.")
            for part in ("prefill", "decode", "per_token")
        ),
        figures={"first ms": "first", "rate": "decode.throughput.value"},
        items=streams.optimum,
        note="a report without per_token latencies has means of whole runs: no B, W or shape; run "
        "text-generation with the pytorch backend, which reports per_token",
    ),
    Format(
        "LM Studio result",  # under the names of REST v0, REST v1 and the SDKs, and of `lms chat --stats`
        keys=("stats.tokens_per_second", "stats.tokensPerSecond"),
        marks=("Tokens/Second:",),
        pattern=rf"^[ \t]*(?:Tokens/Second: +(?P<rate>{NUMBER})|Time to First Token: +(?P<first>{NUMBER})"
        rf"|Prompt Tokens: +(?P<prompt>{NUMBER})|Predicted Tokens: +(?P<new>{NUMBER}))",
        ends="new",
        needs="rate new",
        repeats=True,
        figures={
            "new": "new stats.total_output_tokens stats.predictedTokensCount stats.predicted_tokens_count "
            "usage.completion_tokens",
            "prompt": "prompt stats.input_tokens stats.promptTokensCount stats.prompt_tokens_count "
            "usage.prompt_tokens",
            "first s": "first stats.time_to_first_token stats.time_to_first_token_seconds "
            "stats.timeToFirstTokenSec",
            "rate": "rate stats.tokens_per_second stats.tokensPerSecond",
            "drafted": "stats.acceptedDraftTokensCount stats.accepted_draft_tokens_count",
        },
        note=f"LM Studio {_TOTALS}; {SERVE}",
    ),
    Format(
        "mlx_lm result",  # a response as JSON, or what mlx_lm.generate and mlx_lm.benchmark print
        keys=("generation_tokens generation_tps",),
        marks=("tokens-per-sec", "generation_tps="),
        pattern=rf"Prompt: (?P<prompt_tokens>{NUMBER}) tokens, (?P<prompt_tps>{NUMBER}) tokens-per-sec"
        rf"|Generation: (?P<generation_tokens>{NUMBER}) tokens, (?P<generation_tps>{NUMBER}) tokens-per-sec"
        rf"|Trial \d+: +prompt_tps={NUMBER}, generation_tps=(?P<trial_tps>{NUMBER})",
        ends="generation_tokens",
        repeats=True,
        figures={
            "new": "generation_tokens",
            "prompt": "prompt_tokens",
            "prompt_rate": "prompt_tps",
            "rate": "generation_tps trial_tps",
        },
        note=f"mlx_lm {_TOTALS}; for per-token times write the time of each response of stream_generate() to "
        "a CSV and give it with --time-column and --unit",
    ),
    Format(
        "evalscope result",
        marks=("Average time per output token (s)",),
        pattern="|".join(
            rf'{label}"?[ \t]*[|│┃:][ \t]*(?P<{group}>{NUMBER})' for group, label in _EVALSCOPE.items()
        ),
        ends="last",  # one summary
        needs="step",
        figures={"first s": "first", "step s": "step", "users": "users", "prompt": "prompt", "new": "new"},
        items=lambda form, rows: ([Item(row, "mean") for row in rows], []),
        note=f"evalscope {_TOTALS}; {SERVE}",
    ),
)
