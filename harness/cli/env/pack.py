"""`harness env pack`: gather what a machine without a network needs in one folder."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

from harness.cli.env.chosen import environments
from harness.cli.exits import OK, Mistake
from harness.cli.inputs import add_json
from harness.cli.progress import Progress
from harness.system.wording import plural

DEVICES = ("cpu", "cuda")
PYTHON = ".".join(platform.python_version_tuple()[:2])


def add(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "gather what a machine without a network needs in one folder"
    parser = actions.add_parser("pack", help=summary, description=summary)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder, to copy to the machine")
    parser.add_argument("stack", nargs="*", help="stacks (default: all that can be packed)")
    parser.add_argument(
        "--python",
        default=PYTHON,
        metavar="VERSION",
        help="the machine's Python, such as 3.12 (default: as here)",
    )
    parser.add_argument(
        "--platform",
        default=f"manylinux_2_28_{platform.machine()}",
        metavar="TAG",
        help="its processor and glibc (default: manylinux_2_28_x86_64, or what is here)",
    )
    parser.add_argument(
        "--device", choices=DEVICES, default="cpu", help="what its stacks run on (default: cpu)"
    )
    parser.add_argument(
        "--cuda",
        metavar="VERSION",
        help="CUDA version of its torch, such as 13.0 (default: as in --have, or all)",
    )
    parser.add_argument(
        "--have", type=Path, metavar="FILE", help="what its Python has, as `pip freeze` prints it: not packed"
    )
    add_json(parser, "the manifest")
    parser.set_defaults(act=_pack, parser=parser)


def _pack(arguments: argparse.Namespace) -> int:
    """Make the pack and print what is in it. Raises Mistake, PackError."""
    from harness.stacks import pack
    from harness.stacks.pack.known import Have, have
    from harness.stacks.pack.target import Target

    environments(arguments.stack, None)
    there = Have({})
    if file := arguments.have:
        try:
            there = have(file.read_text(encoding="utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as refusal:
            why = getattr(refusal, "strerror", None) or "it is no text"
            raise Mistake(f"--have {file}: cannot be read: {why}") from refusal
    cuda = arguments.cuda or (there.cuda() if arguments.device == "cuda" else None)
    target = Target(arguments.python, arguments.platform, arguments.device, cuda)
    progress = Progress()
    manifest, notes = pack.pack(arguments.folder, arguments.stack, target, there, progress.say)
    progress.clear()
    if arguments.json:
        print(json.dumps([manifest], indent=1))
    else:
        _show(arguments.folder, manifest, str(target), notes)
    return OK


def _show(folder: Path, manifest: dict[str, Any], target: str, notes: list[str]) -> None:
    sizes = {file["name"]: file["bytes"] for file in manifest["files"]}
    print(f"{folder}: {plural(len(sizes), 'package')}, {_mb(sum(sizes.values()))}, for {target}")
    for name, needs in manifest["environments"].items():
        files = [*needs["wheels"], *needs["sources"]]
        left_out = f"; there already: {len(needs['expects'])}" if needs["expects"] else ""
        print(
            f"  {name}: {plural(len(files), 'package')}, {_mb(sum(sizes[each] for each in files))}{left_out}"
        )
    for note in notes:
        print(f"note: {note}")
    print(f"copy {folder} to the machine; there: sh {folder.name}/install.sh [--python PYTHON] [--to FOLDER]")


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
