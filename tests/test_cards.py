"""Records of a real NVIDIA card: an H200, qwen1.5-0.5b with random weights, llama.cpp and torch's stacks."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

CARDS = Path(__file__).parent / "cards"
NEW_LENGTHS = "slower_at_new_lengths"


@pytest.fixture
def rows(harness):
    return {row["variant"]: row for row in harness("report", CARDS, "--format", "json").json}


def changed(tmp_path: Path, variant: str) -> tuple[Path, dict]:
    """A copy of the first record of a variant: its folder, and the record to change."""
    found = min(path for path in CARDS.glob("*/*/*/*") if f".{variant}.decode." in path.parent.name)
    folder = tmp_path / found.relative_to(CARDS)
    shutil.copytree(found, folder)
    return folder, json.loads((folder / "record.json").read_text())


def test_the_first_token_may_be_late_by_the_time_until_an_idle_card_has_an_event(rows):
    assert rows["bf16-static"]["status"] == "ok"  # its first token took 18.06 ms here, 17.82 by the card


def test_a_first_token_that_is_late_by_more_is_not_the_first_event(harness, tmp_path):
    folder, _ = changed(tmp_path, "bf16-static")
    series = pq.read_table(folder / "tokens.parquet")
    device_ns = series["device_ns"].to_numpy().copy()
    device_ns[0] -= 2_000_000
    at = series.schema.get_field_index("device_ns")
    table = series.set_column(at, "device_ns", pa.array(device_ns, series.schema.field(at).type))
    pq.write_table(table, folder / "tokens.parquet")
    (row,) = harness("report", tmp_path, "--format", "json").json
    assert row["status"] == "invalid"
    assert "two clocks differ on 1 of 400 tokens" in row["reasons"][0]


def test_a_stack_that_makes_something_for_each_context_length_is_noted(rows):
    """cuDNN's attention in torch 2.11 makes a plan for each: 52 ms a token, 16 where the warm-up had been."""
    noted = {name: [flag["code"] for flag in row["flags"]] for name, row in rows.items()}
    assert [name for name, codes in noted.items() if NEW_LENGTHS in codes] == ["bf16-dynamic"]
    assert "first_token_unsynchronised" not in noted["bf16-dynamic"]
    (flag,) = (each for each in rows["bf16-dynamic"]["flags"] if each["code"] == NEW_LENGTHS)
    assert "15.82 ms a token where the warm-up had been, 52.57 at the next 16" in flag["detail"]


def test_the_note_names_cudnn_where_its_attention_ran(harness, tmp_path):
    folder, record = changed(tmp_path, "bf16-dynamic")
    record["loaded"]["settings"]["sdpa_kernels"] = ["cudnn"]
    (folder / "record.json").write_text(json.dumps(record))
    (row,) = harness("report", tmp_path, "--format", "json").json
    assert "its attention is cuDNN's" in str(row["flags"])


def test_mbu_is_the_share_of_the_cards_bandwidth_that_a_run_used(rows):
    row = rows["q8_0-flash_attn=true"]
    read = row["weight_bytes_per_token"] + 98_304 * (25 + 2500 / 2)
    used = read * row["tokens_per_s"] / row["bandwidth_bytes_per_s"]
    assert row["bandwidth_share"] == pytest.approx(used, rel=0.02)
    assert row["past_cache_share"] is None  # a card's cache is not known


EXPERTS_ON_CPU = {"tensors": {"CPU": 36}, "bytes": {"CPU": 214_000_000}, "misplaced": []}


@pytest.mark.parametrize(
    ("options", "facts", "where"),
    [
        ({"gpu_layers": 20}, {"layers": {"CUDA0": 20, "CPU": 5}}, "5 of 25 layers"),
        ({"gpu_layers": 0}, {"layers": {"CPU": 25}}, "25 of 25 layers"),
        ({"n_cpu_moe": 12}, {"placement": EXPERTS_ON_CPU}, "214 MB of tensors"),
        ({"override_tensor": "ffn_down=CPU"}, {"placement": EXPERTS_ON_CPU}, "214 MB of tensors"),
    ],
)
def test_a_model_in_two_memories_has_no_mbu_and_says_why(harness, tmp_path, options, facts, where):
    folder, record = changed(tmp_path, "q8_0")
    record["options"] |= options
    record["loaded"]["placement"] = facts.get("placement")
    record["loaded"]["devices"]["layers"] = facts.get("layers", {"CUDA0": 25})
    (folder / "record.json").write_text(json.dumps(record))
    (row,) = harness("report", tmp_path, "--format", "json").json
    assert row["status"] == "ok"
    shares = ("bandwidth_share", "B_ratio", "B_measured_ratio", "W_ratio", "W_measured_ratio")
    assert [row[share] for share in shares] == [None] * 5
    (flag,) = (flag for flag in row["flags"] if flag["code"] == "two_memories")
    assert where in flag["detail"]


def test_the_name_of_a_cell_has_a_part_of_the_uuid_only_where_there_are_several_cards(
    harness, tmp_path, rows
):
    assert rows["q8_0"]["name"] == "qwen1.5-0.5b llamacpp q8_0 on GPU-8a66e4a7"
    changed(tmp_path, "q8_0")
    (row,) = harness("report", tmp_path, "--format", "json").json
    assert row["name"] == "qwen1.5-0.5b llamacpp q8_0 on cuda"


def test_every_token_was_timed_by_the_card_too(rows):
    paths = [path for path in CARDS.rglob("tokens.parquet") if "llamacpp" not in str(path)]
    assert len(paths) == 5
    for path in paths:
        series = pq.read_table(path)
        host, card = (series[name].to_numpy() / 1e6 for name in ("latency_ns", "device_ns"))
        assert np.abs(host - card)[1:].max() < 0.35, path
