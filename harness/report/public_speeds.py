"""Public speeds as tables: the share of the ceiling reached, by machine, and every row."""

from __future__ import annotations

import json as json_format
import statistics
from collections.abc import Sequence

from harness.base.text import csv_of, plural
from harness.report.text_table import NONE, Table
from harness.theory.public_speeds import COLUMNS, PublicSpeed, used

MEANING = (
    "Speeds that others measured and published, each with its source; none was measured or repeated here.",
    "Share: of the most tokens per second that the machine's data sheet allows, for these weights and this"
    " context (decode) or prompt (prefill), the median and the range; see harness theory.",
    "--format csv and json have every row; a suspicious one has its reason, and is used nowhere.",
)
OF_PREFILL = ("prefills", "prefill share", "prefill range")
HEADINGS = ("machine", "maker", "run by", "years", "decodes", "share", "range", *OF_PREFILL)


def lead(rows: Sequence[PublicSpeed]) -> str:
    """How much there is."""
    machines, sources = ({row.device.name for row in rows}, {row.source for row in rows})
    return (
        f"{plural(len(rows), 'row')} of {plural(len(machines), 'machine')}, from"
        f" {plural(len(sources), 'source')}; {len(rows) - len(used(rows))} of them suspicious."
    )


def by_machine(rows: Sequence[PublicSpeed]) -> Table:
    """A line per machine, of the rows that are used; in the order of makers."""
    machines: dict[str, list[PublicSpeed]] = {}
    for row in sorted(used(rows), key=lambda row: (row.maker, row.device.name)):
        machines.setdefault(row.device.name, []).append(row)
    lines = []
    for name, of_machine in machines.items():
        years = sorted({str(row.year) for row in of_machine if row.year}) or [NONE]
        families = ", ".join(sorted({row.family for row in of_machine}))
        decodes = [share for row in of_machine if (share := row.share)]
        prefills = [share for row in of_machine if (share := row.prompt_share)]
        span = " to ".join(dict.fromkeys((years[0], years[-1])))
        lines.append([name, of_machine[0].maker, families, span, *_shares(decodes), *_shares(prefills)])
    return Table(HEADINGS, lines)


def _shares(shares: Sequence[float]) -> list[str]:
    """How many, their median, and their range."""
    if not shares:
        return [NONE] * 3
    return [str(len(shares)), f"{statistics.median(shares):.0%}", f"{min(shares):.0%} to {max(shares):.0%}"]


def terminal(rows: Sequence[PublicSpeed]) -> str:
    lines = by_machine(rows).fitted(wide=False)[0].text()
    return "\n".join([lead(rows), *lines, *MEANING]) + "\n"


def markdown(rows: Sequence[PublicSpeed]) -> str:
    return "\n\n".join([lead(rows), by_machine(rows).markdown(), *MEANING]) + "\n"


def csv(rows: Sequence[PublicSpeed]) -> str:
    """One line per row, figures in full precision, empty if unknown."""
    return csv_of(list(map(_fields, rows)))


def json(rows: Sequence[PublicSpeed]) -> str:
    return json_format.dumps(list(map(_fields, rows)), indent=1, allow_nan=False) + "\n"


def _fields(row: PublicSpeed) -> dict[str, object]:
    """The columns of the data, with what follows from them."""
    device = row.device
    fields: dict[str, object] = {
        "model": row.name,
        "machine": device.name,
        "memory_gib": device.memory.value / 2**30 or None,
        "bandwidth_gb_per_s": device.data_sheet_bytes_per_s / 1e9,
    }
    columns = {name: fields[name] if name in fields else getattr(row, name) for name in COLUMNS}
    computed = ("maker", "ceiling_tok_s", "share", "prompt_ceiling_tok_s", "prompt_share")
    return columns | {name: getattr(row, name) for name in computed}
