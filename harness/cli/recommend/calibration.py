"""`harness recommend --calibrate`: measure a few variants and the rate of each type, to predict others."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import machine
from harness.campaign import DeviceBusy, probes
from harness.campaign.device_lock import device_lock
from harness.cli.exits import NOT_OK, OK, Mistake, say
from harness.machine import ProbeError
from harness.recommend import commands, type_rates
from harness.recommend.type_rates import FOLDER
from harness.stacks import build
from harness.stacks.header import references
from harness.system.gpus import visible_gpus


def calibrate(arguments: argparse.Namespace) -> None:
    """Measure on this machine, and keep it with the results. The rates are measured before and after, as a
    machine drifts. Raises Mistake."""
    from harness.cli import main

    config = arguments.results / FOLDER / "calibration.yaml"
    on_gpu = bool(visible_gpus())
    try:
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(commands.calibration("cuda" if on_gpu else "cpu"))
    except OSError as refusal:
        raise Mistake(f"{config}: cannot be written: {refusal.strerror}") from refusal
    if not on_gpu:
        rates(arguments.results)
    if main(["run", str(config), "-o", str(arguments.results)]) not in (OK, NOT_OK):
        raise Mistake(f"{config} could not be measured")
    if not on_gpu:
        rates(arguments.results)


def rates(results: Path) -> None:
    """Measure and keep how fast this CPU multiplies each type of weights, if llama.cpp is built. Raises
    Mistake."""
    environment = references()["gguf"].environment_for("cpu")
    interpreter = build.find(environment) if environment else None
    if interpreter is None:
        return
    threads = machine.physical_cores()
    try:
        with device_lock("cpu", wait=False, say=say):
            found = probes.through_stack(interpreter, "cpu", threads, ["types"])["types"]["rates"]
        type_rates.keep(results, machine.facts()["cpu"], threads, found)
    except DeviceBusy as busy:
        raise Mistake(f"{str(busy).partition(';')[0]}; this machine cannot be measured now") from busy
    except ProbeError as failure:
        raise Mistake(str(failure)) from failure
    except OSError as refusal:
        raise Mistake(f"{results}: cannot be written: {refusal.strerror}") from refusal
