"""The chapter on memory: parts, rests and slopes of made-up attributions, with the study's sizes."""

import re
from dataclasses import replace
from typing import Any

import numpy as np

from harness.analysis.columns import empty_cell
from harness.dataset.study import MemoryCurve, Study
from harness.report import memory, tables
from harness.report import page as report_page

MIB, GIB = 2**20, 2**30


def moment(total: int | None, rest: int | None, **parts: int | None) -> dict[str, Any]:
    share = rest / total if rest is not None and total else None
    names = ("weights", "kv", "compute", "workspace", "slack", "runtime")
    known = {"total_bytes": total, "unattributed_bytes": rest, "unattributed_share": share}
    known |= {"by_difference": []}
    return known | {"parts": dict.fromkeys(names) | parts}


def attributed(stack: str = "llamacpp", variant: str = "q4_0", **more: Any) -> dict[str, Any]:
    """As analysis.attribution has it."""
    row = {
        "cell": f"qwen1.5-0.5b.{stack}.{variant}",
        "name": f"qwen1.5-0.5b {stack} {variant}",
        "kind": "measured",
        "weights": "synthetic",
        "status": "ok",
        "model": "qwen1.5-0.5b",
        "stack": stack,
        "variant": variant,
        "machine": "m",
        "device": "cpu",
        "file_bytes": 395_000_000,
        "loaded": moment(500_000_000, 5_000_000, weights=389_000_000, kv=26_000_000, runtime=80_000_000),
        "peak": moment(
            *(700_000_000, -35_000_000),
            weights=389_000_000,
            kv=26_000_000,
            compute=240_000_000,
            runtime=80_000_000,
        ),
        "kv_bytes_per_token": 98_304.0,
        "measured_bytes_per_token": None,
    }
    return row | more


CELL = empty_cell() | {"name": "m s v", "model": "m", "stack": "s", "variant": "v", "status": "ok"}
CELL |= {"kind": "measured", "B_ms": 1.0}


def texts(table: str, row: Any) -> dict[str, str]:
    return {column.heading: tables.column_cell(row, column) for column in memory.TABLES[table]}


def test_a_row_tells_each_part_the_rest_with_its_share_and_what_was_published_of_it(published):
    study = replace(published, attributions=[attributed()])
    row = memory.rows(study)[0]
    assert texts("Once loaded", row) == {
        "file MB": "395",
        "weights MB": "389",
        "KV cache MB": "26",
        "compute MB": "-",
        "workspace MB": "-",
        "slack MB": "-",
        "runtime MB": "80",
        "unattributed MB": "5.0 (1.0%)",
        "total MB": "500",
        "published file MB": "395",
        "published buffer MB": f"{0.28 * GIB / 1e6:,.0f}",
        "published KV MB": f"{96 * MIB / 1e6:,.0f}",
        "published VRAM MB": "-",
    }
    peak = texts("At its peak", row)
    assert (peak["unattributed MB"], peak["total MB"], peak["compute MB"]) == ("-35 (-5.0%)", "700", "240")
    assert (peak["B/token"], peak["B/token by theory"], peak["of theory"]) == ("-", "98,304", "-")
    assert memory.notes("qwen1.5-0.5b", [row]) == [
        "llamacpp q4_0: -5.0% of the memory at its peak is unattributed"
    ]


def test_a_part_that_is_what_was_left_over_is_marked_and_has_no_rest_beside_it():
    peak = moment(700_000_000, None, weights=389_000_000, compute=240_000_000, runtime=71_000_000)
    found = [attributed(peak=peak | {"by_difference": ["compute"]})]
    chapter = memory.chapter(Study("t", [], attributions=found))
    (row,) = chapter.rows["qwen1.5-0.5b"]
    told = texts("At its peak", row)
    assert (told["compute MB"], told["weights MB"], told["unattributed MB"]) == ("~240", "389", "-")
    assert "~" not in "".join(texts("Once loaded", row).values())
    assert chapter.notes == {"qwen1.5-0.5b": []}
    (drawn,) = chapter.figures["qwen1.5-0.5b"]
    assert drawn.rows[1] == ["llamacpp q4_0, peak", "389", "-", "~240", "-", "-", "71", "-", "700"]
    assert "~: inferred" in memory.MEANING


def test_the_slope_is_told_against_theory():
    (row,) = memory.rows(Study("t", [], attributions=[attributed(measured_bytes_per_token=103_219.2)]))
    assert texts("At its peak", row)["of theory"] == "1.05x"


def test_each_published_size_is_told_once_beside_ours_or_alone(published):
    ours = [attributed(), attributed("bnb", "nf4-dynamic"), attributed("hf", "bf16-static")]
    bare = replace(published, attributions=[])
    alone = {row["name"]: row for row in memory.rows(bare)}
    both = memory.rows(replace(bare, attributions=ours))
    assert len(both) == len(alone) + 1, "of a static cache the study has nothing"
    assert both[1]["published"]["vram_bytes"] == round(0.65 * GIB)
    assert both[2]["published"] is None
    bf16 = alone["qwen1.5-7b hf bf16 on cuda"]
    assert (bf16["published"]["file_bytes"], bf16["published"]["vram_bytes"]) == (
        15_450_000_000,
        round(14.88 * GIB),
    )
    assert all(row["kv_bytes_per_token"] is None for row in alone.values())


def test_rows_of_published_sizes_among_the_attributions_are_not_told_twice(published):
    bare = replace(published, attributions=[])
    rows = [attributed("llamacpp", "q4_0", kind="reported", name="qwen1.5-0.5b llamacpp q4_0 on cuda")]
    assert memory.rows(replace(published, attributions=rows)) == memory.rows(bare)


def test_a_table_leaves_out_rows_that_it_has_nothing_to_tell_of(published):
    study = replace(published, attributions=[attributed()])
    chapter = report_page.figures_chapters(study)["memory"]
    told = {table.title: table.lines for table in chapter.of_all_models()}
    assert len(told["Where the memory goes: Once loaded"]) > 100
    assert [name for name, *_ in told["Where the memory goes: At its peak"]] == ["qwen1.5-0.5b llamacpp q4_0"]


def test_bars_are_stacked_parts_that_add_up_to_the_total():
    ours = [attributed(), attributed(variant="q8_0", peak=None)]
    (drawn,) = memory.chapter(Study("t", [], attributions=ours)).figures["qwen1.5-0.5b"]
    assert drawn.data[0]["y"] == ["llamacpp q4_0, loaded", "llamacpp q4_0, peak", "llamacpp q8_0, loaded"]
    assert [trace["name"] for trace in drawn.data] == [
        "weights",
        "KV cache",
        "compute",
        "runtime",
        "unattributed",
    ]
    totals = [sum(trace["x"][bar] or 0 for trace in drawn.data) for bar in range(3)]
    assert totals == [500, 700, 500]
    assert drawn.layout["barmode"] == "relative", "a negative rest goes to the other side"
    assert drawn.rows[1] == ["llamacpp q4_0, peak", "389", "26", "240", "-", "-", "80", "-35", "700"]
    marks = {label: mark.colour for label, mark in drawn.legend}
    assert all(marks[trace["name"]] == trace["marker"]["color"] for trace in drawn.data)
    assert len(set(marks.values())) == len(marks)


def test_a_cell_without_marks_of_its_memory_has_no_row():
    old = attributed(loaded=None, peak=None, file_bytes=None)
    assert memory.chapter(Study("t", [], attributions=[old])) is None


def test_what_was_never_loaded_has_its_file_and_no_bar():
    study = Study(
        "t", [], attributions=[attributed(loaded=None, peak=None, status="oom", reasons=["no room"])]
    )
    chapter = memory.chapter(study)
    assert chapter.figures == {}
    assert [table.title for table in chapter.of_all_models()] == ["Where the memory goes: Once loaded"]
    assert re.search(r"<tr [^>]*class=bad>", report_page.page(study))


def test_the_chapter_and_the_curves_over_time_have_anchors_of_their_own():
    curve = MemoryCurve(np.array([0.0, 1.0]), np.array([1e9, 2e9]), None)
    known = {"memory": {"m s v": curve}, "attributions": [attributed(model="m", name="m s v")]}
    anchors = re.findall(r' id="?([\w-]+)', report_page.page(Study("t", [CELL], **known)))
    assert {"m0-memory", "m0-memory-over-time"} <= set(anchors)
    assert len(anchors) == len(set(anchors))


def test_page_and_markdown_hold_the_chapter_only_where_memory_is_attributed():
    bare = Study("t", [CELL | {"file_bytes": 1e9}])
    assert '-memory"' not in report_page.page(bare)
    evil = attributed(
        name="m </script><img src=x>", stack="s", variant="</script><img src=x>", model="<img src=x>"
    )
    study = replace(bare, attributions=[evil])
    page = report_page.page(study)
    assert page.count('<section id="m1-memory">') == 1
    assert "<h4>Once loaded</h4>" in page
    assert "<h4>At its peak</h4>" in page
    assert "<img src=x" not in page
    text = report_page.markdown(study)
    assert "## Where the memory goes: At its peak" in text
    assert "| 389 | 26 | 240 | 80 | -35 (-5.0%) | 700 | 98,304 |" in text
