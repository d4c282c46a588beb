"""`harness theory MODEL --memory SIZE`: which weights and KV types fit, without a machine's name."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable

from harness.cli.exits import OK, Mistake
from harness.cli.theory import names as typed
from harness.known import Known
from harness.theory.choices import Choice, Stored, choices
from harness.theory.decoder import Decoder
from harness.theory.shapes import Shape

FromFile = Callable[[str], tuple[str, "Shape | Decoder", "Stored | None"]]
_NOT_HERE = ("bpw", "tensors", "chunk", "rate", "acceptance")


def show(arguments: argparse.Namespace, known: Known, from_file: FromFile) -> int:
    """Print a row for each type of weights and of the KV cache. Raises Mistake."""
    for option in _NOT_HERE:
        if getattr(arguments, option):
            raise Mistake(f"--{option} needs a --machine, also with --memory")
    if arguments.kv_bits != 16:
        raise Mistake("--kv-bits needs a --machine; with --memory all types of the KV cache are listed")
    if not arguments.models:
        raise Mistake("name a model: harness theory qwen3-30b-a3b --memory 16GB --context 32k")
    found: list[Choice] = []
    bytes_per_s = arguments.bandwidth and arguments.bandwidth * 1e9
    for given in dict.fromkeys(arguments.models):
        named = typed.model(given, known)
        stored: Stored | None = None
        if named:
            name, made = named
        else:
            name, made, stored = from_file(given)
        quants = typed.quants(arguments.quant)
        memory = arguments.memory * 2.0**30
        found += choices(name, made, quants, memory, arguments.context, bytes_per_s, stored)
    if arguments.json:
        print(json.dumps(found, indent=1))
    elif arguments.csv:
        writer = csv.DictWriter(sys.stdout, fieldnames=list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    else:
        from harness.report import choices as table

        table.show(found, arguments.context, bool(bytes_per_s))
    return OK
