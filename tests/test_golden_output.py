"""What users see of the published study and of stored records of our own, frozen in tests/golden/output.

`HARNESS_GOLDEN=write pytest tests/test_golden_output.py` writes the files anew; the changelog says why.
"""

import io
import itertools
import json
import math
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, Ran

OUTPUT = ROOT / "tests" / "golden" / "output"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
SCRIPTS = re.compile(r'<script type="application/json"[^>]*>(.*?)</script>', re.DOTALL)
Harness = Callable[..., Ran]


def demo(folder: Path) -> Path:
    """Records of every workload, of llama.cpp and the fake stack on a CPU."""
    with tarfile.open(fileobj=_unzipped(ROOT / "tests" / "golden" / "bundle-1.tar.zst")) as bundle:
        for member in bundle.getmembers():
            if member.name.startswith("records/"):
                bundle.extract(member, folder)
    return Path("records")  # of the folder in which commands run: no text is as long as a path


def _unzipped(path: Path) -> io.BytesIO:
    with pa.CompressedInputStream(pa.OSFile(str(path)), "zstd") as stream:
        return io.BytesIO(stream.read())


def cards(folder: Path, slower: float = 1.0) -> Path:
    """Records of a GPU, as if they had lasted long enough to know the energy. `slower`: factor of each
    latency and of the joules."""
    shutil.copytree(ROOT / "tests" / "cards", folder)
    for path in folder.glob("*/*/*/*/record.json"):
        record = json.loads(path.read_text())
        energy = record["sensors"]["energy"]
        energy["domains"]["gpu_energy_mj"]["joules"] *= 40 / energy["window_s"] * slower
        energy["tokens"] *= 40 / energy["window_s"]
        energy["timed_s"] = energy["window_s"] = 40.0
        record["idle_power"] = {"watts": 75.0, "window_s": 5.0}
        if slower != 1.0:
            record["campaign"]["id"] = record["campaign"]["id"].replace("2026-11-26", "2026-11-27")
            record["started_utc"] = record["started_utc"].replace("2026-11-26", "2026-11-27")
            tokens = pq.read_table(path.parent / "tokens.parquet")
            for name in ("latency_ns", "device_ns"):
                at = tokens.schema.get_field_index(name)
                if at >= 0:
                    values = [value and int(value * slower) for value in tokens[name].to_pylist()]
                    tokens = tokens.set_column(at, tokens.schema.field(at), [values])
            pq.write_table(tokens, path.parent / "tokens.parquet")
        path.write_text(json.dumps(record))
    return folder


def nine_digits(text: str) -> float:
    """Of a figure whose last digits depend on the machine, and with them where a line is cut."""
    return float(f"{float(text):.9g}")


def summary(rows: list[dict[str, Any]]) -> str:
    """A line for each column: how many rows have a value, and the mean of numbers, or the texts."""
    lines = []
    rows = json.loads(json.dumps(rows), parse_float=nine_digits)
    for name in sorted({name for row in rows for name in row}):
        values = [row[name] for row in rows if row.get(name) not in (None, [])]
        numbers = [value for value in values if isinstance(value, (int, float))]
        if numbers:
            lines.append(f"{name}: {len(values)}, mean {math.fsum(numbers) / len(numbers):.9g}")
        else:
            texts = {json.dumps(value)[:90] for value in values if name not in ("series", "ok_series")}
            lines.append(f"{name}: {len(values)}, {' | '.join(sorted(texts))[:300]}")
    return "\n".join(lines) + "\n"


def page(html: str) -> str:
    """The answers and tables of a page as text, and the first values of its figures."""
    figures = [json.loads(text, parse_float=nine_digits) for text in SCRIPTS.findall(html)]
    text = re.sub(r"<(script|style|svg).*?</\1>", " ", html, flags=re.DOTALL)
    text = re.sub(r"[ \t]*\n\s*", "\n", re.sub(r"<[^>]+>", "\n", text))
    return text + "\n".join(json.dumps(figure)[:1500] for figure in figures) + "\n"


def study_tables(harness: Harness, tmp_path: Path) -> str:
    return harness("report", "published", "--format", "md").out


def study_cells(harness: Harness, tmp_path: Path) -> str:
    return harness("report", "published", "--format", "csv").out


def study_columns(harness: Harness, tmp_path: Path) -> str:
    return summary(harness("report", "published", "--format", "json").json)


def study_export(harness: Harness, tmp_path: Path) -> str:
    """The first repeats, and how many there are."""
    lines = harness("report", "published", "--export", "csv").out.splitlines()
    return "\n".join([*lines[:12], str(len(lines)), ""])


def demo_list(harness: Harness, tmp_path: Path) -> str:
    return harness("report", demo(tmp_path), "--list", "--wide").out


def demo_rows(harness: Harness, tmp_path: Path) -> str:
    return summary(harness("report", demo(tmp_path), "--list", "--json").json)


def demo_page(harness: Harness, tmp_path: Path) -> str:
    harness("report", demo(tmp_path), "-o", "page.html")
    return page((tmp_path / "page.html").read_text())


def demo_card(harness: Harness, tmp_path: Path) -> str:
    return harness("share", demo(tmp_path)).out


def cards_list(harness: Harness, tmp_path: Path) -> str:
    found = cards(tmp_path / "cards")
    return harness("report", found, "--list", "--wide", "--price", "0.3").out


def cards_page(harness: Harness, tmp_path: Path) -> str:
    harness("report", cards(tmp_path / "cards"), "--price", "0.3", "-o", "page.html")
    return page((tmp_path / "page.html").read_text())


def cards_export(harness: Harness, tmp_path: Path) -> str:
    return harness("report", cards(tmp_path / "cards"), "--export", "csv").out


def machines(harness: Harness, tmp_path: Path) -> str:
    """Of two machines."""
    return harness("report", cards(tmp_path / "cards"), demo(tmp_path), "--format", "md").out


def compare(harness: Harness, tmp_path: Path) -> str:
    """Of one campaign's cells with their copy, a quarter slower."""
    folders = cards(tmp_path / "base"), cards(tmp_path / "new", slower=1.25)
    for path in [
        path for folder in folders for path in folder.glob("*/*/*") if ".llamacpp." not in path.name
    ]:
        shutil.rmtree(path)
    compared = harness("compare", *folders, "--wide")
    return compared.out + summary(harness("compare", *folders, "--format", "json").json)


def sql(harness: Harness, tmp_path: Path) -> str:
    found = cards(tmp_path / "cards")
    queries = (
        *("describe cells", "describe repeats", "describe nights"),
        "from nights order by cell, device",
        "select cell, joules_per_token, flags from cells order by 1",
    )
    return "\n".join(harness("sql", query, found, "--csv").out for query in queries)


def codes(harness: Harness, tmp_path: Path) -> str:
    """Commands, their exit codes, and what they say on standard error."""
    own, other = cards(tmp_path / "cards"), demo(tmp_path)
    commands = (
        *itertools.product(["report"], [own, other, "published", "nowhere"], ["--list"]),
        *itertools.product(["report"], [own, other, "published", "nowhere"], ["--format"], ["csv"]),
        *itertools.product(["share"], [own, other, "nowhere"]),
        ("compare", own, own),
        ("compare", own, other),
        ("compare", "published", own),
        ("report", own, "--price", "0.3", "--list"),
        ("report", own, "--history"),
        ("sql", "select joules from cells", own),
        ("sql", "select 1", "nowhere"),
    )
    lines = []
    for command in commands:
        ran = harness(*command)
        lines.append(f"{ran.code} {' '.join(map(str, command))}\n{ran.err}")
    return "\n".join(lines)


FILES = {
    "study_tables.md": study_tables,
    "study_cells.csv": study_cells,
    "study_columns.txt": study_columns,
    "study_export.csv": study_export,
    "demo_list.txt": demo_list,
    "demo_rows.txt": demo_rows,
    "demo_page.txt": demo_page,
    "demo_card.md": demo_card,
    "cards_list.txt": cards_list,
    "cards_page.txt": cards_page,
    "cards_export.csv": cards_export,
    "machines.md": machines,
    "compare.txt": compare,
    "sql.csv": sql,
    "codes.txt": codes,
}


@pytest.mark.parametrize("name", FILES)
def test_what_users_see_is_as_it_was(name, harness, tmp_path):
    shown = FILES[name](harness, tmp_path).replace(str(tmp_path), "(folder)").replace(str(ROOT), "(harness)")
    path = OUTPUT / name
    if os.environ.get("HARNESS_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown)
    before, now = path.read_text().splitlines(), shown.splitlines()
    for number, (expected, line) in enumerate(itertools.zip_longest(before, now, fillvalue=""), start=1):
        if expected != line:  # the last digits of figures depend on the versions of libraries
            assert NUMBER.split(line) == NUMBER.split(expected), f"{name}:{number}"
            figures = [[*map(float, NUMBER.findall(text))] for text in (line, expected)]
            assert figures[0] == pytest.approx(figures[1], rel=1e-6, abs=1e-12), f"{name}:{number}"
