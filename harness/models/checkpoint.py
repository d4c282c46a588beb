"""Read a folder or file of weights: its format and its content."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from harness.base import bounds, files
from harness.base.files import JsonFileError, object_of, reason, strict_json
from harness.base.text import list_named
from harness.models import gguf, gguf_model, layout, not_a_model
from harness.models.gguf import GgufError
from harness.models.gguf_model import Contradiction, is_mixture_gguf
from harness.theory import decoder
from harness.theory.architectures import decoder_of
from harness.theory.decoder import Decoder
from harness.theory.hf_config import (
    DENSE,
    ConfigJsonError,
    NoShape,
    Quantization,
    Settings,
    modelopt,
    packing_in,
    packing_of,
    quantization_of,
    shown,
)
from harness.theory.tensors import Packing, Tensor, is_of_experts, linears

# Read the header of a safetensors file: each tensor's name, type, dimensions and bytes; no weights.
#
# Format: 8 bytes with the header's length, the header as JSON, then the tensors' data without a gap. A file
# that the safetensors library rejects (safetensors/src/tensor.rs) is rejected here too.


_MOST_DIMENSIONS = 8
_METADATA = "__metadata__"
_SAMPLES, _SAMPLE_BYTES = 32, 4096

# Bits of an element, by the library's own names in lower case.
BITS = {
    "f4": 4,
    "f6_e2m3": 6,
    "f6_e3m2": 6,
    "bool": 8,
    "u8": 8,
    "i8": 8,
    "f8_e5m2": 8,
    "f8_e4m3": 8,
    "f8_e8m0": 8,
    "f8_e4m3fnuz": 8,
    "f8_e5m2fnuz": 8,
    "i16": 16,
    "u16": 16,
    "f16": 16,
    "bf16": 16,
    "i32": 32,
    "u32": 32,
    "f32": 32,
    "c64": 64,
    "f64": 64,
    "i64": 64,
    "u64": 64,
}


class SafetensorsError(ValueError):
    """The file is not a complete safetensors file; the message is one sentence."""


def read_safetensors_header(path: Path) -> dict[str, Tensor]:
    """All tensors by name, in the order of their data. Raises SafetensorsError, OSError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise SafetensorsError("is not a regular file")
        with path.open("rb") as file:
            return _tensors(file)
    except SafetensorsError as damage:
        raise SafetensorsError(f"{path}: {damage}") from damage


def sampled(paths: Iterable[Path], name: str) -> list[bytes]:
    """Samples of one tensor's values, from its beginning to its end. Raises SafetensorsError, OSError."""
    for path in paths:
        with path.open("rb") as file:
            spans = {tensor.name: span for span, tensor in _spans(file)}
            if name not in spans:
                continue
            first, last = spans[name]
            start = 8 + claimed_bytes(path)
            found = []
            for part in range(_SAMPLES):
                file.seek(start + first + (last - first) * part // _SAMPLES)
                found.append(file.read(min(_SAMPLE_BYTES, (last - first) // _SAMPLES)))
            return found
    return []


def claimed_bytes(path: Path) -> int:
    """The header length that a file claims, unchecked. Raises OSError."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(8), "little")


def _tensors(file: BinaryIO) -> dict[str, Tensor]:
    return {tensor.name: tensor for _, tensor in _spans(file)}


def _spans(file: BinaryIO) -> list[tuple[tuple[int, int], Tensor]]:
    """Each tensor with its first and last offset, in the order of their data."""
    size = os.fstat(file.fileno()).st_size
    if cause := not_a_model.cause(file.read(not_a_model.BYTES_NEEDED), size):
        raise SafetensorsError(cause)
    file.seek(0)
    if size < 8:
        raise SafetensorsError("is too short for a safetensors file")
    length = int.from_bytes(file.read(8), "little")
    if length > bounds.SAFETENSORS_HEADER_BYTES:
        raise SafetensorsError(
            f"not a safetensors file, or one with a header over {bounds.SAFETENSORS_HEADER_BYTES >> 20} MiB"
        )
    if 8 + length > size:
        raise SafetensorsError("cut short: the header claims more bytes than the file has")
    text = file.read(length)
    if len(text) < length:
        raise SafetensorsError("cut short while it was read")
    try:
        header = strict_json(text)
    except ValueError as mistake:
        raise SafetensorsError(f"the header {mistake}") from None
    if not isinstance(header, dict):
        raise SafetensorsError("the header is not a JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise SafetensorsError(f"{_METADATA} holds more than strings")
    found = sorted((_tensor(name, entry) for name, entry in header.items()), key=lambda pair: pair[0])
    data_bytes, end = size - 8 - length, 0
    for (first, last), tensor in found:
        if first != end:
            raise SafetensorsError(f"tensor {tensor.name[:60]!r} overlaps another tensor, or follows a gap")
        end = last
    if end > data_bytes:
        raise SafetensorsError(f"cut short: the tensors take {end} bytes, and the file has {data_bytes}")
    if end < data_bytes:
        raise SafetensorsError(f"has {data_bytes - end} bytes after the last tensor")
    return found


def _tensor(name: str, entry: Any) -> tuple[tuple[int, int], Tensor]:
    """The first and the last offset of a tensor, and the tensor."""
    label = f"tensor {name[:60]!r}"
    if not _writable(name):
        raise SafetensorsError(f"{label} has a name that is not printable text")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise SafetensorsError(f"{label} lacks its dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = BITS.get(dtype.lower()) if isinstance(dtype, str) and dtype.isupper() else None
    if bits is None:
        raise SafetensorsError(f"{label} has unknown dtype {str(dtype)[:60]!r}")
    if not _counts(shape) or len(shape) > _MOST_DIMENSIONS:
        raise SafetensorsError(f"{label} has an invalid shape: {str(shape)[:60]!r}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise SafetensorsError(f"{label} has invalid data_offsets: {str(offsets)[:60]!r}")
    first, last = offsets
    if math.prod(shape) * bits != 8 * (last - first):
        raise SafetensorsError(
            f"{label} has {last - first} bytes, which do not match {dtype} {str(shape)[:60]}"
        )
    return (first, last), Tensor(name, dtype.lower(), tuple(shape), last - first)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _writable(name: str) -> bool:
    """Whether it can be encoded: JSON can contain lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


# Whether the tensors of a checkpoint are those that its config.json describes. Reads headers, and samples of
# a tied pair.


FLOATS = ("f64", "f32", "f16", "bf16")
LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.")
_WHOLE = (*FLOATS, "f8_e4m3", "f8_e5m2")  # an element is a weight
_DRAFT = re.compile(r"(?:^|\.)(mtp|mtp_layers|nextn)\.")  # Qwen's and others' heads that draft a next token
_EXPERT = re.compile(r"\.experts\.([0-9]{1,6})\.")


def check_copy(files: Iterable[Path], tensors: Iterable[Tensor]) -> None:
    """Raise Contradiction if a tied lm_head is stored besides with other values: transformers would use the
    embedding in its place, and other programs what is stored."""
    two = {tensor.part: tensor for tensor in tensors if tensor.name.endswith(".weight")}
    embedding, head = two.get("embedding"), two.get("lm_head")
    if embedding is None or head is None or head.type not in FLOATS:
        return
    if (embedding.dims, embedding.type) == (head.dims, head.type):
        samples = [sampled(files, tensor.name) for tensor in (embedding, head)]
        if samples[0] == samples[1]:
            return
    raise Contradiction(
        f"its config.json ties the lm_head to the embedding, and its {head.name} holds other values:"
        " set tie_word_embeddings to false if that lm_head is the model's, else remove it"
    )


def check_sizes(made: Decoder, tensors: Iterable[Tensor]) -> None:
    """Raise Contradiction unless config.json matches the layers, the experts, and the matrices that are
    stored one element to a weight."""
    numbered = {int(found[1]) for tensor in tensors if (found := LAYER.search(tensor.name))}
    layers = made.count
    # Layers that predict a second token follow the last, and are not loaded.
    if len(numbered) < layers or (made.is_dense and len(numbered) > layers):
        raise Contradiction(f"has {len(numbered)} layers, and its config.json says {layers}")
    experts = {int(found[1]) for tensor in tensors if (found := _EXPERT.search(tensor.name))}
    if experts and len(experts) != made.experts:
        raise Contradiction(f"has {len(experts)} experts, and its config.json says {made.experts}")
    vocabulary = (made.vocab_size, made.hidden_size)
    sizes = {"embedding": vocabulary, "lm_head": vocabulary} | (_linear(made) if made.is_dense else {})
    for tensor in tensors:
        size = sizes.get(tensor.part) if tensor.name.endswith(".weight") else None
        if size and tensor.type in _WHOLE and tensor.dims != size:
            raise Contradiction(
                f"its {tensor.name[:60]} is {_by(tensor.dims)}, and its config.json says {_by(size)}"
            )


def check_layout(config: Path, tensors: Iterable[Tensor]) -> None:
    """Like _check_sizes, for matrices of a model that is not dense, if the layout is known."""
    try:
        rows = layout.of(files.object_of(config, bounds.CONFIG_JSON_BYTES)).rows
    except (ConfigJsonError, layout.NoLayout):
        return
    sizes = {row.there: row.dims for row in rows if row.how in ("same", "rotated") and len(row.dims) > 1}
    for tensor in tensors:
        place = LAYER.search(tensor.name)
        name = f"model.{tensor.name[place.start() :].removeprefix('.')}" if place else ""
        expert = _EXPERT.sub(".experts.{}.", name)
        size = sizes[expert][1:] if expert != name and expert in sizes else sizes.get(name)
        if size and tensor.type in _WHOLE and tensor.dims != size:
            raise Contradiction(
                f"its {tensor.name[:60]} is {_by(tensor.dims)}, and its config.json says {_by(size)}"
            )


def _linear(made: Decoder) -> dict[str, tuple[int, int]]:
    """The size of each matrix of a layer, by part."""
    return {tensor.part: (tensor.dims[0], tensor.dims[1]) for tensor in linears(made)}


def _by(dims: Iterable[int]) -> str:
    return " x ".join(map(str, dims))


def drafts(name: str, made: Decoder | None) -> bool:
    """Whether a tensor only drafts a second token, which plain decode does not."""
    layer = LAYER.search(name)
    return bool(_DRAFT.search(name) or (made and layer and int(layer[1]) >= made.count))


# Read a checkpoint's config.json, its GPTQ or AWQ settings, and other JSON objects of its folder.


# Where auto-gptq and early autoawq wrote their settings, and the method if the file does not name one.
PACKING_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}

MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True)
class ConfigJson:
    """Facts of a config.json; the defaults stand for a missing file. `kind`: model_type. `states_context`:
    false where transformers' default for its class is taken."""

    kind: str | None = None
    decoder: Decoder | None = None
    tied: bool = False
    synthetic: bool = False
    quantization: Quantization | None = None
    packing: Packing | None = None
    states_context: bool = True


def read_config_json(path: Path, needs_shape: bool) -> ConfigJson:
    """Read a config.json. Without `needs_shape`, an unknown architecture has no layers. Raises JsonFileError,
    OSError."""
    config = Settings(object_of(path, bounds.CONFIG_JSON_BYTES))
    made: Decoder | None = None
    kind = config.get("model_type")
    if not_a_model.is_encoder(config):
        raise JsonFileError(f"{path}: {not_a_model.encoder(str(kind))}")
    try:
        quantization = quantization_of(config)
        packing = packing_of(config)
    except ConfigJsonError as mistake:
        raise JsonFileError(f"{path}: {mistake}") from mistake
    try:
        made = decoder_of(config)
    except ConfigJsonError as mistake:
        # transformers knows more keys, and more defaults, of models that are not dense.
        if needs_shape or not (isinstance(mistake, NoShape) or kind not in DENSE):
            raise JsonFileError(f"{path}: {mistake}") from mistake
    return ConfigJson(
        kind=kind if isinstance(kind, str) else None,
        decoder=made,
        tied=made.tied if made else config.get("tie_word_embeddings") is True,
        synthetic=config.get("harness_synthetic") is True,
        quantization=quantization,
        packing=packing,
        states_context=any(
            isinstance(part, Mapping) and part.get(_CONTEXT) is not None
            for part in (config, config.get("text_config"))
        ),
    )


def separate_modelopt(folder: Path) -> Quantization | None:
    """Read ModelOpt's own file, for a config.json that names no quantization; null without one.

    Raises JsonFileError, OSError.
    """
    if not (path := folder / MODELOPT_FILE).exists():
        return None
    try:
        return modelopt(object_of(path, bounds.CONFIG_JSON_BYTES))
    except ConfigJsonError as mistake:
        raise JsonFileError(f"{path}: {mistake}") from mistake


def separate_packing(folder: Path) -> tuple[Path, Packing] | None:
    """The first separate file of GPTQ or AWQ settings, and its settings; null if there is none.

    Raises JsonFileError, OSError.
    """
    for name, method in PACKING_FILES.items():
        if (path := folder / name).exists():
            try:
                found = packing_in(object_of(path, bounds.CONFIG_JSON_BYTES), method=method)
            except ConfigJsonError as mistake:
                raise JsonFileError(f"{path}: {mistake}") from mistake
            if found:
                return path, found
    return None


# Read the headers of a model's files: shape and tensors, as a decode step streams them; no weights.
#
# Accepts a GGUF file (or any part of one), a safetensors file, a config.json, or a folder of them. Trusts
# none of them: every mistake is one sentence.


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # the names that transformers loads
CONFIG, ADAPTER = "config.json", "adapter_config.json"
_CONTEXT = "max_position_embeddings"
_SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.safetensors", re.DOTALL)
_SHARD_NAME = re.compile(r"[^/\\]+\.safetensors")
_NOT_THE_MODEL = ("adapter", "consolidated")  # a LoRA's weights; Mistral's second copy under other names
_UNREADABLE = re.compile(r"pytorch_model.*\.bin|consolidated.*\.pth", re.DOTALL)
# Vision and audio towers of a multimodal model, by a part of their tensors' names.
_OTHER_SENSES = re.compile(r"(^|\.)(vision|visual|audio|image|multi_modal|mm_)")
# Tables and masks that older checkpoints store and transformers recomputes, by the ends of their names; no
# linear layer has such a name. runners/llamacpp/weights.py drops those that it may meet.
_BUFFER = re.compile(r"\.(inv_freq|masked_bias|attn\.causal_mask|((self_)?attn|attention)\.bias)$")


class CheckpointError(ValueError):
    """This path holds no valid model; the message is one sentence."""


class Contradicted(CheckpointError):
    """A model whose config or keys contradict its tensors: what loads it may compute another model."""


@dataclass(frozen=True)
class Checkpoint:
    """A model as stored. `format`: gguf, safetensors or config (which has no tensors). `architecture`: of
    the GGUF header, or the model_type of a config.json; null without either.

    `decoder`: its layers; null for an architecture that is not known. `tensors`: of the text decoder,
    without a vision tower and layers that draft tokens. `tied`: the lm_head is the input embedding; a second
    stored copy is not streamed. `synthetic`: generated by the harness. `quantization`: a GGUF's type, or how
    a checkpoint is `stored`, in words; null for none. `config`, `files`: a checkpoint's config.json and
    safetensors files. `packing`: the GPTQ or AWQ settings. `states_context`: whether its files say on how
    many tokens it was trained.
    """

    path: Path
    format: str
    architecture: str | None
    decoder: Decoder | None
    tensors: tuple[Tensor, ...]
    tied: bool
    synthetic: bool
    quantization: str | None
    config: Path | None = None
    files: tuple[Path, ...] = ()
    packing: Packing | None = None
    stored: Quantization | None = None
    states_context: bool = True

    @property
    def loaded(self) -> tuple[Tensor, ...]:
        """The tensors that transformers loads: one matrix of a tied pair, and no buffers."""
        return tuple(
            tensor
            for tensor in self.tensors
            if not (self.tied and tensor.part == "lm_head") and not _BUFFER.search(tensor.name)
        )

    @property
    def parameters(self) -> int | None:
        """Elements of all tensors, buffers included; from the layers if elements are not weights.

        That is the case without tensors, and in safetensors with types other than floats of 16 bits or more:
        there weights are packed and scales are separate tensors. ggml's types contain their scales.
        """
        packed = self.format == "safetensors" and any(t.type not in FLOATS for t in self.tensors)
        if packed or not self.tensors:
            return decoder.parameters(self.decoder) if self.decoder is not None else None
        return sum(t.elements for t in self.tensors if not (self.tied and t.part == "lm_head"))


def read(path: Path, needs_shape: bool = True) -> Checkpoint:
    """The model at a path: a file by its content, a folder by the model that it holds.

    Of a folder: model.safetensors, else the shards of its index, else (which no stack loads) its only
    .safetensors file or complete set of numbered ones (without adapter* and consolidated*), else its only
    GGUF, else its config.json. Raises CheckpointError for any mistake; a model whose layers are not known
    is a mistake only with `needs_shape`.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return _folder(path, needs_shape)
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
            raise CheckpointError(f"{path}: is not a regular file")
        if piece := not_a_model.piece(path):
            raise CheckpointError(f"{path}: {piece}")
        return _file(path, needs_shape)
    except CheckpointError:
        raise
    except Contradiction as wrong:
        raise Contradicted(f"{path}: {wrong}") from wrong
    except (GgufError, SafetensorsError, JsonFileError) as damage:
        raise CheckpointError(str(damage)) from damage
    except OSError as refusal:
        name = Path(refusal.filename or path)
        raise CheckpointError(f"{name}: {reason(refusal, name)}") from refusal
    except ValueError as odd:  # the path contains a null character
        raise CheckpointError(f"{str(path)!r}: {odd}") from odd


def _file(path: Path, needs_shape: bool) -> Checkpoint:
    with path.open("rb") as file:
        start = file.read(not_a_model.BYTES_NEEDED)
    if cause := not_a_model.cause(start, path.stat().st_size):
        raise CheckpointError(f"{path}: {cause}")
    suffix = path.suffix.lower()
    if suffix == ".gguf" or start[:4] == b"GGUF":
        return _gguf(path)
    if suffix == ".json":
        known = read_config_json(path, needs_shape)
        quantization, packing = known.quantization, known.packing
        if quantization is None and path.name == CONFIG:
            quantization, packing = _separate(path.parent)
        kind, made, words = known.kind, known.decoder, _words(quantization)
        return Checkpoint(
            *(path, "config", kind, made, (), known.tied, known.synthetic, words, path),
            packing=packing,
            stored=quantization,
            states_context=known.states_context,
        )
    header_length = int.from_bytes(start[:8], "little")
    if suffix == ".safetensors" or (start[8:9] == b"{" and header_length < 1 << 32):
        if (shard := _SHARD.fullmatch(path.name)) and int(shard[3]) > 1:
            raise CheckpointError(f"{path}: is one of {int(shard[3])} shards; name their folder")
        config = path.parent / CONFIG
        return _safetensors(path, [path.name], {}, config if config.exists() else None, needs_shape)
    raise CheckpointError(f"{path}: only GGUF and safetensors headers and config.json can be read")


def _folder(folder: Path, needs_shape: bool) -> Checkpoint:
    if (snapshot := _snapshot(folder)) is not None:
        return _folder(snapshot, needs_shape)
    names = sorted(path.name for path in folder.iterdir() if not path.is_dir())
    config = folder / CONFIG if CONFIG in names else None
    if SINGLE in names:
        return _safetensors(folder, [SINGLE], {}, config, needs_shape)
    if INDEX in names:
        index = _weight_map(folder / INDEX)
        return _safetensors(folder, sorted(set(index.values())), index, config, needs_shape)
    if shards := _unindexed(folder, names):
        return _safetensors(folder, shards, {}, config, needs_shape)
    ggufs = gguf.whole_file([folder / name for name in names if name.endswith(".gguf")])
    if len(ggufs) > 1:
        ggufs = [path for path in ggufs if not gguf_model.is_other_kind(path)]
    if len(ggufs) == 1:
        return read(ggufs[0])
    if ggufs:
        held = list_named([path.name for path in ggufs], 4)
        raise CheckpointError(f"{folder}: has {len(ggufs)} GGUF models ({held}): name one of them")
    if cut := next((clause for name in names if (clause := not_a_model.piece(folder / name))), None):
        raise CheckpointError(f"{folder}: holds pieces of a model: each {cut}")
    if any(_UNREADABLE.fullmatch(name) for name in names):
        raise CheckpointError(
            f"{folder}: its weights are pickled, and only safetensors and GGUF can be read: fetch the model's"
            " safetensors, or load it in transformers and call save_pretrained"
        )
    if config is None and ADAPTER in names:
        raise CheckpointError(f"{folder}: holds an adapter (LoRA), not a model; merge it into its model")
    if config is None:
        raise CheckpointError(f"{folder}: holds no model: no .safetensors, no .gguf, no config.json")
    return _file(config, needs_shape)


def _snapshot(folder: Path) -> Path | None:
    """The snapshot of a model's folder in the hub's cache: the one of refs/main, else the only one. None for
    another folder. Raises CheckpointError, OSError."""
    snapshots = folder / "snapshots"
    if not folder.absolute().name.startswith(files.HUB_MODEL) or not snapshots.is_dir():
        return None
    commits = {path.name: path for path in sorted(snapshots.iterdir()) if path.is_dir()}
    main = folder / "refs" / "main"
    if main.is_file() and (found := commits.get(main.read_text("utf-8", "replace").strip())):
        return found
    if not commits:
        raise CheckpointError(f"{snapshots}: is empty: the model was not downloaded, or was removed")
    if len(commits) > 1:
        raise CheckpointError(
            f"{folder}: has {len(commits)} snapshots, and its refs/main names none of them: name one:"
            f" {list_named(list(map(str, commits.values())), 4)}"
        )
    return next(iter(commits.values()))


def _gguf(path: Path) -> Checkpoint:
    header = gguf.read_whole(path)
    gguf_model.check_is_model(path, header)
    tensors = tuple(header.decoded())
    tied = "output.weight" not in header.tensors
    made = gguf_model.decoder_of(header)
    architecture = header.architecture
    if made is None and is_mixture_gguf(header):
        near = gguf_model.nearest(architecture)
        unknown = f"whose layers of architecture {shown(architecture)} are not known"
        unknown += f"; the nearest that is: {near}" if near else ""
        raise CheckpointError(f"{path}: is a mixture of experts {unknown}")
    return Checkpoint(path, "gguf", architecture, made, tensors, tied, header.synthetic, header.quant)


def _safetensors(
    path: Path, shards: list[str], index: Mapping[str, str], config: Path | None, needs_shape: bool
) -> Checkpoint:
    """All tensors of the shards, as transformers loads them, including those missing from the index.

    transformers would initialize a tensor that the index names and no shard has; here it is a mistake,
    unless it is a buffer or the lm_head of a tied model.
    """
    known = read_config_json(config, needs_shape) if config else ConfigJson()  # first: the shortest read
    made = known.decoder
    folder = path if path.is_dir() else path.parent
    tensors: dict[str, Tensor] = {}
    left = bounds.SAFETENSORS_HEADERS_BYTES
    for name in shards:
        try:
            stored = read_safetensors_header(folder / name)
            left -= claimed_bytes(folder / name)
        except FileNotFoundError as missing:
            which = f", one of {len(shards)} shards" if len(shards) > 1 else ""
            link = files.nearest(folder / name) if (folder / name).is_symlink() else ""
            raise CheckpointError(f"{folder / name}: is missing{which}{link}") from missing
        if left < 0:
            raise CheckpointError(f"{path}: its shards' headers are longer than any model's")
        if twice := tensors.keys() & stored:
            raise CheckpointError(f"{folder / name}: has tensor {min(twice)[:60]!r} of another shard")
        tensors |= stored
        if len(tensors) > bounds.SAFETENSORS_TENSORS:
            raise CheckpointError(
                f"{path}: has over {bounds.SAFETENSORS_TENSORS} tensors, more than any dense model"
            )
    if made is None and any(map(is_of_experts, tensors)):
        raise CheckpointError(
            f"{path}: is a mixture of experts, and nothing says how many of them a token uses"
        )
    of_text = [tensor for name, tensor in tensors.items() if not _OTHER_SENSES.search(name)]
    ours = tuple(tensor for tensor in of_text if not drafts(tensor.name, made))
    parts = {tensor.part for tensor in ours}
    tied = made.tied if made else known.tied or "lm_head" not in parts
    expected = {Tensor(name, "", (), 0) for name in index if name not in tensors}
    for tensor in sorted(expected, key=lambda tensor: tensor.name):
        if tensor.part not in ("other", "lm_head" if tied else "other"):
            shard = index[tensor.name]
            raise CheckpointError(f"{folder / shard}: lacks {tensor.name[:60]!r}, though its index names it")
    if made and "embedding" not in parts:
        raise CheckpointError(f"{path}: has no input embedding, so it is not a complete language model")
    if made and not tied and "lm_head" not in parts:
        raise CheckpointError(f"{path}: has no lm_head, and its config.json does not tie it to the embedding")
    if made and (needs_shape or made.is_dense):
        check_sizes(made, of_text)
    if made and config and not made.is_dense:
        check_layout(config, of_text)
    if tied:
        check_copy([folder / name for name in shards], ours)
    packing, quantization = known.packing, known.quantization or separate_modelopt(folder)
    if quantization is None and any(name.endswith(".qweight") for name in tensors):
        quantization, packing = _separate(folder)
    if quantization is None and (odd := next(filter(_is_quantized, ours), None)):
        quantization = Quantization("", f"{odd.type}, and no quantization_config says how")
    return Checkpoint(
        path=path,
        format="safetensors",
        architecture=known.kind,
        decoder=made,
        tensors=ours,
        tied=tied,
        synthetic=known.synthetic,
        quantization=_words(quantization),
        config=config,
        files=tuple(folder / name for name in shards),
        packing=packing,
        stored=quantization,
        states_context=known.states_context,
    )


def _separate(folder: Path) -> tuple[Quantization | None, Packing | None]:
    """How weights are quantized by the files beside a config.json. Raises JsonFileError, OSError."""
    if found := separate_modelopt(folder):
        return found, None
    packing = (separate_packing(folder) or (folder, None))[1]
    return (Quantization(packing.method, packing.words) if packing else None), packing


def _words(quantization: Quantization | None) -> str | None:
    return quantization.words if quantization else None


def _is_quantized(tensor: Tensor) -> bool:
    is_matrix = len(tensor.dims) > 1 and not _BUFFER.search(tensor.name)
    return is_matrix and tensor.type not in (*FLOATS, "i64", "bool")


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor -> shard from an index: names of files in the same folder."""
    weight_map = files.object_of(path, bounds.SAFETENSORS_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard) or not shard.isprintable():
            raise CheckpointError(
                f"{path}: names shard {str(shard)[:60]!r}, which is not a file of its folder"
            )
    if len(set(weight_map.values())) > bounds.SAFETENSORS_SHARDS:
        raise CheckpointError(
            f"{path}: names over {bounds.SAFETENSORS_SHARDS} shards, more than any model has"
        )
    return weight_map


def _unindexed(folder: Path, names: Iterable[str]) -> list[str]:
    """The model's safetensors files in a folder that has neither model.safetensors nor an index."""
    found = [n for n in names if n.endswith(".safetensors") and not n.startswith(_NOT_THE_MODEL)]
    numbered = [match for name in found if (match := _SHARD.fullmatch(name))]
    if not numbered and len(found) <= 1:
        return found
    if len(numbered) < len(found) or len({(match[1], match[3]) for match in numbered}) > 1:
        raise CheckpointError(
            f"{folder}: has {len(found)} .safetensors files, and no {INDEX} to choose the model's"
        )
    prefix, count = numbered[0][1], int(numbered[0][3])
    if count > bounds.SAFETENSORS_SHARDS:
        raise CheckpointError(f"{folder}: claims {count} shards, more than any model has")
    return [f"{prefix}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
