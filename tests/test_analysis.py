"""Arithmetic on series of known truth, and verdicts on records of known lies."""

import pytest
from golden_record import GOLDEN, record

from harness.analysis import traffic
from harness.analysis.verdicts import status, verdict
from harness.dataset import cell_rows, table
from harness.records import NO_TOKENS, TokenTimes

ON_GPU = {"device": "GPU-1"}
THROTTLED = {"conditions__pressure": {"cgroup_throttled_us": 10**6}}  # of the cgroup, which others share
MB = 10**6
SERIES = TokenTimes.of_columns({"n": [26, 27, 28], "latency_ns": [9_000_000, 1_000_000, 2_000_000]})


def test_the_golden_record_stands():
    assert status(record()) == ("ok", [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 39}, "39 tokens generated"),
        ({"done__counters__evaluated_tokens": 40}, "a prefix was reused or added"),
        ({"done__counters__evaluated_tokens": 65}, "a prefix was reused or added"),
        ({"loaded__model_bytes": 1}, "model_bytes is 1 in the stack"),
        ({"loaded__parameters": 1}, "parameters is 1 in the stack"),
        ({"loaded__quant": "q8_0"}, "q4_k_m were requested but q8_0 were loaded"),
        ({"loaded__kernel_asked": "marlin"}, "kernel marlin was requested"),
        ({"loaded__options__flash_attn": True}, "flash_attn false was requested but true ran"),
        ({"loaded__options__threads": 7}, "threads 1 was requested but 7 ran"),
        (ON_GPU | {"loaded__devices": {"layers": {"CPU": 2, "CUDA0": 1}}}, "layers: 2 on the CPU"),
        (ON_GPU | {"loaded__devices": {"parameters": {"cpu": 1}}}, "parameters: 1 on the CPU"),
        (ON_GPU | {"loaded__devices": {"buffers": {"meta": 7}}}, "offloaded, not all on the"),
        (
            ON_GPU
            | {"loaded__devices": {"cache": {}}}
            | {"done__facts_changed": {"devices": {"cache": {"cpu": 4}}}},
            "cache: 4 on the CPU",
        ),
        (
            ON_GPU | {"loaded__devices": {}, "loaded__graph_splits": {"prompt": 50, "step": 2}},
            "some operations ran on the CPU: llama.cpp's graph has 50 splits",
        ),
        ({"loaded__devices": {"parameters": {"cpu": 9, "disk": 2}}}, "parameters: 2 on disk"),
        ({"loaded__devices": {"parameters": {"META": 2}}}, "parameters: 2 on META"),
        (
            {"loaded__leftovers": ["a", "b", "c", "d"]},
            "4 linear layers are not quantized as requested: a, b, c, ...",
        ),
        ({"done__facts_changed": {"leftovers": ["a"]}}, "1 linear layer is not quantized as requested: a"),
        ({"done__counters__compilations": 1}, "1 compilation while timing"),
        ({"done__counters__compilations": 3}, "3 compilations while timing"),
        ({"done__warmup__agreed": False}, "warm-up never settled"),
        ({"done__counters__stack_decode_ms": 1e4}, "two clocks differ"),
        ({"done__major_faults": 3}, "3 major page faults while timing"),
        ({"done__cpu_wait_ns": 10**9}, "waited for a CPU"),
        ({"conditions__worker_pressure": {"workingset_refault_file": 10**5}}, "410 MB of evicted file pages"),
        (
            {"conditions__worker_pressure": {"memory_stall_us": 10**9}},
            "memory pressure stalled it for 1000.00",
        ),
        *(
            (THROTTLED | {"done__cpu_wait_ns": waited}, "the CPU quota throttled it for 1.00 s over all CPUs")
            for waited in (10**6, None)
        ),
        (
            {"conditions__cpu_quota": 1.5, "done__cpu_wait_ns": 10**9}
            | {"conditions__pressure": {"cgroup_throttled_us": 10**6, "cgroup_throttled_periods": 15}},
            "the CPU quota of 1.50 CPUs throttled it in 15 periods, for 1.00 s over all CPUs (0.0",
        ),
    ],
)
def test_every_known_lie_makes_a_record_invalid_with_its_reason(changes, reason):
    state, reasons = status(record(**changes))
    assert state == "invalid"
    assert any(reason in each for each in reasons), reasons


def test_what_is_where_it_was_asked_for_is_no_lie():
    for changes in (
        {"loaded__devices": {"parameters": {"cpu": 9}, "cache": {}}},
        ON_GPU | {"loaded__devices": {"parameters": {"cuda:0": 9}, "buffers": {"cpu": 0}}},
        ON_GPU
        | {"options__gpu_layers": 2, "loaded__devices": {"layers": {"CPU": 2}}}
        | {"loaded__graph_splits": {"prompt": 50, "step": 50}},
        ON_GPU | {"loaded__devices": {}, "loaded__graph_splits": {"prompt": 2, "step": 2}},
        {"loaded__leftovers": [], "done__counters__compilations": 0},
    ):
        assert status(record(**changes)) == ("ok", [])


def of_checkpoint(by_type: dict[str, int], loaded_bytes: int, quant: str = "bf16", **more: object) -> dict:
    """Of a bf16 checkpoint with 500 parameters, as a stack of checkpoints loads one."""
    header = {"model_bytes": sum(by_type.values()), "parameters": 500, "bytes_by_type": by_type}
    weights = {"format": "hf", "quant": "bf16", "header": header}
    changes: dict[str, object] = {f"model__weights__{name}": value for name, value in weights.items()}
    changes |= {"options__quant": None, "loaded__quant": quant, "loaded__parameters": 500}
    return record(**(changes | {"loaded__model_bytes": loaded_bytes} | more))


def test_bytes_are_held_against_the_header_where_it_has_the_types_that_were_loaded():
    assert status(of_checkpoint({"bf16": 1000}, 1000))[1] == []
    assert "model_bytes is 996 in the" in status(of_checkpoint({"bf16": 1000}, 996))[1][0]
    mixed = {"f32": 40, "bf16": 980}  # norms in 32 bits, which are cast
    assert status(of_checkpoint(mixed, 1000))[1] == []
    assert "parameters is 490" in status(of_checkpoint(mixed, 1000, loaded__parameters=490))[1][0]
    assert status(of_checkpoint({"bf16": 1000}, 600, quant="nf4"))[1] == []
    as_gguf = of_checkpoint(mixed, 1000, model__weights__format="gguf")  # held as stored
    assert "model_bytes is 1000 in the stack but 1020" in status(as_gguf)[1][0]


def marks_of(warmed: int | None, finished: int | None) -> list[dict]:
    """Marks of memory with so many bytes of the weights in RAM, before and after timing."""
    bare = {"rss_anon_bytes": 0, "rss_file_bytes": 0, "vram_bytes": None}
    of = {"warmed": warmed, "finished": finished}
    return [{"at": at, "rss_weights_bytes": held} | bare for at, held in of.items()]


def test_weights_that_came_into_memory_while_timing_are_caught_and_rows_of_an_embedding_are_not():
    def reasons(came: int, **sizes: object) -> list[str]:
        header = GOLDEN["model"]["weights"]["header"] | {"model_bytes": 10**9} | sizes
        of = {"model__weights__header": header, "loaded__model_bytes": 10**9}
        marks = marks_of(10**8, 10**8 + came)
        return verdict(record(memory={"marks": marks}, **of), ceiling=1e15).reasons

    tied, untied = {"tied": True}, {"tied": False, "input_embedding_bytes": 2 * 10**8}
    assert reasons(10 * MB, **tied) == []
    assert reasons(11 * MB, **tied) == ["11 MB of its weights were paged in while timing"]
    assert reasons(208 * MB, **untied) == []
    assert reasons(209 * MB, **untied) == ["209 MB of its weights were paged in while timing"]
    assert reasons(-(10**8), **tied) == []  # given back: what is needed again would be faults
    for marks in ([], marks_of(None, 10**9), marks_of(0, None)):
        assert status(record(memory={"marks": marks}))[1] == []


@pytest.mark.parametrize(
    ("pressure", "said"),
    [
        ({"workingset_refault_file": 10**5}, "410 MB of evicted file pages were read again"),
        ({"pswpin": 9}, "9 pages swapped in"),
        ({"memory_stall_us": 10**9}, "memory pressure stalled it for 1000.00 s of 0.00"),
        (
            {"cgroup_throttled_us": 10**6},
            "the CPU quota throttled the cgroups around it for 1.00 s over all CPUs (0.00 s timed)",
        ),
    ],
)
def test_what_rose_on_the_whole_machine_is_a_remark_and_never_a_reason(pressure, said):
    """A 2 MB model was invalid for 289 MB that something else read. Older records have no counters of their
    own cgroup; of newer ones, and of those with a cgroup of their own, it is the same."""
    remark = {"machine_under_pressure": f"the whole machine, while timing: {said}"}
    for own in ({}, {"conditions__worker_pressure": {}}, {"conditions__worker_pressure": {"pswpin": 1}}):
        assert flags_of(conditions__pressure=pressure, **own) == remark
    assert status(record(conditions__pressure=pressure, done__major_faults=1))[1] == [
        "1 major page fault while timing"
    ]


def test_waiting_for_the_quota_is_no_waiting_for_other_processes_and_what_is_left_is():
    def waited(ms: int) -> list[str]:
        throttled = {"cgroup_throttled_us": 10**6, "cgroup_throttled_periods": 15}
        of = {"conditions__pressure": throttled, "done__cpu_wait_ns": ms * 10**6}
        return [reason for reason in status(record(**of))[1] if "waited for a CPU" in reason]

    assert waited(1000) == []
    assert waited(1040) == []
    (left,) = waited(1060)
    assert "other processes were running" in left


def test_threads_that_used_all_cpus_waited_for_each_other_and_no_other_process_is_blamed():
    """Two threads on two CPUs for 10 s: what vLLM showed, with 98.9% of the CPUs used by itself."""

    def raised(cpu_s: float, cpus: int = 2) -> tuple[list[str], list[str]]:
        of = {"threads": 2, "machine__usable_cpus": cpus, "timing__last_token_ns": 10**10}
        judged = record(**of, done__cpu_wait_ns=1_200_000_000, done__cpu_s=cpu_s)
        texts = (status(judged)[1], [flag.detail for flag in verdict(judged).notes])
        return tuple([text for text in found if "waited for a CPU" in text] for found in texts)

    others, own = raised(19.6)
    assert others == []
    assert own == [
        "its threads waited for a CPU 6% of the time, for each other: the stack runs more than 2 threads"
    ]
    others, own = raised(18.0)
    assert (len(others), own) == (1, [])
    assert "other processes were running" in others[0]
    others, _ = raised(19.6, cpus=4)
    assert len(others) == 1


def test_the_client_of_a_server_elsewhere_waits_with_one_thread():
    def reasons(elsewhere: bool) -> list[str]:
        served = {"api": "openai", "elsewhere": elsewhere, "template": False}
        waited = {"threads": 64, "done__cpu_wait_ns": 60 * MB, "timing__last_token_ns": 200 * MB}
        found = status(record(loaded__served=served, **waited))[1]
        return [reason for reason in found if "waited for a CPU" in reason]

    assert reasons(False) == []
    assert "for a CPU 30% of the time" in reasons(True)[0]


def flags_of(**changes: object) -> dict[str, str]:
    said = table.repeat_row(record(**changes), SERIES, None, None)
    assert said["status"] == "ok"
    return {flag["code"]: flag["detail"] for flag in said["flags"] if flag["code"] != "early_stop"}


def test_remarks_tell_what_to_know_and_spoil_nothing():
    none = {"loaded__warnings": [], "done__counters__allocator_retries": []}
    assert flags_of(loaded__trained_context=65, **none) == {}
    found = flags_of(loaded__trained_context=64, loaded__warnings=["values decide the speed"])
    assert found == {
        "beyond_trained_context": "the context grows to 65 tokens, but the model was trained on at most 64",
        "stack_warning": "values decide the speed",
    }
    stopped = {"workload__kind": "grow", "workload__new_tokens": 5000, "done__stopped": "out of memory"}
    assert flags_of(**stopped, loaded__trained_context=65) == {}  # it held 65 tokens
    assert list(flags_of(**stopped, loaded__trained_context=64)) == ["beyond_trained_context"]
    assert flags_of(done__counters__allocator_retries=[[30, 1], [41, 2]]) == {
        "allocator_retries": "3 times the allocator had to free memory and try again, at n = 30, 41"
    }
    many = [[n, 1] for n in range(100, 105)]
    said = flags_of(done__counters__allocator_retries=many)["allocator_retries"]
    assert said.endswith("at n = 100, 101, 102 and 2 more places")


def test_memory_after_loading_is_of_the_device_and_the_peak_that_of_the_allocator():
    def loaded(**changes: object) -> list[int | None]:
        said = table.repeat_row(record(**changes), SERIES, None, None)
        return [said["loaded_bytes"], said["peak_allocator_bytes"]]

    both = {"memory__after_load_rss_bytes": 7, "memory__after_load_vram_bytes": 8}
    assert loaded() == [None, None]
    assert loaded(**both) == [7, None]
    assert loaded(device="GPU-1", **both) == [8, None]
    on_gpu = {"device": "GPU-1", "loaded__allocator": {"allocated_bytes": 5}, **both}
    assert loaded(**on_gpu, done__counters__allocator={"peak_allocated_bytes": 6}) == [5, 6]


def test_faster_than_memory_allows_is_no_measurement():
    fast = record(model__weights__header__model_bytes=10**9, loaded__model_bytes=10**9)
    fast["bandwidth_probes"] = [{"read_bytes_per_s": 50e9}]
    fast["timing"] |= {"first_token_ns": 0, "last_token_ns": 39 * 10_000_000}  # 1 GB in 10 ms: 100 GB/s
    assert any("faster than memory allows" in reason for reason in status(fast)[1])
    assert not [r for r in verdict(fast, ceiling=100e9).reasons if "faster" in r]


def test_a_record_whose_series_is_gone_is_no_measurement():
    judged = verdict(record(), has_series=False)
    assert (judged.status, judged.reasons) == ("invalid", ["its series of tokens is missing or damaged"])


def test_a_failure_keeps_its_outcome_whatever_else_is_wrong():
    assert status(record(outcome="oom", reason="does not fit", done=None)) == ("oom", ["does not fit"])


def test_an_untied_input_embedding_is_not_streamed_and_a_tied_one_is():
    header = {"model_bytes": 1000, "parameters": 500, "input_embedding_bytes": 300, "tied": False}
    assert traffic.weight_bytes_per_token(record(model__weights__header=header)) == 700
    tied = header | {"tied": True}
    assert traffic.weight_bytes_per_token(record(model__weights__header=tied)) == 1000
    assert traffic.bpw(record(model__weights__header=header)) == 16


def test_kv_bytes_follow_the_types_of_the_cache():
    attention = {"layers": 24, "kv_heads": 16, "head_dim": 64}
    assert traffic.kv_bytes_per_token(record(model__weights__attention=attention)) == 98_304
    small = record(model__weights__attention=attention, options__type_k="q8_0", options__type_v="f32")
    assert traffic.kv_bytes_per_token(small) == 24 * 16 * 64 * (34 / 32 + 4)


def test_a_cell_is_the_median_of_its_ok_repeats_and_tells_of_the_others():
    ok = [table.repeat_row(record(repeat=k), SERIES, None, None) for k in (-1, 0, 1)]
    lines = [row | {"B_ms": 2 + k / 100} for k, row in enumerate(ok, -1)]
    failed = record(repeat=4, outcome="oom", reason="does not fit")
    lines.append(table.repeat_row(failed, NO_TOKENS, None, None))
    (pooled,) = cell_rows.per_cell(lines)
    assert (pooled["B_ms"], pooled["repeats_ok"], pooled["repeats"]) == (pytest.approx(2), 3, 4)
    assert pooled["reasons"] == ["does not fit"]


def test_a_median_of_drifts_has_not_the_interval_of_one_of_them():
    rows = [
        table.repeat_row(record(repeat=k), SERIES, None, None)
        | {"drift": share, "drift_ci95": [share - 0.01, share + 0.01]}
        for k, share in enumerate((0.0, 0.01, 0.2))
    ]
    assert cell_rows.per_cell(rows[:1])[0]["drift_ci95"] == [-0.01, 0.01]
    several = cell_rows.per_cell(rows)[0]
    assert (several["drift"], several["drift_ci95"]) == (0.01, None)


def test_a_cells_W_is_that_of_its_mean_slope_with_the_interval_of_its_repeats():
    def cell(*slopes):
        lines = [table.repeat_row(record(repeat=k), SERIES, None, None) for k in range(len(slopes))]
        known = {"W_identifiable": True}
        lines = [line | known | {"slope_ms": slope} for line, slope in zip(lines, slopes, strict=True)]
        return cell_rows.per_cell(lines)[0]

    assert cell(-0.2, -0.1, 0.1)["W_tokens_per_ms"] is None
    found = cell(0.9e-3, 1.0e-3, 1.1e-3)
    assert found["W_tokens_per_ms"] == pytest.approx(1000)
    half = 4.302653 * 1e-4 / 3**0.5  # Student's t of 2 degrees of freedom
    assert found["W_ci95"] == pytest.approx([1 / (1e-3 + half), 1 / (1e-3 - half)])


def test_other_versions_or_devices_are_other_rows_and_a_repeat_measured_again_counts_once():
    known = {"B_ms": 8.0, "B_ci95_ms": [7.9, 9.1]}
    first = table.repeat_row(record(), SERIES, None, None) | known
    again = table.repeat_row(record(started_utc="2099-01-01T00:00:00+00:00"), SERIES, None, None)
    again |= known | {"B_ms": 9.0}
    other = table.repeat_row(record(content_key="another"), SERIES, None, None) | known
    pooled = cell_rows.per_cell([first, again, other])
    assert [(row["repeats"], row["B_ms"]) for row in pooled] == [(1, 9.0), (1, other["B_ms"])]
