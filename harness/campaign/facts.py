"""The part of a record that is not a measurement: everything needed to repeat the run."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import harness
from harness import machine
from harness.campaign.repeat import Inputs
from harness.config import Experiment
from harness.models import yarn
from harness.plan import Cell
from harness.results import Draft
from harness.stacks.build import key_of
from harness.stacks.header import runners_folder
from harness.stacks.interpreter import Interpreter
from harness.system.variables import redacted
from harness.theory import recorded

_OURS = re.compile(r"^ *from runners(?:\.(\w+)| import ([\w, ]+))", re.MULTILINE)


def of_campaign(experiment: Experiment, config_path: Path, command_line: Sequence[str]) -> Draft:
    """Fields shared by every record of a campaign: config as given, resolved protocol, machine, harness."""
    return {
        "kind": "measured",
        "campaign": {
            "id": utc_now(),
            "name": experiment.name,
            "config_path": str(config_path.absolute()),
            "config": experiment.source,
            "command_line": [redacted(word) for word in command_line],
        },
        "protocol": experiment.protocol.model_dump(mode="json"),
        "harness": {"version": harness.__version__, "git_commit": git_commit()},
        "machine": machine.facts(),
    }


def of_repeat(cell: Cell, repeat: int, content_key: str, device: str, gpu: str | None) -> Draft:
    """The requested cell and repeat, and the machine's conditions at the start."""
    shape = cell.model.shape
    source = cell.model.weights_for(cell.weights_format) or cell.model.weights
    return {
        "cell": cell.id,
        "repeat": repeat,
        "content_key": content_key,
        "started_utc": utc_now(),
        "stack": cell.variant.stack,
        "variant": cell.variant.name,
        "asked": {"options": cell.variant.options, "device": device, "gpu": gpu},
        "model": {
            "name": cell.model.name,
            "shape": asdict(shape) if shape else None,
            **({"config": cell.model.described.config} if cell.model.described else {}),
            "weights": source.model_dump(mode="json"),
        },
        "workload": cell.workload.model_dump(mode="json") | {"new_tokens": cell.workload.new_tokens},
        "conditions": machine.conditions(),
    }


def of_inputs(cell: Cell, inputs: Inputs, begun: Draft) -> Draft:
    """Fields known once a cell is ready: resolved options, prompt, environment, and the weights by their
    headers (`revision`: the commit on the hub that the requested branch or tag stood for)."""
    model: Draft = dict(begun["model"])
    if inputs.weights is not None:
        ready = inputs.weights
        model["weights"] = model["weights"] | {
            "file": str(ready.path),
            "format": ready.format,
            "fingerprint": ready.fingerprint,
            "architecture": ready.architecture,
            "synthetic": ready.synthetic,
            "quant": ready.quant,
            "revision": ready.revision,
            "header": ready.sizes,
            "attention": ready.attention,
            "decoder": recorded.facts(ready.decoder) if ready.decoder else None,
            "packing": asdict(ready.packing) if ready.packing else None,
            "shards": ready.shards,
            "file_bytes": ready.file_bytes,
        }
        if ready.header and (off := yarn.difference(ready.header.metadata)):
            model["weights"]["yarn_difference"] = off
    return {
        "model": model,
        "options": inputs.options,
        "device": inputs.device_id,
        "threads": inputs.threads,
        "workload": begun["workload"] | {"prompt": inputs.prompt, "prompt_source": inputs.prompt_source},
        "environment": {
            "name": inputs.interpreter.environment.name,
            **_made(inputs.interpreter),
            "lock": list(inputs.interpreter.lock),
            "runner": source_digest(cell.variant.stack),
        },
    }


def _made(interpreter: Interpreter) -> Draft:
    """How an environment was built; of an adopted interpreter, what is not as pinned. Its path is nobody's
    business."""
    if adopted := interpreter.adopted:
        return {"adopted": {"python": adopted.python_version, "pins_not_met": list(adopted.pins_not_met)}}
    made = interpreter.environment
    return {"key": key_of(made), "variables": made.variables, "toolkit": made.toolkit or None}


def git_commit() -> str | None:
    """The harness's git commit, with `+` if files differ from it; null if it is not a git checkout."""
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
    todo, sources = ["worker", stack], {}
    while todo:
        name = todo.pop()
        if name not in sources:
            sources[name] = (runners_folder() / f"{name}.py").read_text(encoding="utf-8")
            for one, several in _OURS.findall(sources[name]):
                todo += [one] if one else several.split(", ")
    digest = hashlib.sha256("".join(sources[name] for name in sorted(sources)).encode())
    return digest.hexdigest()[:12]


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat()
