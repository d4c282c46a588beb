"""The machines that `--machine` takes: the shipped ones and the user's."""

from __future__ import annotations

from harness import data
from harness.theory.machines import MACHINES, Machines


def known() -> Machines:
    """Raises ConfigError for the user's file."""
    try:
        if not data.users("machines.toml").exists():
            return MACHINES
    except OSError:  # a folder that may not be read: the reader says so
        pass
    from harness.config import own_machines  # pydantic takes 0.1 s

    return own_machines.known()
