"""Do windows at a few depths give the figures of a whole decode, and in what share of its time?

Measures cells twice in one campaign, interleaved: a decode of all tokens, and windows at several depths whose
context is filled by prefill. Prints B, W and tok/s at each depth of both, and the time of the timed parts,
filling included. With --kept also windows whose filled context was kept by an earlier repeat.

    .venv/bin/python benchmarks/windows.py [--tokens 10000] [--repeats 1] [--kept] [--most-windows N]
        [--model qwen1.5-0.5b] [--results DIR] [llamacpp:q4_0] [llamacpp:q8_0] [hf:bf16]

Targets: B within 1%, W within 2%, tok/s within 1%; at most a quarter of the time in llama.cpp and a sixth in
transformers, a tenth with a kept context. A busy machine makes repeats invalid: then it says so.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet

HARNESS = Path(sys.executable).parent / "harness"
PROMPT = 25
SHARES = {"llamacpp": 1 / 4, "hf": 1 / 6}
KEPT_SHARE = 1 / 10
AROUND = 256  # tokens: one stair of llama.cpp's on both sides


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", default=["llamacpp:q4_0", "llamacpp:q8_0", "hf:bf16"])
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--most-windows", type=int, help="per depth; noise alone decides how many there are")
    parser.add_argument("--model", default="qwen1.5-0.5b")
    parser.add_argument("--results", type=Path, help="work in this folder, and continue there")
    arguments = parser.parse_args()
    folder = arguments.results or Path(tempfile.mkdtemp(prefix="windows-"))
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "windows.yaml"
    config.write_text(json.dumps(experiment(arguments)))
    run = [str(HARNESS), "run", str(config), "-o", str(folder / "results")]
    if (code := subprocess.run(run, stdout=subprocess.DEVNULL).returncode) not in (0, 1):
        return code
    records = [json.loads(path.read_text()) for path in sorted(folder.rglob("record.json"))]
    listed = subprocess.run([*run[:1], "list", str(folder / "results"), "--json"], stdout=subprocess.PIPE)
    rows = [row for row in json.loads(listed.stdout) if row["status"] == "ok"]
    for row in rows:
        record = next(r for r in records if r["started_utc"] == row["started_utc"])
        row["seconds"], row["kept"] = seconds(record), kept(record)
    for cell in arguments.cells:
        stack, _, quant = cell.partition(":")
        compare(
            cell, SHARES.get(stack, 1.0), [r for r in rows if r["stack"] == stack and quant in r["variant"]]
        )
    print(f"\nrecords: {folder}")
    return 0


def experiment(arguments: argparse.Namespace) -> dict[str, Any]:
    """The config; JSON is YAML."""
    deepest = arguments.tokens
    depth: dict[str, Any] = {
        "kind": "depth",
        "depths": sorted({0, *(d for d in (1024, 4096) if d < deepest), deepest}),
    }
    if arguments.most_windows:
        depth["most_windows"] = arguments.most_windows
    return {
        "models": [{"shape": arguments.model}],
        "variants": [
            {"stack": stack, "dtype" if stack == "hf" else "quant": quant}
            for stack, _, quant in (cell.partition(":") for cell in arguments.cells)
        ],
        "protocol": {"repeats": arguments.repeats, "prompt_tokens": PROMPT, "retry_disturbed": 0},
        "workloads": [
            {"kind": "decode", "new_tokens": arguments.tokens - PROMPT},
            depth,
            *([depth | {"keep_context": True}] if arguments.kept else []),
        ],
    }


def seconds(record: dict[str, Any]) -> float:
    """Time of the timed part, filling included."""
    surface = (record["done"] or {}).get("surface")
    return float((surface["elapsed_ns"] if surface else record["timing"]["last_token_ns"]) / 1e9)


def kept(record: dict[str, Any]) -> bool:
    return bool(((record["done"] or {}).get("surface") or {}).get("context_was_kept"))


def compare(cell: str, share: float, rows: list[dict[str, Any]]) -> None:
    whole = [row for row in rows if row["workload"] == "decode"]
    windows = [row for row in rows if row["workload"] == "depth" and not row["kept"]]
    print(f"\n{cell}: {len(whole)} whole decodes and {len(windows)} of windows are ok")
    if not whole or not windows:
        print("  not to be compared: see `harness list`")
        return
    off("B ms", mean(whole, "B_ms"), mean(windows, "B_ms"), 0.01)
    off("W tokens/ms", mean(whole, "W_tokens_per_ms"), mean(windows, "W_tokens_per_ms"), 0.02)
    for number, at in enumerate(windows[0]["depths"]["at"]):
        around = sum(locally(row, at["depth"]) for row in whole) / len(whole)
        speeds = [row["depths"]["at"][number]["tokens_per_s"] for row in windows]
        count = sum(row["depths"]["at"][number]["windows"] for row in windows)
        off(f"tok/s at {at['depth']} ({count} windows)", 1e3 / around, sum(speeds) / len(speeds), 0.01)
    for what, found, most in (
        ("", windows, share),
        (", context kept", [row for row in rows if row["kept"]], KEPT_SHARE),
    ):
        if found:
            took, of = mean(found, "seconds"), mean(whole, "seconds")
            word = "reached" if took <= most * of else "missed"
            print(f"  time{what}: {took:.1f} s of {of:.1f}, {took / of:.3f}; at most {most:.3f}: {word}")


def locally(row: dict[str, Any], depth: int) -> float:
    """ms of a step of a whole decode that attends to `depth` tokens: the mean of those AROUND it, moved there
    along the line."""
    series = pyarrow.parquet.read_table(row["series"]).to_pydict()
    near = [
        (n - 1 - depth, ns / 1e6)
        for n, ns in zip(series["n"][1:], series["latency_ns"][1:], strict=True)
        if abs(n - 1 - depth) <= AROUND
    ]
    return float(sum(ms - row["slope_ms"] * beside for beside, ms in near) / len(near))


def mean(rows: list[dict[str, Any]], key: str) -> float:
    known = [row[key] for row in rows if row[key] is not None]
    return float(sum(known) / len(known)) if known else math.nan


def off(what: str, whole: float, windows: float, most: float) -> None:
    change = windows / whole - 1
    word = "reached" if abs(change) <= most else "missed"
    print(
        f"  {what}: whole decode {whole:.4g}, windows {windows:.4g}, {change:+.2%}; within {most:.0%}: {word}"
    )


if __name__ == "__main__":
    sys.exit(main())
