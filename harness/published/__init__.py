"""Published figures, recomputed from the formulas of `harness.theory`: `harness theory --published`. Pure.

The study's measurements are records: results/published/.
"""

from harness.published import llama_arithmetic, rtx4090_qwen15

TABLES = rtx4090_qwen15.TABLES | llama_arithmetic.TABLES
