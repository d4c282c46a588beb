"""Wait before a repeat until the device has cooled down, or a time limit has passed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from typing_extensions import NotRequired, TypedDict

from harness.base.nvml import UUIDS
from harness.machine.cpu_sensors import SYSFS_TEMPERATURE_COLUMN, TEMPERATURE, sysfs_temperature
from harness.machine.gpu_nvml import NVML_TEMPERATURE_COLUMN, nvml_gpu
from harness.machine.sensor import Search, Source

POLL_S = 1.0


class Cooled(TypedDict):
    """`from_c`, `to_c`: degrees at the start and the end; or `missing`: why no temperature can be read."""

    missing: NotRequired[str]
    from_c: NotRequired[float]
    to_c: NotRequired[float]
    waited_s: NotRequired[float]
    reached: NotRequired[bool]


class Cooling:
    """Waits before the repeats of one campaign. Reports once if it cannot read a temperature."""

    def __init__(self, to_c: float, at_most_s: float, say: Callable[[str], None]) -> None:
        """`to_c`: degrees Celsius at which a repeat may begin; `at_most_s`: time limit of each wait."""
        self._to_c, self._at_most_s, self._say = to_c, at_most_s, say
        self._reported = False

    def wait(self, device_id: str, root: Path = Path("/"), poll_s: float = POLL_S) -> Cooled:
        """Wait. `device_id`: from harness.machine.device_id.
        Never uses the CPU's temperature for a GPU that NVML cannot read."""
        if device_id != "cpu" and not device_id.startswith(UUIDS):
            return self._cannot(
                f"the temperature of a {device_id} device cannot be read, only an NVIDIA GPU's"
            )
        with ExitStack() as opened:
            search = Search(device_id, root, opened)
            if device_id == "cpu":
                source, column, unit = sysfs_temperature(search), SYSFS_TEMPERATURE_COLUMN, 1e3
                name = TEMPERATURE
            else:
                source, column, unit = nvml_gpu(search), NVML_TEMPERATURE_COLUMN, 1.0
                name = "GPU temperature"
            now_c = _degrees(source, column, unit)
            if now_c is None:
                why = search.missing.get(name, "its sensor has no value")
                return self._cannot(f"{name} cannot be read: {why}")
            from_c, begun = now_c, time.monotonic()
            waited_s = 0.0
            if now_c > self._to_c:
                self._say(f"cooling down from {now_c:g} to {self._to_c:g} °C, {self._at_most_s:g} s at most")
            while now_c > self._to_c and waited_s < self._at_most_s:
                time.sleep(min(poll_s, self._at_most_s - waited_s))
                waited_s = time.monotonic() - begun
                if (degrees := _degrees(source, column, unit)) is None:
                    return self._cannot(f"{name} could no longer be read after {waited_s:.0f} s")
                now_c = degrees
        reached = now_c <= self._to_c
        return {"from_c": from_c, "to_c": now_c, "waited_s": round(waited_s, 3), "reached": reached}

    def _cannot(self, why: str) -> Cooled:
        if not self._reported:
            self._say(f"no cooling down: {why}")
        self._reported = True
        return {"missing": why}


def _degrees(source: Source | None, column: str, unit: float) -> float | None:
    value = source.read().get(column) if source else None
    return None if value is None else value / unit
