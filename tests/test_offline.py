"""The real packages in a pack: how large it is, and that a machine without a network needs nothing else."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran, failures

from harness.stacks.adopted import Interpreter

pytestmark = pytest.mark.network
CONFIG = {
    "device": "cpu",
    "protocol": {"new_tokens": 16, "repeats": 1, "retry_disturbed": 0, "measure_bandwidth": False},
    "models": [{"shape": "tiny-llama"}],
    "variants": [
        {"stack": "hf", "dtype": "bf16"},
        {"stack": "bnb", "quant": "nf4"},
        {"stack": "gptqm", "kernel": "aten", "dtype": "bf16"},
    ],
}
QUICK = ("--set", "new_tokens=16", "--set", "repeats=1", "--set", "retry_disturbed=0")


def test_beside_torch_a_pack_for_another_processor_and_cuda_leaves_it_out(
    command: Callable[..., Ran], tmp_path: Path
):
    (tmp_path / "have.txt").write_text("torch==2.11.0+cu130\ntriton==3.6.0\ntransformers==5.17.0\n")
    target = ("--python", "3.12", "--platform", "manylinux_2_28_aarch64", "--device", "cuda")
    ran = command("env", "pack", "out", "bnb", *target, "--have", "have.txt")
    assert ran.code == 0, ran.err
    packed = {path.name: path.stat().st_size for path in (tmp_path / "out" / "packages").iterdir()}
    assert not [n for n in packed if n.startswith(("torch-", "nvidia_cu", "transformers-", "triton-"))]
    assert not [name for name in packed if "x86_64" in name]
    assert sum(packed.values()) <= 400e6  # torch for CUDA takes some gigabytes


@pytest.fixture
def isolated() -> list[str]:
    """A command prefix that takes the network away; skips where that is not allowed."""
    for prefix in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        if shutil.which("unshare") and not subprocess.run([*prefix, "true"], capture_output=True).returncode:
            return prefix
    pytest.skip("no network namespace can be made here: unshare --net")


@pytest.mark.long("compiles llama.cpp")
@pytest.mark.timeout(3600)
def test_a_machine_without_a_network_installs_a_pack_compiles_llama_cpp_and_runs_the_quickstart(
    command: Callable[..., Ran],
    own_interpreter: Callable[[str], Interpreter],
    isolated: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    python = own_interpreter("hf").python  # it has torch and transformers, and nothing of the controller's
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))

    def run(*words: str | Path) -> str:
        ran = subprocess.run([*isolated, *words], cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode in (0, 1), ran.stderr  # a measurement on a busy machine may be not ok
        return ran.stdout

    look = "import socket; print(socket.socket().connect_ex(('192.0.2.1', 80)))"
    assert os.strerror(int(run(sys.executable, "-c", look))) == "Network is unreachable"
    frozen = [sys.executable, "-m", "uv", "pip", "freeze", "--python", python]
    (tmp_path / "have.txt").write_text(subprocess.check_output(frozen, text=True))
    version = subprocess.check_output([python, "-c", "import platform; print(platform.python_version())"])
    target = ("--python", version.decode().rpartition(".")[0], "--have", "have.txt")
    packed = command("env", "pack", "pack", "llamacpp", "hf", "bnb", "gptqm", *target)
    assert packed.code == 0, packed.err
    run("tar", "cf", "pack.tar", "pack")
    shutil.rmtree(tmp_path / "pack")

    run("tar", "xf", "pack.tar")
    run("sh", "pack/install.sh", "--python", python, "--to", "there")
    harness = tmp_path / "there" / "bin" / "harness"
    states = json.loads(run(harness, "env", "list", "--json"))
    states = {state["stack"]: state["state"] for state in states if state["device"] == "cpu"}
    assert states["llamacpp"] == "built"
    assert all(states[name].startswith("adopted") for name in ("hf", "bnb", "gptqm"))
    rows: list[dict[str, Any]] = json.loads(run(harness, "run", "quickstart", *QUICK, "--json"))
    assert len(rows) == 5
    (tmp_path / "small.yaml").write_text(json.dumps(CONFIG))
    rows += json.loads(run(harness, "run", "small.yaml", "--json"))
    assert failures(rows) == []
    assert (tmp_path / "reports" / "quickstart.html").exists()
