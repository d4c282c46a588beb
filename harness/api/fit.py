"""The fit of a log of any tool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from harness.api.inputs import known_machines
from harness.api.theory import machines_of
from harness.base.files import Mistake
from harness.base.text import unknown
from harness.dataset.logs import Row, Theory, analysed, read
from harness.records.foreign.log import Log
from harness.records.foreign.table import Options
from harness.theory.known_models import NoModel, described


def fit(
    log: str | Path,
    *,
    unit: Literal["s", "ms", "us", "ns"] | None = None,
    latency_column: str | None = None,
    time_column: str | None = None,
    group_column: str | None = None,
    model: str | None = None,
    machine: str | None = None,
    bits_per_weight: Mapping[str, float] | None = None,
) -> list[Row]:
    """The line `latency(n) = B + n / W` of each series of a log, with its flags, as
    `harness fit LOG --json` prints it.

    Args:
        log: a CSV or JSON with a row per token, or a log of vLLM, SGLang, llama.cpp, Ollama or others.
        unit: of the latencies or times; by default at the end of the column's name.
        latency_column, time_column: the column of latencies, or of timestamps.
        group_column: one series per value of it; by default `variant`, if present.
        model, machine: compare with the limits of a known model, or a config.json, on a known machine.
        bits_per_weight: by series; without it the limit of B is not known.

    In a row `B_ms` is in ms, `W_tokens_per_ms` in tokens per ms, `tokens_per_s` in tokens per s; `unusable`
    says why a series has no fit, and is None where it has one. `flags` are warnings: `code`, `detail`.

    Raises LogError for a log that cannot be read, Mistake for a name that is not known.
    """
    table = read(Path(log), Options(latency_column, time_column, group_column, unit))
    bits = dict(bits_per_weight or {})
    check_variants(bits, table)
    return analysed(table, limits(model, machine), bits)


def check_variants(bits: Mapping[str, float], log: Log) -> None:
    """Raises Mistake for bits per weight of a series that the log does not have."""
    if unmatched := bits.keys() - log.series.keys() - log.requests.keys():
        raise Mistake(unknown("variant", min(unmatched), [*log.series, *log.requests]))


def limits(model: str | None, machine: str | None) -> Theory | None:
    """The limits of a model on a machine; None without both. Raises Mistake."""
    if model is None and machine is None:
        return None
    if model is None or machine is None:
        raise Mistake("--model and --machine go together")
    try:
        _, found = described(model, Path(), otherwise="give its config.json")
    except NoModel as why:
        raise Mistake(f"--model: {why}") from why
    (which,) = machines_of([machine], known_machines()).values()
    return Theory(found.decoder, which)
