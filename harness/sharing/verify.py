"""Read a bundle of a stranger, compute every figure and verdict anew, and say whether it may be believed.

It is refused for what no honest run leaves behind. Records that are not ok are not refused: they are shown
with their status. What is forged without a contradiction cannot be found: docs/sharing.md says what that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.dataset.gather import Gathered
from harness.results import ResultsError, Stored
from harness.sharing import bundle, figures
from harness.sharing.anonymous import Anonymizer
from harness.sharing.archive import RECORD, Tampered, folder_of
from harness.sharing.bundle import Bundle
from harness.sharing.checks import facts, together
from harness.sharing.checks.evidence import Evidence
from harness.system.endings import FAULTS
from harness.system.wording import plural, shortened

Check = Callable[[Evidence], Iterator[str]]
"""Gives a sentence for each thing that no honest record has."""


@dataclass(frozen=True)
class Reason:
    """Why a bundle is refused. `record`: its folder in the bundle; null: the bundle as a whole."""

    record: str | None
    text: str

    @property
    def line(self) -> str:
        return f"{self.record}: {self.text}" if self.record else self.text


@dataclass
class Verification:
    """`records`: one for each, with figures and status as computed here. `notes`: what was not checked."""

    reasons: list[Reason] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def accepted(self) -> bool:
        return not self.reasons

    def json(self) -> dict[str, Any]:
        return {"accepted": self.accepted, **asdict(self)}


def verify(path: Path, beside: Sequence[Path] = ()) -> Verification:
    """The verdict on a bundle. `beside`: others, of which it must not have a record. Raises NotABundle; also
    Tampered, if one of the others cannot be read."""
    found = Verification()
    others = [each for other in beside for each in _others(other)]
    try:
        with bundle.opened(path) as opened:
            _verify(opened, others, found)
    except Tampered as damage:
        found.reasons.append(Reason(None, str(damage)))
    return found


def _others(path: Path) -> list[Evidence]:
    """The records of another bundle, by its name."""
    with bundle.as_folder(path) as folder:
        return [_read(each, f"{path.name}, {each.folder.name}") for each in bundle.records_in(folder)]


def _verify(opened: Bundle, others: Sequence[Evidence], found: Verification) -> None:
    stored = bundle.records_in(opened.folder)
    names = [each.folder.relative_to(opened.folder).as_posix() for each in stored]
    manifest = opened.manifest
    if names != [folder_of(number) for number in range(1, len(names) + 1)] or not names:
        raise Tampered(f"its records are not numbered from 1 without a gap, each with a {RECORD}")
    if manifest.get("records") != len(names):
        claimed = shortened(str(manifest.get("records")))
        raise Tampered(f"it has {plural(len(names), 'record')}, but its manifest claims {claimed}")
    unknown = manifest.get("keys_not_recomputed")
    unknown = unknown if isinstance(unknown, list) else []
    evidence = [_read(each, name) for each, name in zip(stored, names, strict=True)]
    among = [*others, *evidence]
    parts = [
        *(_about(each, check) for each in evidence for check in CHECKS),
        (Reason(names[index], text) for index, text in together.check(evidence, unknown)),
        (Reason(among[at].name, text) for at, text in together.copies(among) if at >= len(others)),
        _figures(stored, names, manifest.get("figures"), found.records),
    ]
    for part in parts:
        found.reasons += _safely(part)
    not_keyed = sum(each.record["content_key"] in unknown for each in evidence if not each.is_reported)
    if not_keyed:
        found.notes.append(f"the content keys of {plural(not_keyed, 'record')} cannot be recomputed")


def _read(stored: Stored, name: str) -> Evidence:
    try:
        return Evidence.of(stored, name)
    except ResultsError as damage:
        raise Tampered(str(damage).replace(f"{stored.folder}", name)) from damage


def _about(evidence: Evidence, check: Check) -> Iterator[Reason]:
    yield from (Reason(evidence.name, text) for text in check(evidence))


def _safely(found: Iterator[Reason]) -> Iterator[Reason]:
    """The reasons, and one more where a check met a value that it does not expect."""
    try:
        yield from found
    except (*FAULTS, RecursionError) as fault:
        yield Reason(None, f"a record has values that no run leaves ({type(fault).__name__})")


def _anonymous(evidence: Evidence) -> Iterator[str]:
    if Anonymizer().value(evidence.record) != evidence.record:
        yield "it names a path, an address, a serial number or a UUID: harness bundle did not make it"


def _figures(
    stored: Sequence[Stored], names: Sequence[str], claimed: Any, records: list[dict[str, Any]]
) -> Iterator[Reason]:
    """Computes all figures anew, adds them to `records`, and says where others are claimed."""
    gathered = Gathered(stored)
    yield from (Reason(None, warning) for warning in gathered.warnings)
    computed = figures.of(stored, gathered)
    rows: dict[Path, Any] = {
        each.folder: row for row, each in zip(gathered.repeats, gathered.stored, strict=True)
    }
    for each, name, of in zip(stored, names, computed, strict=True):
        record = each.record
        known = {"cell": record["cell"], "repeat": record["repeat"], "kind": record["kind"]}
        row = rows.get(each.folder)
        shown = {key: row.get(key) for key in of} if row else of
        records.append({"record": name, **known, **shown, "reasons": row["reasons"] if row else []})
    claims = claimed if isinstance(claimed, list) else []
    if len(claims) != len(computed) or not all(isinstance(claim, dict) for claim in claims):
        yield Reason(None, "its manifest does not have the figures of each record")
        return
    for name, claim, of in zip(names, claims, computed, strict=True):
        yield from (Reason(name, text) for text in figures.differences(claim, of))


CHECKS: tuple[Check, ...] = (_anonymous, facts.check)
