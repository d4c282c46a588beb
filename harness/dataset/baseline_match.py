"""Which row stands beside which: those of the same model, stack and variant, by our names or the published
study's."""

from __future__ import annotations

from collections.abc import Sequence

from harness.dataset.study import Row, Study

Key = tuple[str, str, str]

# Stack and variant as configs name them -> the variant in results/published. Not there: whatever differs in
# what is measured (a static cache, fp4, nested scales, another library), and bits or kernels the study lacks.
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


def beside(rows: Sequence[Row], others: Sequence[Row]) -> dict[str, Row]:
    """By name: the other row of the same model, stack and variant, where there is one."""
    known = {key(other): other for other in others}
    reported = {at: other for at, other in known.items() if other.get("kind") == "reported"}
    found = {str(row["name"]): known.get(key(row)) or reported.get(published(row)) for row in rows}
    return {name: other for name, other in found.items() if other is not None}


def matched(study: Study, ours: Sequence[Row], reported: Sequence[Row]) -> tuple[dict[str, Row], list[Row]]:
    """By name of ours: what was published of the same variant, in the baseline or among the reported rows of
    the study; and those of the latter that stand beside none."""
    theirs = {name: row for name, row in study.baseline.items() if row.get("kind") == "reported"}
    theirs |= beside(ours, reported)
    taken = {theirs[name]["name"] for row in ours if (name := str(row["name"])) in theirs}
    return theirs, [row for row in reported if row["name"] not in taken]


def key(row: Row) -> Key:
    model, stack, variant = (str(row.get(name)).lower() for name in ("model", "stack", "variant"))
    return model, stack, variant


def published(row: Row) -> Key:
    """The key that the published study's row of this variant has, if it has one."""
    model, stack, variant = key(row)
    return model, stack, PUBLISHED.get((stack, variant), variant)
