"""`harness synth`: synthetic weights by hand, through the same cache that campaigns use."""

from __future__ import annotations

import json
import sys
from typing import Any

from harness.campaign.prepare import NotReady, Preparation
from harness.cli import NOT_OK, NOT_STARTED, OK
from harness.cli.names import unknown
from harness.cli.progress import Progress
from harness.config import Decode, Model, Variant, Weights
from harness.envs import build
from harness.envs.header import stacks
from harness.models.weights import SOURCE_QUANT, Ready
from harness.plan import Cell
from harness.theory.families import SHAPES

STACK = "llamacpp"  # the stack that owns GGUF


def make(shape: str, form: str, quants: list[str] | None, seed: int, as_json: bool) -> int:
    """Make a checkpoint (`form` hf), or one GGUF per quantization; print paths, as JSON with exact sizes."""
    choices = [str(choice) for choice in stacks()[STACK].options["quant"].choices]
    wanted = [("shape", shape, [*SHAPES]), *(("quantization", quant, choices) for quant in quants or ())]
    for kind, name, known in wanted:
        if name not in known:
            said = unknown(kind, name, known, "see harness theory --list-models")
            print(f"harness: {said}", file=sys.stderr)
            return NOT_STARTED
    if form == "hf" and quants:
        print("harness: --quant is of --format gguf; a checkpoint is bf16", file=sys.stderr)
        return NOT_STARTED
    if not 0 <= seed < 2**63:
        print(f"harness: --seed {seed}: must be at least 0 and below 2**63", file=sys.stderr)
        return NOT_STARTED
    progress = Progress()
    preparation = Preparation("cpu", None, None, progress.say)
    model = Model(name=shape, shape=SHAPES[shape], weights=Weights(seed=seed))
    made = []
    for quant in [None] if form == "hf" else quants or [SOURCE_QUANT]:
        try:
            ready = _checkpoint(preparation, model) if quant is None else _gguf(preparation, model, quant)
        except NotReady as failure:
            print(f"harness: {failure}", file=sys.stderr)
            return NOT_OK
        made.append(_row(ready))
        if not as_json:
            progress.clear()
            print(ready.path)
    if as_json:
        print(json.dumps(made, indent=1))
    return OK


def _gguf(preparation: Preparation, model: Model, quant: str) -> Ready:
    variant = Variant(stack=STACK, name=quant, options={"quant": quant})
    ready = preparation.weights(Cell("synth", model, variant, Decode()))
    assert ready is not None  # llama.cpp loads weights
    return ready


def _checkpoint(preparation: Preparation, model: Model) -> Ready:
    """By any stack whose environment is there already; they all make the same."""
    loading = [header for header in stacks().values() if header.weights != "none"]
    built = [
        header.stack
        for header in loading
        if (environment := header.environment_for("cpu")) and build.find(environment)
    ]
    stack = STACK if STACK in built or not built else built[0]
    return preparation.checkpoint(Cell("synth", model, Variant(stack=stack, name="hf"), Decode()))


def _row(ready: Ready) -> dict[str, Any]:
    sizes = ready.sizes
    bpw = sizes["model_bytes"] * 8 / sizes["parameters"]
    return {"format": ready.format, "quant": ready.quant, "path": str(ready.path), "bpw": bpw, **sizes}
