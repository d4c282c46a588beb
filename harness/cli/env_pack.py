"""`harness env pack`: one folder with all that a machine without a network needs."""

from __future__ import annotations

import argparse

from harness.api.progress import Progress
from harness.base.text import plural, unknown
from harness.cli import OK, Mistake
from harness.cli.environments import environments
from harness.stacks import pack


def make(arguments: argparse.Namespace) -> int:
    """Make the pack and print how large it is. Raises Mistake, PackError."""
    environments(arguments.stack, None)
    for kind, word, known in (
        ("Python", arguments.python, pack.PYTHONS),
        ("platform", arguments.platform, pack.PLATFORMS),
    ):
        if word not in known:
            raise Mistake(unknown(kind, word, known))
    text, file = "", arguments.have
    try:
        text = file.read_text(encoding="utf-8") if file else ""
    except (OSError, UnicodeDecodeError) as refusal:
        why = getattr(refusal, "strerror", None) or "it is no text"
        raise Mistake(f"--have {file}: cannot be read: {why}") from refusal
    folder, progress = arguments.folder, Progress()
    target = pack.Target(arguments.python, arguments.platform, arguments.device)
    pack.pack(folder, arguments.stack, target, pack.have(text), progress.say)
    progress.clear()
    sizes = [path.stat().st_size for path in (folder / "packages").iterdir()]
    print(f"{folder}: {plural(len(sizes), 'package')}, {sum(sizes) / 1e6:.1f} MB")
    print(f"copy {folder} to the machine; there: sh {folder.name}/install.sh [--python PYTHON] [--to FOLDER]")
    return OK
