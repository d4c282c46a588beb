"""Match cells of two sides that differ in the path of their weights alone, or say what else differs. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from harness.analysis.records.identity import weights_content
from harness.compare.sides import Key
from harness.results import Record
from harness.system.wording import named

NOT_ASKED = ("prompt", "prompt_source")  # of a workload: they follow from the weights
NAMES_SHOWN = 3


def same_weights(before: Mapping[Key, Record], after: Mapping[Key, Record]) -> dict[Key, Key]:
    """By key of a new cell, that of the baseline's cell with weights of the same content, and all else as it
    is; without those that both sides have, and where several would do."""
    theirs = _by_content({key: record for key, record in before.items() if key not in after})
    ours = _by_content({key: record for key, record in after.items() if key not in before})
    return {
        keys[0]: theirs[what][0] for what, keys in ours.items() if len(keys) == len(theirs.get(what, ())) == 1
    }


def _by_content(records: Mapping[Key, Record]) -> dict[str, list[Key]]:
    found: dict[str, list[Key]] = {}
    for key, record in records.items():
        if content := weights_content(record):
            what = [key[:2], record["stack"], record["variant"], content, _options(record), _workload(record)]
            found.setdefault(json.dumps(what, sort_keys=True), []).append(key)
    return found


def path(record: Record) -> str:
    """Of its weights."""
    return str(record["model"]["weights"].get("file"))


def difference(one: Record, other: Record) -> str:
    """What two cells of one name have apart, as `other weights (a.gguf and b.gguf)`."""
    found = []
    contents = [weights_content(each) for each in (one, other)]
    if None not in contents and contents[0] != contents[1]:
        found.append(f"other weights ({path(one)} and {path(other)})")
    for what, of in (("other options", _options), ("another workload", _workload)):
        if values := [*_apart(of(one), of(other))]:
            found.append(f"{what} ({named(values, NAMES_SHOWN)})")
    return " and ".join(found) or "another config"


def _apart(one: Mapping[str, object], other: Mapping[str, object]) -> Iterator[str]:
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            yield f"{name}: {one.get(name, 'default')} and {other.get(name, 'default')}"


def _options(record: Record) -> Mapping[str, object]:
    options: Mapping[str, object] = record["asked"]["options"]
    return options


def _workload(record: Record) -> dict[str, object]:
    return {name: value for name, value in record["workload"].items() if name not in NOT_ASKED}
