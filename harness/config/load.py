"""A config file, or a file of the user's, as an Experiment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from harness.base import bounds
from harness.base.text import plural, shortened
from harness.config import own_machines, yaml_text
from harness.config.experiment import (
    Exclude,
    Experiment,
    Frozen,
    Grow,
    Model,
    Plain,
    Protocol,
    Quality,
    Tokens,
    Variant,
    Weights,
    Workload,
)
from harness.config.variants import (
    QUANT,
    File,
    InlineShape,
    exclusion,
    expanded,
    model_of,
    model_row,
    named_shape,
    safe_name,
    weights_of,
)
from harness.config.yaml_text import ConfigError, Document, Loc, Mistakes, dotted, expected, shown, suggestion
from harness.stacks.header import stacks
from harness.theory import machine_names
from harness.theory.decoder import Decoder, dense, dense_fields
from harness.theory.known_models import known_name
from harness.theory.machines import Figure, Machine
from harness.theory.names import NotUnderstood

# Parse a YAML file and its --set overrides into an Experiment, checked as a whole.


Placed = list[tuple[Loc, Variant]]


def load(path: Path, settings: Sequence[str] = ()) -> Experiment:
    """The experiment in a YAML file. `settings` are --set's `dotted.key=value`, applied in order.

    Reads the file, config.json files named as shapes, and nothing else: no weights, no device. Raises
    ConfigError with every mistake that does not follow from another.
    """
    return load_document(yaml_text.read(path), path, settings)


def load_document(document: Document, path: Path, settings: Sequence[str] = ()) -> Experiment:
    """As `load`, of a document that is read already, or that was made. `path`: what it is named after, and
    where relative paths begin. The document gets the settings, and rows for models that are given by a word.
    """
    for setting in settings:
        _override(document, setting)
    mistakes = Mistakes(document.place)
    if isinstance(rows := document.data.get("models"), list):
        document.data["models"] = [model_row(row, path.parent) for row in rows]
        for index, row in enumerate(rows):
            if isinstance(row, str) and document.data["models"][index] == {"shape": row} and known_name(row):
                mistakes.add(
                    ("models", index), f"{shown(row)} is not weights: for random ones, write {{shape: {row}}}"
                )
    file = _file(document.data, path.parent, mistakes)
    if _right(mistakes, "gpu", "device") and file.gpu is not None and file.device == "cpu":
        mistakes.add(("gpu",), "needs a GPU device such as cuda; device is cpu")
    placed = _models(file, path.parent, mistakes)
    models = [model for _, model in placed]
    # The name of an invalid model may be unknown: then a glob without a match is no mistake.
    names = [model.name for model in models] if _right(mistakes, "models") else []
    variants = _variants(file.variants, "variants", names, path.parent, mistakes)
    include = _variants(file.include, "include", names, path.parent, mistakes)
    used = {variant.stack for _, variant in variants} if _right(mistakes, "variants") else set(stacks())
    exclude = [exclusion(row, ("exclude", i), used, mistakes) for i, row in enumerate(file.exclude)]
    _check_workloads(file, mistakes)
    workloads = file.workloads
    rules = [rule for rule in exclude if rule is not None]
    if _right(mistakes, "models", "variants", "include", "exclude", "workloads"):
        _check_combinations(models, variants + include, rules, workloads, mistakes)
    if _right(mistakes, "protocol", "workloads"):
        _check_lengths(variants + include, workloads, file.protocol, mistakes)
    if _right(mistakes, "protocol", "device"):
        _check_budget(file, variants + include, mistakes)
    mistakes.stop_if_any()
    return Experiment(
        name=file.name or safe_name(path.stem) or "experiment",
        device=file.device,
        gpu=file.gpu,
        protocol=file.protocol,
        models=tuple(models),
        variants=tuple(variant for _, variant in variants),
        include=tuple(variant for _, variant in include),
        exclude=tuple(rules),
        workloads=tuple(workloads),
        source=document.data,
    )


def _right(mistakes: Mistakes, *keys: str) -> bool:
    """Whether these keys of the file have no mistake. An unknown key may be any of them, misspelt."""
    return not any(loc[0] in keys or loc[0] not in File.model_fields for loc, _ in mistakes.found)


def _file(data: Plain, folder: Path, mistakes: Mistakes) -> File:
    """The form of the file. Of a file with mistakes: the valid keys, so that those are checked too."""
    if file := mistakes.checked(File, data, (), folder):
        return file
    wrong = {loc[0] for loc, _ in mistakes.found}
    right = {key: data[key] for key in File.model_fields if key in data and key not in wrong}
    lacking = {key: ["any"] for key in ("models", "variants") if key not in right}
    return File.model_validate(lacking | right, context=folder).model_copy(
        update={key: [] for key in lacking}
    )


def _override(document: Document, setting: str) -> None:
    """Put one --set into the document."""
    place = f"--set {shortened(setting, 120)}"
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise ConfigError(f"{place}: expected key=value")
    value, _ = yaml_text.parse(text, lambda _line: place)
    for parts in _places(document, key.split("."), place):
        _put(document, parts, value, place)


def _places(document: Document, parts: list[str], place: str) -> list[list[str]]:
    """Where a key of --set stands: a key of the protocol may be without `protocol`, and an option of a stack
    is one of every variant that has it. Raises ConfigError."""
    known, short = list(File.model_fields), list(Protocol.model_fields)
    if parts[0] in known:
        return [parts]
    if parts[0] in short:
        return [["protocol", *parts]]
    having, options = [], set[str]()
    for key in ("variants", "include") if len(parts) == 1 and isinstance(document.data, dict) else ():
        rows = document.data.get(key)
        for index, row in enumerate(rows if isinstance(rows, list) else []):
            header = stacks().get(str(row.get("stack"))) if isinstance(row, dict) else None
            options |= header.options.keys() if header else set()
            if header and parts[0] in header.options:
                having.append([key, str(index), *parts])
    if not having:
        hint = suggestion(parts[0], [*known, *short, *sorted(options)])
        raise ConfigError(f"{place}: {dotted(parts[:1])}: unknown key{hint}")
    return having


def _put(document: Document, parts: list[str], value: Any, place: str) -> None:
    if len(parts) > bounds.CONFIG_DEPTH:
        raise ConfigError(f"{place}: nested more than {bounds.CONFIG_DEPTH} deep")
    inside: Any = document.data
    loc: Loc = ()
    for number, part in enumerate(parts):
        step = _step(inside, part, loc, place)
        loc = (*loc, step)
        if number == len(parts) - 1:
            inside[step] = value
        else:
            if isinstance(inside, dict) and inside.get(step) is None:
                inside[step] = {}
                document.places.setdefault(loc, place)
            inside = inside[step]
    for old in [old for old in document.places if old[: len(loc)] == loc]:
        del document.places[old]
    document.places[loc] = place


def _step(inside: Any, part: str, loc: Loc, place: str) -> str | int:
    """The key or index that a part of a dotted path names."""
    if isinstance(inside, dict):
        return part
    if not isinstance(inside, list):
        raise ConfigError(f"{place}: {dotted(loc)} is {shown(inside)}, it has no {dotted([part])} inside")
    if not re.fullmatch("[0-9]{1,6}", part) or int(part) >= len(inside):
        raise ConfigError(f"{place}: {dotted(loc)} has rows 0 to {len(inside) - 1}, no {dotted([part])}")
    return int(part)


def _models(file: File, folder: Path, mistakes: Mistakes) -> list[tuple[Loc, Model]]:
    found: dict[str, int] = {}
    models: list[tuple[Loc, Model]] = []
    for index, row in enumerate(file.models):
        model = model_of(row, ("models", index), folder, mistakes)
        if model is None:
            continue
        if model.name in found:
            first = f"models.{found[model.name]}"
            mistakes.add(("models", index), f"the name {model.name} is that of {first}; give one a name")
        found.setdefault(model.name, index)
        models.append((("models", index), model))
    return models


def _variants(given: list[Any], key: str, names: list[str], folder: Path, mistakes: Mistakes) -> Placed:
    found: Placed = []
    for index, row in enumerate(given):
        found += [((key, index), variant) for variant in expanded(row, (key, index), names, folder, mistakes)]
        if len(found) > bounds.CONFIG_CELLS:
            mistakes.add((key, index), f"more than {bounds.CONFIG_CELLS} variants")
            break
    return found


def _check_workloads(file: File, mistakes: Mistakes) -> None:
    """Check that lengths fit together and no workload occurs twice."""
    if not _right(mistakes, "protocol"):
        return
    seen: dict[str, int] = {}
    for index, workload in enumerate(file.workloads):
        whole = workload.resolved(file.protocol.prompt_tokens, file.protocol.new_tokens)
        if isinstance(whole, Grow) and whole.new_tokens < 1:
            needs = (
                f"must be above the prompt's {plural(whole.prompt_tokens or 0, 'token')}, got {whole.target}"
            )
            mistakes.add(("workloads", index, "target"), needs)
        first = seen.setdefault(whole.model_dump_json(), index)
        if first != index:
            mistakes.add(("workloads", index), f"the same as workloads.{first}")


def _check_lengths(
    variants: Placed, workloads: list[Workload], protocol: Protocol, mistakes: Mistakes
) -> None:
    """A given context (the option that defaults to the number of tokens) must hold the longest workload."""
    whole = [workload.resolved(protocol.prompt_tokens, protocol.new_tokens) for workload in workloads]
    longest = max(whole, key=lambda workload: workload.holds)
    reported = set()
    for loc, variant in variants:
        header = stacks()[variant.stack]
        covered = {limit.covers for limit in header.limits}  # these refuse the cell by default
        for key, option in header.options.items():
            given = variant.options.get(key)
            if option.default_from != "tokens" or key in covered:
                continue
            if not isinstance(given, int) or given >= longest.holds:
                continue
            if (loc, key, given) not in reported:
                reported.add((loc, key, given))
                mistakes.add((*loc, key), f"{key} {given} is smaller than {_needs(longest)}")


def _needs(workload: Workload) -> str:
    if workload.timed == "rows" or isinstance(workload, Quality):
        return f"the {workload.holds} tokens that workload {workload.kind} needs"
    prompt, new = workload.prompt_tokens, workload.new_tokens
    return f"prompt_tokens {prompt} + new_tokens {new} = {workload.holds}"


def _check_budget(file: File, variants: Placed, mistakes: Mistakes) -> None:
    """A memory budget limits main memory and includes all weights."""
    if file.protocol.memory_budget is None:
        return
    if file.device != "cpu":
        mistakes.add(("protocol", "memory_budget"), f"is for device cpu; {file.device} has its own memory")
    for loc, variant in variants:
        if variant.options.get("mmap") is True:
            mistakes.add((*loc, "mmap"), "true maps the weights, which no memory_budget counts; set false")


def _check_combinations(
    models: list[Model],
    placed: Placed,
    rules: list[Exclude],
    workloads: list[Workload],
    mistakes: Mistakes,
) -> None:
    """Check that each rule excludes something, some cells remain, and no cell occurs twice."""
    if (count := len(models) * len(placed) * len(workloads)) > bounds.CONFIG_CELLS:
        mistakes.add(
            ("variants",), f"{count} cells (models x variants x workloads); at most {bounds.CONFIG_CELLS}"
        )
        return
    matched: set[int] = set()
    kept: dict[tuple[str, str, str], int] = {}
    for number, (loc, variant) in enumerate(placed):
        for model in models:
            if not variant.fits(model):
                continue
            hits = [
                {i for i, rule in enumerate(rules) if rule.matches(model, variant, workload)}
                for workload in workloads
                if loc[0] != "include"
            ]
            matched.update(*hits)
            if hits and all(hits):
                continue
            first = kept.setdefault((variant.stack, variant.name, model.name), number)
            if first != number:
                what = f"{variant.stack} {variant.name} of {model.name}"
                mistakes.add(loc, f"{what} is already in {dotted(placed[first][0])}; give one a name")
            if wrong := _unfilled_placeholder(model, variant):
                mistakes.add(loc, wrong)
    for index in sorted(set(range(len(rules))) - matched):
        mistakes.add(("exclude", index), "matches no combination of model, variant and workload")
    if not kept:
        mistakes.add(("exclude",), "leaves nothing to measure")


def _unfilled_placeholder(model: Model, variant: Variant) -> str | None:
    given = weights_of(model, variant) or Weights()
    source = f"{given.path or ''}{given.repo or ''}{given.file or ''}"
    option = stacks()[variant.stack].options.get("quant")
    if QUANT not in source or option is None or "quant" in variant.options or option.default:
        return None  # a stack without quantizations cannot load it: its cell fails
    return f"needs a quant: the weights of {model.name} have {QUANT} in their path"


# A user's own shapes and machines for `harness theory`, from YAML; every mistake is one sentence.


Positive = Annotated[float, Field(ge=1e-6, le=1e9)]


class OwnFile(Frozen):
    """The whole file."""

    shapes: Plain = Field(default={})
    machines: Plain = Field(default={})


class OwnShape(InlineShape):
    """A shape spelled out, with the features of newer families. `qk_norm`: by default that of the arch."""

    arch: Literal["qwen2", "llama", "qwen3"]  # type: ignore[assignment]
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool | None = None
    window: Tokens | None = None

    def spelled_out(self) -> dict[str, Any]:
        norm = self.arch == "qwen3" if self.qk_norm is None else self.qk_norm
        return super().spelled_out() | {"qk_norm": norm}


class OwnMachine(Frozen):
    """A machine, or its differences from a known one. Read bandwidth, and the rate of the arithmetic that
    decode uses; both SI."""

    like: str | None = None
    memory_gib: Positive | None = None
    bandwidth_gb_per_s: Positive | None = None
    tflops: Positive | None = None


def load_own_model(path: Path) -> tuple[dict[str, Decoder], dict[str, Machine]]:
    """Shapes and machines by name. Both may start from a known one: `{like: qwen1.5-0.5b, tied: true}`.

    Raises ConfigError.
    """
    document = yaml_text.read(path)
    mistakes = Mistakes(document.place)
    file = mistakes.checked(OwnFile, document.data, ())
    shapes: dict[str, Decoder] = {}
    machines: dict[str, Machine] = {}
    for name, given in (file.shapes if file else {}).items():
        if shape := _shape(given, ("shapes", name), mistakes):
            shapes[name] = shape
    for name, given in (file.machines if file else {}).items():
        if machine := _machine(name, given, path, mistakes):
            machines[name] = machine
    mistakes.stop_if_any()
    return shapes, machines


def _shape(given: Any, loc: Loc, mistakes: Mistakes) -> Decoder | None:
    if not isinstance(given, dict):
        mistakes.add(loc, expected("a mapping (key: value)", given))
        return None
    fields = dict(given)
    if (like := fields.pop("like", None)) is not None:
        if not isinstance(like, str):
            mistakes.add((*loc, "like"), expected("a shape's name", like))
            return None
        if (known := named_shape(like, (*loc, "like"), mistakes)) is None:
            return None
        base = dense_fields(known.made) or {}
        if (
            base["head_dim"] * base["heads"] == base["hidden_size"]
            and {"hidden_size", "heads"} & fields.keys()
        ):
            del base["head_dim"]  # it followed from them
        if fields.get("arch", base["arch"]) != base["arch"]:
            del base["qkv_bias"], base["qk_norm"]
        fields = base | fields
    row = mistakes.checked(OwnShape, fields, loc)
    return dense(**row.spelled_out()) if row else None


def _machine(name: str, given: Any, path: Path, mistakes: Mistakes) -> Machine | None:
    loc = ("machines", name)
    row = mistakes.checked(OwnMachine, given, loc)
    if row is None:
        return None
    source = str(path)
    memory = Figure(round(row.memory_gib * 2**30), source) if row.memory_gib else None
    bandwidth = Figure(row.bandwidth_gb_per_s * 1e9, source) if row.bandwidth_gb_per_s else None
    rates = {"own": Figure(row.tflops * 1e12, source)} if row.tflops else None
    if row.like is None:
        for key in ("memory_gib", "bandwidth_gb_per_s", "tflops"):
            if getattr(row, key) is None:
                mistakes.add((*loc, key), "is missing")
        if not (memory and bandwidth and rates):
            return None
        return Machine(name, memory, bandwidth, rates, rate="own")
    try:
        base = machine_names.one_machine(row.like, row.memory_gib, known=own_machines.known())
    except NotUnderstood as why:
        mistakes.add((*loc, "like"), why.sentence("machine", shown(row.like)))
        return None
    return replace(
        base,
        name=name,
        memory=memory or base.memory,
        bandwidth=bandwidth or base.bandwidth,
        peak_bandwidth=None if bandwidth else base.peak_bandwidth,
        rates=rates or base.rates,
        rate="own" if rates else base.rate,
    )
