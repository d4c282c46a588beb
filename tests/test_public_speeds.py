"""Speeds that others published: each has its source and is possible; a table and `theory` show them."""

import csv
import json
from pathlib import Path

import pytest

from harness.base import data
from harness.cli import main
from harness.theory.machines import MACHINES
from harness.theory.public_speeds import COLUMNS, PublicSpeed, maker, others, read, rows, used

ROW = dict.fromkeys(COLUMNS, "") | {
    "model": "llama-3.1-8b",
    "quant": "q4_k_m",
    "stack": "llama.cpp",
    "machine": "rtx-4090",
    "context": "128",
    "tok_s": "150",
    "source": "mine",
}


def one(**changed: str) -> PublicSpeed:
    (found,), refused = read([ROW | changed])
    assert not refused
    return found


def why_not(**changed: str) -> str:
    found, (refused,) = read([ROW, ROW | changed])
    assert len(found) == 1
    return refused


def test_every_row_says_what_ran_where_and_who_says_so() -> None:
    with (data.HERE / "public_speeds.csv").open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        cells = list(table)
    assert tuple(table.fieldnames or ()) == COLUMNS
    for row in cells:
        assert all(row[name] for name in ("model", "quant", "stack", "machine", "source")), row
        assert not row["year"] or 2023 <= int(row["year"]) <= 2026, row
        assert row["bandwidth_gb_per_s"] == "" or row["family"], row
    assert len({tuple(row.values()) for row in cells}) == len(cells)


def test_no_row_is_faster_than_its_machine_allows() -> None:
    found, refused = read(data.rows("public_speeds.csv"))
    assert refused == []
    assert found == list(rows())
    # Above that, the row has another type than it says, or the machine another memory.
    assert all(share < 0.88 for each in used(found) if (share := each.share))


def test_each_maker_has_decodes_and_prefills() -> None:
    for name in ("NVIDIA", "AMD", "Apple", "CPU"):
        of_maker = [each for each in used(rows()) if each.maker == name]
        assert len({each.device.name for each in of_maker if each.tok_s}) >= 5, name
        assert sum(each.prompt_tok_s is not None for each in of_maker) >= 4, name


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"tok_s": "0"}, "tok_s is 0, not a number above zero"),
        ({"tok_s": "-150"}, "tok_s is -150, not a number above zero"),
        ({"tok_s": "fast"}, "tok_s is fast, not a number above zero"),
        ({"tok_s": "nan"}, "tok_s is nan, not a number above zero"),
        ({"tok_s": "2150"}, "times the most that GeForce RTX 4090 can"),
        ({"prompt_tokens": "512", "prompt_tok_s": "400000"}, "prompt_tok_s is 4e+05"),
        ({"context": ""}, "context or tok_s is empty"),
        ({"prompt_tokens": "0.5", "prompt_tok_s": "9"}, "prompt_tokens is 0.5, not a whole number"),
        ({"context": "", "tok_s": ""}, "no speed"),
        ({"machine": "rtx-9090"}, "unknown machine rtx-9090"),
        ({"model": "llama-9"}, "unknown model"),
        ({"quant": "q9_9"}, "unknown quantization 'q9_9'"),
        ({"family": "opencl"}, "unknown family 'opencl'"),
    ],
)
def test_a_row_that_cannot_be_is_named_and_left_out(changed: dict[str, str], reason: str) -> None:
    refused = why_not(**changed)
    assert refused.startswith("line 3 (")
    assert reason in refused


def test_a_machine_that_is_not_known_is_given_by_memory_and_bandwidth() -> None:
    row = one(
        machine="GeForce GTX 1050 Ti", memory_gib="4", bandwidth_gb_per_s="112", family="cuda", tok_s="9"
    )
    assert (row.device.bandwidth_bytes_per_s, row.device.memory_bytes) == (112e9, 4 * 2**30)
    assert (row.family, row.maker) == ("cuda", "NVIDIA")
    assert row.ceiling_tok_s == pytest.approx(one().ceiling_tok_s * 112 / 1008, rel=1e-3)


def test_the_ceiling_falls_with_the_context_and_rises_with_fewer_bits() -> None:
    assert one(context="8192").ceiling_tok_s < one().ceiling_tok_s < one(quant="q2_k").ceiling_tok_s
    assert one(family="vulkan").family == "vulkan"  # which is not the card's own


def test_others_reached_a_share_on_the_machine_or_else_on_those_of_its_maker() -> None:
    on_it = others(MACHINES["rtx-4090"])
    assert on_it is not None
    assert (on_it["is_machine"], on_it["on"]) == (True, "GeForce RTX 4090")
    assert 0 < on_it["least"] <= on_it["median"] <= on_it["most"] < 1
    assert on_it["sources"] < on_it["rows"]
    like_it = others(MACHINES["b200"])
    assert like_it is not None
    assert (like_it["is_machine"], like_it["on"]) == (False, "NVIDIA")
    assert like_it["rows"] > on_it["rows"]


def test_makers_are_told_by_the_interface_of_the_device() -> None:
    known = {"rtx-4090": "NVIDIA", "mi50": "AMD", "arc-b580": "Intel", "apple-m4": "Apple", "rpi-5": "CPU"}
    assert {name: maker(MACHINES[name]) for name in known} == known


def test_theory_says_which_share_others_reached(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", "llama-3.1-8b", "--quant", "q4_k_m", "--machine", "rtx-3060-12gb", "b200"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "rtx-3060-12gb: public decode speeds reached" in said
    assert "of the ceiling in the median" in said
    assert "on NVIDIA's GPUs, none on it" in said
    assert main(["theory", "llama-3.1-8b", "--machine", "rtx-3060-12gb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["reached_by_others"]["is_machine"] is True


def test_the_published_theory_tables_know_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", "qwen1.5-7b", "--machine", "rtx-4090", "--units", "published", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["reached_by_others"] is None


def test_the_tables_have_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "published/public-speeds", "--format", "csv"]) == 0
    found = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert len(found) == len(rows())
    again, refused = read(found)  # what it prints, it reads
    assert (len(again), refused) == (len(found), [])
    assert main(["report", "published/public-speeds", "--format", "json"]) == 0
    assert [each["share"] for each in json.loads(capsys.readouterr().out)] == [each.share for each in rows()]
    assert main(["report", "published/public-speeds", "--format", "md"]) == 0
    assert "| GeForce RTX 4090 | NVIDIA |" in capsys.readouterr().out
    assert main(["report", "published/public-speeds"]) == 0
    assert "GeForce RTX 4090" in capsys.readouterr().out


def test_the_page_is_of_public_speeds_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "published/public-speeds", str(tmp_path)]) == 2
    assert "give it alone" in capsys.readouterr().err
