"""Estimate the memory of a context: from the stack's dry-run account, else from the model's shape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from harness.campaign import worker
from harness.campaign.loaded_model import engine_of, held_model
from harness.campaign.next_context import Need, Space, predicted
from harness.campaign.repeat import Inputs
from harness.config.plan import Cell
from harness.theory import memory
from runners.protocol import ACCOUNTED

ACCOUNT_TIMEOUT_S = 120.0
FIRST = (1, 4, 16, 64)  # times the shortest context: the lengths to account for first
# Times the longest accounted context: a dry account takes memory too, llama.cpp's 48 bytes a token.
FURTHER = 64
MOST_ROUNDS = 8
GPU_RUNTIME_BYTES = 500 << 20  # a CUDA context with its kernels, if the account's own could not be measured
PAGES_TO_A_TABLE = 512
Parts = dict[str, float]


class Account:
    """The stack's memory account of one cell, for as many contexts as needed. `filled`: memory when the
    context is full; otherwise memory right after allocation.

    Raises worker.JobFailed.
    """

    def __init__(
        self, cell: Cell, inputs: Inputs, folder: Path, mechanism: str | None, free: Callable[[], int]
    ) -> None:
        """`mechanism`: how memory is limited, which decides what counts. Null: a GPU; its `free` bytes show
        the memory of a process before it allocates anything."""
        self._cell, self._inputs, self._folder, self._mechanism = cell, inputs, folder, mechanism
        self._free, self._gpu_runtime = free, 0
        self._account: worker.Facts = {}
        self._at: dict[int, worker.Facts] = {}

    def predicted(self, space: Space, limit_bytes: float, filled: bool) -> int | None:
        """The longest context within the limit; the account covers it and the one above it."""
        if not self._at:
            self._run_account(space.floor(space.lowest * times) for times in FIRST)
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
            self._run_account(n for n in around if space.lowest <= n <= space.highest and n not in self._at)
        return found

    def need(self, filled: bool) -> Need:
        """Bytes by context length: from the account, interpolated linearly in between."""
        known = sorted((n, sum(self.parts(n, filled).values())) for n in self._at)

        def of(n_ctx: float) -> float:
            place = min(max(bisect_left(known, (n_ctx,)), 1), len(known) - 1)
            (n, low), (m, high) = known[place - 1], known[place]
            return low + (high - low) * (n_ctx - n) / (m - n)

        return of

    @property
    def knows_lengths(self) -> bool:
        """Whether the account grows with the context length."""
        need = self.need(filled=True)
        return need(max(self._at)) > need(min(self._at))

    def parts(self, n_ctx: int, filled: bool) -> Parts:
        """Bytes of an accounted context, by part."""
        process, at = self._account["process"], self._at[n_ctx]
        if self._mechanism is None:
            by_part = {part: _on_gpu(by_device) for part, by_device in at["memory"].items()}
            runtime = self._gpu_runtime or GPU_RUNTIME_BYTES
            return {"runtime": float(runtime), "weights": _on_gpu(self._account["model"])} | by_part
        counted = at["memory" if self._mechanism == "RLIMIT_DATA" else "touched"]
        later = ("work",) if self._mechanism == "RLIMIT_DATA" else ("work", "compute")
        by_part = {
            part: float(sum(by_device.values()))
            for part, by_device in counted.items()
            if filled or part not in later
        }
        runtime = process["rss_anon_bytes"]
        if self._mechanism == "RLIMIT_DATA":
            runtime = process["data_bytes"] + (process["stack_bytes"] if filled else 0)
        by_part |= {"runtime": float(runtime), "weights": float(sum(self._account["model"].values()))}
        # A cgroup also counts page tables.
        tables = sum(by_part.values()) / PAGES_TO_A_TABLE if self._mechanism != "RLIMIT_DATA" else 0.0
        return by_part | {"tables": tables}

    def _run_account(self, contexts: Iterable[int]) -> None:
        workload: dict[str, object] = {"kind": "account", "n_ctx": sorted(set(contexts))}
        request = self._inputs.request(self._cell, "account", [workload])
        events = worker.run_job(
            request, self._inputs.interpreter, self._folder, ACCOUNT_TIMEOUT_S, self._inputs.threads
        )
        before = self._free() if self._mechanism is None else 0

        def on_phase(phase: str) -> None:
            if phase == ACCOUNTED and self._mechanism is None:
                self._gpu_runtime = max(self._gpu_runtime, before - self._free())

        self._account = worker.facts_of(events, on_phase)
        self._at |= {each["n_ctx"]: each for each in self._account["at"]}


def _on_gpu(by_device: Mapping[str, int]) -> float:
    """Bytes on the GPU; llama.cpp names its host buffers CPU, CPU_REPACK, CUDA_Host ..."""
    return float(sum(b for on, b in by_device.items() if not on.startswith("CPU") and "_Host" not in on))


def by_shape(cell: Cell, inputs: Inputs) -> Need | None:
    """Bytes by context length from the memory model of the stack; None if the shape is not known."""
    held = held_model(cell, inputs.weights, inputs.options)
    if held is None:
        return None
    engine = engine_of(cell, inputs.options, inputs.device_id != "cpu", held.made)
    return lambda n_ctx: memory.total_bytes(engine, held, n_ctx)
