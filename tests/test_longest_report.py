"""The chapter on the longest context: matched rows and theory, from the real records of
the published study and made-up searches."""

import csv
import re
from dataclasses import replace
from typing import Any

import pytest
from conftest import ROOT, STUDY_TABLES

from harness import config
from harness.analysis.columns import Search
from harness.analysis.figures import empty_cell
from harness.dataset import matching
from harness.dataset.study import Study
from harness.report import closing, longest, summary

THEORY = STUDY_TABLES / "max_ctx_theory_4090.csv"
GIB = 2**30
# Written by hand: variants as configs/4090-qwen15.yaml names them, and the study's rows of longest contexts.
PUBLISHED = {
    ("llamacpp", "q8_0"): "q8_0.gguf",
    ("llamacpp", "q6_k"): "q6_k.gguf",
    ("llamacpp", "q5_k_m"): "q5_k_m.gguf",
    ("llamacpp", "q5_0"): "q5_0.gguf",
    ("llamacpp", "q4_k_m"): "q4_k_m.gguf",
    ("llamacpp", "q4_0"): "q4_0.gguf",
    ("llamacpp", "q3_k_m"): "q3_k_m.gguf",
    ("llamacpp", "q2_k"): "q2_k.gguf",
    ("hf", "bf16-dynamic"): "bfloat16",
    ("bnb", "int8-dynamic"): "bnb int8",
    ("bnb", "nf4-dynamic"): "bnb int4",
    ("gptq", "exllamav2-4"): "GPTQ-Int4",
    ("gptq", "marlin-4"): "GPTQ-Int4 use_marlin",
    ("gptq", "cuda-8"): None,  # the study has no row of it
    ("autoawq", "gemm"): "AWQ gemm fuse_layers False",
    ("autoawq", "gemm-fuse_layers=true"): "AWQ gemm fuse_layers True",
    ("autoawq", "exllama"): "AWQ use_exllama fuse_layers False",
    ("autoawq", "exllama-fuse_layers=true"): "AWQ use_exllama fuse_layers True",
    ("autoawq", "exllamav2"): "AWQ use_exllama_v2 fuse_layers False",
    ("autoawq", "exllamav2-fuse_layers=true"): "AWQ use_exllama_v2 fuse_layers True",
}
OTHERS = [
    *(("hf", "bf16-static"), ("hf", "fp16-dynamic"), ("bnb", "fp4-dynamic"), ("bnb", "nf4-static")),
    *(("bnb", "nf4-dynamic-double_quant=true"), ("llamacpp", "q4_0-flash_attn=true")),
    *(("gptqm", "awq-gemm-4"), ("autoawq", "torch"), ("autoawq", "gemm-fuse_layers=true-max_seq_len=2048")),
]


def named(stack: str, variant: str, model: str = "qwen1.5-1.8b", **more: Any) -> dict[str, Any]:
    row = {"name": f"{model} {stack} {variant}", "model": model, "stack": stack, "variant": variant}
    row |= {"cell": f"{model}.{stack}.{variant}", "machine": "m", "device": "cpu"}
    return empty_cell() | row | more


def search(variant: str = "q4_0", n_ctx: int | None = 4096, **more: Any) -> dict[str, Any]:
    """As analysis.searches has it: q4_0 of 0.5B in a budget of 1 GiB."""
    said = {
        "kind": "searched",
        "status": "ok",
        "weights": "synthetic",
        "memory_budget_bytes": GIB,
        "budget_means": "cgroup v1",
        "limit_bytes": GIB,
        "limit_stated": True,
        "granule": 256,
        "predicted_n_ctx": n_ctx,
        "verified_n_ctx": n_ctx,
        "allocated_n_ctx": n_ctx,
        "verified_by": "decode",
        "live_probes": 2,
        "limit_reason": "at 4352 tokens: killed at the memory budget of 1.00 GiB (cgroup v1)",
        "not_filled": None,
        "search_s": 8.4,
        "fill_s": 31.0,
        "model_bytes": 389_045_248,
        "weight_bytes_per_token": 301_530_112,
        "kv_bytes_per_token": 98_304.0,
    }
    unknown = dict.fromkeys(Search.__required_keys__) | {"flags": []}
    return unknown | named("llamacpp", variant, "qwen1.5-0.5b") | said | more


def grown(**more: Any) -> dict[str, Any]:
    said = {
        "kind": "measured",
        "workload": "grow",
        "status": "ok",
        "max_ctx": 7000,
        "max_ctx_is_target": False,
    }
    sizes = {"model_bytes": 4e9, "weight_bytes_per_token": 3e9, "kv_bytes_per_token": 196_608.0}
    row = named("hf", "bf16-dynamic", device="cuda", device_memory_bytes=8 * GIB)
    return row | said | sizes | more


def of(found: Any, **wanted: str) -> Any:
    (row,) = (row for row in found if all(row[name] == value for name, value in wanted.items()))
    return row


def test_every_variant_of_the_studys_config_stands_beside_its_own_row_of_the_study(published):
    variants = [(v.stack, v.name) for v in config.load(ROOT / "configs" / "4090-qwen15.yaml").variants]
    assert set(variants) == set(PUBLISHED)
    ours = [named(*variant) for variant in (*variants, *OTHERS)]
    found = matching.baseline_rows(ours, published.cells)
    tables = {each.record["cell"]: each.record["source"]["tables"] for each in published.stored}
    for row in ours:
        expected = PUBLISHED.get((row["stack"], row["variant"]))
        theirs = found.get(row["name"])
        where = theirs and tables[theirs["cell"]]["max_ctx_measured_4090.csv"]
        assert where == (expected and f"1.8B, {expected}"), row["name"]


def test_the_same_name_goes_before_the_studys(published):
    own = named("hf", "bf16-dynamic", kind="measured", B_ms=1.0)
    ours = [named("hf", "bf16-dynamic")]
    assert matching.baseline_rows(ours, [*published.cells, own]) == {own["name"]: own}
    assert matching.baseline_rows(ours, [named("hf", "bf16", kind="measured")]) == {}


def test_the_theory_of_the_published_rows_is_the_published_theory(published):
    with THEORY.open(encoding="utf-8", newline="") as file:
        table = {f"qwen1.5-{row['model'].lower()}": row for row in csv.DictReader(file)}
    compared, none = 0, []
    for row in longest.context_rows(published):
        bits = {"bf16": 16, "int8": 8}.get(str(row["variant"]), 4)
        if row["stack"] == "llamacpp" or row["theory_n_ctx"] is None:
            continue
        compared += 1
        printed = table[str(row["model"])][f"w{bits}kv16"]
        if printed == "oom":
            assert row["theory_n_ctx"] == 0
            none.append(f"{row['model']} {row['stack']}")
        else:  # the study leaves the norms' weights out
            assert int(printed) - 3 <= row["theory_n_ctx"] <= int(printed), row["name"]
    assert compared > 40
    assert sorted(none) == ["qwen1.5-14b hf", "qwen1.5-32b bnb", "qwen1.5-32b hf"]


def test_published_lengths_targets_and_failures_are_the_studys(published):
    found = longest.context_rows(published)
    assert len(found) == 124
    rows = [row | {"at": f"{row['model'][8:]} {row['stack']} {row['variant']}"} for row in found]
    q2_k = of(rows, at="32b llamacpp q2_k")
    assert (q2_k["n_ctx"], q2_k["is_target"]) == (36_076, False)
    assert (q2_k["memory_bytes"], q2_k["memory_is"]) == (24 * GIB, "rtx-4090")
    assert q2_k["share"] == pytest.approx(36_076 / 52_757, abs=1e-4)
    assert of(rows, at="0.5b hf bf16")["is_target"]
    longest_text = longest.COLUMNS[0].text
    assert longest_text(of(rows, at="14b hf bf16")) == "oom"
    assert longest_text(of(rows, at="1.8b gptq int4-marlin")).startswith("error: exception")
    assert not [row for row in rows if row["variant"] in ("fp16", "gemm-fused-max_seq_len=2048")]
    assert all(row["how"] == "published" for row in rows)


def test_what_is_more_than_the_memory_holds_is_said_to_be_not_held_and_is_not_the_longest(published):
    rows = [row for row in longest.context_rows(published) if row["model"] == "qwen1.5-14b"]
    beyond = [row for row in rows if (row["share"] or 0) > 1]
    assert {row["variant"] for row in beyond} == {"gemm-fused", "exllama-fused", "exllamav2-fused"}
    column = next(column for column in longest.COLUMNS if column.heading == "of theory")
    assert {column.text(row) for row in beyond} == {"429.5%, not held"}
    column = next(column for column in longest.COLUMNS if column.heading == "longest")
    assert {column.text(row) for row in beyond} == {"100,000+, not held"}
    (note,) = longest.notes([(row["name"], row) for row in rows])
    assert note.startswith("longer than the memory holds")
    assert all(variant in note for variant in ("gemm-fused", "exllama-fused", "exllamav2-fused"))
    (sentence,) = (each for each in closing.sentences(published) if each.startswith("qwen1.5-14b: "))
    assert re.search(r"longest context: llamacpp q2_k \([^;)]*20,479 tokens", sentence)


def test_a_search_stands_beside_what_was_published_of_its_variant_and_says_whose_memory_it_is(published):
    study = replace(published, searches=[search()])
    found = longest.context_rows(study)
    assert len(found) == 125, "the published row stands beside the search, and not again"
    row, beside = found[:2]
    assert row["variant"] == beside["variant"] == "q4_0"
    assert (row["n_ctx"], row["how"], row["search"]) == (4096, "decoding", study.searches[0])
    assert (row["memory_bytes"], row["memory_is"]) == (GIB, "budget (cgroup v1)")
    assert row["theory_n_ctx"] == (GIB - 389_045_248) // 98_304  # on a CPU all tensors are there
    assert row["share"] == pytest.approx(4096 / row["theory_n_ctx"])
    assert (beside["n_ctx"], beside["how"]) == (181_744, "published")
    assert beside["share"] == pytest.approx(0.701, abs=1e-3)
    of_baseline = replace(study, cells=[], baseline={row["name"]: published.cells[0]})
    _, theirs = longest.context_rows(of_baseline)
    assert theirs["n_ctx"] == 100_000


@pytest.mark.parametrize(
    ("more", "size", "which"),
    [
        ({"limit_stated": False}, 1.0, "free RAM (cgroup v1)"),
        ({"memory_budget_bytes": None, "limit_stated": False, "budget_means": None}, 1.0, "free RAM"),
        (
            {"memory_budget_bytes": None, "limit_stated": False, "budget_means": None, "device": "GPU-1"}
            | {"limit_bytes": 3 * GIB},
            3.0,
            "free VRAM",
        ),
        ({"memory_budget_bytes": None, "limit_bytes": None, "status": "refused"}, None, None),
    ],
)
def test_memory_is_the_budget_or_what_was_free(more, size, which):
    (row,) = longest.context_rows(Study("t", [], searches=[search(**more)]))
    assert row["memory_bytes"] == (size and size * GIB)
    assert row["memory_is"] == which


def test_on_a_gpu_theory_leaves_the_embedding_out_and_without_sizes_there_is_none():
    (row,) = longest.context_rows(Study("t", [], searches=[search(device="GPU-1")]))
    assert row["theory_n_ctx"] == (GIB - 301_530_112) // 98_304
    unknown = search(kv_bytes_per_token=None)
    assert longest.context_rows(Study("t", [], searches=[unknown]))[0]["theory_n_ctx"] is None
    cell = search() | {"kind": "measured", "workload": "decode"}
    assert longest.context_rows(Study("t", [cell], searches=[unknown]))[0]["theory_n_ctx"] == 6965


def test_a_run_that_grew_is_a_row_and_one_that_decoded_is_none():
    target = grown(name="b", variant="b", max_ctx=20_000, max_ctx_is_target=True, kv_share_of_free=0.49)
    decoded = grown(name="c", variant="c", workload="decode")
    chapter = longest.chapter(Study("t", [grown(), target, decoded]))
    ended, reached = chapter.rows["qwen1.5-1.8b"]
    assert (ended["n_ctx"], ended["how"], ended["memory_is"]) == (7000, "growing", "all VRAM")
    assert ended["theory_n_ctx"] == (8 * GIB - 3_000_000_000) // 196_608
    here = longest.COLUMNS[0]
    assert here.text(ended) == "7,000"
    assert here.text(reached) == "20,000+"
    assert longest.chapter(Study("t", [decoded])) is None


def test_a_variant_searched_and_grown_has_two_rows_with_names_of_their_own():
    both = longest.context_rows(Study("t", [grown()], searches=[search(name=grown()["name"])]))
    assert [row["name"][-10:] for row in both] == ["(decoding)", " (growing)"]


def test_a_search_without_an_answer_tells_what_became_of_it_and_no_length():
    failed = search(status="oom", reasons=["not even 256 tokens fit: killed"], verified_n_ctx=256)
    study = Study("t", [], searches=[failed, search(name="q8", variant="q8_0", verified_by="allocation")])
    chapter = longest.chapter(study)
    row, allocated = chapter.rows["qwen1.5-0.5b"]
    assert (row["n_ctx"], row["how"], row["share"]) == (None, None, None)
    assert longest.COLUMNS[0].text(row) == "oom"
    assert allocated["how"] == "allocation"
    assert chapter.notes["qwen1.5-0.5b"] == [
        "q8, limit: at 4352 tokens: killed at the memory budget of 1.00 GiB (cgroup v1)"
    ]
    assert summary.counts(study) == "2 searches for the longest context: 1 oom, 1 ok."
    assert summary.failures(study) == [("oom: not even 256 tokens fit: killed", [failed["name"]])]
    assert closing.sentences(study) == ["qwen1.5-0.5b q8: a context of 4,096 tokens."]


def test_the_figure_has_a_dot_a_figure_and_opens_what_is_not_proved(published):
    left = search("q8_0", 1536, verified_by="allocation", not_filled="it would take 3 h")
    failed = search("q2_k", None, status="error", reasons=["no driver"])
    study = replace(published, searches=[search(), left, failed])
    (drawn,) = longest.chapter(study).figures["qwen1.5-0.5b"]
    traces = {trace.get("name"): trace for trace in drawn.data}
    assert traces["longest"]["x"][:6] == [4096, 181_744, 1536, 180_468, None, 182_253]
    assert traces["longest"]["marker"]["symbol"][:3] == ["circle", "circle", "circle-open"]
    assert traces["theory"]["x"][0] == 6965
    assert traces[None]["text"][0] == " error"
    assert len(traces["longest"]["y"]) == 22
    low, high = drawn.layout["xaxis"]["range"]
    assert 10**low < 1536 < 259_913 < 10**high
