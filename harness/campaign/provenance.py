"""The part of a record that is not a measurement: everything needed to repeat the run."""

from __future__ import annotations

import ast
import hashlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

import harness
from harness import machine
from harness.analysis.identity import SERVER
from harness.base.variables import redacted
from harness.campaign.repeat import Inputs
from harness.config import Experiment
from harness.config.plan import Cell
from harness.config.variants import weights_of
from harness.models import yarn
from harness.models.locate import Ready
from harness.records import Draft, common, parts
from harness.records.values import plain
from harness.stacks.adopted import Interpreter
from harness.stacks.build import key_of
from harness.stacks.header import runners_folder
from harness.theory import floors
from harness.theory.decoder import dense_fields


class Shared(TypedDict):
    """Fields that every record of a campaign has: config as given, resolved protocol, machine, harness."""

    campaign: parts.Campaign
    protocol: Any
    harness: common.Version
    machine: parts.Machine
    doctor: NotRequired[list[parts.Finding]]


class Requested(TypedDict):
    """The requested cell and repeat, and the machine's conditions at the start."""

    kind: str
    cell: str
    repeat: int
    content_key: str
    started_utc: str
    stack: str
    variant: str
    asked: common.Asked
    model: parts.Model
    workload: parts.Workload
    conditions: common.Conditions | None


def campaign_fields(experiment: Experiment, config_path: Path, command_line: Sequence[str]) -> Shared:
    return {
        "campaign": {
            "id": utc_now(),
            "name": experiment.name,
            "config_path": str(config_path.absolute()),
            "config": experiment.source,
            "command_line": [redacted(word) for word in command_line],
        },
        "protocol": experiment.protocol.model_dump(mode="json"),
        "harness": {"version": harness.__version__, "git_commit": git_commit()},
        "machine": plain(machine.facts()),
    }


def repeat_fields(cell: Cell, repeat: int, content_key: str, device: str, gpu: str | None) -> Requested:
    source = weights_of(cell.model, cell.variant) or cell.model.weights
    model: parts.Model = {
        "name": cell.model.name,
        "shape": plain(dense_fields(cell.model.made)),
        "weights": plain(source.model_dump(mode="json")),
    }
    if cell.model.described and cell.model.described.config:
        model["config"] = cell.model.described.config
    workload = cell.workload.model_dump(mode="json") | {"new_tokens": cell.workload.new_tokens}
    return {
        "kind": "measured",
        "cell": cell.id,
        "repeat": repeat,
        "content_key": content_key,
        "started_utc": utc_now(),
        "stack": cell.variant.stack,
        "variant": cell.variant.name,
        "asked": {"options": cell.variant.options, "device": device, "gpu": gpu},
        "model": model,
        "workload": plain(workload),
        "conditions": plain(machine.conditions()),
    }


def add_inputs(begun: Draft, cell: Cell, inputs: Inputs) -> None:
    """Add what is known once a cell is ready: resolved options, prompt, environment, and the weights."""
    if inputs.weights is not None:
        begun["model"]["weights"].update(weights_facts(inputs.weights))
    if made := inputs.engine_files:
        begun["model"]["weights"]["made"] = {"bytes": made.bytes, "digest": made.digest}
    begun["options"] = dict(inputs.options)
    is_client = cell.weights_format == "served"
    begun["device"] = SERVER if is_client and inputs.device_id == "cpu" else inputs.device_id
    begun["threads"] = inputs.threads
    begun["workload"].update({"prompt": inputs.prompt, "prompt_source": inputs.prompt_source})
    begun["environment"] = environment_facts(cell, inputs.interpreter)


def weights_facts(ready: Ready) -> Any:
    """Weights by their headers (`revision`: the commit on the hub that the requested branch or tag stood
    for)."""
    facts: Any = {
        "file": str(ready.path),
        "format": ready.format,
        "fingerprint": ready.fingerprint,
        "architecture": ready.architecture,
        "synthetic": ready.synthetic,
        "quant": ready.quant,
        "revision": ready.revision,
        "header": ready.sizes,
        "attention": ready.attention,
        "decoder": floors.decoder_facts(ready.not_dense) if ready.not_dense else None,
        "packing": asdict(ready.packing) if ready.packing else None,
        "shards": ready.shards,
        "file_bytes": ready.file_bytes,
    }
    if ready.header and (off := yarn.yarn_difference(ready.header.metadata)):
        facts["yarn_difference"] = off
    return facts


def environment_facts(cell: Cell, interpreter: Interpreter) -> common.Environment:
    """How an environment was built; of an adopted interpreter, the differences from the pins. The
    interpreter's path is private, and left out."""
    made = interpreter.environment
    facts: common.Environment = {
        "name": made.name,
        "lock": list(interpreter.lock),
        "runner": source_digest(cell.variant.stack),
    }
    if adopted := interpreter.adopted:
        facts["adopted"] = {"python": adopted.python_version, "pins_not_met": list(adopted.pins_not_met)}
    else:
        facts |= {"key": key_of(made), "variables": made.variables, "toolkit": made.toolkit or None}
    return facts


def git_commit() -> str | None:
    """The harness's git commit, with `+` if files differ from it; None if it is not a git checkout."""
    root = Path(__file__).resolve().parent.parent.parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        if Path(git("rev-parse", "--show-toplevel").rstrip("\n")) != root:
            return None  # installed inside another project's checkout
        return git("rev-parse", "HEAD").strip() + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def source_digest(stack: str) -> str:
    """Hash of the runner's source and of the runner modules it imports: the code that measured."""
    folder, sources = runners_folder(), dict[Path, str]()
    todo = [folder / "worker.py", folder / "stacks" / f"{stack}.py"]
    while todo:
        path = todo.pop()
        if path not in sources:
            sources[path] = path.read_text(encoding="utf-8")
            todo += [each for each in _imported_runners(folder, sources[path]) if each.is_file()]
    digest = hashlib.sha256("".join(sources[path] for path in sorted(sources)).encode())
    return digest.hexdigest()[:12]


def _imported_runners(folder: Path, source: str) -> Iterator[Path]:
    """Where the modules of runners/ would be that a source imports, or imports names of."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "runners":
            parts = str(node.module).split(".")[1:]
            for name in ("", *(each.name for each in node.names)):
                yield folder.joinpath(*parts, *[name] * bool(name)).with_suffix(".py")


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat()
