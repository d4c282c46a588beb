"""What the rows of models and of workloads mean."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from harness.config.experiment import Decode, Model, Weights
from harness.config.forms import WORKLOADS, HubWeights, InlineShape, ModelRow, PathWeights, SyntheticWeights
from harness.config.mistakes import Loc, Mistakes, expected, shown, suggestion
from harness.theory.families import SHAPES
from harness.theory.shapes import Shape

QUANT = "{quant}"


def model_of(given: Any, loc: Loc, folder: Path, mistakes: Mistakes) -> Model | None:
    """The model of a row; null after adding its mistakes. Relative paths start at `folder`."""
    row = mistakes.checked(ModelRow, given, loc)
    if row is None:
        return None
    before = len(mistakes.found)
    shape = _shape(row.shape, (*loc, "shape"), mistakes)
    weights = _weights(row.weights, (*loc, "weights"), folder, mistakes)
    if weights is None or len(mistakes.found) > before:
        return None
    if weights.kind == "synthetic" and shape is None:
        mistakes.add(loc, "synthetic weights need a shape; harness theory --list-models has them")
        return None
    name = row.name or (row.shape if isinstance(row.shape, str) else _name_of(weights))
    if name is None:
        mistakes.add(loc, "a shape spelled out needs a name beside it")
        return None
    return Model(name=name, shape=shape, weights=weights)


def _shape(given: Any, loc: Loc, mistakes: Mistakes) -> Shape | None:
    if given is None:
        return None
    if isinstance(given, dict):
        row = mistakes.checked(InlineShape, given, loc)
        return row.shape() if row else None
    if isinstance(given, str) and given in SHAPES:
        return SHAPES[given]
    wrong = f"unknown shape {shown(given)}" if isinstance(given, str) else expected("a shape's name", given)
    mistakes.add(loc, wrong + suggestion(given, SHAPES))
    return None


def _weights(given: Any, loc: Loc, folder: Path, mistakes: Mistakes) -> Weights | None:
    if isinstance(given, str):
        if given == "synthetic":
            return Weights()
        if not re.search(r"[./~{]", given) and "did you mean" in (hint := suggestion(given, ["synthetic"])):
            mistakes.add(loc, f"unknown weights {shown(given)}{hint}")
            return None
        return _weights({"path": given}, loc, folder, mistakes)
    if not isinstance(given, dict):
        mistakes.add(loc, expected("synthetic, a path or a mapping", given))
    elif "repo" in given or "file" in given:
        hub = mistakes.checked(HubWeights, given, loc)
        if hub and _known_placeholders(hub.file or "", (*loc, "file"), mistakes):
            return Weights(kind="hub", **hub.model_dump())
    elif "path" in given:
        local = mistakes.checked(PathWeights, given, loc)
        if local and _known_placeholders(local.path, loc, mistakes):
            try:
                path = Path(local.path).expanduser()
            except RuntimeError:
                mistakes.add(loc, f"no such user's home folder: {shown(local.path)}")
                return None
            return Weights(kind="path", path=str(folder.absolute() / path))
    elif "synthetic" in given:
        made = mistakes.checked(SyntheticWeights, given, loc)
        return Weights(seed=made.seed) if made else None
    else:
        for key in given:
            hint = suggestion(key, ("path", "repo", "file", "synthetic"))
            mistakes.add((*loc, key), "unknown key" + hint)
        if not given:
            mistakes.add(loc, "expected path, repo, or synthetic: true")
    return None


def _known_placeholders(text: str, loc: Loc, mistakes: Mistakes) -> bool:
    unknown = [found for found in re.findall(r"\{[^{}]*\}", text) if found != QUANT]
    if unknown:
        mistakes.add(loc, f"unknown placeholder {shown(unknown[0])}; known: {QUANT}")
    return not unknown


def _name_of(weights: Weights) -> str | None:
    source = weights.path or weights.file
    if source is None:
        return weights.repo and (safe_name(weights.repo.rpartition("/")[2]) or "model")
    name = Path(source).name
    stem = name[:-5] if name.lower().endswith(".gguf") else name  # a folder's name may have dots of its own
    return safe_name(stem.replace(QUANT, "")) or "model"


def safe_name(text: str) -> str:
    """The text as a folder's name; may be empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64]


def workload_of(given: Any, loc: Loc, mistakes: Mistakes) -> Decode | None:
    """The workload of a row; null after adding its mistakes."""
    if not isinstance(given, dict):
        mistakes.add(loc, expected("a mapping such as {kind: decode}", given))
    elif "kind" not in given:
        mistakes.add((*loc, "kind"), "is missing" + suggestion(None, WORKLOADS))
    elif (kind := given["kind"]) not in list(WORKLOADS):
        mistakes.add((*loc, "kind"), f"unknown workload {shown(kind)}" + suggestion(kind, WORKLOADS))
    else:
        return mistakes.checked(WORKLOADS[kind], given, loc)
    return None
