"""Generation with llama.cpp."""

from __future__ import annotations

import ctypes
import importlib.metadata
import math
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_bool, c_int, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from runners.llamacpp import routing
from runners.llamacpp.account import CHUNK, tensor_bytes
from runners.llamacpp.lib import (
    LOG,
    RESOLUTION_BYTES,
    DoesNotFit,
    devices,
    lib,
    libggml,
    overrides,
    placed,
    quant_of,
    system_info,
    versions,
)
from runners.protocol import Answer, Request, not_a_number
from runners.workloads import scoring
from runners.workloads.experts import Heard
from runners.workloads.warm_up import rehearsed_windows

# The KV cache of a llama.cpp context: its tokens, and how it is truncated, copied and restored.


class LlamaContext:
    """One context, whose first sequence has the number 0; see runners.protocol.Session."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._memory = lib.llama_get_memory(context)

    def held(self) -> int:
        """Tokens in the KV cache."""
        return int(lib.llama_memory_seq_pos_max(self._memory, 0)) + 1

    def truncate(self, tokens: int) -> None:
        """Forget all but the first `tokens`. Raises RuntimeError if this model's cache cannot."""
        lib.llama_synchronize(self._context)
        # A layer with a window has dropped what is before it, and llama.cpp would go on without.
        window = lib.llama_model_n_swa(lib.llama_get_model(self._context))
        oldest = lib.llama_memory_seq_pos_min(self._memory, 0)
        if window and tokens < self.held() and oldest > max(0, tokens - window):
            raise RuntimeError(
                f"the cache of layers with a window begins at token {oldest + 1}: to go back to {tokens}, "
                "set swa_full: true"
            )
        if not lib.llama_memory_seq_rm(self._memory, 0, tokens, -1):
            raise RuntimeError("llama.cpp cannot remove the end of this model's cache")

    def context_bytes(self) -> int:
        """Bytes of a copy of the context."""
        lib.llama_synchronize(self._context)
        return int(lib.llama_state_seq_get_size(self._context, 0))

    def keep(self) -> np.ndarray:
        """A copy of the context, for restore()."""
        kept = np.empty(self.context_bytes(), np.uint8)
        wrote = lib.llama_state_seq_get_data(self._context, _bytes_at(kept), kept.size, 0)
        if wrote != kept.size:
            raise RuntimeError(f"llama.cpp copied {wrote} bytes of its context, {kept.size} announced")
        return kept

    def restore(self, kept: np.ndarray, tokens: int) -> None:
        """Bring back the first `tokens` of a kept context. Raises RuntimeError if llama.cpp refuses it."""
        lib.llama_synchronize(self._context)
        if not lib.llama_state_seq_set_data(self._context, _bytes_at(kept), kept.size, 0):
            raise RuntimeError("llama.cpp refuses the context that was kept")
        self.truncate(tokens)

    def write_kept(self, kept: np.ndarray, path: Path) -> None:
        """Write a kept context to a file."""
        kept.tofile(path)

    def read_kept(self, path: Path) -> np.ndarray:
        """A kept context of a file."""
        return np.fromfile(path, np.uint8)

    def evaluated(self) -> int:
        """Tokens evaluated since the context was emptied, by llama.cpp's own count."""
        lib.llama_synchronize(self._context)
        return evaluated_in(lib.llama_perf_context(self._context))


def _bytes_at(buffer: np.ndarray) -> Any:
    return buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def evaluated_in(perf: Any) -> int:
    """Tokens evaluated. llama.cpp counts single tokens and batches separately, and reports 1 for 0."""
    batched = 0 if perf.n_p_eval == 1 else perf.n_p_eval
    single = 0 if perf.n_eval == 1 and perf.t_eval_ms == 0 else perf.n_eval
    return batched + single


# llama.cpp's threads, each on one CPU: one thread pool for each context.


_MOST = 512  # GGML_MAX_N_THREADS


class _Params(ctypes.Structure):
    """struct ggml_threadpool_params (ggml.h)."""

    _fields_ = (
        ("cpumask", c_bool * _MOST),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


def cpus_in(text: str) -> range:
    """`2-5`: four CPUs, by Linux's numbers. Raises ValueError."""
    first, _, last = text.partition("-")
    found = range(int(first), int(last or first) + 1)
    if not found or found[-1] >= _MOST:
        raise ValueError(f"cpus {text}: must be FIRST-LAST, below {_MOST}")
    return found


def pin(context: int, threads: int, cpus: range) -> int:
    """Give the context threads that stay each on a CPU, by turns of `cpus`. Returns the pool, to be given to
    `free` after the context. Raises RuntimeError, ValueError."""
    if threads > len(cpus):
        raise ValueError(f"{threads} threads need as many CPUs; cpus has {len(cpus)}")
    params = _Params()
    libggml.ggml_threadpool_params_init(ctypes.byref(params), c_int(threads))
    for cpu in cpus:
        params.cpumask[cpu] = True
    params.strict_cpu = True
    libggml.ggml_threadpool_new.restype = c_void_p
    pool = libggml.ggml_threadpool_new(ctypes.byref(params))
    if not pool:
        raise RuntimeError("llama.cpp could not start its threads")
    attach = lib._lib.llama_attach_threadpool
    attach.restype, attach.argtypes = None, (c_void_p, c_void_p, c_void_p)
    attach(context, pool, pool)
    return int(pool)


def free(pool: int) -> None:
    libggml.ggml_threadpool_free(c_void_p(pool))


# A session of llama.cpp: steps of decode, the two clocks around them, and its facts.


class LlamaSession(LlamaContext):
    """One model and one context; see runners.protocol.Session."""

    def __init__(self, request: Request, model: int, context: int, pool: int | None = None) -> None:
        """`pool`: of threads that stay on their CPUs; None: llama.cpp's own."""
        super().__init__(context)
        self._request, self._pool = request, pool
        self.heard: Heard | None = None
        self._fixed: list[int] | None = None
        self._model = model
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._n_batch = lib.llama_n_batch(context)
        self.chunk = min(self._n_batch, CHUNK)
        self._batch = batch = lib.llama_batch_init(self._n_batch, 0, 1)
        for i in range(self._n_batch):
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
        self._ids, self._positions, self._keeps = (
            np.ctypeslib.as_array(column, (self._n_batch,))
            for column in (batch.token, batch.pos, batch.logits)
        )
        self._address = 0
        self._row = np.empty(0, np.float32)
        self._after_prefill: Any = None
        self._wait_ns: list[int] = []
        self._argmax_ns: list[int] = []
        self._steps_ns = self._chose_ns = 0

    def rehearse(self, last: int) -> None:
        """Take steps at several depths up to the position `last`, see windows.rehearsed, and forget them."""
        for depth in rehearsed_windows(last):
            self.feed([0] * (depth - self.held()), 1)
            self.feed([0], 1)
        self._clear()

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        """Clears the cache now, outside TTFT; the rest runs when iterated."""
        self._clear()
        return self._decode(prompt, new_tokens)

    def _clear(self) -> None:
        lib.llama_synchronize(self._context)  # else tokens of a failed decode would count here
        lib.llama_memory_clear(self._memory, True)
        lib.llama_perf_context_reset(self._context)
        self._after_prefill = None
        self._wait_ns, self._argmax_ns, self._steps_ns = [], [], 0

    def _decode(self, prompt: list[int], new_tokens: int) -> Iterator[int]:
        for start in range(0, len(prompt), self._n_batch):
            chunk = prompt[start : start + self._n_batch]
            self._evaluate(chunk, start, keep=start + len(chunk) == len(prompt))
        decoded = time.perf_counter_ns()
        lib.llama_synchronize(self._context)
        self._after_prefill = lib.llama_perf_context(self._context)
        if self.held() != len(prompt):
            raise RuntimeError("the KV cache does not hold exactly the prompt")
        yield from self._steps(len(prompt), new_tokens, decoded)

    def force_tokens(self, ids: list[int]) -> None:
        """See runners.protocol.Session."""
        self._fixed = ids

    def steps(self, new_tokens: int) -> Iterator[int]:
        """Greedy ids after those fed; see runners.protocol.Session."""
        return self._steps(self.held(), new_tokens, time.perf_counter_ns())

    def _steps(self, first: int, new_tokens: int, decoded: int) -> Iterator[int]:
        """Greedy ids from the logits that are there; `first`: positions held, `decoded`: when llama_decode
        returned."""
        context, batch, clock = self._context, self._batch, time.perf_counter_ns
        wait_ns, argmax_ns = self._wait_ns, self._argmax_ns
        batch.n_tokens = 1
        batch.logits[0] = 1
        began = None
        for position in range(first, first + new_tokens):
            lib.llama_synchronize(context)
            if began is not None:
                self._steps_ns += clock() - began
            row = self._logits(-1)
            ready = clock()
            token = int(row.argmax())
            picked = clock()
            wait_ns.append(ready - decoded)
            argmax_ns.append(picked - ready)
            if not math.isfinite(row[token]):  # argmax returns a NaN if there is one
                raise ValueError(not_a_number(position + 1))
            yield token
            if position == first + new_tokens - 1:
                return  # the last token is never fed back
            batch.token[0] = self._fed(token, position)
            batch.pos[0] = position
            began = clock()
            refused = lib.llama_decode(context, batch)
            decoded = clock()
            if refused:
                raise self._refusal(refused, position)

    def _evaluate(self, ids: list[int], start: int, keep: int) -> None:
        """Decode `ids` as one batch from position `start` on, with logits after the last `keep` of them."""
        count = len(ids)
        self._batch.n_tokens = count
        self._ids[:count] = ids
        self._positions[:count] = np.arange(start, start + count)
        self._keeps[:count] = 0
        self._keeps[count - keep : count] = 1
        if refused := lib.llama_decode(self._context, self._batch):
            raise self._refusal(refused, start + len(ids) - 1)

    def serve_batch(self, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
        """See runners.protocol.Session. Each user is a sequence. Prompts follow each other in batches of
        n_batch tokens, as in llama-batched-bench; then each step has one token of every user."""
        if len(prompts) > self._n_batch:
            raise ValueError(f"{len(prompts)} users need an n_batch of at least as many")
        self._clear()
        clock, began = time.perf_counter_ns, time.perf_counter_ns()
        chose_before_ns = self._chose_ns
        users = range(len(prompts))

        def computed_ns() -> int:
            """Since the begin, without the choice of tokens: it is ours, and grows with the users."""
            return clock() - began - (self._chose_ns - chose_before_ns)

        ids: list[list[int]] = [[] for _ in users]
        t_ns: list[list[int]] = [[] for _ in users]
        places = [(user, position) for user in users for position in range(len(prompts[user]))]
        try:
            for start in range(0, len(places), self._n_batch):
                chunk = places[start : start + self._n_batch]
                ends = [at for at, (user, n) in enumerate(chunk) if n == len(prompts[user]) - 1]
                found = self._together([prompts[user][n] for user, n in chunk], chunk, ends)
                now = computed_ns()
                for at, token in zip(ends, found, strict=True):
                    ids[chunk[at][0]].append(token)
                    t_ns[chunk[at][0]].append(now)
            decode_ns = max(of_user[0] for of_user in t_ns)
            for step in range(new_tokens - 1):
                chunk = [(user, len(prompts[user]) + step) for user in users]
                fed = [self._fed(ids[user][-1], position + prompts[user][0]) for user, position in chunk]
                found = self._together(fed, chunk, users)
                now = computed_ns()
                for user in users:
                    ids[user].append(found[user])
                    t_ns[user].append(now)
        finally:
            for at in range(self._n_batch):
                self._batch.seq_id[at][0] = 0
        for user in users:
            held = int(lib.llama_memory_seq_pos_max(self._memory, user)) + 1
            if held != len(prompts[user]) + new_tokens - 1:
                raise RuntimeError(f"the KV cache of user {user} holds {held} tokens after {new_tokens}")
        return [Answer(t_ns[user], ids[user], decode_ns=decode_ns) for user in users]

    def row_counters(self) -> dict[str, Any]:
        """See runners.protocol.Session."""
        chose_ns, self._chose_ns = self._chose_ns, 0
        return {"sampling_ms": chose_ns / 1e6} if chose_ns else {}

    def _together(self, ids: list[int], places: list[tuple[int, int]], keep: Sequence[int]) -> list[int]:
        """Decode ids of several sequences as one batch; the ids with the highest logits after those at the
        indices `keep`. `places`: sequence and position of each."""
        count = self._batch.n_tokens = len(ids)
        self._ids[:count] = ids
        self._positions[:count] = [position for _, position in places]
        self._keeps[:count] = 0
        self._keeps[list(keep)] = 1
        for at, (sequence, _) in enumerate(places):
            self._batch.seq_id[at][0] = sequence
        if refused := lib.llama_decode(self._context, self._batch):
            raise self._refusal(refused, max(position for _, position in places))
        lib.llama_synchronize(self._context)
        began = time.perf_counter_ns()
        rows = [self._logits(at) for at in keep]
        found = [int(row.argmax()) for row in rows]
        if not all(math.isfinite(row[token]) for row, token in zip(rows, found, strict=True)):
            raise ValueError("not-a-number logits")
        self._chose_ns += time.perf_counter_ns() - began
        return found

    def _fed(self, token: int, position: int) -> int:
        return token if self._fixed is None else self._fixed[position % len(self._fixed)]

    def _refusal(self, code: int, position: int) -> Exception:
        if code == 1:
            n_ctx = lib.llama_n_ctx(self._context)
            return DoesNotFit(f"no KV cell left at token {position + 1}: the context holds {n_ctx}")
        return LOG.failure(f"llama_decode gave {code} at token {position + 1}")

    def _logits(self, index: int) -> np.ndarray:
        """llama.cpp's own buffer, not a copy. The buffer does not move, so the view is kept."""
        address = ctypes.addressof(lib.llama_get_logits_ith(self._context, index).contents)
        if address != self._address:
            buffer = (ctypes.c_float * self._vocab_size).from_address(address)
            self._address, self._row = address, np.frombuffer(buffer, np.float32)
        return self._row

    def empty(self, tokens: int) -> None:
        """Reset; see runners.protocol.Session. A context too short for `tokens` fails when it is full."""
        self._clear()

    def feed(self, ids: list[int], keep: int) -> np.ndarray:
        """Logits after the last `keep` of `ids`, evaluated after those before: float32 (keep, vocabulary)."""
        begin, rows = self.held(), []
        for start in range(0, len(ids), self._n_batch):
            chunk = ids[start : start + self._n_batch]
            kept = min(len(chunk), max(0, start + len(chunk) - (len(ids) - keep)))
            self._evaluate(chunk, begin + start, kept)
            rows += [self._logits(i).copy() for i in range(len(chunk) - kept, len(chunk))]
        return np.array(rows, np.float32)

    def routing(self, prompt: list[int], new_tokens: int) -> dict[str, Any] | None:
        """The experts chosen in greedy decode steps after a prompt; None for a model without experts."""
        choices = routing.Choices(self._model, self._request.options, len(prompt) + new_tokens)
        try:
            if not choices.experts:
                return None
            for position, token in enumerate(prompt):
                choices.step(token, position)
            choices.begin()
            ids = []
            for position in range(len(prompt), len(prompt) + new_tokens):
                fixed = self._fixed and self._fixed[position % len(self._fixed)]
                ids.append(choices.highest(self._vocab_size) if fixed is None else fixed)
                choices.step(ids[-1], position)
            return scoring.routing_facts(choices.experts, ids, choices.counts())
        finally:
            choices.close()

    @contextmanager
    def experts(self) -> Iterator[Heard | None]:
        """See runners.protocol.Session."""
        yield self.heard

    def counters(self) -> dict[str, Any]:
        """llama.cpp's own figures for the last generate.

        `stack_decode_ms` sums the times from each llama_decode to the end of its computation: without
        argmax and our loop. `steps_ms` is the same by our clock. `wait` is from the return of llama_decode to
        logits on the host: near zero on a CPU, where llama_decode computes and copies before it returns.
        `argmax` and `wait` per token would take another 10 KB each per 10,000 tokens; hence only their
        spread.
        """
        first, last = self._after_prefill, lib.llama_perf_context(self._context)
        prompt = evaluated_in(first)
        return {
            "evaluated_tokens": evaluated_in(last),
            "prompt_evaluated": prompt,
            "decode_evaluated": evaluated_in(last) - prompt,
            "kv_positions": self.held(),
            "stack_prefill_ms": first.t_p_eval_ms + first.t_eval_ms,
            "stack_decode_ms": last.t_p_eval_ms + last.t_eval_ms - first.t_p_eval_ms - first.t_eval_ms,
            "reused_graphs": last.n_reused,
            "sampling_ms": sum(self._argmax_ns) / 1e6,
            "steps_ms": self._steps_ns / 1e6,
            "argmax": _spread(self._argmax_ns),
            "wait": _spread(self._wait_ns),
        }

    def facts(self) -> dict[str, Any]:
        """Resolved: as llama.cpp has it after loading, `n_ctx` rounded up to a multiple of 256."""
        options, context, model = self._request.options, self._context, self._model
        on_gpu = sum(count for device, count in LOG.layers.items() if device != "CPU")
        wanted = overrides(options)
        sizes = tensor_bytes(Path(self._request.model["path"])) if wanted else {}
        return {
            "versions": self.versions(),
            "quant": quant_of(model),
            "kernels": {
                "tensors": LOG.tensors,
                "repacked": dict(LOG.repacked),
                "flash_attn": bool(LOG.flash_attn),
                "rotated_kv": LOG.rotated,
            },
            "devices": {"layers": dict(LOG.layers), "kv": dict(LOG.kv_layers), "present": self.devices()},
            "placement": placed(wanted, sizes, LOG.overridden),
            "graph_splits": LOG.splits,
            "warnings": list(LOG.warnings),
            "options": {
                "threads": lib.llama_n_threads(context),
                "threads_batch": lib.llama_n_threads_batch(context),
                "n_ctx": lib.llama_n_ctx(context),
                "n_batch": lib.llama_n_batch(context),
                "n_ubatch": lib.llama_n_ubatch(context),
                "flash_attn": bool(LOG.flash_attn),
                "type_k": LOG.kv_types[0],
                "type_v": LOG.kv_types[1],
                "gpu_layers": on_gpu,
                "mmap": any("Mapped" in name for name in LOG.memory["model"]),
                "repack": options["repack"],
                "swa_full": options.get("swa_full"),
                "n_seq_max": lib.llama_n_seq_max(context),
                "kv_unified": LOG.kv_unified,
                "cpus": options.get("cpus"),
            },
            "system_info": system_info(),
            "kv_read": "padded256",
            "memory": LOG.memory,
            "memory_resolution_bytes": RESOLUTION_BYTES,
            "logits_bytes": self._vocab_size * 4,
            "model_bytes": lib.llama_model_size(model),
            "parameters": lib.llama_model_n_params(model),
            "vocab_size": self._vocab_size,
            "trained_context": lib.llama_model_n_ctx_train(model),
            **({"draft_bytes": drafts} if (drafts := sum(LOG.unused.values())) else {}),
        }

    def versions(self) -> dict[str, str]:
        return all_versions()

    def devices(self) -> list[dict[str, Any]]:
        """Those that this build finds."""
        return devices()

    def close(self) -> None:
        lib.llama_batch_free(self._batch)
        lib.llama_free(self._context)
        if self._pool is not None:
            free(self._pool)
        lib.llama_model_free(self._model)


def _spread(ns: list[int]) -> dict[str, float]:
    low, middle, high = (min(ns), statistics.median(ns), max(ns)) if ns else (0, 0, 0)
    return {"min_us": low / 1e3, "median_us": middle / 1e3, "max_us": high / 1e3}


def all_versions(of_engine: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of the engine, llama.cpp's if None, and of what else takes part."""
    return {
        **(versions() if of_engine is None else of_engine),
        "gguf": importlib.metadata.version("gguf"),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
