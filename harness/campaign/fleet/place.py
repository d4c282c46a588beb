"""Where a fleet is: `--on local-cluster:3`, a Ray address, or a file with an address and its devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from harness.base.text import shortened
from harness.campaign.fleet.access import FleetError
from harness.config import yaml_text
from harness.config.base import Frozen
from harness.config.experiment import DEVICE
from harness.config.mistakes import Mistakes

MOST_LOCAL = 16  # nodes of a local cluster: each takes 0.1 GB
EXAMPLES = "ray://HOST:10001, HOST:6379, auto, or local-cluster:N"
_LOCAL = re.compile(r"local-cluster:([1-9][0-9]?)")
_ADDRESS = re.compile(r"auto|(ray://)?[A-Za-z0-9_.\-\[\]:]+:[0-9]{1,5}|ray://[A-Za-z0-9_.\-]+")


class FleetFile(Frozen):
    """The file of a fleet."""

    address: str
    """Of its Ray cluster."""
    devices: dict[str, Any] = Field(default={})
    """Its devices, by the names of their Ray resources; by default all that its nodes have."""


class DeviceRow(Frozen):
    """How a device of the fleet is called on its own machine."""

    device: str | None = Field(default=None, pattern=DEVICE)
    """By default the config's `device`."""
    gpu: str | None = Field(default=None, min_length=1)
    """As in a config; by default the config's."""


@dataclass(frozen=True)
class Place:
    """`address`: of Ray; with `local`, the nodes of a cluster on this machine, empty. `devices`: rows by the
    name of the resource; empty: all devices of all nodes."""

    address: str
    local: int = 0
    devices: Mapping[str, DeviceRow] = field(default_factory=dict)

    @property
    def words(self) -> str:
        return f"local-cluster:{self.local}" if self.local else self.address

    def config_of(self, config: dict[str, Any], device: str) -> dict[str, Any]:
        """The config as a device of the fleet runs it."""
        row = self.devices.get(device, DeviceRow())
        if row.device is None:
            return {**config, **({"gpu": row.gpu} if row.gpu else {})}
        return {**config, "device": row.device, "gpu": row.gpu}


def place_of(text: str) -> Place:
    """What --on names. Raises ConfigError for a mistake in a file, and FleetError."""
    if local := _LOCAL.fullmatch(text):
        if (count := int(local[1])) > MOST_LOCAL:
            raise FleetError(f"--on {text}: at most {MOST_LOCAL} nodes on this machine")
        return Place("", count)
    if _ADDRESS.fullmatch(text):
        return Place(text)
    if not text.endswith((".yaml", ".yml")):
        raise FleetError(f"--on {shortened(text)}: expected a file FLEET.yaml, {EXAMPLES}")
    return _of_file(Path(text))


def _of_file(path: Path) -> Place:
    document = yaml_text.read(path)
    mistakes = Mistakes(document.place)
    file = mistakes.checked(FleetFile, document.data, ())
    rows: dict[str, DeviceRow] = {}
    for name, given in file.devices.items() if file else ():
        row = mistakes.checked(DeviceRow, {} if given is None else given, ("devices", name))
        if row is not None:
            rows[name] = row
            if row.gpu and row.device == "cpu":
                mistakes.add(("devices", name, "gpu"), "needs a GPU device such as cuda; device is cpu")
    if file and not (_LOCAL.fullmatch(file.address) or _ADDRESS.fullmatch(file.address)):
        mistakes.add(("address",), f"expected {EXAMPLES}, got {shortened(file.address)}")
    mistakes.stop_if_any()
    assert file is not None
    there = place_of(file.address)
    return Place(there.address, there.local, rows)
