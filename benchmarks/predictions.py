"""How far off is `harness recommend` on machines and variants that it has not seen? Each is left out, and
predicted.

Of the public measurements (harness/data/public_speeds.csv) a whole machine is predicted from the others, in
all its versions; the study counts as one on an RTX 4090. By maker, the table has the error of decode and of
prompts of 512 to 2,048 tokens, the share of rows in their 90% interval, its width (high over low), and of
pairs of rows of one machine for which an order is claimed the share in which it is right. Spreads of the
model were chosen by the likelihood of machines left out. `--store` keeps the table for `harness recommend`.

Targets: decode 8% (median) on NVIDIA and AMD, 12% on Apple, 15% on CPUs and boards, 90% of rows within 25%;
prompts 20% (median); 85 to 95% in their interval, which is at most 1.7 wide (median); order right in 95%.

Of the published study, a whole model size is predicted from the other five, and a GGUF type from the others
of all sizes. Prints the error of B, of W and of the latency at 10,000 tokens, and the share of values that
lie in their 90% interval. Two values do not count: autoawq's 32B model did not fit the card's memory and was
read over the bus, and the study printed 1.8B's B for 4B with exllamav2 (see the study's README).

    .venv/bin/python benchmarks/predictions.py [--by machine|size|type|row] [--store]

Targets: GGUF by size B at most 0.93% (median) and 1.9% (90% of rows), by type 0.40% and 1.1%, W from 4B up 2%
(median); other stacks B 3% (median), and within 10% in 90% of rows; 85 to 95% in their intervals.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in `harness recommend`

import numpy as np

from harness import records
from harness.base import data
from harness.recommend import examples
from harness.recommend.answer import ERRORS
from harness.recommend.least_squares import Floats
from harness.recommend.priors import maker_of
from harness.recommend.speed import NORMAL_90, Predictor
from harness.recommend.traits import GGML, Example, Range
from harness.report.text_table import Table
from harness.theory import public_speeds

STUDY = "published/rtx4090-qwen1.5"
DEEP = 10_000
PLACES = np.linspace(26, DEEP, 12).round().astype(int).tolist()
# Not what they are said to be; see above.
EXCEPT = (
    *(("qwen1.5-32b", f"autoawq {kernel}") for kernel in ("gemm", "exllama", "exllamav2")),
    ("qwen1.5-4b", "autoawq exllamav2"),
)
Figures = tuple[float, float, float, float]
"""Of B, W and the latency at DEEP, predicted over measured, less 1; and the place of B's measured value in
its interval, from -1 to 1 inside."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--by", choices=("machine", "size", "type", "row"), default=None)
    parser.add_argument("--store", action="store_true", help=f"write harness/data/{ERRORS}")
    arguments = parser.parse_args()
    found = examples.of_published(records.records(data.results(STUDY), print))
    gguf = [each for each in found if each.traits.engine == GGML]
    others = [each for each in found if each.traits.engine != GGML]
    if arguments.by in (None, "machine"):
        public = examples.of_public(public_speeds.used(public_speeds.rows()))
        table = by_maker(list(without_machine([*found, *public], public)))
        Table(list(table[0]), [[*map(str, row.values())] for row in table]).show()
        if arguments.store:
            with (data.HERE / ERRORS).open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(table)
    if arguments.by in (None, "size"):
        show("GGUF, a size left out", *left_out(found, gguf, lambda each: each.traits.model))
        show("other stacks, a size left out", *left_out(found, others, lambda each: each.traits.model))
    if arguments.by in (None, "type"):
        show("GGUF, a type left out", *left_out(gguf, gguf, lambda each: each.traits.type))
    if arguments.by in (None, "row"):
        show("GGUF, a type of one size left out", *left_out(gguf, gguf, lambda each: _row(each)))
    return 0


class LeftOut(NamedTuple):
    """A measured time, and its prediction without its machine. `n`: position, or length of the prompt.
    `unknowns`: of a step, as in Steps."""

    example: Example
    n: int
    measured: float
    predicted: Range
    unknowns: Floats | None = None

    @property
    def phase(self) -> str:
        return "prompts" if self.unknowns is None else "decode"


def without_machine(found: Sequence[Example], asked: Sequence[Example]) -> Iterator[LeftOut]:
    """Each asked row, predicted without all of its machine."""
    for device in dict.fromkeys(each.traits.device for each in asked):
        predictor = Predictor([each for each in found if each.traits.device != device])
        held = [each for each in asked if each.traits.device == device]
        for n in dict.fromkeys(n for each in held for n in each.at_ms):
            rows = [each for each in held if n in each.at_ms]
            steps = predictor.steps([[each.traits] for each in rows], n)
            for each, predicted, unknowns in zip(rows, steps.ranges, steps.unknowns, strict=True):
                yield LeftOut(each, n, each.at_ms[n], predicted, unknowns)
        for n in dict.fromkeys(n for each in held for n in each.first_tokens if 512 <= n <= 2048):
            rows = [each for each in held if n in each.first_tokens]
            firsts = predictor.first_token_ms([each.traits for each in rows], n)
            for each, first in zip(rows, firsts, strict=True):
                if first:
                    yield LeftOut(each, n, each.first_tokens[n], first)


def by_maker(rows: Sequence[LeftOut]) -> list[dict[str, str | int]]:
    """The table: by maker and phase, each row alike, and each machine alike."""
    found: dict[tuple[str, str], list[LeftOut]] = {}
    for each in rows:
        engine = "" if each.example.traits.engine == GGML else ", PyTorch"
        found.setdefault((f"{maker_of(each.example.traits)}{engine}", each.phase), []).append(each)
    return [_figures(*key, found[key]) for key in sorted(found, key=lambda key: (key[1], key[0]))]


def _figures(maker: str, phase: str, rows: Sequence[LeftOut]) -> dict[str, str | int]:
    machines = Counter(each.example.traits.device for each in rows)
    weights = np.array([1 / machines[each.example.traits.device] for each in rows])
    off = np.array([abs(each.measured / each.predicted.value - 1) for each in rows])
    inside = np.array([each.predicted.low <= each.measured <= each.predicted.high for each in rows])
    width = np.median([each.predicted.high / each.predicted.low for each in rows])
    claims = list(_claims(rows))
    return {
        "maker": maker,
        "phase": phase,
        "machines": len(machines),
        "rows": len(rows),
        "median": f"{np.median(off):.1%}",
        "90% within": f"{np.quantile(off, 0.9):.0%}",
        "within 25%": f"{np.mean(off <= 0.25):.0%}",
        "in interval": f"{np.mean(inside):.0%}",
        "width": f"{width:.2f}",
        "median by machine": f"{_weighted_median(off, weights):.1%}",
        "in interval by machine": f"{np.average(inside, weights=weights):.0%}",
        "claims": len(claims),
        "right": f"{np.mean(claims):.1%}" if claims else "",
    }


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    return float(values[order][np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)])


def _claims(rows: Sequence[LeftOut]) -> Iterator[bool]:
    """Of pairs of rows of one setup at one position, whose order is sure: whether it is right."""
    for one, other in combinations(rows, 2):
        a, b = one.example.traits, other.example.traits
        if (a.device, a.setup, one.n) != (b.device, b.setup, other.n) or (a.model, a.type) == (
            b.model,
            b.type,
        ):
            continue
        if one.unknowns is None or other.unknowns is None or len(one.unknowns) != len(other.unknowns):
            continue
        difference = math.log(one.predicted.value / other.predicted.value)
        if abs(difference) > NORMAL_90 * np.linalg.norm(one.unknowns - other.unknowns):
            yield (difference > 0) == (one.measured > other.measured)


def _row(example: Example) -> str:
    return f"{example.traits.model} {example.traits.type}"


def left_out(
    found: Sequence[Example], asked: Sequence[Example], of: Callable[[Example], str]
) -> tuple[list[Example], list[Figures]]:
    """Each asked example, and its figures, predicted without those that have the same `of`."""
    shown, figures = [], []
    for key in sorted({of(each) for each in asked}):
        held = [each for each in asked if of(each) == key]
        predictor = Predictor([each for each in found if of(each) != key])
        traits = [each.traits for each in held]
        curves = np.array([[each.value for each in predictor.latency_ms(traits, n)] for n in PLACES])
        design = np.column_stack([np.ones(len(PLACES)), PLACES])
        lines = np.linalg.lstsq(design, curves, rcond=None)[0].T
        for example, first, line in zip(held, predictor.latency_ms(traits, 1), lines, strict=True):
            B, last = example.at_ms[1], max(example.at_ms)
            slope = (example.at_ms[last] - B) / (last - 1)
            end, predicted = B + slope * (DEEP - 1), line[0] + line[1]
            place = math.log(B / predicted) / math.log(first.high / first.value)
            off = predicted / B - 1, slope / line[1] - 1, (line[0] + line[1] * DEEP) / end - 1
            shown.append(example)
            figures.append((*off, place))
    return shown, figures


def show(title: str, rows: Sequence[Example], figures: Sequence[Figures]) -> None:
    kept = [i for i, each in enumerate(rows) if (each.traits.model, each.traits.group) not in EXCEPT]
    table = np.array(figures)[kept]
    off = np.abs(table)
    sizes = [float(re.findall(r"([\d.]+)b$", rows[i].traits.model)[0]) for i in kept]
    print(f"\n{title}: {len(kept)} rows")
    for name, values in (("B", off[:, 0]), ("W", off[:, 1]), (f"at {DEEP:,}", off[:, 2])):
        most, inside = np.quantile(values, 0.9), np.mean(values <= 0.1)
        print(f"  {name:10} median {np.median(values):.2%}, 90% within {most:.1%}, {inside:.0%} within 10%")
    print(f"  W, 4B up   median {np.median(off[np.array(sizes) >= 4, 1]):.2%}")
    print(f"  B in its 90% interval: {np.mean(off[:, 3] <= 1):.0%}")
    for i in sorted(kept, key=lambda i: -abs(figures[i][0]))[:5]:
        traits = rows[i].traits
        name = f"{traits.model} {traits.group} {traits.type}".strip()
        print(f"    {name}: B {figures[i][0]:+.1%}, at {DEEP:,} {figures[i][2]:+.1%}")


if __name__ == "__main__":
    sys.exit(main())
