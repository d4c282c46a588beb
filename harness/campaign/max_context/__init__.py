"""Search the longest context of one cell: predict it, prove it by live probes, keep one record of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from harness.results import Record, Running, Stored
from harness.stacks.header import Context
from harness.worker import launch

MOST_PROBES = 32  # leaps to where it fails, and a bisection back
DOUBT = 0.03  # of a GPU's free memory: kernels and pools of the stack that no account has
MOST = "the stack takes no longer one"
BEYOND = 1.1  # of a device's memory: what allocates so much of it spills

_INT32 = 2**31 - 1


class Fails(RuntimeError):
    """A search cannot be done or ends without an answer: `outcome`, and a reason, one sentence."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass(frozen=True)
class Searching:
    """What a campaign gives its searches. `folder`: results of this machine; `mechanism`: how memory is
    bounded on a CPU, null elsewhere; `say`: what a person is told."""

    folder: Path
    device_family: str
    budget_bytes: int | None
    mechanism: str | None
    say: Callable[[str], None]


def refusal(cell: Cell, threads: int) -> NotReady | None:
    """Why nothing of a cell can be searched, before anything is made for it; null: it can."""
    if cell.header.context_of(cell.options(threads)):
        return None
    asked = ", ".join(f"{name}: {value}" for name, value in sorted(cell.variant.options.items()))
    which = f"stack {cell.variant.stack}" + (f" with {asked}" if asked else "")
    return NotReady("refused", f"{which} has no context to set: it grows; see workload kind grow")


def find(
    cell: Cell, inputs: Inputs | NotReady, begun: Record, given: Searching, before: Stored | None
) -> Stored:
    """Search, and write the record. `before`: an interrupted search of the same, whose probes count.

    Raises ResultsError when it cannot be written, KeyboardInterrupt after an interrupted record is.
    """
    probes = before.record["search"]["probes"] if before else []
    begun = begun | {"kind": "searched", "search": {"probes": probes}}
    running = results.begin(given.folder / cell.model.name / cell.id, begun)
    began, one = time.monotonic(), _Search(cell, given, running, probes)
    outcome, reason, interrupted = "ok", None, False
    try:
        if isinstance(inputs, NotReady):
            raise Fails(inputs.outcome, str(inputs))
        one.go(inputs)
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
    ending: Record = {"outcome": outcome, "reason": reason, "phase": "search", "tokens": 0}
    ending |= {"search": one.said, "loaded": one.loaded}
    timing = {"started_utc": begun["started_utc"], "wall_s": time.monotonic() - began}
    stored = running.finish(begun | one.budget | ending | {"timing": timing}, {}, None)
    if interrupted:
        raise KeyboardInterrupt
    return stored


class _Search:
    """One search while it runs. `said`: what its record says of it; `budget`: how its memory is bounded;
    `loaded`: what the last probe that loaded said of itself."""

    def __init__(self, cell: Cell, given: Searching, running: Running, probes: Sequence[Found]) -> None:
        self._cell, self._given, self._running = cell, given, running
        self._fill = isinstance(cell.workload, MaxCtx) and cell.workload.fill
        self.budget: Record = {}
        self.loaded: Found | None = None
        self.said: Record = {
            "probes": list(probes),
            **dict.fromkeys(("predicted_n_ctx", "verified_n_ctx", "allocated_n_ctx", "verified_by")),
            **dict.fromkeys(("predicted_allocated_n_ctx", "predicted_from", "need", "limit_reason")),
            **dict.fromkeys(("limit_bytes", "not_filled")),
            "account_s": 0.0,
        }

    def go(self, inputs: Inputs) -> None:
        """Find it. Raises Fails, NoRoom, DeviceLost, KeyboardInterrupt."""
        cell, given = self._cell, self._given
        context = cell.header.context_of(inputs.options)
        assert context is not None  # else it was refused
        with headroom_on(inputs.device_id, given.device_family, given.budget_bytes) as headroom:
            headroom = self._as_before(headroom)
            began = time.monotonic()
            if given.mechanism:
                self.budget = {"memory_budget": {"bytes": headroom.limit_bytes, "means": given.mechanism}}
            space = _space(cell, context)
            self.said |= {"granule": space.granule, "lowest": space.lowest, "highest": space.highest}
            self.said |= {"limit_bytes": headroom.limit_bytes, "limit_stated": headroom.stated}
            self.said["held_by_others_bytes"] = headroom.held_bytes
            probing = Probing(
                cell, inputs, context.option, headroom, given.mechanism, self._running.folder, given.say
            )
            needs = self._needs(context, inputs, space, headroom)
            self.said["account_s"] = time.monotonic() - began
            try:
                self._prove_no_spill(probing, space, needs)
                self._search(probing, space, needs, context.dry)
            finally:
                self.loaded = probing.loaded

    def _as_before(self, headroom: MemoryHeadroom) -> MemoryHeadroom:
        """The headroom with the limit that the last probes before were held to. Those that were held to
        another, or to one that is not there any more, count no longer."""
        probes = self.said["probes"]
        if probes:
            before = replace(headroom, limit_bytes=int(probes[-1]["limit_bytes"]))
            if headroom.stated or not before.missing(headroom.free()):
                headroom = before
        kept = [probe for probe in probes if probe["limit_bytes"] == headroom.limit_bytes]
        self.said["probes"] = kept
        self.said["not_filled"] = next((probe["left_out"] for probe in kept if probe["left_out"]), None)
        return headroom

    def _needs(
        self, context: Context, inputs: Inputs, space: Space, headroom: MemoryHeadroom
    ) -> Callable[[bool], Need | None]:
        """Bytes by context, filled or only allocated; what is predicted of both is said."""
        limit = self.said["limit_bytes"]
        if not context.dry:
            need = by_shape(self._cell, inputs)
            return lambda filled: need
        account = Account(self._cell, inputs, self._running.folder, self._given.mechanism, headroom.free)
        try:
            both = {filled: account.predicted(space, limit, filled) for filled in (True, False)}
        except launch.JobFailed as failure:
            raise Fails("error", f"its memory could not be accounted for: {failure}") from failure
        found = both[self._fill]
        self.said |= {"predicted_n_ctx": found, "predicted_allocated_n_ctx": both[False]}
        parts = account.parts(found or space.lowest, self._fill)
        self.said["need"] = {part: round(size) for part, size in parts.items()}
        if account.knows_lengths:
            self.said["predicted_from"] = "account"
            return account.need
        self.said["predicted_n_ctx"] = self.said["predicted_allocated_n_ctx"] = None
        return lambda filled: None

    def _prove_no_spill(self, probing: Probing, space: Space, needs: Callable[[bool], Need | None]) -> None:
        """Where memory may spill, show that it does not: a context far beyond the device's must fail."""
        need, why = needs(False), probing.headroom.may_spill
        if why is None:
            return
        beyond = need and search.predicted(space, need, BEYOND * probing.headroom.limit_bytes)
        beyond = beyond and beyond + space.granule
        if not beyond or beyond > space.highest:
            raise Fails("refused", f"{why}, and no context is long enough to show that it does not")
        found = self._probe(probing, beyond, fill=False)
        if found["fits"]:
            raise Fails("refused", f"{why}: {beyond} tokens, more than the device holds, were allocated")
        if found["outcome"] != "oom":  # a driver that moves memory about may as well hang
            raise Fails("refused", f"{why}, and {beyond} tokens ended otherwise: {found['reason']}")

    def _search(
        self, probing: Probing, space: Space, needs: Callable[[bool], Need | None], dry: bool
    ) -> None:
        limit, doubt = (
            probing.headroom.limit_bytes,
            0 if probing.mechanism else DOUBT * probing.headroom.limit_bytes,
        )
        while True:
            fill = self._fill and not self.said["not_filled"]
            if self._fill and not fill and dry:  # what is not filled, is at least known to be allocated
                self.said["predicted_n_ctx"] = self.said["predicted_allocated_n_ctx"]
            tries = _tries(self.said["probes"], fill)
            self._say_found(space, tries, fill)
            asked = search.following(space, tries, needs(fill), limit, dry, doubt)
            if asked is None:
                break
            if len(tries) >= MOST_PROBES:
                raise Fails("error", f"no answer in {MOST_PROBES} probes")
            if not dry and any(each.peak_bytes for each in tries) and not self.said["predicted_from"]:
                self.said |= {"predicted_n_ctx": asked, "predicted_from": "first probe"}
            found = self._probe(probing, asked, fill)
            if _once(self.said["probes"], asked):
                continue  # it is asked for again
            busy = found["cpu_wait_share"] or 0.0
            if _slow(found) and busy > CONTENTION_TOLERANCE:
                waited = f"its threads waited for a CPU {busy:.0%} of the time"
                raise Fails("error", f"at {asked} tokens: {found['reason']}; {waited}")
            if found["fits"] is None:
                raise Fails("error", f"at {asked} tokens: {found['reason']}")
            self.said["not_filled"] = found["left_out"] or self.said["not_filled"]
        if self.said["verified_n_ctx"] is None:
            raise Fails("oom", f"not even {space.lowest} tokens fit: {self.said['limit_reason']}")

    def _say_found(self, space: Space, tries: Sequence[Try], fill: bool) -> None:
        """What is known by now, should the search end here."""
        probes = self.said["probes"]
        verified = search.longest(space, tries)
        allocated = [probe["n_ctx"] for probe in probes if probe["allocates"]]
        least = min((each.n_ctx for each in tries if not each.fits), default=None)
        said = [p["reason"] for p in probes if p["n_ctx"] == least and p["fits"] is False]
        why = f"at {least} tokens: {said[-1]}" if least else None
        self.said |= {
            "verified_n_ctx": verified,
            "verified_by": verified and ("decode" if fill else "allocation"),
            "allocated_n_ctx": max(allocated, default=None),
            "limit_reason": why or (MOST if verified == space.highest else None),
        }

    def _probe(self, probing: Probing, n_ctx: int, fill: bool) -> Found:
        """Try one context, and keep what came of it at once."""
        self._given.say(f"{self._cell.id} tries {n_ctx} tokens: {'to be filled' if fill else 'allocation'}")
        held_to: Found = {"filled": fill, "limit_bytes": probing.headroom.limit_bytes}
        found = held_to | probing.run(n_ctx, fill)
        self.said["probes"].append(found)
        self._running.note(found)
        fits: bool | None = found["fits"]
        word = {True: "fits", False: "does not fit", None: "failed"}[fits]
        why = f" ({found['reason']})" if found["reason"] else ""
        self._given.say(f"{self._cell.id} with {n_ctx} tokens {word}{why}: after {found['seconds']:.1f} s")
        if fits is False:
            _, free = probing.headroom.settle()
            if missing := probing.headroom.missing(min(free, found["free_before_bytes"])):
                raise Fails(
                    "error", f"others have taken {missing / 1e6:.0f} MB of what the search began with"
                )
        return found


def _space(cell: Cell, context: Context) -> Space:
    most = int(cell.header.options[context.option].maximum or _INT32)
    return Space(context.granule, context.granule, most // context.granule * context.granule)


def _tries(probes: Sequence[Found], fill: bool) -> list[Try]:
    """What the probes say of contexts that are to be filled, or only allocated. What cannot be allocated
    cannot be filled; the peak of a filled one says nothing of one that is only allocated."""
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


def _slow(probe: Found) -> bool:
    """Whether it was filled to its end, and was too slow there, or paged."""
    return probe["fits"] is False and bool(probe["held"])


def _once(probes: Sequence[Found], n_ctx: int) -> bool:
    """Whether a context was slow a single time: others may have disturbed it, so it has to be so twice."""
    tried = [probe for probe in probes if probe["n_ctx"] == n_ctx]
    return sum(map(_slow, tried)) == 1 and _slow(tried[-1])
