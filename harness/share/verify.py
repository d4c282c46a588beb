"""`harness share --verify`: compute every figure of a stranger's bundle again, and compare.

A bundle is refused where its records contradict what is computed of them. Records that are not ok are not
refused: they are shown with their status. Forgery without a contradiction cannot be found;
docs/guide/share.md lists the forgeries that pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness.base.files import FAULTS
from harness.base.text import plural, shortened
from harness.dataset import checks
from harness.dataset.checks import Evidence
from harness.dataset.study import load_study
from harness.records import ResultsError, Stored
from harness.share import read_bundle
from harness.share.anonymize import Anonymizer
from harness.share.bundle import RECORD, Bundle, Tampered, folder_of
from harness.share.recomputed import differences, figures_of, shared_key

LEAST_TOKENS = 8  # of a series that no other run has to the nanosecond


@dataclass(frozen=True)
class Reason:
    """Why a bundle is refused. `record`: its folder in the bundle; None: the bundle as a whole."""

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
    others: list[Evidence] = []
    for other in beside:
        with read_bundle.as_folder(other) as folder:
            others += [
                _read(each, f"{other.name}, {each.folder.name}") for each in read_bundle.records_in(folder)
            ]
    verification = Verification()
    try:
        with read_bundle.opened(path) as opened:
            _verify(opened, others, verification)
    except Tampered as damage:
        verification.reasons.append(Reason(None, str(damage)))
    return verification


def _verify(opened: Bundle, others: Sequence[Evidence], verification: Verification) -> None:
    stored = read_bundle.records_in(opened.folder)
    names = [result.folder.relative_to(opened.folder).as_posix() for result in stored]
    manifest = opened.manifest
    if names != [folder_of(number) for number in range(1, len(names) + 1)] or not names:
        raise Tampered(f"its records are not numbered from 1 without a gap, each with a {RECORD}")
    if manifest.get("records") != len(names):
        claimed = shortened(str(manifest.get("records")))
        raise Tampered(f"it has {plural(len(names), 'record')}, but its manifest claims {claimed}")
    unknown = manifest.get("keys_not_recomputed")
    unknown = unknown if isinstance(unknown, list) else []
    evidence = [_read(result, name) for result, name in zip(stored, names, strict=True)]
    for part in (
        *(_of_record(each, unknown) for each in evidence),
        _copies([*others, *evidence], len(others)),
        _of_figures(stored, names, manifest.get("figures"), verification.records),
    ):
        try:
            verification.reasons.extend(part)
        except (*FAULTS, RecursionError) as fault:
            strange = f"a record has values that no run leaves ({type(fault).__name__})"
            verification.reasons.append(Reason(None, strange))
    not_keyed = sum(each.record["content_key"] in unknown for each in evidence if not each.is_reported)
    if not_keyed:
        verification.notes.append(f"the content keys of {plural(not_keyed, 'record')} cannot be recomputed")


def _read(stored: Stored, name: str) -> Evidence:
    try:
        return Evidence.of(stored, name)
    except ResultsError as damage:
        raise Tampered(str(damage).replace(f"{stored.folder}", name)) from damage


def _of_record(evidence: Evidence, unknown: Sequence[object]) -> Iterator[Reason]:
    """`unknown`: content keys that the bundle declares as not recomputable."""
    record, name = evidence.record, evidence.name
    if Anonymizer().value(record) != record:
        yield Reason(
            name,
            "it names a path, an address, a serial number or a UUID: harness share --bundle did not make it",
        )
    for text in checks.check(evidence):
        yield Reason(name, text)
    key, computed = record["content_key"], shared_key(record)
    if not evidence.is_reported and computed not in (None, key) and key not in unknown:
        yield Reason(name, f"its content key {key} is not that of its facts, which give {computed}")


def _copies(evidence: Sequence[Evidence], accepted: int) -> Iterator[Reason]:
    """Records of a run that an earlier record is of; the first ones, of other bundles, are `accepted`."""
    names: dict[object, str] = {}
    for index, each in enumerate(evidence):
        if each.is_reported:
            continue
        record = each.record
        begun = (record["machine"]["slug"], record["content_key"], record["started_utc"])
        traces: dict[object, str] = {begun: "it began at the same moment as {}: a copy"}
        if len(each.times) >= LEAST_TOKENS:
            traces[each.times.latency_ns.tobytes()] = "its series is that of {}: a copy"
        for trace, sentence in traces.items():
            if (other := names.setdefault(trace, each.name)) != each.name and index >= accepted:
                yield Reason(each.name, sentence.format(other))


def _of_figures(
    stored: Sequence[Stored], names: Sequence[str], claimed: object, rows: list[dict[str, object]]
) -> Iterator[Reason]:
    """Computes all figures again, adds them to `rows`, and reports differing claims."""
    study = load_study(stored)
    yield from (Reason(None, warning) for warning in study.warnings)
    computed = figures_of(stored, study)
    repeats = {result.folder: row for row, result in zip(study.repeats, study.stored, strict=True)}
    for result, name, figures in zip(stored, names, computed, strict=True):
        record, row = result.record, repeats.get(result.folder)
        known = {"cell": record["cell"], "repeat": record["repeat"], "kind": record["kind"]}
        # as the page shows them: B and W are withheld where cells show that they mean nothing
        withheld = {"B_ms": row["B_ms"], "W_tokens_per_ms": row["W_tokens_per_ms"]} if row else {}
        reasons = row["reasons"] if row else []
        rows.append({"record": name, **known, **figures, **withheld, "reasons": reasons})
    claims = claimed if isinstance(claimed, list) else []
    if len(claims) != len(computed) or not all(isinstance(claim, dict) for claim in claims):
        yield Reason(None, "its manifest does not have the figures of each record")
        return
    for name, claim, figures in zip(names, claims, computed, strict=True):
        yield from (Reason(name, text) for text in differences(claim, figures))
