"""`harness init`, `validate`, `doctor`: what comes before the first run."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from harness import config, machine
from harness.base import data
from harness.base.nvml import Gpu, visible_gpus
from harness.base.text import plural
from harness.campaign.forecast import local_weights
from harness.cli import NOT_OK, OK, Mistake, model_arguments, say
from harness.cli.model_arguments import dtype_of
from harness.cli.options import add_config, add_json
from harness.config import plan
from harness.config.plan import Cell
from harness.machine import Facts, doctor
from harness.machine.doctor import Finding
from harness.models.weights import WeightsError, WeightsRefused
from harness.stacks import build
from harness.stacks.header import holds, stacks

# `harness doctor`: what on this machine may disturb measurements, and how to fix it.


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        type=data.config,
        metavar="CONFIG",
        help="check only the device of this config; exit with 2 if this machine lacks it",
    )
    add_json(parser, "one object per finding")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the findings, with a config only for its device. Raises Mistake if this machine lacks that
    device."""
    config_path = arguments.config
    if config_path is None:
        findings = doctor.examine()
    else:
        experiment = config.load(config_path, [])
        used = {variant.stack for _, variant, _ in experiment.combinations()}
        findings = doctor.examine(experiment.device, experiment.gpu, used)
    if arguments.json:
        print(json.dumps([finding.record() for finding in findings], indent=1))
    else:
        print("\n".join(_lines(findings)))
    for finding in findings:
        if finding.level == "stop":
            raise Mistake(f"{config_path}: {finding.found}")
    return OK


def _lines(findings: Sequence[Finding]) -> list[str]:
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<7}  {finding.what:<{width}}  {finding.found}")
        details = (finding.effect, finding.fix and f"fix: {finding.fix}")
        lines += [f"{'':9}{detail}" for detail in details if detail]
    return lines


# `harness init`: write a first, commented config for this machine.


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


def add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=Path("harness.yaml"),
        metavar="FILE",
        help="the file to write (default: harness.yaml), or a GGUF to write a config for",
    )


def run_init(arguments: argparse.Namespace) -> int:
    """Write the config and print the machine found. Never overwrites a file."""
    path = arguments.file
    facts: Facts = {**machine.facts(), "gpus": visible_gpus()}
    if path.suffix.lower() == ".gguf":
        made = model_arguments.document([str(path)], None, None)
        path = Path(f"{made.data['models'][0]['name']}.yaml")
        content = model_arguments.config_text(made, path)
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
    print(f"found: {found(facts)}\nwrote: {path}\nnext: {first}harness run {path}")
    return OK


def found(facts: Facts) -> str:
    """The machine in one line."""
    memory = f"{facts['memory_bytes'] / 1e9:.1f} GB of memory"
    gpus = [_in_words(gpu) for gpu in facts["gpus"]]
    cpu = f"{facts['cpu']}, {plural(facts['physical_cores'], 'core')}, {memory}"
    return f"{cpu}; {', '.join(gpus) or 'no NVIDIA GPU'}"


def _in_words(gpu: Gpu) -> str:
    memory = gpu["memory_bytes"]
    return f"{gpu['name'] or 'a GPU'} ({f'{memory / 1e9:.1f} GB' if memory else 'memory unknown'})"


def text(facts: Facts, name: str) -> str:
    """The config for a machine with these facts: for its first GPU, else its CPU. `name`: the file."""
    known = {"schema": data.schema(), "found": found(facts), "create": _create(facts), "name": name}
    if not facts["gpus"]:
        threads = facts["physical_cores"]
        protocol = f"  # threads: {threads}       # default: the physical cores\n"
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


# `harness validate`: check a config and list its cells.


def add_validate(parser: argparse.ArgumentParser) -> None:
    add_config(parser)


def run_validate(arguments: argparse.Namespace) -> int:
    """Print the cells, and which can never run, by their options or by the headers of their weights' files
    (then NOT_OK). Raises ConfigError."""
    experiment = config.load(arguments.config, arguments.set, look_for_weights=True)
    cells = plan.cells(experiment)
    repeats = {cell.workload.repeated(experiment.protocol.repeats) for cell in cells}
    times = plural(max(repeats), "repeat")
    fewer = f", some {min(repeats)}" if len(repeats) > 1 else ""
    refuted = {cell.id: reason for cell in cells if (reason := _refuted(cell))}
    print(f"{arguments.config}: {'ok, ' * (not refuted)}{plural(len(cells), 'cell')} x {times}{fewer}")
    for cell in cells:
        print(f"  {cell.id}{_never(cell) or refuted.get(cell.id, '')}")
    if refuted:
        say(f"of {plural(len(cells), 'cell')}, {len(refuted)} cannot run with these weights (exit code 1)")
    return NOT_OK if refuted else OK


def _refuted(cell: Cell) -> str:
    """Faults of a cell by the headers of local weights; empty if none."""
    if cell.source is None or cell.source.kind != "path":
        return ""
    try:
        local_weights(cell)
    except WeightsRefused as wrong:
        return f": will be refused: {wrong}"
    except WeightsError as wrong:
        return f": will fail: {wrong}"
    return ""


def _never(cell: Cell) -> str:
    """The stack's errors for options that it never runs with; empty if it runs."""
    options = cell.options(threads=1)
    found = [limit.message for limit in cell.header.limits if limit.never and holds(limit.when, options)]
    return f": will fail: {found[0]}" if found else ""
