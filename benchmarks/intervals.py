"""How often does a 95% interval cover the truth? Simulated campaigns of known lines, with noise as seen here.

Prints the coverage of the intervals of B, of W (as its slope) and of tok/s, by kind of noise. Truth is what a
process takes that nothing disturbs. Target: 93 to 97% for three repeats.

    .venv/bin/python benchmarks/intervals.py [--campaigns 1000] [--seed 0]

- smooth: processes differ by 1.3% (normal), in all cells alike;
- rough: by 1.3%, in some cells more and in some less, with heavier tails;
- late: as rough, and every 20th process is 3 to 10% late.

Within a process tokens vary by 2%, neighbours alike (rho 0.7).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from typing import Any

import numpy as np
from scipy.signal import lfilter

from harness.analysis import cell_intervals, line_fit, repeat_figures

NOISES = ("smooth", "rough", "late")
FIGURES = {"B": "B_ci95_ms", "W": "slope_ci95_ms", "tok/s": "tokens_per_s_ci95"}
CELLS = (3, 12)  # fewest and most of a campaign
TOKENS = 2048  # after the first: the fewest of which W is reported
SPREAD, TOKEN_SPREAD, RHO = 0.013, 0.02, 0.7
X = np.arange(26, 26 + TOKENS, dtype=float)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--campaigns", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{'noise':8}{'repeats':9}{'cells':9}{'B':8}{'W':8}{'tok/s':8}{'B +-':8}no interval")
    for repeats, cells in ((3, CELLS), (3, (1, 1)), (3, (3, 3)), (3, (12, 12)), (2, CELLS), (2, (3, 3))):
        for noise in NOISES:
            found = coverage(noise, repeats, arguments.campaigns, arguments.seed, cells)
            shares = "".join(f"{found[figure]:<8.1%}" for figure in FIGURES)
            of = "-".join(map(str, dict.fromkeys(cells)))
            print(f"{noise:8}{repeats:<9}{of:9}{shares}{found['width']:<8.2%}{found['none']:.1%}", flush=True)
    return 0


def coverage(
    noise: str, repeats: int, campaigns: int, seed: int, cells: tuple[int, int] = CELLS
) -> dict[str, float]:
    """The share of intervals that cover the truth, by figure; `width`: half an interval of B, over B, the
    median; `none`: share of cells whose B has no interval."""
    chance = np.random.default_rng(seed)
    covered: Counter[str] = Counter()
    known: Counter[str] = Counter()
    widths: list[float] = []
    looked_at = 0
    for number in range(campaigns):
        truths = _truths(chance, int(chance.integers(cells[0], cells[1] + 1)))
        rows = [_cell(chance, noise, truth, repeats, str(number)) for truth in truths]
        looked_at += len(truths)
        for truth, found in zip(truths, cell_intervals.of_cells(rows), strict=True):
            right = {"B": truth.B_ms, "W": truth.slope_ms, "tok/s": 1e3 / float(truth.at(X).mean())}
            for figure, key in FIGURES.items():
                if ends := found[key]:
                    known[figure] += 1
                    covered[figure] += ends[0] <= right[figure] <= ends[1]
            if ends := found["B_ci95_ms"]:
                widths.append((ends[1] - ends[0]) / 2 / truth.B_ms)
    shares = {figure: covered[figure] / max(known[figure], 1) for figure in FIGURES}
    width = float(np.median(widths)) if widths else math.nan
    return shares | {"width": width, "none": 1 - known["B"] / looked_at}


def _truths(chance: np.random.Generator, count: int) -> list[line_fit.Line]:
    """Of one model in several quantizations: B differs by up to four, the cost of context by up to two."""
    slope_ms = 1 / chance.uniform(300, 3000)
    return [
        line_fit.Line(float(chance.uniform(8, 32)), float(slope_ms * chance.uniform(0.7, 1.4)))
        for _ in range(count)
    ]


def _cell(
    chance: np.random.Generator, noise: str, truth: line_fit.Line, repeats: int, campaign: str
) -> list[dict[str, Any]]:
    """What the intervals take of the row of each repeat."""
    spread = SPREAD if noise == "smooth" else SPREAD * math.exp(chance.normal(0, 0.3))
    rows = []
    for _ in range(repeats):
        own = chance.normal() if noise == "smooth" else chance.standard_t(5) * math.sqrt(3 / 5)
        late = chance.uniform(0.03, 0.10) if noise == "late" and chance.random() < 0.05 else 0.0
        drawn = chance.normal(size=TOKENS + 100) * TOKEN_SPREAD * math.sqrt(1 - RHO**2)
        tokens = lfilter([1], [1, -RHO], drawn)[100:]  # the first are not yet stationary
        ms = truth.at(X) * math.exp(spread * own + late) * (1 + tokens)
        known, rate = line_fit.interval(X, ms), float(1e3 / ms.mean())
        figures = repeat_figures.empty_figures(TOKENS + 1)
        figures |= repeat_figures.line_figures(line_fit.least_squares(X, ms), known, identifiable=True)
        figures |= {"tokens_per_s": rate, "tokens_per_s_ci95": repeat_figures.rate_ci95(rate, known)}
        figures["median_ms"] = float(np.median(ms))
        rows.append(figures | {"campaign": campaign, "started_utc": "", "status": "ok"})
    return rows


if __name__ == "__main__":
    sys.exit(main())
