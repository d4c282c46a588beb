"""Run a campaign: plan, prepare, measure each repeat, save. A failure is recorded; the campaign continues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.analysis import agreement
from harness.analysis.verdicts import USABLE, status
from harness.base.files import CacheError
from harness.base.text import plural
from harness.campaign import (
    max_context,
    provenance,
    reference_files,
    rounds,
    weights_check,
)
from harness.campaign import quality as campaign_quality
from harness.campaign.attempts import AttemptRunner
from harness.campaign.opening import Campaign, RunOptions, Watcher, examined, opened, stopping
from harness.campaign.repeat import Inputs, NotReady
from harness.campaign.weight_files import WeightFiles
from harness.config import Experiment, plan
from harness.config.plan import Cell
from harness.records import Stored

CHECK_SECONDS = weights_check.SECONDS


def run(experiment: Experiment, cells: Sequence[Cell], options: RunOptions, watcher: Watcher) -> list[Stored]:
    """Measure every repeat that has no result yet, score texts, then search the longest contexts (last,
    because a search takes all free memory). Returns all records, kept ones included: repeats, scores,
    searches, and weight checks if the protocol has them.

    Raises ResultsError, CacheError, TextError, BadReference (nothing was started), DeviceBusy, Stopped, and
    KeyboardInterrupt (after the record of the current repeat is written).
    """
    protocol, texts = experiment.protocol, campaign_quality.texts_of(cells)
    given = reference_files.GivenReference(options.reference) if options.reference else None
    with opened(experiment, cells, options, watcher) as campaign:
        keys, preparation = campaign.keys, campaign.preparation
        timed = [cell for cell in cells if not cell.searches and not cell.scores]
        order = plan.order(timed, protocol.repeats, protocol.order_seed)
        wanted = (protocol.retry_disturbed, options.fresh, options.retry_failed)
        kept, todo = rounds.due(order, keys, campaign.attempts, *wanted)
        searched = [cell for cell in cells if cell.searches and _kept(campaign, cell) is None]
        _check_disk(campaign, {each.id: each for each in (*(due.cell for due in todo), *searched)}.values())
        if todo or searched:
            campaign = examined(campaign)
        checks = _checked(campaign, CHECK_SECONDS) if protocol.check_weights else []
        if kept:
            count = len({(each.record["cell"], each.record["repeat"]) for each in kept})
            watcher.say(f"{plural(count, 'repeat')} measured already and kept; use --fresh to measure again")
            preparation.prompts.know(each.record for each in kept)
        attempts = AttemptRunner(campaign, {each.cell.id: each.cell for each in todo}.values())
        found = kept + rounds.measure_round(todo, attempts.measure, watcher, protocol.retry_disturbed > 0)
        with stopping("while scoring a text"):
            scores = campaign_quality.score([cell for cell in cells if cell.scores], campaign, texts, given)
        searches = [_searched(campaign, cell) for cell in cells if cell.searches]
    place = {cell.id: number for number, cell in enumerate(cells)}
    found.sort(key=lambda s: (place[s.record["cell"]], s.record["repeat"], s.record["started_utc"]))
    return found + scores + searches + checks


def _check_disk(campaign: Campaign, cells: Iterable[Cell]) -> None:
    """Raises CacheError where the disk has no space for the weights that these cells need."""
    preparation = campaign.preparation
    device = campaign.device
    files = WeightFiles(device.family, preparation.threads, not device.absent)
    for cell in cells:
        source = files.of(preparation.forecast(cell, device))
        if source.no_space:
            raise CacheError(f"nothing was measured: {source.no_space}")


def export_reference(
    experiment: Experiment, cells: Sequence[Cell], options: RunOptions, watcher: Watcher, path: Path
) -> None:
    """Write the reference of cells whose workload is Quality to a file, and score nothing.

    Raises as run() does, and NotExported.
    """
    texts = campaign_quality.texts_of(cells)
    with opened(experiment, cells, options, watcher) as campaign:
        campaign_quality.export(cells, campaign, texts, path)


def _searched(campaign: Campaign, cell: Cell) -> Stored:
    """The longest context of a cell: from an earlier search, or from a new one."""
    watcher = campaign.watcher
    before = campaign.searches.get(campaign.keys[cell.id])
    was = status(before.record)[0] if before else None
    if kept := _kept(campaign, cell):
        answer = f"{kept.record['search'].get('verified_n_ctx')} tokens" if was in USABLE else was
        again = "" if was in USABLE else "; use --retry-failed to search again"
        watcher.say(f"{cell.title} has already been searched: {answer}{again}")
        return kept
    preparation, refused = campaign.preparation, max_context.refusal(cell, campaign.preparation.threads)
    if preparation.device_id == "cpu" and campaign.mechanism is None:  # the machine itself would run out
        refused = refused or NotReady("refused", "this machine has no way to limit the memory of a worker")
    inputs, begun = refused or campaign.inputs(cell), campaign.begun(cell, kind="searched")
    if isinstance(inputs, Inputs):
        provenance.add_inputs(begun, cell, inputs)
    with stopping(f"at {cell.id}"):
        stored = max_context.find(cell, inputs, begun, campaign, before if was == "interrupted" else None)
    watcher.search_ends(stored)
    return stored


def _kept(campaign: Campaign, cell: Cell) -> Stored | None:
    """The earlier search, if it is still valid; None: search the cell now."""
    options, before = campaign.options, campaign.searches.get(campaign.keys[cell.id])
    was = status(before.record)[0] if before else None
    return before if before and plan.is_done(was, options.fresh, options.retry_failed) else None


def check_weights(
    experiment: Experiment, cells: Sequence[Cell], options: RunOptions, watcher: Watcher, seconds: float
) -> list[Stored]:
    """Compare the logits of every model and variant with the 16-bit reference, without timing anything.
    Returns one record per variant, kept ones included. `seconds`: compute time per variant.

    Raises as run() does.
    """
    with opened(experiment, cells, options, watcher) as campaign:
        return _checked(campaign, seconds)


def _checked(campaign: Campaign, seconds: float) -> list[Stored]:
    """Check the weights, and report every verdict other than "agrees"."""
    with stopping("while checking weights"):
        found = weights_check.check(campaign, seconds)
    for row in map(agreement.row, (stored.record for stored in found)):
        if row["verdict"] != "agrees":
            campaign.watcher.say(f"weights of {row['cell']}: {row['verdict']}: {row['reason']}")
    return found
