"""What a record must hold of the machine's sensors, and of cooling down: forms of types. Pure."""

from __future__ import annotations

from harness.results.values import COUNT, FROM_0, NUMBER, POSITIVE, SWITCH, TEXT, Form, Maybe

SENSORS: Form = {
    "missing": {...: TEXT},
    "interval_ms": POSITIVE,
    "timed": {...: {"lowest": NUMBER, "median": NUMBER, "highest": NUMBER}},
    "throttled": [
        {"source": TEXT, "what": TEXT, "from_n": POSITIVE, "to_n": POSITIVE}
        | dict.fromkeys(("samples", "of_samples", "ms", "events"), Maybe(COUNT))
    ],
    "energy": Maybe(
        {
            **dict.fromkeys(("timed_s", "window_s", "tokens", "longest_gap_s"), FROM_0),
            "domains": {
                ...: {"name": TEXT, "joules": Maybe(FROM_0), "failed_reads": COUNT, "set_back": COUNT}
            },
        }
    ),
}
COOLED: Form = {"missing?": TEXT, "reached?": SWITCH} | dict.fromkeys(
    ("from_c?", "to_c?", "waited_s?"), NUMBER
)
