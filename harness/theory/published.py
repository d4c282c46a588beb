"""Published theory tables, recomputed in the printed form: `harness theory --published`. Pure.

Study: single-user inference of Qwen1.5 on one RTX 4090 (noooop/noooop.github.io, folder benchmarking/, CC0);
its measurements are records, in results/published/. Every table has the columns of its CSV, and every cell is
text. Where the source differs from its own formulas, SLIPS has the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from harness.base import data
from harness.theory import floors, ggml_quants
from harness.theory.decoder import (
    Decoder,
    active_params,
    kv_elements_per_token,
    layer_params,
    lm_head_params,
    parameters,
)
from harness.theory.floors import PUBLISHED
from harness.theory.hf_config import SHAPES
from harness.theory.machines import MACHINES
from harness.theory.tensors import Tensor

StudyTable = list[dict[str, str]]
ArticleTable = list[dict[str, float | str | None]]

KI, MI, GI = 2**10, 2**20, 2**30
MODELS = ("0.5B", "1.8B", "4B", "7B", "14B", "32B-mha", "32B", "72B", "110B-mha", "110B")
MEASURED = ("0.5B", "1.8B", "4B", "7B", "14B", "32B")  # the sizes whose files were run
QUANTS = ("q8_0", "q6_k", "q5_k_m", "q5_0", "q4_k_m", "q4_0", "q3_k_m", "q2_k")
CARD = MACHINES["rtx-4090"]
CEILING = floors.Ceiling(
    CARD.bandwidth_bytes_per_s / 1e9 * PUBLISHED.giga, CARD.rates[CARD.rate].value / 1e12 * PUBLISHED.tera
)

# (table, row, column): why the formulas give another value than the one printed.
SLIPS = {(each["table"], each["row"], each["column"]): each["why"] for each in data.rows("study_slips.csv")}


def model_family() -> StudyTable:
    """Shapes, and parameters in Gi."""
    return [
        {
            "model": name,
            "vocab_size": str(shape.vocab_size),
            "hidden_size": str(shape.hidden_size),
            "num_hidden_layers": str(shape.count),
            "intermediate_size": str(shape.ffn),
            "n_groups": str(shape.heads // shape.kv_heads),
            "layer_params_gi": f"{layer_params(shape, PUBLISHED.norms) / GI:.2f}",
            "lm_head_params_gi": f"{lm_head_params(shape) / GI:.2f}",
            "active_params_gi": f"{active_params(shape, PUBLISHED.norms) / GI:.2f}",
            "total_params_gi": f"{parameters(shape, PUBLISHED.norms) / GI:.2f}",
        }
        for name, shape in _shapes(MODELS)
    ]


def kv_cache() -> StudyTable:
    """Elements of KV cache of 1024 tokens, in Mi."""
    return [
        {"model": name, "kv_params_per_1024_tokens_mi": f"{kv_elements_per_token(shape) * KI / MI:.0f}"}
        for name, shape in _shapes(MODELS)
    ]


def max_ctx_theory_4090() -> StudyTable:
    """Tokens of 16-bit KV cache that fit in 24 GiB besides the weights without the embedding."""

    def cell(shape: Decoder, bits: int) -> str:
        needs = floors.demand_of_bits(shape, bits, norms=PUBLISHED.norms)
        tokens = floors.max_ctx(CARD.memory_bytes, needs.weight_bytes_per_token, needs.kv_bytes_per_token)
        return "oom" if tokens is None else str(tokens)

    return [
        {"model": name} | {f"w{bits}kv16": cell(shape, bits) for bits in (16, 8, 4, 6)}
        for name, shape in _shapes(MODELS)
    ]


def prefill_knees_4090() -> StudyTable:
    """Prompt lengths between which prefill is compute-bound."""
    rows = []
    for (name, shape), bits, lm_head in product(_shapes(MODELS), (16, 8, 4), ("every", "last")):
        needs = floors.demand_of_bits(shape, bits, norms=PUBLISHED.norms)
        knees = floors.prefill_knees(needs, CEILING, lm_head) or (None, None)
        first, second = ("" if knee is None else str(PUBLISHED.knee(knee)) for knee in knees)
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


def decode_theory_4090() -> StudyTable:
    """W in tokens per ms, and B in ms: the latency of the first token."""
    rows = []
    for (name, shape), bits in product(_shapes(MODELS), (16, 8, 4)):
        needs = floors.demand_of_bits(shape, bits, norms=PUBLISHED.norms)
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


def gguf_kv_buffer_1024() -> StudyTable:
    """16-bit KV cache of 1024 tokens, in MiB."""
    return [
        {"model": name, "kv_buffer_mib": f"{2 * kv_elements_per_token(shape) * KI / MI:.2f}"}
        for name, shape in _shapes(MEASURED)
    ]


def gguf_bpw() -> StudyTable:
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


def gguf_model_buffer_4090() -> StudyTable:
    """All tensors but the input embedding, which stays on the CPU, in GiB; oom beyond 24."""
    rows = []
    for name, quant, tensors in _files():
        size = _on_card(tensors)
        printed = f"{size / GI:.2f}" if size <= CARD.memory_bytes else "oom"
        rows.append({"model": name, "gguf_type": quant, "cuda_buffer_gb": printed})
    return rows


STUDY_TABLES: dict[str, Callable[[], StudyTable]] = {
    table.__name__: table
    for table in (
        *(model_family, kv_cache, max_ctx_theory_4090, prefill_knees_4090, decode_theory_4090),
        *(gguf_bpw, gguf_model_buffer_4090, gguf_kv_buffer_1024),
    )
}


class Slip(NamedTuple):
    """A cell that the study printed as `printed`, and the formulas give as `ours`. `why`: None: not known."""

    table: str
    row: str
    column: str
    printed: str
    ours: str
    why: str | None


def compared(table: str) -> tuple[int, list[Slip]]:
    """The number of cells of a study's table, and those that differ from what it printed."""
    ours, printed = STUDY_TABLES[table](), data.rows(f"study_tables/{table}.csv")
    differ = [
        Slip(table, row["model"], column, cell, mine[column], SLIPS.get((table, row["model"], column)))
        for mine, row in zip(ours, printed, strict=True)
        for column, cell in row.items()
        if mine[column] != cell
    ]
    return sum(map(len, printed)), differ


def _shapes(names: tuple[str, ...]) -> list[tuple[str, Decoder]]:
    return [(name, SHAPES[f"qwen1.5-{name.lower()}"]) for name in names]


def _files() -> list[tuple[str, str, Sequence[Tensor]]]:
    return [
        (name, quant, ggml_quants.quantized(shape, quant, as_published=True))
        for (name, shape), quant in product(_shapes(MEASURED), QUANTS)
    ]


def _on_card(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.bytes for tensor in tensors if tensor.part != "embedding")


# "How is LLaMa.cpp possible?" by Finbarr Timbers, https://finbarr.ca/how-is-llama-cpp-possible/ (2023), takes
# 2 P bytes-per-weight as the bytes of a token. Each weight is read once, so its tokens per second are half of
# the bandwidth limit; the 2 in 2 P counts operations, a multiplication and an addition each. The Raspberry
# Pi's figure follows from neither form.
ARTICLE_BITS = 4


def llama_speeds() -> ArticleTable:
    """Tokens per second at 4 bits: published, and as people saw them.

    `article_formula`: bandwidth / (2 P / 2 bytes), P as in the model's name. `by_memory`: bandwidth / (P / 2
    bytes), P exact. `by_compute`: rate / 2 P. `floor`: ours, the lesser of the two, no input embedding.
    """

    def number(cell: str) -> float | None:
        return None if not cell else float(cell) if "." in cell else int(cell)

    rows: ArticleTable = []
    for cells in data.rows("llama_speeds.csv"):
        machine, shape = MACHINES[cells["machine"]], SHAPES[cells["model"]]
        bandwidth, rate = machine.bandwidth.value, machine.rates[machine.rate].value
        weights = floors.demand_of_bits(shape, ARTICLE_BITS).without_context
        of_name = float(cells["nominal_parameters"])
        rows.append(
            {
                "machine": cells["machine"],
                "model": cells["model"],
                "published_tok_s": number(cells["published_tok_s"]),
                "article_formula_tok_s": bandwidth / (2 * of_name * ARTICLE_BITS / 8),
                "by_memory_tok_s": bandwidth / (parameters(shape) * ARTICLE_BITS / 8),
                "by_compute_tok_s": rate / (2 * parameters(shape)),
                "floor_tok_s": 1 / floors.decode_floor_s(weights, floors.Ceiling(bandwidth, rate), 1),
                "seen_tok_s": number(cells["seen_tok_s"]),
            }
        )
    return rows


TABLES: dict[str, Callable[[], StudyTable | ArticleTable]] = {**STUDY_TABLES, "llama_speeds": llama_speeds}
