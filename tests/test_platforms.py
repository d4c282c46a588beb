"""The controller and llama.cpp's environment install on 64-bit Raspberry Pi OS: all they need resolves for
it, by wheels but for what is compiled. Needs the package index."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.stacks import build
from harness.stacks.header import stacks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).parent.parent
# glibc and Python of Raspberry Pi OS: of Bookworm; of Trixie, whose glibc is 2.41 (uv knows none above 2.40).
SYSTEMS = [("2_36", "3.11"), ("2_40", "3.13")]


def resolved(
    requirements: Sequence[str], glibc: str, python: str, compiled: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Resolve for aarch64 Linux; all but what is `compiled` must have wheels."""
    command = [build.uv_binary(), "pip", "compile", "-", "--no-header", "--no-annotate"]
    command += ["--python-platform", f"aarch64-manylinux_{glibc}", "--python-version", python]
    command += ["--only-binary", ":all:", *(f"--no-binary={name}" for name in compiled)]
    for _ in range(3):  # the index may not answer at once
        ran = subprocess.run(
            command, input="\n".join(requirements), capture_output=True, text=True, timeout=600
        )
        if "Failed to fetch" not in ran.stderr:
            break
    return ran


@pytest.mark.network
@pytest.mark.parametrize(("glibc", "python"), SYSTEMS)
def test_all_that_make_installs_for_the_controller_has_wheels_for_a_raspberry_pi(glibc, python):
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    found = resolved(wanted, glibc, python)
    assert found.returncode == 0, found.stderr
    assert "\nnumpy==" in f"\n{found.stdout}"


@pytest.mark.network
@pytest.mark.parametrize(("glibc", "python"), SYSTEMS)
def test_the_environment_of_llama_cpp_has_wheels_but_for_what_is_compiled(glibc, python):
    environment = stacks()["llamacpp"].environments["cpu"]
    assert environment.source_builds == ("llama-cpp-python",)
    found = resolved(environment.dependencies, glibc, python, environment.source_builds)
    assert found.returncode == 0, found.stderr
    assert set(environment.dependencies) <= set(found.stdout.splitlines())


@pytest.mark.network
def test_a_package_without_such_a_wheel_does_not_resolve():
    found = resolved(["mkl==2024.2.2"], *SYSTEMS[0])  # Intel's, for x86 alone
    assert found.returncode
    assert "no wheels with a matching platform tag (e.g., `manylinux_2_36_aarch64`)" in " ".join(
        found.stderr.split()
    )
