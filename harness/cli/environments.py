"""The environments that `harness env` is about."""

from __future__ import annotations

from collections.abc import Sequence

from harness.api.inputs import check_stacks
from harness.cli import Mistake
from harness.stacks.header import Environment, stacks


def environments(names: Sequence[str], device: str | None) -> list[Environment]:
    """The environments of these stacks (default: all) for a device family (default: all). Raises Mistake."""
    check_stacks(names)
    of_stacks = [e for name in names or stacks() for e in stacks()[name].environments.values()]
    if device is not None and device not in (known := sorted({e.device for e in of_stacks})):
        raise Mistake(f"no environment for device {device}; there are {', '.join(known)}")
    return [environment for environment in of_stacks if device in (None, environment.device)]
