"""`harness init`: write a first, commented config for this machine."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

from harness import machine
from harness.api import named_models
from harness.api.named_models import Choice, dtype_of
from harness.base import data
from harness.base.nvml import visible_gpus
from harness.cli import OK, Mistake
from harness.machine import Facts
from harness.models import served
from harness.stacks import build
from harness.stacks.header import stacks

ROOM_FOR_1_8B = 8e9  # bytes: 3.7 GB of 16-bit weights, the context, and the overhead of CUDA and torch

_FILE = """\
# yaml-language-server: $schema={schema}
# Made by `harness init` for {found}
#   {create}    once; builds the environments of the variants
#   harness run {name} --dry-run    forecast: disk, memory, time, failures
#   harness run {name}
device: {device}

protocol:
  new_tokens: 256  # after a prompt of 25. The slope W needs 2,049; the published study has 9,975
  repeats: 3       # separate processes, interleaved
{protocol}
models:
  - shape: {shape}  # random weights of this shape, made here; `harness theory --list-models` has others
  # - {{name: hub, weights: {{repo: Qwen/Qwen1.5-0.5B-Chat}}}}  # a checkpoint of the Hugging Face hub
  # - {{name: mine, weights: ~/models/mine}}  # a checkpoint's folder, or for llamacpp alone a GGUF

variants:
{variants}
"""


def run(arguments: argparse.Namespace) -> int:
    """Write the config and print the machine found. Never overwrites a file."""
    path = Path(arguments.file)
    facts: Facts = {**machine.facts(), "gpus": visible_gpus()}
    if path.suffix.lower() == ".gguf" or served.is_address(arguments.file):
        made = named_models.document([arguments.file], Choice())
        path = Path(f"{made.data['models'][0]['name']}.yaml")
        content = named_models.config_text(made, path)
    else:
        content = text(facts, str(path))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError as there:
        raise Mistake(f"{path}: already exists; choose another name: harness init FILE") from there
    except OSError as refusal:
        with contextlib.suppress(OSError):
            path.unlink()  # opened above, and cut off by a full disk
        raise Mistake(f"{path}: cannot be written: {refusal.strerror}") from refusal
    first = "" if _is_built(facts) else f"{_create(facts)}; "
    print(f"found: {machine.in_words(facts)}\nwrote: {path}\nnext: {first}harness run {path}")
    return OK


def text(facts: Facts, name: str) -> str:
    """The config for a machine with these facts: for its first GPU, else its CPU. `name`: the file."""
    known = {
        "schema": data.schema(),
        "found": machine.in_words(facts),
        "create": _create(facts),
        "name": name,
    }
    if not facts["gpus"]:
        which = "performance" if facts["core_kinds"] else "physical"
        protocol = f"  # threads: {machine.default_threads()}       # default: the {which} cores\n"
        protocol += "  # memory_budget: 4GiB  # of a worker, weights included; default: all memory\n"
        lines = "\n".join(f"  {line}" for line in _variants("cpu").values())
        return _FILE.format(**known, device="cpu", protocol=protocol, shape="qwen1.5-0.5b", variants=lines)
    gpu = facts["gpus"][0]
    device = "cuda"
    if gpu["name"]:
        device += f"\ngpu: {json.dumps(gpu['name'])}  # run only where the GPU's name contains this"
    shape = "qwen1.5-1.8b" if (gpu["memory_bytes"] or 0) >= ROOM_FOR_1_8B else "qwen1.5-0.5b"
    lines = "\n".join(f"  {line}" for line in _variants("cuda").values()).replace("{dtype}", dtype_of(gpu))
    return _FILE.format(**known, device=device, protocol="", shape=shape, variants=lines)


def _variants(device: str) -> dict[str, str]:
    """Each stack's line in a first config, in order."""
    first = {name: header.first for name, header in stacks().items() if header.first}
    return {name: each.line(device) for name, each in sorted(first.items(), key=lambda item: item[1].order)}


def _create(facts: Facts) -> str:
    names, device = _wanted(facts)
    return f"harness env create {' '.join(names)}" + (f" --device {device}" if device != "cpu" else "")


def _is_built(facts: Facts) -> bool:
    names, device = _wanted(facts)
    wanted = [stacks()[name].environment_for(device) for name in names]
    return all(environment and build.find(environment) for environment in wanted)


def _wanted(facts: Facts) -> tuple[list[str], str]:
    """The stacks of the config's variants, and the device family."""
    device = "cuda" if facts["gpus"] else "cpu"
    return [name for name, line in _variants(device).items() if not line.startswith("#")], device
