"""Identify a file in the place of a model: a pointer, a web page, a piece, a projector."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.base import data
from harness.theory.config_settings import Settings

BYTES_NEEDED = 512
"""Bytes at a file's beginning that identify it; a Git LFS pointer is shorter."""
GGUF = b"GGUF"
_LFS = b"version https://git-lfs.github.com/spec/"
_LFS_SIZE = re.compile(rb"^size ([0-9]{1,20})$", re.MULTILINE)
_PAGE = re.compile(rb"\s*<(!doctype\s+html|html|head|\?xml)", re.IGNORECASE)
# As other tools name the pieces of a file that they cut: .gguf.part1of2, .gguf-split-a, .gguf.00.
_PIECE = re.compile(
    r"(?P<whole>.+\.(gguf|safetensors))[.-](?P<number>(part|split)[-_.]?([0-9]{1,5}(-?of-?[0-9]{1,5})?|[a-z]{1,3})"
    r"|[0-9]{1,5}|a[a-z])",
    re.IGNORECASE,
)
ARCHITECTURES = {row["architecture"]: row for row in data.rows("gguf_architectures.csv")}
"""llama.cpp's. `kind`: decoder, or encoder (LLM_ARCH_* with hparams.causal_attn false, or no decoder)."""
# transformers' model_type of such models.
_ENCODER_TYPES = (
    *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "eurobert"),
    *("modernbert", "mpnet", "new", "nomic_bert", "roberta", "xlm-roberta"),
)


def cause(start: bytes, size: int) -> str | None:
    """A clause on a file that is no model by its first bytes; None: nothing is known of it."""
    if size == 0:
        return "is empty (0 bytes): the download failed; fetch it again"
    if start.startswith(_LFS):
        stated = _LFS_SIZE.search(start)
        stands = f" for a file of {int(stated[1]) / 1e6:,.1f} MB" if stated else ""
        return (
            f"is a Git LFS pointer of {size} bytes{stands}: run `git lfs pull`, or download the file itself"
        )
    if _PAGE.match(start):
        return (
            "is a web page (HTML), not a model: download the file itself"
            " (on the Hugging Face hub: /resolve/ in place of /blob/)"
        )
    if not start.strip(b"\0"):
        return "begins with zeros: the download did not finish; fetch it again"
    return None


def piece(path: Path) -> str | None:
    """A clause on a file that another tool has cut, by its name; None: it is none."""
    match = _PIECE.fullmatch(path.name)
    if match is None:
        return None
    whole = match["whole"]
    return (
        f"is one piece ({match['number']}) of {whole}, cut by another tool than llama.cpp:"
        f" join all of them in order, as in cat PIECE1 PIECE2 > {whole}"
    )


def other_kind(metadata: Mapping[str, Any]) -> str | None:
    """A clause on a GGUF that is no language model by its header's keys; None: it is one."""
    kind, architecture = (str(metadata.get(f"general.{key}") or "") for key in ("type", "architecture"))
    if architecture == "clip" or kind == "mmproj":
        return "is a projector (images or audio) of a multimodal model; name the GGUF of its language model"
    if kind == "adapter" or metadata.get("adapter.type") is not None:
        return "is a LoRA adapter, not a model; merge it into its model (llama-export-lora), and name that"
    if kind == "imatrix" or architecture == "imatrix":
        return "is an importance matrix (imatrix), not a model"
    if architecture == "controlvector":
        return "is a control vector, not a model"
    if (
        metadata.get(f"{architecture}.attention.causal") is False
        or ARCHITECTURES.get(architecture, {}).get("kind") == "encoder"
    ):
        return encoder(architecture)
    return None


def encoder(kind: str) -> str:
    return (
        f"is {kind} without causal attention, as encoders and embedding models are:"
        " it does not generate token by token, so it has no decode speed; name a model that generates text"
    )


def is_encoder(config: Settings) -> bool:
    """Whether a config.json describes an encoder, which transformers runs as a decoder only on request."""
    return config.get("model_type") in _ENCODER_TYPES and config.get("is_decoder") is not True


def is_projector_name(name: str) -> bool:
    return "mmproj" in name.lower()
