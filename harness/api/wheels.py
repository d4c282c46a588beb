"""`harness run FILE.gguf` where llama.cpp is not compiled yet: measure with a stack from prebuilt wheels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness.api.progress import Progress
from harness.base.text import say
from harness.campaign import forecast
from harness.config import ConfigError, Experiment, plan
from harness.config.plan import Cell
from harness.config.yaml_text import Document
from harness.models.locate import WeightsError
from harness.stacks import build, cxx
from harness.stacks.adopted import EnvironmentFailed
from harness.stacks.header import Environment, stacks


def instead(
    made: Document,
    load: Callable[[Document], Experiment],
    is_kept: Callable[[Document], bool],
    keeps_device: bool,
    install: bool,
) -> Document:
    """The config to measure. `made` has one stack. While that is not built, and one from wheels can run it,
    the latter; once it is built, both, if the config of the one from wheels `is_kept`; otherwise `made`.

    `keeps_device`: do not measure the CPU in place of another device. `install`: install the wheels.
    """
    found = load(made)
    family = found.device.partition(":")[0]
    (stack,) = {variant.stack for variant in found.variants}
    usual = stacks()[stack].environment_for(family)
    wheels = cxx.from_wheels(usual) if usual else None
    if usual is None or wheels is None or not all(map(_is_gguf_as_stored, plan.cells(found))):
        return made
    rows = [row | {"stack": wheels.stack} for row in made.data["variants"]]
    alone = replace(made, data=made.data | {"variants": rows, "device": wheels.device})
    same_device = wheels.device == family
    if build.find(usual):
        both = replace(made, data=made.data | {"variants": [*made.data["variants"], *rows]})
        return both if same_device and is_kept(alone) else made
    if not _runs(alone, load) or (keeps_device and not same_device):
        return made
    if install and not _installed(wheels, stack):
        return made
    say(_reason(usual, wheels))
    return alone


def _runs(document: Document, load: Callable[[Document], Experiment]) -> bool:
    """Whether its stack has all options, and can run all workloads."""
    try:
        found = load(document)
    except ConfigError:
        return False
    if found.protocol.check_weights:
        return False
    return not any(cell.impossible(found.protocol.threads or 1) for cell in plan.cells(found))


def _is_gguf_as_stored(cell: Cell) -> bool:
    """Whether the cell loads a GGUF in the type that it is stored in, so that nothing is converted first."""
    try:
        ready = forecast.local_weights(cell)
    except WeightsError:  # the campaign reports it
        return False
    if ready is None:
        return cell.source is not None and str(cell.source.file).endswith(".gguf")
    return ready.format == "gguf" and cell.quant in (None, ready.quant)


def _installed(wheels: Environment, usual: str) -> bool:
    """Install the wheels if they are missing; whether they are there now."""
    progress = Progress()
    try:
        build.create(wheels, progress.say)
    except EnvironmentFailed as failure:
        say(f"{failure}; building {usual} instead")
        return False
    progress.clear()
    return True


def _reason(usual: Environment, wheels: Environment) -> str:
    """Why the stack in wheels runs, and how to measure the usual one."""
    device = f" --device {usual.device}" if usual.device != "cpu" else ""
    build_it = f"harness env create {usual.stack}{device}"
    needs = "" if cxx.compiler() else f" (needs a C++ compiler: {cxx.compiler_command()})"
    if wheels.device == usual.device:
        return (
            f"{usual.stack} is not built here: {wheels.stack}, which comes as wheels, is measured instead; to"
            f" compare both: {build_it}{needs}, then this command again"
        )
    return (
        f"{usual.stack} is not built for {usual.device} here, and the wheels of {wheels.stack} do not use the"
        f" GPU: this measures the CPU; for the GPU: {build_it}{needs}, then this command again"
    )
