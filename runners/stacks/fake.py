"""A stack with known results: latency, spikes, limits, crashes and false reports on request. Computes
nothing.

By default time is virtual: it advances at once while the fake waits for a token, and never otherwise. So
10,000 tokens take milliseconds, and no other process can change a latency or a verdict. Hangs are real.

Two environment variables change cells without changing their options. HARNESS_FAKE_SLOWER, e.g. 1.05:
multiplies all latencies. HARNESS_FAKE_DISTURBED, the path of a file with a whole number: that many of the
next generations report that their threads had no CPU for 30% of the time; each counts down by one.
"""
# /// script
# requires-python = ">=3.10"
# dependencies = []
#
# [tool.harness]
# summary = "a stack of known truth; runs nothing, for tests and for learning the harness"
# weights = "none"
# several_users = true
# simulated = true
# named = ["quant"]
#
# [[tool.harness.limits]]
# when = { die_by = "error" }
# never = true
# message = "the fake failed, as asked"
#
# [[tool.harness.limits]]
# when = { kernel = "windowed" }
# covers = "oom_above_n_ctx"
# refuses = true
# message = "it would forget what came before"
#
# [[tool.harness.context]]
# option = "n_ctx"
# granule = 256
# dry = true
#
# [tool.harness.env.cpu]
# device = "cpu"
#
# [tool.harness.env.cuda]
# device = "cuda"
#
# [tool.harness.options]
# threads = { type = "int", minimum = 1, default-from = "threads", help = "threads that it pretends to use" }
# B_ms = { minimum = 0, default = 0.2, help = "latency at zero context, ms" }
# user_ms = { minimum = 0, default = 0.0, help = "added to a step by each further user, ms" }
# W_tokens_per_ms = { minimum = 0, default = 0.0, help = "tokens of context per extra millisecond; 0: flat" }
# prefill_ms = { minimum = 0, default = 1.0, help = "latency of the first token, ms" }
# load_ms = { minimum = 0, default = 0.0, help = "time to load, ms" }
# noise = { minimum = 0, maximum = 1, default = 0.0, help = "uniform noise, as a fraction of the latency" }
# spike_every = { minimum = 0, default = 0, help = "a spike every so many tokens; 0: none" }
# spike_ms = { minimum = 0, default = 5.0, help = "height of a spike, ms" }
# drift_per_1000 = { default = 0.0, help = "rise of all latencies over 1,000 tokens decoded, as a fraction" }
# stop_after = { minimum = 0, default = 0, help = "end early after so many tokens; 0: no" }
# prompt_token_ms = { minimum = 0, default = 0.0, help = "time of each token of a pass, at least prefill_ms" }
# forgets = { default = false, help = "a pass over several tokens writes no keys and values" }
# admits = { default = true, help = "its count of evaluated tokens shows what became of the prefix" }
# extra_tokens = { minimum = 0, default = 0, help = "tokens yielded beyond those requested" }
# evaluates = { choices = ["all", "one"], default = "all", help = "one: claims a single prompt token" }
# leak_bytes_per_token = { minimum = 0, default = 0, help = "memory really taken and kept, per token" }
# oom_above_n_ctx = { minimum = 0, default = 0, help = "an n_ctx above this does not fit; 0: no limit" }
# fills_to = { minimum = 0, default = 0, help = "an n_ctx above this fails once so many tokens are in it" }
# slow_above_n = { minimum = 0, default = 0, help = "tokens from this position on take ten times as long" }
# kv_bytes_per_token = { minimum = 0, default = 0, help = "memory taken when loading, by token of n_ctx" }
# lazily = { default = false, help = "kv_bytes_per_token are touched as tokens come, not when loading" }
# account_off_bytes = { default = 0, help = "error of the dry accounting; positive: too much" }
# die_at_token = { minimum = 0, default = 0, help = "die at this token, counted from 1; 0: never" }
# hang_at_token = { minimum = 0, default = 0, help = "hang at this token, counted from 1; 0: never" }
# garbage_at_token = { minimum = 0, default = 0, help = "write garbage to the pipe at this token; 0: never" }
# kernel = { default = "fake", help = "the requested kernel" }
# runs_kernel = { type = "string", help = "the kernel that runs; default: the requested one" }
# restless = { default = false, help = "every generation is 10% slower than the one before" }
# device_clock = { default = false, help = "times every token on the device's side too, truthfully" }
# unsynchronised = { default = false, help = "yields the first token before it is done" }
#
# [tool.harness.options.quant]
# default = "f16"
# choices = ["f16", "q8_0", "q4_0"]
# help = "a name, and the bits per weight it has"
#
# [tool.harness.options.n_ctx]
# type = "int"
# minimum = 1
# default-from = "tokens"
# help = "context that it pretends to allocate"
#
# [tool.harness.options.clock]
# choices = ["virtual", "real"]
# default = "virtual"
# help = "real: tokens take their time, for sensors"
#
# [tool.harness.options.prefix]
# choices = ["as asked", "kept", "lost"]
# default = "as asked"
# help = "whether a prefix shared with the last prompt is evaluated"
#
# [tool.harness.options.fits_by]
# choices = ["refuse", "abort", "kill", "hang", "segfault", "error"]
# default = "refuse"
# help = "how what does not fit fails"
#
# [tool.harness.options.die_by]
# choices = ["segfault", "abort", "kill", "exit", "error", "oom"]
# default = "segfault"
# help = "how it dies"
# ///

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runners import clock
from runners.protocol import Answer, Instruments, Request, Say

DOES_NOT_FIT: tuple[type[BaseException], ...] = (MemoryError,)
SPIN_NS = 200_000  # busy-wait this long before a token is due, since sleep overshoots by about 60 us
BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
PARAMETERS = 1_000_000
PAGE = 4096  # to be touched once
VOCABULARY = 16
NOT_WRITTEN = -1
SPILLED = 10.0
DISTURBED = 0.3  # of the time of each thread
JITTER_NS = 1000  # maximum, and never the same: two identical series would be a copy


class VirtualTime:
    """Time that advances by waiting, at once. Starts at the shared monotonic clock."""

    def __init__(self) -> None:
        self._now_ns = time.perf_counter_ns()
        self._jitter = random.Random()

    def now_ns(self) -> int:
        return self._now_ns

    def wait_until(self, due_ns: int) -> None:
        self._now_ns = max(self._now_ns, due_ns + self._jitter.randrange(JITTER_NS))


class RealTime:
    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def wait_until(self, due_ns: int) -> None:
        left = due_ns - time.perf_counter_ns()
        if left > SPIN_NS:
            time.sleep((left - SPIN_NS) / 1e9)
        while time.perf_counter_ns() < due_ns:
            pass


_virtual = VirtualTime()  # one for the process: the worker's clock and the session's are the same


def instruments(request: Request) -> Instruments | None:
    """Instruments of virtual time; None if the worker's own are right."""
    if request.options.get("clock") != "virtual":
        return None
    waits = request.job in ("generate", "fit") and disturbed()
    began_ns, threads = _virtual.now_ns(), request.options["threads"]

    def cpu_wait_ns() -> int:
        return int(DISTURBED * threads * (_virtual.now_ns() - began_ns)) if waits else 0

    return Instruments(_virtual.now_ns, cpu_wait_ns, lambda: (0, 0))


def disturbed() -> bool:
    """Whether this generation is one of those that HARNESS_FAKE_DISTURBED counts; counts it."""
    if not (path := os.environ.get("HARNESS_FAKE_DISTURBED")):
        return False
    left = int(Path(path).read_text())
    Path(path).write_text(str(max(0, left - 1)))
    return left > 0


def load(request: Request) -> FakeSession:
    options = request.options
    clock = _virtual if options["clock"] == "virtual" else RealTime()
    clock.wait_until(clock.now_ns() + int(options["load_ms"] * 1e6))
    if 0 < options["oom_above_n_ctx"] < options["n_ctx"]:
        does_not_fit(
            f"n_ctx {options['n_ctx']} does not fit: the limit is {options['oom_above_n_ctx']}", options
        )
    return FakeSession(options, clock, float(os.environ.get("HARNESS_FAKE_SLOWER", "1")))


def account(request: Request, say: Say) -> dict[str, Any]:
    """Memory of load() and of a decode to the end of each n_ctx; wrong by the requested error."""
    options = request.options
    at = []
    for n_ctx in request.workloads[0]["n_ctx"]:
        kv = max(0, n_ctx * options["kv_bytes_per_token"] + options["account_off_bytes"])
        parts: dict[str, dict[str, int]] = {"kv": {"CPU": kv}, "output": {}, "compute": {}, "work": {}}
        at.append({"n_ctx": n_ctx, "memory": parts, "touched": parts})
    return {
        "granule": 1,
        "process": clock.process_accounting(threads=0),
        "model": {"CPU": model_bytes(options)},
        "at": at,
        "memory_resolution_bytes": 0,
    }


def model_bytes(options: dict[str, Any]) -> int:
    return int(PARAMETERS * BITS[options["quant"]] / 8)


def tokenize(request: Request, say: Say) -> dict[str, Any]:
    """The fake has no tokenizer."""
    return {"ids": None, "bos": None}


class FakeSession:
    chunk = 512

    def __init__(self, options: dict[str, Any], clock: VirtualTime | RealTime, slower: float) -> None:
        self._options = options
        self._clock = clock
        self._slower = slower
        self._leaked: list[bytearray] = []
        self._weights = b"\1" * model_bytes(options)
        self._kv = untouched(options["n_ctx"] * options["kv_bytes_per_token"])
        if not options["lazily"]:
            self._touch(0, options["n_ctx"])
        self._ids: list[int] = []
        self._before: list[int] = []  # emptying them
        self._runs = self._decoded = 0
        self._evaluated = 0
        self._device_ns: list[int] = []

    def facts(self) -> dict[str, Any]:
        options = self._options
        return {
            "versions": {"fake": "1", "python": sys.version.split()[0]},
            "kernels": {options["runs_kernel"] or options["kernel"]: 1},
            "kernel_asked": options["kernel"],
            "options": options,
            "kv_read": "grows",
            "model_bytes": len(self._weights),
            "parameters": PARAMETERS,
        }

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        options = self._options
        self._runs += 1
        slowness = self._slower * (1.1**self._runs if options["restless"] else 1.0)
        chance = random.Random(len(prompt))
        self._evaluated = len(prompt) if options["evaluates"] == "all" else 1
        due = done = self._clock.now_ns()
        self._device_ns = []
        waiting: list[int] = []
        end = options["stop_after"] or new_tokens + options["extra_tokens"]
        for k in range(1, end + 1):
            latency_ms = options["prefill_ms"] if k == 1 else self._latency_ms(len(prompt) + k)
            warmth = 1 + options["drift_per_1000"] * self._decoded / 1000
            self._decoded += 1
            due += int(
                latency_ms * slowness * warmth * (1 + options["noise"] * (2 * chance.random() - 1)) * 1e6
            )
            self._misbehave(k)
            self._touch(len(prompt) + k - 1, len(prompt) + k)
            waiting.append(due)
            while waiting and not (k == 1 and options["unsynchronised"]):
                self._clock.wait_until(waiting.pop(0))
                before, done = done, self._clock.now_ns()
                self._device_ns.append(done - before)
            if k > 1:
                self._evaluated += 1
            yield chance.randrange(512)

    def serve_batch(self, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
        """A step takes `user_ms` longer for each further user; prompts follow each other."""
        options, began, users = self._options, self._clock.now_ns(), len(prompts)
        due = began
        t_ns: list[list[int]] = [[] for _ in prompts]
        for of_user in t_ns:
            due += int(options["prefill_ms"] * self._slower * 1e6)
            self._clock.wait_until(due)
            of_user.append(self._clock.now_ns() - began)
        for k in range(2, (options["stop_after"] or new_tokens) + 1):
            step_ms = self._latency_ms(len(prompts[0]) + k) + (users - 1) * options["user_ms"]
            due += int(step_ms * self._slower * 1e6)
            self._clock.wait_until(due)
            for of_user in t_ns:
                of_user.append(self._clock.now_ns() - began)
        ids = [random.Random(str(prompt)).choices(range(512), k=len(t_ns[0])) for prompt in prompts]
        decode_ns = t_ns[-1][0]
        return [Answer(*of_user, decode_ns=decode_ns) for of_user in zip(t_ns, ids, strict=True)]

    def _latency_ms(self, n: int) -> float:
        """B + (n - 1) / W for the token at position n (from 1), with spikes."""
        options = self._options
        slope = (n - 1) / options["W_tokens_per_ms"] if options["W_tokens_per_ms"] else 0.0
        spike = options["spike_ms"] if options["spike_every"] and n % options["spike_every"] == 0 else 0.0
        spilled = 0 < options["slow_above_n"] <= n
        return float(options["B_ms"] + slope + spike) * (SPILLED if spilled else 1.0)

    def empty(self, tokens: int) -> None:
        self._before, self._ids, self._evaluated = self._ids, [], 0

    def held(self) -> int:
        return len(self._ids)

    def truncate(self, tokens: int) -> None:
        del self._ids[tokens:]

    def context_bytes(self) -> int:
        return self.held() * int(self._options["kv_bytes_per_token"])

    def keep(self) -> list[int]:
        return list(self._ids)

    def restore(self, kept: list[int], tokens: int) -> None:
        self._ids = kept[:tokens]

    def write_kept(self, kept: list[int], path: Path) -> None:
        path.write_bytes(array("q", kept).tobytes())

    def read_kept(self, path: Path) -> list[int]:
        return array("q", path.read_bytes()).tolist()

    def evaluated(self) -> int:
        return self._evaluated

    def steps(self, new_tokens: int) -> Iterator[int]:
        self._runs += 1
        chance = random.Random(f"{self.held()} {self._runs}")
        for k in range(new_tokens):
            token = chance.randrange(512)
            if k:
                self._feed([token], 1 + self._options["noise"] * (2 * chance.random() - 1))
            yield token

    def feed(self, ids: list[int], keep: int) -> array[float]:
        """Several ids at once are a prompt, one id is a decode step. The logits are random numbers, the same
        after the same ids."""
        self._feed(ids, 1.0)
        chance = random.Random(hash(tuple(each for each in self._ids if each != NOT_WRITTEN)))
        return array("f", [chance.gauss(0, 1) for _ in range(keep * VOCABULARY)])

    def _feed(self, ids: list[int], factor: float) -> None:
        options, began, held = self._options, self._clock.now_ns(), self.held() + len(ids)
        if held > options["n_ctx"]:
            raise ValueError(f"the context of n_ctx {options['n_ctx']} is full")
        if 0 < options["fills_to"] < held:
            does_not_fit(f"no memory for token {held}", options)
        self._touch(self.held(), held)
        latency_ms, computed = self._latency_ms(held), len(ids)
        if len(ids) > 1:
            if options["prefix"] == "kept" and not self._ids:
                computed -= _in_common(self._before, ids)
            elif options["prefix"] == "lost":
                computed = held
            latency_ms = max(options["prefill_ms"], computed * options["prompt_token_ms"])
        self._clock.wait_until(began + int(latency_ms * factor * self._slower * 1e6))
        self._evaluated += computed if options["admits"] else len(ids)
        self._ids += [NOT_WRITTEN] * len(ids) if len(ids) > 1 and options["forgets"] else ids

    def _touch(self, first: int, end: int) -> None:
        """Write to the memory of the tokens from `first` to before `end`."""
        size = self._options["kv_bytes_per_token"]
        pages = range(first * size, min(end, self._options["n_ctx"]) * size, PAGE)
        self._kv[pages.start : pages.stop : PAGE] = b"\1" * len(pages)

    def memory_state(self) -> tuple[int, int] | None:
        """The leaked bytes; None without a leak."""
        leaked = sum(map(len, self._leaked))
        return (leaked, leaked) if leaked else None

    def _misbehave(self, k: int) -> None:
        options = self._options
        if options["leak_bytes_per_token"]:
            self._leaked.append(bytearray(b"\1" * options["leak_bytes_per_token"]))
        if k == options["garbage_at_token"]:
            # The worker's second argument is the descriptor of the events pipe.
            os.write(int(sys.argv[2]), b'\x00\xffnot json {"event": "Done"\n')
        if k == options["hang_at_token"]:
            time.sleep(1e6)
        if k == options["die_at_token"]:
            die(options["die_by"])

    def counters(self) -> dict[str, Any]:
        timed = {"device_ns": self._device_ns} if self._options["device_clock"] else {}
        return {"evaluated_tokens": self._evaluated, **timed}

    def close(self) -> None:
        self._leaked.clear()
        self._kv.close()


def _in_common(before: list[int], ids: list[int]) -> int:
    """Tokens at which both begin alike; the last id is always evaluated."""
    pairs = zip(before, ids[:-1], strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(before), len(ids) - 1))


def untouched(size: int) -> mmap.mmap:
    """Memory that counts when it is written to. Raises MemoryError."""
    try:
        return mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as refusal:
        raise MemoryError(f"{size} bytes for the KV cache: {refusal.strerror}") from refusal


def does_not_fit(reason: str, options: dict[str, Any]) -> None:
    if options["fits_by"] == "refuse":
        raise MemoryError(reason)
    if options["fits_by"] == "hang":
        time.sleep(1e6)
    die(options["fits_by"])


def die(how: str) -> None:
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "abort":
        os.abort()
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        os._exit(7)
    elif how == "oom":
        raise MemoryError("the fake ran out of memory, as asked")
    raise RuntimeError("the fake failed, as asked")
