"""Settings of GPTQ and AWQ weights, as the libraries that write them define them. Pure.

Keys: BaseQuantizeConfig of auto-gptq 0.7.1, AwqConfig of autoawq 0.2.9, QuantizeConfig of gptqmodel 7.6.0.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.theory.config_settings import NAME, ConfigJsonError, settings_of, shown
from harness.theory.packed_sizes import FORMATS, Packing
from harness.theory.quantization import quantization_configs

_MOST_BITS = 8
_LARGEST_GROUP = 1 << 20
_USUAL_LAYOUT = {"gptq": "gptq", "awq": "gemm"}


def packing_of(config: object) -> Packing | None:
    """The GPTQ or AWQ settings of a config.json; None if it has none.

    Raises ConfigJsonError.
    """
    for key, settings in quantization_configs(config):
        if packing := packing_in(settings, f"{key}."):
            return packing
    return None


def packing_in(config: object, prefix: str = "", method: str | None = None) -> Packing | None:
    """As packing_of, from the settings only. `prefix`: of keys in messages. `method`: for settings without
    a name."""
    settings = settings_of(config, "settings")
    named = settings.get("quant_method") or method
    method = named.lower() if isinstance(named, str) else None
    if method not in FORMATS:
        return None

    def number(keys: tuple[str, str], is_valid: Callable[[int], bool], expected: str) -> int:
        key = next((key for key in keys if settings.get(key) is not None), None)
        if key is None:
            raise ConfigJsonError(f"{prefix}{keys[0]} is missing")
        value = settings[key]
        if type(value) is not int or not is_valid(value):
            raise ConfigJsonError(f"{prefix}{key} must be {expected}, not {shown(value)}")
        return value

    layout = "marlin" if settings.flag("is_marlin_format", prefix=prefix) else None
    for key in ("checkpoint_format", "format", *(("version",) if method == "awq" else ())):
        if layout is None and (name := settings.get(key)) is not None:
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ConfigJsonError(f"{prefix}{key} must be a name, not {shown(name)}")
            layout = name.lower()
    asymmetric = settings.flag("zero_point", method != "gptq", prefix)
    return Packing(
        method=method,
        bits=number(("bits", "w_bit"), lambda bits: 2 <= bits <= _MOST_BITS, f"from 2 to {_MOST_BITS}"),
        group_size=number(
            ("group_size", "q_group_size"),
            lambda size: size == -1 or 0 < size <= _LARGEST_GROUP,
            "a size, or -1 for a whole column",
        ),
        symmetric=settings.flag("sym", not asymmetric, prefix),
        act_order=settings.flag("desc_act", prefix=prefix),
        layout=layout or _USUAL_LAYOUT[method],
    )
