"""The Study of results folders, bundles or one log: `harness report` shows it, `load_results` returns it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from harness.base import data
from harness.base.text import few, plural, say
from harness.dataset import campaign_order, sql
from harness.dataset.judging import Judged
from harness.dataset.rows import Found, of_folder, without_collection
from harness.dataset.study import Study, study_of, with_series
from harness.records import ResultsError, no_records
from harness.share.bundle import SUFFIX
from harness.share.read_bundle import as_folder, is_bundle


class Source(NamedTuple):
    """A results folder or a bundle, as the user named it, and its records."""

    path: Path
    found: Found


@without_collection()
def load_results(*paths: str | Path, baseline: str | Path | None = None) -> Study:
    """Results folders, bundles, `published/NAME`, or one log that `harness fit` can read. `baseline`: records
    to compare with. Raises ResultsError, LogError."""
    if not paths or "" in paths:
        raise ResultsError("no folder is named")
    named = [data.results(str(path)) for path in paths]
    with contextlib.ExitStack() as stack:
        loaded, _ = study(named, read(named, stack), data.results(str(baseline)) if baseline else None)
    return replace(loaded, tables=partial(sql.frame, [path for path in named if path.is_dir()]))


def read(paths: Sequence[Path], stack: contextlib.ExitStack) -> list[Source]:
    """The records of results folders and bundles, which stay unpacked until the stack is closed; none if a
    path is a log, a file that is no bundle. Raises ResultsError."""
    is_log = any(path.is_file() and not is_bundle(path) for path in paths)
    return [] if is_log else _records(paths, stack)


def _records(paths: Sequence[Path], stack: contextlib.ExitStack) -> list[Source]:
    return [
        Source(path, of_folder(stack.enter_context(as_folder(path)), path if is_bundle(path) else None))
        for path in paths
    ]


def study(
    paths: Sequence[Path], sources: Sequence[Source], baseline: Path | None, campaign: str | None = None
) -> tuple[Study, str]:
    """The Study of these paths, and the name of its page. `sources`: as read() gives them. `campaign`: see
    of_records(). Raises ResultsError, LogError."""
    if not sources:
        if len(paths) > 1 or baseline:
            raise ResultsError(
                "a log cannot be combined: give one log without --baseline, or results folders"
            )
        from harness.dataset.logs import load_log  # pandas is slow to import

        return load_log(paths[0]), paths[0].name.split(".")[0]
    shown = of_records(sources, campaign)
    title = ", ".join(path.resolve().name.removesuffix(SUFFIX) for path in paths)
    first = [*shown.cells, *shown.checks, *shown.searches, *shown.scores][0]
    with contextlib.ExitStack() as stack:
        compared = of_records(_records([baseline], stack)) if baseline else None
        shown = with_series(shown, title, compared)
    if proved := [path for path in paths if (path / data.RECOMMENDED).is_dir()]:
        from harness.recommend.outcomes import with_predictions  # slow to import

        shown = with_predictions(shown, proved)
    return shown, first["machine"]


def of_records(sources: Sequence[Source], campaign: str | None = None) -> Study:
    """The Study of records. `campaign`: `latest`, or how the ids of campaigns begin, to show these alone with
    all checks of weights. Raises ResultsError if there are no records."""
    judged: list[Judged] = []
    damages = [damage for source in sources for damage in source.found.skipped]
    where = ", ".join(str(source.path) for source in sources)
    for source in sources:
        judged += source.found.judged if campaign is None else _of_campaign(source, campaign)
    if campaign and not any(each.facts["kind"] != "checked" for each in judged):
        ids = [each.facts["campaign"] for source in sources for each in source.found.judged]
        span = f"; the first is {min(ids)[:16]}, the last {max(ids)[:16]}" if ids else ""
        raise ResultsError(f"{where}: no campaign began at {campaign}{span}")
    if not judged:
        for damage in few(damages):
            say(damage)
        raise no_records(*(source.path for source in sources))
    once = {_identity(each): each for each in reversed(judged)}  # the first of those that are the same
    if again := len(judged) - len(once):
        damages.append(f"{plural(again, 'record')} of several folders are the same, and count once")
    made = study_of([*reversed(once.values())])
    warnings = [*damages, *made.warnings]
    if not (made.cells or made.checks or made.searches or made.scores):
        for warning in few(warnings):
            say(warning)
        raise ResultsError(f"{where}: no record can be analysed")
    return replace(made, warnings=warnings)


def _identity(judged: Judged) -> tuple[object, ...]:
    """Equal for a record and its copy in a bundle, whose content key is another."""
    facts = judged.facts
    what = facts["kind"], facts["machine"], facts["cell"], facts["campaign"]
    return *what, facts["started_utc"], facts["repeat"]


def _of_campaign(source: Source, which: str) -> list[Judged]:
    """The records of the latest campaign, or of those whose ids begin so, with all checks of weights."""
    judged = source.found.judged
    places = {each.facts["campaign"]: each.facts["place"] for each in judged}
    past = [campaign for campaign in places if not campaign_order.from_the_future(campaign)]
    if which == "latest":
        chosen = {max(past, key=places.__getitem__)} if past else set()
    else:
        chosen = {campaign for campaign in places if campaign.startswith(which)}
    if len(chosen) > 1:
        ids = ", ".join(sorted(chosen))
        say(f"{source.path}: {len(chosen)} campaigns began at {which}, and are shown together: {ids}")
    return [each for each in judged if each.facts["kind"] == "checked" or each.facts["campaign"] in chosen]
