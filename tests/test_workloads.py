"""Workloads of timed rows in a config: their meaning, a sentence for each mistake, where they cannot run."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import Ran

from harness import config
from harness.campaign import forecast
from harness.campaign.forecast import Device
from harness.config import ConfigError, Experiment, plan
from harness.config.plan import Cell
from harness.config.schema import schema
from harness.config.workloads import Prefill, Turns, Windows

SMALL: dict[str, Any] = {
    "models": [{"shape": "tiny-qwen2"}],
    "variants": [{"stack": "llamacpp", "quant": "q4_k_m"}],
}
DEEP = {"kind": "depth", "depths": [0, 4096]}
BEHIND = {"kind": "prefill", "lengths": [1, 4], "depth": [0, 256]}
FIRST = {"kind": "prefill", "lengths": [1, 4]}


def loaded(tmp_path: Path, *workloads: str | dict[str, Any], **keys: Any) -> Experiment:
    """A config with these workloads; one given as text is YAML."""
    rows = [each if isinstance(each, str) else json.dumps(each) for each in workloads]
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in (SMALL | keys).items())
    path = tmp_path / "small.yaml"
    path.write_text(text + "workloads:\n" + "".join(f"- {row}\n" for row in rows))
    return config.load(path)


def mistake(tmp_path: Path, *workloads: str, **keys: Any) -> str:
    with pytest.raises(ConfigError) as wrong:
        loaded(tmp_path, *workloads, **keys)
    return str(wrong.value).replace(f"{tmp_path}/", "")


# Meaning


def test_lengths_depths_and_shares_are_read_as_they_are_written(tmp_path: Path) -> None:
    prefill, depth, turns = loaded(
        tmp_path,
        "{kind: prefill, lengths: [1, 1k], depth: [0, 4k]}",
        "{kind: depth, depths: [0, 16k], stop_at: 0.5%}",
        "{kind: turns, first: 2k, prefix_cache: [on]}",
    ).workloads
    assert prefill == Prefill(lengths=[1, 1024], depth=[0, 4096])
    assert depth == Windows(depths=[0, 16384], stop_at=0.005)
    assert turns == Turns(first=2048, prefix_cache=[True])


def test_without_keys_they_have_the_defaults_of_the_reference(tmp_path: Path) -> None:
    text = ["{kind: prefill}", "{kind: depth, depths: [0]}", "{kind: turns}"]
    prefill, depth, turns = loaded(tmp_path, *text).workloads
    assert prefill == Prefill(lengths=None, up_to=1024, depth=[0], passes=5)
    assert depth == Windows(depths=[0], window=64, stop_at=0.005, most_windows=24)
    assert turns == Turns(first=2000, each=200, new_tokens=150, turns=10, prefix_cache=[False, True])
    assert [each.new_tokens for each in (prefill, depth)] == [0, 0]


def test_lengths_auto_are_no_lengths(tmp_path: Path) -> None:
    (prefill,) = loaded(tmp_path, "{kind: prefill, lengths: auto, up_to: 2k}").workloads
    assert isinstance(prefill, Prefill)
    assert (prefill.lengths, prefill.longest, prefill.holds) == (None, 2048, 2049)


def test_a_context_holds_all_that_a_workload_puts_there(tmp_path: Path) -> None:
    prefill, depth, turns = loaded(
        tmp_path,
        "{kind: prefill, lengths: [8, 100], depth: [0, 1k]}",
        "{kind: depth, depths: [4k, 0], window: 32}",
        "{kind: turns, first: 1000, each: 100, new_tokens: 50, turns: 4}",
    ).workloads
    assert prefill.holds == 1024 + 100 + 1
    assert 4096 + 128 + 32 < depth.holds <= 4096 + 256 + 32 + 8
    assert turns.holds == 1000 + 3 * 100 + 4 * 50


def test_the_schema_accepts_what_the_reader_does(tmp_path: Path) -> None:
    given = [
        {"kind": "prefill", "lengths": "auto", "up_to": "2k", "depth": [0, "4k"], "passes": 3},
        {"kind": "prefill", "lengths": [1, "1k"]},
        {"kind": "depth", "depths": [0, "16k"], "stop_at": "0.5%", "window": 32, "most_windows": 8},
        {"kind": "turns", "first": "2k", "each": 100, "turns": 3, "prefix_cache": [True]},
        {"kind": "batch", "concurrency": [1, 8], "new_tokens": 32, "rounds": 2},
    ]
    loaded(tmp_path, *given)
    jsonschema.validate(SMALL | {"workloads": given}, schema())
    for wrong in ({"kind": "prefill", "lengths": "some"}, {"kind": "depth", "depths": [-1]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(SMALL | {"workloads": [wrong]}, schema())


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("{kind: prefill, lengths: [1k, 0]}", "lengths.1: must be at least 1, got 0"),
        ("{kind: prefill, lengths: [8, 8]}", "lengths: 8 occurs twice"),
        ("{kind: prefill, lengths: []}", "lengths: must not be empty"),
        ("{kind: prefill, lengths: some}", 'lengths: expected auto or a list, got "some"'),
        ("{kind: prefill, lengths: 5}", "lengths: expected a list, got 5"),
        ("{kind: prefill, lengths: [true]}", "lengths.0: expected a whole number, got true"),
        ("{kind: prefill, depth: [-1]}", "depth.0: must be at least 0, got -1"),
        ("{kind: prefill, depth: [1k, 1024]}", "depth: 1024 occurs twice"),
        ("{kind: prefill, passes: 1}", "passes: must be at least 2, got 1"),
        ("{kind: prefill, upto: 4}", "upto: unknown key; did you mean up_to?"),
        ("{kind: depth}", "depths: is missing"),
        ("{kind: depth, depths: []}", "depths: must not be empty"),
        ("{kind: depth, depths: [0, -5]}", "depths.1: must be at least 0, got -5"),
        ("{kind: depth, depths: [4k, 4096]}", "depths: 4096 occurs twice"),
        ("{kind: depth, depths: [4kk]}", 'depths.0: expected a whole number, got "4kk"'),
        ("{kind: depth, depths: [0], window: 4}", "window: must be at least 8, got 4"),
        (
            "{kind: depth, depths: [0], stop_at: 110%}",
            'stop_at: expected a share such as 0.5% or 0.005, got "110%"',
        ),
        ("{kind: depth, depths: [0], stop_at: 1.5}", "stop_at: must be less than 1, got 1.5"),
        ("{kind: depth, depths: [0], stop_at: 0%}", 'stop_at: must be more than 0, got "0%"'),
        ("{kind: depth, depths: [0], most_windows: 3}", "most_windows: must be at least 4, got 3"),
        ("{kind: turns, prefix_cache: maybe}", 'prefix_cache: expected a list, got "maybe"'),
        ("{kind: turns, prefix_cache: [maybe]}", 'prefix_cache.0: expected true or false, got "maybe"'),
        ("{kind: turns, prefix_cache: [on, on]}", "prefix_cache: true occurs twice"),
        ("{kind: turns, first: 0}", "first: must be at least 1, got 0"),
        ("{kind: turns, turns: 0}", "turns: must be at least 1, got 0"),
        ("{kind: batch, concurrency: [4, 4]}", "concurrency: 4 occurs twice"),
        ("{kind: batch, concurrency: [257]}", "concurrency.0: must be at most 256, got 257"),
        ("{kind: batch, new_tokens: 1}", "new_tokens: must be at least 2, got 1"),
        ("{kind: depths, depths: [0]}", 'kind: unknown workload "depths"; did you mean depth?'),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(tmp_path: Path, row: str, sentence: str) -> None:
    assert mistake(tmp_path, row) == f"small.yaml:4: workloads.0.{sentence}"


@pytest.mark.parametrize(
    ("row", "needs"),
    [
        ("{kind: depth, depths: [0, 4k], window: 36}", "4392 tokens that workload depth"),
        ("{kind: prefill, depth: [0, 8k]}", "9217 tokens that workload prefill"),
        ("{kind: turns}", "5300 tokens that workload turns"),
        ("{kind: batch, concurrency: [3]}", "1536 tokens that workload batch"),
    ],
)
def test_a_context_too_short_for_a_workload_names_it_with_its_tokens(
    tmp_path: Path, row: str, needs: str
) -> None:
    said = mistake(tmp_path, row, variants=[{"stack": "llamacpp", "n_ctx": 512}])
    assert said == f"small.yaml:2: variants.0.n_ctx: n_ctx 512 is smaller than the {needs} needs"


def test_the_same_workload_written_twice_is_a_mistake(tmp_path: Path) -> None:
    said = mistake(tmp_path, "{kind: prefill}", "{kind: prefill, lengths: auto}")
    assert said == "small.yaml:5: workloads.1: the same as workloads.0"


# Which cells they make


def test_cells_of_a_decode_keep_the_ids_that_they_had(tmp_path: Path) -> None:
    protocol = {"new_tokens": 40}
    alone, *_ = plan.cells(loaded(tmp_path, {"kind": "decode"}, protocol=protocol))
    assert alone.id == "tiny-qwen2.llamacpp.q4_k_m.decode.69e9dc4b"
    beside = plan.cells(loaded(tmp_path, {"kind": "decode"}, DEEP, protocol=protocol))
    assert alone.id in [cell.id for cell in beside]


def test_a_workload_may_run_less_often_than_the_protocol_has_it_and_never_more_often(tmp_path: Path) -> None:
    def runs(repeats: int, *workloads: dict[str, Any]) -> list[tuple[str, int]]:
        found = loaded(tmp_path, *workloads, protocol={"repeats": repeats})
        return [(cell.id, repeat) for cell, repeat in plan.order(plan.cells(found), repeats, seed=0)]

    twice = FIRST | {"repeats": 2}
    (often, *_), (seldom, *_) = runs(3, FIRST), runs(3, twice)
    assert often == seldom  # the same cell: what was measured is kept
    assert [repeat for _, repeat in runs(3, twice)] == [1, 2]
    assert [repeat for _, repeat in runs(1, twice)] == [1]
    both = runs(3, twice, {"kind": "decode"})
    assert sorted(repeat for _, repeat in both[4:]) == [3]
    assert [repeat for _, repeat in both[:4]] == [1, 1, 2, 2]


def test_a_decode_has_the_repeats_of_its_protocol(tmp_path: Path) -> None:
    assert "repeats: unknown key" in mistake(tmp_path, "{kind: decode, repeats: 1}")


def test_a_dry_run_counts_the_repeats_of_each_workload(harness: Callable[..., Ran], tmp_path: Path) -> None:
    loaded(tmp_path, FIRST | {"repeats": 1}, {"kind": "decode"}, protocol={"repeats": 3, "new_tokens": 40})
    ran = harness("run", "small.yaml", "--dry-run", HARNESS_CACHE=str(tmp_path / "empty"))
    heading, prefill, decode, *_ = ran.out.splitlines()
    assert "warm-up" in heading
    assert re.search(r" x 1 +up to ", prefill)
    assert re.search(r" x 3 +up to ", decode)
    assert " for 4 repeats" in ran.err


def test_each_way_of_writing_a_workload_is_the_same_cell(tmp_path: Path) -> None:
    (short,) = plan.cells(loaded(tmp_path, "{kind: depth, depths: [0, 4k], stop_at: 0.5%}"))
    (long,) = plan.cells(loaded(tmp_path, "{kind: depth, depths: [0, 4096], stop_at: 0.005}"))
    (other,) = plan.cells(loaded(tmp_path, "{kind: depth, depths: [0, 4096], stop_at: 0.006}"))
    assert short.id == long.id != other.id


def test_a_rule_may_exclude_one_kind_of_some_variants(tmp_path: Path) -> None:
    variants = [{"stack": "hf", "cache": ["static", "dynamic"]}]
    rules = [{"workload": "depth", "cache": "static"}]
    found = loaded(tmp_path, {"kind": "decode"}, DEEP, variants=variants, exclude=rules).combinations()
    assert [(variant.name, workload.kind) for _, variant, workload in found] == [
        ("bf16-static", "decode"),
        ("bf16-dynamic", "decode"),
        ("bf16-dynamic", "depth"),
    ]


# Where they cannot run


UNCUT = {
    "bf16-static": ({"stack": "hf", "cache": "static"}, "cache static"),
    "gemm-fuse_layers=true": ({"stack": "autoawq", "fuse_layers": True}, "fuse_layers true"),
}


@pytest.mark.parametrize("name", UNCUT)
def test_a_cache_that_cannot_be_cut_stops_only_what_would_cut_it(tmp_path: Path, name: str) -> None:
    variant, options = UNCUT[name]
    turns = {"kind": "turns"}
    cells = plan.cells(loaded(tmp_path, {"kind": "decode"}, FIRST, turns, BEHIND, DEEP, variants=[variant]))
    decode, first, again, behind, deep = [cell.impossible(1) for cell in cells]
    assert (decode, first, again) == (None, None, None)
    assert behind == f"workload prefill cuts the KV cache to fewer tokens: impossible with {options}"
    assert deep == f"workload depth cuts the KV cache to fewer tokens: impossible with {options}"


def cell_of(tmp_path: Path, *workloads: dict[str, Any]) -> Cell:
    (cell,) = plan.cells(loaded(tmp_path, *workloads))
    return cell


def test_a_depth_that_does_not_fit_is_refused_with_both_figures(tmp_path: Path) -> None:
    card = Device("cuda", "the card", 10**9)
    deep = cell_of(tmp_path, {"kind": "depth", "depths": [0, "500k"]})
    found = forecast.expected(deep, card, 1)
    assert found.refusal is not None
    assert found.refusal == "512,324 tokens need 6.8 GB: will not fit: 1.0 GB on the card"
    assert found.failures == [found.refusal]
    assert forecast.expected(cell_of(tmp_path, DEEP), card, 1).refusal is None


def test_what_cannot_run_is_so_in_a_dry_run_and_on_record(
    tmp_path: Path, harness: Callable[..., Ran]
) -> None:
    """Nothing is built for it: the environments are not looked at."""
    (empty := tmp_path / "cache").mkdir(mode=0o700)
    far = {"kind": "depth", "depths": ["9000k"]}
    loaded(
        tmp_path,
        BEHIND,
        far,
        protocol={"repeats": 1, "measure_bandwidth": False},
        models=[{"shape": "qwen1.5-0.5b"}],
        variants=[*(variant for variant, _ in UNCUT.values()), {"stack": "llamacpp", "type_k": "f32"}],
        exclude=[{"stack": "llamacpp", "workload": "prefill"}],
    )
    nothing = {"HARNESS_CACHE": str(empty), "UV_OFFLINE": "1"}
    dry = harness("run", "small.yaml", "--dry-run", "--json", **nothing)
    ran = harness("run", "small.yaml", "--json", **nothing)
    assert (dry.code, ran.code) == (1, 1)
    *truncated, (deep, refused) = zip(dry.json, ran.json, strict=True)
    for line, row in truncated:
        (reason,) = [each for each in line["will_fail"] if "KV cache" in each]
        assert (row["cell"], row["status"], row["reasons"]) == (line["cell"], "unavailable", [reason])
    (reason,) = deep["will_be_refused"]
    assert re.fullmatch(r"9,216,\d+ tokens need [\d.]+ GB: will not fit: [\d.]+ GB on this machine.*", reason)
    assert (refused["status"], refused["reasons"]) == ("refused", [reason])
    assert not (empty / "envs").exists()
