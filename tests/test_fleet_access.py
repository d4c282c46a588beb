"""Who may use a fleet's Ray cluster: attacks on its ports, each on an open cluster, where it works, and on
one with a token; and what `harness run --on` says of a cluster or a token that will not do."""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import records_below, refused, until
from ray_nodes import Elsewhere
from raylets import MARKS, MEASURED, Nodes, namespaces_allowed

from harness.campaign.fleet import access

pytestmark = [*MARKS, pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="needs gRPC")]
ROOT = Path(__file__).parent.parent
# A program with the cluster's token, whose actor is a worker of Ray on a node.
OWNER = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level=40)
@ray.remote(num_cpus=0)
class Victim:
    def there(self): pass
victim = Victim.remote()
ray.get(victim.there.remote())
print("ready", flush=True)
sys.stdin.read()
"""
NOWHERE = b"\x01" * 28  # an id of Ray's
PULL = b"\x0a\x1c" + NOWHERE + b"\x12\x1c" + NOWHERE  # a PullRequest: node_id, object_id


@dataclass
class Reached:
    """A cluster as an attacker sees it. `ports`: by the program that listens there; `hosts`: at which they
    do. `words`: of all command lines."""

    address: str
    token: str
    ports: dict[str, list[int]]
    hosts: set[str]
    words: set[str]
    nodes: Nodes


def program(words: list[str]) -> str:
    if "-m" in words:
        return words[words.index("-m") + 1]
    name = Path(words[0]).name
    return "worker" if name.startswith("ray::Victim") else "driver" if "-c" in words else name


def seen(owner: int, cluster: Nodes) -> Reached:
    found = Reached(cluster.address, "", {}, set(), set(), cluster)
    for process in (psutil.Process(owner), *psutil.Process(cluster.process.pid).children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            words, open_ones = process.cmdline(), process.net_connections("tcp")
            found.words.update(words)
            if words[:1] == ["ray::IDLE"]:  # another worker, which Ray ends when it likes
                continue
            for each in open_ones:
                if each.status == psutil.CONN_LISTEN:
                    found.ports.setdefault(program(words), []).append(each.laddr.port)
                    found.hosts.add(each.laddr.ip.removeprefix("::ffff:"))
    return found


def running(variables: dict[str, str], folder: Path) -> Iterator[Reached]:
    """A head, a node, a server of Ray's client, and a program that uses them."""
    variables = {**variables, "HARNESS_CACHE": str(folder)}
    cluster = Nodes(variables)
    cluster("add", 1, "a")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cluster("client", port)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-c", OWNER, cluster.address]
    with subprocess.Popen(command, env=os.environ | variables, **pipes) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        until(lambda: "ray.util.client.server" in seen(owner.pid, cluster).ports, 300)
        found = seen(owner.pid, cluster)
        found.token = Path(variables.get(access.TOKEN_PATH, os.devnull)).read_text()
        yield found
        cluster.end()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Reached]:
    """A cluster as `--on local-cluster:1` starts one."""
    folder = tmp_path_factory.mktemp("guarded")
    yield from running(access.own_token(folder), folder)


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Iterator[Reached]:
    """A cluster as Ray starts one by default up to 2.60, on all interfaces."""
    yield from running({access.MODE: "disabled"}, tmp_path_factory.mktemp("opened"))


def asked(port: int, request: str, content: bytes, token: str = "") -> str:
    """gRPC's status, or HTTP's."""
    import grpc

    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
            channel.unary_unary(request)(content, timeout=60, metadata=metadata)
    except grpc.RpcError as refusal:
        return str(refusal.code().name)
    return "OK"


def posted(host: str, port: int, path: str, token: str = "") -> int:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://{host}:{port}{path}", b"", headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refusal:
        return refusal.code


def attack(on: str, request: str, content: bytes = b"") -> Callable[[Reached, str], bool]:
    """Whether a request is let in by one of the ports at which a program listens."""

    def works(cluster: Reached, token: str) -> bool:
        if not request.startswith("/ray."):
            host = cluster.address.rpartition(":")[0]
            return any(posted(host, port, request, token) not in (401, 403) for port in cluster.ports[on])
        answers = {asked(port, request, content, token) for port in cluster.ports[on]}
        answers.discard("UNIMPLEMENTED")  # a port of the same program for something else
        assert answers <= {"OK", "NOT_FOUND", "UNAUTHENTICATED"}
        assert answers
        return "UNAUTHENTICATED" not in answers

    return works


def new_node() -> bytes:
    from ray.core.generated import gcs_service_pb2

    request = gcs_service_pb2.RegisterNodeRequest()
    request.node_info.node_id, request.node_info.node_manager_address = NOWHERE, "127.0.0.9"
    return bytes(request.SerializeToString())


ATTACKS = {
    "start a job": ("gcs_server", "/ray.rpc.JobInfoGcsService/GetNextJobID", b""),
    "list the actors": ("gcs_server", "/ray.rpc.ActorInfoGcsService/GetAllActorInfo", b""),
    "read the functions that run": ("gcs_server", "/ray.rpc.InternalKVGcsService/InternalKVKeys", b""),
    "join as a node": ("gcs_server", "/ray.rpc.NodeInfoGcsService/RegisterNode", None),
    "look into a node": ("raylet", "/ray.rpc.NodeManagerService/GetNodeStats", b""),
    "fetch an object": ("raylet", "/ray.rpc.ObjectManagerService/Pull", PULL),
    "call a worker": ("worker", "/ray.rpc.CoreWorkerService/GetCoreWorkerStats", b""),
    "call the program that runs the fleet": ("driver", "/ray.rpc.CoreWorkerService/GetCoreWorkerStats", b""),
    "use the server of Ray's client": ("ray.util.client.server", "/ray.rpc.RayletDriver/ClusterInfo", b""),
    "have packages installed": ("ray::RuntimeEnvAgent", "/get_or_create_runtime_env", b""),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_anybody_can_do_to_an_open_cluster_needs_the_token_of_ours(guarded, opened, name):
    on, request, content = ATTACKS[name]
    works = attack(on, request, new_node() if content is None else content)
    assert works(opened, "")
    assert works(guarded, guarded.token)
    almost = guarded.token[:-1] + ("0" if guarded.token[-1] != "0" else "1")
    for token in ("", "ab" * 32, almost, guarded.token.upper(), guarded.token[:32]):
        assert token == guarded.token or not works(guarded, token)


def test_the_ports_of_a_local_cluster_are_those_of_the_table_and_on_loopback_alone(guarded):
    rows = (ROOT / "docs" / "reference" / "security.md").read_text().partition("| listens |")[2]
    table = re.findall(r"^\| `([^`]+)`", rows.partition("\n\n")[0], re.MULTILINE)
    assert sorted(table) == sorted(guarded.ports)
    assert guarded.hosts == {"127.0.0.1"}


def test_another_machine_cannot_reach_a_local_cluster(guarded, opened):
    if not namespaces_allowed():
        pytest.skip("needs root, to make network namespaces")
    there = Elsewhere("9")
    try:

        def reached(port: int) -> bool:
            program = f"import socket; socket.create_connection(('{there.net}.1', {port}), 10)"
            command = ["ip", "netns", "exec", there.name, sys.executable, "-c", program]
            return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0

        assert reached(opened.ports["gcs_server"][0])
        assert not any(reached(port) for ports in guarded.ports.values() for port in ports)
    finally:
        there.remove()


def test_the_token_is_in_one_file_that_its_owner_alone_reads(guarded):
    path = Path(guarded.nodes.variables[access.TOKEN_PATH])
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(guarded.token) == 64
    assert not any(guarded.token in word for word in guarded.words)
    logs = {
        Path(word.partition("=")[2])
        for word in guarded.words
        if word.startswith(("--log_dir=", "--log-dir="))
    }
    written = [path for folder in logs for path in folder.rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if guarded.token.encode() in path.read_bytes()]


# What `harness run --on` says


def test_a_cluster_that_asks_for_no_token_is_one_sentence_unless_it_is_allowed(
    opened, command, config, tmp_path
):
    ran = command("run", config({}), "--on", opened.address)
    refused(ran, f"harness: {opened.address} asks for no token, so whoever reaches it runs code on its nodes")
    assert not (tmp_path / "results").exists()
    ran = command("run", config({}), "--on", opened.address, "--allow-unauthenticated")
    assert ran.code in MEASURED, ran.err
    (record,) = records_below(tmp_path / "results")
    assert record["campaign"]["fleet"]["unauthenticated"] is True


def test_on_loopback_a_cluster_without_a_token_is_let_be(opened):
    port = opened.ports["gcs_server"][0]
    assert access.admitted(f"127.0.0.1:{port}", False) is False
    assert os.environ.pop(access.MODE) == "disabled"


def test_a_local_cluster_that_ray_cannot_start_is_one_sentence(command, config, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(config({})))
    ran = command("run", config({}), "--on", "local-cluster:1")
    refused(ran, "harness: Ray could not start a cluster on this machine: [Errno 20] Not a directory")


@pytest.fixture
def token_file(guarded, tmp_path, monkeypatch) -> Callable[..., Path]:
    """Makes this process's token file: `token_file("...", 0o644)`."""
    monkeypatch.setenv(access.MODE, "")  # is put back after the test
    monkeypatch.delenv(access.TOKEN, raising=False)

    def write(content: str, mode: int = 0o600) -> Path:
        path = tmp_path / "token"
        path.unlink(missing_ok=True)
        path.touch(mode)
        path.write_text(content)
        monkeypatch.setenv(access.TOKEN_PATH, str(path))
        return path

    return write


def test_a_token_that_will_not_do_is_one_sentence(guarded, opened, token_file):
    address = guarded.address
    client = f"ray://127.0.0.1:{guarded.ports['ray.util.client.server'][0]}"

    def says(words: str, there: str = address) -> None:
        with pytest.raises(access.FleetError, match=re.escape(words)):
            access.admitted(there, allow_unauthenticated=True)

    path = token_file("ab" * 32)  # of another cluster, or of this one before it was started anew
    says(f"{address} refuses the token in {path}")
    says(f"{client} refuses the token in {path}", client)
    token_file("\n")
    says(f"and {path} holds none")
    token_file(guarded.token).chmod(0o640)
    says(f"{path} can be read by other users: chmod 600 {path}")
    path.unlink()
    says(f"asks for a token (docs/guide/fleet.md), and {path} cannot be read: No such file or directory")
    token_file(f"{guarded.token}\n")
    for there in (address, client):
        assert access.admitted(there, allow_unauthenticated=False)
        assert os.environ[access.MODE] == "token"


def test_a_run_with_a_token_has_it_in_nothing_that_it_writes(
    guarded, token_file, command, config, tmp_path, own_cache
):
    token_file(guarded.token)
    ran = command("run", config({}), "--on", guarded.address, **access.LOOPBACK_ALONE)
    assert ran.code in MEASURED, ran.err
    (record,) = records_below(tmp_path / "results")
    assert record["campaign"]["fleet"].keys() == {"device", "clock_ahead_s"}
    assert guarded.token not in ran.out + ran.err
    below = [
        tmp_path / "results",
        tmp_path / "reports",
        Path(guarded.nodes.variables["HARNESS_CACHE"]) / "fleet",
    ]
    written = [path for folder in below for path in folder.rglob("*") if path.is_file()]
    assert len(written) >= 2
    assert not [path for path in written if guarded.token.encode() in path.read_bytes()]


# Certificates


def certificates(folder: Path) -> Path:
    """A key, and a certificate of 127.0.0.1, signed by an authority of its own: Ray's example of TLS."""
    folder.mkdir()
    make = [
        "req -x509 -newkey rsa:2048 -nodes -days 2 -keyout ca.key -out ca.crt -subj /CN=ca",
        "req -newkey rsa:2048 -nodes -keyout me.key -out me.csr -subj /CN=me",
        "x509 -req -in me.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out me.crt -extfile names",
    ]
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for words in make:
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)
    return folder


def variables_of(folder: Path) -> dict[str, str]:
    """With which Ray uses the certificates in a folder."""
    names = {access.CERTIFICATE: "me.crt", access.KEY: "me.key", access.CA: "ca.crt"}
    return {access.TLS: "1", **{name: str(folder / file) for name, file in names.items()}}


def head_after_a_call_without_token(cluster: Nodes, credentials: Any = None) -> bool:
    """Whether the head lives after a call of Ray's syncer without metadata: Ray 2.60 reads the node's id
    there before it looks for the token, and aborts."""
    import grpc

    (head,) = [
        process
        for process in psutil.Process(cluster.process.pid).children(recursive=True)
        if program(process.cmdline() or [""]) == "gcs_server"
    ]
    where, proxy = cluster.address.removeprefix("ray://"), [("grpc.enable_http_proxy", 0)]
    opened = (
        grpc.secure_channel(where, credentials, proxy) if credentials else grpc.insecure_channel(where, proxy)
    )
    with opened as channel:
        call = channel.stream_stream("/ray.rpc.syncer.RaySyncer/StartSync")(iter([b""]), timeout=20)
        with pytest.raises(grpc.RpcError):
            next(call)
    with suppress(psutil.TimeoutExpired):
        head.wait(5)
    return head.is_running() and head.status() != psutil.STATUS_ZOMBIE


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_call_without_a_token_ends_the_head_unless_certificates_keep_it_out(tmp_path):
    """Once a Ray survives it, docs/reference/security.md and docs/guide/fleet.md can leave it out."""
    import grpc

    variables = access.own_token(tmp_path)
    cluster = Nodes(variables)
    try:
        assert not head_after_a_call_without_token(cluster)
    finally:
        cluster.end()

    ours, other = certificates(tmp_path / "ours"), certificates(tmp_path / "other")
    cluster = Nodes(variables | variables_of(ours))
    ca, key, certificate = ours / "ca.crt", other / "me.key", other / "me.crt"
    strangers = [
        None,
        grpc.ssl_channel_credentials(ca.read_bytes()),
        grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), certificate.read_bytes()),
    ]
    try:
        for credentials in strangers:
            assert head_after_a_call_without_token(cluster, credentials)
    finally:
        cluster.end()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_fleet_with_certificates_is_encrypted_and_takes_no_others(command, config, tmp_path, monkeypatch):
    ours, other = certificates(tmp_path / "ours"), certificates(tmp_path / "other")
    ran = command("run", config({}), "--on", "local-cluster:1", **variables_of(ours))
    assert ran.code in MEASURED, ran.err
    assert len(records_below(tmp_path / "results")) == 1

    variables = access.own_token(tmp_path)
    cluster = Nodes(variables | variables_of(ours))
    try:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        refused(command("run", config({}), "--on", cluster.address), "is no Ray cluster, or one that needs")
        ran = command("run", config({}), "--on", cluster.address, **variables_of(other))
        refused(ran, "refuse each other's certificates")
    finally:
        cluster.end()
