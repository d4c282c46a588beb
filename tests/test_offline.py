"""The real packages in a pack: how large it is, and that a machine without a network needs nothing else."""

from __future__ import annotations

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
# A machine for research: torch for CUDA, transformers and what they need, and the scientific packages.
HAVE = """
torch==2.11.0+cu130
triton==3.6.0
transformers==5.17.0
accelerate==1.14.0
numpy==2.2.6
scipy==1.16.3
pandas==2.3.3
pyarrow==22.0.0
huggingface-hub==1.31.0
hf-xet==1.4.2
tokenizers==0.22.2
safetensors==0.8.0
regex==2026.1.15
requests==2.32.5
urllib3==2.6.3
certifi==2026.1.4
charset-normalizer==3.4.4
idna==3.11
filelock==3.20.3
fsspec==2026.1.0
packaging==26.0
psutil==7.2.2
pillow==12.1.0
protobuf==7.34.0
PyYAML==6.0.3
Jinja2==3.1.6
MarkupSafe==3.0.3
rich==15.0.0
Pygments==2.19.2
markdown-it-py==4.0.0
mdurl==0.1.2
tqdm==4.67.1
typing_extensions==4.15.0
sympy==1.14.0
mpmath==1.3.0
networkx==3.6.1
nvidia-ml-py==13.590.48
python-dateutil==2.9.0.post0
six==1.17.0
tzdata==2025.3
pytz==2025.2
setuptools==80.9.0
cmake
ninja
"""
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


def test_beside_torch_and_transformers_a_pack_is_at_most_40_mb(command: Callable[..., Ran], tmp_path: Path):
    (tmp_path / "have.txt").write_text(HAVE)
    target = ("--python", "3.12", "--platform", "manylinux_2_28_x86_64", "--device", "cuda")
    ran = command("env", "pack", "out", "llamacpp", "bnb", "gptqm", *target, "--have", "have.txt", "--json")
    assert ran.code == 0, ran.err
    (manifest,) = ran.json
    assert manifest["target"]["cuda"] == "13.0"  # as in the name of torch
    assert sum(each["bytes"] for each in manifest["files"]) <= 40e6
    packed = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert packed <= 40e6


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
    adopted = {state["stack"] for state in states if state["state"].startswith("adopted")}
    assert adopted == {"llamacpp", "hf", "bnb", "gptqm"}
    rows: list[dict[str, Any]] = json.loads(run(harness, "run", "quickstart", *QUICK, "--json"))
    assert len(rows) == 5
    (tmp_path / "small.yaml").write_text(json.dumps(CONFIG))
    rows += json.loads(run(harness, "run", "small.yaml", "--json"))
    assert failures(rows) == []
    assert (tmp_path / "reports" / "quickstart.html").exists()
