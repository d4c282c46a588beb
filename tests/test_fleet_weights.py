"""Weights that a fleet shares, on real raylets: copied once, and whole or not at all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import records_below as records
from conftest import until
from raylets import MARKS, MEASURED, caches, check, ended

from harness.campaign.fleet.on_node import sha256
from harness.config.variants import InlineShape
from harness.theory.decoder import dense_fields
from harness.theory.hf_config import SHAPES

pytestmark = MARKS
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TINY = dense_fields(SHAPES["tiny-qwen2"]) or {}
LARGE = {"intermediate_size": 100_000}  # 300 MB: the copy takes long enough to be interrupted


@pytest.fixture
def llamacpp_cells(real_config, llamacpp_interpreter, own_cache) -> Callable[..., Path]:
    """Writes a config of short cells: `llamacpp_cells(4, weights={...})`."""

    def write(count: int, quant: str | None = "q8_0", **model: Any) -> Path:
        short = {"new_tokens": 4, "prompt_tokens": 2, "model": {"name": "m", "shape": "tiny-qwen2", **model}}
        short |= {"warmup": {"at_least_s": 0, "max_windows": 2, "window_tokens": 2}}
        rows = [{"stack": "llamacpp", "name": f"v{n}", "n_ctx": 64 + n} for n in range(count)]
        return real_config(*(row | ({"quant": quant} if quant else {}) for row in rows), **short)

    return write


@pytest.fixture
def hub_cache(job, tmp_path) -> Callable[..., Path]:
    """The Hugging Face cache of a machine that has downloaded a GGUF, tiny but for its FFN layers."""

    def make(**changed: int) -> Path:
        source, home = tmp_path / "checkpoint", tmp_path / "home"
        folder = home / "hub" / "models--org--name"
        (folder / "snapshots" / COMMIT).mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
        model = {"name": "m", "path": None, "shape": TINY | changed}
        job(job="synthesize", model=model, options={"seed": 0, "threads": 2}, files={"target": str(source)})
        made = folder / "snapshots" / COMMIT / "tiny.gguf"
        files = {"source": str(source), "target": str(made)}
        job(job="convert", options={"dtype": "f16", "threads": 2}, files=files)
        return home

    return make


def fleet_file(tmp_path: Path, address: str) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(json.dumps({"address": address, "share_weights": True}))
    return path


def made(cache: Path) -> dict[str, tuple[bytes, int]]:
    """The weights in a cache that a cell loads, with their times."""
    found = (path for path in cache.glob("weights/*/*") if path.suffix == ".gguf" and path.stem != "f16")
    return {str(path.relative_to(cache)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def copies(cache: Path) -> list[Path]:
    return list(cache.glob("weights/*/hub/*/tiny.gguf"))


def test_what_one_node_synthesized_another_copies(nodes, background, llamacpp_cells, tmp_path):
    on = fleet_file(tmp_path, nodes("a", "b").address)
    code, err = ended(background("run", llamacpp_cells(2), "--wait", "--on", on))
    assert code in MEASURED, err
    assert "copied weights" in err
    first, second = (made(cache) for cache in caches()[:2])
    assert len(first) == 1
    assert first == second
    assert [each["outcome"] for each in records(tmp_path / "results")] == ["ok"] * 4


def test_a_node_killed_while_it_copies_has_nothing_half_written_and_copies_again(
    nodes, background, llamacpp_cells, hub_cache, tmp_path
):
    fleet = nodes()
    large = hub_cache(**LARGE)
    fleet("add", 1, "a", f"HF_HOME={large}", "HF_HUB_OFFLINE=1")
    fleet("add", 2, "a", f"HF_HOME={tmp_path}", "HF_HUB_OFFLINE=1")
    shape = {key: value for key, value in (TINY | LARGE).items() if key in InlineShape.model_fields}
    path = llamacpp_cells(2, None, shape=shape, weights={"repo": "org/name", "file": "tiny.gguf"})
    on, cache = fleet_file(tmp_path, fleet.address), caches()[1]
    running = background("run", path, "--wait", "--on", on)
    until(lambda: list(cache.glob("weights/*/hub.partial-*/*/tiny.gguf")), 300)
    fleet("kill", 2)
    assert copies(cache) == []
    code, err = ended(running)
    assert code in MEASURED, err
    assert "weights are not shared: its node died" in err
    check(records(tmp_path / "results"), 2)
    fleet("add", 2, "a", f"HF_HOME={tmp_path}", "HF_HUB_OFFLINE=1")
    code, err = ended(background("run", path, "--wait", "--fresh", "--on", on))
    assert code in MEASURED, err
    (copy,), (source,) = copies(cache), tmp_path.glob("home/hub/*/snapshots/*/tiny.gguf")
    assert copy.stat().st_mtime_ns == source.stat().st_mtime_ns
    assert sha256(str(copy)) == sha256(str(source))
    assert not list(cache.rglob("*.partial-*"))
