"""What `harness theory` shows on a terminal: models, floors, where bytes go, chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.theory.machines import Machine
from harness.theory.shapes import Shape, active_params, kv_elements_per_token, parameters

Row = dict[str, Any]
Columns = Sequence[tuple[str, Callable[[Row], Any]]]


def scaled(value: float | None, unit: float = 1e9, digits: int = 2) -> str:
    """A figure over its unit; a dash where there is none."""
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Three significant digits, never an exponent."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def span(knees: list[int | None] | None) -> str:
    """`99 to 553`; `99 on` where nothing ends it."""
    if not knees:
        return "-"
    return f"{knees[0]} on" if knees[1] is None else f"{knees[0]} to {knees[1]}"


COUNTS: Columns = (
    ("model", lambda row: row["model"]),
    ("layers", lambda row: scaled(row["layer_params"], _giga(row))),
    ("lm_head", lambda row: scaled(row["lm_head_params"], _giga(row))),
    ("active", lambda row: scaled(row["active_params"], _giga(row))),
    ("total", lambda row: scaled(row["total_params"], _giga(row))),
    ("KV elements/token", lambda row: whole(row["kv_elements_per_token"])),
    ("KV bytes/token", lambda row: whole(row["kv_bytes_per_token"])),
)
WEIGHTS: Columns = (
    ("model", lambda row: row["model"]),
    ("weights", lambda row: row["weights"]),
    ("bpw", lambda row: f"{row['weight_bits']:.2f}"),
    ("size", lambda row: scaled(row["model_bytes"], _giga(row))),
    ("read/token", lambda row: scaled(row["weight_bytes_per_token"], _giga(row))),
    ("flop/byte", lambda row: short(row["flop_per_byte"])),
)
FLOORS: Columns = (
    *WEIGHTS[:2],
    ("machine", lambda row: row["machine"]),
    *WEIGHTS[2:],
    ("B ms", lambda row: scaled(row["B_ms"], 1)),
    ("W tok/ms", lambda row: short(row["W_tokens_per_ms"])),
    ("tok/s", lambda row: short(row["tokens_per_s"])),
    ("bound by", lambda row: row["bound"]),
    ("at n", lambda row: short(row["tokens_per_s_at_context"])),
    ("max ctx", lambda row: whole(row["max_ctx"])),
    ("with embedding", lambda row: whole(row["max_ctx_with_embedding"])),
    ("batch", lambda row: short(row["compute_bound_batch"])),
    ("prefill ms", lambda row: short(row["prefill_ms"]["last"])),
    ("compute-bound: every", lambda row: span(row["prefill_knees"]["every"])),
    ("last", lambda row: span(row["prefill_knees"]["last"])),
)
CHUNKS: Columns = (
    *FLOORS[:3],
    ("chunk", lambda row: whole(row["chunk"])),
    ("prefill ms", lambda row: short(row["ms"])),
    ("of one pass", lambda row: f"{row['ratio']:.2f}x"),
)
PARTS: Columns = (
    ("part", lambda row: row["part"]),
    ("type", lambda row: row["type"]),
    ("MB", lambda row: scaled(row["bytes"], 1e6)),
)
TENSORS: Columns = (
    ("tensor", lambda row: row["name"]),
    ("type", lambda row: row["type"]),
    ("shape", lambda row: " x ".join(map(str, row["dims"]))),
    ("bytes", lambda row: whole(row["bytes"])),
    ("streamed", lambda row: whole(row["streamed_bytes"])),
)
MODELS: Columns = (
    *(
        (key, itemgetter(key))
        for key in ("model", "layers", "hidden_size", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied")
    ),
    ("parameters", lambda row: whole(row["total_params"])),
    ("read/token", lambda row: whole(row["active_params"])),
    ("KV elements/token", lambda row: whole(row["kv_elements_per_token"])),
)
MACHINES: Columns = (
    ("machine", lambda row: row["machine"]),
    ("GiB", lambda row: scaled(row["memory_bytes"], 2**30, 0)),
    ("GB/s", lambda row: scaled(row["bytes_per_s"], 1e9, 1)),
    ("TFLOP/s", lambda row: f"{row['flops'] / 1e12:g} {row['rate']}"),
    ("other rates", lambda row: ", ".join(f"{k} {v / 1e12:g}" for k, v in row["other_rates"].items()) or "-"),
)


def show(rows: Sequence[Row]) -> None:
    """Counts, then floors (or weights alone, without a machine), then where bytes go and chunks if asked."""
    console = _console()
    giga = "Gi" if _giga(rows[0]) == 2**30 else "G"
    console.print(f"parameters in {giga}, bytes in {giga}B unless said", style="dim")
    table(COUNTS, list({row["model"]: row for row in rows}.values()))
    console.print()
    on_machines = rows[0]["machine"] is not None
    table(FLOORS if on_machines else WEIGHTS, rows)
    if on_machines:
        first = rows[0]
        said = (
            f"B: latency at no context; W: tokens of context per further ms, cache read: {first['kv_read']}; "
            f"at n: tok/s at n = {first['context']:,}; max ctx: beside the weights without, and with, the "
            f"input embedding; batch: from which decode is bound by compute; prefill ms: of "
            f"{first['prompt_tokens']} tokens; compute-bound: prompt lengths, lm_head on every or on the "
            "last token, cache read once per token"
        )
        console.print(said, style="dim")
        for name, used in {row["machine"]: row for row in rows}.items():
            console.print(
                f"{name}: {used['bytes_per_s'] / _giga(used):,.4g} {giga}B/s, "
                f"{used['flops'] / _giga(used) / (1024 if giga == 'Gi' else 1000):,.4g} "
                f"{giga.replace('G', 'T')}FLOP/s {used['rate']}, {used['memory_bytes'] / 2**30:,.0f} GiB, "
                f"{used['balance_flop_per_byte']:.3g} flop/byte",
                style="dim",
                markup=False,
            )
    for row in rows:
        if row["speculative_speedup"] is not None:
            console.print(f"speculative decoding: {row['speculative_speedup']:.2f}x expected", style="dim")
            break
    chunked = [row | cut for row in rows for cut in row["chunked_prefill"] or []]
    if chunked:
        console.print()
        table(CHUNKS, chunked)
    for name, row in {(row["model"], row["weights"]): row for row in rows}.items():
        if row["bytes_by_part"]:
            console.print(f"\n{' '.join(name)}: bytes by part and type", style="bold", markup=False)
            table(PARTS, _parts(row))
        if row.get("tensors"):
            console.print()
            table(TENSORS, row["tensors"])


def table(columns: Columns, rows: Sequence[Row]) -> None:
    """Print rows, figures to the right."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    texts = [[str(form(row)) for _, form in columns] for row in rows]
    for number, (heading, _) in enumerate(columns):
        figures = all(text[number][:1].isdigit() or text[number] == "-" for text in texts)
        shown.add_column(heading, justify="right" if figures else "left", overflow="fold")
    for text in texts:
        shown.add_row(*text)
    _console().print(shown)


def model(name: str, shape: Shape) -> Row:
    """A shape as a list shows it."""
    return {
        "model": name,
        "layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "ffn": shape.intermediate_size,
        "vocab": shape.vocab_size,
        "tied": shape.tied,
        "total_params": parameters(shape),
        "active_params": active_params(shape),
        "kv_elements_per_token": kv_elements_per_token(shape),
    }


def machine(name: str, known: Machine) -> Row:
    """A machine as a list shows it, with the source of each figure."""
    figures = {"memory": known.memory, "bandwidth": known.bandwidth, **known.rates}
    return {
        "machine": name,
        "memory_bytes": known.memory_bytes,
        "bytes_per_s": known.bandwidth_bytes_per_s,
        "rate": known.rate,
        "flops": known.flops,
        "other_rates": {name: rate.value for name, rate in known.rates.items() if name != known.rate},
        "sources": {what: figure.source for what, figure in figures.items()},
    }


def sources(machines: Sequence[Row]) -> None:
    """Where the figures of each machine are from, figures of one source together."""
    console = _console()
    for row in machines:
        of_source: dict[str, list[str]] = {}
        for what, source in row["sources"].items():
            of_source.setdefault(source, []).append(what)
        console.print(f"\n{row['machine']}", style="bold", markup=False)
        for source, figures in of_source.items():
            console.print(f"  {', '.join(figures)}: {source}", markup=False)


def _parts(row: Row) -> list[Row]:
    found = [
        {"part": part, "type": type_name, "bytes": size}
        for part, types in row["bytes_by_part"].items()
        for type_name, size in types.items()
    ]
    return [*found, {"part": "all", "type": "", "bytes": row["model_bytes"]}]


def _giga(row: Row) -> float:
    return 2.0**30 if row["units"] == "published" else 1e9


def _console() -> Console:
    # A narrow terminal wraps a line; it must not cut figures off.
    return Console(width=200, soft_wrap=True, highlight=False)
