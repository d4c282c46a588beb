"""Packages, settings and configs of strangers: their effects, their view, whether they run code."""

import hashlib
import re
import sys
import time
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_env_build import RUNNER, source, wheel
from test_launch import request_of

from ci.lock import OF_BACKEND
from harness.base import variables
from harness.campaign import worker as campaign_worker
from harness.stacks import build
from harness.stacks.adopted import EnvironmentFailed
from harness.stacks.header import Environment, parse, stacks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
SECRET = "s3cr3t"
CREDENTIALS = dict.fromkeys(
    [
        *("LLAMA_CLOUD_API_KEY", "TRANSFORMERS_AUTH", "CUDA_REGISTRY_PASSWORD", "GGML_TOKEN", "TORCH_SECRET"),
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "HARNESS_PASSWORD"),
    ],
    SECRET,
)
UNKNOWN = {"LLAMA_CLOUD_LOGIN": SECRET, "CUDA_REGISTRY_LOGIN": SECRET, "DATABASE": f"pg://me:{SECRET}@host/"}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """`tiny("x==1.0")`: an environment of these packages, in a cache of the test's own, without a network."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

    def make(*packages: str) -> Environment:
        lines = "[tool.harness.env.cpu]", 'device = "cpu"', f"dependencies = {[*packages]}"
        runner = RUNNER.format(tables="\n".join(f"# {line}" for line in lines))
        return parse("tiny", runner).environments["cpu"]

    return make


def create(environment):
    return build.create(environment, lambda line: None)


# Where packages come from


def test_a_uv_toml_above_the_users_folder_names_no_source_of_packages(tiny, tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    wheel(tmp_path / "theirs", "nosuchpackage", {"nosuchpackage.pth": ""})
    (tmp_path / "uv.toml").write_text(f'no-index = true\nfind-links = ["{tmp_path / "theirs"}"]\n')
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    with pytest.raises(EnvironmentFailed, match="nosuchpackage"):
        create(tiny("nosuchpackage==1.0"))
    monkeypatch.setenv("UV_FIND_LINKS", "../theirs")  # the user's own word, from where they stand
    assert create(tiny("nosuchpackage==1.0")).lock == ("nosuchpackage==1.0",)


def locked(folder: Path, name: str, text: str) -> None:
    (folder / "locks").mkdir(parents=True, exist_ok=True)
    (folder / "locks" / f"{name}.txt").write_text(text)


def test_a_package_that_is_not_the_one_of_the_lock_is_not_installed(tiny, tmp_path, monkeypatch):
    runners = tmp_path / "runners"
    monkeypatch.setenv("HARNESS_RUNNERS", str(runners))
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    ours, another = hashlib.sha256(wheel(tmp_path, "kernels", {}).read_bytes()).hexdigest(), "0" * 64
    locked(runners, "build", "")
    locked(runners, "tiny-cpu", f"kernels==1.0 --hash=sha256:{another}\n")
    environment = tiny("kernels==1.0")
    before = build.key_of(environment)
    with pytest.raises(EnvironmentFailed):
        create(environment)
    assert f"sha256:{another}" in build.folder_of(environment).with_suffix(".log").read_text()
    locked(runners, "tiny-cpu", f"kernels==1.0 --hash=sha256:{ours}\n")
    assert create(environment).lock == ("kernels==1.0",)
    after, other = build.key_of(environment), build.key_of(environment.with_packages(["kernels==2"]))
    assert len({before, after, other}) == 3


def test_no_version_but_that_of_the_lock_is_installed(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_RUNNERS", str(tmp_path / "runners"))
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    wheel(tmp_path, "needed", {})
    locked(tmp_path / "runners", "build", "")
    locked(tmp_path / "runners", "tiny-cpu", "needed==2.0\n")
    with pytest.raises(EnvironmentFailed, match=r"needed==2\.0"):
        create(tiny("needed"))
    assert create(tiny("needed").with_packages(["needed==1.0"])).lock == ("needed==1.0",)


def test_every_stack_has_a_lock_of_its_pins_with_hashes_and_without_a_host():
    for environment in (e for header in stacks().values() for e in header.environments.values()):
        if not environment.dependencies:
            continue
        own, builders = (path.read_text() for path in environment.locks())
        pins = [each for each in environment.dependencies if "==" in each]
        if "UV_TORCH_BACKEND" in environment.variables:
            pins = [each for each in pins if not OF_BACKEND.match(each)]
        assert not [pin for pin in pins if not re.search(rf"(?im)^{re.escape(pin)}\b", own.replace("_", "-"))]
        check_lock(own + builders)


@pytest.mark.parametrize("name", ["dev", "docs"])
def test_what_make_installs_is_locked_with_hashes_and_without_a_host(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    check_lock(text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = list(project["dependency-groups"][name])
    needed += project["project"]["dependencies"] if name == "dev" else []
    for each in map(Requirement, needed):
        versions = re.findall(rf"(?im)^{re.escape(canonicalize_name(each.name))}==(\S+)", text)
        assert versions, each
        assert all(each.specifier.contains(version) for version in versions) or each.marker, each


def check_lock(text: str) -> None:
    blocks = re.split(r"(?m)^(?=\S)", text)[1:]
    assert blocks
    assert all(re.match(r"[a-z0-9._-]+==\S+ .*\\\n    --hash=sha256:", block) for block in blocks)
    assert "://" not in text


# Who gets which variables


def test_no_credential_is_in_the_records_of_a_campaign(harness, config, tmp_path):
    assert harness("run", config({"B_ms": 1.0}), **CREDENTIALS, **UNKNOWN, GGML_DEBUG="7").code == 0
    written = [path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert any(b'"GGML_DEBUG": "7"' in text for text in written)
    assert not [text for text in written if SECRET.encode() in text]


def test_a_worker_gets_what_it_needs_and_no_credential(fake_interpreter, tmp_path, monkeypatch):
    of_kernels = {"ONEDNN_MAX_CPU_ISA": "AVX2", "AWQ_BATCH_SIZE": "2", "TRITON_CACHE_DIR": "/x"}
    of_kernels |= {"GPTQMODEL_MARLIN_USE_FP32": "1", "GPTQ_TORCH_LOOKAHEAD": "1"}
    for name, value in (CREDENTIALS | UNKNOWN | of_kernels | {"SOMETHING": "else"}).items():
        monkeypatch.setenv(name, value)
    worker = campaign_worker.Worker(request_of(hang_at_token=1), fake_interpreter, tmp_path)
    try:
        while not (has := psutil.Process(worker.pid).environ()):  # empty until it has executed python
            time.sleep(0.01)
    finally:
        worker.stop()
    assert has.items() >= (of_kernels | {"OMP_NUM_THREADS": "1"}).items()
    assert variables.recorded(has).items() >= of_kernels.items()
    assert {"PATH", "HOME"} <= has.keys()
    assert not has.keys() & {*CREDENTIALS, *UNKNOWN, "SOMETHING"}


def test_the_build_of_a_package_sees_no_credential(tiny, tmp_path, monkeypatch):
    for name, value in (CREDENTIALS | {"DATABASE": UNKNOWN["DATABASE"], "CMAKE_ARGS": "-DX=1"}).items():
        monkeypatch.setenv(name, value)
    look = f"import os; assert {SECRET!r} not in str(os.environ); assert os.environ['CMAKE_ARGS'] == '-DX=1'"
    made = create(tiny(f"looking @ {source(tmp_path, 'looking', look).as_uri()}"))
    assert made.lock[0].startswith("looking @ ")


# Code that comes with a checkpoint


@pytest.mark.parametrize("command", ["run", "run --check-weights", "run --max-ctx", "ab", "tune"])
def test_a_config_alone_does_not_make_a_checkpoints_code_run(harness, tmp_path, command):
    (tmp_path / "theirs.yaml").write_text(
        "device: cpu\nprotocol: {new_tokens: 8, repeats: 1}\nmodels: [{name: m, weights: ./m}]\n"
        "variants: [{stack: hf, dtype: fp32, trust_remote_code: true}]\n"
    )
    words = ("--set-b", "variants.0.dtype=bf16") if command == "ab" else ()
    ran = harness(*command.split(), "theirs.yaml", *words)
    assert ran.code == 2
    assert re.search(r"trust_remote_code runs the Python files .*, add --trust-remote-code$", ran.err.strip())
    assert not (tmp_path / "results").exists()
    if command == "run":
        assert "trust" not in harness("run", "theirs.yaml", "--dry-run", "--trust-remote-code").err


# Credentials in addresses


def test_the_credentials_of_an_index_are_in_no_log_and_no_error_of_a_build(tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("UV_OFFLINE")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://me:{SECRET}@127.0.0.1:9/simple?token={SECRET}")
    with pytest.raises(EnvironmentFailed) as failed:
        create(tiny("nosuchpackage==1.0"))
    (log,) = (tmp_path / "cache" / "envs").glob("*.log")
    assert "127.0.0.1:9/simple" in log.read_text()
    assert SECRET not in log.read_text() + str(failed.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x @ https://me:pw@host/a.whl#sha256=1", "x @ https://***@host/a.whl#sha256=1"),
        ("error: `https://host/simple?token=pw`, again", "error: `https://host/simple?***`, again"),
        ("(https://t0k3n@host/x?a=b&c=d)", "(https://***@host/x?***)"),
        ("why? see https://host/a@b", "why? see https://host/a@b"),
        ("http://a/http://me:pw@b/x?k=1", "http://a/http://***@b/x?***"),
        pytest.param("://a" * 100_000, "://a" * 100_000, id="not in the square of its length"),
    ],
)
def test_an_address_is_shown_without_user_password_and_query(text, shown):
    assert variables.redacted(text) == shown
