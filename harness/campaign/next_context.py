"""Which context to try next, from what the tries so far took and what a context should take."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.campaign import worker
from harness.campaign.forecast import engine_of, held_model
from harness.campaign.repeat import Inputs
from harness.config.plan import Cell
from harness.theory import memory
from runners.protocol import ACCOUNTED

# Find the longest context that fits, in few tries. Pure: the caller runs the tries.


Need = Callable[[int], float]
"""Expected bytes of a context of n tokens. Never decreases with n."""

CALIBRATING_SHARE = 4  # without an account, a try at a quarter of the guess calibrates the estimate
PATIENCE = 7  # tries, after which a guess at the edge of the interval is noise: bisect instead
CLOSE = 8  # a guess within 1/8 of the interval is at its edge
APART = 1.25  # ratio of two contexts from which a slope is fitted; closer ones would fit noise


@dataclass(frozen=True)
class Space:
    """All valid context lengths: multiples of `granule` from `lowest` to `highest`, both included."""

    granule: int
    lowest: int
    highest: int

    def __post_init__(self) -> None:
        if not 0 < self.granule <= self.lowest <= self.highest or (self.lowest | self.highest) % self.granule:
            raise ValueError(f"no contexts: {self}")

    def floor(self, n_ctx: float) -> int:
        """The longest valid context of at most `n_ctx` tokens (at least `lowest`)."""
        return max(self.lowest, min(self.highest, int(n_ctx) // self.granule * self.granule))


@dataclass(frozen=True)
class Try:
    """A context that was tried. `peak_bytes`: its peak memory; None if not known."""

    n_ctx: int
    fits: bool
    peak_bytes: int | None = None


def predicted(space: Space, need: Need, limit_bytes: float) -> int | None:
    """The longest context whose need is within the limit; None if not even the shortest is."""
    if need(space.lowest) > limit_bytes:
        return None
    low, high = space.lowest, space.highest + space.granule
    while high - low > space.granule:
        middle = low + (high - low) // (2 * space.granule) * space.granule
        low, high = (middle, high) if need(middle) <= limit_bytes else (low, middle)
    return low


def longest(space: Space, tries: Sequence[Try]) -> int | None:
    """The longest tried context that fits; None if none does. Every context above a failing one fails."""
    shortest_failing = _ceiling(space, tries)
    return max((t.n_ctx for t in tries if t.fits and t.n_ctx < shortest_failing), default=None)


def corrected(need: Need, tries: Sequence[Try]) -> Need:
    """The need, corrected by the measured peaks: by the offset at the longest context that fits, or by the
    line through two if they are at least APART."""
    known = sorted((t.n_ctx, t.peak_bytes - need(t.n_ctx)) for t in tries if t.fits and t.peak_bytes)
    if not known:
        return need
    n, off = known[-1]
    shorter = [each for each in known if each[0] * APART <= n]
    slope = (off - shorter[-1][1]) / (n - shorter[-1][0]) if shorter else 0.0
    return lambda n_ctx: need(n_ctx) + off + slope * (n_ctx - n)


def following(
    space: Space,
    tries: Sequence[Try],
    need: Need | None,
    limit_bytes: float,
    accounted: bool,
    margin_bytes: float = 0,
) -> int | None:
    """The context to try next; None when the longest is known (the next one fails or does not exist).

    `need`: None if not known. `accounted`: whether it is the stack's own account, which is tried directly,
    less `margin_bytes`. A try that fits shows the account's error; a try that fails does not.
    """
    low, high = longest(space, tries) or space.lowest - space.granule, _ceiling(space, tries)
    if high - low <= space.granule:
        return None
    if need is None:
        return _middle(space, low, high) if high <= space.highest else space.floor(2 * max(low, 2048))
    now = corrected(need, tries)
    guess = predicted(space, now, limit_bytes) or space.lowest
    if not tries and not accounted:
        return space.floor(guess / CALIBRATING_SHARE)
    if not tries:
        return predicted(space, now, limit_bytes - margin_bytes) or space.lowest
    if len(tries) >= PATIENCE and min(guess - low, high - guess) * CLOSE < high - low:
        leap = low + space.granule * 2 ** (len(tries) - PATIENCE)
        return _middle(space, low, high) if high <= space.highest or leap >= high else leap
    if low < guess < high:
        return guess
    measured = sum(t.fits and t.peak_bytes is not None for t in tries)
    if guess >= high and not accounted and measured == 1:
        return _middle(space, low, high)  # a second one that fits gives the slope
    # The guess is known to be wrong: step away from it, doubling each time, then bisect the rest.
    wrong = [t for t in tries if t.fits == (guess <= low)]
    if guess >= high and margin_bytes and not measured:
        guess = predicted(space, now, limit_bytes - margin_bytes * 2 ** len(wrong)) or space.lowest
        if low < guess < high:
            return guess
    if guess <= low:
        beyond = sum(t.n_ctx > guess for t in wrong)
        step = low + space.granule * 2**beyond
    else:
        step = high - space.granule * 2 ** (len(wrong) - 1)
    return step if low < step < high else _middle(space, low, high)


def _ceiling(space: Space, tries: Sequence[Try]) -> int:
    """The shortest context known to fail; one above the highest if none is."""
    return min([space.highest + space.granule, *(t.n_ctx for t in tries if not t.fits)])


def _middle(space: Space, low: int, high: int) -> int:
    return low + max(1, (high - low) // (2 * space.granule)) * space.granule


# Estimate the memory of a context: from the stack's dry-run account, else from the model's shape.


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

    Raises launch.JobFailed.
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
            found = {part: _on_gpu(by_device) for part, by_device in at["memory"].items()}
            runtime = self._gpu_runtime or GPU_RUNTIME_BYTES
            return {"runtime": float(runtime), "weights": _on_gpu(self._account["model"])} | found
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
        found |= {"runtime": float(runtime), "weights": float(sum(self._account["model"].values()))}
        # A cgroup also counts page tables.
        tables = sum(found.values()) / PAGES_TO_A_TABLE if self._mechanism != "RLIMIT_DATA" else 0.0
        return found | {"tables": tables}

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
