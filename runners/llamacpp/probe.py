"""Kernels of llama.cpp, timed alone."""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from runners.llamacpp.lib import LOG, libggml
from runners.protocol import Request, Say
from runners.workloads.kernels import (
    LONG_ENOUGH_S,
    SHARE_OF_FREE,
    SMALLEST_BYTES,
    WORKING_SET_BYTES,
    best,
)

# Peak read bandwidth and FLOP/s of a device, measured with ggml's own matrix products.
#
# One path for every backend, CPU or GPU: a buffer of bytes is viewed as matrices of several types, and
# ggml_mul_mat multiplies them by one vector, which reads each matrix once, or one of them by many columns.
# Decode and prefill in llama.cpp run on the same kernels. All memory is freed at the end.


ROW = 4096  # elements
# enum ggml_type, bytes of a row.
TYPES = {"f32": (0, 4 * ROW), "f16": (1, 2 * ROW), "q8_0": (8, ROW // 32 * 34), "q4_0": (2, ROW // 32 * 18)}
READ = ("f32", "f16", "q8_0")
MULTIPLIED = ("f16", "q8_0", "q4_0")
COLUMNS = (64, 256, 1024, 4096, 8192)  # of the other factor: in a prefill, its tokens

LARGEST_MATRIX_BYTES = 256 << 20  # 50 us at 5 TB/s, ten times a kernel launch
ALIGNED_ROWS = 64  # makes matrices of whole 4 KiB, whatever their type
MOST_THREADS = 512  # GGML_MAX_N_THREADS; more is an abort

# Bytes that are valid in all of the types: no zero, NaN, infinity or denormal (slow on a CPU), both signs,
# and not uniform (a GPU that multiplies zeros draws less power and clocks higher).
SOUND = np.array([*range(0x2C, 0x3C), *range(0xAC, 0xBC)], dtype=np.uint8)
CHUNK_BYTES = 16 << 20

_BYTES, _F32 = 24, 0  # GGML_TYPE_I8, GGML_TYPE_F32
_CPU, _GPUS = 0, (1, 2)  # enum ggml_backend_dev_type: a GPU's own memory, or the host's


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


# Result, then arguments (ggml.h, ggml-alloc.h, ggml-backend.h); pointers are opaque.
_P = c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "init": (_P, _InitParams),
    "free": (None, _P),
    "tensor_overhead": (c_size_t,),
    "graph_overhead_custom": (c_size_t, c_size_t, c_bool),
    "new_tensor_1d": (_P, _P, c_int, c_int64),
    "new_tensor_2d": (_P, _P, c_int, c_int64, c_int64),
    "mul_mat": (_P, _P, _P, _P),
    "new_graph_custom": (_P, _P, c_size_t, c_bool),
    "build_forward_expand": (None, _P, _P),
    "backend_alloc_ctx_tensors": (_P, _P, _P),
    "backend_alloc_ctx_tensors_from_buft": (_P, _P, _P),
    "backend_alloc_buffer": (_P, _P, c_size_t),
    "backend_buffer_get_base": (_P, _P),
    "backend_buffer_free": (None, _P),
    "backend_get_default_buffer_type": (_P, _P),
    "backend_buft_name": (c_char_p, _P),
    "backend_get_max_size": (c_size_t, _P),
    "backend_tensor_alloc": (c_int, _P, _P, _P),
    "backend_tensor_set": (None, _P, _P, c_size_t, c_size_t),
    "backend_graph_compute_async": (c_int, _P, _P),
    "backend_synchronize": (None, _P),
    "backend_supports_op": (c_bool, _P, _P),
    "backend_free": (None, _P),
    "backend_dev_count": (c_size_t,),
    "backend_dev_get": (_P, c_size_t),
    "backend_dev_type": (c_int, _P),
    "backend_dev_name": (c_char_p, _P),
    "backend_dev_memory": (None, _P, _P, _P),
    "backend_dev_init": (_P, _P, c_char_p),
    "backend_dev_backend_reg": (_P, _P),
    "backend_reg_get_proc_address": (_P, _P, c_char_p),
}


class _Ggml:
    """ggml's functions without their prefix, typed: a bare int would be truncated to 32 bits."""

    def __init__(self) -> None:
        for name, (result, *arguments) in _SIGNATURES.items():
            function = libggml[f"ggml_{name}"]
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ggml_{name} has no signature here")


ggml: Any = _Ggml()


class NoKernel(Exception):
    """The device has no kernel for such a matrix."""


@dataclass(frozen=True)
class Device:
    """A backend and its memory. `size`: bytes of the working set, all written. `places`: the buffer types a
    matrix may be in, the plain one by the name "" (a CPU has others, which repack it)."""

    name: str
    backend: int
    memory: int
    size: int
    places: dict[str, int]


@dataclass(frozen=True)
class Graph:
    """Products on a device; `amount`: bytes or operations per pass."""

    device: Device
    pointer: int
    amount: float

    def seconds(self, passes: int = 1) -> float:
        """Time of consecutive passes. Raises RuntimeError."""
        start = time.perf_counter()
        for _ in range(passes):
            if ggml.backend_graph_compute_async(self.device.backend, self.pointer):
                raise LOG.failure(f"{self.device.name} could not compute")
        ggml.backend_synchronize(self.device.backend)
        return time.perf_counter() - start


def measure(request: Request, say: Say) -> dict[str, Any]:
    """Read bandwidth and matrix rate of the request's device: the best over rounds for each type, and the
    best of all.

    Options: `measure`, a list of `read` and `matrix`; `threads` (of the CPU); `working_set_bytes` to read
    (default 2 GiB, at most a quarter of what is free; for ggml all of a CPU's memory is free). Raises
    ValueError, RuntimeError, DoesNotFit.
    """
    probes = request.options["measure"]
    threads = int(request.options.get("threads") or 0)
    if request.device == "cpu" and not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads must be 1 to {MOST_THREADS}, not {threads}")
    LOG.forget()
    wanted = SMALLEST_BYTES
    if "read" in probes:
        wanted = int(request.options.get("working_set_bytes") or WORKING_SET_BYTES)
    say("fill")
    with opened(request.device, threads, wanted) as device, ExitStack() as stack:
        say("read")
        vectors, matrices = {}, {}
        for kind in READ if "read" in probes else ():
            with suppress(NoKernel):
                name = f"ggml mul_mat {kind} x f32 vector, {device.name}"
                vectors[name] = stack.enter_context(vector_products(device, kind))
        kernels = best(vectors)
        say("multiply")
        for kind, place in itertools.product(MULTIPLIED if "matrix" in probes else (), device.places):
            with suppress(NoKernel):
                what = f"{kind} in {place}" if place else kind
                name = f"ggml mul_mat {what} x f32 matrix, {device.name}"
                matrices[name] = stack.enter_context(large_product(device, kind, device.places[place]))
        matrix_kernels = best(matrices)
    facts: dict[str, Any] = {"threads": threads if request.device == "cpu" else None}
    measured = {"read": (kernels, "read_bytes_per_s"), "matrix": (matrix_kernels, "flops_per_s")}
    for part in probes:
        rates, unit = measured[part]
        if not rates:
            raise RuntimeError(f"{device.name} has no kernel for {', '.join(TYPES)}")
        fastest = max(rates, key=lambda kernel: rates[kernel])
        facts[part] = {unit: rates[fastest], "kernel": fastest, "kernels": rates}
        if part == "read":
            facts[part]["working_set_bytes"] = device.size
    return facts


@contextmanager
def opened(wanted: str, threads: int, size: int) -> Iterator[Device]:
    """The requested device, with at most `size` bytes allocated and filled."""
    found = (ggml.backend_dev_get(i) for i in range(ggml.backend_dev_count()))
    kinds = (_CPU,) if wanted == "cpu" else _GPUS  # the only GPU visible to this process
    chosen = next((each for each in found if ggml.backend_dev_type(each) in kinds), None)
    if chosen is None:
        raise RuntimeError(f"device {wanted}: this llama.cpp build has no GPU support, or finds no GPU")
    name = ggml.backend_dev_name(chosen).decode()
    free, total = c_size_t(), c_size_t()
    ggml.backend_dev_memory(chosen, ctypes.byref(free), ctypes.byref(total))
    with ExitStack() as stack:
        backend = _held(stack, ggml.backend_dev_init(chosen, None), ggml.backend_free, f"using {name}")
        places = {"": ggml.backend_get_default_buffer_type(backend)}
        if wanted == "cpu":
            _function(chosen, "set_n_threads", None, c_void_p, c_int)(backend, threads)
            extra = _function(chosen, "dev_get_extra_bufts", ctypes.POINTER(c_void_p), c_void_p)(chosen)
            for place in itertools.takewhile(bool, extra or ()):
                places[ggml.backend_buft_name(place).decode()] = place
        size = min(size, free.value // SHARE_OF_FREE, ggml.backend_get_max_size(backend))
        if size < SMALLEST_BYTES:
            raise RuntimeError(
                f"{size / 1e6:.0f} MB on {name} is too little to measure memory rather than a cache"
            )
        what = f"{size / 1e6:.0f} MB on {name}"
        buffer = _held(stack, ggml.backend_alloc_buffer(backend, size), ggml.backend_buffer_free, what)
        device = Device(name, backend, buffer, size, places)
        _fill(device)
        yield device


@contextmanager
def vector_products(device: Device, kind: str) -> Iterator[Graph]:
    """All of the working set, as matrices of a type, by a vector: bytes. Raises NoKernel."""
    number, row_bytes = TYPES[kind]
    rows = min(LARGEST_MATRIX_BYTES, device.size // 4) // row_bytes // ALIGNED_ROWS * ALIGNED_ROWS
    count = device.size // (rows * row_bytes)
    base = ggml.backend_buffer_get_base(device.memory)
    with ExitStack() as stack:
        context = _context(stack, tensors=count)
        matrices = [ggml.new_tensor_2d(context, number, ROW, rows) for _ in range(count)]
        for index, matrix in enumerate(matrices):
            if ggml.backend_tensor_alloc(device.memory, matrix, base + index * rows * row_bytes):
                raise LOG.failure(f"a matrix on {device.name}")
        yield _graph(stack, device, matrices, 1, count * rows * row_bytes)


@contextmanager
def large_product(device: Device, kind: str, place: int) -> Iterator[Graph]:
    """The product of a square matrix with enough columns to take long enough, or with the most columns:
    floating-point operations. Raises NoKernel."""
    number, row_bytes = TYPES[kind]
    with ExitStack() as stack:
        context = _context(stack, tensors=1)
        matrix = ggml.new_tensor_2d(context, number, ROW, ROW)
        held = ggml.backend_alloc_ctx_tensors_from_buft(context, place)
        _held(stack, held, ggml.backend_buffer_free, f"a matrix on {device.name}")
        written = False
        for columns in COLUMNS:
            with ExitStack() as inner:
                graph = _graph(inner, device, [matrix], columns, 2 * ROW * ROW * columns)
                if not written:  # only now: without a kernel it cannot be repacked either
                    values = _sound(ROW * row_bytes)
                    ggml.backend_tensor_set(matrix, values.ctypes.data, 0, values.nbytes)
                    written = True
                graph.seconds()  # loads kernels
                if graph.seconds() >= LONG_ENOUGH_S or columns == COLUMNS[-1]:
                    yield graph
                    return


@contextmanager
def uniform_products(
    device: Device, number: int, row_bytes: int, rows: int, count: int, place: int
) -> Iterator[Graph]:
    """So many matrices of a type, in memory of their own, by a vector: bytes. Raises NoKernel."""
    with ExitStack() as stack:
        context = _context(stack, tensors=count)
        matrices = [ggml.new_tensor_2d(context, number, ROW, rows) for _ in range(count)]
        held = ggml.backend_alloc_ctx_tensors_from_buft(context, place)
        _held(stack, held, ggml.backend_buffer_free, f"matrices on {device.name}")
        graph = _graph(stack, device, matrices, 1, count * rows * row_bytes)
        values = _sound(rows * row_bytes)
        for matrix in matrices:  # only now: without a kernel they cannot be repacked either
            ggml.backend_tensor_set(matrix, values.ctypes.data, 0, values.nbytes)
        yield graph


def _graph(stack: ExitStack, device: Device, matrices: list[int], columns: int, amount: float) -> Graph:
    """The products of each matrix by the same random columns of ROW elements. Raises NoKernel."""
    context = _context(stack, tensors=len(matrices) + 1, nodes=2 * len(matrices) + 2)
    graph = ggml.new_graph_custom(context, 2 * len(matrices) + 2, False)
    factor = ggml.new_tensor_2d(context, _F32, ROW, columns)
    for matrix in matrices:
        product = ggml.mul_mat(context, matrix, factor)
        if not ggml.backend_supports_op(device.backend, product):
            raise NoKernel
        ggml.build_forward_expand(graph, product)
    held = ggml.backend_alloc_ctx_tensors(context, device.backend)
    _held(stack, held, ggml.backend_buffer_free, f"products on {device.name}")
    values = np.random.default_rng(0).uniform(-1, 1, (columns, ROW)).astype(np.float32)
    ggml.backend_tensor_set(factor, values.ctypes.data, 0, values.nbytes)
    return Graph(device, graph, float(amount))


def _context(stack: ExitStack, tensors: int, nodes: int = 0) -> int:
    """A ggml_context that holds descriptions only, no data: tensors, and a graph of so many nodes."""
    room = tensors * ggml.tensor_overhead() + ggml.graph_overhead_custom(max(1, nodes), False)
    return _held(stack, ggml.init(_InitParams(room, None, True)), ggml.free, "ggml's context")


def _fill(device: Device) -> None:
    """Write every byte: unwritten memory is not mapped."""
    with ExitStack() as stack:
        whole = ggml.new_tensor_1d(_context(stack, tensors=1), _BYTES, device.size)
        if ggml.backend_tensor_alloc(device.memory, whole, ggml.backend_buffer_get_base(device.memory)):
            raise LOG.failure(f"memory on {device.name}")
        chunk = _sound(CHUNK_BYTES)
        for offset in range(0, device.size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, device.size - offset)
            ggml.backend_tensor_set(whole, chunk.ctypes.data, offset, length)


def _sound(count: int) -> np.ndarray:
    return SOUND[np.random.default_rng(0).integers(0, SOUND.size, count, np.uint8)]


def _function(device: int, name: str, *types: Any) -> Any:
    """A backend's own function; the header has only its type."""
    registry = ggml.backend_dev_backend_reg(device)
    found = ggml.backend_reg_get_proc_address(registry, f"ggml_backend_{name}".encode())
    if not found:
        raise RuntimeError(f"this build of llama.cpp lacks ggml_backend_{name}")
    return ctypes.CFUNCTYPE(*types)(found)


def _held(stack: ExitStack, pointer: int | None, free: Any, what: str) -> int:
    """Free the pointer when the stack unwinds. Raises the logged error if it is null."""
    if not pointer:
        raise LOG.failure(what)
    stack.callback(free, pointer)
    return pointer


# How fast ggml multiplies matrices of each type of weights by a vector, as a decode step does.
#
# On a CPU unpacking a type costs as much as reading it, and differs by type, processor and kernel: what
# decode of a type costs can only be measured, but needs no model. Types take turns, so that between two
# passes over the same bytes those of all other types went through the caches.


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
    `repacked_bytes_per_s` in the layout into which llama.cpp repacks this type on this CPU, None where it
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
