"""The jobs that a fleet gives to its nodes, as harness/fleet/node.py reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import shipped
from harness.campaign.opened import RunOptions
from harness.config import Experiment, Quality
from harness.fleet.copies import Copy
from harness.fleet.parcels import Parcel
from harness.fleet.place import Place
from harness.results.writing import begun_by

Job = dict[str, Any]


class Jobs:
    """Of one run. `clocks`: as Nodes has them, by the id of the node."""

    def __init__(
        self, experiment: Experiment, options: RunOptions, place: Place, clocks: Mapping[str, float]
    ) -> None:
        self._config, self._options, self._place, self._clocks = (
            portable(experiment, options.config_path.parent),
            options,
            place,
            clocks,
        )
        # Names the results folder, and neither a machine nor a user.
        self._tag = hashlib.sha256(f"{begun_by()} {options.root}".encode()).hexdigest()[:16]

    def survey(self, device: str, cells: Sequence[str], known: Collection[str]) -> Job:
        """`known`: digests of the records that are here."""
        return {**self._of(device, cells), "do": "survey", "known": sorted(known)}

    def measure(self, device: str, cells: Sequence[str], earlier: Iterable[Parcel], again: bool) -> Job:
        """`again`: a campaign of these cells was lost, so what this run measured of them is not done anew."""
        return {
            **self._of(device, cells),
            "do": "measure",
            "fresh": self._options.fresh and not again,
            "retry_failed": self._options.retry_failed and not again,
            "wait": self._waits,
            "earlier": list(earlier),
        }

    def stock(self, device: str, cells: Sequence[str], copies: Sequence[Copy]) -> Job:
        """`copies`: what other nodes offer."""
        return {**self._of(device, cells), "do": "stock", "wait": self._waits, "copies": list(copies)}

    @property
    def _waits(self) -> bool:
        """The nodes of a local cluster are one machine, on which real stacks take turns."""
        return self._options.wait or self._place.local > 0

    def tidy(self, known: Collection[str]) -> Job:
        """`known`: as of survey."""
        return {"do": "tidy", "tag": self._tag, "known": sorted(known), "clocks": {}}

    def _of(self, device: str, cells: Sequence[str]) -> Job:
        return {
            "tag": self._tag,
            "config": self._place.config_of(self._config, device),
            "cells": list(cells),
            "config_path": str(self._options.config_path.absolute()),
            "command_line": list(self._options.command_line),
            "fleet": {"device": device},
            "clocks": dict(self._clocks),
        }


def portable(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """The config as plain data that means the same on any machine: with its name, and absolute paths, but
    shipped weights by name. `folder`: where its relative paths begin."""
    rows = []
    for row, model in zip(experiment.source["models"], experiment.models, strict=True):
        given = row.get("weights")
        if model.of_format:
            written: Any = {
                form: {"path": weights.path} if weights.path else given[form]
                for form, weights in model.of_format.items()
            }
        elif model.weights.path and shipped.weights_name(model.weights.path) is None:
            written = {"path": model.weights.path}
        else:
            written = given
        if model.described and (described := folder.absolute() / Path(row["shape"]).expanduser()).exists():
            row = {**row, "shape": str(described)}
        rows.append({**row, **({} if given is None else {"weights": written})})
    whole = {**experiment.source, "name": experiment.name, "models": rows}
    if "workloads" in experiment.source:
        pairs = zip(experiment.source["workloads"], experiment.workloads, strict=True)
        whole["workloads"] = [
            {**row, "text": workload.text} if isinstance(workload, Quality) else row
            for row, workload in pairs
        ]
    return whole
