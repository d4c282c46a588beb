"""Measure attempts of a campaign's cells: a cell is prepared once, an attempt is a worker and a record."""

from __future__ import annotations

from collections.abc import Iterable

from harness import records
from harness.base.text import plural
from harness.campaign import provenance
from harness.campaign.idle_power import idle_power_once
from harness.campaign.opening import Campaign, Stopped
from harness.campaign.peak_rates import Probes
from harness.campaign.repeat import Inputs, NotReady, measure, not_measured
from harness.campaign.rounds import Due
from harness.config.plan import Cell
from harness.machine.cooling import Cooling
from harness.records import Stored
from harness.records.parts import Campaign as CampaignFacts


class AttemptRunner:
    """The cells of a campaign, ready to be measured, or with the reason why not."""

    def __init__(self, campaign: Campaign, cells: Iterable[Cell]) -> None:
        self._campaign, protocol = campaign, campaign.experiment.protocol
        self._ready = {cell.id: campaign.inputs(cell) for cell in cells}
        say, cool = campaign.watcher.say, protocol.cool_down
        probed = protocol.measure_bandwidth, protocol.measure_matrix_rate
        self._probes = Probes(self._ready.values(), say, *probed)
        self._cooling = Cooling(cool.to_c, cool.at_most_s, say) if cool else None

    def measure(self, due: Due, number: int, of: int, within: CampaignFacts | None = None) -> Stored:
        """Measure once and write the record. `number`: the place among `of` attempts; `within`: the
        campaign, with its place in the rounds. Raises Stopped if the record cannot be written."""
        campaign, cell, inputs = self._campaign, due.cell, self._ready[due.cell.id]
        begun = campaign.begun(cell, due.repeat)
        begun |= {"attempt": due.attempt, "place_in_order": [number, of]}
        if isinstance(inputs, Inputs) and not cell.header.simulated:
            # before the probes warm the device
            idle = idle_power_once(inputs.device_id, campaign.watcher.say)
            begun |= {"idle_power": idle} if idle else {}
        begun["bandwidth_probes"], begun["matrix_probe"] = self._probes.so_far(due.repeat)
        if within is not None:
            begun["campaign"] = within
        if due.quiet is not None:
            begun["waited_for_quiet"] = due.quiet
        campaign.watcher.repeat_begins(number, of, cell, begun)
        try:
            if isinstance(inputs, NotReady):
                return not_measured(campaign.folder, cell, begun, inputs.outcome, str(inputs))
            provenance.add_inputs(begun, cell, inputs)
            if inputs.forecast and inputs.forecast.failures:
                begun["known_failure"] = inputs.forecast.failures
            if self._cooling is not None:
                begun["cooled"] = self._cooling.wait(inputs.device_id)
            return measure(campaign.folder, cell, begun, inputs, campaign.watcher)
        except records.ResultsError as full:
            finished = f"{plural(number - 1, 'repeat')} finished and kept; the same command continues"
            raise Stopped(f"stopped at {cell.id}: {full}; {finished}") from full
