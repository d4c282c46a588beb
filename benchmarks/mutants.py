"""Do the tests notice a wrong core? Random mutants of it, each run against the tests of its module.

A mutant is a copy of the project in which one comparison, operator or constant of a core module is another.
It is killed if a test of its module fails, an import included, or they take ten times as long as without it.
Prints each survivor as `file:line: before -> after`, and how many were killed. Target: 85% of 100.

    .venv/bin/python benchmarks/mutants.py [--mutants 100] [--seed 0] [--only theory/floors] [--jobs 2]
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TESTS = {
    "runners/clock.py": "clock",
    "runners/worker.py": "protocol campaign",
    "harness/analysis/line_fit.py": "intervals series",
    "harness/analysis/repeat_figures.py": "series intervals",
    "harness/analysis/machine_drift.py": "drift",
    "harness/analysis/cell_intervals.py": "intervals",
    "harness/analysis/verdicts.py": "analysis retry served",
    "harness/analysis/clocks.py": "second_clock retry",
    "harness/analysis/flags.py": "series",
    "harness/analysis/differences.py": "difference",
    "harness/analysis/windows.py": "windows",
    "harness/analysis/steps.py": "steps",
    "harness/analysis/traffic.py": "traffic ceilings",
    "harness/theory/floors.py": "theory work limits ceilings architectures prefill",
    "harness/theory/tensors.py": "theory gguf_types footprint models",
    "harness/theory/ggml_quants.py": "theory gguf_types footprint",
    "harness/theory/memory.py": "theory memory limits",
    "harness/theory/memory_fit.py": "theory theory_rows",
    "harness/theory/split_weights.py": "placement recommend",
    "harness/models/gguf.py": "checkpoint models not_a_model security_models",
}
"""The tests of each core module, without `tests/test_` and `.py`."""
COPIED = (
    *("harness", "runners", "tests", "benchmarks", "configs", "results", "docs", "ci", "requirements"),
    "pyproject.toml",
)
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+"}
LONG = 10  # times the time without a mutant


class Mutant(NamedTuple):
    module: str
    line: int
    start: int
    end: int
    text: str
    """In place of these bytes of the source."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="modules whose path has this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    modules = [module for module in TESTS if arguments.only in module]
    every = [mutant for module in modules for mutant in mutants(module)]
    chosen = random.Random(arguments.seed).sample(every, min(arguments.mutants, len(every)))
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(arguments.jobs):
            copy = Path(folder) / str(number)
            for name in COPIED:
                source, target = ROOT / name, copy / name
                if source.is_dir():
                    shutil.copytree(source, target, symlinks=True)
                else:
                    shutil.copy2(source, target)
            copies.put(copy)
        usual_s = {module: _usual_s(copies, module) for module in {mutant.module for mutant in chosen}}
        with ThreadPoolExecutor(arguments.jobs) as pool:
            killed = list(pool.map(lambda mutant: _is_killed(copies, mutant, usual_s), chosen))
    of_module, kills = Counter(mutant.module for mutant in chosen), Counter[str]()
    for mutant, is_killed in zip(chosen, killed, strict=True):
        kills[mutant.module] += is_killed
        if not is_killed:
            content = (ROOT / mutant.module).read_bytes()
            line = content.splitlines()[mutant.line - 1].decode().strip()
            before = content[mutant.start : mutant.end].decode()
            print(f"survived: {mutant.module}:{mutant.line}: {before} -> {mutant.text}   in {line}")
    for module, count in sorted(of_module.items()):
        print(f"{module}: {kills[module]} of {count} killed")
    print(f"killed {kills.total()} of {len(chosen)} ({kills.total() / len(chosen):.0%})")
    return 0


def mutants(module: str) -> Iterator[Mutant]:
    """All mutants of a module, in the order of its source."""
    source = (ROOT / module).read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def at(line: int | None, column: int | None) -> int:
        assert line is not None
        assert column is not None
        return begins[line - 1] + column

    def between(left: ast.expr, right: ast.expr, sign: str) -> Mutant:
        start = at(left.end_lineno, left.end_col_offset)
        return Mutant(module, left.lineno, start, at(right.lineno, right.col_offset), f" {sign} ")

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
            mutant = between(node.left, node.comparators[0], COMPARED[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            mutant = between(node.left, node.right, OPERATORS[type(node.op)])
        elif isinstance(node, ast.Constant) and isinstance(value := node.value, int | float):
            changed = (
                not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 1.5
            )
            start, end = at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)
            mutant = Mutant(module, node.lineno, start, end, repr(changed))
        else:
            continue
        if not set(b"()\n") & set(source[mutant.start : mutant.end]):  # an operator beside parentheses
            yield mutant


def _usual_s(copies: SimpleQueue[Path], module: str) -> float:
    """Seconds of the tests of a module without a mutant. Raises SystemExit if they fail."""
    copy, began = copies.get(), time.monotonic()
    if not _passes(copy, module, None):
        raise SystemExit(f"{module}: its tests fail without a mutant")
    copies.put(copy)
    return time.monotonic() - began


def _is_killed(copies: SimpleQueue[Path], mutant: Mutant, usual_s: dict[str, float]) -> bool:
    copy = copies.get()
    path = copy / mutant.module
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
    try:
        return not _passes(copy, mutant.module, LONG * usual_s[mutant.module])
    finally:
        path.write_bytes(source)
        copies.put(copy)


def _passes(copy: Path, module: str, limit_s: float | None) -> bool:
    tests = [f"tests/test_{name}.py" for name in TESTS[module].split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    # Processes that tests start import the copy too, and compile it anew: times of files may be equal.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    try:
        ran = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
