"""Run one live probe of a search: a worker process allocates a context and, on request, fills it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.analysis import depth_speed
from harness.analysis.disturbances import CONTENTION_TOLERANCE, REFAULT_FLOOR_BYTES, REFAULT_TOLERANCE
from harness.analysis.requested import option_mismatches
from harness.campaign import worker, worker_life
from harness.campaign.context_need import PAGES_TO_A_TABLE
from harness.campaign.memory_headroom import MemoryHeadroom
from harness.campaign.memory_limit import MemoryLimit
from harness.campaign.repeat import Inputs
from harness.config.plan import Cell
from harness.records.parts import StackFacts
from harness.records.values import plain
from runners.protocol import Died, Done, Event, Failed, Loaded, Phase

# Of the limit. llama.cpp's account was within 0.3% of what was measured (docs/validation.md); the forecast
# by shape is coarser, but not by a factor of two.
AMPLE_SHARE = 0.5
FILL_SHARE = 0.9  # of a probe's time that filling may take; the rest is loading
SAMPLE_MS = 100  # denser than in timed runs, to catch the peak
TROUBLE = ("error", "refused", "interrupted")  # not by memory; any other failure means "does not fit"
BEFORE_LOADING = ("start", "import")
Found = worker.Facts


@dataclass
class Probing:
    """State shared by all probes of a search. `option`: the name of the context length option; `mechanism`:
    how memory is limited, None on a GPU."""

    cell: Cell
    inputs: Inputs
    option: str
    headroom: MemoryHeadroom
    mechanism: str | None
    folder: Path
    say: Callable[[str], None]
    number: int = 0
    """Number of probes so far."""
    loaded: StackFacts | None = None
    """Facts of the last probe that loaded."""

    def run(self, n_ctx: int, fill: bool) -> Found:
        """Try one context. `fits`: it was allocated and, if requested, filled, and decode at full depth is
        not slower than the shallower depths predict. `outcome` error: it failed, but not for lack of memory.

        Raises DeviceLost, KeyboardInterrupt; the worker has ended in every case.
        """
        waited_s, free = self.headroom.settle()
        self.number += 1
        folder = self.folder / f"probe-{self.number}"
        folder.mkdir()
        limited = MemoryLimit(self.headroom.limit_bytes, self.mechanism) if self.mechanism else None
        seen = _ProbeState(limited, lambda phase: self.say(f"{self.cell.title} at {n_ctx}: {phase}"))
        inputs = self.inputs
        job = worker_life.Job(
            self._request(n_ctx, fill),
            inputs.interpreter,
            folder,
            inputs.threads,
            inputs.timeout_s,
            SAMPLE_MS,
            inputs.nvml_uuid,
            limited,
        )
        ran = worker_life.run(job, seen.add)
        if ran.interrupted:
            raise KeyboardInterrupt
        (folder / "request.json").unlink(missing_ok=True)
        probe = {
            "n_ctx": n_ctx,
            **_outcome(seen, fill, inputs.threads),
            "seconds": ran.wall_s,
            "peak_bytes": self._peak_bytes(ran.memory, seen.ended),
            "free_before_bytes": free,
            "waited_s": waited_s,
            "pressure": seen.pressure,
        }
        self.loaded = seen.loaded or self.loaded
        probe |= self._disturbed(probe)
        return probe | self._objections(probe, seen.loaded)

    def _disturbed(self, probe: Found) -> Found:
        """Correction to a probe that decoded slowly at its end: memory that was far from short is not the
        cause, where the threads waited for a CPU."""
        busy = probe["cpu_wait_share"] or 0.0
        # Without a sample it ended within SAMPLE_MS, too soon to fill half of any limit.
        ample = (probe["peak_bytes"] or 0) <= AMPLE_SHARE * self.headroom.limit_bytes
        slow = probe["fits"] is False and probe["held"]
        if slow and ample and busy > CONTENTION_TOLERANCE:
            return {"fits": True, "decodes": True, "reason": None}
        return {}

    def _objections(self, probe: Found, loaded: StackFacts | None) -> Found:
        """Corrections to a probe that seemed to fit: an error if the worker ran with other options than
        requested; "does not fit" if pages were evicted and read again."""
        if not probe["fits"] or loaded is None:
            return {}
        n_ctx = probe["n_ctx"]
        requested = {k: v for k, v in self.inputs.options.items() if k != self.option}
        flags = option_mismatches(self.inputs.device_id, requested, loaded)
        mismatches = [each.detail for each in flags]
        held = (loaded.get("options") or {}).get(self.option)
        if not isinstance(held, int) or held < n_ctx:
            mismatches.append(f"{self.option} {n_ctx} was requested and {held} ran")
        if mismatches:
            return {"fits": None, "outcome": "error", "reason": "; ".join(mismatches)}
        refaulted = mmap.PAGESIZE * probe["pressure"].get("workingset_refault_file", 0)
        if refaulted > max(REFAULT_FLOOR_BYTES, REFAULT_TOLERANCE * self.headroom.limit_bytes):
            paged = f"paging: {refaulted / 1e6:.0f} MB of evicted pages were read again"
            return {"fits": False, "decodes": False, "reason": paged}
        return {}

    def _peak_bytes(self, sampled: Mapping[str, int | None], ended: Event | Died | None) -> int | None:
        """The peak memory of the probe, counted the way its limit counts."""
        if self.mechanism == "RLIMIT_DATA":
            return ended.facts.get("data_bytes") if isinstance(ended, Done) else None
        if self.mechanism:
            peak = sampled.get("peak_rss_anon_bytes")
            return None if peak is None else int(peak) * (PAGES_TO_A_TABLE + 1) // PAGES_TO_A_TABLE
        peak, held = sampled.get("peak_vram_bytes"), self.headroom.held_bytes
        # Negative if other processes released memory meanwhile.
        return None if peak is None or peak < held else int(peak) - held

    def _request(self, n_ctx: int, fill: bool) -> Any:
        inputs = replace(self.inputs, options=self.inputs.options | {self.option: n_ctx})
        workload = {"kind": "fit", "tokens": n_ctx, "fill": fill, "prompt": self.inputs.prompt}
        return inputs.request(self.cell, "fit", [workload | {"most_s": FILL_SHARE * self.inputs.timeout_s}])


class _ProbeState:
    """The phase a probe has reached, and its paging while filling. Loading reads files, so its paging does
    not count."""

    def __init__(self, memory_limit: MemoryLimit | None, say: Callable[[str], None]) -> None:
        self.pressure: dict[str, int] = {}
        self.ended: Event | Died | None = None
        self._memory_limit = memory_limit
        self._say = say
        self._before: dict[str, int] = {}
        self.loaded: StackFacts | None = None
        self.phase = "start"
        self._filling: float | None = None

    def fill_s(self, facts: Found) -> float | None:
        """Seconds of filling as the worker reports them; if it did not finish, up to now."""
        if "fill_s" in facts or self._filling is None:
            return facts.get("fill_s")
        return time.monotonic() - self._filling

    def add(self, event: Event | Died) -> None:
        self.ended = event
        if isinstance(event, Loaded):
            self.loaded = plain(event.facts)
        elif isinstance(event, Phase):
            self.phase = event.name.partition(":")[0]
            now = self._memory_limit.pressure() if self._memory_limit else {}
            if self.phase == "fill" and self._filling is None:
                self._filling, self._before = time.monotonic(), now
            elif self._filling is not None:
                self.pressure = {name: now[name] - count for name, count in self._before.items()}
            if ":" in event.name:
                self._say(event.name)


def _outcome(seen: _ProbeState, fill: bool, threads: int) -> Found:
    """The outcome of a probe. `held`: tokens in the context at the end; `cpu_wait_share`: share of the
    threads' decode time spent waiting for a CPU; `memory`, `allocator`: as the stack reports at the end."""
    ended = seen.ended
    facts = ended.facts if isinstance(ended, Done) else {}
    decode, decode_ns = facts.get("decode") or [], (facts.get("decode_s") or 0) * 1e9
    held = facts.get("facts_after") or seen.loaded or {}
    outcome: Found = {
        "fits": isinstance(ended, Done),
        "allocates": seen.loaded is not None,
        "decodes": None,
        "outcome": "ok",
        "reason": None,
        "phase": seen.phase,
        "held": facts.get("held"),
        "fill_s": seen.fill_s(facts),
        "estimate_s": facts.get("estimate_s"),
        "left_out": facts.get("left_out"),
        "decode": decode,
        "speed_ratio": depth_speed.speed_ratio(decode),
        "cpu_wait_share": facts["decode_wait_ns"] / (decode_ns * threads) if decode_ns else None,
        "memory": held.get("memory"),
        "allocator": held.get("allocator"),
    }
    if isinstance(ended, (Failed, Died)):
        # A crash before loading, not for lack of memory, would happen at any context length.
        trouble = ended.outcome in TROUBLE or (ended.outcome == "crash" and seen.phase in BEFORE_LOADING)
        outcome |= {"outcome": ended.outcome, "reason": ended.reason, "fits": None if trouble else False}
        if fill and seen.loaded is not None and not trouble:
            outcome["decodes"] = False
    elif fill and facts.get("left_out") is None:
        slow = depth_speed.too_slow(decode)
        outcome |= {"fits": slow is None, "decodes": slow is None, "reason": slow}
    return outcome
