"""A checkpoint's config.json, and the files beside it that say how its weights are quantized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from harness.base import bounds
from harness.base.files import JsonFileError, object_of
from harness.theory.config_settings import ConfigJsonError, Settings
from harness.theory.packed_sizes import Packing
from harness.theory.packing_settings import packing_in
from harness.theory.quantization import Quantization, modelopt

CONFIG = "config.json"
# Where auto-gptq and early autoawq wrote their settings, and the method if the file does not name one.
PACKING_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
MODELOPT_FILE = "hf_quant_config.json"
T = TypeVar("T")


def settings_in(path: Path) -> Settings:
    """Raises JsonFileError, OSError."""
    return Settings(object_of(path, bounds.CONFIG_JSON_BYTES))


def parsed(path: Path, settings: Settings, parse: Callable[[Settings], T]) -> T:
    """What `parse` makes of a file's settings, its ConfigJsonError as a JsonFileError with the path."""
    try:
        return parse(settings)
    except ConfigJsonError as mistake:
        raise JsonFileError(f"{path}: {mistake}") from mistake


def quantization_beside(folder: Path, is_packed: bool = True) -> tuple[Quantization | None, Packing | None]:
    """How weights are quantized by the files beside a config.json that does not say it. `is_packed`: as GPTQ
    and AWQ pack them, without which their settings do not count. Raises JsonFileError, OSError."""
    path = folder / MODELOPT_FILE
    if path.exists() and (quantization := parsed(path, settings_in(path), modelopt)):
        return quantization, None
    packing = separate_packing(folder)[1] if is_packed else None
    return (Quantization(packing.method, packing.words) if packing else None), packing


def separate_packing(folder: Path) -> tuple[str, Packing | None]:
    """The name of the first separate file of GPTQ or AWQ settings, and its settings; None without one.

    Raises JsonFileError, OSError.
    """
    for name, method in PACKING_FILES.items():
        if (path := folder / name).exists():
            settings = Settings({"quant_method": method} | settings_in(path))
            if packing := parsed(path, settings, packing_in):
                return name, packing
    return "", None
