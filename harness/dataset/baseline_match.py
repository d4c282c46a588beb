"""Match rows with baseline rows of the same model, stack and variant, by our names or the study's."""

from __future__ import annotations

from collections.abc import Sequence

from harness.dataset.study import Row, Study

Key = tuple[str, str, str]

# (stack, variant) in configs -> the variant in results/published. Left out: variants that measure something
# else (a static cache, fp4, nested scales, another library), and bits or kernels that the study lacks.
PUBLISHED = {
    ("hf", "bf16-dynamic"): "bf16",
    ("bnb", "int8-dynamic"): "int8",
    ("bnb", "nf4-dynamic"): "int4",
    ("gptq", "exllamav2-4"): "int4-exllamav2",
    ("gptq", "marlin-4"): "int4-marlin",
    ("autoawq", "gemm-fuse_layers=true"): "gemm-fused",
    ("autoawq", "exllama-fuse_layers=true"): "exllama-fused",
    ("autoawq", "exllamav2-fuse_layers=true"): "exllamav2-fused",
}


def baseline_rows(rows: Sequence[Row], others: Sequence[Row]) -> dict[str, Row]:
    """By name: the other row of the same model, stack and variant, if any."""
    known = {key(other): other for other in others}
    reported = {at: other for at, other in known.items() if other.get("kind") == "reported"}
    found = {str(row["name"]): known.get(key(row)) or reported.get(published(row)) for row in rows}
    return {name: other for name, other in found.items() if other is not None}


def matched(study: Study, ours: Sequence[Row], reported: Sequence[Row]) -> tuple[dict[str, Row], list[Row]]:
    """By name of our row, the published row of the same variant, from the baseline or the study's reported
    rows; and the reported rows without a match."""
    theirs = {name: row for name, row in study.baseline.items() if row.get("kind") == "reported"}
    theirs |= baseline_rows(ours, reported)
    taken = {theirs[name]["name"] for row in ours if (name := str(row["name"])) in theirs}
    return theirs, [row for row in reported if row["name"] not in taken]


def key(row: Row) -> Key:
    model, stack, variant = (str(row.get(name)).lower() for name in ("model", "stack", "variant"))
    return model, stack, variant


def published(row: Row) -> Key:
    """The key of the published study's row for this variant, if there is one."""
    model, stack, variant = key(row)
    return model, stack, PUBLISHED.get((stack, variant), variant)
