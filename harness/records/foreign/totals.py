"""Tools whose results are totals of requests: LM Studio, mlx_lm, evalscope.

Formats: lmstudio.ai/docs (REST API and `lms`), generate.py and benchmark.py of mlx_lm
(github.com/ml-explore/mlx-lm), the summary of `evalscope perf` (github.com/modelscope/evalscope).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.records.foreign import numerals
from harness.records.foreign.chunks import DRAFTS
from harness.records.foreign.log import SHARED, Log, Reader, Request, numbered, of_objects, of_text, once

LM_STUDIO, MLX, EVALSCOPE = "LM Studio result", "mlx_lm result", "evalscope result"
_TOTALS = "gives totals, not per-token times: no B, W or shape; "
SERVE = "for per-token times run `vllm bench serve --save-result --save-detailed` against the same server"
ASK = {
    LM_STUDIO: f"LM Studio {_TOTALS}{SERVE}",
    MLX: f"mlx_lm {_TOTALS}for per-token times write the time of each response of stream_generate() to a CSV "
    "and give it with --time-column",
    EVALSCOPE: f"evalscope {_TOTALS}{SERVE}",
}
_Object = Mapping[str, Any]


def _log(form: str, found: Sequence[Request], notes: Sequence[str] = ()) -> Log:
    requests, again = once(numbered(found))
    return Log(form, requests=requests, notes=[*again, *notes, ASK[form]])


# The same figures under the names of REST v0, REST v1 and the SDKs.
_LM_RATE = ("tokens_per_second", "tokensPerSecond")
_LM_FIRST_S = ("time_to_first_token", "time_to_first_token_seconds", "timeToFirstTokenSec")
_LM_NEW = ("total_output_tokens", "predictedTokensCount", "completion_tokens", "predicted_tokens_count")
_LM_PROMPT = ("input_tokens", "promptTokensCount", "prompt_tokens", "prompt_tokens_count")
_LM_DRAFTS = ("acceptedDraftTokensCount", "accepted_draft_tokens_count")


def _is_lm_studio(document: _Object) -> bool:
    stats = document.get("stats")
    return isinstance(stats, dict) and any(name in stats for name in _LM_RATE)


def _read_lm_studio(responses: Sequence[_Object]) -> Log:
    found, drafted = [], False
    for response in responses:
        known = {**(response.get("usage") or {}), **response["stats"]}
        first_s = _first(known, _LM_FIRST_S)
        found.append(
            Request(
                _first(known, _LM_NEW),
                None if first_s is None else 1e3 * first_s,
                _first(known, _LM_RATE),
                _first(known, _LM_PROMPT),
            )
        )
        drafted |= bool(_first(known, _LM_DRAFTS))
    return _log(LM_STUDIO, found, [DRAFTS] if drafted else [])


def _first(known: _Object, names: Sequence[str]) -> Any:
    """The value of the first of these names that has one."""
    return next((known[name] for name in names if known.get(name) is not None), None)


_LMS_LINE = re.compile(
    rf"^[ \t]*(Tokens/Second|Time to First Token|Prompt Tokens|Predicted Tokens): +({numerals.NUMBER})",
    re.MULTILINE,
)


def _is_lms(text: str) -> bool:
    known = {line[1] for line in _LMS_LINE.finditer(text)} if "Tokens/Second" in text else set()
    return {"Tokens/Second", "Predicted Tokens"} <= known


def _read_lms(text: str) -> Log:
    """What `lms chat --stats` prints after each answer."""
    blocks: list[dict[str, float]] = []
    decimal = numerals.mark(line[2] for line in _LMS_LINE.finditer(text))
    for line in _LMS_LINE.finditer(text):
        if not blocks or line[1] in blocks[-1]:
            blocks.append({})
        tokens = line[1].endswith("Tokens")
        blocks[-1][line[1]] = numerals.count(line[2]) if tokens else numerals.value(line[2], decimal)
    found = []
    for block in blocks:
        first_s, new, prompt = (
            block.get(name) for name in ("Time to First Token", "Predicted Tokens", "Prompt Tokens")
        )
        first_ms = None if first_s is None else 1e3 * first_s
        found.append(Request(_whole(new), first_ms, block.get("Tokens/Second"), _whole(prompt)))
    return _log(LM_STUDIO, found)


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


_MLX_LINE = re.compile(rf"(Prompt|Generation): ({numerals.COUNT}) tokens, ({numerals.NUMBER}) tokens-per-sec")
_MLX_TRIAL = re.compile(rf"Trial \d+:\s+prompt_tps=({numerals.NUMBER}), generation_tps=({numerals.NUMBER})")


def _is_mlx(document: _Object) -> bool:
    return {"generation_tokens", "generation_tps"} <= document.keys()


def _mlx(prompt: int | None, prompt_rate: float | None, new: int | None, rate: float | None) -> Request:
    """`prompt_tps` is over the time to the first token; of no token of a prompt there is none."""
    first_ms = 1e3 * prompt / prompt_rate if prompt and prompt_rate else None
    return Request(new, first_ms, rate, prompt or None)


def _read_mlx_objects(objects: Sequence[_Object]) -> Log:
    names = ("prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps")
    return _log(MLX, [_mlx(*(each.get(name) for name in names)) for each in objects])


def _read_mlx(text: str) -> Log:
    """What mlx_lm.generate and mlx_lm.benchmark print."""
    found = []
    prompt: tuple[int | None, float | None] = (None, None)
    for part, tokens, rate in _MLX_LINE.findall(text):
        if part == "Prompt":
            prompt = (numerals.count(tokens), numerals.ungrouped(rate))
        else:
            found.append(_mlx(*prompt, numerals.count(tokens), numerals.ungrouped(rate)))
            prompt = (None, None)
    found += [_mlx(None, None, None, numerals.ungrouped(rate)) for _, rate in _MLX_TRIAL.findall(text)]
    return _log(MLX, found)


_EVALSCOPE = re.compile(
    r"^[^\w\n]*(Average time to first token \(s\)|Average time per output token \(s\)|Number of concurrency"
    rf"|Average (?:in|out)put tokens per request)\"?[ \t]*[|│┃:][ \t]*({numerals.NUMBER})",
    re.MULTILINE,
)
_PER_TOKEN = "Average time per output token (s)"


def _is_evalscope(text: str) -> bool:
    return _PER_TOKEN in text and any(line[1] == _PER_TOKEN for line in _EVALSCOPE.finditer(text))


def _read_evalscope(text: str) -> Log:
    """The means of one run, as its table or benchmark_summary.json."""
    lines = [*_EVALSCOPE.finditer(text)]
    decimal = numerals.mark(line[2] for line in lines)
    known = {line[1]: numerals.value(line[2], decimal) for line in lines}
    first_s, step_s = known.get("Average time to first token (s)"), known[_PER_TOKEN]
    new, prompt = (known.get(f"Average {part}put tokens per request") for part in ("out", "in"))
    shared = known.get("Number of concurrency", 1) > 1
    first_ms = None if first_s is None else 1e3 * first_s
    step_ms = 1e3 * step_s
    request = Request(_whole(new), first_ms, 1e3 / step_ms if step_ms else None, _whole(prompt), step_ms)
    return Log(EVALSCOPE, requests={"mean": request}, notes=[*([SHARED] if shared else []), ASK[EVALSCOPE]])


READERS: tuple[Reader, ...] = (
    of_objects(LM_STUDIO, _is_lm_studio, _read_lm_studio),
    of_text(LM_STUDIO, _is_lms, _read_lms),
    of_objects(MLX, _is_mlx, _read_mlx_objects),
    of_text(MLX, lambda text: _MLX_LINE.search(text) or _MLX_TRIAL.search(text), _read_mlx),
    of_text(EVALSCOPE, _is_evalscope, _read_evalscope),
)
