"""The records of a bundle against each other: copies, overlaps, missing runs, content keys. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from harness.results.kinds import Record, done_of
from harness.sharing import keys
from harness.sharing.checks.evidence import Evidence
from harness.system.wording import named

NAMED = 5
LEAST_TOKENS = 8  # of a series that no other run has to the nanosecond
# Of a machine, between the end of one worker and the begin of the next: its clock may be set back by so much.
SLACK_S = 1.0
# Facts that a content key is made of, and those of a machine that never change.
_OF_KEY = ("cell", "stack", "variant", "options", "threads")
_OF_MACHINE = ("cpu", "architecture", "physical_cores", "memory_bytes", "last_level_cache_bytes", "gpus")

Finding = tuple[int, str]
"""The index of a record, and what is wrong with it."""


def check(found: Sequence[Evidence], unknown_keys: Sequence[object]) -> Iterator[Finding]:
    """What the records contradict, one sentence each. `unknown_keys`: content keys that the bundle says
    cannot be recomputed."""
    yield from _keys(found, unknown_keys)
    yield from _machines(found)
    yield from _places(found)
    yield from _overlaps(found)


def _keys(found: Sequence[Evidence], unknown: Sequence[object]) -> Iterator[Finding]:
    known: dict[str, dict[str, Any]] = {}
    for index, each in enumerate(found):
        record, key = each.record, each.record["content_key"]
        if each.is_reported:
            continue
        again = keys.shared(record)
        if again not in (None, key) and key not in unknown:
            yield index, f"its content key {key} is not that of its facts, which give {again}"
        if "options" in record and record["kind"] == "measured":
            facts = _facts(record)
            first = known.setdefault(key, facts)
            if differ := [name for name in facts if facts[name] != first[name]]:
                yield index, f"another record of its content key has other {named(differ, NAMED)}"


def _facts(record: Record) -> dict[str, Any]:
    environment: Any = record.get("environment") or {}
    weights = record["model"]["weights"]
    facts: dict[str, Any] = {name: record.get(name) for name in _OF_KEY}
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
        own = each.times.gaps_ns.tobytes()
        if len(each.times) >= LEAST_TOKENS and (other := series.setdefault(own, each.name)) != each.name:
            yield index, f"its series is that of {other}: a copy"
        start = done_of(record).get("start_ns")
        if (
            start is not None
            and (other := starts.setdefault((record["machine"]["slug"], start), each.name)) != each.name
        ):
            yield index, f"its tokens began at the same nanosecond as those of {other}: a copy"


def _machines(found: Sequence[Evidence]) -> Iterator[Finding]:
    known: dict[str, tuple[str, dict[str, Any]]] = {}
    for index, each in enumerate(found):
        if each.is_reported:
            continue
        machine: Any = each.record["machine"]
        facts = {name: machine.get(name) for name in _OF_MACHINE}
        for gpu in facts["gpus"] or []:  # a driver may be updated
            facts["gpus"] = [{k: v for k, v in gpu.items() if k != "driver"} for gpu in facts["gpus"]]
            break
        name, first = known.setdefault(machine["slug"], (each.name, facts))
        if differ := [key for key in facts if facts[key] != first[key]]:
            yield index, f"its machine is called as that of {name}, but has other {named(differ, NAMED)}"


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
            runs = f"run{'s' if len(missing) > 1 else ''} {named(missing, NAMED)} of {total}"
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
