"""Argument types of options that several commands take: counts of tokens, sizes of memory."""

from __future__ import annotations

import argparse

from harness.theory import counts

MOST_TOKENS = 2**20


def tokens(text: str) -> int:
    """16384 or 16k, from 1 to 1,048,576."""
    value = counts.tokens(text)
    if value is None and text.isascii() and text.isdigit():
        value = int(text[:10])
    if value is None or not 0 < value <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number between 1 and {MOST_TOKENS:,}")
    return value


def memory_gib(text: str) -> float:
    """GiB of a memory as sold."""
    gib = counts.memory_gib(text)
    if gib is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size of memory such as 16GB")
    return gib


def gb_per_s(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a bandwidth in GB/s")
    return value
