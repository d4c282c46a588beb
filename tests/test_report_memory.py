"""The chapter on memory: parts, rests and slopes of made-up attributions, with the study's sizes."""

import re
from dataclasses import replace
from typing import Any

import numpy as np

from harness.analysis.figures import empty_cell
from harness.cli import report_memory
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


def row_of(study: Study) -> Any:
    return memory.rows(study)[0]


def test_a_row_has_each_part_the_rest_with_its_share_and_the_published_sizes(published):
    ours = [attributed(measured_bytes_per_token=103_219.2)]
    row, theirs, *_ = memory.rows(replace(published, attributions=ours))
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
    }
    published_texts = texts("Once loaded", theirs)
    assert theirs["name"].endswith(" (published)")
    assert (published_texts["file MB"], published_texts["total MB"]) == ("395", "-")
    assert published_texts["weights MB"] == f"{0.28 * GIB / 1e6:,.0f}"
    assert published_texts["KV cache MB"] == f"{96 * MIB / 1e6:,.0f}"
    peak = texts("At its peak", row)
    assert (peak["unattributed MB"], peak["total MB"], peak["compute MB"]) == ("-35 (-5.0%)", "700", "240")
    assert (peak["B/token"], peak["B/token by theory"], peak["of theory"]) == ("103,219", "98,304", "1.05x")
    assert memory.notes([("v", row)]) == ["v: -5.0% of the memory at its peak is unattributed"]


def test_an_inferred_part_is_marked_and_has_no_rest_beside_it():
    peak = moment(700_000_000, None, weights=389_000_000, compute=240_000_000, runtime=71_000_000)
    study = Study("t", [], attributions=[attributed(peak=peak | {"by_difference": ["compute"]})])
    shown = texts("At its peak", row_of(study))
    assert (shown["compute MB"], shown["weights MB"], shown["unattributed MB"]) == ("~240", "389", "-")


def test_each_published_size_is_shown_once_beside_ours_or_alone(published):
    bare = replace(published, attributions=[])
    alone = {row["name"]: row for row in memory.rows(bare)}
    ours = [attributed(), attributed("bnb", "nf4-dynamic"), attributed("hf", "bf16-static")]
    both = memory.rows(replace(bare, attributions=ours))
    assert len(both) == len(alone) + 3, "of a static cache the study has nothing"
    assert [row["name"].endswith(" (published)") for row in both[:5]] == [False, True, False, True, False]
    assert both[3]["loaded"]["total_bytes"] == round(0.65 * GIB)
    assert alone["qwen1.5-7b hf bf16 on cuda"]["file_bytes"] == 15_450_000_000
    again = [attributed("llamacpp", "q4_0", kind="reported", name="qwen1.5-0.5b llamacpp q4_0 on cuda")]
    assert memory.rows(replace(bare, attributions=again)) == memory.rows(bare)


def test_bars_are_stacked_parts_that_add_up_to_the_total():
    ours = [attributed(), attributed(variant="q8_0", peak=None)]
    (figure,) = memory.chapter(Study("t", [], attributions=ours)).figures["qwen1.5-0.5b"]
    assert figure.data[0]["y"] == ["llamacpp q4_0, loaded", "llamacpp q4_0, peak", "llamacpp q8_0, loaded"]
    totals = [sum(trace["x"][bar] or 0 for trace in figure.data) for bar in range(3)]
    assert totals == [500, 700, 500]
    assert figure.layout["barmode"] == "relative", "a negative rest goes to the other side"
    marks = {label: mark.colour for label, mark in figure.legend}
    assert all(marks[trace["name"]] == trace["marker"]["color"] for trace in figure.data)


def test_a_cell_has_the_tables_and_bars_for_which_its_memory_is_known():
    assert (
        memory.chapter(Study("t", [], attributions=[attributed(loaded=None, peak=None, file_bytes=None)]))
        is None
    )
    failed = attributed(loaded=None, peak=None, status="oom", reasons=["no room"])
    study = Study("t", [], attributions=[failed])
    chapter = memory.chapter(study)
    assert chapter.figures == {"qwen1.5-0.5b": []}
    assert [table.title for table in chapter.of_all_models()] == ["Where the memory goes: Once loaded"]
    assert re.search(r"<tr [^>]*class=bad>", report_page.page(study))


def test_the_page_holds_the_chapter_only_where_memory_is_attributed_and_no_name_is_markup():
    bare = Study("t", [CELL | {"file_bytes": 1e9}])
    assert '-memory"' not in report_page.page(bare)
    evil = "</script><img src=x>"
    curve = MemoryCurve(np.array([0.0, 1.0]), np.array([1e9, 2e9]), None)
    rows = [
        attributed(name=f"m {evil}", stack="s", variant=evil, model=evil),
        attributed(model="m", name="m s v"),
    ]
    page = report_page.page(replace(bare, attributions=rows, memory={"m s v": curve}))
    assert "<img src=x" not in page
    anchors = re.findall(r' id="?([\w-]+)', page)
    assert {"m0-memory", "m1-memory", "m0-memory-over-time"} <= set(anchors)
    assert len(anchors) == len(set(anchors))


def test_a_cell_that_was_never_undisturbed_is_provisional_as_in_other_tables(capsys):
    row: Any = attributed(status="invalid")
    report_memory._print_memory([row], {row["name"]: "provisional 0/3"}, wide=True)
    assert "q4_0  provisional 0/3" in capsys.readouterr().out
    report_memory._print_memory([row], {}, wide=True)
    assert "q4_0  invalid" in capsys.readouterr().out
