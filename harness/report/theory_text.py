"""Terminal output of `harness theory`: models, latency floors, bytes by part, chunked prefill."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from harness.base.text import plural
from harness.report.text_table import NONE, Table, formatted, say
from harness.theory import downloads
from harness.theory.ggml_quants import ALL_QUANTS
from harness.theory.machines import (
    SYSTEM,
    SYSTEM_RESERVE_BYTES,
    Figure,
    memory_words,
    reserved_words,
)
from harness.theory.memory import IDEAL, LLAMA_CPP, LLAMA_CPP_FLASH, TRANSFORMERS
from harness.theory.memory_choices import OF_MIXTURES
from harness.theory.memory_fit import Fit
from harness.theory.rows import (
    Chunk,
    Reached,
    ReachedByOthers,
    ReachedPrefill,
    Row,
    RowWithTensors,
    Sides,
    TensorRow,
)

R = TypeVar("R")
Columns = Sequence[tuple[str, Callable[[R], object]]]
"""Headings and the text of a cell."""


class ChunkRow(Row, Chunk):
    """A row cut into chunks of one size."""


def short(value: float | None) -> str:
    """Three significant digits, never an exponent."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def headroom(row: Row, stack: str) -> str:
    """`yes, 3.1 GB to spare` (past the trained context `in memory`), `no, 1.4 GB short`, or `cannot load`."""
    fit = _fit(row, stack)
    if fit is None:
        return "cannot load"
    spare = fit["spare_bytes"]
    fits = "in memory" if _exceeded(row) else "yes"
    return f"{fits}, {spare / 1e9:.1f} GB to spare" if spare >= 0 else f"no, {-spare / 1e9:.1f} GB short"


def longest(row: Row, stack: str) -> str:
    """Tokens, at most the trained context; a dash if the stack cannot load the weights, 0 if none fits."""
    fit = _fit(row, stack)
    return formatted(fit["longest"] or 0 if fit else None)


def _fit(row: Row, stack: str) -> Fit | None:
    return (row["fits"] or {}).get(stack)


def reached(row: Row) -> str:
    """Share of the ceiling, and tokens per second; a dash if never measured."""
    decode = row["reached"]
    return f"{decode['share']:.0%} ({short(decode['tokens_per_s'])})" if decode else NONE


def reached_prefill(row: Row) -> str:
    """Share of the limit, and milliseconds; a dash if never measured."""
    prefill = row["reached_prefill"]
    return f"{prefill['share']:.0%} ({short(prefill['ms'])})" if prefill else NONE


def kv_bytes(row: Row) -> str:
    """Bytes that a token adds; with windows, also after these are full."""
    whole, past = row["kv_bytes_per_token"], row["kv_bytes_per_token_past_windows"]
    return formatted(whole) + (f", past windows {formatted(past)}" if past != whole else "")


def span(ridges: list[int | None] | None) -> str:
    """`99 to 553`; `99 or more` without an upper end."""
    if not ridges:
        return NONE
    return f"{ridges[0]} or more" if ridges[1] is None else f"{ridges[0]} to {ridges[1]}"


COUNTS: Columns[Row] = (
    ("model", lambda row: row["model"]),
    ("in layers", lambda row: formatted(row["layer_params"], "{:,.2f}", _giga(row))),
    ("in lm_head", lambda row: formatted(row["lm_head_params"], "{:,.2f}", _giga(row))),
    ("active", lambda row: formatted(row["active_params"], "{:,.2f}", _giga(row))),
    ("total", lambda row: formatted(row["total_params"], "{:,.2f}", _giga(row))),
    ("KV elements/token", lambda row: formatted(row["kv_elements_per_token"])),
    ("KV bytes/token", kv_bytes),
)
WEIGHTS: Columns[Row] = (
    ("model", lambda row: row["model"]),
    ("weights", lambda row: row["weights"]),
    ("bpw", lambda row: formatted(row["weight_bits"], "{:,.2f}")),
    ("size", lambda row: formatted(row["model_bytes"], "{:,.2f}", _giga(row))),
    ("read/token", lambda row: formatted(row["weight_bytes_per_token"], "{:,.2f}", _giga(row))),
    ("flop/byte", lambda row: short(row["flop_per_byte"])),
)
NAMED: Columns[Row] = (*WEIGHTS[:2], ("machine", lambda row: row["machine"]))
STACKS = {LLAMA_CPP: "in llama.cpp", LLAMA_CPP_FLASH: "with flash_attn", TRANSFORMERS: "in transformers"}
FITS: Columns[Row] = (
    *NAMED,
    *(
        (f"{what} {where}", partial(form, stack=stack))
        for stack, where in STACKS.items()
        for what, form in (("fits", headroom), ("longest", longest))
    ),
    ("longest: ideal", partial(longest, stack=IDEAL)),
    *WEIGHTS[2:4],
)
FLOORS: Columns[Row] = (
    *NAMED,
    ("tok/s", lambda row: short(row["tokens_per_s"])),
    ("tok/s at n", lambda row: short(row["tokens_per_s_at_context"])),
    ("reached", reached),
    ("bound by", lambda row: row["bound"] or NONE),
    ("B ms", lambda row: formatted(row["B_ms"], "{:,.2f}")),
    ("W tok/ms", lambda row: short(row["W_tokens_per_ms"])),
    ("prefill ms", lambda row: short((row["prefill_ms"] or {}).get("last"))),
    ("prefill reached", reached_prefill),
    *WEIGHTS[4:],
    ("FLOP/s rate", lambda row: row["rate"] or (NONE if row["sides"] else "unknown")),
    ("batch", lambda row: short(row["compute_bound_batch"])),
    ("compute-bound prompt: every", lambda row: span((row["prefill_knees"] or {}).get("every"))),
    ("last", lambda row: span((row["prefill_knees"] or {}).get("last"))),
)
CHUNKS: Columns[ChunkRow] = (
    *NAMED,
    ("chunk", lambda row: formatted(row["chunk"])),
    ("prefill ms", lambda row: short(row["ms"])),
    ("vs one pass", lambda row: f"{row['ratio']:.2f}x"),
)
TENSORS: Columns[TensorRow] = (
    ("tensor", lambda row: row["name"]),
    ("type", lambda row: row["type"]),
    ("shape", lambda row: " x ".join(map(str, row["dims"]))),
    ("bytes", lambda row: formatted(row["bytes"])),
    ("streamed", lambda row: formatted(row["streamed_bytes"])),
)
FITS_MEANINGS = {
    "longest in llama.cpp": "longest: the longest context, at most the trained one",
    "longest: ideal": "ideal: only weights and KV cache, in all of the memory; no stack reaches it",
    "fits in llama.cpp": "llama.cpp: without flash attention, which is the default of its Python package",
    "fits with flash_attn": "flash_attn: llama.cpp with it, which holds no scores",
    "fits in transformers": "transformers: 5.x (bf16; 8 and 4 bits with bitsandbytes), not yet measured on a"
    " GPU; the version of early 2024 held the cache twice, which halves the context",
    "cannot load": "cannot load: no stack of this engine loads weights in this form. llama.cpp takes a"
    " GGUF, made of 16 bits, and quantizes the KV cache with flash_attn alone; transformers gets no quantized"
    " GGUF type here; --bpw 16, 8 or 4 is its bf16 and bitsandbytes",
}


def _weights_meanings(row: Row) -> dict[str, str]:
    giga = "GiB" if _giga(row) == 2**30 else "GB"
    return {
        "size": f"size: of all weights, in {giga}",
        "read/token": f"read/token: weights that a step reads, in {giga}",
    }


def _floors_meanings(row: Row) -> dict[str, str]:
    return {
        "tok/s": "tok/s: at zero context",
        "tok/s at n": f"tok/s at n: at n = {formatted(row['context'])}, if it fits",
        "B ms": "B: reading the weights once (TPOT at zero context)",
        "W tok/ms": f"W: tokens of context per further ms of TPOT, cache read: {row['kv_read']}",
        "prefill ms": f"prefill: of {formatted(row['prompt_tokens'])} tokens, lm_head on the last",
        **_weights_meanings(row),
        "FLOP/s rate": "FLOP/s rate: the compute rate used",
        "batch": "batch: the ridge point, batch size from which decode is compute-bound",
        "compute-bound prompt: every": "compute-bound prompt: range of lengths in tokens, with the lm_head on"
        " every or on the last token; the cache is read once per token",
        NONE: "-: does not fit, unknown, or no such prompt",
    }


def show_theory(rows: Sequence[Row], wide: bool, of_files: bool = False) -> None:
    """Print parameter counts, then fit and speed (without a machine: only weights), then chunked prefill and
    bytes by part, if requested."""
    giga = "Gi" if _giga(rows[0]) == 2**30 else "G"
    say(f"parameters in {giga}")
    theory_table(COUNTS, list({row["model"]: row for row in rows}.values()), wide)
    print()
    if rows[0]["machine"] is None:
        theory_table(WEIGHTS, rows, wide, _weights_meanings(rows[0]))
        if of_files:
            _show_types(rows)
    else:
        _show_on_machines(rows, wide)
    speedups = {speedup for row in rows if (speedup := row["speculative_speedup"]) is not None}
    if speedups:
        spread = " to ".join(f"{speedup:.2f}x" for speedup in sorted({min(speedups), max(speedups)}))
        say(f"speculative decoding: {spread} expected")
    chunked: list[ChunkRow] = [{**row, **cut} for row in rows for cut in row["chunked_prefill"] or []]
    if chunked:
        print()
        theory_table(CHUNKS, chunked, wide)
    listed = [cast(RowWithTensors, row) for row in rows if row.get("tensors")]
    for name, row in {(row["model"], row["weights"]): row for row in listed}.items():
        of_parts = [
            f"{part} {kind} {size / 1e6:,.2f}"
            for part, types in (row["bytes_by_part"] or {}).items()
            for kind, size in types.items()
        ]
        print()
        say(f"{' '.join(name)}, MB by part and type: {', '.join(of_parts)}")
        theory_table(TENSORS, row["tensors"], wide)


def show_downloads(model: str, quants: Sequence[str]) -> None:
    """Print what fetches a model's GGUF, if its download is known, and what measures it. `model`: a name or a
    file. `quants`: the requested types, in lower case."""
    if Path(model).exists():
        if model.lower().endswith(".gguf"):
            print(f"measure it: harness run {shlex.quote(model)}")
        return
    quant = quants[0] if len(quants) == 1 and quants[0] in ALL_QUANTS else None
    fetches, download = downloads.fetches(model, quant), downloads.download_of(model)
    if download and fetches:
        for number, command in enumerate(fetches):
            print(f"{'or' if number else 'fetch it:'} {command}")
        print(f"measure it: harness run {(not quant and download.ollama) or download.on_hub(quant)}")


def _show_types(rows: Sequence[Row]) -> None:
    """The exact bytes of weights of several types, as they are stored."""
    for row in rows:
        bytes_of = sum(map(Counter, (row["bytes_by_part"] or {}).values()), Counter[str]())
        listed = ", ".join(f"{kind} {size:,}" for kind, size in bytes_of.most_common())
        if len(bytes_of) > 1:
            say(f"{row['model']} holds, in bytes: {listed}")


def _show_on_machines(rows: Sequence[Row], wide: bool) -> None:
    shaped = [row for row in rows if row["fits"]]
    if shaped:
        say(f"Does it fit with {shaped[0]['context']:,} tokens of context?")
        theory_table(FITS, shaped, wide, FITS_MEANINGS | _weights_meanings(shaped[0]))
        for sentence in dict.fromkeys(
            beyond_trained(row["model"], trained, row["trained_stated"])
            for row in shaped
            if (trained := _exceeded(row))
        ):
            say(sentence)
        for name, row in {row["machine"]: row for row in shaped}.items():
            memory_bytes = row["memory_bytes"] or 0
            memory = memory_words(memory_bytes)
            reserve = Figure(row["reserve_bytes"] or 0, row["reserve_for"] or "")
            say(f"{name}: of its {memory}, {reserved_words(reserve, 'are ')}.")
        print()
    bounded = any(row["tokens_per_s"] or row["sides"] for row in rows)
    say("Upper bounds on speed:" if bounded else "No tok/s, since the weights do not fit:")
    shown = theory_table(FLOORS, rows, wide, _floors_meanings((shaped or rows)[0]))
    _say_causes(rows, shown)


def _exceeded(row: Row) -> int | None:
    """The trained context, if a longer one was requested; None otherwise."""
    fits = [fit for fit in (row["fits"] or {}).values() if fit]
    capped = [fit["longest"] for fit in fits if fit["longest"] != fit["longest_uncapped"]]
    return next((most for most in capped if most and (row["context"] or 0) > most), None)


def beyond_trained(model: str, trained: int, stated: bool | None) -> str:
    """A sentence on a request beyond the trained context."""
    if stated:
        return (
            f"{model} was trained on at most {trained:,} tokens: past them it answers worse, or not at all."
        )
    return (
        f"{model}: its config.json does not state max_position_embeddings; {trained:,} tokens, the default of"
        " transformers, are assumed: past them it answers worse, or not at all."
    )


def _say_causes(rows: Sequence[Row], shown: Sequence[str]) -> None:
    """What the figures rest on. `shown`: the headings of their table."""
    shaped = [row for row in rows if row["fits"]]
    if not shaped:
        say("The shape is unknown, so only bytes are shown.")
        return
    for name, row in {row["model"]: row for row in rows}.items():
        _say_parts(name, row)
    if any(row["weights"] == OF_MIXTURES for row in rows):
        say(
            f"{OF_MIXTURES}: a GGUF of llama.cpp, with the experts in MXFP4 and the other matrices in q8_0. "
            "As released (gpt-oss), the others are in bf16, and a step reads more."
        )
    for row in {(row["model"], row["weights"]): row for row in rows}.values():
        if row["sides"]:
            _say_sides(row, row["sides"])
    if "reached" in shown:
        _say_reached("reached: share of the ceiling (tok/s)", [row["reached"] for row in rows])
    if "prefill reached" in shown:
        _say_reached("prefill reached: share of the limit (ms)", [row["reached_prefill"] for row in rows])
    for row in {row["machine"]: row for row in rows}.values():
        if row["reached_by_others"]:
            say(f"{row['machine']}: {_by_others(row['reached_by_others'])}")
    for row in {(row["machine"], row["rate"]): row for row in shaped}.values():
        say(f"{row['machine']}: {_limits(row)}")


def _by_others(speeds: ReachedByOthers) -> str:
    """What public speeds reached, and on which machines."""
    alike = "CPUs" if speeds["on"] == "CPU" else f"{speeds['on']}'s GPUs"
    where = "on it" if speeds["is_machine"] else f"on {alike}, none on it"
    return (
        f"public decode speeds reached {speeds['median']:.0%} of the ceiling in the median,"
        f" {speeds['least']:.0%} to {speeds['most']:.0%} ({plural(speeds['rows'], 'row')} {where}, from"
        f" {plural(speeds['sources'], 'source')})."
    )


def _say_parts(name: str, row: Row) -> None:
    """What makes a model other than dense with attention to all tokens."""
    if row["window"]:
        say(f"{name} attends to {row['window']:,} tokens.")
    if row["experts"]:
        say(
            f"{name}: {row['experts_used']} of {row['experts']} experts a token; read/token has theirs."
            " batch and prefill read those that so many tokens are expected to choose, uniformly. In"
            " transformers the experts stay in 16 bits: bitsandbytes does not pack them."
        )
    if row["state_bytes"]:
        say(
            f"{name}: {row['state_bytes'] / 1e6:,.1f} MB of state are read and written by each step, whatever"
            " the context."
        )
    if len(row["slopes"] or []) > 1:
        parts = [
            f"{short(slope['W_tokens_per_ms'])} tok/ms from n = {slope['from_n']:,}"
            if slope["W_tokens_per_ms"]
            else f"no slope from n = {slope['from_n']:,}"
            for slope in row["slopes"] or []
        ]
        say(f"{name}, W on {row['machine']}: {', '.join(parts)}.")


def _say_sides(row: Row, sides: Sides) -> None:
    """Print the bytes that the CPU and the GPU hold and read."""
    per_s, spare = sides["cpu_bytes_per_s"], sides["cpu_spare_bytes"]
    rate, speed = "", "--cpu-bandwidth GB/S adds the speed."
    if per_s is not None:
        rate = f" at {per_s / 1e9:g} GB/s"
        speed = (
            "The two take turns, so their times add. Not counted: activations that cross the bus, a few KB a"
            " layer, and what each crossing takes to begin."
        )
    fits = "--host-memory SIZE says whether it fits"
    if spare is not None:
        fits = f"{abs(spare) / 1e9:.1f} GB {'to spare' if spare >= 0 else 'short'}"
        fits += f", {SYSTEM_RESERVE_BYTES / 1e9:.1f} GB reserved for {SYSTEM}"
    sizes = [f"{sides['cpu_bytes'] / 1e9:,.2f} GB", f"{sides['gpu_bytes'] / 1e9:,.2f} GB"]
    per_token = [
        f"{sides['cpu_bytes_per_token'] / 1e9:,.2f} GB",
        f"{sides['gpu_bytes_per_token'] / 1e9:,.2f} GB",
    ]
    say(
        f"{row['model']} {row['weights']}, experts of {plural(sides['n_cpu_moe'], 'layer')} on the CPU: there"
        f" {sizes[0]}, of which it reads {per_token[0]} a token{rate}; on the GPU {sizes[1]}, of which it"
        f" reads {per_token[1]}. The CPU's side needs {sides['cpu_need_bytes'] / 1e9:,.1f} GB of main memory:"
        f" {fits}."
        f" {speed} Prefill is not estimated."
    )


def _say_reached(name: str, reached: Iterable[Reached | ReachedPrefill | None]) -> None:
    """Who reached it, by source."""
    by: dict[str, dict[str, None]] = {}
    for share in reached:
        if share:
            by.setdefault(share["source"], {})[f"{share['stack']} {share['variant']}"] = None
    for source, names in by.items():
        say(f"{name}, by {', '.join(names)}: {source}")


def _limits(row: Row) -> str:
    """Peak bandwidth and compute of a machine, in the units of its row."""
    giga = _giga(row)
    prefix, tera = ("i", 2.0**40) if giga == 2**30 else ("", 1e12)
    computing = (
        f"{(row['flops'] or 0) / tera:,.4g} T{prefix}FLOP/s {row['rate']}, "
        f"{row['balance_flop_per_byte']:.3g} flop/byte"
        if row["rate"]
        else "compute rate unknown: no source for its matrix units"
        if row["sides"] is None
        else "no compute rate of both sides together"
    )
    return f"{(row['bytes_per_s'] or 0) / giga:,.4g} G{prefix}B/s; {computing}."


def theory_table(
    columns: Columns[R], rows: Sequence[R], wide: bool, meanings: Mapping[str, str] | None = None
) -> Sequence[str]:
    """Print rows, and the meanings of what is shown; unless `wide`, transposed or in fewer columns where not
    all fit in the terminal. Returns the headings."""
    lines = [[str(form(row)) for _, form in columns] for row in rows]
    return Table([heading for heading, _ in columns], lines).show(wide, turns=True, meanings=meanings)


def _giga(row: Row) -> float:
    return 2.0**30 if row["units"] == "published" else 1e9
