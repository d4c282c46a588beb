"""Runners' headers, and the interpreters made from them."""

import re
import subprocess

import pytest
from conftest import built

from harness.recommend import variant_costs
from harness.stacks import build
from harness.stacks.adopted import EnvironmentFailed
from harness.stacks.build import build_variables
from harness.stacks.header import Context, HeaderError, KernelChange, parse, stacks

HEADER = """# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy"]
# [tool.harness]
# summary = "x"
# weights = "none"
# [tool.harness.options.threads]
# type = "int"
# default-from = "threads"
# help = "threads"
# [tool.harness.env.cpu]
# device = "cpu"
# dependencies = ["gguf"]
# ///
"""


def test_a_header_is_read_as_text():
    header = parse("x", '"""A docstring may come first."""\n' + HEADER + "raise SystemExit('never run')\n")
    assert header.options["threads"].default_from == "threads"
    assert header.environments["cpu"].dependencies == ("numpy", "gguf")
    assert header.environment_for("cuda") is None


@pytest.mark.parametrize(
    "text", [HEADER + HEADER, "print(1)\n", HEADER.replace("summary", "sumary"), HEADER.replace('"x"', '"x')]
)
def test_a_wrong_header_names_its_file(text):
    with pytest.raises(HeaderError, match=r"runners/stacks/x\.py"):
        parse("x", text)


def test_every_option_of_every_stack_has_help_and_a_default_among_its_choices():
    types = {"int": int, "float": (int, float), "string": str, "path": str, "url": str, "bool": bool}
    for header in stacks().values():
        for option in header.options.values():
            assert option.help
            if option.default is not None:
                assert isinstance(option.default, types[option.type])
                assert not option.choices or option.default in option.choices


def test_llamacpp_declares_its_builds_by_device_and_all_types_of_the_study():
    header = stacks()["llamacpp"]
    for device in ("cuda", "metal", "vulkan", "hip"):
        assert f"-DGGML_{device.upper()}=on" in header.environments[device].variables["CMAKE_ARGS"]
        assert header.environment_for(device) == header.environments[device]
    types = {"f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "q2_k", "q6_k"}
    assert types <= {*header.options["quant"].choices}


CONTEXT = """# [[tool.harness.context]]
# when = { cache = "static" }
# option = "n_ctx"
# granule = 256
# dry = false
# [tool.harness.options.n_ctx]
# type = "int"
# help = "tokens"
# [tool.harness.options.cache]
# type = "string"
# choices = ["dynamic", "static"]
# help = "cache"
"""
WITH_CONTEXT = HEADER.replace("# [tool.harness.env.cpu]\n", CONTEXT + "# [tool.harness.env.cpu]\n")


def test_a_stack_says_which_option_sets_its_context_and_when_there_is_none_to_set():
    header = parse("x", WITH_CONTEXT)
    assert header.context_of({"cache": "static"}) == Context(
        option="n_ctx", granule=256, dry=False, when={"cache": ("static",)}
    )
    assert header.context_of({"cache": "dynamic"}) is None
    assert parse("x", HEADER).context_of({}) is None


@pytest.mark.parametrize(
    ("stack", "options", "option", "dry"),
    [
        ("llamacpp", {}, "n_ctx", True),
        ("fake", {}, "n_ctx", True),
        ("hf", {"cache": "static"}, "n_ctx", False),
        ("bnb", {"cache": "static"}, "n_ctx", False),
        ("gptq", {"cache": "static"}, "n_ctx", False),
        ("gptqm", {"cache": "static"}, "n_ctx", False),
        ("autoawq", {"cache": "static", "fuse_layers": False}, "n_ctx", False),
        ("autoawq", {"cache": "dynamic", "fuse_layers": True}, "max_seq_len", False),
        ("autoawq", {"cache": "dynamic", "fuse_layers": False}, None, None),
        ("hf", {"cache": "dynamic"}, None, None),
    ],
)
def test_the_context_of_every_stack_is_set_by_its_own_option_or_grows(stack, options, option, dry):
    found = stacks()[stack].context_of(options)
    assert (found and found.option, found and found.dry) == (option, dry)
    assert found is None or found.granule == 256


@pytest.mark.parametrize(
    ("given", "wrong", "sentence"),
    [
        ("dry = false", "", "context.0.dry: is missing"),
        ("dry = false", "dry = false\n# wet = 1", "context.0.wet: unknown key"),
        ("dry = false", "dry = 0", "context.0.dry: Input should be a valid boolean"),
        ("granule = 256", "granule = 0", "context.0.granule: Input should be greater than or equal to 1"),
        ("granule = 256", "granule = true", "context.0.granule: Input should be a valid integer"),
        ('option = "n_ctx"', 'option = "ctx"', "context has ctx, which is no option of type int"),
        ('option = "n_ctx"', 'option = "cache"', "context has cache, which is no option of type int"),
        ('cache = "static"', 'cash = "static"', "context has cash, which is no option"),
        ('cache = "static"', 'cache = "fixed"', "context has cache fixed, which is no choice"),
    ],
)
def test_a_wrong_context_in_a_header_is_one_sentence(given, wrong, sentence):
    with pytest.raises(HeaderError) as mistake:
        parse("x", WITH_CONTEXT.replace(given, wrong, 1))
    assert str(mistake.value).startswith("runners/stacks/x.py: ")
    assert sentence in str(mistake.value)


def test_an_environment_is_named_by_what_it_is_built_from(tmp_path):
    one = parse("x", HEADER).environments["cpu"]
    other = parse("x", HEADER.replace("numpy", "numpy<3")).environments["cpu"]
    assert build.folder_of(one) != build.folder_of(other)


def test_a_failed_build_is_a_sentence_with_its_log_and_is_not_taken_for_built(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    environment = parse("x", HEADER.replace("gguf", "no-such-package-anywhere-1")).environments["cpu"]
    with pytest.raises(EnvironmentFailed, match=r"x/cpu could not be built: uv pip install .*log: .*\.log"):
        build.create(environment, lambda line: None)
    assert build.find(environment) is None


def test_the_interpreter_is_never_resolved_out_of_its_environment(fake_interpreter):
    said = subprocess.run(
        [fake_interpreter.python, "-I", "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True
    )
    assert fake_interpreter.python.is_symlink()
    assert "fake-cpu" in said.stdout


def test_a_local_wheel_folder_is_passed_on(monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/some/wheels")
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    assert build_variables({"A": "1"})["UV_FIND_LINKS"] == "/some/wheels"
    assert build_variables({"A": "1"})["A"] == "1"


@pytest.mark.parametrize(
    ("wheel", "backend", "asked"),
    [
        (None, "cpu", "cpu"),
        ("torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "cpu", None),
        ("torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "auto", "auto"),
        ("torch-2.13.0-cp311-cp311-linux_x86_64.whl", "auto", None),
    ],
)
def test_a_local_wheel_of_torch_goes_before_pytorchs_index_if_it_is_for_the_device(
    tmp_path, monkeypatch, wheel, backend, asked
):
    if wheel:
        (tmp_path / wheel).touch()
    monkeypatch.setenv("UV_FIND_LINKS", f"{tmp_path},/nowhere")
    given = build_variables({"UV_TORCH_BACKEND": backend})
    assert given.get("UV_TORCH_BACKEND") == asked


CHANGES = """\
# [[tool.harness.kernel_changes]]
# variant = "nf4"
# longest = 8
# then = "to another kernel"
"""


def test_a_stack_says_where_its_kernels_change_with_the_length_of_a_pass():
    header = parse("x", HEADER.replace("# [tool.harness.env.cpu]\n", CHANGES + "# [tool.harness.env.cpu]\n"))
    assert header.kernel_changes == (KernelChange(longest=8, then="to another kernel", variant="nf4"),)
    assert parse("x", HEADER).kernel_changes == ()


@pytest.mark.parametrize(
    ("given", "wrong"), [("longest = 8", 'longest = "8"'), ("longest = 8", ""), ("then =", "than =")]
)
def test_a_wrong_kernel_change_in_a_header_is_one_sentence(given, wrong):
    changes = CHANGES.replace(given, wrong)
    with pytest.raises(HeaderError, match=re.escape("runners/stacks/x.py: ")):
        parse("x", HEADER.replace("# [tool.harness.env.cpu]\n", changes + "# [tool.harness.env.cpu]\n"))


@pytest.mark.parametrize(
    ("stack", "variant", "longest"),
    [
        ("llamacpp", "q4_0", [8, 32]),
        ("gptq", "exllamav2-4", [50]),
        ("gptq", "marlin-4", []),
        ("autoawq", "exllamav2-fuse_layers=true", [50]),
        ("autoawq", "gemm-fused", [1024]),
        ("bnb", "int4", [1]),
        ("bnb", "int8", []),
        ("hf", "bf16", []),
    ],
)
def test_known_changes_of_kernel_are_those_of_the_stack_and_its_variant(stack, variant, longest):
    changes = stacks()[stack].kernel_changes
    assert [each.longest for each in changes if each.variant in variant] == longest


@pytest.mark.parametrize(
    ("stack", "variant", "engine"),
    [
        ("autoawq", "gemm", "torch"),
        ("autoawq", "gemm-fused", "fused"),
        ("autoawq", "exllama-fuse_layers=true", "fused"),
        ("bnb", "nf4-dynamic", "torch"),
        ("llamacpp", "q4_0", "ggml"),
    ],
)
def test_fused_layers_are_known_by_the_variants_name(stack, variant, engine):
    header = stacks()[stack]
    group = variant_costs.cost_group(header, variant, {})
    assert variant_costs.engine(header, group) == engine


def test_a_stack_without_kernels_of_its_own_to_probe_works(harness):
    built("http")
    ran = harness("env", "check", "http", "--json")
    assert (ran.code, ran.json[0]["state"]) == (0, "works")
