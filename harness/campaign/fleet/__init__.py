"""Run one config on several machines: Ray places ordinary campaigns on their devices, and what they measure
ends in one results folder.

Scheduling, transport and the failure of nodes are Ray's. Here are what a device is to measure, the records on
their way, and what becomes of the cells of a node that is lost.
"""

from harness.campaign.fleet.cluster import FleetError, HeadLost, Place, connected, place_of
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
