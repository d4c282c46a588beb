"""What a page begins and ends with: where its figures come from, and how to cite it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from harness.base.text import list_named, machine_text, plural
from harness.dataset.study import Study
from harness.records.kinds import Record, loaded_of

NAMED = 3  # machines or commits in one line


class Origin(NamedTuple):
    """Where the figures of a page come from. `machines`: in words. `days`: the first and the last, ISO dates.
    `versions`: of the harness that measured, with its commit. `sources`: of published figures."""

    machines: Sequence[str]
    days: Sequence[str]
    versions: Sequence[str]
    sources: Sequence[str]
    records: int

    @property
    def dates(self) -> str:
        return " to ".join(dict.fromkeys(self.days))

    @property
    def hardware(self) -> str:
        """Each machine in words, which have commas."""
        more = len(self.machines) - NAMED
        return "; ".join(self.machines[:NAMED]) + f" and {more} more" * (more > 0)

    @property
    def line(self) -> str:
        shown = self.hardware, self.dates, list_named(self.versions, NAMED)
        return " · ".join(filter(None, shown))


def origin(study: Study) -> Origin | None:
    """Of what was measured here, else of published figures; None for a log, which has no records."""
    records = [record.record for record in study.ran]
    if not records:
        return None
    shown = [record for record in records if record["kind"] != "reported"] or records
    published = [record["source"] for record in records if record["kind"] == "reported"]
    return Origin(
        list({record["machine"]["slug"]: machine_text(record["machine"]) for record in shown}.values()),
        [study.days[0], study.days[-1]],
        list(dict.fromkeys(version for record in shown if (version := version_text(record)))),
        list(dict.fromkeys(f"{record['title']}, {record['url']}" for record in published)),
        study.n_records,
    )


def joined(origins: Sequence[Origin]) -> Origin | None:
    """The origin of several folders' figures."""
    if not origins:
        return None
    machines, days, versions, sources, counts = zip(*origins, strict=True)

    def once(lists: Iterable[Sequence[str]]) -> list[str]:
        return list(dict.fromkeys(chain.from_iterable(lists)))

    first, *_, last = sorted(chain.from_iterable(days))
    return Origin(once(machines), [first, last], once(versions), once(sources), sum(counts))


def version_text(record: Record) -> str | None:
    """`harness 0.1.0 (commit 360d2223f1+)`; +: of a work tree with changes. Null for published figures."""
    harness = record.get("harness")
    if not harness:
        return None
    commit = harness["git_commit"]
    built = f" (commit {commit[:10]}{'+' * commit.endswith('+')})" if commit else ""
    return f"harness {harness['version']}{built}"


def versions_text(record: Record) -> str:
    """The stack's versions: `llama-cpp-python 0.3.36, numpy 2.2.6`; empty where none is known."""
    versions = loaded_of(record).get("versions") or {}
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def citations(title: str, origin: Origin | None) -> list[str]:
    """How to cite the page of this title: in plain text and as BibTeX, a line each; none for a log."""
    if origin is None:
        return []
    if origin.versions:
        by = f"{list_named(origin.versions, NAMED)} on {origin.hardware}"
    else:
        by = "; ".join([origin.hardware, *origin.sources])
    note = f"{by}, {origin.dates}, {plural(origin.records, 'record')}"
    whole = f"{title}: LLM inference at batch 1"
    keys = {"title": whole, "year": origin.dates[-10:-6], "note": note}
    fields = ", ".join(f"{key} = {{{_bibtex(value)}}}" for key, value in keys.items())
    key = re.sub(r"[^A-Za-z0-9]+", "-", f"harness {title} {origin.dates[-10:]}")
    return [f"{whole}. {note}.", f"@misc{{{key}, {fields}}}"]


def _bibtex(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text.replace("\\", "/"))
