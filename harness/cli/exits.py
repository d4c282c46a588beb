"""Exit codes, and the mistake in a command line that ends a command."""

from __future__ import annotations

import sys

from harness.system.endings import NotStarted

OK, NOT_OK, NOT_STARTED, REGRESSION, INTERRUPTED = 0, 1, 2, 3, 130


class Mistake(NotStarted):
    """The command line is invalid; the message is one sentence."""


def say(sentence: object) -> None:
    """Print a message for the user to standard error."""
    print(f"harness: {sentence}", file=sys.stderr)
