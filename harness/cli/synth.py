"""`harness synth`: make synthetic weights in the cache that campaigns use."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.campaign.prepare import NotReady, Preparation
from harness.cli import NOT_OK, NOT_STARTED, OK
from harness.cli.names import shortened, unknown
from harness.cli.progress import Progress
from harness.config import Decode, Model, Variant, Weights
from harness.models.weights import SOURCE_QUANT, Ready
from harness.plan import Cell
from harness.stacks import build
from harness.stacks.header import stacks
from harness.theory import names
from harness.theory.names import NotUnderstood
from harness.theory.packed import FORMATS, Packing

STACK = "llamacpp"  # the stack that owns GGUF
PACKER = "hf"  # any stack that loads checkpoints can pack them


@dataclass(frozen=True)
class SynthRequest:
    """`form`: gguf, hf, gptq or awq. `quants`: of GGUF files, null: f16. `bits`: of GPTQ, null: 4."""

    shape: str
    form: str
    quants: list[str] | None
    bits: int | None
    seed: int


def make(request: SynthRequest, as_json: bool) -> int:
    """Make a checkpoint, or one GGUF per quantization; print paths, as JSON with exact sizes."""
    if wrong := _mistake(request):
        print(f"harness: {wrong}", file=sys.stderr)
        return NOT_STARTED
    progress = Progress()
    preparation = Preparation("cpu", None, None, progress.say)
    made = []
    try:
        for ready in _made(preparation, request):
            made.append(_row(ready))
            if not as_json:
                progress.clear()
                print(ready.path)
    except NotReady as failure:
        print(f"harness: {failure}", file=sys.stderr)
        return NOT_OK
    if as_json:
        print(json.dumps(made, indent=1))
    return OK


def _mistake(request: SynthRequest) -> str | None:
    """The mistake in the command line, in one sentence; null if there is none."""
    choices = [str(choice) for choice in stacks()[STACK].options["quant"].choices]
    try:
        names.model(request.shape)
    except NotUnderstood as why:
        return why.sentence("shape", shortened(request.shape))
    for quant in request.quants or ():
        if quant not in choices:
            return unknown("quantization", quant, choices)
    if request.quants and request.form != "gguf":
        is_what = "bf16" if request.form == "hf" else f"packed in {request.bits or 4} bits"
        return f"--quant needs --format gguf; a checkpoint is {is_what}"
    if request.bits and request.form != "gptq":
        return "--bits needs --format gptq" + ("; AWQ always has 4" if request.form == "awq" else "")
    if not 0 <= request.seed < 2**63:
        return f"--seed {request.seed}: must be at least 0 and below 2**63"
    return None


def _made(preparation: Preparation, request: SynthRequest) -> Iterator[Ready]:
    """Raises NotReady."""
    known = names.model(request.shape)
    model = Model(name=known.name, shape=known.shape, weights=Weights(seed=request.seed))
    if request.form in FORMATS:
        packing = Packing(request.form, request.bits or 4)
        loading = [header.stack for header in stacks().values() if header.weights not in ("gguf", "none")]
        yield preparation.packed(_cell(model, _built([PACKER, *loading], PACKER)), packing)
    elif request.form == "hf":
        loading = [header.stack for header in stacks().values() if header.weights != "none"]
        yield preparation.checkpoint(_cell(model, _built([STACK, *loading], STACK)))
    else:
        for quant in request.quants or [SOURCE_QUANT]:
            yield _gguf(preparation, model, quant)


def _gguf(preparation: Preparation, model: Model, quant: str) -> Ready:
    variant = Variant(stack=STACK, name=quant, options={"quant": quant})
    ready = preparation.weights(Cell("synth", model, variant, Decode()))
    assert ready is not None  # llama.cpp loads weights
    return ready


def _cell(model: Model, stack: str) -> Cell:
    return Cell("synth", model, Variant(stack=stack, name="hf"), Decode())


def _built(names: Iterable[str], otherwise: str) -> str:
    """The first of these stacks with an existing environment; all make the same files."""
    for name in names:
        environment = stacks()[name].environment_for("cpu")
        if environment and build.find(environment):
            return name
    return otherwise


def _row(ready: Ready) -> dict[str, Any]:
    sizes = ready.sizes
    bpw = sizes["model_bytes"] * 8 / sizes["parameters"]
    return {"format": ready.format, "quant": ready.quant, "path": str(ready.path), "bpw": bpw, **sizes}
