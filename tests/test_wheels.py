"""`harness run FILE.gguf` where llama.cpp is not compiled: the stack from wheels answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import shell_script
from nvml_cards import GB, card
from test_run_models import stored

from harness.stacks import build
from harness.stacks.header import stacks

NOT_BUILT = "llamacpp is not built here: llamaserver, which comes as wheels, is measured instead"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder := tmp_path / "empty").mkdir(mode=0o700)
    monkeypatch.setenv("HARNESS_CACHE", str(folder))
    stored(tmp_path / "tiny-Q4_0.gguf", "q4_0")
    return folder


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    shell_script(tmp_path / "bin" / "apt-get", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)


def make_built(stack: str) -> None:
    """Have the stack's environment for CPUs look built."""
    folder = build.folder_of(build.for_this_machine(stacks()[stack].environments["cpu"]))
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / "complete.json").write_text(json.dumps({"lock": [], "imports": {}, "lacking": {}}))


def test_a_gguf_is_measured_by_wheels_until_llama_cpp_is_built(harness, empty_cache):
    found = harness("run", "tiny-Q4_0.gguf", "--dry-run").err
    assert f"harness: {NOT_BUILT}; to compare both: harness env create llamacpp" in found
    assert "harness: tiny: llamaserver q4_0 on cpu, 128 tokens x 3\n" in found
    make_built("llamacpp")
    found = harness("run", "tiny-Q4_0.gguf", "--dry-run").err
    assert "harness: tiny: llamacpp q4_0 on cpu, 128 tokens x 3\n" in found
    assert NOT_BUILT not in found


def test_without_a_compiler_the_offer_names_its_package(harness, empty_cache, no_compiler):
    found = harness("run", "tiny-Q4_0.gguf", "--dry-run").err
    assert "harness env create llamacpp (needs a C++ compiler: sudo apt install g++), then this" in found


@pytest.mark.parametrize(
    "given",
    [
        ("--stacks", "llamacpp"),
        ("--max-ctx",),  # of these a server does nothing
        ("--quality",),
        ("--set", "variants.0.gpu_layers=0"),
        ("--set", "protocol.check_weights=true"),
        ("--set", "device=vulkan"),
    ],
)
def test_what_wheels_cannot_do_or_the_user_has_chosen_runs_in_llama_cpp(harness, empty_cache, given):
    found = harness("run", "tiny-Q4_0.gguf", "--dry-run", *given).err
    assert "harness: tiny: llamacpp " in found
    assert NOT_BUILT not in found


def test_a_type_that_is_made_of_the_file_needs_llama_cpp(harness, empty_cache, tmp_path):
    stored(tmp_path / "tiny-F16.gguf", "f16")
    assert "tiny: llamacpp q4_0" in harness("run", "tiny-F16.gguf", "--quant", "q4_0", "--dry-run").err
    assert "tiny: llamaserver f16" in harness("run", "tiny-F16.gguf", "--dry-run").err
    assert (
        "qwen2.5-0.5b: llamacpp"
        in harness("run", "qwen2.5-0.5b", "--synthetic", "--quant", "q4_0", "--dry-run").err
    )


def test_with_a_gpu_that_the_wheels_do_not_use_it_says_so_before_it_measures_the_cpu(
    harness, empty_cache, nvml
):
    nvml(card("GPU-1", "NVIDIA GeForce RTX 4070", 12 * GB))
    first, second, *_ = harness("run", "tiny-Q4_0.gguf", "--dry-run").err.splitlines()
    assert first.startswith(
        "harness: llamacpp is not built for cuda here, and the wheels of llamaserver do not use the GPU: this"
        " measures the CPU; for the GPU: harness env create llamacpp --device cuda"
    )
    assert second == "harness: tiny: llamaserver q4_0 on cpu, 128 tokens x 3"


def test_where_the_wheels_cannot_be_installed_llama_cpp_is_built_as_before(
    harness, empty_cache, no_compiler, tmp_path
):
    offline = {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "uv"), "UV_NO_INDEX": "1"}
    short = ("--tokens", "8", "--set", "repeats=1", "--set", "measure_bandwidth=false", "--busy")
    ran = harness("run", "tiny-Q4_0.gguf", *short, **offline)
    assert "llamaserver/cpu could not be built" in ran.err
    assert "; building llamacpp instead\nharness: tiny: llamacpp q4_0 on cpu" in ran.err
    assert "--stacks llamaserver needs none, and measures speed alone" in ran.err
