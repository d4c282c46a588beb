"""A model of `harness theory` by the headers of its files: its name, its layers, its weights as stored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.exits import Mistake
from harness.system.printing import printable
from harness.theory import gguf_types
from harness.theory.choices import Stored
from harness.theory.decoder import Decoder
from harness.theory.fits import Form
from harness.theory.footprint import LLAMA_CPP, TRANSFORMERS
from harness.theory.tensors import Tensor

if TYPE_CHECKING:
    from harness.models.checkpoint import Checkpoint


def _read(given: str) -> Checkpoint:
    """The headers of a model's files. Raises Mistake."""
    from harness.models.checkpoint import CheckpointError, read

    try:
        return read(Path(given))
    except CheckpointError as wrong:
        raise Mistake(printable(str(wrong))) from wrong


def file(given: str) -> tuple[str, Decoder | None, bool, Form | None]:
    """A model's name, layers, whether it is tied, and its stored form, from its files' headers."""
    checkpoint, path = _read(given), Path(given).absolute()
    loaded, label = _loaded(checkpoint), checkpoint.quantization or "as stored"
    stored = Form(label, tensors=loaded, parameters=checkpoint.parameters) if loaded else None
    return _name_of(path), checkpoint.decoder, checkpoint.tied, stored


def _loaded(checkpoint: Checkpoint) -> tuple[Tensor, ...]:
    """A tied model's second copy of the embedding is not loaded."""
    return tuple(t for t in checkpoint.tensors if not (checkpoint.tied and t.part == "lm_head"))


def _name_of(path: Path) -> str:
    return printable(
        path.parent.name if path.name == "config.json" else path.stem if path.is_file() else path.name
    )


def whole_model(given: str) -> tuple[str, Decoder, Stored | None]:
    """The name and layers of a model in a file, and its weights if they are quantized. Raises Mistake."""
    found, name = _read(given), _name_of(Path(given).absolute())
    if found.decoder is None:
        raise Mistake(f"{given}: unknown architecture, so only its stored bytes are known; drop --memory")
    label, loaded = found.quantization, _loaded(found)
    if not loaded or label is None or label in gguf_types.UNQUANTIZED:
        return name, found.decoder, None
    engine = LLAMA_CPP if found.format == "gguf" else TRANSFORMERS
    return name, found.decoder, Stored(label, loaded, engine)
