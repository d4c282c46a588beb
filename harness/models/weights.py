"""Name, find and fingerprint the weights of a cell. Making them is the campaign's work."""

from __future__ import annotations

import hashlib
import json
import stat
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness.cache import cache_folder
from harness.config import Model
from harness.models import gguf_header
from harness.theory import gguf_types
from harness.theory.shapes import Shape

# Bump when runners/llamacpp_weights.py makes other values or other files of the same shape and seed.
SYNTHESIS = 1
SOURCE_QUANT = "f16"  # what is synthesized, and what every other type is quantized from
FULL_TYPES = ("f32", "f16", "bf16")  # a file of these can be quantized to anything


class WeightsError(RuntimeError):
    """The weights of a cell cannot be had; the message is one sentence."""


@dataclass(frozen=True)
class Ready:
    """Weights on this machine: a GGUF file, what its header says, and what tells it from any other."""

    path: Path
    header: gguf_header.GgufHeader
    fingerprint: str


def synthetic_path(shape: Shape, seed: int, quant: str, quantizer: str) -> Path:
    """The cache's name of a synthetic file, by content: shape, seed, generator and, if quantized, the
    quantizer."""
    asked: dict[str, Any] = {"shape": asdict(shape), "seed": seed, "synthesis": SYNTHESIS}
    if quant != SOURCE_QUANT:
        asked["quantizer"] = quantizer
    return cache_folder() / "weights" / _digest(asked) / f"{quant}.gguf"


def quantized_path(source: Ready, quant: str, quantizer: str) -> Path:
    """The cache's name of a quantized copy of a local 16- or 32-bit file."""
    return cache_folder() / "weights" / _digest([source.fingerprint, quantizer]) / f"{quant}.gguf"


def local(path: Path) -> Ready:
    """Open a GGUF file. Raises WeightsError: missing, a folder, not a GGUF, cut short, one part of
    several."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            raise WeightsError(f"{path}: is {'a directory' if path.is_dir() else 'not a regular file'}")
        header = gguf_header.read(path)
    except gguf_header.GgufError as damage:
        raise WeightsError(str(damage)) from damage
    except OSError as refusal:
        raise WeightsError(f"{path}: {(refusal.strerror or str(refusal)).lower()}") from refusal
    if header.metadata.get("split.count", 0) > 1:
        raise WeightsError(f"{path}: is one part of a split model; merge it first (llama-gguf-split --merge)")
    return Ready(path, header, f"{header.digest}-{status.st_size}-{status.st_mtime_ns}")


def synthetic_bytes(shape: Shape, quant: str) -> int:
    """Bytes of the tensors of a synthetic file, which stands in for a published one."""
    return gguf_types.model_bytes(shape, quant, as_published=True)


def quantized_bytes(header: gguf_header.GgufHeader, quant: str) -> int:
    """Bytes of the tensors of a dense model's file once llama.cpp has quantized it."""
    heads = header.integer(f"{header.architecture}.attention.head_count") or 1
    attention = header.attention() or {"layers": 0, "kv_heads": heads}
    n_gqa = heads // attention["kv_heads"]
    made = gguf_types.retyped(header.listed(), quant, header.architecture, attention["layers"], n_gqa)
    return sum(tensor.bytes for tensor in made)


def check_quantizable(ready: Ready, quant: str) -> None:
    """Raises WeightsError for a file that is quantized already, to another type."""
    if ready.header.quant not in FULL_TYPES:
        stored = ready.header.quant or "of an unknown type"
        raise WeightsError(f"{ready.path}: is {stored}; {quant} was asked for, and that needs f16 weights")


def cached(path: Path) -> Ready | None:
    """A file of our own cache if it is there and whole; a damaged one is dropped, to be made again."""
    if not path.exists():
        return None
    try:
        return local(path)
    except WeightsError as damage:
        if isinstance(damage.__cause__, gguf_header.GgufError):
            path.unlink(missing_ok=True)
            return None
        raise


@cache
def from_hub(repo: str, file: str, revision: str) -> Path:
    """Download a file of the Hugging Face hub, or find it in the hub's own cache. Raises WeightsError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name = f"hub file {repo}/{file}"
    try:
        return Path(hf_hub_download(repo, file, revision=revision))
    except LocalEntryNotFoundError as offline:
        raise WeightsError(f"{name}: not in the cache, and the hub cannot be reached") from offline
    except Exception as refusal:  # its HTTP library's errors have no common base
        first = (str(refusal).strip() or type(refusal).__name__).splitlines()[0]
        raise WeightsError(f"{name}: {first}") from refusal


def named_path(model: Model, quant: str | None) -> str:
    """The path or hub file of a model, `{quant}` filled in."""
    name = str(model.weights.path or model.weights.file)
    return name.replace("{quant}", quant) if quant else name


def _digest(asked: object) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
