"""What a server serves, and what it says of itself, asked before anything is measured."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import urlencode, urlsplit

from harness.base.text import is_this_machine
from harness.theory import base_shapes
from runners.answers import (
    ANSWER_BYTES,
    ANSWER_S,
    LOAD_S,
    NO_MODEL,
    WrongAnswer,
    encoded,
    json_object,
    refusal,
    too_large,
    too_slow,
    unreachable,
    without_key,
)

OLLAMA_WAIT_S = 3.0  # for the list of its models
# Where servers say what they are: vLLM and LocalAI, Ollama, TGI, SGLang, LM Studio; llama-server in /props.
PAGES = ("/version", "/api/version", "/api/tags", "/info", "/get_server_info", "/api/v0/models")
# Names that servers give to what they are, to what tells one model from another, and to what makes it faster
# or slower. All else may change while the server does not: times, ids, counters, what is loaded, used memory.
_BUILD = re.compile(r"\w*version|build\w*|docker_label")
_MODEL = re.compile(
    r"\w*digest|\w*sha(256)?|\w*commit|\w*revision|\w*path|\w*file(name)?|root|model_id|size"
    r"|\w*quant\w*|\w*[fd]type|\w*param(eter)?s?(_size|_count)?"
)
_SETTING = re.compile(
    r"parent|arch\w*|family|format|compatibility_type|\w*type_[kv]|n_(params|vocab|embd|layer)|max_\w+"
    r"|(num_|n_)?ctx(_size|_train|_len\w*)?|\w*context_(length|size|len|window)|total_slots|\w*parallel\w*"
    r"|(n_)?gpu_layers|[tdpe]p_size|\w*backend|\w*threads|n_u?batch|flash_att\w*|speculative[._]\w+"
)


class NotServed(ValueError):
    """Nothing can be measured at this address; the message is one sentence with the next step."""


def is_address(text: str) -> bool:
    """Whether it is the address of a server, and none of a model on a site."""
    return base_shapes.without_site(text).startswith(("http://", "https://"))


def serving(address: str, key: str | None) -> dict[str, Path | None]:
    """The models of the server at an address, which text.server_address gave, and where the weights of each
    are; None: not on this machine, or not said. llama-server and vLLM say it. Raises NotServed."""
    rows = _got(address, "/v1/models", key).get("data") or []
    roots = {row["id"]: row.get("root") for row in rows if row and row.get("id")}
    if not roots:
        raise NotServed(f"{address}: {NO_MODEL}")
    if len(roots) == 1:
        with contextlib.suppress(NotServed):  # it is no llama-server
            roots = dict.fromkeys(roots, _got(address, "/props", key).get("model_path"))
    is_local = is_this_machine(address)
    return {name: _here(path) if is_local else None for name, path in roots.items()}


def ollama_models(address: str) -> dict[str, str | None]:
    """The models that Ollama has at an address, and their types. Raises NotServed."""
    rows = _got(address, "/api/tags", None, OLLAMA_WAIT_S).get("models")
    types: dict[str, str | None] = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and isinstance(name := row.get("name"), str):
            details = row.get("details")
            kind = details.get("quantization_level") if isinstance(details, dict) else None
            types[name] = kind if isinstance(kind, str) else None
    return types


def name_of(model: str) -> str:
    """A model's name without its folder and the end of a GGUF, where the server names it by its path, as
    `python -m llama_cpp.server` does."""
    path = PureWindowsPath(model) if re.match(r"[A-Za-z]:[\\/]", model) else PurePosixPath(model)
    is_file = path.suffix.lower() == ".gguf" and len(path.parts) > 1
    return path.stem if is_file else path.name if path.is_absolute() else model


def identity(address: str, model: str | None, key: str | None) -> str | None:
    """Identifies a server, its model and its settings by what it reports, and on this machine by its command
    line too; None: it reports nothing of its model but the name. `model`: None for the only one. Raises
    NotServed."""
    rows = [row for row in _got(address, "/v1/models", key).get("data") or [] if row]
    if model:
        rows = [row for row in rows if row.get("id") in (model, f"{model}:latest")]
    if len(rows) != 1:
        raise NotServed(f"{address}: has {len(rows)} models of this name")
    name = str(rows[0].get("id"))
    pages: dict[str, Any] = {"/v1/models": rows[0]}
    for page in PAGES:
        with contextlib.suppress(NotServed):  # it has no such page
            content: Mapping[str, Any] = _got(address, page, key)
            listed = content.get("data", content.get("models"))
            is_list = isinstance(listed, list)  # of its rows those of this model
            pages[page] = [row for row in listed if _is_of(row, name)] if is_list else content
    with contextlib.suppress(NotServed):
        pages["/api/show"] = _got(address, "/api/show", key, body={"model": name})
    with contextlib.suppress(NotServed):
        props = _got(address, "/props", key)
        if props.get("role") == "router":  # llama-server's, which may load the model first
            props = _got(address, f"/props?{urlencode({'model': name})}", key, within_s=LOAD_S)
        pages["/props"] = props
    facts = sorted((page, *fact) for page, content in pages.items() for fact in _facts(content))
    of_model, build, setting = (
        any(names.fullmatch(fact) for _, fact, _ in facts) for names in (_MODEL, _BUILD, _SETTING)
    )
    # LocalAI reports a version alone, OpenRouter a context alone.
    if not of_model and not (build and setting):
        return None
    here: list[object] = []
    if is_this_machine(address):
        paths = (value for _, fact, value in facts if fact in ("model_path", "root"))
        files = (file for path in paths if (file := _here(json.loads(path))))
        here = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        here += _listening(urlsplit(address).port or 80)
    return hashlib.sha256(json.dumps([name, rows[0].get("owned_by"), facts, here]).encode()).hexdigest()[:20]


def _is_of(row: object, model: str) -> bool:
    return isinstance(row, dict) and model in (row.get("id"), row.get("name"))


def _facts(content: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Name and value of each part of a page that may tell one server, model or setting from another."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _facts(value, str(key))
    elif isinstance(content, list) and not name:
        for row in content:
            yield from _facts(row)
    elif content not in (None, ""):
        for each in dict.fromkeys((name, name.rpartition(".")[2])):  # general.parameter_count
            if any(names.fullmatch(each) for names in (_MODEL, _BUILD, _SETTING)):
                yield each, json.dumps(content, sort_keys=True)


def _listening(port: int) -> list[list[str]]:
    """The command lines of the processes that listen on a port of this machine, where they can be seen."""
    import psutil

    commands: list[list[str]] = []
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == port
                and connection.pid
            ):
                commands.append(psutil.Process(connection.pid).cmdline())
    return sorted(commands)


def _here(path: object) -> Path | None:
    file = Path(path) if isinstance(path, str) else Path()
    with contextlib.suppress(OSError, ValueError):  # of a name that no file can have
        return file if file.is_absolute() and file.exists() else None
    return None


def _got(
    address: str,
    page: str,
    key: str | None,
    within_s: float = ANSWER_S,
    body: Mapping[str, str] | None = None,
) -> Mapping[str, Any]:
    """The JSON object of a page, without proxies and redirects: a key would go to another server. Raises
    NotServed."""
    parts = urlsplit(address + page)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    path, sent = parts._replace(scheme="", netloc="").geturl(), json.dumps(body) if body else None
    if sent:
        headers["Content-Type"] = "application/json"
    too_late = threading.Event()
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=within_s)
        connection.connect()
        with contextlib.closing(connection), _ending(connection.sock, within_s, too_late):
            connection.request("POST" if sent else "GET", path, sent, headers)
            with connection.getresponse() as answer:
                why = encoded(answer.getheader("Content-Encoding", ""), key)
                content = b"" if why else answer.read(ANSWER_BYTES + 1)
    except (OSError, ValueError, HTTPException) as failure:
        is_late = too_late.is_set() or isinstance(failure, TimeoutError)
        is_late = is_late and "handshake" not in str(failure)
        why = f"the server {too_slow(within_s)}" if is_late else unreachable(failure, key)
        raise NotServed(f"{address}: {why}") from None
    if too_late.is_set():
        why = too_slow(within_s)
    elif len(content) > ANSWER_BYTES:
        why = too_large(ANSWER_BYTES)
    if why:
        raise NotServed(f"{address}{page}: the server {why}")
    type_, location = answer.getheader("Content-Type", ""), answer.getheader("Location")
    if why := refusal(answer.status, type_, location, key):
        raise NotServed(f"{address}{page}: {why}")
    try:
        return json_object(content, page, key)
    except WrongAnswer as wrong:
        raise NotServed(without_key(f"{address}: {wrong}", key)) from None


@contextlib.contextmanager
def _ending(sock: socket.socket, within_s: float, too_late: threading.Event) -> Iterator[None]:
    """Ends a connection after so long: the timeout of a socket is for each read, also of the bytes of a
    head."""

    def end() -> None:
        too_late.set()
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # that of TLS would end its thread's read badly

    timer = threading.Timer(within_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
