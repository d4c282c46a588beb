"""Parse the rows of models and of workloads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from harness import shipped
from harness.config.experiment import Model, Weights
from harness.config.forms import (
    FormatWeights,
    HubWeights,
    InlineShape,
    ModelRow,
    PathWeights,
    SyntheticWeights,
)
from harness.config.mistakes import Loc, Mistakes, expected, shown, suggestion
from harness.config.workloads import KINDS, Quality, Workload
from harness.known import Described, NoModel, described
from harness.theory import names
from harness.theory.names import NotUnderstood
from harness.theory.shapes import Shape

QUANT, BITS = "{quant}", "{bits}"
_FORMATS = tuple(FormatWeights.model_fields)


def model_of(given: Any, loc: Loc, folder: Path, mistakes: Mistakes) -> Model | None:
    """The model of a row; null after adding its mistakes. Relative paths start at `folder`."""
    row = mistakes.checked(ModelRow, given, loc)
    if row is None:
        return None
    before = len(mistakes.found)
    known, made = _shape(row.shape, (*loc, "shape"), folder, mistakes)
    by_format = isinstance(row.weights, dict) and any(form in row.weights for form in _FORMATS)
    of_format: dict[str, Weights] = {}
    if by_format:
        of_format = _of_format(row.weights, (*loc, "weights"), folder, mistakes)
        weights = next(iter(of_format.values()), None)
    else:
        weights = _weights(row.weights, (*loc, "weights"), folder, mistakes)
    if weights is None or len(mistakes.found) > before:
        return None
    if made is None and any(given.kind == "synthetic" for given in (weights, *of_format.values())):
        mistakes.add(loc, "synthetic weights need a shape; harness theory --list-models has them")
        return None
    # A file of the user's goes by its own name: the shape alone does not make it the model of that name.
    name = row.name or (_name_of(weights) if weights.kind == "path" else known or _name_of(weights))
    if name is None:
        mistakes.add(loc, "an inline shape needs a name; add the key name")
        return None
    dense, other = (None, made) if isinstance(made, Described) else (made, None)
    return Model(
        name=name,
        shape=dense,
        described=other,
        weights=weights,
        of_format=of_format,
        where=tuple(row.where),
    )


def _shape(
    given: Any, loc: Loc, folder: Path, mistakes: Mistakes
) -> tuple[str | None, Shape | Described | None]:
    """The name of a known model, and its shape."""
    if isinstance(given, dict):
        row = mistakes.checked(InlineShape, given, loc)
        return None, row.shape() if row else None
    if isinstance(given, str):
        try:
            name, made = described(given, folder, otherwise="spell the shape out")
            return safe_name(name) or None, made
        except NoModel as why:
            mistakes.add(loc, str(why))
            return None, None
    if given is not None:
        mistakes.add(loc, expected("a shape's name", given))
    return None, None


def named_shape(given: str, loc: Loc, mistakes: Mistakes) -> names.Model | None:
    """The known shape that a name stands for; null after adding the mistake."""
    try:
        return names.model(given, otherwise="spell the shape out")
    except NotUnderstood as why:
        mistakes.add(loc, why.sentence("shape", shown(given)))
        return None


def _of_format(given: dict[str, Any], loc: Loc, folder: Path, mistakes: Mistakes) -> dict[str, Weights]:
    """Weights by format, in the order of the forms, without invalid ones."""
    if mistakes.checked(FormatWeights, given, loc) is None:
        return {}
    found: dict[str, Weights] = {}
    for form in _FORMATS:
        weights = _weights(given[form], (*loc, form), folder, mistakes) if form in given else None
        if weights and weights.file is not None and form != "gguf":
            mistakes.add((*loc, form, "file"), f"{form} weights are a checkpoint: a repo without file")
        elif weights:
            found[form] = weights
    return found


def _weights(given: Any, loc: Loc, folder: Path, mistakes: Mistakes) -> Weights | None:
    if isinstance(given, str):
        if given == "synthetic":
            return Weights()
        if given in shipped.weights_names() and not (folder / given).exists():  # the user's own goes first
            return Weights(kind="path", path=str(shipped.weights(given)))
        named = ["synthetic", *shipped.weights_names()]
        is_misspelt = not re.search(r"[./~{]", given) and "did you mean" in (hint := suggestion(given, named))
        if is_misspelt and not (folder / given).exists():
            mistakes.add(loc, f"unknown weights {shown(given)}{hint}")
            return None
        return _weights({"path": given}, loc, folder, mistakes)
    if not isinstance(given, dict):
        mistakes.add(loc, expected("synthetic, a path or a mapping", given))
    elif "repo" in given or "file" in given:
        hub = mistakes.checked(HubWeights, given, loc)
        known = hub and [
            _known_placeholders(text, (*loc, key), mistakes)
            for key, text in (("repo", hub.repo), ("file", hub.file or ""))
        ]
        if hub and known and all(known):
            return Weights(kind="hub", **hub.model_dump())
    elif "path" in given:
        local = mistakes.checked(PathWeights, given, loc)
        if local and _known_placeholders(local.path, loc, mistakes):
            path = _absolute(local.path, loc, folder, mistakes)
            return Weights(kind="path", path=path) if path else None
    elif "synthetic" in given:
        made = mistakes.checked(SyntheticWeights, given, loc)
        return Weights(seed=made.seed) if made else None
    else:
        formats = () if loc[-1] in _FORMATS else _FORMATS
        for key in given:
            hint = suggestion(key, ("path", "repo", "file", "synthetic", *formats))
            mistakes.add((*loc, key), "unknown key" + hint)
        if not given:
            mistakes.add(loc, "expected path, repo, or synthetic: true")
    return None


def _known_placeholders(text: str, loc: Loc, mistakes: Mistakes) -> bool:
    unknown = [found for found in re.findall(r"\{[^{}]*\}", text) if found not in (QUANT, BITS)]
    if unknown:
        mistakes.add(loc, f"unknown placeholder {shown(unknown[0])}; known: {QUANT}, {BITS}")
    return not unknown


def _name_of(weights: Weights) -> str | None:
    source = weights.path or weights.file or weights.repo
    if source is None:
        return None
    name = Path(source).name
    is_file = source != weights.repo and name.lower().endswith(".gguf")
    stem = name[:-5] if is_file else name  # a folder's name may contain dots
    return safe_name(stem.replace(QUANT, "").replace(BITS, "")) or "model"


def safe_name(text: str) -> str:
    """The text as a folder's name; may be empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64]


def workload_of(given: Any, loc: Loc, folder: Path, mistakes: Mistakes) -> Workload | None:
    """The workload of a row; null after adding its mistakes. A relative path starts at `folder`."""
    if not isinstance(given, dict):
        mistakes.add(loc, expected("a mapping such as {kind: decode}", given))
    elif "kind" not in given:
        mistakes.add((*loc, "kind"), "is missing" + suggestion(None, KINDS))
    elif (kind := given["kind"]) not in list(KINDS):
        mistakes.add((*loc, "kind"), f"unknown workload {shown(kind)}" + suggestion(kind, KINDS))
    else:
        workload: Workload | None = mistakes.checked(KINDS[kind], given, loc)
        if isinstance(workload, Quality) and workload.text != "default":
            text = _absolute(workload.text, (*loc, "text"), folder, mistakes)
            return workload.model_copy(update={"text": text}) if text else None
        return workload
    return None


def _absolute(path: str, loc: Loc, folder: Path, mistakes: Mistakes) -> str | None:
    try:
        return str(folder.absolute() / Path(path).expanduser())
    except RuntimeError:
        mistakes.add(loc, f"no such user's home folder: {shown(path)}")
        return None
