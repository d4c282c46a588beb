"""How fast ggml multiplies matrices of each type of weights by a vector, as a decode step does.

On a CPU unpacking a type costs as much as reading it, and differs by type, processor and kernel: what decode
of a type costs can only be measured, but needs no model. Types take turns, so that between two passes over
the same bytes those of all other types went through the caches.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from runners.llamacpp_probe import MOST_THREADS, ROW, Device, Graph, NoKernel, opened, uniform_products
from runners.protocol import Request, Say
from runners.rounds import SMALLEST_BYTES

# enum ggml_type, elements and bytes of a block (ggml.h, ggml-common.h), of all that llama.cpp quantizes to
# without an importance matrix.
BLOCKS = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "bf16": (30, 1, 2),
    "q8_0": (8, 32, 34),
    "q5_1": (7, 32, 24),
    "q5_0": (6, 32, 22),
    "q4_1": (3, 32, 20),
    "q4_0": (2, 32, 18),
    "q6_k": (14, 256, 210),
    "q5_k": (13, 256, 176),
    "q4_k": (12, 256, 144),
    "q3_k": (11, 256, 110),
    "q2_k": (10, 256, 84),
    "iq4_nl": (20, 32, 18),
    "iq4_xs": (23, 256, 136),
    "mxfp4": (39, 32, 17),
}
# Of each type, timed part by part: a part takes milliseconds, which other processes now and then leave alone.
PARTS, PART_BYTES = 4, 24 << 20
ROWS = 2048  # of a matrix: as in layers of models of a few billion parameters
SPAN_S = 6.0
FEWEST_ROUNDS = 5


def measure_types(request: Request, say: Say) -> dict[str, Any]:
    """Bytes of weights per second by type, the best over rounds: `bytes_per_s` as stored, and
    `repacked_bytes_per_s` in the layout into which llama.cpp repacks this type on this CPU, null where it
    has none. Options: `threads`. Raises ValueError, RuntimeError, DoesNotFit."""
    threads = int(request.options.get("threads") or 0)
    if request.device == "cpu" and not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads must be 1 to {MOST_THREADS}, not {threads}")
    with opened(request.device, threads, SMALLEST_BYTES) as device, ExitStack() as stack:
        kernels: dict[tuple[str, str], list[Graph]] = {}
        for name in BLOCKS:
            say(name)
            for place in device.places:
                with suppress(NoKernel):
                    parts = [stack.enter_context(_products(device, name, place)) for _ in range(PARTS)]
                    kernels[name, place] = parts
        say("multiply")
        rates = _rates(kernels)
    found: dict[str, dict[str, float | None]] = {}
    for name in BLOCKS:
        if (name, "") in rates:
            others = [rates[each] for each in rates if each[0] == name and each[1]]
            found[name] = {
                "bytes_per_s": rates[name, ""],
                "repacked_bytes_per_s": max(others, default=None),
            }
    return {"types": {"rates": found}, "threads": threads if request.device == "cpu" else None}


@contextmanager
def _products(device: Device, name: str, place: str) -> Iterator[Graph]:
    """PART_BYTES of matrices of a type by a vector. Raises NoKernel."""
    number, elements, size = BLOCKS[name]
    row_bytes = ROW // elements * size
    count = max(1, PART_BYTES // (ROWS * row_bytes))
    with uniform_products(device, number, row_bytes, ROWS, count, device.places[place]) as graph:
        yield graph


def _rates(kernels: dict[tuple[str, str], list[Graph]]) -> dict[tuple[str, str], float]:
    least = {each: [math.inf] * len(parts) for each, parts in kernels.items()}
    until, rounds = time.monotonic() + SPAN_S, 0
    while rounds < FEWEST_ROUNDS or time.monotonic() < until:
        for number, each in itertools.product(range(PARTS), kernels):
            least[each][number] = min(least[each][number], kernels[each][number].seconds())
        rounds += 1
    return {each: sum(part.amount for part in kernels[each]) / sum(least[each]) for each in kernels}
