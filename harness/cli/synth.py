"""`harness synth`: synthetic weights by hand, through the same cache that campaigns use."""

from __future__ import annotations

import json
import sys

from harness.campaign.prepare import NotReady, Preparation
from harness.cli import NOT_OK, NOT_STARTED, OK
from harness.cli.names import unknown
from harness.cli.progress import Progress
from harness.config import Decode, Model, Variant, Weights
from harness.envs.header import stacks
from harness.plan import Cell
from harness.theory.families import SHAPES

STACK = "llamacpp"  # the stack that owns GGUF


def make(shape: str, quants: list[str], seed: int, as_json: bool) -> int:
    """Make one file per quantization and print its path; as JSON with its exact sizes."""
    choices = [str(choice) for choice in stacks()[STACK].options["quant"].choices]
    wanted = [("shape", shape, [*SHAPES]), *(("quantization", quant, choices) for quant in quants)]
    for kind, name, known in wanted:
        if name not in known:
            said = unknown(kind, name, known, "see harness theory --list-models")
            print(f"harness: {said}", file=sys.stderr)
            return NOT_STARTED
    if not 0 <= seed < 2**63:
        print(f"harness: --seed {seed}: must be at least 0 and below 2**63", file=sys.stderr)
        return NOT_STARTED
    progress = Progress()
    preparation = Preparation("cpu", None, None, progress.say)
    model = Model(name=shape, shape=SHAPES[shape], weights=Weights(seed=seed))
    made = []
    for quant in quants:
        cell = Cell("synth", model, Variant(stack=STACK, name=quant, options={"quant": quant}), Decode())
        try:
            ready = preparation.weights(cell)
        except NotReady as failure:
            print(f"harness: {failure}", file=sys.stderr)
            return NOT_OK
        assert ready is not None  # llama.cpp loads weights
        sizes = ready.header.weights()
        made.append(
            {
                "quant": quant,
                "path": str(ready.path),
                "bpw": sizes["model_bytes"] * 8 / sizes["parameters"],
                **sizes,
            }
        )
        if not as_json:
            progress.clear()
            print(ready.path)
    if as_json:
        print(json.dumps(made, indent=1))
    return OK
