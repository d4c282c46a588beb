"""Names of sensors' columns, and meanings of the throttle bits of a Raspberry Pi's firmware and of NVML."""

from __future__ import annotations

# Bits for now; the same bits shifted left by 16: since boot.
# https://www.raspberrypi.com/documentation/computers/os.html#get_throttled
UNDER_VOLTAGE = "under-voltage"
FIRMWARE_BITS = {
    1 << 0: UNDER_VOLTAGE,
    1 << 1: "ARM frequency capped",
    1 << 2: "throttled",
    1 << 3: "soft temperature limit",
}
SINCE_BOOT = 16
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html; idle and
# application clocks are not throttling.
NVML_BITS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
GPU_OTHERS = "GPU work of other processes"  # its name among missing sensors
GPU_OTHERS_COLUMN = "gpu_others_percent"  # of the device's time, since the reading before
CONDITIONS = ("software power cap",)  # part of the device's setup, like its clock: not a fault
# The column of the clock in kHz that a CPU sustains without boost; None where only some cores are read.
SUSTAINED_CLOCK = "cpu_clock_sustained_khz"
