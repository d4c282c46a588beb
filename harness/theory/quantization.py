"""How a checkpoint's weights are quantized, by its config.json. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from harness.theory.config_settings import MOST, NAME, ConfigJsonError, Settings, is_whole, settings_of, shown


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint's weights are stored. `method`: as transformers names it. `words`: for people.
    `options`: the options that a stack needs to apply the method. `obstacle`: why transformers would
    dequantize the weights to other values; empty if it would not. `mixed`: GPTQ whose layers differ."""

    method: str
    words: str
    options: Mapping[str, str | int | float] = field(default_factory=dict)
    obstacle: str = ""
    mixed: bool = False


def quantization_of(config: object) -> Quantization | None:
    """How the weights are quantized ("gptq 4-bit, group 128"); None if they are not.

    Invalid details are omitted; an invalid method is a ConfigJsonError.
    """
    for key, settings in quantization_configs(config):
        if quantization := _quantization(settings, key):
            return quantization
    return None


def modelopt(content: object) -> Quantization | None:
    """Read ModelOpt's separate file, hf_quant_config.json. Raises ConfigJsonError."""
    settings = settings_of(settings_of(content, "hf_quant_config.json").get("quantization"), "quantization")
    return _quantization(Settings(settings | {"quant_method": "modelopt"}), "quantization")


def quantization_configs(config: object) -> Iterator[tuple[str, Settings]]:
    """The quantization of a config.json, by its keys. Raises ConfigJsonError."""
    config = settings_of(config, "config.json")
    for place in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config", "quantization"):  # the last is MLX's own
            value = place.get(key) if isinstance(place, Mapping) else None
            if value is not None:
                yield key, settings_of(value, key)


def _quantization(settings: Settings, key: str) -> Quantization | None:
    if not settings:
        return None
    method = settings.get("quant_method")
    if method is None:  # early bitsandbytes and MLX do not name their method
        flags = {"load_in_4bit", "load_in_8bit"} & settings.keys()
        method = "bitsandbytes" if flags else "mlx" if "bits" in settings else "unnamed"
    if not isinstance(method, str) or not NAME.fullmatch(method):
        raise ConfigJsonError(f"{key}.quant_method must be a name, not {shown(method)}")
    bits, group, blocks = _details(settings)
    found = method.lower() + (f" {bits}-bit" if bits else "") + _type_of(settings)
    options: dict[str, str | int | float] = {}
    if method.lower() == "bitsandbytes":
        named = settings.get("bnb_4bit_quant_type") or "fp4"  # transformers' own default
        kind = str(named) if bits == 4 else "int8"
        nested = bits == 4 and settings.get("bnb_4bit_use_double_quant") is True
        options = {"quant": kind, "double_quant": nested}
        found += f" ({kind})" if kind in ("nf4", "fp4") else ""
        found += ", double_quant" if nested else ""
    schemes = _schemes(settings)
    rules = ", rules for single layers" if settings.get("dynamic") or len(schemes) > 1 else ""
    words = found + (f", {group}" if group else "") + (f", {blocks}" if blocks else "") + rules
    mixed = bool(settings.get("dynamic")) or settings.get("lm_head") is True
    return Quantization(method.lower(), words, options, _obstacle(settings, len(schemes)), mixed)


def _schemes(settings: Settings) -> list[object]:
    """The different types of weights in the groups of layers of compressed-tensors."""
    schemes: list[object] = []
    for group in (settings.inner("config_groups") or Settings()).values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            keys = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")
            schemes += [scheme] if (scheme := [weights.get(key) for key in keys]) not in schemes else []
    return schemes


def _obstacle(settings: Settings, schemes: int) -> str:
    """Why transformers 5.23 would dequantize to other values (CompressedTensorsDequantize); or empty."""
    if schemes > 1:
        return f"its layers have {schemes} types of weights (config_groups), and transformers dequantizes one"
    if settings.get("transform_config"):
        return "its weights are transformed (transform_config), which transformers does not undo"
    sparse = (settings.inner("sparsity_config") or Settings()).get("format") not in (None, "dense")
    return "its weights are sparse (sparsity_config), which transformers does not undo" if sparse else ""


def _type_of(given: Settings) -> str:
    """The type of the weights where it says more than their bits: ModelOpt's, Quark's, torchao's, floats; or
    empty."""
    settings = _of_weights(given)
    if settings.get("type") == "float":
        name = str(settings.get("format")).partition("-")[0]
        return " float" + (f" ({name})" if name in _BLOCK_FLOATS else "")
    if (kind := settings.get("quant_type")) is not None:
        return _type_of_torchao(kind)
    name = next((n for key in ("quant_algo", "dtype") if isinstance(n := settings.get(key), str)), "")
    return f" {name.lower()}" if NAME.fullmatch(name) else ""


_BLOCK_FLOATS = ("nvfp4", "mxfp4", "mxfp6", "mxfp8")  # by the names of compressed-tensors' formats
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def _type_of_torchao(kind: object) -> str:
    """The class of its settings in words, Int8WeightOnlyConfig as int8 weight only, and a type in it."""
    if isinstance(kind, Mapping):
        kind = next(iter(kind.values()), None)
        inner = settings_of(kind, "quant_type") if isinstance(kind, Mapping) else Settings()
        width = ((inner.inner("_data") or Settings()).inner("weight_dtype") or Settings()).get("_data")
        width = f" ({width})" if isinstance(width, str) and NAME.fullmatch(width) else ""
        name = inner.get("_type")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            return ""
        return f" {_WORD.sub(' ', name.removesuffix('Config')).lower()}{width}"
    return f" {kind.replace('_', ' ')}" if isinstance(kind, str) and NAME.fullmatch(kind) else ""


def _of_weights(settings: Settings) -> Settings:
    """The settings with those of the weights, which compressed-tensors, Quark and HQQ nest."""
    groups = settings.inner("config_groups") or Settings()
    places = [(groups, name, "weights") for name in [*groups][:1]]
    places += [(settings, "global_quant_config", "weight"), (settings, "quant_config", "weight_quant_params")]
    for holder, outer, inner in places:
        if (place := holder.inner(outer)) is not None and (nested := place.inner(inner)) is not None:
            return Settings(settings | nested)
    return settings


def _details(given: Settings) -> tuple[int | None, str, str]:
    """Bits, group and blocks; None or empty if not given."""
    settings = _of_weights(given)
    widths = [settings.get(name) for name in ("bits", "w_bit", "num_bits", "nbits")]
    widths += [bits for bits in (4, 8) if settings.get(f"load_in_{bits}bit") is True]
    bits = next((width for width in widths if isinstance(width, int) and is_whole(width, 64)), None)
    size = settings.get("group_size", settings.get("q_group_size"))
    group = f"group {size}" if is_whole(size, MOST) else "one group a row" if size == -1 else ""
    block = settings.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(is_whole(side, MOST) for side in block):
        return bits, group, f"blocks of {block[0]} x {block[1]}"
    return bits, group, ""
