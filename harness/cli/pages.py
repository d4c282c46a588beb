"""Where pages are written, and how one is shown in the browser."""

from __future__ import annotations

import getpass
import os
import shlex
import webbrowser
from pathlib import Path

from harness.base import data
from harness.cli import NOT_OK, OK, Mistake, say
from harness.cli.commands import PORT

REPORTS = Path("reports")
PUBLIC_SPEEDS = Path(data.PUBLISHED) / data.PUBLIC_SPEEDS


def open_page(page: Path) -> int:
    """Open a page in the browser; over ssh, print how to see it on the user's own machine."""
    displays = (os.environ.get("DISPLAY"), os.environ.get("WAYLAND_DISPLAY"))
    if (ssh := os.environ.get("SSH_CONNECTION")) and not any(displays):
        from harness.report.serve import ADDRESS

        *_, address, _ = ssh.split()
        host = f"{getpass.getuser()}@{address}"
        say("over ssh there is no browser here; on your own machine, copy the page with")
        say(f"  scp {shlex.quote(f'{host}:{page.absolute()}')} .")
        say(f"or start harness report DIR --serve here, and open http://{ADDRESS}:{PORT}/ there behind")
        say(f"  ssh -L {PORT}:{ADDRESS}:{PORT} {host}")
        return OK
    if not webbrowser.open(page.absolute().as_uri()):
        say("no browser was found here; open that file on another machine")
        return NOT_OK
    return OK


def newest_page() -> Path:
    """The page that was written last. Raises Mistake if there is none."""
    pages = sorted(REPORTS.glob("*.html"), key=lambda path: path.stat().st_mtime_ns)
    if not pages:
        raise Mistake(
            f"no page in {REPORTS}/; harness run quickstart writes one;"
            " of another folder: harness report DIR --open"
        )
    return pages[-1]
