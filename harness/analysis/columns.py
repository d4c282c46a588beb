"""The rows of the data set: the columns that code computes with, by type. figures.py has every figure.

Rows are plain dicts, as they are written to JSON. Missing values are None.
"""

from __future__ import annotations

from typing import Literal

from typing_extensions import NotRequired, TypedDict, TypeIs

from harness.records.checked import Depth, Experts
from harness.records.kinds import Record
from harness.records.published import Source
from harness.records.scored import AtDepth, Figure, WindowMeans
from harness.records.searched import Probe

Ends = list[float | None]
"""Low and high end of an interval; None: open."""


class PrefillStep(TypedDict):
    n: int
    jump_ms: float


class FirstTokenRow(TypedDict):
    """TTFT of a prompt of `n` tokens. `how`: measured, extrapolated, or None with the `reason`."""

    n: int
    ms: float | None
    ci95_ms: Ends | None
    how: str | None
    reason: str | None


class Utilisation(TypedDict):
    """Shares of the data sheet's rates at a pass of `n` tokens; `mbu_measured`: of the measured bandwidth."""

    n: int
    ms: float
    mfu: float | None
    mbu: float | None
    mbu_measured: float | None


class PrefillDepth(TypedDict):
    """Passes behind `depth` tokens in the cache."""

    depth: int
    longest_n: int
    longest_ms: float
    kernel_from_n: int | None
    plateau_ms: float | None
    slope_ms: float | None
    ridge_n: float | None
    ridge_ci95: Ends | None
    ridge_reason: str | None


class PrefillRow(PrefillDepth):
    """A sweep of prefill passes; see prefill.py. TTFT, theory and the comparison with
    it are of an empty cache alone."""

    rounds: int
    shortest_n: int
    plateau_ci95_ms: Ends | None
    slope_ci95_ms: Ends | None
    quadratic_ms: float | None
    ridge_theory: dict[str, float | None]
    """by lm_head: on `every` token, or on the `last`"""
    bytes_per_s: float | None
    flops: float | None
    floors: dict[str, list[list[float]]] | None
    """by lm_head, theory's least time as [n, ms]"""
    comparison: str | None
    steps: list[PrefillStep]
    ttft: list[FirstTokenRow]
    utilisation: list[Utilisation]
    depths: list[PrefillDepth]
    """the deeper ones"""


class EnergySpent(TypedDict):
    """What a device spent while it was timed; see device_energy.py. `joules`, `joules_above_idle`: None
    without a valid measurement, for the `reason`. `idle_watts`: before the first repeat."""

    joules: float | None
    joules_above_idle: float | None
    window_s: float | None
    tokens: float | None
    idle_watts: float | None
    source: str | None
    reason: str | None


class SensorFigures(TypedDict):
    """Of the device over the timed part; see sensors.py."""

    hottest_c: float | None
    median_clock_mhz: float | None


class PassRow(TypedDict):
    """Prefill passes over `n` tokens behind `depth` tokens in the cache. `ms`: their median."""

    depth: int
    n: int
    ms: float
    passes: int


class AtDepthRow(TypedDict):
    """Decode with `depth` tokens in the cache."""

    depth: int
    ms: float
    tokens_per_s: float
    tokens_per_s_ci95: Ends | None
    windows: int


class DepthsRow(TypedDict):
    """Windows of decode; see windows.py. `curved`: a line does not describe them."""

    at: list[AtDepthRow]
    curved: bool


class TurnRow(TypedDict):
    """`depth`: tokens in the cache before; `evaluated`: of the turn's prefill; `decoded`: after the first
    token, which `prefill_ms` includes."""

    turn: int
    depth: int
    evaluated: int
    prefill_ms: float
    decode_ms: float
    decoded: int


class TaskRow(TypedDict):
    """A conversation; see depth.py."""

    prefix_kept: bool
    first_ttft_ms: float
    later_ttft_ms: float | None
    prefill_s: float
    task_s: float
    turns: list[TurnRow]


class Percentiles(TypedDict):
    """Over users and rounds."""

    median: float
    p90: float
    p99: float


class UsersRow(TypedDict):
    """So many users at once; see users.py. `queued`: one user's first token came after another's last, so not
    all were served at once."""

    users: int
    rounds: int
    tokens_per_s: float | None
    output_tokens_per_s: float
    user_tokens_per_s: float | None
    ttft_ms: Percentiles
    tpot_ms: Percentiles | None
    slowest_over_fastest: float | None
    queued: bool


class UsersLimit(TypedDict):
    """`tokens_per_s`: at most, [users, tokens/s]. `by`: the data sheet, or the measured bandwidth.
    `compute_bound_from`: users; None: unknown, or never."""

    by: str
    tokens_per_s: list[tuple[int, float]]
    compute_bound_from: int | None


class ServerRow(TypedDict):
    """A server in another process. `device`, `quant`: as it reports them. `allows_tokens_per_s`: what this
    machine allows for its model, `by`: from which bytes and memory; or `unknown`: why that is not known.
    `causes`: what the server reports that may make it slow, as clauses."""

    device: str
    quant: str | None
    allows_tokens_per_s: float | None
    by: str | None
    unknown: str | None
    causes: list[str]


class SurfaceFigures(TypedDict):
    """Figures of workloads whose result is a table."""

    passes: list[PassRow]
    depths: DepthsRow | None
    tasks: list[TaskRow]
    users: list[UsersRow]


Disturbance = Literal[
    "cpu", "steal", "quota", "memory", "heat", "warmup", "suspend", "server", "gpu", "ended"
]


VramSource = Literal["process", "device less start", "device"]
"""Of a worker's VRAM: NVML's figure of its processes, the device's less what was used before it started, or
the device's."""


class FlagRow(TypedDict):
    code: str
    detail: str


class SegmentRow(TypedDict):
    from_n: int
    to_n: int
    B_ms: float | None
    W_tokens_per_ms: float | None
    flat: bool


class Spikes(TypedDict):
    """Single tokens far above their neighbours: number, median height, and period in tokens."""

    count: int
    size_ms: float | None
    period_tokens: float | None


def no_spikes() -> Spikes:
    return {"count": 0, "size_ms": None, "period_tokens": None}


class LineFigures(TypedDict):
    """B and W with their 95% intervals: of one series, or of a cell's repeats together."""

    B_ms: float | None
    B_ci95_ms: Ends | None
    slope_ms: float | None
    slope_ci95_ms: list[float] | None
    W_tokens_per_ms: float | None
    """1 / slope; None where the slope is not positive"""
    W_ci95: Ends | None
    W_identifiable: bool
    """the slope is distinguishable from zero, and not caused by a jump or a plateau"""


class Figures(LineFigures):
    """Figures of one series; see repeat_figures.py."""

    n_tokens: int | None
    last_n: int | None
    first_token_ms: NotRequired[float | None]
    """`ttft_ms` in the row of a repeat"""
    robust_B_ms: float | None
    """of a line insensitive to spikes, where it differs"""
    robust_W_tokens_per_ms: float | None
    plain_B_ms: float | None
    """least squares with the spikes that `B_ms` leaves out"""
    plain_W_tokens_per_ms: float | None
    shape: str | None
    segments: list[SegmentRow]
    mode_changes_at: int | None
    spikes: Spikes
    median_ms: float | None
    median_n: int | None
    """tokens of context at which it is `median_ms`"""
    tokens_per_s: float | None
    tokens_per_s_ci95: Ends | None
    start_tokens_per_s: float | None
    end_tokens_per_s: float | None
    slow_from_n: float | None


class Flagged(Figures):
    """A row with figures and the flags on them."""

    flags: list[FlagRow]


class Variant(TypedDict):
    """What was measured, of every row."""

    name: NotRequired[str]
    """unique in its table"""
    model: str
    stack: str
    variant: str
    device: str | None


class Ended(Variant):
    """A variant, and how measuring it ended."""

    kind: str
    weights: str
    status: str


class Outcome(Ended):
    reasons: list[str]


class Counted(Outcome):
    """An outcome of so many repeats; 0: of none. `stayed_disturbed`: the disturbance of each repeat without
    an ok attempt."""

    repeats: int
    repeats_ok: int
    disturbed_attempts: int
    stayed_disturbed: list[Disturbance]


class Identity(Variant):
    """Columns of every row of one kind of record; see identity.py."""

    cell: str
    machine: str
    content_key: str
    campaign: str
    started_utc: str


class Result(Identity):
    """Shared by the rows of repeats and of searches."""

    kind: str
    weights: str
    status: str
    reasons: list[str]
    model_bytes: int | None
    weight_bytes_per_token: float | None
    kv_bytes_per_token: float | None
    memory_budget_bytes: int | None
    budget_means: str | None


class Growth(TypedDict):
    """The longest context of a growing generation, or the published one; see harness/dataset/table.py."""

    max_ctx: int | None
    max_ctx_is_target: bool
    limit_reason: NotRequired[str | None]
    kv_share_of_free: NotRequired[float | None]


class Buffers(TypedDict):
    """Bytes of buffers as the stack reports them after the run, or as published."""

    model: int | None
    kv: int | None
    compute: int | None


class LimitFigures(TypedDict):
    """What a bandwidth allows. `W_declared_tokens_per_ms`: with the KV cache read as the stack declares."""

    B_ms: float
    W_tokens_per_ms: float | None
    W_declared_tokens_per_ms: float | None


class Limits(TypedDict):
    """Limits by the data sheet's bandwidth and by the measured one; None: not known."""

    sheet: LimitFigures | None
    measured: LimitFigures | None


class SpeculationRow(TypedDict):
    """Tokens guessed ahead; see speculation.py. `by`: the server's name of what guesses. `synthetic`: the
    tokens a pass that were requested, whatever they are; None: real acceptance. `tokens`: one more than
    passes after the prompt's gave. Null: not counted."""

    by: str
    synthetic: float | None
    drafted: int | None
    accepted: int | None
    tokens: int
    passes: int | None
    draft_model_bytes: int | None


class TimeSplit(TypedDict):
    """B of a cell as a fixed cost and the time to read the bytes; see time_split.py."""

    fixed_ms: float | None
    bytes_ms: float | None
    dominated_by: str | None


class Repeat(Result, Flagged, Growth, SensorFigures, SurfaceFigures, TimeSplit):
    """One repeat; see dataset.rows."""

    users_limit: UsersLimit | None
    server: ServerRow | None
    source: Source | None
    repeat: int
    attempt: int
    disturbed: Disturbance | None
    device_memory_bytes: int | None
    workload: str
    prompt_tokens: int
    new_tokens: int
    tokens: int
    n_ctx: int | None
    kv_read: str | None
    served_by: str | None
    """The API of the server that was measured; None: the stack ran in process."""
    outside_stack_ms: float | None
    """Decode time of a token without that of the stack's own clock: until a client of a server has it."""
    ttft_ms: float | None
    bpw: float | None
    nominal_bits: float | None
    bandwidth_share: float | None
    bandwidth_share_range: Ends | None
    """against the highest and the lowest read bandwidth that was measured; None where they hardly differ"""
    past_cache_share: float | None
    bandwidth_bytes_per_s: float | None
    bandwidth_probes_bytes_per_s: list[float]
    peak_rss_bytes: int | None
    peak_vram_bytes: int | None
    """without what others held, where `peak_vram_source` can tell"""
    peak_vram_source: VramSource | None
    loaded_bytes: float | None
    peak_allocator_bytes: int | None
    prefill_knees: dict[str, list[int | None] | None] | None
    series: str | None
    series_sha256: str | None
    """of its latencies, where there are several; equal to the last digit in a copy"""
    guess_group: str | None
    """equal for repeats that differ in their guesses alone; None where it cannot guess, or did not end"""
    weights_check: str | None
    computes: str | None
    """see identity.py; equal where logits are"""
    quality: str | None
    """status of its variant's score; where others of its model have one, `not scored` or `other text`"""
    kld_mean: float | None
    kld_mean_ci95: Ends | None
    top1: float | None
    drift: float | None
    """rise of latency from before to after the run, at the same tokens"""
    drift_ci95: list[float] | None
    speculation: SpeculationRow | None
    energy_source: str | None
    energy_reason: str | None
    energy_price_per_mtok: float | None
    file_bytes: int | None
    vram_bytes: int | None
    model_buffer_bytes: int | None
    kv_buffer_bytes: int | None
    perplexity: float | None
    perplexity_stderr: float | None
    B_theory_ms: float | None
    B_ratio: float | None
    B_measured_ratio: float | None
    W_theory_tokens_per_ms: float | None
    W_ratio: float | None
    W_measured_ratio: float | None
    W_declared_ratio: float | None
    W_declared_measured_ratio: float | None


class JudgedRepeat(Repeat):
    """A repeat as it is judged: the columns of its row, and what its other figures are made of. `known_W`: W
    where the slope is identifiable."""

    record: Record
    energy: EnergySpent
    limits: Limits
    buffers: Buffers
    known_W: float | None


SECTIONS = frozenset(JudgedRepeat.__annotations__) - Repeat.__annotations__.keys()
"""What a row does not keep."""


class CellFigures(LineFigures):
    """The figures of a cell that come from all of its repeats; see cell_intervals.py."""

    tokens_per_s_ci95: Ends | None


class Cell(Repeat):
    """One cell: its last repeat, with the figures of all."""

    repeats: int
    repeats_ok: int
    ok_series: list[str]
    disturbed_attempts: int
    stayed_disturbed: list[Disturbance]
    disturbed_reasons: list[str]
    """of `reasons`, those of disturbed repeats"""
    prefill: PrefillRow | None
    """of a sweep of prefill passes; see dataset.study"""


class ShownCell(Cell):
    """A cell with the one to compare it with."""

    baseline: Cell | None


class Search(Result):
    """One search for the longest context; see harness/dataset/search_rows.py."""

    predicted_n_ctx: int | None
    predicted_allocated_n_ctx: int | None
    verified_n_ctx: int | None
    verified_by: str | None
    allocated_n_ctx: int | None
    limit_reason: str | None
    limited_by: str | None
    limit_bytes: int | None
    limit_stated: bool | None
    not_filled: str | None
    trained_context: int | None
    flags: list[FlagRow]
    granule: int | None
    need: dict[str, float] | None
    predicted_from: str | None
    live_probes: int
    fill_s: float
    search_s: float
    speed_ratio: float | None
    probes: list[Probe]


class Check(Identity):
    """One check of a variant's logits; see agreement.py."""

    speaks_for: list[str]
    outcome: str
    verdict: str
    reason: str | None
    reference: str | None
    unpacked: bool
    own: list[Depth]
    own_allowed_error: float | None
    own_failure: str | None
    experts: Experts | None
    allowed_error: float | None
    depths: list[Depth]
    left_out_n: list[int]


class Score(Identity):
    """The quality of one variant on a text; see quality.py."""

    computes: str | None
    kind: str
    workload: str
    weights: str
    status: str
    reasons: list[str]
    reference: str | None
    text: str | None
    text_sha256: str | None
    special: dict[str, int]
    carriage_returns: int
    n_ctx: int | None
    windows: int | None
    scored: int | None
    bos: int | None
    bos_wanted: bool
    """`bos`: the token that each window begins with; wanted: where the tokenizer adds one"""
    ids_sha256: str | None
    """of the ids of the windows"""
    figures: dict[str, Figure]
    perplexity: float | None
    kld_mean: float | None
    top1: float | None
    wrong: str | None
    """where its logits are NaN or infinite, which makes the speed of its variant invalid; None: nowhere"""
    means: WindowMeans | None
    at_depth: list[AtDepth]
    no_reference: str | None
    trained_context: int | None
    loss_nats: float | None
    seconds: float | None


AnyRow = Repeat | Search | Score


def is_search(row: AnyRow) -> TypeIs[Search]:
    return row["kind"] == "searched"


def is_score(row: AnyRow) -> TypeIs[Score]:
    return row["kind"] == "scored"
