"""The checks: required results on a card, of each stack, clocks, memory, sensors and the probes."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.parquet

from ci.gpu.bench import Bench, CheckFailed, NotPossible, expect, expect_ok
from ci.table import Check
from harness.analysis.clocks import DEVICE_CLOCK_TOLERANCE, DEVICE_CLOCK_TOLERANCE_NS
from harness.base.nvml import visible_gpus
from harness.theory.machine_names import of_gpu

GB = 1e9
PARTS_WITHIN = 0.03
PROBE_BELOW = 0.15  # of the data sheet
ENERGY_TOKENS = 6000  # energy needs 30 s
WAITS, LIES = "yield int(token)  # waits for the device", "yield 0"
LOST = "two clocks differ"


def hf(bench: Bench) -> str:
    variants: list[dict[str, Any]] = [
        {"stack": "hf", "cache": ["dynamic", "static"]},
        {"stack": "hf", "cache": "static", "compile": True},
    ]
    if bench.device == "cuda":  # a CPU has no such allocator
        variants.append({"stack": "hf", "expandable_segments": True})
    rows = bench.run(*variants)
    expect_ok(rows)
    for row in rows:
        limit = row["B_measured_theory_ms"]
        early = limit and row["ttft_ms"] and row["ttft_ms"] < limit
        expect(
            not early, f"{row['variant']}: TTFT {row['ttft_ms']:.2f} ms, its weights take {limit or 0:.2f}"
        )
    return f"{_speeds(rows)}{_device_times(bench)}"


def bitsandbytes(bench: Bench) -> str:
    rows = bench.run({"stack": "bnb", "quant": ["int8", "nf4"]})
    expect_ok(rows)
    return _speeds(rows)


def llamacpp(bench: Bench) -> str:
    quants = ["q8_0", "q4_0", "q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k"]
    rows = bench.run({"stack": "llamacpp", "quant": quants, "flash_attn": [False, True]})
    expect_ok(rows)
    for record in bench.records():
        on = {
            name
            for where in record["loaded"]["devices"].values()
            if isinstance(where, dict)
            for name in where
        }
        expect(bench.device == "cpu" or not on & {"CPU", "cpu"}, f"{record['variant']}: on {sorted(on)}")
    return _speeds(rows)


def gptqmodel(bench: Bench) -> str:
    of_cards: list[dict[str, Any]] = [
        {"stack": "gptqm", "format": "gptq", "kernel": ["marlin", "exllamav2"]},
        {"stack": "gptqm", "format": "awq", "kernel": ["marlin", "gemm"]},
    ]
    on_cpu = [{"stack": "gptqm", "format": ["gptq", "awq"], "kernel": "aten"}]
    rows = bench.run(*(of_cards if bench.device == "cuda" else on_cpu))
    expect_ok(rows)
    return _speeds(rows)


def auto_gptq(bench: Bench) -> str:
    rows = bench.run({"stack": "gptq", "kernel": ["marlin", "exllamav2"]})
    expect_ok(rows)
    return _speeds(rows)


def autoawq(bench: Bench) -> str:
    rows = bench.run(
        {"stack": "autoawq", "kernel": ["gemm", "exllama", "exllamav2"], "fuse_layers": [False, True]}
    )
    expect_ok(rows)
    return _speeds(rows)


def same_weights(bench: Bench) -> str:
    variants: list[dict[str, Any]] = [{"stack": "hf"}]
    for stack, more in (
        ("llamacpp", {"quant": ["q8_0", "q4_k_m"]}),
        ("bnb", {"quant": "nf4"}),
    ):
        if _has(bench, stack):
            variants.append({"stack": stack, **more})
    bench.interpreter("hf")
    rows = bench.json("run", "--check-weights", bench.config(*variants), "-o", bench.results)
    bad = [f"{row['name']}: {row['verdict'] or row['reason']}" for row in rows if row["verdict"] != "agrees"]
    expect(rows and not bad, "; ".join(bad) or "no rows")
    return f"{len(rows)} variants agree with the reference"


def unsynchronised(bench: Bench) -> str:
    """A clock that is read before the device is done must not pass."""
    lying = bench.runners_with("hf/session.py", WAITS, LIES)
    (row,) = bench.run({"stack": "hf"}, variables={"HARNESS_RUNNERS": str(lying)})
    caught = row["status"] == "invalid" and LOST in str(row["reasons"])
    if not caught:
        _expect_slow_host(bench)
    expect(caught, f"{row['status']}: {row['reasons']}")
    return f"invalid: {row['reasons'][0]}"


def _expect_slow_host(bench: Bench) -> None:
    """Raises NotPossible if both clocks agree on every token although one is read early: Python takes longer
    for a step than the card, as for 0.5B on an H200 (14 ms, of which the card needs 0.2)."""
    for path in bench.results.rglob("tokens.parquet"):
        series = pyarrow.parquet.read_table(path)
        pairs = zip(series["latency_ns"].to_pylist(), series["device_ns"].to_pylist(), strict=True)
        if all(
            abs(host - device) <= max(DEVICE_CLOCK_TOLERANCE * device, DEVICE_CLOCK_TOLERANCE_NS)
            for host, device in pairs
        ):
            raise NotPossible("the card waits for Python at every step, which hides the lie: a larger model")


def out_of_memory_loading(bench: Bench) -> str:
    with bench.filled(0.4 * GB):
        (row,) = bench.run({"stack": "hf"})
    expect(row["status"] == "oom", f"{row['status']}: {row['reasons']}")
    return f"oom: {row['reasons'][0]}"


def out_of_memory_growing(bench: Bench) -> str:
    # Weights of 1.2 GB, CUDA's own half a GB; then about 0.2 MB a token, the copy counted.
    with bench.filled(2.6 * GB):
        (row,) = bench.run({"stack": "hf", "cache": "dynamic"}, new_tokens=20_000)
    (record,) = bench.records()
    expect(row["status"] == "oom", f"{row['status']}: {row['reasons']}")
    expect(record["tokens"] > 0, "no token before memory ran out")
    return f"oom after {record['tokens']} tokens, which are kept"


def longest_context(bench: Bench) -> str:
    variants = [{"stack": "llamacpp", "quant": "q8_0"}] if _has(bench, "llamacpp") else []
    config = bench.config(*variants, {"stack": "hf", "cache": "static"})
    with bench.filled(4 * GB):
        rows = bench.json("run", "--max-ctx", config, "-o", bench.results)
    bad = [f"{row['variant']}: {row['status']}" for row in rows if row["status"] != "ok"]
    expect(rows and not bad, "; ".join(bad) or "no rows")
    return ", ".join(f"{row['variant']} {row['max_ctx']}" for row in rows)


def memory_parts(bench: Bench) -> str:
    variants: list[dict[str, Any]] = [{"stack": "hf", "cache": ["dynamic", "static"]}]
    if _has(bench, "llamacpp"):
        variants.append({"stack": "llamacpp", "quant": "q8_0"})
    expect_ok(bench.run(*variants))
    shares = {
        f"{row['name']} {at}": row[at]["unattributed_share"]
        for row in bench.json("report", "--memory", bench.results)
        for at in ("loaded", "peak")
        if row[at] and row[at]["unattributed_share"] is not None
    }
    expect(shares, "no moment has an unattributed share")
    worst = max(shares, key=lambda name: abs(shares[name]))
    expect(abs(shares[worst]) <= PARTS_WITHIN, f"{worst}: {shares[worst]:.1%} of the memory is unattributed")
    return f"at most {abs(shares[worst]):.1%} unattributed"


def sensors_and_energy(bench: Bench) -> str:
    (row,) = bench.run({"stack": "hf"}, new_tokens=ENERGY_TOKENS)
    expect_ok([row])
    (record,) = bench.records()
    timed = (record.get("sensors") or {}).get("timed") or {}
    columns = [name for name, values in timed.items() if values.get("median") is not None]
    expect(any("power" in name for name in columns), f"sensors: {columns}")
    expect(row["joules_per_token"] is not None, f"no energy: {json.dumps(record.get('energy'))}")
    return f"{', '.join(columns)}; {row['joules_per_token']:.2f} J a token"


def bandwidth_probe(bench: Bench) -> str:
    rows = bench.json("doctor", "--measure")["devices"]
    (row,) = (each for each in rows if each["family"] == bench.device)
    measured = row["read_bytes_per_s"]
    expect(measured, f"not measured: {row['note']}")
    sheet = sheet_of.bandwidth_bytes_per_s if (sheet_of := of_gpu(row["name"], row["memory_bytes"])) else None
    if sheet is None:
        raise NotPossible(f"{row['name']}: no data sheet; measured {measured / GB:.0f} GB/s")
    expect(1 - PROBE_BELOW <= measured / sheet <= 1.02, f"{measured / GB:.0f} GB/s of {sheet / GB:.0f}")
    capability = f"compute capability {row['compute_capability']}"
    return f"{measured / GB:.0f} of {sheet / GB:.0f} GB/s; {capability}"


def second_card(bench: Bench) -> str:
    """The user's CUDA_VISIBLE_DEVICES chooses the card."""
    gpus = visible_gpus()
    if len(gpus) < 2:
        raise NotPossible(f"{len(gpus)} GPU here")
    second = gpus[1]["uuid"]
    (row,) = bench.run({"stack": "hf"}, variables={"CUDA_VISIBLE_DEVICES": second})
    expect_ok([row])
    (record,) = bench.records()
    expect(record["device"] == second, f"ran on {record['device']}")
    return second


CHECKS = (
    Check("hf", hf, 400),
    Check("bitsandbytes", bitsandbytes),
    Check("llamacpp", llamacpp, 500),
    Check("gptqmodel", gptqmodel, 600),
    Check("auto-gptq", auto_gptq, needs_gpu=True),
    Check("autoawq", autoawq, needs_gpu=True),
    Check("same-weights", same_weights, 400),
    Check("unsynchronised-clock", unsynchronised, needs_gpu=True),
    Check("oom-loading", out_of_memory_loading, needs_gpu=True),
    Check("oom-growing", out_of_memory_growing, 400, needs_gpu=True),
    Check("longest-context", longest_context, 500, needs_gpu=True),
    Check("memory-parts", memory_parts, needs_gpu=True),
    Check("sensors-and-energy", sensors_and_energy, needs_gpu=True),
    Check("bandwidth-probe", bandwidth_probe, needs_gpu=True),
    Check("second-card", second_card, needs_gpu=True),
)


def _has(bench: Bench, stack: str) -> bool:
    try:
        return bool(bench.interpreter(stack))
    except NotPossible:
        return False


def _speeds(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['variant']} {1e3 / row['B_ms']:.0f}" for row in rows if row["B_ms"]) + " tok/s"


def _device_times(bench: Bench) -> str:
    """Every token of the series has the device's own time."""
    if bench.device == "cpu":
        return ""
    for path in bench.results.rglob("tokens.parquet"):
        series = pyarrow.parquet.read_table(path)
        times = series["device_ns"].drop_null() if "device_ns" in series.column_names else []
        if len(times) != bench.tokens:
            raise CheckFailed(f"{len(times)} device times of {bench.tokens} tokens")
    return f"; {bench.tokens} device times each"
