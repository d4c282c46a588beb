"""Measure attempts of a campaign's cells: a cell is prepared once, an attempt is a worker and a record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness import results
from harness.campaign import facts, readiness
from harness.campaign.forecast import forecast_cell
from harness.campaign.opened import Campaign, Stopped
from harness.campaign.prepare import NotReady
from harness.campaign.probes import Probes
from harness.campaign.repeat import Inputs, measure, not_measured
from harness.campaign.rounds import Due
from harness.machine.sensors.cooling import Cooling
from harness.plan import Cell
from harness.results import Stored
from harness.system.wording import plural


class Attempts:
    """The cells of a campaign, ready to be measured, or with the reason why not."""

    def __init__(self, campaign: Campaign, cells: Iterable[Cell]) -> None:
        experiment, protocol = campaign.experiment, campaign.experiment.protocol
        preparation, device = campaign.preparation, campaign.device
        self._campaign = campaign
        pending = {cell.id: cell for cell in cells}
        self._ready = {
            key: readiness.inputs(cell, experiment, preparation, device) for key, cell in pending.items()
        }
        self._known = {
            key: forecast_cell(pending[key], inputs.weights, device, preparation.threads).failures
            for key, inputs in self._ready.items()
            if isinstance(inputs, Inputs)
        }
        say, cool = campaign.watcher.say, protocol.cool_down
        probed = protocol.measure_bandwidth, protocol.measure_matrix_rate
        self._probes = Probes(self._ready.values(), say, *probed)
        self._cooling = Cooling(cool.to_c, cool.at_most_s, say) if cool else None

    def measure(self, due: Due, number: int, of: int, **more: Any) -> Stored:
        """Measure once and write the record. `number`: the place among `of` attempts; `more`: fields of the
        record. Raises Stopped if the record cannot be written."""
        campaign, cell, inputs = self._campaign, due.cell, self._ready[due.cell.id]
        device, gpu = campaign.experiment.device, campaign.experiment.gpu
        repeat_facts = facts.of_repeat(cell, due.repeat, campaign.keys[cell.id], device, gpu)
        begun = campaign.shared | repeat_facts | {"attempt": due.attempt, "place_in_order": [number, of]}
        begun |= self._probes.so_far(due.repeat) | more
        if due.quiet is not None:
            begun["waited_for_quiet"] = due.quiet
        campaign.watcher.repeat_begins(number, of, cell, begun)
        try:
            if isinstance(inputs, NotReady):
                return not_measured(campaign.folder, cell, begun, inputs.outcome, str(inputs))
            begun |= facts.of_inputs(cell, inputs, begun)
            if self._known[cell.id]:
                begun["known_failure"] = self._known[cell.id]
            if self._cooling is not None:
                begun["cooled"] = self._cooling.wait(inputs.device_id)
            return measure(campaign.folder, cell, begun, inputs, campaign.watcher)
        except results.ResultsError as full:
            finished = f"{plural(number - 1, 'repeat')} finished and kept"
            raise Stopped(f"stopped at {cell.id}: {full}; {finished}") from full
