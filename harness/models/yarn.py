"""YaRN's rotary frequencies, which llama.cpp computes with the ends of its range rounded to whole dimensions.

transformers does not round them where config.json says `truncate: false`, as gpt-oss's does. Pure.
Formulas: ggml_rope_yarn_corr_dims and rope_yarn of ggml; _compute_yarn_parameters of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

TRUNCATED = "harness.yarn_truncate"
"""The key, after the architecture's name, by which a GGUF made here says it: 1 or 0."""
UNTRUNCATED = "gpt-oss"  # the architecture of which every published config.json says so
_FAST, _SLOW = 32.0, 1.0  # rotations; beta_fast and beta_slow of both


def difference(metadata: Mapping[str, Any]) -> float:
    """The largest share by which a frequency in llama.cpp is off that of the model's config.json; 0: none is.
    `metadata`: of a GGUF."""
    arch = metadata.get("general.architecture")

    def of(key: str) -> Any:
        return metadata.get(f"{arch}.{key}")

    truncated = of(TRUNCATED)
    if of("rope.scaling.type") != "yarn" or (arch != UNTRUNCATED if truncated is None else truncated):
        return 0.0
    named = ("rope.dimension_count", "rope.freq_base", "rope.scaling.original_context_length")
    given = (of(named[0]) or of("attention.key_length"), *map(of, named[1:]), of("rope.scaling.factor"))
    if not all(isinstance(each, (int, float)) and math.isfinite(each) and each > 1 for each in given):
        return 0.0  # llama.cpp refuses it, or does not scale
    dims, base, context, factor = given

    def end(rotations: float) -> float:
        return float(dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base)))

    low, high = end(_FAST), end(_SLOW)
    exact = _scales(int(dims), factor, low, high)
    rounded = _scales(int(dims), factor, math.floor(low), math.ceil(high))
    return max(abs(mine / theirs - 1) for mine, theirs in zip(rounded, exact, strict=True))


def _scales(dims: int, factor: float, low: float, high: float) -> list[float]:
    """What each pair of dimensions' frequency is multiplied by."""
    first, last = max(low, 0), min(high, dims - 1)
    shares = (min(1.0, max(0.0, (i - first) / max(0.001, last - first))) for i in range(max(1, dims // 2)))
    return [1 - share + share / factor for share in shares]
