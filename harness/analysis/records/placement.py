"""Are weights and KV cache on the requested device, and tensors in the requested buffers? Pure."""

from __future__ import annotations

from collections.abc import Sequence

from harness.results.kinds.parts import Misplaced, Placed, StackFacts
from harness.stacks.rules import Options
from harness.system.wording import plural

ELSEWHERE = ("cpu", "meta", "disk")  # not on a GPU; on a CPU only the first is correct
NAMES_SHOWN = 3
# Of llama.cpp's graph with all layers on a GPU: the input embedding, always on the CPU, and all else.
OFFLOADED_SPLITS = 2


def mismatches(device: str, options: Options, facts: StackFacts) -> list[str]:
    """Weights, tables or KV cache on another device, or tensors in another buffer, than the requested one."""
    if misplaced := (facts.get("placement") or Placed(misplaced=[]))["misplaced"]:
        return [_misplaced(misplaced)]
    wrong: Sequence[str]
    if device == "cpu":
        wrong = ELSEWHERE[1:]
    elif options.get("gpu_layers", -1) == -1:
        wrong = ELSEWHERE
    else:
        return []
    mismatches = [
        f"{part}: {count} on {'the CPU' if name.lower() == 'cpu' else name}"
        for part, on in (facts.get("devices") or {}).items()
        if isinstance(on, dict)
        for name, count in on.items()
        if name.lower() in wrong and count
    ]
    if mismatches:
        return [f"offloaded, not all on the requested device ({'; '.join(mismatches)})"]
    return [] if facts.get("placement") else _splits(device, facts)  # else split on purpose


def _misplaced(misplaced: Sequence[Misplaced]) -> str:
    """The tensors that are not where they were asked to be."""
    where = [
        f"{each['tensor']} ({each['asked']} was requested, {each['found'] or 'its layer'} has it)"
        for each in misplaced[:NAMES_SHOWN]
    ]
    more = ", ..." if len(misplaced) > NAMES_SHOWN else ""
    return f"{plural(len(misplaced), 'tensor')} not where requested: {', '.join(where)}{more}"


def _splits(device: str, facts: StackFacts) -> list[str]:
    """Operations without a kernel for the GPU: llama.cpp runs them on the CPU, whatever it reports of layers.
    Its graph is split at each change of device."""
    most = max((facts.get("graph_splits") or {}).values(), default=0)
    if device == "cpu" or most <= OFFLOADED_SPLITS:
        return []
    why = f"llama.cpp's graph has {most} splits, and {OFFLOADED_SPLITS} if all is on the GPU"
    return [f"some operations ran on the CPU: {why}"]
