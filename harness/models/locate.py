"""Find the weights of a cell on this machine, in either format: what they are, and a fingerprint."""

from __future__ import annotations

import hashlib
import json
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from harness.base import data
from harness.base.files import drop, matching, reason
from harness.base.text import list_named
from harness.models import checkpoint, gguf, gguf_model
from harness.models.checkpoint import INDEX, SINGLE, Checkpoint, CheckpointError
from harness.models.config_json import PACKING_FILES
from harness.models.file_samples import sampled
from harness.models.gguf_model import Contradiction, is_mixture_gguf
from harness.models.safetensors_files import FLOATS
from harness.theory.decoder import Decoder, parameters
from harness.theory.hf_config import Quantization
from harness.theory.tensors import KINDS, Packing, Sizes, bytes_by_type, read_in_part

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


def attention(made: Decoder) -> dict[str, int]:
    """The dimensions of a dense model's KV cache."""
    return {"layers": made.count, "kv_heads": made.kv_heads, "head_dim": made.head_dim}


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
