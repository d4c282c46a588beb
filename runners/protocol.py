"""All that crosses the process boundary: Request, Events, Session. Standard library only, Python 3.10.

The controller writes a Request to a JSON file; the worker answers with Events, one JSON object a line, on a
pipe. Only a line that ends in a newline is an event: a line cut off by a kill does not count.
After an event that holds it (see `holds`) the worker waits for a byte on a second pipe.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

# Protocol history (the worker refuses a Request of another number):
#   1  first version
SCHEMA = 1

JOBS = (
    *("generate", "fit", "tokenize", "logits", "account", "probe", "import"),
    *("synthesize", "convert", "quantize", "pack", "unpack", "dequantize", "differences"),
)

NO_JOB = "has no job"  # in the reason of a Failed: the runner lacks it
ACCOUNTED = "accounted"  # the last phase of an account: all of its memory is allocated now
SCORED = "scored"  # a workload of a job of logits: the file holds them until the worker continues
# Phases after which nothing is timed until the worker continues.
HELD_AT = ("load", "generate", "finish", ACCOUNTED, SCORED)

# A flush took 120 us (median; 2 cores, after 10 ms of decode): every 512 tokens, or every second on a slow
# machine, where 512 tokens take minutes.
FLUSH_EVERY = 512
FLUSH_NS = 1_000_000_000

# An event line is at most 512 tokens of two numbers, or a Done with a few 10,000-number series: far below
# this.
MAX_LINE_BYTES = 16 << 20

# What workloads other than a decode time: the columns of a table, which becomes a file of the same name.
# `round`: from 1. `depth`: tokens in the KV cache before.
TABLES = {
    # A forward pass over `n` tokens.
    "prefill": ("round", "depth", "n", "latency_ns"),
    # A decode step; `n`: position of its token, from 1. `depth`: of its window.
    "windows": ("round", "depth", "n", "latency_ns"),
    # A turn of a conversation. `reuse`: 1 where its prefix was kept. `evaluated`: tokens of its prefill, as
    # fed. `prefill_ns`: until its first token; `decode_ns`: of the `decoded` tokens after it.
    "turns": ("reuse", "turn", "depth", "evaluated", "prefill_ns", "decoded", "decode_ns"),
    # The answer of one of `concurrency` users, see Answer. `together`: of its `tokens` those that came while
    # all decoded: after the first token of the round's last user, until the first user ended.
    "users": (
        *("round", "concurrency", "user", "ttft_ns", "decode_ns", "last_ns"),
        *("tokens", "together", "client_ns"),
    ),
}


class NonsenseError(ValueError):
    """Worker protocol error: the bytes on the pipe are not an event."""


@dataclass(frozen=True)
class Request:
    """One job for one worker, fully resolved.

    `device` is an NVML UUID or "cpu". `model` has `name`, `path` and, for jobs that make tensors, `layout`.
    Large arrays go to the files named in `files`.
    """

    job: str
    stack: str
    device: str
    model: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    workloads: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Request:
        given = json.loads(path.read_text(encoding="utf-8"))
        if given.get("schema") != SCHEMA:
            raise ValueError(f"request schema {given.get('schema')}, this worker speaks {SCHEMA}")
        return cls(**given)

    @property
    def users(self) -> int:
        """The most users at once."""
        concurrency: list[int] = [n for workload in self.workloads for n in workload.get("concurrency", [])]
        return max([1, *concurrency])


@dataclass(frozen=True)
class Phase:
    """The worker entered a phase (load, warmup, generate, finish ...) at t_ns on the shared monotonic
    clock."""

    name: str
    t_ns: int


@dataclass(frozen=True)
class Loaded:
    """The model is loaded. `facts`: see Session.facts."""

    facts: dict[str, Any]


@dataclass(frozen=True)
class Tokens:
    """Consecutive tokens and their ids. Stamps are ns since generation began: token 0 is TTFT. The worker's
    own flushes are excluded (Done has them)."""

    first: int
    t_ns: list[int]
    ids: list[int]


@dataclass(frozen=True)
class Rows:
    """Rows of one of TABLES, by column: what was timed since the last such event."""

    table: str
    columns: dict[str, list[int]]


@dataclass(frozen=True)
class Done:
    """A workload, or a job, succeeded. `facts`: counters, the instrument's cost, the job's result."""

    facts: dict[str, Any]


class Refused(ValueError):
    """These weights are not the requested ones; the message is one sentence."""


def not_a_number(token: int) -> str:
    return (
        f"not-a-number logits at token {token}: the weights are damaged, or the stack computes them wrongly"
    )


FAILURES = ("oom", "refused", "error")


@dataclass(frozen=True)
class Failed:
    """The worker failed in a controlled way. `outcome` is one of FAILURES; `reason` is one line."""

    outcome: str
    reason: str


def first_failure(failure: BaseException) -> BaseException:
    """The cause of an ImportError: where it is that of a fallback, raised while an earlier failed import was
    handled, the earlier one."""
    while isinstance(failure, ImportError) and not failure.__suppress_context__:
        if not isinstance(failure.__context__, ImportError):
            break
        failure = failure.__context__
    return failure


def reason_of(failure: BaseException) -> str:
    """The message of an exception, in a line; without one, as for a bare assert, where it was raised."""
    failure = first_failure(failure)
    if message := str(failure).strip():
        return message.splitlines()[0][:500]
    raised = traceback.extract_tb(failure.__traceback__)[-1]
    return f"{type(failure).__name__}: {raised.line} ({Path(raised.filename).name}:{raised.lineno})"[:500]


@dataclass(frozen=True)
class Died:
    """Created only by the controller: the worker ended without Done or Failed."""

    outcome: str
    reason: str


Event = Phase | Loaded | Tokens | Rows | Done | Failed


def holds(event: Event) -> bool:
    """Whether the worker pauses after this event until the controller continues it, so that the controller
    reads its state, such as memory, as of this moment."""
    return isinstance(event, Loaded) or (isinstance(event, Phase) and event.name in HELD_AT)


_EVENTS: dict[str, type[Any]] = {c.__name__: c for c in (Phase, Loaded, Tokens, Rows, Done, Failed)}


def encode(event: Event) -> bytes:
    # vars, not asdict, which copies every number: 50 us for 512 tokens instead of 600.
    fields = {"event": type(event).__name__, **vars(event)}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Event:
    """One event from one whole line. Raises NonsenseError for anything else."""
    try:
        fields = json.loads(line, parse_constant=_refuse)
        event: Event = _EVENTS[fields.pop("event")](**fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as mistake:
        raise NonsenseError(f"not an event: {line[:80]!r}") from mistake
    if isinstance(event, Tokens):
        whole = [*event.t_ns, *event.ids, event.first] if _lists(event.t_ns, event.ids) else [None]
        counts = len(event.t_ns) == len(event.ids) > 0
        if not all(type(x) is int and 0 <= x < 1 << 63 for x in whole) or not counts:
            raise NonsenseError("a Tokens event whose stamps and ids are not whole numbers of equal count")
    elif isinstance(event, Rows):
        _check_rows(event)
    elif isinstance(event, Loaded | Done):
        if not isinstance(event.facts, dict):
            raise NonsenseError(f"a {type(event).__name__} event without facts")
    elif isinstance(event, Phase):
        if not isinstance(event.name, str) or type(event.t_ns) is not int:
            raise NonsenseError("a Phase event without a name or a time")
    elif event.outcome not in FAILURES or not isinstance(event.reason, str):
        raise NonsenseError("a Failed event without an outcome or a reason")
    return event


def _check_rows(event: Rows) -> None:
    columns = event.columns if isinstance(event.columns, dict) else {}
    if not isinstance(event.table, str) or tuple(columns) != TABLES.get(event.table):
        raise NonsenseError("a Rows event of an unknown table, or with other columns")
    if not _lists(*columns.values()) or len({len(column) for column in columns.values()}) != 1:
        raise NonsenseError("a Rows event whose columns are not lists of equal length")
    if not all(type(x) is int and 0 <= x < 1 << 63 for column in columns.values() for x in column):
        raise NonsenseError("a Rows event with values that are not whole numbers")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")  # JSON has no NaN; Python's parser accepts it


def _lists(*values: object) -> bool:
    return all(isinstance(v, list) for v in values)


@dataclass(frozen=True)
class Answer:
    """One user's tokens among those of several. `t_ns`: of each, since the requests of all users were sent.
    `ids`: null where the stack does not choose them by the prompt alone. `client_ns`: CPU time of
    its client, of a server. `decode_ns`: when its steps began, where all prompts come before any step; None:
    with its first token."""

    t_ns: list[int]
    ids: list[int] | None = None
    client_ns: int = 0
    decode_ns: int | None = None


class Session(Protocol):
    """One model, loaded in one stack.

    `chunk`: the most ids to feed at once when filling a context; more would take memory from the context. A
    session may also have `memory_state()`: allocated and reserved bytes of its allocator (null: it has none),
    read now and then as a generation grows; and `routing(prompt, new_tokens)`: the experts chosen in greedy
    decode steps (see runners.workloads.scoring; null: no experts). `experts()`: a context manager that hears
    the experts chosen in it, where the request has files["experts"] (see runners.workloads.experts.Heard;
    null: none, or not heard), and lets routers follow those in files["follow"]. `force_tokens(ids)`: decode
    steps are then fed these, by position, in place of the id with the highest logit, which is looked for and
    yielded all the same. `row_counters()`: counters over all requests of a workload with rows.
    """

    chunk: int

    def facts(self) -> dict[str, Any]:
        """The stack's report after loading: `versions`, `kernels` (names with counts),
        `devices`, `options` as resolved, `kv_read` (grows, padded256, full, copied or window), `memory`
        (bytes by part and device if the stack reports it), `model_bytes` and `parameters` as the stack counts
        them."""

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Clear the cache, then yield each greedy token id once it is on the host, not before. Ignores end of
        text."""

    def serve_batch(self, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
        """Clear the cache, then decode greedily for as many users as there are prompts, at once. Only of
        stacks whose header has `several_users`."""

    def empty(self, tokens: int) -> None:
        """Reset, with room for so many tokens. Raises ValueError if there is none."""

    def feed(self, ids: list[int], keep: int) -> Any:
        """Evaluate `ids` after those before; logits after the last `keep` of them, on the host: a buffer of
        float32 (keep, vocabulary). A single id takes the path of a decode step."""

    def steps(self, new_tokens: int) -> Iterator[int]:
        """Greedy ids after those fed, each on the host; the first from the logits that feed() left there."""

    def held(self) -> int:
        """Tokens in the KV cache."""

    def truncate(self, tokens: int) -> None:
        """Forget all but the first `tokens`."""

    def keep(self) -> Any:
        """A copy of the context in main memory, for restore()."""

    def context_bytes(self) -> int:
        """Bytes of such a copy."""

    def restore(self, kept: Any, tokens: int) -> None:
        """Bring back the first `tokens` of a kept context."""

    def write_kept(self, kept: Any, path: Path) -> None:
        """Write such a copy to a file."""

    def read_kept(self, path: Path) -> Any:
        """The copy in a file. Raises the stack's errors if it is none."""

    def evaluated(self) -> int | None:
        """Tokens evaluated since empty(), by the stack's own count; null where it has none."""

    def counters(self) -> dict[str, Any]:
        """Second clocks and checks of the last generate: they check the latency and never replace it.
        `evaluated_tokens` (prompt and decode), `stack_decode_ms` and `sampling_ms` where the stack knows."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Instruments:
    """The worker's instruments. A runner may provide its own in `instruments(request)` (or null): only the
    fake stack does. The fake's time is virtual, so that no other process can change its measurements.

    `clock_ns`: monotonic. `cpu_wait_ns`: how long the threads were ready without a CPU, null if unknown.
    `page_faults`: major and minor ones so far. `suspended_ns`: how long the machine was suspended, null if
    unknown.
    """

    clock_ns: Callable[[], int]
    cpu_wait_ns: Callable[[], int | None]
    page_faults: Callable[[], tuple[int, int]]
    suspended_ns: Callable[[], int | None] = lambda: None


Say = Callable[[str], None]
"""Tells the controller, from within a long job, which phase it is in."""
