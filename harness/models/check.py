"""Whether a stack loads, converts or quantizes weights, and measures what was asked for with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.base.files import JsonFileError
from harness.base.text import list_named
from harness.models import layout
from harness.models.config_json import CONFIG, PACKING_FILES, separate_packing, settings_in
from harness.models.gguf_keys import rotary_of
from harness.models.locate import Ready, WeightsError, WeightsRefused, WeightsUnavailable, attention
from harness.models.make import FULL_TYPES, config_of
from harness.models.packed_layers import mismatch
from harness.stacks.header import Header, Options, stacks
from harness.theory import ggml_quants, ggml_types
from harness.theory.config_settings import ConfigJsonError, Settings, shown
from harness.theory.decoder import Decoder
from harness.theory.known_models import Described
from harness.theory.loaded_sizes import LINEAR
from harness.theory.packed_sizes import FORMATS, KINDS, Packing
from harness.theory.packing_settings import packing_of
from harness.theory.quantization import Quantization, quantization_configs

_UNKNOWN = "of an unknown type"
_LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}  # layouts that we can count and unpack


def check_shape(ready: Ready, shape: Decoder) -> None:
    """Raises WeightsError for weights that do not match the shape in the config."""
    if shape.is_dense:
        stored, expected = ready.attention or {}, attention(shape)
    else:
        stored, expected = (
            {key: getattr(decoder, key) for key in ("count", "hidden_size", "experts", "experts_used")}
            if decoder
            else {}
            for decoder in (ready.not_dense, shape)
        )
    for key, value in stored.items():
        if value != expected[key]:
            dimension = key.replace("_", " ").replace("count", "layers")
            raise WeightsError(
                f"{ready.path}: has {dimension} {value}, but the config's shape has {expected[key]}"
            )


def check_types(ready: Ready, header: Header) -> None:
    """Raises WeightsRefused for a GGUF with tensors of types that only ik_llama.cpp has, in another stack."""
    types = {tensor.type for tensor in ready.header.tensors.values()} if ready.header else set()
    if not (ik_types := sorted(types & ggml_types.IK_TYPES)) or _has_types_of_ik(header):
        return
    able = ", ".join(name for name, other in stacks().items() if _has_types_of_ik(other))
    raise WeightsRefused(
        f"{ready.path}: has tensors of {ik_types[0]}, a type of ik_llama.cpp alone; stack {able} loads it,"
        f" {header.stack} does not"
    )


def _has_types_of_ik(header: Header) -> bool:
    quant = header.options.get("quant")
    return quant is not None and not set(ggml_quants.IK_QUANTS).isdisjoint(quant.choices)


def check_quantizable(ready: Ready, quant: str) -> None:
    """Raises WeightsError for a file that is quantized already, to another type."""
    if ready.quant not in FULL_TYPES:
        raise WeightsError(
            f"{ready.path}: is {ready.quant or _UNKNOWN}; {quant} was requested, which needs f16 weights"
        )


def check_convertible(ready: Ready) -> None:
    """Raises WeightsError for a checkpoint that is not converted to GGUF: quantized already, of another
    architecture, or computed differently there."""
    if ready.quant not in FULL_TYPES:
        stored = ready.quant or _UNKNOWN
        raise WeightsRefused(f"{ready.path}: is {stored}; only 16- and 32-bit weights are converted to GGUF")
    if ready.architecture not in layout.KINDS:
        raise WeightsUnavailable(
            f"{ready.path}: is {ready.architecture}, which is not converted to GGUF here"
        )
    try:
        layout.check_gguf(settings_in(ready.path / CONFIG))
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
    try:
        if form == "gguf":
            layout.check_gguf(config)
        if not model.decoder.is_dense:  # config_of raises for a dense model without a layout
            layout.of(config)
    except (layout.NoLayout, ConfigJsonError) as why:
        raise WeightsUnavailable(str(why)) from why


def _check_architecture(name: str, header: Header, config: Mapping[str, Any]) -> None:
    """Raises WeightsUnavailable for a model that the stack's engine does not run. `name`: of the model."""
    if not (runnable := header.architectures):
        return
    kind = str(config.get("model_type"))
    if kind not in runnable:
        runs = list_named(list(runnable), 8)
        raise WeightsUnavailable(
            f"{name}: is {kind}, which stack {header.stack} does not run; it runs {runs}"
        )
    try:
        rope = rotary_of(config).kind
    except ConfigJsonError as why:
        raise WeightsUnavailable(f"{name}: {why}") from why
    if rope not in ("default", *runnable[kind]):
        raise WeightsUnavailable(
            f"{name}: has rope scaling {shown(rope)}, which stack {header.stack} does not run for {kind}"
        )


def check_loadable(ready: Ready, requested: Packing | None, header: Header, options: Options) -> None:
    """Raises WeightsError for weights that a checkpoint stack does not load as they are: a GGUF, weights with
    other packing than requested (None: none), and quantized ones that the stack does not apply, which its
    libraries may load as another model. `options`: resolved."""
    stack, stored = header.stack, ready.stored
    if ready.format != "hf":
        raise WeightsError(f"stack {stack} needs a Hugging Face checkpoint, but {ready.path} is a GGUF")
    config = settings_in(ready.path / CONFIG)
    kind = config.get("model_type")
    is_wrapper = isinstance(config.get("text_config"), Mapping)
    if is_wrapper and header.wrappers is not None and kind not in header.wrappers:
        raise WeightsUnavailable(
            f"{ready.path}: is {kind}, a multimodal model that stack {stack} does not load; name a checkpoint"
            " of its language model"
        )
    _check_architecture(str(ready.path), header, config)
    if requested:
        check_packing(ready, config, requested, header)
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
    return [name for name in _LAYOUTS[packing.method] if name in (header.layouts or [name])]


def loaded_by(stored: Quantization, packing: Packing | None = None) -> str:
    """The stacks that load weights stored so, as a clause; empty for none."""
    method = stored.method
    widened = [loader.stack for loader in loading(stored, packing) if method in loader.dequantizes]
    adopted = [loader.stack for loader in loading(stored, packing) if method in loader.needs]
    as_stored = [
        loader.stack for loader in loading(stored, packing) if loader.stack not in [*widened, *adopted]
    ]
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


def check_packing(ready: Ready, config: Settings, requested: Packing, header: Header) -> None:
    """Raises WeightsError for a checkpoint with another packing than requested or stated in its config, or
    whose layers differ, unless its settings say so and the stack loads such. `config`: its config.json.

    A synthetic one of 16 or 32 bits is valid: it is packed here.
    """
    stack, method, packing = header.stack, requested.method.upper(), ready.packing
    if packing is None:
        if ready.quant not in FULL_TYPES:
            raise WeightsRefused(f"stack {stack} needs {method} weights, but {ready.path} is {ready.quant}")
        if ready.synthetic:
            return
        needs = f"quantizing to {method} needs calibration data, which the harness lacks"
        raise WeightsError(f"{ready.path}: is {ready.quant}; {needs}: name a quantized checkpoint")
    if packing.method != requested.method:
        theirs = f"{packing.method.upper()} ({packing.bits} bits)"
        raise WeightsError(f"stack {stack} needs {method} weights, but {ready.path} is {theirs}")
    if packing.bits != requested.bits:
        raise WeightsError(
            f"{ready.path}: has {packing.bits} bits, and {requested.bits} were requested of {stack}"
        )
    try:
        settings = [inner for _, inner in quantization_configs(config)]
        beside = [settings_in(path) for name in PACKING_FILES if (path := ready.path / name).exists()]
        rules = next(
            (rule for settings_of_file in (*settings, *beside) if (rule := _first_rule(settings_of_file))),
            None,
        )
        packs_head = any(setting.get("lm_head") is True for setting in settings)
        is_mixed = header.mixed_layers and bool(rules or packs_head)
        if rules and not is_mixed:
            raise WeightsRefused(
                f"{ready.path}: has rules for single layers (dynamic: {rules}), so its weights are not all"
                f" {packing.words}"
            )
        _check_tensors(ready, packing, _checked_settings(ready.path, config, packing, header), is_mixed)
    except (ConfigJsonError, JsonFileError) as damage:
        raise WeightsError(str(damage)) from damage


def _first_rule(settings: Mapping[str, object]) -> str | None:
    """The first of GPTQModel's rules by layer, which override its settings; None without one."""
    rules = settings.get("dynamic")
    return shown(next(iter(rules))) if isinstance(rules, Mapping) and rules else None


def _checked_settings(folder: Path, config: Settings, packing: Packing, header: Header) -> str:
    """The name of the file with a folder's packing settings. Libraries read one or the other: both must
    agree, in a layout that the stack loads. Raises WeightsError, JsonFileError."""
    has_inline = packing_of(config) is not None
    name, separate = separate_packing(folder)
    layouts = [packing.layout]
    if separate and separate.method == packing.method:
        layouts.append(separate.layout)
        for key in ("bits", "group_size", "act_order", "symmetric"):
            ours, theirs = getattr(packing, key), getattr(separate, key)
            if ours != theirs:
                words = f"config.json has {key} {_as_json(ours)}, but {name} has {_as_json(theirs)}"
                raise WeightsError(f"{folder}: {words}")
    loadable = _layouts(packing, header)
    for stored in layouts:
        if stored not in loadable:
            method, loads = packing.method.upper(), " or ".join(loadable)
            raise WeightsError(
                f"{folder}: is {method} in the layout {stored}; stack {header.stack} loads only {loads}"
            )
    return CONFIG if has_inline else name


def _as_json(value: object) -> str:
    return str(value).lower()


def _check_tensors(ready: Ready, packing: Packing, settings_name: str, is_mixed: bool) -> None:
    """Check that every packed layer has all its tensors, in the sizes given by bits and group size.
    `is_mixed`: of each layer its own, and some may be unpacked."""
    kinds = KINDS if packing.method == "gptq" else KINDS[:3]
    dims_by_layer: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in ready.tensors:
        layer, _, kind = tensor.name.rpartition(".")
        if kind in KINDS:
            dims_by_layer.setdefault(layer, {})[kind] = tensor.dims
    if not dims_by_layer:
        raise WeightsError(f"{ready.path}: its {settings_name} has {packing.words}, but no tensor is packed")
    for tensor in () if is_mixed else ready.tensors:
        kind = tensor.name.rpartition(".")[2]
        if tensor.part == "lm_head" and kind in KINDS:
            raise WeightsRefused(
                f"{ready.path}: {tensor.name} is packed; only the layers' matrices may be here"
            )
        if tensor.part in LINEAR and kind == "weight":
            raise WeightsRefused(
                f"{ready.path}: {tensor.name[:80]} is {tensor.type}, so its weights are not all"
                f" {packing.words}"
            )
    for layer, stored in dims_by_layer.items():
        if missing := next((kind for kind in kinds if kind not in stored), None):
            raise WeightsError(f"{ready.path}: {layer} lacks its {missing}")
        dims = {kind: stored[kind] for kind in kinds}
        if wrong := mismatch(packing, layer, dims, is_mixed):
            raise WeightsError(f"{ready.path}: its {settings_name} has {wrong}")
