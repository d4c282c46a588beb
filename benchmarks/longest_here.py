"""Is the longest context that `harness recommend` gives the one that `harness max-ctx` proves?

Searches small models in llama.cpp on the CPU under memory budgets, and prints both lengths by variant.
Target: within 1%; a context is a multiple of 256 tokens, so one granule off counts as equal.

    .venv/bin/python benchmarks/longest_here.py [--results DIR]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import records
from harness.campaign.forecast import Device
from harness.config import Model
from harness.dataset.study import load_study
from harness.recommend.candidates import Candidate, Place, Subject, candidates
from harness.theory.hf_config import SHAPES
from harness.theory.known_models import Described

HARNESS = Path(sys.executable).parent / "harness"
BUDGETS = {"qwen1.5-0.5b": 1_200_000_000, "qwen3-0.6b": 1_000_000_000, "llama-3.2-1b": 1_400_000_000}
VARIANTS = [
    {"quant": "q4_0"},
    {"quant": "q4_0", "flash_attn": True},
    {"quant": "q8_0", "flash_attn": True, "type_k": "q8_0", "type_v": "q8_0"},
]
TARGET, GRANULE = 0.01, 256


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, help="work in this folder, and continue there")
    parser.add_argument("--models", nargs="+", default=list(BUDGETS), choices=BUDGETS)
    given = parser.parse_args()
    folder = given.results or Path(tempfile.mkdtemp(prefix="longest-"))
    folder.mkdir(parents=True, exist_ok=True)
    missed = 0
    for model in given.models:
        proved = searched(folder, model, BUDGETS[model])
        for name, candidate in offered(model, BUDGETS[model]).items():
            if name not in proved:
                continue
            most, length = candidate.longest or 0, proved[name]
            off = most / length - 1 if length else float("nan")
            missed += abs(most - length) > max(GRANULE, TARGET * length)
            print(f"{model} {name}: recommend {most:,}, max-ctx {length:,}: {off:+.1%}")
    print(f"{missed} are off by more than 1% and a granule")
    return 1 if missed else 0


def offered(model: str, budget: int) -> dict[str, Candidate]:
    shape = SHAPES[model]
    place = Place(Device("cpu", "the budget", budget), "here", 1e10, {False: None, True: None}, 1)
    subject = Subject(Model(name=model, described=Described(shape)), shape)
    found = candidates(subject, place, 256, ["llamacpp"])
    return {each.cell.variant.name: each for each in found}


def searched(folder: Path, model: str, budget: int) -> dict[str, int]:
    """By variant, the longest context that was filled within the budget."""
    config = folder / f"{model}.yaml"
    protocol = {"memory_budget": f"{budget // 10**6}MB", "timeout_s": 1800}
    variants = [{"stack": "llamacpp", **each} for each in VARIANTS]
    config.write_text(json.dumps({"protocol": protocol, "models": [{"shape": model}], "variants": variants}))
    command = [str(HARNESS), "max-ctx", str(config), "-o", str(folder / model)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    found = load_study([*records.records(folder / model, print)]).searches
    return {each["variant"]: int(each["verified_n_ctx"]) for each in found if each["verified_n_ctx"]}


if __name__ == "__main__":
    sys.exit(main())
