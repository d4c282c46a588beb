"""Make the records of the published study out of its tables and raw series.

`.venv/bin/python results/published/make.py REFERENCE_DIR OUT`: REFERENCE_DIR has published/*.csv (the tables,
which harness/data/study_tables/ has too) and raw/*.csv.gz (the series); OUT must not exist. One record a
model and variant of the study, `kind: reported`, as docs/reference/record.md has it. Nothing is computed but
units: bytes are SI, and what was printed stands beside.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from harness.records import keep
from harness.theory.decoder import dense_fields
from harness.theory.hf_config import SHAPES
from harness.theory.machines import MACHINES

MODELS = ("0.5B", "1.8B", "4B", "7B", "14B", "32B", "72B", "110B")
PROMPT_TOKENS, NEW_TOKENS = 25, 9975
MIB, GIB, GB = 2**20, 2**30, 10**9

# The study bears no date. Its youngest model, Qwen1.5-110B, came out on 25 April 2024.
STARTED_UTC = "2024-05-01T00:00:00+00:00"
TITLE = "Single-user inference of Qwen1.5 (0.5B to 110B) on one RTX 4090, by noooop"
URL = "https://github.com/noooop/noooop.github.io/tree/main/benchmarking"
LICENSE = "CC0-1.0"
SLUG = "rtx-4090"
CARD = MACHINES[SLUG]
CAMPAIGN = "rtx4090-qwen1.5"

DECODE, CONTEXT, MEMORY = (
    "decode_measured_4090.csv",
    "max_ctx_measured_4090.csv",
    "memory_transformers_4090.csv",
)
BPW, FILE, BUFFER = "gguf_bpw.csv", "gguf_file_size.csv", "gguf_model_buffer_4090.csv"
KV, PERPLEXITY = "gguf_kv_buffer_1024.csv", "perplexity_wiki_qwen15_gguf.csv"
SERIES_14B, SERIES_4B, PREFILL_7B = "decode_14B.csv.gz", "decode_4B_awq_window.csv.gz", "prefill_7B.csv.gz"


@dataclass(frozen=True)
class Variant:
    """One variant and what the study calls it: in its tables, in the raw series of 14B, in those of prefill.

    `memory`: its row in the table of files and VRAM, of which there is one for all kernels of a format;
    `default`: it is the kernel that row means.
    """

    stack: str
    name: str
    decode: str | None = None
    context: str | None = None
    gguf: str | None = None
    memory: str | None = None
    default: bool = True
    raw: str | None = None
    prefill: str | None = None


def _gguf(quant: str) -> Variant:
    name = f"{quant}.gguf"
    return Variant("llamacpp", quant, name, name, quant, raw=name, prefill=quant)


def _awq(name: str, kernel: str, library: str) -> Iterator[Variant]:
    """Unfused, and with fused layers."""
    yield Variant(
        "autoawq",
        name,
        decode=f"AWQ {kernel}",
        context=f"AWQ {library} fuse_layers False",
        memory="awq",
        default=name == "gemm",
        raw=f"AWQ {library}",
        prefill=f"AWQ {library}",
    )
    yield Variant(
        "autoawq",
        f"{name}-fused",
        decode=f"AWQ {kernel} fuse_layers",
        context=f"AWQ {library} fuse_layers True",
        memory="awq",
        default=False,
        raw=f"AWQ {library} fuse_layers",
        prefill=f"AWQ {library} fuse_layers",
    )


QUANTS = ("q8_0", "q6_k", "q5_k_m", "q5_0", "q4_k_m", "q4_0", "q3_k_m", "q2_k")
WINDOWED = "gemm-fused-max_seq_len=2048"  # of 4B: a series alone
# The one place where the study's names and ours meet. Double blanks in its names are made single.
VARIANTS = (
    *(_gguf(quant) for quant in QUANTS),
    Variant("llamacpp", "fp16", gguf="fp16"),  # perplexity alone
    Variant("hf", "bf16", "bfloat16", "bfloat16", memory="bf16", prefill="bf16"),
    Variant("bnb", "int8", "bnb int8", "bnb int8", memory="bnb-int8", raw="bnb int8", prefill="bnb 8"),
    Variant("bnb", "int4", "bnb int4", "bnb int4", memory="bnb-int4", raw="bnb int4", prefill="bnb4"),
    Variant(
        "gptq",
        "int4-exllamav2",
        decode="GPTQ-Int4 exllamav2",
        context="GPTQ-Int4",
        memory="gptq-int4",
        raw="GPTQ-Int4",
        prefill="GPTQ-Int4 exllamav2 （默认)",  # noqa: RUF001  (its own comma and bracket: "the default")
    ),
    Variant("gptq", "int4-marlin", "GPTQ-Int4 Marlin", "GPTQ-Int4 use_marlin", None, "gptq-int4", False),
    *_awq("gemm", "GEMM", "gemm"),
    *_awq("exllama", "Exllama", "use_exllama"),
    *_awq("exllamav2", "ExllamaV2", "use_exllama_v2"),
)

Row = dict[str, str]
Series = dict[str, list[int]]


class Study:
    """The study's tables by file, model and the name a row has there; and its raw series by file and name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tables = {
            name: self._table(name) for name in (DECODE, CONTEXT, MEMORY, BPW, FILE, BUFFER, KV, PERPLEXITY)
        }
        self.series = {name: self._series(name) for name in (SERIES_14B, SERIES_4B, PREFILL_7B)}

    def _table(self, name: str) -> dict[tuple[str, str], Row]:
        with (self._folder / "published" / name).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        key = next((key for key in ("variant", "gguf_type") if key in rows[0]), "")
        return {(row["model"], " ".join(row.get(key, "").split())): row for row in rows}

    def _series(self, name: str) -> dict[str, Series]:
        found: dict[str, Series] = {}
        with gzip.open(self._folder / "raw" / name, "rt", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                columns = found.setdefault(row["variant"], {"n": [], "latency_ns": []})
                columns["n"].append(int(row["n"]))
                columns["latency_ns"].append(_scaled(row["latency_ms"], 10**6))
        return found

    def rows(self, model: str, variant: Variant) -> dict[str, Row]:
        """Of each table the row of this model and variant, where it has one."""
        names = {DECODE: variant.decode, CONTEXT: variant.context, MEMORY: variant.memory}
        names |= dict.fromkeys((BPW, FILE, BUFFER, PERPLEXITY), variant.gguf)
        found = {
            name: self.tables[name][model, key]
            for name, key in names.items()
            if key and (model, key) in self.tables[name]
        }
        if _number(found.get(BUFFER, {}).get("cuda_buffer_gb")) is not None:
            found[KV] = self.tables[KV][model, ""]
        return found


def records(study: Study) -> Iterator[tuple[dict[str, Any], Series, Series]]:
    """Each record with its series of decoding and of prefill, empty where there is none."""
    for model in MODELS:
        for variant in VARIANTS:
            rows = study.rows(model, variant)
            if rows.keys() - ({MEMORY} if not variant.default else set()):  # more than a row it shares
                yield _record(study, model, variant, rows)
    windowed = Variant("autoawq", WINDOWED)
    yield _record(study, "4B", windowed, {})


def _record(
    study: Study, model: str, variant: Variant, rows: dict[str, Row]
) -> tuple[dict[str, Any], Series, Series]:
    name = f"qwen1.5-{model.lower()}"
    cell = f"{name}.{variant.stack}.{variant.name}.published"
    at, series = _decoding(study, model, variant)
    prefill_at, prefill = _prefill(study, model, variant)
    reported = _reported(rows, variant)
    outcome, reason = _outcome(rows, bool(series))
    shape = dense_fields(SHAPES[name])
    record = {
        "kind": "reported",
        "campaign": {"id": f"published-{CAMPAIGN}", "name": CAMPAIGN},
        "cell": cell,
        "repeat": 1,
        "content_key": hashlib.sha256(f"{URL} {cell}".encode()).hexdigest()[:20],
        "started_utc": STARTED_UTC,
        "stack": variant.stack,
        "variant": variant.name,
        "device": "cuda",
        "machine": {
            "slug": SLUG,
            "cpu": None,
            "physical_cores": None,
            "memory_bytes": None,
            "last_level_cache_bytes": None,
            "gpus": [{"name": f"NVIDIA {CARD.name}", "memory_bytes": CARD.memory_bytes}],
        },
        "model": {"name": name, "shape": shape, "weights": {"kind": "published"}},
        "workload": {"kind": "decode", "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS},
        "n_counts_from": 0,
        "outcome": outcome,
        "reason": reason,
        "tokens": len(series.get("n", [])),
        "reported": reported,
        "source": {
            "title": TITLE,
            "url": URL,
            "license": LICENSE,
            "tables": {table: f"{model}, {_row_name(row)}" for table, row in rows.items()},
            "series": at,
            "prefill_series": prefill_at,
            "notes": _notes(rows, variant, reported, series),
        },
    }
    return record, series, prefill


def _decoding(study: Study, model: str, variant: Variant) -> tuple[str | None, Series]:
    """Where the raw series of decoding is, and the series."""
    name, file = variant.raw, SERIES_14B
    if model == "4B":
        file, windows = SERIES_4B, {"gemm-fused": "above 10k", WINDOWED: "left at 2048"}
        found = windows.get(variant.name)
        name = found and f"AWQ gemm fuse_layers, max_seq_len {found}"
    elif model != "14B":
        return None, {}
    series = study.series[file].get(name or "", {})
    return (f"raw/{file}: {name}", series) if series else (None, {})


def _prefill(study: Study, model: str, variant: Variant) -> tuple[str | None, Series]:
    series = study.series[PREFILL_7B].get(variant.prefill or "", {}) if model == "7B" else {}
    return (f"raw/{PREFILL_7B}: {variant.prefill}", series) if series else (None, {})


def _reported(rows: dict[str, Row], variant: Variant) -> dict[str, Any]:
    """The figures, and the rows as printed."""
    decode, memory = rows.get(DECODE, {}), rows.get(MEMORY, {})
    context = rows.get(CONTEXT, {}).get("max_ctx", "")
    buffer, kv = rows.get(BUFFER, {}).get("cuda_buffer_gb"), rows.get(KV, {}).get("kv_buffer_mib")
    return {
        "bpw": _number(decode.get("bpw") or rows.get(BPW, {}).get("bpw")),
        "prefill_ms": _number(decode.get("prefill_ms")),
        "B_ms": _number(decode.get("B_ms")),
        "W_tokens_per_ms": _number(decode.get("W_tokens_per_ms")),
        "file_bytes": _bytes(rows.get(FILE, {}).get("file_gb") or memory.get("file_gb"), GB),
        "model_bytes": _bytes(rows.get(BPW, {}).get("size_mib"), MIB),
        "model_buffer_bytes": _bytes(buffer, GIB),
        "vram_bytes": _bytes(memory.get("vram_gb"), GIB) if variant.default else None,
        "kv_buffer_bytes": _bytes(kv, MIB),
        "kv_buffer_n_ctx": 1024 if kv else None,
        "max_ctx": _number(context.rstrip("+")),
        "max_ctx_is_target": context.endswith("+"),
        "perplexity": _number(rows.get(PERPLEXITY, {}).get("perplexity")),
        "printed": {
            table: {key: text for key, text in row.items() if key not in ("model", "variant", "gguf_type")}
            for table, row in rows.items()
        },
    }


def _outcome(rows: dict[str, Row], has_series: bool) -> tuple[str, str | None]:
    """What became of the run by what the study prints, decoding first."""
    decode, context = rows.get(DECODE, {}).get("B_ms"), rows.get(CONTEXT, {}).get("max_ctx")
    if has_series or _number(decode) is not None:
        return "ok", None
    if "oom" in (decode, context) or (decode is None and rows.get(MEMORY, {}).get("vram_gb") == "oom"):
        return "oom", "out of memory, as the study prints it"
    if context == "exception":
        return "error", "exception, as the study prints it: no more is said"
    return "unavailable", "the study publishes no run of it"


def _notes(rows: dict[str, Row], variant: Variant, reported: dict[str, Any], series: Series) -> list[str]:
    """What a reader of this record's figures has to know."""
    notes = []
    decode, memory = rows.get(DECODE, {}), rows.get(MEMORY, {})
    if variant.stack in ("gptq", "autoawq") and memory:
        default = "int4-exllamav2" if variant.stack == "gptq" else "gemm"
        which = "stands here" if variant.default else f"stands with {default}"
        notes.append(f"the study has one row of memory for all kernels of this file; its VRAM {which}")
    if variant.default and memory.get("vram_gb") == "oom" and _number(decode.get("B_ms")) is not None:
        notes.append("the study prints oom for its VRAM after load, and figures of its decoding")
    if decode and variant.stack in ("bnb", "gptq", "autoawq"):
        notes.append("bpw is nominal: scales, zeros and the 16-bit lm_head come on top")
    if series and len(series["n"]) < NEW_TOKENS:
        notes.append(
            f"out of memory after {len(series['n'])} of {NEW_TOKENS} tokens; the figures are of those"
        )
    if series and not decode:
        notes.append("a series alone; the study's tables have the one with max_seq_len above 10,000")
    printed = reported["prefill_ms"]
    if series and printed is not None and abs(series["latency_ns"][0] / 1e6 - printed) > 0.00501:
        first = series["latency_ns"][0] / 1e6
        notes.append(f"the first token of the series took {first:.2f} ms, and {printed:g} is printed")
    return notes


def _row_name(row: Row) -> str:
    return row.get("variant") or row.get("gguf_type") or "all types"


def _number(text: str | None) -> int | float | None:
    """As printed; null where nothing, or what became of it, is."""
    if not text or not text.replace(".", "", 1).isdigit():
        return None
    return float(text) if "." in text else int(text)


def _bytes(text: str | None, unit: int) -> int | None:
    return _scaled(text, unit) if text and _number(text) is not None else None


def _scaled(text: str, unit: int) -> int:
    """To the nearest whole number, without a float between."""
    return round(Decimal(text) * unit)


def main(reference: Path, out: Path) -> None:
    if out.exists():
        sys.exit(f"{out}: is there already; records are never overwritten")
    count = 0
    for record, series, prefill in records(Study(reference)):
        keep(out / record["model"]["name"] / record["cell"], record, series, prefill)
        count += 1
    print(f"{count} records: {out}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: make.py REFERENCE_DIR OUT")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
