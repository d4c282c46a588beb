"""What `harness theory` can be asked; parsing alone, so that --help answers at once."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from harness.theory import counts

_MOST_TOKENS = 2**20


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `harness theory` to its parser."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a name (--list-models), of the hub or of Ollama too, a .gguf, a folder, or a config.json",
    )
    add = parser.add_argument
    add(
        "--machine",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="names (--list-machines), or `this`: this machine's CPU, its bandwidth and rate measured now",
    )
    add(
        "--memory",
        type=_memory,
        metavar="SIZE",
        help="of the machines, as sold: chooses a size, or sets another; 16GB is 16 GiB",
    )
    form = parser.add_argument_group("form of the weights (default: 16, 8 and 4 bits; of a file: as stored)")
    form.add_argument(
        "--bpw", nargs="+", type=_bits, default=[], metavar="BITS", help="bits per weight, e.g. 4.85"
    )
    form.add_argument(
        "--quant",
        nargs="+",
        default=[],
        metavar="TYPE",
        help="llama.cpp's types, by its rules, e.g. q4_k_m; or all",
    )
    form.add_argument("--tied", action="store_true", help="the lm_head is the input embedding")
    form.add_argument(
        "--tensors", action="store_true", help="also list every tensor: type, bytes, bytes streamed per step"
    )
    cache = parser.add_argument_group("KV cache")
    cache.add_argument(
        "--kv-bits", type=_bits, default=16, metavar="BITS", help="of an element (default: 16)"
    )
    cache.add_argument(
        "--kv-read",
        choices=("grows", "padded256", "full", "copied", "window"),
        default="grows",
        help="how a step reads it (grows)",
    )
    cache.add_argument(
        "--length", type=_count, metavar="N", help="tokens of a static cache (full) or of a window (window)"
    )
    at = parser.add_argument_group("where (counts of tokens may have k or M: 32k is 32,768)")
    at.add_argument(
        "--context", type=_count, default=10_000, metavar="N", help="decode also at this position (10000)"
    )
    at.add_argument("--prompt", type=_count, default=25, metavar="N", help="tokens of prefill (25)")
    at.add_argument("--chunk", nargs="+", type=_count, default=[], metavar="N", help="prefill in chunks of N")
    at.add_argument(
        "--kv-block",
        type=_count,
        metavar="N",
        help="prefill: tokens that share one reading of the cache (default: a chunk; 1: as the study has it)",
    )
    at.add_argument("--rate", metavar="NAME", help="a machine's rate to count computing at, e.g. fp16-tensor")
    draft = parser.add_argument_group("speculative decoding")
    draft.add_argument("--acceptance", type=_share, metavar="P", help="of a drafted token, 0 to 1")
    draft.add_argument("--draft-length", type=_count, metavar="N", help="tokens per round (4)")
    draft.add_argument(
        "--draft-cost", type=_share, metavar="C", help="time of a draft step over a decode step's (0)"
    )
    add("--units", choices=["si", "published"], default="si", help="published: the study's binary ones (si)")
    add("--from", dest="own", type=Path, metavar="FILE", help="YAML with shapes and machines of your own")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list-models", action="store_true", help="the names known")
    instead.add_argument(
        "--list-machines", action="store_true", help="the names known, with the source of each figure"
    )
    instead.add_argument(
        "--published", metavar="TABLE", help="a table of the published study again, by our formulas; or `all`"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--csv", action="store_true", help="the rows as CSV")
    shape.add_argument("--json", action="store_true", help="one array, one object per row")


def _bits(text: str) -> float:
    value = _number(text)
    if not 0.1 <= value <= 128:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 128")
    return value


def _count(text: str) -> int:
    value = counts.tokens(text) or _number(text)
    if value != int(value) or not 0 < value <= _MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number between 1 and {_MOST_TOKENS:,}")
    return int(value)


def _memory(text: str) -> float:
    gib = counts.memory_gib(text)
    if gib is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size of memory such as 16GB")
    return gib


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        hint = "; name models before options" if text[:1].isalpha() else ""
        raise argparse.ArgumentTypeError(f"{text} is not a number{hint}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value
