"""`harness share --verify`: check a bundle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.base.files import FAULTS
from harness.base.text import list_named, plural, shortened
from harness.dataset import checks
from harness.dataset.checks import Evidence
from harness.dataset.study import load_study
from harness.records import ResultsError, Stored
from harness.records.kinds import Record, done_of
from harness.share import bundle
from harness.share.bundle import RECORD, Anonymizer, Bundle, Tampered, folder_of

# The records of a bundle against each other: copies, overlaps, missing runs, content keys. Pure.


NAMED = 5
LEAST_TOKENS = 8  # of a series that no other run has to the nanosecond
# Of a machine, between the end of one worker and the begin of the next: its clock may be set back by so much.
SLACK_S = 1.0
_OF_KEY = ("cell", "stack", "variant", "options", "threads")  # facts that a content key is made of

Finding = tuple[int, str]
"""The index of a record, and what is wrong with it."""


def check_together(found: Sequence[Evidence], unknown_keys: Sequence[object]) -> Iterator[Finding]:
    """Yield contradictions between records, one sentence each. `unknown_keys`: content keys that the bundle
    declares as not recomputable."""
    yield from _keys(found, unknown_keys)
    yield from _machines(found)
    yield from _places(found)
    yield from _overlaps(found)


def _keys(found: Sequence[Evidence], unknown: Sequence[object]) -> Iterator[Finding]:
    known: dict[str, dict[str, object]] = {}
    for index, each in enumerate(found):
        record, key = each.record, each.record["content_key"]
        if each.is_reported:
            continue
        again = bundle.shared_keys(record)
        if again not in (None, key) and key not in unknown:
            yield index, f"its content key {key} is not that of its facts, which give {again}"
        if "options" in record and record["kind"] == "measured":
            facts = _facts(record)
            first = known.setdefault(key, facts)
            if differ := [name for name in facts if facts[name] != first[name]]:
                yield index, f"another record of its content key has other {list_named(differ, NAMED)}"


def _facts(record: Record) -> dict[str, object]:
    environment: Any = record.get("environment") or {}
    weights = record["model"]["weights"]
    facts: dict[str, object] = {name: record.get(name) for name in _OF_KEY}
    facts |= {name: weights.get(name) for name in ("fingerprint", "quant", "header")}
    facts |= {name: record["model"].get(name) for name in ("name", "shape")}
    return facts | {name: environment.get(name) for name in ("name", "lock", "variables")}


def copies(found: Sequence[Evidence]) -> Iterator[Finding]:
    """The records that are of one process with one before them."""
    begun: dict[object, str] = {}
    starts: dict[object, str] = {}
    series: dict[bytes, str] = {}
    for index, each in enumerate(found):
        record = each.record
        if each.is_reported:
            continue
        identity = (record["machine"]["slug"], record["content_key"], record["started_utc"])
        if (other := begun.setdefault(identity, each.name)) != each.name:
            yield index, f"it began at the same moment as {other}: a copy"
        own = each.times.latency_ns.tobytes()
        if len(each.times) >= LEAST_TOKENS and (other := series.setdefault(own, each.name)) != each.name:
            yield index, f"its series is that of {other}: a copy"
        start = done_of(record).get("start_ns")
        if (
            start is not None
            and (other := starts.setdefault((record["machine"]["slug"], start), each.name)) != each.name
        ):
            yield index, f"its tokens began at the same nanosecond as those of {other}: a copy"


def _machines(found: Sequence[Evidence]) -> Iterator[Finding]:
    known: dict[str, tuple[str, dict[str, object]]] = {}
    for index, each in enumerate(found):
        if each.is_reported:
            continue
        machine: Any = each.record["machine"]
        facts = checks.machine_facts(machine)
        name, first = known.setdefault(machine["slug"], (each.name, facts))
        if differ := [key for key in facts if facts[key] != first[key]]:
            yield index, f"its machine is called as that of {name}, but has other {list_named(differ, NAMED)}"


def _places(found: Sequence[Evidence]) -> Iterator[Finding]:
    """Every run of a campaign has its place in the order; whoever leaves a slow one out leaves a gap."""
    campaigns: dict[str, dict[int, int]] = {}
    for index, each in enumerate(found):
        place: Any = each.record.get("place_in_order")
        if place is None or each.record["kind"] != "measured":
            continue
        if not (isinstance(place, list) and len(place) == 2 and all(type(of) is int for of in place)):
            yield index, "its place in the order is no pair of numbers"
            continue
        places = campaigns.setdefault(each.record["campaign"]["id"], {})
        if place[0] in places:
            yield index, f"{found[places[place[0]]].name} has the same place in the order of its campaign"
        places.setdefault(place[0], index)
    for places in campaigns.values():
        last = max(places)
        total = max(found[index].record["place_in_order"][1] for index in places.values())
        if missing := [str(at) for at in range(1, last) if at not in places]:
            runs = f"run{'s' if len(missing) > 1 else ''} {list_named(missing, NAMED)} of {total}"
            yield places[last], f"of its campaign {runs} {'are' if len(missing) > 1 else 'is'} missing"
    repeats = Counter(
        (
            each.record["campaign"]["id"],
            each.record["content_key"],
            each.record["repeat"],
            each.record.get("attempt", 1),
        )
        for each in found
        if each.record["kind"] == "measured"
    )
    for index, each in enumerate(found):
        record = each.record
        key = (record["campaign"]["id"], record["content_key"], record["repeat"], record.get("attempt", 1))
        if repeats.pop(key, 0) > 1:
            yield index, f"its campaign has repeat {record['repeat']} of its cell twice"


def _overlaps(found: Sequence[Evidence]) -> Iterator[Finding]:
    """One device runs one worker at a time."""
    ran: dict[object, list[tuple[datetime, float, int]]] = {}
    for index, each in enumerate(found):
        record = each.record
        wall_s = (record.get("timing") or {}).get("wall_s")
        if record["kind"] == "measured" and wall_s:
            device = (record["machine"]["slug"], record.get("device"))
            ran.setdefault(device, []).append((datetime.fromisoformat(record["started_utc"]), wall_s, index))
    for spans in ran.values():
        spans.sort(key=lambda span: span[0])
        for (began, wall_s, a), (next_began, _, b) in pairwise(spans):
            if next_began + timedelta(seconds=SLACK_S) < began + timedelta(seconds=wall_s):
                yield b, f"it began while {found[a].name} still ran on that device"


# Read a stranger's bundle, compute every figure and verdict anew, and report whether to trust the bundle.
#
# A bundle is refused for traces that no honest run leaves. Records that are not ok are not refused: they
# are shown with their status. Forgery without a contradiction cannot be found: docs/guide/share.md lists
# the forgeries that pass.


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
    records: list[dict[str, object]] = field(default_factory=list)

    @property
    def accepted(self) -> bool:
        return not self.reasons

    def json(self) -> dict[str, object]:
        return {"accepted": self.accepted, **asdict(self)}


def verify(path: Path, beside: Sequence[Path] = ()) -> Verification:
    """Check a bundle, which must have no record of the other bundles `beside` it. Raises NotABundle; also
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
        (Reason(names[index], text) for index, text in check_together(evidence, unknown)),
        (Reason(among[at].name, text) for at, text in copies(among) if at >= len(others)),
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
        yield "it names a path, an address, a serial number or a UUID: harness share --bundle did not make it"


def _figures(
    stored: Sequence[Stored], names: Sequence[str], claimed: object, records: list[dict[str, object]]
) -> Iterator[Reason]:
    """Computes all figures again, adds them to `records`, and reports differing claims."""
    gathered = load_study(stored)
    yield from (Reason(None, warning) for warning in gathered.warnings)
    computed = bundle.figures_of(stored, gathered)
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
        yield from (Reason(name, text) for text in bundle.figure_differences(claim, of))


CHECKS: tuple[Check, ...] = (_anonymous, checks.check)
