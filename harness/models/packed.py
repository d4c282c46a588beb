"""GPTQ and AWQ checkpoints: names in our cache, and checks of given ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from harness.models import checkpoint, config_json
from harness.models.checkpoint import CheckpointError
from harness.models.weights import (
    FULL_TYPES,
    Ready,
    WeightsError,
    WeightsRefused,
    WeightsUnavailable,
    digest,
)
from harness.stacks.header import Header, stacks
from harness.stacks.rules import Options
from harness.system.cache import cache_folder
from harness.system.json_file import CONFIG_JSON_BYTES, JsonFileError, object_of
from harness.theory.config_values import shown
from harness.theory.hf_config import quantization_configs
from harness.theory.packed import KINDS, LINEAR, USUAL_GROUP, Packing, linears
from harness.theory.shapes import Shape
from harness.theory.tensors import Tensor

PACKING = 1  # bump when runners/packed.py packs the same checkpoint to other values
UNPACKING = 1  # bump when it unpacks to other values
GROUPS = (USUAL_GROUP, 64, 32)
_LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}  # layouts that we can count and unpack
_INT32_BITS = 32


def packed_path(source: str, packing: Packing) -> Path:
    """The cache folder of a checkpoint packed here, by the identity of its source."""
    name = digest([source, "packed", PACKING, asdict(packing)])
    return cache_folder() / "weights" / name / packing.words


def unpacked_path(source: str) -> Path:
    """The cache folder of the 16-bit checkpoint unpacked from one with this fingerprint."""
    return cache_folder() / "weights" / digest([source, "unpacked", UNPACKING]) / "f16"


def grouped(requested: Packing, shape: Shape) -> Packing:
    """The requested packing with the largest group size that divides every matrix's input.

    Raises WeightsError.
    """
    widths = sorted({tensor.dims[1] for tensor in linears(shape)})
    for group_size in GROUPS:
        if all(width % group_size == 0 for width in widths):
            return replace(requested, group_size=group_size)
    odd = next(width for width in widths if width % GROUPS[-1])
    raise WeightsError(f"cannot be packed: {odd} inputs of a matrix are not a multiple of {GROUPS[-1]}")


def check_loadable(ready: Ready, requested: Packing | None, header: Header, options: Options) -> None:
    """Raises WeightsError for weights that a checkpoint stack does not load as they are: a GGUF, weights with
    other packing than requested (null: none), and quantized ones that the stack does not apply, which its
    libraries may load as another model. `options`: resolved."""
    stack, stored = header.stack, ready.stored
    if ready.format != "hf":
        raise WeightsError(f"stack {stack} needs a Hugging Face checkpoint, but {ready.path} is a GGUF")
    _check_wrapper(ready, header)
    if requested:
        check(ready, requested, stack)
    elif stored and stored.method not in header.applies:
        loading = [name for name, each in stacks().items() if stored.method in (*each.formats, *each.applies)]
        if not loading:
            raise WeightsRefused(f"{ready.path}: is {ready.quant}, which no stack here applies")
        others = f"stacks {' and '.join(loading)} load" if len(loading) > 1 else f"stack {loading[0]} loads"
        raise WeightsRefused(f"{ready.path}: is {ready.quant}; {others} that, {stack} does not")
    elif stored:
        for name in header.applies[stored.method]:
            if options.get(name) != stored.options.get(name):
                has, asked = _as_json(stored.options.get(name)), _as_json(options.get(name))
                raise WeightsRefused(
                    f"{ready.path}: is {ready.quant}, which stack {stack} loads as it is stored;"
                    f" {name} {asked} was asked for, set {name}: {has}"
                )


def _check_wrapper(ready: Ready, header: Header) -> None:
    """Raises WeightsUnavailable for a multimodal model that the stack does not load."""
    config = object_of(ready.path / "config.json", CONFIG_JSON_BYTES)
    kind = config.get("model_type")
    wraps = isinstance(config.get("text_config"), Mapping)
    if wraps and header.wrappers is not None and kind not in header.wrappers:
        raise WeightsUnavailable(
            f"{ready.path}: is {kind}, a multimodal model that stack {header.stack} does not load;"
            " name a checkpoint of its language model"
        )


def check(ready: Ready, requested: Packing, stack: str) -> None:
    """Raises WeightsError for a checkpoint with another packing than requested or stated in its config.

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
            f"{ready.path}: has {has.bits} bits, and stack {stack} was asked for {requested.bits}"
        )
    try:
        if rules := _rules(ready.path):
            raise WeightsRefused(
                f"{ready.path}: has rules for single layers (dynamic: {rules}), so its weights are not all"
                f" {has.words}"
            )
        name = _settings(ready.path, has)
        found = checkpoint.read(ready.path, needs_shape=False)
        _check_tensors(ready.path, name, has, {tensor.name: tensor for tensor in found.tensors})
    except (CheckpointError, JsonFileError) as damage:
        raise WeightsError(str(damage)) from damage


def _settings(folder: Path, packing: Packing) -> str:
    """The name of the file with a folder's packing settings. Libraries read one or the other: both must
    agree, in a known layout. Raises WeightsError, JsonFileError."""
    inline = config_json.read(folder / "config.json", needs_shape=False).packing
    separate = config_json.separate_packing(folder)
    name, layout = "config.json", packing.layout
    if separate and separate[1].method == packing.method:
        name, layout = separate[0].name, separate[1].layout
        for key in ("bits", "group_size", "act_order", "symmetric"):
            ours, theirs = getattr(packing, key), getattr(separate[1], key)
            if ours != theirs:
                words = f"config.json has {key} {_as_json(ours)}, but {name} has {_as_json(theirs)}"
                raise WeightsError(f"{folder}: {words}")
    for named in (packing.layout, layout):
        if named not in _LAYOUTS[packing.method]:
            known, method = " or ".join(_LAYOUTS[packing.method]), packing.method.upper()
            raise WeightsError(f"{folder}: is {method} in the layout {named}; only {known} is loaded here")
    return "config.json" if inline else name


def _rules(folder: Path) -> str | None:
    """The first of GPTQModel's rules by layer, which override its settings; null without one."""
    for path in (folder / "config.json", *(folder / name for name in config_json.PACKING_FILES)):
        config = object_of(path, CONFIG_JSON_BYTES) if path.exists() else {}
        for given in (config, *(each for _, each in quantization_configs(config))):
            if isinstance(rules := given.get("dynamic"), Mapping) and rules:
                return shown(next(iter(rules)))
    return None


def _as_json(value: object) -> str:
    return str(value).lower()


def _check_tensors(folder: Path, name: str, packing: Packing, tensors: Mapping[str, Tensor]) -> None:
    """Check that every packed layer has all its tensors, in the sizes given by bits and group size."""
    kinds = KINDS if packing.method == "gptq" else KINDS[:3]
    split = (tensor.rpartition(".") for tensor in tensors)
    layers = dict.fromkeys(layer for layer, _, kind in split if kind in KINDS)
    if not layers:
        raise WeightsError(f"{folder}: its {name} has {packing.words}, but no tensor is packed")
    for tensor in tensors.values():
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
        if wrong := _mismatch(packing, layer, {kind: tensors[f"{layer}.{kind}"].dims for kind in kinds}):
            raise WeightsError(f"{folder}: its {name} has {wrong}")


def _mismatch(packing: Packing, layer: str, dims: Mapping[str, tuple[int, ...]]) -> str | None:
    """How a layer's tensors contradict the settings; null if they agree."""
    for kind, size in dims.items():
        if len(size) != (1 if kind == "g_idx" else 2) or 0 in size:
            return f"{packing.words}, but {layer}.{kind} is {_by(size) or 'a number'}"
    gptq = packing.method == "gptq"
    (rows, columns), (groups, n_out) = dims["qweight"], dims["scales"]
    n_in = dims["g_idx"][0] if gptq else rows
    held, of = _INT32_BITS * (rows if gptq else columns), n_in if gptq else n_out
    if held != of * packing.bits:
        stored = f"is {_by(dims['qweight'])}" if held % of else f"holds {held // of}"
        return f"{packing.bits} bits, but {layer}.qweight {stored}"
    wide = n_in if packing.group_size == -1 else packing.group_size
    if groups != -(-n_in // wide):
        stored = f"has groups of {-(-n_in // groups)}"
        return f"group_size {packing.group_size}, but {layer}.scales {stored}"
    packed_columns = n_out * packing.bits // _INT32_BITS
    expected = {"qweight": (rows, n_out) if gptq else (n_in, columns), "qzeros": (groups, packed_columns)}
    for kind, wanted in expected.items():
        if dims[kind] != wanted:
            return f"{packing.words}: {layer}.{kind} should be {_by(wanted)}, but is {_by(dims[kind])}"
    return None


def _by(dims: tuple[int, ...]) -> str:
    return " x ".join(map(str, dims))
