"""The jobs that a fleet gives to its nodes, as node.py reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from harness.base import data
from harness.campaign.fleet.parcels import Parcel
from harness.campaign.fleet.place import Place
from harness.campaign.opening import RunOptions
from harness.config import Experiment, Quality
from harness.records.parts import Fleet
from harness.records.write import begun_by


class Job(TypedDict, total=False):
    """`do`: survey, measure or tidy. `tag`: names the results folder, and neither a machine nor a user.
    `known`: digests of the records that the fleet has. `earlier`: records of the cells that it has."""

    do: str
    tag: str
    config: dict[str, Any]
    cells: list[str]
    config_path: str
    command_line: list[str]
    fleet: Fleet
    known: list[str]
    earlier: list[Parcel]
    fresh: bool
    retry_failed: bool
    wait: bool


class Jobs:
    """The jobs of one run. `authenticated`: as of Cluster."""

    def __init__(
        self, experiment: Experiment, options: RunOptions, place: Place, authenticated: bool
    ) -> None:
        self._config = portable(experiment, options.config_path.parent)
        self._options, self._place, self._authenticated = options, place, authenticated
        self._tag = hashlib.sha256(f"{begun_by()} {options.root}".encode()).hexdigest()[:16]

    def survey(
        self, device: str, cells: Collection[str], clock_ahead_s: float, known: Collection[str]
    ) -> Job:
        job = self._of(device, cells, clock_ahead_s)
        return {**job, "do": "survey", "known": sorted(known)}

    def measure(
        self,
        device: str,
        cells: Collection[str],
        clock_ahead_s: float,
        earlier: Iterable[Parcel],
        again: bool,
    ) -> Job:
        """`again`: a campaign of these cells was lost, so what this run measured of them is not done anew."""
        return {
            **self._of(device, cells, clock_ahead_s),
            "do": "measure",
            "fresh": self._options.fresh and not again,
            "retry_failed": self._options.retry_failed and not again,
            # The nodes of a local cluster are one machine, on which real stacks take turns.
            "wait": self._options.wait or self._place.local > 0,
            "earlier": list(earlier),
        }

    def tidy(self, known: Collection[str]) -> Job:
        return {"do": "tidy", "tag": self._tag, "known": sorted(known)}

    def _of(self, device: str, cells: Collection[str], clock_ahead_s: float) -> Job:
        fleet: Fleet = {"device": device, "clock_ahead_s": clock_ahead_s}
        if not self._authenticated:
            fleet["unauthenticated"] = True
        return {
            "tag": self._tag,
            "config": self._place.config_of(self._config, device),
            "cells": list(cells),
            "config_path": str(self._options.config_path.absolute()),
            "command_line": list(self._options.command_line),
            "fleet": fleet,
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
        elif model.weights.path and data.weights_name(model.weights.path) is None:
            written = {"path": model.weights.path}
        else:
            written = given
        is_in_a_file = model.described and model.described.config
        if is_in_a_file and (described := folder.absolute() / Path(row["shape"]).expanduser()).exists():
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
