"""What each bit says of throttling: those of a Raspberry Pi's firmware, and NVML's reasons. Pure."""

from __future__ import annotations

# Bits of now; the same have occurred since boot 16 bits above.
# https://www.raspberrypi.com/documentation/computers/os.html#get_throttled
UNDER_VOLTAGE = "under-voltage"
FIRMWARE_BITS = {
    1 << 0: UNDER_VOLTAGE,
    1 << 1: "ARM frequency capped",
    1 << 2: "throttled",
    1 << 3: "soft temperature limit",
}
SINCE_BOOT = 16
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html; idle, and clocks as asked for,
# are none.
NVML_BITS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
CONDITIONS = ("software power cap",)  # how the device is set up, as its clock is: known, and no fault
