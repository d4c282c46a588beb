"""The weights of a cell: where they lie, in which format, real or synthetic."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.base import bounds, data
from harness.base.files import (
    JsonFileError,
    cache_folder,
    drop,
    exclusive,
    free_disk,
    matching,
    object_of,
    reason,
)
from harness.base.text import list_named
from harness.models import checkpoint, gguf, gguf_model, layout
from harness.models.checkpoint import INDEX, SINGLE, Checkpoint, CheckpointError
from harness.models.config_json import CONFIG, PACKING_FILES, read_config_json, separate_packing
from harness.models.gguf import rotary_of
from harness.models.gguf_model import Contradiction, is_mixture_gguf
from harness.models.layout import Layout, NoLayout, sampled
from harness.models.packed_layers import mismatch, of_layer
from harness.models.safetensors_files import FLOATS
from harness.stacks.header import Header, Options, stacks
from harness.theory import tensors
from harness.theory.decoder import Decoder, dense_fields, parameters
from harness.theory.hf_config import ConfigJsonError, Quantization, quantization_configs, shown
from harness.theory.known_models import Described
from harness.theory.tensors import (
    FORMATS,
    KINDS,
    LINEAR,
    USUAL_GROUP,
    Packing,
    Sizes,
    Tensor,
    bytes_by_type,
    linears,
    read_in_part,
)

# Name, find and fingerprint the weights of a cell, in either format. The campaign creates them.


CONVERSION = 1  # bump when runners/llamacpp/weights.py makes other files of the same checkpoint
SOURCE_QUANT = "f16"  # checkpoints are converted to it, and every other type is quantized from it
FULL_TYPES = ("f32", "f16", "bf16")  # weights of these can be converted and quantized to anything
TOKENIZER = "tokenizer.json"
_TOKENIZER_SETTINGS = "tokenizer_config.json"


class WeightsError(RuntimeError):
    """The weights of a cell are unavailable; the message is one sentence."""


class WeightsUnavailable(WeightsError):
    """The model cannot be had in the stack's format."""


class NotDequantized(WeightsError):
    """The weights are there, and cannot be written as a checkpoint of 16 bits."""


class WeightsRefused(WeightsError):
    """The weights are there, and what would be measured with them would be wrong."""


@dataclass(frozen=True)
class Ready:
    """Weights on this machine: a GGUF file or a folder, with the facts of their headers and a fingerprint.

    `format`: gguf or hf. `quant`: a GGUF's type; of a checkpoint the type of its matrices (f32, f16, bf16),
    or how it is quantized, in words (gptq-int4). `tokenizer`: the file that the prompt is tokenized by, a
    GGUF with a vocabulary or a tokenizer.json. `sizes`: as loaded. `attention`: layers, kv_heads, head_dim;
    null if unknown. `revision`: the commit on the hub. `header`: of a GGUF. `packing`: of GPTQ and AWQ.
    `shards`: files that the weights are in; `file_bytes`: all of them. `decoder`: of a known model; one that
    is not dense has no `attention`. `stored`: how a checkpoint's weights are quantized.
    """

    path: Path
    format: str
    fingerprint: str
    architecture: str | None
    quant: str | None
    synthetic: bool
    vocab_size: int | None
    tokenizer: Path | None
    sizes: Sizes
    attention: dict[str, int] | None
    revision: str | None = None
    header: gguf.GgufHeader | None = None
    packing: Packing | None = None
    shards: int = 1
    file_bytes: int | None = None
    decoder: Decoder | None = None
    stored: Quantization | None = None

    @property
    def not_dense(self) -> Decoder | None:
        """The layers of a known model that is not dense."""
        return self.decoder if self.decoder and not self.decoder.is_dense else None

    @property
    def is_mixture(self) -> bool:
        return bool(self.decoder and self.decoder.experts)


def converted_path(source: str, quant: str, quantizer: str) -> Path:
    """The cache path of a GGUF made from a checkpoint, by the identity of the source and the quantizer.

    16- and 32-bit types need no quantizer, so they are the same for all of them.
    """
    return quantized_path(f"{source}-converted-{CONVERSION}", quant, "" if quant in FULL_TYPES else quantizer)


def quantized_path(source: str, quant: str, quantizer: str) -> Path:
    """The cache path of a quantized copy of a 16- or 32-bit GGUF of this fingerprint."""
    return cache_folder() / "weights" / digest([source, quantizer]) / f"{quant}.gguf"


def dequantized_path(source: str, options: Options) -> Path:
    """The cache folder of weights dequantized for one check, by the identity and options of their source."""
    return cache_folder() / "weights" / "dequantized" / digest([source, dict(options)])


def local(path: Path) -> Ready:
    """Open a GGUF file, a checkpoint's folder, or a folder with one GGUF in it. A name that is no file may be
    a glob, or in another case, of one GGUF. Raises WeightsError."""
    try:
        matches = gguf.whole_file(matching(path))
        if len(matches) > 1:
            names = list_named([each.name for each in matches], 3)
            raise WeightsError(f"{path}: matches {len(matches)} files: {names}")
        (path,) = matches
        if path.is_dir():
            found = checkpoint.read(path, needs_shape=False)
            return _gguf(found.path) if found.format == "gguf" else _checkpoint(found)
        if path.suffix in (".safetensors", ".json"):
            path.stat()
            raise WeightsError(f"{path}: is one file of a checkpoint; name its folder")
        return _gguf(path)
    except checkpoint.Contradicted as wrong:
        raise WeightsRefused(str(wrong)) from wrong
    except (CheckpointError, gguf.GgufError) as damage:
        raise WeightsError(str(damage)) from damage
    except Contradiction as wrong:
        raise WeightsRefused(f"{path}: {wrong}") from wrong
    except OSError as refusal:
        raise WeightsError(f"{path}: {reason(refusal, path)}") from refusal


def _unknown_mixture(path: Path, architecture: str) -> WeightsRefused:
    return WeightsRefused(
        f"{path}: is {architecture}, a mixture of experts whose layers are not known here: the bytes that a"
        " token reads cannot be counted, and every limit would be wrong"
    )


def _gguf(path: Path) -> Ready:
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
        raise WeightsError(f"{path}: is not a regular file")
    header = gguf.read_whole(path)
    files = gguf.files_of(path, header)
    statuses = [each.stat() for each in files]
    path, size = files[0], sum(status.st_size for status in statuses)  # llama.cpp finds the rest by the first
    made = gguf_model.decoder_of(header)
    if made is None and is_mixture_gguf(header):
        raise _unknown_mixture(path, header.architecture)
    gguf_model.check_is_model(path, header)
    return Ready(
        path=path,
        format="gguf",
        fingerprint=f"{header.digest}-{size}-{sum(s.st_mtime_ns for s in statuses)}-{sampled(files)}",
        architecture=header.architecture,
        quant=header.quant,
        synthetic=header.synthetic,
        vocab_size=header.vocab_size,
        tokenizer=path if header.has_vocabulary else None,
        sizes=header.weights(),
        attention=None if made and not made.is_dense else header.attention(),
        header=header,
        shards=len(files),
        file_bytes=size,
        decoder=made,
    )


def _checkpoint(found: Checkpoint) -> Ready:
    if found.config is None:
        raise WeightsError(f"{found.path}: has no config.json")
    if not found.architecture:
        raise WeightsError(
            f"{found.config}: has no model_type, by which stacks choose the model's code: fetch the file"
            " again"
        )
    if not found.files:
        raise WeightsError(f"{found.path.parent}: has a config.json and no weights")
    if not any((found.path / name).is_file() for name in (SINGLE, INDEX)):
        raise WeightsError(f"{found.path}: has no {SINGLE} and no {INDEX}")
    made, tokenizer = found.decoder, found.path / TOKENIZER
    embedding = next((t for t in found.tensors if t.part == "embedding" and len(t.dims) == 2), None)
    return Ready(
        path=found.path,
        format="hf",
        fingerprint=_fingerprint(found),
        architecture=found.architecture,
        quant=found.packing.words if found.packing else found.quantization or _widest_type(found),
        synthetic=found.synthetic,
        vocab_size=made.vocab_size if made else embedding.dims[0] if embedding else None,
        tokenizer=tokenizer if tokenizer.exists() else None,
        sizes=_sizes(found),
        attention=attention(made) if made and made.is_dense else None,
        packing=found.packing,
        shards=len(found.files),
        file_bytes=sum(path.stat().st_size for path in found.files),
        decoder=made,
        stored=found.stored,
    )


def _sizes(found: Checkpoint) -> Sizes:
    """Like GgufHeader.weights, for the tensors that transformers loads; packed tensors by kind."""
    kept = found.loaded
    packed = any(tensor.type not in FLOATS for tensor in kept)
    if packed and found.decoder is None:
        raise WeightsError(f"{found.path}: is packed, and the sizes of its architecture are not known")
    by_type = bytes_by_type(
        replace(tensor, type=kind) if (kind := tensor.name.rpartition(".")[2]) in KINDS else tensor
        for tensor in kept
    )
    return {
        "model_bytes": sum(by_type.values()),
        "parameters": parameters(found.decoder)
        if packed and found.decoder
        else sum(tensor.elements for tensor in kept),
        "bytes_by_type": by_type,
        "input_embedding_bytes": sum(tensor.bytes for tensor in kept if tensor.part == "embedding"),
        "tied": found.tied,
        **read_in_part(kept),  # type: ignore[typeddict-item]
    }


def _widest_type(found: Checkpoint) -> str | None:
    """The type that most of the matrices' bytes have."""
    by_type = bytes_by_type(tensor for tensor in found.loaded if len(tensor.dims) > 1)
    return max(by_type, key=by_type.__getitem__, default=None)


def _fingerprint(found: Checkpoint) -> str:
    """As for a GGUF, headers, size, times and content: a digest of config.json, of the tokenizer's settings,
    and of every file's header and size; the bytes of all files; a digest of their times; and one of a sample
    of the weights, the tokenizer, separate settings and Python code. A shipped checkpoint has no times, so
    that every installation has the same fingerprint."""
    assert found.config is not None  # checked by the caller
    known = hashlib.sha256(found.config.read_bytes())
    if (asks_for_bos := found.path / _TOKENIZER_SETTINGS).is_file():
        known.update(sampled([asks_for_bos]).encode())
    for path in found.files:
        with path.open("rb") as file:
            start = file.read(8)
            known.update(start + file.read(int.from_bytes(start, "little")))
    settings = (found.path / name for name in (TOKENIZER, *PACKING_FILES))
    others = [path for path in (*settings, *sorted(found.path.glob("*.py"))) if path.exists()]
    every = [(path.name, path.stat()) for path in (*found.files, *others)]
    for name, status in every:
        known.update(f"{name} {status.st_size} ".encode())
    timeless = data.weights_name(found.path) is not None
    times = digest([] if timeless else [status.st_mtime_ns for _, status in every])
    parts = known.hexdigest()[:16], sum(status.st_size for _, status in every), times
    return "-".join(map(str, (*parts, digest([sampled(found.files), sampled(others)]))))


def quantized_bytes(header: gguf.GgufHeader, quant: str) -> int:
    """Bytes of the tensors of a model's file once llama.cpp has quantized it."""
    decoder = gguf_model.decoder_of(header)
    if decoder and not decoder.is_dense:
        return tensors.model_bytes(decoder, quant)
    heads = header.integer(f"{header.architecture}.attention.head_count") or 1
    known = header.attention() or {"layers": 0, "kv_heads": heads}
    mix = tensors.Mix(header.architecture, known["layers"], heads // known["kv_heads"])
    made = tensors.retyped(header.listed(), quant, mix)
    return sum(tensor.bytes for tensor in made)


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


def check_convertible(ready: Ready, converts: Mapping[str, Sequence[str]]) -> None:
    """Raises WeightsError for a checkpoint that is not converted to GGUF: quantized already, of another
    architecture, or computed differently there. `converts`: of the stack's header."""
    if ready.quant not in FULL_TYPES:
        stored = ready.quant or "of an unknown type"
        raise WeightsRefused(f"{ready.path}: is {stored}; only 16- and 32-bit weights are converted to GGUF")
    kind = ready.architecture
    if kind not in (layout.KINDS if ready.not_dense else converts):
        raise WeightsUnavailable(f"{ready.path}: is {kind}, which is not converted to GGUF here")
    config = object_of(ready.path / CONFIG, bounds.CONFIG_JSON_BYTES)
    try:
        if ready.not_dense:
            layout.check_gguf(config)
        elif (rope := rotary_of(config).kind) not in ("default", *converts[str(kind)]):
            raise layout.NoLayout(f"rope scaling {shown(rope)} of {kind} is not converted")
    except (ConfigJsonError, layout.NoLayout) as why:
        raise WeightsUnavailable(f"{ready.path}: {why}") from why


def attention(made: Decoder) -> dict[str, int]:
    """The dimensions of a dense model's KV cache."""
    return {"layers": made.count, "kv_heads": made.kv_heads, "head_dim": made.head_dim}


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


def not_named(model: str, form: str) -> WeightsError:
    """The error for a stack whose format is missing from a model's weights by format."""
    return WeightsError(f"model {model} has no {form} weights: name them in the config, as weights.{form}")


def cached(path: Path) -> Ready | None:
    """A file or folder of our own cache if it exists and is complete; a damaged one is deleted, to be
    made again."""
    if not path.exists():
        return None
    try:
        return local(path)
    except WeightsError as damage:
        causes = (damage.__cause__, damage.__cause__ and damage.__cause__.__cause__)
        if any(isinstance(c, OSError) and not isinstance(c, FileNotFoundError) for c in causes):
            raise  # unreadable does not mean damaged
        drop(path)
        return None


def digest(data: object) -> str:
    """16 digits of a hash of plain data, for names in the cache."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


# GPTQ and AWQ checkpoints: names in our cache, and checks of given ones.


PACKING = 1  # bump when runners/weights/packed.py packs the same checkpoint to other values
UNPACKING = 1  # bump when it unpacks to other values
GROUPS = (USUAL_GROUP, 64, 32)
_LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}  # layouts that we can count and unpack


def packed_path(source: str, packing: Packing) -> Path:
    """The cache folder of a checkpoint packed here, by the identity of its source."""
    name = digest([source, "packed", PACKING, asdict(packing)])
    return cache_folder() / "weights" / name / packing.words


def unpacked_path(source: str) -> Path:
    """The cache folder of the 16-bit checkpoint unpacked from one with this fingerprint."""
    return cache_folder() / "weights" / digest([source, "unpacked", UNPACKING]) / "f16"


def grouped_layers(requested: Packing, made: Decoder) -> Packing:
    """The requested packing with the largest group size that divides every matrix's input.

    Raises WeightsError.
    """
    widths = sorted({tensor.dims[1] for tensor in linears(made)})
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


# Synthetic weights: their identity and place in the cache, their layout and bytes, and what has none.


# Bump when runners/weights/synthetic.py makes other values for the same shape and seed.
# 2: a Hugging Face checkpoint, from which GGUF files are converted; 1 was a GGUF.
SYNTHESIS = 2
CHECKPOINT_ELEMENT_BYTES = 2  # of 16-bit checkpoints that are made here


def synthetic_name(model: Described, seed: int) -> str:
    """The identity of a synthetic model: shape or config.json, seed and generator version."""
    known = (
        {"config": layout_of(model.config).config} if model.config else {"shape": dense_fields(model.decoder)}
    )
    return "synthetic-" + digest({**known, "seed": seed, "synthesis": SYNTHESIS})


def checkpoint_path(model: Described, seed: int) -> Path:
    """The cache folder of a synthetic checkpoint."""
    return named_folder(synthetic_name(model, seed))


def named_folder(name: str) -> Path:
    """The same, by its identity."""
    return cache_folder() / "weights" / name.rpartition("-")[2] / "hf"


def layout_of(config: layout.Config) -> Layout:
    """Raises WeightsUnavailable."""
    try:
        return layout.of(config)
    except (NoLayout, ConfigJsonError) as why:
        raise WeightsUnavailable(str(why)) from why


def gguf_layout_of(config: layout.Config) -> Layout:
    """The same for a GGUF. Raises WeightsUnavailable, also if llama.cpp would compute another model."""
    try:
        layout.check_gguf(config)
    except ConfigJsonError as why:
        raise WeightsUnavailable(str(why)) from why
    except NoLayout as why:
        raise WeightsUnavailable(f"its GGUF would be another model: {why}") from why
    return layout_of(config)


def check_synthetic(model: Described, form: str, header: Header) -> None:
    """Raises WeightsUnavailable for a model that cannot be synthesized in a stack's format, or that its
    engine does not run."""
    made = model.decoder
    dense = {"model_type": "mistral" if made.arch == "llama" and made.window else made.arch}
    _check_architecture("a model of this shape", header, model.config or dense)
    if model.config is None:
        return
    if form in FORMATS:
        raise WeightsUnavailable(
            f"only dense models are packed as {form} here; this one is {model.decoder.arch}"
        )
    (gguf_layout_of if form == "gguf" else layout_of)(model.config)


def synthetic_bytes(made: Decoder, quant: str) -> int:
    """Bytes of the tensors of a synthetic file; a dense one stands in for a published one."""
    return tensors.model_bytes(made, quant, as_published=made.is_dense)


# Write a file or a folder of weights into the cache: one process at a time, and whole or not at all.


SPARE_DISK_BYTES = 1 << 30


@contextmanager
def written(
    target: Path, expected_bytes: float, what: str, there: Callable[[Path], object] = cached
) -> Iterator[Path | None]:
    """Yield a temporary file, which becomes the target if the block ends without an error; null if another
    process has made the target. `what`: names it in messages; `there`: whether it is made.

    Raises WeightsError (too little free disk), CacheError.
    """
    with exclusive(target.with_suffix(".lock")):
        if there(target):
            yield None
            return
        for leftover in target.parent.glob(f"{target.name}.partial-*"):
            drop(leftover)
        free = free_disk(target.parent)
        needed = expected_bytes + SPARE_DISK_BYTES
        if free < needed:
            raise WeightsError(
                f"{what} needs {needed / 1e9:.1f} GB of disk, but only "
                f"{free / 1e9:.1f} GB is free in {target.parent}"
            )
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        try:
            yield partial
            partial.replace(target)
        finally:
            drop(partial)
