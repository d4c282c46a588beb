"""Refresh what docs/theory.md takes from the code: its tables, and with matplotlib its figures.

`.venv/bin/python docs/refresh.py` rewrites the tables between the page's markers;
`uv run --no-project --with matplotlib --with-editable . docs/refresh.py --figures` also draws docs/figures/.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.theory import demand, floors, llama_arithmetic, published
from harness.theory.families import SHAPES
from harness.theory.machines import MACHINES

DOCS = Path(__file__).parent
PAGE = DOCS / "theory.md"


def refreshed(page: str) -> str:
    """The page with every table between `<!-- name -->` and `<!-- end -->` made anew."""

    def made(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n{markdown(_rows(found[1]))}<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


def _rows(name: str) -> Sequence[dict[str, Any]]:
    if name == "slips":
        return [
            {"table": table, "row": row, "column": column, "printed": cell, "why not": reason}
            for (table, row, column), (cell, reason) in published.SLIPS.items()
        ]
    if name in llama_arithmetic.TABLES:
        return llama_arithmetic.TABLES[name]()
    rows = published.TABLES[name]()
    if name.startswith("gguf_") and "gguf_type" in rows[0]:
        return _per_model(rows)
    if "weight_bits" in rows[0]:
        return _per_bits(rows)
    return rows


def _per_model(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """A row per model, a column per GGUF type."""
    wide: dict[str, dict[str, str]] = {}
    for row in rows:
        figures = [v for k, v in row.items() if k not in ("model", "gguf_type", "printed_unit")]
        wide.setdefault(row["model"], {"model": row["model"]})[row["gguf_type"]] = " / ".join(
            dict.fromkeys(figures)
        )
    return list(wide.values())


def _per_bits(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """A row per model (and lm_head), a column per width of the weights."""
    wide: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        same = {k: v for k, v in row.items() if k in ("model", "lm_head_on_tokens", "W_tokens_per_ms")}
        figures = [v for k, v in row.items() if k not in ("weight_bits", *same)]
        what = "B_ms w" if "B_ms" in row else "w"
        wide.setdefault(tuple(same.values()), same)[f"{what}{row['weight_bits']}"] = (
            " to ".join(filter(None, figures)) or "-"
        )
    return list(wide.values())


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |\n"

    def cell(value: Any) -> str:
        if value is None:
            return ""
        if not isinstance(value, float):
            return str(value)
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
            asked = demand.of_bits(SHAPES[name], bits)
            per_token = [floors.prefill_floor_s(asked, ceiling, n, kv_block=1) / n * 1e3 for n in lengths]
            (drawn,) = panel.loglog(lengths, per_token, label=f"w{bits}")
            for knee in floors.prefill_knees(asked, ceiling) or ():
                if knee is not None:
                    at = floors.prefill_floor_s(asked, ceiling, round(knee), kv_block=1) / knee * 1e3
                    panel.plot([knee], [at], "o", markersize=4, color=drawn.get_color())
        panel.set(title=f"Qwen1.5-32B {title}", xlabel="prompt length, tokens")
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    panels[0].set_ylabel("ms per prompt token")
    _save(figure, "prefill")

    figure, panel = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    chunks = sorted({round(2 ** (i / 4)) for i in range(49)})
    for bits in (16, 8, 4):
        asked = demand.of_bits(SHAPES["qwen1.5-14b"], bits)
        whole = floors.prefill_floor_s(asked, ceiling, 4096)
        ratios = [floors.prefill_floor_s(asked, ceiling, 4096, chunk=chunk) / whole for chunk in chunks]
        (drawn,) = panel.loglog(chunks, ratios, label=f"w{bits}")
        knees = floors.prefill_knees(asked, ceiling)
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
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if "--figures" in sys.argv:
        draw()
