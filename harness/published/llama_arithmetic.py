"""The arithmetic of "How is LLaMa.cpp possible?": published figures and ours. Pure.

Source: Finbarr Timbers, https://finbarr.ca/how-is-llama-cpp-possible/ (2023). It takes 2 P bytes-per-weight
as the bytes of a token. Each weight is read once, so its tokens per second are half of the bandwidth limit;
the 2 in 2 P counts operations, a multiplication and an addition each. The Raspberry Pi's figure
follows from neither form.
"""

from __future__ import annotations

from harness import data
from harness.theory import demand, floors, passes
from harness.theory.families import SHAPES
from harness.theory.machines import MACHINES
from harness.theory.shapes import kv_elements_per_token, parameters

BITS = 4
CONTEXT = 2048  # LLaMA's

Table = list[dict[str, float | str | None]]

_MODELS = ("llama-7b", "llama-13b", "llama-33b", "llama-65b")


def speeds() -> Table:
    """Tokens per second at 4 bits: published, and as people saw them.

    `article_formula`: bandwidth / (2 P / 2 bytes), P as in the model's name. `by_memory`: bandwidth / (P / 2
    bytes), P exact. `by_compute`: rate / 2 P. `floor`: ours, the lesser of the two, no input embedding.
    """
    rows: Table = []
    for each in data.rows("llama_speeds.csv"):
        machine, shape = MACHINES[each["machine"]], SHAPES[each["model"]]
        bandwidth, rate = machine.bandwidth.value, machine.rates[machine.rate].value
        needs = demand.of_bits(shape, BITS)
        step_s = max(needs.weight_bytes_per_token / bandwidth, needs.flops_per_token / rate)
        rows.append(
            {
                "machine": each["machine"],
                "model": each["model"],
                "published_tok_s": _number(each["published_tok_s"]),
                "article_formula_tok_s": bandwidth / (2 * float(each["nominal_parameters"]) * BITS / 8),
                "by_memory_tok_s": bandwidth / (parameters(shape) * BITS / 8),
                "by_compute_tok_s": rate / (2 * parameters(shape)),
                "floor_tok_s": 1 / step_s,
                "seen_tok_s": _number(each["seen_tok_s"]),
            }
        )
    return rows


def _number(cell: str) -> float | None:
    return None if not cell else float(cell) if "." in cell else int(cell)


def memory() -> Table:
    """GB at 4 bits: weights, and the KV cache of 2048 tokens. The article prints 16.25 GB and 1.33 GB."""
    return [
        {
            "model": model,
            "weights_gb": parameters(SHAPES[model]) * BITS / 8 / 1e9,
            "kv_gb": kv_elements_per_token(SHAPES[model]) * CONTEXT * BITS / 8 / 1e9,
        }
        for model in _MODELS
    ]


def ratios() -> Table:
    """An A100 over an M2 (the article: computing some 200, bandwidth 20), and its batch of 161."""
    a100, m2 = MACHINES["a100-80gb-pcie"], MACHINES["apple-m2"]
    ceiling = floors.Ceiling(a100.bandwidth.value, a100.rates["fp16"].value)
    return [
        {
            "bandwidth_ratio": a100.bandwidth.value / m2.bandwidth.value,
            "fp16_ratio": a100.rates["fp16"].value / m2.rates[m2.rate].value,
            "int4_over_m2_ratio": a100.rates["int4"].value / m2.rates[m2.rate].value,
            "a100_fp16_compute_bound_batch": passes.compute_bound_batch(
                demand.of_bits(SHAPES["llama-7b"], 16), ceiling
            ),
        }
    ]


TABLES = {"llama_speeds": speeds, "llama_memory": memory, "llama_ratios": ratios}
