"""What this machine is and can do: real processes and real kernels. Rates are positive and named; how large
they are is not tested."""

import json
import platform
from pathlib import Path

import psutil
import pytest
from conftest import records_below, shell_script

from harness import machine
from harness.campaign import peak_rates, worker
from harness.campaign.device_lock import device_lock
from harness.campaign.repeat import Inputs
from harness.machine.cgroups import free_memory_bytes
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks

FACTS = {
    *("device", "family", "name", "memory_bytes", "architecture", "physical_cores", "logical_cpus"),
    *("usable_cpus", "last_level_cache_bytes", "os", "virtualized", "emulated", "driver"),
    "compute_capability",
}
RATES = {
    *("read_bytes_per_s", "read_kernel", "read_kernels", "working_set_bytes", "threads"),
    *("matrix_flops_per_s", "matrix_kernel", "matrix_kernels"),
}
SMALL = {"measure": ["read", "matrix"], "threads": 2, "working_set_bytes": 64 << 20}


def is_the_best(rate: float, kernel: str, kernels: dict[str, float]) -> bool:
    return rate == kernels[kernel] == max(kernels.values()) and min(kernels.values()) > 0


# harness doctor: this machine


def test_machine_gives_one_object_per_device_with_null_for_what_is_not_measured(harness):
    ran = harness("doctor", "--json")
    assert ran.code == 0
    devices = ran.json["devices"]
    cpu, *gpus = devices
    assert all(set(row) == FACTS | RATES | {"note"} for row in devices)
    assert (cpu["device"], cpu["memory_bytes"]) == ("cpu", psutil.virtual_memory().total)
    assert cpu["name"]
    assert (cpu["driver"], cpu["compute_capability"]) == (None, None)
    assert all(row[key] is None for row in devices for key in RATES | {"note"})
    of_cuda = [gpu["device"] for gpu in gpus if gpu["family"] == "cuda"]
    assert of_cuda == [gpu["uuid"] for gpu in machine.facts()["gpus"]]


@pytest.mark.slow("measures the machine, for seconds")
def test_measure_gives_rates_of_named_kernels_of_which_the_best_counts(harness, tmp_path):
    ran = harness("doctor", "--measure", "--json", HARNESS_CACHE=str(tmp_path / "nothing built"))
    assert ran.code == 0
    cpu = ran.json["devices"][0]
    reason = "the kernels of a stack may be faster, but none is built; run: "
    assert cpu["note"] == f"{reason}harness env create llamacpp --device cpu"
    assert is_the_best(cpu["read_bytes_per_s"], cpu["read_kernel"], cpu["read_kernels"])
    assert is_the_best(cpu["matrix_flops_per_s"], cpu["matrix_kernel"], cpu["matrix_kernels"])
    assert cpu["threads"] == machine.physical_cores()
    assert all(name.startswith("sgemm, ") and "N=" in name for name in cpu["matrix_kernels"])


def test_what_was_measured_of_this_cpu_is_kept_with_its_date_until_it_is_measured_again(harness, tmp_path):
    rates = dict.fromkeys(("read_kernels", "working_set_bytes", "matrix_kernels", "threads"))
    rates |= {
        "read_bytes_per_s": 12.5e9,
        "read_kernel": "r",
        "matrix_flops_per_s": 5e10,
        "matrix_kernel": "m",
    }
    file = tmp_path / "cache" / "rates" / f"{machine.facts()['slug']}.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"measured": "2026-01-02", "stacks": [], **rates}))
    ran = harness("theory", "qwen1.5-0.5b", "--machine", "this", HARNESS_CACHE=str(tmp_path / "cache"))
    assert "this machine as measured on 2026-01-02 (again: harness doctor --measure)" in ran.err
    assert "this: 12.5 GB/s" in ran.out


@pytest.mark.slow("measures the machine, for seconds")
@pytest.mark.parametrize("damaged", ["{", '{"stacks": [], "read_bytes_per_s": "fast"}', "[]"])
def test_rates_that_cannot_be_read_are_measured_again(harness, tmp_path, damaged):
    file = tmp_path / "cache" / "rates" / f"{machine.facts()['slug']}.json"
    file.parent.mkdir(parents=True)
    file.write_text(damaged)
    ran = harness("theory", "qwen1.5-0.5b", "--machine", "this", HARNESS_CACHE=str(tmp_path / "cache"))
    assert ran.code == 0
    assert "as measured on" not in ran.err


def test_a_gpu_without_an_environment_says_how_to_build_one(harness, tmp_path):
    if machine.facts()["gpus"]:
        pytest.skip("a machine with an NVIDIA GPU")
    tool = shell_script(tmp_path / "bin" / "hipconfig", "")  # what shows that there is ROCm
    variables = {"PATH": f"{tool.parent}:/usr/bin:/bin", "HARNESS_CACHE": str(tmp_path / "nothing built")}
    ran = harness("doctor", "--measure", "--json", **variables)
    assert ran.code == 0
    gpu = ran.json["devices"][1]
    family = "metal" if platform.system() == "Darwin" else "hip"  # Metal is looked for first
    assert gpu["device"] == family
    assert gpu["read_bytes_per_s"] is None
    create = f"harness env create llamacpp --device {family}"
    assert gpu["note"] == f"no stack is built for this device; run: {create}"


def test_a_device_that_a_campaign_holds_is_not_measured(harness):
    with device_lock("cpu", wait=False, say=print):
        ran = harness("doctor", "--measure", "--json")
    assert (ran.code, ran.out) == (1, "")
    assert "is measuring on cpu; nothing was measured" in ran.err
    assert "--wait" not in ran.err


# The probes of a CPU


@pytest.mark.slow("measures the machine, for seconds")
def test_every_kind_of_kernel_reads_by_one_thread_or_more(cache):
    for threads in (1, 3):  # 3: more than there may be CPUs
        probe = machine.read_bandwidth(threads)
        assert is_the_best(probe["read_bytes_per_s"], probe["kernel"], probe["kernels"])
        assert probe["threads"] == threads
        names = " ".join(probe["kernels"])
        assert all(kind in names for kind in ("dot", "max", "one stream", "two streams"))
        assert 0 < probe["working_set_bytes"] <= psutil.virtual_memory().total / 2


def test_a_probe_that_fails_is_a_sentence(cache):
    for probe in (machine.read_bandwidth, machine.matrix_rate):
        why = r"could not be measured: .*threads must be at least 1, not 0$"
        with pytest.raises(machine.ProbeError, match=why):
            probe(0)


@pytest.mark.parametrize(
    ("controllers", "folder", "limit", "taken", "prefix"),
    [
        ("", ".", "memory.max", "memory.current", ""),
        ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
)
def test_the_memory_of_a_container_is_all_there_is_to_take(
    tmp_path, controllers, folder, limit, taken, prefix
):
    cgroups = Path("/proc/self/cgroup")
    if not cgroups.exists():
        pytest.skip("a system without cgroups")
    lines = cgroups.read_text().splitlines()
    if not any(line.split(":", 2)[1] == controllers for line in lines):
        pytest.skip("this process is in no such cgroup")
    inside = tmp_path / folder
    inside.mkdir(exist_ok=True)
    (inside / limit).write_text("300000000\n")
    (inside / taken).write_text("250000000\n")
    cached = f"{prefix}inactive_file 20000000\n{prefix}active_file 5000000\n"
    (inside / "memory.stat").write_text(f"anon 1\n{cached}")
    assert free_memory_bytes(tmp_path) == 75_000_000
    (inside / limit).write_text("max\n")
    assert free_memory_bytes(tmp_path) > 75_000_000


# Probes of a campaign


def test_a_record_carries_the_probes_that_its_config_asks_for(harness, config, tmp_path):
    asked = {"measure_bandwidth": True, "measure_matrix_rate": True}
    assert harness("run", config({}, repeats=2, **asked)).code == 0
    first, second = sorted(records_below(tmp_path / "results"), key=lambda record: record["repeat"])
    matrix = first["matrix_probe"]
    assert is_the_best(matrix["flops_per_s"], matrix["kernel"], matrix["kernels"])
    assert matrix["threads"] == first["threads"]
    assert matrix["cpus_busy"] > 0
    assert second["matrix_probe"] == matrix  # once a campaign
    assert [len(record["bandwidth_probes"]) for record in (first, second)] == [1, 2]  # each round


def inputs(interpreter, device_id: str, threads: int) -> Inputs:
    """A cell that is ready for a probe."""
    return Inputs(interpreter, device_id, None, [1], "", {}, threads, 60.0, 200, {})


def test_a_campaign_goes_on_without_a_probe_that_fails(fake_interpreter):
    said: list[str] = []
    cells = [inputs(fake_interpreter, "cpu", 0)]
    asked = peak_rates.Probes(cells, said.append, bandwidth=True, matrix=True)
    assert asked.so_far(1) == ([], None)
    assert len(said) == 2
    assert all(line.startswith("probe failed: ") and "threads must be at least 1" in line for line in said)


# The probe of a stack: llama.cpp's, here on its CPU backend; a GPU's takes the same way


def test_ggml_measures_the_device_by_its_own_products(job):
    size = 1 << 30  # far more than the products take
    said = job(job="probe", options=SMALL | {"working_set_bytes": size})
    read, matrix = said["read"], said["matrix"]
    assert is_the_best(read["read_bytes_per_s"], read["kernel"], read["kernels"])
    assert is_the_best(matrix["flops_per_s"], matrix["kernel"], matrix["kernels"])
    assert set(read["kernels"]) == {f"ggml mul_mat {t} x f32 vector, CPU" for t in ("f32", "f16", "q8_0")}
    assert {f"ggml mul_mat {t} x f32 matrix, CPU" for t in ("f16", "q8_0")} < set(matrix["kernels"])
    looked = job(job="probe", options={})  # it is not asked to measure, so it only looks
    assert "read" not in looked
    assert looked["devices"] == said["devices"]
    assert read["working_set_bytes"] == size
    assert said["peak_rss_bytes"] > looked["peak_rss_bytes"] + size  # what is read was written


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"options": SMALL | {"threads": 0}}, "threads must be 1 to 512, not 0"),
        ({"options": SMALL | {"working_set_bytes": 1000}}, "0 MB on CPU is too little"),
        ({"options": SMALL, "device": "cuda"}, "this llama.cpp build has no GPU support, or finds no GPU"),
    ],
)
def test_what_ggml_cannot_measure_is_a_sentence(job, fields, reason):
    with pytest.raises(worker.JobFailed, match=reason):
        job(job="probe", **fields)


@pytest.mark.slow("multiplies matrices of all types for seconds")
def test_ggml_measures_how_fast_it_multiplies_each_type(job):
    rates = job(job="probe", options={"measure": ["types"], "threads": 2})["types"]["rates"]
    assert {"f32", "f16", "q8_0", "q4_0", "q6_k", "q2_k", "mxfp4"} <= rates.keys()
    assert all(0 < each["bytes_per_s"] < 1e13 for each in rates.values())
    assert all(each["repacked_bytes_per_s"] != 0 for each in rates.values())


def test_a_cpus_matrix_rate_is_the_best_of_numpy_and_the_stacks(llamacpp_interpreter):
    probe = peak_rates.cpu_matrix_rate(2, [llamacpp_interpreter], pytest.fail)
    assert is_the_best(probe["flops_per_s"], probe["kernel"], probe["kernels"])
    assert {name.split()[0] for name in probe["kernels"]} == {"sgemm,", "ggml"}


def test_a_gpu_that_the_stack_does_not_see_is_said_once_and_not_tried_again(llamacpp_interpreter):
    said: list[str] = []
    cells = [inputs(llamacpp_interpreter, "metal", 1)] * 2
    asked = peak_rates.Probes(cells, said.append, bandwidth=True, matrix=True)
    for repeat in (1, 2):
        assert asked.so_far(repeat) == ([], None)
    assert len(said) == 1
    assert "metal could not be measured by llamacpp: device metal: this llama.cpp build" in said[0]


def test_stacks_without_kernels_of_their_own_are_not_measured():
    environments = (
        stacks()[name].environments["cpu"] for name in ("http", "llamacpp", "llamaserver", "fake")
    )
    found = peak_rates.measuring(Interpreter(each, Path("python"), ()) for each in environments)
    assert [each.environment.stack for each in found] == ["llamacpp"]
