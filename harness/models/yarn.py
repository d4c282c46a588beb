"""YaRN's rotary frequencies in llama.cpp, beside those of transformers.

llama.cpp computes them with the ends of their range rounded to whole dimensions; transformers does not where
config.json says `truncate: false`, as gpt-oss's does. Formulas: ggml_rope_yarn_corr_dims and rope_yarn of
ggml; _compute_yarn_parameters of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

TRUNCATED = "harness.yarn_truncate"
"""The key, after the architecture's name, for `truncate` in a GGUF made here: 1 or 0."""
UNTRUNCATED = "gpt-oss"  # every published config.json of this architecture has `truncate: false`
_FAST, _SLOW = 32.0, 1.0  # rotations; beta_fast and beta_slow of both


def yarn_difference(metadata: Mapping[str, Any]) -> float:
    """The largest share by which a frequency in llama.cpp is off that of the model's config.json; 0: none is.
    `metadata`: of a GGUF."""
    arch = metadata.get("general.architecture")

    def of(key: str) -> Any:
        return metadata.get(f"{arch}.{key}")

    truncated = of(TRUNCATED)
    if of("rope.scaling.type") != "yarn" or (arch != UNTRUNCATED if truncated is None else truncated):
        return 0.0
    named = ("rope.dimension_count", "rope.freq_base", "rope.scaling.original_context_length")
    numbers = (of(named[0]) or of("attention.key_length"), *map(of, named[1:]), of("rope.scaling.factor"))
    if not all(
        isinstance(number, (int, float)) and math.isfinite(number) and number > 1 for number in numbers
    ):
        return 0.0  # llama.cpp refuses it, or does not scale
    dims, base, context, factor = numbers

    def end(rotations: float) -> float:
        return float(dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base)))

    low, high = end(_FAST), end(_SLOW)
    exact = _scales(int(dims), factor, low, high)
    rounded = _scales(int(dims), factor, math.floor(low), math.ceil(high))
    return max(abs(mine / theirs - 1) for mine, theirs in zip(rounded, exact, strict=True))


def _scales(dims: int, factor: float, low: float, high: float) -> list[float]:
    """The factor on the frequency of each pair of dimensions."""
    first, last = max(low, 0), min(high, dims - 1)
    shares = (min(1.0, max(0.0, (i - first) / max(0.001, last - first))) for i in range(max(1, dims // 2)))
    return [1 - share + share / factor for share in shares]
