"""`harness env synth`: make synthetic weights in the cache that campaigns use."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.api.progress import Progress
from harness.base.text import unknown
from harness.campaign.prepare import Preparation
from harness.campaign.repeat import NotReady
from harness.cli import NOT_OK, OK, Mistake, say
from harness.config import Decode, Model, Variant, Weights
from harness.config.model_rows import safe_name
from harness.config.plan import Cell
from harness.models.locate import Ready
from harness.models.make import SOURCE_QUANT
from harness.stacks import build
from harness.stacks.header import references, stacks
from harness.theory.known_models import NoModel, described
from harness.theory.packed_sizes import FORMATS, Packing


def make(arguments: argparse.Namespace) -> int:
    """Make a checkpoint, or one GGUF per quantization; print paths, as JSON with exact sizes."""
    if wrong := _mistake(arguments):
        raise Mistake(wrong)
    progress = Progress()
    preparation = Preparation("cpu", None, None, progress.say)
    made = []
    try:
        for ready in _made(preparation, arguments):
            made.append(_row(ready))
            if not arguments.json:
                progress.clear()
                print(ready.path)
    except NotReady as failure:
        say(failure)
        return NOT_OK
    if arguments.json:
        print(json.dumps(made, indent=1))
    return OK


def _mistake(options: argparse.Namespace) -> str | None:
    """The mistake in the command line, in one sentence; None if there is none."""
    choices = [str(choice) for choice in references()["gguf"].options["quant"].choices]
    try:
        described(options.shape, Path())
    except NoModel as why:
        return str(why)
    for quant in options.quant or ():
        if quant not in choices:
            return unknown("quantization", quant, choices)
    if options.quant and options.format != "gguf":
        is_what = "bf16" if options.format == "hf" else f"packed in {options.bits or 4} bits"
        return f"--quant needs --format gguf; a checkpoint is {is_what}"
    if options.bits and options.format != "gptq":
        return "--bits needs --format gptq" + ("; AWQ always has 4" if options.format == "awq" else "")
    return None


def _made(preparation: Preparation, options: argparse.Namespace) -> Iterator[Ready]:
    """Raises NotReady."""
    name, made = described(options.shape, Path())
    seeded = Weights(seed=options.seed)
    model = Model(name=safe_name(name) or "model", described=made, weights=seeded)
    if options.format in FORMATS:
        packing = Packing(options.format, options.bits or 4)
        loading = [name for name, header in stacks().items() if set(header.formats) - {"gguf"}]
        yield preparation.packed(_cell(model, _built([references()["hf"].stack, *loading])), packing)
    elif options.format == "hf":
        loading = [name for name, header in stacks().items() if header.formats]
        yield preparation.checkpoint(_cell(model, _built([references()["gguf"].stack, *loading])))
    else:
        for quant in options.quant or [SOURCE_QUANT]:
            yield _gguf(preparation, model, quant)


def _gguf(preparation: Preparation, model: Model, quant: str) -> Ready:
    variant = Variant(stack=references()["gguf"].stack, name=quant, options={"quant": quant})
    ready = preparation.weights(Cell("synth", model, variant, Decode()))
    assert ready is not None  # its stack loads weights
    return ready


def _cell(model: Model, stack: str) -> Cell:
    return Cell("synth", model, Variant(stack=stack, name="hf"), Decode())


def _built(names: Sequence[str]) -> str:
    """The first of these stacks with an existing environment, else the first: all make the same files."""
    for name in names:
        environment = stacks()[name].environment_for("cpu")
        if environment and build.find(environment):
            return name
    return names[0]


def _row(ready: Ready) -> dict[str, object]:
    sizes = ready.sizes
    bpw = sizes["model_bytes"] * 8 / sizes["parameters"]
    return {"format": ready.format, "quant": ready.quant, "path": str(ready.path), "bpw": bpw, **sizes}
