"""Names in place of files: weights of Ollama, the hub's cache and LM Studio; random ones only on request."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HARNESS, Ran, refused
from stand_in_server import Behaviour, serving
from test_hub import COMMIT, Hub
from test_run_models import ONE_REPEAT, stored

from harness.base import data
from harness.models import find, ollama_models
from harness.theory.base_shapes import understood
from harness.theory.known_models import Known


def in_ollama(folder: Path, name: str, file: Path, host: str = "registry.ollama.ai/library") -> Path:
    """A model as `ollama pull` stores it."""
    content, (base, tag) = file.read_bytes(), name.split(":")
    blob = folder / "blobs" / f"sha256-{hashlib.sha256(content).hexdigest()}"
    manifest = folder / "manifests" / host / base / tag
    for path in (blob, manifest):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    layers = [{"mediaType": ollama_models.OLLAMA_MODEL, "digest": blob.name.replace("-", ":")}]
    layers += [{"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00"}]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


def in_hub_cache(home: Path, repo: str, *files: Path, refs: bool = True) -> Path:
    """A repository as `hf download` stores it."""
    folder = home / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for path in (snapshot, folder / "refs", folder / "blobs"):
        path.mkdir(parents=True, exist_ok=True)
    for file in files:
        blob = folder / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    if refs:
        (folder / "refs" / "main").write_text(COMMIT)
    return snapshot


def cells_of(ran: Ran) -> list[str]:
    """Those in the table of a dry run: its lines, without what is the same for all."""
    return [line.split(".decode")[0] for line in ran.out.splitlines() if ".decode" in line]


@pytest.fixture
def here(tmp_path: Path, harness: Callable[..., Ran]) -> Callable[..., Ran]:
    """Runs the command with Ollama's and LM Studio's folders below the test's."""
    places = {"OLLAMA_MODELS": str(tmp_path / "ollama"), "HOME": str(tmp_path / "home")}
    return lambda *arguments, **variables: harness(*arguments, **places | variables)


@pytest.fixture
def here_alone(tmp_path: Path, command: Callable[..., Ran]) -> Callable[..., Ran]:
    """The same with the hub's cache, whose library reads its settings on import."""
    places = {"OLLAMA_MODELS": str(tmp_path / "ollama"), "HOME": str(tmp_path / "home")}
    places |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_XET": "1"}
    return lambda *arguments, **variables: command(*arguments, **places | variables)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "made").mkdir()
    return stored(tmp_path / "made" / "SmolLM2-135M-Instruct-Q4_0.gguf", "q4_0")


@pytest.fixture
def stored_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All places of models are below the test's folder."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("harness.models.hub.cache_of_hub", lambda: tmp_path / "hf" / "hub")


@pytest.mark.usefixtures("stored_models")
@pytest.mark.parametrize(
    "name",
    ["smollm2:135m", "SmolLM2:135M", "smollm2-135m", "smollm2:135m-instruct-q4_0", "SmolLM2-135M-Instruct"],
)
def test_a_name_leads_to_the_file_of_an_ollama_that_does_not_run(tiny, tmp_path, name):
    blob = in_ollama(tmp_path / "ollama", "smollm2:135m", tiny)
    in_ollama(tmp_path / "ollama", "other:8b", stored(tmp_path / "made" / "other.gguf", "q8_0"))
    model = find.find(name, served=False)
    assert (model.name, model.files) == ("smollm2:135m", (blob,))


@pytest.mark.usefixtures("stored_models")
def test_models_of_other_owners_and_of_the_hub_in_ollama_have_its_names(tiny, tmp_path):
    in_ollama(tmp_path / "ollama", "chat:8b", tiny, host="registry.ollama.ai/me")
    in_ollama(tmp_path / "ollama", "other-GGUF:Q4_0", tiny, host="hf.co/org")
    of_hub = "hf.co/org/other-GGUF:Q4_0"
    for name, own in {"me/chat:8b": "me/chat:8b", "org/other-GGUF:Q4_0": of_hub, of_hub: of_hub}.items():
        assert find.find(name, served=False).name == own


@pytest.mark.usefixtures("stored_models")
@pytest.mark.parametrize(
    ("name", "refs"),
    [
        ("org/SmolLM2-135M-Instruct-GGUF:Q4_0", False),
        ("SmolLM2-135M-Instruct-GGUF", True),
        ("smollm2:135m-instruct-q4_0", True),
    ],
)
def test_a_name_leads_to_the_hubs_cache(tiny, tmp_path, name, refs):
    snapshot = in_hub_cache(tmp_path / "hf", "org/SmolLM2-135M-Instruct-GGUF", tiny, refs=refs)
    model = find.find(name, served=False)
    assert (model.name, model.files) == ("org/SmolLM2-135M-Instruct-GGUF", (snapshot / tiny.name,))
    assert model.revision == ("main" if refs else COMMIT)


@pytest.mark.usefixtures("stored_models")
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("org/SmolLM2-135M-Instruct-GGUF", ".lmstudio/models"),
        ("smollm2-135m-instruct", ".cache/lm-studio/models"),
        ("smollm2:135m", ".lmstudio/models"),
    ],
)
def test_a_name_leads_to_a_folder_of_lm_studio(tiny, tmp_path, name, folder):
    target = tmp_path / "home" / folder / "org" / "SmolLM2-135M-Instruct-GGUF" / tiny.name
    target.parent.mkdir(parents=True)
    target.write_bytes(tiny.read_bytes())
    assert find.find(name, served=False).files == (target,)


def test_files_here_go_before_ollama_and_ollama_before_the_hubs_cache(here_alone, tiny, tmp_path):
    dry_run = ("run", "smollm2-135m", "--dry-run", "--wide")
    in_hub_cache(tmp_path / "hf", "org/SmolLM2-135M-GGUF", tiny)
    of_hub = here_alone(*dry_run)
    assert "hub org/SmolLM2-135M-GGUF (q4_0)" in of_hub.out, of_hub.err
    assert f"harness: smollm2-135m: found in the hub's cache {tmp_path / 'hf' / 'hub'}" in of_hub.err
    blob = in_ollama(tmp_path / "ollama", "smollm2:135m", tiny)
    of_ollama = here_alone(*dry_run)
    assert cells_of(of_ollama) == ["smollm2-135m.llamacpp.q4_0"]
    assert f"{blob} (q4_0)" in of_ollama.out
    assert f"harness: smollm2-135m: found in Ollama's folder {tmp_path / 'ollama'}" in of_ollama.err
    (tmp_path / "smollm2-135m").mkdir()
    stored(tmp_path / "smollm2-135m" / "mine-Q8_0.gguf", "q8_0")
    assert "mine-Q8_0.gguf (q8_0)" in here_alone(*dry_run).out


@pytest.mark.usefixtures("stored_models")
def test_a_name_of_several_models_or_of_another_type_is_a_sentence(here, tiny, tmp_path):
    in_ollama(tmp_path / "ollama", "smollm2:135m", tiny)
    in_ollama(tmp_path / "ollama", "smollm2:135m-instruct-q8_0", stored(tmp_path / "made" / "b.gguf", "q8_0"))
    with pytest.raises(find.Several, match="has smollm2:135m, smollm2:135m-instruct-q8_0: name one of them"):
        find.find("smollm2-135m", served=False)
    for name, own in {
        "smollm2-135m-q8_0": "smollm2:135m-instruct-q8_0",
        "smollm2:135m": "smollm2:135m",
    }.items():
        assert find.find(name, served=False).name == own
    of_type = here("run", "smollm2:135m-instruct-q5_0", "--dry-run")
    refused(of_type, "has smollm2:135m-instruct-q8_0, which is of another type")
    of_hf = here("run", "smollm2:135m", "--stacks", "hf", "--dry-run")
    assert "smollm2-135m is a GGUF, which hf does not load; try llamacpp" in of_hf.err


def tags(*models: tuple[str, str]) -> dict[str, Any]:
    """The page of Ollama that lists its models."""
    rows = [{"name": name, "model": name, "details": {"quantization_level": kind}} for name, kind in models]
    return {"/api/tags": {"models": rows}}


def ollama(*models: tuple[str, str]) -> Behaviour:
    return Behaviour(api="ollama", models=tuple(name for name, _ in models), pages=tags(*models))


def test_what_a_running_ollama_serves_is_measured_through_it_and_by_stacks_its_file_is(here, tiny, tmp_path):
    blob = in_ollama(tmp_path / "ollama", "smollm2:135m", tiny)
    with serving(ollama(("smollm2:135m", "Q4_0"), ("qwen3:8b", "Q4_K_M"))) as address:
        host = {"OLLAMA_HOST": address.removeprefix("http://")}
        through = here("run", "smollm2:135m", "--dry-run", "--wide", **host)
        assert cells_of(through) == ["smollm2-135m.http.as-served"], through.err
        line = f"smollm2:135m: measured through Ollama at {address}; --stacks llamacpp measures its file"
        assert f"harness: {line}" in through.err
        same = here("run", f"{address}#smollm2:135m", "--dry-run", "--wide")
        assert cells_of(same) == cells_of(through)
        for by_file in (("--stacks", "llamacpp"), ("--quant", "q4_0"), ("--max-ctx",)):
            assert (
                f"{blob} (q4_0)" in here("run", "smollm2:135m", *by_file, "--dry-run", "--wide", **host).out
            )
        both = here("run", "smollm2:135m", "qwen3-8b", "--dry-run", "--wide", **host)
        assert cells_of(both) == [*("http.as-served", "http.as-served")]
        lost = here("run", "qwen3:8b", "--stacks", "llamacpp", "--dry-run", "--wide", **host)
        assert lost.code == 2
        assert f"Ollama at {address} serves it, but its file cannot be read: leave out --stacks" in lost.err


def test_a_model_of_ollama_is_measured_by_its_name(here):
    with serving(ollama(("smollm2:135m", "Q4_0"))) as address:
        settings = ("--set", "measure_bandwidth=false", "--set", "retry_disturbed=0", "--json")
        ran = here("run", "smollm2:135m", *ONE_REPEAT, *settings, "--wait", OLLAMA_HOST=address)
    (row,) = ran.json
    assert (row["model"], row["stack"]) == ("smollm2-135m", "http")


def test_a_known_name_without_weights_says_where_it_looked_and_what_gets_them(here):
    for line in (
        "run llama3.1:8b-instruct-q4_K_M",
        "tune qwen3:8b",
        "ab qwen3-8b",
    ):
        ran = here(*line.split(), "--dry-run")
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), line
        for part in ("no weights of it", "Ollama (no answer)", "lmstudio", "get them with `", "--synthetic"):
            assert part in ran.err, (line, ran.err)
    assert "`ollama pull qwen3:8b` or `hf download Qwen/Qwen3-8B-GGUF " in here("run", "qwen3-8b").err
    ran = here("run", "mine:8b", "--dry-run", "--wide")
    assert "mine:8b: no model of this name in " in ran.err
    assert "8b: llamacpp 8b" not in ran.err


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        (
            "llama3.1:8b",
            ["llama-3.1-8b.llamacpp.q8_0", "llama-3.1-8b.llamacpp.q4_k_m", "llama-3.1-8b.llamacpp.q4_0"],
        ),
        ("llama3.1:8b-instruct-q4_K_M", ["llama-3.1-8b.llamacpp.q4_k_m"]),
        ("qwen2.5:7b", ["qwen2.5-7b-instruct.llamacpp.q8_0"]),
    ],
)
def test_random_weights_are_asked_for_and_are_the_first_line(here, name, cells):
    ran = here("run", name, "--synthetic", "--dry-run", "--wide")
    assert ran.err.startswith(
        f"harness: random weights in the shape of {cells[0].partition('.llamacpp')[0]}: sizes "
    )
    assert cells_of(ran)[: len(cells)] == cells


@pytest.mark.parametrize(
    "line", ["run real.yaml", "run real.yaml --max-ctx", "tune real.yaml", "ab real.yaml --set-b threads=1"]
)
def test_a_config_with_a_shape_says_first_that_its_weights_are_random(harness, real_config, line):
    real_config({"stack": "llamacpp", "quant": "q8_0"}, model={"shape": "tiny-qwen2"})
    ran = harness(*line.split(), "--dry-run")
    assert ran.err.startswith("harness: random weights in the shape of tiny-qwen2: sizes are exact"), ran.err
    assert ran.err.count("random weights") == 1
    refused = harness(*line.split(), "--dry-run", "--only", "nothing*")
    assert refused.code == 2
    assert line.startswith("run ") or "random weights" not in refused.err


def test_synthetic_is_for_names_of_known_models(here, tiny, config):
    config({}, name="shaped")
    with serving(ollama(("smollm2:135m", "Q4_0"))) as address:
        for given, sentence in {
            str(tiny): "--synthetic is for the names of known models",
            "shaped": "--synthetic is for the names of models; a config has its weights",
            address: "--synthetic is for the names of known models; a server has its own weights",
            "no-such-model": "unknown model no-such-model",
        }.items():
            ran = here("run", given, "--synthetic", "--dry-run", "--wide")
            assert (ran.code, ran.err.count("\n")) == (2, 1)
            assert sentence in ran.err


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "repository").mkdir()
    stored(tmp_path / "repository" / "tiny-Q4_0.gguf", "q4_0")
    with Hub(tmp_path / "repository") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def test_a_download_has_its_size_and_a_terminal_is_asked(here_alone, hub, tmp_path):
    hf = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    places = {"HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path / "home")}
    size = (tmp_path / "repository" / "tiny-Q4_0.gguf").stat().st_size
    what = f"{size / 1e6:,.0f} MB of org/name (*Q4_0.gguf)"
    run = ("run", "org/name:Q4_0", "--set", "timeout_s=1", "--set", "repeats=1", "--wait")
    ours, theirs = pty.openpty()
    asked = subprocess.Popen(
        [HARNESS, *run], stdin=ours, stderr=ours, cwd=tmp_path, env=os.environ | hf | places
    )
    os.close(ours)
    seen = b""
    while b"[Y/n]" not in seen:
        seen += os.read(theirs, 1000)
    assert f"harness: download {what} to " in seen.decode()
    os.write(theirs, b"n\n")
    assert asked.wait(60) == 2
    os.close(theirs)
    assert not list((tmp_path / "hf").glob("hub/*/snapshots/*/*.gguf"))


def test_theory_and_recommend_print_what_fetches_and_measures_the_file(harness, tmp_path, tiny):
    hub = "Qwen/Qwen3-8B-GGUF"
    lines = harness("theory", "qwen3-8b", "--machine", "4090").out.splitlines()[-3:]
    assert lines == [
        "fetch it: ollama pull qwen3:8b",
        f"or hf download {hub} --include '*Q4_K_M.gguf'",
        "measure it: harness run qwen3:8b",
    ]
    assert harness("theory", str(tiny)).out.endswith(f"measure it: harness run {tiny}\n")
    for unknown in ("qwen2.5-coder:7b", "internlm2-20b", "qwen3-8b-base"):
        assert "fetch it" not in harness("theory", unknown, "--machine", "4090").out
    best = harness("recommend", "qwen3-8b", "--machine", "4090").out
    for line in (
        f"fetch:        hf download {hub} --include '*Q4_K_M.gguf'",
        f"measure:      harness run {hub}:Q4_K_M",
        f"llama-server: llama-server -hf {hub}:Q4_K_M -c 8192",
        f"Modelfile:    FROM hf.co/{hub}:Q4_K_M",
    ):
        assert f"  {line}" in best, best
    assert (
        "or in the type that Ollama has: ollama pull qwen2.5:7b"
        in harness("recommend", "qwen2.5-7b", "--machine", "4090").out
    )


def test_every_known_download_is_of_its_model_and_was_seen():
    seen = json.loads((Path(__file__).parent / "models" / "gguf_files.json").read_text())
    for row in data.rows("downloads.csv"):
        if row["ollama"]:
            assert understood(row["ollama"], Known()).name.startswith(row["model"]), row
        assert bool(row["repository"]) == bool(row["types"])
        if row["repository"] and row["model"] != "qwen3-8b":
            assert all(
                row["repository"] in _sources(seen, row["model"], kind) for kind in row["types"].split()
            )


def _sources(seen: list[dict[str, Any]], model: str, kind: str) -> str:
    return " ".join(row["source"] for row in seen if (row["model"], row["type"]) == (model, kind))
