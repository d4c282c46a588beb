"""Fit the terms that `harness recommend` predicts from, and judge them on machines and sources left out.

The public measurements (harness/data/public_speeds.csv) and the published study are fitted together, and the
terms that hold on any machine are stored. To judge them, the rows of one source on one machine are predicted
from a fit without that machine and without that source. Rows of older software are evidence, and not judged:
what is predicted is today's. From these errors comes the spread of each family (a maker's GPUs, or CPUs): the
smallest one with which 90% of rows lie in their 90% interval. In all figures each source on a machine counts
by the square root of its rows, as these are alike. A family of few sources gets at least the spread of those
that have more together, of very few twice that. Beside the errors of decode are those of other tools'
formulas on the same rows.

The published study is also taken for the user's own machine: a size, and a type of GGUF, is predicted from
the others.

    PYTHONPATH=. .venv/bin/python -m benchmarks.predictions [--store] [--own]

Targets: decode 11% (median), 85 to 95% of rows in their interval, at most 1.9 wide; prompts 25%.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in `harness recommend`

import numpy as np

from benchmarks.formulas import FORMULAS
from harness import records
from harness.base import data
from harness.recommend import variant_costs
from harness.recommend.evidence import DECODE, ERRORS, FEW_SOURCES, NORMAL_90, PROMPTS
from harness.recommend.examples import first_token, of_line, traits_of_record
from harness.recommend.speed import SHIPPED, Floats, Predictor, Terms, by_fit, fitted_terms
from harness.recommend.terms import family_name, fit_of
from harness.recommend.traits import GGML, Example, Range, Traits
from harness.report.text_table import Table
from harness.stacks.header import references, stacks
from harness.theory import public_speeds
from harness.theory.floors import MOVED_STATE
from harness.theory.public_speeds import PublicSpeed

STUDY_LOOP, OLDER, OLDER_YEAR = "study", "2024", 2024
"""Software with costs of its own: the published study's loops of early 2024, and releases of that year and
before."""
STUDY = "published/rtx4090-qwen1.5"
SHARE = 0.9  # of rows that are to lie in their interval
ENOUGH_SOURCES = 10  # on machines, for a quantile of that share
TTFT_FROM = 128  # tokens; below, a prompt's time is mostly that of a step
OF_A_PRIOR = "DerekLiu35"  # the source of the prior of `host` in terms.py, so not judged
# Of the study, not what they are said to be: autoawq's 32B did not fit the card's memory and was read over
# the bus, and the study printed 1.8B's B for 4B with exllamav2 (see the study's README).
EXCEPT = (
    *(("qwen1.5-32b", f"autoawq {kernel}") for kernel in ("gemm", "exllama", "exllamav2")),
    ("qwen1.5-4b", "autoawq exllamav2"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", action="store_true", help=f"write harness/data/{SHIPPED} and {ERRORS}")
    parser.add_argument("--own", action="store_true", help="the study as the user's own machine")
    arguments = parser.parse_args()
    if arguments.own:
        study = of_study()
        for title, key in (("size", lambda row: row.traits.model), ("type", lambda row: row.traits.type)):
            show_own(f"GGUF, a {title} left out", [row for row in study if row.traits.engine == GGML], key)
        return
    everything = evidence()
    terms = fitted(everything)
    rows = list(left_out(everything, terms))
    table = by_family(rows)
    for shown in (table, list(beside_formulas(rows))):
        Table(list(shown[0]), [[*map(str, row.values())] for row in shown]).show()
    if arguments.store:
        (data.HERE / SHIPPED).write_text(stored(of_kinds(terms)), encoding="utf-8")
        (data.HERE / ERRORS).write_text(table_text(table), encoding="utf-8")


def of_study() -> list[Example]:
    """The variants of the published study that have a line."""
    found = []
    for stored in records.records(data.results(STUDY), print):
        record, reported, workload = stored.record, stored.record.get("reported"), stored.record["workload"]
        traits = traits_of_record(record, record["variant"])
        if traits is None or not reported or record["outcome"] != "ok":
            continue
        first, last = workload["prompt_tokens"] + 1, workload["prompt_tokens"] + workload["new_tokens"]
        if line := of_line(reported["B_ms"], reported["W_tokens_per_ms"], first, last):
            traits = replace(traits, setup=STUDY_LOOP, software=STUDY_LOOP)
            found.append(Example(traits, line, first_token(stored) if traits.flops else {}))
    return found


def of_public(rows: Iterable[PublicSpeed]) -> list[Example]:
    """One example per measurement of others; none of a GPU that ran by another interface than its maker's."""
    found = []
    for row in rows:
        if row.family != row.device.family and row.maker != "AMD":
            continue
        traits = _traits_of_public(row)
        first = {}
        if row.prompt_tokens and row.prompt_tok_s and traits.flops:
            first = {row.prompt_tokens: 1e3 * row.prompt_tokens / row.prompt_tok_s}
        found.append(Example(traits, {row.context or 1: 1e3 / row.tok_s} if row.tok_s else {}, first))
    return found


# Variants of PyTorch's stacks, as public rows name them.
_PUBLIC_VARIANTS = {
    "hf": "hf bf16",
    "autoawq exllama": "autoawq exllama",
    "autoawq gemm fused": "autoawq gemm-fused",
}


def _traits_of_public(row: PublicSpeed) -> Traits:
    group = _PUBLIC_VARIANTS.get(row.stack, references()["gguf"].stack)
    header = stacks()[group.partition(" ")[0]]
    engine, needs = variant_costs.engine(header, group), row.demand
    read = needs.weight_bytes_per_token
    if engine != GGML:
        read = variant_costs.read_bytes(header, row.made, None, None) or read
    return Traits(
        group=group,
        engine=engine,
        type=row.quant if engine == GGML else "",
        model=row.name,
        device=row.device.name,
        family=row.family,
        read_bytes=read + MOVED_STATE * needs.state_bytes,
        bytes_per_s=row.device.bandwidth_bytes_per_s,
        packed=row.packed,
        flops=variant_costs.prompt_flops(row.device, row.family, row.packed),
        expert_bytes=needs.expert_bytes,
        expert_share=needs.experts_used / needs.experts if needs.experts else 1.0,
        setup=_setup(row.source),
        software=OLDER if row.year and row.year <= OLDER_YEAR and engine == GGML else "",
        generation=variant_costs.generation(row.device),
        maker=variant_costs.maker_of(row.device),
        **variant_costs.kind_of_model(row.made, needs.kv_bytes_per_token),
    )


def _setup(source: str) -> str:
    """Who measured: a repository, or a thread; never empty, which is the user."""
    first = source.partition(" ")[0]
    return first if "/" in first else re.sub(r" ?\(.*|/\d+$", "", source) or "unknown"


def evidence() -> list[Example]:
    """The study and the public measurements that are used."""
    return [*of_study(), *of_public(public_speeds.used(public_speeds.rows()))]


def fitted(measured: Sequence[Example], near: Mapping[str, Terms] | None = None) -> dict[str, Terms]:
    """All terms, fitted to all of these. `near`: fitted to almost the same."""
    return {
        fit: fitted_terms(of_fit, Terms(), near.get(fit) if near else None)
        for fit, of_fit in by_fit(measured).items()
    }


def of_kinds(terms: Mapping[str, Terms]) -> dict[str, Terms]:
    """Those that hold on any machine."""
    return {fit: of_fit.of_kinds() for fit, of_fit in terms.items()}


@dataclass(frozen=True)
class LeftOut:
    """A measured time, and its prediction without its machine and its source. `sd`: of its logarithm."""

    example: Example
    phase: str
    measured: float
    predicted: Range

    @property
    def family(self) -> str:
        return family_name(self.example.traits)

    @property
    def off(self) -> float:
        """The logarithm of measured over predicted."""
        return math.log(self.measured / self.predicted.value)

    @property
    def sd(self) -> float:
        return math.log(self.predicted.high / self.predicted.value) / NORMAL_90

    @property
    def source(self) -> tuple[str, str]:
        return self.example.traits.device, self.example.traits.setup


def left_out(measured: Sequence[Example], near: Mapping[str, Terms]) -> Iterator[LeftOut]:
    """Each row of today's software, but for the study's and a prior's, predicted without its machine and its
    source."""
    groups: dict[tuple[str, str, str], list[Example]] = {}
    for example in measured:
        if not example.traits.software and not example.traits.setup.startswith(OF_A_PRIOR):
            traits = example.traits
            groups.setdefault((fit_of(traits), traits.device, traits.setup), []).append(example)
    for (fit, device, source), rows in groups.items():
        others = [
            example
            for example in measured
            if fit_of(example.traits) == fit
            and example.traits.device != device
            and example.traits.setup != source
        ]
        none = {(family_name(row.traits), phase): 0.0 for row in rows for phase in (DECODE, PROMPTS)}
        predictor = Predictor((), of_kinds(fitted(others, near)), none)
        yield from predicted(predictor, rows)


def predicted(predictor: Predictor, rows: Sequence[Example]) -> Iterator[LeftOut]:
    """Rows as on a machine and from a source of which nothing is known."""
    for row in rows:
        for n, ms in row.at_ms.items():
            yield LeftOut(row, DECODE, ms, predictor.latency_ms([row.traits], n)[0])
        for n, ms in row.first_tokens.items():
            first = predictor.first_token_ms([row.traits], n)[0]
            if first and n >= TTFT_FROM:
                yield LeftOut(row, PROMPTS, ms, first)


def by_family(rows: Iterable[LeftOut]) -> list[dict[str, str | int]]:
    """The table of errors and spreads, by family and phase."""
    of: dict[tuple[str, str], list[LeftOut]] = {}
    for row in rows:
        of.setdefault((row.family, row.phase), []).append(row)
    spreads = {key: spread(of_key, of) for key, of_key in of.items()}
    return [errors(key, of[key], spreads[key]) for key in sorted(of, key=lambda key: (key[1], key[0]))]


def spread(rows: Sequence[LeftOut], of: Mapping[tuple[str, str], Sequence[LeftOut]]) -> float:
    """What the times of a family spread beyond the terms."""
    count = sources(rows)
    if count >= ENOUGH_SOURCES:
        return _spread(rows)
    phase = [of_key for of_key in of.values() if of_key[0].phase == rows[0].phase]
    alike = [row for of_key in phase if sources(of_key) >= FEW_SOURCES for row in of_key] or rows
    return max(_spread(alike), _spread(rows)) * (2 if count < FEW_SOURCES else 1)


def sources(rows: Sequence[LeftOut]) -> int:
    """How many sources on machines there are."""
    return len({row.source for row in rows})


def _spread(rows: Sequence[LeftOut]) -> float:
    """The smallest spread with which that share of rows lies in its interval."""
    off, sd = np.array([row.off for row in rows]), np.array([row.sd for row in rows])
    needed = np.sqrt(np.maximum((off / NORMAL_90) ** 2 - sd**2, 0.0))
    order, weights = np.argsort(needed), _weights(rows)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(needed[order][min(int(np.searchsorted(reached, SHARE)), len(rows) - 1)])


def _weights(rows: Sequence[LeftOut]) -> Floats:
    of_rows = [row.source for row in rows]
    return np.array([1 / math.sqrt(of_rows.count(source)) for source in of_rows])


def _median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    return float(values[order][np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)])


def errors(key: tuple[str, str], rows: Sequence[LeftOut], extra: float) -> dict[str, str | int]:
    off = np.array([abs(math.expm1(row.off)) for row in rows])
    sd = np.array([math.hypot(row.sd, extra) for row in rows])
    inside = np.array([abs(row.off) for row in rows]) <= NORMAL_90 * sd
    weights = _weights(rows)
    sizes = [row.example.traits.read_bytes for row in rows]
    return {
        "family": key[0],
        "phase": key[1],
        "machines": len({row.example.traits.device for row in rows}),
        "sources": len({row.example.traits.setup for row in rows}),
        "rows": len(rows),
        "spread": f"{extra:.3f}",
        "median": f"{_median(off, weights):.3f}",
        "within_25": f"{np.average(off <= 0.25, weights=weights):.2f}",
        "inside": f"{np.average(inside, weights=weights):.2f}",
        "width": f"{math.exp(2 * NORMAL_90 * _median(sd, weights)):.2f}",
        "least_bytes": f"{min(sizes):.3g}",
        "most_bytes": f"{max(sizes):.3g}",
        "kinds": " ".join(sorted({row.example.traits.kind for row in rows})),
    }


def beside_formulas(rows: Sequence[LeftOut]) -> Iterator[dict[str, str]]:
    """The median errors of decode, of predictions and of each formula: by family, and of mixtures."""
    groups: dict[str, list[LeftOut]] = {}
    for row in sorted(rows, key=lambda row: row.family):
        if row.phase == DECODE:
            groups.setdefault(row.family, []).append(row)
    decode = [row for group in groups.values() for row in group]
    groups["mixtures"] = [row for row in decode if row.example.traits.expert_bytes]
    for name, group in groups.items():
        times = {"predicted": [row.predicted.value for row in group]}
        times |= {title: [ms(row.example.traits) for row in group] for title, ms in FORMULAS.items()}
        measured, weights = np.array([row.measured for row in group]), _weights(group)
        medians = {title: _median(np.abs(measured / ms - 1), weights) for title, ms in times.items()}
        yield {"decode": name, "rows": str(len(group)), **{k: f"{v:.3f}" for k, v in medians.items()}}


def stored(terms: Mapping[str, Terms]) -> str:
    """The content of the shipped file: of roots, which are triangular, the part that is not zero."""
    content = {
        fit: {
            "names": of_fit.names,
            "mean": [round(value, 4) for value in of_fit.mean.tolist()],
            "root": [[round(v, 4) for v in row[: i + 1]] for i, row in enumerate(of_fit.root.tolist())],
        }
        for fit, of_fit in sorted(terms.items())
    }
    return json.dumps(content, separators=(",", ":")).replace('],"', '],\n"').replace("],[", "],\n[") + "\n"


def table_text(table: Sequence[Mapping[str, str | int]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def show_own(title: str, rows: Sequence[Example], key: Callable[[Example], str]) -> None:
    """The study as the user's own: rows with the same key are predicted from the others."""
    off, inside = [], []
    for name in sorted({key(row) for row in rows}):
        own = [replace(row, traits=replace(row.traits, setup="")) for row in rows]
        predictor = Predictor([row for row in own if key(row) != name])
        for row in own:
            if key(row) == name and (row.traits.model, row.traits.group) not in EXCEPT:
                n, ms = min(row.at_ms.items())
                (step,) = predictor.latency_ms([row.traits], n)
                off.append(abs(step.value / ms - 1))
                inside.append(step.low <= ms <= step.high)
    most = np.quantile(off, 0.9)
    print(f"{title}: TPOT off by {np.median(off):.2%} (median), 90% within {most:.1%}; ", end="")
    print(f"{np.mean(inside):.0%} of {len(off)} in their interval")


if __name__ == "__main__":
    main()
