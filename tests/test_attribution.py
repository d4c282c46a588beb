"""Where the memory goes: made-up records counted by hand; of real stacks nothing is lost or invented."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import records_below
from golden_record import GOLDEN

from harness.analysis import memory as analysis_memory
from harness.dataset import table
from harness.dataset.study import attributions
from harness.records import NO_TOKENS, TokenTimes
from harness.records.kinds import wrong_with

MB = 1_000_000
START_NS = 10**12


def mark(at: str, anon: int | None, files: int | None, weights: int | None = None) -> dict[str, Any]:
    """Of a process on a CPU, MB."""
    given = {"anon": anon, "file": files, "weights": weights}
    sizes = {f"rss_{kind}_bytes": value if value is None else value * MB for kind, value in given.items()}
    return {"at": at, "vram_bytes": None} | sizes


def on_device(at: str, used: int) -> dict[str, Any]:
    return mark(at, 1, 1) | {"vram_bytes": used * MB}


def parts_of(memory: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    return {part: {place: size * MB for place, size in by.items()} for part, by in memory.items()}


def attributed(
    marks: list[dict[str, Any]],
    memory: dict[str, dict[str, int]] | None,
    device: str = "cpu",
    samples: dict[str, list[Any]] | None = None,
    latency: list[int] | None = None,
    done: dict[str, Any] | None = None,
    **loaded: Any,
) -> dict[str, Any]:
    """The row of a record with these marks and the stack's report of its memory (MB), without the rest."""
    record = copy.deepcopy(GOLDEN)
    by_name = {each["at"]: each for each in marks}
    once = by_name.get("loaded", {})
    anon, files = once.get("rss_anon_bytes"), once.get("rss_file_bytes")
    record["device"] = device
    record["memory"] = {
        "marks": marks,
        "after_load_rss_bytes": None if anon is None or files is None else anon + files,
        "after_load_vram_bytes": once.get("vram_bytes"),
    }
    record["loaded"] |= {"kv_read": "copied", "memory": memory and parts_of(memory)} | loaded
    record["done"] |= {"start_ns": START_NS, "flushes": []} | (done or {})
    cell = table.repeat_row(GOLDEN, NO_TOKENS, None, None) | {"name": "it", "device": device}
    columns = {"n": list(range(26, 26 + len(latency))), "latency_ns": latency} if latency else {}
    return analysis_memory.attribution_row(cell, record, TokenTimes.of_columns(columns), samples or {})


def parts(**told: int) -> dict[str, int | None]:
    """Those told, MB; the others are null."""
    return dict.fromkeys(analysis_memory.PARTS) | told


def megabytes(moment: dict[str, Any]) -> dict[str, float | None]:
    known = {part: None if size is None else size / MB for part, size in moment["parts"].items()}
    rest = moment["unattributed_bytes"]
    return known | {"rest": None if rest is None else rest / MB, "total": moment["total_bytes"] / MB}


LLAMA = {"model": {"CPU_Mapped": 400, "CPU_REPACK": 100}, "kv": {"CPU": 30}}
LLAMA |= {"output": {"CPU": 1}, "compute": {"CPU": 80}}


def test_of_llama_cpp_with_its_file_mapped_every_part_is_where_it_is():
    """Compute is reserved (80 MB) and resident by the touched part (7 MB), once loaded not at all."""
    marks = [mark("imported", 20, 25), mark("loaded", 160, 430, 402), mark("finished", 167, 431, 402)]
    found = attributed(marks, LLAMA, done={"heap_free_bytes": 2 * MB}, heap_free_bytes=1 * MB)
    loaded = parts(weights=500, kv=30, compute=1, slack=1 + 2, runtime=20 + 28)
    assert megabytes(found["loaded"]) == loaded | {"rest": 590 - 582, "total": 590}
    # Of 8 MB that came one is free in the heap and one is libraries' code; 6 are left over for compute.
    peak = parts(weights=500, kv=30, compute=1 + 6, slack=2 + 2, runtime=20 + 29)
    assert megabytes(found["peak"]) == peak | {"rest": None, "total": 598}
    assert found["loaded"]["unattributed_share"] == pytest.approx(8 / 590)
    assert (found["loaded"]["by_difference"], found["peak"]["by_difference"]) == ([], ["compute"])
    assert found["peak"]["unattributed_share"] is None


@pytest.mark.parametrize(("came", "compute"), [(100, 81), (80, 81), (0, 1), (-50, 1)])
def test_compute_is_at_most_what_was_reserved_for_it_and_then_there_is_a_rest(came, compute):
    marks = [mark("imported", 20, 25), mark("loaded", 160, 430, 402), mark("finished", 160 + came, 430, 402)]
    peak = attributed(marks, LLAMA)["peak"]
    assert megabytes(peak)["compute"] == compute
    assert megabytes(peak)["rest"] == 590 + came - (500 + 30 + compute + 2 + 48)
    assert peak["by_difference"] == []


def test_of_a_server_in_its_process_pages_of_the_weights_file_are_weights_and_no_slack():
    marks = [mark("imported", 20, 25), mark("loaded", 60, 130, 97), mark("finished", 62, 131, 97)]
    of_server = {"api": "llama-server", "elsewhere": False}
    found = attributed(
        marks, None, done={"heap_free_bytes": 4 * MB}, heap_free_bytes=5 * MB, served=of_server
    )
    loaded = parts(weights=97, slack=5, runtime=20 + 33)
    assert megabytes(found["loaded"]) == loaded | {"rest": 190 - 155, "total": 190}
    assert megabytes(found["peak"]) == parts(weights=97, slack=4, runtime=54) | {"rest": 38, "total": 193}


def test_weights_read_into_memory_leave_no_page_of_their_file():
    memory = LLAMA | {"model": {"CPU": 500}}
    found = attributed([mark("imported", 20, 25), mark("loaded", 560, 30, 0)], memory)
    loaded = megabytes(found["loaded"])
    assert (loaded["runtime"], loaded["slack"], loaded["rest"]) == (50, 0, 590 - 50 - 531)
    assert found["loaded"]["by_difference"] == []
    assert found["peak"] is None  # it never finished


def test_pages_of_a_checkpoint_that_no_weight_is_read_from_are_slack():
    """bitsandbytes: quantized from a mapped file, whose pages stay; malloc keeps the freed memory."""
    memory = {"model": {"cpu mapped": 600, "cpu": 300}, "kv": {}}
    marks = [mark("imported", 290, 85), mark("loaded", 1190, 1340, 1230)]
    loaded = megabytes(attributed(marks, memory, heap_free_bytes=570 * MB)["loaded"])
    assert (loaded["weights"], loaded["kv"]) == (900, 0)
    assert (loaded["slack"], loaded["runtime"]) == (570 + 630, 290 + 110)


def test_a_cache_that_grows_is_counted_by_what_it_held_at_the_end():
    memory = {"model": {"cpu": 100}, "kv": {}}
    after = {"memory": parts_of({"model": {"cpu": 100}, "kv": {"cpu": 40}})}
    marks = [mark("imported", 50, 50), mark("loaded", 150, 60), mark("finished", 200, 60)]
    samples = {
        "t_ns": [START_NS - 1, START_NS + 1],  # one before generation began: loading may have taken more
        "rss_anon_bytes": [900 * MB, 210 * MB],
        "rss_file_bytes": [60 * MB, 60 * MB],
    }
    found = attributed(marks, memory, samples=samples, done={"facts_changed": after}, heap_free_bytes=0)
    peak = megabytes(found["peak"])
    assert peak["total"] == 270
    assert (peak["kv"], peak["workspace"], peak["compute"], peak["rest"]) == (40, 20, None, None)
    assert (found["loaded"]["by_difference"], found["peak"]["by_difference"]) == ([], ["workspace"])


def test_of_a_gpu_torch_says_what_it_holds_and_the_rest_is_the_drivers():
    memory = {"model": {"cuda:0": 1000, "cpu": 5}, "kv": {"cuda:0": 100}}
    state = {"allocated_bytes": 1150 * MB, "reserved_bytes": 1200 * MB}
    peak_state = {"peak_allocated_bytes": 1300 * MB, "peak_reserved_bytes": 1400 * MB}
    marks = [on_device("started", 300), on_device("loaded", 2000), on_device("finished", 2100)]
    samples = {"t_ns": [START_NS, START_NS + 1], "vram_bytes": [2200 * MB, None]}
    done = {"counters": {"allocator": peak_state}}
    found = attributed(marks, memory, "GPU-1", samples, done=done, allocator=state)
    loaded = parts(weights=1000, kv=100, workspace=50, slack=50, runtime=500)
    assert megabytes(found["loaded"]) == loaded | {"rest": None, "total": 1700}
    peak = parts(weights=1000, kv=100, workspace=200, slack=100, runtime=500)
    assert megabytes(found["peak"]) == peak | {"rest": None, "total": 1900}
    assert found["loaded"]["by_difference"] == found["peak"]["by_difference"] == ["runtime"]


def test_of_a_gpu_llama_cpp_has_its_buffers_and_what_lies_on_the_host_is_not_there():
    memory = {"model": {"CUDA0": 4000, "CPU_Mapped": 300}, "kv": {"CUDA0": 500}}
    memory |= {"compute": {"CUDA0": 200, "CUDA_Host": 20}, "output": {"CUDA_Host": 1}}
    found = attributed([on_device("started", 100), on_device("loaded", 5200)], memory, device="GPU-1")
    expected = parts(weights=4000, kv=500, compute=200, runtime=400)
    assert megabytes(found["loaded"]) == expected | {"rest": None, "total": 5100}
    assert found["loaded"]["by_difference"] == ["runtime"]


def test_parts_that_claim_more_than_is_held_leave_a_rest_below_nothing():
    memory = {"model": {"CUDA0": 4000}, "kv": {"CUDA0": 500}, "compute": {}, "output": {}}
    found = attributed([on_device("started", 100), on_device("loaded", 4500)], memory, device="GPU-1")
    assert megabytes(found["loaded"])["rest"] == -100
    assert megabytes(found["loaded"])["runtime"] is None  # nothing is left over
    assert found["loaded"]["by_difference"] == []
    assert found["loaded"]["unattributed_share"] == pytest.approx(-100 / 4400)
    mapped = attributed([mark("imported", 20, 20), mark("loaded", 30, 300)], LLAMA)
    assert megabytes(mapped["loaded"])["rest"] < 0  # pages that were given back


def test_what_was_not_told_is_null_and_not_none():
    untold = attributed([mark("imported", 20, 20), mark("loaded", 100, 20)], None)
    assert megabytes(untold["loaded"]) == parts(runtime=40) | {"rest": 80, "total": 120}
    no_total = attributed([], LLAMA, device="GPU-1")["loaded"]
    assert no_total["total_bytes"] is no_total["unattributed_bytes"] is no_total["unattributed_share"] is None
    assert attributed([], LLAMA)["loaded"] is None
    older = copy.deepcopy(GOLDEN)
    older["memory"].pop("marks", None)
    row = analysis_memory.attribution_row(
        table.repeat_row(older, NO_TOKENS, None, None) | {"name": "it"}, older, NO_TOKENS, {}
    )
    assert row["peak"] is None
    assert row["measured_bytes_per_token"] is None


def growth(bytes_per_token: float, scatter: int = 0, samples: int = 20, **loaded: Any) -> dict[str, Any]:
    """Of a run of 200 tokens of 10 ms whose memory was sampled at even times, all stood still for 0.2 s
    after the first hundred."""
    tokens = [1 + i * 190 // samples for i in range(samples)]
    t_ns = [START_NS + 10_000_000 * n + 200_000_000 * (n > 100) for n in tokens]
    held = [200 * MB + int(bytes_per_token * n) + scatter * (-1) ** n for n in tokens]
    columns = {"t_ns": t_ns, "rss_anon_bytes": held, "rss_file_bytes": [0] * samples}
    memory = {"model": {"cpu": 100}, "kv": {}}
    marks = [mark("imported", 10, 0), mark("loaded", 200, 0), mark("finished", 250, 0)]
    done = {"flushes": [[100, 200_000_000]]} | loaded.pop("done", {})
    return attributed(marks, memory, samples=columns, latency=[10_000_000] * 200, done=done, **loaded)


def test_the_slope_of_memory_is_that_of_the_cache():
    found = growth(100_000)
    assert found["measured_bytes_per_token"] == pytest.approx(100_000, rel=0.01)
    assert found["not_measured"] is None


@pytest.mark.parametrize(
    "changed",
    [
        {"scatter": 5 * MB},
        {"samples": 7},
        {"heap_free_bytes": 3 * MB},  # of 20 that it grew by: a part of that rose nowhere
        {"kv_read": "full"},
    ],
)
def test_a_slope_that_cannot_be_told_is_null_with_why(changed):
    found = growth(100_000, **changed)
    assert found["measured_bytes_per_token"] is None
    assert found["not_measured"]


def test_an_allocator_that_was_asked_at_every_step_gives_the_slope():
    steps = [[n, 500 * MB + 2000 * n, 600 * MB] for n in range(100, 2000, 100)]
    found = growth(0, done={"memory_steps": steps})
    assert found["measured_bytes_per_token"] == pytest.approx(2000)


@pytest.mark.parametrize("steps", [[[1, 2]], [[1, 2, -3]], "none", [1, 2, 3]])
def test_steps_that_are_no_steps_make_a_record_that_is_passed_over(steps):
    record = copy.deepcopy(GOLDEN)
    record["done"]["memory_steps"] = steps
    assert "triples of whole numbers" in str(wrong_with(record))


def test_what_others_published_are_sizes_and_no_parts_of_a_total(published):
    rows = attributions(published, [])
    assert len(rows) == len(published.cells)
    files = [row for row in rows if row["file_bytes"]]
    assert len(files) > 50
    for row in rows:
        assert row["kind"] == "reported"
        assert row["loaded"] is None or row["loaded"]["unattributed_bytes"] is None


def remembered(harness: Callable[..., Any], config: Path) -> dict[str, dict[str, Any]]:
    """Rows by variant of real runs of the tiny model, as `harness memory` tells them."""
    harness("run", config)
    ran = harness("report", "--memory", "results", "--json")
    assert ran.code == 0
    return {row["variant"]: row for row in ran.json}


def sound(row: dict[str, Any]) -> None:
    """Nothing is lost, nothing counted twice."""
    for at in ("loaded", "peak"):
        moment = row[at]
        known = [size for size in moment["parts"].values() if size is not None]
        rest = moment["total_bytes"] - sum(known)
        assert moment["unattributed_bytes"] == (None if moment["by_difference"] else rest)
        assert all(size >= 0 for size in known)
        assert -0.1 < rest / moment["total_bytes"] < 0.15  # of a tiny model: fixed costs are most of it
        assert 0 < moment["parts"]["runtime"] < moment["total_bytes"]
    assert row["loaded"]["by_difference"] == []
    assert row["peak"]["total_bytes"] >= row["loaded"]["total_bytes"]
    assert row["file_bytes"] > row["loaded"]["parts"]["weights"] * 0.4


def test_the_parts_of_a_real_llama_cpp_sum_to_what_it_holds(harness, real_config, llamacpp_interpreter):
    mapped = {"stack": "llamacpp", "quant": "f16", "n_ctx": 8192, "name": "mapped"}
    read = mapped | {"mmap": False, "name": "read"}
    found = remembered(harness, real_config(mapped, read))
    for row in found.values():
        sound(row)
        assert row["loaded"]["parts"]["kv"] == 8192 * row["kv_bytes_per_token"]
        assert row["peak"]["parts"]["compute"] > row["loaded"]["parts"]["compute"]
        assert row["peak"]["by_difference"] == ["compute"]
        assert row["not_measured"] == "its cache is allocated when it is loaded"
    table = harness("report", "--memory", "results").out
    assert f"~{found['read']['peak']['parts']['compute'] / 1e6:,.1f}" in table
    assert "~: inferred" in table


def test_the_parts_of_a_real_transformers_sum_to_what_it_holds(
    harness, real_config, tmp_path, hf_interpreter, own_processes
):
    found = remembered(harness, real_config({"stack": "hf", "cache": ["dynamic", "static"]}))
    for row in found.values():
        sound(row)
    told = records_below(tmp_path / "results")[0]["loaded"]
    assert set(told["memory"]["model"]) == {"cpu mapped"}  # bf16, as stored: read where the file is mapped
    assert told["heap_free_bytes"] >= 0
    dynamic, static = found["bf16-dynamic"], found["bf16-static"]
    assert dynamic["loaded"]["parts"]["kv"] == 0
    assert dynamic["peak"]["parts"]["kv"] > 0
    assert static["loaded"]["parts"]["kv"] == static["peak"]["parts"]["kv"] > 0
    assert dynamic["loaded"]["parts"]["slack"] is not None
