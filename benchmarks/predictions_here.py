"""How far off is `harness recommend` on this machine's CPU, once calibrated with three variants?

Measures Qwen1.5-0.5B in q4_0 and q8_0 and Qwen1.5-1.8B in q4_0, and what is predicted from these three and
the rate of each type (a probe of ggml's products, before and after): both models in other types, the shapes
of Qwen3-0.6B and Llama-3.2-1B, and transformers in bf16. All in one campaign, interleaved. Prints each
prediction with its interval beside what was measured, and the median error, also without the rates. Target:
5% on a quiet machine. The spread of a cell's repeats says how quiet it was.

    .venv/bin/python benchmarks/predictions_here.py [--tokens 96] [--repeats 3] [--results DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import machine, records
from harness.cli import recommend_inputs
from harness.dataset.study import load_study
from harness.recommend import candidates, examples
from harness.recommend.speed import Predictor
from harness.recommend.traits import Example

HARNESS = Path(sys.executable).parent / "harness"
TYPES = ["q8_0", "q6_k", "q5_k_m", "q5_0", "q4_k_m", "q4_0", "q3_k_m", "q2_k"]
CALIBRATED = {("qwen1.5-0.5b", "q4_0"), ("qwen1.5-0.5b", "q8_0"), ("qwen1.5-1.8b", "q4_0")}
TARGET = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, help="work in this folder, and continue there")
    arguments = parser.parse_args()
    folder = arguments.results or Path(tempfile.mkdtemp(prefix="predictions-"))
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "predictions.yaml"
    config.write_text(json.dumps(experiment(arguments.tokens, arguments.repeats)))
    recommend_inputs.rates(folder / "results")
    run = [str(HARNESS), "run", str(config), "-o", str(folder / "results")]
    if (code := subprocess.run(run, stdout=subprocess.DEVNULL).returncode) not in (0, 1):
        return code
    recommend_inputs.rates(folder / "results")
    gathered = load_study([*records.records(folder / "results", print)])
    found, device = examples.of_own(gathered), machine.facts()["cpu"]
    print("Without the rate of each type:")
    compare(found)
    print("\nWith it:")
    rates = candidates.kept_rates(folder / "results", device, machine.default_threads())
    compare(examples.with_rates(found, device, rates))
    missing = [cell["name"] for cell in gathered.cells if cell["status"] != "ok"]
    print(f"not ok: {', '.join(missing) or 'none'}\n\nrecords: {folder}")
    return 0


def experiment(tokens: int, repeats: int) -> dict[str, object]:
    """The config; JSON is YAML."""
    others = ["qwen3-0.6b", "llama-3.2-1b"]
    return {
        "protocol": {"new_tokens": tokens, "repeats": repeats},
        "models": [{"shape": name} for name in ("qwen1.5-0.5b", "qwen1.5-1.8b", *others)],
        "variants": [
            {"stack": "llamacpp", "quant": TYPES, "models": ["qwen1.5-*"]},
            {"stack": "llamacpp", "quant": ["q4_0", "q8_0"], "models": others},
            {"stack": "hf", "dtype": "bf16", "models": ["qwen1.5-0.5b"]},
        ],
    }


def compare(found: list[Example]) -> None:
    """Print predicted beside measured, by variant."""
    known = [each for each in found if (each.traits.model, each.traits.type) in CALIBRATED]
    asked = [each for each in found if each not in known]
    if len(known) < len(CALIBRATED):
        print(f"only {len(known)} of the three variants to calibrate with are ok")
    predictor = Predictor(known)
    errors, inside = [], 0
    for each in sorted(asked, key=lambda each: (each.traits.model, each.traits.read_bytes)):
        ((n, measured),) = each.at_ms.items()
        of = predictor.latency_ms([each.traits], n)[0]
        errors.append(of.value / measured - 1)
        inside += of.low <= measured <= of.high
        name = f"{each.traits.model} {each.traits.group} {each.traits.type}".strip()
        print(
            f"{name:36} predicted {of.value:7.2f} ms ({of.low:.2f} to {of.high:.2f}), "
            f"measured {measured:7.2f}: {errors[-1]:+.1%}"
        )
    if errors:
        median = statistics.median(map(abs, errors))
        print(f"median error {median:.1%} of {len(errors)} (target {TARGET:.0%}), {inside} in their interval")


if __name__ == "__main__":
    sys.exit(main())
