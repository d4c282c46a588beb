"""Checks of one record that somebody else measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import Any

import numpy as np

from harness import machine, records
from harness.analysis.identity import recorded_gpu
from harness.analysis.verdicts import USABLE, verdict
from harness.base.text import shortened
from harness.records import Stored, TokenTimes
from harness.records.files import read_columns
from harness.records.kinds import Record, done_of, loaded_of, memory_of
from harness.theory import decoder
from harness.theory.decoder import dense

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Evidence:
    """`name`: of its folder in the bundle. `memory`, `table`: columns; empty without a file."""

    name: str
    record: Record
    times: TokenTimes
    memory: Columns
    table: Columns

    @classmethod
    def of(cls, stored: Stored, name: str) -> Evidence:
        """Read the files of a record, all of them, so that a damaged one is refused. Raises ResultsError."""
        read_columns(stored.folder / "sensors.parquet", ("t_ns",))
        memory, table = records.memory_series(stored), records.table(stored)
        return cls(name, stored.record, stored.times, memory, table)

    @property
    def is_reported(self) -> bool:
        """Whether it is a published figure, which was not measured by this harness."""
        return self.record["kind"] == "reported"

    @cached_property
    def usable(self) -> bool:
        """Whether it is a repeat that is valid: a disturbed one may have any times."""
        if self.record["kind"] != "measured":
            return False
        judged = verdict(self.record, has_series=True, times=self.times, table=self.table)
        return judged.status in USABLE and bool(done_of(self.record))

    @cached_property
    def timed_ns(self) -> int:
        """Time from begin to end of the timed part, with flushes; 0 without a timed part."""
        done = done_of(self.record)
        if surface := done.get("surface"):
            return surface.get("elapsed_ns", 0)
        flushes = sum(ns for index, ns in done.get("flushes", []) if index < len(self.times))
        return int(self.times.latency_ns.sum()) + flushes


STEPS_SHARE, STEPS_MS = 1e-3, 0.05  # rounding
LINE_TOLERANCE, LEAST_TOKENS = 0.02, 100  # of a published B: its series may be another run's


# Facts of a machine that never change.
_OF_MACHINE = ("cpu", "architecture", "physical_cores", "memory_bytes", "last_level_cache_bytes", "gpus")


def check(evidence: Evidence) -> Iterator[str]:
    """What no honest record has, one sentence each."""
    yield from contradictions(evidence)
    if not evidence.is_reported:
        yield from _life(evidence)


def machine_facts(machine: Any) -> dict[str, Any]:
    """What tells a machine from others, by name; a GPU's driver may be updated."""
    facts = {name: machine.get(name) for name in _OF_MACHINE}
    gpus = [{k: v for k, v in gpu.items() if k != "driver"} for gpu in facts["gpus"] or []]
    return {**facts, "gpus": gpus}


def contradictions(evidence: Evidence) -> Iterator[str]:
    """What its facts contradict, one sentence each. Virtual time, as of the stack `fake`, is none."""
    record = evidence.record
    yield from _names(record)
    yield from _series(evidence)
    if evidence.is_reported:
        yield from _printed(record)
        yield from _published_line(evidence)
        return
    yield from _machine(record)
    yield from _weights(record)
    yield from _options(record)
    yield from _counts(record)
    yield from _dates(record)
    yield from _memory(record)
    yield from _samples(evidence)
    if evidence.usable:
        yield from _steps(evidence)
    yield from _search(record)


def _names(record: Record) -> Iterator[str]:
    model, stack, kind = record["model"]["name"], record["stack"], record["workload"]["kind"]
    if not record["cell"].startswith(f"{model}.{stack}."):
        yield f"its cell {shortened(record['cell'])} is not one of model {model} and stack {stack}"
    elif record["kind"] in ("measured", "searched") and f".{kind}." not in record["cell"]:
        yield f"its cell {shortened(record['cell'])} is not one of workload {kind}"


def _machine(record: Record) -> Iterator[str]:
    facts = record["machine"]
    cpu, cores, memory = facts.get("cpu"), facts.get("physical_cores"), facts.get("memory_bytes")
    if cpu is None or cores is None or memory is None:
        yield "its machine has no CPU, cores or memory"
        return
    gpus = [gpu["name"] or "gpu" for gpu in facts.get("gpus") or []]
    if (slug := machine.slug(cpu, cores, memory, gpus)) != facts["slug"]:
        yield f"its machine is called {facts['slug']}, but its CPU, memory and GPUs give {slug}"


def _weights(record: Record) -> Iterator[str]:
    weights, loaded = record["model"]["weights"], loaded_of(record)
    header: Mapping[str, Any] = weights.get("header") or {}
    shape = record["model"].get("shape")
    by_type, size = header.get("bytes_by_type"), header.get("model_bytes")
    if by_type and size is not None and sum(by_type.values()) != size:
        yield f"its weights have {size:,} bytes, but by type they are {sum(by_type.values()):,}"
    parameters = header.get("parameters") or loaded.get("parameters")
    of_shape = decoder.parameters(dense(**shape)) if shape and not weights.get("decoder") else None
    if header and parameters and of_shape and of_shape != parameters:
        yield f"its weights have {parameters:,} parameters, but its shape {of_shape:,}"
    if (weights["kind"] == "synthetic") and weights.get("synthetic") is False:
        yield "its weights are synthetic, but marked as real"


def _options(record: Record) -> Iterator[str]:
    options = record.get("options")
    if options is None:
        return
    for name, value in (record["asked"].get("options") or {}).items():
        if options.get(name) != value and name != "mmap":  # a memory budget switches mmap off
            ran = shortened(str(options.get(name)))
            yield f"its option {name} was {shortened(str(value))}, but {ran} ran"
    if "threads" in record and options.get("threads") not in (None, record["threads"]):
        yield f"it claims {record['threads']} threads, but its option is {options['threads']}"


def _counts(record: Record) -> Iterator[str]:
    counters: Mapping[str, Any] = done_of(record).get("counters") or {}
    names = ("prompt_evaluated", "decode_evaluated", "evaluated_tokens")
    prompt, decoded, both = (counters.get(name) for name in names)
    if isinstance(prompt, int) and isinstance(decoded, int) and both not in (None, prompt + decoded):
        yield f"{both} tokens were evaluated, but {prompt} of the prompt and {decoded} after it"
    if decoded is not None and record["tokens"] and decoded != record["tokens"] - 1:
        yield f"the stack decoded {decoded} tokens after the first, but it claims {record['tokens'] - 1}"
    ids = record["workload"].get("prompt")
    if (
        record["workload"]["kind"] == "decode"
        and ids is not None
        and len(ids) != record["workload"]["prompt_tokens"]
    ):
        yield f"its prompt has {len(ids)} tokens, but it claims {record['workload']['prompt_tokens']}"


def _dates(record: Record) -> Iterator[str]:
    began = datetime.fromisoformat(record["started_utc"])
    stamped = (record.get("timing") or {}).get("started_utc")
    if stamped is not None and stamped != record["started_utc"]:
        yield "it began at two different times"
    if began > datetime.now(timezone.utc) + timedelta(days=1):
        yield f"it began in the future, at {record['started_utc']}"
    try:
        campaign = datetime.fromisoformat(record["campaign"]["id"])
    except ValueError:
        yield f"its campaign {shortened(record['campaign']['id'])} is not the time at which one began"
        return
    if campaign.tzinfo is None or began < campaign:
        yield "it began before its campaign"


def _memory(record: Record) -> Iterator[str]:
    """Peaks that its machine cannot hold."""
    memory, size = memory_of(record), record["machine"].get("memory_bytes")
    peaks = (memory.get("peak_rss_bytes"), done_of(record).get("peak_rss_bytes"))
    if size is not None and (most := max((peak or 0) for peak in peaks)) > size:
        yield f"it took {most / 1e9:.1f} GB of memory, but its machine has {size / 1e9:.1f}"
    gpu = recorded_gpu(record)
    vram, device_bytes = memory.get("peak_vram_bytes"), gpu and gpu["memory_bytes"]
    if vram is not None and device_bytes and vram > device_bytes:
        yield f"it took {vram / 1e9:.1f} GB of GPU memory, but its GPU has {device_bytes / 1e9:.1f}"


def _samples(evidence: Evidence) -> Iterator[str]:
    """The peaks of memory, computed anew."""
    memory = memory_of(evidence.record)
    if (claimed := memory.get("samples")) is None:
        return
    if claimed != (count := len(evidence.memory.get("t_ns", []))):
        yield f"it claims {claimed} samples of memory, but has {count}"
    for column in ("rss_anon_bytes", "rss_file_bytes", "vram_bytes"):
        values = [value for value in evidence.memory.get(column, []) if value is not None]
        peak, claimed = max(values, default=None), memory.get(f"peak_{column}")
        if peak != claimed:
            yield f"its {column} peaks at {peak} by its samples, but at {claimed} by the record"


def _series(evidence: Evidence) -> Iterator[str]:
    """The series against the counts and stamps in the record."""
    record, times = evidence.record, evidence.times
    if len(times) != record["tokens"] and (len(times) or not evidence.is_reported):
        yield f"its series has {len(times)} tokens, but it claims {record['tokens']}"
    if not len(times):
        return
    if (times.latency_ns <= 0).any():
        yield "a token of its series took no time"
    first = record["workload"]["prompt_tokens"] + 1 if not evidence.is_reported else times.n[0]
    if times.n[0] != first or (np.diff(times.n) != 1).any():
        yield "the positions of its tokens do not follow each other"
    if evidence.is_reported:
        return
    timing: Any = record["timing"]
    for name, t_ns in zip(("first", "last"), times.t_ns()[[0, -1]], strict=True):
        if timing.get(f"{name}_token_ns") != t_ns:
            claimed = (timing.get(f"{name}_token_ns") or 0) / 1e6
            yield f"its {name} token came after {t_ns / 1e6:.3f} ms, but it claims {claimed:.3f}"
    shape = record["model"].get("shape")
    if shape and times.ids is not None and max(times.ids) >= shape["vocab_size"]:
        yield f"its token {max(times.ids)} is beyond a vocabulary of {shape['vocab_size']}"


def _steps(evidence: Evidence) -> Iterator[str]:
    """The stack's runner times its steps, and our work between them, by the clock of the stamps."""
    counters = done_of(evidence.record).get("counters") or {}
    parts = [counters.get(name) for name in ("steps_ms", "sampling_ms")]
    between_ms = float(evidence.times.latency_ms[1:].sum())
    if None not in parts and between_ms * (1 + STEPS_SHARE) + STEPS_MS < (alone := sum(map(float, parts))):  # type: ignore[arg-type]
        yield f"its tokens after the first took {between_ms:.1f} ms, but its steps alone {alone:.1f}"


def _life(evidence: Evidence) -> Iterator[str]:
    """Check that the tokens fit the lifetime of the process: virtual time is no measurement."""
    wall_s, timed_s = (evidence.record.get("timing") or {}).get("wall_s"), evidence.timed_ns / 1e9
    if wall_s is not None and timed_s > wall_s:
        yield f"its tokens took {timed_s:.2f} s, but its process lived for {wall_s:.2f} s"


def _search(record: Record) -> Iterator[str]:
    """The longest context of a search is one that a probe has shown to fit."""
    search = record.get("search")
    if not search or record["outcome"] != "ok":
        return
    probes, verified = search["probes"], search.get("verified_n_ctx")
    fitted = [probe["n_ctx"] for probe in probes if probe["fits"]]
    if verified is not None and verified not in fitted:
        yield f"it claims a context of {verified}, which none of its probes shows to fit"
    for probe in probes:
        if probe["fits"] and (probe["peak_bytes"] or 0) > probe["limit_bytes"]:
            yield f"a context of {probe['n_ctx']} took more memory than its limit, but is claimed to fit"


def _printed(record: Record) -> Iterator[str]:
    """A published figure against the table as it was printed."""
    reported = record["reported"]
    for table in reported["printed"].values():
        for name in ("bpw", "prefill_ms", "B_ms", "W_tokens_per_ms", "max_ctx", "perplexity"):
            text, figure = table.get(name), reported.get(name)
            if text is None or not isinstance(figure, int | float):
                continue
            try:
                printed = float(text.replace(",", "").lstrip(">~ "))
            except ValueError:
                continue
            if abs(printed - figure) > 1e-6 * max(1.0, abs(figure)):
                yield f"its {name} is {figure:g}, but {text} was printed"


def _published_line(evidence: Evidence) -> Iterator[str]:
    """The published B against the line through the published series."""
    B_ms, times = evidence.record["reported"]["B_ms"], evidence.times
    if B_ms is None or len(times) < LEAST_TOKENS:
        return
    x = times.n[1:] - 1 + (1 - evidence.record["n_counts_from"])
    slope, intercept = np.polyfit(x, times.latency_ms[1:], 1)
    if abs(intercept - B_ms) > max(LINE_TOLERANCE * B_ms, 10 * abs(slope)):
        yield f"its series gives B = {intercept:.2f} ms, but {B_ms:g} was published"
