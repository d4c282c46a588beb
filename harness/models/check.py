"""Whether a stack loads, converts or quantizes weights, and measures what was asked for with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.base import bounds
from harness.base.files import JsonFileError, object_of
from harness.base.text import list_named
from harness.models import checkpoint, layout
from harness.models.checkpoint import CheckpointError
from harness.models.config_json import CONFIG, PACKING_FILES, read_config_json, separate_packing
from harness.models.gguf_keys import rotary_of
from harness.models.locate import Ready, WeightsError, WeightsRefused, WeightsUnavailable, attention
from harness.models.make import FULL_TYPES, config_of, gguf_layout_of, layout_of
from harness.models.packed_layers import mismatch, of_layer
from harness.stacks.header import Header, Options, stacks
from harness.theory import tensors
from harness.theory.decoder import Decoder
from harness.theory.hf_config import ConfigJsonError, Quantization, quantization_configs, shown
from harness.theory.known_models import Described
from harness.theory.tensors import FORMATS, KINDS, LINEAR, Packing, Tensor

_LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}  # layouts that we can count and unpack


def check_shape(ready: Ready, made: Decoder) -> None:
    """Raises WeightsError for weights that do not match the shape in the config."""
    if not made.is_dense:
        for key in ("count", "hidden_size", "experts", "experts_used"):
            given, named = getattr(ready.not_dense, key, None), getattr(made, key)
            if ready.not_dense and given != named:
                what = key.replace("_", " ").replace("count", "layers")
                raise WeightsError(f"{ready.path}: has {what} {given}, but the config's shape has {named}")
        return
    dimensions = attention(made)
    for key, value in (ready.attention or {}).items():
        if value != dimensions[key]:
            named, what = dimensions[key], key.replace("_", " ")
            raise WeightsError(f"{ready.path}: has {what} {value}, but the config's shape has {named}")


def check_types(ready: Ready, header: Header) -> None:
    """Raises WeightsRefused for a GGUF with tensors of types that only ik_llama.cpp has, in another stack."""
    held = {tensor.type for tensor in ready.header.tensors.values()} if ready.header else set()
    if not (own := sorted(held & tensors.IK_TYPES)) or _has_types_of_ik(header):
        return
    able = ", ".join(name for name, each in stacks().items() if _has_types_of_ik(each))
    raise WeightsRefused(
        f"{ready.path}: has tensors of {own[0]}, a type of ik_llama.cpp alone; stack {able} loads it,"
        f" {header.stack} does not"
    )


def _has_types_of_ik(header: Header) -> bool:
    quant = header.options.get("quant")
    return quant is not None and not set(tensors.IK_QUANTS).isdisjoint(quant.choices)


def check_quantizable(ready: Ready, quant: str) -> None:
    """Raises WeightsError for a file that is quantized already, to another type."""
    if ready.quant not in FULL_TYPES:
        stored = ready.quant or "of an unknown type"
        raise WeightsError(f"{ready.path}: is {stored}; {quant} was requested, which needs f16 weights")


def check_convertible(ready: Ready) -> None:
    """Raises WeightsError for a checkpoint that is not converted to GGUF: quantized already, of another
    architecture, or computed differently there."""
    if ready.quant not in FULL_TYPES:
        stored = ready.quant or "of an unknown type"
        raise WeightsRefused(f"{ready.path}: is {stored}; only 16- and 32-bit weights are converted to GGUF")
    if ready.architecture not in layout.KINDS:
        raise WeightsUnavailable(
            f"{ready.path}: is {ready.architecture}, which is not converted to GGUF here"
        )
    try:
        layout.check_gguf(object_of(ready.path / CONFIG, bounds.CONFIG_JSON_BYTES))
    except (ConfigJsonError, layout.NoLayout) as why:
        raise WeightsUnavailable(f"{ready.path}: {why}") from why


def check_synthetic(model: Described, form: str, header: Header) -> None:
    """Raises WeightsUnavailable for a model that cannot be synthesized in a stack's format, or that its
    engine does not run."""
    config = config_of(model)
    _check_architecture("a model of this shape", header, config)
    if form in FORMATS and not model.decoder.is_dense:
        raise WeightsUnavailable(
            f"only dense models are packed as {form} here; this one is {model.decoder.arch}"
        )
    (gguf_layout_of if form == "gguf" else layout_of)(config)


def _check_architecture(name: str, header: Header, config: Mapping[str, Any]) -> None:
    """Raises WeightsUnavailable for a model that the stack's engine does not run. `name`: of the model."""
    if not (known := header.architectures):
        return
    kind = str(config.get("model_type"))
    if kind not in known:
        runs = list_named(list(known), 8)
        raise WeightsUnavailable(
            f"{name}: is {kind}, which stack {header.stack} does not run; it runs {runs}"
        )
    try:
        rope = rotary_of(config).kind
    except ConfigJsonError as why:
        raise WeightsUnavailable(f"{name}: {why}") from why
    if rope not in ("default", *known[kind]):
        raise WeightsUnavailable(
            f"{name}: has rope scaling {shown(rope)}, which stack {header.stack} does not run for {kind}"
        )


def check_loadable(ready: Ready, requested: Packing | None, header: Header, options: Options) -> None:
    """Raises WeightsError for weights that a checkpoint stack does not load as they are: a GGUF, weights with
    other packing than requested (null: none), and quantized ones that the stack does not apply, which its
    libraries may load as another model. `options`: resolved."""
    stack, stored = header.stack, ready.stored
    if ready.format != "hf":
        raise WeightsError(f"stack {stack} needs a Hugging Face checkpoint, but {ready.path} is a GGUF")
    config = object_of(ready.path / CONFIG, bounds.CONFIG_JSON_BYTES)
    _check_wrapper(ready, header, config)
    _check_architecture(str(ready.path), header, config)
    if requested:
        check(ready, requested, stack)
    elif stored and stored.method in header.dequantizes:
        if stored.obstacle:
            raise WeightsRefused(
                f"{ready.path}: is {ready.quant}, which stack {stack} would dequantize to other values:"
                f" {stored.obstacle}"
            )
    elif stored and stored.method not in header.applies:
        if not (others := loaded_by(stored, ready.packing)):
            raise WeightsRefused(f"{ready.path}: is {ready.quant}, which no stack here applies")
        raise WeightsRefused(f"{ready.path}: is {ready.quant}; {others}, {stack} does not")
    elif stored:
        for name in header.applies[stored.method]:
            if options.get(name) != stored.options.get(name):
                stores, wants = _as_json(stored.options.get(name)), _as_json(options.get(name))
                raise WeightsRefused(
                    f"{ready.path}: is {ready.quant}, which stack {stack} loads as it is stored;"
                    f" {name} {wants} was requested, set {name}: {stores}"
                )


def loading(stored: Quantization, packing: Packing | None = None) -> list[Header]:
    """The stacks that load weights stored so. `packing`: of GPTQ or AWQ weights."""
    method = stored.method

    def loads(header: Header) -> bool:
        if method in header.formats:
            mixed = header.mixed_layers or not stored.mixed
            return mixed and (packing is None or packing.layout in _layouts(packing, header))
        return method in header.applies or (method in header.dequantizes and not stored.obstacle)

    return [header for header in stacks().values() if loads(header)]


def _layouts(packing: Packing, header: Header) -> Sequence[str]:
    return [each for each in _LAYOUTS[packing.method] if each in (header.layouts or [each])]


def loaded_by(stored: Quantization, packing: Packing | None = None) -> str:
    """The stacks that load weights stored so, as a clause; empty for none."""
    method = stored.method
    widened = [each.stack for each in loading(stored, packing) if method in each.dequantizes]
    adopted = [each.stack for each in loading(stored, packing) if method in each.needs]
    as_stored = [each.stack for each in loading(stored, packing) if each.stack not in [*widened, *adopted]]
    clauses = []
    for names, how in (
        (as_stored, ""),
        (adopted, f" in an interpreter that has {method} (harness env use)"),
        (widened, ", dequantized to its dtype"),
    ):
        if names:
            subject = f"stacks {list_named(names, 9)} load" if len(names) > 1 else f"stack {names[0]} loads"
            clauses.append(f"{subject} that{how}")
    return ", and ".join(clauses)


def _check_wrapper(ready: Ready, header: Header, config: Mapping[str, Any]) -> None:
    """Raises WeightsUnavailable for a multimodal model that the stack does not load."""
    kind = config.get("model_type")
    wraps = isinstance(config.get("text_config"), Mapping)
    if wraps and header.wrappers is not None and kind not in header.wrappers:
        raise WeightsUnavailable(
            f"{ready.path}: is {kind}, a multimodal model that stack {header.stack} does not load;"
            " name a checkpoint of its language model"
        )


def check(ready: Ready, requested: Packing, stack: str) -> None:
    """Raises WeightsError for a checkpoint with another packing than requested or stated in its config, or
    whose layers differ, unless its settings say so and the stack loads such.

    A synthetic one of 16 or 32 bits is valid: it is packed here.
    """
    wanted, has = requested.method.upper(), ready.packing
    if has is None:
        if ready.quant not in FULL_TYPES:
            raise WeightsRefused(f"stack {stack} needs {wanted} weights, but {ready.path} is {ready.quant}")
        if ready.synthetic:
            return
        needs = f"quantizing to {wanted} needs calibration data, which the harness lacks"
        raise WeightsError(f"{ready.path}: is {ready.quant}; {needs}: name a quantized checkpoint")
    if has.method != requested.method:
        theirs = f"{has.method.upper()} ({has.bits} bits)"
        raise WeightsError(f"stack {stack} needs {wanted} weights, but {ready.path} is {theirs}")
    if has.bits != requested.bits:
        raise WeightsError(
            f"{ready.path}: has {has.bits} bits, and {requested.bits} were requested of {stack}"
        )
    try:
        rules = _rules(ready.path)
        mixed = stacks()[stack].mixed_layers and bool(rules or _packs_head(ready.path))
        if rules and not mixed:
            raise WeightsRefused(
                f"{ready.path}: has rules for single layers (dynamic: {rules}), so its weights are not all"
                f" {has.words}"
            )
        name = _settings(ready.path, has, stacks()[stack])
        found = checkpoint.read(ready.path, needs_shape=False)
        _check_tensors(ready.path, name, has, {tensor.name: tensor for tensor in found.tensors}, mixed)
    except (CheckpointError, JsonFileError) as damage:
        raise WeightsError(str(damage)) from damage


def _settings(folder: Path, packing: Packing, header: Header) -> str:
    """The name of the file with a folder's packing settings. Libraries read one or the other: both must
    agree, in a layout that the stack loads. Raises WeightsError, JsonFileError."""
    inline = read_config_json(folder / "config.json", needs_shape=False).packing
    separate = separate_packing(folder)
    name, layout = "config.json", packing.layout
    if separate and separate[1].method == packing.method:
        name, layout = separate[0].name, separate[1].layout
        for key in ("bits", "group_size", "act_order", "symmetric"):
            ours, theirs = getattr(packing, key), getattr(separate[1], key)
            if ours != theirs:
                words = f"config.json has {key} {_as_json(ours)}, but {name} has {_as_json(theirs)}"
                raise WeightsError(f"{folder}: {words}")
    for named in (packing.layout, layout):
        if named not in (known := _layouts(packing, header)):
            method, loads = packing.method.upper(), " or ".join(known)
            raise WeightsError(
                f"{folder}: is {method} in the layout {named}; stack {header.stack} loads only {loads}"
            )
    return "config.json" if inline else name


def _rules(folder: Path) -> str | None:
    """The first of GPTQModel's rules by layer, which override its settings; null without one."""
    for path in (folder / "config.json", *(folder / name for name in PACKING_FILES)):
        config = object_of(path, bounds.CONFIG_JSON_BYTES) if path.exists() else {}
        for given in (config, *(each for _, each in quantization_configs(config))):
            if isinstance(rules := given.get("dynamic"), Mapping) and rules:
                return shown(next(iter(rules)))
    return None


def _packs_head(path: Path) -> bool:
    """Whether the settings say that lm_head is packed."""
    given = object_of(path / CONFIG, bounds.CONFIG_JSON_BYTES)
    return any(each.get("lm_head") is True for _, each in quantization_configs(given))


def _as_json(value: object) -> str:
    return str(value).lower()


def _check_tensors(
    folder: Path, name: str, packing: Packing, tensors: Mapping[str, Tensor], mixed: bool
) -> None:
    """Check that every packed layer has all its tensors, in the sizes given by bits and group size. `mixed`:
    of each layer its own, and some may be unpacked."""
    kinds = KINDS if packing.method == "gptq" else KINDS[:3]
    split = (tensor.rpartition(".") for tensor in tensors)
    layers = dict.fromkeys(layer for layer, _, kind in split if kind in KINDS)
    if not layers:
        raise WeightsError(f"{folder}: its {name} has {packing.words}, but no tensor is packed")
    for tensor in () if mixed else tensors.values():
        if tensor.part == "lm_head" and tensor.name.rpartition(".")[2] in KINDS:
            raise WeightsRefused(f"{folder}: {tensor.name} is packed; only the layers' matrices may be here")
        if tensor.part in LINEAR and tensor.name.endswith(".weight"):
            raise WeightsRefused(
                f"{folder}: {tensor.name[:80]} is {tensor.type}, so its weights are not all {packing.words}"
            )
    for layer in layers:
        for kind in kinds:
            if f"{layer}.{kind}" not in tensors:
                raise WeightsError(f"{folder}: {layer} lacks its {kind}")
        dims = {kind: tensors[f"{layer}.{kind}"].dims for kind in kinds}
        if wrong := mismatch(of_layer(packing, dims) if mixed else packing, layer, dims):
            raise WeightsError(f"{folder}: its {name} has {wrong}")
