"""Options of `harness theory`; only parsing, so that --help is fast."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from harness.cli.quantities import MOST_TOKENS as _MOST_TOKENS
from harness.cli.quantities import gb_per_s, memory_gib
from harness.theory import counts


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `harness theory` to its parser."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a name (--list-models, or of the hub or Ollama), a .gguf, a folder, or a config.json",
    )
    add = parser.add_argument
    add(
        "--machine",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="names (--list-machines), or `this`: the CPU here, with bandwidth and rate measured now",
    )
    add(
        "--memory",
        type=memory_gib,
        metavar="SIZE",
        help="memory of the machines, as sold: selects a variant, or sets another size; 16GB is 16 GiB. "
        "Without a machine: which weights and KV types fit",
    )
    add(
        "--bandwidth",
        type=gb_per_s,
        metavar="GB/S",
        help="with --memory and no machine: its read bandwidth, for the most tokens per second",
    )
    form = parser.add_argument_group("form of the weights (default: 16, 8 and 4 bits; for a file: as stored)")
    form.add_argument(
        "--bpw", nargs="+", type=_bits, default=[], metavar="BITS", help="bits per weight, e.g. 4.85"
    )
    form.add_argument(
        "--quant",
        nargs="+",
        default=[],
        metavar="TYPE",
        help="quantization types of llama.cpp, e.g. q4_k_m q8_0; or all",
    )
    form.add_argument(
        "--tied", action="store_true", help="the lm_head shares its weights with the input embedding"
    )
    form.add_argument(
        "--tensors", action="store_true", help="also list every tensor: type, bytes, bytes read per step"
    )
    cache = parser.add_argument_group("KV cache")
    cache.add_argument(
        "--kv-bits", type=_bits, default=16, metavar="BITS", help="bits per element (default: 16)"
    )
    cache.add_argument(
        "--kv-read",
        choices=("grows", "padded256", "full", "copied", "window"),
        default="grows",
        help="what a decode step reads: grows, the tokens so far (default); padded256, up to a multiple of "
        "256; full, all of a static cache; copied, the tokens twice, and a write; window, the last ones",
    )
    cache.add_argument(
        "--length", type=_count, metavar="N", help="tokens of a static cache (full) or of the window (window)"
    )
    at = parser.add_argument_group("context and prompt (token counts accept k and M: 32k is 32,768)")
    at.add_argument(
        "--context",
        type=_count,
        default=10_000,
        metavar="N",
        help="also show decode at this position (default: 10000)",
    )
    at.add_argument("--prompt", type=_count, default=25, metavar="N", help="prompt tokens (default: 25)")
    at.add_argument(
        "--chunk",
        nargs="+",
        type=_count,
        default=[],
        metavar="N",
        help="also show prefill in chunks of N tokens",
    )
    at.add_argument(
        "--kv-block",
        type=_count,
        metavar="N",
        help="prefill tokens that share one read of the KV cache (default: a chunk; 1: as in the published "
        "RTX 4090 study)",
    )
    at.add_argument("--rate", metavar="NAME", help="compute rate of the machine to use, e.g. fp16-tensor")
    split = parser.add_argument_group("experts on the CPU beside a GPU, as in llama.cpp")
    split.add_argument(
        "--n-cpu-moe",
        type=_count,
        metavar="N",
        help="the experts of the first N layers are read by the CPU, all else by the machine's GPU",
    )
    split.add_argument(
        "--cpu-bandwidth", type=gb_per_s, metavar="GB/S", help="what that CPU reads from its memory"
    )
    draft = parser.add_argument_group("speculative decoding")
    draft.add_argument(
        "--acceptance", type=_share, metavar="P", help="acceptance rate of a drafted token, 0 to 1"
    )
    draft.add_argument(
        "--draft-length", type=_count, metavar="N", help="drafted tokens per round (default: 4)"
    )
    draft.add_argument(
        "--draft-cost",
        type=_share,
        metavar="C",
        help="time of a draft step over the time of a decode step (default: 0)",
    )
    add(
        "--units",
        choices=["si", "published"],
        default="si",
        help="published: binary units, as in the published RTX 4090 study (default: si)",
    )
    add("--from", dest="own", type=Path, metavar="FILE", help="YAML file with your own shapes and machines")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list-models", action="store_true", help="list the known models")
    instead.add_argument(
        "--list-machines", action="store_true", help="list the known machines, with the source of each figure"
    )
    instead.add_argument(
        "--published", metavar="TABLE", help="recompute a table of the published study; or `all`"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--csv", action="store_true", help="print the rows as CSV")
    shape.add_argument("--json", action="store_true", help="print one JSON array, one object per row")


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
