"""A cluster of real raylets on this machine, for the tests of a fleet, and what is seen of its nodes."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.base.files import cache_folder
from harness.campaign.fleet import access

MARKS = [
    pytest.mark.slow("a Ray cluster takes ten seconds to start"),
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: make fleet"),
    pytest.mark.usefixtures("own_cache"),
]
MEASURED = (0, 1)  # 1 where another process disturbed a cell, which is none of the fleet's business
ATTEMPTS = 4  # to start a cluster: Ray gives a node 30 s, which on a busy machine may be too short
NODES = Path(__file__).parent / "ray_nodes.py"


def namespaces_allowed() -> bool:
    """Whether a process may make network namespaces here."""
    tried = ["unshare", "--net", "--mount", "true"]
    return bool(shutil.which("ip")) and not subprocess.run(tried, stderr=subprocess.DEVNULL).returncode


class Nodes:
    """The cluster of a test; see ray_nodes.py. `variables`: further environment variables of its."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(
            [sys.executable, str(NODES)], text=True, env=os.environ | dict(variables), **pipes
        )
        self.address = self._line()

    def __call__(self, *words: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(" ".join(map(str, words)) + "\n")
            self.process.stdin.flush()
        assert self._line() == "done", "Ray ended"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.stdout.close()


@pytest.fixture
def own_cache(cache, fake_interpreter, tmp_path, monkeypatch) -> Path:
    """A cache that is this test's alone but for the environments, so what nodes keep is too."""
    (own := tmp_path / "cache").mkdir()
    (own / "envs").symlink_to(cache / "envs")
    monkeypatch.setenv("HARNESS_CACHE", str(own))
    return own


@pytest.fixture
def nodes(own_cache, tmp_path, monkeypatch) -> Iterator[Callable[..., Nodes]]:
    """A cluster with nodes, numbered from 1, of these devices: `nodes("a", "a", "b")`. `elsewhere`: so that
    nodes of other network namespaces reach it. It asks for a token, which this test's processes have."""
    started: list[Nodes] = []
    variables = access.own_token(tmp_path)

    def start(*devices: str, elsewhere: bool = False) -> Nodes:
        for name, value in variables.items():
            if not (elsewhere and name in access.LOOPBACK_ALONE):
                monkeypatch.setenv(name, value)
        started.append(Nodes({}))
        for number, device in enumerate(devices, 1):
            started[-1]("add", number, device)
        return started[-1]

    yield start
    for each in started:
        each.end()


def slow_cells(config, count: int, ms: float = 20.0, **more: Any) -> Path:
    """A config of cells that take about a second each."""
    variants = [{"name": f"v{n}", "B_ms": ms, "clock": "real"} for n in range(count)]
    return config(*variants, new_tokens=50, **more)


def caches() -> list[Path]:
    return [cache_folder() / "local-cluster" / str(number) for number in range(1, 9)]


def under_way(number: int) -> list[Path]:
    """The repeats that a node measures now."""
    return list((cache_folder() / "local-cluster" / str(number)).glob("fleet/*/*/results/*/*/*/*/begun.json"))


def start_of(record: dict[str, Any]) -> tuple[str, int, str]:
    return record["content_key"], record["repeat"], record["started_utc"]


def check(found: list[dict[str, Any]], cells: int, repeats: int = 1) -> None:
    """Every repeat is ok once, and none is there twice."""
    ok = Counter((r["content_key"], r["repeat"]) for r in found if r["outcome"] == "ok")
    assert len(ok) == cells * repeats
    assert set(ok.values()) == {1}
    assert set(Counter(map(start_of, found)).values()) == {1}


def ended(process: subprocess.Popen[str], within_s: float = 600) -> tuple[int, str]:
    _, err = process.communicate(timeout=within_s)
    assert "Traceback" not in err, err
    return process.returncode, err
