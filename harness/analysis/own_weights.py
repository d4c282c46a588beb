"""Compare a variant's logits with those of its weights, dequantized: are kernels and file right? Pure.

Both have the same weights, so only arithmetic may differ, far less than the error of a quantized type.
The file itself is compared with the 16-bit weights, tensor by tensor and setting by setting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.analysis.traffic import nominal_bits
from harness.base.text import plural
from harness.records.checked import Depth
from harness.records.kinds import Record

CACHE_TYPES = ("type_k", "type_v")
# (types by name, bound): the mean relative error that arithmetic explains. Kernels of llama.cpp round
# activations to 8 bits, in blocks of 32 or, for k- and i-quants, of 256. Worst window measured on random
# weights (docs/validation.md): 16-bit arithmetic 0.015, blocks of 32 0.055, of 256 0.12.
SIXTEEN_BITS = 0.06
ARITHMETIC: tuple[tuple[str, float], ...] = (
    (r"q(8_0|5_[01]|4_[01])|iq4_nl|mxfp4(_moe)?", 0.1),
    (r"(q|iq|tq)\d.*", 0.2),
    (r"int8", 0.15),
    (r".*", SIXTEEN_BITS),
)
CACHE = ((16, 0.0), (8, 0.15), (5, 0.4), (1, 0.6))  # the same for the KV cache, by bits
# The norm of logits over that of the reference's, minus 1: rounding leaves the norm as it is.
SCALE_16_BITS, SCALE = 0.01, 0.0125
# (bits of the file's type, bound): relative error of a row of a matrix. Unrelated rows are off by 1.41,
# zeroed ones by 1. Rounded to nearest, the worst of random weights: 8 bits 0.012, 4 bits 0.12, 2 bits 0.37.
ROW_WRONG_ABOVE: tuple[tuple[int, float], ...] = ((16, 0.01), (8, 0.2), (1, 0.7))
VECTOR_WRONG_ABOVE = 0.01  # norms and biases stay in 16 or 32 bits
OWN = "its own weights, dequantized"
SETTINGS = (
    *("vocab_size", "hidden_size", "layers", "intermediate_size", "heads", "kv_heads", "head_dim"),
    *("qkv_bias", "qk_norm", "rope_theta", "norm_eps"),
)


def other_settings(file: Mapping[str, Any], original: Mapping[str, Any]) -> list[str]:
    """Settings of a file's dense model that differ from those of the 16-bit weights, a sentence each.

    The window is not among them: converters leave it out, and it matters only beyond it.
    """
    return [
        f"{key} is {file[key]}, and {original[key]} in the 16-bit weights"
        for key in SETTINGS
        if not math.isclose(file[key], original[key], rel_tol=1e-5)
    ]


def weights_type(record: Record) -> str:
    """The type of the weights by name, as requested or as stored."""
    options, stored = record.get("options") or {}, record["model"]["weights"].get("quant")
    return str(options.get("quant") or stored or options.get("dtype"))


def allowed_own_weights(record: Record) -> float:
    """The largest mean relative error that arithmetic explains."""
    named = weights_type(record)
    of_weights = next(bound for types, bound in ARITHMETIC if re.fullmatch(types, named))
    options = record.get("options") or {}
    bits = min(nominal_bits(str(options.get(key, "f16"))) or 1 for key in CACHE_TYPES)
    return max(of_weights, next(bound for least, bound in CACHE if bits >= least))


def file_wrong(record: Record) -> str | None:
    """Why a variant's file is another model's, from its settings and values; None: nothing found, or not
    compared."""
    own = record["check"].get("own")
    if not own:
        return None
    if own["settings"]:
        return str(own["settings"][0])
    return _values(own.get("values"), weights_type(record)) or other_count(own.get("experts"), OWN)


def own_weights_wrong(record: Record) -> str | None:
    """Why it computes another model, from its own weights."""
    own, bound = record["check"].get("own"), allowed_own_weights(record)
    if not own:
        return None
    reason = experts_wrong(own.get("experts"), bound, OWN)
    return reason or (None if is_free(record, own) else depths_wrong(own["depths"], bound, OWN))


def is_free(record: Record, compared: Mapping[str, Any]) -> bool:
    """Whether a mixture was compared with a reference whose routers chose for themselves. Rounding leads one
    near a tie to another expert, so that a difference of logits then says nothing."""
    decoder = record["model"]["weights"].get("decoder")
    return bool(decoder and decoder["experts"]) and not (compared.get("experts") or {}).get("choices")


def other_count(experts: Mapping[str, Any] | None, of: str) -> str | None:
    """Why a mixture uses another number of experts."""
    if not experts or experts["chosen"] == experts["used"]:
        return None
    return f"a token uses {plural(experts['chosen'], 'expert')}, and {experts['used']} in {of}"


def experts_wrong(experts: Mapping[str, Any] | None, bound: float, of: str) -> str | None:
    """Why a mixture's choices of experts are not those of the same weights. `bound`: the largest relative
    error that is explained.

    An expert is chosen before a better one by at most the difference of the two scores' errors. Of E normal
    errors the largest is sqrt(2 ln E) standard deviations; the gap's root mean square stays below it.
    """
    if not experts or experts["gap"] <= (most := bound * math.sqrt(2 * math.log(experts["experts"]))):
        return None
    gap = f"{experts['gap']:.0%} of their spread (root mean square)"
    detail = f"its routers chose experts whose scores are {gap} too low by {of}"
    return f"{detail}, and its types explain {most:.0%} at most"


def _values(values: Mapping[str, Any] | None, named: str) -> str | None:
    if values is None:
        return None
    if values["missing"]:
        return f"its file lacks {values['missing'][0]} of the 16-bit weights"
    bits = nominal_bits(named) or 1
    bound = next(bound for least, bound in ROW_WRONG_ABOVE if bits >= least)
    for kind, error, most in (("matrices", "row_error", bound), ("vectors", "error", VECTOR_WRONG_ABOVE)):
        for tensor in values[kind]:
            if not tensor[error] <= most:
                what = f"a row of {tensor['name']}" if kind == "matrices" else str(tensor["name"])
                detail = f"{what} is {tensor[error]:.0%} off the 16-bit weights"
                return f"{detail}, and {named} explains {most:.0%} at most"
    return None


def too_far(depths: Sequence[Depth], bound: float, of: str, explains: str) -> str | None:
    """Where logits are further off than `bound`, which is what `explains` the difference; None: nowhere."""
    worst = max(depths, key=lambda depth: depth["relative_error"] or 0.0)
    if (error := worst["relative_error"] or 0.0) <= bound:
        return None
    detail = f"logits are {error:.0%} off {of} up to n = {worst['n']}"
    return f"{detail}, and {explains} {bound:.0%} at most"


def depths_wrong(depths: Sequence[Depth], bound: float, of: str) -> str | None:
    """Why logits are not those of the same weights; None if arithmetic explains the difference."""
    if wrong := too_far(depths, bound, of, "arithmetic explains"):
        return wrong
    known = [(scale, depth["positions"]) for depth in depths if (scale := depth.get("scale")) is not None]
    if not known:  # an older record
        return None
    most = SCALE_16_BITS if bound <= SIXTEEN_BITS else SCALE
    off = sum(scale * many for scale, many in known) / sum(many for _, many in known) - 1
    if abs(off) <= most:
        return None
    detail = f"logits are {abs(off):.1%} {'larger' if off > 0 else 'smaller'} than those of {of}"
    return f"{detail}, and arithmetic explains {most:.2%} at most"
