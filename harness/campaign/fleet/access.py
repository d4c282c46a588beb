"""Who may reach a Ray cluster: its token, its certificates, and whether it asks for them.

Ray checks both itself; this decides what it is given, and refuses a cluster that anybody could use.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base.files import NotStarted

if TYPE_CHECKING:
    import grpc

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"  # as Ray reads them
DEFAULT_PATH = "~/.ray/auth_token"  # where `ray get-auth-token --generate` writes one
# Ray then knows this machine as 127.0.0.1 and listens nowhere else, as it does on macOS.
LOOPBACK_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
TLS = "RAY_USE_TLS"
CERTIFICATE, KEY, CA = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"
ANSWERS_WITHIN_S = 10.0
# Read-only requests, without which nothing else is possible: of Ray's head, and of its server of clients.
OF_HEAD, OF_CLIENTS = "/ray.rpc.NodeInfoGcsService/GetClusterId", "/ray.rpc.RayletDriver/ClusterInfo"
GUIDE = "docs/guide/fleet.md"


class FleetError(NotStarted):
    """The fleet cannot be used; the message is one sentence."""


def own_token(folder: Path) -> dict[str, str]:
    """Variables for a Ray cluster that other machines cannot reach, with a new token in `folder`."""
    path = folder / "token"
    path.touch(0o600, exist_ok=False)
    path.write_text(secrets.token_hex(32))  # what Ray's own command makes, which knows one file alone
    return {MODE: "token", TOKEN: "", TOKEN_PATH: str(path), **LOOPBACK_ALONE}


@contextmanager
def of_this_machine() -> Iterator[None]:
    """Have Ray start and use a cluster that is this process's alone."""
    with tempfile.TemporaryDirectory(prefix="harness-token-") as folder:
        os.environ.update(own_token(Path(folder)))
        yield


def admitted(address: str, allow_unauthenticated: bool) -> bool:
    """Whether a cluster asks for a token; Ray then sends it ours, and otherwise none. `address`: HOST:PORT of
    its head, or ray://HOST:PORT.

    Raises FleetError: nothing answers; it refuses our token or certificate, or we have none; it asks for no
    token and is not on loopback.
    """
    there = address.removeprefix("ray://")
    request = OF_CLIENTS if address.startswith("ray://") else OF_HEAD
    status = _status(there, request)
    if status == "DEADLINE_EXCEEDED" or (status == "UNAVAILABLE" and not answers(there, ANSWERS_WITHIN_S)):
        raise FleetError(f"{address} does not answer: no Ray cluster there within {ANSWERS_WITHIN_S:.0f} s")
    if status == "UNAVAILABLE" and tls_is_on():
        raise FleetError(
            f"{address} and this machine refuse each other's certificates: {os.environ[CA]} has to have"
            " signed both, and each has to name the address of its machine"
        )
    if status in ("UNAVAILABLE", "UNIMPLEMENTED"):
        raise FleetError(f"{address} is no Ray cluster, or one that needs certificates ({GUIDE})")
    if status != "UNAUTHENTICATED":
        if not allow_unauthenticated and not _on_loopback(there):
            raise FleetError(
                f"{address} asks for no token, so whoever reaches it runs code on its nodes: start Ray with"
                f" {MODE}=token ({GUIDE}), or go on with --allow-unauthenticated"
            )
        os.environ[MODE] = "disabled"
        return False
    token, origin = _token(address)
    if _status(there, request, token) == "UNAUTHENTICATED":
        raise FleetError(f"{address} refuses the token in {origin}: copy that of its head here ({GUIDE})")
    os.environ[MODE] = "token"
    return True


def answers(address: str, within_s: float) -> bool:
    """Whether something listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), within_s).close()
    except OSError:
        return False
    return True


def tls_is_on() -> bool:
    return os.environ.get(TLS, "0").lower() in ("1", "true")  # as Ray reads it


def _status(address: str, request: str, token: str = "") -> str:
    """The name of gRPC's status for an empty request."""
    import grpc

    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    try:
        with _channel(address) as channel:
            channel.unary_unary(request)(b"", timeout=ANSWERS_WITHIN_S, metadata=metadata)
    except grpc.RpcError as refusal:
        return str(refusal.code().name)
    return "OK"


def _channel(address: str) -> grpc.Channel:
    import grpc

    options = [("grpc.enable_http_proxy", 0)]  # as Ray's own channels
    if not tls_is_on():
        return grpc.insecure_channel(address, options)
    try:
        ca, key, certificate = (Path(os.environ[name]).read_bytes() for name in (CA, KEY, CERTIFICATE))
    except (KeyError, OSError) as refusal:
        raise FleetError(
            f"{TLS} needs readable files in {CA}, {KEY} and {CERTIFICATE}: {refusal}"
        ) from refusal
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options)


def _token(address: str) -> tuple[str, str]:
    """Our token as Ray finds it, and where that is. Raises FleetError."""
    token, origin = os.environ.get(TOKEN, ""), TOKEN
    if not token:
        path = Path(os.environ.get(TOKEN_PATH) or DEFAULT_PATH).expanduser()
        origin, lacks = str(path), f"{address} asks for a token ({GUIDE}), and {path}"
        try:
            if path.stat().st_mode & 0o077:
                raise FleetError(f"{lacks} can be read by other users: chmod 600 {path}")
            token = path.read_text("ascii", "replace").strip()
        except OSError as refusal:
            raise FleetError(f"{lacks} cannot be read: {refusal.strerror}") from refusal
    if not (token.isascii() and token.isprintable() and token):
        raise FleetError(f"{address} asks for a token, and {origin} holds none")
    return token, origin


def _on_loopback(address: str) -> bool:
    """Whether all that a HOST:PORT stands for is this machine's loopback interface."""
    try:
        hosts = socket.getaddrinfo(address.rpartition(":")[0].strip("[]"), None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(host[4][0]).partition("%")[0]).is_loopback for host in hosts)
