"""What a context is expected to take: by the stack's own dry account, else by the shape of the model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.campaign.forecast import engine_of, held_model
from harness.campaign.max_context.search import Need, Space, predicted
from harness.campaign.repeat import Inputs
from harness.plan import Cell
from harness.theory import footprint
from harness.worker import launch
from runners.protocol import ACCOUNTED

ACCOUNT_TIMEOUT_S = 120.0
FIRST = (1, 4, 16, 64)  # times the shortest context: what is asked for first
# Times the longest that is accounted for: a dry account too takes memory, llama.cpp's 48 bytes a token.
FURTHER = 64
MOST_ROUNDS = 8
GPU_RUNTIME_BYTES = 500 << 20  # a CUDA context with its kernels, where the account's own is not seen
PAGES_TO_A_TABLE = 512
Parts = dict[str, float]


class Account:
    """The stack's account of one cell, asked for as many contexts as it takes. `filled`: of contexts that are
    used to their end, else of what is there once they are allocated.

    Raises launch.JobFailed.
    """

    def __init__(
        self, cell: Cell, inputs: Inputs, folder: Path, mechanism: str | None, free: Callable[[], int]
    ) -> None:
        """`mechanism`: how the memory is bounded, which says what counts; null: by a GPU, whose `free` bytes
        tell what a process takes before it holds anything."""
        self._cell, self._inputs, self._folder, self._mechanism = cell, inputs, folder, mechanism
        self._free, self._gpu_runtime = free, 0
        self._said: dict[str, Any] = {}
        self._at: dict[int, dict[str, Any]] = {}

    def predicted(self, space: Space, limit_bytes: float, filled: bool) -> int | None:
        """The longest context within the limit, where it and the one above it are accounted for."""
        if not self._at:
            self._ask(space.floor(space.lowest * times) for times in FIRST)
        for last in range(MOST_ROUNDS):
            known = Space(space.granule, space.lowest, space.floor(FURTHER * max(self._at)))
            found = predicted(known, self.need(filled), limit_bytes)
            wanted = [found or space.lowest]
            if found and found < space.highest:
                wanted.append(found + space.granule)
            if all(n in self._at for n in wanted):
                break
            near = (0,) if last == MOST_ROUNDS - 1 else (-2, -1, 0, 1)
            around = [n + k * space.granule for n in wanted for k in near]
            self._ask(n for n in around if space.lowest <= n <= space.highest and n not in self._at)
        return found

    def need(self, filled: bool) -> Need:
        """Bytes by context: as accounted for, and on a line between two that are."""
        known = sorted((n, sum(self.parts(n, filled).values())) for n in self._at)

        def of(n_ctx: float) -> float:
            place = min(max(bisect_left(known, (n_ctx,)), 1), len(known) - 1)
            (n, low), (m, high) = known[place - 1], known[place]
            return low + (high - low) * (n_ctx - n) / (m - n)

        return of

    @property
    def knows_lengths(self) -> bool:
        """Whether a longer context takes more, by the account."""
        need = self.need(filled=True)
        return need(max(self._at)) > need(min(self._at))

    def parts(self, n_ctx: int, filled: bool) -> Parts:
        """The need of an accounted context, by part."""
        process, at = self._said["process"], self._at[n_ctx]
        if self._mechanism is None:
            found = {part: _on_gpu(by_device) for part, by_device in at["memory"].items()}
            runtime = self._gpu_runtime or GPU_RUNTIME_BYTES
            return {"runtime": float(runtime), "weights": _on_gpu(self._said["model"])} | found
        counted = at["memory" if self._mechanism == "RLIMIT_DATA" else "touched"]
        later = ("work",) if self._mechanism == "RLIMIT_DATA" else ("work", "compute")
        found = {
            part: float(sum(by_device.values()))
            for part, by_device in counted.items()
            if filled or part not in later
        }
        runtime = process["rss_anon_bytes"]
        if self._mechanism == "RLIMIT_DATA":
            runtime = process["data_bytes"] + (process["stack_bytes"] if filled else 0)
        found |= {"runtime": float(runtime), "weights": float(sum(self._said["model"].values()))}
        # A cgroup counts the page tables too.
        tables = sum(found.values()) / PAGES_TO_A_TABLE if self._mechanism != "RLIMIT_DATA" else 0.0
        return found | {"tables": tables}

    def _ask(self, contexts: Iterable[int]) -> None:
        asked = {"kind": "account", "n_ctx": sorted(set(contexts))}
        request = self._inputs.request(self._cell, "account", asked)
        events = launch.run_job(
            request, self._inputs.interpreter, self._folder, ACCOUNT_TIMEOUT_S, self._inputs.threads
        )
        before = self._free() if self._mechanism is None else 0

        def told(phase: str) -> None:
            if phase == ACCOUNTED and self._mechanism is None:
                self._gpu_runtime = max(self._gpu_runtime, before - self._free())

        self._said = launch.facts_of(events, told)
        self._at |= {each["n_ctx"]: each for each in self._said["at"]}


def _on_gpu(by_device: Mapping[str, int]) -> float:
    """Bytes on the GPU; llama.cpp's buffers in the machine's memory are CPU, CPU_REPACK, CUDA_Host ..."""
    return float(sum(b for on, b in by_device.items() if not on.startswith("CPU") and "_Host" not in on))


def by_shape(cell: Cell, inputs: Inputs) -> Need | None:
    """What the cell's stack takes by the estimator; null where the shape is not known."""
    held = held_model(cell, inputs.weights, inputs.options)
    if held is None:
        return None
    engine = engine_of(cell, inputs.options, inputs.device_id != "cpu", held.shape)
    return lambda n_ctx: footprint.total(engine, held, n_ctx)
