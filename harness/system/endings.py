"""Exceptions that end a command: the message is what the user reads."""

from __future__ import annotations

# What code raises that meets values of a file which nobody thought of.
FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class NotStarted(Exception):
    """Nothing was started, because what the user gave cannot be used."""

    prefix = "harness: "  # empty where the message begins with FILE:LINE


class NotFinished(Exception):
    """What was asked for was not done, or not to its end; what is finished is kept."""
