"""What does check-weights find in a mixture of experts, and when does it cry wolf? Real stacks, small models.

A variant is compared with its own weights, dequantized and run by transformers in float32: once with the
reference's routers choosing for themselves (`free`), and once with the experts that the variant chose
(`follow`), which is what the product does. Faults are put into a checkpoint, as in weights.py.

    .venv/bin/python benchmarks/validity/mixtures.py [--quants q8_0 q4_0 nf4] [--seeds 3]
    .venv/bin/python benchmarks/validity/mixtures.py --faults
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import tiny_models
from weights import DEPTH, PROMPT, STACK, built, change

from harness.analysis import quality
from harness.campaign import worker
from harness.models import layout
from harness.stacks.header import stacks
from runners.protocol import Request

KINDS = ("gpt_oss", "qwen3_moe", "mixtral")
QUANTS = ("q8_0", "q4_0", "q4_k_m", "mxfp4_moe", "int8", "nf4", "f16", "hf-bf16")


def zeroed(name: str, values: Any, layer: int) -> Any:
    """An expert whose output is none."""
    if f".{layer}." not in name:
        return None
    if name.endswith(("experts.down_proj", "experts.down_proj_bias")):
        values[1] = 0
        return values
    lone = name.endswith(("experts.1.w2.weight", "experts.1.down_proj.weight"))
    return np.zeros_like(values) if lone else None


def router(name: str, values: Any, layer: int, change_of: Any) -> Any:
    if f".{layer}." not in name or not name.endswith(("gate.weight", "router.weight", "router.bias")):
        return None
    return change_of(values)


def swapped(values: Any) -> Any:
    values[[0, 1]] = values[[1, 0]]
    return values


FAULTS: dict[str, Any] = {
    "expert zeroed": lambda name, values: zeroed(name, values, 2),
    "experts 0, 1 swapped": lambda name, values: router(name, values, 2, swapped),
    "router shuffled": lambda name, values: router(name, values, 2, lambda v: np.roll(v, 1, 0)),
    "router x 0.5": lambda name, values: router(name, values, 2, lambda v: v * 0.5),
    "top-k altered": None,
}


class Bench:
    """Checkpoints, what the stacks make of them, and their logits, of one kind and seed."""

    def __init__(self, folder: Path, kind: str, seed: int) -> None:
        self.folder, self.kind, self.seed = folder, kind, seed
        folder.mkdir(parents=True, exist_ok=True)
        self.sound = folder / "sound"
        self.job("hf", "synthesize", None, {"target": self.sound}, {"seed": seed}, self.layout())

    def layout(self, **changes: Any) -> dict[str, Any]:
        return layout.of(tiny_models.config(self.kind, **changes)).plain()

    def job(
        self,
        stack: str,
        job: str,
        path: Path | None,
        files: dict[str, Path],
        options: dict[str, Any] | None = None,
        laid: dict[str, Any] | None = None,
        workloads: list[dict[str, Any]] | None = None,
    ) -> Any:
        given = {o.name: o.default for o in stacks()[stack].options.values()} | {"n_ctx": 512}
        given = {} if job == "quantize" else given | ({"attn": "eager"} if stack != "llamacpp" else {})
        given["threads"] = 1
        model = {"name": "m", "path": str(path) if path else None, "shape": None, "layout": laid}
        named = {name: str(file) for name, file in files.items()}
        request = Request(job, stack, "cpu", model, given | (options or {}), workloads or [], named)
        return worker.facts_of(worker.run_job(request, built(stack), self.folder, 1800, 1))

    def faulty(self, name: str) -> tuple[Path, dict[str, Any]]:
        """The checkpoint with a fault, and its layout."""
        target, altered = self.folder / "".join(c for c in name if c.isalnum()), {}
        shutil.copytree(self.sound, target)
        if FAULTS[name]:
            for file in target.glob("*.safetensors"):
                change(file, FAULTS[name])
        else:
            config = json.loads((target / "config.json").read_text())
            altered = {"num_experts_per_tok": config["num_experts_per_tok"] // 2}
            (target / "config.json").write_text(json.dumps(config | altered))
        return target, self.layout(**altered)

    def made(self, source: Path, quant: str, laid: dict[str, Any]) -> Path:
        if quant in STACK:
            return source
        f16, target = Path(f"{source}-f16.gguf"), Path(f"{source}-{quant}.gguf")
        if not f16.exists():
            files = {"source": source, "target": f16}
            self.job("llamacpp", "convert", source, files, {"dtype": "f16"}, laid)
        if not target.exists():
            options = {"quant": quant, "as_published": False}
            self.job("llamacpp", "quantize", f16, {"source": f16, "target": target}, options)
        return target

    def own(self, quant: str) -> Path:
        """The sound variant's weights, dequantized."""
        made, target = self.made(self.sound, quant, self.layout()), self.folder / f"own-{quant}"
        if quant in ("f16", "hf-bf16"):
            return self.sound
        if not target.exists() and quant in STACK:
            self.job("bnb", "dequantize", made, {"target": target}, {"quant": quant})
        elif not target.exists():
            self.job("llamacpp", "dequantize", made, {"source": made, "target": target}, None, self.layout())
        return target

    def logits(self, path: Path, quant: str, follow: Path | None = None) -> tuple[Any, Any, Path]:
        """Logits, what is said of the experts, and the file of these."""
        name = f"{path.name}-{quant}{'-follow' if follow else ''}"
        file, experts = self.folder / f"{name}.npy", self.folder / f"{name}-experts.npy"
        if quant == "fp32" and not follow and file.exists():
            return np.load(file), {}, experts
        stack = "hf" if quant == "fp32" else STACK.get(quant, "llamacpp")
        given = {"fp32": {"dtype": "fp32"}, "hf-bf16": {"dtype": "bf16"}}
        options = given.get(quant, {} if stack == "llamacpp" else {"quant": quant})
        ids = [(1013 + 7919 * i) % tiny_models.VOCABULARY for i in range(DEPTH)]
        windows = [[DEPTH - 25, DEPTH]]
        workload = {"ids": ids, "prompt_tokens": PROMPT, "windows": windows, "seconds": None}
        files = {"logits": file, "experts": experts} | ({"follow": follow} if follow else {})
        facts = self.job(stack, "logits", path, files, options, None, [workload])
        return np.load(file), facts.get("experts"), experts

    def compared(self, quant: str, fault: str | None) -> dict[str, Any]:
        source, laid = self.faulty(fault) if fault else (self.sound, self.layout())
        ours, _, chosen = self.logits(self.made(source, quant, laid), quant)
        found: dict[str, Any] = {}
        for of, path in (("16 bits", self.sound), ("own", self.own(quant))):
            for way, follow in [*[("free", None)][: not fault], ("follow", chosen)]:
                theirs, facts, _ = self.logits(path, "fp32", follow)
                depths = quality.compare(theirs, POSITIONS, ours, POSITIONS, WINDOWS)
                found[f"{of} {way}"] = max(depth["relative_error"] for depth in depths)
                found["scale"] = sum(depth["scale"] for depth in depths) / len(depths) - 1
                if follow:
                    followed = facts["followed"]
                    found |= {f"{of} {k}": followed[k] for k in ("choices", "others", "gap")}
        if fault:
            shutil.rmtree(source)
            for file in self.folder.glob(f"{source.name}-*"):
                file.unlink()
        return found


POSITIONS = [*range(PROMPT), *range(DEPTH - 25, DEPTH)]
WINDOWS = [[0, PROMPT], [DEPTH - 25, DEPTH]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--quants", nargs="+", default=list(QUANTS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--faults", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for kind in arguments.kinds:
            for seed in range(1, arguments.seeds + 1):
                bench = Bench(Path(temporary) / f"{kind}-{seed}", kind, seed)
                for quant in arguments.quants:
                    for fault in list(FAULTS) if arguments.faults else [None]:
                        found = bench.compared(quant, fault)
                        text = ", ".join(
                            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
                            for key, value in found.items()
                        )
                        print(f"{kind}, seed {seed}, {quant}, {fault or 'sound'}: {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
