"""`harness report --serve`: one page to this machine alone, made anew as records come."""

import http.client
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import STUDY, until
from test_page import BROWSER, playwright

from harness.base import bounds
from harness.report import serve

CELLS = [STUDY / "qwen1.5-14b" / f"qwen1.5-14b.llamacpp.{quant}.published" for quant in ("q2_k", "q8_0")]


def add(cell: Path, folder: Path) -> None:
    """A record appears in a results folder whole, as a campaign's does."""
    shutil.copytree(cell, folder.parent / "copy")
    (folder.parent / "copy").rename(folder / cell.name)


@pytest.fixture
def served(background: Callable[..., subprocess.Popen[str]]) -> Iterator[Callable[[Path], int]]:
    """Serves a folder in a process of its own; returns the port."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> int:
        process = background("report", folder, "--serve", "0", stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout
        address = process.stdout.readline().split()[0]
        return int(address.removeprefix("http://127.0.0.1:").removesuffix("/"))

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=600) == 0


def answer(
    port: int, method: str = "GET", path: str = "/", host: str = "localhost:1"
) -> tuple[int, str, str]:
    """Status, ETag and text."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, headers={"Host": host})
    response = connection.getresponse()
    found = response.status, response.headers["ETag"], response.read().decode()
    connection.close()
    return found


def test_a_connection_on_which_nothing_is_asked_is_closed(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(bounds, "SERVE_IDLE_S", 0.05)
    with serve.server(serve.Pages([tmp_path], str), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for said in (b"", b"GET / HTTP/1.1\r\nHost:"):
            with socket.create_connection(("127.0.0.1", server.server_port)) as idle:
                idle.sendall(said)
                assert idle.recv(1) == b""
        server.shutdown()


def test_the_page_waits_for_records_and_is_made_anew_only_when_they_change(served, tmp_path: Path):
    (folder := tmp_path / "r").mkdir()
    port = served(folder)
    _, empty, page = answer(port)
    assert "no records" in page
    (folder / "notes.txt").write_text("not a record")
    assert answer(port, "HEAD") == (200, empty, "")
    add(CELLS[0], folder)
    until(lambda: answer(port, "HEAD")[1] != empty)
    _, one, page = answer(port)
    assert "llamacpp q2_k" in page
    assert answer(port) == (200, one, page)


def test_a_log_that_is_still_written_is_waited_for(served, tmp_path: Path):
    log = tmp_path / "log.csv"
    log.write_text("latency_ms\n")
    port = served(log)
    _, begun, page = answer(port)
    assert "latency_ms" not in page
    log.write_text("latency_ms\n" + "20.5\n21.0\n20.7\n" * 20)
    until(lambda: answer(port, "HEAD")[1] != begun)
    assert "TTFT" in answer(port)[2]


def test_only_the_page_is_served_and_to_no_other_name_of_this_machine(served, tmp_path: Path):
    add(CELLS[0], tmp_path)
    port = served(tmp_path)
    assert answer(port, host="127.0.0.1:8000")[0] == 200
    for path in ("/record.json", "/../x", "/?x", f"/{CELLS[0].name}/record.json"):
        assert answer(port, path=path)[0] == 404
    for host in ("evil.example:8000", "evil.example", "localhost.evil.example:1", ""):
        assert answer(port, host=host)[0] == 403
    assert answer(port, "POST")[0] == 501


def test_what_cannot_be_served_is_refused_in_a_sentence(harness, served, tmp_path: Path):
    (folder := tmp_path / "r").mkdir()
    assert "missing: no such results folder" in harness("report", "missing", "--serve").err
    port = served(folder)
    assert "name another: --serve PORT" in harness("report", folder, "--serve", port).err
    assert (
        "--output has no effect with --serve" in harness("report", folder, "--serve", "0", "-o", "x.html").err
    )


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no browser on PATH")
def test_an_open_page_is_loaded_anew_at_its_place_when_a_record_comes_and_else_stays(served, tmp_path: Path):
    add(CELLS[0], tmp_path)
    port = served(tmp_path)
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=BROWSER, args=["--disable-dev-shm-usage"])
        page = browser.new_page(viewport={"width": 1280, "height": 700})
        page.set_default_timeout(600_000)  # the next look waits for 20 times what making the page took
        complaints: list[Any] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"http://127.0.0.1:{port}/")
        place = "document.getElementById('methods').getBoundingClientRect().top"
        page.evaluate(
            "document.getElementById('methods').scrollIntoView(); scrollBy(0, 50); window.old = true"
        )
        before = page.evaluate(place)
        with page.expect_response(lambda response: response.request.method == "HEAD"):
            pass
        page.wait_for_timeout(500)
        assert page.evaluate("window.old")
        add(CELLS[1], tmp_path)
        page.wait_for_function(
            "() => window.old === undefined && document.documentElement.dataset.ready === 'yes'"
        )
        assert page.evaluate(place) == pytest.approx(before, abs=2)
        assert page.get_by_role("button", name="llamacpp q8_0").count() > 0
        assert complaints == []
        browser.close()
