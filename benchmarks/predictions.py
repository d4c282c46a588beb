"""How far off is `harness recommend` on variants that it has not seen? Each is left out, and predicted.

Of the published study, a whole model size is predicted from the other five, and a GGUF type from the others
of all sizes. Prints the error of B, of W and of the latency at 10,000 tokens, and the share of values that
lie in their 90% interval. Two values do not count: autoawq's 32B model did not fit the card's memory and was
read over the bus, and the study printed 1.8B's B for 4B with exllamav2 (see the study's README).

    .venv/bin/python benchmarks/predictions.py [--by size|type]

Targets: GGUF by size B at most 0.93% (median) and 1.9% (90% of rows), by type 0.40% and 1.1%, W from 4B up 2%
(median); other stacks B 3% (median), and within 10% in 90% of rows; 85 to 95% in their intervals.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence

import numpy as np

from harness import records
from harness.base import data
from harness.recommend import examples
from harness.recommend.speed import GGML, Example, Predictor

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
    parser.add_argument("--by", choices=("size", "type", "row"), default=None)
    arguments = parser.parse_args()
    found = examples.of_published(records.records(data.results(STUDY), print))
    gguf = [each for each in found if each.traits.engine == GGML]
    others = [each for each in found if each.traits.engine != GGML]
    if arguments.by in (None, "size"):
        show("GGUF, a size left out", *left_out(found, gguf, lambda each: each.traits.model))
        show("other stacks, a size left out", *left_out(found, others, lambda each: each.traits.model))
    if arguments.by in (None, "type"):
        show("GGUF, a type left out", *left_out(gguf, gguf, lambda each: each.traits.type))
    if arguments.by in (None, "row"):
        show("GGUF, a type of one size left out", *left_out(gguf, gguf, lambda each: _row(each)))
    return 0


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
