"""Search the longest context of one cell: predict it, verify it with live probes, write one record."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from harness import records
from harness.analysis.disturbances import CONTENTION_TOLERANCE
from harness.campaign import next_context, worker
from harness.campaign.context_need import Account, by_shape
from harness.campaign.context_probe import AMPLE_SHARE, Probing
from harness.campaign.loaded_model import trained_context
from harness.campaign.memory_headroom import DeviceLost, MemoryHeadroom, NoHeadroom, headroom_on
from harness.campaign.next_context import Need, Space, Try
from harness.campaign.opening import Campaign
from harness.campaign.repeat import Failure, Inputs, NotReady, untimed
from harness.config import MaxCtx
from harness.config.plan import Cell
from harness.records import Draft, Running, Stored
from harness.records.searched import Probe, Search, UntimedEnd
from harness.records.values import plain
from harness.stacks.header import Context

MOST_PROBES = 32  # enough to double up to a context that fails, and bisect back
ACCOUNT_MARGIN = 0.03  # of a GPU's free memory: kernels and pools that a stack's account leaves out
MOST = "the stack allows no longer context"
TRAINED = "the model was trained on at most {} tokens (--past-trained searches on)"
BEYOND = 1.1  # of a device's memory: an allocation of this size can only succeed by spilling

_INT32 = 2**31 - 1


def refusal(cell: Cell, threads: int) -> NotReady | None:
    """Why a cell has no context to search, checked before anything is built for it; None if it has one."""
    if reason := cell.impossible(threads):
        return NotReady("unavailable", reason)
    if cell.header.context_of(cell.options(threads)):
        return None
    options = ", ".join(f"{name}: {value}" for name, value in sorted(cell.variant.options.items()))
    which = f"stack {cell.variant.stack}" + (f" with {options}" if options else "")
    return NotReady(
        "refused", f"{which} has no context length option: its cache grows; use workload kind grow"
    )


def find(
    cell: Cell, inputs: Inputs | NotReady, begun: Draft, campaign: Campaign, before: Stored | None
) -> Stored:
    """Search, and write the record. `before`: an interrupted search of the same cell; its probes are reused.

    Raises ResultsError if the record cannot be written, and KeyboardInterrupt after writing an interrupted
    record.
    """
    probes = [probe.copy() for probe in before.record["search"]["probes"]] if before else []
    begun["search"] = {"probes": probes}

    def work(running: Running, end: UntimedEnd) -> None:
        search_run = _Search(cell, campaign, running, probes, end)
        try:
            if isinstance(inputs, NotReady):
                raise inputs
            search_run.go(inputs)
        except NoHeadroom as lack:
            raise Failure("refused", str(lack)) from lack
        except DeviceLost as loss:
            raise Failure("error", str(loss)) from loss
        except OSError as failure:
            if failure.errno in records.FULL:
                raise records.ResultsError(
                    f"cannot write results to {running.folder}: {failure.strerror}"
                ) from failure
            raise Failure("error", f"a probe could not be started: {failure}") from failure

    return untimed(campaign.folder, begun, "search", work, logged=False)


class _Search:
    """One running search. `result`: the `search` part of its record. Adds it to the record's `end`, with how
    its memory is limited and the facts of the last probe that loaded."""

    def __init__(
        self, cell: Cell, campaign: Campaign, running: Running, probes: Sequence[Probe], end: UntimedEnd
    ) -> None:
        self._cell, self._campaign, self._running, self._end = cell, campaign, running, end
        self._say = campaign.watcher.say
        assert isinstance(cell.workload, MaxCtx)
        self._fill, self._past_trained = cell.workload.fill, cell.workload.past_trained
        self._trained: int | None = None
        self.result: Search = {
            "probes": list(probes),
            "predicted_n_ctx": None,
            "verified_n_ctx": None,
            "allocated_n_ctx": None,
            "verified_by": None,
            "predicted_allocated_n_ctx": None,
            "predicted_from": None,
            "need": None,
            "limit_reason": None,
            "limited_by": None,
            "limit_bytes": None,
            "not_filled": None,
            "account_s": 0.0,
        }
        end |= {"search": self.result, "loaded": None}

    def go(self, inputs: Inputs) -> None:
        """Run the search. Raises Failure, NoHeadroom, DeviceLost, KeyboardInterrupt."""
        cell, mechanism, experiment = self._cell, self._campaign.mechanism, self._campaign.experiment
        family, budget = experiment.device.partition(":")[0], experiment.protocol.memory_budget_bytes
        context = cell.header.context_of(inputs.options)
        assert context is not None  # otherwise refusal() refused the cell
        with headroom_on(inputs.device_id, family, budget) as headroom:
            headroom = self._as_before(headroom)
            began = time.monotonic()
            if mechanism:
                self._end["memory_budget"] = {"bytes": headroom.limit_bytes, "means": mechanism}
            every = _space(cell, context)
            space = self._up_to_trained(every, inputs)
            self.result |= {"granule": space.granule, "lowest": space.lowest, "highest": space.highest}
            self.result |= {"limit_bytes": headroom.limit_bytes, "limit_stated": headroom.stated}
            self.result["held_by_others_bytes"] = headroom.held_bytes
            probing = Probing(
                cell, inputs, context.option, headroom, mechanism, self._running.folder, self._say
            )
            needs = self._needs(context, inputs, space, headroom)
            self.result["account_s"] = time.monotonic() - began
            self._say_if_ample(space, needs(self._fill), headroom)
            try:
                self._prove_no_spill(probing, every, needs)
                self._search(probing, space, needs, context.dry)
            finally:
                self._end["loaded"] = probing.loaded

    def _say_if_ample(self, space: Space, need: Need | None, headroom: MemoryHeadroom) -> None:
        """Answer before the proof, where memory is far from short."""
        needed = need(space.highest) if need else None
        if needed is None or needed > AMPLE_SHARE * headroom.limit_bytes:
            return
        why = TRAINED.format(self._trained) if self._trained else MOST
        proof = "filling it" if self._fill else "allocating it"
        self._campaign.watcher.warn(
            f"{self._cell.title}  predicted: {space.highest:,} tokens, which take {needed / 1e9:.2f} of"
            f" {headroom.limit_bytes / 1e9:.1f} GB; {why}; now verified by {proof}"
        )

    def _up_to_trained(self, every: Space, inputs: Inputs) -> Space:
        """The lengths to search. Without `past_trained`, up to the trained context where it is known."""
        trained = None if self._past_trained else trained_context(self._cell, inputs.weights)
        if not trained or (last := every.floor(trained)) == every.highest:
            return every
        self._trained = trained
        return replace(every, highest=last)

    def _as_before(self, headroom: MemoryHeadroom) -> MemoryHeadroom:
        """The headroom, with the memory limit of the earlier probes if that much is still free. Keeps probes
        that hold for this limit too: those that had it, that fit and took less, or ran out of more."""
        probes = self.result["probes"]
        if probes:
            before = replace(headroom, limit_bytes=int(probes[-1]["limit_bytes"]))
            if headroom.stated or not before.missing(headroom.free()):
                headroom = before
        kept = [probe for probe in probes if _counts(probe, headroom.limit_bytes)]
        self.result["probes"] = kept
        self.result["not_filled"] = next((probe["left_out"] for probe in kept if probe["left_out"]), None)
        return headroom

    def _needs(
        self, context: Context, inputs: Inputs, space: Space, headroom: MemoryHeadroom
    ) -> Callable[[bool], Need | None]:
        """Expected bytes by context length, filled or only allocated. Adds the predictions to the result."""
        limit = headroom.limit_bytes
        if not context.dry:
            need = by_shape(self._cell, inputs)
            return lambda filled: need
        account = Account(self._cell, inputs, self._running.folder, self._campaign.mechanism, headroom.free)
        try:
            both = {filled: account.predicted(space, limit, filled) for filled in (True, False)}
        except worker.JobFailed as failure:
            raise Failure("error", f"the stack could not account for its memory: {failure}") from failure
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
        beyond = need and next_context.predicted(space, need, BEYOND * probing.headroom.limit_bytes)
        beyond = beyond and beyond + space.granule
        if not beyond or beyond > space.highest:
            raise Failure("refused", f"{why}, and no context is long enough to rule that out")
        found = self._probe(probing, beyond, fill=False)
        if found["fits"]:
            raise Failure("refused", f"{why}: {beyond} tokens, more than fit on the device, were allocated")
        if found["outcome"] != "oom":  # a driver that moves memory may also hang
            raise Failure(
                "refused", f"{why}, and {beyond} tokens did not run out of memory: {found['reason']}"
            )

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
            n_ctx = next_context.following(space, tries, needs(fill), limit, dry, margin)
            if n_ctx is None:
                break
            if len(tries) >= MOST_PROBES:
                raise Failure("error", f"no answer in {MOST_PROBES} probes")
            if not dry and any(each.peak_bytes for each in tries) and not self.result["predicted_from"]:
                self.result |= {"predicted_n_ctx": n_ctx, "predicted_from": "first probe"}
            found = self._probe(probing, n_ctx, fill)
            if _once(self.result["probes"], n_ctx):
                continue  # the next round tries it again
            busy = found["cpu_wait_share"] or 0.0
            if _slow(found) and busy > CONTENTION_TOLERANCE:
                waited = f"its threads waited for a CPU {busy:.0%} of the time"
                raise Failure("error", f"at {n_ctx} tokens: {found['reason']}; {waited}")
            if found["fits"] is None:
                raise Failure("error", f"at {n_ctx} tokens: {found['reason']}")
            self.result["not_filled"] = found["left_out"] or self.result["not_filled"]
        if self.result["verified_n_ctx"] is None:
            raise Failure("oom", f"not even {space.lowest} tokens fit: {self.result['limit_reason']}")

    def _note_progress(self, space: Space, tries: Sequence[Try], fill: bool) -> None:
        """Add the state of the search to the result, in case it ends here."""
        probes = self.result["probes"]
        verified = next_context.longest(space, tries)
        allocated = [probe["n_ctx"] for probe in probes if probe["allocates"]]
        # The proof that memory does not spill may try more than the search does.
        too_long = [each.n_ctx for each in tries if not each.fits and each.n_ctx <= space.highest]
        least = min(too_long, default=None)
        ended = [p for p in probes if p["n_ctx"] == least and p["fits"] is False]
        why = f"at {least} tokens: {ended[-1]['reason']}" if ended else None
        limited_by = "memory" if ended and ended[-1]["outcome"] == "oom" else None
        if least is None and verified == space.highest:
            why = TRAINED.format(self._trained) if self._trained else MOST
            limited_by = "trained context" if self._trained else "stack"
        self.result |= {
            "verified_n_ctx": verified,
            "verified_by": ("decode" if fill else "allocation") if verified else None,
            "allocated_n_ctx": max(allocated, default=None),
            "limit_reason": why,
            "limited_by": limited_by,
        }

    def _probe(self, probing: Probing, n_ctx: int, fill: bool) -> Probe:
        """Try one context, and store the probe at once."""
        self._say(f"{self._cell.title} tries {n_ctx} tokens: {'fill' if fill else 'allocate only'}")
        held_to = {"filled": fill, "limit_bytes": probing.headroom.limit_bytes}
        probe: Probe = plain(held_to | probing.run(n_ctx, fill))
        self.result["probes"].append(probe)
        self._running.note(probe)
        fits: bool | None = probe["fits"]
        word = {True: "fits", False: "does not fit", None: "failed"}[fits]
        why = f" ({probe['reason']})" if probe["reason"] else ""
        self._say(f"{self._cell.title} with {n_ctx} tokens {word}{why} after {probe['seconds']:.1f} s")
        if fits is False:
            _, free = probing.headroom.settle()
            if missing := probing.headroom.missing(min(free, probe["free_before_bytes"])):
                raise Failure(
                    "error",
                    f"other processes took {missing / 1e6:.0f} MB of the search's memory",
                )
        return probe


def _counts(probe: Probe, limit_bytes: int) -> bool:
    """Whether an earlier probe shows whether its context fits in this limit."""
    peak, had = probe["peak_bytes"], probe["limit_bytes"]
    took_less = bool(probe["fits"]) and peak is not None and peak <= limit_bytes
    ran_out_of_more = probe["outcome"] == "oom" and had >= limit_bytes
    return had == limit_bytes or took_less or ran_out_of_more


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
