"""Packages, settings and configs of strangers: what they decide, what they see, whether they run code."""

from __future__ import annotations

import re

import psutil
import pytest
from test_env_build import RUNNER, source, wheel
from test_launch import request_of

from harness.stacks import build
from harness.stacks.build import EnvironmentFailed
from harness.stacks.header import Environment, parse
from harness.system import variables
from harness.worker import launch

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
        return parse("tiny", RUNNER.format(tables="\n".join(f"# {line}" for line in lines))).environments[
            "cpu"
        ]

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


# Who gets which variables


def test_no_credential_is_in_the_records_of_a_campaign(harness, config, tmp_path):
    assert harness("run", config({"B_ms": 1.0}), **CREDENTIALS, **UNKNOWN, GGML_DEBUG="7").code == 0
    written = [path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert any(b'"GGML_DEBUG": "7"' in text for text in written)
    assert not [text for text in written if SECRET.encode() in text]


def test_a_worker_gets_what_it_needs_and_no_credential(fake_interpreter, tmp_path, monkeypatch):
    for name, value in (CREDENTIALS | UNKNOWN | {"ONEDNN_MAX_CPU_ISA": "AVX2", "SOMETHING": "else"}).items():
        monkeypatch.setenv(name, value)
    worker = launch.Worker(request_of(hang_at_token=1), fake_interpreter, tmp_path)
    try:
        has = psutil.Process(worker.pid).environ()
    finally:
        worker.stop()
    assert has.items() >= {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}.items()
    assert {"PATH", "HOME"} <= has.keys()
    assert not has.keys() & {*CREDENTIALS, *UNKNOWN, "SOMETHING"}


def test_the_build_of_a_package_sees_no_credential(tiny, tmp_path, monkeypatch):
    for name, value in (CREDENTIALS | {"DATABASE": UNKNOWN["DATABASE"], "CMAKE_ARGS": "-DX=1"}).items():
        monkeypatch.setenv(name, value)
    look = f"import os; assert {SECRET!r} not in str(os.environ); assert os.environ['CMAKE_ARGS'] == '-DX=1'"
    made = create(tiny(f"looking @ {source(tmp_path, 'looking', look).as_uri()}"))
    assert made.lock[0].startswith("looking @ ")


# Code that comes with a checkpoint


@pytest.mark.parametrize("command", ["run", "check-weights", "max-ctx", "ab"])
def test_a_config_alone_does_not_make_a_checkpoints_code_run(harness, tmp_path, command):
    (tmp_path / "theirs.yaml").write_text(
        "device: cpu\nprotocol: {new_tokens: 8, repeats: 1}\nmodels: [{name: m, weights: ./m}]\n"
        "variants: [{stack: hf, dtype: fp32, trust_remote_code: true}]\n"
    )
    words = ("--set-b", "variants.0.dtype=bf16") if command == "ab" else ()
    ran = harness(command, "theirs.yaml", *words)
    assert ran.code == 2
    assert re.search(r"trust_remote_code runs the Python files .*, add --trust-remote-code$", ran.err.strip())
    assert not (tmp_path / "results").exists()
    if command == "run":
        assert "trust" not in harness("run", "theirs.yaml", "--dry-run", "--trust-remote-code").err


# Credentials in addresses


def test_the_credentials_of_an_index_are_neither_in_the_log_of_a_build_nor_in_its_error(
    tiny, tmp_path, monkeypatch
):
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
    ],
)
def test_an_address_is_shown_without_user_password_and_query(text, shown):
    assert variables.redacted(text) == shown
