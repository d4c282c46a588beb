"""The hub: its cache is used without a question; a download is whole, pinned, and resumes when cut off."""

import hashlib
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import until
from test_checkpoint import TINY, write_config, write_gguf, write_shards

INDEX = "model.safetensors.index.json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# A campaign's call in a separate process: the library reads its settings on import.
FETCH = """
import json, sys
from harness.config import Weights
from harness.models.hub import from_hub
from harness.models.locate import WeightsError
weights = Weights(kind="hub", repo="org/name", revision="main", file=sys.argv[1] or None)
try:
    ready = from_hub(weights.filled("f16", None))
    said = {"path": str(ready.path), "revision": ready.revision, "bytes": ready.sizes["model_bytes"]}
except WeightsError as mistake:
    said = {"error": str(mistake)}
print(json.dumps(said))
"""


class Hub(http.server.ThreadingHTTPServer):
    """As much of the hub's API as a download needs, for the files of one folder. `stop_after`: bytes of a
    longer file that are sent before it hangs, or (once) breaks the connection."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder, self.asked = folder, list[str]()
        self.stop_after: int | None = None
        self.hangs = True
        self.stopped, self.over = threading.Event(), threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, hub = self.path.split("?")[0], self.server
        hub.asked.append(f"{self.command} {path} {self.headers.get('Range') or ''}".strip())
        sizes = {p.name: p.stat().st_size for p in hub.folder.iterdir()}
        if path.startswith("/api/models/org/name/tree/"):
            listed = [{"type": "file", "path": n, "size": s, "oid": _etag(n)} for n, s in sizes.items()]
            self._send(200, json.dumps(listed).encode())
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            self._send(200, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode())
        elif (found := re.fullmatch(r"/org/name/resolve/[^/]+/(.+)", path)) and found[1] in sizes:
            self._send_file(found[1], (hub.folder / found[1]).read_bytes())
        else:
            self._send(404, b"")

    def _send_file(self, name: str, content: bytes) -> None:
        headers = {"ETag": f'"{_etag(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        begin, code = 0, 200
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            begin, code = int(found[1]), 206
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        stop = self.server.stop_after
        self._send(code, content[begin:], headers, stop if stop and len(content) > stop else None)

    def _send(self, code: int, body: bytes, headers: Any = (), stop: int | None = None) -> None:
        self.send_response(code)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:stop])
        if stop is None:
            return
        self.wfile.flush()
        self.server.stopped.set()
        if self.server.hangs:
            self.server.over.wait(60)
        else:
            self.server.stop_after = None
        self.close_connection = True

    def log_message(self, *words: Any) -> None:
        pass


def _etag(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkpoint of two shards, with other files that must not be loaded."""
    folder = tmp_path / "repository"
    folder.mkdir()
    write_config(folder)
    write_shards(folder, TINY, 2)
    for name in ("pytorch_model.bin", "modeling_mine.py", "consolidated.safetensors", "README.md"):
        (folder / name).write_text("not to be taken")
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[Hub]:
    with Hub(repository) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a fetch of org/name from an address, with a cache of the test's own."""
    started: list[subprocess.Popen[str]] = []

    def begin(address: str, file: str = "", **variables: str) -> subprocess.Popen[str]:
        settings = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
        command, pipes = (
            [sys.executable, "-c", FETCH, file],
            dict.fromkeys(("stdout", "stderr"), subprocess.PIPE),
        )
        started.append(subprocess.Popen(command, **pipes, text=True, env=kept | settings | variables))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def fetch(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., dict[str, Any]]:
    """Fetches, and returns what was found or what was said."""

    def run(address: str, file: str = "", **variables: str) -> dict[str, Any]:
        out, err = start(address, file, **variables).communicate(timeout=600)
        assert "Retrying" not in err
        return json.loads(out)

    return run


def free_address() -> str:
    """Where nobody answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def snapshot(tmp_path: Path) -> Path:
    return tmp_path / "home" / "hub" / "models--org--name" / "snapshots" / COMMIT


def test_a_checkpoint_is_downloaded_pinned_and_then_found_without_asking(hub, fetch, tmp_path):
    found = fetch(hub.address)
    assert found["path"] == str(snapshot(tmp_path))
    assert found["revision"] == COMMIT
    shards = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert {path.name for path in snapshot(tmp_path).iterdir()} == {"config.json", INDEX, *shards}
    hub.asked.clear()
    assert fetch(hub.address) == found
    assert not hub.asked
    assert fetch(hub.address, HF_HUB_OFFLINE="1") == found
    assert fetch(free_address()) == found


def test_how_a_checkpoint_is_packed_is_downloaded_with_it(hub, fetch, repository, tmp_path):
    (repository / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    fetch(hub.address)
    assert (snapshot(tmp_path) / "quantize_config.json").exists()


@pytest.mark.slow("several downloads, each by a process of its own")
def test_a_connection_that_breaks_is_taken_up_where_it_was(hub, start, repository):
    _enlarge(repository)
    hub.stop_after, hub.hangs = 15_000_000, False
    out, err = start(hub.address).communicate(timeout=600)
    assert json.loads(out)["revision"] == COMMIT
    begun = [int(found[1]) for line in hub.asked if (found := re.search(r"safetensors bytes=(\d+)-$", line))]
    assert begun, err
    assert max(begun) >= 10_000_000


@pytest.mark.slow("several downloads, each by a process of its own")
def test_what_a_killed_download_left_is_never_taken_for_whole_and_its_whole_files_are_kept(
    hub, start, fetch, repository, tmp_path
):
    _enlarge(repository)
    hub.stop_after = 15_000_000
    killed = start(hub.address)
    assert hub.stopped.wait(60)
    for name in ("config.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors"):
        until((snapshot(tmp_path) / name).exists)
    killed.kill()
    killed.communicate()
    said = fetch(hub.address, HF_HUB_OFFLINE="1")
    assert said == {"error": "hub org/name: is not complete in the cache, and HF_HUB_OFFLINE is set"}
    hub.stop_after = None
    hub.asked.clear()
    assert fetch(hub.address)["revision"] == COMMIT
    fetched = {line.split()[1].rpartition("/")[2] for line in hub.asked if line.startswith("GET /org")}
    assert fetched == {"model-00001-of-00002.safetensors"}


@pytest.mark.slow("several downloads, each by a process of its own")
def test_a_shard_that_the_cache_lost_is_fetched_again(hub, fetch, tmp_path):
    whole = fetch(hub.address)
    lost = snapshot(tmp_path) / "model-00002-of-00002.safetensors"
    lost.resolve().unlink()
    lost.unlink()
    assert "is not complete in the cache, and the hub cannot be reached" in fetch(free_address())["error"]
    assert fetch(hub.address) == whole
    assert lost.exists()


def cache_by_hand(repository: Path, snapshot: Path, pattern: str = "*") -> None:
    """A snapshot as transformers leaves it, without a list of the repository's files."""
    snapshot.mkdir(parents=True, exist_ok=True)
    for path in repository.glob(pattern):
        (snapshot / path.name).write_bytes(path.read_bytes())
    refs = snapshot.parent.parent / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text(COMMIT)


def test_what_the_cache_has_and_nobody_can_load_is_named_with_the_hub_out_of_reach(
    fetch, repository, tmp_path
):
    write_config(repository, num_local_experts=8)
    write_gguf(repository / "mine-f16.gguf")
    os.truncate(repository / "mine-f16.gguf", 1000)
    cache_by_hand(repository, snapshot(tmp_path))
    config = snapshot(tmp_path) / "config.json"
    said = fetch(free_address())["error"]
    begin = f"hub org/name: the copy in the cache is unusable ({config}: llama is a mixture of experts; only "
    assert said.startswith(begin + "dense models are known), and the hub cannot be reached (")
    said = fetch(free_address(), "mine-{quant}.gguf", HF_HUB_OFFLINE="1")["error"]
    assert re.fullmatch(r"hub org/name: the copy .*\.gguf: .*cut short.*\), and HF_HUB_OFFLINE is set", said)


def test_a_refusal_by_the_hub_keeps_what_is_wrong_with_the_cache(hub, fetch, repository, tmp_path):
    write_gguf(repository / "mine-f16.gguf")
    os.truncate(repository / "mine-f16.gguf", 1000)
    cache_by_hand(repository, snapshot(tmp_path))
    (repository / "mine-f16.gguf").unlink()
    said = fetch(hub.address, "mine-{quant}.gguf")["error"]
    assert said.startswith("hub org/name: has no file mine-f16.gguf in revision main; the copy in the cache ")


@pytest.mark.slow("several downloads, each by a process of its own")
def test_shards_without_their_index_are_not_taken_for_whole(hub, fetch, repository, tmp_path):
    cache_by_hand(repository, snapshot(tmp_path), "[cm]o*[0-9g].[js]*[sn]")
    assert {path.suffix for path in snapshot(tmp_path).iterdir()} == {".json", ".safetensors"}
    assert not (snapshot(tmp_path) / INDEX).exists()
    assert f"{snapshot(tmp_path)}: has no model.safetensors and no {INDEX}" in fetch(free_address())["error"]
    assert fetch(hub.address)["revision"] == COMMIT
    assert (snapshot(tmp_path) / INDEX).exists()
    (repository / INDEX).unlink()
    shutil.rmtree(tmp_path / "home")
    hub.asked.clear()
    assert fetch(hub.address) == {"error": f"hub org/name: has no model.safetensors and no {INDEX}"}
    assert not [line for line in hub.asked if "/resolve/" in line]


def test_a_cache_that_cannot_be_read_is_one_sentence(fetch, tmp_path):
    (snapshot(tmp_path).parent.parent / "refs" / "main").mkdir(parents=True)
    said = fetch(free_address())["error"]
    assert said.startswith("hub org/name: its cache cannot be read (")
    assert "Is a directory" in said


def test_a_snapshot_that_another_tool_left_is_used_offline(fetch, repository, tmp_path):
    cache_by_hand(repository, snapshot(tmp_path), "[cm]o*[nl]*.json")
    assert "is missing, one of 2 shards" in fetch(free_address(), HF_HUB_OFFLINE="1")["error"]
    cache_by_hand(repository, snapshot(tmp_path), "model-*.safetensors")
    assert fetch(free_address(), HF_HUB_OFFLINE="1")["revision"] == COMMIT


def test_one_gguf_is_downloaded_pinned_and_then_found_without_asking(hub, fetch, repository):
    write_gguf(repository / "mine-f16.gguf")
    found = fetch(hub.address, "mine-{quant}.gguf")
    assert found["path"].endswith(f"/snapshots/{COMMIT}/mine-f16.gguf")
    assert found["revision"] == COMMIT
    hub.asked.clear()
    assert fetch(hub.address, "mine-{quant}.gguf") == found
    assert not hub.asked
    said = fetch(hub.address, "other.gguf")["error"]
    assert said == "hub org/name: has no file other.gguf in revision main; it has mine-f16.gguf"


def test_without_the_hub_it_is_one_sentence_after_one_try(hub, fetch):
    for file in ("", "mine.gguf"):
        said = fetch(free_address(), file)["error"]  # which also looks that nothing was tried again
        assert said.startswith("hub org/name: is not complete in the cache, and the hub cannot be reached (")
        assert said.endswith("): connect this machine, or name a file that you copied here")


def test_a_repository_without_safetensors_is_one_sentence(hub, fetch, repository):
    for path in repository.glob("*.safetensors"):
        path.unlink()
    pickled = "hub org/name: its weights are pickled; only safetensors are supported"
    assert fetch(hub.address) == {"error": pickled}
    (repository / "pytorch_model.bin").rename(repository / "mine.gguf")
    assert (
        "has no safetensors; name the type of one of its GGUF files, as in org/name:Q4_K_M"
        in fetch(hub.address)["error"]
    )
    assert not [line for line in hub.asked if "/resolve/" in line]


def test_a_file_by_its_type_is_found_in_any_case_on_the_hub_and_in_its_cache(hub, fetch, repository):
    """`org/name:q4_k_m`, and `{quant}` in the name of a file."""
    write_gguf(repository / "Mine-F16.gguf")
    for address in (hub.address, free_address()):
        assert fetch(address, "*-{quant}.gguf")["path"].endswith("/Mine-F16.gguf")
    refused = fetch(hub.address, "*q4_k_m.gguf")["error"]
    assert refused.endswith("has no file *q4_k_m.gguf in revision main; it has Mine-F16.gguf")


def _enlarge(repository: Path) -> None:
    """The first shard has 31 MB, the other less than 2: the library writes 10 MB at a time."""
    large = replace(TINY, vocab_size=60_000, tied=True)
    write_config(repository, large)
    write_shards(repository, large, 2)
