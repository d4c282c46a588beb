"""Parse the settings of GPTQ or AWQ weights, as the libraries that write them define them. Pure.

Keys: BaseQuantizeConfig of auto-gptq 0.7.1, AwqConfig of autoawq 0.2.9, QuantizeConfig of gptqmodel 7.6.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from harness.theory.config_values import ConfigJsonError, shown
from harness.theory.hf_config import quantization_configs
from harness.theory.packed import FORMATS, Packing

_MOST_BITS = 8
_LARGEST_GROUP = 1 << 20
_USUAL_LAYOUT = {"gptq": "gptq", "awq": "gemm"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


def packing_of(config: Mapping[str, object]) -> Packing | None:
    """The GPTQ or AWQ settings of a config.json; null if it has none.

    Raises ConfigJsonError.
    """
    for key, given in quantization_configs(config):
        if found := packing_in(given, f"{key}."):
            return found
    return None


def packing_in(given: Mapping[str, object], prefix: str = "", method: str | None = None) -> Packing | None:
    """As packing_of, from the settings only. `prefix`: of their keys in messages. `method`: if they name
    none."""
    named = given.get("quant_method") or method
    method = named.lower() if isinstance(named, str) else None
    if method not in FORMATS:
        return None
    asymmetric = _flag(given, "zero_point", prefix)
    symmetric = _flag(given, "sym", prefix)
    if symmetric is None:
        symmetric = not asymmetric if asymmetric is not None else method == "gptq"
    marlin = _flag(given, "is_marlin_format", prefix)
    return Packing(
        method=method,
        bits=_bits(given, prefix),
        group_size=_group_size(given, prefix),
        symmetric=symmetric,
        act_order=bool(_flag(given, "desc_act", prefix)),
        layout="marlin" if marlin else _layout(given, method, prefix),
    )


def _layout(given: Mapping[str, object], method: str, prefix: str) -> str:
    for key in ("checkpoint_format", "format", *(("version",) if method == "awq" else ())):
        if (name := given.get(key)) is None:
            continue
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigJsonError(f"{prefix}{key} must be a name, not {shown(name)}")
        return name.lower()
    return _USUAL_LAYOUT[method]


def _bits(given: Mapping[str, object], prefix: str) -> int:
    name, value = _first(given, ("bits", "w_bit"), prefix)
    if type(value) is not int or not 2 <= value <= _MOST_BITS:
        raise ConfigJsonError(f"{prefix}{name} must be from 2 to {_MOST_BITS}, not {shown(value)}")
    return value


def _group_size(given: Mapping[str, object], prefix: str) -> int:
    name, value = _first(given, ("group_size", "q_group_size"), prefix)
    if type(value) is not int or (value != -1 and not 0 < value <= _LARGEST_GROUP):
        raise ConfigJsonError(f"{prefix}{name} must be a size, or -1 for a whole column, not {shown(value)}")
    return value


def _first(given: Mapping[str, object], names: tuple[str, ...], prefix: str) -> tuple[str, object]:
    """The value of the first of the names that exists."""
    found = next((name for name in names if given.get(name) is not None), None)
    if found is None:
        raise ConfigJsonError(f"{prefix}{names[0]} is missing")
    return found, given[found]


def _flag(given: Mapping[str, object], name: str, prefix: str) -> bool | None:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigJsonError(f"{prefix}{name} must be true or false, not {shown(value)}")
    return value
