"""Parse the rows of models and of workloads of a config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from harness.base import data
from harness.base.files import is_local
from harness.config.base import Plain
from harness.config.experiment import (
    REPO,
    Model,
    Weights,
)
from harness.config.form import (
    BITS,
    QUANT,
    FormatWeights,
    HubWeights,
    InlineShape,
    ModelRow,
    PathWeights,
    SyntheticWeights,
)
from harness.config.mistakes import Loc, Mistakes, expected, shown, suggestion
from harness.theory import base_shapes, names
from harness.theory.decoder import dense
from harness.theory.ggml_quants import ALL_QUANTS
from harness.theory.known_models import Described, NoModel, described
from harness.theory.names import NotUnderstood

_FORMATS = tuple(FormatWeights.model_fields)
_BY_FORMAT = (*_FORMATS, *ALL_QUANTS)


def repository(given: str) -> tuple[str, str]:
    """The repository of `org/name:Q4_K_M`, and the type of its GGUF: of one that is named as a repository of
    GGUFs alone Q4_K_M, as in `llama-server -hf`; else empty."""
    name = base_shapes.without_site(given)
    repo, _, quant = name.partition(":")
    if quant and not re.fullmatch(base_shapes.GGUF_TYPE, quant, re.IGNORECASE):
        return name, ""  # a tag of Ollama's, such as a size
    return repo, quant or ("Q4_K_M" if repo.lower().endswith("-gguf") else "")


def model_row(given: Any, folder: Path) -> Any:
    """The row of a model that is given as a word: a path, a repository of the hub (org/name, or
    org/name:Q4_K_M for its GGUF of that type), else a shape."""
    if not isinstance(given, str):
        return given
    if is_local(given, folder) or given in data.weights_names():
        return {"weights": given}
    repo, quant = repository(given)
    if not re.match(REPO, repo):
        return {"shape": given}
    if not quant:
        return {"weights": {"repo": repo}}
    return {"name": safe_name(repo.partition("/")[2]), "weights": {"repo": repo, "file": f"*{quant}.gguf"}}


def model_of(given: Any, loc: Loc, folder: Path, mistakes: Mistakes) -> Model | None:
    """The model of a row; None after adding its mistakes. Relative paths start at `folder`."""
    row = mistakes.checked(ModelRow, given, loc)
    if row is None:
        return None
    before = len(mistakes.found)
    known, made = _shape(row.shape, (*loc, "shape"), folder, mistakes)
    by_format = isinstance(row.weights, dict) and any(form in row.weights for form in _BY_FORMAT)
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
    return Model(
        name=name,
        described=made,
        weights=weights,
        of_format=of_format,
        where=tuple(row.where),
    )


def _shape(given: Any, loc: Loc, folder: Path, mistakes: Mistakes) -> tuple[str | None, Described | None]:
    """The name of a known model, and its layers."""
    if isinstance(given, dict):
        row = mistakes.checked(InlineShape, given, loc)
        return None, Described(dense(**row.spelled_out())) if row else None
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


def named_shape(given: str, loc: Loc, mistakes: Mistakes) -> names.Named | None:
    """The known shape with this name; None after adding the mistake."""
    try:
        return names.named(given, otherwise="spell the shape out")
    except NotUnderstood as why:
        mistakes.add(loc, why.sentence("shape", shown(given)))
        return None


def _of_format(given: Plain, loc: Loc, folder: Path, mistakes: Mistakes) -> dict[str, Weights]:
    """Weights by format or type, in the order of the forms, without invalid ones."""
    formats = {form: weights for form, weights in given.items() if form not in ALL_QUANTS}
    if mistakes.checked(FormatWeights, formats, loc) is None:
        return {}
    found: dict[str, Weights] = {}
    for form in _BY_FORMAT:
        weights = _weights(given[form], (*loc, form), folder, mistakes) if form in given else None
        if weights and weights.file is not None and form in _FORMATS and form != "gguf":
            mistakes.add((*loc, form, "file"), f"{form} weights are a checkpoint: a repo without file")
        elif weights:
            found[form] = weights
    return found


def _weights(given: Any, loc: Loc, folder: Path, mistakes: Mistakes) -> Weights | None:
    if isinstance(given, str):
        if given == "synthetic":
            return Weights()
        if given == "served":
            return Weights(kind="served")
        if given in data.weights_names() and not (folder / given).exists():  # the user's own goes first
            return Weights(kind="path", path=str(data.weights(given)))
        named = ["synthetic", *data.weights_names()]
        is_misspelt = not re.search(r"[./~{]", given) and "did you mean" in (hint := suggestion(given, named))
        if is_misspelt and not (folder / given).exists():
            mistakes.add(loc, f"unknown weights {shown(given)}{hint}")
            return None
    elif not isinstance(given, dict):
        mistakes.add(loc, expected("synthetic, a path or a mapping", given))
        return None
    if isinstance(given, dict) and ("repo" in given or "file" in given):
        hub = mistakes.checked(HubWeights, given, loc)
        return Weights(kind="hub", **hub.model_dump()) if hub else None
    if isinstance(given, str) or "path" in given:
        local = mistakes.checked(PathWeights, given, loc, folder)
        return Weights(kind="path", path=local.path) if local else None
    if "synthetic" in given:
        random = mistakes.checked(SyntheticWeights, given, loc)
        return Weights(seed=random.seed) if random else None
    formats = () if loc[-1] in _BY_FORMAT else _FORMATS
    for key in given:
        hint = suggestion(key, ("path", "repo", "file", "synthetic", *formats))
        mistakes.add((*loc, key), "unknown key" + hint)
    if not given:
        mistakes.add(loc, "expected path, repo, or synthetic: true")
    return None


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
