"""Name, find and fingerprint the weights of a cell, in either format. The campaign creates them."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import shipped
from harness.models import checkpoint, gguf_decoder, gguf_header, gguf_split, layout
from harness.models.agreement import FLOATS
from harness.models.checkpoint import INDEX, SINGLE, Checkpoint, CheckpointError
from harness.models.config_json import PACKING_FILES
from harness.models.gguf_metadata import rotary_of
from harness.models.gguf_shape import Contradiction, is_mixture
from harness.models.sampled import sampled
from harness.system.cache import cache_folder
from harness.system.json_file import CONFIG_JSON_BYTES, object_of
from harness.theory import gguf_types
from harness.theory.config_values import ConfigJsonError, shown
from harness.theory.decoder import Decoder, parameters
from harness.theory.hf_config import Quantization
from harness.theory.packed import KINDS, Packing
from harness.theory.shapes import Shape, attention
from harness.theory.tensors import Sizes, bytes_by_type, read_in_part

CONVERSION = 1  # bump when runners/llamacpp_convert.py makes other files of the same checkpoint
SOURCE_QUANT = "f16"  # checkpoints are converted to it, and every other type is quantized from it
FULL_TYPES = ("f32", "f16", "bf16")  # weights of these can be converted and quantized to anything
TOKENIZER = "tokenizer.json"
_TOKENIZER_SETTINGS = "tokenizer_config.json"


class WeightsError(RuntimeError):
    """The weights of a cell are unavailable; the message is one sentence."""


class WeightsUnavailable(WeightsError):
    """The model cannot be had in the stack's format."""


class WeightsRefused(WeightsError):
    """The weights are there, and what would be measured with them would be wrong."""


@dataclass(frozen=True)
class Ready:
    """Weights on this machine: a GGUF file or a folder, with the facts of their headers and a fingerprint.

    `format`: gguf or hf. `quant`: a GGUF's type; of a checkpoint the type of its matrices (f32, f16, bf16),
    or how it is quantized, in words (gptq-int4). `tokenizer`: the file that the prompt is tokenized by, a
    GGUF with a vocabulary or a tokenizer.json. `sizes`: as loaded. `attention`: layers, kv_heads, head_dim;
    null if unknown. `revision`: the commit on the hub. `header`: of a GGUF. `packing`: of GPTQ and AWQ.
    `shards`: files that the weights are in; `file_bytes`: all of them. `decoder`: of a known model that is
    not dense, whose `attention` is null. `stored`: how a checkpoint's weights are quantized.
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
    header: gguf_header.GgufHeader | None = None
    packing: Packing | None = None
    shards: int = 1
    file_bytes: int | None = None
    decoder: Decoder | None = None
    stored: Quantization | None = None

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


def dequantized_path(source: str, options: Mapping[str, object]) -> Path:
    """The cache folder of weights dequantized for one check, by the identity and options of their source."""
    return cache_folder() / "weights" / "dequantized" / digest([source, dict(options)])


def local(path: Path) -> Ready:
    """Open a GGUF file, a checkpoint's folder, or a folder with one GGUF in it. Raises WeightsError."""
    try:
        if path.is_dir():
            found = checkpoint.read(path, needs_shape=False)
            return _gguf(found.path) if found.format == "gguf" else _checkpoint(found)
        if path.suffix in (".safetensors", ".json"):
            path.stat()
            raise WeightsError(f"{path}: is one file of a checkpoint; name its folder")
        return _gguf(path)
    except checkpoint.Contradicted as wrong:
        raise WeightsRefused(str(wrong)) from wrong
    except (CheckpointError, gguf_header.GgufError) as damage:
        raise WeightsError(str(damage)) from damage
    except Contradiction as wrong:
        raise WeightsRefused(f"{path}: {wrong}") from wrong
    except OSError as refusal:
        raise WeightsError(f"{path}: {(refusal.strerror or str(refusal)).lower()}") from refusal


def _unknown_mixture(path: Path, architecture: str) -> WeightsRefused:
    return WeightsRefused(
        f"{path}: is {architecture}, a mixture of experts whose layers are not known here: the bytes that a"
        " token reads cannot be counted, and every limit would be wrong"
    )


def _gguf(path: Path) -> Ready:
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
        raise WeightsError(f"{path}: is not a regular file")
    header = gguf_split.read_whole(path)
    files = gguf_split.files_of(path, header)
    statuses = [each.stat() for each in files]
    path, size = files[0], sum(status.st_size for status in statuses)  # llama.cpp finds the rest by the first
    made = _not_dense(gguf_decoder.decoder_of(header))
    if made is None and is_mixture(header):
        raise _unknown_mixture(path, header.architecture)
    gguf_decoder.check_is_model(path, header)
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
        attention=None if made else header.attention(),
        header=header,
        shards=len(files),
        file_bytes=size,
        decoder=made,
    )


def _not_dense(made: Decoder | None) -> Decoder | None:
    return made if made and made.shape is None else None


def _checkpoint(found: Checkpoint) -> Ready:
    if found.config is None:
        raise WeightsError(f"{found.path}: has no config.json")
    if not found.files:
        raise WeightsError(f"{found.path.parent}: has a config.json and no weights")
    if not any((found.path / name).is_file() for name in (SINGLE, INDEX)):
        raise WeightsError(f"{found.path}: has no {SINGLE} and no {INDEX}")
    made, shape, tokenizer = found.decoder, found.shape, found.path / TOKENIZER
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
        attention=attention(shape) if shape else None,
        packing=found.packing,
        shards=len(found.files),
        file_bytes=sum(path.stat().st_size for path in found.files),
        decoder=_not_dense(made),
        stored=found.stored,
    )


def _sizes(found: Checkpoint) -> Sizes:
    """As GgufHeader.weights, for the tensors that transformers loads; packed tensors by kind."""
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
    """As of a GGUF, headers, size, times and content: a digest of config.json, of the tokenizer's settings,
    and of every file's header and size; the bytes of all files; a digest of their times; and one of a sample
    of the weights, the tokenizer, separate settings and Python code. Of a shipped checkpoint without times,
    so that it is the same in every installation."""
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
    timeless = shipped.weights_name(found.path) is not None
    times = digest([] if timeless else [status.st_mtime_ns for _, status in every])
    parts = known.hexdigest()[:16], sum(status.st_size for _, status in every), times
    return "-".join(map(str, (*parts, digest([sampled(found.files), sampled(others)]))))


def quantized_bytes(header: gguf_header.GgufHeader, quant: str) -> int:
    """Bytes of the tensors of a model's file once llama.cpp has quantized it."""
    if decoder := _not_dense(gguf_decoder.decoder_of(header)):
        return gguf_types.model_bytes(decoder, quant)
    heads = header.integer(f"{header.architecture}.attention.head_count") or 1
    attention = header.attention() or {"layers": 0, "kv_heads": heads}
    n_gqa = heads // attention["kv_heads"]
    mix = gguf_types.Mix(header.architecture, attention["layers"], n_gqa)
    made = gguf_types.retyped(header.listed(), quant, mix)
    return sum(tensor.bytes for tensor in made)


def check_quantizable(ready: Ready, quant: str) -> None:
    """Raises WeightsError for a file that is quantized already, to another type."""
    if ready.quant not in FULL_TYPES:
        stored = ready.quant or "of an unknown type"
        raise WeightsError(f"{ready.path}: is {stored}; {quant} was asked for, which needs f16 weights")


def check_convertible(ready: Ready, converts: Mapping[str, Sequence[str]]) -> None:
    """Raises WeightsError for a checkpoint that is not converted to GGUF: quantized already, of another
    architecture, or computed differently there. `converts`: of the stack's header."""
    if ready.quant not in FULL_TYPES:
        stored = ready.quant or "of an unknown type"
        raise WeightsRefused(f"{ready.path}: is {stored}; only 16- and 32-bit weights are converted to GGUF")
    kind = ready.architecture
    if kind not in (converts if ready.decoder is None else layout.KINDS):
        raise WeightsUnavailable(f"{ready.path}: is {kind}, which is not converted to GGUF here")
    config = object_of(ready.path / checkpoint.CONFIG, CONFIG_JSON_BYTES)
    try:
        if ready.decoder:
            layout.check_gguf(config)
        elif (rope := rotary_of(config)["rope_type"]) not in ("default", *converts[str(kind)]):
            raise layout.NoLayout(f"rope scaling {shown(rope)} of {kind} is not converted")
    except (ConfigJsonError, layout.NoLayout) as why:
        raise WeightsUnavailable(f"{ready.path}: {why}") from why


def check_shape(ready: Ready, made: Shape | Decoder) -> None:
    """Raises WeightsError for weights that do not match the shape in the config."""
    if not isinstance(made, Shape):
        for key in ("count", "hidden_size", "experts", "experts_used"):
            given, named = getattr(ready.decoder, key, None), getattr(made, key)
            if ready.decoder and given != named:
                what = key.replace("_", " ").replace("count", "layers")
                raise WeightsError(f"{ready.path}: has {what} {given}, but the config's shape has {named}")
        return
    shape = made
    named = attention(shape)
    for key, value in (ready.attention or {}).items():
        if value != named[key]:
            what = key.replace("_", " ")
            raise WeightsError(f"{ready.path}: has {what} {value}, but the config's shape has {named[key]}")


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


def drop(path: Path) -> None:
    """Remove a file or a folder of our own cache, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def digest(data: object) -> str:
    """16 digits of a hash of plain data, for names in the cache."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
