"""Columns of energy and of sensors in the row of a repeat; missing values are null."""

from __future__ import annotations

from typing_extensions import TypedDict


class EnergyFigures(TypedDict):
    """See records.energy."""

    joules_per_token: float | None
    energy_window_s: float | None
    energy_source: str | None
    energy_reason: str | None


class SensorFigures(TypedDict):
    """See records.sensor_summary."""

    hottest_c: float | None
    median_clock_mhz: float | None
