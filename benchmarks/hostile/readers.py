"""The readers of hostile inputs: commands and functions that take an input or refuse it in a sentence."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import socketserver
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.hostile.texts import KEY
from harness import cli, records
from harness.base import bounds
from harness.base.text import is_utf8
from harness.campaign import tokenized_text
from harness.models import check, locate, served
from harness.share.anonymize import Anonymizer
from harness.stacks.header import stacks
from runners.answers import EVENT_BYTES, SHORTEST_KEY, WrongAnswer, api_key
from runners.served.apis import APIS, CHAT

MOST_S = 5.0  # of CPU time: a busy machine must not find anything
MOST_BYTES = 512 << 20
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|^::(?!\w+ title=)", re.MULTILINE)  # and GitHub's
Reader = Callable[[], bool]


class Wrong(Exception):
    """What a reader did and must not do."""


def command(*arguments: str, check: Callable[[str, str], str | None] | None = None) -> Reader:
    """A command in this process: whether its exit code is 0. Raises whatever escapes it, and Wrong for what
    `check` says of its output and its messages."""

    def run() -> bool:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main([*arguments])
            except SystemExit as end:  # argparse's
                code = int(end.code or 0)
        if code not in (0, 1, 2, 3):
            raise Wrong(f"exit code {code}")
        for name, text in (("output", out), ("message", err)):
            if "Traceback (most" in text.getvalue():
                raise Wrong(f"a traceback in the {name}")
            if found := CONTROL.search(text.getvalue()):
                raise Wrong(f"{found[0]!r} in the {name}")
            if not is_utf8(text.getvalue()):
                raise Wrong(f"a surrogate in the {name}")
        if code == 0 and check and (wrong := check(out.getvalue(), err.getvalue())):
            raise Wrong(wrong)
        return code == 0

    return run


def local(path: str) -> Reader:
    def run() -> bool:
        try:
            locate.local(Path(path))
        except locate.WeightsError:
            return False
        return True

    return run


def planned(path: str) -> Reader:
    """Whether some stack would load or convert it."""

    def run() -> bool:
        try:
            ready = locate.local(Path(path))
        except locate.WeightsError:
            return False
        taken = False
        for header in stacks().values():
            options = {name: option.default for name, option in header.options.items()}
            with contextlib.suppress(locate.WeightsError):
                if ready.format == "hf":
                    check.check_loadable(ready, None, header, options)
                    check.check_convertible(ready)
                taken = True
        return taken

    return run


def tokenized() -> bool:
    try:
        return bool(
            tokenized_text.tokenized(
                Path("tokenizer.json"), "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab some text", 8
            ).ids
        )
    except locate.WeightsError:
        return False


def recovered() -> bool:
    damages: list[object] = []
    records.recover(Path("results"), damages.append)
    list(records.records(Path("results"), damages.append))
    return not damages


CHECKPOINT = {
    "theory": command("theory", "model", "--machine", "4090"),
    "theory --memory": command("theory", "model", "--memory", "24GB"),
    "plan": planned("model"),
}
RECORDS = {
    "list": command("report", "--list", "results"),
    "memory": command("report", "--memory", "results"),
    "report md": command("report", "results", "--format", "md"),
    "report page": command("report", "results"),
    "history": command("report", "--history", "results"),
    "compare": command("compare", "results/a", "results/b", "--format", "gha"),
    "export": command("report", "results", "--export", "csv", "-o", "export.csv"),
}
SQL = {"sql": command("sql", "from repeats", "results", "--json")}


def pasted(card: str, _: str) -> str | None:
    called = re.search(r"@|://|\bwww\.|<[a-z!/]", card, re.IGNORECASE)
    return called and f"{called[0]!r} in a card"


def cells(text: str, _: str) -> str | None:
    """What a spreadsheet would take for a formula."""
    for cell in (cell for line in csv.reader(io.StringIO(text)) for cell in line):
        first = unicodedata.normalize("NFKC", cell.lstrip()[:1])
        with contextlib.suppress(ValueError):
            float(cell)
            continue  # a number may be negative
        if (first and first in "=+-@") or cell.startswith(("\t", "\r", "\n")):
            return f"a cell that begins with {cell[:1]!r}"
    return None


def drawn() -> bool:
    """Whether there is a picture of the card; it must be XML."""
    taken = command("share", "results", "--svg", "card.svg")()
    if taken:
        ElementTree.fromstring(Path("card.svg").read_bytes())
    return taken


SHOWN = {
    "card": command("share", "results", check=pasted),
    "picture": drawn,
    "csv": command("report", "results", "--format", "csv", check=cells),
    "export csv": command("report", "results", "--export", "csv", check=cells),
    "sql csv": command("sql", "from repeats", "results", "--csv", check=cells),
}


def anonymized() -> bool:
    """What is taken out of a record; of what is left a verifier must find nothing more."""
    record = json.loads(Path("record.json").read_bytes())
    anonymizer = Anonymizer(["jane"])
    anonymizer.learn(record)
    shared = anonymizer.value(record)
    if shared != (again := Anonymizer().value(shared)):
        raise Wrong(f"taken out the second time: {str(shared)[:60]!r} becomes {str(again)[:60]!r}")
    return bool(shared)


def keyed() -> bool:
    """Whether the value is taken for a key. It must not be shown."""
    key = Path("key").read_bytes()
    os.environb[b"HARNESS_API_KEY"] = key
    row = "device: cpu\nmodels: [{name: m, weights: served}]\nvariants: [{stack: http, url: 'http://127.0.0.1:1'}]\n"
    Path("config.yaml").write_text(row)

    def shows(out: str, err: str) -> str | None:
        text = os.fsdecode(key.strip())
        return "the key in what is printed" if len(text) >= SHORTEST_KEY and text in out + err else None

    taken = command("run", "--dry-run", "config.yaml", check=shows)()
    command("run", "--dry-run", "http://127.0.0.1:1", check=shows)()
    return taken and api_key("HARNESS_API_KEY") is not None


def opened() -> bool:
    """Whether a file of the folder is taken, by every command that takes its kind."""
    paths = [each for each in Path().iterdir() if each.name != "cache"]
    commands = {
        ".gguf": [("theory", "{}", "--machine", "4090"), ("run", "--dry-run", "{}")],
        ".csv": [("fit", "{}"), ("report", "{}", "--list"), ("compare", "{}", "{}")],
        ".yaml": [("run", "--dry-run", "{}")],
        ".zst": [
            ("share", "--verify", "{}"),
            ("report", "{}", "--format", "md"),
            ("report", "{}", "-o", "{}.html"),
        ],
        "": [("report", "{}"), ("share", "{}"), ("sql", "from cells", "{}"), ("fit", "{}"), ("theory", "{}")],
    }
    runs = [(one, f"./{path}") for path in paths for one in commands[path.suffix]]
    return any([command(*(each.replace("{}", path) for each in one))() for one, path in runs])  # noqa: C419


def asked() -> bool:
    """Whether the query is answered: of a folder without records, within a second and the memory of all
    other readers, a quarter of what users have. It must write nothing, neither where DuckDB keeps what does
    not fit in memory."""
    bounds.QUERY_BYTES, bounds.QUERY_ENGINE_BYTES = MOST_BYTES * 3 // 4, MOST_BYTES // 2
    for folder in ("results", ".tmp"):
        Path(folder).mkdir(exist_ok=True)
    text = os.fsdecode(Path("query").read_bytes().replace(b"\0", b""))
    before = {*Path().rglob("*")}
    taken = command("sql", "--csv", "--timeout=1", "--", text, "results", check=cells)()
    if written := {*Path().rglob("*")} - before:
        raise Wrong(f"{written} written")
    return taken


@contextlib.contextmanager
def hostile_server() -> Iterator[str]:
    """The address of one that sends the input, whatever it is asked."""
    answer, again, how = (Path(name).read_bytes() for name in ("answer", "again", "how"))
    again *= (1 << 16) // len(again or b"x")
    ended = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(MOST_S)
            with contextlib.suppress(OSError):  # the client has closed it
                self.request.recv(1 << 16)
                for place in range(len(answer) if how == b"slow" else 0):
                    self.request.sendall(answer[place : place + 1])
                    ended.wait(0.01)
                if how != b"slow":
                    self.request.sendall(answer)
                while again and not ended.is_set():
                    self.request.sendall(again)
                if how == b"open":
                    ended.wait(MOST_S)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            ended.set()
            server.shutdown()


def sentence(why: Exception) -> None:
    """Raises Wrong for what is none, or has the key or the most of it."""
    if len(text := str(why)) > 1000 or KEY[:12] in text:
        raise Wrong(f"a message of {len(text)} characters, or with the key: {text[:300]}") from why


def identified() -> bool:
    """Whether the server is taken for one, asked as before a run; each answer has a fifth of a second."""
    served.LOAD_S, served._got.__defaults__ = 0.2, (0.2, None)
    with hostile_server() as address:
        try:
            if KEY in str(served.serving(address, KEY)):
                raise Wrong("the key in the name of a model")
            return bool(served.identity(address, None, KEY))
        except served.NotServed as why:
            sentence(why)
            return False


def measured() -> bool:
    """Whether the worker's client takes it for a server and gets tokens from it."""
    sys.path.append(os.environ["HOSTILE_CLIENT"])
    from runners.served import client

    client.LOAD_S, client.ASK_S, client.Client.ask.__defaults__ = 0.2, 0.2, (None, 0.2)
    client.Client.found.__defaults__ = (None, 0.2)
    vars(client)["stream_s"] = lambda tokens: 0.2
    taken = False
    with hostile_server() as address, contextlib.closing(client.Client(address, KEY)) as asked:
        api = [*APIS.values(), CHAT][len(Path("answer").read_bytes()) % (len(APIS) + 1)]
        for get in (
            asked.models,
            lambda: asked.props("m"),
            lambda: client.api_of(asked, "auto", "m", "x", {}),
            lambda: asked.total_generated(api),
            lambda: [*asked.stream(api, "m", [1] if api.name != "openai" else "a", 12)],
        ):
            try:
                found = get()
            except client.ServerError as why:
                sentence(why)
            else:
                taken |= bool(found)
                if KEY in str(found):
                    raise Wrong("the key in what is read")
    return taken


def heard() -> bool:
    """Whether its content is taken for an event of a stream, by some API."""
    taken = False
    content = Path("answer").read_bytes().partition(b"\r\n\r\n")[2][:EVENT_BYTES]
    with contextlib.suppress(ValueError, RecursionError):  # the worker's client has sentences for both
        event = json.loads(content)
        for api in [*APIS.values(), CHAT] if isinstance(event, dict) else ():
            with contextlib.suppress(WrongAnswer):
                taken |= bool(api.read(event).ids)
    return taken


FIT = {"fit": lambda name: command("fit", name), "fit --json": lambda name: command("fit", name, "--json")}
READERS: dict[str, dict[str, Reader]] = {
    "gguf": {
        "theory": command("theory", "model.gguf", "--machine", "4090"),
        "theory --memory": command("theory", "model.gguf", "--memory", "24GB"),
        "weights": local("model.gguf"),
    },
    "safetensors": CHECKPOINT,
    "index.json": CHECKPOINT,
    "config.json": CHECKPOINT,
    "tokenizer.json": {"tokenize": tokenized},
    "yaml": {"validate": command("run", "--dry-run", "config.yaml")},
    "record.json": RECORDS,
    "begun.json": {"recover": recovered, "list": command("report", "--list", "results")},
    "parquet": RECORDS,
    "csv": {name: made("log.csv") for name, made in FIT.items()},
    "csv.gz": {name: made("log.csv.gz") for name, made in FIT.items()},
    "jsonl": {name: made("log.jsonl") for name, made in FIT.items()},
    "bundle": {
        "verify": command("share", "--verify", "b.tar.zst"),
        "report md": command("report", "b.tar.zst", "--format", "md"),
    },
    "names": RECORDS | SQL,
    "grown": RECORDS | SQL,
    "words": RECORDS | SQL | SHOWN,
    "persons": {"anonymizer": anonymized},
    "twice": {
        "verify": command("share", "--verify", "b.tar.zst"),
        "recover": recovered,
        "report": command("report", "results/b", "--format", "md"),
    },
    "keys": {"key": keyed},
    "paths": {"open": opened},
    "power log": {"power": command("report", "results", "--power-log", "power.csv", "--format", "md")},
    "servers": {"identity": identified, "worker": measured, "events": heard},
    "sql": {"sql": asked},
}
