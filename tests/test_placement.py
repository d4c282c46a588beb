"""Experts on the CPU and the rest on a GPU: where each tensor goes, a step's bytes on each side, whether a
stack put it there, and what is said of a placement that cannot be meant."""

import json
from collections.abc import Callable
from typing import Any

import gguf_holes
import pytest
from conftest import Ran, records_below, refused, settled, told
from gguf_holes import write_hole, write_random
from golden_record import record
from test_limits import planned

from harness.analysis.verdicts import status
from harness.report import tuned as report_tuned
from harness.stacks.adopted import Interpreter
from harness.stacks.header import stacks
from harness.theory import floors, split_weights
from harness.theory.decoder import kv_elements_per_token
from harness.theory.ggml_quants import quantized
from harness.theory.known_models import Known
from harness.theory.machines import MACHINES
from harness.theory.split_weights import Placement, PlacementError, Split

CARD = MACHINES["rtx-4090"]


def sides_of(name: str, quant: str, wanted: Placement) -> Split:
    made = Known()[name]
    return split_weights.split_layers(wanted, made, quantized(made, quant))


def test_experts_of_the_first_layers_are_on_the_cpu_and_nothing_is_lost_or_read_twice():
    made = Known()["qwen3-30b-a3b"]
    tensors = quantized(made, "q4_k_m")
    needs = floors.demand_of_tensors(made, tensors)
    experts = [tensor for tensor in tensors if "_exps." in tensor.name]
    for layers in (1, 20, 48):
        sides = sides_of("qwen3-30b-a3b", "q4_k_m", Placement(layers))
        first = sum(t.bytes for t in experts if int(t.name.split(".")[1]) < layers)
        assert sides.cpu_bytes == first + needs.embedding_bytes
        assert sides.cpu_bytes + sides.gpu_bytes == needs.resident_bytes
        assert sides.cpu_read == pytest.approx(first * 8 / 128, rel=1e-6)
        assert sides.cpu_read + sides.gpu_read == pytest.approx(needs.weight_bytes_per_token, rel=1e-6)


def test_more_layers_than_there_are_means_all_of_them():
    every = sides_of("qwen3-30b-a3b", "q4_k_m", Placement(48))
    assert sides_of("qwen3-30b-a3b", "q4_k_m", Placement(999)) == every
    Placement(999).check(Known()["qwen3-30b-a3b"], None)


def test_layers_are_counted_as_llama_cpp_counts_them():
    """load_tensors in llama-model.cpp: of n layers, those before n + 1 - n_gpu_layers are on the CPU, and the
    output is a layer more."""
    made = Known()["qwen3-30b-a3b"]
    sizes = {each.name: each.bytes for each in quantized(made, "q4_k_m")}
    output = sizes["output.weight"] + sizes["output_norm.weight"]
    for given, first in ((999, 0), (49, 0), (48, 1), (1, 48)):
        layers = [name for name in sizes if name.startswith("blk.") and int(name.split(".")[1]) >= first]
        sides = sides_of("qwen3-30b-a3b", "q4_k_m", Placement(gpu_layers=given))
        assert sides.gpu_bytes == sum(sizes[name] for name in layers) + output
        assert sides.cpu_bytes == sum(sizes.values()) - sides.gpu_bytes
    assert sides_of("qwen3-30b-a3b", "q4_k_m", Placement(gpu_layers=0)).gpu_bytes == 0
    gpu, cpu = split_weights.side_models(Placement(gpu_layers=20), made, quantized(made, "q4_k_m"), 2)
    assert (gpu.made.count, cpu.made.count) == (19, 29)
    assert gpu.kv_bytes_per_token + cpu.kv_bytes_per_token == 2 * kv_elements_per_token(made)


def test_theory_tells_memory_without_a_bandwidth_and_whether_the_host_holds_its_side(harness):
    given = ("theory", "gpt-oss-120b", "--machine", "rtx-4090", "--context", "8k", "--n-cpu-moe", "999")
    (row,) = harness(*given, "--json").json
    assert (row["sides"]["n_cpu_moe"], row["sides"]["cpu_bytes_per_s"], row["B_ms"]) == (36, None, None)
    assert row["fits"]["llama.cpp"]["spare_bytes"] > 20e9
    assert row["sides"]["cpu_spare_bytes"] is None
    (small,) = harness(*given, "--host-memory", "32GB", "--cpu-bandwidth", "60", "--json").json
    spare = 32 * 2**30 - 2**30 - small["sides"]["cpu_need_bytes"]
    assert small["sides"]["cpu_spare_bytes"] == small["fits"]["llama.cpp"]["spare_bytes"] == spare < 0
    assert (small["fits"]["llama.cpp"]["longest"], small["tokens_per_s"]) == (None, None)
    (large,) = harness(*given, "--host-memory", "128GB", "--cpu-bandwidth", "60", "--json").json
    assert large["fits"] == row["fits"]
    assert large["tokens_per_s"] > 10
    said = " ".join(harness(*given, "--host-memory", "32GB").out.split())
    short = f"{-spare / 1e9:.1f} GB short"
    assert f"GB of main memory: {short}, 1.1 GB reserved for the operating system." in said
    assert "--cpu-bandwidth GB/S adds the speed." in said


def test_the_first_pattern_that_a_name_contains_decides():
    wanted = Placement(1, r"ffn_down_exps=CUDA0,blk\.[0-2]\.=CPU")
    assert wanted.buffer_of("blk.0.ffn_down_exps.weight") == "CPU"
    assert wanted.buffer_of("blk.1.ffn_down_exps.weight") == "CUDA0"
    assert wanted.buffer_of("blk.2.attn_q.weight") == "CPU"
    assert wanted.buffer_of("blk.12.attn_q.weight") is None
    assert not Placement(1).buffer_of("blk.10.ffn_up_exps.weight")


@pytest.mark.parametrize(
    ("model", "wanted", "sentence"),
    [
        ("qwen3-4b-2507", Placement(4), "n_cpu_moe 4: the model has no experts"),
        ("mixtral-8x7b", Placement(0, "exps"), "override_tensor: 'exps' is not PATTERN=BUFFER, such as"),
        (
            "mixtral-8x7b",
            Placement(0, "(=CPU"),
            "override_tensor: '(' is not a regular expression: missing ),",
        ),
        ("mixtral-8x7b", Placement(0, "exp=CPU,xyz=CPU"), "'xyz=CPU' matches no tensor of the model"),
    ],
)
def test_a_placement_that_cannot_be_meant_is_refused_with_one_sentence(model, wanted, sentence):
    made = Known()[model]
    names = [tensor.name for tensor in quantized(made, "q4_0")]
    with pytest.raises(PlacementError) as wrong:
        wanted.check(made, names)
    assert sentence in str(wrong.value)


def test_theory_adds_the_time_of_the_cpu_to_that_of_the_card(harness: Callable[..., Ran]):
    where = ("--machine", "rtx-4090", "--context", "4k")
    given = ("theory", "qwen3-30b-a3b", *where, "--quant", "q8_0", "--json")
    (whole,) = harness(*given).json
    (row,) = harness(*given, "--n-cpu-moe", "24", "--cpu-bandwidth", "80").json
    sides = sides_of("qwen3-30b-a3b", "q8_0", Placement(24))
    assert row["sides"]["cpu_bytes"] == sides.cpu_bytes
    expected = sides.cpu_read / 80e9 + sides.gpu_read / CARD.bandwidth_bytes_per_s
    assert row["B_ms"] == pytest.approx(expected * 1e3)
    assert row["tokens_per_s"] == pytest.approx(1 / expected)
    assert row["latency_ms_at_context"] - row["B_ms"] == pytest.approx(4096 / row["W_tokens_per_ms"])
    assert whole["fits"]["llama.cpp"]["spare_bytes"] < 0 < row["fits"]["llama.cpp"]["spare_bytes"]
    held = row["fits"]["llama.cpp"]["need_bytes"] - whole["fits"]["llama.cpp"]["need_bytes"]
    assert held == pytest.approx(sides.gpu_bytes - sides_of("qwen3-30b-a3b", "q8_0", Placement()).gpu_bytes)
    assert row["prefill_ms"] is None
    ran = harness(*given[:-1], "--n-cpu-moe", "24", "--cpu-bandwidth", "80")
    assert "experts of 24 layers on the CPU" in " ".join((ran.out + ran.err).split())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("qwen3-4b-2507 --machine 4090 --n-cpu-moe 2 --cpu-bandwidth 80", "no experts"),
        ("mixtral-8x7b --machine 4090 --cpu-bandwidth 80", "--cpu-bandwidth is of the CPU that --n-cpu-moe"),
        ("mixtral-8x7b --machine 4090 --host-memory 64GB", "--host-memory is of the CPU that --n-cpu-moe"),
        ("mixtral-8x7b --n-cpu-moe 4 --cpu-bandwidth 80", "needs a --machine"),
        ("mixtral-8x7b --machine apple-m2-max-32gb --n-cpu-moe 4 --cpu-bandwidth 80", "of its own"),
    ],
)
def test_what_theory_cannot_place_is_one_sentence(harness: Callable[..., Ran], given, sentence):
    refused(harness("theory", *given.split()), sentence)


def test_a_dry_run_says_what_lies_on_each_side_and_how_fast_it_can_be(harness, tmp_path):
    made = write_hole(tmp_path / "m.gguf", gguf_holes.config("qwen3_moe"))
    models = [{"name": "m", "weights": str(tmp_path / "m.gguf")}]
    variants: list[dict[str, Any]] = [{"stack": "llamacpp", "quant": "f16", "n_cpu_moe": [0, 6]}]
    given = {"device": "cuda", "gpu": "RTX 4090", "models": models, "variants": variants}
    (tmp_path / "c.yaml").write_text(json.dumps(given))
    whole, apart = harness("run", "c.yaml", "--dry-run", "--json").json
    assert (whole["weights_on_cpu_bytes"], whole["most_tokens_per_s"]) == (None, None)
    sides = split_weights.split_layers(Placement(6), made, quantized(made, "f16"))
    on_each = (apart["weights_on_cpu_bytes"], apart["weights_on_gpu_bytes"])
    assert on_each == (sides.cpu_bytes, sides.gpu_bytes)
    everything = split_weights.split_layers(Placement(), made, quantized(made, "f16"))
    assert whole["memory_bytes"] - apart["memory_bytes"] == everything.gpu_bytes - sides.gpu_bytes
    assert f"{sides.cpu_bytes / 1e9:.1f} GB on the CPU" in apart["note"]
    if most := apart["most_tokens_per_s"]:  # null where this machine was too busy to be measured
        assert f"at most {most:.3g} tok/s" in apart["note"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n_cpu_moe": 2}, "n_cpu_moe 2: the model has no experts"),
        ({"override_tensor": "blk.99=CPU"}, "override_tensor: 'blk.99=CPU' matches no tensor of the model"),
        ({"override_tensor": "*=CPU"}, "is not a regular expression"),
    ],
)
def test_a_cell_with_such_a_placement_is_refused_before_anything_is_made(
    harness, tmp_path, options, sentence
):
    variants = [{"stack": "llamacpp", "quant": "q8_0", **options}]
    (line,) = planned(harness, tmp_path, [{"shape": "qwen1.5-0.5b"}], variants).values()
    assert [sentence in reason for reason in line["will_be_refused"]] == [True]


def test_the_command_line_of_llama_server_has_both_as_a_shell_takes_them():
    header = stacks()["llamacpp"]
    options = {name: option.default for name, option in header.options.items()}
    assert "moe" not in (report_tuned.command(header, options, "m.gguf") or "")
    options |= {"n_cpu_moe": 4, "override_tensor": r"blk\.(1|2)\.=CPU"}
    command = report_tuned.command(header, options, "m") or ""
    assert r"--n-cpu-moe 4 --override-tensor 'blk\.(1|2)\.=CPU'" in command


# --- what the worker sees -----------------------------------------------------------------------------------

LOADED = """
from runners.llamacpp import lib
from runners.llamacpp.lib import overrides, placed
for name, buffer in {logged}:
    lib.LOG._read(f"tensor {{name}} (12 MiB q4_K) buffer type overridden to {{buffer}}")
wanted = overrides({options})
print(placed(wanted, dict.fromkeys({names}, 10), lib.LOG.overridden))
"""
NAMES = [f"blk.{n}.ffn_{part}_exps.weight" for n in (0, 1) for part in ("up", "down")] + ["output.weight"]


def audited(interpreter: Interpreter, logged: list[tuple[str, str]], **options: Any) -> Any:
    """As on a machine with a GPU, by its log."""
    code = LOADED.format(logged=logged, options=options, names=NAMES)
    return eval(told(interpreter, code)[-1])  # a dict


def test_each_tensor_is_looked_for_in_the_log_and_pinned_memory_is_main_memory(llamacpp_interpreter):
    everywhere = [(name, "CUDA_Host") for name in NAMES[:4]]
    found = audited(llamacpp_interpreter, everywhere, n_cpu_moe=2)
    assert found == {"tensors": {"CUDA_Host": 4}, "bytes": {"CUDA_Host": 40}, "misplaced": []}
    missing = audited(llamacpp_interpreter, everywhere[:3], n_cpu_moe=2)
    assert missing["misplaced"] == [{"tensor": NAMES[3], "asked": "CPU", "found": None}]
    other = audited(llamacpp_interpreter, [("output.weight", "CPU")], override_tensor="output=CUDA0")
    assert other["misplaced"] == [{"tensor": "output.weight", "asked": "CUDA0", "found": "CPU"}]
    assert audited(llamacpp_interpreter, []) is None


def test_a_tensor_that_is_not_where_it_was_asked_makes_a_record_invalid():
    misplaced = {"tensor": "output.weight", "asked": "CUDA0", "found": "CPU"}
    wrong = {"tensors": {"CPU": 1}, "bytes": {"CPU": 10}, "misplaced": [misplaced]}
    said = "1 tensor not where requested: output.weight (CUDA0 was requested, CPU has it)"
    assert status(record(loaded__placement=wrong)) == ("invalid", [said])


def test_a_graph_that_is_split_on_purpose_is_no_fault():
    changes: dict[str, Any] = {"device": "GPU-1", "loaded__devices": {}}
    changes |= {"loaded__graph_splits": {"prompt": 50, "step": 50}, "options__n_cpu_moe": 2}
    right = {"tensors": {"CUDA_Host": 4}, "bytes": {"CUDA_Host": 40}, "misplaced": []}
    assert status(record(**changes, loaded__placement=right)) == ("ok", [])
    assert status(record(**changes))[0] == "invalid"


def test_an_override_to_the_cpu_loads_runs_and_is_in_the_record(
    harness, real_config, llamacpp_interpreter, tmp_path
):
    made = write_random(tmp_path / "model.gguf", gguf_holes.config("qwen3_moe"))
    variant = {"stack": "llamacpp", "n_cpu_moe": 3, "override_tensor": r"attn_(q|k)\.=CPU"}
    model = {"name": "tiny", "weights": "model.gguf"}
    ran = harness("run", real_config(variant, model=model, new_tokens=20, warmup={"max_windows": 2}))
    (found,) = records_below(tmp_path / "results")
    placed = found["loaded"]["placement"]
    assert placed["misplaced"] == []
    assert sum(placed["tensors"].values()) == 3 * 3 + 2 * made.count
    tensors = {tensor.name: tensor.bytes for tensor in quantized(made, "f16")}
    wanted = Placement(3, r"attn_(q|k)\.=CPU")
    assert sum(placed["bytes"].values()) == sum(b for name, b in tensors.items() if wanted.buffer_of(name))
    (row,) = harness("report", "--list", tmp_path / "results", "--json").json
    assert settled(row) == "ok", ran.err


def test_a_buffer_type_that_the_build_lacks_is_named_with_those_that_it_has(
    llamacpp_interpreter, harness, tmp_path
):
    code = """
from runners.llamacpp import lib as llamacpp_lib
from runners.llamacpp.lib import array_of
try:
    array_of([("exps", "CUDA7")])
except ValueError as wrong:
    print(wrong)
"""
    assert told(llamacpp_interpreter, code)[-1] == (
        "override_tensor: unknown buffer type CUDA7; there are CPU"
    )
