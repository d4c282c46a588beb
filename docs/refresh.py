"""Refresh what pages of docs/ take from the code: tables, commands, modules, and with matplotlib figures.

`.venv/bin/python docs/refresh.py` rewrites what stands between the pages' markers;
`uv run --no-project --with matplotlib --with-editable . docs/refresh.py --figures` also draws docs/figures/.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import cli, data
from harness.analysis.warnings import DISTURBANCES, Warnings
from harness.records import kinds as records_kinds
from harness.theory import decoder, floors, published
from harness.theory import tensors as theory_tensors
from harness.theory.decoder import shape_parameters
from harness.theory.hf_config import SHAPES
from harness.theory.known_models import Known
from harness.theory.machines import MACHINES
from harness.theory.published import TABLES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = [
    DOCS / name
    for name in (
        *("theory.md", "models.md", "machines.md", "cli.md", "architecture.md", "record.md"),
        "reference/warnings.md",
    )
]
EFFECTS = {"all": "invalid", "W": "no W", "first token": "no TTFT", "speed": "functional", None: "note"}
PUBLIC = ROOT / "tests" / "models"
SCHEMA = DOCS / "record.schema.json"
WORDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}


def refreshed(page: str) -> str:
    """The page with all that stands between `<!-- name -->` and `<!-- end -->` made anew."""
    blocks = {
        "commands": commands,
        "modules": modules,
        "controller": lambda: layers("harness"),
        "worker": lambda: layers("runners"),
        "every_record": lambda: keys(records_kinds.bases(records_kinds.KINDS["reported"])[0]),
        "own_records": lambda: keys(records_kinds.bases(records_kinds.KINDS["measured"])[1]),
        "parts": parts,
        "warnings": warnings,
        "disturbances": disturbances,
        "machines": machines,
        "words_of_machines": words_of_machines,
        "dense_models": dense_models,
        "published_models": published_models,
        "published_files": published_files,
        **{name: partial(_own_keys, kind) for name, kind in records_kinds.KINDS.items()},
    }

    def made(found: re.Match[str]) -> str:
        name = found[1]
        block = blocks[name]() if name in blocks else markdown(_rows(name))
        return f"<!-- {name} -->\n{block}<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


def dense_models() -> str:
    """The shapes of the dense models."""
    rows = [
        {
            "model": name,
            "layers": shape.layers,
            "hidden": f"{shape.hidden_size:,}",
            "heads (KV)": f"{shape.heads} ({shape.kv_heads})",
            "FFN": f"{shape.intermediate_size:,}",
            "vocabulary": f"{shape.vocab_size:,}" + (", tied" if shape.tied else ""),
            "context": f"{shape.context:,}" + (f", window {shape.window:,}" if shape.window else ""),
            "parameters": f"{shape_parameters(shape) / 1e9:.3g}B",
        }
        for name, shape in SHAPES.items()
    ]
    return markdown(rows)


def machines() -> str:
    """A table of the shipped machines for each family."""
    sections = []
    for family in dict.fromkeys(machine.family for machine in MACHINES.values()):
        rows = [
            {
                "machine": f"`{key}`",
                "name": machine.name,
                "GiB": ", ".join(f"{gib:g}" for gib in machine.sold_gib or (machine.memory.value / 2**30,)),
                "GB/s": f"{machine.bandwidth.value / 1e9:,g}",
                "rates": ", ".join(f"{of} {rate.value / 1e12:,.4g}" for of, rate in machine.rates.items()),
            }
            for key, machine in MACHINES.items()
            if machine.family == family
        ]
        sections.append(f"\n### {family}\n\n{markdown(rows)}")
    return "".join(sections)


def words_of_machines() -> str:
    """What names of machines may leave out and add."""
    words = data.table("aliases.toml")["machines"]["words"]
    rows = [
        {
            "machine": f"`{key}`",
            "may leave out": ", ".join(row.get("optional", ())),
            "may add": ", ".join(row.get("also", ())),
        }
        for key, row in words.items()
    ]
    return markdown(rows)


def warnings() -> str:
    """Every warning: its code, sentence and next step; its numbers by their names."""
    return markdown(
        [
            {
                "code": f"`{each.name}`",
                "cause": re.sub(r"{(\w+)[^}]*}", r"{\1}", each.cause),
                "effect": "measured again" if each.disturbance else EFFECTS[each.invalidates],
                "next step": each.next_step,
            }
            for each in Warnings
        ]
    )


def disturbances() -> str:
    """The causes in the summary of a run whose repeats stayed disturbed."""
    rows = [
        {"disturbance": f"`{name}`", "cause": cause, "next step": step}
        for name, (cause, step) in DISTURBANCES.items()
    ]
    return markdown(rows)


def published_models() -> str:
    """Parameters of the shipped models, as published and as counted."""
    published = json.loads((PUBLIC / "published.json").read_text())
    known, lines = Known(), []
    for name in data.model_names():
        row, made = published.get(name, {}), known[name]
        total = decoder.parameters(made)
        stated = row.get("total") or row.get("total_rounded")
        differs = bool(row.get("total")) and row["total"] != total
        lines.append(
            {
                "model": name,
                "published": f"{stated:,}" if isinstance(stated, int) else stated,
                "counted": f"{total:,}",
                "active, published": row.get("active_rounded"),
                "active, counted": f"{decoder.active_params(made) / 1e9:.2f}B",
                "published counts": row.get("counts") if differs else None,
            }
        )
    return markdown(lines)


def published_files() -> str:
    """Files of which the types are known, at most three of each model."""
    known, lines, seen = Known(), [], Counter()
    for row in json.loads((PUBLIC / "gguf_files.json").read_text()):
        if row["file_bytes"] and "differs" not in row and seen[row["model"]] < 3:
            seen[row["model"]] += 1
            quant = {"mxfp4": "mxfp4_moe"}.get(row["type"], row["type"])
            tensors = theory_tensors.quantized(known[row["model"]], quant, imatrix=row["imatrix"])
            size = sum(tensor.bytes for tensor in tensors)
            lines.append(
                {
                    "file": row["file"].rpartition("/")[2],
                    "bytes": f"{row['file_bytes']:,}",
                    "tensors, counted": f"{size:,}",
                    "rest": f"{row['file_bytes'] - size:,}",
                }
            )
    return markdown(lines)


def commands() -> str:
    """Each command's summary and arguments, as the parser has them."""
    (subcommands,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    return "\n" + "\n".join(_commands("harness", subcommands)) + "\n"


def _commands(above: str, subcommands: Any) -> list[str]:
    parts = []
    for name, parser in subcommands.choices.items():
        summary = parser.description[0].upper() + parser.description[1:]
        nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if nested:
            parts.append(f"### {above} {name}\n\n{summary}.\n")
            parts += _commands(f"{above} {name}", nested[0])
            continue
        rows = [
            {
                "argument": f"`{_spelling(action)}`",
                "meaning": (action.help or "").replace("|", "\\|").replace("%%", "%"),
            }
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction)
        ]
        parts.append(f"### {above} {name}\n\n{summary}.\n\n{markdown(rows)}")
    return parts


def _spelling(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    value = (value if isinstance(value, str) else " ".join(value)).replace("|", "\\|")
    names = ", ".join(action.option_strings)
    if not names:
        return f"[{value}]" if action.nargs in ("?", "*") else value
    return names if action.nargs == 0 else f"{names} {value}"


def layers(container: str) -> str:
    """The folders of one side as import-linter's contract has them, the importing ones above."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each.get("containers") == [container])
    return "```\n" + "\n   |\n".join(contract["layers"]) + "\n```\n"


def modules() -> str:
    """Path and the first sentence of the docstring of every module. A package stands for its __init__."""
    rows = []
    for path in sorted([*ROOT.glob("harness/**/*.py"), *ROOT.glob("runners/**/*.py")]):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        sentence = " ".join(re.split(r"(?<=[.?!])\s", docstring, maxsplit=1)[0].split()).rstrip(".")
        relative = path.relative_to(ROOT)
        name = f"{relative.parent}/" if path.name == "__init__.py" else str(relative)
        rows.append({"module": f"`{name}`", "what it owns": sentence})
    return markdown(rows)


def record_schema() -> str:
    """docs/record.schema.json."""
    return json.dumps(records_kinds.json_schema(), indent=1) + "\n"


def keys(part: Any) -> str:
    """The keys of one type of a record, with their meanings."""
    return _keys_table(records_kinds.properties_of(part))


def _own_keys(kind: Any) -> str:
    """The keys that records of this kind alone have."""
    shared = [base for base in records_kinds.bases(kind) if not base.__name__.startswith("Only")]
    known = {key for base in shared for key in records_kinds.properties_of(base)}
    every = records_kinds.json_schema()["$defs"][kind.__name__]["properties"]
    return _keys_table({key: found for key, found in every.items() if key not in known})


def _keys_table(properties: dict[str, Any]) -> str:
    return markdown(
        [
            {
                "key": f"`{key}`",
                "value": _type(found),
                "meaning": " ".join(found.get("description", "").split()),
            }
            for key, found in properties.items()
        ]
    )


def parts() -> str:
    """A table for each type that a value of a record has."""
    kinds = {kind.__name__ for kind in records_kinds.KINDS.values()}
    sections = []
    for name, part in sorted(records_kinds.json_schema()["$defs"].items()):
        if name not in kinds:
            about = " ".join(part.get("description", "").split())
            sections.append(f"\n### {name}\n{about}\n\n{_keys_table(part['properties'])}")
    return "".join(sections)


def _type(found: dict[str, Any]) -> str:
    """A JSON Schema in words."""
    if "$ref" in found:
        name = found["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in found:
        return " or ".join("null" if each == {"type": "null"} else _type(each) for each in found["anyOf"])
    if "const" in found or "enum" in found:
        return ", ".join(f"`{each}`" for each in found.get("enum", [found.get("const")]))
    if found.get("type") == "array":
        return f"list of {_type(found['items'])}"
    if found.get("type") == "object":
        inside = found.get("additionalProperties")
        return f"mapping to {_type(inside)}" if isinstance(inside, dict) else "mapping"
    return WORDS.get(found.get("type", ""), "any")


def _rows(name: str) -> Sequence[dict[str, Any]]:
    if name == "slips":
        return [
            {"table": table, "row": row, "column": column, "printed": cell, "why not": reason}
            for (table, row, column), (cell, reason) in published.SLIPS.items()
        ]
    rows: Any = TABLES[name]()
    if name in published.LLAMA_TABLES:
        return rows
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
