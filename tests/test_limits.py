"""Limits of a stack: the header declares them, and the plan applies them before anything runs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import stored_in
from small_checkpoints import made
from test_packed import SMALL, packed

from harness import machine
from harness.campaign import forecast
from harness.config import Decode, Experiment, Protocol, plan
from harness.config import Model as ConfigModel
from harness.config.experiment import Scalar, Variant
from harness.config.plan import Cell
from harness.stacks.header import HeaderError, parse, stacks
from harness.stacks.limits import Known, broken
from harness.theory.decoder import Decoder, kv_elements_per_token
from harness.theory.ggml_quants import quantized
from harness.theory.hf_config import SHAPES
from harness.theory.known_models import Described
from harness.theory.known_models import Known as KnownModels
from harness.theory.machines import SYSTEM_RESERVE_BYTES
from harness.theory.memory import Model, Torch, exllama_v2_scratch, total_bytes
from harness.theory.packed_sizes import Packing, packed_bytes
from harness.theory.tensors import of_shape

GPTQ = Packing("gptq")
OF_DISPLAY = "reserved for the display and the driver (--headless: 0.5 GB; --reserve SIZE: another)"
KNOWN = Known("cuda", 10_000, (8, 9), SHAPES["qwen1.5-7b"], GPTQ, sharded=False)


def header(*lines: str) -> str:
    """A runner with these lines in its header, at the end of [tool.harness]."""
    return f"""# /// script
# requires-python = ">=3.10"
# [tool.harness]
# summary = "x"
# weights = "gptq"
{"".join(f"# {line}" + chr(10) for line in lines)}# [tool.harness.options.kernel]
# type = "string"
# choices = ["marlin", "exllama", "torch"]
# default = "exllama"
# help = "kernel"
# [tool.harness.options.fused]
# type = "bool"
# default = false
# help = "fused"
# [tool.harness.options.max_seq_len]
# type = "int"
# default-from = "tokens"
# help = "tokens"
# [tool.harness.env.cuda]
# device = "cuda"
# ///
"""


CACHE = ["[tool.harness.options.cache]", 'type = "string"', 'help = "cache"']


def limit(*rules: str) -> list[str]:
    return ["[[tool.harness.limits]]", 'message = "no"', *rules]


def reasons(rules: list[str], known: Known = KNOWN, **options: object) -> list[str]:
    given = {"kernel": "exllama", "fused": False, "max_seq_len": 10_000} | options
    return [each.reason for each in broken(parse("x", header(*rules)), given, known)]


UNCOVERED, CAPABILITY = "does not cover the {} tokens of prompt and decode", "compute capability"
ODD = SHAPES["qwen1.5-1.8b"]
RULES = {
    "out_features_multiple_of = 256": ({"made": ODD}, "out_features 5504 is not divisible by 256"),
    "in_features_multiple_of = 256": ({"made": ODD}, "in_features 5504 is not divisible by 256"),
    "bits = [4]": ({"packing": replace(GPTQ, bits=8)}, "8 bits; only 4"),
    "group_sizes = [128, -1]": ({"packing": replace(GPTQ, group_size=64)}, "group_size 64; only -1 and 128"),
    "act_order = false": ({"packing": replace(GPTQ, act_order=True)}, "act-order"),
    "symmetric = true": ({"packing": replace(GPTQ, symmetric=False)}, "asymmetric"),
    "sharded = false": ({"sharded": True}, "its weights are in several files"),
    'compute_capability = "8.0"': (
        {"compute_capability": (7, 5)},
        f"{CAPABILITY} 7.5; at least 8.0 is needed",
    ),
    'device = "cuda"': ({"device": "cpu"}, "needs a GPU (cuda)"),
    'covers = "max_seq_len"': ({"tokens": 10_001}, f"max_seq_len 10000 {UNCOVERED.format(10_001)}"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_broken_is_one_clause_and_one_that_holds_or_is_of_nothing_known_is_none(rule):
    known, reason = RULES[rule]
    assert reasons(limit(rule), replace(KNOWN, **known)) == [reason]
    assert reasons(limit(rule)) == []
    nothing = {"compute_capability": None, "made": None, "packing": None, "sharded": None}
    given = {key: value for key, value in known.items() if key in ("device", "tokens")}
    assert reasons(limit(rule), replace(KNOWN, **(nothing | given))) == ([reason] if given else [])


def test_inputs_and_outputs_of_a_matrix_are_told_apart():
    known = replace(KNOWN, made=SMALL)  # 64 wide, K and V 32, feed-forward 96
    for side, size in (("out_features", 32), ("in_features", 96)):
        assert reasons(limit(f"{side}_multiple_of = 64"), known) == [f"{side} {size} is not divisible by 64"]


@pytest.mark.parametrize(
    ("rule", "of_card", "wanted"),
    [
        ('compute_capability = "8.0"', (12, 0), None),
        ('compute_capability_below = "9.1"', (12, 0), "12.0; less than 9.1 is needed"),
        ('compute_capability_below = "9.1"', (9, 0), None),
        ('compute_capability = "10.0"', (8, 9), "8.9; at least 10.0 is needed"),
        ('compute_capability_except = "6.1"', (6, 1), "6.1; another is needed"),
        ('compute_capability_except = "6.1"', (6, 0), None),
    ],
)
def test_a_compute_capability_is_no_decimal_number(rule, of_card, wanted):
    told = [f"{CAPABILITY} {wanted}"] if wanted else []
    assert reasons(limit(rule), replace(KNOWN, compute_capability=of_card)) == told


def test_a_limit_holds_where_all_of_its_options_match_and_never_is_the_combination_itself():
    rules = limit('when = { kernel = ["marlin", "torch"], fused = true }', "never = true")
    assert reasons(rules, kernel="marlin", fused=True) == ["no"]
    assert reasons(rules, kernel="torch", fused=True) == ["no"]
    assert reasons(rules, kernel="marlin") == []
    assert reasons(rules, fused=True) == []


def test_every_rule_that_is_broken_is_told_once_whatever_the_number_of_layers():
    rules = limit("out_features_multiple_of = 256", "in_features_multiple_of = 256", "bits = [8]")
    assert reasons(rules, replace(KNOWN, made=SHAPES["qwen1.5-14b"])) == [
        "out_features 13696 is not divisible by 256",
        "in_features 13696 is not divisible by 256",
        "4 bits; only 8",
    ]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (limit("outfeatures = 256"), "limits.0.outfeatures: unknown key"),
        (limit('bits = "4"'), "limits.0.bits: Input should be a valid tuple"),
        (limit("act_order = true"), "limits.0.act_order: Input should be False"),
        (limit('compute_capability = "8"'), "'8' is not a version such as 8.0"),
        (limit('covers = "n_ctx"'), "limits has n_ctx, which is no option of type int"),
        (limit('covers = "kernel"'), "limits has kernel, which is no option of type int"),
        (limit('when = { kernell = "torch" }', "never = true"), "kernell, which is no option"),
        (limit('when = { kernel = "cuda" }', "never = true"), "kernel cuda, which is no choice"),
        (limit('when = { fused = "true" }', "never = true"), "fused true, which is no choice"),
        (limit('when = { kernel = "torch" }'), "has no rule"),
        (["[[tool.harness.limits]]", "bits = [4]"], "limits.0.message: is missing"),
        (['extends = "nowhere"'], "nowhere, which is no stack"),
        (['extends = "fake"'], "extends fake, which has nothing inheritable"),
        (['extends = "bnb"'], "extends bnb, which has nothing inheritable"),
        (['extends = "hf"', *CACHE], "inherits cache from hf, but has it too"),
        (['inheritable = ["cash"]'], "inheritable has cash, which is no option"),
        (["tunes = 1"], "tunes: unknown key"),
        (["reference = { cash = 1 }"], "reference has cash, which is no option"),
        (['scratch = { kernel = "cuda" }'], "kernel cuda, which is no choice"),
        (['memory = "gpt"'], "has memory = 'gpt'; there are llama.cpp, transformers, bitsandbytes"),
        (['functional = { metal = "slow" }'], "functional on metal"),
    ],
)
def test_a_mistake_in_a_header_is_told_with_the_file_it_is_in(lines, told):
    with pytest.raises(HeaderError, match=r"runners/stacks/x\.py: ") as mistake:
        parse("x", header(*lines))
    assert told in str(mistake.value)


def test_a_stack_inherits_the_options_the_context_and_the_memory_of_the_one_it_extends():
    extending, extended = parse("x", header('extends = "hf"')), stacks()["hf"]
    assert all(extending.options[name] == extended.options[name] for name in extended.inheritable)
    assert list(extending.options) == ["kernel", "fused", "max_seq_len", *extended.inheritable]
    assert extending.context_of({"cache": "static"}) == extended.context_of({"cache": "static"}) is not None
    assert extending.memory == "transformers"
    assert parse("x", header('extends = "hf"', 'memory = "bitsandbytes"')).memory == "bitsandbytes"


def test_a_device_on_which_speed_says_nothing_is_told_with_why():
    assert parse("x", header('functional = { cuda = "slow" }')).functional == {"cuda": "slow"}
    assert parse("x", header()).functional == {}


def test_the_limits_of_every_stack_name_options_that_it_has():
    found = [each for stack in stacks().values() for each in stack.limits]
    assert {"int8 has no scales to quantize" in each.message for each in found} == {True, False}
    assert all(each.message for each in found)


def planned(harness, tmp_path: Path, models: list[dict], variants: list[dict], **keys: object) -> dict:
    """The lines of a dry run by model and variant, for the study's card if not told otherwise. Nothing is
    there to be found: no environment, no weights."""
    given = {"device": "cuda", "gpu": "RTX 4090", "protocol": {"new_tokens": 9975}} | keys
    path = tmp_path / "planned.yaml"
    path.write_text(json.dumps(given | {"models": models, "variants": variants}))
    ran = harness("run", path, "--dry-run", "--json", HARNESS_CACHE=str(tmp_path / "empty"))
    assert ran.code == any(line["note"] for line in ran.json), ran.err
    return {tuple(line["cell"].split(".decode.")[0].rsplit(".", 2)[::2]): line for line in ran.json}


def test_what_marlin_cannot_do_is_known_from_shape_size_and_bits(harness, tmp_path):
    models = [{"name": name, "shape": f"qwen1.5-{name}"} for name in ("1.8b", "4b", "7b")]
    lines = planned(harness, tmp_path, models, [{"stack": "gptq", "kernel": "marlin", "bits": [4, 8]}])
    assert {key: line["will_fail"] for key, line in lines.items()} == {
        ("1.8b", "marlin-4"): ["out_features 5504 is not divisible by 256"],
        ("1.8b", "marlin-8"): ["out_features 5504 is not divisible by 256", "8 bits; only 4"],
        ("4b", "marlin-4"): [],
        ("4b", "marlin-8"): ["8 bits; only 4"],
        ("7b", "marlin-4"): ["its weights are in several files"],  # 5.9 GB; transformers cuts at 5
        ("7b", "marlin-8"): ["8 bits; only 4", "its weights are in several files"],
    }
    assert lines["1.8b", "marlin-4"]["note"] == "will fail: out_features 5504 is not divisible by 256"
    assert {line["will_not_fit"] for line in lines.values()} == {False}


def on_a_gpu(shape: Decoder, stored: int) -> int:
    """The estimate for 10,000 tokens by ExLlamaV2's kernels, with weights of so many bytes."""
    engine = Torch(True, "dynamic", exllama_v2_scratch(shape))
    return round(total_bytes(engine, Model(shape, stored, 0, 2 * kv_elements_per_token(shape)), 10_000))


def test_a_named_gpu_that_is_too_old_or_no_gpu_at_all_is_known_too(harness, tmp_path):
    models, variants = [{"shape": "qwen1.5-4b"}], [{"stack": "gptq", "kernel": ["marlin", "torch"]}]
    old = planned(harness, tmp_path, models, variants, gpu="T4")
    assert old["qwen1.5-4b", "marlin-4"]["will_fail"] == ["compute capability 7.5; at least 8.0 is needed"]
    assert old["qwen1.5-4b", "torch-4"]["will_fail"] == []
    none = planned(harness, tmp_path, models, variants, device="cpu", gpu=None)
    assert none["qwen1.5-4b", "marlin-4"]["will_fail"] == ["needs a GPU (cuda)"]
    assert none["qwen1.5-4b", "torch-4"]["will_fail"] == []
    several = planned(harness, tmp_path, [{"shape": "qwen1.5-7b"}], [{"stack": "hf"}], gpu="rtx 4060 ti")
    (line,) = several.values()  # of 8 GB and of 16
    assert line["note"] == f"will not fit: 8.6 GB on the rtx 4060 ti, 0.8 GB of them {OF_DISPLAY}"
    unknown = planned(harness, tmp_path, models, variants, gpu="Graphics 9000")
    assert {line["will_not_fit"] for line in unknown.values()} == {None}


def test_a_dry_run_counts_each_cell_once(harness, real_config):
    """Here each cell fails for want of a GPU, and one is refused, too."""
    variants = [{"stack": "autoawq", "fuse_layers": True, "max_seq_len": 2048}, {"stack": "autoawq"}]
    path = real_config(*variants, model={"shape": "qwen1.5-4b"}, new_tokens=9975)
    lines = harness("run", path, "--dry-run", "--json").json
    assert [bool(line["will_fail"]) for line in lines] == [True, True]
    assert [bool(line["will_be_refused"]) for line in lines] == [True, False]
    said = harness("run", path, "--dry-run").err.splitlines()[-1]
    assert said == "harness: of 2 cells, 1 will be refused, 1 will fail (exit code 1)"


def test_a_fused_window_below_the_workload_is_refused_unless_it_is_asked_for(harness, tmp_path):
    fused = {"stack": "autoawq", "fuse_layers": True}
    variants = [
        fused | {"name": "whole"},
        fused | {"name": "short", "max_seq_len": 2048},
        fused | {"name": "window", "max_seq_len": 2048, "allow_window": True},
        {"stack": "autoawq", "name": "plain", "max_seq_len": 2048},
    ]
    lines = planned(harness, tmp_path, [{"name": "m", "shape": "qwen1.5-4b"}], variants)
    reason = f"max_seq_len 2048 {UNCOVERED.format(10_000)}"
    refused = {name: line["will_be_refused"] for (_, name), line in lines.items()}
    assert refused == {"whole": [], "short": [reason], "window": [], "plain": []}
    assert lines["m", "short"]["note"] == f"will be refused: {reason}"
    per_token = 2 * 40 * 2560 * 2  # bytes of K and V in 16 bits
    window, whole = lines["m", "window"]["memory_bytes"], lines["m", "whole"]["memory_bytes"]
    assert whole - window == (10_000 - 2048) * per_token
    growing = (
        lines["m", "plain"]["memory_bytes"] - whole
    )  # in CUDA's blocks of 2 MiB, and a layer of it twice
    assert 10_000 * per_token / 40 < growing < 10_000 * per_token / 40 + 80 * (2 << 20)


def test_packed_weights_are_planned_to_the_byte_and_made_once_for_each_packing(harness, tmp_path):
    variants = [
        {"stack": "gptq", "kernel": ["exllamav2", "torch"], "bits": [4, 8]},
        {"stack": "autoawq", "name": "awq", "kernel": "gemm"},
    ]
    lines = planned(harness, tmp_path, [{"name": "m", "shape": "qwen1.5-0.5b"}], variants)
    assert {name: line["weights"] for (_, name), line in lines.items()} == {
        "exllamav2-4": "synthesize checkpoint, pack gptq-int4",
        "exllamav2-8": "pack gptq-int8",
        "torch-4": "synthetic, nothing more to make",
        "torch-8": "synthetic, nothing more to make",
        "awq": "pack awq-int4",
    }
    stored = sum(packed_bytes(of_shape(SHAPES["qwen1.5-0.5b"]), GPTQ).values())
    assert lines["m", "exllamav2-4"]["disk_bytes"] == 2 * 619_570_176 + stored
    assert lines["m", "exllamav2-4"]["memory_bytes"] == on_a_gpu(SHAPES["qwen1.5-0.5b"], stored)


def test_nothing_is_said_not_to_fit_that_the_study_ran_and_llamacpp_fits_where_it_did(
    harness, tmp_path, published
):
    """The published records say the longest context that each variant reached on the card."""
    sizes = ("0.5b", "1.8b", "4b", "7b", "14b", "32b")
    quants = ["q8_0", "q6_k", "q5_k_m", "q5_0", "q4_k_m", "q4_0", "q3_k_m", "q2_k"]
    variants = [
        {"stack": "llamacpp", "quant": quants},
        {"stack": "hf", "name": "bf16"},
        {"stack": "bnb", "name": "int8", "quant": "int8"},
        {"stack": "bnb", "name": "int4", "quant": "nf4"},
        {"stack": "gptq", "name": "int4-exllamav2", "kernel": "exllamav2"},
        *({"stack": "autoawq", "name": kernel, "kernel": kernel} for kernel in ("gemm", "exllama")),
        {"stack": "autoawq", "name": "gemm-fused", "kernel": "gemm", "fuse_layers": True},
    ]
    models = [{"shape": f"qwen1.5-{size}"} for size in sizes]
    lines = planned(harness, tmp_path, models, variants)
    said = {key: line["will_not_fit"] for key, line in lines.items()}
    reached = {
        (each.record["model"]["name"], each.record["variant"]): each.record["reported"]["max_ctx"]
        for each in published.stored
    }
    assert len(said) == len(sizes) * (len(quants) + 7)
    for key, not_fitting in said.items():
        ran = (reached[key] or 0) >= 10_000
        assert not (ran and not_fitting), key
        if key[1] in quants:
            assert not_fitting is not ran, key


def test_a_part_of_the_layers_on_the_gpu_needs_room_in_both_memories(harness, tmp_path):
    variants = [{"stack": "llamacpp", "quant": "q8_0", "gpu_layers": [-1, 20, 45, 999]}]
    lines = [*planned(harness, tmp_path, [{"shape": "qwen1.5-32b"}], variants).values()]
    whole, part, most, every = lines
    assert whole["note"] == f"will not fit: 25.8 GB on the RTX 4090, 0.8 GB of them {OF_DISPLAY}"
    shape = SHAPES["qwen1.5-32b"]
    sizes = {t.name: t.bytes for t in quantized(shape, "q8_0")}
    last = [size for name, size in sizes.items() if name.startswith("blk.") and int(name.split(".")[1]) >= 45]
    # llama.cpp counts the output as one of the 20, so layers 45 to 63 are the others.
    assert part["weights_on_gpu_bytes"] == sum(last) + sizes["output.weight"] + sizes["output_norm.weight"]
    assert part["weights_on_gpu_bytes"] + part["weights_on_cpu_bytes"] == sum(sizes.values())
    cache = 2 * 2 * 8 * 128 * 10_240  # of a layer, K and V in 16 bits
    assert part["host_memory_bytes"] > part["weights_on_cpu_bytes"] + 45 * cache
    assert part["memory_bytes"] > part["weights_on_gpu_bytes"] + 19 * cache
    has = machine.facts()["memory_bytes"] - SYSTEM_RESERVE_BYTES
    assert [each["will_not_fit"] for each in lines] == [True, part["host_memory_bytes"] > has, True, True]
    assert every["memory_bytes"] == pytest.approx(whole["memory_bytes"], rel=1e-4)
    assert "0.8 GB of them reserved for the display" in most["note"]


@pytest.mark.parametrize("options", [{"n_cpu_moe": 999}, {"override_tensor": "exps=CPU"}, {"gpu_layers": 4}])
def test_what_main_memory_cannot_hold_will_not_fit(monkeypatch, options):
    """137.6 GB of experts on a machine of 24 GB were called ok."""
    (cell,) = cells_of({"quant": "q8_0", **options})
    device = forecast.Device("cuda", "the card", 80 * 2**30)
    found = []
    for gib in (512, 24):
        main = forecast.Device(
            "cpu", "this machine", gib * 2**30, reserve_bytes=2**30, reserve_for="the system"
        )
        monkeypatch.setattr(forecast, "host", lambda main=main: main)
        found.append(forecast.forecast_cell(cell, None, device, 1))
    roomy, small = found
    assert (roomy.fits, roomy.no_room, small.fits) == (True, None, False)
    needs = (small.host_bytes or 0) / 1e9
    assert needs > 100
    assert small.failures == [
        f"will not fit: the CPU's side needs {needs:.1f} GB: 25.8 GB on this machine, 1.1 GB of them reserved"
        " for the system"
    ]


def cells_of(options: dict[str, Scalar]) -> list[Cell]:
    """A cell of a mixture of 117 GB, without its weights."""
    model = ConfigModel(name="glm", described=Described(KnownModels()["glm-4.5-air"]))
    variant = Variant(stack="llamacpp", name="v", options=options)
    experiment = Experiment(
        name="x", protocol=Protocol(), models=(model,), variants=(variant,), workloads=(Decode(),)
    )
    return [*plan.cells(experiment)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--headless"],
            "0.5 GB of them reserved for the driver, without a display (--reserve SIZE: another)",
        ),
        (["--reserve", "300MB"], "0.3 GB of them reserved, as given"),
        (["--set", "reserve=2GiB"], "2.1 GB of them reserved, as given"),
    ],
)
def test_the_reserve_of_a_card_is_what_the_user_says(harness, real_config, given, said):
    card = {"device": "cuda", "gpu": "RTX 4090", "new_tokens": 9975}
    path = real_config({"stack": "bnb", "quant": "int8"}, model={"shape": "qwen1.5-32b"}, **card)
    (line,) = harness("run", path, "--dry-run", "--json", *given).json
    assert line["note"] == f"will not fit: 25.8 GB on the RTX 4090, {said}"


def test_a_cell_fits_once_less_is_reserved(harness, tmp_path):
    """qwen1.5-14b q8_0 with 9,975 tokens needs all but 0.6 GB of a card of 24 GiB."""
    variants = [{"stack": "llamacpp", "quant": "q8_0"}]
    needs = planned(harness, tmp_path, [{"shape": "qwen1.5-14b"}], variants, protocol={"new_tokens": 9000})
    (line,) = needs.values()
    spare = 24 * 2**30 - line["memory_bytes"]
    given = {"new_tokens": 9000, "reserve": f"{spare}B"}
    (exact,) = planned(harness, tmp_path, [{"shape": "qwen1.5-14b"}], variants, protocol=given).values()
    given["reserve"] = f"{spare + 1}B"
    (above,) = planned(harness, tmp_path, [{"shape": "qwen1.5-14b"}], variants, protocol=given).values()
    assert (exact["will_not_fit"], above["will_not_fit"]) == (False, True)


@pytest.mark.parametrize("given", ["3", "1 parsec", "-1GB"])
def test_a_reserve_has_a_unit(harness, given):
    ran = harness("run", "quickstart", f"--reserve={given}")
    assert (ran.code, "must be a size with a unit" in ran.err) == (2, True)


def test_a_gpu_that_is_not_here_is_said_once_beside_one_line_a_cell(harness, real_config, tmp_path):
    card = {"device": "cuda", "gpu": "RTX 4090", "new_tokens": 9975, "repeats": 3}
    path = real_config({"stack": "bnb", "quant": ["int8", "nf4"]}, model={"shape": "qwen1.5-32b"}, **card)
    ran = harness("run", path, "--dry-run", HARNESS_CACHE=str(tmp_path / "empty"))
    random, said, counted, last = ran.err.splitlines()
    assert random.startswith("harness: random weights in the shape of ")
    assert re.fullmatch(
        r"harness: 2 cells, at least [\d.]+ min for 3 repeats of those that can run, at the 1,008 GB/s of"
        r" the data sheet; 65.0 GB of weights to make or fetch",
        counted,
    )
    assert (ran.code, last) == (1, "harness: of 2 cells, 1 will not fit (exit code 1)")
    assert said.endswith("; the forecast is for the RTX 4090 with 25.8 GB")
    assert f"will not fit: 25.8 GB on the RTX 4090, 0.8 GB of them {OF_DISPLAY} (" in ran.words
    _, int8, nf4, *_ = ran.out.splitlines()
    assert " will not fit " in int8
    assert re.search(r" at least \d+ min x 3$", nf4)  # the data sheet's bandwidth is a limit
    assert not (tmp_path / "empty").exists()


VARIANTS = (
    {"name": "good"},
    {"name": "short", "kernel": "windowed", "oom_above_n_ctx": 50},
    {"name": "failing", "die_by": "error", "die_at_token": 20},
)
SHORT = f"oom_above_n_ctx 50 {UNCOVERED.format(65)}"


def records(root: Path) -> dict[str, dict]:
    return {each.record["variant"]: each.record for each in stored_in(root)}


def test_a_refused_cell_is_not_started_and_says_why_while_known_failures_run(harness, config, tmp_path):
    ran = harness("run", config(*VARIANTS), "--json")
    assert ran.code == 1
    rows = {row["variant"]: row for row in ran.json}
    statuses = {name: row["status"] for name, row in rows.items()}
    assert statuses == {"good": "ok", "short": "refused", "failing": "error"}
    assert rows["short"]["reasons"] == [f"{SHORT} (it would forget what came before)"]
    found = records(tmp_path / "results")
    short = found["short"]
    assert (short["phase"], short["tokens"], short["loaded"]) == ("prepare", 0, None)
    known = {name: each["known_failure"] for name, each in found.items() if "known_failure" in each}
    assert known == {"failing": ["the fake failed, as asked"]}  # and measured all the same
    assert found["failing"]["reason"] == "the fake failed, as asked"
    assert not list((tmp_path / "results").rglob("*short*/**/worker.log"))
    table = harness("report", "--list")
    assert "refused 0/1" in table.out
    again = harness("run", tmp_path / "fake.yaml")
    assert "3 repeats measured already" in again.err


def test_a_refused_cell_needs_no_environment(harness, config, tmp_path):
    ran = harness("run", config(VARIANTS[1]), "--json", HARNESS_CACHE=str(tmp_path / "empty"))
    assert [row["status"] for row in ran.json] == ["refused"]
    assert not list((tmp_path / "empty").rglob("*python*"))


def test_known_failures_are_left_out_when_asked_and_each_is_said(harness, config, tmp_path):
    path = config(*VARIANTS)
    ran = harness("run", path, "--skip-known-failures")
    assert ran.code == 0
    assert records(tmp_path / "results").keys() == {"good"}
    said = [line for line in ran.err.splitlines() if "skipped" in line]
    assert len(said) == 2
    assert any(".short." in line and line.endswith(f": {SHORT}") for line in said)
    assert any(".failing." in line and line.endswith(": the fake failed, as asked") for line in said)
    nothing = harness("run", path, "--skip-known-failures", "--only", "*short*")
    assert nothing.code == 2
    assert nothing.err.splitlines()[-1].endswith("nothing to run: every cell is known to fail")


def test_a_record_whose_known_failure_is_no_list_of_texts_is_passed_over(harness, config, tmp_path):
    harness("run", config(VARIANTS[2]))
    (path,) = (tmp_path / "results").rglob("record.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"known_failure": [3]}))
    assert "known_failure[0] must be text" in harness("report", "--list").err


def test_weights_that_are_here_are_judged_by_what_they_are_and_not_by_what_is_usual(harness, tmp_path):
    one = packed(made(tmp_path / "one", SMALL), "gptq", 4)
    (tmp_path / "cut").mkdir()
    cut = packed(made(tmp_path / "cut" / "hf", SMALL), "gptq", 4, 20_000)
    models = [{"name": "one", "weights": str(one)}, {"name": "cut", "weights": str(cut)}]
    lines = planned(harness, tmp_path, models, [{"stack": "gptq", "kernel": ["marlin", "exllamav2"]}])
    marlin = {"in_features 64 is not divisible by 128", "out_features 64 is not divisible by 256"}
    marlin |= {"group_size 32; only -1 and 128"}
    assert set(lines["one", "marlin-4"]["will_fail"]) == marlin
    assert set(lines["cut", "marlin-4"]["will_fail"]) == marlin | {"its weights are in several files"}
    assert lines["one", "exllamav2-4"]["will_fail"] == []
    assert lines["one", "exllamav2-4"]["weights"] == f"{one} (gptq-int4)"
    stored = sum(packed_bytes(of_shape(SMALL), replace(GPTQ, group_size=32)).values())
    assert lines["one", "exllamav2-4"]["memory_bytes"] == on_a_gpu(SMALL, stored)
