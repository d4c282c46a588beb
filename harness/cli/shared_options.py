"""Options that several commands have, each declared once."""

from __future__ import annotations

from harness.base import data
from harness.cli import values
from harness.cli.argument_parser import Option, argument, flag, one_of, option, repeatable

RESULTS = data.RESULTS
OUT = option("-o --out DIR", "results folder (default: results)")
ONLY = repeatable("--only GLOB", "only cells whose id matches")
SET = repeatable("--set KEY=VALUE", "override a key of the config, e.g. repeats=1")
TRUST = flag(
    "--trust-remote-code", "run the Python files of checkpoints, where the config has trust_remote_code too"
)
WAIT = flag("--wait", "wait while another campaign uses this device")
WIDE = flag("--wide", "all columns of a table, however wide")
STACKS = option(
    "--stacks STACK,...", "stacks to run a MODEL in (default: llamacpp, or llamaserver until that is built)"
)
QUANT = option(
    "--quant TYPE,...", "types to run a MODEL in, q8_0,q4_k_m (default: a GGUF's, else a few of each stack)"
)
SYNTHETIC = flag("--synthetic", "random weights in the shape of a known MODEL")
VARIANTS = STACKS, QUANT, SYNTHETIC
MODELS = (
    "GGUF files, folders, names of models here (Ollama's, LM Studio's, the hub's cache), repositories of"
    " the hub (owner/repo:Q4_K_M), a server's address (http://127.0.0.1:8080); or one config: a YAML file,"
    " or a shipped one such as quickstart"
)
ONE_MODEL = "a GGUF file, a folder, owner/repo or a known name; or a config"
HEADLESS = "headless"  # as in harness/theory/machines.py
CHANNELS = option(
    "--channels N",
    "of 64 bits, of that memory (default: the known CPU's, else 2, as in desktops and laptops)",
    type=int,
    choices=range(1, 25),
)
RESERVE = one_of(
    option(
        "--reserve SIZE",
        "memory of the device that no model can use, 300MiB or 0 (default: by what it is)",
        type=values.reserve,
    ),
    flag(
        "--headless",
        "no display is on the card: its driver reserves less",
        action="store_const",
        dest="reserve",
        const=HEADLESS,
    ),
)


def as_json(what: str) -> Option:
    return flag("--json", f"print one JSON array, {what}")


def results(what: str = "a results folder, or published/NAME") -> Option:
    return argument("dir", "DIR", f"{what} (default: results)", nargs="?", type=data.results, default=RESULTS)


def threshold(what: str) -> Option:
    return option("--threshold 1%", f"{what} (default: 1%)", default="1%")


ROUNDS = (
    threshold("smallest change to be found"),
    option(
        "--max-rounds N",
        "limit of the rounds of a pair (default: 100)",
        type=values.whole(2, 999_999),
        default=100,
    ),
)
BUSY = flag("--busy", "use disturbed repeats too, on a machine that is never quiet: a provisional verdict")


def verdict(fails: str, output: str) -> list[Option]:
    """What is a regression that fails, and the form of a comparison. `output`: the option for a file."""
    return [
        repeatable("--fail-on slower:2%", f"exit with 3 {fails}"),
        option("--format {md,json,html,gha}", "format of the comparison (default: plain text)"),
        option(f"{output} FILE", "write the comparison to FILE"),
        WIDE,
    ]
