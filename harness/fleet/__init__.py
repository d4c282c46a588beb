"""Run one config on several machines: Ray places ordinary campaigns on their devices, and what they measure
ends in one results folder.

Scheduling, transport and the failure of nodes are Ray's. Here are what a device is to measure, the records on
their way, and what becomes of the cells of a node that is lost.
"""

from harness.fleet.cluster import HeadLost, connected
from harness.fleet.driver import run
from harness.fleet.events import DeviceProgress, Event, FleetWatcher
from harness.fleet.place import FleetError, Place, place_of

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
