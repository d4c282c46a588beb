"""The checks of the Raspberry Pi profile, for an emulated Arm machine: which parts run, never how fast."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ci.arm64.boards import on
from ci.gpu.bench import Bench, Json, NotPossible, expect
from ci.table import Check
from harness.campaign.memory_limit import RLIMIT_DATA, MemoryLimit, mechanism_here

PROFILES = [Path("configs") / name for name in ("rpi4-4gb.yaml", "rpi5-8gb.yaml")]
QUANTS = ["q8_0", "q4_0", "q4_k_m"]
# Emulated latencies never settle, and whoever shares the machine disturbs them: neither is judged here.
QUICK: Json = {
    "measure_bandwidth": False,
    "retry_disturbed": 0,
    "warmup": {"window_tokens": 4, "max_windows": 3, "tolerance": 0.9, "at_least_s": 0},
}
FIRMWARE = """#!/bin/sh
if [ "$1" = get_throttled ]; then echo throttled={}; else echo 'frequency(0)=2400033792'; fi
"""


def recognised(bench: Bench) -> str:
    """By its names, without a board's /proc/cpuinfo."""
    cpu, *_ = bench.json("doctor")["devices"]
    _expect_emulated(cpu)
    return f"{cpu['emulated']}; named {cpu['name']}"


@on("rpi5")
def recognised_as_a_pi_5(bench: Bench) -> str:
    cpu, *_ = bench.json("doctor")["devices"]
    _expect_emulated(cpu)
    return f"{cpu['emulated']}; named {cpu['name']}"


@on("rpi5")
def fake(bench: Bench) -> str:
    rows = _run(bench, {"stack": "fake", "quant": ["f16", "q4_0"]})
    _expect_functional(rows)
    return f"{_states(rows)}: {_reasons(rows)}"


@on("rpi5")
def llamacpp(bench: Bench) -> str:
    rows = _run(bench, {"stack": "llamacpp", "quant": QUANTS, "flash_attn": [False, True]})
    _expect_functional(rows)
    return f"{_states(rows)}; {_kernels(bench)}"


@on("rpi4")
def llamacpp_on_a_pi_4(bench: Bench) -> str:
    """Its processor has no dotprod."""
    rows = _run(bench, {"stack": "llamacpp", "quant": QUANTS, "flash_attn": [False, True]})
    _expect_functional(rows)
    return f"{_states(rows)}; {_kernels(bench)}"


@on("rpi5")
def transformers(bench: Bench) -> str:
    rows = _run(bench, {"stack": "hf", "dtype": ["bf16", "fp32"], "cache": ["dynamic", "static"]})
    _expect_functional(rows)
    return _states(rows)


@on("rpi5")
def same_weights(bench: Bench) -> str:
    """The logits of llama.cpp's kernels for Arm are the model's."""
    _expect_built(bench, "llamacpp", "hf")
    config = bench.config({"stack": "llamacpp", "quant": [*QUANTS, "q6_k"]})
    rows = bench.json("run", "--check-weights", config, "-o", bench.results)
    bad = [
        f"{row['variant']}: {row['verdict']}: {row['reason']}" for row in rows if row["verdict"] != "agrees"
    ]
    expect(rows and not bad, "; ".join(bad) or "no rows")
    return f"{len(rows)} variants agree with the reference"


@on("rpi5")
def profiles(bench: Bench) -> str:
    counts = []
    for profile in PROFILES:
        ran = bench.harness("run", profile, "--dry-run", "--json")
        expect(ran.returncode == 0, f"{profile.name}: {(ran.stderr.strip().splitlines() or ['?'])[-1]}")
        counts.append(f"{profile.name}: {len(json.loads(ran.stdout))} cells")
    return "; ".join(counts)


@on("rpi5")
def doctor(bench: Bench) -> str:
    found = bench.json("doctor", PROFILES[1])
    levels = [each["level"] for each in found]
    emulation = [each["level"] for each in found if each["what"] == "emulation"]
    expect(emulation == ["warn"] and "stop" not in levels, str(found))
    return ", ".join(f"{levels.count(level)} {level}" for level in sorted(set(levels)))


@on("rpi5")
def firmware(bench: Bench) -> str:
    """A stand-in vcgencmd: its output is in the record, and throttling invalidates."""
    program = bench.folder / "firmware" / "vcgencmd"
    program.parent.mkdir(exist_ok=True)
    path = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    real = {"stack": "fake", "B_ms": 1.0, "prefill_ms": 100.0, "clock": "real"}
    seen = {}
    for bits, level in (("0x0", "ok"), ("0x50005", "warn")):
        program.write_text(FIRMWARE.format(bits))
        program.chmod(0o755)
        (seen[level],) = _run(bench, real, variables=path, new_tokens=300, warmup={"at_least_s": 2})
        found = {each["what"]: each for each in bench.json("doctor", **path)}["CPU throttling"]
        expect(found["level"] == level, f"vcgencmd prints {bits}, the doctor {found}")
    _expect_functional([seen["ok"]])
    throttled = seen["warn"]
    invalid = throttled["status"] == "invalid" and "under-voltage" in _reasons([throttled])
    expect(invalid, f"{throttled['status']}: {_reasons([throttled])}")
    sources = bench.records()[0]["sensors"]["sources"]
    expect("vcgencmd get_throttled" in sources.values(), str(sources))
    return f"{', '.join(sources)}; {_reasons([throttled])}"


@on("rpi5")
def memory_budget(bench: Bench) -> str:
    mechanism = _mechanism()
    variants: list[Json] = [{"stack": "fake", "leak_bytes_per_token": 2**20}, {"stack": "fake"}]
    leaking, other = _run(bench, *variants, memory_budget="400MiB", new_tokens=600)
    expect(leaking["status"] == "oom", f"{leaking['status']}: {_reasons([leaking])}")
    _expect_functional([other])
    return f"{mechanism}: a leak is oom, the cell after it runs"


def memory_rlimit(bench: Bench) -> str:
    """What limits memory on a Pi as it comes."""
    try:
        with MemoryLimit(1 << 30, RLIMIT_DATA):
            return "a limit is kept"
    except OSError as why:
        raise NotPossible(f"{why}: qemu-user ignores it") from None


@on("rpi5")
def longest_context(bench: Bench) -> str:
    _expect_built(bench, "llamacpp")
    _mechanism()
    config = bench.config({"stack": "llamacpp", "quant": "q8_0"}, memory_budget="1GiB", **QUICK)
    (row,) = bench.json("run", "--max-ctx", config, "-o", bench.results)
    expect(row["status"] == "functional" and row["verified_n_ctx"], f"{row['status']}: {_reasons([row])}")
    return f"{row['verified_n_ctx']} tokens, {row['limit_reason']}"


@on("rpi5")
def probes(bench: Bench) -> str:
    cpu, *_ = bench.json("doctor", "--measure")["devices"]
    expect(cpu["read_bytes_per_s"] and cpu["matrix_flops_per_s"], f"not measured: {cpu['note']}")
    return f"ran; kernels {cpu['read_kernel']}, {cpu['matrix_kernel']}"


CHECKS = (
    Check("recognised", recognised),
    Check("recognised-rpi5", recognised_as_a_pi_5),
    Check("fake", fake, 600),
    Check("llamacpp", llamacpp, 1800),
    Check("profiles", profiles, 900),
    Check("doctor", doctor, 600),
    Check("llamacpp-rpi4", llamacpp_on_a_pi_4, 1800),
    Check("transformers", transformers, 3600),
    Check("same-weights", same_weights, 3600),
    Check("firmware", firmware, 1200),
    Check("memory-budget", memory_budget, 1200),
    Check("memory-rlimit", memory_rlimit),
    Check("longest-context", longest_context, 3600),
    Check("probes", probes, 1200),
)
SHORT = ("recognised", "recognised-rpi5", "fake", "llamacpp", "profiles", "doctor")


def _run(bench: Bench, *variants: Json, variables: dict[str, str] | None = None, **keys: Any) -> list[Json]:
    """The rows of a run of these variants. `keys`: of the protocol. Raises NotPossible: not built."""
    _expect_built(bench, *{str(variant["stack"]) for variant in variants} - {"fake"})
    config = bench.config(*variants, **QUICK | keys)
    return list(bench.json("run", config, "-o", bench.results, **(variables or {})))


def _expect_built(bench: Bench, *stacks: str) -> None:
    """Raises NotPossible where one is not built for this board: compiling takes an emulated machine hours."""
    built = {line["stack"] for line in bench.json("env", "list") if line["python"]} if stacks else ()
    if missing := sorted(set(stacks) - set(built)):
        raise NotPossible(f"not built: {', '.join(missing)}")


def _mechanism() -> str:
    """What limits memory here. Raises NotPossible."""
    try:
        return mechanism_here()
    except OSError as why:
        raise NotPossible(str(why)) from None


def _expect_emulated(cpu: Json) -> None:
    expect(cpu["emulated"], f"{cpu['name']}, {cpu['architecture']}: not known to be emulated")
    expect(cpu["name"].startswith("emulated aarch64, "), cpu["name"])


def _expect_functional(rows: Sequence[Json]) -> None:
    """Raises CheckFailed unless each is functional, as on any emulated machine, or invalid as disturbed."""
    bad = [
        f"{row['variant']}: {row['status']}: {_reasons([row])}"
        for row in rows
        if not (row["status"] == "functional" and "emulated" in _reasons([row])) and not row["disturbed"]
    ]
    expect(rows and not bad, "; ".join(bad) or "no rows")


def _reasons(rows: Sequence[Json]) -> str:
    return "; ".join({str(each): None for row in rows for each in row["reasons"]})


def _states(rows: Sequence[Json]) -> str:
    states = ["disturbed" if row["disturbed"] else row["status"] for row in rows]
    return ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))


def _kernels(bench: Bench) -> str:
    """What llama.cpp was compiled with, and into which layouts it repacked the weights, by its own report."""
    loaded = [record["loaded"] for record in bench.records()]
    repacked = sorted({name for each in loaded for name in each["kernels"]["repacked"]})
    return f"{loaded[0]['system_info']}; repacked to {', '.join(repacked) or 'nothing'}"
