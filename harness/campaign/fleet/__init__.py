"""Run one config on several machines: Ray places ordinary campaigns on their devices, and one results folder
collects the records.

Ray does scheduling and transport, and detects lost nodes. This package chooses the cells of each device,
collects the records, and decides about the cells of a lost node.
"""

from harness.campaign.fleet.access import FleetError
from harness.campaign.fleet.cluster import HeadLost, Place, connected, place_of
from harness.campaign.fleet.devices import DeviceProgress, Event, FleetWatcher
from harness.campaign.fleet.driver import run

__all__ = [
    "DeviceProgress",
    "Event",
    "FleetError",
    "FleetWatcher",
    "HeadLost",
    "Place",
    "connected",
    "place_of",
    "run",
]
