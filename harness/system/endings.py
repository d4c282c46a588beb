"""Exceptions that end a command: the message is what the user reads."""

from __future__ import annotations


class NotStarted(Exception):
    """Nothing was started, because what the user gave cannot be used."""

    prefix = "harness: "  # empty where the message begins with FILE:LINE


class NotFinished(Exception):
    """What was asked for was not done, or not to its end; what is finished is kept."""
