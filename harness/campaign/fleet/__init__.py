"""Run one config on several machines: Ray connects them, ordinary campaigns run on their devices, and one
results folder collects the records.

Ray has the transport and the access, and detects lost nodes. This package chooses the cells of each device,
collects the records, and decides about the cells of a lost node.
"""

from harness.campaign.fleet.access import FleetError
from harness.campaign.fleet.cluster import connected
from harness.campaign.fleet.driver import run
from harness.campaign.fleet.events import Event
from harness.campaign.fleet.place import Place, place_of

__all__ = ["Event", "FleetError", "Place", "connected", "place_of", "run"]
