"""Words of a command line as values: counts of tokens, sizes of memory, shares, times."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

MOST_TOKENS = 2**20
TINY = 1e-9  # the least of numbers above 0
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


def number(what: str, least: float, most: float) -> Callable[[str], float]:
    """Reads a number within these bounds; any other text is "not `what`"."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    return read


def whole(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number within these bounds."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least:,} to {most:,}")
        return int(text)

    return read


def bits(text: str) -> float:
    """Bits per weight."""
    if text[:1].isalpha():  # `harness theory --bpw 4 qwen3-8b`: the option takes all words that follow
        raise argparse.ArgumentTypeError(f"{text} is not a number; name models before options")
    return _bits(text)


_bits = number("between 0.1 and 128", 0.1, 128)
gb_per_s = number("a bandwidth in GB/s", TINY, 1e6)
seconds = number("a number of seconds above 0 and at most 1e6", TINY, 1e6)
zero_to_one = number("between 0 and 1", 0, 1)
one_or_more = whole(1, 1000)


def words(text: str) -> list[str]:
    """`q8_0,q4_k_m` as a list."""
    return [word for word in text.split(",") if word]


def tokens(text: str) -> int:
    """16384 or 16k, from 1 to 1,048,576."""
    from harness.theory import quantities

    value = quantities.token_count(text)
    if value is None and text.isascii() and text.isdigit():
        value = int(text[:10])
    if value is None or not 0 < value <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"{text} is not a count from 1 to {MOST_TOKENS:,}, as 4096 or 16k")
    return value


def memory_gib(text: str) -> float:
    """GiB of a memory as sold."""
    from harness.theory import quantities

    gib = quantities.memory_gib(text)
    if gib is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size of memory such as 16GB")
    return gib


def transfers(text: str) -> float:
    """Transfers per second of a kind of memory: `ddr5-5600`."""
    if not (kind := re.fullmatch(r"(?:lp)?ddr[2-6]x?-?(\d{3,5})", text.lower())):
        raise argparse.ArgumentTypeError(f"{text} is not a kind of memory with its speed, like ddr5-5600")
    return int(kind[1]) * 1e6


def reserve(text: str) -> str:
    """A size with a unit, or 0."""
    if text != "0":
        from harness.base.text import shortened
        from harness.config.sizes import size_bytes  # pydantic takes 0.1 s

        try:
            size_bytes(text)
        except ValueError as wrong:
            raise argparse.ArgumentTypeError(f"{shortened(text)}: {wrong}") from wrong
    return text


def share(text: str) -> float:
    """`1%` as a number."""
    percent = _PERCENT.fullmatch(text)
    if percent is None or not 0 < float(percent[1]) < 100:
        raise argparse.ArgumentTypeError(f"{text}: must be a percentage, as in 1%")
    return float(percent[1]) / 100


def gate(text: str) -> tuple[str, float]:
    """`slower:2%` as the family of figures and the share."""
    from harness.analysis.figures import FAMILIES

    family, _, amount = text.partition(":")
    if family not in FAMILIES:
        raise argparse.ArgumentTypeError(f"{text}: must begin with one of {', '.join(FAMILIES)}: slower:2%")
    percent = _PERCENT.fullmatch(amount)
    if percent is None or not math.isfinite(float(percent[1])):
        raise argparse.ArgumentTypeError(f"{text}: the threshold must be a percentage, as in {family}:2%")
    return family, float(percent[1]) / 100


def port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:6]) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text} is no port; the folder comes first: report DIR --serve")
    return int(text)


def export_format(text: str) -> str:
    """A format of --export. Raises ArgumentTypeError for one that earlier versions had."""
    if text in ("llama-bench", "llm-d", "localmaxxing"):
        raise argparse.ArgumentTypeError(f"{text} is no longer written: csv has the same figures")
    return text


def campaign(text: str) -> str:
    """`latest`, or the beginning of a campaign's id, which is a time in UTC."""
    when = text.removesuffix("Z").replace(" ", "T")
    form = r"\d{4}-\d\d-\d\d(T\d\d(:\d\d(:\d\d[\d.]*(\+00:00)?)?)?)?"
    if text != "latest" and not (re.fullmatch(form, when) and _is_date(when[:10])):
        raise argparse.ArgumentTypeError(f"{text!r} is neither latest nor a time in UTC, as 2026-11-27T02:00")
    return when


def _is_date(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


BY_METAVAR: Mapping[str, Callable[[str], object]] = {
    **dict.fromkeys(("FILE", "DIR", "PATH", "BUNDLE", "LOG"), Path),
    **dict.fromkeys(("STACK,...", "TYPE,...", "N,..."), words),
    **dict.fromkeys(("TOKENS", "LAYERS"), tokens),
    "SIZE": memory_gib,
    "GB/S": gb_per_s,
    "BITS": bits,
    "KIND": transfers,
    "1%": share,
    "slower:2%": gate,
    "S": seconds,
    "PORT": port,
    "TIME": campaign,
}
"""How a value is read, by the name that help has for it."""
