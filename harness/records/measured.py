"""`kind: measured`: one repeat of one cell, and what holds between its values."""

from typing import Any

from typing_extensions import NotRequired, TypedDict

from harness.records.common import Common, Conditions, Ended, Own, OwnEnded
from harness.records.parts import StackFacts
from harness.records.sensed import Cooled, IdlePower, Sensors
from harness.records.values import (
    Above0,
    Count,
    Fields,
    From0,
    Number,
    Pairs,
    Positive,
    Switch,
    Text,
    Time,
    Triples,
    clause,
)
from harness.theory.ggml_types import element_bytes


class PeakAllocator(TypedDict):
    peak_allocated_bytes: NotRequired[Count | None]
    peak_reserved_bytes: NotRequired[Count | None]


class Counters(TypedDict):
    evaluated_tokens: NotRequired[Any]
    """of prompt and decode"""
    stack_decode_ms: NotRequired[Number | None]
    """decode time by the stack's own clock"""
    sampling_ms: NotRequired[Number]
    """our time between its steps"""
    steps_ms: NotRequired[Number]
    """what `stack_decode_ms` times, by our clock"""
    device_tokens: NotRequired[Count | None]
    """tokens timed by the device's own clock (`device_ns` in the series)"""
    compilations: NotRequired[Count | None]
    """in the timed part"""
    allocator: NotRequired[PeakAllocator | None]
    """its state at the end"""
    allocator_retries: NotRequired[Pairs | None]
    """[position, times] at which it had to free memory and retry"""
    prompt_tokens: NotRequired[Count]
    """by a server's count, those that it had cached included; of several users the one furthest from what
    was sent"""
    cached_tokens: NotRequired[Count]
    pieces: NotRequired[Count]
    """events of a server's stream that had tokens"""
    awaited_pieces: NotRequired[Count]
    """of these, those that had not arrived yet when the client began to read"""
    piece_tokens: NotRequired[Count]
    """tokens, or texts without ids, in all of them; further tokens of the series came with no piece of their
    own, and their times, at its end, are not those at which they were made"""
    largest_piece: NotRequired[Count]
    counted_tokens: NotRequired[Count]
    """of the answer, by a server's count, which need not agree with what came"""
    ended_by: NotRequired[Text]
    """why a server ended its answer: stop (the model chose to), length, or its own word"""
    proxy: NotRequired[Text]
    """passes the answers on and counts in the server's place"""
    answer_tokens: NotRequired[Count]
    """of all answers of a server, of a workload whose result is a table"""
    drafted_tokens: NotRequired[Count]
    """that a server guessed ahead"""
    accepted_tokens: NotRequired[Count]
    first_burst_tokens: NotRequired[Count]
    """that came together first: of the prompt's pass, where it verified guesses too (then the two above are
    of later passes), or in a server's first event"""
    others_tokens: NotRequired[int]
    """that a server generated for others meanwhile"""
    load_ms: NotRequired[Number]
    """until a server had the model ready, within the time to the first token; of several answers the most"""
    elapsed_ms: NotRequired[Number]
    """of a request, until the end of its answer"""
    waited_ms: NotRequired[Number]
    """of these, without the CPU time of its client"""


class Warmup(TypedDict):
    agreed: Switch


class Control(TypedDict):
    """The first tokens decoded again after the timed part: the same work as then."""

    latency_ns: list[Count]
    """without the first token (prefill)"""
    cpu_wait_ns: Count | None


class Routing(TypedDict):
    """The experts of a mixture that routers chose when the first tokens were decoded again, untimed."""

    experts: Count
    """of a layer"""
    tokens: Count
    """decode steps that were counted; the prompt was not"""
    distinct_tokens: Count
    """different ids that these steps were fed: where one repeats, the same experts are chosen"""
    layers: list[list[Count]]
    """of each layer with a router: how often it chose each expert"""


class PassCheck(TypedDict):
    """Did a pass over `n` tokens write its keys and values? Both as shares of the right logits' length."""

    depth: Count
    n: Count
    distance: From0
    """of the next step's logits to those after the same tokens one by one, or in two passes"""
    control: From0
    """the same without the pass"""


class TurnCount(TypedDict):
    """The prefill of a turn, with (1) or without (0) its prefix kept."""

    reuse: Count
    turn: Count
    depth: NotRequired[Count]
    fed: Count
    evaluated: Count
    """by the stack's own count"""


class AlikeTokens(TypedDict):
    concurrency: Count
    tokens: Count
    """the first ones of the last user that are the same alone"""


class Surface(TypedDict):
    """Facts besides the rows, of a workload whose result is a table."""

    elapsed_ns: NotRequired[Count]
    """time of all of it, filling included"""
    fill_s: NotRequired[From0]
    """time of filling the context"""
    context_was_kept: NotRequired[bool]
    """of depths: whether the filled context came from a file of an earlier repeat"""
    checks: NotRequired[list[PassCheck]]
    """of prefill: one of each depth and length"""
    counted: NotRequired[list[TurnCount]]
    """of turns: one of each, where the stack counts"""
    alike: NotRequired[list[AlikeTokens]]
    """of users: one of each concurrency, where the stack has the ids"""
    half_widths: NotRequired[Any]
    """of depths: half the 95% interval of the mean step as a share, when it stopped"""


class EndFacts(TypedDict):
    """Facts that the worker reports at the end."""

    peak_rss_bytes: NotRequired[Count | None]
    heap_free_bytes: NotRequired[Count | None]
    """free bytes in malloc's heap"""
    start_ns: NotRequired[Count]
    """the moment that token times count from"""
    memory_steps: NotRequired[Triples]
    """of a workload that grows: [tokens, allocated bytes, reserved bytes] of the allocator at each flush"""
    stopped: NotRequired[Any]
    """of a workload that grows: how memory ended it (null: it reached its target)"""
    counters: NotRequired[Counters]
    facts_changed: NotRequired[StackFacts]
    """facts of `loaded` that differ after the run"""
    control: NotRequired[Control | None]
    """missing in older records, and of a workload that grows; null below 512 tokens"""
    fed: NotRequired[Text]
    """`fixed ids`: what decode steps were fed, of a mixture with synthetic weights; missing where each was
    fed the token before it, which had the highest logit"""
    routing: NotRequired[Routing]
    """missing for a model without experts, and of a stack that does not tell"""
    surface: NotRequired[Surface]
    """of a workload whose result is a table"""
    warmup: NotRequired[Any]
    """windows of the warm-up, whether they agreed, and the last one's change from four before (`trend`)"""
    major_faults: NotRequired[Count]
    cpu_wait_ns: NotRequired[Count | None]
    """time in which its threads waited for a CPU"""
    cpu_s: NotRequired[From0]
    """CPU time of its threads"""
    suspended_ns: NotRequired[Count | None]
    """how long the machine was suspended during the repeat; missing in older records"""
    flushes: NotRequired[Pairs]
    """[index of the token that follows, ns]"""


class Timing(TypedDict):
    wall_s: NotRequired[Number | None]
    first_token_ns: NotRequired[Count]
    last_token_ns: NotRequired[Count]
    phases: NotRequired[Any]
    started_utc: NotRequired[Any]
    generate_utc: NotRequired[Time]
    """when generation began, by the wall clock; missing in older records"""


class Mark(TypedDict):
    """Memory at one moment; null if it cannot be read."""

    at: Text
    """`started` (before the worker), `imported` (its libraries), `loaded`, `warmed` (before the first
    timed token; missing in older records), `finished` (after the last token)"""
    rss_anon_bytes: Count | None
    rss_file_bytes: Count | None
    vram_bytes: Count | None
    """the device's, all processes together"""
    own_vram_bytes: NotRequired[Count | None]
    """of these the worker's, as NVML lists its processes; missing in older records"""
    rss_weights_bytes: NotRequired[Count | None]
    """of `rss_file_bytes` the weights' own files"""


class Rusage(TypedDict):
    max_rss_bytes: NotRequired[Count | None]


class Memory(TypedDict):
    marks: NotRequired[list[Mark]]
    peak_rss_bytes: NotRequired[Count | None]
    peak_rss_anon_bytes: NotRequired[Count | None]
    peak_rss_file_bytes: NotRequired[Count | None]
    peak_vram_bytes: NotRequired[Count | None]
    after_load_rss_bytes: NotRequired[Count | None]
    """that of the mark `loaded`"""
    after_load_vram_bytes: NotRequired[Count | None]
    rusage: NotRequired[Rusage | None]


class BandwidthProbe(TypedDict):
    """A read rate measured between the cells: of the best kernel, and `kernel`, `kernels`, `threads`,
    `working_set_bytes`, `stack` if one measured (a GPU)."""

    read_bytes_per_s: Above0


class MatrixProbe(TypedDict):
    """With `measure_matrix_rate`: the best product, and `kernel`, `kernels`, `threads`, `stack` (a GPU),
    `cpus_busy` (CPU time over time in NumPy's, a CPU)."""

    flops_per_s: Above0


class WaitedForQuiet(TypedDict):
    waited_s: Number
    busy_share: Number | None
    """of the CPUs, at the end of the wait"""


class Attempt(TypedDict):
    """Keys of a timed repeat that are known before its worker runs."""

    attempt: NotRequired[Positive]
    """1, or more after disturbed attempts; missing (1) in older records"""
    waited_for_quiet: NotRequired[WaitedForQuiet]
    """before a further attempt; else missing"""
    bandwidth_probes: NotRequired[list[BandwidthProbe]]
    """read rates measured so far in the campaign, by kernel"""
    matrix_probe: NotRequired[MatrixProbe | None]
    idle_power: NotRequired[IdlePower]
    """missing without a counter, and in older records"""
    cooled: NotRequired[Cooled]
    """with `cool_down`"""


class Result(TypedDict):
    """Keys of a timed repeat that its worker reports."""

    done: NotRequired[EndFacts | None]
    """the worker's report at the end"""
    timing: Timing
    """phases, first and last stamp"""
    memory: Memory
    """peaks, and `marks`"""
    sensors: NotRequired[Sensors]


class MeasuredEnd(Ended, OwnEnded, Result):
    """How a timed repeat ended."""


class OnlyMeasured(Attempt, Result):
    """Keys that no other kind has."""


class Measured(Common, Own, OnlyMeasured):
    """One repeat of one cell."""


class _FinishedDone(TypedDict):
    counters: Counters
    facts_changed: Fields
    warmup: Warmup
    major_faults: Count
    cpu_wait_ns: NotRequired[Count | None]
    flushes: NotRequired[Pairs]


class Finished(TypedDict):
    """Further keys that verdicts need of a completed repeat."""

    device: Text
    options: Fields
    threads: Positive
    conditions: Conditions
    loaded: StackFacts
    done: _FinishedDone


def error(record: Measured) -> str | None:
    """Describe a contradiction between a measured record's values, as a clause; null: there is none."""
    loaded, timing = record.get("loaded") or StackFacts(), record["timing"]
    if ("first_token_ns" in timing) != ("last_token_ns" in timing):
        return "timing must have both first_token_ns and last_token_ns, or none"
    timed = "last_token_ns" in timing
    if timed and record["tokens"] > 1 and timing["last_token_ns"] <= timing["first_token_ns"]:
        return "timing.last_token_ns must be after first_token_ns"
    if "prompt_source" in record["workload"]:
        for name, of in (("prompt", record["workload"]), ("file", record["model"]["weights"])):
            if name not in of:
                return f"{name} is missing beside workload.prompt_source"
    if wrong := _weights_error(record, loaded):
        return wrong
    if record["outcome"] != "ok":
        return None
    if wrong := clause(Finished, record):
        return wrong
    if record["tokens"] and not timed:
        return "timing.last_token_ns is missing"
    done = record["done"]
    assert done is not None  # Finished has it
    for facts, name in ((loaded, "loaded"), (loaded | done["facts_changed"], "done.facts_changed")):
        if wrong := clause(StackFacts, facts, name):
            return wrong
        if facts.get("kernel_asked") is not None and "kernels" not in facts:
            return f"{name}.kernels is missing"
    return None


def _weights_error(record: Measured, loaded: StackFacts) -> str | None:
    """Check the facts from which a decode step's bytes are counted."""
    counted = "tied" in loaded and loaded.get("model_bytes") is not None  # the stack counted the loaded bytes
    sizes = loaded if counted else record["model"]["weights"].get("header") or loaded
    model_bytes = sizes.get("model_bytes")
    if not sizes.get("tied", True) and model_bytes is not None:
        embedding = sizes.get("input_embedding_bytes")
        if embedding is None:
            return "input_embedding_bytes is missing beside model_bytes"
        if embedding > model_bytes:
            return "input_embedding_bytes must be at most model_bytes"
    for name in ("type_k", "type_v"):
        try:
            element_bytes(record.get("options", {}).get(name, "f16"))
        except (KeyError, TypeError):
            return f"options.{name} must be one of ggml's types"
    return None
