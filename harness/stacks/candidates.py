"""Which values of a stack's options are worth trying on a device, as its header says. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.stacks.header import Header
from harness.stacks.rules import Given, Trial

Changes = Mapping[str, Given]
PINNED = "cpus"  # the option of a stack that can keep its threads on these


def candidates(
    header: Header, device: str, purpose: str, cores: int, logical: int, cpus: str | None = None
) -> list[Sequence[Changes]]:
    """The changes to try, one option (or group that belongs together) after the other: threads first, as the
    others depend on them, then threads that stay on a CPU each. `device`: its family; `purpose`: decode or
    prefill; `cores`: physical cores, `logical`: CPUs, both usable; `cpus`: which, as in 0-3; null: any."""
    counts = [threads for threads in _halved(cores, logical) if device == "cpu"]
    found: list[Sequence[Changes]] = [
        [{name: count} for count in counts]
        for name, option in header.options.items()
        if option.default_from == "threads"
    ]
    if device == "cpu" and cpus and PINNED in header.options:
        found.append([{PINNED: cpus}])
    fitting = [each for each in header.trials if _on(each, device) and each.purpose in (None, purpose)]
    return [each for each in [*found, *(trial.settings for trial in fitting)] if each]


def without_effect(header: Header, name: str, device: str) -> bool:
    """Whether an option does nothing on this family of devices, as far as the header says."""
    having = [each for each in header.trials if any(name in changes for changes in each.settings)]
    return bool(having) and not any(_on(each, device) for each in having)


def _on(trial: Trial, device: str) -> bool:
    return trial.device in (None, "cpu" if device == "cpu" else "gpu")


def _halved(cores: int, logical: int) -> list[int]:
    """`[1, 2, 4, 8, 16]` of 8 cores with two threads each."""
    counts = {cores, logical}
    while cores > 1:
        cores //= 2
        counts.add(cores)
    return sorted(counts)
