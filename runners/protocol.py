"""All that crosses the process boundary: Request, Events, Session. Standard library only, Python 3.10.

The controller writes a Request to a JSON file; the worker answers with Events, one JSON object a line, on a
pipe. Only a line that ends in a newline is an event: a worker killed half-way through a line has not said it.
After an event that holds it (see `holds`) the worker waits for a byte on a second pipe.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

# Protocol history (the worker refuses a Request of another number):
#   1  first version
SCHEMA = 1

JOBS = (
    *("generate", "fit", "tokenize", "logits", "account", "probe"),
    *("synthesize", "convert", "quantize", "pack", "unpack"),
)

ACCOUNTED = "accounted"  # the phase of an account that is about to end: all that it holds, it holds now
# Phases; of what follows none is timed until the worker goes on.
HELD_AT = ("load", "generate", "finish", ACCOUNTED)

# A flush took 120 us (median; 2 cores, after 10 ms of decode): once in 512 tokens, or once a second on a slow
# machine, where 512 tokens are minutes.
FLUSH_EVERY = 512
FLUSH_NS = 1_000_000_000

# An event line is at most 512 tokens of two numbers, or a Done with a few 10,000-number series: far below
# this.
MAX_LINE_BYTES = 16 << 20


class NonsenseError(ValueError):
    """What came through the pipe is not an event."""


@dataclass(frozen=True)
class Request:
    """One job for one worker, fully resolved: the worker looks nothing up.

    `device` is an NVML UUID or "cpu". `model` has `name`, `path` and `shape` (null where a job needs none).
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
    """Consecutive tokens, and their ids. Stamps are ns of generation since it began: token 0 is the time to
    first token. The worker's own flushes are left out (Done has them)."""

    first: int
    t_ns: list[int]
    ids: list[int]


@dataclass(frozen=True)
class Done:
    """A workload, or a job, ended well. `facts`: counters, the instrument's cost, whatever the job
    answers."""

    facts: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """The worker gave up in good order. `outcome` is oom or error; `reason` is one line."""

    outcome: str
    reason: str


@dataclass(frozen=True)
class Died:
    """Said by the controller alone: the worker ended without Done or Failed."""

    outcome: str
    reason: str


Event = Phase | Loaded | Tokens | Done | Failed


def holds(event: Event) -> bool:
    """Whether the worker stands still after this event until the controller has seen to it: what is read of
    it then, as its memory, is of that moment however late the controller comes to read it."""
    return isinstance(event, Loaded) or (isinstance(event, Phase) and event.name in HELD_AT)


_EVENTS: dict[str, type[Any]] = {c.__name__: c for c in (Phase, Loaded, Tokens, Done, Failed)}


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
            raise NonsenseError("a Tokens event whose stamps or ids are no whole numbers, or not as many")
    elif isinstance(event, Loaded | Done):
        if not isinstance(event.facts, dict):
            raise NonsenseError(f"a {type(event).__name__} event without facts")
    elif isinstance(event, Phase):
        if not isinstance(event.name, str) or type(event.t_ns) is not int:
            raise NonsenseError("a Phase event without a name or a time")
    elif event.outcome not in ("oom", "error") or not isinstance(event.reason, str):
        raise NonsenseError("a Failed event without an outcome or a reason")
    return event


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")  # JSON has no NaN or Infinity; Python's reader lets them in


def _lists(*values: object) -> bool:
    return all(isinstance(v, list) for v in values)


class Session(Protocol):
    """One model, loaded in one stack.

    `chunk`: most ids to be fed at once when a context is filled; more would take memory of their own, which
    the context would lack. A session may also have `memory_state()`: bytes that its allocator has given out,
    and bytes that it holds (null: it has none), asked now and then as a generation grows.
    """

    chunk: int

    def facts(self) -> dict[str, Any]:
        """What the stack really uses, asked after loading: `versions`, `kernels` (names that will run, with
        counts), `devices`, `options` as resolved, `kv_read` (grows, padded256, full, copied or window),
        `memory` (bytes by part and device where the stack tells), `model_bytes` and `parameters` as the stack
        counts them."""

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Clear the cache, then yield each greedy token id once it is on the host, not before. Ignores end of
        text."""

    def empty(self, tokens: int) -> None:
        """Begin afresh, with room for so many tokens."""

    def feed(self, ids: list[int], keep: int) -> Any:
        """Evaluate `ids` after those before; logits after the last `keep` of them, on the host. A single id
        takes the path of a decode step."""

    def counters(self) -> dict[str, Any]:
        """Second clocks and checks of the last generate: they check the latency, they are never the latency.
        `evaluated_tokens` (prompt and decode), `stack_decode_ms` and `sampling_ms` where the stack knows."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Instruments:
    """What a worker measures with. A runner that has `instruments(request)` brings its own, or null: only the
    fake stack does, whose time is virtual, so that no other process can change what it measures.

    `clock_ns`: monotonic. `cpu_wait_ns`: how long the threads were ready and had no CPU, null if unknown.
    `page_faults`: major and minor ones so far.
    """

    clock_ns: Callable[[], int]
    cpu_wait_ns: Callable[[], int | None]
    page_faults: Callable[[], tuple[int, int]]


Say = Callable[[str], None]
"""Tells the controller, from within a long job, which phase it is in."""
