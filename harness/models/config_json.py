"""Read a checkpoint's config.json, and the files beside it that say how its weights are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.base import bounds
from harness.base.files import JsonFileError, object_of
from harness.models import not_a_model
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
)
from harness.theory.tensors import Packing

CONFIG = "config.json"
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
            isinstance(part, Mapping) and part.get("max_position_embeddings") is not None
            for part in (config, config.get("text_config"))
        ),
    )


def quantization_beside(folder: Path, is_packed: bool = True) -> tuple[Quantization | None, Packing | None]:
    """How weights are quantized by the files beside a config.json that does not say it. `is_packed`: as GPTQ
    and AWQ pack them, without which their settings do not count. Raises JsonFileError, OSError."""
    path = folder / MODELOPT_FILE
    try:
        if path.exists() and (quantization := modelopt(object_of(path, bounds.CONFIG_JSON_BYTES))):
            return quantization, None
    except ConfigJsonError as mistake:
        raise JsonFileError(f"{path}: {mistake}") from mistake
    _, packing = (separate_packing(folder) if is_packed else None) or (folder, None)
    return (Quantization(packing.method, packing.words) if packing else None), packing


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
