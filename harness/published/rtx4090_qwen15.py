"""The published study's theory tables, recomputed from the formulas, in the printed form. Pure.

Study: single-user inference of Qwen1.5 on one RTX 4090 (noooop/noooop.github.io, folder benchmarking/, CC0).
Every table has the columns of its CSV, and every cell is text. Where the source differs from its own
formulas, SLIPS has the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from harness import data
from harness.theory import demand, floors, gguf_types, passes
from harness.theory.families import SHAPES
from harness.theory.machines import MACHINES
from harness.theory.shapes import (
    Shape,
    active_params,
    kv_bytes_per_token,
    kv_elements_per_token,
    layer_params,
    lm_head_params,
    parameters,
)
from harness.theory.tensors import Tensor
from harness.theory.units import PUBLISHED

Table = list[dict[str, str]]

KI, MI, GI = 2**10, 2**20, 2**30
MODELS = ("0.5B", "1.8B", "4B", "7B", "14B", "32B-mha", "32B", "72B", "110B-mha", "110B")
MEASURED = ("0.5B", "1.8B", "4B", "7B", "14B", "32B")  # the sizes whose files were run
QUANTS = ("q8_0", "q6_k", "q5_k_m", "q5_0", "q4_k_m", "q4_0", "q3_k_m", "q2_k")
CARD = MACHINES["rtx-4090"]
CEILING = floors.Ceiling(
    CARD.bandwidth_bytes_per_s / 1e9 * PUBLISHED.giga, CARD.rates[CARD.rate].value / 1e12 * PUBLISHED.tera
)

# (table, row, column): the printed value, and why the formulas give another.
SLIPS = {
    (each["table"], each["row"], each["column"]): (each["printed"], each["why"])
    for each in data.rows("study_slips.csv")
}


def model_family() -> Table:
    """Shapes, and parameters in Gi."""
    return [
        {
            "model": name,
            "vocab_size": str(shape.vocab_size),
            "hidden_size": str(shape.hidden_size),
            "num_hidden_layers": str(shape.layers),
            "intermediate_size": str(shape.intermediate_size),
            "n_groups": str(shape.heads // shape.kv_heads),
            "layer_params_gi": f"{layer_params(shape, PUBLISHED.norms) / GI:.2f}",
            "lm_head_params_gi": f"{lm_head_params(shape) / GI:.2f}",
            "active_params_gi": f"{active_params(shape, PUBLISHED.norms) / GI:.2f}",
            "total_params_gi": f"{parameters(shape, PUBLISHED.norms) / GI:.2f}",
        }
        for name, shape in _shapes(MODELS)
    ]


def kv_cache() -> Table:
    """Elements of KV cache of 1024 tokens, in Mi."""
    return [
        {"model": name, "kv_params_per_1024_tokens_mi": f"{kv_elements_per_token(shape) * KI / MI:.0f}"}
        for name, shape in _shapes(MODELS)
    ]


def max_ctx_theory_4090() -> Table:
    """Tokens of 16-bit KV cache that fit in 24 GiB besides the weights without the embedding."""

    def cell(shape: Shape, bits: int) -> str:
        needs = demand.of_bits(shape, bits, norms=PUBLISHED.norms)
        tokens = floors.max_ctx(CARD.memory_bytes, needs.weight_bytes_per_token, needs.kv_bytes_per_token)
        return "oom" if tokens is None else str(tokens)

    return [
        {"model": name} | {f"w{bits}kv16": cell(shape, bits) for bits in (16, 8, 4, 6)}
        for name, shape in _shapes(MODELS)
    ]


def prefill_knees_4090() -> Table:
    """Prompt lengths between which prefill is compute-bound."""
    rows = []
    for (name, shape), bits, lm_head in product(_shapes(MODELS), (16, 8, 4), ("every", "last")):
        needs = demand.of_bits(shape, bits, norms=PUBLISHED.norms)
        found = passes.prefill_knees(needs, CEILING, lm_head) or (None, None)
        first, second = ("" if knee is None else str(PUBLISHED.knee(knee)) for knee in found)
        rows.append(
            {
                "model": name,
                "weight_bits": str(bits),
                "lm_head_on_tokens": lm_head,
                "compute_bound_from": first,
                "kv_bound_from": second,
            }
        )
    return rows


def decode_theory_4090() -> Table:
    """W in tokens per ms, and B in ms: the latency of the first token."""
    rows = []
    for (name, shape), bits in product(_shapes(MODELS), (16, 8, 4)):
        needs = demand.of_bits(shape, bits, norms=PUBLISHED.norms)
        W = floors.W_tokens_per_s(needs, CEILING)
        assert W is not None  # a growing cache
        first_s = floors.decode_floor_s(needs, CEILING, n=1)
        rows.append(
            {
                "model": name,
                "weight_bits": str(bits),
                "W_tokens_per_ms": f"{W / 1e3:.0f}",
                "B_ms": f"{first_s * 1e3:.2f}",
            }
        )
    return rows


def gguf_kv_buffer_1024() -> Table:
    """16-bit KV cache of 1024 tokens, in MiB."""
    return [
        {"model": name, "kv_buffer_mib": f"{kv_bytes_per_token(shape) * KI / MI:.2f}"}
        for name, shape in _shapes(MEASURED)
    ]


def gguf_bpw() -> Table:
    """All tensors of a file, as llama.cpp prints their size, and bits per weight; oom beyond 24 GiB."""
    rows = []
    for name, quant, tensors in _files():
        size = sum(tensor.bytes for tensor in tensors)
        fits = _on_card(tensors) <= CARD.memory_bytes
        unit, of_unit = ("MiB", MI) if size < GI else ("GiB", GI)
        printed_mib = round(size / of_unit, 2) * of_unit / MI
        bpw = size * 8 / sum(tensor.elements for tensor in tensors)
        rows.append(
            {
                "model": name,
                "gguf_type": quant,
                "size_mib": f"{printed_mib:g}" if fits else "oom",
                "bpw": f"{bpw:.2f}" if fits else "oom",
                "printed_unit": unit if fits else "",
            }
        )
    return rows


def gguf_model_buffer_4090() -> Table:
    """All tensors but the input embedding, which stays on the CPU, in GiB; oom beyond 24."""
    rows = []
    for name, quant, tensors in _files():
        size = _on_card(tensors)
        printed = f"{size / GI:.2f}" if size <= CARD.memory_bytes else "oom"
        rows.append({"model": name, "gguf_type": quant, "cuda_buffer_gb": printed})
    return rows


TABLES: dict[str, Callable[[], Table]] = {
    table.__name__: table
    for table in (
        *(model_family, kv_cache, max_ctx_theory_4090, prefill_knees_4090, decode_theory_4090),
        *(gguf_bpw, gguf_model_buffer_4090, gguf_kv_buffer_1024),
    )
}


def _shapes(names: tuple[str, ...]) -> list[tuple[str, Shape]]:
    return [(name, SHAPES[f"qwen1.5-{name.lower()}"]) for name in names]


def _files() -> list[tuple[str, str, list[Tensor]]]:
    return [
        (name, quant, gguf_types.quantized(shape, quant, as_published=True))
        for (name, shape), quant in product(_shapes(MEASURED), QUANTS)
    ]


def _on_card(tensors: list[Tensor]) -> int:
    return sum(tensor.bytes for tensor in tensors if tensor.part != "embedding")
