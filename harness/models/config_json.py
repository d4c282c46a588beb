"""Read a checkpoint's config.json, its GPTQ or AWQ settings, and other JSON objects of its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.models import not_a_model
from harness.system.json_file import CONFIG_JSON_BYTES, JsonFileError, object_of
from harness.theory.architectures import decoder_of
from harness.theory.config_values import ConfigJsonError, NoShape
from harness.theory.decoder import Decoder
from harness.theory.hf_config import DENSE, Quantization, modelopt, quantization_of
from harness.theory.packed import Packing
from harness.theory.packed_config import packing_in, packing_of

# Where auto-gptq and early autoawq wrote their settings, and the method if the file does not name one.
PACKING_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}

MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True)
class ConfigJson:
    """Facts of a config.json; the defaults stand for a missing file. `kind`: model_type."""

    kind: str | None = None
    decoder: Decoder | None = None
    tied: bool = False
    synthetic: bool = False
    quantization: Quantization | None = None
    packing: Packing | None = None


def read(path: Path, needs_shape: bool) -> ConfigJson:
    """Raises JsonFileError, OSError. Without `needs_shape`, an unknown architecture has no layers."""
    config = object_of(path, CONFIG_JSON_BYTES)
    made: Decoder | None = None
    kind = config.get("model_type")
    if not_a_model.is_encoder(config):
        raise JsonFileError(f"{path}: {not_a_model.encoder(str(kind))}")
    try:
        quantization = quantization_of(config)
        packing = packing_of(config)
        made = decoder_of(config)
    except ConfigJsonError as mistake:
        # transformers knows more keys, and more defaults, of what is not dense.
        if needs_shape or not (isinstance(mistake, NoShape) or kind not in DENSE):
            raise JsonFileError(f"{path}: {mistake}") from mistake
    return ConfigJson(
        kind=kind if isinstance(kind, str) else None,
        decoder=made,
        tied=made.tied if made else config.get("tie_word_embeddings") is True,
        synthetic=config.get("harness_synthetic") is True,
        quantization=quantization,
        packing=packing,
    )


def separate_modelopt(folder: Path) -> Quantization | None:
    """What ModelOpt's own file says beside a config.json that names no quantization; null without one.

    Raises JsonFileError, OSError.
    """
    if not (path := folder / MODELOPT_FILE).exists():
        return None
    try:
        return modelopt(object_of(path, CONFIG_JSON_BYTES))
    except ConfigJsonError as mistake:
        raise JsonFileError(f"{path}: {mistake}") from mistake


def separate_packing(folder: Path) -> tuple[Path, Packing] | None:
    """The first separate file of GPTQ or AWQ settings, and its settings; null if there is none.

    Raises JsonFileError, OSError.
    """
    for name, method in PACKING_FILES.items():
        if (path := folder / name).exists():
            try:
                found = packing_in(object_of(path, CONFIG_JSON_BYTES), method=method)
            except ConfigJsonError as mistake:
                raise JsonFileError(f"{path}: {mistake}") from mistake
            if found:
                return path, found
    return None
