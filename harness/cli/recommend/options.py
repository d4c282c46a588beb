"""Options of `harness recommend`; only parsing, so that --help is fast."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.cli.quantities import gb_per_s, memory_gib, tokens

GOALS = ("balance", "speed", "quality", "context")  # as in harness/recommend/answer.py


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `harness recommend` to its parser."""
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a name (harness theory --list-models), a hub repository, a .gguf, a folder, or a config.json",
    )
    add(
        "--context",
        type=tokens,
        metavar="N",
        help="tokens of context, e.g. 16k (default: 8k, or what the model was trained on if that is less)",
    )
    add(
        "--machine",
        default="this",
        metavar="NAME",
        help="a known machine (harness theory --list-machines), or this one (default)",
    )
    add(
        "--memory",
        type=memory_gib,
        metavar="SIZE",
        help="memory to use at most, as sold: 16GB is 16 GiB; of a named machine, its size",
    )
    add(
        "--bandwidth",
        type=gb_per_s,
        metavar="GB/S",
        help="read bandwidth of a machine that is not known; needs --memory",
    )
    add(
        "--host-memory",
        type=memory_gib,
        metavar="SIZE",
        help="main memory beside the GPU, for layers on the CPU where the model does not fit",
    )
    add("--host-bandwidth", type=gb_per_s, metavar="GB/S", help="its read bandwidth")
    add("--for", dest="goal", choices=GOALS, default="balance", help="what comes first (default: balance)")
    add("--stacks", nargs="+", default=[], metavar="STACK", help="only these stacks")
    add("--most", type=_count, default=5, metavar="N", help="rows to print (default: 5)")
    add("--all", action="store_true", help="print every variant, also those that do not fit")
    add("--prove", type=_count, metavar="N", help="measure the first N on this machine, and rank again")
    add(
        "--calibrate",
        action="store_true",
        help="first measure this machine with two small models in three types, and the rate of every type",
    )
    add("--results", type=Path, default=Path("results"), metavar="DIR", help="own records (default: results)")
    add("--json", action="store_true", help="print one JSON object: the ranking, and every prediction")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return 0


def _count(text: str) -> int:
    if not 1 <= _whole(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to 1,000")
    return _whole(text)
