"""Was the device throttled while timing, by its sensors, and does that invalidate a figure? Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from harness.analysis.sensors import Columns, Timed
from harness.analysis.warnings import Flag, Warnings
from harness.base.text import plural
from harness.machine.sensor_values import CONDITIONS, FIRMWARE_BITS, NVML_BITS, SINCE_BOOT, SUSTAINED_CLOCK
from harness.records.kinds import Record, served_elsewhere
from harness.records.sensed import Throttled

FIRMWARE = "vcgencmd get_throttled"
KERNEL = "thermal_throttle"
CPUFREQ = "cpufreq"
NVML = "NVML"
PI_BITS = "pi_throttled_bits"
# The last sample is taken when the last token arrives, so its values applied at that token.
CLOSING_NS = 1_000_000_000
# Throttling for 1% of the time at half the clock moves a mean by 1%, less than run-to-run noise. A single
# event of a few ms is common on a laptop and does not count.
THROTTLED_SHARE = 0.01
THROTTLED_FLOOR_MS = 10  # a jiffy: the kernel cannot time shorter ones
# Of the clock that the CPU sustains without boost, or of the highest seen before if that is lower: the end of
# a boost is no throttling. Of the highest seen alone where no file says what it sustains: desktops boost to
# less than twice their base clock.
CLOCK_SHARE, CLOCK_SHARE_OF_BOOST = 0.9, 0.5
# One sample in a second may fall on a moment in which all cores wait; a tenth of the clock for a twentieth of
# the time moves a mean by 0.5%.
SLOW_SAMPLES, SLOW_SHARE = 2, 0.05


def seen(columns: Columns, during: Timed | None) -> list[Throttled]:
    """Throttling in the timed part, as facts.

    A fact has `source`, `what`, `from_n` and `to_n` (positions of the tokens being generated). For bits it
    has `samples` of `of_samples` that showed it; for counters `ms` and `events`. `samples` is 0 where only
    the bit that stays set until the next boot was seen. Empty where the timed part has no end: see `unseen`.
    """
    if during is None or not columns.get("t_ns"):
        return []
    return [
        *_firmware(columns, during),
        *_kernel(columns, during),
        *_clock(columns, during),
        *_active(NVML, NVML_BITS, read(columns, "gpu_event_reasons"), during),
    ]


def unseen(columns: Columns, during: Timed | None) -> dict[str, str]:
    """Throttling that could not be observed, with the reason.

    All of it where no decode of one answer was timed to its end (a table, or a worker that ended early), or
    where a Pi's firmware gave no reading. On a Pi also what had already occurred since boot: its bit cannot
    rise again.
    """
    if during is None:
        return {"throttling": "not checked: that needs the whole decode of one answer"}
    if PI_BITS not in columns:
        return {}
    bits = read(columns, PI_BITS)
    if not to_the_end(bits, during.start_ns, during.end_ns):
        return {f"{FIRMWARE} while timing": "no reading in the timed part or after it succeeded"}
    before = [value for t, value in bits if t <= during.start_ns][-1:]
    occurred = [name for bit, name in FIRMWARE_BITS.items() if before and before[0] & bit << SINCE_BOOT]
    why = "it had occurred since boot before this repeat: an event between two samples could not be seen"
    return {f"{name} between samples": why for name in occurred}


def conditions(record: Record) -> Iterator[Flag]:
    """Throttling in the timed part, which invalidates a repeat; notes where it does not (too short, of
    unknown length, or of a CPU that is not the device), and on conditions that held the clocks down."""
    on_cpu = record.get("device") == "cpu"
    sensors = record.get("sensors")
    for fact in sensors["throttled"] if sensors else []:
        if fact["what"] in CONDITIONS:
            yield Warnings.power_cap.flag(what=_bits_text(fact))
        elif fact["source"] == KERNEL:
            timed_ms, ms = (record["timing"].get("last_token_ns") or 0) / 1e6, fact["ms"]
            if on_cpu and (ms or 0) > max(THROTTLED_SHARE * timed_ms, THROTTLED_FLOOR_MS):
                span = f"{(ms or 0) / 1e3:.2f} s of {timed_ms / 1e3:.2f}, {_span(fact)}"
                yield Warnings.throttled.flag(what=f"{fact['what']} for {span} ({KERNEL})")
            else:
                lasted = "of unknown length" if ms is None else f"{ms} ms in all"
                numbers = {"events": fact["events"] or 0, "span": _span(fact), "lasted": lasted}
                yield Warnings.thermal_events.flag(what=fact["what"], **numbers)
        # The CPU may be idle, and its clock low, as another device or a server elsewhere computes.
        elif fact["source"] != CPUFREQ or (on_cpu and not served_elsewhere(record)):
            yield Warnings.throttled.flag(what=_bits_text(fact))


def _bits_text(fact: Throttled) -> str:
    if not fact["samples"]:
        return f"{fact['what']} between two samples, {_span(fact)} ({fact['source']})"
    of = f"{fact['samples']} of {plural(fact['of_samples'] or 0, 'sample')}"
    return f"{fact['what']} from n = {fact['from_n']} on, in {of} ({fact['source']})"


def _span(fact: Throttled) -> str:
    return f"from n = {fact['from_n']} to {fact['to_n']}"


def read(columns: Columns, name: str) -> list[tuple[int, int]]:
    """Time and value of each sample that has a value."""
    pairs = zip(columns.get("t_ns", ()), columns.get(name, ()), strict=False)
    return [(t, value) for t, value in pairs if t is not None and value is not None]


def to_the_end(samples: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> list[tuple[int, int]]:
    """Samples of the timed part and the first one after it, which shows counters that rose before the end."""
    after = next((t for t, _ in samples if t > end_ns), end_ns)
    return [(t, value) for t, value in samples if start_ns < t <= after]


def _fact(
    source: str,
    what: str,
    during: Timed,
    at: Sequence[int],
    samples: int | None = None,
    of_samples: int | None = None,
    ms: int | None = None,
    events: int | None = None,
) -> Throttled:
    """`at`: times at which it was seen, in order."""
    return {
        "source": source,
        "what": what,
        "from_n": during.n_at(at[0]),
        "to_n": during.n_at(at[-1]),
        "samples": samples,
        "of_samples": of_samples,
        "ms": ms,
        "events": events,
    }


def _active(
    source: str, names: Mapping[int, str], samples: Sequence[tuple[int, int]], during: Timed
) -> list[Throttled]:
    """A fact per bit that was set in a sample of the timed part or in its closing sample."""
    inside = [
        (t, bits)
        for t, bits in to_the_end(samples, during.start_ns, during.end_ns)
        if t <= during.end_ns + CLOSING_NS
    ]
    return [
        _fact(source, name, during, times, samples=len(times), of_samples=len(inside))
        for bit, name in names.items()
        if (times := [t for t, bits in inside if bits & bit])
    ]


def _firmware(columns: Columns, during: Timed) -> list[Throttled]:
    samples = read(columns, PI_BITS)
    facts = _active(FIRMWARE, FIRMWARE_BITS, samples, during)
    reported = {fact["what"] for fact in facts}
    before = [sample for sample in samples if sample[0] <= during.start_ns][-1:]
    watched = [*before, *to_the_end(samples, during.start_ns, during.end_ns)]
    for bit, name in FIRMWARE_BITS.items():
        for (earlier, was), (later, now) in pairwise(watched):
            if name not in reported and now & ~was & bit << SINCE_BOOT:
                of_samples = len(watched) - len(before)
                between = (earlier, later)
                facts.append(_fact(FIRMWARE, name, during, between, samples=0, of_samples=of_samples))
    return facts


def _kernel(columns: Columns, during: Timed) -> list[Throttled]:
    facts: list[Throttled] = []
    for level in ("core", "package"):
        events, times = (
            to_the_end(read(columns, f"{level}_throttle_{name}"), during.start_ns, during.end_ns)
            for name in ("events", "ms")
        )
        rose = [t for t, rise in sorted([*events, *times]) if rise]
        if rose:
            ms = sum(rise for _, rise in times) if times else None
            many = sum(rise for _, rise in events) if events else None
            facts.append(_fact(KERNEL, f"{level} too hot", during, rose, ms=ms, events=many))
    return facts


def _clock(columns: Columns, during: Timed) -> list[Throttled]:
    """Samples of the timed part in which even the fastest core was below its sustained clock, though it had
    reached it before. Intel's CPUs count their throttling themselves; some go below it for wide vectors."""
    if "core_throttle_events" in columns:
        return []
    sustained = max((khz or 0 for khz in columns.get(SUSTAINED_CLOCK, ())), default=None)
    if sustained == 0:
        return []  # not all cores are read
    highest, inside, slow = 0, 0, dict[int, int]()
    for t, khz in read(columns, "cpu_clock_max_khz"):
        least = CLOCK_SHARE * min(highest, sustained) if sustained else CLOCK_SHARE_OF_BOOST * highest
        highest = max(highest, khz)
        if during.holds(t):
            inside += 1
            if khz < least:
                slow[t] = khz
    if len(slow) < SLOW_SAMPLES or len(slow) < SLOW_SHARE * inside:
        return []
    reference = min(highest, sustained or highest)
    what = f"clock down to {min(slow.values()) / 1e3:,.0f} of {reference / 1e3:,.0f} MHz"
    return [_fact(CPUFREQ, what, during, [*slow], samples=len(slow), of_samples=inside)]
