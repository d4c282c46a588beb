"""Refresh what pages of docs/ take from the code: tables, folders, and with matplotlib figures.

`.venv/bin/python docs/refresh.py` rewrites what stands between the pages' markers;
`uv run --no-project --with matplotlib --with-editable . docs/refresh.py --figures` also draws docs/figures/.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.analysis.figures import FIGURES
from harness.analysis.warnings import Warnings
from harness.machine.doctor import TABLES
from harness.machine.sensors import SENSORS
from harness.records import schema
from harness.theory import floors, published
from harness.theory.hf_config import SHAPES
from harness.theory.known_models import Known
from harness.theory.machines import MACHINES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = sorted(DOCS.rglob("*.md"))
SCHEMA = DOCS / "record.schema.json"


def refreshed(page: str) -> str:
    """The page with all that stands between `<!-- name -->` and `<!-- end -->` made anew."""
    blocks = {
        "folders": folders,
        "controller": lambda: layers("harness"),
        "worker": lambda: layers("runners"),
        "warnings": warnings,
        "checks": checks,
        "sensors": sensors,
        "models": models,
        "slips": slips,
        "figures": columns,
    }

    def made(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n{blocks[found[1]]()}<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


def models() -> str:
    """The models known by name, a line for each family, and one for families of one model."""
    families: dict[str, list[str]] = {}
    for name in Known():
        families.setdefault(name.partition("-")[0], []).append(name.partition("-")[2])
    several, alone = [], []
    for family, rest in families.items():
        if len(rest) > 1:
            several.append(f"- `{family}-`: {', '.join(rest)}\n")
        else:
            alone.append(f"`{'-'.join(filter(None, (family, *rest)))}`")
    return "".join([*several, f"- {', '.join(alone)}\n"])


def slips() -> str:
    """Cells of the published study that its own formulas do not give."""
    rows = [
        {
            "table": each.table,
            "row": each.row,
            "column": each.column,
            "printed": each.printed,
            "why not": each.why,
        }
        for table in published.STUDY_TABLES
        for each in published.compared(table)[1]
    ]
    return markdown(rows)


def columns() -> str:
    """Every figure by its heading, its column in SQL and CSV, and its meaning; in order of importance."""
    return markdown(
        [
            {"heading": figure.label, "column": f"`{figure.name}`", "meaning": figure.meaning}
            for figure in FIGURES
        ]
    )


def warnings() -> str:
    """Every warning by its effect: its code and sentence; its numbers by their names."""
    tables = []
    for effect in dict.fromkeys(warning.effect for warning in Warnings):
        rows = [
            {"code": f"`{warning.name}`", "cause": warning.sentence}
            for warning in Warnings
            if warning.effect == effect
        ]
        tables.append(f"\n### {effect[0].upper()}{effect[1:]}\n\n{markdown(rows)}")
    return "".join(tables)


def checks() -> str:
    """Every check of `harness doctor` by its subject: where it is read, what is a warning, and the fix."""
    return "".join(
        f"\n### {heading}\n\n"
        + markdown(
            [
                {
                    "code": f"`{check.code}`",
                    "finding": check.what,
                    "read from": check.where,
                    "warning if": check.bound,
                    "fix": check.fix or "",
                }
                for check in table
            ]
        )
        for heading, table in TABLES
    )


def sensors() -> str:
    """Every sensor: its columns, where they are read, and what they mean."""
    return markdown(
        [
            {
                "columns": ", ".join(f"`{column}`" for column in sensor.columns),
                "source": sensor.where,
                "meaning": sensor.meaning,
            }
            for sensor in SENSORS
        ]
    )


def layers(container: str) -> str:
    """The folders of one side as import-linter's contract has them, the importing ones above."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each.get("containers") == [container])
    return "```\n" + "\n   |\n".join(contract["layers"]) + "\n```\n"


def folders() -> str:
    """Each folder of modules, with the first sentence of its __init__."""
    rows = []
    for package in sorted([*ROOT.glob("harness/**/__init__.py"), *ROOT.glob("runners/**/__init__.py")]):
        docstring = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or ""
        sentence = " ".join(re.split(r"(?<=[.?!])\s", docstring, maxsplit=1)[0].split()).rstrip(".")
        rows.append({"folder": f"`{package.parent.relative_to(ROOT)}/`", "owns": sentence})
    return markdown(rows)


def record_schema() -> str:
    """docs/record.schema.json."""
    return json.dumps(schema.json_schema(), indent=1) + "\n"


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |\n"

    def cell(value: Any) -> str:
        if value is None:
            return ""
        if not isinstance(value, float):
            return str(value).replace("|", r"\|")
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

    heading = list(rows[0])
    body = [line([cell(value) for value in row.values()]) for row in rows]
    return line(heading) + line(["---"] * len(heading)) + "".join(body)


def draw() -> None:
    """docs/figures/*.svg, the same bytes each time."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {
        "svg.hashsalt": "harness",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.right": False,
        "axes.spines.top": False,
    }
    card = MACHINES["rtx-4090"]
    ceiling = floors.Ceiling(card.bandwidth.value, card.rates[card.rate].value)

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    lengths = sorted({round(10 ** (i / 25)) for i in range(113)})
    for panel, name, title in zip(
        panels, ("qwen1.5-32b-mha", "qwen1.5-32b"), ("without GQA", "with GQA (5 groups)"), strict=True
    ):
        for bits in (16, 8, 4):
            needs = floors.demand_of_bits(SHAPES[name], bits)
            per_token = [floors.prefill_floor_s(needs, ceiling, n, kv_block=1) / n * 1e3 for n in lengths]
            (drawn,) = panel.loglog(lengths, per_token, label=f"w{bits}")
            for knee in floors.prefill_knees(needs, ceiling) or ():
                if knee is not None:
                    at = floors.prefill_floor_s(needs, ceiling, round(knee), kv_block=1) / knee * 1e3
                    panel.plot([knee], [at], "o", markersize=4, color=drawn.get_color())
        panel.set(title=f"Qwen1.5-32B {title}", xlabel="prompt length, tokens")
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    panels[0].set_ylabel("ms per prompt token")
    _save(figure, "prefill")

    figure, panel = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    chunks = sorted({round(2 ** (i / 4)) for i in range(49)})
    for bits in (16, 8, 4):
        needs = floors.demand_of_bits(SHAPES["qwen1.5-14b"], bits)
        whole = floors.prefill_floor_s(needs, ceiling, 4096)
        ratios = [floors.prefill_floor_s(needs, ceiling, 4096, chunk=chunk) / whole for chunk in chunks]
        (drawn,) = panel.loglog(chunks, ratios, label=f"w{bits}")
        knees = floors.prefill_knees(needs, ceiling)
        if knees:
            panel.axvline(knees[0], color=drawn.get_color(), linewidth=0.8, linestyle=":")
    panel.set(
        title="Qwen1.5-14B, a prompt of 4096 tokens (dotted: first knee)",
        xlabel="chunk, tokens",
        ylabel="time over that of one pass",
    )
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    _save(figure, "chunked")


def _save(figure: Any, name: str) -> None:
    figure.savefig(DOCS / "figures" / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(refreshed(each.read_text(encoding="utf-8")), encoding="utf-8")
    SCHEMA.write_text(record_schema(), encoding="utf-8")
    if "--figures" in sys.argv:
        draw()
