"""Search the longest context of one cell: predict it, verify it with live probes, write one record."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from harness import results
from harness.analysis.records.disturbances import CONTENTION_TOLERANCE
from harness.campaign.max_context import search
from harness.campaign.max_context.live import Found, Probing
from harness.campaign.max_context.memory_estimate import Account, by_shape
from harness.campaign.max_context.memory_headroom import DeviceLost, MemoryHeadroom, NoHeadroom, headroom_on
from harness.campaign.max_context.search import Need, Space, Try
from harness.campaign.prepare import NotReady
from harness.campaign.repeat import Inputs
from harness.config import MaxCtx
from harness.plan import Cell
from harness.results import Draft, Running, Stored
from harness.results.kinds.searched import Probe
from harness.stacks.rules import Context
from harness.worker import launch

MOST_PROBES = 32  # enough to double up to a context that fails, and bisect back
ACCOUNT_MARGIN = 0.03  # of a GPU's free memory: kernels and pools that a stack's account leaves out
MOST = "the stack allows no longer context"
BEYOND = 1.1  # of a device's memory: an allocation of this size can only succeed by spilling

_INT32 = 2**31 - 1


class Fails(RuntimeError):
    """A search cannot start or has no result: `outcome`, and the reason in one sentence."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass(frozen=True)
class Searching:
    """Arguments that all searches of a campaign share. `folder`: results of this machine; `mechanism`: how
    memory is limited on a CPU, null elsewhere; `say`: shows a line to the user."""

    folder: Path
    device_family: str
    budget_bytes: int | None
    mechanism: str | None
    say: Callable[[str], None]


def refusal(cell: Cell, threads: int) -> NotReady | None:
    """Why a cell has no context to search, checked before anything is built for it; null if it has one."""
    if cell.header.context_of(cell.options(threads)):
        return None
    options = ", ".join(f"{name}: {value}" for name, value in sorted(cell.variant.options.items()))
    which = f"stack {cell.variant.stack}" + (f" with {options}" if options else "")
    return NotReady(
        "refused", f"{which} has no context length option: its cache grows; use workload kind grow"
    )


def find(
    cell: Cell, inputs: Inputs | NotReady, begun: Draft, given: Searching, before: Stored | None
) -> Stored:
    """Search, and write the record. `before`: an interrupted search of the same cell; its probes are reused.

    Raises ResultsError if the record cannot be written, and KeyboardInterrupt after writing an interrupted
    record.
    """
    probes = [probe.copy() for probe in before.record["search"]["probes"]] if before else []
    begun = begun | {"kind": "searched", "search": {"probes": probes}}
    running = results.begin(given.folder / cell.model.name / cell.id, begun)
    began, search_run = time.monotonic(), _Search(cell, given, running, probes)
    outcome, reason, interrupted = "ok", None, False
    try:
        if isinstance(inputs, NotReady):
            raise Fails(inputs.outcome, str(inputs))
        search_run.go(inputs)
    except Fails as failure:
        outcome, reason = failure.outcome, str(failure)
    except NoHeadroom as lack:
        outcome, reason = "refused", str(lack)
    except DeviceLost as loss:
        outcome, reason = "error", str(loss)
    except OSError as failure:
        if failure.errno in results.FULL:
            raise results.ResultsError(
                f"cannot write results to {running.folder}: {failure.strerror}"
            ) from failure
        outcome, reason = "error", f"a probe could not be started: {failure}"
    except KeyboardInterrupt:
        interrupted, outcome, reason = True, "interrupted", "stopped by the user"
    ending: Draft = {"outcome": outcome, "reason": reason, "phase": "search", "tokens": 0}
    ending |= {"search": search_run.result, "loaded": search_run.loaded}
    timing = {"started_utc": begun["started_utc"], "wall_s": time.monotonic() - began}
    stored = running.finish(begun | search_run.budget | ending | {"timing": timing})
    if interrupted:
        raise KeyboardInterrupt
    return stored


class _Search:
    """One running search. `result`: the `search` part of its record; `budget`: how its memory is limited;
    `loaded`: facts of the last probe that loaded."""

    def __init__(self, cell: Cell, given: Searching, running: Running, probes: Sequence[Probe]) -> None:
        self._cell, self._given, self._running = cell, given, running
        self._fill = isinstance(cell.workload, MaxCtx) and cell.workload.fill
        self.budget: Draft = {}
        self.loaded: Found | None = None
        self.result: Draft = {
            "probes": list(probes),
            **dict.fromkeys(("predicted_n_ctx", "verified_n_ctx", "allocated_n_ctx", "verified_by")),
            **dict.fromkeys(("predicted_allocated_n_ctx", "predicted_from", "need", "limit_reason")),
            **dict.fromkeys(("limit_bytes", "not_filled")),
            "account_s": 0.0,
        }

    def go(self, inputs: Inputs) -> None:
        """Run the search. Raises Fails, NoHeadroom, DeviceLost, KeyboardInterrupt."""
        cell, given = self._cell, self._given
        context = cell.header.context_of(inputs.options)
        assert context is not None  # otherwise refusal() refused the cell
        with headroom_on(inputs.device_id, given.device_family, given.budget_bytes) as headroom:
            headroom = self._as_before(headroom)
            began = time.monotonic()
            if given.mechanism:
                self.budget = {"memory_budget": {"bytes": headroom.limit_bytes, "means": given.mechanism}}
            space = _space(cell, context)
            self.result |= {"granule": space.granule, "lowest": space.lowest, "highest": space.highest}
            self.result |= {"limit_bytes": headroom.limit_bytes, "limit_stated": headroom.stated}
            self.result["held_by_others_bytes"] = headroom.held_bytes
            probing = Probing(
                cell, inputs, context.option, headroom, given.mechanism, self._running.folder, given.say
            )
            needs = self._needs(context, inputs, space, headroom)
            self.result["account_s"] = time.monotonic() - began
            try:
                self._prove_no_spill(probing, space, needs)
                self._search(probing, space, needs, context.dry)
            finally:
                self.loaded = probing.loaded

    def _as_before(self, headroom: MemoryHeadroom) -> MemoryHeadroom:
        """The headroom, with the memory limit of the earlier probes if that much is still free. Drops probes
        that had another limit."""
        probes: list[Probe] = self.result["probes"]
        if probes:
            before = replace(headroom, limit_bytes=int(probes[-1]["limit_bytes"]))
            if headroom.stated or not before.missing(headroom.free()):
                headroom = before
        kept = [probe for probe in probes if probe["limit_bytes"] == headroom.limit_bytes]
        self.result["probes"] = kept
        self.result["not_filled"] = next((probe["left_out"] for probe in kept if probe["left_out"]), None)
        return headroom

    def _needs(
        self, context: Context, inputs: Inputs, space: Space, headroom: MemoryHeadroom
    ) -> Callable[[bool], Need | None]:
        """Expected bytes by context length, filled or only allocated. Adds the predictions to the result."""
        limit = self.result["limit_bytes"]
        if not context.dry:
            need = by_shape(self._cell, inputs)
            return lambda filled: need
        account = Account(self._cell, inputs, self._running.folder, self._given.mechanism, headroom.free)
        try:
            both = {filled: account.predicted(space, limit, filled) for filled in (True, False)}
        except launch.JobFailed as failure:
            raise Fails("error", f"the stack could not account for its memory: {failure}") from failure
        found = both[self._fill]
        self.result |= {"predicted_n_ctx": found, "predicted_allocated_n_ctx": both[False]}
        parts = account.parts(found or space.lowest, self._fill)
        self.result["need"] = {part: round(size) for part, size in parts.items()}
        if account.knows_lengths:
            self.result["predicted_from"] = "account"
            return account.need
        self.result["predicted_n_ctx"] = self.result["predicted_allocated_n_ctx"] = None
        return lambda filled: None

    def _prove_no_spill(self, probing: Probing, space: Space, needs: Callable[[bool], Need | None]) -> None:
        """If device memory may spill, show that it does not: a context beyond its size must fail."""
        need, why = needs(False), probing.headroom.may_spill
        if why is None:
            return
        beyond = need and search.predicted(space, need, BEYOND * probing.headroom.limit_bytes)
        beyond = beyond and beyond + space.granule
        if not beyond or beyond > space.highest:
            raise Fails("refused", f"{why}, and no context is long enough to rule that out")
        found = self._probe(probing, beyond, fill=False)
        if found["fits"]:
            raise Fails("refused", f"{why}: {beyond} tokens, more than fit on the device, were allocated")
        if found["outcome"] != "oom":  # a driver that moves memory may also hang
            raise Fails("refused", f"{why}, and {beyond} tokens did not run out of memory: {found['reason']}")

    def _search(
        self, probing: Probing, space: Space, needs: Callable[[bool], Need | None], dry: bool
    ) -> None:
        limit, margin = (
            probing.headroom.limit_bytes,
            0 if probing.mechanism else ACCOUNT_MARGIN * probing.headroom.limit_bytes,
        )
        while True:
            fill = self._fill and not self.result["not_filled"]
            if self._fill and not fill and dry:  # then the result is what can be allocated
                self.result["predicted_n_ctx"] = self.result["predicted_allocated_n_ctx"]
            tries = _tries(self.result["probes"], fill)
            self._note_progress(space, tries, fill)
            n_ctx = search.following(space, tries, needs(fill), limit, dry, margin)
            if n_ctx is None:
                break
            if len(tries) >= MOST_PROBES:
                raise Fails("error", f"no answer in {MOST_PROBES} probes")
            if not dry and any(each.peak_bytes for each in tries) and not self.result["predicted_from"]:
                self.result |= {"predicted_n_ctx": n_ctx, "predicted_from": "first probe"}
            found = self._probe(probing, n_ctx, fill)
            if _once(self.result["probes"], n_ctx):
                continue  # the next round tries it again
            busy = found["cpu_wait_share"] or 0.0
            if _slow(found) and busy > CONTENTION_TOLERANCE:
                waited = f"its threads waited for a CPU {busy:.0%} of the time"
                raise Fails("error", f"at {n_ctx} tokens: {found['reason']}; {waited}")
            if found["fits"] is None:
                raise Fails("error", f"at {n_ctx} tokens: {found['reason']}")
            self.result["not_filled"] = found["left_out"] or self.result["not_filled"]
        if self.result["verified_n_ctx"] is None:
            raise Fails("oom", f"not even {space.lowest} tokens fit: {self.result['limit_reason']}")

    def _note_progress(self, space: Space, tries: Sequence[Try], fill: bool) -> None:
        """Add the state of the search to the result, in case it ends here."""
        probes: list[Probe] = self.result["probes"]
        verified = search.longest(space, tries)
        allocated = [probe["n_ctx"] for probe in probes if probe["allocates"]]
        least = min((each.n_ctx for each in tries if not each.fits), default=None)
        reasons = [p["reason"] for p in probes if p["n_ctx"] == least and p["fits"] is False]
        why = f"at {least} tokens: {reasons[-1]}" if least else None
        self.result |= {
            "verified_n_ctx": verified,
            "verified_by": verified and ("decode" if fill else "allocation"),
            "allocated_n_ctx": max(allocated, default=None),
            "limit_reason": why or (MOST if verified == space.highest else None),
        }

    def _probe(self, probing: Probing, n_ctx: int, fill: bool) -> Probe:
        """Try one context, and store the probe at once."""
        self._given.say(f"{self._cell.id} tries {n_ctx} tokens: {'fill' if fill else 'allocate only'}")
        held_to = {"filled": fill, "limit_bytes": probing.headroom.limit_bytes}
        found = cast(Probe, held_to | probing.run(n_ctx, fill))
        self.result["probes"].append(found)
        self._running.note(found)
        fits: bool | None = found["fits"]
        word = {True: "fits", False: "does not fit", None: "failed"}[fits]
        why = f" ({found['reason']})" if found["reason"] else ""
        self._given.say(f"{self._cell.id} with {n_ctx} tokens {word}{why} after {found['seconds']:.1f} s")
        if fits is False:
            _, free = probing.headroom.settle()
            if missing := probing.headroom.missing(min(free, found["free_before_bytes"])):
                raise Fails(
                    "error",
                    f"other processes took {missing / 1e6:.0f} MB of the search's memory",
                )
        return found


def _space(cell: Cell, context: Context) -> Space:
    most = int(cell.header.options[context.option].maximum or _INT32)
    return Space(context.granule, context.granule, most // context.granule * context.granule)


def _tries(probes: Sequence[Probe], fill: bool) -> list[Try]:
    """The tries of contexts that are filled, or only allocated. A context that cannot be allocated cannot be
    filled; the peak of a filled one is not that of an allocated one."""
    tries = {}
    for probe in probes:
        if _slow(probe) and _once(probes, probe["n_ctx"]):
            continue
        fits, peak = probe["fits"], probe["peak_bytes"]
        if fill and not (probe["filled"] and not probe["left_out"]):
            fits, peak = (None if fits else fits), None
        elif not fill and probe["filled"]:
            fits, peak = (probe["allocates"] if fits is not None else None), None
        if fits is not None:
            tries[probe["n_ctx"]] = Try(probe["n_ctx"], fits, peak)
    return list(tries.values())


def _slow(probe: Probe) -> bool:
    """Whether the context was filled to its end, and was too slow there or paged."""
    return probe["fits"] is False and bool(probe["held"])


def _once(probes: Sequence[Probe], n_ctx: int) -> bool:
    """Whether a context was slow only once. Other processes may have disturbed it, so it is tried again."""
    tried = [probe for probe in probes if probe["n_ctx"] == n_ctx]
    return sum(map(_slow, tried)) == 1 and _slow(tried[-1])
